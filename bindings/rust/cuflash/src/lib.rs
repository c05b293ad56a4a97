#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

pub use cuflash_sys as sys;

mod append;
mod cache;
mod element;
mod enums;
mod error;
mod gradients;
mod handle;
mod library;
mod merge;
mod problem;
mod sequences;
mod view;

pub use append::{Append, Pairs};
pub use cache::{Cache, CacheMut, Cached, PageIds};
pub use element::{Bf16, Element, Fp8E4m3, Fp8E5m2, Int4Pair, Output, Stored, F16};
pub use enums::{LogLevel, Operation, Setting, Status};
pub use error::{Error, Result};
pub use gradients::{Extras, Gradients};
pub use handle::{Device, Handle, Launch, Stream};
pub use library::{build_info, kernels, set_logger, unset_logger, version, Kernel};
pub use merge::{merge, LseBase};
pub use problem::{Align, Attention, Decode, Keys, Problem};
pub use sequences::Sequences;
pub use view::{Buffer, BufferMut, Place, Tensor, TensorMut, View, ViewMut};
