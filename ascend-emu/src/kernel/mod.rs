//! Attention on the processor: a resolved call in, output out.
//!
//! [`run`] is the way in; [`mod@reference`] is the slow oracle. The layers, from the top:
//!
//! | file | what it knows |
//! |---|---|
//! | `schedule` | blocks of queries, their order, threads, splits over the keys |
//! | `panel`, `products`, `strip`, `strip_products`, `softmax` | the flash-attention loop over key tiles, for many queries and for few |
//! | `parts`, `finish` | merging of splits; division, rows without keys, writing |
//! | `fetch` | tiles of keys and values, widened |
//! | `tile`, `cells`, `ahead` | who sees which keys of a tile; where the mask tensor need not be asked; reading it |
//! | `attention`, `keys`, `blocks` | numbering of queries; where the rows of queries, keys and values are |
//! | `source`, `factors`, `mask`, `output` | tensors by the row, whatever their type; scales, masks, quantised output |
//! | `tensors`, `lines`, `requests` | rows of elements of one type, checked; those of a tile without a copy; asking for them early |
//! | `exp`, `element`, `simd` | arithmetic, element types, instruction sets |
//! | `scatter`, `merge` | the operators beside attention: rows into a paged cache; parts into one |
//!
//! No layout has a kernel of its own: packed sequences, paged caches, shared prefixes, rotary parts and quantised
//! numbers end where rows are fetched into tiles, which hold plain single precision.
//!
//! Numbers are those of `innerPrecise` 0 throughout: scores, softmax and sums in single precision, weights rounded to
//! the element type before they meet the values, one rounding at the end. Results depend on the call and the instruction
//! set alone: how keys are split follows from the lengths, not from the number of threads, so that every call is
//! deterministic. That costs what merging at most 64 parts does, also where one thread computes them all.
//!
//! # Memory
//!
//! Nothing of the size of the score matrix is ever allocated but a summary of a mask tensor, a byte for 256 of the
//! tensor's and at most 16 MB. [`Beyond::working_memory`] says what a call takes. A thread keeps its tiles between calls:
//! 0.5 MB for prefill at head dimension 128 and 0.3 MB at 64, 0.05 MB for decode at 128, 0.5 MB for latent attention of 32
//! heads. A call that is split over its keys also keeps, of each block, the output of the parts so far in single precision, and
//! of those that came before their turn.
//!
//! # What is not done
//!
//! Tiles that nobody sees, by the geometry or by the mask tensor, are not fetched; tiles that everybody sees take no mask;
//! a tile is fetched once for all query heads that share a key head, and values that are the beginning of their keys, as in
//! latent attention, are not fetched at all. Key tiles of 96 keep the output from being touched too often, blocks of 384
//! queries keep the tiles from being fetched too often; together they take half a megabyte of a second cache. With blocks
//! of 192 queries, fetching took a tenth of the time of AVX-512 kernels, and with 96 a fifth.

mod ahead;
mod attention;
mod blocks;
mod cells;
mod element;
mod exp;
mod factors;
mod fetch;
mod finish;
mod keys;
mod lines;
mod mask;
pub(crate) mod merge;
mod output;
mod panel;
mod parts;
mod products;
pub mod reference;
mod requests;
pub mod roof;
pub(crate) mod scatter;
mod schedule;
mod scratch;
mod simd;
mod softmax;
mod source;
mod strip;
mod strip_products;
mod tensors;
#[cfg(test)]
mod tests;
mod tile;

use ascend_spec::fia::{Operand, Problem, Work};
use ascend_spec::{DType, MaskGeometry};
use attention::Attention;
pub use blocks::BadBlock;
pub(crate) use panel::QUERIES as BLOCK_QUERIES;
pub(crate) use simd::Level;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Base addresses of the tensors of one call; null where the call has none.
///
/// An address is that of element 0 in the descriptor's count; the descriptor's offset comes on top.
#[derive(Clone, Copy)]
pub struct Buffers<'a>(pub &'a dyn Fn(Operand) -> *mut u8);

