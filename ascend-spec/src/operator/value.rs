//! Arguments that are no tensors, whatever their kind.

use super::Kind;

/// What a call gives to a parameter that is no tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Of [`Kind::Int`] and [`Kind::Int8`].
    Int(i64),
    /// Of [`Kind::Float`].
    Float(f64),
    /// Of [`Kind::Flag`].
    Flag(bool),
    /// Of [`Kind::Text`] and [`Kind::OptionalText`]; `None` is a null pointer.
    Text(Option<&'a str>),
    /// Of [`Kind::Ints`] and [`Kind::IntList`]; `None` is a null pointer.
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

/// A value was given to a parameter of another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongKind {
    /// The parameter's name in snake case.
    pub parameter: &'static str,
    /// What it takes.
    pub kind: Kind,
}

impl std::fmt::Display for WrongKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WrongKind { parameter, kind } = self;
        write!(f, "{parameter} takes a value of kind {kind:?}")
    }
}

impl std::error::Error for WrongKind {}

/// What a borrowed call holds of a value that it does not borrow: a detail of the macro that declares arguments. It names the call's
/// lifetime where no other argument does.
#[doc(hidden)]
pub trait InCall<'a> {
    /// The value itself.
    type Value;
}

impl InCall<'_> for i8 {
    type Value = i8;
}
