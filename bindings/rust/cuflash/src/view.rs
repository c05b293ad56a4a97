use std::ffi::c_void;
use std::marker::PhantomData;

use crate::element::{Element, Stored};
use crate::{sys, Error, Result, Status};

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In host memory, for [`Device::Cpu`](crate::Device::Cpu).
    Host,
    /// In memory that a CUDA device reads and writes.
    Device,
}

/// Memory to read: a slice of the host's, or a stretch of a device's.
#[derive(Debug)]
pub struct Buffer<'a, T> {
    pointer: *const T,
    len: usize,
    place: Place,
    borrow: PhantomData<&'a [T]>,
}

/// Memory to write: a slice of the host's, or a stretch of a device's.
#[derive(Debug)]
pub struct BufferMut<'a, T> {
    pointer: *mut T,
    len: usize,
    place: Place,
    borrow: PhantomData<&'a mut [T]>,
}

// Not derived: that would ask for `T: Clone`, and only the pointer is copied.
impl<T> Clone for Buffer<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Buffer<'_, T> {}

// SAFETY: as a `&[T]`.
unsafe impl<T: Sync> Send for Buffer<'_, T> {}
// SAFETY: as a `&[T]`.
unsafe impl<T: Sync> Sync for Buffer<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Send> Send for BufferMut<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Sync> Sync for BufferMut<'_, T> {}

impl<T> Buffer<'_, T> {
    /// Memory that Rust does not know: of a device, or of the host from elsewhere.
    ///
    /// # Safety
    /// `len` elements lie at `pointer`, in memory of the place. Until `'a` ends, and on a device
    /// also until the work is done that calls with this buffer have enqueued, they stay there and
    /// nobody writes to them, but for work that a stream puts before or after.
    pub unsafe fn from_raw_parts(pointer: *const T, len: usize, place: Place) -> Self {
        Self { pointer, len, place, borrow: PhantomData }
    }
}

impl<T> BufferMut<'_, T> {
    /// Memory that Rust does not know: of a device, or of the host from elsewhere.
    ///
    /// # Safety
    /// As [`Buffer::from_raw_parts`], and nobody else reads the memory either.
    pub unsafe fn from_raw_parts(pointer: *mut T, len: usize, place: Place) -> Self {
        Self { pointer, len, place, borrow: PhantomData }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.pointer
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }
}

impl<'a, T> From<&'a [T]> for Buffer<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self { pointer: slice.as_ptr(), len: slice.len(), place: Place::Host, borrow: PhantomData }
    }
}

impl<'a, T> From<&'a Vec<T>> for Buffer<'a, T> {
    fn from(vector: &'a Vec<T>) -> Self {
        vector.as_slice().into()
    }
}

impl<'a, T, const LEN: usize> From<&'a [T; LEN]> for Buffer<'a, T> {
    fn from(array: &'a [T; LEN]) -> Self {
        array.as_slice().into()
    }
}

impl<'a, T> From<&'a mut [T]> for BufferMut<'a, T> {
    fn from(slice: &'a mut [T]) -> Self {
        Self {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            place: Place::Host,
            borrow: PhantomData,
        }
    }
}

impl<'a, T> From<&'a mut Vec<T>> for BufferMut<'a, T> {
    fn from(vector: &'a mut Vec<T>) -> Self {
        vector.as_mut_slice().into()
    }
}

impl<'a, T, const LEN: usize> From<&'a mut [T; LEN]> for BufferMut<'a, T> {
    fn from(array: &'a mut [T; LEN]) -> Self {
        array.as_mut_slice().into()
    }
}

/// An array of `N` axes in a [`Buffer`], by strides; every element that it names is in there.
#[derive(Debug)]
pub struct View<'a, T, const N: usize> {
    buffer: Buffer<'a, T>,
    grid: Grid<N>,
}

/// An array of `N` axes in a [`BufferMut`], by strides; every element that it names is in there.
#[derive(Debug)]
pub struct ViewMut<'a, T, const N: usize> {
    buffer: BufferMut<'a, T>,
    grid: Grid<N>,
}

/// A tensor to read: batch, head, row, channel. The channels are contiguous.
pub type Tensor<'a, T> = View<'a, T, 4>;

/// A tensor to write: batch, head, row, channel. The channels are contiguous.
pub type TensorMut<'a, T> = ViewMut<'a, T, 4>;

impl<T, const N: usize> Clone for View<'_, T, N> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const N: usize> Copy for View<'_, T, N> {}

impl<'a, T, const N: usize> View<'a, T, N> {
    /// A dense array, the last axis the fastest, that fills the buffer.
    pub fn new(buffer: impl Into<Buffer<'a, T>>, shape: [usize; N]) -> Result<Self> {
        let buffer = buffer.into();
        Ok(Self { buffer, grid: Grid::dense(shape, buffer.len)? })
    }

