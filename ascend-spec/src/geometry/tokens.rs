//! `preTokens` and `nextTokens` as distances from the diagonal.

/// The value above which CANN's tiling clamps `preTokens` and `nextTokens` (214748647, not `i32::MAX`).
///
/// Sequences are shorter than this, so a clamped token count means "no bound".
pub const TOKENS_UNBOUNDED: i64 = 214_748_647;

/// Stands for no bound on the distance from the diagonal; far above every length, far from overflow.
pub(super) const FAR: i64 = 1 << 60;

/// The greatest length that is distinguished; longer ones count as this.
pub(super) const LONGEST: i64 = FAR / 2;

/// A length as a signed number, small enough that sums of several do not overflow.
pub(super) fn clamp_len(len: u64) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX).min(LONGEST)
}

/// `preTokens` as the distance of the band's first key.
pub(super) fn lower(pre_tokens: i64) -> i64 {
    if pre_tokens >= TOKENS_UNBOUNDED {
        -FAR
    } else {
        pre_tokens.max(-FAR).saturating_neg()
    }
}

/// `nextTokens` as the distance of the band's last key.
pub(super) fn upper(next_tokens: i64) -> i64 {
    if next_tokens >= TOKENS_UNBOUNDED {
        FAR
    } else {
        next_tokens.max(-FAR)
    }
}
