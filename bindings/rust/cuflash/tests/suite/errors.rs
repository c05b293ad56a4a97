//! What must be refused is, with a message that names the argument: what Rust alone can ask for. The
//! calls that every language can make are in bad_input.rs.

use cuflash::{
    merge, Attention, Buffer, BufferMut, Cache, Decode, Device, Extras, Gradients, Handle, LseBase,
    Place, Result, Sequences, Status, Stream, Tensor, TensorMut, View, ViewMut, F16,
};

const SHAPE: [usize; 4] = [1, 2, 4, 8];
const COUNT: usize = 64;

#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T>, status: Status, word: &str) {
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
    let device = unsafe { Buffer::from_raw_parts(256 as *const f32, COUNT, Place::Device) };
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

/// Extents of 0 that the C API takes for a default, which would be memory that is not there.
#[test]
fn nothing_where_something_is_needed() {
    let data = [0.0_f32; COUNT];
    let q = Tensor::new(&data, SHAPE).unwrap();
    let empty = |shape| Tensor::new(&data[..0], shape).unwrap();
    let no_heads = empty([1, 0, 4, 8]);
    refused(Attention::new(q, no_heads, no_heads), Status::DimensionMismatch, "k: no heads");
    let no_channels = empty([1, 2, 4, 0]);
    refused(Attention::new(q, q, no_channels), Status::UnsupportedHeadDim, "v: no channels");
    let no_entries = empty([0, 2, 4, 8]);
    let cache = Cache::new(no_entries, no_entries).unwrap();
    refused(Decode::new(q, cache), Status::DimensionMismatch, "k: 0 entries");
}

#[test]
fn sequences_that_do_not_fit() {
    let (data, counts) = ([0.0_f32; COUNT], [0; 4]);
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let two = Tensor::new(&data, [2, 2, 2, 8]).unwrap();
    let packed = |count: usize| Sequences::packed(View::new(&counts[..count], [count]).unwrap(), 4);
    let ragged = |queries, keys| Attention::ragged(tensor, queries, tensor, tensor, keys);
    let padded = Sequences::padded();
    refused(ragged(packed(0), padded), Status::DimensionMismatch, "offsets of q: none");
    refused(ragged(packed(3), padded), Status::DimensionMismatch, "k: 1 sequences, but 2 of q");
    refused(ragged(padded, packed(4)), Status::DimensionMismatch, "k: 3 sequences, but 1 of q");
    refused(
        Attention::ragged(two, packed(3), two, two, padded),
        Status::DimensionMismatch,
        "q: shape [2, 2, 2, 8]; the batch of packed rows is 1",
    );

    let handle = cpu();
    let mut out = [0.0_f32; COUNT];
    let mut forward = |problem: Result<Attention<'_, f32>>| {
        problem.unwrap().forward(&handle, &mut TensorMut::new(&mut out, SHAPE).unwrap(), None)
    };
    let three = View::new(&counts[..3], [3]).unwrap();
    let used = padded.used(three);
    refused(forward(ragged(used, padded)), Status::DimensionMismatch, "used rows of q: shape [3]");
    refused(forward(ragged(padded, used)), Status::DimensionMismatch, "used rows of k: shape [3]");
    let left_padded = ragged(padded, padded).unwrap().left_padding(three);
    refused(forward(Ok(left_padded)), Status::DimensionMismatch, "left_padding: shape [3]");
    let every_other = View::strided(&counts, [2], [2]).unwrap();
    let sparse = ragged(Sequences::packed(every_other, 4), padded);
    refused(forward(sparse), Status::InvalidValue, "offsets of q: not contiguous");
}

