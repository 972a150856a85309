//! Whatever happens between the layers of steps in progress: a step that is accepted and run gives each of its rows
//! dense attention over the tokens that the caller's sequence has.

mod lanes;
mod trees;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};

use ascend_attention::{Stream, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionShape, Backends, BatchSettings, Causality, FusedAttention,
    GraphLimits, TreeVerification,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::acts::config;
use crate::harness;
use crate::tokens::{DIM, Number};

use lanes::{Eager, Inbox, Lane, run};
use world::World;

const LAYERS: usize = 2;
/// Blocks that the requests can have, and those that somebody else holds: a call counts shared blocks once for each
/// of its requests.
const BLOCKS: usize = 8;
const BALLAST: usize = 14;
/// The number of the engine that verifies trees.
const TREES: usize = 3;

/// The new tokens of a request in a step.
#[derive(Clone, Copy, Debug)]
pub enum New {
    /// All that are not computed.
    Rest,
    One,
    Any(usize),
}

/// A request in a step.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub request: usize,
    pub new: New,
    pub drafts: bool,
    pub recompute: bool,
}

/// What happens next. Numbers are cut to what there is.
#[derive(Clone, Debug)]
pub enum Act {
    /// By the engine, which queues copies, or by the sequence alone.
    Grow {
        request: usize,
        tokens: usize,
        alone: bool,
    },
    Copies(usize),
    /// A request without tokens.
    New,
    Truncate(usize, usize),
    Fork(usize, usize),
    End(usize),
    Slide(usize, usize),
    Insert(usize),
    Hit(usize),
    Evict(usize),
    Move(usize, usize, usize),
    /// Cuts off what the cache has not computed.
    Settle(usize),
    /// An engine makes the metadata of a later step.
    Prepare(usize, Vec<Turn>),
    Begin {
        lane: usize,
        stream: usize,
        turns: Vec<Turn>,
        early: bool,
    },
    Forward(usize, usize),
    Close {
        lane: usize,
        end: bool,
    },
    /// Queues what is left of all steps in progress, and ends them.
    Finish,
    /// All layers of a step of one request.
    Step {
        lane: usize,
        turn: Turn,
    },
    /// A request is cut, and a step computes other tokens.
    Rewrite {
        lane: usize,
        tokens: usize,
        turn: Turn,
    },
}

fn turn() -> impl Strategy<Value = Turn> {
    let any = any::<usize>;
    let new = prop_oneof![
        6 => Just(New::Rest),
        1 => Just(New::One),
        1 => any().prop_map(New::Any),
    ];
    let turn = (
        any(),
        new,
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.1),
    );
    turn.prop_map(|(request, new, drafts, recompute)| Turn {
        request,
        new,
        drafts,
        recompute,
    })
}

fn begin() -> impl Strategy<Value = Act> {
    let turns = prop::collection::vec(turn(), 1..3);
    let begin = (any::<usize>(), 0..2usize, turns, prop::bool::weighted(0.2));
    begin.prop_map(|(lane, stream, turns, early)| Act::Begin {
        lane,
        stream,
        turns,
        early,
    })
}

