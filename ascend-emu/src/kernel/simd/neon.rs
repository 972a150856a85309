//! NEON, which every AArch64 processor has.

use super::portable::{half_to_single, single_to_half};
use super::{Kernel, Shape, Simd, Vector, WIDTH};
use core::arch::aarch64::{
    float32x4_t, vaddq_f32, vaddvq_f32, vbslq_f32, vcgtq_f32, vdupq_n_f32, vfmaq_f32, vmulq_f32, vreinterpretq_f32_s32,
    vreinterpretq_s32_f32, vshlq_n_s32, vsubq_f32,
};
use std::mem::transmute;

/// A value exists only where the processor has NEON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

/// The four registers of a vector.
type Four = [float32x4_t; 4];

/// Works on each of four registers.
#[inline(always)]
fn each(work: impl Fn(usize) -> float32x4_t) -> Four {
    [work(0), work(1), work(2), work(3)]
}

impl Simd for Neon {
    type Register = Four;
    type Sum = float32x4_t;

    const SHAPE: Shape = Shape::Six;

    #[inline(always)]
    fn load(self, values: &Vector) -> Four {
        // SAFETY: both are 64 bytes of plain bits.
        unsafe { transmute::<Vector, Four>(*values) }
    }

    #[inline(always)]
    fn store(self, register: Four, values: &mut Vector) {
        // SAFETY: both are 64 bytes of plain bits.
        *values = unsafe { transmute::<Four, Vector>(register) };
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        unsafe { [vdupq_n_f32(value); 4] }
    }

    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vaddq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn subtract(self, a: Four, b: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vsubq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn multiply(self, a: Four, b: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul_add(self, a: Four, b: Four, c: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }

    #[inline(always)]
    fn larger(self, a: Four, b: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]) })
    }

    #[inline(always)]
    fn powers_of_two(self, numbers: Four) -> Four {
        // SAFETY: `self` exists, so the processor has NEON.
        each(|i| unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(numbers[i]))) })
    }

    #[inline(always)]
    fn hide(self, x: Four, lanes: u16) -> Four {
        let mut values = [0.0; WIDTH];
        self.store(x, &mut values);
        self.load(&super::Portable.hide(values, lanes))
    }

    #[inline(never)]
    fn outline<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn zero_sum(self) -> float32x4_t {
        self.splat(0.0)[0]
    }

    #[inline(always)]
    fn dots<const QUERIES: usize, const KEYS: usize>(
        self,
        queries: &[Vector; QUERIES],
        keys: [Four; KEYS],
        sums: &mut [[float32x4_t; QUERIES]; KEYS],
    ) {
        for quarter in [0, 1, 2, 3] {
            for r in 0..QUERIES {
                let query = self.load(&queries[r])[quarter];
                for j in 0..KEYS {
                    // SAFETY: `self` exists, so the processor has NEON.
                    sums[j][r] = unsafe { vfmaq_f32(sums[j][r], query, keys[j][quarter]) };
                }
            }
        }
    }

    #[inline(always)]
    fn horizontal_sums_of_four(self, four: [float32x4_t; 4]) -> [f32; 4] {
        // SAFETY: `self` exists, so the processor has NEON.
        four.map(|sum| unsafe { vaddvq_f32(sum) })
    }

    #[inline(always)]
    fn widen_f16(self, bits: &[u16; WIDTH]) -> Four {
        let mut values = [0.0; WIDTH];
        for i in 0..WIDTH {
            values[i] = half_to_single(bits[i]);
        }
        self.load(&values)
    }

    #[inline(always)]
    fn narrow_f16(self, register: Four) -> [u16; WIDTH] {
        let mut values = [0.0; WIDTH];
        self.store(register, &mut values);
        values.map(single_to_half)
    }

    #[inline(always)]
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> Four {
        self.load(&bits.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    fn round_bf16(self, register: Four) -> Four {
        let mut values = [0.0; WIDTH];
        self.store(register, &mut values);
        let rounded = super::Portable.round_bf16(values);
        self.load(&rounded)
    }

    #[inline(always)]
    fn widen_i8(self, values: &[i8; WIDTH]) -> Four {
        self.load(&values.map(f32::from))
    }
}
