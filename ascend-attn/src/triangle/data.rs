//! The numbers that layers are run with.

use std::collections::BTreeMap;
use std::path::Path;

use ascend_attention::Machine;
use ascend_attention::case::{self, AttentionCase, Case, CaseError, CaseTensor};
use ascend_attention::spec::attention_problem::{Padding, Rows, Work};
use ascend_attention::spec::{DType, Soc, Target};
use ascend_serving::AttentionShape;
use ascend_trianglemix::LayerSample;
use clap::ValueEnum;

use crate::random::Random;

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
pub(super) const MOST_BYTES: u64 = 1 << 34;
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
    /// Makes numbers between -1 and 1, or returns why it cannot.
    pub(super) fn random(tokens: usize, shape: AttentionShape, seed: u64) -> Result<Self, String> {
        let row = shape.heads.saturating_mul(shape.head_dim);
        let elements = tokens.saturating_mul(row);
        if elements > MOST_ELEMENTS {
            return Err(format!(
                "{elements} elements of queries: at most {MOST_ELEMENTS}; --measure never counts without them"
            ));
        }
        let numbers = |stream: u64, heads: usize| {
            let mut random = Random(seed.wrapping_mul(3).wrapping_add(stream));
            (0..tokens * heads * shape.head_dim).map(|_| random.number()).collect()
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

    /// Reads the numbers of a file, or of sequence `sequence` of a case file; the error describes what is wrong with
    /// it.
    pub(super) fn read(file: &Path, sequence: Option<usize>) -> Result<Self, String> {
        let say = |what: String| format!("{}: {what}", file.display());
        let read = case::read_file(file, MOST_BYTES).and_then(|bytes| Case::from_bytes(&bytes));
        match read.and_then(Case::attention) {
            Ok(case) => return of_case(&case, sequence.unwrap_or(0)).map_err(say),
            Err(CaseError::OtherOp(operator)) => {
                return Err(say(format!("a case of {operator}; only those of FusedInferAttentionScore are taken")));
            }
            // Any other safetensors file.
            Err(CaseError::MissingKey("format") | CaseError::UnknownFormat(_)) => {}
            Err(error) => return Err(say(error.to_string())),
        }
        if let Some(sequence) = sequence {
            return Err(say(format!("--sequence {sequence}: no case file, whose tensors are of one sequence")));
        }
        let mut tensors = case::read_tensors(file, MOST_BYTES).map_err(|error| say(error.to_string()))?;
        Self::of_tensors(&mut tensors, "").map_err(say)
    }

    /// Takes the numbers of one layer from the tensors of a file, whose names begin with `prefix`.
    pub(super) fn of_tensors(tensors: &mut BTreeMap<String, CaseTensor>, prefix: &str) -> Result<Self, String> {
        let mut take = |name: &str| {
            let name = format!("{prefix}{name}");
            let tensor = tensors.remove(&name);
            tensor.ok_or_else(|| format!("no tensor {name:?}: {prefix}query, {prefix}key and {prefix}value"))
        };
        let (query, key, value) = (take("query")?, take("key")?, take("value")?);
        let shapes = [&query, &key, &value].map(CaseTensor::shape);
        let wrong = || {
            let [query, key, value] = shapes;
            format!(
                "{prefix}query {query:?}, key {key:?}, value {value:?}: [tokens, heads, dim] each, with as many keys \
                 and values as queries, of heads as long, and no axis of 0"
            )
        };
        let (&[tokens, heads, head_dim], &[_, kv_heads, _]) = (shapes[0], shapes[1]) else {
            return Err(wrong());
        };
        let own = [tokens, kv_heads, head_dim];
        if shapes[1] != own || shapes[2] != own || heads == 0 || own.contains(&0) {
            return Err(wrong());
        }
        Ok(Self {
            tokens,
            shape: AttentionShape::new(heads, kv_heads, head_dim),
            half: half(&query),
            query: to_f32("query", &query)?,
            key: to_f32("key", &key)?,
            value: to_f32("value", &value)?,
        })
    }

    /// The layer for what is computed on the host.
    pub(super) fn sample(&self) -> LayerSample<'_, f32> {
        let shape = self.shape;
        LayerSample {
            tokens: self.tokens,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            dim: shape.head_dim,
            value_dim: shape.head_dim,
            scale: shape.scale,
            query: &self.query,
            key: &self.key,
            value: &self.value,
        }
    }
}

