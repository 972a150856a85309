//! Mask tensor, sparse mode and token window.

use crate::allowed::{Axis, Noted, Outcome, Shapes};
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter, Route, Version};
use std::fmt;

use super::{Facts, packed, padding, prefix, quant};
use crate::attention_problem::{MaskTensor, MaskUse};
use crate::geometry::TOKENS_UNBOUNDED;
use crate::rule::{broken, require, rules};
use crate::{Change, DType, Dims, MaskGeometry, NewArgument, Operator, SparseMode, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    MODE = "sparse_mode.known", TILING_ERROR, V1, "check D10",
        "sparseMode is from 0 to 4 in the prefill path",
        "modes 5 to 8 belong to the training operators; mode 9, the tree mask, exists from CANN 9.1 on, on Atlas A2 \
         and A3 with rotary parts: elsewhere pass the tree as a full mask, in mode 1 or over latents in mode 0, or \
         leave it to the safe layer's TreeVerification";
    REQUIRED = "atten_mask.required", TILING_ERROR, V1, "check E4.1" in Scope::ALL,
        "sparse modes 1 to 4 have a mask in the prefill path",
        "pass the mask, or use mode 0 without one to let every row see every key";
    COMPRESSED = "atten_mask.compressed_shape", TILING_ERROR, V1, "check E4.2" in Scope::ALL,
        "the mask of sparse modes 2, 3 and 4 is [2048, 2048], [1, 2048, 2048] or [1, 1, 2048, 2048]",
        "these modes derive visibility from the lengths: pass the strict upper triangle of size 2048, or use mode 1 \
         for a full mask";
    COMPRESSED_DECODE = "atten_mask.compressed_shape_decode", TILING_ERROR, V1, "checks F14, J12",
        "in the decode path the mask of sparse modes 3 and 4 is [2048, 2048]",
        "pass the compressed mask with two axes, or a full mask [B, 1, 1, Skv] in mode 0";
    FULL = "atten_mask.full_shape", TILING_ERROR, V1, "check E4.3",
        "the mask of sparse modes 0 and 1 covers every query row and key, with batch 1 or the query's",
        "expand the mask to every query row and key of the padded tensors";
    FULL_DECODE = "atten_mask.full_shape_decode", TILING_ERROR, V1, "checks F14, J12",
        "in the decode path the mask has one entry for each sequence and covers the longest key length",
        "give every sequence its own mask row of the longest key length";
    PREFIX_DECODE = "atten_mask.prefix_decode", TILING_ERROR, V2, "check J6",
        "in the decode path a compressed mask goes with no shared prefix whose length is given",
        "pass mode 0, with a full mask of prefix and keys where the mode hides some, otherwise without one";
    TOKENS_NEGATIVE = "tokens.both_negative", TILING_ERROR, V1, "check E4.5" in Scope::ALL,
        "preTokens and nextTokens are not both negative",
        "a band lies on both sides of, before (next < 0) or after (pre < 0) the diagonal";
    TOKENS_EMPTY = "tokens.empty_band", TILING_ERROR, V1, "check E4.5" in Scope::ALL,
        "the band from -preTokens to nextTokens is not empty",
        "widen the band: it shows preTokens + nextTokens + 1 keys a row";
    NEXT_REACH = "next_tokens.reach", TILING_ERROR, V1, "checks E4.6, E4.7",
        "a negative nextTokens leaves every sequence a row (mode 0) or a key (mode 4) to see",
        "the band must reach into the shortest sequence";
    PRE_REACH = "pre_tokens.reach", TILING_ERROR, V1, "checks E4.6, E4.7",
        "a negative preTokens leaves every sequence a key (mode 0) or a row (mode 4) to see",
        "the band must reach into the shortest sequence";
}

/// Checks mask, mode and tokens, and returns the mode in force and what the tensor is for.
pub(crate) fn check(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    match f.route {
        Route::Decode => decode(f),
        Route::Prefill => prefill(f),
    }
}

