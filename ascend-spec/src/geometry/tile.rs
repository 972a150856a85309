//! Blocks of rows and keys.

/// What a geometry says about a block of rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No row sees any of the keys.
    None,
    /// Every row sees every key.
    All,
    /// Some rows see some keys.
    Mixed,
}

impl Tile {
    /// The verdict on a block of `cells` cells of which `seen` are visible. Without cells it is [`Tile::None`].
    pub(super) const fn of(seen: u128, cells: u128) -> Self {
        if seen == 0 {
            Tile::None
        } else if seen == cells {
            Tile::All
        } else {
            Tile::Mixed
        }
    }
}