    /// An array whose neighbours along axis `i` are `strides[i]` elements apart. A stride of 0
    /// repeats.
    pub fn strided(
        buffer: impl Into<Buffer<'a, T>>,
        shape: [usize; N],
        strides: [usize; N],
    ) -> Result<Self> {
        let buffer = buffer.into();
        Ok(Self { buffer, grid: Grid::strided(shape, strides, buffer.len)? })
    }

    /// The extents.
    pub fn shape(&self) -> [usize; N] {
        self.grid.shape
    }

    /// The strides, in elements.
    pub fn strides(&self) -> [usize; N] {
        self.grid.strides
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.buffer.pointer
    }

    pub(crate) fn grid(&self) -> &Grid<N> {
        &self.grid
    }

    /// Refuses memory that the call's device does not read.
    pub(crate) fn expect_place(&self, name: &str, place: Place) -> Result<()> {
        expect_place(name, self.buffer.place, place)
    }
}

impl<'a, T, const N: usize> ViewMut<'a, T, N> {
    /// A dense array, the last axis the fastest, that fills the buffer.
    pub fn new(buffer: impl Into<BufferMut<'a, T>>, shape: [usize; N]) -> Result<Self> {
        let buffer = buffer.into();
        let grid = Grid::dense(shape, buffer.len)?;
        Ok(Self { buffer, grid })
    }

    /// An array whose neighbours along axis `i` are `strides[i]` elements apart. Elements that
    /// share memory are refused by the call.
    pub fn strided(
        buffer: impl Into<BufferMut<'a, T>>,
        shape: [usize; N],
        strides: [usize; N],
    ) -> Result<Self> {
        let buffer = buffer.into();
        let grid = Grid::strided(shape, strides, buffer.len)?;
        Ok(Self { buffer, grid })
    }

    /// The extents.
    pub fn shape(&self) -> [usize; N] {
        self.grid.shape
    }

    /// The strides, in elements.
    pub fn strides(&self) -> [usize; N] {
        self.grid.strides
    }

    /// The same array, to read.
    pub fn view(&self) -> View<'_, T, N> {
        let BufferMut { pointer, len, place, .. } = self.buffer;
        View { buffer: Buffer { pointer, len, place, borrow: PhantomData }, grid: self.grid }
    }

    pub(crate) fn reborrow(&mut self) -> ViewMut<'_, T, N> {
        let BufferMut { pointer, len, place, .. } = self.buffer;
        ViewMut { buffer: BufferMut { pointer, len, place, borrow: PhantomData }, grid: self.grid }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.buffer.pointer
    }

    pub(crate) fn grid(&self) -> &Grid<N> {
        &self.grid
    }

    /// Refuses memory that the call's device does not write.
    pub(crate) fn expect_place(&self, name: &str, place: Place) -> Result<()> {
        expect_place(name, self.buffer.place, place)
    }
}

pub(crate) fn expect_place(name: &str, place: Place, wanted: Place) -> Result<()> {
    if place == wanted {
        return Ok(());
    }
    let message = match wanted {
        Place::Host => format!("{name}: memory of a device; the handle is for the CPU"),
        Place::Device => format!("{name}: memory of the host; the handle is for a CUDA device"),
    };
    Err(Error::new(Status::WrongDevice, message))
}

/// An array to read whose element type is a value: a `View` of it that no element is read through.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnyView<'a, const N: usize> {
    view: View<'a, c_void, N>,
    pub(crate) dtype: i32,
}

impl<const N: usize> AnyView<'_, N> {
    pub(crate) fn grid(&self) -> &Grid<N> {
        &self.view.grid
    }

    /// The address, after a check of the last axis and of the place, `None` for queries.
    pub(crate) fn raw(&self, name: &str, place: Option<Place>) -> Result<*const c_void> {
        self.view.raw_array(name, place)
    }
}

impl AnyView<'_, 4> {
    /// As a tensor, after a check of the place, `None` for queries.
    pub(crate) fn raw_tensor(
        &self,
        name: &str,
        place: Option<Place>,
    ) -> Result<sys::cuflash_tensor_t> {
        if let Some(place) = place {
            self.view.expect_place(name, place)?;
        }
        let pointer = self.view.as_ptr().cast_mut();
        let mut raw = self.view.grid.raw_tensor(name, pointer, self.dtype)?;
        if self.dtype == sys::CUFLASH_INT4 {
            for stride in [&mut raw.batch_stride, &mut raw.head_stride, &mut raw.row_stride] {
                *stride *= 2; // of pairs; within isize::MAX bytes there is room for that
            }
        }
        Ok(raw)
    }
}

