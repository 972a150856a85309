//! Calls without data: shapes, dtypes, attributes and perhaps the operator's verdict, as lines of JSON.

use std::collections::BTreeMap;

use ascend_spec::fia::FiaCall;
use ascend_spec::{DType, TensorDesc};
use serde_json::{Map, Value};

use super::{Attributes, CaseError, Parameter};

/// One call described by shapes, dtypes and attributes alone.
///
/// A line has `id`, `inputs` (parameter name to `{"shape", "dtype"}`, to a list of those, or to a list of integers),
/// `attrs`, `outputs`, and optionally `expect` (`accept` or `reject`) and `artefact` (`true` if the verdict depends on
/// something that a caller of the C API cannot express). `area`, `family`, `about` and `mutations` are labels, which
/// are not looked at. Every other name is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterCase {
    /// Stable name.
    pub id: String,
    /// Whether the operator is said to accept the call.
    pub accepted: Option<bool>,
    /// Whether that verdict is of no use to a caller of the C API.
    pub artefact: bool,
    /// Attributes and length arrays.
    pub attributes: Attributes,
    /// Kind of position bias.
    pub pse_type: i64,
    tensors: BTreeMap<Parameter, TensorDesc>,
    key: Vec<TensorDesc>,
    value: Vec<TensorDesc>,
}

impl ParameterCase {
    /// Reads one line.
    ///
    /// # Errors
    /// [`CaseError::NotJson`] for what is no such object; the errors of case files for unknown names and values.
    pub fn from_json(line: &str) -> Result<Self, CaseError> {
        let broken = |what: &dyn std::fmt::Display| CaseError::NotJson(what.to_string());
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| broken(&error))?;
        let mut case = ParameterCase {
            id: String::new(),
            accepted: None,
            artefact: false,
            attributes: Attributes::default(),
            pse_type: 0,
            tensors: BTreeMap::new(),
            key: Vec::new(),
            value: Vec::new(),
        };
        for (name, value) in &object {
            match (name.as_str(), value) {
                ("id", Value::String(id)) => case.id.clone_from(id),
                ("expect", Value::String(verdict)) if verdict == "accept" => {
                    case.accepted = Some(true)
                }
                ("expect", Value::String(verdict)) if verdict == "reject" => {
                    case.accepted = Some(false)
                }
                ("artefact", Value::Bool(artefact)) => case.artefact = *artefact,
                ("inputs" | "outputs", Value::Object(tensors)) => {
                    for (name, value) in tensors {
                        case.operand(name, value)?;
                    }
                }
                ("attrs", Value::Object(attributes)) => {
                    for (name, value) in attributes {
                        case.attribute(name, value)?;
                    }
                }
                ("area" | "family" | "about" | "mutations", _) => {}
                ("id" | "expect" | "artefact" | "inputs" | "outputs" | "attrs", value) => {
                    return Err(broken(&format_args!("`{name}` is {value}")));
                }
                _ => return Err(CaseError::UnknownKey(name.clone())),
            }
        }
        if case.id.is_empty() {
            return Err(CaseError::MissingKey("id"));
        }
        Ok(case)
    }

    /// The call.
    pub fn call(&self) -> FiaCall<'_> {
        let mut call = self.attributes.call();
        call.pse_type = self.pse_type;
        call.key = &self.key;
        call.value = &self.value;
        for (parameter, desc) in &self.tensors {
            *parameter.of_mut(&mut call) = Some(*desc);
        }
        call
    }

    fn attribute(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if name == "pse_type" {
            self.pse_type = super::attributes::integer("pse_type", &text)?;
            return Ok(());
        }
        if self.attributes.read(name, &text)? {
            Ok(())
        } else {
            Err(CaseError::UnknownKey(name.to_owned()))
        }
    }

    fn operand(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        let lengths = matches!(
            name,
            "actual_seq_lengths" | "actual_seq_lengths_kv" | "actual_shared_prefix_len"
        );
        if lengths {
            return self.attribute(name, value);
        }
        let list = match value {
            Value::Array(list) => list.iter().map(|value| desc(name, value)).collect(),
            one => desc(name, one).map(|desc| vec![desc]),
        }?;
        match (name, list.as_slice()) {
            ("key", _) => self.key = list,
            ("value", _) => self.value = list,
            (_, &[desc]) => {
                let parameter = Parameter::from_name(name)
                    .ok_or_else(|| CaseError::UnknownTensor(name.to_owned()))?;
                self.tensors.insert(parameter, desc);
            }
            _ => {
                return Err(CaseError::Shape {
                    tensor: name.to_owned(),
                    given: format!("{} tensors", list.len()),
                    allowed: "one; only key and value are lists".to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// A tensor's shape and dtype.
fn desc(name: &str, value: &Value) -> Result<TensorDesc, CaseError> {
    let shape = || CaseError::Shape {
        tensor: name.to_owned(),
        given: value.to_string(),
        allowed: "an object with `shape`, a list of at most 8 integers, and `dtype`".to_owned(),
    };
    let dims: Vec<i64> = value
        .get("shape")
        .and_then(Value::as_array)
        .and_then(|dims| dims.iter().map(Value::as_i64).collect())
        .ok_or_else(shape)?;
    let dtype = value
        .get("dtype")
        .and_then(Value::as_str)
        .ok_or_else(shape)?;
    let dtype = DType::from_name(dtype).ok_or_else(|| CaseError::Dtype {
        tensor: name.to_owned(),
        dtype: dtype.to_owned(),
    })?;
    TensorDesc::contiguous(dtype, &dims).ok_or_else(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::Soc;
    use ascend_spec::fia::Version;

    const LINE: &str = r#"{"id": "one", "expect": "accept", "about": "none",
        "inputs": {"query": {"shape": [1, 4, 8, 64], "dtype": "float16"},
                   "key": {"shape": [1, 2, 16, 64], "dtype": "float16"},
                   "value": [{"shape": [1, 2, 16, 64], "dtype": "float16"}],
                   "actual_seq_lengths_kv": [9]},
        "attrs": {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "BNSD", "pse_type": 0,
                  "softmax_lse_flag": false, "inner_precise": 0},
        "outputs": {"attention_out": {"shape": [1, 4, 8, 64], "dtype": "float16"}}}"#;

    #[test]
    fn a_line_becomes_a_call() {
        let case = ParameterCase::from_json(LINE).unwrap();
        assert_eq!(
            (case.id.as_str(), case.accepted, case.artefact),
            ("one", Some(true), false)
        );
        let call = case.call();
        let problem = call.check(Version::V1, Soc::AtlasA2).unwrap();
        assert_eq!(
            (problem.kv_len(0), problem.kv_heads, problem.scale()),
            (9, 2, 0.125)
        );
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for (from, to, says) in [
            ("\"about\"", "\"colour\"", "colour"),
            ("\"query\"", "\"quarry\"", "quarry"),
            ("\"inner_precise\"", "\"outer_precise\"", "outer_precise"),
            ("\"accept\"", "\"perhaps\"", "expect"),
            ("float16", "float17", "float17"),
            ("[1, 4, 8, 64]", "[1, 4, \"8\", 64]", "shape"),
            ("[9]", "[9.5]", "actual_seq_lengths_kv"),
            ("\"id\": \"one\",", "", "id"),
            ("{\"id\"", "[\"id\"", "expected"),
        ] {
            let line = LINE.replacen(from, to, 1);
            let error = ParameterCase::from_json(&line).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
