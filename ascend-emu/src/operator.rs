//! The interface of an operator for the machinery of streams, graphs and executors.

use crate::descriptor::DescribedTensor;
use crate::elements::{Elements, Reader};
use crate::memory::DeviceMemory;
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::{Argument, ArgumentList, DeclaredParameter};
use smallvec::SmallVec;

/// Largest number of inputs of an operator.
pub(crate) const INPUTS: usize = 31;
/// Largest number of outputs of an operator.
pub(crate) const OUTPUTS: usize = 4;
/// Largest number of inputs of an operator that are lists.
pub(crate) const LISTS: usize = 2;

/// Base addresses of an operator's tensors, 0 for absent ones. They may change from launch to launch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    /// By index among the inputs of the operator's newest version; entries of lists and of arrays in host memory stay
    /// 0.
    pub inputs: [usize; INPUTS],
    pub outputs: [usize; OUTPUTS],
    /// Elements of the list inputs, in the order of those inputs.
    pub lists: [SmallVec<[usize; 4]>; LISTS],
}

impl Addresses {
    /// The addresses of a call's tensors.
    pub(crate) fn of(arguments: &impl ArgumentList<Tensor = DescribedTensor>) -> Self {
        let mut addresses = Addresses::default();
        for (argument, DescribedTensor { address, .. }) in arguments.each_tensor() {
            let info = argument.parameter.info();
            if let Some(list) = info.list.and_then(|list| addresses.lists.get_mut(list)) {
                list.push(*address);
                continue;
            }
            let input = info.input.and_then(|input| addresses.inputs.get_mut(input));
            let output = info.output.and_then(|output| addresses.outputs.get_mut(output));
            for slot in input.into_iter().chain(output) {
                *slot = *address;
            }
        }
        addresses
    }

    /// Base address of a tensor, 0 if there is none. A tensor that is updated in place has its output's address.
    pub(crate) fn get<P: DeclaredParameter>(&self, argument: Argument<P>) -> usize {
        let info = argument.parameter.info();
        let address = match (info.list, info.output, info.input) {
            (Some(list), ..) => self.lists.get(list).and_then(|list| list.get(argument.index)),
            (None, Some(output), _) => self.outputs.get(output),
            (None, None, Some(input)) => self.inputs.get(input),
            (None, None, None) => None,
        };
        address.copied().unwrap_or(0)
    }

    /// Copies `from`, keeping what long lists have allocated.
    pub(crate) fn copy_from(&mut self, from: &Addresses) {
        self.inputs = from.inputs;
        self.outputs = from.outputs;
        for (list, from) in self.lists.iter_mut().zip(&from.lists) {
            list.clear();
            list.extend_from_slice(from);
        }
    }
}

/// Bytes that one launch touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub address: usize,
    pub bytes: u64,
    pub write: bool,
    /// The tensor's name.
    pub what: &'static str,
}

/// One tensor of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorPosition {
    Input(usize),
    Output(usize),
    /// Element of the list input at an index.
    Element {
        input: usize,
        element: usize,
    },
}

/// A prepared operator: immutable, shared by its executor and by every launch in flight.
pub(crate) trait Operator: Send + Sync {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Number of inputs in the argument list; outputs are counted after them.
    fn inputs(&self) -> usize;

    /// Number of outputs in the argument list.
    fn outputs(&self) -> usize;

    /// Index in [`Addresses::lists`] of the list input at an index among the inputs.
    fn list(&self, input: usize) -> Option<usize>;

    /// Index in [`Addresses::inputs`] of the input at an index in the argument list.
    fn input_index(&self, input: usize) -> Option<usize> {
        Some(input)
    }

    /// Index in [`Addresses::outputs`] of the output at an index in the argument list.
    fn output_index(&self, output: usize) -> Option<usize> {
        Some(output)
    }

    /// Description of a tensor, if the operator was given it.
    fn tensor(&self, position: TensorPosition) -> Option<&TensorDesc>;

    /// Why no launch of the operator can be queued; `None` if one can.
    fn unlaunchable(&self) -> Option<&'static str> {
        None
    }

    /// Called by phase two when the launch is queued. An operator whose output shape depends on the data waits for
    /// the launch and writes the shape to the tensor of the output's handle.
    fn store_shape(&self, _wait: &dyn Fn() -> Outcome) -> Outcome {
        Ok(())
    }

    /// Visits every byte range read or written by one launch with these addresses.
    fn accesses(&self, addresses: &Addresses, visit: &mut dyn FnMut(Access));

    /// Passes the elements that a launch reads, and that must have been written before, to the reader. The ranges of
    /// [`Operator::accesses`] also hold bytes that no launch reads, such as blocks of a cache that no table names.
    /// The default passes nothing: rows of tensors that are no cache may be padding.
    ///
    /// # Safety
    ///
    /// As for [`Operator::run`].
    unsafe fn reads(&self, _: &Addresses, _: &DeviceMemory, _: &mut dyn Reader) {}

    /// Calls `visit` with the elements that a launch has written. Output elements that a launch may leave out count
    /// as written.
    ///
    /// # Safety
    ///
    /// As for [`Operator::run`].
    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements));

    /// Does the work, on the stream's thread.
    ///
    /// # Safety
    ///
    /// The ranges that [`Operator::accesses`] names are live while it runs, and no other thread writes them or reads
    /// those that it writes.
    unsafe fn run(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome;
}
