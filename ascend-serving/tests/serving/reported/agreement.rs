//! What belongs together and was made apart: settings and cache, the layers of a step, sequences and requests.

use ascend_attention::spec::Rule;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, ThreadId};

use ascend_attention::spec::Cann;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    LayerInputs, RecordedBatch, SharedPrefixDecode, rules,
};

use super::{DIM, engine, harness, request, rows, settings, settings_of};

/// The rule by which a call was refused, and what was said.
fn rule<R>(outcome: Result<R, Error>) -> (&'static Rule, String) {
    match outcome.map(drop) {
        Err(Error::Violation(refused)) => (refused.rule, refused.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_with_the_settings_of_another_cache_is_refused() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let of = |blocks, block_size, pad| {
        let pool = BlockPool::new(blocks, block_size, pad).unwrap();
        BatchSettings::of(&pool, Causality::Causal)
    };
    let skip = PadPolicy::SkipNegative;
    let batch = [request(5, 1, &[3])];
    for (other, told) in [
        (of(32, 256, skip), "given 32 blocks of 256 tokens"),
        (of(31, 128, skip), "given 31 blocks of 128 tokens"),
        (of(32, 128, PadPolicy::DumpSlot(5)), "padding in slot 5"),
    ] {
        // Also those of a step that comes from a file.
        let json = RecordedBatch::new(other, &batch).to_json();
        let recorded = RecordedBatch::from_json(&json).unwrap();
        assert_eq!(recorded.settings, other);
        let metadata = AttentionMetadata::new(&recorded.requests(), recorded.settings).unwrap();
        let (rule, said) = rule(engine.begin(&stream, &metadata));
        assert_eq!(rule, &rules::SETTINGS_CACHE);
        assert!(said.contains(told), "{said}");
        assert!(said.contains("allowed: 32 blocks of 128 tokens, padding skipped"), "{said}");
    }
    assert_eq!(engine.cache().pool().steps_in_flight(), 0);
    let own = BatchSettings::of(engine.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, own).unwrap();
    assert!(engine.begin(&stream, &metadata).is_ok());
}

/// A recorded batch of the first release.
#[test]
fn recorded_batches_keep_their_form() {
    let json = concat!(
        r#"{"version":1,"settings":{"blocks":32,"block_size":128,"pad":"SkipNegative","causality":"Causal","#,
        r#""policy":{"chunked_prefill":true,"drafting":"Mtp"}},"#,
        r#""requests":[{"cached":5,"new":1,"drafts":0,"row":[3]}]}"#
    );
    let recorded = RecordedBatch::from_json(json).unwrap();
    assert_eq!(recorded.settings, settings(Causality::Causal));
    assert_eq!(recorded.to_json(), json);
}

/// An engine of two layers.
fn two_layers(stream: &Stream, backends: Backends<bf16>) -> Attention<bf16> {
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(2, 1, DIM);
    let cache = PagedKvCache::new(stream.device(), 32, 128, shape, pad).unwrap();
    Attention::new(AttentionShape::new(1, 1, DIM), cache, backends)
}

#[test]
fn sinks_that_the_first_layer_had_not_are_refused_and_the_other_way_round() {
    let stream = harness::stream();
    let sink: Tensor<bf16> = stream.upload(&[bf16::ONE], [1]).unwrap();
    let decode: &[_] = &[request(128, 1, &[3, 4]), request(128, 1, &[3, 5])];
    let prompt: &[_] = &[request(128, 7, &[3, 4])];
    let steps = [
        (Backends::none().with(Backend::Fused), decode),
        (Backends::none().with(Backend::PagedDecode), decode),
        (Backends::none().with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS)), decode),
        (Backends::none().with(Backend::CascadePrefill), prompt),
    ];
    for (backends, batch) in steps {
        let name = backends.names().next().unwrap();
        let mut engine = two_layers(&stream, backends);
        let settings = BatchSettings::of(engine.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(batch, settings).unwrap();
        let tokens = rows(&stream, metadata.tokens());
        let written = |engine: &Attention<bf16>| {
            let key = &engine.cache().layer(1).unwrap().key;
            key.download(&stream).unwrap()
        };
        let before = written(&engine);
        let mut step = engine.begin(&stream, &metadata).unwrap();
        step.forward(0, (&tokens, &tokens, &tokens)).unwrap();
        let late = step.forward(1, LayerInputs::from((&tokens, &tokens, &tokens)).learnable_sink(&sink));
        let (broken, said) = rule(late);
        assert_eq!(broken, &rules::STEP_LAYERS, "{name}: {said}");
        assert!(said.contains("given layer 1: sinks"), "{said}");
        drop(step);
        assert_eq!(written(&engine), before, "{name}");
        if name == "fused" {
            let mut step = engine.begin(&stream, &metadata).unwrap();
            step.forward(0, LayerInputs::from((&tokens, &tokens, &tokens)).learnable_sink(&sink)).unwrap();
            let none = step.forward(1, (&tokens, &tokens, &tokens));
            assert_eq!(rule(none).0, &rules::STEP_LAYERS);
        }
    }
}

#[test]
fn tensors_with_other_rows_or_heads_than_the_step_are_refused_by_name() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let metadata = AttentionMetadata::new(&[request(5, 2, &[3])], settings(Causality::Causal)).unwrap();
    let of = |axes: [usize; 3]| -> Tensor<bf16> {
        let ones = vec![bf16::ONE; axes.iter().product()];
        stream.upload(&ones, axes).unwrap()
    };
    let good = of([2, 1, DIM]);
    // Part of a projection that computes query, key and value at once.
    let part = of([2, 3, DIM]).narrow(1, 1..2).unwrap();
    for (other, broken) in [
        (of([3, 1, DIM]), &rules::STEP_TOKENS),
        (of([1, 1, DIM]), &rules::STEP_TOKENS),
        (of([2, 2, DIM]), &rules::STEP_HEADS),
        (of([2, 1, 128]), &rules::STEP_HEADS),
        (part.clone(), &rules::STEP_CONTIGUOUS),
    ] {
        for [query, key, value] in [[&other, &good, &good], [&good, &other, &good], [&other, &other, &other]] {
            let mut step = engine.begin(&stream, &metadata).unwrap();
            let (rule, said) = rule(step.forward(0, (query, key, value)));
            assert_eq!(rule, broken, "{said}");
            assert!(step.selected(0).is_none());
        }
    }
    let copy = part.contiguous(&stream).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    step.forward(0, (&copy, &copy, &copy)).unwrap();
    drop(step);
    let padded = settings_of(32, 128, Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[request(5, 2, &[3])], padded).unwrap();
    metadata.pad_to(8).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let (_, said) = rule(step.forward(0, (&good, &good, &good)));
    assert!(
        said.contains("[2, 1, 64] in layer 0") && said.contains("[8, 1, 64]: 2 rows of the requests and 6 of padding"),
        "{said}"
    );
}

