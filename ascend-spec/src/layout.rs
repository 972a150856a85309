//! `inputLayout`: the order of the axes of query, key, value, output and log-sum-exp.

use crate::{Dims, TensorDesc};
use std::fmt;
use std::ops::Range;

/// Axis order of one tensor: B batch, N heads, S rows of a sequence, D head dimension, H = N * D, T rows of all
/// sequences packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the orders themselves")]
pub enum Axes {
    Bsh,
    Bsnd,
    Bnsd,
    Nbsd,
    Tnd,
    Ntd,
}

/// Sizes of the logical axes of one tensor. Packed orders have batch 1 and all their rows in `rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the axes")]
pub struct Extents {
    pub batch: i64,
    pub heads: i64,
    pub rows: i64,
    pub dim: i64,
}

impl Axes {
    /// Number of axes.
    pub const fn rank(self) -> usize {
        match self {
            Axes::Bsh | Axes::Tnd | Axes::Ntd => 3,
            Axes::Bsnd | Axes::Bnsd | Axes::Nbsd => 4,
        }
    }

    /// Index of the axis of rows.
    pub const fn row_axis(self) -> usize {
        match self {
            Axes::Tnd => 0,
            Axes::Bsh | Axes::Bsnd | Axes::Ntd => 1,
            Axes::Bnsd | Axes::Nbsd => 2,
        }
    }

    /// Whether sequences are packed one after the other without a batch axis.
    pub const fn is_packed(self) -> bool {
        matches!(self, Axes::Tnd | Axes::Ntd)
    }

    /// The shape of a tensor with these extents; `H` saturates.
    pub fn shape(self, extents: Extents) -> Dims {
        let Extents { batch, heads, rows, dim } = extents;
        match self {
            Axes::Bsh => Dims::of([batch, rows, heads.saturating_mul(dim)]),
            Axes::Bsnd => Dims::of([batch, rows, heads, dim]),
            Axes::Bnsd => Dims::of([batch, heads, rows, dim]),
            Axes::Nbsd => Dims::of([heads, batch, rows, dim]),
            Axes::Tnd => Dims::of([rows, heads, dim]),
            Axes::Ntd => Dims::of([heads, rows, dim]),
        }
    }

    /// The extents of a tensor of this order. `heads` is needed to split `H`; the other orders carry their own count.
    /// `None` if the rank differs, or `H` does not divide by `heads`.
    pub fn extents(self, shape: &[i64], heads: i64) -> Option<Extents> {
        let extents = |batch, heads, rows, dim| Some(Extents { batch, heads, rows, dim });
        match (self, shape) {
            (Axes::Bsh, &[b, s, h]) => {
                (heads > 0 && h % heads == 0).then(|| Extents { batch: b, heads, rows: s, dim: h / heads })
            }
            (Axes::Bsnd, &[b, s, n, d]) | (Axes::Bnsd, &[b, n, s, d]) | (Axes::Nbsd, &[n, b, s, d]) => {
                extents(b, n, s, d)
            }
            (Axes::Tnd, &[t, n, d]) | (Axes::Ntd, &[n, t, d]) => extents(1, n, t, d),
            _ => None,
        }
    }

    /// The strides and the first element of the logical axes of `desc`. `dim` is the head dimension, needed to split
    /// `H`. `None` if the rank differs.
    pub fn view(self, desc: &TensorDesc, dim: i64) -> Option<View> {
        let view = |batch, head, row, dim| Some(View { offset: desc.offset, batch, head, row, dim });
        match (self, &desc.strides[..]) {
            (Axes::Bsh, &[b, s, h]) => view(b, h.saturating_mul(dim), s, h),
            (Axes::Bsnd, &[b, s, n, d]) => view(b, n, s, d),
            (Axes::Bnsd, &[b, n, s, d]) => view(b, n, s, d),
            (Axes::Nbsd, &[n, b, s, d]) => view(b, n, s, d),
            (Axes::Tnd, &[t, n, d]) => view(0, n, t, d),
            (Axes::Ntd, &[n, t, d]) => view(0, n, t, d),
            _ => None,
        }
    }
}

