//! Which keys the calls of a program show to the rows of a step, compared with those that the rows may see.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use ascend_attention::Violation;
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::geometry::MaskGeometry;

use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::rules;

use super::step_call::{CallKeys, CallMask, StepCall};
use super::step_context::StepContext;

/// Refuses calls that show a row keys of another request, keys that the mask of the step hides, or a key twice; and,
/// unless the program `leaves_keys_out`, calls that together show a row fewer keys than the mask does. A row without
/// any key is refused of every program. What a mask tensor of the call's own shows is not known: of such a call only
/// the keys that it reads are checked.
///
/// In a run of rows of one request, one sequence of a call, one entry of the merge and one chunk, what a row sees
/// begins and ends on lines that are cut off at the first and the last key. Two such lines that agree at the first, the
/// middle and the last row agree everywhere, so that these three rows of each run are compared. Where a call reads the
/// blocks of a request in another order, a run ends where what the rows see enters another block.
pub(super) fn check(
    calls: &[StepCall],
    merge: Option<&[PartsOfRows]>,
    leaves_keys_out: bool,
    step: &StepContext<'_>,
) -> Result<(), Violation> {
    let calls: Vec<_> = calls
        .iter()
        .map(|call| Sequences::of(call, step.metadata, merge.is_some() || leaves_keys_out))
        .collect::<Result<_, _>>()?;
    let counted = merge.map(CountedCalls::of);
    let mut compared = Vec::new();
    for call in &calls {
        call.add_compared_rows(step, counted.as_ref(), &mut compared)?;
    }
    compared.sort_unstable();
    compared.dedup();
    let mut shown = Vec::new();
    for row in compared {
        let row = StepRow::of(row, step)?;
        let mut all_known = true;
        shown.clear();
        for (nth, call) in calls.iter().enumerate() {
            if counted.as_ref().is_none_or(|counted| counted.counts(row.row, nth)) {
                all_known &= call.show(&row, step, &mut shown)?;
            }
        }
        shown.sort_unstable_by_key(|keys| keys.start);
        if let Some(keys) = row.left_out(&shown)?
            && all_known
            && (!leaves_keys_out || row.seen.as_ref() == Some(&keys))
        {
            return Err(row.not_shown(&keys));
        }
    }
    Ok(())
}

/// The sequences of a call.
struct Sequences<'a> {
    call: &'a StepCall,
    /// The first row.
    start: usize,
    /// Where the rows of each sequence end.
    ends: Vec<usize>,
}

impl<'a> Sequences<'a> {
    /// The sequences of a call, with a number of keys and blocks for each. Unless the call `is_partial`, it reads the
    /// cached keys where there are some.
    fn of(call: &'a StepCall, metadata: &AttentionMetadata, is_partial: bool) -> Result<Self, Violation> {
        let (start, ends) = call.row_ends(metadata.tokens());
        let keys = call.kv_lengths.lengths().len();
        let named = match &call.keys {
            CallKeys::Own if metadata.state().reads_cache() && !is_partial => {
                return Err(other_keys("the step's own keys alone", "cached keys too"));
            }
            CallKeys::Own => return Ok(Self { call, start, ends }),
            CallKeys::Blocks(rows) => rows.len(),
            CallKeys::Cached => metadata.table().requests(),
            CallKeys::CachedOf(requests) => requests.len(),
        };
        if ends.len() != keys || keys != named {
            return Err(other_keys(
                format_args!("{} sequences, {keys} of them with keys", ends.len()),
                format_args!("the {named} sequences whose blocks are read"),
            ));
        }
        Ok(Self { call, start, ends })
    }

    /// Adds the first, the middle and the last row of each run.
    fn add_compared_rows(
        &self,
        step: &StepContext<'_>,
        counted: Option<&CountedCalls<'_>>,
        rows: &mut Vec<usize>,
    ) -> Result<(), Violation> {
        let mut start = self.start;
        for &end in &self.ends {
            while start < end {
                let row = StepRow::of(start, step)?;
                let of_merge = counted.and_then(|counted| counted.end_of(start));
                let of_chunk = match step.mask {
                    LayerMask::Causality(Causality::Chunk(size)) => {
                        start.checked_add(size.get() - row.position % size.get())
                    }
                    _ => None,
                };
                let of_block = self.next_block(&row, step);
                let ends = [Some(end), Some(row.rows.end), of_merge, of_chunk, of_block];
                let stop = ends.into_iter().flatten().min().unwrap_or(end);
                let last = stop - 1;
                rows.extend([start, start.midpoint(last), last]);
                start = stop;
            }
        }
        Ok(())
    }

