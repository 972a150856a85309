//! Tests of pools.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::*;
use crate::kv::Sequence;
use crate::kv::fence::{Fence, FencedQueue};
use proptest::prelude::*;
use std::collections::HashMap;

/// A queue that a test moves by hand.
#[derive(Clone, Debug, Default)]
struct ByHand {
    queued: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
}

struct Point(u64, Arc<AtomicU64>);

impl Fence for Point {
    fn is_passed(&self) -> bool {
        self.1.load(Ordering::SeqCst) >= self.0
    }

    fn wait(&self) {}
}

impl ByHand {
    fn finish(&self) {
        self.done.store(u64::MAX, Ordering::SeqCst);
    }
    fn finish_to(&self, point: u64) {
        self.done.fetch_max(point, Ordering::SeqCst);
    }
}

impl FencedQueue for ByHand {
    fn fence(&self) -> Arc<dyn Fence> {
        let queued = self.queued.fetch_add(1, Ordering::SeqCst) + 1;
        Arc::new(Point(queued, Arc::clone(&self.done)))
    }
}

#[test]
fn a_pool_hands_out_each_block_once() {
    let pool = BlockPool::new(4, 16, PadPolicy::DumpSlot(0)).unwrap();
    let held: Vec<Block> = (0..3).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(held.iter().map(Block::id).collect::<Vec<_>>(), [1, 2, 3]);
    let error = pool.allocate().unwrap_err();
    assert_eq!(error.rule, &rules::POOL_EXHAUSTED);
    assert_eq!(error.given, "asked for 1 blocks; 0 free, 3 held, 0 waiting for steps in flight");
    let again = held[1].clone();
    assert!(held[1].is_shared());
    drop(held);
    assert!(!again.is_shared());
    assert_eq!((pool.free_blocks(), pool.held_blocks()), (2, 1));
    drop(again);
    assert_eq!((pool.free_blocks(), pool.held_blocks()), (3, 0));
}

/// A step of another thread begins before a move of its sequence's tokens or after it, never in between.
#[test]
fn a_step_and_a_move_of_a_sequence_exclude_each_other() {
    let pool = BlockPool::new(4, 16, PadPolicy::SkipNegative).unwrap();
    let cache = CacheEntry::new(&pool);
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(8).unwrap();
    let stamp = sequence.stamp();
    cache.mark_computed(stamp, 8);
    let step = |cached, len| {
        let tokens = StepTokens { stamp, cached, len, recompute: true };
        StepProgress::begin(&pool, Some(&cache), [(0, tokens)].into_iter())
    };
    let moves = StepProgress::begin_moves(&cache, stamp, 4).unwrap();
    for (cached, len) in [(7, 8), (8, 8)] {
        assert_eq!(step(cached, len).unwrap_err().rule, &rules::SEQUENCE_IN_PROGRESS);
    }
    // It reads what is in front of all targets.
    drop(step(4, 4).unwrap());
    assert!(StepProgress::begin_moves(&cache, stamp, 4).is_none());
    drop(moves);
    let writing = step(7, 8).unwrap();
    assert!(StepProgress::begin_moves(&cache, stamp, 4).is_none());
    drop(writing);
    assert!(StepProgress::begin_moves(&cache, stamp, 4).is_some());
    assert_eq!(cache.computed_tokens(stamp), 8);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let skip = PadPolicy::SkipNegative;
    for (blocks, block_size, pad) in [
        (0, 16, skip),
        (4, 0, skip),
        (1, 16, PadPolicy::DumpSlot(15)),
        (usize::MAX, usize::MAX, skip),
        (4, 0, PadPolicy::DumpSlot(3)),
    ] {
        let error = BlockPool::new(blocks, block_size, pad).unwrap_err();
        assert_eq!(error.rule, &rules::POOL_SIZE);
    }
}

#[test]
fn a_block_read_by_a_step_in_flight_is_not_handed_out() {
    let pool = BlockPool::new(1, 16, PadPolicy::SkipNegative).unwrap();
    let queue = ByHand::default();
    let block = pool.allocate().unwrap();
    let step = pool.begin_on(&queue);
    drop(block);
    let error = pool.allocate().unwrap_err();
    assert_eq!(error.given, "asked for 1 blocks; 0 free, 0 held, 1 waiting for steps in flight");
    assert!(error.fix.contains("synchronise"));
    drop(step);
    assert_eq!(pool.allocate().unwrap_err().rule, &rules::POOL_WAITING);
    // Waiting would not help.
    let error = pool.take(2).unwrap_err();
    assert_eq!(error.rule, &rules::POOL_EXHAUSTED);
    assert_eq!((pool.waiting_blocks(), pool.steps_in_flight()), (1, 1));
    queue.finish();
    assert_eq!(pool.allocate().unwrap().id(), 0);
    assert_eq!((pool.waiting_blocks(), pool.steps_in_flight()), (0, 0));
}

