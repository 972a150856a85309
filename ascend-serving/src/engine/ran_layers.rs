//! Which layers of a step have run, and what is said when it ends without some.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use crate::kv::StepRecord;
use crate::refusal::{Refused, Rule, refused};

/// Layers of a step. Once all have run, the records of its sequences have their tokens. When it is dropped and some have not,
/// their keys and values are missing from the cache: the records say so to the next step of the sequences, and a warning tells
/// of it. No warning is given behind an error, which the caller has got.
#[derive(Debug)]
pub(crate) struct RanLayers {
    ran: Vec<bool>,
    /// Layers that have not run.
    left: usize,
    /// Whether the cache may have been written to.
    wrote: bool,
    told: bool,
    records: Vec<StepRecord>,
}

impl RanLayers {
    /// So many layers of a step of these sequences.
    pub(crate) fn new(layers: usize, records: Vec<StepRecord>) -> Self {
        Self {
            ran: vec![false; layers],
            left: layers,
            wrote: false,
            told: false,
            records,
        }
    }

    /// Leaves the warning to somebody else.
    pub(crate) fn silence(&mut self) {
        self.told = true;
    }

    /// Refuses a layer that has run already while others have not. Once all have, they may all run again.
    pub(crate) fn once(&self, layer: usize) -> Result<(), Refused> {
        match self.ran.get(layer) {
            Some(true) if self.left > 0 => Err(self.twice(layer)),
            _ => Ok(()),
        }
    }

    #[cold]
    fn twice(&self, layer: usize) -> Refused {
        refused(
            Rule::StepLayersMissing,
            format_args!(
                "layer {layer} a second time, while layers {} are left",
                self.missing()
            ),
            format_args!("each layer below {} once", self.ran.len()),
            "say which layer of the cache each call is, counted from 0; to compute a step again, begin it again",
        )
    }

    /// Says that a layer is about to be written to the cache. Behind the last one that begins the step again.
    ///
    /// # Errors
    /// As for [`StepRecord::again`].
    pub(crate) fn write(&mut self) -> Result<(), Refused> {
        if self.left == 0 {
            self.records.iter_mut().try_for_each(StepRecord::again)?;
            self.ran.fill(false);
            self.left = self.ran.len();
        }
        self.wrote = true;
        Ok(())
    }

    /// Takes note of how a layer went.
    pub(crate) fn note<R, E>(&mut self, layer: usize, outcome: Result<R, E>) -> Result<R, E> {
        match (&outcome, self.ran.get_mut(layer)) {
            (Ok(_), Some(ran)) => {
                if !std::mem::replace(ran, true) {
                    self.left = self.left.saturating_sub(1);
                }
                if self.left == 0 {
                    self.records.iter_mut().for_each(StepRecord::end);
                }
            }
            (Ok(_), None) => {}
            (Err(_), _) => self.silence(),
        }
        outcome
    }

    /// The end of the step.
    ///
    /// # Errors
    /// [`Rule::StepLayersMissing`] if some layers have not run.
    pub(crate) fn end(&mut self) -> Result<(), Refused> {
        self.silence();
        if self.left == 0 {
            return Ok(());
        }
        Err(refused(
            Rule::StepLayersMissing,
            format_args!("a step that ends without layers {}", self.missing()),
            format_args!("all {} layers", self.ran.len()),
            "begin the step again with the same metadata and queue every layer: its tokens do not count as computed until then",
        ))
    }

    /// Runs of layers that have not run, as text.
    fn missing(&self) -> String {
        let mut missing: Vec<Range<usize>> = Vec::new();
        for (layer, _) in self.ran.iter().enumerate().filter(|(_, ran)| !**ran) {
            let end = layer.saturating_add(1);
            match missing.last_mut() {
                Some(last) if last.end == layer => last.end = end,
                _ => missing.push(layer..end),
            }
        }
        let missing = missing.iter().map(|run| match run.len() {
            1 => run.start.to_string(),
            _ => format!("{} to {}", run.start, run.end.saturating_sub(1)),
        });
        missing.collect::<Vec<String>>().join(", ")
    }
}

impl Drop for RanLayers {
    fn drop(&mut self) {
        if self.left == 0 || self.told && !self.wrote {
            return;
        }
        let missing = self.missing();
        if !self.told && !thread::panicking() {
            tracing::warn!(
                "a step of {} layers ended without layers {missing}: their keys and values are not in the cache",
                self.ran.len()
            );
        }
        if self.wrote {
            let missing: Arc<str> = missing.into();
            self.records
                .iter_mut()
                .for_each(|record| record.lacks(&missing));
        }
    }
}
