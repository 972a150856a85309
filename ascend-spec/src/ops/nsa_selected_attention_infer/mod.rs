//! NsaSelectedAttentionInfer: attention to the tokens of selected blocks of a paged cache.
//!
//! A row has a list of blocks of `l'` tokens for each key head, as
//! [NsaCompressAttentionInfer](super::nsa_compress_attention_infer) selects them, and attends to their tokens up to its
//! own position.

pub mod rules;

use super::native_sparse::NsaAttention;
use super::sparse_sequences::checked_contents;
use crate::Cann::V8_5;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};
use std::fmt;
use std::ops::Range;

declare_operator! {
    /// Source: aclnnNsaSelectedAttentionInfer, parameter table.
    nsa_selected_attention_infer_arguments, "NsaSelectedAttentionInfer", #[derive(Copy)] NsaSelectedCall<'a>;
    1 { query: tensor, Query, "query",
        "Queries, `[B, S, N1 * 192]`, `[B, S, N1, 192]` or `[T, N1, 192]`." }
    1 { key: tensor, Key, "key",
        "Cache of keys, `[blocks, page, N2 * 192]` or `[blocks, page, N2, 192]`." }
    1 { value: tensor, Value, "value",
        "Cache of values, `[blocks, page, N2 * 128]` or `[blocks, page, N2, 128]`." }
    1 { topk_indices: tensor, TopkIndices, "topkIndices",
        "The blocks that each row attends to, for each key head, by their number in its sequence: \
         `[B, S, N2, selectBlockCount]` or `[T, N2, selectBlockCount]`; below 0 is none." }
    1 { atten_mask: tensor, AttenMask, "attenMask", "Not looked at: null." }
    1 { block_table: tensor, BlockTable, "blockTable", "The blocks of each sequence in the cache, `[B, M]`." }
    1 { actual_q_seq_len: ints, ActualQSeqLen, "actualQSeqLen", "Query rows of each sequence, also in TND." }
    1 { actual_kv_seq_len: ints, ActualKvSeqLen, "actualKvSeqLen", "Tokens of each sequence." }
    1 { layout: optional_text, Layout, "layout", "Axes of `query`: `BSH`, `BSND` or `TND`." }
    1 { num_heads: int = 1, NumHeads, "numHeads", "Heads of `query`, N1." }
    1 { num_key_value_heads: int = 1, NumKeyValueHeads, "numKeyValueHeads", "Heads of the cache, N2." }
    1 { select_block_size: int = 64, SelectBlockSize, "selectBlockSize", "Tokens of a selected block, l'." }
    1 { select_block_count: int = 16, SelectBlockCount, "selectBlockCount",
        "Blocks of each row and key head in `topkIndices`." }
    1 { page_block_size: int = 128, PageBlockSize, "pageBlockSize", "Tokens of a block of the cache." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { sparse_mode: int = 0, SparseMode, "sparseMode", "0: no mask is given." }
    1 { output: output, Output, "output", "Attention, in the shape of `query` with the elements of a value." }
}

versions! {
    /// The version of NsaSelectedAttentionInfer.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnNsaSelectedAttentionInfer", "8.5").exported_since(V8_5).on_a2_a3(V8_5),
    }
}

described_by! { NsaSelectedAttentionInfer, rules::RULES }

impl CallContract for NsaSelectedAttentionInfer {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.output = arguments.output.or_else(|| arguments.call().attention());
    }

    contents_checked_for! { target, |call, problem, integers| {
        let numbers = call.numbers(&problem, integers(Parameter::BlockTable));
        checked_contents(&problem.attention.sequences, &numbers, &rules::CONTENTS)
    } }
}

/// A call of NsaSelectedAttentionInfer that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NsaSelectedProblem {
    /// Queries and the cache.
    pub attention: NsaAttention,
    /// Tokens of a selected block.
    pub select: usize,
}

/// A list of blocks by which a row attends to other tokens than it seems to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectionFault {
    /// A block begins past the last token of the sequence.
    Beyond {
        /// The block.
        block: i64,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A block is there twice.
    Twice {
        /// The block.
        block: i64,
    },
    /// A block stands after a negative entry: the operator counts the entries that are not negative, and reads only
    /// that number of entries, from the first on.
    Behind {
        /// The block.
        block: i64,
    },
}

impl fmt::Display for SelectionFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SelectionFault::Beyond { block, tokens } => {
                write!(f, "block {block} begins past the {tokens} tokens of the sequence, and is left out")
            }
            SelectionFault::Twice { block } => write!(f, "block {block} is there twice, and counts twice"),
            SelectionFault::Behind { block } => {
                write!(f, "block {block} stands after an entry below 0, and may be left out; give the blocks first")
            }
        }
    }
}

