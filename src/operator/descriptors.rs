//! The descriptors that one executor is made of.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use ascend_spec::operator::{EntryPoint, Kind};
use ascend_sys::bindings::{aclIntArray, aclTensor, aclTensorList};
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};
use crate::runtime::Context;

use super::descriptor::{Object, Owned, int_array, tensor, tensor_list};
use super::{Addressed, Parameter};

/// The tensors of a list.
type Members = SmallVec<[Owned<aclTensor>; 1]>;

/// The numbers of a parameter in an entry point.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Numbers {
    /// Its number among the inputs.
    pub(super) input: Option<usize>,
    /// Its number among the outputs.
    pub(super) output: Option<usize>,
}

impl Numbers {
    fn of<P: Parameter>(parameter: P, entry_point: EntryPoint<P>) -> Self {
        Self { input: entry_point.input_number(parameter), output: entry_point.output_number(parameter) }
    }
}

/// The descriptor of a tensor or a list.
#[derive(Debug)]
struct Numbered<P, T: Object> {
    parameter: P,
    numbers: Numbers,
    raw: Owned<T>,
}

/// The descriptors of one call: its tensors and lists, and the arrays and texts that phase one adds. They live as
/// long as the executor.
#[derive(Debug)]
pub(crate) struct Descriptors<P> {
    context: Arc<Context>,
    tensors: Vec<Numbered<P, aclTensor>>,
    lists: Vec<Numbered<P, aclTensorList>>,
    arrays: Vec<Owned<aclIntArray>>,
    texts: Vec<CString>,
}

impl<P: Parameter> Descriptors<P> {
    /// Describes these tensors, those of a list in the list's order. The device must be bound.
    pub(super) fn new(context: &Arc<Context>, given: &[Addressed<P>]) -> Result<Self> {
        let mut tensors = Vec::with_capacity(given.len());
        let mut lists: Vec<(P, Members)> = Vec::new();
        for Addressed { argument, desc, address } in given {
            let tensor = tensor(context, desc, *address)?;
            let parameter = argument.parameter;
            if parameter.info().kind != Kind::TensorList {
                tensors.push(Numbered { parameter, numbers: Numbers::default(), raw: tensor });
                continue;
            }
            match lists.iter_mut().find(|(known, _)| *known == parameter) {
                Some((_, members)) => members.push(tensor),
                None => lists.push((parameter, smallvec![tensor])),
            }
        }
        let lists = lists.into_iter().map(|(parameter, members)| {
            Ok(Numbered { parameter, numbers: Numbers::default(), raw: tensor_list(context, members)? })
        });
        Ok(Self {
            context: Arc::clone(context),
            tensors,
            lists: lists.collect::<Result<_>>()?,
            arrays: Vec::new(),
            texts: Vec::new(),
        })
    }

    /// Sets the numbers of the descriptors to those that the entry point `of` gives their parameters.
    pub(crate) fn number(&mut self, entry: EntryPoint<P>) {
        for tensor in &mut self.tensors {
            tensor.numbers = Numbers::of(tensor.parameter, entry);
        }
        for list in &mut self.lists {
            list.numbers = Numbers::of(list.parameter, entry);
        }
    }

    /// The numbers of a tensor or a list.
    pub(super) fn numbers(&self, parameter: P) -> Numbers {
        let tensor = self.tensors.iter().find(|entry| entry.parameter == parameter);
        let list = || self.lists.iter().find(|entry| entry.parameter == parameter);
        let numbers = tensor.map(|tensor| tensor.numbers);
        numbers.or_else(|| Some(list()?.numbers)).unwrap_or_default()
    }

    /// A tensor; null if the call has none.
    pub(crate) fn tensor(&self, parameter: P) -> *mut aclTensor {
        let given = self.tensors.iter().find(|entry| entry.parameter == parameter);
        given.map_or(ptr::null_mut(), |tensor| tensor.raw.as_ptr())
    }

    /// A list; null if the call has none.
    pub(crate) fn list(&self, parameter: P) -> *mut aclTensorList {
        let given = self.lists.iter().find(|entry| entry.parameter == parameter);
        given.map_or(ptr::null_mut(), |list| list.raw.as_ptr())
    }

    /// Adds an array; null if there is none. An empty array is passed as such: some operators only check whether
    /// there is an array.
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
        let text =
            CString::new(text).map_err(|_| Error::invalid(name, text, "no NUL").fix("remove the NUL from the text"))?;
        // The bytes stay where they are when the owner moves.
        let raw = text.as_ptr().cast_mut();
        self.texts.push(text);
        Ok(raw)
    }
}
