//! BatchMatMul through its C functions, against a product in double precision: strides, broadcast factors, dtypes,
//! empty axes.

use crate::bench::*;
use approx::abs_diff_eq;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclFormat, aclOpExecutor, aclTensor, aclrtStream};
use half::{bf16, f16};
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;
const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const BRAIN: aclDataType = aclDataType::ACL_BF16;
const WORKSPACE: u64 = 16 << 20;

fn size(dtype: aclDataType) -> usize {
    if dtype == FLOAT { 4 } else { 2 }
}

/// Half a unit in the last place, relative.
fn rounding(dtype: aclDataType) -> f64 {
    match dtype {
        HALF => 4.9e-4,
        BRAIN => 4e-3,
        _ => 6e-8,
    }
}

fn bytes_of(dtype: aclDataType, value: f64) -> Vec<u8> {
    match dtype {
        HALF => f16::from_f64(value).to_le_bytes().to_vec(),
        BRAIN => bf16::from_f64(value).to_le_bytes().to_vec(),
        _ => (value as f32).to_le_bytes().to_vec(),
    }
}

fn number_of(dtype: aclDataType, bytes: &[u8]) -> f64 {
    match dtype {
        HALF => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        BRAIN => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        _ => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
    }
}

/// Memory that tensors are views of.
struct Memory {
    dtype: aclDataType,
    elements: usize,
    at: *mut c_void,
}

impl Memory {
    fn of(dtype: aclDataType, values: impl Iterator<Item = f64>) -> Self {
        let bytes: Vec<u8> = values.flat_map(|value| bytes_of(dtype, value)).collect();
        Memory { dtype, elements: bytes.len() / size(dtype), at: upload(&bytes) }
    }

    fn numbers(&self) -> Vec<f64> {
        let bytes = download::<u8>(self.at, self.elements * size(self.dtype));
        let numbers = bytes.chunks(size(self.dtype));
        numbers.map(|bytes| number_of(self.dtype, bytes)).collect()
    }
}

/// A view of memory.
#[derive(Clone, Copy, Debug)]
struct View {
    shape: [i64; 3],
    strides: [i64; 3],
    offset: i64,
}

impl View {
    /// With axes laid out in this order, the last one fastest, each a step apart.
    fn of(shape: [i64; 3], order: [usize; 3], step: i64) -> Self {
        let mut strides = [0; 3];
        let mut next = step;
        for &axis in order.iter().rev() {
            strides[axis] = next;
            next *= shape[axis].max(1);
        }
        View { shape, strides, offset: 0 }
    }

    fn room(&self) -> usize {
        let axes = self.shape.iter().zip(self.strides);
        let last: i64 = axes.map(|(dim, stride)| (dim - 1).max(0) * stride).sum();
        (last + self.offset + 1) as usize
    }

    fn at(&self, place: [i64; 3]) -> usize {
        let axes = place.iter().zip(self.strides);
        (self.offset + axes.map(|(i, stride)| i * stride).sum::<i64>()) as usize
    }

    fn tensor(&self, memory: &Memory) -> *mut aclTensor {
        let storage = [memory.elements as i64];
        unsafe {
            aclCreateTensor(
                self.shape.as_ptr(),
                3,
                memory.dtype,
                self.strides.as_ptr(),
                self.offset,
                aclFormat::ACL_FORMAT_NCL,
                storage.as_ptr(),
                1,
                memory.at,
            )
        }
    }
}

/// A call with its memory: left factors, right factors, products.
struct Call {
    views: [View; 3],
    tensors: [*mut aclTensor; 3],
    workspace: *mut c_void,
}

impl Call {
    fn new(views: [View; 3], memory: [&Memory; 3]) -> Self {
        let tensors = [0, 1, 2].map(|i: usize| views[i].tensor(memory[i]));
        Call { views, tensors, workspace: malloc(WORKSPACE as usize) }
    }

