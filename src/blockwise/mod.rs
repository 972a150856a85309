//! Attention of packed sequences under any mask, cut into blocks of [`SIDE`] rows and keys.
//!
//! BlockSparseAttention computes the blocks that a mask shows whole, and nothing finer. The keys that it shows in part
//! of a block (the diagonal, the edges of a window, the ends of sinks) are computed row by row: one call of
//! FusedInferAttentionScore whose sequences are single rows, each with a row of the block table that names the pages in
//! which it sees keys, and a mask over those pages. Both are merged by their log-sum-exps. The result is that of the
//! mask itself, not of the mask rounded to blocks.
//!
//! A [`BlockCover`] says which keys are computed in which way, and what that costs; a [`BlockwisePlan`] computes them.
//! Masks are anything with [`Visibility`]: a [`MaskGeometry`](crate::spec::geometry::MaskGeometry), a token tree, or an
//! entry of a [`HostMask`](crate::mask::HostMask), which is made from a bitmap or a closure.
//!
//! It pays where a mask shows few blocks and no sparse mode expresses it. Where sparse modes do, their calls compute
//! the same blocks and need no borders: prefer those. A mask whose rows are unlike their neighbours costs a merge or
//! copy for each row ([`BlockCover::calls`]), and one that shows each row some keys of many blocks costs a mask of its
//! own size ([`BlockCover::row_mask_bytes`]).
//!
//! A page holds 128 keys also at the end of a sequence, where some are those of the sequences beside it. They are
//! hidden, with weights of 0; but 0 times an infinite number or NaN is NaN, so that values that are not finite in one
//! sequence can make rows of its neighbours NaN.
//!
//! ```
//! use ascend_attention::blockwise::{BlockCover, BlockwiseAttention};
//! use ascend_attention::mask::{HostMask, MaskForm};
//! use ascend_attention::{Runtime, f16};
//!
//! # fn main() -> ascend_attention::Result<()> {
//! # #[cfg(feature = "emulation")] {
//! let stream = Runtime::emulated()?.device(0)?.stream()?;
//! let ones = stream.upload(&[f16::ONE; 300 * 64], [300, 1, 64])?;
//! // Each row sees its own key and the first 140.
//! let shown = HostMask::from_fn(300, 300, MaskForm::INT8, |row, key| key < 140 || key == row)?;
//! let cover = BlockCover::new(&[shown.entry(0)])?;
//! assert_eq!(cover.full_blocks(), 3);
//! let attention = BlockwiseAttention::new(0.125);
//! let plan = attention.plan(&stream, &cover, [&ones, &ones, &ones])?;
//! let rows = plan.launch(&stream, [&ones, &ones, &ones])?.download(&stream)?;
//! assert_eq!(rows, [f16::ONE; 300 * 64]);
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! [`Visibility`]: crate::spec::Visibility

mod cover;
mod plan;

pub use cover::{BlockCover, SIDE, SIDE_BLOCK};
pub use plan::{BlockwiseAttention, BlockwisePlan};
