//! Memory and copies.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, MemoryLocation, allocation_at, check_scope, findings, live};
use ascend_sys::bindings::{
    ACL_HOST_REG_MAPPED, ACL_HOST_REG_PINNED, ACL_HOST_REG_READONLY, aclrtCmoType,
    aclrtHostRegisterType, aclrtMallocAttrType, aclrtMallocAttrValue, aclrtMallocAttribute,
    aclrtMallocConfig, aclrtMemAttr, aclrtMemLocation, aclrtMemLocationType, aclrtMemMallocPolicy,
    aclrtMemcpyBatchAttr, aclrtMemcpyKind, aclrtPtrAttributes,
};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// Whether a finding of a kind has an address in its message.
fn found(kind: FindingKind, at: *const c_void) -> bool {
    let address = format!("{:#x}", at.addr());
    findings()
        .iter()
        .any(|f| f.kind == kind && f.message.contains(&address))
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
        aclrtMemcpy(
            other.wrapping_byte_add(400),
            19_600,
            other,
            19_600,
            aclrtMemcpyKind::ACL_MEMCPY_DEFAULT,
        )
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
        fails(
            aclrtMemcpy(at, 63, h, 64, H2D),
            107_000,
            &["aclrtMemcpy", "count", "destMax", "63"],
        );
        fails(aclrtMemcpy(at, 64, h, 0, H2D), 107_000, &["count"]);
        fails(aclrtMemcpy(h, 64, h, 64, H2D), 107_000, &["dst", "host"]);
        fails(
            aclrtMemcpy(at, 64, at, 64, H2D),
            107_000,
            &["src", "device"],
        );
        fails(aclrtMemcpy(at, 64, h, 64, D2D), 107_000, &["src", "host"]);
        fails(
            aclrtMemcpy(at, 64, h, 64, aclrtMemcpyKind(42)),
            107_000,
            &["kind", "42"],
        );
        fails(aclrtMemcpy(null_mut(), 64, h, 64, H2D), 100_000, &["dst"]);
        fails(aclrtMemset(h, 64, 0, 64), 107_000, &["host memory"]);
        fails(aclrtFree(null_mut()), 100_000, &["null"]);
        fails(aclrtFree(h), 107_000, &["was not allocated"]);
        let inside = at.wrapping_byte_add(8);
        fails(aclrtFree(inside), 107_000, &["is inside"]);
        fails(aclrtFreeHost(at), 107_000, &["device memory", "aclrtFree"]);
        free(at);
        fails(aclrtFree(at), 107_000, &["already freed"]);
        fails(
            aclrtMemcpy(at, 64, h, 64, H2D),
            107_000,
            &["use after free", "memory that was freed"],
        );
        fails(
            aclrtMemcpy(h, 64, at, 64, D2H),
            107_000,
            &["memory that was freed"],
        );
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
        fails(
            unsafe { aclrtMalloc(&mut at, bytes, HUGE_FIRST) },
            207_001,
            &["out of memory"],
        );
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
    fails(
        unsafe { aclrtGetMemInfo(aclrtMemAttr(18), &mut left, &mut total) },
        107_000,
        &["0 to 17"],
    );
    free(small);
}

