//! What scores, batches and gradients can have beyond the plain call, on the CPU device against f64.

use std::ops::Range;

use cuflash::{
    Attention, Cache, Decode, Device, Element, Extras, Gradients, Handle, Output, Sequences,
    Tensor, TensorMut, View, ViewMut, F16,
};

use crate::reference::{error, numbers, to_f64, Case, Derivatives};

fn cpu() -> Handle {
    Handle::new(Device::Cpu).unwrap()
}

fn nan<T: Element + From<f32>>(shape: &[usize]) -> Vec<T> {
    vec![T::from(f32::NAN); shape.iter().product()]
}

/// The inputs of a case.
struct Inputs<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    d_o: Vec<T>,
}

impl<T: Element + From<f32> + Into<f32>> Inputs<T> {
    fn new(case: &Case) -> Self {
        let values = |shape: [usize; 4], seed| numbers(shape.iter().product(), seed);
        Self {
            q: values(case.shape_q(), 1),
            k: values(case.shape_k(), 2),
            v: values(case.shape_v(), 3),
            d_o: values(case.shape_o(), 4),
        }
    }

    fn problem(&self, case: &Case) -> Attention<'_, T> {
        let problem = Attention::new(
            Tensor::new(&self.q, case.shape_q()).unwrap(),
            Tensor::new(&self.k, case.shape_k()).unwrap(),
            Tensor::new(&self.v, case.shape_v()).unwrap(),
        )
        .unwrap();
        if case.causal {
            problem.causal()
        } else {
            problem
        }
    }

    fn forward(&self, case: &Case) -> (Vec<f64>, Vec<f64>) {
        case.forward(&to_f64(&self.q), &to_f64(&self.k), &to_f64(&self.v))
    }

    fn backward(&self, case: &Case, d_lse: Option<&[f64]>) -> Derivatives {
        let [q, k, v, d_o] = [&self.q, &self.k, &self.v, &self.d_o].map(|values| to_f64(values));
        case.backward(&q, &k, &v, &d_o, d_lse)
    }
}

/// The outputs of a case, o of `O` and gradients of `G`.
struct Outputs<O, G> {
    o: Vec<O>,
    lse: Vec<f32>,
    dq: Vec<G>,
    dk: Vec<G>,
    dv: Vec<G>,
}

