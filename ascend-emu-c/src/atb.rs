//! `libatb.so`: what PyTorch's extension for Ascend takes from ATB (Ascend Transformer Boost), a library with an ABI of
//! C++.
//!
//! Three operators are emulated, by [`ascend_emu::atb`]: PagedAttention, ReshapeAndCache and SelfAttention. The others
//! that the extension links, and values of parameters that change what an operator computes, are refused by name when
//! an object is to be made.
//!
//! The layouts are those of ATB's public headers (`include/atb/types.h`, `svector.h`, `context.h`, `operation.h` and
//! `infer_op_params.h` of `cann/ascend-transformer-boost`) by the Itanium ABI of C++, as its clients for Linux have it;
//! each offset was compared with the code of three versions of the extension (2.7.1, 2.10, 2.14), which agree.
//! Tables of virtual functions begin with both destructors. Nothing here is thrown, and no client asks for the types of
//! objects, so that the tables have none.

use ascend_emu::atb::{Heads, INVALID_PARAM, Keys, Mask, Operation, Refusal, Tensor, refused};
use std::alloc::{Layout, handle_alloc_error};
use std::ffi::{c_char, c_void};
use std::ptr;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

/// `atb::Status`.
type Status = i32;
const NO_ERROR: Status = 0;
const INVALID_CONTEXT_ADDR: Status = 20;

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
}

fn status_of(outcome: Result<(), Refusal>) -> Status {
    outcome.map_or_else(|refusal| refusal.status, |()| NO_ERROR)
}

/// `atb::Dims`.
#[repr(C)]
struct Dims {
    dims: [i64; 8],
    dim_num: u64,
}

/// `atb::TensorDesc`.
#[repr(C)]
struct TensorDesc {
    dtype: i32,
    format: i32,
    shape: Dims,
}

/// `atb::Tensor`.
#[repr(C)]
struct CTensor {
    desc: TensorDesc,
    device_data: *mut c_void,
    host_data: *mut c_void,
    data_size: u64,
}

/// `atb::SVector`: up to 64 elements in place, more on the heap.
#[repr(C)]
struct SVector<T> {
    capacity: usize,
    size: usize,
    storage: [T; 65],
    heap: *mut T,
}

/// `atb::VariantPack`.
#[repr(C)]
struct VariantPack {
    inputs: SVector<CTensor>,
    outputs: SVector<CTensor>,
}

const _: () = {
    assert!(size_of::<CTensor>() == 0x68);
    assert!(size_of::<SVector<CTensor>>() == 0x1a80);
    assert!(size_of::<VariantPack>() == 0x3500);
};

impl<T> SVector<T> {
    /// The elements.
    ///
    /// # Safety
    ///
    /// The vector is one that a client has made.
    unsafe fn elements(&self) -> &[T] {
        match self.heap.is_null() {
            true => self.storage.get(..self.size).unwrap_or_default(),
            // SAFETY: the client's promise: the memory behind the pointer has as many elements.
            false => unsafe { slice::from_raw_parts(self.heap, self.size) },
        }
    }
}

impl CTensor {
    fn shape(&self) -> &[i64] {
        let rank = usize::try_from(self.desc.shape.dim_num).unwrap_or(usize::MAX);
        self.desc.shape.dims.get(..rank).unwrap_or_default()
    }

    /// The tensor as the emulation takes it.
    ///
    /// # Safety
    ///
    /// The bytes of a tensor on the host may be read.
    unsafe fn given(&self) -> Tensor<'_> {
        const INT32: i32 = 3;
        let elements = self.shape().iter().try_fold(1usize, |all, &size| {
            all.checked_mul(usize::try_from(size).ok()?)
        });
        let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<i32>()));
        let readable = !self.host_data.is_null()
            && self.desc.dtype == INT32
            && self.host_data.cast::<i32>().is_aligned()
            && bytes.is_some_and(|bytes| bytes as u64 <= self.data_size);
        Tensor {
            dtype: self.desc.dtype,
            format: self.desc.format,
            shape: self.shape(),
            address: self.device_data.addr(),
            host: elements.filter(|_| readable).map(|elements| {
                // SAFETY: the client's promise, for a number of elements that its size of the tensor has room for.
                unsafe { slice::from_raw_parts(self.host_data.cast::<i32>(), elements) }
            }),
        }
    }
}

