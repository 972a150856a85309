//! Operators whose arguments are declared in the contract, and their launches.

use crate::config::Check;
use crate::elements::{Elements, NamedTensor, Reader};
use crate::finding_kind::FindingKind;
use crate::host_memory::try_collect;
use crate::kernel::element_view::ElementView;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, TensorPosition};
use crate::sanitizer::{Suspicion, report};
use crate::status::{AICORE_EXCEPTION, Failure, Outcome, failure};
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter, EntryPoint};
use ascend_spec::{DType, TensorDesc};
use smallvec::SmallVec;
use std::fmt::Display;
use std::ops::Range;
use std::ptr;

/// The parameters of an operator.
pub(crate) type ParameterOf<O> = <<O as DeclaredOperator>::Arguments as ArgumentList>::Parameter;

/// A checked call of an operator whose arguments are declared; the declaration lists its tensors.
pub(crate) trait DeclaredOperator: Send + Sync + Sized {
    type Arguments: ArgumentList<Tensor = TensorDesc>;

    /// The parameters that are updated in place: each has one address as an input and as an output.
    const UPDATED: &'static [ParameterOf<Self>] = &[];

    /// Name of the phase-two function.
    fn symbol(&self) -> &'static str;

    /// Number of the operator's version.
    fn version(&self) -> u8 {
        1
    }

    /// The parameters of the entry point that made the call.
    fn entry_point(&self) -> EntryPoint<ParameterOf<Self>> {
        EntryPoint::Version(self.version())
    }

    fn arguments(&self) -> &Self::Arguments;

    /// How strictly misuse that is found on the device is treated.
    fn check(&self) -> Check;

    /// Whether a launch has nothing to do.
    fn is_idle(&self) -> bool;

    /// Why no launch of the call can be queued; `None` if one can.
    fn unlaunchable(&self) -> Option<&'static str> {
        None
    }

    /// Whether the call breaks a lint by which the device may access memory outside of the call's tensors. Launches
    /// of all other calls stay within them.
    fn overruns(&self) -> bool {
        false
    }

    /// An output and the input that it may be: each element is read before the one in its place is written.
    fn in_place(&self) -> Option<[ParameterOf<Self>; 2]> {
        None
    }

    /// Visits the bytes of each tensor that a launch touches, counted from the tensor's base address and given the
    /// strides with which the launch walks them.
    fn touches(&self, visit: &mut dyn FnMut(Argument<ParameterOf<Self>>, Range<u64>));

    /// Passes the elements that a launch reads, and that must have been written before, to the reader, like
    /// [`Operator::reads`].
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn reads(&self, _: &Launch<'_, Self>, _: &mut dyn Reader) {}

    /// Visits the elements that a launch writes: by default all elements of its outputs. Operators that look up the
    /// places they write to override this.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        launch.outputs(&mut |_, elements| visit(&elements));
    }

    /// Does the work of a launch, unless it has none or its tensors are not where the operator can have them.
    ///
    /// # Errors
    /// A device fault.
    ///
    /// # Safety
    ///
    /// The ranges of [`DeclaredOperator::touches`] are live while it runs, and no other thread writes them or reads
    /// those that it writes.
    unsafe fn run(&self, launch: &Launch<'_, Self>) -> Outcome {
        if self.is_idle() {
            return Ok(());
        }
        launch.refuse_two_places()?;
        launch.refuse_overlap()?;
        // SAFETY: the caller's promise; the outputs overlap no other tensor.
        unsafe { self.compute(launch) }
    }

    /// Does the work of a launch that has some.
    ///
    /// # Errors
    /// A device fault.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`], which has found that the outputs share no memory with other tensors of the
    /// launch, but for an output that is an input, where the operator works in place. An operator with a `run` of its
    /// own may let outputs share memory with inputs; its `compute` then copes with that.
    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome;
}

