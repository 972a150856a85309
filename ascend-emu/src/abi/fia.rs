//! FusedInferAttentionScore, versions 1 to 5.

use super::{not_null_or, phase_one};
use crate::descriptor::{Described, describe, optional_ints, optional_list};
use crate::executor::launch;
use crate::op::fia::FiaOperator;
use crate::op::owned_call::{Attributes, Inputs, OwnedCall};
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::{ACLNN_NULLPTR, Outcome, aclnn};
use ascend_spec::fia::{Parameter as P, Place, Version};
use ascend_sys::bindings::{
    aclIntArray, aclOpExecutor, aclTensor, aclTensorList, aclnnStatus, aclrtStream,
};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

type Tensor = *const aclTensor;
type TensorList = *const aclTensorList;
type IntArray = *const aclIntArray;

/// What a phase one is for.
#[derive(Clone, Copy)]
enum Purpose {
    /// `GetWorkspaceSize`.
    Launch,
    /// `GetMaxWorkspaceSize`: the workspace that any lengths need.
    Measure,
}

/// Every argument of the newest version, under C's names; an older version leaves out the rest.
#[derive(Clone, Copy)]
struct Raw {
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
    keyAntiquantScaleOptional: Tensor,
    keyAntiquantOffsetOptional: Tensor,
    valueAntiquantScaleOptional: Tensor,
    valueAntiquantOffsetOptional: Tensor,
    keySharedPrefixOptional: Tensor,
    valueSharedPrefixOptional: Tensor,
    actualSharedPrefixLenOptional: IntArray,
    queryRopeOptional: Tensor,
    keyRopeOptional: Tensor,
    keyRopeAntiquantScaleOptional: Tensor,
    dequantScaleQueryOptional: Tensor,
    learnableSinkOptional: Tensor,
    qStartIdxOptional: IntArray,
    kvStartIdxOptional: IntArray,
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
    pseType: i64,
    attentionOut: Tensor,
    softmaxLse: Tensor,
}

impl Raw {
    /// No tensors; attributes that older versions lack are 0.
    const fn new() -> Self {
        Raw {
            query: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            pseShiftOptional: ptr::null(),
            attenMaskOptional: ptr::null(),
            actualSeqLengthsOptional: ptr::null(),
            actualSeqLengthsKvOptional: ptr::null(),
            deqScale1Optional: ptr::null(),
            quantScale1Optional: ptr::null(),
            deqScale2Optional: ptr::null(),
            quantScale2Optional: ptr::null(),
            quantOffset2Optional: ptr::null(),
            antiquantScaleOptional: ptr::null(),
            antiquantOffsetOptional: ptr::null(),
            blockTableOptional: ptr::null(),
            queryPaddingSizeOptional: ptr::null(),
            kvPaddingSizeOptional: ptr::null(),
            keyAntiquantScaleOptional: ptr::null(),
            keyAntiquantOffsetOptional: ptr::null(),
            valueAntiquantScaleOptional: ptr::null(),
            valueAntiquantOffsetOptional: ptr::null(),
            keySharedPrefixOptional: ptr::null(),
            valueSharedPrefixOptional: ptr::null(),
            actualSharedPrefixLenOptional: ptr::null(),
            queryRopeOptional: ptr::null(),
            keyRopeOptional: ptr::null(),
            keyRopeAntiquantScaleOptional: ptr::null(),
            dequantScaleQueryOptional: ptr::null(),
            learnableSinkOptional: ptr::null(),
            qStartIdxOptional: ptr::null(),
            kvStartIdxOptional: ptr::null(),
            numHeads: 0,
            scaleValue: 1.0,
            preTokens: 0,
            nextTokens: 0,
            inputLayout: ptr::null_mut(),
            numKeyValueHeads: 0,
            sparseMode: 0,
            innerPrecise: 0,
            blockSize: 0,
            antiquantMode: 0,
            softmaxLseFlag: false,
            keyAntiquantMode: 0,
            valueAntiquantMode: 0,
            queryQuantMode: 0,
            pseType: 0,
            attentionOut: ptr::null(),
            softmaxLse: ptr::null(),
        }
    }

