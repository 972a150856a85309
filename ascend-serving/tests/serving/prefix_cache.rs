//! Prefixes found by their tokens: against a slow model of the tree, and attention over a hit against one dense pass.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::num::NonZeroUsize;

use crate::acts::config;
use crate::harness;
use crate::tokens::{DIM, dense, packed};
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionShape, Backend, Backends, BatchRequest, Causality, LayerGroup, PrefixCache, StatePolicy, rules,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const BLOCK: usize = 4;
const BLOCKS: usize = 14;

/// A token whose hash is that of every other one: what is found is found by comparing tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Colliding(u8);

impl Hash for Colliding {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// A request: what it holds, and the tokens that it holds.
struct Request {
    salt: u8,
    tokens: Vec<Colliding>,
    sequence: Sequence,
}

/// A block by all the tokens up to its end.
struct Entry {
    salt: u8,
    tokens: Vec<Colliding>,
    block: usize,
    used: usize,
}

/// The tree as a list, looked through from the beginning for every question.
#[derive(Default)]
struct SlowModel {
    entries: Vec<Entry>,
    now: usize,
}

impl SlowModel {
    fn at(&mut self, salt: u8, tokens: &[Colliding]) -> Option<&mut Entry> {
        let same = |entry: &&mut Entry| entry.salt == salt && entry.tokens == tokens;
        self.entries.iter_mut().find(same)
    }

    /// The blocks of the longest prefix without the last token.
    fn hit(&mut self, salt: u8, tokens: &[Colliding], touch: bool) -> Vec<usize> {
        self.now += usize::from(touch);
        let now = self.now;
        let mut blocks = Vec::new();
        for end in (BLOCK..tokens.len()).step_by(BLOCK) {
            let Some(entry) = self.at(salt, &tokens[..end]) else {
                break;
            };
            if touch {
                entry.used = now;
            }
            blocks.push(entry.block);
        }
        blocks
    }

    fn insert(&mut self, salt: u8, tokens: &[Colliding], row: &[usize]) -> usize {
        self.now += 1;
        let (now, before) = (self.now, self.entries.len());
        for (end, block) in (BLOCK..=tokens.len()).step_by(BLOCK).zip(row) {
            match self.at(salt, &tokens[..end]) {
                Some(entry) => entry.used = now,
                None => self.entries.push(Entry { salt, tokens: tokens[..end].to_vec(), block: *block, used: now }),
            }
        }
        self.entries.len() - before
    }

    /// What would go, one block after the other, while sequences hold some.
    fn victims(&self, held: &BTreeSet<usize>, wanted: usize) -> Vec<usize> {
        let mut left: Vec<&Entry> = self.entries.iter().collect();
        let mut victims = Vec::new();
        while victims.len() < wanted {
            let leaf = |entry: &&&Entry| {
                let child = |other: &&Entry| {
                    other.salt == entry.salt
                        && other.tokens.len() > entry.tokens.len()
                        && other.tokens.starts_with(&entry.tokens)
                };
                !left.iter().any(child) && !held.contains(&entry.block)
            };
            let oldest = left.iter().filter(leaf);
            let oldest = oldest.min_by_key(|e| (e.used, std::cmp::Reverse(e.tokens.len())));
            let Some(block) = oldest.map(|entry| entry.block) else {
                break;
            };
            left.retain(|entry| entry.block != block);
            victims.push(block);
        }
        victims
    }
}

#[derive(Clone, Debug)]
enum Act {
    Begin(u8, Vec<u8>),
    Insert(usize),
    Fork(usize),
    Grow(usize, Vec<u8>),
    Truncate(usize, usize),
    End(usize),
    Evict(usize),
    /// Whether a step that reads blocks is in flight.
    Step(bool),
}

fn act() -> impl Strategy<Value = Act> {
    let tokens = |most: usize| prop::collection::vec(0u8..2, 0..most);
    prop_oneof![
        5 => (0u8..2, tokens(20)).prop_map(|(salt, prompt)| Act::Begin(salt, prompt)),
        5 => any::<usize>().prop_map(Act::Insert),
        2 => any::<usize>().prop_map(Act::Fork),
        3 => (any::<usize>(), tokens(6)).prop_map(|(r, more)| Act::Grow(r, more)),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(r, n)| Act::Truncate(r, n)),
        3 => any::<usize>().prop_map(Act::End),
        3 => (0usize..6).prop_map(Act::Evict),
        2 => any::<bool>().prop_map(Act::Step),
    ]
}

