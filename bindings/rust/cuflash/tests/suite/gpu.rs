//! The operations on a GPU. Without one each test prints "skipped: " and why.

use cuflash::{
    Attention, Cache, Decode, Device, Element, Gradients, Handle, Status, Tensor, TensorMut, View,
    ViewMut, F16,
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
    let case = Case { causal: true, head_dim: 64, ..Case::new(2, 4, 2, 33, 50) };
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
    for (got, expected) in gradients.iter_mut().zip(case.backward(&q, &k, &v, &d_o)) {
        assert!(error(got.read(), &expected) < 8.0 * tolerance);
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
    let case = Case { len_q: 1, head_dim: 64, ..Case::new(2, 4, 2, 1, 300) };
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
