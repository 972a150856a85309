//! The settings and requests of this folder's tests.

use crate::kv::PadPolicy;

use super::{BatchRequest, BatchSettings, Causality, StatePolicy};

/// Chunks beside decodes, over 64 blocks of 4 tokens.
pub(super) fn settings() -> BatchSettings {
    BatchSettings {
        blocks: 64,
        block_size: 4,
        pad: PadPolicy::SkipNegative,
        causality: Causality::Causal,
        policy: StatePolicy {
            chunked_prefill: true,
            drafting: None,
        },
    }
}

/// A request with these numbers and nothing else set.
pub(super) fn request(cached: usize, new: usize, row: &[usize]) -> BatchRequest<'_> {
    BatchRequest::in_row(row, cached, new)
}
