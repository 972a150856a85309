//! Descriptors: tensors, lists, arrays and scalars as `aclnn` calls take them. They describe; they own no memory.

use crate::handle::{Id, Kind, Table};
use crate::lock::Lock;
use crate::status::{ACLNN_INVALID, ACLNN_NULLPTR, Outcome, failure};
use ascend_spec::{DType, Dims, Format, TensorDesc};
use std::ffi::c_void;
use std::sync::Arc;

/// Largest number of elements of an array or list.
pub(crate) const MOST_ELEMENTS: u64 = 1 << 24;

pub(crate) static TENSORS: Table<Tensor> = Table::new(Kind::Tensor);
pub(crate) static TENSOR_LISTS: Table<List<Tensor>> = Table::new(Kind::TensorList);
pub(crate) static SCALARS: Table<Scalar> = Table::new(Kind::Scalar);
pub(crate) static SCALAR_LISTS: Table<List<Scalar>> = Table::new(Kind::ScalarList);
pub(crate) static INT_ARRAYS: Table<Box<[i64]>> = Table::new(Kind::IntArray);
pub(crate) static FLOAT_ARRAYS: Table<Box<[f32]>> = Table::new(Kind::FloatArray);
pub(crate) static BOOL_ARRAYS: Table<Box<[bool]>> = Table::new(Kind::BoolArray);

/// The contents of a tensor descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescribedTensor {
    pub desc: TensorDesc,
    /// Shape of the memory that the view is a part of.
    pub storage: Dims,
    pub address: usize,
}

impl DescribedTensor {
    /// Checks the arguments of `aclCreateTensor`; strides default to contiguous ones.
    pub(crate) fn new(
        view: &[i64],
        dtype: i32,
        strides: Option<&[i64]>,
        offset: i64,
        format: i32,
        storage: &[i64],
        address: usize,
    ) -> Outcome<Self> {
        let dims = |name: &str, values: &[i64]| {
            let dims = Dims::new(values).ok_or_else(|| {
                failure!(
                    ACLNN_INVALID,
                    "aclCreateTensor: {name}: given {} dimensions, allowed: at most {}",
                    values.len(),
                    Dims::MAX_RANK
                )
            })?;
            if dims.elements().is_none() {
                return Err(failure!(
                    ACLNN_INVALID,
                    "aclCreateTensor: {name}: {dims} is no shape: a dimension is negative or the product overflows"
                ));
            }
            Ok(dims)
        };
        let shape = dims("viewDims", view)?;
        let storage = dims("storageDims", storage)?;
        let strides = match strides.map(Dims::new) {
            None => shape.contiguous_strides(),
            Some(Some(strides)) => strides,
            Some(None) => {
                return Err(failure!(ACLNN_INVALID, "aclCreateTensor: too many strides"));
            }
        };
        let desc = TensorDesc {
            dtype: DType::from_acl(dtype).ok_or_else(|| {
                failure!(ACLNN_INVALID, "aclCreateTensor: dataType: {dtype} is no aclDataType of a tensor")
            })?,
            format: Format::from_acl(format)
                .ok_or_else(|| failure!(ACLNN_INVALID, "aclCreateTensor: format: {format} is no aclFormat"))?,
            shape,
            strides,
            offset,
        };
        if desc.byte_range().is_none() {
            return Err(failure!(
                ACLNN_INVALID,
                "aclCreateTensor: the view {shape} with strides {strides} and offset {offset} reaches below its base \
                 address or beyond all memory"
            ));
        }
        Ok(DescribedTensor { desc, storage, address })
    }
}

/// A tensor.
#[derive(Debug)]
pub(crate) struct Tensor(Lock<DescribedTensor>);

impl Tensor {
    pub(crate) fn create(described: DescribedTensor) -> Id {
        TENSORS.insert(Tensor(Lock::new(described)))
    }

    pub(crate) fn get(&self) -> DescribedTensor {
        *self.0.lock()
    }

    pub(crate) fn set(&self, described: DescribedTensor) {
        *self.0.lock() = described;
    }

    pub(crate) fn set_address(&self, address: usize) {
        self.0.lock().address = address;
    }
}

/// One number of any type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar {
    dtype: DType,
    /// Its bytes, of which the first ones hold the value.
    bytes: [u8; 16],
}

impl Scalar {
    /// The type of a scalar and its size, if there are scalars of it.
    pub(crate) fn kind(dtype: i32) -> Option<(DType, usize)> {
        let dtype = DType::from_acl(dtype)?;
        let size = dtype.size().filter(|&size| size <= 16)?;
        Some((dtype, size))
    }

    pub(crate) fn new(dtype: DType, value: &[u8]) -> Self {
        let mut bytes = [0; 16];
        for (byte, &from) in bytes.iter_mut().zip(value) {
            *byte = from;
        }
        Scalar { dtype, bytes }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn bytes(&self) -> &[u8; 16] {
        &self.bytes
    }
}

/// A list of descriptors, which are destroyed with it.
#[derive(Debug)]
pub(crate) struct List<T> {
    members: Box<[(Id, Arc<T>)]>,
}

impl<T> List<T> {
    /// Makes a list of the objects behind handles.
    pub(crate) fn new(table: &Table<T>, handles: &[*const c_void]) -> Outcome<Self> {
        let members = handles.iter().map(|&raw| Ok((Id::of_raw(raw), table.get(raw)?))).collect::<Outcome<_>>()?;
        Ok(List { members })
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// The members; fails if one was destroyed on its own.
    pub(crate) fn members<'a>(&'a self, table: &'a Table<T>) -> impl Iterator<Item = Outcome<Arc<T>>> + 'a {
        self.members.iter().map(|(id, _)| table.get(id.raw::<c_void>()))
    }

    /// Ends the handles of the members; fails if one was destroyed before.
    pub(crate) fn destroy_members(&self, table: &Table<T>) -> Outcome {
        let mut outcome = Ok(());
        for (id, _) in &self.members {
            let one = table.remove_id(*id).map(drop);
            outcome = outcome.and(one);
        }
        outcome
    }
}

/// The tensor behind a handle, `None` for null.
pub(crate) fn optional_tensor<T>(raw: *const T) -> Outcome<Option<DescribedTensor>> {
    if raw.is_null() {
        return Ok(None);
    }
    Ok(Some(TENSORS.get(raw)?.get()))
}

/// The tensors in the list behind a handle, `None` for null.
pub(crate) fn optional_list<T>(name: &str, raw: *const T) -> Outcome<Option<Vec<DescribedTensor>>> {
    if raw.is_null() {
        return Ok(None);
    }
    let list = TENSOR_LISTS.get(raw)?;
    let members = list
        .members(&TENSORS)
        .map(|member| member.map(|tensor| tensor.get()))
        .collect::<Outcome<_>>()
        .map_err(|inner| failure!(ACLNN_NULLPTR, "{name}: {}", inner.message))?;
    Ok(Some(members))
}

/// The numbers in the array behind a handle, `None` for null.
pub(crate) fn optional_ints<T>(raw: *const T) -> Outcome<Option<Vec<i64>>> {
    if raw.is_null() {
        return Ok(None);
    }
    Ok(Some(INT_ARRAYS.get(raw)?.to_vec()))
}
