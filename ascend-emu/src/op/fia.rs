//! FusedInferAttentionScore as an operator of the emulator.

use super::overlap::refuse_overlap;
use super::owned_call::{OwnedCall, place};
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::kernel::{self, Buffers};
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, Slot};
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::{AICORE_EXCEPTION, DEVICE_INTERNAL};
use ascend_spec::fia::{Operand, Place, Version};
use ascend_spec::{Refusal, Soc, TensorDesc};
use std::ops::Range;
use std::ptr;

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct FiaOperator {
    call: OwnedCall,
    version: Version,
    soc: Soc,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Operand, Range<u64>)>,
    /// How far misuse that shows on the device is let pass.
    check: Check,
}

impl FiaOperator {
    /// Checks a call.
    pub(crate) fn new(call: OwnedCall, version: Version, soc: Soc) -> Result<Self, Refusal> {
        let mut touches = Vec::new();
        call.borrow()
            .check(version, soc)?
            .touches(&mut |operand, range| {
                // A range that no memory could hold is one that no allocation answers for.
                touches.push((operand, range.unwrap_or(0..u64::MAX)));
            });
        Ok(FiaOperator {
            call,
            version,
            soc,
            touches,
            check: check(),
        })
    }

    /// Whether a launch has nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.touches.is_empty()
    }
}

/// Base address of a tensor, 0 where there is none.
fn address(at: &Addresses, operand: Operand) -> usize {
    let address = match operand.place() {
        Place::Input(place::KEY, index) => at.lists[0].get(index),
        Place::Input(place::VALUE, index) => at.lists[1].get(index),
        Place::Input(input, _) => at.inputs.get(input),
        Place::Output(output) => at.outputs.get(output),
    };
    address.copied().unwrap_or(0)
}

impl Operator for FiaOperator {
    fn name(&self) -> &'static str {
        self.version.symbol()
    }

    fn inputs(&self) -> usize {
        match self.version {
            Version::V1 => 17,
            Version::V2 => 24,
            Version::V3 => 27,
            Version::V4 => 29,
            Version::V5 => 31,
        }
    }

    fn outputs(&self) -> usize {
        2
    }

    fn list(&self, input: usize) -> Option<usize> {
        match input {
            place::KEY => Some(0),
            place::VALUE => Some(1),
            _ => None,
        }
    }

    fn operand(&self, slot: Slot) -> Option<&TensorDesc> {
        match slot {
            Slot::Input(index) => self.call.inputs.get(index)?.as_ref(),
            Slot::Output(index) => self.call.outputs.get(index)?.as_ref(),
            Slot::Element { input, element } => match input {
                place::KEY => self.call.key.get(element),
                place::VALUE => self.call.value.get(element),
                _ => None,
            },
        }
    }

    fn accesses(&self, at: &Addresses, visit: &mut dyn FnMut(Access)) {
        for (operand, range) in &self.touches {
            // A sum beyond the address space is no memory either.
            let start = usize::try_from(range.start).unwrap_or(usize::MAX);
            visit(Access {
                address: address(at, *operand).saturating_add(start),
                bytes: range.end.saturating_sub(range.start),
                write: matches!(operand.place(), Place::Output(_)),
                what: operand.acl_name(),
            });
        }
    }

    fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let fault = |code, message| Err(Fault { code, message });
        refuse_overlap(self, at)?;
        let call = self.call.borrow();
        let problem = match call.check(self.version, self.soc) {
            Ok(problem) => problem,
            Err(refusal) => return fault(DEVICE_INTERNAL, refusal.to_string()),
        };
        let base = |operand| match address(at, operand) {
            0 => ptr::null_mut(),
            address => memory.host(address),
        };
        let buffers = Buffers(&base);
        // SAFETY: the ranges that `Problem::touches` reports are those of `accesses`: live (the ledger let the launch in),
        // claimed by the task that runs this, and, by the check above, with outputs apart from everything else.
        if let Some(bad) = unsafe { kernel::bad_block(&problem, &buffers) } {
            let suspicion = Suspicion {
                kind: FindingKind::BlockTable,
                site: (self.name(), "blockTable"),
                message: format!("{}: {bad}", self.name()),
            };
            if let Err(failure) = report(self.check, AICORE_EXCEPTION, suspicion) {
                return fault(failure.code, failure.message.into_owned());
            }
        }
        // SAFETY: as above.
        match unsafe { kernel::run(&problem, &buffers) } {
            Ok(()) => Ok(()),
            Err(unsupported) => fault(AICORE_EXCEPTION, unsupported.to_string()),
        }
    }
}
