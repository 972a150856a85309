//! FLOAT8_E8M0.

use super::{minifloat, power_of_two};

minifloat! {
    /// FLOAT8_E8M0: a power of two, 2^(code - 127), as the scale of a group of elements. Code 255 is NaN; there is no
    /// 0.
    ///
    /// ```
    /// use ascend_spec::minifloat::Float8E8M0;
    ///
    /// assert_eq!(Float8E8M0::from_bits(130).to_f32(), 8.0);
    /// assert_eq!(Float8E8M0::from_f32(0.25).to_bits(), 125);
    /// ```
    Float8E8M0, 256, decode
}

const fn decode(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        _ => power_of_two(code as i32 - 127),
    }
}

impl Float8E8M0 {
    /// The nearest power of two, and of two equally near ones the larger; NaN for a value that is not positive and
    /// finite.
    pub fn from_f32(value: f32) -> Self {
        if !(value > 0.0 && value.is_finite()) {
            return Float8E8M0(255);
        }
        // Subnormal numbers are below 2^-126: the midpoint to the smallest power is 1.5 times 2^-127.
        let middle = 1.5 * power_of_two(-127);
        let bits = value.to_bits();
        let code = match bits >> 23 {
            0 => u32::from(value >= middle),
            exponent => exponent + (bits >> 22 & 1),
        };
        Float8E8M0(code.min(254) as u8)
    }
}
