//! The operator's tensors, by name.

use std::fmt;

use ascend_spec::TensorDesc;
use ascend_spec::fia::FiaCall;

macro_rules! parameters {
    ($($(#[$doc:meta])* $variant:ident = $field:ident, $index:literal;)*) => {
        /// A tensor of FusedInferAttentionScore other than the lists `key` and `value`.
        ///
        /// The names are those of the fields of [`FiaCall`], which are the operator's in snake case.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Parameter {
            $($(#[$doc])* $variant,)*
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

            /// Its place among the operator's inputs, or among its outputs.
            pub(super) const fn index(self) -> usize {
                match self {
                    $(Parameter::$variant => $index,)*
                }
            }

            pub(super) const fn of<'a>(self, call: &'a FiaCall<'_>) -> &'a Option<TensorDesc> {
                match self {
                    $(Parameter::$variant => &call.$field,)*
                }
            }

            pub(crate) const fn of_mut<'a>(self, call: &'a mut FiaCall<'_>) -> &'a mut Option<TensorDesc> {
                match self {
                    $(Parameter::$variant => &mut call.$field,)*
                }
            }
        }
    };
}

parameters! {
    /// Queries.
    Query = query, 0;
    /// Additive position bias.
    PseShift = pse_shift, 3;
    /// Mask; 1 hides.
    AttenMask = atten_mask, 4;
    /// Dequantisation after Q K^T.
    DeqScale1 = deq_scale1, 7;
    /// Quantisation of the probabilities.
    QuantScale1 = quant_scale1, 8;
    /// Dequantisation after P V.
    DeqScale2 = deq_scale2, 9;
    /// Quantisation scale of the output.
    QuantScale2 = quant_scale2, 10;
    /// Quantisation offset of the output.
    QuantOffset2 = quant_offset2, 11;
    /// Antiquantisation scale of key and value together.
    AntiquantScale = antiquant_scale, 12;
    /// Antiquantisation offset of key and value together.
    AntiquantOffset = antiquant_offset, 13;
    /// Block table of a paged cache.
    BlockTable = block_table, 14;
    /// Left padding of the query.
    QueryPaddingSize = query_padding_size, 15;
    /// Left padding of key and value.
    KvPaddingSize = kv_padding_size, 16;
    /// Antiquantisation scale of the key.
    KeyAntiquantScale = key_antiquant_scale, 17;
    /// Antiquantisation offset of the key.
    KeyAntiquantOffset = key_antiquant_offset, 18;
    /// Antiquantisation scale of the value.
    ValueAntiquantScale = value_antiquant_scale, 19;
    /// Antiquantisation offset of the value.
    ValueAntiquantOffset = value_antiquant_offset, 20;
    /// Shared prefix of the key.
    KeySharedPrefix = key_shared_prefix, 21;
    /// Shared prefix of the value.
    ValueSharedPrefix = value_shared_prefix, 22;
    /// Rotary part of the query.
    QueryRope = query_rope, 24;
    /// Rotary part of the key.
    KeyRope = key_rope, 25;
    /// Reserved.
    KeyRopeAntiquantScale = key_rope_antiquant_scale, 26;
    /// Dequantisation scale of the query.
    DequantScaleQuery = dequant_scale_query, 27;
    /// One extra logit a head.
    LearnableSink = learnable_sink, 28;
    /// Output.
    AttentionOut = attention_out, 0;
    /// Log-sum-exp of each row.
    SoftmaxLse = softmax_lse, 1;
}

impl Parameter {
    /// The parameter of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let named = Self::ALL.iter().find(|parameter| parameter.name() == name);
        named.copied()
    }

    /// Whether the operator writes it.
    pub const fn is_output(self) -> bool {
        matches!(self, Self::AttentionOut | Self::SoftmaxLse)
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The place of the key list and of the value list among the operator's inputs.
pub(super) const KEY_INDEX: usize = 1;
pub(super) const VALUE_INDEX: usize = 2;

/// One tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    One(Parameter),
    Key(usize),
    Value(usize),
}

impl Slot {
    pub(super) fn name(self) -> &'static str {
        match self {
            Slot::One(parameter) => parameter.name(),
            Slot::Key(_) => "key",
            Slot::Value(_) => "value",
        }
    }

    pub(super) fn is_output(self) -> bool {
        matches!(self, Slot::One(parameter) if parameter.is_output())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_places_are_unique() {
        let mut places = Vec::new();
        for &parameter in Parameter::ALL {
            assert_eq!(Parameter::from_name(parameter.name()), Some(parameter));
            places.push((parameter.is_output(), parameter.index()));
            let mut call = FiaCall::new("BSH");
            assert_eq!(*parameter.of(&call), None);
            let desc = TensorDesc::contiguous(ascend_spec::DType::Float, &[1]);
            *parameter.of_mut(&mut call) = desc;
            assert_eq!(*parameter.of(&call), desc);
        }
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), Parameter::ALL.len());
        assert_eq!(Parameter::from_name("key"), None);
    }
}
