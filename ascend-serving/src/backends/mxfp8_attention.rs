//! Steps over a cache of MXFP8, with queries that are MXFP8, too.

use std::fmt;
use std::sync::Mutex;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs};
use ascend_attention::spec::Layout;
use ascend_attention::spec::minifloat::{Float8E4M3Fn, Float8E8M0};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::{Element, Output, Plan, Stream, Tensor, Violation};

use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::kv::{GROUP, GroupScales, QuantisedLayer, host_numbers, quantise_mxfp8};
use crate::rules;
use crate::sharing::lock;

use super::paged_decode::sizes;
use super::program::{StepProgram, StepStage};
use super::step_context::{LayerTensors, StepContext, check_quantised_mask};
use super::step_memory::{StepMemory, tensor_bytes};

/// The queries of a layer in groups of 32.
struct MxFp8Query {
    /// Elements, `[tokens, N, D]`.
    floats: Tensor<Float8E4M3Fn>,
    /// Shared scales, powers of two: `[tokens, N, D/64, 2]`, or by key heads `[Nkv, tokens, N/Nkv, D/64, 2]`.
    powers: Tensor<Float8E8M0>,
}

impl MxFp8Query {
    /// Allocates memory for queries like these, for a step whose longest request has `longest` new tokens.
    fn empty<T: Element>(step: &StepContext<'_>, like: &Tensor<T>, longest: usize) -> Result<Self> {
        let device = step.stream.device();
        let [tokens, heads, dim] = sizes(like);
        let (pairs, kv_heads) = (dim / (2 * GROUP), step.shape.kv_heads);
        let of_key_head = heads.checked_div(kv_heads).unwrap_or(0);
        let [rows, of_each] = [longest, of_key_head].map(|x| i64::try_from(x).unwrap_or(i64::MAX));
        let powers = match FiaCall::mxfp8_query_by_key_heads(rows, of_each) {
            true => Tensor::empty(device, [kv_heads, tokens, of_key_head, pairs, 2])?,
            false => Tensor::empty(device, [tokens, heads, pairs, 2])?,
        };
        Ok(Self { floats: Tensor::empty(device, [tokens, heads, dim])?, powers })
    }

    /// Waits for the queries of a layer and quantises them.
    fn fill<T: Element>(&self, stream: &Stream, query: &Tensor<T>) -> Result<()> {
        if query.shape() != self.floats.shape() {
            return Err(Error::invalid(
                "query",
                query.desc(),
                format_args!("{:?}, as the step was planned", self.floats.shape()),
            )
            .fix("bring the rows that the step was planned for"));
        }
        let (floats, mut powers) = quantise_mxfp8(&host_numbers(stream, query)?);
        if let &[kv_heads, tokens, _, _, _] = self.powers.shape() {
            // From `[tokens, N, D/32]` to `[Nkv, tokens, N/Nkv, D/32]`.
            let rows = tokens * kv_heads;
            let of_key_head = powers.len().checked_div(rows).unwrap_or(0);
            let by_key_head = (0..kv_heads).flat_map(|kv_head| {
                let chunks = powers.chunks(of_key_head.max(1));
                chunks.skip(kv_head).step_by(kv_heads.max(1)).flatten()
            });
            powers = by_key_head.copied().collect();
        }
        self.floats.overwrite_bytes(stream, &floats)?;
        Ok(self.powers.overwrite_bytes(stream, &powers)?)
    }

    fn inputs<'a, T: Element>(
        &'a self,
        block_table: &'a BlockTable,
        cache: &'a QuantisedLayer,
        scales: &'a GroupScales,
    ) -> Inputs<'a, T> {
        Inputs::of_any(&self.floats, cache.key(), cache.value())
            .paged(block_table)
            .quantisation(scales.quantisation(&self.powers))
    }
}

/// The call of a step.
struct MxFp8Step {
    plan: Plan,
    block_table: BlockTable,
    /// The quantised queries, used by one layer after the other.
    query: Mutex<MxFp8Query>,
}

impl fmt::Debug for MxFp8Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = &mut f.debug_struct("MxFp8Step");
        step.field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// The cache of a layer with its shared scales; a cache that is not MXFP8 is refused.
fn mxfp8_cache<'a, T: Element>(
    layer: &LayerTensors<'a, T>,
) -> Result<(&'a QuantisedLayer, &'a GroupScales), Violation> {
    let found = layer.quantised.and_then(|cache| Some((cache, cache.of_groups()?)));
    found.ok_or_else(|| {
        Violation::new(
            &rules::BACKEND_QUANTISED,
            "a cache without groups",
            "a cache of MXFP8",
            "make the cache by `PagedKvCache::mxfp8`, or add another backend",
        )
    })
}

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    let (cache, scales) = mxfp8_cache(first)?;
    check_quantised_mask(step)?;
    let causality = step.mask.causality()?;
    if causality != Causality::Causal || first.learnable_sink.is_some() {
        return Err(rules::BACKEND_MX_FP8
            .broken(
                format_args!("{causality:?}, {} sinks", first.describe_sinks()),
                "causal layers of MXFP8 without window and sinks",
            )
            .into());
    }
    let longest = step.metadata.new_and_cached().map(|(new, _)| new).max();
    let query = MxFp8Query::empty(step, first.query, longest.unwrap_or(0))?;
    let masks = step.stream.device().masks();
    let lengths = CallLengths::PackedPaged { q: step.metadata.q_ends(), kv: step.metadata.kv_lengths() };
    let call = step.shape.call(Layout::Tnd).mask(causality.mask(&masks)?);
    let call = lengths.apply(call).out_dtype(T::DTYPE);
    let plan = call.plan(query.inputs::<T>(step.block_table, cache, scales))?;
    Ok(StepProgram::new([]).stage(MxFp8Step { plan, block_table: step.block_table.clone(), query: Mutex::new(query) }))
}

impl<T: Element> StepStage<T> for MxFp8Step {
    fn memory(&self) -> StepMemory {
        let query = lock(&self.query);
        let held = [tensor_bytes(&query.floats), tensor_bytes(&query.powers)];
        StepMemory::of_calls([self.plan.workspace_bytes()]).holding(held)
    }

    fn reads_own_keys(&self) -> bool {
        false
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        let (cache, scales) = mxfp8_cache(layer)?;
        // The lock is held until the call is queued; the next layer waits for it before it writes its own queries.
        let query = lock(&self.query);
        query.fill(stream, layer.query)?;
        let inputs = query.inputs(&self.block_table, cache, scales);
        let mut output = Output::from(output.clone());
        Ok(self.plan.launch_into(stream, inputs, &mut output)?)
    }
}