#[test]
fn more_new_tokens_than_the_sequence_has_are_refused() {
    let pool = BlockPool::new(32, 128, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let settings = settings(Causality::Causal);
    for (len, new) in [(0, 1), (3, 5)] {
        if len > 0 {
            let _ = sequence.grow(len).unwrap();
        }
        let batch = [BatchRequest::of(&sequence, new)];
        let refused = AttentionMetadata::new(&batch, settings).unwrap_err();
        assert_eq!(refused.rule, &rules::SEQUENCE_LENGTH);
        assert!(
            refused.given.starts_with(&format!("{new} new tokens of request 0, whose sequence has {len}"))
                && refused.fix.contains("grow the sequence"),
            "{refused}"
        );
    }
    assert!(AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).is_ok());
}

#[test]
fn tokens_that_were_given_back_are_seen_by_no_layer() {
    let pool = BlockPool::new(32, 128, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(700).unwrap();
    sequence.drop_before(699 - 99).unwrap();
    let of = |window| {
        let causality = Causality::from_flags(true, window).unwrap();
        let batch = [BatchRequest::of(&sequence, 1)];
        AttentionMetadata::new(&batch, BatchSettings::of(&pool, causality))
    };
    // 4 blocks of 128 were given back: 187 cached tokens are left, and the new one.
    let metadata = of(Some(100)).unwrap();
    assert_eq!(metadata.kv_lengths().lengths(), [188]);
    assert_eq!(metadata.table().blocks(), [4, 5]);
    assert_eq!(metadata.slots(), [699]);
    assert!(of(Some(188)).is_ok());
    for window in [Some(189), None] {
        let refused = of(window).unwrap_err();
        assert_eq!(refused.rule, &rules::BLOCK_WINDOW);
        assert_eq!(refused.allowed, "a window of at most 188 keys");
    }
}

#[test]
fn growing_by_the_engine_copies_shared_blocks() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut first = Sequence::new(engine.cache().pool());
    let slots = engine.cache_mut().grow(&stream, &mut first, 100).unwrap();
    let keys = rows(&stream, 100);
    let write = CacheWrite::plan(engine.cache(), &stream, &slots, &keys, &keys).unwrap();
    engine.cache_mut().write(&stream, &write, 0, &keys, &keys).unwrap();
    let mut second = first.share_prefix(90).unwrap();
    engine.grow(&stream, &mut second, 1).unwrap();
    assert_eq!((first.row(), second.row()), (&[0][..], &[1][..]));
    let cached = engine.cache().layer(0).unwrap().key.download(&stream).unwrap();
    assert_eq!(cached[128 * DIM..][..90 * DIM], vec![bf16::ONE; 90 * DIM]);
    let other = BlockPool::new(4, 128, PadPolicy::SkipNegative).unwrap();
    let mut strange = Sequence::new(&other);
    let refused = engine.grow(&stream, &mut strange, 1);
    assert_eq!(rule(refused).0, &rules::BLOCK_POOL);
}

