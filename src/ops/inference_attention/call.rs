//! Calls of the operators as plans are made of them.

use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::{ArgumentList, DeclaredVersion};
use ascend_spec::ops::fused_infer_attention_score::ContentBounds;
use ascend_spec::{Target, TensorDesc, Violation};
use ascend_sys::Api;

use crate::error::Result;
use crate::operator::{Descriptors, PhaseOne, Phases};

/// A call of an operator, in the version that all of its calls go to.
pub(crate) trait InferenceCall: ArgumentList<Tensor = TensorDesc> {
    /// Versions of the operator.
    type Version: DeclaredVersion;
    /// The version that calls go to.
    const VERSION: Self::Version;

    /// Both functions of the version.
    fn phases() -> Phases;

    /// Refuses a call that breaks a rule.
    fn check(&self, target: Target) -> Result<(), Violation>;

    /// Refuses a call that breaks a lint which is not allowed.
    fn lint(&self, allowed: &[&str]) -> Result<(), Violation>;

    /// Bounds of what a launch reads on the device as positions in other tensors, if it reads any.
    fn content_bounds(&self) -> Result<Option<ContentBounds>, Violation>;

    /// The call as case files have it.
    fn recorded(&self) -> AnyArguments<TensorDesc>;

    /// Phase one of a call that holds the rules. The device must be bound.
    fn phase_one(
        &self,
        api: &Api,
        descriptors: &mut Descriptors<Self::Parameter>,
    ) -> Result<PhaseOne>;
}
