//! Which rows of a step leave keys out, and which calls compute them.

use std::fmt;
use std::ops::Range;

use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

/// When leaving keys out is worth the additional calls, and which calls do so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TriangleThresholds {
    /// Fewest rows that leave keys out.
    pub min_sparse_rows: usize,
    /// Fewest pairs of row and key left out.
    pub min_saved_pairs: u128,
    /// When BlockSparseAttention computes what is left.
    pub block_sparse: BlockSparseUse,
}

/// When BlockSparseAttention computes the rows of a step, with the rows of partial blocks by further calls
/// ([`ascend_attention::blockwise`]). The other steps, those over a paged cache, and those that the operator does not
/// take (before CANN 9.0, or for heads of other sizes) are calls of the stock operator with its own masks.
///
/// The default is [`Never`](Self::Never), since the cost of rows by themselves is known on the emulation alone
/// ([`TriangleCost::ROW_PAIR`](crate::TriangleCost::ROW_PAIR)): on an NPU, measure both before choosing another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockSparseUse {
    /// Never.
    #[default]
    Never,
    /// Where [`TriangleCost`](crate::TriangleCost) predicts that it is cheaper.
    WhereCheaper,
    /// Wherever the operator takes the call.
    Always,
}

impl TriangleThresholds {
    /// As measured by a port to the 910B3 with heads of 128 elements: dense attention is faster below these bounds.
    pub const MEASURED: Self =
        Self { min_sparse_rows: 128, min_saved_pairs: 913_152, block_sparse: BlockSparseUse::Never };

    /// Leaves keys out always, even where it saves nothing.
    pub const ALWAYS: Self = Self { min_sparse_rows: 1, min_saved_pairs: 1, block_sparse: BlockSparseUse::Never };
}

/// How the rows of a request in a step are computed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TriangleChoice {
    /// Some rows leave keys out.
    Sparse {
        /// The rows that leave keys out, counted from the request's first row in the step.
        rows: Range<usize>,
        /// Pairs of row and key that are left out, for each head.
        saved_pairs: u128,
    },
    /// All rows see every key up to their own.
    Dense(WhyDense),
}

/// Why rows of a request are computed densely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhyDense {
    /// A single row: decoding.
    SingleRow,
    /// The end of the prompt is not known, so that every row might be one of the last.
    PromptUnknown,
    /// All rows are among the first, whose window reaches the sinks, or among the last.
    NothingLeftOut,
    /// They are fewer than the [`TriangleThresholds`] require.
    BelowThresholds {
        /// Rows that would leave keys out.
        rows: usize,
        /// Pairs that would be left out.
        pairs: u128,
    },
}

impl fmt::Display for WhyDense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SingleRow => f.write_str("a single row"),
            Self::PromptUnknown => f.write_str("a prompt of unknown length"),
            Self::NothingLeftOut => f.write_str("rows that leave nothing out"),
            Self::BelowThresholds { rows, pairs } => {
                write!(f, "{rows} rows that leave {pairs} keys out, too few")
            }
        }
    }
}

impl TriangleThresholds {
    /// Chooses for `rows` rows from `first_row` on of a prompt whose length may be known.
    pub(crate) fn choose(
        &self,
        sizes: TriangleMix,
        (first_row, rows): (usize, usize),
        prompt_len: Option<usize>,
    ) -> TriangleChoice {
        let dense = TriangleChoice::Dense;
        if rows <= 1 {
            return dense(WhyDense::SingleRow);
        }
        let Some(prompt_len) = prompt_len else {
            return dense(WhyDense::PromptUnknown);
        };
        let triangle_rows =
            TriangleRows { first_row: first_row as u64, rows: rows as u64, prompt_len: prompt_len as u64 };
        let prompt_len = triangle_rows.prompt_len;
        let Some(first) = sizes.first_sparse_row(prompt_len) else {
            return dense(WhyDense::NothingLeftOut);
        };
        let place = |row: u64| {
            let row = usize::try_from(row).unwrap_or(usize::MAX);
            row.saturating_sub(first_row).min(rows)
        };
        let sparse = place(first)..place(sizes.first_last_row(prompt_len));
        if sparse.is_empty() {
            return dense(WhyDense::NothingLeftOut);
        }
        let rows = sparse.end.saturating_sub(sparse.start);
        let saved_pairs = sizes.geometry(TrianglePart::Middle, triangle_rows).visible();
        if rows < self.min_sparse_rows || saved_pairs < self.min_saved_pairs {
            let pairs = saved_pairs;
            return dense(WhyDense::BelowThresholds { rows, pairs });
        }
        TriangleChoice::Sparse { rows: sparse, saved_pairs }
    }
}

