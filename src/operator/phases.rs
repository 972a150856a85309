//! The two functions of an operator: phase one prepares a call, phase two queues it.

use std::ffi::c_void;
use std::sync::Arc;

use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::{ArgumentList, DeclaredParameter, DeclaredVersion};
use ascend_spec::{OperatorVersion, TensorDesc};
use ascend_sys::bindings::{self as sys, aclOpExecutor};
use ascend_sys::{Api, Library, MissingSymbol};

use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::tensor::AnyTensor;

use super::{Descriptors, Parameter, Tensors};

/// The function of phase two, alike for all operators.
pub(super) type PhaseTwo =
    unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, sys::aclrtStream) -> sys::aclnnStatus;

/// What phase one returns.
pub(crate) struct PhaseOne {
    pub(crate) workspace_bytes: u64,
    pub(crate) executor: *mut aclOpExecutor,
}

/// Both functions of an operator, or of one of its versions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phases {
    /// Name of phase two.
    pub(crate) name: &'static str,
    pub(crate) one: fn(&Api) -> Result<(), MissingSymbol>,
    pub(crate) two: fn(&Api) -> Result<PhaseTwo, MissingSymbol>,
}

/// A call of an operator that functions of CANN compute. From [`entry_points!`].
///
/// # Safety
/// `phase_one` calls the function of that name in the version's [`Phases`] with pointers of the descriptors, and
/// returns the executor that this function makes, or null.
pub(crate) unsafe trait EntryPoints: ArgumentList<Parameter: Parameter, Tensor = TensorDesc> {
    /// The versions of the operator.
    type Version: DeclaredVersion;

    /// Both functions of a version.
    fn phases(version: Self::Version) -> Phases;

    /// Phase one with the arguments that a version has. The device must be bound.
    fn phase_one(
        &self,
        api: &Api,
        version: Self::Version,
        descriptors: &mut Descriptors<Self::Parameter>,
    ) -> Result<PhaseOne>;

    /// The field that has the description of a tensor; `None` for lists, which a call borrows.
    fn single_mut(&mut self, parameter: Self::Parameter) -> Option<&mut Option<TensorDesc>>;

    /// The call as case files have it.
    fn recorded(&self) -> AnyArguments<TensorDesc>;

    /// Describes these tensors in the call, all but lists.
    fn describe(&mut self, tensors: &impl Tensors<Self::Parameter>) {
        // Describing does not fail.
        let _ = tensors.each(|argument, tensor| {
            if let Some(desc) = self.single_mut(argument.parameter) {
                *desc = Some(*tensor.desc());
            }
            Ok(())
        });
    }

    /// Refuses a device whose CANN lacks a version, and inputs of a call that are on another device. `instead` is the
    /// advice for the former.
    fn check_device<'a>(
        version: Self::Version,
        context: &Arc<Context>,
        instead: &'static str,
        inputs: impl IntoIterator<Item = (Self::Parameter, &'a AnyTensor)>,
    ) -> Result<()> {
        Self::phases(version).required(context.runtime().api(), version.info(), instead)?;
        let mut inputs = inputs.into_iter();
        inputs.try_for_each(|(parameter, input)| input.on(parameter.info().name, context))
    }

    /// Finds the first of the versions that are `able` to express a call, oldest first, that is installed. The error
    /// names the version `needed`, and `why` a call needs it, in brackets.
    fn installed(
        api: &Api,
        able: impl IntoIterator<Item = Self::Version>,
        needed: Self::Version,
        why: &'static str,
    ) -> Result<Self::Version> {
        let mut able = able.into_iter();
        able.find(|&version| Self::phases(version).are_installed(api)).ok_or_else(|| Error::OperatorVersion {
            needed: needed.info().symbol(),
            why,
            library: Library::Opapi.file_name(),
            since: needed.info().since_cann(),
        })
    }
}

/// Calls a phase one with the arguments of a call, as a declaration of the operator lists them.
macro_rules! phase_one {
    (
        { $api:ident.$function:ident, $parameter:ident, $call:ident, $descriptors:ident }
        $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*
    ) => {{
        $descriptors.number(ascend_spec::operator::EntryPoint::Own(&[$($parameter::$variant),*]));
        $(let $field = $crate::operator::argument!($kind $field, $parameter::$variant, $call, $descriptors);)*
        let (mut workspace_bytes, mut executor) = (0, std::ptr::null_mut());
        // SAFETY: every argument is null where the operator allows that, or a live object of the descriptors, which
        // live as long as the executor; the last two are places for the results; the contract has accepted the call.
        unsafe {
            $crate::error::aclnn!($api, $function($($field,)* &mut workspace_bytes, &mut executor))
        }?;
        Ok($crate::operator::PhaseOne {
            workspace_bytes,
            executor,
        })
    }};
}

pub(crate) use phase_one;

