use std::ffi::CStr;
use std::ptr;

use crate::cache::Cache;
use crate::element::{Element, Output};
use crate::error::check;
use crate::gradients::{Delta, Extras, Gradients};
use crate::handle::{Handle, Launch};
use crate::library::struct_size;
use crate::sequences::{Extents, Packed, Sequences};
use crate::view::{
    expect_place, raw_extent, AnyView, Grid, Place, Tensor, TensorMut, View, ViewMut,
};
use crate::{sys, Error, Result, Status};

/// One attention problem: tensors and options. [`Attention`] and [`Decode`] are its two kinds.
///
/// Options that are not set have the library's defaults: no mask, no window, a scale of
/// `1 / sqrt(head_dim)`.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, T, K> {
    q: Tensor<'a, T>,
    queries: Sequences<'a>,
    keys: K,
    extents: Extents,
    flags: u32,
    causal: bool,
    align: Align<'a>,
    window: (i64, i64),
    scale: f32,
    softcap: f32,
    alibi_slopes: Option<AnyView<'a, 2>>,
    bias: Option<AnyView<'a, 4>>,
    sinks: Option<AnyView<'a, 1>>,
    tree_mask: Option<(View<'a, u32, 3>, usize)>,
    dropout_p: f32,
    dropout_state: DropoutState<'a>,
    left_padding: Option<View<'a, i32, 1>>,
    kernel: Option<&'a CStr>,
    num_splits: i32,
    sm_margin: i32,
    target_arch: i32,
}

/// Attention over keys and values of the same call: forward and backward.
pub type Attention<'a, T> = Problem<'a, T, Keys<'a, T>>;

/// Attention of new tokens over a [`Cache`].
pub type Decode<'a, T> = Problem<'a, T, Cache<'a>>;

/// The keys and values of an [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a, T> {
    k: Tensor<'a, T>,
    v: Tensor<'a, T>,
    sequences: Sequences<'a>,
}

/// Where the seed and the offset of dropout's generator are.
#[derive(Debug, Clone, Copy)]
enum DropoutState<'a> {
    Values(u64, u64),
    Memory(View<'a, u64, 1>),
}

/// Where the centre of query row `i` lies among the keys. The causal mask and windows share it.
#[derive(Debug, Clone, Copy, Default)]
pub enum Align<'a> {
    /// At `i + len_k - len_q`, with each sequence's own lengths: the last row sees the last key.
    #[default]
    BottomRight,
    /// At `i`.
    TopLeft,
    /// At `i` plus this.
    Offset(i64),
    /// At `i` plus the sequence's own offset, read where the call runs.
    Offsets(View<'a, i32, 1>),
}

impl Align<'_> {
    fn code(&self) -> i32 {
        match self {
            Self::BottomRight => sys::CUFLASH_ALIGN_BOTTOM_RIGHT,
            Self::TopLeft => sys::CUFLASH_ALIGN_TOP_LEFT,
            Self::Offset(_) => sys::CUFLASH_ALIGN_OFFSET,
            Self::Offsets(_) => sys::CUFLASH_ALIGN_DEVICE_OFFSETS,
        }
    }
}

impl<'a, T, K> Problem<'a, T, K> {
    fn with(q: Tensor<'a, T>, queries: Sequences<'a>, keys: K, extents: Extents) -> Self {
        Self {
            q,
            queries,
            keys,
            extents,
            flags: 0,
            causal: false,
            align: Align::BottomRight,
            window: (0, 0),
            scale: 0.0,
            softcap: 0.0,
            alibi_slopes: None,
            bias: None,
            sinks: None,
            tree_mask: None,
            dropout_p: 0.0,
            dropout_state: DropoutState::Values(0, 0),
            left_padding: None,
            kernel: None,
            num_splits: 0,
            sm_margin: 0,
            target_arch: 0,
        }
    }

    /// A row sees no key after its centre.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Where the centre of a row lies.
    pub fn align(mut self, align: Align<'a>) -> Self {
        self.align = align;
        self
    }

