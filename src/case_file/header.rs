//! The header of a safetensors file, read so that nothing in it is lost.
//!
//! The `safetensors` crate keeps the last of two equal names and adds sizes unchecked before it compares them with the
//! file. A case must not be read two ways and a reader must not panic, so the header is read here, with the crate's
//! types and its check of offsets, shapes and sizes.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::error::CaseError;
use super::json::UniqueNames;

/// Key of the free-form part of a file's header.
const METADATA: &str = "__metadata__";
/// Bytes of the number in front of the header.
const PREFIX: usize = 8;

/// The longest header that is read: values take several times as much memory.
const MOST_HEADER: usize = 16 << 20;

/// Names and values of a header, and where the data begins.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    data: usize,
}

impl Header {
    /// Reads and checks the header of a file.
    pub(super) fn read(file: &[u8]) -> Result<Self, CaseError> {
        let broken = |text: &str| CaseError::NotSafetensors(text.to_owned());
        let (prefix, rest) = file
            .split_first_chunk::<PREFIX>()
            .ok_or_else(|| broken(&format!("{} bytes, where its first 8 say how long the header is", file.len())))?;
        let length = u64::from_le_bytes(*prefix);
        let header = usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
            broken(&format!(
                "its first 8 bytes say that the header has {length} bytes, but only {} follow: the file is of \
                     another kind, or was cut off",
                rest.len()
            ))
        })?;
        if header.len() > MOST_HEADER {
            return Err(broken(&format!("its header has {length} bytes, more than {MOST_HEADER}")));
        }
        let Entries { metadata, tensors } = serde_json::from_slice(header).map_err(|error| entries_error(&error))?;
        let tensors = tensors.into_iter().map(|(name, info)| {
            let info = serde_json::from_value(info).map_err(|error| entries_error(&format_args!("{name}: {error}")));
            Ok((name, info?))
        });
        let tensors = tensors.collect::<Result<BTreeMap<String, TensorInfo>, CaseError>>()?;
        let UniqueNames { repeated } = serde_json::from_slice(header).map_err(|error| entries_error(&error))?;
        if let Some(name) = repeated {
            return Err(CaseError::Duplicate(name));
        }
        let mut sorted: Vec<_> = tensors.clone().into_iter().collect();
        sorted.sort_by_key(|(_, info)| info.data_offsets);
        let end = sorted.last().map_or(0, |(_, info)| info.data_offsets.1);
        Metadata::new(None, sorted).map_err(|error| CaseError::NotSafetensors(error.to_string()))?;
        if end != rest.len() - header.len() {
            return Err(broken(&format!(
                "{} bytes of data, where the header describes {end}: the file was cut off, or something was added",
                rest.len() - header.len()
            )));
        }
        Ok(Self { metadata, tensors, data: PREFIX + header.len() })
    }

    /// The bytes of a tensor of `file`, the file that this header was read from.
    pub(super) fn bytes<'a>(&self, file: &'a [u8], info: &TensorInfo) -> &'a [u8] {
        let (start, end) = info.data_offsets;
        let range: Range<usize> = self.data.saturating_add(start)..self.data.saturating_add(end);
        // The check above has shown that the range is within the file.
        file.get(range).unwrap_or_default()
    }
}

/// Makes the content of a file from metadata and tensors: equal contents give equal files.
pub(super) fn write(
    metadata: &BTreeMap<&str, String>,
    tensors: &BTreeMap<String, (safetensors::Dtype, &[usize], &[u8])>,
) -> Result<Vec<u8>, CaseError> {
    let json = |error: serde_json::Error| CaseError::NotSafetensors(error.to_string());
    // Widest elements first keeps each tensor aligned.
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, (dtype, ..))| std::cmp::Reverse(*dtype));
    let mut header = format!("{{\"{METADATA}\":{}", serde_json::to_string(metadata).map_err(json)?);
    let mut end = 0usize;
    for (name, (dtype, shape, bytes)) in &order {
        let start = end;
        end = end.saturating_add(bytes.len());
        let info = TensorInfo { dtype: *dtype, shape: shape.to_vec(), data_offsets: (start, end) };
        header.push(',');
        header += &serde_json::to_string(name).map_err(json)?;
        header.push(':');
        header += &serde_json::to_string(&info).map_err(json)?;
    }
    header.push('}');
    while !header.len().is_multiple_of(PREFIX) {
        header.push(' ');
    }
    let mut file = Vec::with_capacity(PREFIX + header.len() + end);
    file.extend_from_slice(&(header.len() as u64).to_le_bytes());
    file.extend_from_slice(header.as_bytes());
    for (_, (_, _, bytes)) in &order {
        file.extend_from_slice(bytes);
    }
    Ok(file)
}

fn entries_error(error: &impl fmt::Display) -> CaseError {
    // The message may quote any part of the file.
    let error = super::error::shortened(&error.to_string());
    CaseError::NotSafetensors(format!("the header cannot be read: {error:?}"))
}

/// The whole header. Of two equal names it keeps the last.
#[derive(Deserialize)]
#[serde(expecting = "an object of tensors")]
struct Entries {
    #[serde(rename = "__metadata__", default)]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, serde_json::Value>,
}
