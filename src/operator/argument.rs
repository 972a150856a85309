//! The tensors of a call, by the operator's parameters.

use std::ffi::c_void;
use std::ptr;

use ascend_spec::operator::{Argument, DeclaredParameter};
use ascend_spec::{TensorDesc, Violation};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::rules;
use crate::tensor::AnyTensor;

/// The parameters of an operator that is launched, as its errors name them.
pub trait Parameter: DeclaredParameter {
    /// Its name in errors.
    fn noun(self) -> &'static str {
        self.info().name
    }

    /// The refusal of an output because it shares memory with another tensor.
    #[cold]
    fn shares_memory(self, other: Self) -> Error {
        Error::shared(self.noun(), format_args!("memory that is shared with {}", other.noun()), "memory of its own")
    }
}

/// The tensors of a call or a launch.
pub(crate) trait Tensors<P> {
    /// Calls `visit` with each tensor, those that are written first and lists in their order, until it fails.
    fn each<'t>(&'t self, visit: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>) -> Result<()>;
}

/// The tensors of a call whose parameters have one each.
pub(crate) type NamedTensors<'a, P> = SmallVec<[(P, &'a AnyTensor); 14]>;

impl<P: Copy> Tensors<P> for NamedTensors<'_, P> {
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>) -> Result<()> {
        self.iter().try_for_each(|&(parameter, tensor)| visit(parameter.into(), tensor))
    }
}

/// A tensor of a call, and its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressed<P> {
    pub(crate) argument: Argument<P>,
    pub(crate) desc: TensorDesc,
    pub(crate) address: *mut c_void,
}

/// The tensors of a call with their addresses.
pub(crate) fn addressed<P>(tensors: &impl Tensors<P>) -> Result<SmallVec<[Addressed<P>; 8]>> {
    let mut addressed = SmallVec::new();
    tensors.each(|argument, tensor| {
        addressed.push(Addressed { argument, desc: *tensor.desc(), address: tensor.as_raw() });
        Ok(())
    })?;
    Ok(addressed)
}

/// Describes the tensors of a call that is only planned, outputs first, all at the address of `stand_in` until a
/// launch gives others.
pub(super) fn standing_in<'d, P: Parameter>(
    call: impl Iterator<Item = (Argument<P>, &'d TensorDesc)>,
    stand_in: &AnyTensor,
) -> Vec<Addressed<P>> {
    let addressed = outputs_first(call).map(|(argument, desc)| Addressed {
        argument,
        desc: *desc,
        address: match desc.is_empty() {
            true => ptr::null_mut(),
            false => stand_in.as_raw(),
        },
    });
    addressed.collect()
}

/// Puts the outputs of a call before its inputs.
pub(super) fn outputs_first<'d, P: Parameter>(
    call: impl Iterator<Item = (Argument<P>, &'d TensorDesc)>,
) -> impl Iterator<Item = (Argument<P>, &'d TensorDesc)> {
    let is_output = |(argument, _): &(Argument<P>, _)| argument.parameter.info().output.is_some();
    let (outputs, inputs): (Vec<_>, Vec<_>) = call.partition(is_output);
    outputs.into_iter().chain(inputs)
}

/// A list of lengths as INT64, or the refusal of the first that INT64 cannot hold.
#[derive(Clone, Debug)]
pub(crate) struct Lengths(std::result::Result<Vec<i64>, Violation>);

impl Lengths {
    /// Converts the lengths to INT64, in the same memory.
    pub(crate) fn new(argument: &str, lengths: Vec<usize>) -> Self {
        let mut each = lengths.iter().enumerate();
        if let Some((at, len)) = each.find(|(_, len)| i64::try_from(**len).is_err()) {
            return Self(Err(Violation::new(
                &rules::LENGTHS_OVERFLOW,
                format_args!("{len} at {argument}[{at}]"),
                format_args!("at most {}", i64::MAX),
                "give the lengths of a batch that exists; subtract lengths with saturation",
            )));
        }
        let counted = lengths.into_iter().filter_map(|len| i64::try_from(len).ok());
        Self(Ok(counted.collect()))
    }

    /// Returns the lengths that the caller has set, if any; an error if one of them was refused.
    pub(crate) fn given(lengths: &Option<Lengths>) -> Result<Option<&[i64]>> {
        match lengths {
            None => Ok(None),
            Some(Lengths(Ok(lengths))) => Ok(Some(lengths)),
            Some(Lengths(Err(refused))) => Err(refused.clone().into()),
        }
    }
}

/// Converts a number of heads to INT64.
pub(crate) fn heads(argument: &'static str, given: Option<usize>) -> Result<Option<i64>> {
    let counted = given.map(i64::try_from).transpose();
    counted.map_err(|_| {
        Error::invalid(argument, given.unwrap_or_default(), format_args!("at most {}", i64::MAX)).fix("divide the call")
    })
}
