//! Decoding of elements, by the definition of their types.

use ascend_spec::DType;
use ascend_spec::minifloat::{Float4E2M1, Float8E4M3Fn, Float8E8M0, HiFloat8};

/// Decodes element `index` of bytes that are elements of `dtype`; `None` past their end.
pub(super) fn decode(bytes: &[u8], dtype: DType, index: i64) -> Option<f64> {
    let index = usize::try_from(index).ok()?;
    if let DType::Int4 | DType::Float4E2M1 = dtype {
        let byte = bytes.get(index / 2)?;
        let half = if index % 2 == 0 { byte & 15 } else { byte >> 4 };
        if dtype == DType::Float4E2M1 {
            return Some(f64::from(Float4E2M1::from_bits(half).to_f32()));
        }
        return Some(f64::from(half) - if half < 8 { 0.0 } else { 16.0 });
    }
    let size = dtype.size()?;
    let start = index.checked_mul(size)?;
    let bytes = bytes.get(start..start.checked_add(size)?)?;
    let mut eight = [0; 8];
    eight.get_mut(..size)?.copy_from_slice(bytes);
    let bits = u64::from_le_bytes(eight);
    Some(match dtype {
        DType::Float16 => half(bits as u16),
        DType::Bf16 => brain(bits as u16),
        // The hardware stores scales as single precision in the lower half.
        DType::Float | DType::UInt64 => f64::from(f32::from_bits(bits as u32)),
        DType::Int8 => f64::from(bits as u8 as i8),
        DType::UInt8 => f64::from(bits as u8),
        DType::Int32 => f64::from(bits as u32 as i32),
        DType::Int64 => bits as i64 as f64,
        DType::Float8E4M3Fn => f64::from(Float8E4M3Fn::from_bits(bits as u8).to_f32()),
        DType::HiFloat8 => f64::from(HiFloat8::from_bits(bits as u8).to_f32()),
        DType::Float8E8M0 => f64::from(Float8E8M0::from_bits(bits as u8).to_f32()),
        _ => return None,
    })
}

/// Decodes IEEE half precision by its definition.
fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits >> 10) & 0x1f);
    let mantissa = f64::from(bits & 0x3ff);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    sign * magnitude
}

/// Decodes brain floating point, the upper half of single precision.
fn brain(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_agrees_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let same = |ours: f64, theirs: f64| ours == theirs || ours.is_nan() && theirs.is_nan();
            assert!(same(half(bits), half::f16::from_bits(bits).to_f64()));
            assert!(same(brain(bits), half::bf16::from_bits(bits).to_f64()));
        }
    }
}
