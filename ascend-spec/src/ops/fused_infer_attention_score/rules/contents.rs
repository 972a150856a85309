//! Rules on what no description of a call shows: the numbers in device memory that are positions in other tensors, and
//! those of a position bias.

use crate::attention_problem::{BiasLints, Work};
use crate::ops::fused_infer_attention_score::{CheckedCall, Parameter, Version};
use crate::rule::rules;
use crate::{DType, Rule, TensorDesc, Violation};
use std::iter;

rules! {
    in Scope::ALL;
    BLOCK = "block_table.range", Overrun("the block is read from wherever it would be"), V1,
        "FusedInferAttentionScore documentation, blockTable",
        "every block that the table names for a sequence's keys is one of the cache's",
        "name blocks of this cache, or pass the cache that the table was made for";
    ROW = "block_table.row_short", Lint("the entries behind a row's blocks are blocks of the cache too"), V1,
        "FusedInferAttentionScore documentation, blockTable",
        "the row of each sequence names as many blocks as its keys need",
        "name every block of the sequence, or shorten its key length";
    PADDING = "padding_size.range", Overrun("rows before the first are read or written"), V1,
        "FusedInferAttentionScore documentation, queryPaddingSize and kvPaddingSize",
        "left padding leaves room for the rows of every sequence",
        "count the unused rows behind the sequence: rows of the axis less rows of the sequence at most";
    BIAS_FINITE = "pse_shift.finite",
        Lint("only numbers change, to NaN in whole rows"), V1, "reports from hardware, pseShift of -inf",
        "the numbers of pseShift are finite: hardware may make NaN of a row with an infinity",
        "hide keys by attenMask, or by the lowest finite number of the type in pseShift";
    BIAS_ROW = "pse_shift.hidden_row",
        Lint("only numbers change"), V1, "FusedInferAttentionScore kernel, softmax of equal scores",
        "pseShift hides some keys of a row by the lowest number of its type, never all: softmax weighs keys by \
         differences, so that such a row becomes a mean of hidden values",
        "hide keys by attenMask, and leave out rows that see none";
}

/// The lints on the numbers of a position bias.
pub(crate) const BIAS: BiasLints = BiasLints { non_finite: &BIAS_FINITE, hidden_row: &BIAS_ROW };

/// Bounds of the numbers that a call reads on the device and uses as positions: the blocks of a table, the sizes of
/// left padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContentBounds {
    /// Number of blocks in the paged cache, which every id of a table must be below. 0 without a cache.
    blocks: usize,
    /// Number of sequences.
    batch: usize,
    /// Number of blocks that each of the first sequences needs; every later sequence needs as many as the last of
    /// these.
    needed: Vec<usize>,
    /// The largest number in `needed`.
    most_needed: usize,
    /// Most left padding of the query, if it counts.
    query_padding: Option<i64>,
    /// Most left padding of the keys, if it counts.
    key_padding: Option<i64>,
}

impl CheckedCall<'_> {
    /// Bounds of the numbers that the call reads on the device and uses as positions; `None` if it reads no such
    /// number.
    pub fn content_bounds(&self) -> Option<ContentBounds> {
        let problem = &self.problem;
        if problem.work == Work::Nothing {
            return None;
        }
        let (query, key) = (problem.query_padding, problem.key_padding);
        let attends = problem.work == Work::Attend;
        let pages = problem.pages.as_ref().filter(|_| attends);
        if pages.is_none() && query.is_none() && key.is_none() {
            return None;
        }
        let needed: Vec<usize> = match pages {
            Some(pages) => {
                problem.distinct_sequences().map(|b| problem.kv_len(b).div_ceil(pages.block_size.max(1))).collect()
            }
            None => Vec::new(),
        };
        let room = |rows: usize, longest: Option<usize>| {
            let room = rows.saturating_sub(longest.unwrap_or(0));
            i64::try_from(room).unwrap_or(i64::MAX)
        };
        Some(ContentBounds {
            blocks: pages.map_or(0, |pages| pages.blocks),
            batch: if needed.is_empty() { 0 } else { problem.batch },
            most_needed: needed.iter().copied().max().unwrap_or(0),
            needed,
            query_padding: query
                .map(|_| room(problem.query_rows, problem.distinct_sequences().map(|b| problem.q_len(b)).max())),
            key_padding: key
                .map(|_| room(problem.key_rows, problem.distinct_sequences().map(|b| problem.kv_len(b)).max())),
        })
    }
}

impl ContentBounds {
    /// Number of blocks in the cache, where there is a table.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Most blocks that a sequence needs.
    pub fn most_needed(&self) -> usize {
        self.most_needed
    }

