//! The schedule of a call: tasks of query blocks, longest first, with the keys split where there are few blocks.
//!
//! Query blocks are the outer loop of FlashAttention-2 (Dao 2023) and independent of each other. A call with few of
//! them, such as decode, is split along the keys as well, as in flash decoding; `split_kv` combines the partial
//! results.

use super::TILE_KEYS;
use super::attention::Attention;
use super::attention::{Task, TaskContext};
use super::epilogue::Epilogue;
use super::online_softmax::OnlineSoftmax;
use super::scratch::Scratch;
use super::sequence::Sequence;
use super::simd::{Kernel, Level, Simd};
use super::split_kv::SplitKv;
use super::{decode, prefill};
use crate::host_memory::{HostMemoryExhausted, try_with_capacity};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};

/// With fewer query blocks than this, each is split over its keys. This is a constant, and not the number of threads,
/// so that results do not depend on the machine.
const FEW_BLOCKS: usize = 32;

/// Number of tasks to split a call into.
const WANTED_TASKS: usize = 64;

/// Smallest number of keys for a task of its own.
const MIN_SPLIT_KEYS: usize = 6 * TILE_KEYS;

/// Keys of each task of a deterministic call. Ranges of this length are counted from key 0.
const DETERMINISTIC_SPLIT_KEYS: usize = 32 * TILE_KEYS;

/// Smallest number of multiplications for which other threads are woken.
const MIN_PARALLEL_WORK: u64 = 1 << 21;

/// A query block whose keys are split among tasks.
#[derive(Debug)]
struct Split {
    block: Task,
    results: SplitKv,
}

/// Computes a call. Returns the bytes of working memory that it took.
///
/// # Errors
/// There is no host memory for the tasks.
pub(super) fn compute(attention: &Attention) -> Result<usize, HostMemoryExhausted> {
    let level = Level::chosen();
    let blocks = longest_first(blocks(attention)?)?;
    let busy = blocks.iter().filter(|block| !block.keys.is_empty()).count();
    let count = if busy == 0 || busy >= FEW_BLOCKS { 1 } else { WANTED_TASKS.div_ceil(busy) };
    let dims = (attention.dim + attention.value_dim) as u64;
    let work = blocks.iter().map(Task::work).fold(0, u64::saturating_add);
    let work = work.saturating_mul(dims);

    // Each task with the split that it belongs to, and its number in the split.
    let mut tasks = try_with_capacity(blocks.len())?;
    let mut splits = Vec::new();
    for block in blocks {
        let length = if attention.deterministic { DETERMINISTIC_SPLIT_KEYS } else { split_length(&block, count) };
        if block.keys.len() <= length {
            tasks.push((block, None));
            continue;
        }
        for (number, first) in block.keys.clone().step_by(length).enumerate() {
            let keys = first..block.keys.end.min(first + length);
            let task = Task { keys, ..block.clone() };
            tasks.push((task, Some((splits.len(), number))));
        }
        let results = SplitKv::new(block.keys.len().div_ceil(length));
        splits.push(Split { block, results });
    }
    let disjoint = attention.is_disjoint()
        && attention.out.is_disjoint()
        && attention.lse.as_ref().is_none_or(|lse| lse.is_disjoint());
    let parallel = work >= MIN_PARALLEL_WORK && disjoint;

    let bytes = in_parallel(parallel, tasks.len(), |index, scratch| {
        let (task, split) = &tasks[index];
        let Some(sequence) = attention.sequences.get(task.sequence) else {
            return;
        };
        let context = TaskContext { attention, sequence, task, scratch };
        let split = split.map(|(split, number)| (&splits[split], number));
        level.run(ComputeTask { context, split });
    });
    let of_splits = splits.iter().map(|split| split.results.bytes());
    Ok(bytes + of_splits.sum::<usize>())
}

/// Computes a call whose sequences `list` makes of `items`, at most `most` at a time, since their lists of keys take
/// memory. An item may have no sequence.
///
/// # Errors
/// There is no host memory for the sequences or their tasks.
pub(super) fn compute_listed<T>(
    mut attention: Attention,
    most: usize,
    items: impl Iterator<Item = T>,
    list: impl Fn(T) -> Result<Option<Sequence>, HostMemoryExhausted>,
) -> Result<(), HostMemoryExhausted> {
    let mut items = items.peekable();
    while items.peek().is_some() {
        attention.sequences = try_with_capacity(most)?;
        for item in items.by_ref().take(most) {
            attention.sequences.extend(list(item)?);
        }
        compute(&attention)?;
    }
    Ok(())
}