impl<O, G> Outputs<O, G>
where
    O: Element + From<f32> + Into<f32>,
    G: Element + From<f32> + Into<f32>,
{
    fn new(case: &Case) -> Self {
        Self {
            o: nan(&case.shape_o()),
            lse: nan(&case.shape_lse()),
            dq: nan(&case.shape_q()),
            dk: nan(&case.shape_k()),
            dv: nan(&case.shape_v()),
        }
    }

    fn forward<T: Element>(&mut self, problem: &Attention<'_, T>, case: &Case)
    where
        O: Output<T>,
    {
        let mut o = TensorMut::new(&mut self.o, case.shape_o()).unwrap();
        let mut lse = ViewMut::new(&mut self.lse, case.shape_lse()).unwrap();
        problem.forward(&cpu(), &mut o, Some(&mut lse)).unwrap();
    }

    fn backward<T: Element>(
        &mut self,
        problem: &Attention<'_, T>,
        case: &Case,
        d_o: &[T],
        extras: Extras<'_>,
    ) where
        O: Output<T>,
        G: Output<T>,
    {
        problem
            .backward_with(
                &cpu(),
                Tensor::new(&self.o, case.shape_o()).unwrap(),
                View::new(&self.lse, case.shape_lse()).unwrap(),
                Tensor::new(d_o, case.shape_o()).unwrap(),
                Gradients {
                    dq: &mut TensorMut::new(&mut self.dq, case.shape_q()).unwrap(),
                    dk: &mut TensorMut::new(&mut self.dk, case.shape_k()).unwrap(),
                    dv: &mut TensorMut::new(&mut self.dv, case.shape_v()).unwrap(),
                },
                extras,
            )
            .unwrap();
    }

    #[track_caller]
    fn check_forward(&self, (o, lse): (Vec<f64>, Vec<f64>)) {
        let errors = [error(&self.o, &o), error(&self.lse, &lse)];
        assert!(errors.iter().all(|&error| error < 1e-5), "o, lse: {errors:?}");
    }

    #[track_caller]
    fn check_backward(&self, expected: &Derivatives) {
        let errors = [
            error(&self.dq, &expected.q),
            error(&self.dk, &expected.k),
            error(&self.dv, &expected.v),
        ];
        assert!(errors.iter().all(|&error| error < 1e-5), "dq, dk, dv: {errors:?}");
    }
}

/// Softcap, slopes, bias and sinks, each alone and all at once, with values of their own head_dim and
/// every further output of backward.
#[test]
fn modifiers() {
    let plain = Case { causal: true, head_dim_v: 24, ..Case::new(2, 4, 2, 9, 13) };
    let slopes = [0.5_f32, 0.25, 0.125, 0.0, 1.0, 0.75, 0.5, 0.25];
    let mut bias = numbers::<f32>(plain.shape_scores().iter().product(), 5);
    bias[3] = f32::NEG_INFINITY;
    let sinks = [0.5_f32, -1.0, f32::NEG_INFINITY, 2.0];
    let d_lse = numbers::<f32>(plain.shape_lse().iter().product(), 6);
    let [wide_slopes, wide_bias, wide_sinks] = [to_f64(&slopes), to_f64(&bias), to_f64(&sinks)];
    let all = Case {
        softcap: Some(0.7),
        slopes: Some(&wide_slopes),
        bias: Some(&wide_bias),
        sinks: Some(&wide_sinks),
        ..plain
    };
    for case in [
        Case { softcap: all.softcap, ..plain },
        Case { slopes: all.slopes, ..plain },
        Case { bias: all.bias, ..plain },
        Case { sinks: all.sinks, ..plain },
        all,
    ] {
        let inputs = Inputs::<f32>::new(&case);
        let mut problem = inputs.problem(&case);
        if let Some(cap) = case.softcap {
            problem = problem.softcap(cap as f32);
        }
        if case.slopes.is_some() {
            problem = problem.alibi_slopes(View::new(&slopes, [2, 4]).unwrap());
        }
        if case.bias.is_some() {
            problem = problem.bias(View::new(&bias, case.shape_scores()).unwrap());
        }
        if case.sinks.is_some() {
            problem = problem.sinks(View::new(&sinks, [4]).unwrap());
        }
        let mut outputs = Outputs::<f32, f32>::new(&case);
        outputs.forward(&problem, &case);
        outputs.check_forward(inputs.forward(&case));

        let (mut delta, mut d_bias, mut d_sinks) =
            (nan::<f32>(&case.shape_lse()), nan::<f32>(&case.shape_scores()), [f32::NAN; 4]);
        let mut delta_view = ViewMut::new(&mut delta, case.shape_lse()).unwrap();
        let mut d_bias_view = ViewMut::new(&mut d_bias, case.shape_scores()).unwrap();
        let mut d_sinks_view = ViewMut::new(&mut d_sinks, [4]).unwrap();
        let mut extras = Extras::new()
            .d_lse(View::new(&d_lse, case.shape_lse()).unwrap())
            .delta(&mut delta_view);
        if case.bias.is_some() {
            extras = extras.d_bias(&mut d_bias_view);
        }
        if case.sinks.is_some() {
            extras = extras.d_sinks(&mut d_sinks_view);
        }
        outputs.backward(&problem, &case, &inputs.d_o, extras);
        let expected = inputs.backward(&case, Some(&to_f64(&d_lse)));
        outputs.check_backward(&expected);
        assert!(error(&delta, &expected.delta) < 1e-5);
        assert!(case.bias.is_none() || error(&d_bias, &expected.bias) < 1e-5);
        assert!(case.sinks.is_none() || error(&d_sinks, &expected.sinks) < 1e-5);

        // The sums of o * d_o, given, stand for o.
        let mut again = Outputs::<f32, f32>::new(&case);
        again.lse.clone_from(&outputs.lse);
        let extras = Extras::new()
            .d_lse(View::new(&d_lse, case.shape_lse()).unwrap())
            .given_delta(View::new(&delta, case.shape_lse()).unwrap());
        again.backward(&problem, &case, &inputs.d_o, extras);
        again.check_backward(&expected);
    }
}

/// A bias for all sequences and rows, and slopes for all sequences; the bias in 16 bits.
#[test]
fn modifiers_that_repeat() {
    let plain = Case::new(2, 3, 3, 5, 7);
    let slopes = [0.5_f32, 0.25, 0.125];
    let bias = numbers::<F16>(3 * 7, 7);
    let everywhere: Vec<f64> =
        (0..2 * 3 * 5).flat_map(|row| to_f64(&bias[row / 5 % 3 * 7..][..7])).collect();
    let slopes_everywhere = to_f64(&slopes).repeat(2);
    let case = Case { slopes: Some(&slopes_everywhere), bias: Some(&everywhere), ..plain };
    let inputs = Inputs::<f32>::new(&case);
    let problem = inputs
        .problem(&case)
        .alibi_slopes(View::new(&slopes, [1, 3]).unwrap())
        .bias(View::new(&bias, [1, 3, 1, 7]).unwrap());
    let mut outputs = Outputs::<f32, f32>::new(&case);
    outputs.forward(&problem, &case);
    outputs.check_forward(inputs.forward(&case));
    let mut d_bias = nan::<F16>(&[3, 7]);
    let mut d_bias_view = ViewMut::new(&mut d_bias, [1, 3, 1, 7]).unwrap();
    outputs.backward(&problem, &case, &inputs.d_o, Extras::new().d_bias(&mut d_bias_view));
    let expected = inputs.backward(&case, None);
    let mut sums = vec![0.0; 3 * 7];
    for (at, d) in expected.bias.iter().enumerate() {
        sums[at / (5 * 7) % 3 * 7 + at % 7] += d;
    }
    assert!(error(&d_bias, &sums) < 1e-3);
}

/// With the identity as values o shows what dropout keeps; the backward pass drops the same.
#[test]
fn dropout() {
    let plain = Case { head_dim_v: 64, ..Case::new(2, 2, 2, 50, 64) };
    let mut inputs = Inputs::<f32>::new(&plain);
    for (at, value) in inputs.v.iter_mut().enumerate() {
        *value = if at % 64 == at / 64 % 64 { 1.0 } else { 0.0 };
    }
    let p = 0.25;
    let dropped = |problem: Attention<'_, f32>| {
        let mut outputs = Outputs::<f32, f32>::new(&plain);
        outputs.forward(&problem, &plain);
        outputs
    };
    let problem = inputs.problem(&plain).dropout(p, 11, 3);
    let mut outputs = dropped(problem);
    let probabilities = plain.weights(&to_f64(&inputs.q), &to_f64(&inputs.k));
    let kept: Vec<f64> = outputs
        .o
        .iter()
        .map(|&o| if o == 0.0 { 0.0 } else { 1.0 / (1.0 - f64::from(p)) })
        .collect();
    let expected: Vec<f64> = probabilities.iter().zip(&kept).map(|(p, kept)| p * kept).collect();
    assert!(error(&outputs.o, &expected) < 1e-5);
    let share = kept.iter().filter(|&&kept| kept == 0.0).count() as f64 / kept.len() as f64;
    assert!((share - f64::from(p)).abs() < 0.02, "dropped {share}"); // 4 standard deviations
    let case = Case { dropout: Some(&kept), ..plain };
    outputs.backward(&problem, &case, &inputs.d_o, Extras::new());
    outputs.check_backward(&inputs.backward(&case, None));

    let state = [11, 3];
    let from_memory = inputs.problem(&plain).dropout_from(p, View::new(&state, [2]).unwrap());
    assert_eq!(dropped(from_memory).o, outputs.o);
    for (seed, offset) in [(12, 3), (11, 3 + 16)] {
        assert_ne!(dropped(inputs.problem(&plain).dropout(p, seed, offset)).o, outputs.o);
    }
}

