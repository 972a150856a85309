//! Which keys of a mask are computed by blocks, and which row by row.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_spec::geometry::BlockMap;
use ascend_spec::{Tile, Visibility};

use crate::error::{Error, Result};
use crate::merge::PartsOfRows;
use crate::ops::block_sparse_attention::FullBlocks;

/// Rows and keys of a block, and keys of a page.
pub const SIDE: usize = 128;
/// [`SIDE`], as the side of a [`BlockMap`].
pub const SIDE_BLOCK: NonZeroU64 = NonZeroU64::MIN.saturating_add(SIDE as u64 - 1);

/// Part of the merge that the full blocks are, where there is one: parts that no row has are left out.
pub(super) const BLOCKS: usize = 0;
/// Part of the merge that the keys of pages are, which are whole.
const PAGES: usize = 1;
/// Part of the merge that the keys behind the last whole page of a sequence are.
const TAIL: usize = 2;

/// Which keys of the masks of packed sequences are computed by blocks, and which row by row.
///
/// A block is *full* if each of its rows sees each of its keys: these are the blocks of BlockSparseAttention. Other
/// keys that a row sees are in *partial* blocks, and are computed in pages that the row does not share.
#[derive(Clone, Debug)]
pub struct BlockCover {
    pub(super) sequences: Vec<CoveredSequence>,
    /// What a call over full blocks is given, if there is one.
    pub(super) blocks: FullBlocks,
    /// Rows by the parts that have keys for them.
    pub(super) rows: Vec<PartsOfRows>,
    /// Number of parts that some row has.
    pub(super) parts: usize,
    full: u128,
    /// Blocks that a call over full ones computes for rows that have none, of which nothing is read.
    filled: u128,
    row_pairs: u128,
}

/// A sequence of a cover.
#[derive(Clone, Debug)]
pub(super) struct CoveredSequence {
    /// Its rows among those of all sequences.
    pub(super) rows: Range<usize>,
    /// Its keys among those of all sequences.
    pub(super) keys: Range<usize>,
    /// The calls that compute its partial blocks.
    pub(super) calls: Vec<RowsCover>,
}

/// Consecutive rows, whose keys are in the same pages.
#[derive(Clone, Debug)]
pub(super) struct RowsCover {
    pub(super) part: usize,
    /// The rows among those of all sequences.
    pub(super) rows: Range<usize>,
    /// The keys of the pages among those of all sequences.
    pub(super) keys: Range<usize>,
    pub(super) pages: Vec<RowPages>,
}

impl RowsCover {
    /// Pages of the row with the most.
    pub(super) fn columns(&self) -> usize {
        self.pages.iter().map(|row| row.pages.len()).max().unwrap_or(0)
    }
}

/// The pages in which a row sees keys, as a mask over the keys of these pages.
#[derive(Clone, Debug, Default)]
pub(super) struct RowPages {
    /// Ascending.
    pub(super) pages: Vec<usize>,
    /// The keys that the row sees, counted in the row's pages, ascending and apart.
    runs: Vec<Range<u64>>,
}

impl RowPages {
    /// A row that no part is asked for, but whose softmax must be a number.
    fn unread() -> Self {
        Self { pages: vec![0], runs: std::iter::once(0..1).collect() }
    }

    /// Adds keys, which are counted from the first page on and come in order.
    fn add(&mut self, mut keys: Range<usize>) {
        while keys.start < keys.end {
            let page = keys.start / SIDE;
            let end = keys.end.min((page + 1) * SIDE);
            if self.pages.last() != Some(&page) {
                self.pages.push(page);
            }
            let before = (self.pages.len() - 1) * SIDE;
            let place = |key: usize| (before + key - page * SIDE) as u64;
            let (first, last) = (place(keys.start), place(end));
            match self.runs.last_mut() {
                Some(run) if run.end == first => run.end = last,
                _ => self.runs.push(first..last),
            }
            keys.start = end;
        }
    }
}

impl Visibility for RowPages {
    fn q_len(&self) -> u64 {
        1
    }

    fn kv_len(&self) -> u64 {
        (self.pages.len() * SIDE) as u64
    }

    fn each_run(&self, _: u64, visit: &mut dyn FnMut(Range<u64>)) {
        self.runs.iter().cloned().for_each(visit);
    }
}

impl BlockCover {
    /// Most rows, and most keys, of all sequences.
    pub const MAX_TOKENS: usize = 1 << 20;

