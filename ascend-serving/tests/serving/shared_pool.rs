//! Caches that share a pool: ranks of one process with some heads each, one sequence, one growth and one metadata for
//! all.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    CrossAttention, Error, GraphLimits, GraphPool, PrefixCache, rules,
};

use crate::harness;
use crate::tokens::{DIM, dense, row};

const LAYERS: usize = 2;
const RANKS: usize = 2;
const PAD: PadPolicy = PadPolicy::SkipNegative;
/// Of a rank: two query heads over one key head.
const SHAPE: (usize, usize) = (2, 1);

struct Rank {
    at: usize,
    stream: Stream,
    attention: Attention<bf16>,
}

fn cache(stream: &Stream, blocks: usize) -> PagedKvCache<bf16> {
    let shape = CacheShape::new(LAYERS, SHAPE.1, DIM);
    PagedKvCache::new(stream.device(), blocks, 128, shape, PAD).unwrap()
}

/// Ranks whose caches have the pool of the first one.
fn ranks() -> Vec<Rank> {
    let streams: Vec<Stream> = (0..RANKS).map(|_| harness::stream()).collect();
    let mut ranks: Vec<Rank> = Vec::new();
    for (at, stream) in streams.into_iter().enumerate() {
        let own = cache(&stream, 8);
        let cache = match ranks.first() {
            Some(first) => own.with_pool(first.attention.cache().pool()).unwrap(),
            None => own,
        };
        let shape = AttentionShape::new(SHAPE.0, SHAPE.1, DIM);
        let backends = Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
        let attention = Attention::new(shape, cache, backends);
        ranks.push(Rank { at, stream, attention });
    }
    ranks
}

impl Rank {
    /// The rank's heads of tokens' queries (0), keys (1) or values (2).
    fn rows(&self, names: &[u64], layer: usize, what: u64) -> Tensor<bf16> {
        let heads = if what == 0 { SHAPE.0 } else { SHAPE.1 };
        let own = self.at * heads * DIM..(self.at + 1) * heads * DIM;
        let rows = names.iter();
        let rows = rows.flat_map(|name| row(*name, layer, what, RANKS * heads)[own.clone()].to_vec());
        let rows: Vec<bf16> = rows.collect();
        self.stream.upload(&rows, [names.len(), heads, DIM]).unwrap()
    }

    /// How far the last row of a step is away from dense attention of all heads.
    fn step(&mut self, metadata: &AttentionMetadata, names: &[u64]) -> Result<f64, Error> {
        let new = &names[names.len() - metadata.tokens()..];
        let tensors: Vec<_> = (0..LAYERS).map(|layer| [0, 1, 2].map(|what| self.rows(new, layer, what))).collect();
        let mut step = self.attention.begin(&self.stream, metadata)?;
        let mut away = 0f64;
        for (layer, [query, key, value]) in tensors.iter().enumerate() {
            let output = step.forward(layer, (query, key, value))?;
            away = away.max(distance(self.at, layer, names, &output.download(&self.stream)?));
        }
        step.end()?;
        Ok(away)
    }
}

fn distance(rank: usize, layer: usize, names: &[u64], output: &[bf16]) -> f64 {
    let width = SHAPE.0 * DIM;
    let whole = AttentionShape::new(RANKS * SHAPE.0, RANKS * SHAPE.1, DIM);
    let want = dense(names, layer, whole, |_| true);
    let got = &output[output.len() - width..];
    let both = got.iter().zip(&want[rank * width..]);
    both.map(|(got, want)| (got.to_f64() - want).abs()).fold(0.0, f64::max)
}

fn metadata(ranks: &[Rank], sequence: &Sequence, new: usize) -> AttentionMetadata {
    let settings = BatchSettings::of(ranks[0].attention.cache(), Causality::Causal);
    AttentionMetadata::new(&[BatchRequest::of(sequence, new)], settings).unwrap()
}

fn grow(ranks: &mut [Rank], sequence: &mut Sequence, tokens: usize) {
    let Rank { stream, attention, .. } = &mut ranks[0];
    attention.grow(stream, sequence, tokens).unwrap();
}

