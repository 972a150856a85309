//! What the paged cache and the serving layer refuse, by rule: conditions of requests, blocks and lengths. The rules
//! of the crate below are here as well; the contract ([`spec`](ascend_attention::spec)) has the conditions of single
//! operator calls.

use std::fmt;

use ascend_attention::Violation;
use ascend_attention::spec::Rule;

pub use ascend_attention::rules::*;

ascend_attention::spec::library_rules! {
    POOL_SIZE = "pool.size",
        "a pool has blocks and tokens in each, and every slot number fits INT32",
        "give the pool blocks, tokens in each, and no more slots than INT32 counts";
    POOL_EXHAUSTED = "pool.exhausted",
        "a pool has a free block when one is asked for",
        "preempt a request, or make the cache larger";
    POOL_WAITING = "pool.waiting",
        "blocks that were given back are handed out when no step in flight may read them any more",
        "drop the steps whose last layer is queued, synchronise their streams, then call again";
    POOL_SHARED = "pool.shared",
        "caches that share a pool have its number of blocks, block size and padding, and join while no block is "
        "held",
        "make caches of one size share a pool before the first sequence grows";
    BLOCK_POOL = "block.pool",
        "a sequence holds blocks of one pool",
        "use the sequences of this cache's pool";
    BLOCK_UNCOPIED = "block.uncopied",
        "a step reads no block that still waits for the tokens of a shared one",
        "grow with `Attention::grow`, or pass `Growth::copies` to `PagedKvCache::copy_blocks` before the step";
    BLOCK_GIVEN_BACK = "block.given_back",
        "a step begins with blocks that its sequences have held since its metadata was made",
        "keep the sequences of a step until it has begun, and make its metadata after their last change";
    BLOCK_WINDOW = "block.window",
        "blocks outside the window are given back only in front of the tokens still needed",
        "give back what lies in front of the window of the next token alone, and keep a sequence of its own for "
        "layers that see more";
    BLOCK_SPLIT = "block.split",
        "the cache's block size is a multiple of the kernel's",
        "choose the cache's block size as a multiple of the kernel's";
    SEQUENCE_LENGTH = "sequence.length",
        "a sequence has the tokens that are asked of it",
        "grow the sequence by its new tokens before the step, and ask for tokens that it still has";
    SEQUENCE_GAP = "sequence.gap",
        "a step begins where the computed tokens of its sequences end, and only computed tokens are moved or kept "
        "as a prefix",
        "compute all tokens that the sequence grew by in one step, and grow once for each step";
    SEQUENCE_COMPUTED = "sequence.computed",
        "a step computes tokens that no step has computed before, unless the request says so",
        "`grow` the sequence by its new tokens before each step, and make the step's requests, and metadata of them, "
        "after that; to compute tokens once more on purpose, as benchmarks do, say `recompute` of the request";
    SEQUENCE_IN_PROGRESS = "sequence.in_progress",
        "tokens are computed or moved only while no step of their sequence is in progress",
        "queue all layers of the step in progress, or drop it, before the next step of its sequences begins";
    SEQUENCE_MOVED = "sequence.moved",
        "a token moves once, to a position of its own: a sequence in which tokens have moved is cut before one of them \
         moves again, and before it gets new tokens",
        "move the accepted tokens once, from `AcceptedDrafts::moves`, and cut the sequence behind them (`truncate`); \
         pairs that follow from one another go into one call";
    SEQUENCE_CHANGED = "sequence.changed",
        "a step begins with its sequences as they were when its metadata was made",
        "make the step's metadata after the last `grow`, `truncate` or `drop_before` of its sequences";
    TABLE_ROW = "table.row",
        "a table has a row for each sequence, with a block for each of its tokens",
        "allocate the blocks before the step, and make the table from the batch of the lengths";
    TABLE_BLOCK = "table.block",
        "every used entry of a table is a block of the cache",
        "use blocks that this cache's pool handed out";
    TABLE_REPEATED = "table.repeated",
        "a request's row names each block once",
        "name each block of the request once, in the order of its tokens";
    TABLE_POOL = "table.pool",
        "a step's block tables and the cache that it reads are of one pool",
        "begin the step on the layers whose pool the sequences are of";
    SETTINGS_CACHE = "settings.cache",
        "a step's settings are those of the cache that it reads",
        "make the settings with `BatchSettings::of(&cache, ...)`, from the cache that the step begins on";
    STEP_TOKENS = "step.tokens",
        "tensors of a layer have a row for each token of the step, padding included; in a replay they may leave the \
         padding out, all of it or what the replay has added",
        "bring a row for each token of the batch that the metadata was made of, and for each that was added to fill it \
         up";
    STEP_HEADS = "step.heads",
        "query, key and value of a layer have the heads and the head dimension of the attention",
        "make the `AttentionShape` with the heads of the layer's tensors";
    STEP_CONTIGUOUS = "step.contiguous",
        "query, key and value of a layer are contiguous, with drafts also the rows of a convolution",
        "project them into tensors of their own, or copy them by `Tensor::contiguous`, which waits for the stream";
    STEP_LAYERS = "step.layers",
        "all layers of a step with one mask and scale bring sinks or none does, and all bring latents in one form or \
         none does; all of linear attention bring the decays of the `StateShape`, and to their convolutions tensors of \
         one form",
        "bring sinks in every layer or in none, and latents alike, with queries in one form; layers of another kind "
        "have another mask or a group of their own in `Attention::of_groups`";
    STEP_LAYERS_MISSING = "step.layers_missing",
        "a step queues all layers before the next step of its sequences begins",
        "begin the step again and queue every layer";
    STEP_LAYER_REPEATED = "step.layer_repeated",
        "a step queues each layer once",
        "number the layers from 0, each once; to compute a step again, begin it again";
    CACHE_QUANTISED = "cache.quantised",
        "a quantised cache is read and written with its scales, and a cache of the query's type without any",
        "read `PagedKvCache::quantised_layer` with its scales, or make the cache by `PagedKvCache::new`";
    CACHE_PAIRED = "cache.paired",
        "tokens of latents and of their index keys move together",
        "move them by `SparseLatent::move_tokens`, which moves them in both caches";
    QUANTISED_SCALE = "quantised.scale",
        "the scales of a quantised cache are numbers of the query's type above 0, one for each layer, head and "
        "element, and queries are quantised for the scale of their layer, with rotary parts that stay finite",
        "bring a finite scale above 0 for each layer, head and element; 1 for channels that are always 0";
    QUANTISED_FINITE = "quantised.finite",
        "numbers that scales are made of are finite",
        "find the layer that overflows by `Tensor::range_report`";
    TABLE_SHARED = "table.shared",
        "no token is written into a block that another sequence reads",
        "copy a shared block before writing into it, as `Sequence::grow` asks for";
    SLOT_RANGE = "slot.range",
        "a slot is inside the cache; only padding lies outside",
        "compute slots from the block table of this cache";
    SLOT_DUPLICATE = "slot.duplicate",
        "no slot is written twice in one step",
        "give the requests blocks of their own to write to, and each sequence one request, with all its new tokens";
    SLOT_COUNT = "slot.count",
        "there is one slot for each packed token",
        "make the slots from the same batch as the lengths, padding included";
    SLOT_DUMP = "slot.dump",
        "only padding is written to the dump slot",
        "never give a sequence the dump block";
    SLOT_POSITION = "slot.position",
        "a token's slot is the one that the table has for its position",
        "compute slots from the table that the attention call reads";
    INDEX_MISALIGNED = "index.misaligned",
        "token indices that become pages begin at a page and run through it",
        "allocate whole pages, or gather the keys into a dense tensor";
    INDEX_SHAPE = "index.shape",
        "index lists belong together",
        "make the lists of one batch, with the page size that they are read with";
    MASK_TEXT = "mask.text",
        "a mask of a configuration has a name that is known, and its parameters, each a number from 1 on",
        "write one of the allowed forms, or make a mask of another kind by `NamedMask::new`";
    MASK_TREE = "mask.tree",
        "a mask that is verified is that of drafted trees behind their keys",
        "draft trees: a node sees what its parent sees, and itself, and all keys in front of the tree";
    MASK_SHAPE = "mask.shape",
        "a packed mask has the bits that its offsets say",
        "compute mask_indptr as the sums of rows times keys";
    CHUNK_SIZE = "chunk.size",
        "a chunk of local attention is a whole number of blocks",
        "choose a block size that divides the chunk";
    SPLIT_TILE = "split.tile",
        "a tile of keys is a whole number of blocks",
        "choose a tile of whole blocks";
    SPLIT_LIMITS = "split.limits",
        "a split has at least one part, head and core",
        "give the device's cores and the model's heads";
    RANKS_INTERLEAVE = "ranks.interleave",
        "ranks and their interleaved runs are not 0, and a block holds whole runs",
        "choose a run that divides the block size, and 1 rank where the context is not divided";
    PAD_TARGET = "pad.target",
        "a batch is padded to at least its own size, and to no more than a call takes",
        "pad to the smallest captured size that holds the batch";
    PAD_SLOT = "pad.slot",
        "the slot that padding is written to is one of the cache's",
        "write padding to a slot of the cache, or skip it by a negative slot";
    DRAFT_COUNT = "draft.count",
        "a request has more query tokens than drafts",
        "count the last certain token among the query tokens";
    DRAFT_TREE = "draft.tree",
        "a draft's parent comes before it, and tensors and graphs have room for all nodes of a tree",
        "make the tree by one of its functions, and tensors and captures for its number of nodes";
    DRAFT_INPUTS = "draft.inputs",
        "trees over a cache of latents are verified with absorbed queries and rotary parts, others without; none with "
        "a mask or sinks of the layer's own",
        "make the inputs by `LayerInputs::latent` with `LatentForm::Absorbed` exactly where the cache has latents; of "
        "layers with masks or sinks of their own verify a chain of drafts (`BatchRequest::drafts`) in a step";
    DRAFT_PROBABILITY = "draft.probability",
        "drafts are accepted by distributions: numbers of at least 0 with a sum of 1, from which a draft can be "
        "drawn",
        "give probabilities, not logits: apply softmax to each row";
    DRAFT_UNIFORM = "draft.uniform",
        "the random numbers that decide on drafts are at least 0 and below 1",
        "draw the numbers evenly from 0 to 1";
    RANKS_PARTS = "ranks.parts",
        "a context is divided into no more parts than a merge takes",
        "divide a context over at most 15 ranks, and give more ranks some of the heads by `TensorParallel`";
    RANKS_HEADS = "ranks.heads",
        "ranks have as many query heads each, and key heads are a multiple or a divisor of the ranks",
        "choose a number of ranks that divides the query heads, and the key heads or is a multiple of these";
    RANKS_DEVICE = "ranks.device",
        "the cache of a rank and its communicator are on one device",
        "make the cache on `Communicator::device`";
    RANKS_ORDER = "ranks.order",
        "a rank queues the layers of a step in order, from 0 on, since the ranks' exchanges are matched by their order",
        "queue every layer of the step once, the first one first, on every rank alike";
    RANKS_BATCH = "ranks.batch",
        "the ranks of an attention bring the same step: the same sequences in order with the same cached and new \
        tokens, the same runs, layers, heads, element type, scale and cap, divided by rows on all, by heads, or \
        replayed from graphs of one size; and none of them refuses what the others begin",
        "give every rank the same requests in the same order, and make the attentions of all ranks alike";
    RANKS_LEFT = "ranks.left",
        "a rank takes part in steps until one of its layers fails half queued, or a step ends without some",
        "drop the attention of every rank, and make communicators and attentions anew";
    BACKEND_STEP = "backend.step",
        "a backend gets steps of the kind that it computes",
        "add a backend for other steps behind this one";
    BACKEND_ROWS = "backend.rows",
        "the calls of a backend compute each row of a step once",
        "divide the rows by `StepCall::rows`, or merge calls of all rows by `StepProgram::merged`";
    BACKEND_KEYS = "backend.keys",
        "the calls of a backend show each row all keys of its request that the step's mask shows, each once",
        "make the call by `StepCall::of_step`; for some rows of a step set `StepCall::rows` and `StepCall::requests`, "
        "for parts of the keys merge the calls by `StepProgram::merged`, and say `StepProgram::leaves_keys_out` where "
        "keys are left out on purpose";
    BACKEND_UNMASKED = "backend.unmasked",
        "the calls of a backend show no key that the step's mask hides",
        "set the mask by `StepCall::mask`, such as that of `Causality::mask`, or make the call by `StepCall::of_step`";
    BACKEND_SINKS = "backend.sinks",
        "a merge counts the sinks of a layer once, in a call whose log-sum-exp counts them",
        "leave sinks out of the other calls by `StepCall::without_sinks`, or compute such layers by one call";
    BACKEND_DECODE = "backend.decode",
        "the decoding backend gets single causal query tokens",
        "add a backend for packed queries behind this one";
    BACKEND_SPLIT = "backend.split_decode",
        "the backend that splits keys gets single query tokens that see all keys in front",
        "add a backend for other steps behind this one";
    BACKEND_TWO_CALLS = "backend.two_calls",
        "the backend of two calls gets decodes over the cache in front of prefills",
        "put the decodes first, and add a backend for other steps behind this one";
    BACKEND_PROMPT_AND_INCRE = "backend.prompt_and_incre",
        "PromptFlashAttention and IncreFlashAttention get layers without sinks, over contiguous caches",
        "serve models with sinks by `Backend::Fused`, on Atlas A2, A3 or Ascend 950";
    BACKEND_MEMORY = "backend.memory",
        "a step needs no more memory besides the cache than the backends may take",
        "add a backend behind this one that needs less, divide the step, or give more by "
        "`Backends::memory_limit`";
    BACKEND_MASK = "backend.mask",
        "named masks go to their own backend, and it gets no others",
        "add `Backend::NamedMask` in front for layers with named masks, and another backend behind it for the "
        "rest";
    BACKEND_CHUNK = "backend.chunk",
        "attention within chunks goes to its own backend, and it gets no other",
        "add `Backend::ChunkedLocal` for layers with chunks, and another backend behind it for the rest";
    ITEM_STARTS = "item.starts",
        "the items of a prompt have tokens, and follow each other",
        "leave out empty items";
    MASK_ROWS = "mask.rows",
        "each token sees a key under a named mask",
        "let each token see itself; the rule is true for the keys that a token sees, not for those that are hidden";
    BACKEND_QUANTISED = "backend.quantised",
        "a quantised cache goes to the backends that take its scales, and they get no other",
        "add `Backend::QuantisedDecode` and `Backend::QuantisedPrefill`, over MXFP8 `Backend::MxFp8`, over "
        "latents `Backend::QUANTISED_MLA_256_MIB`, or make the cache by `PagedKvCache::new`";
    BACKEND_MX_FP8 = "backend.mxfp8",
        "the backend of MXFP8 gets causal layers without window and sinks",
        "give such layers a cache of their own with scales of channels or tokens";
    BACKEND_LATENT = "backend.latent",
        "latent attention goes to its own backend, which gets causal layers of it alone",
        "add `Backend::MLA_256_MIB`, over latents of 8 bits `Backend::QUANTISED_MLA_256_MIB`, and make its layers by "
        "`LayerInputs::latent` or `LayerInputs::quantised_latent`";
    SPARSE_CHOICE = "sparse.choice",
        "a layer of sparse attention reads keys that were chosen in its own step",
        "choose keys in each step by `SparseStep::choose`, and share a choice among the layers of its step alone";
    SPARSE_INDEX_KEYS = "sparse.index_keys",
        "a step of sparse attention caches the keys of every indexer, among which later steps choose",
        "call `SparseStep::choose` for every indexer before the last layer, or make the cache of index keys with fewer "
        "layers";
    STEP_SHARED_KEYS = "step.shared_keys",
        "keys that a layer shares are those of a layer that was queued before in the step, with the same tensors",
        "queue the layer that has the keys first, by its own number, and bring the tensors that it was queued with";
    STEP_KIND = "step.kind",
        "a layer of linear attention gets the tensors of the delta rule, and a layer of attention query, key and value",
        "number the layers as the model does: `DeltaTensors` for those that `Attention::of_hybrid` names as linear, "
        "and `LayerInputs` or query, key and value for the others";
    STEP_IN_PLACE = "step.in_place",
        "tensors of layers are filled in place in steps that are replayed from graphs; of the layers of a group, which "
        "share them, one after another",
        "bring the inputs of a layer to `Step::forward`, and the rows of its convolution to `Step::convolve`: every \
         step takes them";
    STATE_TYPE = "state.type", "layers of linear attention compute in BF16",
        "make caches and tensors of `bf16`, the only type that the operators of linear attention take";
    STEP_CONVOLUTION = "step.convolution",
        "a layer of linear attention whose pool has a convolution is convolved once in each step, in front of it",
        "queue `Step::convolve` once for each such layer, before its `forward`, and in no other; without a convolution \
         in the `StateShape` the caller computes it";
    STATE_EXHAUSTED = "state.exhausted",
        "a pool of states has a free slot for a request and for each of its drafts",
        "preempt a request by dropping its sequence or cutting it to 0, drop states that are kept behind prefixes "
        "(`PrefixCache::evict_states`), or make the pool larger";
    STATE_DRAFTS = "state.drafts",
        "a pool of states has slots for 0 to 7 drafts of a request, and a step with drafts no more new tokens of it "
        "than slots",
        "make the pool with as many drafts in its `StateShape` as a request has new tokens less one, at most 7, or "
        "draft fewer tokens";
    STATE_POOL = "state.pool",
        "the states of a step are of the pool that computes it",
        "make sequences by `Attention::sequence` of the attention that computes them";
    STATE_REQUESTS = "state.requests",
        "a sequence of a model with layers of linear attention has a state of its tokens in them",
        "make sequences by `Attention::sequence` of this attention, fork and share them, and make requests of them by "
        "`BatchRequest::of`";
    STATE_TOKENS = "state.tokens",
        "the state of a request ends where the new tokens of the step begin",
        "compute each token of a sequence once, by steps of the attention that has its state; what was computed "
        "elsewhere, such as keys from another cache, is computed again: cut the sequence to 0 (`truncate`), or go on "
        "from a fork";
    STATE_KEPT = "state.kept",
        "tokens are taken back to a state that is kept",
        "go on from a fork that was made after these tokens, or cut the sequence to 0 and begin the request anew; "
        "where drafts are taken back, make the pool with as many in its `StateShape` as a step of the request has, at "
        "most 7";
    STATE_SLOTS = "state.slots",
        "each slot of a pool of states is free or held, and is written by one state alone",
        "report the calls that were made before: none of this crate leads there";
    STATE_STREAM = "state.stream", "states are made, read and written on the stream of their pool",
        "pass the stream that the `StatePool` was made with";
    STATE_TORN = "state.torn",
        "a step goes on from states that the last one has written in every layer",
        "queue every layer of a step in progress first, and fork again after it what was forked meanwhile; where the "
        "step ended without some, cut the request's sequence to 0 (`truncate`) and compute all tokens again, or go on "
        "from a fork that was made before the step";
    NATIVE_BLOCK = "native.block",
        "a block of the cache of native sparse attention has whole pages of 16 compressed tokens",
        "make the cache with blocks of 16 times the compression's stride, such as 256 tokens for a stride of 16";
    LATENT_WORKSPACE = "latent.workspace",
        "the workspace of latent attention holds a cached token of each request, and divides no context into "
        "more chunks than there may be",
        "give `Backend::Mla` or `Backend::QuantisedMla` a larger workspace, or make the batch smaller";
    BACKEND_CASCADE = "backend.cascade_prefill",
        "a cascade has new tokens behind cached ones, and no window that hides keys",
        "add a backend for packed queries behind this one";
    BACKEND_SHARED_PREFIX = "backend.shared_prefix_decode",
        "neighbouring requests share enough cached blocks that all their tokens see",
        "sort the batch by rows of the table, and add an ordinary backend behind this one";
    BACKEND_KNOWN = "backend.known",
        "flags name backends of the library",
        "write names as `Backends::names` prints them, divided by commas, `split_decode` with its number of keys; \
         register a backend of your own by `Backends::with`, or for the steps of a flag by `Backends::for_steps`";
    BACKEND_BOUND = "backend.bound",
        "a step of a kind for which a flag or `Backends::for_steps` names backends is computed by one of these",
        "give `Backends::for_steps` a list with this backend for steps of this kind, or leave the flag of the kind out";
    BACKEND_NAME = "backend.name",
        "layers prefer a registered backend",
        "name one that is registered for these steps: in their flag or list of `for_steps`, where they have one, and "
        "otherwise by `with`, before it is preferred";
    BACKEND_DETERMINISTIC = "backend.deterministic",
        "deterministic attention is computed by backends whose rows' bits do not depend on the batch \
         (`AttentionBackend::is_batch_invariant`)",
        "add a backend such as `Backend::Fused` or `Backend::PagedDecode`, bring latent attention absorbed \
         queries over latents of 16 bits, cache other keys in 16 bits, too, or leave `Attention::deterministic` out";
    DEVICE_DETERMINISTIC = "device.deterministic",
        "the device is asked for deterministic operators while deterministic attention plans, captures or replays",
        "call `Device::set_deterministic(true)`, and do not take it back: another `Attention::deterministic(false)` \
         of the device does";
    BACKEND_LAYERS = "backend.layers",
        "backends are preferred for layers of the model that they compute",
        "name the layers in `Backends::prefer` as the model numbers them, each in the backends of its own group";
    GROUP_LAYERS = "group.layers",
        "each layer of the model is in exactly one group, each group has a pool of its own, and a step has metadata "
        "for every group",
        "divide the layers of the model among the groups, and make the metadata by `Attention::metadata`";
    PREFIX_GROUPS = "prefix.groups",
        "a prefix cache holds blocks of one size, of layers that see no later tokens, and one sequence of each "
        "pool, which is a group, counted from 0",
        "give all caches of the model one block size, leave encoders out, and share prefixes by groups";
    OPTION_SOFT_CAP = "option.soft_cap",
        "no operator of an NPU caps scores before the softmax; the emulation does in calls of FusedInferAttentionScore",
        "compute these layers without the operator: scores by a matrix product, cap, mask, softmax, product; on the "
        "emulation by `AttentionShape::emulated_only_soft_cap`";
    OPTION_ALIBI = "option.alibi",
        "steps add no bias by distance: packed calls take none",
        "call `FusedInferAttention` without a step, in BNSD or BSND, with the distances times the slopes as "
        "`PseShift`";
    OPTION_DROPOUT = "option.dropout",
        "serving drops no attention weights",
        "serve the model without dropout, which is a part of training alone";
    OPTION_CROSS_ATTENTION = "option.cross_attention",
        "a step's keys are those of its own requests",
        "serve these layers by `CrossAttention`, beside this attention for the decoder's own tokens";
    BATCH_EMPTY = "batch.empty",
        "a batch has requests, and each has query tokens",
        "leave empty requests out, and skip a step without any";
    BATCH_BLOCKS = "batch.blocks",
        "the requests of a packed call need at most as many blocks as the cache has, shared ones counted for each",
        "preempt a request, or make the cache larger; `Backend::SharedPrefixDecode` reads shared blocks once, and "
        "`Backend::PagedDecode` has no such limit";
    STEP_CAUSALITY = "step.causality",
        "the tokens of a step see the keys that its layers, or its graphs, were made for",
        "make the metadata by `Attention::metadata` of these layers, or the settings with their causality; where all "
        "layers have another mask, set it in the metadata";
    GRAPH_BACKEND = "graph.backend",
        "a captured step is computed by a backend whose calls the captured size fixes",
        "add a backend such as `Backend::Fused` behind it before the capture, or compute the step without a "
        "graph; in a backend of your own let the calls depend on the size alone";
    GRAPH_INPUTS = "graph.inputs",
        "a captured layer brings the kind of inputs that it was captured with, and no other mask, scale, sinks \
         or weights",
        "bring what the layer was captured with, or compute the step without a graph";
    GRAPH_SIZE = "graph.size",
        "a batch fits a captured size",
        "compute the step without a graph, or capture a larger size";
    BATCH_FORMAT = "batch.format",
        "a recorded batch is the JSON that this crate writes",
        "record the batch again with this version of the crate";
}

