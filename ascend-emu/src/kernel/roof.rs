//! What the machine can do at best, to measure the kernels against: each function is work of a known amount for the
//! calling thread, with the instruction set that the kernels use. Whoever calls it looks at the clock.

use super::simd::{Kernel, Level, Shape, Simd, Vector, WIDTH};
use std::hint::black_box;

/// Multiply-adds that wait for nothing but the arithmetic units; gives the number of floating-point operations done,
/// about `rounds` thousand.
pub fn multiply_add(rounds: u64) -> u64 {
    Level::chosen().run(MultiplyAdd(rounds))
}

/// Reads all of `data` once, with loads alone: what the processor foresees comes early, and nothing else. Reading that asks
/// for cache lines ahead of their use, as decode does, can be faster. Gives a number so that the reading cannot be left out.
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
