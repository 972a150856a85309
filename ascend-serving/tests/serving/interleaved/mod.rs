//! Whatever happens between the layers of steps in progress: a step that is accepted and run gives each of its rows
//! dense attention over the tokens that the caller's sequence has.

mod acts;
mod lanes;
mod rows;
mod stored;
mod trees;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};

use ascend_attention::{Stream, bf16, f16};
use ascend_serving::kv::{Cache, PadPolicy, Sequence};
use ascend_serving::{Attention, AttentionGraphs, BatchSettings, Causality, GraphLimits, TreeVerification, rules};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::acts::config;
use crate::harness;
use crate::harness::reference::Half;

use acts::{Act, New, Turn, acts};
use lanes::{Eager, Inbox, Lane, run};
use stored::Stored;
use world::World;

const LAYERS: usize = 2;
/// Blocks that somebody else holds: a call counts shared blocks once for each of its requests.
const BALLAST: usize = 14;
/// Schedules of which some meet every rule.
const CONTROLS: usize = 250;

/// The engines of a schedule, and their cache.
#[derive(Clone, Copy, Debug)]
struct Setting {
    stored: Stored,
    format: Cache,
    window: Option<usize>,
    pad: PadPolicy,
    /// Blocks that the requests can have.
    blocks: usize,
}

fn setting() -> impl Strategy<Value = Setting> {
    let stored = prop_oneof![
        3 => Just(Stored::Heads),
        1 => Just(Stored::Quantised),
        1 => Just(Stored::Latents)
    ];
    let format = prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)];
    let window = prop_oneof![3 => Just(None), 1 => (1usize..150).prop_map(Some)];
    let pad = prop_oneof![Just(PadPolicy::SkipNegative), Just(PadPolicy::DumpSlot(0))];
    (stored, format, window, pad, 3usize..9).prop_map(|(stored, format, window, pad, blocks)| {
        let (format, window) = match stored {
            Stored::Heads => (format, window),
            Stored::Quantised => (Cache::BnBsH, window),
            Stored::Latents => (format, None),
        };
        Setting { stored, format, window, pad, blocks }
    })
}

/// An engine as a coroutine, and its next act.
struct Engine<'a> {
    inbox: Rc<Inbox>,
    /// Whether a step of these only reads what is computed.
    verifies: fn(&[Turn]) -> bool,
    run: Pin<Box<dyn Future<Output = ()> + 'a>>,
}

/// Engines, each with its next act, and what their caller knows.
struct Server<'a> {
    engines: Vec<Engine<'a>>,
    streams: &'a [Stream; 2],
    world: &'a RefCell<World>,
}

