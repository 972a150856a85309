//! The slots that new tokens go to, checked before they reach the device.

use std::convert::identity;
use std::sync::Arc;

use ascend_spec::Violation;
use ascend_spec::ops::scatter_pa_kv_cache::{rules, slot_faults};

use crate::error::{Error, Result};
use crate::ops::known_numbers::KnownNumbers;
use crate::runtime::{ReplayCheck, Stream};
use crate::tensor::{AnyTensor, has_len};

/// The slot of each new token, INT64 on the device as in the lists that it is made from. Slot `s` is row
/// `s % block_size` of block `s / block_size`.
///
/// Made from slots on the host, it is checked: each slot is one of the cache's, and none is there twice. Plans and
/// launches refuse it for a smaller cache. Slots that the device has computed can be taken
/// [unchecked](Self::from_tensor_unchecked).
#[derive(Clone, Debug)]
pub struct SlotMapping {
    tensor: AnyTensor,
    /// `None` if it was not checked.
    checked: Option<CheckedSlots>,
}

/// What a mapping was checked for.
#[derive(Clone, Debug)]
struct CheckedSlots {
    /// Slots of the cache.
    slots: usize,
    allowed: Vec<&'static str>,
    numbers: KnownNumbers<(), 1, i64>,
}

/// Refuses a mapping by its first fault that is not allowed.
fn check(mapping: &[i64], slots: usize, allowed: &[&'static str]) -> Result<(), Violation> {
    let mut first = None;
    slot_faults(mapping, slots as u64, &mut |fault| {
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
    pub fn new(stream: &Stream, mapping: &[i64], slots: usize) -> Result<Self> {
        Self::allowing(stream, mapping, slots, &[])
    }

    /// As [`SlotMapping::new`], but lets slots pass that break the lints of these ids: `slot_mapping.unique`,
    /// `slot_mapping.negative`.
    ///
    /// Allow `slot_mapping.negative` where padding tokens have a negative slot, which the operator's kernels pass
    /// over, as the emulation does. CANN's documents do not state this; leaving padding out of the call needs no such
    /// knowledge.
    ///
    /// # Errors
    /// As for [`SlotMapping::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a lint that overruns
    /// memory, `slot_mapping.range`.
    pub fn allowing(stream: &Stream, mapping: &[i64], slots: usize, allowed: &[&'static str]) -> Result<Self> {
        if let Some(overrun) = (rules::RULES.iter()).find(|rule| rule.overruns && allowed.contains(&rule.id)) {
            return Err(Error::invalid(
                "allowed",
                format_args!("{}: {}", overrun.id, overrun.reach),
                "lints that stay within the cache; `from_tensor_unchecked` is unsafe and takes any slots",
            )
            .fix("give slots of the cache, or take the mapping by `from_tensor_unchecked`"));
        }
        check(mapping, slots, allowed)?;
        let numbers = KnownNumbers::upload(stream, "slot_mapping", [mapping.to_vec()], identity)?;
        let tensor = (**numbers.tensor(0)).clone();
        Ok(Self { tensor, checked: Some(CheckedSlots { slots, allowed: allowed.to_vec(), numbers }) })
    }

    /// Slots that are on the device already, `INT32` or `INT64`, `[tokens]`. They are not checked.
    ///
    /// # Safety
    /// Whenever a call that was launched with them runs, each is below the slots of the call's caches: the device
    /// writes a row wherever its slot would be.
    pub unsafe fn from_tensor_unchecked(tensor: impl Into<AnyTensor>) -> Self {
        Self { tensor: tensor.into(), checked: None }
    }

    /// Waits for a stream, then replaces the slots, in the same memory: for plans that are launched, and graphs that
    /// are replayed, again and again. Checked as the first ones were; a refused mapping leaves the old one in place.
    ///
    /// # Errors
    /// As for [`SlotMapping::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of slots, or
    /// a mapping that was taken unchecked. Where writing itself fails, the mapping is refused by launches and replays
    /// until it is overwritten again.
    pub fn overwrite(&self, stream: &Stream, mapping: &[i64]) -> Result<()> {
        let Some(CheckedSlots { slots, allowed, numbers }) = &self.checked else {
            return Err(Error::invalid(
                "self",
                "a mapping that was taken unchecked",
                "one that was made from slots on the host",
            )
            .fix("make the mapping by `SlotMapping::new`"));
        };
        check(mapping, *slots, allowed)?;
        has_len("mapping", mapping.len(), self.tensor.len())?;
        numbers.overwrite(stream, [mapping.to_vec()])
    }

    /// The slots on the device. Only [`SlotMapping::overwrite`] can write to those that were checked.
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

    /// The check that launches and replays pass; none of a mapping that was taken unchecked.
    pub(super) fn replay_check(&self) -> Option<Arc<dyn ReplayCheck>> {
        Some(self.checked.as_ref()?.numbers.replay_check())
    }

    /// Refuses a mapping that was checked for a larger cache, and one that was overwritten in part.
    pub(super) fn fits(&self, slots: u64) -> Result<()> {
        let checked = self.checked.as_ref();
        checked.map_or(Ok(()), |checked| checked.numbers.read(|_| ()))?;
        match checked.map(|checked| checked.slots) {
            Some(checked) if checked as u64 > slots => Err(Error::invalid(
                "slot_mapping",
                format_args!("slots that were checked for a cache of {checked}"),
                format_args!("slots for this cache of {slots}"),
            )
            .fix("make the mapping again with the slots of this cache")),
            _ => Ok(()),
        }
    }
}
