//! AttentionUpdate.

use super::phase_one;
use crate::descriptor::{Described, describe, optional_list};
use crate::executor::launch;
use crate::op::update::{OwnedUpdate, UpdateOperator};
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::aclnn;
use ascend_spec::OperatorVersion;
use ascend_sys::bindings::{aclOpExecutor, aclTensor, aclTensorList, aclnnStatus, aclrtStream};
use std::ffi::c_void;

pub unsafe extern "C" fn aclnnAttentionUpdateGetWorkspaceSize(
    lse: *const aclTensorList,
    localOut: *const aclTensorList,
    updateType: i64,
    out: *mut aclTensor,
    lseOut: *mut aclTensor,
    workspaceSize: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> aclnnStatus {
    let make = || {
        let lse = optional_list("lse", lse)?.unwrap_or_default();
        let local_out = optional_list("localOut", localOut)?.unwrap_or_default();
        let mut addresses = Addresses::default();
        for (list, tensors) in addresses.lists.iter_mut().zip([&lse, &local_out]) {
            list.extend(tensors.iter().map(|tensor| tensor.address));
        }
        let mut outputs = [None; _];
        for ((raw, desc), at) in
            ([out, lseOut].into_iter().zip(&mut outputs)).zip(&mut addresses.outputs)
        {
            describe(raw, desc, at)?;
        }
        let descs = |tensors: Vec<Described>| tensors.iter().map(|tensor| tensor.desc).collect();
        let call = OwnedUpdate {
            lse: descs(lse),
            local_out: descs(local_out),
            update_type: updateType,
            outputs,
        };
        let op = UpdateOperator::new(call, context::machine().target.soc)?;
        let idle = op.is_idle();
        Ok((op, addresses, idle))
    };
    // SAFETY: the caller's promise.
    aclnn(|| unsafe { phase_one(workspaceSize, executor, make) })
}

pub unsafe extern "C" fn aclnnAttentionUpdate(
    workspace: *mut c_void,
    workspaceSize: u64,
    executor: *mut aclOpExecutor,
    stream: aclrtStream,
) -> aclnnStatus {
    let name = OperatorVersion::AttentionUpdate.symbol();
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
