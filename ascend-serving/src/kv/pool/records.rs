//! What the caches of a pool have computed of each sequence, and when sequences changed.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::refusal::{Refused, Rule, refused};

use super::BlockPool;

/// The records of a pool. Their clock counts changes of sequences.
#[derive(Default)]
pub(super) struct Records {
    sequences: Vec<Record>,
    /// Places of sequences that are gone.
    free: Vec<usize>,
    /// Of each cache of the pool what it has of each sequence; `None` in the place of a cache that is gone.
    caches: Vec<Option<Vec<Progress>>>,
    clock: u64,
}

/// When a sequence began, and when its tokens or blocks changed last. A later sequence in the same place began later.
#[derive(Clone, Copy, Default)]
struct Record {
    began: u64,
    changed: u64,
}

/// What a cache has of a sequence.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// Tokens from the first one on whose keys and values every layer has, or is queued to have.
    computed: usize,
    /// Steps in progress.
    open: u32,
    /// The fewest tokens to which the sequence was cut while steps were in progress.
    cut: usize,
    /// The layers that the last step left out, if it did.
    missing: Option<Arc<str>>,
}

/// A sequence as it was at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceStamp {
    place: usize,
    began: u64,
    changed: u64,
}

/// A sequence's place among the records of its pool.
pub(in crate::kv) struct SequenceRecord {
    records: BlockPool,
    stamp: SequenceStamp,
}

/// A cache's place among the records of its pool.
pub(crate) struct CacheRecord {
    records: BlockPool,
    place: usize,
}

/// The tokens of a sequence in a step, counted from its first one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTokens {
    pub(crate) stamp: SequenceStamp,
    /// Those in front of the step.
    pub(crate) cached: usize,
    /// Those behind it.
    pub(crate) len: usize,
}

/// The sequences of a step in progress, for one cache of their pool or all. Unless the step [ends](StepRecord::end), its
/// sequences are left without the tokens of the step.
pub(crate) struct StepRecord {
    pool: BlockPool,
    cache: Option<Arc<CacheRecord>>,
    tokens: Vec<StepTokens>,
    ended: bool,
    /// The layers that were left out, once anything was written.
    missing: Option<Arc<str>>,
}

impl Records {
    fn tick(&mut self) -> u64 {
        self.clock = self.clock.saturating_add(1);
        self.clock
    }

    /// A place for a new sequence, of which each cache has what `progress` says.
    fn add(&mut self, progress: impl Fn(&[Progress]) -> Progress) -> SequenceStamp {
        let began = self.tick();
        let record = Record {
            began,
            changed: began,
        };
        let place = self.free.pop().unwrap_or(self.sequences.len());
        match self.sequences.get_mut(place) {
            Some(free) => *free = record,
            None => self.sequences.push(record),
        }
        for cache in self.caches.iter_mut().flatten() {
            let own = progress(cache);
            match cache.get_mut(place) {
                Some(free) => *free = own,
                None => cache.push(own),
            }
        }
        SequenceStamp {
            place,
            began,
            changed: began,
        }
    }

    /// What a cache, or each of all caches, has of a sequence.
    fn progress(
        &mut self,
        cache: Option<usize>,
        place: usize,
    ) -> impl Iterator<Item = &mut Progress> {
        let caches = self.caches.iter_mut().enumerate();
        let chosen = caches.filter(move |(at, _)| cache.is_none_or(|cache| cache == *at));
        chosen.filter_map(move |(_, of)| of.as_mut()?.get_mut(place))
    }

    /// The places of the caches.
    pub(super) fn caches(&self) -> Vec<usize> {
        let caches = self.caches.iter().enumerate();
        let alive = caches.filter_map(|(place, of)| of.as_ref().map(|_| place));
        alive.collect()
    }

    fn is_alive(&self, stamp: &SequenceStamp) -> bool {
        let record = self.sequences.get(stamp.place);
        record.is_some_and(|record| record.began == stamp.began)
    }

    /// Refuses tokens of a sequence that has changed, and those behind ones that were not computed.
    fn check(
        &mut self,
        cache: Option<usize>,
        whose: &dyn fmt::Display,
        tokens: &StepTokens,
    ) -> Result<(), Refused> {
        let StepTokens { stamp, cached, len } = *tokens;
        let record = self.sequences.get(stamp.place).copied();
        let record = record.unwrap_or_default();
        if (record.began, record.changed) != (stamp.began, stamp.changed) {
            return Err(changed(whose, record.began == stamp.began, len));
        }
        // Of a pool without a cache of this crate nothing is known; of one that several share what any has.
        let best = self
            .progress(cache, stamp.place)
            .max_by_key(|of| of.computed);
        match best {
            Some(of) if of.computed < cached => Err(behind(whose, of, cached, len)),
            _ => Ok(()),
        }
    }

