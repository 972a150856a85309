//! Calls of the operators that case files call.

use ascend_spec::Violation;
use ascend_spec::declared::{AnyArguments, DeclaredOperator};

use crate::error::Result;
use crate::operator::{Phases, launch_once};
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
                    let call = described.call();
                    let phases = crate::ops::$module::phases_of(version);
                    // SAFETY: phase one is that of the version, and is called with pointers of the descriptors.
                    unsafe {
                        launch_once(stream, &phases, arguments, |api, descriptors| {
                            crate::ops::$module::phase_one(api, version, &call, descriptors)
                        })
                    }
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
