//! Strided views of the memory behind device addresses.

use super::argument::{Argument, Role, Shape};
use super::number::{Number, WideElement};
use crate::host_memory::{HostMemoryExhausted, try_repeat};
use crate::memory::DeviceMemory;
use crate::operator::{Addresses, TensorPosition};
use crate::sanitizer::allocation_table;
use ascend_spec::DType;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::ops::Range;

/// Byte strides of the axes.
type Steps = SmallVec<[isize; 8]>;

/// Number of elements that are computed at once.
const CHUNK: usize = 256;

/// Number of strided elements that are read from each row at once: their cache lines stay at hand for the next row.
const PANEL: usize = 32;

/// Elements of memory that stays valid while the launch that made the view runs.
///
/// All methods access only these elements; methods that write are for views of outputs.
#[derive(Clone, Debug)]
pub(super) struct View {
    first: *mut u8,
    dtype: DType,
    /// Bytes of an element.
    size: usize,
    shape: Shape,
    steps: Steps,
}

/// Receives a run of elements: the offset of its first in each view, its length, and its step in each view.
type Row<'a> = &'a mut dyn FnMut(&[isize], usize, &[isize]);

/// Visits the runs of elements that are a step apart in each of several views of one shape: `row` gets the byte
/// offset of the run's first element in each view, the length of the run, and the step in each view.
fn walk(shape: &[usize], steps: &[&[isize]], row: Row<'_>) {
    if shape.contains(&0) {
        return;
    }
    // Axes that are not of size 1, the last first; axes that continue each other in every view are merged.
    let mut axes: SmallVec<[(usize, SmallVec<[isize; 4]>); 8]> = SmallVec::new();
    for axis in (0..shape.len()).rev().filter(|&axis| shape[axis] > 1) {
        let own: SmallVec<[isize; 4]> = steps.iter().map(|steps| steps[axis]).collect();
        match axes.last_mut() {
            Some((size, inner))
                if (own.iter().zip(inner.iter())).all(|(&own, &inner)| own == inner.wrapping_mul(*size as isize)) =>
            {
                *size *= shape[axis];
            }
            _ => axes.push((shape[axis], own)),
        }
    }
    let mut offsets: SmallVec<[isize; 4]> = SmallVec::from_elem(0, steps.len());
    let Some((inner, outer)) = axes.split_first() else {
        let none: SmallVec<[isize; 4]> = SmallVec::from_elem(0, steps.len());
        return row(&offsets, 1, &none);
    };
    let mut place: SmallVec<[usize; 8]> = SmallVec::from_elem(0, outer.len());
    loop {
        row(&offsets, inner.0, &inner.1);
        let mut axis = 0;
        loop {
            let Some((size, steps)) = outer.get(axis) else {
                return;
            };
            place[axis] += 1;
            let back = place[axis] == *size;
            for (offset, &step) in offsets.iter_mut().zip(steps) {
                *offset += if back { -step * (*size as isize - 1) } else { step };
            }
            if !back {
                break;
            }
            place[axis] = 0;
            axis += 1;
        }
    }
}

