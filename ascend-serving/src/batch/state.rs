//! What kind of step a batch is.

use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use serde::{Deserialize, Serialize};

use super::request::BatchRequest;

/// The kind of a step: which tensors its attention reads, and which operators can serve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AttentionState {
    /// No request has anything cached: attention reads the keys of this step, packed.
    PrefillNoCache,
    /// Some keys are cached already, and prompts are computed whole.
    PrefillCacheHit,
    /// Every request adds one token, not all of them their first, in an engine without drafts.
    DecodeOnly,
    /// Prompts in parts, mixed with decoding.
    ChunkedPrefill,
    /// With [`Drafting::Mtp`], every request adds one certain token and verifies its drafts, of which it may have none.
    /// Drafts of other engines are verified by steps of [`ChunkedPrefill`](Self::ChunkedPrefill).
    SpecDecoding,
}

impl AttentionState {
    /// Every kind of step.
    pub const ALL: [Self; 5] =
        [Self::PrefillNoCache, Self::PrefillCacheHit, Self::DecodeOnly, Self::ChunkedPrefill, Self::SpecDecoding];

    /// Whether attention reads the paged cache rather than this step's keys.
    pub fn reads_cache(self) -> bool {
        self != Self::PrefillNoCache
    }
}

/// How drafts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Drafting {
    /// By the model's own extra layers (multi-token prediction).
    Mtp,
    /// By another model or a look-up.
    Other,
}

/// The settings of an engine that decide the kind of a step. By default prompts are computed in parts, without drafts
/// of the model's own layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StatePolicy {
    /// Whether prompts are computed in parts.
    pub chunked_prefill: bool,
    /// How the drafts that are verified were made; `None` without drafts.
    pub drafting: Option<Drafting>,
}

impl Default for StatePolicy {
    fn default() -> Self {
        Self::new(true, None)
    }
}

impl StatePolicy {
    /// A policy of these settings.
    pub const fn new(chunked_prefill: bool, drafting: Option<Drafting>) -> Self {
        Self { chunked_prefill, drafting }
    }

    /// Most query tokens of a request that a decoding call verifies.
    pub const MAX_VERIFIED: usize = FiaCall::MOST_DECODE_ROWS as usize;

    /// The kind of a step, by vLLM-Ascend's order of tests. A verifying step in which a request has more than
    /// [`StatePolicy::MAX_VERIFIED`] query tokens is classified as a prefill in chunks, which has no such limit.
    pub fn state(&self, requests: &[BatchRequest<'_>]) -> AttentionState {
        let all = |holds: fn(&BatchRequest<'_>) -> bool| requests.iter().all(holds);
        if all(|request| request.cached == 0) {
            AttentionState::PrefillNoCache
        } else if all(|request| request.new == 1) {
            match self.drafting {
                Some(Drafting::Mtp) => AttentionState::SpecDecoding,
                Some(Drafting::Other) | None => AttentionState::DecodeOnly,
            }
        } else if self.drafting == Some(Drafting::Mtp)
            && all(|request| request.new <= Self::MAX_VERIFIED)
            && all(|request| request.new.checked_sub(request.drafts) == Some(1))
        {
            AttentionState::SpecDecoding
        } else if self.chunked_prefill || self.drafting.is_some() {
            AttentionState::ChunkedPrefill
        } else {
            AttentionState::PrefillCacheHit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::request;
    use super::*;

    fn step(requests: &[(usize, usize, usize)], policy: StatePolicy) -> AttentionState {
        let request = |&(cached, new, drafts): &_| request(cached, new, &[]).drafts(drafts);
        let requests: Vec<_> = requests.iter().map(request).collect();
        policy.state(&requests)
    }

    #[test]
    fn states_follow_the_order_of_tests() {
        use AttentionState as S;
        let policy = StatePolicy::new;
        let (plain, chunked) = (policy(false, None), policy(true, None));
        let (mtp, other) = (policy(true, Some(Drafting::Mtp)), policy(true, Some(Drafting::Other)));
        assert_eq!(step(&[(0, 5, 0), (0, 1, 0)], chunked), S::PrefillNoCache);
        assert_eq!(step(&[(0, 1, 0)], plain), S::PrefillNoCache);
        assert_eq!(step(&[(4, 1, 0), (9, 1, 0)], chunked), S::DecodeOnly);
        assert_eq!(step(&[(4, 1, 0), (9, 1, 0)], mtp), S::SpecDecoding);
        assert_eq!(step(&[(4, 3, 2), (9, 1, 0)], mtp), S::SpecDecoding);
        assert_eq!(step(&[(4, 3, 2), (9, 1, 0)], other), S::ChunkedPrefill);
        assert_eq!(step(&[(4, 3, 0), (9, 1, 0)], mtp), S::ChunkedPrefill);
        assert_eq!(step(&[(4, 17, 16)], mtp), S::ChunkedPrefill);
        assert_eq!(step(&[(4, 3, 0), (0, 7, 0)], plain), S::PrefillCacheHit);
        assert_eq!(step(&[(4, 3, 0), (9, 1, 0)], chunked), S::ChunkedPrefill);
        assert!(S::DecodeOnly.reads_cache() && !S::PrefillNoCache.reads_cache());
    }
}
