//! New keys and values into the slots of a paged cache.

use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, ScatterPlan, SlotMapping};
use ascend_attention::spec::fia::Cache;
use ascend_attention::spec::scatter;
use ascend_attention::{Element, Stream, Tensor};

use crate::error::Result;
use crate::refusal::{Refused, Rule, refused};

use super::cache_shape::{CacheShape, LayerCache};
use super::copied_writes::CopiedWrites;
use super::pad::PadPolicy;
use super::pool::BlockPool;
use super::slot::{capacity, check_slots};

/// A step's writes into the slots of its tokens, as the numbers are.
#[derive(Debug)]
pub(super) struct SlotWrite {
    /// Rows of the step, padding included.
    pub(super) tokens: usize,
    /// Rows up to the last that is written.
    pub(super) rows: usize,
    by: Writer,
}

impl SlotWrite {
    /// Prepares the writing of rows into a layer of these blocks.
    pub(super) fn plan<T: Element>(
        (pool, shape): (&BlockPool, &CacheShape),
        layer: &LayerCache<T>,
        stream: &Stream,
        slots: &[i32],
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<Self> {
        rows_have_slots(slots.len(), key, value)?;
        let pad = pool.pad_policy();
        let last = slots
            .iter()
            .rposition(|slot| !pad.is_padding(*slot, pool.block_size()));
        let written = last.map_or(0, |last| last.saturating_add(1));
        if written == 0 {
            return Ok(Self {
                tokens: slots.len(),
                rows: 0,
                by: Writer::Nothing,
            });
        }
        let capacity = capacity(pool.blocks(), pool.block_size());
        let (split, block_size) = (shape.split(), pool.block_size());
        // Slots of padding may come more than once; every other slot must not.
        check_slots(slots, pool.blocks(), block_size, pad)?;
        let (key, value) = (
            shape.new_rows("key", key, written)?,
            shape.new_rows("value", value, written)?,
        );
        let (key_cache, value_cache) = (shape.writable(&layer.key)?, shape.writable(&layer.value)?);
        let mapping = slots.iter().take(written);
        if !scatter::Version::V1.runs_on(stream.device().target()?) {
            shape.check_copied()?;
            let places = mapping.flat_map(|slot| {
                let padding = pad.is_padding(*slot, block_size);
                let slots = head_slots(*slot, block_size, split);
                slots.map(move |slot| usize::try_from(slot).ok().filter(|_| !padding))
            });
            let writes = CopiedWrites::new(places, block_size);
            writes.checked("key", &key, &key_cache)?;
            writes.checked("value", &value, &value_cache)?;
            return Ok(Self {
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
        let order = match shape.format {
            Cache::BnBsH | Cache::BnNBsD => CacheOrder::Norm,
            Cache::Nz => CacheOrder::PaNz,
        };
        let scatter = ScatterPaKvCache::new().cache_order(order);
        let plan = scatter.plan(&key, &value, &mapping, &key_cache, &value_cache)?;
        Ok(Self {
            tokens: slots.len(),
            rows: written,
            by: Writer::Scatter(Box::new((mapping, plan))),
        })
    }

    /// Queues the writing of a layer's rows.
    pub(super) fn queue<T: Element>(
        &self,
        shape: &CacheShape,
        layer: &LayerCache<T>,
        stream: &Stream,
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<()> {
        rows_have_slots(self.tokens, key, value)?;
        if matches!(self.by, Writer::Nothing) {
            return Ok(());
        }
        let (key, value) = (
            shape.new_rows("key", key, self.rows)?,
            shape.new_rows("value", value, self.rows)?,
        );
        // Views of the layer's own tensors.
        let mut key_cache = shape.writable(&layer.key)?;
        let mut value_cache = shape.writable(&layer.value)?;
        match &self.by {
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

/// Refuses keys and values that have not one row a slot.
pub(super) fn rows_have_slots<T: Element>(
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
