//! Shapes and sizes as callers give them.

use ascend_spec::{Dims, TensorDesc};

use crate::error::{Error, Result};

/// Sizes of a tensor's axes, as the safe layer counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    sizes: [usize; Dims::MAX_RANK],
    rank: usize,
}

impl Sizes {
    /// The sizes of a shape, none of which is negative in a tensor that exists.
    #[inline]
    pub(super) fn of(shape: &Dims) -> Self {
        let mut sizes = [0; Dims::MAX_RANK];
        for (size, dim) in sizes.iter_mut().zip(shape.iter()) {
            *size = usize::try_from(*dim).unwrap_or(0);
        }
        Self { sizes, rank: shape.rank() }
    }

    #[inline]
    pub(super) fn as_slice(&self) -> &[usize] {
        self.sizes.get(..self.rank).unwrap_or(&self.sizes)
    }
}

/// A shape as CANN takes it.
pub(super) fn dims(shape: &[usize]) -> Result<Dims> {
    let refused = || {
        Error::invalid(
            "shape",
            format_args!("{shape:?}"),
            format_args!("at most {} axes of at most i64::MAX", Dims::MAX_RANK),
        )
        .fix("merge axes, and count with i64")
    };
    let mut dims = Dims::new(&[0; Dims::MAX_RANK][..shape.len().min(Dims::MAX_RANK)])
        .filter(|_| shape.len() <= Dims::MAX_RANK)
        .ok_or_else(refused)?;
    for (axis, &dim) in shape.iter().enumerate() {
        dims = dims.with(axis, i64::try_from(dim).map_err(|_| refused())?);
    }
    Ok(dims)
}

/// Bytes of a tensor's elements when packed.
pub(super) fn bytes_of(desc: &TensorDesc) -> Result<usize> {
    desc.elements()
        .and_then(|elements| desc.dtype.bytes_for(elements))
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| {
            Error::invalid(
                "shape",
                format_args!("{} {}", desc.dtype, desc.shape),
                "elements of a fixed size that fit in memory",
            )
            .fix("choose a smaller shape")
        })
}

pub(crate) fn has_len(argument: &'static str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted {
        Ok(())
    } else {
        Err(Error::invalid(argument, format_args!("{given}"), format_args!("{wanted}, by the shape"))
            .fix("bring as many elements as the shape has"))
    }
}
