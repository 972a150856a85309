//! One call of an operator, prepared and launched at once.

use ascend_spec::operator::{Argument, ArgumentList};
use ascend_sys::Api;

use crate::error::Result;
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

use super::{Descriptors, Parameter, PhaseOne, Phases, PreparedCall, Tensors, addressed};

/// The arguments of a call as the tensors of a launch.
struct Given<'a, A>(&'a A);

impl<A> Tensors<A::Parameter> for Given<'_, A>
where
    A: ArgumentList<Tensor = AnyTensor>,
{
    fn each<'t>(
        &'t self,
        mut visit: impl FnMut(Argument<A::Parameter>, &'t AnyTensor) -> Result<()>,
    ) -> Result<()> {
        for outputs in [true, false] {
            for (argument, tensor) in self.0.each_tensor() {
                if argument.is_output() == outputs {
                    visit(argument, tensor)?;
                }
            }
        }
        Ok(())
    }
}

/// Queues one call that the contract has accepted.
///
/// # Safety
/// `phase_one` calls the operator's function of that name with pointers of the descriptors, and returns the
/// executor that this function makes, or null.
pub(crate) unsafe fn launch_once<A>(
    stream: &Stream,
    phases: &Phases,
    arguments: &A,
    phase_one: impl FnOnce(&Api, &mut Descriptors<A::Parameter>) -> Result<PhaseOne>,
) -> Result<()>
where
    A: ArgumentList<Tensor = AnyTensor>,
    A::Parameter: Parameter,
{
    let given = Given(arguments);
    let tensors = addressed(&given)?;
    // SAFETY: the caller of this function promises the same of phase one.
    let call = unsafe { PreparedCall::new(stream.context(), phases, &tensors, &[], phase_one) }?;
    call.check(stream, &given)?.launch()
}
