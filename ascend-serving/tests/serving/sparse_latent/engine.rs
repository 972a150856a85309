//! A model whose steps are checked against the definition.

use approx::abs_diff_eq;
use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    AttentionMetadata, AttentionShape, BatchSettings, Causality, Drafting, GraphLimits, IndexerTensors, KeyChoice,
    SparseGraphs, SparseLatent, SparseStep, SparseTensors, StatePolicy,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::definition::{What, attended, chosen, row};
use super::{COUNT, HEADS, INDEX, INDEX_HEADS, INDEXERS, LATENT, LAYERS, ROPE};
use crate::acts::{Schedule, Scheduled, Turn};

#[derive(Clone, Debug)]
pub struct Model {
    pub block_size: usize,
    pub blocks: usize,
    pub dump: bool,
    /// Whether latents are quantised, and index keys.
    pub quantised: [bool; 2],
}

/// Most requests at a time.
const REQUESTS: usize = 4;

pub struct Engine<'a> {
    stream: &'a Stream,
    settings: BatchSettings,
    sparse: SparseLatent<bf16>,
    quantised: [bool; 2],
    /// Graphs that replay the steps that they serve.
    graphs: Option<SparseGraphs<bf16>>,
    pub schedule: Schedule,
    /// Steps that were replayed, and all.
    pub steps: [usize; 2],
    /// Rows that were compared, and rows whose choice hangs on scores that are too close.
    pub compared: usize,
    pub left_out: usize,
}

/// Attention of the test's heads over caches of this size.
pub fn sparse_latent(stream: &Stream, model: &Model) -> SparseLatent<bf16> {
    let pad = match model.dump {
        true => PadPolicy::DumpSlot(0),
        false => PadPolicy::SkipNegative,
    };
    let (device, blocks, block_size) = (stream.device(), model.blocks, model.block_size);
    let [latents, index_keys] = model.quantised;
    let latents = match latents {
        true => PagedKvCache::quantised_sparse_latents(device, blocks, block_size, LAYERS, pad),
        false => PagedKvCache::new(device, blocks, block_size, CacheShape::latent(LAYERS), pad),
    };
    let index_keys = match index_keys {
        true => PagedKvCache::quantised_index_keys(device, blocks, block_size, INDEXERS, pad),
        false => PagedKvCache::new(device, blocks, block_size, CacheShape::index_keys(INDEXERS), pad),
    };
    let (latents, index_keys) = (latents.unwrap(), index_keys.unwrap());
    let index_keys = index_keys.with_pool(latents.pool()).unwrap();
    let shape = AttentionShape::latent(HEADS);
    let sparse = SparseLatent::new(shape, latents, index_keys).unwrap();
    sparse.sparse_count(COUNT)
}

/// Rows of tokens, `[tokens, heads, dim]`.
pub fn packed(stream: &Stream, names: &[u64], layer: usize, what: What, [heads, dim]: [usize; 2]) -> Tensor<bf16> {
    let rows = names.iter();
    let rows = rows.flat_map(|name| row(*name, layer, what, heads * dim));
    let rows: Vec<bf16> = rows.collect();
    stream.upload(&rows, [names.len(), heads, dim]).unwrap()
}

/// What an indexer gets: queries, weights and keys.
pub struct IndexRows {
    pub query: Tensor<bf16>,
    pub weights: Tensor<bf16>,
    /// The weights of an indexer over quantised keys.
    pub half_weights: Tensor<f16>,
    pub key: Tensor<bf16>,
}

impl IndexRows {
    pub fn of(stream: &Stream, names: &[u64], indexer: usize) -> Self {
        let rows = |what, axes| packed(stream, names, indexer, what, axes);
        let weights = rows(What::IndexWeights, [INDEX_HEADS, 1]);
        let halves = weights.download(stream).unwrap().into_iter().map(|weight| f16::from_f32(weight.to_f32()));
        let halves: Vec<f16> = halves.collect();
        Self {
            query: rows(What::IndexQuery, [INDEX_HEADS, INDEX]),
            weights: weights.reshape([names.len(), INDEX_HEADS]).unwrap(),
            half_weights: stream.upload(&halves, [names.len(), INDEX_HEADS]).unwrap(),
            key: rows(What::IndexKey, [1, INDEX]),
        }
    }

