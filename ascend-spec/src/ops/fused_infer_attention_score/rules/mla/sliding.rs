//! The absorbed form of multi-head latent attention with a sliding window, sparse mode 4; its rules stand with the
//! others.

use super::{CACHE, SLIDING, modes, rows_given};
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::Cache;
use crate::ops::fused_infer_attention_score::rules::{Facts, lengths};
use crate::rule::require;
use crate::{Layout, TensorDesc, Violation};

/// Checks sparse mode 4 over keys that are not paged.
pub(super) fn dense(f: &Facts<'_>, k_rope: &TensorDesc) -> Result<(), Violation> {
    let extents = f.layout.input().extents(&k_rope.shape, 1);
    require!(
        f.call.key.len() == 1
            && f.k.heads == 1
            && f.k == f.v
            && f.k.batch == f.batch
            && extents == Some(Extents { dim: 64, ..f.k }),
        CACHE,
        format_args!("key {}, value {}, keyRope {}", f.key.shape, f.value.shape, k_rope.shape),
        "one tensor each of the query's batch, one head of 512, 512 and 64",
        "shape key, value and keyRope alike",
    );
    rows_given(f)?;
    lengths::key(f)?;
    modes(f, true)?;
    rules(f)
}

/// Checks the conditions of sparse mode 4, paged or not.
pub(super) fn rules(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let fits = f.layout == Layout::Bsnd
        && call.num_heads == 128
        && matches!(f.cache, Some(Cache::BnBsH) | None)
        && (1..=2048).contains(&call.pre_tokens)
        && call.next_tokens == 0
        && f.key_rows <= 131_088
        && f.sequences().all(|b| f.q_len(b) <= f.kv_len(b));
    require!(
        fits,
        SLIDING,
        format_args!(
            "{}, {} heads, preTokens {}, nextTokens {}, {} keys",
            f.layout, call.num_heads, call.pre_tokens, call.next_tokens, f.key_rows
        ),
        "BSND, 128 heads, BnBsH, preTokens 1 to 2048, nextTokens 0, at most 131088 keys",
    );
    Ok(())
}
