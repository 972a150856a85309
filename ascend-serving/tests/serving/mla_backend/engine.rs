//! A model of two layers, whose steps are checked against the definition.

use approx::abs_diff_eq;
use std::sync::Mutex;

use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, LatentScale, PadPolicy, PagedKvCache, QuantisedType};
use ascend_serving::{
    Attention, AttentionShape, Backend, Backends, BatchSettings, Causality, Drafting, LatentForm, LatentRows,
    LatentTensors, LayerInputs, QuantisedQueries, Result, StatePolicy, UpProjected,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::definition::{What, absorb, dense_over, exact, project, row, up_project};
use super::{DIM, LATENT, LAYERS, ROPE};
use crate::acts::{Act, Schedule, Turn};

#[derive(Clone, Debug)]
pub struct Model {
    pub heads: usize,
    pub block_size: usize,
    /// Blocks of 128 tokens, or as many smaller ones as hold the same.
    pub blocks: usize,
    pub format: Cache,
    /// Cached tokens that the workspace has room for.
    pub room: usize,
    pub dump: bool,
    pub mtp: bool,
    /// The type of latents of one byte.
    pub stored: Option<QuantisedType>,
}

/// Most requests at a time.
pub const REQUESTS: usize = 4;

pub struct Engine<'a> {
    stream: &'a Stream,
    settings: BatchSettings,
    attention: Attention<bf16>,
    shape: AttentionShape,
    stored: Option<QuantisedType>,
    pub schedule: Schedule,
    pub checked: usize,
    /// Steps with both forms of queries.
    pub mixed: usize,
    /// Tokens of each call of the projection.
    pub projected: Mutex<Vec<usize>>,
}

/// Bytes of the workspace for this number of cached tokens.
fn workspace(model: &Model, tokens: usize) -> usize {
    let quantised = if model.stored.is_some() { 3 * LATENT } else { 0 };
    tokens * ((LATENT + ROPE + model.heads * (DIM + ROPE + DIM)) * size_of::<bf16>() + quantised)
}

/// The scale of latents between -1 and 1.
pub fn scale_of(stored: QuantisedType) -> LatentScale {
    let largest = match stored {
        QuantisedType::Int8 => 127.0,
        QuantisedType::Float8E4M3Fn => 112.0,
        QuantisedType::HiFloat8 => 15.0,
        other => panic!("{other:?}"),
    };
    LatentScale::new(1.0 / largest).unwrap()
}

/// What is read of an element of a latent that was stored as one byte.
pub fn read(stored: QuantisedType, x: f64) -> f64 {
    let factor = scale_of(stored).to_f32();
    let number = x as f32 / factor;
    let number = match stored {
        QuantisedType::Int8 => number.round_ties_even().clamp(-128.0, 127.0),
        QuantisedType::Float8E4M3Fn => Float8E4M3Fn::from_f32(number).to_f32(),
        QuantisedType::HiFloat8 => HiFloat8::from_f32(number).to_f32(),
        other => panic!("{other:?}"),
    };
    f64::from(number) * f64::from(factor)
}

/// How far a row may be from the definition over what is read: rounded queries, probabilities and results.
pub fn epsilon(stored: Option<QuantisedType>) -> f64 {
    match stored {
        None => 2e-2,
        Some(QuantisedType::Int8) => 2e-2,
        Some(_) => 8e-2,
    }
}

impl<'a> Engine<'a> {
    pub fn new(stream: &'a Stream, model: &Model) -> Self {
        let shape = AttentionShape::latent(model.heads);
        let pad = match model.dump {
            true => PadPolicy::DumpSlot(0),
            false => PadPolicy::SkipNegative,
        };
        let of = CacheShape::latent(LAYERS).format(model.format);
        // One more than the requests can have, where padding is dumped.
        let blocks = model.blocks + 1;
        let (device, size) = (stream.device(), model.block_size);
        let workspace_bytes = workspace(model, model.room);
        let (cache, mla) = match model.stored {
            None => (PagedKvCache::new(device, blocks, size, of, pad), Backend::Mla { workspace_bytes }),
            Some(stored) => {
                let scales = [scale_of(stored); LAYERS];
                let cache = PagedKvCache::quantised_latents(stream, blocks, size, of, pad, stored, &scales);
                (cache, Backend::QuantisedMla { workspace_bytes })
            }
        };
        let cache = cache.unwrap();
        Self {
            stream,
            settings: BatchSettings::of(&cache, Causality::Causal)
                .policy(StatePolicy::new(true, model.mtp.then_some(Drafting::Mtp))),
            attention: Attention::new(shape, cache, Backends::none().with(mla)),
            shape,
            stored: model.stored,
            schedule: Schedule::of(REQUESTS),
            checked: 0,
            mixed: 0,
            projected: Mutex::default(),
        }
    }

