//! Memory for what a launch writes.

use std::sync::Arc;

use ascend_spec::TensorDesc;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::Context;
use crate::tensor::{AnyTensor, Tensor};

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
            format_args!(
                "{} elements, which the plan computes: launch with the planned tensors, or name the type of the output, as in \
                 `Inputs::output_type::<T>`",
                desc.dtype
            ),
        ).fix("name the type of the output by `Inputs::output_type::<T>`, or launch with the planned tensors"));
    }
    AnyTensor::empty(context, desc)?.typed()
}