impl<'a> Server<'a> {
    fn add<T: Half, L: Lane<T> + 'a>(&mut self, lane: L) {
        let (inbox, number) = (Rc::<Inbox>::default(), self.engines.len());
        self.engines.push(Engine {
            inbox: inbox.clone(),
            verifies: L::verifies,
            run: Box::pin(run(lane, number, self.streams, self.world, inbox)),
        });
    }

    /// Gives an engine its next act.
    fn tell(&mut self, lane: usize, act: Act) {
        let Engine { inbox, run, .. } = &mut self.engines[lane];
        inbox.put(act);
        let pending = run.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(pending.is_pending());
    }

    /// The engine that a number stands for: of those with a step in progress, or without, if there is one.
    fn lane(&self, lane: usize, busy: bool) -> usize {
        let world = self.world.borrow();
        let lanes = 0..self.engines.len();
        let fitting: Vec<_> = lanes.filter(|lane| world.busy.contains(lane) == busy).collect();
        match fitting.len() {
            0 => lane % self.engines.len(),
            many => fitting[lane % many],
        }
    }

    /// Begins a step. Requests without new tokens grow by one, and long steps are for the first engine.
    fn begin(&mut self, lane: usize, stream: usize, turns: &[Turn], early: bool) -> usize {
        let lane = self.lane(lane, false);
        for turn in turns.iter().filter(|turn| !early && !turn.recompute) {
            let request = turn.request;
            let at = self.world.borrow_mut().at(request);
            let lengths = |server: &Self| server.world.borrow().lengths(at);
            if lengths(self) == [0, 0] {
                // Prompts end near the end of a block.
                self.tell(0, Act::Grow(request, [3, 127, 128, 130][request / 8 % 4]));
            }
            let verifies = (self.engines[lane].verifies)(turns);
            let most = if verifies { 0 } else { 2 };
            if lengths(self)[1] > most && request % 8 > 0 {
                self.tell(0, Act::Begin(0, 0, vec![*turn], false));
                self.finish(0);
            }
            let stored = self.world.borrow().stored;
            let new = if verifies { trees::nodes_of(stored, turn) } else { 1 };
            if lengths(self)[1] == 0 && new > 0 {
                self.tell(0, Act::Grow(request, new));
            }
        }
        self.tell(lane, Act::Begin(lane, stream, turns.to_vec(), early));
        lane
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Grow(..) | Act::Copies(_) | Act::Move(..) | Act::Settle(_) => {
                self.tell(0, act.clone());
            }
            Act::Prepare(lane, _) => self.tell(self.lane(lane, false), act.clone()),
            Act::Begin(lane, stream, ref turns, early) => {
                self.begin(lane, stream, turns, early);
            }
            Act::Forward(lane, _) | Act::Close(lane, _) => self.tell(self.lane(lane, true), act.clone()),
            Act::Step(lane, turn) => {
                let lane = self.begin(lane, 0, &[turn], false);
                self.finish(lane);
            }
            Act::Rewrite(lane, tokens, turn) => {
                self.act(&Act::Truncate(turn.request, tokens));
                self.act(&Act::Step(lane, turn));
            }
            Act::Finish => self.finish_all(),
            _ => self.world.borrow_mut().act(act),
        }
    }

    /// Queues what is left of a step, and ends it.
    fn finish(&mut self, lane: usize) {
        (0..LAYERS).for_each(|layer| self.tell(lane, Act::Forward(lane, layer)));
        self.tell(lane, Act::Close(lane, true));
    }

    fn finish_all(&mut self) {
        let busy = self.world.borrow().busy.clone();
        busy.into_iter().for_each(|lane| self.finish(lane));
    }

    /// Ends all steps, and computes one more token of each sequence, which sees all that is computed: nothing refuses
    /// that but too few blocks, and keys that were given back.
    fn end(&mut self) {
        self.finish_all();
        let requests = self.world.borrow().requests.len();
        (0..requests).for_each(|request| self.act(&Act::Copies(request)));
        let turn = Turn::new(0, New::Rest);
        let steps = |server: &Self| server.world.borrow().seen.get("step").copied();
        while !self.world.borrow().requests.is_empty() {
            self.act(&Act::Settle(0));
            let mut before = (steps(self), self.world.borrow().lengths(0)[0]);
            self.act(&Act::Step(0, turn));
            // A copy whose growth was dropped: the fix of the refusal.
            let lacks_copy = self.world.borrow().refused.contains(rules::BLOCK_UNCOPIED.id);
            if steps(self) == before.0 && lacks_copy {
                self.world.borrow_mut().truncate(0, 0);
                before.1 = 0;
                self.act(&Act::Step(0, turn));
            }
            let request = self.world.borrow_mut().requests.swap_remove(0);
            let has_grown = request.sequence.len() > before.1;
            let sees_all = self.world.borrow().window.is_some() || request.sequence.given_back() == 0;
            assert!(
                steps(self) > before.0 || !has_grown || !sees_all,
                "the last step of {} tokens is refused: {:?}",
                request.sequence.len(),
                self.world.borrow().refused
            );
        }
    }
}

