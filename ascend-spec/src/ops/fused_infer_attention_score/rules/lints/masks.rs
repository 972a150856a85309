//! Mask, sparse mode, token window and position bias.

use super::{Caller, Report, lint};
use crate::attention_problem::MaskUse;
use crate::ops::fused_infer_attention_score::rules::mask::{self, OwnFix};
use crate::ops::fused_infer_attention_score::{CheckedCall, FiaCall, Parameter, Route, Version};
use crate::rule::rules;
use crate::{Change, DType, Dims, NewArgument, Operator, SparseMode, TOKENS_UNBOUNDED, TensorDesc};

rules! {
    in Scope::ALL;
    WINDOW = "tokens.without_mask",
        Lint("only numbers change"), V1, "FusedInferAttentionScore documentation, sparseMode",
        "preTokens and nextTokens hide no key where the operator ignores them",
        "a window needs mode 4 with the compressed mask, where single rows of BSH, BSND and BNSD have a full mask \
         [B, 1, 1, Skv] instead";
    PRE = "pre_tokens.ignored", Lint("only numbers change"), V1, "check E4.4",
        "in the causal modes 2 and 3 preTokens hides no key",
        "use mode 4 for a causal window: modes 2 and 3 show every key before the diagonal";
    MODE = "sparse_mode.without_mask", Lint("no mask is read"), V1, "check F14",
        "a sparse mode that hides keys has a mask in the decode path",
        "pass a mask: without one the operator lets the row see every key";
    MODE_UNKNOWN = "sparse_mode.unchecked", Lint("the mask is checked as that of mode 0"), V1, "check J12",
        "in the decode path sparseMode is from 0 to 4",
        "pass mode 0: the operator takes what it does not know for it";
    MODE_FULL = "sparse_mode.left_up_decode",
        Lint("the mask is checked as the full one that it is read as"), V1, "check J12",
        "in the decode path mode 2 comes with no mask",
        "pass mode 1 if the mask is a full one, mode 0 without a mask to see every key";
    MODE_WIDE = "sparse_mode.wide",
        Lint("the mask is checked as that of the mode in force"), V1, "entry and routing, sparseMode",
        "sparseMode is a number of 32 bits",
        "pass a mode from 0 to 4: the operator reads the lower 32 bits";
    HEADS = "atten_mask.head_axis", Lint("less of the mask is read than there is"), V1, "checks E4.3, J12",
        "the axes of a full mask between batch and keys have size 1, but for the rows of several query rows",
        "the operator has one mask for all heads: drop the axis";
    BIAS_IGNORED = "pse_shift.ignored", Lint("the tensor is not looked at"), V1, "check E2.9",
        "packed sequences come without pseShift, but for one that covers the longest of them in the split-fuse path",
        "drop pseShift, or use a layout with a batch axis: the operator adds no bias to packed sequences";
    BIAS_PREFIX = "pse_shift.prefix_unchecked", Overrun("columns are read for the prefix's keys too"), V2, "check E5.1",
        "pseShift covers the keys of a shared prefix too",
        "give pseShift a column for each key of prefix and sequence";
    BIAS_START = "start_idx.ignored",
        Lint("only attributes are ignored"), V5, "FusedInferAttentionScore documentation, qStartIdx and kvStartIdx",
        "qStartIdx and kvStartIdx go with pseType 2 and 3",
        "drop the start positions, or choose the slopes that use them";
}

pub(super) fn check(p: &CheckedCall<'_>, caller: Caller, report: Report<'_>) {
    let call = p.call;
    let mode = Operator::FusedInferAttentionScore.sparse_mode(call.mode());
    let unmasked = p.problem.mask == MaskUse::None;
    let decode = p.route == Route::Decode;
    if caller == Caller::Fused {
        tokens(p, mode, report);
    }
    lint!(
        report,
        call.mode() == call.sparse_mode,
        MODE_WIDE,
        call.sparse_mode,
        "0 to 4",
        Change::set(Parameter::SparseMode, call.mode()),
    );
    if decode {
        lint!(
            report,
            mode.is_some() || p.problem.mode == SparseMode::Tree,
            MODE_UNKNOWN,
            call.sparse_mode,
            "0 to 4",
            (Change::set(Parameter::SparseMode, 0), "the operator takes what it does not know for it",),
        );
        // A single row sees every key in mode 3, as it does without a mask.
        lint!(
            report,
            !unmasked || !matches!(mode, Some(SparseMode::AllMask | SparseMode::LeftUpCausal | SparseMode::Band)),
            MODE,
            format_args!("sparseMode {} without a mask", call.sparse_mode),
            "0 or 3 without a mask",
        );
        lint!(
            report,
            unmasked || mode != Some(SparseMode::LeftUpCausal),
            MODE_FULL,
            "sparseMode 2 with a mask, which the operator reads as a full one",
            "0, 1, 3 or 4 with a mask",
            Change::set(Parameter::SparseMode, SparseMode::AllMask.acl()),
        );
    }
    if let (MaskUse::Full(_), Some(mask)) = (p.problem.mask, &call.atten_mask) {
        let fits = match mask.shape[..] {
            [_, heads, rows, _] => heads == 1 && (rows == 1 || !decode),
            [_, rows, _] => rows == 1 || !decode,
            [_, _] => true,
            _ => false,
        };
        lint!(
            report,
            fits,
            HEADS,
            mask.shape,
            if decode {
                "[B, Skv], [B, 1, Skv] or [B, 1, 1, Skv]"
            } else {
                "[Sq, Skv], [B, Sq, Skv] or [B, 1, Sq, Skv]"
            },
        );
    }
}

