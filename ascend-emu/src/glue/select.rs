//! Operators that select or replace elements by positions, indices or masks.

use super::argument::{Argument, Shape, broadcast, common_shape, refuse};
use super::call::{Work, work, work_of_size};
use super::number::{Domain, Number, WideElement};
use super::view::{View, Views, map};
use crate::host_memory::try_with_capacity;
use crate::status::Outcome;
use ascend_spec::DType;

/// The place on an axis of a position, which counts from the end of the axis if negative.
pub(super) fn place_on(argument: &Argument, axis: usize, index: i64, size: usize) -> Result<usize, String> {
    let place = if index < 0 { index.saturating_add(size as i64) } else { index };
    usize::try_from(place)
        .ok()
        .filter(|&place| place < size)
        .ok_or_else(|| format!("{}: index {index} is out of range for axis {axis} of size {size}", argument.name))
}

/// Indices of `tensor[i, :, j]` in PyTorch: tensors of positions, each for one axis.
struct Indices {
    /// Axes that are indexed, with their positions.
    used: Vec<(usize, Argument)>,
    /// The common shape that the positions broadcast to.
    common: Shape,
    /// The first axis of `common` in the result.
    first_axis: usize,
    /// Shape of the result.
    shape: Shape,
    /// Sizes of the axes of the indexed tensor.
    own: Shape,
}

impl Indices {
    fn new(input: &Argument, indices: Vec<Argument>) -> Outcome<Self> {
        let own = input.shape();
        if indices.len() > own.len() {
            return Err(refuse(
                input.operator,
                "indices",
                format_args!("{} tensors", indices.len()),
                format_args!("one for each axis at most, of which there are {}", own.len()),
            ));
        }
        // Callers of CANN write an index of shape [0] for a whole axis.
        let used: Vec<(usize, Argument)> =
            (indices.into_iter().enumerate()).filter(|(_, index)| index.rank() != 1 || index.elements() > 0).collect();
        let mut common = Shape::new();
        for (_, index) in &used {
            index.expect_index()?;
            common = broadcast(&common, &index.shape()).ok_or_else(|| {
                index.refuse(index.desc.shape, format_args!("what broadcasts together with {common:?}"))
            })?;
        }
        let axes: Vec<usize> = used.iter().map(|&(axis, _)| axis).collect();
        // The axes of positions replace the indexed axes if these are neighbours, and come first otherwise.
        let together = axes.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let first_axis = axes.first().copied().filter(|_| together).unwrap_or(0);
        let mut shape: Shape =
            (own.iter().enumerate()).filter(|(axis, _)| !axes.contains(axis)).map(|(_, &size)| size).collect();
        shape.insert_many(first_axis, common.iter().copied());
        Ok(Indices { used, common, first_axis, shape, own })
    }

    /// Visits each selected part of the indexed tensor with its part of the result.
    fn each(
        &self,
        views: &Views,
        input: &View,
        result: &View,
        visit: &mut dyn FnMut(&View, &View),
    ) -> Result<(), String> {
        let mut positions = Vec::new();
        for (axis, index) in &self.used {
            let values = views.of(index).broadcast(&self.common).read::<i64>()?;
            let size = self.own[*axis];
            let mut places = try_with_capacity(values.len())?;
            for value in values {
                places.push(place_on(index, *axis, value, size)?);
            }
            positions.push((*axis, places));
        }
        let mut count = 0;
        View::places(&self.common, &mut |place| {
            let mut own = input.clone();
            // The last axis first, so that the numbers of the other axes stay valid.
            for (axis, places) in positions.iter().rev() {
                own = own.at(*axis, places[count]);
            }
            visit(&own, &result.part(self.first_axis, place));
            count += 1;
            Ok(())
        })
    }
}

/// Selects the parts of a tensor at given positions.
pub(super) fn index(input: Argument, indices: Vec<Argument>, out: Argument) -> Outcome<Work> {
    if out.elements() == 0 {
        // An index may really be empty here.
        return work(|_| Ok(()));
    }
    let indices = Indices::new(&input, indices)?;
    out.expect_shape(&indices.shape)?;
    out.expect_convertible(&input)?;
    work(move |views| {
        indices.each(views, views.of(&input), views.of(&out), &mut |from, to| {
            to.copy_from(from);
        })
    })
}

