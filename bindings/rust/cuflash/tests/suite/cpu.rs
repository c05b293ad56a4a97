//! Every operation on the CPU device, against f64.

use cuflash::{
    merge, Align, Attention, Bf16, Cache, Decode, Device, Element, Gradients, Handle, LseBase,
    Setting, Tensor, TensorMut, View, ViewMut, F16,
};

use crate::reference::{error, numbers, to_f64, Case};

fn cpu() -> Handle {
    Handle::new(Device::Cpu).unwrap()
}

/// The options of a case, on a problem of either kind.
macro_rules! with_options {
    ($problem:expr, $case:expr) => {{
        let mut problem = $problem;
        if $case.causal {
            problem = problem.causal();
        }
        if let Some((left, right)) = $case.window {
            problem = problem.window(Some(left as u32), Some(right as u32));
        }
        problem = match $case.offset {
            None => problem,
            Some(0) => problem.align(Align::TopLeft),
            Some(offset) => problem.align(Align::Offset(offset)),
        };
        problem
    }};
}

fn cases() -> Vec<Case<'static>> {
    let plain = Case::new(2, 6, 2, 17, 29);
    vec![
        plain,
        Case { causal: true, ..plain },
        Case { causal: true, len_q: 29, len_k: 17, ..plain }, // rows that see no key
        Case { window: Some((3, 0)), ..plain },
        Case { window: Some((2, 5)), offset: Some(0), ..plain.head_dim(1) },
        Case { causal: true, offset: Some(7), heads_kv: 6, ..plain.head_dim(256) },
        Case { len_q: 1, heads_kv: 1, ..plain },
        Case { len_k: 0, ..plain },
        Case { batch: 0, ..plain },
    ]
}

/// Forward and backward of a case; the largest errors of o, lse and the gradients.
fn errors<T: Element + From<f32> + Into<f32>>(case: Case) -> [f64; 3] {
    let (count_q, count_k) =
        (case.shape_q().iter().product(), case.shape_k().iter().product::<usize>());
    let (q, d_o) = (numbers::<T>(count_q, 1), numbers::<T>(count_q, 2));
    let (k, v) = (numbers::<T>(count_k, 3), numbers::<T>(count_k, 4));
    let nan = T::from(f32::NAN);
    let (mut o, mut dq) = (vec![nan; count_q], vec![nan; count_q]);
    let (mut dk, mut dv) = (vec![nan; count_k], vec![nan; count_k]);
    let mut lse = vec![f32::NAN; case.shape_lse().iter().product()];

    let handle = cpu();
    let problem = with_options!(
        Attention::new(
            Tensor::new(&q, case.shape_q()).unwrap(),
            Tensor::new(&k, case.shape_k()).unwrap(),
            Tensor::new(&v, case.shape_k()).unwrap(),
        )
        .unwrap(),
        case
    );
    let mut o_view = TensorMut::new(&mut o, case.shape_q()).unwrap();
    let mut lse_view = ViewMut::new(&mut lse, case.shape_lse()).unwrap();
    problem.forward(&handle, &mut o_view, Some(&mut lse_view)).unwrap();
    problem
        .backward(
            &handle,
            o_view.view(),
            lse_view.view(),
            Tensor::new(&d_o, case.shape_q()).unwrap(),
            Gradients {
                dq: &mut TensorMut::new(&mut dq, case.shape_q()).unwrap(),
                dk: &mut TensorMut::new(&mut dk, case.shape_k()).unwrap(),
                dv: &mut TensorMut::new(&mut dv, case.shape_k()).unwrap(),
            },
        )
        .unwrap();

    let [q, k, v, d_o] = [to_f64(&q), to_f64(&k), to_f64(&v), to_f64(&d_o)];
    let (expected_o, expected_lse) = case.forward(&q, &k, &v);
    let expected = case.backward(&q, &k, &v, &d_o, None);
    let gradients = [error(&dq, &expected.q), error(&dk, &expected.k), error(&dv, &expected.v)];
    let worst =
        gradients.into_iter().fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
    [error(&o, &expected_o), error(&lse, &expected_lse), worst]
}

