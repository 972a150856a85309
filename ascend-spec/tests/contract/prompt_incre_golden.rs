//! Golden cases of PromptFlashAttention and IncreFlashAttention, which the contract takes.

use super::prompt_incre::{TARGET, of};
use ascend_spec::ops::incre_flash_attention::{self as incre, IncreCall};
use ascend_spec::ops::prompt_flash_attention::{self as prompt, PromptCall};
use ascend_spec::{DType, Dims, TensorDesc, Violation};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A case file's header.
struct Header {
    file: String,
    tensors: BTreeMap<String, TensorDesc>,
    metadata: Map<String, Value>,
}

impl Header {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
        let tensors = tensors.map(|(name, of)| {
            let shape = of["shape"].as_array().unwrap();
            let shape: Vec<i64> = shape.iter().map(|dim| dim.as_i64().unwrap()).collect();
            let dtype = DType::from_name(of["dtype"].as_str().unwrap()).unwrap();
            (name.clone(), TensorDesc::packed(dtype, Dims::new(&shape).unwrap()))
        });
        Header {
            file: path.file_name().unwrap().to_string_lossy().into_owned(),
            tensors: tensors.collect(),
            metadata: header["__metadata__"].as_object().unwrap().clone(),
        }
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.metadata.get(name).and_then(Value::as_str)
    }

    fn int(&self, name: &str, default: i64) -> i64 {
        self.text(name).map_or(default, |text| text.parse().unwrap())
    }

    fn list(&self, name: &str) -> Option<Vec<i64>> {
        self.text(name).map(|text| serde_json::from_str(text).unwrap())
    }

    fn tensor(&self, name: &str) -> Option<TensorDesc> {
        self.tensors.get(name).copied()
    }

    fn tensors(&self, name: &str) -> Vec<TensorDesc> {
        let numbered = (0..).map_while(|index| self.tensor(&format!("{name}.{index}")));
        self.tensor(name).into_iter().chain(numbered).collect()
    }

    fn mask(&self) -> Option<TensorDesc> {
        match self.text("atten_mask_kind") {
            Some("compressed") => of(DType::Bool, &[2048, 2048]),
            _ => self.tensor("atten_mask"),
        }
    }

    /// The output, whose expected values are FLOAT whatever it is.
    fn out(&self) -> Option<TensorDesc> {
        let dtype = match self.text("out_dtype") {
            Some(name) => DType::from_name(name).unwrap(),
            None => self.tensors["query"].dtype,
        };
        let out = self.tensor("attention_out");
        out.map(|out| TensorDesc { dtype, ..out })
    }

    fn prompt(&self) -> Result<(), Violation> {
        let lengths = ["actual_seq_lengths", "actual_seq_lengths_kv"].map(|name| self.list(name));
        let call = PromptCall {
            query: self.tensor("query"),
            key: self.tensor("key"),
            value: self.tensor("value"),
            pse_shift: self.tensor("pse_shift"),
            atten_mask: self.mask(),
            actual_seq_lengths: lengths[0].as_deref(),
            actual_seq_lengths_kv: lengths[1].as_deref(),
            quant_scale2: self.tensor("quant_scale2"),
            num_heads: self.int("num_heads", 1),
            pre_tokens: self.int("pre_tokens", 0),
            next_tokens: self.int("next_tokens", 0),
            num_key_value_heads: self.int("num_key_value_heads", 0),
            sparse_mode: self.int("sparse_mode", 0),
            inner_precise: self.int("inner_precise", PromptCall::default().inner_precise),
            attention_out: self.out(),
            ..PromptCall::new(self.text("input_layout").unwrap())
        };
        let version = prompt::Version::ALL[self.int("op_version", 0) as usize - 1];
        call.check(version, TARGET)
    }

    fn incre(&self) -> Result<(), Violation> {
        let (key, value) = (self.tensors("key"), self.tensors("value"));
        let lengths = self.list("actual_seq_lengths");
        let call = IncreCall {
            query: self.tensor("query"),
            key: &key,
            value: &value,
            pse_shift: self.tensor("pse_shift"),
            atten_mask: self.mask(),
            actual_seq_lengths: lengths.as_deref(),
            antiquant_scale: self.tensor("antiquant_scale"),
            antiquant_offset: self.tensor("antiquant_offset"),
            block_table: self.tensor("block_table"),
            kv_padding_size: self.tensor("kv_padding_size"),
            num_heads: self.int("num_heads", 1),
            num_key_value_heads: self.int("num_key_value_heads", 0),
            block_size: self.int("block_size", 0),
            attention_out: self.out(),
            ..IncreCall::new(self.text("input_layout").unwrap())
        };
        let version = incre::Version::ALL[self.int("op_version", 0) as usize - 1];
        call.check(version, TARGET)
    }
}

#[test]
fn golden_prompt_and_incre_cases_are_accepted() {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    let mut count = 0;
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(Path::new(&folder).join("train")).unwrap() {
        let header = Header::read(&entry.unwrap().path());
        let verdict = match header.text("op") {
            Some("prompt_flash_attention") => header.prompt(),
            Some("incre_flash_attention") => header.incre(),
            _ => continue,
        };
        count += 1;
        if let Err(refusal) = verdict {
            wrong.push(format!("{}: {refusal}", header.file));
        }
    }
    println!("{count} cases");
    assert!(wrong.is_empty() && count > 0, "{wrong:#?}");
}
