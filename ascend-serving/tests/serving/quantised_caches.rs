//! What tests of quantised caches share: products, tokens, and a request that such a cache serves.

use approx::abs_diff_eq;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    LayerInputs, OutputDeviation, compare_caches,
};

use crate::harness;
use crate::harness::reference::Half;

/// An emulated product with a release; none, said so, on an NPU.
pub fn emulated_as(soc: Soc, cann: Cann) -> Option<Stream> {
    if harness::not_on_npu("products are emulated") {
        return None;
    }
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
    Some(runtime.device(0).unwrap().stream().unwrap())
}

/// An emulated Ascend 950 with CANN 9.1; none, said so, on an NPU.
pub fn ascend_950() -> Option<Stream> {
    emulated_as(Soc::Ascend950, Cann::V9_1)
}

/// Rows of heads of `dim` elements, `[tokens, heads, dim]`.
pub fn upload(stream: &Stream, data: &[f32], heads: usize, dim: usize) -> Tensor<bf16> {
    let data: Vec<_> = data.iter().copied().map(bf16::from_f32).collect();
    let tokens = data.len() / (heads * dim);
    stream.upload(&data, [tokens, heads, dim]).unwrap()
}

/// Attention of four query heads over the two key heads of a cache, by all backends of its kind.
pub fn attention<T: Half>(cache: PagedKvCache<T>) -> Attention<T> {
    let shape = AttentionShape::new(4, 2, cache.shape().key_dim);
    let backends = match cache.is_quantised() {
        true => Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill).with(Backend::MxFp8),
        false => Backends::none().with(Backend::Fused),
    };
    Attention::new(shape, cache, backends)
}

/// A prompt, a decode and a chunk behind cached tokens, of one request over a cache of two heads: what serves each,
/// or why nothing does. Each head's values are all the same.
pub fn served<T: Half>(stream: &Stream, cache: PagedKvCache<T>) -> Vec<Result<&'static str, String>> {
    let (dim, format) = (cache.shape().key_dim, cache.shape().format);
    let mut attention = attention(cache);
    let mut sequence = Sequence::new(attention.cache().pool());
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut outcomes = Vec::new();
    for new in [130, 1, 3] {
        // Of a step that was refused, too.
        let before = sequence.len();
        attention.cache().mark_computed(&sequence, before).unwrap();
        attention.grow(stream, &mut sequence, new).unwrap();
        let batch = [BatchRequest::of(&sequence, new)];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let rows = |heads: usize| {
            let row = |head: usize| std::iter::repeat_n(T::from_f32(0.75 + head as f32), dim);
            let rows: Vec<T> = (0..new).flat_map(|_| (0..heads).flat_map(row)).collect();
            stream.upload(&rows, [new, heads, dim]).unwrap()
        };
        let mut step = attention.begin(stream, &metadata).unwrap();
        let outcome = step.forward(0, (&rows(4), &rows(2), &rows(2)));
        outcomes.push(match outcome {
            Ok(output) => {
                let output = output.download(stream).unwrap();
                // What was refused is missing from the cache.
                let checked = outcomes.iter().all(Result::is_ok);
                for (at, x) in output.iter().enumerate().filter(|_| checked) {
                    let (x, want) = (x.to_f64(), 0.75 + (at / dim % 4 / 2) as f64);
                    assert!(abs_diff_eq!(x, want, epsilon = 1e-2), "{format:?}, {at}: {x}");
                }
                Ok(step.selected(0).unwrap().name)
            }
            Err(why) => Err(why.to_string()),
        });
    }
    outcomes
}

/// Tokens of [`accuracies`].
pub const TOKENS: usize = 150;

/// Random tokens of one layer.
pub struct Layer {
    /// Query, key and value.
    pub numbers: [Vec<bf16>; 3],
    tensors: [Tensor<bf16>; 3],
}

impl Layer {
    /// Of four query heads and two key heads.
    pub fn random(stream: &Stream, seed: u64, dim: usize) -> Self {
        let numbers = [(0, 4), (1, 2), (2, 2)].map(|(what, heads)| {
            let numbers = harness::numbers(seed + what, TOKENS * heads * dim);
            numbers.into_iter().map(bf16::from_f32).collect::<Vec<bf16>>()
        });
        let tensors = numbers.each_ref().map(|numbers| {
            let heads = numbers.len() / (TOKENS * dim);
            stream.upload(numbers, [TOKENS, heads, dim]).unwrap()
        });
        Self { numbers, tensors }
    }

    pub fn rows(&self) -> LayerInputs<'_, bf16> {
        let [query, key, value] = &self.tensors;
        (query, key, value).into()
    }
}

/// How far attention over one cache is from that over another, which take one request's prompt, decodes and chunks.
pub fn accuracies(stream: &Stream, [exact, other]: [PagedKvCache<bf16>; 2], layers: &[Layer]) -> Vec<OutputDeviation> {
    let steps = [100, 1, 1, 20, 1, 1, 26];
    let rows: Vec<_> = layers.iter().map(Layer::rows).collect();
    let (mut exact, mut other) = (attention(exact), attention(other));
    let free = [&exact, &other].map(|of| of.cache().pool().free_blocks());
    let found = compare_caches(stream, &mut exact, &mut other, &steps, &rows).unwrap();
    stream.synchronize().unwrap();
    let left = [&exact, &other].map(|of| of.cache().pool().free_blocks());
    assert_eq!(left, free);
    for of in &found {
        println!("largest {:.5}, mean {:.6} of the range {:.2}", of.largest_share(), of.mean_share(), of.range());
    }
    found
}
