//! A model whose steps are checked against the definition.

use approx::abs_diff_eq;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{AttentionShape, BatchSettings, Causality, NativeBranches, NativeSparse, NativeTensors};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::definition::{What, branches, row, weights};
use super::{HEADS, KEY, LAYERS, VALUE};
use crate::acts::{Act, Schedule, Turn};
use crate::harness::reference::Half;

#[derive(Clone, Debug)]
pub struct Model {
    /// Query heads, and key heads.
    pub heads: [usize; 2],
    pub block_size: usize,
    pub blocks: usize,
    pub dump: bool,
    /// Tokens of a compressed block, and from one to the next.
    pub block: usize,
    pub stride: usize,
    /// Tokens of a selected block, and how many are selected.
    pub select: usize,
    pub count: usize,
    pub window: usize,
}

/// Most requests at a time.
const REQUESTS: usize = 4;

pub struct Engine<'a> {
    stream: &'a Stream,
    settings: BatchSettings,
    native: NativeSparse<bf16>,
    model: &'a Model,
    pub schedule: Schedule,
    /// Rows that were compared, and rows whose selection hangs on scores that are too close.
    pub compared: usize,
    pub left_out: usize,
}

pub fn native_sparse<T: Half>(stream: &Stream, model: &Model) -> NativeSparse<T> {
    let pad = match model.dump {
        true => PadPolicy::DumpSlot(0),
        false => PadPolicy::SkipNegative,
    };
    let [heads, kv_heads] = model.heads;
    let shape = CacheShape::new(LAYERS, kv_heads, KEY).value_dim(VALUE);
    let cache = PagedKvCache::new(stream.device(), model.blocks, model.block_size, shape, pad).unwrap();
    let native = NativeSparse::new(AttentionShape::new(heads, kv_heads, KEY), cache, model.block, model.stride);
    native.unwrap().select_block(model.select).select_count(model.count).window(model.window)
}

/// What a layer gets.
pub struct LayerRows<T: Half = bf16> {
    pub query: Tensor<T>,
    pub key: Tensor<T>,
    pub value: Tensor<T>,
    pub key_weight: Tensor<T>,
    pub value_weight: Tensor<T>,
}

impl<T: Half> LayerRows<T> {
    pub fn of(stream: &Stream, names: &[u64], layer: usize, model: &Model) -> Self {
        let rows = |what, heads: usize, dim: usize| {
            let rows = names.iter().flat_map(|name| row(*name, layer, what, heads * dim));
            let rows: Vec<T> = rows.map(|x| T::from_f32(x.to_f32())).collect();
            stream.upload(&rows, [names.len(), heads, dim]).unwrap()
        };
        let [heads, kv_heads] = model.heads;
        let weight = |what| {
            let weights = weights(layer, what, model.block * kv_heads).into_iter();
            stream
                .upload(&weights.map(|x| T::from_f32(x.to_f32())).collect::<Vec<_>>(), [model.block, kv_heads])
                .unwrap()
        };
        Self {
            query: rows(What::Query, heads, KEY),
            key: rows(What::Key, kv_heads, KEY),
            value: rows(What::Value, kv_heads, VALUE),
            key_weight: weight(What::Key),
            value_weight: weight(What::Value),
        }
    }

    pub fn tensors(&self) -> NativeTensors<'_, T> {
        NativeTensors {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            key_weight: &self.key_weight,
            value_weight: &self.value_weight,
        }
    }
}

impl<'a> Engine<'a> {
    pub fn new(stream: &'a Stream, model: &'a Model) -> Self {
        let native = native_sparse(stream, model);
        let settings = BatchSettings::of(native.cache(), Causality::Causal);
        Self { stream, settings, native, model, schedule: Schedule::of(REQUESTS), compared: 0, left_out: 0 }
    }

    /// Runs a step and checks some of its rows.
    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let names = self.schedule.names(turns, pad);
        let mut outputs = Vec::new();
        let mut step = self.native.begin(self.stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let rows = LayerRows::of(self.stream, &names, layer, self.model);
            // Every other layer writes into tensors of the caller.
            let out = match layer % 2 {
                0 => step.forward(layer, rows.tensors()).unwrap(),
                _ => {
                    let branch = || Tensor::empty(self.stream.device(), [names.len(), HEADS, VALUE]).unwrap();
                    let mut out = NativeBranches::from((branch(), branch(), branch()));
                    step.forward_into(layer, rows.tensors(), &mut out).unwrap();
                    out
                }
            };
            outputs.push([out.compressed, out.selected, out.window].map(|branch| {
                assert_eq!(branch.shape(), [names.len(), HEADS, VALUE]);
                branch.download(self.stream).unwrap()
            }));
        }
        step.end().unwrap();
        for (layer, output) in outputs.iter().enumerate() {
            for row in self.schedule.rows(turns) {
                let (want, certain) = branches::<bf16>(row.names, layer, self.model);
                for (branch, (got, want)) in output.iter().zip(&want).enumerate() {
                    if branch == 1 && !certain {
                        self.left_out += 1;
                        continue;
                    }
                    let got = &got[row.token * HEADS * VALUE..][..HEADS * VALUE];
                    for (x, (got, want)) in got.iter().zip(want).enumerate() {
                        let tokens = row.names.len();
                        prop_assert!(
                            abs_diff_eq!(got.to_f64(), *want, epsilon = 8e-3 * (1.0 + want.abs())),
                            "layer {layer}, request {}, {tokens} tokens, branch {branch}, element {x}: {got}, \
                             expected {want}",
                            row.request,
                        );
                    }
                    self.compared += 1;
                }
            }
        }
        Ok(())
    }

    pub fn act(&mut self, acts: &[Act], pad: usize) -> Result<(), TestCaseError> {
        let pool = self.native.cache().pool().clone();
        let turns = self
            .schedule
            .begin_step_growing(acts, &pool, |sequence, tokens| self.native.grow(self.stream, sequence, tokens));
        if !turns.is_empty() {
            self.step(&turns, pad)?;
        }
        self.schedule.end_step(acts, &turns);
        for request in &self.schedule.requests {
            assert_eq!(self.native.computed_tokens(&request.sequence).unwrap(), request.sequence.len());
        }
        Ok(())
    }

    pub fn end(mut self) {
        let pool = self.native.cache().pool();
        self.schedule.end(self.stream, pool, self.settings.pad());
    }
}
