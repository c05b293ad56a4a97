//! The operations on a GPU. Without one each test prints "skipped: " and why.

use cuflash::{
    Attention, Buffer, Cache, Decode, Device, Element, Gradients, Handle, Sequences, Status,
    Tensor, TensorMut, View, ViewMut, F16,
};

use crate::driver::Driver;
use crate::reference::{error, numbers, to_f64, Case};

/// The driver and a handle, or None, said.
fn gpu() -> Option<(Driver, Handle)> {
    let reason = match Driver::open() {
        Ok(driver) => match Handle::new(Device::Cuda(0)) {
            Ok(handle) => return Some((driver, handle)),
            Err(error) if error.status() == Status::NotBuilt => error.to_string(),
            Err(error) => panic!("{error}"),
        },
        Err(reason) => reason,
    };
    println!("skipped: {reason}");
    None
}

fn forward_and_backward<T: Element + From<f32> + Into<f32>>(tolerance: f64) {
    let Some((driver, handle)) = gpu() else { return };
    let case = Case { causal: true, ..Case::new(2, 4, 2, 33, 50).head_dim(64) };
    let (count_q, count_k) =
        (case.shape_q().iter().product(), case.shape_k().iter().product::<usize>());
    let (q, d_o) = (numbers::<T>(count_q, 1), numbers::<T>(count_q, 2));
    let (k, v) = (numbers::<T>(count_k, 3), numbers::<T>(count_k, 4));
    let nan = T::from(f32::NAN);
    let inputs = [&q, &k, &v, &d_o].map(|values| driver.copy(values));
    let mut o = driver.copy(&vec![nan; count_q]);
    let mut lse = driver.copy(&vec![f32::NAN; case.shape_lse().iter().product()]);
    let mut gradients = [count_q, count_k, count_k].map(|count| driver.copy(&vec![nan; count]));

    let (shape_q, shape_k) = (case.shape_q(), case.shape_k());
    let tensor = |index: usize, shape| Tensor::new(inputs[index].buffer(), shape).unwrap();
    let problem = Attention::new(tensor(0, shape_q), tensor(1, shape_k), tensor(2, shape_k))
        .unwrap()
        .causal();
    let stream = driver.stream();
    {
        let mut o = TensorMut::new(o.buffer_mut(), shape_q).unwrap();
        let mut lse = ViewMut::new(lse.buffer_mut(), case.shape_lse()).unwrap();
        problem.forward(handle.on(stream), &mut o, Some(&mut lse)).unwrap();
        let [dq, dk, dv] = &mut gradients;
        problem
            .backward(
                handle.on(stream),
                o.view(),
                lse.view(),
                tensor(3, shape_q),
                Gradients {
                    dq: &mut TensorMut::new(dq.buffer_mut(), shape_q).unwrap(),
                    dk: &mut TensorMut::new(dk.buffer_mut(), shape_k).unwrap(),
                    dv: &mut TensorMut::new(dv.buffer_mut(), shape_k).unwrap(),
                },
            )
            .unwrap();
    }
    let [q, k, v, d_o] = [to_f64(&q), to_f64(&k), to_f64(&v), to_f64(&d_o)];
    let (expected_o, expected_lse) = case.forward(&q, &k, &v);
    assert!(error(o.read(), &expected_o) < tolerance);
    assert!(error(lse.read(), &expected_lse) < tolerance);
    let expected = case.backward(&q, &k, &v, &d_o, None);
    for (got, expected) in gradients.iter_mut().zip([&expected.q, &expected.k, &expected.v]) {
        assert!(error(got.read(), expected) < 8.0 * tolerance);
    }
}

#[test]
fn forward_and_backward_f32() {
    forward_and_backward::<f32>(1e-5);
}

#[test]
fn forward_and_backward_f16() {
    forward_and_backward::<F16>(1e-3);
}

