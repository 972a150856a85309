//! FLOAT8_E4M3FN.

use super::{minifloat, power_of_two};

minifloat! {
    /// FLOAT8_E4M3FN: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; exponent 0 counts in steps of 2^-9.
    /// Codes 0x7F and 0xFF are NaN; there are no infinities.
    ///
    /// ```
    /// use ascend_spec::minifloat::Float8E4M3Fn;
    ///
    /// assert_eq!(Float8E4M3Fn::from_bits(0x7e).to_f32(), 448.0);
    /// assert_eq!(Float8E4M3Fn::from_f32(0.3).to_f32(), 0.3125);
    /// ```
    Float8E4M3Fn, 256, decode
}

const fn decode(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (code >> 3 & 15, code & 7);
    match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa as f32 * power_of_two(-9),
        _ => sign * (8 + mantissa) as f32 * power_of_two(exponent as i32 - 10),
    }
}

impl Float8E4M3Fn {
    /// The nearest value, and of two equally near ones the one whose code is even. Above 464, the midpoint between
    /// the largest value and the one that would follow it, NaN; this is what the hardware's conversion is declared to
    /// do, not what was observed.
    pub fn from_f32(value: f32) -> Self {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = value.abs();
        if magnitude.is_nan() || magnitude > 464.0 {
            return Float8E4M3Fn(sign | 0x7f);
        }
        // The exponent of the number, or that of the smallest normal one.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
        let steps = (magnitude / power_of_two(exponent - 3)).round_ties_even() as u8;
        // For normal numbers, 8 is the hidden bit; a mantissa that is carried adds to the exponent.
        let code = ((exponent + 6) as u8) << 3;
        Float8E4M3Fn(sign | (code + steps))
    }
}
