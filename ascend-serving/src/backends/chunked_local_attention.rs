//! Attention within chunks, by virtual requests.

use ascend_attention::attention::PerRequest;
use ascend_attention::{Element, Violation};

use crate::batch::LayerMask;
use crate::causality::Causality;
use crate::error::Result;
use crate::local_attention::LocalBatch;
use crate::rules;

use super::backend::AttentionBackend;
use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext};

/// Steps of every kind under [`Causality::Chunk`]: one packed call (TND) a layer, in which each piece of a request
/// within one chunk is a request of its own, with the blocks of that chunk ([`LocalBatch`]). The pieces are in the
/// order of the tokens, so that nothing is copied. Sinks count once for each token, as in any call.
///
/// The pieces get a block table of their own, made once a step. A chunk is a whole number of blocks
/// ([`CHUNK_SIZE`](crate::rules::CHUNK_SIZE)). Steps under other masks are refused, so that the ordinary backends
/// serve them. [`FusedAttention`](crate::FusedAttention) lists what packed calls take in each release.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChunkedLocalAttention;

impl ChunkedLocalAttention {
    pub(super) const NAME: &'static str = "chunked_local";
}

impl<T: Element> AttentionBackend<T> for ChunkedLocalAttention {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn is_batch_invariant(&self, _: &StepContext<'_>, _: &LayerTensors<'_, T>) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let LayerMask::Causality(Causality::Chunk(chunk)) = step.mask else {
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
        let local =
            LocalBatch::new(&PerRequest::new(new)?, metadata.kv_lengths(), metadata.table(), block_size, chunk.get())?;
        let ends = local.q_lengths.cumulative()?;
        let mask = Causality::Causal.mask(&step.stream.device().masks())?;
        let call = match metadata.state().reads_cache() {
            true => StepCall::packed(ends, local.kv_lengths.clone()).blocks(local.rows()),
            false => StepCall::over_own_keys(ends),
        };
        Ok(call.mask(mask).into())
    }
}
