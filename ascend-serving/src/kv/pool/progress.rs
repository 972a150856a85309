//! How many tokens of each sequence the caches of a pool have computed, and when sequences changed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ascend_attention::Violation;

use crate::rules;
use crate::sharing::lock;

use super::{Block, BlockPool};

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

/// The entry of a sequence in the table of its pool, freed on drop.
pub(in crate::kv) struct SequenceEntry {
    pool: BlockPool,
    stamp: SequenceStamp,
}

/// The entry of a cache in the table of its pool, freed on drop.
pub(crate) struct CacheEntry {
    pool: BlockPool,
    place: usize,
    /// Whether tokens move in this cache together with another one alone.
    paired: AtomicBool,
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

/// The sequences of a step in progress, for one cache of their pool or all. Unless the step
/// [ends](StepProgress::end), the tokens of the step do not count as computed.
pub(crate) struct StepProgress {
    pool: BlockPool,
    cache: Option<Arc<CacheEntry>>,
    tokens: Vec<StepTokens>,
    /// When it began.
    began: u64,
    ended: bool,
    /// The layers that were left out, once any layer was written.
    missing: Option<Arc<str>>,
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

    /// Refuses tokens of a sequence that has changed, tokens after ones that were not computed, and unless they are to
    /// be recomputed, tokens that were computed already, and those of a sequence with a step in progress.
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
        format_args!("{tokens} of {whose}, of whose sequence a step is in progress"),
        "one step of a sequence at a time",
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
             really wrote, such as a copy from another cache: name them by `mark_computed` of `Attention` or \
             `PagedKvCache`, otherwise attention reads what the blocks held before",
        ),
    }
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

impl CacheEntry {
    /// A cache that has no token of any sequence.
    pub(crate) fn new(pool: &BlockPool) -> Arc<Self> {
        let mut table = lock(pool.progress_table());
        let none =
            Some(CacheProgress { joined: table.tick(), sequences: vec![Progress::default(); table.sequences.len()] });
        let place = match table.caches.iter().position(Option::is_none) {
            Some(place) => place,
            None => table.caches.len(),
        };
        match table.caches.get_mut(place) {
            Some(free) => *free = none,
            None => table.caches.push(none),
        }
        drop(table);
        Arc::new(Self { pool: pool.clone(), place, paired: AtomicBool::new(false) })
    }

    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// Its pool.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Records that tokens move in this cache together with another one alone.
    pub(crate) fn pair(&self) {
        self.paired.store(true, Ordering::Relaxed);
    }

    /// Whether tokens move in this cache together with another one alone.
    pub(in crate::kv) fn is_paired(&self) -> bool {
        self.paired.load(Ordering::Relaxed)
    }

    /// Whether a step of a sequence is in progress in this cache.
    pub(in crate::kv) fn has_open_step(&self, sequence: SequenceStamp) -> bool {
        let mut table = lock(self.pool.progress_table());
        let mut progress = table.progress(Some(self.place), sequence.place);
        progress.any(|progress| progress.open > 0)
    }

    /// The number of first tokens of a sequence that this cache has.
    pub(crate) fn computed_tokens(&self, sequence: SequenceStamp) -> usize {
        let mut table = lock(self.pool.progress_table());
        let progress = table.progress(Some(self.place), sequence.place).next();
        progress.map_or(0, |progress| progress.settled())
    }

    /// Records that this cache has the first `tokens` tokens of a sequence.
    pub(crate) fn mark_computed(&self, sequence: SequenceStamp, tokens: usize) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(Some(self.place), sequence.place) {
            if progress.computed < tokens {
                progress.computed = tokens;
                progress.missing = None;
            }
        }
    }

    /// Records that this cache has lost the tokens of a sequence from `kept` on.
    pub(in crate::kv) fn lose(&self, sequence: SequenceStamp, kept: usize) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(Some(self.place), sequence.place) {
            progress.lose(kept);
        }
    }

    /// Refuses a step if this cache does not have all tokens of the sequence before it.
    pub(crate) fn check(&self, whose: &dyn fmt::Display, tokens: StepTokens) -> Result<(), Violation> {
        lock(self.pool.progress_table()).check(Some(self.place), whose, &tokens)
    }
}

