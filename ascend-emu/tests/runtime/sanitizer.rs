//! Each kind of misuse is named: a warning and the next best thing in compat, an error in strict.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, allocation_at, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclrtStream};
use half::f16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Messages of a kind that name an address.
fn found(kind: FindingKind, at: *const c_void) -> Vec<String> {
    let address = format!("{:#x}", at.addr());
    findings().into_iter().filter(|f| f.kind == kind && f.message.contains(&address)).map(|f| f.message).collect()
}

#[test]
fn freeing_memory_in_use() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let call = Call::new(1);
    gate.hold(stream);
    call.run(stream);
    {
        let _strict = check_scope(Check::Strict);
        fails(unsafe { aclrtFree(call.q) }, 207_002, &["query", "aclnnFusedInferAttentionScore", "nothing has waited"]);
        assert!(allocation_at(call.q).is_some());
    }
    // In compat the memory goes when the work is over: the result is right all the same.
    free(call.q);
    assert!(allocation_at(call.q).is_none());
    assert_eq!(found(FindingKind::FreeInUse, call.q).len(), 2);
    gate.open();
    sync(stream);
    call.check(1);
    for at in [call.k, call.v, call.out, call.lse, call.workspace] {
        free(at);
        assert!(found(FindingKind::FreeInUse, at).is_empty());
    }
    gate.destroy();
    destroy(stream);
}

#[test]
fn freeing_after_a_wait_of_any_kind_is_right() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (one, two, event) = (stream(), stream(), event());
    let waits: [&dyn Fn(); 5] = [
        &|| sync(one),
        &|| unsafe {
            ok(aclrtRecordEvent(event, one));
            ok(aclrtSynchronizeEvent(event));
        },
        &|| unsafe {
            // Through another stream.
            ok(aclrtRecordEvent(event, one));
            ok(aclrtStreamWaitEvent(two, event));
            sync(two);
        },
        &|| ok(unsafe { aclrtSynchronizeDevice() }),
        &|| loop {
            let mut status = ascend_sys::bindings::aclrtStreamStatus(9);
            ok(unsafe { aclrtStreamQuery(one, &mut status) });
            if status.0 == 0 {
                break;
            }
        },
    ];
    for wait in waits {
        let at = malloc(64);
        ok(unsafe { aclrtMemsetAsync(at, 64, 1, 64, one) });
        wait();
        free(at);
    }
    ok(unsafe { aclrtDestroyEvent(event) });
    destroy(one);
    destroy(two);
}

#[test]
fn launching_with_freed_memory() {
    let _bench = Bench::new();
    let call = Call::new(2);
    let freed = malloc(64);
    free(freed);
    let executor = call.prepare();
    unsafe {
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], freed));
    }
    {
        let _strict = check_scope(Check::Strict);
        fails(call.launch(executor, null_mut()), 361_001, &["use after free", "query"]);
        sync(null_mut());
    }
    ok(call.launch(executor, null_mut()));
    fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &["query", "memory that was freed"]);
    assert!(call.is_poisoned());
    // The device is as good as before, and the fault is told once.
    unsafe {
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], call.q));
        ok(call.launch(executor, null_mut()));
        sync(null_mut());
        ok(aclDestroyAclOpExecutor(executor));
    }
    call.check(2);
    call.destroy();
}

#[test]
fn tensors_past_their_memory() {
    let _bench = Bench::new();
    let call = Call::new(3);
    let values = numbers(3, S * D);
    let short = malloc(S * D);
    let bytes = S * D * 2;
    ok(unsafe { aclrtMemcpy(short, bytes, values.as_ptr().cast(), bytes, H2D) });
    let executor = call.prepare();
    unsafe {
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(aclSetInputTensorAddr(executor, 0, call.tensors[0], short));
    }
    {
        let _strict = check_scope(Check::Strict);
        fails(call.launch(executor, null_mut()), 361_001, &["out of bounds", "query", "64 bytes past the end"]);
    }
    // Allocations are rounded up, so hardware gets away with it.
    ok(call.launch(executor, null_mut()));
    sync(null_mut());
    call.check(3);
    assert!(!found(FindingKind::OutOfBounds, short).is_empty());
    // Not beyond the page after the last one.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let far = short.wrapping_byte_add(2 * page - 64);
    ok(unsafe { aclSetInputTensorAddr(executor, 0, call.tensors[0], far) });
    ok(call.launch(executor, null_mut()));
    fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &["query"]);
    ok(unsafe { aclDestroyAclOpExecutor(executor) });
    free(short);
    call.destroy();
}

