//! Captured graphs for batches of some sizes.

use std::fmt;
use std::sync::Arc;

use ascend_attention::attention::CallLengths;
use ascend_attention::graph::{CaptureEstimate, Capturing, GraphGroup, Update, is_capturing};
use ascend_attention::{Device, Graph, Stream, StreamMark, Violation};

use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};
use crate::kv::{QueuedLayers, STEP_AGAIN, StepLease, no_layer};
use crate::rules;

/// Captured graphs for each of some sizes, in query tokens: one of the whole step, or one of each of its layers, so
/// that other work can run between them. A step is padded to the smallest size that holds it.
///
/// Graphs of a pool read the paged cache ([`CallLengths::PackedPaged`]), also in a step that begins without cached
/// tokens: they write the step's keys and values before they attend.
///
/// Capture a size with the metadata of a batch of that size: with the same number of requests, each as long as it may
/// ever become, or within [`KeyLimits`](ascend_attention::graph::KeyLimits). Padding adds requests of one token where
/// all real ones have one, so that a decode step of any number of requests becomes one of a captured size.
///
/// All graphs of a pool use one workspace, and the graphs of a size one set of buffers; their steps run one after the
/// other, also on different streams. A step on another stream than the step before makes the host wait for that
/// stream.
///
/// [`AttentionGraphs`](crate::AttentionGraphs) is such a pool with buffers and launches of its own.
pub struct GraphPool<B> {
    device: Device,
    /// The sizes, ascending.
    sizes: Vec<SizeGraphs<B>>,
    layers: usize,
    /// The stream of the latest step.
    last: Option<StreamMark>,
}

struct SizeGraphs<B> {
    size: usize,
    buffers: Arc<B>,
    /// The graph of each layer.
    graphs: Vec<Graph<Arc<B>>>,
}

