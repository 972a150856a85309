//! What users of serving engines on this hardware were hurt by, one test each: it is refused by name, or cannot be said.
//!
//! The numbers in the names are those of reports to vllm-project/vllm-ascend unless another project is named.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::num::NonZeroU32;

use ascend_attention::kv::{
    Audit, AuditRequest, BlockPool, CacheShape, Interleave, KernelBlocks, PadPolicy, PagedKvCache,
    Rule, Sequence, check_slots,
};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backends, BatchRequest,
    BatchSettings, CallLengths, Causality, Cumulative, Drafting, Fused, PerRequest, StatePolicy,
};
use ascend_attention::{Error, SparseMode, Stream, Tensor, bf16};

const DIM: usize = 64;

fn settings(causality: Causality) -> BatchSettings {
    BatchSettings {
        blocks: 32,
        block_size: 128,
        pad: PadPolicy::SkipNegative,
        causality,
        policy: StatePolicy {
            chunked_prefill: true,
            drafting: Some(Drafting::Mtp),
        },
    }
}

fn request(cached: u32, new: u32, row: &[i32]) -> BatchRequest<'_> {
    BatchRequest {
        cached,
        new,
        drafts: 0,
        row,
        group: None,
    }
}

fn engine(stream: &Stream) -> Attention<bf16> {
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 32, 128, shape, pad).unwrap();
    Attention::new(
        AttentionShape::new(1, 1, DIM),
        cache,
        Backends::none().with(Fused),
    )
}

fn rows(stream: &Stream, tokens: usize) -> Tensor<bf16> {
    let ones = vec![bf16::ONE; tokens * DIM];
    stream.upload(&ones, [tokens, 1, DIM]).unwrap()
}

/// The rule by which a step is refused whose tensors have so many rows.
fn refused(metadata: &AttentionMetadata, tokens: [usize; 2]) -> String {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut step = engine.begin(&stream, metadata).unwrap();
    let (query, key) = (rows(&stream, tokens[0]), rows(&stream, tokens[1]));
    let error = step.forward(0, &query, &key, &key).unwrap_err();
    error.to_string()
}

/// 6524, 6403, 6596: packed query tokens that are not the last length. Padding goes through dummy requests; a step whose
/// tensors have other rows is refused before it is launched.
#[test]
fn pain_01_query_tokens_other_than_the_last_length() {
    let batch = [request(5, 1, &[3]), request(9, 1, &[4])];
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let error = refused(&metadata, [4, 4]);
    assert!(error.contains("packed.q_total"), "{error}");
    metadata.pad_to(4).unwrap();
    assert_eq!(metadata.q_ends().total(), 4);
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 4);
    step.forward(0, &tokens, &tokens, &tokens).unwrap();
}

/// 8107, 10769: a list of key lengths of another size than the batch. All lists are made from one batch.
#[test]
fn pain_02_lists_of_another_size_than_the_batch() {
    let batch = [
        request(5, 1, &[3]),
        request(9, 1, &[4]),
        request(0, 7, &[9]),
    ];
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    for tokens in [9, 10, 40] {
        metadata.pad_to(tokens).unwrap();
        let requests = metadata.table().requests();
        assert_eq!(metadata.q_ends().ends().len(), requests);
        assert_eq!(metadata.kv_lengths().lengths().len(), requests);
        assert_eq!(metadata.slots().len(), tokens as usize);
    }
}

/// 7986, 7858: padding that differs between ranks breaks the dummy request. Any size from the batch's own on works, and
/// no dummy is longer than what verifying calls take.
#[test]
fn pain_03_uneven_padding() {
    let batch = [request(5, 3, &[3]), request(9, 1, &[4])];
    for tokens in 4..100 {
        let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
        metadata.pad_to(tokens).unwrap();
        assert_eq!(metadata.tokens(), tokens);
        let lengths = metadata.q_ends().per_request();
        assert!(lengths.lengths().iter().all(|len| (1..=16).contains(len)));
    }
    let mut metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.pad_to(3).unwrap_err().rule, Rule::PadTarget);
}

