//! A block that is given back twice, and one that was never handed out.

use ascend_serving::kv::{Block, BlockPool};

fn twice(block: Block) {
    drop(block);
    drop(block);
}

fn made_up(pool: BlockPool) -> Block {
    Block { pool, id: 3 }
}

fn main() {}
