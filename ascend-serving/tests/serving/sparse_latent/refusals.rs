//! Steps that are refused, and that what the refusal advises mends them.

use ascend_attention::spec::Rule;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, Error, IndexerTensors, KeyChoice,
    SparseLatent, SparseStep, rules,
};

use super::engine::{IndexRows, LayerRows, Model, sparse_latent};
use super::{HEADS, INDEXERS, LAYERS};
use crate::harness;
use crate::harness::filled;

const MODEL: Model = Model { block_size: 16, blocks: 8, dump: false, quantised: [false; 2] };

/// Tokens of a step.
const TOKENS: usize = 3;

fn metadata(sparse: &SparseLatent<bf16>, sequence: &Sequence) -> AttentionMetadata {
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    AttentionMetadata::new(&[BatchRequest::of(sequence, TOKENS)], settings).unwrap()
}

/// A sequence with tokens to compute, and the metadata of that step.
fn request(stream: &Stream, sparse: &mut SparseLatent<bf16>) -> (Sequence, AttentionMetadata) {
    let mut sequence = Sequence::new(sparse.latents().pool());
    sparse.grow(stream, &mut sequence, TOKENS).unwrap();
    let metadata = metadata(sparse, &sequence);
    (sequence, metadata)
}

fn names() -> Vec<u64> {
    (1..=TOKENS as u64).collect()
}

fn choose(step: &mut SparseStep<'_, bf16>, stream: &Stream, indexer: usize) -> KeyChoice {
    let rows = IndexRows::of(stream, &names(), indexer);
    step.choose(indexer, rows.tensors()).unwrap()
}

fn forward(
    step: &mut SparseStep<'_, bf16>,
    stream: &Stream,
    layer: usize,
    choice: &KeyChoice,
) -> Result<Tensor<bf16>, Error> {
    let rows = LayerRows::of(stream, &names(), layer);
    step.forward(layer, rows.tensors(choice)).cloned()
}

/// Whether a call is refused by a rule, with words that name what was wrong and what mends it.
pub fn refused<R>(outcome: Result<R, Error>, rule: &'static Rule, words: &[&str]) {
    let Err(error) = outcome else {
        panic!("not refused by {}", rule.id);
    };
    assert!(error.breaks(rule), "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` is missing: {text}");
    }
}

#[test]
fn the_keys_of_every_indexer_are_cached_before_the_last_layer() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (mut sequence, first) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &first).unwrap();
    let choice = choose(&mut step, &stream, 0);
    for layer in 0..LAYERS - 1 {
        forward(&mut step, &stream, layer, &choice).unwrap();
    }
    let last = LAYERS - 1;
    let words = ["layer 2, the last", "the keys of indexer 1", "call `SparseStep::choose` for every indexer"];
    let outcome = forward(&mut step, &stream, last, &choice);
    refused(outcome, &rules::SPARSE_INDEX_KEYS, &words);
    // What it advises.
    let second = choose(&mut step, &stream, 1);
    assert_eq!((choice.indexer(), second.indexer()), (0, 1));
    // Every layer with the choice of the first indexer.
    let words = ["no layer with the choice of indexer 1", "of its own indexer"];
    let outcome = forward(&mut step, &stream, last, &choice);
    refused(outcome, &rules::SPARSE_CHOICE, &words);
    forward(&mut step, &stream, last, &second).unwrap();
    let again = step.choose(1, IndexRows::of(&stream, &names(), 1).tensors());
    refused(again, &rules::STEP_LAYER_REPEATED, &["indexer 1 a second time", "pass the choice"]);
    let beyond = step.choose(INDEXERS, IndexRows::of(&stream, &names(), 1).tensors());
    refused(beyond, &rules::ARGUMENT_VALUE, &["below 2"]);
    step.end().unwrap();
    for cache in [sparse.latents(), sparse.index_keys()] {
        assert_eq!(cache.computed_tokens(&sequence).unwrap(), TOKENS);
    }

    // A step that ends early leaves no token computed in either cache.
    sparse.grow(&stream, &mut sequence, TOKENS).unwrap();
    let second = metadata(&sparse, &sequence);
    let mut step = sparse.begin(&stream, &second).unwrap();
    choose(&mut step, &stream, 0);
    choose(&mut step, &stream, 1);
    refused(step.end(), &rules::STEP_LAYERS_MISSING, &["layers 0 to 2", "begin the step again"]);
    for cache in [sparse.latents(), sparse.index_keys()] {
        assert_eq!(cache.computed_tokens(&sequence).unwrap(), TOKENS);
    }
    let mut step = sparse.begin(&stream, &second).unwrap();
    let choices = [0, 1].map(|indexer| choose(&mut step, &stream, indexer));
    for layer in 0..LAYERS {
        forward(&mut step, &stream, layer, &choices[layer.min(1)]).unwrap();
    }
    step.end().unwrap();
    assert_eq!(sparse.index_keys().computed_tokens(&sequence).unwrap(), 2 * TOKENS);
}