/// Checks the decode path, which uses the mode only to tell compressed masks from full ones, and the tokens only for
/// the band of mode 4.
fn decode(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    let Some(mask) = f.call.mask() else {
        return Ok((SparseMode::DefaultMask, MaskUse::None));
    };
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let keys = match f.paged() {
        true => f.key_rows,
        false => f.longest_key(),
    };
    let longest = keys.saturating_add(prefix::length(f));
    if let Some(mode @ (SparseMode::RightDownCausal | SparseMode::Band)) =
        Operator::FusedInferAttentionScore.sparse_mode(f.call.mode())
    {
        COMPRESSED_DECODE.takes(Noted(mask.shape, format_args!("in mode {mode}")), Dims::of([size, size])).fix(
            || {
                let square = Dims::of([size, size]).elements();
                match mask.shape.ends_with(&[size, size]) && mask.elements() == square {
                    true => Ok(Change::to(Parameter::AttenMask, NewArgument::Shape(Dims::of([size, size])))),
                    false => Err(COMPRESSED_DECODE.fix),
                }
            },
        )?;
        let given = f.call.actual_shared_prefix_len.is_some_and(|lengths| !lengths.is_empty());
        require!(
            f.call.key_shared_prefix.is_none() || !given || prefix::length(f) + f.longest_key() <= 0,
            PREFIX_DECODE,
            "actualSharedPrefixLen",
            "none",
            fix_of_rows(f, longest),
        );
        return Ok((mode, MaskUse::Compressed));
    }
    let shape = &mask.shape;
    let covers = shape.first() == Some(&f.batch) && shape.last().is_some_and(|&last| last >= longest);
    require!(
        covers,
        FULL_DECODE,
        shape,
        format_args!("[{0}, S], [{0}, 1, S] or [{0}, 1, 1, S] with S at least {longest}", f.batch),
    );
    let key = mask.strides.last().copied().unwrap_or(0);
    // With a single axis the first axis is the last: there is no stride of rows.
    let batch = match mask.strides[..] {
        [batch, _, ..] => batch,
        _ => 0,
    };
    let tensor = MaskTensor { offset: mask.offset, batch, row: 0, key };
    Ok((SparseMode::AllMask, MaskUse::Full(tensor)))
}

