//! The backends of the library, and their names.

use std::fmt;
use std::str::FromStr;

use ascend_attention::{Element, Violation};

use crate::error::Result;
use crate::rules;

use super::attention_backend::AttentionBackend;
use super::program::StepProgram;
use super::shared_prefix_decode::{self, SharedPrefixDecode};
use super::split_decode::{self, SplitDecode};
use super::step_context::{LayerTensors, StepContext};
use super::{
    batched_queries, cascade_prefill, chunked_local_attention, fused_attention, latent, mxfp8_attention,
    named_mask_attention, paged_decode, prompt_and_incre, quantised_decode, quantised_prefill,
};

/// A backend of the library. Lists of them are [`Backends`](crate::Backends), and a backend of one's own is an
/// [`AttentionBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// One packed call (TND) a layer, for steps of every kind: over this step's keys where no token was cached before,
    /// otherwise over the paged cache.
    ///
    /// The contract of the device's target decides what packed calls take. On Atlas A2 and A3:
    ///
    /// | CANN | dtype | head dimension | blocks |
    /// |---|---|---|---|
    /// | 8.1 | BF16 | 64, 128, (192, 192, 128) | a multiple of 128 tokens |
    /// | 8.5 | and FLOAT16 | and others up to 256 of grouped queries | multiples of 16, to 1024 for 64, 128, else 512 |
    /// | 9.0 | | and others up to 256 of any number of key heads | |
    /// | 9.1 | | and over NZ caches others than 64 and 128 | |
    Fused,
    /// Two packed calls (TND) a layer over the paged cache, for steps that mix decoding with prefill: one of the
    /// decodes, then one of the rest, with lengths that begin anew. vLLM-Ascend computes such steps so on Ascend 950
    /// (A5), and in one call, as [`Backend::Fused`] does, elsewhere.
    ///
    /// The decodes come first in the batch. Other steps are refused: register a backend for them after this one.
    FusedInTwo,
    /// One call (BSH; BNSD over a BnNBsD cache) of one query row a request over the paged cache, for steps that only
    /// decode and layers without a window or sinks.
    ///
    /// On CANN 8.1 this path takes what the packed one does not: FLOAT16, other head dimensions, blocks of a multiple
    /// of 16 tokens. On 8.5 it also takes head dimensions other than 64 and 128 where there are as many key heads as
    /// query heads; in every release it takes heads up to 512. From 8.5 on it reads NZ caches of 64 or 128 elements a
    /// head too.
    PagedDecode,
    /// One call (BSND) a layer over the paged cache, for steps behind cached tokens whose requests add equally many:
    /// drafts that are verified, or one prompt. It takes causal layers and windows, and leaves sinks to packed calls.
    ///
    /// On CANN 8.1 packed calls do not take FLOAT16 and this call does, so drafts are verified without the copies that
    /// [`Backend::PromptAndIncre`] makes.
    BatchedQueries,
    /// Three calls a layer for steps with new tokens after cached ones: the step's tokens among themselves, from the
    /// packed keys, under the step's mask; all of them over the tokens cached before, paged, without a mask; and a
    /// merge on the device by their log-sum-exps. Requests without cached tokens are in the same batch and are not
    /// merged.
    ///
    /// The new keys are read where the model left them, and no call has both a mask and a cache. Steps that only decode
    /// and steps without cached tokens are refused, as are windows that hide keys: each row would see other cached
    /// keys. Sinks are counted by the call over the new tokens on Ascend 950, where its log-sum-exps are known to
    /// include them, and refused elsewhere. [`Backend::Fused`] lists what packed calls take in each release.
    CascadePrefill,
    /// Decoding, and verifying of drafts, for requests that share a cached prefix: their rows are stacked to one
    /// sequence that attends over the shared blocks, which are thereby read once for all of them; each request attends
    /// over its keys after them; and the two results are merged on the device.
    ///
    /// Shared blocks are found in the block table: full blocks of the same number in the same columns of *neighbouring*
    /// rows. Of all divisions of the rows into neighbours the one that saves most is taken. An engine with many
    /// prefixes sorts its batch by the rows of the table, `requests.sort_by_key(|request| request.row)`. Requests that
    /// share nothing are in the same step.
    ///
    /// Under a window that hides keys, only those shared blocks are read once that every token of its requests sees
    /// whole; each request reads the shared blocks before them together with its own later keys. One packed call has
    /// one window: every request longer than the window must belong to a shared prefix, and each prefix reads once only
    /// as many blocks as the prefix with the fewest.
    ///
    /// Sinks are counted by the call over the keys after the shared blocks on Ascend 950, where its log-sum-exps are
    /// known to include them, and refused elsewhere. Steps that save less than asked are refused, too.
    /// [`Backend::Fused`] lists what packed calls take in each release.
    SharedPrefixDecode(SharedPrefixDecode),
    /// Split-KV decoding, for layers without a window that hides keys: the keys of each request are cut into ranges.
    /// One packed call (TND) computes the first range of every request, one the second, and so on; the device combines
    /// them by their log-sum-exps.
    ///
    /// The fused operators of CANN split long contexts on their own, so that this is not for speed where they do. It is
    /// for steps whose parts the caller has to choose: with [`SplitDecode::Tiles`] no request's result depends on the
    /// lengths of the others, as long as the operator computes a row over one tile alike in every batch.
    ///
    /// Sinks are counted by the first part on Ascend 950, where its log-sum-exps are known to include them, and refused
    /// elsewhere. Parts are rounded to the query's type before they are merged. [`Backend::Fused`] lists what packed
    /// calls take in each release.
    SplitDecode(SplitDecode),
    /// Steps of every kind by the fused attention of the Atlas inference series (310P), which has no
    /// FusedInferAttentionScore. Requests that add one token and see every key decode by one call of
    /// IncreFlashAttention over the paged cache (BSH; BNSD over BnNBsD). The others are computed by
    /// PromptFlashAttention (BSH), one call for each run of neighbouring requests with equally many new tokens and
    /// keys.
    ///
    /// PromptFlashAttention reads no block table: the cached tokens that the step's tokens see are copied out of the
    /// cache first, layer by layer. The copies need a cache in which a token's row is contiguous: BnBsH, or BnNBsD of a
    /// single head. Layers without a window decode without copies; layers with a window copy the window.
    ///
    /// On 310P a mask has as many query rows as keys, a multiple of 16. Several new tokens of a causal layer that do
    /// not fill these rows are copied to the rows of their own keys, in tensors padded with zeros: a chunk costs as
    /// much as a prompt of all its keys. Windows that hide keys take a mask of a byte for each pair of rows.
    ///
    /// Sinks and latents are refused. On 310P the operators take FLOAT16 alone, IncreFlashAttention blocks of a
    /// multiple of 16 up to 512 tokens. On Atlas A2 and A3 they run too, BF16 included, where [`Backend::Fused`] copies
    /// nothing; Ascend 950 has neither.
    PromptAndIncre,
    /// Steps of every kind under [`Causality::Chunk`](crate::Causality::Chunk): one packed call (TND) a layer, in which
    /// each piece of a request within one chunk is a request of its own, with the blocks of that
    /// chunk. The pieces are in the order of the tokens, so that nothing is copied. Sinks
    /// count once for each token, as in any call.
    ///
    /// The pieces get a block table of their own, made once a step. A chunk is a whole number of blocks
    /// ([`CHUNK_SIZE`](crate::rules::CHUNK_SIZE)). Steps under other masks are refused, so that the ordinary backends
    /// serve them. [`Backend::Fused`] lists what packed calls take in each release.
    ChunkedLocal,
    /// Steps of every kind under a [`NamedMask`](crate::NamedMask): one call over the paged cache (BSH, sparse mode 1
    /// with the whole mask) for each run of neighbouring requests with equally many new tokens, since packed calls take
    /// no mask but the operator's own.
    ///
    /// A mask has a byte for each new token and each key slot of the request's row of the block table: use it for short
    /// prompts, drafts and decoding. Steps with a mask of the operator's own are refused, so that the ordinary backends
    /// serve them.
    NamedMask,
    /// One call (BSH; BNSD over a BnNBsD cache) of one query row a request over a quantised paged cache; the operator
    /// multiplies the stored numbers by their scales as it reads them. It serves steps of one token a request, drafting
    /// or not, and layers without a window or sinks. Register [`Backend::QuantisedPrefill`] after it for the other
    /// steps.
    QuantisedDecode,
    /// Steps of every kind over a quantised paged cache: the cached tokens that a step's tokens see are copied out of
    /// their blocks and dequantised to the query's type, the step's own tokens are used as they are, where layers
    /// [share keys](crate::LayerInputs::shared_keys) copied as well, and one packed call (TND) attends to both, as
    /// [`Backend::Fused`] does, with windows and sinks. Steps without cached tokens copy nothing and are that call
    /// alone.
    ///
    /// In layers without a window or sinks, the requests at the beginning of a mixed step that add one token to cached
    /// ones are a call of their own, which reads their cached tokens in their blocks as [`Backend::QuantisedDecode`]
    /// does: only the tokens of the other requests are copied. Such requests must come before the others.
    ///
    /// The library has no operator that only dequantises. Attention with a single key returns the value of that key,
    /// and the operator multiplies quantised values by their scales as it reads them: a call with a sequence for each
    /// cached token, whose query is zeros and whose value is the token's, returns the token in 16 bits, rounded.
    ///
    /// The copies need a cache in which a token's row is contiguous: BnBsH, or BnNBsD of a single head. A step needs
    /// memory for all keys that its tokens see: at most five bytes for each element of key and value, and four for each
    /// token's scales where tokens have their own.
    QuantisedPrefill,
    /// One packed call (TND) a layer for steps of every kind, over a cache of [MXFP8](crate::kv::PagedKvCache::mxfp8),
    /// with queries that the host quantises: each layer waits for the stream. A step's own keys and values are read as
    /// they are cached. It serves causal layers without a window or sinks, on Ascend 950.
    ///
    /// The operator rounds the probabilities to FLOAT8_E4M3FN, too.
    MxFp8,
    /// Multi-head latent attention over a cache of latents and rotary parts
    /// ([`CacheShape::latent`](crate::kv::CacheShape::latent)), for causal layers.
    ///
    /// | queries | step | calls |
    /// |---|---|---|
    /// | [absorbed](crate::LatentForm::Absorbed) | one token a request | BNSD_NBSD over the cache, mode 0 |
    /// | absorbed | several tokens a request (drafts), on CANN 8.1 up to 16 | TND_NTD over the cache, mode 3 |
    /// | [plain](crate::LatentForm::Plain) | any | TND over its own tokens, mode 3, and over cached ones, mode 0 |
    /// | [mixed](crate::LatentForm::Mixed) | decodes, then prefills | the absorbed call, then plain ones |
    ///
    /// An absorbed call has the latents as keys and as values, one key head, and returns `[N, tokens, 512]`, so that
    /// the projection of the values is one batched product. A plain step has a call for each chunk of the cached
    /// tokens, and merges all by their log-sum-exps. It calls the [`UpProjection`](crate::UpProjection) for its own
    /// tokens and for each chunk, and returns `[tokens, N, 128]`. It copies the chunks out of their
    /// blocks, and out of those of an NZ cache by GatherPaKvCache, from CANN 8.5 on: such a chunk begins with a block.
    ///
    /// In the [`AttentionShape`](crate::AttentionShape), `kv_heads` is 1 and the scale is that of the whole head,
    /// usually `1 / sqrt(192)` and not `1 / sqrt(512)`: [`AttentionShape::latent`](crate::AttentionShape::latent).
    ///
    /// The operator's rules are the contract's; among them that absorbed queries have 1, 2, 4, ... or 128 heads and
    /// that plain ones are BF16 on CANN 8.1. Merging takes AttentionUpdate, which CANN 8.1 does not have.
    ///
    /// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention.
    Mla {
        /// Most bytes of device memory for a chunk of cached tokens and their keys and values. Fewer bytes make more
        /// chunks. The step's own tokens are computed at once, whatever their number.
        workspace_bytes: usize,
    },
    /// Multi-head latent attention over a cache of latents of one byte an element
    /// ([`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents)), for causal layers, from
    /// CANN 8.5 on.
    ///
    /// | queries | step | calls |
    /// |---|---|---|
    /// | [quantised](crate::LatentForm::Quantised) | one token a request | BSND_NBSD (over NZ), BNSD_NBSD, mode 0 |
    /// | quantised | up to 16 tokens a request (drafts) | TND_NTD over the cache, mode 3 |
    /// | [plain](crate::LatentForm::Plain) | any | as of [`Backend::Mla`], cached latents dequantised |
    /// | [mixed](crate::LatentForm::QuantisedMixed) | decodes, then prefills | the quantised call, then plain ones |
    ///
    /// On Atlas A2 and A3 a request has up to 32 tokens from CANN 9.1 on.
    ///
    /// Quantised queries read the step's own latents from the cache, as they were rounded; plain ones have their own in
    /// 16 bits. The operator rounds the probabilities to the cache's type, too, in each range of keys by their largest.
    /// Chunks of cached tokens are copied out of NZ caches by GatherPaKvCache, and dequantised as
    /// [`Backend::QuantisedPrefill`] does. Absorbed queries of 16 bits are refused.
    QuantisedMla {
        /// Most bytes of device memory for a chunk of cached tokens and their keys and values, as of
        /// [`Backend::Mla`]. Over an NZ cache a chunk begins with a block.
        workspace_bytes: usize,
    },
}

