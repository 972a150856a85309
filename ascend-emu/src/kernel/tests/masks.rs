//! Mask tensors with more keys than a window.

use super::calls::Random;
use super::case::{Case, Mask};
use super::data::levels;
use crate::kernel::visibility::WINDOW_KEYS;
use ascend_spec::{DType, SparseMode};

/// A mask that treats pieces of a few rows by about two tiles alike: hides all of a piece, nothing of it, or parts.
fn patchy(batch: usize, rows: usize, keys: usize, seed: u64) -> Mask {
    const DOWN: usize = 24;
    const ACROSS: usize = 200;
    let mut random = Random(seed);
    let across = keys.div_ceil(ACROSS);
    let pieces: Vec<usize> = (0..batch * rows.div_ceil(DOWN) * across).map(|_| random.below(5)).collect();
    let mut bytes = Vec::with_capacity(batch * rows * keys);
    for row in 0..batch * rows {
        for key in 0..keys {
            let piece = pieces[row / DOWN * across + key / ACROSS];
            let hidden = match piece {
                0 => true,
                1 => false,
                often => random.below(4) < often - 1,
            };
            bytes.push(u8::from(hidden));
        }
    }
    Mask { shape: vec![batch as i64, 1, rows as i64, keys as i64], dtype: DType::Bool, bytes }
}

#[test]
fn long_rows_of_a_mask_are_read_in_windows() {
    let keys = 2 * WINDOW_KEYS + 131;
    for (shape, seed) in [
        // Blocks of queries, with and without rows that share them, and decode.
        ([2, 1, 1, 75, keys, 16], 1),
        ([1, 2, 3, 40, keys, 16], 2),
        ([2, 1, 4, 1, keys, 16], 3),
        ([1, 1, 2, 3, keys, 16], 4),
    ] {
        let [batch, _, _, rows, ..] = shape;
        let mut case = Case::plain(DType::Float16, shape);
        case.mask = Some(patchy(batch, rows, keys, seed));
        for mode in [SparseMode::DefaultMask, SparseMode::AllMask] {
            case.mode = mode;
            for level in levels() {
                assert_eq!(case.check(level), Ok(()), "{shape:?} {mode:?} {level:?}");
            }
        }
        // A band before the mask.
        case.mode = SparseMode::DefaultMask;
        case.tokens = (900, 1200);
        for level in levels() {
            assert_eq!(case.check(level), Ok(()), "{shape:?} in a band, {level:?}");
        }
    }
}
