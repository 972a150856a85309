//! NsaCompress: makes one token of each block of tokens, for native sparse attention.
//!
//! `output[i, h] = Σ weight[j, h] · input[i · d + j, h]` over the `l` tokens of a block, where a block of a sequence
//! begins every `d` tokens. The blocks that lie within a sequence are compressed, those of all sequences one after the
//! other.

pub mod rules;

use super::native_sparse::Compression;
use crate::Cann::V8_5;
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnNsaCompress, parameter table.
    nsa_compress_arguments, "NsaCompress", #[derive(Copy)] NsaCompressCall<'a>;
    1 { input: tensor, Input, "input", "Tokens of all sequences, one after the other, `[T, N, D]`." }
    1 { weight: tensor, Weight, "weight", "A weight for each token of a block and each head, `[l, N]`." }
    1 { act_seq_len: ints, ActSeqLen, "actSeqLen", "The end of each sequence: a running sum of lengths." }
    1 { layout: text = "TND", Layout, "layout", "Axes of `input`: `TND`." }
    1 { compress_block_size: int = 32, CompressBlockSize, "compressBlockSize", "Tokens of a block, l." }
    1 { compress_stride: int = 16, CompressStride, "compressStride",
        "Tokens from the beginning of a block to that of the next, d." }
    1 { act_seq_len_type: int = 0, ActSeqLenType, "actSeqLenType", "0: `actSeqLen` has running sums." }
    1 { output: output, Output, "output",
        "A token for each block, `[blocks of all sequences, N, D]` in the dtype of `input`." }
}

versions! {
    /// The version of NsaCompress.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnNsaCompress", "8.5").exported_since(V8_5).on_a2_a3(V8_5),
    }
}

described_by! { NsaCompress, rules::RULES }

impl CallContract for NsaCompress {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.output = arguments.output.or_else(|| arguments.call().compressed());
    }
}

/// A call of NsaCompress that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NsaCompressProblem {
    /// The blocks.
    pub compression: Compression,
    /// Tokens of the input.
    pub tokens: usize,
    /// Blocks of all sequences, and so tokens that are written.
    pub blocks: usize,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Whether a launch may leave the call's tensors.
    pub overruns: bool,
}

impl NsaCompressProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.blocks == 0
    }

    /// The first token of each block, sequence by sequence, where sequences have these ends. Ends are cut to the
    /// tokens that there are.
    pub fn firsts<'e>(&self, ends: &'e [i64]) -> impl Iterator<Item = usize> + use<'e> {
        let &NsaCompressProblem { compression, tokens, .. } = self;
        sequences(ends, tokens).flat_map(move |(start, length)| {
            let firsts = 0..compression.count(length);
            firsts.map(move |block| start + block * compression.stride)
        })
    }
}

/// First token and number of tokens of each sequence with these ends, of which there is room for `tokens`.
fn sequences(ends: &[i64], tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    ends.iter().scan(0, move |start, &end| {
        let first = *start;
        *start = usize::try_from(end).unwrap_or(0).clamp(first, tokens);
        Some((first, *start - first))
    })
}

impl WalkedTensors<NsaCompressCall<'_>> for NsaCompressProblem {
    fn walked_shape(&self, _: &NsaCompressCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            Parameter::Output => Some(desc.shape.with(0, i64::try_from(self.blocks).unwrap_or(i64::MAX))),
            _ => Some(desc.shape),
        }
    }

    /// As described by the trait; an output of another number of tokens keeps its strides.
    fn walked(&self, call: &NsaCompressCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<TensorDesc> {
        Some(TensorDesc { shape: self.walked_shape(call, parameter, desc)?, ..*desc })
    }
}

impl NsaCompressCall<'_> {
    /// The output, as the inputs imply it; `None` without tokens of three axes, for blocks without tokens, or for
    /// shapes that no tensor can have.
    pub fn compressed(&self) -> Option<TensorDesc> {
        let input = self.input?;
        let &[tokens, _, _] = &input.shape[..] else {
            return None;
        };
        let positive = |size: i64| usize::try_from(size).ok().filter(|&size| size > 0);
        let compression =
            Compression { block: positive(self.compress_block_size)?, stride: positive(self.compress_stride)? };
        let blocks = self.blocks(&compression, usize::try_from(tokens).ok()?);
        let output = TensorDesc::packed(input.dtype, input.shape.with(0, i64::try_from(blocks).ok()?));
        output.byte_range().map(|_| output)
    }

    /// Blocks of all sequences, for this number of tokens.
    fn blocks(&self, compression: &Compression, tokens: usize) -> usize {
        let sequences = sequences(self.act_seq_len.unwrap_or_default(), tokens);
        sequences.map(|(_, length)| compression.count(length)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_that_descend_or_lie_outside_are_cut() {
        let problem = NsaCompressProblem {
            compression: Compression { block: 4, stride: 2 },
            tokens: 20,
            blocks: 0,
            heads: 1,
            dim: 16,
            overruns: false,
        };
        let firsts = |ends: &[i64]| problem.firsts(ends).collect::<Vec<_>>();
        assert_eq!(firsts(&[7, 10, 20]), [0, 2, 10, 12, 14, 16]);
        assert_eq!(firsts(&[7, 3, i64::MAX]), [0, 2, 7, 9, 11, 13, 15]);
        assert_eq!(firsts(&[i64::MIN, -1, 4]), [0]);
        assert_eq!(firsts(&[]), []);
    }
}
