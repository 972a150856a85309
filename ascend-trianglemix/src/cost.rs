//! What the ways to compute rows that leave keys out cost, as predicted before anything runs.

use ascend_attention::blockwise::{SIDE, SIDE_BLOCK};
use ascend_attention::spec::geometry::{BlockMap, MaskGeometry, TriangleMix, TrianglePart, TriangleRows};

use crate::rows::{RowSpan, TriangleChoice, TriangleThresholds};

/// The predicted costs of the ways to compute some rows, in pairs of row and key of a call over many rows, for each
/// head.
///
/// Both ways compute the same blocks whole. Where the triangle ends within a block, calls of the stock operator mask
/// it, and block-sparse calls compute it row by row ([`ascend_attention::blockwise`]), at
/// [`ROW_PAIR`](Self::ROW_PAIR) for each pair. Each call and merge costs [`CALL`](Self::CALL). What the second way
/// costs on an NPU is not known, so that [`BlockSparseUse::Never`](crate::BlockSparseUse::Never) is the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TriangleCost {
    /// Of calls of the stock operator with its own masks.
    pub stock: u128,
    /// Of one block-sparse call, if a block is full, and calls for the rows of partial blocks.
    pub block_sparse: u128,
}

impl TriangleCost {
    /// Cost of a pair in a call whose sequences are single rows: 1.5 as measured on the emulation, rounded up. On an
    /// NPU, where each such row reads its pages alone, it was never measured.
    pub const ROW_PAIR: u128 = 2;

    /// Cost of a call or merge: [`TriangleThresholds::MEASURED`] pays for four more of them than a dense prompt has.
    pub const CALL: u128 = TriangleThresholds::MEASURED.min_saved_pairs / 4;

    /// Predicts for rows with these masks, of which the stock operator computes these spans.
    pub(crate) fn new(sizes: TriangleMix, masks: &[MaskGeometry], spans: &[RowSpan]) -> Self {
        let pairs = |blocks: u128| blocks.saturating_mul(SIDE as u128).saturating_mul(SIDE as u128);
        let calls = |span: &RowSpan| match span {
            RowSpan::Middle(_) if sizes.num_sink_tokens > 0 => 3,
            RowSpan::Middle(_) | RowSpan::Causal(_) => 1,
        };
        let stock_calls: u128 = spans.iter().map(calls).sum();
        let [mut full, mut partial, mut filled, mut block_calls] = [0u128; 4];
        for mask in masks {
            let map = BlockMap::new(mask, SIDE_BLOCK);
            let counts = map.counts();
            full = full.saturating_add(counts.full);
            partial = partial.saturating_add(counts.partial);
            filled = filled.saturating_add(map.rows_without_full().into());
            // A call for partial blocks, one more where the last page is not whole, and as many merges as that; beside
            // the copies of the first rows, which have no full block, where others have.
            let pages = if mask.kv_len().is_multiple_of(SIDE as u64) { 2 } else { 4 };
            block_calls = block_calls.saturating_add(pages).saturating_add(u128::from(counts.full > 0));
        }
        let blocks = match full {
            0 => 0,
            // One call for all full blocks, and a block for rows that have none.
            _ => pairs(full.saturating_add(filled)).saturating_add(Self::CALL),
        };
        Self {
            stock: pairs(full.saturating_add(partial)).saturating_add(stock_calls.saturating_mul(Self::CALL)),
            block_sparse: blocks
                .saturating_add(pairs(partial).saturating_mul(Self::ROW_PAIR))
                .saturating_add(block_calls.saturating_mul(Self::CALL)),
        }
    }
}

/// The mask of a request with so many rows, earlier ones, and what was chosen for it.
pub(crate) fn geometry(sizes: TriangleMix, (first_row, rows): (usize, usize), choice: &TriangleChoice) -> MaskGeometry {
    let (first_row, rows) = (first_row as u64, rows as u64);
    let (part, end) = match choice {
        TriangleChoice::Dense(_) => (TrianglePart::Dense, rows),
        TriangleChoice::Sparse { rows, .. } => (TrianglePart::Triangle, rows.end as u64),
    };
    // The rows behind those that leave keys out are the last of the prompt, if any are in the step.
    let prompt_len = first_row.saturating_add(end).saturating_add(sizes.num_last_tokens);
    let rows = TriangleRows { first_row, rows, prompt_len };
    sizes.geometry(part, rows)
}
