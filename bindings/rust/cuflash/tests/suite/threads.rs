//! One handle from many threads; what may cross between them and what may not.

use std::thread;

use cuflash::{
    Attention, BufferMut, Decode, Device, Error, Handle, Launch, Status, Stream, Tensor, TensorMut,
    View,
};

use crate::reference::{error, numbers, to_f64, Case};

#[test]
fn one_handle_serves_all() {
    let handle = Handle::new(Device::Cpu).unwrap();
    thread::scope(|scope| {
        for index in 0..8 {
            let handle = &handle;
            scope.spawn(move || {
                let case = Case { causal: true, ..Case::new(1, 2, 1, 10 + index, 20) };
                let q = numbers::<f32>(case.shape_q().iter().product(), index as u64);
                let k = numbers::<f32>(case.shape_k().iter().product(), 99);
                let keys = Tensor::new(&k, case.shape_k()).unwrap();
                let problem =
                    Attention::new(Tensor::new(&q, case.shape_q()).unwrap(), keys, keys).unwrap();
                let (expected, _) = case.forward(&to_f64(&q), &to_f64(&k), &to_f64(&k));
                for _ in 0..20 {
                    let mut o = vec![f32::NAN; q.len()];
                    let mut o_view = TensorMut::new(&mut o, case.shape_q()).unwrap();
                    problem.causal().forward(handle, &mut o_view, None).unwrap();
                    // A message is its thread's own.
                    let refused = problem.scale(-(index as f32) - 1.0);
                    let message = refused.forward(handle, &mut o_view, None).unwrap_err();
                    assert_eq!(message.status(), Status::InvalidDimension);
                    assert!(message.message().contains(&format!("-{}", index + 1)), "{message}");
                    assert!(error(&o, &expected) < 1e-5);
                }
            });
        }
    });
}

#[test]
fn handles_move_to_other_threads() {
    let handle = Handle::new(Device::Cpu).unwrap();
    thread::spawn(move || drop(handle)).join().unwrap();
}

#[test]
fn what_crosses_threads() {
    fn crosses<T: Send + Sync>() {}
    crosses::<Handle>();
    crosses::<Stream>();
    crosses::<Launch>();
    crosses::<Error>();
    crosses::<Attention<f32>>();
    crosses::<Decode<cuflash::F16>>();
    crosses::<View<i32, 1>>();
    crosses::<TensorMut<f32>>();
    crosses::<BufferMut<u8>>();
}
