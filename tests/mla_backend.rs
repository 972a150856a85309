//! Multi-head latent attention over its paged cache: whatever the schedule and the form of the queries, every token gets
//! what the definition gives it, in which keys and values are projected and nothing is absorbed.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::sync::{LazyLock, Mutex};

use ascend_attention::kv::{Cache, CacheShape, PadPolicy, PagedKvCache};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality,
    Drafting, Fused, FusedInTwo, Hybrid, LatentForm, LatentRows, LatentTensors, LayerSet, Mla,
    PagedDecode, Phase, StatePolicy, UpProjected,
};
use ascend_attention::{Error, Output, Result, Stream, Tensor, bf16};
use harness::schedule::{Act, Schedule, Turn, act, config};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LATENT: usize = 512;
const ROPE: usize = 64;
const DIM: usize = 128;
const LAYERS: usize = 2;

/// Elements of a latent that a channel of a key or value is projected from: few, so that the reference is quick.
const TAPS: usize = 6;

/// Most heads of a model.
const HEADS: usize = 2;

/// The projections: for each layer, keys and values, and channel, which elements of a latent with which weights.
static TAPS_OF: LazyLock<Vec<[(usize, f64); TAPS]>> = LazyLock::new(|| {
    let row = |row: usize| {
        let seed = (row as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let numbers = harness::numbers(seed, 2 * TAPS);
        std::array::from_fn(|tap| {
            let at = (f64::from(numbers[tap]) + 1.0) / 2.0 * LATENT as f64;
            (at as usize % LATENT, f64::from(numbers[TAPS + tap]))
        })
    };
    (0..LAYERS * 2 * HEADS * DIM).map(row).collect()
});

/// A row of the projection of one head.
fn taps(layer: usize, value: bool, channel: usize) -> &'static [(usize, f64); TAPS] {
    &TAPS_OF[(2 * layer + usize::from(value)) * HEADS * DIM + channel]
}

/// What two tokens of one name have in common: everything.
#[derive(Clone, Copy)]
enum What {
    Latent,
    KeyRope,
    Query,
    QueryRope,
}

fn row(name: u64, layer: usize, what: What, len: usize) -> Vec<bf16> {
    let seed = (name * LAYERS as u64 + layer as u64) * 4 + what as u64;
    let numbers = harness::numbers(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1, len);
    numbers.into_iter().map(bf16::from_f32).collect()
}