impl Backend {
    /// Multi-head latent attention with the usual workspace, of 256 MiB.
    pub const MLA_256_MIB: Self = Self::Mla { workspace_bytes: 256 << 20 };

    /// Latent attention over latents of one byte an element, with the usual workspace, of 256 MiB.
    pub const QUANTISED_MLA_256_MIB: Self = Self::QuantisedMla { workspace_bytes: 256 << 20 };

    /// The backends that a name alone says, with their usual settings.
    const NAMED: [Self; 14] = [
        Self::Fused,
        Self::FusedInTwo,
        Self::PagedDecode,
        Self::BatchedQueries,
        Self::CascadePrefill,
        Self::SharedPrefixDecode(SharedPrefixDecode::ALWAYS),
        Self::PromptAndIncre,
        Self::ChunkedLocal,
        Self::NamedMask,
        Self::QuantisedDecode,
        Self::QuantisedPrefill,
        Self::MxFp8,
        Self::MLA_256_MIB,
        Self::QUANTISED_MLA_256_MIB,
    ];

    /// Its name, without its settings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::FusedInTwo => "fused_in_two",
            Self::PagedDecode => "paged_decode",
            Self::BatchedQueries => "batched_queries",
            Self::CascadePrefill => "cascade_prefill",
            Self::SharedPrefixDecode(_) => "shared_prefix_decode",
            Self::SplitDecode(_) => "split_decode",
            Self::PromptAndIncre => "prompt_and_incre",
            Self::ChunkedLocal => "chunked_local",
            Self::NamedMask => "named_mask",
            Self::QuantisedDecode => "quantised_decode",
            Self::QuantisedPrefill => "quantised_prefill",
            Self::MxFp8 => "mxfp8",
            Self::Mla { .. } => "mla",
            Self::QuantisedMla { .. } => "quantised_mla",
        }
    }

    /// Whether a backend of this name is one of these, and not an engine's own.
    pub(super) fn has_name(name: &str) -> bool {
        name == "split_decode" || Self::NAMED.iter().any(|backend| backend.name() == name)
    }

    /// What [`FromStr`] takes.
    pub(super) fn known_names() -> String {
        let names = Self::NAMED.map(|backend| backend.name()).join(", ");
        format!(
            "one of {names}, and split_decode:KEYS with a number of keys from 1 on, as in split_decode:256, or \
             split_decode:KEYS:PARTS"
        )
    }
}

