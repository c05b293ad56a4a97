use crate::element::Element;
use crate::error::check;
use crate::handle::Launch;
use crate::library::struct_size;
use crate::view::{TensorMut, View, ViewMut};
use crate::{sys, Error, Result, Status};

/// The logarithm of LSE values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LseBase {
    /// Natural: what this library writes.
    #[default]
    E,
    /// Base 2, of other libraries.
    Two,
}

/// Merges results over disjoint sets of keys into the result over all of them.
///
/// `parts` is `[parts, batch, heads, len, head_dim]`, `lse_parts` is `[parts, batch, heads, len]`.
/// A part whose LSE is minus infinity adds nothing, whatever else it holds. `lse`, where it is
/// wanted, has the strides of a part of `lse_parts`.
pub fn merge<'h, T: Element>(
    launch: impl Into<Launch<'h>>,
    parts: View<'_, T, 5>,
    lse_parts: View<'_, f32, 4>,
    base: LseBase,
    o: &mut TensorMut<'_, T>,
    lse: Option<&mut ViewMut<'_, f32, 3>>,
) -> Result<()> {
    let launch = launch.into();
    let place = launch.place();
    let [count, batch, heads, len, head_dim] = parts.shape();
    lse_parts.grid().expect_shape("lse_parts", [count, batch, heads, len])?;
    o.grid().expect_shape("o", [batch, heads, len, head_dim])?;
    parts.expect_place("parts", place)?;
    lse_parts.expect_place("lse_parts", place)?;
    o.expect_place("o", place)?;
    let lse_strides = lse_parts.grid().row_strides("lse_parts")?;
    let mut raw = sys::cuflash_merge_t {
        struct_size: struct_size::<sys::cuflash_merge_t>(),
        flags: match base {
            LseBase::E => 0,
            LseBase::Two => sys::CUFLASH_MERGE_LSE_BASE2,
        },
        num_parts: parts.grid().extent(0)?,
        batch: parts.grid().extent(1)?,
        heads: parts.grid().extent(2)?,
        len: parts.grid().extent(3)?,
        head_dim: parts.grid().extent(4)?,
        parts: parts.grid().raw_tensor("parts", parts.as_ptr().cast_mut().cast(), T::DTYPE)?,
        part_stride: parts.grid().stride(0),
        lse_parts: lse_parts.as_ptr(),
        lse_part_stride: lse_parts.grid().stride(0),
        lse_batch_stride: lse_strides[0],
        lse_head_stride: lse_strides[1],
        lse_row_stride: lse_strides[2],
        o: o.raw("o")?,
        ..Default::default()
    };
    if let Some(lse) = lse {
        lse.grid().expect_shape("lse", [batch, heads, len])?;
        lse.expect_place("lse", place)?;
        if lse.grid().row_strides("lse")? != lse_strides {
            return Err(Error::new(
                Status::InvalidValue,
                format!("lse: strides {:?}, not those of a part of lse_parts", lse.strides()),
            ));
        }
        raw.lse = lse.as_mut_ptr();
    }
    // SAFETY: every pointer leads to memory of its extents and strides in the device's place,
    // borrowed for the call or, on a CUDA device, promised to Buffer::from_raw_parts.
    check(unsafe {
        sys::cuflash_merge_states(launch.handle.as_raw(), &raw, launch.stream.as_raw())
    })
}
