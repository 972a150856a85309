//! Blocks that are given back while queued work may still read them.

use std::thread;
use std::time::Duration;

use ascend_attention::{Graph, bf16};
use ascend_serving::Rule;
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};

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
    // The step may still queue launches: nobody knows when it is over.
    let open = cache.grow(&stream, &mut next, 32).unwrap_err();
    assert!(open.breaks(Rule::PoolWaiting), "{open}");
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
    assert!(full.breaks(Rule::PoolExhausted), "{full}");
    assert_eq!(next.len(), 48);
}

/// 13501 of vllm-project/vllm-ascend: blocks handed out again while a replay in flight reads them. The step's lease covers
/// replays as it covers launches.
#[test]
fn blocks_given_back_while_a_replay_reads_them() {
    let stream = harness::stream();
    let device = stream.device();
    let (from, to) = (
        stream.upload(&[7i32; 64], [64]).unwrap(),
        stream.upload(&[0i32; 64], [64]).unwrap(),
    );
    let (mut graph, ()) =
        Graph::capture(device, (), |capture, ()| capture.copy(&to, &from)).unwrap();
    let pool = BlockPool::new(2, 16, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(32).unwrap();
    let gate = Gate::new(device);
    let step = pool.begin_step(&stream);
    gate.hold(&stream);
    graph.replay(&stream, graph.update()).unwrap();
    drop(sequence);
    let open = pool.allocate().unwrap_err();
    assert_eq!(open.rule, Rule::PoolWaiting);
    assert!(open.given.contains("2 waiting for steps"), "{open}");
    drop(step);
    let replayed = pool.allocate().unwrap_err();
    assert_eq!(replayed.rule, Rule::PoolWaiting);
    gate.open();
    stream.synchronize().unwrap();
    let _block = pool.allocate().unwrap();
}
