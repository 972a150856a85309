//! The slots that new tokens go to, checked before they reach the device.

use ascend_spec::Violation;
use ascend_spec::scatter::slot_faults;

use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::{AnyTensor, Tensor};

/// The slot of each new token, on the device: row `s % block_size` of block `s / block_size` for slot `s`.
///
/// Made from slots on the host, it is checked: each slot is one of the cache's, and none is there twice. Slots that the
/// device has computed can be taken [unchecked](Self::from_tensor_unchecked).
#[derive(Clone, Debug)]
pub struct SlotMapping {
    tensor: AnyTensor,
    /// Slots of the cache that the mapping was checked for; `None` if it was not checked.
    slots: Option<u64>,
    allowed: Vec<&'static str>,
}

/// The first fault of a mapping that is not allowed.
fn check(mapping: &[i64], slots: u64, allowed: &[&'static str]) -> Result<(), Violation> {
    let mut first = None;
    slot_faults(mapping, slots, &mut |fault| {
        if first.is_none() && !allowed.contains(&fault.rule().id) {
            first = Some(fault.violation());
        }
    });
    first.map_or(Ok(()), Err)
}

impl SlotMapping {
    /// Checks the slots for a cache of `slots` slots (blocks times block size) and copies them to the device.
    ///
    /// # Errors
    /// [`Error::Violation`] by `slot_mapping.range`, `slot_mapping.unique` or, for a slot below 0,
    /// `slot_mapping.negative`; otherwise as for [`Stream::upload`].
    pub fn new(stream: &Stream, mapping: &[i64], slots: u64) -> Result<Self> {
        Self::allowing(stream, mapping, slots, &[])
    }

    /// The same, letting slots pass that break the lints of these ids.
    ///
    /// Allow `slot_mapping.negative` where padding tokens have a negative slot and the device is known to skip them, as
    /// the emulation does. CANN's documents do not say so; leaving padding out of the call works everywhere.
    ///
    /// # Errors
    /// As for [`SlotMapping::new`].
    pub fn allowing(
        stream: &Stream,
        mapping: &[i64],
        slots: u64,
        allowed: &[&'static str],
    ) -> Result<Self> {
        check(mapping, slots, allowed)?;
        Ok(Self {
            tensor: stream.upload(mapping, [mapping.len()])?.into(),
            slots: Some(slots),
            allowed: allowed.to_vec(),
        })
    }

    /// Slots that are on the device already, `INT32` or `INT64`, `[tokens]`. What they say is not checked: a slot beyond
    /// the cache makes the device write beyond it.
    pub fn from_tensor_unchecked(tensor: impl Into<AnyTensor>) -> Self {
        Self {
            tensor: tensor.into(),
            slots: None,
            allowed: Vec::new(),
        }
    }

    /// Waits for a stream, then replaces the slots, in the same memory: for plans that are launched, and graphs that are
    /// replayed, again and again. Checked as the first ones were; a refused mapping leaves the old one in place.
    ///
    /// # Errors
    /// As for [`SlotMapping::new`]; [`Error::InvalidArgument`] for another number of slots, or a mapping that was taken
    /// unchecked.
    pub fn overwrite(&self, stream: &Stream, mapping: &[i64]) -> Result<()> {
        let Some(slots) = self.slots else {
            return Err(Error::invalid(
                "self",
                "a mapping that was taken unchecked",
                "one that was made from slots on the host",
            ));
        };
        check(mapping, slots, &self.allowed)?;
        let tensor: Tensor<i64> = self.tensor.clone().typed()?;
        tensor.overwrite(stream, mapping)
    }

    /// The slots on the device.
    pub fn tensor(&self) -> &AnyTensor {
        &self.tensor
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tensor.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// Refuses a mapping that was checked for a larger cache.
    pub(super) fn fits(&self, slots: u64) -> Result<()> {
        match self.slots {
            Some(checked) if checked > slots => Err(Error::invalid(
                "slot_mapping",
                format_args!("slots that were checked for a cache of {checked}"),
                format_args!("slots for this cache of {slots}"),
            )),
            _ => Ok(()),
        }
    }
}