impl<B> GraphPool<B> {
    /// Captures a graph of a whole step for each size: `buffers` makes the buffers of a size, `record` launches the
    /// step. The largest size is captured first, so that a size that does not fit is found early.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) without sizes, for more sizes than [`CaptureEstimate::STREAMS`], or
    /// for one of 0 or more than [`MAX_TOKENS`](AttentionMetadata::MAX_TOKENS);
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take more than [`CaptureEstimate::STREAMS`], each
    /// one that is not captured yet counted with the fewest launches so far; as for [`Graph::capture`].
    pub fn capture(
        device: &Device,
        sizes: &[usize],
        buffers: impl FnMut(usize) -> Result<B>,
        mut record: impl FnMut(&Capturing<'_>, usize, &B) -> Result<()>,
    ) -> Result<Self> {
        let record = |capture: &Capturing<'_>, size, _, buffers: &B| record(capture, size, buffers);
        Self::capture_layers(device, sizes, 1, buffers, record)
    }

    /// Captures a graph of each layer for each size: `buffers` makes the buffers of a size, which its layers share,
    /// and `record` launches a layer, given the size and the layer's number.
    ///
    /// # Errors
    /// As for [`GraphPool::capture`].
    pub fn capture_layers(
        device: &Device,
        sizes: &[usize],
        layers: usize,
        mut buffers: impl FnMut(usize) -> Result<B>,
        mut record: impl FnMut(&Capturing<'_>, usize, usize, &B) -> Result<()>,
    ) -> Result<Self> {
        let most = AttentionMetadata::MAX_TOKENS;
        let outside = sizes.iter().find(|size| !(1..=most).contains(size));
        if sizes.is_empty() || sizes.len() > CaptureEstimate::STREAMS || outside.is_some() {
            let given = match outside {
                Some(size) => format!("graphs of {size} tokens"),
                None => format!("graphs of {} sizes", sizes.len()),
            };
            return Err(Violation::new(
                &rules::GRAPH_SIZE,
                given,
                format_args!("1 to {} sizes, each of 1 to {most} tokens", CaptureEstimate::STREAMS),
                "capture the sizes that decode steps are padded to, such as [1, 2, 4, 8]",
            )
            .into());
        }
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let mut group = GraphGroup::new(device)?;
        let mut captured = Vec::with_capacity(sizes.len());
        let mut varying = Vec::new();
        for &size in sizes.iter().rev() {
            let buffers = Arc::new(buffers(size)?);
            let mut graphs = Vec::new();
            for layer in 0..layers {
                let record = |capture: &Capturing<'_>, buffers: &Arc<B>| record(capture, size, layer, buffers);
                let own = Arc::clone(&buffers);
                let (graph, ()) = group.capture(own, record)?;
                if captured.is_empty() {
                    varying.push(graph.varying());
                    estimated(sizes.len(), layers, &varying).fits(CaptureEstimate::STREAMS)?;
                }
                graphs.push(graph);
            }
            captured.push(SizeGraphs { size, buffers, graphs });
        }
        captured.reverse();
        Ok(Self { device: device.clone(), sizes: captured, layers, last: None })
    }

    /// The captured sizes, in query tokens, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.sizes.iter().map(|captured| captured.size)
    }

    /// Number of graphs of a size: the layers, or 1 where graphs are of whole steps.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// The smallest captured size for `tokens` tokens.
    pub fn size_for(&self, tokens: usize) -> Option<usize> {
        self.sizes().find(|size| *size >= tokens)
    }

    /// The graph of a size. Where each layer has a graph, it is that of the first layer.
    pub fn graph(&self, size: usize) -> Option<&Graph<Arc<B>>> {
        self.layer_graph(size, 0)
    }

    /// The graph of a size and layer.
    pub fn layer_graph(&self, size: usize, layer: usize) -> Option<&Graph<Arc<B>>> {
        let captured = self.sizes.iter().find(|captured| captured.size == size)?;
        captured.graphs.get(layer)
    }

    /// The buffers of a size.
    pub(crate) fn buffers(&self, size: usize) -> Option<&Arc<B>> {
        let mut sizes = self.sizes.iter();
        Some(&sizes.find(|captured| captured.size == size)?.buffers)
    }

    /// The device of the graphs.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Refuses a stream of another device.
    pub(crate) fn admits(&self, stream: &Stream) -> Result<()> {
        Ok(stream.check_device("stream", &self.device)?)
    }

    /// The smallest captured size for `tokens` tokens; a step that no size holds is refused.
    pub(crate) fn fitting(&self, tokens: usize) -> Result<usize, Violation> {
        self.size_for(tokens).ok_or_else(|| self.too_large(tokens))
    }

    /// The refusal of a step that no size holds.
    pub(crate) fn too_large(&self, tokens: usize) -> Violation {
        rules::GRAPH_SIZE
            .broken(format_args!("{tokens} tokens"), format_args!("at most {}", self.sizes().last().unwrap_or(0)))
    }

    /// Begins a step: pads it to the smallest size that holds it, plans its lengths for every layer, and calls `fill`
    /// to put its table and slots into that size's buffers. Then launch each layer once. Blocks of the step's sequences
    /// that are given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// Not every step has the form of the captured ones: compute the others, such as prefills, without a graph.
    ///
    /// Once every layer is launched, the tokens count as computed in every cache of the sequences' pool, which the
    /// graphs write. Where several caches share the pool and the graphs write one of them, capture by
    /// [`Attention::capture`](crate::Attention::capture), whose graphs know their cache.
    ///
    /// # Errors
    /// The metadata is unchanged after these:
    /// - [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY): it has no requests;
    /// - [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE): no size holds the step;
    /// - [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS): it is of several groups of layers;
    /// - [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED),
    ///   [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED),
    ///   [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    ///   [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING),
    ///   [`BLOCK_GIVEN_BACK`](crate::rules::BLOCK_GIVEN_BACK), [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED),
    ///   [`TABLE_SHARED`](crate::rules::TABLE_SHARED): a sequence does not fit the step, as for
    ///   [`Attention::begin`](crate::Attention::begin);
    /// - [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE): the stream is of another device;
    /// - [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE): the step before was on another stream, and its end is not
    ///   known;
    /// - [`Capturing`](ascend_attention::Error::Capturing): it was on another stream, and the thread captures.
    ///
    /// The metadata is padded, and nothing is launched, after what [`Update::all`] and `fill` return.
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut AttentionMetadata,
        fill: impl FnOnce(&B, &AttentionMetadata) -> Result<()>,
    ) -> Result<GraphStep<'a, B>> {
        self.admits(stream)?;
        metadata.check_groups(1)?;
        metadata.check_requests()?;
        let size = self.fitting(metadata.tokens())?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = metadata.pool_of_sequences().map(|pool| pool.begin_step(stream));
        let progress = metadata.begin_progress_in_all()?.into_iter().collect();
        self.follow(stream)?;
        metadata.pad_to(size)?;
        let metadata = &*metadata;
        let lengths = |_, update: Update| {
            Ok(update.all(CallLengths::PackedPaged { q: metadata.q_ends(), kv: metadata.kv_lengths() })?)
        };
        let fill = |buffers: &B| fill(buffers, metadata);
        let layers = self.layers;
        let replays = self.start(stream, size, lengths, fill)?;
        Ok(GraphStep { replays, layers: QueuedLayers::new(layers, progress, STEP_AGAIN), _lease: lease })
    }

    /// Prepares the replays of a step of a captured size, whose layers get their lengths from `lengths`, on a stream
    /// that [follows](Self::follow) the step before.
    pub(crate) fn start<'a>(
        &'a mut self,
        stream: &'a Stream,
        size: usize,
        lengths: impl Fn(usize, Update) -> Result<Update>,
        fill: impl FnOnce(&B) -> Result<()>,
    ) -> Result<Replays<'a, B>> {
        let Some(SizeGraphs { buffers, graphs, .. }) = self.sizes.iter_mut().find(|captured| captured.size == size)
        else {
            return Err(Violation::new(
                &rules::GRAPH_SIZE,
                format_args!("{size} tokens"),
                "a captured size",
                "pad the step to a captured size",
            )
            .into());
        };
        let updates = graphs.iter().enumerate();
        let updates = updates.map(|(layer, graph)| lengths(layer, graph.update()).map(Some));
        let updates = updates.collect::<Result<Vec<_>>>()?;
        fill(buffers)?;
        Ok(Replays { buffers, graphs, updates, stream })
    }

    /// Drops the graphs, and all that they keep.
    pub(crate) fn clear(&mut self) {
        self.sizes.clear();
    }

    /// Orders the next step after the step before, whose workspace and buffers it uses. If that was on another
    /// stream, the host waits for all that is queued there: replays, copies into the buffers and readers of the
    /// results, also of a step that was abandoned or never dropped.
    ///
    /// # Errors
    /// As for [`GraphPool::begin`], of the step before.
    pub(crate) fn follow(&mut self, stream: &Stream) -> Result<()> {
        if let Some(last) = &self.last
            && !last.is_of(stream)
        {
            not_while_capturing("waiting for a step")?;
            if !last.latest().wait()? {
                return Err(Error::invalid(
                    "stream",
                    "another stream than that of the step before, whose end is not known",
                    "the stream of the step before, or any once that was synchronised",
                )
                .fix("replay on one stream, or synchronise it first"));
            }
        }
        self.last = Some(stream.mark());
        Ok(())
    }

    /// Begins a step, launches all its layers one after the other, and returns the buffers, which have the results
    /// once the stream has computed them.
    ///
    /// # Errors
    /// As for [`GraphPool::begin`] and [`Graph::launch`].
    pub fn launch<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut AttentionMetadata,
        fill: impl FnOnce(&B, &AttentionMetadata) -> Result<()>,
    ) -> Result<&'a B> {
        let layers = self.layers;
        let mut step = self.begin(stream, metadata, fill)?;
        for layer in 0..layers {
            step.launch(layer)?;
        }
        Ok(step.buffers())
    }
}

