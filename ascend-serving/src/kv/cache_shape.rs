//! The shape and format of a paged cache.

use ascend_attention::attention::Inputs;
use ascend_attention::spec::ops::fused_infer_attention_score::Cache;
use ascend_attention::{Device, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::slot_runs::spread_blocks;

/// The heads and the format of the cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CacheShape {
    /// Layers.
    pub layers: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Elements of a key's head.
    pub key_dim: usize,
    /// Elements of a value's head; 0 where only keys are cached.
    pub value_dim: usize,
    /// The format of a block.
    pub format: Cache,
    /// Whether the values of a block stand behind its keys, in one allocation
    /// ([`side_by_side`](CacheShape::side_by_side)).
    pub side_by_side: bool,
}

impl CacheShape {
    /// Most layers of a cache.
    pub const MAX_LAYERS: usize = 1 << 12;

    /// Keys and values of the same head dimension, in BnBsH.
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { layers, kv_heads, key_dim: head_dim, value_dim: head_dim, format: Cache::BnBsH, side_by_side: false }
    }

    /// A shape for multi-head latent attention: one head with the latent of 512 as key (and value) and the rotary
    /// part of 64 in place of the value.
    pub fn latent(layers: usize) -> Self {
        Self { layers, kv_heads: 1, key_dim: 512, value_dim: 64, format: Cache::BnBsH, side_by_side: false }
    }

    /// A shape for the keys of an indexer, which chooses the keys that sparse attention reads
    /// ([`SparseLatent`](crate::SparseLatent)): one head of 128, without values. Its layers are those that have an
    /// indexer. New tokens are written with values `[tokens, 1, 0]`.
    pub fn index_keys(layers: usize) -> Self {
        Self::new(layers, 1, 128).value_dim(0)
    }

    /// Whether it is a shape for latents ([`CacheShape::latent`]).
    pub(crate) fn is_latent(&self) -> bool {
        *self == Self::latent(self.layers).format(self.format)
    }

    /// Sets another head dimension of the values, 0 to cache keys alone.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Sets another format.
    ///
    /// Every format can be written, but NZ on the Atlas inference series; the operator's rules decide which queries
    /// read which format. On CANN 8.1 BnBsH is read by all queries, BnNBsD by BNSD and packed ones, NZ by packed ones
    /// and, in latent attention, by BSND ones; from 8.5 on every format is read by all, NZ with heads of 64 or 128
    /// (packed on 9.1 others too).
    pub fn format(mut self, format: Cache) -> Self {
        self.format = format;
        self
    }

    /// Lays the values of each block behind its keys, in one allocation for a layer: a block of a request is then one
    /// range of memory, which an engine moves or registers at once. Keys and values are strided views, with a
    /// stride of two blocks. They have one head dimension, and are not quantised.
    ///
    /// Which calls read such a cache in place is for the release to say: on Atlas A2 and A3 CANN 9.2 does in packed
    /// steps over BnBsH, on Ascend 950 in every step. Elsewhere backends refuse it, by `tensor.contiguous`,
    /// `tensor.strided` or, where each call would copy the whole cache, `cache.copied`.
    pub fn side_by_side(mut self) -> Self {
        self.side_by_side = true;
        self
    }

    /// The stride of the blocks of keys, or of values, in blocks.
    pub(super) fn block_step(&self) -> usize {
        match self.side_by_side {
            true => 2,
            false => 1,
        }
    }
}

