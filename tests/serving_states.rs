//! The exact operator parameters of each kind of step, as a function table records them that stands before the emulation.

#![cfg(feature = "emulation")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::num::NonZeroU32;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ascend_attention::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backends, BatchRequest,
    BatchSettings, Causality, Drafting, Fused, PagedDecode, StatePolicy,
};
use ascend_attention::sys::Api;
use ascend_attention::sys::bindings::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclTensor, aclTensorList, aclnnStatus,
};
use ascend_attention::{Mask, Runtime, Stream, bf16};

/// What a call said.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    layout: String,
    query: Vec<i64>,
    key: Vec<i64>,
    mask: Option<(aclDataType, Vec<i64>)>,
    q_lengths: Option<Vec<i64>>,
    kv_lengths: Option<Vec<i64>>,
    table: Option<Vec<i64>>,
    block_size: i64,
    sparse_mode: i64,
    tokens: [i64; 2],
    heads: [i64; 2],
    sink: bool,
}

#[derive(Default)]
struct Recorder {
    tensors: HashMap<usize, (aclDataType, Vec<i64>)>,
    lists: HashMap<usize, usize>,
    arrays: HashMap<usize, Vec<i64>>,
    calls: Vec<Said>,
}

static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);
/// The tests share the recorder.
static TURN: Mutex<()> = Mutex::new(());

fn recorder<T>(visit: impl FnOnce(&mut Recorder) -> T) -> T {
    let mut kept = RECORDER.lock().unwrap_or_else(PoisonError::into_inner);
    visit(kept.get_or_insert_default())
}

unsafe extern "C" fn tensor(
    dims: *const i64,
    rank: u64,
    dtype: aclDataType,
    strides: *const i64,
    offset: i64,
    format: aclFormat,
    storage: *const i64,
    storage_rank: u64,
    data: *mut c_void,
) -> *mut aclTensor {
    // SAFETY: handed on to the caller, who gives `rank` dimensions.
    unsafe {
        let create = ascend_emu::functions().aclCreateTensor.unwrap();
        let made = create(
            dims,
            rank,
            dtype,
            strides,
            offset,
            format,
            storage,
            storage_rank,
            data,
        );
        let dims = slice::from_raw_parts(dims, rank as usize).to_vec();
        recorder(|r| r.tensors.insert(made.addr(), (dtype, dims)));
        made
    }
}

unsafe extern "C" fn list(tensors: *const *const aclTensor, count: u64) -> *mut aclTensorList {
    // SAFETY: handed on to the caller, who gives `count` tensors, at least one.
    unsafe {
        let made = ascend_emu::functions().aclCreateTensorList.unwrap()(tensors, count);
        let first = (*tensors).addr();
        recorder(|r| r.lists.insert(made.addr(), first));
        made
    }
}

unsafe extern "C" fn array(value: *const i64, count: u64) -> *mut aclIntArray {
    // SAFETY: handed on to the caller, who gives `count` numbers.
    unsafe {
        let made = ascend_emu::functions().aclCreateIntArray.unwrap()(value, count);
        let copy = slice::from_raw_parts(value, count as usize).to_vec();
        recorder(|r| r.arrays.insert(made.addr(), copy));
        made
    }
}

type T = *const aclTensor;
type A = *const aclIntArray;

#[allow(non_snake_case, reason = "CANN's names")]
mod wrapper {
    use super::*;

