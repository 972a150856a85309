//! Writes of new keys and values to a quantised paged cache.

use ascend_attention::{Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::kv::cache_shape::CacheShape;
use crate::kv::copied_writes::CopiedWrites;
use crate::kv::pool::BlockPool;
use crate::kv::slot_write::{SlotWrite, rows_have_slots};
use crate::sharing::{PlannedStream, STREAM_OF_STEP};

use super::group_quantiser::GroupQuantiser;
use super::index_quantiser::IndexQuantiser;
use super::latent_quantiser::LatentQuantiser;
use super::latent_scale::bytes_of;
use super::token_quantiser::TokenQuantiser;
use super::{DeviceQuantisers, LayerScales, QuantisedLayer, quantised_rows};

/// The writes of a step: each row is quantised, then written to its slot.
#[derive(Debug)]
pub(in crate::kv) struct QuantisedWrite {
    /// The stream of the writes, which quantise the rows of one layer after the other in the same memory.
    stream: PlannedStream,
    quantisers: Quantisers,
    write: SlotWrite,
}

/// The quantisers of the rows, by the kind of scales.
#[derive(Debug)]
enum Quantisers {
    /// All rows are padding.
    Nothing,
    /// The quantisers of the device, by scales of channels or of latents.
    Device(Box<DeviceQuantisers>),
    Token(Box<TokenQuantiser>),
    Group(Box<GroupQuantiser>),
    Row(Box<LatentQuantiser>),
    IndexKey(Box<IndexQuantiser>),
}

impl QuantisedWrite {
    /// Prepares the writing of rows into a layer of these blocks.
    pub(in crate::kv) fn plan<T: Element>(
        blocks: (&BlockPool, &CacheShape),
        layer: &QuantisedLayer,
        stream: &Stream,
        slots: &[i32],
        rows: [&Tensor<T>; 2],
    ) -> Result<Self> {
        rows_have_slots(slots.len(), rows[0], rows[1])?;
        let device = stream.device();
        let stored = &layer.scales.stored_shape(blocks.1);
        let mut quantised = quantised_rows(device, stored, slots.len())?;
        if let LayerScales::Latent(_) = &layer.scales {
            // Rotary keys are written as they come.
            quantised[1] = bytes_of(rows[1])?;
        }
        let write = SlotWrite::plan((blocks.0, stored), &layer.cache, stream, slots, quantised.each_ref())?;
        let (pad, block_size) = (blocks.0.pad_policy(), blocks.0.block_size());
        let written = slots.iter().take(write.rows);
        let places = written.map(|slot| pad.cached_slot(*slot, block_size));
        let quantisers = match (&layer.scales, write.rows) {
            (_, 0) => Quantisers::Nothing,
            (LayerScales::Channel { .. } | LayerScales::Latent(_), written) => {
                let quantisers = layer.device_quantisers(device, written, rows, quantised)?;
                Quantisers::Device(Box::new(quantisers))
            }
            (LayerScales::Token(_), rows) => {
                let slots: Vec<_> = places.collect();
                let scales = || Tensor::empty(device, [rows, 1, 1]);
                Quantisers::Token(Box::new(TokenQuantiser {
                    stored: layer.stored(),
                    quantised,
                    scales: [scales()?, scales()?],
                    writes: CopiedWrites::new(slots.iter().copied(), block_size),
                    slots,
                }))
            }
            (LayerScales::Group(_), _) => {
                let slots = places.collect();
                let quantiser = GroupQuantiser::new(device, *blocks.1, quantised, slots, block_size)?;
                Quantisers::Group(Box::new(quantiser))
            }
            (LayerScales::Row, _) => {
                let planned = rows.map(|rows| rows.shape().to_vec());
                Quantisers::Row(Box::new(LatentQuantiser::new(places.collect(), planned, quantised)))
            }
            (LayerScales::IndexKey(_), _) => {
                let quantiser = IndexQuantiser::new(places.collect(), block_size, quantised, stream)?;
                Quantisers::IndexKey(Box::new(quantiser))
            }
        };
        Ok(Self { stream: PlannedStream::of(stream), quantisers, write })
    }

    /// Queues the writing of a layer. `torn` is set where an error leaves values in front of the new ones under other
    /// shared powers of two than theirs.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        shape: &CacheShape,
        layer: &QuantisedLayer,
        stream: &Stream,
        rows: [&Tensor<T>; 2],
        torn: &mut bool,
    ) -> Result<()> {
        let [key, value] = rows;
        rows_have_slots(self.write.tokens, key, value)?;
        if matches!(self.quantisers, Quantisers::Nothing) {
            return Ok(());
        }
        self.stream.check(stream, STREAM_OF_STEP)?;
        let shape = &layer.scales.stored_shape(shape);
        let quantised = match (&self.quantisers, &layer.scales) {
            (Quantisers::Nothing, _) => return Ok(()),
            (Quantisers::Device(quantisers), LayerScales::Channel { .. } | LayerScales::Latent(_)) => {
                let quantised = layer.quantise(quantisers, stream, rows)?;
                return self.write.queue(shape, &layer.cache, stream, quantised.each_ref());
            }
            (Quantisers::Token(quantiser), LayerScales::Token(scales)) => quantiser.queue(stream, rows, scales)?,
            (Quantisers::Group(quantiser), LayerScales::Group(scales)) => {
                quantiser.queue(stream, rows, (&layer.cache, scales), torn)?
            }
            (Quantisers::Row(quantiser), LayerScales::Row) => quantiser.queue(stream, rows)?,
            (Quantisers::IndexKey(quantiser), LayerScales::IndexKey(scales)) => quantiser.queue(stream, key, scales)?,
            _ => {
                return Err(Error::invalid("write", "a write with other scales", "one that this cache has planned")
                    .fix("plan the write with this cache"));
            }
        };
        self.write.queue(shape, &layer.cache, stream, quantised)
    }
}
