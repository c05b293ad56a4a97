use std::ffi::CStr;
use std::fmt;

use crate::{sys, Status};

/// A call that was refused or failed: its status and a message that names the argument, the value
/// got and the values allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    status: Status,
    message: String,
}

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// Which of the C API's statuses.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The library's message, or this crate's where it refused the arguments itself.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = i32::from(self.status);
        // SAFETY: a static string for any value.
        let name = unsafe { text(sys::cuflash_status_name(code)) };
        write!(formatter, "{name} ({code}): {}", self.message)
    }
}

impl std::error::Error for Error {}

/// The error behind a status. The message is this thread's, of its last call.
pub(crate) fn check(status: i32) -> Result<()> {
    if status == sys::CUFLASH_SUCCESS {
        return Ok(());
    }
    // SAFETY: strings that live until this thread's next call, or for ever.
    let message = unsafe {
        let message = text(sys::cuflash_last_error());
        if message.is_empty() {
            text(sys::cuflash_error_string(status))
        } else {
            message
        }
    };
    Err(Error::new(Status::from(status), message))
}

/// A copy of a C string.
///
/// # Safety
/// `string` leads to a NUL-terminated string.
pub(crate) unsafe fn text(string: *const std::ffi::c_char) -> String {
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}
