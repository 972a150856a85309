//! Drafted tokens: their trees, masks for other kernels, and their verification.

mod custom_mask;
mod draft_tree;
mod latent_tree;
mod sampled_acceptance;
mod tree_verification;

pub use custom_mask::{CustomMask, MaskExtent, MaskWord, PackedBits};
pub use draft_tree::{Accepted, DraftTree};
pub use latent_tree::{LatentTreePlan, LatentTreeTensors, LatentTreeVerification};
pub(crate) use latent_tree::{has_no_such_call, latent_nodes, latent_paged};
pub use sampled_acceptance::{DraftSource, SampledDrafts};
pub use tree_verification::{TreePlan, TreeTensors, TreeVerification};
pub(crate) use tree_verification::{TwoCalls, tree_mask, tree_nodes, tree_paged};