#[test]
fn forward_and_backward_f32() {
    for (index, case) in cases().into_iter().enumerate() {
        let errors = errors::<f32>(case);
        assert!(errors.iter().all(|&error| error < 1e-5), "case {index}: {errors:?}");
    }
}

#[test]
fn forward_and_backward_16_bit() {
    for (index, case) in cases().into_iter().enumerate() {
        let [o, lse, gradients] = errors::<F16>(case);
        assert!(o < 1e-3 && lse < 1e-3 && gradients < 8e-3, "F16, {index}: {o} {lse} {gradients}");
        let [o, lse, gradients] = errors::<Bf16>(case);
        assert!(o < 8e-3 && lse < 8e-3 && gradients < 6e-2, "Bf16, {index}: {o} {lse} {gradients}");
    }
}

#[test]
fn a_scale_of_its_own() {
    let (q, k, v) = ([3.0, 0.0], [1.0, 0.0, -1.0, 0.0], [1.0, 2.0, 5.0, 6.0]);
    let mut o = [0.0; 2];
    Attention::new(
        Tensor::new(&q, [1, 1, 1, 2]).unwrap(),
        Tensor::new(&k, [1, 1, 2, 2]).unwrap(),
        Tensor::new(&v, [1, 1, 2, 2]).unwrap(),
    )
    .unwrap()
    .scale(0.0) // both keys count the same
    .forward(&cpu(), &mut TensorMut::new(&mut o, [1, 1, 1, 2]).unwrap(), None)
    .unwrap();
    assert_eq!(o, [3.0, 4.0]);
}

/// q, k and v lie in one buffer `[batch, row, q k v, head, channel]`, o and lse have rows before
/// heads; what is not theirs stays as it was.
#[test]
fn strides() {
    let case = Case { causal: true, ..Case::new(2, 3, 3, 11, 11) };
    let [batch, heads, len, head_dim] = case.shape_q();
    let packed = numbers::<f32>(batch * len * 3 * heads * head_dim, 5);
    let strides = [len * 3 * heads * head_dim, head_dim, 3 * heads * head_dim, 1];
    let part = |index: usize| {
        Tensor::strided(&packed[index * heads * head_dim..], case.shape_q(), strides).unwrap()
    };
    let gap = 7;
    let row = heads * head_dim + gap;
    let mut o = vec![f32::NAN; batch * len * row];
    let mut lse = vec![f32::NAN; batch * len * heads];
    Attention::new(part(0), part(1), part(2))
        .unwrap()
        .causal()
        .forward(
            &cpu(),
            &mut TensorMut::strided(&mut o, case.shape_q(), [len * row, head_dim, row, 1]).unwrap(),
            Some(
                &mut ViewMut::strided(&mut lse, case.shape_lse(), [len * heads, 1, heads]).unwrap(),
            ),
        )
        .unwrap();

    let dense = |index: usize| {
        let mut values = Vec::new();
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..len {
                    let at = b * strides[0] + (index * heads + h) * head_dim + i * strides[2];
                    values.extend(to_f64(&packed[at..at + head_dim]));
                }
            }
        }
        values
    };
    let (expected, expected_lse) = case.forward(&dense(0), &dense(1), &dense(2));
    for b in 0..batch {
        for i in 0..len {
            let written = &o[(b * len + i) * row..][..row];
            assert!(written[row - gap..].iter().all(|x| x.is_nan()), "the gap was written to");
            for h in 0..heads {
                let at = (b * heads + h) * len + i;
                let expected = &expected[at * head_dim..][..head_dim];
                assert!(error(&written[h * head_dim..][..head_dim], expected) < 1e-5);
                assert!(
                    error(&lse[(b * len + i) * heads + h..][..1], &expected_lse[at..=at]) < 1e-5
                );
            }
        }
    }
}

