//! How many tokens of each sequence the caches of a pool have computed, and when sequences changed.

mod cache_entry;
mod sequence_entry;
mod step_progress;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_attention::Violation;

use crate::rules;

use super::Block;

pub(crate) use cache_entry::CacheEntry;
pub(in crate::kv) use sequence_entry::SequenceEntry;
pub(crate) use step_progress::StepProgress;

/// The versions of a pool's sequences, and how many tokens of each its caches have computed. `clock` counts changes of
/// sequences.
#[derive(Default)]
pub(super) struct ProgressTable {
    sequences: Vec<SequenceVersion>,
    /// Indices of dropped sequences, to be used again.
    free: Vec<usize>,
    /// The progress of each cache of the pool; `None` at the index of a dropped cache.
    caches: Vec<Option<CacheProgress>>,
    clock: u64,
    /// Blocks that sequences gave up while steps of them were in progress and others held the blocks, by the indices of
    /// the sequences. Held until those steps are over, they stay shared, so that the others write to copies.
    kept: Vec<(usize, Block)>,
}

/// When a sequence began, and when its tokens or blocks changed last. A later sequence at the same index began later.
#[derive(Clone, Copy, Default)]
struct SequenceVersion {
    /// 0 for a sequence that was dropped.
    began: u64,
    changed: u64,
    /// The number of steps in progress, in whichever cache. The index is not used again before they are over.
    open: u32,
}

/// The progress of a cache.
struct CacheProgress {
    /// When it joined the pool.
    joined: u64,
    /// Its progress in each sequence.
    sequences: Vec<Progress>,
}

/// How many tokens of a sequence a cache has.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// The number of first tokens whose keys and values every layer has, or is queued to have.
    computed: usize,
    /// The number of steps in progress.
    open: u32,
    /// The tokens before the step in progress that writes; `usize::MAX` if all of them only read.
    writes_from: usize,
    /// The fewest tokens to which the sequence was cut while steps were in progress. Where it got another block in
    /// place of one that they write, the tokens before the steps.
    cut: usize,
    /// The layers that the last step left out, if it left out any.
    missing: Option<Arc<str>>,
    /// The positions from the first to the last one that tokens have moved to since the sequence was cut.
    moved: Range<usize>,
}

/// A sequence, and its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceStamp {
    place: usize,
    began: u64,
    changed: u64,
}

impl SequenceStamp {
    /// Its place in the table of its pool, which another sequence may get when it is gone.
    pub(crate) fn place(&self) -> usize {
        self.place
    }

    /// A number that grows with every sequence, which distinguishes those that use one place after another.
    pub(crate) fn began(&self) -> u64 {
        self.began
    }
}

/// The tokens of a sequence in a step, counted from its first one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTokens {
    pub(crate) stamp: SequenceStamp,
    /// The tokens before the step.
    pub(crate) cached: usize,
    /// The tokens after the step.
    pub(crate) len: usize,
    /// Whether the step may compute tokens that are computed already.
    pub(crate) recompute: bool,
}

/// The positions from the first to the last one of two ranges, of which either may be empty.
pub(in crate::kv) fn spanning(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    match (one.is_empty(), other.is_empty()) {
        (true, _) => other.clone(),
        (_, true) => one.clone(),
        _ => one.start.min(other.start)..one.end.max(other.end),
    }
}

impl Progress {
    /// Records that the tokens from `kept` on are lost, those of steps in progress among them.
    fn lose(&mut self, kept: usize) {
        self.computed = self.computed.min(kept);
        self.cut = self.cut.min(kept);
    }

    /// The number of first tokens that every layer has, whatever becomes of the steps in progress.
    fn settled(&self) -> usize {
        match self.open {
            0 => self.computed,
            _ => self.computed.min(self.writes_from),
        }
    }
}

impl ProgressTable {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Adds a sequence; `progress` computes the progress of each cache in it.
    fn add(&mut self, progress: impl Fn(&[Progress]) -> Progress) -> SequenceStamp {
        let began = self.tick();
        let version = SequenceVersion { began, changed: began, open: 0 };
        let place = self.free.pop().unwrap_or(self.sequences.len());
        match self.sequences.get_mut(place) {
            Some(free) => *free = version,
            None => self.sequences.push(version),
        }
        for cache in self.caches.iter_mut().flatten() {
            let own = progress(&cache.sequences);
            match cache.sequences.get_mut(place) {
                Some(free) => *free = own,
                None => cache.sequences.push(own),
            }
        }
        SequenceStamp { place, began, changed: began }
    }

