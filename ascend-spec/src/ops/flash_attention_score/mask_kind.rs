//! What the mask tensor is for, and where its element for a row and key is.

use super::Sequence;
use crate::View;

/// What the mask tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskKind {
    /// There is no mask tensor.
    None,
    /// It is the compressed mask of its mode, which [`MaskGeometry`](crate::MaskGeometry) replaces.
    Compressed,
    /// It hides keys on top of the geometry: non-zero hides.
    Full(FullMask),
}

/// The layout of the elements of a full mask, counted in row-major order whatever the strides: the operator makes a
/// contiguous copy of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullMask {
    /// One mask for each sequence and head, or for several of them, in which case the strides are 0.
    Batched(View),
    /// The masks of packed sequences one after the other, each as large as the scores of its sequence. Shapes of four
    /// axes suggest another order: masks of the longest sequence's size for all.
    Packed {
        /// Whether each head has a mask of its own.
        heads: bool,
    },
    /// One mask for the rows and keys of all packed sequences, of which each sequence uses its block.
    Diagonal {
        /// Elements from one row to the next.
        row: i64,
    },
}

impl FullMask {
    /// The elements for the rows and keys of a sequence, counted from its first ones, in each of `heads` heads.
    pub fn rows(&self, sequence: &Sequence, heads: usize) -> View {
        match *self {
            FullMask::Batched(all) => all.of_batch(sequence.index),
            FullMask::Packed { heads: true } => sequence.scores(heads),
            FullMask::Packed { heads: false } => View { head: 0, ..sequence.scores(1) },
            FullMask::Diagonal { row } => {
                let first_row = (sequence.q_first as i64).saturating_mul(row);
                View { offset: first_row.saturating_add(sequence.kv_first as i64), batch: 0, head: 0, row, dim: 1 }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_reads_its_own_elements() {
        let sequence = Sequence { index: 1, q_first: 2, q_len: 3, kv_first: 5, kv_len: 4, scores_before: 10 };
        let element = |mask: FullMask| mask.rows(&sequence, 2).element(1, 2, 3);
        let batched = FullMask::Batched(View { offset: 0, batch: 100, head: 20, row: 4, dim: 1 });
        assert_eq!(element(batched), 100 + 20 + 8 + 3);
        assert_eq!(element(FullMask::Packed { heads: false }), 10 + 2 * 4 + 3);
        assert_eq!(element(FullMask::Packed { heads: true }), 20 + 12 + 2 * 4 + 3);
        assert_eq!(element(FullMask::Diagonal { row: 9 }), 4 * 9 + 8);
    }
}
