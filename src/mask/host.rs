//! The content of a mask tensor, on the host.

use std::fmt;
use std::ops::Range;

use ascend_spec::{Tile, Visibility};

use crate::error::{Error, Result};

use super::form::MaskForm;

/// The content of a mask tensor: `[Sq, Skv]`, or `[B, Sq, Skv]` with an entry for each sequence.
#[derive(Clone, PartialEq, Eq)]
pub struct HostMask {
    form: MaskForm,
    /// Number of entries, if there is a batch axis.
    batch: Option<usize>,
    rows: usize,
    keys: usize,
    bytes: Vec<u8>,
}

impl HostMask {
    /// Most bytes of a mask, where axes of 0 count as 1; no axis is longer than that, either. A full mask grows with
    /// the square of the length: a longer one needs a sparse mode, whose template serves every length.
    pub const MAX_BYTES: usize = 1 << 32;

    /// The tensor `[Sq, Skv]` of a formula.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a mask of more bytes than [`HostMask::MAX_BYTES`] or
    /// than the host's memory holds, and for a row that sees nothing in a form with `-inf`.
    pub fn of(mask: &(impl Visibility + ?Sized), form: MaskForm) -> Result<Self> {
        let mut bytes = Vec::new();
        Self::paint(mask, form, &mut bytes)?;
        let (rows, keys) = (size(mask.q_len()), size(mask.kv_len()));
        Self::whole(form, None, rows, keys, bytes)
    }