    /// The next row whose keys begin or end in another block than those of a row, where the call reads the blocks of
    /// its request in another order.
    fn next_block(&self, row: &StepRow<'_>, step: &StepContext<'_>) -> Option<usize> {
        let CallKeys::Blocks(blocks) = &self.call.keys else {
            return None;
        };
        let seen = self.row(row.row)?;
        let blocks = blocks.get(seen.sequence)?;
        let first = row.blocks.iter().position(|block| Some(block) == blocks.first());
        let in_order = first.and_then(|first| row.blocks.get(first..first + blocks.len()));
        if row.is_dummy || in_order == Some(blocks.as_slice()) {
            return None;
        }
        let keys = seen.keys?;
        let block_size = step.metadata.settings().block_size().max(1);
        let of_start = block_size - keys.start % block_size;
        let of_end = block_size - keys.end.saturating_sub(1) % block_size;
        row.row.checked_add(of_start.min(of_end))
    }

    /// What the call shows to a row; `None` for a row of no sequence.
    fn row(&self, row: usize) -> Option<CallRow> {
        let (sequence, rows) = entry_of(&self.ends, self.start, row)?;
        let keys_of_call = match &self.call.keys {
            CallKeys::Own => rows.len(),
            _ => {
                let lengths = self.call.kv_lengths.lengths();
                lengths.get(sequence).copied().unwrap_or(0)
            }
        };
        let geometry = self.call.geometry(rows.len(), keys_of_call);
        let keys = geometry.map(|geometry| geometry.row((row - rows.start) as u64));
        Some(CallRow {
            sequence,
            start: rows.start,
            keys_of_call,
            keys: keys.map(|keys| keys.start as usize..keys.end as usize),
        })
    }

    /// Adds the keys that the call shows to a row, as ranges of positions in its request. Says whether these are known
    /// to be all: the contents of a mask, and the blocks of a dummy request, do not tell.
    fn show(
        &self,
        row: &StepRow<'_>,
        step: &StepContext<'_>,
        shown: &mut Vec<Range<usize>>,
    ) -> Result<bool, Violation> {
        let Some(CallRow { sequence, start, keys_of_call, keys }) = self.row(row.row) else {
            return Ok(true);
        };
        let is_known = keys.is_some();
        let range = keys.unwrap_or(0..keys_of_call);
        let first = shown.len();
        match &self.call.keys {
            CallKeys::Own => row.own_keys(start + range.start..start + range.end, shown)?,
            CallKeys::Cached => row.cached_keys(sequence, range, step, shown)?,
            CallKeys::CachedOf(requests) => {
                row.cached_keys(requests.start + sequence, range, step, shown)?;
            }
            CallKeys::Blocks(blocks) => {
                let blocks = blocks.get(sequence).map_or(&[][..], Vec::as_slice);
                row.keys_in_blocks(blocks, range, step, shown)?;
            }
        }
        let is_known = is_known && !matches!((&self.call.keys, row.is_dummy), (CallKeys::Blocks(_), true));
        for keys in shown.iter().skip(first) {
            row.check(keys, is_known, keys_of_call)?;
        }
        if !is_known {
            shown.truncate(first);
        }
        Ok(is_known)
    }
}

/// What a call shows to a row.
struct CallRow {
    /// The sequence of the row.
    sequence: usize,
    /// The first row of that sequence.
    start: usize,
    /// Keys of that sequence.
    keys_of_call: usize,
    /// The keys among these that the row sees; `None` where the contents of a tensor decide.
    keys: Option<Range<usize>>,
}

/// The place of the entry that holds a row, and the entry's rows, where entries end at `ends` and the first one begins
/// at `start`. `None` for a row of no entry.
fn entry_of(ends: &[usize], start: usize, row: usize) -> Option<(usize, Range<usize>)> {
    let entry = ends.partition_point(|end| *end <= row);
    let end = *ends.get(entry)?;
    let before = entry.checked_sub(1).and_then(|before| ends.get(before));
    let first = before.copied().unwrap_or(start);
    (first <= row).then_some((entry, first..end))
}

/// A row of a step.
struct StepRow<'a> {
    row: usize,
    request: usize,
    /// The rows of its request.
    rows: Range<usize>,
    /// The blocks of its request.
    blocks: &'a [usize],
    /// The number of its token among those of its request.
    position: usize,
    /// Keys of its request.
    keys: usize,
    /// The positions of the keys that it sees; `None` under a mask by a rule of the caller.
    seen: Option<Range<usize>>,
    mask: &'a LayerMask,
    is_dummy: bool,
}

