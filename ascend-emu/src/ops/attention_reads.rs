//! Which keys and values of a paged cache attention reads, row by row.
//!
//! A row counts as read if the geometry (lengths, causality, window) lets some query row see it, also if a mask
//! tensor hides it: hardware loads such rows, and weighs a value with 0, which is NaN if the value is. Rows past a
//! sequence's length, blocks that no sequence names and blocks that a window has left are not read.
//!
//! Nobody writes padding. A sequence counts as padding if its table row names only block 0, none of its tokens was
//! written, and it has several blocks or the batch other sequences. Rows of tensors that are no cache
//! may be padding too: of these tensors only one that has no written byte at all is reported, and only if every
//! sequence sees a key.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use crate::elements::{Elements, NamedTensor, Place, Reader};
use crate::kernel::{self, BlockIds, Buffers};
use ascend_spec::attention_problem::{AttentionProblem, Counts, Cut, Grid, Rows, ScaleOffset, TensorRole};
use ascend_spec::operator::Argument;
use std::ops::Range;

/// The tensors to be checked, and the reader that receives the rows that are read of them.
struct RowReads<'a> {
    /// Finds the tensor with a role, if it is to be checked.
    find: &'a dyn Fn(TensorRole) -> Option<NamedTensor>,
    reader: &'a mut dyn Reader,
    /// Whether the rows may be padding, which is not reported if none of it was written.
    may_be_padding: bool,
}

/// Rows of one tensor: their entry on its batch axis, and the number of elements of each.
struct Part {
    batch: usize,
    heads: usize,
    rows: Range<usize>,
    dim: usize,
}

/// Bytes that `elements` elements take; `None` unless these are whole bytes.
fn bytes(elements: i64, bits: u32) -> Option<i64> {
    let bits = elements.checked_mul(bits.into())?;
    (bits % 8 == 0).then_some(bits / 8)
}

impl RowReads<'_> {
    fn rows(&mut self, role: TensorRole, rows: &Rows, part: &Part, place: Place) {
        let bits = rows.dtype.bits();
        let view = &rows.view;
        // The elements of a lane are contiguous, and so are those of a row that has no lanes.
        let (run, along) = match (rows.lanes, view.dim) {
            (0, 1) => (part.dim, (1, 0)),
            (0, step) => (1, (part.dim, step)),
            (lanes, step) => (lanes, (part.dim / lanes, step)),
        };
        let first = rows.element((part.batch, 0, part.rows.start), 0);
        let axes = [(part.heads, view.head), (part.rows.len(), view.row), along];
        let in_bytes = || {
            let mut steps = [(0, 0); 3];
            for (to, (count, step)) in steps.iter_mut().zip(axes) {
                *to = (count, bytes(step, bits)?);
            }
            Some((bytes(first, bits)?, bytes(run as i64, bits)?, steps))
        };
        if let Some((first, run, steps)) = in_bytes() {
            self.elements(role, first, usize::try_from(run).unwrap_or(0), &steps, place);
        }
    }

    /// Passes elements of `size` bytes each, from `first` on along two axes, to the reader.
    fn grid(&mut self, role: TensorRole, size: usize, first: i64, axes: [(usize, i64); 2], place: Place) {
        let bytes = |elements: i64| elements.saturating_mul(size as i64);
        let axes = axes.map(|(count, step)| (count, bytes(step)));
        self.elements(role, bytes(first), size, &axes, place);
    }

    /// Passes runs of bytes, whose second axis counts rows, to the reader.
    fn elements(&mut self, role: TensorRole, first: i64, run: usize, axes: &[(usize, i64)], place: Place) {
        let Some(tensor) = (self.find)(role) else {
            return;
        };
        let first = isize::try_from(first).unwrap_or(isize::MAX);
        let first = tensor.address.saturating_add_signed(first);
        let elements = Elements::new(tensor, first, run, axes, Some(1), place);
        let is_padding = |elements: &Elements| self.may_be_padding && self.reader.untouched(elements.bounds());
        if let Some(elements) = elements.filter(|elements| !is_padding(elements)) {
            self.reader.read(&elements);
        }
    }
}

/// Whether a grid has an entry for each token. Such entries are read for the tokens that are read.
fn by_token(grid: &Grid) -> bool {
    grid.view.batch != 0 || grid.view.row != 0
}

/// Scales and offsets of keys and values that have an entry for each token.
fn token_grids<'a>(problem: &'a AttentionProblem<'_>) -> impl Iterator<Item = Grid> + 'a {
    let both = [problem.key_quantisation, problem.value_quantisation].into_iter().flatten();
    let grids = both.flat_map(|ScaleOffset { scale, offset }| [Some(scale), offset]);
    grids.flatten().filter(by_token)
}

