//! A model's steps over paged caches: one cache for the layers that see every key, one for those with a window, whose
//! blocks go back as soon as no token to come sees them. Steps run layer by layer; those that only decode are replayed
//! from graphs.

use ascend_attention::kv::{
    BlockPool, CacheShape, PadPolicy, PagedKvCache, Refused, Rule, Sequence,
};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backends, BatchRequest,
    BatchSettings, Causality, Fused, StatePolicy, window_start,
};
use ascend_attention::{Result, Stream, bf16};

use crate::graphs::Graphs;
use crate::model::{Attended, Config, Model};

/// Tokens in a block: the least that packed calls take.
pub(crate) const BLOCK_SIZE: u32 = 128;

/// Sizes of an engine.
pub(crate) struct Limits {
    /// Blocks of the cache of layers that see every key.
    pub(crate) blocks: u32,
    /// Blocks of the cache of layers with a window.
    pub(crate) windowed_blocks: u32,
    /// Keys of the longest request.
    pub(crate) longest: u32,
    /// Requests of the decode steps for which graphs are captured.
    pub(crate) graphs: Vec<u32>,
}

/// Layers that see the same keys, and so share blocks, tables and slots.
pub(crate) struct Kind {
    pub(crate) causality: Causality,
    pub(crate) attention: Attention<bf16>,
    pub(crate) settings: BatchSettings,
    /// The most keys that a request of a decode step has in the table.
    pub(crate) most_keys: u32,
}

/// A model, its caches and graphs.
pub(crate) struct Engine<'a> {
    model: &'a Model,
    stream: &'a Stream,
    kinds: Vec<Kind>,
    /// The kind of each layer, and its number among those of the kind.
    places: Vec<(usize, usize)>,
    graphs: Graphs,
    replays: usize,
}

/// What a request has cached: a sequence for each kind of layers.
pub(crate) struct Cached(Vec<Sequence>);

/// A request in a step: its new tokens, for which `cached` was grown.
pub(crate) struct Work<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) cached: &'a Cached,
}

impl Cached {
    pub(crate) fn len(&self) -> u32 {
        self.0.first().map_or(0, Sequence::len)
    }

    /// The same tokens in the same blocks.
    pub(crate) fn fork(&self) -> Self {
        Self(self.0.iter().map(Sequence::fork).collect())
    }

    /// Blocks that it reads, of all kinds.
    pub(crate) fn blocks(&self) -> usize {
        self.0.iter().map(|sequence| sequence.row().len()).sum()
    }
}

impl Kind {
    fn new(
        config: &Config,
        stream: &Stream,
        causality: Causality,
        limits: &Limits,
    ) -> Result<Self> {
        let (blocks, most_keys) = match causality.window() {
            // The window, and what stands in front of it in its first block.
            Some(keys) => (limits.windowed_blocks, keys.get() + BLOCK_SIZE - 1),
            None => (limits.blocks, limits.longest),
        };
        let layers = config.layers.iter().filter(|of| **of == causality).count();
        let cache = PagedKvCache::new(
            stream.device(),
            blocks,
            BLOCK_SIZE,
            CacheShape::new(layers, config.kv_heads, config.head_dim),
            PadPolicy::DumpSlot(0),
        )?;
        let shape = AttentionShape::new(config.heads, config.kv_heads, config.head_dim);
        Ok(Self {
            causality,
            settings: BatchSettings::of(&cache, causality).policy(StatePolicy {
                chunked_prefill: true,
                drafting: None,
            }),
            attention: Attention::new(shape, cache, Backends::none().with(Fused)),
            most_keys: most_keys.min(limits.longest),
        })
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.attention.cache().pool()
    }

    /// The first key that is still cached for a request of which so many are.
    fn first_key(&self, cached: u32) -> u32 {
        let window = self.causality.window().map(|keys| keys.get());
        window_start(cached + 1, window) / BLOCK_SIZE * BLOCK_SIZE
    }

    fn metadata(&self, batch: &[Work<'_>], at: usize) -> Result<AttentionMetadata> {
        let requests = batch.iter().map(|work| {
            let sequence = &work.cached.0[at];
            let request = BatchRequest::of(sequence, work.tokens.len() as u32);
            // Keys in front of the window are no part of the request any more.
            let first = self.first_key(request.cached);
            BatchRequest {
                cached: request.cached - first,
                row: &request.row[(first / BLOCK_SIZE) as usize..],
                ..request
            }
        });
        Ok(AttentionMetadata::new(
            &requests.collect::<Vec<_>>(),
            self.settings,
        )?)
    }
}

impl<'a> Engine<'a> {
    pub(crate) fn new(model: &'a Model, stream: &'a Stream, limits: &Limits) -> Result<Self> {
        let mut kinds: Vec<Kind> = Vec::new();
        let mut places = Vec::new();
        for causality in &model.config.layers {
            let known = kinds.iter().position(|kind| kind.causality == *causality);
            let kind = known.unwrap_or(kinds.len());
            if known.is_none() {
                kinds.push(Kind::new(&model.config, stream, *causality, limits)?);
            }
            let number = places.iter().filter(|(of, _)| *of == kind).count();
            places.push((kind, number));
        }
        Ok(Self {
            graphs: Graphs::capture(&model.config, stream, &kinds, &places, &limits.graphs)?,
            model,
            stream,
            kinds,
            places,
            replays: 0,
        })
    }

