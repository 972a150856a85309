//! Position bias that grows with the distance of query and key.

use super::Grid;

/// Position bias of `-slope * distance`, with one slope a head (`pseType` 2 and 3).
///
/// Source: FusedInferAttentionScore V5 documentation, pseType, qStartIdx and kvStartIdx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slopes {
    /// The slope of each head.
    pub grid: Grid,
    /// Whether the root of the distance counts (`pseType` 3).
    pub root: bool,
    /// How far the first key's position is behind the first query's: `kvStartIdx - qStartIdx`.
    pub lag: i64,
}

impl Slopes {
    /// Positions from a key to a query, both by their places on the tensors' row axes.
    pub fn apart(&self, row: i64, key: i64) -> i64 {
        row.saturating_sub(key).saturating_sub(self.lag)
    }

    /// What is added to a score, for a query and a key that are `apart`.
    pub fn bias(&self, slope: f64, apart: i64) -> f64 {
        let distance = apart.unsigned_abs() as f64;
        -slope * if self.root { distance.sqrt() } else { distance }
    }
}

#[cfg(test)]
mod tests {
    use super::Slopes;
    use crate::fia::{Counts, Cuts, Grid, Operand};
    use crate::{DType, View};

    #[test]
    fn distance_counts_both_ways_from_the_start_positions() {
        let slopes = Slopes {
            grid: Grid {
                operand: Operand::PseShift,
                dtype: DType::Float,
                view: View {
                    offset: 0,
                    batch: 0,
                    head: 1,
                    row: 0,
                    dim: 0,
                },
                cuts: Cuts::NONE,
                counts: Counts::Tokens,
            },
            root: false,
            lag: 3,
        };
        // Query 5 at position 5, key 1 at position 1 + 3.
        assert_eq!(slopes.apart(5, 1), 1);
        assert_eq!(slopes.bias(0.5, slopes.apart(5, 1)), -0.5);
        assert_eq!(slopes.bias(0.5, slopes.apart(1, 2)), -2.0);
        let root = Slopes {
            root: true,
            ..slopes
        };
        assert_eq!(root.bias(0.5, root.apart(1, 2)), -1.0);
        assert_eq!(slopes.apart(i64::MIN, i64::MAX), i64::MIN);
    }
}
