//! A model's steps over paged caches: one cache for the layers that see every key, one for those with a window, which
//! keep no more than a token to come sees. Steps run layer by layer; those that only decode are replayed from graphs.
//! The cache of layers that see every key may be INT8, with scales of tokens, which the host makes: no graphs are
//! captured then.

use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionShape, Backends, BatchRequest, Causality, GraphLimits, LayerGroup,
    PrefixCache, Result, StatePolicy, rules,
};

use ascend_testing::llama::{Config, Model, download};

/// Tokens in a block, which every route takes.
const BLOCK_SIZE: usize = 128;
/// Prompts are computed in parts beside decoding, and nothing is drafted.
const POLICY: StatePolicy = StatePolicy::new(true, None);

/// Sizes of an engine.
pub(crate) struct Limits {
    /// Blocks of the cache of layers that see every key.
    pub(crate) blocks: usize,
    /// Blocks of the cache of layers with a window.
    pub(crate) windowed_blocks: usize,
    /// Keys of the longest request.
    pub(crate) longest: usize,
    /// Requests of the decode steps for which graphs are captured; none where keys are INT8.
    pub(crate) graphs: Vec<usize>,
    /// Whether layers that see every key keep keys and values as INT8, with a scale for each token.
    pub(crate) int8: bool,
}

/// A model, its caches and graphs.
pub(crate) struct Engine<'a> {
    model: &'a Model,
    stream: &'a Stream,
    attention: Attention<bf16>,
    graphs: Option<AttentionGraphs<bf16>>,
    /// Blocks of requests that ended or still run, by their tokens.
    prefixes: PrefixCache,
    replays: usize,
}