/// Results in f32 of 16-bit inputs, and gradients on top of others.
#[test]
fn wide_outputs() {
    let case = Case { causal: true, ..Case::new(1, 4, 2, 9, 13) };
    let inputs = Inputs::<F16>::new(&case);
    let problem = inputs.problem(&case);
    let mut outputs = Outputs::<f32, f32>::new(&case);
    outputs.forward(&problem, &case);
    outputs.check_forward(inputs.forward(&case));
    outputs.backward(&problem, &case, &inputs.d_o, Extras::new());
    let mut expected = inputs.backward(&case, None);
    outputs.check_backward(&expected);
    outputs.backward(&problem, &case, &inputs.d_o, Extras::new().accumulate());
    for gradient in [&mut expected.q, &mut expected.k, &mut expected.v] {
        gradient.iter_mut().for_each(|value| *value *= 2.0);
    }
    outputs.check_backward(&expected);
}

/// One half of the keys and then the other, folded in.
#[test]
fn accumulated_forward() {
    let case = Case::new(1, 2, 2, 9, 14);
    let inputs = Inputs::<f32>::new(&case);
    let mut outputs = Outputs::<f32, f32>::new(&case);
    let (shape, strides) = ([1, 2, 7, 40], [1, 14 * 40, 40, 1]);
    for half in 0..2 {
        let begin = half * 7 * 40;
        let k = Tensor::strided(&inputs.k[begin..], shape, strides).unwrap();
        let v = Tensor::strided(&inputs.v[begin..], shape, strides).unwrap();
        let q = Tensor::new(&inputs.q, case.shape_q()).unwrap();
        let problem = Attention::new(q, k, v).unwrap();
        outputs.forward(&if half == 0 { problem } else { problem.accumulate() }, &case);
    }
    outputs.check_forward(inputs.forward(&case));
}