fn exact(row: &[bf16]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// Keys or values of all heads, `[N, 128]`, of one latent.
fn project(layer: usize, value: bool, heads: usize, latent: &[f64]) -> Vec<f64> {
    let channel = |channel: usize| {
        let taps = taps(layer, value, channel);
        taps.iter().map(|(at, weight)| latent[*at] * weight).sum()
    };
    (0..heads * DIM).map(channel).collect()
}

/// Queries with the projection of the keys multiplied in, `[N, 512]`.
fn absorb(layer: usize, heads: usize, query: &[bf16]) -> Vec<bf16> {
    let mut absorbed = vec![0.0; heads * LATENT];
    for (channel, x) in query.iter().enumerate() {
        for (at, weight) in taps(layer, false, channel) {
            absorbed[channel / DIM * LATENT + *at] += weight * x.to_f64();
        }
    }
    absorbed.into_iter().map(bf16::from_f64).collect()
}

/// A token's output by the definition: it is the last of `names` and sees all of them. `[N, 128]`.
fn dense(names: &[u64], layer: usize, shape: AttentionShape) -> Vec<f64> {
    let heads = shape.heads;
    let asks = *names.last().unwrap();
    let query = exact(&row(asks, layer, What::Query, heads * DIM));
    let query_rope = exact(&row(asks, layer, What::QueryRope, heads * ROPE));
    let seen: Vec<_> = names
        .iter()
        .map(|name| {
            let latent = exact(&row(*name, layer, What::Latent, LATENT));
            let rope = exact(&row(*name, layer, What::KeyRope, ROPE));
            let key = project(layer, false, heads, &latent);
            (key, rope, project(layer, true, heads, &latent))
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut out = Vec::new();
    for head in 0..heads {
        let (of, of_rope) = (head * DIM..(head + 1) * DIM, head * ROPE..(head + 1) * ROPE);
        let score = |(key, rope, _): &(Vec<f64>, Vec<f64>, Vec<f64>)| {
            let nope = dot(&query[of.clone()], &key[of.clone()]);
            shape.scale * (nope + dot(&query_rope[of_rope.clone()], rope))
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut mean = vec![0.0; DIM];
        for (score, (_, _, value)) in scores.iter().zip(&seen) {
            let weight = (score - max).exp() / sum;
            for (x, v) in mean.iter_mut().zip(&value[of.clone()]) {
                *x += weight * v;
            }
        }
        out.extend(mean);
    }
    out
}

#[derive(Clone, Debug)]
struct Model {
    heads: usize,
    block_size: u32,
    /// Blocks of 128 tokens, or as many smaller ones as hold the same.
    blocks: u32,
    format: Cache,
    /// Cached tokens that the workspace has room for.
    room: usize,
    dump: bool,
    mtp: bool,
}

/// Most requests at a time.
const REQUESTS: usize = 4;

fn model() -> impl Strategy<Value = Model> {
    let format = prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD)];
    let sizes = (0u32..2, any::<bool>(), 2u32..5, format);
    (sizes, REQUESTS..150, any::<[bool; 2]>()).prop_map(
        |((heads, small, blocks, format), room, flags)| Model {
            heads: 1 << heads,
            block_size: if small { 16 } else { 128 },
            blocks: if small { 8 * blocks } else { blocks },
            format,
            room,
            dump: flags[0],
            mtp: flags[1],
        },
    )
}

struct Engine<'a> {
    stream: &'a Stream,
    settings: BatchSettings,
    attention: Attention<bf16>,
    shape: AttentionShape,
    schedule: Schedule,
    checked: usize,
    /// Tokens of each call of the projection.
    projected: Mutex<Vec<usize>>,
}

/// Bytes of the workspace for so many cached tokens.
fn workspace(heads: usize, tokens: usize) -> usize {
    tokens * (LATENT + ROPE + heads * (DIM + ROPE + DIM)) * size_of::<bf16>()
}

impl<'a> Engine<'a> {
    fn new(stream: &'a Stream, model: &Model) -> Self {
        let shape = AttentionShape::latent(model.heads);
        let pad = match model.dump {
            true => PadPolicy::DumpSlot(0),
            false => PadPolicy::SkipNegative,
        };
        let of = CacheShape::latent(LAYERS).format(model.format);
        // One more than the requests can have, where padding is dumped.
        let blocks = model.blocks + 1;
        let cache = PagedKvCache::new(stream.device(), blocks, model.block_size, of, pad).unwrap();
        let mla = Mla::new().workspace_bytes(workspace(model.heads, model.room));
        Self {
            stream,
            settings: BatchSettings {
                blocks,
                block_size: model.block_size,
                pad,
                causality: Causality::Causal,
                policy: StatePolicy {
                    chunked_prefill: true,
                    drafting: model.mtp.then_some(Drafting::Mtp),
                },
            },
            attention: Attention::new(shape, cache, Backends::none().with(mla)),
            shape,
            schedule: Schedule::of(REQUESTS),
            checked: 0,
            projected: Mutex::default(),
        }
    }

    fn packed(&self, names: &[u64], layer: usize, what: What, axes: [usize; 2]) -> Tensor<bf16> {
        let len = axes[0] * axes[1];
        let rows = names.iter().flat_map(|name| row(*name, layer, what, len));
        let rows: Vec<bf16> = rows.collect();
        self.stream
            .upload(&rows, [names.len(), axes[0], axes[1]])
            .unwrap()
    }

    /// Runs a step and checks some of its rows. With `absorb`, all queries are absorbed where none is too long, and those of
    /// the decodes in front otherwise.
    fn step(&mut self, turns: &[Turn], pad: u32, absorb_some: bool) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let mixed = metadata.decodes() > 0 && metadata.prefills() > 0 && metadata.decodes_lead();
        // Tokens with absorbed queries.
        let split = match absorb_some {
            true if Mla::absorbs(&metadata) => metadata.tokens() as usize,
            true if mixed => metadata.decode_tokens() as usize,
            _ => 0,
        };
        let names = self.schedule.names(turns, pad);
        let (heads, stream) = (self.shape.heads, self.stream);
        let projected = &self.projected;
        let projection = |stream: &Stream,
                          layer: usize,
                          rows: LatentRows<'_, bf16>,
                          out: &UpProjected<bf16>|
         -> Result<()> {
            let latents = rows.latent.download(stream)?;
            let ropes = rows.key_rope.download(stream)?;
            projected.lock().unwrap().push(latents.len() / LATENT);
            let of = |value: bool| -> Vec<bf16> {
                let rows = latents.chunks(LATENT);
                rows.flat_map(|latent| project(layer, value, heads, &exact(latent)))
                    .map(bf16::from_f64)
                    .collect()
            };
            out.key.overwrite(stream, &of(false))?;
            out.value.overwrite(stream, &of(true))?;
            let ropes: Vec<bf16> = ropes.chunks(ROPE).flat_map(|r| r.repeat(heads)).collect();
            out.key_rope.overwrite(stream, &ropes)
        };
        let inputs: Vec<_> = (0..LAYERS)
            .map(|layer| {
                let rows = names[..split].iter();
                let rows = rows.flat_map(|name| {
                    absorb(layer, heads, &row(*name, layer, What::Query, heads * DIM))
                });
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
        {
            let mut step = self.attention.begin(stream, &metadata).unwrap();
            for (layer, inputs) in inputs.iter().enumerate() {
                let [absorbed, plain, query_rope, latent, key_rope] = inputs;
                let decoded = vec![bf16::NAN; heads * split * LATENT];
                let decoded = stream.upload(&decoded, [heads, split, LATENT]).unwrap();
                let (query, form) = match split {
                    0 => (plain, LatentForm::Plain(&projection)),
                    _ if split == names.len() => (absorbed, LatentForm::Absorbed),
                    _ => {
                        let form = LatentForm::Mixed {
                            absorbed,
                            decoded: &decoded,
                            projection: &projection,
                        };
                        (plain, form)
                    }
                };
                let tensors = LatentTensors { query_rope, form };
                // The last layer's output goes into a tensor of the caller, like the decodes'.
                let output = if layer + 1 < LAYERS {
                    step.forward_latent(layer, query, latent, key_rope, tensors)
                        .unwrap()
                } else {
                    let shape = match form {
                        LatentForm::Absorbed => [heads, split, LATENT],
                        _ => [names.len() - split, heads, DIM],
                    };
                    let nan = vec![bf16::NAN; shape.iter().product()];
                    let mut output = Output {
                        attention: stream.upload(&nan, shape).unwrap(),
                        softmax_lse: None,
                    };
                    step.forward_latent_into(layer, query, latent, key_rope, tensors, &mut output)
                        .unwrap();
                    output
                };
                results.push(match form {
                    LatentForm::Plain(_) => [None, Some(output.attention)],
                    LatentForm::Absorbed => [Some(output.attention), None],
                    LatentForm::Mixed { .. } => [Some(decoded), Some(output.attention)],
                });
            }
        }
        for (layer, outputs) in results.iter().enumerate() {
            let result = |output: &Option<Tensor<bf16>>, shape: [usize; 3]| match output {
                None => Vec::new(),
                Some(output) => {
                    assert_eq!(output.shape(), shape.map(|size| size as i64));
                    exact(&output.download(stream).unwrap())
                }
            };
            let decoded = result(&outputs[0], [heads, split, LATENT]);
            let plain = result(&outputs[1], [names.len() - split, heads, DIM]);
            for row in self.schedule.rows(turns) {
                let position = row.names.len() - 1;
                let want = dense(row.names, layer, self.shape);
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
                        (got - want).abs() <= 2e-2,
                        "layer {layer}, request {}, position {position}, element {x}: {got}, expected {want}; {:?},                          {split} absorbed",
                        row.request,
                        metadata.state()
                    );
                }
                self.checked += 1;
            }
        }
        Ok(())
    }

    fn act(&mut self, acts: &[Act], pad: u32, absorbed: bool) -> Result<(), TestCaseError> {
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

    fn end(mut self) {
        let pool = self.attention.cache().pool();
        self.schedule.end(self.stream, pool, self.settings.pad);
    }
}

proptest! {
    #![proptest_config(config(16))]

    #[test]
    fn any_schedule_is_the_definition(model in model(), steps in prop::collection::vec((prop::collection::vec(act(90, 4), 1..5), 0u32..5, any::<bool>()), 1..6)) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, &model);
        for (acts, pad, absorbed) in &steps {
            engine.act(acts, *pad, *absorbed)?;
        }
        engine.end();
    }
}