/// 5397: keys and values of another number of tokens than the lengths say, without a cache.
#[test]
fn pain_04_other_key_tokens_than_lengths() {
    let batch = [request(0, 5, &[3])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.state(), AttentionState::PrefillNoCache);
    let error = refused(&metadata, [5, 8]);
    assert!(error.contains("packed.kv_ends"), "{error}");
}

/// 13699: mode 0 without a mask attends to everything. A causal step never says it.
#[test]
fn pain_06_causal_without_a_mask() {
    let device = harness::device();
    let window = Causality::Window(NonZeroU32::MIN);
    for causality in [Causality::Causal, window] {
        let mask = causality.mask(&device.masks()).unwrap();
        assert_ne!(mask.sparse_mode(), SparseMode::DefaultMask);
        assert!(mask.tensor().is_some());
    }
}

/// 8508, 8387, sgl-project/sglang 24582: a window by the wrong mode or mask. There is one mask and one mode for all windows.
#[test]
fn pain_08_windows_take_mode_4_and_the_standard_mask() {
    let device = harness::device();
    let masks = device.masks();
    let causal = Causality::Causal.mask(&masks).unwrap();
    for keys in [1, 100, 4096] {
        let window = Causality::Window(NonZeroU32::new(keys).unwrap());
        let mask = window.mask(&masks).unwrap();
        assert_eq!(mask.sparse_mode(), SparseMode::Band);
        let tensor = |mask: &ascend_attention::Mask| mask.tensor().unwrap().as_raw();
        assert_eq!(tensor(&mask), tensor(&causal));
    }
}

/// 8210, 8057, vllm-project/vllm 3385: a window of w shows w + 1 keys.
#[test]
fn pain_09_window_off_by_one() {
    let device = harness::device();
    let window = Causality::Window(NonZeroU32::new(7).unwrap());
    let mask = window.mask(&device.masks()).unwrap();
    assert_eq!((mask.pre_tokens(), mask.next_tokens()), (6, 0));
}

/// 15151: captured calls let the window win over a layer that is not causal, eager ones the other way round.
#[test]
fn pain_10_window_in_a_layer_that_is_not_causal() {
    let error = Causality::from_flags(false, Some(128)).unwrap_err();
    assert_eq!(error.rule, Rule::MaskWindow);
    let none = Causality::from_flags(true, Some(0)).unwrap_err();
    assert_eq!(none.rule, Rule::MaskWindow);
}

/// 12842: negative lengths on ranks that hold no part of a context.
#[test]
fn pain_18_negative_local_lengths() {
    let share = Interleave::new(8, 64).unwrap();
    let lengths: Vec<u64> = (0..8).map(|rank| share.local_len(70, rank)).collect();
    assert_eq!(lengths, [64, 6, 0, 0, 0, 0, 0, 0]);
    let error = PerRequest::new(vec![3, -5]).unwrap_err();
    assert_eq!(error.rule, Rule::LengthsNegative);
}

/// 10292: slots taken for consecutive.
#[test]
fn pain_19_slots_that_are_not_consecutive() {
    let batch = [request(126, 4, &[9, 2])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.slots(), [1278, 1279, 256, 257]);
    let audited = [AuditRequest {
        cached: 126,
        new: 4,
    }];
    let audit = |slots: &[i32]| {
        Audit {
            blocks: 32,
            block_size: 128,
            pad: PadPolicy::SkipNegative,
            requests: &audited,
            table: metadata.table(),
            slots,
        }
        .run()
    };
    assert_eq!(audit(metadata.slots()), Ok(()));
    let error = audit(&[1278, 1279, 1280, 1281]).unwrap_err();
    assert_eq!(error.rule, Rule::SlotPosition);
    let twice = check_slots(&[256, 256], 4096, PadPolicy::SkipNegative).unwrap_err();
    assert_eq!(twice.rule, Rule::SlotDuplicate);
}

