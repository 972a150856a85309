//! The tensors that launches write: new ones as planned, and their list.

use std::sync::Arc;

use ascend_spec::TensorDesc;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::Context;
use crate::tensor::{AnyTensor, Tensor};

/// The tensors that a launch writes, in an order that their operator names their parameters in.
pub(crate) trait Outputs: Sized {
    /// Makes new tensors as planned.
    fn new(planned: &mut PlannedOutputs<'_>) -> Result<Self>;

    /// Adds each tensor, or `None` where there is none.
    fn list<'t>(&'t self, tensors: &mut OutputTensors<'t>);
}

/// As many as an operator has fit without an allocation.
pub(crate) type OutputTensors<'t> = SmallVec<[Option<&'t AnyTensor>; 4]>;

/// The names and descriptions of a plan's outputs, one after the other.
pub(crate) struct PlannedOutputs<'p> {
    pub(super) context: &'p Arc<Context>,
    pub(super) each: &'p mut dyn Iterator<Item = (&'static str, Option<TensorDesc>)>,
}

impl<'p> PlannedOutputs<'p> {
    /// The next output, which a plan may not have.
    fn next(&mut self) -> (&'p Arc<Context>, &'static str, Option<TensorDesc>) {
        let (name, desc) = self.each.next().unwrap_or(("output", None));
        (self.context, name, desc)
    }

    /// The next output, which a plan has.
    fn required(&mut self) -> Result<(&'p Arc<Context>, &'static str, TensorDesc)> {
        let (context, name, desc) = self.next();
        Ok((context, name, desc.ok_or_else(|| Error::invalid(name, "none", "an output"))?))
    }
}

impl Outputs for () {
    fn new(_: &mut PlannedOutputs<'_>) -> Result<Self> {
        Ok(())
    }

    fn list<'t>(&'t self, _: &mut OutputTensors<'t>) {}
}

impl<T: Element> Outputs for Option<Tensor<T>> {
    fn new(planned: &mut PlannedOutputs<'_>) -> Result<Self> {
        let (context, name, desc) = planned.next();
        desc.map(|desc| new_output(context, name, desc)).transpose()
    }

    fn list<'t>(&'t self, tensors: &mut OutputTensors<'t>) {
        tensors.push(self.as_deref());
    }
}

impl<T: Element> Outputs for Tensor<T> {
    fn new(planned: &mut PlannedOutputs<'_>) -> Result<Self> {
        let (context, name, desc) = planned.required()?;
        new_output(context, name, desc)
    }

    fn list<'t>(&'t self, tensors: &mut OutputTensors<'t>) {
        tensors.push(Some(self));
    }
}

impl Outputs for AnyTensor {
    fn new(planned: &mut PlannedOutputs<'_>) -> Result<Self> {
        let (context, _, desc) = planned.required()?;
        AnyTensor::empty(context, desc)
    }

    fn list<'t>(&'t self, tensors: &mut OutputTensors<'t>) {
        tensors.push(Some(self));
    }
}

impl<A: Outputs, B: Outputs> Outputs for (A, B) {
    fn new(planned: &mut PlannedOutputs<'_>) -> Result<Self> {
        Ok((Outputs::new(planned)?, Outputs::new(planned)?))
    }

    fn list<'t>(&'t self, tensors: &mut OutputTensors<'t>) {
        self.0.list(tensors);
        self.1.list(tensors);
    }
}

/// Makes a struct [`Outputs`]: those of its fields, in this order.
macro_rules! outputs {
    ($output:ident { $($field:ident),* }) => {
        impl<T: Element> $crate::ops::operation::Outputs for $output<T> {
            fn new(planned: &mut $crate::ops::operation::PlannedOutputs<'_>) -> Result<Self> {
                Ok(Self { $($field: $crate::ops::operation::Outputs::new(planned)?,)* })
            }

            fn list<'t>(&'t self, tensors: &mut $crate::ops::operation::OutputTensors<'t>) {
                $(self.$field.list(tensors);)*
            }
        }
    };
}

pub(crate) use outputs;

/// A new tensor for an output that a plan describes. `argument` is its name in errors.
pub(crate) fn new_output<T: Element>(
    context: &Arc<Context>,
    argument: &'static str,
    desc: TensorDesc,
) -> Result<Tensor<T>> {
    if desc.dtype != T::DTYPE {
        return Err(Error::invalid(
            argument,
            format_args!("{} elements", T::DTYPE),
            format_args!("{} elements, which the plan computes", desc.dtype),
        )
        .fix(
            "launch with tensors of the planned type; attention whose output has another type than its query names it \
              by `Inputs::output_type::<T>`",
        ));
    }
    AnyTensor::empty(context, desc)?.typed()
}
