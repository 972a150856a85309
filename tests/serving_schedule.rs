//! Whatever the schedule: every token gets the attention that one dense pass over its whole sequence gives it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::num::NonZeroU32;

use ascend_attention::kv::{
    Audit, AuditRequest, Cache, CacheShape, PadPolicy, PagedKvCache, Refused, Rule, Sequence,
};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings,
    CascadePrefill, Causality, Drafting, Fused, FusedInTwo, Hybrid, LayerSet, PagedDecode, Phase,
    SharedPrefixDecode, SharedPrefixGate, StatePolicy,
};
use ascend_attention::{Stream, bf16};
use harness::tokens::{DIM, dense, packed};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const LAYERS: usize = 2;

#[derive(Clone, Debug)]
struct Model {
    kv_heads: usize,
    group: usize,
    window: Option<u32>,
    format: Cache,
    block_size: u32,
    /// Blocks that the requests can have.
    blocks: u32,
    decode_path: bool,
    hybrid: bool,
    merging: bool,
    dump: bool,
    chunked: bool,
    mtp: bool,
}

/// What one request does in a step, its numbers cut to what is possible.
#[derive(Clone, Debug)]
enum Act {
    /// Some more tokens.
    Chunk(usize, u32),
    /// One token and some drafts, of which some are accepted.
    Verify(usize, u32, u32),
    /// A new request that begins with tokens of another one.
    Share(usize, u32),
    /// Gives everything back; the tokens are computed again later.
    Preempt(usize),
    /// Gives back blocks in front of the window.
    Slide(usize),
    End(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (any::<usize>(), 1u32..150).prop_map(|(r, n)| Act::Chunk(r, n)),
        4 => any::<usize>().prop_map(|r| Act::Chunk(r, 1)),
        2 => (any::<usize>(), 0u32..6, 0u32..6).prop_map(|(r, d, a)| Act::Verify(r, d, a)),
        2 => (any::<usize>(), any::<u32>()).prop_map(|(r, n)| Act::Share(r, n)),
        1 => any::<usize>().prop_map(Act::Preempt),
        1 => any::<usize>().prop_map(Act::Slide),
        1 => any::<usize>().prop_map(Act::End),
    ]
}

fn model() -> impl Strategy<Value = Model> {
    let window = prop_oneof![2 => Just(None), 1 => (1u32..200).prop_map(Some)];
    let format = prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)];
    let sizes = (1usize..3, 1usize..4, window, format, 1u32..3, 4u32..9);
    (sizes, any::<[bool; 6]>()).prop_map(
        |((kv_heads, group, window, format, size, blocks), flags)| Model {
            kv_heads,
            group,
            window,
            format,
            block_size: size * 128,
            blocks,
            decode_path: flags[0],
            dump: flags[1],
            chunked: flags[2],
            mtp: flags[3],
            hybrid: flags[4],
            merging: flags[5],
        },
    )
}

/// Blocks that somebody else holds: the operator wants the cache to have as many blocks as the rows of a call have
/// together, shared ones and those of dummy requests counted each time.
const BALLAST: u32 = 60;

/// A request: its tokens by name, and those that are cached.
struct Request {
    names: Vec<u64>,
    sequence: Sequence,
}

struct Engine<'a> {
    stream: &'a Stream,
    model: Model,
    settings: BatchSettings,
    attention: Attention<bf16>,
    shape: AttentionShape,
    requests: Vec<Request>,
    ballast: Sequence,
    next: u64,
    checked: usize,
    /// Steps that took two calls a layer.
    in_two: usize,
}

