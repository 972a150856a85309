//! Recorded calls of the operator: shapes, dtypes, attributes and the operator's own verdict, one JSON object a line.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Release, Soc, Target, TensorDesc, Violation};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// One recorded call, owning what a [`FiaCall`] borrows.
pub(crate) struct Recorded {
    pub(crate) id: String,
    /// The operator's verdict for each target that the call was recorded for.
    pub(crate) verdicts: Vec<(Target, bool)>,
    /// CANN's status of a rejected call, where it is certain: for every release, or for one each.
    statuses: Vec<(Option<Cann>, i64)>,
    /// The version of the operator that the verdicts are of, where the line names one.
    version: Option<Version>,
    tensors: BTreeMap<String, Vec<TensorDesc>>,
    lengths: BTreeMap<String, Vec<i64>>,
    outputs: BTreeMap<String, TensorDesc>,
    attrs: Value,
}

fn desc(value: &Value) -> TensorDesc {
    let dims: Vec<i64> = value["shape"].as_array().unwrap().iter().map(|d| d.as_i64().unwrap()).collect();
    let dtype = DType::from_name(value["dtype"].as_str().unwrap()).unwrap();
    let packed = TensorDesc::packed(dtype, Dims::new(&dims).unwrap());
    match value["strides"].as_array() {
        None => packed,
        Some(strides) => {
            let strides: Vec<_> = strides.iter().map(|s| s.as_i64().unwrap()).collect();
            let strides = Dims::new(&strides).unwrap();
            TensorDesc { strides, ..packed }
        }
    }
}

/// CANN's statuses of a rejected call: one number for every release, or an object from release to number.
fn statuses(case: &Value) -> Vec<(Option<Cann>, i64)> {
    match &case["status"] {
        Value::Object(releases) => {
            releases.iter().map(|(release, status)| (Some(known(release)), status.as_i64().unwrap())).collect()
        }
        status => status.as_i64().map(|status| (None, status)).into_iter().collect(),
    }
}

fn known(version: &str) -> Cann {
    match Cann::of_version(version) {
        Some(Release::Known(cann)) => cann,
        other => panic!("{version}: {other:?}"),
    }
}

impl Recorded {
    /// Reads one line; `None` for a call that no caller of the C API can make.
    pub(crate) fn read(line: &str) -> Option<Self> {
        let case: Value = serde_json::from_str(line).unwrap();
        if case["artefact"] == Value::Bool(true) {
            return None;
        }
        let mut recorded = Recorded {
            id: case["id"].as_str().unwrap().to_owned(),
            verdicts: verdicts(&case),
            statuses: statuses(&case),
            version: case["op_version"].as_u64().map(|number| {
                let named = |version: &Version| u64::from(version.number()) == number;
                Version::ALL.into_iter().find(named).unwrap()
            }),
            tensors: BTreeMap::new(),
            lengths: BTreeMap::new(),
            outputs: BTreeMap::new(),
            attrs: case["attrs"].clone(),
        };
        for (name, input) in case["inputs"].as_object().unwrap() {
            match input {
                Value::Array(list) if list.iter().all(Value::is_i64) => {
                    let values = list.iter().map(|v| v.as_i64().unwrap()).collect();
                    recorded.lengths.insert(name.clone(), values);
                }
                Value::Array(list) => {
                    recorded.tensors.insert(name.clone(), list.iter().map(desc).collect());
                }
                one => {
                    recorded.tensors.insert(name.clone(), vec![desc(one)]);
                }
            }
        }
        for (name, output) in case["outputs"].as_object().unwrap() {
            recorded.outputs.insert(name.clone(), desc(output));
        }
        Some(recorded)
    }

    /// Calls `with` with the call after each of its sizes, lengths and attributes in turn became each of `values`.
    pub(crate) fn each_mutation(&mut self, values: &[i64], with: &mut dyn FnMut(&Self)) {
        let tensors: Vec<_> = self.tensors.iter().map(|(name, list)| (name.clone(), list.clone())).collect();
        for (name, list) in tensors {
            let Some(first) = list.first().copied() else {
                continue;
            };
            for axis in 0..first.shape.rank() {
                for &value in values {
                    let mut changed = list.clone();
                    changed[0] = TensorDesc::packed(first.dtype, first.shape.with(axis, value));
                    self.tensors.insert(name.clone(), changed);
                    with(self);
                }
            }
            self.tensors.insert(name, list);
        }
        let lengths: Vec<_> = self.lengths.iter().map(|(name, all)| (name.clone(), all.clone())).collect();
        for (name, all) in lengths {
            for at in 0..all.len().min(2) {
                for &value in values {
                    let mut changed = all.clone();
                    changed[at] = value;
                    self.lengths.insert(name.clone(), changed);
                    with(self);
                }
            }
            self.lengths.insert(name, all);
        }
        let Value::Object(attrs) = self.attrs.clone() else {
            return;
        };
        for (name, old) in attrs.iter().filter(|(_, old)| old.is_i64()) {
            for &value in values {
                self.attrs[name] = value.into();
                with(self);
            }
            self.attrs[name] = old.clone();
        }
    }

    /// CANN's status of the call on a release that rejects it, where it is certain.
    pub(crate) fn status(&self, cann: Cann) -> Option<i64> {
        let holds = |of: &Option<Cann>| of.is_none_or(|of| of == cann);
        let mut all = self.statuses.iter().filter(|(of, _)| holds(of));
        all.next().map(|&(_, status)| status)
    }

