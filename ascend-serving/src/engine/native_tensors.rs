//! What a layer of native sparse attention reads and writes in a step.

use ascend_attention::{Element, Tensor};

/// What a layer of native sparse attention gets in a step. Queries, keys and values are packed, with the padding of the
/// metadata.
#[derive(Clone, Copy, Debug)]
pub struct NativeTensors<'a, T: Element> {
    /// Queries, `[tokens, N, 192]`.
    pub query: &'a Tensor<T>,
    /// Keys of the new tokens, `[tokens, kv_heads, 192]`.
    pub key: &'a Tensor<T>,
    /// Values of the new tokens, `[tokens, kv_heads, 128]`.
    pub value: &'a Tensor<T>,
    /// The weight of each token of a block and each key head in a compressed key, `[block, kv_heads]`.
    pub key_weight: &'a Tensor<T>,
    /// The weights of compressed values, `[block, kv_heads]`.
    pub value_weight: &'a Tensor<T>,
}

/// The attention of a layer in three branches, each `[tokens, N, 128]`. The model multiplies each by its gate, and adds
/// them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NativeBranches<T: Element> {
    /// Attention to compressed tokens; zeros for a token that sees none.
    pub compressed: Tensor<T>,
    /// Attention to the selected blocks.
    pub selected: Tensor<T>,
    /// Attention to the last tokens.
    pub window: Tensor<T>,
}
