//! What one executor is made of.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use ascend_spec::operator::Kind;
use ascend_sys::bindings::{aclIntArray, aclTensor, aclTensorList};
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};
use crate::runtime::Context;

use super::descriptor::{Owned, int_array, tensor, tensor_list};
use super::{Addressed, Parameter};

/// The tensors of a list.
type Members = SmallVec<[Owned<aclTensor>; 1]>;

/// The descriptors of one call: its tensors and lists, and the arrays and texts that phase one adds. They live as long as
/// the executor.
#[derive(Debug)]
pub(crate) struct Descriptors<P> {
    context: Arc<Context>,
    tensors: Vec<(P, Owned<aclTensor>)>,
    lists: Vec<(P, Owned<aclTensorList>)>,
    arrays: Vec<Owned<aclIntArray>>,
    texts: Vec<CString>,
}

impl<P: Parameter> Descriptors<P> {
    /// Describes these tensors, those of a list in its order. The device must be bound.
    pub(super) fn new(context: &Arc<Context>, given: &[Addressed<P>]) -> Result<Self> {
        let mut tensors = Vec::with_capacity(given.len());
        let mut lists: Vec<(P, Members)> = Vec::new();
        for Addressed {
            argument,
            desc,
            address,
        } in given
        {
            let tensor = tensor(context, desc, *address)?;
            let parameter = argument.parameter;
            if parameter.info().kind != Kind::TensorList {
                tensors.push((parameter, tensor));
                continue;
            }
            match lists.iter_mut().find(|(known, _)| *known == parameter) {
                Some((_, members)) => members.push(tensor),
                None => lists.push((parameter, smallvec![tensor])),
            }
        }
        let lists = lists
            .into_iter()
            .map(|(parameter, members)| Ok((parameter, tensor_list(context, members)?)));
        Ok(Self {
            context: Arc::clone(context),
            tensors,
            lists: lists.collect::<Result<_>>()?,
            arrays: Vec::new(),
            texts: Vec::new(),
        })
    }

    /// A tensor; null if the call has none.
    pub(crate) fn tensor(&self, parameter: P) -> *mut aclTensor {
        let given = self.tensors.iter().find(|(known, _)| *known == parameter);
        given.map_or(ptr::null_mut(), |(_, tensor)| tensor.as_ptr())
    }

    /// A list; null if the call has none.
    pub(crate) fn list(&self, parameter: P) -> *mut aclTensorList {
        let given = self.lists.iter().find(|(known, _)| *known == parameter);
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