#[test]
fn modifiers_that_do_not_fit() {
    let handle = cpu();
    let (data, mut out) = ([0.0_f32; COUNT], [0.0_f32; COUNT]);
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    let values = |shape| View::strided(&data, shape, [0, 0, 0, 1]).unwrap();
    let mut forward = |problem: Attention<'_, f32>| {
        problem.forward(&handle, &mut TensorMut::new(&mut out, SHAPE).unwrap(), None)
    };
    let (row, rows) = (View::new(&data[..3], [3]).unwrap(), View::new(&data[..4], [2, 2]).unwrap());
    refused(forward(problem.sinks(row)), Status::DimensionMismatch, "sinks: shape [3]");
    refused(forward(problem.alibi_slopes(rows)), Status::DimensionMismatch, "alibi_slopes: shape");
    for shape in [[2, 2, 4, 4], [1, 2, 4, 3], [1, 2, 4, 1], [1, 3, 1, 4]] {
        let call = forward(problem.bias(values(shape)));
        refused(call, Status::DimensionMismatch, "the other arguments need [1, 2, 4, 4]");
    }
    let spread = View::strided(&data, [1, 1, 1, 4], [0, 0, 0, 2]).unwrap();
    refused(forward(problem.bias(spread)), Status::InvalidValue, "bias: not contiguous");
    // SAFETY: refused before anything is read.
    let device = unsafe { Buffer::from_raw_parts(256 as *const f32, 2, Place::Device) };
    let sinks = View::new(device, [2]).unwrap();
    refused(forward(problem.sinks(sinks)), Status::WrongDevice, "sinks: memory of a device");
    let state = View::new(&[1_u64], [1]).unwrap();
    let call = forward(problem.dropout_from(0.5, state));
    refused(call, Status::DimensionMismatch, "dropout state: shape [1]");
    refused(forward(problem.dropout(1.5, 0, 0)), Status::InvalidValue, "dropout_p: 1.5");
    refused(forward(problem.softcap(f32::NAN)), Status::InvalidValue, "softcap");
    refused(forward(problem.accumulate()), Status::NullPointer, "lse");
    forward(problem.bias(values([1, 1, 1, 4]))).unwrap();
}

#[test]
fn extras_that_do_not_fit() {
    let handle = cpu();
    let (data, rows) = ([0.0_f32; COUNT], [0.0_f32; 16]);
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let plain = Attention::new(tensor, tensor, tensor).unwrap();
    let bias = View::new(&data[..8], [1, 2, 1, 4]).unwrap();
    let problem = plain.bias(bias).sinks(View::new(&rows[..2], [2]).unwrap());
    let mut d = [[0.0_f32; COUNT]; 3];
    let mut backward = |problem: Attention<'_, f32>, extras: Extras<'_>| {
        let [dq, dk, dv] = &mut d;
        problem.backward_with(
            &handle,
            tensor,
            View::new(&rows[..8], [1, 2, 4]).unwrap(),
            tensor,
            Gradients {
                dq: &mut TensorMut::new(dq, SHAPE).unwrap(),
                dk: &mut TensorMut::new(dk, SHAPE).unwrap(),
                dv: &mut TensorMut::new(dv, SHAPE).unwrap(),
            },
            extras,
        )
    };
    let short = View::new(&rows[..6], [1, 2, 3]).unwrap();
    let other = View::strided(&rows, [1, 2, 4], [0, 8, 1]).unwrap();
    let (mut memory, mut halves) = ([0.0_f32; 32], [F16::default(); 8]);
    for extras in [Extras::new().d_lse(short), Extras::new().given_delta(short)] {
        refused(backward(problem, extras), Status::DimensionMismatch, "shape [1, 2, 3]");
    }
    for extras in [Extras::new().d_lse(other), Extras::new().given_delta(other)] {
        refused(backward(problem, extras), Status::InvalidValue, "not those of lse");
    }
    let mut delta = ViewMut::strided(&mut memory, [1, 2, 4], [0, 8, 1]).unwrap();
    let call = backward(problem, Extras::new().delta(&mut delta));
    refused(call, Status::InvalidValue, "delta: strides");

    let mut d_bias = ViewMut::new(&mut memory[..8], [1, 2, 1, 4]).unwrap();
    let call = backward(plain, Extras::new().d_bias(&mut d_bias));
    refused(call, Status::InvalidValue, "d_bias: the problem has no bias");
    backward(problem, Extras::new().d_bias(&mut d_bias)).unwrap();
    let mut d_bias = ViewMut::new(&mut halves, [1, 2, 1, 4]).unwrap();
    let call = backward(problem, Extras::new().d_bias(&mut d_bias));
    refused(call, Status::UnsupportedDtype, "d_bias: of another element type");
    let mut d_bias = ViewMut::new(&mut memory, [1, 2, 4, 4]).unwrap();
    let call = backward(problem, Extras::new().d_bias(&mut d_bias));
    refused(call, Status::DimensionMismatch, "d_bias: shape [1, 2, 4, 4]");
    let mut d_bias = ViewMut::strided(&mut memory, [1, 2, 1, 4], [0, 8, 0, 1]).unwrap();
    let call = backward(problem, Extras::new().d_bias(&mut d_bias));
    refused(call, Status::InvalidValue, "d_bias: strides");
    let mut d_sinks = ViewMut::new(&mut memory[..3], [3]).unwrap();
    let call = backward(problem, Extras::new().d_sinks(&mut d_sinks));
    refused(call, Status::DimensionMismatch, "d_sinks: shape [3]");
}

