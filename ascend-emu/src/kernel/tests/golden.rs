//! Golden cases of FlashAttentionScore: calls with data and expected outputs, one in each `safetensors` file.
//!
//! The case reader of `ascend-attention` does not serve here: it depends on the crate whose unit tests these are.

use ascend_spec::operator::{Kind, OwnedValue};
use ascend_spec::ops::flash_attention_score::{Arguments, Parameter, Version};
use ascend_spec::{DType, TensorDesc};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// A call with its data.
#[derive(Debug)]
pub(super) struct Golden {
    pub(super) name: String,
    pub(super) version: Version,
    pub(super) arguments: Arguments<TensorDesc>,
    /// The bytes of each tensor; outputs are poisoned, and a compressed mask is left out.
    pub(super) data: HashMap<Parameter, Vec<u8>>,
    /// The elements of each output, NaN where the operator promises none.
    pub(super) expected: HashMap<Parameter, Vec<f32>>,
    metadata: HashMap<String, String>,
}

/// The folder of the repository's files.
pub(super) fn own() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/train")
}

/// The files of the repository, and those of the larger collection that `ASCEND_VECTORS` names.
pub(super) fn files() -> Vec<PathBuf> {
    let more = env::var_os("ASCEND_VECTORS").map(|folder| Path::new(&folder).join("train"));
    let folders = [Some(own()), more].into_iter().flatten();
    let mut files: Vec<PathBuf> = folders
        .filter(|folder| folder.is_dir())
        .flat_map(|folder| fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .collect();
    files.sort();
    files
}

/// Number of files that name one of the operators, found without reading them as cases.
pub(super) fn naming(files: &[PathBuf], operators: &[&str]) -> usize {
    let named = |path: &&PathBuf| {
        let bytes = fs::read(path).unwrap();
        let header = SafeTensors::read_metadata(&bytes).unwrap().0;
        let text = String::from_utf8_lossy(&bytes[8..8 + header]);
        (operators.iter()).any(|operator| text.contains(&format!("\"{operator}\"")))
    };
    files.iter().filter(named).count()
}

impl Golden {
    /// The call in a file; `None` if it is one of another operator.
    pub(super) fn read(path: &Path) -> Option<Golden> {
        let bytes = fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        let packed = match metadata["op"].as_str() {
            "flash_attention_score" => false,
            "flash_attention_varlen_score" => true,
            _ => return None,
        };
        let number = metadata["op_version"].parse().unwrap();
        let mut golden = Golden {
            name: metadata["name"].clone(),
            version: Version::numbered(packed, number).unwrap(),
            arguments: Arguments::default(),
            data: HashMap::new(),
            expected: HashMap::new(),
            metadata,
        };
        for &parameter in Parameter::ALL {
            if let Some(text) = golden.metadata.get(parameter.name()) {
                let value = value(parameter.info().kind, text);
                golden.arguments.set_value(parameter, value).unwrap();
            }
        }
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        // Inputs first: an output has the query's type.
        names.sort_by_key(|name| Parameter::from_name(name).is_some_and(Parameter::is_output));
        for name in names {
            let tensor = file.tensor(name).unwrap();
            let parameter = Parameter::from_name(name).unwrap();
            let shape: Vec<i64> = tensor.shape().iter().map(|&size| size as i64).collect();
            if parameter.is_output() {
                golden.expect(parameter, &shape, tensor.data());
            } else {
                let desc = TensorDesc::contiguous(dtype(tensor.dtype()), &shape);
                golden.arguments.set_tensor(parameter, desc.unwrap());
                golden.data.insert(parameter, tensor.data().to_vec());
            }
        }
        if golden.metadata["atten_mask_kind"] == "compressed" {
            let rows = if golden.arguments.sparse_mode == 6 { 3072 } else { 2048 };
            let desc = TensorDesc::contiguous(DType::Bool, &[rows, 2048]);
            golden.arguments.set_tensor(Parameter::AttenMask, desc.unwrap());
        }
        Some(golden)
    }

    fn expect(&mut self, parameter: Parameter, shape: &[i64], data: &[u8]) {
        let own = self.arguments.query.map(|query| query.dtype);
        let dtype = match parameter {
            Parameter::AttentionOut => own.unwrap_or(DType::Float),
            _ => DType::Float,
        };
        let desc = TensorDesc::contiguous(dtype, shape).unwrap();
        self.arguments.set_tensor(parameter, desc);
        let (numbers, _) = data.as_chunks::<4>();
        let numbers: Vec<f32> = numbers.iter().map(|&of| f32::from_le_bytes(of)).collect();
        let size = dtype.size().unwrap();
        self.data.insert(parameter, vec![0xff; numbers.len() * size]);
        self.expected.insert(parameter, numbers);
    }

    fn tolerance(&self, name: &str) -> f32 {
        self.metadata.get(name).map_or(0.0, |text| text.parse().unwrap())
    }

    /// Compares outputs, given as bytes of their own type, with what is expected of them.
    pub(super) fn compare(&self, found: &dyn Fn(Parameter) -> Vec<u8>) -> Result<(), String> {
        let own = |parameter| self.arguments.tensor(parameter).map(|desc| desc.dtype);
        self.compare_elements(&|parameter| elements(own(parameter).unwrap_or(DType::Float), &found(parameter)))
    }

    /// Compares the elements of outputs with what is expected of them.
    pub(super) fn compare_elements(&self, found: &dyn Fn(Parameter) -> Vec<f32>) -> Result<(), String> {
        for (&parameter, expected) in &self.expected {
            let found = found(parameter);
            let (atol, rtol) = match parameter {
                Parameter::AttentionOut => ("atol", "rtol"),
                _ => ("softmax_atol", "softmax_rtol"),
            };
            let (atol, rtol) = (self.tolerance(atol), self.tolerance(rtol));
            if found.len() != expected.len() {
                return Err(format!("{parameter}: {} elements", found.len()));
            }
            for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let near = (found - expected).abs() <= atol + rtol * expected.abs();
                if !(expected.is_nan() || found == expected || near) {
                    return Err(format!("{parameter} {at}: {found}, expected {expected}"));
                }
            }
        }
        Ok(())
    }

    /// The elements of an output that the operator promises nothing about.
    pub(super) fn unspecified(&self, parameter: Parameter) -> impl Iterator<Item = usize> + '_ {
        let expected = self.expected.get(&parameter).into_iter().flatten();
        let numbered = expected.enumerate().filter(|(_, number)| number.is_nan());
        numbered.map(|(at, _)| at)
    }
}

fn value(kind: Kind, text: &str) -> OwnedValue {
    match kind {
        Kind::Int | Kind::Int8 => OwnedValue::Int(text.parse().unwrap()),
        Kind::Float => OwnedValue::Float(text.parse().unwrap()),
        Kind::Ints => {
            let ints = text.trim_matches(['[', ']']).split(',').map(str::trim);
            let ints = ints.filter(|int| !int.is_empty());
            OwnedValue::Ints(Some(ints.map(|int| int.parse().unwrap()).collect()))
        }
        _ => OwnedValue::Text(Some(text.to_owned())),
    }
}

fn dtype(of: Dtype) -> DType {
    match of {
        Dtype::F16 => DType::Float16,
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::Float,
        Dtype::BOOL => DType::Bool,
        Dtype::U8 => DType::UInt8,
        other => panic!("{other:?}"),
    }
}

/// Numbers of bytes.
pub(super) fn elements(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.as_chunks::<2>().0.iter().copied();
    match dtype {
        DType::Float16 => halves().map(|of| f16::from_le_bytes(of).to_f32()).collect(),
        DType::Bf16 => halves().map(|of| bf16::from_le_bytes(of).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&of| f32::from_le_bytes(of)).collect(),
    }
}
