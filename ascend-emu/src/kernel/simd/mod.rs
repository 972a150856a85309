//! Instruction sets: the arithmetic that differs between them, and how to run a kernel with one of them.
//!
//! The kernels are ordinary Rust, generic over [`Simd`] and always inlined, so that the compiler emits them once for
//! each instruction set: [`Level::run`] enters them through a function with the features enabled. The operations of
//! inner loops are methods of [`Simd`]; rare work on single elements of a [`Vector`] is left to the compiler to
//! vectorise.
//!
//! | name | needs | registers of a [`Vector`] | register tile of a product |
//! |---|---|---|---|
//! | `avx512` | AVX-512 F, BW, DQ, VL | 1 of 32 | 8 x 3, 6 x 4, 16 x 1 |
//! | `avx2` | AVX2, FMA, F16C | 2 of 16 | 6 x 1, 4 x 1 |
//! | `neon` | AArch64 | 4 of 32 | 6 x 1, 4 x 1 |
//! | `portable` | nothing | what the target has | 2 x 1 |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(super) use portable::Portable;
use std::env;
use std::sync::OnceLock;

/// Number of floats in a [`Vector`]: one AVX-512 register, two AVX registers, four NEON registers.
pub(super) const WIDTH: usize = 16;

/// The highest bit of the mantissa in brain floating point, which makes a NaN a quiet one.
const QUIET_BF16: u16 = 0x40;

/// A vector of floats, the unit of the kernels and of their buffers.
pub(super) type Vector = [f32; WIDTH];

/// The register tile of a product: how many sums it keeps in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Two vectors.
    Two,
    /// At most six vectors: six rows by one, or four.
    Six,
    /// At most twenty-four vectors: eight rows by three, six by four, or sixteen by one.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no other target has so many registers"))]
    Wide,
}

impl Shape {
    /// A number of rows that every shape divides into whole steps.
    pub(super) const ROWS: usize = 24;
}

/// The arithmetic of an instruction set. A value proves that the processor has it.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A [`Vector`] in registers.
    type Register: Copy;

    /// The partial sums of a dot product, one in each lane of a register.
    type Sum: Copy;

    /// The register tile that fits its registers.
    const SHAPE: Shape;

    /// Whether the decode kernel reads keys and values in place. The kernels for it, one for each element type, take
    /// long to compile, so the portable baseline, which hardly any machine uses, loads the rows instead.
    const IN_PLACE: bool = true;

    /// Loads a vector.
    fn load(self, values: &Vector) -> Self::Register;

    /// Stores a vector.
    fn store(self, register: Self::Register, values: &mut Vector);

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::Register;

    /// `a + b`.
    fn add(self, a: Self::Register, b: Self::Register) -> Self::Register;

    /// `a - b`.
    fn subtract(self, a: Self::Register, b: Self::Register) -> Self::Register;

    /// `a * b`.
    fn multiply(self, a: Self::Register, b: Self::Register) -> Self::Register;

    /// `a * b + c`, with one rounding where that is fast and two elsewhere.
    fn mul_add(self, a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register;

    /// `a` in the lanes where it is larger than `b`, otherwise `b`; a lane where `a` is NaN gets `b`.
    fn larger(self, a: Self::Register, b: Self::Register) -> Self::Register;

    /// Powers of two, from their biased exponents in the low bits of each lane. The other bits are ignored.
    fn powers_of_two(self, numbers: Self::Register) -> Self::Register;

    /// Minus infinity in the lanes whose bit is set, `x` in the others.
    fn hide(self, x: Self::Register, lanes: u16) -> Self::Register;

    /// Runs `kernel` in a function of its own, so that it is compiled once for all callers.
    fn outline<K: Kernel>(self, kernel: K) -> K::Output;

    /// Partial sums of zero.
    fn zero_sum(self) -> Self::Sum;

    /// Adds the products of each key with each query to their partial sums. Where a vector takes several registers,
    /// all of them are added to the same partial sums, which leaves registers for more keys.
    fn dots<const QUERIES: usize, const KEYS: usize>(
        self,
        queries: &[Vector; QUERIES],
        keys: [Self::Register; KEYS],
        sums: &mut [[Self::Sum; QUERIES]; KEYS],
    );

    /// Adds up the lanes of four partial sums.
    fn horizontal_sums_of_four(self, four: [Self::Sum; 4]) -> [f32; 4];

    /// Adds up the lanes of sixteen partial sums.
    #[inline(always)]
    fn horizontal_sums(self, sums: [Self::Sum; WIDTH]) -> Vector {
        let mut totals = [0.0; WIDTH];
        let (fours, _) = sums.as_chunks::<4>();
        for (totals, four) in totals.as_chunks_mut::<4>().0.iter_mut().zip(fours) {
            *totals = self.horizontal_sums_of_four(*four);
        }
        totals
    }

    /// Transposes 16 rows.
    #[inline(always)]
    fn transpose(self, rows: &[Vector; WIDTH]) -> [Vector; WIDTH] {
        let mut columns = [[0.0; WIDTH]; WIDTH];
        for (r, row) in rows.iter().enumerate() {
            for (c, &value) in row.iter().enumerate() {
                columns[c][r] = value;
            }
        }
        columns
    }

    /// IEEE half precision to single, exact.
    fn widen_f16(self, bits: &[u16; WIDTH]) -> Self::Register;

    /// Single precision to IEEE half, to nearest, ties to even.
    fn narrow_f16(self, register: Self::Register) -> [u16; WIDTH];

    /// Brain floating point to single, exact.
    fn widen_bf16(self, bits: &[u16; WIDTH]) -> Self::Register;

    /// The nearest value that brain floating point holds, ties to even.
    fn round_bf16(self, register: Self::Register) -> Self::Register;

    /// Single precision to brain floating point, to the nearest, ties to even.
    #[inline(always)]
    fn narrow_bf16(self, register: Self::Register) -> [u16; WIDTH] {
        let mut values = [0.0; WIDTH];
        self.store(self.round_bf16(register), &mut values);
        values.map(|value: f32| {
            // The quiet bit keeps a NaN a NaN without its lower half.
            let quiet = if value.is_nan() { QUIET_BF16 } else { 0 };
            (value.to_bits() >> 16) as u16 | quiet
        })
    }

    /// Integers to single precision, exact.
    fn widen_i8(self, values: &[i8; WIDTH]) -> Self::Register;
}

