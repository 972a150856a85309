//! The states that are kept behind cached prefixes, for models with layers of linear attention.

use std::collections::{BTreeSet, HashMap};

use ascend_attention::Violation;

use crate::kv::{RequestState, Sequence};

/// Number of a node of a prefix cache, never used again.
pub(crate) type NodeId = u64;

/// States behind the blocks of nodes, the least recently used first.
#[derive(Debug)]
pub(crate) struct PrefixStates {
    /// A state without tokens, of the pool of all others.
    none: RequestState,
    states: HashMap<NodeId, (RequestState, u64)>,
    order: BTreeSet<(u64, NodeId)>,
}

impl PrefixStates {
    pub(crate) fn new(none: RequestState) -> Self {
        Self { none, states: HashMap::new(), order: BTreeSet::new() }
    }

    /// Refuses a sequence without a state of the pool.
    pub(crate) fn check(&self, sequence: &Sequence) -> Result<(), Violation> {
        self.none.check_same_pool(sequence.state())
    }

    /// Whether there is a state behind the block of a node.
    pub(crate) fn has(&self, id: NodeId) -> bool {
        self.states.contains_key(&id)
    }

    /// The state of a request that begins with the `tokens` tokens up to a node, which counts as used now, or with
    /// none.
    pub(crate) fn share(&mut self, id: Option<NodeId>, tokens: usize, now: u64) -> RequestState {
        match id.and_then(|id| Some((id, self.states.get_mut(&id)?))) {
            None => self.none.fork(0),
            Some((id, (state, used))) => {
                self.order.remove(&(*used, id));
                self.order.insert((now, id));
                *used = now;
                state.fork(tokens)
            }
        }
    }

    /// Keeps the state behind the `tokens` tokens up to a node, if a sequence has it and the node none.
    pub(crate) fn keep(&mut self, id: NodeId, state: &RequestState, tokens: usize, now: u64) {
        if !self.has(id) && state.computed() >= tokens && state.check_kept(tokens).is_ok() {
            self.states.insert(id, (state.fork(tokens), now));
            self.order.insert((now, id));
        }
    }

    pub(crate) fn remove(&mut self, id: NodeId) {
        if let Some((_, used)) = self.states.remove(&id) {
            self.order.remove(&(used, id));
        }
    }

    /// Gives back up to `states` slots that have no other holder.
    pub(crate) fn evict(&mut self, states: usize) -> usize {
        // Nodes of several prefixes may hold one slot, which goes back with the last of them.
        let mut nodes_of: HashMap<usize, Vec<NodeId>> = HashMap::new();
        let mut slots = Vec::new();
        for (_, id) in &self.order {
            let Some((slot, holders)) = self.states.get(id).and_then(|(state, _)| state.holders()) else { continue };
            let nodes = nodes_of.entry(slot).or_default();
            nodes.push(*id);
            if nodes.len() == holders {
                slots.push(slot);
            }
        }
        slots.truncate(states);
        let victims: Vec<NodeId> = slots.iter().filter_map(|slot| nodes_of.get(slot)).flatten().copied().collect();
        victims.into_iter().for_each(|id| self.remove(id));
        slots.len()
    }

    pub(crate) fn clear(&mut self) {
        self.states.clear();
        self.order.clear();
    }
}
