//! Operators whose arguments are declared in the contract.

use crate::elements::{Elements, NamedTensor, Reader};
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, TensorPosition};
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter, EntryPoint};
use smallvec::SmallVec;
use std::ops::Range;

/// Tensors of a launch, each with the addresses of it that the launch touches.
pub(super) type Touched<O> = SmallVec<[(Argument<ParameterOf<O>>, Range<usize>); 8]>;

/// The parameters of an operator.
pub(crate) type ParameterOf<O> = <<O as DeclaredOperator>::Arguments as ArgumentList>::Parameter;

/// A checked call of an operator whose arguments are declared; the declaration lists its tensors.
pub(crate) trait DeclaredOperator: Send + Sync {
    type Arguments: ArgumentList<Tensor = TensorDesc>;

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

    /// A tensor's name and its base address.
    fn named(&self, argument: Argument<ParameterOf<Self>>, addresses: &Addresses) -> NamedTensor {
        NamedTensor { what: argument.acl_name(), address: addresses.get(argument) }
    }

    /// Address of the first byte of a tensor.
    fn first_byte(&self, argument: Argument<ParameterOf<Self>>, addresses: &Addresses) -> usize {
        let desc = self.arguments().tensor(argument);
        let start = desc.and_then(TensorDesc::byte_range).map_or(0, |range| range.start);
        addresses.get(argument).saturating_add(usize::try_from(start).unwrap_or(usize::MAX))
    }

    /// The inputs that have unwritten bytes among those that a launch touches.
    fn doubtful(&self, addresses: &Addresses, reader: &dyn Reader) -> Touched<Self>
    where
        Self: Sized,
    {
        let mut doubtful = Touched::<Self>::new();
        self.touches(&mut |argument, range| {
            if argument.parameter.info().output.is_some() {
                return;
            }
            let base = addresses.get(argument);
            let place = |byte: u64| base.saturating_add(usize::try_from(byte).unwrap_or(usize::MAX));
            let bytes = place(range.start)..place(range.end);
            if !reader.knows(bytes.clone()) {
                doubtful.push((argument, bytes));
            }
        });
        doubtful
    }

    /// Visits all elements of the outputs that a launch writes.
    fn written(&self, addresses: &Addresses, visit: &mut dyn FnMut(Argument<ParameterOf<Self>>, Elements)) {
        self.touches(&mut |argument, _| {
            let desc = self.arguments().tensor(argument);
            let output = desc.filter(|_| argument.parameter.info().output.is_some());
            let elements = output.and_then(|desc| Elements::described(self.named(argument, addresses), desc));
            if let Some(elements) = elements {
                visit(argument, elements);
            }
        });
    }

    /// Passes the elements that a launch reads, and that must have been written before, to the reader, like
    /// [`Operator::reads`].
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn reads(&self, _: &Addresses, _: &DeviceMemory, _: &mut dyn Reader) {}

    /// Visits the elements that a launch writes: by default all elements of its outputs. Operators that look up the
    /// places they write to override this.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn writes(&self, addresses: &Addresses, _: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        self.written(addresses, &mut |_, elements| visit(&elements));
    }

    /// Does the work of a launch.
    ///
    /// # Safety
    ///
    /// The ranges of [`DeclaredOperator::touches`] are live while it runs, and no other thread writes them or reads
    /// those that it writes.
    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome;
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
        unsafe { DeclaredOperator::reads(self, addresses, memory, reader) };
    }

    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        unsafe { DeclaredOperator::writes(self, addresses, memory, visit) };
    }

    unsafe fn run(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome {
        // SAFETY: the caller's promise; `accesses` visits the ranges of `touches`.
        unsafe { self.compute(addresses, memory) }
    }
}
