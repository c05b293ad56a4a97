use std::ffi::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};

use crate::error::{check, text};
use crate::{sys, Error, LogLevel, Operation, Result, Status};

/// The number in the SONAME of the library that these bindings are for.
const ABI: i32 = 0;

/// The library's version: major, minor, patch.
pub fn version() -> (i32, i32, i32) {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three places to write to.
    unsafe { sys::cuflash_version(&mut major, &mut minor, &mut patch) };
    (major, minor, patch)
}

/// Version, CUDA version, architectures and compiler of the library, in one line.
pub fn build_info() -> String {
    // SAFETY: a static string.
    unsafe { text(sys::cuflash_build_info()) }
}

/// Refuses a library of another ABI, or older than the header behind these bindings.
pub(crate) fn check_version() -> Result<()> {
    // SAFETY: takes nothing.
    let abi = unsafe { sys::cuflash_abi_version() };
    let (major, minor, patch) = version();
    let message = if abi != ABI {
        format!("libcuflash has ABI {abi}; these bindings are for ABI {ABI}")
    } else if (major, minor) < (sys::CUFLASH_VERSION_MAJOR, sys::CUFLASH_VERSION_MINOR) {
        format!(
            "libcuflash is version {major}.{minor}.{patch}; these bindings need {}.{} or newer",
            sys::CUFLASH_VERSION_MAJOR,
            sys::CUFLASH_VERSION_MINOR
        )
    } else {
        return Ok(());
    };
    Err(Error::new(Status::NotBuilt, message))
}

/// A kernel of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kernel {
    /// Unique, such as "fwd_wmma_f16_d64".
    pub name: String,
    /// "reference", "wmma" and so on.
    pub family: String,
    /// What it computes.
    pub operation: Operation,
    /// For the CPU device, not for CUDA.
    pub on_cpu: bool,
    /// In this build of the library.
    pub built: bool,
    /// Query rows of a tile.
    pub tile_m: i32,
    /// Keys of a tile.
    pub tile_n: i32,
    /// Threads of a block; 0 on the CPU.
    pub threads: i32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_memory: i32,
    /// Among the kernels that accept a problem the one of the highest rank is taken.
    pub rank: i32,
}

/// All kernels that the library knows, built or not.
pub fn kernels() -> Result<Vec<Kernel>> {
    // SAFETY: takes nothing.
    (0..unsafe { sys::cuflash_kernel_count() })
        .map(|index| {
            let mut info = sys::cuflash_kernel_info_t {
                struct_size: struct_size::<sys::cuflash_kernel_info_t>(),
                ..Default::default()
            };
            // SAFETY: struct_size bytes to write to; the strings that come back are static.
            let (name, family) = unsafe {
                check(sys::cuflash_kernel_info(index, &mut info))?;
                (text(info.name), text(info.family))
            };
            Ok(Kernel {
                name,
                family,
                operation: info.operation.into(),
                on_cpu: info.on_cpu != 0,
                built: info.built != 0,
                tile_m: info.tile_m,
                tile_n: info.tile_n,
                threads: info.threads,
                shared_memory: info.shared_memory,
                rank: info.rank,
            })
        })
        .collect()
}

pub(crate) fn struct_size<T>() -> u32 {
    std::mem::size_of::<T>() as u32 // a few hundred bytes
}

type Logger = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// Sends the log lines of the whole process, up to `level`, to a function instead of the file that
/// the environment names.
///
/// It is called on the thread of the call that logs, perhaps on several at once, and must not use
/// this crate. A panic in it ends there. It is never dropped, for another thread may still be in it
/// when it is replaced.
pub fn set_logger(level: LogLevel, logger: impl Fn(LogLevel, &str) + Send + Sync + 'static) {
    unsafe extern "C" fn forward(user: *mut c_void, level: i32, line: *const c_char) {
        // SAFETY: set_logger gave this pointer, and what it leads to is never freed.
        let logger = unsafe { &*user.cast::<Logger>() };
        // SAFETY: the library's line lives during the call.
        let line = unsafe { text(line) };
        // No panic may leave a function that C called, and there is nobody to tell.
        let _ = catch_unwind(AssertUnwindSafe(|| logger(level.into(), &line)));
    }
    let logger: Logger = Box::new(logger);
    let user = Box::into_raw(Box::new(logger));
    // SAFETY: the function takes the pointer that is given with it.
    unsafe { sys::cuflash_set_log_callback(Some(forward), user.cast(), level.into()) };
}

/// Sends log lines to where `CUFLASH_LOG_LEVEL` and `CUFLASH_LOG_FILE` say again.
pub fn unset_logger() {
    // SAFETY: no function, so no pointer for it.
    unsafe { sys::cuflash_set_log_callback(None, std::ptr::null_mut(), sys::CUFLASH_LOG_OFF) };
}