    /// A row sees at most so many keys before and after its centre; `None` is without a limit.
    pub fn window(mut self, left: Option<u32>, right: Option<u32>) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_WINDOW;
        self.window = (left.map_or(-1, i64::from), right.map_or(-1, i64::from));
        self
    }

    /// The factor of the scores, finite and not negative.
    pub fn scale(mut self, scale: f32) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_SCALE_SET;
        self.scale = scale;
        self
    }

    /// Scores become `cap * tanh(score / cap)`, before slopes and bias; 0 is without a cap.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = cap;
        self
    }

    /// Takes a head's slope times a key's distance from the row's centre from the score. `slopes` is
    /// `[batch, heads]`, a batch of 1 for all sequences.
    pub fn alibi_slopes<S: Element>(mut self, slopes: View<'a, S, 2>) -> Self {
        self.alibi_slopes = Some(slopes.erase());
        self
    }

    /// Adds to the scores; minus infinity hides a key. `bias` is `[batch, heads, len_q, len_k]`, the
    /// keys contiguous. Any of the first three extents may be 1, for all.
    pub fn bias<S: Element>(mut self, bias: View<'a, S, 4>) -> Self {
        self.bias = Some(bias.erase());
        self
    }

    /// A score for each head, `[heads]`, that takes part in the softmax without a value of its own.
    pub fn sinks<S: Element>(mut self, sinks: View<'a, S, 1>) -> Self {
        self.sinks = Some(sinks.erase());
        self
    }

    /// Which of the last `keys` keys of its sequence each row sees, for trees of drafted tokens: bit `t %
    /// 32` of word `t / 32` stands for key `len_k - keys + t`, and 0 hides it. `words` is `[batch, len_q,
    /// words]`; a batch, or rows, of 1 for all. Mask and window hold too. Not for the backward pass.
    pub fn tree_mask(mut self, words: View<'a, u32, 3>, keys: usize) -> Self {
        self.tree_mask = Some((words, keys));
        self
    }

    /// Drops each probability with probability `p` and divides the others by `1 - p`. The same seed
    /// and offset drop the same; offsets at least `len_k / 4`, rounded up, apart drop independently.
    pub fn dropout(mut self, p: f32, seed: u64, offset: u64) -> Self {
        self.dropout_p = p;
        self.dropout_state = DropoutState::Values(seed, offset);
        self
    }

    /// As [`dropout`](Self::dropout), with `state`, `[seed, offset]`, read where the call runs.
    pub fn dropout_from(mut self, p: f32, state: View<'a, u64, 1>) -> Self {
        self.dropout_p = p;
        self.dropout_state = DropoutState::Memory(state);
        self
    }

    /// How many of the rows in use of each sequence of k and v come before its first key.
    pub fn left_padding(mut self, rows: View<'a, i32, 1>) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_LEFT_PADDED;
        self.left_padding = Some(rows);
        self
    }

    /// Folds into the `o`, of [`f32`], and the `lse` that are there, as [`merge`](crate::merge) does.
    /// Not for the backward pass.
    pub fn accumulate(mut self) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_ACCUMULATE;
        self
    }

    /// The same bits from run to run.
    pub fn deterministic(mut self) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_DETERMINISTIC;
        self
    }

    /// A row's bits do not depend on the batch that it is in.
    pub fn batch_invariant(mut self) -> Self {
        self.flags |= sys::CUFLASH_PROBLEM_BATCH_INVARIANT;
        self
    }

    /// Forces a kernel or a family of kernels by name. If it refuses the problem, so does the call.
    pub fn kernel(mut self, name: &'a CStr) -> Self {
        self.kernel = Some(name);
        self
    }

    /// Multiprocessors of the GPU to leave to others.
    pub fn sm_margin(mut self, margin: u16) -> Self {
        self.sm_margin = margin.into();
        self
    }

    /// Queries answer for this GPU (90 for sm_90) instead of the handle's device. Calls refuse it.
    pub fn target_arch(mut self, arch: u16) -> Self {
        self.target_arch = arch.into();
        self
    }
}

