//! Descriptors of a call: what CANN is told about its tensors, lists and arrays.

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::fia::{FiaCall, Operand, Parameter, Place};
use ascend_sys::bindings::{aclIntArray, aclTensor, aclTensorList};
use smallvec::SmallVec;

use crate::error::{Error, Result, aclnn};
use crate::executor::{Owned, int_array, tensor, tensor_list};
use crate::runtime::Context;

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
            // An empty array goes as such: some checks of the operator ask only whether there is one.
            if let Some(array) = array {
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

pub(super) type Executor = crate::executor::Executor<Descriptors>;

impl Executor {
    /// Gives a tensor another address, for launches from now on. The device must be bound.
    pub(super) fn set_address(&mut self, operand: Operand, at: *mut c_void) -> Result<()> {
        let api = self.context().runtime().api();
        let executor = self.as_ptr();
        let descriptors = self.descriptors();
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