/// The changes of a fix and their reason, or a fix in words alone.
pub(crate) type OwnFix = Result<(Vec<Change>, &'static str), &'static str>;

/// The fix for a mode above 1 with single rows, which have mode 0: no mask where the rows see every key, otherwise a
/// full one of `width` keys. `keys` are the key counts of the sequences, with a shared prefix.
pub(crate) fn fix_of_one_row(
    call: &FiaCall<'_>,
    mode: Option<SparseMode>,
    (batch, width): (i64, i64),
    keys: impl Iterator<Item = i64>,
) -> OwnFix {
    let Some(mode) = mode.filter(|mode| mode.takes_compressed_mask()) else {
        return Err("pass mode 0, with a mask [B, 1, 1, Skv] where a row does not see every key");
    };
    let (mode, tokens) = match mode {
        // Mode 3 ignores preTokens. A caller that bounds them means a causal window, as the lint `pre_tokens.ignored`
        // assumes.
        SparseMode::RightDownCausal if (1..TOKENS_UNBOUNDED).contains(&call.pre_tokens) => {
            (SparseMode::Band, (call.pre_tokens, 0))
        }
        mode => (mode, (call.pre_tokens, call.next_tokens)),
    };
    let mut keys = keys.map(|keys| u64::try_from(keys).unwrap_or(0));
    let sees_all = keys.all(|keys| {
        let geometry = MaskGeometry::new(mode, true, 1, keys, tokens.0, tokens.1);
        keys == 0 || geometry.row(0) == (0..keys)
    });
    let mut changes = vec![];
    if call.sparse_mode != 0 {
        changes.push(Change::set(Parameter::SparseMode, 0));
    }
    for (parameter, given) in [(Parameter::PreTokens, call.pre_tokens), (Parameter::NextTokens, call.next_tokens)] {
        if given < TOKENS_UNBOUNDED {
            changes.push(Change::set(parameter, FiaCall::ALL_TOKENS));
        }
    }
    let mask = Parameter::AttenMask;
    Ok(match sees_all {
        true => {
            if call.atten_mask.is_some() {
                changes.push(Change::to(mask, NewArgument::Nothing));
            }
            (changes, "a single row sees every key")
        }
        false => {
            let full = TensorDesc::packed(DType::Bool, Dims::of([batch, 1, 1, width]));
            changes.push(Change::to(mask, NewArgument::Given(full)));
            let halves = call.key.first().is_some_and(|key| key.dtype.is_half());
            let words = match halves {
                true => {
                    "1 hides what lies outside of the window, for a single row has one by a full mask alone; better \
                     call with TND, which takes mode 4 for single rows too: hardware is reported wrong with such masks \
                     beyond 512 keys"
                }
                false => {
                    "1 hides what lies outside of the window, for a single row has one by a full mask alone; hardware \
                     is reported wrong with such masks beyond 512 keys: test it there"
                }
            };
            (changes, words)
        }
    })
}

/// As [`fix_of_one_row`], for a call with single rows that a checker judges; other calls have a fix in words.
pub(crate) fn fix_of_rows(f: &Facts<'_>, width: i64) -> OwnFix {
    if f.q.rows != 1 {
        return Err("pass mode 0 with a mask [B, 1, rows, keys] that hides what the mode does");
    }
    let prefix = prefix::length(f);
    let keys = f.sequences().map(|b| f.kv_len(b).saturating_add(prefix));
    let mode = Operator::FusedInferAttentionScore.sparse_mode(f.call.mode());
    fix_of_one_row(f.call, mode, (f.batch, width), keys)
}

fn prefill(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    let Some(mode) = Operator::FusedInferAttentionScore.sparse_mode(f.call.mode()) else {
        return Err(
            MODE.broken(f.call.mode(), "0 (defaultMask), 1 (allMask), 2 (leftUpCausal), 3 (rightDownCausal), 4 (band)")
        );
    };
    if f.packed() {
        packed::masked(f, mode)?;
    }
    let usage = match f.call.mask() {
        None => {
            require!(
                mode == SparseMode::DefaultMask,
                REQUIRED,
                format_args!("no mask in mode {mode}"),
                "the compressed [2048, 2048] mask for modes 2, 3 and 4, a full mask for mode 1",
                fix_of_missing(mode),
            );
            MaskUse::None
        }
        Some(mask) if mode.takes_compressed_mask() => {
            compressed(mask, mode)?;
            MaskUse::Compressed
        }
        Some(mask) => MaskUse::Full(full(f, mask)?),
    };
    let (pre, next) = tokens(f, mode, usage != MaskUse::None)?;
    quant::rows(f, mode, pre, next)?;
    Ok((mode, usage))
}

/// Checks the shape of a compressed mask.
pub(crate) fn compressed(mask: &TensorDesc, mode: SparseMode) -> Result<(), Violation> {
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let shapes = [Dims::of([size, size]), Dims::of([1, size, size]), Dims::of([1, 1, size, size])];
    require!(
        shapes.contains(&mask.shape),
        COMPRESSED,
        format_args!("{} in mode {mode}", mask.shape),
        "[2048, 2048], [1, 2048, 2048] or [1, 1, 2048, 2048]",
    );
    Ok(())
}

/// Checks a full mask of the prefill path: rows and keys last, before them batch (1 or B) and an axis that is not
/// checked.
fn full(f: &Facts<'_>, mask: &TensorDesc) -> Result<MaskTensor, Violation> {
    let (b, i, j) = (Axis::OneOr(f.batch), Axis::From(f.q.rows), Axis::From(f.mask_width()));
    let allowed: [&[Axis]; 3] = [&[i, j], &[b, i, j], &[b, Axis::Any, i, j]];
    FULL.takes(mask.shape, Shapes(&allowed))?;
    let (batch_stride, row, key) = match (&mask.shape[..], &mask.strides[..]) {
        ([_, _], &[i, j]) => (0, i, j),
        ([b, ..], &[s, i, j] | &[s, _, i, j]) => (if *b == 1 { 0 } else { s }, i, j),
        _ => (0, 0, 0),
    };
    Ok(MaskTensor { offset: mask.offset, batch: batch_stride, row, key })
}

/// The fix for a mode without its mask: the compressed mask, which is the same for all calls.
pub(crate) fn fix_of_missing(mode: SparseMode) -> Result<(Change, &'static str), &'static str> {
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    match mode.takes_compressed_mask() {
        true => {
            let mask = TensorDesc::packed(DType::Bool, Dims::of([size, size]));
            let given = Change::to(Parameter::AttenMask, NewArgument::Given(mask));
            Ok((given, "1 above the diagonal; in mode 0 without a mask every row sees every key"))
        }
        false => Err(REQUIRED.fix),
    }
}

/// Checks the token counts and returns those in force.
fn tokens(f: &Facts<'_>, mode: SparseMode, masked: bool) -> Result<(i64, i64), Violation> {
    let call = f.call;
    let (pre, next) = match mode {
        SparseMode::DefaultMask if masked && !padding::given(f) => (call.pre_tokens, call.next_tokens),
        SparseMode::LeftUpCausal => (TOKENS_UNBOUNDED, 0),
        SparseMode::RightDownCausal => (TOKENS_UNBOUNDED, call.next_tokens),
        SparseMode::Band => (call.pre_tokens, call.next_tokens),
        _ => (TOKENS_UNBOUNDED, TOKENS_UNBOUNDED),
    };
    band(f, mode, (pre, next))?;
    let (next_limit, pre_limit) = match mode {
        SparseMode::DefaultMask => (Limit::Rows, Limit::Keys),
        SparseMode::Band if !f.packed() => (Limit::Keys, Limit::Rows),
        _ => return Ok((pre, next)),
    };
    for (tokens, limit, rule) in [(next, next_limit, &NEXT_REACH), (pre, pre_limit, &PRE_REACH)] {
        if tokens < 0 {
            let shortest = limit.shortest(f, mode);
            if tokens <= shortest.saturating_neg() {
                return Err(broken(
                    rule,
                    Tokens(f, mode),
                    format_args!("above {}", shortest.saturating_neg()),
                    "the band must reach into the shortest sequence",
                ));
            }
        }
    }
    Ok((pre, next))
}

/// The token counts and the mode of a call, in a message.
struct Tokens<'a>(&'a Facts<'a>, SparseMode);

impl fmt::Display for Tokens<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tokens(Facts { call, .. }, mode) = self;
        let (pre, next) = (call.pre_tokens, call.next_tokens);
        write!(f, "preTokens {pre}, nextTokens {next} in mode {mode}")
    }
}

