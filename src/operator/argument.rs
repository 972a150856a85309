//! The tensors of a call, by the operator's parameters.

use std::ffi::c_void;
use std::fmt::Debug;

use ascend_spec::TensorDesc;
use ascend_spec::operator::DeclaredParameter;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::tensor::AnyTensor;

/// One tensor of an operator's call: a parameter, and its number in the list if that is one.
pub(crate) trait Argument: Copy + Eq + Debug {
    /// Its name in errors.
    fn name(self) -> &'static str;

    /// Its number among the operator's inputs, if it is one.
    fn input(self) -> Option<usize>;

    /// Its number among the operator's outputs, if it is one. What is updated in place is both.
    fn output(self) -> Option<usize>;

    /// Its number in its list, if the parameter is one.
    fn element(self) -> Option<usize>;

    /// The refusal of this output because it shares memory with another tensor.
    #[cold]
    fn shares_memory(self, other: Self) -> Error {
        Error::invalid(
            self.name(),
            format_args!("memory that is shared with {}", other.name()),
            "memory of its own",
        )
    }
}

impl<P: DeclaredParameter> Argument for ascend_spec::operator::Argument<P> {
    fn name(self) -> &'static str {
        self.parameter.info().name
    }

    fn input(self) -> Option<usize> {
        self.parameter.info().input
    }

    fn output(self) -> Option<usize> {
        self.parameter.info().output
    }

    fn element(self) -> Option<usize> {
        self.parameter.info().list.map(|_| self.index)
    }
}

/// The tensors of a call or a launch.
pub(crate) trait Tensors<A> {
    /// Calls `visit` with each, outputs first and lists in their order, until it fails.
    fn each<'t>(&'t self, visit: impl FnMut(A, &'t AnyTensor) -> Result<()>) -> Result<()>;
}

/// A tensor of a call, and its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressed<A> {
    pub(crate) argument: A,
    pub(crate) desc: TensorDesc,
    pub(crate) address: *mut c_void,
}

/// The tensors of a call with their addresses.
pub(crate) fn addressed<A>(tensors: &impl Tensors<A>) -> Result<SmallVec<[Addressed<A>; 8]>> {
    let mut addressed = SmallVec::new();
    tensors.each(|argument, tensor| {
        addressed.push(Addressed {
            argument,
            desc: *tensor.desc(),
            address: tensor.as_raw(),
        });
        Ok(())
    })?;
    Ok(addressed)
}
