//! Token trees: the masks with which one step verifies several drafts.

use ascend_spec::SparseMode;
use ascend_spec::geometry::{TokenTree, TreeGeometry, Visibility};

use crate::error::Result;

use super::cache::upload;
use super::host::HostMask;
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// The tree of each request, after its context ([`TokenTree::behind`](ascend_spec::geometry::TokenTree::behind)),
    /// as a full INT8 tensor `[B, rows, keys]` for sparse mode 1: `rows` and `keys` are those of the call's tensors.
    /// Rows and keys that a request does not have are hidden. The mask changes with every step, so that it is not
    /// cached.
    ///
    /// A chain of drafts needs none of this: it is [`Masks::causal`]. The packed forms of other kernels, and the links
    /// for the walk that accepts drafts, are `CustomMask` and `DraftTree` of `ascend-serving`.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload) and [`HostMask::stack`].
    pub fn tree(&self, trees: &[TreeGeometry<'_>], rows: usize, keys: usize) -> Result<Mask> {
        let mask = HostMask::stack(trees, rows, keys, self.form())?;
        Ok(Mask::all_mask(upload(self.device, &mask)?))
    }

    /// The drafted tree of each request for sparse mode 9, without its context: INT8 `[B, rows, rows]`, where `rows`
    /// is the number of query rows of the call's tensors. A sequence of `q` rows and `k` keys sees all of its first
    /// `k - q` keys, and the last `q` as the mask shows them, so that the mask need not grow with the context.
    ///
    /// A smaller tree stands in the first rows and columns. Pass its size in
    /// [`actual_seq_lengths`](crate::FusedInferAttention::actual_seq_lengths): otherwise all `rows` count, and the
    /// tree's keys are the first of the last `rows`.
    ///
    /// The mode exists from CANN 9.1 on, on Atlas A2 and A3, for calls with rotary parts: 128 channels beside 64, and
    /// latent attention. Elsewhere [`Masks::tree`] does it, or `ascend-serving`'s `TreeVerification`. Packed calls
    /// take [`Masks::packed_drafts`].
    ///
    /// ```
    /// use ascend_attention::attention::Inputs;
    /// use ascend_attention::spec::geometry::TokenTree;
    /// use ascend_attention::spec::{Cann, Soc};
    /// use ascend_attention::{FusedInferAttention, Layout, Machine, Runtime, bf16};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "emulation")] {
    /// let device = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?;
    /// let stream = device.stream()?;
    /// let ones = |rows, dim| stream.upload(&vec![bf16::ONE; rows * 4 * dim], [1, rows, 4, dim]);
    ///
    /// // Two guesses behind the last certain token, behind 60 tokens of context.
    /// let tree = TokenTree::new(&[-1, 0, 0])?;
    /// let (query, key, value) = (ones(3, 128)?, ones(63, 128)?, ones(63, 128)?);
    /// let (query_rope, key_rope) = (ones(3, 64)?, ones(63, 64)?);
    /// let inputs = Inputs::new(&query, &key, &value).rope(&query_rope, &key_rope);
    /// let plan = FusedInferAttention::new(Layout::Bsnd)
    ///     .heads(4)
    ///     .kv_heads(4)
    ///     .scale(1.0 / 192f64.sqrt())
    ///     .mask(device.masks().drafts(&[&tree], 3)?)
    ///     .plan(inputs)?;
    /// let output = plan.launch(&stream, inputs)?;
    /// assert_eq!(output.attention.download(&stream)?, vec![bf16::ONE; 3 * 4 * 128]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload) and [`HostMask::stack`].
    pub fn drafts(&self, trees: &[&TokenTree], rows: usize) -> Result<Mask> {
        let alone: Vec<_> = trees.iter().map(|tree| tree.behind(0)).collect();
        let mask = HostMask::stack(&alone, rows, rows, self.form())?;
        let tensor = upload(self.device, &mask)?;
        Ok(Mask::compressed(SparseMode::Tree, tensor))
    }

    /// As [`Masks::drafts`], but for packed layouts: INT8 of one axis, on which the squares of the requests' trees
    /// follow one another.
    /// A request has as many query rows as its tree has tokens.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload) and [`HostMask::of`].
    pub fn packed_drafts(&self, trees: &[&TokenTree]) -> Result<Mask> {
        let square = |tree: &&TokenTree| tree.len().saturating_mul(tree.len());
        let elements = trees.iter().map(square).fold(0, usize::saturating_add);
        let hidden = trees.iter().flat_map(|tree| {
            let (alone, len) = (tree.behind(0), tree.len() as u64);
            let each = (0..len).flat_map(move |i| (0..len).map(move |j| (i, j)));
            each.map(move |(i, j)| !alone.sees(i, j))
        });
        let mask = HostMask::from_flags(self.form(), None, (1, elements), hidden)?;
        let tensor = upload(self.device, &mask)?.reshape([elements])?;
        Ok(Mask::compressed(SparseMode::Tree, tensor))
    }
}