    /// Copies what the handles stand for: the call, and the addresses of its tensors.
    ///
    /// # Safety
    ///
    /// `inputLayout` is null or a NUL-terminated text.
    unsafe fn read(&self) -> Outcome<(OwnedCall, Addresses)> {
        not_null_or(ACLNN_NULLPTR, "inputLayout", self.inputLayout)?;
        // SAFETY: not null, so a NUL-terminated text.
        let input_layout = unsafe { CStr::from_ptr(self.inputLayout) };
        let mut addresses = Addresses::default();
        let mut inputs: Inputs<_> = [None; _];
        let mut outputs = [None; _];
        let tensors = [
            (P::Query, self.query),
            (P::PseShift, self.pseShiftOptional),
            (P::AttenMask, self.attenMaskOptional),
            (P::DeqScale1, self.deqScale1Optional),
            (P::QuantScale1, self.quantScale1Optional),
            (P::DeqScale2, self.deqScale2Optional),
            (P::QuantScale2, self.quantScale2Optional),
            (P::QuantOffset2, self.quantOffset2Optional),
            (P::AntiquantScale, self.antiquantScaleOptional),
            (P::AntiquantOffset, self.antiquantOffsetOptional),
            (P::BlockTable, self.blockTableOptional),
            (P::QueryPaddingSize, self.queryPaddingSizeOptional),
            (P::KvPaddingSize, self.kvPaddingSizeOptional),
            (P::KeyAntiquantScale, self.keyAntiquantScaleOptional),
            (P::KeyAntiquantOffset, self.keyAntiquantOffsetOptional),
            (P::ValueAntiquantScale, self.valueAntiquantScaleOptional),
            (P::ValueAntiquantOffset, self.valueAntiquantOffsetOptional),
            (P::KeySharedPrefix, self.keySharedPrefixOptional),
            (P::ValueSharedPrefix, self.valueSharedPrefixOptional),
            (P::QueryRope, self.queryRopeOptional),
            (P::KeyRope, self.keyRopeOptional),
            (P::KeyRopeAntiquantScale, self.keyRopeAntiquantScaleOptional),
            (P::DequantScaleQuery, self.dequantScaleQueryOptional),
            (P::LearnableSink, self.learnableSinkOptional),
            (P::AttentionOut, self.attentionOut),
            (P::SoftmaxLse, self.softmaxLse),
        ];
        for (parameter, raw) in tensors {
            let (desc, address) = match parameter.place() {
                Place::Input(at, _) => (inputs.get_mut(at), addresses.inputs.get_mut(at)),
                Place::Output(at) => (outputs.get_mut(at), addresses.outputs.get_mut(at)),
            };
            if let (Some(desc), Some(address)) = (desc, address) {
                describe(raw, desc, address)?;
            }
        }
        let key = optional_list("key", self.key)?.unwrap_or_default();
        let value = optional_list("value", self.value)?.unwrap_or_default();
        for (list, tensors) in addresses.lists.iter_mut().zip([&key, &value]) {
            list.extend(tensors.iter().map(|tensor| tensor.address));
        }
        let descs = |tensors: Vec<Described>| tensors.iter().map(|t| t.desc).collect();
        let call = OwnedCall {
            inputs,
            key: descs(key),
            value: descs(value),
            outputs,
            actual_seq_lengths: optional_ints(self.actualSeqLengthsOptional)?,
            actual_seq_lengths_kv: optional_ints(self.actualSeqLengthsKvOptional)?,
            actual_shared_prefix_len: optional_ints(self.actualSharedPrefixLenOptional)?,
            q_start_idx: optional_ints(self.qStartIdxOptional)?,
            kv_start_idx: optional_ints(self.kvStartIdxOptional)?,
            input_layout: input_layout.to_string_lossy().into_owned(),
            attributes: Attributes {
                num_heads: self.numHeads,
                scale: self.scaleValue,
                pre_tokens: self.preTokens,
                next_tokens: self.nextTokens,
                num_key_value_heads: self.numKeyValueHeads,
                sparse_mode: self.sparseMode,
                inner_precise: self.innerPrecise,
                block_size: self.blockSize,
                antiquant_mode: self.antiquantMode,
                softmax_lse_flag: self.softmaxLseFlag,
                key_antiquant_mode: self.keyAntiquantMode,
                value_antiquant_mode: self.valueAntiquantMode,
                query_quant_mode: self.queryQuantMode,
                pse_type: self.pseType,
            },
        };
        Ok((call, addresses))
    }

    /// Phase one.
    ///
    /// # Safety
    ///
    /// As [`Raw::read`]; the last two pointers are null or valid for writing.
    unsafe fn prepare(
        &self,
        version: Version,
        purpose: Purpose,
        workspace_size: *mut u64,
        executor: *mut *mut aclOpExecutor,
    ) -> Outcome {
        let machine = context::machine();
        machine.admits(version)?;
        version.enter(machine.target)?;
        // SAFETY: the caller's promise.
        unsafe {
            phase_one(workspace_size, executor, || {
                let (call, addresses) = self.read()?;
                let op = match purpose {
                    Purpose::Launch => FiaOperator::new(call, version, machine.target),
                    Purpose::Measure => FiaOperator::measured(call, version, machine.target),
                }?;
                let idle = op.is_empty();
                Ok((op, addresses, idle))
            })
        }
    }
}

