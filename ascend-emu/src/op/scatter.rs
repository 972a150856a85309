//! ScatterPaKvCache as an operator of the emulator.

use super::overlap::refuse_overlap;
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::kernel::scatter;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, Slot};
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::AICORE_EXCEPTION;
use ascend_spec::scatter::{Operand, ScatterCall, ScatterProblem, SlotFault, slot_faults};
use ascend_spec::{Refusal, Soc, TensorDesc};

/// Places of the operator's inputs.
pub(crate) mod place {
    pub(crate) const INPUTS: usize = 8;
    pub(super) const KEY: usize = 0;
    pub(super) const KEY_CACHE: usize = 1;
    pub(super) const SLOT_MAPPING: usize = 2;
    pub(super) const VALUE: usize = 3;
    pub(super) const VALUE_CACHE: usize = 4;
    pub(super) const COMPRESS_LENS: usize = 5;
    pub(super) const COMPRESS_SEQ_OFFSET: usize = 6;
    pub(super) const SEQ_LENS: usize = 7;
    /// The caches, which are the outputs too, in this order.
    pub(crate) const CACHES: [usize; 2] = [KEY_CACHE, VALUE_CACHE];
}

/// A call that owns its arrays.
#[derive(Debug)]
pub(crate) struct OwnedScatter {
    pub tensors: [Option<TensorDesc>; place::INPUTS],
    pub cache_mode: Option<String>,
    pub scatter_mode: Option<String>,
    pub strides: Option<Vec<i64>>,
    pub offsets: Option<Vec<i64>>,
}

impl OwnedScatter {
    fn borrow(&self) -> ScatterCall<'_> {
        let at = |place: usize| self.tensors.get(place).copied().flatten();
        ScatterCall {
            key: at(place::KEY),
            key_cache: at(place::KEY_CACHE),
            slot_mapping: at(place::SLOT_MAPPING),
            value: at(place::VALUE),
            value_cache: at(place::VALUE_CACHE),
            compress_lens: at(place::COMPRESS_LENS),
            compress_seq_offset: at(place::COMPRESS_SEQ_OFFSET),
            seq_lens: at(place::SEQ_LENS),
            cache_mode: self.cache_mode.as_deref(),
            scatter_mode: self.scatter_mode.as_deref(),
            strides: self.strides.as_deref(),
            offsets: self.offsets.as_deref(),
        }
    }
}

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct ScatterOperator {
    call: OwnedScatter,
    problem: ScatterProblem,
    /// How far misuse that shows on the device is let pass.
    check: Check,
}

impl ScatterOperator {
    /// Checks a call.
    pub(crate) fn new(call: OwnedScatter, soc: Soc) -> Result<Self, Refusal> {
        let problem = call.borrow().check(soc)?;
        Ok(ScatterOperator {
            call,
            problem,
            check: check(),
        })
    }

    /// Whether a launch has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.problem.tokens == 0
    }

    /// A device fault if a cache lies elsewhere as an output than as an input.
    fn refuse_two_places(&self, at: &Addresses) -> Result<(), Fault> {
        for (output, input) in place::CACHES.into_iter().enumerate() {
            let (read, written) = (at.inputs.get(input), at.outputs.get(output));
            if self.operand(Slot::Input(input)).is_some() && read != written {
                return Err(self.fault(format!(
                    "{} is at {:#x} as input {input} and at {:#x} as output {output}; it is one tensor, so change both",
                    ["keyCacheRef", "valueCacheRef"][output],
                    read.copied().unwrap_or(0),
                    written.copied().unwrap_or(0),
                )));
            }
        }
        Ok(())
    }

    fn fault(&self, text: impl std::fmt::Display) -> Fault {
        Fault {
            code: AICORE_EXCEPTION,
            message: format!("{}: {text}", self.name()),
        }
    }

    /// Files the faults of the slots; in strict mode the first is a device fault.
    fn inspect(&self, slots: &[i64]) -> Result<(), Fault> {
        let mut outcome = Ok(());
        slot_faults(slots, self.problem.slots(), &mut |fault| {
            let kind = match fault {
                SlotFault::OutOfRange { .. } => FindingKind::SlotOutOfRange,
                SlotFault::Duplicate { .. } => FindingKind::DuplicateSlot,
                SlotFault::Negative { .. } => return,
            };
            let suspicion = Suspicion {
                kind,
                site: (self.name(), "slotMapping"),
                message: format!("{}: {fault}", self.name()),
            };
            let reported = report(self.check, AICORE_EXCEPTION, suspicion);
            if outcome.is_ok() {
                outcome = reported;
            }
        });
        outcome.map_err(|failure| Fault {
            code: failure.code,
            message: failure.message.into_owned(),
        })
    }
}

