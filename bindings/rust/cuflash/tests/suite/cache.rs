//! Caches in pages, quantised and appended to, and tree masks, on the CPU device against f64.

use cuflash::{
    Append, Attention, Cache, CacheMut, Decode, Device, Fp8E4m3, Handle, Int4Pair, Pairs, Status,
    Tensor, TensorMut, View,
};

use crate::errors::refused;
use crate::reference::{error, numbers, to_f64, Case};

const HEADS_KV: usize = 2;
const PAGE: usize = 4;
const D: usize = 40;
/// What entries of a table that are not used hold.
const UNUSED: i64 = i32::MAX as i64;

fn cpu() -> Handle {
    Handle::new(Device::Cpu).unwrap()
}

/// Pages in an odd order and the table that names them; two sequences of up to `columns` pages.
fn table(lengths: [i32; 2], columns: usize) -> Vec<i64> {
    let mut table: Vec<i64> = (0..2 * columns as i64).rev().collect();
    for (row, length) in table.chunks_mut(columns).zip(lengths) {
        row[(length as usize).div_ceil(PAGE)..].fill(UNUSED);
    }
    table
}

/// Sequence `b` out of pools `[pages, heads_kv, page, channels]`, as `[1, heads_kv, length, channels]`.
fn sequence(pool: &[f64], channels: usize, ids: &[i64], length: usize) -> Vec<f64> {
    let mut values = Vec::new();
    for head in 0..HEADS_KV {
        for slot in 0..length {
            let page = ids[slot / PAGE] as usize;
            let row = (page * HEADS_KV + head) * PAGE + slot % PAGE;
            values.extend_from_slice(&pool[row * channels..][..channels]);
        }
    }
    values
}

#[track_caller]
fn check_sequences(
    o: &[f32],
    q: &[f32],
    heads: usize,
    len_q: usize,
    sequences: &[(Vec<f64>, Vec<f64>)],
    causal: bool,
) {
    for (b, (k, v)) in sequences.iter().enumerate() {
        let case = Case::new(1, heads, HEADS_KV, len_q, k.len() / (HEADS_KV * D));
        let case = Case { causal, ..case.head_dim(D) };
        let rows = |x| to_f64(x).len() / sequences.len();
        let q = &q[b * rows(q)..][..rows(q)];
        let o = &o[b * rows(o)..][..rows(o)];
        let (wanted, _) = case.forward(&to_f64(q), k, v);
        let worst = error(o, &wanted);
        assert!(worst < 1e-5, "sequence {b}: {worst}");
    }
}

