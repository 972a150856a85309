//! AVX2 with fused multiply-add and conversion of half precision.

use super::{Kernel, QUIET_BF16, Shape, Simd, Vector, WIDTH};
use core::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_add_ps, _mm256_add_epi32, _mm256_add_ps,
    _mm256_and_si256, _mm256_blendv_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cmpeq_epi32, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_max_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packus_epi32,
    _mm256_permute2f128_ps, _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_sub_ps, _mm256_unpackhi_pd, _mm256_unpackhi_ps,
    _mm256_unpacklo_pd, _mm256_unpacklo_ps,
};
use std::mem::transmute;

/// AVX2, FMA and F16C. A value exists only where the processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let there =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        there.then_some(Avx2(()))
    }

    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists, so the processor has the features.
        unsafe { enter(self, kernel) }
    }
}

/// Sixteen numbers of two bytes, eight in each register.
#[inline(always)]
fn halves(bits: &[u16; WIDTH]) -> [__m128i; 2] {
    // SAFETY: both are 32 bytes of plain bits.
    unsafe { transmute::<[u16; WIDTH], [__m128i; 2]>(*bits) }
}

/// Eight numbers rounded to brain floating point.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn round_bf16(value: __m256) -> __m256 {
    // SAFETY: the caller keeps this contract.
    unsafe {
        let bits = _mm256_castps_si256(value);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        // A carry out of the mantissa raises the exponent; of a NaN it would raise the sign.
        let up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let up: __m256i = _mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
        _mm256_blendv_ps(_mm256_castsi256_ps(up), value, nan)
    }
}

/// The upper halves of eight numbers, of which a NaN stays one by its quiet bit.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn upper_halves(value: __m256) -> __m256i {
    // SAFETY: the caller keeps this contract.
    unsafe {
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        let quiet = _mm256_and_si256(nan, _mm256_set1_epi32(i32::from(QUIET_BF16)));
        _mm256_or_si256(_mm256_srli_epi32::<16>(_mm256_castps_si256(value)), quiet)
    }
}

// Closures would lose the target features, so work on both halves is in functions.

/// See [`Simd::powers_of_two`].
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn powers_of_two(numbers: __m256) -> __m256 {
    // SAFETY: the caller keeps this contract.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(numbers))) }
}

/// Minus infinity in the lanes whose bit of `bits` is among `lanes`.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn hide(x: __m256, lanes: __m256i, bits: __m256i) -> __m256 {
    // SAFETY: the caller keeps this contract.
    unsafe {
        let hidden = _mm256_cmpeq_epi32(_mm256_and_si256(lanes, bits), bits);
        let nothing = _mm256_set1_ps(f32::NEG_INFINITY);
        _mm256_blendv_ps(x, nothing, _mm256_castsi256_ps(hidden))
    }
}

/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn widen_bf16(half: __m128i) -> __m256 {
    // SAFETY: the caller keeps this contract.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half))) }
}

impl Simd for Avx2 {
    type Register = [__m256; 2];
    type Sum = __m256;