    /// The progress of one cache, or of every cache, in a sequence.
    fn progress(&mut self, cache: Option<usize>, place: usize) -> impl Iterator<Item = &mut Progress> {
        self.progress_of_step(cache, u64::MAX, place)
    }

    /// The progress in the sequence of a step, of the caches that the step is of and that were there when it began.
    fn progress_of_step(
        &mut self,
        cache: Option<usize>,
        began: u64,
        place: usize,
    ) -> impl Iterator<Item = &mut Progress> {
        let caches = self.caches.iter_mut().enumerate();
        let chosen = caches.filter(move |(at, _)| cache.is_none_or(|cache| cache == *at));
        let chosen = chosen.filter_map(|(_, cache)| cache.as_mut());
        let joined = chosen.filter(move |cache| cache.joined <= began);
        joined.filter_map(move |cache| cache.sequences.get_mut(place))
    }

    /// The indices of the caches.
    pub(super) fn caches(&self) -> Vec<usize> {
        let caches = self.caches.iter().enumerate();
        let alive = caches.filter_map(|(place, progress)| progress.as_ref().map(|_| place));
        alive.collect()
    }

    fn is_alive(&self, stamp: &SequenceStamp) -> bool {
        let version = self.sequences.get(stamp.place);
        version.is_some_and(|version| version.began == stamp.began)
    }

    /// Refuses tokens of a sequence that has changed, or was not cut behind tokens that have moved, tokens after ones
    /// that were not computed, and unless they are to be recomputed, tokens that were computed already, and those of a
    /// sequence with a step in progress.
    fn check(&mut self, cache: Option<usize>, whose: &dyn fmt::Display, tokens: &StepTokens) -> Result<(), Violation> {
        let StepTokens { stamp, cached, len, recompute } = *tokens;
        let is_alive = self.is_alive(&stamp);
        if !is_alive || self.sequences[stamp.place].changed != stamp.changed {
            return Err(changed_sequence(whose, is_alive, len));
        }
        // A pool without a cache of this crate has no progress; where several caches share the pool, the least
        // counts.
        let open = self.progress(cache, stamp.place).filter(|own| own.open > 0);
        let writes_from = open.map(|own| own.writes_from).min();
        let uncut = self.progress(cache, stamp.place).find(|own| !own.moved.is_empty());
        if let Some(Progress { moved, .. }) = uncut.filter(|_| cached < len) {
            return Err(uncut_moves(whose, moved));
        }
        let least = self.progress(cache, stamp.place).min_by_key(|progress| progress.computed);
        match least {
            Some(progress) if progress.computed < cached => Err(missing_tokens(whose, progress, cached, len)),
            // A step that only reads may do so beside others that read, or write behind what it reads.
            Some(_) if cached == len && writes_from.is_none_or(|from| cached <= from) => Ok(()),
            Some(progress) if cached < progress.computed && cached < len && !recompute => {
                Err(computed_tokens(whose, cached, progress.computed, len))
            }
            Some(_) if writes_from.is_some() => Err(open_tokens(whose, cached, len)),
            _ => Ok(()),
        }
    }

    fn open(&mut self, cache: Option<usize>, tokens: &StepTokens) {
        self.sequences[tokens.stamp.place].open += 1;
        for progress in self.progress(cache, tokens.stamp.place) {
            if progress.open == 0 {
                progress.cut = usize::MAX;
                progress.writes_from = usize::MAX;
            }
            progress.open += 1;
            if tokens.len > tokens.cached {
                progress.writes_from = progress.writes_from.min(tokens.cached);
            }
        }
    }