#[test]
fn reading_a_result_before_it_is_there() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let call = Call::new(4);
    gate.hold(stream);
    call.run(stream);
    let mut host = [0u16; S * D];
    let bytes = S * D * 2;
    let mut read = || unsafe { aclrtMemcpy(host.as_mut_ptr().cast(), bytes, call.out, bytes, D2H) };
    {
        let _strict = check_scope(Check::Strict);
        fails(read(), 107_000, &["host access without synchronisation", "attentionOut"]);
        // Reading what is only read is fine, writing it is not.
        assert_eq!(download::<half::f16>(call.q, 4), numbers(4, 4));
        fails(unsafe { aclrtMemset(call.q, 8, 0, 8) }, 107_000, &["devPtr", "query"]);
    }
    ok(read());
    assert_eq!(host, [POISON; S * D]);
    assert_eq!(found(FindingKind::HostRace, call.out).len(), 2);
    gate.open();
    sync(stream);
    call.check(4);
    gate.destroy();
    destroy(stream);
    call.destroy();
}

#[test]
fn a_missing_wait_is_found_even_if_the_work_is_over() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (one, two) = (stream(), stream());
    let at = malloc(64);
    unsafe {
        ok(aclrtMemsetAsync(at, 64, 1, 64, one));
        std::thread::sleep(std::time::Duration::from_millis(30));
        fails(aclrtMemsetAsync(at, 64, 2, 64, two), 107_000, &["race between streams"]);
    }
    sync(one);
    ok(unsafe { aclrtMemsetAsync(at, 64, 2, 64, two) });
    sync(two);
    free(at);
    destroy(one);
    destroy(two);
}

#[test]
fn streams_that_race() {
    let _bench = Bench::new();
    let (one, two, event, gate) = (stream(), stream(), event(), Gate::new());
    let call = Call::new(5);
    let executor = call.prepare();
    ok(unsafe { aclSetAclOpExecutorRepeatable(executor) });
    gate.hold(one);
    ok(call.launch(executor, one));
    {
        let _strict = check_scope(Check::Strict);
        fails(call.launch(executor, two), 361_001, &["race between streams", "workspace"]);
        // Ordered by an event, it is none.
        unsafe {
            ok(aclrtRecordEvent(event, one));
            ok(aclrtStreamWaitEvent(two, event));
        }
        ok(call.launch(executor, two));
        // But the way back is open.
        fails(call.launch(executor, one), 361_001, &["race"]);
    }
    ok(call.launch(executor, one));
    assert!(!found(FindingKind::StreamRace, call.out).is_empty());
    gate.open();
    ok(unsafe { aclrtSynchronizeDevice() });
    call.check(5);
    unsafe {
        ok(aclDestroyAclOpExecutor(executor));
        ok(aclrtDestroyEvent(event));
    }
    gate.destroy();
    destroy(one);
    destroy(two);
    call.destroy();
}

#[test]
fn parts_of_one_allocation_are_told_apart() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (one, two) = (stream(), stream());
    let pool = malloc(1 << 16);
    for i in 0..64usize {
        let part = pool.wrapping_byte_add(i << 10);
        let stream = if i % 2 == 0 { one } else { two };
        ok(unsafe { aclrtMemsetAsync(part, 1 << 10, i as i32, 1 << 10, stream) });
    }
    ok(unsafe { aclrtSynchronizeDevice() });
    let bytes: Vec<u8> = download(pool, 1 << 16);
    assert!(bytes.iter().enumerate().all(|(i, &b)| usize::from(b) == i >> 10));
    free(pool);
    destroy(one);
    destroy(two);
}

#[test]
fn waiting_for_an_event_never_recorded() {
    let _bench = Bench::new();
    let event = event();
    let before = findings().len();
    ok(unsafe { aclrtSynchronizeEvent(event) });
    assert!(findings()[before..].iter().any(|f| f.kind == FindingKind::UnrecordedEvent));
    let _strict = check_scope(Check::Strict);
    fails(unsafe { aclrtSynchronizeEvent(event) }, 107_000, &["never recorded"]);
    ok(unsafe { aclrtDestroyEvent(event) });
}

