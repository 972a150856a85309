//! Reserved addresses, physical memory, and what is seen through which.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to locals"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use ascend_testing::workbench as bench;

use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, MemoryLocation, allocation_at, check_scope, findings, live};
use ascend_sys::bindings::{
    aclrtMemAllocationType, aclrtMemAttr, aclrtMemGranularityOptions, aclrtMemHandleType, aclrtMemLocation,
    aclrtMemLocationType, aclrtPhysicalMemProp,
};
use bench::*;
use std::ffi::c_void;
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unit of physical memory.
const UNIT: usize = 2 << 20;

/// Tests that count what is live take turns with the others.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on_device(device: u32) -> aclrtPhysicalMemProp {
    aclrtPhysicalMemProp {
        handleType: aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE,
        allocationType: aclrtMemAllocationType::ACL_MEM_ALLOCATION_TYPE_PINNED,
        memAttr: aclrtMemAttr::ACL_HBM_MEM_HUGE,
        location: aclrtMemLocation { id: device, type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE },
        reserve: 0,
    }
}

fn reserve(bytes: usize) -> *mut c_void {
    let mut at = null_mut();
    ok(unsafe { aclrtReserveMemAddress(&mut at, bytes, 0, null_mut(), 1) });
    at
}

fn physical(bytes: usize) -> *mut c_void {
    let mut handle = null_mut();
    ok(unsafe { aclrtMallocPhysical(&mut handle, bytes, &on_device(0), 0) });
    handle
}

fn map(at: *mut c_void, bytes: usize, handle: *mut c_void) {
    ok(unsafe { aclrtMapMem(at, bytes, 0, handle, 0) });
}

fn unmap(at: *mut c_void) {
    ok(unsafe { aclrtUnmapMem(at) });
}

fn drop_physical(handle: *mut c_void) {
    ok(unsafe { aclrtFreePhysical(handle) });
}

fn release(at: *mut c_void) {
    ok(unsafe { aclrtReleaseMemAddress(at) });
}

#[test]
fn mapped_memory_is_used_like_any_other_and_across_its_parts() {
    let _alone = alone();
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let stream = stream();
    // More addresses than there is memory, as an allocator reserves that grows in them.
    let range = reserve(80 << 30);
    assert!(range.addr().is_multiple_of(UNIT));
    let parts = [physical(UNIT), physical(UNIT)];
    for (place, part) in parts.into_iter().enumerate() {
        map(range.wrapping_byte_add(place * UNIT), UNIT, part);
    }
    let fresh = download::<u8>(range, 2 * UNIT);
    assert!(fresh.iter().all(|&byte| byte == 0xff), "fresh memory is full of NaN in strict mode");
    drop(fresh);
    // A call whose query lies on the border of the two parts.
    let call = Call::new(5);
    let bytes = S * D * 2;
    let query = range.wrapping_byte_add(UNIT - bytes / 2);
    unsafe {
        ok(aclrtMemcpyAsync(query, bytes, call.q, bytes, D2D, stream));
        let executor = call.prepare();
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], query));
        ok(call.launch(executor, stream));
        fails(aclrtMemset(query, bytes, 0, bytes), 107_000, &["host access without synchronisation"]);
        sync(stream);
        call.check(5);
        // Both parts are told apart from memory that is not mapped.
        let end = range.wrapping_byte_add(2 * UNIT - 8);
        fails(aclrtMemsetAsync(end, 16, 0, 16, stream), 107_000, &["no allocated memory"]);
        fails(aclrtMemsetAsync(query, 4 * UNIT, 0, 4 * UNIT, stream), 107_000, &["no allocated memory"]);
    }
    let found = allocation_at(query).unwrap();
    assert_eq!((found.location, found.bytes), (MemoryLocation::Device(0), UNIT as u64));
    fails(unsafe { aclrtFree(range) }, 107_000, &["mapped", "aclrtUnmapMem"]);
    for (place, part) in parts.into_iter().enumerate() {
        unmap(range.wrapping_byte_add(place * UNIT));
        drop_physical(part);
    }
    release(range);
    call.destroy();
    destroy(stream);
}

