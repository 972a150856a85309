//! Decoding steps by the operator's own decode path.

use ascend_attention::attention::CallLengths;
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Plan, Tensor};

use crate::batch::{AttentionState, Causality};
use crate::error::Result;
use crate::kv::LayerCache;
use crate::rules;

use super::backend::{
    AttentionBackend, LayerTensors, StepContext, StepPlan, attention_alone, check_single_tokens,
    launch_into_empty, size,
};
use super::step_memory::StepMemory;

/// One call (BSH; BNSD over a BnNBsD cache) of one query row a request over the paged cache, for steps that only
/// decode and layers without a window or sinks.
///
/// On CANN 8.1 this path takes what the packed one does not: FLOAT16, other head dimensions, blocks of a multiple of
/// 16 tokens. On 8.5 it takes heads that are neither 64 nor 128 long with as many key heads, and on every release
/// heads up to 512. From 8.5 on it reads NZ caches of 64 or 128 elements a head too.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagedDecode;

#[derive(Debug)]
struct DecodeStep {
    plan: Plan,
    layout: Layout,
}

/// The layout of queries over a cache of this format.
pub(crate) fn layout<T: Element>(cache: &LayerCache<T>) -> Layout {
    match cache.key.shape().len() {
        4 => Layout::Bnsd,
        _ => Layout::Bsh,
    }
}

/// Packed queries `[tokens, N, D]` as one row a request.
pub(crate) fn rows<T: Element>(layout: Layout, query: &Tensor<T>) -> Result<Tensor<T>> {
    let [tokens, heads, dim] = sizes(query);
    match layout {
        Layout::Bnsd => Ok(query.reshape([tokens, heads, 1, dim])?),
        _ => Ok(query.reshape([tokens, 1, heads.saturating_mul(dim)])?),
    }
}

/// The sizes `[tokens, N, D]` of a packed tensor.
pub(super) fn sizes<T: Element>(packed: &Tensor<T>) -> [usize; 3] {
    [0, 1, 2].map(|axis| size(packed, axis))
}

impl<T: Element> AttentionBackend<T> for PagedDecode {
    fn name(&self) -> &'static str {
        "paged_decode"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let takes = metadata.state() == AttentionState::DecodeOnly
            && causality == Causality::Causal
            && first.learnable_sink.is_none();
        let allowed = "one token a request, causal, without window and sinks";
        let fix = "register a backend for packed queries behind this one";
        check_single_tokens(step, first, takes, &rules::BACKEND_DECODE, [allowed, fix])?;
        let layout = layout(first.cache);
        let query = rows(layout, first.query)?;
        let lengths = CallLengths::Batched {
            q: None,
            kv: metadata.kv_lengths(),
        };
        let call = step.shape.call(layout);
        let inputs = first.cached_keys(&query, step.block_table);
        let plan = lengths.apply(call).plan(inputs)?;
        Ok(Box::new(DecodeStep { plan, layout }))
    }
}

impl<T: Element> StepPlan<T> for DecodeStep {
    fn memory(&self) -> StepMemory {
        StepMemory::of_calls([self.plan.workspace_bytes()])
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        launch_into_empty(self, step, layer)
    }

    fn launch_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let query = rows(self.layout, layer.query)?;
        let inputs = layer.cached_keys(&query, step.block_table);
        let mut output = attention_alone(rows(self.layout, output)?);
        Ok(self.plan.launch_into(step.stream, inputs, &mut output)?)
    }
}
