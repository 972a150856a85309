//! From a batch of requests to attention calls over a paged cache, on Huawei Ascend CANN: the layer of an inference
//! engine between its scheduler and the fused attention operators of [`ascend_attention`].
//!
//! A step of one request with a prompt of three tokens:
//!
//! ```
//! # fn main() -> ascend_serving::Result<()> {
//! # #[cfg(feature = "emulation")] {
//! use ascend_attention::{Runtime, bf16};
//! use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
//! use ascend_serving::{Attention, AttentionShape, Backends, BatchRequest, StatePolicy};
//!
//! let stream = Runtime::emulated()?.device(0)?.stream()?;
//! // 8 blocks of 128 tokens; 2 layers, 4 query heads over 2 key heads of 64 elements.
//! let shape = CacheShape::new(2, 2, 64);
//! let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative)?;
//! let backends = Backends::standard(stream.device());
//! let mut attention = Attention::new(AttentionShape::new(4, 2, 64), cache, backends);
//!
//! let mut sequence = attention.sequence();
//! attention.grow(&stream, &mut sequence, 3)?;
//! let metadata = attention.metadata(&[BatchRequest::of(&sequence, 3)], StatePolicy::default())?;
//! let mut step = attention.begin(&stream, &metadata)?;
//! for layer in 0..2 {
//!     // What the model projects: [tokens, heads, elements].
//!     let query = stream.upload(&[bf16::ONE; 3 * 4 * 64], [3, 4, 64])?;
//!     let key = stream.upload(&[bf16::ONE; 3 * 2 * 64], [3, 2, 64])?;
//!     let output = step.forward(layer, (&query, &key, &key))?;
//!     assert_eq!(output.shape(), [3, 4, 64]);
//! }
//! step.end()?; // an error names the layers that were left out
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! [`prelude`] has what most engines use, with that of [`ascend_attention`], to import at once. [`Error`] is everything
//! that can go wrong, as one type; [`rules`] is what requests, blocks and lengths are refused for.
//!
//! # Cache and sequences
//!
//! - [`kv`]: the paged KV cache: blocks, the sequences that hold them, and the slot of each token.
//! - [`kv::PagedKvCache::quantised`], [`kv::PagedKvCache::mxfp8`]: caches of INT8, FLOAT8 and MXFP8.
//! - [`PrefixCache`]: cached prefixes of prompts, found by their tokens (automatic prefix caching, radix cache).
//! - [`PageIndices`], [`TokenIndices`], [`kv::PageTable`]: the index formats of engines.
//! - [`compare_caches`]: how far attention over a quantised cache is from attention over one of 16 bits.
//!
//! # Batch and metadata
//!
//! - [`BatchRequest`], [`BatchSettings`]: what a request adds to a step; what all requests share.
//! - [`AttentionMetadata`]: what the calls of a step share, from a batch of requests.
//! - [`AttentionState`]: the kind of a step (prefill, decode, mixed, verification), as [`StatePolicy`] names it.
//! - [`Causality`]: which keys a token sees, and the conversion to the operator's mask.
//! - [`LayerMask`]: the mask of a step or a layer, one of the operator's or a [`NamedMask`].
//! - [`MultiItemPrompt`]: prompts whose items are scored separately (multi-item scoring).
//! - [`RecordedBatch`]: a batch as a line of JSON.
//!
//! # Step and backends
//!
//! - [`Attention`], [`Step`]: the attention of a model over a paged cache, step by step, layer by layer, computed or
//!   replayed.
//! - [`LayerGroup`], [`Attention::of_groups`]: models with several kinds of layers, such as full and windowed ones.
//! - [`Attention::of_hybrid`]: models that also have layers of linear attention (gated delta rule), with a state of
//!   each request in a [`kv::StatePool`].
//! - [`CrossAttention`]: attention of decoders over the keys of an encoder, which are written once.
//! - [`SparseLatent`]: latent attention to the keys that an indexer chooses (DeepSeek sparse attention).
//! - [`NativeSparse`]: compressed tokens, the blocks that they select, and a window (native sparse attention).
//! - [`EncoderAttention`]: attention of encoders and vision towers, without a cache.
//! - [`LayerInputs`]: query, key and value of a layer, with a mask, sinks or latents; [`Attention::layer_scales`]:
//!   layers with softmax scales of their own.
//! - [`AttentionBackend`], [`Backends`]: a way to compute a step; a list that is tried in order, with reasons
//!   ([`Backends::standard`]).
//! - [`StepProgram`], [`StepCall`]: what a backend makes of a step, which steps launch and graphs record.
//! - [`Backend`]: the backends of the library, by the operators of each product: packed calls and decoding ones; cached
//!   prefixes computed separately ([`SharedPrefixDecode`]) and keys in parts ([`SplitDecode`]), then merged; quantised
//!   caches; named masks; attention within chunks; multi-head latent attention, where [`LatentTensors`] defines who
//!   projects what.
//! - [`QuantisedQueries`]: absorbed queries of a byte an element, over latents of a byte
//!   ([`kv::PagedKvCache::quantised_latents`]).
//! - [`Backends::prefer`]: another backend for some layers in some kinds of steps.
//! - [`Attention::backend_choices`]: which backend would serve which kind of step, before there is one.
//! - [`compare_backends`]: two ways to compute the same recorded steps: how far apart, and how long each takes.
//! - [`RangeCheck`]: checks the numbers of steps, to find the first layer that overflows.
//! - [`AttentionOptions`]: features of models that no operator here has, refused by name.
//!
//! # Drafts and trees
//!
//! - [`DraftTree`]: drafted tokens, and which of them are [`AcceptedDrafts`]: greedily, or by rejection sampling
//!   ([`SampledDrafts`]).
//! - [`TreeVerification`]: drafted trees, by two calls of the stock operator and a merge; trees of latent attention by
//!   one call where the release has a tree mask.
//! - [`CustomMask`]: packed tree masks, as engines pass them.
//!
//! # Graphs and ranks
//!
//! - [`AttentionGraphs`]: decode steps replayed from graphs captured for some sizes; the step is a [`Step`], as without
//!   graphs. Layers of linear attention too.
//! - [`GraphPool`]: a graph for each size, with launches of one's own.
//! - [`TreeGraphs`], [`SparseGraphs`]: drafted trees, and sparse attention, replayed from graphs.
//! - [`GraphLimits`]: the sizes and lengths that are captured.
//! - [`TensorParallel`]: heads divided over ranks.
//! - [`ContextAttention`], [`ContextParallel`]: contexts, and rows of prompts, divided over ranks, on a communicator
//!   (DCP, PCP);
//!   [`ContextGraphs`]: its decode steps replayed from graphs.
//! - [`RingAttention`]: rows of one sequence divided over ranks, with keys and values that go round.
//!
//! # The book
//!
//! Pages with programs are in `docs/src` of the repository: begin with `serving.md`, a step from the requests to the
//! attention, and `serving-concepts.md`, the words of vLLM, SGLang and FlashInfer; `SUMMARY.md` lists all.
//!
//! # What it is built on
//!
//! The crate calls nothing but the public functions of [`ascend_attention`], whose documentation lists what runs
//! where. Without the feature `emulation`, which is on by default, it needs an NPU to run. Nothing has run on an NPU
//! yet.

