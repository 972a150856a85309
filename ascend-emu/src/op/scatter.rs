//! ScatterPaKvCache as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::overlap::refuse_overlap;
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::kernel::scatter;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::AICORE_EXCEPTION;
use ascend_spec::scatter::{
    Argument, Arguments, Parameter, ScatterProblem, SlotFault, slot_faults,
};
use ascend_spec::{OperatorVersion, Refusal, Soc, TensorDesc};
use std::ops::Range;

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct ScatterOperator {
    arguments: Arguments<TensorDesc>,
    problem: ScatterProblem,
    /// How far misuse that shows on the device is let pass.
    check: Check,
}

impl ScatterOperator {
    /// Checks a call.
    pub(crate) fn new(arguments: Arguments<TensorDesc>, soc: Soc) -> Result<Self, Refusal> {
        let problem = arguments.call().check(soc)?;
        Ok(ScatterOperator {
            arguments,
            problem,
            check: check(),
        })
    }

    /// A device fault if a cache lies elsewhere as an output than as an input.
    fn refuse_two_places(&self, at: &Addresses) -> Result<(), Fault> {
        for cache in [Parameter::KeyCache, Parameter::ValueCache] {
            let info = cache.info();
            let (Some(input), Some(output)) = (info.input, info.output) else {
                continue;
            };
            let (read, written) = (at.inputs.get(input), at.outputs.get(output));
            if self.arguments.tensor(cache).is_some() && read != written {
                return Err(self.fault(format!(
                    "{} is at {:#x} as input {input} and at {:#x} as output {output}; it is one tensor, so change both",
                    info.acl_name,
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
            message: format!("{}: {text}", self.symbol()),
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
                site: (self.symbol(), "slotMapping"),
                message: format!("{}: {fault}", self.symbol()),
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

impl DeclaredOperator for ScatterOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        OperatorVersion::ScatterPaKvCache.symbol()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.problem.tokens == 0
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| {
            visit(parameter.into(), range)
        });
    }

    fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        self.refuse_two_places(at)?;
        refuse_overlap(self, at)?;
        let base = |parameter: Parameter| {
            let range = (self.arguments.tensor(parameter)).and_then(TensorDesc::byte_range);
            let start = range.map_or(0, |range| {
                usize::try_from(range.start).unwrap_or(usize::MAX)
            });
            memory.host(at.get(parameter.into()).saturating_add(start))
        };
        // SAFETY: the ranges that `touches` reports, which begin at these places, are those of `DeclaredOperator::touches`: live (the
        // allocation table let the launch in), locked for the task that runs this, and, by the check above, with the caches apart
        // from everything else.
        unsafe {
            let slots = scatter::slots(&self.problem, &base);
            self.inspect(&slots)?;
            scatter::run(&self.problem, &slots, &base);
        }
        Ok(())
    }
}
