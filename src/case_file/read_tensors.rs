//! Tensors of a safetensors file that is no case.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::TensorInfo;

use super::header::Header;
use super::tensor::from_file;
use super::{CaseError, CaseTensor, read_file};

/// Reads the tensors of a safetensors file by name, and ignores its metadata. The file may have at most `most` bytes.
///
/// # Errors
/// As for [`read_file`]; [`CaseError`] if it is no such file, has a name twice, or an element type that CANN does not
/// have.
pub fn read_tensors(
    path: impl AsRef<Path>,
    most: u64,
) -> Result<BTreeMap<String, CaseTensor>, CaseError> {
    let file = read_file(path, most)?;
    let header = Header::read(&file)?;
    let tensor = |(name, info): &(String, TensorInfo)| {
        let TensorInfo { dtype, shape, .. } = info;
        let dtype = from_file(*dtype).ok_or_else(|| CaseError::Dtype {
            tensor: name.clone(),
            dtype: format!("{dtype:?}"),
        })?;
        let bytes = header.bytes(&file, info).to_vec();
        Ok((name.clone(), CaseTensor::new(dtype, shape, bytes)?))
    };
    header.tensors.iter().map(tensor).collect()
}