/// `std::string` as GNU's library has it, where the text is longer than 15 bytes.
#[repr(C)]
struct CString {
    text: *mut c_char,
    length: usize,
    capacity: usize,
    unused: usize,
}

impl CString {
    /// A text in memory that the client gives back by `operator delete`, which is `free`.
    fn new(text: &str) -> Self {
        let mut text = text.to_owned();
        // Shorter texts are within the string itself, whose place is not known here.
        while text.len() < 16 {
            text.push(' ');
        }
        let length = text.len();
        // SAFETY: a size of more than 0.
        let memory = unsafe { malloc(length + 1) }.cast::<u8>();
        if memory.is_null() {
            handle_alloc_error(Layout::for_value(text.as_bytes()));
        }
        // SAFETY: the memory has room for the text and the zero behind it.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr(), memory, length);
            memory.add(length).write(0);
        }
        CString {
            text: memory.cast(),
            length,
            capacity: length,
            unused: 0,
        }
    }
}

/// `std::vector<aclrtStream>`.
#[repr(C)]
struct Streams {
    first: *mut *mut c_void,
    end: *mut *mut c_void,
    room: *mut *mut c_void,
}

/// `atb::Context`, of which clients know the table alone.
#[repr(C)]
struct Context {
    table: &'static ContextTable,
    stream: AtomicPtr<c_void>,
}

/// The virtual functions of `atb::Context`. Clients of older releases know the first four beside the destructors.
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

/// A destructor that leaves the memory to the caller.
unsafe extern "C" fn nothing<T>(_: *mut T) {}

unsafe extern "C" fn delete_context(context: *mut Context) {
    // SAFETY: the client gives back an object that `CreateContext` made.
    drop(unsafe { Box::from_raw(context) });
}

unsafe extern "C" fn set_execute_stream(context: *mut Context, stream: *mut c_void) -> Status {
    // SAFETY: the client calls a function of its object.
    unsafe { &*context }.stream.store(stream, Ordering::Relaxed);
    NO_ERROR
}

unsafe extern "C" fn execute_stream(context: *const Context) -> *mut c_void {
    // SAFETY: the client calls a function of its object.
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
    // SAFETY: the client gives a vector of its own.
    let Some(Streams { first, end, .. }) = (unsafe { streams.as_ref() }) else {
        return INVALID_PARAM;
    };
    match end.addr().wrapping_sub(first.addr()) / size_of::<*mut c_void>() {
        // SAFETY: the vector has one stream, and the object is the client's.
        1 => unsafe { set_execute_stream(context, **first) },
        given => {
            let message = format!("streams: given {given} are not emulated; allowed: 1");
            refused("SetExecuteStreams", &message).status
        }
    }
}

unsafe extern "C" fn execute_streams(context: *mut Context) -> Streams {
    // SAFETY: a size of more than 0.
    let memory = unsafe { malloc(size_of::<*mut c_void>()) }.cast::<*mut c_void>();
    let mut end = memory;
    if !memory.is_null() {
        // SAFETY: the memory has room for one stream, and the object is the client's.
        unsafe { memory.write(execute_stream(context)) };
        end = memory.wrapping_add(1);
    }
    Streams {
        first: memory,
        end,
        room: end,
    }
}

