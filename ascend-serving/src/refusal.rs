//! What the paged cache and the serving layer refuse, by rule.

use std::fmt;

use ascend_attention::CallRule;

macro_rules! rules {
    ($($rule:ident = $id:literal, $holds:literal;)*) => {
        /// A condition of the paged cache or the serving layer, on requests, blocks and lengths. The contract
        /// ([`spec`](ascend_attention::spec)) has the conditions of single operator calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Rule {
            $(#[doc = concat!("`", $id, "`: ", $holds, ".")] $rule,)*
            /// A condition of lengths, windows or captured graphs.
            Call(CallRule),
        }

        impl Rule {
            /// Every rule except those of [`Rule::Call`], which [`CallRule::ALL`] has.
            pub const ALL: &'static [Self] = &[$(Self::$rule,)*];

            /// Its name, stable for ever.
            pub const fn id(self) -> &'static str {
                match self {
                    $(Self::$rule => $id,)*
                    Self::Call(rule) => rule.id(),
                }
            }

            /// The condition that must hold.
            pub const fn holds(self) -> &'static str {
                match self {
                    $(Self::$rule => $holds,)*
                    Self::Call(rule) => rule.holds(),
                }
            }
        }
    };
}

rules! {
    PoolSize = "pool.size", "a pool has blocks and tokens in each, and every slot number fits INT32";
    PoolExhausted = "pool.exhausted", "a pool has a free block when one is asked for";
    PoolWaiting = "pool.waiting", "blocks that were given back are handed out when no step in flight may read them any more";
    PoolShared = "pool.shared", "caches that share a pool have its number of blocks, block size and padding, and join while no block is held";
    BlockPool = "block.pool", "a sequence holds blocks of one pool";
    BlockUncopied = "block.uncopied", "a step reads no block that still waits for the tokens of a shared one";
    BlockGivenBack = "block.given_back", "a step begins with blocks that its sequences have held since its metadata was made";
    BlockWindow = "block.window", "blocks outside the window are given back only in front of the tokens still needed";
    BlockSplit = "block.split", "the cache's block size is a multiple of the kernel's";
    SequenceLength = "sequence.length", "a sequence has the tokens that are asked of it";
    SequenceGap = "sequence.gap", "a step begins where the computed tokens of its sequences end, or in front of that";
    SequenceChanged = "sequence.changed", "a step begins with its sequences as they were when its metadata was made";
    TableRow = "table.row", "a table has a row for each sequence, with a block for each of its tokens";
    TableBlock = "table.block", "every used entry of a table is a block of the cache";
    TableRepeated = "table.repeated", "a request's row names each block once";
    TableGroup = "table.group", "a step's block tables and the cache that it reads are of one pool";
    SettingsCache = "settings.cache", "a step's settings are those of the cache that it reads";
    StepTokens = "step.tokens", "query, key and value of a layer have a row for each token of the step, padding included";
    StepHeads = "step.heads", "query, key and value of a layer have the heads and the head dimension of the attention";
    StepLayers = "step.layers", "all layers of a step with one mask bring sinks or none does, and all bring latents or none does";
    StepLayersMissing = "step.layers_missing", "a step queues all layers before the next step of its sequences begins";
    StepLayerRepeated = "step.layer_repeated", "a step queues each layer once";
    CacheQuantised = "cache.quantised", "a quantised cache is read and written with its scales, and a cache of the query's type without any";
    QuantisedScale = "quantised.scale", "the scales of a quantised cache are numbers of the query's type above 0, one for each layer, head and element";
    QuantisedFinite = "quantised.finite", "numbers that scales are made of are finite";
    TableShared = "table.shared", "no token is written into a block that another sequence reads";
    SlotRange = "slot.range", "a slot is inside the cache; only padding lies outside";
    SlotDuplicate = "slot.duplicate", "no slot is written twice in one step";
    SlotCount = "slot.count", "there is one slot for each packed token";
    SlotDump = "slot.dump", "only padding is written to the dump slot";
    SlotPosition = "slot.position", "a token's slot is the one that the table has for its position";
    LengthsKvBelowQ = "lengths.kv_below_q", "a causal request has at least as many keys as query rows";
    IndexMisaligned = "index.misaligned", "token indices that become pages begin at a page and run through it";
    IndexShape = "index.shape", "index lists belong together";
    MaskShape = "mask.shape", "a packed mask has the bits that its offsets say";
    ChunkSize = "chunk.size", "a chunk of local attention is a whole number of blocks";
    SplitTile = "split.tile", "a tile of keys is a whole number of blocks";
    SplitLimits = "split.limits", "a split has at least one part, head and core";
    RanksInterleave = "ranks.interleave", "ranks and their interleaved runs are not 0, and a block holds whole runs";
    PadTarget = "pad.target", "a batch is padded to at least its own size, and to no more than a call takes";
    PadSlot = "pad.slot", "the slot that padding is written to is one of the cache's";
    DraftCount = "draft.count", "a request has more query tokens than drafts";
    DraftTree = "draft.tree", "a draft's parent comes before it";
    DraftProbability = "draft.probability", "drafts are accepted by distributions: numbers of at least 0 with a sum of 1, from which a draft can be drawn";
    DraftUniform = "draft.uniform", "the random numbers that decide on drafts are at least 0 and below 1";
    RanksParts = "ranks.parts", "a context is divided into no more parts than a merge takes";
    BackendDecode = "backend.decode", "the decoding backend gets single causal query tokens";
    BackendSplit = "backend.split_decode", "the backend that splits keys gets single query tokens that see all keys in front";
    BackendTwoCalls = "backend.two_calls", "the backend of two calls gets decodes over the cache in front of prefills";
    BackendPromptAndIncre = "backend.prompt_and_incre", "PromptFlashAttention and IncreFlashAttention get layers without sinks";
    BackendMemory = "backend.memory", "a step needs no more memory besides the cache than the backends may take";
    BackendMask = "backend.mask", "named masks go to their own backend, and it gets no others";
    BackendChunk = "backend.chunk", "attention within chunks goes to its own backend, and it gets no other";
    ItemStarts = "item.starts", "the items of a prompt have tokens, and follow each other";
    MaskRows = "mask.rows", "each token sees a key under a named mask";
    BackendQuantised = "backend.quantised", "a quantised cache goes to the backends that take its scales, and they get no other";
    BackendMxFp8 = "backend.mxfp8", "the backend of MXFP8 gets causal layers without window and sinks";
    BackendLatent = "backend.latent", "latent attention goes to its own backend, which gets causal layers of it alone";
    LatentWorkspace = "latent.workspace", "the workspace of latent attention holds a cached token of each request, and divides no context into more chunks than there may be";
    BackendCascade = "backend.cascade_prefill", "a cascade has new tokens behind cached ones, and no window that hides keys";
    BackendSharedPrefix = "backend.shared_prefix_decode", "neighbouring requests share enough cached blocks that all their tokens see";
    BackendTriangle = "backend.triangle_mix", "TriangleMix leaves enough out of a causal prompt of known length, in some layer";
    BackendName = "backend.name", "a set of layers names a registered backend for each kind of step";
    HybridLayers = "hybrid.layers", "each layer is in exactly one set of a hybrid backend";
    GroupLayers = "group.layers", "each layer of the model is in exactly one group, and a step has metadata for every group";
    PrefixGroups = "prefix.groups", "a prefix cache holds blocks of one size, of layers that see no later tokens, and one sequence of each pool";
    OptionSoftCap = "option.soft_cap", "no operator here caps scores before the softmax";
    OptionAlibi = "option.alibi", "steps add no bias by distance: packed calls take none";
    OptionDropout = "option.dropout", "serving drops no attention weights";
    OptionCrossAttention = "option.cross_attention", "a step's keys are those of its own requests";
    OptionSharedKv = "option.shared_kv", "each layer of a step brings keys and values";
    BatchEmpty = "batch.empty", "a batch has requests, and each has query tokens";
    BatchBlocks = "batch.blocks", "the requests of a packed call need at most as many blocks as the cache has, shared ones counted for each";
    StepCausality = "step.causality", "the tokens of a step see the keys that its layers, or its graphs, were made for";
    GraphLayer = "graph.layer", "a step replays each layer once";
    GraphInputs = "graph.inputs", "a captured layer brings the kind of inputs that it was captured with, and no other mask or sinks";
    GraphSize = "graph.size", "a batch fits a captured size";
    BatchFormat = "batch.format", "a recorded batch is the JSON that this crate writes";
}

