//! The tensors of a paged cache.

use ascend_attention::attention::BlockTable;
use ascend_attention::mask::TriangleLayers;
use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, ScatterPlan, SlotMapping};
use ascend_attention::spec::fia::Cache;
use ascend_attention::spec::scatter;
use ascend_attention::{Device, Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::refusal::{Refused, Rule, refused};

use super::copied_writes::CopiedWrites;
use super::pad::PadPolicy;
use super::pool::BlockPool;
use super::sequence::{BlockCopy, Room, Sequence};
use super::slot::capacity;
use super::table::PageTable;

/// What a token's key and value are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Layers.
    pub layers: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Elements of a key's head.
    pub key_dim: usize,
    /// Elements of a value's head.
    pub value_dim: usize,
    /// How a block lies.
    pub format: Cache,
}

impl CacheShape {
    /// Most layers of a cache.
    pub const MAX_LAYERS: usize = TriangleLayers::MAX_LAYERS;

    /// Keys and values of the same head dimension, in BnBsH.
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            layers,
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            format: Cache::BnBsH,
        }
    }

    /// Multi-head latent attention: one head with the latent of 512 as key (and value) and the rotary part of 64 in the
    /// place of the value.
    pub fn latent(layers: usize) -> Self {
        Self {
            layers,
            kv_heads: 1,
            key_dim: 512,
            value_dim: 64,
            format: Cache::BnBsH,
        }
    }

    /// The same in another format.
    ///
    /// Every format can be written; which queries read which is the operator's rule. On CANN 8.1 BnBsH goes with all, BnNBsD
    /// with BNSD and packed ones, NZ with packed ones and, of latent attention, BSND; from 8.5 on every format goes with all,
    /// NZ with heads of 64 or 128 (packed on 9.1 others too).
    pub fn format(mut self, format: Cache) -> Self {
        self.format = format;
        self
    }
}

impl CacheShape {
    /// Axes of a layer's tensor with heads of `dim` elements, and how many elements that is.
    fn tensor<T: Element>(
        &self,
        blocks: usize,
        block_size: usize,
        dim: usize,
    ) -> Option<(Vec<usize>, usize)> {
        let size = |size: usize| i64::try_from(size).ok();
        let (heads, dim) = (size(self.kv_heads)?, size(dim)?);
        let (blocks, block_size) = (size(blocks)?, size(block_size)?);
        let dims = self
            .format
            .shape(T::DTYPE, blocks, block_size, heads, dim)?;
        let dims = dims.iter().map(|dim| usize::try_from(*dim).ok());
        let dims = dims.collect::<Option<Vec<usize>>>()?;
        let elements = dims
            .iter()
            .try_fold(1usize, |all, dim| all.checked_mul(*dim))?;
        (elements > 0).then_some((dims, elements))
    }

    /// Pieces that a token's key is written in: its heads, where these lie in different places of a block.
    fn split(&self) -> usize {
        match self.format {
            Cache::BnNBsD => self.kv_heads,
            Cache::BnBsH | Cache::Nz => 1,
        }
    }

    /// The first new rows `[tokens, N, D]`, as they are written: split, `[tokens * N, 1, D]`.
    fn new_rows<T: Element>(
        &self,
        argument: &'static str,
        rows: &Tensor<T>,
        tokens: usize,
    ) -> Result<Tensor<T>> {
        let rows = rows.narrow(0, 0..tokens)?;
        if self.format != Cache::BnNBsD {
            return Ok(rows);
        }
        match *rows.shape() {
            [_, of, dim] if of == self.kv_heads => {
                Ok(rows.reshape([tokens.saturating_mul(self.kv_heads), 1, dim])?)
            }
            _ => Err(Error::invalid(
                argument,
                rows.desc(),
                format_args!("[tokens, {}, D]", self.kv_heads),
            )),
        }
    }

    /// Refuses a cache that copies do not write.
    fn check_copied(&self) -> Result<()> {
        match self.format {
            Cache::BnBsH | Cache::BnNBsD => Ok(()),
            Cache::Nz => Err(Error::invalid(
                "shape.format",
                "NZ, on a product without ScatterPaKvCache",
                "BnBsH, or BnNBsD: a token lies in many pieces in NZ",
            )),
        }
    }

