//! New rows as floats of a byte in groups of 32 that share a power of two (MXFP8).

use std::collections::BTreeMap;
use std::ops::Range;

use ascend_attention::attention::Quantisation;
use ascend_attention::spec::minifloat::Float8E8M0;
use ascend_attention::{Device, Element, Stream, Tensor};

use crate::error::{Error, Result};

use super::cache_shape::{CacheShape, LayerCache};
use super::copied_writes::CopiedWrites;
use super::group_floats::{GROUP, Power, rows_in_groups};
use super::host_numbers::rows_to_quantise;
use super::slot::{head_block, head_slot};

/// Tokens whose powers of two lie side by side.
const PAIR: usize = 2 * GROUP;

/// Powers of two of a layer's groups: of keys along the elements of a head, of values along the tokens of a block.
#[derive(Clone, Debug)]
pub(crate) struct GroupScales {
    /// Bytes in blocks: of keys `[blocks, N, block_size, D/32]`, of values `[blocks, N, block_size/64, 2 * D]`.
    pub(super) blocks: LayerCache<i8>,
    /// As the operator reads them: `[blocks, N, block_size, D/64, 2]`.
    pub(crate) key: Tensor<Float8E8M0>,
    /// `[blocks, N, block_size/64, D, 2]`.
    pub(crate) value: Tensor<Float8E8M0>,
}

impl GroupScales {
    /// Of a layer without tokens.
    pub(super) fn new(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: &CacheShape,
    ) -> Result<Self> {
        let heads = shape.kv_heads;
        let pairs = block_size.div_ceil(PAIR);
        let of_key = shape.key_dim.div_ceil(2 * GROUP);
        let of_value = shape.value_dim.saturating_mul(2);
        let zeros = |of_head: usize, last: usize| -> Result<Tensor<i8>> {
            let dims = [blocks, heads, of_head, last];
            let all = dims
                .iter()
                .try_fold(1usize, |all, dim| all.checked_mul(*dim));
            let buffer = device.alloc_zeroed::<i8>(all.unwrap_or(usize::MAX))?;
            Ok(Tensor::from_buffer(&buffer, dims)?)
        };
        let key = zeros(block_size, of_key.saturating_mul(2))?;
        let value = zeros(pairs, of_value)?;
        let read = |bytes: &Tensor<i8>, dims: [usize; 5]| -> Result<Tensor<Float8E8M0>> {
            let powers = bytes.bits_as(<Float8E8M0 as Element>::DTYPE)?;
            Ok(powers.reshape(dims)?.typed()?)
        };
        Ok(Self {
            key: read(&key, [blocks, heads, block_size, of_key, 2])?,
            value: read(&value, [blocks, heads, pairs, shape.value_dim, 2])?,
            blocks: LayerCache { key, value },
        })
    }

    /// What a call with such queries brings.
    pub(crate) fn quantisation<'a>(&'a self, query: &'a Tensor<Float8E8M0>) -> Quantisation<'a> {
        Quantisation::MxFp8 {
            query_scale: query,
            key_scale: &self.key,
            value_scale: &self.value,
            quant_scale1: None,
        }
    }
}

/// New values in 64 neighbouring places of a block, whose powers of two lie in pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ValuePair {
    block: usize,
    /// Which of the block.
    pair: usize,
    /// The step's rows, and their places in the pair, in order.
    rows: Vec<(usize, usize)>,
    /// Places from the first group with a new row up to the last new row.
    places: Range<usize>,
}