impl fmt::Display for StepRow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token {} of request {}", self.position, self.request)
    }
}

impl<'a> StepRow<'a> {
    fn of(row: usize, step: &StepContext<'a>) -> Result<Self, Violation> {
        let metadata = step.metadata;
        let ends = metadata.q_ends().ends();
        let entry = entry_of(ends, 0, row).and_then(|(request, rows)| {
            let keys = metadata.kv_lengths().lengths().get(request)?;
            Some((request, rows, *keys))
        });
        let Some((request, rows, keys)) = entry else {
            return Err(other_keys(
                format_args!("row {row}"),
                format_args!("the {} rows of the step's requests", metadata.q_ends().total()),
            ));
        };
        let block_size = metadata.settings().block_size();
        let position = keys.saturating_sub(rows.end - row);
        Ok(Self {
            row,
            request,
            rows,
            blocks: metadata.table().used(request, keys, block_size)?,
            position,
            keys,
            seen: match step.mask {
                LayerMask::Causality(Causality::Bidirectional) => Some(0..keys),
                LayerMask::Causality(causality) => Some(causality.shown_from(position)..position + 1),
                LayerMask::Named(_) => None,
            },
            mask: step.mask,
            is_dummy: request >= metadata.requests(),
        })
    }

    /// Keys of the step's own rows.
    fn own_keys(&self, rows: Range<usize>, shown: &mut Vec<Range<usize>>) -> Result<(), Violation> {
        if rows.is_empty() {
            return Ok(());
        }
        if rows.start < self.rows.start || rows.end > self.rows.end {
            return Err(other_keys(
                format_args!("the keys of rows {rows:?} for {self}"),
                format_args!("the rows {:?} of that request", self.rows),
            ));
        }
        let position = |row: usize| self.position + row - self.row;
        shown.push(position(rows.start)..position(rows.end));
        Ok(())
    }

    /// Keys of a request by its row of the step's table.
    fn cached_keys(
        &self,
        request: usize,
        range: Range<usize>,
        step: &StepContext<'_>,
        shown: &mut Vec<Range<usize>>,
    ) -> Result<(), Violation> {
        if request == self.request {
            shown.push(range);
            return Ok(());
        }
        let blocks = step.metadata.table().row(request).unwrap_or_default();
        self.keys_in_blocks(blocks, range, step, shown)
    }

    /// Keys by blocks, which have to be of the row's request.
    fn keys_in_blocks(
        &self,
        blocks: &[usize],
        range: Range<usize>,
        step: &StepContext<'_>,
        shown: &mut Vec<Range<usize>>,
    ) -> Result<(), Violation> {
        let block_size = step.metadata.settings().block_size().max(1);
        if self.is_dummy {
            // The blocks of a dummy are all the same, so that they do not tell which keys they hold.
            return Ok(());
        }
        let first = shown.len();
        let mut next = 0;
        // Made where blocks come in another order.
        let mut places = None;
        for nth in range.start / block_size..range.end.div_ceil(block_size) {
            let block = blocks.get(nth);
            if self.blocks.get(next) != block || block.is_none() {
                let places: &HashMap<_, _> = places.get_or_insert_with(|| {
                    let places = self.blocks.iter().enumerate();
                    places.map(|(place, block)| (block, place)).collect()
                });
                let Some(place) = block.and_then(|block| places.get(block).copied()) else {
                    return Err(other_keys(
                        match block {
                            Some(block) => format!("block {block} for {self}"),
                            None => {
                                format!("{} blocks for {self}, too few for its keys", blocks.len())
                            }
                        },
                        "the blocks of that request, one for each full or partly filled block of keys",
                    ));
                };
                next = place;
            }
            let of_block = nth * block_size;
            let start = next * block_size + range.start.saturating_sub(of_block);
            let end = next * block_size + (range.end - of_block).min(block_size);
            match shown.get_mut(first..).and_then(<[_]>::last_mut) {
                Some(last) if last.end == start => last.end = end,
                _ => shown.push(start..end),
            }
            next += 1;
        }
        Ok(())
    }