    fn prepare(&self, math: i8) -> (i32, u64, *mut aclOpExecutor) {
        let [left, right, out] = self.tensors;
        let (mut bytes, mut executor) = (1, null_mut());
        let status = unsafe { aclnnBatchMatMulGetWorkspaceSize(left, right, out, math, &mut bytes, &mut executor) };
        (status, bytes, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, bytes, executor) = self.prepare(0);
        ok(status);
        ok(unsafe { aclnnBatchMatMul(self.workspace, bytes, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }

    fn destroy(self) {
        for tensor in self.tensors {
            ok(unsafe { aclDestroyTensor(tensor) });
        }
        free(self.workspace);
    }

    /// The memory of the products is what the definition makes of the factors, and what lies between is as before.
    fn check(&self, left: &[f64], right: &[f64], before: &[f64], after: &[f64], rounding: f64) {
        let [a, b, out] = self.views;
        let [batch, m, n] = out.shape;
        let inner = a.shape[2];
        let entry = |view: &View, at: i64| if view.shape[0] == 1 { 0 } else { at };
        let mut want: Vec<(f64, f64)> = before.iter().map(|&old| (old, 0.0)).collect();
        for i in 0..batch {
            for row in 0..m {
                for column in 0..n {
                    let (mut sum, mut size) = (0.0, 0.0);
                    for k in 0..inner {
                        let x = left[a.at([entry(&a, i), row, k])];
                        let y = right[b.at([entry(&b, i), k, column])];
                        sum += x * y;
                        size += (x * y).abs();
                    }
                    let bound = 1e-6 * size + rounding * sum.abs() + 1e-7;
                    want[out.at([i, row, column])] = (sum, bound);
                }
            }
        }
        for (at, (got, (want, bound))) in after.iter().zip(want).enumerate() {
            assert!(
                abs_diff_eq!(*got, want, epsilon = bound),
                "{at}: {got} is not {want} within {bound} of {:?}",
                self.views
            );
        }
    }
}

fn noise(seed: u64) -> impl Iterator<Item = f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // What every type holds.
        ((state >> 40) % 129) as f64 / 64.0 - 1.0
    })
}

const ORDERS: [[usize; 3]; 4] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn products_are_those_of_the_definition(
        batch in 0i64..4,
        ones: [bool; 2],
        (m, k, n) in (
            prop_oneof![4 => 0i64..9, 1 => 40i64..100],
            prop_oneof![4 => 0i64..40, 1 => 250i64..300],
            prop_oneof![4 => 0i64..40, 1 => 60i64..150],
        ),
        orders in [0usize..4, 0usize..4, 0usize..4],
        steps in [1i64..3, 1i64..3, 1i64..3],
        offset in 0i64..3,
        types in [0usize..3, 0usize..3, 0usize..3],
        seed: u64,
    ) {
        let _bench = Bench::new();
        let stream = stream();
        let types = types.map(|of| [FLOAT, HALF, BRAIN][of]);
        let entries = |one: bool| if one { 1 } else { batch };
        let products = if batch == 0 { i64::from(ones[0] || ones[1]) } else { batch };
        let products = if ones[0] && ones[1] { 1 } else { products };
        let view = |i: usize, shape| View { offset, ..View::of(shape, ORDERS[orders[i]], steps[i]) };
        let views = [
            view(0, [entries(ones[0]), m, k]),
            view(1, [entries(ones[1]), k, n]),
            view(2, [products, m, n]),
        ];
        let memory = [0, 1].map(|i: usize| Memory::of(types[i], noise(seed ^ i as u64).take(views[i].room())));
        let out = Memory::of(types[2], std::iter::repeat_n(-7.5, views[2].room()));
        let (left, right, old) = (memory[0].numbers(), memory[1].numbers(), out.numbers());
        let call = Call::new(views, [&memory[0], &memory[1], &out]);
        let _strict = check_scope(Check::Strict);
        ok(call.run(stream));
        let mut checked = call.views;
        if batch == 0 && products == 1 && !(ones[0] && ones[1]) {
            // Nothing is written where one factor has no matrix.
            checked[2].shape[0] = 0;
        }
        let call = Call { views: checked, ..call };
        call.check(&left, &right, &old, &out.numbers(), rounding(types[2]));
        call.destroy();
        for of in [&memory[0], &memory[1], &out] {
            free(of.at);
        }
        destroy(stream);
    }
}

