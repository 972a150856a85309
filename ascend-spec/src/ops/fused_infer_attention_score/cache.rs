//! Axis orders of paged caches.

use std::fmt;

use crate::layout::Extents;
use crate::{DType, Dims, TensorDesc};

/// The memory layout of a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cache {
    /// `[blocks, block size, heads * dim]`.
    BnBsH,
    /// `[blocks, heads, block size, dim]`.
    BnNBsD,
    /// `[blocks, heads, dim / c, block size, c]` with `c` elements in 32 bytes.
    Nz,
}

impl Cache {
    /// The layout of a cache by its number of axes.
    pub(crate) fn of_rank(rank: usize) -> Option<Cache> {
        match rank {
            3 => Some(Cache::BnBsH),
            4 => Some(Cache::BnNBsD),
            5 => Some(Cache::Nz),
            _ => None,
        }
    }

    /// Extents of a cache: blocks, heads, tokens in a block, head dimension. `heads` is needed to split `H`; the other
    /// layouts have their own count. `None` if the rank differs, or `H` does not divide by `heads`.
    pub(crate) fn extents(self, desc: &TensorDesc, heads: i64) -> Option<Extents> {
        let shaped = |batch, heads, rows, dim| Some(Extents { batch, heads, rows, dim });
        match (self, &desc.shape[..]) {
            (Cache::BnBsH, &[bn, bs, h]) if heads > 0 && h % heads == 0 => shaped(bn, heads, bs, h / heads),
            (Cache::BnNBsD, &[bn, n, bs, d]) => shaped(bn, n, bs, d),
            (Cache::Nz, &[bn, n, d1, bs, d0]) => shaped(bn, n, bs, d1.saturating_mul(d0)),
            _ => None,
        }
    }

    /// The heads of a cache that has an axis of them.
    pub(crate) fn heads(desc: &TensorDesc) -> Option<i64> {
        match desc.shape[..] {
            [_, heads, _, _] | [_, heads, _, _, _] => Some(heads),
            _ => None,
        }
    }

    /// Shape of a cache with `heads` key heads of `dim` elements; `None` where the sizes do not fit the layout.
    ///
    /// One element of INT32 holds eight INT4, along the last axis.
    ///
    /// ```
    /// use ascend_spec::DType;
    /// use ascend_spec::ops::fused_infer_attention_score::Cache;
    ///
    /// let shape = |cache: Cache, dtype| cache.shape(dtype, 40, 16, 2, 128).unwrap().to_vec();
    /// assert_eq!(shape(Cache::BnBsH, DType::Bf16), [40, 16, 256]);
    /// assert_eq!(shape(Cache::BnNBsD, DType::Int8), [40, 2, 16, 128]);
    /// assert_eq!(shape(Cache::Nz, DType::Bf16), [40, 2, 8, 16, 16]);
    /// assert_eq!(shape(Cache::BnBsH, DType::Int32), [40, 16, 32]);
    /// ```
    pub fn shape(self, dtype: DType, blocks: i64, block_size: i64, heads: i64, dim: i64) -> Option<Dims> {
        if [blocks, block_size, heads, dim].iter().any(|&size| size < 0) {
            return None;
        }
        let dim = match dtype {
            DType::Int32 => exact(dim, 8)?,
            _ => dim,
        };
        match self {
            Cache::BnBsH => Dims::new(&[blocks, block_size, heads.checked_mul(dim)?]),
            Cache::BnNBsD => Dims::new(&[blocks, heads, block_size, dim]),
            Cache::Nz => {
                let part = 32 / i64::try_from(dtype.size()?).ok()?;
                Dims::new(&[blocks, heads, exact(dim, part)?, block_size, part])
            }
        }
    }
}

/// The quotient, if the division leaves no remainder.
fn exact(size: i64, divisor: i64) -> Option<i64> {
    (size.checked_rem(divisor)? == 0).then_some(size / divisor)
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cache::BnBsH => "BnBsH",
            Cache::BnNBsD => "BnNBsD",
            Cache::Nz => "NZ",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_back_as_they_were_made() {
        for cache in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
            for dtype in [DType::Float16, DType::Int8, DType::Int32] {
                let shape = cache.shape(dtype, 7, 32, 3, 64).unwrap();
                let read = cache.extents(&TensorDesc::packed(dtype, shape), 3).unwrap();
                let dim = if dtype == DType::Int32 { 8 } else { 64 };
                assert_eq!((read.batch, read.heads, read.rows, read.dim), (7, 3, 32, dim));
            }
        }
    }

    #[test]
    fn sizes_that_make_no_shape_make_none() {
        assert_eq!(Cache::Nz.shape(DType::Float16, 1, 16, 1, 24), None);
        assert_eq!(Cache::Nz.shape(DType::Int4, 1, 16, 1, 64), None);
        assert_eq!(Cache::Nz.shape(DType::Complex128, 1, 16, 1, 64), Dims::new(&[1, 1, 32, 16, 2]));
        assert_eq!(Cache::BnBsH.shape(DType::Int32, 1, 16, 1, 12), None);
        assert_eq!(Cache::BnBsH.shape(DType::Bf16, 1, 16, i64::MAX, 2), None);
        assert_eq!(Cache::BnNBsD.shape(DType::Bf16, -1, 16, 1, 2), None);
    }
}
