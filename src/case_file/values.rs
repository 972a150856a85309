//! Attributes and length arrays of a call, as text.

use ascend_spec::operator::{Kind, OwnedValue, ParameterInfo, Value};

use super::error::CaseError;

/// Reads the value that an entry gives to a parameter; `None` for a tensor parameter.
pub(super) fn read(parameter: &ParameterInfo, text: &str) -> Result<Option<OwnedValue>, CaseError> {
    let name = parameter.name;
    Ok(Some(match parameter.kind {
        Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output => return Ok(None),
        Kind::Int | Kind::Int8 => OwnedValue::Int(integer(name, text)?),
        Kind::Float => OwnedValue::Float(number(name, text)?),
        Kind::Flag => OwnedValue::Flag(flag(name, text)?),
        Kind::Text | Kind::OptionalText => OwnedValue::Text(Some(text.to_owned())),
        Kind::Ints | Kind::IntList => OwnedValue::Ints(Some(list(name, text)?)),
    }))
}

/// Writes the entry that [`read`] reads this value from; `None` for a null pointer.
pub(super) fn text(value: Value<'_>) -> Option<String> {
    Some(match value {
        Value::Int(value) => value.to_string(),
        Value::Float(value) => format!("{value:?}"),
        Value::Flag(value) => value.to_string(),
        Value::Text(text) => text?.to_owned(),
        Value::Ints(values) => format!("{:?}", values?),
    })
}

pub(super) fn integer(key: &'static str, value: &str) -> Result<i64, CaseError> {
    value
        .parse()
        .map_err(|_| CaseError::malformed(key, value, "a decimal integer of 64 bits"))
}

pub(super) fn number(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let parsed: Option<f64> = value.parse().ok();
    parsed
        .filter(|number| number.is_finite())
        .ok_or_else(|| CaseError::malformed(key, value, "a finite decimal number"))
}

fn flag(key: &'static str, value: &str) -> Result<bool, CaseError> {
    value
        .parse()
        .map_err(|_| CaseError::malformed(key, value, "`true` or `false`"))
}

fn list(key: &'static str, value: &str) -> Result<Vec<i64>, CaseError> {
    serde_json::from_str(value)
        .map_err(|_| CaseError::malformed(key, value, "a JSON list of integers"))
}
