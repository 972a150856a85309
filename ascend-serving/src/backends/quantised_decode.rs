//! Decoding steps over a quantised cache.

use ascend_attention::attention::{BlockTable, CallLengths, Inputs};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, FusedInferAttention, InnerPrecise, Plan, Tensor};

use crate::batch::Causality;
use crate::error::Result;
use crate::kv::QuantisedLayer;
use crate::rules;

use super::backend::{
    AttentionBackend, AttentionShape, LayerTensors, StepContext, StepPlan, attention_alone,
    check_quantised_mask, check_single_tokens, launch_into_empty, quantised_cache,
};
use super::paged_decode::{layout, rows};
use super::step_memory::StepMemory;

/// One call (BSH; BNSD over a BnNBsD cache) of one query row a request over a quantised paged cache; the operator
/// multiplies the stored numbers by their scales as it reads them. It serves steps of one token a request, drafting
/// or not, and layers without a window or sinks. Register [`QuantisedPrefill`](crate::QuantisedPrefill) after it for
/// the other steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuantisedDecode;

/// The call of the first requests of a step, which have one token each.
#[derive(Debug)]
pub(super) struct SingleTokens {
    plan: Plan,
    layout: Layout,
    requests: usize,
    /// Their rows of the step's table.
    block_table: BlockTable,
}

impl SingleTokens {
    /// Prepares the call of the first `requests` requests.
    pub(super) fn plan<T: Element>(
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        of: &QuantisedLayer,
        requests: usize,
    ) -> Result<Self> {
        let (layout, call) = single_rows(step.shape, of);
        let query = rows(layout, &first.query.narrow(0, 0..requests)?)?;
        let block_table = step.block_table.rows(0..requests)?;
        let (kv, _) = step.metadata.kv_lengths().split_at(requests);
        let lengths = CallLengths::Batched { q: None, kv: &kv };
        let call = lengths.apply(call);
        let plan = call.plan(single_row_inputs(&query, &block_table, of))?;
        Ok(Self {
            plan,
            layout,
            requests,
            block_table,
        })
    }
}

/// The call of one row a request over a quantised cache, and the layout of its query.
pub(crate) fn single_rows(
    shape: AttentionShape,
    of: &QuantisedLayer,
) -> (Layout, FusedInferAttention) {
    let layout = layout(&of.cache);
    // The kernel for NZ caches has `HighPerformance` alone.
    let precise = match of.cache.key.shape().len() {
        5 => InnerPrecise::HighPerformance,
        _ => InnerPrecise::HighPrecision,
    };
    (layout, shape.call(layout).inner_precise(precise))
}

/// The inputs of the call.
pub(crate) fn single_row_inputs<'a, T: Element>(
    query: &'a Tensor<T>,
    block_table: &'a BlockTable,
    of: &'a QuantisedLayer,
) -> Inputs<'a, T> {
    Inputs::new(query, of.key(), of.value())
        .paged(block_table)
        .quantisation(of.quantisation().unwrap_or_default())
}

impl<T: Element> AttentionBackend<T> for QuantisedDecode {
    fn name(&self) -> &'static str {
        "quantised_decode"
    }

    fn reads_quantised(&self) -> bool {
        true
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let of = quantised_cache(first)?;
        check_quantised_mask(step)?;
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let takes = metadata.state().reads_cache()
            && causality == Causality::Causal
            && first.learnable_sink.is_none();
        let allowed = "one token a request behind cached ones, causal, without window and sinks";
        let fix = "register `QuantisedPrefill` behind this one";
        check_single_tokens(step, first, takes, &rules::BACKEND_DECODE, [allowed, fix])?;
        let requests = metadata.table().requests();
        let single = SingleTokens::plan(step, first, of, requests)?;
        Ok(Box::new(single))
    }
}

impl<T: Element> StepPlan<T> for SingleTokens {
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
        let of = quantised_cache(layer)?;
        // Where prefills follow, these are the first rows.
        let first = |packed: &Tensor<T>| rows(self.layout, &packed.narrow(0, 0..self.requests)?);
        let query = first(layer.query)?;
        let mut output = attention_alone(first(output)?);
        let inputs = single_row_inputs(&query, &self.block_table, of);
        Ok(self.plan.launch_into(step.stream, inputs, &mut output)?)
    }
}
