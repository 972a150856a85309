//! The blocks of a paged cache that a call reads.

use std::collections::BTreeMap;

use ascend_spec::TensorDesc;
use ascend_spec::ops::fused_infer_attention_score::{AntiquantMode, Arguments, Parameter};

/// The blocks that a call reads, and its block table with these numbered anew.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Old numbers of the blocks, in the call's cache; the index of a block here is its new number.
    pub(super) read: Vec<usize>,
    /// The new table, row by row.
    pub(super) table: Vec<i32>,
}

impl Blocks {
    /// Renumbers a table with rows of `columns` entries, over a cache of `blocks` blocks. Entries that no sequence
    /// reaches become 0; entries that are no blocks of the cache stay as they are, which is wrong for the new cache
    /// too.
    pub(super) fn new(table: &[i32], columns: usize, blocks: usize, arguments: &Arguments<TensorDesc>) -> Self {
        let mut numbers = BTreeMap::new();
        let mut read = Vec::new();
        let mut renumbered = Vec::with_capacity(table.len());
        for (b, row) in table.chunks(columns.max(1)).enumerate() {
            let reached = reached(arguments, b).unwrap_or(columns);
            for (column, &entry) in row.iter().enumerate() {
                let block = usize::try_from(entry).ok().filter(|&block| block < blocks);
                renumbered.push(match block {
                    _ if column >= reached => 0,
                    None => entry,
                    Some(block) => *numbers.entry(block).or_insert_with(|| {
                        read.push(block);
                        i32::try_from(read.len() - 1).unwrap_or(i32::MAX)
                    }),
                });
            }
        }
        if read.is_empty() && blocks > 0 {
            // A cache has at least one block.
            read.push(0);
        }
        Self { read, table: renumbered }
    }
}

/// Number of entries that sequence `b` reaches in its row; `None` for all.
fn reached(arguments: &Arguments<TensorDesc>, b: usize) -> Option<usize> {
    let lengths = arguments.actual_seq_lengths_kv.as_deref()?;
    let keys = match lengths {
        // One length serves all sequences.
        [only] => *only,
        lengths => *lengths.get(b)?,
    };
    let block_size = u64::try_from(arguments.block_size).ok()?;
    let blocks = u64::try_from(keys).ok()?.checked_add(block_size.checked_sub(1)?)? / block_size;
    usize::try_from(blocks).ok()
}

/// CANN's number for a query in groups of 32 with a shared exponent.
const MXFP8: i64 = 6;

/// Whether a tensor of a paged call has a part for each block, along its first axis.
pub(super) fn has_blocks(parameter: Parameter, arguments: &Arguments<TensorDesc>) -> bool {
    // All scales of MXFP8 keys and values belong to their blocks.
    let mxfp8 = arguments.query_quant_mode == MXFP8;
    let paged = |mode: i64| {
        mxfp8
            || matches!(
                AntiquantMode::from_acl(mode),
                Some(AntiquantMode::PerTokenPaged | AntiquantMode::PerTokenHeadPaged)
            )
    };
    match parameter {
        Parameter::Key | Parameter::Value | Parameter::KeyRope => true,
        Parameter::AntiquantScale | Parameter::AntiquantOffset => paged(arguments.antiquant_mode),
        Parameter::KeyAntiquantScale | Parameter::KeyAntiquantOffset => paged(arguments.key_antiquant_mode),
        Parameter::ValueAntiquantScale | Parameter::ValueAntiquantOffset => paged(arguments.value_antiquant_mode),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_numbered_as_they_are_first_read_and_wrong_ones_stay_wrong() {
        let mut arguments =
            Arguments { block_size: 16, actual_seq_lengths_kv: Some(vec![20, 1, 0]), ..Arguments::default() };
        let table = [4, 1, 9, 1, 77, 9, 3, 3, 3];
        let blocks = |arguments: &Arguments<TensorDesc>| Blocks::new(&table, 3, 10, arguments);
        let read = |call: &Arguments<TensorDesc>| (blocks(call).read, blocks(call).table);
        let all = vec![0, 1, 2, 1, 77, 2, 3, 3, 3];
        assert_eq!(read(&arguments), (vec![4, 1], vec![0, 1, 0, 1, 0, 0, 0, 0, 0]));
        // With wrong lengths or block sizes every block is kept that may be meant.
        arguments.block_size = 0;
        assert_eq!(read(&arguments), (vec![4, 1, 9, 3], all.clone()));
        arguments.block_size = 16;
        arguments.actual_seq_lengths_kv = Some(vec![i64::MAX, -1]);
        assert_eq!(read(&arguments), (vec![4, 1, 9, 3], all));
        arguments.actual_seq_lengths_kv = Some(vec![0]);
        assert_eq!(read(&arguments), (vec![0], vec![0; 9]));
    }
}
