//! The error for arguments that an operator has no parameter for.

use super::DeclaredOperator;
use crate::operator::{ParameterInfo, WrongKind};
use std::fmt;

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
    pub(super) fn unknown(operator: DeclaredOperator, name: &str) -> Self {
        Self::Unknown { operator, name: name.to_owned() }
    }

    pub(super) fn no_tensor(parameter: &ParameterInfo) -> Self {
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
