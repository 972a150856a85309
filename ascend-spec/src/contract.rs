//! The traits by which each operator's folder describes its operator.

use crate::operator::{ArgumentList, ArgumentValues, DeclaredParameter, DeclaredVersion, ParameterInfo};
use crate::{Cann, Dims, Level, Rule, Target, TensorDesc, Violation};

/// An operator: its versions, its parameters and its rules.
pub(crate) trait DescribedOperator {
    /// Its versions.
    type Version: DeclaredVersion;
    /// Its parameters.
    type Parameter: DeclaredParameter;

    /// Its rules and lints.
    fn rules() -> impl Iterator<Item = &'static Rule> + 'static;

    /// Whether the libraries of a release export a function of this operator; `None` for functions of others.
    fn exported(function: &str, cann: Cann) -> Option<bool> {
        exported_version::<Self::Version>(function, cann)
    }
}

/// Whether the libraries of a release export a function of one of the versions `V`; `None` for a function that no
/// version has.
pub(crate) fn exported_version<V: DeclaredVersion>(function: &str, cann: Cann) -> Option<bool> {
    let mut versions = V::ALL.iter().map(|version| version.info());
    let version = versions.find(|version| version.has_function(function));
    version.map(|version| version.is_exported(cann))
}

/// The calls of an operator: how one is checked, and what follows from its arguments.
pub(crate) trait CallContract: DescribedOperator {
    /// Whether a call leaves elements of the tensors that it updates in place as they were.
    const KEEPS_ELEMENTS: bool = false;

    /// Every argument of a call.
    type Arguments: ArgumentValues<Parameter = Self::Parameter, Tensor = TensorDesc>;

    /// Returns version `number`, counted from 1.
    fn version(number: u8) -> Option<Self::Version> {
        let mut versions = Self::Version::ALL.iter().copied();
        versions.find(|version| version.info().number() == number)
    }

    /// Checks a call against the rules of a version, and reports every lint that it breaks.
    fn check(
        arguments: &Self::Arguments,
        version: Self::Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation>;

    /// Gives a call the outputs that it lacks; an output whose shape the inputs do not imply has the shape that
    /// `expected` returns.
    fn imply_outputs(arguments: &mut Self::Arguments, expected: &dyn Fn(&str) -> Option<Dims>);

    /// The first argument that is given and that a version does not have.
    fn unread(arguments: &Self::Arguments, version: Self::Version) -> Option<&'static ParameterInfo> {
        let plain = Self::Arguments::default();
        let mut newer =
            (Self::Parameter::ALL.iter().copied()).filter(|parameter| parameter.info().since > version.info().number());
        let newest = newer.find(|&parameter| {
            !arguments.tensors(parameter).is_empty() || arguments.value(parameter) != plain.value(parameter)
        });
        newest.map(DeclaredParameter::info)
    }

    /// Whether a version has every argument that is given, and computes with it.
    fn computes(arguments: &Self::Arguments, version: Self::Version) -> bool {
        Self::unread(arguments, version).is_none()
    }

    /// Of the versions from number `at_least` on that compute with every given argument and that the product has in
    /// the release, the oldest that is not deprecated. Where there is none, a version that the check refuses: the
    /// oldest that computes with them elsewhere, or the newest one.
    fn chosen_on(arguments: &Self::Arguments, at_least: u8, target: Target) -> Option<Self::Version> {
        // Two operators may have their versions in one list.
        let own = |version: &Self::Version| Self::version(version.info().number()) == Some(*version);
        let able = |version: &Self::Version| {
            own(version) && version.info().number() >= at_least && Self::computes(arguments, *version)
        };
        let mut all = Self::Version::ALL.iter().copied();
        let elsewhere = || all.clone().find(able).or_else(|| all.rfind(own));
        Self::Version::preferred_on(target).find(able).or_else(elsewhere)
    }