/// Passes the rows that attention reads of the tensors that `reads` finds to its reader.
///
/// # Safety
///
/// As for [`kernel::run`].
unsafe fn each_sequence(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>, reads: &mut RowReads<'_>) {
    let Some(pages) = &problem.pages else {
        return;
    };
    // SAFETY: the caller keeps this contract.
    let padding = unsafe { kernel::read_padding(problem, buffers) };
    for (sequence, (extent, _)) in problem.sequences(padding).enumerate() {
        let seen = problem.geometry(sequence).span(0..extent.q_len as u64);
        let own = |key: u64| {
            let key = usize::try_from(key).unwrap_or(usize::MAX);
            key.saturating_sub(extent.prefix).min(extent.kv_len)
        };
        let seen = own(seen.start)..own(seen.end);
        if seen.is_empty() {
            continue;
        }
        let size = pages.block_size.max(1);
        let columns = seen.start / size..seen.end.div_ceil(size);
        // SAFETY: the caller keeps this contract.
        let Ok(blocks) = (unsafe { BlockIds::read(buffers, pages, sequence, seen.end) }) else {
            // The launch fails by that.
            return;
        };
        let named = |column: usize| Some(blocks.find(column * size)?.0);
        let more = problem.batch > 1 || columns.len() > 1;
        reads.may_be_padding = more && columns.clone().all(|column| named(column) == Some(0));
        let key_value = problem.key_value(sequence);
        // Passes contiguous rows of keys and values; `token` is the position of the first in the sequence.
        let mut stored = |batch: usize, rows: Range<usize>, token: usize, place: Place| {
            let index = key_value.list_index;
            let all = [
                Some((TensorRole::Key(index), key_value.key, problem.head_dim)),
                Some((TensorRole::Value(index), key_value.value, problem.value_dim)),
                key_value.key_rope.map(|rope| (TensorRole::KeyRope, rope, problem.rope_dim)),
            ];
            for (role, stored, dim) in all.into_iter().flatten() {
                let part = Part { batch, heads: problem.kv_heads, rows: rows.clone(), dim };
                reads.rows(role, &stored, &part, place);
            }
            for grid in token_grids(problem) {
                let entry = match grid.counts {
                    Counts::Stored => (batch, rows.start),
                    Counts::Tokens => (sequence, token),
                    Counts::Concatenated => continue,
                };
                let size = grid.tensor.dtype.size().unwrap_or(0);
                if size > 0 && grid.cuts.row == Cut::NONE && grid.cuts.head == Cut::NONE {
                    let first = grid.at((entry.0, 0, entry.1), 0);
                    let axes = [(problem.kv_heads, grid.view.head), (rows.len(), grid.view.row)];
                    reads.grid(grid.tensor.role, size, first, axes, place);
                }
            }
        };
        for column in columns {
            // An entry that names no block has a finding of its own.
            let Some(block) = named(column) else {
                continue;
            };
            let keys = seen.start.max(column * size)..seen.end.min((column + 1) * size);
            let rows = keys.start - column * size..keys.end - column * size;
            let place = Place::Block { block, first: rows.start, sequence: Some((sequence, extent.kv_len)) };
            stored(block, rows, keys.start, place);
        }
    }
}

/// Whether every sequence has a row that sees a key.
fn each_sees_a_key(problem: &AttentionProblem<'_>) -> bool {
    (0..problem.batch).all(|sequence| {
        let rows = 0..problem.q_len(sequence) as u64;
        !problem.geometry(sequence).span(rows).is_empty()
    })
}

/// Passes the elements that a launch of an attention operator reads to the reader.
///
/// # Safety
///
/// As for [`DeclaredOperator::run`].
pub(super) unsafe fn reads<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &AttentionProblem<'_>,
    of_role: &dyn Fn(TensorRole) -> Option<Argument<ParameterOf<O>>>,
    reader: &mut dyn Reader,
) {
    let doubtful = launch.doubtful(reader);
    if doubtful.is_empty() {
        return;
    }
    let is_doubtful = |argument: &Argument<_>| doubtful.iter().any(|(known, _)| known == argument);
    let find = |role| Some(launch.named(of_role(role).filter(is_doubtful)?));
    let base = |role| of_role(role).map_or(std::ptr::null_mut(), |argument| launch.base(argument));
    let unpaged = [TensorRole::Query, TensorRole::QueryRope, TensorRole::Mask].map(of_role);
    for (argument, bytes) in &doubtful {
        let followed = problem.pages.is_none() || unpaged.contains(&Some(*argument));
        if followed && reader.untouched(bytes.clone()) && each_sees_a_key(problem) {
            let tensor = launch.named(*argument);
            let whole = Elements::new(tensor, bytes.start, bytes.len(), &[], None, Place::Whole);
            whole.iter().for_each(|whole| reader.read(whole));
        }
    }
    let mut rows = RowReads { find: &find, reader, may_be_padding: false };
    // SAFETY: the caller's promise.
    unsafe { each_sequence(problem, &Buffers(&base), &mut rows) };
}
