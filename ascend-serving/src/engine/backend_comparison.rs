//! Two ways to compute the same recorded steps: how far apart they are, where, and how long each takes.

use std::time::{Duration, Instant};

use ascend_attention::case::CaseTensor;
use ascend_attention::spec::ops::fused_infer_attention_score::Cache;
use ascend_attention::{Number, Stream, Tensor};

use crate::backends::{AttentionShape, Backends};
use crate::batch::{AttentionMetadata, AttentionState, LayerMask, RecordedBatch};
use crate::error::{Error, Result};
use crate::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache};

use super::attention::Attention;
use super::element_place::{ElementPlace, TokenHeads, TokenOrder, request_ends};

/// The model and numbers with which recorded steps are computed: a record has lengths and blocks, but neither heads
/// nor numbers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BackendTrial {
    /// The heads.
    pub shape: AttentionShape,
    /// Layers of the cache.
    pub layers: usize,
    /// The format of the cache.
    pub format: Cache,
    /// Seed of the numbers in cache, queries, keys and values: equal seeds give equal numbers for every backend.
    pub seed: u64,
    /// How often each side computes a step. The fastest run counts, since the first one includes preparations that
    /// later ones reuse. 0 means once.
    pub runs: usize,
    /// The mask of every step; `None` is the recorded one, or that of its settings.
    pub mask: Option<LayerMask>,
}

impl BackendTrial {
    /// `layers` layers of these heads, over a cache in BnBsH.
    pub fn new(shape: AttentionShape, layers: usize) -> Self {
        Self { shape, layers, format: Cache::BnBsH, seed: 0, runs: 1, mask: None }
    }

    /// Sets the mask of every step, in the place of the recorded one and of that of its settings.
    pub fn mask(mut self, mask: impl Into<LayerMask>) -> Self {
        self.mask = Some(mask.into());
        self
    }

    /// Sets another format of the cache.
    pub fn format(mut self, format: Cache) -> Self {
        self.format = format;
        self
    }

    /// Sets another seed of the numbers.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets how often each step is computed.
    pub fn runs(mut self, runs: usize) -> Self {
        self.runs = runs;
        self
    }
}

/// The comparison of all steps. From [`compare_backends`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BackendComparison {
    /// Each step, in order.
    pub steps: Vec<StepComparison>,
}

/// The comparison of one step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepComparison {
    /// What kind of step it is.
    pub state: AttentionState,
    /// What the first and the second list of backends did, or why none of their backends could serve the step.
    /// Nothing is compared unless both served it.
    pub sides: [Result<ServedStep>; 2],
    /// Elements compared.
    pub elements: usize,
    /// Elements that are equal bit by bit.
    pub equal: usize,
    /// The first of the elements that are furthest apart; `None` if all are equal.
    pub furthest: Option<BackendDeviation>,
}

/// A step that a backend served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServedStep {
    /// The backend that served the step: that of the first layer, if its layers
    /// [prefer](crate::Backends::prefer) several.
    pub backend: &'static str,
    /// Time on the host's clock from the beginning of the step, planning included, until the stream has finished its
    /// last layer: the fastest of [the runs](BackendTrial::runs).
    pub time: Duration,
}

/// An element that two backends computed differently.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BackendDeviation {
    /// The step.
    pub step: usize,
    /// The layer.
    pub layer: usize,
    /// The request of the step.
    pub request: usize,
    /// The place of the token among the request's new tokens.
    pub token: usize,
    /// The query head.
    pub head: usize,
    /// The element of the head.
    pub element: usize,
    /// The values that the first and the second backend computed.
    pub values: [f64; 2],
    /// The difference of the values; infinite unless both are finite.
    pub distance: f64,
}

impl BackendComparison {
    /// Elements compared.
    pub fn elements(&self) -> usize {
        let elements = self.steps.iter().map(|step| step.elements);
        elements.fold(0, usize::saturating_add)
    }

    /// Elements that are equal bit by bit.
    pub fn equal(&self) -> usize {
        let equal = self.steps.iter().map(|step| step.equal);
        equal.fold(0, usize::saturating_add)
    }

    /// The share of elements that are equal bit by bit; `None` if nothing was compared.
    pub fn equal_share(&self) -> Option<f64> {
        let elements = self.elements();
        (elements > 0).then(|| self.equal() as f64 / elements as f64)
    }

