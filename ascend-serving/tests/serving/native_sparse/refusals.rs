//! What is refused, and that it is refused before anything is written.

use ascend_attention::spec::{Cann, Rule, Soc};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, Error, NativeSparse, NativeTensors,
    rules,
};

use super::engine::{LayerRows, Model, native_sparse};
use super::schedules::SMALL;
use super::{HEADS, KEY, KV_HEADS, LAYERS, VALUE};
use crate::harness;
use crate::harness::filled;
use crate::refusals::broken;

/// Refused by this rule, with a text that has these words.
fn refused<R>(outcome: Result<R, Error>, rule: &Rule, words: &[&str]) {
    let error = outcome.map(drop).unwrap_err();
    assert!(error.breaks(rule), "{error}");
    let text = error.to_string();
    words.iter().for_each(|word| assert!(text.contains(word), "{word}: {text}"));
}

fn names(tokens: usize) -> Vec<u64> {
    (1..=tokens as u64).collect()
}

/// A request whose last `new` tokens are not computed.
fn metadata(native: &NativeSparse<bf16>, sequence: &Sequence, new: usize) -> AttentionMetadata {
    let settings = BatchSettings::of(native.cache(), Causality::Causal);
    AttentionMetadata::new(&[BatchRequest::of(sequence, new)], settings).unwrap()
}

fn grown(stream: &Stream, native: &mut NativeSparse<bf16>, tokens: usize) -> Sequence {
    let mut sequence = Sequence::new(native.cache().pool());
    native.grow(stream, &mut sequence, tokens).unwrap();
    sequence
}

fn run(stream: &Stream, native: &mut NativeSparse<bf16>, sequence: &Sequence, new: usize) -> Result<(), Error> {
    let metadata = metadata(native, sequence, new);
    let mut step = native.begin(stream, &metadata)?;
    for layer in 0..LAYERS {
        step.forward(layer, LayerRows::of(stream, &names(new), layer, &SMALL).tensors())?;
    }
    step.end()
}

fn cache(stream: &Stream, shape: CacheShape, block_size: usize) -> PagedKvCache<bf16> {
    PagedKvCache::new(stream.device(), 3, block_size, shape, PadPolicy::SkipNegative).unwrap()
}

#[test]
fn a_step_queues_each_layer_once_and_all() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let mut sequence = grown(&stream, &mut native, 40);
    let first = metadata(&native, &sequence, 40);
    let rows = LayerRows::of(&stream, &names(40), 0, &SMALL);
    let mut step = native.begin(&stream, &first).unwrap();
    step.forward(0, rows.tensors()).unwrap();
    refused(step.forward(0, rows.tensors()), &rules::STEP_LAYER_REPEATED, &["layer 0 a second time"]);
    refused(step.forward(LAYERS, rows.tensors()), &rules::ARGUMENT_VALUE, &["layer", "below 2"]);
    refused(step.end(), &rules::STEP_LAYERS_MISSING, &["without layer 1"]);
    assert_eq!(native.computed_tokens(&sequence).unwrap(), 0);
    // The next tokens lack those that are not computed; what is advised goes.
    native.grow(&stream, &mut sequence, 1).unwrap();
    refused(run(&stream, &mut native, &sequence, 1), &rules::STEP_LAYERS_MISSING, &["41 new tokens"]);
    run(&stream, &mut native, &sequence, 41).unwrap();
    assert_eq!(native.computed_tokens(&sequence).unwrap(), 41);
    refused(run(&stream, &mut native, &sequence, 1), &rules::SEQUENCE_COMPUTED, &[]);
}

/// Keys and values that something else has written have no compressed tokens.
#[test]
fn tokens_that_were_written_elsewhere_are_not_computed() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let mut sequence = grown(&stream, &mut native, 40);
    native.cache().mark_computed(&sequence, 40).unwrap();
    assert_eq!(native.computed_tokens(&sequence).unwrap(), 0);
    native.grow(&stream, &mut sequence, 1).unwrap();
    let words = ["in the cache of compressed tokens"];
    refused(run(&stream, &mut native, &sequence, 1), &rules::SEQUENCE_GAP, &words);
    // What is advised.
    sequence.truncate(0).unwrap();
    native.grow(&stream, &mut sequence, 41).unwrap();
    run(&stream, &mut native, &sequence, 41).unwrap();
}

