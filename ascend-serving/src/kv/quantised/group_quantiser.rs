//! New rows as MXFP8: 8-bit floats in groups of 32 that share a scale.

use ascend_attention::{Device, Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::kv::cache_shape::{CacheShape, LayerCache};
use crate::kv::copied_writes::CopiedWrites;
use crate::kv::slot::{head_block, head_slot};

use super::mxfp8::{GROUP, GroupScales, PAIR, quantise_mxfp8};
use super::rows_on_host::rows_to_quantise;
use super::value_pair::ValuePair;

/// Quantises the rows of a step on the host: no operator of the library makes groups.
///
/// Tokens come one by one, and the values of 32 of them share a scale. So the floats of earlier tokens in a new
/// token's group are read back; where the new value is larger than they are, the group is quantised anew by its
/// scale. Floats lose nothing by that, except those that become smaller than a 2^14th of the largest.
#[derive(Debug)]
pub(in crate::kv) struct GroupQuantiser {
    /// The shape of the cache, whose heads and elements the rows have.
    shape: CacheShape,
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
    /// Prepares the quantisation of rows that a cache of this shape takes.
    pub(in crate::kv) fn new(
        device: &Device,
        shape: CacheShape,
        floats: [Tensor<i8>; 2],
        slots: Vec<Option<usize>>,
        block_size: usize,
    ) -> Result<Self> {
        let (heads, dim) = (shape.kv_heads, shape.value_dim);
        let places = (0..heads).flat_map(|head| {
            let of_head = move |slot| head_slot(slot, block_size, heads, head);
            slots.iter().map(move |slot| slot.map(of_head))
        });
        let key_writes = CopiedWrites::new(places, block_size);
        let pairs = ValuePair::all(&slots, block_size);
        let shared = pairs.iter().filter(|pair| pair.is_shared()).count();
        let key_scales = [heads * slots.len(), 1, shape.key_dim / GROUP];
        Ok(Self {
            key_scales: Tensor::empty(device, key_scales)?,
            value_scales: Tensor::empty(device, [pairs.len() * heads, 2 * dim])?,
            shared: Tensor::empty(device, [shared * heads, PAIR, dim])?,
            shape,
            slots,
            key_writes,
            pairs,
            floats,
        })
    }

    /// Waits for the rows of a layer, quantises them, and writes their shared scales and the cached values of the
    /// same groups. `torn` is true after an error between these two: values that were cached before are lost then.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        stream: &Stream,
        [key, value]: [&Tensor<T>; 2],
        (cache, scales): (&LayerCache<i8>, &GroupScales),
        torn: &mut bool,
    ) -> Result<[&Tensor<i8>; 2]> {
        let [keys, values] = &self.floats;
        let slots = &self.slots;
        let (key, _) = rows_to_quantise(stream, "key", key, keys.shape(), slots)?;
        let (value, _) = rows_to_quantise(stream, "value", value, values.shape(), slots)?;
        self.write_key_scales(stream, &key, scales)?;
        self.requantise_values(stream, &value, (cache, scales), torn)?;
        Ok(self.floats.each_ref())
    }

    /// Quantises the keys, and writes their shared scales.
    fn write_key_scales(&self, stream: &Stream, numbers: &[f32], scales: &GroupScales) -> Result<()> {
        let [keys, _] = &self.floats;
        let (floats, shared_scales) = quantise_mxfp8(numbers);
        keys.narrow(0, 0..self.slots.len())?.overwrite_bytes(stream, &floats)?;
        let (heads, groups) = (self.shape.kv_heads, self.shape.key_dim / GROUP);
        let by_head = (0..heads).flat_map(|head| {
            let scales_of_rows = shared_scales.chunks(groups).skip(head).step_by(heads);
            scales_of_rows.flatten().copied()
        });
        let by_head: Vec<u8> = by_head.collect();
        self.key_scales.overwrite_bytes(stream, &by_head)?;
        let of_blocks = self.shape.writable(&scales.blocks.key)?;
        self.key_writes.checked("scales", &self.key_scales, &of_blocks)?.queue(stream)
    }

    /// Quantises the values with the cached ones of the same groups, and writes both and their shared scales.
    fn requantise_values(
        &self,
        stream: &Stream,
        numbers: &[f32],
        (cache, scales): (&LayerCache<i8>, &GroupScales),
        torn: &mut bool,
    ) -> Result<()> {
        let [_, values] = &self.floats;
        let (heads, dim) = (self.shape.kv_heads, self.shape.value_dim);
        let cached = self.places(cache, scales)?;
        for place in &cached {
            place.staged_scales.copy_from(stream, &place.shared_scales)?;
            if let Some((staged, of_cache)) = &place.shared {
                staged.copy_from(stream, of_cache)?;
            }
        }
        let mut shared_scales = self.value_scales.download_bytes(stream)?;
        let mut shared = self.shared.download_bytes(stream)?;
        let mut floats = vec![0u8; numbers.len()];
        let mut of_shared = shared.chunks_mut(PAIR * dim);
        let mut alone = vec![0u8; PAIR * dim];
        let heads_of_pairs = (self.pairs.iter()).flat_map(|pair| (0..heads).map(move |h| (pair, h)));
        let of_scales = shared_scales.chunks_mut(2 * dim);
        for ((pair, head), scales) in heads_of_pairs.zip(of_scales) {
            let shared = match pair.is_shared() {
                true => of_shared.next(),
                false => None,
            };
            let stored = shared.unwrap_or(&mut alone);
            let stored = &mut stored[..pair.places.len() * dim];
            let elements = |row: usize| {
                let first = (row * heads + head) * dim;
                first..first + dim
            };
            pair.requantise(dim, |row| &numbers[elements(row)], stored, scales);
            for (row, place) in &pair.rows {
                let first = (place - pair.places.start) * dim;
                floats[elements(*row)].copy_from_slice(&stored[first..first + dim]);
            }
        }
        self.value_scales.overwrite_bytes(stream, &shared_scales)?;
        self.shared.overwrite_bytes(stream, &shared)?;
        *torn = true;
        for place in &cached {
            place.shared_scales.copy_from(stream, &place.staged_scales)?;
            if let Some((staged, of_cache)) = &place.shared {
                of_cache.copy_from(stream, staged)?;
            }
        }
        *torn = false;
        let first = values.narrow(0, 0..self.slots.len())?;
        Ok(first.overwrite_bytes(stream, &floats)?)
    }

    /// The tensors of a layer for each head of each pair.
    fn places(&self, cache: &LayerCache<i8>, scales: &GroupScales) -> Result<Vec<HeadOfPair>> {
        let (heads, dim) = (self.shape.kv_heads, self.shape.value_dim);
        let (blocks, block_size) = match *cache.value.shape() {
            [blocks, n, block_size, d] if [n, d] == [heads, dim] => (blocks, block_size),
            _ => {
                let allowed = format_args!("[blocks, {heads}, block_size, {dim}]");
                return Err(
                    Error::invalid("cache", cache.value.desc(), allowed).fix("make the cache by `PagedKvCache::mxfp8`")
                );
            }
        };
        let values = [blocks * heads * block_size, dim];
        let values = cache.value.reshape(values)?;
        let pairs_of_head = block_size / PAIR;
        let shared_scales = [blocks * heads * pairs_of_head, 2 * dim];
        let shared_scales = scales.blocks.value.reshape(shared_scales)?;
        let (mut all, mut shared) = (Vec::new(), 0);
        for pair in &self.pairs {
            for head in 0..heads {
                let row = head_block(pair.block, heads, head) * pairs_of_head + pair.pair;
                let mut of_shared = None;
                if pair.is_shared() {
                    let first = row * PAIR + pair.places.start;
                    let cached = values.narrow(0, first..first + pair.places.len())?;
                    let staged = self.shared.narrow(0, shared..shared + 1)?;
                    let staged = staged.reshape([PAIR, dim])?;
                    of_shared = Some((staged.narrow(0, 0..pair.places.len())?, cached));
                    shared += 1;
                }
                let staged = all.len();
                all.push(HeadOfPair {
                    shared_scales: shared_scales.narrow(0, row..row + 1)?,
                    staged_scales: self.value_scales.narrow(0, staged..staged + 1)?,
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
