//! Attention over keys that are not the batch's own: those of an encoder.

use ascend_attention::attention::{BlockTable, PerRequest};
use ascend_attention::case::tentatively;
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::{
    AttentionShape, LayerTensors, RefusedBackend, StepCall, StepContext, StepPlan, decode_layout, no_backend, size,
};
use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{
    CacheEntry, CacheWrite, PagedKvCache, QueuedLayers, Sequence, StepLease, StepProgress, StepTokens,
    check_outside_caches, uncopied,
};
use crate::rules;

use super::layer_check::StepRows;

/// The cross attention of a model with an encoder, such as Whisper, T5, or a language model that looks at pictures:
/// each request's encoder tokens are written once, and every token of its decoder sees all of them, in every step.
///
/// The encoder's keys are in a paged cache of their own, with a [`Sequence`] for each request. In addition, the
/// decoder has an [`Attention`](crate::Attention) for its own tokens; both take the metadata of the same step. Beams
/// of one request share its encoder keys by [`Sequence::fork`].
///
/// Each layer is one packed call (TND) over the cache, without a mask, or the operator's decode path where that call
/// is refused and each request adds one token. [`Backend::Fused`](crate::Backend::Fused) lists what packed calls take
/// in each release, [`Backend::PagedDecode`](crate::Backend::PagedDecode) what the decode path takes.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, CrossAttention};
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let (layers, heads, dim) = (2, 4, 64);
/// let cache = |blocks| {
///     let shape = CacheShape::new(layers, heads, dim);
///     PagedKvCache::<bf16>::new(stream.device(), blocks, 128, shape, PadPolicy::SkipNegative)
/// };
/// let mut cross = CrossAttention::new(AttentionShape::new(heads, heads, dim), cache(8)?)?;
///
/// // 200 tokens of the encoder, once.
/// let mut encoded = Sequence::new(cross.cache().pool());
/// let states = stream.upload(&vec![bf16::ONE; 200 * heads * dim], [200, heads, dim])?;
/// let mut encoding = cross.encode(&stream, &mut [(&mut encoded, 200)])?;
/// for layer in 0..layers {
///     encoding.write(layer, &states, &states)?;
/// }
/// drop(encoding);
///
/// // A step of the decoder: three tokens.
/// let own = cache(4)?;
/// let mut sequence = Sequence::new(own.pool());
/// let _ = sequence.grow(3)?;
/// let settings = BatchSettings::of(&own, Causality::Causal);
/// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings)?;
/// let mut step = cross.begin(&stream, &metadata, &[&encoded])?;
/// let query = stream.upload(&vec![bf16::ONE; 3 * heads * dim], [3, heads, dim])?;
/// for layer in 0..layers {
///     let output = step.forward(layer, &query)?;
///     assert_eq!(output.download(&stream)?[0], bf16::ONE);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CrossAttention<T: Element> {
    shape: AttentionShape,
    cache: PagedKvCache<T>,
}

impl<T: Element> CrossAttention<T> {
    /// Cross attention of these heads over a cache for encoder keys.
    ///
    /// # Errors
    /// [`BACKEND_QUANTISED`](crate::rules::BACKEND_QUANTISED) for a quantised cache; as for
    /// [`Attention::begin`](crate::Attention::begin) for heads and scale.
    pub fn new(shape: AttentionShape, cache: PagedKvCache<T>) -> Result<Self> {
        shape.check_cache(&cache.shape())?;
        if cache.is_quantised() {
            return Err(Violation::new(
                &rules::BACKEND_QUANTISED,
                "a quantised cache for encoder keys",
                format_args!("a cache of {}", T::DTYPE),
                "make the cache by `PagedKvCache::new`",
            )
            .into());
        }
        Ok(Self { shape, cache })
    }

