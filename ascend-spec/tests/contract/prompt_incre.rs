//! The contracts of PromptFlashAttention and IncreFlashAttention: a call for every rule, and the golden cases.

use ascend_spec::ops::incre_flash_attention::{self as incre, IncreCall};
use ascend_spec::ops::prompt_flash_attention::{self as prompt, PromptCall};
use ascend_spec::{Cann, DType, Dims, Format, Refusal, Soc, Target, TensorDesc, Violation};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float16, shape)
}

fn prefill() -> PromptCall<'static> {
    PromptCall {
        query: half(&[2, 4, 20, 72]),
        key: half(&[2, 2, 27, 72]),
        value: half(&[2, 2, 27, 72]),
        num_heads: 4,
        num_key_value_heads: 2,
        attention_out: half(&[2, 4, 20, 72]),
        ..PromptCall::new("BNSD")
    }
}

/// Asserts what a refusal names and its status, and keeps the name.
#[track_caller]
fn named(
    broken: &mut BTreeSet<&'static str>,
    id: &'static str,
    status: i32,
    verdict: Result<(), Refusal>,
) -> Violation {
    match verdict {
        Err(Refusal::Violation(violation)) => {
            assert_eq!(violation.rule.id, id, "{violation}");
            assert_eq!(violation.rule.status, status, "{violation}");
            assert!(!violation.given.is_empty() && !violation.allowed.is_empty());
            broken.insert(id);
            violation
        }
        other => panic!("{id}: {other:?}"),
    }
}

