//! The rules of IncreFlashAttention in front of those of FusedInferAttentionScore's decode path.

use super::{IncreCall, Version};
use crate::fia::Checker;
use crate::rule::{broken, require, rules};
use crate::{Refusal, Soc, Target, Violation};

rules! {
    in Scope::ALL;
    SUCCESSOR = "incre.successor", RUNTIME_ERROR, IncreV1, "IncreFlashAttention entry points, Ascend 950" in Scope::ASCEND_950,
        "Ascend 950 computes attention by FusedInferAttentionScore",
        "call aclnnFusedInferAttentionScoreV5";
    PRODUCT = "incre.product", FIND_KERNEL_ERROR, IncreV1, "IncreFlashAttention documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3 or the Atlas inference series (310P)";
    REQUIRED = "incre.required", PARAM_NULLPTR, IncreV1, "IncreFlashAttention documentation, return values",
        "query, key, value and attentionOut are given",
        "pass every required argument";
    LAYOUT = "incre.input_layout", TILING_ERROR, IncreV1, "IncreFlashAttention documentation, inputLayout",
        "inputLayout is BSH, BNSD or BSND",
        "spell the layout as CANN does";
    ROWS = "incre.rows", TILING_ERROR, IncreV1, "IncreFlashAttention documentation, query",
        "each sequence has one query row",
        "call PromptFlashAttention or FusedInferAttentionScore for several rows";
    DECODE = "incre.decode_rules", TILING_ERROR, IncreV1, "IncreFlashAttention tiling",
        "the call holds the rules of FusedInferAttentionScore's decode path",
        "see the rule that is named first";
    REGISTERED = "incre.registered", PARAM_INVALID, IncreV1, "IncreFlashAttention operator definition",
        "each tensor has a type and a format that the operator is registered with",
        "see the rule that is named first";
    PSE_DROPPED = "incre.pse_dropped", Lint("the tensor is not looked at"), IncreV1, "IncreFlashAttention, V1 and V2",
        "V1 and V2 come without pseShift: they take it and compute without it",
        "call aclnnIncreFlashAttentionV4";
    DEPRECATED = "incre.deprecated", Lint("nothing changes yet"), IncreV1, "IncreFlashAttention documentation, deprecation",
        "calls go to V4: V1 to V3 are announced to go in December 2026",
        "call aclnnIncreFlashAttentionV4";
}

impl IncreCall<'_> {
    /// Checks the call against the contract of `version` for `target`.
    ///
    /// Allocates nothing unless it refuses. What it computes is [`IncreCall::as_fused`] of what the version reads
    /// ([`IncreCall::computed_by`]).
    ///
    /// # Errors
    /// [`Refusal::Violation`] with the first broken rule, or [`Refusal::Unsupported`] for what this crate does not compute.
    pub fn check(&self, version: Version, target: Target) -> Result<(), Refusal> {
        require!(
            for target => target.soc != Soc::Ascend950,
            SUCCESSOR,
            version,
            "aclnnFusedInferAttentionScoreV5",
        );
        require!(
            version.runs_on(target),
            PRODUCT,
            target.soc,
            "Atlas A2, Atlas A3 and the Atlas inference series (310P)",
        );
        let call = self.computed_by(version);
        let given = [
            (call.query.is_some(), "query"),
            (!call.key.is_empty(), "key"),
            (!call.value.is_empty(), "value"),
            (call.attention_out.is_some(), "attentionOut"),
        ];
        if let Some((_, name)) = given.into_iter().find(|(given, _)| !given) {
            return Err(broken(
                &REQUIRED,
                format_args!("no {name}"),
                "query, key, value and attentionOut",
                format_args!("pass {name}"),
            )
            .into());
        }
        let layout = call.input_layout.unwrap_or("BSH");
        let axis = match layout {
            "BSH" | "BSND" => 1,
            "BNSD" => 2,
            _ => {
                let allowed = "BSH, BNSD, BSND";
                return Err(
                    broken(&LAYOUT, format_args!("{layout:?}"), allowed, LAYOUT.fix).into(),
                );
            }
        };
        let rows = call.query.and_then(|query| query.shape.get(axis).copied());
        require!(
            rows.is_none_or(|rows| rows == 1),
            ROWS,
            rows.unwrap_or(0),
            1,
        );
        let call = IncreCall {
            input_layout: Some(layout),
            ..call
        };
        let fused = call.as_fused();
        match fused.judge(Checker::Decode, Target::snapshot(Soc::AtlasA2)) {
            Err(Refusal::Violation(violation)) => {
                let rule = match violation.rule.status {
                    crate::PARAM_INVALID => &REGISTERED,
                    _ => &DECODE,
                };
                Err(broken(
                    rule,
                    format_args!("{}: {}", violation.rule.id, violation.given),
                    violation.allowed,
                    violation.fix,
                )
                .into())
            }
            other => other,
        }
    }

    /// The first lint that the call breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, version: Version, allowed: &[&str]) -> Result<(), Violation> {
        require!(
            version >= Version::V3 || self.pse_shift.is_none() || allowed.contains(&PSE_DROPPED.id),
            PSE_DROPPED,
            format_args!("pseShift for {version}"),
            "null",
        );
        require!(
            version == Version::V4 || allowed.contains(&DEPRECATED.id),
            DEPRECATED,
            version,
            Version::V4,
        );
        Ok(())
    }
}
