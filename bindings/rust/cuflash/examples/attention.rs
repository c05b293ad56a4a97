//! Attention in a sliding window with grouped heads, checked against a loop; the same of two packed
//! sequences; and one token more over a cache.
//!
//! It runs on the CPU device. On a GPU the calls are the same, with buffers of device memory.

use cuflash::{
    Attention, Cache, Decode, Device, Handle, Result, Sequences, Tensor, TensorMut, View, ViewMut,
};

// Six query heads read two heads of keys and values; a row sees itself and the 15 keys before it.
const HEADS: usize = 6;
const HEADS_KV: usize = 2;
const LENGTH: usize = 100;
const HEAD_DIM: usize = 64;
const WINDOW: usize = 16;
// Where the second of two sequences begins.
const SECOND: usize = 40;

// [attention]
/// `q` and `o` are dense [1, HEADS, LENGTH, HEAD_DIM], `k` and `v` [1, HEADS_KV, LENGTH, HEAD_DIM].
fn windowed_attention(
    handle: &Handle,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let (shape, shape_kv) = ([1, HEADS, LENGTH, HEAD_DIM], [1, HEADS_KV, LENGTH, HEAD_DIM]);
    Attention::new(Tensor::new(q, shape)?, Tensor::new(k, shape_kv)?, Tensor::new(v, shape_kv)?)?
        .causal()
        .window(Some(WINDOW as u32 - 1), None)
        .forward(
            handle,
            &mut TensorMut::new(o, shape)?,
            Some(&mut ViewMut::new(lse, [1, HEADS, LENGTH])?),
        )
}
// [attention]

// [packed]
/// The same rows as two sequences, one after the other: none sees a key of the other one.
fn two_sequences(handle: &Handle, q: &[f32], k: &[f32], v: &[f32], o: &mut [f32]) -> Result<()> {
    let offsets = [0, SECOND as i32, LENGTH as i32];
    let longest = LENGTH - SECOND;
    let sequences = Sequences::packed(View::new(&offsets, [3])?, longest);
    let (shape, shape_kv) = ([1, HEADS, LENGTH, HEAD_DIM], [1, HEADS_KV, LENGTH, HEAD_DIM]);
    let [k, v] = [Tensor::new(k, shape_kv)?, Tensor::new(v, shape_kv)?];
    Attention::ragged(Tensor::new(q, shape)?, sequences, k, v, sequences)?
        .causal()
        .window(Some(WINDOW as u32 - 1), None)
        .forward(handle, &mut TensorMut::new(o, shape)?, None)
}
// [packed]

// [decode]
/// The last row again, as the newest token over a cache of the keys so far.
fn newest_token(handle: &Handle, q: &[f32], k: &[f32], v: &[f32], o: &mut [f32]) -> Result<()> {
    let length = [LENGTH as i32];
    let shape = [1, HEADS, 1, HEAD_DIM];
    let shape_kv = [1, HEADS_KV, LENGTH, HEAD_DIM];
    // The last row of each head of q, by strides; nothing is copied.
    let strides = [HEADS * LENGTH * HEAD_DIM, LENGTH * HEAD_DIM, HEAD_DIM, 1];
    let newest = Tensor::strided(&q[(LENGTH - 1) * HEAD_DIM..], shape, strides)?;
    let cache = Cache::new(Tensor::new(k, shape_kv)?, Tensor::new(v, shape_kv)?)?
        .lengths(View::new(&length, [1])?);
    Decode::new(newest, cache)?.causal().window(Some(WINDOW as u32 - 1), None).decode(
        handle,
        &mut TensorMut::new(o, shape)?,
        None,
    )
}
// [decode]

/// The same with a loop, in f64, of a sequence that begins at a row.
fn expected(q: &[f32], k: &[f32], v: &[f32], head: usize, row: usize, begin: usize) -> Vec<f64> {
    let head_kv = head / (HEADS / HEADS_KV);
    let vector = |tensor: &[f32], head: usize, row: usize| -> Vec<f64> {
        tensor[(head * LENGTH + row) * HEAD_DIM..][..HEAD_DIM].iter().map(|&x| x.into()).collect()
    };
    let (mut sum, mut o) = (0.0, vec![0.0; HEAD_DIM]);
    for key in (row + 1).saturating_sub(WINDOW).max(begin)..=row {
        let score: f64 =
            vector(q, head, row).iter().zip(vector(k, head_kv, key)).map(|(a, b)| a * b).sum();
        let weight = (score / (HEAD_DIM as f64).sqrt()).exp();
        sum += weight;
        o.iter_mut().zip(vector(v, head_kv, key)).for_each(|(o, v)| *o += weight * v);
    }
    o.iter().map(|o| o / sum).collect()
}

fn main() -> Result<()> {
    let numbers = |count: usize, step: f32| -> Vec<f32> {
        (0..count).map(|index| (index as f32 * step).sin()).collect()
    };
    let q = numbers(HEADS * LENGTH * HEAD_DIM, 0.7);
    let k = numbers(HEADS_KV * LENGTH * HEAD_DIM, 0.3);
    let v = numbers(HEADS_KV * LENGTH * HEAD_DIM, 1.1);
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; HEADS * LENGTH]);
    let (mut packed, mut token) = (o.clone(), vec![f32::NAN; HEADS * HEAD_DIM]);

    let cpu = Handle::new(Device::Cpu)?;
    windowed_attention(&cpu, &q, &k, &v, &mut o, &mut lse)?;
    two_sequences(&cpu, &q, &k, &v, &mut packed)?;
    newest_token(&cpu, &q, &k, &v, &mut token)?;

    let mut worst: f64 = 0.0;
    for head in 0..HEADS {
        for row in 0..LENGTH {
            let at = (head * LENGTH + row) * HEAD_DIM;
            let begin = if row < SECOND { 0 } else { SECOND };
            let mut rows = vec![(&o[at..], 0), (&packed[at..], begin)];
            if row == LENGTH - 1 {
                rows.push((&token[head * HEAD_DIM..], 0));
            }
            for (got, begin) in rows {
                for (&got, expected) in got.iter().zip(expected(&q, &k, &v, head, row, begin)) {
                    let error = (f64::from(got) - expected).abs();
                    assert!(error < 1e-5, "head {head}, row {row}: {got}, expected {expected}");
                    worst = worst.max(error);
                }
            }
        }
    }
    println!("{}\nlargest error {worst:.1e}", cuflash::build_info());
    Ok(())
}
