//! Memory of the host: pinned, registered, mapped for the device.

use super::memory::found;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, MemoryLocation, allocation_at, check_scope, live};
use ascend_sys::bindings::{
    ACL_HOST_REG_MAPPED, ACL_HOST_REG_PINNED, ACL_HOST_REG_READONLY, aclrtHostRegisterType, aclrtMemAttr,
    aclrtMemLocation, aclrtMemLocationType, aclrtPtrAttributes,
};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

#[test]
fn pinned_memory_has_the_limit_of_a_device() {
    let _bench = Bench::new();
    let (mut left, mut total) = (0, 0);
    ok(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut left, &mut total) });
    let mut at = null_mut();
    for bytes in [total + 1, usize::MAX] {
        fails(unsafe { aclrtMallocHost(&mut at, bytes) }, 207_001, &["out of memory"]);
        assert!(at.is_null());
    }
    ok(unsafe { aclrtMallocHost(&mut at, 4096) });
    let mut rest = null_mut();
    fails(
        unsafe { aclrtMallocHost(&mut rest, total - 4095) },
        207_001,
        &["pinned host memory", &format!(" of {total} free")],
    );
    ok(unsafe { aclrtFreeHost(at) });
}

#[test]
fn pinned_memory_is_the_hosts() {
    let _bench = Bench::new();
    let mut pinned = null_mut();
    ok(unsafe { aclrtMallocHost(&mut pinned, 256) });
    unsafe { pinned.cast::<u8>().write_bytes(9, 256) };
    let at = malloc(256);
    let stream = stream();
    unsafe {
        ok(aclrtMemcpyAsync(at, 256, pinned, 256, H2D, stream));
        ok(aclrtMemsetAsync(at, 256, 1, 128, stream));
        sync(stream);
        fails(aclrtFree(pinned), 107_000, &["pinned", "aclrtFreeHost"]);
    }
    let got: Vec<u8> = download(at, 256);
    assert_eq!((got[127], got[128]), (1, 9));
    assert_eq!(allocation_at(pinned).unwrap().location, MemoryLocation::PinnedHost);
    ok(unsafe { aclrtFreeHost(pinned) });
    free(at);
    destroy(stream);
}

pub(super) fn location(of: *const c_void) -> (aclrtMemLocationType, u32) {
    let mut found = aclrtPtrAttributes {
        location: aclrtMemLocation { id: 77, type_: aclrtMemLocationType(77) },
        pageSize: 0,
        rsv: [7; 4],
    };
    ok(unsafe { aclrtPointerGetAttributes(of, &mut found) });
    assert!(found.pageSize.is_power_of_two());
    assert_eq!(found.rsv, [0; 4]);
    (found.location.type_, found.location.id)
}

pub(super) const HOST: aclrtMemLocationType = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST;
pub(super) const DEVICE: aclrtMemLocationType = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE;
const UNREGISTERED: aclrtMemLocationType = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_UNREGISTERED;

/// Tests that register host memory take turns, since one counts it.
static REGISTRATIONS: Mutex<()> = Mutex::new(());

