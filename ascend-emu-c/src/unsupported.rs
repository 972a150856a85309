//! Functions of CANN that clients link and that are not emulated.
//!
//! A client with these names among its undefined symbols cannot be loaded without them. Each takes whatever it is
//! given and touches none of it. One that returns something says by that and by `aclGetRecentErrMsg` that there is no
//! such function here; one that returns nothing does nothing; `aclSetCompileopt` accepts settings that
//! change nothing. A function that clients only look up is not in this list, since to them a missing name means
//! an older CANN, and they go another way; but for operators whose lack they report as a CANN that is to be updated.

use ascend_emu::{not_emulated, refused};
use ascend_sys::bindings::{
    ACL_ERROR_FEATURE_UNSUPPORTED, ACL_ERROR_RT_FEATURE_NOT_SUPPORT, ACLNN_ERR_RUNTIME_ERROR, HcclResult,
};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// Makes a C function of each name, whose result is the expression behind the list.
///
/// They are declared without parameters: the calling conventions of the platforms that CANN exists for leave the
/// clearing of arguments to the caller.
macro_rules! answered {
    ($( $result:ty = $answer:expr => $( $name:ident )*; )*) => {
        $($(
            /// A function of CANN that is not emulated.
            // SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            pub extern "C" fn $name() -> $result {
                let answer: fn(&'static str) -> $result = $answer;
                answer(stringify!($name))
            }
        )*)*
    };
}

fn feature(name: &'static str) -> i32 {
    not_emulated(name, ACL_ERROR_FEATURE_UNSUPPORTED)
}

fn hccl(name: &'static str) -> u32 {
    not_emulated(name, HcclResult::HCCL_E_NOT_SUPPORT.0 as i32).unsigned_abs()
}

fn runtime(name: &'static str) -> i32 {
    not_emulated(name, ACL_ERROR_RT_FEATURE_NOT_SUPPORT)
}

/// Refuses a phase of an operator by the operator's name.
fn operator(name: &'static str) -> i32 {
    let operator = name.trim_end_matches("GetWorkspaceSize");
    refused(name, ACLNN_ERR_RUNTIME_ERROR, format_args!("the operator {operator} is not emulated"))
}

/// Refuses a call of an operator that is not emulated. The library that `xtask absent` makes for a client has the
/// operators that the client links and that are missing here, and each of them calls this.
///
/// # Safety
///
/// `operator` is null or leads to a text that ends with a zero.
// SAFETY: the name is this library's own, and no other crate in it defines it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ascend_emu_not_emulated(operator: *const c_char) -> i32 {
    let name = "ascend_emu_not_emulated";
    if operator.is_null() {
        return not_emulated(name, ACLNN_ERR_RUNTIME_ERROR);
    }
    // SAFETY: the caller's promise.
    let operator = unsafe { CStr::from_ptr(operator) }.to_string_lossy();
    let message = format_args!("not emulated: {operator}");
    refused(name, ACLNN_ERR_RUNTIME_ERROR, message)
}

thread_local! {
    /// The operator whose functions the client last looked for in vain on this thread.
    static MISSING: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Whether an operator is a newer version of one that is there, which clients call in its place.
#[cfg(feature = "glue")]
fn has_older_version(operator: &str) -> bool {
    let unnumbered = operator.trim_end_matches(|c: char| c.is_ascii_digit());
    let older = unnumbered.strip_suffix('V');
    older.is_some_and(|older| ascend_emu::glue::OPERATORS.contains(&older))
}

#[cfg(not(feature = "glue"))]
fn has_older_version(_operator: &str) -> bool {
    false
}

/// Writes to the log of CANN's own libraries, which is not kept. Clients look operators up by `dlsym`, and say here
/// alone which they did not find: that name is remembered for the refusal of what they do instead.
///
/// C declares the function with a format and any number of arguments behind it. The platforms that CANN exists for
/// pass the first of these as they pass a sixth parameter.
///
/// # Safety
///
/// `format` is null or a text that ends with a zero, and so is `first` if the format begins with a text of a missing
/// operator.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is that of the C function")]
pub unsafe extern "C" fn aclAppLog(
    _level: i32,
    _function: *const c_char,
    _file: *const c_char,
    _line: u32,
    format: *const c_char,
    first: *const c_char,
) {
    if format.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let format = unsafe { CStr::from_ptr(format) }.to_bytes();
    if !format.starts_with(b"[PTA]:%s or %sGetWorkspaceSize not in ") || first.is_null() {
        return;
    }
    // SAFETY: the caller's promise: the format begins with a text, which is its first argument.
    let operator = unsafe { CStr::from_ptr(first) }.to_string_lossy();
    if has_older_version(&operator) {
        return;
    }
    let operator = operator.into_owned();
    // A thread that ends has no refusal to come.
    let _ = MISSING.try_with(|missing| missing.replace(Some(operator)));
}

#[cfg(feature = "glue")]
use ascend_emu::glue::by_name::may_run;

#[cfg(not(feature = "glue"))]
fn may_run() -> Result<(), &'static str> {
    Err("an operator that is compiled by its name, since it has no aclnn function here, is not emulated")
}