#[test]
fn addresses_are_reserved_before_a_device_is_chosen() {
    let _turn = alone();
    let _bench = Bench::new();
    std::thread::spawn(|| {
        // This thread has no context.
        let mut free = 0;
        assert_ne!(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut free, &mut 0) }, 0);
        release(reserve(512));
    })
    .join()
    .unwrap();
}

/// As an allocator does whose threads set no device, or whose device was reset: each step without a context.
#[test]
fn memory_is_made_mapped_and_freed_without_a_context() {
    let _turn = alone();
    let bench = Bench::new();
    let elsewhere = |step: &(dyn Fn() -> usize + Sync)| std::thread::scope(|scope| scope.spawn(step).join().unwrap());
    let granularity = elsewhere(&|| {
        let (mut property, mut unit) = (on_device(1), 0);
        let option = aclrtMemGranularityOptions::ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        ok(unsafe { aclrtMemGetAllocationGranularity(&mut property, option, &mut unit) });
        unit
    });
    assert_eq!(granularity, UNIT);
    let range = elsewhere(&|| reserve(2 * UNIT).expose_provenance());
    let range = with_exposed_provenance_mut::<c_void>(range);
    let handle = elsewhere(&|| physical(UNIT).expose_provenance());
    let (at, handle_number) = (range.expose_provenance(), handle);
    elsewhere(&|| {
        map(with_exposed_provenance_mut(at), UNIT, with_exposed_provenance_mut(handle_number));
        0
    });
    // The memory is the device's, whatever thread made it.
    assert_eq!(allocation_at(range).unwrap().location, MemoryLocation::Device(0));
    ok(unsafe { aclrtMemset(range, 4096, 3, 4096) });
    assert_eq!(download::<u8>(range, 4096), [3; 4096]);
    drop(bench);
    elsewhere(&|| {
        unmap(with_exposed_provenance_mut(at));
        drop_physical(with_exposed_provenance_mut(handle_number));
        release(with_exposed_provenance_mut(at));
        0
    });
    // What has no context to check against is still checked.
    elsewhere(&|| {
        fails(unsafe { aclrtUnmapMem(with_exposed_provenance_mut(at)) }, 107_000, &["virPtr"]);
        fails(unsafe { aclrtMallocPhysical(&mut null_mut(), UNIT, &on_device(9), 0) }, 107_001, &["device 9"]);
        0
    });
}

#[test]
fn physical_memory_is_seen_through_every_mapping_and_keeps_its_bytes() {
    let _alone = alone();
    let _bench = Bench::new();
    let range = reserve(8 * UNIT);
    let handle = physical(UNIT);
    let (one, two) = (range, range.wrapping_byte_add(4 * UNIT));
    map(one, UNIT, handle);
    map(two, UNIT, handle);
    ok(unsafe { aclrtMemset(one, 4096, 7, 4096) });
    assert_eq!(download::<u8>(two, 4096), [7; 4096]);
    unmap(one);
    // The handle may go before the mapping.
    drop_physical(handle);
    assert_eq!(download::<u8>(two, 4096), [7; 4096]);
    unmap(two);
    let fresh = physical(UNIT);
    map(one, UNIT, fresh);
    assert_eq!(download::<u8>(one, 4096), [0; 4096]);
    unmap(one);
    map(two, UNIT, fresh);
    unmap(two);
    drop_physical(fresh);
    release(range);
}

#[test]
fn what_is_not_given_back_is_counted() {
    let _alone = alone();
    let _bench = Bench::new();
    let before = live();
    let free = || {
        let (mut free, mut total) = (0, 0);
        ok(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut free, &mut total) });
        free
    };
    let left = free();
    let (range, handle) = (reserve(UNIT), physical(UNIT));
    map(range, UNIT, handle);
    let now = live();
    assert_eq!(now.physical_memories, before.physical_memories + 1);
    assert_eq!(now.address_ranges, before.address_ranges + 1);
    assert_eq!(now.device_allocations, before.device_allocations);
    assert_eq!(free(), left - UNIT);
    drop_physical(handle);
    assert_eq!(free(), left - UNIT, "what is mapped stays");
    unmap(range);
    assert_eq!(free(), left);
    release(range);
    assert_eq!(live(), before);
    let mut handle = null_mut();
    fails(
        unsafe { aclrtMallocPhysical(&mut handle, 1 << 50, &on_device(0), 0) },
        207_001,
        &["out of memory on device 0"],
    );
}

