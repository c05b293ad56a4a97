//! Attention written out in f64, and numbers to try it on.

use cuflash::Element;

/// The extents and options of a problem. Tensors are dense `[batch, heads, length, head_dim]`.
#[derive(Clone, Copy)]
pub struct Case {
    pub batch: usize,
    pub heads: usize,
    pub heads_kv: usize,
    pub len_q: usize,
    pub len_k: usize,
    pub head_dim: usize,
    pub causal: bool,
    pub window: Option<(usize, usize)>,
    /// The centre of row i is i plus this; `None` is `len_k - len_q`.
    pub offset: Option<i64>,
}

impl Case {
    pub fn new(batch: usize, heads: usize, heads_kv: usize, len_q: usize, len_k: usize) -> Self {
        let (causal, window, offset) = (false, None, None);
        Self { batch, heads, heads_kv, len_q, len_k, head_dim: 40, causal, window, offset }
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

    pub fn shape_lse(&self) -> [usize; 3] {
        [self.batch, self.heads, self.len_q]
    }

    fn sees(&self, row: usize, key: usize) -> bool {
        let centre = row as i64 + self.offset.unwrap_or(self.len_k as i64 - self.len_q as i64);
        let key = key as i64;
        (!self.causal || key <= centre)
            && self.window.map_or(true, |(left, right)| {
                centre - left as i64 <= key && key <= centre + right as i64
            })
    }

    /// Where the vector of a row begins.
    fn at_q(&self, batch: usize, head: usize, row: usize) -> usize {
        ((batch * self.heads + head) * self.len_q + row) * self.head_dim
    }

    fn at_k(&self, batch: usize, head: usize, row: usize) -> usize {
        let head = head / (self.heads / self.heads_kv);
        ((batch * self.heads_kv + head) * self.len_k + row) * self.head_dim
    }

    /// Calls with batch, head, row for every query row.
    fn for_rows(&self, mut row: impl FnMut(usize, usize, usize)) {
        for batch in 0..self.batch {
            for head in 0..self.heads {
                for index in 0..self.len_q {
                    row(batch, head, index);
                }
            }
        }
    }

    /// A row's probabilities and its LSE.
    fn probabilities(&self, q: &[f64], k: &[f64], at: (usize, usize, usize)) -> (Vec<f64>, f64) {
        let (batch, head, row) = at;
        let q = &q[self.at_q(batch, head, row)..][..self.head_dim];
        let scores: Vec<f64> = (0..self.len_k)
            .map(|key| {
                let k = &k[self.at_k(batch, head, key)..][..self.head_dim];
                if self.sees(row, key) {
                    self.scale() * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()
                } else {
                    f64::NEG_INFINITY
                }
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if top == f64::NEG_INFINITY {
            return (vec![0.0; self.len_k], top);
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (weights.iter().map(|weight| weight / sum).collect(), top + sum.ln())
    }

    /// O and LSE.
    pub fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut lse) = (vec![0.0; q.len()], Vec::new());
        self.for_rows(|batch, head, row| {
            let (p, row_lse) = self.probabilities(q, k, (batch, head, row));
            lse.push(row_lse);
            let o = &mut o[self.at_q(batch, head, row)..];
            for (key, p) in p.iter().enumerate() {
                for d in 0..self.head_dim {
                    o[d] += p * v[self.at_k(batch, head, key) + d];
                }
            }
        });
        (o, lse)
    }

    /// dQ, dK, dV.
    pub fn backward(&self, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64]) -> [Vec<f64>; 3] {
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        self.for_rows(|batch, head, row| {
            let (p, _) = self.probabilities(q, k, (batch, head, row));
            let at_q = self.at_q(batch, head, row);
            let d_o = &d_o[at_q..][..self.head_dim];
            let dp: Vec<f64> = (0..self.len_k)
                .map(|key| {
                    let v = &v[self.at_k(batch, head, key)..];
                    d_o.iter().zip(v).map(|(a, b)| a * b).sum()
                })
                .collect();
            let delta: f64 = p.iter().zip(&dp).map(|(a, b)| a * b).sum();
            for key in 0..self.len_k {
                let ds = self.scale() * p[key] * (dp[key] - delta);
                let at_k = self.at_k(batch, head, key);
                for d in 0..self.head_dim {
                    dq[at_q + d] += ds * k[at_k + d];
                    dk[at_k + d] += ds * q[at_q + d];
                    dv[at_k + d] += p[key] * d_o[d];
                }
            }
        });
        [dq, dk, dv]
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
