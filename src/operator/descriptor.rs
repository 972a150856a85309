//! Descriptors of tensors, lists and arrays, as CANN takes them. Each is destroyed once, by its owner here.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ascend_spec::{Dims, TensorDesc};
use ascend_sys::bindings::{self as sys, aclIntArray, aclTensor, aclTensorList};
use ascend_sys::{Api, MissingSymbol};
use smallvec::SmallVec;

use crate::error::{Error, Result, aclnn_error, null_error};
use crate::runtime::Context;

type DestroyFunction<T> = unsafe extern "C" fn(*const T) -> sys::aclnnStatus;

/// An object of CANN's that its owner destroys.
pub(crate) trait Object: Sized {
    const DESTROY: &'static str;

    fn destroy(api: &Api) -> Result<DestroyFunction<Self>, MissingSymbol>;
}

macro_rules! objects {
    ($($type:ident: $destroy:ident;)*) => {
        $(
            impl Object for $type {
                const DESTROY: &'static str = stringify!($destroy);

                fn destroy(api: &Api) -> Result<DestroyFunction<Self>, MissingSymbol> {
                    api.$destroy()
                }
            }
        )*
    };
}

objects! {
    aclTensor: aclDestroyTensor;
    aclTensorList: aclDestroyTensorList;
    aclIntArray: aclDestroyIntArray;
}

/// Sole owner of an object.
#[derive(Debug)]
pub(crate) struct Owned<T: Object> {
    raw: NonNull<T>,
    context: Arc<Context>,
}

impl<T: Object> Owned<T> {
    /// Takes over what a creating function returned.
    ///
    /// # Safety
    /// `raw` is null, or an object that has no other owner.
    pub(crate) unsafe fn new(context: &Arc<Context>, function: &'static str, raw: *mut T) -> Result<Self> {
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { raw, context: Arc::clone(context) }),
            None => Err(null_error(context.runtime().api(), function)),
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.raw.as_ptr()
    }
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        let destroy = || -> Result<()> {
            let api = self.context.bind()?;
            // SAFETY: the object is alive, and this is its only owner.
            match unsafe { T::destroy(api)?(self.as_ptr()) } {
                sys::ACLNN_SUCCESS => Ok(()),
                failed => Err(aclnn_error(api, T::DESTROY, failed)),
            }
        };
        if let Err(error) = destroy() {
            tracing::error!("cannot destroy a descriptor: {error}");
        }
    }
}

// SAFETY: the object is data of CANN's that no thread owns; the owner of this value has the only access to it.
unsafe impl<T: Object> Send for Owned<T> {}

/// Makes the descriptor of a tensor at an address.
pub(crate) fn tensor(context: &Arc<Context>, desc: &TensorDesc, at: *mut c_void) -> Result<Owned<aclTensor>> {
    let api = context.runtime().api();
    let (shape, strides) = (&desc.shape, &desc.strides);
    if strides.len() != shape.len() {
        return Err(
            Error::invalid("strides", strides, "one for each axis").fix("give a stride for each axis of the shape")
        );
    }
    let storage = storage(desc);
    // SAFETY: dimensions and strides are arrays of that rank, which the function copies; the address is kept and not
    // read here; the result is new.
    unsafe {
        let raw = api.aclCreateTensor()?(
            shape.as_ptr(),
            shape.len() as u64,
            sys::aclDataType(desc.dtype.acl()),
            strides.as_ptr(),
            desc.offset,
            sys::aclFormat(desc.format.acl()),
            storage.as_ptr(),
            storage.len() as u64,
            at,
        );
        Owned::new(context, "aclCreateTensor", raw)
    }
}

/// The shape of the memory that a tensor is a view of. A strided view has one axis, as in PyTorch: operators that
/// make contiguous copies of such views use the number of elements alone.
fn storage(desc: &TensorDesc) -> Dims {
    let reach = || {
        let bytes = desc.byte_range()?.end;
        let elements = bytes.checked_div(desc.dtype.size()? as u64)?;
        Dims::new(&[i64::try_from(elements).ok()?])
    };
    match desc.is_contiguous() {
        true => desc.shape,
        false => reach().unwrap_or(desc.shape),
    }
}

/// Makes a list, which takes over its members: destroying it destroys them.
pub(crate) fn tensor_list(
    context: &Arc<Context>,
    members: SmallVec<[Owned<aclTensor>; 1]>,
) -> Result<Owned<aclTensorList>> {
    let api = context.runtime().api();
    let raw: SmallVec<[*const aclTensor; 1]> = members.iter().map(|tensor| tensor.as_ptr().cast_const()).collect();
    // SAFETY: the array has `raw.len()` live tensors; the function copies it; the result is new.
    let list = unsafe {
        let list = api.aclCreateTensorList()?(raw.as_ptr(), raw.len() as u64);
        Owned::new(context, "aclCreateTensorList", list)?
    };
    for member in members {
        // The list owns the object now; only this owner's share of the context is dropped.
        let member = std::mem::ManuallyDrop::new(member);
        // SAFETY: `member` is not used again, and the context is read out once.
        drop(unsafe { ptr::read(&member.context) });
    }
    Ok(list)
}

/// Makes an array.
pub(crate) fn int_array(context: &Arc<Context>, values: &[i64]) -> Result<Owned<aclIntArray>> {
    let api = context.runtime().api();
    // SAFETY: the array has `values.len()` values, which the function copies; the result is new.
    unsafe {
        let raw = api.aclCreateIntArray()?(values.as_ptr(), values.len() as u64);
        Owned::new(context, "aclCreateIntArray", raw)
    }
}
