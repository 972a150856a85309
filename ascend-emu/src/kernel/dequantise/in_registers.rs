//! Dequantising a row of a head vector by vector, while it is read.

use crate::kernel::simd::{Simd, Vector};

/// Dequantises the rows of a head, vector by vector.
pub(crate) trait HeadDequantise: Copy {
    /// The dequantisation of rows without their first `i` vectors.
    fn skip_vectors(self, i: usize) -> Self;

    /// Number of vectors of a row that have scales; unlimited unless the scales are per channel.
    #[inline(always)]
    fn vectors(self) -> usize {
        usize::MAX
    }

    /// Dequantises vector `i` of a row. `of_row` is scale and offset of the row; per-channel dequantisation ignores
    /// it.
    fn dequantise<S: Simd>(self, simd: S, stored: S::Register, i: usize, of_row: (f32, f32)) -> S::Register;
}

/// Per-channel scales of a head, without offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelScales<'a>(&'a [Vector]);

impl HeadDequantise for ChannelScales<'_> {
    #[inline(always)]
    fn skip_vectors(self, i: usize) -> Self {
        ChannelScales(self.0.get(i..).unwrap_or_default())
    }

    #[inline(always)]
    fn vectors(self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn dequantise<S: Simd>(self, simd: S, stored: S::Register, i: usize, _: (f32, f32)) -> S::Register {
        simd.multiply(stored, simd.load(&self.0[i]))
    }
}

/// Per-token scales, without offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenScales;

impl HeadDequantise for TokenScales {
    #[inline(always)]
    fn skip_vectors(self, _: usize) -> Self {
        self
    }

    #[inline(always)]
    fn dequantise<S: Simd>(self, simd: S, stored: S::Register, _: usize, (scale, _): (f32, f32)) -> S::Register {
        simd.multiply(stored, simd.splat(scale))
    }
}

/// Per-channel scales and offsets of a head. If a slice is empty, the row's own scale or offset is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelOrTokenScales<'a> {
    pub(super) scales: &'a [Vector],
    pub(super) offsets: Option<&'a [Vector]>,
}

impl<'a> ChannelOrTokenScales<'a> {
    /// The per-channel scales, if there are such scales and no offsets.
    pub(crate) fn per_channel(self) -> Option<ChannelScales<'a>> {
        let plain = self.offsets.is_none() && !self.scales.is_empty();
        plain.then_some(ChannelScales(self.scales))
    }

    /// Per-token dequantisation, if scales are per token and there are no offsets.
    pub(crate) fn per_token(self) -> Option<TokenScales> {
        let plain = self.offsets.is_none() && self.scales.is_empty();
        plain.then_some(TokenScales)
    }
}

impl<'a> HeadDequantise for ChannelOrTokenScales<'a> {
    #[inline(always)]
    fn skip_vectors(self, i: usize) -> Self {
        let from = |vectors: &'a [Vector]| vectors.get(i..).unwrap_or_default();
        ChannelOrTokenScales { scales: from(self.scales), offsets: self.offsets.map(from) }
    }

    #[inline(always)]
    fn dequantise<S: Simd>(self, simd: S, stored: S::Register, i: usize, (scale, offset): (f32, f32)) -> S::Register {
        let stored = match self.offsets {
            Some(offsets) => simd.add(stored, channel_or_row(simd, offsets, i, offset)),
            None => stored,
        };
        simd.multiply(stored, channel_or_row(simd, self.scales, i, scale))
    }
}

/// Vector `i` of `channels`, or `of_row` in every lane if `channels` has no such vector.
#[inline(always)]
fn channel_or_row<S: Simd>(simd: S, channels: &[Vector], i: usize, of_row: f32) -> S::Register {
    match channels.get(i) {
        Some(channel) => simd.load(channel),
        None => simd.splat(of_row),
    }
}
