//! Operators whose arguments the contract declares.

use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, TensorPosition};
use ascend_spec::TensorDesc;
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter, EntryPoint};
use std::ops::Range;

/// The parameters of an operator.
pub(crate) type ParameterOf<O> = <<O as DeclaredOperator>::Arguments as ArgumentList>::Parameter;

/// A checked call of an operator whose arguments are declared: which tensors it has, the declaration says.
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

    /// Why no launch of it can be queued, if so.
    fn unlaunchable(&self) -> Option<&'static str> {
        None
    }

    /// Whether the call breaks a lint that says that the device may leave the call's tensors. No other call's launch
    /// touches bytes outside of them.
    fn overruns(&self) -> bool {
        false
    }

    /// Visits the bytes of each tensor that a launch touches, from the tensor's base address, by the strides with which
    /// it walks them.
    fn touches(&self, visit: &mut dyn FnMut(Argument<ParameterOf<Self>>, Range<u64>));

    /// Does the work of a launch.
    ///
    /// # Safety
    ///
    /// The ranges of [`DeclaredOperator::touches`] are live while it runs, and nobody else writes them or reads those that it
    /// writes.
    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault>;
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

    fn accesses(&self, at: &Addresses, visit: &mut dyn FnMut(Access)) {
        self.touches(&mut |argument, range| {
            let info = argument.parameter.info();
            // A sum beyond the address space is no memory, and no allocation answers for it.
            let start = usize::try_from(range.start).unwrap_or(usize::MAX);
            visit(Access {
                address: at.get(argument).saturating_add(start),
                bytes: range.end.saturating_sub(range.start),
                write: info.output.is_some(),
                what: info.acl_name,
            });
        });
    }

    unsafe fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        // SAFETY: the caller's promise; `accesses` visits the ranges of `touches`.
        unsafe { self.compute(at, memory) }
    }
}
