//! Reductions of elements in memory.

use ascend_spec::DType;
use ascend_spec::collective::Reduction;
use half::{bf16, f16};

/// Applies a function of two elements of `N` bytes each to every element of both; the result replaces the first.
fn each<const N: usize>(into: &mut [u8], from: &[u8], combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (into, _) = into.as_chunks_mut::<N>();
    let (from, _) = from.as_chunks::<N>();
    for (one, two) in into.iter_mut().zip(from) {
        *one = combine(*one, *two);
    }
}

/// Integers: sums and products wrap around.
macro_rules! integer {
    ($type:ty, $reduction:expr, $into:expr, $from:expr) => {{
        let combine = |one: $type, two: $type| match $reduction {
            Reduction::Sum => one.wrapping_add(two),
            Reduction::Prod => one.wrapping_mul(two),
            Reduction::Max => one.max(two),
            Reduction::Min => one.min(two),
        };
        each($into, $from, |one, two| combine(<$type>::from_le_bytes(one), <$type>::from_le_bytes(two)).to_le_bytes())
    }};
}

/// Floats, computed as `$wide`, which holds a sum and a product of two of them; NaN is larger and smaller than any.
macro_rules! float {
    ($type:ty, $widen:expr, $narrow:expr, $reduction:expr, $into:expr, $from:expr) => {{
        each($into, $from, |one, two| {
            let (one, two) = ($widen(<$type>::from_le_bytes(one)), $widen(<$type>::from_le_bytes(two)));
            let combined = match $reduction {
                Reduction::Sum => one + two,
                Reduction::Prod => one * two,
                Reduction::Max if one.is_nan() || one > two => one,
                Reduction::Min if one.is_nan() || one < two => one,
                Reduction::Max | Reduction::Min => two,
            };
            $narrow(combined).to_le_bytes()
        })
    }};
}

/// Reduces the elements of `from` into those of `into`. Nothing happens with a type that no product reduces.
pub(super) fn reduce(dtype: DType, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    match dtype {
        DType::Int8 => integer!(i8, reduction, into, from),
        DType::Int16 => integer!(i16, reduction, into, from),
        DType::Int32 => integer!(i32, reduction, into, from),
        DType::Int64 => integer!(i64, reduction, into, from),
        DType::UInt64 => integer!(u64, reduction, into, from),
        DType::Float => float!(f32, |x: f32| x, |x: f32| x, reduction, into, from),
        DType::Double => float!(f64, |x: f64| x, |x: f64| x, reduction, into, from),
        DType::Float16 => float!(f16, f16::to_f32, f16::from_f32, reduction, into, from),
        DType::Bf16 => float!(bf16, bf16::to_f32, bf16::from_f32, reduction, into, from),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_stays_and_integers_wrap() {
        for reduction in Reduction::ALL {
            for (one, two) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
                let mut into = one.to_le_bytes();
                reduce(DType::Float, reduction, &mut into, &two.to_le_bytes());
                assert!(f32::from_le_bytes(into).is_nan(), "{reduction:?} {one} {two}");
            }
        }
        let mut into = 100i8.to_le_bytes();
        reduce(DType::Int8, Reduction::Sum, &mut into, &100i8.to_le_bytes());
        assert_eq!(i8::from_le_bytes(into), -56);
    }

    #[test]
    fn every_type_that_a_product_reduces_is_reduced() {
        use ascend_spec::Soc;
        use ascend_spec::collective::{Collective, reduces};
        for &dtype in DType::ALL {
            if !reduces(Soc::Ascend950, Collective::AllReduce, dtype, Reduction::Sum) {
                continue;
            }
            // The lowest bit of an integer, and no number that rounds a sum of itself away.
            let one: Vec<u8> = vec![1; dtype.size().unwrap()];
            let mut into = one.clone();
            reduce(dtype, Reduction::Sum, &mut into, &one);
            assert_ne!(into, one, "{dtype:?}");
        }
    }
}
