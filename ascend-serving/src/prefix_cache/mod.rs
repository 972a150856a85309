//! Prefixes of prompts that are cached already, found by their tokens.

mod eviction;

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use ascend_attention::{Element, Violation};

use crate::causality::Causality;
use crate::engine::Attention;
use crate::kv::{Block, BlockPool, Sequence, StatePool, uncopied};
use crate::prefix_states::{NodeId, PrefixStates};
use crate::rules;

/// Where a block is in the order of eviction: least recently used blocks first; of one prompt the last blocks first.
type Place = (u64, Reverse<usize>, NodeId);

/// The children of a node, by the tokens of their block.
type Children<T> = HashMap<Arc<[T]>, NodeId>;

#[derive(Clone, Debug)]
enum Parent {
    Root(Arc<[u8]>),
    Node(NodeId),
}

/// A full block of tokens that follows those of its parents.
#[derive(Debug)]
struct Node<T> {
    parent: Parent,
    tokens: Arc<[T]>,
    /// Number of ancestors.
    depth: usize,
    /// The block of each group that caches these tokens, and when it was last used.
    held: Vec<Option<(Block, u64)>>,
    children: Children<T>,
}

#[derive(Debug)]
struct Group {
    pool: BlockPool,
    causality: Causality,
    /// Every block that is held for the group.
    order: BTreeSet<Place>,
    /// How many nodes hold each block: several where the same sequence was inserted under several salts.
    own: HashMap<usize, u64>,
}

impl Group {
    /// Whether a token sees all tokens before it, so that a prefix needs all of its blocks.
    fn is_full(&self) -> bool {
        self.causality.window().is_none()
    }

    /// The first block that the token after `blocks` blocks sees.
    fn first_shown(&self, blocks: usize) -> usize {
        let size = self.pool.block_size();
        self.causality.shown_from(blocks * size) / size
    }
}

/// Full blocks of tokens that were computed before, found by their tokens: automatic prefix caching (vLLM), or the
/// radix cache (SGLang).
///
/// A tree over blocks: each node is a block of tokens that follows those of its parents, found among its siblings by
/// hash. A hash is not trusted: the tokens are compared, so that no collision gives one prompt the keys of another.
/// The hash is the standard library's, keyed at random: prompts cannot be made to collide.
///
/// Whatever keys and values depend on besides the earlier tokens is named by a *salt*, bytes of the caller: the
/// adapter (LoRA), the tenant. Content at a position of the prompt, such as an image, belongs into `T`, for example
/// an enum of text tokens and image digests.
///
/// The cache holds a block as any other holder does. Blocks are shared with sequences by reference, and a sequence
/// that writes to one gets a copy; an evicted block goes back to its pool and waits there for the steps in flight.
/// Nothing is evicted automatically: a scheduler reads [`available_blocks`](Self::available_blocks), and calls
/// [`evict`](Self::evict) before it grows a sequence. Blocks that a sequence holds too are never evicted.
///
/// For a model with several groups of layers ([`PrefixCache::of`]) a node has a block in each group. A group with a
/// window may lack it, so that a prefix is found only where each window is complete. With layers of linear attention
/// ([`Attention::of_hybrid`]) it is found only where a state was kept: that behind the last whole block, where the
/// computed tokens of the sequence that is inserted end there, or no more than its drafts behind. Let a chunk of a
/// prompt end with its last whole block, and insert it then. A kept state takes a slot
/// ([`evict_states`](Self::evict_states)).
///
/// ```
/// use ascend_serving::kv::{BlockPool, PadPolicy, Sequence};
/// use ascend_serving::{Causality, PrefixCache};
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// let pool = BlockPool::new(16, 4, PadPolicy::SkipNegative)?;
/// let mut prefixes = PrefixCache::<u32>::new(&pool, Causality::Causal)?;
/// let prompt: Vec<u32> = (0..11).collect();
///
/// let mut first = prefixes.share(b"", &prompt); // nothing yet
/// let _ = first.grow(prompt.len() - first.len())?;
/// // ... the step that computes them is queued, then:
/// prefixes.insert(b"", &prompt, &first)?;
///
/// let second = prefixes.share(b"", &prompt);
/// assert_eq!((second.len(), second.row()), (8, &first.row()[..2]));
/// assert_eq!(prefixes.hit_len(b"another adapter", &prompt), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PrefixCache<T = u32> {
    block_size: usize,
    /// The groups of layers; at least one.
    groups: Vec<Group>,
    /// The states of layers of linear attention, if there are any.
    states: Option<PrefixStates>,
    nodes: HashMap<NodeId, Node<T>>,
    roots: HashMap<Arc<[u8]>, Children<T>>,
    next: NodeId,
    clock: u64,
}

