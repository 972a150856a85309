//! Calls described by JSON lines, or by the headers of case files.

use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, Version};
use ascend_spec::{DType, Dims, TensorDesc};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// One described call, owning what a [`FlashAttentionCall`] borrows.
pub(super) struct Described {
    pub(super) id: String,
    pub(super) version: Version,
    /// Status of a rejected call.
    pub(super) status: Option<i64>,
    /// Whether rows without keys are corrected, where it is known.
    pub(super) corrects: Option<bool>,
    /// Whether packed sequences are run as a batch, where it is known.
    pub(super) as_batch: Option<bool>,
    tensors: BTreeMap<String, TensorDesc>,
    lists: BTreeMap<String, Vec<i64>>,
    attrs: Map<String, Value>,
}

fn integers(value: &Value) -> Vec<i64> {
    let all = value.as_array().unwrap();
    all.iter().map(|entry| entry.as_i64().unwrap()).collect()
}

fn desc(shape: &Value, dtype: &str) -> TensorDesc {
    let dims = Dims::new(&integers(shape)).unwrap();
    TensorDesc::packed(DType::from_name(dtype).unwrap(), dims)
}

impl Described {
    /// Reads one line of a file of parameter cases.
    fn line(line: &str) -> Self {
        let case: Value = serde_json::from_str(line).unwrap();
        let mut tensors = BTreeMap::new();
        let mut lists = BTreeMap::new();
        let objects = ["inputs", "outputs"].map(|part| case[part].as_object().unwrap());
        for (name, given) in objects.into_iter().flatten() {
            if given.is_array() {
                lists.insert(name.clone(), integers(given));
            } else {
                let of = desc(&given["shape"], given["dtype"].as_str().unwrap());
                tensors.insert(name.clone(), of);
            }
        }
        let number = case["op_version"].as_u64().unwrap();
        Described {
            id: case["id"].as_str().unwrap().to_owned(),
            version: version(case["op"].as_str().unwrap(), number).unwrap(),
            status: (case["expect"] == "reject").then(|| case["status"].as_i64().unwrap()),
            corrects: case["invalid_row_correction"].as_bool(),
            as_batch: case["run_as_bsh"].as_bool(),
            tensors,
            lists,
            attrs: case["attrs"].as_object().unwrap().clone(),
        }
    }

    /// Reads the header of a case file; `None` if it is one of another operator.
    fn case(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let metadata = header["__metadata__"].as_object().unwrap();
        let text = |name: &str| metadata.get(name).and_then(Value::as_str);
        let version = version(text("op").unwrap(), text("op_version")?.parse().unwrap())?;
        let mut tensors: BTreeMap<String, TensorDesc> = header
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .map(|(name, of)| {
                let of = desc(&of["shape"], of["dtype"].as_str().unwrap());
                (name.clone(), of)
            })
            .collect();
        if text("atten_mask_kind") == Some("compressed") {
            let rows = if text("sparse_mode") == Some("6") { 3072 } else { 2048 };
            let mask = TensorDesc::packed(DType::Bool, Dims::of([rows, 2048]));
            tensors.insert("atten_mask".to_owned(), mask);
        }
        // Expected outputs are FLOAT whatever the operator's are.
        let dtype = tensors["query"].dtype;
        tensors.get_mut("attention_out").unwrap().dtype = dtype;
        let mut lists = BTreeMap::new();
        let mut attrs = Map::new();
        for (name, value) in metadata {
            let value = value.as_str().unwrap();
            match serde_json::from_str(value) {
                Ok(list @ Value::Array(_)) => {
                    lists.insert(name.clone(), integers(&list));
                }
                Ok(number @ Value::Number(_)) => {
                    attrs.insert(name.clone(), number);
                }
                _ => {
                    attrs.insert(name.clone(), value.into());
                }
            }
        }
        Some(Described {
            id: path.file_name().unwrap().to_string_lossy().into_owned(),
            version,
            status: (text("expect") == Some("reject")).then(|| text("expect_status").unwrap().parse().unwrap()),
            corrects: None,
            as_batch: None,
            tensors,
            lists,
            attrs,
        })
    }

