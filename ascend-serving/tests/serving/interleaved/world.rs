//! What a caller knows: its sequences, the tokens of each by name, and which of them steps have computed.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use ascend_serving::kv::{BlockCopy, BlockPool, Sequence};
use ascend_serving::{BatchSettings, Causality, Error, PrefixCache};

use super::acts::Act;
use super::stored::Stored;

/// A sequence with its tokens.
pub struct Request {
    /// Never used again.
    pub id: u64,
    pub sequence: Sequence,
    pub names: Vec<u64>,
    /// Tokens that every layer of some cache has, as far as the caller knows.
    pub done: usize,
    /// Steps in progress.
    pub open: usize,
    /// Copies that are still to be queued.
    pub copies: Vec<BlockCopy>,
}

pub struct World {
    pub stored: Stored,
    pub settings: BatchSettings,
    pub pool: BlockPool,
    pub requests: Vec<Request>,
    prefixes: PrefixCache<u64>,
    pub window: Option<usize>,
    named: u64,
    /// The engines with a step in progress.
    pub busy: BTreeSet<usize>,
    /// What was refused last.
    pub refused: String,
    /// How often each kind of act was accepted, each rule met, and rows compared.
    pub seen: BTreeMap<&'static str, usize>,
}

impl World {
    pub fn new(stored: Stored, pool: &BlockPool, settings: BatchSettings, causality: Causality) -> Self {
        Self {
            stored,
            settings,
            pool: pool.clone(),
            requests: Vec::new(),
            prefixes: PrefixCache::new(pool, causality).unwrap(),
            window: causality.window().map(NonZeroUsize::get),
            named: 1,
            busy: BTreeSet::new(),
            refused: String::new(),
            seen: BTreeMap::new(),
        }
    }

    pub fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Counts an act that was accepted, or the rule that refused it.
    pub fn note<R, E: Into<Error>>(&mut self, what: &'static str, outcome: Result<R, E>) -> Option<R> {
        match outcome.map_err(Into::into) {
            Ok(done) => {
                self.count(what);
                Some(done)
            }
            Err(Error::Violation(refused)) => {
                self.refused = refused.to_string();
                self.count(refused.rule.id);
                None
            }
            Err(Error::NoBackend { rules, .. }) => {
                rules.iter().for_each(|rule| self.count(rule.id));
                None
            }
            Err(other) => panic!("{what}: {other}"),
        }
    }

    pub fn name(&mut self) -> u64 {
        self.named += 1;
        self.named
    }

    fn add(&mut self, sequence: Sequence, names: Vec<u64>, done: usize) {
        let id = self.name();
        self.requests.push(Request { id, sequence, names, done, open: 0, copies: Vec::new() });
    }

    /// The request that a number stands for, which begins if there is none.
    pub fn at(&mut self, request: usize) -> usize {
        if self.requests.is_empty() {
            self.act(&Act::New);
        }
        request % self.requests.len()
    }

    /// A request's tokens, and how many of them are not computed.
    pub fn lengths(&self, at: usize) -> [usize; 2] {
        let Request { sequence, done, .. } = &self.requests[at];
        [sequence.len(), sequence.len() - done.min(&sequence.len())]
    }

    pub fn by_id(&self, id: u64) -> Option<&Request> {
        self.requests.iter().find(|request| request.id == id)
    }

    pub fn by_id_mut(&mut self, id: u64) -> Option<&mut Request> {
        self.requests.iter_mut().find(|request| request.id == id)
    }

    /// Names the tokens that a request grew by.
    pub fn grown(&mut self, at: usize) {
        while self.requests[at].names.len() < self.requests[at].sequence.len() {
            let name = self.name();
            self.requests[at].names.push(name);
        }
    }

    /// Cuts a request.
    pub fn truncate(&mut self, at: usize, tokens: usize) {
        let cut = self.requests[at].sequence.truncate(tokens);
        if self.note("truncate", cut).is_some() {
            let request = &mut self.requests[at];
            request.names.truncate(tokens);
            request.done = request.done.min(tokens);
        }
    }

    /// Does what needs no engine.
    pub fn act(&mut self, act: &Act) {
        match *act {
            Act::New if self.requests.len() < 4 => {
                let sequence = Sequence::new(&self.pool);
                self.add(sequence, Vec::new(), 0);
            }
            Act::GrowAlone(request, tokens) => {
                let at = self.at(request);
                let grown = self.requests[at].sequence.grow(tokens);
                if let Some(grown) = self.note("grow alone", grown) {
                    self.requests[at].copies.extend(grown.copies);
                    self.grown(at);
                }
            }
            Act::Truncate(request, tokens) => {
                let at = self.at(request);
                let request = &mut self.requests[at];
                let len = request.sequence.len();
                let tokens = match tokens % 12 {
                    0 => 0,
                    1 | 2 => request.done,
                    3 => tokens % (len + 1),
                    few @ 4..8 => len.saturating_sub(few - 3),
                    few => (118 + few).min(len),
                };
                self.truncate(at, tokens);
            }
            Act::Fork(request, tokens) if self.requests.len() < 6 => {
                let at = self.at(request);
                let Request { sequence, names, done, .. } = &self.requests[at];
                let (len, done) = (sequence.len(), *done);
                let tokens = match tokens % 4 {
                    0 => len,
                    1 => done,
                    2 => len.saturating_sub(1),
                    _ => tokens % (len + 1),
                };
                let names = names[..tokens].to_vec();
                let fork = match tokens == len {
                    true => Ok(sequence.fork()),
                    false => sequence.share_prefix(tokens),
                };
                if let Some(fork) = self.note("fork", fork) {
                    self.add(fork, names, done.min(tokens));
                }
            }
            Act::End(request) if !self.requests.is_empty() => {
                let at = request % self.requests.len();
                self.requests.swap_remove(at);
                self.count("end");
            }
            Act::Slide(request, tokens) => {
                let at = self.at(request);
                let request = &mut self.requests[at];
                let len = request.sequence.len();
                let first = match self.window {
                    Some(window) => (len + 1).saturating_sub(window).min(len),
                    // Its later steps are refused.
                    None if tokens % 8 == 0 => len,
                    None => return,
                };
                let slid = request.sequence.drop_before(first);
                self.note("slide", slid);
            }
            Act::Insert(request) => {
                let at = self.at(request);
                let Request { sequence, names, done, .. } = &self.requests[at];
                let done = if request % 3 == 0 { sequence.len() } else { *done };
                let inserted = self.prefixes.insert(b"", &names[..done], sequence);
                self.note("insert", inserted);
            }
            Act::Hit(request) if self.requests.len() < 6 => {
                let at = self.at(request);
                let mut names = self.requests[at].names.clone();
                let next = self.name();
                names.push(next);
                let hit = self.prefixes.share(b"", &names);
                if hit.is_empty() {
                    return;
                }
                self.count("hit");
                let len = hit.len();
                names.truncate(len);
                self.add(hit, names, len);
            }
            Act::Evict(blocks) => {
                let evicted = self.prefixes.evict(0, blocks % 3);
                self.note("evict", evicted);
            }
            _ => {}
        }
    }
}
