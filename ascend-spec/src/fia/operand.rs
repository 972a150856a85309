//! The tensors of a call that a computation knows.

use super::{Argument, FiaCall, Parameter};
use crate::TensorDesc;

macro_rules! operands {
    ($($(#[$doc:meta])* $variant:ident;)*) => {
        /// A tensor of a call of FusedInferAttentionScore.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Operand {
            $($(#[$doc])* $variant,)*
            /// Keys, by number in their list.
            Key(usize),
            /// Values, by number in their list.
            Value(usize),
        }

        impl Operand {
            /// The tensor that a call gives by this argument.
            pub const fn of_argument(argument: Argument) -> Option<Self> {
                match argument.parameter {
                    $(Parameter::$variant => Some(Operand::$variant),)*
                    Parameter::Key => Some(Operand::Key(argument.index)),
                    Parameter::Value => Some(Operand::Value(argument.index)),
                    _ => None,
                }
            }

            /// What the call gives it by.
            pub const fn argument(self) -> Argument {
                match self {
                    $(Operand::$variant => Argument::element(Parameter::$variant, 0),)*
                    Operand::Key(index) => Argument::element(Parameter::Key, index),
                    Operand::Value(index) => Argument::element(Parameter::Value, index),
                }
            }
        }
    };
}

operands! {
    /// Queries.
    Query;
    /// Additive position bias.
    PseShift;
    /// Mask; 1 hides.
    AttenMask;
    /// Dequantisation after Q K^T.
    DeqScale1;
    /// Quantisation of the probabilities.
    QuantScale1;
    /// Dequantisation after P V.
    DeqScale2;
    /// Quantisation scale of the output.
    QuantScale2;
    /// Quantisation offset of the output.
    QuantOffset2;
    /// Antiquantisation scale of key and value together.
    AntiquantScale;
    /// Antiquantisation offset of key and value together.
    AntiquantOffset;
    /// Block table of a paged cache.
    BlockTable;
    /// Left padding of the query.
    QueryPaddingSize;
    /// Left padding of key and value.
    KvPaddingSize;
    /// Antiquantisation scale of the key.
    KeyAntiquantScale;
    /// Antiquantisation offset of the key.
    KeyAntiquantOffset;
    /// Antiquantisation scale of the value.
    ValueAntiquantScale;
    /// Antiquantisation offset of the value.
    ValueAntiquantOffset;
    /// Shared prefix of the key.
    KeySharedPrefix;
    /// Shared prefix of the value.
    ValueSharedPrefix;
    /// Rotary part of the query.
    QueryRope;
    /// Rotary part of the key.
    KeyRope;
    /// Reserved.
    KeyRopeAntiquantScale;
    /// Dequantisation scale of the query.
    DequantScaleQuery;
    /// One extra logit a head.
    LearnableSink;
    /// Output.
    AttentionOut;
    /// Log-sum-exp of each row.
    SoftmaxLse;
}

impl Operand {
    /// The tensor's description in `call`.
    pub fn of<'a>(self, call: &'a FiaCall<'a>) -> Option<&'a TensorDesc> {
        call.tensor(self.argument())
    }

    /// The argument's name in snake case.
    pub const fn name(self) -> &'static str {
        self.argument().parameter.name()
    }

    /// CANN's name of the argument.
    pub const fn acl_name(self) -> &'static str {
        self.argument().parameter.acl_name()
    }
}
