//! The requests of a step, and what each of its rows sees.

use ascend_serving::kv::{Audit, AuditRequest};
use ascend_serving::{AttentionMetadata, BatchRequest, Violation};

use super::acts::{New, Turn};
use super::world::{Request, World};

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
    /// The most tokens of a request.
    pub most: usize,
    /// How far a row may be away from dense attention.
    pub tolerance: f64,
    pub checked: Vec<Row>,
    /// Each request with its tokens.
    parts: Vec<(Part, Vec<u64>)>,
}

/// Steps of requests.
impl World {
    /// The requests of a step, each once, by the number of tokens before the step.
    pub fn parts(&mut self, turns: &[Turn], cached: impl Fn(&Turn, &Request) -> usize) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for turn in turns {
            let at = self.at(turn.request);
            let request = &self.requests[at];
            let (id, len, turn) = (request.id, request.sequence.len(), *turn);
            if len > 0 && parts.iter().all(|part| part.id != id) {
                let cached = cached(&turn, request);
                parts.push(Part { id, cached, len, turn });
            }
        }
        parts
    }

    /// The requests of a step that computes tokens.
    pub fn step_parts(&mut self, turns: &[Turn]) -> Vec<Part> {
        self.parts(turns, |turn, request| {
            let len = request.sequence.len();
            let cached = match turn.new {
                New::Rest => request.done,
                New::One => len - 1,
                New::Any(tokens) => tokens % len,
            };
            cached.min(len - 1)
        })
    }

    /// The metadata of a step, audited.
    pub fn metadata(&self, parts: &[Part]) -> Result<AttentionMetadata, Violation> {
        let batch = parts.iter().map(|part| {
            let request = self.by_id(part.id).unwrap();
            let new = part.len - part.cached;
            let drafts = if part.turn.drafts { new - 1 } else { 0 };
            let of = BatchRequest::of(&request.sequence, new).drafts(drafts);
            if part.turn.recompute { of.recompute() } else { of }
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
            let Part { id, cached, len, .. } = *part;
            let request = self.by_id_mut(id).expect("a step began whose sequence is gone");
            assert_eq!(request.sequence.len(), len, "a step began whose sequence has changed");
            let unnamed = if request.open == 0 { request.done.max(cached)..len } else { 0..0 };
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
        let new = parts.iter().map(|part| part.len - part.cached);
        Rows {
            fed,
            most: new.max().unwrap_or(0),
            // A rounding to 16 bits, of numbers and of their weights.
            tolerance: 8e-3,
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
