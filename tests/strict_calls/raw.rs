//! A call through the C ABI: tensors in device memory with guards around them, descriptors, phase one, phase two.

use super::calls::Call;
use super::calls::contents::arguments_of;
use ascend_attention::spec::ops::fused_infer_attention_score::{Argument, FiaCall, Parameter, Version};
use ascend_attention::spec::{DType, TensorDesc};
use ascend_attention::sys::bindings::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclTensor, aclTensorList, aclrtMemMallocPolicy,
    aclrtMemcpyKind, aclrtStream,
};
use ascend_emu::abi::*;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

/// Bytes before and behind each tensor.
const GUARD: usize = 96;

#[track_caller]
pub fn ok(status: i32) {
    assert_eq!(status, 0, "{}", message());
}

/// The latest error message of this thread.
pub fn message() -> String {
    // SAFETY: the function takes nothing, and the text is valid until the next call.
    unsafe {
        let text = aclGetRecentErrMsg();
        if text.is_null() {
            return String::new();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// Device memory that holds a tensor between two guards.
#[derive(Debug)]
pub struct Guarded {
    address: *mut c_void,
    /// What the memory held before the call, guards included.
    before: Vec<u8>,
    bytes: usize,
}

impl Guarded {
    /// The guards of inputs are NaN, so that a read of them shows in the results.
    pub fn new(contents: Vec<u8>, guard: u8) -> Self {
        let mut before = vec![guard; GUARD];
        before.extend(&contents);
        before.extend([guard; GUARD]);
        let mut address = null_mut();
        // SAFETY: `address` is valid for writing; the copy stays within both memories.
        unsafe {
            ok(aclrtMalloc(&mut address, before.len(), aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST));
            ok(aclrtMemcpy(
                address,
                before.len(),
                before.as_ptr().cast(),
                before.len(),
                aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE,
            ));
        }
        Self { address, before, bytes: contents.len() }
    }

    fn tensor(&self) -> *mut c_void {
        self.address.wrapping_byte_add(GUARD)
    }

    /// What the tensor held before the call.
    pub fn contents(&self) -> &[u8] {
        &self.before[GUARD..GUARD + self.bytes]
    }

    fn read(&self) -> Vec<u8> {
        let mut now = vec![0u8; self.before.len()];
        // SAFETY: the copy stays within both memories.
        unsafe {
            ok(aclrtMemcpy(
                now.as_mut_ptr().cast(),
                now.len(),
                self.address,
                now.len(),
                aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST,
            ));
        }
        now
    }

    /// Whether nothing was written at all.
    pub fn is_untouched(&self) -> bool {
        self.read() == self.before
    }

    /// What the tensor holds now, if the guards still hold what they did.
    pub fn written(&self) -> Option<Vec<u8>> {
        let now = self.read();
        let end = GUARD + self.bytes;
        let intact = now[..GUARD] == self.before[..GUARD] && now[end..] == self.before[end..];
        intact.then(|| now[GUARD..end].to_vec())
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        let status = unsafe { aclrtFree(self.address) };
        assert!(status == 0 || std::thread::panicking(), "{}", message());
    }
}

/// The tensors of a call on the device.
pub type Memory = HashMap<Argument, Guarded>;

fn tensor(desc: &TensorDesc, data: *mut c_void) -> *mut aclTensor {
    // SAFETY: the arrays have as many elements as the call says.
    let tensor = unsafe {
        aclCreateTensor(
            desc.shape.as_ptr(),
            desc.shape.rank() as u64,
            aclDataType(desc.dtype.acl()),
            desc.strides.as_ptr(),
            desc.offset,
            aclFormat(desc.format.acl()),
            desc.shape.as_ptr(),
            desc.shape.rank() as u64,
            data,
        )
    };
    assert!(!tensor.is_null(), "{desc}: {}", message());
    tensor
}

/// The descriptors of a call; they are destroyed when dropped.
struct Descriptors {
    of: HashMap<Argument, *mut aclTensor>,
    key: *mut aclTensorList,
    value: *mut aclTensorList,
    arrays: [*mut aclIntArray; 5],
    layout: CString,
}

impl Descriptors {
    fn new(call: &FiaCall<'_>, memory: &Memory) -> Self {
        let mut of = HashMap::new();
        for argument in arguments_of(call) {
            let data = memory.get(&argument).map_or(null_mut(), Guarded::tensor);
            of.insert(argument, tensor(call.tensor(argument).unwrap(), data));
        }
        let list = |tensors: Vec<*const aclTensor>| match tensors.len() {
            0 => null_mut(),
            // SAFETY: the array has as many elements.
            len => unsafe { aclCreateTensorList(tensors.as_ptr(), len as u64) },
        };
        let key = list(
            (0..call.key.len())
                .map(|i| of.remove(&Argument::element(Parameter::Key, i)).unwrap().cast_const())
                .collect(),
        );
        let value = list(
            (0..call.value.len())
                .map(|i| of.remove(&Argument::element(Parameter::Value, i)).unwrap().cast_const())
                .collect(),
        );
        let array = |values: Option<&[i64]>| match values {
            None => null_mut(),
            // SAFETY: the array has as many elements.
            Some(values) => unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) },
        };
        Self {
            of,
            key,
            value,
            arrays: [
                array(call.actual_seq_lengths),
                array(call.actual_seq_lengths_kv),
                array(call.actual_shared_prefix_len),
                array(call.q_start_idx),
                array(call.kv_start_idx),
            ],
            layout: CString::new(call.input_layout).unwrap(),
        }
    }

    fn get(&self, parameter: Parameter) -> *const aclTensor {
        self.of.get(&parameter.into()).map_or(null(), |tensor| tensor.cast_const())
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each was created by `new` and is destroyed once; lists destroy their members.
        let statuses = unsafe {
            let mut statuses: Vec<i32> = self.of.values().map(|&tensor| aclDestroyTensor(tensor)).collect();
            for list in [self.key, self.value] {
                if !list.is_null() {
                    statuses.push(aclDestroyTensorList(list));
                }
            }
            for array in self.arrays {
                if !array.is_null() {
                    statuses.push(aclDestroyIntArray(array));
                }
            }
            statuses
        };
        assert!(std::thread::panicking() || statuses.iter().all(|&status| status == 0), "{}", message());
    }
}

/// What phase one said.
#[derive(Debug)]
pub struct Prepared {
    pub status: i32,
    pub workspace_bytes: u64,
    executor: *mut aclOpExecutor,
    version: Version,
}

/// What phase one leaves alone when it refuses.
pub const UNSET: u64 = 0x5a5a_5a5a;

/// Phase one. All that it made but the executor is destroyed again.
pub fn prepare(call: &Call, version: Version, memory: &Memory) -> Prepared {
    phase_one(&call.describe(), version, memory, false)
}

/// The status of phase one for a call without memory, which phase one does not read. Its executor is destroyed.
pub fn verdict(call: &FiaCall<'_>, version: Version) -> i32 {
    let prepared = phase_one(call, version, &Memory::new(), false);
    if prepared.status == 0 {
        // SAFETY: the executor is alive, and nothing was launched with it.
        ok(unsafe { aclDestroyAclOpExecutor(prepared.executor) });
    }
    prepared.status
}

/// The workspace that `GetMaxWorkspaceSize` asks for, which version 1 does not have.
pub fn measure(call: &Call, version: Version, memory: &Memory) -> Prepared {
    assert_ne!(version, Version::V1);
    phase_one(&call.describe(), version, memory, true)
}

fn phase_one(call: &FiaCall<'_>, version: Version, memory: &Memory, max: bool) -> Prepared {
    use Parameter as P;
    let descriptors = Descriptors::new(call, memory);
    let t = |parameter| descriptors.get(parameter);
    let [q_lens, kv_lens, prefix_len, q_start, kv_start] = descriptors.arrays;
    let mut workspace_bytes = UNSET;
    let mut executor = null_mut();
    macro_rules! phase_one {
        ($function:ident or $max:ident, [$($input:expr),*], [$($mode:expr),*]) => {{
            let function = if max { $max } else { $function };
            // SAFETY: each argument is null or alive; the last two are places for the results.
            unsafe {
                function(
                    t(P::Query), descriptors.key, descriptors.value, t(P::PseShift), t(P::AttenMask), q_lens, kv_lens,
                    t(P::DeqScale1), t(P::QuantScale1), t(P::DeqScale2), t(P::QuantScale2), t(P::QuantOffset2),
                    t(P::AntiquantScale), t(P::AntiquantOffset), t(P::BlockTable), t(P::QueryPaddingSize),
                    t(P::KvPaddingSize), $($input,)*
                    call.num_heads, call.scale, call.pre_tokens, call.next_tokens,
                    descriptors.layout.as_ptr().cast_mut(), call.num_key_value_heads, call.sparse_mode,
                    call.inner_precise, call.block_size, call.antiquant_mode, call.softmax_lse_flag, $($mode,)*
                    t(P::AttentionOut), t(P::SoftmaxLse), &mut workspace_bytes, &mut executor,
                )
            }
        }};
    }
    let (key_mode, value_mode) = (call.key_antiquant_mode, call.value_antiquant_mode);
    let rope_scale = t(P::KeyRopeAntiquantScale);
    let status = match version {
        Version::V1 => phase_one!(
            aclnnFusedInferAttentionScoreGetWorkspaceSize
                or aclnnFusedInferAttentionScoreGetWorkspaceSize,
            [],
            []
        ),
        Version::V2 => phase_one!(
            aclnnFusedInferAttentionScoreV2GetWorkspaceSize
                or aclnnFusedInferAttentionScoreV2GetMaxWorkspaceSize,
            [
                t(P::KeyAntiquantScale),
                t(P::KeyAntiquantOffset),
                t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset),
                t(P::KeySharedPrefix),
                t(P::ValueSharedPrefix),
                prefix_len
            ],
            [key_mode, value_mode]
        ),
        Version::V3 => phase_one!(
            aclnnFusedInferAttentionScoreV3GetWorkspaceSize
                or aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize,
            [
                t(P::KeyAntiquantScale),
                t(P::KeyAntiquantOffset),
                t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset),
                t(P::KeySharedPrefix),
                t(P::ValueSharedPrefix),
                prefix_len,
                t(P::QueryRope),
                t(P::KeyRope),
                rope_scale
            ],
            [key_mode, value_mode]
        ),
        Version::V4 => phase_one!(
            aclnnFusedInferAttentionScoreV4GetWorkspaceSize
                or aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize,
            [
                t(P::KeyAntiquantScale),
                t(P::KeyAntiquantOffset),
                t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset),
                t(P::KeySharedPrefix),
                t(P::ValueSharedPrefix),
                prefix_len,
                t(P::QueryRope),
                t(P::KeyRope),
                rope_scale,
                t(P::DequantScaleQuery),
                t(P::LearnableSink)
            ],
            [key_mode, value_mode, call.query_quant_mode]
        ),
        Version::V5 => phase_one!(
            aclnnFusedInferAttentionScoreV5GetWorkspaceSize
                or aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize,
            [
                t(P::KeyAntiquantScale),
                t(P::KeyAntiquantOffset),
                t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset),
                t(P::KeySharedPrefix),
                t(P::ValueSharedPrefix),
                prefix_len,
                t(P::QueryRope),
                t(P::KeyRope),
                rope_scale,
                t(P::DequantScaleQuery),
                t(P::LearnableSink),
                q_start,
                kv_start
            ],
            [key_mode, value_mode, call.query_quant_mode, call.pse_type]
        ),
    };
    assert_eq!(status != 0, executor.is_null());
    Prepared { status, workspace_bytes, executor, version }
}

