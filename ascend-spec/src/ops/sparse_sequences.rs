//! What the operators of sparse attention share: the sequences of a call, which keys a query row may use, and what is
//! wrong with the lengths and tables that are only known on the device.

use crate::allowed::{Axis, Checked, DivisorsOf, Multiples, Named, Rank, Shapes};
use crate::content_fault::{ContentFault, check_faults};
use crate::{Rule, TensorDesc, Violation};
use std::fmt;

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
    fn of(layout: TokenLayout, shape: &[i64]) -> Self {
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

/// The side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Queries.
    Query,
    /// Keys.
    Key,
}

/// A number on the device that leads outside of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseFault {
    /// A length is below 0 or larger than the room for it, or a sequence ends before it begins.
    Length {
        /// Number of the sequence.
        sequence: usize,
        /// Whose length it is.
        side: Side,
        /// The number in the tensor.
        given: i64,
        /// The least and the largest number that would do.
        allowed: [i64; 2],
    },
    /// The row of a sequence in the block table ends before its keys do.
    NoColumn {
        /// Number of the sequence.
        sequence: usize,
        /// Keys of the sequence.
        keys: i64,
        /// Keys that a row of the table can name.
        room: i64,
    },
    /// The block table names a block that the cache does not have.
    NoBlock {
        /// Number of the sequence.
        sequence: usize,
        /// Column of the table.
        column: usize,
        /// The block.
        block: i64,
        /// Number of blocks in the cache.
        blocks: usize,
    },
}

impl ContentFault for SparseFault {
    fn texts(&self) -> [String; 2] {
        match self {
            SparseFault::Length { sequence, side, given, allowed: [least, most] } => {
                let side = match side {
                    Side::Query => "query rows",
                    Side::Key => "keys",
                };
                let given = format!("{given} for the {side} of sequence {sequence}");
                [given, format!("{least} to {most}")]
            }
            SparseFault::NoColumn { sequence, keys, room } => [
                format!("{keys} keys of sequence {sequence}"),
                format!("at most {room}, for which its row of the block table has room"),
            ],
            SparseFault::NoBlock { sequence, column, block, blocks } => [
                format!("block {block} in column {column} of sequence {sequence}"),
                format!("0 to {}", blocks.saturating_sub(1)),
            ],
        }
    }
}

impl fmt::Display for SparseFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [given, allowed] = self.texts();
        write!(f, "{given}, allowed: {allowed}")
    }
}

