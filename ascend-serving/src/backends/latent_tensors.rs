//! What a layer of multi-head latent attention brings to a step, and who projects what.

use std::fmt;

use ascend_attention::{Element, Stream, Tensor};

use crate::error::Result;

/// What a layer of multi-head latent attention brings besides query, latents and rotary keys.
///
/// A token's cached rows are its latent, from which the keys and values of all heads are projected, and the rotary part
/// of its key, which all heads share. Of [`LayerTensors`](crate::LayerTensors), `key` holds the new latents
/// `[tokens, 1, 512]` and `value` the new rotary parts `[tokens, 1, 64]`; both are in the cache already.
#[derive(Clone, Copy, Debug)]
pub struct LatentTensors<'a, T: Element> {
    /// Rotary part of the queries, `[tokens, N, 64]`.
    pub query_rope: &'a Tensor<T>,
    /// What was done to the queries.
    pub form: LatentForm<'a, T>,
}

/// What was done to the queries of a step, and what is left to do.
///
/// The projections are the model's: this crate has no weights. With `W_UK` and `W_UV` those that make the key and the value
/// of a head out of a latent,
///
/// | form | query | before | after |
/// |---|---|---|---|
/// | absorbed | `[tokens, N, 512]` | the caller multiplies `W_UK` into the query | output `[N, tokens, 512]`: the caller multiplies `W_UV` into it |
/// | plain | `[tokens, N, 128]` | nothing | output `[tokens, N, 128]`; the step calls [`UpProjection`] for the keys and values that it needs |
/// | mixed | plain ones of the prefills; absorbed ones of the decodes apart | as above | output of the prefills; that of the decodes where the caller wants it |
///
/// Absorbed queries read the cache as it is, and are for steps of few tokens a request, at most 16
/// ([`Mla::absorbs`](crate::Mla::absorbs)). Plain ones are for prompts. A step of prefills and decodes may be plain too, but
/// then projects all that its decodes have cached.
#[non_exhaustive]
pub enum LatentForm<'a, T: Element> {
    /// Queries in the space of the latents.
    Absorbed,
    /// Queries in the space of the keys.
    Plain(&'a dyn UpProjection<T>),
    /// Both: the requests that decode stand in front of the batch
    /// ([`AttentionMetadata::decodes_lead`](crate::AttentionMetadata::decodes_lead)), and `query` is that of the rest.
    Mixed {
        /// Queries of the decodes, `[decode tokens, N, 512]`.
        absorbed: &'a Tensor<T>,
        /// Where the output of the decodes goes, `[N, decode tokens, 512]`.
        decoded: &'a Tensor<T>,
        /// For the rest.
        projection: &'a dyn UpProjection<T>,
    },
}

impl<T: Element> Clone for LatentForm<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for LatentForm<'_, T> {}

impl<T: Element> fmt::Debug for LatentForm<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absorbed => "Absorbed",
            Self::Plain(_) => "Plain",
            Self::Mixed { .. } => "Mixed",
        })
    }
}

/// Tokens whose keys and values are asked for.
#[derive(Clone, Copy, Debug)]
pub struct LatentRows<'a, T: Element> {
    /// Latents, `[tokens, 512]`.
    pub latent: &'a Tensor<T>,
    /// Rotary parts of the keys, `[tokens, 64]`.
    pub key_rope: &'a Tensor<T>,
}

/// Where the keys and values of these tokens go. The memory belongs to the step and is used again.
#[derive(Clone, Debug)]
pub struct UpProjected<T: Element> {
    /// Keys without rotary part, `[tokens, N, 128]`: the latents by `W_UK`.
    pub key: Tensor<T>,
    /// Rotary parts, `[tokens, N, 64]`: the same for each head.
    pub key_rope: Tensor<T>,
    /// Values, `[tokens, N, 128]`: the latents by `W_UV`.
    pub value: Tensor<T>,
}

impl<T: Element> UpProjected<T> {
    /// The first tokens.
    pub(super) fn first(&self, tokens: usize) -> Result<Self> {
        Ok(Self {
            key: self.key.narrow(0, 0..tokens)?,
            key_rope: self.key_rope.narrow(0, 0..tokens)?,
            value: self.value.narrow(0, 0..tokens)?,
        })
    }
}

/// A model's projection of latents to keys and values. Functions of the same arguments are one.
pub trait UpProjection<T: Element> {
    /// Queues, on the stream, the projection of all rows by the weights of a layer, into all of `out`.
    ///
    /// # Errors
    /// Those of the projection, which end the step.
    fn up_project(
        &self,
        stream: &Stream,
        layer: usize,
        rows: LatentRows<'_, T>,
        out: &UpProjected<T>,
    ) -> Result<()>;
}

impl<T: Element, F> UpProjection<T> for F
where
    F: Fn(&Stream, usize, LatentRows<'_, T>, &UpProjected<T>) -> Result<()>,
{
    fn up_project(
        &self,
        stream: &Stream,
        layer: usize,
        rows: LatentRows<'_, T>,
        out: &UpProjected<T>,
    ) -> Result<()> {
        self(stream, layer, rows, out)
    }
}
