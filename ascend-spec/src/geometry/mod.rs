//! Which keys a query row sees: the formulas of the sparse modes and of the masks that serving systems use.
//!
//! [`MaskGeometry`] is a union of at most three bands, which covers every sparse mode and the regions of
//! [`TriangleMix`]; each mask that is no band has a type of its own. All of them implement [`Visibility`], from which
//! tensors and drawings are made.

mod block_map;
mod compressed;
mod context_parallel;
mod cut_batch;
mod lengths;
mod local_chunks;
mod mask;
mod region;
mod sparse_mode;
mod sparsity;
mod tile_row;
mod tree;
mod triangle_mix;
mod visibility;

pub use block_map::{BlockCounts, BlockMap, BlockRun};
pub use compressed::{CompressedMask, MaskDemand};
pub use context_parallel::{ContextShard, RankRows};
pub use cut_batch::{CutBatch, CutSide};
pub use lengths::{Lengths, Sequence};
pub use local_chunks::{LocalChunks, VirtualSequence};
pub use mask::MaskGeometry;
pub use mask::Runs;
pub use region::Tile;
pub use sparse_mode::TOKENS_UNBOUNDED;
pub use sparse_mode::{Operator, SparseMode};
pub use sparsity::Sparsity;
pub use tile_row::TileVisitor;
pub use tree::{DraftColumns, TokenTree, TreeError, TreeGeometry};
pub use triangle_mix::{TriangleMix, TrianglePart, TriangleRows};
pub use visibility::{Visibility, tile_by_rows, tiles_by_rows, tiles_one_by_one};
