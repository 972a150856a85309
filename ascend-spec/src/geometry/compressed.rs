//! The mask tensors that the sparse modes need, and the templates from which the operators read masks of any size.

use super::MaskGeometry;
use super::region::Region;
use super::sparse_mode::FAR;
use crate::{Dims, SparseMode};

/// A mask template. The operator reads the mask of a tile of scores from it, at a position that depends on the tile's
/// distance from the diagonal: so one template serves every length and window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompressedMask {
    /// `[2048, 2048]`: a strict upper triangle of ones.
    Causal,
    /// `[3072, 2048]`: the causal template, and below it 1024 rows whose left half is 0 and whose right half is 1.
    Prefix,
}

/// The mask tensor that a mode needs as `attenMask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskDemand {
    /// A full tensor, or none to let every row see every key.
    MayBeFull,
    /// A full tensor.
    Full,
    /// A template from which the operator reads any size.
    Compressed(CompressedMask),
    /// A tensor of the last `Sq` keys of each sequence: `[B, S, S]`, or for packed sequences one axis with their
    /// squares one after another.
    Drafts,
}

impl SparseMode {
    /// The mask tensor that the mode needs as `attenMask`.
    pub const fn demand(self) -> MaskDemand {
        match self {
            SparseMode::DefaultMask => MaskDemand::MayBeFull,
            SparseMode::AllMask | SparseMode::Prefix => MaskDemand::Full,
            SparseMode::PrefixCompress => MaskDemand::Compressed(CompressedMask::Prefix),
            SparseMode::LeftUpCausal
            | SparseMode::RightDownCausal
            | SparseMode::Band
            | SparseMode::RightDownCausalBand
            | SparseMode::BandLeftUpCausal => MaskDemand::Compressed(CompressedMask::Causal),
            SparseMode::Tree => MaskDemand::Drafts,
        }
    }

    /// Whether the mode takes a compressed mask rather than a full one.
    pub const fn takes_compressed_mask(self) -> bool {
        matches!(self.demand(), MaskDemand::Compressed(_))
    }
}

impl CompressedMask {
    /// Every template.
    pub const ALL: [CompressedMask; 2] = [CompressedMask::Causal, CompressedMask::Prefix];

    /// Columns of every template, and rows of its causal part.
    const SIDE: u64 = SparseMode::COMPRESSED_MASK_SIZE as u64;

    /// The most rows and keys of a tile that can be read from a template.
    pub const TILE: u64 = Self::SIDE / 2;

    /// Rows and columns.
    pub const fn shape(self) -> Dims {
        let side = SparseMode::COMPRESSED_MASK_SIZE;
        match self {
            CompressedMask::Causal => Dims::of([side, side]),
            CompressedMask::Prefix => Dims::of([side + side / 2, side]),
        }
    }

    /// Whether the template has a 1 in row `i`, column `j`; `None` outside of it.
    pub fn hides(self, i: u64, j: u64) -> Option<bool> {
        match (self, i) {
            _ if j >= Self::SIDE => None,
            (_, i) if i < Self::SIDE => Some(SparseMode::compressed_mask_hides(i as i64, j as i64)),
            (CompressedMask::Prefix, i) if i < Self::SIDE + Self::TILE => Some(j >= Self::TILE),
            _ => None,
        }
    }