    pub fn tensors(&self) -> IndexerTensors<'_, bf16> {
        IndexerTensors { query: &self.query, weights: &self.weights, key: &self.key }
    }

    /// What an indexer over quantised keys gets.
    pub fn half_tensors(&self) -> IndexerTensors<'_, bf16, f16> {
        IndexerTensors { query: &self.query, weights: &self.half_weights, key: &self.key }
    }
}

/// What a layer gets: queries and new keys, each with its rotary part.
pub struct LayerRows {
    pub query: Tensor<bf16>,
    pub query_rope: Tensor<bf16>,
    pub latent: Tensor<bf16>,
    pub key_rope: Tensor<bf16>,
}

impl LayerRows {
    pub fn of(stream: &Stream, names: &[u64], layer: usize) -> Self {
        let rows = |what, axes| packed(stream, names, layer, what, axes);
        Self {
            query: rows(What::Query, [HEADS, LATENT]),
            query_rope: rows(What::QueryRope, [HEADS, ROPE]),
            latent: rows(What::Latent, [1, LATENT]),
            key_rope: rows(What::KeyRope, [1, ROPE]),
        }
    }

    /// What a layer over quantised latents gets: queries joined with their rotary parts.
    pub fn joined(stream: &Stream, names: &[u64], layer: usize) -> Self {
        let query = names.iter().flat_map(|name| {
            let [query, rope] = [(What::Query, LATENT), (What::QueryRope, ROPE)]
                .map(|(what, dim)| row(*name, layer, what, HEADS * dim));
            let heads = query.chunks(LATENT).zip(rope.chunks(ROPE));
            heads.flat_map(|(query, rope)| [query, rope].concat()).collect::<Vec<_>>()
        });
        let query: Vec<bf16> = query.collect();
        Self {
            query: stream.upload(&query, [names.len(), HEADS, LATENT + ROPE]).unwrap(),
            query_rope: Tensor::empty(stream.device(), [names.len(), HEADS, 0]).unwrap(),
            ..Self::of(stream, names, layer)
        }
    }

    pub fn tensors<'a>(&'a self, choice: &'a KeyChoice) -> SparseTensors<'a, bf16> {
        SparseTensors {
            query: &self.query,
            query_rope: &self.query_rope,
            latent: &self.latent,
            key_rope: &self.key_rope,
            choice,
        }
    }
}