#[test]
fn arguments_of_virtual_memory_are_checked() {
    let _alone = alone();
    let _bench = Bench::new();
    let range = reserve(2 * UNIT);
    let handle = physical(UNIT);
    let mut at = null_mut();
    let odd = range.wrapping_byte_add(4096);
    let end = range.wrapping_byte_add(2 * UNIT);
    unsafe {
        let take = |at, size, align, expect, flags| aclrtReserveMemAddress(at, size, align, expect, flags);
        fails(take(null_mut(), 1, 0, null_mut(), 0), 100_000, &["virPtr"]);
        fails(take(&mut at, 0, 0, null_mut(), 0), 107_000, &["size"]);
        fails(take(&mut at, 1, 8, null_mut(), 0), 107_000, &["alignment"]);
        fails(take(&mut at, 1, 0, null_mut(), 2), 107_000, &["flags"]);
        fails(take(&mut at, 1, 0, range, 0), 207_000, &["expectPtr"]);
        fails(take(&mut at, usize::MAX, 0, null_mut(), 0), 207_001, &[]);
        let make = |prop: &aclrtPhysicalMemProp, size, flags| {
            let mut handle = null_mut();
            aclrtMallocPhysical(&mut handle, size, prop, flags)
        };
        let right = on_device(0);
        fails(make(&right, 0, 0), 107_000, &["size"]);
        fails(make(&right, UNIT, 1), 100_000, &["flags"]);
        fails(make(&on_device(9), UNIT, 0), 107_001, &["device 9"]);
        fails(make(&on_device(u32::MAX), UNIT, 0), 107_000, &["location.id"]);
        let mut prop = right;
        prop.handleType = aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_POSIX;
        fails(make(&prop, UNIT, 0), 100_000, &["handleType"]);
        prop = right;
        prop.location.type_ = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST;
        fails(make(&prop, UNIT, 0), 207_000, &["location.type"]);
        prop = right;
        prop.memAttr = aclrtMemAttr::ACL_DDR_MEM;
        fails(make(&prop, UNIT, 0), 100_000, &["memAttr"]);
        fails(aclrtMallocPhysical(&mut at, UNIT, null(), 0), 100_000, &["prop"]);
        fails(aclrtFreePhysical(null_mut()), 100_000, &["null"]);
        fails(aclrtFreePhysical(range), 107_017, &["aclrtDrvMemHandle"]);

        let to = |at, size, offset, handle, flags| aclrtMapMem(at, size, offset, handle, flags);
        fails(to(null_mut(), UNIT, 0, handle, 0), 100_000, &["virPtr"]);
        fails(to(range, 2 * UNIT, 0, handle, 0), 107_000, &["size"]);
        fails(to(range, UNIT, UNIT, handle, 0), 107_000, &["offset"]);
        fails(to(range, UNIT, 0, range, 0), 107_017, &[]);
        fails(to(range, UNIT, 0, handle, 1), 100_000, &["flags"]);
        fails(to(odd, UNIT, 0, handle, 0), 107_000, &["virPtr"]);
        fails(to(end, UNIT, 0, handle, 0), 107_000, &["virPtr"]);
        let small = physical(4096);
        fails(to(range, 4096, 0, small, 0), 107_000, &["multiple"]);
        drop_physical(small);
        map(range, UNIT, handle);
        fails(to(range, UNIT, 0, handle, 0), 107_000, &["mapped already"]);
        let mut elsewhere = null_mut();
        ok(aclrtMallocPhysical(&mut elsewhere, UNIT, &on_device(1), 0));
        let beside = range.wrapping_byte_add(UNIT);
        fails(to(beside, UNIT, 0, elsewhere, 0), 107_000, &["another device"]);
        drop_physical(elsewhere);
        fails(aclrtReleaseMemAddress(range), 107_000, &["still mapped"]);
        fails(aclrtReleaseMemAddress(odd), 107_000, &["virPtr"]);
        fails(aclrtUnmapMem(odd), 107_000, &["virPtr"]);
        unmap(range);
        fails(aclrtUnmapMem(range), 107_000, &["virPtr"]);
        drop_physical(handle);
        fails(to(range, UNIT, 0, handle, 0), 107_017, &["already destroyed"]);
        release(range);
        fails(aclrtReleaseMemAddress(range), 107_000, &["virPtr"]);

        let mut unit = 0;
        let minimum = aclrtMemGranularityOptions::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM;
        prop = right;
        ok(aclrtMemGetAllocationGranularity(&mut prop, minimum, &mut unit));
        assert_eq!(unit, UNIT);
        prop.memAttr = aclrtMemAttr::ACL_HBM_MEM_HUGE1G;
        ok(aclrtMemGetAllocationGranularity(&mut prop, minimum, &mut unit));
        assert_eq!(unit, 1 << 30);
        fails(
            aclrtMemGetAllocationGranularity(&mut prop, aclrtMemGranularityOptions(9), &mut unit),
            107_000,
            &["option", "9"],
        );
    }
}

