//! Decoding steps by the operator's own decode path.

use ascend_attention::spec::Layout;
use ascend_attention::{Element, Tensor};

use crate::batch::AttentionState;
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::LayerCache;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, check_single_tokens, size};

/// The layout of queries over a cache of this format.
pub(crate) fn layout<T: Element>(cache: &LayerCache<T>) -> Layout {
    match cache.key.shape().len() {
        4 => Layout::Bnsd,
        _ => Layout::Bsh,
    }
}

/// Packed queries `[tokens, N, D]` as one row a request.
pub(super) fn rows<T: Element>(layout: Layout, query: &Tensor<T>) -> Result<Tensor<T>> {
    let [tokens, heads, dim] = sizes(query);
    match layout {
        Layout::Bnsd => Ok(query.reshape([tokens, heads, 1, dim])?),
        _ => Ok(query.reshape([tokens, 1, heads * dim])?),
    }
}

/// The sizes of a packed tensor, `[tokens, N, D]` or `[N, tokens, D]`.
pub(super) fn sizes<T: Element>(packed: &Tensor<T>) -> [usize; 3] {
    [0, 1, 2].map(|axis| size(packed, axis))
}

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    let metadata = step.metadata;
    let causality = step.mask.causality()?;
    let takes = metadata.state() == AttentionState::DecodeOnly
        && causality == Causality::Causal
        && first.learnable_sink.is_none();
    let allowed = "DecodeOnly (one token a request, cached ones in front), causal, without window and sinks";
    let fix = rules::BACKEND_DECODE.fix;
    check_single_tokens(step, first, takes, &rules::BACKEND_DECODE, [allowed, fix])?;
    let lengths = metadata.kv_lengths().clone();
    Ok(StepCall::batched(layout(first.cache), lengths).into())
}
