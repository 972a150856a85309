//! `atb::Operation`: an operator with its parameters.

use super::context::Context;
use super::layout::{CString, VariantPack};
use super::{NO_ERROR, Status, nothing, status_of};
use ascend_emu::atb::{INVALID_PARAM, Operation, Refusal, Tensor, refused};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// `ERROR_INVALID_CONTEXT_ADDR`.
const INVALID_CONTEXT_ADDR: Status = 20;

/// `atb::Operation`, of which clients know the table alone.
#[repr(C)]
pub(super) struct COperation {
    table: &'static OperationTable,
    operation: Operation,
    /// Why the latest set-up was refused.
    refusal: Mutex<Option<String>>,
}

/// The virtual functions of `atb::Operation`, whose first argument is the object that has this table.
#[repr(C)]
struct OperationTable {
    destroy: unsafe extern "C" fn(*mut COperation),
    delete: unsafe extern "C" fn(*mut COperation),
    name: unsafe extern "C" fn(*const COperation) -> CString,
    infer_shape: unsafe extern "C" fn(*const COperation, *const c_void, *mut c_void) -> Status,
    input_num: unsafe extern "C" fn(*const COperation) -> u32,
    output_num: unsafe extern "C" fn(*const COperation) -> u32,
    setup: unsafe extern "C" fn(*mut COperation, *const VariantPack, *mut u64, *mut Context) -> Status,
    execute: unsafe extern "C" fn(*mut COperation, *const VariantPack, *mut c_void, u64, *mut Context) -> Status,
}

static OPERATION: OperationTable = OperationTable {
    destroy: nothing,
    delete: delete_operation,
    name,
    infer_shape,
    input_num,
    output_num,
    setup,
    execute,
};

unsafe extern "C" fn delete_operation(operation: *mut COperation) {
    // SAFETY: the client gives back, once, an object that `CreateOperation` made by `Box`; it does not use it
    // afterwards.
    drop(unsafe { Box::from_raw(operation) });
}

/// The operator's name. PyTorch's extension shows it with nothing else when a set-up is refused: then the reason is
/// behind it.
unsafe extern "C" fn name(operation: *const COperation) -> CString {
    // SAFETY: the client calls a function of the table of an operation that `CreateOperation` made and that it has not
    // given back; what changes in it is behind a lock.
    let operation = unsafe { &*operation };
    let refusal = operation.refusal.lock();
    match refusal.as_ref().ok().and_then(|refusal| refusal.as_ref()) {
        Some(refusal) => CString::new(refusal),
        None => CString::new(operation.operation.name()),
    }
}

unsafe extern "C" fn infer_shape(operation: *const COperation, _: *const c_void, _: *mut c_void) -> Status {
    // SAFETY: the client calls a function of the table of an operation that `CreateOperation` made and that it has not
    // given back; what changes in it is behind a lock.
    let name = unsafe { &*operation }.operation.name();
    refused(name, "InferShape is not emulated").status
}

unsafe extern "C" fn input_num(operation: *const COperation) -> u32 {
    // SAFETY: the client calls a function of the table of an operation that `CreateOperation` made and that it has not
    // given back; what changes in it is behind a lock.
    unsafe { &*operation }.operation.inputs() as u32
}

unsafe extern "C" fn output_num(operation: *const COperation) -> u32 {
    // SAFETY: the client calls a function of the table of an operation that `CreateOperation` made and that it has not
    // given back; what changes in it is behind a lock.
    unsafe { &*operation }.operation.outputs() as u32
}

/// Calls `body` with the tensors of a call.
///
/// # Safety
///
/// The pack is one that a client has made, whose tensors on the host may be read.
unsafe fn with_tensors<T>(pack: &VariantPack, body: impl FnOnce(&[Tensor<'_>], &[Tensor<'_>]) -> T) -> T {
    // SAFETY: the caller promises a pack that a client has made, whose vectors have their elements, and tensors on the
    // host that may be read for as long as `pack` is borrowed.
    let [inputs, outputs] = [&pack.inputs, &pack.outputs].map(|tensors| unsafe {
        let tensors = tensors.elements().iter();
        tensors.map(|tensor| tensor.given()).collect::<Vec<_>>()
    });
    body(&inputs, &outputs)
}

unsafe extern "C" fn setup(
    operation: *mut COperation,
    pack: *const VariantPack,
    workspace_size: *mut u64,
    context: *mut Context,
) -> Status {
    // SAFETY: as for `name`; the pack, a reference of the C++ function, is whole, and does not change during the
    // call.
    let (operation, pack) = unsafe { (&*operation, pack.as_ref()) };
    let Some(pack) = pack.filter(|_| !workspace_size.is_null()) else {
        return INVALID_PARAM;
    };
    if context.is_null() {
        return INVALID_CONTEXT_ADDR;
    }
    // SAFETY: the client has made the pack, and `hostData` of its tensors has `dataSize` bytes until the call returns.
    let outcome = unsafe { with_tensors(pack, |inputs, outputs| operation.operation.setup(inputs, outputs)) };
    if let Ok(mut refusal) = operation.refusal.lock() {
        *refusal = outcome.as_ref().err().map(|refusal| refusal.message.clone());
    }
    status_of(outcome.map(|bytes| {
        // SAFETY: a reference of the C++ function, valid for writing; it was found not to be null.
        unsafe { workspace_size.write(bytes) }
    }))
}

unsafe extern "C" fn execute(
    operation: *mut COperation,
    pack: *const VariantPack,
    workspace: *mut c_void,
    workspace_size: u64,
    context: *mut Context,
) -> Status {
    // SAFETY: as for `setup`; the context is null or one that `CreateContext` made and that is not given back.
    let (operation, pack, context) = unsafe { (&*operation, pack.as_ref(), context.as_ref()) };
    let Some(pack) = pack else {
        return INVALID_PARAM;
    };
    let Some(context) = context else {
        return INVALID_CONTEXT_ADDR;
    };
    let stream = context.stream.load(Ordering::Relaxed);
    let workspace = (workspace, workspace_size);
    let run =
        |inputs: &[Tensor<'_>], outputs: &[Tensor<'_>]| operation.operation.execute(inputs, outputs, workspace, stream);
    // SAFETY: the client has made the pack, and `hostData` of its tensors has `dataSize` bytes until the call returns.
    status_of(unsafe { with_tensors(pack, run) })
}

/// `atb::DestroyOperation(atb::Operation*)`.
///
/// # Safety
///
/// `operation` is null, or an object of `CreateOperation` that was not given back.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb16DestroyOperationEPNS_9OperationE")]
unsafe extern "C" fn destroy_operation(operation: *mut COperation) -> Status {
    if !operation.is_null() {
        // SAFETY: the caller promises an object of `CreateOperation` that was not given back.
        unsafe { delete_operation(operation) };
    }
    NO_ERROR
}

/// Writes an object of an operation.
///
/// # Safety
///
/// `operation` is null or valid for writing.
pub(super) unsafe fn make(outcome: Result<Operation, Refusal>, operation: *mut *mut COperation) -> Status {
    if operation.is_null() {
        return INVALID_PARAM;
    }
    status_of(outcome.map(|made| {
        let made = Box::new(COperation { table: &OPERATION, operation: made, refusal: Mutex::new(None) });
        // SAFETY: not null, so valid for writing, as the caller promises.
        unsafe { operation.write(Box::into_raw(made)) };
    }))
}