    /// Covers the masks of sequences whose rows and keys are packed one behind the other.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no mask, for one without rows or keys, for more than
    /// [`MAX_TOKENS`](Self::MAX_TOKENS), and for partial blocks among fewer than [`SIDE`] keys in all.
    pub fn new<V: Visibility>(masks: &[V]) -> Result<Self> {
        let maps: Vec<_> = masks.iter().map(|mask| BlockMap::new(mask, SIDE_BLOCK)).collect();
        let ends = packed(masks)?;
        let total_keys = ends.last().map_or(0, |end| end[1]);
        let mut cover = Self {
            sequences: Vec::with_capacity(masks.len()),
            blocks: FullBlocks::new(&maps)?,
            rows: Vec::new(),
            parts: 0,
            full: maps.iter().map(|map| map.counts().full).fold(0, u128::saturating_add),
            filled: 0,
            row_pairs: 0,
        };
        if cover.full > 0 {
            // Every row of the call is written: the merge leaves out those that are not asked for.
            cover.blocks.fill_empty_rows(&maps);
            cover.filled = maps.iter().map(|map| u128::from(map.rows_without_full())).sum();
        }
        let mut start = [0; 2];
        for ((mask, map), end) in masks.iter().zip(&maps).zip(ends) {
            let (rows, keys) = (start[0]..end[0], start[1]..end[1]);
            start = end;
            let calls = cover.add_rows(mask, map, (rows.clone(), keys.clone()), total_keys)?;
            let pages = calls.iter().flat_map(|call| &call.pages).map(|row| row.pages.len() as u128);
            let pairs = pages.sum::<u128>().saturating_mul(SIDE as u128);
            cover.row_pairs = cover.row_pairs.saturating_add(pairs);
            cover.sequences.push(CoveredSequence { rows, keys, calls });
        }
        cover.leave_out_parts();
        Ok(cover)
    }

    /// Renumbers the parts, without those that no row has.
    fn leave_out_parts(&mut self) {
        let used = self.rows.iter().fold(0, |used, run| used | run.parts);
        let place = |part: usize| (used & ((1 << part) - 1)).count_ones() as usize;
        for run in &mut self.rows {
            let named = [BLOCKS, PAGES, TAIL].into_iter().filter(|part| run.parts >> part & 1 == 1);
            run.parts = named.map(|part| 1 << place(part)).sum();
        }
        for call in self.sequences.iter_mut().flat_map(|sequence| &mut sequence.calls) {
            call.part = place(call.part);
        }
        self.parts = used.count_ones() as usize;
    }

    /// Notes the parts of each row of a sequence, and returns the calls over its partial blocks.
    fn add_rows<V: Visibility>(
        &mut self,
        mask: &V,
        map: &BlockMap<'_, V>,
        (rows, keys): (Range<usize>, Range<usize>),
        total_keys: usize,
    ) -> Result<Vec<RowsCover>> {
        let whole = keys.len() / SIDE * SIDE;
        // The page of the tail ends with the keys of the sequence, or begins before them.
        let tail = (keys.start + whole).min(total_keys.saturating_sub(SIDE));
        let shift = keys.start + whole - tail;
        let mut in_pages = PartRows::default();
        let mut in_tail = PartRows::default();
        for (block, rows_of_block) in (0..map.rows()).zip((0..rows.len()).step_by(SIDE)) {
            let runs = map.row(block);
            let is_full = runs.iter().any(|run| run.tile == Tile::All);
            let key = |block: u64| keys.len().min(block.min(map.columns()) as usize * SIDE);
            let partial = runs.iter().filter(|run| run.tile == Tile::Mixed);
            let partial = partial.map(|run| key(run.blocks.start)..key(run.blocks.end));
            let partial: Vec<Range<usize>> = partial.collect();
            for row in rows_of_block..rows.len().min(rows_of_block + SIDE) {
                let [mut pages, mut last] = [RowPages::default(), RowPages::default()];
                mask.each_run(row as u64, &mut |run| {
                    for partial in &partial {
                        let run = partial.start.max(run.start as usize)..partial.end.min(run.end as usize);
                        pages.add(run.start..run.end.min(whole));
                        let behind = run.start.max(whole)..run.end;
                        if !behind.is_empty() {
                            last.add(behind.start - whole + shift..behind.end - whole + shift);
                        }
                    }
                });
                let parts = u16::from(is_full) << BLOCKS
                    | u16::from(in_pages.note(row, pages)) << PAGES
                    | u16::from(in_tail.note(row, last)) << TAIL;
                match self.rows.last_mut() {
                    Some(run) if run.parts == parts => run.rows += 1,
                    _ => self.rows.push(PartsOfRows { rows: 1, parts }),
                }
            }
        }
        if total_keys < SIDE && !in_tail.pages.is_empty() {
            return Err(Error::invalid(
                "masks",
                format_args!("a partial block among {total_keys} keys"),
                format_args!("{SIDE} keys or more, which fill a page"),
            )
            .fix("attend to so few keys with `FusedInferAttention` and the mask as a tensor"));
        }
        let pages = in_pages.calls(PAGES, rows.start, keys.start..keys.start + whole);
        let tail = in_tail.calls(TAIL, rows.start, tail..tail + SIDE);
        Ok(pages.chain(tail).collect())
    }

    /// Rows and keys of all sequences.
    pub(super) fn lengths(&self) -> [usize; 2] {
        self.sequences.last().map_or([0; 2], |last| [last.rows.end, last.keys.end])
    }

