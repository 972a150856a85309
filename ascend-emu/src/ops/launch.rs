//! One launch of a declared operator: the addresses of its tensors, and the misuse that it finds in them.

use super::declared::{DeclaredOperator, ParameterOf};
use crate::config::Check;
use crate::finding_kind::FindingKind;
use crate::host_memory::{HostMemoryExhausted, try_collect};
use crate::kernel::element_view::ElementView;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator as _};
use crate::sanitizer::{Suspicion, report};
use crate::status::{AICORE_EXCEPTION, Failure, Outcome, failure};
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter as _};
use ascend_spec::{DType, TensorDesc};
use smallvec::SmallVec;
use std::fmt::Display;
use std::ptr;

/// A launch that runs: the bytes that it touches are live and locked for it, and its outputs share no memory with its
/// other tensors, but for an output that is an input, where the operator works in place.
pub(crate) struct Launch<'a, O> {
    pub(super) op: &'a O,
    check: Check,
    addresses: &'a Addresses,
    memory: &'a DeviceMemory,
}

impl<'a, O: DeclaredOperator> Launch<'a, O> {
    /// The launch of `op` with the tensors at these addresses. `check` is how strictly misuse that is found on the
    /// device is treated.
    ///
    /// # Errors
    /// A device fault if an output shares memory with another tensor.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`], as long as the launch exists.
    pub(super) unsafe fn new(
        op: &'a O,
        check: Check,
        addresses: &'a Addresses,
        memory: &'a DeviceMemory,
    ) -> Outcome<Self> {
        refuse_overlap(op, addresses)?;
        Ok(Launch { op, check, addresses, memory })
    }

