//! What the parts of the causal triangle contribute, layer by layer, from recorded gradients.

use ascend_spec::Visibility;
use ascend_spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

use crate::error::{Error, Result};

use super::triangle_layers::TriangleLayers;

/// What a layer's parts contribute: the mean, over the recorded samples, of the sum of the gradients' absolute values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
/// ```
/// use ascend_attention::mask::TriangleProbe;
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
    layers: Vec<Contribution>,
}

impl TriangleProbe {
    /// A probe of so many layers. The paper takes [`TriangleMix::PROBE`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`TriangleLayers::MAX_LAYERS`].
    pub fn new(layers: usize, sizes: TriangleMix) -> Result<Self> {
        TriangleLayers::check(layers)?;
        Ok(Self {
            sizes,
            layers: vec![Contribution::default(); layers],
        })
    }

    /// Adds a sample of one layer: the gradient `[tokens, tokens]` with respect to the attention weights, row-major, summed
    /// or averaged over heads. What lies above the diagonal does not count.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layer that the probe does not have, another number of elements, or an element that
    /// is not finite.
    pub fn record(&mut self, layer: usize, tokens: usize, gradient: &[f32]) -> Result<()> {
        let known = self.layers.len();
        let Some(sums) = self.layers.get_mut(layer) else {
            return Err(Error::invalid(
                "layer",
                layer,
                format_args!("below {known}"),
            ));
        };
        if tokens.checked_mul(tokens) != Some(gradient.len()) {
            return Err(Error::invalid(
                "gradient",
                format_args!("{} elements", gradient.len()),
                format_args!("{tokens} rows of {tokens}"),
            ));
        }
        if let Some(at) = gradient.iter().position(|x| !x.is_finite()) {
            return Err(Error::invalid(
                "gradient",
                format_args!("an element at {at} that is not finite"),
                "finite numbers",
            ));
        }
        let rows = TriangleRows::whole(tokens as u64);
        let sum = |part| {
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
        };
        sums.streaming += sum(TrianglePart::Streaming);
        sums.last += sum(TrianglePart::Last);
        sums.middle += sum(TrianglePart::Middle);
        sums.samples = sums.samples.saturating_add(1);
        Ok(())
    }

    /// The means of each layer; 0 for layers without a sample.
    pub fn contributions(&self) -> Vec<Contribution> {
        let mean = |sums: &Contribution| {
            let samples = sums.samples.max(1) as f64;
            Contribution {
                streaming: sums.streaming / samples,
                last: sums.last / samples,
                middle: sums.middle / samples,
                samples: sums.samples,
            }
        };
        self.layers.iter().map(mean).collect()
    }

    /// The `count` layers whose middle contributes the least. Layers without a sample come last.
    pub fn layers(&self, count: usize) -> TriangleLayers {
        let contributions = self.contributions();
        let middle = |of: &Contribution| if of.samples == 0 { f64::NAN } else { of.middle };
        let middles: Vec<f64> = contributions.iter().map(middle).collect();
        TriangleLayers::least(&middles, count)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

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
        let of = probe.contributions()[0];
        assert_eq!(of.streaming, 2.0 * cells(TrianglePart::Streaming));
        assert_eq!(of.last, 2.0 * cells(TrianglePart::Last));
        assert_eq!(of.middle, 2.0 * cells(TrianglePart::Middle));
        assert!(of.middle > 0.0);
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
}
