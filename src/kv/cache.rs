//! The tensors of a paged cache.

use crate::attention::BlockTable;
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::{Device, Stream};
use crate::tensor::Tensor;

use super::pad::PadPolicy;
use super::pool::BlockPool;
use super::refusal::{Rule, refused};
use super::scatter::{ScatterPaKvCache, ScatterPlan};
use super::sequence::BlockCopy;
use super::slot_mapping::SlotMapping;
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
}

impl CacheShape {
    /// Keys and values of the same head dimension.
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            layers,
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
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
        }
    }
}

/// The cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache<T: Element> {
    /// Keys `[blocks, block_size, N * D]`; of latent attention the latents.
    pub key: Tensor<T>,
    /// Values, alike; of latent attention the rotary parts.
    pub value: Tensor<T>,
}

/// A paged cache: the keys and values of every layer in blocks `[blocks, block_size, N * D]` (CANN's BnBsH), and the pool
/// that says whose each block is.
///
/// Keys and values are written by [`write`](PagedKvCache::write) to the slots of a step, in every layer to the same ones.
#[derive(Debug)]
pub struct PagedKvCache<T: Element> {
    pool: BlockPool,
    shape: CacheShape,
    layers: Vec<LayerCache<T>>,
}

impl<T: Element> PagedKvCache<T> {
    /// A cache of `blocks` blocks of `block_size` tokens in each layer, full of zeros.
    ///
    /// Prefill wants block sizes that are multiples of 128; decoding alone takes multiples of 16.
    ///
    /// # Errors
    /// [`Rule::PoolSize`] for a size that has no slots or too many, [`Error::OutOfMemory`],
    /// [`Error::InvalidArgument`] for a shape that cannot be counted.
    pub fn new(
        device: &Device,
        blocks: u32,
        block_size: u32,
        shape: CacheShape,
        pad: PadPolicy,
    ) -> Result<Self> {
        let pool = BlockPool::new(blocks, block_size, pad)?;
        let (rows, columns) = (blocks as usize, block_size as usize);
        let tensor = |dim: usize| -> Result<Tensor<T>> {
            let hidden = shape.kv_heads.checked_mul(dim);
            let elements = hidden.and_then(|hidden| rows.checked_mul(columns)?.checked_mul(hidden));
            let (Some(hidden), Some(elements)) = (hidden, elements) else {
                return Err(Error::invalid(
                    "shape",
                    format_args!("{shape:?}"),
                    "sizes whose product can be counted",
                ));
            };
            let buffer = device.alloc_zeroed::<T>(elements)?;
            Tensor::from_buffer(&buffer, [rows, columns, hidden])
        };
        let layer = |_| {
            Ok(LayerCache {
                key: tensor(shape.key_dim)?,
                value: tensor(shape.value_dim)?,
            })
        };
        Ok(Self {
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
        let elements = |layer: &LayerCache<T>| layer.key.len() + layer.value.len();
        self.layers.iter().map(elements).sum::<usize>() * size_of::<T>()
    }

    /// The cache of a layer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer that there is not.
    pub fn layer(&self, layer: usize) -> Result<&LayerCache<T>> {
        self.layers
            .get(layer)
            .ok_or_else(|| no_layer(layer, self.layers.len()))
    }

    /// A table on the device, checked against this cache: every entry is one of its blocks.
    ///
    /// # Errors
    /// [`Rule::TableBlock`]; those of an upload.
    pub fn block_table(&self, stream: &Stream, table: &PageTable) -> Result<BlockTable> {
        let blocks = self.pool.blocks();
        let outside = |block: &&i32| u32::try_from(**block).map_or(true, |block| block >= blocks);
        if let Some(block) = table.blocks().iter().find(outside) {
            return Err(refused(
                Rule::TableBlock,
                format_args!("block {block}"),
                format_args!("0 to {}", blocks - 1),
                "use blocks that this cache's pool handed out",
            )
            .into());
        }
        let tensor = stream.upload(table.blocks(), [table.requests(), table.columns()])?;
        BlockTable::from_tensor(tensor, self.pool.block_size() as usize)
    }

    /// Prepares the writing of a step's tokens: `slots` has one for each row of `key` and `value`, which are
    /// `[tokens, N, D]`; what is not cached, such as padding, has the slot of the pool's [`PadPolicy`]. Padding behind
    /// the last cached token is left out of the call; in front of it, a negative slot relies on the device to skip it.
    ///
    /// # Errors
    /// [`Rule::SlotCount`] for another number of slots than rows; [`Error::Violation`] by `slot_mapping.range` or
    /// `slot_mapping.unique`, and whatever [`ScatterPaKvCache::plan`] says. Nothing is written.
    pub fn plan_write(
        &self,
        stream: &Stream,
        slots: &[i32],
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<CacheWrite> {
        let rows = key.shape().first().copied().unwrap_or(0);
        if usize::try_from(rows) != Ok(slots.len()) {
            return Err(refused(
                Rule::SlotCount,
                format_args!("{} slots", slots.len()),
                format_args!("{rows}, one a row of the keys"),
                "pass the keys of the whole step, padding included",
            )
            .into());
        }
        let pad = self.pool.pad_policy();
        let last = slots.iter().rposition(|slot| !pad.is_padding(*slot));
        let written = last.map_or(0, |last| last + 1);
        let Some(layer) = self.layers.first() else {
            return Err(no_layer(0, 0));
        };
        if written == 0 {
            return Ok(CacheWrite {
                rows: 0,
                slots: None,
            });
        }
        let mapping: Vec<i64> = slots
            .iter()
            .take(written)
            .map(|slot| i64::from(*slot))
            .collect();
        let capacity = u64::from(self.pool.blocks()) * u64::from(self.pool.block_size());
        let skipped: &[&str] = match pad {
            PadPolicy::SkipNegative => &["slot_mapping.negative"],
            PadPolicy::DumpSlot(_) => &["slot_mapping.unique"],
        };
        // The dump slot may come more than once; every other slot must not.
        super::check_slots(slots, capacity, pad)?;
        let mapping = SlotMapping::allowing(stream, &mapping, capacity, skipped)?;
        let (key, value) = (key.narrow(0, 0..written)?, value.narrow(0, 0..written)?);
        let plan =
            ScatterPaKvCache::new().plan(&key, &value, &mapping, &layer.key, &layer.value)?;
        Ok(CacheWrite {
            rows: written,
            slots: Some((mapping, plan)),
        })
    }

    /// Queues the writing of a layer's keys and values to the slots of a step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer that there is not, otherwise as for [`ScatterPlan::launch`].
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
        let Some((slots, plan)) = &write.slots else {
            return Ok(());
        };
        let (key, value) = (
            key.narrow(0, 0..write.rows)?,
            value.narrow(0, 0..write.rows)?,
        );
        plan.launch(
            stream,
            &key,
            &value,
            slots,
            &mut cache.key,
            &mut cache.value,
        )
    }

    /// Queues the copies that [`Sequence::grow`](super::Sequence::grow) asked for, in every layer: before anything is
    /// written to the new blocks.
    ///
    /// # Errors
    /// [`Rule::BlockPool`] for a block of another pool; [`Error::Acl`].
    pub fn copy_blocks(&mut self, stream: &Stream, copies: &[BlockCopy]) -> Result<()> {
        for copy in copies {
            let to = usize::try_from(copy.to).ok();
            let known = copy.from.pool().is(&self.pool);
            let Some(to) = to.filter(|_| known) else {
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
            };
            let from = usize::try_from(copy.from.id()).unwrap_or(0);
            for layer in &self.layers {
                for tensor in [&layer.key, &layer.value] {
                    let source = tensor.narrow(0, from..from + 1)?;
                    tensor.narrow(0, to..to + 1)?.copy_from(stream, &source)?;
                }
            }
        }
        Ok(())
    }
}

/// A step's writes, prepared once for all layers. From [`PagedKvCache::plan_write`].
#[derive(Debug)]
pub struct CacheWrite {
    rows: usize,
    slots: Option<(SlotMapping, ScatterPlan)>,
}

#[cold]
fn no_layer(layer: usize, layers: usize) -> Error {
    Error::invalid("layer", layer, format_args!("below {layers}"))
}
