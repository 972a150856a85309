//! The factor by which scores are multiplied: as operators hold it, and what is likely wrong with one.

use crate::Violation;
use crate::rule::{Rule, broken};
use std::fmt::Display;

/// The factor of the scores as operators hold it: in 32 bits, in which numbers from about `3.4e38` on are infinite, and
/// those below about `1e-45` are 0.
pub fn score_scale(scale: f64) -> f32 {
    scale as f32
}

/// The factor that was likely meant where a head dimension, with its rotary part or without, or its square root is
/// given instead of the reciprocal of the root. Absorbed queries of 512 elements and a rotary part belong to heads of
/// 128 elements. Head dimensions of 1 are not considered.
pub fn inverted_scale(scale: f64, head_dim: usize, rope_dim: usize) -> Option<f64> {
    let absorbed = (head_dim == 512 && rope_dim > 0).then_some(128 + rope_dim);
    let dims = [Some(head_dim), Some(head_dim.saturating_add(rope_dim)), absorbed];
    let roots = dims.into_iter().flatten().filter(|&dim| dim > 1);
    let mut roots = roots.map(|dim| (dim as f64).sqrt());
    let is = |number: f64| (scale / number - 1.0).abs() < 1e-3;
    let root = roots.find(|root| is(*root) || is(root * root))?;
    let meant = absorbed.map_or(root, |dim| (dim as f64).sqrt());
    Some(meant.recip())
}

/// Reports a factor that is not finite in 32 bits, that is 0, or that is [the inverse](inverted_scale) of what is meant
/// for heads of `head_dim` elements and a rotary part of `rope_dim`, each by the operator's rule for it.
pub(crate) fn lint_scale(
    scale: f64,
    [head_dim, rope_dim]: [usize; 2],
    [finite, zero, inverse]: [&'static Rule; 3],
    report: &mut dyn FnMut(Violation),
) {
    let mut unless = |holds: bool, rule: &'static Rule, allowed: &dyn Display| {
        if !holds {
            report(broken(rule, scale, allowed, rule.fix));
        }
    };
    let held = score_scale(scale);
    unless(held.is_finite(), finite, &"a number that is finite in 32 bits");
    unless(held != 0.0, zero, &"a factor other than 0");
    let meant = inverted_scale(scale, head_dim, rope_dim);
    unless(meant.is_none(), inverse, &meant.unwrap_or(scale));
}

#[cfg(test)]
mod tests {
    use super::inverted_scale;

    #[test]
    fn roots_are_told_from_factors() {
        let meant = |scale| inverted_scale(scale, 64, 64);
        assert_eq!(meant(8.0), Some(0.125));
        assert_eq!(meant(64.0), Some(0.125));
        assert!(meant(11.3137).is_some_and(|meant| (meant - 0.088_388).abs() < 1e-6));
        for scale in [0.125, 1.0, 0.0, -8.0, 8.1, 11.0, 63.0, f64::NAN, f64::INFINITY] {
            assert_eq!(meant(scale), None, "{scale}");
        }
        assert_eq!(inverted_scale(1.0, 1, 0), None);
        // Absorbed queries, whose heads have 128 elements and 64 rotary ones.
        for root in [512f64, 576.0, 192.0].map(f64::sqrt) {
            let meant = inverted_scale(root, 512, 64).unwrap();
            assert!((meant - 192f64.sqrt().recip()).abs() < 1e-12);
        }
    }
}
