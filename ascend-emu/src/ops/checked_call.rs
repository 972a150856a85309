//! What operators share that a call and its problem describe: the check of the call, and what follows from both.

/// A call of an operator that satisfies every rule. Its call has `check` and `lint` for a target or a part of one;
/// `check` also takes the version, where there is a name for it.
macro_rules! checked_call {
    ($operator:ident: $problem:ident, $target:ident $(.$part:ident)? $(, $version:ident)?) => {
        /// A call that satisfies every rule.
        #[derive(Debug)]
        struct $operator {
            arguments: Arguments<TensorDesc>,
            $($version: Version,)?
            problem: $problem,
            /// How strictly misuse that is found on the device is treated.
            check: $crate::config::Check,
        }

        impl $operator {
            /// Checks a call.
            fn new(
                arguments: &Arguments<$crate::descriptor::DescribedTensor>,
                $($version: Version,)?
            ) -> $crate::status::Outcome<Self> {
                let arguments = arguments.map(|_, tensor| tensor.desc);
                let (call, $target) = (arguments.call(), $crate::runtime::context::machine().target);
                let problem = call.check($($version,)? $target $(.$part)?)?;
                let op = $operator { $($version,)? problem, check: $crate::config::check(), arguments };
                $crate::lints::report_first(op.symbol(), &op.arguments, |allowed| {
                    op.arguments.call().lint($target $(.$part)?, allowed)
                })?;
                Ok(op)
            }
        }
    };
}

/// What a `DeclaredOperator` says by its arguments and its problem: one with one version, `with overruns` where the
/// problem says whether the device may leave the tensors, or `of a version` with several.
macro_rules! declared_by_problem {
    (with overruns) => {
        declared_by_problem! {}

        fn overruns(&self) -> bool {
            self.problem.overruns
        }
    };
    () => {
        fn symbol(&self) -> &'static str {
            Version::V1.symbol()
        }

        declared_by_problem! { of any }
    };
    (of a version) => {
        fn symbol(&self) -> &'static str {
            self.version.symbol()
        }

        fn version(&self) -> u8 {
            self.version.number()
        }

        declared_by_problem! { of any }
    };
    (of any) => {
        type Arguments = Arguments<TensorDesc>;

        fn arguments(&self) -> &Self::Arguments {
            &self.arguments
        }

        fn check(&self) -> $crate::config::Check {
            self.check
        }

        fn is_idle(&self) -> bool {
            self.problem.is_idle()
        }

        fn touches(&self, visit: &mut dyn FnMut(Argument, std::ops::Range<u64>)) {
            let call = self.arguments.call();
            (self.problem).touches(&call, &mut |parameter, range| visit(parameter.into(), range));
        }
    };
}

pub(super) use {checked_call, declared_by_problem};