    /// Checks the contents of tensors that the operator reads as indices; `integers` returns the contents of an
    /// integer tensor. By default the operator reads none as indices, and this returns `Ok`.
    fn check_contents(
        _: &Self::Arguments,
        _: Self::Version,
        _: Target,
        _integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        Ok(())
    }

    /// Reports the lints on the contents of tensors that are no indices; `bytes` returns the content of a tensor,
    /// little-endian in row-major order, or nothing where it is not known. By default there is no such lint.
    fn lint_contents(
        _: &Self::Arguments,
        _: Self::Version,
        _: Target,
        _bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
        _report: &mut dyn FnMut(Violation),
    ) {
    }
}

/// The first lint that `each` reports, leaving out those in `allowed` (by id). A crash of the host process is never
/// left out.
pub(crate) fn first_lint(allowed: &[&str], each: impl FnOnce(&mut dyn FnMut(Violation))) -> Result<(), Violation> {
    let mut first = None;
    each(&mut |violation: Violation| {
        let crash = violation.rule.level == Level::HostCrash;
        if first.is_none() && (crash || !allowed.contains(&violation.rule.id)) {
            first = Some(violation);
        }
    });
    first.map_or(Ok(()), Err)
}

/// Reports every lint that a call breaks. `first` returns the first broken lint that is not in the list of allowed
/// ids.
pub fn each_lint(mut first: impl FnMut(&[&str]) -> Result<(), Violation>, report: &mut dyn FnMut(Violation)) {
    let mut allowed = Vec::new();
    while let Err(lint) = first(&allowed) {
        // A crash of the host process is returned although it is in the list.
        if allowed.contains(&lint.rule.id) {
            break;
        }
        allowed.push(lint.rule.id);
        report(lint);
    }
}

/// Declares the type that stands for an operator whose rules are one table.
macro_rules! described_by {
    ($operator:ident, $rules:expr) => {
        #[doc = concat!("`", stringify!($operator), "` in the list of operators.")]
        pub(crate) struct $operator;

        impl $crate::contract::DescribedOperator for $operator {
            type Version = Version;
            type Parameter = Parameter;

            fn rules() -> impl Iterator<Item = &'static $crate::Rule> {
                $rules.iter().copied()
            }
        }
    };
}

/// The types and `check` of a [`CallContract`] whose call has `check` and `lint` for a target or a part of one; `check`
/// also takes the version, where there is a name for it.
macro_rules! checked_for {
    ($target:ident $(.$part:ident)? $(, $version:ident)?) => {
        type Arguments = Arguments<TensorDesc>;

        fn check(
            arguments: &Self::Arguments,
            _version: Version,
            $target: $crate::Target,
            report: &mut dyn FnMut($crate::Violation),
        ) -> Result<(), $crate::Violation> {
            $(let $version = _version;)?
            let call = arguments.call();
            call.check($($version,)? $target $(.$part)?)?;
            $crate::contract::each_lint(|allowed| call.lint($target $(.$part)?, allowed), report);
            Ok(())
        }
    };
}

/// `check_contents` of a [`CallContract`] whose call has the `check` of [`checked_for!`]: what `$check` says of a call
/// that holds the rules, its problem, and the integers of a parameter.
macro_rules! contents_checked_for {
    (
        $target:ident $(.$part:ident)? $(, $version:ident)?,
        |$call:pat_param, $problem:ident, $integers:ident| $check:expr
    ) => {
        fn check_contents(
            arguments: &Self::Arguments,
            _version: Version,
            $target: $crate::Target,
            integers: &dyn Fn(&str) -> Vec<i64>,
        ) -> Result<(), $crate::Violation> {
            $(let $version = _version;)?
            let call = arguments.call();
            let Ok($problem) = call.check($($version,)? $target $(.$part)?) else {
                return Ok(());
            };
            let ($call, $integers) = (call, |parameter: Parameter| integers(parameter.name()));
            $check
        }
    };
}

pub(crate) use {checked_for, contents_checked_for, described_by};
