//! Case files to read, good and bad ones.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses its part")]

use ascend_attention::DType;
use std::path::Path;

use ascend_attention::case::{AttentionCase, Case, CaseError, CaseTensor, MaskSource, Parameter, Tolerance};
use ascend_attention::spec::Cann;
use ascend_attention::spec::operator::Kind;
use ascend_attention::spec::ops::fused_infer_attention_score::Arguments;

/// Metadata that every case has.
pub const BASE: &[(&str, &str)] =
    &[("format", "ascend-attention-case"), ("version", "1"), ("op", "fused_infer_attention_score")];
/// Tensors that every case has: name, dtype, shape, bytes.
pub const TENSORS: &[(&str, &str, &[u64], usize)] =
    &[("query", "F16", &[1, 1, 2, 2], 8), ("key", "F16", &[1, 1, 3, 2], 12), ("value", "F16", &[1, 1, 3, 2], 12)];

/// A file of these entries, whether they make sense or not.
pub fn file(metadata: &[(&str, &str)], tensors: &[(&str, &str, &[u64], usize)]) -> Vec<u8> {
    let entries: Vec<String> =
        metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
    let mut header = format!("{{\"__metadata__\":{{{}}}", entries.join(","));
    let mut end = 0;
    for (name, dtype, shape, bytes) in tensors {
        header += &format!(
            ",{}:{{\"dtype\":{},\"shape\":{shape:?},\"data_offsets\":[{end},{}]}}",
            quoted(name),
            quoted(dtype),
            end + bytes
        );
        end += bytes;
    }
    raw(&(header + "}"), end)
}

pub fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

pub fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

pub fn tensor(dtype: DType, shape: &[usize]) -> CaseTensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| (i % 5) as f32 - 2.0).collect();
    CaseTensor::from_f32(dtype, shape, &values).unwrap()
}

/// The case of FusedInferAttentionScore in a file of this content.
pub fn from_bytes(file: &[u8]) -> Result<AttentionCase, CaseError> {
    Case::from_bytes(file)?.attention()
}

/// The case of FusedInferAttentionScore in a file.
pub fn read(path: impl AsRef<Path>) -> Result<AttentionCase, CaseError> {
    Case::read(path)?.attention()
}

/// A case that uses every part of the format.
pub fn full() -> AttentionCase {
    let mut case = AttentionCase::new("full \"quoted\" \u{3b1}", Arguments::default());
    case.note = "a note\nof two lines".to_owned();
    case.arguments = Arguments {
        input_layout: "BNSD".to_owned(),
        scale: 0.1,
        softmax_lse_flag: true,
        num_heads: 4,
        num_key_value_heads: 2,
        sparse_mode: 1,
        pre_tokens: -7,
        next_tokens: i64::MAX,
        inner_precise: 2,
        block_size: 16,
        antiquant_mode: 1,
        key_antiquant_mode: 3,
        value_antiquant_mode: 4,
        query_quant_mode: 5,
        pse_type: 3,
        actual_seq_lengths: Some(vec![]),
        actual_seq_lengths_kv: Some(vec![3, i64::MIN]),
        actual_shared_prefix_len: Some(vec![0]),
        q_start_idx: Some(vec![-1]),
        kv_start_idx: Some(vec![4]),
        ..Arguments::default()
    };
    case.arguments.key = vec![tensor(DType::Bf16, &[1, 2, 3, 8]), tensor(DType::Bf16, &[1, 2, 5, 8])];
    case.arguments.value = vec![tensor(DType::Bf16, &[1, 2, 3, 8])];
    let inputs = Parameter::tensors().filter(|parameter| parameter.info().kind == Kind::Tensor);
    for (parameter, dtype) in inputs.zip([DType::Float16, DType::Int8].iter().cycle()) {
        case.arguments.set_tensor(parameter, tensor(*dtype, &[2, 3]));
    }
    case.arguments.set_tensor(Parameter::BlockTable, tensor(DType::Int32, &[2, 0]));
    case.arguments.set_tensor(Parameter::KvPaddingSize, tensor(DType::Int64, &[]));
    case.mask = MaskSource::Tensor;
    let out = CaseTensor::from_f32(DType::Float, &[2], &[f32::NAN, -0.0]).unwrap();
    case.expected = vec![("attention_out", out), ("softmax_lse", tensor(DType::Float, &[1]))];
    case.tolerance = Some(Tolerance { atol: 1e-3, rtol: 0.0 });
    case.rms_rtol = Some(0.25);
    case.soc_name = Some("Ascend950PR_9599".to_owned());
    case.cann = Some(Cann::V9_1);
    case.op_version = Some(5);
    case.out_dtype = Some(DType::Bf16);
    case
}

/// A call that the operator takes and that this crate does not compute: scales of single tokens, with a shared prefix
/// that has none.
pub fn unsupported() -> AttentionCase {
    let vectors = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors"));
    let path = vectors.join("quantised/004_split_token_token_decode.safetensors");
    let mut case = read(path).unwrap();
    let prefix = CaseTensor::new(DType::Int8, &[1, 2, 3, 64], vec![1; 2 * 3 * 64]).unwrap();
    case.arguments.set_tensor(Parameter::KeySharedPrefix, prefix.clone());
    case.arguments.set_tensor(Parameter::ValueSharedPrefix, prefix);
    case
}
