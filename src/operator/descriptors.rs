//! What one executor is made of.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use ascend_sys::bindings::{aclIntArray, aclTensor, aclTensorList};
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};
use crate::runtime::Context;

use super::descriptor::{Owned, int_array, tensor, tensor_list};
use super::{Addressed, Argument};

/// The tensors of a list.
type Members = SmallVec<[Owned<aclTensor>; 1]>;

/// The descriptors of one call: its tensors and lists, and the arrays and texts that phase one adds. They live as long as
/// the executor.
#[derive(Debug)]
pub(crate) struct Descriptors<A> {
    context: Arc<Context>,
    tensors: Vec<(A, Owned<aclTensor>)>,
    /// By the number of the input that each is.
    lists: Vec<(usize, Owned<aclTensorList>)>,
    arrays: Vec<Owned<aclIntArray>>,
    texts: Vec<CString>,
}

impl<A: Argument> Descriptors<A> {
    /// Describes these tensors, those of a list in its order. The device must be bound.
    pub(super) fn new(context: &Arc<Context>, given: &[Addressed<A>]) -> Result<Self> {
        let mut tensors = Vec::with_capacity(given.len());
        let mut lists: Vec<(usize, Members)> = Vec::new();
        for Addressed {
            argument,
            desc,
            address,
        } in given
        {
            let tensor = tensor(context, desc, *address)?;
            match (argument.element(), argument.input()) {
                (Some(_), Some(input)) => {
                    match lists.iter_mut().find(|(known, _)| *known == input) {
                        Some((_, members)) => members.push(tensor),
                        None => lists.push((input, smallvec![tensor])),
                    }
                }
                _ => tensors.push((*argument, tensor)),
            }
        }
        let lists = lists
            .into_iter()
            .map(|(input, members)| Ok((input, tensor_list(context, members)?)));
        Ok(Self {
            context: Arc::clone(context),
            tensors,
            lists: lists.collect::<Result<_>>()?,
            arrays: Vec::new(),
            texts: Vec::new(),
        })
    }

    /// A tensor that is not in a list; null if the call has none.
    pub(crate) fn tensor(&self, argument: A) -> *mut aclTensor {
        let given = self.tensors.iter().find(|(known, _)| *known == argument);
        given.map_or(ptr::null_mut(), |(_, tensor)| tensor.as_ptr())
    }

    /// The list that a tensor is in; null if the call has none.
    pub(crate) fn list(&self, argument: A) -> *mut aclTensorList {
        let mut lists = self.lists.iter();
        let given = lists.find(|(known, _)| Some(*known) == argument.input());
        given.map_or(ptr::null_mut(), |(_, list)| list.as_ptr())
    }

    /// Adds an array; null if there is none. An empty one goes as such: some checks of operators ask only whether there is
    /// one.
    pub(crate) fn ints(&mut self, values: Option<&[i64]>) -> Result<*const aclIntArray> {
        let Some(values) = values else {
            return Ok(ptr::null());
        };
        let array = int_array(&self.context, values)?;
        let raw = array.as_ptr().cast_const();
        self.arrays.push(array);
        Ok(raw)
    }

    /// Adds a text; null if there is none. CANN takes it by a pointer to non-const and does not change it.
    pub(crate) fn text(&mut self, name: &'static str, text: Option<&str>) -> Result<*mut c_char> {
        let Some(text) = text else {
            return Ok(ptr::null_mut());
        };
        let text = CString::new(text).map_err(|_| Error::invalid(name, text, "no NUL"))?;
        // The bytes stay where they are when the owner moves.
        let raw = text.as_ptr().cast_mut();
        self.texts.push(text);
        Ok(raw)
    }
}
