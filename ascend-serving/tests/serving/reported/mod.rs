//! What users of serving engines on this hardware were hurt by, one test each: it is refused by name, or cannot be
//! said.
//!
//! The numbers of the reports at each test are those of vllm-project/vllm-ascend unless another project is named.
//! Here: query and key tokens, lists of lengths, paddings, slots, groups, sizes of blocks, blocks in flight, chunks;
//! `shapes`: head dimensions and counts, strides; `masks`; `numbers`: rows that see nothing, bases of log-sum-exps,
//! results that depend on the batch; `agreement`: a step and the cache, the layers and the requests that it is of.
//! What concerns captured graphs is in `tests/runtime/graph.rs` and `graph_failures.rs`.

mod agreement;
use crate::harness;
mod masks;
mod numbers;
mod shapes;

use ascend_attention::attention::{CallLengths, Cumulative, PerRequest};
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{
    Audit, AuditRequest, BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence, check_slots, kernel_blocks,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, ContextParallel, Drafting, Error, StatePolicy, rules,
};

const DIM: usize = 64;

fn settings(causality: Causality) -> BatchSettings {
    settings_of(32, 128, causality)
}

fn settings_of(blocks: usize, block_size: usize, causality: Causality) -> BatchSettings {
    let pool = BlockPool::new(blocks, block_size, PadPolicy::SkipNegative).unwrap();
    BatchSettings::of(&pool, causality).policy(StatePolicy::new(true, Some(Drafting::Mtp)))
}

fn request(cached: usize, new: usize, row: &[usize]) -> BatchRequest<'_> {
    BatchRequest::in_row(row, cached, new)
}

fn engine(stream: &Stream) -> Attention<bf16> {
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 32, 128, shape, pad).unwrap();
    Attention::new(AttentionShape::new(1, 1, DIM), cache, Backends::none().with(Backend::Fused))
}

fn rows(stream: &Stream, tokens: usize) -> Tensor<bf16> {
    let ones = vec![bf16::ONE; tokens * DIM];
    stream.upload(&ones, [tokens, 1, DIM]).unwrap()
}

/// The rule by which a step is refused whose tensors have this number of rows.
fn refused(metadata: &AttentionMetadata, tokens: [usize; 2]) -> String {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut step = engine.begin(&stream, metadata).unwrap();
    let (query, key) = (rows(&stream, tokens[0]), rows(&stream, tokens[1]));
    let error = step.forward(0, (&query, &key, &key)).unwrap_err();
    error.to_string()
}

/// 6524, 6403, 6596: packed query tokens that are not the last length. Padding goes through dummy requests; a step
/// whose tensors have other rows is refused before it is launched.
#[test]
fn query_tokens_other_than_the_last_length() {
    let batch = [request(5, 1, &[3]), request(9, 1, &[4])];
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let error = refused(&metadata, [4, 4]);
    assert!(error.contains("step.tokens"), "{error}");
    metadata.pad_to(4).unwrap();
    assert_eq!(metadata.q_ends().total(), 4);
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 4);
    step.forward(0, (&tokens, &tokens, &tokens)).unwrap();
}

/// 8107, 10769: a list of key lengths of another size than the batch. All lists are made from one batch.
#[test]
fn lists_of_another_size_than_the_batch() {
    let batch = [request(5, 1, &[3]), request(9, 1, &[4]), request(0, 7, &[9])];
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    for tokens in [9, 10, 40] {
        metadata.pad_to(tokens).unwrap();
        let requests = metadata.table().requests();
        assert_eq!(metadata.q_ends().ends().len(), requests);
        assert_eq!(metadata.kv_lengths().lengths().len(), requests);
        assert_eq!(metadata.slots().len(), tokens);
    }
}

/// 7986, 7858: padding that differs between ranks breaks the dummy request. Any size from the batch's own on works, and
/// no dummy is longer than what verifying calls take.
#[test]
fn uneven_padding() {
    let batch = [request(5, 3, &[3]), request(9, 1, &[4])];
    for tokens in 4..100 {
        let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
        metadata.pad_to(tokens).unwrap();
        assert_eq!(metadata.tokens(), tokens);
        let lengths = metadata.q_ends().per_request();
        assert!(lengths.lengths().iter().all(|len| (1..=16).contains(len)));
    }
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.pad_to(3).unwrap_err().rule, &rules::PAD_TARGET);
}

/// 5397: keys and values of another number of tokens than the lengths say, without a cache.
#[test]
fn other_key_tokens_than_lengths() {
    let batch = [request(0, 5, &[3])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.state(), AttentionState::PrefillNoCache);
    let error = refused(&metadata, [5, 8]);
    assert!(error.contains("step.tokens"), "{error}");
}

