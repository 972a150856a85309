//! The sizes of tiles of keys and values.

/// Keys of a KV tile.
pub(crate) const TILE_KEYS: usize = 96;

/// Keys of a sub-tile of the decode kernel.
pub(crate) const SUB_TILE_KEYS: usize = TILE_KEYS / 2;
