//! Captured graphs for batches of some sizes.

use std::sync::Arc;

use crate::error::Result;
use crate::graph::{CaptureEstimate, Capturing, Graph};
use crate::kv::{Rule, refused};
use crate::runtime::{Device, Stream};

use super::lengths::CallLengths;
use super::metadata::AttentionMetadata;

/// One captured graph for each of some sizes, in query tokens. A step is padded to the smallest size that holds it.
///
/// Graphs of a pool read the paged cache ([`CallLengths::PackedPaged`]), also in a step that begins with nothing cached:
/// they write the step's keys and values before they attend.
///
/// Capture a size with the metadata of a batch of that size: as many requests, each as long as it may ever become.
/// Padding adds requests of one token where all real ones have one, so that a decode step of any number of requests
/// becomes one of a captured size.
#[derive(Debug)]
pub struct GraphPool<B> {
    /// By size, ascending.
    graphs: Vec<(u32, Graph<B>)>,
}

impl<B> GraphPool<B> {
    /// Captures a graph for each size: `buffers` makes those of a size, `record` launches the step. The largest comes
    /// first, so that one that does not fit is known soon.
    ///
    /// # Errors
    /// [`Rule::GraphStreams`] if so many graphs of so many launches as the first one has take more than
    /// [`CaptureEstimate::STREAMS`]; as for [`Graph::capture`].
    pub fn capture(
        device: &Device,
        sizes: &[u32],
        mut buffers: impl FnMut(u32) -> Result<B>,
        mut record: impl FnMut(&mut Capturing<'_>, u32, &B) -> Result<()>,
    ) -> Result<Self> {
        let side = Arc::new(device.stream()?);
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let mut graphs = Vec::with_capacity(sizes.len());
        for &size in sizes.iter().rev() {
            let record = |capture: &mut Capturing<'_>, buffers: &B| record(capture, size, buffers);
            let (graph, ()) = Graph::capture_beside(&side, buffers(size)?, record)?;
            if graphs.is_empty() {
                CaptureEstimate::new(sizes.len(), graph.varying())
                    .fits(CaptureEstimate::STREAMS)?;
            }
            graphs.push((size, graph));
        }
        graphs.reverse();
        Ok(Self { graphs })
    }

    /// The captured sizes, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = u32> + '_ {
        self.graphs.iter().map(|(size, _)| *size)
    }

    /// The smallest captured size for so many tokens.
    pub fn size_for(&self, tokens: u32) -> Option<u32> {
        self.sizes().find(|size| *size >= tokens)
    }

    /// The graph of a size.
    pub fn graph(&self, size: u32) -> Option<&Graph<B>> {
        let mut graphs = self.graphs.iter();
        graphs.find(|(of, _)| *of == size).map(|(_, graph)| graph)
    }

    /// Pads a step to the smallest size that holds it, lets `fill` put its table, slots and queries into that size's
    /// buffers, and queues the replay with its lengths. The buffers, with the results in them once the stream gets there.
    ///
    /// Not every step has the form of the captured ones: compute the others, such as prefills, without a graph.
    ///
    /// # Errors
    /// [`Rule::GraphSize`] for a step larger than all sizes; what `fill` returns; as for
    /// [`Update::all`](crate::graph::Update::all) and [`Graph::replay`]. Nothing is launched then, but the step stays
    /// padded.
    pub fn replay(
        &mut self,
        stream: &Stream,
        metadata: &mut AttentionMetadata,
        fill: impl FnOnce(&B, &AttentionMetadata) -> Result<()>,
    ) -> Result<&B> {
        let tokens = metadata.tokens();
        let largest = self.sizes().last().unwrap_or(0);
        let mut graphs = self.graphs.iter_mut();
        let Some((size, graph)) = graphs.find(|(size, _)| *size >= tokens) else {
            return Err(refused(
                Rule::GraphSize,
                format_args!("{tokens} tokens"),
                format_args!("at most {largest}"),
                "compute the step without a graph, or capture a larger size",
            )
            .into());
        };
        metadata.pad_to(*size)?;
        let lengths = CallLengths::PackedPaged {
            q: metadata.q_ends(),
            kv: metadata.kv_lengths(),
        };
        let update = graph.update().all(lengths)?;
        fill(graph.buffers(), metadata)?;
        graph.replay(stream, update)?;
        Ok(graph.buffers())
    }
}