const SMALL: Model = Model {
    heads: 2,
    block_size: 16,
    blocks: 40,
    format: Cache::BnBsH,
    room: 40,
    dump: false,
    mtp: true,
};

#[test]
fn chunks_stay_within_the_workspace_and_end_with_blocks() {
    let stream = harness::stream();
    let mut engine = Engine::new(&stream, &SMALL);
    let log = |engine: &Engine<'_>| std::mem::take(&mut *engine.projected.lock().unwrap());
    // Two prompts, nothing cached: one projection a layer, of the step's own tokens.
    engine
        .act(&[Act::Chunk(0, 70), Act::Chunk(3, 25)], 0, false)
        .unwrap();
    assert_eq!(log(&engine), [95, 95]);
    // 70 and 25 cached, a third new: 16 and 16, then 16 and 9, then what is left.
    let acts = [Act::Chunk(4, 3), Act::Chunk(1, 2), Act::Chunk(3, 5)];
    engine.act(&acts, 2, false).unwrap();
    let chunks = log(&engine);
    assert_eq!(engine.schedule.requests.len(), 3);
    assert_eq!(chunks[..chunks.len() / 2], [12, 32, 25, 38]);
    assert_eq!(chunks[..4], chunks[4..]);
    // The other way round, so that the queries have to be put in the order of the chunks: a half each of 33 and 73, then
    // what is left of the longer.
    let acts = [Act::Chunk(3, 4), Act::Chunk(5, 2), Act::Chunk(4, 1)];
    engine.act(&acts, 1, false).unwrap();
    let chunks = log(&engine);
    assert_eq!(chunks[..chunks.len() / 2], [8, 32, 27, 32, 9]);
    // Absorbed steps project nothing.
    let acts = [Act::Chunk(4, 1), Act::Verify(2, 3, 1)];
    engine.act(&acts, 2, true).unwrap();
    engine.act(&[Act::Chunk(4, 1)], 0, true).unwrap();
    assert_eq!(log(&engine), [] as [usize; 0]);
    // Mixed ones project what prefills: the third request, behind a decode of two drafts.
    let len = |engine: &Engine<'_>, at: usize| engine.schedule.requests[at].sequence.len() as usize;
    let cached = len(&engine, 2);
    let acts = [Act::Chunk(2, 20), Act::Verify(1, 2, 1)];
    engine.act(&acts, 1, true).unwrap();
    let chunks = log(&engine);
    assert_eq!(chunks[0], 21);
    assert_eq!(chunks[1..chunks.len() / 2].iter().sum::<usize>(), cached);
    assert!(engine.checked >= 30, "{} rows", engine.checked);
    engine.end();
}

