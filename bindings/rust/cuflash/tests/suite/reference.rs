//! Attention written out in f64, and numbers to try it on.

use cuflash::Element;

/// The extents and options of a problem. Tensors are dense `[batch, heads, length, head_dim]`.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub batch: usize,
    pub heads: usize,
    pub heads_kv: usize,
    pub len_q: usize,
    pub len_k: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
    pub causal: bool,
    pub window: Option<(usize, usize)>,
    /// The centre of row i is i plus this; `None` is `len_k - len_q`.
    pub offset: Option<i64>,
    pub softcap: Option<f64>,
    /// `[batch, heads]`.
    pub slopes: Option<&'a [f64]>,
    /// `[batch, heads, len_q, len_k]`.
    pub bias: Option<&'a [f64]>,
    /// `[heads]`.
    pub sinks: Option<&'a [f64]>,
    /// What dropout multiplies the probabilities by, `[batch, heads, len_q, len_k]`.
    pub dropout: Option<&'a [f64]>,
}

/// One query row: batch, head, index.
type Row = (usize, usize, usize);

/// What the backward pass finds; of the bias for each score.
pub struct Derivatives {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub bias: Vec<f64>,
    pub sinks: Vec<f64>,
    pub delta: Vec<f64>,
}

impl Case<'_> {
    pub fn new(batch: usize, heads: usize, heads_kv: usize, len_q: usize, len_k: usize) -> Self {
        Self {
            batch,
            heads,
            heads_kv,
            len_q,
            len_k,
            head_dim: 40,
            head_dim_v: 40,
            causal: false,
            window: None,
            offset: None,
            softcap: None,
            slopes: None,
            bias: None,
            sinks: None,
            dropout: None,
        }
    }

    /// With so many channels in every tensor.
    pub fn head_dim(self, head_dim: usize) -> Self {
        Self { head_dim, head_dim_v: head_dim, ..self }
    }

    pub fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    pub fn shape_q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.len_q, self.head_dim]
    }

    pub fn shape_k(&self) -> [usize; 4] {
        [self.batch, self.heads_kv, self.len_k, self.head_dim]
    }

    pub fn shape_v(&self) -> [usize; 4] {
        [self.batch, self.heads_kv, self.len_k, self.head_dim_v]
    }

    pub fn shape_o(&self) -> [usize; 4] {
        [self.batch, self.heads, self.len_q, self.head_dim_v]
    }

    pub fn shape_lse(&self) -> [usize; 3] {
        [self.batch, self.heads, self.len_q]
    }

    pub fn shape_scores(&self) -> [usize; 4] {
        [self.batch, self.heads, self.len_q, self.len_k]
    }

    fn centre(&self, row: usize) -> i64 {
        row as i64 + self.offset.unwrap_or(self.len_k as i64 - self.len_q as i64)
    }

    fn sees(&self, row: usize, key: usize) -> bool {
        let (centre, key) = (self.centre(row), key as i64);
        (!self.causal || key <= centre)
            && self.window.map_or(true, |(left, right)| {
                centre - left as i64 <= key && key <= centre + right as i64
            })
    }

    /// The number of a query row in a dense tensor.
    fn at_row(&self, (batch, head, row): Row) -> usize {
        (batch * self.heads + head) * self.len_q + row
    }

    /// The number of the key row that a query head reads.
    fn at_key(&self, (batch, head, _): Row, key: usize) -> usize {
        let head = head / (self.heads / self.heads_kv);
        (batch * self.heads_kv + head) * self.len_k + key
    }

    /// Calls with batch, head, row for every query row.
    fn for_rows(&self, mut row: impl FnMut(Row)) {
        for batch in 0..self.batch {
            for head in 0..self.heads {
                for index in 0..self.len_q {
                    row((batch, head, index));
                }
            }
        }
    }

    /// The scaled product of a row and a key, capped.
    fn product(&self, q: &[f64], k: &[f64], at: Row, key: usize) -> f64 {
        let q = &q[self.at_row(at) * self.head_dim..][..self.head_dim];
        let k = &k[self.at_key(at, key) * self.head_dim..];
        let product = self.scale() * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
        self.softcap.map_or(product, |cap| cap * (product / cap).tanh())
    }

    fn score(&self, q: &[f64], k: &[f64], at: Row, key: usize) -> f64 {
        let (batch, head, row) = at;
        if !self.sees(row, key) {
            return f64::NEG_INFINITY;
        }
        let distance = (self.centre(row) - key as i64).abs() as f64;
        let slope = self.slopes.map_or(0.0, |slopes| slopes[batch * self.heads + head]);
        let bias = self.bias.map_or(0.0, |bias| bias[self.at_row(at) * self.len_k + key]);
        self.product(q, k, at, key) - slope * distance + bias
    }

    /// A row's probabilities, before dropout, and its LSE.
    fn probabilities(&self, q: &[f64], k: &[f64], at: Row) -> (Vec<f64>, f64) {
        let scores: Vec<f64> = (0..self.len_k).map(|key| self.score(q, k, at, key)).collect();
        let sink = self.sinks.map(|sinks| sinks[at.1]);
        let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if top == f64::NEG_INFINITY {
            return (vec![0.0; self.len_k], top);
        }
        let sum: f64 = scores.iter().copied().chain(sink).map(|score| (score - top).exp()).sum();
        let lse = top + sum.ln();
        (scores.iter().map(|score| (score - lse).exp()).collect(), lse)
    }

    fn kept(&self, at: Row, key: usize) -> f64 {
        self.dropout.map_or(1.0, |kept| kept[self.at_row(at) * self.len_k + key])
    }

    /// O and LSE.
    pub fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut lse) = (vec![0.0; self.shape_o().iter().product()], Vec::new());
        self.for_rows(|at| {
            let (p, row_lse) = self.probabilities(q, k, at);
            lse.push(row_lse);
            let o = &mut o[self.at_row(at) * self.head_dim_v..];
            for (key, p) in p.iter().enumerate() {
                let p = p * self.kept(at, key);
                for d in 0..self.head_dim_v {
                    o[d] += p * v[self.at_key(at, key) * self.head_dim_v + d];
                }
            }
        });
        (o, lse)
    }

    /// Probabilities before dropout, of all rows.
    pub fn weights(&self, q: &[f64], k: &[f64]) -> Vec<f64> {
        let mut weights = Vec::new();
        self.for_rows(|at| weights.extend(self.probabilities(q, k, at).0));
        weights
    }

    /// From the gradients of O and LSE.
    pub fn backward(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        d_o: &[f64],
        d_lse: Option<&[f64]>,
    ) -> Derivatives {
        let mut d = Derivatives {
            q: vec![0.0; q.len()],
            k: vec![0.0; k.len()],
            v: vec![0.0; v.len()],
            bias: Vec::new(),
            sinks: vec![0.0; self.heads],
            delta: Vec::new(),
        };
        self.for_rows(|at| {
            let (p, lse) = self.probabilities(q, k, at);
            let at_q = self.at_row(at) * self.head_dim;
            let d_o = &d_o[self.at_row(at) * self.head_dim_v..][..self.head_dim_v];
            let dp: Vec<f64> = (0..self.len_k)
                .map(|key| {
                    let v = &v[self.at_key(at, key) * self.head_dim_v..];
                    self.kept(at, key) * d_o.iter().zip(v).map(|(a, b)| a * b).sum::<f64>()
                })
                .collect();
            let delta: f64 = p.iter().zip(&dp).map(|(a, b)| a * b).sum();
            let d_lse = d_lse.map_or(0.0, |d_lse| d_lse[self.at_row(at)]);
            d.delta.push(delta);
            if let Some(sinks) = self.sinks {
                d.sinks[at.1] += (sinks[at.1] - lse).exp() * (d_lse - delta);
            }
            for key in 0..self.len_k {
                let ds = p[key] * (dp[key] - delta + d_lse);
                d.bias.push(ds);
                let slope = self
                    .softcap
                    .map_or(1.0, |cap| 1.0 - (self.product(q, k, at, key) / cap).powi(2));
                let ds = self.scale() * ds * slope;
                let at_k = self.at_key(at, key) * self.head_dim;
                for c in 0..self.head_dim {
                    d.q[at_q + c] += ds * k[at_k + c];
                    d.k[at_k + c] += ds * q[at_q + c];
                }
                let at_v = self.at_key(at, key) * self.head_dim_v;
                for (c, d_o) in d_o.iter().enumerate() {
                    d.v[at_v + c] += p[key] * self.kept(at, key) * d_o;
                }
            }
        });
        d
    }
}

/// The same numbers every time, in -1 to 1, rounded to the element type.
pub fn numbers<T: Element + From<f32>>(count: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            T::from((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

pub fn to_f64<T: Element + Into<f32>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value.into())).collect()
}

/// The largest difference; NaN where one side is, unless both are the same infinity.
pub fn error<T: Element + Into<f32>>(values: &[T], expected: &[f64]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let mut worst = 0.0;
    for (&value, &expected) in values.iter().zip(expected) {
        let value = f64::from(value.into());
        let error = if value == expected { 0.0 } else { (value - expected).abs() };
        if error.is_nan() {
            return error;
        }
        worst = f64::max(worst, error);
    }
    worst
}
