//! The rules of IncreFlashAttention that come before those of FusedInferAttentionScore's decode path.

use super::{IncreCall, Version};
use crate::attention_problem::AttentionProblem;
use crate::ops::fused_infer_attention_score::{CheckedCall, Checker, ContentBounds};
use crate::rule::{broken, require, rules};
use crate::{DType, Refusal, Soc, Target, Violation};

rules! {
    in Scope::ALL;
    SUCCESSOR = "incre.successor", RUNTIME_ERROR, V1, "IncreFlashAttention entry points, Ascend 950" in Scope::ASCEND_950,
        "Ascend 950 computes attention by FusedInferAttentionScore",
        "call aclnnFusedInferAttentionScoreV5";
    PRODUCT = "incre.product", FIND_KERNEL_ERROR, V1, "IncreFlashAttention documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3 or the Atlas inference series (310P)";
    REQUIRED = "incre.required", PARAM_NULLPTR, V1, "IncreFlashAttention documentation, return values",
        "query, key, value and attentionOut are given",
        "pass every required argument";
    LAYOUT = "incre.input_layout", TILING_ERROR, V1, "IncreFlashAttention documentation, inputLayout",
        "inputLayout is BSH, BNSD or BSND",
        "spell the layout as CANN does";
    ROWS = "incre.rows", TILING_ERROR, V1, "IncreFlashAttention documentation, query",
        "each sequence has one query row",
        "call PromptFlashAttention or FusedInferAttentionScore for several rows";
    DECODE = "incre.decode_rules", TILING_ERROR, V1, "IncreFlashAttention tiling",
        "the call holds the rules of FusedInferAttentionScore's decode path",
        "see the rule that is named first";
    REGISTERED = "incre.registered", PARAM_INVALID, V1, "IncreFlashAttention operator definition",
        "each tensor has a type and a format that the operator is registered with",
        "see the rule that is named first";
    CARD_SIZE = "incre.card_size", TILING_ERROR, V1, "IncreFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P a call has at most 256 sequences, and room for at most 65536 keys of each: the rows of the tensor, or the \
         tokens of all blocks in a row of the table",
        "divide the sequences among several calls, or leave unused columns of the block table out";
    CARD_HEADS = "incre.card_heads", TILING_ERROR, V1, "IncreFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P the head dimension is a multiple of 16 up to 128, and a key head has at most 32 query heads",
        "call PromptFlashAttention, which takes one query row too";
    PSE_DROPPED = "incre.pse_dropped", Lint("the tensor is not looked at"), V1, "IncreFlashAttention, V1 and V2",
        "V1 and V2 come without pseShift: they take it and compute without it",
        "call aclnnIncreFlashAttentionV4";
    DEPRECATED = "incre.deprecated", Lint("nothing changes yet"), V1, "IncreFlashAttention documentation, deprecation",
        "calls go to V4: V1 to V3 are announced to go in December 2026",
        "call aclnnIncreFlashAttentionV4";
}

impl IncreCall<'_> {
    /// The most sequences of a call on 310P.
    pub const MOST_CARD_SEQUENCES: i64 = 256;

    /// Checks the call against the contract of `version` for `target`.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Refusal::Violation`] with the first broken rule, or [`Refusal::Unsupported`] for what this crate does not
    /// compute.
    pub fn check(&self, version: Version, target: Target) -> Result<(), Refusal> {
        self.resolve(version, target, |_| ())
    }

    /// Checks the call as [`IncreCall::check`] does, and resolves it into what a kernel computes:
    /// [`IncreCall::as_fused`] of what the version reads ([`IncreCall::computed_by`]).
    ///
    /// # Errors
    /// As for [`IncreCall::check`].
    pub fn problem(
        &self,
        version: Version,
        target: Target,
    ) -> Result<AttentionProblem<'static>, Refusal> {
        self.resolve(version, target, |checked| checked.problem.into_owned())
    }

    fn resolve<T>(
        &self,
        version: Version,
        target: Target,
        then: impl FnOnce(CheckedCall<'_>) -> T,
    ) -> Result<T, Refusal> {
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
        if target.soc == Soc::AtlasInference {
            let mut tensors = call.each_tensor();
            let bf16 = tensors.find(|(_, desc)| desc.dtype == DType::Bf16);
            require!(
                bf16.is_none(),
                REGISTERED,
                format_args!(
                    "{} of BF16 on {}",
                    bf16.map_or("", |(argument, _)| argument.acl_name()),
                    target.soc
                ),
                "FLOAT16 and quantised types",
            );
        }
        let layout = call.input_layout.unwrap_or(IncreCall::DEFAULT_LAYOUT);
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
        let verdict = fused.judge(Checker::Decode, TILING);
        let checked =
            verdict.and_then(|verdict| fused.resolve_by(verdict, Checker::Decode, TILING));
        let checked = checked.map_err(of_decode)?;
        if target.soc == Soc::AtlasInference {
            card(&checked.problem)?;
        }
        Ok(then(checked))
    }

    /// Bounds of the block table and of the left padding, if the call has one.
    ///
    /// # Errors
    /// As for [`IncreCall::check`].
    pub fn content_bounds(&self, version: Version) -> Result<Option<ContentBounds>, Refusal> {
        if self.block_table.is_none() && self.kv_padding_size.is_none() {
            return Ok(None);
        }
        self.resolve(version, TILING, |checked| checked.content_bounds())
    }

    /// Checks a call that holds every rule for lints, and returns the first that it breaks, leaving out those in
    /// `allowed` (by id): those of the operator, then those of FusedInferAttentionScore's decode path.
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
        let of_path = self.resolve(version, TILING, |checked| checked.lint_of_path(allowed));
        of_path.unwrap_or(Ok(()))
    }
}

/// Checks the tiling rules of 310P, by the sizes of the tensors.
fn card(of: &AttentionProblem<'_>) -> Result<(), Violation> {
    const MOST_KEYS: usize = 65_536;
    let most = IncreCall::MOST_CARD_SEQUENCES;
    require!(
        of.batch <= most as usize && of.key_rows <= MOST_KEYS,
        CARD_SIZE,
        format_args!("{} sequences of {} keys", of.batch, of.key_rows),
        format_args!("up to {most} sequences of up to {MOST_KEYS} keys"),
    );
    let (dim, group) = (of.head_dim, of.heads.checked_div(of.kv_heads).unwrap_or(0));
    require!(
        dim.is_multiple_of(16) && dim <= 128 && group <= 32,
        CARD_HEADS,
        format_args!("{group} query heads of {dim} elements a key head"),
        "up to 32 query heads, of a multiple of 16 elements up to 128",
    );
    Ok(())
}

/// The target whose decode-path rules the operator has, on every product and in every release.
const TILING: Target = Target::snapshot(Soc::AtlasA2);

/// A refusal of the decode path, as the operator reports it.
fn of_decode(refusal: Refusal) -> Refusal {
    let violation = match refusal {
        Refusal::Violation(violation) => violation,
        other => return other,
    };
    let rule = match violation.rule.status {
        crate::PARAM_INVALID => &REGISTERED,
        _ => &DECODE,
    };
    broken(
        rule,
        format_args!("{}: {}", violation.rule.id, violation.given),
        violation.allowed,
        violation.fix,
    )
    .into()
}
