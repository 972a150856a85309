//! Portable arithmetic, compiled for the target's baseline.

use super::{Kernel, Shape, Simd, Vector, WIDTH, total};

/// The target's baseline, which every processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Portable;

/// `a * b + c`, with one rounding if that is one instruction.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for Portable {
    type Register = Vector;
    type Sum = Vector;

    const SHAPE: Shape = if cfg!(target_arch = "aarch64") { Shape::Six } else { Shape::Two };

    const IN_PLACE: bool = false;

    #[inline(always)]
    fn load(self, values: &Vector) -> Vector {
        *values
    }

    #[inline(always)]
    fn store(self, register: Vector, values: &mut Vector) {
        *values = register;
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Vector {
        [value; WIDTH]
    }

    #[inline(always)]
    fn add(self, a: Vector, b: Vector) -> Vector {
        let mut sum = [0.0; WIDTH];
        for i in 0..WIDTH {
            sum[i] = a[i] + b[i];
        }
        sum
    }

    #[inline(always)]
    fn subtract(self, a: Vector, b: Vector) -> Vector {
        let mut difference = [0.0; WIDTH];
        for i in 0..WIDTH {
            difference[i] = a[i] - b[i];
        }
        difference
    }

    #[inline(always)]
    fn larger(self, a: Vector, b: Vector) -> Vector {
        let mut larger = b;
        for i in 0..WIDTH {
            larger[i] = if a[i] > b[i] { a[i] } else { b[i] };
        }
        larger
    }

    #[inline(always)]
    fn powers_of_two(self, numbers: Vector) -> Vector {
        let mut powers = numbers;
        for power in &mut powers {
            *power = f32::from_bits(power.to_bits() << 23);
        }
        powers
    }

    #[inline(always)]
    fn hide(self, x: Vector, lanes: u16) -> Vector {
        let mut left = x;
        for (lane, left) in left.iter_mut().enumerate() {
            let hidden = lanes >> lane & 1 != 0;
            *left = if hidden { f32::NEG_INFINITY } else { *left };
        }
        left
    }

    #[inline(always)]
    fn zero_sum(self) -> Vector {
        [0.0; WIDTH]
    }

    #[inline(always)]
    fn dots<const QUERIES: usize, const KEYS: usize>(
        self,
        queries: &[Vector; QUERIES],
        keys: [Vector; KEYS],
        sums: &mut [[Vector; QUERIES]; KEYS],
    ) {
        for j in 0..KEYS {
            for r in 0..QUERIES {
                sums[j][r] = Simd::mul_add(self, queries[r], keys[j], sums[j][r]);
            }
        }
    }

    #[inline(always)]
    fn horizontal_sums_of_four(self, four: [Vector; 4]) -> [f32; 4] {
        four.map(|sum| total(&sum))
    }

    #[inline(never)]
    fn outline<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn multiply(self, a: Vector, b: Vector) -> Vector {
        let mut product = [0.0; WIDTH];
        for i in 0..WIDTH {
            product[i] = a[i] * b[i];
        }
        product
    }

    #[inline(always)]
    fn mul_add(self, a: Vector, b: Vector, c: Vector) -> Vector {
        let mut sum = [0.0; WIDTH];
        for i in 0..WIDTH {
            sum[i] = mul_add(a[i], b[i], c[i]);
        }
        sum
    }

    #[inline(always)]
    fn widen_f16(self, bits: &[u16; WIDTH]) -> Vector {
        let mut values = [0.0; WIDTH];
        for i in 0..WIDTH {
            values[i] = half_to_single(bits[i]);
        }
        values
    }

    #[inline(always)]
    fn narrow_f16(self, register: Vector) -> [u16; WIDTH] {
        let mut bits = [0; WIDTH];
        for i in 0..WIDTH {
            bits[i] = single_to_half(register[i]);
        }
        bits
    }

    #[inline(always)]
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> Vector {
        let mut values = [0.0; WIDTH];
        for i in 0..WIDTH {
            values[i] = f32::from_bits(u32::from(bits[i]) << 16);
        }
        values
    }

    #[inline(always)]
    fn round_bf16(self, register: Vector) -> Vector {
        let mut rounded = register;
        for value in &mut rounded {
            let bits = value.to_bits();
            // A carry out of the mantissa raises the exponent; of a NaN it would raise the sign.
            let up = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
            *value = if value.is_nan() { *value } else { f32::from_bits(up) };
        }
        rounded
    }

    #[inline(always)]
    fn widen_i8(self, values: &[i8; WIDTH]) -> Vector {
        let mut wide = [0.0; WIDTH];
        for i in 0..WIDTH {
            wide[i] = f32::from(values[i]);
        }
        wide
    }
}

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
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
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
