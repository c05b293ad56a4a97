use crate::cache::CacheMut;
use crate::element::Element;
use crate::error::check;
use crate::handle::{Handle, Launch};
use crate::library::struct_size;
use crate::problem::explain;
use crate::view::{raw_extent, Place, Tensor, TensorMut, View};
use crate::{sys, Error, Result, Status};

/// New keys and values for a [`CacheMut`], written in one launch and quantised to what it holds.
///
/// They go after the cache's lengths, which stay as they are, to [`positions`](Self::positions) or to
/// [`slots`](Self::slots): append first, then attend with the new lengths.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a, T> {
    k: Tensor<'a, T>,
    v: Option<Tensor<'a, T>>,
    positions: Option<View<'a, i32, 2>>,
    slots: Option<View<'a, i64, 2>>,
    rotation: Option<(View<'a, f32, 2>, View<'a, f32, 2>, Pairs)>,
    q_norm: Option<View<'a, T, 1>>,
    k_norm: Option<View<'a, T, 1>>,
    epsilon: f32,
    target_arch: i32,
}

/// Which channels are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Pairs {
    /// `i` and `i + n` of the first `2 n`.
    #[default]
    Apart,
    /// `2 i` and `2 i + 1`.
    Interleaved,
}

/// The queries of a call and where they go.
enum Queries<'q, T> {
    Into(Tensor<'q, T>, TensorMut<'q, T>),
    InPlace(TensorMut<'q, T>),
}

impl<'a, T: Element> Append<'a, T> {
    /// `k` is `[batch, heads_kv, len, head_dim]`, and `v` too, but its head_dim may be its own.
    pub fn new(k: Tensor<'a, T>, v: Tensor<'a, T>) -> Result<Self> {
        let [batch, heads_kv, len, _] = k.shape();
        v.grid().expect_shape("v", [batch, heads_kv, len, v.shape()[3]])?;
        Ok(Self { v: Some(v), ..Self::keys(k) })
    }

    /// Keys alone; the cache's values stay.
    pub fn keys(k: Tensor<'a, T>) -> Self {
        Self {
            k,
            v: None,
            positions: None,
            slots: None,
            rotation: None,
            q_norm: None,
            k_norm: None,
            epsilon: 0.0,
            target_arch: 0,
        }
    }

    /// The position of each token, `[batch, len]`, instead of those after the cache's lengths. A token
    /// whose sequence has no such slot is skipped.
    pub fn positions(mut self, positions: View<'a, i32, 2>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// The slot of each token in the whole cache, `[batch, len]`: slot `n % page_size` of page `n /
    /// page_size`, or of entry `n / max_len`. A negative one, or one past the last, skips the token.
    pub fn slots(mut self, slots: View<'a, i64, 2>) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Rotates pairs of channels of keys and queries by their position: `cos` and `sin` are
    /// `[max_position, pairs]`. Channels past those stay.
    pub fn rotate(mut self, cos: View<'a, f32, 2>, sin: View<'a, f32, 2>, pairs: Pairs) -> Self {
        self.rotation = Some((cos, sin, pairs));
        self
    }

    /// Divides keys by the root of their mean square and multiplies them by this, `[head_dim]`, before
    /// they are rotated.
    pub fn k_norm(mut self, weight: View<'a, T, 1>) -> Self {
        self.k_norm = Some(weight);
        self
    }

    /// Likewise queries.
    pub fn q_norm(mut self, weight: View<'a, T, 1>) -> Self {
        self.q_norm = Some(weight);
        self
    }

    /// What is added to the mean squares.
    pub fn epsilon(mut self, epsilon: f32) -> Self {
        self.epsilon = epsilon;
        self
    }

    /// Queries answer for this GPU (90 for sm_90) instead of the handle's device. Calls refuse it.
    pub fn target_arch(mut self, arch: u16) -> Self {
        self.target_arch = arch.into();
        self
    }

    /// Writes keys and values.
    pub fn append<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        cache: &mut CacheMut<'_>,
    ) -> Result<()> {
        self.run(launch.into(), cache, None)
    }

    /// Does to `q`, `[batch, heads, len, head_dim]`, what is done to keys, into `q_out`.
    pub fn append_with_queries<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        cache: &mut CacheMut<'_>,
        q: Tensor<'_, T>,
        q_out: &mut TensorMut<'_, T>,
    ) -> Result<()> {
        self.run(launch.into(), cache, Some(Queries::Into(q, q_out.reborrow())))
    }

