use std::cmp::Ordering;
use std::fmt;

use crate::sys;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::F16 {}
    impl Sealed for super::Bf16 {}
    impl Sealed for i8 {}
    impl Sealed for super::Fp8E4m3 {}
    impl Sealed for super::Fp8E5m2 {}
    impl Sealed for super::Int4Pair {}
}

/// What a cache can hold: an [`Element`], [`i8`], [`Fp8E4m3`], [`Fp8E5m2`] or [`Int4Pair`].
pub trait Stored: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Its `enum cuflash_dtype`.
    const DTYPE: i32;
}

/// An element type that the library computes with: [`f32`], [`F16`] or [`Bf16`].
pub trait Element: Stored {}

macro_rules! stored {
    ($($name:ty: $dtype:ident),*) => {
        $(impl Stored for $name {
            const DTYPE: i32 = sys::$dtype;
        })*
    };
}

stored!(f32: CUFLASH_F32, F16: CUFLASH_F16, Bf16: CUFLASH_BF16, i8: CUFLASH_INT8);
stored!(Fp8E4m3: CUFLASH_FP8_E4M3, Fp8E5m2: CUFLASH_FP8_E5M2, Int4Pair: CUFLASH_INT4);

impl Element for f32 {}
impl Element for F16 {}
impl Element for Bf16 {}

/// An element type that results of a problem in `T` may have: `T` itself or [`f32`].
pub trait Output<T: Element>: Element {}

impl<T: Element> Output<T> for T {}
impl Output<F16> for f32 {}
impl Output<Bf16> for f32 {}

/// IEEE binary16: five bits of exponent, eleven of precision.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F16(u16);

/// bfloat16: the upper half of an [`f32`].
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bf16(u16);

/// The code of an OCP E4M3 number, which has no infinity. For caches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Fp8E4m3(u8);

/// The code of an OCP E5M2 number. For caches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Fp8E5m2(u8);

/// Two integers of four bits, two's complement, the even channel in the low half. For caches, whose
/// tensors of it have half as many channels, rounded up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Int4Pair(u8);

impl F16 {
    /// The nearest value, to even where two are as near. What is too large becomes infinite.
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        let half = if magnitude > 0x7f80_0000 {
            0x7e00 | (magnitude >> 13 & 0x3ff) as u16 // NaN: quiet, its payload's upper bits
        } else if magnitude >= 0x477f_f000 {
            0x7c00 // 65520, half-way between the largest value and the next, and above
        } else if magnitude >= 0x3880_0000 {
            // Normal, from 2^-14 on. The carry of the rounding may go into the exponent.
            (round_off(magnitude, 13) - (112 << 10)) as u16
        } else {
            // Subnormal, in units of 2^-24; below 2^-25 the shift leaves nothing.
            let significand = (magnitude & 0x7f_ffff) | 0x80_0000;
            let shift = 126 - (magnitude >> 23);
            if shift > 24 {
                0
            } else {
                round_off(significand, shift) as u16
            }
        };
        Self(sign | half)
    }

    /// The same value.
    pub fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let exponent = u32::from(self.0 >> 10 & 0x1f);
        let fraction = u32::from(self.0 & 0x3ff);
        let magnitude = match exponent {
            0 => (fraction as f32 * (1.0 / (1 << 24) as f32)).to_bits(),
            0x1f => 0x7f80_0000 | fraction << 13,
            _ => (exponent + 112) << 23 | fraction << 13,
        };
        f32::from_bits(sign | magnitude)
    }
}

impl Bf16 {
    /// The nearest value, to even where two are as near. What is too large becomes infinite.
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40); // quiet; rounding could make it infinite
        }
        Self(round_off(bits, 16) as u16)
    }

    /// The same value.
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// `bits / 2^shift`, rounded to the nearest and to even; `shift` is 1 to 24.
fn round_off(bits: u32, shift: u32) -> u32 {
    let below_half = (1 << (shift - 1)) - 1;
    (bits + below_half + (bits >> shift & 1)) >> shift
}

macro_rules! bits {
    ($name:ident, $bits:ty) => {
        impl $name {
            /// The value with these bits.
            pub const fn from_bits(bits: $bits) -> Self {
                Self(bits)
            }

            /// Its bits.
            pub const fn to_bits(self) -> $bits {
                self.0
            }

            /// Bits seen as values, nothing copied.
            pub fn slice_from_bits(bits: &[$bits]) -> &[Self] {
                // SAFETY: repr(transparent) over the bits, and all of them are values.
                unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
            }

            /// Bits seen as values that can be written, nothing copied.
            pub fn slice_from_bits_mut(bits: &mut [$bits]) -> &mut [Self] {
                // SAFETY: as above, and the borrow is as exclusive as the one it came from.
                unsafe { std::slice::from_raw_parts_mut(bits.as_mut_ptr().cast(), bits.len()) }
            }
        }
    };
}

bits!(F16, u16);
bits!(Bf16, u16);
bits!(Fp8E4m3, u8);
bits!(Fp8E5m2, u8);
bits!(Int4Pair, u8);

macro_rules! half_precision {
    ($name:ident) => {
        impl From<f32> for $name {
            fn from(value: f32) -> Self {
                Self::from_f32(value)
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> f32 {
                value.to_f32()
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), formatter)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), formatter)
            }
        }
    };
}

half_precision!(F16);
half_precision!(Bf16);