#[test]
fn factors_are_read_before_views_of_their_memory_are_written() {
    let _bench = Bench::new();
    let stream = stream();
    // Columns of one tensor, [2, 4, 8]: the first four are a factor, the others the products.
    let memory = Memory::of(FLOAT, noise(3).take(2 * 4 * 8));
    let right = Memory::of(FLOAT, noise(4).take(4 * 4));
    let columns = |offset| View { shape: [2, 4, 4], strides: [32, 8, 1], offset };
    let single = View::of([1, 4, 4], [0, 1, 2], 1);
    for to in [4, 0] {
        let old = memory.numbers();
        let call = Call::new([columns(0), single, columns(to)], [&memory, &right, &memory]);
        ok(call.run(stream));
        call.check(&old, &right.numbers(), &old, &memory.numbers(), 1e-6);
    }
}

#[test]
fn outputs_whose_elements_share_memory_are_written_by_one_thread() {
    let _bench = Bench::new();
    let stream = stream();
    let one = Memory::of(FLOAT, std::iter::repeat_n(1.0, 64 * 2));
    let out = Memory::of(FLOAT, std::iter::repeat_n(0.0, 64));
    let rows = View::of([1, 64, 2], [0, 1, 2], 1);
    let right = View::of([1, 2, 64], [0, 1, 2], 1);
    let repeated = View { shape: [1, 64, 64], strides: [0, 0, 1], offset: 0 };
    let call = Call::new([rows, right, repeated], [&one, &one, &out]);
    ok(call.run(stream));
    assert_eq!(out.numbers(), vec![2.0; 64]);
}

#[test]
fn broken_rules_end_with_their_status() {
    let _bench = Bench::new();
    let memory = Memory::of(HALF, noise(1).take(64));
    let float = Memory::of(FLOAT, noise(1).take(64));
    let ints = Memory { dtype: aclDataType::ACL_INT32, ..Memory::of(FLOAT, noise(1).take(64)) };
    let of = |shape| View::of(shape, [0, 1, 2], 1);
    let good = [of([2, 3, 4]), of([2, 4, 5]), of([2, 3, 5])];
    let halves = [&memory; 3];
    let mut call = Call::new(good, halves);
    assert_eq!(call.prepare(0).0, 0);
    assert_eq!(call.prepare(3).0, 0, "without effect on FLOAT16");
    for math in [4, -1, i8::MAX] {
        fails(call.prepare(math).0, 161_002, &["batch_mat_mul.cube_math_type"]);
    }
    let out = std::mem::replace(&mut call.tensors[2], null_mut());
    fails(call.prepare(0).0, 161_001, &["batch_mat_mul.required", "out"]);
    call.tensors[2] = out;

    let wrong = |views, memory| Call::new(views, memory).prepare(0).0;
    let shorter = [good[0], of([2, 5, 4]), good[2]];
    fails(wrong(shorter, halves), 161_002, &["batch_mat_mul.reduced_axis"]);
    let fewer = [of([3, 3, 4]), good[1], of([3, 3, 5])];
    fails(wrong(fewer, halves), 161_002, &["batch_mat_mul.batch"]);
    let flipped = [good[0], good[1], of([2, 5, 3])];
    fails(wrong(flipped, halves), 161_002, &["batch_mat_mul.out_shape"]);
    fails(wrong(good, [&ints; 3]), 161_002, &["batch_mat_mul.dtype", "INT32"]);
    ok(wrong(good, [&memory, &float, &float]));
    assert_eq!(call.run(stream()), 0);
    let of = |finding: &ascend_emu::Finding| finding.message.contains("BatchMatMul");
    assert!(!findings().iter().any(of));
}