impl<O: DeclaredOperator> Operator for O {
    fn name(&self) -> &'static str {
        self.symbol()
    }

    fn inputs(&self) -> usize {
        self.entry_point().inputs()
    }

    fn outputs(&self) -> usize {
        self.entry_point().outputs()
    }

    fn list(&self, input: usize) -> Option<usize> {
        self.entry_point().input(input)?.info().list
    }

    fn input_index(&self, input: usize) -> Option<usize> {
        self.entry_point().input(input)?.info().input
    }

    fn output_index(&self, output: usize) -> Option<usize> {
        self.entry_point().output(output)?.info().output
    }

    fn tensor(&self, position: TensorPosition) -> Option<&TensorDesc> {
        let entry_point = self.entry_point();
        let (parameter, index) = match position {
            TensorPosition::Input(input) => (entry_point.input(input)?, 0),
            TensorPosition::Output(output) => (entry_point.output(output)?, 0),
            TensorPosition::Element { input, element } => (entry_point.input(input)?, element),
        };
        let in_list = matches!(position, TensorPosition::Element { .. });
        if parameter.info().list.is_some() != in_list {
            return None;
        }
        self.arguments().tensor(Argument::element(parameter, index))
    }

    fn unlaunchable(&self) -> Option<&'static str> {
        DeclaredOperator::unlaunchable(self)
    }

    fn accesses(&self, addresses: &Addresses, visit: &mut dyn FnMut(Access)) {
        self.touches(&mut |argument, range| {
            let info = argument.parameter.info();
            // An address beyond the address space is no memory, and the allocation table refuses it.
            let start = usize::try_from(range.start).unwrap_or(usize::MAX);
            visit(Access {
                address: addresses.get(argument).saturating_add(start),
                bytes: range.end.saturating_sub(range.start),
                write: info.output.is_some(),
                what: info.acl_name,
            });
        });
    }

    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise.
        unsafe { DeclaredOperator::reads(self, &Launch::new(self, addresses, memory), reader) };
    }

    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        unsafe { DeclaredOperator::writes(self, &Launch::new(self, addresses, memory), visit) };
    }

    unsafe fn run(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome {
        // SAFETY: the caller's promise; `accesses` visits the ranges of `touches`.
        unsafe { DeclaredOperator::run(self, &Launch::new(self, addresses, memory)) }
    }
}

/// Tensors of a launch, each with the addresses of it that the launch touches.
pub(super) type Touched<O> = SmallVec<[(Argument<ParameterOf<O>>, Range<usize>); 8]>;

/// A launch of a checked call, with its tensors at the addresses that they have for it.
pub(crate) struct Launch<'a, O> {
    pub(super) op: &'a O,
    addresses: &'a Addresses,
    pub(super) memory: &'a DeviceMemory,
}

impl<'a, O: DeclaredOperator> Launch<'a, O> {
    pub(super) fn new(op: &'a O, addresses: &'a Addresses, memory: &'a DeviceMemory) -> Self {
        Launch { op, addresses, memory }
    }

