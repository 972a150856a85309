//! AVX-512.

use super::{Kernel, QUIET_BF16, Shape, Simd, Vector, WIDTH};
use core::arch::x86_64::{
    __m128, __m128i, __m256, __m256i, __m512, _CMP_UNORD_Q, _MM_FROUND_CUR_DIRECTION, _MM_FROUND_TO_NEAREST_INT,
    _mm_add_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_hadd_ps, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps_si512, _mm512_castps512_ps256,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvt_roundph_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi16,
    _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtps_ph, _mm512_extractf32x8_ps, _mm512_fmadd_ps,
    _mm512_mask_blend_ps, _mm512_mask_or_epi32, _mm512_max_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_sub_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps,
    _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
use std::mem::transmute;

/// AVX-512 F, BW, DQ and VL. A value exists only where the processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let there = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        there.then_some(Avx512(()))
    }

    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn enter<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists, so the processor has the features.
        unsafe { enter(self, kernel) }
    }
}

/// The even quarters of two registers.
const EVEN: i32 = 0x88;

/// The odd quarters of two registers.
const ODD: i32 = 0xdd;

/// The sums of both halves.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn halves(wide: __m512) -> __m256 {
    // SAFETY: the caller keeps this contract.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps::<1>(wide)) }
}

impl Simd for Avx512 {
    type Register = __m512;
    type Sum = __m512;

    const SHAPE: Shape = Shape::Wide;

    #[inline(always)]
    fn load(self, values: &Vector) -> __m512 {
        // SAFETY: both are 64 bytes of plain bits.
        unsafe { transmute::<Vector, __m512>(*values) }
    }

    #[inline(always)]
    fn store(self, register: __m512, values: &mut Vector) {
        // SAFETY: both are 64 bytes of plain bits.
        *values = unsafe { transmute::<__m512, Vector>(register) };
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn subtract(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn multiply(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn larger(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512. The instruction gives `b` where either is NaN.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn powers_of_two(self, numbers: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(numbers))) }
    }

    #[inline(always)]
    fn hide(self, x: __m512, lanes: u16) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe { _mm512_mask_blend_ps(lanes, x, _mm512_set1_ps(f32::NEG_INFINITY)) }
    }

