//! Memory that nobody has written: what operators hand on, and what they write.

use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::aclDataType;
use std::ptr::null_mut;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;

fn fresh(count: i64) -> Tensor {
    Tensor::over(FLOAT, View::packed(&[count]), malloc(count as usize * 4))
}

/// The status of a copy of some numbers to the host, of which somebody must have written one.
fn fetch(from: &Tensor, first: usize, count: usize) -> i32 {
    sync(null_mut());
    let (mut numbers, bytes) = ([0f32; 8], count * size_of::<f32>());
    let first = from.at.wrapping_byte_add(first * size_of::<f32>());
    unsafe { aclrtMemcpy(numbers.as_mut_ptr().cast(), bytes, first, bytes, D2H) }
}

#[test]
fn a_copy_hands_on_and_what_is_computed_is_written() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (x, y) = (fresh(8), fresh(8));
    ok(call!(aclnnInplaceOne(y.shared())));
    ok(fetch(&y, 0, 8));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    fails(fetch(&y, 0, 8), 107_000, &["src bytes 0 to 31"]);
    // Rows that are padding are computed with as well.
    ok(call!(aclnnExp(x.input(), y.out())));
    ok(fetch(&y, 0, 8));
    ok(call!(aclnnInplaceOne(x.shared())));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    ok(fetch(&y, 0, 8));
}

#[test]
fn elements_that_are_put_by_index_are_written_and_no_others() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (cache, ones) = (fresh(8), Tensor::floats(&[2], &[1.0]));
    let places = Tensor::ints(&[2], &[1, 2]);
    ok(call!(aclnnIndexPutImpl(
        cache.shared(),
        tensors(&[&places]),
        ones.input(),
        Flag(0),
        Flag(0),
    )));
    ok(fetch(&cache, 1, 1));
    ok(fetch(&cache, 2, 1));
    fails(fetch(&cache, 0, 1), 107_000, &["src bytes 0 to 3"]);
    fails(fetch(&cache, 3, 5), 107_000, &["src bytes 0 to 19"]);
    // Rows of more numbers, as a cache has them.
    let rows = Tensor::over(FLOAT, View::packed(&[4, 2]), cache.at);
    let numbers = Tensor::floats(&[1, 2], &[3.0]);
    let last = Tensor::ints(&[1, 1], &[3]);
    ok(call!(aclnnScatterNdUpdate(
        rows.in_out(),
        last.input(),
        numbers.input()
    )));
    ok(fetch(&cache, 6, 1));
    ok(fetch(&cache, 7, 1));
    fails(fetch(&cache, 3, 3), 107_000, &["src bytes 0 to 11"]);
}
