//! The sequences of a batch: their lengths, and where their rows are.

use super::rows::KeyValueList;
use super::{AttentionProblem, size};
use std::borrow::Cow;
use std::ops::Range;

/// The lengths of the sequences of a batch, as a call gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SequenceLengths<'a> {
    /// Every sequence has all rows.
    All,
    /// One length for each sequence; an array of one entry stands for every sequence, and an empty one for all rows.
    Each(Cow<'a, [i64]>),
    /// The end of each sequence on a row axis that they share.
    Ends(Cow<'a, [i64]>),
}

impl<'a> SequenceLengths<'a> {
    /// Wraps the optional array of lengths of a call, which holds the ends of the sequences if they are `packed`.
    pub fn new(lengths: Option<&'a [i64]>, packed: bool) -> Self {
        match (lengths, packed) {
            (_, true) => SequenceLengths::Ends(Cow::Borrowed(lengths.unwrap_or(&[]))),
            (None, false) => SequenceLengths::All,
            (Some(lengths), false) => SequenceLengths::Each(Cow::Borrowed(lengths)),
        }
    }

    /// Length of sequence `b` by the array, for a tensor with `rows` rows.
    pub fn of(&self, b: usize, rows: i64) -> i64 {
        match self {
            SequenceLengths::All => rows,
            SequenceLengths::Each(lengths) => match **lengths {
                [] => rows,
                [one] => one,
                ref lengths => lengths.get(b).copied().unwrap_or(0),
            },
            SequenceLengths::Ends(ends) => {
                let end = ends.get(b).copied().unwrap_or(0);
                end.saturating_sub(self.start(b))
            }
        }
    }

    /// First row of sequence `b` on a row axis that the sequences share, and 0 on one of its own.
    pub fn start(&self, b: usize) -> i64 {
        let SequenceLengths::Ends(ends) = self else {
            return 0;
        };
        let before = b.checked_sub(1).and_then(|before| ends.get(before));
        before.copied().unwrap_or(0)
    }

    /// These lengths in an owned array.
    fn into_owned(self) -> SequenceLengths<'static> {
        match self {
            SequenceLengths::All => SequenceLengths::All,
            SequenceLengths::Each(lengths) => SequenceLengths::Each(lengths.into_owned().into()),
            SequenceLengths::Ends(ends) => SequenceLengths::Ends(ends.into_owned().into()),
        }
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> usize {
        match self {
            SequenceLengths::All => 0,
            SequenceLengths::Each(lengths) | SequenceLengths::Ends(lengths) => lengths.len(),
        }
    }
}

/// The left padding, read from the device: the number of unused rows after the last valid one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// Rows after the last valid query row.
    pub query: i64,
    /// Rows after the last valid key row.
    pub key: i64,
}

/// Where the rows of one sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceRows {
    /// First valid row on the query's row axis, and on those of output, log-sum-exp and rotary part.
    pub q_first: usize,
    /// Number of valid query rows.
    pub q_len: usize,
    /// First valid row on the key's row axis, or in the first block of a paged cache.
    pub kv_first: usize,
    /// Number of valid keys, without a shared prefix.
    pub kv_len: usize,
    /// Position of the first valid key in its sequence, counting the padding before it, as scales of single tokens do.
    pub kv_position: usize,
    /// Number of keys in the shared prefix, which come first.
    pub prefix: usize,
}

impl SequenceRows {
    /// Number of keys, with the shared prefix.
    pub fn keys(&self) -> usize {
        self.prefix.saturating_add(self.kv_len)
    }
}

