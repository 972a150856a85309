//! A context divided over ranks: each rank attends over its own keys, on a stream of its own, and the merged parts are
//! attention over all.

use crate::harness;
use approx::abs_diff_eq;

use std::thread;

use ascend_attention::merge::Part;
use ascend_attention::{Device, Event, Output, Tensor, bf16, f16};
use ascend_serving::kv::{BlockPool, CacheShape, CacheWrite, Interleave, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{AttentionShape, BatchRequest, ContextParallel, ContextSplit, RankStep, rules};
use harness::reference::{Half, Logical, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const DIM: usize = 64;
const BLOCK_SIZE: usize = 128;
const PAD: PadPolicy = PadPolicy::SkipNegative;

#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    run: usize,
    /// Cached tokens of each request, and those of the step.
    requests: Vec<(usize, usize)>,
    kv_heads: usize,
    group: usize,
    seed: u64,
}

/// All rows of a request.
struct Rows<T> {
    query: Logical<T>,
    key: Logical<T>,
    value: Logical<T>,
}

/// What all ranks see of a step.
struct Step<'a, T: Half> {
    shape: AttentionShape,
    split: &'a ContextSplit,
    /// Blocks of each rank's cache.
    blocks: usize,
    query: &'a Tensor<T>,
    /// Slots, keys and values of what was cached before the step.
    before: Vec<(ContextSplit, Tensor<T>, Tensor<T>)>,
    new: [&'a Tensor<T>; 2],
}

impl<T: Half> Step<'_, T> {
    /// What a rank does, with a cache of its own.
    fn rank(&self, device: &Device, rank: &RankStep) -> (Output<T>, Event) {
        let stream = device.stream().unwrap();
        let of = CacheShape::new(1, self.shape.kv_heads, DIM);
        let mut cache = PagedKvCache::<T>::new(device, self.blocks, BLOCK_SIZE, of, PAD).unwrap();
        let mut write = |slots: &[i32], key: &Tensor<T>, value: &Tensor<T>| {
            let write = CacheWrite::plan(&cache, &stream, slots, key, value).unwrap();
            cache.write(&stream, &write, 0, key, value).unwrap();
        };
        for (split, key, value) in &self.before {
            let mine = &split.ranks()[rank.rank()];
            write(mine.slots(), key, value);
        }
        write(rank.slots(), self.new[0], self.new[1]);
        let table = cache.block_table(&stream, rank.table()).unwrap();
        let layer = cache.layer(0).unwrap();
        let plan = rank.plan(self.shape, self.query, layer, &table).unwrap();
        let keys: usize = rank.kv_lengths().lengths().iter().sum();
        assert_eq!(plan.is_empty(), keys == 0);
        let output = plan.launch(&stream, self.query, layer, &table).unwrap();
        (output, stream.record_event().unwrap())
    }
}

fn check<T: Half>(case: &Case) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let share = Interleave::new(case.ranks, case.run).unwrap();
    let parallel = ContextParallel::new(share, BLOCK_SIZE).unwrap();
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let rows: Vec<Rows<T>> = (case.seed * 50..)
        .zip(&case.requests)
        .map(|(seed, (cached, new))| {
            let all = cached + new;
            Rows {
                query: Logical::random(3 * seed, [1, heads, all, DIM]),
                key: Logical::random(3 * seed + 1, [1, kv_heads, all, DIM]),
                value: Logical::random(3 * seed + 2, [1, kv_heads, all, DIM]),
            }
        })
        .collect();
    // One pool for all ranks: an entry of the table stands for a block on each of them.
    let span = parallel.pool_block_size();
    let needed: usize = case.requests.iter().map(|(cached, new)| (cached + new).div_ceil(span)).sum();
    let pool = BlockPool::new(needed, span, PAD).unwrap();
    let mut sequences = Vec::new();
    for (cached, new) in &case.requests {
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(cached + new).unwrap();
        sequences.push(sequence);
    }
    let batch: Vec<_> =
        sequences.iter().zip(&case.requests).map(|(sequence, (_, new))| BatchRequest::of(sequence, *new)).collect();
    let split = parallel.split(&batch, PAD).unwrap();
    let upload = |of: fn(&Rows<T>) -> &Logical<T>| -> Tensor<T> {
        let requests = rows.iter().zip(&case.requests);
        let data: Vec<T> = requests
            .flat_map(|(rows, (cached, new))| {
                let cached = *cached;
                of(rows).packed(cached..cached + *new)
            })
            .collect();
        let tokens: usize = case.requests.iter().map(|(_, new)| new).sum();
        let heads = of(&rows[0]).heads;
        stream.upload(&data, [tokens, heads, DIM]).unwrap()
    };
    let (query, key, value) = (upload(|r| &r.query), upload(|r| &r.key), upload(|r| &r.value));
    let before = sequences.iter().zip(&rows).zip(&case.requests);
    let before = before.filter(|(_, (cached, _))| *cached > 0);
    let before = before.map(|((sequence, rows), (cached, _))| {
        let mut request = BatchRequest::of(sequence, 1);
        (request.cached, request.new) = (0, *cached);
        let upload = |of: &Logical<T>| {
            let len = *cached;
            stream.upload(&of.packed(0..len), [len, kv_heads, DIM]).unwrap()
        };
        let split = parallel.split(&[request], PAD).unwrap();
        (split, upload(&rows.key), upload(&rows.value))
    });
    let step = Step {
        shape: AttentionShape::new(heads, kv_heads, DIM),
        split: &split,
        blocks: needed,
        query: &query,
        before: before.collect(),
        new: [&key, &value],
    };
    let device = stream.device();
    // Every rank on a thread and a stream of its own.
    let mut parts: Vec<Output<T>> = thread::scope(|scope| {
        let ranks: Vec<_> = step.split.ranks().iter().map(|rank| scope.spawn(|| step.rank(device, rank))).collect();
        let wait = |(output, event): (Output<T>, Event)| {
            stream.wait_event(&event).unwrap();
            output
        };
        ranks.into_iter().map(|rank| wait(rank.join().unwrap())).collect()
    });
    if let Some(new) = split.new_tokens() {
        let plan = new.plan(&stream, step.shape, (&query, &key, &value)).unwrap();
        parts.push(plan.launch(&stream, (&query, &key, &value)).unwrap());
    }
    let parts: Vec<Part<'_, T>> = parts.iter().map(|part| Part::of(part).unwrap()).collect();
    if split.new_tokens().is_some() {
        let short = split.plan(&parts[..parts.len() - 1]);
        let said = short.err().unwrap().to_string();
        assert!(said.contains("`new_tokens`"), "{said}");
    }
    let merge = split.plan(&parts).unwrap();
    let out = merge.launch(&stream, &parts).unwrap();
    let out = out.attention.download(&stream).unwrap();
    let mut token = 0;
    for (r, (rows, (cached, new))) in rows.iter().zip(&case.requests).enumerate() {
        let (q, k, v) = (rows.query.exact(), rows.key.exact(), rows.value.exact());
        for position in *cached..(cached + new) {
            let head = position % heads;
            let scale = step.shape.scale;
            let sees = |key: usize| key <= position;
            let want = row(&q, &k, &v, (0, 0), head, position, scale, sees);
            let got = &out[(token * heads + head) * DIM..][..DIM];
            for (got, want) in got.iter().zip(&want.unwrap().0) {
                let got = got.to();
                prop_assert!(
                    abs_diff_eq!(got, want, epsilon = 2.0 * T::TOLERANCE),
                    "request {r}, position {position}, head {head}: {got}, expected {want}"
                );
            }
            token += 1;
        }
    }
    drop(batch);
    drop(sequences);
    prop_assert_eq!(pool.held_blocks(), 0);
    Ok(())
}

