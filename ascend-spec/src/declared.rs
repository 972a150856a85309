//! Every declared operator in one list, and a type for a call of any of them.
//!
//! Code that works on calls of any operator, such as case files, uses this list and names no operator.

use crate::contract::{CallContract, DescribedOperator};
use crate::operator::{Change, OwnedValue, ParameterInfo, Value, WrongKind};
use crate::ops::for_each_operator;
use crate::{Cann, Dims, OperatorVersion, Rule, Target, TensorDesc, Violation};
use std::fmt;

/// Makes [`DeclaredOperator`] and [`AnyArguments`] from the list of operators.
macro_rules! declared_operators {
    (
        $($variant:ident: $module:ident, $name:literal, $page:expr;)*
    ) => {
        /// An operator whose arguments are declared.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum DeclaredOperator {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl DeclaredOperator {
            /// Every operator.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The operator's name in case files.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The page of the book that has its arguments, without a suffix; `None` for the operator that
            /// most of the book is about.
            pub const fn page(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => $page,)*
                }
            }

            /// Whether a call leaves elements of the tensors that it updates in place as they were, so that what they
            /// hold afterwards depends on what they held before.
            pub const fn keeps_elements(self) -> bool {
                match self {
                    $(Self::$variant => crate::ops::$module::$variant::KEEPS_ELEMENTS,)*
                }
            }

            /// Version `number` of the operator, counted from 1.
            pub fn version(self, number: u8) -> Option<OperatorVersion> {
                match self {
                    $(Self::$variant => crate::ops::$module::$variant::version(number).map(|version| version.info()),)*
                }
            }

            /// The operator's rules and lints.
            pub(crate) fn rules(self) -> Box<dyn Iterator<Item = &'static Rule>> {
                match self {
                    $(Self::$variant => Box::new(crate::ops::$module::$variant::rules()),)*
                }
            }

            /// Whether the libraries of a release export a function of the operator; `None` for functions of others.
            pub(crate) fn exported(self, function: &str, cann: Cann) -> Option<bool> {
                match self {
                    $(Self::$variant => crate::ops::$module::$variant::exported(function, cann),)*
                }
            }

            /// Parameter `number` of the operator, counted from 0 in the operator's order.
            pub fn parameter(self, number: usize) -> Option<&'static ParameterInfo> {
                match self {
                    $(Self::$variant => {
                        let parameter = crate::ops::$module::Parameter::ALL.get(number);
                        parameter.map(|parameter| parameter.info())
                    })*
                }
            }
        }

        /// Every argument of a call of a declared operator; `T` stands for a tensor.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum AnyArguments<T> {
            $(#[doc = concat!("Of `", $name, "`.")] $variant(crate::ops::$module::Arguments<T>),)*
        }

        impl<T> AnyArguments<T> {
            /// A call without tensors, with the operator's defaults.
            pub fn new(operator: DeclaredOperator) -> Self {
                match operator {
                    $(DeclaredOperator::$variant => Self::$variant(Default::default()),)*
                }
            }

            /// The operator.
            pub fn operator(&self) -> DeclaredOperator {
                match self {
                    $(Self::$variant(_) => DeclaredOperator::$variant,)*
                }
            }

            /// The tensors that are given to the parameter of this name: none or one, or those of a list.
            pub fn tensors(&self, name: &str) -> &[T] {
                match self {
                    $(Self::$variant(arguments) => {
                        let parameter = crate::ops::$module::Parameter::from_name(name);
                        parameter.map_or(&[], |parameter| arguments.tensors(parameter))
                    })*
                }
            }

            /// Gives a tensor to the parameter of this name, as the operator's own arguments do.
            ///
            /// # Errors
            /// An error for a name of no tensor parameter. Nothing is changed.
            pub fn set_tensor(&mut self, name: &str, tensor: T) -> Result<(), NotAnArgument> {
                let operator = self.operator();
                match self {
                    $(Self::$variant(arguments) => {
                        let parameter = crate::ops::$module::Parameter::from_name(name)
                            .ok_or_else(|| NotAnArgument::unknown(operator, name))?;
                        if !parameter.info().kind.is_tensor() {
                            return Err(NotAnArgument::no_tensor(parameter.info()));
                        }
                        arguments.set_tensor(parameter, tensor);
                    })*
                }
                Ok(())
            }

            /// The value of the parameter of this name, if the parameter is not a tensor.
            pub fn value(&self, name: &str) -> Option<Value<'_>> {
                match self {
                    $(Self::$variant(arguments) => arguments.value(crate::ops::$module::Parameter::from_name(name)?),)*
                }
            }

            /// Gives a value to a parameter that is no tensor.
            ///
            /// # Errors
            /// An error for a name of no parameter, and for a value of another kind than the parameter's. Nothing is
            /// changed.
            pub fn set_value(&mut self, name: &str, value: OwnedValue) -> Result<(), NotAnArgument> {
                let operator = self.operator();
                match self {
                    $(Self::$variant(arguments) => {
                        let parameter = crate::ops::$module::Parameter::from_name(name)
                            .ok_or_else(|| NotAnArgument::unknown(operator, name))?;
                        Ok(arguments.set_value(parameter, value)?)
                    })*
                }
            }

            /// This call with other tensors: `tensor` makes each of them from the old one.
            ///
            /// # Errors
            /// The first error of `tensor`, after which no more tensors are made.
            pub fn try_map<U, E>(
                &self,
                mut tensor: impl FnMut(AnyArgument, &T) -> Result<U, E>,
            ) -> Result<AnyArguments<U>, E> {
                Ok(match self {
                    $(Self::$variant(arguments) => AnyArguments::$variant(arguments.try_map(|argument, value| {
                        let any = AnyArgument {
                            parameter: argument.parameter.info(),
                            index: argument.index,
                        };
                        tensor(any, value)
                    })?),)*
                })
            }
        }

        impl AnyArguments<TensorDesc> {
            /// Checks the call against the contract of a version, counted from 1, and reports every lint that it
            /// breaks.
            ///
            /// # Errors
            /// [`Violation`] by the first broken rule; [`UNSUPPORTED`](crate::UNSUPPORTED) for what this crate does
            /// not compute, and for a version that the operator does not have.
            pub fn check(
                &self,
                version: u8,
                target: Target,
                report: &mut dyn FnMut(Violation),
            ) -> Result<(), Violation> {
                match self {
                    $(Self::$variant(arguments) => match crate::ops::$module::$variant::version(version) {
                        Some(version) => crate::ops::$module::$variant::check(arguments, version, target, report),
                        None => Err(Violation::unsupported("an operator's version of this number").into()),
                    })*
                }
            }

            /// The call with the changes of a fix ([`Violation::changes`]) applied. A change of a parameter that the
            /// operator does not have is ignored.
            ///
            /// # Errors
            /// A parameter's kind, if a value is of another one.
            pub fn changed(&self, changes: &[Change]) -> Result<Self, WrongKind> {
                Ok(match self {
                    $(Self::$variant(arguments) => Self::$variant(arguments.changed(changes)?),)*
                })
            }

            /// Gives a call the outputs that it lacks. An output whose shape the inputs do not imply, such as the
            /// rows of a gathered cache, has the shape that `expected` returns.
            pub fn imply_outputs(&mut self, expected: &dyn Fn(&str) -> Option<Dims>) {
                match self {
                    $(Self::$variant(arguments) => crate::ops::$module::$variant::imply_outputs(arguments, expected),)*
                }
            }

            /// The first argument that is given and that a version, counted from 1, does not have.
            pub fn unread(&self, version: u8) -> Option<&'static ParameterInfo> {
                match self {
                    $(Self::$variant(arguments) => {
                        let version = crate::ops::$module::$variant::version(version)?;
                        crate::ops::$module::$variant::unread(arguments, version)
                    })*
                }
            }

            /// The version, counted from 1, that the call is checked for: of those from `at_least` on that compute
            /// with every argument given and that the product has in the release, the oldest that is not deprecated.
            /// Where there is none, this is a version that the check refuses.
            pub fn chosen_on(&self, at_least: u8, target: Target) -> u8 {
                match self {
                    $(Self::$variant(arguments) => {
                        let version = crate::ops::$module::$variant::chosen_on(arguments, at_least, target);
                        version.map_or(1, |version| version.number())
                    })*
                }
            }

            /// Finds a target that takes a call which `target` refuses: the oldest newer release of its product, or
            /// else another product with the oldest release from `target`'s on. It takes the call if that breaks
            /// neither a rule nor a lint there, in the version that [`chosen_on`](Self::chosen_on) chooses.
            pub fn taken_by(&self, at_least: u8, target: Target) -> Option<Target> {
                target.nearest(|other| {
                    let mut is_clean = true;
                    let checked = self.check(self.chosen_on(at_least, other), other, &mut |_| is_clean = false);
                    checked.is_ok() && is_clean
                })
            }

            /// Checks the contents of tensors that the operator reads as indices: a call that is launched in spite of
            /// an error accesses memory outside of its tensors. `integers` returns the contents of an integer tensor.
            ///
            /// # Errors
            /// The broken rule or lint. Calls that the contract refuses are not examined.
            pub fn check_contents(
                &self,
                version: u8,
                target: Target,
                integers: &dyn Fn(&str) -> Vec<i64>,
            ) -> Result<(), Violation> {
                match self {
                    $(Self::$variant(arguments) => match crate::ops::$module::$variant::version(version) {
                        Some(version) => {
                            crate::ops::$module::$variant::check_contents(arguments, version, target, integers)
                        }
                        None => Ok(()),
                    })*
                }
            }

            /// Reports the lints that the contents of other tensors break, those that are no indices: the numbers of a
            /// position bias, the bytes of a mask. `bytes` returns the content of a tensor, little-endian in row-major
            /// order; the lints on a tensor for which it returns nothing are left out. Calls that the contract refuses
            /// are not examined.
            pub fn lint_contents(
                &self,
                version: u8,
                target: Target,
                bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
                report: &mut dyn FnMut(Violation),
            ) {
                match self {
                    $(Self::$variant(arguments) => {
                        if let Some(version) = crate::ops::$module::$variant::version(version) {
                            crate::ops::$module::$variant::lint_contents(arguments, version, target, bytes, report);
                        }
                    })*
                }
            }
        }
    };
}

