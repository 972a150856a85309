//! Products with quantised weights.

use super::argument::{Argument, refuse};
use super::call::{Work, work};
use super::matmul::product_of;
use super::number::rounded;
use super::reduce::expect_real;
use super::view::Views;
use crate::host_memory::try_with_capacity;
use crate::status::Outcome;
use ascend_spec::DType;

/// Which elements of a weight have a scale in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Granularity {
    Tensor,
    Column,
    /// So many rows of a column.
    Group(usize),
}

impl Granularity {
    /// Checks the group size and the shape of the scales of a weight.
    fn new(scales: &Argument, group: i32, [rows, columns]: [usize; 2]) -> Outcome<Self> {
        let shape = scales.shape();
        let (found, allowed) = match usize::try_from(group).ok() {
            Some(0) => (
                match shape.as_slice() {
                    [1] | [1, 1] => Some(Granularity::Tensor),
                    [own] | [1, own] if *own == columns => Some(Granularity::Column),
                    _ => None,
                },
                format!("[1], [{columns}], [1, {columns}]"),
            ),
            Some(size) if size.is_multiple_of(32) && size < rows => {
                let groups = rows.div_ceil(size);
                let found = (shape.as_slice() == [groups, columns]).then_some(Granularity::Group(size));
                (found, format!("[{groups}, {columns}]"))
            }
            _ => {
                let allowed = format_args!("0, or a multiple of 32 that is less than {rows}");
                return Err(refuse(scales.operator, "antiquantGroupSize", group, allowed));
            }
        };
        found.ok_or_else(|| scales.refuse(scales.desc.shape, allowed))
    }

    /// The number of the scale of an element.
    fn of(self, row: usize, column: usize, columns: usize) -> usize {
        match self {
            Granularity::Tensor => 0,
            Granularity::Column => column,
            Granularity::Group(size) => row / size * columns + column,
        }
    }
}

/// The elements of a weight in row-major order.
fn codes(views: &Views, weight: &Argument) -> Result<Vec<f64>, String> {
    let view = views.of(weight);
    if weight.dtype() != DType::Int4 {
        return view.read::<f64>();
    }
    let bytes = view.read::<i64>()?;
    let desc = &weight.desc;
    // The view begins with the byte of the lowest element.
    let first = desc.byte_range().map_or(0, |range| range.start as i64 * 2);
    let mut codes = try_with_capacity(weight.elements())?;
    for row in 0..desc.shape[0] {
        for column in 0..desc.shape[1] {
            let place = desc.offset + row * desc.strides[0] + column * desc.strides[1] - first;
            let byte = usize::try_from(place / 2).ok().and_then(|place| bytes.get(place));
            // The first of two elements is in the low half of their byte.
            let code = byte.map_or(0, |byte| byte >> (place % 2 * 4) & 15);
            codes.push((if code > 7 { code - 16 } else { code }) as f64);
        }
    }
    Ok(codes)
}

/// Multiplies a matrix by a weight of integers, to which offsets are added before they are multiplied by scales, and
/// adds a bias.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn multiply_dequantised(
    x: Argument,
    weight: Argument,
    scales: Argument,
    offsets: Option<Argument>,
    out_scale: Option<Argument>,
    out_offset: Option<Argument>,
    bias: Option<Argument>,
    group: i32,
    out: Argument,
) -> Outcome<Work> {
    if let Some(given) = [out_scale, out_offset].iter().flatten().next() {
        let allowed = "null: results are not quantised by the emulation";
        return Err(given.refuse(given.desc, allowed));
    }
    if !matches!(x.dtype(), DType::Float16 | DType::Bf16) {
        return Err(x.refuse(x.dtype(), "FLOAT16, BF16"));
    }
    if !matches!(weight.dtype(), DType::Int8 | DType::Int4) {
        return Err(weight.refuse(weight.dtype(), "INT8, INT4"));
    }
    x.expect_rank(2)?;
    weight.expect_rank(2)?;
    let (own, of_weight) = (x.shape(), weight.shape());
    let (rows, inner, columns) = (own[0], own[1], of_weight[1]);
    if of_weight[0] != inner {
        let allowed = format_args!("{inner} rows, the columns of {}", x.desc.shape);
        return Err(weight.refuse(weight.desc.shape, allowed));
    }
    for tensor in [x, weight] {
        if tensor.elements() == 0 {
            return Err(tensor.refuse(tensor.desc.shape, "at least one element"));
        }
    }
    let granularity = Granularity::new(&scales, group, [inner, columns])?;
    scales.expect_dtype(x.dtype())?;
    if let Some(offsets) = &offsets {
        offsets.expect_shape(&scales.shape())?;
        offsets.expect_dtype(x.dtype())?;
    }
    if let Some(bias) = &bias {
        if bias.shape().as_slice() != [1, columns] {
            bias.expect_shape(&[columns])?;
        }
        expect_real(bias)?;
    }
    out.expect_shape(&[rows, columns])?;
    out.expect_dtype(x.dtype())?;
    work(move |views| {
        let mut factors = codes(views, &weight)?;
        let read = |argument: &Option<Argument>| {
            let tensor = argument.as_ref().map(|argument| views.of(argument).read::<f64>());
            tensor.transpose()
        };
        let scales = views.of(&scales).read::<f64>()?;
        let (offsets, bias) = (read(&offsets)?, read(&bias)?);
        for (row, line) in factors.chunks_mut(columns).enumerate() {
            for (column, factor) in line.iter_mut().enumerate() {
                let number = granularity.of(row, column, columns);
                let offset = offsets.as_ref().map_or(0.0, |offsets| offsets[number]);
                *factor = rounded((*factor + offset) * scales[number], x.dtype());
            }
        }
        let left = views.of(&x).read::<f64>()?;
        let mut product = product_of([rows, inner, columns], &left, &factors)?;
        if let Some(bias) = &bias {
            for line in product.chunks_mut(columns) {
                line.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
        }
        views.of(&out).write(&product);
        Ok(())
    })
}