/// Declares the rules of an operator of sparse attention: those about products, formats, sequences and what their
/// tensors hold, which each such operator has, and its own between them, in the form of [`rules!`](crate::rule::rules):
/// those about arguments, about attributes, and about shapes with the lints. Also declares the table `SEQUENCES` of the
/// rules that [`SequenceRules`] asks. `$id` begins each id, `$layout_key` is the argument with the layout of keys,
/// `$release_950` the release from which Ascend 950 has the operator, and `$without_keys` says what becomes of rows
/// without keys. `$columns` and `$multiples` are joined to the sentences on block tables and on block sizes: what the
/// operator requires besides, `""` where that is nothing.
macro_rules! sequence_rules {
    (
        $id:literal, $operator:literal, layout of keys $layout_key:literal, on Ascend 950 since $release_950:literal,
        columns $columns:literal, multiples $multiples:literal, rows without keys $without_keys:literal, in $scope:expr;
        { $($arguments:tt)* }
        { $($attributes:tt)* }
        { $($shapes:tt)* }
    ) => {
        $crate::rule::rules! {
            in $scope;
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products" in Scope::ALL,
                "the product has the operator in the release",
                "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer, or on Ascend 950 with CANN " $release_950
                " or newer";
            $($arguments)*
            FORMAT = $id ".format", PARAM_INVALID, V1, $operator " documentation, parameters",
                "tensors are in a plain format such as ND, with dimensions of at least 0 whose bytes can be addressed",
                "describe the tensor as ND, with a shape that memory can hold";
            LAYOUT = $id ".layout", TILING_ERROR, V1, $operator " tiling, layouts",
                "layoutQuery is BSND or TND, and " $layout_key " the same or PA_BSND",
                "spell the layouts as CANN does";
            MODE = $id ".sparse_mode", TILING_ERROR, V1, $operator " tiling, sparseMode",
                "sparseMode is 0 or 3",
                "use 3 for causal attention, 0 for attention to all keys";
            TOKENS = $id ".tokens", TILING_ERROR, V1, $operator " tiling, preTokens and nextTokens",
                "preTokens and nextTokens are the largest INT64",
                "pass 9223372036854775807 for both";
            $($attributes)*
            RANK = $id ".rank", TILING_ERROR, V1, $operator " tiling, shapes",
                "query and key have the axes of their layouts",
                "describe the tensor with as many axes";
            BLOCK_TABLE = $id ".block_table", TILING_ERROR, V1, $operator " tiling, blockTable",
                "blockTable is [B, columns]" $columns ", for PA_BSND and for no other layout",
                "give a row of block ids for each sequence of a paged cache, and no table without one";
            LENGTHS = $id ".lengths", TILING_ERROR, V1, $operator " tiling, actualSeqLengths",
                "lengths have an element for each sequence, and are given for TND and for keys in a paged cache",
                "give a number for each sequence";
            BATCH = $id ".batch", TILING_ERROR, V1, $operator " tiling, batch",
                "query and key have the same number of sequences",
                "make both from the same batch";
            BLOCK_SIZE = $id ".block_size", TILING_ERROR, V1, $operator " tiling, block size",
                "a cache has at least one block, of 16 to 1024 keys, a multiple of 16" $multiples,
                "use such a block size";
            $($shapes)*
            ROWS_LEFT_OUT = $id ".rows_left_out", Lint("such rows of the outputs keep what was there"), V1,
                $operator " kernel, actualSeqLengthsQuery",
                "packed query rows all belong to a sequence",
                "give the lengths of all rows of the query, or a query of these rows alone";
            ROWS_WITHOUT_KEYS = $id ".rows_without_keys", Lint($without_keys), V1,
                $operator " kernel, lengths and sparseMode",
                "with sparseMode 3 a sequence has at least as many keys as query rows",
                "count a sequence's cached keys and its new ones among its keys";
            CONTENTS = $id ".contents", Overrun("rows of other memory are read or written"), V1,
                $operator " kernel, lengths and blockTable",
                "lengths are at least 0, ascend where they are ends, and lie within the tensors; blockTable has a "
                "block of the cache for each key",
                "take lengths and table of one batch and one cache, and give `SparseSequences` the length of each "
                "sequence, of which it makes the ends that packed rows have";
        }

        /// The rules of the call's sequences.
        const SEQUENCES: $crate::ops::sparse_sequences::SequenceRules =
            $crate::ops::sparse_sequences::SequenceRules {
                layout: &LAYOUT,
                mode: &MODE,
                tokens: &TOKENS,
                rank: &RANK,
                lengths: &LENGTHS,
                batch: &BATCH,
                block_table: &BLOCK_TABLE,
                block_size: &BLOCK_SIZE,
            };
    };
}

/// `CallContract::check_contents` and `lint_contents` of an operator of sparse attention, whose call has `check` for a target. `$contents`
/// are the parameters of the lengths of queries and keys and of the block table.
macro_rules! checked_by_sequences {
    ($contents:expr $(, $version:ident)?) => {
        fn check_contents(
            arguments: &Self::Arguments,
            _version: Version,
            target: $crate::Target,
            integers: &dyn Fn(&str) -> Vec<i64>,
        ) -> Result<(), $crate::Violation> {
            $(let $version = _version;)?
            let Ok(problem) = arguments.call().check($($version,)? target) else {
                return Ok(());
            };
            $crate::ops::sparse_sequences::checked_contents(
                &problem.sequences,
                &$contents.map(|parameter| integers(parameter.name())),
                &rules::CONTENTS,
            )
        }

        fn lint_contents(
            arguments: &Self::Arguments,
            _version: Version,
            target: $crate::Target,
            bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
            report: &mut dyn FnMut($crate::Violation),
        ) {
            $(let $version = _version;)?
            let Ok(problem) = arguments.call().check($($version,)? target) else {
                return;
            };
            let mut numbers = [const { Vec::new() }; 3];
            for (numbers, parameter) in numbers.iter_mut().zip($contents) {
                if arguments.tensor(parameter).is_none() {
                    continue;
                }
                let Some(bytes) = bytes(parameter.name()) else {
                    return;
                };
                numbers.extend(bytes.as_chunks().0.iter().map(|&number| i64::from(i32::from_le_bytes(number))));
            }
            let lints = [Some(&rules::ROWS_LEFT_OUT), Some(&rules::ROWS_WITHOUT_KEYS)];
            let unusual = $crate::ops::sparse_sequences::unusual_contents(&problem.sequences, &numbers, lints);
            unusual.into_iter().flatten().for_each(report);
        }
    };
}