    /// A cache as it is written: split, each head of a block a block of its own.
    fn writable<T: Element>(&self, cache: &Tensor<T>) -> Result<Tensor<T>> {
        match (self.format, cache.shape()) {
            (Cache::BnNBsD, &[blocks, heads, block_size, dim]) => {
                let blocks = blocks.saturating_mul(heads);
                Ok(cache.reshape([blocks, block_size, dim])?)
            }
            _ => Ok(cache.clone()),
        }
    }
}

/// The slot of each head of a token, in a cache whose blocks are the heads of blocks. Padding stays what it is.
fn head_slots(slot: i32, block_size: usize, heads: usize) -> impl Iterator<Item = i64> {
    let (slot, size) = (
        i64::from(slot),
        i64::try_from(block_size.max(1)).unwrap_or(i64::MAX),
    );
    let heads = i64::try_from(heads).unwrap_or(i64::MAX);
    let (block, place) = (slot.div_euclid(size), slot.rem_euclid(size));
    (0..heads).map(move |head| match slot {
        ..0 => slot,
        _ => {
            let block = block.saturating_mul(heads).saturating_add(head);
            block.saturating_mul(size).saturating_add(place)
        }
    })
}

/// The cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache<T: Element> {
    /// Keys, in BnBsH `[blocks, block_size, N * D]`; of latent attention the latents.
    pub key: Tensor<T>,
    /// Values, alike; of latent attention the rotary parts.
    pub value: Tensor<T>,
}

/// A paged cache: the keys and values of every layer in blocks, and the pool that says whose each block is.
///
/// Keys and values are written by [`write`](PagedKvCache::write) to the slots of a step, in every layer to the same ones.
/// The [`CacheShape`] says how they lie: `[blocks, block_size, N * D]` (BnBsH), `[blocks, N, block_size, D]` (BnNBsD) or
/// `[blocks, N, D / c, block_size, c]` (NZ). The writing operator knows no BnNBsD of several heads; there, each head of a
/// block is written as a block of its own.
#[derive(Debug)]
pub struct PagedKvCache<T: Element> {
    device: Device,
    pool: BlockPool,
    shape: CacheShape,
    layers: Vec<LayerCache<T>>,
}

impl<T: Element> PagedKvCache<T> {
    /// A cache of `blocks` blocks of `block_size` tokens in each layer, full of zeros.
    ///
    /// Any block size makes a cache. On Atlas A2 and A3 multiples of 128 are read on every release; multiples of 16 on
    /// CANN 8.1 where steps decode alone, and from 8.5 on by [`Fused`](crate::Fused) as its table says. On 310P a block has at
    /// most 512 tokens.
    ///
    /// # Errors
    /// [`Rule::PoolSize`] for a size that has no slots or too many, [`Rule::PadSlot`] for padding outside of it,
    /// [`OutOfMemory`](ascend_attention::Error::OutOfMemory), [`InvalidArgument`](ascend_attention::Error::InvalidArgument)
    /// for a shape that cannot be counted or with more than [`CacheShape::MAX_LAYERS`].
    pub fn new(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
    ) -> Result<Self> {
        let pool = BlockPool::new(blocks, block_size, pad)?;
        if shape.layers > CacheShape::MAX_LAYERS {
            return Err(Error::invalid(
                "shape",
                format_args!("{} layers", shape.layers),
                format_args!("at most {}", CacheShape::MAX_LAYERS),
            ));
        }
        let tensor = |dim: usize| -> Result<Tensor<T>> {
            let (dims, elements) = shape.tensor::<T>(blocks, block_size, dim).ok_or_else(|| {
                Error::invalid(
                    "shape",
                    format_args!("{shape:?}"),
                    "sizes of 1 or more that go into the format, and whose product can be counted",
                )
            })?;
            let buffer = device.alloc_zeroed::<T>(elements)?;
            Ok(Tensor::from_buffer(&buffer, dims)?)
        };
        let layer = |_| {
            Ok(LayerCache {
                key: tensor(shape.key_dim)?,
                value: tensor(shape.value_dim)?,
            })
        };
        Ok(Self {
            device: device.clone(),
            layers: (0..shape.layers).map(layer).collect::<Result<_>>()?,
            pool,
            shape,
        })
    }

