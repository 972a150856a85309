//! Verifications of drafted trees, which read the tokens of their sequences and write none.

use ascend_attention::{Stream, Tensor};
use ascend_serving::{DraftTree, Error, TreeGraphStep, TreeGraphs, TreeRequest, Violation};

use crate::tokens::{DIM, Number};

use super::acts::{New, Turn};
use super::lanes::Lane;
use super::rows::{Part, Row, Rows};
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

impl<T: Number> Lane<T> for TreeGraphs<T> {
    type Metadata = Vec<(u64, DraftTree)>;
    type Step<'a> = TreeGraphStep<'a, T>;

    const NAME: &'static str = "tree step";
    /// Two calls are rounded before they are merged.
    const TOLERANCE: f64 = 2e-2;
    const EARLY: bool = false;

    fn parts(world: &mut World, turns: &[Turn]) -> Vec<Part> {
        world.parts(turns, |_, request| request.sequence.len())
    }

    fn metadata(&self, _: &World, parts: &[Part]) -> Result<Self::Metadata, Violation> {
        let trees = parts.iter().map(|part| {
            let tree = DraftTree::from_parents(parents(&part.turn))?;
            Ok((part.id, tree))
        });
        trees.collect()
    }

    fn begin<'a>(
        &'a mut self,
        world: &World,
        stream: &'a Stream,
        trees: &'a mut Self::Metadata,
    ) -> Result<TreeGraphStep<'a, T>, Error> {
        let requests = trees.iter().filter_map(|(id, tree)| {
            let sequence = &world.by_id(*id)?.sequence;
            let cached = sequence.len();
            Some(TreeRequest {
                sequence,
                cached,
                tree,
            })
        });
        TreeGraphs::begin(self, stream, &requests.collect::<Vec<_>>())
    }

    fn accept(world: &mut World, parts: &[Part]) -> Rows {
        let mut rows = world.accept(parts);
        for part in parts {
            let parents = parents(&part.turn);
            let own: Vec<u64> = parents.iter().map(|_| world.name()).collect();
            let before = world
                .by_id(part.id)
                .map(|request| request.names.clone())
                .unwrap();
            for node in 0..own.len() {
                let mut path = vec![own[node]];
                let mut at = node;
                while let Ok(parent) = usize::try_from(parents[at]) {
                    path.insert(0, own[parent]);
                    at = parent;
                }
                rows.checked.push(Row {
                    row: rows.fed.len() + node,
                    names: [&before[..], &path].concat(),
                    from: 0,
                });
            }
            rows.fed.extend(&own);
            rows.fed.resize(rows.fed.len().next_multiple_of(NODES), 0);
        }
        rows
    }

    fn forward(
        step: &mut TreeGraphStep<'_, T>,
        stream: &Stream,
        layer: usize,
        rows: [&Tensor<T>; 3],
    ) -> Result<Vec<T>, Error> {
        let requests = rows[0].shape()[0] / NODES;
        let [query, key, value] = rows.map(|rows| rows.reshape([requests, 1, NODES, DIM]).unwrap());
        let output = step.forward(layer, (&query, &key, &value))?;
        Ok(output.download(stream)?)
    }

    fn end(step: TreeGraphStep<'_, T>) -> Result<(), Error> {
        step.end()
    }
}
