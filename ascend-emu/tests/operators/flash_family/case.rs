//! Golden cases: calls with their expected outputs.

use super::call::OnDevice;
use ascend_spec::operator::{Kind, OwnedValue, ParameterInfo};
use ascend_sys::bindings::aclDataType;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// One file.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) metadata: HashMap<String, String>,
    tensors: HashMap<String, (Dtype, Vec<i64>, Vec<u8>)>,
}

/// The golden cases of an operator: the repository's own, of which there are `own`, and those of the folder
/// `ASCEND_VECTORS`.
pub(crate) fn cases(op: &str, own: usize) -> Vec<Case> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let mut cases = cases_in(&root, op);
    assert_eq!(cases.len(), own, "{op}");
    if let Some(more) = std::env::var_os("ASCEND_VECTORS") {
        let more = cases_in(Path::new(&more), op);
        assert!(more.len() >= own, "{op}");
        cases.extend(more);
    }
    cases
}

fn cases_in(folder: &Path, op: &str) -> Vec<Case> {
    let files = std::fs::read_dir(folder.join("train")).unwrap();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let cases = files.iter().map(|path| Case::read(path));
    cases.filter(|case| case.metadata["op"] == op).collect()
}

impl Case {
    fn read(path: &Path) -> Case {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, of)| {
            let shape = of.shape().iter().map(|&dim| dim as i64).collect();
            (name.to_owned(), (of.dtype(), shape, of.data().to_vec()))
        });
        Case {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            metadata: header.metadata().clone().unwrap(),
            tensors: tensors.collect(),
        }
    }

    pub(crate) fn version(&self) -> u8 {
        self.metadata["op_version"].parse().unwrap()
    }

    /// The tensors of an input, uploaded: none, one, or those of a list.
    pub(crate) fn inputs(&self, name: &str) -> Vec<OnDevice> {
        let of = |name: &str| {
            let (dtype, shape, bytes) = self.tensors.get(name)?;
            Some(OnDevice::new(acl(*dtype), shape, bytes))
        };
        let one = of(name);
        let many = (0..).map_while(|index| of(&format!("{name}.{index}")));
        one.into_iter().chain(many).collect()
    }

    /// What is given to a parameter that is no tensor, `None` where it has its default.
    pub(crate) fn value(&self, info: &ParameterInfo) -> Option<OwnedValue> {
        let given = self.metadata.get(info.name)?;
        Some(match info.kind {
            Kind::Int | Kind::Int8 => OwnedValue::Int(given.parse().unwrap()),
            Kind::Float => OwnedValue::Float(given.parse().unwrap()),
            Kind::Flag => OwnedValue::Flag(given.parse().unwrap()),
            Kind::Text | Kind::OptionalText => OwnedValue::Text(Some(given.clone())),
            _ => {
                let list = given.trim_matches(['[', ']']).split(',');
                let ints = list.map(|int| int.trim().parse().unwrap());
                OwnedValue::Ints(Some(ints.collect()))
            }
        })
    }

    /// The operator's standard mask for a sparse mode, where the case has one: 1 above the diagonal.
    pub(crate) fn compressed_mask(&self) -> Option<OnDevice> {
        let kind = self.metadata.get("atten_mask_kind")?;
        (kind == "compressed").then(|| {
            let bytes: Vec<u8> = (0..2048 * 2048).map(|at| u8::from(at % 2048 > at / 2048)).collect();
            OnDevice::new(aclDataType::ACL_BOOL, &[2048, 2048], &bytes)
        })
    }

    /// An output that holds NaN, or -1, in each element.
    pub(crate) fn output(&self, name: &str, dtype: aclDataType) -> OnDevice {
        let shape = &self.tensors[name].1;
        let elements = shape.iter().product::<i64>() as usize;
        OnDevice::new(dtype, shape, &vec![0xff; elements * size(dtype)])
    }

    /// Compares what an output holds with what is expected of it.
    pub(crate) fn compare(&self, name: &str, output: &OnDevice, tolerance: [&str; 2]) {
        let [atol, rtol] = tolerance.map(|key| match self.metadata.get(key) {
            Some(given) => given.parse::<f64>().unwrap(),
            None => 0.0,
        });
        let want = numbers(aclDataType::ACL_FLOAT, &self.tensors[name].2);
        let bytes = want.len() * size(output.dtype);
        let got = numbers(output.dtype, &crate::bench::download::<u8>(output.at(), bytes));
        for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
            if want.is_nan() {
                continue;
            }
            let near = got == want || (got - want).abs() <= atol + rtol * want.abs();
            assert!(near, "{}: {name}[{at}] is {got}, not {want}", self.name);
        }
    }
}

/// Arguments of a golden case for an operator, with an output for each that is expected.
macro_rules! arguments {
    ($case:expr, $operator:path, $out_dtype:expr) => {{
        use $operator as operator;
        let case: &$crate::flash_family::case::Case = $case;
        let mut arguments = operator::Arguments::<$crate::flash_family::call::OnDevice>::default();
        for &parameter in operator::Parameter::ALL {
            let info = parameter.info();
            if info.kind.is_output() {
                let dtype = $out_dtype(info.name);
                arguments.set_tensor(parameter, case.output(info.name, dtype));
            } else if info.kind.is_tensor() {
                for tensor in case.inputs(info.name) {
                    arguments.set_tensor(parameter, tensor);
                }
            } else if let Some(value) = case.value(info) {
                arguments.set_value(parameter, value).unwrap();
            }
        }
        arguments
    }};
}

fn acl(dtype: Dtype) -> aclDataType {
    match dtype {
        Dtype::F16 => aclDataType::ACL_FLOAT16,
        Dtype::BF16 => aclDataType::ACL_BF16,
        Dtype::F32 => aclDataType::ACL_FLOAT,
        Dtype::I8 => aclDataType::ACL_INT8,
        Dtype::U8 => aclDataType::ACL_UINT8,
        Dtype::BOOL => aclDataType::ACL_BOOL,
        Dtype::I32 => aclDataType::ACL_INT32,
        Dtype::I64 => aclDataType::ACL_INT64,
        other => panic!("{other:?} in a case"),
    }
}

/// Bytes of an element.
pub(crate) fn size(dtype: aclDataType) -> usize {
    match dtype {
        aclDataType::ACL_FLOAT => 4,
        aclDataType::ACL_FLOAT16 | aclDataType::ACL_BF16 => 2,
        _ => 1,
    }
}

/// Elements as numbers.
pub(crate) fn numbers(dtype: aclDataType, bytes: &[u8]) -> Vec<f64> {
    let each = bytes.chunks(size(dtype));
    let number = |of: &[u8]| match (dtype, of) {
        (aclDataType::ACL_FLOAT, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (aclDataType::ACL_FLOAT16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (_, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        _ => f64::from(of[0] as i8),
    };
    each.map(number).collect()
}