#[test]
fn a_choice_serves_its_own_step_alone() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_first, metadata) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let old = choose(&mut step, &stream, 0);
    drop(step);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let words = ["a choice of another step in layer 0", "choose keys in each step"];
    let outcome = forward(&mut step, &stream, 0, &old);
    refused(outcome, &rules::SPARSE_CHOICE, &words);
    let own = choose(&mut step, &stream, 0);
    forward(&mut step, &stream, 0, &own).unwrap();
}

#[test]
fn tensors_of_other_sizes_are_named() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_sequence, metadata) = request(&stream, &mut sparse);
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let ones = |shape: &[usize]| filled(&stream, bf16::ONE, shape);
    let rows = IndexRows::of(&stream, &names(), 0);
    let tensors = rows.tensors();
    let (query, weights, key) = (ones(&[3, 8, 64]), ones(&[3, 4]), ones(&[3, 1, 64]));
    let flat = ones(&[3, 128]);
    let fewer = ones(&[2, 1, 128]);
    let wide = ones(&[3, 1, 256]);
    let strided = wide.narrow(2, 0..128).unwrap();
    type Inputs<'a> = IndexerTensors<'a, bf16>;
    let wrong: [(Inputs<'_>, &Rule, &str); 6] = [
        (Inputs { query: &query, ..tensors }, &rules::STEP_HEADS, "index query"),
        (Inputs { weights: &weights, ..tensors }, &rules::STEP_HEADS, "index weights"),
        (Inputs { key: &key, ..tensors }, &rules::STEP_HEADS, "index key"),
        (Inputs { key: &flat, ..tensors }, &rules::STEP_HEADS, "[3, 1, 128]"),
        (Inputs { key: &fewer, ..tensors }, &rules::STEP_TOKENS, "3 rows of the requests"),
        (Inputs { key: &strided, ..tensors }, &rules::STEP_CONTIGUOUS, "Tensor::contiguous"),
    ];
    for (inputs, rule, word) in wrong {
        refused(step.choose(0, inputs), rule, &[word, "indexer 0"]);
    }
    let many = ones(&[3, 65, 128]);
    let of_many = ones(&[3, 65]);
    let inputs = Inputs { query: &many, weights: &of_many, ..tensors };
    let outcome = step.choose(0, inputs).unwrap_err();
    assert!(outcome.to_string().contains("indexer.heads"), "{outcome}");

    let choice = step.choose(0, tensors).unwrap();
    let (few, of_few) = (ones(&[3, 4, 128]), ones(&[3, 4]));
    let inputs = Inputs { query: &few, weights: &of_few, ..tensors };
    let words = ["4 heads with weights of BF16, of indexer 1", "8 heads with weights of BF16", "fill indexers up"];
    refused(step.choose(1, inputs), &rules::PLAN_TENSORS, &words);
    let rows = LayerRows::of(&stream, &names(), 0);
    let (plain, rope) = (ones(&[3, HEADS, 128]), ones(&[3, 1, 64]));
    for (name, word) in
        [("query", "[3, 2, 512]"), ("query_rope", "[3, 2, 64]"), ("latent", "[3, 1, 512]"), ("key_rope", "[3, 1, 64]")]
    {
        let mut tensors = rows.tensors(&choice);
        match name {
            "query" => tensors.query = &plain,
            "query_rope" => tensors.query_rope = &rope,
            "latent" => tensors.latent = &rows.key_rope,
            _ => tensors.key_rope = &rows.latent,
        }
        refused(step.forward(0, tensors), &rules::STEP_HEADS, &[name, word, "layer 0", "absorbed queries"]);
    }
    step.forward(0, rows.tensors(&choice)).unwrap();
    drop(step);
    // Nothing was written but by the calls that were not refused.
    let written = |cache: &PagedKvCache<bf16>, layer: usize| {
        let keys = cache.layer(layer).unwrap().key.download(&stream).unwrap();
        keys.iter().any(|x| *x != bf16::ZERO)
    };
    let caches = [sparse.latents(), sparse.index_keys()];
    assert_eq!(caches.map(|cache| [0, 1].map(|layer| written(cache, layer))), [[true, false]; 2]);
}

