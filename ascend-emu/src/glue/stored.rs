//! Tensors as they are stored: in row-major order, or matrices in [`Format::FractalNz`].
//!
//! In that order a matrix is cut into blocks of 16 rows and `c` columns, padded with zeros, and the blocks stand below
//! each other, one column of them after the other: `[.., columns / c, rows / 16, 16, c]`. For `aclnnNpuFormatCast` `c`
//! is what 32 bytes hold, and in the formats that say so 16 or 32: of weights for products with rows of such types.

use super::argument::{Argument, refuse};
use crate::descriptor::DescribedTensor;
use crate::status::Outcome;
use ascend_spec::{DType, Dims, Format};

/// The formats of a tensor of a cast, as messages say them.
const FORMATS: &str = "ND (also NCL, NCHW, NHWC, HWCN, NCDHW, NDHWC and NC) and FRACTAL_NZ, with C0 16 or 32 too";
/// The axes of matrices, as messages say them.
pub(super) const AXES: &str = "2 to 6 dimensions";

/// A tensor of a call as it is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    /// In FRACTAL_NZ the tensor of its blocks.
    pub argument: Argument,
    /// The shape that the call gives it.
    pub shape: Dims,
    pub format: Format,
}

impl Stored {
    /// What of a described tensor is stored: its own elements, or the blocks.
    pub(super) fn memory(
        operator: &str,
        name: &str,
        tensor: DescribedTensor,
    ) -> Outcome<(DescribedTensor, Dims, Format)> {
        let DescribedTensor { mut desc, storage, .. } = tensor;
        let (shape, format) = (desc.shape, desc.format);
        if !format.is_plain() && !is_nz(format) {
            return Err(refuse(operator, name, format_args!("the format {format}"), FORMATS));
        }
        if !desc.is_contiguous() {
            return Err(refuse(operator, name, desc, "a contiguous tensor"));
        }
        if is_nz(format) {
            desc.format = Format::Nd;
            (desc.shape, desc.strides) = (storage, storage.contiguous_strides());
        }
        Ok((DescribedTensor { desc, ..tensor }, shape, format))
    }

    pub(super) fn is_nz(&self) -> bool {
        is_nz(self.format)
    }

    /// Refuses another storage than that of the blocks of the shape. Elements of more than two bytes are in blocks of
    /// 16 columns too: where what made them was an operator by its name.
    pub(super) fn expect_blocks(&self) -> Outcome {
        if !self.is_nz() {
            return Ok(());
        }
        let (given, dtype) = (self.argument.desc.shape, self.argument.dtype());
        let wanted = cast_blocks(dtype, self.format, &self.shape)
            .ok_or_else(|| self.argument.refuse(self.shape, format_args!("matrices: {AXES}")))?;
        let is_wide = self.format == Format::FractalNz && dtype.size().is_some_and(|bytes| bytes > 2);
        if given == wanted || is_wide && blocks(&self.shape, 16) == Some(given) {
            return Ok(());
        }
        let given = format_args!("{given} in memory");
        Err(self.argument.refuse(given, format_args!("{wanted}, the blocks of {}", self.shape)))
    }
}

/// The shape in memory of matrices in FRACTAL_NZ whose blocks are `across` columns wide; `None` if they are no
/// matrices.
pub(super) fn blocks(shape: &Dims, across: i64) -> Option<Dims> {
    let (&[rows, columns], batch) = shape.split_last_chunk::<2>().map(|(batch, matrix)| (matrix, batch))?;
    let up = |size: i64, unit: i64| size / unit + i64::from(size % unit > 0);
    let mut blocks = batch.to_vec();
    blocks.extend([up(columns, across), up(rows, 16), 16, across]);
    Dims::new(&blocks)
}

/// Whether matrices are stored in blocks.
pub(super) fn is_nz(format: Format) -> bool {
    matches!(format, Format::FractalNz | Format::FractalNzC0x16 | Format::FractalNzC0x32)
}

/// [`blocks`] of a format as `aclnnNpuFormatCast` makes them; `None` for a type that is not of whole bytes.
pub(super) fn cast_blocks(dtype: DType, format: Format, shape: &Dims) -> Option<Dims> {
    let across = match format {
        Format::FractalNzC0x16 => 16,
        Format::FractalNzC0x32 => 32,
        _ => 32 / i64::try_from(dtype.size()?).ok()?,
    };
    blocks(shape, across)
}
