//! TriangleMix as a backend: prompts leave keys out in some layers, everything else is dense.

use std::fmt;
use std::ops::Range;

use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::{Element, Stream, Tensor, Violation};
use ascend_serving::{
    AttentionBackend, AttentionMetadata, Backend, Causality, LayerTensors, Result, StepContext, StepMemory, StepPlan,
    StepProgram, StepStage,
};

use crate::layers::TriangleLayers;
use crate::prefill::{Chosen, KeySource, TrianglePlan, TrianglePrefill};
use crate::rows::{TriangleChoice, TriangleThresholds, WhyDense};
use crate::rules;

/// TriangleMix for the prompts of a step, in the layers that are chosen for it; [`Backend::Fused`] in the others.
///
/// A request whose [`prompt_len`](ascend_serving::BatchRequest::prompt_len) is known leaves keys out in every chunk of
/// its prompt as if the prompt were computed at once. In the same batch, rows are dense where a request decodes, where
/// its prompt is short or of unknown length, and where the [`TriangleThresholds`] decide so. Neighbouring rows that are
/// computed alike share calls. [`TriangleMixBackend::choices`] reports what becomes of each request, and why.
///
/// A step in which no request leaves anything out is refused with the reasons, so that the next backend serves it;
/// windows and sinks are refused too. Over a paged cache, the call over the windows begins with a whole block, and
/// the band hides the keys before the window: what is computed is exactly the triangle. [`Backend::Fused`] lists what
/// packed calls take in each release.
///
/// ```
/// use ascend_attention::bf16;
/// use ascend_attention::spec::geometry::TriangleMix;
/// use ascend_serving::{Backend, Backends};
/// use ascend_trianglemix::{TriangleThresholds, TriangleLayers, TriangleMixBackend};
///
/// let triangle = TriangleMixBackend {
///     layers: TriangleLayers::from_start(16, 32)?,
///     sizes: TriangleMix::PAPER,
///     thresholds: TriangleThresholds::MEASURED,
/// };
/// let backends: Backends<bf16> = Backends::none().with(triangle).with(Backend::PagedDecode).with(Backend::Fused);
/// assert!(backends.names().eq(["triangle_mix", "paged_decode", "fused"]));
/// # Ok::<(), ascend_attention::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TriangleMixBackend {
    /// Layers that leave keys out.
    pub layers: TriangleLayers,
    /// Sinks, window and last rows.
    pub sizes: TriangleMix,
    /// When to leave keys out.
    pub thresholds: TriangleThresholds,
}

struct TriangleStep<T: Element> {
    layers: TriangleLayers,
    triangle: TrianglePlan,
    dense: StepPlan<T>,
    reads_cache: bool,
}

impl TriangleMixBackend {
    /// What becomes of each request of a step, dummies included, in the chosen layers.
    pub fn choices(&self, metadata: &AttentionMetadata) -> Vec<TriangleChoice> {
        let q = metadata.q_ends().per_request();
        let lengths = q.lengths().iter().zip(metadata.kv_lengths().lengths());
        let choose = |(at, (new, kv)): (usize, (&usize, &usize))| {
            let prompt = metadata.prompt_len(at);
            let rows = (kv.abs_diff(*new), *new);
            self.thresholds.choose(self.sizes, rows, prompt)
        };
        lengths.enumerate().map(choose).collect()
    }
}

/// The reasons why nothing is left out, each once.
fn reasons(choices: &[TriangleChoice]) -> String {
    let mut reasons: Vec<WhyDense> = Vec::new();
    for choice in choices {
        if let TriangleChoice::Dense(why) = choice
            && !reasons.contains(why)
        {
            reasons.push(*why);
        }
    }
    let reasons: Vec<String> = reasons.iter().map(WhyDense::to_string).collect();
    reasons.join(", ")
}

impl<T: Element> AttentionBackend<T> for TriangleMixBackend {
    fn name(&self) -> &'static str {
        "triangle_mix"
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let choices = self.choices(metadata);
        let sparse = |choice: &TriangleChoice| matches!(choice, TriangleChoice::Sparse { .. });
        let plain = causality == Causality::Causal && first.learnable_sink.is_none();
        let layers = self.layers.indices().len();
        if !plain || layers == 0 || !choices.iter().any(sparse) {
            return Err(Violation::new(
                &rules::BACKEND_TRIANGLE,
                format_args!(
                    "{causality:?}, {} sinks, {layers} layers, {}",
                    match first.learnable_sink {
                        Some(_) => "with",
                        None => "without",
                    },
                    reasons(&choices)
                ),
                "a causal prompt of known length that leaves enough out, no window, no sinks, 1 layer or more",
                "add a dense backend behind this one; tell requests the length of their prompts",
            )
            .into());
        }
        let dense = StepPlan::new(&Backend::Fused, step, first)?;
        let mut starts = Vec::with_capacity(choices.len());
        let mut end = 0;
        let requests = step.metadata.new_and_cached().zip(choices);
        let requests = requests.map(|((new, cached), choice)| -> Chosen {
            let rows: Range<usize> = end..end.saturating_add(new);
            starts.push(end);
            end = rows.end;
            (rows, cached, choice)
        });
        let requests: Vec<Chosen> = requests.collect();
        let prefill = TrianglePrefill { shape: step.shape, sizes: self.sizes, thresholds: self.thresholds };
        let reads_cache = metadata.state().reads_cache();
        let source = match reads_cache {
            true => KeySource::Paged(metadata.table(), step.block_table.block_size()),
            false => KeySource::Packed(&starts),
        };
        let tensors = tensors(first, reads_cache);
        let triangle = prefill.plan_rows(step.stream, requests, source, tensors)?;
        Ok(StepProgram::new([]).stage(TriangleStep { layers: self.layers.clone(), triangle, dense, reads_cache }))
    }
}

fn tensors<'a, T: Element>(layer: &LayerTensors<'a, T>, reads_cache: bool) -> [&'a Tensor<T>; 3] {
    match reads_cache {
        true => [layer.query, &layer.cache.key, &layer.cache.value],
        false => [layer.query, layer.key, layer.value],
    }
}

impl<T: Element> fmt::Debug for TriangleStep<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TriangleStep")
            .field("layers", &self.layers)
            .field("triangle", &self.triangle)
            .field("dense", &self.dense)
            .finish_non_exhaustive()
    }
}

impl<T: Element> StepStage<T> for TriangleStep<T> {
    fn memory(&self) -> StepMemory {
        self.dense.memory().beside(self.triangle.memory())
    }

    fn reads_own_keys(&self) -> bool {
        !self.reads_cache
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        if !self.layers.contains(layer.layer) {
            return self.dense.launch_into(stream, layer, output);
        }
        let [query, key, value] = tensors(layer, self.reads_cache);
        self.triangle.launch_into(stream, (query, key, value), output)
    }
}