#[test]
fn weights() {
    let handle = cpu();
    let case = Case { causal: true, ..Case::new(2, 4, 2, 9, 13) };
    let inputs = Inputs::<f32>::new(&case);
    let problem = inputs.problem(&case);
    let mut outputs = Outputs::<f32, f32>::new(&case);
    outputs.forward(&problem, &case);
    let lse = View::new(&outputs.lse, case.shape_lse()).unwrap();
    let expected = case.weights(&to_f64(&inputs.q), &to_f64(&inputs.k));

    let mut all = nan::<f32>(&case.shape_scores());
    let mut view = ViewMut::new(&mut all, case.shape_scores()).unwrap();
    problem.weights(&handle, lse, None, &mut view).unwrap();
    assert!(error(&all, &expected) < 1e-5);

    // Chosen rows, one of them not there, heads after rows.
    let rows = [8, i32::MAX, 2];
    let mut chosen = nan::<f32>(&[2, 3, 4, 13]);
    let mut view =
        ViewMut::strided(&mut chosen, [2, 4, 3, 13], [3 * 4 * 13, 13, 4 * 13, 1]).unwrap();
    problem.weights(&handle, lse, Some(View::new(&rows, [3]).unwrap()), &mut view).unwrap();
    for (at, chosen) in chosen.chunks(13).enumerate() {
        let (batch, head) = (at / 12, at % 4);
        let expected = match rows[at / 4 % 3] {
            i32::MAX => vec![0.0; 13],
            row => expected[((batch * 4 + head) * 9 + row as usize) * 13..][..13].to_vec(),
        };
        assert!(error(chosen, &expected) < 1e-5);
    }

    let mut none = ViewMut::new(&mut [][..], [2, 4, 0, 13]).unwrap();
    problem.weights(&handle, lse, None, &mut none).unwrap();
}

/// Rows of each head of a dense `[heads, total, width]`.
fn rows_of<T: Copy>(values: &[T], total: usize, width: usize, rows: Range<usize>) -> Vec<T> {
    values
        .chunks(total * width)
        .flat_map(|head| &head[rows.start * width..rows.end * width])
        .copied()
        .collect()
}

const ENDS: [usize; 5] = [0, 5, 5, 9, 16];
const OFFSETS_Q: [i32; 5] = [0, 5, 5, 9, 16];
const OFFSETS_K: [i32; 5] = [1, 8, 11, 11, 20];