impl<'a, T: Element, K> Problem<'a, T, K> {
    /// What both kinds have in common. `place` is where memory must lie, `None` for queries.
    fn raw(&self, place: Option<Place>) -> Result<sys::cuflash_problem_t> {
        let grid = self.q.grid();
        let mut raw = sys::cuflash_problem_t {
            struct_size: struct_size::<sys::cuflash_problem_t>(),
            flags: self.flags,
            batch: raw_extent(self.extents.batch)?,
            heads_q: grid.extent(1)?,
            heads_kv: raw_extent(self.extents.heads_kv)?,
            len_q: raw_extent(self.extents.len_q)?,
            head_dim: grid.extent(3)?,
            head_dim_v: raw_extent(self.extents.head_dim_v)?,
            q: self.q.raw("q")?,
            mask: if self.causal { sys::CUFLASH_MASK_CAUSAL } else { sys::CUFLASH_MASK_NONE },
            mask_align: self.align.code(),
            window_left: self.window.0,
            window_right: self.window.1,
            scale: self.scale,
            kernel: self.kernel.map_or(ptr::null(), CStr::as_ptr),
            num_splits: self.num_splits,
            sm_margin: self.sm_margin,
            target_arch: self.target_arch,
            ..Default::default()
        };
        if let Some(place) = place {
            self.q.expect_place("q", place)?;
        }
        match &self.align {
            Align::Offset(offset) => raw.mask_offset = *offset,
            Align::Offsets(offsets) => {
                raw.mask_offsets = self.per_sequence("align", offsets, place)?;
            }
            Align::BottomRight | Align::TopLeft => {}
        }
        if let Some(Packed { offsets, .. }) = &self.queries.packed {
            raw.cu_seqlens_q = offsets.raw_array("offsets of q", place)?;
            raw.total_q = grid.extent(2)?;
        }
        if let Some(used) = &self.queries.used {
            raw.seqused_q = self.per_sequence("used rows of q", used, place)?;
        }
        if let Some(rows) = &self.left_padding {
            raw.leftpad_k = self.per_sequence("left_padding", rows, place)?;
        }
        self.set_modifiers(&mut raw, place)?;
        Ok(raw)
    }

    /// What is done to scores and probabilities.
    fn set_modifiers(&self, raw: &mut sys::cuflash_problem_t, place: Option<Place>) -> Result<()> {
        let Extents { batch, len_q, len_k, .. } = self.extents;
        let heads = self.q.shape()[1];
        raw.softcap = self.softcap;
        if let Some(slopes) = &self.alibi_slopes {
            slopes.grid().expect_repeating_shape("alibi_slopes", [batch, heads])?;
            raw.alibi_slopes = slopes.raw("alibi_slopes", place)?;
            raw.alibi_batch_stride = slopes.grid().repeating_stride(0);
            raw.alibi_dtype = slopes.dtype;
        }
        if let Some(bias) = &self.bias {
            bias.grid().expect_repeating_shape("bias", [batch, heads, len_q, len_k])?;
            raw.bias = bias.raw("bias", place)?;
            raw.bias_batch_stride = bias.grid().repeating_stride(0);
            raw.bias_head_stride = bias.grid().repeating_stride(1);
            raw.bias_row_stride = bias.grid().repeating_stride(2);
            raw.bias_dtype = bias.dtype;
        }
        if let Some(sinks) = &self.sinks {
            sinks.grid().expect_shape("sinks", [heads])?;
            raw.sinks = sinks.raw("sinks", place)?;
            raw.sinks_dtype = sinks.dtype;
        }
        if let Some((words, keys)) = &self.tree_mask {
            self.set_tree_mask(raw, words, *keys, place)?;
        }
        raw.dropout_p = self.dropout_p;
        match &self.dropout_state {
            DropoutState::Values(seed, offset) => {
                (raw.dropout_seed, raw.dropout_offset) = (*seed, *offset);
            }
            DropoutState::Memory(state) => {
                state.grid().expect_shape("dropout state", [2])?;
                raw.dropout_seed_ptr = state.raw_array("dropout state", place)?;
                raw.dropout_offset_ptr = raw.dropout_seed_ptr.wrapping_add(1);
            }
        }
        Ok(())
    }

