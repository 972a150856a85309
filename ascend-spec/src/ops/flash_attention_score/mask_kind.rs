//! What the mask tensor is for, and where its element for a row and key is.

use super::Sequence;

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
    Batched {
        /// Elements from one sequence to the next.
        batch: u64,
        /// Elements from one head to the next.
        head: u64,
        /// Elements from one row to the next.
        row: u64,
    },
    /// The masks of packed sequences one after the other, each as large as the scores of its sequence. Shapes of four
    /// axes suggest another order: masks of the longest sequence's size for all.
    Packed {
        /// Whether each head has a mask of its own.
        heads: bool,
    },
    /// One mask for the rows and keys of all packed sequences, of which each sequence uses its block.
    Diagonal {
        /// Elements from one row to the next.
        row: u64,
    },
}

impl FullMask {
    /// The element for row `i` and key `j` of a sequence, counted from its first ones, in head `head` of `heads`.
    /// Saturates beyond what fits in memory.
    pub fn element(&self, sequence: &Sequence, (head, heads): (usize, usize), i: usize, j: usize) -> u64 {
        let step = |count: usize, stride: u64| (count as u64).saturating_mul(stride);
        let [first, row, j] = match *self {
            FullMask::Batched { batch, head: head_step, row } => {
                [step(sequence.index, batch).saturating_add(step(head, head_step)), step(i, row), j as u64]
            }
            FullMask::Packed { heads: of_heads } => {
                let scores = step(sequence.q_len, sequence.kv_len as u64);
                let (head, heads) = if of_heads { (head, heads) } else { (0, 1) };
                let before = sequence.scores_before.saturating_mul(heads as u64);
                [before.saturating_add(step(head, scores)), step(i, sequence.kv_len as u64), j as u64]
            }
            FullMask::Diagonal { row } => {
                [0, step(sequence.q_first.saturating_add(i), row), sequence.kv_first.saturating_add(j) as u64]
            }
        };
        first.saturating_add(row).saturating_add(j)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_reads_its_own_elements() {
        let sequence = Sequence { index: 1, q_first: 2, q_len: 3, kv_first: 5, kv_len: 4, scores_before: 10 };
        let element = |mask: FullMask| mask.element(&sequence, (1, 2), 2, 3);
        let batched = FullMask::Batched { batch: 100, head: 20, row: 4 };
        assert_eq!(element(batched), 100 + 20 + 8 + 3);
        assert_eq!(element(FullMask::Packed { heads: false }), 10 + 2 * 4 + 3);
        assert_eq!(element(FullMask::Packed { heads: true }), 20 + 12 + 2 * 4 + 3);
        assert_eq!(element(FullMask::Diagonal { row: 9 }), 4 * 9 + 8);
    }
}