    fn packed(&self, names: &[u64], layer: usize, what: What, axes: [usize; 2]) -> Tensor<bf16> {
        let len = axes[0] * axes[1];
        let rows = names.iter().flat_map(|name| row(*name, layer, what, len));
        let rows: Vec<bf16> = rows.collect();
        self.stream.upload(&rows, [names.len(), axes[0], axes[1]]).unwrap()
    }

    /// Runs a step and checks some of its rows. With `absorb`, all queries are absorbed where none is too long, and
    /// those of the decodes in front otherwise.
    fn step(&mut self, turns: &[Turn], pad: usize, absorb_some: bool) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let mixed = metadata.decodes() > 0 && metadata.prefills() > 0 && metadata.decodes_lead();
        // Tokens with absorbed queries.
        let split = match absorb_some {
            true if metadata.absorbs_queries() => metadata.tokens(),
            true if mixed => metadata.decode_tokens(),
            _ => 0,
        };
        let names = self.schedule.names(turns, pad);
        self.mixed += usize::from(split > 0 && split < names.len());
        let (heads, stream) = (self.shape.heads, self.stream);
        let projected = &self.projected;
        let projection =
            |stream: &Stream, layer: usize, rows: LatentRows<'_, bf16>, out: &UpProjected<bf16>| -> Result<()> {
                let tokens = rows.latent.shape()[0];
                projected.lock().unwrap().push(tokens);
                up_project(stream, layer, heads, rows, out)
            };
        let inputs: Vec<_> = (0..LAYERS)
            .map(|layer| {
                let rows = names[..split].iter();
                let rows = rows.flat_map(|name| absorb(layer, heads, &row(*name, layer, What::Query, heads * DIM)));
                let rows: Vec<bf16> = rows.collect();
                [
                    stream.upload(&rows, [split, heads, LATENT]).unwrap(),
                    self.packed(&names[split..], layer, What::Query, [heads, DIM]),
                    self.packed(&names, layer, What::QueryRope, [heads, ROPE]),
                    self.packed(&names, layer, What::Latent, [1, LATENT]),
                    self.packed(&names, layer, What::KeyRope, [1, ROPE]),
                ]
            })
            .collect();
        // Of each layer the outputs of absorbed queries and of plain ones.
        let mut results: Vec<[Option<Tensor<bf16>>; 2]> = Vec::new();
        let cache = self.attention.cache();
        let scales: Vec<_> = match self.stored {
            None => Vec::new(),
            Some(_) => (0..LAYERS).map(|layer| cache.quantised_layer(layer).unwrap().latent_scale().unwrap()).collect(),
        };
        {
            let mut step = self.attention.begin(stream, &metadata).unwrap();
            for (layer, inputs) in inputs.iter().enumerate() {
                let [absorbed, plain, query_rope, latent, key_rope] = inputs;
                let decoded = vec![bf16::NAN; heads * split * LATENT];
                let decoded = stream.upload(&decoded, [heads, split, LATENT]).unwrap();
                let quantised = self.stored.filter(|_| split > 0).map(|stored| {
                    let of_absorbed = query_rope.narrow(0, 0..split).unwrap();
                    let queries = (absorbed, &of_absorbed);
                    let (queries, divided) =
                        QuantisedQueries::quantise_on_host(stream, stored, queries, scales[layer]).unwrap();
                    // The rotary parts of prefills stay as they are.
                    let mut ropes = divided.download(stream).unwrap();
                    ropes.extend_from_slice(&query_rope.download(stream).unwrap()[ropes.len()..]);
                    (queries, stream.upload(&ropes, query_rope.shape()).unwrap())
                });
                let query_rope = quantised.as_ref().map_or(query_rope, |(_, divided)| divided);
                let is_mixed = split > 0 && split < names.len();
                let (decoded, projection) = (&decoded, &projection);
                let (query, form) = match (split, &quantised) {
                    (0, _) => (plain, LatentForm::Plain(projection)),
                    (_, None) if !is_mixed => (absorbed, LatentForm::Absorbed),
                    (_, None) => (plain, LatentForm::Mixed { absorbed, decoded, projection }),
                    (_, Some((queries, _))) if !is_mixed => (query_rope, LatentForm::Quantised(queries)),
                    (_, Some((queries, _))) => {
                        (plain, LatentForm::QuantisedMixed { absorbed: queries, decoded, projection })
                    }
                };
                let inputs = match form {
                    LatentForm::Quantised(queries) => {
                        LayerInputs::quantised_latent(queries, query_rope, latent, key_rope)
                    }
                    _ => LayerInputs::latent(query, latent, key_rope, LatentTensors { query_rope, form }),
                };
                // The last layer's output goes into a tensor of the caller, like the decodes'.
                let output = if layer + 1 < LAYERS {
                    step.forward(layer, inputs).unwrap().clone()
                } else {
                    let shape = match form {
                        LatentForm::Absorbed | LatentForm::Quantised(_) => [heads, split, LATENT],
                        _ => [names.len() - split, heads, DIM],
                    };
                    let nan = vec![bf16::NAN; shape.iter().product()];
                    let mut output = stream.upload(&nan, shape).unwrap();
                    step.forward_into(layer, inputs, &mut output).unwrap();
                    output
                };
                results.push(match form {
                    LatentForm::Plain(_) => [None, Some(output)],
                    LatentForm::Absorbed | LatentForm::Quantised(_) => [Some(output), None],
                    LatentForm::Mixed { .. } | LatentForm::QuantisedMixed { .. } => {
                        [Some(decoded.clone()), Some(output)]
                    }
                    _ => panic!("a form without outputs here"),
                });
            }
        }
        for (layer, outputs) in results.iter().enumerate() {
            let result = |output: &Option<Tensor<bf16>>, shape: [usize; 3]| match output {
                None => Vec::new(),
                Some(output) => {
                    assert_eq!(output.shape(), shape);
                    exact(&output.download(stream).unwrap())
                }
            };
            let decoded = result(&outputs[0], [heads, split, LATENT]);
            let plain = result(&outputs[1], [names.len() - split, heads, DIM]);
            for row in self.schedule.rows(turns) {
                let position = row.names.len() - 1;
                // Absorbed queries read every latent from the cache, plain ones those of earlier steps.
                let turn = turns.iter().find(|turn| turn.request == row.request).unwrap();
                let cached = match row.token < split {
                    true => usize::MAX,
                    false => self.schedule.requests[row.request].sequence.len() - turn.new,
                };
                let want = dense_over(row.names, layer, self.shape, |position, latent| match self.stored {
                    Some(stored) if position < cached => latent.into_iter().map(|x| read(stored, x)).collect(),
                    _ => latent,
                });
                let got: Vec<f64> = match row.token.checked_sub(split) {
                    Some(token) => plain[token * heads * DIM..][..heads * DIM].to_vec(),
                    None => (0..heads)
                        .flat_map(|head| {
                            let latent = &decoded[(head * split + row.token) * LATENT..][..LATENT];
                            // The caller's part: the projection of the values.
                            let all = project(layer, true, heads, latent);
                            all[head * DIM..(head + 1) * DIM].to_vec()
                        })
                        .collect(),
                };
                for (x, (got, want)) in got.iter().zip(&want).enumerate() {
                    prop_assert!(
                        abs_diff_eq!(got, want, epsilon = epsilon(self.stored)),
                        "layer {layer}, request {}, position {position}, element {x}: {got}, expected {want}; \
                         {:?},                          {split} absorbed",
                        row.request,
                        metadata.state()
                    );
                }
                self.checked += 1;
            }
        }
        Ok(())
    }

    pub fn act(&mut self, acts: &[Act], pad: usize, absorbed: bool) -> Result<(), TestCaseError> {
        let cache = self.attention.cache_mut();
        let mut turns = self.schedule.begin_step(acts, self.stream, cache);
        if absorbed {
            // What decodes goes first.
            turns.sort_by_key(Turn::prefills);
        }
        if !turns.is_empty() {
            self.step(&turns, pad, absorbed)?;
        }
        self.schedule.end_step(acts, &turns);
        Ok(())
    }

    pub fn end(mut self) {
        let pool = self.attention.cache().pool();
        self.schedule.end(self.stream, pool, self.settings.pad());
    }
}
