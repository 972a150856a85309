//! What the parts of the causal triangle contribute, layer by layer, over recorded samples.

use ascend_attention::spec::Visibility;
use ascend_attention::spec::geometry::{TriangleMix, TriangleRows};

use ascend_attention::{Error, Result};

use crate::layers::TriangleLayers;
use crate::sample::{LayerSample, PartSums, SampleMeasure, SampleReal};

/// What a probe measures. Samples of different measures are not compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProbeMeasure {
    /// The gradient with respect to the attention weights, as in the paper.
    WeightGradient,
    /// The gradient with respect to the attention scores.
    ScoreGradient,
    /// The share of the attention weights, without any gradient.
    AttentionMass,
}

/// What a layer's parts contribute: the mean, over the recorded samples, of the sum of what is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Contribution {
    /// Sinks and window.
    pub streaming: f64,
    /// The last rows' other keys.
    pub last: f64,
    /// What a triangle leaves out.
    pub middle: f64,
    /// Number of samples.
    pub samples: u64,
}

/// Finds the layers that do not need the middle, as the paper does: for about 100 samples of about 2000 tokens, the
/// gradient of the logit of the first right token with respect to each attention weight is recorded, and summed up over
/// each part. In deep layers the middle's sum is next to nothing.
///
/// Where the framework does not give out the gradient of the weights, [`TriangleProbe::record_sample`] computes it
/// from the layer's values and the gradient of its output on the host, and
/// [`WeightGradientSample`](crate::WeightGradientSample) does so on a device. Without a backward
/// pass, [`SampleMeasure::AttentionMass`] measures how much attention the middle gets. That is another question: the
/// paper finds layers whose middle gets attention that does not matter for the tokens to come, and a forward pass
/// cannot tell these from the others. A layer whose middle gets next to no attention can leave it out in any case.
///
/// ```
/// use ascend_trianglemix::TriangleProbe;
/// use ascend_attention::spec::geometry::TriangleMix;
///
/// # fn main() -> ascend_attention::Result<()> {
/// let mut probe = TriangleProbe::new(2, TriangleMix::new(1, 1, 1))?;
/// let tokens = 5;
/// let mut gradient = vec![0.0; tokens * tokens];
/// gradient[3 * tokens + 1] = -0.5; // row 3, key 1: the middle
/// probe.record(0, tokens, &gradient)?;
/// probe.record(1, tokens, &vec![0.0; tokens * tokens])?;
/// assert_eq!(probe.contributions()[0].middle, 0.5);
/// assert_eq!(probe.layers(1).indices(), [1]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TriangleProbe {
    sizes: TriangleMix,
    /// Sums over the samples.
    layers: Vec<(PartSums, u64)>,
    /// The measure of the first sample.
    measure: Option<ProbeMeasure>,
}

impl TriangleProbe {
    /// A probe of `layers` layers. The paper takes [`TriangleMix::PROBE`].
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more than [`TriangleLayers::MAX_LAYERS`].
    pub fn new(layers: usize, sizes: TriangleMix) -> Result<Self> {
        TriangleLayers::check(layers)?;
        Ok(Self { sizes, layers: vec![(PartSums::default(), 0); layers], measure: None })
    }

    /// Adds a sample of one layer: the gradient `[tokens, tokens]` with respect to the attention weights, row-major,
    /// summed or averaged over heads. Elements above the diagonal do not count.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that the probe does not have, another number of
    /// elements, an element that is not finite, or a probe that measures something else than
    /// [`ProbeMeasure::WeightGradient`].
    pub fn record(&mut self, layer: usize, tokens: usize, gradient: &[f32]) -> Result<()> {
        self.admits(layer, ProbeMeasure::WeightGradient)?;
        if tokens.checked_mul(tokens) != Some(gradient.len()) {
            return Err(Error::invalid(
                "gradient",
                format_args!("{} elements", gradient.len()),
                format_args!("{tokens} rows of {tokens}"),
            )
            .fix("bring the gradient of the whole square of weights"));
        }
        if let Some(at) = gradient.iter().position(|x| !x.is_finite()) {
            return Err(Error::invalid(
                "gradient",
                format_args!("an element at {at} that is not finite"),
                "finite numbers",
            )
            .fix("leave the sample out, or compute its gradient in a wider type"));
        }
        let rows = TriangleRows::whole(tokens as u64);
        let sums = PartSums::of(|part| {
            let geometry = self.sizes.geometry(part, rows);
            let mut sum = 0.0;
            for (i, row) in gradient.chunks_exact(tokens.max(1)).enumerate() {
                geometry.each_run(i as u64, &mut |run| {
                    let keys = run.start as usize..run.end as usize;
                    let seen = row.get(keys).unwrap_or_default();
                    sum += seen.iter().map(|&x| f64::from(x.abs())).sum::<f64>();
                });
            }
            sum
        });
        self.add(layer, ProbeMeasure::WeightGradient, sums)
    }