/// Integers of 8 bits for the keys and of 4 for the values, with zero points and scales of two groups, in pages
/// that a table and a list name.
#[test]
fn pages_of_integers() {
    let (columns, lengths) = (3, [9, 6]);
    let rows = 2 * columns * HEADS_KV * PAGE;
    let k: Vec<i8> = numbers::<f32>(rows * D, 1).iter().map(|x| (x * 127.0) as i8).collect();
    let v: Vec<u8> =
        numbers::<f32>(rows * D / 2, 2).iter().map(|x| (x * 127.0) as i8 as u8).collect();
    let scale: Vec<f32> = numbers::<f32>(rows * 2, 3).iter().map(|x| x.abs() / 50.0).collect();
    let zero: Vec<f32> = numbers(rows * 2, 4);
    let nibble = |index: usize| {
        let byte = v[index / 2] << if index % 2 == 0 { 4 } else { 0 };
        f64::from(byte as i8 >> 4)
    };
    let value = |stored: f64, index: usize| {
        let group = index / D * 2 + index % D / 32;
        (stored - f64::from(zero[group])) * f64::from(scale[group])
    };
    let k_values: Vec<f64> = k.iter().enumerate().map(|(i, &x)| value(x.into(), i)).collect();
    let v_values: Vec<f64> = (0..rows * D).map(|i| value(nibble(i), i)).collect();

    let table = table(lengths, columns);
    let q: Vec<f32> = numbers(2 * 4 * D, 5);
    let slots = [2 * columns, HEADS_KV, PAGE];
    let shape = [slots[0], slots[1], slots[2], D];
    let groups = [slots[0], slots[1], slots[2], 2];
    let pairs = Int4Pair::slice_from_bits(&v);
    let (scale, zero) = (View::new(&scale, groups).unwrap(), View::new(&zero, groups).unwrap());
    let cache = Cache::new(
        Tensor::new(&k, shape).unwrap(),
        Tensor::new(pairs, [slots[0], slots[1], slots[2], D / 2]).unwrap(),
    )
    .unwrap()
    .lengths(View::new(&lengths, [2]).unwrap())
    .k_scale(scale)
    .v_scale(scale)
    .k_zero(zero)
    .v_zero(zero);
    let offsets = [0, 3, 5];
    let ids: Vec<i32> = table.iter().filter(|&&id| id != UNUSED).map(|&id| id as i32).collect();
    // SAFETY: the offsets rise to the number of ids.
    let listed = unsafe {
        cache.paged_by_offsets(View::new(&offsets, [3]).unwrap(), View::new(&ids, [5]).unwrap(), 12)
    };
    let sequences: Vec<_> = (0..2)
        .map(|b| {
            let (ids, length) = (&table[b * columns..], lengths[b] as usize);
            (sequence(&k_values, D, ids, length), sequence(&v_values, D, ids, length))
        })
        .collect();
    for cache in [cache.paged(View::new(&table, [2, columns]).unwrap()), listed] {
        let mut o = vec![f32::NAN; q.len()];
        let problem = Decode::new(Tensor::new(&q, [2, 4, 1, D]).unwrap(), cache).unwrap();
        assert!(problem.workspace_size(&cpu()).unwrap() > 0);
        assert!(problem.explain(&cpu()).unwrap().contains("\"operation\""));
        problem.decode(&cpu(), &mut TensorMut::new(&mut o, [2, 4, 1, D]).unwrap(), None).unwrap();
        check_sequences(&o, &q, 4, 1, &sequences, false);
    }
}

/// Entries of a cache of fp8, whose codes below 0x08 are multiples of 2^-9; values within keys.
#[test]
fn entries_of_fp8() {
    let codes: Vec<u8> = (0..3 * HEADS_KV * 5 * D).map(|i| (i * 7 % 8) as u8).collect();
    let values: Vec<f64> = codes.iter().map(|&code| f64::from(code) / 512.0).collect();
    let entries = [2, 0];
    let q: Vec<f32> = numbers(2 * 4 * D, 6);
    let cache = Cache::values_in_keys(
        Tensor::new(Fp8E4m3::slice_from_bits(&codes), [3, HEADS_KV, 5, D]).unwrap(),
        D,
    )
    .entries(View::new(&entries, [2]).unwrap());
    let mut o = vec![f32::NAN; q.len()];
    Decode::new(Tensor::new(&q, [2, 4, 1, D]).unwrap(), cache)
        .unwrap()
        .deterministic()
        .batch_invariant()
        .sm_margin(2)
        .decode(&cpu(), &mut TensorMut::new(&mut o, [2, 4, 1, D]).unwrap(), None)
        .unwrap();
    let sequences: Vec<_> = entries
        .iter()
        .map(|&entry| values[entry as usize * HEADS_KV * 5 * D..][..HEADS_KV * 5 * D].to_vec())
        .map(|keys| (keys.clone(), keys))
        .collect();
    check_sequences(&o, &q, 4, 1, &sequences, false);
}