#[test]
fn absorbed_queries_read_nz_caches() {
    let stream = harness::stream();
    let model = Model {
        block_size: 128,
        blocks: 4,
        format: Cache::Nz,
        ..SMALL
    };
    let mut engine = Engine::new(&stream, &model);
    // Nothing cached yet, so that nothing has to be gathered.
    let acts = [Act::Chunk(0, 140), Act::Chunk(3, 9)];
    engine.act(&acts, 1, false).unwrap();
    for acts in [
        [Act::Chunk(4, 1), Act::Chunk(1, 1)],
        [Act::Verify(4, 3, 2), Act::Chunk(1, 1)],
    ] {
        engine.act(&acts, 2, true).unwrap();
    }
    assert!(engine.checked >= 18, "{} rows", engine.checked);
    engine.end();
}

/// The reason why a step over these tensors is refused.
fn refused(
    stream: &Stream,
    backends: Backends<bf16>,
    causality: Causality,
    (format, rows, cached): (Cache, u32, u32),
    form: &str,
) -> Error {
    let shape = CacheShape::latent(1).format(format);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 4, 128, shape, pad).unwrap();
    let mut attention = Attention::new(AttentionShape::latent(2), cache, backends);
    let settings = BatchSettings {
        blocks: 4,
        block_size: 128,
        pad,
        causality,
        policy: StatePolicy::default(),
    };
    let request = BatchRequest {
        cached,
        new: rows,
        drafts: 0,
        row: &[0, 1],
        group: None,
        prompt_len: None,
    };
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let ones = |axes: [usize; 2]| {
        let ones = vec![bf16::ONE; rows as usize * axes[0] * axes[1]];
        let shape = [rows as usize, axes[0], axes[1]];
        stream.upload(&ones, shape).unwrap()
    };
    let projection =
        |_: &Stream, _: usize, _: LatentRows<'_, bf16>, _: &UpProjected<bf16>| -> Result<()> {
            panic!("nothing is planned")
        };
    let (absorbed, plain) = (ones([2, LATENT]), ones([2, DIM]));
    let mixed = LatentForm::Mixed {
        absorbed: &absorbed,
        decoded: &absorbed,
        projection: &projection,
    };
    let (query, form) = match form {
        "absorbed" => (&absorbed, LatentForm::Absorbed),
        "plain" => (&plain, LatentForm::Plain(&projection)),
        _ => (&plain, mixed),
    };
    let (query_rope, latent, key_rope) = (ones([2, ROPE]), ones([1, LATENT]), ones([1, ROPE]));
    let tensors = LatentTensors {
        query_rope: &query_rope,
        form,
    };
    let mut step = attention.begin(stream, &metadata).unwrap();
    let error = step
        .forward_latent(0, query, &latent, &key_rope, tensors)
        .unwrap_err();
    drop(step);
    // Nothing was written.
    let latents = &attention.cache().layer(0).unwrap().key;
    let latents = latents.download(stream).unwrap();
    assert!(latents.iter().all(|x| *x == bf16::ZERO));
    error
}

