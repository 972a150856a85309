//! Blocks of a cache as several smaller blocks of the kernel.

use ascend_attention::Violation;

use crate::rules::{self, room};

use super::slot::MAX_INT32;

/// Most blocks of the kernel in one of the cache.
const MAX_TIMES: usize = 1 << 16;

/// The number of blocks of `kernel_block` tokens in one of `cache_block` tokens.
///
/// # Errors
/// [`BLOCK_SPLIT`](crate::rules::BLOCK_SPLIT).
pub(crate) fn kernel_blocks_of(cache_block: usize, kernel_block: usize) -> Result<usize, Violation> {
    match cache_block.checked_div(kernel_block) {
        Some(times) if (1..=MAX_TIMES).contains(&times) && cache_block.is_multiple_of(kernel_block) => Ok(times),
        _ => Err(rules::BLOCK_SPLIT.broken(
            format_args!("cache blocks of {cache_block}, kernel blocks of {kernel_block}"),
            format_args!("cache blocks of 1 to {MAX_TIMES} times {kernel_block} tokens"),
        )),
    }
}

/// The row of a block table in blocks of the kernel, of a cache whose blocks are several of these: each block of
/// `cache_block` tokens becomes the `cache_block / kernel_block` blocks of `kernel_block` tokens that it holds.
///
/// # Errors
/// [`BLOCK_SPLIT`](crate::rules::BLOCK_SPLIT) unless `cache_block` is a multiple of `kernel_block`, at most 65536 times
/// as large, and neither is 0; [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a block whose parts have no INT32 number;
/// [`TABLE_ROW`](crate::rules::TABLE_ROW) for a row that does not fit in the host's memory.
pub fn kernel_blocks(row: &[usize], cache_block: usize, kernel_block: usize) -> Result<Vec<usize>, Violation> {
    let times = kernel_blocks_of(cache_block, kernel_block)?;
    let fix = "split only the filled part of a row";
    // Blocks whose parts all have INT32 numbers.
    let blocks = MAX_INT32 / times;
    let mut split = Vec::new();
    for &block in row {
        if block >= blocks {
            return Err(Violation::new(
                &rules::TABLE_BLOCK,
                format_args!("block {block}"),
                format_args!("0 to {}", blocks - 1),
                fix,
            ));
        }
        room(&mut split, times, &rules::TABLE_ROW, fix)?;
        split.extend(block * times..(block + 1) * times);
    }
    Ok(split)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::kv::slot;
    use proptest::prelude::*;

    #[test]
    fn cache_blocks_become_kernel_blocks() {
        assert_eq!(kernel_blocks(&[0, 5], 256, 128).unwrap(), [0, 1, 10, 11]);
        for (cache, kernel) in [(16, 128), (192, 128), (128, 0), (0, 128)] {
            let error = kernel_blocks(&[], cache, kernel).unwrap_err();
            assert_eq!(error.rule, &rules::BLOCK_SPLIT);
        }
        for block in [MAX_INT32, usize::MAX] {
            let error = kernel_blocks(&[block], 256, 128).unwrap_err();
            assert_eq!(error.rule, &rules::TABLE_BLOCK);
        }
    }

    proptest! {
        #[test]
        fn kernel_blocks_keep_every_slot(
            times in 1usize..6,
            kernel in 1usize..40,
            row in prop::collection::vec(0usize..50, 1..6),
        ) {
            let cache = times * kernel;
            let split = kernel_blocks(&row, cache, kernel).unwrap();
            for position in 0..cache * row.len() {
                prop_assert_eq!(slot(&row, position, cache), slot(&split, position, kernel));
            }
        }
    }
}
