//! Which blocks and states a prefix cache gives back, and when.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use ascend_attention::Violation;

use crate::prefix_states::NodeId;

use super::{Group, Parent, PrefixCache};

/// The nodes and blocks that an eviction removes.
#[derive(Default)]
struct Victims {
    nodes: Vec<NodeId>,
    /// The blocks that go back to the pool.
    blocks: Vec<usize>,
}

impl Victims {
    /// Leaves out nodes that give no block back, unless an ancestor that does is removed. `describe` returns the block
    /// of a node, and its parent where parents count.
    fn spare(&mut self, describe: impl Fn(NodeId) -> (Option<usize>, Option<Parent>)) {
        let blocks: HashSet<usize> = self.blocks.iter().copied().collect();
        let mut taken: HashSet<NodeId> = HashSet::new();
        // Ancestors were chosen last.
        for id in self.nodes.iter().rev() {
            let (block, parent) = describe(*id);
            let goes_back = block.is_some_and(|block| blocks.contains(&block));
            let follows = matches!(parent, Some(Parent::Node(parent)) if taken.contains(&parent));
            if goes_back || follows {
                taken.insert(*id);
            }
        }
        self.nodes.retain(|id| taken.contains(id));
    }
}

impl<T: Clone + Eq + Hash> PrefixCache<T> {
    /// Gives back up to `blocks` blocks of a group (0 if it is the only one) that no sequence holds: the least
    /// recently used first, of one prefix the last ones first. In a group without a window, a block is evicted after
    /// the blocks that follow it, and together with the blocks of other groups for the same tokens. Returns the
    /// number of blocks given back; steps in flight may still read them.
    ///
    /// # Errors
    /// [`PREFIX_GROUPS`](crate::rules::PREFIX_GROUPS) for a group that does not exist.
    pub fn evict(&mut self, group: usize, blocks: usize) -> Result<usize, Violation> {
        self.group(group)?;
        let victims = self.victims(group, blocks);
        for id in &victims.nodes {
            match self.groups.get(group).is_some_and(Group::is_full) {
                true => self.remove(*id),
                false => {
                    self.release(*id, group);
                    self.prune(*id);
                }
            }
        }
        Ok(victims.blocks.len())
    }

    /// Gives back up to `count` slots of states that no sequence holds, the least recently used first: the prefixes
    /// that end there are not found any more, and their blocks stay. Returns the number of slots given back.
    pub fn evict_states(&mut self, count: usize) -> usize {
        self.states.as_mut().map_or(0, |kept| kept.evict(count))
    }

    /// The blocks that [`evict`](Self::evict) would give back, in its order.
    ///
    /// # Errors
    /// As for [`evict`](Self::evict).
    pub fn would_evict(&self, group: usize, blocks: usize) -> Result<Vec<usize>, Violation> {
        self.group(group)?;
        Ok(self.victims(group, blocks).blocks)
    }

    /// Number of blocks that sequences of a group can get now: free ones, and those that [`evict`](Self::evict) would
    /// give back. Blocks that wait for steps in flight are not included, and evicted blocks may have to wait too
    /// ([`BlockPool::waiting_blocks`](crate::kv::BlockPool::waiting_blocks)).
    ///
    /// Share a prompt's prefix before calling this: its blocks are held from then on.
    ///
    /// # Errors
    /// As for [`evict`](Self::evict).
    pub fn available_blocks(&self, group: usize) -> Result<usize, Violation> {
        let free = self.group(group)?.pool.free_blocks();
        Ok(free + self.victims(group, usize::MAX).blocks.len())
    }

    /// The nodes whose blocks of a group may be given back, in order. In a group without windows they are leaves when
    /// their turn comes: a parent is never used before its children, so that it comes after them.
    fn victims(&self, group: usize, wanted: usize) -> Victims {
        let mut victims = Victims::default();
        let Some(layers) = self.groups.get(group) else {
            return victims;
        };
        let mut children_gone: HashMap<NodeId, usize> = HashMap::new();
        // For a block that several nodes hold, how many of them are chosen: the last one gives it back.
        let mut chosen: HashMap<usize, u64> = HashMap::new();
        for (_, _, id) in &layers.order {
            if victims.blocks.len() >= wanted {
                break;
            }
            let (Some(node), Some((block, _))) = (self.nodes.get(id), self.held(*id, group)) else {
                continue;
            };
            let own = layers.own[&block.id()];
            let gone = children_gone.get(id).map_or(0, |gone| *gone);
            if block.holders() > own || (layers.is_full() && node.children.len() > gone) {
                continue;
            }
            victims.nodes.push(*id);
            let chosen = chosen.entry(block.id()).or_default();
            *chosen += 1;
            if *chosen == own {
                victims.blocks.push(block.id());
            }
            if let Parent::Node(parent) = node.parent {
                *children_gone.entry(parent).or_default() += 1;
            }
        }
        victims.spare(|id| {
            let node = self.nodes.get(&id);
            let parent = node.map(|node| &node.parent);
            let parent = parent.filter(|_| layers.is_full());
            let block = self.held(id, group).map(|(block, _)| block.id());
            (block, parent.cloned())
        });
        victims
    }
}
