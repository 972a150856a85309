//! What a step records: tokens that nothing computed are not read, metadata of an earlier step does not begin again,
//! and a step without some of its layers does not count.

mod callers;
mod shared_blocks;
mod steps;

use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, GraphLimits, Violation,
};

use crate::harness;
use crate::tokens::{DIM, dense, packed};

const LAYERS: usize = 3;
const PAD: PadPolicy = PadPolicy::SkipNegative;

/// An engine of one head and three layers.
struct Engine {
    stream: Stream,
    attention: Attention<bf16>,
}

impl Engine {
    fn over(cache: impl FnOnce(&Stream, CacheShape) -> PagedKvCache<bf16>) -> Self {
        let stream = harness::stream();
        let cache = cache(&stream, CacheShape::new(LAYERS, 1, DIM));
        let backends = match cache.is_quantised() {
            true => Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill),
            false => Backends::none().with(Backend::Fused).with(Backend::PagedDecode),
        };
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        Self { stream, attention }
    }

    /// A cache of this number of blocks of 128 tokens.
    fn new(blocks: usize) -> Self {
        Self::over(|stream, shape| PagedKvCache::new(stream.device(), blocks, 128, shape, PAD).unwrap())
    }

    /// Graphs of steps of one token.
    fn graphs(&self) -> AttentionGraphs<bf16> {
        let limits = GraphLimits::new([1], 256);
        let captured = (self.attention).capture(&self.stream, Causality::Causal, &limits);
        captured.unwrap()
    }

    fn sequence(&self) -> Sequence {
        Sequence::new(self.attention.cache().pool())
    }

    fn grow(&mut self, sequence: &mut Sequence, tokens: usize) {
        self.attention.grow(&self.stream, sequence, tokens).unwrap();
    }

    /// The metadata of a step of one request.
    fn of_request(&self, request: BatchRequest<'_>) -> Result<AttentionMetadata, Violation> {
        let settings = BatchSettings::of(self.attention.cache(), Causality::Causal);
        AttentionMetadata::new(&[request], settings)
    }

    /// The metadata of a step of the last `new` tokens.
    fn metadata(&self, sequence: &Sequence, new: usize) -> AttentionMetadata {
        self.of_request(BatchRequest::of(sequence, new)).unwrap()
    }

    /// As [`metadata`](Self::metadata), of a step whose tokens an earlier step may have computed.
    fn metadata_again(&self, sequence: &Sequence, new: usize) -> AttentionMetadata {
        let request = BatchRequest::of(sequence, new).recompute();
        self.of_request(request).unwrap()
    }

    /// Queues layers of a step of the last of these tokens. The rows of the last one.
    fn layers(
        &mut self,
        metadata: &AttentionMetadata,
        names: &[u64],
        layers: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<Vec<bf16>>, Error> {
        let new = &names[names.len() - metadata.tokens()..];
        let mut step = self.attention.begin(&self.stream, metadata)?;
        let mut last = Vec::new();
        for layer in layers {
            let [query, key, value] = [0, 1, 2].map(|what| packed(&self.stream, new, layer, what, 1));
            let output = step.forward(layer, (&query, &key, &value))?;
            let mut rows = output.download(&self.stream).unwrap();
            last.push(rows.split_off(rows.len() - DIM));
        }
        Ok(last)
    }

    /// A step of all layers, whose last row is compared with dense attention over all names.
    fn step(&mut self, metadata: &AttentionMetadata, names: &[u64]) {
        let away = self.distance(metadata, names).unwrap();
        assert!(away < 8e-3, "{away} away from dense attention");
    }

    fn distance(&mut self, metadata: &AttentionMetadata, names: &[u64]) -> Result<f64, Error> {
        let outputs = self.layers(metadata, names, 0..LAYERS)?;
        let shape = self.attention.shape();
        let layers = outputs.iter().enumerate().map(|(layer, got)| {
            let want = dense(names, layer, shape, |_| true);
            distance(got, &want)
        });
        Ok(layers.fold(0.0, f64::max))
    }

    /// Why a step does not begin.
    fn refused(&mut self, metadata: &AttentionMetadata, names: &[u64]) -> Violation {
        match self.distance(metadata, names) {
            Err(Error::Violation(refused)) => refused,
            Err(other) => panic!("{other}"),
            Ok(away) => panic!("accepted, and {away} away from dense attention"),
        }
    }

    /// Grows by the last of these tokens, and computes them.
    fn add(&mut self, sequence: &mut Sequence, names: &[u64]) {
        let new = names.len() - sequence.len();
        self.grow(sequence, new);
        let metadata = self.metadata(sequence, new);
        self.step(&metadata, names);
    }

    fn computed(&self, sequence: &Sequence) -> usize {
        self.attention.cache().computed_tokens(sequence).unwrap()
    }
}

fn distance(got: &[bf16], want: &[f64]) -> f64 {
    let both = got.iter().zip(want);
    both.map(|(got, want)| (got.to_f64() - want).abs()).fold(0.0, f64::max)
}

fn names(from: u64, tokens: usize) -> Vec<u64> {
    (from..from + tokens as u64).collect()
}

/// A plain cache, and one of INT8 with a scale for each token.
fn both_kinds(mut test: impl FnMut(Engine)) {
    test(Engine::new(2));
    test(Engine::over(|stream, shape| {
        PagedKvCache::quantised_by_token(stream.device(), 2, 128, shape, PAD, QuantisedType::Int8).unwrap()
    }));
}
