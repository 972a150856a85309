//! Masks that are full tensors: of any content, with a prefix, within chunks, of one rank.

use std::num::NonZeroU64;

use ascend_spec::MaskGeometry;
use ascend_spec::geometry::{LocalChunks, RankRows};

use crate::error::Result;
use crate::tensor::AnyTensor;

use super::cache::upload;
use super::cache::{Content, MaskKey};
use super::form::MaskForm;
use super::host::HostMask;
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// Any mask as a full tensor for sparse mode 1: from a closure ([`HostMask::from_fn`]), a bitmap
    /// ([`HostMask::from_bitmap`]), a formula ([`HostMask::of`]) or the elements of a tensor
    /// ([`HostMask::from_elements`]). The operator takes flags: other forms become INT8. It is not cached.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn custom(&self, mask: &HostMask) -> Result<Mask> {
        let tensor = if mask.form().size() == 1 {
            upload(self.device, mask)?
        } else {
            upload(self.device, &mask.convert(self.form())?)?
        };
        Ok(Mask::all_mask(tensor))
    }

    /// Any mask as a tensor in its own form, for operators that take it so.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn custom_matrix(&self, mask: &HostMask) -> Result<AnyTensor> {
        upload(self.device, mask)
    }
}

impl Masks<'_> {
    /// Every row sees the first `prefix` keys and those up to its own place, the last row at the last key. Inference
    /// operators have no mode for it, so it is a full tensor of `rows * keys` bytes for sparse mode 1.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn prefix(&self, prefix: usize, rows: usize, keys: usize) -> Result<Mask> {
        let tensor = self.prefix_matrix(prefix, rows, keys, self.form())?;
        Ok(Mask::all_mask(tensor))
    }

    /// The mask of [`Masks::prefix`] as a tensor in any form, which sparse mode 5 of the training operators takes.
    /// Mode 6 takes [`Masks::template`] with [`CompressedMask::Prefix`](ascend_spec::CompressedMask::Prefix),
    /// whatever the prefix.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn prefix_matrix(&self, prefix: usize, rows: usize, keys: usize, form: MaskForm) -> Result<AnyTensor> {
        let bands = MaskGeometry::prefix(rows as u64, keys as u64, prefix as u64);
        self.matrix(bands, form)
    }
}

impl Masks<'_> {
    /// Causal attention within chunks of fixed size (Llama 4), the last row at the last key, as a full INT8 tensor
    /// `[rows, keys]` for sparse mode 1.
    ///
    /// Long sequences are better cut at the chunks, for which sparse mode 3 does without a tensor of their size:
    /// [`LocalChunks::virtual_sequences`].
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn local(&self, chunk: NonZeroU64, rows: usize, keys: usize) -> Result<Mask> {
        let content = Content::Local(LocalChunks::new(chunk, rows as u64, keys as u64));
        let form = self.form();
        self.get(MaskKey { content, form }, 0, |tensor| Mask::all_mask(tensor))
    }
}

impl HostMask {
    /// The mask `[B, rows, keys]` of one rank for several sequences with drafts, BOOL, as vLLM-Ascend's
    /// `[max_reqs, decode_threshold, max_model_len]`. Rows and keys that a sequence does not have are hidden; so is
    /// every key from a row for which the rank has none, where vLLM-Ascend shows them all and relies on a key length
    /// of 0.
    ///
    /// # Errors
    /// As for [`HostMask::stack`].
    pub fn context_parallel(sequences: &[RankRows], rows: usize, keys: usize) -> Result<Self> {
        Self::stack(sequences, rows, keys, MaskForm::BOOL)
    }
}

impl Masks<'_> {
    /// The mask of one rank for sparse mode 1. It changes with every step, so that it is not cached.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload) and [`HostMask::context_parallel`].
    pub fn context_parallel(&self, sequences: &[RankRows], rows: usize, keys: usize) -> Result<Mask> {
        let mask = HostMask::context_parallel(sequences, rows, keys)?;
        Ok(Mask::all_mask(upload(self.device, &mask)?))
    }
}