for_each_operator! { declared_operators }

impl DeclaredOperator {
    /// The operator of this name in case files.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|operator| operator.name() == name)
    }

    /// The operator's parameters, in its own order.
    pub fn parameters(self) -> impl Iterator<Item = &'static ParameterInfo> {
        (0..).map_while(move |number| self.parameter(number))
    }

    /// The operator's parameter of this name in snake case.
    pub fn parameter_named(self, name: &str) -> Option<&'static ParameterInfo> {
        self.parameters().find(|parameter| parameter.name == name)
    }

    /// The operator's versions, oldest first.
    pub fn versions(self) -> impl Iterator<Item = OperatorVersion> {
        (1..).map_while(move |number| self.version(number))
    }
}

/// One tensor of a call of a declared operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnyArgument {
    /// The parameter.
    pub parameter: &'static ParameterInfo,
    /// The index in the list; 0 for a parameter that is not a list.
    pub index: usize,
}

impl<T> AnyArguments<T> {
    /// This call's attributes and arrays, without its tensors.
    pub fn attributes<U>(&self) -> AnyArguments<U> {
        let mut attributes = AnyArguments::new(self.operator());
        for parameter in self.operator().parameters() {
            if let Some(value) = self.value(parameter.name) {
                // This cannot fail: the parameter is this operator's own, and the value is of its kind.
                let _ = attributes.set_value(parameter.name, value.into());
            }
        }
        attributes
    }

