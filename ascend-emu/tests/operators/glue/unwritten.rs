//! Memory that nobody has written: what operators hand on, and what they compute with.

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

fn status() -> i32 {
    unsafe { aclrtSynchronizeStream(null_mut()) }
}

#[test]
fn what_is_moved_is_handed_on_and_what_is_computed_with_is_found() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (x, y, out) = (fresh(8), fresh(8), Tensor::floats(&[8], &[1.0]));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    ok(status());
    ok(call!(aclnnExp(y.input(), out.out())));
    fails(status(), 507_015, &["self bytes 0 to 31", "aclnnExp"]);
    ok(call!(aclnnInplaceAdds(y.in_out(), int(1), int(1))));
    fails(status(), 507_015, &["selfRef bytes 0 to 31"]);
    // What overwrites all of a tensor does not read it, and its copy is written.
    ok(call!(aclnnInplaceOne(x.shared())));
    ok(call!(aclnnInplaceCopy(y.in_out(), x.input())));
    ok(call!(aclnnExp(y.input(), out.out())));
    ok(status());
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
    let part = |offset, count| View {
        shape: vec![count],
        strides: vec![1],
        offset,
        room: 8,
    };
    let exp = |view: View| {
        let out = Tensor::floats(&view.shape, &[0.0]);
        let input = Tensor::over(FLOAT, view, cache.at);
        ok(call!(aclnnExp(input.input(), out.out())));
        status()
    };
    ok(exp(part(1, 2)));
    fails(exp(part(0, 3)), 507_015, &["self bytes 0 to 3"]);
    fails(exp(part(1, 4)), 507_015, &["self bytes 8 to 15"]);
    // Rows of more numbers, as a cache has them.
    let rows = Tensor::over(FLOAT, View::packed(&[4, 2]), cache.at);
    let numbers = Tensor::floats(&[1, 2], &[3.0]);
    let last = Tensor::ints(&[1, 1], &[3]);
    ok(call!(aclnnScatterNdUpdate(
        rows.in_out(),
        last.input(),
        numbers.input()
    )));
    ok(exp(part(6, 2)));
    fails(exp(part(5, 3)), 507_015, &["self bytes 0 to 3"]);
}