/// Checks the token counts in force against each other.
pub(crate) fn band(f: &Facts<'_>, mode: SparseMode, (pre, next): (i64, i64)) -> Result<(), Violation> {
    require!(pre >= 0 || next >= 0 || f.is_950(), TOKENS_NEGATIVE, Tokens(f, mode), "at most one negative",);
    require!(next.saturating_add(pre) >= 0, TOKENS_EMPTY, Tokens(f, mode), "preTokens + nextTokens of at least 0",);
    Ok(())
}

/// The lengths that a negative token count must stay below.
enum Limit {
    Rows,
    Keys,
}

impl Limit {
    /// The shortest of these lengths, over the batch; for mode 0 the padded size counts too.
    fn shortest(&self, f: &Facts<'_>, mode: SparseMode) -> i64 {
        let (shortest, all) = match self {
            Limit::Rows => (f.sequences().map(|b| f.q_len(b)).min(), f.q.rows),
            Limit::Keys => {
                let len = |b| f.kv_len(b).saturating_add(prefix::length(f));
                let all = f.key_rows.saturating_add(f.prefix);
                (f.sequences().map(len).min(), all)
            }
        };
        let shortest = shortest.unwrap_or(all);
        if mode == SparseMode::DefaultMask { shortest.min(all) } else { shortest }
    }
}
