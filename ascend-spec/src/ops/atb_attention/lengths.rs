//! The lengths of a call's sequences.

use super::rules::{GIVEN, LENGTH_PAIRS, LENGTHS, ROWS, SKIPPED_KEYS};
use super::{AtbCall, Keys, Version};
use crate::rule::{lint, require};
use crate::{Soc, Target, Violation};

/// Keys before the rows of `PREFIX_ENCODER` are a multiple of it, and the tokens of a block.
pub(super) const PREFIX_STEP: i64 = 128;

/// The lengths of a call's sequences.
pub(super) struct Lengths<'a> {
    /// Query rows; none where each sequence has one.
    pub(super) rows: &'a [i64],
    pub(super) keys: &'a [i64],
    /// Rows that the query tensor has.
    tokens: i64,
}

impl AtbCall<'_> {
    /// The lengths, which the tensors hold.
    pub(super) fn lengths(&self, tokens: i64, keys: &Keys, version: Version) -> Result<Lengths<'_>, Violation> {
        let key_lens = GIVEN.requires(self.context_lens, "contextLens")?;
        let batch = key_lens.len();
        let packed = version != Version::Paged;
        let row_lens = match packed {
            true => self.seq_len.unwrap_or(key_lens),
            false => &[],
        };
        let named_rows = if packed { total(row_lens) } else { batch as i64 };
        let packed_keys = if keys.block == 0 { total(key_lens) } else { 0 };
        let mut each = row_lens.iter().chain(key_lens);
        require!(
            (!packed || row_lens.len() == batch)
                && each.all(|len| *len >= 0)
                && named_rows <= tokens
                && packed_keys <= keys.count,
            LENGTHS,
            format_args!("seqLen {row_lens:?}, contextLens {key_lens:?}"),
            format_args!("lengths of at least 0, with at most {tokens} query rows in all"),
        );
        Ok(Lengths { rows: row_lens, keys: key_lens, tokens })
    }

    /// Checks the rows of each sequence against its keys. The kernels of 310P and Ascend 950 are others.
    pub(super) fn check_pairs(&self, lengths: &Lengths<'_>, version: Version, target: Target) -> Result<(), Violation> {
        if !matches!(target.soc, Soc::AtlasA2 | Soc::AtlasA3) {
            return Ok(());
        }
        let holds = |rows: i64, keys: i64| match version {
            Version::Paged => true,
            Version::Packed if self.precise => rows > 0 && keys > 0,
            Version::Packed => rows == keys || rows == 1,
            Version::Prefix => keys >= rows && (keys - rows) % PREFIX_STEP == 0,
        };
        let mut pairs = lengths.rows.iter().zip(lengths.keys);
        match pairs.find(|(rows, keys)| !holds(**rows, **keys)) {
            None => Ok(()),
            Some((rows, keys)) => Err(LENGTH_PAIRS.broken(
                format_args!("{rows} rows and {keys} keys"),
                match (version, self.precise) {
                    (Version::Prefix, _) => "a multiple of 128 keys more than rows",
                    (_, true) => "at least 1 row and 1 key",
                    (_, false) => "as many keys as rows, or 1 row",
                },
            )),
        }
    }

    /// Reports rows that nothing writes, and keys that are skipped.
    pub(super) fn lint_lengths(
        &self,
        lengths: &Lengths<'_>,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) {
        let named = match version {
            Version::Paged => lengths.keys.len() as i64,
            Version::Packed | Version::Prefix => total(lengths.rows),
        };
        lint!(report, named == lengths.tokens, ROWS, lengths.tokens, named);
        if version == Version::Packed && self.skips_tiles(target) {
            let mut pairs = lengths.rows.iter().zip(lengths.keys);
            if let Some((rows, keys)) = pairs.find(|(rows, keys)| rows != keys) {
                let given = format_args!("{rows} rows and {keys} keys");
                report(SKIPPED_KEYS.broken(given, format_args!("{rows} keys")));
            }
        }
    }
}

/// The sum of lengths.
fn total(lens: &[i64]) -> i64 {
    lens.iter().copied().fold(0, i64::saturating_add)
}
