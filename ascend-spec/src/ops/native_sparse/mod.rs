//! What the operators of native sparse attention share: the blocks that are compressed and those that are selected.
//!
//! Native sparse attention (Yuan and others 2025) has three branches for each query: attention to compressed tokens,
//! attention to the best blocks of original tokens, and attention to a window. Compression makes one token of each
//! block of tokens; the weights of the first branch choose the blocks of the second.

mod attention;
mod compression;

pub use attention::NsaAttention;
pub(crate) use attention::{NsaAttentionRules, NsaTensors, nsa_attention_rules};
pub(crate) use compression::{CompressionRules, compression_rules};

use crate::{Dims, TensorDesc};

/// The blocks of tokens that are compressed into one token each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compression {
    /// Tokens of a block.
    pub block: usize,
    /// Tokens from the beginning of a block to that of the next.
    pub stride: usize,
}

impl Compression {
    /// Number of compressed tokens of a sequence: the blocks that lie within its tokens.
    pub fn count(&self, tokens: usize) -> usize {
        let last = tokens.checked_sub(self.block);
        last.map_or(0, |last| last / self.stride.max(1) + 1)
    }

    /// Whether the last token of a sequence is also the last of a block.
    pub fn completes(&self, tokens: usize) -> bool {
        tokens.checked_sub(self.block).is_some_and(|last| last.is_multiple_of(self.stride.max(1)))
    }

    /// Number of tokens up to the end of the last block of `compressed` tokens.
    pub fn reach(&self, compressed: usize) -> usize {
        let before = compressed.checked_sub(1);
        before.map_or(0, |before| before.saturating_mul(self.stride).saturating_add(self.block))
    }

    /// Number of blocks of `select` tokens up to the end of the last block of `compressed` tokens.
    pub fn blocks(&self, select: usize, compressed: usize) -> usize {
        self.reach(compressed).div_ceil(select.max(1))
    }
}

/// A tensor whose last axis, which is that of all heads, is an axis of heads and one of their elements. A tensor that
/// no such axes describe stays as it is.
pub fn with_heads(desc: &TensorDesc, heads: usize) -> TensorDesc {
    let split = || {
        let heads = i64::try_from(heads).ok().filter(|&heads| heads > 0)?;
        let (&all, outer) = desc.shape.split_last()?;
        let (&step, strides) = desc.strides.split_last()?;
        let dim = all / heads;
        let shape = Dims::new(&[outer, &[heads, dim]].concat())?;
        let strides = Dims::new(&[strides, &[step.saturating_mul(dim), step]].concat())?;
        Some(TensorDesc { shape, strides, ..*desc })
    };
    split().unwrap_or(*desc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType::Float16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_are_those_of_the_definition(block in 1usize..40, stride in 1usize..40, tokens in 0usize..200) {
            let compression = Compression { block, stride };
            let firsts: Vec<usize> = (0..tokens).step_by(stride).filter(|first| first + block <= tokens).collect();
            prop_assert_eq!(compression.count(tokens), firsts.len());
            prop_assert_eq!(compression.reach(firsts.len()), firsts.last().map_or(0, |last| last + block));
            let ends = firsts.last().is_some_and(|last| last + block == tokens);
            prop_assert_eq!(compression.completes(tokens), ends);
        }
    }

    #[test]
    fn elements_of_heads_are_where_they_were() {
        let whole = TensorDesc { strides: Dims::of([100, 2]), ..TensorDesc::packed(Float16, Dims::of([3, 12])) };
        let split = with_heads(&whole, 4);
        assert_eq!((split.shape, split.strides), (Dims::of([3, 4, 3]), Dims::of([100, 6, 2])));
        assert_eq!(split.byte_range(), whole.byte_range());
        assert_eq!(with_heads(&whole, 0), whole);
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let compression = Compression { block: usize::MAX, stride: 0 };
        assert_eq!([0, 1, usize::MAX].map(|tokens| compression.count(tokens)), [0, 0, 1]);
        assert_eq!(compression.reach(usize::MAX), usize::MAX);
    }
}
