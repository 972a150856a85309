//! Descriptors.

use crate::c_pointer::{hand_out, not_null_or};
use crate::descriptor::{
    BOOL_ARRAYS, DescribedTensor, FLOAT_ARRAYS, INT_ARRAYS, List, MOST_ELEMENTS, SCALAR_LISTS, SCALARS, Scalar,
    TENSOR_LISTS, TENSORS, Tensor,
};
use crate::handle::Table;
use crate::status::{ACLNN_INVALID, ACLNN_NULLPTR, Outcome, aclnn, failure, value};
use ascend_sys::bindings::{
    aclBoolArray, aclDataType, aclFloatArray, aclFormat, aclIntArray, aclScalar, aclScalarList, aclTensor,
    aclTensorList, aclnnStatus,
};
use std::ffi::c_void;
use std::ptr;

/// Copies the elements of a C array.
///
/// # Safety
///
/// `from` is null or valid for reading `count` elements.
unsafe fn copy<T: Copy>(name: &str, from: *const T, count: u64) -> Outcome<Vec<T>> {
    let count = usize::try_from(count)
        .ok()
        .filter(|&count| count as u64 <= MOST_ELEMENTS)
        .ok_or_else(|| failure!(ACLNN_INVALID, "{name}: given {count} elements, allowed: at most {MOST_ELEMENTS}"))?;
    if count == 0 {
        return Ok(Vec::new());
    }
    not_null_or(ACLNN_NULLPTR, name, from)?;
    // SAFETY: not null, so valid for reading `count` elements; read unaligned, because C need not align them.
    Ok((0..count).map(|i| unsafe { from.add(i).read_unaligned() }).collect())
}

/// Writes a result of an `aclnn` function.
///
/// # Safety
///
/// `to` is null or valid for writing one value.
unsafe fn store<T>(name: &str, to: *mut T, value: T) -> Outcome {
    not_null_or(ACLNN_NULLPTR, name, to)?;
    // SAFETY: not null, so valid for writing one value.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// The arguments of `aclCreateTensor`.
struct Arguments {
    view: *const i64,
    view_rank: u64,
    dtype: aclDataType,
    strides: *const i64,
    offset: i64,
    format: aclFormat,
    storage: *const i64,
    storage_rank: u64,
    data: *mut c_void,
}

impl Arguments {
    /// # Safety
    ///
    /// The arrays are null or have the number of elements that their ranks give; the strides have the view's rank.
    unsafe fn read(&self) -> Outcome<DescribedTensor> {
        // SAFETY: the caller's promise.
        let (view, storage) = unsafe {
            (copy("viewDims", self.view, self.view_rank)?, copy("storageDims", self.storage, self.storage_rank)?)
        };
        let strides = if self.strides.is_null() {
            None
        } else {
            // SAFETY: the caller's promise.
            Some(unsafe { copy("stride", self.strides, self.view_rank) }?)
        };
        DescribedTensor::new(
            &view,
            self.dtype.0,
            strides.as_deref(),
            self.offset,
            self.format.0,
            &storage,
            self.data.addr(),
        )
    }
}

pub unsafe extern "C" fn aclCreateTensor(
    viewDims: *const i64,
    viewDimsNum: u64,
    dataType: aclDataType,
    stride: *const i64,
    offset: i64,
    format: aclFormat,
    storageDims: *const i64,
    storageDimsNum: u64,
    tensorData: *mut c_void,
) -> *mut aclTensor {
    let arguments = Arguments {
        view: viewDims,
        view_rank: viewDimsNum,
        dtype: dataType,
        strides: stride,
        offset,
        format,
        storage: storageDims,
        storage_rank: storageDimsNum,
        data: tensorData,
    };
    value(ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let described = unsafe { arguments.read() }?;
        Ok(Tensor::create(described).raw())
    })
}

pub unsafe extern "C" fn aclInitTensor(
    tensor: *mut aclTensor,
    viewDims: *const i64,
    viewDimsNum: u64,
    dataType: aclDataType,
    stride: *const i64,
    offset: i64,
    format: aclFormat,
    storageDims: *const i64,
    storageDimsNum: u64,
    tensorDataAddr: *mut c_void,
) -> aclnnStatus {
    let arguments = Arguments {
        view: viewDims,
        view_rank: viewDimsNum,
        dtype: dataType,
        strides: stride,
        offset,
        format,
        storage: storageDims,
        storage_rank: storageDimsNum,
        data: tensorDataAddr,
    };
    aclnn(|| {
        let tensor = TENSORS.get(tensor)?;
        // SAFETY: the caller's promise.
        tensor.set(unsafe { arguments.read() }?);
        Ok(())
    })
}