#[test]
fn every_rule_of_prompt_flash_attention_has_a_call_that_breaks_it() {
    use prompt::Version::{V1, V2, V3};
    let mut broken = BTreeSet::new();
    let base = prefill();
    for version in prompt::Version::ALL {
        assert_eq!(base.check(version, TARGET), Ok(()), "{version}");
    }
    let nz = TensorDesc {
        format: Format::FractalNz,
        ..half(&[2, 2, 27, 72]).unwrap()
    };
    let int8 = |shape: &[i64]| of(DType::Int8, shape);
    let calls: &[(&str, i32, PromptCall<'_>)] = &[
        (
            "prompt.required",
            161_001,
            PromptCall {
                value: None,
                ..base
            },
        ),
        (
            "prompt.required",
            161_001,
            PromptCall {
                input_layout: None,
                ..base
            },
        ),
        (
            "prompt.countable",
            161_002,
            PromptCall {
                key: half(&[2, 2, -1, 72]),
                ..base
            },
        ),
        (
            "prompt.dtype",
            161_002,
            PromptCall {
                key: int8(&[2, 2, 27, 72]),
                ..base
            },
        ),
        (
            "prompt.out_dtype",
            161_002,
            PromptCall {
                attention_out: of(DType::Bf16, &[2, 4, 20, 72]),
                ..base
            },
        ),
        (
            "prompt.pse_dtype",
            161_002,
            PromptCall {
                pse_shift: of(DType::Bf16, &[2, 4, 20, 27]),
                ..base
            },
        ),
        (
            "prompt.mask_dtype",
            161_002,
            PromptCall {
                atten_mask: of(DType::Float, &[20, 27]),
                ..base
            },
        ),
        (
            "prompt.num_heads",
            161_002,
            PromptCall {
                num_heads: 0,
                ..base
            },
        ),
        (
            "prompt.input_layout",
            161_002,
            PromptCall {
                input_layout: Some("BSH"),
                ..base
            },
        ),
        (
            "prompt.input_layout",
            161_002,
            PromptCall {
                input_layout: Some("SBH"),
                ..base
            },
        ),
        (
            "prompt.head_dim",
            161_002,
            PromptCall {
                value: half(&[2, 2, 27, 513]),
                ..base
            },
        ),
        (
            "prompt.format",
            161_002,
            PromptCall {
                key: Some(nz),
                ..base
            },
        ),
        (
            "prompt.out_shape",
            161_002,
            PromptCall {
                attention_out: half(&[2, 4, 20, 64]),
                ..base
            },
        ),
        (
            "prompt.prefill_rules",
            561_103,
            PromptCall {
                num_key_value_heads: 3,
                ..base
            },
        ),
        (
            "prompt.prefill_rules",
            561_103,
            PromptCall {
                sparse_mode: 2,
                ..base
            },
        ),
    ];
    for (id, status, call) in calls {
        let violation = named(&mut broken, id, *status, call.check(V3, TARGET));
        if *id == "prompt.prefill_rules" {
            let rule = violation.given.split(':').next().unwrap();
            assert!(rule.contains('.'), "{violation}");
        }
    }
    let bias = PromptCall {
        pse_shift: of(DType::Float, &[1]),
        ..base
    };
    for version in [V1, V2] {
        assert_eq!(bias.check(version, TARGET), Ok(()), "{version}");
        broken.insert(bias.lint(version, &[]).unwrap_err().rule.id);
        let lint = bias.lint(version, &["prompt.pse_dropped"]).unwrap_err();
        broken.insert(lint.rule.id);
    }
    assert_eq!(bias.lint(V3, &[]), Ok(()));
    let ascend950 = Target::new(Soc::Ascend950, Cann::V9_1);
    named(
        &mut broken,
        "prompt.successor",
        361_001,
        base.check(V3, ascend950),
    );
    let training = Target::new(Soc::AtlasTraining, Cann::V9_1);
    named(
        &mut broken,
        "prompt.product",
        561_003,
        base.check(V3, training),
    );
    let all: BTreeSet<_> = prompt::rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn atlas_inference_cards_take_half_precision_and_no_bf16() {
    let card = Target::new(Soc::AtlasInference, Cann::V8_1);
    assert_eq!(prefill().check(prompt::Version::V3, card), Ok(()));
    let bf16 = |shape: &[i64]| of(DType::Bf16, shape);
    let call = PromptCall {
        query: bf16(&[2, 4, 20, 72]),
        key: bf16(&[2, 2, 27, 72]),
        value: bf16(&[2, 2, 27, 72]),
        attention_out: bf16(&[2, 4, 20, 72]),
        ..prefill()
    };
    assert_eq!(call.check(prompt::Version::V3, TARGET), Ok(()));
    named(
        &mut BTreeSet::new(),
        "prompt.dtype",
        161_002,
        call.check(prompt::Version::V3, card),
    );
    let empty = PromptCall {
        query: half(&[2, 4, 0, 72]),
        key: None,
        attention_out: half(&[2, 4, 0, 72]),
        ..prefill()
    };
    assert!(empty.check(prompt::Version::V3, card).is_err());
    let empty = PromptCall {
        key: half(&[9]),
        ..empty
    };
    assert_eq!(empty.check(prompt::Version::V3, card), Ok(()));
}

#[test]
fn every_rule_of_incre_flash_attention_has_a_call_that_breaks_it() {
    use incre::Version::{V1, V2, V3, V4};
    let key = [half(&[2, 2, 76, 64]).unwrap()];
    let base = IncreCall {
        query: half(&[2, 4, 1, 64]),
        key: &key,
        value: &key,
        num_heads: 4,
        num_key_value_heads: 2,
        attention_out: half(&[2, 4, 1, 64]),
        ..IncreCall::new("BNSD")
    };
    for version in incre::Version::ALL {
        assert_eq!(base.check(version, TARGET), Ok(()), "{version}");
    }
    let mut broken = BTreeSet::new();
    let float = [of(DType::Float, &[2, 2, 76, 64]).unwrap()];
    let calls: &[(&str, i32, IncreCall<'_>)] = &[
        (
            "incre.required",
            161_001,
            IncreCall {
                query: None,
                ..base
            },
        ),
        ("incre.required", 161_001, IncreCall { key: &[], ..base }),
        (
            "incre.input_layout",
            561_002,
            IncreCall {
                input_layout: Some("TND"),
                ..base
            },
        ),
        (
            "incre.rows",
            561_002,
            IncreCall {
                query: half(&[2, 4, 2, 64]),
                ..base
            },
        ),
        (
            "incre.registered",
            161_002,
            IncreCall {
                key: &float,
                value: &float,
                ..base
            },
        ),
        (
            "incre.decode_rules",
            561_002,
            IncreCall {
                num_key_value_heads: 3,
                ..base
            },
        ),
        (
            "incre.decode_rules",
            561_002,
            IncreCall {
                atten_mask: of(DType::Bool, &[2, 75]),
                ..base
            },
        ),
    ];
    for (id, status, call) in calls {
        named(&mut broken, id, *status, call.check(V4, TARGET));
    }
    let bias = IncreCall {
        pse_shift: half(&[1, 4, 1, 76]),
        ..base
    };
    for version in [V1, V2] {
        broken.insert(bias.lint(version, &[]).unwrap_err().rule.id);
    }
    broken.insert(bias.lint(V3, &[]).unwrap_err().rule.id);
    assert_eq!(bias.lint(V4, &[]), Ok(()));
    assert_eq!(incre::Version::oldest_for(&bias), V3);
    let ascend950 = Target::new(Soc::Ascend950, Cann::V9_1);
    named(
        &mut broken,
        "incre.successor",
        361_001,
        base.check(V4, ascend950),
    );
    let training = Target::new(Soc::AtlasTraining, Cann::V9_1);
    named(
        &mut broken,
        "incre.product",
        561_003,
        base.check(V4, training),
    );
    let all: BTreeSet<_> = incre::rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

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
            (
                name.clone(),
                TensorDesc::packed(dtype, Dims::new(&shape).unwrap()),
            )
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
        self.text(name)
            .map_or(default, |text| text.parse().unwrap())
    }

    fn list(&self, name: &str) -> Option<Vec<i64>> {
        self.text(name)
            .map(|text| serde_json::from_str(text).unwrap())
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

    fn prompt(&self) -> Result<(), Refusal> {
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
            inner_precise: self.int("inner_precise", PromptCall::DEFAULT_PRECISE),
            attention_out: self.out(),
            ..PromptCall::new(self.text("input_layout").unwrap())
        };
        let version = prompt::Version::ALL[self.int("op_version", 0) as usize - 1];
        call.check(version, TARGET)
    }

    fn incre(&self) -> Result<(), Refusal> {
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
