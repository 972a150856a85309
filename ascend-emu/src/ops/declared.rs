//! Operators whose arguments are declared in the contract.

use super::launch::Launch;
use crate::config::Check;
use crate::elements::{Elements, Reader};
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, TensorPosition};
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter, EntryPoint};
use std::ops::Range;

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
    /// launch, but for an output that is an input, where the operator works in place.
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