/// What changes sequences and their blocks.
fn change() -> impl Strategy<Value = Act> {
    let any = any::<usize>;
    let tokens = prop_oneof![6 => Just(1usize), 3 => 2usize..5, 1 => 124usize..135];
    let grow = (any(), tokens, prop::bool::weighted(0.3));
    prop_oneof![
        4 => (any(), turn()).prop_map(|(lane, turn)| Act::Step { lane, turn }),
        2 => grow.prop_map(|(request, tokens, alone)| Act::Grow { request, tokens, alone }),
        4 => (any(), any(), turn()).prop_map(|(lane, tokens, turn)| Act::Rewrite { lane, tokens, turn }),
        2 => (any(), any()).prop_map(|(r, n)| Act::Truncate(r, n)),
        4 => (any(), any()).prop_map(|(r, n)| Act::Fork(r, n)),
        3 => any().prop_map(Act::End),
        1 => Just(Act::New),
        2 => (any(), any()).prop_map(|(r, n)| Act::Slide(r, n)),
        2 => any().prop_map(Act::Insert),
        2 => any().prop_map(Act::Hit),
        1 => any().prop_map(Act::Evict),
        2 => (any(), any(), any()).prop_map(|(r, from, to)| Act::Move(r, from, to)),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let any = any::<usize>;
    let turns = prop::collection::vec(turn(), 1..3);
    prop_oneof![
        8 => change(),
        1 => any().prop_map(Act::Copies),
        1 => any().prop_map(Act::Settle),
        1 => (any(), turns).prop_map(|(lane, turns)| Act::Prepare(lane, turns)),
        2 => begin(),
        3 => (any(), 0..LAYERS).prop_map(|(lane, layer)| Act::Forward(lane, layer)),
        1 => (any(), prop::bool::ANY).prop_map(|(lane, end)| Act::Close { lane, end }),
        1 => Just(Act::Finish),
    ]
}

/// Changes in the middle of a step, which may be one of a fork.
fn interrupted() -> impl Strategy<Value = Vec<Act>> {
    let fork = prop::option::of((any::<usize>(), any::<usize>()));
    let changes = prop::collection::vec(change(), 1..6);
    let parts = (fork, begin(), 0..=LAYERS, changes, prop::bool::ANY);
    parts.prop_map(|(fork, begin, layer, changes, finish)| {
        let fork = fork.map(|(r, n)| Act::Fork(r, n));
        let forward = (layer < LAYERS).then_some(Act::Forward(0, layer));
        let acts = fork
            .into_iter()
            .chain([begin])
            .chain(forward)
            .chain(changes);
        acts.chain(finish.then_some(Act::Finish)).collect()
    })
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let some = prop_oneof![interrupted(), prop::collection::vec(act(), 1..10)];
    prop::collection::vec(some, 1..9).prop_map(|acts| acts.concat())
}

/// The engines of a schedule, and their cache.
#[derive(Clone, Copy, Debug)]
struct Setting {
    format: Cache,
    window: Option<usize>,
    pad: PadPolicy,
}

fn setting() -> impl Strategy<Value = Setting> {
    let format = prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)];
    let window = prop_oneof![3 => Just(None), 1 => (1usize..150).prop_map(Some)];
    let pad = prop_oneof![Just(PadPolicy::SkipNegative), Just(PadPolicy::DumpSlot(0))];
    (format, window, pad).prop_map(|(format, window, pad)| Setting {
        format,
        window,
        pad,
    })
}

/// An engine as a coroutine, and its next act.
struct Engine<'a> {
    inbox: Rc<Inbox>,
    run: Pin<Box<dyn Future<Output = ()> + 'a>>,
}

fn engine<'a, T: Number>(
    lane: impl Lane<T> + 'a,
    number: usize,
    streams: &'a [Stream; 2],
    world: &'a RefCell<World>,
) -> Engine<'a> {
    let inbox = Rc::<Inbox>::default();
    let run = Box::pin(run(lane, number, streams, world, inbox.clone()));
    Engine { inbox, run }
}

/// Engines, each with its next act, and what their caller knows.
struct Server<'a> {
    engines: Vec<Engine<'a>>,
    world: &'a RefCell<World>,
}

