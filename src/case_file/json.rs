//! JSON: descriptions of tensors, and objects in which no name occurs twice.

use std::collections::BTreeSet;
use std::fmt;

use ascend_spec::{DType, Dims, TensorDesc};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use super::CaseError;
use super::error::shortened;

/// Writes the JSON object that [`desc`] reads.
pub(super) fn described(desc: &TensorDesc) -> Value {
    let dtype = desc.dtype.name().to_ascii_lowercase();
    let mut tensor = json!({ "shape": desc.shape.to_vec(), "dtype": dtype });
    if let Some(object) = tensor.as_object_mut().filter(|_| !desc.is_contiguous()) {
        object.insert("strides".to_owned(), json!(desc.strides.to_vec()));
    }
    tensor
}

/// Reads a tensor's shape, dtype and, if they are given, strides.
pub(super) fn desc(name: &str, value: &Value) -> Result<TensorDesc, CaseError> {
    let wrong = || CaseError::Shape {
        tensor: name.to_owned(),
        given: shortened(&value.to_string()),
        allowed: "an object with `shape`, a list of at most 8 integers, `dtype`, and perhaps `strides`, an integer \
                  an axis"
            .to_owned(),
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
    let dtype =
        DType::from_name(dtype).ok_or_else(|| CaseError::Dtype { tensor: name.to_owned(), dtype: dtype.to_owned() })?;
    let mut desc = TensorDesc::packed(dtype, shape);
    if let Some(strides) = object.get("strides") {
        let strides = integers(strides).filter(|strides| strides.rank() == shape.rank());
        desc.strides = strides.ok_or_else(wrong)?;
    }
    Ok(desc)
}

/// Any JSON value, of which only the names are checked: an object that has a name twice is wrong, since readers differ
/// in which of the two values they keep.
#[derive(Default)]
pub(super) struct UniqueNames {
    /// A name that an object has twice.
    pub(super) repeated: Option<String>,
}

impl<'de> Deserialize<'de> for UniqueNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = UniqueNames;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueNames, A::Error> {
        let mut names = BTreeSet::new();
        let mut repeated = None;
        while let Some((name, value)) = map.next_entry::<String, UniqueNames>()? {
            repeated = repeated.or(value.repeated).or(names.replace(name));
        }
        Ok(UniqueNames { repeated })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<UniqueNames, A::Error> {
        let mut repeated = None;
        while let Some(value) = seq.next_element::<UniqueNames>()? {
            repeated = repeated.or(value.repeated);
        }
        Ok(UniqueNames { repeated })
    }

    fn visit_bool<E>(self, _: bool) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }

    fn visit_u64<E>(self, _: u64) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }

    fn visit_f64<E>(self, _: f64) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }

    fn visit_str<E>(self, _: &str) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }

    fn visit_unit<E>(self) -> Result<UniqueNames, E> {
        Ok(UniqueNames::default())
    }
}
