//! What captures will take, before they are made.

use ascend_spec::Violation;

use crate::rules;

/// Streams and events that captured graphs take of a device.
///
/// A device has some two thousand streams. A graph takes one for its work and, as engines on this hardware found, one
/// for each launch that can be updated; a device without streams left fails in the middle of a capture, with 207005
/// or 207008 ([`Error::StreamsExhausted`](crate::Error::StreamsExhausted)). CANN does not document how many it will
/// take: this estimate is the most.
///
/// ```
/// use ascend_attention::graph::CaptureEstimate;
///
/// // 20 sizes of a model of 61 layers, two calls with varying lengths in each.
/// let estimate = CaptureEstimate::new(20, 2 * 61);
/// assert!(estimate.fits(CaptureEstimate::STREAMS).is_err());
/// assert_eq!(CaptureEstimate::most_graphs(2 * 61, CaptureEstimate::STREAMS), 14);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CaptureEstimate {
    /// All graphs: the sizes, or where each layer has a graph, sizes times layers.
    pub graphs: usize,
    /// Launches in all of them whose lengths vary.
    pub varying: usize,
}

impl CaptureEstimate {
    /// Streams of a device that graphs may take: vLLM-Ascend leaves the rest of 2048 to everything else.
    pub const STREAMS: usize = 1800;

    /// An estimate for `graphs` graphs, each with `varying` launches whose lengths vary.
    pub fn new(graphs: usize, varying: usize) -> Self {
        Self { graphs, varying: graphs.saturating_mul(varying) }
    }

    /// The estimate of these graphs and of others, such as those of layers of another kind.
    pub fn and(self, others: Self) -> Self {
        Self { graphs: self.graphs.saturating_add(others.graphs), varying: self.varying.saturating_add(others.varying) }
    }

    /// Streams that the graphs take, including the two for captures and updates.
    pub fn streams(&self) -> usize {
        self.events().saturating_add(2)
    }

    /// Events that the graphs take.
    pub fn events(&self) -> usize {
        // One more event is recorded after the latest replay.
        self.graphs.saturating_add(self.varying)
    }

    /// Refuses captures for which there are not enough streams.
    ///
    /// # Errors
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS).
    pub fn fits(&self, streams: usize) -> Result<(), Violation> {
        if self.streams() <= streams {
            return Ok(());
        }
        let each = self.varying.div_ceil(self.graphs.max(1));
        Err(Violation::new(
            &rules::GRAPH_STREAMS,
            format_args!(
                "{} streams for {} graphs with {} launches that vary",
                self.streams(),
                self.graphs,
                self.varying
            ),
            format_args!("at most {streams}, enough for {} graphs", Self::most_graphs(each, streams)),
            "capture fewer sizes, and pad batches further",
        ))
    }

    /// Most graphs, each with `varying` launches whose lengths vary, for which `streams` streams are enough.
    pub fn most_graphs(varying: usize, streams: usize) -> usize {
        streams.saturating_sub(2) / varying.saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_graphs_fit_and_one_more_does_not() {
        for (varying, streams) in [(0, 2), (0, 9), (1, 9), (61, 1800), (usize::MAX, 1800)] {
            let most = CaptureEstimate::most_graphs(varying, streams);
            let estimate = |graphs| CaptureEstimate::new(graphs, varying).fits(streams);
            assert_eq!(estimate(most), Ok(()), "{varying} {streams}");
            let refused = estimate(most + 1).unwrap_err();
            assert_eq!(refused.rule, &rules::GRAPH_STREAMS);
        }
    }
}