#[test]
fn decode() {
    let Some((driver, handle)) = gpu() else { return };
    let case = Case::new(2, 4, 2, 1, 300).head_dim(64);
    let q = numbers::<F16>(case.shape_q().iter().product(), 1);
    let k = numbers::<F16>(case.shape_k().iter().product(), 2);
    let (on_gpu_q, on_gpu_k) = (driver.copy(&q), driver.copy(&k));
    let lengths = driver.copy(&[300, 300]);
    let mut o = driver.copy(&q);
    let keys = Tensor::new(on_gpu_k.buffer(), case.shape_k()).unwrap();
    let cache = Cache::new(keys, keys).unwrap().lengths(View::new(lengths.buffer(), [2]).unwrap());
    let problem =
        Decode::new(Tensor::new(on_gpu_q.buffer(), case.shape_q()).unwrap(), cache).unwrap();
    let bytes = problem.workspace_size(&handle).unwrap();
    let mut workspace = driver.copy(&vec![0xff_u8; bytes.max(1)]);
    problem
        .decode(
            handle.on(driver.stream()).workspace(workspace.buffer_mut()),
            &mut TensorMut::new(o.buffer_mut(), case.shape_q()).unwrap(),
            None,
        )
        .unwrap();
    let (expected, _) = case.forward(&to_f64(&q), &to_f64(&k), &to_f64(&k));
    assert!(error(o.read(), &expected) < 1e-3);
}

#[test]
fn host_memory_is_refused() {
    let Some((_driver, handle)) = gpu() else { return };
    let (q, mut o) = ([0.0_f32; 8], [0.0_f32; 8]);
    let tensor = Tensor::new(&q, [1, 1, 1, 8]).unwrap();
    let error = Attention::new(tensor, tensor, tensor)
        .unwrap()
        .forward(&handle, &mut TensorMut::new(&mut o, [1, 1, 1, 8]).unwrap(), None)
        .unwrap_err();
    assert_eq!(error.status(), Status::WrongDevice, "{error}");
}

const PACKED: [usize; 4] = [1, 4, 40, 64];

/// Three sequences, of at most 24 tokens.
fn packed_problem<'a>(
    q: Buffer<'a, F16>,
    offsets: Buffer<'a, i32>,
    bias: Buffer<'a, F16>,
    slopes: Buffer<'a, f32>,
    sinks: Buffer<'a, f32>,
) -> Attention<'a, F16> {
    let q = Tensor::new(q, PACKED).unwrap();
    let sequences = Sequences::packed(View::new(offsets, [4]).unwrap(), 24);
    Attention::ragged(q, sequences, q, q, sequences)
        .unwrap()
        .causal()
        .bias(View::new(bias, [1, 4, 1, 24]).unwrap())
        .alibi_slopes(View::new(slopes, [1, 4]).unwrap())
        .sinks(View::new(sinks, [4]).unwrap())
}

/// Packed sequences with a bias, slopes and sinks, all of the device's memory, as on the CPU.
#[test]
fn packed_sequences() {
    let Some((driver, handle)) = gpu() else { return };
    let shape_lse = [1, 4, 40];
    let (q, bias) = (numbers::<F16>(4 * 40 * 64, 1), numbers::<F16>(4 * 24, 2));
    let (offsets, slopes, sinks) = ([0, 16, 16, 40], numbers::<f32>(4, 3), numbers::<f32>(4, 4));
    let (count, rows) = (q.len(), 4 * 40);

    let (mut expected, mut expected_lse) = (vec![0.0_f32; count], vec![0.0; rows]);
    packed_problem(
        (&q).into(),
        (&offsets).into(),
        (&bias).into(),
        (&slopes).into(),
        (&sinks).into(),
    )
    .forward(
        &Handle::new(Device::Cpu).unwrap(),
        &mut TensorMut::new(&mut expected, PACKED).unwrap(),
        Some(&mut ViewMut::new(&mut expected_lse, shape_lse).unwrap()),
    )
    .unwrap();

    let (q, offsets, bias) = (driver.copy(&q), driver.copy(&offsets), driver.copy(&bias));
    let (slopes, sinks) = (driver.copy(&slopes), driver.copy(&sinks));
    let (mut o, mut lse) =
        (driver.copy(&vec![f32::NAN; count]), driver.copy(&vec![f32::NAN; rows]));
    packed_problem(q.buffer(), offsets.buffer(), bias.buffer(), slopes.buffer(), sinks.buffer())
        .forward(
            handle.on(driver.stream()),
            &mut TensorMut::new(o.buffer_mut(), PACKED).unwrap(),
            Some(&mut ViewMut::new(lse.buffer_mut(), shape_lse).unwrap()),
        )
        .unwrap();
    assert!(error(o.read(), &to_f64(&expected)) < 1e-3);
    assert!(error(lse.read(), &to_f64(&expected_lse)) < 1e-3);
}