    fn set_tree_mask(
        &self,
        raw: &mut sys::cuflash_problem_t,
        words: &View<'_, u32, 3>,
        keys: usize,
        place: Option<Place>,
    ) -> Result<()> {
        let Extents { batch, len_q, .. } = self.extents;
        let count = words.shape()[2];
        words.grid().expect_repeating_shape("tree_mask", [batch, len_q, count])?;
        if keys.div_ceil(32) > count {
            return Err(Error::new(
                Status::DimensionMismatch,
                format!("tree_mask: {count} words for the bits of {keys} keys"),
            ));
        }
        if keys > 0 {
            // To the C API 0 is len_q.
            raw.tree_mask = words.raw_array("tree_mask", place)?;
            raw.tree_mask_batch_stride = words.grid().repeating_stride(0);
            raw.tree_mask_row_stride = words.grid().repeating_stride(1);
            raw.tree_mask_len = raw_extent(keys)?;
        }
        Ok(())
    }

    /// The pointer to one value for each sequence of the batch.
    fn per_sequence(
        &self,
        name: &str,
        values: &View<'a, i32, 1>,
        place: Option<Place>,
    ) -> Result<*const i32> {
        values.raw_values(name, self.extents.batch, place)
    }

    fn shape_o(&self) -> [usize; 4] {
        let [batch, heads, rows, _] = self.q.shape();
        [batch, heads, rows, self.extents.head_dim_v]
    }

    fn shape_lse(&self) -> [usize; 3] {
        let [batch, heads, rows, _] = self.q.shape();
        [batch, heads, rows]
    }

    /// Adds o, lse and the workspace of a call.
    fn outputs<O: Output<T>>(
        &self,
        raw: &mut sys::cuflash_problem_t,
        launch: &mut Launch<'_>,
        o: &mut TensorMut<'_, O>,
        lse: Option<&mut ViewMut<'_, f32, 3>>,
    ) -> Result<()> {
        o.grid().expect_shape("o", self.shape_o())?;
        o.expect_place("o", launch.place())?;
        raw.o = o.raw("o")?;
        if let Some(lse) = lse {
            lse.grid().expect_shape("lse", self.shape_lse())?;
            lse.expect_place("lse", launch.place())?;
            set_lse_strides(raw, lse.grid().row_strides("lse")?);
            raw.lse = lse.as_mut_ptr();
        }
        set_workspace(raw, launch)
    }

    /// Adds the lse that a call reads.
    fn input_lse(
        &self,
        raw: &mut sys::cuflash_problem_t,
        lse: &View<'_, f32, 3>,
        place: Place,
    ) -> Result<()> {
        lse.grid().expect_shape("lse", self.shape_lse())?;
        lse.expect_place("lse", place)?;
        set_lse_strides(raw, lse.grid().row_strides("lse")?);
        raw.lse = lse.as_ptr().cast_mut();
        Ok(())
    }
}

fn set_lse_strides(raw: &mut sys::cuflash_problem_t, strides: [i64; 3]) {
    [raw.lse_batch_stride, raw.lse_head_stride, raw.lse_row_stride] = strides;
}

fn set_workspace(raw: &mut sys::cuflash_problem_t, launch: &mut Launch<'_>) -> Result<()> {
    let place = launch.place();
    if let Some(workspace) = &mut launch.workspace {
        expect_place("workspace", workspace.place(), place)?;
        raw.workspace = workspace.as_mut_ptr().cast();
        raw.workspace_size = workspace.len() as u64;
    }
    Ok(())
}