/// Makes `phases_of`, [`EntryPoints`] and [`Parameter`] of an operator: the table of its arguments, its call, and its
/// variant of [`AnyArguments`], or a function that chooses one; a line a version, which names its number in the
/// declaration of the arguments, and both functions; then, in braces, the methods of [`Parameter`] that the operator has
/// of its own. `Parameter`, `Version` and [`phase_one`] are those in scope.
macro_rules! entry_points {
    (
        $arguments:ident, $call:ty, $recorded:path;
        $($version:pat => $number:tt: $one:ident, $two:ident;)*
        $({ $($method:item)* })?
    ) => {
        impl $crate::operator::Parameter for Parameter {
            $($($method)*)?
        }

        /// Both functions of a version.
        pub(crate) fn phases_of(version: Version) -> $crate::operator::Phases {
            match version {
                $($version => $crate::operator::Phases {
                    name: stringify!($two),
                    one: |api| api.$one().map(drop),
                    two: |api| api.$two(),
                },)*
            }
        }

        // SAFETY: each line names both functions of its version; `phase_one` passes what the descriptors hold.
        unsafe impl $crate::operator::EntryPoints for $call {
            type Version = Version;

            fn phases(version: Version) -> $crate::operator::Phases {
                phases_of(version)
            }

            fn phase_one(
                &self,
                api: &ascend_sys::Api,
                version: Version,
                descriptors: &mut $crate::operator::Descriptors<Parameter>,
            ) -> $crate::error::Result<$crate::operator::PhaseOne> {
                let call = self;
                match version {
                    $($version => $arguments! {
                        ascend_spec::arguments_of_version {
                            $number phase_one { api.$one, Parameter, call, descriptors }
                        }
                    },)*
                }
            }

            fn single_mut(&mut self, parameter: Parameter) -> Option<&mut Option<ascend_spec::TensorDesc>> {
                self.single_mut(parameter)
            }

            fn recorded(&self) -> ascend_spec::declared::AnyArguments<ascend_spec::TensorDesc> {
                use ascend_spec::declared::AnyArguments;
                let arguments: AnyArguments<_> = $recorded(self.to_arguments());
                arguments
            }
        }
    };
}

pub(crate) use entry_points;

/// Converts one argument to what the C function takes.
macro_rules! argument {
    (list $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $descriptors.list($parameter::$variant)
    };
    (ints $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $descriptors.ints($call.$field)?
    };
    (int_list $($rest:tt)*) => { $crate::operator::argument!(ints $($rest)*) };
    (int $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $call.$field
    };
    (int8 $($rest:tt)*) => { $crate::operator::argument!(int $($rest)*) };
    (float $($rest:tt)*) => { $crate::operator::argument!(int $($rest)*) };
    (float32 $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $call.$field as f32
    };
    (flag $($rest:tt)*) => { $crate::operator::argument!(int $($rest)*) };
    (text $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $descriptors.text(stringify!($field), Some($call.$field))?
    };
    (optional_text $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $descriptors.text(stringify!($field), $call.$field)?
    };
    ($tensor:ident $field:ident, $parameter:ident::$variant:ident, $call:ident, $descriptors:ident) => {
        $descriptors.tensor($parameter::$variant)
    };
}

pub(crate) use argument;

impl Phases {
    /// Whether both functions are installed.
    pub(crate) fn are_installed(&self, api: &Api) -> bool {
        (self.one)(api).is_ok() && (self.two)(api).is_ok()
    }

    /// Refuses a CANN that lacks the operator; `instead` is the error's advice.
    pub(crate) fn required(&self, api: &Api, operator: OperatorVersion, instead: &'static str) -> Result<()> {
        if self.are_installed(api) {
            return Ok(());
        }
        Err(Error::MissingOperator {
            operator: operator.symbol(),
            library: Library::Opapi.file_name(),
            since: operator.since_cann(),
            instead,
        })
    }
}

#[cfg(test)]
mod tests {
    use ascend_spec::ops::scatter_pa_kv_cache::Version;
    use ascend_sys::Functions;

    use super::*;

    #[test]
    fn an_operator_that_is_not_installed_is_named_with_its_release() {
        let phases = Phases {
            name: "aclnnScatterPaKvCache",
            one: |api| api.aclnnScatterPaKvCacheGetWorkspaceSize().map(drop),
            two: |api| api.aclnnScatterPaKvCache(),
        };
        let old = Api::from_functions(Functions::default(), "CANN 8.1");
        let required = phases.required(&old, Version::V1.info(), "do without");
        let missing = required.unwrap_err();
        assert!(matches!(missing, Error::MissingOperator { operator: "aclnnScatterPaKvCache", .. }));
        assert_eq!(
            missing.to_string(),
            "libopapi.so does not export aclnnScatterPaKvCache: it comes with CANN after 8.1; install a newer release, \
             or do without"
        );
    }
}
