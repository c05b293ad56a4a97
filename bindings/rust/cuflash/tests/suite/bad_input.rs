//! The calls of tests/bad_input/table.tsv, which every language makes.

use std::collections::HashMap;
use std::path::Path;

use cuflash::{
    merge, Append, Attention, Buffer, BufferMut, Cache, CacheMut, Decode, Device, Gradients,
    Handle, LseBase, Pairs, Place, Result, Setting, Status, Stream, Tensor, TensorMut, View,
    ViewMut,
};

const Q: [usize; 4] = [2, 4, 5, 8];
const K: [usize; 4] = [2, 2, 7, 8];
const LSE: [usize; 3] = [2, 4, 5];
const QUERIES: usize = 2 * 4 * 5 * 8;
const KEYS: usize = 2 * 2 * 7 * 8;
const UNTOUCHED: f32 = -77.0;

struct Row {
    id: String,
    statuses: Vec<String>,
    words: Vec<Vec<String>>,
}

/// The rows for Rust, and how many it cannot express. Those of the operation "library" need a
/// process each, which tests/python/test_bad_input.py starts.
fn table() -> (Vec<Row>, usize) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/bad_input/table.tsv");
    let text = std::fs::read_to_string(path).unwrap();
    let (mut rows, mut impossible) = (Vec::new(), 0);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<_> = line.split('\t').collect();
        let [id, operation, _, statuses, words, cannot] = columns[..] else { panic!("{line}") };
        if cannot.split(" | ").any(|reason| reason.starts_with("rust: ")) {
            impossible += 1;
        } else if operation != "library" {
            let any_of = |items: &str| items.split('|').map(str::to_owned).collect();
            rows.push(Row {
                id: id.to_owned(),
                statuses: any_of(statuses),
                words: words.split(',').filter(|word| *word != "-").map(any_of).collect(),
            });
        }
    }
    (rows, impossible)
}

/// What the calls read and write.
struct Data {
    queries: Vec<f32>,
    keys: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Data {
    fn new() -> Self {
        let values = |count| (0..count).map(|i| (i * 37 % 17) as f32 / 16.0).collect();
        Self {
            queries: values(QUERIES),
            keys: values(KEYS),
            out: vec![UNTOUCHED; QUERIES],
            lse: vec![UNTOUCHED; QUERIES / 8],
        }
    }

    fn q(&self) -> Tensor<'_, f32> {
        Tensor::new(&self.queries, Q).unwrap()
    }

    fn k(&self) -> Tensor<'_, f32> {
        Tensor::new(&self.keys, K).unwrap()
    }

    fn untouched(&self) -> bool {
        self.out.iter().chain(&self.lse).all(|value| *value == UNTOUCHED)
    }
}

fn cpu() -> Handle {
    Handle::new(Device::Cpu).unwrap()
}

/// The call after a change to the problem.
fn forward(
    data: &mut Data,
    change: impl for<'a> FnOnce(Attention<'a, f32>) -> Attention<'a, f32>,
) -> Result<()> {
    let q = Tensor::new(&data.queries, Q)?;
    let k = Tensor::new(&data.keys, K)?;
    let problem = change(Attention::new(q, k, k)?);
    problem.forward(&cpu(), &mut TensorMut::new(&mut data.out, Q)?, None)
}

fn decode(data: &mut Data, lengths: &[i32], splits: u16) -> Result<()> {
    let q = Tensor::new(&data.queries, Q)?;
    let k = Tensor::new(&data.keys, K)?;
    let cache = Cache::new(k, k)?.lengths(View::new(lengths, [lengths.len()])?);
    Decode::new(q, cache)?.num_splits(splits).decode(
        &cpu(),
        &mut TensorMut::new(&mut data.out, Q)?,
        None,
    )
}

fn tree_mask(data: &mut Data) -> Result<()> {
    let (mut dq, mut dk, mut dv) = (data.queries.clone(), data.keys.clone(), data.keys.clone());
    let problem =
        Attention::new(data.q(), data.k(), data.k())?.tree_mask(View::new(&[1], [1, 1, 1])?, 5);
    let gradients = Gradients {
        dq: &mut TensorMut::new(&mut dq, Q)?,
        dk: &mut TensorMut::new(&mut dk, K)?,
        dv: &mut TensorMut::new(&mut dv, K)?,
    };
    problem.backward(&cpu(), data.q(), View::new(&data.lse, LSE)?, data.q(), gradients)
}

fn zero_of_floats(data: &mut Data) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    let cache = Cache::new(k, k)?.k_zero(View::new(&[1.0_f32], [1, 1, 1, 1])?);
    Decode::new(q, cache)?.decode(&cpu(), &mut TensorMut::new(&mut data.out, Q)?, None)
}