/// The input whose gradient is wanted, of its element type.
fn expect_input<'p, 'a, const N: usize>(
    name: &str,
    input: &'p Option<AnyView<'a, N>>,
    dtype: i32,
) -> Result<&'p AnyView<'a, N>> {
    match input {
        None => {
            Err(Error::new(Status::InvalidValue, format!("d_{name}: the problem has no {name}")))
        }
        Some(input) if input.dtype != dtype => Err(Error::new(
            Status::UnsupportedDtype,
            format!("d_{name}: of another element type than {name}"),
        )),
        Some(input) => Ok(input),
    }
}

/// A dense output where a query asks for one; queries read no pointers.
fn any_output<T: Element>() -> sys::cuflash_tensor_t {
    sys::cuflash_tensor_t {
        flags: sys::CUFLASH_TENSOR_DENSE,
        dtype: T::DTYPE,
        ..Default::default()
    }
}

fn any_gradients<T: Element>() -> sys::cuflash_gradients_t {
    sys::cuflash_gradients_t {
        struct_size: struct_size::<sys::cuflash_gradients_t>(),
        d_o: any_output::<T>(),
        dq: any_output::<T>(),
        dk: any_output::<T>(),
        dv: any_output::<T>(),
        ..Default::default()
    }
}

/// The JSON that an explain function writes.
pub(crate) fn explain(
    query: impl Fn(*mut std::ffi::c_char, usize, *mut usize) -> i32,
) -> Result<String> {
    let mut needed = 0;
    check(query(ptr::null_mut(), 0, &mut needed))?;
    let mut buffer = vec![0_u8; needed];
    check(query(buffer.as_mut_ptr().cast(), buffer.len(), ptr::null_mut()))?;
    buffer.truncate(buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len()));
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}

impl<'a, T: Element> Attention<'a, T> {
    /// `q` is `[batch, heads, len_q, head_dim]`; `k` is `[batch, heads_kv, len_k, head_dim]`, and `v`
    /// too, but its head_dim may be its own. Query head `h` reads head `h / (heads / heads_kv)` of `k`
    /// and `v`.
    pub fn new(q: Tensor<'a, T>, k: Tensor<'a, T>, v: Tensor<'a, T>) -> Result<Self> {
        Self::ragged(q, Sequences::padded(), k, v, Sequences::padded())
    }

    /// Sequences with lengths of their own, of queries and of keys independently. Packed tensors are
    /// `[1, heads, total, head_dim]`, and so are those of the same rows: o and the gradients, and LSE
    /// without the last axis.
    pub fn ragged(
        q: Tensor<'a, T>,
        queries: Sequences<'a>,
        k: Tensor<'a, T>,
        v: Tensor<'a, T>,
        keys: Sequences<'a>,
    ) -> Result<Self> {
        let extents = Extents::of_keys(q.grid(), &queries, k.grid(), v.grid(), &keys)?;
        Ok(Self::with(q, queries, Keys { k, v, sequences: keys }, extents))
    }

    fn raw_attention(&self, place: Option<Place>) -> Result<sys::cuflash_problem_t> {
        let Keys { k, v, sequences } = &self.keys;
        if let Some(place) = place {
            k.expect_place("k", place)?;
            v.expect_place("v", place)?;
        }
        let mut raw = self.raw(place)?;
        raw.len_k = raw_extent(self.extents.len_k)?;
        raw.k = k.raw("k")?;
        raw.v = v.raw("v")?;
        if let Some(Packed { offsets, .. }) = &sequences.packed {
            raw.cu_seqlens_k = offsets.raw_array("offsets of k", place)?;
            raw.total_k = k.grid().extent(2)?;
        }
        if let Some(used) = &sequences.used {
            raw.seqused_k = self.per_sequence("used rows of k", used, place)?;
        }
        Ok(raw)
    }

    fn query(&self) -> Result<sys::cuflash_problem_t> {
        let mut raw = self.raw_attention(None)?;
        raw.o = any_output::<T>();
        Ok(raw)
    }

