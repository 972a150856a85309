//! The division of contexts over ranks: what each rank holds, and what cannot be divided.

use crate::harness;

use ascend_attention::bf16;
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{BatchRequest, ContextParallel, rules};

const DIM: usize = 64;
const PAD: PadPolicy = PadPolicy::SkipNegative;

#[test]
fn divisions_that_cannot_be_are_refused() {
    let divided = |ranks, run, block_size| ContextParallel::new(ranks, run, block_size).map_err(|refused| refused.rule);
    assert_eq!(divided(0, 1, 128), Err(&rules::RANKS_INTERLEAVE));
    assert_eq!(divided(2, 0, 128), Err(&rules::RANKS_INTERLEAVE));
    assert_eq!(divided(16, 1, 128), Err(&rules::RANKS_PARTS));
    assert_eq!(divided(2, 3, 128), Err(&rules::RANKS_INTERLEAVE));
    let parallel = divided(15, 16, 128).unwrap();
    assert_eq!(parallel.pool_block_size(), 1920);
    let request = BatchRequest::in_row(&[0], 5, 1);
    let rule = |request| parallel.split(&[request], PAD).unwrap_err().rule;
    assert_eq!(rule(BatchRequest::in_row(&[0], 5, 0)), &rules::BATCH_EMPTY);
    assert_eq!(rule(BatchRequest::in_row(&[0], 1920, 1)), &rules::TABLE_ROW);
    assert_eq!(rule(BatchRequest::in_row(&[0], usize::MAX, 1)), &rules::LENGTHS_OVERFLOW);
    assert_eq!(rule(BatchRequest::in_row(&[usize::MAX], 5, 1)), &rules::SLOT_RANGE);
    assert_eq!(parallel.split(&[], PAD).unwrap_err().rule, &rules::BATCH_EMPTY);
    assert_eq!(rule(request.drafts(1)), &rules::DRAFT_COUNT);
    let repeated = BatchRequest::in_row(&[3, 3], 2000, 1);
    assert_eq!(rule(repeated), &rules::TABLE_REPEATED);
    let twice = parallel.split(&[request, request], PAD).unwrap_err();
    assert_eq!(twice.rule, &rules::SLOT_DUPLICATE);
    let dump = parallel.split(&[request], PadPolicy::DumpSlot(3));
    assert_eq!(dump.unwrap_err().rule, &rules::SLOT_DUMP);
    let pool = || BlockPool::new(4, parallel.pool_block_size(), PAD).unwrap();
    let (first, other) = (pool(), pool());
    let mut sequence = Sequence::new(&first);
    let _ = sequence.grow(6).unwrap();
    assert_eq!(rule(BatchRequest::of(&sequence, 7)), &rules::SEQUENCE_LENGTH);
    let mut of_other = Sequence::new(&other);
    let _ = of_other.grow(1).unwrap();
    let both = [BatchRequest::of(&sequence, 1), BatchRequest::of(&of_other, 1)];
    assert_eq!(parallel.split(&both, PAD).unwrap_err().rule, &rules::TABLE_POOL);
    let of_rank = BlockPool::new(4, parallel.pool_block_size() / 2, PAD).unwrap();
    let mut of_rank = Sequence::new(&of_rank);
    let _ = of_rank.grow(1).unwrap();
    assert_eq!(rule(BatchRequest::of(&of_rank, 1)), &rules::TABLE_POOL);
    // Its block is copied for the new token, and that copy is not queued.
    let mut fork = sequence.fork();
    let copies = fork.grow(1).unwrap().copies;
    assert_eq!(copies.len(), 1);
    assert_eq!(rule(BatchRequest::of(&fork, 1)), &rules::BLOCK_UNCOPIED);
    // What the ranks have adds up to what there is.
    let long = BatchRequest::in_row(&[0], 1000, 3);
    let split = parallel.split(&[long], PAD).unwrap();
    let keys = (0..split.ranks()).map(|rank| split.kv_lengths(rank)[0]);
    assert_eq!(keys.sum::<usize>(), 1000);
    let slots = (0..split.ranks()).flat_map(|rank| split.slots(rank));
    assert_eq!(slots.filter(|slot| **slot >= 0).count(), 3);
}

/// One rank may have the pool of caches, which know what they have.
#[test]
fn one_rank_over_a_cache_reads_what_the_cache_has() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let mut one = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let other = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let mut other = other.with_pool(one.pool()).unwrap();
    let parallel = ContextParallel::new(1, 128, 128).unwrap();
    let split = |sequence: &Sequence, new| {
        let split = parallel.split(&[BatchRequest::of(sequence, new)], PAD);
        split.map(drop).map_err(|refused| refused.rule)
    };
    let mut sequence = Sequence::new(one.pool());
    one.grow(&stream, &mut sequence, 30).unwrap();
    assert_eq!(split(&sequence, 1), Err(&rules::SEQUENCE_GAP));
    for cache in [&one, &other] {
        cache.mark_computed(&sequence, 30).unwrap();
    }
    assert_eq!(split(&sequence, 1), Err(&rules::SEQUENCE_COMPUTED));
    let mut fork = sequence.fork();
    one.grow(&stream, &mut fork, 1).unwrap();
    assert_eq!(split(&fork, 1), Err(&rules::BLOCK_UNCOPIED));
    other.queue_pending_copies(&stream, &fork).unwrap();
    assert_eq!(split(&fork, 1), Ok(()));
}
