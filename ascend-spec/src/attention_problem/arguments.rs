//! The arguments of attention operators, which describe a problem.

use super::{AttentionProblem, TensorRole};
use crate::operator::{Argument, ArgumentList, DeclaredVersion, EntryPoint};
use crate::{Target, TensorDesc, Violation};

/// The arguments of an attention operator.
pub trait AttentionArguments: ArgumentList<Tensor = TensorDesc> {
    /// The operator's versions.
    type Version: DeclaredVersion;

    /// Checks a call of a version for a target, reports each lint that the call breaks, and returns what it computes;
    /// `None` for a call that computes nothing.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what no kernel computes.
    fn resolve(
        &self,
        version: Self::Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation>;

    /// The argument whose tensor plays a role; `None` for roles that the operator has no argument for.
    fn of_role(role: TensorRole) -> Option<Argument<Self::Parameter>>;

    /// The parameters of a version's entry point.
    fn entry_point(version: Self::Version) -> EntryPoint<Self::Parameter> {
        EntryPoint::Version(version.info().number())
    }
}
