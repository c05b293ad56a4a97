use std::ffi::CStr;
use std::ptr;

use crate::element::Element;
use crate::error::check;
use crate::handle::{Handle, Launch};
use crate::library::struct_size;
use crate::view::{expect_place, Place, Tensor, TensorMut, View, ViewMut};
use crate::{sys, Error, Result, Status};

/// One attention problem: tensors and options. [`Attention`] and [`Decode`] are its two kinds.
///
/// Options that are not set have the library's defaults: no mask, no window, a scale of
/// `1 / sqrt(head_dim)`.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, T, K> {
    q: Tensor<'a, T>,
    keys: K,
    flags: u32,
    causal: bool,
    align: Align<'a>,
    window: (i64, i64),
    scale: f32,
    kernel: Option<&'a CStr>,
    num_splits: i32,
    sm_margin: i32,
    target_arch: i32,
}

/// Attention over keys and values of the same call: forward and backward.
pub type Attention<'a, T> = Problem<'a, T, Keys<'a, T>>;

/// Attention of new tokens over a [`Cache`].
pub type Decode<'a, T> = Problem<'a, T, Cache<'a, T>>;

/// The keys and values of an [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a, T> {
    k: Tensor<'a, T>,
    v: Tensor<'a, T>,
}

/// A cache of keys and values: entry `b` holds sequence `b`.
#[derive(Debug, Clone, Copy)]
pub struct Cache<'a, T> {
    k: Tensor<'a, T>,
    v: Tensor<'a, T>,
    lengths: Option<View<'a, i32, 1>>,
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

/// The outputs of [`Attention::backward`]: gradients of q, k and v, each of its shape.
#[derive(Debug)]
pub struct Gradients<'a, 'b, T> {
    /// Of q.
    pub dq: &'a mut TensorMut<'b, T>,
    /// Of k, summed over the query heads that share a head of k.
    pub dk: &'a mut TensorMut<'b, T>,
    /// Of v, likewise.
    pub dv: &'a mut TensorMut<'b, T>,
}