    /// Does to `q` what is done to keys, where it is.
    pub fn append_with_queries_in_place<'h>(
        &self,
        launch: impl Into<Launch<'h>>,
        cache: &mut CacheMut<'_>,
        q: &mut TensorMut<'_, T>,
    ) -> Result<()> {
        self.run(launch.into(), cache, Some(Queries::InPlace(q.reborrow())))
    }

    /// Which kernel [`append`](Self::append) takes, and why not the others, in JSON.
    pub fn explain(&self, handle: &Handle, cache: &CacheMut<'_>) -> Result<String> {
        let (raw_cache, raw) = self.raw(cache, None)?;
        // SAFETY: a query; it reads no memory of tensors and writes no more than `size` bytes.
        explain(|buffer, size, needed| unsafe {
            sys::cuflash_append_explain(handle.as_raw(), &raw_cache, &raw, buffer, size, needed)
        })
    }

    fn run(
        &self,
        launch: Launch<'_>,
        cache: &mut CacheMut<'_>,
        queries: Option<Queries<'_, T>>,
    ) -> Result<()> {
        let place = launch.place();
        let (raw_cache, mut raw) = self.raw(cache, Some(place))?;
        if let Some(queries) = queries {
            let (q, mut q_out) = match queries {
                Queries::Into(q, q_out) => (Some(q), q_out),
                Queries::InPlace(q) => (None, q),
            };
            let [batch, _, len, head_dim] = self.k.shape();
            let shape = q.map_or(q_out.shape(), |q| q.shape());
            q_out.grid().expect_shape("q_out", [batch, shape[1], len, head_dim])?;
            q_out.expect_place("q_out", place)?;
            raw.heads_q = raw_extent(shape[1])?;
            raw.q_out = q_out.raw("q_out")?;
            raw.q = match q {
                Some(q) => {
                    q.grid().expect_shape("q", q_out.shape())?;
                    q.expect_place("q", place)?;
                    q.raw("q")?
                }
                None => raw.q_out,
            };
        }
        // SAFETY: every pointer leads to memory of its extents and strides in the device's place,
        // borrowed for the call, exclusively where it writes, or, on a CUDA device, promised to
        // Buffer::from_raw_parts. The library skips tokens whose slot is not in the cache.
        check(unsafe {
            sys::cuflash_kv_cache_append(
                launch.handle.as_raw(),
                &raw_cache,
                &raw,
                launch.stream.as_raw(),
            )
        })
    }

    /// All but the queries.
    fn raw(
        &self,
        cache: &CacheMut<'_>,
        place: Option<Place>,
    ) -> Result<(sys::cuflash_kv_cache_t, sys::cuflash_kv_append_t)> {
        let [batch, heads_kv, len, head_dim] = self.k.shape();
        let shared = cache.cache();
        let extents = shared.extents(head_dim)?;
        if self.slots.is_some() {
            extents.expect_some(batch)?;
        } else {
            extents.expect_entries(batch)?;
        }
        self.k.grid().expect_shape("k", [batch, extents.heads_kv, len, head_dim])?;
        let mut raw = sys::cuflash_kv_append_t {
            struct_size: struct_size::<sys::cuflash_kv_append_t>(),
            batch: raw_extent(batch)?,
            heads_kv: raw_extent(heads_kv)?,
            len: raw_extent(len)?,
            head_dim: raw_extent(head_dim)?,
            k: self.k.raw("k")?,
            norm_epsilon: self.epsilon,
            target_arch: self.target_arch,
            ..Default::default()
        };
        if let Some(place) = place {
            self.k.expect_place("k", place)?;
        }
        if let Some(v) = &self.v {
            if !cache.has_values() {
                return Err(Error::new(Status::InvalidValue, "v: the cache has them in its keys"));
            }
            let wanted = [batch, heads_kv, len, extents.head_dim_v];
            v.grid().expect_shape("v", wanted)?;
            if let Some(place) = place {
                v.expect_place("v", place)?;
            }
            raw.v = v.raw("v")?;
            raw.head_dim_v = raw_extent(extents.head_dim_v)?;
        }
        if let Some(positions) = &self.positions {
            positions.grid().expect_shape("positions", [batch, len])?;
            raw.positions = positions.raw_dense("positions", place)?;
        }
        if let Some(slots) = &self.slots {
            slots.grid().expect_shape("slots", [batch, len])?;
            raw.slot_mapping = slots.raw_dense("slots", place)?;
        }
        if let Some((cos, sin, pairs)) = &self.rotation {
            sin.grid().expect_shape("sin", cos.shape())?;
            if cos.shape()[1] == 0 {
                return Err(Error::new(Status::InvalidDimension, "cos: no pairs"));
            }
            raw.cos = cos.raw_dense("cos", place)?;
            raw.sin = sin.raw_dense("sin", place)?;
            raw.max_position = cos.grid().extent(0)?;
            raw.rotary_dim = raw_extent(cos.shape()[1].saturating_mul(2))?;
            if *pairs == Pairs::Interleaved {
                raw.flags |= sys::CUFLASH_APPEND_INTERLEAVED;
            }
        }
        if let Some(weight) = &self.k_norm {
            raw.k_norm_weight = weight.raw_values("k_norm", head_dim, place)?.cast();
        }
        if let Some(weight) = &self.q_norm {
            raw.q_norm_weight = weight.raw_values("q_norm", head_dim, place)?.cast();
        }
        Ok((shared.raw(batch, head_dim, place)?, raw))
    }
}