    /// Every tensor with its place in the call, in the operator's order.
    pub fn each_tensor(&self) -> impl Iterator<Item = (AnyArgument, &T)> {
        self.operator().parameters().flat_map(|parameter| {
            let tensors = self.tensors(parameter.name).iter().enumerate();
            tensors.map(move |(index, tensor)| (AnyArgument { parameter, index }, tensor))
        })
    }
}

/// The error for an argument by a name that the operator does not have, or of a kind that the parameter does not
/// take.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotAnArgument {
    /// No parameter has the name.
    Unknown {
        /// The operator.
        operator: DeclaredOperator,
        /// The name that was given.
        name: String,
    },
    /// A tensor was given to a parameter that is not a tensor.
    NoTensor(WrongKind),
    /// A value was given to a parameter of another kind.
    WrongKind(WrongKind),
}

impl NotAnArgument {
    fn unknown(operator: DeclaredOperator, name: &str) -> Self {
        Self::Unknown { operator, name: name.to_owned() }
    }

    fn no_tensor(parameter: &ParameterInfo) -> Self {
        Self::NoTensor(WrongKind { parameter: parameter.name, kind: parameter.kind })
    }
}

impl fmt::Display for NotAnArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { operator, name } => {
                write!(f, "{} has no parameter {name:?}; it has", operator.name())?;
                let names = operator.parameters().map(|parameter| parameter.name);
                for (index, name) in names.enumerate() {
                    write!(f, "{}{name}", if index == 0 { " " } else { ", " })?;
                }
                Ok(())
            }
            Self::NoTensor(wrong) => write!(f, "a tensor was given, and {wrong}"),
            Self::WrongKind(wrong) => wrong.fmt(f),
        }
    }
}

impl std::error::Error for NotAnArgument {}