    /// Ends a step: with the layers that it left out, unless it left out none. The blocks that were kept for it are
    /// moved to `given_back`, to be dropped without the lock.
    fn close(
        &mut self,
        (cache, began): (Option<usize>, u64),
        tokens: &StepTokens,
        done: bool,
        missing: &Option<Arc<str>>,
        given_back: &mut Vec<Block>,
    ) {
        let place = tokens.stamp.place;
        let is_alive = self.is_alive(&tokens.stamp);
        let open = &mut self.sequences[place].open;
        *open -= 1;
        if *open == 0 {
            let kept = self.kept.extract_if(.., |(sequence, _)| *sequence == place);
            given_back.extend(kept.map(|(_, block)| block));
            if !is_alive {
                self.free.push(place);
            }
        }
        if !is_alive {
            return;
        }
        for progress in self.progress_of_step(cache, began, place) {
            progress.open -= 1;
            if tokens.len == tokens.cached {
                // It has read only.
                continue;
            }
            // While a step writes, no other one that does begins.
            progress.writes_from = usize::MAX;
            if done {
                // Tokens that were cut off meanwhile, and grown again, are not those that the step computed.
                progress.computed = progress.computed.max(tokens.len.min(progress.cut));
                progress.missing = None;
            } else if missing.is_some() {
                progress.computed = progress.computed.min(tokens.cached);
                progress.missing.clone_from(missing);
            }
        }
    }
}

#[cold]
fn changed_sequence(whose: &dyn fmt::Display, is_alive: bool, len: usize) -> Violation {
    let what = match is_alive {
        true => "grew, was cut or gave blocks back since",
        false => "is gone",
    };
    Violation::new(
        &rules::SEQUENCE_CHANGED,
        format_args!("metadata of {whose} up to {len} tokens, whose sequence {what}"),
        "sequences as they were when the metadata was made",
        "make the step's metadata (`AttentionMetadata::new` or `renew`) after the last `grow`, `truncate` or \
         `drop_before` of its sequences, once for each step",
    )
}

#[cold]
fn computed_tokens(whose: &dyn fmt::Display, cached: usize, computed: usize, len: usize) -> Violation {
    let last = computed.min(len) - 1;
    rules::SEQUENCE_COMPUTED.broken(
        format_args!("tokens {cached} to {last} of {whose}, which a step has computed"),
        match len.saturating_sub(computed) {
            0 => "tokens that no step has computed yet".into(),
            new => {
                format!("the {new} tokens that no step has computed yet: `of(&sequence, {new})`")
            }
        },
    )
}

#[cold]
fn open_tokens(whose: &dyn fmt::Display, cached: usize, len: usize) -> Violation {
    let tokens = match len - cached {
        0 => format!("the first {len} tokens"),
        _ => format!("tokens {cached} to {}", len - 1),
    };
    rules::SEQUENCE_IN_PROGRESS.broken(
        format_args!("{tokens} of {whose}, of whose sequence a step, or a move of tokens, is in progress"),
        "one step of a sequence at a time",
    )
}

#[cold]
fn uncut_moves(whose: &dyn fmt::Display, moved: &Range<usize>) -> Violation {
    let (first, last) = (moved.start, moved.end.saturating_sub(1));
    Violation::new(
        &rules::SEQUENCE_MOVED,
        format_args!("new tokens of {whose}, in which tokens have moved to positions from {first} to {last}"),
        "new tokens behind the cut that ends a move",
        "cut the sequence behind the last token that is to stay (`truncate`, with its length where all stay), and make \
         the metadata again",
    )
}

#[cold]
fn missing_tokens(whose: &dyn fmt::Display, progress: &Progress, cached: usize, len: usize) -> Violation {
    let computed = progress.computed;
    let given = format!("{cached} tokens of {whose} in front, of which the first {computed} are computed");
    let allowed = match len - computed {
        new if len > cached => {
            format!("{new} new tokens: `of(&sequence, {new})`")
        }
        new => format!("{computed} tokens, or all once a step has computed the last {new}"),
    };
    match &progress.missing {
        Some(missing) => Violation::new(
            &rules::STEP_LAYERS_MISSING,
            format_args!("{given}: the step that wrote the next ones ended without {missing}"),
            allowed,
            "begin a step with the last tokens of the sequence, all that are not computed, and queue every layer; or \
             truncate the sequence to the computed ones, to 0 where blocks were given back, and grow it again",
        ),
        None => Violation::new(
            &rules::SEQUENCE_GAP,
            given,
            allowed,
            "compute all tokens that the sequence grew by in one step, and grow once for each step; a step that failed \
             or was dropped before its first layer has computed none, so begin it again; tokens that are not wanted: \
             truncate the sequence to the computed ones, to 0 where blocks were given back; tokens that something else \
             really wrote, such as a copy from another cache: name them by `mark_computed` of what begins \
             the steps or of the `PagedKvCache`, otherwise attention reads what the blocks held before",
        ),
    }
}