    /// Writes `o`, of the shape of `q` with the head_dim of `v`, and where wanted `lse`, `[batch,
    /// heads, len_q]`: the natural logarithm of each row's sum of exponentials, which
    /// [`backward`](Self::backward) needs.
    pub fn forward<'h, O: Output<T>>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: &mut TensorMut<'_, O>,
        lse: Option<&mut ViewMut<'_, f32, 3>>,
    ) -> Result<()> {
        let mut launch = launch.into();
        let mut raw = self.raw_attention(Some(launch.place()))?;
        self.outputs(&mut raw, &mut launch, o, lse)?;
        // SAFETY: every pointer leads to memory of its extents and strides in the device's place,
        // borrowed for the call or, on a CUDA device, promised to Buffer::from_raw_parts.
        check(unsafe {
            sys::cuflash_attention_forward(launch.handle.as_raw(), &raw, launch.stream.as_raw())
        })
    }

    /// Writes the gradients from `d_o`, the gradient of `o`, and from what forward wrote.
    pub fn backward<'h, O: Output<T>, G: Output<T>>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: Tensor<'_, O>,
        lse: View<'_, f32, 3>,
        d_o: Tensor<'_, T>,
        gradients: Gradients<'_, '_, G>,
    ) -> Result<()> {
        self.backward_with(launch, o, lse, d_o, gradients, Extras::new())
    }

    /// [`backward`](Self::backward) with further inputs and outputs.
    pub fn backward_with<'h, O: Output<T>, G: Output<T>>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: Tensor<'_, O>,
        lse: View<'_, f32, 3>,
        d_o: Tensor<'_, T>,
        gradients: Gradients<'_, '_, G>,
        extras: Extras<'_>,
    ) -> Result<()> {
        let mut launch = launch.into();
        let place = launch.place();
        let mut raw = self.raw_attention(Some(place))?;
        o.grid().expect_shape("o", self.shape_o())?;
        o.expect_place("o", place)?;
        raw.o = o.raw("o")?;
        d_o.grid().expect_shape("d_o", self.shape_o())?;
        d_o.expect_place("d_o", place)?;
        self.input_lse(&mut raw, &lse, place)?;
        let Gradients { dq, dk, dv } = gradients;
        for (name, output, input) in
            [("dq", &*dq, &self.q), ("dk", &*dk, &self.keys.k), ("dv", &*dv, &self.keys.v)]
        {
            output.grid().expect_shape(name, input.shape())?;
            output.expect_place(name, place)?;
        }
        let mut raw_gradients = sys::cuflash_gradients_t {
            struct_size: struct_size::<sys::cuflash_gradients_t>(),
            d_o: d_o.raw("d_o")?,
            dq: dq.raw("dq")?,
            dk: dk.raw("dk")?,
            dv: dv.raw("dv")?,
            ..Default::default()
        };
        self.set_extras(&mut raw_gradients, &lse, extras, place)?;
        set_workspace(&mut raw, &mut launch)?;
        // SAFETY: as in forward.
        check(unsafe {
            sys::cuflash_attention_backward(
                launch.handle.as_raw(),
                &raw,
                &raw_gradients,
                launch.stream.as_raw(),
            )
        })
    }

    fn set_extras(
        &self,
        raw: &mut sys::cuflash_gradients_t,
        lse: &View<'_, f32, 3>,
        extras: Extras<'_>,
        place: Place,
    ) -> Result<()> {
        // The C API has one set of strides for all values of rows.
        let expect_as_lse = |name: &str, grid: &Grid<3>| {
            grid.expect_shape(name, lse.shape())?;
            grid.expect_strides(name, lse.grid(), "lse")
        };
        if extras.accumulate {
            raw.flags |= sys::CUFLASH_GRADIENTS_ACCUMULATE;
        }
        if let Some(d_lse) = extras.d_lse {
            expect_as_lse("d_lse", d_lse.grid())?;
            d_lse.expect_place("d_lse", place)?;
            raw.dlse = d_lse.as_ptr();
        }
        match extras.delta {
            Some(Delta::Given(delta)) => {
                expect_as_lse("delta", delta.grid())?;
                delta.expect_place("delta", place)?;
                raw.flags |= sys::CUFLASH_GRADIENTS_DELTA_GIVEN;
                raw.delta = delta.as_ptr().cast_mut();
            }
            Some(Delta::Wanted(mut delta)) => {
                expect_as_lse("delta", delta.grid())?;
                delta.expect_place("delta", place)?;
                raw.delta = delta.as_mut_ptr();
            }
            None => {}
        }
        if let Some(mut d_bias) = extras.d_bias {
            let bias = expect_input("bias", &self.bias, d_bias.dtype)?;
            d_bias.grid().expect_shape("d_bias", bias.grid().shape)?;
            d_bias.grid().expect_strides("d_bias", bias.grid(), "bias")?;
            raw.dbias = d_bias.raw("d_bias", place)?;
        }
        if let Some(mut d_sinks) = extras.d_sinks {
            let sinks = expect_input("sinks", &self.sinks, d_sinks.dtype)?;
            d_sinks.grid().expect_shape("d_sinks", sinks.grid().shape)?;
            raw.dsinks = d_sinks.raw("d_sinks", place)?;
        }
        Ok(())
    }

    /// Writes the probabilities, before dropout, of rows of each sequence, from the `lse` that forward
    /// wrote: for looking at, simple and slow. `weights` is `[batch, heads, rows, len_k]`, the keys
    /// contiguous. `rows` names the rows, from 0, without it they are the first ones; a row that a sequence
    /// does not have gets 0.
    pub fn weights<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        lse: View<'_, f32, 3>,
        rows: Option<View<'_, i32, 1>>,
        weights: &mut ViewMut<'_, f32, 4>,
    ) -> Result<()> {
        let launch = launch.into();
        let place = launch.place();
        let mut raw = self.raw_attention(Some(place))?;
        self.input_lse(&mut raw, &lse, place)?;
        let count = rows.map_or(weights.shape()[2], |rows| rows.shape()[0]);
        let wanted = [self.extents.batch, self.q.shape()[1], count, self.extents.len_k];
        weights.grid().expect_shape("weights", wanted)?;
        let strides = weights.grid().three_strides("weights", 0)?;
        let mut raw_weights = sys::cuflash_weights_t {
            struct_size: struct_size::<sys::cuflash_weights_t>(),
            weights: weights.raw_array("weights", place)?,
            batch_stride: strides[0],
            head_stride: strides[1],
            row_stride: strides[2],
            num_rows: raw_extent(count)?,
            ..Default::default()
        };
        if let Some(rows) = &rows {
            raw_weights.rows = rows.raw_array("rows", Some(place))?;
        }
        if count == 0 {
            return Ok(()); // to the C API 0 is all rows
        }
        // SAFETY: as in forward.
        check(unsafe {
            sys::cuflash_attention_weights(
                launch.handle.as_raw(),
                &raw,
                &raw_weights,
                launch.stream.as_raw(),
            )
        })
    }

    /// The bytes of workspace that [`forward`](Self::forward) needs for an `o` of the problem's element
    /// type.
    pub fn forward_workspace_size(&self, handle: &Handle) -> Result<usize> {
        let (raw, mut bytes) = (self.query()?, 0);
        // SAFETY: a query; it reads no memory of tensors.
        check(unsafe { sys::cuflash_forward_workspace_size(handle.as_raw(), &raw, &mut bytes) })?;
        Ok(bytes)
    }

    /// The bytes of workspace that [`backward`](Self::backward) needs, with every tensor of the
    /// problem's element type.
    pub fn backward_workspace_size(&self, handle: &Handle) -> Result<usize> {
        let (raw, gradients, mut bytes) = (self.query()?, any_gradients::<T>(), 0);
        // SAFETY: a query; it reads no memory of tensors.
        check(unsafe {
            sys::cuflash_backward_workspace_size(handle.as_raw(), &raw, &gradients, &mut bytes)
        })?;
        Ok(bytes)
    }

    /// Which kernel [`forward`](Self::forward) takes, and why not the others, in JSON.
    pub fn explain_forward(&self, handle: &Handle) -> Result<String> {
        let raw = self.query()?;
        // SAFETY: a query; it writes no more than `size` bytes.
        explain(|buffer, size, needed| unsafe {
            sys::cuflash_forward_explain(handle.as_raw(), &raw, buffer, size, needed)
        })
    }

    /// Which kernel [`backward`](Self::backward) takes, and why not the others, in JSON.
    pub fn explain_backward(&self, handle: &Handle) -> Result<String> {
        let (raw, gradients) = (self.query()?, any_gradients::<T>());
        // SAFETY: a query; it writes no more than `size` bytes.
        explain(|buffer, size, needed| unsafe {
            sys::cuflash_backward_explain(handle.as_raw(), &raw, &gradients, buffer, size, needed)
        })
    }
}

