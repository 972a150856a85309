//! Communicators (HCCL).

use crate::c_pointer::not_null_or;
use crate::collectives::{self, COMMUNICATORS, ROOT_INFO, Settings, SplitRequest};
use crate::runtime::context::{self, current};
use crate::status::{HCCL_NOT_SUPPORTED, HCCL_PARA, HCCL_PTR, Outcome, failure, hccl};
use ascend_spec::{Cann, Soc};
use ascend_sys::bindings::{
    self as sys, HcclComm, HcclCommConfig, HcclCommConfigInfo, HcclCommConfigV11, HcclConfig, HcclConfigValue,
    HcclResult, HcclRootInfo,
};
use std::ffi::{CStr, c_char};
use std::mem::offset_of;
use std::slice;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// Refuses a null pointer.
pub(super) fn not_null<T>(name: &str, pointer: *const T) -> Outcome {
    not_null_or(HCCL_PTR, name, pointer)
}

/// Writes a result.
///
/// # Safety
///
/// `to` is null or valid for writing one value.
unsafe fn store<T>(name: &str, to: *mut T, value: T) -> Outcome {
    not_null(name, to)?;
    // SAFETY: not null, so valid for writing. Callers in C may give it any alignment.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

pub unsafe extern "C" fn HcclGetRootInfo(rootInfo: *mut HcclRootInfo) -> HcclResult {
    hccl(|| {
        not_null("rootInfo", rootInfo)?;
        current()?;
        let bytes = collectives::root_info();
        // SAFETY: not null, so valid for writing the bytes of root information, which these are.
        unsafe { rootInfo.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(ROOT_INFO)) };
        Ok(())
    })
}

/// Joins a communicator on the calling thread's device.
///
/// # Safety
///
/// The pointers are null or valid: `info` for reading, `comm` for writing.
unsafe fn join(
    name: &str,
    (size, rank): (u32, u32),
    info: *const HcclRootInfo,
    settings: Settings,
    comm: *mut HcclComm,
) -> Outcome {
    not_null("rootInfo", info)?;
    not_null("comm", comm)?;
    let device = current()?.device;
    // SAFETY: not null, so valid for reading.
    let info = unsafe { slice::from_raw_parts(info.cast::<u8>(), ROOT_INFO) };
    let id = collectives::join(name, (size, rank), info, device, settings)?;
    // SAFETY: the caller's promise.
    unsafe { store("comm", comm, id.raw()) }
}

pub unsafe extern "C" fn HcclCommInitRootInfo(
    nRanks: u32,
    rootInfo: *const HcclRootInfo,
    rank: u32,
    comm: *mut HcclComm,
) -> HcclResult {
    // SAFETY: the caller's promise.
    hccl(|| unsafe { join("HcclCommInitRootInfo", (nRanks, rank), rootInfo, Settings::default(), comm) })
}

pub unsafe extern "C" fn HcclCommInitRootInfoConfig(
    nRanks: u32,
    rootInfo: *const HcclRootInfo,
    rank: u32,
    config: *const HcclCommConfig,
    comm: *mut HcclComm,
) -> HcclResult {
    const NAME: &str = "HcclCommInitRootInfoConfig";
    hccl(|| {
        // SAFETY: the caller's promise.
        let settings = unsafe { settings(NAME, config) }?;
        // SAFETY: the caller's promise.
        unsafe { join(NAME, (nRanks, rank), rootInfo, settings, comm) }
    })
}

/// Reads what the emulation heeds of a configuration, in either layout: the size and version in its head say which
/// fields there are.
///
/// # Safety
///
/// `config` is null or valid for reading as many bytes as its head says.
unsafe fn settings(name: &str, config: *const HcclCommConfig) -> Outcome<Settings> {
    not_null("config", config)?;
    // SAFETY: not null, so valid for reading the head.
    let head = unsafe { config.cast::<HcclCommConfigInfo>().read_unaligned() };
    if head.magicWord != sys::HCCL_COMM_CONFIG_MAGIC_WORD {
        return Err(failure!(HCCL_PARA, "{name}: config was not filled in by HcclCommConfigInit"));
    }
    /// The value of a field, in configurations of this version or a newer one that are long enough to have it.
    macro_rules! field {
        ($type:ident . $field:ident, $version:expr) => {{
            let (start, field) = (offset_of!($type, $field), config.cast::<$type>());
            // SAFETY: the pointer is not followed.
            let field = unsafe { &raw const (*field).$field };
            // The size of what the pointer leads to.
            fn size<T>(_: *const T) -> usize {
                size_of::<T>()
            }
            let there = head.version >= $version && head.configSize >= start + size(field);
            // SAFETY: the head says that the configuration is as long.
            there.then(|| unsafe { field.read_unaligned() })
        }};
    }
    let chosen = field!(HcclCommConfig.hcclCommName, 2);
    let bytes: Vec<u8> = chosen.iter().flatten().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
    let name = (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned());
    let seconds = field!(HcclCommConfigV11.hcclExecTimeOut, sys::HCCL_COMM_CONFIG_VERSION_V11);
    let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
    Ok(Settings { name, limit: seconds.map(Duration::from_secs) })
}

