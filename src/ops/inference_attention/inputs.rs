//! What a call reads, as the operator's own arguments.

use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::Argument;
use ascend_spec::ops::inference_attention::PathCall;
use ascend_spec::{TensorDesc, ops::fused_infer_attention_score as fia};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::operator::{self, EntryPoints};
use crate::ops::fused_infer_attention_score::{CallTensors, Features};
use crate::tensor::AnyTensor;

/// The parameters of an operator that reads [`Inputs`](crate::attention::Inputs).
pub trait InferenceParameter: operator::Parameter {
    /// A call of the operator.
    type Call<'a>: PathCall<Parameter = Self>;
    /// Name of the operator.
    const OPERATOR: &'static str;
    /// The queries.
    const QUERY: Self;
    /// The mask, which stays the same for all launches of a plan.
    const ATTEN_MASK: Self;
    /// The output.
    const ATTENTION_OUT: Self;
}

/// A call of an operator, in the version that all of its calls go to.
pub(crate) trait InferenceCall: PathCall + EntryPoints<Version = <Self as PathCall>::Version> {
    /// The version that calls go to.
    const VERSION: <Self as PathCall>::Version;

    /// The call as case files have it.
    fn recorded(&self) -> AnyArguments<TensorDesc>;
}

/// The refusal of an input that the operator has no argument for.
#[cold]
pub(crate) fn no_such_input<P: InferenceParameter>(name: &'static str) -> Error {
    Error::invalid(
        name,
        "a tensor",
        format_args!("none: {} has no such argument, FusedInferAttention has", P::OPERATOR),
    )
    .fix("leave it out, or call `FusedInferAttention`")
}

/// Visits the tensors by the operator's own arguments.
#[inline]
pub(super) fn visit<'t, P: InferenceParameter>(
    tensors: CallTensors<'t>,
    mut visit: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>,
) -> Result<()> {
    tensors.visit(|argument, tensor| match P::Call::<'static>::of_fused(argument.parameter) {
        Some(parameter) => visit(Argument::element(parameter, argument.index), tensor),
        None => Err(no_such_input::<P>(argument.name())),
    })
}

/// The inputs of a call that is to be planned.
pub(crate) struct Described<'t, P> {
    pub(super) inputs: CallTensors<'t>,
    pub(super) query: &'t AnyTensor,
    pub(crate) features: Features,
    /// Every tensor, in the order of [`CallTensors::visit`].
    pub(crate) tensors: SmallVec<[(Argument<P>, TensorDesc); 12]>,
}

impl<'t, P: InferenceParameter> Described<'t, P> {
    /// Describes inputs, and refuses those for which the operator has no arguments.
    pub(crate) fn new(inputs: CallTensors<'t>) -> Result<Self> {
        let (mut query, mut tensors) = (None, SmallVec::new());
        visit::<P>(inputs, |argument, tensor| {
            if argument.parameter == P::QUERY {
                query = Some(tensor);
            }
            tensors.push((argument, *tensor.desc()));
            Ok(())
        })?;
        let Some(query) = query else {
            return Err(Error::invalid("query", "none", "a tensor").fix("bring the query"));
        };
        let features = inputs.features();
        features.block_size_alone()?;
        Ok(Self { inputs, query, features, tensors })
    }

    /// The tensors of a list.
    pub(crate) fn list(&self, parameter: P) -> SmallVec<[TensorDesc; 1]> {
        let of_list = self.tensors.iter().filter(|(argument, _)| argument.parameter == parameter);
        of_list.map(|(_, desc)| *desc).collect()
    }

    /// The output that a call writes. Where the inputs imply none, the query's descriptor is a placeholder: the
    /// contract refuses the inputs.
    pub(crate) fn output_of(&self, call: &fia::FiaCall<'_>) -> TensorDesc {
        let (implied, _) = call.implied_outputs();
        implied.unwrap_or(*self.query.desc())
    }
}
