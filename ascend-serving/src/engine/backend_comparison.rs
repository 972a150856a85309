//! Two ways to compute the same recorded steps: how far apart they are, where, and how long each takes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ascend_attention::case::CaseTensor;
use ascend_attention::{Number, Stream, Tensor};

use crate::backends::{AttentionShape, check_deterministic};
use crate::batch::{AttentionMetadata, AttentionState, RecordedBatch};
use crate::error::{Error, Result};
use crate::kv::{CacheShape, CacheWrite};

use super::attention::Attention;
use super::element_place::{ElementPlace, TokenHeads, TokenOrder, request_ends};
use super::output_deviation::OutputDeviation;

/// The comparison of one step. From [`compare_backends`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepComparison {
    /// What kind of step it is.
    pub state: AttentionState,
    /// The backend by which the first and the second attention computed the step (that of the first layer, if its
    /// layers [prefer](crate::Backends::prefer) several), or why none of their backends could. Nothing is compared
    /// unless both computed it.
    pub backends: [Result<&'static str>; 2],
    /// Time of each side on the host's clock from the beginning of the step, planning included, until the stream has
    /// finished its last layer: the fastest of the runs. That of a side which refused the step ends with the refusal.
    pub times: [Duration; 2],
    /// How far the outputs of all layers are from those of the first attention, without padding. Without elements where
    /// one side refused the step.
    pub deviation: OutputDeviation,
    /// The first of the elements that are furthest apart; `None` if all are equal, zeros of either sign among them.
    pub furthest: Option<FurthestElement>,
}

/// An element that two backends computed differently.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FurthestElement {
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

