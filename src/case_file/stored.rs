//! The tensors of a file: their names, and the element types of those that are stored as U8.

use std::collections::BTreeMap;
use std::iter;
use std::path::Path;

use ascend_spec::DType;
use safetensors::tensor::TensorInfo;

use super::header::{self, Header};
use super::tensor::{CaseTensor, from_file, stored_name, stored_type, to_file};
use super::{CaseError, read_file};

/// Prefix of the keys that give the element types of tensors stored as U8.
pub(super) const STORED: &str = "dtype.";

/// The element types that the metadata gives for tensors stored as U8.
#[derive(Default)]
pub(super) struct Stored {
    /// By the name of a tensor or list: its element type, and whether the file has such a tensor.
    entries: BTreeMap<String, (DType, bool)>,
}

impl Stored {
    pub(super) fn insert_type(&mut self, tensor: &str, value: &str) -> Result<(), CaseError> {
        let dtype = stored_type(value).ok_or_else(|| {
            CaseError::malformed(
                "dtype.<tensor>",
                value,
                "`int4`, `float4_e2m1`, `float8_e4m3fn`, `float8_e8m0` or `hifloat8`",
            )
        })?;
        self.entries.insert(tensor.to_owned(), (dtype, false));
        Ok(())
    }

    /// Reads every tensor of a file with its name, those of a list in the list's order. `is_list` returns whether a
    /// parameter is a list.
    pub(super) fn tensors(
        mut self,
        header: &Header,
        file: &[u8],
        is_list: impl Fn(&str) -> bool,
    ) -> Result<Vec<(String, CaseTensor)>, CaseError> {
        let mut tensors = Vec::new();
        let mut lists: BTreeMap<&str, BTreeMap<Option<usize>, CaseTensor>> = BTreeMap::new();
        for (name, info) in &header.tensors {
            let dtype = from_file(info.dtype)
                .ok_or_else(|| CaseError::Dtype { tensor: name.clone(), dtype: format!("{:?}", info.dtype) })?;
            let wrong = |allowed: &str| CaseError::Shape {
                tensor: name.clone(),
                given: format!("shape {:?}", info.shape),
                allowed: allowed.to_owned(),
            };
            let bytes = header.bytes(file, info).to_vec();
            let tensor =
                CaseTensor::new(dtype, &info.shape, bytes).map_err(|_| wrong("at most 8 axes, each below 2^63"))?;
            let tensor = match self.of(name) {
                None => tensor,
                Some(stored) if dtype == DType::UInt8 => tensor
                    .unpacked(stored)
                    .ok_or_else(|| wrong("a last axis, along which two elements share a byte"))?,
                Some(_) => {
                    return Err(CaseError::Contradiction(
                        "a tensor with a key `dtype.` is stored as U8: store it so, or leave the key out",
                    ));
                }
            };
            let list = list_of(name);
            match list_index(name, list).filter(|_| is_list(list)) {
                Some(index) => {
                    lists.entry(list).or_default().insert(index, tensor);
                }
                None => tensors.push((name.clone(), tensor)),
            }
        }
        if let Some((name, _)) = self.entries.iter().find(|(_, (_, there))| !there) {
            return Err(CaseError::unknown_key(&format!("{STORED}{name}"), iter::empty()));
        }
        for (name, found) in lists {
            let members = members(name, found)?;
            tensors.extend(members.into_iter().map(|tensor| (name.to_owned(), tensor)));
        }
        Ok(tensors)
    }

    /// The element type of a tensor; a key of its own has precedence over that of its list.
    fn of(&mut self, tensor: &str) -> Option<DType> {
        let mut found = None;
        for label in [list_of(tensor), tensor] {
            if let Some((dtype, there)) = self.entries.get_mut(label) {
                *there = true;
                found = Some(*dtype);
            }
        }
        found
    }
}

/// Writes the content of a file of these entries and tensors.
pub(super) fn write(metadata: BTreeMap<&str, String>, named: &[(String, &CaseTensor)]) -> Result<Vec<u8>, CaseError> {
    let stored = stored(named);
    let mut metadata = metadata;
    for (key, name) in &stored {
        metadata.insert(key, (*name).to_owned());
    }
    let shaped: Vec<_> = named.iter().map(|(name, tensor)| (name, tensor, tensor.stored_shape())).collect();
    let mut tensors = BTreeMap::new();
    for (name, tensor, shape) in &shaped {
        let (Some(dtype), Some(shape)) = (file_type(tensor.dtype()), shape) else {
            return Err(unstorable(name, tensor));
        };
        tensors.insert((*name).clone(), (dtype, &**shape, tensor.bytes()));
    }
    header::write(&metadata, &tensors)
}

