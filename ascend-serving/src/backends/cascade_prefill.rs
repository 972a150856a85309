//! Prefill after a cached prefix: the new tokens dense, the cached ones paged, merged.

use ascend_attention::attention::{CallLengths, Inputs, PerRequest};
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Mask, Output, Plan, Tensor, Violation};

use crate::error::Result;
use crate::rules;

use super::backend::{
    AttentionBackend, LayerTensors, StepContext, StepPlan, merge_parts, merges_sinks,
};
use super::step_memory::{StepMemory, output_bytes};

/// Three calls a layer for steps with new tokens after cached ones: the step's tokens among themselves, from the
/// packed keys, under the step's mask; all of them over the tokens cached before, paged, without a mask; and a merge
/// on the device by their log-sum-exps. Requests without cached tokens are in the same batch and are not merged.
///
/// The new keys are read where the model left them, and no call has both a mask and a cache. Steps that only decode
/// and steps without cached tokens are refused, as are windows that hide keys: each row would see other cached keys.
/// Sinks are counted by the call over the new tokens on Ascend 950, where its log-sum-exps are known to include them,
/// and refused elsewhere. [`Fused`](crate::Fused) lists what packed calls take in each release.
#[derive(Clone, Copy, Debug, Default)]
pub struct CascadePrefill;

#[derive(Debug)]
struct CascadeStep {
    new: Plan,
    cached: Plan,
    merge: RowMergePlan,
    /// Bytes of the outputs of both calls and of the merged output.
    parts_bytes: usize,
}

/// The bits that name the two calls in [`PartsOfRows`].
const NEW: u16 = 1;
const CACHED: u16 = 2;

impl<T: Element> AttentionBackend<T> for CascadePrefill {
    fn name(&self) -> &'static str {
        "cascade_prefill"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let metadata = step.metadata;
        let causality = step.mask.causality()?.over(metadata.longest());
        let requests: Vec<_> = metadata.new_and_cached().collect();
        let behind = requests.iter().any(|(new, cached)| *new > 1 && *cached > 0);
        let windowed = causality.window().is_some();
        if !behind || windowed || !merges_sinks(step, first)? {
            return Err(Violation::new(
                &rules::BACKEND_CASCADE,
                format_args!(
                    "{:?}, {causality:?}, {} sinks",
                    metadata.state(),
                    first.with_sinks()
                ),
                "a request with several new tokens behind cached ones, no window that hides keys, and sinks on Ascend 950 alone",
                "register a backend for packed queries behind this one",
            )
            .into());
        }
        let mask = causality.mask(&step.stream.device().masks())?;
        let call = step.shape.call(Layout::Tnd).softmax_lse(true);
        let ends = metadata.q_ends();
        let new = CallLengths::PackedDense { q: ends, kv: ends };
        let new = new.apply(call.clone().mask(mask)).plan(own(first))?;
        let before = requests.iter().map(|(_, cached)| *cached).collect();
        let cached = CallLengths::PackedPaged {
            q: ends,
            kv: &PerRequest::new(before)?,
        };
        let cached = cached.apply(call.mask(Mask::none()));
        let cached = cached.plan(paged(step, first))?;
        let rows: Vec<PartsOfRows> = requests
            .iter()
            .map(|(new, cached)| PartsOfRows {
                rows: *new,
                parts: if *cached > 0 { NEW | CACHED } else { NEW },
            })
            .collect();
        let (one, other): (Output<T>, Output<T>) = (new.output()?, cached.output()?);
        let merge = MergeState::new(Layout::Tnd)
            .rows(&rows)
            .plan(&[Part::of(&one)?, Part::of(&other)?])?;
        let parts_bytes = output_bytes(&one).saturating_mul(3);
        Ok(Box::new(CascadeStep {
            new,
            cached,
            merge,
            parts_bytes,
        }))
    }
}

/// The inputs of the call over the new tokens. Every row has a key there, so that this call counts the sinks.
fn own<'a, T: Element>(layer: &LayerTensors<'a, T>) -> Inputs<'a, T> {
    layer.with_sink(layer.own_keys())
}

fn paged<'a, T: Element>(step: &StepContext<'a>, layer: &LayerTensors<'a, T>) -> Inputs<'a, T> {
    layer.cached_keys(layer.query, step.block_table)
}

impl<T: Element> StepPlan<T> for CascadeStep {
    fn memory(&self) -> StepMemory {
        let Self {
            new,
            cached,
            merge,
            parts_bytes,
        } = self;
        let calls = [
            new.workspace_bytes(),
            cached.workspace_bytes(),
            merge.workspace_bytes(),
        ];
        StepMemory::of_calls(calls).taking([*parts_bytes])
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        let new: Output<T> = self.new.launch(step.stream, own(layer))?;
        let cached = self.cached.launch(step.stream, paged(step, layer))?;
        merge_parts(&self.merge, step, &[new, cached])
    }
}
