//! Reads of memory that nobody has written.

use super::{BLOCK, BLOCKS, Cache, DIM, Decode, HALF, HEADS, PLAIN, ROW, SLOTS};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, allocation_at, check_scope, findings};
use half::f16;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Messages of unwritten reads that name an address within an allocation.
fn told(of: *const c_void) -> Vec<String> {
    let of = allocation_at(of).unwrap();
    let inside = |message: &str| {
        let mut addresses = message.split("0x").skip(1).filter_map(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_hexdigit).collect();
            usize::from_str_radix(&digits, 16).ok()
        });
        addresses.any(|at| (of.base..of.base + of.bytes as usize).contains(&at))
    };
    let all = findings().into_iter();
    let kinds = [FindingKind::UnwrittenRead, FindingKind::UnwrittenCopy];
    let own = all.filter(|f| kinds.contains(&f.kind) && inside(&f.message));
    own.map(|f| f.message).collect()
}

#[test]
fn a_key_length_beyond_the_written_slots() {
    let _bench = Bench::new();
    let cache = Cache::new();
    // Twenty tokens: block 2, and the beginning of block 1.
    cache.write((32..48).chain(16..20));
    let decode = Decode::plain(&cache, &[2, 1]);
    {
        let _strict = check_scope(Check::Strict);
        // The rest of the last block is not read.
        let (status, out) = decode.run(20);
        assert_eq!((status, out[0]), (0, f16::ONE));
        let (status, _) = decode.run(23);
        let tokens = "read of unwritten memory: key block 1, tokens 4 to 6";
        let mend = "whether sequence 0 has 23 keys";
        fails(status, 507_015, &[tokens, "aclnnFusedInferAttentionScore", mend]);
    }
    // In compat the keys read as zeros.
    let before = told(cache.key).len();
    let (status, out) = decode.run(23);
    assert!(status == 0 && out[0] < f16::ONE, "{out:?}");
    assert_eq!(told(cache.key).len(), before + 1);
    assert!(told(cache.value).last().unwrap().starts_with("value block 1, tokens 4 to 6"));
    decode.destroy();
    cache.destroy();
}

#[test]
fn a_page_size_described_wrongly() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let cache = Cache::new();
    cache.write(16..36);
    let decode = Decode::plain(&cache, &[1, 2]);
    assert_eq!(decode.run(20).0, 0);
    decode.destroy();
    let shape = [BLOCKS as i64 / 2, 32, (HEADS * DIM) as i64];
    let decode = Decode::new(&cache, &shape, 32, &[1]);
    let (status, _) = decode.run(20);
    fails(status, 507_015, &["key block 1, tokens 4 to 19", "block size"]);
    decode.destroy();
    cache.destroy();
}

#[test]
fn stale_slots_in_a_captured_graph() {
    let _bench = Bench::new();
    let stream = stream();
    let (cache, mut graph) = (Cache::new(), null_mut());
    cache.write(0..16);
    let decode = Decode::plain(&cache, &[0, 3]);
    unsafe {
        ok(aclmdlRICaptureBegin(stream, RELAXED));
        cache.scatter(stream);
        decode.launch(17, stream);
        ok(aclmdlRICaptureEnd(stream, &mut graph));
    }
    let _strict = check_scope(Check::Strict);
    let replay = || unsafe {
        ok(aclmdlRIExecuteAsync(graph, stream));
        aclrtSynchronizeStream(stream)
    };
    // The slots of the step before: the new token overwrites an old one, and its own slot stays empty.
    cache.set_slots([15]);
    fails(replay(), 507_015, &["key block 3, token 0"]);
    cache.set_slots([48]);
    ok(replay());
    ok(unsafe { aclmdlRIDestroy(graph) });
    decode.destroy();
    cache.destroy();
    destroy(stream);
}

#[test]
fn blocks_of_heads_name_the_same_tokens() {
    let _bench = Bench::new();
    let cache = Cache::new();
    let ones = [f16::ONE; 9 * DIM];
    for at in [cache.key, cache.value] {
        // The first tokens of block 1, of each head.
        for head in 0..HEADS {
            let to = at.wrapping_byte_add((HEADS + head) * BLOCK * DIM * 2);
            let bytes = size_of_val(&ones);
            ok(unsafe { aclrtMemcpy(to, bytes, ones.as_ptr().cast(), bytes, H2D) });
        }
    }
    let shape = [BLOCKS, HEADS, BLOCK, DIM].map(|n| n as i64);
    let decode = Decode::new(&cache, &shape, BLOCK, &[1]);
    let _strict = check_scope(Check::Strict);
    assert_eq!(decode.run(9).0, 0);
    fails(decode.run(12).0, 507_015, &["key block 1, tokens 9 to 11"]);
    decode.destroy();
    cache.destroy();
}

#[test]
fn rows_of_padding_may_be_anything() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let cache = Cache::new();
    let fresh = malloc(SLOTS * ROW);
    let row = [SLOTS as i64, HEADS as i64, DIM as i64];
    let mut padded = Cache { tensors: cache.tensors.clone(), ..cache };
    let old = [padded.tensors[0], padded.tensors[3]];
    padded.tensors[0] = tensor(HALF, &row, fresh);
    padded.tensors[3] = tensor(HALF, &row, fresh);
    let three = [f16::ONE; 3 * HEADS * DIM];
    ok(unsafe { aclrtMemcpy(fresh, SLOTS * ROW, three.as_ptr().cast(), 3 * ROW, H2D) });
    padded.write([17, 18, 19]);
    // Sequences of padding name block 0. A sequence whose keys are there has written some of them.
    let decode = Decode::plain(&padded, &[0, 0]);
    assert_eq!(decode.run(17).0, 0);
    padded.write([0, 1, 2]);
    let status = decode.run(17).0;
    fails(status, 507_015, &["key block 0, tokens 3 to 15"]);
    decode.destroy();
    for tensor in old {
        ok(unsafe { aclDestroyTensor(tensor) });
    }
    free(fresh);
    padded.destroy();
}

