//! What a rule allows: a value that tests an argument and says in words which values it admits, so that a refusal
//! cannot say what the test does not.

use crate::operator::{ArgumentList, ArgumentValues, DeclaredParameter, Fix, OperatorVersion, Value, written};
use crate::rule::{Rule, Violation, broken};
use crate::{DType, Dims, Format, Target, TensorDesc};
use std::fmt::{self, Display};
use std::ops::{RangeFrom, RangeInclusive, RangeToInclusive, Rem};

/// Receives the lints that are found.
pub(crate) type Report<'r> = &'r mut dyn FnMut(Violation);

/// The verdict of a check.
pub(crate) type Checked = Result<(), Violation>;

/// The values of type `T` that hold a rule. A value of `T` itself admits what equals it, an array or a slice each of
/// its elements, a range what it contains.
pub(crate) trait Allowed<T> {
    fn admits(&self, value: &T) -> bool;
    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

impl<T: PartialEq + Display> Allowed<T> for T {
    fn admits(&self, value: &T) -> bool {
        value == self
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt(f)
    }
}

impl<T: PartialEq + Display> Allowed<T> for &[T] {
    fn admits(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (index, value) in self.iter().enumerate() {
            write!(f, "{}{value}", between(index, self.len()))?;
        }
        Ok(())
    }
}

impl<T: PartialEq + Display, const N: usize> Allowed<T> for [T; N] {
    fn admits(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().name(f)
    }
}

impl<T: PartialOrd + Display> Allowed<T> for RangeInclusive<T> {
    fn admits(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.start(), self.end())
    }
}

impl<T: PartialOrd + Display> Allowed<T> for RangeFrom<T> {
    fn admits(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} or more", self.start)
    }
}

impl<T: PartialOrd + Display> Allowed<T> for RangeToInclusive<T> {
    fn admits(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {}", self.end)
    }
}

/// The positive multiples of a step up to a bound.
pub(crate) struct Multiples(pub(crate) i64, pub(crate) RangeToInclusive<i64>);

impl Allowed<i64> for Multiples {
    fn admits(&self, value: &i64) -> bool {
        *value > 0 && value % self.0 == 0 && self.1.contains(value)
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "multiples of {} up to {}", self.0, self.1.end)
    }
}

/// The multiples of a positive number.
pub(crate) struct MultiplesOf<T>(pub(crate) T);

impl<T: Rem<Output = T> + Default + PartialEq + Copy + Display> Allowed<T> for MultiplesOf<T> {
    fn admits(&self, value: &T) -> bool {
        *value % self.0 == T::default()
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "multiples of {}", self.0)
    }
}

/// The positive divisors of a number.
pub(crate) struct DivisorsOf(pub(crate) i64);

impl Allowed<i64> for DivisorsOf {
    fn admits(&self, value: &i64) -> bool {
        *value > 0 && self.0 % value == 0
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "divisors of {}", self.0)
    }
}

/// The shapes of a number of axes.
pub(crate) struct Rank(pub(crate) usize);

impl Allowed<Dims> for Rank {
    fn admits(&self, shape: &Dims) -> bool {
        shape.rank() == self.0
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} axes", self.0)
    }
}

/// An axis of an allowed shape: of one size, of a size from a number on, of one size or of 1, or of any size.
#[derive(Clone, Copy)]
pub(crate) enum Axis {
    Of(i64),
    From(i64),
    OneOr(i64),
    Any,
}

impl Axis {
    fn admits(self, size: i64) -> bool {
        match self {
            Axis::Of(own) => size == own,
            Axis::From(least) => size >= least,
            Axis::OneOr(own) => size == 1 || size == own,
            Axis::Any => true,
        }
    }
}

/// The shapes whose axes are those of one of the lists.
pub(crate) struct Shapes<'a>(pub(crate) &'a [&'a [Axis]]);

impl Allowed<Dims> for Shapes<'_> {
    fn admits(&self, shape: &Dims) -> bool {
        self.0.iter().any(|axes| {
            let mut pairs = axes.iter().zip(shape.iter());
            axes.len() == shape.rank() && pairs.all(|(axis, size)| axis.admits(*size))
        })
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, axes) in self.0.iter().enumerate() {
            f.write_str(between(index, self.0.len()))?;
            f.write_str("[")?;
            for (index, axis) in axes.iter().enumerate() {
                f.write_str(if index > 0 { ", " } else { "" })?;
                match axis {
                    Axis::Of(size) | Axis::OneOr(size @ 1) => write!(f, "{size}")?,
                    Axis::From(least) => write!(f, "{least} or more")?,
                    Axis::OneOr(size) => write!(f, "1 or {size}")?,
                    Axis::Any => f.write_str("any")?,
                }
            }
            f.write_str("]")?;
        }
        Ok(())
    }
}