impl CacheShape {
    /// Axes of a layer's tensor with heads of `dim` elements, and its number of elements; `None` with more than can be
    /// counted.
    pub(super) fn tensor<T: Element>(
        &self,
        blocks: usize,
        block_size: usize,
        dim: usize,
    ) -> Option<(Vec<usize>, usize)> {
        let size = |size: usize| i64::try_from(size).ok();
        let (heads, dim) = (size(self.kv_heads)?, size(dim)?);
        let (blocks, block_size) = (size(blocks)?, size(block_size)?);
        let dims = self.format.shape(T::DTYPE, blocks, block_size, heads, dim)?;
        let dims = dims.iter().map(|dim| usize::try_from(*dim).ok());
        let dims = dims.collect::<Option<Vec<usize>>>()?;
        let elements = dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim))?;
        // The bytes of a tensor are an isize.
        let most = isize::MAX as usize / size_of::<T>();
        (elements <= most).then_some((dims, elements))
    }

    /// Axes and numbers of elements of a layer's keys and values. Products of blocks, block size, heads and elements of
    /// a head can be counted afterwards.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for sizes of which some are 0, other than that of values, and
    /// for tensors with more bytes than can be counted.
    pub(super) fn tensors<T: Element>(&self, blocks: usize, block_size: usize) -> Result<[(Vec<usize>, usize); 2]> {
        let key = self.tensor::<T>(blocks, block_size, self.key_dim);
        let value = self.tensor::<T>(blocks, block_size, self.value_dim);
        match (key, value) {
            (Some(key), Some(value)) if key.1 > 0 => Ok([key, value]),
            _ => Err(Error::invalid(
                "shape",
                format_args!("{self:?}"),
                "sizes of 1 or more that go into the format, and whose product can be counted",
            )
            .fix("give sizes of 1 or more, and fewer blocks where the product is too large")),
        }
    }

    /// Refuses more layers than a cache has. Call it before allocating, since each layer takes memory.
    pub(super) fn check_layers(&self) -> Result<()> {
        if self.layers <= Self::MAX_LAYERS {
            return Ok(());
        }
        Err(Error::invalid(
            "shape",
            format_args!("{} layers", self.layers),
            format_args!("at most {}", Self::MAX_LAYERS),
        )
        .fix("divide the layers among several caches"))
    }

    /// All layers, full of zeros; the number of layers has been checked before.
    pub(super) fn zeroed_layers<T: Element>(
        &self,
        device: &Device,
        blocks: usize,
        block_size: usize,
    ) -> Result<Vec<LayerCache<T>>> {
        let [key, value] = self.tensors::<T>(blocks, block_size)?;
        if self.side_by_side {
            let layer = |_| self.zeroed_side_by_side(device, &key, &value);
            return (0..self.layers).map(layer).collect();
        }
        let zeros = |(dims, elements): &(Vec<usize>, usize)| -> Result<Tensor<T>> {
            let buffer = device.alloc_zeroed::<T>(*elements)?;
            Ok(Tensor::from_buffer(&buffer, dims)?)
        };
        let layer = |_| Ok(LayerCache { key: zeros(&key)?, value: zeros(&value)? });
        (0..self.layers).map(layer).collect()
    }

    /// A layer with the values of each block behind its keys, full of zeros.
    fn zeroed_side_by_side<T: Element>(
        &self,
        device: &Device,
        (dims, elements): &(Vec<usize>, usize),
        value: &(Vec<usize>, usize),
    ) -> Result<LayerCache<T>> {
        let both = elements.checked_mul(2).filter(|_| &value.0 == dims);
        let (Some(both), &[blocks, first, ref rest @ ..]) = (both, &dims[..]) else {
            return Err(Error::invalid(
                "shape",
                format_args!("keys of {} and values of {} side by side", self.key_dim, self.value_dim),
                "keys and values of one size, whose bytes together can be counted",
            )
            .fix("leave `side_by_side` out"));
        };
        let buffer = device.alloc_zeroed::<T>(both)?;
        let both = Tensor::from_buffer(&buffer, [&[blocks, 2 * first], rest].concat())?;
        Ok(LayerCache { key: both.narrow(1, 0..first)?, value: both.narrow(1, first..2 * first)? })
    }

    /// The number of separate pieces that a token's key is written in: its heads in BnNBsD, otherwise 1.
    pub(super) fn split(&self) -> usize {
        match self.format {
            Cache::BnNBsD => self.kv_heads,
            Cache::BnBsH | Cache::Nz => 1,
        }
    }

    /// The first `tokens` new rows `[tokens, N, D]` as they are written: in BnNBsD split, `[tokens * N, 1, D]`.
    pub(super) fn new_rows<T: Element>(
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
            [_, heads, dim] if heads == self.kv_heads => Ok(rows.reshape([tokens * heads, 1, dim])?),
            _ => Err(Error::invalid(argument, rows.desc(), format_args!("[tokens, {}, D]", self.kv_heads))
                .fix("bring the heads of the cache, in packed rows")),
        }
    }

    /// Refuses a format that copies cannot write.
    pub(super) fn check_copied(&self) -> Result<()> {
        match self.format {
            Cache::BnBsH | Cache::BnNBsD => Ok(()),
            Cache::Nz => Err(Error::invalid(
                "shape.format",
                "NZ, on a product without ScatterPaKvCache",
                "BnBsH, or BnNBsD: a token has many pieces in NZ",
            )
            .fix("choose another format")),
        }
    }

    /// A cache as it is written: contiguous, with [what is between its blocks](spread_blocks); in BnNBsD each head of
    /// a block is a block of its own.
    pub(super) fn writable<T: Element>(&self, cache: &Tensor<T>) -> Result<Tensor<T>> {
        let (cache, _) = spread_blocks(cache)?;
        match (self.format, cache.shape()) {
            (Cache::BnNBsD, &[blocks, heads, block_size, dim]) => {
                Ok(cache.reshape([blocks * heads, block_size, dim])?)
            }
            _ => Ok(cache),
        }
    }

    /// Refuses sizes that quantised keys and values cannot have, and where they are side by side.
    pub(super) fn check_quantised(&self, blocks: usize, block_size: usize) -> Result<()> {
        self.tensors::<i8>(blocks, block_size)?;
        let given = match (self.side_by_side, self.value_dim) {
            (false, 1..) => return Ok(()),
            (false, 0) => "quantised keys without values",
            (true, _) => "quantised keys and values side by side",
        };
        Err(Error::invalid("shape", given, "keys and values that lie apart")
            .fix("make the cache by `PagedKvCache::new`"))
    }
}