#[test]
fn decode_with_lengths() {
    let (entries, max_len) = (3, 23);
    let case =
        Case { causal: true, len_q: 4, len_k: max_len, ..Case::new(entries, 4, 2, 4, max_len) };
    let count_k = case.shape_k().iter().product();
    let q = numbers::<f32>(case.shape_q().iter().product(), 6);
    let (k, v) = (numbers::<f32>(count_k, 7), numbers::<f32>(count_k, 8));
    let lengths = [23, 9, 0];
    let mut o = vec![f32::NAN; q.len()];
    let mut lse = vec![f32::NAN; case.shape_lse().iter().product()];
    let cache = Cache::new(
        Tensor::new(&k, case.shape_k()).unwrap(),
        Tensor::new(&v, case.shape_k()).unwrap(),
    )
    .unwrap()
    .lengths(View::new(&lengths, [entries]).unwrap());
    Decode::new(Tensor::new(&q, case.shape_q()).unwrap(), cache)
        .unwrap()
        .causal()
        .num_splits(3)
        .decode(
            &cpu(),
            &mut TensorMut::new(&mut o, case.shape_q()).unwrap(),
            Some(&mut ViewMut::new(&mut lse, case.shape_lse()).unwrap()),
        )
        .unwrap();

    // Each sequence as a problem of its own: the valid keys of its entry.
    let (per_q, per_k) = (q.len() / entries, k.len() / entries);
    for (b, &length) in lengths.iter().enumerate() {
        let length = length as usize;
        let one = Case { batch: 1, len_k: length, ..case };
        let valid = |cache: &[f32]| -> Vec<f64> {
            (0..case.heads_kv)
                .flat_map(|h| {
                    let at = b * per_k + h * max_len * case.head_dim;
                    to_f64(&cache[at..at + length * case.head_dim])
                })
                .collect()
        };
        let (expected, expected_lse) =
            one.forward(&to_f64(&q[b * per_q..][..per_q]), &valid(&k), &valid(&v));
        assert!(error(&o[b * per_q..][..per_q], &expected) < 1e-5, "sequence {b}");
        let per_lse = case.heads * case.len_q;
        assert!(error(&lse[b * per_lse..][..per_lse], &expected_lse) < 1e-5, "sequence {b}");
    }
}

/// An offset for each sequence is the same as a problem for each.
#[test]
fn offsets_of_each_sequence() {
    let case = Case { causal: true, ..Case::new(2, 2, 1, 5, 9) };
    let q = numbers::<f32>(case.shape_q().iter().product(), 9);
    let k = numbers::<f32>(case.shape_k().iter().product(), 10);
    let offsets = [1, -2];
    let mut o = vec![f32::NAN; q.len()];
    let tensor_k = Tensor::new(&k, case.shape_k()).unwrap();
    Attention::new(Tensor::new(&q, case.shape_q()).unwrap(), tensor_k, tensor_k)
        .unwrap()
        .causal()
        .align(Align::Offsets(View::new(&offsets, [2]).unwrap()))
        .forward(&cpu(), &mut TensorMut::new(&mut o, case.shape_q()).unwrap(), None)
        .unwrap();
    let (per_q, per_k) = (q.len() / 2, k.len() / 2);
    for (b, &offset) in offsets.iter().enumerate() {
        let one = Case { batch: 1, offset: Some(offset.into()), ..case };
        let k = to_f64(&k[b * per_k..][..per_k]);
        let (expected, _) = one.forward(&to_f64(&q[b * per_q..][..per_q]), &k, &k);
        assert!(error(&o[b * per_q..][..per_q], &expected) < 1e-5, "sequence {b}");
    }
}