/// A word for each row, the same as a bias that hides keys; in forward and in decode.
#[test]
fn tree_mask() {
    let case = Case::new(2, 4, HEADS_KV, 3, 7).head_dim(D);
    let words: [u32; 3] = [0b00001, 0b00011, 0b10101];
    let mut bias = vec![0.0; case.shape_scores().iter().product()];
    for (index, bias) in bias.iter_mut().enumerate() {
        let (row, key) = (index / case.len_k % case.len_q, index % case.len_k);
        if key >= 2 && words[row] >> (key - 2) & 1 == 0 {
            *bias = f64::NEG_INFINITY;
        }
    }
    let q: Vec<f32> = numbers(case.shape_q().iter().product(), 1);
    let k: Vec<f32> = numbers(case.shape_k().iter().product(), 2);
    let v: Vec<f32> = numbers(case.shape_v().iter().product(), 3);
    let case = Case { bias: Some(&bias), ..case };
    let (wanted, _) = case.forward(&to_f64(&q), &to_f64(&k), &to_f64(&v));
    let [tensor_q, tensor_k, tensor_v] = [
        Tensor::new(&q, case.shape_q()).unwrap(),
        Tensor::new(&k, case.shape_k()).unwrap(),
        Tensor::new(&v, case.shape_v()).unwrap(),
    ];
    let mask = View::new(&words, [1, 3, 1]).unwrap();
    let mut o = vec![f32::NAN; wanted.len()];
    Attention::new(tensor_q, tensor_k, tensor_v)
        .unwrap()
        .tree_mask(mask, 5)
        .forward(&cpu(), &mut TensorMut::new(&mut o, case.shape_o()).unwrap(), None)
        .unwrap();
    assert!(error(&o, &wanted) < 1e-5);
    let mut o = vec![f32::NAN; wanted.len()];
    Decode::new(tensor_q, Cache::new(tensor_k, tensor_v).unwrap())
        .unwrap()
        .tree_mask(mask, 5)
        .decode(&cpu(), &mut TensorMut::new(&mut o, case.shape_o()).unwrap(), None)
        .unwrap();
    assert!(error(&o, &wanted) < 1e-5);
}

/// Rows `[heads, len, D]` of each of two sequences normed, multiplied and rotated by their positions.
fn changed(rows: &[f32], positions: &[i32], cos: &[f32], sin: &[f32], weight: &[f32]) -> Vec<f64> {
    let (len, pairs) = (positions.len() / 2, cos.len() / 16);
    let mut rows = to_f64(rows);
    let heads = rows.len() / (2 * len * D);
    for (index, row) in rows.chunks_mut(D).enumerate() {
        let root = (row.iter().map(|x| x * x).sum::<f64>() / D as f64 + 1e-3).sqrt();
        for (x, &weight) in row.iter_mut().zip(weight) {
            *x = *x / root * f64::from(weight);
        }
        let position = positions[index / (heads * len) * len + index % len] as usize;
        for pair in 0..pairs {
            let at = position * pairs + pair;
            let (c, s) = (f64::from(cos[at]), f64::from(sin[at]));
            let (x, y) = (row[2 * pair], row[2 * pair + 1]);
            (row[2 * pair], row[2 * pair + 1]) = (x * c - y * s, x * s + y * c);
        }
    }
    rows
}

