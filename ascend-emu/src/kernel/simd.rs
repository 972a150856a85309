//! Instruction sets: the arithmetic that differs between them, and the way to run a kernel under one.
//!
//! The kernels are ordinary Rust, generic over [`Simd`] and always inlined, so that the compiler emits them anew for
//! each instruction set: [`Level::run`] enters them through a function that has the features switched on. Work on
//! single elements of a [`Vector`] is left to the compiler to vectorise. What it does not do reliably has a name here:
//! keeping accumulators in registers, fused multiply-add, conversion of half precision.

use crate::config::config;

/// Floats in one [`Vector`]: two AVX registers, four NEON ones.
pub(super) const WIDTH: usize = 16;

/// The unit in which the kernels compute and in which their buffers are laid out.
pub(super) type Vector = [f32; WIDTH];

/// Proof that an instruction set is there, and its arithmetic.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A [`Vector`] in registers.
    type Register: Copy;

    /// Sums that a kernel keeps in registers, with room for what is added to them.
    const ACCUMULATORS: usize;

    /// From memory.
    fn load(self, values: &Vector) -> Self::Register;

    /// To memory.
    fn store(self, register: Self::Register, values: &mut Vector);

    /// The same number everywhere.
    fn splat(self, value: f32) -> Self::Register;

    /// `a * b`.
    fn multiply(self, a: Self::Register, b: Self::Register) -> Self::Register;

    /// `a * b + c`, in one rounding where that is fast and in two elsewhere.
    fn mul_add(self, a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register;

    /// [`Simd::mul_add`] of single numbers.
    fn mul_add_one(self, a: f32, b: f32, c: f32) -> f32;

    /// IEEE half precision to single, exact.
    fn widen_f16(self, bits: &[u16; WIDTH]) -> Self::Register;

    /// Single precision to IEEE half, to nearest, ties to even.
    fn narrow_f16(self, register: Self::Register) -> [u16; WIDTH];

    /// Brain floating point to single, exact.
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> Self::Register;
}

/// A computation that is compiled once for each instruction set. `run` and all it calls must be `#[inline(always)]`.
pub(super) trait Kernel {
    /// What it gives.
    type Output;

    /// Computes under `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
}

impl Level {
    /// What every machine of the target has; NEON on AArch64.
    #[cfg(test)]
    pub(super) const PORTABLE: Level = Level(Set::Portable(Portable));

    /// The best that this machine has.
    pub(super) fn detect() -> Self {
        let best = Level::all().into_iter().next();
        best.unwrap_or(Level(Set::Portable(Portable)))
    }

    /// The one that the environment asks for, or else the best.
    pub(super) fn chosen() -> Self {
        config().simd.unwrap_or_else(Level::detect)
    }

    /// The one of this name, if this machine has it.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Level::all().into_iter().find(|level| level.name() == name)
    }

    /// What this machine has, the best first.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        all.extend(x86::Avx2::detect().map(|avx2| Level(Set::Avx2(avx2))));
        all.push(Level(Set::Portable(Portable)));
        all
    }

    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            Set::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
        }
    }

    /// Runs `kernel` under this instruction set.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Set::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(simd) => simd.run(kernel),
        }
    }
}

/// The target's baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Portable;

impl Simd for Portable {
    type Register = Vector;

    const ACCUMULATORS: usize = if cfg!(target_arch = "aarch64") { 6 } else { 2 };

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
            sum[i] = self.mul_add_one(a[i], b[i], c[i]);
        }
        sum
    }

    #[inline(always)]
    fn mul_add_one(self, a: f32, b: f32, c: f32) -> f32 {
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            a.mul_add(b, c)
        } else {
            a * b + c
        }
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
}

/// Exponent bias of single precision less that of half, in place.
const BIAS: u32 = 112 << 23;