/// Runs a schedule. How often each kind of act was accepted, and each rule met.
fn schedule<T: Half>(setting: Setting, acts: &[Act]) -> BTreeMap<&'static str, usize> {
    let first = harness::stream();
    let streams = [first.device().stream().unwrap(), first];
    let stream = &streams[0];
    let stored = setting.stored;
    let cache = stored.cache::<T>(stream, BALLAST + setting.blocks, &setting);
    let pool = cache.pool().clone();
    let free = pool.free_blocks();
    let mut ballast = Sequence::new(&pool);
    let _ = ballast.grow(BALLAST * 128).unwrap();
    let causality = match setting.window.and_then(NonZeroUsize::new) {
        Some(window) => Causality::Window(window),
        None => Causality::Causal,
    };
    let settings = BatchSettings::of(&cache, causality);
    let attention = Attention::new(stored.shape(), cache, stored.backends());
    let capture = |each| -> AttentionGraphs<T> {
        let limits = GraphLimits::new([1, 3], 256).tokens_each(each);
        attention.capture(stream, causality, &limits).unwrap()
    };
    // Graphs over quantised caches compute one token a request that sees all.
    let graphs = match (stored, setting.window) {
        (Stored::Quantised, None) => vec![capture(1), capture(1)],
        (Stored::Quantised, Some(_)) => vec![],
        (Stored::Heads | Stored::Latents, _) => vec![capture(1), capture(2)],
    };
    let limits = GraphLimits::new([1, 2], 256).tokens_each(trees::NODES);
    // Trees over quantised caches are refused.
    let trees = (stored != Stored::Quantised).then(|| {
        let trees = TreeVerification::new(stored.shape());
        trees.capture(stream, attention.cache(), &limits).unwrap()
    });
    let world = RefCell::new(World::new(stored, &pool, settings, causality));
    {
        let mut server = Server { engines: Vec::new(), streams: &streams, world: &world };
        server.add(Eager(attention));
        graphs.into_iter().for_each(|graphs| server.add(graphs));
        trees.into_iter().for_each(|trees| server.add(trees));
        acts.iter().for_each(|act| server.act(act));
        server.end();
    }
    let World { seen, .. } = world.into_inner();
    drop(ballast);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!((pool.held_blocks(), pool.free_blocks()), (0, free));
    assert_eq!(pool.steps_in_flight(), 0);
    seen
}

proptest! {
    #![proptest_config(config(30))]

    #[test]
    fn a_step_sees_the_tokens_of_its_sequence(setting in setting(), half: bool, acts in acts()) {
        match half {
            true => schedule::<f16>(setting, &acts),
            false => schedule::<bf16>(setting, &acts),
        };
    }
}

/// The fuzzer does everything, and meets every rule about steps in progress.
#[test]
fn every_kind_of_act_is_accepted_and_every_rule_met() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeMap::<_, usize>::new();
    let mut steps = BTreeMap::<_, usize>::new();
    let accepted = "grow,grow alone,copies,truncate,fork,end,slide,insert,hit,evict,move,metadata,step,graph step,tree \
        step,layer,step end,step drop,rows";
    let met = [
        &rules::SEQUENCE_GAP,
        &rules::SEQUENCE_CHANGED,
        &rules::SEQUENCE_COMPUTED,
        &rules::SEQUENCE_IN_PROGRESS,
        &rules::STEP_LAYERS_MISSING,
        &rules::STEP_LAYER_REPEATED,
        &rules::TABLE_SHARED,
        &rules::BLOCK_UNCOPIED,
        &rules::BLOCK_GIVEN_BACK,
        &rules::BLOCK_WINDOW,
        &rules::POOL_WAITING,
        &rules::POOL_EXHAUSTED,
    ];
    let wanted: Vec<&str> = accepted.split(',').chain(met.map(|rule| rule.id)).collect();
    let mut schedules = 0;
    while schedules < CONTROLS && !wanted.iter().all(|what| seen.contains_key(what)) {
        schedules += 1;
        let tree = (setting(), acts()).new_tree(&mut runner).unwrap();
        let (setting, acts) = tree.current();
        for (what, times) in schedule::<bf16>(setting, &acts) {
            *seen.entry(what).or_default() += times;
            if what.ends_with("step") {
                *steps.entry((setting.stored, what)).or_default() += times;
            }
        }
    }
    println!("{schedules} schedules: {seen:#?} {steps:#?}");
    for what in wanted {
        assert!(seen.contains_key(what), "{what} is missing in {seen:#?}");
    }
}