#[test]
fn a_step_whose_end_cannot_be_told_yet_keeps_its_blocks_until_it_can() {
    /// A queue whose end is not known until it is synchronised.
    #[derive(Default)]
    struct Unmarked(Arc<AtomicU64>);
    impl FencedQueue for Unmarked {
        fn fence(&self) -> Arc<dyn Fence> {
            Arc::new(Point(1, Arc::clone(&self.0)))
        }
    }
    let pool = BlockPool::new(2, 16, PadPolicy::SkipNegative).unwrap();
    let queue = Unmarked::default();
    let block = pool.allocate().unwrap();
    drop(pool.begin_on(&queue));
    drop(block);
    assert_eq!((pool.free_blocks(), pool.waiting_blocks()), (1, 1));
    queue.0.store(1, Ordering::SeqCst);
    assert_eq!((pool.free_blocks(), pool.waiting_blocks()), (2, 0));
}

#[derive(Clone, Debug)]
enum Act {
    Allocate,
    Share(usize),
    Drop(usize),
    Begin,
    End(usize),
    Finish(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => Just(Act::Allocate),
        1 => any::<usize>().prop_map(Act::Share),
        3 => any::<usize>().prop_map(Act::Drop),
        1 => Just(Act::Begin),
        1 => any::<usize>().prop_map(Act::End),
        1 => any::<usize>().prop_map(Act::Finish),
    ]
}

proptest! {
    /// No block is handed out while it is held, or while a step that began when it was held is not over; and in
    /// the end all are free.
    #[test]
    fn blocks_are_never_in_two_hands(acts in prop::collection::vec(act(), 0..120), blocks in 1usize..9) {
        let pool = BlockPool::new(blocks, 16, PadPolicy::SkipNegative).unwrap();
        let queue = ByHand::default();
        let mut held: Vec<Block> = Vec::new();
        let mut open = Vec::new();
        // Steps not over, each with what it may read; and the point at which it is over.
        let mut reading: HashMap<usize, (Option<u64>, Vec<usize>)> = HashMap::new();
        let mut steps = 0;
        for act in acts {
            match act {
                Act::Allocate => if let Ok(block) = pool.allocate() {
                    prop_assert!(held.iter().all(|other| other.id() != block.id()));
                    prop_assert!(reading.values().all(|(_, ids)| !ids.contains(&block.id())));
                    held.push(block);
                },
                Act::Share(n) if !held.is_empty() => {
                    let block = held[n % held.len()].clone();
                    prop_assert!(block.is_shared());
                    held.push(block);
                }
                Act::Drop(n) if !held.is_empty() => { held.swap_remove(n % held.len()); }
                Act::Begin => {
                    open.push((steps, pool.begin_on(&queue)));
                    reading.insert(steps, (None, held.iter().map(Block::id).collect()));
                    steps += 1;
                }
                Act::End(n) if !open.is_empty() => {
                    let (step, lease) = open.swap_remove(n % open.len());
                    drop(lease);
                    reading.get_mut(&step).unwrap().0 = Some(queue.queued.load(Ordering::SeqCst));
                }
                Act::Finish(n) => {
                    let queued = queue.queued.load(Ordering::SeqCst);
                    let to = n as u64 % (queued + 1);
                    queue.finish_to(to);
                    reading.retain(|_, (end, _)| end.is_none_or(|end| end > queue.done.load(Ordering::SeqCst)));
                }
                _ => {}
            }
            let mut distinct: Vec<usize> = held.iter().map(Block::id).collect();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(pool.held_blocks(), distinct.len());
            prop_assert_eq!(pool.free_blocks() + pool.waiting_blocks() + distinct.len(), blocks);
        }
        drop(held);
        drop(open);
        queue.finish();
        prop_assert_eq!(pool.free_blocks(), blocks);
        prop_assert_eq!(pool.steps_in_flight(), 0);
    }
}
