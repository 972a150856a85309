//! Every node of a drafted tree gets attention over its request's cached tokens, its ancestors and itself.

mod beam;
mod latent;
mod plain;

use crate::harness::reference::{Half, Logical, row};
use approx::abs_diff_eq;
use ascend_attention::{Stream, Tensor};
use ascend_serving::DraftTree;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LAYERS: usize = 2;

#[derive(Clone, Debug)]
struct Case {
    kv_heads: usize,
    group: usize,
    /// Cached tokens and parents of the nodes of each request.
    requests: Vec<(usize, Vec<i64>)>,
    /// Rows beyond the largest tree.
    spare: usize,
    seed: u64,
}

/// What a layer of a verification is made of: a query, key and value for each cached token and node of each request.
struct Numbers<T> {
    queries: Vec<Logical<T>>,
    keys: Vec<Logical<T>>,
    values: Vec<Logical<T>>,
    /// What comes out by the definition, `[heads, nodes, dim]` of each request; a row behind its tree is left out.
    wanted: Vec<Vec<Option<Vec<f64>>>>,
}

/// Cached tokens of each request, and the tree behind them.
struct Trees {
    requests: Vec<(usize, DraftTree)>,
    /// Rows of a request's nodes, some of them behind its tree.
    nodes: usize,
}

impl Trees {
    fn of(requests: &[(usize, Vec<i64>)], spare: usize) -> Self {
        let trees = requests.iter().map(|(cached, parents)| {
            let tree = DraftTree::from_parents(parents).unwrap();
            (*cached, tree)
        });
        let requests: Vec<_> = trees.collect();
        let largest = requests.iter().map(|(_, tree)| tree.nodes()).max();
        Self { requests, nodes: largest.unwrap() + spare }
    }

    fn trees(&self) -> Vec<DraftTree> {
        self.requests.iter().map(|(_, tree)| tree.clone()).collect()
    }

    /// Numbers of every request's cached tokens and nodes.
    fn rows<T: Half>(&self, seed: u64, heads: usize, dim: usize) -> Vec<Logical<T>> {
        let each = self.requests.iter().zip(0u64..);
        each.map(|((cached, _), r)| Logical::random(seed * 31 + r, [1, heads, cached + self.nodes, dim])).collect()
    }

    /// Numbers, and every head of every node by the definition.
    fn numbers<T: Half>(&self, [queries, keys, values]: [Vec<Logical<T>>; 3], scale: f64) -> Numbers<T> {
        let of_request = |r: usize| {
            let (before, tree) = &self.requests[r];
            let [q, k, v] = [&queries, &keys, &values].map(|rows| rows[r].exact());
            let of_head = |head: usize, node: usize| {
                let sees = |key: usize| key < *before || tree.sees(node, key - before);
                let sees = (node < tree.nodes()).then_some(sees)?;
                let (wanted, _) = row(&q, &k, &v, (0, 0), head, before + node, scale, sees)?;
                Some(wanted)
            };
            let all = (0..q.heads).flat_map(|head| (0..self.nodes).map(move |node| (head, node)));
            all.map(|(head, node)| of_head(head, node)).collect()
        };
        let wanted = (0..self.requests.len()).map(of_request).collect();
        Numbers { queries, keys, values, wanted }
    }

    /// Compares every head of the nodes of the requests with these numbers, in this order, with the definition.
    fn compare<T: Half>(&self, numbers: &Numbers<T>, out: &[T], of: &[usize]) -> Result<(), TestCaseError> {
        let mut rows = out.chunks_exact(numbers.values[0].dim);
        let mut compared = 0;
        for &r in of {
            for (at, want) in numbers.wanted[r].iter().enumerate() {
                let got = rows.next().unwrap();
                let Some(want) = want else { continue };
                compared += 1;
                for (got, want) in got.iter().zip(want) {
                    let got = got.to_f64();
                    prop_assert!(
                        abs_diff_eq!(got, want, epsilon = 2.0 * T::TOLERANCE),
                        "request {r}, head {}, node {}: {got}, expected {want}",
                        at / self.nodes,
                        at % self.nodes
                    );
                }
            }
        }
        let nodes = of.iter().map(|r| self.requests[*r].1.nodes()).sum::<usize>();
        prop_assert_eq!(compared, nodes * numbers.queries[0].heads);
        Ok(())
    }
}

/// Rows of the requests with these numbers, in this order.
fn picked<T: Half>(stream: &Stream, from: &Tensor<T>, requests: &[usize]) -> Tensor<T> {
    let mut shape = from.shape().to_vec();
    shape[0] = requests.len();
    let to = Tensor::empty(stream.device(), shape).unwrap();
    for (at, r) in requests.iter().enumerate() {
        let row = from.narrow(0, *r..r + 1).unwrap();
        let place = to.narrow(0, at..at + 1).unwrap();
        place.copy_from(stream, &row).unwrap();
    }
    to
}

fn case() -> impl Strategy<Value = Case> {
    let parents = prop::collection::vec(any::<usize>(), 0..9).prop_map(|picks| {
        let drafts = picks.iter().enumerate();
        let drafts = drafts.map(|(before, pick)| (pick % (before + 1)) as i64);
        std::iter::once(-1).chain(drafts).collect::<Vec<_>>()
    });
    let cached = prop_oneof![4 => 1usize..300, 1 => Just(0)];
    let requests = prop::collection::vec((cached, parents), 1..4);
    (1usize..3, 1usize..4, requests, 0usize..3, any::<u16>()).prop_map(|(kv_heads, group, requests, spare, seed)| {
        Case { kv_heads, group, requests, spare, seed: seed.into() }
    })
}
