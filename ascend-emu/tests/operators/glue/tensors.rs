//! Tensors on the device, scalars and lists, and strategies for them.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::{aclDataType, aclFormat, aclTensor};
use half::{bf16, f16};
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;

pub(crate) const TYPES: [aclDataType; 10] = [
    aclDataType::ACL_FLOAT,
    aclDataType::ACL_FLOAT16,
    aclDataType::ACL_BF16,
    aclDataType::ACL_DOUBLE,
    aclDataType::ACL_INT8,
    aclDataType::ACL_UINT8,
    aclDataType::ACL_INT16,
    aclDataType::ACL_INT32,
    aclDataType::ACL_INT64,
    aclDataType::ACL_BOOL,
];

/// Bytes of a number of a type, converted as the operators promise: saturating from real numbers.
pub(crate) fn encode(dtype: aclDataType, value: f64) -> Vec<u8> {
    match dtype {
        aclDataType::ACL_FLOAT => (value as f32).to_le_bytes().to_vec(),
        aclDataType::ACL_FLOAT16 => f16::from_f64(value).to_le_bytes().to_vec(),
        aclDataType::ACL_BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        aclDataType::ACL_DOUBLE => value.to_le_bytes().to_vec(),
        aclDataType::ACL_INT8 => (value as i8).to_le_bytes().to_vec(),
        aclDataType::ACL_UINT8 => (value as u8).to_le_bytes().to_vec(),
        aclDataType::ACL_INT16 => (value as i16).to_le_bytes().to_vec(),
        aclDataType::ACL_INT32 => (value as i32).to_le_bytes().to_vec(),
        aclDataType::ACL_INT64 => (value as i64).to_le_bytes().to_vec(),
        aclDataType::ACL_BOOL => vec![u8::from(value != 0.0)],
        other => unreachable!("{other:?}"),
    }
}

pub(crate) fn decode(dtype: aclDataType, bytes: &[u8]) -> f64 {
    match dtype {
        aclDataType::ACL_FLOAT => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_FLOAT16 => f16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_DOUBLE => f64::from_le_bytes(bytes.try_into().unwrap()),
        aclDataType::ACL_INT8 => (bytes[0] as i8).into(),
        aclDataType::ACL_UINT8 => bytes[0].into(),
        aclDataType::ACL_INT16 => i16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_INT32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_INT64 => i64::from_le_bytes(bytes.try_into().unwrap()) as f64,
        aclDataType::ACL_BOOL => u8::from(bytes[0] != 0).into(),
        other => unreachable!("{other:?}"),
    }
}

pub(crate) fn size(dtype: aclDataType) -> usize {
    encode(dtype, 0.0).len()
}

/// Which elements of a buffer a tensor shows.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: i64,
    /// Elements of the whole buffer.
    pub(crate) room: i64,
}

impl View {
    pub(crate) fn packed(shape: &[i64]) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis].max(1);
        }
        View { shape: shape.to_vec(), strides, offset: 0, room: shape.iter().product::<i64>().max(1) }
    }

    /// Places in the buffer, the last axis fastest.
    pub(crate) fn places(&self) -> Vec<i64> {
        let mut places = vec![self.offset];
        for (&dim, &stride) in self.shape.iter().zip(&self.strides) {
            places = places.iter().flat_map(|place| (0..dim).map(move |i| place + i * stride)).collect();
        }
        places
    }

    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

/// A tensor on the device with its buffer.
pub(crate) struct Tensor {
    pub(crate) dtype: aclDataType,
    pub(crate) view: View,
    pub(crate) at: *mut c_void,
    pub(crate) handle: *mut aclTensor,
}

impl Tensor {
    /// A buffer of `values`, repeated as often as needed.
    pub(crate) fn new(dtype: aclDataType, view: View, values: &[f64]) -> Self {
        let bytes: Vec<u8> = (0..view.room as usize).flat_map(|i| encode(dtype, values[i % values.len()])).collect();
        let at = upload(&bytes);
        Self::over(dtype, view, at)
    }

    /// A buffer in which a view shows `values`, and all other elements are `hidden`.
    pub(crate) fn showing(dtype: aclDataType, view: View, values: &[f64], hidden: f64) -> Self {
        let mut buffer = vec![hidden; view.room as usize];
        for (place, &value) in view.places().into_iter().zip(values) {
            buffer[place as usize] = value;
        }
        Self::new(dtype, view, &buffer)
    }

    /// Another view of memory.
    pub(crate) fn over(dtype: aclDataType, view: View, at: *mut c_void) -> Self {
        let rank = view.shape.len() as u64;
        let handle = unsafe {
            aclCreateTensor(
                view.shape.as_ptr(),
                rank,
                dtype,
                view.strides.as_ptr(),
                view.offset,
                aclFormat::ACL_FORMAT_ND,
                &view.room,
                1,
                at,
            )
        };
        assert!(!handle.is_null(), "{}", message());
        Tensor { dtype, view, at, handle }
    }

    pub(crate) fn packed(dtype: aclDataType, shape: &[i64], values: &[f64]) -> Self {
        Self::new(dtype, View::packed(shape), values)
    }

