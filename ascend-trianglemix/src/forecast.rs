//! What is known before anything runs: numbers of pairs, blocks and bytes.

#![allow(clippy::arithmetic_side_effects, reason = "counts are bounded where a forecast begins")]

use std::num::NonZeroU64;

use ascend_attention::Error;
use ascend_attention::spec::geometry::{
    BlockCounts, BlockMap, CompressedMask, TriangleMix, TrianglePart, TriangleRows,
};
use ascend_serving::{AttentionShape, Result};

use crate::cost::TriangleCost;
use crate::layers::TriangleLayers;
use crate::prefill::TrianglePrefill;

/// Bytes of an element of keys, values and outputs, which have half precision.
const HALF: usize = 2;

/// Most elements of a row of queries.
const MOST_ROW_ELEMENTS: usize = 1 << 32;

/// Counts of a dense layer and of one that leaves out the middle, for a prompt that is computed at once.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TriangleForecast {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// The heads.
    pub shape: AttentionShape,
    /// Sinks, window and last rows.
    pub sizes: TriangleMix,
    /// Layers of the model.
    pub layers: usize,
    /// The layers that leave out the middle.
    pub sparse: TriangleLayers,
    /// Pairs of row and key in one head of a dense layer.
    pub dense_pairs: u128,
    /// Pairs of row and key in one head of a layer that leaves out the middle.
    pub triangle_pairs: u128,
    /// Rows and keys of a block.
    pub block: NonZeroU64,
    /// Blocks of a dense layer.
    pub dense_blocks: BlockCounts,
    /// Blocks of a layer that leaves out the middle.
    pub triangle_blocks: BlockCounts,
    /// What the ways to compute a layer that leaves out the middle cost, as predicted ([`TrianglePrefill::cost`]).
    pub cost: TriangleCost,
    /// Bytes of the keys and values of all layers, in half precision.
    pub cache_bytes: u128,
    /// Bytes of a mask of every row and key.
    pub whole_mask_bytes: u128,
    /// Bytes of the compressed mask.
    pub mask_bytes: u128,
    /// Bytes of the outputs of a layer that are merged where stock calls compute it ([`TrianglePrefill::part_bytes`]),
    /// in half precision.
    pub part_bytes: u128,
}

impl TriangleForecast {
    /// Most tokens of a prompt: every count stays exact in 64 bits.
    pub const MAX_TOKENS: usize = 1 << 24;

    /// Counts for a prompt of `tokens` tokens in a model of `layers` layers, of which those of `sparse` leave out the
    /// middle, in blocks of `block` rows and keys.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more than [`MAX_TOKENS`](Self::MAX_TOKENS) tokens, more
    /// layers than [`TriangleLayers::MAX_LAYERS`], a sparse layer that the model does not have, and as for
    /// [`AttentionShape::check`].
    pub fn new(
        prefill: &TrianglePrefill,
        tokens: usize,
        (layers, sparse): (usize, TriangleLayers),
        block: NonZeroU64,
    ) -> Result<Self> {
        let (shape, sizes) = (prefill.shape, prefill.sizes);
        shape.check()?;
        TriangleLayers::check(layers)?;
        let row = shape.heads.checked_mul(shape.head_dim);
        if row.is_none_or(|row| row > MOST_ROW_ELEMENTS) {
            return Err(Error::invalid(
                "AttentionShape",
                format_args!("{} heads of {} elements", shape.heads, shape.head_dim),
                format_args!("at most {MOST_ROW_ELEMENTS} elements in all"),
            )
            .fix("give the heads of the model")
            .into());
        }
        if tokens > Self::MAX_TOKENS {
            let allowed = format_args!("at most {}", Self::MAX_TOKENS);
            return Err(Error::invalid("tokens", tokens, allowed).fix("count a shorter prompt").into());
        }
        if let Some(last) = sparse.indices().last().filter(|last| **last >= layers) {
            let allowed = format_args!("below {layers}, which are counted from 0");
            return Err(Error::invalid("sparse layer", last, allowed)
                .fix("leave out the middle in layers that the model has")
                .into());
        }
        let counts = |part| {
            let geometry = sizes.geometry(part, TriangleRows::whole(tokens as u64));
            (geometry.visible(), BlockMap::new(&geometry, block).counts())
        };
        let (dense_pairs, dense_blocks) = counts(TrianglePart::Dense);
        let (triangle_pairs, triangle_blocks) = counts(TrianglePart::Triangle);
        let n = tokens as u128;
        let cached = 2 * n * (shape.kv_heads * shape.head_dim * HALF) as u128;
        let template = CompressedMask::Causal.shape();
        Ok(Self {
            tokens,
            shape,
            sizes,
            layers,
            sparse,
            dense_pairs,
            triangle_pairs,
            block,
            dense_blocks,
            triangle_blocks,
            cost: prefill.cost(tokens),
            cache_bytes: cached * layers as u128,
            whole_mask_bytes: n * n,
            mask_bytes: template.elements().map_or(0, u128::from),
            part_bytes: prefill.part_bytes(tokens, HALF),
        })
    }

