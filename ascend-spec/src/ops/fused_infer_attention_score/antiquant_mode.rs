//! Which elements of a quantised key or value share a scale.

/// Kind of antiquantisation: which elements of key or value share a scale (`antiquantMode`, `keyAntiquantMode`,
/// `valueAntiquantMode`). The discriminant is CANN's number.
///
/// B sequences, N key heads, S keys, D head dimension; a paged cache has `blocks` blocks of `block_size` tokens. The
/// shapes are those of separate scales on Ascend 950, and on Atlas A2 and A3 with one query row a sequence; with
/// several rows Atlas A2 and A3 take them without the leading 1. A refusal by
/// [`FiaCall::check`](super::FiaCall::check) names the shapes that the call may have.
///
/// Source: aclnnFusedInferAttentionScore V2, parameter tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AntiquantMode {
    /// A scale for each head and dimension: `[1, N, 1, D]`, `[1, N, D]` or `[1, N * D]`, as the layout orders them; or
    /// one for all (per tensor): `[1]`.
    PerChannel = 0,
    /// A scale for each token: FLOAT32 `[1, B, S]`.
    PerToken = 1,
    /// A scale for each head: `[N]`.
    PerTensorHead = 2,
    /// A scale for each token and head: FLOAT32 `[B, N, S]`.
    PerTokenHead = 3,
    /// A scale for each slot of a paged cache: FLOAT32 `[blocks, block_size]`.
    PerTokenPaged = 4,
    /// A scale for each slot and head of a paged cache: FLOAT32 `[blocks, N, block_size]`.
    PerTokenHeadPaged = 5,
    /// A scale for each token, head and 32 elements: FLOAT8_E8M0 `[1, B, N, S, D/32]`, for FLOAT4_E2M1 keys of Ascend
    /// 950.
    PerTokenGroup = 6,
}

impl AntiquantMode {
    /// Every mode, in the order of CANN's numbers.
    pub const ALL: [AntiquantMode; 7] = [
        AntiquantMode::PerChannel,
        AntiquantMode::PerToken,
        AntiquantMode::PerTensorHead,
        AntiquantMode::PerTokenHead,
        AntiquantMode::PerTokenPaged,
        AntiquantMode::PerTokenHeadPaged,
        AntiquantMode::PerTokenGroup,
    ];

    /// CANN's number.
    pub const fn acl(self) -> i64 {
        self as i64
    }

    /// The mode with CANN's number `value`.
    pub fn from_acl(value: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.acl() == value)
    }
}