/// What stands before an element of a list of allowed values.
fn between(index: usize, len: usize) -> &'static str {
    match index {
        0 => "",
        last if last + 1 == len => " or ",
        _ => ", ",
    }
}

/// Checks that a tensor, if it is given, has a shape, by the rule of the number of axes and then by that of their
/// sizes.
pub(crate) fn has_shape(
    [rank, sizes]: [&'static Rule; 2],
    name: &str,
    desc: Option<&TensorDesc>,
    shape: &[i64],
) -> Checked {
    let (Some(desc), Some(wanted)) = (desc, Dims::new(shape)) else {
        return Ok(());
    };
    rank.takes(Named(name, desc.shape), Rank(shape.len()))?;
    sizes.takes(Named(name, desc.shape), wanted)
}

/// The formats that store elements in the order of the described axes.
pub(crate) struct PlainFormat;

impl Allowed<Format> for PlainFormat {
    fn admits(&self, format: &Format) -> bool {
        format.is_plain()
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Format::PLAIN)
    }
}

/// Tensors whose elements can be counted and addressed from the base address on.
pub(crate) struct Addressable;

impl Allowed<TensorDesc> for Addressable {
    fn admits(&self, desc: &TensorDesc) -> bool {
        desc.is_countable() && desc.byte_range().is_some()
    }

    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("dimensions of at least 0, and bytes from the base address on")
    }
}

/// What a rule looks at: a value, which a refusal shows.
pub(crate) trait Subject {
    type Value;
    fn value(&self) -> &Self::Value;
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

impl<T: Display> Subject for T {
    type Value = T;

    fn value(&self) -> &T {
        self
    }

    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt(f)
    }
}

/// A value behind the name of the argument that has it.
pub(crate) struct Named<N, T>(pub(crate) N, pub(crate) T);

impl<N: Display, T: Display> Subject for Named<N, T> {
    type Value = T;

    fn value(&self) -> &T {
        &self.1
    }

    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// A value and what it belongs to.
pub(crate) struct Noted<T, N>(pub(crate) T, pub(crate) N);

impl<T: Display, N: Display> Subject for Noted<T, N> {
    type Value = T;

    fn value(&self) -> &T {
        &self.0
    }

    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// A value that a refusal shows in other words.
pub(crate) struct Shown<W, T>(pub(crate) W, pub(crate) T);

impl<W: Display, T> Subject for Shown<W, T> {
    type Value = T;