#[test]
fn pinned_memory_has_the_limit_of_a_device() {
    let _bench = Bench::new();
    let (mut left, mut total) = (0, 0);
    ok(unsafe { aclrtGetMemInfo(aclrtMemAttr::ACL_HBM_MEM, &mut left, &mut total) });
    let mut at = null_mut();
    for bytes in [total + 1, usize::MAX] {
        fails(
            unsafe { aclrtMallocHost(&mut at, bytes) },
            207_001,
            &["out of memory"],
        );
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
    fails(
        unsafe { aclrtMemcpy(host.as_mut_ptr().cast(), bytes, at, bytes, D2H) },
        107_000,
        &["out of bounds"],
    );
    free(at);
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
    assert_eq!(
        allocation_at(pinned).unwrap().location,
        MemoryLocation::PinnedHost
    );
    ok(unsafe { aclrtFreeHost(pinned) });
    free(at);
    destroy(stream);
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

fn location(of: *const c_void) -> (aclrtMemLocationType, u32) {
    let mut found = aclrtPtrAttributes {
        location: aclrtMemLocation {
            id: 77,
            type_: aclrtMemLocationType(77),
        },
        pageSize: 0,
        rsv: [7; 4],
    };
    ok(unsafe { aclrtPointerGetAttributes(of, &mut found) });
    assert!(found.pageSize.is_power_of_two());
    assert_eq!(found.rsv, [0; 4]);
    (found.location.type_, found.location.id)
}

const HOST: aclrtMemLocationType = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST;
const DEVICE: aclrtMemLocationType = aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE;
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
    fails(
        unsafe { aclrtPointerGetAttributes(at, &mut found) },
        107_000,
        &["no device memory"],
    );
    fails(
        unsafe { aclrtPointerGetAttributes(null_mut(), &mut found) },
        100_000,
        &["ptr is null"],
    );
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
        ok(aclrtHostRegisterV2(
            host,
            4096,
            ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED,
        ));
        assert_eq!(live().host_registrations, before + 1);
        assert_eq!(location(host.wrapping_byte_add(4095)), (HOST, 0));
        ok(copy());
        fails(
            aclrtHostUnregister(host),
            207_002,
            &["freed while in use", "aclrtMemcpyAsync"],
        );
        sync(stream);
        assert_eq!(download::<u8>(device, 4096), [7; 4096]);
        let mut mapped = null_mut();
        ok(aclrtHostGetDevicePointer(host, &mut mapped, 0));
        assert_eq!(mapped, host);
        fails(
            aclrtHostRegisterV2(host, 4096, ACL_HOST_REG_MAPPED),
            507_910,
            &["registered already"],
        );
        fails(
            aclrtFreeHost(host),
            107_000,
            &["the program's own", "aclrtHostUnregister"],
        );
        ok(aclrtHostUnregister(host));
        fails(aclrtHostUnregister(host), 507_911, &["begins at"]);
        fails(
            aclrtHostGetDevicePointer(host, &mut mapped, 0),
            507_911,
            &[],
        );
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
        fails(
            flags(at, 4096, ACL_HOST_REG_MAPPED),
            107_000,
            &["device memory"],
        );
        fails(
            flags(host, u64::MAX, ACL_HOST_REG_MAPPED),
            107_000,
            &["address space"],
        );
        fails(
            flags(pinned, 4096, ACL_HOST_REG_PINNED),
            107_000,
            &["pinned already"],
        );
        fails(
            flags(pinned, 1 << 30, ACL_HOST_REG_MAPPED),
            107_000,
            &["no one range"],
        );
        fails(
            aclrtHostRegister(host, 4096, aclrtHostRegisterType(9), &mut mapped),
            107_000,
            &["type", "9"],
        );
        fails(
            aclrtHostRegister(host, 4096, kind, null_mut()),
            100_000,
            &["devPtr"],
        );
        // Freeing pinned memory ends what was registered of it.
        ok(aclrtHostRegister(pinned, 4096, kind, &mut mapped));
        ok(aclrtFreeHost(pinned));
        fails(aclrtHostUnregister(pinned), 507_911, &[]);
    }
    free(at);
}

#[test]
fn allocations_take_attributes() {
    let _bench = Bench::new();
    let attribute = |attr, value: u32| aclrtMallocAttribute {
        attr,
        value: aclrtMallocAttrValue { vaFlag: value },
    };
    use aclrtMallocAttrType as Type;
    let mut attributes = [
        attribute(Type::ACL_RT_MEM_ATTR_VA_FLAG, 1),
        attribute(Type::ACL_RT_MEM_ATTR_MODULE_ID, 3),
    ];
    let mut config = aclrtMallocConfig {
        attrs: attributes.as_mut_ptr(),
        numAttrs: 2,
    };
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
        fails(
            aclrtMallocHostWithCfg(&mut at, 0, &mut config),
            107_000,
            &["size"],
        );
        let mut other = attribute(Type::ACL_RT_MEM_ATTR_DEVICE_ID, 1);
        config = aclrtMallocConfig {
            attrs: &mut other,
            numAttrs: 1,
        };
        fails(
            aclrtMallocWithCfg(&mut at, 64, HUGE_FIRST, &mut config),
            100_000,
            &["device 1"],
        );
        other = attribute(Type(9), 1);
        config.attrs = &mut other;
        fails(
            aclrtMallocWithCfg(&mut at, 64, HUGE_FIRST, &mut config),
            107_000,
            &["attr", "9"],
        );
        config.numAttrs = 1000;
        fails(
            aclrtMallocHostWithCfg(&mut at, 64, &mut config),
            107_000,
            &["numAttrs", "1000"],
        );
        config = aclrtMallocConfig {
            attrs: null_mut(),
            numAttrs: 1,
        };
        fails(
            aclrtMallocHostWithCfg(&mut at, 64, &mut config),
            100_000,
            &["attrs is null"],
        );
    }
}

/// The attribute of copies to the device, or from it.
fn direction(to_device: bool) -> aclrtMemcpyBatchAttr {
    let place = |type_| aclrtMemLocation { id: 0, type_ };
    let (dst, src) = if to_device {
        (DEVICE, HOST)
    } else {
        (HOST, DEVICE)
    };
    aclrtMemcpyBatchAttr {
        dstLoc: place(dst),
        srcLoc: place(src),
        rsv: [0; 16],
    }
}