    const SHAPE: Shape = Shape::Six;

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
    fn add(self, a: Self::Register, b: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn subtract(self, a: Self::Register, b: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply(self, a: Self::Register, b: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has FMA.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn larger(self, a: Self::Register, b: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX. The instruction gives `b` where either is NaN.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn powers_of_two(self, numbers: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX2.
        unsafe { [powers_of_two(numbers[0]), powers_of_two(numbers[1])] }
    }

    #[inline(always)]
    fn hide(self, x: Self::Register, lanes: u16) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX2.
        unsafe {
            let lanes = _mm256_set1_epi16(lanes.cast_signed());
            let low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            [hide(x[0], lanes, low), hide(x[1], lanes, _mm256_slli_epi32::<8>(low))]
        }
    }

    #[inline(always)]
    fn outline<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }

    #[inline(always)]
    fn zero_sum(self) -> __m256 {
        self.splat(0.0)[0]
    }

    #[inline(always)]
    fn dots<const QUERIES: usize, const KEYS: usize>(
        self,
        queries: &[Vector; QUERIES],
        keys: [Self::Register; KEYS],
        sums: &mut [[__m256; QUERIES]; KEYS],
    ) {
        for half in [0, 1] {
            for r in 0..QUERIES {
                let query = self.load(&queries[r])[half];
                for j in 0..KEYS {
                    // SAFETY: `self` exists, so the processor has FMA.
                    sums[j][r] = unsafe { _mm256_fmadd_ps(query, keys[j][half], sums[j][r]) };
                }
            }
        }
    }

    #[inline(always)]
    fn horizontal_sums_of_four(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // SAFETY: `self` exists, so the processor has AVX; both transmuted types are 16 bytes of plain bits.
        unsafe {
            let sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            transmute::<core::arch::x86_64::__m128, [f32; 4]>(sums)
        }
    }

    /// Eight by eight: pairs, then fours of rows within each half of the registers, then the halves.
    #[inline(always)]
    fn transpose(self, rows: &[Vector; WIDTH]) -> [Vector; WIDTH] {
        let mut columns = [[0.0; WIDTH]; WIDTH];
        for of_columns in [0, 1] {
            let mut eights = [[self.zero_sum(); 8]; 2];
            for (of_rows, eight) in eights.iter_mut().enumerate() {
                let mut fours = [[self.zero_sum(); 4]; 2];
                for (g, four) in fours.iter_mut().enumerate() {
                    let first = 8 * of_rows + 4 * g;
                    // SAFETY: `self` exists, so the processor has AVX.
                    *four = unsafe {
                        let a = self.load(&rows[first])[of_columns];
                        let b = self.load(&rows[first + 1])[of_columns];
                        let c = self.load(&rows[first + 2])[of_columns];
                        let d = self.load(&rows[first + 3])[of_columns];
                        let low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
                        let high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
                        let next_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
                        let next_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
                        [
                            _mm256_castpd_ps(_mm256_unpacklo_pd(low, next_low)),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(low, next_low)),
                            _mm256_castpd_ps(_mm256_unpacklo_pd(high, next_high)),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(high, next_high)),
                        ]
                    };
                }
                for k in 0..4 {
                    // SAFETY: `self` exists, so the processor has AVX.
                    unsafe {
                        eight[k] = _mm256_permute2f128_ps::<0x20>(fours[0][k], fours[1][k]);
                        eight[4 + k] = _mm256_permute2f128_ps::<0x31>(fours[0][k], fours[1][k]);
                    }
                }
            }
            for k in 0..8 {
                let column = &mut columns[8 * of_columns + k];
                self.store([eights[0][k], eights[1][k]], column);
            }
        }
        columns
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
            transmute::<[__m128i; 2], [u16; WIDTH]>([_mm256_cvtps_ph::<NEAREST>(low), _mm256_cvtps_ph::<NEAREST>(high)])
        }
    }

    #[inline(always)]
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> Self::Register {
        let [low, high] = halves(bits);
        // SAFETY: `self` exists, so the processor has AVX2.
        unsafe { [widen_bf16(low), widen_bf16(high)] }
    }

    #[inline(always)]
    fn round_bf16(self, [low, high]: Self::Register) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX2.
        unsafe { [round_bf16(low), round_bf16(high)] }
    }

    #[inline(always)]
    fn narrow_bf16(self, register: Self::Register) -> [u16; WIDTH] {
        let [low, high] = self.round_bf16(register);
        // SAFETY: `self` exists, so the processor has AVX2; the transmuted types are 32 bytes of plain bits.
        unsafe {
            // Both registers are packed by their halves, which the permutation puts in order.
            let packed = _mm256_packus_epi32(upper_halves(low), upper_halves(high));
            transmute::<__m256i, [u16; WIDTH]>(_mm256_permute4x64_epi64::<0b11_01_10_00>(packed))
        }
    }

    #[inline(always)]
    fn widen_i8(self, values: &[i8; WIDTH]) -> Self::Register {
        // SAFETY: `self` exists, so the processor has AVX2; the transmuted types are 16 bytes of plain bits, of which
        // the conversion takes the first eight.
        unsafe {
            let bytes = transmute::<[i8; WIDTH], __m128i>(*values);
            let high = core::arch::x86_64::_mm_srli_si128::<8>(bytes);
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }
}