/// Requests over a pool, the cache of their prefixes and the model of it.
struct Server {
    pool: BlockPool,
    prefixes: PrefixCache<Colliding>,
    model: SlowModel,
    requests: Vec<Request>,
    /// What each slot holds: the tokens up to it, of which keys and values are made.
    slots: Vec<(u8, Vec<Colliding>)>,
}

impl Server {
    fn held(&self) -> BTreeSet<usize> {
        let rows = self.requests.iter().map(|request| request.sequence.row());
        rows.flatten().copied().collect()
    }

    /// Makes room by evicting what is missing, and writes the tokens; whether there was room.
    fn grow(&mut self, at: usize, more: &[u8]) -> Result<bool, TestCaseError> {
        let request = &mut self.requests[at];
        let len = request.sequence.len() + more.len();
        let wanted = len.div_ceil(BLOCK) - request.sequence.row().len() + 1;
        let missing = wanted.saturating_sub(self.pool.free_blocks());
        self.evict(missing)?;
        let request = &mut self.requests[at];
        let Ok(grown) = request.sequence.grow(more.len()) else {
            return Ok(false);
        };
        for copy in &grown.copies {
            for place in 0..BLOCK {
                let from = self.slots[copy.from.id() * BLOCK + place].clone();
                self.slots[copy.to * BLOCK + place] = from;
            }
            copy.copied().unwrap();
        }
        for (slot, token) in grown.slots.iter().zip(more) {
            request.tokens.push(Colliding(*token));
            self.slots[*slot as usize] = (request.salt, request.tokens.clone());
        }
        Ok(true)
    }

    fn evict(&mut self, wanted: usize) -> Result<(), TestCaseError> {
        let victims = self.model.victims(&self.held(), wanted);
        prop_assert_eq!(&self.prefixes.would_evict(0, wanted).unwrap(), &victims);
        prop_assert_eq!(self.prefixes.evict(0, wanted), Ok(victims.len()));
        (self.model.entries).retain(|entry| !victims.contains(&entry.block));
        Ok(())
    }

