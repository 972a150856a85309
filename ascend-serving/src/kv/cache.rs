//! The tensors of a paged cache.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_attention::attention::BlockTable;
use ascend_attention::{Device, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::block_copy::BlockCopy;
use super::cache_shape::{CacheShape, LayerCache, no_layer};
use super::pad::PadPolicy;
use super::pool::{BlockPool, CacheEntry, PoolId};
use super::quantised::{QuantisedLayer, QuantisedWrite};
use super::sequence::{Room, Sequence};
use super::slot_write::SlotWrite;
use super::table::{PageTable, check_blocks_of};

/// A paged cache: the keys and values of every layer in blocks, and the pool that knows who holds each block.
///
/// Keys and values are written by [`write`](PagedKvCache::write) to the slots of a step, which are the same in every
/// layer. The [`CacheShape`] defines the layout: `[blocks, block_size, N * D]` (BnBsH), `[blocks, N, block_size, D]`
/// (BnNBsD) or `[blocks, N, D / c, block_size, c]` (NZ). The writing operator does not support BnNBsD of several
/// heads; there, each head of a block is written as a block of its own.
#[derive(Debug)]
pub struct PagedKvCache<T: Element> {
    pub(super) device: Device,
    pub(super) pool: BlockPool,
    pub(super) shape: CacheShape,
    pub(super) layers: Vec<CacheLayer<T>>,
    pub(super) entry: Arc<CacheEntry>,
    pub(super) stored: Arc<[Range<usize>]>,
}

/// A layer of a cache, of the query's type or quantised.
#[derive(Debug)]
pub(super) enum CacheLayer<T: Element> {
    Plain(LayerCache<T>),
    Quantised {
        layer: Box<QuantisedLayer>,
        /// A layer cache without blocks, which stands in for the cache of the query's type.
        none: LayerCache<T>,
    },
}

impl<T: Element> PagedKvCache<T> {
    /// A cache of `blocks` blocks of `block_size` tokens in each layer, full of zeros.
    ///
    /// Any block size makes a cache. On Atlas A2 and A3 multiples of 128 are read on every release; multiples of 16
    /// on CANN 8.1 where steps decode alone, and from 8.5 on by [`Backend::Fused`](crate::Backend::Fused) as its table
    /// lists. On 310P a block has at most 512 tokens.
    ///
    /// # Errors
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a size that has no slots or too many,
    /// [`PAD_SLOT`](crate::rules::PAD_SLOT) for padding outside of it,
    /// [`OutOfMemory`](ascend_attention::Error::OutOfMemory), [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// shape that cannot be counted or with more than [`CacheShape::MAX_LAYERS`].
    pub fn new(device: &Device, blocks: usize, block_size: usize, shape: CacheShape, pad: PadPolicy) -> Result<Self> {
        shape.check_layers()?;
        let pool = BlockPool::new(blocks, block_size, pad)?;
        let layers = shape.zeroed_layers(device, blocks, block_size)?;
        Ok(Self::of_layers(device, pool, shape, layers.into_iter().map(CacheLayer::Plain).collect()))
    }

    /// Replaces the cache's pool by that of another cache with equally many blocks. One sequence is then the tokens
    /// of a request in both, and one growth and one metadata serve both: caches of ranks in one process, each on its
    /// own device, or of layers that see the same keys.
    ///
    /// Each cache has its own steps, and records what they have computed. Where a growth copies a shared block, the
    /// cache that grew queues the copy, and each other cache when it begins a step that reads the block
    /// ([`Attention::begin`](crate::Attention::begin)), or before other steps by
    /// [`queue_pending_copies`](Self::queue_pending_copies). Fork sequences, and share prefixes, when all caches have
    /// queued the tokens.
    ///
    /// # Errors
    /// [`POOL_SHARED`](crate::rules::POOL_SHARED) for a pool of another number of blocks, block size or padding, and
    /// while a block of either pool is held.
    pub fn with_pool(mut self, pool: &BlockPool) -> Result<Self, Violation> {
        self.pool.check_replaced(pool)?;
        self.entry = CacheEntry::new(pool);
        self.pool = pool.clone();
        Ok(self)
    }

    /// A cache in the pool of another one, of its shape, with `rows` rows in each block in place of the pool's tokens.
    /// Its blocks are copied with the pool's; slots of the pool's tokens are no rows of it.
    pub(crate) fn beside(other: &Self, rows: usize) -> Result<Self> {
        let layers = other.shape.zeroed_layers(&other.device, other.pool.blocks(), rows)?;
        let layers = layers.into_iter().map(CacheLayer::Plain).collect();
        Ok(Self::of_layers(&other.device, other.pool.clone(), other.shape, layers))
    }

    /// The pool of its blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The addresses of the tensors of all layers, for [`check_outside_caches`](super::stored::check_outside_caches).
    pub(crate) fn stored(&self) -> &Arc<[Range<usize>]> {
        &self.stored
    }

    /// How many tokens of the pool's sequences this cache has computed.
    pub(crate) fn entry(&self) -> &Arc<CacheEntry> {
        &self.entry
    }

    /// The number of a sequence's first tokens whose keys and values every layer of this cache has or is queued to
    /// have: tokens that steps have computed, and tokens that [`mark_computed`](PagedKvCache::mark_computed) has
    /// named. Tokens before a window that were given back are counted. While a step of the sequence that writes is in
    /// progress, at most the tokens before it are.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool,
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for one in the caches of several groups of layers, which has
    /// [`Attention::computed_tokens`](crate::Attention::computed_tokens).
    pub fn computed_tokens(&self, sequence: &Sequence) -> Result<usize, Violation> {
        sequence.check_groups(1)?;
        self.holds(sequence)?;
        Ok(self.entry.computed_tokens(sequence.stamp()))
    }

    /// Marks the first `tokens` tokens of a sequence as computed: their keys and values are in every layer of this
    /// cache, or queued to be, although no step of [`Attention`](crate::Attention) computed them, such as copies from
    /// another cache or from the host, and [writes](PagedKvCache::write) and launches of your own. Without it later
    /// steps are refused ([`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP)).
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool,
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for more tokens than it has,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) while a block of the sequence waits for a copy, which would
    /// overwrite what was written, [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence in the caches of several
    /// groups of layers, which has [`Attention::mark_computed`](crate::Attention::mark_computed).
    pub fn mark_computed(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        sequence.check_groups(1)?;
        self.check_marked(sequence, tokens)?;
        self.entry.mark_computed(sequence.stamp(), tokens);
        Ok(())
    }

    /// Refuses to mark tokens of a sequence as computed that it does not have, and while copies would overwrite them.
    pub(crate) fn check_marked(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        self.holds(sequence)?;
        self.entry.check_marked(sequence, tokens)
    }

    /// The heads and formats of the cached keys and values.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let bytes = |layer: &CacheLayer<T>| match layer {
            CacheLayer::Plain(layer) => layer.bytes(),
            CacheLayer::Quantised { layer, .. } => layer.bytes(),
        };
        self.layers.iter().map(bytes).sum()
    }

    /// The cache of a layer.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist,
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache, which has
    /// [`quantised_layer`](PagedKvCache::quantised_layer).
    pub fn layer(&self, layer: usize) -> Result<&LayerCache<T>> {
        match self.cache_layer(layer)? {
            CacheLayer::Plain(cache) => Ok(cache),
            CacheLayer::Quantised { .. } => {
                Err(quantised_cache(format_args!("layer {layer} of a quantised cache")).into())
            }
        }
    }

    /// The cache of a layer, of either kind.
    pub(super) fn cache_layer(&self, layer: usize) -> Result<&CacheLayer<T>> {
        let found = self.layers.get(layer);
        found.ok_or_else(|| no_layer(layer, self.layers.len()))
    }

    /// Refuses a stream of another device.
    pub(crate) fn admits(&self, stream: &Stream) -> Result<()> {
        Ok(stream.check_device("stream", &self.device)?)
    }

    /// Refuses a cache of another device.
    pub(crate) fn check_device(&self, argument: &'static str, device: &Device) -> Result<()> {
        match self.layers.first() {
            Some(CacheLayer::Plain(layer)) => layer.key.check_device(argument, device)?,
            Some(CacheLayer::Quantised { layer, .. }) => layer.key().check_device(argument, device)?,
            None => {}
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Copies a table to the device, after checking that every entry is a block of this cache.
    ///
    /// # Errors
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK); as for [`Stream::upload`].
    pub fn block_table(&self, stream: &Stream, table: &PageTable) -> Result<BlockTable> {
        self.admits(stream)?;
        for (request, row) in table.rows().enumerate() {
            check_blocks_of(request, row, self.pool.blocks())?;
        }
        let block_size = self.pool.block_size();
        Ok(BlockTable::from_full_rows(stream, table.blocks(), table.columns(), block_size)?)
    }

    fn blocks_of_slots(&self) -> CacheBlocks {
        CacheBlocks {
            shape: CacheShape { layers: 1, ..self.shape },
            blocks: self.pool.blocks(),
            block_size: self.pool.block_size(),
            pool: self.pool.id(),
        }
    }

    /// Queues the writing of a layer's keys and values to the slots of a step.
    ///
    /// # Errors
    /// [`SLOT_COUNT`](crate::rules::SLOT_COUNT) for another number of rows than planned;
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache and a write that was planned for a
    /// cache of the query's type; [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) where each token has a scale;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist, and for a write planned for a
    /// cache of another shape or other blocks; otherwise as for
    /// [`ScatterPlan::launch`](ascend_attention::scatter::ScatterPlan::launch) or, for copies,
    /// [`copy_from`](ascend_attention::AnyTensor::copy_from). In a cache of [MXFP8](Self::mxfp8) a copy that fails may
    /// have changed the values that share powers of two with the new ones: compute the tokens from the last multiple of
    /// 32 on again, as steps demand by themselves.
    pub fn write(
        &mut self,
        stream: &Stream,
        write: &CacheWrite,
        layer: usize,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<()> {
        self.write_layer(stream, write, layer, [key, value], &mut false)
    }

    /// Does what [`write`](Self::write) does. `torn` says after an error whether values in front of the new ones are
    /// lost, as [`GroupQuantiser`](super::quantised) says.
    pub(crate) fn write_layer(
        &mut self,
        stream: &Stream,
        write: &CacheWrite,
        layer: usize,
        rows: [&Tensor<T>; 2],
        torn: &mut bool,
    ) -> Result<()> {
        let own = self.blocks_of_slots();
        match (&write.writes, self.cache_layer(layer)?) {
            (Writes::Plain(_), CacheLayer::Quantised { .. }) => Err(other_write(
                "a write that is not quantised, for a quantised cache",
                format_args!("one planned for {own}"),
            )),
            (Writes::Quantised(_), CacheLayer::Plain(_)) => {
                Err(other_write("a quantised write, for a cache that is not", format_args!("one planned for {own}")))
            }
            _ if write.blocks != own => Err(Error::invalid(
                "write",
                format_args!("a plan for a cache of {}", write.blocks),
                format_args!("one for this cache, of {own}"),
            )
            .fix("plan the write for this cache")),
            (Writes::Plain(write), CacheLayer::Plain(cache)) => write.queue(&self.shape, cache, stream, rows),
            (Writes::Quantised(write), CacheLayer::Quantised { layer, .. }) => {
                write.queue(&self.shape, layer, stream, rows, torn)
            }
        }
    }

    /// Makes room for `tokens` more tokens of a sequence, queues the copies of blocks that it shared, and returns the
    /// slot of each new token, in order. After an error the sequence is unchanged.
    ///
    /// Where too few blocks are free and others were given back, the calling thread waits for the steps that may
    /// still read those, on any streams, one after the other. It does not wait for steps whose last launch was not
    /// queued yet, and for those of a thread that captures.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool; as for [`Sequence::grow`] and
    /// [`PagedKvCache::copy_blocks`].
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<Vec<i32>> {
        self.admits(stream)?;
        sequence.check_groups(1)?;
        let room = self.reserve(sequence, tokens)?;
        self.copy_blocks(stream, &room.copies)?;
        Ok(sequence.settle(room)?.slots)
    }

    /// Refuses a sequence of another pool.
    pub(crate) fn holds(&self, sequence: &Sequence) -> Result<(), Violation> {
        self.pool.check_same(
            sequence.pool(),
            "a sequence",
            "make each sequence with the pool of the cache that it grows in",
        )
    }

    /// Reserves blocks for more tokens of a sequence of this cache. Waits for blocks that steps in flight may still
    /// read.
    pub(crate) fn reserve(&self, sequence: &mut Sequence, tokens: usize) -> Result<Room> {
        self.holds(sequence)?;
        Ok(sequence.reserve_in_time(tokens)?)
    }

    /// Queues the copies that [`Sequence::grow`] returned, in every layer: call it before anything is written to the
    /// new blocks. [`PagedKvCache::grow`] does both. Copies that were queued before, and copies to blocks that no
    /// sequence holds any more, are left out.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a block of another pool;
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for a copy from a block that waits for a copy itself;
    /// [`Acl`](ascend_attention::Error::Acl).
    pub fn copy_blocks(&mut self, stream: &Stream, copies: &[BlockCopy]) -> Result<()> {
        self.copy_blocks_in(stream, copies, &self.entry)
    }

    /// Queues copies of blocks of an entry's pool, whose blocks have the same numbers as those of this cache.
    pub(crate) fn copy_blocks_in(&self, stream: &Stream, copies: &[BlockCopy], entry: &CacheEntry) -> Result<()> {
        self.admits(stream)?;
        if copies.is_empty() {
            return Ok(());
        }
        let pool = entry.pool();
        // The source blocks may be given back while the copies wait for the device.
        let _lease = pool.begin_step(stream);
        for copy in copies {
            let (from, to) = (copy.from.id(), copy.to);
            pool.check_same(
                copy.from.pool(),
                format_args!("a copy to block {to}"),
                "grow sequences of this cache's own pool",
            )?;
            if !copy.is_awaited_in(entry) {
                continue;
            }
            copy.check_order(entry)?;
            self.copy_block(stream, from, to)?;
            copy.copied_in(entry);
        }
        Ok(())
    }

    fn copy_block(&self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        self.layers.iter().try_for_each(|layer| match layer {
            CacheLayer::Plain(layer) => layer.copy_block(stream, from, to),
            CacheLayer::Quantised { layer, .. } => layer.copy_block(stream, from, to),
        })
    }

    /// Queues the copies that blocks of a sequence still wait for in this cache, where several caches share its pool
    /// and another one has grown. Steps of [`Attention::begin`](crate::Attention::begin) do this themselves; for
    /// verifications of trees and for steps that are replayed from graphs call it before they begin, on their stream.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence in the caches of several groups of layers, which has
    /// [`Attention::queue_pending_copies`](crate::Attention::queue_pending_copies);
    /// [`Acl`](ascend_attention::Error::Acl).
    pub fn queue_pending_copies(&mut self, stream: &Stream, sequence: &Sequence) -> Result<()> {
        sequence.check_groups(1)?;
        self.queue_copies_of(stream, sequence)
    }

    /// Queues the copies that blocks of a sequence, or of its tokens in one group of layers, still wait for.
    pub(crate) fn queue_copies_of(&mut self, stream: &Stream, sequence: &Sequence) -> Result<()> {
        self.admits(stream)?;
        self.holds(sequence)?;
        // The source blocks may be given back while the copies wait for the device.
        let _lease = self.pool.begin_step(stream);
        self.queue_copies_to(stream, sequence.held_blocks())
    }

    /// Queues the copies that these blocks still wait for in this cache.
    pub(crate) fn queue_copies_to(&mut self, stream: &Stream, blocks: impl Iterator<Item = usize>) -> Result<()> {
        self.queue_copies_in(stream, blocks, &self.entry)
    }

    /// Queues the copies that these blocks still wait for in an entry's pool, whose blocks have the same numbers as
    /// those of this cache.
    pub(crate) fn queue_copies_in(
        &self,
        stream: &Stream,
        blocks: impl Iterator<Item = usize>,
        entry: &CacheEntry,
    ) -> Result<()> {
        let pool = entry.pool();
        for (from, to, number) in pool.awaited_copies(blocks, entry) {
            if pool.awaits(to, number, Some(entry)) {
                self.copy_block(stream, from, to)?;
                pool.copied(to, number, Some(entry));
            }
        }
        Ok(())
    }
}

impl<T: Element> AsRef<BlockPool> for PagedKvCache<T> {
    fn as_ref(&self) -> &BlockPool {
        &self.pool
    }
}

/// A step's writes, prepared once for all layers. From [`CacheWrite::plan`].
#[derive(Debug)]
pub struct CacheWrite {
    writes: Writes,
    blocks: CacheBlocks,
}

/// What slots of a cache depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CacheBlocks {
    /// Of one layer.
    shape: CacheShape,
    blocks: usize,
    block_size: usize,
    pool: PoolId,
}