#[test]
fn batches_copy_each_of_their_ranges() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let mut pinned = null_mut();
    ok(unsafe { aclrtMallocHost(&mut pinned, 4096) });
    let source: Vec<u8> = (0..=255).cycle().take(4096).collect();
    let at = upload(&source);
    let mut pageable = vec![0u8; 4096];
    for (host, held) in [(pinned, true), (pageable.as_mut_ptr().cast(), false)] {
        let mut dsts = [host, host.wrapping_byte_add(1000)];
        let mut srcs = [at.wrapping_byte_add(3), at.wrapping_byte_add(700)];
        let (mut rooms, mut sizes) = ([900, 3096], [800, 3000]);
        let (mut attribute, mut start, mut bad) = (direction(false), 0, 5);
        if held {
            gate.hold(stream);
        }
        ok(unsafe {
            aclrtMemcpyBatchAsync(
                dsts.as_mut_ptr(),
                rooms.as_mut_ptr(),
                srcs.as_mut_ptr(),
                sizes.as_mut_ptr(),
                2,
                &mut attribute,
                &mut start,
                1,
                &mut bad,
                stream,
            )
        });
        assert_eq!(bad, usize::MAX);
        if held {
            gate.open();
            sync(stream);
        }
        // Of pageable memory the copies are over when the call returns.
        let got = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), 4096) };
        assert_eq!(got[..800], source[3..803]);
        assert_eq!(got[1000..4000], source[700..3700]);
    }
    let mut other = vec![9u8; 64];
    let mut back = [at];
    let mut from = [other.as_mut_ptr().cast::<c_void>()];
    let (mut rooms, mut sizes, mut attribute, mut start, mut bad) =
        ([64], [64], direction(true), 0, 5);
    ok(unsafe {
        aclrtMemcpyBatch(
            back.as_mut_ptr(),
            rooms.as_mut_ptr(),
            from.as_mut_ptr(),
            sizes.as_mut_ptr(),
            1,
            &mut attribute,
            &mut start,
            1,
            &mut bad,
        )
    });
    assert_eq!(download::<u8>(at, 64), other);
    ok(unsafe { aclrtFreeHost(pinned) });
    free(at);
    gate.destroy();
    destroy(stream);
}

#[test]
fn a_batch_names_the_copy_that_is_wrong() {
    let _bench = Bench::new();
    let at = malloc(64);
    let mut host = [0u8; 64];
    let h = host.as_mut_ptr().cast::<c_void>();
    let run = |dsts: [*mut c_void; 2],
               sizes: [usize; 2],
               attrs: &[aclrtMemcpyBatchAttr],
               starts: &[usize]| {
        let (mut dsts, mut srcs, mut sizes, mut rooms) = (dsts, [h, h], sizes, [64, 64]);
        let (mut attrs, mut starts, mut bad) = (attrs.to_vec(), starts.to_vec(), 5);
        let status = unsafe {
            aclrtMemcpyBatch(
                dsts.as_mut_ptr(),
                rooms.as_mut_ptr(),
                srcs.as_mut_ptr(),
                sizes.as_mut_ptr(),
                2,
                attrs.as_mut_ptr(),
                starts.as_mut_ptr(),
                starts.len(),
                &mut bad,
            )
        };
        (status, bad)
    };
    let up = direction(true);
    let none = usize::MAX;
    assert_eq!(run([at, at], [64, 64], &[up], &[0]), (0, none));
    for (dsts, sizes, attrs, starts, code, bad, part) in [
        ([at, h], [64, 64], vec![up], vec![0], 107_000, 1, "copy 1"),
        ([at, at], [65, 64], vec![up], vec![0], 107_000, 0, "destMax"),
        ([at, at], [0, 64], vec![up], vec![0], 107_000, 0, "count"),
        (
            [at, at],
            [64, 64],
            vec![direction(false)],
            vec![0],
            107_000,
            0,
            "dst",
        ),
        (
            [at, at],
            [64, 64],
            vec![up],
            vec![1],
            100_000,
            none,
            "attrsIndexes",
        ),
        (
            [at, at],
            [64, 64],
            vec![up, up],
            vec![0, 0],
            100_000,
            none,
            "attrsIndexes[1]",
        ),
        (
            [at, at],
            [64, 64],
            vec![up, up],
            vec![0, 2],
            100_000,
            none,
            "attrsIndexes[1]",
        ),
        (
            [at, at],
            [64, 64],
            vec![],
            vec![],
            107_000,
            none,
            "numAttrs",
        ),
        (
            [at, at],
            [64, 64],
            vec![up; 3],
            vec![0, 1, 2],
            107_000,
            none,
            "numAttrs",
        ),
    ] {
        assert_eq!(run(dsts, sizes, &attrs, &starts), (code, bad), "{part}");
        let told = message();
        assert!(told.contains(part), "{part}: {told}");
    }
    let mut elsewhere = up;
    elsewhere.dstLoc.id = 1;
    assert_eq!(run([at, at], [64, 64], &[elsewhere], &[0]), (107_000, 0));
    assert!(message().contains("device 1"));
    let mut reserved = up;
    reserved.rsv[3] = 1;
    assert_eq!(run([at, at], [64, 64], &[reserved], &[0]), (100_000, none));
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