/// What graphs of `sizes` sizes and `layers` layers take at least, of which those of some layers have these launches.
fn estimated(sizes: usize, layers: usize, varying: &[usize]) -> CaptureEstimate {
    let least = varying.iter().copied().min().unwrap_or(0);
    let others = CaptureEstimate::new(layers.saturating_sub(varying.len()).saturating_mul(sizes), least);
    varying.iter().fold(others, |sum, &varying| sum.and(CaptureEstimate::new(sizes, varying)))
}

/// Refuses an operation that waits, on a thread that captures a graph.
pub(crate) fn not_while_capturing(what: &'static str) -> Result<()> {
    if is_capturing() {
        let instead = "begin the step before or after the capture";
        return Err(ascend_attention::Error::Capturing { what, instead }.into());
    }
    Ok(())
}

impl<B> fmt::Debug for GraphPool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphPool")
            .field("sizes", &self.sizes().collect::<Vec<_>>())
            .field("layers", &self.layers)
            .finish_non_exhaustive()
    }
}

/// The graphs of a step's size, each of which is replayed once in the step.
pub(crate) struct Replays<'a, B> {
    buffers: &'a B,
    graphs: &'a mut [Graph<Arc<B>>],
    /// The update of each graph; `None` once it was replayed, or its replay failed.
    updates: Vec<Option<Update>>,
    stream: &'a Stream,
}

