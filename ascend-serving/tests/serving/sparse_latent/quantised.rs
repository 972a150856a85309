//! Quantised latents and index keys: what is refused, what mends it, and what else moves and reads their rows.

use ascend_attention::{Element, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Error, GraphLimits,
    IndexerTensors, LatentForm, LatentTensors, LayerInputs, SparseLatent, rules,
};

use super::engine::{IndexRows, LayerRows, Model, sparse_latent};
use super::refusals::refused;
use super::{COUNT, INDEX, INDEX_HEADS, INDEXERS, LATENT, LAYERS};
use crate::harness;
use crate::quantised_caches::ascend_950;

const MODEL: Model = Model { block_size: 16, blocks: 8, dump: false, quantised: [true; 2] };

/// Tokens of a step, more than are chosen.
const TOKENS: usize = COUNT + 1;

fn names() -> Vec<u64> {
    (1..=TOKENS as u64).collect()
}

/// A sequence with tokens to compute, and the metadata of that step with a row of padding.
fn request(stream: &Stream, sparse: &mut SparseLatent<bf16>) -> (Sequence, AttentionMetadata) {
    let mut sequence = Sequence::new(sparse.latents().pool());
    sparse.grow(stream, &mut sequence, TOKENS).unwrap();
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, TOKENS)], settings).unwrap();
    (sequence, metadata)
}

/// A copy of a tensor with another number in one element.
fn with<T: Element>(stream: &Stream, tensor: &Tensor<T>, element: usize, number: T) -> Tensor<T> {
    let mut elements = tensor.download(stream).unwrap();
    elements[element] = number;
    stream.upload(&elements, tensor.shape()).unwrap()
}

/// The bytes of a layer of a quantised cache.
fn stored(stream: &Stream, cache: &PagedKvCache<bf16>, layer: usize) -> Vec<i8> {
    cache.quantised_layer(layer).unwrap().cache.key.download(stream).unwrap()
}

#[test]
fn tensors_that_the_quantised_operators_do_not_take_are_named() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_sequence, metadata) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let index = IndexRows::of(&stream, &names(), 0);
    let error = step.choose(0, index.tensors()).unwrap_err();
    assert!(error.to_string().contains("quant_indexer.dtype"), "{error}");

    let tensors = index.half_tensors();
    for (bad, word) in [(f32::NAN, "NaN in row 2"), (f32::INFINITY, "inf in row 2"), (1e30, "row 2")] {
        let bad = bf16::from_f32(bad);
        let query = with(&stream, &index.query, 2 * INDEX_HEADS * INDEX + 5, bad);
        let outcome = step.choose(0, IndexerTensors { query: &query, ..tensors });
        refused(outcome, &rules::QUANTISED_FINITE, &[word, "the index query", "range_report"]);
        let key = with(&stream, &index.key, 2 * INDEX + 5, bad);
        let outcome = step.choose(0, IndexerTensors { key: &key, ..tensors });
        refused(outcome, &rules::QUANTISED_FINITE, &[word, "the index key", "range_report"]);
    }
    let choice = step.choose(0, tensors).unwrap();

    let apart = LayerRows::of(&stream, &names(), 0);
    let words = ["query", "[25, 2, 576]", "joined with their rotary parts"];
    refused(step.forward(0, apart.tensors(&choice)), &rules::STEP_HEADS, &words);
    let joined = LayerRows::joined(&stream, &names(), 0);
    let mut both = joined.tensors(&choice);
    both.query_rope = &apart.query_rope;
    refused(step.forward(0, both), &rules::STEP_HEADS, &["query_rope", "[25, 2, 0]"]);
    for row in [0, TOKENS - 1] {
        let latent = with(&stream, &joined.latent, row * LATENT + 7, bf16::NAN);
        let mut tensors = joined.tensors(&choice);
        tensors.latent = &latent;
        let word = format!("row {row} of the latent");
        refused(step.forward(0, tensors), &rules::QUANTISED_FINITE, &["NaN", &word]);
    }
    // What it advises.
    step.forward(0, joined.tensors(&choice)).unwrap();
    drop(step);
    // Nothing was written but by the calls that were not refused.
    let written = |cache, layer| stored(&stream, cache, layer).iter().any(|byte| *byte != 0);
    let caches = [sparse.latents(), sparse.index_keys()];
    assert_eq!(caches.map(|cache| [0, 1].map(|layer| written(cache, layer))), [[true, false]; 2]);
}