#[test]
fn a_step_is_causal_and_its_sequences_have_all_tokens() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let mut sequence = grown(&stream, &mut native, 300);
    let mut first = metadata(&native, &sequence, 300);
    first.set_mask(Causality::Bidirectional);
    refused(native.begin(&stream, &first), &rules::STEP_CAUSALITY, &["Bidirectional"]);
    run(&stream, &mut native, &sequence, 300).unwrap();
    native.grow(&stream, &mut sequence, 1).unwrap();
    sequence.drop_before(260).unwrap();
    let window = Causality::from_flags(true, Some(8)).unwrap();
    let settings = BatchSettings::of(native.cache(), window);
    let mut second = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    second.set_mask(Causality::Causal);
    refused(native.begin(&stream, &second), &rules::BLOCK_WINDOW, &["gave tokens back"]);
}

#[test]
fn tensors_of_other_sizes_are_named_before_anything_is_written() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let sequence = grown(&stream, &mut native, 3);
    let step_of = metadata(&native, &sequence, 3);
    let mut step = native.begin(&stream, &step_of).unwrap();
    let ones = |shape: &[usize]| filled(&stream, bf16::ONE, shape);
    let rows = LayerRows::of(&stream, &names(3), 0, &SMALL);
    let tensors = rows.tensors();
    let (narrow, fewer, wide) = (ones(&[3, KV_HEADS, VALUE]), ones(&[2, HEADS, KEY]), ones(&[3, HEADS, 2 * KEY]));
    let strided = wide.narrow(2, 0..KEY).unwrap();
    let weight = ones(&[16, KV_HEADS]);
    type Inputs<'a> = NativeTensors<'a, bf16>;
    let wrong: [(Inputs<'_>, &Rule, &str); 7] = [
        (Inputs { query: &rows.key, ..tensors }, &rules::STEP_HEADS, "query"),
        (Inputs { key: &narrow, ..tensors }, &rules::STEP_HEADS, "`NativeTensors`"),
        (Inputs { value: &rows.key, ..tensors }, &rules::STEP_HEADS, "value"),
        (Inputs { query: &fewer, ..tensors }, &rules::STEP_TOKENS, "3 rows of the requests"),
        (Inputs { query: &strided, ..tensors }, &rules::STEP_CONTIGUOUS, "Tensor::contiguous"),
        (Inputs { key_weight: &weight, ..tensors }, &rules::ARGUMENT_VALUE, "key_weight"),
        (Inputs { value_weight: &weight, ..tensors }, &rules::ARGUMENT_VALUE, "[32, 2]"),
    ];
    for (inputs, rule, word) in wrong {
        refused(step.forward(0, inputs), rule, &[word]);
    }
    drop(step);
    let keys = native.cache().layer(0).unwrap().key.download(&stream).unwrap();
    assert!(keys.iter().all(|x| *x == bf16::ZERO));
    run(&stream, &mut native, &sequence, 3).unwrap();
}

#[test]
fn outputs_of_other_shapes_or_shared_memory_are_refused_before_anything_is_written() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let sequence = grown(&stream, &mut native, 3);
    let step_of = metadata(&native, &sequence, 3);
    let cached = native.cache().layer(0).unwrap().key.clone();
    let of_other = native.cache().layer(1).unwrap().value.clone();
    let mut step = native.begin(&stream, &step_of).unwrap();
    let rows = LayerRows::of(&stream, &names(3), 0, &SMALL);
    let empty = |shape: [usize; 3]| Tensor::<bf16>::empty(stream.device(), shape).unwrap();
    let branch = || empty([3, HEADS, VALUE]);
    let [in_cache, in_other] = [&cached, &of_other].map(|cached| {
        let flat = cached.reshape([cached.len()]).unwrap();
        flat.narrow(0, 0..3 * HEADS * VALUE).unwrap().reshape([3, HEADS, VALUE]).unwrap()
    });
    let own = branch();
    for (branches, rule, words) in [
        ((branch(), empty([3, HEADS, KEY]), branch()), &rules::PLAN_TENSORS, ["selected", "[3, 4, 128]"]),
        ((branch(), branch(), empty([4, HEADS, VALUE])), &rules::PLAN_TENSORS, ["window", "[3, 4, 128]"]),
        ((own.clone(), branch(), own.clone()), &rules::ARGUMENT_MEMORY, ["window", "compressed"]),
        ((in_cache, branch(), branch()), &rules::ARGUMENT_MEMORY, ["compressed", "the cache"]),
        ((branch(), branch(), in_other), &rules::ARGUMENT_MEMORY, ["window", "the cache"]),
    ] {
        refused(step.forward_into(0, rows.tensors(), &mut branches.into()), rule, &words);
    }
    assert!(cached.download(&stream).unwrap().iter().all(|x| *x == bf16::ZERO));
    step.forward_into(0, rows.tensors(), &mut (branch(), branch(), branch()).into()).unwrap();
    assert!(cached.download(&stream).unwrap().iter().any(|x| *x != bf16::ZERO));
}

