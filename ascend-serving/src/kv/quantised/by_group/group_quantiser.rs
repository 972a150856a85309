//! New rows as MXFP8: 8-bit floats in groups of 32 that share a scale.

use ascend_attention::{Device, Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::kv::cache_shape::{CacheShape, LayerCache};
use crate::kv::copied_writes::CopiedWrites;
use crate::kv::quantised::rows_on_host::rows_to_quantise;
use crate::kv::slot::{head_block, head_slot};

use super::group_scales::GroupScales;
use super::mxfp8::{GROUP, quantise_mxfp8};
use super::value_pair::{PAIR, ValuePair};

/// Quantises the rows of a step on the host: no operator of the library makes groups.
///
/// Tokens come one by one, and the values of 32 of them share a scale. So the floats of earlier tokens in a new
/// token's group are read back; where the new value is larger than they are, the group is quantised anew by its
/// scale. Floats lose nothing by that, except those that become smaller than a 2^14th of the largest.
#[derive(Debug)]
pub(in crate::kv) struct GroupQuantiser {
    /// Slots of the rows up to the last one that is written.
    slots: Vec<Option<usize>>,
    /// Keys and values of all rows, used by one layer after the other.
    floats: [Tensor<i8>; 2],
    /// Shared scales of the keys, head by head: `[N * rows, 1, D/32]`.
    key_scales: Tensor<i8>,
    /// The copies of these scales to their blocks.
    key_writes: CopiedWrites,
    pairs: Vec<ValuePair>,
    /// Shared scales of each head of each pair, `[pairs * N, 2 * D]`.
    value_scales: Tensor<i8>,
    /// Values of each head of each pair that also has cached values, `[shared pairs * N, 64, D]`.
    shared: Tensor<i8>,
}

impl GroupQuantiser {
    pub(in crate::kv) fn new(
        device: &Device,
        floats: [Tensor<i8>; 2],
        slots: Vec<Option<usize>>,
        block_size: usize,
    ) -> Result<Self> {
        let [keys, values] = &floats;
        let rows = slots.len();
        let (heads, dim) = heads_and_dim(keys);
        let places = (0..heads).flat_map(|head| {
            let of_head = move |slot| head_slot(slot, block_size, heads, head);
            slots.iter().map(move |slot| slot.map(of_head))
        });
        let key_writes = CopiedWrites::new(places, block_size);
        let key_scales = [heads.saturating_mul(rows), 1, dim / GROUP];
        let (heads, dim) = heads_and_dim(values);
        let pairs = ValuePair::all(&slots, block_size);
        let shared = pairs.iter().filter(|of| of.is_shared()).count();
        let value_scales = [pairs.len().saturating_mul(heads), dim.saturating_mul(2)];
        let shared = [shared.saturating_mul(heads), PAIR, dim];
        Ok(Self {
            slots,
            key_scales: Tensor::empty(device, key_scales)?,
            key_writes,
            pairs,
            value_scales: Tensor::empty(device, value_scales)?,
            shared: Tensor::empty(device, shared)?,
            floats,
        })
    }

    /// Waits for the rows of a layer, quantises them, and writes their shared scales and the cached values of the
    /// same groups.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        shape: &CacheShape,
        stream: &Stream,
        [key, value]: [&Tensor<T>; 2],
        cache: &LayerCache<i8>,
        scales: &GroupScales,
    ) -> Result<[&Tensor<i8>; 2]> {
        let [keys, values] = &self.floats;
        let slots = &self.slots;
        let (key, _) = rows_to_quantise(stream, "key", key, keys.shape(), slots)?;
        let (value, _) = rows_to_quantise(stream, "value", value, values.shape(), slots)?;
        self.keys(shape, stream, &key, scales)?;
        self.values(stream, &value, cache, scales)?;
        Ok(self.floats.each_ref())
    }

    fn keys(
        &self,
        shape: &CacheShape,
        stream: &Stream,
        numbers: &[f32],
        scales: &GroupScales,
    ) -> Result<()> {
        let [keys, _] = &self.floats;
        let (floats, shared_scales) = quantise_mxfp8(numbers);
        keys.narrow(0, 0..self.slots.len())?
            .overwrite_bytes(stream, &floats)?;
        let (heads, dim) = heads_and_dim(keys);
        let groups = (dim / GROUP).max(1);
        let by_head = (0..heads).flat_map(|head| {
            let of_rows = shared_scales
                .chunks(groups)
                .skip(head)
                .step_by(heads.max(1));
            of_rows.flatten().copied()
        });
        let by_head: Vec<u8> = by_head.collect();
        self.key_scales.overwrite_bytes(stream, &by_head)?;
        let of_blocks = shape.writable(&scales.blocks.key)?;
        self.key_writes
            .checked("scales", &self.key_scales, &of_blocks)?
            .queue(stream)
    }

    fn values(
        &self,
        stream: &Stream,
        numbers: &[f32],
        cache: &LayerCache<i8>,
        scales: &GroupScales,
    ) -> Result<()> {
        let [_, values] = &self.floats;
        let (heads, dim) = heads_and_dim(values);
        let cached = self.places(cache, scales)?;
        for place in &cached {
            place
                .staged_scales
                .copy_from(stream, &place.shared_scales)?;
            if let Some((staged, of_cache)) = &place.shared {
                staged.copy_from(stream, of_cache)?;
            }
        }
        let mut shared_scales = self.value_scales.download_bytes(stream)?;
        let mut shared = self.shared.download_bytes(stream)?;
        let mut floats = vec![0u8; numbers.len()];
        let of_pair = PAIR.saturating_mul(dim);
        let mut of_shared = shared.chunks_mut(of_pair.max(1));
        let mut of_scales = shared_scales.chunks_mut(dim.saturating_mul(2).max(1));
        let mut alone = vec![0u8; of_pair];
        for pair in &self.pairs {
            for head in 0..heads {
                let head_of = |row: usize| row.saturating_mul(heads).saturating_add(head);
                let new_row = |row| numbers.chunks(dim.max(1)).nth(head_of(row)).unwrap_or(&[]);
                let stored = match pair.is_shared() {
                    true => of_shared.next().unwrap_or_default(),
                    false => &mut alone[..],
                };
                let of_places = pair.places.len().saturating_mul(dim);
                let stored = stored.get_mut(..of_places).unwrap_or_default();
                pair.requantise(dim, new_row, stored, of_scales.next().unwrap_or_default());
                for (row, place) in &pair.rows {
                    let place = place.saturating_sub(pair.places.start);
                    let from = stored.chunks(dim.max(1)).nth(place);
                    let to = floats.chunks_mut(dim.max(1)).nth(head_of(*row));
                    if let (Some(from), Some(to)) = (from, to) {
                        to.copy_from_slice(from);
                    }
                }
            }
        }
        self.value_scales.overwrite_bytes(stream, &shared_scales)?;
        self.shared.overwrite_bytes(stream, &shared)?;
        for place in &cached {
            place
                .shared_scales
                .copy_from(stream, &place.staged_scales)?;
            if let Some((staged, of_cache)) = &place.shared {
                of_cache.copy_from(stream, staged)?;
            }
        }
        let first = values.narrow(0, 0..self.slots.len())?;
        Ok(first.overwrite_bytes(stream, &floats)?)
    }

    /// The tensors of a layer for each head of each pair.
    fn places(&self, cache: &LayerCache<i8>, scales: &GroupScales) -> Result<Vec<HeadOfPair>> {
        let &[blocks, heads, block_size, dim] = cache.value.shape() else {
            return Err(
                Error::invalid("cache", cache.value.desc(), "[blocks, N, block_size, D]")
                    .fix("make the cache by `PagedKvCache::mxfp8`"),
            );
        };
        let of_blocks = blocks.saturating_mul(heads);
        let values = cache
            .value
            .reshape([of_blocks.saturating_mul(block_size), dim])?;
        let pairs_of_head = block_size / PAIR;
        let shared_scales = [
            of_blocks.saturating_mul(pairs_of_head),
            dim.saturating_mul(2),
        ];
        let shared_scales = scales.blocks.value.reshape(shared_scales)?;
        let (mut all, mut shared) = (Vec::new(), 0usize);
        for pair in &self.pairs {
            for head in 0..heads {
                let block = head_block(pair.block, heads, head);
                let row = block.saturating_mul(pairs_of_head);
                let row = row.saturating_add(pair.pair);
                let staged = all.len();
                let of_shared = match pair.is_shared() {
                    false => None,
                    true => {
                        let first = row.saturating_mul(PAIR).saturating_add(pair.places.start);
                        let places = first..first.saturating_add(pair.places.len());
                        let staged = self.shared.narrow(0, shared..shared.saturating_add(1))?;
                        let staged = staged.reshape([PAIR, dim])?;
                        shared = shared.saturating_add(1);
                        let staged = staged.narrow(0, 0..pair.places.len())?;
                        Some((staged, values.narrow(0, places)?))
                    }
                };
                all.push(HeadOfPair {
                    shared_scales: shared_scales.narrow(0, row..row.saturating_add(1))?,
                    staged_scales: self
                        .value_scales
                        .narrow(0, staged..staged.saturating_add(1))?,
                    shared: of_shared,
                });
            }
        }
        Ok(all)
    }
}

/// The tensors of one head of a pair that a write reads back and changes.
struct HeadOfPair {
    shared_scales: Tensor<i8>,
    staged_scales: Tensor<i8>,
    /// Staging memory, and the cached values from the first place that is read to the last new one.
    shared: Option<(Tensor<i8>, Tensor<i8>)>,
}

/// The number of heads and of their elements: in rows `[tokens, N, D]` the last two axes, in a cache
/// `[blocks, N, block_size, D]` the second and the last.
fn heads_and_dim(tensor: &Tensor<i8>) -> (usize, usize) {
    match *tensor.shape() {
        [_, heads, dim] | [_, heads, _, dim] => (heads, dim),
        _ => (0, 0),
    }
}
