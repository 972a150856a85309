//! What attention reads of its tensors, row by row.
//!
//! Keys and values count as read where the geometry (lengths, causality, window) lets some row see them, rows that a
//! mask tensor hides among them: hardware loads these, and weighs a value with 0, which is NaN if the value is. Rows
//! behind a sequence's length, blocks that no sequence names and blocks that a window has left are not read.

use super::declared::{DeclaredOperator, ParameterOf};
use crate::elements::{Elements, NamedTensor, Place, Reader};
use crate::kernel::{self, BlockIds, Buffers};
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::attention_problem::{
    AttentionProblem, Counts, Cut, Grid, MaskUse, Rows, ScaleOffset, TensorRole,
};
use ascend_spec::operator::Argument;
use std::ops::Range;

/// Elements of the tensor that plays a role, if it has to be looked at.
struct RowReads<'a> {
    find: &'a dyn Fn(TensorRole) -> Option<NamedTensor>,
    reader: &'a mut dyn Reader,
}

/// Rows of one tensor: the entry of its batch axis, heads, rows, and elements of a row.
struct Part {
    batch: usize,
    heads: usize,
    rows: Range<usize>,
    dims: Range<usize>,
}

/// Bytes that elements take, where these are whole bytes.
fn bytes(elements: i64, bits: u32) -> Option<i64> {
    let bits = elements.checked_mul(bits.into())?;
    (bits % 8 == 0).then_some(bits / 8)
}

impl RowReads<'_> {
    fn rows(&mut self, role: TensorRole, rows: &Rows, part: &Part, place: Place) {
        let Some(tensor) = (self.find)(role) else {
            return;
        };
        let bits = rows.dtype.bits();
        let (view, count) = (&rows.view, part.dims.len());
        // Lanes lie side by side, and so do the elements of rows that have none.
        let (run, along) = match (rows.lanes, view.dim) {
            (0, 1) => (count, (1, 0)),
            (0, dim) => (1, (count, dim)),
            (lanes, dim) => (lanes, (count / lanes, dim)),
        };
        let first = rows.element((part.batch, 0, part.rows.start), part.dims.start);
        let axes = [(part.heads, view.head), (part.rows.len(), view.row), along];
        let elements = || {
            let first = isize::try_from(bytes(first, bits)?).ok()?;
            let run = usize::try_from(bytes(run as i64, bits)?).ok()?;
            let mut steps = [(0, 0); 3];
            for (to, (count, step)) in steps.iter_mut().zip(axes) {
                *to = (count, bytes(step, bits)?);
            }
            let first = tensor.address.saturating_add_signed(first);
            Elements::new(tensor, first, run, &steps, Some(1), place)
        };
        if let Some(elements) = elements() {
            self.reader.read(&elements);
        }
    }

    /// Elements of some bytes each, from `first` on along two axes.
    fn grid(
        &mut self,
        role: TensorRole,
        size: usize,
        first: i64,
        axes: [(usize, i64); 2],
        place: Place,
    ) {
        let Some(tensor) = (self.find)(role) else {
            return;
        };
        let bytes = |elements: i64| elements.saturating_mul(size as i64);
        let axes = axes.map(|(count, step)| (count, bytes(step)));
        let first = isize::try_from(bytes(first)).unwrap_or(isize::MAX);
        let first = tensor.address.saturating_add_signed(first);
        if let Some(elements) = Elements::new(tensor, first, size, &axes, Some(1), place) {
            self.reader.read(&elements);
        }
    }
}

/// Scales with an entry for each token, which are read for the tokens that are.
fn by_token(grid: &Grid) -> bool {
    grid.view.batch != 0 || grid.view.row != 0
}

/// Scales and offsets of keys and values that have an entry for each token.
fn token_grids<'a>(problem: &'a AttentionProblem<'_>) -> impl Iterator<Item = Grid> + 'a {
    let both = [problem.key_quantisation, problem.value_quantisation]
        .into_iter()
        .flatten();
    let grids = both.flat_map(|ScaleOffset { scale, offset }| [Some(scale), offset]);
    grids.flatten().filter(by_token)
}

