//! What an operator that is one path of FusedInferAttentionScore says of itself, and the rules that each such one has.

/// Makes an operator that is one path of FusedInferAttentionScore, in a module that has its arguments, its versions
/// and its `rules`: which of its parameters stand for those of FusedInferAttentionScore (the `same` ones have the
/// same name), how a call is checked, and what follows from its arguments.
macro_rules! path_operator {
    (
        $(#[$meta:meta])*
        $operator:ident, $call:ident: $checker:ident, $path:ident, $registered:ident, $default_layout:literal;
        same { $($same:ident)* }
        renamed { $($fused:ident = $own:ident,)* }
        $($own_method:item)*
    ) => {
        $(#[$meta])*
        pub(crate) struct $operator;

        impl $crate::ops::inference_attention::PathCall for $call<'_> {
            type Version = Version;

            const CHECKER: $crate::ops::fused_infer_attention_score::Checker =
                $crate::ops::fused_infer_attention_score::Checker::$checker;
            const RULES: $crate::ops::inference_attention::PathRules = $crate::ops::inference_attention::PathRules {
                successor: &rules::SUCCESSOR,
                product: &rules::PRODUCT,
                required: &rules::REQUIRED,
                pse_dropped: &rules::PSE_DROPPED,
                deprecated: &rules::DEPRECATED,
                path: &rules::$path,
                registered: &rules::$registered,
            };
            const DEFAULT_LAYOUT: &'static str = $default_layout;

            fn of_fused(
                parameter: $crate::ops::fused_infer_attention_score::Parameter,
            ) -> Option<Parameter> {
                use $crate::ops::fused_infer_attention_score::Parameter as Fused;
                Some(match parameter {
                    $(Fused::$same => Parameter::$same,)*
                    $(Fused::$fused => Parameter::$own,)*
                    _ => return None,
                })
            }

            fn computed_by(&self, version: Version) -> Self {
                self.keeping(|parameter| Self::computes(version, parameter))
            }

            fn verdict(
                &self,
                target: $crate::Target,
            ) -> Result<Option<$crate::ops::fused_infer_attention_score::Verdict>, $crate::Violation> {
                self.path_verdict(target)
            }

            fn check_card(
                &self,
                problem: &$crate::attention_problem::AttentionProblem<'_>,
            ) -> Result<(), $crate::Violation> {
                self.card(problem)
            }

            $($own_method)*
        }

        impl<'a> $call<'a> {
            /// A call without tensors whose attributes have the operator's defaults.
            pub fn new(input_layout: &'a str) -> Self {
                $call {
                    input_layout: Some(input_layout),
                    ..$call::default()
                }
            }

            /// This call as a call of FusedInferAttentionScore that computes the same attention.
            pub fn as_fused(&self) -> $crate::ops::fused_infer_attention_score::FiaCall<'_> {
                $crate::ops::inference_attention::PathCall::as_fused(self)
            }

            /// Checks the call against the contract of `version` for `target`.
            ///
            /// Allocates nothing unless it refuses.
            ///
            /// # Errors
            /// [`Violation`]($crate::Violation) by the first broken rule, or
            /// [`UNSUPPORTED`]($crate::UNSUPPORTED) for what this crate does not compute.
            pub fn check(&self, version: Version, target: $crate::Target) -> Result<(), $crate::Violation> {
                $crate::ops::inference_attention::PathCall::resolve(self, version, target, |_| ())
            }

            /// Checks a call that holds every rule for lints, and returns the first that it breaks, leaving out those
            /// in `allowed` (by id): those of the operator, then those of its path of FusedInferAttentionScore.
            ///
            /// # Errors
            /// The broken lint, with the same fields as a broken rule.
            pub fn lint(&self, version: Version, allowed: &[&str]) -> Result<(), $crate::Violation> {
                $crate::ops::inference_attention::PathCall::first_lint(self, version, allowed)
            }

            /// Bounds of the block table and of the left padding, if the call has one.
            ///
            /// # Errors
            #[doc = concat!("As for [`", stringify!($call), "::check`].")]
            pub fn content_bounds(
                &self,
                version: Version,
            ) -> Result<Option<$crate::ops::fused_infer_attention_score::ContentBounds>, $crate::Violation> {
                $crate::ops::inference_attention::PathCall::bounds(self, version)
            }
        }

        impl $crate::attention_problem::AttentionArguments for Arguments<$crate::TensorDesc> {
            type Version = Version;

            fn resolve(
                &self,
                version: Version,
                target: $crate::Target,
                report: &mut dyn FnMut($crate::Violation),
            ) -> Result<Option<$crate::attention_problem::AttentionProblem<'static>>, $crate::Violation> {
                use $crate::ops::inference_attention::PathCall as _;
                self.call().resolve_and_report(version, target, report)
            }

            fn of_role(role: $crate::attention_problem::TensorRole) -> Option<Argument> {
                <$call<'_> as $crate::ops::inference_attention::PathCall>::of_role(role)
            }
        }

        impl $crate::contract::DescribedOperator for $operator {
            type Version = Version;
            type Parameter = Parameter;

            fn rules() -> impl Iterator<Item = &'static $crate::Rule> {
                rules::RULES.iter().copied()
            }
        }

        impl $crate::contract::CallContract for $operator {
            type Arguments = Arguments<$crate::TensorDesc>;

            fn check(
                arguments: &Self::Arguments,
                version: Version,
                target: $crate::Target,
                report: &mut dyn FnMut($crate::Violation),
            ) -> Result<(), $crate::Violation> {
                $crate::attention_problem::AttentionArguments::resolve(arguments, version, target, report).map(drop)
            }

            fn computes(arguments: &Self::Arguments, version: Version) -> bool {
                use $crate::ops::inference_attention::PathCall as _;
                let call = arguments.call();
                call.given().all(|parameter| $call::computes(version, parameter))
            }

            fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<$crate::Dims>) {
                let implied = arguments.call().as_fused().implied_outputs().0;
                arguments.attention_out = arguments.attention_out.or(implied);
            }

            fn check_contents(
                arguments: &Self::Arguments,
                version: Version,
                _: $crate::Target,
                integers: &dyn Fn(&str) -> Vec<i64>,
            ) -> Result<(), $crate::Violation> {
                $crate::ops::inference_attention::PathCall::admit_contents(&arguments.call(), version, integers)
            }

            fn lint_contents(
                arguments: &Self::Arguments,
                version: Version,
                target: $crate::Target,
                bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
                report: &mut dyn FnMut($crate::Violation),
            ) {
                use $crate::attention_problem::{as_held, lint_bias};
                let held = arguments.map(as_held::<Self::Arguments>);
                let lints = $crate::ops::fused_infer_attention_score::BIAS;
                lint_bias(&held, (version, target), lints, bytes, report);
            }
        }
    };
}