/// A request in a step: its new tokens, for which `cached` was grown.
pub(crate) struct Work<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) cached: &'a Sequence,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(model: &'a Model, stream: &'a Stream, limits: &Limits) -> Result<Self> {
        let mut kinds: Vec<(Causality, Vec<usize>)> = Vec::new();
        for (layer, causality) in model.config.layers.iter().enumerate() {
            match kinds.iter_mut().find(|(of, _)| of == causality) {
                Some((_, layers)) => layers.push(layer),
                None => kinds.push((*causality, vec![layer])),
            }
        }
        let groups = kinds.into_iter();
        let groups = groups.map(|(causality, layers)| group(&model.config, stream, causality, layers, limits));
        let groups = groups.collect::<Result<Vec<_>>>()?;
        let attention = Attention::of_groups(model.layers.len(), groups)?;
        let graphs = GraphLimits::new(limits.graphs.iter().copied(), limits.longest);
        let graphs = match limits.int8 {
            true => None,
            false => Some(attention.capture_layers(stream, |layer| attention.mask(layer), &graphs)?),
        };
        Ok(Self { graphs, prefixes: PrefixCache::of(&attention)?, model, stream, attention, replays: 0 })
    }

    /// The longest prefix of these tokens that is cached, which may be none of them.
    pub(crate) fn cached_prefix(&mut self, tokens: &[u32]) -> Sequence {
        self.prefixes.share(b"", tokens)
    }

    /// Remembers tokens that were computed, for prompts that begin with them.
    pub(crate) fn remember(&mut self, tokens: &[u32], cached: &Sequence) -> Result<()> {
        self.prefixes.insert(b"", tokens, cached)?;
        Ok(())
    }

    /// Makes room for new tokens, by forgetting what was used longest ago if it takes that; whether there was room.
    pub(crate) fn grow(&mut self, cached: &mut Sequence, tokens: usize) -> Result<bool> {
        let wanted = wanted_blocks(cached, tokens) + 1;
        for (group, pool) in pools(&self.attention).enumerate() {
            let missing = wanted.saturating_sub(pool.free_blocks());
            self.prefixes.evict(group, missing)?;
        }
        match self.attention.grow(self.stream, cached, tokens) {
            Ok(()) => Ok(true),
            Err(error) if error.breaks(&rules::POOL_EXHAUSTED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether one step may add these numbers of tokens to these sequences.
    pub(crate) fn admits(&self, requests: &[(&Sequence, usize)]) -> bool {
        self.attention.admits(requests.iter().copied()).is_ok()
    }

    /// Whether there are blocks for these numbers of further tokens of the sequences, or would be without what is only
    /// remembered.
    pub(crate) fn has_room(&self, requests: &[(&Sequence, usize)]) -> bool {
        let wanted = requests.iter();
        let wanted = wanted.map(|(cached, new)| wanted_blocks(cached, *new));
        let wanted = wanted.sum::<usize>() + 1;
        let mut groups = 0..self.attention.groups().len();
        groups.all(|group| {
            let available = self.prefixes.available_blocks(group);
            available.is_ok_and(|available| available >= wanted)
        })
    }

    /// Blocks that a sequence reads, in all caches.
    pub(crate) fn blocks(&self, cached: &Sequence) -> usize {
        let groups = 0..self.attention.groups().len();
        let rows = groups.filter_map(|group| cached.group(group)).map(Sequence::row);
        // What was given back stands as 0, where nothing but padding is written.
        rows.flatten().filter(|block| **block != 0).count()
    }

    /// Steps that were replayed from graphs.
    pub(crate) fn replays(&self) -> usize {
        self.replays
    }

    /// Forgets every prefix; whether every block was given back.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.prefixes.clear();
        pools(&self.attention).all(|pool| pool.held_blocks() == 0)
    }

    /// Computes a step: the logits behind the last token of each request.
    pub(crate) fn step(&mut self, batch: &[Work<'_>]) -> Result<Vec<Vec<f32>>> {
        let requests = batch.iter();
        let requests: Vec<_> = requests.map(|work| BatchRequest::of(work.cached, work.tokens.len())).collect();
        let mut metadata = self.attention.metadata(&requests, POLICY)?;
        let tokens: Vec<u32> = batch.iter().flat_map(|work| work.tokens).copied().collect();
        let positions = batch.iter().flat_map(|work| {
            let end = work.cached.len();
            end - work.tokens.len()..end
        });
        let positions: Vec<usize> = positions.collect();

        let (model, stream) = (self.model, self.stream);

        let graphs = self.graphs.as_mut();
        let graphs = graphs.filter(|graphs| graphs.serves(&metadata));
        let mut step = match graphs {
            Some(graphs) => {
                self.replays += 1;
                graphs.begin(stream, &mut metadata)?
            }
            None => self.attention.begin(stream, &metadata)?,
        };
        let state = model.forward(&tokens, &positions, |layer, attended| {
            let [query, key, value] = attended.upload(stream, &model.config)?;
            let output = step.forward(layer, (&query, &key, &value))?;
            // Without the rows of padding.
            download(stream, &output.narrow(0, 0..tokens.len())?)
        })?;
        step.end()?;

        // The results are here, but the stream may not have passed the step's end, behind which blocks are handed out
        // again.
        stream.synchronize()?;
        let width = model.config.width;
        let mut end = 0;
        let logits = batch.iter().map(|work| {
            end += work.tokens.len();
            model.logits(&state[(end - 1) * width..end * width])
        });
        Ok(logits.collect())
    }
}

/// The pools of all caches.
fn pools(attention: &Attention<bf16>) -> impl Iterator<Item = &BlockPool> {
    let groups = attention.groups().iter();
    groups.map(|group| group.cache().pool())
}

/// Blocks that a sequence takes in each cache for this number of further tokens.
fn wanted_blocks(cached: &Sequence, new: usize) -> usize {
    let len = cached.len();
    (len + new).div_ceil(BLOCK_SIZE) - len.div_ceil(BLOCK_SIZE)
}

/// The layers that see the same keys, with their cache.
fn group(
    config: &Config,
    stream: &Stream,
    causality: Causality,
    layers: Vec<usize>,
    limits: &Limits,
) -> Result<LayerGroup<bf16>> {
    let blocks = match causality {
        Causality::Window(_) => limits.windowed_blocks,
        _ => limits.blocks,
    };
    let shape = CacheShape::new(layers.len(), config.kv_heads, config.head_dim);
    let pad = PadPolicy::DumpSlot(0);
    let device = stream.device();
    let heads = AttentionShape::new(config.heads, config.kv_heads, config.head_dim);
    let cache = match limits.int8 && causality == Causality::Causal {
        true => PagedKvCache::quantised_by_token(device, blocks, BLOCK_SIZE, shape, pad, QuantisedType::Int8)?,
        false => PagedKvCache::new(device, blocks, BLOCK_SIZE, shape, pad)?,
    };
    Ok(LayerGroup::new(layers, causality, heads, cache, Backends::standard(device)))
}