#[test]
fn a_forgotten_copy_of_a_shared_block_is_refused() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut first = Sequence::new(engine.cache().pool());
    engine.grow(&stream, &mut first, 100).unwrap();
    let mut fork = first.fork();
    let grown = fork.grow(1).unwrap();
    let settings = BatchSettings::of(engine.cache(), Causality::Causal);
    let step = |sequence: &Sequence| AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings);
    let refused = step(&fork).unwrap_err();
    assert_eq!(refused.rule, &rules::BLOCK_UNCOPIED);
    assert!(refused.fix.contains("copy_blocks") && refused.fix.contains("PagedKvCache::grow"));
    // The other one has what it needs.
    step(&first).unwrap();
    engine.cache_mut().copy_blocks(&stream, &grown.copies).unwrap();
    step(&fork).unwrap();
    // A copy that comes twice would undo what was written since.
    let block = engine.cache().layer(0).unwrap().key.narrow(0, 1..2).unwrap();
    let written = rows(&stream, 128);
    let slots: Vec<i32> = (128..256).collect();
    let write = CacheWrite::plan(engine.cache(), &stream, &slots, &written, &written).unwrap();
    engine.cache_mut().write(&stream, &write, 0, &written, &written).unwrap();
    engine.cache_mut().copy_blocks(&stream, &grown.copies).unwrap();
    let kept = block.download(&stream).unwrap();
    assert!(kept.iter().all(|x| *x == bf16::ONE));
}

#[test]
fn a_decode_step_without_a_backend_is_told_of_the_decode_path() {
    let stream = harness::stream();
    let tokens = rows(&stream, 1);
    let step = |backends: Backends<bf16>| {
        let mut engine = two_layers(&stream, backends);
        let settings = BatchSettings::of(engine.cache(), Causality::Causal);
        let batch = [request(5, 1, &[3])];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let mut step = engine.begin(&stream, &metadata).unwrap();
        let outcome = step.forward(0, (&tokens, &tokens, &tokens));
        outcome.map(drop).map_err(|error| error.to_string())
    };
    let none = step(Backends::none()).unwrap_err();
    assert!(none.contains("`Backends::standard(&device)`"), "{none}");
    assert!(none.contains("`.with(Backend::PagedDecode)`"), "{none}");
    let cascade = step(Backends::none().with(Backend::CascadePrefill)).unwrap_err();
    assert!(cascade.contains("`.with(Backend::PagedDecode)`"), "{cascade}");
    step(Backends::none().with(Backend::PagedDecode)).unwrap();
}

