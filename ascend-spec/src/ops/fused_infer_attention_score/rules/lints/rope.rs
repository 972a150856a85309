//! Rotary parts.

use super::{Report, lint};
use crate::ops::fused_infer_attention_score::{CheckedCall, Route, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    DTYPE = "rope.dtype_unchecked", Overrun("a rotary part of smaller elements is read as one of the query's"), V3, "check J29",
        "in the prefill path queryRope and keyRope have the query's dtype",
        "convert the rotary parts to the query's dtype";
    CACHE = "rope.cache_unchecked", Overrun("the cache of keyRope is read by the blocks of the key"), V3, "check J29",
        "in the prefill path the cache of keyRope has as many blocks as that of the key, and tokens in each",
        "shape the cache of keyRope as that of the key";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    if p.route != Route::Prefill {
        return;
    }
    for (rope, name) in [(&call.query_rope, "queryRope"), (&call.key_rope, "keyRope")] {
        let Some(rope) = rope else { continue };
        lint!(
            report,
            // A quantised query has BF16 rotary parts, which a rule checks.
            rope.dtype == p.problem.query.dtype || p.problem.query_quantisation.is_some(),
            DTYPE,
            format_args!("{name} {}", rope.dtype),
            p.problem.query.dtype,
        );
    }
    let (Some(pages), Some(cache), Some(rope)) = (&p.problem.pages, p.cache, &call.key_rope) else {
        return;
    };
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let grid = crate::ops::fused_infer_attention_score::rules::paged::extents(
        cache,
        rope,
        size(p.problem.kv_heads),
    )
    .map(|of| (of.batch, of.rows));
    lint!(
        report,
        grid == Some((size(pages.blocks), size(pages.block_size))),
        CACHE,
        rope.shape,
        format_args!("{} blocks of {}", pages.blocks, pages.block_size),
    );
}
