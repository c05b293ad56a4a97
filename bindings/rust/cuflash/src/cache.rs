use crate::element::{Element, Stored};
use crate::library::struct_size;
use crate::view::{raw_extent, AnyView, AnyViewMut, Grid, Place, Tensor, TensorMut, View};
use crate::{sys, Error, Result, Status};

/// Keys and values of sequences, entry `b` for sequence `b` or in pages, quantised or not: [`Cache`] to
/// read, [`CacheMut`] to append to.
#[derive(Debug, Clone, Copy)]
pub struct Cached<'a, M> {
    pools: M,
    head_dim_v: Option<usize>,
    places: Places<'a>,
    lengths: Option<View<'a, i32, 1>>,
    scales: [Option<AnyView<'a, 4>>; 4],
}

/// What [`Decode`](crate::Decode) attends to.
pub type Cache<'a> = Cached<'a, Pools<'a>>;

/// What [`Append`](crate::Append) writes to.
pub type CacheMut<'a> = Cached<'a, PoolsMut<'a>>;

/// Memory of keys and values, to read.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    k: AnyView<'a, 4>,
    v: Option<AnyView<'a, 4>>,
}

/// Memory of keys and values, to write.
#[derive(Debug)]
pub struct PoolsMut<'a> {
    k: AnyViewMut<'a, 4>,
    v: Option<AnyViewMut<'a, 4>>,
}

impl PoolsMut<'_> {
    fn view(&self) -> Pools<'_> {
        Pools { k: self.k.view(), v: self.v.as_ref().map(AnyViewMut::view) }
    }
}

/// Where a sequence's slots are.
#[derive(Debug, Clone, Copy)]
enum Places<'a> {
    OwnEntry,
    Entries(View<'a, i32, 1>),
    Table(PageIds<'a, 2>),
    Indices { offsets: View<'a, i32, 1>, ids: PageIds<'a, 1>, max_len: usize },
}

/// Numbers of pages, of 32 or 64 bits; made [`From`] a view of either.
#[derive(Debug, Clone, Copy)]
pub enum PageIds<'a, const N: usize> {
    /// Of 32 bits.
    Narrow(View<'a, i32, N>),
    /// Of 64 bits.
    Wide(View<'a, i64, N>),
}

impl<'a, const N: usize> From<View<'a, i32, N>> for PageIds<'a, N> {
    fn from(ids: View<'a, i32, N>) -> Self {
        Self::Narrow(ids)
    }
}

impl<'a, const N: usize> From<View<'a, i64, N>> for PageIds<'a, N> {
    fn from(ids: View<'a, i64, N>) -> Self {
        Self::Wide(ids)
    }
}

impl<const N: usize> PageIds<'_, N> {
    fn shape(&self) -> [usize; N] {
        match self {
            Self::Narrow(ids) => ids.shape(),
            Self::Wide(ids) => ids.shape(),
        }
    }

    fn stride(&self, axis: usize) -> i64 {
        match self {
            Self::Narrow(ids) => ids.grid().stride(axis),
            Self::Wide(ids) => ids.grid().stride(axis),
        }
    }

    fn bits(&self) -> i32 {
        match self {
            Self::Narrow(_) => 32,
            Self::Wide(_) => 64,
        }
    }

    fn raw(&self, name: &str, place: Option<Place>) -> Result<*const std::ffi::c_void> {
        match self {
            Self::Narrow(ids) => Ok(ids.raw_array(name, place)?.cast()),
            Self::Wide(ids) => Ok(ids.raw_array(name, place)?.cast()),
        }
    }
}

/// The arrays of `Cached::scales`, and whether each is of values.
const SCALES: [(&str, bool); 4] =
    [("k_scale", false), ("v_scale", true), ("k_zero", false), ("v_zero", true)];

impl<'a, M> Cached<'a, M> {
    fn with(pools: M, head_dim_v: Option<usize>) -> Self {
        Self { pools, head_dim_v, places: Places::OwnEntry, lengths: None, scales: [None; 4] }
    }