pub(crate) use {checked_by_sequences, sequence_rules};

/// The rules of an operator's sequences.
pub(crate) struct SequenceRules {
    pub(crate) layout: &'static Rule,
    pub(crate) mode: &'static Rule,
    pub(crate) tokens: &'static Rule,
    pub(crate) rank: &'static Rule,
    pub(crate) lengths: &'static Rule,
    pub(crate) batch: &'static Rule,
    pub(crate) block_table: &'static Rule,
    pub(crate) block_size: &'static Rule,
}

/// The tensors of a call that say which sequences it has.
pub(crate) struct SequenceTensors<'a> {
    pub(crate) query: &'a TensorDesc,
    pub(crate) key: &'a TensorDesc,
    /// Lengths of queries and of keys.
    pub(crate) lengths: [Option<TensorDesc>; 2],
    /// CANN's names of both.
    pub(crate) names: [&'static str; 2],
    pub(crate) block_table: Option<TensorDesc>,
    /// Keys of a block of the lists by which rows read a cache, whose table must have a column then; `None` for an
    /// operator without lists, which takes a table without columns.
    pub(crate) sparse_block_size: Option<i64>,
}

impl SequenceRules {
    /// Checks the attributes by which a row sees keys.
    pub(crate) fn visibility(&self, mode: i64, [before, after]: [i64; 2]) -> Checked {
        self.mode.takes(mode, [0, 3])?;
        self.tokens.takes(Named("preTokens", before), i64::MAX)?;
        self.tokens.takes(Named("nextTokens", after), i64::MAX)
    }

    /// The layouts of queries and keys by their names.
    pub(crate) fn layouts(&self, names: [&str; 2]) -> Result<[TokenLayout; 2], Violation> {
        match names.map(TokenLayout::from_name) {
            [Some(query), Some(key)]
                if query != TokenLayout::PaBsnd && (key == query || key == TokenLayout::PaBsnd) =>
            {
                Ok([query, key])
            }
            _ => Err(self.layout.broken(
                format_args!("{:?} with keys in {:?}", names[0], names[1]),
                "BSND or TND, with keys in the same or in PA_BSND",
            )),
        }
    }

    /// Checks axes, lengths and block table, and resolves the sequences.
    pub(crate) fn resolve(
        &self,
        tensors: &SequenceTensors<'_>,
        layouts: [TokenLayout; 2],
        causal: bool,
    ) -> Result<SparseSequences, Violation> {
        let &SequenceTensors { query, key, lengths, names, block_table, sparse_block_size } = tensors;
        let paged = layouts[1] == TokenLayout::PaBsnd;
        for (name, desc, layout) in [("query", query, layouts[0]), ("key", key, layouts[1])] {
            self.rank.takes(Named(name, desc.shape), Rank(layout.rank()))?;
        }
        for ((lengths, name), layout) in lengths.into_iter().zip(names).zip(layouts) {
            if layout != TokenLayout::Bsnd {
                self.lengths.requires(lengths, name)?;
            }
        }
        let count = |lengths: Option<TensorDesc>| lengths.and_then(|lengths| i64::try_from(lengths.elements()?).ok());
        let batch = match layouts[0] {
            TokenLayout::Tnd => count(lengths[0]).unwrap_or(0),
            TokenLayout::Bsnd | TokenLayout::PaBsnd => query.shape[0],
        };
        for (lengths, name) in lengths.into_iter().zip(names) {
            if let Some(count) = count(lengths) {
                self.lengths.takes(Named(name, count), batch)?;
            }
        }
        if layouts[1] == TokenLayout::Bsnd {
            self.batch.takes(Named("sequences of key", key.shape[0]), batch)?;
        }
        match (block_table, paged) {
            (Some(table), true) => {
                let shapes: &[&[Axis]] = &[&[Axis::Of(batch), Axis::Any]];
                self.block_table.takes(table.shape, Shapes(shapes))?;
                self.block_size.takes(Named("blocks", key.shape[0]), 1..)?;
                self.block_size.takes(key.shape[1], Multiples(16, ..=1024))?;
                if let Some(block) = sparse_block_size {
                    self.block_table.takes(Named("columns", table.shape[1]), 1..)?;
                    self.block_size.takes(Named("sparseBlockSize", block), DivisorsOf(key.shape[1]))?;
                }
            }
            (None, true) => {
                let allowed = "a row for each sequence";
                return Err(self.block_table.broken("no blockTable", allowed));
            }
            (given, false) => {
                let given = given.is_some();
                self.block_table.forbids([("blockTable without PA_BSND", given)])?;
            }
        }
        Ok(SparseSequences {
            batch: usize::try_from(batch).unwrap_or(0),
            query: Room::of(layouts[0], &query.shape),
            key: Room::of(layouts[1], &key.shape),
            columns: block_table.map_or(0, |table| table.shape[1] as usize),
            causal,
        })
    }
}