/// Strides, in elements, of the logical axes of one tensor, and the element where it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the axes")]
pub struct View {
    pub offset: i64,
    pub batch: i64,
    pub head: i64,
    pub row: i64,
    pub dim: i64,
}

impl View {
    /// A view whose offset and strides are all 0.
    pub(crate) const NONE: View = View { offset: 0, batch: 0, head: 0, row: 0, dim: 0 };

    /// Element index of `(batch, head, row, 0)`. Exact for every element of a tensor that fits in memory; saturates
    /// elsewhere.
    pub fn at(&self, batch: usize, head: usize, row: usize) -> i64 {
        let step = |index: usize, stride: i64| (index as i64).saturating_mul(stride);
        self.offset
            .saturating_add(step(batch, self.batch))
            .saturating_add(step(head, self.head))
            .saturating_add(step(row, self.row))
    }

    /// Element index of `(0, head, row, dim)`, as exact as [`View::at`].
    pub fn element(&self, head: usize, row: usize, dim: usize) -> i64 {
        self.at(0, head, row).saturating_add((dim as i64).saturating_mul(self.dim))
    }

    /// The view that begins `elements` later.
    pub(crate) fn moved(self, elements: i64) -> View {
        View { offset: self.offset.saturating_add(elements), ..self }
    }

    /// The view that begins at entry `batch` of the batch axis.
    pub(crate) fn of_batch(self, batch: usize) -> View {
        View { offset: self.at(batch, 0, 0), ..self }
    }

    /// The elements that a tensor of these extents touches, or `None` if it reaches below its base address or does not
    /// fit in 64 bits. Empty if an extent is 0 or less.
    pub fn elements(&self, extents: Extents) -> Option<Range<u64>> {
        let axes = [
            (extents.batch, self.batch),
            (extents.heads, self.head),
            (extents.rows, self.row),
            (extents.dim, self.dim),
        ];
        if axes.iter().any(|&(size, _)| size <= 0) {
            return Some(0..0);
        }
        let (mut first, mut last) = (self.offset, self.offset);
        for (size, stride) in axes {
            let reach = (size - 1).checked_mul(stride)?;
            if reach < 0 {
                first = first.checked_add(reach)?;
            } else {
                last = last.checked_add(reach)?;
            }
        }
        Some(u64::try_from(first).ok()?..u64::try_from(last).ok()?.checked_add(1)?)
    }
}

macro_rules! layouts {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $input:ident => $output:ident;)*) => {
        /// A value of `inputLayout`: the axis order of query, key and value, and that of the output.
        ///
        /// Source: aclnnFusedInferAttentionScore, `inputLayout`; the layouts marked so are known to newer releases
        /// only.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Layout {
            $($(#[$doc])* $variant,)*
        }

        impl Layout {
            /// Every layout.
            pub const ALL: &'static [Layout] = &[$(Layout::$variant,)*];

            /// CANN's spelling.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Layout::$variant => $name,)*
                }
            }

            /// The layout that CANN spells `name`.
            pub fn parse(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Layout::$variant),)*
                    _ => None,
                }
            }

            /// Axis order of query, key and value.
            pub const fn input(self) -> Axes {
                match self {
                    $(Layout::$variant => Axes::$input,)*
                }
            }

            /// Axis order of the output.
            pub const fn output(self) -> Axes {
                match self {
                    $(Layout::$variant => Axes::$output,)*
                }
            }
        }
    };
}