#![warn(missing_docs)]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backends;
mod batch;
mod causality;
mod drafts;
mod engine;
mod error;
mod graphs;
mod index;
pub mod kv;
mod prefix_cache;
mod prefix_states;
mod ranks;
pub mod rules;
mod sharing;
mod sparse;

pub use ascend_attention::Violation;
pub use backends::*;
pub use batch::{
    AttentionMetadata, AttentionState, BatchRequest, BatchSettings, Drafting, LayerMask, MultiItemPrompt, NamedMask,
    RecordedBatch, StatePolicy,
};
pub use causality::Causality;
pub use drafts::{
    AcceptedDrafts, CustomMask, DraftSource, DraftTree, SampledDrafts, TreeGraphs, TreeRequest, TreeStep,
    TreeVerification,
};
pub use engine::{
    Attention, AttentionGraphs, AttentionOptions, BackendChoice, ConvolutionInputs, CrossAttention, CrossStep,
    EncoderAttention, Encoding, FurthestElement, LayerGroup, LayerTensor, LinearGraphTensors, OutputDeviation,
    RangeCheck, RangeFinding, Step, StepComparison, compare_backends, compare_caches,
};
pub use error::{Error, Result};
pub use graphs::{GraphLimits, GraphPool, GraphStep, GraphTensors};
pub use index::{PageIndices, TokenIndices};
pub use prefix_cache::PrefixCache;
pub use ranks::{
    ContextAttention, ContextGraphs, ContextParallel, ContextSplit, ContextStep, RingAttention, TensorParallel,
};
pub use sparse::{
    IndexerTensors, KeyChoice, NativeBranches, NativeSparse, NativeStep, NativeTensors, SparseGraphs, SparseLatent,
    SparseStep, SparseTensors,
};

/// What most engines use, for `use ascend_serving::prelude::*`: [`ascend_attention::prelude`], and the parts of a
/// step.
///
/// `Error`, `Result`, `Violation` and `rules` are not in it: `ascend_attention` has some of the same names.
///
/// ```
/// use ascend_serving::prelude::*;
///
/// # fn main() -> ascend_serving::Result<()> {
/// let pool = BlockPool::new(8, 128, PadPolicy::SkipNegative)?;
/// let mut sequence = Sequence::new(&pool);
/// sequence.grow(130)?;
/// let settings = BatchSettings::of(&pool, Causality::Causal);
/// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 130)], settings)?;
/// assert_eq!(metadata.state(), AttentionState::PrefillNoCache);
/// # Ok(())
/// # }
/// ```
pub mod prelude {
    pub use ascend_attention::delta_rule::DeltaTensors;
    pub use ascend_attention::prelude::*;

    pub use crate::kv::{
        BlockPool, CacheShape, CacheWrite, ChannelScales, Convolution, LatentScale, PadPolicy, PageTable, PagedKvCache,
        QuantisedType, Sequence, StatePool, StateShape,
    };
    pub use crate::{
        Attention, AttentionBackend, AttentionGraphs, AttentionMetadata, AttentionShape, AttentionState, Backend,
        Backends, BatchRequest, BatchSettings, Causality, ContextAttention, DraftTree, Drafting, GraphLimits,
        LatentForm, LatentTensors, LayerGroup, LayerInputs, LayerMask, LayerTensors, PrefixCache, QuantisedQueries,
        RecordedBatch, SharedPrefixDecode, SplitDecode, StatePolicy, Step, StepCall, StepContext, StepProgram,
        TreeGraphs, TreeRequest, TreeVerification,
    };
}

/// The README and pages of the book, whose programs are tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/src/first-steps.md")]
    struct FirstSteps;

    #[doc = include_str!("../../docs/src/host-tensors.md")]
    struct HostTensors;

    #[doc = include_str!("../../docs/src/serving.md")]
    struct Serving;

    #[doc = include_str!("../../docs/src/graphs.md")]
    struct Graphs;

    #[doc = include_str!("../../docs/src/drafts.md")]
    struct Drafts;

    #[doc = include_str!("../../docs/src/backends.md")]
    struct BackendsPage;

    #[doc = include_str!("../../docs/src/determinism.md")]
    struct Determinism;
}