/// The numbers of a tensor, or that it has none.
pub(super) fn to_f32(name: &str, tensor: &CaseTensor) -> Result<Vec<f32>, String> {
    tensor.to_f32().ok_or_else(|| format!("{name} is {}: F16, BF16 or F32", tensor.dtype()))
}

/// The element type of a tensor, if it is one of the operator's.
fn half(tensor: &CaseTensor) -> Option<Half> {
    match tensor.dtype() {
        DType::Float16 => Some(Half::F16),
        DType::Bf16 => Some(Half::Bf16),
        _ => None,
    }
}

/// The numbers of one sequence of a case, if it is a dense causal prompt.
fn of_case(case: &AttentionCase, sequence: usize) -> Result<Data, String> {
    let description = case.describe();
    let call = description.call();
    let otherwise = Target::new(Soc::AtlasA2, Machine::DEFAULT_CANN);
    let checked = case.checked(&call, otherwise).map_err(|why| why.to_string())?;
    let problem = &checked.problem;
    let layout = checked.layout;
    let wanted = "a dense causal prompt of the layers is wanted: as many queries as keys, 16 bits, no cache, prefix, \
                  padding, bias, sink, rotary part or quantisation";
    let other = |what: &str| Err(format!("a case in layout {layout} {what}; {wanted}"));
    if problem.work != Work::Attend {
        return other("with nothing to compute");
    }
    if sequence >= problem.batch {
        return Err(format!("--sequence {sequence}: the case has {}, counted from 0", problem.batch));
    }
    let features = [
        (problem.pages.is_some(), "over a paged cache"),
        (problem.prefix.is_some(), "with a shared prefix"),
        (problem.query_padding.is_some() || problem.key_padding.is_some(), "with left padding"),
        (problem.bias.is_some() || problem.slopes.is_some(), "with a position bias"),
        (problem.sink.is_some(), "with a learnable sink"),
        (problem.query_rope.is_some(), "with rotary parts"),
        (
            problem.query_quantisation.is_some()
                || problem.key_quantisation.is_some()
                || problem.int8_query.is_some()
                || problem.out_quantisation.is_some(),
            "that is quantised",
        ),
        (problem.mask.is_tensor(), "with a mask of its own"),
        (problem.head_dim != problem.value_dim, "whose values are of other heads"),
    ];
    if let Some((_, what)) = features.into_iter().find(|(has, _)| *has) {
        return other(what);
    }
    let (at, geometry) = (problem.sequence(sequence, Padding::default()), problem.geometry(sequence));
    let (tokens, keys) = (at.q_len, at.kv_len);
    if tokens != keys || tokens == 0 {
        return other(&format!("whose sequence {sequence} has {tokens} queries and {keys} keys"));
    }
    let causal = (0..tokens as u64).all(|i| geometry.row(i) == (0..i + 1));
    if !causal || geometry.visible() != tokens as u128 * (tokens as u128 + 1) / 2 {
        return other(&format!("whose sequence {sequence} is not causal (sparse mode {})", problem.mode));
    }
    let own = problem.key_value(sequence);
    let arguments = &case.arguments;
    let tensors = (arguments.query.as_ref(), arguments.key.get(own.list_index), arguments.value.get(own.list_index));
    let (Some(query), Some(key), Some(value)) = tensors else {
        return other("without query, key or value");
    };
    let batch = if problem.packed { 0 } else { sequence };
    let dim = problem.head_dim;
    let numbers = |tensor: &CaseTensor, rows: Rows, (batch, first): (usize, usize), heads: usize| {
        let all = tensor.to_f32().ok_or("element types that are no numbers")?;
        let mut taken = Vec::with_capacity(tokens * heads * dim);
        for row in first..first + tokens {
            for head in 0..heads {
                let start = usize::try_from(rows.view.at(batch, head, row));
                let start = start.map_err(|_| "a row before the tensor")?;
                let row = all.get(start..start + dim).ok_or("a row behind the tensor")?;
                taken.extend_from_slice(row);
            }
        }
        Ok::<_, String>(taken)
    };
    let shape = AttentionShape::new(problem.heads, problem.kv_heads, dim).scale(problem.scale);
    Ok(Data {
        tokens,
        shape,
        half: half(query),
        query: numbers(query, problem.query, (batch, at.q_first), problem.heads)?,
        key: numbers(key, own.key, (own.batch, at.kv_first), problem.kv_heads)?,
        value: numbers(value, own.value, (own.batch, at.kv_first), problem.kv_heads)?,
    })
}
