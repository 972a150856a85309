//! What a call that holds every rule copies.

use super::{GatherCall, Parameter};
use crate::ops::scatter_pa_kv_cache::Pieces;
use std::ops::Range;

/// A call of GatherPaKvCache that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherProblem {
    /// Number of sequences.
    pub sequences: usize,
    /// Rows of the outputs.
    pub tokens: usize,
    /// Number of blocks in each cache.
    pub blocks: usize,
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Number of blocks that a row of the table can name.
    pub columns: usize,
    /// Whether the lengths array has the start of each sequence (cumulative) rather than its length.
    pub cumulative: bool,
    /// Whether offsets count columns of the table, as in the kernels for caches in the NZ order on Atlas A2 and A3,
    /// rather than tokens.
    pub offsets_in_columns: bool,
    /// The pieces of a key in its cache.
    pub key: Pieces,
    /// The pieces of a value in its cache.
    pub value: Pieces,
}

/// Where a row of the outputs comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A row of a block.
    Row {
        /// Index of the row in the outputs.
        token: usize,
        /// Index of the block in the caches.
        block: usize,
        /// Index of the row in the block.
        row: usize,
    },
    /// The table names a block that the caches do not have.
    NoBlock {
        /// Index of the sequence.
        sequence: usize,
        /// The block id in the table.
        block: i64,
    },
    /// The row of a sequence in the table ends before the sequence does.
    NoColumn {
        /// Index of the sequence.
        sequence: usize,
        /// Index of the table's column.
        column: usize,
    },
    /// A length or an offset is below 0, or a sequence begins before the end of the one before.
    BadNumber {
        /// Index of the sequence.
        sequence: usize,
        /// The number.
        given: i64,
    },
    /// The outputs end before a sequence does.
    NoToken {
        /// Index of the sequence.
        sequence: usize,
        /// Index of the row in the outputs.
        token: usize,
    },
}

impl GatherProblem {
    /// Whether there is no row to copy.
    pub fn is_idle(&self) -> bool {
        self.tokens == 0
    }

    /// Calls `visit` with the source of every row that the call copies. Where the numbers are wrong it calls `visit`
    /// once for a sequence with the fault, and leaves out the rest of that sequence. `table`, `lengths` and `offsets`
    /// are the contents of the tensors; missing numbers count as 0. No row is visited twice, whatever the numbers
    /// are.
    pub fn sources(&self, table: &[i64], lengths: &[i64], offsets: &[i64], visit: &mut dyn FnMut(Source)) {
        let value_at = |values: &[i64], index: usize| values.get(index).copied().unwrap_or(0);
        // The end of the sequence before.
        let mut end = 0;
        for sequence in 0..self.sequences {
            let (start, len) = match self.cumulative {
                true => {
                    let ends = [value_at(lengths, sequence), value_at(lengths, sequence + 1)];
                    (ends[0], ends[1].saturating_sub(ends[0]))
                }
                false => (end, value_at(lengths, sequence)),
            };
            let offset = value_at(offsets, sequence);
            let wrong = [(len, len < 0), (start, start < end), (offset, offset < 0)];
            if let Some((given, _)) = wrong.into_iter().find(|(_, wrong)| *wrong) {
                visit(Source::BadNumber { sequence, given });
                continue;
            }
            end = start.saturating_add(len);
            let [start, len, offset] = [start, len, offset].map(|number| usize::try_from(number).unwrap_or(usize::MAX));
            let first = match self.offsets_in_columns {
                true => offset,
                false => offset / self.block_size.max(1),
            };
            let named = table.get(sequence.saturating_mul(self.columns)..);
            let named = named.unwrap_or(&[]);
            for t in 0..len {
                let source = self.source(named, (sequence, start.saturating_add(t)), first, t);
                visit(source);
                if !matches!(source, Source::Row { .. }) {
                    break;
                }
            }
        }
    }