    /// Adds a sample of one layer from its queries, keys and values; [`LayerSample::parts`] describes what is summed
    /// up. Each head counts by itself, and their mean is taken.
    ///
    /// ```
    /// use ascend_trianglemix::{LayerSample, SampleMeasure, TriangleProbe};
    /// use ascend_attention::spec::geometry::TriangleMix;
    ///
    /// # fn main() -> ascend_attention::Result<()> {
    /// let zeros = vec![0.0f32; 6 * 4];
    /// let sample = LayerSample {
    ///     tokens: 6,
    ///     heads: 1,
    ///     kv_heads: 1,
    ///     dim: 4,
    ///     value_dim: 4,
    ///     scale: 0.5,
    ///     query: &zeros,
    ///     key: &zeros,
    ///     value: &zeros,
    /// };
    /// let mut probe = TriangleProbe::new(1, TriangleMix::new(1, 1, 1))?;
    /// probe.record_sample(0, &sample, SampleMeasure::AttentionMass)?;
    /// // Row 3 of 6 leaves out one key of 4, row 4 two of 5.
    /// assert!((probe.contributions()[0].middle - (1.0 / 4.0 + 2.0 / 5.0) / 6.0).abs() < 1e-12);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that the probe does not have, or a probe that
    /// measures something else; as for [`LayerSample::parts`].
    pub fn record_sample<R: SampleReal>(
        &mut self,
        layer: usize,
        sample: &LayerSample<'_, R>,
        measure: SampleMeasure<'_, R>,
    ) -> Result<()> {
        let kind = match measure {
            SampleMeasure::WeightGradient(_) => ProbeMeasure::WeightGradient,
            SampleMeasure::ScoreGradient(_) => ProbeMeasure::ScoreGradient,
            SampleMeasure::AttentionMass => ProbeMeasure::AttentionMass,
        };
        self.admits(layer, kind)?;
        let sums = sample.parts(self.sizes, measure)?;
        self.add(layer, kind, sums)
    }

    /// Adds the sums of one layer that were computed elsewhere, for the probe's own [sizes](TriangleProbe::sizes): as
    /// [`LayerSample::parts`] and
    /// [`WeightGradientSample::parts`](crate::WeightGradientSample::parts) give them, the mean over
    /// the heads.
    ///
    /// ```
    /// use ascend_trianglemix::{PartSums, ProbeMeasure, TriangleProbe};
    /// use ascend_attention::spec::geometry::TriangleMix;
    ///
    /// # fn main() -> ascend_attention::Result<()> {
    /// let mut probe = TriangleProbe::new(2, TriangleMix::PAPER)?;
    /// let sums = PartSums { streaming: 3.0, last: 1.0, middle: 0.5 };
    /// probe.record_parts(0, ProbeMeasure::WeightGradient, sums)?;
    /// assert_eq!(probe.contributions()[0].middle, 0.5);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that the probe does not have, a probe that
    /// measures something else, or sums that are not finite or below 0.
    pub fn record_parts(&mut self, layer: usize, measure: ProbeMeasure, sums: PartSums) -> Result<()> {
        self.admits(layer, measure)?;
        let each = [sums.streaming, sums.last, sums.middle];
        if !each.iter().all(|sum| sum.is_finite() && *sum >= 0.0) {
            return Err(Error::invalid("sums", format_args!("{sums:?}"), "finite numbers of at least 0")
                .fix("leave the sample out"));
        }
        self.add(layer, measure, sums)
    }

    /// The sizes of the parts.
    pub fn sizes(&self) -> TriangleMix {
        self.sizes
    }

    /// What the probe measures; `None` before the first sample.
    pub fn measure(&self) -> Option<ProbeMeasure> {
        self.measure
    }

    /// Refuses a sample that the probe would not take, whatever its sums are.
    pub(crate) fn admits(&self, layer: usize, measure: ProbeMeasure) -> Result<()> {
        let known = self.layers.len();
        if layer >= known {
            let allowed = format_args!("below {known}");
            return Err(Error::invalid("layer", layer, allowed).fix("make the probe with all layers of the model"));
        }
        match self.measure {
            Some(other) if other != measure => Err(Error::invalid(
                "measure",
                format_args!("{measure:?}"),
                format_args!("{other:?}, that of the probe's first sample: use a probe for each"),
            )
            .fix("use a probe for each measure")),
            _ => Ok(()),
        }
    }