impl Drop for CacheEntry {
    fn drop(&mut self) {
        lock(self.pool.progress_table()).caches[self.place] = None;
        self.pool.forget_copies(self.place);
    }
}

impl fmt::Debug for CacheEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CacheEntry").field(&self.place).finish()
    }
}

impl BlockPool {
    /// The number of caches that have the pool.
    pub(crate) fn caches(&self) -> usize {
        lock(self.progress_table()).caches().len()
    }

    /// Refuses tokens that do not continue what every cache of the pool has. A pool without a cache of this crate has
    /// no progress.
    pub(crate) fn check_tokens(&self, whose: &dyn fmt::Display, tokens: StepTokens) -> Result<(), Violation> {
        lock(self.progress_table()).check(None, whose, &tokens)
    }

    /// The number of first tokens of a sequence that every cache of the pool has. `None` for a pool without a cache
    /// of this crate, for which it is not known.
    pub(crate) fn computed_tokens(&self, sequence: SequenceStamp) -> Option<usize> {
        let mut table = lock(self.progress_table());
        let each = table.progress(None, sequence.place);
        each.map(|progress| progress.settled()).min()
    }
}

impl StepProgress {
    /// Begins a step of these sequences, each with its request, in one cache of the pool or in all.
    ///
    /// # Errors
    /// [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS),
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub(crate) fn begin(
        pool: &BlockPool,
        cache: Option<&Arc<CacheEntry>>,
        tokens: impl Iterator<Item = (usize, StepTokens)>,
    ) -> Result<Self, Violation> {
        let place = cache.map(|cache| cache.place);
        let mut all = Vec::with_capacity(tokens.size_hint().0);
        let mut table = lock(pool.progress_table());
        for (request, tokens) in tokens {
            table.check(place, &format_args!("request {request}"), &tokens)?;
            all.push(tokens);
        }
        all.iter().for_each(|tokens| table.open(place, tokens));
        let began = table.tick();
        drop(table);
        Ok(Self { pool: pool.clone(), cache: cache.cloned(), tokens: all, began, ended: false, missing: None })
    }

    /// Whether the step writes tokens, and does not only read. Steps of no sequence are not known to read only.
    pub(crate) fn writes(&self) -> bool {
        self.tokens.is_empty() || self.tokens.iter().any(|tokens| tokens.len > tokens.cached)
    }

    /// Says that all layers are queued.
    pub(crate) fn end(&mut self) {
        self.close(true);
    }

    /// Records which layers are missing in a step that wrote some.
    pub(crate) fn record_missing(&mut self, missing: &Arc<str>) {
        self.missing = Some(Arc::clone(missing));
    }

    /// Records that a write of the step has lost tokens in front of it: those from the last multiple of `group` on.
    pub(crate) fn lose_group(&self, group: usize) {
        let place = self.cache.as_ref().map(|cache| cache.place);
        let mut table = lock(self.pool.progress_table());
        for tokens in &self.tokens {
            if !table.is_alive(&tokens.stamp) {
                continue;
            }
            let kept = tokens.cached - tokens.cached % group.max(1);
            for progress in table.progress_of_step(place, self.began, tokens.stamp.place) {
                progress.lose(kept);
            }
        }
    }

    fn close(&mut self, done: bool) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let place = self.cache.as_ref().map(|cache| cache.place);
        let mut given_back = Vec::new();
        let mut table = lock(self.pool.progress_table());
        for tokens in &self.tokens {
            let step = (place, self.began);
            table.close(step, tokens, done, &self.missing, &mut given_back);
        }
        drop(table);
    }
}

impl Drop for StepProgress {
    fn drop(&mut self) {
        self.close(false);
    }
}

impl fmt::Debug for StepProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepProgress")
            .field("sequences", &self.tokens.len())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
