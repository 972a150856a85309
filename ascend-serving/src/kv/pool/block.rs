//! A block of a pool.

use std::fmt;

use crate::sharing::lock;

use super::BlockPool;

/// A block that is held. Cloning shares it; dropping the last handle gives it back. It cannot be given back twice:
///
/// ```compile_fail,E0382
/// # use ascend_serving::kv::{BlockPool, PadPolicy};
/// # let pool = BlockPool::new(4, 128, PadPolicy::SkipNegative)?;
/// let block = pool.allocate()?;
/// drop(block);
/// drop(block);
/// # Ok::<(), ascend_serving::Violation>(())
/// ```
pub struct Block {
    pub(super) pool: BlockPool,
    pub(super) id: u32,
    pub(super) holder: Holder,
}

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// A sequence, a prefix or a caller.
    Handle,
    /// A copy from the block that is still to be queued, which reads tokens that are computed.
    Copy,
}

impl Block {
    /// Its number in the cache, as tables have it.
    pub fn id(&self) -> usize {
        self.id as usize
    }

    /// Its pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Whether another handle or a copy holds it too, so that it must not be written.
    pub fn is_shared(&self) -> bool {
        self.holders() > 1
    }

    /// The number of handles and copies that hold the block.
    pub(crate) fn holders(&self) -> u64 {
        lock(&self.pool.0.state).block(self.id).holders
    }

    /// Whether somebody else reads what is written to the block: another handle, or where tokens that are computed are
    /// `rewritten`, a copy.
    pub(crate) fn is_read_by_others(&self, rewritten: bool) -> bool {
        let mut state = lock(&self.pool.0.state);
        state.block(self.id).is_read_by_others(rewritten)
    }

    /// The block as a copy from it holds it.
    pub(in crate::kv) fn to_copy(&self) -> Self {
        self.held_by(Holder::Copy)
    }

    /// The block with one more holder.
    fn held_by(&self, holder: Holder) -> Self {
        lock(&self.pool.0.state).block(self.id).join(holder);
        Self { pool: self.pool.clone(), id: self.id, holder }
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        self.held_by(self.holder)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let pool = &self.pool;
        pool.leave(&mut lock(&pool.0.state), self.id, self.holder);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("id", &self.id).finish()
    }
}
