//! The inputs of a layer of a step.

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::Rule;
use ascend_attention::{AnyTensor, Element, Tensor, Violation};

use crate::batch::LayerMask;

use super::latent_tensors::{LatentForm, LatentFormKind, LatentTensors};
use super::quantised_queries::QuantisedQueries;

/// The inputs of a layer of a step: query, key and value, and for some layers a mask of their own, sinks, or latents.
/// The tuple `(&query, &key, &value)` converts to the inputs of a layer that has none of these.
///
/// Query `[tokens, N, D]`, key and value `[tokens, Nkv, D]` are packed, with the padding of the metadata.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use std::num::NonZeroUsize;
///
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, LayerInputs,
///     LayerMask, NamedMask,
/// };
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let shape = CacheShape::new(3, 1, 64);
/// let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative)?;
/// let backends = Backends::standard(stream.device());
/// let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
/// let mut sequence = Sequence::new(attention.cache().pool());
/// attention.grow(&stream, &mut sequence, 200)?;
///
/// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
/// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 200)], settings)?;
/// let rows = stream.upload(&vec![bf16::ONE; 200 * 64], [200, 1, 64])?;
/// let chunks = NamedMask::new("chunks of 64", |_, token, key| key <= token && key / 64 == token / 64);
/// let masks = [
///     Causality::Causal.into(),
///     NonZeroUsize::new(50).map_or(Causality::Causal, Causality::Window).into(),
///     LayerMask::from(chunks),
/// ];
/// let mut step = attention.begin(&stream, &metadata)?;
/// for (layer, mask) in masks.iter().enumerate() {
///     let inputs = LayerInputs::from((&rows, &rows, &rows)).mask(mask);
///     step.forward(layer, inputs)?;
/// }
/// assert_eq!(step.selected(2).map(|selected| selected.name), Some("named_mask"));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LayerInputs<'a, T: Element> {
    /// Queries; with latents those that the [`LatentForm`](crate::LatentForm) says, where they are quantised their
    /// rotary parts.
    pub query: &'a Tensor<T>,
    /// Keys; with latents the new latents, `[tokens, 1, 512]`.
    pub key: &'a Tensor<T>,
    /// Values; with latents the new rotary keys, `[tokens, 1, 64]`.
    pub value: &'a Tensor<T>,
    /// Which keys the layer's tokens see, if another mask than the step's
    /// ([`AttentionMetadata::mask`](crate::AttentionMetadata::mask)): full and windowed layers of one cache are layers
    /// of one step.
    pub mask: Option<&'a LayerMask>,
    /// One more logit for each head, `[N]`: of BF16, and of FLOAT16 for a FLOAT16 query from CANN 9.0 on and on
    /// Ascend 950.
    pub learnable_sink: Option<&'a AnyTensor>,
    /// What multi-head latent attention has besides queries, latents and rotary keys.
    pub latent: Option<LatentTensors<'a, T>>,
    /// Whether the layer attends to the keys of a layer of the step that was queued before, and writes none
    /// ([`LayerInputs::shared_keys`]).
    pub shares_keys: bool,
}

/// The inputs of a layer of a step, by its kind: those of attention, which the tuple `(&query, &key, &value)` and
/// [`LayerInputs`] convert to, or those of [linear attention](crate::Attention::of_hybrid), which [`DeltaTensors`] do.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum AnyLayerInputs<'a, T: Element> {
    /// A layer with keys and values.
    Attention(LayerInputs<'a, T>),
    /// A layer of linear attention.
    Linear(DeltaTensors<'a, T>),
}

impl<'a, T: Element> From<LayerInputs<'a, T>> for AnyLayerInputs<'a, T> {
    fn from(inputs: LayerInputs<'a, T>) -> Self {
        Self::Attention(inputs)
    }
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for AnyLayerInputs<'a, T> {
    fn from(inputs: (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self::Attention(inputs.into())
    }
}

impl<'a, T: Element> From<DeltaTensors<'a, T>> for AnyLayerInputs<'a, T> {
    fn from(tensors: DeltaTensors<'a, T>) -> Self {
        Self::Linear(tensors)
    }
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for LayerInputs<'a, T> {
    fn from((query, key, value): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self { query, key, value, mask: None, learnable_sink: None, latent: None, shares_keys: false }
    }
}

impl<'a, T: Element> LayerInputs<'a, T> {
    /// The inputs of a layer of multi-head latent attention: new latents `[tokens, 1, 512]` and rotary keys
    /// `[tokens, 1, 64]`. The [`LatentForm`](crate::LatentForm) defines the query and the output, and who projects
    /// what. [`Backend::Mla`](crate::Backend::Mla) computes such layers: causal ones, without sinks.
    pub fn latent(
        query: &'a Tensor<T>,
        latent: &'a Tensor<T>,
        key_rope: &'a Tensor<T>,
        tensors: LatentTensors<'a, T>,
    ) -> Self {
        Self { latent: Some(tensors), ..Self::from((query, latent, key_rope)) }
    }

    /// The inputs of a layer of multi-head latent attention whose absorbed queries are quantised, over a cache of
    /// [`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents): new latents
    /// `[tokens, 1, 512]`, which are quantised as they are written, and rotary keys `[tokens, 1, 64]`, both of BF16.
    /// Bring the rotary parts of the queries `[tokens, N, 64]` already divided by both scales, the query's and the
    /// cache's ([`QuantisedQueries`]); the output is `[N, tokens, 512]`, of BF16.
    /// [`Backend::QuantisedMla`](crate::Backend::QuantisedMla) computes such layers.
    pub fn quantised_latent(
        queries: &'a QuantisedQueries,
        query_rope: &'a Tensor<T>,
        latent: &'a Tensor<T>,
        key_rope: &'a Tensor<T>,
    ) -> Self {
        let tensors = LatentTensors { query_rope, form: LatentForm::Quantised(queries) };
        Self::latent(query_rope, latent, key_rope, tensors)
    }

