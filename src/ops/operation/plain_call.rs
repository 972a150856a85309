//! Operators whose launch queues their call and does nothing else: one [`Operation`] for all of them.

use std::fmt;
use std::sync::Arc;

use ascend_spec::operator::DeclaredParameter;
use smallvec::SmallVec;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{NamedTensors, Parameter};
use crate::runtime::{Queue, ReplayCheck, Stream};
use crate::tensor::AnyTensor;

use super::{Operation, OutputTensors, Outputs, Plan, Sealed};

/// The description of a call whose launch queues the call and does nothing else, such as
/// [`LightningIndexer`](crate::indexer::LightningIndexer). Only this crate implements the trait.
#[allow(private_bounds, reason = "sealed: the bounds have no public names")]
pub trait PlainCall: Sealed {
    /// What a launch reads: the tensors that differ from layer to layer. `T` is the element type of the output.
    type Inputs<'a, T: Element>;

    /// What a launch writes, in new tensors or those of the caller; nothing where it writes some of its inputs.
    type Output<T: Element>: Outputs;

    /// Parameters of the operator.
    type Parameter: Parameter;

    /// What a plan keeps: tensors that are the same for all launches, and what the tensors of a launch are checked by.
    #[doc(hidden)]
    type Kept: fmt::Debug;

    /// The parameters of the outputs, in their order.
    #[doc(hidden)]
    const OUTPUTS: &'static [Self::Parameter];

    /// Returns the tensors of a launch without its outputs. Those that the call also writes, such as a cache, come
    /// before those that it only reads.
    #[doc(hidden)]
    fn tensors<'t, 'i: 't, T: Element>(
        kept: &'t Self::Kept,
        inputs: &'t Self::Inputs<'i, T>,
    ) -> impl Iterator<Item = (Self::Parameter, &'t AnyTensor)>;

    /// Refuses inputs of a launch by more than the shapes of their tensors. By default none.
    #[doc(hidden)]
    #[inline]
    fn admits<T: Element>(_: &Self::Kept, _inputs: &Self::Inputs<'_, T>) -> Result<()> {
        Ok(())
    }

    /// Returns the row from which on a launch may leave what it writes as it is, if there is one.
    #[doc(hidden)]
    fn first_unwritten(_: &Self::Kept) -> Result<Option<usize>> {
        Ok(None)
    }
}

/// An operator with such a description, as its plans know it: what they keep, and their checks of numbers.
pub struct PlainOperation<D: PlainCall> {
    kept: D::Kept,
    numbers: SmallVec<[Arc<dyn ReplayCheck>; 2]>,
}

impl<D: PlainCall> PlainOperation<D> {
    /// What a plan keeps, and the checks of numbers on the device that it has made.
    pub(crate) fn new(kept: D::Kept, numbers: impl IntoIterator<Item = Arc<dyn ReplayCheck>>) -> Self {
        Self { kept, numbers: numbers.into_iter().collect() }
    }
}

impl<D: PlainCall> fmt::Debug for PlainOperation<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainOperation").field("kept", &self.kept).field("numbers", &self.numbers).finish()
    }
}

impl<D: PlainCall> Sealed for PlainOperation<D> {}

impl<D: PlainCall> Operation for PlainOperation<D> {
    type Inputs<'a, T: Element> = D::Inputs<'a, T>;
    type Output<T: Element> = D::Output<T>;
    type Parameter = D::Parameter;
    const MAKES_OUTPUT: bool = !D::OUTPUTS.is_empty();

    fn output<T: Element>(&self, plan: &Plan<Self>) -> Result<D::Output<T>> {
        plan.new_outputs(D::OUTPUTS)
    }

    fn launch<T: Element>(
        &self,
        plan: &Plan<Self>,
        queue: &impl Queue,
        inputs: &D::Inputs<'_, T>,
        output: &mut D::Output<T>,
    ) -> Result<()> {
        let mut written = OutputTensors::new();
        output.list(&mut written);
        let written = D::OUTPUTS.iter().zip(written).filter_map(|(output, tensor)| Some((*output, tensor?)));
        let tensors: NamedTensors<'_, _> = written.chain(D::tensors(&self.kept, inputs)).collect();
        plan.queue(queue, &tensors, || D::admits(&self.kept, inputs)).flatten()
    }

    #[inline]
    fn number_checks(&self) -> &[Arc<dyn ReplayCheck>] {
        &self.numbers
    }

    fn has_unwritten(&self) -> Result<bool> {
        Ok(D::first_unwritten(&self.kept)?.is_some())
    }

    fn clear_unwritten<T: Element>(&self, stream: &Stream, output: &D::Output<T>) -> Result<()> {
        let Some(first) = D::first_unwritten(&self.kept)? else {
            return Ok(());
        };
        let mut written = OutputTensors::new();
        output.list(&mut written);
        written.into_iter().flatten().try_for_each(|tensor| {
            let rows = tensor.shape().first().copied().unwrap_or(0);
            tensor.narrow(0, first..rows)?.clear(stream)
        })
    }

    fn describe(&self, plan: &Plan<Self>, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("kept", &self.kept);
        for output in D::OUTPUTS {
            if let Some(desc) = plan.call().desc(*output) {
                text.field(output.info().name, &desc.shape);
            }
        }
    }
}
