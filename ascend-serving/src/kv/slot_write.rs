//! Writes of new keys and values to the slots of a paged cache.

use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, ScatterPlan, SlotMapping};
use ascend_attention::spec::ops::fused_infer_attention_score::Cache;
use ascend_attention::spec::ops::scatter_pa_kv_cache as scatter;
use ascend_attention::{Element, Queue, Stream, Tensor, Violation};

use crate::error::Result;
use crate::rules::{self, room};

use super::cache_shape::{CacheShape, LayerCache};
use super::copied_writes::{CheckedWrites, CopiedWrites};
use super::pool::BlockPool;
use super::slot::{head_slot, spread_slot};
use super::slot_check::check_slots;

/// The writes of a step to the slots of its tokens, for numbers that are not quantised.
#[derive(Debug)]
pub(crate) struct SlotWrite {
    /// Rows of the step, padding included.
    pub(super) tokens: usize,
    /// Rows up to the last one that is written.
    pub(super) rows: usize,
    writer: Writer,
}

impl SlotWrite {
    /// Prepares the writing of rows into a layer of these blocks.
    pub(crate) fn plan<T: Element>(
        (pool, shape): (&BlockPool, &CacheShape),
        layer: &LayerCache<T>,
        stream: &Stream,
        slots: &[i32],
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<Self> {
        rows_have_slots(slots.len(), key, value)?;
        let pad = pool.pad_policy();
        let cached = |slot: &i32| !pad.is_padding(*slot, pool.block_size());
        let written = slots.iter().rposition(cached).map_or(0, |last| last + 1);
        if written == 0 {
            return Ok(Self { tokens: slots.len(), rows: 0, writer: Writer::Nothing });
        }
        let (split, block_size) = (shape.split(), pool.block_size());
        // Slots of padding may occur more than once; every other slot must not.
        check_slots(slots, pool.blocks(), block_size, pad)?;
        let views = WriteViews::of(shape, layer, written, [key, value])?;
        let written_slots = slots.iter().copied().take(written);
        if !scatter::Version::V1.runs_on(stream.device().target()?) {
            shape.check_copied()?;
            let places = written_slots.flat_map(|slot| {
                let slot = pad.cached_slot(slot, block_size);
                let slot = slot.map(|slot| spread_slot(slot, block_size, shape.block_step()));
                (0..split).map(move |head| Some(head_slot(slot?, block_size, split, head)))
            });
            let writes = CopiedWrites::new(places, block_size);
            views.checked(&writes)?;
            return Ok(Self { tokens: slots.len(), rows: written, writer: Writer::Copies(writes) });
        }
        let mapping = slot_mapping(stream, (pool, shape), written_slots)?;
        let plan = views.scatter(shape, &mapping)?;
        Ok(Self { tokens: slots.len(), rows: written, writer: Writer::Scatter(Box::new((mapping, plan))) })
    }

    /// Queues the writing of a layer's rows.
    pub(crate) fn queue<T: Element>(
        &self,
        shape: &CacheShape,
        layer: &LayerCache<T>,
        stream: &Stream,
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<()> {
        rows_have_slots(self.tokens, key, value)?;
        if matches!(self.writer, Writer::Nothing) {
            return Ok(());
        }
        let views = WriteViews::of(shape, layer, self.rows, [key, value])?;
        match &self.writer {
            Writer::Nothing => Ok(()),
            Writer::Scatter(scatter) => {
                let (slots, plan) = &**scatter;
                views.launch(stream, plan, slots)
            }
            Writer::Copies(writes) => {
                let [keys, values] = views.checked(writes)?;
                keys.queue(stream)?;
                values.queue(stream)
            }
        }
    }
}

/// The first new rows and the tensors of a layer, in the shapes in which rows are written.
pub(crate) struct WriteViews<T: Element> {
    key: Tensor<T>,
    value: Tensor<T>,
    /// The keys of the layer's cache, the layer's own memory.
    key_cache: Tensor<T>,
    value_cache: Tensor<T>,
    values: ValueWrites,
}

/// The call that writes the values.
#[derive(Clone, Copy)]
enum ValueWrites {
    /// That of the keys.
    WithKeys,
    /// One behind that of the keys, because each of the caches spans parts of the other.
    InTurn,
    /// None: the cache has keys alone.
    None,
}

impl<T: Element> WriteViews<T> {
    /// Views of the first `rows` rows, and of a layer's cache.
    pub(crate) fn of(
        shape: &CacheShape,
        layer: &LayerCache<T>,
        rows: usize,
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<Self> {
        Ok(Self {
            key: shape.new_rows("key", key, rows)?,
            value: shape.new_rows("value", value, rows)?,
            key_cache: shape.writable(&layer.key)?,
            value_cache: shape.writable(&layer.value)?,
            values: match (shape.value_dim, shape.side_by_side) {
                (0, _) => ValueWrites::None,
                (1.., true) => ValueWrites::InTurn,
                (1.., false) => ValueWrites::WithKeys,
            },
        })
    }

    /// The call that writes to slots of a [mapping](slot_mapping): keys and values, either of them in turn, or keys
    /// alone.
    pub(crate) fn scatter(&self, shape: &CacheShape, slots: &SlotMapping) -> Result<ScatterPlan> {
        let scatter = ScatterPaKvCache::new().cache_order(match shape.format {
            Cache::BnBsH | Cache::BnNBsD => CacheOrder::Norm,
            Cache::Nz => CacheOrder::PaNz,
        });
        let Self { key, value, key_cache, value_cache, values } = self;
        Ok(match values {
            ValueWrites::WithKeys => scatter.plan((key, value, slots, key_cache, value_cache))?,
            ValueWrites::InTurn | ValueWrites::None => scatter.plan((key, slots, key_cache))?,
        })
    }

    /// Queues the call on a stream, or records it into a graph.
    pub(crate) fn launch(&self, queue: &impl Queue, plan: &ScatterPlan, slots: &SlotMapping) -> Result<()> {
        let Self { key, value, key_cache, value_cache, values } = self;
        match values {
            ValueWrites::WithKeys => {
                plan.launch(queue, (key, value, slots, key_cache, value_cache))?;
            }
            ValueWrites::InTurn => {
                plan.launch(queue, (key, slots, key_cache))?;
                plan.launch(queue, (value, slots, value_cache))?;
            }
            ValueWrites::None => plan.launch(queue, (key, slots, key_cache))?,
        }
        Ok(())
    }

    /// The checked copies of keys and of values.
    fn checked<'w>(&self, writes: &'w CopiedWrites) -> Result<[CheckedWrites<'w, T>; 2]> {
        Ok([
            writes.checked("key", &self.key, &self.key_cache)?,
            writes.checked("value", &self.value, &self.value_cache)?,
        ])
    }
}

/// The slots of rows as ScatterPaKvCache has them in a paged cache: those of each head, where its heads have [blocks
/// of their own](super::slot::head_block), and with what is between the cache's blocks.
///
/// # Errors
/// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for more slots than the host has memory for.
pub(crate) fn scattered_slots(
    (pool, shape): (&BlockPool, &CacheShape),
    slots: impl ExactSizeIterator<Item = i32>,
) -> Result<Vec<i64>, Violation> {
    let (block_size, heads, step) = (pool.block_size(), shape.split(), shape.block_step());
    let mut scattered = Vec::new();
    let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "write fewer tokens in a step");
    room(&mut scattered, slots.len() * heads, rule, fix)?;
    for slot in slots {
        scattered.extend((0..heads).map(|head| match usize::try_from(slot) {
            Ok(slot) => head_slot(spread_slot(slot, block_size, step), block_size, heads, head) as i64,
            // A negative slot stays negative for every head.
            Err(_) => i64::from(slot),
        }));
    }
    Ok(scattered)
}

/// The slots of [`scattered_slots`] on the device, checked; padding is allowed.
pub(crate) fn slot_mapping(
    stream: &Stream,
    blocks: (&BlockPool, &CacheShape),
    slots: impl ExactSizeIterator<Item = i32>,
) -> Result<SlotMapping> {
    let (pool, shape) = blocks;
    let allowed = [pool.pad_policy().allowed_lint()];
    let scattered = scattered_slots(blocks, slots)?;
    // The cache of keys or of values spans nothing behind the last block.
    let blocks_spanned = (pool.blocks() - 1) * shape.block_step() + 1;
    let places = blocks_spanned * pool.block_size() * shape.split();
    Ok(SlotMapping::allowing(stream, &scattered, places, &allowed)?)
}

/// Refuses keys and values with another number of rows than slots.
pub(super) fn rows_have_slots<T: Element>(slots: usize, key: &Tensor<T>, value: &Tensor<T>) -> Result<(), Violation> {
    for (argument, rows) in [("keys", key), ("values", value)] {
        if rows.shape().first() != Some(&slots) {
            return Err(Violation::new(
                &rules::SLOT_COUNT,
                format_args!("{argument} {:?} for {slots} slots", rows.shape()),
                "a row a slot, as many as planned",
                "pass the keys and values of the whole step, padding included",
            ));
        }
    }
    Ok(())
}

/// The way in which the new rows are written.
#[derive(Debug)]
enum Writer {
    /// There are no rows to write.
    Nothing,
    Scatter(Box<(SlotMapping, ScatterPlan)>),
    /// By copies, on a product without the operator.
    Copies(CopiedWrites),
}
