//! Dropout: `dropMask` and `keepProb`.

use super::{Report, lint};
use crate::allowed::{Noted, Outcome};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, Version};
use crate::rule::{require, rules};
use crate::{DType, Violation};

rules! {
    in Scope::ALL;
    KEEP_PROB = "flash.keep_prob", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, keepProb",
        "keepProb is above 0 and at most 1",
        "pass the share of scores to be kept, 1 without dropout";
    DTYPE = "flash.drop_mask_dtype", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, dropMask",
        "dropMask is UINT8",
        "pack the mask, eight scores in a byte";
    SIZE = "flash.drop_mask_size", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, dropMask",
        "dropMask has a bit for each score of each head",
        "pack a bit for each score, rows one behind the other without padding";
    SHORT = "flash.drop_mask_short",
        Overrun("the kernel loads more bytes at once than the bits need"), V1, "FlashAttentionScore kernel, dropMask",
        "dropMask has 16 bytes for each 128 bits begun",
        "allocate ceil(bits / 128) * 16 bytes";
    UNSCALED = "flash.drop_mask_unscaled", Lint("only numbers change"), V1, "FlashAttentionScore kernel, dropout",
        "dropMask comes with a keepProb below 1",
        "pass the keepProb that the mask was made with, or no mask: scores are dropped, and the others not made up for \
         it";
    UNUSED = "flash.keep_prob_unused", Lint("nothing is dropped"), V1, "FlashAttentionScore kernel, dropout",
        "a keepProb below 1 comes with dropMask",
        "pass the mask, or keepProb 1: without a mask nothing is dropped and nothing scaled";
}

pub(crate) fn keep_prob(call: &FlashAttentionCall<'_>) -> Result<(), Violation> {
    require!(call.keep_prob > 0.0 && call.keep_prob <= 1.0, KEEP_PROB, call.keep_prob, "above 0 and at most 1",);
    Ok(())
}

pub(crate) fn check(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    let Some(mask) = p.call.drop_mask else {
        return Ok(());
    };
    DTYPE.takes(mask.dtype, DType::UInt8)?;
    let bytes = p.lengths.scores().saturating_mul(i128::from(p.heads)).saturating_add(7) / 8;
    let elements = i128::from(mask.elements().unwrap_or(0));
    SIZE.takes(Noted(elements, "bytes"), bytes..)
}

impl FlashAttentionProblem<'_> {
    /// Checks that a drop mask was made for as many scores as the call has. The operator sees only bytes: a mask for
    /// other rows or keys with the same number of bytes drops the wrong scores.
    ///
    /// # Errors
    /// `flash.drop_mask_size`.
    pub fn admits_drop_bits(&self, scores: u64) -> Result<(), Violation> {
        require!(
            scores == self.drop_bits(),
            SIZE,
            format_args!("a mask for {scores} scores"),
            format_args!("one for {}", self.drop_bits()),
        );
        Ok(())
    }
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let drops = p.call.keep_prob < 1.0;
    let Some(mask) = p.call.drop_mask else {
        lint!(report, !drops, UNUSED, format_args!("keepProb {} without a mask", p.call.keep_prob), "1",);
        return;
    };
    lint!(report, drops, UNSCALED, "keepProb 1 with a mask", "below 1",);
    let elements = mask.elements().unwrap_or(0);
    let bytes = FlashAttentionProblem::drop_mask_bytes(p.drop_bits());
    SHORT.takes(Noted(elements, "bytes"), bytes..).report(report);
}
