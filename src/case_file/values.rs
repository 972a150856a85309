//! Attributes and length arrays of a call, as text.

use std::collections::BTreeMap;

use ascend_spec::fia::{Arguments, Parameter};
use ascend_spec::operator::{Kind, OwnedValue, Value};

use super::error::CaseError;

/// Takes over an entry that names an attribute or an array; false if it names something else.
pub(super) fn read<T>(
    arguments: &mut Arguments<T>,
    name: &str,
    text: &str,
) -> Result<bool, CaseError> {
    let Some(parameter) = Parameter::from_name(name) else {
        return Ok(false);
    };
    let name = parameter.name();
    let value = match parameter.info().kind {
        Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output => return Ok(false),
        Kind::Int => OwnedValue::Int(integer(name, text)?),
        Kind::Float => OwnedValue::Float(number(name, text)?),
        Kind::Flag => OwnedValue::Flag(flag(name, text)?),
        Kind::Text | Kind::OptionalText => OwnedValue::Text(Some(text.to_owned())),
        Kind::Ints | Kind::IntList => OwnedValue::Ints(Some(list(name, text)?)),
    };
    Ok(arguments.set_value(parameter, value).is_ok())
}

/// Adds the entries that [`read`] makes these attributes and arrays of. A null pointer has none.
pub(super) fn write<T>(arguments: &Arguments<T>, entries: &mut BTreeMap<&str, String>) {
    for &parameter in Parameter::ALL {
        if parameter == Parameter::PseType && arguments.pse_type == 0 {
            // Readers of earlier releases do not know it.
            continue;
        }
        let text = match arguments.value(parameter) {
            Some(Value::Int(value)) => value.to_string(),
            Some(Value::Float(value)) => format!("{value:?}"),
            Some(Value::Flag(value)) => value.to_string(),
            Some(Value::Text(Some(text))) => text.to_owned(),
            Some(Value::Ints(Some(values))) => format!("{values:?}"),
            Some(Value::Text(None) | Value::Ints(None)) | None => continue,
        };
        entries.insert(parameter.name(), text);
    }
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