/// Checks lengths of queries and of keys and the block table, row by row, of a call.
///
/// # Errors
/// [`Violation`] by `rule` where they lead outside of the call's tensors.
pub fn checked_contents(
    sequences: &SparseSequences,
    numbers: &[Vec<i64>; 3],
    rule: &'static Rule,
) -> Result<(), Violation> {
    let contents = SparseContents::of(numbers);
    check_faults(sequences.faults(contents), |_| Some(rule))
}

/// What is unusual about lengths of queries and of keys that the tensors hold: by the first rule query rows of no
/// sequence, by the second rows without keys, each where there is the rule.
pub fn unusual_contents(
    sequences: &SparseSequences,
    numbers: &[Vec<i64>; 3],
    [left_out, without_keys]: [Option<&'static Rule>; 2],
) -> [Option<Violation>; 2] {
    let all = || sequences.each(SparseContents::of(numbers));
    let packed = sequences.query.layout == TokenLayout::Tnd;
    let of_sequences: usize = all().map(|sequence| sequence.queries).sum();
    let rows = sequences.query.rows;
    let short = all().find(|sequence| sequences.causal && sequence.keys < sequence.queries);
    [
        left_out.filter(|_| packed && of_sequences < rows).map(|rule| {
            rule.broken(
                format_args!("{rows} rows of the query, {of_sequences} in sequences"),
                format_args!("lengths that sum up to {rows}"),
            )
        }),
        without_keys.zip(short).map(|(rule, SparseSequence { index, queries, keys, .. })| {
            rule.broken(
                format_args!("{queries} query rows and {keys} keys of sequence {index}"),
                format_args!("{queries} keys or more"),
            )
        }),
    ]
}

/// Checks that a tensor has these axes.
pub(crate) fn shaped(rule: &'static Rule, name: &str, desc: &TensorDesc, first: &[i64], last: &[i64]) -> Checked {
    let mut axes = [Axis::Any; 4];
    let sizes = first.iter().chain(last);
    let count = axes.iter_mut().zip(sizes).map(|(axis, &size)| *axis = Axis::Of(size)).count();
    rule.takes(Named(name, desc.shape), Shapes(&[&axes[..count]]))
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
    fn numbers<'a>(&'a self, contents: SparseContents<'a>) -> impl Iterator<Item = [Number; 2]> + Clone + 'a {
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

    /// What is wrong with the numbers, sequence by sequence.
    pub fn faults<'a>(&'a self, contents: SparseContents<'a>) -> impl Iterator<Item = SparseFault> + 'a {
        let paged = self.key.layout == TokenLayout::PaBsnd;
        let numbered = self.numbers(contents).enumerate();
        numbered.flat_map(move |(sequence, numbers)| {
            let keys = numbers[1].len();
            let sides = [Side::Query, Side::Key].into_iter().zip(numbers);
            let lengths = sides.filter_map(move |(side, number)| {
                let Number { given, least, most } = number;
                match side {
                    _ if (least..=most).contains(&given) => None,
                    Side::Key if paged && given > most => {
                        Some(SparseFault::NoColumn { sequence, keys: given, room: most })
                    }
                    side => Some(SparseFault::Length { sequence, side, given, allowed: [least, most] }),
                }
            });
            let reached = if paged { keys.div_ceil(self.key.rows.max(1)) } else { 0 };
            let blocks = (0..reached).filter_map(move |column| {
                let entry = contents.block_table.get(sequence * self.columns + column);
                let block = entry.copied().unwrap_or(-1);
                let there = usize::try_from(block).is_ok_and(|block| block < self.key.outer);
                (!there).then_some(SparseFault::NoBlock { sequence, column, block, blocks: self.key.outer })
            });
            lengths.chain(blocks)
        })
    }
}

/// What a tensor of lengths says of a sequence, and the least and the largest number that would do. For TND these are
/// ends.
#[derive(Clone, Copy, Debug, Default)]
struct Number {
    given: i64,
    least: i64,
    most: i64,
}

impl Number {
    /// Length of the sequence within the room.
    fn len(self) -> usize {
        usize::try_from(self.given.clamp(self.least, self.most) - self.least).unwrap_or(0)
    }
}
