//! The rules of NsaCompressWithCache.

use super::{NsaCompressCacheCall, NsaCompressCacheProblem, Parameter, Version};
use crate::DType::{Bf16, Float16, Int32};
use crate::allowed::{Allowed, Axis, Checked, Named, Noted, Outcome, Shapes};
use crate::contract::first_lint;
use crate::ops::native_sparse::compression_rules;
use crate::ops::sparse_sequences::{Room, SparseSequences, TokenLayout};
use crate::rule::{lint, rules};
use crate::{Change, DType, Target, TensorDesc, Violation};

compression_rules! {
    "nsa_compress_with_cache", "NsaCompressWithCache",
    required INNER_NULLPTR "input, weight, slotMapping and outputCache" "tokens, weights, slots and the cache",
    lengths "1: lengths", heads "1 to 50, or an even number up to 64, of";
    EMPTY = "nsa_compress_with_cache.empty", PARAM_INVALID, V1, "NsaCompressWithCache API, shapes",
        "no tensor is empty",
        "leave the call out where there is nothing to compress";
    INPUT = "nsa_compress_with_cache.input", INNER_NULLPTR, V1, "NsaCompressWithCache tiling, input",
        "with blockTable input is [blocks, page, N, D], without it [T, N, D]",
        "give the blocks of a cache with their table, or tokens one after the other without one";
    PAGE = "nsa_compress_with_cache.page_block_size", INNER_NULLPTR, V1, "NsaCompressWithCache tiling, pageBlockSize",
        "blocks of a paged cache have pageBlockSize tokens, 64 or 128",
        "make the cache of blocks of such a size";
    BATCH = "nsa_compress_with_cache.batch", INNER_NULLPTR, V1, "NsaCompressWithCache tiling, batch",
        "actSeqLen is given, slotMapping is [B] and blockTable [B, columns] for as many sequences",
        "give the length, the slot and the blocks of each sequence";
    CACHE = "nsa_compress_with_cache.output_cache", INNER_NULLPTR, V1, "NsaCompressWithCache tiling, outputCache",
        "outputCache has three axes, with the heads and elements of input",
        "describe the cache as [slots, N, D]";
    LENGTHS = "nsa_compress_with_cache.lengths", Overrun("tokens of other memory are read"), V1,
        "NsaCompressWithCache documentation, actSeqLen",
        "lengths are at least 0, and the row of each sequence in blockTable has room for its tokens, or input for all",
        "give the length of each sequence, and a table of as many columns as the longest has blocks";
    CONTENTS = "nsa_compress_with_cache.contents", Overrun("tokens of other memory are read or written"), V1,
        "NsaCompressWithCache kernel, slotMapping and blockTable",
        "sequences that write a token have each a slot of its own in the cache, and blocks of the cache",
        "take lengths, slots and table of one batch and one cache";
}

/// The numbers of heads that are compressed.
struct HeadCounts;

impl Allowed<i64> for HeadCounts {
    fn admits(&self, heads: &i64) -> bool {
        (1..=50).contains(heads) || *heads <= 64 && *heads > 0 && heads % 2 == 0
    }

    fn name(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("1 to 50, or an even number up to 64")
    }
}

impl NsaCompressCacheCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of slots and
    /// table are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<NsaCompressCacheProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let input = REQUIRED.requires(self.input, "input")?;
        let weight = REQUIRED.requires(self.weight, "weight")?;
        let slots = REQUIRED.requires(self.slot_mapping, "slotMapping")?;
        let cache = REQUIRED.requires(self.output_cache, "outputCache")?;
        self.entry(input.dtype)?;
        let (page, [heads, dim]) = match (self.block_table, &input.shape[..]) {
            (Some(_), &[blocks, page, heads, dim]) => {
                PAGE.takes(Named("tokens of a block:", page), [64, 128])?;
                let fix = || Change::set(Parameter::PageBlockSize, page);
                PAGE.takes(Named("pageBlockSize", self.page_block_size), page).fix(fix)?;
                (Some([blocks, page]), [heads, dim])
            }
            (None, &[_, heads, dim]) => (None, [heads, dim]),
            (table, _) => {
                let allowed = if table.is_some() { "[blocks, page, N, D]" } else { "[T, N, D] without blockTable" };
                return Err(INPUT.broken(input.shape, allowed));
            }
        };
        COMPRESSION.weight(&weight, self.compress_block_size, heads)?;
        LENGTH_TYPE.takes(self.act_seq_len_type, 1).fix(|| Change::set(Parameter::ActSeqLenType, 1))?;
        let sizes = [self.compress_block_size, self.compress_stride];
        let compression = COMPRESSION.resolve(sizes, [heads, dim], HeadCounts)?;
        self.batch(&slots)?;
        CACHE.takes(cache.shape, Shapes(&[&[Axis::Any, Axis::Of(heads), Axis::Of(dim)]]))?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        let batch = count(slots.shape[0]);
        let key = match page {
            Some([blocks, page]) => Room { layout: TokenLayout::PaBsnd, outer: count(blocks), rows: count(page) },
            None => Room { layout: TokenLayout::Tnd, outer: 1, rows: count(input.shape[0]) },
        };
        Ok(NsaCompressCacheProblem {
            compression,
            sequences: SparseSequences {
                batch,
                query: Room { layout: TokenLayout::Bsnd, outer: batch, rows: 1 },
                key,
                columns: self.block_table.map_or(0, |table| count(table.shape[1])),
                causal: false,
            },
            heads: count(heads),
            dim: count(dim),
            slots: count(cache.shape[0]),
        })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let Ok(problem) = self.check(target) else {
            return Ok(());
        };
        let SparseSequences { key, columns, .. } = problem.sequences;
        let paged = key.layout == TokenLayout::PaBsnd;
        let room = if paged { columns.saturating_mul(key.rows) } else { key.rows };
        let mut left = i64::try_from(room).unwrap_or(i64::MAX);
        first_lint(allowed, |report| {
            for &length in self.act_seq_len.unwrap_or_default() {
                let fits = (0..=left).contains(&length);
                let given = format_args!("{length} tokens of a sequence");
                lint!(report, fits, LENGTHS, given, format_args!("0 to {left}"));
                if !fits {
                    break;
                }
                left -= if paged { 0 } else { length };
            }
        })
    }

    /// What the entry point looks at.
    fn entry(&self, own: DType) -> Checked {
        DTYPE.takes(Named("input", own), [Float16, Bf16])?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::SlotMapping | Parameter::BlockTable => Int32,
                _ => own,
            })
        })?;
        FORMAT.formats(self)?;
        for (argument, desc) in self.each_tensor() {
            let elements = desc.elements().unwrap_or(0);
            EMPTY.takes(Named(format_args!("elements of {}:", argument.acl_name()), elements), 1..)?;
        }
        LAYOUT.takes(self.layout.unwrap_or("TND"), "TND").fix(|| Change::set(Parameter::Layout, "TND"))
    }

    /// Checks that each sequence has a length, a slot and blocks.
    fn batch(&self, slots: &TensorDesc) -> Checked {
        BATCH.takes(Named("slotMapping", slots.shape), Shapes(&[&[Axis::Any]]))?;
        let sequences = slots.shape[0];
        let lengths = BATCH.requires(self.act_seq_len, "actSeqLen")?;
        let given = i64::try_from(lengths.len()).unwrap_or(i64::MAX);
        BATCH.takes(Noted(given, "lengths"), sequences)?;
        match self.block_table {
            Some(table) => BATCH.takes(Named("blockTable", table.shape), Shapes(&[&[Axis::Of(sequences), Axis::Any]])),
            None => Ok(()),
        }
    }
}