#[test]
fn layers_write_into_outputs_of_the_caller() {
    let stream = harness::stream();
    for quantised in [false, true] {
        let model = Model { quantised: [quantised, false], ..MODEL };
        let rows = |layer| match quantised {
            false => LayerRows::of(&stream, &names(), layer),
            true => LayerRows::joined(&stream, &names(), layer),
        };
        let [made, given] = [false, true].map(|into| {
            let mut sparse = sparse_latent(&stream, &model);
            let (_sequence, metadata) = request(&stream, &mut sparse);
            let mut step = sparse.begin(&stream, &metadata).unwrap();
            let choices = [0, 1].map(|indexer| choose(&mut step, &stream, indexer));
            let mut output = Tensor::empty(stream.device(), [TOKENS, HEADS, 512]).unwrap();
            let layers = (0..LAYERS).map(|layer| {
                let rows = rows(layer);
                let inputs = rows.tensors(&choices[layer.min(1)]);
                match into {
                    true => step.forward_into(layer, inputs, &mut output).unwrap(),
                    false => output = step.forward(layer, inputs).unwrap().clone(),
                }
                output.download(&stream).unwrap()
            });
            layers.collect::<Vec<_>>()
        });
        assert_eq!(made, given);
    }
}

#[test]
fn outputs_of_other_shapes_or_shared_memory_are_refused_before_anything_is_written() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (_sequence, metadata) = request(&stream, &mut sparse);
    let [cached, of_other] = [0, 1].map(|layer| sparse.latents().layer(layer).unwrap().key.clone());
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let choice = choose(&mut step, &stream, 0);
    let rows = LayerRows::of(&stream, &names(), 0);
    let inputs = rows.tensors(&choice);
    let empty = |shape: &[usize]| Tensor::<bf16>::empty(stream.device(), shape).unwrap();
    let wide = empty(&[TOKENS, 2 * HEADS, 512]);
    for wrong in [empty(&[TOKENS, HEADS, 128]), empty(&[TOKENS + 1, HEADS, 512]), wide.narrow(1, 0..HEADS).unwrap()] {
        refused(step.forward_into(0, inputs, &mut wrong.clone()), &rules::PLAN_TENSORS, &["output", "[3, 2, 512]"]);
    }
    let [in_cache, in_other] = [&cached, &of_other]
        .map(|cached| cached.reshape([cached.len() / 1024, HEADS, 512]).unwrap().narrow(0, 0..TOKENS).unwrap());
    let shared = [(rows.query.clone(), "query"), (in_cache, "the cache"), (in_other, "the cache")];
    for (mut shared, words) in shared {
        refused(step.forward_into(0, inputs, &mut shared), &rules::ARGUMENT_MEMORY, &["output", words]);
    }
    assert!(cached.download(&stream).unwrap().iter().all(|x| *x == bf16::ZERO));
    step.forward_into(0, inputs, &mut empty(&[TOKENS, HEADS, 512])).unwrap();
    assert!(cached.download(&stream).unwrap().iter().any(|x| *x != bf16::ZERO));
}

#[test]
fn steps_that_are_not_causal_are_refused() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let (mut sequence, mut metadata) = request(&stream, &mut sparse);
    metadata.set_mask(Causality::Bidirectional);
    let outcome = sparse.begin(&stream, &metadata).map(drop);
    refused(outcome, &rules::STEP_CAUSALITY, &["Bidirectional", "`Causality::Causal`"]);
    metadata.set_mask(Causality::Causal);
    sparse.begin(&stream, &metadata).unwrap();

    // Sequences that gave tokens back lack keys that may be chosen.
    sparse.grow(&stream, &mut sequence, 40).unwrap();
    for cache in [sparse.latents(), sparse.index_keys()] {
        cache.mark_computed(&sequence, 40).unwrap();
    }
    sequence.drop_before(32).unwrap();
    let window = std::num::NonZeroUsize::new(8).map(Causality::Window).unwrap();
    let settings = BatchSettings::of(sparse.latents(), window);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    metadata.set_mask(Causality::Causal);
    let outcome = sparse.begin(&stream, &metadata).map(drop);
    refused(outcome, &rules::BLOCK_WINDOW, &["gave tokens back"]);
}

