//! AttentionUpdate as an operator of the emulator.

use super::overlap::refuse_overlap;
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::kernel::merge;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, LISTS, Operator, Slot};
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::AICORE_EXCEPTION;
use ascend_spec::update::{UpdateCall, UpdateProblem};
use ascend_spec::{Refusal, Soc, TensorDesc};

/// Places of the operator's inputs, which are also those of their lists.
const LSE: usize = 0;
const LOCAL_OUT: usize = 1;

/// A call that owns its lists.
#[derive(Debug)]
pub(crate) struct OwnedUpdate {
    pub lse: Vec<TensorDesc>,
    pub local_out: Vec<TensorDesc>,
    pub update_type: i64,
    pub outputs: [Option<TensorDesc>; 2],
}

impl OwnedUpdate {
    fn borrow(&self) -> UpdateCall<'_> {
        let [out, lse_out] = self.outputs;
        UpdateCall {
            lse: &self.lse,
            local_out: &self.local_out,
            update_type: self.update_type,
            out,
            lse_out,
        }
    }
}

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct UpdateOperator {
    call: OwnedUpdate,
    problem: UpdateProblem,
    /// How far misuse that shows on the device is let pass.
    check: Check,
}

impl UpdateOperator {
    /// Checks a call.
    pub(crate) fn new(call: OwnedUpdate, soc: Soc) -> Result<Self, Refusal> {
        let problem = call.borrow().check(soc)?;
        Ok(UpdateOperator {
            call,
            problem,
            check: check(),
        })
    }

    /// Whether a launch has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.problem.rows == 0
    }

    /// Every tensor with its address, and whether it is written.
    fn tensors<'a>(
        &'a self,
        at: &'a Addresses,
    ) -> impl Iterator<Item = (&'a TensorDesc, usize, bool, &'static str)> {
        let list = |place: usize, descs: &'a [TensorDesc], name| {
            let addresses = at.lists.get(place).map_or(&[][..], |list| list);
            descs
                .iter()
                .zip(addresses)
                .map(move |(desc, &address)| (desc, address, false, name))
        };
        let outputs = self
            .call
            .outputs
            .iter()
            .zip(&at.outputs)
            .zip(["out", "lseOut"]);
        let outputs = outputs.filter_map(|((desc, &address), name)| {
            desc.as_ref().map(|desc| (desc, address, true, name))
        });
        list(LSE, &self.call.lse, "lse")
            .chain(list(LOCAL_OUT, &self.call.local_out, "localOut"))
            .chain(outputs)
    }
}

/// The elements of a view of one or two axes, one behind the other.
///
/// # Safety
///
/// `first` leads to the bytes that [`TensorDesc::byte_range`] counts, live and written by nobody else.
unsafe fn side_by_side(desc: &TensorDesc, first: *const u8) -> Vec<u8> {
    let axis = |axis: usize| {
        let dim = desc.shape.get(axis).copied().unwrap_or(1);
        (dim, desc.strides.get(axis).copied().unwrap_or(0))
    };
    let ((rows, down), (columns, across)) = (axis(0), axis(1));
    let size = desc.dtype.bits() as usize / 8;
    let start = desc.byte_range().map_or(0, |range| range.start as usize);
    let mut copy = Vec::new();
    for row in 0..rows {
        for column in 0..columns {
            let element = desc.offset + row * down + column * across;
            let place = (element as usize * size).saturating_sub(start);
            // SAFETY: every element of the view lies within its range of bytes, by the caller's promise behind `first`.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(first.add(place), size) });
        }
    }
    copy
}

impl Operator for UpdateOperator {
    fn name(&self) -> &'static str {
        ascend_spec::OperatorVersion::AttentionUpdate.symbol()
    }

    fn inputs(&self) -> usize {
        LISTS
    }

    fn outputs(&self) -> usize {
        self.call.outputs.len()
    }

    fn list(&self, input: usize) -> Option<usize> {
        (input < LISTS).then_some(input)
    }

    fn operand(&self, slot: Slot) -> Option<&TensorDesc> {
        match slot {
            Slot::Input(_) => None,
            Slot::Output(output) => self.call.outputs.get(output)?.as_ref(),
            Slot::Element {
                input: LSE,
                element,
            } => self.call.lse.get(element),
            Slot::Element {
                input: LOCAL_OUT,
                element,
            } => self.call.local_out.get(element),
            Slot::Element { .. } => None,
        }
    }

    fn accesses(&self, at: &Addresses, visit: &mut dyn FnMut(Access)) {
        if self.is_idle() {
            return;
        }
        for (desc, address, write, what) in self.tensors(at) {
            // The check has found the range; one that no memory could hold is one that no allocation answers for.
            let range = desc.byte_range().unwrap_or(0..u64::MAX);
            let start = usize::try_from(range.start).unwrap_or(usize::MAX);
            visit(Access {
                address: address.saturating_add(start),
                bytes: range.end.saturating_sub(range.start),
                write,
                what,
            });
        }
    }

    fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        refuse_overlap(self, at)?;
        let mut places = Vec::with_capacity(2 * self.problem.parts + self.call.outputs.len());
        self.accesses(at, &mut |access| places.push(memory.host(access.address)));
        let (mut parts, mut outputs) = (Vec::new(), Vec::new());
        let mut copies = Vec::new();
        for ((desc, _, write, _), place) in self.tensors(at).zip(places) {
            if write {
                outputs.push(place);
            } else if desc.is_contiguous() {
                parts.push(place);
            } else {
                // SAFETY: the place is where `accesses` says that the bytes of the view start: live (the ledger let the
                // launch in) and claimed by the task that runs this.
                let mut copy = unsafe { side_by_side(desc, place) };
                parts.push(copy.as_mut_ptr());
                copies.push(copy);
            }
        }
        let (lse, local_out) = parts.split_at(self.problem.parts.min(parts.len()));
        let buffers = merge::Buffers {
            lse,
            local_out,
            out: outputs.first().copied().unwrap_or(std::ptr::null_mut()),
            lse_out: outputs.get(1).copied(),
        };
        // SAFETY: the places are those of `accesses`, in the order of the lists and outputs, or copies of as many
        // elements: live (the ledger let the launch in), claimed by the task that runs this, and, by the check above,
        // with the outputs apart from everything else.
        unsafe {
            if let Some(row) = merge::empty_row(&self.problem, &buffers) {
                let suspicion = Suspicion {
                    kind: FindingKind::EmptyRow,
                    site: (self.name(), "lse"),
                    message: format!("{}: {row}", self.name()),
                };
                report(self.check, AICORE_EXCEPTION, suspicion).map_err(|failure| Fault {
                    code: failure.code,
                    message: failure.message.into_owned(),
                })?;
            }
            merge::run(&self.problem, &buffers);
        }
        Ok(())
    }
}