impl<'a, B> Replays<'a, B> {
    /// The buffers of the step's size.
    pub(crate) fn buffers(&self) -> &'a B {
        self.buffers
    }

    /// Refuses a graph that there is not.
    fn check(&self, layer: usize) -> Result<()> {
        let layers = self.graphs.len();
        if layer < layers { Ok(()) } else { Err(no_layer(layer, layers)) }
    }

    /// Launches a graph with the step's lengths. Unless that is refused, so that it can be repeated, the step has begun
    /// to write, also where the launch fails: the device may run some of it.
    pub(crate) fn launch(&mut self, layer: usize, layers: &mut QueuedLayers) -> Result<()> {
        self.check(layer)?;
        let update = &mut self.updates[layer];
        let Some(lengths) = &*update else {
            return Err(rules::launch_failed(format_args!("layer {layer}")).into());
        };
        let launched = self.graphs[layer].launch(self.stream, lengths).map_err(Error::from);
        if !launched.as_ref().is_err_and(Error::is_refusal) {
            *update = None;
            layers.begin_write();
        }
        launched
    }
}

impl<B> fmt::Debug for Replays<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.updates.iter().filter(|update| update.is_some()).count();
        f.debug_struct("Replays").field("graphs", &self.graphs.len()).field("left", &left).finish_non_exhaustive()
    }
}

/// A step whose layers are replayed from graphs. From [`GraphPool::begin`]. Where layers are left out, its tokens do
/// not count as computed, as for [`Step`](crate::Step).
#[must_use = "nothing is computed until the layers are replayed"]
pub struct GraphStep<'a, B> {
    replays: Replays<'a, B>,
    layers: QueuedLayers,
    /// Keeps blocks that go back during the step.
    _lease: Option<StepLease<'a>>,
}

impl<'a, B> GraphStep<'a, B> {
    /// Ends the step, and checks that all its layers were queued: [`Step::end`](crate::Step::end).
    ///
    /// # Errors
    /// As for [`Step::end`](crate::Step::end).
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }

    /// Refuses a layer that there is not, and one that was replayed.
    fn admits(&self, layer: usize) -> Result<()> {
        self.replays.check(layer)?;
        Ok(self.layers.check_not_repeated(layer)?)
    }

    /// The buffers of the step's size, to be filled on the step's stream.
    pub fn buffers(&self) -> &'a B {
        self.replays.buffers
    }

    /// Launches a layer's graph with the step's lengths. Returns at once. The replay overwrites what other layers
    /// have left in the buffers.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for one that was replayed in this step, and one whose
    /// launch has failed; as for [`Graph::launch`]. A launch that a rule has refused can be repeated.
    pub fn launch(&mut self, layer: usize) -> Result<()> {
        let outcome = self.launch_layer(layer);
        self.layers.note_outcome(layer, outcome)
    }

    fn launch_layer(&mut self, layer: usize) -> Result<()> {
        self.admits(layer)?;
        self.replays.launch(layer, &mut self.layers)
    }
}

impl<B> fmt::Debug for GraphStep<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphStep").field("replays", &self.replays).finish_non_exhaustive()
    }
}
