//! Blocks that are given back while queued work may still read them.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ascend_attention::{Graph, bf16, f16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, NamedMask, rules,
};

use crate::harness;
use crate::harness::gate::Gate;

#[test]
fn a_step_that_ends_while_its_thread_captures_gives_its_blocks_back() {
    let stream = harness::stream();
    let pool = BlockPool::new(2, 16, PadPolicy::SkipNegative).unwrap();
    let block = pool.allocate().unwrap();
    let step = pool.begin_step(&stream);
    drop(block);
    let (graph, ()) = Graph::capture(stream.device(), (), |_, ()| {
        drop(step);
        Ok(())
    })
    .unwrap();
    drop(graph);
    stream.device().synchronize().unwrap();
    assert_eq!((pool.free_blocks(), pool.steps_in_flight()), (2, 0));
}

#[test]
fn growing_a_cache_waits_for_blocks_that_a_step_in_flight_may_read() {
    let (stream, other) = (harness::stream(), harness::stream());
    let shape = CacheShape::new(1, 1, 64);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<bf16>::new(stream.device(), 3, 16, shape, pad).unwrap();
    let pool = cache.pool().clone();
    let mut ended = Sequence::new(&pool);
    cache.grow(&stream, &mut ended, 32).unwrap();
    let gate = Gate::new(stream.device());
    let step = pool.begin_step(&other);
    gate.hold(&other);
    drop(ended);
    let mut next = Sequence::new(&pool);
    // The step may still queue launches: its end is not known.
    let open = cache.grow(&stream, &mut next, 32).unwrap_err();
    assert!(open.breaks(&rules::POOL_WAITING), "{open}");
    drop(step);
    assert_eq!((pool.free_blocks(), pool.waiting_blocks()), (1, 2));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            gate.open();
        });
        cache.grow(&stream, &mut next, 48).unwrap();
    });
    assert_eq!((next.len(), pool.steps_in_flight()), (48, 0));
    let full = cache.grow(&stream, &mut next, 1).unwrap_err();
    assert!(full.breaks(&rules::POOL_EXHAUSTED), "{full}");
    assert_eq!(next.len(), 48);
}

/// 13501 of vllm-project/vllm-ascend: blocks handed out again while a replay in flight reads them. The step's lease
/// covers replays as it covers launches.
#[test]
fn blocks_given_back_while_a_replay_reads_them() {
    let stream = harness::stream();
    let device = stream.device();
    let (from, to) = (stream.upload(&[7i32; 64], [64]).unwrap(), stream.upload(&[0i32; 64], [64]).unwrap());
    let (mut graph, ()) = Graph::capture(device, (), |capture, ()| to.copy_from(capture, &from)).unwrap();
    let pool = BlockPool::new(2, 16, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(32).unwrap();
    let gate = Gate::new(device);
    let step = pool.begin_step(&stream);
    gate.hold(&stream);
    graph.launch(&stream, graph.update()).unwrap();
    drop(sequence);
    let open = pool.allocate().unwrap_err();
    assert_eq!(open.rule, &rules::POOL_WAITING);
    assert!(open.given.contains("2 waiting for steps"), "{open}");
    drop(step);
    let replayed = pool.allocate().unwrap_err();
    assert_eq!(replayed.rule, &rules::POOL_WAITING);
    gate.open();
    stream.synchronize().unwrap();
    let _block = pool.allocate().unwrap();
}

/// Metadata whose blocks went back to the pool would write into those of another request.
#[test]
fn metadata_does_not_outlive_its_blocks() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, 1, 16);
    let cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, shape, pad).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, backends);
    let limits = GraphLimits::new([1], 400);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let of = |sequence: &Sequence| AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings).unwrap();
    let stale = |outcome: Result<(), Error>| {
        let why = outcome.unwrap_err();
        assert!(why.breaks(&rules::BLOCK_GIVEN_BACK), "{why}");
    };
    let mut one = Sequence::new(attention.cache().pool());
    let mut other = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut one, 200).unwrap();
    attention.grow(&stream, &mut other, 100).unwrap();
    attention.cache().mark_computed(&other, 99).unwrap();

    // Cut behind the metadata, and dropped, whether somebody has the blocks now or not.
    let mut metadata = of(&one);
    one.truncate(100).unwrap();
    stale(attention.begin(&stream, &metadata).map(drop));
    assert!(!graphs.serves(&metadata));
    stale(graphs.begin(&stream, &mut metadata).map(drop));
    attention.grow(&stream, &mut one, 50).unwrap();
    stale(attention.begin(&stream, &metadata).map(drop));
    let metadata = of(&one);
    drop(one);
    stale(attention.begin(&stream, &metadata).map(drop));

    // Other requests end as they like, and a block that a fork holds stays.
    let mut kept = of(&other);
    let mut third = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut third, 100).unwrap();
    drop(third);
    assert!(attention.begin(&stream, &kept).is_ok());
    assert!(graphs.begin(&stream, &mut kept).is_ok());
    // What a fork holds may be read, but is not written to: the fork may be its only holder now.
    let kept = of(&other);
    let fork = other.fork();
    drop(other);
    let gone = attention.begin(&stream, &kept).map(drop).unwrap_err();
    assert!(gone.breaks(&rules::SEQUENCE_CHANGED), "{gone}");
    let mut grown = fork;
    attention.grow(&stream, &mut grown, 29).unwrap();
    attention.cache().mark_computed(&grown, 128).unwrap();
    let kept = of(&grown);
    drop(grown.share_prefix(128).unwrap());
    assert!(attention.begin(&stream, &kept).is_ok());
}

/// A scheduler that grows, evicts and ends requests between the requests of one step.
#[test]
fn requests_of_a_step_are_made_while_others_end() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, 1, 16);
    let cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, shape, pad).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, backends);
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let sequence = |attention: &mut Attention<f16>, tokens| {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, tokens).unwrap();
        (attention.cache().mark_computed(&sequence, tokens - 1)).unwrap();
        sequence
    };
    let one = sequence(&mut attention, 100);
    let ended = sequence(&mut attention, 300);
    let first = BatchRequest::of(&one, 1);
    drop(ended);
    // In the blocks of the one that ended.
    let other = sequence(&mut attention, 300);
    let requests = [first, BatchRequest::of(&other, 1)];
    let metadata = AttentionMetadata::new(&requests, settings).unwrap();
    assert!(attention.begin(&stream, &metadata).is_ok());
}

/// The rule of a mask is the caller's code, and may drop a sequence while a step begins: its blocks wait for the step.
#[test]
fn blocks_that_go_back_while_a_step_begins_wait_for_it() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, 1, 64);
    let cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, shape, pad).unwrap();
    let backends = Backends::none().with(Backend::NamedMask);
    let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    let pool = attention.cache().pool().clone();
    let held: Arc<Mutex<Option<Sequence>>> = Arc::default();
    let dropping = held.clone();
    let mask = NamedMask::new("drops a sequence", move |_, token, key| {
        drop(dropping.lock().unwrap().take());
        key <= token
    });
    let captured = attention.capture(&stream, mask.clone(), &GraphLimits::new([1], 100));
    let mut graphs = captured.unwrap();
    let mut sequence = Sequence::new(&pool);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    metadata.set_mask(mask);
    let block = sequence.row()[0];
    *held.lock().unwrap() = Some(sequence);
    let step = graphs.begin(&stream, &mut metadata).unwrap();
    assert_eq!((pool.held_blocks(), pool.waiting_blocks()), (0, 1));
    let others: Vec<_> = (0..3).map(|_| pool.allocate().unwrap().id()).collect();
    assert!(!others.contains(&block));
    drop(step);
}
