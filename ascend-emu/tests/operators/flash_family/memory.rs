//! Launches of tensors with stride 0, small and of many elements, that find no host memory for what they copy.

use super::call::{OnDevice, PhaseTwo};
use super::score;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_spec::ops::flash_attention_score::{Arguments, Version};
use ascend_spec::{
    DType, Dims, TensorDesc, arguments_of_version, attention_update_arguments, ops::attention_update as update,
};
use ascend_sys::bindings::aclOpExecutor;
use std::ffi::c_void;
use std::ptr::null_mut;

/// A tensor whose elements are all the first of its memory.
fn repeated(dtype: DType, shape: &[i64]) -> TensorDesc {
    let strides = Dims::new(&vec![0; shape.len()]).unwrap();
    let desc = TensorDesc::contiguous(dtype, shape).unwrap();
    TensorDesc { strides, ..desc }
}

/// Launches what phase one has taken; the status of the wait for it.
fn launched((status, (bytes, executor)): (i32, (u64, *mut aclOpExecutor)), two: PhaseTwo) -> i32 {
    ok(status);
    let workspace = malloc(bytes as usize);
    ok(unsafe { two(workspace, bytes, executor, null_mut()) });
    let synced = unsafe { aclrtSynchronizeStream(null_mut()) };
    free(workspace);
    synced
}

/// FlashAttentionScore of so many heads, rows and keys, in tensors of one element, but for what is changed.
fn attend(
    [n, s, keys]: [i64; 3],
    at: &dyn Fn() -> *mut c_void,
    change: impl FnOnce(&mut Arguments<TensorDesc>),
) -> (score::Prepared, PhaseTwo) {
    let half = |rows| Some(repeated(DType::Float16, &[1, n, rows, 16]));
    let softmax = TensorDesc::contiguous(DType::Float, &[1, n, s, 8]);
    let mut call = Arguments {
        query: half(s),
        key: half(keys),
        value: half(keys),
        softmax_max: softmax,
        softmax_sum: softmax,
        attention_out: half(s),
        num_heads: n,
        input_layout: Some("BNSD".into()),
        ..Arguments::default()
    };
    change(&mut call);
    let placed = call.map(|_, desc| OnDevice::described(desc, at()));
    score::prepare(Version::V1, &placed)
}

#[test]
fn launches_without_host_memory_fail_and_the_process_goes_on() {
    const NAME: &str = "flash_family::memory::launches_without_host_memory_fail_and_the_process_goes_on";
    with_little_memory(NAME, || {
        let _bench = Bench::new();
        // Softmax outputs have their own memory; everything else is its first element.
        let (memory, next) = (malloc(1 << 28), std::cell::Cell::new(0));
        let at = || {
            next.set((next.get() + 1) % 16);
            memory.wrapping_byte_add(next.get() << 24)
        };
        let none = |status: i32| fails(status, 507_015, &["no host memory for "]);
        let (prepared, two) = attend([1, 1 << 15, 1 << 15], &at, |call| {
            call.atten_mask = Some(repeated(DType::Bool, &[1, 1, 1 << 15, 1 << 15]));
            call.sparse_mode = 1;
        });
        none(launched(prepared, two));
        let (prepared, two) = attend([64, 1 << 18, 1], &at, |call| {
            let softmax = Some(repeated(DType::Float, &[1, 64, 1 << 18, 8]));
            (call.softmax_max, call.softmax_sum) = (softmax, softmax);
        });
        none(launched(prepared, two));

        const ROWS: i64 = 1 << 24;
        let out = TensorDesc::contiguous(DType::Float16, &[ROWS, 8]);
        let merge = update::Arguments {
            lse: vec![repeated(DType::Float, &[ROWS])],
            local_out: vec![repeated(DType::Float16, &[ROWS, 8])],
            out,
            ..update::Arguments::default()
        };
        let whole = malloc(16 * ROWS as usize);
        let arguments = &merge.map(|argument, desc| {
            let at = if argument.is_output() { whole } else { at() };
            OnDevice::described(desc, at)
        });
        let prepared = attention_update_arguments! { arguments_of_version {
            1 phase_one { aclnnAttentionUpdateGetWorkspaceSize, arguments }
        } };
        none(launched(prepared, aclnnAttentionUpdate));
        free(whole);

        // The device goes on.
        let (prepared, two) = attend([1, 2, 3], &at, |_| {});
        ok(launched(prepared, two));
        free(memory);
    });
}