fn all(ranks: &mut [Rank], metadata: &AttentionMetadata, names: &[u64]) {
    for rank in ranks {
        let away = rank.step(metadata, names).unwrap();
        assert!(away < 8e-3, "rank {}: {away} away", rank.at);
    }
}

#[test]
fn one_sequence_and_one_metadata_serve_all_ranks() {
    let mut ranks = ranks();
    let mut sequence = Sequence::new(ranks[1].attention.cache().pool());
    let mut names: Vec<u64> = (1..=140).collect();
    grow(&mut ranks, &mut sequence, 140);
    let prompt = metadata(&ranks, &sequence, 140);
    // What one rank has computed is no prefix for all of them yet.
    let away = ranks[0].step(&prompt, &names).unwrap();
    assert!(away < 8e-3, "{away} away");
    let mut prefixes = PrefixCache::<u64>::new(ranks[0].attention.cache().pool(), Causality::Causal).unwrap();
    let early = prefixes.insert(b"", &names, &sequence).unwrap_err();
    assert_eq!(early.rule, &rules::SEQUENCE_GAP);
    assert!(early.allowed.starts_with("at most 0"), "{early}");
    all(&mut ranks[1..], &prompt, &names);
    assert_eq!(prefixes.insert(b"", &names, &sequence).unwrap(), 1);
    drop(prefixes);
    for name in 200..203 {
        grow(&mut ranks, &mut sequence, 1);
        names.push(name);
        let decode = metadata(&ranks, &sequence, 1);
        all(&mut ranks, &decode, &names);
    }

    // A fork writes into a block of its own: the rank that grew has copied it, and the other one does when it begins.
    let mut fork = sequence.fork();
    let mut other = names.clone();
    grow(&mut ranks, &mut fork, 1);
    other.push(300);
    // And a fork of a block that the other rank has still to copy.
    let mut second = fork.share_prefix(names.len()).unwrap();
    let held = ranks[0].attention.cache().pool().held_blocks();
    grow(&mut ranks, &mut second, 1);
    assert_eq!(ranks[0].attention.cache().pool().held_blocks(), held + 1);
    let mut third = names.clone();
    third.push(400);
    let of_fork = metadata(&ranks, &fork, 1);
    let decode = metadata(&ranks, &second, 1);
    all(&mut ranks, &decode, &third);
    all(&mut ranks, &of_fork, &other);
    // And the first goes on as if nothing was.
    grow(&mut ranks, &mut sequence, 1);
    names.push(500);
    let decode = metadata(&ranks, &sequence, 1);
    all(&mut ranks, &decode, &names);

    let pool = ranks[0].attention.cache().pool().clone();
    drop((sequence, fork, second));
    for rank in &ranks {
        rank.stream.synchronize().unwrap();
    }
    assert_eq!((pool.held_blocks(), pool.free_blocks()), (0, 8));
}

#[test]
fn each_rank_knows_what_it_has_computed() {
    let mut ranks = ranks();
    let mut sequence = Sequence::new(ranks[0].attention.cache().pool());
    let mut names: Vec<u64> = (1..=10).collect();
    grow(&mut ranks, &mut sequence, 10);
    let prompt = metadata(&ranks, &sequence, 10);
    ranks[0].step(&prompt, &names).unwrap();
    grow(&mut ranks, &mut sequence, 1);
    names.push(20);
    let decode = metadata(&ranks, &sequence, 1);
    ranks[0].step(&decode, &names).unwrap();
    let behind = ranks[1].step(&decode, &names).unwrap_err();
    assert!(behind.breaks(&rules::SEQUENCE_GAP), "{behind}");
    let computed = [0, 1].map(|rank: usize| {
        let cache = ranks[rank].attention.cache();
        cache.computed_tokens(&sequence).unwrap()
    });
    assert_eq!(computed, [11, 0]);
    let both = metadata(&ranks, &sequence, 11);
    all(&mut ranks[1..], &both, &names);
}

