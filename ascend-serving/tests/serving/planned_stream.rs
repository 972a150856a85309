//! Plans run on the stream that they were made on, which orders the use of what their layers share, and refuse others.

use crate::harness;

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, LayerCache, PadPolicy, PagedKvCache, QuantisedType};
use ascend_serving::{
    AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error, LayerTensors,
    StepContext,
};

const HEADS: usize = 2;
const DIM: usize = 64;
const NEW: usize = 3;

/// Runs a plan over a quantised cache on its stream, on another one, and again on its own.
fn check(stream: &Stream, cache: &PagedKvCache<bf16>, backends: Backends<bf16>) {
    let settings = BatchSettings::of(cache, Causality::Causal);
    let request = BatchRequest::in_row(&[0], 5, NEW);
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let block_table = cache.block_table(stream, metadata.table()).unwrap();
    let ones = vec![bf16::ONE; NEW * HEADS * DIM];
    let rows = stream.upload(&ones, [NEW, HEADS, DIM]).unwrap();
    let none = || Tensor::empty(stream.device(), [0, HEADS, DIM]).unwrap();
    let unused = LayerCache { key: none(), value: none() };
    let layer = LayerTensors {
        layer: 0,
        query: &rows,
        key: &rows,
        value: &rows,
        cache: &unused,
        quantised: Some(cache.quantised_layer(0).unwrap()),
        learnable_sink: None,
        latent: None,
    };
    let step = StepContext {
        stream,
        shape: AttentionShape::new(HEADS, HEADS, DIM),
        metadata: &metadata,
        mask: metadata.mask(),
        block_table: &block_table,
        recorded: false,
        shares_keys: false,
    };
    let selected = backends.plan(&step, &layer).unwrap();
    let attention = || {
        let output = selected.plan.launch(stream, &layer).unwrap();
        output.download(stream).unwrap()
    };
    let before = attention();
    let other = stream.device().stream().unwrap();
    let refused = selected.plan.launch(&other, &layer).unwrap_err();
    let named = matches!(
        &refused,
        Error::Violation(violation)
            if violation.rule.id == "plan.tensors"
                && violation.given.starts_with("stream: ")
    );
    assert!(named, "{refused}");
    assert_eq!(attention(), before);
}

#[test]
fn rows_that_are_dequantised_belong_to_a_stream() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, HEADS, DIM);
    let cache = PagedKvCache::quantised_by_token(stream.device(), 2, 128, shape, pad, QuantisedType::Int8).unwrap();
    check(&stream, &cache, Backends::none().with(Backend::QuantisedPrefill));
}

#[test]
fn queries_of_mxfp8_belong_to_a_stream() {
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let runtime = Runtime::emulated_as(&Machine::new(Soc::Ascend950, Cann::V9_1)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, HEADS, DIM).format(Cache::BnNBsD);
    let cache = PagedKvCache::mxfp8(stream.device(), 2, 512, shape, pad).unwrap();
    check(&stream, &cache, Backends::none().with(Backend::MxFp8));
}