/// Pageable host memory that begins at a page.
#[repr(align(4096))]
struct Page(#[allow(dead_code, reason = "its address is used")] [u8; 4096]);

#[test]
fn a_pointer_tells_where_its_memory_is() {
    let _bench = Bench::new();
    let at = malloc(100);
    let mut pinned = null_mut();
    ok(unsafe { aclrtMallocHost(&mut pinned, 100) });
    let local = 5u8;
    assert_eq!(location(at.wrapping_byte_add(99)), (DEVICE, 0));
    assert_eq!(location(pinned), (HOST, 0));
    assert_eq!(location((&raw const local).cast()), (UNREGISTERED, 0));
    free(at);
    ok(unsafe { aclrtFreeHost(pinned) });
    let mut found = unsafe { std::mem::zeroed() };
    fails(unsafe { aclrtPointerGetAttributes(at, &mut found) }, 107_000, &["no device memory"]);
    fails(unsafe { aclrtPointerGetAttributes(null_mut(), &mut found) }, 100_000, &["ptr is null"]);
}

#[test]
fn registered_host_memory_is_pinned_until_it_is_given_up() {
    let _alone = REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let stream = stream();
    let mut page = Box::new(Page([7; 4096]));
    let host = (&raw mut *page).cast::<c_void>();
    let device = malloc(4096);
    let copy = || unsafe { aclrtMemcpyAsync(device, 4096, host, 4096, H2D, stream) };
    ok(copy());
    assert!(found(FindingKind::PageableCopy, host));
    let before = live().host_registrations;
    unsafe {
        ok(aclrtHostRegisterV2(host, 4096, ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED));
        assert_eq!(live().host_registrations, before + 1);
        assert_eq!(location(host.wrapping_byte_add(4095)), (HOST, 0));
        ok(copy());
        fails(aclrtHostUnregister(host), 207_002, &["freed while in use", "aclrtMemcpyAsync"]);
        sync(stream);
        assert_eq!(download::<u8>(device, 4096), [7; 4096]);
        let mut mapped = null_mut();
        ok(aclrtHostGetDevicePointer(host, &mut mapped, 0));
        assert_eq!(mapped, host);
        fails(aclrtHostRegisterV2(host, 4096, ACL_HOST_REG_MAPPED), 507_910, &["registered already"]);
        fails(aclrtFreeHost(host), 107_000, &["the program's own", "aclrtHostUnregister"]);
        ok(aclrtHostUnregister(host));
        fails(aclrtHostUnregister(host), 507_911, &["begins at"]);
        fails(aclrtHostGetDevicePointer(host, &mut mapped, 0), 507_911, &[]);
    }
    assert_eq!(location(host), (UNREGISTERED, 0));
    ok(copy());
    assert_eq!(live().host_registrations, before);
    free(device);
    destroy(stream);
}

#[test]
fn operators_reach_host_memory_that_is_mapped() {
    let _alone = REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let _bench = Bench::new();
    let call = Call::new(3);
    let mut pinned = null_mut();
    let bytes = S * D * 2;
    unsafe {
        ok(aclrtMallocHost(&mut pinned, 4096));
        let mut mapped = null_mut();
        let kind = aclrtHostRegisterType::ACL_HOST_REGISTER_MAPPED;
        ok(aclrtHostRegister(pinned, 4096, kind, &mut mapped));
        ok(aclrtMemcpy(mapped, bytes, call.q, bytes, D2H));
        let executor = call.prepare();
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], mapped));
        ok(call.launch(executor, null_mut()));
        sync(null_mut());
        call.check(3);
        ok(aclrtHostUnregister(pinned));
        ok(aclrtFreeHost(pinned));
    }
    call.destroy();
}

#[test]
fn host_memory_that_cannot_be_registered_is_refused() {
    let _alone = REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let _bench = Bench::new();
    let page = Box::new(Page([0; 4096]));
    let host = (&raw const *page).cast::<c_void>().cast_mut();
    let at = malloc(4096);
    let mut pinned = null_mut();
    let mut mapped = null_mut();
    let kind = aclrtHostRegisterType::ACL_HOST_REGISTER_MAPPED;
    unsafe {
        ok(aclrtMallocHost(&mut pinned, 4096));
        let flags = |ptr, size, flag| aclrtHostRegisterV2(ptr, size, flag);
        fails(flags(null_mut(), 1, ACL_HOST_REG_MAPPED), 100_000, &["ptr"]);
        fails(flags(host, 0, ACL_HOST_REG_MAPPED), 107_000, &["size"]);
        fails(flags(host, 4096, 0), 107_000, &["flag"]);
        fails(flags(host, 4096, 1), 107_000, &["flag", "0x1"]);
        fails(flags(host, 4096, ACL_HOST_REG_READONLY), 207_000, &["flag"]);
        let odd = host.wrapping_byte_add(8);
        fails(flags(odd, 8, ACL_HOST_REG_MAPPED), 107_000, &["4096"]);
        fails(flags(at, 4096, ACL_HOST_REG_MAPPED), 107_000, &["device memory"]);
        fails(flags(host, u64::MAX, ACL_HOST_REG_MAPPED), 107_000, &["address space"]);
        fails(flags(pinned, 4096, ACL_HOST_REG_PINNED), 107_000, &["pinned already"]);
        fails(flags(pinned, 1 << 30, ACL_HOST_REG_MAPPED), 107_000, &["no one range"]);
        fails(aclrtHostRegister(host, 4096, aclrtHostRegisterType(9), &mut mapped), 107_000, &["type", "9"]);
        fails(aclrtHostRegister(host, 4096, kind, null_mut()), 100_000, &["devPtr"]);
        // Freeing pinned memory ends what was registered of it.
        ok(aclrtHostRegister(pinned, 4096, kind, &mut mapped));
        ok(aclrtFreeHost(pinned));
        fails(aclrtHostUnregister(pinned), 507_911, &[]);
    }
    free(at);
}

#[test]
fn conditional_copies_take_any_host_memory() {
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let at = upload(&[5u8; 64]);
    let mut host = [0u8; 64];
    let h = host.as_mut_ptr().cast();
    ok(unsafe { aclrtMemcpyAsyncWithCondition(h, 64, at, 64, D2H, null_mut()) });
    assert_eq!(host, [5; 64]);
    fails(
        unsafe { aclrtMemcpyAsyncWithCondition(h, 64, at, 65, D2H, null_mut()) },
        107_000,
        &["aclrtMemcpyAsyncWithCondition", "count"],
    );
    free(at);
}