impl fmt::Display for Backend {
    /// Writes its [name](Self::name).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Reads a name. The parts of `split_decode` have a number of keys: `split_decode:256` is [`SplitDecode::Tiles`], and
/// `split_decode:512:8`, with at most 8 of them, [`SplitDecode::Capped`]. `shared_prefix_decode` reads every shared
/// prefix once ([`SharedPrefixDecode::ALWAYS`]), and `mla` and `quantised_mla` have their usual workspace
/// ([`Backend::MLA_256_MIB`], [`Backend::QUANTISED_MLA_256_MIB`]).
///
/// ```
/// use ascend_serving::{Backend, SplitDecode};
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// assert_eq!("paged_decode".parse::<Backend>()?, Backend::PagedDecode);
/// assert!(matches!("split_decode:256".parse()?, Backend::SplitDecode(SplitDecode::Tiles(_))));
/// # Ok(())
/// # }
/// ```
impl FromStr for Backend {
    type Err = Violation;

    /// # Errors
    /// [`BACKEND_KNOWN`](crate::rules::BACKEND_KNOWN) for another name.
    fn from_str(name: &str) -> Result<Self, Violation> {
        let backend = match name.strip_prefix("split_decode:") {
            Some(sizes) => SplitDecode::of_sizes(sizes).map(Self::SplitDecode),
            None => Self::NAMED.into_iter().find(|backend| backend.name() == name),
        };
        backend.ok_or_else(|| rules::BACKEND_KNOWN.broken(format_args!("{name:?}"), Self::known_names()))
    }
}

impl<T: Element> AttentionBackend<T> for Backend {
    fn name(&self) -> &'static str {
        self.name()
    }