/// Base address of a tensor, 0 where there is none.
fn address(at: &Addresses, operand: Operand) -> usize {
    let address = match operand {
        Operand::Key => at.inputs.get(place::KEY),
        Operand::SlotMapping => at.inputs.get(place::SLOT_MAPPING),
        Operand::Value => at.inputs.get(place::VALUE),
        Operand::KeyCache => at.outputs.first(),
        Operand::ValueCache => at.outputs.get(1),
    };
    address.copied().unwrap_or(0)
}

fn name(operand: Operand) -> &'static str {
    match operand {
        Operand::Key => "key",
        Operand::KeyCache => "keyCacheRef",
        Operand::SlotMapping => "slotMapping",
        Operand::Value => "value",
        Operand::ValueCache => "valueCacheRef",
    }
}

impl Operator for ScatterOperator {
    fn name(&self) -> &'static str {
        ascend_spec::OperatorVersion::ScatterPaKvCache.symbol()
    }

    fn inputs(&self) -> usize {
        place::INPUTS
    }

    fn outputs(&self) -> usize {
        place::CACHES.len()
    }

    fn list(&self, _input: usize) -> Option<usize> {
        None
    }

    fn operand(&self, slot: Slot) -> Option<&TensorDesc> {
        let input = match slot {
            Slot::Input(input) => input,
            Slot::Output(output) => *place::CACHES.get(output)?,
            Slot::Element { .. } => return None,
        };
        self.call.tensors.get(input)?.as_ref()
    }

    fn accesses(&self, at: &Addresses, visit: &mut dyn FnMut(Access)) {
        self.problem
            .touches(&self.call.borrow(), &mut |operand, range| {
                // A sum beyond the address space is no memory.
                let start = usize::try_from(range.start).unwrap_or(usize::MAX);
                visit(Access {
                    address: address(at, operand).saturating_add(start),
                    bytes: range.end.saturating_sub(range.start),
                    write: matches!(operand, Operand::KeyCache | Operand::ValueCache),
                    what: name(operand),
                });
            });
    }

    fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        self.refuse_two_places(at)?;
        refuse_overlap(self, at)?;
        let base = |operand| {
            let offset = match operand {
                Operand::Key => self.offset(place::KEY),
                Operand::KeyCache => self.offset(place::KEY_CACHE),
                Operand::SlotMapping => self.offset(place::SLOT_MAPPING),
                Operand::Value => self.offset(place::VALUE),
                Operand::ValueCache => self.offset(place::VALUE_CACHE),
            };
            memory.host(address(at, operand).saturating_add(offset))
        };
        // SAFETY: the ranges that `touches` reports, which begin at these places, are those of `accesses`: live (the
        // ledger let the launch in), claimed by the task that runs this, and, by the check above, with the caches apart
        // from everything else.
        unsafe {
            let slots = scatter::slots(&self.problem, &base);
            self.inspect(&slots)?;
            scatter::run(&self.problem, &slots, &base);
        }
        Ok(())
    }
}

impl ScatterOperator {
    /// Bytes from a tensor's base address to its first element.
    fn offset(&self, input: usize) -> usize {
        let range = (self.operand(Slot::Input(input))).and_then(TensorDesc::byte_range);
        range.map_or(0, |range| {
            usize::try_from(range.start).unwrap_or(usize::MAX)
        })
    }
}