impl NsaSelectedProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.attention.is_idle()
    }

    /// The list of a row, counted over all rows of the query, and a key head, of the lists of all.
    pub fn list<'l>(&self, lists: &'l [i64], row: usize, kv_head: usize) -> &'l [i64] {
        let NsaAttention { kv_heads, selected, .. } = self.attention;
        let list = lists.get(row.saturating_mul(kv_heads).saturating_add(kv_head).saturating_mul(selected)..);
        let list = list.unwrap_or_default();
        &list[..list.len().min(selected)]
    }

    /// The tokens that a row reads, in the order of its list, of the first `tokens` of its sequence.
    pub fn chosen<'l>(&self, list: &'l [i64], tokens: usize) -> impl Iterator<Item = Range<usize>> + Clone + use<'l> {
        let select = self.select;
        let first = list.iter().filter_map(move |&block| usize::try_from(block).ok()?.checked_mul(select));
        let first = first.filter(move |&first| first < tokens);
        first.map(move |first| first..tokens.min(first.saturating_add(select)))
    }

    /// The first entry by which a row of a sequence of `tokens` tokens attends to others than its list seems to say.
    /// A block that the row sees only a part of is no fault. `seen` is memory for the search.
    pub fn fault(&self, list: &[i64], tokens: usize, seen: &mut Vec<bool>) -> Option<SelectionFault> {
        let blocks = tokens.div_ceil(self.select.max(1));
        seen.clear();
        seen.resize(blocks, false);
        let mut none = false;
        list.iter().find_map(|&block| {
            let Ok(number) = usize::try_from(block) else {
                none = true;
                return None;
            };
            match seen.get_mut(number) {
                _ if none => Some(SelectionFault::Behind { block }),
                None => Some(SelectionFault::Beyond { block, tokens }),
                Some(seen) => std::mem::replace(seen, true).then_some(SelectionFault::Twice { block }),
            }
        })
    }

    /// Whether the list of a key head has another number of blocks than that of the first, or names other ones of the
    /// last two blocks: the operator reads both from the first.
    pub fn differs(&self, first: &[i64], other: &[i64], tokens: usize) -> bool {
        let last = tokens.div_ceil(self.select.max(1));
        let read = |list: &[i64]| {
            let has = |back: usize| last.checked_sub(back).is_some_and(|block| list.contains(&(block as i64)));
            (list.iter().filter(|&&block| block >= 0).count(), has(1), has(2))
        };
        read(first) != read(other)
    }
}

impl WalkedTensors<NsaSelectedCall<'_>> for NsaSelectedProblem {
    fn walked_shape(&self, _: &NsaSelectedCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle() && parameter != Parameter::AttenMask).then_some(desc.shape)
    }
}

impl NsaSelectedCall<'_> {
    /// What the sequences of the call, whose problem this is, read.
    pub fn numbers(&self, problem: &NsaSelectedProblem, table: Vec<i64>) -> [Vec<i64>; 3] {
        let keys = self.actual_kv_seq_len.unwrap_or_default();
        problem.attention.numbers(self.actual_q_seq_len, keys, table)
    }

    /// Attention, as the inputs imply it; `None` for shapes that no tensor can have.
    pub fn attention(&self) -> Option<TensorDesc> {
        let (query, value) = (self.query?, self.value?);
        let last = query.shape.rank().checked_sub(1)?;
        let dim = match value.shape.rank() {
            4 => *value.shape.last()?,
            _ => value.shape.last()?.checked_div(self.num_key_value_heads)?,
        };
        let heads = if self.layout == Some("BSH") { self.num_heads } else { 1 };
        let output = TensorDesc::packed(query.dtype, query.shape.with(last, dim.checked_mul(heads)?));
        output.byte_range().map(|_| output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROBLEM: NsaSelectedProblem =
        NsaSelectedProblem { attention: NsaAttention { kv_heads: 2, selected: 3, ..NsaAttention::IDLE }, select: 16 };

    #[test]
    fn lists_name_whole_blocks_up_to_the_position_of_the_row() {
        let lists = [0, 2, -1, 1, -1, 2, 9, 0, 2, i64::MAX, 7];
        let chosen = |row, head, tokens| PROBLEM.chosen(PROBLEM.list(&lists, row, head), tokens).collect::<Vec<_>>();
        assert_eq!(chosen(0, 0, 40), [0..16, 32..40]);
        assert_eq!(chosen(0, 1, 33), [16..32, 32..33]);
        assert_eq!(chosen(1, 0, 40), [0..16, 32..40]);
        assert_eq!(chosen(1, 1, 40), []);
        assert_eq!(chosen(0, 0, 0), []);
    }

    #[test]
    fn lists_that_are_read_otherwise_are_told() {
        let fault = |list: &[i64]| PROBLEM.fault(list, 40, &mut Vec::new());
        assert_eq!(fault(&[2, 0, -1]), None);
        assert_eq!(fault(&[2, 0, 2]), Some(SelectionFault::Twice { block: 2 }));
        assert_eq!(fault(&[0, 3, -1]), Some(SelectionFault::Beyond { block: 3, tokens: 40 }));
        assert_eq!(fault(&[0, -7, 1]), Some(SelectionFault::Behind { block: 1 }));
        assert!(!PROBLEM.differs(&[0, 2, 1], &[2, 1, 0], 40));
        assert!(PROBLEM.differs(&[0, 2, 1], &[2, 1, -1], 40));
        assert!(PROBLEM.differs(&[0, 2, -1], &[0, 1, -1], 40));
        assert!(!PROBLEM.differs(&[0, -1, -1], &[0, -1, -1], 0));
    }
}