    /// The source of token `t` of a sequence; `named` is the sequence's row of the table.
    fn source(&self, named: &[i64], (sequence, token): (usize, usize), first: usize, t: usize) -> Source {
        let block_size = self.block_size.max(1);
        let column = first.saturating_add(t / block_size);
        let block = named.get(column).filter(|_| column < self.columns);
        let Some(&block) = block else {
            return Source::NoColumn { sequence, column };
        };
        if token >= self.tokens {
            return Source::NoToken { sequence, token };
        }
        match usize::try_from(block).ok().filter(|&index| index < self.blocks) {
            Some(block) => Source::Row { token, block, row: t % block_size },
            None => Source::NoBlock { sequence, block },
        }
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address: those of all tokens, in caches those of all blocks, and all numbers of the other tensors. Visits
    /// nothing without tokens.
    pub fn touches(&self, call: &GatherCall<'_>, visit: &mut dyn FnMut(Parameter, Range<u64>)) {
        if self.tokens == 0 {
            return;
        }
        for (argument, desc) in call.each_tensor() {
            let cached = self.blocks.saturating_mul(self.block_size);
            let size = desc.dtype.size().unwrap_or(0);
            let (rows, bytes) = match argument.parameter {
                Parameter::KeyCache => (cached, self.key.row_bytes()),
                Parameter::ValueCache => (cached, self.value.row_bytes()),
                Parameter::Key => (self.tokens, self.key.row_bytes()),
                Parameter::Value => (self.tokens, self.value.row_bytes()),
                Parameter::BlockTables => (self.sequences.saturating_mul(self.columns), size),
                Parameter::SeqLens => (self.sequences + usize::from(self.cumulative), size),
                _ => (self.sequences, size),
            };
            let bytes = (rows as u64).saturating_mul(bytes as u64);
            visit(argument.parameter, desc.first_bytes(bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROBLEM: GatherProblem = GatherProblem {
        sequences: 2,
        tokens: 5,
        blocks: 4,
        block_size: 2,
        columns: 3,
        cumulative: false,
        offsets_in_columns: false,
        key: Pieces { count: 1, bytes: 32 },
        value: Pieces { count: 1, bytes: 32 },
    };

    fn sources(problem: &GatherProblem, lengths: &[i64], offsets: &[i64]) -> Vec<Source> {
        let mut found = Vec::new();
        let table = [3, 1, 9, 2, 0, 1];
        problem.sources(&table, lengths, offsets, &mut |source| found.push(source));
        found
    }

    fn row(token: usize, block: usize, row: usize) -> Source {
        Source::Row { token, block, row }
    }

    #[test]
    fn rows_follow_the_table_from_the_offset_on() {
        let plain = [row(0, 3, 0), row(1, 3, 1), row(2, 1, 0), row(3, 2, 0), row(4, 2, 1)];
        assert_eq!(sources(&PROBLEM, &[3, 2], &[]), plain);
        let cumulative = GatherProblem { cumulative: true, ..PROBLEM };
        assert_eq!(sources(&cumulative, &[0, 3, 5], &[]), plain);
        let behind = [row(0, 1, 0), row(1, 0, 0)];
        assert_eq!(sources(&PROBLEM, &[1, 1], &[3, 2]), behind, "whole blocks count");
        let columns = GatherProblem { offsets_in_columns: true, ..PROBLEM };
        assert_eq!(sources(&columns, &[1, 1], &[1, 1]), behind);
    }

    #[test]
    fn numbers_that_lead_nowhere_are_told_once_a_sequence() {
        let found = sources(&PROBLEM, &[5, 1], &[]);
        assert_eq!(found[4..], [Source::NoBlock { sequence: 0, block: 9 }, Source::NoToken { sequence: 1, token: 5 }]);
        let found = sources(&PROBLEM, &[i64::MAX, -3], &[i64::MAX]);
        let bad = |sequence, given| Source::BadNumber { sequence, given };
        let column = usize::try_from(i64::MAX / 2).unwrap();
        let far = Source::NoColumn { sequence: 0, column };
        assert_eq!(found, [far, bad(1, -3)]);
        assert_eq!(sources(&PROBLEM, &[1, 1], &[-2, -1]), [bad(0, -2), bad(1, -1)]);
    }

    #[test]
    fn ends_that_descend_visit_no_row_twice() {
        let cumulative = GatherProblem { sequences: 3, cumulative: true, ..PROBLEM };
        let found = sources(&cumulative, &[0, 2, 0, 2], &[]);
        let bad = Source::BadNumber { sequence: 1, given: -2 };
        let again = Source::BadNumber { sequence: 2, given: 0 };
        assert_eq!(found, [row(0, 3, 0), row(1, 3, 1), bad, again]);
    }
}
