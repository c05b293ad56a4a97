//! Device memory and streams for the tests, through the CUDA driver, which is loaded at run time.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::{size_of_val, transmute_copy};
use std::ptr;

use cuflash::{Buffer, BufferMut, Place, Stream};

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;

/// The driver, with the first device's primary context current on this thread.
pub struct Driver {
    library: *mut c_void,
}

impl Driver {
    /// The driver, or why there is none to test on.
    pub fn open() -> Result<Self, String> {
        // SAFETY: a NUL-terminated name; loading the driver runs its own constructors only.
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return Err("no CUDA driver".into());
        }
        let driver = Self { library };
        let (mut count, mut device, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: the types are those of the driver's functions, the places live here.
        unsafe {
            type Init = unsafe extern "C" fn(c_uint) -> c_int;
            type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
            type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
            type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
            type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
            let ready = driver.function::<Init>(c"cuInit")(0) == 0
                && driver.function::<Count>(c"cuDeviceGetCount")(&mut count) == 0;
            if !ready || count == 0 {
                return Err("no CUDA device".into());
            }
            done(driver.function::<Get>(c"cuDeviceGet")(&mut device, 0));
            done(driver.function::<Retain>(c"cuDevicePrimaryCtxRetain")(&mut context, device));
            done(driver.function::<SetCurrent>(c"cuCtxSetCurrent")(context));
        }
        Ok(driver)
    }

    /// # Safety
    /// `F` is the type of the driver's function of this name.
    unsafe fn function<F>(&self, name: &CStr) -> F {
        let address = unsafe { dlsym(self.library, name.as_ptr()) };
        assert!(!address.is_null(), "the driver has no {name:?}");
        unsafe { transmute_copy(&address) }
    }

    pub fn stream(&self) -> Stream {
        type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int;
        let mut stream = ptr::null_mut();
        // SAFETY: as above; the stream is never destroyed.
        unsafe {
            done(self.function::<Create>(c"cuStreamCreate")(&mut stream, 1)); // non-blocking
            Stream::from_raw(stream)
        }
    }

    pub fn synchronize(&self) {
        type Synchronize = unsafe extern "C" fn() -> c_int;
        // SAFETY: as above.
        done(unsafe { self.function::<Synchronize>(c"cuCtxSynchronize")() });
    }

    /// A copy of host memory on the device.
    pub fn copy<T: Copy>(&self, values: &[T]) -> DeviceMemory<'_, T> {
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
        type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
        let mut address = 0;
        // SAFETY: as above; both sides have the size.
        unsafe {
            done(self.function::<Allocate>(c"cuMemAlloc_v2")(&mut address, size_of_val(values)));
            done(self.function::<CopyIn>(c"cuMemcpyHtoD_v2")(
                address,
                values.as_ptr().cast(),
                size_of_val(values),
            ));
        }
        DeviceMemory { driver: self, address, host: values.to_vec() }
    }
}

fn done(result: c_int) {
    assert_eq!(result, 0, "the CUDA driver refused a call");
}

/// Memory on the device. Whoever makes buffers of it synchronises before it is gone.
pub struct DeviceMemory<'a, T> {
    driver: &'a Driver,
    address: u64,
    host: Vec<T>,
}

impl<T: Copy> DeviceMemory<'_, T> {
    pub fn buffer(&self) -> Buffer<'_, T> {
        // SAFETY: the memory is there until drop, which synchronises.
        unsafe { Buffer::from_raw_parts(self.address as *const T, self.host.len(), Place::Device) }
    }

    pub fn buffer_mut(&mut self) -> BufferMut<'_, T> {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { BufferMut::from_raw_parts(self.address as *mut T, self.host.len(), Place::Device) }
    }

    /// What it holds after all work that was enqueued so far.
    pub fn read(&mut self) -> &[T] {
        type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
        self.driver.synchronize();
        // SAFETY: as above; both sides have the size.
        done(unsafe {
            self.driver.function::<CopyOut>(c"cuMemcpyDtoH_v2")(
                self.host.as_mut_ptr().cast(),
                self.address,
                size_of_val(self.host.as_slice()),
            )
        });
        &self.host
    }
}

impl<T> Drop for DeviceMemory<'_, T> {
    fn drop(&mut self) {
        type Free = unsafe extern "C" fn(u64) -> c_int;
        self.driver.synchronize();
        // SAFETY: as above; allocated by copy() and freed once.
        done(unsafe { self.driver.function::<Free>(c"cuMemFree_v2")(self.address) });
    }
}
