//! `atb::Context`: the stream that operators are queued in.

use super::{NO_ERROR, Status, malloc, nothing};
use ascend_emu::atb::{INVALID_PARAM, refused};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `std::vector<aclrtStream>`.
#[repr(C)]
struct Streams {
    first: *mut *mut c_void,
    end: *mut *mut c_void,
    room: *mut *mut c_void,
}

/// `atb::Context`, of which clients know the table alone.
#[repr(C)]
pub(super) struct Context {
    table: &'static ContextTable,
    pub(super) stream: AtomicPtr<c_void>,
}

/// The virtual functions of `atb::Context`, whose first argument is the object that has this table. Clients of older
/// releases know the first four beside the destructors.
#[repr(C)]
struct ContextTable {
    destroy: unsafe extern "C" fn(*mut Context),
    delete: unsafe extern "C" fn(*mut Context),
    set_execute_stream: unsafe extern "C" fn(*mut Context, *mut c_void) -> Status,
    execute_stream: unsafe extern "C" fn(*const Context) -> *mut c_void,
    set_async_tiling_copy_status: unsafe extern "C" fn(*mut Context, bool) -> Status,
    async_tiling_copy_status: unsafe extern "C" fn(*const Context) -> bool,
    set_execute_streams: unsafe extern "C" fn(*mut Context, *const Streams) -> Status,
    execute_streams: unsafe extern "C" fn(*mut Context) -> Streams,
    set_execute_type: unsafe extern "C" fn(*mut Context, i32) -> Status,
    execute_type: unsafe extern "C" fn(*mut Context) -> i32,
    set_launch_mode: unsafe extern "C" fn(*mut Context, i32) -> Status,
    launch_mode: unsafe extern "C" fn(*mut Context) -> i32,
}

static CONTEXT: ContextTable = ContextTable {
    destroy: nothing,
    delete: delete_context,
    set_execute_stream,
    execute_stream,
    set_async_tiling_copy_status,
    async_tiling_copy_status,
    set_execute_streams,
    execute_streams,
    set_execute_type: set_mode,
    execute_type: mode,
    set_launch_mode: set_mode,
    launch_mode: mode,
};

unsafe extern "C" fn delete_context(context: *mut Context) {
    // SAFETY: the client gives back, once, an object that `CreateContext` made by `Box`; it does not use
    // it afterwards.
    drop(unsafe { Box::from_raw(context) });
}

unsafe extern "C" fn set_execute_stream(context: *mut Context, stream: *mut c_void) -> Status {
    // SAFETY: the client calls a function of the table of a context that `CreateContext` made and that it has not given
    // back; what changes in it is atomic.
    unsafe { &*context }.stream.store(stream, Ordering::Relaxed);
    NO_ERROR
}

unsafe extern "C" fn execute_stream(context: *const Context) -> *mut c_void {
    // SAFETY: the client calls a function of the table of a context that `CreateContext` made and that it has not given
    // back; what changes in it is atomic.
    unsafe { &*context }.stream.load(Ordering::Relaxed)
}

/// Where sizes for the device are copied makes no difference: there are none.
unsafe extern "C" fn set_async_tiling_copy_status(_: *mut Context, _: bool) -> Status {
    NO_ERROR
}

unsafe extern "C" fn async_tiling_copy_status(_: *const Context) -> bool {
    false
}

unsafe extern "C" fn set_execute_streams(context: *mut Context, streams: *const Streams) -> Status {
    // SAFETY: the reference of the C++ function is a whole `std::vector`, which does not change during the call.
    let Some(Streams { first, end, .. }) = (unsafe { streams.as_ref() }) else {
        return INVALID_PARAM;
    };
    match end.addr().wrapping_sub(first.addr()) / size_of::<*mut c_void>() {
        // SAFETY: the elements between both pointers of a vector may be read, and there is one; the object is the one
        // whose table the client took this function from.
        1 => unsafe { set_execute_stream(context, **first) },
        given => {
            let message = format!("streams: given {given} are not emulated; allowed: 1");
            refused("SetExecuteStreams", &message).status
        }
    }
}

unsafe extern "C" fn execute_streams(context: *mut Context) -> Streams {
    // SAFETY: `malloc` may be called with any size.
    let memory = unsafe { malloc(size_of::<*mut c_void>()) }.cast::<*mut c_void>();
    let mut end = memory;
    if !memory.is_null() {
        // SAFETY: `malloc` gave room for one pointer, aligned for every type; the object is the one whose table the
        // client took this function from.
        unsafe { memory.write(execute_stream(context)) };
        end = memory.wrapping_add(1);
    }
    Streams { first: memory, end, room: end }
}

unsafe extern "C" fn set_mode(_: *mut Context, mode: i32) -> Status {
    match mode {
        0 => NO_ERROR,
        _ => {
            let message = format!("given {mode} is not emulated; allowed: 0 (each operator by itself)");
            refused("SetExecuteType and SetLaunchMode", &message).status
        }
    }
}

unsafe extern "C" fn mode(_: *mut Context) -> i32 {
    0
}

/// `atb::CreateContext(atb::Context**)`.
///
/// # Safety
///
/// `context` is null or valid for writing.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb13CreateContextEPPNS_7ContextE")]
unsafe extern "C" fn create_context(context: *mut *mut Context) -> Status {
    if context.is_null() {
        return INVALID_PARAM;
    }
    let made = Box::new(Context { table: &CONTEXT, stream: AtomicPtr::new(ptr::null_mut()) });
    // SAFETY: the caller promises that a pointer that is not null is valid for writing.
    unsafe { context.write(Box::into_raw(made)) };
    NO_ERROR
}

/// `atb::DestroyContext(atb::Context*)`.
///
/// # Safety
///
/// `context` is null, or an object of `CreateContext` that was not given back.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb14DestroyContextEPNS_7ContextE")]
unsafe extern "C" fn destroy_context(context: *mut Context) -> Status {
    if !context.is_null() {
        // SAFETY: the caller promises an object of `CreateContext` that was not given back.
        unsafe { delete_context(context) };
    }
    NO_ERROR
}