impl ValuePair {
    /// Of rows with these slots.
    fn all(slots: &[Option<usize>], block_size: usize) -> Vec<Self> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for (row, slot) in slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let block = slot.checked_div(block_size).unwrap_or(0);
            let place = slot.checked_rem(block_size).unwrap_or(0);
            let of = all.entry((block, place / PAIR)).or_default();
            of.push((row, place % PAIR));
        }
        let pairs = all.into_iter().map(|((block, pair), mut rows)| {
            rows.sort_unstable_by_key(|(_, place)| *place);
            let ends = [rows.first(), rows.last()];
            let [first, last] = ends.map(|of| of.map_or(0, |(_, place)| *place));
            Self {
                block,
                pair,
                places: first.saturating_sub(first % GROUP)..last.saturating_add(1),
                rows,
            }
        });
        pairs.collect()
    }

    /// Whether places in front of new rows are not new: what is cached there shares their powers of two.
    fn is_shared(&self) -> bool {
        self.places.len() > self.rows.len()
    }

    /// Puts new values of one head among those in front of them, `[places, D]`, with powers of two `[D, 2]`.
    fn requantise<'a>(
        &self,
        dim: usize,
        new_row: impl Fn(usize) -> &'a [f32],
        stored: &mut [u8],
        powers: &mut [u8],
    ) {
        for group in 0..2usize {
            let places = group.saturating_mul(GROUP)..group.saturating_add(1).saturating_mul(GROUP);
            let rows = self.rows.iter().filter(|(_, at)| places.contains(at));
            let rows: Vec<_> = rows
                .map(|(row, at)| (new_row(*row), at.saturating_sub(places.start)))
                .collect();
            if rows.is_empty() {
                continue;
            }
            let from = places.start.saturating_sub(self.places.start);
            let powers = powers.iter_mut().skip(group).step_by(2);
            for (element, power) in powers.enumerate() {
                let column = stored.iter_mut().skip(element).step_by(dim.max(1));
                let mut column: Vec<_> = column.skip(from).take(GROUP).collect();
                let old = Power(*power);
                let mut numbers: Vec<f64> = column.iter().map(|bits| old.load(**bits)).collect();
                for (row, at) in &rows {
                    if let (Some(number), Some(new)) = (numbers.get_mut(*at), row.get(element)) {
                        *number = f64::from(*new);
                    }
                }
                let new = Power::covering(numbers.iter().copied());
                for (bits, number) in column.iter_mut().zip(numbers) {
                    **bits = new.store(number);
                }
                *power = new.0;
            }
        }
    }
}

/// Quantises the rows of a step on the host: no operator of the library makes groups.
///
/// Tokens come one by one, and the values of 32 of them share powers of two. So the floats in front of a new token in its group
/// are read back; where it is larger than they are, all become multiples of its power of two. Floats lose nothing by that, but for
/// those that become smaller than a 2^14th of the largest.
#[derive(Debug)]
pub(super) struct GroupQuantiser {
    /// Of the rows up to the last that is written.
    slots: Vec<Option<usize>>,
    /// Keys and values of all rows, for one layer after the other.
    floats: [Tensor<i8>; 2],
    /// Powers of two of the keys, head by head: `[N * rows, 1, D/32]`.
    key_powers: Tensor<i8>,
    /// Where they go.
    key_writes: CopiedWrites,
    pairs: Vec<ValuePair>,
    /// Powers of two of each head of each pair, `[pairs * N, 2 * D]`.
    value_powers: Tensor<i8>,
    /// Values of each head of each pair that is shared, `[shared pairs * N, 64, D]`.
    shared: Tensor<i8>,
}

impl GroupQuantiser {
    pub(super) fn new(
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
        let key_powers = [heads.saturating_mul(rows), 1, dim / GROUP];
        let (heads, dim) = heads_and_dim(values);
        let pairs = ValuePair::all(&slots, block_size);
        let shared = pairs.iter().filter(|of| of.is_shared()).count();
        let value_powers = [pairs.len().saturating_mul(heads), dim.saturating_mul(2)];
        let shared = [shared.saturating_mul(heads), PAIR, dim];
        Ok(Self {
            slots,
            key_powers: Tensor::empty(device, key_powers)?,
            key_writes,
            pairs,
            value_powers: Tensor::empty(device, value_powers)?,
            shared: Tensor::empty(device, shared)?,
            floats,
        })
    }

