//! Whatever the schedule: every token gets the attention that one dense pass over its whole sequence gives it.

use crate::harness;
use approx::abs_diff_eq;

use std::num::NonZeroUsize;

use crate::acts::{Act, Schedule, Scheduled, Turn, act, config};
use crate::harness::reference::Half;
use crate::tokens::{DIM, dense, packed};
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionShape, AttentionState, Backend, Backends, BatchSettings, Causality, Drafting,
    SharedPrefixDecode, StatePolicy,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LAYERS: usize = 2;

#[derive(Clone, Debug)]
pub struct Model {
    pub kv_heads: usize,
    pub group: usize,
    pub window: Option<usize>,
    pub format: Cache,
    pub block_size: usize,
    /// Blocks that the requests can have.
    pub blocks: usize,
    pub decode_path: bool,
    pub hybrid: bool,
    pub merging: bool,
    pub dump: bool,
    pub chunked: bool,
    pub mtp: bool,
}

pub fn model() -> impl Strategy<Value = Model> {
    let window = prop_oneof![2 => Just(None), 1 => (1usize..200).prop_map(Some)];
    let format = prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)];
    let sizes = (1usize..3, 1usize..4, window, format, 1usize..3, 4usize..9);
    (sizes, any::<[bool; 6]>()).prop_map(|((kv_heads, group, window, format, size, blocks), flags)| Model {
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
    })
}

/// Blocks that somebody else holds: the operator wants the cache to have as many blocks as the rows of a call have
/// together, shared ones and those of dummy requests counted each time.
const BALLAST: usize = 60;

pub struct Engine<'a, T: Half> {
    stream: &'a Stream,
    model: Model,
    settings: BatchSettings,
    attention: Attention<T>,
    shape: AttentionShape,
    schedule: Schedule,
    ballast: Sequence,
    checked: usize,
    /// Names of the backends that served steps.
    pub served: Vec<&'static str>,
}

impl Model {
    fn backends<T: Half>(&self) -> Backends<T> {
        let mut backends = Backends::none();
        if self.merging {
            // Refused where they do not apply: then the others serve the step.
            backends =
                backends.with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS)).with(Backend::CascadePrefill);
        }
        // What the decode path takes: other caches and windows are another backend's.
        let decodes = self.window.is_none() && self.format != Cache::Nz;
        match (self.decode_path, self.hybrid) {
            (true, true) if decodes => {
                let backends = backends.with(Backend::Fused).with(Backend::PagedDecode);
                backends.prefer([0], &[AttentionState::DecodeOnly], "paged_decode").unwrap()
            }
            (true, _) => backends.with(Backend::PagedDecode).with(Backend::Fused),
            (false, true) => backends.with(Backend::FusedInTwo).with(Backend::Fused),
            (false, false) => backends.with(Backend::Fused),
        }
    }
}

impl<'a, T: Half> Engine<'a, T> {
    pub fn new(stream: &'a Stream, model: Model, backends: Backends<T>) -> Self {
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
        let causality = Causality::from_flags(true, model.window).unwrap();
        let mut schedule = Schedule::of(6);
        schedule.begin = 4;
        schedule.tokens = 400;
        schedule.window = model.window;
        Self {
            stream,
            settings: BatchSettings::of(&cache, causality)
                .policy(StatePolicy::new(model.chunked, model.mtp.then_some(Drafting::Mtp))),
            model,
            attention: Attention::new(shape, cache, backends),
            shape,
            schedule,
            ballast,
            checked: 0,
            served: Vec::new(),
        }
    }
}

impl<T: Half> Scheduled for Engine<'_, T> {
    type Element = T;

    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<T>) {
        (&mut self.schedule, self.stream, self.attention.cache_mut())
    }

    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let names = self.schedule.names(turns, pad);
        let mut results = Vec::new();
        {
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let query = packed(self.stream, &names, layer, 0, self.shape.heads);
                let key = packed(self.stream, &names, layer, 1, self.shape.kv_heads);
                let value = packed(self.stream, &names, layer, 2, self.shape.kv_heads);
                results.push(step.forward(layer, (&query, &key, &value)).unwrap().clone());
            }
            self.served.push(step.selected(0).unwrap().name);
        }
        for (layer, result) in results.iter().enumerate() {
            let result = result.download(self.stream).unwrap();
            let width = self.shape.heads * DIM;
            for row in self.schedule.rows(turns) {
                let position = row.names.len() - 1;
                let window = self.model.window.map_or(usize::MAX, |w| w);
                let from = (position + 1).saturating_sub(window);
                let want = dense(row.names, layer, self.shape, |key| key >= from);
                let got = &result[row.token * width..][..width];
                for (x, (got, want)) in got.iter().zip(&want).enumerate() {
                    let got = got.to_f64();
                    // Parts are rounded before they are merged.
                    let tolerance = if self.model.merging { 2e-2 } else { 1e-2 };
                    prop_assert!(
                        abs_diff_eq!(got, want, epsilon = tolerance),
                        "layer {layer}, request {}, position {position}, element {x}: {got}, expected {want}; {:?}",
                        row.request,
                        metadata.state()
                    );
                }
                self.checked += 1;
            }
        }
        Ok(())
    }

    fn let_go(&mut self) {
        self.ballast.truncate(0).unwrap();
    }

    fn arrange(&self, turns: &mut [Turn]) {
        if self.model.hybrid && !self.model.decode_path {
            // Two calls want the decodes in front.
            turns.sort_by_key(Turn::prefills);
        }
    }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn any_schedule_is_one_dense_pass(model in model(), steps in prop::collection::vec((prop::collection::vec(act(150, 6), 1..6), 0usize..20), 1..8)) {
        let stream = harness::stream();
        let backends = model.backends::<bf16>();
        let mut engine = Engine::new(&stream, model, backends);
        engine.run(&steps)?;
    }
}

#[test]
fn the_schedules_check_something() {
    let stream = harness::stream();
    for decode_path in [false, true] {
        let model = Model {
            kv_heads: 1,
            group: 2,
            window: NonZeroUsize::new(50).map(NonZeroUsize::get),
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
        let backends = model.backends::<bf16>();
        let mut engine = Engine::new(&stream, model, backends);
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
        let in_two = engine.served.contains(&"fused_in_two");
        assert_eq!(in_two, !decode_path, "{:?}", engine.served);
    }
}