pub unsafe extern "C" fn HcclCommInitAll(ndev: u32, devices: *mut i32, comms: *mut HcclComm) -> HcclResult {
    const NAME: &str = "HcclCommInitAll";
    hccl(|| {
        not_null("devices", devices)?;
        not_null("comms", comms)?;
        collectives::check_size(NAME, ndev, 0)?;
        // SAFETY: not null, so valid for reading as many.
        let devices: Vec<i32> = (0..ndev as usize).map(|at| unsafe { devices.add(at).read_unaligned() }).collect();
        for &device in &devices {
            context::known_device(device).map_err(|refusal| failure!(HCCL_PARA, "{NAME}: {}", refusal.message))?;
        }
        for (at, id) in collectives::all(NAME, &devices)?.into_iter().enumerate() {
            // SAFETY: not null, so valid for writing one handle for each device.
            unsafe { store("comms", comms.add(at), id.raw()) }?;
        }
        Ok(())
    })
}

/// What a rank that is not in a communicator of some ranks gives as its index.
const NO_RANK: u32 = u32::MAX;

pub unsafe extern "C" fn HcclCreateSubCommConfig(
    parent: *mut HcclComm,
    rankNum: u32,
    rankIds: *mut u32,
    subCommId: u64,
    subCommRankId: u32,
    config: *mut HcclCommConfig,
    comm: *mut HcclComm,
) -> HcclResult {
    const NAME: &str = "HcclCreateSubCommConfig";
    hccl(|| {
        not_null("parent", parent)?;
        not_null("comm", comm)?;
        // SAFETY: not null, so valid for reading.
        let member = COMMUNICATORS.get(unsafe { parent.read_unaligned() })?;
        if rankIds.is_null() && subCommRankId == NO_RANK {
            return member.check(NAME);
        }
        not_null("rankIds", rankIds)?;
        // SAFETY: the caller's promise.
        let settings = unsafe { settings(NAME, config) }?;
        if rankNum as usize > member.size {
            return Err(failure!(HCCL_PARA, "{NAME}: rankNum: given {rankNum}, allowed: 1 to {}", member.size));
        }
        // SAFETY: not null, so valid for reading as many.
        let ranks = (0..rankNum as usize).map(|at| unsafe { rankIds.add(at).read_unaligned() }).collect();
        let request = SplitRequest { number: subCommId, ranks, rank: subCommRankId };
        let id = member.split(NAME, &request, &settings)?;
        // SAFETY: the caller's promise.
        unsafe { store("comm", comm, id.raw()) }
    })
}

pub unsafe extern "C" fn HcclCommDestroy(comm: HcclComm) -> HcclResult {
    hccl(|| {
        if !comm.is_null() {
            COMMUNICATORS.remove(comm)?.leave();
        }
        Ok(())
    })
}

pub unsafe extern "C" fn HcclGetRankSize(comm: HcclComm, rankSize: *mut u32) -> HcclResult {
    hccl(|| {
        let size = COMMUNICATORS.get(comm)?.size;
        // SAFETY: the caller's promise. There are fewer ranks than devices.
        unsafe { store("rankSize", rankSize, size as u32) }
    })
}

pub unsafe extern "C" fn HcclGetRankId(comm: HcclComm, rank: *mut u32) -> HcclResult {
    hccl(|| {
        let own = COMMUNICATORS.get(comm)?.rank;
        // SAFETY: the caller's promise. There are fewer ranks than devices.
        unsafe { store("rank", rank, own as u32) }
    })
}