    fn add(&mut self, layer: usize, measure: ProbeMeasure, more: PartSums) -> Result<()> {
        if let Some((sums, samples)) = self.layers.get_mut(layer) {
            let mut both = *sums;
            both.add(more);
            *sums = both.finite("divide what is recorded")?;
            *samples = samples.saturating_add(1);
        }
        self.measure = Some(measure);
        Ok(())
    }

    /// The means of each layer; 0 for layers without a sample.
    pub fn contributions(&self) -> Vec<Contribution> {
        let mean = |&(sums, samples): &(PartSums, u64)| {
            let PartSums { streaming, last, middle } = sums.over(samples.max(1) as f64);
            Contribution { streaming, last, middle, samples }
        };
        self.layers.iter().map(mean).collect()
    }

    /// The layers by what their middle contributes, the least first. Layers without a sample come last.
    pub fn ranking(&self) -> Vec<usize> {
        TriangleLayers::ranking(&self.middles())
    }

    /// The `count` layers whose middle contributes the least: the first of the [`ranking`](Self::ranking).
    pub fn layers(&self, count: usize) -> TriangleLayers {
        TriangleLayers::least(&self.middles(), count)
    }

    /// What each layer's middle contributes; NaN of layers without a sample.
    fn middles(&self) -> Vec<f64> {
        let middle = |contribution: &Contribution| {
            if contribution.samples == 0 { f64::NAN } else { contribution.middle }
        };
        self.contributions().iter().map(middle).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use ascend_attention::spec::geometry::TrianglePart;

    #[test]
    fn parts_are_summed_and_samples_averaged() {
        let sizes = TriangleMix::new(1, 1, 1);
        let mut probe = TriangleProbe::new(2, sizes).unwrap();
        let tokens = 6u64;
        // Every cell counts 1 in the first sample, 3 in the second, with either sign.
        for value in [1.0, -3.0] {
            probe.record(0, 6, &[value; 36]).unwrap();
        }
        let cells = |part| {
            let geometry = sizes.geometry(part, TriangleRows::whole(tokens));
            geometry.visible() as f64
        };
        let contribution = probe.contributions()[0];
        assert_eq!(contribution.streaming, 2.0 * cells(TrianglePart::Streaming));
        assert_eq!(contribution.last, 2.0 * cells(TrianglePart::Last));
        assert_eq!(contribution.middle, 2.0 * cells(TrianglePart::Middle));
        assert!(contribution.middle > 0.0);
        assert_eq!(probe.layers(1).indices(), [0], "layer 1 was not measured");
    }

    #[test]
    fn wrong_gradients_are_refused() {
        let mut probe = TriangleProbe::new(1, TriangleMix::PROBE).unwrap();
        assert!(probe.record(1, 2, &[0.0; 4]).is_err());
        assert!(probe.record(0, 2, &[0.0; 5]).is_err());
        assert!(probe.record(0, 1, &[f32::NAN]).is_err());
        assert!(probe.record(0, usize::MAX, &[]).is_err());
        assert!(probe.record(0, 0, &[]).is_ok());
    }

    #[test]
    fn sums_that_are_none_are_refused() {
        let mut probe = TriangleProbe::new(1, TriangleMix::PAPER).unwrap();
        let sums = |middle| PartSums { middle, ..PartSums::default() };
        let measure = ProbeMeasure::WeightGradient;
        for middle in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(probe.record_parts(0, measure, sums(middle)).is_err());
        }
        assert!(probe.record_parts(1, measure, sums(1.0)).is_err());
        assert_eq!(probe.measure(), None);
        probe.record_parts(0, measure, sums(2.0)).unwrap();
        probe.record_parts(0, measure, sums(4.0)).unwrap();
        assert_eq!(probe.contributions()[0].middle, 3.0);
        let other = ProbeMeasure::AttentionMass;
        assert!(probe.record_parts(0, other, sums(1.0)).is_err());
    }

    #[test]
    fn a_probe_measures_one_thing() {
        let zeros = [0.0f64; 8];
        let sample = LayerSample {
            tokens: 4,
            heads: 1,
            kv_heads: 1,
            dim: 2,
            value_dim: 2,
            scale: 1.0,
            query: &zeros,
            key: &zeros,
            value: &zeros,
        };
        let mut probe = TriangleProbe::new(1, TriangleMix::new(1, 0, 1)).unwrap();
        assert_eq!(probe.measure(), None);
        let mass = SampleMeasure::AttentionMass;
        assert!(probe.record_sample(1, &sample, mass).is_err());
        probe.record_sample(0, &sample, mass).unwrap();
        assert_eq!(probe.measure(), Some(ProbeMeasure::AttentionMass));
        let error = probe.record(0, 2, &[0.0; 4]).unwrap_err().to_string();
        assert!(error.contains("AttentionMass"), "{error}");
        assert_eq!(probe.contributions()[0].samples, 1);
    }
}