#[test]
fn caches_and_compressions_that_the_operators_cannot_read_are_refused() {
    let stream = harness::stream();
    let plain = CacheShape::new(LAYERS, KV_HEADS, KEY).value_dim(VALUE);
    let shape = AttentionShape::new(HEADS, KV_HEADS, KEY);
    let made = |of, block_size, [block, stride]: [usize; 2]| {
        NativeSparse::new(shape, cache(&stream, of, block_size), block, stride)
    };
    let words = ["multiple of 256 tokens", "blocks of 256 tokens"];
    refused(made(plain, 128, [32, 16]), &rules::NATIVE_BLOCK, &words);
    made(plain, 256, [32, 16]).unwrap();
    refused(made(plain, 256, [64, 32]), &rules::NATIVE_BLOCK, &["blocks of 512 tokens"]);
    for other in [
        CacheShape::new(LAYERS, KV_HEADS, KEY),
        plain.value_dim(64),
        CacheShape::new(0, KV_HEADS, KEY).value_dim(VALUE),
    ] {
        refused(made(other, 256, [32, 16]), &rules::ARGUMENT_VALUE, &["`CacheShape::new(layers, kv_heads, 192)"]);
    }
    let heads = AttentionShape::new(HEADS, 1, KEY);
    refused(NativeSparse::new(heads, cache(&stream, plain, 256), 32, 16), &rules::ARGUMENT_VALUE, &["2 key heads"]);
    for (sizes, rule) in [
        ([20, 16], "nsa_compress_with_cache.block"),
        ([32, 8], "nsa_compress_with_cache.stride"),
        ([16, 32], "nsa_compress_with_cache.stride"),
        ([32, 0], "nsa_compress_with_cache.stride"),
        ([32, usize::MAX], "nsa_compress_with_cache.stride"),
        ([0, 0], "argument.value"),
        ([usize::MAX; 2], "argument.value"),
    ] {
        assert_eq!(broken(made(plain, 256, sizes)), rule, "{sizes:?}");
    }
    let quantised = PagedKvCache::<bf16>::quantised_by_token(
        stream.device(),
        3,
        256,
        plain,
        PadPolicy::SkipNegative,
        QuantisedType::Int8,
    );
    refused(NativeSparse::new(shape, quantised.unwrap(), 32, 16), &rules::CACHE_QUANTISED, &["`PagedKvCache::new`"]);
}

#[test]
fn selections_and_heads_that_the_operators_do_not_take_are_refused_when_a_step_begins() {
    let stream = harness::stream();
    let begin = |mut native: NativeSparse<bf16>| {
        let sequence = grown(&stream, &mut native, 1);
        let metadata = metadata(&native, &sequence, 1);
        native.begin(&stream, &metadata).map(drop)
    };
    let model = |select, count| native_sparse(&stream, &Model { select, count, ..SMALL });
    for (select, count, rule) in [
        (64, 2, "nsa_compress_attention.forced"),
        (40, 16, "nsa_compress_attention.select_block_size"),
        (16, 16, "nsa_compress_attention.select_block_size"),
        (128, 4096, "nsa_compress_attention.compressed"),
        (0, 16, "argument.value"),
        (64, 0, "argument.value"),
        (usize::MAX, 2, "argument.value"),
    ] {
        assert_eq!(broken(begin(model(select, count))), rule, "{select} {count}");
    }
    begin(model(64, 3)).unwrap();
    refused(begin(model(64, 4).window(0)), &rules::MASK_WINDOW, &["1 or more"]);
    let wide = CacheShape::new(1, 1, KEY).value_dim(VALUE);
    let native = NativeSparse::new(AttentionShape::new(32, 1, KEY), cache(&stream, wide, 256), 32, 16).unwrap();
    assert_eq!(broken(begin(native)), "nsa_selected_attention.heads");
}

