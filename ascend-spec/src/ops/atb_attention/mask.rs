//! What the numbers of a mask do.

use super::rules::{MASK, SQUARES};
use super::{AtbCall, Lengths, Version};
use crate::attention_problem::{AttentionProblem, MaskTensor, MaskUse};
use crate::rule::{lint, require};
use crate::{DType, Soc, Target, Violation};
use std::cmp::Ordering;

/// Side of a mask that stands for masks of longer sequences.
const SQUARE: i64 = 128;
/// Most elements of a tile of scores.
const TILE_ELEMENTS: usize = 128 * 128;
/// Sides of tiles are multiples of it.
const TILE_STEP: usize = 16;

/// What a number in a mask does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hiding {
    /// Shows the key.
    Shows,
    /// Hides the key.
    Hides,
    /// Changes its weight otherwise, which the emulation does not compute.
    Weighs,
}

impl Hiding {
    /// What a number does. Kernels add it to the scores, or multiply it by -3e38 first (`times_lowest`, see
    /// [`AtbCall::times_lowest`]).
    pub fn of(number: f32, times_lowest: bool) -> Self {
        let hides = match times_lowest {
            true => number >= 1.0,
            false => number <= -10_000.0,
        };
        match (number == 0.0, hides) {
            (true, _) => Hiding::Shows,
            (_, true) => Hiding::Hides,
            _ => Hiding::Weighs,
        }
    }
}

/// The tiles of rows and keys in which kernels compute scores. With `isTriuMask` a row tile has no key tiles behind its
/// own: their keys are hidden whatever the mask says. A square of 128 rows is read for the tile of each row's own
/// position alone, and the keys before it are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    side: usize,
    /// Whether rows count from the first key, as in `PA_ENCODER`; otherwise the last row is at the last key.
    from_first: bool,
}

impl Tiles {
    /// The tiles of a call.
    pub fn of(problem: &AttentionProblem<'_>, version: Version) -> Self {
        let (dim, value_dim) = (problem.head_dim, problem.value_dim);
        // Kernels for heads of two sizes, and for large ones, have tiles of their own.
        let side = match dim != value_dim || dim > 256 {
            true => 128,
            false => {
                let width = dim.next_multiple_of(TILE_STEP).max(128);
                TILE_ELEMENTS / width / TILE_STEP * TILE_STEP
            }
        };
        Tiles { side, from_first: version != Version::Prefix }
    }

    /// The keys before those that the rows of a sequence are compared with.
    fn prefix(self, rows: usize, keys: usize) -> usize {
        match self.from_first {
            true => 0,
            false => keys.saturating_sub(rows),
        }
    }

    /// Whether a row of a sequence sees a key under a square, of whose row and column `square` says whether it hides.
    /// `lengths` are the sequence's rows and keys.
    pub fn square_hides(
        self,
        (row, key): (usize, usize),
        (rows, keys): (usize, usize),
        square: impl Fn(usize, usize) -> bool,
    ) -> bool {
        let Some(key) = key.checked_sub(self.prefix(rows, keys)) else {
            return false;
        };
        match (key / self.side).cmp(&(row / self.side)) {
            Ordering::Less => false,
            Ordering::Equal => square(row % self.side, key % self.side),
            Ordering::Greater => true,
        }
    }

    /// Whether the kernels of `PA_ENCODER` skip the key for the row with `isTriuMask`.
    pub fn skips(self, row: usize, key: usize) -> bool {
        key / self.side > row / self.side
    }

    /// Rows and columns of a square that are read.
    pub fn side(self) -> usize {
        self.side
    }
}

