//! Steps of requests with equally many new tokens by one call with a batch axis.

use ascend_attention::Element;
use ascend_attention::spec::Layout;

use crate::error::Result;
use crate::rules;

use super::backend::AttentionBackend;
use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext};

/// One call (BSND) a layer over the paged cache, for steps behind cached tokens whose requests add equally many: drafts
/// that are verified, or one prompt. It takes causal layers and windows, and leaves sinks to packed calls.
///
/// On CANN 8.1 packed calls do not take FLOAT16 and this call does, so drafts are verified without the copies that
/// [`PromptAndIncre`](crate::PromptAndIncre) makes.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchedQueries;

impl<T: Element> AttentionBackend<T> for BatchedQueries {
    fn name(&self) -> &'static str {
        "batched_queries"
    }

    fn is_batch_invariant(&self, _: &StepContext<'_>, _: &LayerTensors<'_, T>) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let metadata = step.metadata;
        let mask = step.mask.causality()?;
        let rows = metadata.q_ends().per_request();
        let alike = rows.lengths().windows(2).all(|pair| pair.first() == pair.last());
        if !alike || !metadata.state().reads_cache() || first.learnable_sink.is_some() {
            return Err(rules::BACKEND_STEP
                .broken(
                    format_args!(
                        "{:?} of {} tokens in {} requests, {} sinks",
                        metadata.state(),
                        metadata.tokens(),
                        rows.lengths().len(),
                        first.describe_sinks()
                    ),
                    "as many new tokens in each request, behind cached ones, without sinks",
                )
                .into());
        }
        let mask = mask.mask(&step.stream.device().masks())?;
        let lengths = metadata.kv_lengths().clone();
        Ok(StepCall::batched(Layout::Bsnd, lengths).mask(mask).into())
    }
}