/// The query blocks of a call, each with the keys that some of its queries see.
fn blocks(attention: &Attention) -> Result<Vec<Task>, HostMemoryExhausted> {
    let queries = |sequence: &Sequence| sequence.rows * attention.group;
    let count = |size: usize| {
        let blocks = attention.sequences.iter().map(|sequence| {
            let blocks = queries(sequence).div_ceil(size);
            blocks.saturating_mul(attention.kv_heads)
        });
        blocks.fold(0, usize::saturating_add)
    };
    // Where full-size blocks are few, smaller blocks are better than splitting the keys, whose results have to be
    // combined.
    let size = if count(prefill::QUERIES) < FEW_BLOCKS { prefill::QUERIES / 2 } else { prefill::QUERIES };
    let mut blocks = try_with_capacity(count(size))?;
    for (number, sequence) in attention.sequences.iter().enumerate() {
        let all = 0..sequence.geometry.kv_len() as usize;
        let queries = queries(sequence);
        for kv_head in 0..attention.kv_heads {
            for first in (0..queries).step_by(size) {
                let queries = first..queries.min(first + size);
                let mut keys = sequence.span(attention.rows(&queries), &all);
                if attention.deterministic && !keys.is_empty() {
                    keys.start -= keys.start % DETERMINISTIC_SPLIT_KEYS;
                }
                blocks.push(Task { sequence: number, kv_head, queries, keys });
            }
        }
    }
    Ok(blocks)
}

/// Sorts the key heads with the most work first, and the longest query blocks of each first. The tasks that run last
/// are then short, and query blocks that read the same keys and values stay together, so that these may stay in a
/// cache.
fn longest_first(blocks: Vec<Task>) -> Result<Vec<Task>, HostMemoryExhausted> {
    let head = |block: &Task| (block.sequence, block.kv_head);
    let mut order = try_with_capacity(blocks.len())?;
    for (number, of_head) in blocks.chunk_by(|a, b| head(a) == head(b)).enumerate() {
        let work = of_head.iter().map(Task::work).fold(0, u64::saturating_add);
        for block in of_head {
            let place = order.len();
            order.push((Reverse(work), number, Reverse(block.work()), place));
        }
    }
    // Blocks with the same amount of work keep their order.
    order.sort_unstable();
    let sorted = order.into_iter().filter_map(|(.., place)| blocks.get(place));
    let mut all = try_with_capacity(blocks.len())?;
    all.extend(sorted.cloned());
    Ok(all)
}

/// Keys of each task when a query block is split into at most `count` tasks, even and large enough.
fn split_length(block: &Task, count: usize) -> usize {
    let even = block.keys.len().div_ceil(count);
    even.max(MIN_SPLIT_KEYS).next_multiple_of(TILE_KEYS)
}

/// Calls `work` with each number below `count`, started in order: on the current rayon pool if `parallel`, otherwise
/// on this thread. Returns the bytes of working memory that it took.
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
            bytes.fetch_add(scratch.used(), Ordering::Relaxed);
        });
    };
    let workers = if parallel { rayon::current_num_threads().min(count) } else { 1 };
    if workers > 1 {
        (0..workers).into_par_iter().with_max_len(1).for_each(|_| worker());
    } else {
        worker();
    }
    bytes.into_inner()
}

/// Computes one task.
struct ComputeTask<'a> {
    context: TaskContext<'a, 'a>,
    /// The split that the task belongs to, and its number there.
    split: Option<(&'a Split, usize)>,
}

impl Kernel for ComputeTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ComputeTask { context, split } = self;
        let (attention, sequence, task) = (context.attention, context.sequence, context.task);
        let softmax = if task.keys.is_empty() {
            OnlineSoftmax::empty(context.scratch, task.queries.len(), attention.columns())
        } else if task.queries.len() <= decode::QUERIES && !attention.deterministic {
            simd.outline(decode::Attend(context))
        } else {
            simd.outline(prefill::Attend(context))
        };
        let mut combined;
        let (task, softmax) = match split {
            None => (task, softmax),
            Some((split, number)) => {
                combined = split.results.add(number, &softmax);
                match &mut combined {
                    Some(combined) => (&split.block, combined.softmax()),
                    None => return,
                }
            }
        };
        simd.outline(Epilogue { attention, sequence, task, softmax });
    }
}