    /// The first of the elements that are furthest apart.
    pub fn furthest(&self) -> Option<&BackendDeviation> {
        let found = self.steps.iter().filter_map(|step| step.furthest.as_ref());
        found.reduce(|most, next| match next.distance > most.distance {
            true => next,
            false => most,
        })
    }

    /// How long the first and the second list took for the steps that both served.
    pub fn times(&self) -> [Duration; 2] {
        let mut times = [Duration::ZERO; 2];
        for step in &self.steps {
            if let [Ok(first), Ok(second)] = &step.sides {
                for (sum, served) in times.iter_mut().zip([first, second]) {
                    *sum = sum.saturating_add(served.time);
                }
            }
        }
        times
    }
}

/// Runs the same steps by two lists of backends, each over a cache of its own, and reports how far their outputs are
/// apart, where the difference is largest, and how long each took.
///
/// Both caches begin full of the same numbers, so that a step reads what recorded earlier steps would have written,
/// and get the same new keys and values. A step that one of the lists cannot serve is reported with the reason, and
/// its keys are written nevertheless. The function waits for the stream after each step: use it to choose backends
/// and find errors, not while serving.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::{AttentionShape, Backend, BackendTrial, Backends};
/// use ascend_serving::{RecordedBatch, compare_backends};
///
/// let step = RecordedBatch::from_json(
///     r#"{"version":1,
///         "settings":{"blocks":8,"block_size":128,"pad":"SkipNegative","causality":"Causal",
///                     "policy":{"chunked_prefill":false,"drafting":null}},
///         "requests":[{"cached":130,"new":1,"drafts":0,"row":[4,2]},{"cached":7,"new":1,"drafts":0,"row":[3]}]}"#,
/// )?;
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let trial = BackendTrial::new(AttentionShape::new(4, 2, 64), 2);
/// let backends = [Backends::none().with(Backend::Fused), Backends::none().with(Backend::PagedDecode)];
/// let found = compare_backends::<bf16>(&stream, &trial, backends, &[step])?;
/// assert_eq!(found.elements(), 2 * 2 * 4 * 64); // layers, tokens, heads, elements of a head
/// assert!(found.furthest().is_none_or(|at| at.distance < 1e-2));
/// # }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no step, steps whose settings are of different
/// caches, and a trial without layers; [`Violation`](crate::Violation) for a record that is no valid batch; as for
/// [`PagedKvCache::new`], [`Attention::begin`] and [`Step::forward`](crate::Step::forward), except for a step that no
/// backend serves.
pub fn compare_backends<T: Number>(
    stream: &Stream,
    trial: &BackendTrial,
    backends: [Backends<T>; 2],
    steps: &[RecordedBatch],
) -> Result<BackendComparison> {
    let first =
        (steps.first()).ok_or_else(|| Error::invalid("steps", "none", "1 or more").fix("record at least one step"))?;
    if trial.layers == 0 {
        return Err(Error::invalid("trial.layers", 0, "1 or more").fix("try at least one layer"));
    }
    let cache = |recorded: &RecordedBatch| {
        let settings = recorded.settings;
        (settings.blocks(), settings.block_size(), settings.pad())
    };
    let (blocks, block_size, pad) = cache(first);
    if let Some(at) = steps.iter().position(|step| cache(step) != cache(first)) {
        return Err(Error::invalid(
            "steps",
            format_args!("step {at} over another cache than step 0"),
            format_args!("{blocks} blocks of {block_size} tokens and the same padding in each"),
        )
        .fix("compare steps of one cache at a time"));
    }
    let [first, second] = backends;
    let mut first = trial.attention(stream, (blocks, block_size, pad), first)?;
    let mut second = trial.attention(stream, (blocks, block_size, pad), second)?;
    let mut found = Vec::with_capacity(steps.len());
    for (at, step) in steps.iter().enumerate() {
        let mut metadata = step.metadata()?;
        if let Some(mask) = &trial.mask {
            metadata.set_mask(mask.clone());
        }
        let layers = trial.layers(stream, at, metadata.tokens())?;
        let (first, first_outputs) = fastest_run(stream, &mut first, &metadata, &layers, trial.runs)?;
        let (second, second_outputs) = fastest_run(stream, &mut second, &metadata, &layers, trial.runs)?;
        let mut compared =
            StepComparison { state: metadata.state(), sides: [first, second], elements: 0, equal: 0, furthest: None };
        if compared.sides.iter().all(Result::is_ok) {
            let outputs = first_outputs.iter().zip(&second_outputs);
            for (layer, (first, second)) in outputs.enumerate() {
                compared.add((at, layer), (trial.shape, &metadata), first, second);
            }
        }
        found.push(compared);
    }
    Ok(BackendComparison { steps: found })
}