fn tokens(p: &CheckedCall<'_>, mode: Option<SparseMode>, report: Report<'_>) {
    let call = p.call;
    let masked = p.problem.mask != MaskUse::None;
    if matches!(mode, Some(SparseMode::LeftUpCausal | SparseMode::RightDownCausal)) {
        // These modes imply their tokens. Clients leave 0 there, or the bound of another mode beyond every key.
        lint!(
            report,
            call.pre_tokens <= 0 || call.pre_tokens >= TOKENS_UNBOUNDED || call.pre_tokens >= most_keys(p) - 1,
            PRE,
            call.pre_tokens,
            FiaCall::ALL_TOKENS,
            match mode {
                Some(SparseMode::RightDownCausal) if p.route == Route::Decode && p.problem.query_rows == 1 => {
                    Ok(fix_of_one_row(p, Some(SparseMode::Band)))
                }
                Some(SparseMode::RightDownCausal) => Err(Ok(vec![
                    Change::set(Parameter::SparseMode, SparseMode::Band.acl()),
                    Change::set(Parameter::NextTokens, 0),
                ])),
                _ => Err(Err(PRE.fix)),
            },
        );
        return;
    }
    let read = match p.route {
        Route::Prefill => {
            let padded = p.problem.query_padding.is_some() || p.problem.key_padding.is_some();
            (mode == Some(SparseMode::DefaultMask) && masked && !padded) || mode == Some(SparseMode::Band)
        }
        Route::Decode => mode == Some(SparseMode::Band) && masked,
    };
    let hides_nothing = || {
        let unbounded = |tokens: i64, least: i64| tokens >= TOKENS_UNBOUNDED.min(least);
        let rows = i64::try_from(p.problem.query_rows).unwrap_or(i64::MAX);
        let all = most_keys(p).max(rows) - 1;
        // A single row is the last one, which has no later keys.
        let later = if rows <= 1 { 0 } else { all };
        unbounded(call.pre_tokens, all) && unbounded(call.next_tokens, later)
    };
    lint!(
        report,
        read || hides_nothing(),
        WINDOW,
        format_args!("preTokens {}, nextTokens {}", call.pre_tokens, call.next_tokens),
        FiaCall::ALL_TOKENS,
        window(p, masked),
    );
}

/// The keys of the longest sequence, those of a shared prefix included.
fn most_keys(p: &CheckedCall<'_>) -> i64 {
    let prefix = p.problem.prefix.map_or(0, |prefix| prefix.len);
    (p.longest_key()).saturating_add(i64::try_from(prefix).unwrap_or(i64::MAX))
}

/// The fix for a window without a mask: mode 4, whose tokens count from each sequence's last key.
fn window(p: &CheckedCall<'_>, masked: bool) -> OwnFix {
    if masked {
        return Err(WINDOW.fix);
    }
    if p.route == Route::Decode && p.problem.query_rows == 1 {
        return fix_of_one_row(p, Some(SparseMode::Band));
    }
    let square = SparseMode::COMPRESSED_MASK_SIZE;
    let mask = TensorDesc::packed(DType::Bool, Dims::of([square, square]));
    Ok((
        vec![
            Change::set(Parameter::SparseMode, SparseMode::Band.acl()),
            Change::to(Parameter::AttenMask, NewArgument::Given(mask)),
        ],
        "the compressed mask, whose tokens count from the last key of each sequence; without a window leave both \
         tokens at 2147483647",
    ))
}

/// As [`mask::fix_of_one_row`], for a call that is checked already.
pub(super) fn fix_of_one_row(p: &CheckedCall<'_>, mode: Option<SparseMode>) -> OwnFix {
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let prefix = p.problem.prefix.map_or(0, |prefix| prefix.len);
    let keys = |b| size(p.problem.kv_len(b).saturating_add(prefix));
    let keys = p.problem.distinct_sequences().map(keys);
    let width = size(p.problem.key_rows.saturating_add(prefix));
    mask::fix_of_one_row(p.call, mode, (size(p.problem.batch), width), keys)
}

pub(super) fn bias(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    if call.pse_type == 0 {
        lint!(
            report,
            call.q_start_idx.is_none() && call.kv_start_idx.is_none(),
            BIAS_START,
            "start positions with pseType 0",
            "none",
        );
    }
    let Some(pse) = call.pse_shift.as_ref().filter(|pse| !pse.is_empty()) else {
        return;
    };
    lint!(report, !p.problem.packed || p.problem.bias.is_some(), BIAS_IGNORED, pse, "none",);
    let axis = |desc: &crate::TensorDesc| desc.shape.get(p.layout.input().row_axis()).copied();
    if let Some(prefix) = call.key_shared_prefix.as_ref().and_then(axis)
        && p.problem.prefix.is_some()
        && call.pse_type == 0
    {
        let keys = i64::try_from(p.problem.key_rows).unwrap_or(i64::MAX);
        let need = match p.route {
            crate::ops::fused_infer_attention_score::Route::Prefill => keys.saturating_add(prefix),
            crate::ops::fused_infer_attention_score::Route::Decode => 0,
        };
        lint!(
            report,
            pse.shape.last().is_some_and(|&last| last >= need),
            BIAS_PREFIX,
            pse.shape,
            format_args!("{need} columns or more"),
        );
    }
}
