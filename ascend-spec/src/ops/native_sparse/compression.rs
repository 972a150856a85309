//! What the operators share that compress tokens: the rules of blocks, weights and heads.

use super::Compression;
use crate::allowed::{Allowed, Axis, Checked, Multiples, Shapes};
use crate::{Rule, TensorDesc, Violation};

/// Declares the rules of an operator that compresses tokens, in the form of [`rules!`](crate::rule::rules): those that
/// each such operator has and, after them, its own. Also declares the table `COMPRESSION` of the rules that
/// [`CompressionRules`] asks. `$required` is the status of a call without a tensor, `$tensors` and `$pass` say which
/// there are, `$lengths` is the kind of lengths, and `$heads` are the numbers of heads.
macro_rules! compression_rules {
    (
        $id:literal, $operator:literal, required $required:ident $tensors:literal $pass:literal,
        lengths $lengths:literal, heads $heads:literal;
        $($own:tt)*
    ) => {
        $crate::rule::rules! {
            in Scope::A2_A3.since(V8_5);
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products" in Scope::ALL,
                "the product has the operator in the release",
                "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer";
            REQUIRED = $id ".required", $required, V1, $operator " documentation, return values",
                $tensors " are given",
                "pass " $pass;
            DTYPE = $id ".dtype", PARAM_INVALID, V1, $operator " documentation, dtypes",
                "input is FLOAT16 or BF16, weight and the output have its dtype, and tensors of numbers are INT32",
                "convert the named tensor to one of the allowed dtypes";
            format of $id, PARAM_INVALID, $operator " documentation, parameters";
            LAYOUT = $id ".layout", PARAM_INVALID, V1, $operator " documentation, layout",
                "layout is TND",
                "spell the layout as CANN does";
            LENGTH_TYPE = $id ".act_seq_len_type", INNER_NULLPTR, V1, $operator " tiling, actSeqLenType",
                "actSeqLenType is " $lengths,
                "pass this value, and such lengths";
            WEIGHT = $id ".weight", PARAM_INVALID, V1, $operator " documentation, weight",
                "weight is [compressBlockSize, N]",
                "give a weight for each token of a block and each head";
            BLOCK = $id ".block", INNER_NULLPTR, V1, $operator " tiling, compressBlockSize",
                "compressBlockSize is a multiple of 16 up to 128",
                "compress blocks of such a size";
            STRIDE = $id ".stride", INNER_NULLPTR, V1, $operator " tiling, compressStride",
                "compressStride is 16, 32, 48 or 64 and no larger than compressBlockSize",
                "let blocks begin at such a distance";
            HEADS = $id ".heads", INNER_NULLPTR, V1, $operator " tiling, heads",
                "there are " $heads " heads",
                "compress fewer heads at a time";
            HEAD_DIM = $id ".head_dim", INNER_NULLPTR, V1, $operator " tiling, heads",
                "heads have a multiple of 16 elements, up to 256",
                "fill heads up with zeros to such a size, and divide a larger one into several heads of its weights";
            $($own)*
        }

        /// The rules of blocks, weights and heads.
        const COMPRESSION: $crate::ops::native_sparse::CompressionRules =
            $crate::ops::native_sparse::CompressionRules {
                weight: &WEIGHT,
                block: &BLOCK,
                stride: &STRIDE,
                heads: &HEADS,
                head_dim: &HEAD_DIM,
            };
    };
}

pub(crate) use compression_rules;

/// The rules of blocks, weights and heads.
pub(crate) struct CompressionRules {
    pub(crate) weight: &'static Rule,
    pub(crate) block: &'static Rule,
    pub(crate) stride: &'static Rule,
    pub(crate) heads: &'static Rule,
    pub(crate) head_dim: &'static Rule,
}

impl CompressionRules {
    /// Checks the weights of the tokens of a block, for each head.
    pub(crate) fn weight(&self, weight: &TensorDesc, block: i64, heads: i64) -> Checked {
        self.weight.takes(weight.shape, Shapes(&[&[Axis::Of(block), Axis::Of(heads)]]))
    }

    /// Checks blocks, and the heads of a token and their elements.
    pub(crate) fn resolve(
        &self,
        [block, stride]: [i64; 2],
        [heads, dim]: [i64; 2],
        head_counts: impl Allowed<i64>,
    ) -> Result<Compression, Violation> {
        self.block.takes(block, Multiples(16, ..=128))?;
        self.stride.takes(stride, Multiples(16, ..=block.min(64)))?;
        self.heads.takes(heads, head_counts)?;
        self.head_dim.takes(dim, Multiples(16, ..=256))?;
        // Both are positive.
        Ok(Compression { block: block as usize, stride: stride as usize })
    }
}
