//! Rows of prompts as PromptFlashAttention takes them: keys without a block table, queries at their keys' rows.

use std::ops::Range;

use ascend_attention::spec::ops::prompt_flash_attention::PromptCall;
use ascend_attention::{Element, Stream, Tensor};

use crate::error::Result;
use crate::kv::{CachedRows, LayerCache};

use super::paged_decode::sizes;
use super::step_context::{LayerTensors, StepContext, batched, size};
use super::step_memory::tensor_bytes;

/// The numbers of new tokens and of keys, the same for each request of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) new: usize,
    pub(super) keys: usize,
    /// Whether some keys are cached ones.
    pub(super) cached: bool,
    /// Whether some keys are hidden from some tokens.
    pub(super) masked: bool,
}

impl Prompt {
    /// Rows of each request in key and value; with a mask in query and output too.
    pub(super) fn rows(self) -> usize {
        let step = PromptCall::CARD_MASK_ROWS as usize;
        match self.masked {
            true => (self.keys.checked_next_multiple_of(step)).unwrap_or(self.keys),
            false => self.keys,
        }
    }

    /// Whether there are fewer new tokens than the rows that the mask needs.
    pub(super) fn is_padded(self) -> bool {
        self.masked && self.new != self.rows()
    }

    /// Whether the call reads copies of keys and values instead of the step's own tensors.
    pub(super) fn copies_keys(self) -> bool {
        self.cached || self.is_padded()
    }
}

/// The requests of a call.
#[derive(Debug)]
pub(super) struct Prompts {
    pub(super) requests: usize,
    pub(super) prompt: Prompt,
    /// The keys of each request in the cache, unless they are the step's own.
    pub(super) cached: Vec<CachedRows>,
}

impl Prompts {
    fn rows(&self) -> Range<usize> {
        0..self.prompt.rows() * self.requests
    }

    /// For each request its new tokens among those of the call, and their place in the padded tensors.
    fn places(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let Prompt { new, keys, .. } = self.prompt;
        let rows = self.prompt.rows();
        (0..self.requests).map(move |request| {
            let token = request * new;
            let behind = request * rows + keys;
            (token..token + new, behind.saturating_sub(new)..behind)
        })
    }
}

/// Keys and values, `[tokens, N * D]`.
pub(super) struct KeyRows<T: Element> {
    pub(super) key: Tensor<T>,
    pub(super) value: Tensor<T>,
}

impl<T: Element> KeyRows<T> {
    /// The step's own keys and values.
    pub(super) fn of_step(layer: &LayerTensors<'_, T>) -> Result<Self> {
        Ok(Self { key: flat(layer.key)?, value: flat(layer.value)? })
    }

    pub(super) fn narrow(&self, tokens: Range<usize>) -> Result<Self> {
        Ok(Self { key: self.key.narrow(0, tokens.clone())?, value: self.value.narrow(0, tokens)? })
    }

    /// Keys and values as `[requests, tokens of each, N * D]`.
    pub(super) fn batched(&self, requests: usize) -> Result<Self> {
        Ok(Self { key: batched(&self.key, requests)?, value: batched(&self.value, requests)? })
    }

    fn copy_from(&self, stream: &Stream, from: &Self) -> Result<()> {
        self.key.copy_from(stream, &from.key)?;
        Ok(self.value.copy_from(stream, &from.value)?)
    }
}

/// Memory for copied rows, which all calls of a step use in turn.
pub(super) struct CopiedRows<T: Element> {
    query: Tensor<T>,
    attention: Tensor<T>,
    keys: KeyRows<T>,
    /// Zeros, as many rows as pad a request at most.
    zeros: KeyRows<T>,
}