impl From<CallRule> for Rule {
    fn from(rule: CallRule) -> Self {
        Self::Call(rule)
    }
}

impl PartialEq<CallRule> for Rule {
    fn eq(&self, rule: &CallRule) -> bool {
        *self == Self::Call(*rule)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// A refusal because of a broken [`Rule`]: the value that breaks it, what is allowed, and how to mend it. Nothing was
/// changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: {holds}; given {given}, allowed: {allowed}; fix: {fix}", holds = rule.holds())]
#[non_exhaustive]
pub struct Refused {
    /// The broken rule.
    pub rule: Rule,
    /// The value that breaks it.
    pub given: String,
    /// The values that would be accepted.
    pub allowed: String,
    /// What to change.
    pub fix: &'static str,
}

impl From<ascend_attention::Refused> for Refused {
    fn from(refused: ascend_attention::Refused) -> Self {
        let ascend_attention::Refused {
            rule,
            given,
            allowed,
            fix,
            ..
        } = refused;
        Self {
            rule: rule.into(),
            given,
            allowed,
            fix,
        }
    }
}

/// Reserves memory for `more` elements that are about to be written; refuses more than the host has memory for.
pub(crate) fn room<T>(
    list: &mut Vec<T>,
    more: usize,
    rule: impl Into<Rule>,
    fix: &'static str,
) -> Result<(), Refused> {
    list.try_reserve(more).map_err(|_| {
        refused(
            rule,
            format_args!("{more} elements of {} bytes", size_of::<T>()),
            "what fits in the host's memory",
            fix,
        )
    })
}

/// The refusal under a rule.
#[cold]
pub(crate) fn refused(
    rule: impl Into<Rule>,
    given: impl fmt::Display,
    allowed: impl fmt::Display,
    fix: &'static str,
) -> Refused {
    Refused {
        rule: rule.into(),
        given: given.to_string(),
        allowed: allowed.to_string(),
        fix,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_told() {
        let of_calls = CallRule::ALL.iter().map(|rule| Rule::from(*rule));
        let rules: Vec<_> = Rule::ALL.iter().copied().chain(of_calls).collect();
        let mut ids: Vec<_> = rules.iter().map(|rule| rule.id()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), rules.len());
        let told = refused(Rule::SlotRange, 9, "0 to 7", "look at the table").to_string();
        assert_eq!(
            told,
            "slot.range: a slot is inside the cache; only padding lies outside; given 9, allowed: 0 to 7; fix: look at \
             the table"
        );
    }
}
