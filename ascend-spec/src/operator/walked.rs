//! The tensors that a launch walks, where it may walk more of one than is described.

use super::ArgumentList;
use crate::{Dims, TensorDesc};
use std::ops::Range;

/// A resolved call, whose launch walks tensors of the call `C`.
pub trait WalkedTensors<C: ArgumentList<Tensor = TensorDesc>> {
    /// The shape in which a launch walks a tensor of the call; `None` where it walks none of it.
    fn walked_shape(&self, call: &C, parameter: C::Parameter, desc: &TensorDesc) -> Option<Dims>;

    /// A tensor of the call as a launch walks it, which may be more than is described; `None` where it walks none of
    /// it.
    fn walked(&self, call: &C, parameter: C::Parameter, desc: &TensorDesc) -> Option<TensorDesc> {
        Some(desc.read_as(self.walked_shape(call, parameter, desc)?))
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base address.
    /// Visits nothing where nothing is written.
    fn touches(&self, call: &C, visit: &mut dyn FnMut(C::Parameter, Range<u64>)) {
        for (argument, desc) in call.each_tensor() {
            if let Some(walked) = self.walked(call, argument.parameter, desc) {
                visit(argument.parameter, walked.byte_range().unwrap_or(0..u64::MAX));
            }
        }
    }
}