/// 9290: more than 16 query tokens of a request in a verifying call. Such a step is a prefill in chunks.
#[test]
fn pain_21_more_than_16_tokens_to_verify() {
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
fn pain_22_block_table_of_another_group() {
    let stream = harness::stream();
    let (mut target, draft) = (engine(&stream), engine(&stream));
    let mut sequence = Sequence::new(draft.cache().pool());
    let _ = sequence.grow(5).unwrap();
    let batch = [BatchRequest::of(&sequence, 5)];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let error = target.begin(&stream, &metadata).unwrap_err();
    assert!(matches!(error, Error::Refused(refused) if refused.rule == Rule::TableGroup));

    let mut own = Sequence::new(target.cache().pool());
    let _ = own.grow(5).unwrap();
    let batch = [BatchRequest::of(&sequence, 5), BatchRequest::of(&own, 5)];
    let error = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap_err();
    assert_eq!(error.rule, Rule::TableGroup);
}

/// 7528, sgl-project/sglang 25169, 38196: block sizes that the kernel does not take.
#[test]
fn pain_23_block_sizes_of_cache_and_kernel() {
    let error = KernelBlocks::new(16, 128).unwrap_err();
    assert_eq!(error.rule, Rule::BlockSplit);
    let split = KernelBlocks::new(384, 128).unwrap();
    assert_eq!(split.split_row(&[2]).unwrap(), [6, 7, 8]);

    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 16, shape, pad).unwrap();
    let backends = Backends::none().with(Fused);
    let mut engine = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
    let settings = BatchSettings {
        blocks: 8,
        block_size: 16,
        ..settings(Causality::Causal)
    };
    let batch = [request(5, 3, &[3])];
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 3);
    let error = step.forward(0, &tokens, &tokens, &tokens).unwrap_err();
    assert!(error.to_string().contains("block_size.prefill"), "{error}");
}

/// 13501: blocks in front of a window given back, and out again, while a step reads them.
#[test]
fn pain_24_blocks_given_back_while_a_step_reads_them() {
    let stream = harness::stream();
    let pool = BlockPool::new(2, 128, PadPolicy::SkipNegative).unwrap();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(200).unwrap();
    let step = pool.begin_step(&stream);
    sequence.drop_before(150).unwrap();
    let error = pool.allocate().unwrap_err();
    assert_eq!(error.rule, Rule::PoolExhausted);
    assert!(
        error.given.contains("1 wait for steps in flight"),
        "{error}"
    );
    drop(step);
    stream.synchronize().unwrap();
    assert_eq!(pool.allocate().unwrap().id(), 0);
}

/// sgl-project/sglang 22020, 12589: prefill in chunks that loses what came before. The lengths of a chunk count the cache,
/// and a causal call with fewer keys than rows is refused.
#[test]
fn pain_26_chunks_that_lose_their_history() {
    let batch = [request(200, 7, &[3, 4])];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    assert_eq!(metadata.kv_lengths().lengths(), [207]);
    let lengths = metadata.call_lengths();
    assert!(matches!(lengths, CallLengths::PackedPaged { .. }));
    let error = Cumulative::new(vec![7, 3]).unwrap_err();
    assert_eq!(error.rule, Rule::LengthsEnds);
}

/// 6803, 3024: a mask made for fewer tokens than the sequence has. The compressed mask serves every length.
#[test]
fn pain_32_masks_of_a_fixed_length() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let row: Vec<i32> = (0..24).collect();
    let batch = [request(2990, 30, &row)];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 30);
    let output = step.forward(0, &tokens, &tokens, &tokens).unwrap();
    let attention = output.attention.download(&stream).unwrap();
    // 2990 keys and values of 0, and those of the step: the last row sees all thirty ones.
    let one = 8f64.exp();
    let want = 30.0 * one / (30.0 * one + 2990.0);
    assert!((attention.last().unwrap().to_f64() - want).abs() < 1e-2);
}