/// Runs a step as often as a trial says, and returns the outputs of the first run and the time of the fastest.
fn fastest_run<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    metadata: &AttentionMetadata,
    layers: &[Rows<T>],
    runs: usize,
) -> Result<(Result<ServedStep>, Vec<Vec<T>>)> {
    let (mut served, outputs) = run(stream, attention, metadata, layers)?;
    for _ in 1..runs {
        // A step writes the same keys again.
        let (again, _) = run(stream, attention, metadata, layers)?;
        if let (Ok(best), Ok(again)) = (&mut served, again) {
            best.time = best.time.min(again.time);
        }
    }
    Ok((served, outputs))
}

/// Query, key and value of one layer.
type Rows<T> = [Tensor<T>; 3];

/// Runs a step and returns the output of each layer, where a backend serves it.
fn run<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    metadata: &AttentionMetadata,
    layers: &[Rows<T>],
) -> Result<(Result<ServedStep>, Vec<Vec<T>>)> {
    stream.synchronize()?;
    let begin = Instant::now();
    let outputs = forward(stream, attention, metadata, layers);
    stream.synchronize()?;
    let time = begin.elapsed();
    let (backend, outputs) = match outputs {
        Ok(served) => served,
        Err(refused @ Error::NoBackend { .. }) => {
            // Later steps read what this one would have written.
            let cache = attention.cache_mut();
            let [_, key, value] = match layers.first() {
                Some(rows) => rows,
                None => return Ok((Err(refused), Vec::new())),
            };
            let write = CacheWrite::plan(cache, stream, metadata.slots(), key, value)?;
            for (layer, [_, key, value]) in layers.iter().enumerate() {
                cache.write(stream, &write, layer, key, value)?;
            }
            return Ok((Err(refused), Vec::new()));
        }
        Err(error) => return Err(error),
    };
    let outputs = outputs.iter().map(|output| output.download(stream));
    let outputs: std::result::Result<_, _> = outputs.collect();
    Ok((Ok(ServedStep { backend, time }), outputs?))
}

fn forward<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    metadata: &AttentionMetadata,
    layers: &[Rows<T>],
) -> Result<(&'static str, Vec<Tensor<T>>)> {
    let mut outputs = Vec::with_capacity(layers.len());
    let mut step = attention.begin(stream, metadata)?;
    for (layer, [query, key, value]) in layers.iter().enumerate() {
        outputs.push(step.forward(layer, (query, key, value))?.clone());
    }
    let backend = step.selected(0).map_or("", |selected| selected.name);
    Ok((backend, outputs))
}

impl StepComparison {
    /// Adds the outputs of a layer, whose padding is not compared.
    fn add<T: Number>(
        &mut self,
        (step, layer): (usize, usize),
        (shape, metadata): (AttentionShape, &AttentionMetadata),
        first: &[T],
        second: &[T],
    ) {
        let rows = TokenHeads {
            order: TokenOrder::TokensFirst,
            first_token: 0,
            tokens: metadata.actual_tokens(),
            heads: shape.heads,
            head_size: shape.head_dim,
        };
        let row = rows.heads.saturating_mul(rows.head_size);
        let pairs = first.iter().zip(second);
        for (index, (first, second)) in pairs.take(rows.tokens.saturating_mul(row)).enumerate() {
            let values = [first.to_f64(), second.to_f64()];
            let [first, second] = values;
            self.elements = self.elements.saturating_add(1);
            if first.to_bits() == second.to_bits() {
                self.equal = self.equal.saturating_add(1);
                continue;
            }
            let distance = match first.is_finite() && second.is_finite() {
                true => (first - second).abs(),
                false => f64::INFINITY,
            };
            if (self.furthest).is_some_and(|most| distance <= most.distance) {
                continue;
            }
            let ElementPlace { request, token, head, element } = rows.place(index, request_ends(metadata));
            self.furthest = Some(BackendDeviation { step, layer, request, token, head, element, values, distance });
        }
    }
}

/// The tensors for which numbers are generated.
#[derive(Clone, Copy)]
enum Numbers {
    Query,
    Key,
    Value,
    CachedKey,
    CachedValue,
}