impl CacheShape {
    /// Refuses new keys and values that are not `[tokens, N, D]` with the heads of the cache: the same number of
    /// elements in another order would be other keys.
    pub(super) fn check_rows<T: Element>(&self, [key, value]: [&Tensor<T>; 2]) -> Result<(), Violation> {
        let rows = [("key", key, self.key_dim), ("value", value, self.value_dim)];
        for (name, tensor, dim) in rows {
            if !matches!(*tensor.shape(), [_, heads, elements] if [heads, elements] == [self.kv_heads, dim]) {
                return Err(Violation::new(
                    &rules::STEP_HEADS,
                    format_args!("{name} {:?}", tensor.shape()),
                    format_args!("[tokens, {}, {dim}], as the cache has heads", self.kv_heads),
                    "bring the heads of each token behind each other, in the order tokens, heads, elements",
                ));
            }
        }
        Ok(())
    }
}

/// The cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache<T: Element> {
    /// Keys, in BnBsH `[blocks, block_size, N * D]`; in latent attention the latents.
    pub key: Tensor<T>,
    /// Values, in the same format; in latent attention the rotary parts.
    pub value: Tensor<T>,
}

impl<T: Element> LayerCache<T> {
    /// The inputs of a call over the layer; queries of latents have rotary parts.
    pub(crate) fn inputs<'a>(&'a self, query: &'a Tensor<T>, query_rope: Option<&'a Tensor<T>>) -> Inputs<'a, T> {
        match query_rope {
            None => Inputs::new(query, &self.key, &self.value),
            Some(rope) => Inputs::new(query, &self.key, &self.key).rope(rope, &self.value),
        }
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        (self.key.len() + self.value.len()) * size_of::<T>()
    }

    /// Queues a copy of a block to another one.
    pub(super) fn copy_block(&self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        for tensor in [&self.key, &self.value] {
            let block = |block: usize| tensor.narrow(0, block..block + 1);
            let source = block(from)?;
            block(to)?.copy_from(stream, &source)?;
        }
        Ok(())
    }
}

/// The refusal of a layer that a model or a cache does not have.
#[cold]
pub(crate) fn no_layer(layer: usize, layers: usize) -> Error {
    Error::invalid("layer", layer, format_args!("below {layers}")).fix("count the layers of the cache from 0")
}
