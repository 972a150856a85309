//! Operators, and from which release on CANN has them.

pub(crate) mod flash_attention_score;
pub(crate) mod fused_infer_attention_score;
pub(crate) mod incre_flash_attention;
pub(crate) mod prompt_flash_attention;
pub(crate) mod ring_attention_update;

use crate::{Cann, Soc, Target};
use fused_infer_attention_score::Version;
use std::fmt;

/// An operator; of FusedInferAttentionScore, one of its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperatorVersion {
    /// Attention.
    FusedInferAttentionScore(Version),
    /// Attention of training; one of its entry points.
    FlashAttentionScore(flash_attention_score::Version),
    /// Attention of one query row a sequence, for Atlas inference cards too; one of its versions.
    IncreFlashAttention(incre_flash_attention::Version),
    /// Attention of several query rows, for Atlas inference cards too; one of its versions.
    PromptFlashAttention(prompt_flash_attention::Version),
    /// Merging outputs of training attention; one of its versions.
    RingAttentionUpdate(ring_attention_update::Version),
    /// Writing new keys and values into a paged cache.
    ScatterPaKvCache,
    /// Gathering keys and values out of a paged cache.
    GatherPaKvCache,
    /// Merging attention over parts of the keys.
    AttentionUpdate,
}

impl OperatorVersion {
    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.symbol(),
            OperatorVersion::FlashAttentionScore(version) => version.symbol(),
            OperatorVersion::IncreFlashAttention(version) => version.symbol(),
            OperatorVersion::PromptFlashAttention(version) => version.symbol(),
            OperatorVersion::RingAttentionUpdate(version) => version.symbol(),
            OperatorVersion::ScatterPaKvCache => "aclnnScatterPaKvCache",
            OperatorVersion::GatherPaKvCache => "aclnnGatherPaKvCache",
            OperatorVersion::AttentionUpdate => "aclnnAttentionUpdate",
        }
    }

    /// The CANN releases known to export it, as they stand behind "CANN": the first one, or `after` one that does not.
    pub const fn since_cann(self) -> &'static str {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.since_cann(),
            OperatorVersion::FlashAttentionScore(version) => version.since_cann(),
            OperatorVersion::IncreFlashAttention(version) => version.since_cann(),
            OperatorVersion::PromptFlashAttention(version) => version.since_cann(),
            OperatorVersion::RingAttentionUpdate(version) => version.since_cann(),
            OperatorVersion::GatherPaKvCache => "8.5",
            OperatorVersion::ScatterPaKvCache | OperatorVersion::AttentionUpdate => "after 8.1",
        }
    }

    /// Whether a product has it in a release.
    pub fn runs_on(self, target: Target) -> bool {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.runs_on(target),
            OperatorVersion::FlashAttentionScore(version) => version.runs_on(target),
            OperatorVersion::IncreFlashAttention(version) => version.runs_on(target),
            OperatorVersion::PromptFlashAttention(version) => version.runs_on(target),
            OperatorVersion::RingAttentionUpdate(version) => version.runs_on(target),
            OperatorVersion::GatherPaKvCache => {
                target.cann >= Cann::V8_5 && is_newer_product(target.soc)
            }
            OperatorVersion::ScatterPaKvCache | OperatorVersion::AttentionUpdate => {
                is_newer_product(target.soc)
            }
        }
    }

    /// Whether the libraries of a release export a function. Of operators that are in a release after 8.1, which one is not
    /// known, this says so of all.
    pub fn exported(function: &str, cann: Cann) -> bool {
        let phase_two = function
            .strip_suffix("GetWorkspaceSize")
            .unwrap_or(function);
        if phase_two == OperatorVersion::GatherPaKvCache.symbol() {
            return cann >= Cann::V8_5;
        }
        let attention = Version::of_function(function);
        attention.is_none_or(|version| version <= Version::newest_of(cann))
    }
}

fn is_newer_product(soc: Soc) -> bool {
    matches!(soc, Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950)
}

impl fmt::Display for OperatorVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.fmt(f),
            OperatorVersion::FlashAttentionScore(version) => version.fmt(f),
            OperatorVersion::IncreFlashAttention(version) => version.fmt(f),
            OperatorVersion::PromptFlashAttention(version) => version.fmt(f),
            OperatorVersion::RingAttentionUpdate(version) => version.fmt(f),
            OperatorVersion::ScatterPaKvCache
            | OperatorVersion::GatherPaKvCache
            | OperatorVersion::AttentionUpdate => f.write_str(self.symbol()),
        }
    }
}