impl<'a, T: Element> Decode<'a, T> {
    /// `q` is `[batch, heads, len_q, head_dim]`. With the default alignment its last row sits at the
    /// last valid key: append first, then attend.
    pub fn new(q: Tensor<'a, T>, cache: Cache<'a>) -> Result<Self> {
        Self::ragged(q, Sequences::padded(), cache)
    }

    /// Numbers of new tokens that differ from sequence to sequence. Packed, `q` is `[1, heads, total,
    /// head_dim]`, and so are o, and LSE without the last axis.
    pub fn ragged(q: Tensor<'a, T>, queries: Sequences<'a>, cache: Cache<'a>) -> Result<Self> {
        let extents = Extents::of_cache(q.grid(), &queries, &cache.extents(q.shape()[3])?)?;
        let mut problem = Self::with(q, queries, cache, extents);
        problem.flags |= problem.keys.problem_flags();
        Ok(problem)
    }

    /// Parts along the keys that are computed side by side; without it the library chooses.
    pub fn num_splits(mut self, splits: u16) -> Self {
        self.num_splits = splits.into();
        self
    }

    fn raw_decode(
        &self,
        place: Option<Place>,
    ) -> Result<(sys::cuflash_problem_t, sys::cuflash_kv_cache_t)> {
        let raw_cache = self.keys.raw(self.extents.batch, self.q.shape()[3], place)?;
        Ok((self.raw(place)?, raw_cache))
    }

