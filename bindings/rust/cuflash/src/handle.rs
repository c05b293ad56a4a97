use std::ffi::{c_void, CString};
use std::ptr;

use crate::error::check;
use crate::library::check_version;
use crate::view::{BufferMut, Place};
use crate::{sys, Error, Result, Setting, Status};

/// Where calls run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// On the CPU, in host memory; a call returns when it is done.
    Cpu,
    /// On the GPU of this CUDA ordinal.
    Cuda(u16),
    /// On the GPU that is current in CUDA at each call.
    CurrentCuda,
}

impl Device {
    fn ordinal(self) -> i32 {
        match self {
            Self::Cpu => sys::CUFLASH_DEVICE_CPU,
            Self::Cuda(ordinal) => ordinal.into(),
            Self::CurrentCuda => sys::CUFLASH_DEVICE_CURRENT,
        }
    }

    /// Where the memory of its calls lies.
    pub(crate) fn place(self) -> Place {
        match self {
            Self::Cpu => Place::Host,
            Self::Cuda(_) | Self::CurrentCuda => Place::Device,
        }
    }
}

/// A device and options: what every call goes through.
///
/// Any number of threads may use one at the same time; what changes it takes `&mut`.
#[derive(Debug)]
pub struct Handle {
    raw: sys::cuflash_handle_t,
    device: Device,
}

// SAFETY: the library allows every use but the cuflash_set_ functions and cuflash_destroy from any
// threads at once. Those two take `&mut` and ownership here.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// A handle for a device. Allocates nothing there.
    pub fn new(device: Device) -> Result<Self> {
        check_version()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        check(unsafe { sys::cuflash_create(&mut raw, device.ordinal()) })?;
        Ok(Self { raw, device })
    }

    /// The device that it was made for.
    pub fn device(&self) -> Device {
        self.device
    }

    /// For functions of [`sys`] that this crate does not wrap. It is freed with `self`.
    pub fn as_raw(&self) -> sys::cuflash_handle_t {
        self.raw
    }

    /// Changes a setting for the calls to come.
    pub fn set(&mut self, setting: Setting, value: i64) -> Result<()> {
        // SAFETY: a handle that lives, used by nobody else.
        check(unsafe { sys::cuflash_set_option(self.raw, setting.into(), value) })
    }

    /// The value of a setting.
    pub fn get(&self, setting: Setting) -> Result<i64> {
        let mut value = 0;
        // SAFETY: a handle that lives and a place to write to.
        check(unsafe { sys::cuflash_get_option(self.raw, setting.into(), &mut value) })?;
        Ok(value)
    }

    /// Forces a kernel or a family of kernels by name, or lets the library choose again. A forced
    /// kernel that refuses a problem is not replaced: the call returns its reason.
    pub fn set_kernel(&mut self, name: Option<&str>) -> Result<()> {
        let name = CString::new(name.unwrap_or_default())
            .map_err(|_| Error::new(Status::InvalidValue, "name: a NUL inside"))?;
        // SAFETY: a handle that lives, used by nobody else; the library copies the string.
        check(unsafe { sys::cuflash_set_kernel(self.raw, name.as_ptr()) })
    }

    /// Loads all kernels for the device, so that a first call inside a stream capture loads none.
    pub fn preload(&self) -> Result<()> {
        // SAFETY: a handle that lives; without a problem, all kernels.
        check(unsafe { sys::cuflash_preload(self.raw, ptr::null()) })
    }

    /// Gives unused memory of the library's pool on the device back to CUDA.
    pub fn trim(&self) -> Result<()> {
        // SAFETY: a handle that lives.
        check(unsafe { sys::cuflash_trim(self.raw) })
    }

    /// Calls through this handle on a stream.
    pub fn on(&self, stream: Stream) -> Launch<'_> {
        Launch { handle: self, stream, workspace: None }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a handle that lives and is used by nobody else. It cannot fail.
        unsafe { sys::cuflash_destroy(self.raw) };
    }
}

/// A CUDA stream.
#[derive(Debug, Clone, Copy)]
pub struct Stream(*mut c_void);

// SAFETY: CUDA's streams belong to no thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// CUDA's legacy default stream, and the only one of the CPU device.
    pub const DEFAULT: Self = Self(ptr::null_mut());

    /// A `cudaStream_t` or `CUstream`, whatever the crate that made it calls it.
    ///
    /// # Safety
    /// The stream exists when calls are made on it.
    pub unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    pub(crate) fn as_raw(self) -> sys::cuflash_stream_t {
        self.0
    }
}

/// How a call is made: through which handle, on which stream, in which workspace. A `&Handle`
/// becomes one by itself.
#[derive(Debug)]
pub struct Launch<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) stream: Stream,
    pub(crate) workspace: Option<BufferMut<'a, u8>>,
}

impl<'a> Launch<'a> {
    /// Memory for the call, aligned to 256 bytes and at least as large as the `..._workspace_size`
    /// method says. Without it the library takes a block from its own pool.
    pub fn workspace(mut self, workspace: impl Into<BufferMut<'a, u8>>) -> Self {
        self.workspace = Some(workspace.into());
        self
    }

    pub(crate) fn place(&self) -> Place {
        self.handle.device.place()
    }
}

impl<'a> From<&'a Handle> for Launch<'a> {
    fn from(handle: &'a Handle) -> Self {
        handle.on(Stream::DEFAULT)
    }
}
