//! Token trees: the masks with which one step verifies several drafts.

use ascend_spec::geometry::TreeGeometry;

use crate::error::Result;

use super::cache::upload;
use super::host::HostMask;
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// The tree of each request, behind its context ([`TokenTree::behind`](ascend_spec::geometry::TokenTree::behind)), as
    /// a full INT8 tensor `[B, rows, keys]` for sparse mode 1: `rows` and `keys` are those of the call's tensors. What a
    /// request does not have is hidden. It changes with every step, so that it is not cached.
    ///
    /// A chain of drafts needs none of this: it is [`Masks::causal`]. The packed forms of other kernels, and the links
    /// for the walk that accepts drafts, are [`CustomMask`](crate::serving::CustomMask) and
    /// [`DraftTree`](crate::serving::DraftTree).
    ///
    /// # Errors
    /// Those of an upload, and of [`HostMask::stack`].
    pub fn tree(&self, trees: &[TreeGeometry<'_>], rows: usize, keys: usize) -> Result<Mask> {
        let mask = HostMask::stack(trees, rows, keys, self.form())?;
        Ok(Mask::all_mask(upload(self.device, &mask)?))
    }
}
