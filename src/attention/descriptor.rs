//! Descriptors: what CANN is told about tensors, lists and arrays. Each is destroyed once, by its owner here.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::fia::{FiaCall, Operand, Parameter, Place};
use ascend_sys::bindings::{self as sys, aclIntArray, aclOpExecutor, aclTensor, aclTensorList};
use ascend_sys::{Api, MissingSymbol};
use smallvec::SmallVec;

use crate::error::{Error, Result, aclnn, aclnn_error, null_error};
use crate::runtime::Context;

type DestroyFunction<T> = unsafe extern "C" fn(*const T) -> sys::aclnnStatus;

/// An object of CANN's that its owner destroys.
pub(super) trait Object: Sized {
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
struct Owned<T: Object> {
    raw: NonNull<T>,
    context: Arc<Context>,
}

impl<T: Object> Owned<T> {
    /// Takes over what a creating function returned.
    ///
    /// # Safety
    /// `raw` is null, or an object that belongs to nobody else.
    unsafe fn new(context: &Arc<Context>, function: &'static str, raw: *mut T) -> Result<Self> {
        match NonNull::new(raw) {
            Some(raw) => Ok(Self {
                raw,
                context: Arc::clone(context),
            }),
            None => Err(null_error(context.runtime().api(), function)),
        }
    }

    fn as_ptr(&self) -> *mut T {
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

/// A tensor of a call, and its address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) operand: Operand,
    pub(super) desc: TensorDesc,
    pub(super) address: *mut c_void,
}

/// The descriptors of one call.
pub(super) struct Descriptors {
    tensors: Vec<(Parameter, Owned<aclTensor>)>,
    key: Owned<aclTensorList>,
    value: Owned<aclTensorList>,
    arrays: [Option<Owned<aclIntArray>>; 5],
    input_layout: CString,
}

// SAFETY: the objects are data of CANN's that no thread owns; whoever has this has the only access to them.
unsafe impl Send for Descriptors {}

impl Descriptors {
    /// Describes a call with these tensors, those of a list in its order. The device must be bound.
    pub(super) fn new(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        placed: &[Placed],
    ) -> Result<Self> {
        let mut tensors = Vec::with_capacity(placed.len());
        let mut key = SmallVec::new();
        let mut value = SmallVec::new();
        for Placed {
            operand,
            desc,
            address,
        } in placed
        {
            let tensor = tensor(context, desc, *address)?;
            match operand.parameter() {
                Some(parameter) => tensors.push((parameter, tensor)),
                None if matches!(operand, Operand::Key(_)) => key.push(tensor),
                None => value.push(tensor),
            }
        }
        let given = [
            call.actual_seq_lengths,
            call.actual_seq_lengths_kv,
            call.actual_shared_prefix_len,
            call.q_start_idx,
            call.kv_start_idx,
        ];
        let mut arrays = [const { None }; 5];
        for (place, array) in arrays.iter_mut().zip(given) {
            // To the operator an empty array is none.
            if let Some(array) = array.filter(|array| !array.is_empty()) {
                *place = Some(int_array(context, array)?);
            }
        }
        Ok(Self {
            tensors,
            key: tensor_list(context, key)?,
            value: tensor_list(context, value)?,
            arrays,
            input_layout: CString::new(call.input_layout)
                .map_err(|_| Error::invalid("input_layout", call.input_layout, "no NUL"))?,
        })
    }

    /// A tensor; null if the call has none.
    pub(super) fn tensor(&self, parameter: Parameter) -> *mut aclTensor {
        let given = self.tensors.iter().find(|(known, _)| *known == parameter);
        given.map_or(ptr::null_mut(), |(_, tensor)| tensor.as_ptr())
    }

    pub(super) fn key(&self) -> *mut aclTensorList {
        self.key.as_ptr()
    }

    pub(super) fn value(&self) -> *mut aclTensorList {
        self.value.as_ptr()
    }

    /// The length arrays, in the order of the operator's arguments; null for those that the call does not have.
    pub(super) fn arrays(&self) -> [*const aclIntArray; 5] {
        self.arrays.each_ref().map(|array| {
            array
                .as_ref()
                .map_or(ptr::null(), |array| array.as_ptr().cast_const())
        })
    }