    #[allow(clippy::too_many_arguments, reason = "as many as CANN's function has")]
    unsafe extern "C" fn phase_one(
        query: T,
        key: *const aclTensorList,
        value: *const aclTensorList,
        pseShift: T,
        attenMask: T,
        actualSeqLengths: A,
        actualSeqLengthsKv: A,
        deqScale1: T,
        quantScale1: T,
        deqScale2: T,
        quantScale2: T,
        quantOffset2: T,
        antiquantScale: T,
        antiquantOffset: T,
        blockTable: T,
        queryPaddingSize: T,
        kvPaddingSize: T,
        keyAntiquantScale: T,
        keyAntiquantOffset: T,
        valueAntiquantScale: T,
        valueAntiquantOffset: T,
        keySharedPrefix: T,
        valueSharedPrefix: T,
        actualSharedPrefixLen: A,
        queryRope: T,
        keyRope: T,
        keyRopeAntiquantScale: T,
        dequantScaleQuery: T,
        learnableSink: T,
        numHeads: i64,
        scaleValue: f64,
        preTokens: i64,
        nextTokens: i64,
        inputLayout: *mut c_char,
        numKeyValueHeads: i64,
        sparseMode: i64,
        innerPrecise: i64,
        blockSize: i64,
        antiquantMode: i64,
        softmaxLseFlag: bool,
        keyAntiquantMode: i64,
        valueAntiquantMode: i64,
        queryQuantMode: i64,
        attentionOut: T,
        softmaxLse: T,
        workspaceSize: *mut u64,
        executor: *mut *mut aclOpExecutor,
    ) -> aclnnStatus {
        recorder(|r| {
            let shape = |at: *const aclTensor| r.tensors.get(&at.addr()).cloned();
            let numbers = |at: *const aclIntArray| r.arrays.get(&at.addr()).cloned();
            let said = Said {
                // SAFETY: the caller gives a text that ends.
                layout: unsafe { CStr::from_ptr(inputLayout) }
                    .to_str()
                    .unwrap()
                    .to_owned(),
                query: shape(query).unwrap().1,
                key: r.tensors[&r.lists[&key.addr()]].1.clone(),
                mask: shape(attenMask),
                q_lengths: numbers(actualSeqLengths),
                kv_lengths: numbers(actualSeqLengthsKv),
                table: shape(blockTable).map(|(_, dims)| dims),
                block_size: blockSize,
                sparse_mode: sparseMode,
                tokens: [preTokens, nextTokens],
                heads: [numHeads, numKeyValueHeads],
                sink: !learnableSink.is_null(),
            };
            r.calls.push(said);
        });
        let next = ascend_emu::functions()
            .aclnnFusedInferAttentionScoreV4GetWorkspaceSize
            .unwrap();
        // SAFETY: handed on to the caller.
        unsafe {
            next(
                query,
                key,
                value,
                pseShift,
                attenMask,
                actualSeqLengths,
                actualSeqLengthsKv,
                deqScale1,
                quantScale1,
                deqScale2,
                quantScale2,
                quantOffset2,
                antiquantScale,
                antiquantOffset,
                blockTable,
                queryPaddingSize,
                kvPaddingSize,
                keyAntiquantScale,
                keyAntiquantOffset,
                valueAntiquantScale,
                valueAntiquantOffset,
                keySharedPrefix,
                valueSharedPrefix,
                actualSharedPrefixLen,
                queryRope,
                keyRope,
                keyRopeAntiquantScale,
                dequantScaleQuery,
                learnableSink,
                numHeads,
                scaleValue,
                preTokens,
                nextTokens,
                inputLayout,
                numKeyValueHeads,
                sparseMode,
                innerPrecise,
                blockSize,
                antiquantMode,
                softmaxLseFlag,
                keyAntiquantMode,
                valueAntiquantMode,
                queryQuantMode,
                attentionOut,
                softmaxLse,
                workspaceSize,
                executor,
            )
        }
    }

    /// An emulation that records calls, all of which go to V4.
    pub(super) fn runtime() -> Runtime {
        harness::runtime();
        let mut functions = ascend_emu::functions();
        functions.aclCreateTensor = Some(tensor);
        functions.aclCreateTensorList = Some(list);
        functions.aclCreateIntArray = Some(array);
        functions.aclnnFusedInferAttentionScoreGetWorkspaceSize = None;
        functions.aclnnFusedInferAttentionScoreV2GetWorkspaceSize = None;
        functions.aclnnFusedInferAttentionScoreV3GetWorkspaceSize = None;
        functions.aclnnFusedInferAttentionScoreV4GetWorkspaceSize = Some(phase_one);
        let api = Arc::new(Api::from_functions(functions, "emulation that records"));
        // SAFETY: each function records and hands on to the emulation's.
        unsafe { Runtime::from_api(api) }.unwrap()
    }
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const BLOCKS: u32 = 6;
const BLOCK_SIZE: u32 = 128;

struct Table {
    _turn: MutexGuard<'static, ()>,
    stream: Stream,
}

impl Table {
    fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = wrapper::runtime().device(0).unwrap().stream().unwrap();
        Self {
            _turn: turn,
            stream,
        }
    }

