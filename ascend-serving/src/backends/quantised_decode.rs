//! Decoding steps over an INT8 cache.

use ascend_attention::attention::{CallLengths, Inputs};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, InnerPrecise, Output, Plan, Tensor};

use crate::batch::Causality;
use crate::error::Result;
use crate::kv::QuantisedLayer;
use crate::refusal::{Rule, refused};

use super::backend::{AttentionBackend, LayerTensors, StepContext, StepPlan, take_quantised};
use super::paged_decode::{layout, rows, sizes};

/// One call (BSH; BNSD over a BnNBsD cache) of one query row a request over a paged cache of INT8, whose integers the operator
/// multiplies by their scales as it reads them. For steps of one token a request, drafting or not, and layers without a window
/// or sinks; the others are for [`QuantisedPrefill`](crate::QuantisedPrefill), to be registered behind this one.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuantisedDecode;

#[derive(Debug)]
struct DecodeStep {
    plan: Plan,
    layout: Layout,
}

fn inputs<'a, T: Element>(
    query: &'a Tensor<T>,
    step: &StepContext<'a>,
    of: &'a QuantisedLayer,
) -> Inputs<'a> {
    Inputs::new(query, &of.cache.key, &of.cache.value)
        .paged(step.block_table)
        .quantisation(of.quantisation())
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
        let of = take_quantised(first)?;
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let plain = causality == Causality::Causal && first.learnable_sink.is_none();
        let requests = metadata.table().requests();
        let single = metadata.tokens() == requests;
        if !metadata.state().reads_cache() || !plain || !single {
            return Err(refused(
                Rule::BackendDecode,
                format_args!(
                    "{:?} of {} tokens in {requests} requests, {causality:?}, {} sinks",
                    metadata.state(),
                    metadata.tokens(),
                    first.with_sinks(),
                ),
                "one token a request behind cached ones, causal, without window and sinks",
                "register `QuantisedPrefill` behind this one",
            )
            .into());
        }
        let layout = layout(&of.cache);
        let query = rows(layout, first.query)?;
        let lengths = CallLengths::Batched {
            q: None,
            kv: metadata.kv_lengths(),
        };
        // The kernel of NZ caches has no other.
        let precise = match of.cache.key.shape().len() {
            5 => InnerPrecise::HighPerformance,
            _ => InnerPrecise::HighPrecision,
        };
        let call = lengths.apply(step.shape.call(layout).inner_precise(precise));
        let plan = call.plan_with(&inputs(&query, step, of))?;
        Ok(Box::new(DecodeStep { plan, layout }))
    }
}

impl<T: Element> StepPlan<T> for DecodeStep {
    fn run(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Output<T>> {
        let mut output = self.plan.output()?;
        output.attention = output.attention.reshape(sizes(layer.query))?;
        self.run_into(step, layer, &mut output)?;
        Ok(output)
    }

    fn run_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        let of = take_quantised(layer)?;
        let query = rows(self.layout, layer.query)?;
        let mut output = Output {
            attention: rows(self.layout, &output.attention)?,
            softmax_lse: output.softmax_lse.clone(),
        };
        let inputs = inputs(&query, step, of);
        Ok(self
            .plan
            .launch_with_into(step.stream, &inputs, &mut output)?)
    }
}