    /// Writes the elements of [`HostMask::of`], row by row, into a vector that can be reused. Its previous content is
    /// dropped.
    ///
    /// # Errors
    /// As for [`HostMask::of`], but rows that see nothing are not refused.
    pub fn paint(mask: &(impl Visibility + ?Sized), form: MaskForm, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let (rows, keys) = (size(mask.q_len()), size(mask.kv_len()));
        let bytes = checked_bytes(form, &[rows, keys])?;
        reserve(out, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let painter = Painter::new(form, keys)?;
        for i in 0..mask.q_len() {
            painter.row(mask, i, keys, out);
        }
        Ok(())
    }

    /// The tensor `[B, rows, keys]` of a formula for each sequence. Rows and keys that a sequence does not have are
    /// hidden.
    ///
    /// # Errors
    /// As for [`HostMask::of`], and for a sequence with more rows or keys.
    pub fn stack<V: Visibility>(masks: &[V], rows: usize, keys: usize, form: MaskForm) -> Result<Self> {
        let mut bytes = Vec::new();
        let wanted = checked_bytes(form, &[masks.len(), rows, keys])?;
        reserve(&mut bytes, wanted)?;
        let painter = Painter::new(form, if wanted == 0 { 0 } else { keys })?;
        for (b, mask) in masks.iter().enumerate() {
            if mask.q_len() > rows as u64 || mask.kv_len() > keys as u64 {
                return Err(Error::invalid(
                    "masks",
                    format_args!("{} rows and {} keys of sequence {b}", mask.q_len(), mask.kv_len()),
                    format_args!("at most {rows} rows and {keys} keys"),
                )
                .fix("give the batch the rows and keys of its longest sequence"));
            }
            for i in 0..if wanted == 0 { 0 } else { rows as u64 } {
                painter.row(mask, i, keys, &mut bytes);
            }
        }
        Self::whole(form, Some(masks.len()), rows, keys, bytes)
    }

    /// The tensor `[rows, keys]` in which a key is hidden where `visible` returns false.
    ///
    /// # Errors
    /// As for [`HostMask::of`].
    pub fn from_fn(
        rows: usize,
        keys: usize,
        form: MaskForm,
        mut visible: impl FnMut(usize, usize) -> bool,
    ) -> Result<Self> {
        let cells = (0..rows).flat_map(|i| (0..keys).map(move |j| (i, j)));
        let hidden = cells.map(|(i, j)| !visible(i, j));
        Self::from_flags(form, None, (rows, keys), hidden)
    }

    /// The tensor `[B, rows, keys]` in which a key is hidden where `visible`, called with sequence, row and key,
    /// returns false.
    ///
    /// # Errors
    /// As for [`HostMask::of`].
    pub fn stack_from_fn(
        batch: usize,
        rows: usize,
        keys: usize,
        form: MaskForm,
        mut visible: impl FnMut(usize, usize, usize) -> bool,
    ) -> Result<Self> {
        let rows_of = (0..batch).flat_map(|b| (0..rows).map(move |i| (b, i)));
        let cells = rows_of.flat_map(|(b, i)| (0..keys).map(move |j| (b, i, j)));
        let hidden = cells.map(|(b, i, j)| !visible(b, i, j));
        Self::from_flags(form, Some(batch), (rows, keys), hidden)
    }

    /// A mask from whether each of its elements hides, in row-major order.
    pub(crate) fn from_flags(
        form: MaskForm,
        batch: Option<usize>,
        (rows, keys): (usize, usize),
        hidden: impl Iterator<Item = bool>,
    ) -> Result<Self> {
        let mut bytes = Vec::new();
        let wanted = checked_bytes(form, &[batch.unwrap_or(1), rows, keys])?;
        reserve(&mut bytes, wanted)?;
        let (size, hides) = (form.size(), form.hidden_bytes());
        // Rows without keys are not visited: there may be billions.
        let elements = wanted.checked_div(size).unwrap_or(0);
        for hidden in hidden.take(elements) {
            let element = if hidden { hides } else { [0; 4] };
            bytes.extend(element.into_iter().take(size));
        }
        Self::whole(form, batch, rows, keys, bytes)
    }

    /// The tensor `[rows, keys]` of a bitmap in row-major order: a 1 shows the key. The first key is in the lowest
    /// bit of the first byte, and rows follow each other without a gap.
    ///
    /// # Errors
    /// As for [`HostMask::of`], and for another number of bytes.
    pub fn from_bitmap(rows: usize, keys: usize, form: MaskForm, bitmap: &[u8]) -> Result<Self> {
        let wanted = checked_bytes(MaskForm::BOOL, &[rows, keys])?.div_ceil(8);
        if bitmap.len() != wanted {
            return Err(Error::invalid(
                "bitmap",
                format_args!("{} bytes", bitmap.len()),
                format_args!("{wanted}, for {rows} rows of {keys} keys"),
            )
            .fix("pack one bit for each row and key, each row from a whole byte on"));
        }
        Self::from_fn(rows, keys, form, |i, j| {
            let bit = i.saturating_mul(keys).saturating_add(j);
            bitmap.get(bit / 8).is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
        })
    }

    /// Makes a mask of all its elements. Refuses a row that sees nothing in a form with `-inf`.
    fn whole(form: MaskForm, batch: Option<usize>, rows: usize, keys: usize, bytes: Vec<u8>) -> Result<Self> {
        let mask = Self { form, batch, rows, keys, bytes };
        if form.is_infinite()
            && let Some((b, i)) = mask.fully_masked_rows().next()
        {
            return Err(Error::invalid(
                "form",
                format_args!("{form}, and row {i} of sequence {b} sees no key"),
                "a form whose softmax of such a row is a number: `MaskForm::lowest`, or a one-byte form with corrected \
                 inner_precise",
            )
            .fix("use `MaskForm::lowest`, or let each row see a key"));
        }
        Ok(mask)
    }

    /// Element type, and the value that hides.
    pub fn form(&self) -> MaskForm {
        self.form
    }

    /// Number of entries if there is a batch axis, rows, and keys.
    pub(super) fn axes(&self) -> (Option<usize>, usize, usize) {
        (self.batch, self.rows, self.keys)
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> Vec<usize> {
        let axes = [self.rows, self.keys];
        self.batch.into_iter().chain(axes).collect()
    }

    /// Number of entries: 1 without a batch axis.
    pub fn batch(&self) -> usize {
        self.batch.unwrap_or(1)
    }

    /// The bytes of the elements, in the tensor's order.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether row `i` of entry `b` hides key `j`. Positions outside of the tensor are hidden.
    pub fn hides(&self, b: usize, i: usize, j: usize) -> bool {
        if b >= self.batch() || i >= self.rows || j >= self.keys {
            return true;
        }
        // Within the mask, whose bytes can be counted.
        let row = b.saturating_mul(self.rows).saturating_add(i);
        let element = row.saturating_mul(self.keys).saturating_add(j);
        let size = self.form.size();
        let at = element.saturating_mul(size);
        self.bytes.get(at..at.saturating_add(size)).is_none_or(|element| element.iter().any(|&byte| byte != 0))
    }

    /// Entry and number of each row that sees no key.
    pub fn fully_masked_rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let sees_nothing = |&(b, i): &(usize, usize)| (0..self.keys).all(|j| self.hides(b, i, j));
        // Rows without keys are not visited: there may be billions.
        let (batch, rows) = match self.bytes.is_empty() {
            true => (0, 0),
            false => (self.batch(), self.rows),
        };
        let rows = (0..batch).flat_map(move |b| (0..rows).map(move |i| (b, i)));
        rows.filter(sees_nothing)
    }

    /// One entry, as a mask that can be drawn or queried.
    pub fn entry(&self, b: usize) -> impl Visibility + '_ {
        Entry { mask: self, b }
    }
}

