//! What indexers and layers of sparse attention get in a step, and the checks of it.

use std::fmt;

use ascend_attention::spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use ascend_attention::{DType, Element, Tensor, Violation};

use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::engine::StepRows;
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
    pub(super) fn check(&self, rows: StepRows<'_>, indexer: usize, heads: usize) -> Result<()> {
        let heads_fix = match rows.unfilled {
            Some(_) => {
                "bring queries of the heads of 128 that the graphs were captured with, filled up by weights of 0, a \
                 weight for each, and one key of 128, or capture with these heads"
            }
            None => {
                "bring queries of heads of 128, a weight for each head of them, and one key of 128, each in its place \
                 of `IndexerTensors`"
            }
        };
        let (rows, indexer) = (StepRows { heads_fix, ..rows }, format_args!("indexer {indexer}"));
        rows.check("index query", indexer, self.query, &[heads, 128])?;
        rows.check("index weights", indexer, self.weights, &[heads])?;
        rows.check("index key", indexer, self.key, &[1, 128])
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
    pub(super) fn check(&self, rows: StepRows<'_>, layer: usize, queries: LayerQueries) -> Result<()> {
        let LayerQueries { heads, joined } = queries;
        let ([dim, rope_dim], heads_fix) = match joined {
            true => (
                [QuantisedRow::DIM, 0],
                "over quantised latents, bring absorbed queries of 512 joined with their rotary parts of 64 as \
                 `query`, `[tokens, N, 576]` with the heads of the `AttentionShape`, an empty `query_rope`, \
                 `[tokens, N, 0]`, latents of 512 and rotary keys of 64",
            ),
            false => (
                [512, 64],
                "bring absorbed queries of 512 and their rotary parts of 64 with the heads of the `AttentionShape`, \
                 latents of 512 and rotary keys of 64, each in its place of `SparseTensors`",
            ),
        };
        let (rows, layer) = (StepRows { heads_fix, ..rows }, format_args!("layer {layer}"));
        rows.check("query", layer, self.query, &[heads, dim])?;
        rows.check("query_rope", layer, self.query_rope, &[heads, rope_dim])?;
        rows.check("latent", layer, self.latent, &[1, 512])?;
        rows.check("key_rope", layer, self.key_rope, &[1, 64])
    }
}

/// The queries of a layer of sparse attention.
#[derive(Clone, Copy)]
pub(super) struct LayerQueries {
    pub(super) heads: usize,
    /// Whether each is followed by its rotary part.
    pub(super) joined: bool,
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