unsafe extern "C" fn set_mode(_: *mut Context, mode: i32) -> Status {
    match mode {
        0 => NO_ERROR,
        _ => {
            let message =
                format!("given {mode} is not emulated; allowed: 0 (each operator by itself)");
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
    let made = Box::new(Context {
        table: &CONTEXT,
        stream: AtomicPtr::new(ptr::null_mut()),
    });
    // SAFETY: the client's promise.
    unsafe { context.write(Box::into_raw(made)) };
    NO_ERROR
}

/// `atb::DestroyContext(atb::Context*)`.
///
/// # Safety
///
/// `context` is null, or an object of `CreateContext` that was not given back.
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb14DestroyContextEPNS_7ContextE")]
unsafe extern "C" fn destroy_context(context: *mut Context) -> Status {
    if !context.is_null() {
        // SAFETY: the client's promise.
        unsafe { delete_context(context) };
    }
    NO_ERROR
}

/// `atb::Operation`, of which clients know the table alone.
#[repr(C)]
struct COperation {
    table: &'static OperationTable,
    operation: Operation,
    /// Why the latest set-up was refused.
    refusal: Mutex<Option<String>>,
}

/// The virtual functions of `atb::Operation`.
#[repr(C)]
struct OperationTable {
    destroy: unsafe extern "C" fn(*mut COperation),
    delete: unsafe extern "C" fn(*mut COperation),
    name: unsafe extern "C" fn(*const COperation) -> CString,
    infer_shape: unsafe extern "C" fn(*const COperation, *const c_void, *mut c_void) -> Status,
    input_num: unsafe extern "C" fn(*const COperation) -> u32,
    output_num: unsafe extern "C" fn(*const COperation) -> u32,
    setup:
        unsafe extern "C" fn(*mut COperation, *const VariantPack, *mut u64, *mut Context) -> Status,
    execute: unsafe extern "C" fn(
        *mut COperation,
        *const VariantPack,
        *mut c_void,
        u64,
        *mut Context,
    ) -> Status,
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
    // SAFETY: the client gives back an object that `CreateOperation` made.
    drop(unsafe { Box::from_raw(operation) });
}

/// The operator's name. PyTorch's extension shows it with nothing else when a set-up is refused: then the reason is
/// behind it.
unsafe extern "C" fn name(operation: *const COperation) -> CString {
    // SAFETY: the client calls a function of its object.
    let operation = unsafe { &*operation };
    let refusal = operation.refusal.lock();
    match refusal.as_ref().ok().and_then(|refusal| refusal.as_ref()) {
        Some(refusal) => CString::new(refusal),
        None => CString::new(operation.operation.name()),
    }
}

unsafe extern "C" fn infer_shape(
    operation: *const COperation,
    _: *const c_void,
    _: *mut c_void,
) -> Status {
    // SAFETY: the client calls a function of its object.
    let name = unsafe { &*operation }.operation.name();
    refused(name, "InferShape is not emulated").status
}

unsafe extern "C" fn input_num(operation: *const COperation) -> u32 {
    // SAFETY: the client calls a function of its object.
    unsafe { &*operation }.operation.inputs() as u32
}

unsafe extern "C" fn output_num(operation: *const COperation) -> u32 {
    // SAFETY: the client calls a function of its object.
    unsafe { &*operation }.operation.outputs() as u32
}

/// Calls `body` with the tensors of a call.
///
/// # Safety
///
/// The pack is one that a client has made, whose tensors on the host may be read.
unsafe fn with_tensors<T>(
    pack: &VariantPack,
    body: impl FnOnce(&[Tensor<'_>], &[Tensor<'_>]) -> T,
) -> T {
    // SAFETY: the caller's promise.
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
    // SAFETY: the client calls a function of its object, with a pack of its own.
    let (operation, pack) = unsafe { (&*operation, pack.as_ref()) };
    let Some(pack) = pack.filter(|_| !workspace_size.is_null()) else {
        return INVALID_PARAM;
    };
    if context.is_null() {
        return INVALID_CONTEXT_ADDR;
    }
    // SAFETY: the client's promise.
    let outcome = unsafe {
        with_tensors(pack, |inputs, outputs| {
            operation.operation.setup(inputs, outputs)
        })
    };
    if let Ok(mut refusal) = operation.refusal.lock() {
        *refusal = outcome
            .as_ref()
            .err()
            .map(|refusal| refusal.message.clone());
    }
    status_of(outcome.map(|bytes| {
        // SAFETY: not null, so a number of the client's.
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
    // SAFETY: the client calls a function of its object, with a pack and a context of its own.
    let (operation, pack, context) = unsafe { (&*operation, pack.as_ref(), context.as_ref()) };
    let Some(pack) = pack else {
        return INVALID_PARAM;
    };
    let Some(context) = context else {
        return INVALID_CONTEXT_ADDR;
    };
    let stream = context.stream.load(Ordering::Relaxed);
    let workspace = (workspace, workspace_size);
    let run = |inputs: &[Tensor<'_>], outputs: &[Tensor<'_>]| {
        operation
            .operation
            .execute(inputs, outputs, workspace, stream)
    };
    // SAFETY: the client's promise.
    status_of(unsafe { with_tensors(pack, run) })
}

/// `atb::DestroyOperation(atb::Operation*)`.
///
/// # Safety
///
/// `operation` is null, or an object of `CreateOperation` that was not given back.
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb16DestroyOperationEPNS_9OperationE")]
unsafe extern "C" fn destroy_operation(operation: *mut COperation) -> Status {
    if !operation.is_null() {
        // SAFETY: the client's promise.
        unsafe { delete_operation(operation) };
    }
    NO_ERROR
}

/// `atb::infer::PagedAttentionParam`.
#[repr(C)]
struct PagedAttentionParam {
    head_num: i32,
    qk_scale: f32,
    kv_head_num: i32,
    mask_type: i32,
    batch_run_status_enable: u8,
    quant_type: i32,
    out_data_type: i32,
    has_quant_offset: u8,
    compress_type: i32,
    calc_type: i32,
    scale_type: i32,
    input_layout: i32,
    mla_v_head_size: u32,
    /// Part of what is reserved, in older headers.
    q_scale: f32,
    reserved: [u8; 64],
}

/// `atb::infer::ReshapeAndCacheParam`.
#[repr(C)]
struct ReshapeAndCacheParam {
    compress_type: i32,
    kv_cache_cfg: i32,
    reserved: [u8; 16],
}

/// `atb::infer::SelfAttentionParam`.
#[repr(C)]
struct SelfAttentionParam {
    quant_type: i32,
    out_data_type: i32,
    head_num: i32,
    kv_head_num: i32,
    q_scale: f32,
    qk_scale: f32,
    batch_run_status_enable: u8,
    is_triu_mask: u32,
    calc_type: i32,
    kernel_type: i32,
    clamp_type: i32,
    clamp_min: f32,
    clamp_max: f32,
    mask_type: i32,
    kvcache_cfg: i32,
    scale_type: i32,
    input_layout: i32,
    mla_v_head_size: u32,
    cache_type: i8,
    window_size: u32,
    reserved: [u8; 64],
}

const _: () = {
    assert!(size_of::<PagedAttentionParam>() == 0x78);
    assert!(size_of::<ReshapeAndCacheParam>() == 0x18);
    assert!(size_of::<SelfAttentionParam>() == 0x90);
};

/// Refuses parameters that have another value than one that is emulated.
fn only<const N: usize>(
    name: &'static str,
    given: [(&str, i64, &[i64]); N],
) -> Result<(), Refusal> {
    let mut wrong = given.into_iter();
    match wrong.find(|(_, value, allowed)| !allowed.contains(value)) {
        None => Ok(()),
        Some((parameter, value, allowed)) => {
            let message =
                format!("{parameter}: given {value} is not emulated; allowed: {allowed:?}");
            Err(refused(name, &message))
        }
    }
}

/// Writes an object of an operation.
///
/// # Safety
///
/// `operation` is null or valid for writing.
unsafe fn make(outcome: Result<Operation, Refusal>, operation: *mut *mut COperation) -> Status {
    if operation.is_null() {
        return INVALID_PARAM;
    }
    status_of(outcome.map(|made| {
        let made = Box::new(COperation {
            table: &OPERATION,
            operation: made,
            refusal: Mutex::new(None),
        });
        // SAFETY: the caller's promise.
        unsafe { operation.write(Box::into_raw(made)) };
    }))
}

fn paged_attention(param: &PagedAttentionParam) -> Result<Operation, Refusal> {
    let operation = Operation::PagedAttention(Heads {
        query: param.head_num,
        key: param.kv_head_num,
        scale: param.qk_scale,
    });
    only(
        operation.name(),
        [
            ("maskType", param.mask_type.into(), &[0]),
            (
                "batchRunStatusEnable",
                param.batch_run_status_enable.into(),
                &[0],
            ),
            ("quantType", param.quant_type.into(), &[0]),
            ("compressType", param.compress_type.into(), &[0]),
            ("calcType", param.calc_type.into(), &[0]),
            ("scaleType", param.scale_type.into(), &[0]),
            ("inputLayout", param.input_layout.into(), &[0]),
            ("mlaVHeadSize", param.mla_v_head_size.into(), &[0]),
        ],
    )?;
    if param.q_scale != 0.0 && param.q_scale != 1.0 {
        let message = format!(
            "qScale: given {} is not emulated; allowed: 0 and 1",
            param.q_scale
        );
        return Err(refused(operation.name(), &message));
    }
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::PagedAttentionParam>`.
///
/// # Safety
///
/// `param` is a reference, and `operation` null or valid for writing.
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_paged_attention(
    param: *const PagedAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(paged_attention(&*param), operation) }
}

fn reshape_and_cache(param: &ReshapeAndCacheParam) -> Result<Operation, Refusal> {
    let operation = Operation::ReshapeAndCache {
        keys_alone: param.kv_cache_cfg == 1,
        nz: param.kv_cache_cfg == 2,
    };
    only(
        operation.name(),
        [
            ("compressType", param.compress_type.into(), &[0]),
            ("kvCacheCfg", param.kv_cache_cfg.into(), &[0, 1, 2]),
        ],
    )?;
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::ReshapeAndCacheParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_reshape_and_cache(
    param: *const ReshapeAndCacheParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(reshape_and_cache(&*param), operation) }
}

fn self_attention(param: &SelfAttentionParam) -> Result<Operation, Refusal> {
    const PREFIX_ENCODER: i32 = 4;
    const MASK_NORM: i32 = 1;
    const MASK_NORM_COMPRESS: i32 = 3;
    let keys = match param.calc_type {
        PREFIX_ENCODER => Keys::Cached,
        _ => Keys::Packed,
    };
    let operation = Operation::SelfAttention {
        heads: Heads {
            query: param.head_num,
            key: param.kv_head_num,
            scale: param.qk_scale,
        },
        keys,
        mask: match param.mask_type {
            MASK_NORM => Mask::Full {
                triangle: param.is_triu_mask == 1,
            },
            MASK_NORM_COMPRESS => Mask::Triangle,
            _ => Mask::None,
        },
        precise: param.kernel_type == 1,
    };
    let masks: &[i64] = match keys {
        Keys::Packed => &[0, 1, 3],
        Keys::Cached => &[3],
    };
    only(
        operation.name(),
        [
            ("calcType", param.calc_type.into(), &[3, 4]),
            ("quantType", param.quant_type.into(), &[0]),
            (
                "batchRunStatusEnable",
                param.batch_run_status_enable.into(),
                &[0],
            ),
            ("kernelType", param.kernel_type.into(), &[0, 1]),
            ("isTriuMask", param.is_triu_mask.into(), &[0, 1]),
            ("clampType", param.clamp_type.into(), &[0]),
            ("maskType", param.mask_type.into(), masks),
            ("kvcacheCfg", param.kvcache_cfg.into(), &[0]),
            ("scaleType", param.scale_type.into(), &[0]),
            ("inputLayout", param.input_layout.into(), &[0]),
            ("mlaVHeadSize", param.mla_v_head_size.into(), &[0]),
            ("cacheType", param.cache_type.into(), &[0]),
            ("windowSize", param.window_size.into(), &[0]),
        ],
    )?;
    if param.q_scale != 1.0 {
        let message = format!(
            "qScale: given {} is not emulated; allowed: 1",
            param.q_scale
        );
        return Err(refused(operation.name(), &message));
    }
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::SelfAttentionParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_self_attention(
    param: *const SelfAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(self_attention(&*param), operation) }
}

macro_rules! not_emulated {
    ($($symbol:literal $function:ident $name:literal;)*) => {$(
        /// `atb::CreateOperation` of an operator that is not emulated.
        // SAFETY: as for `CreateContext`.
        #[unsafe(export_name = $symbol)]
        extern "C" fn $function(_: *const c_void, _: *mut *mut c_void) -> Status {
            refused($name, "the operator is not emulated").status
        }
    )*};
}

not_emulated! {
    "_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE" create_linear "LinearOperation";
    "_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE" create_elewise "ElewiseOperation";
    "_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE" create_rms_norm "RmsNormOperation";
    "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE" create_group_topk
        "GroupTopkOperation";
    "_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE" create_rope "RopeOperation";
}

/// `atb::Utils::GetTensorSize(atb::Tensor const&)`: the bytes of a tensor; 0 for one without axes.
///
/// # Safety
///
/// `tensor` is a reference.
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE")]
unsafe extern "C" fn tensor_size(tensor: *const CTensor) -> u64 {
    // SAFETY: the caller's promise.
    let tensor = unsafe { &*tensor };
    let bytes = ascend_emu::atb::element_bytes(tensor.desc.dtype);
    let elements = tensor.shape().iter().try_fold(1u64, |all, &size| {
        all.checked_mul(u64::try_from(size).ok()?)
    });
    match (tensor.shape(), elements) {
        ([], _) | (_, None) => 0,
        (_, Some(elements)) => elements.saturating_mul(bytes),
    }
}
