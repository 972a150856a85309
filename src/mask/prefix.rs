//! Prefix masks: every query sees the first keys, and those up to its own place.

use ascend_spec::MaskGeometry;

use crate::error::Result;
use crate::tensor::AnyTensor;

use super::form::MaskForm;
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// Every row sees the first `prefix` keys and those up to its own place, the last row at the last key. Inference
    /// operators have no mode for it, so it is a full tensor of `rows * keys` bytes for sparse mode 1.
    ///
    /// # Errors
    /// Those of an upload.
    pub fn prefix(&self, prefix: usize, rows: usize, keys: usize) -> Result<Mask> {
        let tensor = self.prefix_matrix(prefix, rows, keys, self.form())?;
        Ok(Mask::all_mask(tensor))
    }

    /// The mask of [`Masks::prefix`] as a tensor in any form, which sparse mode 5 of the training operators takes.
    /// Mode 6 takes [`Masks::template`] with [`CompressedMask::Prefix`](ascend_spec::CompressedMask::Prefix),
    /// whatever the prefix.
    ///
    /// # Errors
    /// Those of an upload.
    pub fn prefix_matrix(
        &self,
        prefix: usize,
        rows: usize,
        keys: usize,
        form: MaskForm,
    ) -> Result<AnyTensor> {
        let bands = MaskGeometry::prefix(rows as u64, keys as u64, prefix as u64);
        self.matrix(bands, form)
    }
}
