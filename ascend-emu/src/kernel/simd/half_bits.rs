//! Half precision in whole-number arithmetic, where no instruction converts it.

/// Exponent bias of single precision less that of half, in place.
const BIAS: u32 = 112 << 23;

/// Half to single without branches and without touching single-precision subnormals.
#[inline(always)]
pub(super) fn half_to_single(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // A subnormal half is m * 2^-24: put m into the mantissa of 2^-14 and take 2^-14 away.
    let subnormal = f32::from_bits(magnitude + BIAS + (1 << 23)) - f32::from_bits(BIAS + (1 << 23));
    let value = if magnitude < 0x0080_0000 {
        subnormal.to_bits()
    } else if magnitude < 0x0f80_0000 {
        magnitude + BIAS
    } else {
        magnitude | 0x7f80_0000
    };
    f32::from_bits(value | sign)
}

/// Single to half, to nearest with ties to even, without branches.
#[inline(always)]
pub(super) fn single_to_half(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Below 2^-14 the unit of a half is 2^-24, which is that of a single in [0.5, 1): the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    // A carry out of the mantissa raises the exponent, past the largest half to infinity.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub(BIAS) >> 13;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | ((magnitude >> 13) & 0x3ff)
    } else if magnitude >= 0x4780_0000 {
        0x7c00
    } else if magnitude < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    (sign | half) as u16
}