    /// CANN takes the text by a pointer to non-const and does not change it.
    pub(super) fn input_layout(&self) -> *mut c_char {
        self.input_layout.as_ptr().cast_mut()
    }
}

fn tensor(context: &Arc<Context>, desc: &TensorDesc, at: *mut c_void) -> Result<Owned<aclTensor>> {
    let api = context.runtime().api();
    let (shape, strides) = (&desc.shape, &desc.strides);
    if strides.len() != shape.len() {
        return Err(Error::invalid("strides", strides, "one for each axis"));
    }
    // SAFETY: dimensions and strides are arrays of that rank, which the function copies; the address is kept and not read
    // here; the result is new.
    unsafe {
        let raw = api.aclCreateTensor()?(
            shape.as_ptr(),
            shape.len() as u64,
            sys::aclDataType(desc.dtype.acl()),
            strides.as_ptr(),
            desc.offset,
            sys::aclFormat(desc.format.acl()),
            shape.as_ptr(),
            shape.len() as u64,
            at,
        );
        Owned::new(context, "aclCreateTensor", raw)
    }
}

/// A list, which takes over its members: destroying it destroys them.
fn tensor_list(
    context: &Arc<Context>,
    members: SmallVec<[Owned<aclTensor>; 1]>,
) -> Result<Owned<aclTensorList>> {
    let api = context.runtime().api();
    let raw: SmallVec<[*const aclTensor; 1]> = members
        .iter()
        .map(|tensor| tensor.as_ptr().cast_const())
        .collect();
    // SAFETY: the array has that many live tensors; the function copies it; the result is new.
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

fn int_array(context: &Arc<Context>, values: &[i64]) -> Result<Owned<aclIntArray>> {
    let api = context.runtime().api();
    // SAFETY: the array has that many values, which the function copies; the result is new.
    unsafe {
        let raw = api.aclCreateIntArray()?(values.as_ptr(), values.len() as u64);
        Owned::new(context, "aclCreateIntArray", raw)
    }
}

/// A prepared call that can be launched again and again with other addresses.
pub(super) struct Executor {
    raw: NonNull<aclOpExecutor>,
    context: Arc<Context>,
    /// After `raw`, which refers to them, is destroyed.
    descriptors: Descriptors,
}

// SAFETY: the executor is data of CANN's that no thread owns; whoever has this has the only access to it.
unsafe impl Send for Executor {}

impl Executor {
    /// Takes over what phase one returned, and makes it repeatable. The device must be bound.
    ///
    /// # Safety
    /// `raw` is null, or a new executor made of these descriptors.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        function: &'static str,
        raw: *mut aclOpExecutor,
        descriptors: Descriptors,
    ) -> Result<Self> {
        let api = context.runtime().api();
        let raw = NonNull::new(raw).ok_or_else(|| null_error(api, function))?;
        let executor = Self {
            raw,
            context: Arc::clone(context),
            descriptors,
        };
        // SAFETY: the executor is new: phase two has not run.
        unsafe { aclnn!(api, aclSetAclOpExecutorRepeatable(executor.as_ptr())) }?;
        Ok(executor)
    }

    pub(super) fn as_ptr(&self) -> *mut aclOpExecutor {
        self.raw.as_ptr()
    }

    /// Gives a tensor another address, for launches from now on. The device must be bound.
    pub(super) fn set_address(&mut self, operand: Operand, at: *mut c_void) -> Result<()> {
        let api = self.context.runtime().api();
        let executor = self.as_ptr();
        let descriptors = &self.descriptors;
        let tensor =
            |of: Option<Parameter>| of.map_or(ptr::null_mut(), |of| descriptors.tensor(of));
        // SAFETY: the executor is repeatable and alive, the descriptor is the one that it was made of, and the caller has
        // checked that the memory is laid out as planned.
        unsafe {
            match (operand, operand.place()) {
                (Operand::Key(element), Place::Input(input, _)) => {
                    let list = descriptors.key();
                    aclnn!(
                        api,
                        aclSetDynamicInputTensorAddr(executor, input, element, list, at)
                    )
                }
                (Operand::Value(element), Place::Input(input, _)) => {
                    let list = descriptors.value();
                    aclnn!(
                        api,
                        aclSetDynamicInputTensorAddr(executor, input, element, list, at)
                    )
                }
                (one, Place::Input(input, _)) => {
                    let tensor = tensor(one.parameter());
                    aclnn!(api, aclSetInputTensorAddr(executor, input, tensor, at))
                }
                (one, Place::Output(output)) => {
                    let tensor = tensor(one.parameter());
                    aclnn!(api, aclSetOutputTensorAddr(executor, output, tensor, at))
                }
            }
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let destroy = || -> Result<()> {
            let api = self.context.bind()?;
            // SAFETY: a repeatable executor lives until it is destroyed, once, here; launches in flight keep what they
            // need of it.
            unsafe { aclnn!(api, aclDestroyAclOpExecutor(self.as_ptr())) }
        };
        if let Err(error) = destroy() {
            tracing::error!("cannot destroy an executor: {error}");
        }
    }
}