/// Results over two halves of the keys, merged, are the result over all.
#[test]
fn merge_of_two_halves() {
    let handle = cpu();
    let case = Case::new(2, 3, 3, 7, 20);
    let q = numbers::<f32>(case.shape_q().iter().product(), 11);
    let k = numbers::<f32>(case.shape_k().iter().product(), 12);
    let rows = q.len() / case.head_dim;
    let mut parts = vec![f32::NAN; 2 * q.len()];
    let mut lse_parts = vec![f32::NAN; 2 * rows];
    for half in 0..2 {
        let per_head = case.len_k * case.head_dim;
        let strides = [case.heads_kv * per_head, per_head, case.head_dim, 1];
        let keys = Tensor::strided(
            &k[half * per_head / 2..],
            [case.batch, case.heads_kv, case.len_k / 2, case.head_dim],
            strides,
        )
        .unwrap();
        Attention::new(Tensor::new(&q, case.shape_q()).unwrap(), keys, keys)
            .unwrap()
            .forward(
                &handle,
                &mut TensorMut::new(&mut parts[half * q.len()..][..q.len()], case.shape_q())
                    .unwrap(),
                Some(
                    &mut ViewMut::new(&mut lse_parts[half * rows..][..rows], case.shape_lse())
                        .unwrap(),
                ),
            )
            .unwrap();
    }
    let [batch, heads, len, head_dim] = case.shape_q();
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; rows]);
    let (expected, expected_lse) = case.forward(&to_f64(&q), &to_f64(&k), &to_f64(&k));
    let ln_2 = std::f32::consts::LN_2;
    for (base, unit) in [(LseBase::E, 1.0), (LseBase::Two, ln_2)] {
        let lse_parts: Vec<f32> = lse_parts.iter().map(|lse| lse / unit).collect();
        merge(
            &handle,
            View::new(&parts, [2, batch, heads, len, head_dim]).unwrap(),
            View::new(&lse_parts, [2, batch, heads, len]).unwrap(),
            base,
            &mut TensorMut::new(&mut o, case.shape_q()).unwrap(),
            Some(&mut ViewMut::new(&mut lse, case.shape_lse()).unwrap()),
        )
        .unwrap();
        lse.iter_mut().for_each(|lse| *lse *= unit);
        assert!(error(&o, &expected) < 1e-5, "{base:?}");
        assert!(error(&lse, &expected_lse) < 1e-5, "{base:?}");
    }
}

#[test]
fn workspaces() {
    let handle = cpu();
    let (q, mut o) = (numbers::<f32>(2 * 64 * 8, 13), vec![0.0; 2 * 64 * 8]);
    let tensor = Tensor::new(&q, [1, 2, 64, 8]).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    let bytes = problem.forward_workspace_size(&handle).unwrap();
    assert!(problem.backward_workspace_size(&handle).unwrap() >= bytes);
    let mut memory = vec![0_u8; bytes + 256];
    let aligned = memory.as_ptr().align_offset(256);
    let launch = handle.on(cuflash::Stream::DEFAULT).workspace(&mut memory[aligned..]);
    problem.forward(launch, &mut TensorMut::new(&mut o, [1, 2, 64, 8]).unwrap(), None).unwrap();
    assert!(o.iter().all(|&x| x != 0.0));
    let decode = Decode::new(tensor, Cache::new(tensor, tensor).unwrap()).unwrap();
    decode.workspace_size(&handle).unwrap();
}

#[test]
fn explanations() {
    let handle = cpu();
    let q = vec![F16::default(); 4 * 128 * 64];
    let tensor = Tensor::new(&q, [1, 4, 128, 64]).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap().causal();
    let decode = Decode::new(tensor, Cache::new(tensor, tensor).unwrap()).unwrap();
    let contains = |text: String, wanted: &str| assert!(text.contains(wanted), "{text}");
    contains(problem.explain_forward(&handle).unwrap(), r#""device": "cpu""#);
    contains(problem.explain_backward(&handle).unwrap(), r#""operation": "backward""#);
    contains(decode.explain(&handle).unwrap(), r#""operation": "decode""#);
    contains(problem.target_arch(90).explain_forward(&handle).unwrap(), r#""device": "sm_90""#);
    contains(
        problem.kernel(c"reference").explain_forward(&handle).unwrap(),
        r#""family": "reference""#,
    );
}

#[test]
fn settings() {
    let mut handle = cpu();
    assert_eq!(handle.device(), Device::Cpu);
    assert_eq!(handle.get(Setting::CpuThreads).unwrap(), 0);
    handle.set(Setting::CpuThreads, 1).unwrap();
    assert_eq!(handle.get(Setting::CpuThreads).unwrap(), 1);
    handle.set_kernel(Some("reference")).unwrap();
    let q = [0.0_f32; 8];
    let tensor = Tensor::new(&q, [1, 1, 1, 8]).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    assert!(problem.explain_forward(&handle).unwrap().contains(r#""family": "reference""#));
    handle.set_kernel(None).unwrap();
    handle.preload().unwrap();
    handle.trim().unwrap();
}
