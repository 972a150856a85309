//! Features of models that no operator here computes, refused by name.

use ascend_attention::Violation;

use crate::rules;

/// The features that a model's configuration requires of its attention besides heads, scale, windows, sinks and
/// layers that share keys ([`LayerInputs::shared_keys`](crate::LayerInputs::shared_keys)). By default none.
///
/// None of these has an argument in the operators that compute steps: without it, the step runs and its numbers are
/// another model's. An engine sets what the configuration has and calls
/// [`check`](Self::check) before it makes its attention.
///
/// ```
/// use ascend_serving::{AttentionOptions, rules};
///
/// let gemma_2 = AttentionOptions { logit_soft_cap: Some(50.0), ..AttentionOptions::default() };
/// assert_eq!(gemma_2.check().unwrap_err().rule, &rules::OPTION_SOFT_CAP);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Scores become `cap * tanh(score / cap)` before the softmax (Gemma 2, Grok): `logits_soft_cap`,
    /// `attn_logit_softcapping`. 0 means no cap, as in engines. The emulation alone computes it
    /// ([`AttentionShape::emulated_only_soft_cap`](crate::AttentionShape::emulated_only_soft_cap)).
    pub logit_soft_cap: Option<f64>,
    /// Whether scores are lowered by the distance of the key, with a slope for each head (BLOOM, MPT):
    /// `alibi_slopes`.
    pub alibi: bool,
    /// The share of attention weights that are dropped at random: `attention_dropout` of a model in training.
    pub dropout: f64,
    /// Whether queries attend to keys of another sequence, such as an encoder's.
    pub cross_attention: bool,
}

impl AttentionOptions {
    /// Refuses features that no step computes.
    ///
    /// # Errors
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP), [`OPTION_ALIBI`](crate::rules::OPTION_ALIBI),
    /// [`OPTION_DROPOUT`](crate::rules::OPTION_DROPOUT),
    /// [`OPTION_CROSS_ATTENTION`](crate::rules::OPTION_CROSS_ATTENTION): the first of them that is required.
    pub fn check(&self) -> Result<(), Violation> {
        if let Some(cap) = self.logit_soft_cap.filter(|cap| *cap != 0.0) {
            return Err(Violation::new(
                &rules::OPTION_SOFT_CAP,
                format_args!("a cap of {cap}"),
                "none",
                "compute these layers without the operator: scores by a matrix product, tanh, mask, softmax, a second \
                 product, with rows times keys scores a head through device memory after each. To test the model on \
                 the emulation, leave the option out and give the cap to \
                 `AttentionShape::emulated_only_soft_cap`. Where the scores stay far below the cap, it changes a score \
                 s by about s^3 / (3 cap^2): measure that before leaving the option out on an NPU",
            ));
        }
        if self.alibi {
            return Err(Violation::new(
                &rules::OPTION_ALIBI,
                "slopes for distances",
                "none",
                "call `FusedInferAttention` without a step, in BNSD or BSND, with the distances times the slopes as \
                 `PseShift`: packed calls take no position bias; leave the option out for the other layers",
            ));
        }
        if self.dropout != 0.0 {
            return Err(Violation::new(
                &rules::OPTION_DROPOUT,
                format_args!("a share of {}", self.dropout),
                0,
                "serve the model without dropout, which is a part of training alone, and leave the option out; \
                 FlashAttentionScore has it",
            ));
        }
        if self.cross_attention {
            return Err(Violation::new(
                &rules::OPTION_CROSS_ATTENTION,
                "keys of another sequence",
                "keys of the request's own tokens",
                "serve these layers by `CrossAttention`, beside this attention for the decoder's own tokens, and leave \
                 the option out",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn what_no_operator_has_is_refused_by_name() {
        let none = AttentionOptions::default();
        none.check().unwrap();
        let off = AttentionOptions { logit_soft_cap: Some(0.0), ..none };
        off.check().unwrap();
        let asked = |change: fn(&mut AttentionOptions)| {
            let mut options = none;
            change(&mut options);
            options.check().unwrap_err()
        };
        let all = [
            (asked(|o| o.logit_soft_cap = Some(30.0)), &rules::OPTION_SOFT_CAP),
            (asked(|o| o.logit_soft_cap = Some(f64::NAN)), &rules::OPTION_SOFT_CAP),
            (asked(|o| o.alibi = true), &rules::OPTION_ALIBI),
            (asked(|o| o.dropout = 0.1), &rules::OPTION_DROPOUT),
            (asked(|o| o.dropout = f64::NAN), &rules::OPTION_DROPOUT),
            (asked(|o| o.cross_attention = true), &rules::OPTION_CROSS_ATTENTION),
        ];
        for (refused, rule) in all {
            assert_eq!(refused.rule, rule);
            assert!(refused.to_string().contains(rule.id), "{refused}");
            assert!(!refused.fix.is_empty());
        }
    }
}