    /// The state of a step, and what its attention call said. A step is given by cached tokens, new tokens and drafts.
    fn said(
        &self,
        causality: Causality,
        policy: StatePolicy,
        sink: bool,
        padded: Option<u32>,
        step: &[(u32, u32, u32)],
    ) -> (AttentionState, Said) {
        let shape = CacheShape::new(1, KV_HEADS, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache: PagedKvCache<bf16> =
            PagedKvCache::new(self.stream.device(), BLOCKS, BLOCK_SIZE, shape, pad).unwrap();
        let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
        let backends = Backends::none().with(Fused);
        let mut attention = Attention::new(shape, cache, backends);
        let rows: Vec<[i32; 2]> = (0..3).map(|r| [2 * r, 2 * r + 1]).collect();
        let batch: Vec<_> = step
            .iter()
            .zip(&rows)
            .map(|(&(cached, new, drafts), row)| BatchRequest {
                cached,
                new,
                drafts,
                row,
                group: None,
            })
            .collect();
        let settings = BatchSettings {
            blocks: BLOCKS,
            block_size: BLOCK_SIZE,
            pad,
            causality,
            policy,
        };
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        if let Some(tokens) = padded {
            metadata.pad_to(tokens).unwrap();
        }
        let tokens = metadata.tokens() as usize;
        let rows = |heads: usize| {
            let ones = vec![bf16::ONE; tokens * heads * DIM];
            self.stream.upload(&ones, [tokens, heads, DIM]).unwrap()
        };
        let sinks = self.stream.upload(&[bf16::ONE; HEADS], [HEADS]).unwrap();
        recorder(|r| r.calls.clear());
        let mut step = attention.begin(&self.stream, &metadata).unwrap();
        let (query, key) = (rows(HEADS), rows(KV_HEADS));
        let sinks = sink.then_some(&sinks);
        step.forward_with_sink(0, &query, &key, &key, sinks)
            .unwrap();
        drop(step);
        self.stream.synchronize().unwrap();
        let mut calls = recorder(|r| std::mem::take(&mut r.calls));
        assert_eq!(calls.len(), 1);
        (metadata.state(), calls.pop().unwrap())
    }
}

fn compressed() -> Option<(aclDataType, Vec<i64>)> {
    Some((aclDataType::ACL_INT8, vec![2048, 2048]))
}

/// What every call of a step over the paged cache says, before lengths and mask.
fn paged(tokens: i64, requests: i64, columns: i64) -> Said {
    Said {
        layout: "TND".to_owned(),
        query: vec![tokens, HEADS as i64, DIM as i64],
        key: vec![BLOCKS.into(), BLOCK_SIZE.into(), (KV_HEADS * DIM) as i64],
        mask: compressed(),
        table: Some(vec![requests, columns]),
        block_size: BLOCK_SIZE.into(),
        sparse_mode: 3,
        tokens: [Mask::ALL_TOKENS; 2],
        heads: [HEADS as i64, KV_HEADS as i64],
        ..Said::default()
    }
}

const PLAIN: StatePolicy = StatePolicy {
    chunked_prefill: false,
    drafting: None,
};
const CHUNKED: StatePolicy = StatePolicy {
    chunked_prefill: true,
    drafting: None,
};
const MTP: StatePolicy = StatePolicy {
    chunked_prefill: true,
    drafting: Some(Drafting::Mtp),
};

#[test]
fn prefill_without_cache() {
    let table = Table::new();
    let (state, said) = table.said(
        Causality::Causal,
        CHUNKED,
        false,
        None,
        &[(0, 5, 0), (0, 3, 0)],
    );
    assert_eq!(state, AttentionState::PrefillNoCache);
    let want = Said {
        key: vec![8, KV_HEADS as i64, DIM as i64],
        table: None,
        block_size: 0,
        q_lengths: Some(vec![5, 8]),
        kv_lengths: Some(vec![5, 8]),
        ..paged(8, 0, 0)
    };
    assert_eq!(said, want);
}

#[test]
fn prefill_with_a_cache_hit() {
    let table = Table::new();
    let (state, said) = table.said(
        Causality::Causal,
        PLAIN,
        false,
        None,
        &[(130, 5, 0), (0, 3, 0)],
    );
    assert_eq!(state, AttentionState::PrefillCacheHit);
    let want = Said {
        q_lengths: Some(vec![5, 8]),
        kv_lengths: Some(vec![135, 3]),
        ..paged(8, 2, 2)
    };
    assert_eq!(said, want);
}

#[test]
fn decode_only() {
    let table = Table::new();
    let (state, said) = table.said(
        Causality::Causal,
        CHUNKED,
        false,
        None,
        &[(130, 1, 0), (9, 1, 0)],
    );
    assert_eq!(state, AttentionState::DecodeOnly);
    let want = Said {
        q_lengths: Some(vec![1, 2]),
        kv_lengths: Some(vec![131, 10]),
        ..paged(2, 2, 2)
    };
    assert_eq!(said, want);
}

#[test]
fn chunked_prefill() {
    let table = Table::new();
    let (state, said) = table.said(
        Causality::Causal,
        CHUNKED,
        false,
        None,
        &[(130, 1, 0), (9, 20, 0)],
    );
    assert_eq!(state, AttentionState::ChunkedPrefill);
    let want = Said {
        q_lengths: Some(vec![1, 21]),
        kv_lengths: Some(vec![131, 29]),
        ..paged(21, 2, 2)
    };
    assert_eq!(said, want);
}

#[test]
fn verifying_drafts() {
    let table = Table::new();
    let (state, said) = table.said(
        Causality::Causal,
        MTP,
        false,
        None,
        &[(9, 4, 3), (20, 2, 1)],
    );
    assert_eq!(state, AttentionState::SpecDecoding);
    let want = Said {
        q_lengths: Some(vec![4, 6]),
        kv_lengths: Some(vec![13, 22]),
        ..paged(6, 2, 1)
    };
    assert_eq!(said, want);
}

#[test]
fn a_window_in_every_state() {
    let table = Table::new();
    let window = Causality::Window(NonZeroU32::new(7).unwrap());
    for (policy, step) in [
        (CHUNKED, [(0, 5, 0), (0, 3, 0)]),
        (PLAIN, [(9, 5, 0), (0, 3, 0)]),
        (CHUNKED, [(9, 1, 0), (20, 1, 0)]),
        (CHUNKED, [(9, 1, 0), (20, 6, 0)]),
        (MTP, [(9, 3, 2), (20, 1, 0)]),
    ] {
        let (_, causal) = table.said(Causality::Causal, policy, false, None, &step);
        let (_, said) = table.said(window, policy, false, None, &step);
        // Seven keys, the token's own among them, are six before it.
        let want = Said {
            sparse_mode: 4,
            tokens: [6, 0],
            ..causal
        };
        assert_eq!(said, want);
    }
}

#[test]
fn not_causal() {
    let table = Table::new();
    for step in [[(0, 5, 0), (0, 3, 0)], [(9, 5, 0), (20, 3, 0)]] {
        let (_, causal) = table.said(Causality::Causal, CHUNKED, false, None, &step);
        let (_, said) = table.said(Causality::Bidirectional, CHUNKED, false, None, &step);
        let want = Said {
            sparse_mode: 0,
            mask: None,
            ..causal
        };
        assert_eq!(said, want);
    }
}

#[test]
fn sinks_change_nothing_else() {
    let table = Table::new();
    for causality in [
        Causality::Causal,
        Causality::Window(NonZeroU32::new(7).unwrap()),
    ] {
        let step = [(9, 1, 0), (20, 6, 0)];
        let (_, without) = table.said(causality, CHUNKED, false, None, &step);
        let (_, said) = table.said(causality, CHUNKED, true, None, &step);
        assert_eq!(
            said,
            Said {
                sink: true,
                ..without
            }
        );
    }
}

#[test]
fn padded_to_a_captured_size() {
    let table = Table::new();
    let (_, said) = table.said(
        Causality::Causal,
        CHUNKED,
        false,
        Some(4),
        &[(130, 1, 0), (9, 1, 0)],
    );
    let want = Said {
        q_lengths: Some(vec![1, 2, 3, 4]),
        kv_lengths: Some(vec![131, 10, 1, 1]),
        ..paged(4, 4, 2)
    };
    assert_eq!(said, want);
}

#[test]
fn the_decode_backend_takes_what_the_packed_call_cannot() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, 96);
    let cache: PagedKvCache<bf16> =
        PagedKvCache::new(stream.device(), 4, 16, shape, PadPolicy::SkipNegative).unwrap();
    let settings = |causality| BatchSettings {
        blocks: 4,
        block_size: 16,
        pad: PadPolicy::SkipNegative,
        causality,
        policy: CHUNKED,
    };
    let backends = Backends::none().with(Fused).with(PagedDecode);
    let mut attention = Attention::new(AttentionShape::new(2, 1, 96), cache, backends);
    let batch = [BatchRequest {
        cached: 20,
        new: 1,
        drafts: 0,
        row: &[2, 1],
        group: None,
    }];
    let rows = |heads: usize| {
        let ones = vec![bf16::ONE; heads * 96];
        stream.upload(&ones, [1, heads, 96]).unwrap()
    };
    let (query, key) = (rows(2), rows(1));
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    step.forward(0, &query, &key, &key).unwrap();
    let selected = step.selected().unwrap();
    assert_eq!(selected.name, "paged_decode");
    let refused: Vec<String> = selected.refused.iter().map(ToString::to_string).collect();
    assert_eq!(refused.len(), 1);
    assert!(
        refused[0].starts_with("fused: packed.head_dim: "),
        "{refused:?}"
    );
    drop(step);

    let window = Causality::Window(NonZeroU32::new(7).unwrap());
    let metadata = AttentionMetadata::new(&batch, settings(window)).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let error = step.forward(0, &query, &key, &key).unwrap_err().to_string();
    assert!(
        error.starts_with("no backend can serve the step: fused: packed.head_dim")
            && error.contains("; paged_decode: backend.decode"),
        "{error}"
    );
}
