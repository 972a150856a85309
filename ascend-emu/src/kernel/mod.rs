//! Attention on the processor: a resolved call in, output out.
//!
//! [`run`] is the way in; [`mod@reference`] is the slow oracle. The layers, from the top:
//!
//! | file | what it knows |
//! |---|---|
//! | `schedule` | blocks of queries, their order, threads, splits over the keys |
//! | `panel`, `strip` | the flash-attention loop over key tiles, for many queries and for few |
//! | `finish` | division, rows without keys, merging of splits, writing |
//! | `tile` | fetching tiles of keys, values and mask |
//! | `attention`, `tensors` | numbering of queries; tensors as rows, checked; the only raw addresses |
//! | `exp`, `element`, `simd` | arithmetic, element types, instruction sets |
//!
//! Numbers are those of `innerPrecise` 0 throughout: scores, softmax and sums in single precision, weights rounded to
//! the element type before they meet the values, one rounding at the end. Nothing of the size of the score matrix is
//! ever allocated; a thread keeps a few tiles of working memory between calls. Results depend on the call alone, not on
//! the number of threads.

mod attention;
mod element;
mod exp;
mod finish;
mod panel;
pub mod reference;
mod schedule;
mod scratch;
mod simd;
mod strip;
mod tensors;
#[cfg(test)]
mod tests;
mod tile;

use ascend_spec::DType;
use ascend_spec::fia::{Problem, Work};
use attention::Attention;
use element::Element;
use half::{bf16, f16};
use simd::Level;
use std::fmt;

/// Base addresses of the tensors of one call; null where the call has none.
///
/// An address is that of element 0 in the descriptor's count; the descriptor's offset comes on top.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// `query`.
    pub query: *const u8,
    /// Each tensor of the `key` list.
    pub key: &'a [*const u8],
    /// Each tensor of the `value` list.
    pub value: &'a [*const u8],
    /// `attenMask`.
    pub atten_mask: *const u8,
    /// `attentionOut`.
    pub attention_out: *mut u8,
    /// `softmaxLse`.
    pub softmax_lse: *mut u8,
}

// SAFETY: plain addresses. Nothing is done with them outside of `run`, whose contract covers every thread of the pool.
unsafe impl Send for Buffers<'_> {}
// SAFETY: as above.
unsafe impl Sync for Buffers<'_> {}

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

/// Computes `problem` on the current rayon pool and returns when the output is written.
///
/// # Errors
/// [`UnsupportedType`] if the output's element type is not the query's, or neither FLOAT16, BFLOAT16 nor FLOAT; nothing
/// is written.
///
/// # Safety
///
/// Each address in `buffers` is valid, for the duration of the call, for the bytes that [`Problem::touches`] reports
/// for its tensor: for reads, and for `attention_out` and `softmax_lse` for writes. The two outputs overlap neither
/// each other nor an input. Alignment is not required.
pub unsafe fn run(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Result<(), UnsupportedType> {
    let dtype = problem.out_dtype();
    if problem.work == Work::Attend && problem.dtype() != dtype {
        return Err(UnsupportedType(problem.dtype()));
    }
    // SAFETY: the caller keeps this contract; the tensors have the type that the problem says.
    unsafe {
        match dtype {
            DType::Float16 => run_as::<f16>(problem, buffers, Level::detect()),
            DType::Bf16 => run_as::<bf16>(problem, buffers, Level::detect()),
            DType::Float => run_as::<f32>(problem, buffers, Level::detect()),
            other => return Err(UnsupportedType(other)),
        }
    }
    Ok(())
}

/// [`run`] over tensors with elements of type `T`, under one instruction set.
///
/// # Safety
///
/// As for [`run`].
unsafe fn run_as<T: Element>(problem: &Problem<'_>, buffers: &Buffers<'_>, level: Level) {
    if problem.work == Work::Nothing {
        return;
    }
    // SAFETY: the caller keeps this contract.
    let attention = unsafe { Attention::<T>::new(problem, buffers) };
    schedule::compute(level, &attention);
}
