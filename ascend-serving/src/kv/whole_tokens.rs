//! A cache in which a token's row is contiguous, as rows that can be copied.

use ascend_attention::{Element, Tensor};

use crate::error::{Error, Result};

/// A cache as contiguous rows `[tokens, N * D]`.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of another block size, or one in which a
/// token has several pieces: NZ, or BnNBsD of several heads.
pub(super) fn whole_tokens<T: Element>(cache: &Tensor<T>, block_size: usize) -> Result<Tensor<T>> {
    let size = block_size;
    let shape = match *cache.shape() {
        [blocks, of, hidden] if of == size => Some((blocks, hidden)),
        [blocks, 1, of, dim] if of == size => Some((blocks, dim)),
        _ => None,
    };
    let shape = shape.and_then(|(blocks, hidden)| Some([blocks.checked_mul(size)?, hidden]));
    match shape {
        Some(shape) => Ok(cache.reshape(shape)?),
        None => Err(Error::invalid(
            "cache",
            cache.desc(),
            format_args!(
                "[blocks, {block_size}, N * D], or [blocks, 1, {block_size}, D], whose tokens lie whole"
            ),
        ).fix("choose BnBsH, or BnNBsD of one head")),
    }
}
