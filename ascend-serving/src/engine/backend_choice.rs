//! Which backend would serve which kind of step, before there is a step.

use std::fmt;
use std::ops::Range;

use ascend_attention::{AnyTensor, Element, Stream, Tensor};

use crate::backends::{LayerTensors, RefusedBackend, StepContext, StepMemory};
use crate::batch::{AttentionMetadata, AttentionState, BatchRequest, BatchSettings, Drafting, LayerMask, StatePolicy};
use crate::error::{Error, Result};
use crate::kv::PadPolicy;

use super::attention::Attention;
use super::layer_check::check_layer;
use super::layer_group::LayerGroup;

/// The backend that would serve one kind of step. From [`Attention::backend_choices`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendChoice {
    /// The kind of step.
    pub state: AttentionState,
    /// The backend's name, or why there is none.
    pub served: Result<&'static str>,
    /// Backends that were tried before that one, and those of your own that are registered and not tried
    /// ([`BACKEND_BOUND`](crate::rules::BACKEND_BOUND)).
    pub refused: Vec<RefusedBackend>,
    /// Device memory that the served step needs besides the cache; zeros where no backend serves the step.
    pub memory: StepMemory,
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.served {
            Err(why) => return write!(f, "{:?}: none: {why}", self.state),
            Ok(name) => write!(f, "{:?}: {name}", self.state)?,
        }
        for refused in &self.refused {
            write!(f, "; not {refused}")?;
        }
        Ok(())
    }
}

/// An example of a kind of step: how it is classified, and for each request the numbers of new tokens, of drafts
/// among them, and of cached tokens.
struct Example {
    policy: StatePolicy,
    requests: [(usize, usize, usize); 2],
}

/// Most tokens of a request in the examples.
const MOST_TOKENS: usize = 8;

const EXAMPLES: [Example; 5] = {
    const PLAIN: StatePolicy = StatePolicy { chunked_prefill: false, drafting: None };
    const CHUNKED: StatePolicy = StatePolicy { chunked_prefill: true, ..PLAIN };
    const DRAFTED: StatePolicy = StatePolicy { drafting: Some(Drafting::Mtp), ..CHUNKED };
    [
        Example {
            // PrefillNoCache
            policy: PLAIN,
            requests: [(5, 0, 0), (3, 0, 0)],
        },
        Example {
            // PrefillCacheHit
            policy: PLAIN,
            requests: [(5, 0, 3), (3, 0, 2)],
        },
        Example {
            // ChunkedPrefill
            policy: CHUNKED,
            requests: [(1, 0, 6), (5, 0, 2)],
        },
        Example {
            // DecodeOnly
            policy: PLAIN,
            requests: [(1, 0, 3), (1, 0, 7)],
        },
        Example {
            // SpecDecoding
            policy: DRAFTED,
            requests: [(4, 3, 3), (4, 3, 2)],
        },
    ]
};