/// Packed sequences, some of them empty, with rows that belong to none; each is a problem of its own.
#[test]
fn packed_sequences() {
    let (total_q, total_k) = (17, 22);
    let packed = Case { causal: true, head_dim_v: 24, ..Case::new(1, 4, 2, total_q, total_k) };
    let mut inputs = Inputs::<f32>::new(&packed);
    for head in 0..2 {
        for row in [0, 20, 21] {
            inputs.k[(head * total_k + row) * 40..][..40].fill(f32::NAN);
            inputs.v[(head * total_k + row) * 24..][..24].fill(f32::NAN);
        }
    }
    let problem = Attention::ragged(
        Tensor::new(&inputs.q, packed.shape_q()).unwrap(),
        Sequences::packed(View::new(&OFFSETS_Q, [5]).unwrap(), 7),
        Tensor::new(&inputs.k, packed.shape_k()).unwrap(),
        Tensor::new(&inputs.v, packed.shape_v()).unwrap(),
        Sequences::packed(View::new(&OFFSETS_K, [5]).unwrap(), 9),
    )
    .unwrap()
    .causal();
    let mut outputs = Outputs::<f32, f32>::new(&packed);
    outputs.forward(&problem, &packed);
    outputs.backward(&problem, &packed, &inputs.d_o, Extras::new());
    for b in 0..4 {
        let q = ENDS[b]..ENDS[b + 1];
        let k = OFFSETS_K[b] as usize..OFFSETS_K[b + 1] as usize;
        let case = Case { len_q: q.len(), len_k: k.len(), ..packed };
        let of_q = |values: &[f32], width| rows_of(values, total_q, width, q.clone());
        let of_k = |values: &[f32], width| rows_of(values, total_k, width, k.clone());
        let one = Inputs {
            q: of_q(&inputs.q, 40),
            k: of_k(&inputs.k, 40),
            v: of_k(&inputs.v, 24),
            d_o: of_q(&inputs.d_o, 24),
        };
        let found = Outputs {
            o: of_q(&outputs.o, 24),
            lse: of_q(&outputs.lse, 1),
            dq: of_q(&outputs.dq, 40),
            dk: of_k(&outputs.dk, 40),
            dv: of_k(&outputs.dv, 24),
        };
        found.check_forward(one.forward(&case));
        found.check_backward(&one.backward(&case, None));
    }
    // Rows of no sequence are as they were.
    assert!(rows_of(&outputs.o, total_q, 24, 16..17).iter().all(|value| value.is_nan()));
    assert!(rows_of(&outputs.dq, total_q, 40, 16..17).iter().all(|value| value.is_nan()));
    assert!(rows_of(&outputs.dk, total_k, 40, 20..22).iter().all(|value| value.is_nan()));
}

/// Packed queries over padded keys whose lengths and left padding differ; NaN in what is not in use.
#[test]
fn lengths_and_left_padding() {
    let (used, padding) = ([5, 0, 7, 6], [1, 0, 0, 4]);
    let padded = Case::new(4, 4, 2, 7, 8);
    let (total_q, mut inputs) = (16, Inputs::<f32>::new(&padded));
    let q = &inputs.q[..4 * total_q * 40];
    for (at, row) in inputs.k.chunks_mut(40).enumerate() {
        let (b, slot) = (at / 16, (at % 8) as i32);
        if slot < padding[b] || slot >= used[b] {
            row.fill(f32::NAN);
        }
    }
    let shape = [1, 4, total_q, 40];
    let problem = Attention::ragged(
        Tensor::new(q, shape).unwrap(),
        Sequences::packed(View::new(&OFFSETS_Q, [5]).unwrap(), 7),
        Tensor::new(&inputs.k, padded.shape_k()).unwrap(),
        Tensor::new(&inputs.v, padded.shape_v()).unwrap(),
        Sequences::padded().used(View::new(&used, [4]).unwrap()),
    )
    .unwrap()
    .left_padding(View::new(&padding, [4]).unwrap());
    let mut o = nan::<f32>(&shape);
    problem.forward(&cpu(), &mut TensorMut::new(&mut o, shape).unwrap(), None).unwrap();
    for b in 0..4 {
        let rows = ENDS[b]..ENDS[b + 1];
        let keys = padding[b] as usize..used[b] as usize;
        let case = Case { batch: 1, len_q: rows.len(), len_k: keys.len(), ..padded };
        let of_k = |values: &[f32]| {
            to_f64(&rows_of(&values[b * 2 * 8 * 40..][..2 * 8 * 40], 8, 40, keys.clone()))
        };
        let (expected, _) = case.forward(
            &to_f64(&rows_of(q, total_q, 40, rows.clone())),
            &of_k(&inputs.k),
            &of_k(&inputs.v),
        );
        assert!(error(&rows_of(&o, total_q, 40, rows), &expected) < 1e-5, "sequence {b}");
    }
}

