//! The changes that a fix makes in a call, in a form that a program can apply.

use super::{DeclaredParameter, OwnedValue, ParameterInfo};
use crate::{DType, Dims, TensorDesc};
use std::fmt;

/// A change of one argument of a call. Its text is a part of the fix's text.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The argument.
    pub parameter: &'static ParameterInfo,
    /// The new argument.
    pub to: NewArgument,
}

/// The new value or description of an argument.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum NewArgument {
    /// An argument that is not a tensor has this value.
    Value(OwnedValue),
    /// A tensor is not given.
    Nothing,
    /// A tensor has this dtype. Every tensor of a list has it.
    DType(DType),
    /// A tensor has this shape and is contiguous. Every tensor of a list has it.
    Shape(Dims),
    /// A tensor is given, whether or not there was another one.
    Given(TensorDesc),
    /// A tensor is contiguous, in the format ND. Every tensor of a list is.
    Packed,
}

impl Change {
    pub(crate) fn set(parameter: impl DeclaredParameter, value: impl Into<OwnedValue>) -> Self {
        Self::to(parameter, NewArgument::Value(value.into()))
    }

    pub(crate) fn to(parameter: impl DeclaredParameter, to: NewArgument) -> Self {
        Change { parameter: parameter.info(), to }
    }

    /// The tensor after the change; `None` if the change drops it or gives another one.
    fn of(&self, tensor: &TensorDesc) -> Option<TensorDesc> {
        match &self.to {
            // A tensor that a change gives is added separately, once also in a list.
            NewArgument::Nothing | NewArgument::Given(_) => None,
            NewArgument::Value(_) => Some(*tensor),
            NewArgument::DType(dtype) => Some(TensorDesc { dtype: *dtype, ..*tensor }),
            NewArgument::Shape(shape) => Some(TensorDesc::packed(tensor.dtype, *shape)),
            NewArgument::Packed => Some(TensorDesc::packed(tensor.dtype, tensor.shape)),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.parameter.acl_name;
        match &self.to {
            NewArgument::Value(OwnedValue::Int(value)) => write!(f, "set {name} to {value}"),
            NewArgument::Value(OwnedValue::Float(value)) => write!(f, "set {name} to {value}"),
            NewArgument::Value(OwnedValue::Flag(value)) => write!(f, "set {name} to {value}"),
            NewArgument::Value(OwnedValue::Text(Some(value))) => write!(f, "set {name} to {value}"),
            NewArgument::Value(OwnedValue::Ints(Some(values))) => {
                write!(f, "set {name} to {}", Listed(values))
            }
            NewArgument::Value(OwnedValue::Text(None) | OwnedValue::Ints(None)) | NewArgument::Nothing => {
                write!(f, "drop {name}")
            }
            NewArgument::DType(dtype) if self.parameter.output.is_some() => {
                write!(f, "make {name} {dtype}")
            }
            NewArgument::DType(dtype) => write!(f, "convert {name} to {dtype}"),
            NewArgument::Shape(shape) => write!(f, "give {name} the shape {shape}"),
            NewArgument::Given(given) => {
                write!(f, "give {name} as {} {}", given.dtype, given.shape)
            }
            NewArgument::Packed => write!(f, "copy {name} to a contiguous tensor"),
        }
    }
}

/// Numbers in a message: all of a short list, both ends of a long one.
pub(crate) struct Listed<'a>(pub(crate) &'a [i64]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [first, second, third, .., last] if self.0.len() > 12 => {
                write!(f, "[{first}, {second}, {third}, ..., {last}]")
            }
            all => write!(f, "{all:?}"),
        }
    }
}

/// The description of a parameter's tensor after these changes; `None` if a change drops the tensor or gives another
/// one.
pub(crate) fn changed(changes: &[Change], parameter: &ParameterInfo, tensor: &TensorDesc) -> Option<TensorDesc> {
    let mut own = (changes.iter()).filter(|change| change.parameter.name == parameter.name);
    own.try_fold(*tensor, |tensor, change| change.of(&tensor))
}

/// What a fix may be written as: words, changes, or changes with words that give the reason.
pub(crate) trait Fix {
    /// The changes that a program can make, and the words.
    fn parts(self) -> (Vec<Change>, String);
}

impl Fix for &str {
    fn parts(self) -> (Vec<Change>, String) {
        (vec![], self.to_owned())
    }
}

impl Fix for String {
    fn parts(self) -> (Vec<Change>, String) {
        (vec![], self)
    }
}

impl Fix for fmt::Arguments<'_> {
    fn parts(self) -> (Vec<Change>, String) {
        (vec![], self.to_string())
    }
}

impl Fix for Change {
    fn parts(self) -> (Vec<Change>, String) {
        (vec![self], String::new())
    }
}

impl Fix for Vec<Change> {
    fn parts(self) -> (Vec<Change>, String) {
        (self, String::new())
    }
}

/// Changes, with their reason or a further step in words.
impl<F: Fix> Fix for (F, &str) {
    fn parts(self) -> (Vec<Change>, String) {
        (self.0.parts().0, self.1.to_owned())
    }
}

/// The call's own fix if there is one, otherwise the rule's.
impl<F: Fix, G: Fix> Fix for Result<F, G> {
    fn parts(self) -> (Vec<Change>, String) {
        self.map_or_else(Fix::parts, Fix::parts)
    }
}

/// The changes of a fix, and its text.
pub(crate) fn written(fix: impl Fix) -> (Vec<Change>, String) {
    let (changes, words) = fix.parts();
    let mut text = String::new();
    for change in &changes {
        if !text.is_empty() {
            text.push_str(", ");
        }
        text.push_str(&change.to_string());
    }
    if !text.is_empty() && !words.is_empty() {
        text.push_str(": ");
    }
    text.push_str(&words);
    (changes, text)
}
