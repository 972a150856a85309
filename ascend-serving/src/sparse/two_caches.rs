//! Two caches that share a pool, and with it the sequences and steps over them.

use std::fmt;
use std::sync::Arc;

use ascend_attention::{Element, Stream, Violation};

use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};
use crate::kv::{CacheEntry, CacheShape, CopiesIn, PagedKvCache, Sequence, StepLease, StepProgress};
use crate::rules;

use super::sparse_inputs::check_causal;

/// Refuses a cache that operators cannot read: of another shape or format than `wanted`, or quantised in another way
/// than for sparse attention.
pub(super) fn check_cache<T: Element>(
    name: &'static str,
    cache: &PagedKvCache<T>,
    wanted: CacheShape,
    fix: impl fmt::Display,
) -> Result<()> {
    if cache.is_quantised() && !cache.is_quantised_sparse() {
        return Err(Violation::new(
            &rules::CACHE_QUANTISED,
            format_args!("{name} in a quantised cache"),
            format_args!("a cache of {}, or one that is quantised for sparse attention", T::DTYPE),
            "make the cache by `PagedKvCache::new`, or for `SparseLatent` by `PagedKvCache::quantised_sparse_latents` \
             or `PagedKvCache::quantised_index_keys`",
        )
        .into());
    }
    let given = cache.shape();
    match given == wanted && given.layers > 0 {
        true => Ok(()),
        false => {
            Err(Error::invalid(name, format_args!("{given:?}"), format_args!("{wanted:?}, of 1 layer or more"))
                .fix(fix))
        }
    }
}

/// Makes room for `tokens` more tokens of a sequence in two caches of its pool, and queues the copies of blocks that it
/// shared. After an error the sequence has as many tokens as before.
pub(super) fn grow<T: Element>(
    [first, second]: [&mut PagedKvCache<T>; 2],
    stream: &Stream,
    sequence: &mut Sequence,
    tokens: usize,
) -> Result<()> {
    second.admits(stream)?;
    let before = sequence.len();
    first.grow(stream, sequence, tokens)?;
    let copied = second.queue_pending_copies(stream, sequence);
    if copied.is_err() {
        sequence.truncate(before)?;
    }
    copied
}

/// Begins a step of two caches of one pool, each with its name: refuses metadata of other sequences or of tokens that
/// see later ones, and queues the copies of blocks that wait for them. Blocks given back from here on wait for the
/// lease.
pub(super) fn begin<'a, T: Element>(
    stream: &'a Stream,
    metadata: &AttentionMetadata,
    caches: [(&mut PagedKvCache<T>, &str); 2],
) -> Result<(StepLease<'a>, Vec<StepProgress>)> {
    let [(first, _), _] = &caches;
    first.admits(stream)?;
    metadata.check_groups(1)?;
    metadata.check_requests()?;
    metadata.check_pool(first.pool())?;
    check_causal(metadata)?;
    // Blocks that went back before are found by the check.
    let lease = first.pool().begin_step(stream);
    let mut progress = Vec::new();
    for (cache, name) in caches {
        let entry = Arc::clone(cache.entry());
        let queue = || cache.queue_copies_to(stream, metadata.sequence_blocks());
        progress.push(begin_in(&entry, name, metadata, queue)?);
    }
    Ok((lease, progress))
}

/// Begins to record what a step computes in one of the caches. `queue_copies` is called once the cache is known to have
/// computed the tokens that are copied.
pub(super) fn begin_in(
    cache: &Arc<CacheEntry>,
    name: &str,
    metadata: &AttentionMetadata,
    queue_copies: impl FnOnce() -> Result<()>,
) -> Result<StepProgress> {
    let progress = metadata.begin_progress(cache).map_err(|why| named(why, name))?;
    queue_copies()?;
    metadata.check_copies_queued(cache.pool(), CopiesIn::Cache(cache)).map_err(|why| named(why, name))?;
    Ok(progress)
}

/// The refusal of a step by one of the caches.
pub(super) fn named(mut why: Violation, name: &str) -> Violation {
    why.given.push_str(&format!(", in the cache of {name}"));
    why
}