#[test]
fn copies_hand_on_what_is_written_and_the_host_gets_nothing_else() {
    let _bench = Bench::new();
    let copy = |to: *mut c_void, from: *const c_void, bytes, kind| unsafe { aclrtMemcpy(to, bytes, from, bytes, kind) };
    let (one, two, mut host) = (malloc(4096), malloc(4096), [0u8; 4096]);
    let mut fetch = |from: *mut c_void, at: usize, bytes| {
        let from = from.wrapping_byte_add(at);
        ok(copy(host.as_mut_ptr().cast(), from, bytes, D2H));
    };
    // A warning in strict mode too: a program may save blocks that hold no token.
    let _strict = check_scope(Check::Strict);
    let written = [7u8; 128];
    let to = one.wrapping_byte_add(64);
    ok(copy(to, written.as_ptr().cast(), 128, H2D));
    ok(copy(two, one, 4096, D2D));
    fetch(two, 0, 64);
    fetch(two, 192, 4096 - 192);
    let said = told(two);
    assert_eq!(said.len(), 2);
    for part in ["src bytes 0 to 63", "a copy to the host", "write them first"] {
        assert!(said[0].contains(part), "{said:?}");
    }
    // The rest of a block may come along.
    fetch(two, 64, 128);
    fetch(two, 63, 2);
    fetch(two, 0, 4096);
    // What was written before is gone where nothing was copied over it.
    ok(unsafe { aclrtMemset(two, 4096, 1, 4096) });
    ok(copy(two, one, 100, D2D));
    fetch(two, 64, 4096 - 64);
    assert_eq!(told(two).len(), 2);
    fetch(two, 0, 64);
    assert_eq!((told(one).len(), told(two).len()), (0, 3));
    // Handed out anew, memory is unwritten again.
    free(one);
    let again = malloc(4096);
    fetch(again, 0, 1);
    assert_eq!(told(again).len(), 1);
    free(again);
    free(two);
}

#[test]
fn a_query_that_nobody_wrote() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let cache = Cache::new();
    cache.write(0..16);
    let query = malloc(HEADS * DIM * size_of::<f16>());
    let decode = Decode::of_query(query, &cache, &PLAIN, BLOCK, &[0]);
    let (status, _) = decode.run(16);
    let bytes = format!("query bytes 0 to {}", HEADS * DIM * size_of::<f16>() - 1);
    fails(status, 507_015, &["read of unwritten memory", &bytes]);
    // One of which some bytes were written may have padding, and one without keys computes nothing.
    ok(unsafe { aclrtMemset(query, 2, 0, 2) });
    assert_eq!(decode.run(16).0, 0);
    decode.destroy();
    let query = malloc(HEADS * DIM * size_of::<f16>());
    let decode = Decode::of_query(query, &cache, &PLAIN, BLOCK, &[0]);
    assert_eq!(decode.run(0).0, 0);
    decode.destroy();
    cache.destroy();
}

#[test]
fn copies_on_a_stream_warn_as_well() {
    let _bench = Bench::new();
    let stream = stream();
    let (at, mut pinned) = (malloc(4096), null_mut());
    ok(unsafe { aclrtMallocHost(&mut pinned, 4096) });
    let _strict = check_scope(Check::Strict);
    ok(unsafe { aclrtMemcpyAsync(pinned, 4096, at, 4096, D2H, stream) });
    sync(stream);
    assert!(told(at).concat().contains("src bytes 0 to 4095"));
    // Host memory is the program's to write, and what is copied from there is written.
    ok(unsafe { aclrtMemcpyAsync(at, 4096, pinned, 4096, H2D, stream) });
    ok(unsafe { aclrtMemcpyAsync(pinned, 4096, at, 4096, D2H, stream) });
    sync(stream);
    assert_eq!(told(at).len(), 1);
    ok(unsafe { aclrtFreeHost(pinned) });
    free(at);
    destroy(stream);
}

#[test]
fn memory_is_poisoned_in_strict_mode_and_zero_otherwise() {
    let _bench = Bench::new();
    // Memory as long as the file of poison is not filled, but mapped.
    for bytes in [1000, 5 << 20, (40 << 20) + 12_345] {
        let poisoned = {
            let _strict = check_scope(Check::Strict);
            malloc(bytes)
        };
        let all = download::<u8>(poisoned, bytes);
        assert!(all.iter().all(|&byte| byte == 0xff));
        ok(unsafe { aclrtMemset(poisoned, bytes, 3, bytes - 1) });
        let all = download::<u8>(poisoned, bytes);
        assert!(all[..bytes - 1].iter().all(|&byte| byte == 3) && all[bytes - 1] == 0xff);
        free(poisoned);
        let plain = malloc(bytes);
        assert!(download::<u8>(plain, bytes).iter().all(|&byte| byte == 0));
        free(plain);
    }
}
