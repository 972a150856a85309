//! Rows put into another order on the device.

use ascend_attention::scatter::{ScatterPaKvCache, ScatterPlan, SlotMapping};
use ascend_attention::{Element, Output, Queue, Stream, Tensor};

use crate::backends::size;
use crate::error::{Error, Result};

/// The transposition of `[outer, inner]` rows to `[inner, outer]`, by ScatterPaKvCache: rows are written to their
/// places as keys are to the slots of a cache. What a collective exchanges is ordered by rank first, and what attention
/// reads by token first.
#[derive(Debug)]
pub(super) struct RowOrder {
    /// The place of each row, and the call that writes rows there; `None` where the order stays as it is.
    moves: Option<(SlotMapping, ScatterPlan)>,
    sizes: [usize; 2],
    /// The rows that are written, and those of the tensor that they are written to.
    rows: [usize; 2],
}

/// The rows of attention `[.., D]` with the two halves of their log-sum-exps, in the shapes that one call moves.
struct Rows<T: Element> {
    attention: Tensor<T>,
    lse: Tensor<T>,
}

impl RowOrder {
    /// Prepares moves of rows alone.
    pub(super) fn of_rows<T: Element>(
        stream: &Stream,
        sizes: [usize; 2],
        from: &Tensor<T>,
        to: &Tensor<T>,
    ) -> Result<Self> {
        Self::plan(stream, sizes, false, |slots, [rows, places]| {
            Ok(ScatterPaKvCache::new().plan((&as_rows(from, rows)?, slots, &as_block(to, places)?))?)
        })
    }

    /// Prepares moves of attention together with its log-sum-exps, where `twice` to a tensor of twice the rows, by
    /// which [`withhold`](Self::withhold) withholds some from the first half.
    pub(super) fn of_outputs<T: Element>(
        stream: &Stream,
        sizes: [usize; 2],
        from: &Output<T>,
        (to, twice): (&Output<T>, bool),
    ) -> Result<Self> {
        Self::plan(stream, sizes, twice, |slots, [rows, places]| {
            let (from, to) = (Rows::of(from, rows, as_rows)?, Rows::of(to, places, as_block)?);
            Ok(ScatterPaKvCache::new().plan((&from.attention, &from.lse, slots, &to.attention, &to.lse))?)
        })
    }

    fn plan(
        stream: &Stream,
        sizes: [usize; 2],
        twice: bool,
        plan: impl FnOnce(&SlotMapping, [usize; 2]) -> Result<ScatterPlan>,
    ) -> Result<Self> {
        let [outer, inner] = sizes;
        let rows = [outer * inner, outer * inner * if twice { 2 } else { 1 }];
        if !twice && (outer == 1 || inner == 1) {
            return Ok(Self { moves: None, sizes, rows });
        }
        let slots = SlotMapping::new(stream, &places(sizes, |_| false), rows[1])?;
        let plan = plan(&slots, rows)?;
        Ok(Self { moves: Some((slots, plan)), sizes, rows })
    }

    /// Moves the rows of which this is said, by the first axis and its size, to the second half from now on, and the
    /// others to their places.
    pub(super) fn withhold(&self, stream: &Stream, withheld: impl Fn(usize, usize) -> bool) -> Result<()> {
        let Some((slots, _)) = &self.moves else {
            return Ok(());
        };
        Ok(slots.overwrite(stream, &places(self.sizes, |row| withheld(row, self.sizes[0])))?)
    }

    /// Whether the order stays as it is, so that nothing has to be moved.
    pub(super) fn is_same(&self) -> bool {
        self.moves.is_none()
    }

    /// Where the moved rows are: in `to`, or still in `from`, in the shape of `to`.
    pub(super) fn moved<T: Element>(&self, from: &Tensor<T>, to: &Tensor<T>) -> Result<Tensor<T>> {
        match self.is_same() {
            true => Ok(from.reshape(to.shape())?),
            false => Ok(to.clone()),
        }
    }

    /// Queues the moves of rows.
    pub(super) fn move_rows<T: Element>(&self, queue: &impl Queue, from: &Tensor<T>, to: &Tensor<T>) -> Result<()> {
        let Some((slots, plan)) = &self.moves else {
            return Ok(());
        };
        let (from, to) = (as_rows(from, self.rows[0])?, as_block(to, self.rows[1])?);
        Ok(plan.launch(queue, (&from, slots, &to))?)
    }

    /// Queues the moves of attention and log-sum-exps.
    pub(super) fn move_outputs<T: Element>(&self, queue: &impl Queue, from: &Output<T>, to: &Output<T>) -> Result<()> {
        let Some((slots, plan)) = &self.moves else {
            return Ok(());
        };
        let (from, to) = (Rows::of(from, self.rows[0], as_rows)?, Rows::of(to, self.rows[1], as_block)?);
        Ok(plan.launch(queue, (&from.attention, &from.lse, slots, &to.attention, &to.lse))?)
    }
}

/// The place of each row, in order; one that is withheld is behind all places.
fn places([outer, inner]: [usize; 2], withheld: impl Fn(usize) -> bool) -> Vec<i64> {
    let of_row = |one: usize| {
        let behind = if withheld(one) { outer * inner } else { 0 };
        (0..inner).map(move |other| (behind + other * outer + one) as i64)
    };
    (0..outer).flat_map(of_row).collect()
}

impl<T: Element> Rows<T> {
    fn of(output: &Output<T>, rows: usize, shaped: impl Fn(&Tensor<T>, usize) -> Result<Tensor<T>>) -> Result<Self> {
        Ok(Self { attention: shaped(&output.attention, rows)?, lse: shaped(&lse_bits(output)?, rows)? })
    }
}

/// The log-sum-exps of an output.
pub(super) fn lse_of<T: Element>(output: &Output<T>) -> Result<&Tensor<f32>> {
    let lse = output.softmax_lse.as_ref();
    lse.ok_or_else(|| Error::invalid("softmax_lse", "none", "log-sum-exps").fix("ask for them by `softmax_lse(true)`"))
}

/// The bits of log-sum-exps, `[.., 1]`, as elements of the attention's type, `[.., 2]`: a call moves keys and values of
/// one type.
pub(super) fn lse_bits<T: Element>(output: &Output<T>) -> Result<Tensor<T>> {
    Ok(lse_of(output)?.bits_as(T::DTYPE)?.typed()?)
}

/// A contiguous tensor of `rows` rows, `[.., D]`, as `[rows, N, D]`.
fn as_rows<T: Element>(tensor: &Tensor<T>, rows: usize) -> Result<Tensor<T>> {
    let dim = size(tensor, tensor.shape().len().saturating_sub(1));
    let heads = tensor.len().checked_div(rows * dim).unwrap_or(0);
    Ok(tensor.reshape([rows, heads, dim])?)
}

/// A contiguous tensor of `rows` rows as a cache of one block, `[1, rows, N, D]`.
fn as_block<T: Element>(tensor: &Tensor<T>, rows: usize) -> Result<Tensor<T>> {
    let tensor = as_rows(tensor, rows)?;
    let [_, heads, dim] = [0, 1, 2].map(|axis| size(&tensor, axis));
    Ok(tensor.reshape([1, rows, heads, dim])?)
}
