//! Local attention: a query sees the keys of its own chunk, up to its place.

use std::num::NonZeroU64;

use ascend_spec::geometry::LocalChunks;

use crate::error::Result;

use super::key::{Content, MaskKey};
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// Causal attention within chunks of fixed size (Llama 4), the last row at the last key, as a full INT8 tensor
    /// `[rows, keys]` for sparse mode 1.
    ///
    /// Long sequences are better cut at the chunks, for which sparse mode 3 does without a tensor of their size:
    /// [`LocalChunks::virtual_sequences`].
    ///
    /// # Errors
    /// Those of an upload.
    pub fn local(&self, chunk: NonZeroU64, rows: usize, keys: usize) -> Result<Mask> {
        let content = Content::Local(LocalChunks::new(chunk, rows as u64, keys as u64));
        let form = self.form();
        self.get(MaskKey { content, form }, 0, |tensor| {
            Mask::all_mask(tensor)
        })
    }
}