impl fmt::Display for CacheBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, blocks, block_size, pool } = self;
        write!(f, "{blocks} blocks of {block_size} tokens of {pool}, each layer {shape:?}")
    }
}

impl CacheWrite {
    /// Prepares the writing of a step's tokens to every layer of a cache, by [`PagedKvCache::write`]. `slots` has one
    /// slot for each row of `key` and `value`, which are `[tokens, N, D]`; a row that is not cached, such as padding,
    /// has the slot of the pool's [`PadPolicy`], which may be negative. Padding after the last cached token is left
    /// out of the call; before it, a negative slot relies on the device to skip it.
    ///
    /// On products without ScatterPaKvCache, such as the Atlas inference series, copies on the stream write instead:
    /// one of keys and one of values for each run of contiguous slots, or for each head of a token in BnNBsD of
    /// several heads. They write no padding, and no NZ.
    ///
    /// # Errors
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for keys and values of other heads than the cache's,
    /// [`SLOT_COUNT`](crate::rules::SLOT_COUNT) for another number of slots than rows;
    /// [`SLOT_RANGE`](crate::rules::SLOT_RANGE) and [`SLOT_DUPLICATE`](crate::rules::SLOT_DUPLICATE) for slots outside
    /// the cache or named twice; any error of
    /// [`ScatterPaKvCache::plan`](ascend_attention::scatter::ScatterPaKvCache::plan); where copies write,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for an NZ cache or rows of other sizes than the cache's.
    /// Nothing is written.
    pub fn plan<T: Element>(
        cache: &PagedKvCache<T>,
        stream: &Stream,
        slots: &[i32],
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<Self> {
        cache.admits(stream)?;
        cache.shape.check_rows([key, value])?;
        let rows = [key, value];
        let blocks = (&cache.pool, &cache.shape);
        let writes = match cache.cache_layer(0)? {
            CacheLayer::Plain(layer) => Writes::Plain(SlotWrite::plan(blocks, layer, stream, slots, rows)?),
            CacheLayer::Quantised { layer, .. } => {
                let write = QuantisedWrite::plan(blocks, layer, stream, slots, rows)?;
                Writes::Quantised(Box::new(write))
            }
        };
        Ok(Self { writes, blocks: cache.blocks_of_slots() })
    }
}

/// The planned writes of a step, by the kind of cache.
#[derive(Debug)]
enum Writes {
    Plain(SlotWrite),
    Quantised(Box<QuantisedWrite>),
}

#[cold]
fn other_write(given: impl std::fmt::Display, allowed: impl std::fmt::Display) -> crate::Error {
    let fix = "plan the write for this cache";
    Violation::new(&rules::CACHE_QUANTISED, given, allowed, fix).into()
}

/// The refusal of a quantised cache where a cache of the query's type is needed.
#[cold]
fn quantised_cache(given: impl std::fmt::Display) -> Violation {
    Violation::new(
        &rules::CACHE_QUANTISED,
        given,
        "a cache of the query's type",
        "read `PagedKvCache::quantised_layer`, with its scales, or make the cache by `PagedKvCache::new`",
    )
}