/// An array to write, likewise.
#[derive(Debug)]
pub(crate) struct AnyViewMut<'a, const N: usize> {
    view: ViewMut<'a, c_void, N>,
    pub(crate) dtype: i32,
}

impl<const N: usize> AnyViewMut<'_, N> {
    pub(crate) fn grid(&self) -> &Grid<N> {
        &self.view.grid
    }

    /// The same array, to read, or to write for a call that has borrowed this one to do so.
    pub(crate) fn view(&self) -> AnyView<'_, N> {
        AnyView { view: self.view.view(), dtype: self.dtype }
    }

    /// As that of an `AnyView`.
    pub(crate) fn raw(&mut self, name: &str, place: Place) -> Result<*mut c_void> {
        self.view.grid.expect_contiguous(name)?;
        self.view.expect_place(name, place)?;
        Ok(self.view.as_mut_ptr())
    }
}

impl<'a, T: Stored, const N: usize> ViewMut<'a, T, N> {
    pub(crate) fn erase(self) -> AnyViewMut<'a, N> {
        let BufferMut { pointer, len, place, .. } = self.buffer;
        let buffer = BufferMut { pointer: pointer.cast(), len, place, borrow: PhantomData };
        AnyViewMut { view: ViewMut { buffer, grid: self.grid }, dtype: T::DTYPE }
    }
}

impl<'a, T: Stored, const N: usize> View<'a, T, N> {
    pub(crate) fn erase(self) -> AnyView<'a, N> {
        let Buffer { pointer, len, place, .. } = self.buffer;
        let buffer = Buffer { pointer: pointer.cast(), len, place, borrow: PhantomData };
        AnyView { view: View { buffer, grid: self.grid }, dtype: T::DTYPE }
    }
}

impl<T, const N: usize> View<'_, T, N> {
    /// The address, after a check of the last axis and of the place, `None` for queries.
    pub(crate) fn raw_array(&self, name: &str, place: Option<Place>) -> Result<*const T> {
        self.grid.expect_contiguous(name)?;
        if let Some(place) = place {
            self.expect_place(name, place)?;
        }
        Ok(self.as_ptr())
    }
}

impl<T> View<'_, T, 1> {
    /// The address of so many values.
    pub(crate) fn raw_values(
        &self,
        name: &str,
        count: usize,
        place: Option<Place>,
    ) -> Result<*const T> {
        self.grid.expect_shape(name, [count])?;
        self.raw_array(name, place)
    }
}

impl<T> View<'_, T, 2> {
    /// The address of a dense array.
    pub(crate) fn raw_dense(&self, name: &str, place: Option<Place>) -> Result<*const T> {
        let [rows, columns] = self.grid.shape;
        if rows > 1 && columns > 0 && self.grid.strides[0] != columns {
            return Err(Error::new(Status::InvalidValue, format!("{name}: not dense")));
        }
        self.raw_array(name, place)
    }
}

impl<T, const N: usize> ViewMut<'_, T, N> {
    /// As that of a `View`.
    pub(crate) fn raw_array(&mut self, name: &str, place: Place) -> Result<*mut T> {
        self.grid.expect_contiguous(name)?;
        self.expect_place(name, place)?;
        Ok(self.as_mut_ptr())
    }
}

impl<T: Element> View<'_, T, 4> {
    pub(crate) fn raw(&self, name: &str) -> Result<sys::cuflash_tensor_t> {
        self.grid.raw_tensor(name, self.as_ptr().cast_mut().cast(), T::DTYPE)
    }
}

impl<T: Element> ViewMut<'_, T, 4> {
    pub(crate) fn raw(&mut self, name: &str) -> Result<sys::cuflash_tensor_t> {
        let pointer = self.as_mut_ptr();
        self.grid.raw_tensor(name, pointer.cast(), T::DTYPE)
    }
}

/// Extents and strides whose every element is within a length that was checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid<const N: usize> {
    pub(crate) shape: [usize; N],
    pub(crate) strides: [usize; N],
}

impl<const N: usize> Grid<N> {
    fn dense(shape: [usize; N], len: usize) -> Result<Self> {
        let mut strides = [0; N];
        let mut elements = 1_usize;
        for axis in (0..N).rev() {
            strides[axis] = elements;
            // An empty array keeps the strides of one that is not.
            elements = elements.checked_mul(shape[axis].max(1)).ok_or_else(|| {
                Error::new(
                    Status::InvalidDimension,
                    format!("shape {shape:?}: more elements than there can be"),
                )
            })?;
        }
        if shape.contains(&0) {
            elements = 0;
        }
        if elements != len {
            return Err(Error::new(
                Status::InvalidDimension,
                format!("shape {shape:?} has {elements} elements; the buffer has {len}"),
            ));
        }
        Ok(Self { shape, strides })
    }