pub unsafe extern "C" fn aclCreateScalar(value: *mut c_void, dataType: aclDataType) -> *mut aclScalar {
    self::value(ptr::null_mut(), || {
        let (dtype, size) = Scalar::kind(dataType.0).ok_or_else(|| {
            failure!(ACLNN_INVALID, "aclCreateScalar: dataType: {} is not the type of a scalar", dataType.0)
        })?;
        // SAFETY: the caller's promise: null, or one value of the type.
        let bytes = unsafe { copy("value", value.cast::<u8>().cast_const(), size as u64) }?;
        Ok(SCALARS.insert(Scalar::new(dtype, &bytes)).raw())
    })
}

/// Creates an `aclIntArray`, `aclFloatArray` or `aclBoolArray`.
///
/// # Safety
///
/// `from` is null or valid for reading `count` elements.
unsafe fn create_array<T: Copy, H>(table: &Table<Box<[T]>>, from: *const T, count: u64) -> *mut H {
    value(ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let values = unsafe { copy("value", from, count) }?;
        Ok(table.insert(values.into_boxed_slice()).raw())
    })
}

pub unsafe extern "C" fn aclCreateIntArray(value: *const i64, size: u64) -> *mut aclIntArray {
    // SAFETY: the caller's promise.
    unsafe { create_array(&INT_ARRAYS, value, size) }
}

pub unsafe extern "C" fn aclCreateFloatArray(value: *const f32, size: u64) -> *mut aclFloatArray {
    // SAFETY: the caller's promise.
    unsafe { create_array(&FLOAT_ARRAYS, value, size) }
}

pub unsafe extern "C" fn aclCreateBoolArray(value: *const bool, size: u64) -> *mut aclBoolArray {
    // Read as bytes: C lets a bool hold more than 0 and 1.
    self::value(ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let bytes = unsafe { copy("value", value.cast::<u8>(), size) }?;
        let values: Box<[bool]> = bytes.into_iter().map(|byte| byte != 0).collect();
        Ok(BOOL_ARRAYS.insert(values).raw())
    })
}

/// Creates an `aclTensorList` or `aclScalarList`.
///
/// # Safety
///
/// `from` is null or valid for reading `count` handles.
unsafe fn create_list<T, M, H>(
    lists: &Table<List<T>>,
    members: &Table<T>,
    from: *const *const M,
    count: u64,
) -> *mut H {
    value(ptr::null_mut(), || {
        // SAFETY: the caller's promise; handles are pointers, whatever type they point to.
        let handles = unsafe { copy("value", from.cast::<*const c_void>(), count) }?;
        Ok(lists.insert(List::new(members, &handles)?).raw())
    })
}

pub unsafe extern "C" fn aclCreateTensorList(value: *const *const aclTensor, size: u64) -> *mut aclTensorList {
    // SAFETY: the caller's promise.
    unsafe { create_list(&TENSOR_LISTS, &TENSORS, value, size) }
}

pub unsafe extern "C" fn aclCreateScalarList(value: *const *const aclScalar, size: u64) -> *mut aclScalarList {
    // SAFETY: the caller's promise.
    unsafe { create_list(&SCALAR_LISTS, &SCALARS, value, size) }
}

fn destroy<T, H>(table: &Table<T>, raw: *const H) -> aclnnStatus {
    aclnn(|| table.remove(raw).map(drop))
}

pub unsafe extern "C" fn aclDestroyTensor(tensor: *const aclTensor) -> aclnnStatus {
    destroy(&TENSORS, tensor)
}

pub unsafe extern "C" fn aclDestroyScalar(scalar: *const aclScalar) -> aclnnStatus {
    destroy(&SCALARS, scalar)
}

pub unsafe extern "C" fn aclDestroyIntArray(array: *const aclIntArray) -> aclnnStatus {
    destroy(&INT_ARRAYS, array)
}

