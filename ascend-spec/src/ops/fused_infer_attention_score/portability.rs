//! Whether other releases take a call, and compute the same result.

use super::rules::lints::releases::{PORTABLE_MEANING, PORTABLE_REFUSED};
use super::{CheckedCall, FiaCall, Version};
use crate::attention_problem::{AttentionProblem, MaskUse};
use crate::rule::broken;
use crate::{Cann, Target, Violation};

impl FiaCall<'_> {
    /// Calls `report` for each way in which another release of `target`'s product, from `since` on, treats the call
    /// differently from `target`: the rule by which it refuses the call, what it computes otherwise, or a lint that
    /// the call breaks there alone, such as an ignored argument.
    ///
    /// A call that `target` refuses is reported as refused there. A call that a release takes and this crate does not
    /// compute is not compared.
    ///
    /// ```
    /// use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
    /// use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};
    ///
    /// let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape);
    /// let key = [half(&[2, 4, 64, 96]).unwrap()];
    /// let call = FiaCall {
    ///     query: half(&[2, 8, 1, 96]),
    ///     key: &key,
    ///     value: &key,
    ///     num_heads: 8,
    ///     num_key_value_heads: 4,
    ///     inner_precise: 2,
    ///     attention_out: half(&[2, 8, 1, 96]),
    ///     ..FiaCall::new("BNSD")
    /// };
    /// let newest = Target::new(Soc::AtlasA2, Cann::NEWEST);
    /// assert!(call.check(Version::V4, newest).is_ok());
    /// let mut found = Vec::new();
    /// call.each_difference(Version::V4, newest, Cann::V8_5, &mut |lint| found.push(lint.to_string()));
    /// assert!(found[0].starts_with("portable.refused") && found[0].contains("inner_precise.known"), "{found:?}");
    /// ```
    pub fn each_difference(&self, version: Version, target: Target, since: Cann, report: &mut dyn FnMut(Violation)) {
        let own = match self.check(version, target) {
            Ok(problem) => Some(problem),
            Err(violation) if violation.is_unsupported() => None,
            Err(violation) => {
                return report(refused(target, since, &violation));
            }
        };
        let others = Cann::ALL.into_iter().map(|cann| Target { cann, ..target });
        for other in others {
            if other.cann < since || other == target || !other.is_released() {
                continue;
            }
            match (&own, self.check(version, other)) {
                (_, Err(violation)) if !violation.is_unsupported() => {
                    report(refused(other, since, &violation));
                }
                (Some(own), Ok(problem)) => compare(own, &problem, report),
                (None, _) | (_, Err(_)) => {}
            }
        }
    }

    /// Finds a target that takes a call that `target` refuses: the oldest newer release of its product, or else
    /// another product with the oldest release from `target`'s on. A target takes a call that breaks no rule there,
    /// and no lint but the `allowed` ones, in the version of the operator that [`Version::chosen_on`] chooses.
    ///
    /// ```
    /// use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
    /// use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};
    ///
    /// let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape).unwrap();
    /// let (query, key) = (half(&[5, 8, 80]), [half(&[5, 2, 80])]);
    /// let call = FiaCall {
    ///     query: Some(query),
    ///     key: &key,
    ///     value: &key,
    ///     actual_seq_lengths: Some(&[5]),
    ///     actual_seq_lengths_kv: Some(&[5]),
    ///     num_heads: 8,
    ///     num_key_value_heads: 2,
    ///     attention_out: Some(query),
    ///     ..FiaCall::new("TND")
    /// };
    /// let old = Target::new(Soc::AtlasA2, Cann::V8_1);
    /// assert!(call.check(Version::V1, old).is_err());
    /// assert_eq!(call.taken_by(Version::V1, old, &[]), Some(Target::new(Soc::AtlasA2, Cann::V8_5)));
    /// ```
    pub fn taken_by(&self, at_least: Version, target: Target, allowed: &[&str]) -> Option<Target> {
        target.nearest(|other| {
            let checked = self.check(Version::chosen_on(self, at_least, other), other);
            checked.is_ok_and(|problem| problem.lint(allowed).is_ok())
        })
    }
}