    /// Checks a table whose largest block is `largest`; `None` is a table without blocks.
    ///
    /// # Errors
    /// `block_table.range`.
    pub fn admits_block(&self, largest: Option<i64>) -> Result<(), Violation> {
        match largest.filter(|&block| !self.holds(block)) {
            None => Ok(()),
            Some(block) => Err(self.no_block(format_args!("block {block}"))),
        }
    }

    /// Checks how many blocks each row of a table names. Rows beyond the end of `blocks` are not checked.
    ///
    /// # Errors
    /// `block_table.row_short`.
    pub fn admits_rows(&self, blocks: impl Iterator<Item = usize>) -> Result<(), Violation> {
        for (sequence, (needed, named)) in self.needed().zip(blocks).enumerate() {
            if named < needed {
                return Err(ROW.broken(
                    format_args!("{named} blocks of sequence {sequence}"),
                    format_args!("{needed} or more, which its keys need"),
                ));
            }
        }
        Ok(())
    }

    /// Checks the entries of a table that the call reads: `table` has a row of `columns` for each sequence. Entries
    /// after the blocks that a sequence needs may be anything.
    ///
    /// # Errors
    /// `block_table.range`, or `block_table.row_short` for a table that ends too early.
    pub fn admits_table(&self, table: &[i32], columns: usize) -> Result<(), Violation> {
        for (sequence, needed) in self.needed().enumerate() {
            let first = sequence.saturating_mul(columns);
            let row = table.get(first..).unwrap_or(&[]);
            let row = row.get(..columns).unwrap_or(row);
            let Some(used) = row.get(..needed) else {
                return self.admits_rows((0..=sequence).map(|b| if b == sequence { row.len() } else { usize::MAX }));
            };
            if let Some(block) = used.iter().find(|&&block| !self.holds(i64::from(block))) {
                return Err(self.no_block(format_args!("block {block} of sequence {sequence}")));
            }
        }
        Ok(())
    }

    /// Checks a size of left padding, of `queryPaddingSize` or `kvPaddingSize`.
    ///
    /// # Errors
    /// `padding_size.range`.
    pub fn admits_padding(&self, parameter: Parameter, size: i64) -> Result<(), Violation> {
        let most = match parameter {
            Parameter::QueryPaddingSize => self.query_padding,
            Parameter::KvPaddingSize => self.key_padding,
            _ => None,
        };
        match most {
            // The operator treats a negative size as 0.
            Some(most) if size > most => {
                Err(PADDING.broken(format_args!("{} {size}", parameter.acl_name()), format_args!("at most {most}")))
            }
            _ => Ok(()),
        }
    }

    /// Checks the contents of a call's tensors, its block table among them; `integers` returns those of a tensor by
    /// its name.
    ///
    /// # Errors
    /// `block_table.range`, `block_table.row_short`, `padding_size.range`.
    pub(crate) fn admits_contents(
        &self,
        block_table: Option<&TensorDesc>,
        integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        if let Some(table) = block_table {
            let blocks: Vec<i32> = integers(Parameter::BlockTable.name())
                .into_iter()
                .map(|block| i32::try_from(block).unwrap_or(-1))
                .collect();
            let columns = table.shape.get(1).copied().unwrap_or(0);
            self.admits_table(&blocks, usize::try_from(columns).unwrap_or(0))?;
        }
        for parameter in [Parameter::QueryPaddingSize, Parameter::KvPaddingSize] {
            if let Some(&size) = integers(parameter.name()).first() {
                self.admits_padding(parameter, size)?;
            }
        }
        Ok(())
    }

    /// Number of blocks that each sequence needs.
    fn needed(&self) -> impl Iterator<Item = usize> {
        let last = self.needed.last().copied().unwrap_or(0);
        let all = self.needed.iter().copied().chain(iter::repeat(last));
        all.take(self.batch)
    }

    fn holds(&self, block: i64) -> bool {
        usize::try_from(block).is_ok_and(|block| block < self.blocks)
    }

    #[cold]
    fn no_block(&self, given: std::fmt::Arguments<'_>) -> Violation {
        let last = self.blocks.saturating_sub(1);
        let rule: &'static Rule = &BLOCK;
        rule.broken(given, format_args!("0 to {last}, as the cache has {} blocks", self.blocks))
    }
}

impl ContentBounds {
    /// The tensors whose elements are positions in other tensors.
    pub const PARAMETERS: [Parameter; 3] =
        [Parameter::BlockTable, Parameter::QueryPaddingSize, Parameter::KvPaddingSize];

    /// Whether the operator reads a tensor of positions in this form: a table `[B, M]` in INT32, or a size in INT64.
    pub fn reads(dtype: DType, shape: &[usize]) -> bool {
        matches!((dtype, shape), (DType::Int32, [_, _]) | (DType::Int64, [1]))
    }

