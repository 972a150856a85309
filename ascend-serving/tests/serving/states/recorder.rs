//! A function table that stands before the emulation and writes down what each call says.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use ascend_attention::Runtime;
use ascend_attention::sys::bindings::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclTensor, aclTensorList, aclnnStatus,
};
use ascend_attention::sys::{Api, Functions};

use crate::harness;

/// Element type and shape of a tensor.
pub type Described = (aclDataType, Vec<i64>);

/// Everything that a call said, but for addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub layout: String,
    pub query: Described,
    pub key: Described,
    pub value: Described,
    pub out: Described,
    pub mask: Option<Described>,
    pub q_lengths: Option<Vec<i64>>,
    pub kv_lengths: Option<Vec<i64>>,
    pub table: Option<Described>,
    pub block_size: i64,
    pub sparse_mode: i64,
    pub tokens: [i64; 2],
    pub heads: [i64; 2],
    pub scale: f64,
    pub inner_precise: i64,
    pub lse: bool,
    pub sink: Option<Described>,
    /// Rotary parts of query and key.
    pub ropes: [Option<Described>; 2],
    /// Scales of key and value.
    pub antiquant: [Option<Described>; 2],
    /// `antiquantMode`, `keyAntiquantMode`, `valueAntiquantMode`, `queryQuantMode`.
    pub modes: [i64; 4],
    /// Tensors and arrays that no state of a step has.
    pub others: usize,
}

#[derive(Default)]
struct Recorder {
    tensors: HashMap<usize, Described>,
    lists: HashMap<usize, usize>,
    arrays: HashMap<usize, Vec<i64>>,
    calls: Vec<Said>,
}

static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);
/// The tests share the recorder.
pub static TURN: Mutex<()> = Mutex::new(());

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
        let create = harness::functions().aclCreateTensor.unwrap();
        let made = create(dims, rank, dtype, strides, offset, format, storage, storage_rank, data);
        let dims = slice::from_raw_parts(dims, rank as usize).to_vec();
        recorder(|r| r.tensors.insert(made.addr(), (dtype, dims)));
        made
    }
}

unsafe extern "C" fn list(tensors: *const *const aclTensor, count: u64) -> *mut aclTensorList {
    // SAFETY: handed on to the caller, who gives `count` tensors, at least one.
    unsafe {
        let made = harness::functions().aclCreateTensorList.unwrap()(tensors, count);
        let first = (*tensors).addr();
        recorder(|r| r.lists.insert(made.addr(), first));
        made
    }
}

unsafe extern "C" fn array(value: *const i64, count: u64) -> *mut aclIntArray {
    // SAFETY: handed on to the caller, who gives `count` numbers.
    unsafe {
        let made = harness::functions().aclCreateIntArray.unwrap()(value, count);
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
            let first = |at: *const aclTensorList| r.tensors[&r.lists[&at.addr()]].clone();
            let tensors = [
                pseShift,
                deqScale1,
                quantScale1,
                deqScale2,
                quantScale2,
                quantOffset2,
                antiquantScale,
                antiquantOffset,
                queryPaddingSize,
                kvPaddingSize,
                keyAntiquantOffset,
                valueAntiquantOffset,
                keySharedPrefix,
                valueSharedPrefix,
                keyRopeAntiquantScale,
                dequantScaleQuery,
            ];
            let others = tensors.iter().filter(|tensor| !tensor.is_null()).count();
            let said = Said {
                // SAFETY: the caller gives a text that ends.
                layout: unsafe { CStr::from_ptr(inputLayout) }.to_str().unwrap().to_owned(),
                query: shape(query).unwrap(),
                key: first(key),
                value: first(value),
                out: shape(attentionOut).unwrap(),
                mask: shape(attenMask),
                q_lengths: numbers(actualSeqLengths),
                kv_lengths: numbers(actualSeqLengthsKv),
                table: shape(blockTable),
                block_size: blockSize,
                sparse_mode: sparseMode,
                tokens: [preTokens, nextTokens],
                heads: [numHeads, numKeyValueHeads],
                scale: scaleValue,
                inner_precise: innerPrecise,
                lse: softmaxLseFlag,
                sink: shape(learnableSink),
                ropes: [shape(queryRope), shape(keyRope)],
                antiquant: [shape(keyAntiquantScale), shape(valueAntiquantScale)],
                modes: [antiquantMode, keyAntiquantMode, valueAntiquantMode, queryQuantMode],
                others: others + usize::from(!actualSharedPrefixLen.is_null()),
            };
            r.calls.push(said);
        });
        let next = harness::functions().aclnnFusedInferAttentionScoreV4GetWorkspaceSize.unwrap();
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

    unsafe extern "C" fn inference_product() -> *const c_char {
        c"Ascend310P3".as_ptr()
    }

    /// An emulation that records calls, all of which go to V4.
    pub fn runtime(mut functions: Functions, inference: bool) -> Runtime {
        if inference {
            functions.aclrtGetSocName = Some(inference_product);
        }
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

pub use wrapper::runtime;

/// The calls since the last time.
pub fn take() -> Vec<Said> {
    recorder(|r| std::mem::take(&mut r.calls))
}
