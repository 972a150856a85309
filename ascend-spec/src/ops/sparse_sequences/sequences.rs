//! The sequences of a call, and which keys a query row may use.

/// Where the rows of sequences are in a tensor, as CANN names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenLayout {
    /// `[B, S, N, D]`: each sequence has as much room.
    Bsnd,
    /// `[T, N, D]`: the rows of all sequences are packed.
    Tnd,
    /// `[blocks, block size, N, D]`: a paged cache with a block table.
    PaBsnd,
}

impl TokenLayout {
    /// CANN's name.
    pub const fn name(self) -> &'static str {
        match self {
            TokenLayout::Bsnd => "BSND",
            TokenLayout::Tnd => "TND",
            TokenLayout::PaBsnd => "PA_BSND",
        }
    }

    /// The layout of this name; names are in upper case.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = [TokenLayout::Bsnd, TokenLayout::Tnd, TokenLayout::PaBsnd].into_iter();
        all.find(|layout| layout.name() == name)
    }

    /// Number of axes.
    pub const fn rank(self) -> usize {
        match self {
            TokenLayout::Tnd => 3,
            TokenLayout::Bsnd | TokenLayout::PaBsnd => 4,
        }
    }
}

/// The rows that a tensor has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The tensor's layout.
    pub layout: TokenLayout,
    /// The first axis of BSND and PA_BSND; 1 for TND.
    pub outer: usize,
    /// Rows of each of them.
    pub rows: usize,
}

impl Room {
    /// The room of a tensor of this shape.
    pub(super) fn of(layout: TokenLayout, shape: &[i64]) -> Self {
        let size = |axis: usize| shape.get(axis).map_or(0, |&dim| dim.max(0) as usize);
        match layout {
            TokenLayout::Tnd => Room { layout, outer: 1, rows: size(0) },
            _ => Room { layout, outer: size(0), rows: size(1) },
        }
    }

    /// Rows of the whole tensor.
    pub fn total(&self) -> usize {
        self.outer.saturating_mul(self.rows)
    }
}

/// The sequences of a call that holds every rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseSequences {
    /// Number of sequences.
    pub batch: usize,
    /// Room for queries.
    pub query: Room,
    /// Room for keys.
    pub key: Room,
    /// Columns of the block table; 0 without one.
    pub columns: usize,
    /// Whether a row sees the keys up to its own position alone, counted from the end of its sequence.
    pub causal: bool,
}

/// Numbers of a call that are known on the device alone; an absent tensor has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SparseContents<'a> {
    /// Query rows of each sequence; for TND the end of each.
    pub query_lengths: &'a [i64],
    /// Keys of each sequence; for TND the end of each.
    pub key_lengths: &'a [i64],
    /// The block table, row by row.
    pub block_table: &'a [i64],
}

impl<'a> SparseContents<'a> {
    /// The lengths of queries and of keys, and the block table.
    pub fn of([query_lengths, key_lengths, block_table]: &'a [Vec<i64>; 3]) -> Self {
        SparseContents { query_lengths, key_lengths, block_table }
    }
}

/// One sequence of a call. Lengths are cut to the room that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseSequence {
    /// Its number.
    pub index: usize,
    /// Number of its first row among those of the query tensor.
    pub first_query: usize,
    /// Its query rows.
    pub queries: usize,
    /// The rows of outputs that a launch writes: for BSND those past its length as well.
    pub written: usize,
    /// Number of its first key among those of a tensor that is not paged.
    pub first_key: usize,
    /// Its keys.
    pub keys: usize,
}

impl SparseSequences {
    /// No sequences.
    pub(crate) const fn none() -> Self {
        const NONE: Room = Room { layout: TokenLayout::Tnd, outer: 0, rows: 0 };
        SparseSequences { batch: 0, query: NONE, key: NONE, columns: 0, causal: false }
    }

    /// Keys that a sequence has room for, where the layout gives each as much.
    fn key_room(&self) -> usize {
        match self.key.layout {
            TokenLayout::PaBsnd => self.columns.saturating_mul(self.key.rows),
            TokenLayout::Bsnd | TokenLayout::Tnd => self.key.rows,
        }
    }