    pub(crate) fn ints(shape: &[i64], values: &[i64]) -> Self {
        let values: Vec<f64> = values.iter().map(|&value| value as f64).collect();
        Self::packed(aclDataType::ACL_INT64, shape, &values)
    }

    pub(crate) fn floats(shape: &[i64], values: &[f64]) -> Self {
        Self::packed(aclDataType::ACL_FLOAT, shape, values)
    }

    /// The whole buffer.
    pub(crate) fn buffer(&self) -> Vec<f64> {
        sync(null_mut());
        let size = size(self.dtype);
        let bytes: Vec<u8> = download(self.at, self.view.room as usize * size);
        bytes.chunks(size).map(|one| decode(self.dtype, one)).collect()
    }

    /// What the view shows, the last axis fastest.
    pub(crate) fn values(&self) -> Vec<f64> {
        let buffer = self.buffer();
        let places = self.view.places();
        places.iter().map(|&place| buffer[place as usize]).collect()
    }

    /// What the view shows after broadcasting.
    pub(crate) fn broadcast(&self, shape: &[i64]) -> Vec<f64> {
        let skipped = shape.len() - self.view.shape.len();
        let strides = (0..shape.len()).map(|axis| match axis.checked_sub(skipped) {
            Some(own) if self.view.shape[own] == shape[axis] => self.view.strides[own],
            _ => 0,
        });
        let view = View { shape: shape.to_vec(), strides: strides.collect(), ..self.view.clone() };
        let buffer = self.buffer();
        view.places().iter().map(|&place| buffer[place as usize]).collect()
    }

    /// What the handle says about the shape now.
    pub(crate) fn shape_now(&self) -> Vec<i64> {
        let (mut dims, mut rank) = (null_mut(), 0);
        unsafe {
            ok(aclGetViewShape(self.handle, &mut dims, &mut rank));
            let shape = std::slice::from_raw_parts(dims, rank as usize).to_vec();
            libc::free(dims.cast());
            shape
        }
    }

    pub(crate) fn input(&self) -> In {
        In(self.handle)
    }

    pub(crate) fn out(&self) -> Out {
        Out(self.handle)
    }

    pub(crate) fn in_out(&self) -> InOut {
        InOut(self.handle)
    }

    /// Written in place by an operator that lets its elements share memory.
    pub(crate) fn shared(&self) -> InOutShared {
        InOutShared(self.handle)
    }
}

pub(crate) fn scalar<T>(dtype: aclDataType, mut value: T) -> Scalar {
    let scalar = unsafe { aclCreateScalar((&raw mut value).cast(), dtype) };
    assert!(!scalar.is_null(), "{}", message());
    Scalar(scalar)
}

pub(crate) fn real(value: f64) -> Scalar {
    scalar(aclDataType::ACL_DOUBLE, value)
}

pub(crate) fn int(value: i64) -> Scalar {
    scalar(aclDataType::ACL_INT64, value)
}

pub(crate) fn ints(values: &[i64]) -> Ints {
    Ints(unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) })
}

pub(crate) fn tensors(members: &[&Tensor]) -> Ins {
    let handles: Vec<*mut aclTensor> = members.iter().map(|tensor| tensor.handle).collect();
    Ins(list(&handles))
}

/// A view of a given shape: axes in any order of memory, with gaps, at an offset, backwards, and repeated if asked for.
pub(crate) fn view_of(shape: Vec<i64>, repeated: bool) -> impl Strategy<Value = View> {
    let rank = shape.len();
    let axes: Vec<usize> = (0..rank).collect();
    (Just(axes).prop_shuffle(), prop::collection::vec((1..3i64, 0..8u8), rank), 0..5i64).prop_map(
        move |(order, gaps, offset)| {
            let mut strides = vec![0; rank];
            let (mut step, mut offset) = (1, offset);
            for &axis in &order {
                let (gap, kind) = gaps[axis];
                if kind == 0 && repeated {
                    continue;
                }
                strides[axis] = step * gap;
                let reach = strides[axis] * (shape[axis] - 1).max(0);
                if kind == 1 {
                    offset += reach;
                    strides[axis] = -strides[axis];
                }
                step = strides[axis].abs() * shape[axis].max(1);
            }
            let highest: i64 =
                shape.iter().zip(&strides).map(|(&dim, &stride)| ((dim - 1).max(0) * stride).max(0)).sum();
            View { shape: shape.clone(), strides, offset, room: offset + highest + 1 }
        },
    )
}

pub(crate) fn shape() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(prop_oneof![9 => 1..5i64, 1 => Just(0)], 0..5)
}

/// A shape that broadcasts to another: axes of size 1, axes left out in front.
pub(crate) fn narrower(shape: Vec<i64>) -> impl Strategy<Value = Vec<i64>> {
    let rank = shape.len();
    (0..=rank, prop::collection::vec(any::<bool>(), rank))
        .prop_map(move |(first, ones)| (first..rank).map(|axis| if ones[axis] { 1 } else { shape[axis] }).collect())
}

pub(crate) fn dtype() -> impl Strategy<Value = aclDataType> {
    prop::sample::select(TYPES.to_vec())
}

/// Small integers, which every type but BOOL holds.
pub(crate) fn small() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec((0..7i32).prop_map(f64::from), 1..40)
}
