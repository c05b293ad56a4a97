use crate::cache::CacheExtents;
use crate::view::{Grid, View};
use crate::{Error, Result, Status};

/// How the sequences of a batch lie in q, or in k and v.
///
/// Lengths and offsets are read where the call runs and cut to what the tensors hold, whatever they
/// are. Rows of no sequence are neither read nor written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sequences<'a> {
    pub(crate) packed: Option<Packed<'a>>,
    pub(crate) used: Option<View<'a, i32, 1>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) offsets: View<'a, i32, 1>,
    pub(crate) longest: usize,
}

impl<'a> Sequences<'a> {
    /// Sequence `b` is batch entry `b`, of the tensor's length.
    pub fn padded() -> Self {
        Self::default()
    }

    /// Sequence `b` is in the rows `offsets[b]` to before `offsets[b + 1]` of a tensor whose batch
    /// is 1. `longest` is the longest length: what is longer is cut.
    pub fn packed(offsets: View<'a, i32, 1>, longest: usize) -> Self {
        Self { packed: Some(Packed { offsets, longest }), used: None }
    }

    /// How many rows of each sequence are in use.
    pub fn used(mut self, lengths: View<'a, i32, 1>) -> Self {
        self.used = Some(lengths);
        self
    }

    /// The number of sequences in a tensor and their longest length.
    fn extents(&self, name: &str, shape: [usize; 4]) -> Result<(usize, usize)> {
        let Some(Packed { offsets, longest }) = &self.packed else {
            return Ok((shape[0], shape[2]));
        };
        if shape[0] != 1 {
            return Err(Error::new(
                Status::DimensionMismatch,
                format!("{name}: shape {shape:?}; the batch of packed rows is 1"),
            ));
        }
        let batch = offsets.shape()[0].checked_sub(1).ok_or_else(|| {
            let message = format!("offsets of {name}: none; one more than there are sequences");
            Error::new(Status::DimensionMismatch, message)
        })?;
        Ok((batch, *longest))
    }
}

/// The extents of a problem beside those of q as a tensor. None is 0 where the C API would take that
/// for a default, for then it would read what is not there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extents {
    pub(crate) batch: usize,
    pub(crate) len_q: usize,
    pub(crate) heads_kv: usize,
    pub(crate) len_k: usize,
    pub(crate) head_dim_v: usize,
}

impl Extents {
    /// `q` with `k` and `v` of the same call.
    pub(crate) fn of_keys(
        q: &Grid<4>,
        queries: &Sequences<'_>,
        k: &Grid<4>,
        v: &Grid<4>,
        keys: &Sequences<'_>,
    ) -> Result<Self> {
        let (batch, len_q) = queries.extents("q", q.shape)?;
        let (batch_k, len_k) = keys.extents("k", k.shape)?;
        if batch_k != batch {
            return Err(Error::new(
                Status::DimensionMismatch,
                format!("k: {batch_k} sequences, but {batch} of q"),
            ));
        }
        let [entries, heads_kv, rows, _] = k.shape;
        let head_dim_v = v.shape[3];
        k.expect_shape("k", [entries, heads_kv, rows, q.shape[3]])?;
        v.expect_shape("v", [entries, heads_kv, rows, head_dim_v])?;
        Self { batch, len_q, heads_kv, len_k, head_dim_v }.checked(q.shape[1])
    }

    /// `q` with keys and values of a cache.
    pub(crate) fn of_cache(
        q: &Grid<4>,
        queries: &Sequences<'_>,
        cache: &CacheExtents,
    ) -> Result<Self> {
        let (batch, len_q) = queries.extents("q", q.shape)?;
        cache.expect_entries(batch)?;
        let CacheExtents { heads_kv, max_len, head_dim_v, .. } = *cache;
        Self { batch, len_q, heads_kv, len_k: max_len, head_dim_v }.checked(q.shape[1])
    }

    fn checked(self, heads_q: usize) -> Result<Self> {
        if self.heads_kv == 0 && heads_q > 0 {
            return Err(Error::new(
                Status::DimensionMismatch,
                format!("k: no heads, but {heads_q} of q"),
            ));
        }
        if self.head_dim_v == 0 {
            return Err(Error::new(Status::UnsupportedHeadDim, "v: no channels"));
        }
        Ok(self)
    }
}