/// Tokens appended to pages after the lengths, normed and rotated, then attended to: as attention over all keys
/// together. Queries go into other memory and in place.
#[test]
fn append_then_decode() {
    let (columns, before, len) = (3, [5, 1], 3);
    let after = before.map(|length| length + len as i32);
    let positions: Vec<i32> = before.iter().flat_map(|&n| n..n + len as i32).collect();
    let table = table(after, columns);
    let shape = [2 * columns, HEADS_KV, PAGE, D];
    let mut k_pool: Vec<f32> = numbers(shape.iter().product(), 1);
    let mut v_pool: Vec<f32> = numbers(shape.iter().product(), 2);
    let (k, v): (Vec<f32>, Vec<f32>) =
        (numbers(2 * HEADS_KV * len * D, 3), numbers(2 * HEADS_KV * len * D, 4));
    let mut q: Vec<f32> = numbers(2 * 4 * len * D, 5);
    let (cos, sin): (Vec<f32>, Vec<f32>) =
        (0..16 * 6).map(|i| ((i as f32).cos(), (i as f32).sin())).unzip();
    let weight: Vec<f32> = numbers(D, 6);

    // What the pages must hold afterwards.
    let changed_k = changed(&k, &positions, &cos, &sin, &weight);
    let (mut k_wanted, mut v_wanted) = (to_f64(&k_pool), to_f64(&v_pool));
    for b in 0..2 {
        for head in 0..HEADS_KV {
            for token in 0..len {
                let slot = positions[b * len + token] as usize;
                let page = table[b * columns + slot / PAGE] as usize;
                let to = ((page * HEADS_KV + head) * PAGE + slot % PAGE) * D;
                let from = ((b * HEADS_KV + head) * len + token) * D;
                k_wanted[to..to + D].copy_from_slice(&changed_k[from..from + D]);
                v_wanted[to..to + D].copy_from_slice(&to_f64(&v[from..from + D]));
            }
        }
    }
    let q_wanted = changed(&q, &positions, &cos, &sin, &weight);

    let new_shape = [2, HEADS_KV, len, D];
    let append =
        Append::new(Tensor::new(&k, new_shape).unwrap(), Tensor::new(&v, new_shape).unwrap())
            .unwrap()
            .rotate(
                View::new(&cos, [16, 6]).unwrap(),
                View::new(&sin, [16, 6]).unwrap(),
                Pairs::Interleaved,
            )
            .k_norm(View::new(&weight, [D]).unwrap())
            .epsilon(1e-3);
    let (lengths, new_lengths) =
        (View::new(&before, [2]).unwrap(), View::new(&after, [2]).unwrap());
    let mut cache = CacheMut::new(
        TensorMut::new(&mut k_pool, shape).unwrap(),
        TensorMut::new(&mut v_pool, shape).unwrap(),
    )
    .unwrap()
    .lengths(lengths)
    .paged(View::new(&table, [2, columns]).unwrap());
    assert!(append.target_arch(90).explain(&cpu(), &cache).unwrap().contains("\"append\""));
    append.append(&cpu(), &mut cache).unwrap();
    let with_q = append.q_norm(View::new(&weight, [D]).unwrap());
    let mut q_out = vec![f32::NAN; q.len()];
    let q_shape = [2, 4, len, D];
    with_q
        .append_with_queries(
            &cpu(),
            &mut cache,
            Tensor::new(&q, q_shape).unwrap(),
            &mut TensorMut::new(&mut q_out, q_shape).unwrap(),
        )
        .unwrap();
    with_q
        .append_with_queries_in_place(
            &cpu(),
            &mut cache,
            &mut TensorMut::new(&mut q, q_shape).unwrap(),
        )
        .unwrap();
    assert_eq!(q, q_out);
    assert!(error(&q, &q_wanted) < 1e-5);

    let mut o = vec![f32::NAN; q.len()];
    let cache = cache.lengths(new_lengths);
    Decode::new(Tensor::new(&q, q_shape).unwrap(), cache.cache())
        .unwrap()
        .causal()
        .decode(&cpu(), &mut TensorMut::new(&mut o, q_shape).unwrap(), None)
        .unwrap();
    let sequences: Vec<_> = (0..2)
        .map(|b| {
            let (ids, length) = (&table[b * columns..], after[b] as usize);
            (sequence(&k_wanted, D, ids, length), sequence(&v_wanted, D, ids, length))
        })
        .collect();
    check_sequences(&o, &q, 4, len, &sequences, true);
    assert!(error(&k_pool, &k_wanted) < 1e-5);
    assert_eq!(error(&v_pool, &v_wanted), 0.0);
}

/// Slots of the whole cache, of integers that saturate; negative ones and those past the last are skipped.
#[test]
fn append_by_slots_and_positions() {
    let shape = [2, HEADS_KV, 4, 8];
    let (mut k_pool, mut v_pool) = (vec![1_i8; 128], vec![1_i8; 128]);
    let scale = [0.5_f32];
    let k = vec![100.0_f32; 3 * HEADS_KV * 8];
    let slots = [6_i64, -1, 8];
    let positions = [3, -5, 9];
    let mut cache = CacheMut::new(
        TensorMut::new(&mut k_pool, shape).unwrap(),
        TensorMut::new(&mut v_pool, shape).unwrap(),
    )
    .unwrap()
    .k_scale(View::new(&scale, [1, 1, 1, 1]).unwrap());
    let append = Append::keys(Tensor::new(&k, [1, HEADS_KV, 3, 8]).unwrap());
    append.slots(View::new(&slots, [1, 3]).unwrap()).append(&cpu(), &mut cache).unwrap();
    append.positions(View::new(&positions, [1, 3]).unwrap()).append(&cpu(), &mut cache).unwrap();
    for (row, values) in k_pool.chunks(8).enumerate() {
        let (entry, slot) = (row / (HEADS_KV * 4), row % 4);
        let written = (entry, slot) == (1, 2) || (entry, slot) == (0, 3);
        assert_eq!(values, [if written { 127 } else { 1 }; 8], "row {row}");
    }
    assert_eq!(v_pool, [1; 128]);
}