impl Prepared {
    /// Phase two on a stream, and a wait for it; the statuses of both.
    pub fn run(self, stream: aclrtStream) -> (i32, i32) {
        let bytes = self.workspace_bytes;
        let mut at = null_mut();
        // SAFETY: the executor is alive and used once; workspace and tensors live until the stream was waited for.
        unsafe {
            if bytes > 0 {
                ok(aclrtMalloc(&mut at, bytes as usize, aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST));
            }
            let status = match self.version {
                Version::V1 => aclnnFusedInferAttentionScore(at, bytes, self.executor, stream),
                Version::V2 => aclnnFusedInferAttentionScoreV2(at, bytes, self.executor, stream),
                Version::V3 => aclnnFusedInferAttentionScoreV3(at, bytes, self.executor, stream),
                Version::V4 => aclnnFusedInferAttentionScoreV4(at, bytes, self.executor, stream),
                Version::V5 => aclnnFusedInferAttentionScoreV5(at, bytes, self.executor, stream),
            };
            if status != 0 {
                // A refused launch leaves the executor to its owner.
                ok(aclDestroyAclOpExecutor(self.executor));
            }
            let synchronized = aclrtSynchronizeStream(stream);
            if bytes > 0 {
                ok(aclrtFree(at));
            }
            (status, synchronized)
        }
    }
}

/// Bytes that a tensor reaches from its base address; `None` if that is more than a test should allocate.
pub fn reach(desc: &TensorDesc) -> Option<usize> {
    let bytes = usize::try_from(desc.byte_range()?.end).ok()?;
    (bytes <= 64 << 20 && desc.dtype != DType::String).then_some(bytes)
}