/// The pool has room and every growth succeeds, but the rows of the step together are longer than the cache.
#[test]
fn a_scheduler_can_tell_that_shared_blocks_count_for_each_request() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let mut engine = engine(&stream);
    let mut donor = Sequence::new(engine.cache().pool());
    engine.grow(&stream, &mut donor, 20 * 128).unwrap();
    engine.cache().mark_computed(&donor, 20 * 128).unwrap();
    let mut other = donor.fork();
    for sequence in [&mut donor, &mut other] {
        engine.grow(&stream, sequence, 1).unwrap();
    }
    let pool = engine.cache().pool().clone();
    assert_eq!(pool.held_blocks(), 22);
    let lengths = [&donor, &other].map(|sequence| sequence.len());
    let refused = pool.admits(lengths).unwrap_err();
    assert_eq!(refused.rule, &rules::BATCH_BLOCKS);
    assert!(refused.given.starts_with("42 blocks of 128 tokens"), "{refused}");
    assert!(refused.fix.starts_with("preempt a request"), "{refused}");
    pool.admits([lengths[0]]).unwrap();

    let batch = [&donor, &other].map(|sequence| BatchRequest::of(sequence, 1));
    let own = BatchSettings::of(engine.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, own).unwrap();
    let tokens = rows(&stream, 2);
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let error = step.forward(0, (&tokens, &tokens, &tokens)).unwrap_err();
    assert!(error.breaks(&rules::BATCH_BLOCKS), "{error}");
    assert!(error.to_string().contains("preempt a request"), "{error}");
}

/// What was logged at the level of warnings, and by which threads. It is the subscriber of the whole process: one of a
/// scope loses events, because other threads meet the places that log them before it is there.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<(ThreadId, String)>>>);

impl Warnings {
    fn installed() -> &'static Warnings {
        static INSTALLED: OnceLock<Warnings> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            let warnings = Warnings::default();
            tracing::subscriber::set_global_default(warnings.clone()).unwrap();
            warnings
        })
    }

    /// Takes out what this thread logged.
    fn take(&self) -> Vec<String> {
        let me = thread::current().id();
        let mut all = self.0.lock().unwrap();
        let mine = all.extract_if(.., |(thread, _)| *thread == me);
        mine.map(|(_, message)| message).collect()
    }
}

struct Message<'a>(&'a mut String);

impl tracing::field::Visit for Message<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, of: &tracing::Metadata<'_>) -> bool {
        *of.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut message = String::new();
        event.record(&mut Message(&mut message));
        let by = thread::current().id();
        self.0.lock().unwrap().push((by, message));
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// What a step that runs these of four layers says at its end.
fn told_without(run: &[usize], fails: bool) -> Vec<String> {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let of = CacheShape::new(4, 1, DIM);
    let cache = PagedKvCache::new(stream.device(), 4, 128, of, pad).unwrap();
    let shape = AttentionShape::new(1, 1, DIM);
    let mut engine = Attention::<bf16>::new(shape, cache, Backends::none().with(Backend::Fused));
    let settings = BatchSettings::of(engine.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[request(0, 2, &[1])], settings).unwrap();
    let tokens = rows(&stream, 2);
    let warnings = Warnings::installed();
    warnings.take();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    for layer in run {
        step.forward(*layer, (&tokens, &tokens, &tokens)).unwrap();
    }
    if fails {
        assert!(step.forward(9, (&tokens, &tokens, &tokens)).is_err());
    }
    drop(step);
    warnings.take()
}

#[test]
fn a_step_that_ends_without_some_layers_is_told() {
    for (run, missing) in [(&[0, 2, 3][..], "layer 1:"), (&[1], "layers 0, 2 to 3:"), (&[], "layers 0 to 3:")] {
        let said = told_without(run, false);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains(missing), "{said:?}");
    }
    assert!(told_without(&[3, 0, 1, 2], false).is_empty());
    // The caller has got an error.
    assert!(told_without(&[0], true).is_empty());
}
