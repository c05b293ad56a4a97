#![doc = include_str!("../README.md")]
#![no_std]
#![allow(non_camel_case_types)]

/// A struct whose default is zero in every byte, as the C API means it. `struct_size` is left to
/// whoever uses it.
macro_rules! zero_by_default {
    ($name:ident) => {
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: only integers, floats and raw pointers, for which zeros are a value.
                unsafe { core::mem::zeroed() }
            }
        }
    };
}

#[rustfmt::skip]
mod bindings;

pub use bindings::*;