/// Puts values at given positions, or adds them there. If several have one position the last one stays.
pub(super) fn index_put(
    target: Argument,
    indices: Vec<Argument>,
    values: Argument,
    accumulate: bool,
    _unchecked: bool,
) -> Outcome<Work> {
    if values.elements() == 0 {
        return work(|_| Ok(()));
    }
    let indices = Indices::new(&target, indices)?;
    values.expect_broadcast(&indices.shape)?;
    target.expect_convertible(&values)?;
    let domain = if accumulate { Some(target.domain()?.with(values.domain()?)) } else { None };
    work(move |views| {
        let from = views.of(&values).broadcast(&indices.shape);
        indices.each(views, views.of(&target), &from, &mut |to, from| {
            combine(to, from, domain.map(|domain| (Reduction::Add, domain)));
            views.wrote_part(&target, to);
        })
    })
}

/// How a new element is combined with the element in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduction {
    Add,
    Multiply,
}

/// Combines the elements of a view with those of another, or replaces them.
fn combine(to: &View, from: &View, how: Option<(Reduction, Domain)>) {
    match how {
        None => to.copy_from(from),
        Some((Reduction::Add, Domain::Int)) => {
            map([to, from], to, &|[a, b]: [i64; 2]| a.wrapping_add(b));
        }
        Some((Reduction::Add, Domain::Real)) => map([to, from], to, &|[a, b]: [f64; 2]| a + b),
        Some((Reduction::Multiply, Domain::Int)) => {
            map([to, from], to, &|[a, b]: [i64; 2]| a.wrapping_mul(b));
        }
        Some((Reduction::Multiply, Domain::Real)) => {
            map([to, from], to, &|[a, b]: [f64; 2]| a * b);
        }
    }
}

/// Selects rows of a table.
pub(super) fn embedding(table: Argument, indices: Argument, out: Argument) -> Outcome<Work> {
    table.expect_rank(2)?;
    index(table, vec![indices], out)
}

/// Checks that no axis of an index is longer than that of another tensor, `free` excepted.
fn expect_within(index: &Argument, other: &Argument, free: Option<usize>) -> Outcome {
    let (own, sizes) = (index.shape(), other.shape());
    let fits = (own.iter().zip(&sizes).enumerate()).all(|(axis, (own, size))| Some(axis) == free || own <= size);
    if own.len() == sizes.len() && fits {
        return Ok(());
    }
    Err(index.refuse(index.desc.shape, format_args!("no more than {} of {}", other.desc.shape, other.name)))
}

/// Visits each place of an index, and the same place with its coordinate on `axis` replaced by the index's element.
fn each_place(
    index: &Argument,
    views: &Views,
    axis: usize,
    size: usize,
    visit: &mut dyn FnMut(&[usize], &[usize]),
) -> Result<(), String> {
    let positions = views.of(index).read::<i64>()?;
    let mut positions = positions.into_iter();
    View::places(&index.shape(), &mut |place| {
        let position = positions.next().unwrap_or(0);
        let mut other = Shape::from_slice(place);
        let named = place_on(index, axis, position, size)?;
        if let Some(size) = other.get_mut(axis) {
            *size = named;
        }
        visit(place, &other);
        Ok(())
    })
}

/// Selects elements of a tensor by their positions on one axis.
pub(super) fn gather(input: Argument, dim: i64, index: Argument, out: Argument) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    index.expect_index()?;
    out.expect_shape(&index.shape())?;
    expect_within(&index, &input, Some(axis))?;
    out.expect_convertible(&input)?;
    work(move |views| {
        let (from, to) = (views.of(&input), views.of(&out));
        let size = from.shape().get(axis).copied().unwrap_or(1);
        each_place(&index, views, axis, size, &mut |place, source| {
            to.element(place).copy_from(&from.element(source));
        })
    })
}

/// The reduction that a CANN number names.
fn reduction(argument: &Argument, reduce: i64) -> Outcome<Option<Reduction>> {
    match reduce {
        0 => Ok(None),
        1 => Ok(Some(Reduction::Add)),
        2 => Ok(Some(Reduction::Multiply)),
        _ => Err(refuse(argument.operator, "reduce", reduce, "0 (replace), 1 (add), 2 (multiply)")),
    }
}

