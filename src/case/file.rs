//! Reading and writing case files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::attributes::{integer, number};
use super::header::{self, Header};
use super::tensor::{CaseTensor, from_file, to_file};
use super::{Case, CaseError, Expect, MaskKind, Parameter, Tolerance};

const FORMAT: &str = "ascend-attention-case";
const VERSION: &str = "1";

impl Case {
    /// Reads a case file.
    ///
    /// # Errors
    /// [`CaseError`]: the file cannot be read, is no case, or has something that this release does not know.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, CaseError> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|source| CaseError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::from_bytes(&bytes)
    }

    /// Writes a case file. Equal cases make equal files.
    ///
    /// # Errors
    /// As [`Case::to_bytes`], and [`CaseError::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), CaseError> {
        let path = path.as_ref();
        fs::write(path, self.to_bytes()?).map_err(|source| CaseError::Io {
            path: path.to_owned(),
            source,
        })
    }

    /// Reads a case from the content of a file.
    ///
    /// # Errors
    /// [`CaseError`]: the content is no case, or has something that this release does not know.
    pub fn from_bytes(file: &[u8]) -> Result<Self, CaseError> {
        let header = Header::read(file)?;
        let mut case = Self::default();
        case.read_metadata(&header.metadata)?;
        let (mut keys, mut values) = (BTreeMap::new(), BTreeMap::new());
        for (name, info) in &header.tensors {
            let dtype = from_file(info.dtype).ok_or_else(|| CaseError::Dtype {
                tensor: name.clone(),
                dtype: format!("{:?}", info.dtype),
            })?;
            let wrong = |allowed: &str| CaseError::Shape {
                tensor: name.clone(),
                given: format!("shape {:?}", info.shape),
                allowed: allowed.to_owned(),
            };
            let bytes = header.bytes(file, info).to_vec();
            let tensor = CaseTensor::new(dtype, &info.shape, bytes)
                .map_err(|_| wrong("at most 8 axes, each below 2^63"))?;
            if let Some(index) = list_index(name, "key") {
                keys.insert(index, tensor);
            } else if let Some(index) = list_index(name, "value") {
                values.insert(index, tensor);
            } else if name == "attention_out" {
                case.attention_out = Some(tensor);
            } else if name == "softmax_lse" {
                case.softmax_lse = Some(tensor);
            } else if let Some(parameter) =
                Parameter::from_name(name).filter(|known| !known.is_output())
            {
                case.tensors.insert(parameter, tensor);
            } else {
                return Err(CaseError::UnknownTensor(name.clone()));
            }
        }
        case.key = list("key", keys)?;
        case.value = list("value", values)?;
        let kind_given = header
            .metadata
            .iter()
            .any(|(key, _)| key == "atten_mask_kind");
        if !kind_given && case.tensor(Parameter::AttenMask).is_some() {
            case.mask = MaskKind::Tensor;
        }
        case.consistent()?;
        Ok(case)
    }

    fn read_metadata(&mut self, metadata: &[(String, String)]) -> Result<(), CaseError> {
        let find = |key: &'static str| {
            let entry = metadata.iter().find(|(name, _)| name == key);
            entry
                .map(|(_, value)| value.clone())
                .ok_or(CaseError::MissingKey(key))
        };
        // The three that say what the others mean come first.
        if let Some(format) = Some(find("format")?).filter(|format| format != FORMAT) {
            return Err(CaseError::UnknownFormat(format));
        }
        if let Some(version) = Some(find("version")?).filter(|version| version != VERSION) {
            return Err(CaseError::UnknownVersion(version));
        }
        if let Some(op) = Some(find("op")?).filter(|op| op != Self::OP) {
            return Err(CaseError::UnknownOp(op));
        }
        let (mut reject, mut status, mut atol, mut rtol) = (false, None, None, None);
        for (key, value) in metadata {
            match key.as_str() {
                "format" | "version" | "op" => {}
                "name" => self.name.clone_from(value),
                "note" => self.note.clone_from(value),
                "atten_mask_kind" => self.mask = mask_kind(value)?,
                "atol" => atol = Some(distance("atol", value)?),
                "rtol" => rtol = Some(distance("rtol", value)?),
                "expect" => {
                    reject = match value.as_str() {
                        "ok" => false,
                        "reject" => true,
                        _ => return Err(CaseError::malformed("expect", value, "`ok` or `reject`")),
                    };
                }
                "expect_status" => {
                    let number = integer("expect_status", value)?;
                    let code = i32::try_from(number).map_err(|_| {
                        CaseError::malformed("expect_status", value, "an integer of 32 bits")
                    })?;
                    status = Some(code);
                }
                "prefix" => {
                    return Err(CaseError::ForeignKey {
                        key: key.clone(),
                        op: Self::OP,
                    });
                }
                _ if self.attributes.read(key, value)? => {}
                _ => return Err(CaseError::UnknownKey(key.clone())),
            }
        }
        if atol.is_some() || rtol.is_some() {
            self.tolerance = Some(Tolerance {
                atol: atol.unwrap_or(0.0),
                rtol: rtol.unwrap_or(0.0),
            });
        }
        self.expect = match (reject, status) {
            (true, status) => Expect::Reject { status },
            (false, None) => Expect::Ok,
            (false, Some(_)) => {
                return Err(CaseError::Contradiction(
                    "there is an `expect_status`, but `expect` is not `reject`: leave it out, or expect the refusal",
                ));
            }
        };
        Ok(())
    }

    /// The content of a file of this case.
    ///
    /// # Errors
    /// [`CaseError`]: the parts do not fit together, a number is not finite, or safetensors lacks an element type.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.consistent()?;
        self.writable()?;
        let mut metadata = BTreeMap::from([
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_owned()),
            ("op", Self::OP.to_owned()),
            ("atten_mask_kind", self.mask.name().to_owned()),
        ]);
        for (key, text) in [("name", &self.name), ("note", &self.note)] {
            if !text.is_empty() {
                metadata.insert(key, text.clone());
            }
        }
        self.attributes.write(&mut metadata);
        if let Some(Tolerance { atol, rtol }) = self.tolerance {
            for (key, value) in [("atol", atol), ("rtol", rtol)] {
                let text = format!("{value:?}");
                distance(key, &text)?;
                metadata.insert(key, text);
            }
        }
        if let Expect::Reject { status } = self.expect {
            metadata.insert("expect", "reject".to_owned());
            if let Some(status) = status {
                metadata.insert("expect_status", status.to_string());
            }
        }
        let mut tensors = BTreeMap::new();
        for (name, tensor) in self.named_tensors() {
            let dtype = to_file(tensor.dtype()).ok_or_else(|| CaseError::Dtype {
                tensor: name.clone(),
                dtype: tensor.dtype().to_string(),
            })?;
            tensors.insert(name, (dtype, tensor.shape(), tensor.bytes()));
        }
        header::write(&metadata, &tensors)
    }

    /// Refuses what a file cannot hold: a scale that is no number, element types that safetensors lacks.
    pub(super) fn writable(&self) -> Result<(), CaseError> {
        number("scale", &format!("{:?}", self.attributes.scale))?;
        for (name, tensor) in self.named_tensors() {
            if to_file(tensor.dtype()).is_none() {
                return Err(CaseError::Dtype {
                    tensor: name,
                    dtype: tensor.dtype().to_string(),
                });
            }
        }
        Ok(())
    }

    /// Every tensor of the file and its name there.
    fn named_tensors(&self) -> Vec<(String, &CaseTensor)> {
        let mut named = Vec::new();
        for (list, name) in [(&self.key, "key"), (&self.value, "value")] {
            match list.as_slice() {
                [one] => named.push((name.to_owned(), one)),
                several => named.extend(
                    several
                        .iter()
                        .enumerate()
                        .map(|(index, tensor)| (format!("{name}.{index}"), tensor)),
                ),
            }
        }
        named.extend(
            self.tensors
                .iter()
                .map(|(parameter, tensor)| (parameter.name().to_owned(), tensor)),
        );
        for (tensor, name) in [
            (&self.attention_out, "attention_out"),
            (&self.softmax_lse, "softmax_lse"),
        ] {
            named.extend(tensor.as_ref().map(|tensor| (name.to_owned(), tensor)));
        }
        named
    }
}

