//! The numbers that layers are run with.

use std::path::Path;

use ascend_attention::case::{self, CaseTensor};
use ascend_attention::spec::DType;
use ascend_serving::AttentionShape;
use clap::ValueEnum;

/// Element types of the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Half {
    F16,
    #[default]
    Bf16,
}

impl Half {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// Most bytes of a file.
const MOST_BYTES: u64 = 1 << 34;
/// Most random elements.
const MOST_ELEMENTS: usize = 1 << 30;

/// Queries, keys and values of one layer, `[tokens, heads, dim]` each.
pub(super) struct Data {
    pub(super) tokens: usize,
    pub(super) shape: AttentionShape,
    /// Element type of the file, if it is one of the operator's.
    pub(super) half: Option<Half>,
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) value: Vec<f32>,
}

impl Data {
    /// Numbers between -1 and 1, or why there are none.
    pub(super) fn random(tokens: usize, shape: AttentionShape, seed: u64) -> Result<Self, String> {
        let row = shape.heads.saturating_mul(shape.head_dim);
        let elements = tokens.saturating_mul(row);
        if elements > MOST_ELEMENTS {
            return Err(format!(
                "{elements} elements of queries: at most {MOST_ELEMENTS}; --measure never counts without them"
            ));
        }
        let numbers = |stream: u64, heads: usize| {
            let mut state = seed.wrapping_mul(3).wrapping_add(stream);
            let next = |_| {
                // SplitMix64: any state is a good one, and neighbours have nothing in common.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut bits = state;
                bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                let high = (bits ^ (bits >> 31)) >> 40;
                high as f32 / (1u32 << 23) as f32 - 1.0
            };
            (0..tokens * heads * shape.head_dim).map(next).collect()
        };
        Ok(Self {
            tokens,
            shape,
            half: None,
            query: numbers(0, shape.heads),
            key: numbers(1 << 32, shape.kv_heads),
            value: numbers(2 << 32, shape.kv_heads),
        })
    }

    /// Those of a file, or what is wrong with it.
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        let say = |what: String| format!("{}: {what}", file.display());
        let mut tensors =
            case::read_tensors(file, MOST_BYTES).map_err(|error| say(error.to_string()))?;
        let mut take = |name: &str| -> Result<(CaseTensor, [usize; 3], Vec<f32>), String> {
            let tensor = tensors
                .remove(name)
                .ok_or_else(|| say(format!("no tensor {name:?}: query, key and value")))?;
            let shape: [usize; 3] = tensor.shape().try_into().map_err(|_| {
                let shape = tensor.shape();
                say(format!("{name} of shape {shape:?}: [tokens, heads, dim]"))
            })?;
            let numbers = tensor
                .to_f32()
                .ok_or_else(|| say(format!("{name} is {}: F16, BF16 or F32", tensor.dtype())))?;
            Ok((tensor, shape, numbers))
        };
        let (tensor, [tokens, heads, head_dim], query) = take("query")?;
        let (_, keys, key) = take("key")?;
        let (_, values, value) = take("value")?;
        let kv_heads = keys[1];
        if [tokens, heads, head_dim, kv_heads].contains(&0) {
            let shapes = format!("query [{tokens}, {heads}, {head_dim}], key {keys:?}");
            return Err(say(format!("{shapes}: no axis of 0")));
        }
        for (name, shape) in [("key", keys), ("value", values)] {
            if shape != [tokens, kv_heads, head_dim] {
                return Err(say(format!(
                    "{name} of shape {shape:?}: [{tokens}, {kv_heads}, {head_dim}], as query and key say"
                )));
            }
        }
        Ok(Self {
            tokens,
            shape: AttentionShape::new(heads, kv_heads, head_dim),
            half: match tensor.dtype() {
                DType::Float16 => Some(Half::F16),
                DType::Bf16 => Some(Half::Bf16),
                _ => None,
            },
            query,
            key,
            value,
        })
    }
}
