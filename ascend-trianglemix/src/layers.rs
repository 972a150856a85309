//! Which layers of a model leave out the middle.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;

use ascend_attention::{Error, Result};
use ascend_serving::kv::CacheShape;

/// The layers that attend to a triangle; the others are dense.
///
/// The paper goes from the top: shallow layers stay dense. [`PresetSource::Guide`](crate::PresetSource::Guide) goes
/// from the bottom. Either is a [`TrianglePreset`](crate::TrianglePreset); what is right for a model is measured with
/// [`TriangleProbe`](crate::TriangleProbe).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TriangleLayers {
    /// Ascending, each once.
    layers: Vec<usize>,
}

impl TriangleLayers {
    /// Most layers of a model.
    pub const MAX_LAYERS: usize = CacheShape::MAX_LAYERS;
    /// How many of the [first](Self::first) layers [`PresetSource::Guide`](crate::PresetSource::Guide) names for models
    /// of 7B, by their size alone. No measurement: the paper leaves the middle out of the last 8 layers of Qwen2.5-7B.
    pub const GUIDE_COUNT_7B: RangeInclusive<usize> = 6..=8;
    /// How many of the [first](Self::first) layers the same notes name for long contexts, with
    /// [`TriangleMix::GUIDE_LONG_CONTEXT`](ascend_attention::spec::geometry::TriangleMix::GUIDE_LONG_CONTEXT): no
    /// measurement.
    pub const GUIDE_COUNT_LONG_CONTEXT: usize = 16;

    /// A selection of exactly these layers.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that is not below
    /// [`MAX_LAYERS`](Self::MAX_LAYERS), or a list of more than that.
    pub fn explicit(layers: impl IntoIterator<Item = usize>) -> Result<Self> {
        let mut known = BTreeSet::new();
        for (at, layer) in layers.into_iter().enumerate() {
            // Ends an endless list of the same layers.
            Self::check(at.max(layer).saturating_add(1))?;
            known.insert(layer);
        }
        Ok(Self { layers: known.into_iter().collect() })
    }

    /// All layers from `start` on, in a model of `layers` layers, as in the paper.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more than [`MAX_LAYERS`](Self::MAX_LAYERS).
    pub fn from_start(start: usize, layers: usize) -> Result<Self> {
        Self::check(layers)?;
        Ok(Self::range(start, layers))
    }

    /// The first `count` layers, as in [`PresetSource::Guide`](crate::PresetSource::Guide).
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more than [`MAX_LAYERS`](Self::MAX_LAYERS).
    pub fn first(count: usize) -> Result<Self> {
        Self::from_start(0, count)
    }

    /// Refuses a model of more than [`MAX_LAYERS`](Self::MAX_LAYERS) layers.
    pub(crate) fn check(layers: usize) -> Result<()> {
        if layers <= Self::MAX_LAYERS {
            return Ok(());
        }
        Err(Error::invalid("layers", layers, format_args!("at most {}", Self::MAX_LAYERS))
            .fix("number the layers of the model from 0"))
    }

    fn range(start: usize, end: usize) -> Self {
        Self { layers: (start..end).collect() }
    }

    /// The `count` layers in which the middle contributes least; of equal ones the deeper. A contribution that is no
    /// number counts as the largest.
    pub fn least(contributions: &[f64], count: usize) -> Self {
        let mut layers = Self::ranking(contributions);
        layers.truncate(count);
        layers.sort_unstable();
        Self { layers }
    }

    /// All layers in the order in which [`least`](Self::least) takes them.
    pub(crate) fn ranking(contributions: &[f64]) -> Vec<usize> {
        let key = |layer: usize| {
            let middle = contributions.get(layer).copied().unwrap_or(f64::INFINITY);
            if middle.is_nan() { f64::INFINITY } else { middle }
        };
        let mut order: Vec<usize> = (0..contributions.len()).collect();
        order.sort_by(|&a, &b| key(a).total_cmp(&key(b)).then(b.cmp(&a)));
        order
    }

    /// Runs of layers, first and last, ascending and apart.
    pub(crate) fn of_runs(runs: &[(usize, usize)]) -> Self {
        let layers = runs.iter().flat_map(|&(first, last)| first..=last);
        Self { layers: layers.collect() }
    }

    /// Whether a layer leaves out the middle.
    pub fn contains(&self, layer: usize) -> bool {
        self.layers.binary_search(&layer).is_ok()
    }

    /// The layers, ascending.
    pub fn indices(&self) -> &[usize] {
        &self.layers
    }
}

impl fmt::Display for TriangleLayers {
    /// Writes the layers as runs: `0-11, 14`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.layers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        for (at, run) in runs.enumerate() {
            let separator = if at > 0 { ", " } else { "" };
            match run {
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                [only] => write!(f, "{separator}{only}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_chosen_in_four_ways() {
        assert_eq!(TriangleLayers::explicit([5, 7, 5, 3]).unwrap().indices(), [3, 5, 7]);
        assert_eq!(TriangleLayers::from_start(3, 6).unwrap().indices(), [3, 4, 5]);
        assert!(TriangleLayers::from_start(6, 3).unwrap().indices().is_empty());
        assert_eq!(TriangleLayers::first(3).unwrap().indices(), [0, 1, 2]);
        let contributions = [0.5, 0.1, f64::NAN, 0.1, 0.0];
        let least = |count| TriangleLayers::least(&contributions, count);
        assert_eq!(least(2).indices(), [3, 4]);
        assert_eq!(least(4).indices(), [0, 1, 3, 4]);
        assert_eq!(least(9).indices(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn layers_are_written_as_runs() {
        let layers = TriangleLayers::explicit([5, 7, 10, 15, 16]).unwrap();
        assert_eq!(layers.to_string(), "5, 7, 10, 15-16");
        assert!(layers.contains(16));
        assert!(!layers.contains(17));
    }
}
