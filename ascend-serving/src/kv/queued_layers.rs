//! Which layers of a step are queued, and the refusal of a step that ends without some.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use ascend_attention::Violation;

use crate::rules;

use super::pool::StepProgress;
use super::quantised::GROUP;

/// The layers of a step. Once all are queued, the caches count the tokens of the step as computed. If it is dropped
/// before, a warning is given; where the step writes keys and values, they are missing from the cache, and the next
/// step of the sequences is refused. After an error no warning is given, because the caller has got the error.
#[derive(Debug)]
pub(crate) struct QueuedLayers {
    queued: Vec<bool>,
    /// The number of layers that are not queued yet.
    missing: usize,
    /// Whether the cache may have been written to.
    wrote: bool,
    /// Whether no warning is given on drop.
    is_silent: bool,
    progress: Vec<StepProgress>,
    /// How to do again what ended without some layers.
    again: &'static str,
    /// Whether a write has lost tokens in front of the step.
    torn: bool,
}

/// How to do a step again that ended without some layers.
pub(crate) const STEP_AGAIN: &str = "begin the step again with the same metadata and queue every layer: its tokens do \
     not count as computed until then; where its sequences have changed since, make metadata of all their tokens that \
     are not computed";

/// How to go on after a write that has lost tokens in front of its step.
const LOST_AGAIN: &str = "drop the step, cut its sequences (`truncate`) to the tokens that count as computed \
     (`computed_tokens` of `Attention` or `PagedKvCache`), or to 0 where blocks were given back, and compute \
     the others again";

impl QueuedLayers {
    /// The layers of a step, none of them queued.
    pub(crate) fn new(layers: usize, mut progress: Vec<StepProgress>, again: &'static str) -> Self {
        if layers == 0 {
            progress.iter_mut().for_each(StepProgress::end);
        }
        Self {
            queued: vec![false; layers],
            missing: layers,
            wrote: false,
            is_silent: false,
            progress,
            again,
            torn: false,
        }
    }

    /// Gives no warning on drop.
    pub(crate) fn silence(&mut self) {
        self.is_silent = true;
    }

    /// Refuses a layer that is queued already, and every layer once tokens are lost.
    pub(crate) fn check_not_repeated(&self, layer: usize) -> Result<(), Violation> {
        self.check_whole(layer)?;
        match self.is_queued(layer) {
            true => Err(self.repeated(layer)),
            false => Ok(()),
        }
    }

    /// Whether a layer is queued.
    pub(crate) fn is_queued(&self, layer: usize) -> bool {
        self.queued.get(layer) == Some(&true)
    }

    /// Refuses keys that are read once more of a layer that is not queued yet, and every layer once tokens are lost.
    pub(crate) fn check_written(&self, layer: usize) -> Result<(), Violation> {
        self.check_whole(layer)?;
        match self.queued.get(layer) {
            Some(false) => Err(rules::STEP_SHARED_KEYS.broken(
                format_args!("shared keys of layer {layer}, which is not queued yet"),
                "a layer that is queued",
            )),
            _ => Ok(()),
        }
    }

    /// Refuses every layer once tokens are lost.
    fn check_whole(&self, layer: usize) -> Result<(), Violation> {
        if self.torn {
            return Err(Violation::new(
                &rules::SEQUENCE_GAP,
                format_args!("layer {layer} of a step, a write of which has lost tokens in front of it"),
                "a step that is begun again",
                LOST_AGAIN,
            ));
        }
        Ok(())
    }

    /// Whether a layer is the only one that is not queued.
    pub(crate) fn is_last(&self, layer: usize) -> bool {
        self.missing == 1 && self.queued.get(layer) == Some(&false)
    }