/// Runs the same steps by two attentions, each `runs` times (0 means once), and reports how far their outputs are
/// apart, where the difference is largest, and how long each took. The fastest run counts, since the first one
/// includes preparations that later ones reuse.
///
/// A record has lengths and blocks, but no numbers: both caches are first filled with the same numbers, so that a step
/// reads what recorded earlier steps would have written, and get the same queries, keys and values; equal seeds give
/// equal numbers. The attentions have one group of layers, as many of the same heads and scales; backends, formats of
/// the caches and the order of layers in them may differ, and latents are not compared. Of the library's backends
/// `named_mask` alone computes named masks. A step that one of them cannot compute is reported with the reason, and its
/// keys are written nevertheless. What the caches held before is lost, and so are the tokens of sequences over them:
/// make every [`PrefixCache`](crate::PrefixCache) over them anew, whose prefixes would begin with other keys. The
/// function waits for the stream after each step: use it to choose backends and find errors, not while serving.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
/// use ascend_serving::{Attention, AttentionShape, Backend, Backends, RecordedBatch, compare_backends};
///
/// let step = RecordedBatch::from_json(
///     r#"{"version":1,
///         "settings":{"blocks":8,"block_size":128,"pad":"SkipNegative","causality":"Causal",
///                     "policy":{"chunked_prefill":false,"drafting":null}},
///         "requests":[{"cached":130,"new":1,"drafts":0,"row":[4,2]},{"cached":7,"new":1,"drafts":0,"row":[3]}]}"#,
/// )?;
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let attention = |backend| -> ascend_serving::Result<_> {
///     let shape = CacheShape::new(2, 2, 64);
///     let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative)?;
///     Ok(Attention::new(AttentionShape::new(4, 2, 64), cache, Backends::none().with(backend)))
/// };
/// let (mut fused, mut paged) = (attention(Backend::Fused)?, attention(Backend::PagedDecode)?);
/// let found = compare_backends(&stream, [&mut fused, &mut paged], &[step], 0, 3)?;
/// assert_eq!(found[0].deviation.elements, 2 * 2 * 4 * 64); // layers, tokens, heads, elements of a head
/// assert!(found[0].deviation.largest < 1e-2);
/// # }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no step, for attentions of other heads, scales or numbers of
/// layers, over latents, without layers, of several groups of layers or with layers of linear attention;
/// [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE) for a step that was recorded over other blocks;
/// [`Violation`](crate::Violation) for a record that is no valid batch. Nothing is overwritten then. As for
/// [`CacheWrite::plan`], [`Attention::begin`] and [`Step::forward`](crate::Step::forward), except for a step that no
/// backend serves.
pub fn compare_backends<T: Number>(
    stream: &Stream,
    attentions: [&mut Attention<T>; 2],
    steps: &[RecordedBatch],
    seed: u64,
    runs: usize,
) -> Result<Vec<StepComparison>> {
    if steps.is_empty() {
        return Err(Error::invalid("steps", "none", "1 or more").fix("record at least one step"));
    }
    let [first, second] = attentions;
    for attention in [&*first, &*second] {
        if attention.groups.len() != 1 || attention.states.is_some() || attention.places.is_empty() {
            let given = format_args!("{} layers in {} groups", attention.places.len(), attention.groups.len());
            return Err(Error::invalid("attentions", given, "one group of layers of attention, and no others")
                .fix("compare each group of the model's layers by attentions of its own (`Attention::new`)"));
        }
        if attention.cache().shape().is_latent() {
            return Err(Error::invalid("attentions", "caches of latents", "caches of keys and values")
                .fix("compute the steps over latents by both attentions, and compare their outputs"));
        }
    }
    let heads = [&*first, &*second].map(|attention| {
        let CacheShape { kv_heads, key_dim, value_dim, .. } = attention.cache().shape();
        let group = &attention.groups[0];
        let of_layers: Vec<_> = attention.places.iter().map(|place| group.shape_of(place.layer)).collect();
        (of_layers, [kv_heads, key_dim, value_dim])
    });
    if heads[0] != heads[1] {
        let counts = [&*first, &*second].map(|attention| (attention.places.len(), attention.shape()));
        return Err(Error::invalid(
            "attentions",
            format_args!("{counts:?}"),
            "as many layers, of the same heads and scales",
        )
        .fix("make both attentions for one model"));
    }
    // Steps with one mask share it, and what is made for it.
    let mut masks = HashMap::new();
    let metadata = |step| -> Result<AttentionMetadata> {
        let mut metadata = RecordedBatch::metadata(step)?;
        if let Some(text) = step.mask_text() {
            let mask = masks.entry(text).or_insert_with(|| metadata.mask().clone());
            metadata.set_mask(mask.clone());
        }
        Ok(metadata)
    };
    let steps = steps.iter().map(metadata).collect::<Result<Vec<_>>>()?;
    // What `begin` would refuse of a step is refused before the caches are overwritten.
    for attention in [&*first, &*second] {
        check_deterministic(attention.deterministic, stream.device())?;
        for group in &attention.groups {
            steps.iter().try_for_each(|metadata| group.admits(stream, metadata))?;
        }
    }
    // On a thread that captures this refuses, before anything is lost.
    stream.synchronize()?;
    for attention in [&mut *first, &mut *second] {
        attention.cache().entry().lose_all();
        fill(stream, attention, seed)?;
    }
    let (query_heads, value_dim) = (first.shape().heads, first.cache().shape().value_dim);
    let compared = steps.iter().enumerate().map(|(at, metadata)| {
        let layers = random_layers(stream, first, (seed, at), metadata.tokens())?;
        let first = fastest_run(stream, first, metadata, &layers, runs)?;
        let second = fastest_run(stream, second, metadata, &layers, runs)?;
        Ok(StepComparison::new((query_heads, value_dim), metadata, [first, second]))
    });
    compared.collect()
}

/// A step that was computed once or several times.
struct StepRun<T> {
    /// The backend of the first layer, or why no backend serves the step.
    backend: Result<&'static str>,
    /// The fastest.
    time: Duration,
    /// The outputs of each layer in the first run.
    outputs: Vec<Vec<T>>,
}

/// Computes a step several times.
fn fastest_run<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    metadata: &AttentionMetadata,
    layers: &[Rows<T>],
    runs: usize,
) -> Result<StepRun<T>> {
    let mut fastest = run(stream, attention, metadata, layers)?;
    for _ in 1..runs {
        // A step writes the same keys again.
        fastest.time = fastest.time.min(run(stream, attention, metadata, layers)?.time);
    }
    Ok(fastest)
}

/// Query, key and value of one layer.
type Rows<T> = [Tensor<T>; 3];

/// Computes a step, or writes its keys alone where no backend serves it.
fn run<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    metadata: &AttentionMetadata,
    layers: &[Rows<T>],
) -> Result<StepRun<T>> {
    stream.synchronize()?;
    let begin = Instant::now();
    let outputs = forward(stream, attention, metadata, layers);
    stream.synchronize()?;
    let time = begin.elapsed();
    match outputs {
        Ok((backend, outputs)) => {
            let outputs = outputs.iter().map(|output| output.download(stream));
            Ok(StepRun { backend: Ok(backend), time, outputs: outputs.collect::<std::result::Result<_, _>>()? })
        }
        Err(refused @ Error::NoBackend { .. }) => {
            // Later steps read what this one would have written.
            for (layer, [_, key, value]) in layers.iter().enumerate() {
                write_rows(stream, attention, metadata.slots(), layer, [key, value])?;
            }
            Ok(StepRun { backend: Err(refused), time, outputs: Vec::new() })
        }
        Err(error) => Err(error),
    }
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

/// Writes keys and values of a layer of the model.
fn write_rows<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    slots: &[i32],
    layer: usize,
    [key, value]: [&Tensor<T>; 2],
) -> Result<()> {
    let own = attention.group_of(layer)?.1;
    let cache = attention.cache_mut();
    let write = CacheWrite::plan(cache, stream, slots, key, value)?;
    cache.write(stream, &write, own, key, value)
}

