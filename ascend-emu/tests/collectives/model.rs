//! Element types, and what reductions of them give, written down plainly.

use ascend_sys::bindings::{HcclDataType, HcclReduceOp};
use half::{bf16, f16};

pub(crate) const OPS: [HcclReduceOp; 4] = [
    HcclReduceOp::HCCL_REDUCE_SUM,
    HcclReduceOp::HCCL_REDUCE_PROD,
    HcclReduceOp::HCCL_REDUCE_MAX,
    HcclReduceOp::HCCL_REDUCE_MIN,
];

/// An element type that ranks reduce.
pub(crate) trait Element: Copy + Default + PartialEq + std::fmt::Debug + Send + Sync + 'static {
    const DTYPE: HcclDataType;
    /// Whether the product of Atlas A2 is there.
    const PRODUCT: bool;

    /// A value from random bits.
    fn drawn(bits: u64) -> Self;

    /// The combination of two values, rounded to the type.
    fn combined(self, other: Self, op: HcclReduceOp) -> Self;
}

macro_rules! integers {
    ($($type:ty = $dtype:ident, $product:literal;)*) => {
        $(
            impl Element for $type {
                const DTYPE: HcclDataType = HcclDataType::$dtype;
                const PRODUCT: bool = $product;

                fn drawn(bits: u64) -> Self {
                    bits as $type
                }

                fn combined(self, other: Self, op: HcclReduceOp) -> Self {
                    let (one, two) = (i128::from(self), i128::from(other));
                    // The cast keeps the low bits.
                    match op {
                        HcclReduceOp::HCCL_REDUCE_SUM => (one + two) as $type,
                        HcclReduceOp::HCCL_REDUCE_PROD => (one * two) as $type,
                        HcclReduceOp::HCCL_REDUCE_MAX => one.max(two) as $type,
                        _ => one.min(two) as $type,
                    }
                }
            }
        )*
    };
}

integers! {
    i8 = HCCL_DATA_TYPE_INT8, true;
    i16 = HCCL_DATA_TYPE_INT16, false;
    i32 = HCCL_DATA_TYPE_INT32, true;
    i64 = HCCL_DATA_TYPE_INT64, true;
}

macro_rules! floats {
    ($($type:ty = $dtype:ident, $product:literal, $narrow:expr;)*) => {
        $(
            impl Element for $type {
                const DTYPE: HcclDataType = HcclDataType::$dtype;
                const PRODUCT: bool = $product;

                fn drawn(bits: u64) -> Self {
                    // Numbers of several magnitudes, so that the order of a sum shows; no product of them is infinite.
                    let magnitude = f64::from((bits >> 32) as u8 % 7) - 6.0;
                    $narrow(f64::from(bits as i16) / 32768.0 * magnitude.exp2())
                }

                fn combined(self, other: Self, op: HcclReduceOp) -> Self {
                    let (one, two) = (f64::from(self), f64::from(other));
                    $narrow(match op {
                        HcclReduceOp::HCCL_REDUCE_SUM => one + two,
                        HcclReduceOp::HCCL_REDUCE_PROD => one * two,
                        HcclReduceOp::HCCL_REDUCE_MAX => one.max(two),
                        _ => one.min(two),
                    })
                }
            }
        )*
    };
}

floats! {
    f16 = HCCL_DATA_TYPE_FP16, true, f16::from_f64;
    bf16 = HCCL_DATA_TYPE_BFP16, false, bf16::from_f64;
    f32 = HCCL_DATA_TYPE_FP32, true, |x| x as f32;
}

/// Values of one rank that differ from rank to rank.
pub(crate) fn values<E: Element>(seed: u64, rank: usize, count: usize) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (rank as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::drawn(state)
    };
    (0..count).map(|_| next()).collect()
}

/// The values of all ranks, reduced in the order of the ranks.
pub(crate) fn reduced<E: Element>(all: &[Vec<E>], op: HcclReduceOp) -> Vec<E> {
    let mut ranks = all.iter().cloned();
    let first = ranks.next().unwrap();
    ranks.fold(first, |sum, rank| sum.iter().zip(rank).map(|(one, two)| one.combined(two, op)).collect())
}