    /// Share of the pairs that a layer which leaves out the middle computes.
    pub fn share(&self) -> f64 {
        self.triangle_pairs as f64 / self.dense_pairs.max(1) as f64
    }

    /// Share of the blocks that a layer which leaves out the middle computes.
    pub fn block_share(&self) -> f64 {
        self.triangle_blocks.computed() as f64 / self.dense_blocks.computed().max(1) as f64
    }

    /// The sum over all layers of a quantity that is `dense` in a dense layer and `sparse` in one that leaves out the
    /// middle.
    pub fn model(&self, dense: f64, sparse: f64) -> f64 {
        let count = self.sparse.indices().len();
        dense * (self.layers - count) as f64 + sparse * count as f64
    }

    /// Tokens of the prompt for each second that its attention takes: the most that a prefill can reach.
    pub fn tokens_per_second(&self, seconds: f64) -> f64 {
        self.tokens as f64 / seconds.max(f64::MIN_POSITIVE)
    }

    /// The number of pairs in one head over all layers.
    pub fn model_pairs(&self) -> u128 {
        let count = self.sparse.indices().len() as u128;
        self.dense_pairs * (self.layers as u128 - count) + self.triangle_pairs * count
    }

    /// Operations of a dense layer: a multiplication and an addition for each pair and each element of key and value.
    pub fn dense_flops(&self) -> f64 {
        4.0 * self.dense_pairs as f64 * self.shape.heads as f64 * self.shape.head_dim as f64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::rows::TriangleThresholds;

    fn prefill(shape: AttentionShape) -> TrianglePrefill {
        TrianglePrefill { shape, sizes: TriangleMix::new(1, 2, 3), thresholds: TriangleThresholds::ALWAYS }
    }

    #[test]
    fn layers_are_summed_by_kind() {
        let sparse = TriangleLayers::first(3).unwrap();
        let shape = AttentionShape::new(2, 1, 8);
        let block = NonZeroU64::new(4).unwrap();
        let forecast = TriangleForecast::new(&prefill(shape), 16, (5, sparse), block).unwrap();
        assert_eq!(forecast.dense_pairs, 136);
        assert_eq!(forecast.model_pairs(), 2 * 136 + 3 * forecast.triangle_pairs);
        assert_eq!(forecast.model(10.0, 1.0), 23.0);
        assert_eq!(forecast.cache_bytes, 2 * 16 * 8 * 2 * 5);
        assert_eq!(forecast.dense_flops(), 4.0 * 136.0 * 16.0);
        assert!(forecast.share() < 1.0 && forecast.block_share() <= 1.0);
    }

    #[test]
    fn sizes_that_no_count_holds_are_refused() {
        let none = TriangleLayers::default;
        let shape = AttentionShape::new(2, 1, 8);
        let refused = |shape, tokens, layers| {
            let made = TriangleForecast::new(&prefill(shape), tokens, layers, NonZeroU64::MIN);
            assert!(made.unwrap_err().breaks(&crate::rules::ARGUMENT_VALUE));
        };
        refused(shape, TriangleForecast::MAX_TOKENS + 1, (1, none()));
        refused(shape, 1, (usize::MAX, none()));
        refused(shape, 1, (2, TriangleLayers::first(3).unwrap()));
        refused(AttentionShape::new(2, 1, usize::MAX).scale(1.0), 1, (1, none()));
        refused(AttentionShape::new(3, 2, 8), 1, (1, none()));
    }
}