#[test]
fn a_refused_indexer_or_layer_leaves_its_cache_as_it_was() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_sequence, metadata) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let index = IndexRows::of(&stream, &names(), 0);
    let query = with(&stream, &index.query, 0, bf16::NAN);
    step.choose(0, IndexerTensors { query: &query, ..index.half_tensors() }).unwrap_err();
    let key = with(&stream, &index.key, 0, bf16::NAN);
    step.choose(0, IndexerTensors { key: &key, ..index.half_tensors() }).unwrap_err();
    let choice = step.choose(1, IndexRows::of(&stream, &names(), 1).half_tensors()).unwrap();
    let rows = LayerRows::joined(&stream, &names(), 0);
    let rope = with(&stream, &rows.key_rope, 3, bf16::INFINITY);
    let mut tensors = rows.tensors(&choice);
    tensors.key_rope = &rope;
    step.forward(0, tensors).unwrap_err();
    drop(step);
    for cache in [sparse.latents(), sparse.index_keys()] {
        assert!(stored(&stream, cache, 0).iter().all(|byte| *byte == 0));
    }
    let layer = sparse.index_keys().quantised_layer(0).unwrap();
    assert!(layer.index_scales().unwrap().download(&stream).unwrap().iter().all(|scale| *scale == f16::ZERO));
}

#[test]
fn padding_is_not_looked_at() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_sequence, mut metadata) = request(&stream, &mut sparse);
    metadata.pad_to(TOKENS + 2).unwrap();
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let names: Vec<u64> = (1..=TOKENS as u64 + 2).collect();
    let mut outputs = Vec::new();
    let index = IndexRows::of(&stream, &names, 0);
    let query = with(&stream, &index.query, TOKENS * INDEX_HEADS * INDEX, bf16::NAN);
    let key = with(&stream, &index.key, TOKENS * INDEX, bf16::NAN);
    let choice = step.choose(0, IndexerTensors { query: &query, key: &key, ..index.half_tensors() }).unwrap();
    let rows = LayerRows::joined(&stream, &names, 0);
    let latent = with(&stream, &rows.latent, TOKENS * LATENT, bf16::NAN);
    let mut tensors = rows.tensors(&choice);
    tensors.latent = &latent;
    outputs.extend(step.forward(0, tensors).unwrap().download(&stream).unwrap());
    assert!(outputs[..TOKENS * 2 * LATENT].iter().all(|x| x.is_finite()));
}

