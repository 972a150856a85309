//! The compressed mask of a device, made once.

use std::fmt;
use std::sync::Mutex;

use ascend_spec::SparseMode;

use crate::error::Result;
use crate::mask::Mask;
use crate::runtime::{Device, lock};
use crate::tensor::Tensor;

/// Where the diagonal of a causal mask begins when there are more keys than queries, as with a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CausalOrigin {
    /// The first query sees the first key alone: `j <= i` (sparse mode 2).
    LeftUp,
    /// The last query sees the last key too: `j <= i + Skv - Sq` (sparse mode 3). Right for decoding and for chunks of a
    /// prompt behind a cache.
    RightDown,
}

/// What a device keeps for its masks.
#[derive(Default)]
pub(crate) struct MaskCache {
    compressed: Mutex<Option<Tensor<i8>>>,
}

/// The masks of a device. From [`Device::masks`].
///
/// The modes 2, 3 and 4 take one compressed mask of 2048 x 2048, whatever the lengths. It takes 4 MiB, is made when first
/// asked for, and is shared until the device is dropped.
pub struct Masks<'a> {
    device: &'a Device,
}

impl<'a> Masks<'a> {
    pub(crate) fn new(device: &'a Device) -> Self {
        Self { device }
    }

    /// A query sees the keys up to its own place.
    ///
    /// # Errors
    /// As for [`Masks::compressed`].
    pub fn causal(&self, origin: CausalOrigin) -> Result<Mask> {
        self.mode(match origin {
            CausalOrigin::LeftUp => SparseMode::LeftUpCausal,
            CausalOrigin::RightDown => SparseMode::RightDownCausal,
        })
    }

    /// Query row `i` sees the keys from `i + Skv - Sq - pre_tokens` to `i + Skv - Sq + next_tokens` (sparse mode 4).
    ///
    /// # Errors
    /// As for [`Masks::compressed`].
    pub fn band(&self, pre_tokens: i64, next_tokens: i64) -> Result<Mask> {
        let mask = self.mode(SparseMode::Band)?;
        Ok(mask.window(pre_tokens, next_tokens))
    }

    /// A query sees its own place and the keys before it, `keys_including_self` in all: a causal window (sparse mode 4
    /// with `pre_tokens` one less).
    ///
    /// # Errors
    /// As for [`Masks::compressed`]. A window of less than one key breaks a rule when the call is planned.
    pub fn sliding_window(&self, keys_including_self: i64) -> Result<Mask> {
        self.band(keys_including_self.saturating_sub(1), 0)
    }

    /// The compressed mask itself: INT8 `[2048, 2048]`, 1 above the diagonal.
    ///
    /// # Errors
    /// The first time, those of an upload: [`Error::OutOfMemory`](crate::Error::OutOfMemory),
    /// [`Error::Acl`](crate::Error::Acl).
    pub fn compressed(&self) -> Result<Tensor<i8>> {
        let mut kept = lock(&self.device.mask_cache().compressed);
        if let Some(tensor) = &*kept {
            return Ok(tensor.clone());
        }
        let size = SparseMode::COMPRESSED_MASK_SIZE;
        let hides = |i| (0..size).map(move |j| i8::from(SparseMode::compressed_mask_hides(i, j)));
        let content: Vec<i8> = (0..size).flat_map(hides).collect();
        let side = usize::try_from(size).unwrap_or(0);
        let tensor = Tensor::<i8>::empty(self.device, [side, side])?;
        tensor.fill_new(&content)?;
        Ok(kept.insert(tensor).clone())
    }

    fn mode(&self, mode: SparseMode) -> Result<Mask> {
        Ok(Mask::compressed(mode, self.compressed()?.into()))
    }
}

impl fmt::Debug for Masks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masks")
            .field("device", &self.device.id())
            .finish_non_exhaustive()
    }
}
