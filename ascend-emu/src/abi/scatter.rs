//! ScatterPaKvCache.

use super::{optional_text, phase_one};
use crate::descriptor::{describe, optional_ints};
use crate::executor::launch;
use crate::op::scatter::{OwnedScatter, ScatterOperator, place};
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::aclnn;
use ascend_spec::OperatorVersion;
use ascend_sys::bindings::{aclIntArray, aclOpExecutor, aclTensor, aclnnStatus, aclrtStream};
use std::ffi::{c_char, c_void};

#[allow(clippy::too_many_arguments, reason = "the C signature")]
pub unsafe extern "C" fn aclnnScatterPaKvCacheGetWorkspaceSize(
    key: *const aclTensor,
    keyCacheRef: *mut aclTensor,
    slotMapping: *const aclTensor,
    value: *const aclTensor,
    valueCacheRef: *mut aclTensor,
    compressLensOptional: *const aclTensor,
    compressSeqOffsetOptional: *const aclTensor,
    seqLensOptional: *const aclTensor,
    cacheModeOptional: *mut c_char,
    scatterModeOptional: *mut c_char,
    stridesOptional: *const aclIntArray,
    offsetsOptional: *const aclIntArray,
    workspaceSize: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> aclnnStatus {
    let make = || {
        let given = [
            key,
            keyCacheRef.cast_const(),
            slotMapping,
            value,
            valueCacheRef.cast_const(),
            compressLensOptional,
            compressSeqOffsetOptional,
            seqLensOptional,
        ];
        let mut addresses = Addresses::default();
        let mut tensors = [None; place::INPUTS];
        for ((raw, desc), at) in (given.into_iter().zip(&mut tensors)).zip(&mut addresses.inputs) {
            describe(raw, desc, at)?;
        }
        // The caches are inputs and outputs.
        for (output, input) in place::CACHES.into_iter().enumerate() {
            addresses.outputs[output] = addresses.inputs[input];
        }
        let call = OwnedScatter {
            tensors,
            // SAFETY: null or NUL-terminated, by the caller's promise.
            cache_mode: unsafe { optional_text(cacheModeOptional) },
            // SAFETY: as above.
            scatter_mode: unsafe { optional_text(scatterModeOptional) },
            strides: optional_ints(stridesOptional)?,
            offsets: optional_ints(offsetsOptional)?,
        };
        let op = ScatterOperator::new(call, context::machine().target.soc)?;
        let idle = op.is_idle();
        Ok((op, addresses, idle))
    };
    // SAFETY: the caller's promise.
    aclnn(|| unsafe { phase_one(workspaceSize, executor, make) })
}

pub unsafe extern "C" fn aclnnScatterPaKvCache(
    workspace: *mut c_void,
    workspaceSize: u64,
    executor: *mut aclOpExecutor,
    stream: aclrtStream,
) -> aclnnStatus {
    let name = OperatorVersion::ScatterPaKvCache.symbol();
    aclnn(|| {
        launch(
            name,
            workspace.addr(),
            workspaceSize,
            executor.cast(),
            stream,
        )
    })
}