#[test]
fn caches_that_are_quantised_in_other_ways_are_refused() {
    let stream = harness::stream();
    let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
    let shape = AttentionShape::latent(2);
    let latents = || PagedKvCache::<bf16>::quantised_sparse_latents(device, 4, 16, 2, pad).unwrap();
    let by_token =
        PagedKvCache::<bf16>::quantised_by_token(device, 4, 16, CacheShape::latent(2), pad, QuantisedType::Int8);
    if let Ok(by_token) = by_token {
        let index_keys = PagedKvCache::new(device, 4, 16, CacheShape::index_keys(1), pad).unwrap();
        let index_keys = index_keys.with_pool(by_token.pool()).unwrap();
        let outcome = SparseLatent::new(shape, by_token, index_keys);
        refused(outcome, &rules::CACHE_QUANTISED, &["latents", "`PagedKvCache::quantised_sparse_latents`"]);
    }
    // Each in the place of the other.
    let keys = PagedKvCache::<bf16>::quantised_index_keys(device, 4, 16, 2, pad).unwrap();
    let other = latents().with_pool(keys.pool()).unwrap();
    refused(SparseLatent::new(shape, keys, other), &rules::ARGUMENT_VALUE, &["latents", "CacheShape::latent"]);

    for layers in [CacheShape::MAX_LAYERS + 1, usize::MAX] {
        let outcome = PagedKvCache::<bf16>::quantised_sparse_latents(device, 4, 16, layers, pad);
        refused(outcome, &rules::ARGUMENT_VALUE, &["layers"]);
        let outcome = PagedKvCache::<bf16>::quantised_index_keys(device, 4, 16, layers, pad);
        refused(outcome, &rules::ARGUMENT_VALUE, &["layers"]);
    }
    refused(PagedKvCache::<bf16>::quantised_sparse_latents(device, 0, 16, 1, pad), &rules::POOL_SIZE, &[]);
    refused(
        PagedKvCache::<f32>::quantised_sparse_latents(device, 4, 16, 1, pad),
        &rules::ARGUMENT_VALUE,
        &["FLOAT16 or BF16"],
    );
    let plain = latents();
    refused(plain.layer(0), &rules::CACHE_QUANTISED, &["quantised_layer"]);
    let layer = plain.quantised_layer(0).unwrap();
    refused(layer.index_scales(), &rules::CACHE_QUANTISED, &["`PagedKvCache::quantised_index_keys`"]);
    assert!(layer.quantisation().is_none() && layer.group_scales().is_none());
}

#[test]
fn bytes_are_those_of_rows_and_scales() {
    let stream = harness::stream();
    let sparse = sparse_latent(&stream, &MODEL);
    let slots = MODEL.blocks * MODEL.block_size;
    assert_eq!(sparse.latents().bytes(), LAYERS * slots * 656);
    assert_eq!(sparse.index_keys().bytes(), INDEXERS * slots * (128 + 2));
    assert_eq!(sparse.latents().shape(), CacheShape::latent(LAYERS).format(Cache::BnBsH));
}

#[test]
fn graphs_and_other_backends_say_what_reads_the_rows() {
    let stream = harness::stream();
    for quantised in [[true, false], [false, true]] {
        let sparse = sparse_latent(&stream, &Model { quantised, ..MODEL });
        let captured = sparse.capture::<bf16>(&stream, INDEX_HEADS, &GraphLimits::new([1], 40));
        let name = if quantised[0] { "quantised latents" } else { "quantised index keys" };
        refused(captured, &rules::CACHE_QUANTISED, &[name, "`SparseLatent::begin`"]);
    }
    let cache = PagedKvCache::quantised_sparse_latents(stream.device(), 4, 16, 1, PadPolicy::SkipNegative).unwrap();
    let mut attention = Attention::<bf16>::new(AttentionShape::latent(2), cache, Backends::standard(stream.device()));
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let rows = LayerRows::of(&stream, &[1], 0);
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let latent = LatentTensors { query_rope: &rows.query_rope, form: LatentForm::Absorbed };
    let error = step.forward(0, LayerInputs::latent(&rows.query, &rows.latent, &rows.key_rope, latent)).unwrap_err();
    assert!(matches!(error, Error::NoBackend { .. }), "{error}");
    refused(Err::<(), _>(error), &rules::BACKEND_QUANTISED, &["compute the step by `SparseLatent`"]);
}

/// Runs a step, and returns the attention of the last layer.
fn run(stream: &Stream, sparse: &mut SparseLatent<bf16>, metadata: &AttentionMetadata, names: &[u64]) -> Vec<bf16> {
    let mut step = sparse.begin(stream, metadata).unwrap();
    let choices = [0, 1].map(|indexer| {
        let rows = IndexRows::of(stream, names, indexer);
        step.choose(indexer, rows.half_tensors()).unwrap()
    });
    let layers = (0..LAYERS).map(|layer| {
        let rows = LayerRows::joined(stream, names, layer);
        step.forward(layer, rows.tensors(&choices[layer.min(INDEXERS - 1)])).unwrap().clone()
    });
    let last = layers.last().unwrap().download(stream).unwrap();
    step.end().unwrap();
    last
}

