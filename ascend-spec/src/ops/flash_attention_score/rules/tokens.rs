//! `preTokens` and `nextTokens`, and the lengths that a mode requires.

use super::{Report, lint};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, MaskKind, Version};
use crate::rule::{require, rules};
use crate::{Lengths, SparseMode, TOKENS_UNBOUNDED, Violation};
use std::fmt;

rules! {
    in Scope::ALL;
    NEGATIVE = "flash.tokens_negative", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, band",
        "preTokens and nextTokens, counted from the top left corner, are not both negative",
        "a band lies on both sides of, before (next < 0) or after (pre < 0) the diagonal; mode 4 counts from the \
         bottom right";
    PRE = "flash.pre_tokens", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, band",
        "a negative preTokens, counted from the top left corner, leaves a band within the keys",
        "nextTokens has to be at least -preTokens, and -preTokens less than the keys";
    NEXT = "flash.next_tokens", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, band",
        "a negative nextTokens, counted from the top left corner, leaves a band within the rows",
        "preTokens has to be at least -nextTokens, and -nextTokens less than the rows";
    PACKED_WINDOW = "flash.packed_window", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, packed mode 0",
        "in mode 0 nextTokens is not negative, a negative preTokens is at least -nextTokens, and in each packed \
         sequence with rows and keys the keys and preTokens together are no less than the rows",
        "widen the window, or pass all tokens and let the mask say it";
    PACKED_BAND = "flash.packed_band", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, packed mode 4",
        "in mode 4 preTokens is not negative, the band is not empty, and in each packed sequence with rows and keys \
         the keys and nextTokens together are no less than the rows",
        "widen the band, which counts from the bottom right corner";
    ROWS = "flash.packed_rows", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, packed modes 3 and 7",
        "in mode 3 no packed sequence has more rows than keys, in mode 7 none that has keys",
        "pass mode 4, or sequences with as many keys as rows";
    CUT = "flash.cut_sequence", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, packed modes 7 and 8",
        "in modes 7 and 8 preTokens covers the keys of the cut sequence (the last, or the first, with rows), \
         nextTokens is not positive in mode 7, and the keys and nextTokens together are no less than the rows; a cut \
         sequence without keys may have any rows in mode 7, not in mode 8",
        "pass the keys of the cut sequence as preTokens, and as nextTokens how far its last row's diagonal is from the \
         last key";
    WINDOW_UNMASKED = "flash.tokens_without_mask",
        Lint("only numbers change"), V1, "FlashAttentionScore, preTokens and nextTokens",
        "without a mask preTokens and nextTokens hide no key: every row sees every key",
        "pass the mask of mode 4 or another mode, or leave the tokens unbounded";
    IGNORED = "flash.tokens_ignored", Lint("only numbers change"), V1, "FlashAttentionScore, preTokens and nextTokens",
        "in modes 1, 2, 3, 5 and 6 preTokens, if positive, hides no key",
        "pass mode 4 for a window: these modes show every key before the diagonal";
}

/// Tokens in a message.
#[derive(Clone, Copy)]
struct Tokens {
    pre: i64,
    next: i64,
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "preTokens {}, nextTokens {}", self.pre, self.next)
    }
}

/// Checks the tokens of a call with a mask for the mode in force.
pub(crate) fn check(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    if p.mask == MaskKind::None {
        return Ok(());
    }
    match p.unequal() {
        Some(lengths) => packed(p, lengths),
        None => band(p),
    }
}

/// The tokens counted from the top left corner, if they make a band: in mode 4, and in mode 0 unless they are those
/// of a causal mask or hide nothing.
fn top_left(p: &FlashAttentionProblem<'_>) -> Option<(i64, i64)> {
    let (pre, next) = (p.call.pre_tokens, p.call.next_tokens);
    match p.mode {
        SparseMode::DefaultMask if pre >= p.q_rows && (next == 0 || next >= p.kv_rows) => None,
        SparseMode::DefaultMask => Some((pre, next)),
        SparseMode::Band => {
            let shift = p.kv_rows.saturating_sub(p.q_rows);
            Some((pre.saturating_sub(shift), next.saturating_add(shift)))
        }
        _ => None,
    }
}

fn band(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    let Some((pre, next)) = top_left(p) else {
        return Ok(());
    };
    let tokens = Tokens { pre, next };
    require!(pre >= 0 || next >= 0, NEGATIVE, tokens, "one of at least 0");
    require!(
        pre >= 0 || (next >= pre.saturating_neg() && pre.saturating_neg() < p.kv_rows),
        PRE,
        tokens,
        format_args!("preTokens of {} or more for {} keys", next.saturating_neg().max(1 - p.kv_rows), p.kv_rows),
    );
    require!(
        next >= 0 || (next.saturating_neg() <= pre && next.saturating_neg() < p.q_rows),
        NEXT,
        tokens,
        format_args!("nextTokens of {} or more for {} rows", pre.saturating_neg().max(1 - p.q_rows), p.q_rows),
    );
    Ok(())
}

