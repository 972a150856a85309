//! Copies of blocks that sequences share, queued before one of them writes.

use ascend_attention::Violation;

use crate::rules;

use super::pool::{Block, CacheEntry, CopiesIn};

/// A block whose tokens have to be copied, in every layer, before anything is written to `to`. It keeps `from` from
/// being given back.
///
/// Until the copy is queued ([`PagedKvCache::copy_blocks`](crate::kv::PagedKvCache::copy_blocks)), a step of a
/// sequence that holds `to` is refused ([`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED)), including forks made
/// meanwhile, and prefixes that reach into the block. A sequence that was cut before the block needs the copy no
/// more.
#[derive(Debug)]
pub struct BlockCopy {
    /// The shared block.
    pub from: Block,
    /// The block that replaces it in the sequence.
    pub to: usize,
    pub(super) number: u64,
}

impl BlockCopy {
    /// Whether the copy is still to be queued, in any cache of the pool; false once no sequence holds `to` any more.
    pub fn is_awaited(&self) -> bool {
        self.from.pool().awaits(self.to, self.number, None)
    }

    /// Records that the copy was queued, for a cache of your own over a pool that no
    /// [`PagedKvCache`](crate::kv::PagedKvCache) has;
    /// [`PagedKvCache::copy_blocks`](crate::kv::PagedKvCache::copy_blocks) does so itself.
    ///
    /// # Errors
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) where a `PagedKvCache` of the pool waits for the copy.
    pub fn copied(&self) -> Result<(), Violation> {
        let pool = self.from.pool();
        match pool.copied(self.to, self.number, None) {
            true => Ok(()),
            false => Err(uncopied(format_args!(
                "a copy to block {}, said to be queued, which a `PagedKvCache` of the pool waits for",
                self.to
            ))),
        }
    }

    /// Whether the copy is still to be queued in a cache.
    pub(super) fn is_awaited_in(&self, cache: &CacheEntry) -> bool {
        let pool = self.from.pool();
        pool.awaits(self.to, self.number, Some(cache))
    }

    /// Records that the copy was queued in a cache.
    pub(super) fn copied_in(&self, cache: &CacheEntry) {
        let pool = self.from.pool();
        let _ = pool.copied(self.to, self.number, Some(cache));
    }

    /// Refuses a copy from a block that still waits for a copy itself in a cache.
    pub(super) fn check_order(&self, cache: &CacheEntry) -> Result<(), Violation> {
        let from = std::iter::once(self.from.id());
        match self.from.pool().first_uncopied(from, CopiesIn::Cache(cache)) {
            None => Ok(()),
            Some(block) => Err(uncopied(format_args!("a copy of block {block} to block {}", self.to))),
        }
    }
}

/// The refusal of an operation that would read a block before its tokens are copied.
#[cold]
pub(crate) fn uncopied(given: impl std::fmt::Display) -> Violation {
    Violation::new(
        &rules::BLOCK_UNCOPIED,
        given,
        "blocks whose copies were queued, in the order of the growths",
        "pass the `Growth::copies` of the growth to `PagedKvCache::copy_blocks` before anything is written to the \
         block; where another cache of the pool made the growth, call `Attention::queue_pending_copies` then, or \
         `PagedKvCache::queue_pending_copies` of a single cache; where the copies were dropped, or something was \
         written already, truncate the sequence to a token before the block, and grow and compute it again from there; \
         `PagedKvCache::grow` queues the copies of its growth itself",
    )
}
