//! Prefill after a cached prefix: the new tokens dense, the cached ones paged, merged.

use ascend_attention::Element;
use ascend_attention::attention::PerRequest;
use ascend_attention::merge::PartsOfRows;

use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, merges_sinks};

/// The bits that name the two calls in [`PartsOfRows`].
const NEW: u16 = 1;
const CACHED: u16 = 2;

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
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