    /// Waits for the rows of a layer, quantises them, and writes their powers of two, and the values that share them.
    pub(super) fn queue<T: Element>(
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
        let (floats, powers) = rows_in_groups(numbers);
        keys.narrow(0, 0..self.slots.len())?
            .overwrite_bytes(stream, &floats)?;
        let (heads, dim) = heads_and_dim(keys);
        let groups = (dim / GROUP).max(1);
        let by_head = (0..heads).flat_map(|head| {
            let of_rows = powers.chunks(groups).skip(head).step_by(heads.max(1));
            of_rows.flatten().copied()
        });
        let by_head: Vec<u8> = by_head.collect();
        self.key_powers.overwrite_bytes(stream, &by_head)?;
        let of_blocks = shape.writable(&scales.blocks.key)?;
        self.key_writes
            .checked("scales", &self.key_powers, &of_blocks)?
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
            place.staged_powers.copy_from(stream, &place.powers)?;
            if let Some((staged, of_cache)) = &place.shared {
                staged.copy_from(stream, of_cache)?;
            }
        }
        let mut powers = self.value_powers.download_bytes(stream)?;
        let mut shared = self.shared.download_bytes(stream)?;
        let mut floats = vec![0u8; numbers.len()];
        let of_pair = PAIR.saturating_mul(dim);
        let mut of_shared = shared.chunks_mut(of_pair.max(1));
        let mut of_powers = powers.chunks_mut(dim.saturating_mul(2).max(1));
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
                pair.requantise(dim, new_row, stored, of_powers.next().unwrap_or_default());
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
        self.value_powers.overwrite_bytes(stream, &powers)?;
        self.shared.overwrite_bytes(stream, &shared)?;
        for place in &cached {
            place.powers.copy_from(stream, &place.staged_powers)?;
            if let Some((staged, of_cache)) = &place.shared {
                of_cache.copy_from(stream, staged)?;
            }
        }
        let first = values.narrow(0, 0..self.slots.len())?;
        Ok(first.overwrite_bytes(stream, &floats)?)
    }

    /// Where the heads of the pairs are in a layer.
    fn places(&self, cache: &LayerCache<i8>, scales: &GroupScales) -> Result<Vec<HeadOfPair>> {
        let &[blocks, heads, block_size, dim] = cache.value.shape() else {
            return Err(Error::invalid(
                "cache",
                cache.value.desc(),
                "[blocks, N, block_size, D]",
            ));
        };
        let of_blocks = blocks.saturating_mul(heads);
        let values = cache
            .value
            .reshape([of_blocks.saturating_mul(block_size), dim])?;
        let pairs_of_head = block_size / PAIR;
        let powers = [
            of_blocks.saturating_mul(pairs_of_head),
            dim.saturating_mul(2),
        ];
        let powers = scales.blocks.value.reshape(powers)?;
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
                    powers: powers.narrow(0, row..row.saturating_add(1))?,
                    staged_powers: self
                        .value_powers
                        .narrow(0, staged..staged.saturating_add(1))?,
                    shared: of_shared,
                });
            }
        }
        Ok(all)
    }
}

/// What a write reads back and changes of a layer.
struct HeadOfPair {
    powers: Tensor<i8>,
    staged_powers: Tensor<i8>,
    /// Where to, and the values from the first place that is read to the last new one.
    shared: Option<(Tensor<i8>, Tensor<i8>)>,
}

/// Heads and their elements: of rows `[tokens, N, D]` the last two axes, of a cache `[blocks, N, block_size, D]` the second
/// and the last.
fn heads_and_dim(tensor: &Tensor<i8>) -> (usize, usize) {
    match *tensor.shape() {
        [_, heads, dim] | [_, heads, _, dim] => (heads, dim),
        _ => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_from_the_first_group_with_a_new_row() {
        let slots = [
            Some(70),
            Some(71),
            None,
            Some(127),
            Some(128),
            Some(640),
            Some(512),
        ];
        let pairs = ValuePair::all(&slots, 512);
        let of = |block, pair, rows: &[(usize, usize)], places| ValuePair {
            block,
            pair,
            rows: rows.to_vec(),
            places,
        };
        let want = [
            of(0, 1, &[(0, 6), (1, 7), (3, 63)], 0..64),
            of(0, 2, &[(4, 0)], 0..1),
            of(1, 0, &[(6, 0)], 0..1),
            of(1, 2, &[(5, 0)], 0..1),
        ];
        assert_eq!(pairs, want);
        assert_eq!(
            pairs.iter().map(ValuePair::is_shared).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        let second = ValuePair::all(&[Some(33), Some(34)], 512);
        assert_eq!(second[0].places, 32..35);
        assert!(second[0].is_shared());
        assert!(ValuePair::all(&[None, None], 512).is_empty());
    }
}