#[test]
fn unmapping_memory_in_use_is_told_and_put_off() {
    let _alone = alone();
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let (range, handle) = (reserve(UNIT), physical(UNIT));
    let copy = malloc(4096);
    map(range, UNIT, handle);
    ok(unsafe { aclrtMemset(range, 4096, 3, 4096) });
    gate.hold(stream);
    ok(unsafe { aclrtMemcpyAsync(copy, 4096, range, 4096, D2D, stream) });
    {
        let _check = check_scope(Check::Strict);
        fails(unsafe { aclrtUnmapMem(range) }, 207_002, &["memory freed while in use", "aclrtMemcpyAsync"]);
    }
    unmap(range);
    let told = findings()
        .into_iter()
        .any(|finding| finding.kind == FindingKind::FreeInUse && finding.message.contains("aclrtUnmapMem"));
    assert!(told);
    // Until the copy is over its bytes are there, and their place is taken.
    fails(unsafe { aclrtMapMem(range, UNIT, 0, handle, 0) }, 107_000, &["still used"]);
    fails(unsafe { aclrtReleaseMemAddress(range) }, 107_000, &["used by queued work"]);
    gate.open();
    sync(stream);
    assert_eq!(download::<u8>(copy, 4096), [3; 4096]);
    let _check = check_scope(Check::Strict);
    fails(unsafe { aclrtMemsetAsync(range, 4096, 1, 4096, stream) }, 107_000, &["memory that was freed"]);
    map(range, UNIT, handle);
    assert_eq!(download::<u8>(range, 4096), [3; 4096]);
    unmap(range);
    drop_physical(handle);
    release(range);
    free(copy);
    gate.destroy();
    destroy(stream);
}

#[test]
fn a_reset_takes_physical_memory_and_addresses_back() {
    let _alone = alone();
    init();
    let before = live();
    ok(unsafe { aclrtSetDevice(1) });
    let range = reserve(4 * UNIT);
    let mut handle = null_mut();
    ok(unsafe { aclrtMallocPhysical(&mut handle, UNIT, &on_device(1), 0) });
    map(range, UNIT, handle);
    ok(unsafe { aclrtResetDevice(1) });
    assert_eq!(live(), before);
    let leaked =
        findings().into_iter().any(|finding| finding.kind == FindingKind::Leak && finding.message.contains("device 1"));
    assert!(leaked);
    let _bench = Bench::new();
    fails(unsafe { aclrtFreePhysical(handle) }, 107_017, &["destroyed"]);
    fails(unsafe { aclrtReleaseMemAddress(range) }, 107_000, &[]);
}
