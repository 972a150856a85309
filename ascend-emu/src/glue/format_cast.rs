//! Matrices in row-major order cast to [`Format::FractalNz`] and back.

use super::argument::{Argument, Shape, refuse};
use super::call::{Work, work};
use super::stored::{AXES, Stored, cast_blocks, is_nz};
use super::view::View;
use crate::c_pointer::{hand_out, not_null_or};
use crate::descriptor::TENSORS;
use crate::runtime::context;
use crate::status::{ACLNN_NULLPTR, ACLNN_RUNTIME, Failure, Outcome, aclnn, failure};
use ascend_spec::{DType, Dims, Format, Soc, TensorDesc};
use std::ffi::c_void;
use std::fmt::Display;

/// The operator's name in messages, and that of the function that tells what a tensor is cast to.
const NAME: &str = "aclnnNpuFormatCast";
const CALCULATE: &str = "aclnnNpuFormatCastCalculateSizeAndFormat";

/// The work of copying a tensor to one of the same shape; each may be the tensor of the blocks of matrices.
pub(super) fn copied((from, from_nz): (Argument, bool), (to, to_nz): (Argument, bool)) -> Outcome<Work> {
    work(move |views| {
        let (from, to): (&View, &View) = (views.of(&from), views.of(&to));
        match (from_nz, to_nz) {
            (false, true) => {
                to.clear();
                each_block(to, from, &|block, part| block.copy_from(part))
            }
            (true, false) => each_block(from, to, &|block, part| part.copy_from(block)),
            _ => {
                to.copy_from(from);
                Ok(())
            }
        }
    })
}

/// Visits each block of matrices in FRACTAL_NZ with the part of the matrices in row-major order that it has.
fn each_block(blocks: &View, matrices: &View, visit: &dyn Fn(&View, &View)) -> Result<(), String> {
    let batch = matrices.rank() - 2;
    View::places(&matrices.shape()[..batch], &mut |places| {
        let (blocks, matrix) = (blocks.part(0, places), matrices.part(0, places));
        let (sizes, grid) = (Shape::from_slice(matrix.shape()), Shape::from_slice(blocks.shape()));
        View::places(&grid[..2], &mut |at| {
            let starts = [16 * at[1], grid[3] * at[0]];
            let [rows, columns] = [16.min(sizes[0] - starts[0]), grid[3].min(sizes[1] - starts[1])];
            let block = blocks.part(0, at).narrow(0, 0, rows).narrow(1, 0, columns);
            visit(&block, &matrix.narrow(0, starts[0], rows).narrow(1, starts[1], columns));
            Ok(())
        })
    })
}

/// The element types of a cast.
const TYPES: [DType; 8] = [
    DType::Float,
    DType::Float16,
    DType::Bf16,
    DType::Int8,
    DType::UInt8,
    DType::Int32,
    DType::UInt32,
    DType::Float8E4M3Fn,
];

/// What Ascend 950 casts to blocks: a type, that of the rows which its matrices are multiplied with, and the format.
const TO_NZ_ON_950: [(DType, DType, Format); 11] = [
    (DType::Float, DType::Float, Format::FractalNz),
    (DType::Float16, DType::Float16, Format::FractalNz),
    (DType::Bf16, DType::Bf16, Format::FractalNz),
    (DType::Int8, DType::Int8, Format::FractalNz),
    (DType::Float8E4M3Fn, DType::Float8E4M3Fn, Format::FractalNz),
    (DType::Float, DType::Float16, Format::FractalNzC0x16),
    (DType::Float, DType::Bf16, Format::FractalNzC0x16),
    (DType::Float, DType::Float8E4M3Fn, Format::FractalNzC0x32),
    (DType::Int32, DType::Float16, Format::FractalNzC0x16),
    (DType::Int32, DType::Bf16, Format::FractalNzC0x16),
    (DType::Int32, DType::Int8, Format::FractalNzC0x32),
];

fn on_950() -> bool {
    context::machine().target.soc == Soc::Ascend950
}

/// Types as messages say them.
fn names(types: impl IntoIterator<Item = DType>) -> String {
    types.into_iter().map(DType::name).collect::<Vec<_>>().join(", ")
}

/// Refuses matrices of a plain format that Ascend 950 does not cast to blocks of a format.
fn check_on_950(function: &str, name: &str, source: &TensorDesc, to: Format) -> Outcome {
    let TensorDesc { dtype, format, shape, .. } = *source;
    let refused = |value: String, allowed: &str| refuse(function, name, value, format_args!("{allowed} on Ascend 950"));
    let of_format = || TO_NZ_ON_950.iter().filter(|&&(.., format)| format == to);
    if !of_format().any(|&(of, ..)| of == dtype) {
        let mut types: Vec<_> = of_format().map(|&(of, ..)| of).collect();
        types.dedup();
        return Err(refused(format!("{dtype} to {to}"), &names(types)));
    }
    let (formats, allowed): (&[_], _) = match (to, dtype.size()) {
        (Format::FractalNz, Some(1)) => {
            (&[Format::Nd, Format::Ncl, Format::Nchw, Format::Ncdhw], "ND, NCL, NCHW and NCDHW")
        }
        (Format::FractalNz, _) => (&[Format::Nd, Format::Ncl], "ND and NCL"),
        _ => (&[Format::Nd, Format::Ncl], "two or three dimensions in ND and NCL"),
    };
    match formats.contains(&format) && (to == Format::FractalNz || shape.rank() <= 3) {
        true => Ok(()),
        false => Err(refused(format!("{dtype} of {shape} in the format {format} to {to}"), allowed)),
    }
}