    /// Sets a mask of the layer's own.
    pub fn mask(mut self, mask: &'a LayerMask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Sets one more logit for each head, in every layer of a step with the same mask and scale or in none.
    pub fn learnable_sink(mut self, sink: &'a AnyTensor) -> Self {
        self.learnable_sink = Some(sink);
        self
    }

    /// Attends without writing (`save_kv_cache = False`), to keys of a layer that was queued before in the step (Gemma
    /// 3n, Hunyuan). Pass the number of the layer that has the keys to [`Step::forward`](crate::Step::forward); number
    /// those layers alone, from 0. Where the layers 0 and 2 of a model have keys, 1 reads those of 0, and 3 of 2:
    ///
    /// ```text
    /// layer of the model  0           1                         2           3
    /// call                forward(0)  forward(0), shared_keys   forward(1)  forward(1), shared_keys
    /// ```
    ///
    /// Key and value are the tensors that it was queued with. Any number of layers may share its keys, with queries,
    /// sinks and masks of their own; the cache counts those layers alone that have keys, and settings by a layer's
    /// number ([`Backends::prefer`](crate::Backends::prefer),
    /// [`Attention::layer_scales`](crate::Attention::layer_scales), the layers of TriangleMix) are those of the layer
    /// that has the keys. Keys come from the cache, also where no token of the step was cached before: backends that
    /// read the step's own keys ([`Backend::CascadePrefill`](crate::Backend::CascadePrefill)) are passed over, over
    /// latents the queries are absorbed ([`LatentForm::Absorbed`](crate::LatentForm::Absorbed), over latents of one
    /// byte [`LatentForm::Quantised`](crate::LatentForm::Quantised)), and the tensors may hold something else by then.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{
    ///     Attention, AttentionShape, Backends, BatchRequest, LayerInputs, StatePolicy,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// // Three layers of the model, two of which have keys: the last one reads those of the second.
    /// let shape = CacheShape::new(2, 1, 64);
    /// let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative)?;
    /// let backends = Backends::standard(stream.device());
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    /// let mut sequence = attention.sequence();
    /// attention.grow(&stream, &mut sequence, 9)?;
    /// let metadata = attention.metadata(&[BatchRequest::of(&sequence, 9)], StatePolicy::default())?;
    /// let rows = stream.upload(&vec![bf16::ONE; 9 * 64], [9, 1, 64])?;
    /// let mut step = attention.begin(&stream, &metadata)?;
    /// let inputs = LayerInputs::from((&rows, &rows, &rows));
    /// step.forward(0, inputs)?;
    /// // The second layer has written nothing yet.
    /// assert!(step.forward(1, inputs.shared_keys()).is_err());
    /// step.forward(1, inputs)?;
    /// step.forward(1, inputs.shared_keys())?;
    /// step.end()?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn shared_keys(mut self) -> Self {
        self.shares_keys = true;
        self
    }

    /// Refuses a layer of a replayed step or a verification that shares the keys of another one.
    pub(crate) fn check_own_keys(&self, layer: usize, rule: &'static Rule) -> Result<(), Violation> {
        match self.shares_keys {
            false => Ok(()),
            true => Err(Violation::new(
                rule,
                format_args!("shared keys of layer {layer}"),
                "a layer that writes its keys",
                "compute the step without graph or tree, by `Attention::begin`, whose layers share keys",
            )),
        }
    }

    /// The rotary parts of a layer's queries in this form, an absorbed one; `None` where the cache has no latents.
    /// Latents over another cache, inputs without them, queries in another form, and a query beside quantised ones
    /// break the rule.
    pub(crate) fn absorbed_rope(
        &self,
        layer: usize,
        wanted: Option<LatentFormKind>,
        rule: &'static Rule,
    ) -> Result<Option<&'a Tensor<T>>, Violation> {
        let given = match (&self.latent, wanted) {
            (None, None) => return Ok(None),
            (Some(_), None) => {
                return Err(Violation::new(
                    rule,
                    format_args!("latents in layer {layer}"),
                    "query, key and value, as the cache has no latents",
                    "bring query, key and value; latents belong to a cache of latents (`CacheShape::latent`)",
                ));
            }
            (Some(latent), Some(wanted)) if latent.form.kind() == wanted => {
                latent.check_query(self.query, layer, rule)?;
                return Ok(Some(latent.query_rope));
            }
            (Some(LatentTensors { form, .. }), Some(_)) => format!("queries in the form {form:?}"),
            (None, Some(_)) => "inputs without latents".into(),
        };
        let (allowed, fix) = match wanted {
            Some(LatentFormKind::Quantised) => {
                ("quantised queries, latents and rotary parts", "make the inputs by `LayerInputs::quantised_latent`")
            }
            _ => (
                "absorbed queries, latents and rotary parts",
                "make the inputs by `LayerInputs::latent` with `LatentForm::Absorbed`",
            ),
        };
        Err(Violation::new(rule, format_args!("{given} in layer {layer}"), allowed, fix))
    }
}

/// The names of a layer's keys and values.
pub(crate) fn names_of_keys(is_latent: bool) -> [&'static str; 2] {
    match is_latent {
        true => ["latent", "key_rope"],
        false => ["key", "value"],
    }
}