#[test]
fn what_is_refused() {
    use Status::{DimensionMismatch, InvalidDimension, InvalidValue, NullPointer};
    let (q, pool) = ([1.0_f32; 2 * 4 * 8], [1.0_f32; 3 * 2 * 4 * 8]);
    let q = Tensor::new(&q, [2, 4, 1, 8]).unwrap();
    let pool = Tensor::new(&pool, [3, 2, 4, 8]).unwrap();
    let cache = Cache::new(pool, pool).unwrap();
    let decode = |cache: Cache<'_>| {
        let mut o = [0.0_f32; 2 * 4 * 8];
        Decode::new(q, cache)?.decode(&cpu(), &mut TensorMut::new(&mut o, [2, 4, 1, 8])?, None)
    };
    let (ids, wide, offsets) = ([0_i32; 6], [0_i64; 12], [0, 1, 2]);
    let ids = View::new(&ids, [2, 3]).unwrap();
    decode(cache.paged(ids)).unwrap();
    refused(
        decode(cache.paged(View::new(&offsets, [1, 3]).unwrap())),
        DimensionMismatch,
        "table: 1 rows",
    );
    let gaps = View::strided(&wide, [2, 3], [6, 2]).unwrap();
    refused(decode(cache.paged(gaps)), InvalidValue, "table: not contiguous");
    refused(
        decode(cache.entries(View::new(&offsets, [3]).unwrap())),
        DimensionMismatch,
        "entries: shape",
    );
    refused(
        decode(cache.lengths(View::new(&offsets, [3]).unwrap())),
        DimensionMismatch,
        "lengths: shape",
    );
    let bytes = [0_u8; 3 * 2 * 4 * 4];
    let pairs = |shape| Tensor::new(Int4Pair::slice_from_bits(&bytes), shape).unwrap();
    let fours = Cache::new(pairs([3, 2, 4, 4]), pairs([3, 2, 4, 4])).unwrap();
    decode(fours).unwrap();
    refused(decode(fours.head_dim_v(9)), DimensionMismatch, "v: shape");
    let too_many = Decode::new(q, Cache::values_in_keys(pool, 9)).unwrap();
    refused(too_many.workspace_size(&cpu()), DimensionMismatch, "head_dim_v: 9");
    let no_channels = Decode::new(q, Cache::values_in_keys(pool, 0)).map(drop);
    refused(no_channels, Status::UnsupportedHeadDim, "v: no channels");
    let scale = [1.0_f32; 24];
    let scales = |shape: [usize; 4]| View::new(&scale[..shape.iter().product()], shape).unwrap();
    refused(decode(cache.k_scale(scales([2, 1, 1, 1]))), DimensionMismatch, "k_scale: shape");
    refused(
        decode(cache.k_scale(scales([1, 1, 1, 2]))),
        DimensionMismatch,
        "k_scale: 2 groups of 8",
    );
    refused(
        decode(cache.k_scale(scales([3, 1, 1, 1])).v_scale(scales([1, 2, 1, 1]))),
        InvalidValue,
        "v_scale: not of the element type and strides of k_scale",
    );
    refused(decode(cache.v_zero(scales([1, 1, 1, 1]))), InvalidValue, "cache.v_zero");
    let words = [0_u32; 8];
    let mut o = [0.0_f32; 64];
    let mut o = TensorMut::new(&mut o, [2, 4, 1, 8]).unwrap();
    let mut masked =
        |words, keys| Decode::new(q, cache)?.tree_mask(words, keys).decode(&cpu(), &mut o, None);
    refused(
        masked(View::new(&words, [8, 1, 1]).unwrap(), 1),
        DimensionMismatch,
        "tree_mask: shape",
    );
    refused(
        masked(View::new(&words, [2, 1, 4]).unwrap(), 129),
        DimensionMismatch,
        "tree_mask: 4 words",
    );
    masked(View::new(&words, [2, 1, 4]).unwrap(), 0).unwrap();

    let mut memory = ([0.0_f32; 96], [0.0_f32; 96]);
    let mut into = CacheMut::new(
        TensorMut::new(&mut memory.0, [3, 2, 2, 8]).unwrap(),
        TensorMut::new(&mut memory.1, [3, 2, 2, 8]).unwrap(),
    )
    .unwrap();
    let row = [1.0_f32; 32];
    let new = |shape| Append::keys(Tensor::new(&row, shape).unwrap());
    let positions = [0, 1];
    let here = View::new(&positions, [2, 1]).unwrap();
    let mut append = |append: Append<'_, f32>| append.append(&cpu(), &mut into);
    append(new([2, 2, 1, 8]).positions(here)).unwrap();
    refused(append(new([2, 2, 1, 8])), NullPointer, "cache.lengths: is NULL");
    refused(append(new([4, 1, 1, 8])), DimensionMismatch, "k: 3 entries for 4 sequences");
    refused(append(new([2, 1, 2, 8])), DimensionMismatch, "k: shape");
    refused(append(new([2, 2, 2, 4])), DimensionMismatch, "k: shape");
    let append_new = new([2, 2, 1, 8]);
    refused(
        append(append_new.positions(View::new(&positions, [1, 2]).unwrap())),
        DimensionMismatch,
        "positions: shape",
    );
    let angles = View::new(&row, [8, 4]).unwrap();
    let few = View::new(&row[..16], [4, 4]).unwrap();
    let no_pairs = View::new(&row[..0], [8, 0]).unwrap();
    let rotated = |cos, sin| append_new.positions(here).rotate(cos, sin, Pairs::Apart);
    append(rotated(angles, angles)).unwrap();
    refused(append(rotated(angles, few)), DimensionMismatch, "sin: shape");
    refused(append(rotated(no_pairs, no_pairs)), InvalidDimension, "cos: no pairs");
    let wide = View::new(&row, [2, 16]).unwrap();
    refused(append(rotated(wide, wide)), InvalidDimension, "rotary_dim: 32");
    refused(append(append_new.positions(here).epsilon(1.0)), InvalidValue, "norm_epsilon");
    let weight = View::new(&row[..7], [7]).unwrap();
    refused(append(append_new.positions(here).k_norm(weight)), DimensionMismatch, "k_norm: shape");
    let weight = View::new(&row[..8], [8]).unwrap();
    refused(append(append_new.positions(here).q_norm(weight)), InvalidValue, "q_norm_weight");
    let mut in_keys =
        CacheMut::values_in_keys(TensorMut::new(&mut memory.0, [3, 2, 2, 8]).unwrap(), 8);
    let both = Tensor::new(&row, [2, 2, 1, 8]).unwrap();
    let nothing = Tensor::new(&row[..0], [1, 1, 1, 0]).unwrap();
    let (mut keys, mut values) = ([0.0_f32; 8], [0.0_f32; 0]);
    let mut one_slot = CacheMut::new(
        TensorMut::new(&mut keys, [1, 1, 1, 8]).unwrap(),
        TensorMut::new(&mut values, [1, 1, 1, 0]).unwrap(),
    )
    .unwrap();
    let one_key = Tensor::new(&row[..8], [1, 1, 1, 8]).unwrap();
    let first = View::new(&[0_i32], [1, 1]).unwrap();
    refused(
        Append::new(one_key, nothing).unwrap().positions(first).append(&cpu(), &mut one_slot),
        Status::UnsupportedHeadDim,
        "v: no channels",
    );
    refused(
        Append::new(both, both).unwrap().positions(here).append(&cpu(), &mut in_keys),
        InvalidValue,
        "v: the cache has them in its keys",
    );
}
