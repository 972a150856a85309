//! Parts of a tensor along one axis.

use std::ops::Range;

use ascend_attention::case::CaseTensor;

/// A tensor of these parts along one axis, one after the other.
pub(super) fn take(tensor: &CaseTensor, axis: usize, parts: &[Range<usize>]) -> Result<CaseTensor, String> {
    let shape = tensor.shape();
    let beyond = || {
        let (dtype, parts) = (tensor.dtype(), parts.first());
        format!("a tensor of {dtype} and shape {shape:?} has no axis {axis} with {parts:?}")
    };
    let &size = shape.get(axis).ok_or_else(beyond)?;
    if parts.iter().any(|part| part.start > part.end || part.end > size) {
        return Err(beyond());
    }
    let outer: usize = shape[..axis].iter().product();
    let inner: usize = shape[axis + 1..].iter().product();
    let bits = inner * tensor.dtype().bits() as usize;
    if !bits.is_multiple_of(8) {
        return Err(format!("{} rows of {inner} share bytes along axis {axis}", tensor.dtype()));
    }
    let bytes = bits / 8;
    let count: usize = parts.iter().map(Range::len).sum();
    let mut taken = Vec::with_capacity(outer * count * bytes);
    for entry in 0..outer {
        let row = |at: usize| (entry * size + at) * bytes;
        for part in parts {
            taken.extend_from_slice(&tensor.bytes()[row(part.start)..row(part.end)]);
        }
    }
    let mut shape = shape.to_vec();
    shape[axis] = count;
    CaseTensor::new(tensor.dtype(), &shape, taken).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_attention::DType;
    use std::slice;

    #[test]
    fn parts_of_every_axis_are_taken_in_order() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let tensor = CaseTensor::from_f32(DType::Float16, &[2, 3, 2], &values).unwrap();
        let selected = |axis, parts: &[Range<usize>]| {
            let taken = take(&tensor, axis, parts).unwrap();
            (taken.shape().to_vec(), taken.to_f32().unwrap())
        };
        let (shape, numbers) = selected(0, &[1..2, 0..1]);
        assert_eq!(shape, [2, 3, 2]);
        assert_eq!(numbers[..6], [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
        assert_eq!(selected(1, slice::from_ref(&(2..3))), (vec![2, 1, 2], vec![4.0, 5.0, 10.0, 11.0]));
        assert_eq!(selected(2, &[1..2, 1..2]).1[..4], [1.0, 1.0, 3.0, 3.0]);
        assert!(take(&tensor, 3, &[]).is_err());
        assert!(take(&tensor, 1, slice::from_ref(&(1..4))).is_err());
    }

    #[test]
    fn rows_that_share_a_byte_are_not_cut() {
        let tensor = CaseTensor::new(DType::Int4, &[2, 3], vec![0; 3]).unwrap();
        assert!(take(&tensor, 0, slice::from_ref(&(0..1))).is_err());
        let tensor = CaseTensor::new(DType::Int4, &[2, 4], vec![1, 2, 3, 4]).unwrap();
        assert_eq!(take(&tensor, 0, slice::from_ref(&(1..2))).unwrap().bytes(), [3, 4]);
    }
}