/// One entry of a tensor.
struct Entry<'a> {
    mask: &'a HostMask,
    b: usize,
}

impl Visibility for Entry<'_> {
    fn q_len(&self) -> u64 {
        self.mask.rows as u64
    }

    fn kv_len(&self) -> u64 {
        self.mask.keys as u64
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        let row = usize::try_from(i).ok().filter(|i| *i < self.mask.rows);
        let Some(i) = row else { return };
        let mut start = None;
        // One past the last key is hidden and ends the last run.
        for j in 0..=self.mask.keys {
            match (start, self.mask.hides(self.b, i, j)) {
                (None, false) => start = Some(j),
                (Some(first), true) => {
                    visit(first as u64..j as u64);
                    start = None;
                }
                _ => {}
            }
        }
    }

    fn sees(&self, i: u64, j: u64) -> bool {
        match (usize::try_from(i), usize::try_from(j)) {
            (Ok(i), Ok(j)) => !self.mask.hides(self.b, i, j),
            _ => false,
        }
    }

    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        ascend_spec::geometry::tile_by_rows(self, rows, keys)
    }
}

/// Appends rows to the elements of a mask; each element is written once.
struct Painter {
    form: MaskForm,
    /// A row of hidden elements, for types wider than a byte.
    hidden: Vec<u8>,
}

impl Painter {
    fn new(form: MaskForm, keys: usize) -> Result<Self> {
        let size = form.size();
        let mut hidden = Vec::new();
        if size > 1 {
            let bytes = keys.saturating_mul(size);
            reserve(&mut hidden, bytes)?;
            let element = form.hidden_bytes().into_iter().take(size);
            hidden.extend(element.cycle().take(bytes));
        }
        Ok(Self { form, hidden })
    }

    fn hide(&self, keys: usize, out: &mut Vec<u8>) {
        if self.hidden.is_empty() {
            let [hides, ..] = self.form.hidden_bytes();
            out.resize(out.len().saturating_add(keys), hides);
        } else {
            let bytes = keys.saturating_mul(self.form.size());
            let hidden = self.hidden.get(..bytes).unwrap_or(&self.hidden);
            out.extend_from_slice(hidden);
        }
    }

    /// Appends row `i` of `keys` elements to `out`. Runs of the mask that are out of order are cut.
    fn row(&self, mask: &(impl Visibility + ?Sized), i: u64, keys: usize, out: &mut Vec<u8>) {
        let mut done = 0usize;
        mask.each_run(i, &mut |run| {
            let start = size(run.start).clamp(done, keys);
            let end = size(run.end).clamp(start, keys);
            self.hide(start.saturating_sub(done), out);
            let shown = end.saturating_sub(start).saturating_mul(self.form.size());
            out.resize(out.len().saturating_add(shown), 0);
            done = end;
        });
        self.hide(keys.saturating_sub(done), out);
    }
}

/// Bytes of a tensor of these axes.
fn checked_bytes(form: MaskForm, axes: &[usize]) -> Result<usize> {
    let product = |bytes: Option<usize>, &axis: &usize| bytes?.checked_mul(axis.max(1));
    let empty = axes.contains(&0);
    axes.iter()
        .fold(Some(form.size()), product)
        .filter(|&bytes| bytes <= HostMask::MAX_BYTES)
        .map(|bytes| if empty { 0 } else { bytes })
        .ok_or_else(|| {
            Error::invalid(
                "mask",
                format_args!("{axes:?} elements of {}", form.dtype()),
                format_args!(
                    "at most {} bytes; sparse modes 2, 3 and 4 take a template of 4 MiB for every length",
                    HostMask::MAX_BYTES
                ),
            )
            .fix("use a template by `Masks::causal` or `Masks::band`")
        })
}

/// Reserves host memory for a mask.
pub(crate) fn reserve<T>(bytes: &mut Vec<T>, wanted: usize) -> Result<()> {
    bytes.try_reserve_exact(wanted).map_err(|_| {
        Error::invalid("mask", format_args!("{wanted} bytes"), "what fits in the host's memory").fix("divide the batch")
    })
}

fn size(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

impl fmt::Debug for HostMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMask").field("form", &self.form).field("shape", &self.shape()).finish_non_exhaustive()
    }
}
