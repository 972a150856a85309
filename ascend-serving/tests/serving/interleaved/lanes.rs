//! Engines as coroutines: each holds its step in progress while the schedule goes on elsewhere.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use ascend_attention::Stream;
use ascend_serving::{
    Attention, AttentionGraphs, AttentionMetadata, Error, Step, TreeStep, TreeVerification, Violation,
};

use crate::harness::reference::Half;

use super::LAYERS;
use super::acts::{Act, Turn};
use super::rows::{Part, Rows};
use super::stored::{Inputs, Stored};
use super::trees::{self, NODES, Trees};
use super::world::World;

/// The next act of an engine.
#[derive(Default)]
pub struct Inbox(Cell<Option<Act>>);

impl Inbox {
    pub fn put(&self, act: Act) {
        self.0.set(Some(act));
    }

    async fn next(&self) -> Act {
        poll_fn(|_| match self.0.take() {
            Some(act) => Poll::Ready(act),
            None => Poll::Pending,
        })
        .await
    }
}

/// An engine with at most one step in progress.
pub trait Lane<T: Half> {
    /// What a step is made of before it begins.
    type Metadata;
    type Step<'a>
    where
        Self: 'a;

    const NAME: &'static str;

    /// Whether a step of these only reads what is computed, and begins with its metadata.
    fn verifies(_: &[Turn]) -> bool {
        false
    }

