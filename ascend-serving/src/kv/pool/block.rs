//! A block of a pool.

use std::fmt;

use crate::sharing::lock;

use super::BlockPool;

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// A [`Block`], such as those of a sequence.
    Handle,
    /// A copy from the block that is still to be queued.
    Copy,
}

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
}

impl Clone for Block {
    fn clone(&self) -> Self {
        lock(&self.pool.0.state).block(self.id).holders += 1;
        Self {
            pool: self.pool.clone(),
            id: self.id,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let pool = &self.pool;
        pool.leave(&mut lock(&pool.0.state), self.id, Holder::Handle);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("id", &self.id).finish()
    }
}
