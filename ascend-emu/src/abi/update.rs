//! AttentionUpdate.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::update::UpdateOperator;
use crate::runtime::context;
use crate::status::{Outcome, aclnn};
use ascend_spec::update::Arguments;
use ascend_spec::{OperatorVersion, arguments_of_version, attention_update_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

/// Phase one.
///
/// # Safety
///
/// The pointers are null or valid for writing.
unsafe fn prepare(
    read: impl FnOnce() -> Outcome<Arguments<Described>>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        executor_of(workspace_size, executor, || {
            let arguments = read()?;
            let descs = arguments.map(|_, tensor| tensor.desc);
            let op = UpdateOperator::new(descs, context::machine().target.soc)?;
            Ok((op, arguments))
        })
    }
}

attention_update_arguments! { arguments_of_version {
    1 phase_one { aclnnAttentionUpdateGetWorkspaceSize, Arguments, prepare() }
} }
phase_two!(
    aclnnAttentionUpdate,
    OperatorVersion::AttentionUpdate.symbol()
);
