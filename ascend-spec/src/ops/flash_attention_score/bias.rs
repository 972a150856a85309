//! Position bias (`realShift`): its memory layout, and where the number for a score is.

use super::Sequence;
use crate::View;

/// What is added to the scores, and where it is in memory.
///
/// Elements count in row-major order whatever the strides: the operator makes a contiguous copy of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// Nothing.
    None,
    /// Numbers from a tensor: `(q k + bias) * scale` (`pseType` 1) or `q k * scale + bias` (0).
    Tensor {
        /// Whether the bias is added before the scale.
        before_scale: bool,
        /// Where the numbers are.
        form: BiasForm,
    },
    /// The slope of a head times the distance of row and key, subtracted from `q k * scale` (`pseType` 2 and 3).
    Slopes {
        /// Whether the square root of the distance is used (3).
        root: bool,
        /// Whether each sequence has its own slopes, one sequence after the other.
        per_sequence: bool,
    },
}

/// Where the numbers of a bias are in its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BiasForm {
    /// One number for each row and key, or for each key; an axis along which numbers are shared has stride 0.
    Batched(View),
    /// The biases of packed sequences one after the other: for each sequence `[N, Sq, Skv]`, or `[N, 1, Skv]`.
    Packed {
        /// Whether each row has its own numbers.
        rows: bool,
    },
    /// The last [`BiasForm::LAST_ROWS`] rows of a bias that depends only on the distance of row and key. Row `i` has
    /// numbers for keys 0 to `i`. Its view begins at distance 0, the corner at the bottom right, and steps back by one
    /// from row to row.
    LastRows(View),
}

impl BiasForm {
    /// Number of rows in a bias that is given by its last rows.
    pub const LAST_ROWS: i64 = 1024;

    /// The elements for the rows and keys of a sequence in each of `heads` heads.
    pub fn rows(&self, sequence: &Sequence, heads: usize) -> View {
        match *self {
            BiasForm::Batched(all) | BiasForm::LastRows(all) => all.of_batch(sequence.index),
            BiasForm::Packed { rows: true } => sequence.scores(heads),
            BiasForm::Packed { rows: false } => {
                let offset = (sequence.kv_first as i64).saturating_mul(heads as i64);
                View { offset, batch: 0, head: sequence.kv_len as i64, row: 0, dim: 1 }
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
        let element = |form: BiasForm, i, j| form.rows(&sequence, 2).element(1, i, j);
        let batched = BiasForm::Batched(View { offset: 0, batch: 100, head: 20, row: 0, dim: 1 });
        assert_eq!(element(batched, 2, 3), 123);
        assert_eq!(element(BiasForm::Packed { rows: true }, 2, 3), 20 + 12 + 8 + 3);
        assert_eq!(element(BiasForm::Packed { rows: false }, 2, 3), 10 + 4 + 3);
    }
}