    /// The slots in use of each sequence, read where the call runs and cut to 0 and what a sequence can
    /// hold; all without it. No call changes them.
    pub fn lengths(mut self, lengths: View<'a, i32, 1>) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// The entry of each sequence. One that is not in the cache has no keys.
    pub fn entries(mut self, entries: View<'a, i32, 1>) -> Self {
        self.places = Places::Entries(entries);
        self
    }

    /// The tensors hold pages, `[pages, heads_kv, page_size, channels]`, and each row of `table`, `[batch,
    /// columns]`, names those of a sequence in order. Entries past its length are not read; one that is
    /// no page hides its keys.
    pub fn paged(mut self, table: impl Into<PageIds<'a, 2>>) -> Self {
        self.places = Places::Table(table.into());
        self
    }

    /// Likewise with the pages of sequence `b` in `ids[offsets[b]]` to before `ids[offsets[b + 1]]`. Of a
    /// sequence `max_len` slots are in use at most.
    ///
    /// # Safety
    /// When a call reads them, `offsets` do not fall, from 0 or more to no more than there are `ids`.
    pub unsafe fn paged_by_offsets(
        mut self,
        offsets: View<'a, i32, 1>,
        ids: impl Into<PageIds<'a, 1>>,
        max_len: usize,
    ) -> Self {
        self.places = Places::Indices { offsets, ids: ids.into(), max_len };
        self
    }

    /// An element of k stands for its value times this: `[entries or pages, heads_kv, slots, groups]`, any
    /// of the first three 1 for all, and 1 group or those of 32, 64 or 128 channels. Scales and zero
    /// points have the same element type and strides.
    pub fn k_scale<S: Element>(self, scale: View<'a, S, 4>) -> Self {
        self.scale(0, scale)
    }

    /// Likewise of v.
    pub fn v_scale<S: Element>(self, scale: View<'a, S, 4>) -> Self {
        self.scale(1, scale)
    }

    /// What is taken from an integer of k before it is scaled, as [`k_scale`](Self::k_scale).
    pub fn k_zero<S: Element>(self, zero: View<'a, S, 4>) -> Self {
        self.scale(2, zero)
    }

    /// Likewise of v.
    pub fn v_zero<S: Element>(self, zero: View<'a, S, 4>) -> Self {
        self.scale(3, zero)
    }

    fn scale<S: Element>(mut self, index: usize, values: View<'a, S, 4>) -> Self {
        self.scales[index] = Some(values.erase());
        self
    }

    /// The channels of v where [`Int4Pair`](crate::Int4Pair) does not tell: an odd number.
    pub fn head_dim_v(mut self, channels: usize) -> Self {
        self.head_dim_v = Some(channels);
        self
    }
}

impl<'a> Cache<'a> {
    /// `k` is `[entries, heads_kv, max_len, head_dim]`, or of [pages](Self::paged), and `v` too, but its
    /// head_dim may be its own, as each element type.
    pub fn new<K: Stored, V: Stored>(k: Tensor<'a, K>, v: Tensor<'a, V>) -> Result<Self> {
        expect_slots_of(k.grid(), v.grid())?;
        Ok(Self::with(Pools { k: k.erase(), v: Some(v.erase()) }, None))
    }

    /// The first `head_dim_v` channels of `k` are the values.
    pub fn values_in_keys<K: Stored>(k: Tensor<'a, K>, head_dim_v: usize) -> Self {
        Self::with(Pools { k: k.erase(), v: None }, Some(head_dim_v))
    }

    pub(crate) fn problem_flags(&self) -> u32 {
        if self.pools.v.is_none() {
            sys::CUFLASH_PROBLEM_V_IS_K_PREFIX
        } else {
            0
        }
    }