    /// Refuses keys that the row's request does not have, and where it `is_known` what the row is shown, keys that the
    /// mask of the step hides.
    fn check(&self, keys: &Range<usize>, is_known: bool, keys_of_call: usize) -> Result<(), Violation> {
        if keys.end > self.keys {
            return Err(other_keys(
                format_args!("the keys {keys:?} for {self}"),
                format_args!("its {} keys", self.keys),
            ));
        }
        let within = |seen: &Range<usize>| seen.start <= keys.start && keys.end <= seen.end;
        if !is_known || keys.is_empty() || self.seen.as_ref().is_some_and(within) {
            return Ok(());
        }
        Err(Violation::new(
            &rules::BACKEND_UNMASKED,
            match keys_of_call == self.keys {
                true => format!("a call that shows {self} the keys {keys:?}"),
                // Masks count from the last key, so that a wrong number of keys moves what they hide.
                false => format!(
                    "a call over {keys_of_call} keys that shows {self}, whose request has {}, the keys {keys:?}",
                    self.keys
                ),
            },
            match &self.seen {
                None => format!("calls under {}", self.mask),
                Some(seen) => format!("the keys {seen:?}, as {} shows", self.mask),
            },
            match self.seen {
                None => {
                    "return the error of `step.mask.causality()`, so that `Backend::NamedMask` computes such layers"
                }
                Some(_) if matches!(self.mask, LayerMask::Causality(Causality::Chunk(_))) => {
                    "make each chunk's rows a sequence of the call, or return an error, so that \
                     `Backend::ChunkedLocal` computes such layers"
                }
                Some(_) => rules::BACKEND_UNMASKED.fix,
            },
        ))
    }

    /// The first keys that the mask of the step shows and the calls do not. Refuses a key that is shown twice.
    fn left_out(&self, shown: &[Range<usize>]) -> Result<Option<Range<usize>>, Violation> {
        let Some(seen) = &self.seen else {
            return Ok(None);
        };
        let mut next = seen.start;
        let mut missing = None;
        for keys in shown.iter().filter(|keys| !keys.is_empty()) {
            if keys.start < next {
                return Err(other_keys(
                    format_args!("the keys {:?} of {self} twice", keys.start..next.min(keys.end)),
                    "each key once, in one of the calls",
                ));
            }
            if keys.start > next {
                missing.get_or_insert(next..keys.start);
            }
            next = keys.end;
        }
        if next < seen.end {
            missing.get_or_insert(next..seen.end);
        }
        Ok(missing)
    }

    #[cold]
    fn not_shown(&self, keys: &Range<usize>) -> Violation {
        let seen = self.seen.clone().unwrap_or_default();
        other_keys(
            format_args!("no call with the keys {keys:?} for {self}"),
            format_args!("calls that show it the keys {seen:?}, as {} does", self.mask),
        )
    }
}

/// Which calls of a merge count for a row.
struct CountedCalls<'a> {
    /// Where the rows of each entry end.
    ends: Vec<usize>,
    parts: &'a [PartsOfRows],
}

impl<'a> CountedCalls<'a> {
    fn of(parts: &'a [PartsOfRows]) -> Self {
        let ends = parts.iter().scan(0usize, |end, entry| {
            *end += entry.rows;
            Some(*end)
        });
        Self { ends: ends.collect(), parts }
    }

    /// Where the entry of a row ends; `None` behind the last entry.
    fn end_of(&self, row: usize) -> Option<usize> {
        self.ends.get(self.entry(row)).copied()
    }

    fn entry(&self, row: usize) -> usize {
        self.ends.partition_point(|end| *end <= row)
    }

    fn counts(&self, row: usize, call: usize) -> bool {
        let entry = self.parts.get(self.entry(row));
        let parts = entry.map_or(0, |entry| entry.parts);
        u32::try_from(call).is_ok_and(|call| parts.unbounded_shr(call) & 1 == 1)
    }
}

impl StepCall {
    /// Which keys the rows of a sequence see; `None` where the contents of a tensor decide.
    fn geometry(&self, rows: usize, keys: usize) -> Option<MaskGeometry> {
        let (rows, keys) = (rows as u64, keys as u64);
        let CallMask::Operator(mask) = &self.mask else {
            return None;
        };
        let mode = mask.sparse_mode();
        match mask.tensor() {
            None => Some(MaskGeometry::full(rows, keys)),
            Some(_) if mode.takes_compressed_mask() => {
                Some(MaskGeometry::new(mode, true, rows, keys, mask.pre_tokens(), mask.next_tokens()))
            }
            Some(_) => None,
        }
    }
}

#[cold]
fn other_keys(given: impl fmt::Display, allowed: impl fmt::Display) -> Violation {
    rules::BACKEND_KEYS.broken(given, allowed)
}