impl<'a> Engine<'a> {
    fn new(stream: &'a Stream, model: Model) -> Self {
        let shape = AttentionShape::new(model.kv_heads * model.group, model.kv_heads, DIM);
        let pad = match model.dump {
            true => PadPolicy::DumpSlot(0),
            false => PadPolicy::SkipNegative,
        };
        let cache = PagedKvCache::new(
            stream.device(),
            BALLAST + model.blocks,
            model.block_size,
            CacheShape::new(LAYERS, model.kv_heads, DIM).format(model.format),
            pad,
        )
        .unwrap();
        let mut ballast = Sequence::new(cache.pool());
        let _ = ballast.grow(BALLAST * model.block_size).unwrap();
        let all = Backends::none().with(PagedDecode).with(Fused);
        let mut backends = Backends::none();
        if model.merging {
            // Refused where they do not apply: then the others serve the step.
            let gate = SharedPrefixGate::ALWAYS;
            backends = backends
                .with(SharedPrefixDecode { gate })
                .with(CascadePrefill);
        }
        // What the decode path takes: other caches and windows are another backend's.
        let decodes = model.window.is_none() && model.format != Cache::Nz;
        let backends = match (model.decode_path, model.hybrid) {
            (true, true) if decodes => {
                let sets = [
                    LayerSet::new([1], "fused"),
                    LayerSet::new([0], "fused").during(Phase::Decode, "paged_decode"),
                ];
                backends.with(Hybrid::new(LAYERS, all, sets).unwrap())
            }
            (true, _) => backends.with(PagedDecode).with(Fused),
            (false, true) => backends.with(FusedInTwo).with(Fused),
            (false, false) => backends.with(Fused),
        };
        let causality = Causality::from_flags(true, model.window).unwrap();
        let drafting = match model.mtp {
            true => Some(Drafting::Mtp),
            false => None,
        };
        Self {
            stream,
            settings: BatchSettings {
                blocks: BALLAST + model.blocks,
                block_size: model.block_size,
                pad,
                causality,
                policy: StatePolicy {
                    chunked_prefill: model.chunked,
                    drafting,
                },
            },
            model,
            attention: Attention::new(shape, cache, backends),
            shape,
            requests: Vec::new(),
            ballast,
            next: 1,
            checked: 0,
            in_two: 0,
        }
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Makes room for `tokens` more of a request; false, and nothing done, if there is none.
    fn grow(&mut self, at: usize, tokens: u32) -> bool {
        match self.requests[at].sequence.grow(tokens) {
            Ok(grown) => {
                let cache = self.attention.cache_mut();
                cache.copy_blocks(self.stream, &grown.copies).unwrap();
                true
            }
            Err(Refused { rule, .. }) => {
                assert_eq!(rule, Rule::PoolExhausted);
                false
            }
        }
    }

    /// Runs a step of these requests, each with its new tokens and drafts, and checks some of the rows.
    fn step(&mut self, work: &[(usize, u32, u32)], pad: u32) -> Result<(), TestCaseError> {
        if work.is_empty() {
            return Ok(());
        }
        let batch: Vec<_> = work
            .iter()
            .map(|(at, new, drafts)| {
                BatchRequest::of(&self.requests[*at].sequence, *new).drafts(*drafts)
            })
            .collect();
        let mut metadata = AttentionMetadata::new(&batch, self.settings).unwrap();
        metadata.pad_to(metadata.tokens() + pad).unwrap();
        let audited: Vec<_> = batch
            .iter()
            .map(|request| AuditRequest {
                cached: request.cached,
                new: request.new,
            })
            .collect();
        Audit {
            blocks: self.settings.blocks,
            block_size: self.settings.block_size,
            pad: self.settings.pad,
            requests: &audited,
            table: metadata.table(),
            slots: metadata.slots(),
        }
        .run()
        .unwrap();

        let mut names = Vec::new();
        for (at, new, _) in work {
            let request = &self.requests[*at];
            let len = request.sequence.len() as usize;
            names.extend_from_slice(&request.names[len - *new as usize..len]);
        }
        // Padding tokens hold whatever was there: here something that would show.
        names.resize(names.len() + pad as usize, 0);
        let mut results = Vec::new();
        {
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let query = packed(self.stream, &names, layer, 0, self.shape.heads);
                let key = packed(self.stream, &names, layer, 1, self.shape.kv_heads);
                let value = packed(self.stream, &names, layer, 2, self.shape.kv_heads);
                results.push(step.forward(layer, &query, &key, &value).unwrap().attention);
            }
            let selected = step.selected().unwrap().name;
            self.in_two += usize::from(selected == "fused_in_two");
        }
        for (layer, result) in results.iter().enumerate() {
            let result = result.download(self.stream).unwrap();
            let width = self.shape.heads * DIM;
            let mut first = 0;
            for (at, new, _) in work {
                let request = &self.requests[*at];
                let cached = request.sequence.len() as usize - *new as usize;
                let new = *new as usize;
                for row in [0, new / 2, new - 1] {
                    let position = cached + row;
                    let window = self.model.window.map_or(usize::MAX, |w| w as usize);
                    let from = (position + 1).saturating_sub(window);
                    let names = &request.names[..=position];
                    let want = dense(names, layer, self.shape, |key| key >= from);
                    let got = &result[(first + row) * width..][..width];
                    for (x, (got, want)) in got.iter().zip(&want).enumerate() {
                        let got = got.to_f64();
                        // Parts are rounded before they are merged.
                        let tolerance = if self.model.merging { 2e-2 } else { 1e-2 };
                        prop_assert!(
                            (got - want).abs() <= tolerance,
                            "layer {layer}, request {at}, position {position}, element {x}: {got}, expected {want}; \
                             {:?}",
                            metadata.state()
                        );
                    }
                    self.checked += 1;
                }
                first += new;
            }
        }
        Ok(())
    }

