//! The masks of a device.

use std::fmt;

use ascend_spec::{CompressedMask, MaskGeometry, SparseMode};

use crate::error::Result;
use crate::runtime::Device;
use crate::tensor::{AnyTensor, Tensor};

use super::cache::MaskCache;
use super::cache::{Content, MaskKey};
use super::form::MaskForm;
use super::value::Mask;

/// The masks of a device. From [`Device::masks`].
///
/// Tensors come from the device's [`MaskCache`]: equal requests give the same one. Wherever a tensor has to be made,
/// the first request fails as an upload does: [`Error::OutOfMemory`](crate::Error::OutOfMemory),
/// [`Error::Acl`](crate::Error::Acl), and [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more than
/// [`HostMask::MAX_BYTES`](super::HostMask::MAX_BYTES).
///
/// [The module](crate::mask) has a table of all masks and of who uses them.
pub struct Masks<'a> {
    pub(super) device: &'a Device,
}

impl Device {
    /// The masks of this device: each compressed mask is made once and shared.
    pub fn masks(&self) -> Masks<'_> {
        Masks::new(self)
    }
}

impl<'a> Masks<'a> {
    pub(crate) fn new(device: &'a Device) -> Self {
        Self { device }
    }

    /// The cache: its bound, and what it did.
    pub fn cache(&self) -> &'a MaskCache {
        self.device.kept()
    }

    /// Every query sees every key: sparse mode 0 without a tensor. Encoders, vision towers, and the layers of a serving
    /// system that are not causal.
    pub fn bidirectional(&self) -> Mask {
        Mask::none()
    }

    /// The compressed causal mask itself, which sparse modes 2, 3 and 4 take: INT8 `[2048, 2048]`, 1 above the
    /// diagonal.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn compressed(&self) -> Result<Tensor<i8>> {
        self.template(CompressedMask::Causal, MaskForm::INT8)?.typed()
    }

    /// A template from which operators read masks of any size: causal `[2048, 2048]` for modes 2, 3, 4, 7 and 8, prefix
    /// `[3072, 2048]` for mode 6. Inference operators take BOOL, INT8 and UINT8, training operators BOOL and UINT8.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn template(&self, template: CompressedMask, form: MaskForm) -> Result<AnyTensor> {
        let content = Content::Template(template);
        self.get(MaskKey { content, form }, 0, AnyTensor::clone)
    }

    /// The form of the masks that are made for the device.
    pub(crate) fn form(&self) -> MaskForm {
        MaskForm::made_for(self.device.soc().ok())
    }

    /// A sparse mode with the causal template.
    pub(super) fn mode(&self, mode: SparseMode) -> Result<Mask> {
        let key = MaskKey { content: Content::Template(CompressedMask::Causal), form: self.form() };
        self.get(key, 0, |template| Mask::compressed(mode, template.clone()))
    }

    /// The mask of a formula, such as a part of [`TriangleMix`](ascend_spec::geometry::TriangleMix), as a full INT8
    /// tensor `[rows, keys]` for sparse mode 1.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn geometry(&self, geometry: MaskGeometry) -> Result<Mask> {
        let content = Content::Geometry(geometry);
        let form = self.form();
        self.get(MaskKey { content, form }, 0, |tensor| Mask::all_mask(tensor))
    }

    /// The tensor of the mask of a formula.
    pub(super) fn matrix(&self, geometry: MaskGeometry, form: MaskForm) -> Result<AnyTensor> {
        let content = Content::Geometry(geometry);
        self.get(MaskKey { content, form }, 0, AnyTensor::clone)
    }

    /// Returns `view` of the tensor of a key, which for the causal square has at least `least` rows.
    #[inline]
    pub(super) fn get<T>(&self, key: MaskKey, least: u64, view: impl FnOnce(&AnyTensor) -> T) -> Result<T> {
        self.cache().get(self.device, &key, least, view)
    }
}

impl fmt::Debug for Masks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masks").field("device", &self.device.id()).field("cache", self.cache()).finish()
    }
}