fn refused(target: Target, since: Cann, why: &Violation) -> Violation {
    broken(
        &PORTABLE_REFUSED,
        format_args!(
            "a call that {target} refuses by {}: {}, given {}, allowed there: {}",
            why.rule.id, why.rule.holds, why.given, why.allowed
        ),
        format_args!("calls that every release from {since} on takes"),
        why.fix.as_str(),
    )
}

/// What another release computes otherwise, or takes and then ignores.
fn compare(own: &CheckedCall<'_>, other: &CheckedCall<'_>, report: &mut dyn FnMut(Violation)) {
    let (here, there) = (own.target, other.target);
    if let Some(what) = difference(own, other) {
        report(PORTABLE_MEANING.broken(
            format_args!("a call of which {there} has other {what} than {here}"),
            "calls of which every release makes the same",
        ));
    }
    let mut known = Vec::new();
    own.each_lint(&mut |lint| known.push(lint.rule.id));
    other.each_lint(&mut |lint| {
        // Which version is called on a release is chosen there.
        if !known.contains(&lint.rule.id) && !lint.rule.is_deprecation() {
            report(broken(
                &PORTABLE_MEANING,
                format_args!(
                    "a call that on {there} breaks {}: {}, given {}",
                    lint.rule.id, lint.rule.holds, lint.given
                ),
                &lint.allowed,
                lint.fix.as_str(),
            ));
        }
    });
}

/// How two readings of one call differ.
fn difference(own: &CheckedCall<'_>, other: &CheckedCall<'_>) -> Option<&'static str> {
    let (a, b) = (&own.problem, &other.problem);
    if a.work != b.work {
        return Some("work to do");
    }
    let sizes = |p: &AttentionProblem<'_>| (p.batch, p.heads, p.kv_heads, p.head_dim, p.value_dim);
    if sizes(a) != sizes(b) || a.rope_dim != b.rope_dim {
        return Some("sizes");
    }
    if (a.query, a.query_rope, a.out, a.lse) != (b.query, b.query_rope, b.out, b.lse) {
        return Some("places of rows in query and output");
    }
    if (own.cache, a.pages, a.first, &a.list) != (other.cache, b.pages, b.first, &b.list) {
        return Some("places of keys and values");
    }
    let sequence = |p: &AttentionProblem<'_>, b| (p.q_len(b), p.kv_len(b));
    let padded = |p: &AttentionProblem<'_>| (p.query_padding.is_some(), p.key_padding.is_some());
    // Both readings have the lengths from the same arrays.
    let both = || a.distinct_sequences();
    if both().any(|index| sequence(a, index) != sequence(b, index)) || padded(a) != padded(b) {
        return Some("lengths of sequences");
    }
    if a.prefix != b.prefix {
        return Some("keys of the shared prefix");
    }
    if mask(a) != mask(b) || both().any(|index| a.geometry(index) != b.geometry(index)) {
        return Some("keys that mask, mode and tokens hide");
    }
    if (a.bias, a.slopes, a.sink) != (b.bias, b.slopes, b.sink) {
        return Some("terms beside the scores (position bias, sink)");
    }
    let scales =
        |p: &AttentionProblem<'_>| (p.query_quantisation, p.key_quantisation, p.value_quantisation, p.out_quantisation);
    if scales(a) != scales(b) || a.int8_query != b.int8_query {
        return Some("scales and offsets");
    }
    None
}

/// The elements of a mask tensor that are read: the first one, and the strides of the axes that are walked.
fn mask(p: &AttentionProblem<'_>) -> Option<[i64; 4]> {
    match p.mask {
        MaskUse::Full(mask) => {
            let single = p.query_rows == 1 && !p.packed;
            let batch = if p.batch > 1 { mask.batch } else { 0 };
            let row = if single { 0 } else { mask.row };
            Some([mask.offset, batch, row, mask.key])
        }
        _ => None,
    }
}