/// Into memory that must stay as it is.
fn append(
    data: &mut Data,
    change: impl for<'a> FnOnce(Append<'a, f32>) -> Result<Append<'a, f32>>,
) -> Result<()> {
    let new = Tensor::strided(&data.keys, [2, 4, 1, 8], [0, 8, 8, 1])?;
    let mut cache = CacheMut::values_in_keys(TensorMut::new(&mut data.out, Q)?, 8);
    change(Append::keys(new))?.append(&cpu(), &mut cache)
}

fn rotary_dim(data: &mut Data) -> Result<()> {
    append(data, |append| {
        let angles = View::new(&[1.0; 5], [1, 5])?;
        Ok(append.rotate(angles, angles, Pairs::Apart))
    })
}

fn q_on_a_device(data: &mut Data) -> Result<()> {
    // SAFETY: refused before anything is read.
    let buffer = unsafe { Buffer::from_raw_parts(256 as *const f32, QUERIES, Place::Device) };
    let k = Tensor::new(&data.keys, K)?;
    let mut o = TensorMut::new(&mut data.out, Q)?;
    Attention::new(Tensor::new(buffer, Q)?, k, k)?.forward(&cpu(), &mut o, None)
}

fn stream_on_cpu(data: &mut Data) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    // SAFETY: the CPU device refuses every stream.
    let stream = unsafe { Stream::from_raw(8 as *mut _) };
    let mut o = TensorMut::new(&mut data.out, Q)?;
    Attention::new(q, k, k)?.forward(cpu().on(stream), &mut o, None)
}

fn channels(data: &mut Data) -> Result<()> {
    let q = Tensor::strided(&data.queries, Q, [160, 40, 1, 5])?;
    let k = Tensor::new(&data.keys, K)?;
    let mut o = TensorMut::new(&mut data.out, Q)?;
    Attention::new(q, k, k)?.forward(&cpu(), &mut o, None)
}

fn heads(data: &mut Data) -> Result<()> {
    let shape = [2, 3, 5, 8];
    let q = Tensor::new(&data.queries[..240], shape)?;
    let k = Tensor::new(&data.keys, K)?;
    let mut o = TensorMut::new(&mut data.out[..240], shape)?;
    Attention::new(q, k, k)?.forward(&cpu(), &mut o, None)
}

fn head_dim(_: &mut Data) -> Result<()> {
    let (wide, mut out) = ([0.0_f32; 577], [0.0_f32; 577]);
    let wide = Tensor::new(&wide, [1, 1, 1, 577])?;
    let mut out = TensorMut::new(&mut out, [1, 1, 1, 577])?;
    Attention::new(wide, wide, wide)?.forward(&cpu(), &mut out, None)
}

fn shape_of_k(data: &mut Data) -> Result<()> {
    let k = Tensor::new(&data.keys[..KEYS / 2], [1, 2, 7, 8])?;
    Attention::new(data.q(), k, k).map(|_| ())
}

fn shape_of_v(data: &mut Data) -> Result<()> {
    let v = Tensor::strided(&data.keys, [2, 2, 3, 8], [112, 56, 8, 1])?;
    Attention::new(data.q(), data.k(), v).map(|_| ())
}

fn shape_of_o(data: &mut Data) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    let mut o = TensorMut::new(&mut data.out[..QUERIES / 2], [2, 2, 5, 8])?;
    Attention::new(q, k, k)?.forward(&cpu(), &mut o, None)
}

fn with_lse(data: &mut Data, shape: [usize; 3], strides: [usize; 3]) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    let mut o = TensorMut::new(&mut data.out, Q)?;
    let mut lse = ViewMut::strided(&mut data.lse, shape, strides)?;
    Attention::new(q, k, k)?.forward(&cpu(), &mut o, Some(&mut lse))
}

fn shape_of_dk(data: &mut Data) -> Result<()> {
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0_f32; QUERIES]);
    let rows = vec![0.0_f32; QUERIES / 8];
    Attention::new(data.q(), data.k(), data.k())?.backward(
        &cpu(),
        data.q(),
        View::new(&rows, LSE)?,
        data.q(),
        Gradients {
            dq: &mut TensorMut::new(&mut dq, Q)?,
            dk: &mut TensorMut::new(&mut dk[..KEYS / 2], [2, 1, 7, 8])?,
            dv: &mut TensorMut::new(&mut dv[..KEYS], K)?,
        },
    )
}