/// Whether reads of the tensor that plays a role are listed by [`each_row`].
fn listed(problem: &AttentionProblem<'_>, role: TensorRole) -> bool {
    use TensorRole as Role;
    match role {
        Role::Query
        | Role::QueryRope
        | Role::Key(_)
        | Role::Value(_)
        | Role::KeyRope
        | Role::KeyPrefix
        | Role::ValuePrefix
        | Role::BlockTable => true,
        Role::Mask => matches!(problem.mask, MaskUse::Full(_) | MaskUse::Tree(_)),
        Role::Bias => problem.bias.is_some() && problem.terms.is_empty(),
        // Those of rows that are padding may be anything, and are not followed.
        Role::QueryScale => true,
        role => token_grids(problem).any(|grid| grid.tensor.role == role),
    }
}

/// The roles that [`listed`] may hold for, of the tensors with a number in their lists.
fn roles(index: usize) -> [TensorRole; 17] {
    use TensorRole as Role;
    [
        Role::Query,
        Role::QueryRope,
        Role::Key(index),
        Role::Value(index),
        Role::KeyRope,
        Role::KeyPrefix,
        Role::ValuePrefix,
        Role::BlockTable,
        Role::Mask,
        Role::Bias,
        Role::QueryScale,
        Role::KeyScale,
        Role::KeyOffset,
        Role::ValueScale,
        Role::ValueOffset,
        Role::KeyValueScale,
        Role::KeyValueOffset,
    ]
}

/// Hands over what attention reads of the tensors that `find` knows.
///
/// # Safety
///
/// As for [`kernel::run`].
unsafe fn each_row(
    problem: &AttentionProblem<'_>,
    buffers: &Buffers<'_>,
    reads: &mut RowReads<'_>,
) {
    if let Some(prefix) = &problem.prefix {
        let rows = [
            (TensorRole::KeyPrefix, prefix.key, problem.head_dim),
            (TensorRole::ValuePrefix, prefix.value, problem.value_dim),
        ];
        for (role, rows, dim) in rows {
            let part = Part {
                batch: 0,
                heads: problem.kv_heads,
                rows: 0..prefix.len,
                dims: 0..dim,
            };
            reads.rows(role, &rows, &part, Place::Whole);
        }
    }
    // SAFETY: the caller keeps this contract.
    let padding = unsafe { kernel::read_padding(problem, buffers) };
    for (sequence, (of, mask)) in problem.sequences(padding).enumerate() {
        let place = |first| Place::Sequence { sequence, first };
        let query = Part {
            batch: if problem.packed { 0 } else { sequence },
            heads: problem.heads,
            rows: of.q_first..of.q_first + of.q_len,
            dims: 0..problem.head_dim,
        };
        reads.rows(TensorRole::Query, &problem.query, &query, place(0));
        let seen = problem.geometry(sequence).span(0..of.q_len as u64);
        let (start, end) = (seen.start as usize, seen.end as usize);
        let own = |key: usize| key.saturating_sub(of.prefix).min(of.kv_len);
        let seen = own(start)..own(end);
        if seen.is_empty() {
            continue;
        }
        if let Some(rope) = &problem.query_rope {
            let dims = 0..problem.rope_dim;
            reads.rows(
                TensorRole::QueryRope,
                rope,
                &Part { dims, ..query },
                place(0),
            );
        }
        let (first_row, first_key) = problem.origin(&of);
        if let Some((mask, element)) =
            mask.and_then(|mask| Some((mask, mask.element(0, mask.context)?)))
            && problem.mask != MaskUse::OfSequences
        {
            let row = mask
                .element(1, mask.context)
                .map_or(0, |next| next.saturating_sub(element));
            let keys = of.keys().saturating_sub(mask.context);
            reads.grid(
                TensorRole::Mask,
                1,
                element,
                [(keys, mask.key), (of.q_len, row)],
                place(0),
            );
        }
        if let Some(bias) = problem.bias.filter(|_| problem.terms.is_empty()) {
            let [_, heads, rows, keys] = bias.sizes;
            let part = Part {
                batch: sequence,
                heads,
                rows: first_row..rows.min(first_row + of.q_len),
                dims: first_key + start..keys.min(first_key + end),
            };
            if !part.rows.is_empty() && !part.dims.is_empty() {
                reads.rows(TensorRole::Bias, &bias.rows, &part, place(0));
            }
        }
        let at = problem.key_value(sequence);
        // Rows of keys and values that lie one after another: where, and the place in the sequence of the first.
        let mut stored = |batch: usize, rows: Range<usize>, token: usize, place: Place| {
            let index = at.list_index;
            let all = [
                Some((TensorRole::Key(index), at.key, problem.head_dim)),
                Some((TensorRole::Value(index), at.value, problem.value_dim)),
                at.key_rope
                    .map(|rope| (TensorRole::KeyRope, rope, problem.rope_dim)),
            ];
            for (role, of, dim) in all.into_iter().flatten() {
                let part = Part {
                    batch,
                    heads: problem.kv_heads,
                    rows: rows.clone(),
                    dims: 0..dim,
                };
                reads.rows(role, &of, &part, place);
            }
            for grid in token_grids(problem) {
                let at = match grid.counts {
                    Counts::Stored => (batch, rows.start),
                    Counts::Tokens => (sequence, token),
                    Counts::Concatenated => continue,
                };
                let size = grid.tensor.dtype.size().unwrap_or(0);
                if size > 0 && grid.cuts.row == Cut::NONE && grid.cuts.head == Cut::NONE {
                    let first = grid.at((at.0, 0, at.1), 0);
                    let axes = [
                        (problem.kv_heads, grid.view.head),
                        (rows.len(), grid.view.row),
                    ];
                    reads.grid(grid.tensor.role, size, first, axes, place);
                }
            }
        };
        let Some(pages) = &problem.pages else {
            let rows = of.kv_first + seen.start..of.kv_first + seen.end;
            stored(
                at.batch,
                rows,
                of.kv_position + seen.start,
                place(seen.start),
            );
            continue;
        };
        let size = pages.block_size.max(1);
        let columns = seen.start / size..seen.end.div_ceil(size);
        // SAFETY: the caller keeps this contract.
        let Ok(blocks) = (unsafe { BlockIds::read(buffers, pages, sequence, seen.end) }) else {
            // The launch fails by that.
            return;
        };
        for column in columns.clone() {
            // An entry that names no block has a finding of its own.
            let Some((block, _)) = blocks.find(column * size) else {
                continue;
            };
            let keys = seen.start.max(column * size)..seen.end.min((column + 1) * size);
            let rows = keys.start - column * size..keys.end - column * size;
            let place = Place::Block {
                block,
                first: rows.start,
                of: Some((sequence, of.kv_len)),
            };
            stored(block, rows, keys.start, place);
        }
        let step = |index: usize, stride: i64| (index as i64).saturating_mul(stride);
        let first = (pages.table.offset)
            .saturating_add(step(sequence, pages.row))
            .saturating_add(step(columns.start, pages.column));
        let columns = columns.end.min(pages.columns).saturating_sub(columns.start);
        let axes = [(1, 0), (columns, pages.column)];
        reads.grid(
            TensorRole::BlockTable,
            size_of::<i32>(),
            first,
            axes,
            Place::Whole,
        );
    }
}