fn packed(p: &FlashAttentionProblem<'_>, lengths: Lengths<'_>) -> Result<(), Violation> {
    let (pre, next) = (p.call.pre_tokens, p.call.next_tokens);
    let given = Tokens { pre, next };
    let cut_sequence = || p.cut_sequence.and_then(|cut| lengths.each().nth(cut)).unwrap_or_default();
    let reaches = |keys: i64, tokens: i64, rows: i64| keys.saturating_add(tokens) >= rows;
    let mut filled = lengths.each().filter(|&(rows, keys)| rows > 0 && keys > 0);
    match p.mode {
        SparseMode::DefaultMask => {
            let unbounded = pre >= p.q_rows && next >= p.kv_rows;
            require!(
                unbounded
                    || next >= 0
                        && (pre >= 0 || next >= pre.saturating_neg())
                        && filled.all(|(rows, keys)| reaches(keys, pre, rows)),
                PACKED_WINDOW,
                given,
                "nextTokens of at least 0 and of at least -preTokens, preTokens of at least Sq - Skv",
            );
        }
        SparseMode::Band => require!(
            pre >= 0 && pre.saturating_add(next) >= 0 && filled.all(|(rows, keys)| reaches(keys, next, rows)),
            PACKED_BAND,
            given,
            "preTokens of at least 0 and -nextTokens, nextTokens of at least Sq - Skv",
        ),
        SparseMode::RightDownCausal => fewer_rows(lengths.each())?,
        SparseMode::RightDownCausalBand => {
            // The host looks at no sequence without rows or without keys, whose output is 0: mode 3 alone refuses
            // rows without keys, and mode 8 those of its cut sequence.
            fewer_rows(filled)?;
            let (rows, keys) = cut_sequence();
            let least = if keys > 0 { rows.saturating_sub(keys) } else { i64::MIN };
            require!(
                pre >= keys && (least..=0).contains(&next),
                CUT,
                given,
                match keys {
                    0 => "preTokens of 0 or more, nextTokens of 0 or less".to_owned(),
                    _ => format!("preTokens of {keys} or more, nextTokens from {least} to 0"),
                },
            );
        }
        SparseMode::BandLeftUpCausal => {
            let (rows, keys) = cut_sequence();
            require!(
                pre >= keys && reaches(keys, next, rows),
                CUT,
                given,
                format_args!("preTokens of {keys} or more, nextTokens of {} or more", rows.saturating_sub(keys)),
            );
        }
        _ => {}
    }
    Ok(())
}

/// Checks the rows and keys of sequences.
fn fewer_rows(mut sequences: impl Iterator<Item = (i64, i64)>) -> Result<(), Violation> {
    let wide = sequences.find(|&(rows, keys)| rows > keys);
    let (rows, keys) = wide.unwrap_or_default();
    require!(wide.is_none(), ROWS, format_args!("{rows} rows and {keys} keys"), format_args!("at most {keys} rows"),);
    Ok(())
}

/// Whether the host finds that some row sees no key, and has such rows corrected.
pub(crate) fn fully_masked_rows(p: &FlashAttentionProblem<'_>) -> bool {
    // The operator reads only the lowest byte.
    if p.call.inner_precise as u8 == 2 {
        return true;
    }
    if p.mask == MaskKind::None {
        return false;
    }
    let fewer_keys = p.q_rows > p.kv_rows;
    let prefix = p.call.prefix.unwrap_or_default();
    match (p.unequal(), p.call.sparse_mode) {
        (Some(lengths), 6) => {
            let mut each = prefix.iter().zip(lengths.each());
            each.any(|(&prefix, (rows, keys))| prefix == 0 && rows > keys)
        }
        (Some(_), _) => false,
        (None, 3) => fewer_keys,
        // A prefix that is dropped as a whole is counted here all the same.
        (None, 5 | 6) => {
            let batch = usize::try_from(p.batch).unwrap_or(usize::MAX);
            fewer_keys && prefix.iter().take(batch).any(|&prefix| prefix == 0)
        }
        (None, _) => top_left(p).is_some_and(|(pre, next)| pre < p.q_rows.saturating_sub(p.kv_rows) || next < 0),
    }
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let call = &p.call;
    let (rows, keys) = (p.q_rows, p.kv_rows);
    if p.mask == MaskKind::None {
        lint!(
            report,
            call.pre_tokens >= rows.min(TOKENS_UNBOUNDED) && call.next_tokens >= keys.min(TOKENS_UNBOUNDED),
            WINDOW_UNMASKED,
            format_args!("preTokens {}, nextTokens {}", call.pre_tokens, call.next_tokens),
            FlashAttentionCall::ALL_TOKENS,
        );
        return;
    }
    let ignores = matches!(call.sparse_mode, 1 | 2 | 3 | 5 | 6);
    lint!(
        report,
        !ignores || call.pre_tokens <= 0 || call.pre_tokens >= rows.max(keys) - 1,
        IGNORED,
        call.pre_tokens,
        FlashAttentionCall::ALL_TOKENS,
    );
}
