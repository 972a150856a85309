//! The inputs of a layer of multi-head latent attention, and who projects what.

use std::fmt;

use ascend_attention::spec::Rule;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::error::Result;

use super::quantised_queries::QuantisedQueries;

/// The inputs of a layer of multi-head latent attention besides query, latents and rotary keys.
///
/// A token's cached rows are its latent, from which the keys and values of all heads are projected, and the rotary
/// part of its key, which all heads share. In [`LayerTensors`](crate::LayerTensors), `key` holds the new latents
/// `[tokens, 1, 512]` and `value` the new rotary parts `[tokens, 1, 64]`; both are in the cache already.
#[derive(Clone, Copy, Debug)]
pub struct LatentTensors<'a, T: Element> {
    /// Rotary part of the queries, `[tokens, N, 64]`.
    pub query_rope: &'a Tensor<T>,
    /// The form of the queries.
    pub form: LatentForm<'a, T>,
}

impl<T: Element> LatentTensors<'_, T> {
    /// Refuses, as breaking this rule, a query beside quantised ones: it would be left out.
    pub(crate) fn check_query(&self, query: &Tensor<T>, layer: usize, rule: &'static Rule) -> Result<(), Violation> {
        let (rope, is_quantised) = (self.query_rope, matches!(self.form, LatentForm::Quantised(_)));
        if !is_quantised || query.as_raw() == rope.as_raw() && query.desc() == rope.desc() {
            return Ok(());
        }
        Err(Violation::new(
            rule,
            format_args!("a query {} beside quantised ones in layer {layer}", query.desc()),
            "the rotary parts of the quantised queries in its place",
            "make the inputs by `LayerInputs::quantised_latent`",
        ))
    }
}

/// The form of a step's queries: which projections the caller has applied, and which are left to do.
///
/// The projections are the model's: this crate has no weights. `W_UK` and `W_UV` are the weights that make the key
/// and the value of a head from a latent.
///
/// - Absorbed: the caller multiplies `W_UK` into the query, `[tokens, N, 512]`, and `W_UV` into the output,
///   `[N, tokens, 512]`.
/// - Plain: query and output are `[tokens, N, 128]`; the step calls [`UpProjection`] for the keys and values that it
///   needs.
/// - Quantised: absorbed queries of one byte an element, with a scale for each row and head, over a cache of
///   [`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents); the output is that of
///   absorbed ones.
/// - Mixed: the plain queries of the prefills, with their output, and apart the absorbed ones of the decodes, whose
///   output is written where the caller wants it.
///
/// Absorbed queries read the cache as it is, and are for steps of few tokens a request
/// ([`AttentionMetadata::absorbs_queries`](crate::AttentionMetadata::absorbs_queries)); CANN 8.1 takes at most 16.
/// Plain ones are for prompts. A step of prefills and decodes may be plain too, but then projects all that its decodes
/// have cached.
#[non_exhaustive]
pub enum LatentForm<'a, T: Element> {
    /// Queries in the space of the latents.
    Absorbed,
    /// Queries in the space of the latents, of one byte an element. Bring [`LatentTensors::query_rope`] already divided
    /// by their scales and that of the latents, `query_rope / (scale * factor)`, and no other queries:
    /// [`LayerInputs::quantised_latent`](crate::LayerInputs::quantised_latent).
    Quantised(&'a QuantisedQueries),
    /// Queries in the space of the keys.
    Plain(&'a dyn UpProjection<T>),
    /// Both: the requests that decode come first in the batch
    /// ([`AttentionMetadata::decodes_lead`](crate::AttentionMetadata::decodes_lead)), and `query` holds the queries
    /// of the rest.
    Mixed {
        /// Queries of the decodes, `[decode tokens, N, 512]`.
        absorbed: &'a Tensor<T>,
        /// Where the output of the decodes goes, `[N, decode tokens, 512]`.
        decoded: &'a Tensor<T>,
        /// The projection for the requests that do not decode.
        projection: &'a dyn UpProjection<T>,
    },
    /// Mixed, with absorbed queries of one byte an element. In [`LatentTensors::query_rope`] divide the rows of the
    /// decodes by their scales and that of the latents, and not those of the prefills.
    QuantisedMixed {
        /// Queries of the decodes, `[decode tokens, N, 512]`.
        absorbed: &'a QuantisedQueries,
        /// Where the output of the decodes goes, `[N, decode tokens, 512]`.
        decoded: &'a Tensor<T>,
        /// The projection for the requests that do not decode.
        projection: &'a dyn UpProjection<T>,
    },
}

impl<T: Element> Clone for LatentForm<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for LatentForm<'_, T> {}

/// A form of queries without its tensors and projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LatentFormKind {
    Absorbed,
    Quantised,
    Plain,
    Mixed,
    QuantisedMixed,
}

