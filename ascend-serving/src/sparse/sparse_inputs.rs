//! What indexers and layers of sparse attention get in a step, and the checks of it.

use std::fmt;

use ascend_attention::spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use ascend_attention::{AnyTensor, DType, Device, Element, Stream, Tensor, Violation};

use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::rules;

use super::key_choice::KeyChoice;

/// What an indexer gets in a step: its queries, a weight for each of its heads, and the keys of the new tokens. All are
/// packed, with the padding of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct IndexerTensors<'a, T: Element, W: Element = T> {
    /// Queries, `[tokens, heads of the indexer, 128]`.
    pub query: &'a Tensor<T>,
    /// Weights, `[tokens, heads of the indexer]`, of the query's type; from CANN 9.0 on Atlas A2 and A3 also FLOAT.
    /// Over [quantised keys](crate::kv::PagedKvCache::quantised_index_keys) they are FLOAT16.
    pub weights: &'a Tensor<W>,
    /// Keys of the new tokens, `[tokens, 1, 128]`.
    pub key: &'a Tensor<T>,
}

impl<T: Element, W: Element> IndexerTensors<'_, T, W> {
    /// Refuses tensors of an indexer that do not have the step's rows, or these heads.
    pub(super) fn check(&self, rows: &SparseRows<'_>, indexer: usize, heads: usize) -> Result<()> {
        let owner = TensorOwner::Indexer(indexer);
        rows.check("index query", owner, self.query, &[heads, 128])?;
        rows.check("index weights", owner, self.weights, &[heads])?;
        rows.check("index key", owner, self.key, &[1, 128])
    }
}

/// The heads of an indexer, and the type of their weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexerKind {
    pub(super) heads: usize,
    pub(super) weights: DType,
}

impl IndexerKind {
    /// Refuses an indexer of another kind than was planned, which `planned` describes.
    pub(super) fn check(self, indexer: usize, given: Self, planned: &str) -> Result<()> {
        if given == self {
            return Ok(());
        }
        let given = format_args!("{given}, of indexer {indexer}");
        Err(Error::not_as_planned("index query", given, format_args!("{self}, as {planned}"))
            .fix("fill indexers up to one number of heads, with weights of 0, and bring weights of one type"))
    }
}

impl fmt::Display for IndexerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} heads with weights of {}", self.heads, self.weights)
    }
}

/// What a layer of sparse attention gets in a step. Tensors are packed, with the padding of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct SparseTensors<'a, T: Element> {
    /// Absorbed queries, `[tokens, N, 512]`: the caller has multiplied `W_UK` into them. Over [quantised
    /// latents](crate::kv::PagedKvCache::quantised_sparse_latents) each is followed by its rotary part, `[tokens, N,
    /// 576]`.
    pub query: &'a Tensor<T>,
    /// Rotary part of the queries, `[tokens, N, 64]`; over quantised latents none, `[tokens, N, 0]`.
    pub query_rope: &'a Tensor<T>,
    /// Latents of the new tokens, `[tokens, 1, 512]`.
    pub latent: &'a Tensor<T>,
    /// Rotary keys of the new tokens, `[tokens, 1, 64]`.
    pub key_rope: &'a Tensor<T>,
    /// The keys that the tokens read, chosen in the same step.
    pub choice: &'a KeyChoice,
}

impl<T: Element> SparseTensors<'_, T> {
    /// Refuses tensors of a layer that do not have the step's rows, or these heads.
    pub(super) fn check(&self, rows: &SparseRows<'_>, layer: usize, queries: LayerQueries) -> Result<()> {
        let LayerQueries { heads, joined } = queries;
        let (owner, [dim, rope_dim]) = match joined {
            true => (TensorOwner::QuantisedLayer(layer), [QuantisedRow::DIM, 0]),
            false => (TensorOwner::Layer(layer), [512, 64]),
        };
        rows.check("query", owner, self.query, &[heads, dim])?;
        rows.check("query_rope", owner, self.query_rope, &[heads, rope_dim])?;
        rows.check("latent", owner, self.latent, &[1, 512])?;
        rows.check("key_rope", owner, self.key_rope, &[1, 64])
    }
}

/// The queries of a layer of sparse attention.
#[derive(Clone, Copy)]
pub(super) struct LayerQueries {
    pub(super) heads: usize,
    /// Whether each is followed by its rotary part.
    pub(super) joined: bool,
}

/// The indexer or layer whose tensor is checked.
#[derive(Clone, Copy)]
pub(super) enum TensorOwner {
    Indexer(usize),
    Layer(usize),
    QuantisedLayer(usize),
    NativeLayer(usize),
}