pub unsafe extern "C" fn HcclGetCommName(comm: HcclComm, commName: *mut c_char) -> HcclResult {
    hccl(|| {
        let member = COMMUNICATORS.get(comm)?;
        not_null("commName", commName)?;
        let most = sys::COMM_NAME_MAX_LENGTH as usize - 1;
        for (at, byte) in member.name.bytes().take(most).chain([0]).enumerate() {
            // SAFETY: not null, so valid for writing COMM_NAME_MAX_LENGTH characters.
            unsafe { commName.add(at).write(byte as c_char) };
        }
        Ok(())
    })
}

pub unsafe extern "C" fn HcclGetCommAsyncError(comm: HcclComm, asyncError: *mut HcclResult) -> HcclResult {
    hccl(|| {
        let member = COMMUNICATORS.get(comm)?;
        let found = match member.failed().is_some() {
            true => HcclResult::HCCL_E_REMOTE,
            false => HcclResult::HCCL_SUCCESS,
        };
        // SAFETY: the caller's promise.
        unsafe { store("asyncError", asyncError, found) }
    })
}

pub unsafe extern "C" fn HcclGetErrorString(code: HcclResult) -> *const c_char {
    let text: &CStr = match code {
        HcclResult::HCCL_SUCCESS => c"no error",
        HcclResult::HCCL_E_PARA => c"wrong argument",
        HcclResult::HCCL_E_PTR => c"null pointer",
        HcclResult::HCCL_E_MEMORY | HcclResult::HCCL_E_OOM => c"memory error",
        HcclResult::HCCL_E_INTERNAL => c"internal error",
        HcclResult::HCCL_E_NOT_SUPPORT => c"not supported",
        HcclResult::HCCL_E_NOT_FOUND => c"not found",
        HcclResult::HCCL_E_UNAVAIL => c"not available",
        HcclResult::HCCL_E_SYSCALL => c"failed system call",
        HcclResult::HCCL_E_TIMEOUT => c"timeout",
        HcclResult::HCCL_E_RUNTIME => c"failed call of the runtime",
        HcclResult::HCCL_E_AGAIN => c"try again",
        HcclResult::HCCL_E_REMOTE => c"failure of another rank",
        HcclResult::HCCL_E_SUSPENDING => c"communicator is suspended",
        HcclResult(10..=22) => c"failure of files, network or driver",
        _ => c"unknown error",
    };
    text.as_ptr()
}

pub unsafe extern "C" fn HcclGetCommConfigCapability() -> u32 {
    let target = context::machine().target;
    match target.soc {
        _ if target.cann < Cann::V8_5 => 5,
        Soc::Ascend950 => 10,
        _ => 12,
    }
}

/// The value of `HCCL_DETERMINISTIC`. Results are the same in each run whatever it says.
static DETERMINISTIC: AtomicI32 = AtomicI32::new(0);

fn known_setting(name: &str, config: HcclConfig) -> Outcome {
    match config {
        HcclConfig::HCCL_DETERMINISTIC => Ok(()),
        HcclConfig(other) => {
            Err(failure!(HCCL_NOT_SUPPORTED, "{name}: config: given {other}, allowed: HCCL_DETERMINISTIC (0)"))
        }
    }
}

pub unsafe extern "C" fn HcclSetConfig(config: HcclConfig, configValue: HcclConfigValue) -> HcclResult {
    const NAME: &str = "HcclSetConfig";
    hccl(|| {
        known_setting(NAME, config)?;
        // SAFETY: the union has one field, and any bits are a number.
        let value = unsafe { configValue.value };
        if !(0..=2).contains(&value) {
            return Err(failure!(HCCL_PARA, "{NAME}: HCCL_DETERMINISTIC: given {value}, allowed: 0, 1, 2 (strict)"));
        }
        DETERMINISTIC.store(value, Ordering::Relaxed);
        Ok(())
    })
}

pub unsafe extern "C" fn HcclGetConfig(config: HcclConfig, configValue: *mut HcclConfigValue) -> HcclResult {
    hccl(|| {
        known_setting("HcclGetConfig", config)?;
        let value = HcclConfigValue { value: DETERMINISTIC.load(Ordering::Relaxed) };
        // SAFETY: the caller's promise.
        unsafe { store("configValue", configValue, value) }
    })
}
