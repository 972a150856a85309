//! Calls that are only measured: `GetMaxWorkspaceSize` passes the operator the presence of each length array, not its
//! contents.

use super::rules::packed;
use super::{Checker, FiaCall, Version};
use crate::rule::require;
use crate::{Target, Violation};

/// Arrays that stand for those of a measured call: with as many entries, and with values that hold the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnreadLengths {
    /// In place of `actualSeqLengths`.
    pub actual_seq_lengths: Option<Vec<i64>>,
    /// In place of `actualSeqLengthsKv`.
    pub actual_seq_lengths_kv: Option<Vec<i64>>,
    /// In place of `actualSharedPrefixLen`.
    pub actual_shared_prefix_len: Option<Vec<i64>>,
}

impl FiaCall<'_> {
    /// The arrays with which a measured call is checked. The operator does not see the contents of the call's own
    /// arrays, so these hold values that no rule on values, masks or block tables refuses: the ends of evenly
    /// distributed packed rows, otherwise 0.
    ///
    /// # Errors
    /// The broken rule, if the release measures no such call, or if tensors and attributes alone break one.
    pub fn unread_lengths(
        &self,
        version: Version,
        target: Target,
    ) -> Result<UnreadLengths, Violation> {
        let f = self.facts(version, target)?;
        let given = self.actual_seq_lengths.is_some() || self.actual_seq_lengths_kv.is_some();
        require!(
            for target => !(given && f.packed() && f.checker == Checker::Prefill),
            packed::DATA,
            "arrays without values",
            "GetWorkspaceSize, which passes them on",
        );
        let zeros = |values: Option<&[i64]>| Some(vec![0; values?.len()]);
        let ends = |values: Option<&[i64]>, rows| Some(shared_out(rows, values?.len()));
        let (q, kv) = (self.actual_seq_lengths, self.actual_seq_lengths_kv);
        Ok(UnreadLengths {
            actual_seq_lengths: match f.packed() {
                true => ends(q, f.q.rows),
                false => zeros(q),
            },
            actual_seq_lengths_kv: match f.packed() && !f.paged() {
                true => ends(kv, f.k.rows),
                false => zeros(kv),
            },
            actual_shared_prefix_len: zeros(self.actual_shared_prefix_len),
        })
    }
}

/// Ends of `sequences` sequences over `rows` rows, whose lengths differ by at most one.
fn shared_out(rows: i64, sequences: usize) -> Vec<i64> {
    let count = i128::try_from(sequences).unwrap_or(i128::MAX).max(1);
    let end = |b: i128| i64::try_from(i128::from(rows) * b / count).unwrap_or(rows);
    (1..=count).map(end).take(sequences).collect()
}

#[cfg(test)]
mod tests {
    use super::shared_out;

    #[test]
    fn rows_are_shared_out_evenly_and_completely() {
        assert_eq!(shared_out(7, 3), [2, 4, 7]);
        assert_eq!(shared_out(2, 4), [0, 1, 1, 2]);
        assert_eq!(shared_out(0, 2), [0, 0]);
        assert_eq!(shared_out(i64::MAX, 1), [i64::MAX]);
        assert_eq!(shared_out(9, 0), [0; 0]);
    }
}