/// Hands over what a launch of an attention operator reads.
///
/// # Safety
///
/// As for [`DeclaredOperator::compute`].
pub(super) unsafe fn reads<O: DeclaredOperator>(
    op: &O,
    problem: &AttentionProblem<'_>,
    of_role: &dyn Fn(TensorRole) -> Option<Argument<ParameterOf<O>>>,
    (at, memory): (&Addresses, &DeviceMemory),
    reader: &mut dyn Reader,
) {
    let doubtful = op.doubtful(at, reader);
    if doubtful.is_empty() {
        return;
    }
    let find = |role| {
        let argument = of_role(role)?;
        let known = doubtful.contains(&argument) && listed(problem, role);
        known.then(|| op.named(argument, at))
    };
    let base = |role| match of_role(role) {
        Some(argument) => memory.host(at.get(argument)),
        None => std::ptr::null_mut(),
    };
    let mut rows = RowReads {
        find: &find,
        reader,
    };
    // SAFETY: the caller's promise.
    unsafe { each_row(problem, &Buffers(&base), &mut rows) };
    for argument in doubtful {
        let by_rows = |&role: &TensorRole| of_role(role) == Some(argument) && listed(problem, role);
        if !roles(argument.index).iter().any(by_rows) {
            op.read_described(argument, at, reader);
        }
    }
}