#[test]
fn pinned_memory_freed_under_a_copy() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let mut pinned = null_mut();
    ok(unsafe { aclrtMallocHost(&mut pinned, 4096) });
    unsafe { pinned.cast::<u8>().write_bytes(3, 4096) };
    let at = malloc(4096);
    gate.hold(stream);
    unsafe {
        ok(aclrtMemcpyAsync(at, 4096, pinned, 4096, H2D, stream));
        ok(aclrtFreeHost(pinned));
    }
    gate.open();
    sync(stream);
    assert_eq!(download::<u8>(at, 4096), [3; 4096]);
    assert_eq!(found(FindingKind::FreeInUse, pinned).len(), 1);
    free(at);
    gate.destroy();
    destroy(stream);
}

/// A single query row over a paged cache of two blocks of 16 tokens, of which it sees 20; every value is 8.
fn decode_paged(stream: aclrtStream, table: [i32; 2]) -> Vec<f16> {
    let half = |value: f32, count: usize| upload(&vec![f16::from_f32(value); count]);
    let (query, cache, ids) = (half(0.0, 16), half(8.0, 2 * 16 * 16), upload(&table));
    let (out, workspace) = (half(0.0, 16), malloc(16 << 20));
    let row = |at| tensor(aclDataType::ACL_FLOAT16, &[1, 1, 1, 16], at);
    let blocks = || tensor(aclDataType::ACL_FLOAT16, &[2, 16, 16], cache);
    let table = tensor(aclDataType::ACL_INT32, &[1, 2], ids);
    let (query_tensor, out_tensor) = (row(query), row(out));
    let (key, value) = (list(&[blocks()]), list(&[blocks()]));
    let (mut bytes, mut executor) = (0, null_mut());
    unsafe {
        let lengths = aclCreateIntArray([20i64].as_ptr(), 1);
        ok(aclnnFusedInferAttentionScoreGetWorkspaceSize(
            query_tensor,
            key,
            value,
            null(),
            null(),
            null(),
            lengths,
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            table,
            null(),
            null(),
            1,
            1.0,
            i64::from(i32::MAX),
            i64::from(i32::MAX),
            c"BNSD".as_ptr().cast_mut(),
            1,
            0,
            0,
            16,
            0,
            false,
            out_tensor,
            null(),
            &mut bytes,
            &mut executor,
        ));
        ok(aclnnFusedInferAttentionScore(workspace, bytes, executor, stream));
        let status = aclrtSynchronizeStream(stream);
        let got = download(out, 16);
        ok(aclDestroyIntArray(lengths));
        for tensor in [query_tensor, table, out_tensor] {
            ok(aclDestroyTensor(tensor));
        }
        ok(aclDestroyTensorList(key));
        ok(aclDestroyTensorList(value));
        for at in [query, cache, ids, out, workspace] {
            free(at);
        }
        if status != 0 {
            fails(status, 507_015, &["block table entry [0, 1] names block 2 of 2"]);
            assert!(got.iter().all(|&value| value == f16::ZERO));
        }
        got
    }
}

#[test]
fn a_block_id_out_of_range() {
    let _bench = Bench::new();
    let stream = stream();
    let count = || {
        let text = "block table entry [0, 1] names block 2 of 2";
        let of =
            |finding: &&ascend_emu::Finding| finding.kind == FindingKind::BlockTable && finding.message.contains(text);
        findings().iter().filter(of).count()
    };
    let all = |got: Vec<f16>, want: f32| got.iter().all(|value| value.to_f32() == want);
    assert!(all(decode_paged(stream, [1, 0]), 8.0));
    assert_eq!(count(), 0);
    // In compat the four keys of that block count as zeros: 16 * 8 / 20.
    assert!(all(decode_paged(stream, [1, 2]), f16::from_f32(6.4).to_f32()));
    assert_eq!(count(), 1);
    let _strict = check_scope(Check::Strict);
    assert!(all(decode_paged(stream, [1, 2]), 0.0));
    assert_eq!(count(), 2);
    assert!(all(decode_paged(stream, [0, 1]), 8.0));
    destroy(stream);
}
