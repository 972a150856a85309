//! Who computes what: blocks of queries, split over key ranges where there are few, the longest first.

use super::attention::{Attention, Sequence};
use super::finish::{Finish, State};
use super::parts::Parts;
use super::scratch::Scratch;
use super::simd::{Kernel, Level, Simd};
use super::tile::KEYS;
use super::{panel, strip};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// With fewer blocks than this, each is split over its keys. A constant, and not the number of threads, so that results
/// do not depend on the machine.
const FEW_BLOCKS: usize = 32;

/// Tasks to split into.
const WANTED_TASKS: usize = 64;

/// Keys that are worth a task of their own.
const LEAST_KEYS: usize = 6 * KEYS;

/// Multiplications that are worth waking another thread.
const LEAST_WORK: u64 = 1 << 21;

/// Some queries of one key head, and the keys that they attend to.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Task {
    fn work(&self) -> u64 {
        (self.queries.len() as u64).saturating_mul(self.keys.len() as u64)
    }
}

/// A block whose keys are split among tasks.
#[derive(Debug)]
struct Split {
    block: Task,
    parts: Parts,
}

/// Computes all of `attention`. Gives the bytes of working memory that this took.
pub(super) fn compute(level: Level, attention: &Attention) -> usize {
    let mut blocks = blocks(attention);
    longest_first(&mut blocks);
    let busy = blocks.iter().filter(|block| !block.keys.is_empty()).count();
    let count = if busy == 0 || busy >= FEW_BLOCKS {
        1
    } else {
        WANTED_TASKS.div_ceil(busy)
    };
    let dims = (attention.dim + attention.value_dim) as u64;
    let work = blocks.iter().map(Task::work).fold(0, u64::saturating_add);
    let work = work.saturating_mul(dims);

    // Each with the split that it is a part of, and its number among the parts.
    let mut tasks = Vec::with_capacity(blocks.len());
    let mut splits = Vec::new();
    for block in blocks {
        let length = part_length(&block, count);
        if block.keys.len() <= length {
            tasks.push((block, None));
            continue;
        }
        for (number, first) in block.keys.clone().step_by(length).enumerate() {
            let keys = first..block.keys.end.min(first + length);
            let task = Task {
                keys,
                ..block.clone()
            };
            tasks.push((task, Some((splits.len(), number))));
        }
        let parts = Parts::new(block.keys.len().div_ceil(length));
        splits.push(Split { block, parts });
    }
    let disjoint = attention.is_disjoint()
        && attention.out.is_disjoint()
        && attention.lse.as_ref().is_none_or(|lse| lse.is_disjoint());
    let parallel = work >= LEAST_WORK && disjoint;

    let tiles = in_parallel(parallel, tasks.len(), |index, scratch| {
        let (task, part) = &tasks[index];
        let Some(sequence) = attention.sequences.get(task.sequence) else {
            return;
        };
        let work = Work {
            attention,
            sequence,
            task,
            scratch,
        };
        let part = part.map(|(split, number)| (&splits[split], number));
        level.run(Attend { work, part });
    });
    tiles
        + splits
            .iter()
            .map(|split| split.parts.bytes())
            .sum::<usize>()
}

/// The blocks of a call, each with all the keys that any of its queries sees.
fn blocks(attention: &Attention) -> Vec<Task> {
    let queries = |sequence: &Sequence| sequence.rows * attention.group;
    let whole = attention.sequences.iter().map(|sequence| {
        let blocks = queries(sequence).div_ceil(panel::QUERIES);
        blocks.saturating_mul(attention.kv_heads)
    });
    // Where large blocks would be few, more of them go round better than parts of them, which have to be merged.
    let size = if whole.fold(0, usize::saturating_add) < FEW_BLOCKS {
        panel::QUERIES / 2
    } else {
        panel::QUERIES
    };
    let mut blocks = Vec::new();
    for (number, sequence) in attention.sequences.iter().enumerate() {
        let all = 0..sequence.geometry.kv_len() as usize;
        let queries = queries(sequence);
        for kv_head in 0..attention.kv_heads {
            for first in (0..queries).step_by(size) {
                let queries = first..queries.min(first + size);
                let keys = sequence.span(attention.rows(&queries), &all);
                blocks.push(Task {
                    sequence: number,
                    kv_head,
                    queries,
                    keys,
                });
            }
        }
    }
    blocks
}

/// Puts the key heads with most work first, and of each the longest blocks: what is left over at the end is short, and
/// blocks that read the same keys and values stay together, which a cache may hold.
fn longest_first(blocks: &mut [Task]) {
    let head = |block: &Task| (block.sequence, block.kv_head);
    let mut order = Vec::with_capacity(blocks.len());
    for (number, of_head) in blocks.chunk_by(|a, b| head(a) == head(b)).enumerate() {
        let work = of_head.iter().map(Task::work).fold(0, u64::saturating_add);
        order.extend(
            of_head
                .iter()
                .map(|block| (Reverse(work), number, Reverse(block.work()))),
        );
    }
    let mut keyed: Vec<_> = order.into_iter().zip(blocks.iter().cloned()).collect();
    keyed.sort_by_key(|(key, _)| *key);
    for (place, (_, block)) in blocks.iter_mut().zip(keyed) {
        *place = block;
    }
}

/// Keys of a part where a block is split into at most `count` of them, even and worth it.
fn part_length(block: &Task, count: usize) -> usize {
    let even = block.keys.len().div_ceil(count);
    even.max(LEAST_KEYS).next_multiple_of(KEYS)
}

/// Calls `work` with each number below `count`, in order of begin, on the current pool or, if not `parallel`, here. Gives
/// the bytes of working memory that it took.
fn in_parallel(parallel: bool, count: usize, work: impl Fn(usize, &mut Scratch) + Sync) -> usize {
    let (next, bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let worker = || {
        Scratch::with(|scratch| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                work(index, scratch);
            }
            bytes.fetch_add(scratch.asked(), Ordering::Relaxed);
        });
    };
    let workers = if parallel {
        rayon::current_num_threads().min(count)
    } else {
        1
    };
    if workers > 1 {
        (0..workers)
            .into_par_iter()
            .with_max_len(1)
            .for_each(|_| worker());
    } else {
        worker();
    }
    bytes.into_inner()
}

/// One task, and what it is computed with.
pub(super) struct Work<'a, 's> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) scratch: &'s mut Scratch,
}

/// Computes one task.
struct Attend<'a> {
    work: Work<'a, 'a>,
    /// The split that it is a part of, and its number there.
    part: Option<(&'a Split, usize)>,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Attend { work, part } = self;
        let (attention, sequence, task) = (work.attention, work.sequence, work.task);
        let state = if task.keys.is_empty() {
            State::empty(work.scratch, task.queries.len(), attention.columns())
        } else if task.queries.len() <= strip::QUERIES {
            simd.apart(strip::Attend(work))
        } else {
            simd.apart(panel::Attend(work))
        };
        let mut whole;
        let (task, state) = match part {
            None => (task, state),
            Some((split, number)) => {
                whole = split.parts.add(number, &state);
                match &mut whole {
                    Some(whole) => (&split.block, whole.state()),
                    None => return,
                }
            }
        };
        simd.apart(Finish {
            attention,
            sequence,
            task,
            state,
        });
    }
}
