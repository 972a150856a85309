//! The roofline of the machine, which benchmarks compare the kernels with.
//!
//! Each function does a known amount of work on the calling thread, with the instruction set that the kernels use. The
//! caller measures the time.

use super::simd::{Kernel, Level, Shape, Simd, Vector, WIDTH};
use std::hint::black_box;

/// Computes independent multiply-adds, which only the arithmetic units limit. Returns the number of floating-point
/// operations, about `rounds` thousand.
pub fn multiply_add(rounds: u64) -> u64 {
    Level::chosen().run(MultiplyAdd(rounds))
}

/// Reads all of `data` once with plain loads, which only the hardware prefetcher helps. The decode kernel, which also
/// prefetches, can read faster. Returns a number that depends on the data, so that the compiler keeps the loads.
pub fn read(data: &[f32]) -> f32 {
    Level::chosen().run(Read(data))
}

struct MultiplyAdd(u64);

impl Kernel for MultiplyAdd {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u64 {
        // As many sums as the kernels keep: enough to hide the latency, few enough for the registers.
        match S::SHAPE {
            Shape::Wide => multiply_adds::<S, 24>(simd, self.0),
            Shape::Six => multiply_adds::<S, 6>(simd, self.0),
            Shape::Two => multiply_adds::<S, 2>(simd, self.0),
        }
    }
}

#[inline(always)]
fn multiply_adds<S: Simd, const N: usize>(simd: S, rounds: u64) -> u64 {
    let mut sums = [simd.splat(black_box(1.0)); N];
    let (factor, add) = (simd.splat(black_box(0.5)), simd.splat(black_box(0.25)));
    let repeats = rounds * 1000 / (2 * WIDTH * N) as u64;
    for _ in 0..repeats {
        for sum in &mut sums {
            *sum = simd.mul_add(*sum, factor, add);
        }
    }
    let mut results = [[0.0; WIDTH]; N];
    for (result, sum) in results.iter_mut().zip(sums) {
        simd.store(sum, result);
    }
    black_box(results);
    repeats * (2 * WIDTH * N) as u64
}

struct Read<'a>(&'a [f32]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 4];
        let one = simd.splat(1.0);
        let (vectors, _) = self.0.as_chunks::<WIDTH>();
        for four in vectors.as_chunks::<4>().0 {
            for (sum, vector) in sums.iter_mut().zip(four) {
                *sum = simd.mul_add(simd.load(vector), one, *sum);
            }
        }
        let mut totals: [Vector; 4] = [[0.0; WIDTH]; 4];
        for (total, sum) in totals.iter_mut().zip(sums) {
            simd.store(sum, total);
        }
        totals.as_flattened().iter().sum()
    }
}