impl BackendTrial {
    /// The attention of one side, over a cache of its own that is full of numbers.
    fn attention<T: Number>(
        &self,
        stream: &Stream,
        (blocks, block_size, pad): (usize, usize, PadPolicy),
        backends: Backends<T>,
    ) -> Result<Attention<T>> {
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        let shape = CacheShape::new(self.layers, kv_heads, head_dim).format(self.format);
        let cache = PagedKvCache::new(stream.device(), blocks, block_size, shape, pad)?;
        for layer in 0..self.layers {
            let layer_cache = cache.layer(layer)?;
            for (tensor, numbers) in
                [(&layer_cache.key, Numbers::CachedKey), (&layer_cache.value, Numbers::CachedValue)]
            {
                let filled: Tensor<T> = self.tensor(stream, numbers, (0, layer), tensor.shape())?;
                tensor.copy_from(stream, &filled)?;
            }
        }
        Ok(Attention::new(self.shape, cache, backends))
    }

    /// The rows of a step for each layer.
    fn layers<T: Number>(&self, stream: &Stream, step: usize, tokens: usize) -> Result<Vec<Rows<T>>> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let rows = |layer| {
            let random_rows = |numbers, heads| self.tensor(stream, numbers, (step, layer), &[tokens, heads, head_dim]);
            Ok([
                random_rows(Numbers::Query, heads)?,
                random_rows(Numbers::Key, kv_heads)?,
                random_rows(Numbers::Value, kv_heads)?,
            ])
        };
        (0..self.layers).map(rows).collect()
    }

    /// Numbers from -1 to 1.
    fn tensor<T: Number>(
        &self,
        stream: &Stream,
        numbers: Numbers,
        (step, layer): (usize, usize),
        shape: &[usize],
    ) -> Result<Tensor<T>> {
        let elements = (shape.iter()).try_fold(1usize, |all, axis| all.checked_mul(*axis));
        let mut values = Vec::new();
        let room = elements.filter(|elements| values.try_reserve_exact(*elements).is_ok());
        let room = room.ok_or_else(|| {
            Error::invalid("trial", format_args!("{shape:?}"), "tensors that fit in the host's memory")
                .fix("try smaller steps")
        })?;
        let parts = [self.seed, numbers as u64, step as u64, layer as u64];
        let mut state = parts.into_iter().fold(0, |state, part| mixed(state ^ part));
        values.extend((0..room).map(|_| {
            state = mixed(state);
            // 24 bits are what a mantissa holds.
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        }));
        let tensor = CaseTensor::from_f32(T::DTYPE, shape, &values).map_err(|error| {
            Error::invalid("trial", error, "numbers of the element type").fix("try an element type of 16 or 32 bits")
        })?;
        let uploaded = stream.upload_bytes(tensor.dtype(), tensor.bytes(), shape)?;
        Ok(uploaded.typed()?)
    }
}

/// The output of SplitMix64 for a state: neighbouring states give unrelated outputs.
fn mixed(state: u64) -> u64 {
    let mut bits = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn padding_is_not_compared() {
        let step = RecordedBatch::from_json(
            r#"{"version":1,
                "settings":{"blocks":8,"block_size":4,"pad":"SkipNegative","causality":"Causal",
                            "policy":{"chunked_prefill":false,"drafting":null}},
                "requests":[{"cached":3,"new":1,"drafts":0,"row":[4]},{"cached":0,"new":2,"drafts":0,"row":[3]}]}"#,
        )
        .unwrap();
        let mut metadata = AttentionMetadata::new(&step.requests(), step.settings).unwrap();
        metadata.pad_to(5).unwrap();
        let mut compared = StepComparison {
            state: metadata.state(),
            sides: [(); 2].map(|()| Ok(ServedStep { backend: "", time: Duration::ZERO })),
            elements: 0,
            equal: 0,
            furthest: None,
        };
        // Tokens of a single head of two elements.
        let first = vec![0.0f32; 5 * 2];
        let second = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 9.0, 9.0, 9.0, 9.0];
        let of_step = (AttentionShape::new(1, 1, 2), &metadata);
        compared.add((7, 3), of_step, &first, &second);
        assert_eq!((compared.elements, compared.equal), (3 * 2, 5));
        let at = compared.furthest.unwrap();
        let place = (at.step, at.layer, at.request, at.token, at.head, at.element);
        assert_eq!((place, at.distance), ((7, 3, 1, 1, 0, 1), 1.0));
    }
}