    fn reads_quantised(&self) -> bool {
        matches!(self, Self::QuantisedDecode | Self::QuantisedPrefill | Self::MxFp8 | Self::QuantisedMla { .. })
    }

    fn reads_latents(&self) -> bool {
        matches!(self, Self::Mla { .. } | Self::QuantisedMla { .. })
    }

    fn is_batch_invariant(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> bool {
        match self {
            Self::Fused
            | Self::FusedInTwo
            | Self::PagedDecode
            | Self::BatchedQueries
            | Self::ChunkedLocal
            | Self::NamedMask => true,
            Self::PromptAndIncre => prompt_and_incre::is_batch_invariant(step),
            Self::Mla { .. } => latent::is_batch_invariant(first),
            Self::CascadePrefill
            | Self::SharedPrefixDecode(_)
            | Self::SplitDecode(_)
            | Self::QuantisedDecode
            | Self::QuantisedPrefill
            | Self::QuantisedMla { .. }
            | Self::MxFp8 => false,
        }
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        match self {
            Self::Fused => fused_attention::program(step),
            Self::FusedInTwo => fused_attention::program_in_two(step),
            Self::PagedDecode => paged_decode::program(step, first),
            Self::BatchedQueries => batched_queries::program(step, first),
            Self::CascadePrefill => cascade_prefill::program(step, first),
            Self::SharedPrefixDecode(least) => shared_prefix_decode::program(least, step, first),
            Self::SplitDecode(split) => split_decode::program(split, step, first),
            Self::PromptAndIncre => prompt_and_incre::program(step, first),
            Self::ChunkedLocal => chunked_local_attention::program(step),
            Self::NamedMask => named_mask_attention::program(step),
            Self::QuantisedDecode => quantised_decode::program(step, first),
            Self::QuantisedPrefill => quantised_prefill::program(step, first),
            Self::MxFp8 => mxfp8_attention::program(step, first),
            Self::Mla { workspace_bytes } => latent::program(step, first, *workspace_bytes),
            Self::QuantisedMla { workspace_bytes } => latent::quantised_program(step, first, *workspace_bytes),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn backends_are_read_by_the_names_that_they_print() {
        for backend in Backend::NAMED {
            assert_eq!(backend.to_string().parse::<Backend>().unwrap(), backend);
        }
        let size = |size: usize| size.try_into().unwrap();
        for (name, split) in [
            ("split_decode:16", SplitDecode::Tiles(size(16))),
            ("split_decode:512:8", SplitDecode::Capped { keys: size(512), max_splits: size(8) }),
        ] {
            let backend = name.parse::<Backend>().unwrap();
            assert_eq!((backend, backend.name()), (Backend::SplitDecode(split), "split_decode"));
        }
    }
}
