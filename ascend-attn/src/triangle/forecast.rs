//! What is known before anything runs: numbers of pairs, blocks and bytes.

use std::num::NonZeroU64;

use ascend_attention::mask::TriangleLayers;
use ascend_attention::spec::geometry::{
    BlockCounts, BlockMap, CompressedMask, TriangleMix, TrianglePart, TriangleRows,
};
use ascend_serving::{AttentionShape, TrianglePrefill};

/// Bytes of an element of keys, values and outputs, which have half precision.
const HALF: usize = 2;

/// Counts of a dense layer and of one that leaves out the middle.
pub(super) struct Forecast {
    pub(super) tokens: usize,
    pub(super) shape: AttentionShape,
    pub(super) sizes: TriangleMix,
    pub(super) layers: usize,
    /// The layers that leave out the middle.
    pub(super) sparse: TriangleLayers,
    /// Pairs of row and key in one head of a dense layer.
    pub(super) dense_pairs: u128,
    pub(super) triangle_pairs: u128,
    pub(super) block: u64,
    pub(super) dense_blocks: BlockCounts,
    pub(super) triangle_blocks: BlockCounts,
    /// Bytes of the keys and values of all layers.
    pub(super) cache_bytes: u128,
    /// Bytes of a mask of every row and key.
    pub(super) whole_mask_bytes: u128,
    /// Bytes of the compressed mask.
    pub(super) mask_bytes: u128,
    /// Bytes of the outputs of a layer that are merged.
    pub(super) part_bytes: u128,
}

impl Forecast {
    pub(super) fn new(
        prefill: &TrianglePrefill,
        tokens: usize,
        (layers, sparse): (usize, TriangleLayers),
        block: u64,
    ) -> Self {
        let (shape, sizes) = (prefill.shape, prefill.sizes);
        let side = NonZeroU64::new(block).unwrap_or(NonZeroU64::MIN);
        let of = |part| {
            let geometry = sizes.geometry(part, TriangleRows::whole(tokens as u64));
            let blocks = BlockMap::new(&geometry, side).counts();
            (geometry.visible(), blocks)
        };
        let (dense_pairs, dense_blocks) = of(TrianglePart::Dense);
        let (triangle_pairs, triangle_blocks) = of(TrianglePart::Triangle);
        let n = tokens as u128;
        let cached = 2 * n * (shape.kv_heads * shape.head_dim * HALF) as u128;
        let template = CompressedMask::Causal.shape();
        Self {
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
            cache_bytes: cached * layers as u128,
            whole_mask_bytes: n * n,
            mask_bytes: template.elements().map_or(0, u128::from),
            part_bytes: prefill.part_bytes(tokens, HALF),
        }
    }

    /// Share of the pairs that a sparse layer, which leaves out the middle, computes.
    pub(super) fn share(&self) -> f64 {
        self.triangle_pairs as f64 / self.dense_pairs.max(1) as f64
    }

    /// Share of the blocks that a sparse layer computes.
    pub(super) fn block_share(&self) -> f64 {
        self.triangle_blocks.computed() as f64 / self.dense_blocks.computed().max(1) as f64
    }

    /// The sum over all layers of a quantity that is `dense` in a dense and `sparse` in a sparse layer.
    pub(super) fn model(&self, dense: f64, sparse: f64) -> f64 {
        let count = self.sparse.indices().len();
        dense * (self.layers - count) as f64 + sparse * count as f64
    }

    /// The number of pairs over all layers.
    pub(super) fn model_pairs(&self) -> u128 {
        let count = self.sparse.indices().len() as u128;
        self.dense_pairs * (self.layers as u128 - count) + self.triangle_pairs * count
    }

    /// Operations of a dense layer: a multiplication and an addition for each pair and each element of key and value.
    pub(super) fn dense_flops(&self, shape: &AttentionShape) -> f64 {
        4.0 * self.dense_pairs as f64 * shape.heads as f64 * shape.head_dim as f64
    }
}