#[test]
fn other_products_have_no_native_sparse_attention() {
    if harness::not_on_npu("products are those of the emulation") {
        return;
    }
    for (soc, cann) in [(Soc::Ascend950, Cann::V9_1), (Soc::AtlasA2, Cann::V8_1)] {
        let stream = harness::emulated_stream(soc, cann);
        let plain = CacheShape::new(1, 1, KEY).value_dim(VALUE);
        let native = NativeSparse::new(AttentionShape::new(4, 1, KEY), cache(&stream, plain, 256), 32, 16);
        assert_eq!(broken(native), "nsa_compress_with_cache.product");
    }
}

#[test]
fn a_fork_goes_on_in_blocks_of_its_own() {
    let stream = harness::stream();
    let mut native = native_sparse(&stream, &SMALL);
    let mut sequence = grown(&stream, &mut native, 270);
    run(&stream, &mut native, &sequence, 270).unwrap();
    let mut fork = sequence.fork();
    let settings = BatchSettings::of(native.cache(), Causality::Causal);
    let again = AttentionMetadata::new(&[BatchRequest::of(&fork, 1).recompute()], settings);
    refused(again.map_err(Error::from), &rules::TABLE_SHARED, &["`grow`"]);
    // Copies that growth alone does not queue are left to the step, in both caches: tokens of the same names get the
    // same attention in both sequences.
    assert_eq!(fork.grow(2).unwrap().copies.len(), 1);
    let forked = last_row(&stream, &mut native, &fork, 2);
    native.grow(&stream, &mut sequence, 2).unwrap();
    assert_eq!(last_row(&stream, &mut native, &sequence, 2), forked);
    assert_ne!(sequence.row(), fork.row());
}

/// The attention of the last row of a step, in each branch of the last layer.
fn last_row(stream: &Stream, native: &mut NativeSparse<bf16>, sequence: &Sequence, new: usize) -> Vec<bf16> {
    let metadata = metadata(native, sequence, new);
    let mut step = native.begin(stream, &metadata).unwrap();
    let layers = (0..LAYERS).map(|layer| {
        let out = step.forward(layer, LayerRows::of(stream, &names(new), layer, &SMALL).tensors()).unwrap();
        [out.compressed, out.selected, out.window].map(|branch| branch.download(stream).unwrap())
    });
    let last = layers.last().unwrap();
    step.end().unwrap();
    last.iter().flat_map(|branch| branch[branch.len() - HEADS * VALUE..].to_vec()).collect()
}

#[test]
fn a_sequence_does_not_grow_beyond_what_the_operators_take() {
    let stream = harness::stream();
    // Of 32 tokens, one from each 16th on: 8192 compressed tokens reach over the first 131088 tokens, and 4096 blocks
    // of 64 over many more. Of 32 tokens that are selected, 4096 blocks reach over 131072, which 8191 compressed tokens
    // of 32 reach.
    for (select, most, words) in [
        (64, 131088 + 15, ["8193 compressed tokens", "0 to 8192"]),
        (32, 131072 + 15, ["4097 blocks to select from", "0 to 4096"]),
    ] {
        let mut native = native_sparse::<bf16>(&stream, &Model { select, blocks: 520, ..SMALL });
        let mut sequence = Sequence::new(native.cache().pool());
        for tokens in [most + 1, usize::MAX] {
            let error = native.grow(&stream, &mut sequence, tokens).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("nsa_compress_attention.compressed"), "{text}");
            assert!(text.contains("grow the sequence by fewer tokens"), "{text}");
            assert!(tokens == usize::MAX || words.iter().all(|word| text.contains(word)), "{text}");
            assert_eq!((sequence.len(), native.cache().pool().held_blocks()), (0, 0));
        }
        native.grow(&stream, &mut sequence, most).unwrap();
        native.grow(&stream, &mut sequence, 1).unwrap_err();
        assert_eq!(sequence.len(), most);
    }
}

#[test]
fn bytes_are_those_of_tokens_and_compressed_tokens() {
    let stream = harness::stream();
    let native = native_sparse::<bf16>(&stream, &SMALL);
    // Each block of 256 tokens has 16 compressed ones, and a page of 16 more.
    let rows = SMALL.blocks * (256 + 32);
    assert_eq!(native.bytes(), LAYERS * rows * KV_HEADS * (KEY + VALUE) * 2);
}