impl AttentionProblem<'_> {
    /// This problem with owned lists, so that it can be stored beside the call that it came from.
    pub fn into_owned(self) -> AttentionProblem<'static> {
        AttentionProblem {
            query_lengths: self.query_lengths.into_owned(),
            key_lengths: self.key_lengths.into_owned(),
            list: self.list.map(KeyValueList::into_owned),
            ..self
        }
    }

    /// Number of valid query rows of sequence `b`. The other rows of a padded query are written as 0, with
    /// log-sum-exp +inf.
    pub fn q_len(&self, b: usize) -> usize {
        let rows = self.query_rows as i64;
        size(self.query_lengths.of(b, rows)).min(self.query_rows)
    }

    /// Number of rows of the query's rotary part that are read. If the sequences are packed and have
    /// [`SequenceTerms`](super::SequenceTerms), it ends with the last sequence that has keys.
    pub fn query_rope_rows(&self) -> usize {
        if self.terms.is_empty() || !self.packed {
            return self.query_rows;
        }
        let (mut end, mut read) = (0usize, 0);
        for b in 0..self.batch {
            end = end.saturating_add(self.q_len(b));
            if self.kv_len(b) > 0 {
                read = end;
            }
        }
        read.min(self.query_rows)
    }

    /// Number of valid keys of sequence `b`, without a shared prefix.
    pub fn kv_len(&self, b: usize) -> usize {
        let rows = self.key_rows_of(b);
        let most = if self.keys_beyond_table { usize::MAX } else { rows };
        size(self.key_lengths.of(b, rows as i64)).min(most)
    }

    /// Where the rows of sequence `b` are.
    pub fn sequence(&self, b: usize, padding: Padding) -> SequenceRows {
        let (q_len, kv_len) = (self.q_len(b), self.kv_len(b));
        let padded = |rows: usize, len: usize, pad: i64| rows.saturating_sub(size(pad)).saturating_sub(len);
        let (mut q_first, mut kv_first) = (0, 0);
        if self.packed {
            q_first = size(self.query_lengths.start(b)).min(self.query_rows);
            if self.pages.is_none() {
                kv_first = size(self.key_lengths.start(b)).min(self.key_rows);
            }
        }
        if self.query_padding.is_some() {
            q_first = padded(self.query_rows, q_len, padding.query);
        }
        if self.key_padding.is_some() {
            kv_first = padded(self.key_rows_of(b), kv_len, padding.key);
        }
        // Where the operator does not check the ends, they may exceed the row axis.
        let kv_most = match self.packed && self.pages.is_none() {
            true => self.key_rows - kv_first,
            false => kv_len,
        };
        SequenceRows {
            kv_position: match self.key_padding {
                Some(_) => kv_first,
                None => 0,
            },
            q_first,
            q_len: q_len.min(self.query_rows - q_first),
            kv_first,
            kv_len: kv_len.min(kv_most),
            prefix: self.prefix.map_or(0, |prefix| prefix.len),
        }
    }

    /// The first sequences, of which any two may differ; all later ones are like the last of these. A batch axis may
    /// be of any size, so callers look at these alone.
    pub fn distinct_sequences(&self) -> Range<usize> {
        let listed = self.list.as_ref().map_or(1, |list| list.keys.len());
        let entries = self.query_lengths.entries();
        let entries = entries.max(self.key_lengths.entries()).max(listed);
        // After the last of cumulative ends, one more sequence may differ.
        0..self.batch.min(entries.saturating_add(2))
    }
}

#[cfg(test)]
mod tests {
    use super::SequenceLengths;

    #[test]
    fn lengths_follow_from_entries_or_from_ends() {
        let spans = |lengths: Option<&[i64]>, packed| {
            let lengths = SequenceLengths::new(lengths, packed);
            [0, 1, 2].map(|b| (lengths.start(b), lengths.of(b, 7)))
        };
        assert_eq!(spans(None, false), [(0, 7); 3]);
        assert_eq!(spans(Some(&[]), false), [(0, 7); 3]);
        assert_eq!(spans(Some(&[4]), false), [(0, 4); 3]);
        assert_eq!(spans(Some(&[4, 5]), false), [(0, 4), (0, 5), (0, 0)]);
        assert_eq!(spans(Some(&[4, 9, 9]), true), [(0, 4), (4, 5), (9, 0)]);
        assert_eq!(spans(None, true), [(0, 0); 3]);
        let extreme = SequenceLengths::new(Some(&[i64::MAX, i64::MIN]), true);
        assert_eq!(extreme.of(1, 7), i64::MIN);
    }
}
