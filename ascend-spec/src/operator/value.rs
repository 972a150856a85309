//! Arguments that are not tensors, whatever their kind.

use super::{ArgumentList, Kind};

/// The value that a call gives to a parameter that is not a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// A value of [`Kind::Int`] or [`Kind::Int8`].
    Int(i64),
    /// A value of [`Kind::Float`].
    Float(f64),
    /// A value of [`Kind::Flag`].
    Flag(bool),
    /// A value of [`Kind::Text`] or [`Kind::OptionalText`]; `None` is a null pointer.
    Text(Option<&'a str>),
    /// A value of [`Kind::Ints`] or [`Kind::IntList`]; `None` is a null pointer.
    Ints(Option<&'a [i64]>),
}

/// A [`Value`] that owns its text or its numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedValue {
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// A truth value.
    Flag(bool),
    /// A text; `None` is a null pointer.
    Text(Option<String>),
    /// Integers; `None` is a null pointer.
    Ints(Option<Vec<i64>>),
}

impl From<Value<'_>> for OwnedValue {
    fn from(value: Value<'_>) -> Self {
        match value {
            Value::Int(value) => OwnedValue::Int(value),
            Value::Float(value) => OwnedValue::Float(value),
            Value::Flag(value) => OwnedValue::Flag(value),
            Value::Text(value) => OwnedValue::Text(value.map(str::to_owned)),
            Value::Ints(values) => OwnedValue::Ints(values.map(<[i64]>::to_vec)),
        }
    }
}

impl From<i64> for OwnedValue {
    fn from(value: i64) -> Self {
        OwnedValue::Int(value)
    }
}

impl From<&str> for OwnedValue {
    fn from(value: &str) -> Self {
        OwnedValue::Text(Some(value.to_owned()))
    }
}

impl From<Vec<i64>> for OwnedValue {
    fn from(values: Vec<i64>) -> Self {
        OwnedValue::Ints(Some(values))
    }
}

/// The arguments of a call of any operator, including those that are not tensors. The default is a call without
/// tensors.
pub trait ArgumentValues: ArgumentList + Default {
    /// The value of a parameter that is not a tensor.
    fn value(&self, parameter: Self::Parameter) -> Option<Value<'_>>;
}

/// The error of giving a value to a parameter of another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongKind {
    /// The parameter's name in snake case.
    pub parameter: &'static str,
    /// The kind that the parameter takes.
    pub kind: Kind,
}

impl std::fmt::Display for WrongKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WrongKind { parameter, kind } = self;
        write!(f, "{parameter} takes a value of kind {kind:?}")
    }
}

impl std::error::Error for WrongKind {}
