//! The entry of a sequence in the table of its pool.

use std::fmt;

use crate::kv::pool::{Block, BlockPool};
use crate::sharing::lock;

use super::{Progress, SequenceStamp, SequenceVersion};

/// The entry of a sequence in the table of its pool, freed on drop.
pub(in crate::kv) struct SequenceEntry {
    pool: BlockPool,
    stamp: SequenceStamp,
}

impl SequenceEntry {
    fn add(pool: &BlockPool, progress: impl Fn(&[Progress]) -> Progress) -> Self {
        Self { stamp: lock(pool.progress_table()).add(progress), pool: pool.clone() }
    }

    /// The entry of a sequence of which every cache has `computed` tokens.
    pub(in crate::kv) fn new(pool: &BlockPool, computed: usize) -> Self {
        Self::add(pool, |_| Progress { computed, ..Progress::default() })
    }

    /// The entry of a sequence that begins with the first `tokens` tokens of this one.
    pub(in crate::kv) fn fork(&self, tokens: usize) -> Self {
        Self::add(&self.pool, |cache| {
            let own = &cache[self.stamp.place];
            Progress {
                computed: own.settled().min(tokens),
                missing: own.missing.clone().filter(|_| own.computed < tokens),
                moved: own.moved.start.min(tokens)..own.moved.end.min(tokens),
                ..Progress::default()
            }
        })
    }

    /// The fewest tokens before a step of the sequence that writes and is in progress in some cache, if one is.
    pub(in crate::kv) fn written_from(&self) -> Option<usize> {
        let mut table = lock(self.pool.progress_table());
        let caches = table.progress(None, self.stamp.place);
        let open = caches.filter(|progress| progress.open > 0);
        let writes_from = open.map(|progress| progress.writes_from);
        writes_from.filter(|from| *from < usize::MAX).min()
    }

    /// Gives blocks of the sequence up. What others hold too is kept until the sequence's steps in progress are over,
    /// which may still read it.
    pub(in crate::kv) fn give_up(&self, blocks: impl Iterator<Item = Block>) {
        let place = self.stamp.place;
        for block in blocks {
            if !block.is_shared() {
                continue;
            }
            let mut table = lock(self.pool.progress_table());
            if table.sequences[place].open > 0 {
                table.kept.push((place, block));
            }
        }
    }

    pub(in crate::kv) fn stamp(&self) -> SequenceStamp {
        self.stamp
    }

    /// Records that tokens were added, or blocks given back.
    pub(in crate::kv) fn change(&mut self) {
        self.change_to(None);
    }

    /// Records that the sequence was cut to `tokens` tokens.
    pub(in crate::kv) fn cut(&mut self, tokens: usize) {
        self.change_to(Some(tokens));
    }

    /// Records that the tokens which have moved are where they stay.
    pub(in crate::kv) fn settle_moves(&self) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(None, self.stamp.place) {
            progress.moved = 0..0;
        }
    }

    /// Records that the sequence has another block in place of one that its steps in progress may write, with a copy of
    /// what was in it: what they write is not the sequence's.
    pub(in crate::kv) fn replace_block(&mut self) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(None, self.stamp.place) {
            progress.cut = progress.cut.min(progress.writes_from);
            // Of tokens that a step computes once more, some layers have the old numbers and some the new ones.
            if progress.open > 0 {
                progress.computed = progress.computed.min(progress.writes_from);
            }
        }
    }

    fn change_to(&mut self, tokens: Option<usize>) {
        let place = self.stamp.place;
        let mut table = lock(self.pool.progress_table());
        self.stamp.changed = table.tick();
        table.sequences[place].changed = self.stamp.changed;
        let Some(tokens) = tokens else { return };
        for progress in table.progress(None, place) {
            progress.computed = progress.computed.min(tokens);
            progress.cut = progress.cut.min(tokens);
            if progress.computed == tokens {
                progress.missing = None;
            }
        }
    }
}

impl Drop for SequenceEntry {
    fn drop(&mut self) {
        let place = self.stamp.place;
        let mut table = lock(self.pool.progress_table());
        let open = table.sequences[place].open;
        table.sequences[place] = SequenceVersion { open, ..SequenceVersion::default() };
        if open == 0 {
            table.free.push(place);
        }
    }
}

impl fmt::Debug for SequenceEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stamp.fmt(f)
    }
}
