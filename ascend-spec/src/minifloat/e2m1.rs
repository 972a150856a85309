//! FLOAT4_E2M1.

use super::minifloat;

minifloat! {
    /// FLOAT4_E2M1: one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. In memory two numbers share a byte: see
    /// [`pack_nibbles`](super::pack_nibbles).
    ///
    /// ```
    /// use ascend_spec::minifloat::Float4E2M1;
    ///
    /// assert_eq!(Float4E2M1::from_bits(0b1111).to_f32(), -6.0);
    /// assert_eq!(Float4E2M1::from_f32(2.4).to_f32(), 2.0);
    /// ```
    Float4E2M1, 16, decode
}

const fn decode(code: u8) -> f32 {
    let magnitude = match code & 7 {
        0 => 0.0,
        1 => 0.5,
        2 => 1.0,
        3 => 1.5,
        4 => 2.0,
        5 => 3.0,
        6 => 4.0,
        _ => 6.0,
    };
    if code < 8 { magnitude } else { -magnitude }
}

impl Float4E2M1 {
    /// The nearest value, and of two equally near ones the one whose code is even; 6 past the largest, and -0 for
    /// NaN, which the type cannot represent.
    pub fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return Float4E2M1(8);
        }
        let sign = if value.is_sign_negative() { 8 } else { 0 };
        // Midpoints between neighbouring magnitudes: a midpoint rounds up where the upper neighbour's code is even.
        let code = match value.abs() {
            0.0..=0.25 => 0,
            0.25..0.75 => 1,
            0.75..=1.25 => 2,
            1.25..1.75 => 3,
            1.75..=2.5 => 4,
            2.5..3.5 => 5,
            3.5..=5.0 => 6,
            _ => 7,
        };
        Float4E2M1(sign | code)
    }
}