fn shape_of_lse_parts(data: &mut Data) -> Result<()> {
    let parts = View::new(&data.queries, [1, 2, 4, 5, 8])?;
    let lse_parts = View::new(&data.keys[..32], [1, 2, 4, 4])?;
    let mut o = TensorMut::new(&mut data.out, Q)?;
    merge(&cpu(), parts, lse_parts, LseBase::E, &mut o, None)
}

fn o_repeats(data: &mut Data) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    let mut o = TensorMut::strided(&mut data.out, Q, [160, 40, 0, 1])?;
    Attention::new(q, k, k)?.forward(&cpu(), &mut o, None)
}

fn workspace_too_small(data: &mut Data) -> Result<()> {
    let (q, k) = (Tensor::new(&data.queries, Q)?, Tensor::new(&data.keys, K)?);
    let handle = cpu();
    let problem = Attention::new(q, k, k)?;
    let bytes = problem.forward_workspace_size(&handle)?;
    assert!(bytes > 0, "the call needs no workspace");
    let mut memory = vec![0_u8; bytes + 256];
    let begin = memory.as_ptr().align_offset(256);
    let launch = handle
        .on(Stream::DEFAULT)
        .workspace(BufferMut::from(&mut memory[begin..begin + bytes - 1]));
    problem.forward(launch, &mut TensorMut::new(&mut data.out, Q)?, None)
}

type Call = fn(&mut Data) -> Result<()>;

const CALLS: &[(&str, Call)] = &[
    ("device-unknown", |_| Handle::new(Device::Cuda(999)).map(|_| ())),
    ("device-of-memory", q_on_a_device),
    ("stream-on-cpu", stream_on_cpu),
    ("channels", channels),
    ("heads", heads),
    ("head-dim", head_dim),
    ("shape-of-k", shape_of_k),
    ("shape-of-v", shape_of_v),
    ("shape-of-o", shape_of_o),
    ("shape-of-lse", |data| with_lse(data, [2, 4, 4], [20, 5, 1])),
    ("shape-of-dk", shape_of_dk),
    ("shape-of-lengths", |data| decode(data, &[7], 0)),
    ("shape-of-lse-parts", shape_of_lse_parts),
    ("scale-negative", |data| forward(data, |problem| problem.scale(-1.0))),
    ("scale-nan", |data| forward(data, |problem| problem.scale(f32::NAN))),
    ("splits", |data| decode(data, &[7, 5], 2000)),
    ("tree-mask", tree_mask),
    ("zero-of-floats", zero_of_floats),
    ("append-nowhere", |data| append(data, |append| Ok(append))),
    ("rotary-dim", rotary_dim),
    ("kernel-unknown", |data| forward(data, |problem| problem.kernel(c"nonsense"))),
    ("kernel-refuses", |data| forward(data, |problem| problem.kernel(c"fwd_reference"))),
    ("option", |_| cpu().set(Setting::CpuThreads, -1)),
    ("option-unknown", |_| cpu().set(Setting::Unknown(99), 0)),
    ("arch-unknown", |data| {
        let problem = Attention::new(data.q(), data.k(), data.k())?.target_arch(12);
        problem.explain_forward(&cpu()).map(|_| ())
    }),
    ("arch-of-a-call", |data| forward(data, |problem| problem.target_arch(90))),
    ("o-repeats", o_repeats),
    ("lse-repeats", |data| with_lse(data, LSE, [0, 0, 0])),
    ("workspace-too-small", workspace_too_small),
];

#[test]
fn every_call_of_the_table() {
    let calls: HashMap<_, _> = CALLS.iter().copied().collect();
    let mut first = Data::new();
    forward(&mut first, |problem| problem).unwrap();
    let (rows, impossible) = table();
    for Row { id, statuses, words } in &rows {
        let call = calls.get(id.as_str()).unwrap_or_else(|| panic!("{id}: no code"));
        let mut data = Data::new();
        let error = call(&mut data).expect_err(id);
        // The name of the status comes first.
        let text = error.to_string();
        let name = text.split(' ').next().unwrap().trim_start_matches("CUFLASH_ERROR_");
        assert!(statuses.iter().any(|status| status == name), "{id}: {text}");
        assert!(!matches!(error.status(), Status::Unknown(_)), "{id}: {text}");
        for word in words {
            assert!(word.iter().any(|either| text.contains(either)), "{id}: no {word:?}: {text}");
        }
        assert!(data.untouched(), "{id}: the call has written");
        let mut good = Data::new();
        forward(&mut good, |problem| problem).unwrap();
        assert_eq!(good.out, first.out, "{id}: the next good call");
    }
    assert_eq!(rows.len(), CALLS.len(), "code for a call that is not in the table");
    println!("{} calls refused, {impossible} cannot be written in Rust", rows.len());
}