/// Copies elements unchanged.
///
/// # Safety
///
/// Each of the elements is valid for reading and for writing, and no two at different places share bytes.
unsafe fn copy_row(size: usize, src: (*const u8, isize), dst: (*mut u8, isize), count: usize) {
    unsafe fn each<T: Copy>(src: (*const u8, isize), dst: (*mut u8, isize), count: usize) {
        for i in 0..count as isize {
            // SAFETY: the caller's promise.
            unsafe {
                let element = src.0.offset(src.1 * i).cast::<T>().read_unaligned();
                dst.0.offset(dst.1 * i).cast::<T>().write_unaligned(element);
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        if src.1 == size as isize && dst.1 == size as isize {
            return std::ptr::copy(src.0, dst.0, size * count);
        }
        match size {
            1 => each::<u8>(src, dst, count),
            2 => each::<u16>(src, dst, count),
            4 => each::<u32>(src, dst, count),
            8 => each::<u64>(src, dst, count),
            _ => each::<u128>(src, dst, count),
        }
    }
}

impl View {
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn rank(&self) -> usize {
        self.shape.len()
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Broadcasts the view to `shape`: repeats axes of size 1, and adds leading axes. It must broadcast to the shape.
    pub(super) fn broadcast(&self, shape: &[usize]) -> View {
        let skipped = shape.len() - self.rank();
        let steps = (0..shape.len())
            .map(|axis| match axis.checked_sub(skipped) {
                Some(own) if self.shape[own] == shape[axis] => self.steps[own],
                _ => 0,
            })
            .collect();
        View { shape: shape.into(), steps, ..self.clone() }
    }

    fn moved(mut self, axis: usize, places: usize) -> View {
        if !self.shape.contains(&0) {
            let bytes = self.steps[axis] * places as isize;
            // SAFETY: the callers stay within the view, whose memory is one range.
            self.first = unsafe { self.first.offset(bytes) };
        }
        self
    }

    /// A view of `count` places of an axis, from place `start` on.
    pub(super) fn narrow(&self, axis: usize, start: usize, count: usize) -> View {
        assert!(start.checked_add(count).is_some_and(|end| end <= self.shape[axis]));
        let mut view = if count == 0 { self.clone() } else { self.clone().moved(axis, start) };
        view.shape[axis] = count;
        view
    }

    /// A view of `count` places of an axis that are `step` apart, from place `start` on.
    pub(super) fn every(&self, axis: usize, start: usize, count: usize, step: usize) -> View {
        let Some(gaps) = count.checked_sub(1) else {
            return self.narrow(axis, 0, 0);
        };
        let span = gaps.checked_mul(step).and_then(|gaps| gaps.checked_add(1));
        assert!(span.is_some(), "places beyond any axis");
        let mut view = self.narrow(axis, start, span.unwrap_or(1));
        view.shape[axis] = count;
        if gaps > 0 {
            // The places are on the axis, so that the distance of two neighbours is within the tensor.
            view.steps[axis] = view.steps[axis].wrapping_mul(step as isize);
        }
        view
    }

    /// A view of one place of an axis, without that axis.
    pub(super) fn at(&self, axis: usize, index: usize) -> View {
        let mut view = self.narrow(axis, index, 1);
        view.shape.remove(axis);
        view.steps.remove(axis);
        view
    }

    /// A view of the part at these places of the axes from `axis` on, without those axes.
    pub(super) fn part(&self, axis: usize, places: &[usize]) -> View {
        let places = places.iter();
        places.fold(self.clone(), |view, &index| view.at(axis, index))
    }

    /// A view of these elements with the axes in another order.
    pub(super) fn permute(&self, axes: &[usize]) -> View {
        View {
            shape: axes.iter().map(|&axis| self.shape[axis]).collect(),
            steps: axes.iter().map(|&axis| self.steps[axis]).collect(),
            ..self.clone()
        }
    }

    /// A view of these elements with another axis, of size 1.
    pub(super) fn insert_axis(&self, axis: usize) -> View {
        let mut view = self.clone();
        view.shape.insert(axis, 1);
        view.steps.insert(axis, 0);
        view
    }

    /// A view of the first elements, in another shape. The view must be contiguous.
    pub(super) fn packed(&self, shape: &[usize]) -> View {
        assert!(shape.iter().product::<usize>() <= self.elements());
        let mut steps = Steps::from_elem(0, shape.len());
        let mut step = self.size as isize;
        for (to, &size) in steps.iter_mut().zip(shape).rev() {
            *to = step;
            step *= size as isize;
        }
        View { shape: shape.into(), steps, ..self.clone() }
    }

    /// A view of these elements with an axis reversed.
    pub(super) fn flip(&self, axis: usize) -> View {
        let last = self.shape[axis].saturating_sub(1);
        let mut view = self.clone().moved(axis, last);
        view.steps[axis] = -view.steps[axis];
        view
    }

    /// A view of one element, by its place on each axis.
    pub(super) fn element(&self, place: &[usize]) -> View {
        let mut view = self.clone();
        for (axis, &index) in place.iter().enumerate() {
            assert!(index < self.shape[axis]);
            view = view.moved(axis, index);
        }
        view.shape.clear();
        view.steps.clear();
        view
    }

    /// A view of one element, by its number in row-major order.
    pub(super) fn nth(&self, number: usize) -> View {
        let mut rest = number;
        let mut place = self.shape.clone();
        for (index, &size) in place.iter_mut().zip(&self.shape).rev() {
            *index = rest % size.max(1);
            rest /= size.max(1);
        }
        self.element(&place)
    }

    /// Reads all elements in row-major order.
    pub(super) fn read<W: WideElement>(&self) -> Result<Vec<W>, String> {
        let count = self.elements();
        let mut values = try_repeat(W::default(), count)?;
        match self.steps.as_slice() {
            [down, across] if down.unsigned_abs() < across.unsigned_abs() => {
                self.read_panels(&mut values);
            }
            _ => self.read_into(&mut values),
        }
        Ok(values)
    }

    /// Reads a matrix whose rows are strided, such as a transposed one: a few columns of all rows at a time, since a
    /// whole row would load as many cache lines as it has elements, and the next row the same ones again.
    fn read_panels<W: WideElement>(&self, values: &mut [W]) {
        let columns = self.shape[1].max(1);
        for start in (0..columns).step_by(PANEL) {
            for (row, values) in values.chunks_mut(columns).enumerate() {
                let panel = values[start..].chunks_mut(PANEL).next();
                let offset = self.steps[0] * row as isize + self.steps[1] * start as isize;
                // SAFETY: elements of the view.
                unsafe {
                    let from = self.first.offset(offset);
                    W::load(self.dtype, from, self.steps[1], panel.unwrap_or_default());
                }
            }
        }
    }

    /// Reads the first `values.len()` elements in row-major order.
    pub(super) fn read_into<W: WideElement>(&self, values: &mut [W]) {
        let mut rest = values;
        walk(&self.shape, &[&self.steps], &mut |offsets, count, step| {
            let count = count.min(rest.len());
            let (row, after) = std::mem::take(&mut rest).split_at_mut(count);
            // SAFETY: elements of the view.
            unsafe { W::load(self.dtype, self.first.offset(offsets[0]), step[0], row) };
            rest = after;
        });
    }

    /// Writes elements in row-major order.
    pub(super) fn write<W: WideElement>(&self, values: &[W]) {
        let mut rest = values;
        walk(&self.shape, &[&self.steps], &mut |offsets, count, step| {
            let (row, after) = rest.split_at(count.min(rest.len()));
            // SAFETY: elements of the view.
            unsafe { W::store(self.dtype, self.first.offset(offsets[0]), step[0], row) };
            rest = after;
        });
    }

    /// Writes a number to each element, computed from its number in row-major order.
    pub(super) fn write_each<W: WideElement>(&self, number: &dyn Fn(u64) -> W) {
        let mut place = 0;
        let mut numbers = [W::default(); CHUNK];
        walk(&self.shape, &[&self.steps], &mut |offsets, count, step| {
            for start in (0..count).step_by(CHUNK) {
                let numbers = &mut numbers[..CHUNK.min(count - start)];
                for value in numbers.iter_mut() {
                    *value = number(place);
                    place += 1;
                }
                // SAFETY: elements of the view.
                unsafe {
                    let to = self.first.offset(offsets[0] + step[0] * start as isize);
                    W::store(self.dtype, to, step[0], numbers);
                }
            }
        });
    }

    /// Sets every byte of each element to 0.
    pub(super) fn clear(&self) {
        walk(&self.shape, &[&self.steps], &mut |offsets, count, step| {
            for i in 0..count as isize {
                // SAFETY: an element of the view.
                unsafe {
                    (self.first.offset(offsets[0] + step[0] * i)).write_bytes(0, self.size);
                }
            }
        });
    }

    /// Copies `from`, which has the same shape, and converts its elements.
    pub(super) fn copy_from(&self, from: &View) {
        assert_eq!(self.shape, from.shape, "a copy between two shapes");
        let steps: [&[isize]; 2] = [&from.steps, &self.steps];
        if from.dtype == self.dtype {
            walk(&self.shape, &steps, &mut |offsets, count, step| {
                // SAFETY: elements of the views, which have one shape. Those of the two are the same or apart: an input
                // that overlaps an output otherwise was copied when the views were made.
                unsafe {
                    let src = (from.first.offset(offsets[0]).cast_const(), step[0]);
                    copy_row(self.size, src, (self.first.offset(offsets[1]), step[1]), count);
                }
            });
        } else if super::number::Domain::of(from.dtype) == Some(super::number::Domain::Int) {
            map::<1, i64, i64>([from], self, &|[value]| value);
        } else {
            map::<1, f64, f64>([from], self, &|[value]| value);
        }
    }

    /// A view of one number, without axes; `bytes` holds the number and must outlive the view.
    pub(super) fn of_number(bytes: &mut [u8; 16], dtype: DType, value: Number) -> View {
        let one = View {
            first: bytes.as_mut_ptr(),
            dtype,
            size: dtype.size().unwrap_or(1),
            shape: Shape::new(),
            steps: Steps::new(),
        };
        match value {
            Number::Int(value) => one.write(&[value]),
            Number::Real(value) => one.write(&[value]),
        }
        one
    }

    /// Sets every element to one number.
    pub(super) fn fill(&self, value: Number) {
        // One element in its written form.
        let mut bytes = [0u8; 16];
        View::of_number(&mut bytes, self.dtype, value);
        let element = bytes.get(..self.size).unwrap_or_default();
        let same = element.iter().all(|&byte| byte == bytes[0]);
        walk(&self.shape, &[&self.steps], &mut |offsets, count, step| {
            // SAFETY: elements of the view, and one in `bytes`, which has room for any.
            unsafe {
                let to = self.first.offset(offsets[0]);
                if same && step[0] == self.size as isize {
                    to.write_bytes(bytes[0], self.size * count);
                } else {
                    copy_row(self.size, (bytes.as_ptr(), 0), (to, step[0]), count);
                }
            }
        });
    }

    /// Visits the places of a shape in row-major order.
    pub(super) fn places(shape: &[usize], visit: &mut dyn FnMut(&[usize]) -> Result<(), String>) -> Result<(), String> {
        if shape.contains(&0) {
            return Ok(());
        }
        let mut place = Shape::from_elem(0, shape.len());
        loop {
            visit(&place)?;
            let mut axis = shape.len();
            loop {
                if axis == 0 {
                    return Ok(());
                }
                axis -= 1;
                place[axis] += 1;
                if place[axis] < shape[axis] {
                    break;
                }
                place[axis] = 0;
            }
        }
    }
}

/// Computes an output from the elements at the same place of inputs, all of which broadcast to the output's shape.
pub(super) fn map<const N: usize, I: WideElement, O: WideElement>(
    inputs: [&View; N],
    out: &View,
    compute: &dyn Fn([I; N]) -> O,
) {
    let inputs = inputs.map(|input| input.broadcast(&out.shape));
    let mut steps: SmallVec<[&[isize]; 4]> = inputs.iter().map(|input| &*input.steps).collect();
    steps.push(&out.steps);
    let mut values = [[I::default(); CHUNK]; N];
    let mut results = [O::default(); CHUNK];
    walk(&out.shape, &steps, &mut |offsets, count, step| {
        for start in (0..count).step_by(CHUNK) {
            let count = CHUNK.min(count - start);
            let first = |view: &View, i: usize| {
                // SAFETY: an element of the view.
                unsafe { view.first.offset(offsets[i] + step[i] * start as isize) }
            };
            for (i, (input, values)) in inputs.iter().zip(&mut values).enumerate() {
                // SAFETY: elements of the view.
                unsafe { I::load(input.dtype, first(input, i), step[i], &mut values[..count]) };
            }
            for (k, result) in results[..count].iter_mut().enumerate() {
                *result = compute(std::array::from_fn(|i| values[i][k]));
            }
            // SAFETY: elements of the view.
            unsafe { O::store(out.dtype, first(out, N), step[N], &results[..count]) };
        }
    });
}

/// The views of one launch.
pub(super) struct Views {
    views: Vec<View>,
    /// Copies of inputs that share memory with outputs, for the views of these inputs.
    _copies: Vec<Vec<u8>>,
    /// The address range of each tensor, and the host's address of its start.
    places: Vec<(Range<usize>, usize)>,
    /// Addresses written by a launch that reports the parts it writes.
    parts: RefCell<Vec<Range<usize>>>,
}

impl Views {
    /// Makes the views of a launch's tensors. Inputs that share memory with an output are copied first.
    ///
    /// # Errors
    /// There is no host memory for the copies.
    ///
    /// # Safety
    ///
    /// While the views exist, the byte range of each tensor, counted from its address, is valid memory that no other
    /// thread touches.
    pub(super) unsafe fn new(
        tensors: &[Argument],
        addresses: &Addresses,
        memory: &DeviceMemory,
    ) -> Result<Self, HostMemoryExhausted> {
        let mut copies = Vec::new();
        let ranges: Vec<Range<usize>> = tensors.iter().map(|argument| range(argument, addresses)).collect();
        let shared = |own: &Range<usize>| {
            tensors
                .iter()
                .zip(&ranges)
                .any(|(argument, other)| argument.role != Role::Read && own.start < other.end && other.start < own.end)
        };
        let view = |(argument, range): (&Argument, &Range<usize>)| {
            let mut start = memory.host(range.start);
            if argument.role == Role::Read && shared(range) {
                let mut copy = try_repeat(0u8, range.len())?;
                // SAFETY: the range is valid (the caller's promise), the copy has room for it.
                unsafe { std::ptr::copy_nonoverlapping(start, copy.as_mut_ptr(), range.len()) };
                start = copy.as_mut_ptr();
                copies.push(copy);
            }
            let Some(size) = argument.desc.dtype.size() else {
                // The bytes of elements that share them.
                return Ok(View {
                    first: start,
                    dtype: DType::UInt8,
                    size: 1,
                    shape: Shape::from_slice(&[range.len()]),
                    steps: Steps::from_slice(&[1]),
                });
            };
            let shape: Shape = argument.desc.shape.iter().map(|&dim| dim as usize).collect();
            let strides = argument.desc.strides.iter();
            // A tensor without elements may have any strides, which must not be followed.
            let step = |&stride: &i64| match shape.contains(&0) {
                true => 0,
                false => (stride as isize).wrapping_mul(size as isize),
            };
            let steps: Steps = strides.map(step).collect();
            // The range begins at the lowest element, from which axes with negative strides count down.
            let below: isize = (shape.iter().zip(&steps))
                .filter(|&(&dim, &step)| dim > 0 && step < 0)
                .map(|(&dim, &step)| step.wrapping_mul(dim as isize - 1))
                .sum();
            Ok(View { first: start.wrapping_offset(-below), dtype: argument.desc.dtype, size, shape, steps })
        };
        let views = tensors.iter().zip(&ranges).map(view);
        let views = views.collect::<Result<_, HostMemoryExhausted>>()?;
        let place = |range: Range<usize>| (range.clone(), memory.host(range.start).addr());
        Ok(Views { views, _copies: copies, places: ranges.into_iter().map(place).collect(), parts: RefCell::default() })
    }

    /// Notes that some elements of an output, perhaps not all, were written.
    pub(super) fn wrote_part(&self, argument: &Argument, part: &View) {
        /// Past this number of parts, all of the output counts as written.
        const MOST: usize = 1 << 12;
        let (all, host) = &self.places[argument.index];
        let mut parts = self.parts.borrow_mut();
        walk(&part.shape, &[&part.steps], &mut |offsets, count, step| {
            let first = part.first.wrapping_offset(offsets[0].min(offsets[0] + step[0] * (count as isize - 1)));
            let start = all.start + (first.addr() - host);
            let written = start..start + step[0].unsigned_abs() * (count - 1) + part.size;
            match parts.last_mut() {
                Some(last) if last.end == written.start => last.end = written.end,
                Some(last) if last == all => {}
                _ => parts.push(written),
            }
            if parts.len() > MOST {
                parts.clear();
                parts.push(all.clone());
            }
        });
    }

    /// Reports to the sanitizer the parts that were written.
    pub(super) fn report_parts(&self) {
        for part in self.parts.borrow_mut().drain(..) {
            allocation_table::wrote(part);
        }
    }

    pub(super) fn of(&self, argument: &Argument) -> &View {
        &self.views[argument.index]
    }
}

/// Address of a tensor, 0 if there is none.
pub(super) fn address(position: TensorPosition, addresses: &Addresses) -> usize {
    let address = match position {
        TensorPosition::Input(input) => addresses.inputs.get(input),
        TensorPosition::Output(output) => addresses.outputs.get(output),
        // A second list is refused when arguments are read.
        TensorPosition::Element { element, .. } => addresses.lists.first().and_then(|list| list.get(element)),
    };
    address.copied().unwrap_or(0)
}

/// The address range of a tensor; empty for a tensor without elements.
pub(super) fn range(argument: &Argument, addresses: &Addresses) -> Range<usize> {
    let bytes = argument.desc.byte_range().unwrap_or(0..u64::MAX);
    let address_at = |bytes: u64| {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        address(argument.position, addresses).saturating_add(bytes)
    };
    address_at(bytes.start)..address_at(bytes.end)
}
