//! Verifications of drafted trees, which read the tokens of their sequences and write none.

use ascend_attention::Stream;
use ascend_serving::{DraftTree, Error, TreeGraphs, TreeRequest, TreeStep, Violation};

use crate::harness::reference::Half;

use super::acts::{New, Turn};
use super::lanes::Lane;
use super::rows::{Part, Row, Rows};
use super::stored::{Inputs, Stored};
use super::world::World;

/// Most nodes of a tree.
pub const NODES: usize = 3;

/// The parents of the nodes of a request's tree.
fn parents(turn: &Turn) -> &'static [i64] {
    match turn.new {
        New::Rest => &[-1, 0, 0],
        New::One => &[-1],
        New::Any(_) => &[-1, 0, 1],
    }
}

/// The requests of a verification, each with its tree.
pub type Trees = Vec<(Part, DraftTree)>;

/// The nodes of a turn's tree that its sequence has: over latents all.
pub fn nodes_of(stored: Stored, turn: &Turn) -> usize {
    match stored {
        Stored::Latents => parents(turn).len(),
        Stored::Heads | Stored::Quantised => 0,
    }
}

/// The requests of a verification.
pub fn parts(world: &mut World, turns: &[Turn]) -> Vec<Part> {
    let stored = world.stored;
    world.parts(turns, |turn, request| {
        let tokens = request.sequence.len();
        tokens.saturating_sub(nodes_of(stored, turn))
    })
}

pub fn trees(parts: &[Part]) -> Result<Trees, Violation> {
    let trees = parts.iter().map(|part| {
        let tree = DraftTree::from_parents(parents(&part.turn))?;
        Ok((*part, tree))
    });
    trees.collect()
}

pub fn requests<'a>(world: &'a World, trees: &'a Trees) -> Vec<TreeRequest<'a>> {
    let requests = trees.iter().filter_map(|(part, tree)| {
        Some(TreeRequest { sequence: &world.by_id(part.id)?.sequence, cached: part.cached, tree })
    });
    requests.collect()
}

/// The rows of a verification that was accepted just now.
pub fn accept(world: &mut World, parts: &[Part]) -> Rows {
    let reading = parts.iter().map(|part| Part { cached: part.len, ..*part });
    let mut rows = world.accept(&reading.collect::<Vec<_>>());
    // Two calls are rounded before they are merged.
    rows.tolerance = 2e-2;
    for part in parts {
        let parents = parents(&part.turn);
        let mut before = world.by_id(part.id).unwrap().names.clone();
        let mut own = before.split_off(part.cached);
        own.resize_with(parents.len(), || world.name());
        for node in 0..own.len() {
            let mut path = vec![own[node]];
            let mut at = node;
            while let Ok(parent) = usize::try_from(parents[at]) {
                path.insert(0, own[parent]);
                at = parent;
            }
            rows.checked.push(Row { row: rows.fed.len() + node, names: [&before[..], &path].concat(), from: 0 });
        }
        rows.fed.extend(&own);
        rows.fed.resize(rows.fed.len().next_multiple_of(NODES), 0);
    }
    rows
}

/// Verifications replayed from graphs.
impl<T: Half> Lane<T> for TreeGraphs<T> {
    type Metadata = Trees;
    type Step<'a> = TreeStep<'a, T>;

    const NAME: &'static str = "tree step";

    fn verifies(_: &[Turn]) -> bool {
        true
    }

    fn parts(world: &mut World, turns: &[Turn]) -> Vec<Part> {
        parts(world, turns)
    }

    fn metadata(&self, _: &World, parts: &[Part]) -> Result<Trees, Violation> {
        trees(parts)
    }

    fn begin<'a>(
        &'a mut self,
        world: &World,
        stream: &'a Stream,
        trees: &'a mut Trees,
    ) -> Result<TreeStep<'a, T>, Error> {
        TreeGraphs::begin(self, stream, &requests(world, trees))
    }

    fn accept(world: &mut World, parts: &[Part]) -> Rows {
        accept(world, parts)
    }

    fn forward(step: &mut TreeStep<'_, T>, stream: &Stream, layer: usize, inputs: &Inputs<T>) -> Result<Vec<T>, Error> {
        let output = step.forward(layer, inputs.of_trees(NODES).of_layer())?;
        Ok(output.download(stream)?)
    }

    fn end(step: TreeStep<'_, T>) -> Result<(), Error> {
        step.end()
    }
}