/// Every rule that this crate refuses by: those of the crate below, of the operators among them, then its own.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    ascend_attention::rules::every_rule().chain(RULES.iter().copied())
}

/// The refusal of a step of no request.
#[cold]
pub(crate) fn no_requests() -> Violation {
    Violation::new(&BATCH_EMPTY, "0 requests", "1 or more", "skip the step")
}

/// The refusal of a launch that is repeated in its step behind a failed one, which may have written some of its keys.
#[cold]
pub(crate) fn launch_failed(what: impl fmt::Display) -> Violation {
    Violation::new(
        &STEP_LAYER_REPEATED,
        format_args!("{what}, whose launch failed in this step"),
        "a step that is begun again",
        STEP_LAYERS_MISSING.fix,
    )
}

/// Reserves memory for `more` elements that are about to be written; refuses more than the host has memory for.
pub(crate) fn room<T>(list: &mut Vec<T>, more: usize, rule: &'static Rule, fix: &'static str) -> Result<(), Violation> {
    list.try_reserve(more).map_err(|_| {
        Violation::new(
            rule,
            format_args!("{more} elements of {} bytes", size_of::<T>()),
            "what fits in the host's memory",
            fix,
        )
    })
}

#[cfg(test)]
mod tests {
    use ascend_attention::rules::RULES as BELOW;

    use super::*;

    #[test]
    fn ids_are_unique_and_stand_in_texts() {
        let rules: Vec<_> = RULES.iter().chain(BELOW).collect();
        let mut ids: Vec<_> = rules.iter().map(|rule| rule.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), rules.len());
        let text = SLOT_RANGE.broken(9, "0 to 7").to_string();
        assert_eq!(
            text,
            "slot.range: a slot is inside the cache; only padding lies outside; given 9, allowed: 0 to 7; fix: compute \
             slots from the block table of this cache"
        );
    }
}