#[test]
fn rows_and_scales_move_with_their_tokens() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (sequence, metadata) = request(&stream, &mut sparse);
    run(&stream, &mut sparse, &metadata, &names());
    let blocks = metadata.table().blocks();
    let slot = |token: usize| blocks[token / 16] * 16 + token % 16;
    let read = |sparse: &SparseLatent<bf16>, slot: usize| {
        let rows = stored(&stream, sparse.latents(), 1)[slot * 656..][..656].to_vec();
        let keys = stored(&stream, sparse.index_keys(), 1)[slot * INDEX..][..INDEX].to_vec();
        let layer = sparse.index_keys().quantised_layer(1).unwrap();
        (rows, keys, layer.index_scales().unwrap().download(&stream).unwrap()[slot])
    };
    let before = read(&sparse, slot(20));
    assert_ne!(read(&sparse, slot(3)), before);
    // Tokens move in neither cache alone.
    let old = read(&sparse, slot(3));
    let alone = sparse.index_keys_mut().move_tokens(&stream, &sequence, [(20, 3)]);
    refused(alone, &rules::CACHE_PAIRED, &["`SparseLatent::move_tokens`"]);
    let alone = sparse.latents_mut().move_tokens(&stream, &sequence, [(20, 3)]);
    refused(alone, &rules::CACHE_PAIRED, &["`SparseLatent::move_tokens`"]);
    assert_eq!(read(&sparse, slot(3)), old);
    sparse.move_tokens(&stream, &sequence, [(20, 3)]).unwrap();
    assert_eq!(read(&sparse, slot(3)), before);
    // A token that one cache alone has computed moves in neither.
    let after = read(&sparse, slot(4));
    let mut grown = sequence;
    sparse.grow(&stream, &mut grown, 1).unwrap();
    sparse.latents().mark_computed(&grown, TOKENS + 1).unwrap();
    let moved = sparse.move_tokens(&stream, &grown, [(TOKENS, 4)]);
    refused(moved, &rules::SEQUENCE_GAP, &["position 25"]);
    assert_eq!(read(&sparse, slot(4)), after);
    sparse.index_keys().mark_computed(&grown, TOKENS + 1).unwrap();
    sparse.move_tokens(&stream, &grown, [(TOKENS, 4)]).unwrap();
    assert_ne!(read(&sparse, slot(4)), after);
}

#[test]
fn int8_rows_are_read_on_ascend_950() {
    let Some(other) = ascend_950() else {
        return;
    };
    let stream = harness::stream();
    let [one, other] = [&stream, &other].map(|stream| {
        let mut sparse = sparse_latent(stream, &MODEL);
        let (_sequence, metadata) = request(stream, &mut sparse);
        run(stream, &mut sparse, &metadata, &names())
    });
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(&other) {
        assert!((one.to_f64() - other.to_f64()).abs() <= 8e-3, "{one} {other}");
    }
}

#[test]
fn lists_of_every_key_have_the_runs_that_the_quantised_operator_takes() {
    let stream = harness::stream();
    let model = Model { block_size: 128, blocks: 2, ..MODEL };
    let mut sparse = sparse_latent(&stream, &model).sparse_count(64);
    let (_sequence, metadata) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let choice = step.choose(0, IndexRows::of(&stream, &names(), 0).half_tensors()).unwrap();
    assert_eq!((choice.keys_per_index(), choice.indices().shape()), (16, &[TOKENS, 1, 2][..]));
    step.forward(0, LayerRows::joined(&stream, &names(), 0).tensors(&choice)).unwrap();
}
