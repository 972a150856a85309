//! Phase one of an operator: from the arguments of a call to its executor.

use super::bounds::refuse_beyond_tensors;
use super::declared::{DeclaredOperator, ParameterOf};
use crate::c_pointer::not_null_or;
use crate::descriptor::Described;
use crate::executor::{Executor, refused};
use crate::operator::{Addresses, Operator};
use crate::status::{ACLNN_NULLPTR, Failure, Outcome};
use ascend_spec::operator::ArgumentList;
use ascend_sys::bindings::aclOpExecutor;
use std::sync::Arc;

/// Device workspace of a call that computes something: the amount that operators use as system workspace.
const WORKSPACE_BYTES: u64 = 16 << 20;

/// The end of every phase one. Writes an executor of the operator that `make` checks and prepares, with the addresses
/// of its tensors, and the bytes of workspace that it needs: none if there is nothing to compute.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(crate) unsafe fn phase_one<O: Operator + 'static>(
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
    make: impl FnOnce() -> Outcome<(O, Addresses, bool)>,
) -> Outcome {
    not_null_or(ACLNN_NULLPTR, "workspaceSize", workspace_size)?;
    not_null_or(ACLNN_NULLPTR, "executor", executor)?;
    let (op, addresses, idle) = make().inspect_err(refused)?;
    let bytes = if idle { 0 } else { WORKSPACE_BYTES };
    let id = Executor::create(Arc::new(op), addresses, bytes);
    // SAFETY: not null, so valid for writing.
    unsafe {
        workspace_size.write_unaligned(bytes);
        executor.write_unaligned(id.raw());
    }
    Ok(())
}

/// Phase one of a declared operator. Writes the executor of the call that `new` checks and prepares from the
/// arguments that `read` returns.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(crate) unsafe fn executor_of<O, A, E>(
    new: impl FnOnce(&A) -> Result<O, E>,
    read: impl FnOnce() -> Outcome<A>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome
where
    O: DeclaredOperator + 'static,
    A: ArgumentList<Parameter = ParameterOf<O>, Tensor = Described>,
    Failure: From<E>,
{
    // SAFETY: the caller's promise.
    unsafe {
        phase_one(workspace_size, executor, || {
            let arguments = read()?;
            let op = new(&arguments)?;
            refuse_beyond_tensors(&op)?;
            let idle = op.is_idle();
            Ok((op, Addresses::of(&arguments), idle))
        })
    }
}
