//! What a call that holds every rule writes.

use super::{Parameter, ScatterCall};
use crate::TensorDesc;
use std::ops::Range;

/// A call of ScatterPaKvCache that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatterProblem {
    /// Number of new tokens, and of slots.
    pub tokens: usize,
    /// Number of blocks in each cache.
    pub blocks: usize,
    /// Number of tokens in a block.
    pub block_size: usize,
    /// The pieces of a new key, and their places in the cache.
    pub key: Pieces,
    /// The pieces of a new value, and their places in the cache; `None` for keys alone.
    pub value: Option<Pieces>,
}

/// The pieces in which the row of one token is stored in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Number of pieces of a row: one, or in the NZ order one for each 32 bytes of its `N * D` elements.
    pub count: usize,
    /// Number of bytes in a piece.
    pub bytes: usize,
}

impl Pieces {
    /// Number of bytes in one token's row.
    pub const fn row_bytes(&self) -> usize {
        self.count.saturating_mul(self.bytes)
    }

    /// Offset of the byte of the cache at which a piece of a row begins; the row must be within the cache.
    pub const fn place(&self, block_size: usize, block: usize, row: usize, piece: usize) -> usize {
        let piece = block.saturating_mul(self.count).saturating_add(piece);
        let row = piece.saturating_mul(block_size).saturating_add(row);
        row.saturating_mul(self.bytes)
    }
}

impl ScatterProblem {
    /// Number of slots in the caches; every slot is below it.
    pub const fn slots(&self) -> u64 {
        (self.blocks as u64).saturating_mul(self.block_size as u64)
    }

    /// Offset of the byte of the cache at which a piece of the row in a slot begins. The slot is below
    /// [`ScatterProblem::slots`].
    pub const fn place(&self, pieces: &Pieces, slot: usize, piece: usize) -> usize {
        let block_size = if self.block_size == 0 { 1 } else { self.block_size };
        let (block, row) = (slot / block_size, slot % block_size);
        pieces.place(self.block_size, block, row, piece)
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address: those of all tokens, and in caches those of all slots. Visits nothing without tokens.
    pub fn touches(&self, call: &ScatterCall<'_>, visit: &mut dyn FnMut(Parameter, Range<u64>)) {
        if self.tokens == 0 {
            return;
        }
        let slot_bytes = call.slot_mapping.and_then(|desc| desc.dtype.size()).unwrap_or(0);
        let mut rows_of = |count: u64, bytes: usize, parameter, desc: Option<TensorDesc>| {
            if let Some(desc) = desc {
                visit(parameter, desc.first_bytes(count.saturating_mul(bytes as u64)));
            }
        };
        let (tokens, slots) = (self.tokens as u64, self.slots());
        rows_of(tokens, slot_bytes, Parameter::SlotMapping, call.slot_mapping);
        let key = self.key.row_bytes();
        rows_of(tokens, key, Parameter::Key, call.key);
        rows_of(slots, key, Parameter::KeyCache, call.key_cache);
        if let Some(value) = self.value {
            rows_of(tokens, value.row_bytes(), Parameter::Value, call.value);
            rows_of(slots, value.row_bytes(), Parameter::ValueCache, call.value_cache);
        }
    }
}