/// Half to single without branches and without touching single-precision subnormals.
#[inline(always)]
fn half_to_single(bits: u16) -> f32 {
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
fn single_to_half(value: f32) -> u16 {
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, Simd, Vector, WIDTH};
    use core::arch::x86_64::{
        __m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_fmadd_ps, _mm256_mul_ps, _mm256_set1_ps,
        _mm256_slli_epi32,
    };
    use std::mem::transmute;

    /// AVX2, FMA and F16C. A value exists only where the processor has them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Avx2(());

    impl Avx2 {
        pub(super) fn detect() -> Option<Self> {
            let there = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            there.then_some(Avx2(()))
        }

        pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
                kernel.run(simd)
            }
            // SAFETY: `self` exists, so the processor has the features.
            unsafe { enter(self, kernel) }
        }
    }

    /// Bits of sixteen numbers of two bytes, eight to a register.
    #[inline(always)]
    fn halves(bits: &[u16; WIDTH]) -> [__m128i; 2] {
        // SAFETY: both are 32 bytes of plain bits.
        unsafe { transmute::<[u16; WIDTH], [__m128i; 2]>(*bits) }
    }

    impl Simd for Avx2 {
        type Register = [__m256; 2];

        const ACCUMULATORS: usize = 6;

        #[inline(always)]
        fn load(self, values: &Vector) -> Self::Register {
            // SAFETY: both are 64 bytes of plain bits.
            unsafe { transmute::<Vector, Self::Register>(*values) }
        }

        #[inline(always)]
        fn store(self, register: Self::Register, values: &mut Vector) {
            // SAFETY: both are 64 bytes of plain bits.
            *values = unsafe { transmute::<Self::Register, Vector>(register) };
        }

        #[inline(always)]
        fn splat(self, value: f32) -> Self::Register {
            // SAFETY: `self` exists, so the processor has AVX.
            unsafe { [_mm256_set1_ps(value); 2] }
        }

        #[inline(always)]
        fn multiply(self, a: Self::Register, b: Self::Register) -> Self::Register {
            // SAFETY: `self` exists, so the processor has AVX.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }

        #[inline(always)]
        fn mul_add(
            self,
            a: Self::Register,
            b: Self::Register,
            c: Self::Register,
        ) -> Self::Register {
            // SAFETY: `self` exists, so the processor has FMA.
            unsafe {
                [
                    _mm256_fmadd_ps(a[0], b[0], c[0]),
                    _mm256_fmadd_ps(a[1], b[1], c[1]),
                ]
            }
        }

        #[inline(always)]
        fn mul_add_one(self, a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }

        #[inline(always)]
        fn widen_f16(self, bits: &[u16; WIDTH]) -> Self::Register {
            let [low, high] = halves(bits);
            // SAFETY: `self` exists, so the processor has F16C.
            unsafe { [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)] }
        }

        #[inline(always)]
        fn narrow_f16(self, [low, high]: Self::Register) -> [u16; WIDTH] {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
            // SAFETY: `self` exists, so the processor has F16C; the transmuted types are 32 bytes of plain bits.
            unsafe {
                transmute::<[__m128i; 2], [u16; WIDTH]>([
                    _mm256_cvtps_ph::<NEAREST>(low),
                    _mm256_cvtps_ph::<NEAREST>(high),
                ])
            }
        }

        #[inline(always)]
        fn widen_bf16(self, bits: &[u16; WIDTH]) -> Self::Register {
            let [low, high] = halves(bits);
            // SAFETY: `self` exists, so the processor has AVX2.
            unsafe {
                let widen = |half| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
                };
                [widen(low), widen(high)]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[derive(Clone, Copy)]
    struct Widen([u16; WIDTH]);

    impl Kernel for Widen {
        type Output = Vector;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vector {
            let mut values = [0.0; WIDTH];
            simd.store(simd.widen_f16(&self.0), &mut values);
            values
        }
    }

    #[derive(Clone, Copy)]
    struct Narrow(Vector);

    impl Kernel for Narrow {
        type Output = [u16; WIDTH];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [u16; WIDTH] {
            simd.narrow_f16(simd.load(&self.0))
        }
    }

    #[test]
    fn every_half_widens_exactly() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for bits in all.as_chunks::<WIDTH>().0 {
            for level in [Level::PORTABLE, Level::detect()] {
                for (&bits, got) in bits.iter().zip(level.run(Widen(*bits))) {
                    let want = f16::from_bits(bits).to_f32();
                    assert!(
                        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{bits:#06x}: {got} is not {want} under {level:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn singles_narrow_to_nearest_even() {
        // Around every half, and around the middle between it and the next one.
        let mut values = Vec::new();
        for bits in 0..=u16::MAX {
            let at = f16::from_bits(bits).to_f32();
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            let middle = ((f64::from(at) + f64::from(next)) / 2.0) as f32;
            values.extend([
                at,
                at.next_up(),
                middle.next_down(),
                middle,
                middle.next_up(),
            ]);
        }
        values.extend([
            65519.996,
            65520.0,
            1e30,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
        ]);
        values.resize(values.len().next_multiple_of(WIDTH), 0.0);
        for values in values.as_chunks::<WIDTH>().0 {
            for level in [Level::PORTABLE, Level::detect()] {
                for (&value, got) in values.iter().zip(level.run(Narrow(*values))) {
                    let (got, want) = (f16::from_bits(got), f16::from_f32(value));
                    assert!(
                        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{value}: {got} is not {want} under {level:?}"
                    );
                }
            }
        }
    }
}