/// Puts elements at positions of one axis of a copy of a tensor.
fn put_along(
    input: Argument,
    (dim, index): (i64, Argument),
    source: Option<Argument>,
    value: Number,
    reduce: Option<Reduction>,
    out: Argument,
) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    index.expect_index()?;
    out.expect_shape(&input.shape())?;
    out.expect_dtype(input.dtype())?;
    let domain = out.domain()?;
    expect_within(&index, &input, Some(axis))?;
    if let Some(source) = &source {
        source.domain()?;
        expect_within(&index, source, None)?;
    }
    let how = reduce.map(|reduce| (reduce, domain));
    work(move |views| {
        let to = views.of(&out);
        if input.index != out.index {
            to.copy_from(views.of(&input));
        }
        let size = to.shape().get(axis).copied().unwrap_or(1);
        let mut fixed = [0u8; 16];
        let fixed = View::of_number(&mut fixed, out.dtype(), value);
        each_place(&index, views, axis, size, &mut |place, target| {
            let from = match &source {
                Some(source) => views.of(source).element(place),
                None => fixed.clone(),
            };
            combine(&to.element(target), &from, how);
        })
    })
}

/// Puts elements of a tensor at positions of one axis.
pub(super) fn scatter(
    input: Argument,
    dim: i64,
    index: Argument,
    source: Argument,
    reduce: i64,
    out: Argument,
) -> Outcome<Work> {
    let reduce = reduction(&out, reduce)?;
    put_along(input, (dim, index), Some(source), Number::Int(0), reduce, out)
}

/// Adds elements of a tensor at positions of one axis.
pub(super) fn scatter_add(
    input: Argument,
    dim: i64,
    index: Argument,
    source: Argument,
    out: Argument,
) -> Outcome<Work> {
    scatter(input, dim, index, source, 1, out)
}

/// Puts a number at positions of one axis.
pub(super) fn scatter_value(
    input: Argument,
    dim: i64,
    index: Argument,
    value: Number,
    reduce: i64,
    out: Argument,
) -> Outcome<Work> {
    let reduce = reduction(&out, reduce)?;
    put_along(input, (dim, index), None, value, reduce, out)
}

/// Selects the elements where a mask is set. The output holds all; phase two sets its shape to their number.
pub(super) fn masked_select(input: Argument, mask: Argument, out: Argument) -> Outcome<Work> {
    let shape = common_shape(&[input, mask])?;
    out.expect_shape(&[shape.iter().product()])?;
    out.expect_dtype(input.dtype())?;
    let domain = input.domain()?;
    mask.domain()?;
    fn chosen<W: WideElement>(input: &View, mask: &View, out: &View) -> Result<usize, String> {
        let (mut chosen, mask) = (input.read::<W>()?, mask.read::<f64>()?);
        let mut mask = mask.into_iter();
        chosen.retain(|_| mask.next().is_some_and(|mask| mask != 0.0));
        out.narrow(0, 0, chosen.len()).write(&chosen);
        Ok(chosen.len())
    }
    work_of_size(&out, move |views| {
        let whole = |argument: &Argument| views.of(argument).broadcast(&shape);
        let (input, mask, out) = (whole(&input), whole(&mask), views.of(&out));
        let count = match domain {
            Domain::Int => chosen::<i64>(&input, &mask, out)?,
            Domain::Real => chosen::<f64>(&input, &mask, out)?,
        };
        Ok(vec![count as i64])
    })
}

/// Finds the places of the elements that are not 0, each as a row or as a column. The output holds all; phase two
/// sets its shape to their number.
pub(super) fn nonzero(rows: bool) -> impl Fn(Argument, Argument) -> Outcome<Work> {
    move |input, out| {
        let (rank, most) = (input.rank(), input.elements());
        out.expect_shape(&if rows { [most, rank] } else { [rank, most] })?;
        out.expect_dtype(DType::Int64)?;
        if !out.desc.is_contiguous() {
            return Err(out.refuse(out.desc, "a contiguous tensor"));
        }
        input.domain()?;
        work_of_size(&out, move |views| {
            let from = views.of(&input);
            let values = from.read::<f64>()?;
            let count = values.iter().filter(|&&value| value != 0.0).count();
            let mut places = try_with_capacity(count.saturating_mul(rank))?;
            let mut values = values.into_iter();
            View::places(from.shape(), &mut |place| {
                if values.next() != Some(0.0) {
                    places.extend(place.iter().map(|&index| index as i64));
                }
                Ok(())
            })?;
            let (shape, to) = if rows {
                let shape = [count, rank];
                (shape, views.of(&out).packed(&shape))
            } else {
                let shape = [rank, count];
                (shape, views.of(&out).packed(&shape).permute(&[1, 0]))
            };
            to.write(&places);
            Ok(shape.map(|size| size as i64).to_vec())
        })
    }
}