    #[inline(always)]
    fn outline<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }

    #[inline(always)]
    fn zero_sum(self) -> __m512 {
        self.splat(0.0)
    }

    #[inline(always)]
    fn dots<const QUERIES: usize, const KEYS: usize>(
        self,
        queries: &[Vector; QUERIES],
        keys: [__m512; KEYS],
        sums: &mut [[__m512; QUERIES]; KEYS],
    ) {
        for r in 0..QUERIES {
            let query = self.load(&queries[r]);
            for j in 0..KEYS {
                sums[j][r] = self.mul_add(query, keys[j], sums[j][r]);
            }
        }
    }

    #[inline(always)]
    fn horizontal_sums_of_four(self, four: [__m512; 4]) -> [f32; 4] {
        // SAFETY: `self` exists, so the processor has AVX-512; both transmuted types are 16 bytes of plain bits.
        unsafe {
            let low = _mm256_hadd_ps(halves(four[0]), halves(four[1]));
            let high = _mm256_hadd_ps(halves(four[2]), halves(four[3]));
            let sums = _mm256_hadd_ps(low, high);
            let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            transmute::<__m128, [f32; 4]>(sums)
        }
    }

    /// Transposes like [`Avx512::transpose`], but adds columns pairwise on the way, which takes fewer instructions
    /// than four times four sums.
    #[inline(always)]
    fn horizontal_sums(self, sums: [__m512; WIDTH]) -> Vector {
        let mut fours = [self.zero_sum(); 4];
        for (four, sums) in fours.iter_mut().zip(sums.as_chunks::<4>().0) {
            // SAFETY: `self` exists, so the processor has AVX-512.
            *four = unsafe {
                let [a, b, c, d] = *sums;
                let low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
                _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)),
                )
            };
        }
        // SAFETY: `self` exists, so the processor has AVX-512.
        let halves =
            |a, b| unsafe { _mm512_add_ps(_mm512_shuffle_f32x4::<EVEN>(a, b), _mm512_shuffle_f32x4::<ODD>(a, b)) };
        let total = halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
        let mut totals = [0.0; WIDTH];
        self.store(total, &mut totals);
        totals
    }

    /// Pairs, then fours of rows within each quarter of the registers, then the quarters.
    #[inline(always)]
    fn transpose(self, rows: &[Vector; WIDTH]) -> [Vector; WIDTH] {
        let mut fours = [[self.splat(0.0); 4]; 4];
        for (g, four) in fours.iter_mut().enumerate() {
            // SAFETY: `self` exists, so the processor has AVX-512.
            *four = unsafe {
                let a = self.load(&rows[4 * g]);
                let b = self.load(&rows[4 * g + 1]);
                let c = self.load(&rows[4 * g + 2]);
                let d = self.load(&rows[4 * g + 3]);
                let low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let next_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let next_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low)),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high)),
                ]
            };
        }
        let mut columns = [[0.0; WIDTH]; WIDTH];
        for k in 0..4 {
            // SAFETY: `self` exists, so the processor has AVX-512.
            let quarters = unsafe {
                let even = _mm512_shuffle_f32x4::<EVEN>(fours[0][k], fours[1][k]);
                let odd = _mm512_shuffle_f32x4::<ODD>(fours[0][k], fours[1][k]);
                let next_even = _mm512_shuffle_f32x4::<EVEN>(fours[2][k], fours[3][k]);
                let next_odd = _mm512_shuffle_f32x4::<ODD>(fours[2][k], fours[3][k]);
                [
                    _mm512_shuffle_f32x4::<EVEN>(even, next_even),
                    _mm512_shuffle_f32x4::<EVEN>(odd, next_odd),
                    _mm512_shuffle_f32x4::<ODD>(even, next_even),
                    _mm512_shuffle_f32x4::<ODD>(odd, next_odd),
                ]
            };
            for (m, quarter) in quarters.into_iter().enumerate() {
                self.store(quarter, &mut columns[4 * m + k]);
            }
        }
        columns
    }

    #[inline(always)]
    fn widen_f16(self, bits: &[u16; WIDTH]) -> __m512 {
        // With the current rounding direction (an exact conversion needs none) the conversion may read memory itself,
        // which leaves an arithmetic unit free.
        // SAFETY: `self` exists, so the processor has AVX-512; the transmuted types are 32 bytes of plain bits.
        unsafe { _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(transmute::<[u16; WIDTH], __m256i>(*bits)) }
    }

    #[inline(always)]
    fn narrow_f16(self, register: __m512) -> [u16; WIDTH] {
        // SAFETY: `self` exists, so the processor has AVX-512; the transmuted types are 32 bytes of plain bits.
        unsafe { transmute::<__m256i, [u16; WIDTH]>(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(register)) }
    }

    #[inline(always)]
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512; the transmuted types are 32 bytes of plain bits.
        unsafe {
            let bits = transmute::<[u16; WIDTH], __m256i>(*bits);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }

    #[inline(always)]
    fn round_bf16(self, value: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            // A carry out of the mantissa raises the exponent; of a NaN it would raise the sign.
            let up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let up = _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            _mm512_mask_blend_ps(nan, _mm512_castsi512_ps(up), value)
        }
    }

    #[inline(always)]
    fn narrow_bf16(self, value: __m512) -> [u16; WIDTH] {
        let rounded = self.round_bf16(value);
        // SAFETY: `self` exists, so the processor has AVX-512; the transmuted types are 32 bytes of plain bits.
        unsafe {
            let bits = _mm512_srli_epi32::<16>(_mm512_castps_si512(rounded));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let bits = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(i32::from(QUIET_BF16)));
            transmute::<__m256i, [u16; WIDTH]>(_mm512_cvtepi32_epi16(bits))
        }
    }

    #[inline(always)]
    fn widen_i8(self, values: &[i8; WIDTH]) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512; the transmuted types are 16 bytes of plain bits.
        unsafe {
            let bytes = transmute::<[i8; WIDTH], __m128i>(*values);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        }
    }
}
