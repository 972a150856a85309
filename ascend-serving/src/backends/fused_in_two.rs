//! Mixed steps by two packed calls, one for those that decode and one for those that prefill.

use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Plan, Tensor, Violation};

use crate::batch::StepPart;
use crate::error::Result;
use crate::rules;

use super::backend::{
    AttentionBackend, LayerTensors, StepContext, StepPlan, attention_alone, launch_into_empty,
};
use super::step_memory::StepMemory;

/// Two packed calls (TND) a layer over the paged cache, for steps that mix decoding with prefill: one of the decodes,
/// then one of the rest, with lengths that begin anew. vLLM-Ascend computes such steps so on Ascend 950 (A5), and in
/// one call, as [`Fused`](crate::Fused) does, elsewhere.
///
/// The decodes come first in the batch. Other steps are refused: register a backend for them after this one.
#[derive(Clone, Copy, Debug, Default)]
pub struct FusedInTwo;

/// One of the two calls.
#[derive(Debug)]
struct Part {
    plan: Plan,
    rows: Range<usize>,
    block_table: BlockTable,
}

#[derive(Debug)]
struct TwoCalls([Part; 2]);

impl<T: Element> AttentionBackend<T> for FusedInTwo {
    fn name(&self) -> &'static str {
        "fused_in_two"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let metadata = step.metadata;
        let (decodes, prefills) = (metadata.decodes(), metadata.prefills());
        let mixed = metadata.state().reads_cache() && decodes > 0 && prefills > 0;
        if !mixed || !metadata.decodes_lead() {
            return Err(Violation::new(
                &rules::BACKEND_TWO_CALLS,
                format_args!(
                    "{:?} of {decodes} decodes and {prefills} prefills{}",
                    metadata.state(),
                    if metadata.decodes_lead() {
                        ""
                    } else {
                        ", one of the prefills in front of a decode"
                    },
                ),
                "decodes, then prefills, at least one of them behind cached tokens",
                "put the decodes first, and register a backend for other steps behind this one",
            )
            .into());
        }
        let masks = step.stream.device().masks();
        let mask = step.mask.causality()?.mask(&masks)?;
        let part = |of: &StepPart| -> Result<Part> {
            let (q, kv) = (&of.q_ends, &of.kv_lengths);
            let block_table = of.block_table(step.block_table)?;
            let rows = of.tokens.clone();
            let query = first.query.narrow(0, rows.clone())?;
            let call = step.shape.call(Layout::Tnd).mask(mask.clone());
            let call = CallLengths::PackedPaged { q, kv }.apply(call);
            let plan = call.plan(first.with_sink(first.cached_keys(&query, &block_table)))?;
            Ok(Part {
                plan,
                rows,
                block_table,
            })
        };
        let [decodes, others] = StepPart::split(metadata);
        Ok(Box::new(TwoCalls([part(&decodes)?, part(&others)?])))
    }
}

impl<T: Element> StepPlan<T> for TwoCalls {
    fn memory(&self) -> StepMemory {
        StepMemory::of_calls(self.0.iter().map(|part| part.plan.workspace_bytes()))
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
        for part in &self.0 {
            let query = layer.query.narrow(0, part.rows.clone())?;
            let inputs = layer.with_sink(layer.cached_keys(&query, &part.block_table));
            let mut rows = attention_alone(output.narrow(0, part.rows.clone())?);
            part.plan.launch_into(step.stream, inputs, &mut rows)?;
        }
        Ok(())
    }
}
