//! Drafted trees: two requests cache and verify trees of drafts behind their tokens, keep what was right, and go on.
//!
//! A step of each: make room for the nodes and write their keys; verify; walk the tree; move the accepted nodes
//! behind each other in the cache, and cut the sequence behind them.
//!
//! ```sh
//! cargo run --release -p ascend-serving --example 09-tree-verify
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use ascend_serving::kv::CacheWrite;
use ascend_serving::prelude::*;
use ascend_serving::{TreeRequest, TreeVerification};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// The last certain token (node 0), two guesses behind it, and guesses behind these.
const PARENTS: [i64; 8] = [-1, 0, 0, 1, 1, 2, 3, 3];

/// A request: the tokens whose keys are cached, and the one behind them.
struct Request {
    tokens: Vec<u64>,
    cached: Sequence,
    last: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
    let of = CacheShape::new(1, KV_HEADS, DIM);
    let mut cache = PagedKvCache::<f16>::new(&device, 16, 128, of, PadPolicy::SkipNegative)?;
    let pool = cache.pool().clone();

    let tree = DraftTree::from_parents(&PARENTS)?;
    let nodes = tree.nodes();
    let pairs = (0..nodes * nodes).filter(|at| tree.sees(at / nodes, at % nodes));
    println!(
        "a tree of {nodes} nodes; {:.0} % of its mask is seen",
        100.0 * pairs.count() as f64 / (nodes * nodes) as f64
    );

    let mut requests = Vec::new();
    for (first, context) in [(1u64, 700u64), (10_000, 130)] {
        let tokens: Vec<u64> = (first..first + context).collect();
        let mut cached = Sequence::new(&pool);
        store(&stream, &mut cache, &mut cached, &tokens)?;
        let last = next(&tokens);
        requests.push(Request { tokens, cached, last });
    }

    let mut time = Duration::ZERO;
    let (mut worst, mut rows, mut kept) = (0f64, 0, 0);
    for round in 1..=4 {
        // Each node's token: that of the right path, or one that is wrong.
        let drafted: Vec<Vec<u64>> = requests.iter().map(|request| draft(request, &tree)).collect();
        let upload = |what, heads| nodes_of(&stream, &drafted, what, heads);
        // The nodes are behind the cached tokens from now on, and the verification reads those in front of them.
        for (request, drafted) in requests.iter_mut().zip(&drafted) {
            store(&stream, &mut cache, &mut request.cached, drafted)?;
        }
        let verified = requests.iter().map(|request| TreeRequest {
            sequence: &request.cached,
            cached: request.tokens.len(),
            tree: &tree,
        });
        let verified: Vec<_> = verified.collect();
        let verification = TreeVerification::new(shape);
        let mut step = verification.begin(&stream, &cache, &verified)?;
        let (query, key, value) = (upload(0, HEADS)?, upload(1, KV_HEADS)?, upload(2, KV_HEADS)?);
        let begun = Instant::now();
        let output = step.forward(0, (&query, &key, &value))?.download(&stream)?;
        step.end()?;
        time += begun.elapsed();

        for (at, (request, drafted)) in requests.iter_mut().zip(&drafted).enumerate() {
            // Every node against the definition: the cached tokens, its ancestors, itself.
            for node in 0..nodes {
                let path = (0..=node).filter(|other| tree.sees(node, *other));
                let seen: Vec<u64> = path.map(|other| drafted[other]).collect();
                let seen = [request.tokens.as_slice(), &seen].concat();
                for (head, want) in dense(&seen, shape.scale).iter().enumerate() {
                    let got = &output[((at * HEADS + head) * nodes + node) * DIM..][..DIM];
                    for (got, want) in got.iter().zip(want) {
                        let error = (got.to_f64() - want).abs();
                        worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
                    }
                }
                rows += 1;
            }
            // The walk keeps the drafts that are what the model says.
            let predicted: Vec<u64> = (0..nodes)
                .map(|node| {
                    let path = (0..=node).filter(|other| tree.sees(node, *other));
                    let path: Vec<u64> = path.map(|other| drafted[other]).collect();
                    next(&[request.tokens.as_slice(), &path].concat())
                })
                .collect();
            let accepted = tree.accept_greedy(drafted, &predicted)?;
            let right: Vec<u64> = accepted.nodes.iter().map(|node| drafted[*node]).collect();
            println!("step {round}, request {at}: nodes {:?} accepted", accepted.nodes);
            kept += accepted.drafts();
            // Their keys come behind each other, and the others go.
            let root = request.tokens.len();
            cache.move_tokens(&stream, &request.cached, accepted.moves(root))?;
            request.cached.truncate(root + right.len())?;
            request.tokens.extend(right);
            request.last = accepted.bonus;
        }
    }