    fn act(&mut self, acts: &[Act], pad: u32) -> Result<(), TestCaseError> {
        // Each request has at most one thing to do in a step.
        let mut work: Vec<(usize, u32, u32)> = Vec::new();
        let mut accepted = Vec::new();
        for act in acts {
            let (Act::Chunk(r, _) | Act::Verify(r, ..) | Act::Share(r, _)) = act else {
                continue;
            };
            if self.requests.is_empty() || self.requests.len() < 4 && r % 3 == 0 {
                let sequence = Sequence::new(self.attention.cache().pool());
                self.requests.push(Request {
                    names: Vec::new(),
                    sequence,
                });
            }
            let at = r % self.requests.len();
            if work.iter().any(|(busy, ..)| *busy == at) {
                continue;
            }
            match act {
                Act::Chunk(_, tokens) => {
                    // Tokens that were preempted come again before new ones.
                    let request = &self.requests[at];
                    let again = request.names.len() as u32 - request.sequence.len();
                    let tokens = if again > 0 {
                        (*tokens).min(again)
                    } else {
                        *tokens
                    };
                    let tokens = tokens.min(400u32.saturating_sub(request.sequence.len()));
                    if tokens > 0 && self.grow(at, tokens) {
                        let len = self.requests[at].sequence.len() as usize;
                        while self.requests[at].names.len() < len {
                            let name = self.name();
                            self.requests[at].names.push(name);
                        }
                        work.push((at, tokens, 0));
                    }
                }
                Act::Verify(_, drafts, right) => {
                    let request = &self.requests[at];
                    let whole = request.names.len() == request.sequence.len() as usize;
                    if whole && !request.names.is_empty() && self.grow(at, 1 + drafts) {
                        for _ in 0..=*drafts {
                            let name = self.name();
                            self.requests[at].names.push(name);
                        }
                        work.push((at, 1 + drafts, *drafts));
                        accepted.push((at, *right.min(drafts), *drafts));
                    }
                }
                Act::Share(_, tokens) => {
                    let request = &self.requests[at];
                    let tokens = tokens % (request.sequence.len() + 1);
                    if let Ok(sequence) = request.sequence.share_prefix(tokens) {
                        let names = request.names[..tokens as usize].to_vec();
                        if self.requests.len() < 6 {
                            self.requests.push(Request { names, sequence });
                        }
                    }
                }
                _ => {}
            }
        }
        if self.model.hybrid && !self.model.decode_path {
            // Two calls want the decodes in front.
            work.sort_by_key(|(_, new, drafts)| new - drafts > 1);
        }
        self.step(&work, pad)?;
        for (at, right, drafts) in accepted {
            let request = &mut self.requests[at];
            let kept = request.sequence.len() - (drafts - right);
            request.sequence.truncate(kept).unwrap();
            request.names.truncate(kept as usize);
        }
        for act in acts {
            if self.requests.is_empty() {
                break;
            }
            match act {
                Act::Preempt(r) => {
                    let at = r % self.requests.len();
                    self.requests[at].sequence.truncate(0).unwrap();
                }
                Act::Slide(r) => {
                    if let Some(window) = self.model.window {
                        let at = r % self.requests.len();
                        let sequence = &mut self.requests[at].sequence;
                        let first = (sequence.len() + 1).saturating_sub(window);
                        let whole = sequence.len() as usize == self.requests[at].names.len();
                        if whole {
                            let sequence = &mut self.requests[at].sequence;
                            sequence.drop_before(first.min(sequence.len())).unwrap();
                        }
                    }
                }
                Act::End(r) => {
                    let at = r % self.requests.len();
                    self.requests.swap_remove(at);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(Config { cases: cases(), failure_persistence: None, ..Config::default() })]

    #[test]
    fn any_schedule_is_one_dense_pass(model in model(), steps in prop::collection::vec((prop::collection::vec(act(), 1..6), 0u32..20), 1..8)) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, model);
        for (acts, pad) in &steps {
            engine.act(acts, *pad)?;
        }
        // Everything goes back.
        let pool = engine.attention.cache().pool().clone();
        engine.requests.clear();
        engine.ballast.truncate(0).unwrap();
        stream.synchronize().unwrap();
        prop_assert_eq!(pool.held_blocks(), 0);
        let reserved = u32::from(engine.model.dump);
        prop_assert_eq!(pool.free_blocks(), (BALLAST + engine.model.blocks - reserved) as usize);
        prop_assert_eq!(pool.steps_in_flight(), 0);
    }
}

/// `PROPTEST_CASES` of them; fewer by default, for a build without optimisation.
fn cases() -> u32 {
    let given = std::env::var("PROPTEST_CASES").ok();
    given.and_then(|cases| cases.parse().ok()).unwrap_or(96)
}

#[test]
fn the_schedules_check_something() {
    let stream = harness::stream();
    for decode_path in [false, true] {
        let model = Model {
            kv_heads: 1,
            group: 2,
            window: NonZeroU32::new(50).map(NonZeroU32::get),
            format: Cache::BnNBsD,
            block_size: 128,
            blocks: 8,
            decode_path,
            hybrid: !decode_path,
            merging: false,
            dump: true,
            chunked: true,
            mtp: true,
        };
        let mut engine = Engine::new(&stream, model);
        let steps = [
            vec![Act::Chunk(0, 140), Act::Chunk(3, 20)],
            vec![Act::Share(0, 130), Act::Chunk(1, 1)],
            vec![Act::Chunk(0, 7), Act::Verify(1, 3, 2), Act::Chunk(2, 7)],
            vec![Act::Slide(0), Act::Preempt(1)],
            vec![Act::Chunk(0, 9), Act::Chunk(1, 1)],
        ];
        for acts in &steps {
            engine.act(acts, 3).unwrap();
        }
        assert!(engine.checked >= 40, "{} rows", engine.checked);
        assert_eq!(engine.in_two > 0, !decode_path, "{} steps", engine.in_two);
    }
}
