//! The area of a call, by which calls are counted.

use ascend_attention::spec::declared::{AnyArguments, DeclaredOperator};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::spec::{DType, Layout, TensorDesc};

/// The area of a call: the first of these features that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Area {
    /// The call has separate rotary parts.
    Mla,
    /// Quantised keys under a half-precision query.
    Antiquantised,
    /// A quantised query or output.
    Quantised,
    /// A shared prefix.
    Prefix,
    /// Left padding.
    Padding,
    /// One key and one value tensor a sequence.
    List,
    /// A learnable sink.
    Sink,
    /// A position bias.
    Pse,
    /// Packed sequences over a paged cache.
    PackedPaged,
    /// Packed sequences.
    Packed,
    /// A paged cache.
    Paged,
    /// One query row a sequence.
    Decode,
    /// Several query rows a sequence.
    Prefill,
    /// A call of another operator.
    Of(DeclaredOperator),
}

impl Area {
    pub(super) fn of(arguments: &AnyArguments<TensorDesc>) -> Self {
        match arguments {
            AnyArguments::FusedInferAttentionScore(arguments) => Self::of_call(&arguments.call()),
            other => Self::Of(other.operator()),
        }
    }

    fn of_call(call: &FiaCall<'_>) -> Self {
        let dtype = |desc: Option<&TensorDesc>| desc.map(|desc| desc.dtype);
        let layout = Layout::parse(call.input_layout);
        let query = dtype(call.query.as_ref());
        let packed = layout.is_some_and(Layout::is_packed);
        let rows = layout.and_then(|layout| {
            let shape = call.query.as_ref()?.shape;
            shape.get(layout.input().row_axis()).copied()
        });
        let half_out = dtype(call.attention_out.as_ref()).is_none_or(DType::is_half);
        if call.query_rope.is_some() || call.key_rope.is_some() {
            Self::Mla
        } else if query.is_some_and(DType::is_half) && dtype(call.key.first()) != query {
            Self::Antiquantised
        } else if !query.is_some_and(DType::is_half) || !half_out {
            Self::Quantised
        } else if call.key_shared_prefix.is_some() || call.value_shared_prefix.is_some() {
            Self::Prefix
        } else if call.query_padding_size.is_some() || call.kv_padding_size.is_some() {
            Self::Padding
        } else if call.key.len() > 1 || call.value.len() > 1 {
            Self::List
        } else if call.learnable_sink.is_some() {
            Self::Sink
        } else if call.pse_shift.is_some() {
            Self::Pse
        } else if packed && call.block_table.is_some() {
            Self::PackedPaged
        } else if packed {
            Self::Packed
        } else if call.block_table.is_some() {
            Self::Paged
        } else if rows == Some(1) {
            Self::Decode
        } else {
            Self::Prefill
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mla => "mla",
            Self::Antiquantised => "antiquantised",
            Self::Quantised => "quantised",
            Self::Prefix => "prefix",
            Self::Padding => "padding",
            Self::List => "list",
            Self::Sink => "sink",
            Self::Pse => "pse",
            Self::PackedPaged => "packed, paged",
            Self::Packed => "packed",
            Self::Paged => "paged",
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Of(operator) => operator.name(),
        }
    }
}