    fn metadata(&self, world: &World, parts: &[Part]) -> Result<Self::Metadata, Violation>;
    fn begin<'a>(
        &'a mut self,
        world: &World,
        stream: &'a Stream,
        metadata: &'a mut Self::Metadata,
    ) -> Result<Self::Step<'a>, Error>;
    /// The rows of a layer.
    fn forward(step: &mut Self::Step<'_>, stream: &Stream, layer: usize, inputs: &Inputs<T>) -> Result<Vec<T>, Error>;
    fn end(step: Self::Step<'_>) -> Result<(), Error>;

    /// The requests of a step.
    fn parts(world: &mut World, turns: &[Turn]) -> Vec<Part> {
        world.step_parts(turns)
    }

    /// The rows of a step that was accepted just now.
    fn accept(world: &mut World, parts: &[Part]) -> Rows {
        world.accept(parts)
    }

    /// The attention of an engine that has its own cache.
    fn attention(&mut self) -> Option<&mut Attention<T>> {
        None
    }
}

/// Runs an engine, which waits for its next act again and again.
pub async fn run<T: Half, L: Lane<T>>(
    mut lane: L,
    number: usize,
    streams: &[Stream; 2],
    world: &RefCell<World>,
    inbox: Rc<Inbox>,
) {
    let mut early = None;
    loop {
        match inbox.next().await {
            Act::Prepare(_, turns) => {
                let world = &mut *world.borrow_mut();
                let parts = L::parts(world, &turns);
                let metadata = lane.metadata(world, &parts);
                let made = world.note("metadata", metadata);
                early = made.map(|metadata| (parts, metadata)).or(early);
            }
            Act::Begin(_, stream, turns, use_early) => {
                let known = early.take_if(|_| use_early && !L::verifies(&turns));
                let made = known.or_else(|| {
                    let world = &mut *world.borrow_mut();
                    let parts = L::parts(world, &turns);
                    let metadata = lane.metadata(world, &parts);
                    Some((parts, world.note("metadata", metadata)?))
                });
                if let Some((parts, mut metadata)) = made {
                    let stream = &streams[stream % 2];
                    let begun = lane.begin(&world.borrow(), stream, &mut metadata);
                    let begun = world.borrow_mut().note(L::NAME, begun);
                    if let Some(step) = begun {
                        let rows = L::accept(&mut world.borrow_mut(), &parts);
                        world.borrow_mut().busy.insert(number);
                        in_progress::<T, L>(step, &rows, stream, world, &inbox).await;
                        world.borrow_mut().busy.remove(&number);
                    }
                }
            }
            act => idle(lane.attention(), &streams[0], &mut world.borrow_mut(), &act),
        }
    }
}

/// What only an engine without a step in progress does.
fn idle<T: Half>(attention: Option<&mut Attention<T>>, stream: &Stream, world: &mut World, act: &Act) {
    let Some(attention) = attention else { return };
    match *act {
        Act::Grow(request, tokens) => {
            let at = world.at(request);
            let grown = attention.grow(stream, &mut world.requests[at].sequence, tokens);
            if world.note("grow", grown).is_some() {
                world.grown(at);
            }
        }
        Act::Copies(request) => {
            let at = world.at(request);
            let copies = std::mem::take(&mut world.requests[at].copies);
            if copies.iter().any(|copy| copy.is_awaited()) {
                let copied = attention.cache_mut().copy_blocks(stream, &copies);
                world.note("copies", copied);
            }
        }
        Act::Settle(request) => {
            let at = world.at(request);
            let computed = attention.cache().computed_tokens(&world.requests[at].sequence);
            world.truncate(at, computed.unwrap());
        }
        Act::Move(request, from, to) => {
            let at = world.at(request);
            let request = &world.requests[at];
            let (from, to) = match request.sequence.len() {
                0 => return,
                len => (len - 1 - from % len.min(4), len - 1 - to % len.min(6)),
            };
            let cache = attention.cache_mut();
            let moved = cache.move_tokens(stream, &request.sequence, [(from, to)]);
            if world.note("move", moved).is_some() {
                let names = &mut world.requests[at].names;
                names[to] = names[from];
            }
        }
        _ => {}
    }
    stream.synchronize().unwrap();
}

/// A step in progress, until it is ended or dropped.
async fn in_progress<T: Half, L: Lane<T>>(
    mut step: L::Step<'_>,
    rows: &Rows,
    stream: &Stream,
    world: &RefCell<World>,
    inbox: &Inbox,
) {
    let mut queued = [false; LAYERS];
    let is_done = |queued: &[bool; LAYERS]| queued.iter().all(|queued| *queued);
    loop {
        match inbox.next().await {
            Act::Forward(_, layer) => {
                let stored = world.borrow().stored;
                let inputs = stored.inputs(stream, rows, layer);
                let output = L::forward(&mut step, stream, layer, &inputs);
                stream.synchronize().unwrap();
                let world = &mut *world.borrow_mut();
                if let Some(output) = world.note("layer", output) {
                    compare::<T, L>(stored, &output, inputs.absorbed, rows, layer);
                    *world.seen.entry("rows").or_default() += rows.checked.len();
                    let before = is_done(&queued);
                    queued[layer] = true;
                    if is_done(&queued) && !before {
                        world.close(rows, true);
                    }
                }
            }
            Act::Close(_, end) => {
                let ended = match end {
                    true => L::end(step),
                    false => {
                        drop(step);
                        Ok(())
                    }
                };
                stream.synchronize().unwrap();
                let world = &mut *world.borrow_mut();
                world.note(if end { "step end" } else { "step drop" }, ended);
                if !is_done(&queued) {
                    world.close(rows, false);
                }
                return;
            }
            Act::Grow(request, tokens) => {
                world.borrow_mut().act(&Act::GrowAlone(request, tokens));
            }
            _ => {}
        }
    }
}

/// Compares rows with dense attention over the tokens that each sees.
fn compare<T: Half, L: Lane<T>>(stored: Stored, output: &[T], absorbed: bool, rows: &Rows, layer: usize) {
    for row in &rows.checked {
        let away = stored.away(output, absorbed, row, layer);
        assert!(
            away < rows.tolerance,
            "{}, layer {layer}, row {} of {} tokens: {away} away from dense attention",
            L::NAME,
            row.row,
            row.names.len()
        );
    }
}

/// Steps of [`Attention::begin`], and verifications of trees over its cache.
pub struct Eager<T: Half>(pub Attention<T>);

pub enum EagerMetadata {
    Step(Box<AttentionMetadata>),
    Trees(Trees),
}

pub enum EagerStep<'a, T: Half> {
    Step(Box<Step<'a, T>>),
    Trees(Box<TreeStep<'a, T>>),
}

impl<T: Half> Lane<T> for Eager<T> {
    type Metadata = EagerMetadata;
    type Step<'a> = EagerStep<'a, T>;

    const NAME: &'static str = "step";

    fn verifies(turns: &[Turn]) -> bool {
        turns.iter().all(|turn| turn.tree)
    }

    fn parts(world: &mut World, turns: &[Turn]) -> Vec<Part> {
        match Self::verifies(turns) {
            true => trees::parts(world, turns),
            false => world.step_parts(turns),
        }
    }

    fn metadata(&self, world: &World, parts: &[Part]) -> Result<EagerMetadata, Violation> {
        Ok(match parts.iter().all(|part| part.turn.tree) {
            true => EagerMetadata::Trees(trees::trees(parts)?),
            false => EagerMetadata::Step(Box::new(world.metadata(parts)?)),
        })
    }

    fn begin<'a>(
        &'a mut self,
        world: &World,
        stream: &'a Stream,
        metadata: &'a mut EagerMetadata,
    ) -> Result<EagerStep<'a, T>, Error> {
        Ok(match metadata {
            EagerMetadata::Step(metadata) => EagerStep::Step(Box::new(self.0.begin(stream, metadata)?)),
            EagerMetadata::Trees(of) => {
                let verification = TreeVerification::new(self.0.shape());
                let requests = trees::requests(world, of);
                let step = verification.begin(stream, self.0.cache(), &requests)?;
                EagerStep::Trees(Box::new(step))
            }
        })
    }

    fn accept(world: &mut World, parts: &[Part]) -> Rows {
        match parts.iter().all(|part| part.turn.tree) {
            true => trees::accept(world, parts),
            false => world.accept(parts),
        }
    }

    fn forward(
        step: &mut EagerStep<'_, T>,
        stream: &Stream,
        layer: usize,
        inputs: &Inputs<T>,
    ) -> Result<Vec<T>, Error> {
        Ok(match step {
            EagerStep::Step(step) => step.forward(layer, inputs.of_layer())?.download(stream)?,
            EagerStep::Trees(step) => step.forward(layer, inputs.of_trees(NODES).of_layer())?.download(stream)?,
        })
    }

    fn end(step: EagerStep<'_, T>) -> Result<(), Error> {
        match step {
            EagerStep::Step(step) => step.end(),
            EagerStep::Trees(step) => step.end(),
        }
    }

    fn attention(&mut self) -> Option<&mut Attention<T>> {
        Some(&mut self.0)
    }
}

/// Steps replayed from graphs.
impl<T: Half> Lane<T> for AttentionGraphs<T> {
    type Metadata = AttentionMetadata;
    type Step<'a> = Step<'a, T>;

    const NAME: &'static str = "graph step";

    fn metadata(&self, world: &World, parts: &[Part]) -> Result<AttentionMetadata, Violation> {
        world.metadata(parts)
    }

    fn begin<'a>(
        &'a mut self,
        _: &World,
        stream: &'a Stream,
        metadata: &'a mut AttentionMetadata,
    ) -> Result<Step<'a, T>, Error> {
        AttentionGraphs::begin(self, stream, metadata)
    }

    fn forward(step: &mut Step<'_, T>, stream: &Stream, layer: usize, inputs: &Inputs<T>) -> Result<Vec<T>, Error> {
        let output = step.forward(layer, inputs.of_layer())?;
        Ok(output.download(stream)?)
    }

    fn end(step: Step<'_, T>) -> Result<(), Error> {
        step.end()
    }
}
