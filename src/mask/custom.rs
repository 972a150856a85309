//! Masks of the caller's own making.

use crate::error::Result;
use crate::tensor::AnyTensor;

use super::cache::upload;
use super::host::HostMask;
use super::masks::Masks;
use super::value::Mask;

impl Masks<'_> {
    /// Any mask as a full tensor for sparse mode 1: from a closure ([`HostMask::from_fn`]), a bitmap
    /// ([`HostMask::from_bitmap`]), a formula ([`HostMask::of`]) or the elements of a tensor
    /// ([`HostMask::from_elements`]). The operator takes flags: other forms become INT8. It is not cached.
    ///
    /// # Errors
    /// Those of an upload.
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
    /// Those of an upload.
    pub fn custom_matrix(&self, mask: &HostMask) -> Result<AnyTensor> {
        upload(self.device, mask)
    }
}