impl<'a, T: Element> LatentForm<'a, T> {
    /// The queries in the space of the latents and the output of the decodes of a mixed step.
    pub(crate) fn mixed(&self) -> Option<(&'a AnyTensor, &'a Tensor<T>)> {
        match *self {
            Self::Mixed { absorbed, decoded, .. } => Some((absorbed, decoded)),
            Self::QuantisedMixed { absorbed, decoded, .. } => Some((absorbed.query(), decoded)),
            Self::Absorbed | Self::Quantised(_) | Self::Plain(_) => None,
        }
    }

    /// The kind of the form.
    pub(crate) fn kind(&self) -> LatentFormKind {
        match self {
            Self::Absorbed => LatentFormKind::Absorbed,
            Self::Quantised(_) => LatentFormKind::Quantised,
            Self::Plain(_) => LatentFormKind::Plain,
            Self::Mixed { .. } => LatentFormKind::Mixed,
            Self::QuantisedMixed { .. } => LatentFormKind::QuantisedMixed,
        }
    }
}

impl<T: Element> fmt::Debug for LatentForm<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)
    }
}

/// Tokens whose keys and values the model is to project.
#[derive(Clone, Copy, Debug)]
pub struct LatentRows<'a, T: Element> {
    /// Latents, `[tokens, 512]`.
    pub latent: &'a Tensor<T>,
    /// Rotary parts of the keys, `[tokens, 64]`.
    pub key_rope: &'a Tensor<T>,
}

/// Memory for the projected keys and values of these tokens. It belongs to the step and is used again.
#[derive(Clone, Debug)]
pub struct UpProjected<T: Element> {
    /// Keys without rotary part, `[tokens, N, 128]`: the latents by `W_UK`.
    pub key: Tensor<T>,
    /// Rotary parts, `[tokens, N, 64]`, equal for each head.
    pub key_rope: Tensor<T>,
    /// Values, `[tokens, N, 128]`: the latents by `W_UV`.
    pub value: Tensor<T>,
}

impl<T: Element> UpProjected<T> {
    /// The memory of the first `tokens` tokens.
    pub(super) fn first(&self, tokens: usize) -> Result<Self> {
        Ok(Self {
            key: self.key.narrow(0, 0..tokens)?,
            key_rope: self.key_rope.narrow(0, 0..tokens)?,
            value: self.value.narrow(0, 0..tokens)?,
        })
    }
}

/// A model's projection of latents to keys and values. Functions with the arguments of
/// [`up_project`](Self::up_project) implement it.
pub trait UpProjection<T: Element> {
    /// Queues, on the stream, the projection of all rows by the weights of a layer, into all of `out`.
    ///
    /// # Errors
    /// The errors of the projection, which end the step.
    fn up_project(&self, stream: &Stream, layer: usize, rows: LatentRows<'_, T>, out: &UpProjected<T>) -> Result<()>;
}

impl<T: Element, F> UpProjection<T> for F
where
    F: Fn(&Stream, usize, LatentRows<'_, T>, &UpProjected<T>) -> Result<()>,
{
    fn up_project(&self, stream: &Stream, layer: usize, rows: LatentRows<'_, T>, out: &UpProjected<T>) -> Result<()> {
        self(stream, layer, rows, out)
    }
}