    /// What the tensors say of each sequence, of its query rows and of its keys.
    pub(super) fn numbers<'a>(
        &'a self,
        contents: SparseContents<'a>,
    ) -> impl Iterator<Item = [Number; 2]> + Clone + 'a {
        let sides = [
            (self.query.layout, self.query.rows, contents.query_lengths),
            (self.key.layout, self.key_room(), contents.key_lengths),
        ];
        let mut before = [0; 2];
        (0..self.batch).map(move |index| {
            let mut numbers = [Number::default(); 2];
            for (side, (layout, room, lengths)) in sides.into_iter().enumerate() {
                let most = i64::try_from(room).unwrap_or(i64::MAX);
                let least = match layout {
                    TokenLayout::Tnd => before[side],
                    TokenLayout::Bsnd | TokenLayout::PaBsnd => 0,
                };
                let given = lengths.get(index).copied().unwrap_or(most);
                before[side] = given.clamp(least, most);
                numbers[side] = Number { given, least, most };
            }
            numbers
        })
    }

    /// All sequences. No row belongs to two of them.
    pub fn each<'a>(&'a self, contents: SparseContents<'a>) -> impl Iterator<Item = SparseSequence> + Clone + 'a {
        let first = |room: &Room, index: usize, number: &Number| match room.layout {
            TokenLayout::Tnd => number.least as usize,
            TokenLayout::Bsnd => index * room.rows,
            TokenLayout::PaBsnd => 0,
        };
        let numbered = self.numbers(contents).enumerate();
        numbered.map(move |(index, [query, key])| SparseSequence {
            index,
            first_query: first(&self.query, index, &query),
            queries: query.len(),
            written: match self.query.layout {
                TokenLayout::Tnd => query.len(),
                TokenLayout::Bsnd | TokenLayout::PaBsnd => self.query.rows,
            },
            first_key: first(&self.key, index, &key),
            keys: key.len(),
        })
    }

    /// Number of keys, from the first on, that row `row` of a sequence may use.
    pub fn candidates(&self, sequence: &SparseSequence, row: usize) -> usize {
        match (row < sequence.queries, self.causal) {
            (false, _) => 0,
            (true, false) => sequence.keys,
            (true, true) => (sequence.keys + row + 1).saturating_sub(sequence.queries),
        }
    }

    /// First axis and row of a key in the key tensor; `None` for a key of a block that the cache does not have.
    #[inline]
    pub fn key(
        &self,
        contents: &SparseContents<'_>,
        sequence: &SparseSequence,
        position: usize,
    ) -> Option<(usize, usize)> {
        match self.key.layout {
            TokenLayout::Tnd => Some((0, sequence.first_key + position)),
            TokenLayout::Bsnd => Some((sequence.index, position)),
            TokenLayout::PaBsnd => {
                let size = self.key.rows.max(1);
                let entry = sequence.index * self.columns + position / size;
                let block = contents.block_table.get(entry).copied();
                let block = block.and_then(|block| usize::try_from(block).ok());
                let block = block.filter(|&block| block < self.key.outer)?;
                Some((block, position % size))
            }
        }
    }

    /// Number of keys from `position` on, at least, that follow each other in the key tensor.
    #[inline]
    pub fn run(&self, position: usize) -> usize {
        let rows = self.key.rows.max(1);
        match self.key.layout {
            TokenLayout::PaBsnd => rows - position % rows,
            TokenLayout::Bsnd | TokenLayout::Tnd => rows,
        }
    }
}

/// What a tensor of lengths says of a sequence, and the least and the largest number that would do. For TND these are
/// ends.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Number {
    pub(super) given: i64,
    pub(super) least: i64,
    pub(super) most: i64,
}

impl Number {
    /// Length of the sequence within the room.
    pub(super) fn len(self) -> usize {
        usize::try_from(self.given.clamp(self.least, self.most) - self.least).unwrap_or(0)
    }
}
