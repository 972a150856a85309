//! Keys and values that all sequences begin with.

use crate::error::Error;
use crate::memory::Element;
use crate::tensor::{AnyTensor, Tensor};

/// Keys and values that stand before those of every sequence, such as a system prompt (`keySharedPrefix`,
/// `valueSharedPrefix`, `actualSharedPrefixLen`).
///
/// Laid out as key and value are, with one sequence: `[1, N, P, D]`, `[1, P, N, D]` or `[1, P, N * D]`, of the same
/// element type. The prefix counts as keys: masks and position bias begin with it.
///
/// Since V2 of the operator, CANN 8.1. Not with a paged cache, left padding, packed sequences or rotary parts.
#[derive(Clone, Copy, Debug)]
pub struct SharedPrefix<'a> {
    pub(super) key: &'a AnyTensor,
    pub(super) value: &'a AnyTensor,
    pub(super) len: Option<i64>,
}

impl<'a> SharedPrefix<'a> {
    /// A prefix of as many keys as the tensors have.
    pub fn new<T: Element>(key: &'a Tensor<T>, value: &'a Tensor<T>) -> Self {
        Self { key, value, len: None }
    }

    /// As [`SharedPrefix::new`], but for tensors whose element type is known at run time.
    pub fn of_any(key: &'a AnyTensor, value: &'a AnyTensor) -> Self {
        Self { key, value, len: None }
    }

    /// Number of valid keys, from the first on. Part of the plan: a launch has to have the same.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a number beyond INT64.
    pub fn valid(mut self, keys: usize) -> Result<Self, Error> {
        let len = i64::try_from(keys).map_err(|_| {
            Error::invalid("actual_shared_prefix_len", keys, i64::MAX).fix("give at most the keys of the prefix")
        })?;
        self.len = Some(len);
        Ok(self)
    }
}
