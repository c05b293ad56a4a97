//! The 16-bit types.

use cuflash::{Bf16, F16};

fn value_f16(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2_f64.powi(-24),
        0x1f if fraction == 0.0 => f64::INFINITY,
        0x1f => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15),
    }
}

/// Every value of 16 bits has the value that the format says and comes back with the same bits.
#[test]
fn all_values() {
    for bits in 0..=u16::MAX {
        let half = F16::from_bits(bits);
        let (value, expected) = (f64::from(half.to_f32()), value_f16(bits));
        assert!(value == expected || value.is_nan() && expected.is_nan(), "{bits:#x}: {value}");
        let brain = Bf16::from_bits(bits);
        assert_eq!(brain.to_f32().to_bits(), u32::from(bits) << 16);
        if value.is_nan() {
            assert!(F16::from_f32(half.to_f32()).to_f32().is_nan());
        } else {
            assert_eq!(F16::from_f32(half.to_f32()).to_bits(), bits);
        }
        if brain.to_f32().is_nan() {
            assert!(Bf16::from_f32(brain.to_f32()).to_f32().is_nan());
        } else {
            assert_eq!(Bf16::from_f32(brain.to_f32()).to_bits(), bits);
        }
    }
}

/// Half-way between two neighbours goes to the even one, a little beside it to the nearer one.
#[test]
fn rounding() {
    for bits in 0..0x7bff_u16 {
        let (low, high) = (value_f16(bits), value_f16(bits + 1));
        let middle = ((low + high) / 2.0) as f32; // exact
        let even = bits + (bits & 1);
        for (value, expected) in
            [(next_down(middle), bits), (middle, even), (next_up(middle), bits + 1)]
        {
            assert_eq!(F16::from_f32(value).to_bits(), expected, "{value}");
            assert_eq!(F16::from_f32(-value).to_bits(), expected | 0x8000, "{value}");
        }
    }
    for bits in (0..0x7f7f_u16).step_by(7) {
        let middle = u32::from(bits) << 16 | 0x8000;
        let even = bits + (bits & 1);
        for (value, expected) in [(middle - 1, bits), (middle, even), (middle + 1, bits + 1)] {
            assert_eq!(Bf16::from_f32(f32::from_bits(value)).to_bits(), expected);
        }
    }
}

fn next_down(value: f32) -> f32 {
    f32::from_bits(value.to_bits() - 1)
}

fn next_up(value: f32) -> f32 {
    f32::from_bits(value.to_bits() + 1)
}

#[test]
fn limits() {
    assert_eq!(F16::from_f32(65504.0).to_f32(), 65504.0);
    assert_eq!(F16::from_f32(65519.0).to_f32(), 65504.0);
    assert_eq!(F16::from_f32(65520.0).to_f32(), f32::INFINITY);
    assert_eq!(F16::from_f32(-1e30).to_f32(), f32::NEG_INFINITY);
    assert_eq!(F16::from_f32(2_f32.powi(-25)).to_bits(), 0);
    assert_eq!(F16::from_f32(-1e-40).to_bits(), 0x8000);
    assert_eq!(Bf16::from_f32(f32::MAX).to_f32(), f32::INFINITY);
    assert!(Bf16::from_f32(f32::from_bits(0x7f80_0001)).to_f32().is_nan());
    assert!(F16::from_f32(f32::from_bits(0x7f80_0001)).to_f32().is_nan());
}

#[test]
fn as_values() {
    assert_eq!(F16::from(-0.0), F16::from(0.0));
    assert_ne!(F16::from(f32::NAN), F16::from(f32::NAN));
    assert!(Bf16::from(1.0) < Bf16::from(1.5));
    assert_eq!(format!("{} {:?}", F16::from(0.5), Bf16::from(2.0)), "0.5 2.0");
    let mut bits = [0x3c00, 0x4000];
    assert_eq!(F16::slice_from_bits(&bits), [F16::from(1.0), F16::from(2.0)]);
    F16::slice_from_bits_mut(&mut bits)[0] = F16::from(2.0);
    assert_eq!(bits, [0x4000; 2]);
}