    /// Calls `with` with the call after each of its sizes, list entries and integers in turn became each of `values`.
    pub(super) fn each_mutation(&mut self, values: &[i64], with: &mut dyn FnMut(&Self)) {
        for (name, old) in self.tensors.clone() {
            for axis in 0..old.shape.rank() {
                for &value in values {
                    let changed = TensorDesc::packed(old.dtype, old.shape.with(axis, value));
                    self.tensors.insert(name.clone(), changed);
                    with(self);
                }
            }
            self.tensors.insert(name, old);
        }
        for (name, old) in self.lists.clone() {
            for at in 0..old.len() {
                for &value in values {
                    let mut changed = old.clone();
                    changed[at] = value;
                    self.lists.insert(name.clone(), changed);
                    with(self);
                }
            }
            self.lists.insert(name, old);
        }
        for (name, old) in self.attrs.clone() {
            for &value in values {
                if old.is_i64() {
                    self.attrs.insert(name.clone(), value.into());
                    with(self);
                }
            }
            self.attrs.insert(name, old);
        }
    }

    /// The call.
    pub(super) fn call(&self) -> FlashAttentionCall<'_> {
        let tensor = |name: &str| self.tensors.get(name).copied();
        let list = |name: &str| self.lists.get(name).map(Vec::as_slice);
        let text = |name: &str| self.attrs.get(name).and_then(Value::as_str);
        let plain = FlashAttentionCall::new("");
        let int = |name: &str, default| self.attrs.get(name).map_or(default, |of| of.as_i64().unwrap());
        let float = |name: &str, default| self.attrs.get(name).map_or(default, |of| of.as_f64().unwrap());
        FlashAttentionCall {
            query: tensor("query"),
            key: tensor("key"),
            value: tensor("value"),
            query_rope: tensor("query_rope"),
            key_rope: tensor("key_rope"),
            real_shift: tensor("real_shift"),
            drop_mask: tensor("drop_mask"),
            padding_mask: tensor("padding_mask"),
            atten_mask: tensor("atten_mask"),
            sink: tensor("sink"),
            prefix: list("prefix"),
            actual_seq_lengths: list("actual_seq_lengths"),
            actual_seq_lengths_kv: list("actual_seq_lengths_kv"),
            q_start_idx: list("q_start_idx"),
            kv_start_idx: list("kv_start_idx"),
            scale: float("scale", plain.scale),
            keep_prob: float("keep_prob", plain.keep_prob),
            pre_tokens: int("pre_tokens", plain.pre_tokens),
            next_tokens: int("next_tokens", plain.next_tokens),
            num_heads: int("num_heads", plain.num_heads),
            input_layout: text("input_layout"),
            inner_precise: int("inner_precise", plain.inner_precise),
            sparse_mode: int("sparse_mode", plain.sparse_mode),
            pse_type: int("pse_type", plain.pse_type),
            softmax_out_layout: text("softmax_out_layout"),
            softmax_max: tensor("softmax_max"),
            softmax_sum: tensor("softmax_sum"),
            softmax_out: tensor("softmax_out"),
            attention_out: tensor("attention_out"),
            ..plain
        }
    }
}

fn version(op: &str, number: u64) -> Option<Version> {
    let number = u8::try_from(number).unwrap();
    match op {
        "flash_attention_score" => Version::numbered(false, number),
        "flash_attention_varlen_score" => Version::numbered(true, number),
        _ => None,
    }
}

/// The calls of a file of parameter cases.
pub(super) fn lines(file: &Path) -> Vec<Described> {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().map(Described::line).collect()
}

/// The calls of this operator among the case files of a folder.
pub(super) fn cases(folder: &Path) -> Vec<Described> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|of| of == "safetensors"))
        .collect();
    paths.sort();
    paths.iter().filter_map(|path| Described::case(path)).collect()
}

/// The repo's own calls.
pub(super) fn sample() -> Vec<Described> {
    lines(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flash/sample.jsonl"))
}