impl<T: Element> CopiedRows<T> {
    /// Allocates rows for the largest of these calls, each with its number of requests.
    pub(super) fn for_step(
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        calls: impl Iterator<Item = (Prompt, usize)>,
    ) -> Result<Self> {
        let (mut queries, mut keys, mut is_cached) = (0usize, 0usize, false);
        for (prompt, requests) in calls {
            let rows = prompt.rows() * requests;
            is_cached |= prompt.cached;
            if prompt.copies_keys() {
                keys = keys.max(rows);
            }
            if prompt.is_padded() {
                queries = queries.max(rows);
            }
        }
        if is_cached {
            let block_size = step.metadata.settings().block_size();
            first.cache.check_contiguous(block_size)?;
        }
        let device = step.stream.device();
        let zeroed = |rows: usize, like: &Tensor<T>, heads: usize| -> Result<Tensor<T>> {
            let hidden = heads * size(like, 2);
            let buffer = device.alloc_zeroed(rows * hidden)?;
            Ok(Tensor::from_buffer(&buffer, [rows, hidden])?)
        };
        let key_rows = |rows: usize| -> Result<KeyRows<T>> {
            Ok(KeyRows {
                key: zeroed(rows, first.key, size(first.key, 1))?,
                value: zeroed(rows, first.value, size(first.value, 1))?,
            })
        };
        let [_, heads, _] = sizes(first.query);
        let filled = match queries {
            0 => 0,
            _ => PromptCall::CARD_MASK_ROWS as usize,
        };
        Ok(Self {
            query: zeroed(queries, first.query, heads)?,
            attention: zeroed(queries, first.value, heads)?,
            keys: key_rows(keys)?,
            zeros: key_rows(filled)?,
        })
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        let rows = [&self.keys, &self.zeros].map(|rows| [&rows.key, &rows.value]);
        let all = [&self.query, &self.attention].into_iter().chain(rows.into_iter().flatten());
        all.map(tensor_bytes).sum::<usize>()
    }

    /// The query of the call.
    pub(super) fn query(&self, prompts: &Prompts) -> Result<Tensor<T>> {
        Ok(self.query.narrow(0, prompts.rows())?)
    }

    /// The keys and values of the call.
    pub(super) fn keys(&self, prompts: &Prompts) -> Result<KeyRows<T>> {
        self.keys.narrow(prompts.rows())
    }

    /// The output of the call.
    pub(super) fn attention(&self, prompts: &Prompts) -> Result<Tensor<T>> {
        Ok(self.attention.narrow(0, prompts.rows())?)
    }

    /// Queues the copies of keys and values, from the cache or from the step's own, with zeros after those of each
    /// request.
    pub(super) fn bring_keys(
        &self,
        stream: &Stream,
        prompts: &Prompts,
        cache: &LayerCache<T>,
        own: impl Fn() -> Result<KeyRows<T>>,
    ) -> Result<KeyRows<T>> {
        let rows = prompts.prompt.rows();
        let filled = rows.saturating_sub(prompts.prompt.keys);
        for (request, (tokens, at)) in prompts.places().enumerate() {
            let first = request * rows;
            let place = self.keys.narrow(first..at.end)?;
            match prompts.cached.get(request) {
                Some(cached) => cache.gather(stream, cached, &place.key, &place.value)?,
                None => place.copy_from(stream, &own()?.narrow(tokens)?)?,
            }
            if filled > 0 {
                // What another call left there may be NaN, and a hidden value that is NaN still makes the sum NaN.
                let behind = self.keys.narrow(at.end..at.end + filled)?;
                behind.copy_from(stream, &self.zeros.narrow(0..filled)?)?;
            }
        }
        self.keys(prompts)
    }

    /// Queues the copies of queries to the rows of their own keys. No row depends on the rows before and after it,
    /// whatever another call left there.
    pub(super) fn bring_query(&self, stream: &Stream, prompts: &Prompts, query: &Tensor<T>) -> Result<Tensor<T>> {
        let query = flat(query)?;
        for (tokens, at) in prompts.places() {
            let place = self.query.narrow(0, at)?;
            let new = query.narrow(0, tokens)?;
            place.copy_from(stream, &new)?;
        }
        self.query(prompts)
    }

    /// Queues the copies of the output rows of the queries that [`CopiedRows::bring_query`] copied.
    pub(super) fn take_attention(&self, stream: &Stream, prompts: &Prompts, attention: &Tensor<T>) -> Result<()> {
        let attention = flat(attention)?;
        for (tokens, at) in prompts.places() {
            let place = attention.narrow(0, tokens)?;
            let new = self.attention.narrow(0, at)?;
            place.copy_from(stream, &new)?;
        }
        Ok(())
    }
}

/// A tensor `[tokens, N, D]` as `[tokens, N * D]`.
fn flat<T: Element>(tensor: &Tensor<T>) -> Result<Tensor<T>> {
    let hidden = tensor.shape().iter().skip(1).product();
    Ok(tensor.reshape([size(tensor, 0), hidden])?)
}