    /// Base address of a tensor on the device; 0 if the call has no such tensor.
    pub(super) fn address(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> usize {
        self.addresses.get(argument.into())
    }

    /// Base address of a tensor; null if the call has no such tensor.
    pub(super) fn base(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> *mut u8 {
        match self.address(argument) {
            0 => ptr::null_mut(),
            address => self.memory.host(address),
        }
    }

    /// Address on the device of the first byte that a tensor's view touches.
    pub(super) fn first_byte(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> usize {
        let argument = argument.into();
        let desc = self.op.arguments().tensor(argument);
        let start = desc.and_then(TensorDesc::byte_range).map_or(0, |range| range.start);
        self.address(argument).saturating_add(usize::try_from(start).unwrap_or(usize::MAX))
    }

    /// First byte that a tensor's view touches; null if the call has no such tensor.
    pub(super) fn first(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> *mut u8 {
        let argument = argument.into();
        match self.op.arguments().tensor(argument) {
            None => ptr::null_mut(),
            Some(_) => self.memory.host(self.first_byte(argument)),
        }
    }

    /// A tensor's name and its base address.
    pub(super) fn named(&self, argument: impl Into<Argument<ParameterOf<O>>>) -> NamedTensor {
        let argument = argument.into();
        NamedTensor { what: argument.acl_name(), address: self.address(argument) }
    }

    /// The inputs that have unwritten bytes among those that the launch touches.
    pub(super) fn doubtful(&self, reader: &dyn Reader) -> Touched<O> {
        let mut doubtful = Touched::<O>::new();
        self.op.touches(&mut |argument, range| {
            if argument.is_output() {
                return;
            }
            let base = self.address(argument);
            let place = |byte: u64| base.saturating_add(usize::try_from(byte).unwrap_or(usize::MAX));
            let bytes = place(range.start)..place(range.end);
            if !reader.knows(bytes.clone()) {
                doubtful.push((argument, bytes));
            }
        });
        doubtful
    }

    /// Visits all elements of the outputs that the launch touches.
    pub(super) fn outputs(&self, visit: &mut dyn FnMut(Argument<ParameterOf<O>>, Elements)) {
        self.op.touches(&mut |argument, _| {
            let desc = self.op.arguments().tensor(argument);
            let output = desc.filter(|_| argument.is_output());
            let elements = output.and_then(|desc| Elements::described(self.named(argument), desc));
            if let Some(elements) = elements {
                visit(argument, elements);
            }
        });
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
        let argument = argument.into();
        let Some(desc) = self.op.arguments().tensor(argument) else {
            return Ok(Vec::new());
        };
        let count = desc.elements().unwrap_or(0);
        let elements = ElementView::new(self.first(argument), *desc);
        let one = |index: usize| match desc.dtype {
            // SAFETY: the caller's promise; the index is one of the tensor's elements.
            DType::Int64 => unsafe { elements.read::<i64>(index) },
            // SAFETY: the caller's promise; the index is one of the tensor's elements.
            _ => i64::from(unsafe { elements.read::<i32>(index) }),
        };
        let all = try_collect((0..usize::try_from(count).unwrap_or(0)).map(one));
        all.map_err(|why| self.fault(why))
    }

    /// The bytes of a tensor of single bytes, as the launch walks it.
    ///
    /// # Errors
    /// A device fault if there is no host memory for them.
    ///
    /// # Safety
    ///
    /// The bytes that the walk touches are live and written by no other thread.
    pub(super) unsafe fn bytes(
        &self,
        argument: impl Into<Argument<ParameterOf<O>>>,
        walked: TensorDesc,
    ) -> Outcome<Vec<u8>> {
        let count = walked.elements().unwrap_or(0);
        let elements = ElementView::new(self.first(argument), walked);
        // SAFETY: the caller's promise; the index is one of the elements.
        let one = |index: usize| unsafe { elements.read::<u8>(index) };
        let all = try_collect((0..usize::try_from(count).unwrap_or(0)).map(one));
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
        let address = address.map(|(argument, _)| self.address(argument));
        let suspicion = Suspicion {
            kind,
            site: (symbol, tensor),
            tensor: address.unwrap_or(0),
            message: format!("{symbol}: {text}"),
        };
        report(self.op.check(), AICORE_EXCEPTION, suspicion)
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

    /// Returns a device fault if the address of a tensor that is updated in place differs as an output from its
    /// address as an input.
    pub(super) fn refuse_two_places(&self) -> Outcome {
        for parameter in O::UPDATED {
            let info = parameter.info();
            let (Some(input), Some(output)) = (info.input, info.output) else {
                continue;
            };
            let (read, written) = (self.addresses.inputs.get(input), self.addresses.outputs.get(output));
            if self.op.arguments().tensor((*parameter).into()).is_some() && read != written {
                return Err(self.fault(format_args!(
                    "{} is at {:#x} as input {input} and at {:#x} as output {output}; it is one tensor, so change both",
                    info.acl_name,
                    read.copied().unwrap_or(0),
                    written.copied().unwrap_or(0),
                )));
            }
        }
        Ok(())
    }

    /// Returns a device fault if the launch would write memory that is also part of another of its tensors.
    pub(super) fn refuse_overlap(&self) -> Outcome {
        let mut accesses: SmallVec<[Access; 16]> = SmallVec::new();
        self.op.accesses(self.addresses, &mut |access| {
            if access.bytes > 0 {
                accesses.push(access);
            }
        });
        let in_place = self.op.in_place().filter(|pair| {
            let [output, input] = pair.map(|parameter| self.op.arguments().tensor(parameter.into()));
            output == input
        });
        let names = in_place.map(|pair| pair.map(|parameter| parameter.info().acl_name));
        let may_be_one =
            |one: &Access, other: &Access| names == Some([one.what, other.what]) && one.address == other.address;
        match overlap(&accesses, may_be_one) {
            None => Ok(()),
            Some((output, other)) => Err(self.fault(format_args!(
                "{} at {:#x} and {} at {:#x} overlap; the output cannot share memory with another tensor",
                output.what, output.address, other.what, other.address
            ))),
        }
    }
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
