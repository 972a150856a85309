//! Position bias (`realShift`): its memory layout, and where the number for a score is.

use super::Sequence;

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
    Batched {
        /// Elements from one sequence to the next.
        batch: u64,
        /// Elements from one head to the next.
        head: u64,
        /// Elements from one row to the next.
        row: u64,
    },
    /// The biases of packed sequences one after the other: for each sequence `[N, Sq, Skv]`, or `[N, 1, Skv]`.
    Packed {
        /// Whether each row has its own numbers.
        rows: bool,
    },
    /// The last [`BiasForm::LAST_ROWS`] rows of a bias that depends only on the distance of row and key. Keys after
    /// the row are never read. The corner at the bottom right is distance 0.
    LastRows {
        /// Elements from one sequence to the next.
        batch: u64,
        /// Number of keys in a row.
        width: u64,
    },
}

impl BiasForm {
    /// Number of rows in a bias that is given by its last rows.
    pub const LAST_ROWS: i64 = 1024;

    /// The element for row `i` and key `j` of a sequence in head `head` of `heads`; `None` if it has none. Saturates
    /// beyond what fits in memory.
    pub fn element(&self, sequence: &Sequence, (head, heads): (usize, usize), i: usize, j: usize) -> Option<u64> {
        let step = |count: usize, stride: u64| (count as u64).saturating_mul(stride);
        let sum = |parts: [u64; 3]| parts.into_iter().fold(0u64, u64::saturating_add);
        let keys = sequence.kv_len as u64;
        Some(match *self {
            BiasForm::Batched { batch, head: head_step, row } => {
                sum([step(sequence.index, batch), step(head, head_step), step(i, row).saturating_add(j as u64)])
            }
            BiasForm::Packed { rows: true } => sum([
                step(heads, sequence.scores_before),
                step(head, step(sequence.q_len, keys)),
                step(i, keys).saturating_add(j as u64),
            ]),
            BiasForm::Packed { rows: false } => {
                sum([step(heads, sequence.kv_first as u64), step(head, keys), j as u64])
            }
            BiasForm::LastRows { batch, width } => {
                let distance = i.checked_sub(j)? as u64;
                let last_row = step(head, (Self::LAST_ROWS as u64).saturating_mul(width))
                    .saturating_add((Self::LAST_ROWS as u64 - 1).saturating_mul(width));
                let key = width.checked_sub(distance.saturating_add(1))?;
                sum([step(sequence.index, batch), last_row, key])
            }
        })
    }
}

impl Bias {
    /// The element that has the slope of a head, if the bias has slopes.
    pub fn slope(&self, sequence: &Sequence, (head, heads): (usize, usize)) -> Option<u64> {
        match self {
            Bias::Slopes { per_sequence, .. } => {
                let before = if *per_sequence { sequence.index } else { 0 };
                let before = (before as u64).saturating_mul(heads as u64);
                Some(before.saturating_add(head as u64))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_reads_its_own_elements() {
        let sequence = Sequence { index: 1, q_first: 2, q_len: 3, kv_first: 5, kv_len: 4, scores_before: 10 };
        let element = |form: BiasForm, i, j| form.element(&sequence, (1, 2), i, j);
        let batched = BiasForm::Batched { batch: 100, head: 20, row: 0 };
        assert_eq!(element(batched, 2, 3), Some(123));
        assert_eq!(element(BiasForm::Packed { rows: true }, 2, 3), Some(20 + 12 + 8 + 3));
        assert_eq!(element(BiasForm::Packed { rows: false }, 2, 3), Some(10 + 4 + 3));
        let last = BiasForm::LastRows { batch: 2 * 1024 * 4, width: 4 };
        let (second, head) = (2 * 1024 * 4, 1024 * 4);
        assert_eq!(element(last, 2, 2), Some(second + head + 1023 * 4 + 3));
        assert_eq!(element(last, 2, 0), Some(second + head + 1023 * 4 + 1));
        assert_eq!(element(last, 2, 3), None);
        assert_eq!(element(last, 9, 0), None);
    }

    #[test]
    fn slopes_are_shared_or_not() {
        let sequence = Sequence { index: 2, ..Sequence::default() };
        let slopes = |per_sequence| Bias::Slopes { root: false, per_sequence };
        assert_eq!(slopes(false).slope(&sequence, (3, 4)), Some(3));
        assert_eq!(slopes(true).slope(&sequence, (3, 4)), Some(11));
        assert_eq!(Bias::None.slope(&sequence, (3, 4)), None);
    }
}
