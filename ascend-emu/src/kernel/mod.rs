//! Attention on the processor: computes a resolved call, from the tensors in memory to the outputs.
//!
//! [`run`] is the entry point and [`mod@reference`] the slow oracle in double precision. The algorithm is
//! FlashAttention-2 (Dao 2023): a task owns a block of queries and passes over the KV tiles that any of them sees,
//! while the online softmax (Milakov and Gimelshein 2018) keeps a running maximum and a running sum for each query.
//! Calls with few query blocks are cut over their keys as well, as in flash decoding (split-KV).
//!
//! | module | what it does |
//! |---|---|
//! | `schedule` | cuts a call into tasks: query blocks, and key ranges where blocks are few; runs them on threads |
//! | `prefill` | the loop over KV tiles for many queries: tiled matrix products |
//! | `decode` | the loop over KV tiles for a few queries: dot products with keys and values in place |
//! | `online_softmax` | running maximum and sum; the exponential |
//! | `split_kv` | combines the partial results of key ranges |
//! | `epilogue` | divides by the sum, handles rows without keys, writes output and log-sum-exp |
//! | `attention`, `sequence` | the call as the kernels see it: tensors, the sequences of the batch, and tasks |
//! | `kv`, `tile_load` | where keys and values are stored (tensor, pages, shared prefix); loading tiles of them |
//! | `visibility`, `mask` | which queries see which keys of a tile; the mask tensor and the drop mask |
//! | `position_bias` | the additive bias: a tensor, or one slope for each head |
//! | `dequantise` | scales and offsets of quantised tensors |
//! | `prefetch` | prefetching of cache lines |
//! | `tensor` | strided tensors in memory, by element type |
//! | `simd` | instruction sets |
//! | `roofline` | the best performance that the machine allows, for benchmarks |
//! | `lightning_indexer` | choosing the keys of sparse attention, with the products of `prefill` |
//! | `sparse_attention`, `token_rows` | attention to chosen keys, each row a sequence of its own; its tensors |
//! | `block_sparse` | attention to blocks of keys, each block of rows a sequence of its own |
//! | `compression`, `native_sparse` | compressed tokens; attention over a paged cache, and the choice of blocks |
//! | `delta_rule`, `delta_chunks` | the gated delta rule, token by token and in chunks |
//! | `register_tile` | the inner loop of the matrix products of the other operators |
//! | `merge`, `ring_update`, `batch_mat_mul`, `rms_norm` | the other operators: merges, products, normalised rows |
//!
//! Layouts have no kernels of their own: packed sequences, paged caches, shared prefixes, rotary parts and quantised
//! elements are handled where rows are loaded into tiles of single precision.
//!
//! # Precision
//!
//! The kernels compute as `innerPrecise` 0 does: scores, softmax and sums in single precision, weights rounded to the
//! element type before they are multiplied with the values, one rounding at the end. A result depends on the call and
//! the instruction set alone. How keys are split follows from the lengths and not from the number of threads, so
//! equal calls give equal bits.
//!
//! With [`RunOptions::deterministic`] equal rows give equal bits, in whatever call: every row is computed by the
//! prefill kernel, over the same KV tiles and key ranges, counted from key 0, so that its sums have one order.
//!
//! # Memory
//!
//! The kernels never allocate a score matrix. The largest allocation is a summary of a mask tensor, with one byte for
//! 256 elements and at most 16 MB. A thread keeps its tiles between calls. A call that is split over its keys also
//! keeps the combined output of each query block, and the partial results that arrived before their turn.
//! [`RunOptions::working_memory`] receives the bytes that a call took.

mod attention;
pub(crate) mod batch_mat_mul;
pub(crate) mod block_sparse;
pub(crate) mod compression;
pub(crate) mod convolution;
mod decode;
pub(crate) mod delta_chunks;
pub(crate) mod delta_rule;
mod dequantise;
pub(crate) mod element_view;
mod epilogue;
mod kv;
pub(crate) mod lightning_indexer;
mod mask;
pub(crate) mod merge;
pub(crate) mod native_sparse;
mod online_softmax;
mod position_bias;
mod prefetch;
mod prefill;
pub mod reference;
mod register_tile;
pub(crate) mod ring_update;
pub(crate) mod rms_norm;
pub mod roofline;
mod schedule;
mod scratch;
mod sequence;
mod simd;
pub(crate) mod sparse_attention;
mod split_kv;
mod tensor;
#[cfg(test)]
mod tests;
mod tile_load;
pub(crate) mod token_rows;
mod top_k;
mod visibility;

use crate::host_memory::HostMemoryExhausted;
use ascend_spec::attention_problem::{AttentionProblem, TensorRole, Work};
use ascend_spec::{DType, MaskGeometry};
use attention::Attention;
pub(crate) use attention::read_padding;
pub(crate) use kv::block_table::{BadBlock, BlockIds};
pub(crate) use prefill::QUERIES as BLOCK_QUERIES;
pub(crate) use simd::Level;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keys of a KV tile.
const TILE_KEYS: usize = 96;

