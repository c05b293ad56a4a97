//! Version, kernels, statuses, log lines.

use std::collections::HashSet;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};
use std::thread;

use cuflash::{sys, Device, Handle, LogLevel, Operation, Status};

#[test]
fn versions() {
    let needed = (sys::CUFLASH_VERSION_MAJOR, sys::CUFLASH_VERSION_MINOR, 0);
    assert!(cuflash::version() >= needed);
    let crate_version = format!("{}.{}.{}", needed.0, needed.1, sys::CUFLASH_VERSION_PATCH);
    assert_eq!(crate_version, env!("CARGO_PKG_VERSION"), "the crate has the header's version");
    assert!(!cuflash::build_info().is_empty());
}

#[test]
fn kernels() {
    let kernels = cuflash::kernels().unwrap();
    let names: HashSet<_> = kernels.iter().map(|kernel| &kernel.name).collect();
    assert_eq!(names.len(), kernels.len());
    assert!(kernels
        .iter()
        .any(|kernel| { kernel.on_cpu && kernel.built && kernel.operation == Operation::Forward }));
    assert!(kernels.iter().all(|kernel| !matches!(kernel.operation, Operation::Unknown(_))));
}

/// Every status that the library names is known here, and only those.
#[test]
fn statuses() {
    for code in 1..200 {
        // SAFETY: a static string.
        let name = unsafe { CStr::from_ptr(sys::cuflash_status_name(code)) };
        let unknown = matches!(Status::from(code), Status::Unknown(_));
        assert_eq!(unknown, name == c"CUFLASH_STATUS_UNKNOWN", "{code}");
        assert_eq!(i32::from(Status::from(code)), code);
    }
}

#[test]
fn log_lines() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (kept, this_thread) = (Arc::clone(&lines), thread::current().id());
    cuflash::set_logger(LogLevel::Info, move |level, line| {
        if thread::current().id() == this_thread {
            kept.lock().unwrap().push((level, line.to_owned()));
            panic!("this is a test: a panic in a logger ends there");
        }
    });
    drop(Handle::new(Device::Cpu).unwrap());
    cuflash::unset_logger();
    drop(Handle::new(Device::Cpu).unwrap());
    let lines = lines.lock().unwrap();
    assert!(!lines.is_empty() && lines.iter().all(|(_, line)| !line.is_empty()));
    assert!(lines.iter().all(|(level, _)| *level == LogLevel::Info), "{lines:?}");
}
