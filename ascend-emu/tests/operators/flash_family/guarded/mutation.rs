//! Calls that differ from others in a tensor or an argument.

use super::calls::{Random, paths::pick};
use ascend_spec::operator::OwnedValue;
use ascend_spec::{DType, Dims, TensorDesc};

const SIZES: [i64; 15] = [0, 1, 2, 3, 5, 8, 16, 17, 64, 128, 2048, -1, 1 << 31, 1 << 40, 1 << 62];
const NUMBERS: [i64; 10] = [0, 1, -1, 2, 3, 7, i32::MAX as i64, i32::MIN as i64, 1 << 62, i64::MIN];
const TYPES: [DType; 10] = [
    DType::Float16,
    DType::Bf16,
    DType::Float,
    DType::Int8,
    DType::UInt8,
    DType::Bool,
    DType::Int32,
    DType::Int64,
    DType::Int4,
    DType::Float8E4M3Fn,
];

/// Whether something happens that does once in so many times.
pub(super) fn one_in(times: usize, random: &mut Random) -> bool {
    random.below(times) == 0
}

/// Another tensor: of other sizes, another type, with axes in another order of memory, repeated, backwards, far apart.
pub(super) fn tensor(desc: &TensorDesc, random: &mut Random) -> TensorDesc {
    let (mut shape, mut strides) = (desc.shape.to_vec(), desc.strides.to_vec());
    let (mut dtype, mut offset) = (desc.dtype, desc.offset);
    let rank = shape.len();
    if rank == 0 {
        return *desc;
    }
    let axis = random.below(rank);
    let packed = |shape: &[i64]| Dims::new(shape).map(|shape| shape.contiguous_strides().to_vec());
    match random.below(12) {
        0..=3 => {
            shape[axis] = pick(random, &SIZES);
            strides = packed(&shape).unwrap_or(strides);
        }
        4 => {
            shape.remove(axis);
            strides = packed(&shape).unwrap_or_default();
        }
        5 if rank < Dims::MAX_RANK => {
            shape.insert(axis, pick(random, &[1, 2, 0]));
            strides = packed(&shape).unwrap_or_default();
        }
        6 => dtype = pick(random, &TYPES),
        7 => strides[axis] = 0,
        8 => {
            offset += strides[axis].saturating_mul((shape[axis] - 1).max(0));
            strides[axis] = -strides[axis];
        }
        9 => {
            let other = random.below(rank);
            strides.swap(axis, other);
        }
        10 => strides.iter_mut().for_each(|stride| *stride = stride.saturating_mul(2)),
        _ => {
            strides[axis] = pick(random, &[1, 3, -1, 1 << 40, i64::MIN]);
            offset = pick(random, &[0, 1, 100, -1, 1 << 62]);
        }
    }
    let both = Dims::new(&shape).zip(Dims::new(&strides));
    let other = both.map(|(shape, strides)| TensorDesc { dtype, shape, strides, offset, ..*desc });
    // Others are refused before they get to an operator.
    let other = other.filter(|other| other.is_countable() && other.byte_range().is_some());
    other.unwrap_or(*desc)
}

/// Another number, text or array.
pub(super) fn value(of: OwnedValue, random: &mut Random) -> OwnedValue {
    const LAYOUTS: [&str; 8] = ["BNSD", "BSND", "BSH", "SBH", "TND", "NTD_TND", "PA_NZ", ""];
    match of {
        OwnedValue::Int(_) => OwnedValue::Int(pick(random, &NUMBERS)),
        OwnedValue::Float(_) => OwnedValue::Float(pick(random, &[0.0, -1.0, 1e300, f64::NAN])),
        OwnedValue::Flag(flag) => OwnedValue::Flag(!flag),
        OwnedValue::Text(_) => OwnedValue::Text(Some(pick(random, &LAYOUTS).to_owned())),
        OwnedValue::Ints(ints) => {
            let mut ints = ints.unwrap_or_default();
            let place = random.below(ints.len().max(1));
            match (random.below(5), ints.get_mut(place)) {
                (0, _) => return OwnedValue::Ints(None),
                (1, Some(_)) => _ = ints.pop(),
                (2, _) => ints.push(pick(random, &[0, 3])),
                (_, Some(int)) => *int = int.saturating_add(pick(random, &NUMBERS)),
                (_, None) => {}
            }
            OwnedValue::Ints(Some(ints))
        }
    }
}