    /// Nothing cached yet.
    pub(crate) fn empty(&self) -> Cached {
        Cached(
            self.kinds
                .iter()
                .map(|kind| Sequence::new(kind.pool()))
                .collect(),
        )
    }

    /// Makes room for new tokens in every kind of layers, or in none; whether there was room.
    pub(crate) fn grow(&mut self, cached: &mut Cached, tokens: u32) -> Result<bool> {
        let before = cached.len();
        for at in 0..self.kinds.len() {
            match cached.0[at].grow(tokens) {
                Ok(grown) => {
                    let cache = self.kinds[at].attention.cache_mut();
                    cache.copy_blocks(self.stream, &grown.copies)?;
                }
                Err(refused) if refused.rule == Rule::PoolExhausted => {
                    for sequence in &mut cached.0[..at] {
                        sequence.truncate(before)?;
                    }
                    return Ok(false);
                }
                Err(refused) => return Err(refused.into()),
            }
        }
        Ok(true)
    }

    /// Whether there are free blocks for a request's new tokens behind those that it shares.
    pub(crate) fn has_room(&self, (cached, new): (u32, u32)) -> bool {
        // A shared block that is not full is copied before it is written.
        let wanted = (cached % BLOCK_SIZE + new).div_ceil(BLOCK_SIZE) as usize;
        let mut kinds = self.kinds.iter();
        kinds.all(|kind| kind.pool().free_blocks() >= wanted)
    }

    /// Whether a step's tables may have so many blocks: the operator wants a cache to have as many as the rows of a call
    /// together, shared ones counted each time. Requests are given by cached and new tokens.
    pub(crate) fn admits(&self, requests: &[(u32, u32)]) -> bool {
        self.kinds.iter().all(|kind| {
            let rows = requests.iter().map(|(cached, new)| {
                let keys = cached - kind.first_key(*cached) + new;
                keys.div_ceil(BLOCK_SIZE)
            });
            rows.sum::<u32>() <= kind.pool().blocks()
        })
    }

    /// Steps that were replayed from graphs.
    pub(crate) fn replays(&self) -> usize {
        self.replays
    }

    /// Whether every block was given back.
    pub(crate) fn is_idle(&self) -> bool {
        self.kinds.iter().all(|kind| kind.pool().held_blocks() == 0)
    }

    /// Computes a step: the logits behind the last token of each request.
    pub(crate) fn step(&mut self, batch: &[Work<'_>]) -> Result<Vec<Vec<f32>>> {
        let kinds = self.kinds.iter().enumerate();
        let metadata = kinds.map(|(at, kind)| kind.metadata(batch, at));
        let mut metadata = metadata.collect::<Result<Vec<_>>>()?;
        let decodes = metadata
            .iter()
            .all(|of| of.state() == AttentionState::DecodeOnly);
        let replays = decodes && self.graphs.hold(&metadata);

        let tokens: Vec<u32> = batch.iter().flat_map(|work| work.tokens).copied().collect();
        let positions: Vec<usize> = batch
            .iter()
            .flat_map(|work| {
                let end = work.cached.len() as usize;
                end - work.tokens.len()..end
            })
            .collect();
        let state = match replays {
            true => {
                self.replays += 1;
                let pools = self
                    .kinds
                    .iter()
                    .map(|kind| kind.pool().begin_step(self.stream));
                let leases: Vec<_> = pools.collect();
                let state = self.model.forward(&tokens, &positions, |layer, attended| {
                    self.graphs
                        .replay(self.stream, layer, &mut metadata, &attended)
                })?;
                drop(leases);
                state
            }
            false => {
                let steps = self.kinds.iter_mut().zip(&metadata);
                let steps = steps.map(|(kind, of)| kind.attention.begin(self.stream, of));
                let mut steps = steps.collect::<Result<Vec<_>>>()?;
                let (stream, config) = (self.stream, &self.model.config);
                self.model.forward(&tokens, &positions, |layer, attended| {
                    let (kind, number) = self.places[layer];
                    let upload = |rows: &[f32], heads| {
                        let rows = rounded(rows);
                        stream.upload(&rows, [tokens.len(), heads, config.head_dim])
                    };
                    let Attended { query, key, value } = attended;
                    let query = upload(&query, config.heads)?;
                    let key = upload(&key, config.kv_heads)?;
                    let value = upload(&value, config.kv_heads)?;
                    let output = steps[kind].forward(number, &query, &key, &value)?;
                    Ok::<_, ascend_attention::Error>(widened(&output.attention.download(stream)?))
                })?
            }
        };
        let width = self.model.config.width;
        let mut end = 0;
        let logits = batch.iter().map(|work| {
            end += work.tokens.len();
            self.model.logits(&state[(end - 1) * width..end * width])
        });
        Ok(logits.collect())
    }

    /// Gives back the blocks in front of the window of the next token.
    pub(crate) fn drop_unseen(&self, cached: &mut Cached) -> Result<(), Refused> {
        for (kind, sequence) in self.kinds.iter().zip(&mut cached.0) {
            sequence.drop_before(kind.first_key(sequence.len()))?;
        }
        Ok(())
    }
}

pub(crate) fn rounded(numbers: &[f32]) -> Vec<bf16> {
    numbers.iter().map(|x| bf16::from_f32(*x)).collect()
}

pub(crate) fn widened(numbers: &[bf16]) -> Vec<f32> {
    numbers.iter().map(|x| x.to_f32()).collect()
}