impl<'a, T, K> Problem<'a, T, K> {
    fn with(q: Tensor<'a, T>, keys: K) -> Self {
        Self {
            q,
            keys,
            flags: 0,
            causal: false,
            align: Align::BottomRight,
            window: (0, 0),
            scale: 0.0,
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
    fn raw(&self, heads_kv: i64, place: Option<Place>) -> Result<sys::cuflash_problem_t> {
        let grid = self.q.grid();
        let mut raw = sys::cuflash_problem_t {
            struct_size: struct_size::<sys::cuflash_problem_t>(),
            flags: self.flags,
            batch: grid.extent(0)?,
            heads_q: grid.extent(1)?,
            heads_kv,
            len_q: grid.extent(2)?,
            head_dim: grid.extent(3)?,
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
        Ok(raw)
    }

    /// The pointer to one value for each sequence of the batch.
    fn per_sequence(
        &self,
        name: &str,
        values: &View<'a, i32, 1>,
        place: Option<Place>,
    ) -> Result<*const i32> {
        values.grid().expect_shape(name, [self.q.shape()[0]])?;
        if values.grid().shape[0] > 1 && values.grid().strides[0] != 1 {
            return Err(Error::new(Status::InvalidValue, format!("{name}: not contiguous")));
        }
        if let Some(place) = place {
            values.expect_place(name, place)?;
        }
        Ok(values.as_ptr())
    }

    /// Adds o, lse and the workspace of a call.
    fn outputs(
        &self,
        raw: &mut sys::cuflash_problem_t,
        launch: &mut Launch<'_>,
        o: &mut TensorMut<'_, T>,
        lse: Option<&mut ViewMut<'_, f32, 3>>,
    ) -> Result<()> {
        let [batch, heads, len, _] = self.q.shape();
        o.grid().expect_shape("o", self.q.shape())?;
        o.expect_place("o", launch.place())?;
        raw.o = o.raw("o")?;
        if let Some(lse) = lse {
            lse.grid().expect_shape("lse", [batch, heads, len])?;
            lse.expect_place("lse", launch.place())?;
            set_lse_strides(raw, lse.grid().row_strides("lse")?);
            raw.lse = lse.as_mut_ptr();
        }
        set_workspace(raw, launch)
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
fn explain(query: impl Fn(*mut std::ffi::c_char, usize, *mut usize) -> i32) -> Result<String> {
    let mut needed = 0;
    check(query(ptr::null_mut(), 0, &mut needed))?;
    let mut buffer = vec![0_u8; needed];
    check(query(buffer.as_mut_ptr().cast(), buffer.len(), ptr::null_mut()))?;
    buffer.truncate(buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len()));
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}

impl<'a, T: Element> Attention<'a, T> {
    /// `q` is `[batch, heads, len_q, head_dim]`; `k` and `v` are `[batch, heads_kv, len_k,
    /// head_dim]`. Query head `h` reads head `h / (heads / heads_kv)` of `k` and `v`.
    pub fn new(q: Tensor<'a, T>, k: Tensor<'a, T>, v: Tensor<'a, T>) -> Result<Self> {
        let [batch, _, _, head_dim] = q.shape();
        let [_, heads_kv, len_k, _] = k.shape();
        k.grid().expect_shape("k", [batch, heads_kv, len_k, head_dim])?;
        v.grid().expect_shape("v", k.shape())?;
        Ok(Self::with(q, Keys { k, v }))
    }

    fn raw_attention(&self, place: Option<Place>) -> Result<sys::cuflash_problem_t> {
        let Keys { k, v } = &self.keys;
        if let Some(place) = place {
            k.expect_place("k", place)?;
            v.expect_place("v", place)?;
        }
        let mut raw = self.raw(k.grid().extent(1)?, place)?;
        raw.len_k = k.grid().extent(2)?;
        raw.k = k.raw("k")?;
        raw.v = v.raw("v")?;
        Ok(raw)
    }

    fn query(&self) -> Result<sys::cuflash_problem_t> {
        let mut raw = self.raw_attention(None)?;
        raw.o = any_output::<T>();
        Ok(raw)
    }

    /// Writes `o`, of the shape of `q`, and where wanted `lse`, `[batch, heads, len_q]`: the natural
    /// logarithm of each row's sum of exponentials, which [`backward`](Self::backward) needs.
    pub fn forward<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: &mut TensorMut<'_, T>,
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
    pub fn backward<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: Tensor<'_, T>,
        lse: View<'_, f32, 3>,
        d_o: Tensor<'_, T>,
        gradients: Gradients<'_, '_, T>,
    ) -> Result<()> {
        let mut launch = launch.into();
        let place = launch.place();
        let [batch, heads, len, _] = self.q.shape();
        let mut raw = self.raw_attention(Some(place))?;
        for (name, tensor) in [("o", &o), ("d_o", &d_o)] {
            tensor.grid().expect_shape(name, self.q.shape())?;
            tensor.expect_place(name, place)?;
        }
        raw.o = o.raw("o")?;
        lse.grid().expect_shape("lse", [batch, heads, len])?;
        lse.expect_place("lse", place)?;
        set_lse_strides(&mut raw, lse.grid().row_strides("lse")?);
        raw.lse = lse.as_ptr().cast_mut();
        let Gradients { dq, dk, dv } = gradients;
        for (name, output, input) in
            [("dq", &*dq, &self.q), ("dk", &*dk, &self.keys.k), ("dv", &*dv, &self.keys.v)]
        {
            output.grid().expect_shape(name, input.shape())?;
            output.expect_place(name, place)?;
        }
        let raw_gradients = sys::cuflash_gradients_t {
            struct_size: struct_size::<sys::cuflash_gradients_t>(),
            d_o: d_o.raw("d_o")?,
            dq: dq.raw("dq")?,
            dk: dk.raw("dk")?,
            dv: dv.raw("dv")?,
            ..Default::default()
        };
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

    /// The bytes of workspace that [`forward`](Self::forward) needs.
    pub fn forward_workspace_size(&self, handle: &Handle) -> Result<usize> {
        let (raw, mut bytes) = (self.query()?, 0);
        // SAFETY: a query; it reads no memory of tensors.
        check(unsafe { sys::cuflash_forward_workspace_size(handle.as_raw(), &raw, &mut bytes) })?;
        Ok(bytes)
    }

    /// The bytes of workspace that [`backward`](Self::backward) needs.
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

impl<'a, T: Element> Cache<'a, T> {
    /// `k` and `v` are `[entries, heads_kv, max_len, head_dim]`, full unless
    /// [`lengths`](Self::lengths) tells.
    pub fn new(k: Tensor<'a, T>, v: Tensor<'a, T>) -> Result<Self> {
        v.grid().expect_shape("v", k.shape())?;
        Ok(Self { k, v, lengths: None })
    }

    /// The valid keys of each sequence, read where the call runs and cut to 0 and `max_len`.
    pub fn lengths(mut self, lengths: View<'a, i32, 1>) -> Self {
        self.lengths = Some(lengths);
        self
    }
}

impl<'a, T: Element> Decode<'a, T> {
    /// `q` is `[batch, heads, len_q, head_dim]`. With the default alignment its last row sits at the
    /// last valid key: append first, then attend.
    pub fn new(q: Tensor<'a, T>, cache: Cache<'a, T>) -> Result<Self> {
        let [entries, heads_kv, max_len, _] = cache.k.shape();
        cache.k.grid().expect_shape("k", [entries, heads_kv, max_len, q.shape()[3]])?;
        Ok(Self::with(q, cache))
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
        let Cache { k, v, lengths } = &self.keys;
        if let Some(place) = place {
            k.expect_place("k", place)?;
            v.expect_place("v", place)?;
        }
        let mut raw_cache = sys::cuflash_kv_cache_t {
            struct_size: struct_size::<sys::cuflash_kv_cache_t>(),
            k: k.raw("k")?,
            v: v.raw("v")?,
            max_len: k.grid().extent(2)?,
            num_pages: k.grid().extent(0)?,
            ..Default::default()
        };
        if let Some(lengths) = lengths {
            raw_cache.lengths = self.per_sequence("lengths", lengths, place)?;
        }
        Ok((self.raw(k.grid().extent(1)?, place)?, raw_cache))
    }

    fn query(&self) -> Result<(sys::cuflash_problem_t, sys::cuflash_kv_cache_t)> {
        let (mut raw, cache) = self.raw_decode(None)?;
        raw.o = any_output::<T>();
        Ok((raw, cache))
    }

    /// Writes `o`, of the shape of `q`, and where wanted `lse`, `[batch, heads, len_q]`.
    pub fn decode<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        o: &mut TensorMut<'_, T>,
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
