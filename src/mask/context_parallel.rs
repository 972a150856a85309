//! Context parallelism: decoding on ranks that have some keys of each sequence.

use ascend_spec::geometry::RankRows;

use crate::error::Result;

use super::cache::upload;
use super::form::MaskForm;
use super::host::HostMask;
use super::masks::Masks;
use super::value::Mask;

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
    /// Those of an upload, and of [`HostMask::context_parallel`].
    pub fn context_parallel(
        &self,
        sequences: &[RankRows],
        rows: usize,
        keys: usize,
    ) -> Result<Mask> {
        let mask = HostMask::context_parallel(sequences, rows, keys)?;
        Ok(Mask::all_mask(upload(self.device, &mask)?))
    }
}
