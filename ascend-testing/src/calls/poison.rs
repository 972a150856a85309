//! NaN where a call has nothing to read.

use super::Call;
use ascend_spec::attention_problem::{Rows, Work};
use ascend_spec::ops::fused_infer_attention_score::{Argument, CheckedCall, Parameter};
use std::collections::HashSet;

impl Call {
    /// NaN in all rows of a key or a value that no sequence has: of blocks that are not used, behind a sequence's last
    /// token. Other tensors stay as they are.
    pub fn poison(&self, checked: &CheckedCall<'_>, argument: Argument, contents: &mut [u8]) {
        let problem = &checked.problem;
        let padded = problem.query_padding.is_some() || problem.key_padding.is_some();
        if problem.work != Work::Attend || padded {
            return;
        }
        let is_key = match argument.parameter {
            Parameter::Key => true,
            Parameter::Value => false,
            _ => return,
        };
        let mut used = HashSet::new();
        let table = self.contents.iter().find(|(of, _)| of.parameter == Parameter::BlockTable);
        let mut rows: Option<Rows> = None;
        let mut batches = 0;
        for b in 0..problem.batch {
            let own = problem.key_value(b);
            if own.list_index != argument.index {
                continue;
            }
            rows = Some(if is_key { own.key } else { own.value });
            let of = problem.sequence(b, Default::default());
            match (&problem.pages, table) {
                (Some(pages), Some((_, table))) => {
                    batches = pages.blocks;
                    for j in 0..of.kv_len {
                        let at = pages.table.offset as usize
                            + b * pages.row as usize
                            + j / pages.block_size * pages.column as usize;
                        let id = i32::from_le_bytes(table[4 * at..][..4].try_into().unwrap());
                        used.insert((id as usize, j % pages.block_size));
                    }
                }
                _ => {
                    batches = batches.max(own.batch + 1);
                    used.extend((0..of.kv_len).map(|j| (own.batch, of.kv_first + j)));
                }
            }
        }
        let Some(rows) = rows.filter(|rows| rows.dtype.is_half()) else {
            return;
        };
        let described = self.describe();
        let count = match &problem.pages {
            Some(pages) => pages.block_size,
            None => {
                let shape = described.tensor(argument).unwrap().shape;
                let extents = checked.layout.input().extents(&shape, problem.kv_heads as i64);
                extents.unwrap().rows as usize
            }
        };
        let dim = if is_key { problem.head_dim } else { problem.value_dim };
        for batch in 0..batches {
            for row in (0..count).filter(|&row| !used.contains(&(batch, row))) {
                for head in 0..problem.kv_heads {
                    for d in 0..dim {
                        let at = rows.element((batch, head, row), d) as usize * 2;
                        if let Some(element) = contents.get_mut(at..at + 2) {
                            element.fill(0xff);
                        }
                    }
                }
            }
        }
    }
}