    /// What it has room for, of keys with so many channels.
    pub(crate) fn extents(&self, head_dim: usize) -> Result<CacheExtents> {
        let Pools { k, v } = &self.pools;
        let [entries, heads_kv, slots, _] = k.grid().shape;
        expect_channels("k", k, head_dim)?;
        let head_dim_v = match (v, self.head_dim_v) {
            (_, Some(channels)) => channels,
            (Some(v), None) => v.grid().shape[3] * if v.dtype == sys::CUFLASH_INT4 { 2 } else { 1 },
            (None, None) => head_dim,
        };
        // The library takes 0 for head_dim.
        if head_dim_v == 0 {
            return Err(Error::new(Status::UnsupportedHeadDim, "v: no channels"));
        }
        if let Some(v) = v {
            expect_channels("v", v, head_dim_v)?;
        }
        let max_len = match &self.places {
            Places::OwnEntry | Places::Entries(_) => Some(slots),
            Places::Table(ids) => ids.shape()[1].checked_mul(slots),
            Places::Indices { max_len, .. } => Some(*max_len),
        };
        let max_len = max_len.ok_or_else(|| {
            Error::new(Status::InvalidDimension, "table: more slots than there can be")
        })?;
        let needed = match &self.places {
            Places::OwnEntry => Needed::OnePerSequence,
            Places::Entries(_) => Needed::Some,
            Places::Table(_) | Places::Indices { .. } => Needed::None,
        };
        Ok(CacheExtents { entries, needed, heads_kv, max_len, head_dim_v })
    }

    pub(crate) fn raw(
        &self,
        batch: usize,
        head_dim: usize,
        place: Option<Place>,
    ) -> Result<sys::cuflash_kv_cache_t> {
        let extents = self.extents(head_dim)?;
        let Pools { k, v } = &self.pools;
        let mut raw = sys::cuflash_kv_cache_t {
            struct_size: struct_size::<sys::cuflash_kv_cache_t>(),
            k: k.raw_tensor("k", place)?,
            max_len: raw_extent(extents.max_len)?,
            num_pages: raw_extent(extents.entries)?,
            ..Default::default()
        };
        if let Some(v) = v {
            raw.v = v.raw_tensor("v", place)?;
        }
        if let Some(lengths) = &self.lengths {
            raw.lengths = lengths.raw_values("lengths", batch, place)?;
        }
        match &self.places {
            Places::OwnEntry => {}
            Places::Entries(entries) => {
                raw.cache_batch_idx = entries.raw_values("entries", batch, place)?;
            }
            Places::Table(ids) => {
                if ids.shape()[0] != batch {
                    return Err(Error::new(
                        Status::DimensionMismatch,
                        format!("table: {} rows for {batch} sequences", ids.shape()[0]),
                    ));
                }
                raw.layout = sys::CUFLASH_CACHE_PAGED;
                raw.page_size = k.grid().extent(2)?;
                raw.id_bits = ids.bits();
                raw.block_table = ids.raw("table", place)?;
                raw.block_table_stride = ids.stride(0);
            }
            Places::Indices { offsets, ids, .. } => {
                raw.layout = sys::CUFLASH_CACHE_PAGED_CSR;
                raw.page_size = k.grid().extent(2)?;
                raw.id_bits = ids.bits();
                raw.page_indptr = offsets.raw_values("offsets", batch + 1, place)?;
                raw.page_indices = ids.raw("ids", place)?;
            }
        }
        self.set_scales(&mut raw, head_dim, extents.head_dim_v, place)?;
        Ok(raw)
    }