impl TensorOwner {
    /// The advice on heads of a layer or an indexer, on those of an indexer as `captured` graphs have them.
    fn fix(self, captured: bool) -> &'static str {
        match self {
            Self::Indexer(_) if captured => {
                "bring queries of the heads of 128 that the graphs were captured with, filled up by weights of 0, a \
                 weight for each, and one key of 128, or capture with these heads"
            }
            Self::Indexer(_) => {
                "bring queries of heads of 128, a weight for each head of them, and one key of 128, each in its place \
                 of `IndexerTensors`"
            }
            Self::Layer(_) => {
                "bring absorbed queries of 512 and their rotary parts of 64 with the heads of the `AttentionShape`, \
                 latents of 512 and rotary keys of 64, each in its place of `SparseTensors`"
            }
            Self::QuantisedLayer(_) => {
                "over quantised latents, bring absorbed queries of 512 joined with their rotary parts of 64 as \
                 `query`, `[tokens, N, 576]` with the heads of the `AttentionShape`, an empty `query_rope`, \
                 `[tokens, N, 0]`, latents of 512 and rotary keys of 64"
            }
            Self::NativeLayer(_) => {
                "bring queries and keys of 192 and values of 128 with the heads of the `AttentionShape`, each in its \
                 place of `NativeTensors`"
            }
        }
    }
}

impl fmt::Display for TensorOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Indexer(indexer) => write!(f, "indexer {indexer}"),
            Self::Layer(layer) | Self::QuantisedLayer(layer) | Self::NativeLayer(layer) => write!(f, "layer {layer}"),
        }
    }
}

/// The rows that tensors of a step of sparse attention may have, and their device.
#[derive(Clone, Copy)]
pub(super) struct SparseRows<'a> {
    pub(super) device: &'a Device,
    /// Rows of the requests.
    pub(super) actual: usize,
    /// Rows including the padding.
    pub(super) padded: usize,
    /// Rows that the metadata had before graphs filled it up, in a step that is replayed. Tensors may leave the
    /// padding out there, all of it or what the graphs have added; in other steps they have it.
    pub(super) unfilled: Option<usize>,
}

impl<'a> SparseRows<'a> {
    /// The rows of a step without graphs.
    pub(super) fn of_step(stream: &'a Stream, metadata: &AttentionMetadata) -> Self {
        let (actual, padded) = (metadata.actual_tokens(), metadata.tokens());
        Self { device: stream.device(), actual, padded, unfilled: None }
    }

    /// Whether tensors may have this number of rows.
    fn admits(&self, rows: usize) -> bool {
        rows == self.padded || self.unfilled.is_some_and(|unfilled| rows == unfilled || rows == self.actual)
    }

    /// Refuses a tensor of other rows than the step has tokens, of other sizes, that is not contiguous, or of another
    /// device.
    pub(super) fn check(
        &self,
        name: &'static str,
        owner: TensorOwner,
        tensor: &AnyTensor,
        of_token: &[usize],
    ) -> Result<()> {
        tensor.check_device(name, self.device)?;
        let Self { actual, padded, unfilled, .. } = *self;
        let (rule, fix) = match tensor.shape().split_first() {
            Some((rows, own)) if own == of_token && self.admits(*rows) => {
                if tensor.is_contiguous() {
                    return Ok(());
                }
                let copy = "project it into a tensor of its own, or copy it by `Tensor::contiguous`, which waits for \
                            the stream";
                (&rules::STEP_CONTIGUOUS, copy)
            }
            Some((_, own)) if own == of_token && unfilled.is_some() => (
                &rules::STEP_TOKENS,
                "bring a row for each token of the batch that the metadata was made of, and of the padding all rows \
                 (`tokens` of the step) or none",
            ),
            Some((_, own)) if own == of_token => (
                &rules::STEP_TOKENS,
                "bring a row for each token of the batch that the metadata was made of, and for each that was added \
                 to fill it up",
            ),
            _ => (&rules::STEP_HEADS, owner.fix(unfilled.is_some())),
        };
        let given = format_args!("{name} {} in {owner}", tensor.desc());
        let dummies = padded.saturating_sub(actual);
        let allowed = format_args!(
            "[{padded}, {}]: {actual} rows of the requests and {dummies} of padding{}, with row-major strides",
            of_token.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            match unfilled {
                Some(unfilled) if dummies > 0 && (actual + 1..padded).contains(&unfilled) => {
                    format!(", which may be left out, all or those behind the first {unfilled} rows")
                }
                Some(_) if dummies > 0 => ", which may be left out as a whole".to_owned(),
                _ => String::new(),
            },
        );
        Err(Violation::new(rule, given, allowed, fix).into())
    }
}

/// Refuses a step whose tokens see other keys than those up to their own.
pub(super) fn check_causal(metadata: &AttentionMetadata) -> Result<(), Violation> {
    match metadata.mask() {
        mask @ LayerMask::Causality(Causality::Causal) => metadata.check_mask(mask),
        other => Err(Violation::new(
            &rules::STEP_CAUSALITY,
            format_args!("{other} with sparse attention"),
            "a causal step",
            "make the settings with `Causality::Causal`, or set that mask in the metadata",
        )),
    }
}

/// The new tokens of each request, its keys, and its blocks.
pub(super) fn lengths_and_blocks(metadata: &AttentionMetadata) -> (Vec<usize>, &[usize], Vec<&[usize]>) {
    let new = metadata.new_and_cached().map(|(new, _)| new);
    (new.collect(), metadata.kv_lengths().lengths(), metadata.table().rows().collect())
}