    /// Base address of a tensor; null if the call has no such tensor.
    pub(super) fn base(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> *mut u8 {
        match self.addresses.get(argument.into()) {
            0 => ptr::null_mut(),
            address => self.memory.host(address),
        }
    }

    /// First byte that a tensor's view touches; null if the call has no such tensor.
    pub(super) fn first(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> *mut u8 {
        let argument = argument.into();
        match self.op.arguments().tensor(argument) {
            None => ptr::null_mut(),
            Some(_) => self.memory.host(self.op.first_byte(argument, self.addresses)),
        }
    }

    /// A device fault of the operator.
    pub(super) fn fault(&self, why: impl Display) -> Failure {
        failure!(AICORE_EXCEPTION, "{}: {why}", self.op.symbol())
    }

    /// The numbers of a tensor of `INT32` or `INT64`; none if the call has no such tensor.
    ///
    /// # Errors
    /// A device fault if there is no host memory for them.
    ///
    /// # Safety
    ///
    /// The tensor's bytes are live and written by no other thread.
    pub(super) unsafe fn integers(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> Outcome<Vec<i64>> {
        // SAFETY: the caller's promise.
        let all = unsafe { integers(self.op, self.memory, self.addresses, argument) };
        all.map_err(|why| self.fault(why))
    }

    /// Reports misuse that `tensor` shows.
    ///
    /// # Errors
    /// A device fault in strict mode.
    pub(super) fn suspect(&self, kind: FindingKind, tensor: &'static str, text: impl Display) -> Outcome {
        let symbol = self.op.symbol();
        let mut tensors = self.op.arguments().each_tensor();
        let address = tensors.find(|(argument, _)| argument.acl_name() == tensor);
        let address = address.map(|(argument, _)| self.addresses.get(argument));
        let suspicion = Suspicion {
            kind,
            site: (symbol, tensor),
            tensor: address.unwrap_or(0),
            message: format!("{symbol}: {text}"),
        };
        report(self.check, AICORE_EXCEPTION, suspicion)
    }

    /// The sequences that the numbers of the launch lead to, and whether two of them share what they write. Faults are
    /// reported, each with its kind and tensor; a sequence with one is left out.
    ///
    /// # Errors
    /// A device fault in strict mode.
    pub(super) fn runs<R, F: Display>(
        &self,
        found: impl Iterator<Item = Result<R, F>>,
        shared: Option<F>,
        place: impl Fn(&F) -> (FindingKind, &'static str),
    ) -> Outcome<(Vec<R>, bool)> {
        let report = |fault: &F| {
            let (kind, tensor) = place(fault);
            self.suspect(kind, tensor, format_args!("{tensor}: {fault}"))
        };
        let mut runs = Vec::new();
        for run in found {
            match run {
                Ok(run) => runs.push(run),
                Err(fault) => report(&fault)?,
            }
        }
        shared.iter().try_for_each(report)?;
        Ok((runs, shared.is_some()))
    }
}

/// The numbers of a tensor of `INT32` or `INT64` of an operator; none if the call has no such tensor.
///
/// # Errors
/// There is no host memory for them.
///
/// # Safety
///
/// The tensor's bytes are live and written by no other thread.
pub(super) unsafe fn integers<O: DeclaredOperator>(
    op: &O,
    memory: &DeviceMemory,
    addresses: &Addresses,
    argument: impl Into<Argument<ParameterOf<O>>>,
) -> Result<Vec<i64>, HostMemoryExhausted> {
    let argument = argument.into();
    let Some(desc) = op.arguments().tensor(argument) else {
        return Ok(Vec::new());
    };
    let count = desc.elements().unwrap_or(0);
    let elements = ElementView::new(memory.host(op.first_byte(argument, addresses)), *desc);
    let one = |index: usize| match desc.dtype {
        // SAFETY: the caller's promise; the index is one of the tensor's elements.
        DType::Int64 => unsafe { elements.read::<i64>(index) },
        // SAFETY: the caller's promise; the index is one of the tensor's elements.
        _ => i64::from(unsafe { elements.read::<i32>(index) }),
    };
    try_collect((0..usize::try_from(count).unwrap_or(0)).map(one))
}

/// The bytes of a tensor of single bytes of an operator, as its launch walks it.
///
/// # Errors
/// There is no host memory for them.
///
/// # Safety
///
/// The bytes that the walk touches are live and written by no other thread.
pub(super) unsafe fn bytes<O: DeclaredOperator>(
    op: &O,
    memory: &DeviceMemory,
    addresses: &Addresses,
    argument: impl Into<Argument<ParameterOf<O>>>,
    walked: TensorDesc,
) -> Result<Vec<u8>, HostMemoryExhausted> {
    let count = walked.elements().unwrap_or(0);
    let first = memory.host(op.first_byte(argument.into(), addresses));
    let elements = ElementView::new(first, walked);
    // SAFETY: the caller's promise; the index is one of the elements.
    let one = |index: usize| unsafe { elements.read::<u8>(index) };
    try_collect((0..usize::try_from(count).unwrap_or(0)).map(one))
}

/// Returns a device fault if the address of a tensor that is updated in place differs as an output from its address as
/// an input.
pub(super) fn refuse_two_places<O: DeclaredOperator>(
    op: &O,
    addresses: &Addresses,
    updated: &[ParameterOf<O>],
) -> Outcome {
    for &parameter in updated {
        let info = parameter.info();
        let (Some(input), Some(output)) = (info.input, info.output) else {
            continue;
        };
        let (read, written) = (addresses.inputs.get(input), addresses.outputs.get(output));
        if op.arguments().tensor(parameter.into()).is_some() && read != written {
            return Err(failure!(
                AICORE_EXCEPTION,
                "{}: {} is at {:#x} as input {input} and at {:#x} as output {output}; it is one tensor, so change \
                     both",
                op.symbol(),
                info.acl_name,
                read.copied().unwrap_or(0),
                written.copied().unwrap_or(0)
            ));
        }
    }
    Ok(())
}

/// An output that shares bytes with another tensor of the same launch, unless both are one tensor by `may_be_one`.
fn overlap(accesses: &[Access], may_be_one: impl Fn(&Access, &Access) -> bool) -> Option<(&Access, &Access)> {
    let end = |access: &Access| access.address.saturating_add(access.bytes as usize);
    accesses.iter().enumerate().find_map(|(i, one)| {
        let other = accesses.iter().enumerate().find(|&(j, other)| {
            i != j && one.write && one.address < end(other) && other.address < end(one) && !may_be_one(one, other)
        });
        other.map(|(_, other)| (one, other))
    })
}

/// Returns a device fault if a launch would write memory that is also part of another of its tensors.
fn refuse_overlap<O: DeclaredOperator>(op: &O, addresses: &Addresses) -> Outcome {
    let mut accesses: SmallVec<[Access; 16]> = SmallVec::new();
    op.accesses(addresses, &mut |access| {
        if access.bytes > 0 {
            accesses.push(access);
        }
    });
    let in_place = op.in_place().filter(|pair| {
        let [output, input] = pair.map(|parameter| op.arguments().tensor(parameter.into()));
        output == input
    });
    let names = in_place.map(|pair| pair.map(|parameter| parameter.info().acl_name));
    let may_be_one =
        |one: &Access, other: &Access| names == Some([one.what, other.what]) && one.address == other.address;
    match overlap(&accesses, may_be_one) {
        None => Ok(()),
        Some((output, other)) => Err(failure!(
            AICORE_EXCEPTION,
            "{}: {} at {:#x} and {} at {:#x} overlap; the output cannot share memory with another tensor",
            op.name(),
            output.what,
            output.address,
            other.what,
            other.address
        )),
    }
}