/// `aclnnNpuFormatCast`: copies a tensor to one of another format.
pub(super) fn npu_format_cast(source: Stored, target: Stored) -> Outcome<Work> {
    let Stored { argument, shape, format } = source;
    if !TYPES.contains(&argument.dtype()) {
        return Err(argument.refuse(argument.dtype(), names(TYPES)));
    }
    target.argument.expect_dtype(argument.dtype())?;
    if target.shape != shape {
        return Err(target.argument.refuse(target.shape, format_args!("{shape}, srcTensor's")));
    }
    if on_950() && target.is_nz() && !source.is_nz() {
        check_on_950(NAME, argument.name, &TensorDesc { format, ..argument.desc }, target.format)?;
    }
    source.expect_blocks()?;
    target.expect_blocks()?;
    if source.is_nz() && target.is_nz() {
        // Blocks of one width are copied as they are stored.
        target.argument.expect_shape(&argument.shape())?;
    }
    copied((argument, source.is_nz()), (target.argument, target.is_nz()))
}

/// The shape in memory and the format of what a tensor is cast to.
fn size_and_format(source: *const c_void, format: i32, additional: i32) -> Outcome<(Dims, Format)> {
    const SOURCE: &str = "srcTensor";
    if source.is_null() {
        return Err(failure!(ACLNN_NULLPTR, "{CALCULATE}: {SOURCE} is null"));
    }
    let TensorDesc { shape, dtype, format: own, .. } = TENSORS.get(source)?.get().desc;
    let refused = |value: &dyn Display, allowed: &str| refuse(CALCULATE, SOURCE, value, allowed);
    let to_nz = match Format::from_acl(format) {
        Some(Format::FractalNz) if own.is_plain() => true,
        Some(Format::Nd) if is_nz(own) => false,
        _ => {
            return Err(failure!(
                ACLNN_RUNTIME,
                "{CALCULATE}: dstFormat: given {format} for a tensor in the format {own}, allowed: 29 (FRACTAL_NZ) for \
                 one in ND and its like, 2 (ND) for one in FRACTAL_NZ"
            ));
        }
    };
    if !TYPES.contains(&dtype) {
        return Err(refused(&dtype, &names(TYPES)));
    }
    let &[.., rows, _] = &shape[..] else {
        return Err(refused(&shape, AXES));
    };
    if shape.rank() > MOST_AXES {
        return Err(refused(&shape, AXES));
    }
    if !to_nz {
        // The type of the rows is not looked at.
        return Ok((shape, Format::Nd));
    }
    let rows_type = match additional {
        OWN => Some(dtype),
        _ => DType::from_acl(additional),
    };
    let known: Vec<(DType, Format)> = match on_950() {
        true => TO_NZ_ON_950.iter().filter(|(of, ..)| *of == dtype).map(|&(_, rows, to)| (rows, to)).collect(),
        false => vec![(dtype, Format::FractalNz)],
    };
    let found = known.iter().find(|(rows, _)| Some(*rows) == rows_type);
    let Some(&(_, to)) = found else {
        let given = format_args!("{additional} for {dtype}");
        let numbers = known.iter().map(|(rows, _)| format!("{} ({rows})", rows.acl())).collect::<Vec<_>>();
        return Err(refuse(
            CALCULATE,
            "additionalDtype",
            given,
            match numbers.is_empty() {
                true => "none: Ascend 950 does not cast the type to FRACTAL_NZ".to_owned(),
                false => numbers.join(", "),
            },
        ));
    };
    if on_950() {
        if shape.elements() == Some(0) {
            return Err(refused(&shape, "a tensor with elements, on Ascend 950"));
        }
        if rows == 1 && to == Format::FractalNz && dtype.size() != Some(1) {
            return Err(refused(&shape, "matrices of more than one row, on Ascend 950"));
        }
        check_on_950(CALCULATE, SOURCE, &TensorDesc { format: own, ..TensorDesc::packed(dtype, shape) }, to)?;
    }
    let blocks = cast_blocks(dtype, to, &shape).ok_or_else(|| refused(&shape, AXES))?;
    Ok((blocks, to))
}

/// `additionalDtype` that stands for the tensor's own type.
const OWN: i32 = -1;
/// Axes of a tensor that is cast; that of its blocks has two more.
const MOST_AXES: usize = Dims::MAX_RANK - 2;

/// `aclnnNpuFormatCastCalculateSizeAndFormat`: the list of sizes is the caller's to free.
///
/// # Safety
///
/// The pointers to results are null or valid for writing.
pub unsafe fn calculate(
    source: *const c_void,
    format: i32,
    additional: i32,
    sizes: *mut *mut i64,
    count: *mut u64,
    actual: *mut i32,
) -> i32 {
    aclnn(|| {
        let named = |inner: Failure| failure!(inner.code, "{CALCULATE}: {}", inner.message);
        not_null_or(ACLNN_NULLPTR, "actualFormat", actual).map_err(named)?;
        let (shape, format) = size_and_format(source, format, additional)?;
        // SAFETY: the caller's promise.
        unsafe { hand_out(&shape, ("dstShape", sizes), ("dstShapeSize", count)) }.map_err(named)?;
        // SAFETY: not null, so valid for writing by the caller's promise, at any alignment.
        unsafe { actual.write_unaligned(format.acl()) };
        Ok(())
    })
}