    fn act(&mut self, act: &Act) -> Result<(), TestCaseError> {
        let many = self.requests.len();
        match act {
            Act::Begin(salt, prompt) => {
                let tokens: Vec<Colliding> = prompt.iter().copied().map(Colliding).collect();
                let seen = self.model.hit(*salt, &tokens, false);
                let hit = self.prefixes.hit_len(&[*salt], &tokens);
                prop_assert_eq!(hit, seen.len() * BLOCK);
                let sequence = self.prefixes.share(&[*salt], &tokens);
                let shared = self.model.hit(*salt, &tokens, true);
                prop_assert_eq!(sequence.row(), &shared[..]);
                prop_assert_eq!(sequence.len(), hit);
                self.requests.push(Request { salt: *salt, tokens: tokens[..hit].to_vec(), sequence });
                if !self.grow(many, &prompt[hit..])? {
                    self.requests.pop();
                }
            }
            Act::Evict(wanted) => self.evict(*wanted)?,
            Act::Step(_) => {}
            _ if many == 0 => {}
            Act::Insert(r) => {
                let Request { salt, tokens, sequence } = &self.requests[r % many];
                let added = self.prefixes.insert(&[*salt], tokens, sequence).unwrap();
                prop_assert_eq!(added, self.model.insert(*salt, tokens, sequence.row()));
            }
            Act::Fork(r) => {
                let request = &self.requests[r % many];
                self.requests.push(Request {
                    salt: request.salt,
                    tokens: request.tokens.clone(),
                    sequence: request.sequence.fork(),
                });
            }
            Act::Grow(r, more) => {
                self.grow(r % many, more)?;
            }
            Act::Truncate(r, tokens) => {
                let request = &mut self.requests[r % many];
                let tokens = tokens % (request.tokens.len() + 1);
                request.sequence.truncate(tokens).unwrap();
                request.tokens.truncate(tokens);
            }
            Act::End(r) => drop(self.requests.swap_remove(r % many)),
        }
        self.check()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for request in &self.requests {
            for position in 0..request.tokens.len() {
                let slot = request.sequence.slot(position).unwrap();
                let (salt, tokens) = &self.slots[slot];
                prop_assert_eq!(*salt, request.salt);
                prop_assert_eq!(&tokens[..], &request.tokens[..=position]);
            }
        }
        let mut held = self.held();
        let all = self.model.victims(&held, usize::MAX);
        let available = self.pool.free_blocks() + all.len();
        prop_assert_eq!(self.prefixes.available_blocks(0).unwrap(), available);
        held.extend(self.model.entries.iter().map(|entry| entry.block));
        prop_assert_eq!(self.prefixes.cached_blocks(0).unwrap(), self.model.entries.len());
        prop_assert_eq!(self.pool.held_blocks(), held.len());
        let back = self.pool.free_blocks() + self.pool.waiting_blocks();
        prop_assert_eq!(back, BLOCKS - held.len());
        Ok(())
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn the_prefix_cache_is_a_list_of_prefixes(acts in prop::collection::vec(act(), 1..60)) {
        let pool = BlockPool::new(BLOCKS, BLOCK, PadPolicy::SkipNegative).unwrap();
        let mut server = Server {
            prefixes: PrefixCache::new(&pool, Causality::Causal).unwrap(),
            model: SlowModel::default(),
            requests: Vec::new(),
            slots: vec![(9, Vec::new()); BLOCKS * BLOCK],
            pool: pool.clone(),
        };
        let stream = harness::stream();
        let mut lease = None;
        for act in &acts {
            match act {
                Act::Step(true) if lease.is_none() => lease = Some(pool.begin_step(&stream)),
                Act::Step(false) => {
                    lease = None;
                    stream.synchronize().unwrap();
                }
                _ => {}
            }
            let free = pool.free_blocks();
            server.act(act)?;
            // What is given back while a step may read it is not handed out again.
            prop_assert!(lease.is_none() || pool.free_blocks() <= free);
        }
        drop((server, lease));
        stream.synchronize().unwrap();
        prop_assert_eq!(pool.held_blocks(), 0);
        prop_assert_eq!(pool.free_blocks(), BLOCKS);
    }
}

#[test]
fn a_sequence_that_cannot_lend_its_blocks_is_refused() {
    let pool = BlockPool::new(BLOCKS, BLOCK, PadPolicy::SkipNegative).unwrap();
    let mut prefixes = PrefixCache::new(&pool, Causality::Causal).unwrap();
    let tokens: Vec<u32> = (0..9).collect();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(8).unwrap();
    let mut refused = |tokens: &[u32], sequence: &Sequence| {
        let refused = prefixes.insert(b"", tokens, sequence).unwrap_err();
        refused.rule
    };
    assert_eq!(refused(&tokens, &sequence), &rules::SEQUENCE_LENGTH);
    let other = BlockPool::new(BLOCKS, BLOCK, PadPolicy::SkipNegative).unwrap();
    let mut foreign = Sequence::new(&other);
    let _ = foreign.grow(9).unwrap();
    assert_eq!(refused(&tokens, &foreign), &rules::BLOCK_POOL);
    let mut fork = sequence.share_prefix(6).unwrap();
    let grown = fork.grow(2).unwrap();
    assert_eq!(refused(&tokens[..8], &fork), &rules::BLOCK_UNCOPIED);
    grown.copies[0].copied().unwrap();
    assert_eq!(prefixes.insert(b"", &tokens[..8], &fork).unwrap(), 2);
    // The last token's query is wanted.
    assert_eq!(prefixes.hit_len(b"", &tokens[..8]), 4);
    assert_eq!(prefixes.hit_len(b"", &tokens), 8);
    prefixes.clear();
    assert_eq!(prefixes.hit_len(b"", &tokens), 0);
    let encoder = PrefixCache::<u32>::new(&pool, Causality::Bidirectional);
    assert_eq!(encoder.unwrap_err().rule, &rules::PREFIX_GROUPS);
}

/// Two groups of layers, one with a window.
struct Model<'a> {
    stream: &'a Stream,
    shape: AttentionShape,
    window: usize,
    attention: Attention<bf16>,
    prefixes: PrefixCache<u64>,
    running: Vec<(Vec<u64>, Sequence)>,
    /// Tokens that were not computed again.
    hits: usize,
}

