//! Launches of the operators that case files call.

use ascend_spec::Violation;
use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Argument, ArgumentList};

use crate::error::Result;
use crate::operator::{EntryPoints, Phases, PreparedCall, Tensors, addressed};
use crate::ops::for_each_operator;
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

/// Defines `phases` and `launch` for the operators of a list.
macro_rules! launches {
    ($($operator:ident: $module:ident;)*) => {
        /// Returns both functions of version `number` of an operator.
        pub(super) fn phases(operator: DeclaredOperator, number: u8) -> Result<Phases> {
            use ascend_spec::ops;
            let version = operator.version(number);
            let phases = match operator {
                $(DeclaredOperator::$operator => {
                    let version = version.and_then(ops::$module::Version::of);
                    version.map(crate::ops::$module::phases_of)
                })*
                _ => None,
            };
            phases.ok_or_else(|| no_such_call().into())
        }

        /// Queues a call that the contract has accepted.
        pub(super) fn launch(
            stream: &Stream,
            arguments: &AnyArguments<AnyTensor>,
            number: u8,
        ) -> Result<()> {
            use ascend_spec::ops;
            let version = arguments.operator().version(number);
            match arguments {
                $(AnyArguments::$operator(arguments) => {
                    let version = version.and_then(ops::$module::Version::of).ok_or_else(no_such_call)?;
                    let described = arguments.map(|_, tensor| *tensor.desc());
                    launch_once(stream, &described.call(), version, arguments)
                })*
                _ => Err(no_such_call().into()),
            }
        }
    };
}

for_each_operator! { launches }

fn no_such_call() -> Violation {
    Violation::unsupported("a call of this operator from a case")
}

/// The arguments of a call as the tensors of a launch.
struct LaunchTensors<'a, A>(&'a A);

impl<A> Tensors<A::Parameter> for LaunchTensors<'_, A>
where
    A: ArgumentList<Tensor = AnyTensor>,
{
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument<A::Parameter>, &'t AnyTensor) -> Result<()>) -> Result<()> {
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
fn launch_once<C: EntryPoints>(
    stream: &Stream,
    call: &C,
    version: C::Version,
    arguments: &impl ArgumentList<Parameter = C::Parameter, Tensor = AnyTensor>,
) -> Result<()> {
    let launched = LaunchTensors(arguments);
    let tensors = addressed(&launched)?;
    let call = PreparedCall::new(stream.context(), call, version, &tensors, &[])?;
    call.check(stream, &launched)?.launch()
}