#[test]
fn caches_that_the_operators_cannot_read_are_refused() {
    let stream = harness::stream();
    let device = stream.device();
    let cache = |shape| PagedKvCache::<bf16>::new(device, 4, 16, shape, PadPolicy::SkipNegative).unwrap();
    let made = |latents: CacheShape, index_keys: CacheShape| {
        let latents = cache(latents);
        let index_keys = cache(index_keys).with_pool(latents.pool()).unwrap();
        SparseLatent::new(AttentionShape::latent(HEADS), latents, index_keys)
    };
    let (latents, index_keys) = (CacheShape::latent(2), CacheShape::index_keys(1));
    let mut sparse = made(latents, index_keys).unwrap();
    for none in [(CacheShape::latent(0), index_keys), (latents, CacheShape::index_keys(0))] {
        refused(made(none.0, none.1), &rules::ARGUMENT_VALUE, &["1 or more"]);
    }
    // A cache in the place of another, of another pool.
    let mut sequence = Sequence::new(sparse.latents().pool());
    sparse.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    *sparse.index_keys_mut() = cache(index_keys);
    let outcome = sparse.begin(&stream, &metadata).map(drop);
    refused(outcome, &rules::BLOCK_POOL, &["index keys"]);
    refused(made(latents.format(Cache::Nz), index_keys), &rules::ARGUMENT_VALUE, &["latents", "CacheShape::latent"]);
    refused(made(CacheShape::new(2, 1, 192), index_keys), &rules::ARGUMENT_VALUE, &["latents"]);
    let with_values = CacheShape::new(1, 1, 128);
    refused(made(latents, with_values), &rules::ARGUMENT_VALUE, &["index_keys", "CacheShape::index_keys"]);

    let shape = AttentionShape::latent(HEADS);
    let apart = SparseLatent::new(shape, cache(latents), cache(index_keys));
    refused(apart, &rules::BLOCK_POOL, &["index keys", "`PagedKvCache::with_pool`"]);
    let own = cache(latents);
    let joined = cache(index_keys).with_pool(own.pool()).unwrap();
    let outcome = SparseLatent::new(AttentionShape::new(HEADS, 1, 576), own, joined);
    refused(outcome, &rules::ARGUMENT_VALUE, &["AttentionShape::latent"]);

    // Quantised caches have values too.
    let pad = PadPolicy::SkipNegative;
    let quantised = PagedKvCache::<bf16>::quantised_by_token(device, 4, 16, index_keys, pad, QuantisedType::Int8);
    refused(quantised, &rules::ARGUMENT_VALUE, &["quantised keys without values", "`PagedKvCache::new`"]);
}

#[test]
fn heads_that_no_call_has_are_refused_before_anything_is_written() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    for (heads, fix) in [(3, "fill query heads"), (129, "divide"), (256, "divide"), (usize::MAX, "divide")] {
        let cache = |shape| PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, pad).unwrap();
        let latents = cache(CacheShape::latent(1));
        let index_keys = cache(CacheShape::index_keys(1)).with_pool(latents.pool()).unwrap();
        let mut sparse = SparseLatent::new(AttentionShape::latent(heads), latents, index_keys).unwrap();
        let (_sequence, metadata) = request(&stream, &mut sparse);
        let outcome = sparse.begin(&stream, &metadata).map(drop);
        refused(outcome, &ascend_attention::spec::ops::sparse_flash_attention::rules::HEADS, &[fix]);
    }
}

#[test]
fn numbers_of_keys_that_the_indexer_does_not_take_are_refused() {
    let stream = harness::stream();
    for count in [2049, 1 << 30] {
        let mut sparse = sparse_latent(&stream, &MODEL).sparse_count(count);
        let (_sequence, metadata) = request(&stream, &mut sparse);
        let mut step = sparse.begin(&stream, &metadata).unwrap();
        let rows = IndexRows::of(&stream, &names(), 0);
        let outcome = step.choose(0, rows.tensors()).unwrap_err();
        assert!(outcome.to_string().contains("indexer.count"), "{count}: {outcome}");
    }
    for (count, given) in [(0, "sparse_count: 0"), (usize::MAX, "sparse_count: 18446744073709551615")] {
        let mut sparse = sparse_latent(&stream, &MODEL).sparse_count(count);
        let (_sequence, metadata) = request(&stream, &mut sparse);
        let outcome = sparse.begin(&stream, &metadata).map(drop);
        refused(outcome, &rules::ARGUMENT_VALUE, &[given, "2048"]);
    }
}