    fn strided(shape: [usize; N], strides: [usize; N], len: usize) -> Result<Self> {
        if shape.contains(&0) {
            return Self::dense(shape, 0); // no element is where the strides say
        }
        let last = (0..N).try_fold(0_usize, |sum, axis| {
            (shape[axis] - 1).checked_mul(strides[axis])?.checked_add(sum)
        });
        match last {
            Some(last) if last < len => Ok(Self { shape, strides }),
            _ => Err(Error::new(
                Status::InvalidDimension,
                format!(
                    "shape {shape:?} by strides {strides:?} leaves the buffer's {len} elements"
                ),
            )),
        }
    }

    /// As the C API wants it: along an axis of extent 0 or 1 a stride means nothing.
    pub(crate) fn stride(&self, axis: usize) -> i64 {
        if self.shape[axis] > 1 {
            self.strides[axis] as i64 // the last element is within less than isize::MAX
        } else {
            0
        }
    }

    /// As the C API wants it where 0 makes one entry stand for all: so an axis of extent 1, and no
    /// axis of extent 0, which has no entry to stand for others.
    pub(crate) fn repeating_stride(&self, axis: usize) -> i64 {
        if self.shape[axis] == 0 {
            1
        } else {
            self.stride(axis)
        }
    }

    pub(crate) fn extent(&self, axis: usize) -> Result<i64> {
        raw_extent(self.shape[axis])
    }

    /// Refuses a last axis with gaps.
    fn expect_contiguous(&self, name: &str) -> Result<()> {
        if self.shape[N - 1] > 1 && self.strides[N - 1] != 1 {
            return Err(Error::new(Status::InvalidValue, format!("{name}: not contiguous")));
        }
        Ok(())
    }

    /// Refuses a shape that is not the one that the other arguments ask for.
    pub(crate) fn expect_shape(&self, name: &str, wanted: [usize; N]) -> Result<()> {
        if self.shape == wanted {
            return Ok(());
        }
        Err(Error::new(
            Status::DimensionMismatch,
            format!("{name}: shape {:?}; the other arguments need {wanted:?}", self.shape),
        ))
    }

    /// Refuses strides that are not those of another argument of the same shape.
    pub(crate) fn expect_strides(&self, name: &str, other: &Self, of: &str) -> Result<()> {
        if (0..N).all(|axis| self.stride(axis) == other.stride(axis)) {
            return Ok(());
        }
        Err(Error::new(
            Status::InvalidValue,
            format!("{name}: strides {:?}, not those of {of}, {:?}", self.strides, other.strides),
        ))
    }

    /// The last four axes as a tensor.
    pub(crate) fn raw_tensor(
        &self,
        name: &str,
        pointer: *mut c_void,
        dtype: i32,
    ) -> Result<sys::cuflash_tensor_t> {
        if self.shape[N - 1] > 1 && self.strides[N - 1] != 1 {
            return Err(Error::new(
                Status::InvalidValue,
                format!("{name}: a stride of {} along the channels; only 1", self.strides[N - 1]),
            ));
        }
        Ok(sys::cuflash_tensor_t {
            data: pointer,
            batch_stride: self.stride(N - 4),
            head_stride: self.stride(N - 3),
            row_stride: self.stride(N - 2),
            dtype,
            ..Default::default()
        })
    }

    /// Refuses a shape whose last axis has not the extent asked for, or another axis neither that nor
    /// 1, which repeats.
    pub(crate) fn expect_repeating_shape(&self, name: &str, wanted: [usize; N]) -> Result<()> {
        let mut repeated = wanted;
        for (extent, own) in repeated.iter_mut().zip(self.shape).take(N - 1) {
            if own == 1 {
                *extent = 1;
            }
        }
        if self.shape == repeated {
            return Ok(());
        }
        self.expect_shape(name, wanted)
    }

    /// The last three strides of values for rows, where three zeros would mean a dense array.
    pub(crate) fn row_strides(&self, name: &str) -> Result<[i64; 3]> {
        self.three_strides(name, N - 3)
    }

    /// The strides from an axis on, where three zeros would mean a dense array.
    pub(crate) fn three_strides(&self, name: &str, first: usize) -> Result<[i64; 3]> {
        let strides = [self.stride(first), self.stride(first + 1), self.stride(first + 2)];
        if strides == [0; 3] && self.shape[first..first + 3].iter().any(|&extent| extent > 1) {
            return Err(Error::new(
                Status::InvalidValue,
                format!("{name}: strides of 0 along every axis"),
            ));
        }
        Ok(strides)
    }
}

/// An extent as the C API wants it.
pub(crate) fn raw_extent(extent: usize) -> Result<i64> {
    i64::try_from(extent).map_err(|_| {
        Error::new(
            Status::InvalidDimension,
            format!("an extent of {extent} is more than the library takes"),
        )
    })
}