    /// Checks the content of such a tensor, little-endian, against the call. Content in another form than
    /// [`ContentBounds::reads`] names is not checked.
    ///
    /// # Errors
    /// As for [`ContentBounds::admits_table`] and [`ContentBounds::admits_padding`].
    pub fn admits_content(
        &self,
        parameter: Parameter,
        (dtype, shape): (DType, &[usize]),
        bytes: &[u8],
    ) -> Result<(), Violation> {
        match (dtype, shape) {
            (DType::Int32, &[_, columns]) => {
                let ids = bytes.as_chunks().0.iter();
                let table: Vec<i32> = ids.map(|id| i32::from_le_bytes(*id)).collect();
                self.admits_table(&table, columns)
            }
            (DType::Int64, [1]) => {
                let size = bytes.as_chunks().0.first().copied().map(i64::from_le_bytes);
                self.admits_padding(parameter, size.unwrap_or(0))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::fused_infer_attention_score::{FiaCall, Version};
    use crate::{DType, Soc, Target, TensorDesc};

    fn desc(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
        TensorDesc::contiguous(dtype, shape)
    }

    /// The id of the rule that is broken.
    fn broken_by(outcome: Result<(), Violation>) -> Option<&'static str> {
        outcome.err().map(|violation| violation.rule.id)
    }

    #[test]
    fn tables_are_held_against_the_cache_and_the_lengths() {
        let cache = [desc(DType::Float16, &[4, 16, 64]).unwrap()];
        let call = FiaCall {
            query: desc(DType::Float16, &[2, 1, 64]),
            key: &cache,
            value: &cache,
            attention_out: desc(DType::Float16, &[2, 1, 64]),
            block_table: desc(DType::Int32, &[2, 3]),
            block_size: 16,
            actual_seq_lengths_kv: Some(&[33, 5]),
            num_heads: 1,
            ..FiaCall::new("BSH")
        };
        let problem = call.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
        let bounds = problem.content_bounds().unwrap();
        assert_eq!((bounds.blocks(), bounds.most_needed()), (4, 3));
        // Entries after the blocks that are read may be anything.
        assert_eq!(bounds.admits_table(&[3, 0, 1, 2, -1, 1 << 30], 3), Ok(()));
        for table in [[3, 0, 4, 2, 0, 0], [3, 0, -1, 2, 0, 0], [0, 1, 2, i32::MAX, 0, 0]] {
            assert_eq!(broken_by(bounds.admits_table(&table, 3)), Some("block_table.range"));
        }
        for (table, columns) in [(&[0, 1, 2][..], 3), (&[0, 1, 2, 3], 2), (&[], 0)] {
            assert_eq!(broken_by(bounds.admits_table(table, columns)), Some("block_table.row_short"));
        }
        assert_eq!(bounds.admits_block(Some(3)), Ok(()));
        assert_eq!(bounds.admits_block(None), Ok(()));
        let text = bounds.admits_block(Some(1 << 20)).unwrap_err().to_string();
        assert!(text.contains("0 to 3"), "{text}");
        assert_eq!(bounds.admits_rows([3, 1].into_iter()), Ok(()));
        let text = bounds.admits_rows([3, 0].into_iter()).unwrap_err().to_string();
        assert!(text.contains("0 blocks of sequence 1"), "{text}");
    }

    #[test]
    fn padding_leaves_room_for_the_longest_sequence() {
        let key = [desc(DType::Float16, &[2, 1, 32, 64]).unwrap()];
        let call = FiaCall {
            query: desc(DType::Float16, &[2, 1, 16, 64]),
            key: &key,
            value: &key,
            attention_out: desc(DType::Float16, &[2, 1, 16, 64]),
            query_padding_size: desc(DType::Int64, &[1]),
            kv_padding_size: desc(DType::Int64, &[1]),
            actual_seq_lengths: Some(&[10, 12]),
            actual_seq_lengths_kv: Some(&[32, 7]),
            num_heads: 1,
            ..FiaCall::new("BNSD")
        };
        let problem = call.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
        let bounds = problem.content_bounds().unwrap();
        for (parameter, most) in [(Parameter::QueryPaddingSize, 4), (Parameter::KvPaddingSize, 0)] {
            for size in [i64::MIN, -1, 0, most] {
                assert_eq!(bounds.admits_padding(parameter, size), Ok(()));
            }
            for size in [most + 1, i64::MAX] {
                assert_eq!(broken_by(bounds.admits_padding(parameter, size)), Some("padding_size.range"));
            }
        }
        let unpadded = FiaCall { query_padding_size: None, kv_padding_size: None, ..call.clone() };
        let problem = unpadded.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
        assert_eq!(problem.content_bounds(), None);
    }
}
