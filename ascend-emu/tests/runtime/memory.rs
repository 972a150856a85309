//! Memory and copies.

use super::host_memory::{DEVICE, HOST, location};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, MemoryLocation, allocation_at, check_scope, findings};
use ascend_sys::bindings::{
    aclrtCmoType, aclrtMallocAttrType, aclrtMallocAttrValue, aclrtMallocAttribute, aclrtMallocConfig, aclrtMemAttr,
    aclrtMemMallocPolicy, aclrtMemcpyKind,
};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Whether a finding of a kind has an address in its message.
pub(super) fn found(kind: FindingKind, at: *const c_void) -> bool {
    let address = format!("{:#x}", at.addr());
    findings().iter().any(|f| f.kind == kind && f.message.contains(&address))
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let _bench = Bench::new();
    let values: Vec<u32> = (0..5000).collect();
    let at = upload(&values);
    let other = malloc(20_000);
    ok(unsafe { aclrtMemset(other, 20_000, -1, 20_000) });
    assert_eq!(download::<u32>(other, 5000), vec![u32::MAX; 5000]);
    ok(unsafe { aclrtMemcpy(other, 20_000, at, 20_000, D2D) });
    assert_eq!(download::<u32>(other, 5000), values);
    ok(unsafe {
        aclrtMemcpy(other.wrapping_byte_add(400), 19_600, other, 19_600, aclrtMemcpyKind::ACL_MEMCPY_DEFAULT)
    });
    assert_eq!(download::<u32>(other, 5000)[100..], values[..4900]);
    free(at);
    free(other);
}

#[test]
fn fresh_memory_is_apart_and_accounted_for() {
    let _bench = Bench::new();
    let (one, two) = (malloc(100), malloc(1));
    assert!(one.addr().is_multiple_of(512) && two.addr().is_multiple_of(512));
    assert!(one.addr().abs_diff(two.addr()) >= 100);
    let info = allocation_at(one.wrapping_byte_add(99)).unwrap();
    assert_eq!((info.base, info.bytes), (one.addr(), 100));
    assert_eq!(info.location, MemoryLocation::Device(0));
    let before = info.version;
    ok(unsafe { aclrtMemset(one, 100, 0, 100) });
    assert_eq!(allocation_at(one).unwrap().version, before + 1);
    let id = info.id;
    free(one);
    assert!(allocation_at(one).is_none());
    let three = malloc(100);
    assert_ne!(allocation_at(three).unwrap().id, id);
    free(two);
    free(three);
}

#[test]
fn arguments_out_of_order_are_named() {
    let _bench = Bench::new();
    let at = malloc(64);
    let mut host = [0u8; 64];
    let h = host.as_mut_ptr().cast::<c_void>();
    let mut to = null_mut();
    unsafe {
        fails(aclrtMalloc(&mut to, 0, HUGE_FIRST), 107_000, &["size"]);
        fails(aclrtMalloc(null_mut(), 8, HUGE_FIRST), 100_000, &["null"]);
        let policy = aclrtMemMallocPolicy(99);
        fails(aclrtMalloc(&mut to, 8, policy), 107_000, &["policy"]);
        fails(aclrtMemcpy(at, 63, h, 64, H2D), 107_000, &["aclrtMemcpy", "count", "destMax", "63"]);
        fails(aclrtMemcpy(at, 64, h, 0, H2D), 107_000, &["count"]);
        fails(aclrtMemcpy(h, 64, h, 64, H2D), 107_000, &["dst", "host"]);
        fails(aclrtMemcpy(at, 64, at, 64, H2D), 107_000, &["src", "device"]);
        fails(aclrtMemcpy(at, 64, h, 64, D2D), 107_000, &["src", "host"]);
        fails(aclrtMemcpy(at, 64, h, 64, aclrtMemcpyKind(42)), 107_000, &["kind", "42"]);
        fails(aclrtMemcpy(null_mut(), 64, h, 64, H2D), 100_000, &["dst"]);
        fails(aclrtMemset(h, 64, 0, 64), 107_000, &["host memory"]);
        fails(aclrtFree(null_mut()), 100_000, &["null"]);
        fails(aclrtFree(h), 107_000, &["was not allocated"]);
        let inside = at.wrapping_byte_add(8);
        fails(aclrtFree(inside), 107_000, &["is inside"]);
        fails(aclrtFreeHost(at), 107_000, &["device memory", "aclrtFree"]);
        free(at);
        fails(aclrtFree(at), 107_000, &["already freed"]);
        fails(aclrtMemcpy(at, 64, h, 64, H2D), 107_000, &["use after free", "memory that was freed"]);
        fails(aclrtMemcpy(h, 64, at, 64, D2H), 107_000, &["memory that was freed"]);
    }
}

#[test]
fn too_much_memory_is_refused() {
    let _bench = Bench::new();
    let (mut free_bytes, mut total) = (0, 0);
    ok(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut free_bytes, &mut total) });
    assert!(0 < free_bytes && free_bytes <= total);
    let mut at = null_mut();
    for bytes in [total + 1, usize::MAX, usize::MAX - 4096] {
        fails(unsafe { aclrtMalloc(&mut at, bytes, HUGE_FIRST) }, 207_001, &["out of memory"]);
    }
    assert!(at.is_null());
    let small = malloc(32);
    let mut left = 0;
    ok(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut left, &mut total) });
    assert!(left <= total - 32);
    // Names of 2026, which leave it to the device what memory it has.
    for attr in 12..=17 {
        let mut same = 0;
        ok(unsafe { aclrtGetMemInfo(aclrtMemAttr(attr), &mut left, &mut same) });
        assert!(left <= total - 32 && same == total);
    }
    fails(unsafe { aclrtGetMemInfo(aclrtMemAttr(18), &mut left, &mut total) }, 107_000, &["0 to 17"]);
    free(small);
}

