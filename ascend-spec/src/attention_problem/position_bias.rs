//! The additive position bias: a tensor, or distances of query and key times a slope.

use super::{Grid, Rows};

/// An additive position bias from a tensor of batch, heads, query rows and keys. An axis of rows or keys that ends
/// early adds 0 after its end. Where the problem has [`SequenceTerms`](super::SequenceTerms), they locate its
/// elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasTensor {
    /// Strides; `dim` steps over keys, and a batch axis of size 1 has stride 0.
    pub rows: Rows,
    /// Sizes of the four axes.
    pub sizes: [usize; 4],
    /// Whether it is added to the products of queries and keys before these are scaled.
    pub before_scale: bool,
    /// Whether row `i` has elements for keys 0 to `i` only.
    pub up_to_row: bool,
}

/// A position bias of `-slope * distance`, with one slope for each head (ALiBi).
///
/// Source: FusedInferAttentionScore V5 documentation, pseType 2 and 3, qStartIdx and kvStartIdx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slopes {
    /// The slope of each head, or of each sequence and head.
    pub grid: Grid,
    /// Whether the square root of the distance is used.
    pub root: bool,
    /// Distance of the first key's position from the first query's, in addition to that of
    /// [`SequenceTerms`](super::SequenceTerms).
    pub key_offset: i64,
}

impl Slopes {
    /// The distance from a key to a query, both given by their index on the tensors' row axes.
    pub fn distance(&self, row: i64, key: i64) -> i64 {
        row.saturating_sub(key).saturating_sub(self.key_offset)
    }

    /// The bias of the score of a query and a key with a distance.
    pub fn bias(&self, slope: f64, distance: i64) -> f64 {
        let distance = distance.unsigned_abs() as f64;
        -slope * if self.root { distance.sqrt() } else { distance }
    }
}

#[cfg(test)]
mod tests {
    use super::Slopes;
    use crate::attention_problem::{Counts, Cuts, Grid, SmallTensor, TensorRole};
    use crate::{DType, View};

    #[test]
    fn distance_counts_both_ways_from_the_start_positions() {
        let slopes = Slopes {
            grid: Grid {
                tensor: SmallTensor { role: TensorRole::Bias, dtype: DType::Float, offset: 0, bytes: None },
                view: View { offset: 0, batch: 0, head: 1, row: 0, dim: 0 },
                cuts: Cuts::NONE,
                counts: Counts::Tokens,
            },
            root: false,
            key_offset: 3,
        };
        // Query 5 at position 5, key 1 at position 1 + 3.
        assert_eq!(slopes.distance(5, 1), 1);
        assert_eq!(slopes.bias(0.5, slopes.distance(5, 1)), -0.5);
        assert_eq!(slopes.bias(0.5, slopes.distance(1, 2)), -2.0);
        let root = Slopes { root: true, ..slopes };
        assert_eq!(root.bias(0.5, root.distance(1, 2)), -1.0);
        assert_eq!(slopes.distance(i64::MIN, i64::MAX), i64::MIN);
    }
}
