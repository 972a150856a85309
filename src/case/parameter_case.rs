//! Calls without data: shapes, dtypes, attributes and perhaps the operator's verdict, as lines of JSON.

use std::collections::BTreeMap;

use ascend_spec::fia::{FiaCall, Operand};
use ascend_spec::{DType, Dims, TensorDesc};
use serde_json::{Map, Value, json};

use super::error::shortened;
use super::{Attributes, CaseError, Parameter};

/// One call described by shapes, dtypes and attributes alone.
///
/// A line has `id`, `inputs` (parameter name to `{"shape", "dtype"}`, with `"strides"` for a tensor that is not packed, to
/// a list of those, or to a list of integers), `attrs`, `outputs`, and optionally `expect` (`accept` or `reject`) and
/// `artefact` (`true` if the verdict depends on something that a caller of the C API cannot express). `about` is free
/// text; `area`, `family` and `mutations` are labels, which are not looked at. Every other name is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterCase {
    /// Stable name.
    pub id: String,
    /// Whether the operator is said to accept the call.
    pub accepted: Option<bool>,
    /// Whether that verdict is of no use to a caller of the C API.
    pub artefact: bool,
    /// Free text: where the call comes from.
    pub about: String,
    /// Attributes and length arrays.
    pub attributes: Attributes,
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
        let broken = |what: &dyn std::fmt::Display| {
            // What is quoted of the line may hold anything.
            CaseError::NotJson(
                what.to_string()
                    .escape_debug()
                    .to_string()
                    .replace("\\\"", "\""),
            )
        };
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| broken(&error))?;
        let mut case = ParameterCase {
            id: String::new(),
            accepted: None,
            artefact: false,
            about: String::new(),
            attributes: Attributes::default(),
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
                ("about", Value::String(about)) => case.about.clone_from(about),
                ("area" | "family" | "about" | "mutations", _) => {}
                (name @ ("id" | "expect" | "artefact" | "inputs" | "outputs" | "attrs"), value) => {
                    let expected = match name {
                        "id" => "a string",
                        "expect" => "`accept` or `reject`",
                        "artefact" => "`true` or `false`",
                        "attrs" => "an object of attributes by name",
                        _ => "an object of tensors by name",
                    };
                    let value = shortened(&value.to_string());
                    return Err(broken(&format_args!(
                        "`{name}` is {value}; it takes {expected}"
                    )));
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
        call.key = &self.key;
        call.value = &self.value;
        for (parameter, desc) in &self.tensors {
            *parameter.of_mut(&mut call) = Some(*desc);
        }
        call
    }

    /// A call of these attributes and tensors.
    pub(super) fn of(attributes: &Attributes, tensors: &[(Operand, TensorDesc)]) -> Self {
        let list = |wanted: fn(Operand) -> bool| {
            let list = tensors.iter().filter(|(operand, _)| wanted(*operand));
            list.map(|(_, desc)| *desc).collect()
        };
        let named = tensors
            .iter()
            .filter_map(|(operand, desc)| Some((operand.parameter()?, *desc)));
        Self {
            id: String::new(),
            accepted: None,
            artefact: false,
            about: String::new(),
            attributes: attributes.clone(),
            tensors: named.collect(),
            key: list(|operand| matches!(operand, Operand::Key(_))),
            value: list(|operand| matches!(operand, Operand::Value(_))),
        }
    }

    /// The line, which [`ParameterCase::from_json`] reads.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] for a `scale` that is no finite number.
    pub fn to_json(&self) -> Result<String, CaseError> {
        super::attributes::number("scale", &format!("{:?}", self.attributes.scale))?;
        let (mut inputs, mut outputs, mut attributes) = (Map::new(), Map::new(), Map::new());
        let mut written = BTreeMap::new();
        self.attributes.write(&mut written);
        for (name, text) in written {
            let value = match name {
                "input_layout" => Value::String(text),
                _ => serde_json::from_str(&text).unwrap_or(Value::String(text)),
            };
            match value {
                Value::Array(_) => inputs.insert(name.to_owned(), value),
                _ => attributes.insert(name.to_owned(), value),
            };
        }
        for (parameter, desc) in &self.tensors {
            let side = match parameter.is_output() {
                true => &mut outputs,
                false => &mut inputs,
            };
            side.insert(parameter.name().to_owned(), described(desc));
        }
        for (name, list) in [("key", &self.key), ("value", &self.value)] {
            if !list.is_empty() {
                inputs.insert(name.to_owned(), list.iter().map(described).collect());
            }
        }
        let mut line = json!({
            "id": self.id,
            "inputs": inputs,
            "attrs": attributes,
            "outputs": outputs,
        });
        if let Some(object) = line.as_object_mut() {
            if let Some(accepted) = self.accepted {
                let verdict = if accepted { "accept" } else { "reject" };
                object.insert("expect".to_owned(), verdict.into());
            }
            if self.artefact {
                object.insert("artefact".to_owned(), true.into());
            }
            if !self.about.is_empty() {
                object.insert("about".to_owned(), self.about.as_str().into());
            }
        }
        Ok(line.to_string())
    }

    fn attribute(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if self.attributes.read(name, &text)? {
            Ok(())
        } else {
            Err(CaseError::UnknownKey(name.to_owned()))
        }
    }

    fn operand(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        if self
            .attributes
            .arrays()
            .iter()
            .any(|(known, _)| *known == name)
        {
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

/// What [`desc`] reads.
fn described(desc: &TensorDesc) -> Value {
    let dtype = desc.dtype.name().to_ascii_lowercase();
    let mut tensor = json!({ "shape": desc.shape.to_vec(), "dtype": dtype });
    if let Some(object) = tensor.as_object_mut().filter(|_| !desc.is_contiguous()) {
        object.insert("strides".to_owned(), json!(desc.strides.to_vec()));
    }
    tensor
}

/// A tensor's shape, dtype and, if they are given, strides.
fn desc(name: &str, value: &Value) -> Result<TensorDesc, CaseError> {
    let wrong = || {
        CaseError::Shape {
        tensor: name.to_owned(),
        given: shortened(&value.to_string()),
        allowed: "an object with `shape`, a list of at most 8 integers, `dtype`, and perhaps `strides`, an integer an axis"
            .to_owned(),
    }
    };
    let object = value.as_object().ok_or_else(wrong)?;
    let known = |key: &String| matches!(key.as_str(), "shape" | "dtype" | "strides");
    if !object.keys().all(known) {
        return Err(wrong());
    }
    let integers = |list: &Value| -> Option<Dims> {
        let list: Option<Vec<i64>> = list.as_array()?.iter().map(Value::as_i64).collect();
        Dims::new(&list?)
    };
    let shape = object.get("shape").and_then(integers).ok_or_else(wrong)?;
    let dtype = object.get("dtype").and_then(Value::as_str);
    let dtype = dtype.ok_or_else(wrong)?;
    let dtype = DType::from_name(dtype).ok_or_else(|| CaseError::Dtype {
        tensor: name.to_owned(),
        dtype: dtype.to_owned(),
    })?;
    let mut desc = TensorDesc::packed(dtype, shape);
    if let Some(strides) = object.get("strides") {
        let strides = integers(strides).filter(|strides| strides.rank() == shape.rank());
        desc.strides = strides.ok_or_else(wrong)?;
    }
    Ok(desc)
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