    fn value(&self) -> &T {
        &self.1
    }

    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Displays what a function writes.
struct Written<F>(F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> Display for Written<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

impl Rule {
    /// Checks that `allowed` admits the subject. The fix of a refusal is the rule's own.
    #[inline]
    pub(crate) fn takes<S: Subject>(&'static self, subject: S, allowed: impl Allowed<S::Value>) -> Checked {
        match allowed.admits(subject.value()) {
            true => Ok(()),
            false => Err(broken(
                self,
                Written(|f: &mut fmt::Formatter<'_>| subject.show(f)),
                Written(|f: &mut fmt::Formatter<'_>| allowed.name(f)),
                self.fix,
            )),
        }
    }

    /// As [`Rule::takes`], where the rule holds for the target.
    #[inline]
    pub(crate) fn takes_on<S: Subject>(
        &'static self,
        target: Target,
        subject: S,
        allowed: impl Allowed<S::Value>,
    ) -> Checked {
        match self.scope.holds(target) {
            true => self.takes(subject, allowed),
            false => Ok(()),
        }
    }

    /// Returns a required argument, or refuses a call without it.
    pub(crate) fn requires<T>(&'static self, argument: Option<T>, name: &str) -> Result<T, Violation> {
        argument.ok_or_else(|| {
            let all = self.holds.trim_end_matches(" are given");
            broken(self, format_args!("no {name}"), all, format_args!("pass {name}"))
        })
    }

    /// Checks that the product has a version of the operator in the release.
    pub(crate) fn runs(&'static self, version: OperatorVersion, target: Target) -> Checked {
        match version.runs_on(target) {
            true => Ok(()),
            false => Err(self.broken(target, version.products())),
        }
    }

    /// Checks the dtypes of a call's tensors, of those for whose parameters `allowed` has one.
    pub(crate) fn dtypes<C: ArgumentList<Tensor = TensorDesc>>(
        &'static self,
        call: &C,
        allowed: impl Fn(C::Parameter) -> Option<DType>,
    ) -> Checked {
        call.each_tensor().try_for_each(|(argument, desc)| match allowed(argument.parameter) {
            Some(dtype) => self.takes(Named(argument.acl_name(), desc.dtype), dtype),
            None => Ok(()),
        })
    }

    /// Checks the format of every tensor of a call, then that its bytes can be addressed.
    pub(crate) fn formats<C: ArgumentList<Tensor = TensorDesc>>(&'static self, call: &C) -> Checked {
        self.plain(call)?;
        self.addressable(call)
    }

    /// Checks the format of every tensor of a call.
    pub(crate) fn plain<C: ArgumentList<Tensor = TensorDesc>>(&'static self, call: &C) -> Checked {
        call.each_tensor().try_for_each(|(argument, desc)| {
            let name = argument.acl_name();
            self.takes(Named(format_args!("{name} in format"), desc.format), PlainFormat)
        })
    }

    /// Checks that the bytes of every tensor of a call can be addressed.
    pub(crate) fn addressable<C: ArgumentList<Tensor = TensorDesc>>(&'static self, call: &C) -> Checked {
        let mut tensors = call.each_tensor();
        tensors.try_for_each(|(argument, desc)| self.takes(Named(argument.acl_name(), *desc), Addressable))
    }

    /// Checks that none of the arguments is given, each of which stands with its name.
    #[inline]
    pub(crate) fn forbids<const N: usize>(&'static self, arguments: [(&str, bool); N]) -> Checked {
        match arguments.iter().any(|(_, given)| *given) {
            true => Err(forbidden(self, &arguments)),
            false => Ok(()),
        }
    }

    /// Checks that a call gives none of the parameters. An attribute of 0 or false is not given.
    #[inline]
    pub(crate) fn leaves_out<C: ArgumentValues>(&'static self, call: &C, parameters: &[C::Parameter]) -> Checked {
        match parameters.iter().any(|&parameter| gives(call, parameter)) {
            true => {
                let named = |&parameter: &C::Parameter| (parameter.info().acl_name, gives(call, parameter));
                let arguments: Vec<_> = parameters.iter().map(named).collect();
                Err(forbidden(self, &arguments))
            }
            false => Ok(()),
        }
    }

    /// Checks that a call gives both parameters or neither.
    #[inline]
    pub(crate) fn pairs<C: ArgumentValues>(&'static self, call: &C, pair: [C::Parameter; 2]) -> Checked {
        match pair.map(|parameter| gives(call, parameter)) {
            [true, false] => Err(broken(self, pair[0].info().acl_name, "both or neither", self.fix)),
            [false, true] => Err(broken(self, pair[1].info().acl_name, "both or neither", self.fix)),
            _ => Ok(()),
        }
    }
}

/// Whether a call gives a parameter. An attribute of 0 or false is not given.
fn gives<C: ArgumentValues>(call: &C, parameter: C::Parameter) -> bool {
    let value =
        matches!(call.value(parameter), Some(Value::Int(1.. | ..=-1) | Value::Flag(true) | Value::Ints(Some(_))));
    value || !call.tensors(parameter).is_empty()
}

/// The refusal of the arguments that are given and may not be.
#[cold]
fn forbidden(rule: &'static Rule, arguments: &[(&str, bool)]) -> Violation {
    let names = |arguments: &mut dyn Iterator<Item = &(&str, bool)>| {
        let names: Vec<_> = arguments.map(|(name, _)| *name).collect();
        names.join(", ")
    };
    let given = names(&mut arguments.iter().filter(|(_, given)| *given));
    match arguments {
        [_] => broken(rule, given, "none", rule.fix),
        all => broken(rule, given, format_args!("none of {}", names(&mut all.iter())), rule.fix),
    }
}

/// What is done with the verdict of a check.
pub(crate) trait Outcome {
    /// Replaces the fix of a refusal.
    fn fix<F: Fix>(self, fix: impl FnOnce() -> F) -> Self;
    /// Reports a refusal, which is that of a lint.
    fn report(self, report: Report<'_>);
}

impl Outcome for Checked {
    #[inline]
    fn fix<F: Fix>(self, fix: impl FnOnce() -> F) -> Self {
        self.map_err(|mut violation| {
            (violation.changes, violation.fix) = written(fix());
            violation
        })
    }

    #[inline]
    fn report(self, report: Report<'_>) {
        if let Err(violation) = self {
            report(violation);
        }
    }
}
