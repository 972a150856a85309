//! Launches that find no host memory, and in-place updates of tensors whose elements share memory.

use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use std::ptr::null_mut;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;

/// A tensor whose elements are all the one that its memory has.
fn repeated(dtype: aclDataType, shape: &[i64], value: f64) -> Tensor {
    let view = View { shape: shape.to_vec(), strides: vec![0; shape.len()], offset: 0, room: 1 };
    Tensor::new(dtype, view, &[value])
}

/// Waits for a launch that has found no memory.
#[track_caller]
fn without_memory(operator: &str, status: i32) {
    assert_eq!(status, 0, "{operator}: {}", message());
    let waited = unsafe { ascend_emu::abi::aclrtSynchronizeStream(null_mut()) };
    fails(waited, 507_015, &[operator, "no host memory for "]);
}

#[test]
fn launches_without_host_memory_fail_and_the_process_goes_on() {
    const NAME: &str = "glue::memory::launches_without_host_memory_fail_and_the_process_goes_on";
    with_little_memory(NAME, || {
        let _bench = Bench::new();
        const N: i64 = 1 << 31;
        let long = repeated(FLOAT, &[N], 1.0);
        let places = repeated(aclDataType::ACL_INT64, &[N], 0.0);
        let truths = repeated(aclDataType::ACL_BOOL, &[N], 1.0);
        let count = repeated(aclDataType::ACL_INT64, &[1], N as f64);
        let ones = repeated(aclDataType::ACL_INT64, &[N], 1.0);
        let rows = repeated(FLOAT, &[N, 1], 1.0);
        let row_places = repeated(aclDataType::ACL_INT64, &[N, 1], 0.0);
        let one = Tensor::floats(&[1], &[1.0]);
        let (a, b) = (repeated(FLOAT, &[60_000, 1], 1.0), repeated(FLOAT, &[1, 60_000], 1.0));
        let product = repeated(FLOAT, &[60_000, 60_000], 0.0);
        let dims = || ints(&[1]);
        macro_rules! all {
            ($($operator:ident($($argument:expr),*);)*) => {$(
                without_memory(stringify!($operator), call!($operator($($argument),*)));
            )*};
        }
        all! {
            aclnnMatmul(a.input(), b.input(), product.out(), 0);
            aclnnAddmm(one.input(), a.input(), b.input(), int(0), int(1), product.out(), 0);
            aclnnRepeatInterleave(long.input(), ones.input(), N, long.out());
            aclnnRepeatInterleaveWithDim(long.input(), ones.input(), 0, N, long.out());
            aclnnRepeatInterleaveInt(long.input(), 1, N, long.out());
            aclnnRepeatInterleaveIntWithDim(long.input(), 1, 0, N, long.out());
            aclnnRepeatInterleaveTensor(count.input(), N, places.out());
            aclnnReduceSum(rows.input(), dims(), Flag(0), Type(FLOAT), long.out());
            aclnnSoftmax(rows.input(), 1, rows.out());
            aclnnCumsum(rows.input(), 1, Type(FLOAT), rows.out());
            aclnnLogSumExp(rows.input(), dims(), Flag(0), long.out());
            aclnnSort(rows.input(), Flag(1), 1, Flag(0), rows.out(), row_places.out());
            aclnnSort(long.input(), Flag(1), 0, Flag(0), long.out(), places.out());
            aclnnArgMax(rows.input(), 1, Flag(0), places.out());
            aclnnIndexSelect(one.input(), 0, places.input(), long.out());
            aclnnMaskedSelect(long.input(), truths.input(), long.out());
            aclnnRotaryPositionEmbedding(
                repeated(FLOAT, &[N / 2, 2], 1.0).input(), one.input(), one.input(), 0,
                repeated(FLOAT, &[N / 2, 2], 1.0).out()
            );
        }
        // The device goes on.
        let sum = Tensor::floats(&[1], &[0.0]);
        ok(call!(aclnnAdds(one.input(), int(1), int(1), sum.out())));
        assert_eq!(sum.values(), [2.0]);
    });
}

#[test]
fn updates_in_place_refuse_elements_that_share_memory() {
    let _bench = Bench::new();
    let repeated = |shape: &[i64]| repeated(FLOAT, shape, 1.0);
    let (rows, other) = (repeated(&[2, 3]), Tensor::floats(&[2, 3], &[1.0]));
    let allowed = "one place in memory for each element";
    fails(
        call!(aclnnInplaceAdd(rows.in_out(), other.input(), int(1))),
        161_002,
        &["aclnnInplaceAdd: selfRef: given FLOAT [2, 3] strides [0, 0]", allowed],
    );
    fails(call!(aclnnInplaceCopy(rows.in_out(), other.input())), 161_002, &["aclnnInplaceCopy: selfRef", allowed]);
    fails(call!(aclnnInplaceNormal(rows.in_out(), 0.0, 1.0, 1, 0)), 161_002, &["aclnnInplaceNormal: selfRef", allowed]);
    // PyTorch fills such tensors, and has no objection to axes that do not repeat anything.
    ok(call!(aclnnInplaceFillScalar(rows.shared(), int(3))));
    assert_eq!(rows.values(), [3.0; 6]);
    for shape in [&[1, 1][..], &[0, 3], &[]] {
        let single = repeated(shape);
        ok(call!(aclnnInplaceMuls(single.in_out(), int(2))));
        assert!(single.values().iter().all(|&value| value == 2.0));
    }
    let apart = View { shape: vec![2, 3], strides: vec![1, 2], offset: 0, room: 6 };
    let apart = Tensor::new(FLOAT, apart, &[1.0]);
    ok(call!(aclnnInplaceAdd(apart.in_out(), other.input(), int(1))));
    assert_eq!(apart.values(), [2.0; 6]);
}
