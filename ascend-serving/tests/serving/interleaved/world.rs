//! What a caller knows: its sequences, the tokens of each by name, and which of them steps have computed.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use ascend_serving::kv::{Audit, AuditRequest, BlockCopy, BlockPool, Sequence};
use ascend_serving::{
    AttentionMetadata, BatchRequest, BatchSettings, Causality, Error, PrefixCache, Violation,
};

use super::{Act, Turn};

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

/// The tokens of a request in a step.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub id: u64,
    pub cached: usize,
    pub len: usize,
    pub turn: Turn,
}

/// A row of a step, and the tokens that it sees: its own is the last.
pub struct Row {
    pub row: usize,
    pub names: Vec<u64>,
    /// The first one that it sees.
    pub from: usize,
}

/// The rows of a step that was accepted.
pub struct Rows {
    /// Its tokens.
    pub fed: Vec<u64>,
    pub checked: Vec<Row>,
    /// Each request with its tokens.
    parts: Vec<(Part, Vec<u64>)>,
}

pub struct World {
    pub settings: BatchSettings,
    pub pool: BlockPool,
    pub requests: Vec<Request>,
    prefixes: PrefixCache<u64>,
    window: Option<usize>,
    named: u64,
    /// The engines with a step in progress.
    pub busy: BTreeSet<usize>,
    /// How often each kind of act was accepted, each rule met, and rows compared.
    pub seen: BTreeMap<&'static str, usize>,
}

impl World {
    pub fn new(pool: &BlockPool, settings: BatchSettings, causality: Causality) -> Self {
        Self {
            settings,
            pool: pool.clone(),
            requests: Vec::new(),
            prefixes: PrefixCache::new(pool, causality).unwrap(),
            window: causality.window().map(NonZeroUsize::get),
            named: 1,
            busy: BTreeSet::new(),
            seen: BTreeMap::new(),
        }
    }

    pub fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Counts an act that was accepted, or the rule that refused it.
    pub fn note<R, E: Into<Error>>(
        &mut self,
        what: &'static str,
        outcome: Result<R, E>,
    ) -> Option<R> {
        match outcome.map_err(Into::into) {
            Ok(done) => {
                self.count(what);
                Some(done)
            }
            Err(Error::Violation(refused)) => {
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
        self.requests.push(Request {
            id,
            sequence,
            names,
            done,
            open: 0,
            copies: Vec::new(),
        });
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

    fn by_id_mut(&mut self, id: u64) -> Option<&mut Request> {
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

    /// Grows a request without queueing copies.
    pub fn grow_alone(&mut self, at: usize, tokens: usize) {
        let grown = self.requests[at].sequence.grow(tokens);
        if let Some(grown) = self.note("grow alone", grown) {
            self.requests[at].copies.extend(grown.copies);
            self.grown(at);
        }
    }

    /// Does what needs no engine.
    pub fn act(&mut self, act: &Act) {
        match *act {
            Act::New if self.requests.len() < 4 => {
                let sequence = Sequence::new(&self.pool);
                self.add(sequence, Vec::new(), 0);
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
                let Request {
                    sequence,
                    names,
                    done,
                    ..
                } = &self.requests[at];
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
                let Request {
                    sequence,
                    names,
                    done,
                    ..
                } = &self.requests[at];
                let done = if request % 3 == 0 {
                    sequence.len()
                } else {
                    *done
                };
                let inserted = self.prefixes.insert(b"", &names[..done], sequence);
                self.note("insert", inserted);
            }
            Act::Hit(request) if self.requests.len() < 6 => {
                let at = self.at(request);
                let mut names = self.requests[at].names.clone();
                let next = self.name();
                names.push(next);
                let hit = self.prefixes.share(b"", &names).unwrap();
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

    /// The requests of a step, each once, by the number of tokens before the step.
    pub fn parts(
        &mut self,
        turns: &[Turn],
        cached: impl Fn(&Turn, &Request) -> usize,
    ) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for turn in turns {
            let at = self.at(turn.request);
            let request = &self.requests[at];
            let (id, len, turn) = (request.id, request.sequence.len(), *turn);
            if len > 0 && parts.iter().all(|part| part.id != id) {
                let cached = cached(&turn, request);
                parts.push(Part {
                    id,
                    cached,
                    len,
                    turn,
                });
            }
        }
        parts
    }

    /// The metadata of a step, audited.
    pub fn metadata(&self, parts: &[Part]) -> Result<AttentionMetadata, Violation> {
        let batch = parts.iter().map(|part| {
            let mut requests = self.requests.iter();
            let request = requests.find(|request| request.id == part.id).unwrap();
            let new = part.len - part.cached;
            let drafts = if part.turn.drafts { new - 1 } else { 0 };
            let of = BatchRequest::of(&request.sequence, new).drafts(drafts);
            if part.turn.recompute {
                of.recompute()
            } else {
                of
            }
        });
        let batch: Vec<_> = batch.collect();
        let metadata = AttentionMetadata::new(&batch, self.settings)?;
        let audited = batch.iter().map(|of| AuditRequest::new(of.cached, of.new));
        Audit {
            blocks: self.settings.blocks(),
            block_size: self.settings.block_size(),
            pad: self.settings.pad(),
            requests: &audited.collect::<Vec<_>>(),
            table: metadata.table(),
            slots: metadata.slots(),
        }
        .check()
        .unwrap();
        Ok(metadata)
    }

    /// The rows of a step that was accepted just now. Tokens that nothing has computed yet get their names.
    pub fn accept(&mut self, parts: &[Part]) -> Rows {
        let (mut fed, mut checked, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            let Part {
                id, cached, len, ..
            } = *part;
            let request = self
                .by_id_mut(id)
                .expect("a step began whose sequence is gone");
            assert_eq!(
                request.sequence.len(),
                len,
                "a step began whose sequence has changed"
            );
            let unnamed = if request.open == 0 {
                request.done.max(cached)..len
            } else {
                0..0
            };
            request.open += 1;
            for position in unnamed {
                let name = self.name();
                self.by_id_mut(id).unwrap().names[position] = name;
            }
            let names = self.by_id(id).unwrap().names.clone();
            let new = len - cached;
            let rows = (new > 0).then(|| [0, new / 2, new - 1]);
            for row in rows.into_iter().flatten() {
                let position = cached + row;
                let window = self.window.unwrap_or(usize::MAX);
                checked.push(Row {
                    row: fed.len() + row,
                    names: names[..=position].to_vec(),
                    from: (position + 1).saturating_sub(window),
                });
            }
            fed.extend_from_slice(&names[cached..]);
            all.push((*part, names));
        }
        Rows {
            fed,
            checked,
            parts: all,
        }
    }

    /// Notes that a step has no more layers to queue, and whether all were queued.
    pub fn close(&mut self, rows: &Rows, done: bool) {
        for (part, names) in &rows.parts {
            let Some(request) = self.by_id_mut(part.id) else {
                continue;
            };
            request.open -= 1;
            let same = names.iter().zip(&request.names).take_while(|(a, b)| a == b);
            if done {
                request.done = request.done.max(same.count());
            }
        }
    }
}