/// Defines the functions of one version: phase one, the measurement where there is one, and phase two.
macro_rules! version {
    ($version:ident: $one:ident $(, $max:ident)?; $two:ident; $($argument:ident: $type:ty,)*) => {
        version! { @define $version Launch $one ($($argument: $type,)*) }
        version! { @measure $version ($($max)?) ($($argument: $type,)*) }

        pub unsafe extern "C" fn $two(
            workspace: *mut c_void,
            workspaceSize: u64,
            executor: *mut aclOpExecutor,
            stream: aclrtStream,
        ) -> aclnnStatus {
            let name = Version::$version.symbol();
            aclnn(|| launch(name, workspace.addr(), workspaceSize, executor.cast(), stream))
        }
    };
    (@measure $version:ident () $arguments:tt) => {};
    (@measure $version:ident ($max:ident) $arguments:tt) => {
        version! { @define $version Measure $max $arguments }
    };
    (@define $version:ident $purpose:ident $one:ident ($($argument:ident: $type:ty,)*)) => {
        #[allow(clippy::too_many_arguments, reason = "the C signature")]
        pub unsafe extern "C" fn $one(
            $($argument: $type,)*
            workspaceSize: *mut u64,
            executor: *mut *mut aclOpExecutor,
        ) -> aclnnStatus {
            #[allow(clippy::needless_update, reason = "the newest version has them all")]
            let raw = Raw { $($argument,)* ..Raw::new() };
            let (version, purpose) = (Version::$version, Purpose::$purpose);
            // SAFETY: the caller's promise.
            aclnn(|| unsafe { raw.prepare(version, purpose, workspaceSize, executor) })
        }
    };
}

version! {
    V1: aclnnFusedInferAttentionScoreGetWorkspaceSize;
    aclnnFusedInferAttentionScore;
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
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
    attentionOut: Tensor,
    softmaxLse: Tensor,
}

version! {
    V2: aclnnFusedInferAttentionScoreV2GetWorkspaceSize, aclnnFusedInferAttentionScoreV2GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV2;
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
    keyAntiquantScaleOptional: Tensor,
    keyAntiquantOffsetOptional: Tensor,
    valueAntiquantScaleOptional: Tensor,
    valueAntiquantOffsetOptional: Tensor,
    keySharedPrefixOptional: Tensor,
    valueSharedPrefixOptional: Tensor,
    actualSharedPrefixLenOptional: IntArray,
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
    attentionOut: Tensor,
    softmaxLse: Tensor,
}

version! {
    V3: aclnnFusedInferAttentionScoreV3GetWorkspaceSize, aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV3;
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
    keyAntiquantScaleOptional: Tensor,
    keyAntiquantOffsetOptional: Tensor,
    valueAntiquantScaleOptional: Tensor,
    valueAntiquantOffsetOptional: Tensor,
    keySharedPrefixOptional: Tensor,
    valueSharedPrefixOptional: Tensor,
    actualSharedPrefixLenOptional: IntArray,
    queryRopeOptional: Tensor,
    keyRopeOptional: Tensor,
    keyRopeAntiquantScaleOptional: Tensor,
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
    attentionOut: Tensor,
    softmaxLse: Tensor,
}

version! {
    V4: aclnnFusedInferAttentionScoreV4GetWorkspaceSize, aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV4;
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
    keyAntiquantScaleOptional: Tensor,
    keyAntiquantOffsetOptional: Tensor,
    valueAntiquantScaleOptional: Tensor,
    valueAntiquantOffsetOptional: Tensor,
    keySharedPrefixOptional: Tensor,
    valueSharedPrefixOptional: Tensor,
    actualSharedPrefixLenOptional: IntArray,
    queryRopeOptional: Tensor,
    keyRopeOptional: Tensor,
    keyRopeAntiquantScaleOptional: Tensor,
    dequantScaleQueryOptional: Tensor,
    learnableSinkOptional: Tensor,
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
    attentionOut: Tensor,
    softmaxLse: Tensor,
}

version! {
    V5: aclnnFusedInferAttentionScoreV5GetWorkspaceSize, aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV5;
    query: Tensor,
    key: TensorList,
    value: TensorList,
    pseShiftOptional: Tensor,
    attenMaskOptional: Tensor,
    actualSeqLengthsOptional: IntArray,
    actualSeqLengthsKvOptional: IntArray,
    deqScale1Optional: Tensor,
    quantScale1Optional: Tensor,
    deqScale2Optional: Tensor,
    quantScale2Optional: Tensor,
    quantOffset2Optional: Tensor,
    antiquantScaleOptional: Tensor,
    antiquantOffsetOptional: Tensor,
    blockTableOptional: Tensor,
    queryPaddingSizeOptional: Tensor,
    kvPaddingSizeOptional: Tensor,
    keyAntiquantScaleOptional: Tensor,
    keyAntiquantOffsetOptional: Tensor,
    valueAntiquantScaleOptional: Tensor,
    valueAntiquantOffsetOptional: Tensor,
    keySharedPrefixOptional: Tensor,
    valueSharedPrefixOptional: Tensor,
    actualSharedPrefixLenOptional: IntArray,
    queryRopeOptional: Tensor,
    keyRopeOptional: Tensor,
    keyRopeAntiquantScaleOptional: Tensor,
    dequantScaleQueryOptional: Tensor,
    learnableSinkOptional: Tensor,
    qStartIdxOptional: IntArray,
    kvStartIdxOptional: IntArray,
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
    pseType: i64,
    attentionOut: Tensor,
    softmaxLse: Tensor,
}