    /// Number of full blocks, which each head computes.
    pub fn full_blocks(&self) -> u128 {
        self.full
    }

    /// Pairs of row and key that each head computes in blocks, those at the ends of sequences as whole ones: in the
    /// full blocks and, if there is one, in another for every 128 rows that have none, since the operator writes no
    /// others.
    pub fn block_pairs(&self) -> u128 {
        self.full.saturating_add(self.filled).saturating_mul((SIDE * SIDE) as u128)
    }

    /// Pairs of row and key that each head computes row by row, hidden keys of the rows' pages among them.
    pub fn row_pairs(&self) -> u128 {
        self.row_pairs
    }

    /// Bytes of the masks of the calls over rows, which a plan keeps on the device: a byte for each key of the widest
    /// row's pages, for each row of a call. At most twice [`row_pairs`](Self::row_pairs), and 512 KiB for each call.
    pub fn row_mask_bytes(&self) -> u128 {
        let calls = self.sequences.iter().flat_map(|sequence| &sequence.calls);
        let bytes = calls.map(|call| (call.pages.len() as u128).saturating_mul((call.columns() * SIDE) as u128));
        bytes.fold(0, u128::saturating_add)
    }

    /// Number of calls that a launch queues: of blocks, of rows, and merges and copies of their results.
    ///
    /// Consecutive rows with keys in the same kinds of calls (blocks, pages, the last page) are one merge or copy: a
    /// mask whose rows change from one to the next needs as many as it has rows.
    pub fn calls(&self) -> usize {
        let rows = self.sequences.iter().map(|sequence| sequence.calls.len());
        rows.fold(usize::from(self.full > 0), usize::saturating_add).saturating_add(self.rows.len())
    }
}

/// Rows of a sequence that see keys of a part.
#[derive(Default)]
struct PartRows {
    /// The first row that does.
    first: usize,
    /// The rows from that one to the last that does.
    pages: Vec<RowPages>,
}

impl PartRows {
    /// Notes what a row sees, and returns whether that is anything. Rows come in order.
    fn note(&mut self, row: usize, pages: RowPages) -> bool {
        if pages.pages.is_empty() {
            return false;
        }
        if self.pages.is_empty() {
            self.first = row;
        }
        self.pages.resize_with(row - self.first, RowPages::unread);
        self.pages.push(pages);
        true
    }

    /// The calls for these rows of a sequence whose rows begin at `start`. Mask and table of a call have the columns of
    /// its widest row: where rows of other widths would be mostly empty columns, another call begins.
    fn calls(self, part: usize, start: usize, keys: Range<usize>) -> impl Iterator<Item = RowsCover> {
        /// Most rows of a call: as many sequences as the operator takes.
        const ROWS: usize = 1 << 16;
        /// Pages that the rows of a call may lack against as many wide ones, beside as many as they have.
        const SPARE: usize = 1 << 12;
        let mut calls: Vec<RowsCover> = Vec::new();
        let [mut widest, mut sum] = [0usize; 2];
        for (row, of_row) in (start + self.first..).zip(self.pages) {
            let width = of_row.pages.len();
            let of_call = calls.last_mut().filter(|call| {
                let area = (call.pages.len() + 1).saturating_mul(widest.max(width));
                call.pages.len() < ROWS && area <= 2 * (sum + width) + SPARE
            });
            match of_call {
                Some(call) => {
                    call.rows.end = row + 1;
                    call.pages.push(of_row);
                    (widest, sum) = (widest.max(width), sum + width);
                }
                None => {
                    calls.push(RowsCover { part, rows: row..row + 1, keys: keys.clone(), pages: vec![of_row] });
                    (widest, sum) = (width, width);
                }
            }
        }
        calls.into_iter()
    }
}

/// The ends of the rows and keys of packed sequences.
fn packed<V: Visibility>(masks: &[V]) -> Result<Vec<[usize; 2]>> {
    let most = BlockCover::MAX_TOKENS;
    let refused = |given: std::fmt::Arguments<'_>| {
        Error::invalid("masks", given, format_args!("1 to {most} rows and keys in all, of each 1 or more"))
            .fix("cover fewer sequences at a time, and leave those without rows or keys out")
    };
    let mut ends = Vec::with_capacity(masks.len());
    let mut end = [0usize; 2];
    for (index, mask) in masks.iter().enumerate() {
        let lengths = [mask.q_len(), mask.kv_len()];
        let [rows, keys] = lengths;
        for (end, length) in end.iter_mut().zip(lengths) {
            let longer = usize::try_from(length).ok().and_then(|length| end.checked_add(length));
            *end = longer
                .filter(|longer| length > 0 && *longer <= most)
                .ok_or_else(|| refused(format_args!("{rows} rows and {keys} keys of sequence {index}")))?;
        }
        ends.push(end);
    }
    match ends.is_empty() {
        true => Err(refused(format_args!("none"))),
        false => Ok(ends),
    }
}
