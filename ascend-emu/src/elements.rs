//! Elements of a tensor in memory: runs of bytes that repeat at fixed steps.

use ascend_spec::TensorDesc;
use smallvec::SmallVec;
use std::ops::Range;

/// A visitor that is called with one set of elements after another.
pub(crate) type Visit<'a> = dyn FnMut(&Elements) + 'a;

/// The part of a tensor that elements belong to, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The whole tensor.
    Whole,
    /// All that a copy takes to the host.
    Copied,
    /// Tokens of a block of a paged cache, from `first` on; the sequence whose keys they are, and how many it has.
    Block { block: usize, first: usize, sequence: Option<(usize, usize)> },
}

/// The tensor that elements belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedTensor {
    /// Its name as a parameter.
    pub what: &'static str,
    /// Its base address.
    pub address: usize,
}

/// Receives the elements that a launch reads.
pub(crate) trait Reader {
    /// Whether all of these bytes are known to be written, so that reads of single elements need not be listed.
    fn knows(&self, bytes: Range<usize>) -> bool;

    /// Whether none of these bytes has been written.
    fn untouched(&self, bytes: Range<usize>) -> bool;

    /// Receives elements that a launch reads and that must have been written before.
    fn read(&mut self, elements: &Elements);

    /// Receives elements that a launch reads in the order [`Elements::order`].
    fn read_in_order(&mut self, elements: &Elements);
}

/// Elements of one tensor.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    pub tensor: NamedTensor,
    pub place: Place,
    /// The lowest byte.
    start: usize,
    /// Bytes of a run.
    run: usize,
    /// Count and step of each axis, the largest step first; those from `outer` on continue each other without a gap and
    /// are part of the run.
    axes: SmallVec<[(usize, usize); 5]>,
    outer: usize,
    /// Step from one row to the next.
    row: usize,
    /// The order that the tensor is written or read in, if its description leaves a choice.
    pub order: Option<&'static str>,
}

/// The most runs that are visited, so that absurd views cost little.
const MOST_RUNS: usize = 1 << 16;

