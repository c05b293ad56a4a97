//! What must be refused is, with a message that names the argument: what Rust alone can ask for. The
//! calls that every language can make are in bad_input.rs.

use cuflash::{
    merge, Attention, BufferMut, Cache, Decode, Device, Gradients, Handle, LseBase, Place, Result,
    Status, Stream, Tensor, TensorMut, View, ViewMut,
};

const SHAPE: [usize; 4] = [1, 2, 4, 8];
const COUNT: usize = 64;

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, status: Status, word: &str) {
    let error = result.expect_err("was not refused");
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(word), "no {word:?} in: {error}");
}

fn cpu() -> Handle {
    Handle::new(Device::Cpu).unwrap()
}

#[test]
fn buffers_of_another_size() {
    let data = [0.0_f32; 10];
    refused(Tensor::new(&data, [1, 1, 3, 4]), Status::InvalidDimension, "12 elements");
    refused(Tensor::new(&data, [1, 1, 2, 4]), Status::InvalidDimension, "8 elements");
    refused(Tensor::new(&data, [1, 0, 3, 4]), Status::InvalidDimension, "0 elements");
    refused(View::new(&data, [usize::MAX, 2]), Status::InvalidDimension, "more elements");
    refused(View::new(&data, [0, usize::MAX, 2]), Status::InvalidDimension, "more elements");
    refused(ViewMut::new(&mut [0.0_f32; 3], [2, 2]), Status::InvalidDimension, "4 elements");
}

#[test]
fn strides_that_leave_the_buffer() {
    let data = [0.0_f32; 10];
    assert!(View::strided(&data, [2, 2], [8, 1]).is_ok());
    refused(View::strided(&data, [2, 2], [9, 1]), Status::InvalidDimension, "leaves");
    refused(View::strided(&data, [3, 3], [usize::MAX, 1]), Status::InvalidDimension, "leaves");
    refused(View::strided(&data, [usize::MAX, 2], [0, usize::MAX]), Status::InvalidDimension, "");
    assert!(View::strided(&data, [1, 10], [usize::MAX, 1]).is_ok(), "one element, any stride");
    assert!(View::strided(&data[..0], [0, 3], [5, 5]).is_ok(), "no element, any stride");
    refused(View::strided(&data[..0], [1, 1], [0, 0]), Status::InvalidDimension, "leaves");
}

#[test]
fn caches_of_two_lengths() {
    let (data, longer) = ([0.0_f32; COUNT], [0.0_f32; 2 * COUNT]);
    let k = Tensor::new(&data, SHAPE).unwrap();
    let v = Tensor::new(&longer, [1, 2, 8, 8]).unwrap();
    refused(Cache::new(k, v), Status::DimensionMismatch, "v: shape");
}

#[test]
fn lengths_that_are_not_contiguous() {
    let data = [0.0_f32; 2 * COUNT];
    let lengths = [1, 2, 3];
    let two = Tensor::new(&data, [2, 2, 4, 8]).unwrap();
    let cache = Cache::new(two, two).unwrap().lengths(View::strided(&lengths, [2], [2]).unwrap());
    refused(
        Decode::new(two, cache).unwrap().workspace_size(&cpu()),
        Status::InvalidValue,
        "lengths: not contiguous",
    );
}

#[test]
fn values_that_the_library_does_not_take() {
    let mut handle = cpu();
    let data = [0.0_f32; COUNT];
    let mut out = [0.0_f32; COUNT];
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    let mut o = TensorMut::new(&mut out, SHAPE).unwrap();
    let call = problem.sm_margin(2000).forward(&handle, &mut o, None);
    refused(call, Status::InvalidValue, "sm_margin");
    refused(handle.set_kernel(Some("nonsense")), Status::InvalidValue, "nonsense");
    refused(handle.set_kernel(Some("a\0b")), Status::InvalidValue, "NUL");
    problem.forward(&handle, &mut o, None).unwrap();
}

#[test]
fn workspaces_of_the_wrong_place() {
    let handle = cpu();
    let data = [0.0_f32; COUNT];
    let mut out = [0.0_f32; COUNT];
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    let mut o = TensorMut::new(&mut out, SHAPE).unwrap();
    // SAFETY: refused before anything is read or written.
    let of_device = unsafe { BufferMut::from_raw_parts(256 as *mut u8, 0, Place::Device) };
    let launch = handle.on(Stream::DEFAULT).workspace(of_device);
    refused(problem.forward(launch, &mut o, None), Status::WrongDevice, "workspace");
}

#[test]
fn memory_of_the_wrong_place() {
    let handle = cpu();
    let data = [0.0_f32; COUNT];
    let mut out = [0.0_f32; COUNT];
    let host = Tensor::new(&data, SHAPE).unwrap();
    // SAFETY: refused before anything is read or written.
    let device =
        unsafe { cuflash::Buffer::from_raw_parts(256 as *const f32, COUNT, Place::Device) };
    let device = Tensor::new(device, SHAPE).unwrap();
    let mut o = TensorMut::new(&mut out, SHAPE).unwrap();
    for (problem, name) in [
        (Attention::new(device, host, host), "q"),
        (Attention::new(host, device, host), "k"),
        (Attention::new(host, host, device), "v"),
    ] {
        let message = format!("{name}: memory of a device");
        refused(problem.unwrap().forward(&handle, &mut o, None), Status::WrongDevice, &message);
    }
    let (rows, mut d) = ([0.0_f32; 8], [[0.0_f32; COUNT]; 3]);
    let [dq, dk, dv] = &mut d;
    refused(
        Attention::new(host, host, host).unwrap().backward(
            &handle,
            device,
            View::new(&rows, [1, 2, 4]).unwrap(),
            host,
            Gradients {
                dq: &mut TensorMut::new(dq, SHAPE).unwrap(),
                dk: &mut TensorMut::new(dk, SHAPE).unwrap(),
                dv: &mut TensorMut::new(dv, SHAPE).unwrap(),
            },
        ),
        Status::WrongDevice,
        "o: memory of a device",
    );
}

#[test]
fn merges_that_do_not_fit() {
    let handle = cpu();
    let (parts, lse_parts) = ([0.0_f32; 2 * COUNT], [0.0_f32; 16]);
    let parts = View::new(&parts, [2, 1, 2, 4, 8]).unwrap();
    let lse_parts = View::new(&lse_parts, [2, 1, 2, 4]).unwrap();
    let (mut o, mut lse) = ([0.0_f32; COUNT], [0.0_f32; 9]);
    let mut o = TensorMut::new(&mut o, SHAPE).unwrap();
    let mut lse = ViewMut::strided(&mut lse, [1, 2, 4], [0, 5, 1]).unwrap();
    refused(
        merge(&handle, parts, lse_parts, LseBase::E, &mut o, Some(&mut lse)),
        Status::InvalidValue,
        "lse: strides",
    );
    merge(&handle, parts, lse_parts, LseBase::E, &mut o, None).unwrap();
}