impl MaskKind {
    /// Its name in a file.
    const fn name(self) -> &'static str {
        match self {
            MaskKind::None => "none",
            MaskKind::Tensor => "tensor",
            MaskKind::Compressed => "compressed",
        }
    }
}

fn mask_kind(value: &str) -> Result<MaskKind, CaseError> {
    [MaskKind::None, MaskKind::Tensor, MaskKind::Compressed]
        .into_iter()
        .find(|kind| kind.name() == value)
        .ok_or_else(|| {
            CaseError::malformed("atten_mask_kind", value, "`none`, `tensor` or `compressed`")
        })
}

fn distance(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let number = number(key, value)?;
    if number < 0.0 {
        return Err(CaseError::malformed(key, value, "a number of at least 0"));
    }
    Ok(number)
}

/// The place in the list `list` of the tensor `name`: `None` for `key`, `Some(3)` for `key.3`. The outer `None` means
/// another tensor.
fn list_index(name: &str, list: &str) -> Option<Option<usize>> {
    let rest = name.strip_prefix(list)?;
    if rest.is_empty() {
        return Some(None);
    }
    let digits = rest.strip_prefix('.')?;
    let index: usize = digits.parse().ok()?;
    // One spelling a number: neither `+1` nor `01`.
    (index.to_string() == digits).then_some(Some(index))
}

/// The tensors of a list, from the places that the file names.
fn list(
    name: &'static str,
    mut found: BTreeMap<Option<usize>, CaseTensor>,
) -> Result<Vec<CaseTensor>, CaseError> {
    if let Some(single) = found.remove(&None) {
        return match found.is_empty() {
            true => Ok(vec![single]),
            false => Err(CaseError::Contradiction(match name {
                "key" => {
                    "there are both `key` and `key.0`, `key.1`, ...: one tensor is `key`, a list has numbers"
                }
                _ => {
                    "there are both `value` and `value.0`, `value.1`, ...: one tensor is `value`, a list has numbers"
                }
            })),
        };
    }
    for (place, index) in found.keys().enumerate() {
        if *index != Some(place) {
            return Err(CaseError::MissingTensor(format!("{name}.{place}")));
        }
    }
    Ok(found.into_values().collect())
}
