//! HIFLOAT8.

use super::{minifloat, power_of_two};

minifloat! {
    /// HIFLOAT8: a sign, a prefix that states how many bits the exponent has, exponent and mantissa. The closer to 1,
    /// the more bits are left to the mantissa.
    ///
    /// | bits 6 to 0 | exponent E | value |
    /// |---|---|---|
    /// | `11eeeem` | 8 to 15, -15 to -8 | 2^E (1 + m/2) |
    /// | `10eeemm` | 4 to 7, -7 to -4 | 2^E (1 + m/4) |
    /// | `01eemmm` | 2, 3, -3, -2 | 2^E (1 + m/8) |
    /// | `001emmm` | 1, -1 | 2^E (1 + m/8) |
    /// | `0001mmm` | 0 | 1 + m/8 |
    /// | `0000mmm` | | 2^(m - 23), and 0 for m = 0 |
    ///
    /// The first bit of an exponent is its sign. Code 0x80 is NaN, so that there is no negative zero; 0x6F and 0xEF
    /// are the infinities.
    ///
    /// ```
    /// use ascend_spec::minifloat::HiFloat8;
    ///
    /// assert_eq!(HiFloat8::from_bits(0x6e).to_f32(), 32768.0);
    /// assert_eq!(HiFloat8::from_f32(0.3).to_f32(), 0.3125);
    /// ```
    HiFloat8, 256, decode
}

const fn decode(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let rest = code & 0x7f;
    let (width, mantissa_bits) = match rest {
        0 if code == 0 => return 0.0,
        0 => return f32::NAN,
        0x6f => return sign * f32::INFINITY,
        1..=0x07 => return sign * power_of_two(rest as i32 - 23),
        0x08..=0x0f => (0, 3),
        0x10..=0x1f => (1, 3),
        0x20..=0x3f => (2, 3),
        0x40..=0x5f => (3, 2),
        _ => (4, 1),
    };
    let mantissa = rest & ((1 << mantissa_bits) - 1);
    let exponent = if width == 0 {
        0
    } else {
        // The exponent's highest bit is always set and not stored; the sign is stored in its place.
        let highest = 1 << (width - 1);
        let field = rest >> mantissa_bits & (2 * highest - 1);
        let magnitude = (field | highest) as i32;
        if field & highest == 0 { magnitude } else { -magnitude }
    };
    let significand = ((1 << mantissa_bits) + mantissa) as f32;
    sign * significand * power_of_two(exponent - mantissa_bits)
}

impl HiFloat8 {
    /// The nearest value, and of two equally near ones the one away from 0; an infinity from 40960 on.
    ///
    /// The hardware's own conversion is a hybrid, whose rounding of numbers below 2^-4 and from 16 on also depends on
    /// their lower bits; it differs from this by at most a step there.
    pub fn from_f32(value: f32) -> Self {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = value.abs();
        if magnitude.is_nan() {
            return HiFloat8(0x80);
        }
        if magnitude < power_of_two(-23) {
            return HiFloat8(0);
        }
        if magnitude < power_of_two(-22) {
            return HiFloat8(sign | 1);
        }
        let exponent = |bits: u32| (bits >> 23) as i32 - 127;
        let mantissa_bits = |exponent: i32| match exponent.unsigned_abs() {
            0..=3 => 3,
            4..=7 => 2,
            8..=15 => 1,
            _ => 0,
        };
        // Half a step, added to the bits, is carried into the exponent if necessary: the mantissa is then 0.
        let bits = magnitude.to_bits();
        let step = 23 - mantissa_bits(exponent(bits));
        let rounded = bits.saturating_add(1 << (step - 1));
        let exponent = exponent(rounded);
        let mantissa_bits = mantissa_bits(exponent);
        let mantissa = (rounded >> step << step >> (23 - mantissa_bits)) as u8;
        let mantissa = mantissa & ((1 << mantissa_bits) - 1);
        if exponent > 15 || (exponent == 15 && mantissa == 1) {
            return HiFloat8(sign | 0x6f);
        }
        let distance = exponent.unsigned_abs() as u8;
        let negative = u8::from(exponent < 0);
        let code = match distance {
            0 => 0x08 | mantissa,
            1 => 0x10 | negative << 3 | mantissa,
            2..=3 => 0x20 | negative << 4 | (distance - 2) << 3 | mantissa,
            4..=7 => 0x40 | negative << 4 | (distance - 4) << 2 | mantissa,
            8..=15 => 0x60 | negative << 4 | (distance - 8) << 1 | mantissa,
            _ => 23 - distance,
        };
        HiFloat8(sign | code)
    }
}
