//! `prefix` of modes 5 and 6.

use super::{Report, lint};
use crate::ops::flash_attention_score::{FlashAttentionProblem, Version};
use crate::rule::{require, rules};
use crate::{SparseMode, TensorDesc, Violation};
use std::fmt;

rules! {
    in Scope::ALL;
    VALUES = "flash.prefix", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, prefix",
        "mode 6 has an entry of prefix for each sequence: at least Skv - Sq and 0, at most Skv",
        "a prefix reaches behind the keys that the first row sees anyway, and not beyond the last key";
    MASK_BATCH = "flash.prefix_mask_batch", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, prefix",
        "in mode 5 with several sequences the mask has a batch axis",
        "give each sequence a mask of its own, with its own prefix";
    IGNORED = "flash.prefix_ignored", Lint("only numbers change"), V1, "FlashAttentionScore tiling, prefix",
        "mode 5 has an entry of prefix for each sequence, at least Skv - Sq and 0, at most Skv: any other is dropped \
         and the mask alone counts",
        "give each sequence a prefix within its keys, or pass mode 1 if the mask says it all";
    UNREAD = "flash.prefix_unread",
        Lint("the numbers are not looked at"), V1, "FlashAttentionScore documentation, prefixOptional",
        "prefix goes with modes 5 and 6 and a mask",
        "pass null, or one of the modes 5 and 6";
}

/// The least and the largest prefix of a sequence.
struct Bounds {
    least: i64,
    most: i64,
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.least, self.most)
    }
}

fn bounds(rows: i64, keys: i64) -> Bounds {
    Bounds { least: keys.saturating_sub(rows).max(0), most: keys }
}

/// Whether every sequence has a prefix within its bounds.
fn is_valid(p: &FlashAttentionProblem<'_>) -> bool {
    let Some(prefix) = p.call.prefix else {
        return false;
    };
    let within = |prefix: i64, bounds: Bounds| (bounds.least..=bounds.most).contains(&prefix);
    let counted = i64::try_from(prefix.len()) == Ok(p.batch);
    counted
        && match p.unequal() {
            Some(lengths) => {
                let mut each = prefix.iter().zip(lengths.each());
                each.all(|(&prefix, (rows, keys))| within(prefix, bounds(rows, keys)))
            }
            None => prefix.iter().all(|&prefix| within(prefix, bounds(p.q_rows, p.kv_rows))),
        }
}

/// Checks the prefix of a call with a mask, and returns the mode in force.
pub(crate) fn check(
    p: &FlashAttentionProblem<'_>,
    mode: SparseMode,
    mask: &TensorDesc,
) -> Result<SparseMode, Violation> {
    if !mode.reads_prefix() {
        return Ok(mode);
    }
    let valid = is_valid(p);
    if mode == SparseMode::PrefixCompress {
        require!(valid, VALUES, Given(p.call.prefix), wanted(p),);
        return Ok(mode);
    }
    if !valid {
        return Ok(SparseMode::AllMask);
    }
    let for_each = mask.shape.rank() == 4 && mask.shape.first() == Some(&p.batch);
    require!(p.batch == 1 || for_each, MASK_BATCH, mask.shape, format_args!("[{}, ..]", p.batch),);
    Ok(mode)
}

/// A description of the valid prefixes. Packed sequences have different bounds, so it names those of the first one
/// whose entry is outside.
#[cold]
fn wanted(p: &FlashAttentionProblem<'_>) -> String {
    let batch = p.batch;
    let Some(lengths) = p.unequal() else {
        return format!("{batch} entries, each of {}", bounds(p.q_rows, p.kv_rows));
    };
    let given = p.call.prefix.unwrap_or_default();
    if i64::try_from(given.len()) != Ok(batch) {
        return format!("{batch} entries, one for each sequence");
    }
    let mut each = given.iter().zip(lengths.each()).enumerate();
    let outside = each.find_map(|(index, (prefix, (rows, keys)))| {
        let bounds = bounds(rows, keys);
        let within = (bounds.least..=bounds.most).contains(prefix);
        (!within).then(|| format!("{bounds} for sequence {index}"))
    });
    outside.unwrap_or_default()
}

/// A prefix in a message; a long one is cut.
struct Given<'a>(Option<&'a [i64]>);

impl fmt::Display for Given<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        match self.0 {
            None => f.write_str("no prefix"),
            Some(all) if all.len() <= SHOWN => write!(f, "{all:?}"),
            Some(all) => write!(f, "{} entries from {:?} on", all.len(), all.get(..SHOWN).unwrap_or(all)),
        }
    }
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let asked = p.call.mask().is_some() && matches!(p.call.sparse_mode, 5 | 6);
    lint!(
        report,
        !asked || p.mode.reads_prefix(),
        IGNORED,
        Given(p.call.prefix),
        format_args!("{} entries within each sequence's bounds", p.lengths.batch()),
    );
    // PyTorch's extension passes an empty list where the caller gives none.
    lint!(report, asked || p.call.prefix.is_none_or(<[i64]>::is_empty), UNREAD, Given(p.call.prefix), "null",);
}
