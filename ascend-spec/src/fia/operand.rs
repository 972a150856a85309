//! The tensors of a call, by name and by place in the operator's argument list.

use super::FiaCall;
use crate::TensorDesc;

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The operator's argument names; the numbers are places in the tensor list.
pub enum Operand {
    Query,
    Key(usize),
    Value(usize),
    PseShift,
    AttenMask,
    DeqScale1,
    QuantScale1,
    DeqScale2,
    QuantScale2,
    QuantOffset2,
    AntiquantScale,
    AntiquantOffset,
    BlockTable,
    QueryPaddingSize,
    KvPaddingSize,
    KeyAntiquantScale,
    KeyAntiquantOffset,
    ValueAntiquantScale,
    ValueAntiquantOffset,
    KeySharedPrefix,
    ValueSharedPrefix,
    QueryRope,
    KeyRope,
    DequantScaleQuery,
    LearnableSink,
    AttentionOut,
    SoftmaxLse,
}

/// Where a tensor stands in the operator's argument list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Input number, counted over tensors, lists and arrays; for a list, the tensor's number within it.
    Input(usize, usize),
    /// Output number.
    Output(usize),
}

impl Operand {
    /// Place in the argument list of the operator's newest version, of which the older ones take the beginning.
    pub const fn place(self) -> Place {
        let input = match self {
            Operand::Query => 0,
            Operand::Key(index) => return Place::Input(1, index),
            Operand::Value(index) => return Place::Input(2, index),
            Operand::PseShift => 3,
            Operand::AttenMask => 4,
            Operand::DeqScale1 => 7,
            Operand::QuantScale1 => 8,
            Operand::DeqScale2 => 9,
            Operand::QuantScale2 => 10,
            Operand::QuantOffset2 => 11,
            Operand::AntiquantScale => 12,
            Operand::AntiquantOffset => 13,
            Operand::BlockTable => 14,
            Operand::QueryPaddingSize => 15,
            Operand::KvPaddingSize => 16,
            Operand::KeyAntiquantScale => 17,
            Operand::KeyAntiquantOffset => 18,
            Operand::ValueAntiquantScale => 19,
            Operand::ValueAntiquantOffset => 20,
            Operand::KeySharedPrefix => 21,
            Operand::ValueSharedPrefix => 22,
            Operand::QueryRope => 24,
            Operand::KeyRope => 25,
            Operand::DequantScaleQuery => 27,
            Operand::LearnableSink => 28,
            Operand::AttentionOut => return Place::Output(0),
            Operand::SoftmaxLse => return Place::Output(1),
        };
        Place::Input(input, 0)
    }

    /// The operator's name of the argument.
    pub const fn name(self) -> &'static str {
        match self {
            Operand::Query => "query",
            Operand::Key(_) => "key",
            Operand::Value(_) => "value",
            Operand::PseShift => "pseShift",
            Operand::AttenMask => "attenMask",
            Operand::DeqScale1 => "deqScale1",
            Operand::QuantScale1 => "quantScale1",
            Operand::DeqScale2 => "deqScale2",
            Operand::QuantScale2 => "quantScale2",
            Operand::QuantOffset2 => "quantOffset2",
            Operand::AntiquantScale => "antiquantScale",
            Operand::AntiquantOffset => "antiquantOffset",
            Operand::BlockTable => "blockTable",
            Operand::QueryPaddingSize => "queryPaddingSize",
            Operand::KvPaddingSize => "kvPaddingSize",
            Operand::KeyAntiquantScale => "keyAntiquantScale",
            Operand::KeyAntiquantOffset => "keyAntiquantOffset",
            Operand::ValueAntiquantScale => "valueAntiquantScale",
            Operand::ValueAntiquantOffset => "valueAntiquantOffset",
            Operand::KeySharedPrefix => "keySharedPrefix",
            Operand::ValueSharedPrefix => "valueSharedPrefix",
            Operand::QueryRope => "queryRope",
            Operand::KeyRope => "keyRope",
            Operand::DequantScaleQuery => "dequantScaleQuery",
            Operand::LearnableSink => "learnableSink",
            Operand::AttentionOut => "attentionOut",
            Operand::SoftmaxLse => "softmaxLse",
        }
    }

    /// The tensor's description in `call`.
    pub fn of<'a>(self, call: &'a FiaCall<'a>) -> Option<&'a TensorDesc> {
        let one = match self {
            Operand::Key(index) => return call.key.get(index),
            Operand::Value(index) => return call.value.get(index),
            Operand::Query => &call.query,
            Operand::PseShift => &call.pse_shift,
            Operand::AttenMask => &call.atten_mask,
            Operand::DeqScale1 => &call.deq_scale1,
            Operand::QuantScale1 => &call.quant_scale1,
            Operand::DeqScale2 => &call.deq_scale2,
            Operand::QuantScale2 => &call.quant_scale2,
            Operand::QuantOffset2 => &call.quant_offset2,
            Operand::AntiquantScale => &call.antiquant_scale,
            Operand::AntiquantOffset => &call.antiquant_offset,
            Operand::BlockTable => &call.block_table,
            Operand::QueryPaddingSize => &call.query_padding_size,
            Operand::KvPaddingSize => &call.kv_padding_size,
            Operand::KeyAntiquantScale => &call.key_antiquant_scale,
            Operand::KeyAntiquantOffset => &call.key_antiquant_offset,
            Operand::ValueAntiquantScale => &call.value_antiquant_scale,
            Operand::ValueAntiquantOffset => &call.value_antiquant_offset,
            Operand::KeySharedPrefix => &call.key_shared_prefix,
            Operand::ValueSharedPrefix => &call.value_shared_prefix,
            Operand::QueryRope => &call.query_rope,
            Operand::KeyRope => &call.key_rope,
            Operand::DequantScaleQuery => &call.dequant_scale_query,
            Operand::LearnableSink => &call.learnable_sink,
            Operand::AttentionOut => &call.attention_out,
            Operand::SoftmaxLse => &call.softmax_lse,
        };
        one.as_ref()
    }
}
