//! Memory that nobody has written: what operators hand on, and what they write.

use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_emu::{Check, Finding, FindingKind, check_scope, findings};
use ascend_sys::bindings::aclDataType;
use std::ptr::null_mut;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;

fn fresh(count: i64) -> Tensor {
    Tensor::over(FLOAT, View::packed(&[count]), malloc(count as usize * 4))
}

/// Whether a copy of some numbers to the host warns that nothing has written any of them.
fn unwritten(from: &Tensor, first: usize, count: usize) -> bool {
    sync(null_mut());
    let (mut numbers, bytes) = ([0f32; 8], count * size_of::<f32>());
    let first = from.at.wrapping_byte_add(first * size_of::<f32>());
    // Other tests of the process copy from elsewhere at the same time.
    let place = format!(" at {first:p},");
    let warnings = || {
        let copies = |of: &Finding| of.kind == FindingKind::UnwrittenCopy;
        let all = findings().into_iter();
        all.filter(|of| copies(of) && of.message.contains(&place)).count()
    };
    let before = warnings();
    ok(unsafe { aclrtMemcpy(numbers.as_mut_ptr().cast(), bytes, first, bytes, D2H) });
    warnings() > before
}

#[test]
fn a_copy_hands_on_and_what_is_computed_is_written() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (x, y) = (fresh(8), fresh(8));
    ok(call!(aclnnInplaceOne(y.shared())));
    assert!(!unwritten(&y, 0, 8));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    assert!(unwritten(&y, 0, 8));
    // Rows that are padding are computed with as well.
    ok(call!(aclnnExp(x.input(), y.out())));
    assert!(!unwritten(&y, 0, 8));
    ok(call!(aclnnInplaceOne(x.shared())));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    assert!(!unwritten(&y, 0, 8));
}

#[test]
fn elements_that_are_put_by_index_are_written_and_no_others() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (cache, ones) = (fresh(8), Tensor::floats(&[2], &[1.0]));
    let places = Tensor::ints(&[2], &[1, 2]);
    ok(call!(aclnnIndexPutImpl(cache.shared(), tensors(&[&places]), ones.input(), Flag(0), Flag(0),)));
    assert!(!unwritten(&cache, 1, 1));
    assert!(!unwritten(&cache, 2, 1));
    assert!(unwritten(&cache, 0, 1));
    assert!(unwritten(&cache, 3, 5));
    // Rows of more numbers, as a cache has them.
    let rows = Tensor::over(FLOAT, View::packed(&[4, 2]), cache.at);
    let numbers = Tensor::floats(&[1, 2], &[3.0]);
    let last = Tensor::ints(&[1, 1], &[3]);
    ok(call!(aclnnScatterNdUpdate(rows.in_out(), last.input(), numbers.input())));
    assert!(!unwritten(&cache, 6, 1));
    assert!(!unwritten(&cache, 7, 1));
    assert!(unwritten(&cache, 3, 3));
    let second = Tensor::ints(&[1], &[2]);
    ok(call!(aclnnInplaceIndexCopy(rows.in_out(), 0, second.input(), numbers.input())));
    assert!(!unwritten(&cache, 4, 2));
    assert!(unwritten(&cache, 3, 1));
}

#[test]
fn outputs_of_more_runs_than_are_followed_are_written() {
    let _bench = Bench::new();
    let count = 70_000;
    let all = fresh(2 * count);
    for offset in [0, 1] {
        let view = View { shape: vec![count], strides: vec![2], offset, room: 2 * count };
        ok(call!(aclnnInplaceOne(Tensor::over(FLOAT, view, all.at).shared())));
    }
    assert!(!unwritten(&all, 2 * count as usize - 8, 8));
}