impl AtbCall<'_> {
    /// Whether the kernel multiplies a mask's numbers by -3e38 before it adds them: of BF16 always, of FLOAT16 in
    /// `PA_ENCODER` with high precision (`kernelType` 1). `PREFIX_ENCODER`, which has high precision in any case, adds
    /// those of FLOAT16 as they are.
    pub fn times_lowest(&self, version: Version) -> bool {
        let dtype = self.query.as_ref().map(|query| query.dtype);
        dtype == Some(DType::Bf16) || self.precise && version == Version::Packed
    }

    /// Whether key tiles behind a row's own are skipped.
    pub fn skips_tiles(&self, target: Target) -> bool {
        // On 310P a compressed mask sets `isTriuMask` by itself.
        self.triangle || self.compressed && target.soc == Soc::AtlasInference
    }

    /// What the mask is for. A full one is read as one byte for each element, by way of a copy.
    pub(super) fn mask_use(
        &self,
        lengths: &Lengths<'_>,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<MaskUse, Violation> {
        let Some(mask) = &self.mask else {
            return Ok(MaskUse::None);
        };
        let most = |lens: &[i64]| lens.iter().copied().max().unwrap_or(0);
        let (most_rows, most_keys) = (most(lengths.rows), most(lengths.keys));
        require!(
            (1..=most_keys).contains(&most_rows),
            MASK,
            format_args!("at most {most_rows} rows and {most_keys} keys"),
            "at least 1 row, and no fewer keys than rows",
        );
        let batch = lengths.keys.len();
        let (sequences, rows, keys) = match mask.shape[..] {
            [rows, keys] => (None, rows, keys),
            [sequences, rows, keys] if usize::try_from(sequences) == Ok(batch) => (Some(sequences), rows, keys),
            _ => {
                let allowed = format_args!("[{most_rows}, {most_keys}]");
                return Err(MASK.broken(mask.shape, allowed));
            }
        };
        let is_square = self.skips_tiles(target) && keys == SQUARE;
        let covers = rows >= most_rows && keys >= most_keys;
        let holds = match self.compressed {
            true => mask.shape[..] == [SQUARE, SQUARE] && (is_square || covers),
            false => covers || is_square && rows >= SQUARE,
        };
        if !holds {
            let (rows, keys) = match self.compressed {
                true => (SQUARE, SQUARE),
                false => (most_rows, most_keys),
            };
            return Err(MASK.broken(mask.shape, format_args!("[{rows}, {keys}]")));
        }
        if is_square {
            let square = format_args!("[{SQUARE}, {SQUARE}]");
            lint!(report, sequences.is_none() || batch == 1, SQUARES, mask.shape, square);
            return Ok(MaskUse::Compressed);
        }
        Ok(MaskUse::Full(MaskTensor {
            offset: 0,
            batch: sequences.map_or(0, |_| rows.saturating_mul(keys)),
            row: keys,
            key: 1,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKED: Tiles = Tiles { side: 64, from_first: true };

    #[test]
    fn a_square_is_read_in_the_tile_of_a_row_alone() {
        let hides = |row, key| PACKED.square_hides((row, key), (200, 200), |row, key| key > row);
        assert!((0..200).all(|row| (0..200).all(|key| hides(row, key) == (key > row))));
        let zeros = |row, key| PACKED.square_hides((row, key), (200, 200), |_, _| false);
        assert!(!zeros(0, 63) && zeros(0, 64) && !zeros(64, 127) && zeros(127, 128));
        let prefix = Tiles { from_first: false, ..PACKED };
        let hides = |row, key| prefix.square_hides((row, key), (3, 131), |row, key| key > row);
        assert!(!hides(0, 128) && hides(0, 129) && !hides(2, 130) && !hides(0, 0));
    }

    #[test]
    fn numbers_hide_by_the_kernel() {
        assert_eq!(Hiding::of(-10_000.0, false), Hiding::Hides);
        assert_eq!(Hiding::of(-10_000.0, true), Hiding::Weighs);
        assert_eq!(Hiding::of(1.0, true), Hiding::Hides);
        assert_eq!(Hiding::of(1.0, false), Hiding::Weighs);
        let call = |dtype, precise| AtbCall {
            query: Some(crate::TensorDesc::packed(dtype, crate::Dims::new(&[1, 1, 16]).unwrap())),
            precise,
            ..AtbCall::default()
        };
        for (dtype, precise, version, multiplied) in [
            (DType::Bf16, false, Version::Packed, true),
            (DType::Bf16, true, Version::Prefix, true),
            (DType::Float16, false, Version::Packed, false),
            (DType::Float16, true, Version::Packed, true),
            (DType::Float16, true, Version::Prefix, false),
        ] {
            assert_eq!(call(dtype, precise).times_lowest(version), multiplied);
        }
    }
}
