//! Attention within chunks, by virtual requests.

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Plan, Tensor, Violation};

use crate::batch::{Causality, MaskKind};
use crate::error::Result;
use crate::local_attention::LocalBatch;
use crate::rules;

use super::backend::{AttentionBackend, LayerTensors, StepContext, StepPlan, attention_alone};
use super::step_memory::{StepMemory, table_bytes};

/// Steps of every kind under [`Causality::Chunk`]: one packed call (TND) a layer, in which each piece of a request
/// within one chunk is a request of its own, with the blocks of that chunk ([`LocalBatch`]). The pieces are in the
/// order of the tokens, so that nothing is copied. Sinks count once for each token, as in any call.
///
/// The pieces get a block table of their own, made once a step. A chunk is a whole number of blocks
/// ([`CHUNK_SIZE`](crate::rules::CHUNK_SIZE)). Steps under other masks are refused, so that the ordinary backends
/// serve them. [`Fused`](crate::Fused) lists what packed calls take in each release.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChunkedLocal;

impl ChunkedLocal {
    pub(super) const NAME: &'static str = "chunked_local";
}

#[derive(Debug)]
struct ChunkedStep {
    plan: Plan,
    /// The blocks of the pieces; `None` where the call reads this step's keys.
    block_table: Option<BlockTable>,
}

impl<T: Element> AttentionBackend<T> for ChunkedLocal {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let MaskKind::Causality(Causality::Chunk(chunk)) = step.mask else {
            return Err(Violation::new(
                &rules::BACKEND_CHUNK,
                format_args!("{:?}", step.mask),
                "chunks",
                "register a backend for other masks behind this one",
            )
            .into());
        };
        let metadata = step.metadata;
        let block_size = metadata.settings().block_size();
        let new: Vec<usize> = metadata.new_and_cached().map(|(new, _)| new).collect();
        let local = LocalBatch::new(
            &PerRequest::new(new)?,
            metadata.kv_lengths(),
            metadata.table(),
            block_size,
            chunk.get(),
        )?;
        let ends = local.q_lengths.cumulative()?;
        let block_table = match metadata.state().reads_cache() {
            true => Some(BlockTable::from_rows(
                step.stream,
                &local.rows(),
                block_size,
            )?),
            false => None,
        };
        let lengths = match block_table {
            Some(_) => CallLengths::PackedPaged {
                q: &ends,
                kv: &local.kv_lengths,
            },
            None => CallLengths::PackedDense {
                q: &ends,
                kv: &ends,
            },
        };
        let mask = Causality::Causal.mask(&step.stream.device().masks())?;
        let call = lengths.apply(step.shape.call(Layout::Tnd).mask(mask));
        let plan = call.plan(first.step_inputs(block_table.as_ref()))?;
        Ok(Box::new(ChunkedStep { plan, block_table }))
    }
}

impl<T: Element> StepPlan<T> for ChunkedStep {
    fn memory(&self) -> StepMemory {
        StepMemory::of_calls([self.plan.workspace_bytes()])
            .holding(self.block_table.as_ref().map(table_bytes))
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        let inputs = layer.step_inputs(self.block_table.as_ref());
        Ok(self.plan.launch(step.stream, inputs)?.attention)
    }

    fn launch_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = layer.step_inputs(self.block_table.as_ref());
        let mut output = attention_alone(output.clone());
        Ok(self.plan.launch_into(step.stream, inputs, &mut output)?)
    }
}
