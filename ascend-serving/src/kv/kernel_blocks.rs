//! Blocks of a cache as several smaller blocks of the kernel.

use ascend_attention::Violation;

use crate::rules::{self, room};

use super::slot::MAX_INT32;

/// A cache whose blocks are larger than the kernel's: each block of the cache is several blocks of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelBlocks {
    kernel_block: usize,
    times: usize,
}

impl KernelBlocks {
    /// Most blocks of the kernel in one of the cache.
    pub const MAX_TIMES: usize = 1 << 16;

    /// Blocks of `cache_block` tokens as blocks of `kernel_block` tokens.
    ///
    /// # Errors
    /// [`BLOCK_SPLIT`](crate::rules::BLOCK_SPLIT) unless `cache_block` is a multiple of `kernel_block`, at most
    /// [`MAX_TIMES`](Self::MAX_TIMES) times as large, and neither is 0.
    pub fn new(cache_block: usize, kernel_block: usize) -> Result<Self, Violation> {
        match cache_block.checked_div(kernel_block) {
            Some(times) if (1..=Self::MAX_TIMES).contains(&times) && cache_block.is_multiple_of(kernel_block) => {
                Ok(Self { kernel_block, times })
            }
            _ => Err(rules::BLOCK_SPLIT.broken(
                format_args!("cache blocks of {cache_block}, kernel blocks of {kernel_block}"),
                format_args!("cache blocks of 1 to {} times {kernel_block} tokens", Self::MAX_TIMES),
            )),
        }
    }

    /// Tokens in a block of the kernel.
    pub fn kernel_block(self) -> usize {
        self.kernel_block
    }

    /// Blocks of the kernel in one of the cache.
    pub fn times(self) -> usize {
        self.times
    }

    /// The row of a table in kernel blocks: block `id` becomes `id * times .. (id + 1) * times`.
    ///
    /// # Errors
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a block whose parts have no INT32 number,
    /// [`TABLE_ROW`](crate::rules::TABLE_ROW) for a row that does not fit in the host's memory.
    pub fn split_row(self, row: &[usize]) -> Result<Vec<usize>, Violation> {
        let (times, fix) = (self.times, "split only the filled part of a row");
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::kv::slot;
    use proptest::prelude::*;

    #[test]
    fn cache_blocks_become_kernel_blocks() {
        let split = KernelBlocks::new(256, 128).unwrap();
        assert_eq!(split.split_row(&[0, 5]).unwrap(), [0, 1, 10, 11]);
        for (cache, kernel) in [(16, 128), (192, 128), (128, 0), (0, 128)] {
            let error = KernelBlocks::new(cache, kernel).unwrap_err();
            assert_eq!(error.rule, &rules::BLOCK_SPLIT);
        }
        for block in [MAX_INT32, usize::MAX] {
            let error = split.split_row(&[block]).unwrap_err();
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
            let split = KernelBlocks::new(cache, kernel).unwrap().split_row(&row).unwrap();
            for position in 0..cache * row.len() {
                prop_assert_eq!(slot(&row, position, cache), slot(&split, position, kernel));
            }
        }
    }
}