    #[cold]
    fn repeated(&self, layer: usize) -> Violation {
        let without = match self.missing {
            0 => String::new(),
            _ => format!(", without {} so far", self.missing_text()),
        };
        Violation::new(
            &rules::STEP_LAYER_REPEATED,
            format_args!("layer {layer} a second time{without}"),
            format_args!("each layer below {} once", self.queued.len()),
            "say which layer each call is, counted from 0, and give the cache all layers of the model; to compute a \
             step again, begin it again",
        )
    }

    /// Notes that a write of a group of layers has lost tokens in front of the step: nothing of the step counts.
    pub(crate) fn lose_group(&mut self, group: usize) {
        self.torn = true;
        let own = self.progress.get(group);
        own.into_iter().for_each(|progress| progress.lose_group(GROUP));
    }

    /// Whether every layer is queued.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Notes that a layer is about to write to the cache.
    pub(crate) fn begin_write(&mut self) {
        self.wrote = true;
    }

    /// Notes whether a layer was queued.
    pub(crate) fn note_outcome<R, E>(&mut self, layer: usize, outcome: Result<R, E>) -> Result<R, E> {
        match outcome {
            Ok(_) => self.note_queued(layer),
            Err(_) => self.silence(),
        }
        outcome
    }

    /// Gives no warning on drop after an error that the caller gets of what is no layer, such as a convolution.
    pub(crate) fn note_refusal<R, E>(&mut self, outcome: Result<R, E>) -> Result<R, E> {
        if outcome.is_err() {
            self.silence();
        }
        outcome
    }

    fn note_queued(&mut self, layer: usize) {
        if let Some(queued) = self.queued.get_mut(layer)
            && !std::mem::replace(queued, true)
        {
            self.missing = self.missing.saturating_sub(1);
            if self.missing == 0 {
                self.progress.iter_mut().for_each(StepProgress::end);
            }
        }
    }

    /// The end of the step.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) if some layers are not queued.
    pub(crate) fn end(&mut self) -> Result<(), Violation> {
        self.silence();
        if self.missing == 0 {
            return Ok(());
        }
        Err(Violation::new(
            &rules::STEP_LAYERS_MISSING,
            format_args!("a step that ends without {}", self.missing_text()),
            format_args!("all {} layers", self.queued.len()),
            match self.torn {
                true => LOST_AGAIN,
                false => self.again,
            },
        ))
    }

    /// The layers that are not queued, as text: `layer 3`, or `layers 0 to 2, 5`.
    fn missing_text(&self) -> String {
        let mut missing: Vec<Range<usize>> = Vec::new();
        for (layer, _) in self.queued.iter().enumerate().filter(|(_, queued)| !**queued) {
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
        let word = match self.missing {
            1 => "layer",
            _ => "layers",
        };
        format!("{word} {}", missing.collect::<Vec<String>>().join(", "))
    }
}

impl Drop for QueuedLayers {
    fn drop(&mut self) {
        if self.missing == 0 || self.is_silent && !self.wrote {
            return;
        }
        let missing = self.missing_text();
        if !self.is_silent && !thread::panicking() {
            let lost = match self.progress.iter().any(StepProgress::writes) {
                true => ": keys and values are missing from the cache",
                false => "",
            };
            let layers = self.queued.len();
            tracing::warn!("a step of {layers} layers ended without {missing}{lost}");
        }
        if self.wrote {
            let missing: Arc<str> = missing.into();
            self.progress.iter_mut().for_each(|record| record.record_missing(&missing));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_ends_with_all_layers_and_an_error_queues_none() {
        let mut layers = QueuedLayers::new(2, Vec::new(), STEP_AGAIN);
        let failed: Result<(), ()> = layers.note_outcome(1, Err(()));
        assert!(failed.is_err() && layers.check_not_repeated(1).is_ok());
        let queued: Result<(), ()> = layers.note_outcome(1, Ok(()));
        assert!(queued.is_ok() && layers.check_not_repeated(1).is_err());
        assert_eq!(layers.end().unwrap_err().given, "a step that ends without layer 0");
    }
}
