//! Copies of several ranges by one call.

use super::host_memory::{DEVICE, HOST};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{aclrtMemLocation, aclrtMemcpyBatchAttr};
use std::ffi::c_void;
use std::ptr::null_mut;

/// The attribute of copies to the device, or from it.
fn direction(to_device: bool) -> aclrtMemcpyBatchAttr {
    let place = |type_| aclrtMemLocation { id: 0, type_ };
    let (dst, src) = if to_device { (DEVICE, HOST) } else { (HOST, DEVICE) };
    aclrtMemcpyBatchAttr { dstLoc: place(dst), srcLoc: place(src), rsv: [0; 16] }
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
    let (mut rooms, mut sizes, mut attribute, mut start, mut bad) = ([64], [64], direction(true), 0, 5);
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
    let run = |dsts: [*mut c_void; 2], sizes: [usize; 2], attrs: &[aclrtMemcpyBatchAttr], starts: &[usize]| {
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
        ([at, at], [64, 64], vec![direction(false)], vec![0], 107_000, 0, "dst"),
        ([at, at], [64, 64], vec![up], vec![1], 100_000, none, "attrsIndexes"),
        ([at, at], [64, 64], vec![up, up], vec![0, 0], 100_000, none, "attrsIndexes[1]"),
        ([at, at], [64, 64], vec![up, up], vec![0, 2], 100_000, none, "attrsIndexes[1]"),
        ([at, at], [64, 64], vec![], vec![], 107_000, none, "numAttrs"),
        ([at, at], [64, 64], vec![up; 3], vec![0, 1, 2], 107_000, none, "numAttrs"),
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