    fn open(&mut self, cache: Option<usize>, tokens: &StepTokens) {
        for of in self.progress(cache, tokens.stamp.place) {
            if of.open == 0 {
                of.cut = usize::MAX;
            }
            of.open = of.open.saturating_add(1);
        }
    }

    /// The end of a step: with the layers that it left out, unless it left none.
    fn close(
        &mut self,
        cache: Option<usize>,
        tokens: &StepTokens,
        done: bool,
        missing: &Option<Arc<str>>,
    ) {
        if !self.is_alive(&tokens.stamp) {
            return;
        }
        for of in self.progress(cache, tokens.stamp.place) {
            of.open = of.open.saturating_sub(1);
            if done {
                // What was cut off meanwhile, and grown again, is not what the step computed.
                of.computed = of.computed.max(tokens.len.min(of.cut));
                of.missing = None;
            } else if missing.is_some() {
                of.computed = of.computed.min(tokens.cached);
                of.missing.clone_from(missing);
            }
        }
    }
}

#[cold]
fn changed(whose: &dyn fmt::Display, is_alive: bool, len: usize) -> Refused {
    let what = match is_alive {
        true => "grew, was cut or gave blocks back since",
        false => "is gone",
    };
    refused(
        Rule::SequenceChanged,
        format_args!("metadata of {whose} up to {len} tokens, whose sequence {what}"),
        "sequences as they were when the metadata was made",
        "make the step's metadata (`AttentionMetadata::new` or `renew`) behind the last change of its sequences, one for each step",
    )
}

#[cold]
fn behind(whose: &dyn fmt::Display, of: &Progress, cached: usize, len: usize) -> Refused {
    let computed = of.computed;
    let given =
        format!("{cached} tokens of {whose} in front, of which the first {computed} are computed");
    let allowed = match len.saturating_sub(computed) {
        new if len > cached => {
            format!("{new} or more new tokens: `BatchRequest::of(&sequence, {new})`")
        }
        new => format!("{computed} tokens, or all once a step has computed the last {new}"),
    };
    match &of.missing {
        Some(missing) => refused(
            Rule::StepLayersMissing,
            format_args!("{given}: the step of the others ended without layers {missing}"),
            allowed,
            "compute the tokens again, in every layer: the last ones of the sequence, as many as are not computed; or truncate the sequence to \
             those that are computed, or to 0 where some were given back, and grow it again",
        ),
        None => refused(
            Rule::SequenceGap,
            given,
            allowed,
            "compute all tokens that a sequence grew by in one step, and grow once for each step; where tokens are not wanted, truncate \
             it to those that are computed, or to 0 where some were given back; where something else wrote them, such as a copy from another cache, say so by \
             `PagedKvCache::set_computed`",
        ),
    }
}

impl SequenceRecord {
    fn add(pool: &BlockPool, progress: impl Fn(&[Progress]) -> Progress) -> Self {
        Self {
            stamp: lock(pool.records()).add(progress),
            records: pool.clone(),
        }
    }

    /// Of a sequence of which every cache has so many tokens.
    pub(in crate::kv) fn new(pool: &BlockPool, computed: usize) -> Self {
        Self::add(pool, |_| Progress {
            computed,
            ..Progress::default()
        })
    }

    /// Of a sequence that begins with so many tokens of this one.
    pub(in crate::kv) fn fork(&self, tokens: usize) -> Self {
        Self::add(&self.records, |cache| {
            let of = cache.get(self.stamp.place).cloned().unwrap_or_default();
            Progress {
                computed: of.computed.min(tokens),
                missing: of.missing.filter(|_| of.computed < tokens),
                ..Progress::default()
            }
        })
    }

    pub(in crate::kv) fn stamp(&self) -> SequenceStamp {
        self.stamp
    }

    /// Says that tokens were added, or blocks given back.
    pub(in crate::kv) fn change(&mut self) {
        self.change_to(None);
    }

    /// Says that the sequence was cut to so many tokens.
    pub(in crate::kv) fn cut(&mut self, tokens: usize) {
        self.change_to(Some(tokens));
    }

    fn change_to(&mut self, tokens: Option<usize>) {
        let place = self.stamp.place;
        let mut records = lock(self.records.records());
        self.stamp.changed = records.tick();
        if let Some(record) = records.sequences.get_mut(place) {
            record.changed = self.stamp.changed;
        }
        let Some(tokens) = tokens else { return };
        for of in records.progress(None, place) {
            of.computed = of.computed.min(tokens);
            of.cut = of.cut.min(tokens);
            if of.computed == tokens {
                of.missing = None;
            }
        }
    }
}

