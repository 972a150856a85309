//! NsaCompressWithCache: makes one token of the newest block of tokens of each sequence, and writes it into a cache.
//!
//! A step of decoding adds a token to each sequence. Where it is the last of a block, the sequence has a new compressed
//! token, of its last `l` tokens, as [NsaCompress](super::nsa_compress) makes it; other sequences leave the cache as it
//! is.

pub mod rules;

use super::native_sparse::Compression;
use super::scatter_pa_kv_cache::{SlotFault, numbered_slot_faults};
use super::sparse_sequences::{SparseContents, SparseSequence, SparseSequences, TokenLayout};
use crate::Cann::V8_5;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};
use std::fmt;

declare_operator! {
    /// Source: aclnnNsaCompressWithCache, parameter table.
    nsa_compress_with_cache_arguments, "NsaCompressWithCache", #[derive(Copy)] NsaCompressCacheCall<'a>;
    1 { input: tensor, Input, "input",
        "Tokens: those of a paged cache, `[blocks, page, N, D]`, or of all sequences, `[T, N, D]`." }
    1 { weight: tensor, Weight, "weight", "A weight for each token of a block and each head, `[l, N]`." }
    1 { slot_mapping: tensor, SlotMapping, "slotMapping",
        "The token of `outputCache` that each sequence writes, `[B]`; read where a sequence has a new block." }
    1 { act_seq_len: ints, ActSeqLen, "actSeqLen", "Tokens of each sequence." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "The blocks of each sequence in a paged cache, `[B, M]`; null for tokens one after the other." }
    1 { layout: optional_text, Layout, "layout", "Axes of `input` that is not paged: `TND` (also null)." }
    1 { compress_block_size: int = 32, CompressBlockSize, "compressBlockSize", "Tokens of a block, l." }
    1 { compress_stride: int = 16, CompressStride, "compressStride",
        "Tokens from the beginning of a block to that of the next, d." }
    1 { act_seq_len_type: int = 1, ActSeqLenType, "actSeqLenType", "1: `actSeqLen` has lengths." }
    1 { page_block_size: int = 128, PageBlockSize, "pageBlockSize", "Tokens of a block of a paged cache." }
    1 { output_cache: inout, OutputCache, "outputCache", "Compressed tokens, `[slots, N, D]`." }
}

versions! {
    /// The version of NsaCompressWithCache.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnNsaCompressWithCache", "8.5").exported_since(V8_5).on_a2_a3(V8_5),
    }
}

described_by! { NsaCompressWithCache, rules::RULES }

impl CallContract for NsaCompressWithCache {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(_: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {}

    contents_checked_for! { target, |call, problem, integers| {
        let [slots, table] = [Parameter::SlotMapping, Parameter::BlockTable].map(integers);
        let numbers = call.numbers(&problem, table);
        let mut wrong = None;
        problem.faults(SparseContents::of(&numbers), &slots, &mut |fault| wrong = wrong.take().or(Some(fault)));
        wrong.map_or(Ok(()), |fault| {
            Err(rules::CONTENTS.broken(fault, "slots and blocks of the caches, each slot once"))
        })
    } }
}

/// A call of NsaCompressWithCache that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NsaCompressCacheProblem {
    /// The blocks that are compressed.
    pub compression: Compression,
    /// The sequences, whose keys are the tokens.
    pub sequences: SparseSequences,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Compressed tokens that the cache has room for.
    pub slots: usize,
}

/// A number on the device that leads outside of a tensor, or to the token of another sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressFault {
    /// A slot that is not in the cache, or that an earlier sequence has too. Its tokens are the sequences.
    Slot(SlotFault),
    /// The block table names no block of the cache for a token.
    NoBlock {
        /// Number of the sequence.
        sequence: usize,
        /// The token.
        token: usize,
    },
}

impl fmt::Display for CompressFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompressFault::Slot(SlotFault::OutOfRange { token: sequence, slot, slots }) => {
                write!(f, "sequence {sequence} writes slot {slot} of {slots}")
            }
            CompressFault::Slot(SlotFault::Negative { token: sequence, slot }) => {
                write!(f, "sequence {sequence} writes slot {slot}")
            }
            CompressFault::Slot(SlotFault::Duplicate { token: sequence, earlier, slot }) => {
                write!(f, "sequences {earlier} and {sequence} write slot {slot}")
            }
            CompressFault::NoBlock { sequence, token } => {
                write!(f, "token {token} of sequence {sequence} is in no block of the cache")
            }
        }
    }
}

impl NsaCompressCacheProblem {
    /// Whether there is no sequence.
    pub fn is_idle(&self) -> bool {
        self.sequences.batch == 0
    }

    /// The sequences whose newest token completes a block, each with the first token of the block.
    pub fn completed<'a>(
        &'a self,
        contents: SparseContents<'a>,
    ) -> impl Iterator<Item = (SparseSequence, usize)> + Clone + 'a {
        let each = self.sequences.each(contents);
        let completed = each.filter(|sequence| self.compression.completes(sequence.keys));
        completed.map(|sequence| (sequence, sequence.keys - self.compression.block))
    }

    /// Calls `visit` with what is wrong with the slots and blocks of sequences that write a token.
    pub fn faults(&self, contents: SparseContents<'_>, slots: &[i64], visit: &mut dyn FnMut(CompressFault)) {
        let written = self.completed(contents).filter_map(|(sequence, _)| {
            let slot = slots.get(sequence.index)?;
            Some((sequence.index, *slot))
        });
        numbered_slot_faults(written, self.slots as u64, &mut |fault| visit(CompressFault::Slot(fault)));
        for (sequence, first) in self.completed(contents) {
            let mut tokens = first..sequence.keys;
            if let Some(token) = tokens.find(|&token| self.sequences.key(&contents, &sequence, token).is_none()) {
                visit(CompressFault::NoBlock { sequence: sequence.index, token });
            }
        }
    }
}

impl WalkedTensors<NsaCompressCacheCall<'_>> for NsaCompressCacheProblem {
    fn walked_shape(&self, _: &NsaCompressCacheCall<'_>, _: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}

impl NsaCompressCacheCall<'_> {
    /// What the sequences of the call, whose problem this is, read: tokens that are not paged have ends.
    pub fn numbers(&self, problem: &NsaCompressCacheProblem, table: Vec<i64>) -> [Vec<i64>; 3] {
        let lengths = self.act_seq_len.unwrap_or_default();
        let mut end = 0i64;
        let lengths = lengths.iter().map(|&length| match problem.sequences.key.layout {
            TokenLayout::Tnd => {
                end = end.saturating_add(length);
                end
            }
            TokenLayout::Bsnd | TokenLayout::PaBsnd => length,
        });
        [Vec::new(), lengths.collect(), table]
    }
}