layouts! {
    /// Batch, rows, heads times head dimension.
    Bsh = "BSH", Bsh => Bsh;
    /// Batch, rows, heads, head dimension.
    Bsnd = "BSND", Bsnd => Bsnd;
    /// Batch, heads, rows, head dimension.
    Bnsd = "BNSD", Bnsd => Bnsd;
    /// BNSD in, BSND out.
    BnsdBsnd = "BNSD_BSND", Bnsd => Bsnd;
    /// Packed rows, heads, head dimension.
    Tnd = "TND", Tnd => Tnd;
    /// Heads, packed rows, head dimension in; TND out.
    NtdTnd = "NTD_TND", Ntd => Tnd;
    /// BSH in, heads first out (MLA decode).
    BshNbsd = "BSH_NBSD", Bsh => Nbsd;
    /// BSND in, heads first out (MLA decode).
    BsndNbsd = "BSND_NBSD", Bsnd => Nbsd;
    /// BNSD in, heads first out (MLA decode).
    BnsdNbsd = "BNSD_NBSD", Bnsd => Nbsd;
    /// TND in, heads first out (MLA decode).
    TndNtd = "TND_NTD", Tnd => Ntd;
    /// Heads, packed rows, head dimension (8.5 and later).
    Ntd = "NTD", Ntd => Ntd;
    /// BSH in, BNSD out (8.5 and later).
    BshBnsd = "BSH_BNSD", Bsh => Bnsd;
    /// BSND in, BNSD out (8.5 and later).
    BsndBnsd = "BSND_BNSD", Bsnd => Bnsd;
}

impl Layout {
    /// Whether sequences are packed without a batch axis, so that length arrays are cumulative.
    pub const fn is_packed(self) -> bool {
        self.input().is_packed()
    }

    /// Shape of `attentionOut`; `dim` of `of` is the value's head dimension.
    pub fn out_shape(self, extents: Extents) -> Dims {
        self.output().shape(extents)
    }

    /// Shape of `softmaxLse`: `[B, N, S, 1]`, packed `[T, N, 1]`.
    pub fn lse_shape(self, extents: Extents) -> Dims {
        if self.is_packed() {
            Dims::of([extents.rows, extents.heads, 1])
        } else {
            Dims::of([extents.batch, extents.heads, extents.rows, 1])
        }
    }

    /// Axis order of `softmaxLse`, read as a tensor with head dimension 1.
    pub const fn lse_axes(self) -> Axes {
        if self.is_packed() { Axes::Tnd } else { Axes::Bnsd }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use proptest::prelude::*;

    #[test]
    fn names_round_trip() {
        for &layout in Layout::ALL {
            assert_eq!(Layout::parse(layout.as_str()), Some(layout));
        }
        for other in ["SH", "NSD", "bsh", "", "BNSD "] {
            assert_eq!(Layout::parse(other), None);
        }
    }

    proptest! {
        #[test]
        fn extents_and_views_agree_with_shapes(
            batch in 1i64..4, heads in 1i64..4, rows in 1i64..4, dim in 1i64..4,
            axes in proptest::sample::select(vec![Axes::Bsh, Axes::Bsnd, Axes::Bnsd, Axes::Nbsd, Axes::Tnd, Axes::Ntd]),
        ) {
            let extents = Extents { batch: if axes.is_packed() { 1 } else { batch }, heads, rows, dim };
            let desc = TensorDesc::packed(DType::Float16, axes.shape(extents));
            prop_assert_eq!(desc.shape.rank(), axes.rank());
            prop_assert_eq!(axes.extents(&desc.shape, heads), Some(extents));
            let view = axes.view(&desc, dim).unwrap();
            let mut seen = std::collections::BTreeSet::new();
            for b in 0..extents.batch as usize {
                for n in 0..heads as usize {
                    for s in 0..rows as usize {
                        for d in 0..dim {
                            seen.insert(view.at(b, n, s) + d * view.dim);
                        }
                    }
                }
            }
            let count = desc.elements().unwrap();
            prop_assert_eq!(seen.len() as u64, count);
            prop_assert_eq!(view.elements(extents), Some(0..count));
            prop_assert_eq!(seen.iter().max().copied(), Some(count as i64 - 1));
        }
    }

    #[test]
    fn hidden_size_must_split() {
        assert_eq!(Axes::Bsh.extents(&[1, 2, 10], 3), None);
        assert_eq!(Axes::Bsh.extents(&[1, 2, 10], 0), None);
        assert_eq!(Axes::Bsnd.extents(&[1, 2, 10], 3), None);
    }
}