pub unsafe extern "C" fn aclDestroyFloatArray(array: *const aclFloatArray) -> aclnnStatus {
    destroy(&FLOAT_ARRAYS, array)
}

pub unsafe extern "C" fn aclDestroyBoolArray(array: *const aclBoolArray) -> aclnnStatus {
    destroy(&BOOL_ARRAYS, array)
}

pub unsafe extern "C" fn aclDestroyTensorList(array: *const aclTensorList) -> aclnnStatus {
    aclnn(|| TENSOR_LISTS.remove(array)?.destroy_members(&TENSORS))
}

pub unsafe extern "C" fn aclDestroyScalarList(array: *const aclScalarList) -> aclnnStatus {
    aclnn(|| SCALAR_LISTS.remove(array)?.destroy_members(&SCALARS))
}

/// Defines functions that hand out numbers of a tensor.
macro_rules! numbers {
    ($($name:ident($to:ident, $count:ident) = $($member:ident).+;)*) => {$(
        pub unsafe extern "C" fn $name(
            tensor: *const aclTensor,
            $to: *mut *mut i64,
            $count: *mut u64,
        ) -> aclnnStatus {
            aclnn(|| {
                let described = TENSORS.get(tensor)?.get();
                // SAFETY: the caller's promise.
                unsafe {
                    hand_out(&described.$($member).+, (stringify!($to), $to), (stringify!($count), $count))
                }
            })
        }
    )*};
}

numbers! {
    aclGetViewShape(viewDims, viewDimsNum) = desc.shape;
    aclGetStorageShape(storageDims, storageDimsNum) = storage;
    aclGetViewStrides(stridesValue, stridesNum) = desc.strides;
}

/// Defines functions that write a property of a tensor.
macro_rules! properties {
    ($($name:ident($to:ident: $type:ty) = |$described:ident| $value:expr;)*) => {$(
        pub unsafe extern "C" fn $name(tensor: *const aclTensor, $to: *mut $type) -> aclnnStatus {
            aclnn(|| {
                let $described = TENSORS.get(tensor)?.get();
                // SAFETY: the caller's promise.
                unsafe { store(stringify!($to), $to, $value) }
            })
        }
    )*};
}

properties! {
    aclGetViewOffset(offset: i64) = |tensor| tensor.desc.offset;
    aclGetFormat(format: aclFormat) = |tensor| aclFormat(tensor.desc.format.acl());
    aclGetDataType(dataType: aclDataType) = |tensor| aclDataType(tensor.desc.dtype.acl());
    aclGetRawTensorAddr(addr: *mut c_void) = |tensor| ptr::with_exposed_provenance_mut(tensor.address);
}

/// # Safety
///
/// `size` is null or valid for writing.
unsafe fn count<T, H>(table: &Table<T>, raw: *const H, size: *mut u64, len: impl FnOnce(&T) -> usize) -> aclnnStatus {
    aclnn(|| {
        let len = len(&*table.get(raw)?);
        // SAFETY: the caller's promise.
        unsafe { store("size", size, len as u64) }
    })
}

/// Defines functions that write a length.
macro_rules! lengths {
    ($($name:ident($handle:ident: $type:ty) = $table:ident, $len:expr;)*) => {$(
        pub unsafe extern "C" fn $name($handle: *const $type, size: *mut u64) -> aclnnStatus {
            // SAFETY: the caller's promise.
            unsafe { count(&$table, $handle, size, $len) }
        }
    )*};
}

lengths! {
    aclGetIntArraySize(array: aclIntArray) = INT_ARRAYS, |array| array.len();
    aclGetFloatArraySize(array: aclFloatArray) = FLOAT_ARRAYS, |array| array.len();
    aclGetBoolArraySize(array: aclBoolArray) = BOOL_ARRAYS, |array| array.len();
    aclGetTensorListSize(tensorList: aclTensorList) = TENSOR_LISTS, List::len;
    aclGetScalarListSize(scalarList: aclScalarList) = SCALAR_LISTS, List::len;
}

pub unsafe extern "C" fn aclSetRawTensorAddr(tensor: *mut aclTensor, addr: *mut c_void) -> aclnnStatus {
    aclnn(|| {
        TENSORS.get(tensor)?.set_address(addr.addr());
        Ok(())
    })
}
