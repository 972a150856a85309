//! Scores to weights: what blocks of many queries and strips of few have in common.

use super::attention::Attention;
use super::element::Element;
use super::exp::exp2;
use super::simd::{Simd, Vector};
use super::tile::quantise;
use ascend_spec::DType;
use half::{bf16, f16};

/// Puts `2^(score - shift)` in place of the scores, which are vector `at` of every `STEP`, rounded to the element type of
/// the call or to integers. Gives their sum before they are rounded.
#[inline(always)]
pub(super) fn weights<S: Simd, const STEP: usize>(
    simd: S,
    attention: &Attention,
    scores: &mut [Vector],
    at: usize,
    shift: S::Register,
) -> S::Register {
    match (attention.quantum, attention.held) {
        (Some(quantum), _) => {
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(STEP) {
                let weight = exp2(simd, simd.subtract(simd.load(&scores[at]), shift));
                sum = simd.add(sum, weight);
                simd.store(weight, &mut scores[at]);
                scores[at] = quantise(&scores[at], quantum);
            }
            sum
        }
        (None, DType::Float16) => powers::<f16, S, STEP>(simd, scores, at, shift),
        (None, DType::Bf16) => powers::<bf16, S, STEP>(simd, scores, at, shift),
        (None, _) => powers::<f32, S, STEP>(simd, scores, at, shift),
    }
}

#[inline(always)]
fn powers<T: Element, S: Simd, const STEP: usize>(
    simd: S,
    scores: &mut [Vector],
    at: usize,
    shift: S::Register,
) -> S::Register {
    let mut sum = simd.splat(0.0);
    for scores in scores.chunks_exact_mut(STEP) {
        let weight = exp2(simd, simd.subtract(simd.load(&scores[at]), shift));
        sum = simd.add(sum, weight);
        simd.store(T::round(simd, weight), &mut scores[at]);
    }
    sum
}
