//! The keys that a row's list of blocks names.

use super::SparseFlashProblem;
use std::fmt;
use std::ops::Range;

/// An entry of `sparseIndices` by which a row reads other keys than its list seems to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFault {
    /// Place of the entry in its row.
    pub place: usize,
    /// The entry.
    pub entry: i64,
    /// What is wrong with it.
    pub kind: EntryFaultKind,
}

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFaultKind {
    /// It is below -1.
    Negative,
    /// Its block begins past the keys that the row may read, whose number this is.
    Beyond(usize),
    /// The row named its block before.
    Twice,
    /// It stands after the last entry that the row reads.
    Unread,
}

impl fmt::Display for EntryFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EntryFault { place, entry, kind } = self;
        write!(f, "entry {place} names block {entry}")?;
        match kind {
            EntryFaultKind::Negative => f.write_str(", allowed: blocks, and -1 after the last"),
            EntryFaultKind::Beyond(keys) => {
                write!(f, ", which begins past the {keys} keys that the row may read, and is left out")
            }
            EntryFaultKind::Twice => f.write_str(" again, whose keys count twice"),
            EntryFaultKind::Unread => f.write_str(
                ", which is not read: a row reads entries up to the first -1, and no more than it has blocks to read",
            ),
        }
    }
}

impl SparseFlashProblem {
    /// The entries that a row which may read the first `keys` keys of its sequence reads: as many as these have blocks,
    /// up to the first that is negative.
    fn read<'e>(&self, entries: &'e [i64], keys: usize) -> &'e [i64] {
        let all = &entries[..entries.len().min(keys.div_ceil(self.block))];
        let end = all.iter().position(|&entry| entry < 0);
        &all[..end.unwrap_or(all.len())]
    }

    /// The keys that a row reads, in its order, of the first `keys` of its sequence: those of each block that begins
    /// among them.
    pub fn chosen<'e>(&self, entries: &'e [i64], keys: usize) -> impl Iterator<Item = Range<usize>> + Clone + 'e {
        let block = self.block;
        let entries = self.read(entries, keys).iter();
        let first = entries.filter_map(move |&entry| usize::try_from(entry).ok()?.checked_mul(block));
        let first = first.filter(move |&first| first < keys);
        first.map(move |first| first..keys.min(first.saturating_add(block)))
    }

    /// The first entry of a row by which it reads other keys than the list seems to say. `seen` is memory for the
    /// search.
    pub fn entry_fault(&self, entries: &[i64], keys: usize, seen: &mut Vec<bool>) -> Option<EntryFault> {
        let blocks = keys.div_ceil(self.block);
        let read = self.read(entries, keys).len();
        seen.clear();
        seen.resize(blocks, false);
        let mut numbered = entries.iter().enumerate();
        numbered.find_map(|(place, &entry)| {
            let kind = match usize::try_from(entry) {
                Err(_) if entry == -1 => return None,
                Err(_) => EntryFaultKind::Negative,
                Ok(_) if place >= read => EntryFaultKind::Unread,
                Ok(block) if block >= blocks => EntryFaultKind::Beyond(keys),
                Ok(block) if std::mem::replace(&mut seen[block], true) => EntryFaultKind::Twice,
                Ok(_) => return None,
            };
            Some(EntryFault { place, entry, kind })
        })
    }
}