impl<T: Element> Attention<T> {
    /// Reports which of the backends would serve each kind of step on this device with the cache of a layer, for layers
    /// with this mask, and with these sinks or without: each plans two small requests, and nothing is queued. Call it
    /// when the engine starts; on the emulation of a product and release it answers also for machines that you do not
    /// have.
    ///
    /// A choice may depend on more than the kind: backends such as [`SharedPrefixDecode`](crate::SharedPrefixDecode)
    /// leave small steps to the others.
    /// [`Step::selected`](crate::Step::selected) is the backend of a real step. The examples have no latents, so that
    /// [`Backend::Mla`](crate::Backend::Mla) refuses every kind.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::spec::{Cann, Soc};
    /// use ascend_attention::{Machine, Runtime, f16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{Attention, AttentionShape, AttentionState, Backends, Causality};
    /// use ascend_serving::Backend;
    ///
    /// // FLOAT16 on CANN 8.1, whose packed calls take BF16 alone.
    /// let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V8_1))?;
    /// let stream = runtime.device(0)?.stream()?;
    /// let shape = CacheShape::new(1, 8, 128);
    /// let cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative)?;
    /// let backends = Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
    /// let attention = Attention::new(AttentionShape::new(32, 8, 128), cache, backends);
    /// for choice in attention.backend_choices(&stream, 0, Causality::Causal, None)? {
    ///     match choice.state {
    ///         AttentionState::DecodeOnly => assert_eq!(choice.served.as_deref(), Ok(&*"paged_decode")),
    ///         _ => assert!(choice.served.is_err(), "{choice}"),
    ///     }
    /// }
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Attention::begin`] for a stream of another device and for heads and scale;
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a cache with less room than two requests of eight tokens;
    /// errors of allocating small tensors. A kind that no backend serves is no error.
    pub fn backend_choices(
        &self,
        stream: &Stream,
        layer: usize,
        mask: impl Into<LayerMask>,
        learnable_sink: Option<&AnyTensor>,
    ) -> Result<Vec<BackendChoice>> {
        let mask = mask.into();
        let (group, layer) = self.group_of(layer)?;
        group.check(stream)?;
        let choices =
            EXAMPLES.iter().map(|example| group.example_choice(stream, (layer, &mask), learnable_sink, example));
        choices.collect()
    }

    /// Reports which of the backends would serve this step, such as the largest that a scheduler makes, and what
    /// memory it would need ([`BackendChoice::memory`]): it is planned for a layer with this mask, or else with the
    /// step's, and with these sinks or without, and nothing is queued. The query and the new keys of the layer are
    /// allocated meanwhile.
    ///
    /// With [`Backends::memory_limit`](crate::Backends::memory_limit) a backend that needs too much memory is
    /// refused, and the refusal has the number of bytes.
    ///
    /// # Errors
    /// As for [`Attention::begin`]; errors of allocating the tensors of a layer. A step that no backend serves is no
    /// error.
    pub fn backend_choice(
        &self,
        stream: &Stream,
        metadata: &AttentionMetadata,
        layer: usize,
        mask: Option<&LayerMask>,
        learnable_sink: Option<&AnyTensor>,
    ) -> Result<BackendChoice> {
        metadata.check_groups(self.groups.len())?;
        let (group, local) = self.group_of(layer)?;
        let place = self.places.get(layer).map_or(0, |place| place.group);
        let metadata = metadata.group(place).unwrap_or(metadata);
        group.check(stream)?;
        metadata.check_pool(group.cache.pool())?;
        metadata.check_blocks(group.cache.pool())?;
        let mask = mask.unwrap_or(metadata.mask());
        group.check_mask(mask)?;
        group.choice(stream, metadata, (local, mask), learnable_sink)
    }
}

impl<T: Element> LayerGroup<T> {
    fn example_choice(
        &self,
        stream: &Stream,
        (layer, mask): (usize, &LayerMask),
        learnable_sink: Option<&AnyTensor>,
        example: &Example,
    ) -> Result<BackendChoice> {
        let settings = BatchSettings::of(&self.cache, mask.causality().unwrap_or_default());
        let settings = settings.policy(example.policy);
        let rows = rows_of(example, settings.block_size(), self.cache.pool().pad_policy());
        let requests: Vec<BatchRequest<'_>> = (example.requests.iter().zip(&rows))
            .map(|(&(new, drafts, cached), row)| BatchRequest {
                pool: Some(self.cache.pool().id()),
                ..BatchRequest::in_row(row, cached, new).drafts(drafts)
            })
            .collect();
        let mut metadata = AttentionMetadata::new(&requests, settings)?;
        metadata.set_mask(mask.clone());
        self.choice(stream, &metadata, (layer, mask), learnable_sink)
    }

    fn choice(
        &self,
        stream: &Stream,
        metadata: &AttentionMetadata,
        (layer, mask): (usize, &LayerMask),
        learnable_sink: Option<&AnyTensor>,
    ) -> Result<BackendChoice> {
        metadata.check_mask(mask)?;
        let block_table = self.cache.block_table(stream, metadata.table())?;
        let shape = self.shape_of(layer);
        let rows = |heads, dim| Tensor::<T>::empty(stream.device(), [metadata.tokens(), heads, dim]);
        let query = rows(shape.heads, shape.head_dim)?;
        let key = rows(shape.kv_heads, shape.head_dim)?;
        let value = rows(shape.kv_heads, self.cache.shape().value_dim)?;
        let (cache, quantised) = self.cache.tensors(layer)?;
        let context = StepContext {
            stream,
            shape,
            metadata,
            mask,
            block_table: &block_table,
            recorded: false,
            shares_keys: false,
        };
        let tensors = LayerTensors {
            layer,
            query: &query,
            key: &key,
            value: &value,
            cache: &cache,
            quantised: quantised.as_ref(),
            learnable_sink,
            latent: None,
        };
        check_layer(&context, &tensors)?;
        let (served, refused, memory) = match self.backends.plan_for_scales(&context, &tensors, self.scale_count()) {
            Ok(selected) => (Ok(selected.name), selected.refused, selected.plan.memory()),
            Err(why @ Error::NoBackend { .. }) => (Err(why), Vec::new(), StepMemory::default()),
            Err(why) => return Err(why),
        };
        Ok(BackendChoice { state: metadata.state(), served, refused, memory })
    }
}

/// Rows of the block table: the first blocks of a cache that sequences may have, divided among the requests.
fn rows_of(example: &Example, block_size: usize, pad: PadPolicy) -> Vec<Vec<usize>> {
    let each = MOST_TOKENS.div_ceil(block_size.max(1));
    let blocks = |request: usize| -> Range<usize> {
        let first = pad.reserved_blocks(block_size).saturating_add(request.saturating_mul(each));
        first..first.saturating_add(each)
    };
    (0..example.requests.len()).map(|request| blocks(request).collect()).collect()
}