impl<T: Clone + Eq + Hash> PrefixCache<T> {
    /// An empty cache for layers of one pool.
    ///
    /// # Errors
    /// [`PREFIX_GROUPS`](crate::rules::PREFIX_GROUPS) for layers that see later tokens: their keys depend on the
    /// tokens that follow.
    pub fn new(pool: &impl AsRef<BlockPool>, causality: Causality) -> Result<Self, Violation> {
        Self::of_groups(std::iter::once((pool.as_ref(), causality)))
    }

    /// An empty cache for the groups of a model's layers, in their order. The layers of [`Attention::new`] are causal
    /// here.
    ///
    /// # Errors
    /// [`PREFIX_GROUPS`](crate::rules::PREFIX_GROUPS) for layers that see later tokens, and for caches of several block
    /// sizes.
    pub fn of<E: Element>(attention: &Attention<E>) -> Result<Self, Violation> {
        let groups = attention.groups().iter();
        let prefixes = Self::of_groups(groups.map(|group| (group.cache().pool(), group.causality())))?;
        let states = attention.states().map(StatePool::state).map(PrefixStates::new);
        Ok(Self { states, ..prefixes })
    }

    fn of_groups<'p>(groups: impl Iterator<Item = (&'p BlockPool, Causality)>) -> Result<Self, Violation> {
        let groups: Vec<Group> = groups
            .map(|(pool, causality)| Group {
                pool: pool.clone(),
                causality,
                order: BTreeSet::new(),
                own: HashMap::new(),
            })
            .collect();
        let first = groups.first();
        let block_size = first.map_or(0, |group| group.pool.block_size());
        let wrong =
            |group: &&Group| group.pool.block_size() != block_size || group.causality == Causality::Bidirectional;
        match groups.iter().enumerate().find(|(_, group)| wrong(group)) {
            None if block_size > 0 => {
                let (nodes, roots) = (HashMap::new(), HashMap::new());
                Ok(Self { block_size, groups, states: None, nodes, roots, next: 0, clock: 0 })
            }
            None => Err(Violation::new(
                &rules::PREFIX_GROUPS,
                "no group of layers",
                "1 or more",
                "make the cache of an attention with layers",
            )),
            Some((at, group)) => Err(Violation::new(
                &rules::PREFIX_GROUPS,
                format_args!("{:?} over blocks of {} tokens in group {at}", group.causality, group.pool.block_size()),
                format_args!("causal or windowed layers over blocks of {block_size} tokens"),
                "give all caches of the model one block size, and leave encoders out",
            )),
        }
    }

    /// Number of tokens of a prompt that [`share`](Self::share) would find. Changes nothing.
    pub fn hit_len(&self, salt: &[u8], tokens: &[T]) -> usize {
        self.longest(salt, tokens).len() * self.block_size
    }

    /// A sequence with the longest prefix of a prompt that is cached, in whole blocks. The last token of the prompt
    /// is never among them: a step has to compute it, since its attention gives the first new token. The blocks count
    /// as used now. In each group the window is complete, and blocks before it are given back.
    ///
    /// Work that reads them must come after the work that computed them: on the same stream, or after an event of it.
    pub fn share(&mut self, salt: &[u8], tokens: &[T]) -> Sequence {
        let path = self.longest(salt, tokens);
        let now = self.tick();
        let groups = self.groups.len();
        let mut part = |group: usize| {
            let layers = &self.groups[group];
            let (pool, causality) = (layers.pool.clone(), layers.causality);
            let shown = layers.first_shown(path.len());
            let mut blocks = Vec::with_capacity(path.len());
            for (column, id) in path.iter().enumerate() {
                blocks.push(match column < shown {
                    true => None,
                    false => self.touch(*id, group, now).cloned(),
                });
            }
            Sequence::of_blocks(&pool, blocks).seen_by(Some(causality))
        };
        let sequence = part(0).beside((1..groups).map(part));
        let tokens = sequence.len();
        sequence.with_state(self.states.as_mut().map(|states| states.share(path.last().copied(), tokens, now)))
    }

    /// Caches the full blocks of `tokens`, the first tokens of a sequence, whose computation was queued. Returns the
    /// number of blocks that the cache did not hold before. The blocks of a windowed group are cached as far as the
    /// sequence still holds them: a prefix that ends there is found.
    ///
    /// Where another sequence has inserted the same tokens before, its blocks stay.
    ///
    /// # Errors
    /// [`PREFIX_GROUPS`](crate::rules::PREFIX_GROUPS) for a sequence of a model with other groups of layers;
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool,
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for more tokens than it has,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for blocks that wait for a copy,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP) for tokens that some cache of the pool has not computed;
    /// [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS) and [`STATE_POOL`](crate::rules::STATE_POOL) for a sequence
    /// without a state of the model.
    pub fn insert(&mut self, salt: &[u8], tokens: &[T], sequence: &Sequence) -> Result<usize, Violation> {
        let parts: Vec<&Sequence> = sequence.groups().collect();
        if parts.len() != self.groups.len() {
            return Err(Violation::new(
                &rules::PREFIX_GROUPS,
                format_args!("a sequence in {} pools", parts.len()),
                format_args!("one in each of {}", self.groups.len()),
                "insert sequences of the attention whose groups of layers the prefix cache was made with",
            ));
        }
        for (group, part) in self.groups.iter().zip(&parts) {
            check_part(&group.pool, part, tokens.len())?;
        }
        if let Some(states) = &self.states {
            states.check(sequence)?;
        }
        let now = self.tick();
        let mut parent = Parent::Root(salt.into());
        let (mut added, mut last) = (0, None);
        for (column, block) in tokens.chunks_exact(self.block_size).enumerate() {
            let id = match self.child(&parent, block) {
                Some(id) => id,
                None => {
                    // Without this block no later one would be found.
                    let mut groups = self.groups.iter().zip(&parts);
                    if groups.any(|(group, part)| group.is_full() && part.block(column).is_none()) {
                        break;
                    }
                    self.add(parent, block, column)
                }
            };
            for (group, part) in parts.iter().enumerate() {
                let block = part.block(column);
                let full = self.groups[group].is_full();
                if self.held(id, group).is_some() {
                    if full || block.is_some() {
                        self.touch(id, group, now);
                    }
                } else if let Some(block) = block {
                    self.hold(id, group, block.clone(), now);
                    added += 1;
                }
            }
            parent = Parent::Node(id);
            last = Some((id, (column + 1) * self.block_size));
        }
        if let Some((last, tokens)) = last {
            if let Some((states, state)) = self.states.as_mut().zip(sequence.state()) {
                states.keep(last, state, tokens, now);
            }
            self.prune(last);
        }
        Ok(added)
    }

    fn group(&self, group: usize) -> Result<&Group, Violation> {
        self.groups.get(group).ok_or_else(|| {
            Violation::new(
                &rules::PREFIX_GROUPS,
                format_args!("group {group}"),
                format_args!("one of {}, counted from 0", self.groups.len()),
                "number the groups from 0, in the order in which the cache got their pools; where a call takes \
                 blocks too, the group comes first",
            )
        })
    }

    /// Number of blocks of a group that the cache holds.
    ///
    /// # Errors
    /// As for [`evict`](Self::evict).
    pub fn cached_blocks(&self, group: usize) -> Result<usize, Violation> {
        Ok(self.group(group)?.order.len())
    }

    /// Removes everything, as when the weights change. Sequences keep their blocks.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.roots.clear();
        self.states.iter_mut().for_each(PrefixStates::clear);
        for group in &mut self.groups {
            group.order.clear();
            group.own.clear();
        }
    }

    /// The nodes of the longest prefix that every group has, with a state, without the last token.
    fn longest(&self, salt: &[u8], tokens: &[T]) -> Vec<NodeId> {
        let mut children = self.roots.get(salt);
        // For each group, the number of blocks without a gap up to here.
        let mut runs = vec![0usize; self.groups.len()];
        let (mut path, mut longest) = (Vec::new(), 0);
        for block in tokens.chunks_exact(self.block_size) {
            let id = children.and_then(|children| children.get(block));
            let Some((id, node)) = id.and_then(|id| Some((*id, self.nodes.get(id)?))) else {
                break;
            };
            path.push(id);
            let blocks = path.len();
            if blocks * self.block_size == tokens.len() {
                break;
            }
            for (run, held) in runs.iter_mut().zip(&node.held) {
                *run = held.as_ref().map_or(0, |_| *run + 1);
            }
            let mut groups = self.groups.iter().zip(&runs);
            let has_state = self.states.as_ref().is_none_or(|states| states.has(id));
            if has_state && groups.all(|(group, run)| group.first_shown(blocks) >= blocks - run) {
                longest = blocks;
            }
            children = Some(&node.children);
        }
        path.truncate(longest);
        path
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn children(&mut self, parent: &Parent) -> Option<&mut Children<T>> {
        match parent {
            Parent::Root(salt) => self.roots.get_mut(salt),
            Parent::Node(id) => Some(&mut self.nodes.get_mut(id)?.children),
        }
    }

    fn child(&mut self, parent: &Parent, tokens: &[T]) -> Option<NodeId> {
        self.children(parent)?.get(tokens).copied()
    }

    fn add(&mut self, parent: Parent, tokens: &[T], depth: usize) -> NodeId {
        let id = self.next;
        self.next += 1;
        let tokens: Arc<[T]> = tokens.into();
        if let Parent::Root(salt) = &parent {
            self.roots.entry(Arc::clone(salt)).or_default();
        }
        if let Some(children) = self.children(&parent) {
            children.insert(Arc::clone(&tokens), id);
        }
        let node =
            Node { parent, tokens, depth, held: self.groups.iter().map(|_| None).collect(), children: HashMap::new() };
        self.nodes.insert(id, node);
        id
    }

    fn held(&self, id: NodeId, group: usize) -> Option<&(Block, u64)> {
        self.nodes.get(&id)?.held.get(group)?.as_ref()
    }

    fn hold(&mut self, id: NodeId, group: usize, block: Block, now: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            let layers = &mut self.groups[group];
            *layers.own.entry(block.id()).or_default() += 1;
            layers.order.insert((now, Reverse(node.depth), id));
            node.held[group] = Some((block, now));
        }
    }

    /// Marks the block of a node as used now, and returns it.
    fn touch(&mut self, id: NodeId, group: usize, now: u64) -> Option<&Block> {
        let node = self.nodes.get_mut(&id)?;
        let order = &mut self.groups[group].order;
        let (block, used) = node.held[group].as_mut()?;
        order.remove(&(*used, Reverse(node.depth), id));
        *used = now;
        order.insert((now, Reverse(node.depth), id));
        Some(block)
    }

    /// Gives the block of a node back.
    fn release(&mut self, id: NodeId, group: usize) {
        if let Some(node) = self.nodes.get_mut(&id)
            && let Some((block, used)) = node.held[group].take()
        {
            let layers = &mut self.groups[group];
            layers.order.remove(&(used, Reverse(node.depth), id));
            if let Entry::Occupied(mut own) = layers.own.entry(block.id()) {
                *own.get_mut() -= 1;
                if *own.get() == 0 {
                    own.remove();
                }
            }
        }
    }

    /// Removes a leaf and gives its blocks back.
    fn remove(&mut self, id: NodeId) {
        for group in 0..self.groups.len() {
            self.release(id, group);
        }
        self.states.iter_mut().for_each(|states| states.remove(id));
        let Some(node) = self.nodes.remove(&id) else {
            return;
        };
        if let Some(children) = self.children(&node.parent) {
            children.remove(&node.tokens);
            if let (true, Parent::Root(salt)) = (children.is_empty(), &node.parent) {
                self.roots.remove(salt);
            }
        }
    }

    /// Removes a leaf without blocks, and then parents that have become such leaves.
    fn prune(&mut self, id: NodeId) {
        let mut next = Some(id);
        while let Some(id) = next.take()
            && let Some(node) = self.nodes.get(&id)
            && node.children.is_empty()
            && node.held.iter().all(Option::is_none)
        {
            if let Parent::Node(parent) = node.parent {
                next = Some(parent);
            }
            self.remove(id);
        }
    }
}

/// Refuses a sequence whose first tokens cannot be shared.
fn check_part(pool: &BlockPool, part: &Sequence, tokens: usize) -> Result<(), Violation> {
    pool.check_same(part.pool(), "a sequence", "insert sequences of the pools that the prefix cache was made with")?;
    part.check_count(tokens, "insert the tokens whose keys a step has computed")?;
    // Tokens behind the last full block are not cached.
    let tokens = tokens - tokens % pool.block_size();
    if let Some(computed) = pool.computed_tokens(part.stamp()).filter(|n| *n < tokens) {
        return Err(Violation::new(
            &rules::SEQUENCE_GAP,
            format_args!("{tokens} tokens to be found by others, of which the first {computed} are computed"),
            format_args!("at most {computed}, those that every cache of the pool has"),
            "insert tokens once the steps that compute them have ended, in every cache of the pool",
        ));
    }
    match part.uncopied() {
        None => Ok(()),
        Some(block) => Err(uncopied(format_args!("block {block} to be found by others"))),
    }
}