#[test]
fn graphs_of_each_rank_replay_one_metadata() {
    let mut ranks = ranks();
    let limits = GraphLimits::new([1], 256);
    let mut sequence = Sequence::new(ranks[0].attention.cache().pool());
    let names: Vec<u64> = (1..=20).collect();
    grow(&mut ranks, &mut sequence, 20);
    let prompt = metadata(&ranks, &sequence, 20);
    all(&mut ranks, &prompt, &names);
    let mut fork = sequence.fork();
    grow(&mut ranks, &mut fork, 1);
    let mut names = names;
    names.push(30);
    let mut decode = metadata(&ranks, &fork, 1);
    for rank in &mut ranks {
        let stream = &rank.stream;
        let mut graphs = rank.attention.capture(stream, Causality::Causal, &limits).unwrap();
        if rank.at > 0 {
            let uncopied = graphs.begin(stream, &mut decode).map(drop).unwrap_err();
            assert!(uncopied.breaks(&rules::BLOCK_UNCOPIED), "{uncopied}");
            rank.attention.cache_mut().queue_pending_copies(stream, &fork).unwrap();
        }
        let tensors: Vec<_> = (0..LAYERS).map(|layer| [0, 1, 2].map(|what| rank.rows(&[30], layer, what))).collect();
        let mut step = graphs.begin(&rank.stream, &mut decode).unwrap();
        for (layer, [query, key, value]) in tensors.iter().enumerate() {
            let output = step.forward(layer, (query, key, value)).unwrap();
            let output = output.download(&rank.stream).unwrap();
            let away = distance(rank.at, layer, &names, &output);
            assert!(away < 8e-3, "rank {}: {away} away", rank.at);
        }
        step.end().unwrap();
    }
}

/// Graphs of a pool count their tokens in every cache, and encoders write one.
#[test]
fn what_is_for_one_cache_is_refused_over_a_shared_pool() {
    let mut ranks = ranks();
    let mut sequence = Sequence::new(ranks[0].attention.cache().pool());
    let names: Vec<u64> = (1..=20).collect();
    grow(&mut ranks, &mut sequence, 20);
    let prompt = metadata(&ranks, &sequence, 20);
    all(&mut ranks, &prompt, &names);
    let mut fork = sequence.fork();
    grow(&mut ranks, &mut fork, 1);
    let mut decode = metadata(&ranks, &fork, 1);
    let stream = &ranks[1].stream;
    let mut graphs = GraphPool::capture(stream.device(), &[1], |_| Ok(()), |_, _, ()| Ok(())).unwrap();
    let uncopied = graphs.launch(stream, &mut decode, |(), _| Ok(())).map(drop);
    assert!(uncopied.unwrap_err().breaks(&rules::BLOCK_UNCOPIED));

    let first = cache(stream, 8);
    let second = cache(stream, 8).with_pool(first.pool()).unwrap();
    let shape = AttentionShape::new(SHAPE.0, SHAPE.1, DIM);
    let mut cross = CrossAttention::new(shape, first).unwrap();
    let mut encoded = Sequence::new(second.pool());
    let refused = cross.encode(stream, &mut [(&mut encoded, 3)]).map(drop);
    assert!(refused.unwrap_err().breaks(&rules::POOL_SHARED));
    drop(second);
    assert!(cross.encode(stream, &mut [(&mut encoded, 3)]).is_ok());
}

#[test]
fn caches_that_cannot_share_are_refused() {
    let stream = harness::stream();
    let first = cache(&stream, 8);
    let other = cache(&stream, 9).with_pool(first.pool()).unwrap_err();
    assert_eq!(other.rule, &rules::POOL_SHARED);
    let second = cache(&stream, 8).with_pool(first.pool()).unwrap();
    assert_eq!(second.pool().id(), first.pool().id());
    let mut sequence = Sequence::new(first.pool());
    let _ = sequence.grow(1).unwrap();
    let late = cache(&stream, 8).with_pool(first.pool()).unwrap_err();
    assert!(late.rule == &rules::POOL_SHARED && late.given.contains("1 held"), "{late}");
    drop(sequence);
    assert!(cache(&stream, 8).with_pool(first.pool()).is_ok());
}