/// A bias of no rows has no memory; its gradient must not be taken for one that repeats.
#[test]
fn gradient_of_an_empty_bias() {
    let (data, rows) = ([0.0_f32; COUNT], [0.0_f32; 0]);
    let none = Tensor::new(&rows, [1, 2, 0, 8]).unwrap();
    let keys = Tensor::new(&data, SHAPE).unwrap();
    let mut memory = [1.0_f32; 8];
    let mut d_bias = ViewMut::new(&mut memory[..0], [1, 2, 0, 4]).unwrap();
    let mut d = [[1.0_f32; COUNT]; 2];
    let [dk, dv] = &mut d;
    Attention::new(none, keys, keys)
        .unwrap()
        .bias(View::new(&rows, [1, 2, 0, 4]).unwrap())
        .backward_with(
            &cpu(),
            none,
            View::new(&rows, [1, 2, 0]).unwrap(),
            none,
            Gradients {
                dq: &mut TensorMut::new(&mut [][..], [1, 2, 0, 8]).unwrap(),
                dk: &mut TensorMut::new(dk, SHAPE).unwrap(),
                dv: &mut TensorMut::new(dv, SHAPE).unwrap(),
            },
            Extras::new().d_bias(&mut d_bias),
        )
        .unwrap();
    assert_eq!(memory, [1.0; 8]);
    assert_eq!(d, [[0.0; COUNT]; 2]);
}

#[test]
fn weights_that_do_not_fit() {
    let handle = cpu();
    let (data, rows) = ([0.0_f32; COUNT], [0, 1]);
    let tensor = Tensor::new(&data, SHAPE).unwrap();
    let problem = Attention::new(tensor, tensor, tensor).unwrap();
    let lse = View::new(&data[..8], [1, 2, 4]).unwrap();
    let rows = View::new(&rows, [2]).unwrap();
    let mut memory = [0.0_f32; COUNT];
    let mut weights = |shape, strides, rows| {
        let mut view = ViewMut::strided(&mut memory, shape, strides).unwrap();
        problem.weights(&handle, lse, rows, &mut view)
    };
    let strides = [0, 16, 4, 1];
    let call = weights([1, 2, 3, 4], strides, Some(rows));
    refused(call, Status::DimensionMismatch, "weights: shape [1, 2, 3, 4]");
    let call = weights([1, 2, 3, 3], strides, None);
    refused(call, Status::DimensionMismatch, "weights: shape [1, 2, 3, 3]");
    let call = weights([1, 2, 2, 4], [0, 16, 8, 2], Some(rows));
    refused(call, Status::InvalidValue, "weights: not contiguous");
    let call = weights([1, 2, 2, 4], [0, 0, 0, 1], Some(rows));
    refused(call, Status::InvalidValue, "weights: strides of 0");
    weights([1, 2, 2, 4], strides, Some(rows)).unwrap();
}