    /// The contract's verdict for `target`, by the oldest version that can express the call there.
    pub(crate) fn check(&self, target: Target) -> Result<(), Violation> {
        self.asked(target, |call, version| call.check(version, target).map(|_| ()))
    }

    /// Who takes a call that `target` refuses.
    pub(crate) fn taken_by(&self, target: Target) -> Option<Target> {
        self.asked(target, |call, version| call.taken_by(version, target, &[]))
    }

    /// Asks about the call, and the oldest version of those tested that can express it for `target`.
    pub(crate) fn asked<T>(&self, target: Target, ask: impl FnOnce(&FiaCall<'_>, Version) -> T) -> T {
        let tensor = |name: &str| self.tensors.get(name).and_then(|list| list.first()).copied();
        let list = |name: &str| self.tensors.get(name).map_or(&[][..], Vec::as_slice);
        let lengths = |name: &str| self.lengths.get(name).map(Vec::as_slice);
        let int = |name: &str| self.attrs[name].as_i64().unwrap_or(0);
        let call = FiaCall {
            query: tensor("query"),
            key: list("key"),
            value: list("value"),
            pse_shift: tensor("pse_shift"),
            atten_mask: tensor("atten_mask"),
            actual_seq_lengths: lengths("actual_seq_lengths"),
            actual_seq_lengths_kv: lengths("actual_seq_lengths_kv"),
            deq_scale1: tensor("deq_scale1"),
            quant_scale1: tensor("quant_scale1"),
            deq_scale2: tensor("deq_scale2"),
            quant_scale2: tensor("quant_scale2"),
            quant_offset2: tensor("quant_offset2"),
            antiquant_scale: tensor("antiquant_scale"),
            antiquant_offset: tensor("antiquant_offset"),
            block_table: tensor("block_table"),
            query_padding_size: tensor("query_padding_size"),
            kv_padding_size: tensor("kv_padding_size"),
            key_antiquant_scale: tensor("key_antiquant_scale"),
            key_antiquant_offset: tensor("key_antiquant_offset"),
            value_antiquant_scale: tensor("value_antiquant_scale"),
            value_antiquant_offset: tensor("value_antiquant_offset"),
            key_shared_prefix: tensor("key_shared_prefix"),
            value_shared_prefix: tensor("value_shared_prefix"),
            actual_shared_prefix_len: lengths("actual_shared_prefix_len"),
            query_rope: tensor("query_rope"),
            key_rope: tensor("key_rope"),
            key_rope_antiquant_scale: tensor("key_rope_antiquant_scale"),
            dequant_scale_query: tensor("dequant_scale_query"),
            learnable_sink: tensor("learnable_sink"),
            num_heads: int("num_heads"),
            scale: self.attrs["scale"].as_f64().unwrap_or(1.0),
            pre_tokens: int("pre_tokens"),
            next_tokens: int("next_tokens"),
            num_key_value_heads: int("num_key_value_heads"),
            sparse_mode: int("sparse_mode"),
            inner_precise: int("inner_precise"),
            block_size: int("block_size"),
            antiquant_mode: int("antiquant_mode"),
            softmax_lse_flag: self.attrs["softmax_lse_flag"] == Value::Bool(true),
            key_antiquant_mode: int("key_antiquant_mode"),
            value_antiquant_mode: int("value_antiquant_mode"),
            query_quant_mode: int("query_quant_mode"),
            q_start_idx: lengths("q_start_idx"),
            kv_start_idx: lengths("kv_start_idx"),
            pse_type: int("pse_type"),
            attention_out: self.outputs.get("attention_out").copied(),
            softmax_lse: self.outputs.get("softmax_lse").copied(),
            ..FiaCall::new(self.attrs["input_layout"].as_str().unwrap_or(""))
        };
        let oldest = Version::oldest_for(&call);
        let mut versions = Version::ALL.into_iter();
        let version = versions.find(|version| *version >= oldest.max(Version::V4) && version.runs_on(target));
        ask(&call, self.version.or(version).unwrap_or(oldest))
    }
}

/// Without a product and a release a line holds for the snapshot on Atlas A2.
fn verdicts(case: &Value) -> Vec<(Target, bool)> {
    let soc = case["soc"].as_str().map_or(Soc::AtlasA2, |name| Soc::from_name(name).unwrap());
    match &case["expect"] {
        Value::Object(releases) => {
            releases.iter().map(|(release, verdict)| (Target::new(soc, known(release)), verdict == "accept")).collect()
        }
        verdict => {
            let cann = case["release"].as_str().map_or(Cann::V8_1, known);
            vec![(Target::new(soc, cann), verdict == "accept")]
        }
    }
}

/// The calls of one file.
pub(crate) fn calls_of(file: &Path) -> Vec<Recorded> {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().filter_map(Recorded::read).collect()
}

/// The calls of every file in `folder`.
pub(crate) fn calls(folder: &Path) -> Vec<Recorded> {
    let mut calls = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            calls.extend(calls_of(&path));
        }
    }
    calls
}

/// The repo's own sample: at least one call for each rule that a recorded call breaks.
pub(crate) fn sample() -> Vec<Recorded> {
    calls(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/params"))
}