    fn set_scales(
        &self,
        raw: &mut sys::cuflash_kv_cache_t,
        head_dim: usize,
        head_dim_v: usize,
        place: Option<Place>,
    ) -> Result<()> {
        let [entries, heads, slots, _] = self.pools.k.grid().shape;
        let mut groups = vec![0, 32, 64, 128];
        let mut pointers = [std::ptr::null(); 4];
        let mut first: Option<(&str, &AnyView<'_, 4>)> = None;
        for (index, (name, of_v)) in SCALES.into_iter().enumerate() {
            let Some(array) = &self.scales[index] else { continue };
            let grid = array.grid();
            let count = grid.shape[3];
            let channels = if of_v { head_dim_v } else { head_dim };
            grid.expect_repeating_shape(name, [entries, heads, slots, count])?;
            groups.retain(|&group: &usize| {
                count == if group == 0 { 1 } else { channels.div_ceil(group) }
            });
            if groups.is_empty() {
                return Err(Error::new(
                    Status::DimensionMismatch,
                    format!(
                        "{name}: {count} groups of {channels} channels; 1, or as many as there are of 32, 64 or \
                         128, for keys and values alike"
                    ),
                ));
            }
            let (of, model) = *first.get_or_insert((name, array));
            let strides =
                |array: &AnyView<'_, 4>| [0, 1, 2].map(|i| array.grid().repeating_stride(i));
            if strides(array) != strides(model) || array.dtype != model.dtype {
                return Err(Error::new(
                    Status::InvalidValue,
                    format!("{name}: not of the element type and strides of {of}"),
                ));
            }
            pointers[index] = array.raw(name, place)?;
        }
        [raw.k_scale, raw.v_scale, raw.k_zero, raw.v_zero] = pointers;
        if let Some((_, array)) = first {
            raw.scale_page_stride = array.grid().repeating_stride(0);
            raw.scale_head_stride = array.grid().repeating_stride(1);
            raw.scale_slot_stride = array.grid().repeating_stride(2);
            raw.scale_group = raw_extent(groups[0])?;
            raw.scale_dtype = array.dtype;
        }
        Ok(())
    }
}

impl<'a> CacheMut<'a> {
    /// As [`Cache::new`].
    pub fn new<K: Stored, V: Stored>(k: TensorMut<'a, K>, v: TensorMut<'a, V>) -> Result<Self> {
        expect_slots_of(k.grid(), v.grid())?;
        Ok(Self::with(PoolsMut { k: k.erase(), v: Some(v.erase()) }, None))
    }

    /// As [`Cache::values_in_keys`].
    pub fn values_in_keys<K: Stored>(k: TensorMut<'a, K>, head_dim_v: usize) -> Self {
        Self::with(PoolsMut { k: k.erase(), v: None }, Some(head_dim_v))
    }

    /// The same cache, to attend to.
    pub fn cache(&self) -> Cache<'_> {
        let Self { pools, head_dim_v, places, lengths, scales } = self;
        Cached {
            pools: pools.view(),
            head_dim_v: *head_dim_v,
            places: *places,
            lengths: *lengths,
            scales: *scales,
        }
    }

    /// For calls that write keys and values.
    pub(crate) fn has_values(&self) -> bool {
        self.pools.v.is_some()
    }
}

/// How many entries a call must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needed {
    None,
    Some,
    OnePerSequence,
}

pub(crate) struct CacheExtents {
    entries: usize,
    needed: Needed,
    pub(crate) heads_kv: usize,
    pub(crate) max_len: usize,
    pub(crate) head_dim_v: usize,
}

impl CacheExtents {
    /// Refuses to look for sequences where they cannot be. To the C API no entries are as many as sequences.
    pub(crate) fn expect_entries(&self, batch: usize) -> Result<()> {
        let least = match self.needed {
            Needed::None => 0,
            Needed::Some => batch.min(1),
            Needed::OnePerSequence => batch,
        };
        self.expect_at_least(least, batch)
    }

    /// Of calls that name slots themselves.
    pub(crate) fn expect_some(&self, batch: usize) -> Result<()> {
        self.expect_at_least(if self.needed == Needed::None { 0 } else { batch.min(1) }, batch)
    }

    fn expect_at_least(&self, least: usize, batch: usize) -> Result<()> {
        if self.entries >= least {
            return Ok(());
        }
        Err(Error::new(
            Status::DimensionMismatch,
            format!("k: {} entries for {batch} sequences", self.entries),
        ))
    }
}

/// Refuses values in other slots than the keys.
fn expect_slots_of(k: &Grid<4>, v: &Grid<4>) -> Result<()> {
    let [entries, heads_kv, slots, _] = k.shape;
    v.expect_shape("v", [entries, heads_kv, slots, v.shape[3]])
}

/// Refuses a tensor of a cache that has not so many channels.
fn expect_channels(name: &str, view: &AnyView<'_, 4>, channels: usize) -> Result<()> {
    let [entries, heads_kv, slots, _] = view.grid().shape;
    let items = if view.dtype == sys::CUFLASH_INT4 { channels.div_ceil(2) } else { channels };
    view.grid().expect_shape(name, [entries, heads_kv, slots, items])
}