/// Queues the indexers and layers of a step, each layer behind its indexer.
fn each_layer<S>(
    stream: &Stream,
    names: &[u64],
    step: &mut S,
    layer_rows: impl Fn(&Stream, &[u64], usize) -> LayerRows,
    choose: impl Fn(&mut S, usize, &IndexRows) -> ascend_serving::Result<KeyChoice>,
    forward: impl Fn(&mut S, usize, SparseTensors<'_, bf16>) -> Vec<bf16>,
) -> Vec<Vec<bf16>> {
    let mut choice = None;
    let layers = (0..LAYERS).map(|layer| {
        if layer < INDEXERS {
            choice = Some(choose(step, layer, &IndexRows::of(stream, names, layer)).unwrap());
        }
        forward(step, layer, layer_rows(stream, names, layer).tensors(choice.as_ref().unwrap()))
    });
    layers.collect()
}

impl<'a> Engine<'a> {
    pub fn new(stream: &'a Stream, model: &Model) -> Self {
        let sparse = sparse_latent(stream, model);
        let policy = StatePolicy::new(true, Some(Drafting::Mtp));
        let settings = BatchSettings::of(sparse.latents(), Causality::Causal).policy(policy);
        let schedule = Schedule::of(REQUESTS);
        let quantised = model.quantised;
        Self { stream, settings, sparse, quantised, graphs: None, schedule, steps: [0; 2], compared: 0, left_out: 0 }
    }

    /// The engine, whose steps of up to 3 new tokens a request are replayed. A size has no more rows than a block, so
    /// that each dummy of a step has a slot of its own.
    pub fn captured(mut self) -> Self {
        let blocks = self.sparse.latents().pool().blocks();
        let sizes = [2, REQUESTS + 1].into_iter().filter(|requests| *requests <= blocks);
        let limits = GraphLimits::new(sizes, 512).tokens_each(3);
        self.graphs = Some(self.sparse.capture::<bf16>(self.stream, INDEX_HEADS, &limits).unwrap());
        self
    }

    /// The attention of each layer.
    fn outputs(&mut self, mut metadata: AttentionMetadata, names: &[u64]) -> Vec<Vec<bf16>> {
        let stream = self.stream;
        let serving = self.graphs.as_mut().filter(|graphs| graphs.serves(&metadata));
        self.steps[1] += 1;
        let Some(graphs) = serving else {
            let mut step = self.sparse.begin(stream, &metadata).unwrap();
            let [joined, halves] = self.quantised;
            let layer_rows = if joined { LayerRows::joined } else { LayerRows::of };
            let choose = |step: &mut SparseStep<'_, bf16>, at, rows: &IndexRows| match halves {
                true => step.choose(at, rows.half_tensors()),
                false => step.choose(at, rows.tensors()),
            };
            let outputs = each_layer(stream, names, &mut step, layer_rows, choose, |step, layer, tensors| {
                let output = step.forward(layer, tensors).unwrap();
                assert_eq!(output.shape(), [names.len(), HEADS, LATENT]);
                output.download(stream).unwrap()
            });
            step.end().unwrap();
            return outputs;
        };
        self.steps[0] += 1;
        let mut step = graphs.begin(&mut self.sparse, stream, &mut metadata).unwrap();
        assert!(step.tokens() >= names.len());
        let choose = |step: &mut SparseStep<'_, bf16>, at, rows: &IndexRows| step.choose(at, rows.tensors());
        let outputs = each_layer(stream, names, &mut step, LayerRows::of, choose, |step, layer, tensors| {
            step.forward(layer, tensors).unwrap().download(stream).unwrap()
        });
        step.end().unwrap();
        outputs
    }
}

impl Scheduled for Engine<'_> {
    type Element = bf16;

    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<bf16>) {
        (&mut self.schedule, self.stream, self.sparse.latents_mut())
    }

    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let names = self.schedule.names(turns, pad);
        if self.graphs.is_some() {
            // The schedule grows sequences for the cache of latents, and graphs queue no copies.
            for turn in turns {
                let sequence = &self.schedule.requests[turn.request].sequence;
                self.sparse.index_keys_mut().queue_pending_copies(self.stream, sequence).unwrap();
            }
        }
        let outputs = self.outputs(metadata, &names);
        for (layer, output) in outputs.iter().enumerate() {
            for row in self.schedule.rows(turns) {
                let Some(places) = chosen(row.names, layer.min(INDEXERS - 1), self.quantised[1]) else {
                    self.left_out += 1;
                    continue;
                };
                let want = attended(row.names, layer, self.sparse.shape().scale, &places, self.quantised[0]);
                let got = &output[row.token * HEADS * LATENT..][..HEADS * LATENT];
                let position = row.names.len() - 1;
                for (x, (got, want)) in got.iter().zip(&want).enumerate() {
                    prop_assert!(
                        abs_diff_eq!(got.to_f64(), *want, epsilon = 8e-3),
                        "layer {layer}, request {}, position {position}, element {x}: {got}, expected {want}",
                        row.request,
                    );
                }
                self.compared += 1;
            }
        }
        Ok(())
    }
}
