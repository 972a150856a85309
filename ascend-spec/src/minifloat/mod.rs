//! Floating point numbers of 8 bits and fewer: the element types that Ascend 950 adds.
//!
//! | type | sign, exponent, mantissa bits | range | not finite |
//! |---|---|---|---|
//! | [`Float8E4M3Fn`] | 1, 4, 3 | 2^-9 to 448 | NaN |
//! | [`HiFloat8`] | 1, 0 to 4, 3 to 1 | 2^-22 to 2^15 | NaN, two infinities |
//! | [`Float8E8M0`] | 0, 8, 0 | 2^-127 to 2^127, no 0 | NaN |
//! | [`Float4E2M1`] | 1, 2, 1 | 0.5 to 6 | nothing |
//!
//! Decoding is a look-up in a table. Encoding rounds to the nearest value. Each type documents what the hardware does
//! past the largest value; the operator's conversions do not saturate where a type has an infinity or NaN.
//!
//! Two types of 4 bits share a byte: see [`pack_nibbles`].

mod hifloat8;

pub use hifloat8::HiFloat8;

/// Declares what all types have in common, for codes from 0 up to a largest one.
macro_rules! minifloat {
    ($(#[$doc:meta])* $name:ident, $codes:literal, $decode:path) => {
        $(#[$doc])*
        ///
        /// Equality is that of the codes.
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The value of each code.
            pub const VALUES: [f32; $codes] = {
                let mut values = [0.0; $codes];
                let mut code = 0;
                while code < $codes {
                    values[code] = $decode(code as u8);
                    code += 1;
                }
                values
            };

            /// The number with this code; bits that a code does not have are dropped.
            #[inline(always)]
            pub const fn from_bits(code: u8) -> Self {
                $name(code & ($codes - 1) as u8)
            }

            /// The number's code.
            #[inline(always)]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The number's value, exactly.
            #[inline(always)]
            pub fn to_f32(self) -> f32 {
                const VALUES: &[f32; $codes] = &$name::VALUES;
                VALUES[usize::from(self.0)]
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> f32 {
                value.to_f32()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}
use minifloat;

/// 2 to the power of `exponent`, which single precision holds.
const fn power_of_two(exponent: i32) -> f32 {
    let bits = if exponent >= -126 { ((exponent + 127) as u32) << 23 } else { 1 << (exponent + 149) };
    f32::from_bits(bits)
}

/// Codes of 4 bits as they are stored in memory: two in a byte, the first in its lower half. The upper half of the
/// last byte is 0 if the number of codes is odd.
///
/// ```
/// use ascend_spec::minifloat::{Float4E2M1, pack_nibbles};
///
/// let codes = [1.0, -0.5, 6.0].map(|value| Float4E2M1::from_f32(value).to_bits());
/// assert_eq!(pack_nibbles(&codes), [0x92, 0x07]);
/// ```
pub fn pack_nibbles(codes: &[u8]) -> Vec<u8> {
    let half = |code: Option<&u8>| code.map_or(0, |code| code & 15);
    let byte = |pair: &[u8]| half(pair.first()) | half(pair.get(1)) << 4;
    codes.chunks(2).map(byte).collect()
}

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
    Float8E8M0, 256, decode_e8m0
}

const fn decode_e8m0(code: u8) -> f32 {
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
    Float8E4M3Fn, 256, decode_e4m3
}

const fn decode_e4m3(code: u8) -> f32 {
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

minifloat! {
    /// FLOAT4_E2M1: one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. In memory two numbers share a byte: see
    /// [`pack_nibbles`].
    ///
    /// ```
    /// use ascend_spec::minifloat::Float4E2M1;
    ///
    /// assert_eq!(Float4E2M1::from_bits(0b1111).to_f32(), -6.0);
    /// assert_eq!(Float4E2M1::from_f32(2.4).to_f32(), 2.0);
    /// ```
    Float4E2M1, 16, decode_e2m1
}

const fn decode_e2m1(code: u8) -> f32 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use microfloat::{f4e2m1fn, f8e4m3fn, f8e8m0fnu};
    use proptest::prelude::*;

    fn same(one: f32, other: f32) -> bool {
        one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan()
    }

    #[test]
    fn every_code_of_e4m3_e8m0_and_e2m1_is_that_of_another_implementation() {
        for code in 0..=u8::MAX {
            let (ours, theirs) = (Float8E4M3Fn::from_bits(code), f8e4m3fn::from_bits(code));
            assert!(same(ours.to_f32(), theirs.to_f32()), "E4M3 {code:#04x}");
            let (ours, theirs) = (Float8E8M0::from_bits(code), f8e8m0fnu::from_bits(code));
            assert!(same(ours.to_f32(), theirs.to_f32()), "E8M0 {code:#04x}");
        }
        for code in 0..16 {
            let (ours, theirs) = (Float4E2M1::from_bits(code), f4e2m1fn::from_bits(code));
            assert!(same(ours.to_f32(), theirs.to_f32()), "E2M1 {code:#03x}");
        }
    }

    /// HIFLOAT8 by its definition, read bit by bit.
    fn hifloat8(code: u8) -> f64 {
        let bit = |i: u32| u32::from(code >> i & 1);
        let field = |high: u32, count: u32| (0..count).fold(0, |f, i| f << 1 | bit(high - i));
        let sign = if bit(7) == 1 { -1.0 } else { 1.0 };
        match code {
            0x00 => return 0.0,
            0x80 => return f64::NAN,
            0x6f | 0xef => return sign * f64::INFINITY,
            _ => {}
        }
        // Width of the exponent and the highest bit after the prefix.
        let (width, next) = match (bit(6), bit(5), bit(4), bit(3)) {
            (1, 1, ..) => (4, 4),
            (1, 0, ..) => (3, 4),
            (0, 1, ..) => (2, 4),
            (0, 0, 1, _) => (1, 3),
            (0, 0, 0, 1) => (0, 2),
            _ => return sign * 2f64.powi(field(2, 3) as i32 - 23),
        };
        let mut exponent = 0;
        if width > 0 {
            let magnitude = (1 << (width - 1)) + field(next - 1, width - 1) * u32::from(width > 1);
            exponent = magnitude as i32 * if bit(next) == 1 { -1 } else { 1 };
        }
        let mantissa = next + 1 - width;
        let fraction = (0..mantissa).fold(0, |f, i| f | bit(i) << i);
        sign * 2f64.powi(exponent) * (1.0 + f64::from(fraction) / f64::from(1 << mantissa))
    }

    #[test]
    fn every_code_of_hifloat8_is_what_its_definition_says() {
        for code in 0..=u8::MAX {
            let (ours, want) = (HiFloat8::from_bits(code).to_f32(), hifloat8(code));
            assert!(f64::from(ours) == want || ours.is_nan() && want.is_nan(), "{code:#04x}: {ours} is not {want}");
        }
        for (code, want) in [
            (0x01, 2f32.powi(-22)),
            (0x07, 2f32.powi(-16)),
            (0x08, 1.0),
            (0x0f, 1.875),
            (0x10, 2.0),
            (0x17, 3.75),
            (0x18, 0.5),
            (0x20, 4.0),
            (0x2f, 15.0),
            (0x30, 0.25),
            (0x3f, 0.234_375),
            (0x40, 16.0),
            (0x4f, 224.0),
            (0x50, 0.0625),
            (0x5f, 0.013_671_875),
            (0x60, 256.0),
            (0x6e, 32768.0),
            (0x70, 2f32.powi(-8)),
            (0x7e, 2f32.powi(-15)),
            (0x81, -(2f32.powi(-22))),
        ] {
            assert_eq!(HiFloat8::from_bits(code).to_f32(), want, "{code:#04x}");
        }
    }

    #[test]
    fn every_code_survives_its_value() {
        for code in 0..=u8::MAX {
            let again = |value: f32, bits: u8| value.is_nan() || bits == code;
            let value = Float8E4M3Fn::from_bits(code).to_f32();
            assert!(again(value, Float8E4M3Fn::from_f32(value).to_bits()));
            let value = HiFloat8::from_bits(code).to_f32();
            assert!(again(value, HiFloat8::from_f32(value).to_bits()));
            let value = Float8E8M0::from_bits(code).to_f32();
            assert!(again(value, Float8E8M0::from_f32(value).to_bits()));
        }
        for code in 0..16 {
            let value = Float4E2M1::from_bits(code).to_f32();
            assert_eq!(Float4E2M1::from_f32(value).to_bits(), code);
        }
    }

    /// The finite value of HIFLOAT8 nearest to a finite number, and of two equally near ones the one away from 0,
    /// found by a search over all codes.
    fn nearest_hifloat8(value: f32) -> f32 {
        let value = f64::from(value).clamp(-1e6, 1e6);
        // An infinity counts as the value that would follow the largest one.
        let number = |code| match hifloat8(code) {
            found if found.is_infinite() => found.signum() * 1.5 * 32768.0,
            found => found,
        };
        let codes = (0..=u8::MAX).filter(|&code| code != 0x80);
        let nearest = codes.min_by(|&a, &b| {
            let (a, b) = (number(a), number(b));
            let apart = (value - a).abs().total_cmp(&(value - b).abs());
            apart.then(b.abs().total_cmp(&a.abs()))
        });
        HiFloat8::from_bits(nearest.unwrap_or(0x80)).to_f32()
    }

    #[test]
    fn hifloat8_rounds_middles_away_from_zero() {
        let mut values: Vec<f32> =
            (0..=u8::MAX).map(|code| HiFloat8::from_bits(code).to_f32()).filter(|value| value.is_finite()).collect();
        values.sort_by(f32::total_cmp);
        for pair in values.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            for value in [middle.next_down(), middle, middle.next_up()] {
                let got = HiFloat8::from_f32(value).to_f32();
                assert_eq!(got, nearest_hifloat8(value), "{value}");
            }
        }
        assert_eq!(HiFloat8::from_f32(40959.0).to_f32(), 32768.0);
        assert_eq!(HiFloat8::from_f32(40960.0).to_f32(), f32::INFINITY);
        assert_eq!(HiFloat8::from_f32(-1e30).to_bits(), 0xef);
        assert_eq!(HiFloat8::from_f32(-0.0).to_bits(), 0);
        assert_eq!(HiFloat8::from_f32(f32::NAN).to_bits(), 0x80);
        assert_eq!(HiFloat8::from_f32(-f32::MIN_POSITIVE).to_bits(), 0);
    }

    #[test]
    fn what_lies_past_the_largest_value_does_not_saturate() {
        for (value, want) in [
            (448.0, 448.0),
            (463.9, 448.0),
            (464.0, 448.0),
            (464.1, f32::NAN),
            (-1e9, f32::NAN),
            (f32::INFINITY, f32::NAN),
            (f32::NAN, f32::NAN),
        ] {
            let got = Float8E4M3Fn::from_f32(value).to_f32();
            assert!(got == want || got.is_nan() && want.is_nan(), "{value}");
        }
        assert_eq!(Float4E2M1::from_f32(-1e9).to_f32(), -6.0);
        assert_eq!(Float4E2M1::from_f32(f32::NAN).to_f32().to_bits(), 1 << 31);
        for value in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            assert!(Float8E8M0::from_f32(value).to_f32().is_nan(), "{value}");
        }
        assert_eq!(Float8E8M0::from_f32(f32::MAX).to_bits(), 254);
        assert_eq!(Float8E8M0::from_f32(1e-45).to_bits(), 0);
    }

    #[test]
    fn halves_of_a_byte_are_filled_from_below() {
        assert_eq!(pack_nibbles(&[1, 2, 3]), [0x21, 0x03]);
        assert_eq!(pack_nibbles(&[0xff, 0xf0]), [0x0f]);
        assert_eq!(pack_nibbles(&[]), Vec::<u8>::new());
    }

    proptest! {
        #[test]
        fn numbers_are_rounded_as_another_implementation_does(bits: u32, small in -600f32..600.0) {
            for value in [f32::from_bits(bits), small, small / 300.0] {
                // The conversion treats this midpoint as an overflow.
                if value.abs() != 464.0 {
                    let theirs = f8e4m3fn::from_f32(value).to_f32();
                    prop_assert!(same(Float8E4M3Fn::from_f32(value).to_f32(), theirs), "{value}");
                }
                let theirs = f4e2m1fn::from_f32(value).to_f32();
                prop_assert!(same(Float4E2M1::from_f32(value).to_f32(), theirs), "{value}");
                let theirs = f8e8m0fnu::from_f32(value).to_f32();
                prop_assert!(same(Float8E8M0::from_f32(value).to_f32(), theirs), "{value}");
                if value.is_finite() {
                    prop_assert_eq!(HiFloat8::from_f32(value).to_f32(), nearest_hifloat8(value));
                }
            }
        }
    }
}