impl From<WrongKind> for NotAnArgument {
    fn from(wrong: WrongKind) -> Self {
        Self::WrongKind(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Soc, ops::fused_infer_attention_score as fia};

    #[test]
    fn operators_are_found_by_name_and_list_their_versions() {
        for &operator in DeclaredOperator::ALL {
            assert_eq!(DeclaredOperator::from_name(operator.name()), Some(operator));
            assert_eq!(AnyArguments::<()>::new(operator).operator(), operator);
            assert!(operator.versions().count() >= 1);
            assert!(operator.parameters().any(|parameter| parameter.kind.is_output()));
            assert_eq!(operator.version(0), None);
        }
        let symbols: Vec<_> =
            DeclaredOperator::FlashAttentionVarlenScore.versions().map(OperatorVersion::symbol).collect();
        assert_eq!(symbols.len(), 5);
        assert_eq!(symbols[4], "aclnnFlashAttentionVarLenScoreV5");
        assert_eq!(DeclaredOperator::from_name("attention"), None);
    }

    #[test]
    fn a_call_without_tensors_is_refused_by_every_operator() {
        let target = Target::new(Soc::AtlasA2, Cann::V9_1);
        for &operator in DeclaredOperator::ALL {
            let arguments = AnyArguments::<TensorDesc>::new(operator);
            for number in 1..=operator.versions().count() as u8 {
                let refused = arguments.check(number, target, &mut |_| {});
                assert!(refused.is_err_and(|violation| !violation.is_unsupported()), "{operator:?}");
                assert_eq!(arguments.unread(number), None);
                arguments.check_contents(number, target, &|_| vec![]).unwrap();
            }
            let refused = arguments.check(9, target, &mut |_| {});
            assert!(refused.is_err_and(|violation| violation.is_unsupported()));
        }
    }

    #[test]
    fn tensors_and_values_are_given_by_name() {
        for &operator in DeclaredOperator::ALL {
            let mut arguments = AnyArguments::new(operator);
            for parameter in operator.parameters() {
                match parameter.kind.is_tensor() {
                    true => arguments.set_tensor(parameter.name, parameter.name).unwrap(),
                    false => assert!(arguments.value(parameter.name).is_some()),
                }
            }
            let before = arguments.clone();
            let unknown = arguments.set_tensor("qeury", "qeury").unwrap_err();
            assert_eq!(arguments.set_value("qeury", OwnedValue::Int(1)), Err(unknown.clone()));
            let message = unknown.to_string();
            assert!(operator.parameters().all(|parameter| message.contains(parameter.name)), "{message}");
            for parameter in operator.parameters() {
                match parameter.kind.is_tensor() {
                    true => {
                        let refused = arguments.set_value(parameter.name, OwnedValue::Int(1));
                        assert!(matches!(refused, Err(NotAnArgument::WrongKind(_))));
                    }
                    false => {
                        let refused = arguments.set_tensor(parameter.name, "tensor");
                        assert!(matches!(refused, Err(NotAnArgument::NoTensor(_))));
                    }
                }
            }
            assert_eq!(arguments, before);
            let tensors = operator.parameters().filter(|parameter| parameter.kind.is_tensor());
            let given: Vec<_> = arguments.each_tensor().map(|(_, name)| *name).collect();
            assert!(tensors.map(|parameter| parameter.name).eq(given));
            let longer = arguments.try_map(|argument, name| match argument.parameter.name == *name {
                true => Ok(name.len()),
                false => Err(()),
            });
            assert_eq!(longer.unwrap().each_tensor().count(), arguments.each_tensor().count());
        }
    }

    #[test]
    fn block_tables_of_fused_attention_are_checked() {
        let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape);
        let cache = desc(DType::Float16, &[4, 16, 64]).unwrap();
        let rows = desc(DType::Float16, &[2, 1, 64]);
        let paged = AnyArguments::FusedInferAttentionScore(fia::Arguments {
            query: rows,
            key: vec![cache],
            value: vec![cache],
            attention_out: rows,
            block_table: desc(DType::Int32, &[2, 3]),
            block_size: 16,
            actual_seq_lengths_kv: Some(vec![33, 5]),
            num_heads: 1,
            input_layout: "BSH".into(),
            ..Default::default()
        });
        let target = Target::new(Soc::AtlasA2, Cann::V8_1);
        assert_eq!(paged.check(1, target, &mut |_| {}), Ok(()));
        let broken = |table: &[i64]| {
            let contents = |name: &str| match name {
                "block_table" => table.to_vec(),
                _ => vec![],
            };
            let broken = paged.check_contents(1, target, &contents);
            broken.err().map(|violation| violation.rule.id)
        };
        assert_eq!(broken(&[3, 0, 1, 2, -1, -1]), None);
        assert_eq!(broken(&[3, 0, 4, 2, 0, 0]), Some("block_table.range"));
        assert_eq!(broken(&[3, 0, 1]), Some("block_table.row_short"));
    }
}