#[test]
fn a_page_past_the_end_is_lenient_in_compat_only() {
    let _bench = Bench::new();
    let at = upload(&[7u8; 100]);
    let beyond = 100 + 4096;
    {
        let _strict = check_scope(Check::Strict);
        let mut host = vec![0u8; beyond];
        fails(
            unsafe { aclrtMemcpy(host.as_mut_ptr().cast(), 101, at, 101, D2H) },
            107_000,
            &["out of bounds", "1 bytes past the end"],
        );
        assert_eq!(host[0], 0);
    }
    let host: Vec<u8> = download(at, beyond);
    assert_eq!(host[..100], [7; 100]);
    assert!(found(FindingKind::OutOfBounds, at));
    // Beyond that page, hardware faults too.
    let mut host = vec![0u8; 1 << 20];
    let bytes = host.len();
    fails(unsafe { aclrtMemcpy(host.as_mut_ptr().cast(), bytes, at, bytes, D2H) }, 107_000, &["out of bounds"]);
    free(at);
}

#[test]
fn pageable_copies_keep_the_streams_order() {
    let _bench = Bench::new();
    let stream = stream();
    let at = malloc(64);
    let mut host = [0u8; 64];
    let h = host.as_mut_ptr().cast::<c_void>();
    unsafe {
        ok(aclrtMemsetAsync(at, 64, 5, 64, stream));
        // Hardware makes it a copy that waits: told, and no error in either mode.
        let _strict = check_scope(Check::Strict);
        ok(aclrtMemcpyAsync(h, 64, at, 64, D2H, stream));
    }
    assert_eq!(host, [5; 64]);
    assert!(found(FindingKind::PageableCopy, h));
    free(at);
    destroy(stream);
}

#[test]
fn allocations_take_attributes() {
    let _bench = Bench::new();
    let attribute = |attr, value: u32| aclrtMallocAttribute { attr, value: aclrtMallocAttrValue { vaFlag: value } };
    use aclrtMallocAttrType as Type;
    let mut attributes = [attribute(Type::ACL_RT_MEM_ATTR_VA_FLAG, 1), attribute(Type::ACL_RT_MEM_ATTR_MODULE_ID, 3)];
    let mut config = aclrtMallocConfig { attrs: attributes.as_mut_ptr(), numAttrs: 2 };
    let mut at = null_mut();
    unsafe {
        ok(aclrtMallocHostWithCfg(&mut at, 64, &mut config));
        assert_eq!(location(at), (HOST, 0));
        ok(aclrtFreeHost(at));
        ok(aclrtMallocHostWithCfg(&mut at, 64, null_mut()));
        ok(aclrtFreeHost(at));
        ok(aclrtMallocWithCfg(&mut at, 64, HUGE_FIRST, &mut config));
        assert_eq!(location(at), (DEVICE, 0));
        free(at);
        fails(aclrtMallocHostWithCfg(&mut at, 0, &mut config), 107_000, &["size"]);
        let mut other = attribute(Type::ACL_RT_MEM_ATTR_DEVICE_ID, 1);
        config = aclrtMallocConfig { attrs: &mut other, numAttrs: 1 };
        fails(aclrtMallocWithCfg(&mut at, 64, HUGE_FIRST, &mut config), 100_000, &["device 1"]);
        other = attribute(Type(9), 1);
        config.attrs = &mut other;
        fails(aclrtMallocWithCfg(&mut at, 64, HUGE_FIRST, &mut config), 107_000, &["attr", "9"]);
        config.numAttrs = 1000;
        fails(aclrtMallocHostWithCfg(&mut at, 64, &mut config), 107_000, &["numAttrs", "1000"]);
        config = aclrtMallocConfig { attrs: null_mut(), numAttrs: 1 };
        fails(aclrtMallocHostWithCfg(&mut at, 64, &mut config), 100_000, &["attrs is null"]);
    }
}

#[test]
fn cache_hints_name_live_device_memory() {
    let _bench = Bench::new();
    let at = malloc(4096);
    let hint = |at, size, kind| unsafe { aclrtCmoAsync(at, size, kind, null_mut()) };
    let prefetch = aclrtCmoType::ACL_RT_CMO_TYPE_PREFETCH;
    ok(hint(at, 4096, prefetch));
    let flush = aclrtCmoType::ACL_RT_CMO_TYPE_FLUSH;
    fails(hint(at, 4096, flush), 207_000, &["cmoType", "3"]);
    fails(hint(at, 4096, aclrtCmoType(4)), 107_000, &["cmoType", "4"]);
    fails(hint(at, 0, prefetch), 107_000, &["count"]);
    let mut local = 0u8;
    let host = (&raw mut local).cast();
    fails(hint(host, 1, prefetch), 107_000, &["host memory"]);
    free(at);
    fails(hint(at, 4096, prefetch), 107_000, &["freed"]);
}