/// Some new tokens for each sequence, over a cache of values with their own head_dim.
#[test]
fn packed_decode() {
    let (offsets, lengths, max_len) = ([0, 1, 1, 4], [8, 3, 5], 8);
    let packed = Case { causal: true, head_dim_v: 24, ..Case::new(3, 4, 2, 4, max_len) };
    let inputs = Inputs::<f32>::new(&packed);
    let (q, shape) = (&inputs.q[..4 * 4 * 40], [1, 4, 4, 40]);
    let cache = Cache::new(
        Tensor::new(&inputs.k, packed.shape_k()).unwrap(),
        Tensor::new(&inputs.v, packed.shape_v()).unwrap(),
    )
    .unwrap()
    .lengths(View::new(&lengths, [3]).unwrap());
    let queries = Sequences::packed(View::new(&offsets, [4]).unwrap(), 3);
    let mut o = nan::<f32>(&[4, 4, 24]);
    Decode::ragged(Tensor::new(q, shape).unwrap(), queries, cache)
        .unwrap()
        .causal()
        .decode(&cpu(), &mut TensorMut::new(&mut o, [1, 4, 4, 24]).unwrap(), None)
        .unwrap();
    for b in 0..3 {
        let rows = offsets[b] as usize..offsets[b + 1] as usize;
        let length = lengths[b] as usize;
        let case = Case { batch: 1, len_q: rows.len(), len_k: length, ..packed };
        let of_cache = |values: &[f32], width: usize| {
            let entry = &values[b * 2 * max_len * width..][..2 * max_len * width];
            to_f64(&rows_of(entry, max_len, width, 0..length))
        };
        let (expected, _) = case.forward(
            &to_f64(&rows_of(q, 4, 40, rows.clone())),
            &of_cache(&inputs.k, 40),
            &of_cache(&inputs.v, 24),
        );
        assert!(error(&rows_of(&o, 4, 24, rows), &expected) < 1e-5, "sequence {b}");
    }
}

/// Offsets and lengths may hold anything: nothing outside the slices is read or written.
#[test]
fn offsets_of_garbage() {
    let case = Case::new(1, 2, 1, 6, 6);
    let inputs = Inputs::<f32>::new(&case);
    let garbage = [[i32::MIN, i32::MAX, -5, 1 << 30], [3, 100, 2, -1], [i32::MAX; 4]];
    for (offsets, used) in garbage.iter().flat_map(|a| garbage.iter().map(move |b| (a, b))) {
        let lengths = View::new(&used[..3], [3]).unwrap();
        let sequences = Sequences::packed(View::new(offsets, [4]).unwrap(), 1 << 20).used(lengths);
        let problem = Attention::ragged(
            Tensor::new(&inputs.q, case.shape_q()).unwrap(),
            sequences,
            Tensor::new(&inputs.k, case.shape_k()).unwrap(),
            Tensor::new(&inputs.v, case.shape_v()).unwrap(),
            sequences,
        )
        .unwrap()
        .left_padding(lengths);
        // o in the middle of memory that must stay as it is.
        let (count, mut memory) = (inputs.q.len(), vec![f32::NAN; 3 * inputs.q.len()]);
        let mut o = TensorMut::new(&mut memory[count..2 * count], case.shape_o()).unwrap();
        problem.forward(&cpu(), &mut o, None).unwrap();
        assert!(memory[..count].iter().chain(&memory[2 * count..]).all(|value| value.is_nan()));
    }
}