fn case(new: impl Strategy<Value = usize>) -> impl Strategy<Value = Case> {
    let run = (0usize..8).prop_map(|power| 1 << power);
    let cached = prop_oneof![1 => Just(0usize), 4 => 0usize..400];
    let requests = prop::collection::vec((cached, new), 1..4);
    (1usize..5, run, requests, 1usize..3, 1usize..4, any::<u16>()).prop_map(
        |(ranks, run, requests, kv_heads, group, seed)| Case {
            ranks,
            run,
            requests,
            kv_heads,
            group,
            seed: seed.into(),
        },
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(20) })]

    #[test]
    fn decoding_over_any_division_of_any_context(case in case(Just(1))) {
        check::<f16>(&case)?;
    }

    #[test]
    fn chunks_and_drafts_over_any_division(case in case(1usize..60)) {
        check::<bf16>(&case)?;
    }
}

/// Fewer tokens than ranks: some hold none of them.
#[test]
fn ranks_without_keys() {
    let case = |requests| Case { ranks: 4, run: 64, requests, kv_heads: 1, group: 2, seed: 9 };
    check::<f16>(&case(vec![(2, 1), (129, 1), (256, 1)])).unwrap();
    check::<f16>(&case(vec![(0, 1), (63, 1)])).unwrap();
    check::<bf16>(&case(vec![(0, 7), (0, 90)])).unwrap();
    check::<bf16>(&case(vec![(65, 3), (0, 9), (300, 1)])).unwrap();
}

#[test]
fn divisions_that_cannot_be_are_refused() {
    let of = |ranks, run, block_size| {
        let share = Interleave::new(ranks, run).unwrap();
        ContextParallel::new(share, block_size).map_err(|refused| refused.rule)
    };
    assert_eq!(of(16, 1, 128), Err(&rules::RANKS_PARTS));
    assert_eq!(of(2, 3, 128), Err(&rules::RANKS_INTERLEAVE));
    let parallel = of(15, 16, 128).unwrap();
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
    let keys = split.ranks().iter().map(|rank| rank.kv_lengths().lengths()[0]);
    assert_eq!(keys.sum::<usize>(), 1000);
    let slots = split.ranks().iter().flat_map(RankStep::slots);
    assert_eq!(slots.filter(|slot| **slot >= 0).count(), 3);
}

#[test]
fn caches_of_other_blocks_than_the_division_s_are_refused() {
    let stream = harness::stream();
    let parallel = ContextParallel::new(Interleave::new(2, 64).unwrap(), 128).unwrap();
    let split = parallel.split(&[BatchRequest::in_row(&[0, 1], 300, 1)], PAD).unwrap();
    let heads = AttentionShape::new(1, 1, DIM);
    let query = stream.upload(&[bf16::ONE; DIM], [1, 1, DIM]).unwrap();
    for block_size in [64, 128, 256] {
        let shape = CacheShape::new(1, 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, block_size, shape, PAD).unwrap();
        let rank = &split.ranks()[0];
        let table = cache.block_table(&stream, rank.table()).unwrap();
        let planned = rank.plan(heads, &query, cache.layer(0).unwrap(), &table);
        match block_size {
            128 => assert!(planned.is_ok()),
            _ => assert!(planned.unwrap_err().breaks(&rules::TABLE_POOL)),
        }
    }
}

/// One rank may have the pool of caches, which know what they have.
#[test]
fn one_rank_over_a_cache_reads_what_the_cache_has() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let mut one = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let other = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let mut other = other.with_pool(one.pool()).unwrap();
    let parallel = ContextParallel::new(Interleave::new(1, 128).unwrap(), 128).unwrap();
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