/// Refuses tensors that a file cannot hold: element types that safetensors lacks, halves of bytes.
pub(super) fn writable(named: &[(String, &CaseTensor)]) -> Result<(), CaseError> {
    for (name, tensor) in named {
        let whole = tensor.stored_shape().is_some_and(|shape| {
            let bits = file_type(tensor.dtype()).map(|dtype| dtype.bitsize());
            let elements = |bits: usize| shape.iter().try_fold(bits, |n, size| n.checked_mul(*size));
            // The format has no padding bits after the last element.
            bits.and_then(elements).is_some_and(|bits| bits.is_multiple_of(8))
        });
        if !whole {
            return Err(unstorable(name, tensor));
        }
    }
    Ok(())
}

/// Keys and element types for tensors that are stored as U8. A list whose tensors have one element type has one key.
fn stored(named: &[(String, &CaseTensor)]) -> Vec<(String, &'static str)> {
    // The element type that all tensors of a list have, if they agree.
    let mut lists: BTreeMap<&str, Option<DType>> = BTreeMap::new();
    for (name, tensor) in named {
        let shared = lists.entry(list_of(name)).or_insert(Some(tensor.dtype()));
        *shared = shared.filter(|shared| *shared == tensor.dtype());
    }
    let mut stored = Vec::new();
    for (name, tensor) in named {
        let Some(dtype) = stored_name(tensor.dtype()) else {
            continue;
        };
        let list = list_of(name);
        let alike = lists.get(list).is_some_and(Option::is_some);
        let label = if alike { list } else { name };
        stored.push((format!("{STORED}{label}"), dtype));
    }
    stored.dedup();
    stored
}

/// The name of a call's tensor in a file: with its number, if it is one of several.
pub(super) fn name_of(parameter: &str, index: usize, count: usize) -> String {
    match count {
        0 | 1 => parameter.to_owned(),
        _ => format!("{parameter}.{index}"),
    }
}

/// The list that a tensor is an element of, `key` for `key.3`; the tensor's own name if there is none.
fn list_of(tensor: &str) -> &str {
    tensor.split_once('.').map_or(tensor, |(list, _)| list)
}

/// The file's element type for one of CANN's.
fn file_type(dtype: DType) -> Option<safetensors::Dtype> {
    match stored_name(dtype) {
        Some(_) => Some(safetensors::Dtype::U8),
        None => to_file(dtype),
    }
}

fn unstorable(name: &str, tensor: &CaseTensor) -> CaseError {
    CaseError::Dtype { tensor: name.to_owned(), dtype: format!("{tensor:?}") }
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
    // A number has one spelling: neither `+1` nor `01`.
    (index.to_string() == digits).then_some(Some(index))
}

/// The tensors of a list in order, by the indices in the file. Refuses gaps, and a list that is also one tensor.
fn members(name: &str, mut found: BTreeMap<Option<usize>, CaseTensor>) -> Result<Vec<CaseTensor>, CaseError> {
    if let Some(single) = found.remove(&None) {
        return match found.is_empty() {
            true => Ok(vec![single]),
            false => Err(CaseError::MixedList(name.to_owned())),
        };
    }
    for (place, index) in found.keys().enumerate() {
        if *index != Some(place) {
            return Err(CaseError::MissingTensor(format!("{name}.{place}")));
        }
    }
    Ok(found.into_values().collect())
}

/// Reads the tensors of a safetensors file by name, and ignores its metadata. The file may have at most `most` bytes.
///
/// # Errors
/// As for [`read_file`]; [`CaseError`] if it is no such file, has a name twice, or an element type that CANN does not
/// have.
pub fn read_tensors(path: impl AsRef<Path>, most: u64) -> Result<BTreeMap<String, CaseTensor>, CaseError> {
    let file = read_file(path, most)?;
    let header = Header::read(&file)?;
    let tensor = |(name, info): (&String, &TensorInfo)| {
        let TensorInfo { dtype, shape, .. } = info;
        let dtype =
            from_file(*dtype).ok_or_else(|| CaseError::Dtype { tensor: name.clone(), dtype: format!("{dtype:?}") })?;
        let bytes = header.bytes(&file, info).to_vec();
        Ok((name.clone(), CaseTensor::new(dtype, shape, bytes)?))
    };
    header.tensors.iter().map(tensor).collect()
}
