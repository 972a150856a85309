//! The tensors of a call, by name and by place in the operator's argument list.

use std::fmt;

use super::FiaCall;
use crate::TensorDesc;

/// Where a tensor stands in the argument list of the operator's newest version, of which the older ones take the
/// beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Input number, counted over tensors, lists and arrays; for a list, the tensor's number within it.
    Input(usize, usize),
    /// Output number.
    Output(usize),
}

/// Declares the tensors of a call once: variant, field of [`FiaCall`], CANN's name, place.
macro_rules! operands {
    ($($(#[$doc:meta])* $variant:ident = $field:ident, $acl:literal, $place:ident($($number:literal),+);)*) => {
        /// A tensor of FusedInferAttentionScore other than those of the lists `key` and `value`.
        ///
        /// The names are those of the fields of [`FiaCall`], which are the operator's in snake case.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Parameter {
            $($(#[$doc])* $variant,)*
        }

        /// A tensor of a call of FusedInferAttentionScore.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Operand {
            $($(#[$doc])* $variant,)*
            /// Keys, by number in their list.
            Key(usize),
            /// Values, by number in their list.
            Value(usize),
        }

        impl Parameter {
            /// Every parameter, in the operator's order.
            pub const ALL: &'static [Parameter] = &[$(Parameter::$variant,)*];

            /// Its name in snake case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Parameter::$variant => stringify!($field),)*
                }
            }

            /// Its place in the argument list.
            pub const fn place(self) -> Place {
                match self {
                    $(Parameter::$variant => Place::$place($($number),+),)*
                }
            }

            /// Its description in a call.
            pub const fn of<'a>(self, call: &'a FiaCall<'_>) -> &'a Option<TensorDesc> {
                match self {
                    $(Parameter::$variant => &call.$field,)*
                }
            }

            /// Its description in a call, to be changed.
            pub const fn of_mut<'a>(self, call: &'a mut FiaCall<'_>) -> &'a mut Option<TensorDesc> {
                match self {
                    $(Parameter::$variant => &mut call.$field,)*
                }
            }
        }

        impl From<Parameter> for Operand {
            fn from(parameter: Parameter) -> Self {
                match parameter {
                    $(Parameter::$variant => Operand::$variant,)*
                }
            }
        }

        impl Operand {
            /// The parameter; none for the tensors of lists.
            pub const fn parameter(self) -> Option<Parameter> {
                match self {
                    $(Operand::$variant => Some(Parameter::$variant),)*
                    Operand::Key(_) | Operand::Value(_) => None,
                }
            }

            /// Its place in the argument list.
            pub const fn place(self) -> Place {
                match self {
                    $(Operand::$variant => Place::$place($($number),+),)*
                    Operand::Key(index) => Place::Input(1, index),
                    Operand::Value(index) => Place::Input(2, index),
                }
            }

            /// The operator's name of the argument.
            pub const fn acl_name(self) -> &'static str {
                match self {
                    $(Operand::$variant => $acl,)*
                    Operand::Key(_) => "key",
                    Operand::Value(_) => "value",
                }
            }
        }
    };
}

operands! {
    /// Queries.
    Query = query, "query", Input(0, 0);
    /// Additive position bias.
    PseShift = pse_shift, "pseShift", Input(3, 0);
    /// Mask; 1 hides.
    AttenMask = atten_mask, "attenMask", Input(4, 0);
    /// Dequantisation after Q K^T.
    DeqScale1 = deq_scale1, "deqScale1", Input(7, 0);
    /// Quantisation of the probabilities.
    QuantScale1 = quant_scale1, "quantScale1", Input(8, 0);
    /// Dequantisation after P V.
    DeqScale2 = deq_scale2, "deqScale2", Input(9, 0);
    /// Quantisation scale of the output.
    QuantScale2 = quant_scale2, "quantScale2", Input(10, 0);
    /// Quantisation offset of the output.
    QuantOffset2 = quant_offset2, "quantOffset2", Input(11, 0);
    /// Antiquantisation scale of key and value together.
    AntiquantScale = antiquant_scale, "antiquantScale", Input(12, 0);
    /// Antiquantisation offset of key and value together.
    AntiquantOffset = antiquant_offset, "antiquantOffset", Input(13, 0);
    /// Block table of a paged cache.
    BlockTable = block_table, "blockTable", Input(14, 0);
    /// Left padding of the query.
    QueryPaddingSize = query_padding_size, "queryPaddingSize", Input(15, 0);
    /// Left padding of key and value.
    KvPaddingSize = kv_padding_size, "kvPaddingSize", Input(16, 0);
    /// Antiquantisation scale of the key.
    KeyAntiquantScale = key_antiquant_scale, "keyAntiquantScale", Input(17, 0);
    /// Antiquantisation offset of the key.
    KeyAntiquantOffset = key_antiquant_offset, "keyAntiquantOffset", Input(18, 0);
    /// Antiquantisation scale of the value.
    ValueAntiquantScale = value_antiquant_scale, "valueAntiquantScale", Input(19, 0);
    /// Antiquantisation offset of the value.
    ValueAntiquantOffset = value_antiquant_offset, "valueAntiquantOffset", Input(20, 0);
    /// Shared prefix of the key.
    KeySharedPrefix = key_shared_prefix, "keySharedPrefix", Input(21, 0);
    /// Shared prefix of the value.
    ValueSharedPrefix = value_shared_prefix, "valueSharedPrefix", Input(22, 0);
    /// Rotary part of the query.
    QueryRope = query_rope, "queryRope", Input(24, 0);
    /// Rotary part of the key.
    KeyRope = key_rope, "keyRope", Input(25, 0);
    /// Reserved.
    KeyRopeAntiquantScale = key_rope_antiquant_scale, "keyRopeAntiquantScale", Input(26, 0);
    /// Dequantisation scale of the query.
    DequantScaleQuery = dequant_scale_query, "dequantScaleQuery", Input(27, 0);
    /// One extra logit a head.
    LearnableSink = learnable_sink, "learnableSink", Input(28, 0);
    /// Output.
    AttentionOut = attention_out, "attentionOut", Output(0);
    /// Log-sum-exp of each row.
    SoftmaxLse = softmax_lse, "softmaxLse", Output(1);
}

impl Parameter {
    /// The parameter of this name in snake case.
    pub fn from_name(name: &str) -> Option<Self> {
        let named = Self::ALL.iter().find(|parameter| parameter.name() == name);
        named.copied()
    }

    /// Whether the operator writes it.
    pub const fn is_output(self) -> bool {
        matches!(self.place(), Place::Output(_))
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Operand {
    /// The argument's name in snake case.
    pub const fn name(self) -> &'static str {
        match self.parameter() {
            Some(parameter) => parameter.name(),
            None => self.acl_name(),
        }
    }

    /// The tensor's description in `call`.
    pub fn of<'a>(self, call: &'a FiaCall<'a>) -> Option<&'a TensorDesc> {
        match self {
            Operand::Key(index) => call.key.get(index),
            Operand::Value(index) => call.value.get(index),
            one => one.parameter()?.of(call).as_ref(),
        }
    }

    /// Whether the operator writes it.
    pub const fn is_output(self) -> bool {
        matches!(self.place(), Place::Output(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn names_and_places_are_unique() {
        let mut places = Vec::new();
        for &parameter in Parameter::ALL {
            assert_eq!(Parameter::from_name(parameter.name()), Some(parameter));
            let operand = Operand::from(parameter);
            assert_eq!(operand.parameter(), Some(parameter));
            assert_eq!(operand.place(), parameter.place());
            assert_eq!(operand.name(), parameter.name());
            let letters = operand.name().replace('_', "");
            assert_eq!(operand.acl_name().to_ascii_lowercase(), letters);
            places.push(parameter.place());
            let mut call = FiaCall::new("BSH");
            assert_eq!(*parameter.of(&call), None);
            let desc = TensorDesc::contiguous(DType::Float, &[1]);
            *parameter.of_mut(&mut call) = desc;
            assert_eq!(*parameter.of(&call), desc);
            assert_eq!(operand.of(&call), desc.as_ref());
        }
        places.extend([Operand::Key(0).place(), Operand::Value(0).place()]);
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), Parameter::ALL.len() + 2);
        assert_eq!(Parameter::from_name("key"), None);
    }
}
