//! Which layers of a step have run, to be told when it ends without some.

use std::ops::Range;
use std::thread;

/// Layers of a step. When it is dropped and some have not run, a warning names them: their keys and values are missing from
/// the cache, which the next step would read. Nothing is said behind an error, which the caller has got.
#[derive(Debug)]
pub(crate) struct RanLayers {
    ran: Vec<bool>,
    told: bool,
}

impl RanLayers {
    pub(crate) fn new(layers: usize) -> Self {
        Self {
            ran: vec![false; layers],
            told: false,
        }
    }

    /// Leaves the warning to somebody else.
    pub(crate) fn silence(&mut self) {
        self.told = true;
    }

    /// Takes note of how a layer went.
    pub(crate) fn note<R, E>(&mut self, layer: usize, outcome: Result<R, E>) -> Result<R, E> {
        match (&outcome, self.ran.get_mut(layer)) {
            (Ok(_), Some(ran)) => *ran = true,
            (Ok(_), None) => {}
            (Err(_), _) => self.silence(),
        }
        outcome
    }

    /// Runs of layers that have not run.
    fn missing(&self) -> Vec<Range<usize>> {
        let mut missing: Vec<Range<usize>> = Vec::new();
        for (layer, _) in self.ran.iter().enumerate().filter(|(_, ran)| !**ran) {
            let end = layer.saturating_add(1);
            match missing.last_mut() {
                Some(last) if last.end == layer => last.end = end,
                _ => missing.push(layer..end),
            }
        }
        missing
    }
}

impl Drop for RanLayers {
    fn drop(&mut self) {
        if self.told || thread::panicking() || self.ran.iter().all(|ran| *ran) {
            return;
        }
        let missing = self.missing();
        let missing = missing.iter().map(|run| match run.len() {
            1 => run.start.to_string(),
            _ => format!("{} to {}", run.start, run.end.saturating_sub(1)),
        });
        let missing: Vec<String> = missing.collect();
        tracing::warn!(
            "a step of {} layers ended without layers {}: their keys and values are not in the cache",
            self.ran.len(),
            missing.join(", ")
        );
    }
}