/// Rows of a request, and the keys that a call over them reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) request: usize,
    /// Rows, counted in the step.
    pub(crate) rows: Range<usize>,
    /// Keys, counted in the request.
    pub(crate) keys: Range<usize>,
}

/// Contiguous rows that the same calls compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RowSpan {
    /// Dense rows, of several requests in order.
    Causal(Vec<Piece>),
    /// Rows of one request that leave keys out; the keys are those of their windows.
    Middle(Piece),
}

/// Divides the rows of a step into spans. `requests` has for each request its rows in the step, the number of its
/// earlier rows, and what was chosen.
pub(crate) fn row_spans(
    requests: impl IntoIterator<Item = (Range<usize>, usize, TriangleChoice)>,
    window: usize,
) -> Vec<RowSpan> {
    let mut spans = Vec::new();
    for (request, (all, first_row, choice)) in requests.into_iter().enumerate() {
        let sparse = match choice {
            TriangleChoice::Dense(_) => all.end..all.end,
            TriangleChoice::Sparse { rows, .. } => {
                let at = |row: usize| all.start.saturating_add(row).min(all.end);
                at(rows.start)..at(rows.end)
            }
        };
        // The position in its request of a row of the step.
        let position = |row: usize| first_row.saturating_add(row.saturating_sub(all.start));
        let mut causal = |rows: Range<usize>| {
            if rows.is_empty() {
                return;
            }
            let keys = 0..position(rows.end);
            let piece = Piece { request, rows, keys };
            match spans.last_mut() {
                Some(RowSpan::Causal(pieces)) => pieces.push(piece),
                _ => spans.push(RowSpan::Causal(vec![piece])),
            }
        };
        causal(all.start..sparse.start);
        if sparse.is_empty() {
            continue;
        }
        let keys = position(sparse.start).saturating_sub(window)..position(sparse.end);
        let behind = sparse.end..all.end;
        spans.push(RowSpan::Middle(Piece { request, rows: sparse, keys }));
        if !behind.is_empty() {
            let keys = 0..position(behind.end);
            spans.push(RowSpan::Causal(vec![Piece { request, rows: behind, keys }]));
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_several_requests_form_spans() {
        let sizes = TriangleMix::new(2, 3, 4);
        let choose = |first, rows, prompt| TriangleThresholds::ALWAYS.choose(sizes, (first, rows), prompt);
        // A decode, a whole prompt of 20 tokens, a chunk from the middle of a prompt of 40, a decode.
        let requests = [
            (0..1, 9, choose(9, 1, Some(5))),
            (1..21, 0, choose(0, 20, Some(20))),
            (21..31, 15, choose(15, 10, Some(40))),
            (31..32, 7, choose(7, 1, None)),
        ];
        let piece = |request, rows, keys| Piece { request, rows, keys };
        assert_eq!(
            row_spans(requests, 3),
            [
                RowSpan::Causal(vec![piece(0, 0..1, 0..10), piece(1, 1..7, 0..6)]),
                RowSpan::Middle(piece(1, 7..17, 3..16)),
                RowSpan::Causal(vec![piece(1, 17..21, 0..20)]),
                RowSpan::Middle(piece(2, 21..31, 12..25)),
                RowSpan::Causal(vec![piece(3, 31..32, 0..8)]),
            ]
        );
    }

    #[test]
    fn what_is_dense_says_why() {
        let sizes = TriangleMix::new(2, 3, 4);
        let thresholds = TriangleThresholds { min_sparse_rows: 5, min_saved_pairs: 20, ..TriangleThresholds::ALWAYS };
        let choose = |first, rows, prompt| match thresholds.choose(sizes, (first, rows), prompt) {
            TriangleChoice::Dense(why) => Some(why.to_string()),
            TriangleChoice::Sparse { .. } => None,
        };
        let said = |why: &str| Some(why.to_owned());
        assert_eq!(choose(9, 1, Some(50)), said("a single row"));
        assert_eq!(choose(0, 50, None), said("a prompt of unknown length"));
        assert_eq!(choose(0, 10, Some(10)), said("rows that leave nothing out"));
        assert_eq!(choose(46, 4, Some(50)), said("rows that leave nothing out"));
        assert_eq!(choose(0, 14, Some(14)), said("4 rows that leave 10 keys out, too few"));
        assert_eq!(choose(0, 15, Some(15)), said("5 rows that leave 15 keys out, too few"));
        assert_eq!(choose(0, 16, Some(16)), None);
        assert_eq!(choose(0, 0, Some(16)), said("a single row"));
        assert_eq!(choose(usize::MAX, usize::MAX, Some(usize::MAX)), said("rows that leave nothing out"));
    }
}
