//! The arithmetic of a merge, row by row.

use super::rules::{BOTH_EMPTY, BOTH_MASKED, ONE_EMPTY};
use crate::Violation;

/// Maximum and sum of one row over a part of its keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// The largest score.
    pub max: f32,
    /// The sum of `exp(score - max)`.
    pub sum: f32,
}

impl Part {
    /// Maximum and sum that FlashAttentionScore writes for a row without visible keys that it corrects.
    pub const FULLY_MASKED: Part = Part { max: f32::MIN, sum: f32::MAX };

    /// Maximum and sum that FlashAttentionScore writes for the rows of a sequence without keys.
    pub const EMPTY: Part = Part { max: 0.0, sum: 0.0 };
}

/// A merged row: its maximum and sum, and the factor of each part's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merged {
    /// Maximum and sum over all keys.
    pub part: Part,
    /// Factor of the first part's attention.
    pub prev: f32,
    /// Factor of the second part's attention.
    pub cur: f32,
}

/// Merges two parts of a row.
///
/// Plain arithmetic, as the operator computes it: with `M` the larger maximum,
/// `S = s1 * exp(m1 - M) + s2 * exp(m2 - M)` and the factors `s * exp(m - M) / S`.
pub fn merge(prev: Part, cur: Part) -> Merged {
    let max = prev.max.max(cur.max);
    let weight = |part: Part| part.sum * (part.max - max).exp();
    let (first, second) = (weight(prev), weight(cur));
    let sum = first + second;
    Merged { part: Part { max, sum }, prev: first / sum, cur: second / sum }
}

/// Checks two parts of a row for values that the formula cannot merge.
///
/// # Errors
/// `ring.both_masked`, `ring.both_empty` or `ring.one_empty`.
pub fn admits(prev: Part, cur: Part) -> Result<(), Violation> {
    let rule = match (prev, cur) {
        (Part::FULLY_MASKED, Part::FULLY_MASKED) => &BOTH_MASKED,
        (Part::EMPTY, Part::EMPTY) => &BOTH_EMPTY,
        (Part::EMPTY, other) | (other, Part::EMPTY) if other.max < 0.0 => &ONE_EMPTY,
        _ => return Ok(()),
    };
    Err(rule.broken(format_args!("maxima {} and {}, sums {} and {}", prev.max, cur.max, prev.sum, cur.sum), rule.holds))
}

/// Checks packed sequences before their maxima are known: whether a sequence with rows has no keys in a part. Each
/// entry of `prev` and `cur` stands for a sequence; lints in `allowed` (by id) are left out.
///
/// # Errors
/// `ring.both_empty`, or `ring.one_empty`, which then holds only if no maximum of the other part is below 0.
pub fn admits_keyless(prev: &[bool], cur: &[bool], allowed: &[&str]) -> Result<(), Violation> {
    for (sequence, parts) in prev.iter().zip(cur).enumerate() {
        let (rule, part) = match parts {
            (true, true) => (&BOTH_EMPTY, "both parts"),
            (true, false) => (&ONE_EMPTY, "the first part"),
            (false, true) => (&ONE_EMPTY, "the second part"),
            (false, false) => continue,
        };
        if !allowed.contains(&rule.id) {
            return Err(rule.broken(
                format_args!("no keys in {part} for sequence {sequence}"),
                "keys in both parts for every sequence that has rows",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(scores: &[f32]) -> Part {
        let max = scores.iter().copied().fold(f32::MIN, f32::max);
        let sum = scores.iter().map(|score| (score - max).exp()).sum();
        Part { max, sum }
    }

    proptest! {
        #[test]
        fn merged_parts_are_the_whole(
            first in proptest::collection::vec(-20f32..20.0, 1..8),
            second in proptest::collection::vec(-20f32..20.0, 1..8),
        ) {
            let merged = merge(part(&first), part(&second));
            let whole = part(&[first, second].concat());
            prop_assert_eq!(merged.part.max, whole.max);
            prop_assert!((merged.part.sum - whole.sum).abs() <= 1e-5 * whole.sum);
            prop_assert!((merged.prev + merged.cur - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn a_fully_masked_part_leaves_the_other_as_it_is() {
        let live = part(&[1.0, 2.0]);
        for merged in [merge(Part::FULLY_MASKED, live), merge(live, Part::FULLY_MASKED)] {
            assert_eq!(merged.part, live);
            assert_eq!(merged.prev + merged.cur, 1.0);
        }
        assert!(admits(Part::FULLY_MASKED, live).is_ok());
    }

    #[test]
    fn what_the_formula_has_no_answer_to_is_named() {
        let live = part(&[-1.0, -2.0]);
        let id = |prev, cur| admits(prev, cur).unwrap_err().rule.id;
        assert_eq!(id(Part::FULLY_MASKED, Part::FULLY_MASKED), "ring.both_masked");
        assert_eq!(merge(Part::FULLY_MASKED, Part::FULLY_MASKED).part.sum, f32::INFINITY);
        assert_eq!(id(Part::EMPTY, Part::EMPTY), "ring.both_empty");
        assert!(merge(Part::EMPTY, Part::EMPTY).prev.is_nan());
        assert_eq!(id(live, Part::EMPTY), "ring.one_empty");
        assert_eq!(merge(live, Part::EMPTY).part.max, 0.0);
        let low = part(&[-200.0]);
        assert_eq!(id(low, Part::EMPTY), "ring.one_empty");
        assert!(merge(low, Part::EMPTY).prev.is_nan());
        assert!(admits(part(&[1.0]), Part::EMPTY).is_ok());
    }

    #[test]
    fn sequences_without_keys_are_named_before_their_maxima_are_known() {
        let answer = |prev: &[bool], cur: &[bool], allowed: &[&str]| {
            admits_keyless(prev, cur, allowed).map_err(|violation| violation.rule.id)
        };
        let (none, second) = ([false, false], [false, true]);
        assert_eq!(answer(&none, &none, &[]), Ok(()));
        assert_eq!(answer(&second, &none, &[]), Err("ring.one_empty"));
        assert_eq!(answer(&none, &second, &[]), Err("ring.one_empty"));
        assert_eq!(answer(&second, &second, &[]), Err("ring.both_empty"));
        let one = &["ring.one_empty"];
        assert_eq!(answer(&none, &second, one), Ok(()));
        assert_eq!(answer(&second, &second, one), Err("ring.both_empty"));
        let violation = admits_keyless(&second, &none, &[]).unwrap_err();
        assert!(violation.to_string().contains("the first part for sequence 1"), "{violation}");
    }
}