impl Server<'_> {
    /// Gives an engine its next act.
    fn tell(&mut self, lane: usize, act: Act) {
        let Engine { inbox, run } = &mut self.engines[lane];
        inbox.put(act);
        let pending = run.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(pending.is_pending());
    }

    /// The engine that a number stands for: of those with a step in progress, or without, if there is one.
    fn lane(&self, lane: usize, busy: bool) -> usize {
        let world = self.world.borrow();
        let lanes = 0..self.engines.len();
        let fitting: Vec<_> = lanes
            .filter(|lane| world.busy.contains(lane) == busy)
            .collect();
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
            let grow = |tokens| Act::Grow {
                request,
                tokens,
                alone: false,
            };
            if lengths(self) == [0, 0] {
                // Prompts end near the end of a block.
                self.tell(0, grow([3, 127, 128, 130][request / 8 % 4]));
            }
            let most = if lane == TREES { 0 } else { 2 };
            if lengths(self)[1] > most && request % 8 > 0 {
                self.compute(0, *turn);
            }
            if lengths(self)[1] == 0 && lane != TREES {
                self.tell(0, grow(1));
            }
        }
        let turns = turns.to_vec();
        self.tell(
            lane,
            Act::Begin {
                lane,
                stream,
                turns,
                early,
            },
        );
        lane
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Grow { alone: false, .. } | Act::Copies(_) | Act::Move(..) | Act::Settle(_) => {
                self.tell(0, act.clone());
            }
            Act::Prepare(lane, _) => self.tell(self.lane(lane, false), act.clone()),
            Act::Begin {
                lane,
                stream,
                ref turns,
                early,
            } => {
                self.begin(lane, stream, turns, early);
            }
            Act::Forward(lane, _) | Act::Close { lane, .. } => {
                self.tell(self.lane(lane, true), act.clone())
            }
            Act::Step { lane, turn } => {
                let lane = self.begin(lane, 0, &[turn], false);
                self.finish(lane);
            }
            Act::Rewrite { lane, tokens, turn } => {
                self.act(&Act::Truncate(turn.request, tokens));
                self.act(&Act::Step { lane, turn });
            }
            Act::Finish => self.finish_all(),
            _ => self.world.borrow_mut().act(act),
        }
    }

    /// Computes what is left of a request.
    fn compute(&mut self, lane: usize, turn: Turn) {
        let turns = vec![turn];
        self.tell(
            lane,
            Act::Begin {
                lane,
                stream: 0,
                turns,
                early: false,
            },
        );
        self.finish(lane);
    }

    /// Queues what is left of a step, and ends it.
    fn finish(&mut self, lane: usize) {
        (0..LAYERS).for_each(|layer| self.tell(lane, Act::Forward(lane, layer)));
        self.tell(lane, Act::Close { lane, end: true });
    }

    fn finish_all(&mut self) {
        let busy = self.world.borrow().busy.clone();
        busy.into_iter().for_each(|lane| self.finish(lane));
    }

    /// Ends all steps, and computes one more token of each sequence, which sees all that is computed.
    fn end(&mut self) {
        self.finish_all();
        let turn = Turn {
            request: 0,
            new: New::Rest,
            drafts: false,
            recompute: false,
        };
        while !self.world.borrow().requests.is_empty() {
            self.act(&Act::Settle(0));
            self.act(&Act::Step { lane: 0, turn });
            self.world.borrow_mut().requests.swap_remove(0);
        }
    }
}

/// Runs a schedule. How often each kind of act was accepted, and each rule met.
fn schedule<T: Number>(setting: Setting, acts: &[Act]) -> BTreeMap<&'static str, usize> {
    let first = harness::stream();
    let streams = [first.device().stream().unwrap(), first];
    let stream = &streams[0];
    let shape = CacheShape::new(LAYERS, 1, DIM).format(setting.format);
    let blocks = BALLAST + BLOCKS;
    let cache = PagedKvCache::<T>::new(stream.device(), blocks, 128, shape, setting.pad).unwrap();
    let pool = cache.pool().clone();
    let free = pool.free_blocks();
    let mut ballast = Sequence::new(&pool);
    let _ = ballast.grow(BALLAST * 128).unwrap();
    let causality = match setting.window.and_then(NonZeroUsize::new) {
        Some(window) => Causality::Window(window),
        None => Causality::Causal,
    };
    let settings = BatchSettings::of(&cache, causality);
    let backends = Backends::none().with(FusedAttention);
    let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
    let capture = |each| -> AttentionGraphs<T> {
        let limits = GraphLimits::new([1, 3], 256).tokens_each(each);
        attention.capture(stream, causality, &limits).unwrap()
    };
    let graphs = [capture(1), capture(2)];
    let limits = GraphLimits::new([1, 2], 256).tokens_each(trees::NODES);
    let trees = TreeVerification::new(attention.shape());
    let trees = trees.capture(stream, attention.cache(), &limits).unwrap();
    let world = RefCell::new(World::new(&pool, settings, causality));
    {
        let [one, two] = graphs;
        let engines = vec![
            engine(Eager(attention), 0, &streams, &world),
            engine(one, 1, &streams, &world),
            engine(two, 2, &streams, &world),
            engine(trees, TREES, &streams, &world),
        ];
        let mut server = Server {
            engines,
            world: &world,
        };
        acts.iter().for_each(|act| server.act(act));
        server.end();
    }
    let World { seen, .. } = world.into_inner();
    drop(ballast);
    streams
        .iter()
        .for_each(|stream| stream.synchronize().unwrap());
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
    for _ in 0..60 {
        let tree = (setting(), acts()).new_tree(&mut runner).unwrap();
        let (setting, acts) = tree.current();
        for (what, times) in schedule::<bf16>(setting, &acts) {
            *seen.entry(what).or_default() += times;
        }
    }
    println!("{seen:#?}");
}
