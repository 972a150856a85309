//! Sums over the parts of the causal triangle, and which keys of a row each part has.

use std::ops::Range;

use ascend_attention::spec::geometry::{MaskGeometry, TriangleMix, TrianglePart, TriangleRows};

use ascend_attention::{Error, Result};

/// Sums over the parts of the causal triangle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartSums {
    /// Sinks and window.
    pub streaming: f64,
    /// The last rows' other keys.
    pub last: f64,
    /// What a triangle leaves out.
    pub middle: f64,
}

impl PartSums {
    /// Calls `value` for each part.
    pub(crate) fn of(mut value: impl FnMut(TrianglePart) -> f64) -> Self {
        Self {
            streaming: value(TrianglePart::Streaming),
            last: value(TrianglePart::Last),
            middle: value(TrianglePart::Middle),
        }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.streaming += more.streaming;
        self.last += more.last;
        self.middle += more.middle;
    }

    pub(crate) fn over(self, count: f64) -> Self {
        Self { streaming: self.streaming / count, last: self.last / count, middle: self.middle / count }
    }

    /// Returns the sums if they are finite. `instead` is the error's advice on how to get smaller ones.
    pub(crate) fn finite(self, instead: &str) -> Result<Self> {
        if (self.streaming + self.last + self.middle).is_finite() {
            return Ok(self);
        }
        Err(Error::invalid(
            "sample",
            format_args!("{self:?}"),
            format_args!("numbers whose dot products are finite: {instead}"),
        )
        .fix("leave the sample out, or scale its inputs"))
    }
}

/// The keys of each part in the rows of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    streaming: MaskGeometry,
    last: MaskGeometry,
    middle: MaskGeometry,
}

impl Parts {
    /// The parts of a prompt of `tokens` tokens.
    pub(crate) fn new(sizes: TriangleMix, tokens: usize) -> Self {
        let rows = TriangleRows::whole(tokens as u64);
        let geometry = |part| sizes.geometry(part, rows);
        Self {
            streaming: geometry(TrianglePart::Streaming),
            last: geometry(TrianglePart::Last),
            middle: geometry(TrianglePart::Middle),
        }
    }

    /// Sums the cells of one row by part; `cells` has one for each of `keys`.
    pub(crate) fn row_sums(&self, row: usize, keys: &Range<usize>, cells: &[f64]) -> PartSums {
        PartSums {
            streaming: part_sum(&self.streaming, row, keys, cells),
            last: part_sum(&self.last, row, keys, cells),
            middle: part_sum(&self.middle, row, keys, cells),
        }
    }
}

/// Sums the cells of one row that a part sees; `cells` has one for each of `keys`.
fn part_sum(part: &MaskGeometry, row: usize, keys: &Range<usize>, cells: &[f64]) -> f64 {
    let place = |key: u64| {
        let key = usize::try_from(key).unwrap_or(usize::MAX);
        key.clamp(keys.start, keys.end).saturating_sub(keys.start)
    };
    let runs = part.runs(row as u64);
    runs.map(|run| {
        let seen = cells.get(place(run.start)..place(run.end));
        seen.unwrap_or_default().iter().sum::<f64>()
    })
    .sum()
}