    println!("{kept} drafts kept in 4 steps of {:.2} ms", time.as_secs_f64() * 1e3 / 4.0);
    println!("{rows} rows against the definition, worst error {worst:.1e}");
    // The same tokens one by one.
    for request in &requests {
        let first = if request.tokens[0] == 1 { 700 } else { 130 };
        for at in first..request.tokens.len() {
            if request.tokens[at] != next(&request.tokens[..at]) {
                return Err(format!("token {at} is not what comes one by one").into());
            }
        }
    }
    drop(requests);
    if worst > 3e-3 || kept == 0 || pool.held_blocks() > 0 {
        return Err("the answer is wrong, or a block was lost".into());
    }
    println!("as expected");
    Ok(())
}

/// What the "model" puts behind these tokens.
fn next(tokens: &[u64]) -> u64 {
    let mixed = tokens.iter().rev().take(3).fold(7, |mixed: u64, token| mixed.wrapping_mul(31).wrapping_add(*token));
    1_000_000 + mixed % 1_000_000
}

/// A token for each node of the tree. The first child of a node is right every other time, and the second one
/// otherwise.
fn draft(request: &Request, tree: &DraftTree) -> Vec<u64> {
    let mut drafted = vec![request.last];
    for node in 1..tree.nodes() {
        let parent = tree.parent(node).unwrap_or(0);
        let path = (0..=parent).filter(|other| tree.sees(parent, *other));
        let path: Vec<u64> = path.map(|other| drafted[other]).collect();
        let right = next(&[request.tokens.as_slice(), &path].concat());
        let first = (1..node).all(|other| tree.parent(other) != Some(parent));
        drafted.push(if first == right.is_multiple_of(2) { right } else { right + 1 });
    }
    drafted
}

/// Caches tokens of a request.
fn store(
    stream: &Stream,
    cache: &mut PagedKvCache<f16>,
    cached: &mut Sequence,
    tokens: &[u64],
) -> Result<(), Box<dyn Error>> {
    let grown = cached.grow(tokens.len())?;
    cache.copy_blocks(stream, &grown.copies)?;
    let upload = |what| {
        let rows: Vec<f16> = tokens.iter().flat_map(|t| row(*t, what, KV_HEADS)).collect();
        stream.upload(&rows, [tokens.len(), KV_HEADS, DIM])
    };
    let (key, value) = (upload(1)?, upload(2)?);
    let write = CacheWrite::plan(cache, stream, &grown.slots, &key, &value)?;
    cache.write(stream, &write, 0, &key, &value)?;
    // Of its one layer: no step of an engine has computed them, and only computed tokens can be moved.
    Ok(cache.mark_computed(cached, cached.len())?)
}

/// Rows of all nodes, `[B, N, nodes, D]`.
fn nodes_of(stream: &Stream, drafted: &[Vec<u64>], what: u64, heads: usize) -> ascend_attention::Result<Tensor<f16>> {
    let mut data = Vec::new();
    for tokens in drafted {
        for head in 0..heads {
            let rows = tokens.iter().map(|token| row(*token, what, heads));
            rows.for_each(|row| data.extend_from_slice(&row[head * DIM..][..DIM]));
        }
    }
    let nodes = drafted.first().map_or(0, Vec::len);
    stream.upload(&data, [drafted.len(), heads, nodes, DIM])
}

/// The query (0), key (1) or value (2) of a token: numbers made from its own.
fn row(token: u64, what: u64, heads: usize) -> Vec<f16> {
    let mut state = (token * 4 + what + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut number = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        f16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..heads * DIM).map(|_| number()).collect()
}

/// Attention of the last of these tokens over all of them, for each head.
fn dense(tokens: &[u64], scale: f64) -> Vec<Vec<f64>> {
    let exact = |token: u64, what, heads| -> Vec<f64> {
        let row = row(token, what, heads);
        row.into_iter().map(|x| x.to_f64()).collect()
    };
    let query = exact(tokens.last().copied().unwrap_or(0), 0, HEADS);
    let keys: Vec<_> = tokens.iter().map(|key| exact(*key, 1, KV_HEADS)).collect();
    let values: Vec<_> = tokens.iter().map(|key| exact(*key, 2, KV_HEADS)).collect();
    let of = |head: usize| -> Vec<f64> {
        let kv = head / (HEADS / KV_HEADS) * DIM;
        let dot = |key: &Vec<f64>| -> f64 { (0..DIM).map(|d| query[head * DIM + d] * key[kv + d]).sum() };
        let weights: Vec<f64> = keys.iter().map(|key| (scale * dot(key)).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum = |d: usize| -> f64 {
            let pairs = weights.iter().zip(&values);
            pairs.map(|(weight, value)| weight * value[kv + d]).sum()
        };
        (0..DIM).map(|d| sum(d) / total).collect()
    };
    (0..HEADS).map(of).collect()
}