pub(crate) use path_operator;

/// Declares the rules of an operator that is one path of FusedInferAttentionScore: those that each such operator has,
/// and its own between them, in the form of [`rules!`](crate::rule::rules). `$id` begins each id; versions before
/// `$newest` are `$older`.
macro_rules! path_rules {
    (
        $id:literal, $operator:literal, newest $newest:literal, older $older:literal, required $required:literal;
        $($own:tt)*
    ) => {
        $crate::rule::rules! {
            in Scope::ALL;
            SUCCESSOR = $id ".successor", RUNTIME_ERROR, V1,
                $operator " entry points, Ascend 950" in Scope::ASCEND_950,
                "Ascend 950 computes attention by FusedInferAttentionScore",
                "call aclnnFusedInferAttentionScoreV5";
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products",
                "the product has the operator",
                "run on Atlas A2, Atlas A3 or the Atlas inference series (310P)";
            REQUIRED = $id ".required", PARAM_NULLPTR, V1, $operator " documentation, return values",
                $required " are given",
                "pass every required argument";
            $($own)*
            PSE_DROPPED = $id ".pse_dropped", Lint("the tensor is not looked at"), V1, $operator ", V1 and V2",
                "V1 and V2 come without pseShift: they take it and compute without it",
                "call aclnn" $operator $newest;
            DEPRECATED = $id ".deprecated", Lint("nothing changes yet"), V1, $operator " documentation, deprecation",
                "calls go to " $newest ": " $older " are announced to go in December 2026",
                "call aclnn" $operator $newest;
        }
    };
}

pub(crate) use path_rules;
