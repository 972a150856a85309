//! Prefill after a cached prefix: the new tokens dense, the cached ones paged, merged.

use ascend_attention::Element;
use ascend_attention::attention::PerRequest;
use ascend_attention::merge::PartsOfRows;

use crate::error::Result;
use crate::rules;

use super::backend::AttentionBackend;
use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, merges_sinks};

/// Three calls a layer for steps with new tokens after cached ones: the step's tokens among themselves, from the
/// packed keys, under the step's mask; all of them over the tokens cached before, paged, without a mask; and a merge
/// on the device by their log-sum-exps. Requests without cached tokens are in the same batch and are not merged.
///
/// The new keys are read where the model left them, and no call has both a mask and a cache. Steps that only decode
/// and steps without cached tokens are refused, as are windows that hide keys: each row would see other cached keys.
/// Sinks are counted by the call over the new tokens on Ascend 950, where its log-sum-exps are known to include them,
/// and refused elsewhere. [`FusedAttention`](crate::FusedAttention) lists what packed calls take in each release.
#[derive(Clone, Copy, Debug, Default)]
pub struct CascadePrefill;

/// The bits that name the two calls in [`PartsOfRows`].
const NEW: u16 = 1;
const CACHED: u16 = 2;

impl<T: Element> AttentionBackend<T> for CascadePrefill {
    fn name(&self) -> &'static str {
        "cascade_prefill"
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let metadata = step.metadata;
        let causality = step.mask.causality()?.over(metadata.longest());
        let requests: Vec<_> = metadata.new_and_cached().collect();
        let behind = requests.iter().any(|(new, cached)| *new > 1 && *cached > 0);
        let windowed = causality.window().is_some();
        if !behind || windowed || !merges_sinks(step, first)? {
            let given = format_args!("{:?}, {causality:?}, {} sinks", metadata.state(), first.describe_sinks());
            let allowed = "a request with several new tokens behind cached ones, no window that hides keys, and sinks \
                           on Ascend 950 alone";
            return Err(rules::BACKEND_CASCADE.broken(given, allowed).into());
        }
        let mask = causality.mask(&step.stream.device().masks())?;
        let ends = metadata.q_ends();
        // Every row has a key among the new ones, so that their call counts the sinks.
        let new = StepCall::over_own_keys(ends.clone()).mask(mask);
        let before = requests.iter().map(|(_, cached)| *cached).collect();
        let cached = StepCall::packed(ends.clone(), PerRequest::new(before)?).without_sinks();
        let rows = requests
            .iter()
            .map(|(new, cached)| PartsOfRows { rows: *new, parts: if *cached > 0 { NEW | CACHED } else { NEW } });
        Ok(StepProgram::new([new, cached]).merged(rows.collect()))
    }
}