#[test]
fn what_cannot_be_served_is_refused_with_its_reason() {
    let stream = harness::stream();
    let mla = || Backends::none().with(Mla::new());
    let said = |error: Error| match error {
        Error::NoBackend { reasons } => reasons,
        other => panic!("{other}"),
    };
    let refusal = |backends, causality, rows, cached, form| {
        let step = (Cache::BnBsH, rows, cached);
        said(refused(&stream, backends, causality, step, form))
    };
    let reason = refusal(mla(), Causality::Bidirectional, 1, 5, "absorbed");
    assert!(reason.starts_with("mla: backend.latent"), "{reason}");
    let reason = refusal(mla(), Causality::Causal, 17, 5, "absorbed");
    assert!(reason.starts_with("mla: mla.rows"), "{reason}");
    let small = Backends::none().with(Mla::new().workspace_bytes(100));
    let reason = refusal(small, Causality::Causal, 17, 5, "plain");
    assert!(reason.starts_with("mla: latent.workspace"), "{reason}");
    let others = Backends::none()
        .with(PagedDecode)
        .with(Fused)
        .with(FusedInTwo);
    let reason = refusal(others, Causality::Causal, 1, 5, "absorbed");
    assert!(
        reason.starts_with("paged_decode: backend.latent"),
        "{reason}"
    );
    assert!(reason.contains("fused: backend.latent"), "{reason}");
    assert!(reason.contains("fused_in_two: backend.latent"), "{reason}");
    let reason = refusal(mla(), Causality::Causal, 3, 5, "mixed");
    let why = "mixed queries for 0 decodes and 1 prefills";
    assert!(
        reason.starts_with("mla: backend.latent") && reason.contains(why),
        "{reason}"
    );
    // Tokens that lie in parts cannot be gathered.
    let step = (Cache::Nz, 17, 5);
    let reason = said(refused(&stream, mla(), Causality::Causal, step, "plain"));
    assert!(reason.starts_with("mla: cache"), "{reason}");
    // In a hybrid the layers are named.
    let sets = [LayerSet::new([0], "fused").during(Phase::Decode, "mla")];
    let hybrid = Hybrid::new(1, mla().with(Fused), sets).unwrap();
    let reason = refusal(
        Backends::none().with(hybrid),
        Causality::Causal,
        3,
        0,
        "absorbed",
    );
    let start = "hybrid: no backend can serve the step: fused, for the phase Prefill of the layers [0]: backend.latent";
    assert!(reason.starts_with(start), "{reason}");
}