/// 12842: negative lengths on ranks that hold no part of a context.
#[test]
fn negative_local_lengths() {
    let share = ContextParallel::new(8, 64, 64).unwrap();
    let lengths: Vec<usize> = (0..8).map(|rank| share.local_len(70, rank)).collect();
    assert_eq!(lengths, [64, 6, 0, 0, 0, 0, 0, 0]);
    let wrapped = PerRequest::new(vec![3, 0usize.wrapping_sub(5)]).unwrap_err();
    assert_eq!(wrapped.rule, &rules::LENGTHS_OVERFLOW);
}

/// 10292: slots taken for consecutive.
#[test]
fn slots_that_are_not_consecutive() {
    let batch = [request(126, 4, &[9, 2])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.slots(), [1278, 1279, 256, 257]);
    let audited = [AuditRequest::new(126, 4)];
    let audit = |slots: &[i32]| {
        Audit {
            blocks: 32,
            block_size: 128,
            pad: PadPolicy::SkipNegative,
            requests: &audited,
            table: metadata.table(),
            slots,
        }
        .check()
    };
    assert_eq!(audit(metadata.slots()), Ok(()));
    let error = audit(&[1278, 1279, 1280, 1281]).unwrap_err();
    assert_eq!(error.rule, &rules::SLOT_POSITION);
    let twice = check_slots(&[256, 256], 32, 128, PadPolicy::SkipNegative).unwrap_err();
    assert_eq!(twice.rule, &rules::SLOT_DUPLICATE);
}

/// 9290: more than 16 query tokens of a request in a verifying call. Such a step is a prefill in chunks.
#[test]
fn more_than_16_tokens_to_verify() {
    let of = |drafts| {
        let batch = [request(5, 1 + drafts, &[3]).drafts(drafts)];
        let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal));
        metadata.unwrap().state()
    };
    assert_eq!(of(15), AttentionState::SpecDecoding);
    assert_eq!(of(16), AttentionState::ChunkedPrefill);
}

/// 16980: drafting layers that read with the block table of other layers.
#[test]
fn block_table_of_another_group() {
    let stream = harness::stream();
    let (mut target, draft) = (engine(&stream), engine(&stream));
    let mut sequence = Sequence::new(draft.cache().pool());
    let _ = sequence.grow(5).unwrap();
    let batch = [BatchRequest::of(&sequence, 5)];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let error = target.begin(&stream, &metadata).unwrap_err();
    assert!(matches!(error, Error::Violation(refused) if refused.rule == &rules::TABLE_POOL));

    let mut own = Sequence::new(target.cache().pool());
    let _ = own.grow(5).unwrap();
    let batch = [BatchRequest::of(&sequence, 5), BatchRequest::of(&own, 5)];
    let error = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap_err();
    assert_eq!(error.rule, &rules::TABLE_POOL);
}

/// 7528, sgl-project/sglang 25169, 38196: block sizes that the kernel does not take.
#[test]
fn block_sizes_of_cache_and_kernel() {
    let error = kernel_blocks(&[2], 16, 128).unwrap_err();
    assert_eq!(error.rule, &rules::BLOCK_SPLIT);
    assert_eq!(kernel_blocks(&[2], 384, 128).unwrap(), [6, 7, 8]);

    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 16, shape, pad).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    let mut engine = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
    let settings = settings_of(8, 16, Causality::Causal);
    let batch = [request(5, 3, &[3])];
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 3);
    let error = step.forward(0, (&tokens, &tokens, &tokens)).unwrap_err();
    assert!(error.to_string().contains("block_size.prefill"), "{error}");
}

/// 13501: blocks in front of a window given back, and out again, while a step reads them.
#[test]
fn blocks_given_back_while_a_step_reads_them() {
    let stream = harness::stream();
    let pool = BlockPool::new(2, 128, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(200).unwrap();
    let step = pool.begin_step(&stream);
    sequence.drop_before(150).unwrap();
    let error = pool.allocate().unwrap_err();
    assert_eq!(error.rule, &rules::POOL_WAITING);
    assert!(error.given.contains("1 waiting for steps in flight"), "{error}");
    drop(step);
    stream.synchronize().unwrap();
    assert_eq!(pool.allocate().unwrap().id(), 0);
}

/// sgl-project/sglang 22020, 12589: prefill in chunks that loses what came before. The lengths of a chunk count the
/// cache, and a causal call with fewer keys than rows is refused.
#[test]
fn chunks_that_lose_their_history() {
    let batch = [request(200, 7, &[3, 4])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.kv_lengths().lengths(), [207]);
    let lengths = metadata.call_lengths();
    assert!(matches!(lengths, CallLengths::PackedPaged { .. }));
    let error = Cumulative::new(vec![7, 3]).unwrap_err();
    assert_eq!(error.rule, &rules::LENGTHS_ENDS);
}