/// Keys of a sub-tile of the decode kernel.
const SUB_TILE_KEYS: usize = TILE_KEYS / 2;

/// Base addresses of the tensors of one call; null where the call has none.
///
/// An address is that of element 0 in the descriptor's count; the descriptor's offset is added to it.
#[derive(Clone, Copy)]
pub struct Buffers<'a>(pub &'a dyn Fn(TensorRole) -> *mut u8);

impl Buffers<'_> {
    fn base(&self, role: TensorRole) -> *mut u8 {
        (self.0)(role)
    }
}

impl fmt::Debug for Buffers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Buffers")
    }
}

/// Why the kernels do not compute a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// An element type that they do not compute with.
    #[error("the attention kernel does not compute with {}", .0.name())]
    UnsupportedType(DType),
    /// There is no host memory for a list of this number of sequences, blocks or tasks.
    #[error("no host memory for {0} elements")]
    NoHostMemory(usize),
}

impl From<HostMemoryExhausted> for KernelError {
    fn from(exhausted: HostMemoryExhausted) -> Self {
        KernelError::NoHostMemory(exhausted.0)
    }
}

/// Computes `problem` on the current rayon pool and returns when the output is written. Keys of blocks that the cache
/// does not have count as zeros.
///
/// # Errors
/// [`KernelError::UnsupportedType`] if the kernels cannot read or write a tensor's element type, and
/// [`KernelError::NoHostMemory`]; nothing is written.
///
/// # Safety
///
/// Each address in `buffers` is valid, for the duration of the call, for the bytes that [`AttentionProblem::touches`]
/// reports for its tensor: for reads, and for the output, the log-sum-exp and the softmax outputs for writes. The
/// outputs overlap neither each other nor an input. Alignment is not required.
pub unsafe fn run(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Result<(), KernelError> {
    // SAFETY: the caller keeps this contract.
    unsafe { run_with(problem, buffers, &RunOptions::default()) }
}

/// Settings of a run that no call of an operator can express: one of its context, and those of tests and benchmarks.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions<'a> {
    /// Whether the bits of a row depend on the row alone: its query, and the keys that it sees at their positions.
    pub deterministic: bool,
    /// Whether every tensor of the query's element type holds `FLOAT` instead.
    pub single: bool,
    /// Visible keys, replacing the problem's for every sequence with the same lengths.
    pub geometry: Option<&'a MaskGeometry>,
    /// Receives the bytes of working memory that the call took, over all threads.
    pub working_memory: Option<&'a AtomicUsize>,
}

/// Computes `problem` as [`run`] does, with `options`.
///
/// # Errors
/// As for [`run`].
///
/// # Safety
///
/// As for [`run`], with four bytes for each element of the tensors that hold `FLOAT`.
pub unsafe fn run_with(
    problem: &AttentionProblem<'_>,
    buffers: &Buffers<'_>,
    options: &RunOptions<'_>,
) -> Result<(), KernelError> {
    if let Some(dtype) = unsupported(problem) {
        return Err(KernelError::UnsupportedType(dtype));
    }
    if problem.work == Work::Nothing {
        return Ok(());
    }
    // SAFETY: the caller keeps this contract.
    let mut attention = unsafe { Attention::new(problem, buffers, options.single) }?;
    attention.deterministic = options.deterministic;
    if let Some(geometry) = options.geometry {
        attention.override_geometry(geometry);
    }
    let summary = attention.summarise_mask();
    let bytes = summary + schedule::compute(&attention)?;
    if let Some(working_memory) = options.working_memory {
        working_memory.store(bytes, Ordering::Relaxed);
    }
    Ok(())
}

/// Name of the instruction set that [`run`] computes with.
pub fn instruction_set() -> &'static str {
    Level::chosen().name()
}

/// Finds the first entry of the block table that [`run`] would read and that names no block of the cache.
///
/// # Safety
///
/// As for [`run`].
pub(crate) unsafe fn bad_block(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Option<BadBlock> {
    if problem.work != Work::Attend {
        return None;
    }
    // SAFETY: a problem that attends touches its block table.
    unsafe { kv::block_table::first_bad(problem, buffers) }
}

/// The first element type that the kernels cannot read or write in its tensor.
fn unsupported(problem: &AttentionProblem<'_>) -> Option<DType> {
    let own = problem.dtype();
    let out = problem.out_dtype();
    if !matches!(own, DType::Float16 | DType::Bf16 | DType::Float) {
        return Some(own);
    }
    let quantised = [DType::Int8, DType::Float8E4M3Fn, DType::HiFloat8];
    if out != own && !quantised.contains(&out) {
        return Some(out);
    }
    if problem.work != Work::Attend {
        return None;
    }
    let first = problem.key_value(0);
    let prefix = problem.prefix.map(|prefix| [prefix.key, prefix.value]);
    [problem.query, first.key, first.value]
        .into_iter()
        .chain(problem.query_rope)
        .chain(first.key_rope)
        .chain(problem.bias.map(|bias| bias.rows))
        .chain(prefix.into_iter().flatten())
        .map(|rows| rows.dtype)
        .find(|&dtype| !tensor::input::reads(dtype, own))
}
