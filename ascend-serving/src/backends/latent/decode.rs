//! Absorbed queries of multi-head latent attention, which read the cache as it is.

use ascend_attention::attention::{BlockTable, CallLengths, Inputs};
use ascend_attention::spec::Layout;
use ascend_attention::{CausalOrigin, Element, Output, Plan, Stream, Tensor};

use crate::backends::paged_decode::sizes;
use crate::backends::{StepContext, StepMemory};
use crate::batch::{AttentionState, StepPart};
use crate::error::Result;
use crate::kv::LayerCache;

/// The call of absorbed queries over the cache.
#[derive(Debug)]
pub(super) struct MlaDecode {
    plan: Plan,
    layout: Layout,
    /// The requests' rows of the step's table.
    block_table: BlockTable,
}

impl MlaDecode {
    /// The device memory that the call needs. Its table is part of the step's.
    pub(super) fn memory(&self) -> StepMemory {
        StepMemory::of_calls([self.plan.workspace_bytes()])
    }

    /// Prepares the call for the requests of a part, with their queries `[tokens, N, 512]` and rotary parts.
    pub(super) fn plan<T: Element>(
        step: &StepContext<'_>,
        part: &StepPart,
        cache: &LayerCache<T>,
        queries: [&Tensor<T>; 2],
    ) -> Result<Self> {
        let drafted = step.metadata.state() == AttentionState::SpecDecoding;
        let single = part.is_single() && !drafted;
        // The operator reads an NZ cache for BSND queries alone, which are the same bytes.
        let layout = match (single, cache.key.shape().len()) {
            (false, _) => Layout::TndNtd,
            (true, 5) => Layout::BsndNbsd,
            (true, _) => Layout::BnsdNbsd,
        };
        let kv = &part.kv_lengths;
        let q = &part.q_ends;
        let (lengths, mask) = match single {
            true => (CallLengths::Batched { q: None, kv }, None),
            false => {
                let masks = step.stream.device().masks();
                let mask = masks.causal(CausalOrigin::RightDown)?;
                (CallLengths::PackedPaged { q, kv }, Some(mask))
            }
        };
        let call = lengths.apply(step.shape.call(layout));
        let call = match mask {
            Some(mask) => call.mask(mask),
            None => call,
        };
        let block_table = part.block_table(step.block_table)?;
        let queries = views(layout, queries)?;
        let plan = call.plan(inputs(cache, &queries, &block_table))?;
        Ok(Self {
            plan,
            layout,
            block_table,
        })
    }

    /// Queues the call of a layer, into `[N, tokens, 512]`.
    pub(super) fn launch<T: Element>(
        &self,
        stream: &Stream,
        cache: &LayerCache<T>,
        queries: [&Tensor<T>; 2],
        into: &Tensor<T>,
    ) -> Result<()> {
        let [heads, tokens, dim] = sizes(into);
        let mut output = Output {
            attention: match self.layout {
                Layout::TndNtd => into.clone(),
                _ => into.reshape([heads, tokens, 1, dim])?,
            },
            softmax_lse: None,
        };
        let queries = views(self.layout, queries)?;
        let inputs = inputs(cache, &queries, &self.block_table);
        Ok(self.plan.launch_into(stream, inputs, &mut output)?)
    }
}

/// Packed queries and their rotary parts, `[tokens, N, D]`, in the axes of a layout.
fn views<T: Element>(layout: Layout, queries: [&Tensor<T>; 2]) -> Result<[Tensor<T>; 2]> {
    let view = |tensor: &Tensor<T>| {
        let [tokens, heads, dim] = sizes(tensor);
        match layout {
            Layout::BnsdNbsd => tensor.reshape([tokens, heads, 1, dim]),
            Layout::BsndNbsd => tensor.reshape([tokens, 1, heads, dim]),
            _ => Ok(tensor.clone()),
        }
    };
    let [query, rope] = queries;
    Ok([view(query)?, view(rope)?])
}

/// The latents are keys and values.
fn inputs<'a, T: Element>(
    cache: &'a LayerCache<T>,
    [query, rope]: &'a [Tensor<T>; 2],
    block_table: &'a BlockTable,
) -> Inputs<'a, T> {
    let (latents, ropes) = (&cache.key, &cache.value);
    Inputs::new(query, latents, latents)
        .rope(rope, ropes)
        .paged(block_table)
}
