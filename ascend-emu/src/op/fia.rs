//! FusedInferAttentionScore as an operator of the emulator.

use super::owned_call::{OwnedCall, place};
use crate::fault::Fault;
use crate::kernel::{self, Buffers};
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, Slot};
use crate::status::{AICORE_EXCEPTION, DEVICE_INTERNAL};
use ascend_spec::fia::{Operand, Version};
use ascend_spec::{Refusal, Soc, TensorDesc};
use smallvec::SmallVec;
use std::ops::Range;

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct FiaOperator {
    call: OwnedCall,
    version: Version,
    soc: Soc,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Operand, Range<u64>)>,
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
        })
    }

    /// Whether a launch has nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.touches.is_empty()
    }
}

/// Base address of a tensor.
fn address(at: &Addresses, operand: Operand) -> usize {
    let element = |list: usize, index| at.lists.get(list).and_then(|list| list.get(index));
    match operand {
        Operand::Query => at.inputs[place::QUERY],
        Operand::Key(index) => element(0, index).copied().unwrap_or(0),
        Operand::Value(index) => element(1, index).copied().unwrap_or(0),
        Operand::AttenMask => at.inputs[place::ATTEN_MASK],
        Operand::AttentionOut => at.outputs[place::ATTENTION_OUT],
        Operand::SoftmaxLse => at.outputs[place::SOFTMAX_LSE],
    }
}

/// The argument's name, and whether it is written.
fn role(operand: Operand) -> (&'static str, bool) {
    match operand {
        Operand::Query => ("query", false),
        Operand::Key(_) => ("key", false),
        Operand::Value(_) => ("value", false),
        Operand::AttenMask => ("attenMask", false),
        Operand::AttentionOut => ("attentionOut", true),
        Operand::SoftmaxLse => ("softmaxLse", true),
    }
}

/// An output that shares bytes with another tensor of the same launch.
fn overlap(accesses: &[Access]) -> Option<(&Access, &Access)> {
    let end = |access: &Access| access.address.saturating_add(access.bytes as usize);
    accesses.iter().enumerate().find_map(|(i, one)| {
        let other = accesses.iter().enumerate().find(|&(j, other)| {
            i != j && one.write && one.address < end(other) && other.address < end(one)
        });
        other.map(|(_, other)| (one, other))
    })
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
            let (what, write) = role(*operand);
            // A sum beyond the address space is no memory either.
            let start = usize::try_from(range.start).unwrap_or(usize::MAX);
            visit(Access {
                address: address(at, *operand).saturating_add(start),
                bytes: range.end.saturating_sub(range.start),
                write,
                what,
            });
        }
    }

    fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let fault = |code, message| Err(Fault { code, message });
        let mut accesses: SmallVec<[Access; 16]> = SmallVec::new();
        self.accesses(at, &mut |access| {
            if access.bytes > 0 {
                accesses.push(access);
            }
        });
        if let Some((output, other)) = overlap(&accesses) {
            return fault(
                AICORE_EXCEPTION,
                format!(
                    "{}: {} at {:#x} and {} at {:#x} overlap; the output cannot share memory with another tensor",
                    self.name(),
                    output.what,
                    output.address,
                    other.what,
                    other.address
                ),
            );
        }
        let call = self.call.borrow();
        let problem = match call.check(self.version, self.soc) {
            Ok(problem) => problem,
            Err(refusal) => return fault(DEVICE_INTERNAL, refusal.to_string()),
        };
        let host = |address: usize| memory.host(address);
        let list = |list: usize| -> SmallVec<[*const u8; 8]> {
            let addresses = at.lists.get(list).map_or(&[][..], |list| list.as_slice());
            addresses.iter().map(|&a| host(a).cast_const()).collect()
        };
        let (key, value) = (list(0), list(1));
        let buffers = Buffers {
            query: host(at.inputs[place::QUERY]),
            key: &key,
            value: &value,
            atten_mask: host(at.inputs[place::ATTEN_MASK]),
            attention_out: host(at.outputs[place::ATTENTION_OUT]),
            softmax_lse: host(at.outputs[place::SOFTMAX_LSE]),
        };
        // SAFETY: the ranges that `Problem::touches` reports are those of `accesses`: live (the ledger let the launch in),
        // claimed by the task that runs this, and, by the check above, with outputs apart from everything else.
        match unsafe { kernel::run(&problem, &buffers) } {
            Ok(()) => Ok(()),
            Err(unsupported) => fault(AICORE_EXCEPTION, unsupported.to_string()),
        }
    }
}
