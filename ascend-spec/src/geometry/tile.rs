//! Blocks of rows and keys.

/// Which scores of a block of rows and keys are visible.
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
    /// The kind of a block with `cells` cells of which `seen` are visible. Without cells it is [`Tile::None`].
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