/// Layers of the model, in the windowed group where odd.
const LAYERS: usize = 3;
const LEAST: usize = 128;

impl<'a> Model<'a> {
    fn new(stream: &'a Stream, window: usize, blocks: usize) -> Self {
        let shape = AttentionShape::new(2, 1, DIM);
        let group = |layers: &[usize], causality| {
            let of = CacheShape::new(layers.len(), 1, DIM);
            let pad = PadPolicy::SkipNegative;
            let cache = PagedKvCache::new(stream.device(), blocks, LEAST, of, pad).unwrap();
            let backends = Backends::none().with(Backend::Fused);
            LayerGroup::new(layers.iter().copied(), causality, shape, cache, backends)
        };
        let keys = NonZeroUsize::new(window).unwrap();
        let groups = [group(&[0, 2], Causality::Causal), group(&[1], Causality::Window(keys))];
        let attention = Attention::of_groups(LAYERS, groups).unwrap();
        Self {
            stream,
            shape,
            window,
            prefixes: PrefixCache::of(&attention).unwrap(),
            attention,
            running: Vec::new(),
            hits: 0,
        }
    }

    /// Grows a sequence, evicting what the pools lack; whether there was room.
    fn grow(&mut self, sequence: &mut Sequence, tokens: usize) -> bool {
        for group in 0..2 {
            let pool = self.attention.groups()[group].cache().pool();
            let missing = (tokens.div_ceil(LEAST) + 1).saturating_sub(pool.free_blocks());
            self.prefixes.evict(group, missing).unwrap();
        }
        match self.attention.grow(self.stream, sequence, tokens) {
            Ok(()) => true,
            Err(error) if error.breaks(&rules::POOL_EXHAUSTED) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// A prompt of `family`, whose tokens are those of the family up to `shared` and its own behind. A decode of every
    /// request runs in the same step.
    fn step(&mut self, family: u64, shared: usize, own: usize, nth: u64) {
        let name = |place: usize| match place < shared {
            true => family * 10_000 + place as u64 + 1,
            false => 1_000_000 + nth * 10_000 + place as u64,
        };
        let prompt: Vec<u64> = (0..shared + own).map(name).collect();
        let mut sequence = self.prefixes.share(b"", &prompt);
        let hit = sequence.len();
        assert_eq!(hit % LEAST, 0);
        let mut new = Vec::new();
        for (at, (mut names, mut running)) in std::mem::take(&mut self.running).into_iter().enumerate() {
            if self.grow(&mut running, 1) {
                names.push(2_000_000 + nth * 100 + at as u64);
                self.running.push((names, running));
                new.push(1);
            }
        }
        let left = prompt.len() - hit;
        let lengths = self.running.iter().map(|(_, sequence)| (sequence, 0));
        let admitted = self.attention.admits(lengths.chain([(&sequence, left)]));
        if admitted.is_ok() && self.grow(&mut sequence, left) {
            self.hits += hit;
            self.running.push((prompt, sequence));
            new.push(left);
        }
        if !new.is_empty() {
            self.check(&new);
        }
        for (names, sequence) in &self.running {
            self.prefixes.insert(b"", names, sequence).unwrap();
        }
    }

    /// Computes a step, and compares the first and last new row of each request with a dense pass.
    fn check(&mut self, new: &[usize]) {
        let requests = self.running.iter().zip(new);
        let requests: Vec<_> = requests.map(|((_, sequence), new)| BatchRequest::of(sequence, *new)).collect();
        let policy = StatePolicy::new(true, None);
        let metadata = self.attention.metadata(&requests, policy).unwrap();
        let running = self.running.iter().zip(new);
        let names = running.flat_map(|((names, _), new)| &names[names.len() - new..]);
        let names: Vec<u64> = names.copied().collect();
        let mut results = Vec::new();
        {
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let of = |what, heads| packed(self.stream, &names, layer, what, heads);
                let (query, key, value) = (of(0, 2), of(1, 1), of(2, 1));
                results.push(step.forward(layer, (&query, &key, &value)).unwrap().clone());
            }
        }
        for (layer, result) in results.iter().enumerate() {
            let result = result.download(self.stream).unwrap();
            let mut first = 0;
            for ((names, _), new) in self.running.iter().zip(new) {
                for row in [0, new - 1] {
                    let seen = &names[..=names.len() - new + row];
                    let from = match layer % 2 {
                        1 => seen.len().saturating_sub(self.window),
                        _ => 0,
                    };
                    let want = dense(seen, layer, self.shape, |key| key >= from);
                    let got = &result[(first + row) * 2 * DIM..][..2 * DIM];
                    for (got, want) in got.iter().zip(&want) {
                        let error = (got.to_f64() - want).abs();
                        assert!(error <= 1e-2, "layer {layer}: {got}, expected {want}");
                    }
                }
                first += new;
            }
        }
    }

    /// Everything goes back.
    fn end(mut self) {
        self.running.clear();
        self.stream.synchronize().unwrap();
        let attention = &self.attention;
        let pools = attention.groups().iter().map(|of| of.cache().pool());
        for (group, pool) in pools.clone().enumerate() {
            assert_eq!(pool.held_blocks(), self.prefixes.cached_blocks(group).unwrap());
            assert_eq!(self.prefixes.available_blocks(group).unwrap(), pool.blocks());
        }
        self.prefixes.evict(1, usize::MAX).unwrap();
        self.prefixes.evict(0, usize::MAX).unwrap();
        for pool in pools {
            assert_eq!((pool.held_blocks(), pool.free_blocks()), (0, pool.blocks()));
        }
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn attention_over_a_hit_is_one_dense_pass(
        window in 1usize..300,
        blocks in 8usize..24,
        steps in prop::collection::vec((1u64..3, 0usize..400, 1usize..200, 0usize..4), 1..7),
    ) {
        let stream = harness::stream();
        let mut model = Model::new(&stream, window, blocks);
        for (nth, (family, shared, own, keep)) in steps.into_iter().enumerate() {
            model.step(family, shared, own, nth as u64);
            while model.running.len() > keep {
                drop(model.running.remove(0));
            }
        }
        model.end();
    }
}

#[test]
fn prompts_of_a_family_are_hits_in_full_and_windowed_layers() {
    let stream = harness::stream();
    for window in [1, 100, 128, 129, 200, 1000] {
        let mut model = Model::new(&stream, window, 32);
        for nth in 0..3 {
            model.step(1, 300, 40, nth);
        }
        assert_eq!(model.hits, 2 * 256, "a window of {window}");
        model.end();
    }
}

/// Blocks that are known under several salts are evicted with the last of them.
#[test]
fn blocks_that_several_salts_hold_are_evicted() {
    let pool = BlockPool::new(4, 4, PadPolicy::SkipNegative).unwrap();
    let mut prefixes = PrefixCache::<u32>::new(&pool, Causality::Causal).unwrap();
    let tokens: Vec<u32> = (0..12).collect();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(12).unwrap();
    for salt in [b"one", b"two"] {
        assert_eq!(prefixes.insert(salt, &tokens, &sequence).unwrap(), 3);
    }
    assert_eq!((prefixes.available_blocks(0).unwrap(), prefixes.evict(0, 9)), (1, Ok(0)));
    drop(sequence);
    assert_eq!(prefixes.available_blocks(0).unwrap(), 4);
    let would = prefixes.would_evict(0, 1).unwrap();
    assert_eq!((would.len(), prefixes.evict(0, 1)), (1, Ok(1)));
    assert_eq!(pool.free_blocks(), 2);
    assert_eq!(prefixes.evict(0, usize::MAX), Ok(2));
    assert_eq!((pool.free_blocks(), prefixes.cached_blocks(0).unwrap()), (4, 0));
    let refused = prefixes.evict(1, 4).unwrap_err();
    assert_eq!(refused.rule, &rules::PREFIX_GROUPS);
    // A block is taken from both, and the others stay where they are found.
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(12).unwrap();
    for salt in [b"one", b"two"] {
        prefixes.insert(salt, &tokens, &sequence).unwrap();
    }
    drop(sequence);
    assert_eq!(prefixes.evict(0, 1), Ok(1));
    for salt in [b"one", b"two"] {
        let longer: Vec<u32> = (0..13).collect();
        assert_eq!(prefixes.hit_len(salt, &longer), 8);
    }
    prefixes.clear();
}