    /// The heads.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The cache of encoder keys.
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.cache
    }

    /// Makes room for the encoder tokens of requests, with a number of tokens for each, to be written layer by layer.
    /// Before it reports that there are no blocks, it waits for blocks that steps in flight may still read. Where
    /// writing a layer fails, remove the tokens by [`Sequence::truncate`].
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`], [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without any token,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP), [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) and
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) behind tokens that were not all written, and
    /// [`POOL_SHARED`](crate::rules::POOL_SHARED) where another cache has the pool; no sequence changes then.
    pub fn encode<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &mut [(&mut Sequence, usize)],
    ) -> Result<Encoding<'a, T>> {
        let before = requests.iter().map(|(sequence, _)| sequence.len());
        let before: Vec<usize> = before.collect();
        match self.grow_to_encode(stream, requests) {
            Ok((slots, lease, progress)) => Ok(Encoding {
                _lease: lease,
                layers: QueuedLayers::new(self.cache.shape().layers, vec![progress], ENCODE_AGAIN),
                cache: &mut self.cache,
                stream,
                slots,
                write: None,
            }),
            Err(why) => {
                for ((sequence, _), before) in requests.iter_mut().zip(before) {
                    sequence.truncate(before)?;
                }
                Err(why)
            }
        }
    }

    /// Grows the sequences by their encoder tokens and begins to record these. After an error some have grown.
    fn grow_to_encode<'a>(
        &mut self,
        stream: &'a Stream,
        requests: &mut [(&mut Sequence, usize)],
    ) -> Result<(Vec<i32>, StepLease<'a>, StepProgress)> {
        let caches = self.cache.pool().caches();
        if caches > 1 {
            return Err(Violation::new(
                &rules::POOL_SHARED,
                format_args!("encoder tokens in a pool that {caches} caches share"),
                "a pool of the encoder's cache alone",
                "make each cache of encoder tokens with a pool of its own, and a sequence for each",
            )
            .into());
        }
        let (mut slots, mut tokens) = (Vec::new(), Vec::new());
        for (sequence, new) in requests {
            let cached = sequence.len();
            check_written(self.cache.entry(), tokens.len(), sequence)?;
            slots.extend(self.cache.grow(stream, sequence, *new)?);
            tokens.push(StepTokens { stamp: sequence.stamp(), cached, len: sequence.len(), recompute: false });
        }
        if slots.is_empty() {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                format_args!("{} requests without encoder tokens", tokens.len()),
                "a token or more",
                "encode when there is something to write",
            )
            .into());
        }
        let lease = self.cache.pool().begin_step(stream);
        let entry = self.cache.entry();
        let tokens = tokens.into_iter().enumerate();
        let progress = StepProgress::begin(entry.pool(), Some(entry), tokens)?;
        Ok((slots, lease, progress))
    }

    /// Begins a step of the decoder on a stream: `encoded` has the encoder tokens of each of its requests, in their
    /// order. Requests without encoder tokens, and padding, get rows of zeros. Blocks given back from now on are
    /// handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) for metadata without requests,
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of sequences than requests,
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for one of another pool,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for one whose copies were not queued,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for one that gave tokens back,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP) and [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING)
    /// for one whose tokens were not all written; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of
    /// another device.
    pub fn begin<'a>(
        &'a self,
        stream: &'a Stream,
        metadata: &'a AttentionMetadata,
        encoded: &[&Sequence],
    ) -> Result<CrossStep<'a, T>> {
        self.cache.admits(stream)?;
        metadata.check_requests()?;
        if encoded.len() != metadata.requests() {
            return Err(Violation::new(
                &rules::LENGTHS_BATCH,
                format_args!("{} sequences of encoder tokens for {} requests", encoded.len(), metadata.requests()),
                "one for each, an empty one for a request that has none",
                "list them in the order of the step's requests",
            )
            .into());
        }
        let (mut lengths, mut rows) = (PerRequest::default(), Vec::new());
        for (at, sequence) in encoded.iter().enumerate() {
            self.cache.holds(sequence)?;
            if let Some(block) = sequence.uncopied_in(self.cache.entry()) {
                return Err(uncopied(format_args!("block {block} of encoder {at}")).into());
            }
            if sequence.given_back() > 0 {
                return Err(Violation::new(
                    &rules::BLOCK_WINDOW,
                    format_args!("encoder {at}, whose first {} tokens were given back", sequence.given_back()),
                    "all tokens: each token of the decoder sees them",
                    "keep the blocks of encoder keys until the request ends",
                )
                .into());
            }
            check_written(self.cache.entry(), at, sequence)?;
            lengths.push(sequence.len())?;
            rows.push(sequence.row());
        }
        for _ in metadata.requests()..metadata.table().requests() {
            lengths.push(0)?;
            rows.push(&[]);
        }
        let columns = rows.iter().map(|row| row.len()).max().unwrap_or(0).max(1);
        let block_size = self.cache.pool().block_size();
        Ok(CrossStep {
            block_table: BlockTable::with_columns(stream, &rows, columns, block_size)?,
            _lease: self.cache.pool().begin_step(stream),
            cross: self,
            stream,
            metadata,
            lengths,
            planned: None,
            layers: QueuedLayers::new(self.cache.shape().layers, Vec::new(), rules::STEP_LAYERS_MISSING.fix),
        })
    }
}

/// Encoder tokens that are being written. From [`CrossAttention::encode`]; end it when the last layer is queued, by
/// [`Encoding::end`] or by dropping it. Where some of the layers are missing, steps over the tokens are refused.
#[derive(Debug)]
pub struct Encoding<'a, T: Element> {
    cache: &'a mut PagedKvCache<T>,
    stream: &'a Stream,
    slots: Vec<i32>,
    /// The write that the first layer has prepared for all layers.
    write: Option<CacheWrite>,
    layers: QueuedLayers,
    _lease: StepLease<'a>,
}

impl<T: Element> Encoding<'_, T> {
    /// Queues the writing of a layer's keys and values, `[tokens, Nkv, D]`, packed request after request.
    ///
    /// # Errors
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before; as for
    /// [`CacheWrite::plan`] and [`PagedKvCache::write`].
    pub fn write(&mut self, layer: usize, key: &Tensor<T>, value: &Tensor<T>) -> Result<()> {
        self.layers.check_not_repeated(layer)?;
        let outcome = self.queue(layer, key, value);
        self.layers.note_outcome(layer, outcome)
    }

    fn queue(&mut self, layer: usize, key: &Tensor<T>, value: &Tensor<T>) -> Result<()> {
        let write = match &self.write {
            Some(write) => write,
            None => {
                let write = CacheWrite::plan(self.cache, self.stream, &self.slots, key, value)?;
                &*self.write.insert(write)
            }
        };
        self.layers.begin_write();
        self.cache.write(self.stream, write, layer, key, value)
    }

    /// Ends the writing, and checks that all layers were queued.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): the tokens do not count as written.
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }
}

/// Refuses a sequence of encoder tokens that were not all written, and one of which an encoding is in progress.
fn check_written(entry: &CacheEntry, at: usize, sequence: &Sequence) -> Result<(), Violation> {
    let len = sequence.len();
    let all = StepTokens { stamp: sequence.stamp(), cached: len, len, recompute: false };
    entry.check(&format_args!("encoder {at}"), all).map_err(|why| {
        match [&rules::SEQUENCE_GAP, &rules::STEP_LAYERS_MISSING].contains(&why.rule) {
            true => Violation::new(why.rule, why.given, why.allowed, ENCODE_AGAIN),
            false => why,
        }
    })
}

/// How to encode again what ended without some layers.
const ENCODE_AGAIN: &str = "truncate each sequence to the tokens that are written in every layer \
    (`PagedKvCache::computed_tokens`), and encode the others again, every layer";

/// A step of the decoder over encoder keys. From [`CrossAttention::begin`]; end it when the last layer is
/// queued, by [`CrossStep::end`] or by dropping it.
#[derive(Debug)]
pub struct CrossStep<'a, T: Element> {
    cross: &'a CrossAttention<T>,
    stream: &'a Stream,
    metadata: &'a AttentionMetadata,
    /// The number of encoder tokens of each request, 0 for padding.
    lengths: PerRequest,
    block_table: BlockTable,
    /// The call that the first layer has planned for all layers.
    planned: Option<StepPlan<T>>,
    layers: QueuedLayers,
    _lease: StepLease<'a>,
}

impl<T: Element> CrossStep<'_, T> {
    /// Queues the attention of a layer over the encoder keys: query `[tokens, N, D]` and output `[tokens, N, Dv]`,
    /// packed, with the padding of the metadata. Returns at once. The first layer plans for all layers.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for a query of
    /// another shape, [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a query of another device, and for a layer that does not
    /// exist; [`NoBackend`](crate::Error::NoBackend) with the reasons of the operator where no call serves the step.
    pub fn forward(&mut self, layer: usize, query: &Tensor<T>) -> Result<Tensor<T>> {
        let [tokens, heads] = [0, 1].map(|axis| size(query, axis));
        let rows = [tokens, heads, self.cross.cache.shape().value_dim];
        let mut output = Tensor::empty(self.stream.device(), rows)?;
        self.forward_into(layer, query, &mut output)?;
        Ok(output)
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller. Allocates nothing from the second layer on.
    ///
    /// # Errors
    /// As for [`CrossStep::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with the query or the cache.
    pub fn forward_into(&mut self, layer: usize, query: &Tensor<T>, output: &mut Tensor<T>) -> Result<()> {
        let outcome = self.queue_layer(layer, query, output);
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer(&mut self, layer: usize, query: &Tensor<T>, output: &mut Tensor<T>) -> Result<()> {
        self.layers.check_not_repeated(layer)?;
        check_outside_caches("output", output, [self.cross.cache.stored()])?;
        let shape = self.cross.shape;
        let heads_fix = "bring the layer's query, or make the `AttentionShape` with its heads";
        let rows = StepRows { heads_fix, ..StepRows::of_step(self.stream, self.metadata, None) };
        rows.check("query", format_args!("layer {layer}"), query, &[shape.heads, shape.head_dim])?;
        let cache = self.cross.cache.layer(layer)?;
        let step = StepContext {
            stream: self.stream,
            shape,
            metadata: self.metadata,
            mask: &LayerMask::Causality(Causality::Bidirectional),
            block_table: &self.block_table,
            recorded: false,
            shares_keys: false,
        };
        // The decoder's own keys are no part of the call.
        let layer = LayerTensors {
            layer,
            query,
            key: query,
            value: query,
            cache,
            quantised: None,
            learnable_sink: None,
            latent: None,
        };
        let planned = match &self.planned {
            Some(planned) => planned,
            None => {
                let planned = tentatively(|| self.plan(&step, &layer))?;
                &*self.planned.insert(planned)
            }
        };
        planned.launch_into(self.stream, &layer, output)
    }

    fn plan(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<StepPlan<T>> {
        let (metadata, lengths) = (self.metadata, &self.lengths);
        let packed = StepCall::packed(metadata.q_ends().clone(), lengths.clone());
        let single = metadata.tokens() == metadata.table().requests();
        let rows = single.then(|| StepCall::batched(decode_layout(layer.cache), lengths.clone()));
        let calls = [("packed call", Some(packed)), ("decode path", rows)];
        let mut refused = Vec::new();
        for (name, call) in calls {
            let Some(call) = call else { continue };
            match StepPlan::of_program(call.into(), step, layer, None) {
                Ok(plan) => return Ok(plan),
                Err(why) => refused.push(RefusedBackend::new(name, why, self.stream.device())),
            }
        }
        Err(no_backend(&refused, None))
    }

    /// Ends the step, and checks that all layers were queued.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }
}