impl StepComparison {
    /// The comparison of two runs, whose outputs have heads of this number and size.
    fn new<T: Number>((heads, head_size): (usize, usize), metadata: &AttentionMetadata, runs: [StepRun<T>; 2]) -> Self {
        let rows = TokenHeads {
            order: TokenOrder::TokensFirst,
            first_token: 0,
            tokens: metadata.actual_tokens(),
            heads,
            head_size,
        };
        // Padding comes behind the tokens, and is not compared.
        let elements = rows.tokens * rows.heads * rows.head_size;
        let [first, second] = runs;
        let mut deviation = OutputDeviation::default();
        for (first, second) in first.outputs.iter().zip(&second.outputs) {
            deviation.add(&first[..elements], &second[..elements]);
        }
        let furthest = (deviation.largest > 0.0).then(|| {
            let (layer, index) = (deviation.at / elements, deviation.at % elements);
            let ElementPlace { request, token, head, element } = rows.place(index, request_ends(metadata));
            let values = [&first, &second].map(|run| run.outputs[layer][index].to_f64());
            FurthestElement { layer, request, token, head, element, values, distance: deviation.largest }
        });
        let times = [first.time, second.time];
        Self { state: metadata.state(), backends: [first.backend, second.backend], times, deviation, furthest }
    }
}

/// Fills the cache of each layer with numbers.
fn fill<T: Number>(stream: &Stream, attention: &mut Attention<T>, seed: u64) -> Result<()> {
    let pool = attention.cache().pool();
    let tokens = pool.blocks() * pool.block_size();
    let slots: Vec<i32> = (0..).take(tokens).collect();
    for layer in 0..attention.places.len() {
        let [key, value] = random_keys(stream, attention.cache().shape(), [seed, 0, layer as u64], tokens)?;
        write_rows(stream, attention, &slots, layer, [&key, &value])?;
    }
    Ok(())
}

/// The rows of a step for each layer.
fn random_layers<T: Number>(
    stream: &Stream,
    attention: &Attention<T>,
    (seed, step): (u64, usize),
    tokens: usize,
) -> Result<Vec<Rows<T>>> {
    let AttentionShape { heads, head_dim, .. } = attention.shape();
    let rows = |layer| {
        // Numbers of step 0 are those of the cache.
        let seed = [seed, step as u64 + 1, layer as u64];
        let [key, value] = random_keys(stream, attention.cache().shape(), seed, tokens)?;
        Ok([random_rows(stream, 0, seed, [tokens, heads, head_dim])?, key, value])
    };
    (0..attention.places.len()).map(rows).collect()
}

/// Keys and values of tokens.
fn random_keys<T: Number>(stream: &Stream, shape: CacheShape, seed: [u64; 3], tokens: usize) -> Result<[Tensor<T>; 2]> {
    let key = random_rows(stream, 1, seed, [tokens, shape.kv_heads, shape.key_dim])?;
    Ok([key, random_rows(stream, 2, seed, [tokens, shape.kv_heads, shape.value_dim])?])
}

/// Numbers from -1 to 1.
fn random_rows<T: Number>(stream: &Stream, tensor: u64, seed: [u64; 3], shape: [usize; 3]) -> Result<Tensor<T>> {
    let elements = (shape.iter()).try_fold(1usize, |all, axis| all.checked_mul(*axis));
    let mut values = Vec::new();
    let room = elements.filter(|elements| values.try_reserve_exact(*elements).is_ok());
    let room = room.ok_or_else(|| {
        Error::invalid("steps", format_args!("{shape:?}"), "tensors that fit in the host's memory")
            .fix("try smaller steps")
    })?;
    let mut state = seed.into_iter().fold(mixed(tensor), |state, part| mixed(state ^ part));
    values.extend((0..room).map(|_| {
        state = mixed(state);
        // 24 bits are what a mantissa holds.
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }));
    let tensor = CaseTensor::from_f32(T::DTYPE, &shape, &values).map_err(|error| {
        Error::invalid("attentions", error, "numbers of the element type").fix("try an element type of 16 or 32 bits")
    })?;
    let uploaded = stream.upload_bytes(tensor.dtype(), tensor.bytes(), shape)?;
    Ok(uploaded.typed()?)
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
        // Tokens of a single head of two elements, in two layers.
        let run = |second: [f32; 10]| StepRun {
            backend: Ok(""),
            time: Duration::ZERO,
            outputs: vec![vec![0.0f32; 5 * 2], second.to_vec()],
        };
        let (first, second) = ([0.0; 10], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 9.0, 9.0, 9.0, 9.0]);
        let compared = StepComparison::new((1, 2), &metadata, [run(first), run(second)]);
        assert_eq!((compared.deviation.elements, compared.deviation.equal), (2 * 3 * 2, 11));
        let at = compared.furthest.unwrap();
        let place = (at.layer, at.request, at.token, at.head, at.element);
        assert_eq!((place, at.distance), ((1, 1, 1, 0, 1), 1.0));
    }
}