/// Adds up the lanes of a vector, pairwise by halves.
#[inline(always)]
pub(super) fn total(v: &Vector) -> f32 {
    let mut eight = [0.0; 8];
    for i in 0..8 {
        eight[i] = v[i] + v[i + 8];
    }
    let mut four = [0.0; 4];
    for i in 0..4 {
        four[i] = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Whether every lane is zero. A sum of products with zero is, unless a factor was infinite or NaN.
#[inline(always)]
pub(super) fn all_zero<S: Simd>(simd: S, register: S::Register) -> bool {
    let mut values = [0.0; WIDTH];
    simd.store(register, &mut values);
    values.iter().all(|value| *value == 0.0)
}

/// Whether no element is infinite or NaN.
#[inline(always)]
pub(super) fn all_finite<S: Simd>(simd: S, vectors: &[Vector]) -> bool {
    let mut nonfinite = simd.splat(0.0);
    for vector in vectors {
        nonfinite = simd.mul_add(simd.load(vector), simd.splat(0.0), nonfinite);
    }
    all_zero(simd, nonfinite)
}

/// A computation that is compiled once for each instruction set. `run` and all it calls must be `#[inline(always)]`.
pub(super) trait Kernel {
    /// The result.
    type Output;

    /// Computes the result with the arithmetic of `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
}

#[cfg(test)]
thread_local! {
    /// The instruction set that a test tries on the thread.
    static TRIED: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

impl Level {
    /// The best instruction set of this machine.
    pub(super) fn detect() -> Self {
        let best = Level::all().into_iter().next();
        best.unwrap_or(Level(Set::Portable(Portable)))
    }

    /// The environment variable that selects an instruction set by name.
    pub(crate) const VARIABLE: &str = "ASCEND_EMU_SIMD";

    /// The instruction set that the environment selects, if this machine has it.
    pub(super) fn of_environment() -> Option<Self> {
        let text = env::var(Level::VARIABLE).ok()?;
        Level::named(text.trim())
    }

    /// The instruction set that the environment selects, or else the best; selected at the first call.
    pub(super) fn chosen() -> Self {
        #[cfg(test)]
        if let Some(level) = TRIED.get() {
            return level;
        }
        static CHOSEN: OnceLock<Level> = OnceLock::new();
        *CHOSEN.get_or_init(|| Level::of_environment().unwrap_or_else(Level::detect))
    }

    /// Calls `body`, for which this is the chosen instruction set on the calling thread.
    #[cfg(test)]
    pub(super) fn with<T>(self, body: impl FnOnce() -> T) -> T {
        struct Restored(Option<Level>);
        impl Drop for Restored {
            fn drop(&mut self) {
                TRIED.set(self.0);
            }
        }
        let _restored = Restored(TRIED.replace(Some(self)));
        body()
    }

    /// The instruction set with this name, if this machine has it.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Level::all().into_iter().find(|level| level.name() == name)
    }

    /// The instruction sets of this machine, the best first.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        all.extend(avx512::Avx512::detect().map(|simd| Level(Set::Avx512(simd))));
        #[cfg(target_arch = "x86_64")]
        all.extend(avx2::Avx2::detect().map(|simd| Level(Set::Avx2(simd))));
        #[cfg(target_arch = "aarch64")]
        all.extend(neon::Neon::detect().map(|simd| Level(Set::Neon(simd))));
        all.push(Level(Set::Portable(Portable)));
        all
    }

    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            Set::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => "neon",
        }
    }

    /// Runs `kernel` with this instruction set.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Set::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Set::Neon(simd) => kernel.run(simd),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

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

    /// Sixteen numbers in half precision and in brain floating point.
    #[derive(Clone, Copy)]
    struct Narrow(Vector);

    impl Kernel for Narrow {
        type Output = [[u16; WIDTH]; 2];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [[u16; WIDTH]; 2] {
            let register = simd.load(&self.0);
            [simd.narrow_f16(register), simd.narrow_bf16(register)]
        }
    }

    struct Transpose([Vector; WIDTH]);

    impl Kernel for Transpose {
        type Output = [Vector; WIDTH];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [Vector; WIDTH] {
            simd.transpose(&self.0)
        }
    }

    #[test]
    fn transposing_turns_rows_into_columns() {
        let number = |r: usize, c: usize| (r * WIDTH + c) as f32;
        let rows = std::array::from_fn(|r| std::array::from_fn(|c| number(r, c)));
        let columns = std::array::from_fn(|c| std::array::from_fn(|r| number(r, c)));
        for level in Level::all() {
            assert_eq!(level.run(Transpose(rows)), columns, "{level:?}");
        }
    }

    #[test]
    fn every_half_widens_exactly() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for bits in all.as_chunks::<WIDTH>().0 {
            for level in Level::all() {
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
        // Around every half of both kinds, and around the middle between it and the next one.
        let mut values = Vec::new();
        for widen in [|bits| f16::from_bits(bits).to_f32(), |bits| bf16::from_bits(bits).to_f32()] {
            for bits in 0..=u16::MAX {
                let (lower, next) = (widen(bits), widen(bits.wrapping_add(1)));
                let middle = ((f64::from(lower) + f64::from(next)) / 2.0) as f32;
                values.extend([lower, lower.next_up(), middle.next_down(), middle, middle.next_up()]);
            }
        }
        values.extend([65519.996, 65520.0, 1e30, f32::MAX, f32::MIN_POSITIVE, 1e-45, -1e-45]);
        values.extend([f32::from_bits(0x7f80_0001), f32::from_bits(0xff80_0001)]);
        values.resize(values.len().next_multiple_of(WIDTH), 0.0);
        for values in values.as_chunks::<WIDTH>().0 {
            for level in Level::all() {
                let [halves, brains] = level.run(Narrow(*values));
                for (&value, (half, brain)) in values.iter().zip(halves.into_iter().zip(brains)) {
                    let (half, wanted) = (f16::from_bits(half), f16::from_f32(value));
                    assert!(
                        half.to_bits() == wanted.to_bits() || half.is_nan() && wanted.is_nan(),
                        "{value}: {half} is not {wanted} under {level:?}"
                    );
                    let (brain, wanted) = (bf16::from_bits(brain), bf16::from_f32(value));
                    assert!(
                        brain.to_bits() == wanted.to_bits() || brain.is_nan() && wanted.is_nan(),
                        "{value}: {brain} is not {wanted} under {level:?}"
                    );
                }
            }
        }
    }
}