    fn query(&self) -> Result<(sys::cuflash_problem_t, sys::cuflash_kv_cache_t)> {
        let (mut raw, cache) = self.raw_decode(None)?;
        raw.o = any_output::<T>();
        Ok((raw, cache))
    }

    /// Writes `o`, of the shape of `q` with the head_dim of `v`, and where wanted `lse`, `[batch,
    /// heads, len_q]`.
    pub fn decode<'h, O: Output<T>>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: &mut TensorMut<'_, O>,
        lse: Option<&mut ViewMut<'_, f32, 3>>,
    ) -> Result<()> {
        let mut launch = launch.into();
        let (mut raw, cache) = self.raw_decode(Some(launch.place()))?;
        self.outputs(&mut raw, &mut launch, o, lse)?;
        // SAFETY: as in Attention::forward; the library cuts lengths to what the cache holds.
        check(unsafe {
            sys::cuflash_attention_decode(
                launch.handle.as_raw(),
                &raw,
                &cache,
                launch.stream.as_raw(),
            )
        })
    }

    /// The bytes of workspace that [`decode`](Self::decode) needs.
    pub fn workspace_size(&self, handle: &Handle) -> Result<usize> {
        let ((raw, cache), mut bytes) = (self.query()?, 0);
        // SAFETY: a query; it reads no memory of tensors.
        check(unsafe {
            sys::cuflash_decode_workspace_size(handle.as_raw(), &raw, &cache, &mut bytes)
        })?;
        Ok(bytes)
    }

    /// Which kernel [`decode`](Self::decode) takes, and why not the others, in JSON.
    pub fn explain(&self, handle: &Handle) -> Result<String> {
        let (raw, cache) = self.query()?;
        // SAFETY: a query; it writes no more than `size` bytes.
        explain(|buffer, size, needed| unsafe {
            sys::cuflash_decode_explain(handle.as_raw(), &raw, &cache, buffer, size, needed)
        })
    }
}