impl Drop for SequenceRecord {
    fn drop(&mut self) {
        let place = self.stamp.place;
        let mut records = lock(self.records.records());
        if let Some(record) = records.sequences.get_mut(place) {
            *record = Record::default();
            records.free.push(place);
        }
    }
}

impl fmt::Debug for SequenceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stamp.fmt(f)
    }
}

impl CacheRecord {
    /// A cache that has no token of any sequence.
    pub(in crate::kv) fn new(pool: &BlockPool) -> Arc<Self> {
        let mut records = lock(pool.records());
        let none = Some(vec![Progress::default(); records.sequences.len()]);
        let place = match records.caches.iter().position(Option::is_none) {
            Some(place) => place,
            None => records.caches.len(),
        };
        match records.caches.get_mut(place) {
            Some(free) => *free = none,
            None => records.caches.push(none),
        }
        drop(records);
        Arc::new(Self {
            records: pool.clone(),
            place,
        })
    }

    fn records(&self) -> &Mutex<Records> {
        self.records.records()
    }

    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// Its pool.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.records
    }

    /// The tokens that it has of a sequence, from the first one on.
    pub(in crate::kv) fn computed(&self, sequence: SequenceStamp) -> usize {
        let mut records = lock(self.records());
        let of = records.progress(Some(self.place), sequence.place).next();
        of.map_or(0, |of| of.computed)
    }

    /// Says that it has so many tokens of a sequence.
    pub(in crate::kv) fn set_computed(&self, sequence: SequenceStamp, tokens: usize) {
        let mut records = lock(self.records());
        for of in records.progress(Some(self.place), sequence.place) {
            of.computed = of.computed.max(tokens);
            of.missing = None;
        }
    }

    /// Refuses a sequence of which it has not all tokens in front of a step.
    pub(crate) fn check(
        &self,
        whose: &dyn fmt::Display,
        tokens: StepTokens,
    ) -> Result<(), Refused> {
        lock(self.records()).check(Some(self.place), whose, &tokens)
    }
}

impl Drop for CacheRecord {
    fn drop(&mut self) {
        if let Some(place) = lock(self.records()).caches.get_mut(self.place) {
            *place = None;
        }
    }
}

impl fmt::Debug for CacheRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CacheRecord").field(&self.place).finish()
    }
}

impl BlockPool {
    /// Refuses a sequence of which no cache of the pool has all tokens in front of a step.
    pub(crate) fn check_computed(
        &self,
        whose: &dyn fmt::Display,
        tokens: StepTokens,
    ) -> Result<(), Refused> {
        lock(self.records()).check(None, whose, &tokens)
    }
}

impl StepRecord {
    /// Begins a step of these sequences, each with its request, in one cache of the pool or in all.
    ///
    /// # Errors
    /// [`Rule::SequenceChanged`], [`Rule::SequenceGap`], [`Rule::StepLayersMissing`].
    pub(crate) fn begin(
        pool: &BlockPool,
        cache: Option<&Arc<CacheRecord>>,
        tokens: impl Iterator<Item = (usize, StepTokens)>,
    ) -> Result<Self, Refused> {
        let place = cache.map(|cache| cache.place);
        let mut all = Vec::with_capacity(tokens.size_hint().0);
        let mut records = lock(pool.records());
        for (request, of) in tokens {
            records.check(place, &format_args!("request {request}"), &of)?;
            all.push(of);
        }
        all.iter().for_each(|of| records.open(place, of));
        drop(records);
        Ok(Self {
            pool: pool.clone(),
            cache: cache.cloned(),
            tokens: all,
            ended: false,
            missing: None,
        })
    }

    /// Begins a step that has ended once more.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    pub(crate) fn again(&mut self) -> Result<(), Refused> {
        let place = self.cache.as_ref().map(|cache| cache.place);
        let mut records = lock(self.pool.records());
        for of in &self.tokens {
            records.check(place, &"a step that begins again", of)?;
        }
        if std::mem::replace(&mut self.ended, false) {
            self.tokens.iter().for_each(|of| records.open(place, of));
        }
        Ok(())
    }

    /// Says that all layers are queued.
    pub(crate) fn end(&mut self) {
        self.close(true);
    }

    /// Says which layers are missing of a step that wrote some.
    pub(crate) fn lacks(&mut self, missing: &Arc<str>) {
        self.missing = Some(Arc::clone(missing));
    }

    fn close(&mut self, done: bool) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let place = self.cache.as_ref().map(|cache| cache.place);
        let mut records = lock(self.pool.records());
        for of in &self.tokens {
            records.close(place, of, done, &self.missing);
        }
    }
}

impl Drop for StepRecord {
    fn drop(&mut self) {
        self.close(false);
    }
}

impl fmt::Debug for StepRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepRecord")
            .field("sequences", &self.tokens.len())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
