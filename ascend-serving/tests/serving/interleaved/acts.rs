//! What happens in a schedule, and how often it is drawn.

use proptest::prelude::*;

use super::LAYERS;

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
    /// Whether the step verifies a tree for each request: in all turns of a step or in none.
    pub tree: bool,
}

/// What happens next. Numbers are cut to what there is.
#[derive(Clone, Debug)]
pub enum Act {
    /// By an engine, which queues copies where it has no step in progress.
    Grow(usize, usize),
    /// By the sequence, without copies.
    GrowAlone(usize, usize),
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
    /// On a stream, with metadata made now or before.
    Begin(usize, usize, Vec<Turn>, bool),
    Forward(usize, usize),
    /// Ends a step, or drops it.
    Close(usize, bool),
    /// Queues what is left of all steps in progress, and ends them.
    Finish,
    /// All layers of a step of one request.
    Step(usize, Turn),
    /// A request is cut, and a step computes other tokens.
    Rewrite(usize, usize, Turn),
}

impl Turn {
    pub fn new(request: usize, new: New) -> Self {
        Self { request, new, drafts: false, recompute: false, tree: false }
    }
}

fn turn() -> impl Strategy<Value = Turn> {
    let any = any::<usize>;
    let new = prop_oneof![
        6 => Just(New::Rest),
        1 => Just(New::One),
        1 => any().prop_map(New::Any),
    ];
    let flags = (prop::bool::weighted(0.2), prop::bool::weighted(0.1));
    (any(), new, flags).prop_map(|(request, new, (drafts, recompute))| Turn {
        drafts,
        recompute,
        ..Turn::new(request, new)
    })
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let turns = prop::collection::vec(turn(), 1..3);
    (turns, prop::bool::weighted(0.2)).prop_map(|(mut turns, tree)| {
        turns.iter_mut().for_each(|turn| turn.tree = tree);
        turns
    })
}

fn begin() -> impl Strategy<Value = Act> {
    let begin = (any::<usize>(), 0..2usize, turns(), prop::bool::weighted(0.2));
    begin.prop_map(|(lane, stream, turns, early)| Act::Begin(lane, stream, turns, early))
}

/// What changes sequences and their blocks.
fn change() -> impl Strategy<Value = Act> {
    let any = any::<usize>;
    let tokens = || prop_oneof![6 => Just(1usize), 3 => 2usize..5, 1 => 124usize..135];
    prop_oneof![
        4 => (any(), turns()).prop_map(|(lane, turns)| Act::Step(lane, turns[0])),
        2 => (any(), tokens()).prop_map(|(r, n)| Act::Grow(r, n)),
        1 => (any(), tokens()).prop_map(|(r, n)| Act::GrowAlone(r, n)),
        2 => any().prop_map(Act::Copies),
        4 => (any(), any(), turn()).prop_map(|(lane, tokens, turn)| Act::Rewrite(lane, tokens, turn)),
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
        1 => any().prop_map(Act::Settle),
        1 => (any(), turns).prop_map(|(lane, turns)| Act::Prepare(lane, turns)),
        2 => begin(),
        3 => (any(), 0..LAYERS).prop_map(|(lane, layer)| Act::Forward(lane, layer)),
        1 => (any(), prop::bool::ANY).prop_map(|(lane, end)| Act::Close(lane, end)),
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
        let acts = fork.into_iter().chain([begin]).chain(forward).chain(changes);
        acts.chain(finish.then_some(Act::Finish)).collect()
    })
}

/// Changes between the metadata of a step and the step.
fn late() -> impl Strategy<Value = Vec<Act>> {
    let turns = prop::collection::vec(turn(), 1..3);
    let changes = prop::collection::vec(change(), 1..3);
    (any::<usize>(), turns, changes).prop_map(|(lane, turns, changes)| {
        let begin = Act::Begin(lane, 0, turns.clone(), true);
        let prepare = [Act::Prepare(lane, turns)];
        prepare.into_iter().chain(changes).chain([begin]).collect()
    })
}

/// A request grows into a block that its fork has too.
fn copied() -> impl Strategy<Value = Vec<Act>> {
    any::<usize>().prop_map(|r| vec![Act::Fork(r, 0), Act::GrowAlone(r, 1), Act::Copies(r)])
}

pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    let some = prop::collection::vec(act(), 1..10);
    let some = prop_oneof![3 => interrupted(), 3 => some, 1 => late(), 1 => copied()];
    prop::collection::vec(some, 1..9).prop_map(|acts| acts.concat())
}