impl Elements {
    /// Runs of `run` bytes from `first` on, repeated along axes of a count and a step in bytes each. `row` is the axis
    /// along which a message counts. `None` if there are no elements.
    pub(crate) fn new(
        tensor: NamedTensor,
        first: usize,
        run: usize,
        axes: &[(usize, i64)],
        row: Option<usize>,
        place: Place,
    ) -> Option<Self> {
        if run == 0 || axes.iter().any(|&(count, _)| count == 0) {
            return None;
        }
        let mut start = first;
        let mut kept: SmallVec<[(usize, usize); 5]> = SmallVec::new();
        for &(count, step) in axes {
            let size = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
            if step < 0 {
                start = start.saturating_sub(size.saturating_mul(count - 1));
            }
            if count > 1 && step != 0 {
                kept.push((count, size));
            }
        }
        kept.sort_unstable_by_key(|&(_, step)| std::cmp::Reverse(step));
        let (mut outer, mut whole) = (kept.len(), run);
        while let Some(&(count, step)) = outer.checked_sub(1).and_then(|last| kept.get(last))
            && step <= whole
        {
            whole = step.saturating_mul(count - 1).saturating_add(whole);
            outer -= 1;
        }
        let step = row.and_then(|row| axes.get(row)).map_or(0, |&(_, step)| step);
        Some(Elements {
            tensor,
            place,
            start,
            run: whole,
            axes: kept,
            outer,
            row: usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX),
            order: None,
        })
    }

    /// The elements of a description. `None` if there are none, or if they share bytes in a way
    /// that no steps describe.
    pub(crate) fn described(tensor: NamedTensor, desc: &TensorDesc) -> Option<Self> {
        let range = desc.byte_range()?;
        let size = match desc.dtype.size() {
            Some(size) if !desc.is_contiguous() => size,
            _ => {
                let bytes = usize::try_from(range.end - range.start).ok()?;
                let whole = desc.is_contiguous();
                let first = (tensor.address).saturating_add(usize::try_from(range.start).ok()?);
                return Elements::new(tensor, first, bytes, &[], None, Place::Whole).filter(|_| whole);
            }
        };
        let bytes = |elements: i64| elements.saturating_mul(size as i64);
        let axes: SmallVec<[(usize, i64); 8]> = (desc.shape.iter().zip(desc.strides.iter()))
            .map(|(&count, &step)| (usize::try_from(count).unwrap_or(0), bytes(step)))
            .collect();
        let offset = isize::try_from(bytes(desc.offset)).ok()?;
        let first = tensor.address.saturating_add_signed(offset);
        Elements::new(tensor, first, size, &axes, None, Place::Whole)
    }

    /// Adds the order that the elements are written or read in.
    #[must_use]
    pub(crate) fn in_order(self, order: Option<&'static str>) -> Self {
        Elements { order, ..self }
    }

    /// The bytes from the first element to the last.
    pub(crate) fn bounds(&self) -> Range<usize> {
        let outer = self.axes.iter().take(self.outer);
        let end = outer.fold(self.start.saturating_add(self.run), |end, &(count, step)| {
            end.saturating_add(step.saturating_mul(count - 1))
        });
        self.start..end
    }

    /// Visits runs of bytes until `visit` is false. Says whether these were all of them: beyond [`MOST_RUNS`] none is
    /// visited.
    pub(crate) fn runs(&self, visit: &mut dyn FnMut(Range<usize>) -> bool) -> bool {
        let outer = self.axes.get(..self.outer).unwrap_or_default();
        let mut index: SmallVec<[usize; 5]> = SmallVec::from_elem(0, outer.len());
        for _ in 0..MOST_RUNS {
            let steps = index.iter().zip(outer);
            let start =
                steps.fold(self.start, |start, (&index, &(_, step))| start.saturating_add(step.saturating_mul(index)));
            if !visit(start..start.saturating_add(self.run)) {
                return false;
            }
            let next = index.iter_mut().zip(outer).rev().find_map(|(index, &(count, _))| {
                *index += 1;
                if *index < count {
                    return Some(());
                }
                *index = 0;
                None
            });
            if next.is_none() {
                return true;
            }
        }
        false
    }

    /// The row that a byte of the elements belongs to.
    pub(crate) fn row_of(&self, byte: usize) -> usize {
        let mut rest = byte.saturating_sub(self.start);
        for &(count, step) in &self.axes {
            let index = (rest / step.max(1)).min(count - 1);
            if step == self.row {
                return index;
            }
            rest -= index * step;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::{DType, Dims};

    const X: NamedTensor = NamedTensor { what: "x", address: 0 };

    fn runs(elements: &Elements) -> Vec<Range<usize>> {
        let mut all = Vec::new();
        elements.runs(&mut |run| {
            all.push(run);
            true
        });
        all
    }

    #[test]
    fn axes_that_continue_each_other_are_one_run() {
        // Two heads of three rows of 32 bytes, with room for four.
        let elements = |axes: &[(usize, i64)]| Elements::new(X, 1000, 32, axes, Some(1), Place::Whole).unwrap();
        let apart = elements(&[(2, 128), (3, 32)]);
        assert_eq!(runs(&apart), [1000..1096, 1128..1224]);
        assert_eq!(apart.bounds(), 1000..1224);
        assert_eq!([1000, 1040, 1100, 1128, 1223].map(|byte| apart.row_of(byte)), [0, 1, 2, 0, 2]);
        let joined = elements(&[(2, 32), (3, 64)]);
        assert_eq!(runs(&joined).as_slice(), std::slice::from_ref(&(1000..1192)));
        assert_eq!([1031, 1063, 1064, 1191].map(|byte| joined.row_of(byte)), [0, 0, 1, 2]);
        let backwards = elements(&[(1, 0), (3, -50)]);
        assert_eq!(runs(&backwards), [900..932, 950..982, 1000..1032]);
        assert!(Elements::new(X, 0, 4, &[(0, 4)], None, Place::Whole).is_none());
    }

    #[test]
    fn descriptions_are_their_elements() {
        let mut desc = TensorDesc::packed(DType::Float16, Dims::of([2, 3]));
        let elements = |desc: &TensorDesc| Elements::described(NamedTensor { address: 100, ..X }, desc).unwrap();
        assert_eq!(runs(&elements(&desc)).as_slice(), std::slice::from_ref(&(100..112)));
        desc.offset = 4;
        desc.strides = Dims::of([10, 1]);
        assert_eq!(runs(&elements(&desc)), [108..114, 128..134]);
        desc.strides = Dims::of([0, 2]);
        assert_eq!(runs(&elements(&desc)), [108..110, 112..114, 116..118]);
    }

    #[test]
    fn a_view_of_very_many_runs_is_cut_short() {
        let many = Elements::new(X, 0, 1, &[(1 << 40, 2)], None, Place::Whole).unwrap();
        assert_eq!(runs(&many).len(), MOST_RUNS);
    }
}