    /// The template as a mask of its own, in which rows see the keys where it is 0.
    pub fn geometry(self) -> MaskGeometry {
        let [rows, columns] = match self {
            CompressedMask::Causal => [Self::SIDE, Self::SIDE],
            CompressedMask::Prefix => [Self::SIDE + Self::TILE, Self::SIDE],
        };
        let side = SparseMode::COMPRESSED_MASK_SIZE;
        MaskGeometry::of(rows, columns, |all| {
            let causal = Region { rows: (0, side), keys: (0, side), low: -FAR, high: 0 };
            let halves = Region { rows: (side, all.rows.1), keys: (0, side / 2), ..all };
            [causal, halves, Region::NOTHING]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MaskGeometry;
    use proptest::prelude::*;

    /// Row and column of the template at which the mask `key > row + bound` begins for a tile with this first row and
    /// key. Rows and keys count within the sequence; the tile has at most [`CompressedMask::TILE`] of each. For the
    /// lower bound of a band the operator reads the same mask for `bound = low - 1` and inverts it.
    fn causal_origin(first_row: u64, first_key: u64, bound: i64) -> (u64, u64) {
        let ahead = i128::from(first_key) - i128::from(first_row) - i128::from(bound);
        let within = |distance: i128| {
            u64::try_from(distance.clamp(0, i128::from(CompressedMask::TILE))).unwrap_or(CompressedMask::TILE)
        };
        (within(-ahead), within(ahead))
    }

    /// Row and column of [`CompressedMask::Prefix`] at which the mask `key >= prefix` begins for a tile with this
    /// first key. In mode 6 a row sees a key that this mask or the causal one shows.
    fn prefix_origin(first_key: u64, prefix: u64) -> (u64, u64) {
        let left = prefix.saturating_sub(first_key).min(CompressedMask::TILE);
        (CompressedMask::SIDE, CompressedMask::TILE - left)
    }

    /// Cell (a, b) of the tile that is read from an origin.
    fn read(mask: CompressedMask, origin: (u64, u64), a: u64, b: u64) -> bool {
        mask.hides(origin.0 + a, origin.1 + b).unwrap()
    }

    #[test]
    fn shapes_are_those_of_the_documents() {
        assert_eq!(CompressedMask::Causal.shape(), Dims::of([2048, 2048]));
        assert_eq!(CompressedMask::Prefix.shape(), Dims::of([3072, 2048]));
        for mask in CompressedMask::ALL {
            let shape = mask.shape();
            let (rows, columns) = (shape[0] as u64, shape[1] as u64);
            assert!(mask.hides(rows - 1, columns - 1).is_some());
            let geometry = mask.geometry();
            assert_eq!((geometry.q_len(), geometry.kv_len()), (rows, columns));
            for i in 0..rows {
                let shown = (0..columns).take_while(|&j| mask.hides(i, j) == Some(false)).count();
                assert_eq!(geometry.row(i), 0..shown as u64);
                assert!((shown as u64..columns).all(|j| mask.hides(i, j) == Some(true)));
            }
            assert_eq!(mask.hides(rows, 0), None);
            assert_eq!(mask.hides(0, columns), None);
            assert_eq!(mask.hides(u64::MAX, 0), None);
        }
    }

    proptest! {
        /// Every mode, tile by tile, against its geometry: lengths beyond the template, tiles up to the largest.
        #[test]
        fn templates_decompress_to_the_full_masks(
            mode in proptest::sample::select(vec![
                SparseMode::LeftUpCausal, SparseMode::RightDownCausal, SparseMode::Band, SparseMode::PrefixCompress,
            ]),
            sq in 1u64..6000, skv in 1u64..6000, pre in -3000i64..6000, next in -3000i64..6000, prefix in 0u64..7000,
            corner in (0u64..6000, 0u64..6000), tile in (1u64..=1024, 1u64..=1024),
            cells in proptest::collection::vec((0u64..1024, 0u64..1024), 64),
        ) {
            let (i0, j0) = (corner.0 % sq, corner.1 % skv);
            let shift = skv as i64 - sq as i64;
            let (low, high, geometry) = match mode {
                SparseMode::LeftUpCausal => (None, 0, MaskGeometry::new(mode, true, sq, skv, 0, 0)),
                SparseMode::Band => (
                    Some(shift - pre),
                    shift + next,
                    MaskGeometry::new(mode, true, sq, skv, pre, next),
                ),
                SparseMode::PrefixCompress => (None, shift, MaskGeometry::prefix(sq, skv, prefix)),
                _ => (None, shift, MaskGeometry::new(mode, true, sq, skv, 0, 0)),
            };
            let crate::MaskDemand::Compressed(mask) = mode.demand() else {
                panic!("mode {mode}");
            };
            let upper = causal_origin(i0, j0, high);
            let lower = low.map(|low| causal_origin(i0, j0, low - 1));
            for (a, b) in cells {
                let (a, b) = (a % tile.0, b % tile.1);
                if i0 + a >= sq || j0 + b >= skv {
                    continue;
                }
                let mut hidden = read(mask, upper, a, b);
                if let Some(lower) = lower {
                    hidden |= !read(mask, lower, a, b);
                }
                if mode == SparseMode::PrefixCompress {
                    hidden &= read(mask, prefix_origin(j0, prefix), a, b);
                }
                prop_assert_eq!(!hidden, geometry.sees(i0 + a, j0 + b), "{} {}", i0 + a, j0 + b);
            }
        }

        #[test]
        fn origins_leave_room_for_a_tile(i: u64, j: u64, bound: i64, prefix: u64) {
            for (mask, (row, column)) in [
                (CompressedMask::Causal, causal_origin(i, j, bound)),
                (CompressedMask::Prefix, prefix_origin(j, prefix)),
            ] {
                let last = CompressedMask::TILE - 1;
                prop_assert!(mask.hides(row + last, column + last).is_some());
            }
        }
    }
}