impl Buffers<'_> {
    fn base(&self, operand: Operand) -> *mut u8 {
        (self.0)(operand)
    }
}

impl fmt::Debug for Buffers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Buffers")
    }
}

/// An element type that the kernels do not compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedType(pub DType);

impl fmt::Display for UnsupportedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the attention kernel does not compute with {}",
            self.0.name()
        )
    }
}

impl std::error::Error for UnsupportedType {}

/// Computes `problem` on the current rayon pool and returns when the output is written. Keys of blocks that the cache
/// does not have (see [`bad_block`]) count as zeros.
///
/// # Errors
/// [`UnsupportedType`] if a tensor has an element type that the kernels do not take at its place; nothing is written.
///
/// # Safety
///
/// Each address in `buffers` is valid, for the duration of the call, for the bytes that [`Problem::touches`] reports
/// for its tensor: for reads, and for `attentionOut` and `softmaxLse` for writes. The two outputs overlap neither
/// each other nor an input. Alignment is not required.
pub unsafe fn run(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Result<(), UnsupportedType> {
    // SAFETY: the caller keeps this contract.
    unsafe { run_beyond(problem, buffers, &Beyond::default()) }
}

/// What the kernels compute that no call of an operator can say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beyond<'a> {
    /// Every tensor of the problem's own element type holds `FLOAT` instead.
    pub single: bool,
    /// Visible keys, in place of the problem's, of the sequences that have its lengths.
    pub geometry: Option<&'a MaskGeometry>,
    /// Where to put the bytes of working memory that the call took, over all threads.
    pub working_memory: Option<&'a AtomicUsize>,
}

/// [`run`] with more than the problem says.
///
/// # Errors
/// As for [`run`].
///
/// # Safety
///
/// As for [`run`], with four bytes for each element of the tensors that hold `FLOAT`.
pub unsafe fn run_beyond(
    problem: &Problem<'_>,
    buffers: &Buffers<'_>,
    beyond: &Beyond<'_>,
) -> Result<(), UnsupportedType> {
    if let Some(dtype) = unsupported(problem) {
        return Err(UnsupportedType(dtype));
    }
    // SAFETY: the caller keeps this contract; the tensors have the type that problem and `beyond` say.
    unsafe { run_under(Level::chosen(), problem, buffers, beyond) };
    Ok(())
}

/// Name of the instruction set that [`run`] computes with.
pub fn instruction_set() -> &'static str {
    Level::chosen().name()
}

/// The first entry of the block table that [`run`] would look up and that names no block of the cache.
///
/// # Safety
///
/// As for [`run`].
pub unsafe fn bad_block(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Option<BadBlock> {
    if problem.work != Work::Attend {
        return None;
    }
    // SAFETY: a problem that attends touches its block table.
    unsafe { blocks::first_bad(problem, buffers) }
}

/// An element type that the kernels do not take at its place.
fn unsupported(problem: &Problem<'_>) -> Option<DType> {
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
        .chain(problem.pse)
        .chain(prefix.into_iter().flatten())
        .map(|rows| rows.dtype)
        .find(|&dtype| !source::reads(dtype, own))
}

/// [`run_beyond`] under one instruction set, for types that the kernels take.
///
/// # Safety
///
/// As for [`run_beyond`].
unsafe fn run_under(
    level: Level,
    problem: &Problem<'_>,
    buffers: &Buffers<'_>,
    beyond: &Beyond<'_>,
) {
    if problem.work == Work::Nothing {
        return;
    }
    // SAFETY: the caller keeps this contract.
    let mut attention = unsafe { Attention::new(problem, buffers, beyond.single) };
    if let Some(geometry) = beyond.geometry {
        attention.see(geometry);
    }
    let cells = attention.summarise_mask();
    let bytes = cells + schedule::compute(level, &attention);
    if let Some(working_memory) = beyond.working_memory {
        working_memory.store(bytes, Ordering::Relaxed);
    }
}