    /// The pool of its blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// What a token's key and value are.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let elements = |layer: &LayerCache<T>| layer.key.len().saturating_add(layer.value.len());
        let sum = |all: usize, layer| all.saturating_add(elements(layer));
        let elements = self.layers.iter().fold(0, sum);
        elements.saturating_mul(size_of::<T>())
    }

    /// The cache of a layer.
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a layer that there is not.
    pub fn layer(&self, layer: usize) -> Result<&LayerCache<T>> {
        self.layers
            .get(layer)
            .ok_or_else(|| no_layer(layer, self.layers.len()))
    }

    /// Refuses a stream of another device.
    pub(crate) fn admits(&self, stream: &Stream) -> Result<()> {
        Ok(stream.check_device("stream", &self.device)?)
    }

    /// A table on the device, checked against this cache: every entry is one of its blocks.
    ///
    /// # Errors
    /// [`Rule::TableBlock`]; those of an upload.
    pub fn block_table(&self, stream: &Stream, table: &PageTable) -> Result<BlockTable> {
        self.admits(stream)?;
        let blocks = self.pool.blocks();
        if let Some(block) = table.blocks().iter().find(|block| **block >= blocks) {
            return Err(refused(
                Rule::TableBlock,
                format_args!("block {block}"),
                format_args!("0 to {}", blocks.saturating_sub(1)),
                "use blocks that this cache's pool handed out",
            )
            .into());
        }
        let block_size = self.pool.block_size();
        Ok(BlockTable::from_full_rows(
            stream,
            table.blocks(),
            table.columns(),
            block_size,
        )?)
    }

    /// Prepares the writing of a step's tokens: `slots` has one for each row of `key` and `value`, which are
    /// `[tokens, N, D]`; what is not cached, such as padding, has the slot of the pool's [`PadPolicy`], which may be
    /// negative. Padding behind the last cached token is left out of the call; in front of it, a negative slot relies on the
    /// device to skip it.
    ///
    /// On products without ScatterPaKvCache, such as the Atlas inference series, copies on the stream write instead: one of
    /// keys and one of values for each run of slots that follow each other, or for each head of a token where the heads of
    /// BnNBsD are several. They write no padding, and no NZ.
    ///
    /// # Errors
    /// [`Rule::SlotCount`] for another number of slots than rows; [`Violation`](ascend_attention::Error::Violation) by
    /// `slot_mapping.range` or `slot_mapping.unique`, and whatever [`ScatterPaKvCache::plan`] says; where copies write,
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for an NZ cache or rows of other sizes than the
    /// cache's. Nothing is written.
    pub fn plan_write(
        &self,
        stream: &Stream,
        slots: &[i32],
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<CacheWrite> {
        self.admits(stream)?;
        rows_have_slots(slots.len(), key, value)?;
        let pad = self.pool.pad_policy();
        let last = slots
            .iter()
            .rposition(|slot| !pad.is_padding(*slot, self.pool.block_size()));
        let written = last.map_or(0, |last| last.saturating_add(1));
        let Some(layer) = self.layers.first() else {
            return Err(no_layer(0, 0));
        };
        if written == 0 {
            return Ok(CacheWrite {
                tokens: slots.len(),
                rows: 0,
                by: Writer::Nothing,
            });
        }
        let capacity = capacity(self.pool.blocks(), self.pool.block_size());
        let (split, block_size) = (self.shape.split(), self.pool.block_size());
        // Slots of padding may come more than once; every other slot must not.
        super::check_slots(slots, self.pool.blocks(), block_size, pad)?;
        let (key, value) = (
            self.shape.new_rows("key", key, written)?,
            self.shape.new_rows("value", value, written)?,
        );
        let (key_cache, value_cache) = (
            self.shape.writable(&layer.key)?,
            self.shape.writable(&layer.value)?,
        );
        let mapping = slots.iter().take(written);
        if !scatter::Version::V1.runs_on(self.device.target()?) {
            self.shape.check_copied()?;
            let places = mapping.flat_map(|slot| {
                let padding = pad.is_padding(*slot, block_size);
                let slots = head_slots(*slot, block_size, split);
                slots.map(move |slot| usize::try_from(slot).ok().filter(|_| !padding))
            });
            let writes = CopiedWrites::new(places, block_size);
            writes.checked("key", &key, &key_cache)?;
            writes.checked("value", &value, &value_cache)?;
            return Ok(CacheWrite {
                tokens: slots.len(),
                rows: written,
                by: Writer::Copies(writes),
            });
        }
        let mapping: Vec<i64> = mapping
            .flat_map(|slot| head_slots(*slot, block_size, split))
            .collect();
        let places = capacity.saturating_mul(split);
        let skipped: &[&str] = match pad {
            PadPolicy::SkipNegative => &["slot_mapping.negative"],
            PadPolicy::DumpSlot(_) => &["slot_mapping.unique"],
        };
        let mapping = SlotMapping::allowing(stream, &mapping, places, skipped)?;
        let order = match self.shape.format {
            Cache::BnBsH | Cache::BnNBsD => CacheOrder::Norm,
            Cache::Nz => CacheOrder::PaNz,
        };
        let scatter = ScatterPaKvCache::new().cache_order(order);
        let plan = scatter.plan(&key, &value, &mapping, &key_cache, &value_cache)?;
        Ok(CacheWrite {
            tokens: slots.len(),
            rows: written,
            by: Writer::Scatter(Box::new((mapping, plan))),
        })
    }

    /// Queues the writing of a layer's keys and values to the slots of a step.
    ///
    /// # Errors
    /// [`Rule::SlotCount`] for another number of rows than planned; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a layer that there is not, otherwise as for
    /// [`ScatterPlan::launch`] or, of copies, [`copy_from`](ascend_attention::AnyTensor::copy_from).
    pub fn write(
        &mut self,
        stream: &Stream,
        write: &CacheWrite,
        layer: usize,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<()> {
        let layers = self.layers.len();
        let cache = self
            .layers
            .get_mut(layer)
            .ok_or_else(|| no_layer(layer, layers))?;
        rows_have_slots(write.tokens, key, value)?;
        if matches!(write.by, Writer::Nothing) {
            return Ok(());
        }
        let (key, value) = (
            self.shape.new_rows("key", key, write.rows)?,
            self.shape.new_rows("value", value, write.rows)?,
        );
        // Views of the layer's own tensors, which `self` is borrowed for.
        let mut key_cache = self.shape.writable(&cache.key)?;
        let mut value_cache = self.shape.writable(&cache.value)?;
        match &write.by {
            Writer::Nothing => Ok(()),
            Writer::Scatter(scatter) => {
                let (slots, plan) = &**scatter;
                Ok(plan.launch(
                    stream,
                    &key,
                    &value,
                    slots,
                    &mut key_cache,
                    &mut value_cache,
                )?)
            }
            Writer::Copies(writes) => {
                let keys = writes.checked("key", &key, &key_cache)?;
                let values = writes.checked("value", &value, &value_cache)?;
                keys.queue(stream)?;
                values.queue(stream)
            }
        }
    }

    /// Makes room for `tokens` more tokens of a sequence, and queues the copies of blocks that it shared: all that growing
    /// takes. The slot of each new token, in order. After an error the sequence is as it was.
    ///
    /// Where blocks are missing that were given back, the calling thread waits for the steps that may still read them, on
    /// whatever streams, one after the other. Steps whose last launch was not queued yet, and those of a thread that
    /// captures, are not waited for.
    ///
    /// # Errors
    /// [`Rule::BlockPool`] for a sequence of another pool; as for [`Sequence::grow`] and [`PagedKvCache::copy_blocks`].
    pub fn grow(
        &mut self,
        stream: &Stream,
        sequence: &mut Sequence,
        tokens: usize,
    ) -> Result<Vec<i32>> {
        self.admits(stream)?;
        let room = self.reserve(sequence, tokens)?;
        self.copy_blocks(stream, &room.copies)?;
        Ok(sequence.settle(room)?.slots)
    }

    /// Blocks for more tokens of a sequence of this cache. Waits for those that steps in flight may still read.
    pub(crate) fn reserve(&self, sequence: &mut Sequence, tokens: usize) -> Result<Room> {
        if !sequence.pool().is(&self.pool) {
            return Err(refused(
                Rule::BlockPool,
                format_args!("a sequence of {}", sequence.pool().group()),
                self.pool.group(),
                "make each sequence with the pool of the cache that it grows in",
            )
            .into());
        }
        loop {
            match sequence.reserve(tokens) {
                Err(full) if full.rule == Rule::PoolWaiting && self.pool.await_step() => {}
                outcome => return Ok(outcome?),
            }
        }
    }

    /// Queues the copies that [`Sequence::grow`] asked for, in every layer: before anything is written to the new blocks.
    /// [`PagedKvCache::grow`] does both. Copies that were queued before, and those that nobody waits for any more, are left
    /// out.
    ///
    /// # Errors
    /// [`Rule::BlockPool`] for a block of another pool; [`Rule::BlockUncopied`] for a copy of a block that waits for one
    /// itself; [`Acl`](ascend_attention::Error::Acl).
    pub fn copy_blocks(&mut self, stream: &Stream, copies: &[BlockCopy]) -> Result<()> {
        self.admits(stream)?;
        if copies.is_empty() {
            return Ok(());
        }
        // What is copied from may be given back while the copies wait for the device.
        let _lease = self.pool.begin_step(stream);
        for copy in copies {
            let (from, to) = (copy.from.id(), copy.to);
            if !copy.from.pool().is(&self.pool) {
                return Err(refused(
                    Rule::BlockPool,
                    format_args!(
                        "a copy to block {} in {}",
                        copy.to,
                        copy.from.pool().group()
                    ),
                    self.pool.group(),
                    "grow sequences of this cache's own pool",
                )
                .into());
            }
            if !copy.is_awaited() {
                continue;
            }
            copy.check_order()?;
            for layer in &self.layers {
                for tensor in [&layer.key, &layer.value] {
                    let block = |at: usize| tensor.narrow(0, at..at.saturating_add(1));
                    let source = block(from)?;
                    block(to)?.copy_from(stream, &source)?;
                }
            }
            copy.copied();
        }
        Ok(())
    }
}

impl<T: Element> AsRef<BlockPool> for PagedKvCache<T> {
    fn as_ref(&self) -> &BlockPool {
        &self.pool
    }
}

/// A step's writes, prepared once for all layers. From [`PagedKvCache::plan_write`].
#[derive(Debug)]
pub struct CacheWrite {
    /// Rows of the step, padding included.
    tokens: usize,
    /// Rows up to the last that is written.
    rows: usize,
    by: Writer,
}

/// Refuses keys and values that have not one row a slot.
fn rows_have_slots<T: Element>(
    slots: usize,
    key: &Tensor<T>,
    value: &Tensor<T>,
) -> Result<(), Refused> {
    for (argument, rows) in [("keys", key), ("values", value)] {
        let rows = rows.shape().first().copied().unwrap_or(0);
        if rows != slots {
            return Err(refused(
                Rule::SlotCount,
                format_args!("{rows} rows of {argument} for {slots} slots"),
                "a row a slot, as many as planned",
                "pass the keys and values of the whole step, padding included",
            ));
        }
    }
    Ok(())
}

/// What writes the new rows.
#[derive(Debug)]
enum Writer {
    /// There is none.
    Nothing,
    Scatter(Box<(SlotMapping, ScatterPlan)>),
    /// The product has no operator for it.
    Copies(CopiedWrites),
}

/// The refusal of a layer that a model or a cache has not.
#[cold]
pub(crate) fn no_layer(layer: usize, layers: usize) -> Error {
    Error::invalid("layer", layer, format_args!("below {layers}"))
}