/// `ACL_OP_JIT_COMPILE` of `aclCompileOpt`: whether operators are compiled when they are called.
const JIT_COMPILE: i32 = 10;

/// Sets an option of the compiler of operators, which is not there. Clients set most of them before they know whether
/// they need it, and this one when they are about to run an operator by its name: here they hear of it while the
/// caller waits, unless the operator may be the one that is emulated.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is that of the C function")]
pub extern "C" fn aclSetCompileopt(option: i32, _value: *const c_char) -> i32 {
    if option == JIT_COMPILE {
        let name = "aclSetCompileopt";
        // Both are of this operator alone.
        let (missing, runs) = (MISSING.try_with(RefCell::take).ok().flatten(), may_run());
        let message = match (missing, runs) {
            (Some(operator), _) => format!("the operator {operator} is not emulated"),
            (None, Err(why)) => why.to_owned(),
            (None, Ok(())) => return 0,
        };
        let message = format_args!("{name}: {message}");
        return refused(name, ACL_ERROR_FEATURE_UNSUPPORTED, message);
    }
    0
}

fn null(name: &'static str) -> *mut c_void {
    feature(name);
    ptr::null_mut()
}

fn zero(name: &'static str) -> usize {
    feature(name);
    0
}

#[cfg(not(feature = "glue"))]
answered! {
    *mut c_void = null => aclCreateDataBuffer aclCreateTensorDesc;
    () = |_| () => aclDestroyTensorDesc;
    i32 = feature => aclDestroyDataBuffer aclGetTensorDescDimV2 aclGetTensorDescFormat aclGetTensorDescType
        aclSetTensorFormat aclSetTensorPlaceMent aclSetTensorShape aclopCompileAndExecute;
    usize = zero => aclGetTensorDescNumDims;
}

answered! {
    // Operators by name, which the compiler of graphs would have to make.
    i32 = feature => aclopSetAttrBool aclopSetAttrDataType aclopSetAttrFloat aclopSetAttrInt
        aclopSetAttrListBool aclopSetAttrListFloat aclopSetAttrListInt aclopSetAttrListListInt aclopSetAttrString;
    *mut c_void = null => aclopCreateAttr;
    () = |_| () => aclopDestroyAttr aclSetTensorDescName;
    // Operators of models around attention whose newest versions PyTorch's extension looks up to choose a way.
    i32 = operator => aclnnGroupedMatmulV4 aclnnGroupedMatmulV4GetWorkspaceSize
        aclnnMoeFinalizeRoutingV2 aclnnMoeFinalizeRoutingV2GetWorkspaceSize
        aclnnQuantMatmulV5 aclnnQuantMatmulV5GetWorkspaceSize;
    // Dumps of tensors.
    i32 = feature => aclmdlFinalizeDump aclmdlInitDump aclmdlSetDump aclopStartDumpArgs aclopStopDumpArgs;
    // Memory of other processes.
    i32 = feature => aclrtMemExportToShareableHandle aclrtMemImportFromShareableHandle aclrtMemSetPidToShareableHandle;
    // Kernels of the client's own.
    i32 = feature => aclrtBinaryGetFunction aclrtBinaryLoadFromData aclrtGetFunctionAddr;
    i32 = runtime => rtDevBinaryRegister rtFunctionRegister rtGetC2cCtrlAddr rtKernelLaunch;
    // Queues of tensors between host and device.
    i32 = feature => acltdtDestroyChannel acltdtDestroyDataset acltdtGetDataTypeFromItem acltdtGetDimsFromItem
        acltdtReceiveTensor;
    *mut c_void = null => acltdtCreateChannelWithCapacity acltdtCreateDataset acltdtGetDataAddrFromItem
        acltdtGetDataItem;
    usize = zero => acltdtGetDataSizeFromItem acltdtGetDatasetSize acltdtGetDimNumFromItem;
    // Communicators of rank tables, their suspension, and memory that they share over devices.
    u32 = hccl => HcclCommActivateCommMemory HcclCommDeactivateCommMemory HcclCommInitClusterInfo
        HcclCommInitClusterInfoConfig HcclCommResume HcclCommSetMemoryRange HcclCommSuspend HcclCommUnsetMemoryRange;
    // The profiler as programs start it.
    *mut c_void = null => aclprofCreateConfig;
    i32 = feature => aclprofDestroyConfig aclprofFinalize aclprofInit aclprofStart aclprofStop;
    // The profiler: none is ever attached, so that nothing is reported.
    i32 = runtime => MsprofReportAdditionalInfo MsprofReportApi MsprofReportCompactInfo MsprofRegisterCallback;
    usize = zero => MsprofGetHashId MsprofSysCycleTime;
}
