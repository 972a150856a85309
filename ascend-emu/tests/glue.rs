//! The small operators around attention, against loops over single elements.

#![cfg(feature = "glue")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to locals"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use ascend_emu::abi::*;
use ascend_emu::glue::{self, *};
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::{aclDataType, aclFormat, aclOpExecutor, aclTensor};
use bench::*;
use half::{bf16, f16};
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Prepares and launches an operator on the default stream; the status of what fails first.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let (mut bytes, mut executor) = (1, null_mut::<aclOpExecutor>());
        let mut status = unsafe {
            glue::$name::prepare($($argument,)* &raw mut bytes, &raw mut executor)
        };
        if status == 0 {
            assert_eq!(bytes, 0);
            status = unsafe { glue::$name::launch(null_mut(), bytes, executor, null_mut()) };
        }
        status
    }};
}

const TYPES: [aclDataType; 10] = [
    aclDataType::ACL_FLOAT,
    aclDataType::ACL_FLOAT16,
    aclDataType::ACL_BF16,
    aclDataType::ACL_DOUBLE,
    aclDataType::ACL_INT8,
    aclDataType::ACL_UINT8,
    aclDataType::ACL_INT16,
    aclDataType::ACL_INT32,
    aclDataType::ACL_INT64,
    aclDataType::ACL_BOOL,
];

/// Bytes of a number of a type, converted as the operators promise: saturating from real numbers.
fn encode(dtype: aclDataType, value: f64) -> Vec<u8> {
    match dtype {
        aclDataType::ACL_FLOAT => (value as f32).to_le_bytes().to_vec(),
        aclDataType::ACL_FLOAT16 => f16::from_f64(value).to_le_bytes().to_vec(),
        aclDataType::ACL_BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        aclDataType::ACL_DOUBLE => value.to_le_bytes().to_vec(),
        aclDataType::ACL_INT8 => (value as i8).to_le_bytes().to_vec(),
        aclDataType::ACL_UINT8 => (value as u8).to_le_bytes().to_vec(),
        aclDataType::ACL_INT16 => (value as i16).to_le_bytes().to_vec(),
        aclDataType::ACL_INT32 => (value as i32).to_le_bytes().to_vec(),
        aclDataType::ACL_INT64 => (value as i64).to_le_bytes().to_vec(),
        aclDataType::ACL_BOOL => vec![u8::from(value != 0.0)],
        other => unreachable!("{other:?}"),
    }
}

fn decode(dtype: aclDataType, bytes: &[u8]) -> f64 {
    match dtype {
        aclDataType::ACL_FLOAT => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_FLOAT16 => f16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_DOUBLE => f64::from_le_bytes(bytes.try_into().unwrap()),
        aclDataType::ACL_INT8 => (bytes[0] as i8).into(),
        aclDataType::ACL_UINT8 => bytes[0].into(),
        aclDataType::ACL_INT16 => i16::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_INT32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
        aclDataType::ACL_INT64 => i64::from_le_bytes(bytes.try_into().unwrap()) as f64,
        aclDataType::ACL_BOOL => u8::from(bytes[0] != 0).into(),
        other => unreachable!("{other:?}"),
    }
}

fn size(dtype: aclDataType) -> usize {
    encode(dtype, 0.0).len()
}

/// Which elements of a buffer a tensor shows.
#[derive(Clone, Debug)]
struct View {
    shape: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    /// Elements of the whole buffer.
    room: i64,
}

impl View {
    fn packed(shape: &[i64]) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis].max(1);
        }
        View {
            shape: shape.to_vec(),
            strides,
            offset: 0,
            room: shape.iter().product::<i64>().max(1),
        }
    }

    /// Places in the buffer, the last axis fastest.
    fn places(&self) -> Vec<i64> {
        let mut places = vec![self.offset];
        for (&dim, &stride) in self.shape.iter().zip(&self.strides) {
            places = places
                .iter()
                .flat_map(|place| (0..dim).map(move |i| place + i * stride))
                .collect();
        }
        places
    }

    fn count(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

/// A tensor on the device with its buffer.
struct Tensor {
    dtype: aclDataType,
    view: View,
    at: *mut c_void,
    handle: *mut aclTensor,
}

impl Tensor {
    /// A buffer of `values`, repeated as often as needed.
    fn new(dtype: aclDataType, view: View, values: &[f64]) -> Self {
        let bytes: Vec<u8> = (0..view.room as usize)
            .flat_map(|i| encode(dtype, values[i % values.len()]))
            .collect();
        let at = upload(&bytes);
        Self::over(dtype, view, at)
    }

    /// Another view of memory.
    fn over(dtype: aclDataType, view: View, at: *mut c_void) -> Self {
        let rank = view.shape.len() as u64;
        let handle = unsafe {
            aclCreateTensor(
                view.shape.as_ptr(),
                rank,
                dtype,
                view.strides.as_ptr(),
                view.offset,
                aclFormat::ACL_FORMAT_ND,
                &view.room,
                1,
                at,
            )
        };
        assert!(!handle.is_null(), "{}", message());
        Tensor {
            dtype,
            view,
            at,
            handle,
        }
    }

    fn packed(dtype: aclDataType, shape: &[i64], values: &[f64]) -> Self {
        Self::new(dtype, View::packed(shape), values)
    }

    fn ints(shape: &[i64], values: &[i64]) -> Self {
        let values: Vec<f64> = values.iter().map(|&value| value as f64).collect();
        Self::packed(aclDataType::ACL_INT64, shape, &values)
    }

    fn floats(shape: &[i64], values: &[f64]) -> Self {
        Self::packed(aclDataType::ACL_FLOAT, shape, values)
    }

    /// The whole buffer.
    fn buffer(&self) -> Vec<f64> {
        sync(null_mut());
        let size = size(self.dtype);
        let bytes: Vec<u8> = download(self.at, self.view.room as usize * size);
        bytes
            .chunks(size)
            .map(|one| decode(self.dtype, one))
            .collect()
    }

    /// What the view shows, the last axis fastest.
    fn values(&self) -> Vec<f64> {
        let buffer = self.buffer();
        let places = self.view.places();
        places.iter().map(|&place| buffer[place as usize]).collect()
    }

    /// What the view shows after broadcasting.
    fn broadcast(&self, shape: &[i64]) -> Vec<f64> {
        let skipped = shape.len() - self.view.shape.len();
        let strides = (0..shape.len()).map(|axis| match axis.checked_sub(skipped) {
            Some(own) if self.view.shape[own] == shape[axis] => self.view.strides[own],
            _ => 0,
        });
        let view = View {
            shape: shape.to_vec(),
            strides: strides.collect(),
            ..self.view.clone()
        };
        let buffer = self.buffer();
        view.places()
            .iter()
            .map(|&place| buffer[place as usize])
            .collect()
    }

    fn input(&self) -> In {
        In(self.handle)
    }

    fn out(&self) -> Out {
        Out(self.handle)
    }

    fn in_out(&self) -> InOut {
        InOut(self.handle)
    }
}

fn scalar<T>(dtype: aclDataType, mut value: T) -> Scalar {
    let scalar = unsafe { aclCreateScalar((&raw mut value).cast(), dtype) };
    assert!(!scalar.is_null(), "{}", message());
    Scalar(scalar)
}

fn real(value: f64) -> Scalar {
    scalar(aclDataType::ACL_DOUBLE, value)
}

fn int(value: i64) -> Scalar {
    scalar(aclDataType::ACL_INT64, value)
}

fn ints(values: &[i64]) -> Ints {
    Ints(unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) })
}

fn tensors(members: &[&Tensor]) -> Ins {
    let handles: Vec<*mut aclTensor> = members.iter().map(|tensor| tensor.handle).collect();
    Ins(list(&handles))
}

/// A view of a given shape: axes in any order of memory, with gaps, at an offset, backwards, and repeated if asked for.
fn view_of(shape: Vec<i64>, repeated: bool) -> impl Strategy<Value = View> {
    let rank = shape.len();
    let axes: Vec<usize> = (0..rank).collect();
    (
        Just(axes).prop_shuffle(),
        prop::collection::vec((1..3i64, 0..8u8), rank),
        0..5i64,
    )
        .prop_map(move |(order, gaps, offset)| {
            let mut strides = vec![0; rank];
            let (mut step, mut offset) = (1, offset);
            for &axis in &order {
                let (gap, kind) = gaps[axis];
                if kind == 0 && repeated {
                    continue;
                }
                strides[axis] = step * gap;
                let reach = strides[axis] * (shape[axis] - 1).max(0);
                if kind == 1 {
                    offset += reach;
                    strides[axis] = -strides[axis];
                }
                step = strides[axis].abs() * shape[axis].max(1);
            }
            let highest: i64 = shape
                .iter()
                .zip(&strides)
                .map(|(&dim, &stride)| ((dim - 1).max(0) * stride).max(0))
                .sum();
            View {
                shape: shape.clone(),
                strides,
                offset,
                room: offset + highest + 1,
            }
        })
}

fn shape() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(prop_oneof![9 => 1..5i64, 1 => Just(0)], 0..5)
}

/// A shape that broadcasts to another: axes of size 1, axes left out in front.
fn narrower(shape: Vec<i64>) -> impl Strategy<Value = Vec<i64>> {
    let rank = shape.len();
    (0..=rank, prop::collection::vec(any::<bool>(), rank)).prop_map(move |(first, ones)| {
        (first..rank)
            .map(|axis| if ones[axis] { 1 } else { shape[axis] })
            .collect()
    })
}

fn dtype() -> impl Strategy<Value = aclDataType> {
    prop::sample::select(TYPES.to_vec())
}

/// Small integers, which every type but BOOL holds.
fn small() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec((0..7i32).prop_map(f64::from), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copies_of_any_views_convert_each_element(
        (from, to) in shape().prop_flat_map(|to| {
            let from = narrower(to.clone()).prop_flat_map(|shape| view_of(shape, true));
            (from, view_of(to, false))
        }),
        types in (dtype(), dtype()),
        values in prop::collection::vec(prop_oneof![-300.0..300.0f64, -1e30..1e30f64, Just(f64::NAN)], 1..30),
    ) {
        let _bench = Bench::new();
        let src = Tensor::new(types.0, from, &values);
        let dst = Tensor::new(types.1, to, &[5.0]);
        let mut want = dst.buffer();
        for (&place, value) in dst.view.places().iter().zip(src.broadcast(&dst.view.shape)) {
            let value = match (types.0, value) {
                // Integers wrap around.
                (aclDataType::ACL_INT64 | aclDataType::ACL_INT32 | aclDataType::ACL_INT16, value)
                    if types.1 == aclDataType::ACL_INT8 => f64::from(value as i64 as i8),
                (aclDataType::ACL_INT64 | aclDataType::ACL_INT32, value)
                    if types.1 == aclDataType::ACL_INT16 => f64::from(value as i64 as i16),
                (aclDataType::ACL_INT64, value)
                    if types.1 == aclDataType::ACL_INT32 => f64::from(value as i64 as i32),
                (aclDataType::ACL_INT8 | aclDataType::ACL_INT16 | aclDataType::ACL_INT32 | aclDataType::ACL_INT64, value)
                    if types.1 == aclDataType::ACL_UINT8 => f64::from(value as i64 as u8),
                (aclDataType::ACL_UINT8, value)
                    if types.1 == aclDataType::ACL_INT8 => f64::from(value as u8 as i8),
                (_, value) => value,
            };
            want[place as usize] = decode(types.1, &encode(types.1, value));
        }
        // What is not shown stays as it was.
        ok(call!(aclnnInplaceCopy(dst.in_out(), src.input())));
        let got = dst.buffer();
        // Halves of the largest integers may be rounded once or twice.
        prop_assert!(
            got.iter().zip(&want).all(|(a, b)| a == b || a.is_nan() && b.is_nan()),
            "{got:?} is not {want:?}"
        );
    }

    #[test]
    fn arithmetic_and_comparisons_broadcast_over_any_views(
        (a, b, out) in shape().prop_flat_map(|shape| {
            // One has the whole shape, so that it is what both broadcast to.
            let b = narrower(shape.clone()).prop_flat_map(|shape| view_of(shape, true));
            (view_of(shape.clone(), true), b, view_of(shape, false))
        }),
        types in (dtype(), dtype()),
        values in (small(), small()),
    ) {
        let _bench = Bench::new();
        let a = Tensor::new(types.0, a, &values.0);
        let b = Tensor::new(types.1, b, &values.1);
        let shape = out.shape.clone();
        let double = || Tensor::new(aclDataType::ACL_DOUBLE, out.clone(), &[0.5]);
        let (x, y) = (a.values(), b.broadcast(&shape));
        let each = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
            x.iter().zip(&y).map(|(&x, &y)| f(x, y)).collect()
        };
        let truth = |f: &dyn Fn(f64, f64) -> bool| each(&|x, y| f64::from(f(x, y)));
        let to = double();
        ok(call!(aclnnAdd(a.input(), b.input(), int(3), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| x + 3.0 * y));
        // What is not shown stays as it was.
        let shown = to.view.places();
        for (place, value) in to.buffer().into_iter().enumerate() {
            prop_assert!(shown.contains(&(place as i64)) || value == 0.5);
        }
        ok(call!(aclnnSub(b.input(), a.input(), real(0.5), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| y - 0.5 * x));
        ok(call!(aclnnMul(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| x * y));
        ok(call!(aclnnMaximum(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&f64::max));
        ok(call!(aclnnMinimum(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&f64::min));
        ok(call!(aclnnRsubs(a.input(), real(1.5), int(2), to.out())));
        prop_assert_eq!(to.values(), each(&|x, _| 1.5 - 2.0 * x));
        ok(call!(aclnnClamp(a.input(), OptionalScalar(int(1).0), OptionalScalar(null()), to.out())));
        prop_assert_eq!(to.values(), each(&|x, _| x.max(1.0)));
        ok(call!(aclnnSWhere(a.input(), b.input(), a.input(), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| if x != 0.0 { y } else { x }));
        let yes = Tensor::new(aclDataType::ACL_BOOL, out.clone(), &[1.0]);
        ok(call!(aclnnLtTensor(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x < y));
        ok(call!(aclnnGeTensor(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x >= y));
        ok(call!(aclnnNeScalar(a.input(), int(2), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, _| x != 2.0));
        ok(call!(aclnnLogicalAnd(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x != 0.0 && y != 0.0));
        let one = Tensor::packed(aclDataType::ACL_BOOL, &[1], &[0.0]);
        ok(call!(aclnnEqual(a.input(), b.input(), one.out())));
        let same = a.view.shape == b.view.shape && a.values() == b.values();
        prop_assert_eq!(one.values(), [f64::from(same)]);
    }

    #[test]
    fn lines_of_any_axes_are_summed_and_searched(
        view in shape().prop_flat_map(|shape| view_of(shape, true)),
        (axes, keep) in (any::<[bool; 4]>(), any::<bool>()),
        axis in 0..4usize,
        dtype in dtype(),
        values in small(),
    ) {
        let _bench = Bench::new();
        let x = Tensor::new(dtype, view, &values);
        let shape = x.view.shape.clone();
        let rank = shape.len();
        // Negative axes count from the end.
        let dims: Vec<i64> = (0..rank)
            .filter(|&axis| axes[axis])
            .map(|axis| if keep { axis as i64 - rank as i64 } else { axis as i64 })
            .collect();
        let reduced = |axis: usize| dims.is_empty() || axes[axis];
        let left: Vec<i64> = (0..rank)
            .filter(|&axis| keep || !reduced(axis))
            .map(|axis| if reduced(axis) { 1 } else { shape[axis] })
            .collect();
        // Sums over all elements that fall on the same place.
        let mut want = vec![0.0; left.iter().product::<i64>() as usize];
        let kept = View::packed(&left);
        let places = View::packed(&shape);
        let mut lines: Vec<Vec<f64>> = vec![Vec::new(); want.len()];
        for (place, value) in places.places().into_iter().zip(x.values()) {
            let mut to = 0;
            let mut out_axis = 0;
            for (axis, &size) in shape.iter().enumerate() {
                let at = place / places.strides[axis] % size;
                if !reduced(axis) {
                    to += at * kept.strides[out_axis];
                }
                if keep || !reduced(axis) {
                    out_axis += 1;
                }
            }
            want[to as usize] += value;
            lines[to as usize].push(value);
        }
        let sums = Tensor::packed(aclDataType::ACL_DOUBLE, &left, &[0.5]);
        let as_double = Type(aclDataType::ACL_DOUBLE);
        ok(call!(aclnnReduceSum(x.input(), ints(&dims), Flag(u8::from(keep)), as_double, sums.out())));
        prop_assert_eq!(sums.values(), want);
        let any = Tensor::packed(aclDataType::ACL_BOOL, &left, &[0.0]);
        ok(call!(aclnnAny(x.input(), ints(&dims), Flag(u8::from(keep)), any.out())));
        let truth = |line: &Vec<f64>| f64::from(line.iter().any(|&value| value != 0.0));
        prop_assert_eq!(any.values(), lines.iter().map(truth).collect::<Vec<_>>());
        let biggest = Tensor::packed(dtype, &left, &[0.0]);
        let status = call!(aclnnAmax(x.input(), ints(&dims), Flag(u8::from(keep)), biggest.out()));
        if lines.iter().any(Vec::is_empty) {
            fails(status, 161_002, &["aclnnAmax: self: given"]);
        } else {
            ok(status);
            let most = |line: &Vec<f64>| line.iter().copied().fold(f64::MIN, f64::max);
            prop_assert_eq!(biggest.values(), lines.iter().map(most).collect::<Vec<_>>());
        }
        // Along one axis: greatest with its place, running sums, order.
        if rank == 0 || x.view.count() == 0 {
            return Ok(());
        }
        let axis = axis % rank;
        let (size, step) = (shape[axis], places.strides[axis]);
        let shown = x.values();
        let line = |start: i64| -> Vec<f64> {
            (0..size).map(|i| shown[(start + i * step) as usize]).collect()
        };
        let starts: Vec<i64> = (places.places().into_iter())
            .filter(|place| place / step % size == 0)
            .collect();
        let mut kept = shape.clone();
        kept[axis] = 1;
        let (best, at) = (Tensor::packed(dtype, &kept, &[0.0]), Tensor::ints(&kept, &[0]));
        ok(call!(aclnnMaxDim(x.input(), axis as i64, Flag(1), best.out(), at.out())));
        let first = |line: &[f64]| {
            let most = line.iter().copied().fold(f64::MIN, f64::max);
            (most, line.iter().position(|&value| value == most).unwrap() as f64)
        };
        let want: Vec<(f64, f64)> = starts.iter().map(|&start| first(&line(start))).collect();
        prop_assert_eq!(best.values().into_iter().zip(at.values()).collect::<Vec<_>>(), want);
        let running = Tensor::packed(aclDataType::ACL_DOUBLE, &shape, &[0.0]);
        ok(call!(aclnnCumsum(x.input(), axis as i64, as_double, running.out())));
        let (sorted, order) = (Tensor::packed(dtype, &shape, &[0.0]), Tensor::ints(&shape, &[0]));
        ok(call!(aclnnSort(x.input(), Flag(1), axis as i64, Flag(1), sorted.out(), order.out())));
        let soft = Tensor::packed(aclDataType::ACL_DOUBLE, &shape, &[0.0]);
        ok(call!(aclnnSoftmax(x.input(), axis as i64, soft.out())));
        let (running, sorted, order, soft) =
            (running.values(), sorted.values(), order.values(), soft.values());
        for start in starts {
            let line = line(start);
            let of = |values: &[f64]| -> Vec<f64> {
                (0..size).map(|i| values[(start + i * step) as usize]).collect()
            };
            for (i, sum) in of(&running).into_iter().enumerate() {
                prop_assert_eq!(sum, line[..=i].iter().sum::<f64>());
            }
            let mut want: Vec<usize> = (0..line.len()).collect();
            want.sort_by(|&a, &b| line[b].partial_cmp(&line[a]).unwrap());
            prop_assert_eq!(of(&order), want.iter().map(|&i| i as f64).collect::<Vec<_>>());
            prop_assert_eq!(of(&sorted), want.iter().map(|&i| line[i]).collect::<Vec<_>>());
            let total: f64 = line.iter().map(|value| value.exp()).sum();
            for (got, value) in of(&soft).into_iter().zip(&line) {
                prop_assert!((got - value.exp() / total).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn products_of_any_views_are_matrix_products(
        (m, k, n) in (0..5i64, 0..5i64, 1..5i64),
        stack in prop::collection::vec(1..3i64, 0..3),
        ones in any::<[bool; 2]>(),
        seed in any::<[u8; 2]>(),
        values in small(),
    ) {
        let _bench = Bench::new();
        let of = |ones: bool, last: [i64; 2]| -> Vec<i64> {
            let stack = stack.iter().map(|&size| if ones { 1 } else { size });
            stack.chain(last).collect()
        };
        // One factor is whole, so that the stack is what both broadcast to.
        let (left, right) = (of(ones[0] && !ones[1], [m, k]), of(ones[1], [k, n]));
        let stretched = |shape: &[i64], seed: u8| {
            let mut view = View::packed(shape);
            let step = i64::from(seed % 3) + 1;
            view.strides.iter_mut().for_each(|stride| *stride *= step);
            view.room *= step;
            view
        };
        let a = Tensor::new(aclDataType::ACL_FLOAT16, stretched(&left, seed[0]), &values);
        let b = Tensor::new(aclDataType::ACL_FLOAT, stretched(&right, seed[1]), &values);
        let out = Tensor::floats(&of(false, [m, n]), &[0.5]);
        ok(call!(aclnnMatmul(a.input(), b.input(), out.out(), 1)));
        let whole = |tensor: &Tensor, last: [i64; 2]| tensor.broadcast(&of(false, last));
        let (x, y) = (whole(&a, [m, k]), whole(&b, [k, n]));
        let mut want = Vec::new();
        for matrix in 0..stack.iter().product::<i64>() {
            for i in 0..m {
                for j in 0..n {
                    let at = |r: i64| x[((matrix * m + i) * k + r) as usize] * y[((matrix * k + r) * n + j) as usize];
                    want.push((0..k).map(at).sum::<f64>());
                }
            }
        }
        prop_assert_eq!(out.values(), want);
    }
}

#[test]
fn elements_are_found_at_positions() {
    let _bench = Bench::new();
    let numbers: Vec<f64> = (0..24).map(f64::from).collect();
    let x = Tensor::floats(&[2, 3, 4], &numbers);
    let rows = Tensor::ints(&[2], &[-1, 0]);
    let picked = Tensor::floats(&[2, 2, 4], &[0.0]);
    ok(call!(aclnnIndexSelect(
        x.input(),
        1,
        rows.input(),
        picked.out()
    )));
    let want: Vec<f64> = [8, 0, 20, 12]
        .iter()
        .flat_map(|&start| (start..start + 4).map(f64::from))
        .collect();
    assert_eq!(picked.values(), want);
    // Neighbouring axes with positions: theirs stand in their place.
    let all = Tensor::packed(aclDataType::ACL_FLOAT, &[0], &[0.0]);
    let columns = Tensor::packed(aclDataType::ACL_INT32, &[3, 1], &[0.0, 1.0, 3.0]);
    let out = Tensor::floats(&[2, 3, 2], &[0.5]);
    ok(call!(aclnnIndex(
        x.input(),
        tensors(&[&all, &rows, &columns]),
        out.out()
    )));
    assert_eq!(
        out.values(),
        [
            8.0, 0.0, 9.0, 1.0, 11.0, 3.0, 20.0, 12.0, 21.0, 13.0, 23.0, 15.0
        ]
    );
    // Others stand in front.
    let out = Tensor::floats(&[2, 3], &[0.5]);
    let two = Tensor::ints(&[2], &[1, 0]);
    ok(call!(aclnnIndex(
        x.input(),
        tensors(&[&two, &all, &rows]),
        out.out()
    )));
    assert_eq!(out.values(), [15.0, 19.0, 23.0, 0.0, 4.0, 8.0]);
    let rows = Tensor::ints(&[3], &[1, 1, 0]);
    let more = Tensor::floats(&[1, 4], &[100.0]);
    ok(call!(aclnnIndexPutImpl(
        Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[6, 4]), x.at).in_out(),
        tensors(&[&rows]),
        more.input(),
        Flag(1),
        Flag(0),
    )));
    let mut want = numbers.clone();
    want[..4].iter_mut().for_each(|value| *value += 100.0);
    want[4..8].iter_mut().for_each(|value| *value += 200.0);
    assert_eq!(x.values(), want);
    let places = Tensor::ints(&[2, 1, 2], &[3, 0, 1, -1]);
    let out = Tensor::floats(&[2, 1, 2], &[0.0]);
    ok(call!(aclnnGather(x.input(), -1, places.input(), out.out())));
    assert_eq!(out.values(), [103.0, 100.0, 13.0, 15.0]);
    ok(call!(aclnnInplaceScatterValue(
        x.in_out(),
        2,
        places.input(),
        real(-7.0),
        0
    )));
    ok(call!(aclnnGather(x.input(), 2, places.input(), out.out())));
    assert_eq!(out.values(), [-7.0; 4]);
    let added = Tensor::floats(&[2, 3, 4], &[0.0]);
    ok(call!(aclnnScatterAdd(
        x.input(),
        2,
        places.input(),
        out.input(),
        added.out()
    )));
    assert_eq!(added.values()[..4], [-14.0, 101.0, 102.0, -14.0]);
    let table = Tensor::packed(
        aclDataType::ACL_BF16,
        &[3, 2],
        &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    );
    let words = Tensor::ints(&[1, 2], &[2, 0]);
    let out = Tensor::packed(aclDataType::ACL_BF16, &[1, 2, 2], &[0.0]);
    ok(call!(aclnnEmbedding(
        table.input(),
        words.input(),
        out.out()
    )));
    assert_eq!(out.values(), [5.0, 6.0, 1.0, 2.0]);
}

#[test]
fn tensors_are_joined_repeated_and_turned() {
    let _bench = Bench::new();
    let half = aclDataType::ACL_FLOAT16;
    let a = Tensor::packed(half, &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b = Tensor::packed(half, &[2, 1], &[5.0, 6.0]);
    let nothing = Tensor::packed(half, &[0], &[0.0]);
    let out = Tensor::packed(half, &[2, 3], &[0.0]);
    ok(call!(aclnnCat(tensors(&[&nothing, &a, &b]), -1, out.out())));
    assert_eq!(out.values(), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    let out = Tensor::packed(half, &[2, 2, 2], &[0.0]);
    ok(call!(aclnnStack(tensors(&[&a, &a]), 2, out.out())));
    assert_eq!(out.values(), [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    let out = Tensor::packed(half, &[2, 4, 1], &[0.0]);
    ok(call!(aclnnRepeat(b.input(), ints(&[2, 2, 1]), out.out())));
    assert_eq!(out.values(), [5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0]);
    let out = Tensor::packed(half, &[2, 2], &[0.0]);
    ok(call!(aclnnFlip(a.input(), ints(&[0, -1]), out.out())));
    assert_eq!(out.values(), [4.0, 3.0, 2.0, 1.0]);
    ok(call!(aclnnPermute(a.input(), ints(&[1, 0]), out.out())));
    assert_eq!(out.values(), [1.0, 3.0, 2.0, 4.0]);
    let out = Tensor::packed(half, &[1, 4], &[0.0]);
    ok(call!(aclnnConstantPadNd(
        a.input(),
        ints(&[1, 1, -1, 0]),
        int(9),
        out.out()
    )));
    assert_eq!(out.values(), [9.0, 3.0, 4.0, 9.0]);
    let counts = Tensor::ints(&[2], &[2, 1]);
    let out = Tensor::packed(half, &[3, 2], &[0.0]);
    ok(call!(aclnnRepeatInterleaveWithDim(
        a.input(),
        counts.input(),
        0,
        3,
        out.out()
    )));
    assert_eq!(out.values(), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
    let out = Tensor::packed(half, &[8], &[0.0]);
    ok(call!(aclnnRepeatInterleaveInt(a.input(), 2, 8, out.out())));
    assert_eq!(out.values(), [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    let out = Tensor::packed(half, &[2, 2], &[0.0]);
    ok(call!(aclnnTriu(a.input(), 0, out.out())));
    assert_eq!(out.values(), [1.0, 2.0, 0.0, 4.0]);
    ok(call!(aclnnInplaceTril(out.in_out(), -1)));
    assert_eq!(out.values(), [0.0; 4]);
}

/// What the handle of a tensor says about its shape now.
fn shape_now(tensor: &Tensor) -> Vec<i64> {
    let (mut dims, mut rank) = (null_mut(), 0);
    unsafe {
        ok(aclGetViewShape(tensor.handle, &mut dims, &mut rank));
        let shape = std::slice::from_raw_parts(dims, rank as usize).to_vec();
        libc::free(dims.cast());
        shape
    }
}

#[test]
fn outputs_get_the_shape_that_the_data_decide() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0, 0.0, 3.0, 0.0, f64::NAN, -6.0]);
    let mask = Tensor::packed(aclDataType::ACL_BOOL, &[3], &[0.0, 1.0, 1.0]);
    let out = Tensor::floats(&[6], &[0.5]);
    ok(call!(aclnnMaskedSelect(x.input(), mask.input(), out.out())));
    assert_eq!(shape_now(&out), [4]);
    let values = out.buffer();
    assert!(values[2].is_nan());
    assert_eq!(
        (values[..2].to_vec(), &values[3..]),
        (vec![0.0, 3.0], &[-6.0, 0.5, 0.5][..])
    );
    let places = Tensor::ints(&[6, 2], &[-1]);
    ok(call!(aclnnNonzero(x.input(), places.out())));
    assert_eq!(shape_now(&places), [4, 2]);
    assert_eq!(
        places.buffer()[..8],
        [0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 2.0]
    );
    let places = Tensor::ints(&[2, 6], &[-1]);
    ok(call!(aclnnNonzeroV2(x.input(), places.out())));
    assert_eq!(shape_now(&places), [2, 4]);
    assert_eq!(
        places.buffer()[..8],
        [0.0, 0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 2.0]
    );
    let nothing = Tensor::ints(&[2], &[0]);
    let places = Tensor::ints(&[2, 1], &[-1]);
    ok(call!(aclnnNonzero(nothing.input(), places.out())));
    assert_eq!(shape_now(&places), [0, 1]);
    let counts = Tensor::ints(&[3], &[2, 0, 1]);
    let out = Tensor::ints(&[3], &[9]);
    ok(call!(aclnnRepeatInterleaveTensor(
        counts.input(),
        3,
        out.out()
    )));
    assert_eq!(out.values(), [0.0, 0.0, 2.0]);
    let short = Tensor::ints(&[2], &[9]);
    ok(call!(aclnnRepeatInterleaveTensor(
        counts.input(),
        2,
        short.out()
    )));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnRepeatInterleaveTensor: repeats: 3 in sum, but the output has 2"],
    );
}

#[test]
fn lines_have_norms() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 2], &[3.0, -4.0, 0.0, 2.0]);
    let out = Tensor::floats(&[2], &[0.0]);
    for (p, want) in [
        (2.0, [5.0, 2.0]),
        (1.0, [7.0, 2.0]),
        (0.0, [2.0, 1.0]),
        (f64::INFINITY, [4.0, 2.0]),
        (f64::NEG_INFINITY, [3.0, 0.0]),
    ] {
        ok(call!(aclnnLinalgVectorNorm(
            x.input(),
            real(p),
            ints(&[-1]),
            Flag(0),
            Type(aclDataType::ACL_FLOAT),
            out.out()
        )));
        assert_eq!(out.values(), want, "{p}");
    }
    ok(call!(aclnnVarCorrection(
        x.input(),
        ints(&[1]),
        1,
        Flag(0),
        out.out()
    )));
    assert_eq!(out.values(), [24.5, 2.0]);
    let gamma = Tensor::floats(&[2], &[1.0, 10.0]);
    let (y, scales) = (
        Tensor::floats(&[2, 2], &[0.0]),
        Tensor::floats(&[2, 1], &[0.0]),
    );
    ok(call!(aclnnRmsNorm(
        x.input(),
        gamma.input(),
        0.5,
        y.out(),
        scales.out()
    )));
    for (line, (got, scale)) in [[3.0f64, -4.0], [0.0, 2.0]]
        .iter()
        .zip(y.values().chunks(2).zip(scales.values()))
    {
        let want = 1.0 / (line.iter().map(|v| v * v).sum::<f64>() / 2.0 + 0.5).sqrt();
        assert!((scale - want).abs() < 1e-6);
        assert!(
            (got[0] - line[0] * want).abs() < 1e-6 && (got[1] - 10.0 * line[1] * want).abs() < 1e-5
        );
    }
    let bounds = [
        Tensor::floats(&[2], &[-1.0, 0.0]),
        Tensor::floats(&[2], &[2.0, 1.0]),
    ];
    let between = |least: *const aclTensor, most: *const aclTensor| {
        ok(call!(aclnnClampTensor(
            x.input(),
            OptionalIn(least),
            OptionalIn(most),
            y.out()
        )));
        y.values()
    };
    let [least, most] = bounds.each_ref().map(|bound| bound.handle.cast_const());
    assert_eq!(between(least, most), [2.0, 0.0, 0.0, 1.0]);
    assert_eq!(between(least, null()), [3.0, 0.0, 0.0, 2.0]);
    assert_eq!(between(null(), most), [2.0, -4.0, 0.0, 1.0]);
    let dot = Tensor::floats(&[], &[0.0]);
    ok(call!(aclnnDot(
        bounds[0].input(),
        bounds[1].input(),
        dot.out()
    )));
    assert_eq!(dot.values(), [-2.0]);
}

#[test]
fn rows_of_models_are_rotated_quantised_and_updated() {
    let _bench = Bench::new();
    // Angles of a quarter turn: a pair (a, b) becomes (-b, a).
    let x = Tensor::floats(&[2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let (cos, sin) = (
        Tensor::floats(&[1, 4], &[0.0]),
        Tensor::floats(&[4], &[1.0]),
    );
    let out = Tensor::floats(&[2, 4], &[0.5]);
    let turn = |mode| {
        ok(call!(aclnnRotaryPositionEmbedding(
            x.input(),
            cos.input(),
            sin.input(),
            mode,
            out.out()
        )));
        out.values()
    };
    assert_eq!(turn(0), [-3.0, -4.0, 1.0, 2.0, -7.0, -8.0, 5.0, 6.0]);
    assert_eq!(turn(1), [-2.0, 1.0, -4.0, 3.0, -6.0, 5.0, -8.0, 7.0]);
    ok(call!(aclnnInterleaveRope(
        x.input(),
        cos.input(),
        sin.input(),
        out.out()
    )));
    assert_eq!(out.values(), [-2.0, -4.0, 1.0, 3.0, -6.0, -8.0, 5.0, 7.0]);
    fails(
        call!(aclnnRotaryPositionEmbedding(
            x.input(),
            cos.input(),
            sin.input(),
            2,
            out.out()
        )),
        161_002,
        &["aclnnRotaryPositionEmbedding: mode: given 2, allowed: 0 (halves), 1 (neighbours)"],
    );
    // Each factor belongs to its place in the output.
    let cos = Tensor::floats(&[4], &[1.0, 2.0, 3.0, 4.0]);
    let sin = Tensor::floats(&[4], &[10.0, 20.0, 30.0, 40.0]);
    ok(call!(aclnnInterleaveRope(
        x.input(),
        cos.input(),
        sin.input(),
        out.out()
    )));
    assert_eq!(out.values()[..4], [-19.0, -74.0, 36.0, 136.0]);

    let rows = Tensor::floats(&[3, 2], &[1.27, -0.5, 0.0, 0.0, -254.0, 3.0]);
    let smooth = Tensor::floats(&[2], &[1.0, 2.0]);
    let (codes, scales) = (
        Tensor::packed(aclDataType::ACL_INT8, &[3, 2], &[9.0]),
        Tensor::floats(&[3], &[0.5]),
    );
    ok(call!(aclnnDynamicQuant(
        rows.input(),
        OptionalIn(null()),
        codes.out(),
        scales.out()
    )));
    // 3 over 2 is rounded to the even number.
    assert_eq!(codes.values(), [127.0, -50.0, 0.0, 0.0, -127.0, 2.0]);
    let near = |want: [f64; 3]| {
        let got = scales.values();
        assert!(
            got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6),
            "{got:?}"
        );
    };
    near([0.01, 0.0, 2.0]);
    ok(call!(aclnnDynamicQuant(
        rows.input(),
        OptionalIn(smooth.handle),
        codes.out(),
        scales.out()
    )));
    assert_eq!(codes.values()[..2], [127.0, -100.0]);
    near([0.01, 0.0, 2.0]);

    let cache = Tensor::floats(&[2, 2, 2], &[0.0]);
    let places = Tensor::ints(&[2, 2], &[1, 0, 0, 1]);
    let parts = Tensor::floats(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    ok(call!(aclnnScatterNdUpdate(
        cache.in_out(),
        places.input(),
        parts.input()
    )));
    assert_eq!(cache.values(), [0.0, 0.0, 3.0, 4.0, 1.0, 2.0, 0.0, 0.0]);
    let nowhere = Tensor::ints(&[2, 2], &[1, 0, 0, 2]);
    ok(call!(aclnnScatterNdUpdate(
        cache.in_out(),
        nowhere.input(),
        parts.input()
    )));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnScatterNdUpdate: indices: index 2 is out of range for axis 1 of size 2"],
    );
}

#[test]
fn numbers_are_made_of_nothing() {
    let _bench = Bench::new();
    let out = Tensor::packed(aclDataType::ACL_INT32, &[4], &[0.0]);
    ok(call!(aclnnArange(int(-1), int(7), int(2), out.out())));
    assert_eq!(out.values(), [-1.0, 1.0, 3.0, 5.0]);
    let out = Tensor::floats(&[3], &[0.0]);
    ok(call!(aclnnArange(
        real(0.0),
        real(1.5),
        real(0.5),
        out.out()
    )));
    assert_eq!(out.values(), [0.0, 0.5, 1.0]);
    ok(call!(aclnnInplaceFillScalar(
        out.in_out(),
        scalar(aclDataType::ACL_BOOL, true)
    )));
    assert_eq!(out.values(), [1.0; 3]);
    ok(call!(aclnnInplaceZero(out.in_out())));
    assert_eq!(out.values(), [0.0; 3]);
    let square = Tensor::packed(aclDataType::ACL_INT8, &[2, 3], &[7.0]);
    ok(call!(aclnnEye(2, 3, square.out())));
    assert_eq!(square.values(), [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    // Types that are not computed with are zeroed and copied all the same.
    let pair = aclDataType::ACL_COMPLEX64;
    let words = upload(&[1.0f32, 2.0, 3.0, 4.0]);
    let complex = |at| Tensor {
        handle: tensor(pair, &[2], at),
        ..Tensor::floats(&[1], &[0.0])
    };
    let copied = upload(&[9.0f32; 4]);
    ok(call!(aclnnInplaceCopy(
        complex(copied).in_out(),
        complex(words).input()
    )));
    ok(call!(aclnnInplaceZero(complex(words).in_out())));
    sync(null_mut());
    assert_eq!(download::<f32>(copied, 4), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(download::<f32>(words, 4), [0.0; 4]);
}

#[test]
fn random_numbers_depend_on_seed_offset_and_place_alone() {
    let _bench = Bench::new();
    let count = 20_000;
    let draw = |seed, offset| {
        let out = Tensor::floats(&[count], &[0.0]);
        ok(call!(aclnnInplaceNormal(
            out.in_out(),
            1.0,
            2.0,
            seed,
            offset
        )));
        out.values()
    };
    let numbers = draw(7, 0);
    assert_eq!(numbers, draw(7, 0));
    assert!(draw(7, 1).iter().zip(&numbers).all(|(a, b)| a != b));
    assert!(draw(8, 0).iter().zip(&numbers).all(|(a, b)| a != b));
    let mean = numbers.iter().sum::<f64>() / count as f64;
    let variance = numbers.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count as f64;
    assert!(
        (mean - 1.0).abs() < 0.1 && (variance - 4.0).abs() < 0.2,
        "{mean} {variance}"
    );
    let halves = Tensor::packed(aclDataType::ACL_FLOAT16, &[count], &[0.0]);
    ok(call!(aclnnInplaceUniform(halves.in_out(), -1.0, 1.0, 3, 4)));
    let values = halves.values();
    assert!(values.iter().all(|&value| (-1.0..1.0).contains(&value)));
    assert!((values.iter().sum::<f64>() / count as f64).abs() < 0.05);
    let dice = Tensor::ints(&[count], &[0]);
    ok(call!(aclnnInplaceRandom(dice.in_out(), 1, 7, 3, 4)));
    let values = dice.values();
    for side in 1..7 {
        let hits = values
            .iter()
            .filter(|&&value| value == f64::from(side))
            .count();
        assert!((2800..3900).contains(&hits), "{side}: {hits}");
    }
    assert!(values.iter().all(|value| (1.0..7.0).contains(value)));
}

#[test]
fn scalars_count_as_they_do_in_pytorch() {
    let _bench = Bench::new();
    // 0.1 as a half equals the half that is nearest to it.
    let half = Tensor::packed(aclDataType::ACL_FLOAT16, &[1], &[0.1]);
    let yes = Tensor::packed(aclDataType::ACL_BOOL, &[1], &[0.0]);
    ok(call!(aclnnEqScalar(half.input(), real(0.1), yes.out())));
    assert_eq!(yes.values(), [1.0]);
    // Integers stay exact beyond 2^53, and divide exactly into real numbers.
    let big = Tensor::ints(&[2], &[(1 << 60) + 1, -7]);
    sync(null_mut());
    let exact = upload(&[(1i64 << 60) + 1, -7]);
    let big = Tensor::over(aclDataType::ACL_INT64, big.view, exact);
    ok(call!(aclnnInplaceAdds(big.in_out(), int(1), int(1))));
    sync(null_mut());
    assert_eq!(download::<i64>(exact, 2), [(1 << 60) + 2, -6]);
    let seven = Tensor::ints(&[2], &[-7, 7]);
    let quotient = Tensor::floats(&[2], &[0.0]);
    ok(call!(aclnnDivs(seven.input(), int(2), quotient.out())));
    assert_eq!(quotient.values(), [-3.5, 3.5]);
    let whole = Tensor::ints(&[2], &[0, 0]);
    ok(call!(aclnnFloorDivides(seven.input(), int(2), whole.out())));
    assert_eq!(whole.values(), [-4.0, 3.0]);
    ok(call!(aclnnDivMods(seven.input(), int(2), 1, whole.out())));
    assert_eq!(whole.values(), [-3.0, 3.0]);
    ok(call!(aclnnRemainderTensorScalar(
        seven.input(),
        int(4),
        whole.out()
    )));
    assert_eq!(whole.values(), [1.0, 3.0]);
    ok(call!(aclnnFloorDivides(seven.input(), int(0), whole.out())));
    assert_eq!(whole.values(), [0.0, 0.0]);
}

#[test]
fn not_a_number_goes_where_pytorch_puts_it() {
    let _bench = Bench::new();
    let inf = f64::INFINITY;
    let x = Tensor::floats(&[4], &[1.0, f64::NAN, inf, -inf]);
    let yes = Tensor::packed(aclDataType::ACL_BOOL, &[4], &[0.0]);
    ok(call!(aclnnIsFinite(x.input(), yes.out())));
    assert_eq!(yes.values(), [1.0, 0.0, 0.0, 0.0]);
    ok(call!(aclnnNeTensor(x.input(), x.input(), yes.out())));
    assert_eq!(yes.values(), [0.0, 1.0, 0.0, 0.0]);
    ok(call!(aclnnIsClose(
        x.input(),
        x.input(),
        1e-5,
        1e-8,
        Flag(0),
        yes.out()
    )));
    assert_eq!(yes.values(), [1.0, 0.0, 1.0, 1.0]);
    for largest in [true, false] {
        let (value, place) = (Tensor::floats(&[], &[0.0]), Tensor::ints(&[], &[0]));
        let (out, indices) = (value.out(), place.out());
        ok(match largest {
            true => call!(aclnnMaxDim(x.input(), 0, Flag(0), out, indices)),
            false => call!(aclnnMinDim(x.input(), 0, Flag(0), out, indices)),
        });
        assert!(value.values()[0].is_nan());
        assert_eq!(place.values(), [1.0]);
    }
    let clean = Tensor::floats(&[4], &[0.0]);
    ok(call!(aclnnNanToNum(x.input(), 0.5, 8.0, -8.0, clean.out())));
    assert_eq!(clean.values(), [1.0, 0.5, 8.0, -8.0]);
    let nothing = Tensor::floats(&[2], &[-inf]);
    let sum = Tensor::floats(&[], &[0.0]);
    ok(call!(aclnnLogSumExp(
        nothing.input(),
        ints(&[0]),
        Flag(0),
        sum.out()
    )));
    assert_eq!(sum.values(), [-inf]);
}

#[test]
fn inputs_are_read_before_outputs_that_share_their_memory() {
    let _bench = Bench::new();
    let numbers: Vec<f64> = (0..8).map(f64::from).collect();
    let x = Tensor::floats(&[8], &numbers);
    let part = |offset| {
        let view = View {
            shape: vec![7],
            strides: vec![1],
            offset,
            room: 8,
        };
        Tensor::over(aclDataType::ACL_FLOAT, view, x.at)
    };
    ok(call!(aclnnInplaceCopy(part(1).in_out(), part(0).input())));
    assert_eq!(x.buffer(), [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    ok(call!(aclnnFlip(x.input(), ints(&[0]), x.out())));
    assert_eq!(x.buffer(), [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0]);
    ok(call!(aclnnInplaceAdd(
        part(1).in_out(),
        part(0).input(),
        int(1)
    )));
    assert_eq!(x.buffer(), [6.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0, 0.0]);
    let matrix = Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[2, 2]), x.at);
    ok(call!(aclnnMm(
        matrix.input(),
        matrix.input(),
        matrix.out(),
        0
    )));
    assert_eq!(matrix.values(), [135.0, 143.0, 117.0, 148.0]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0]);
    let y = Tensor::floats(&[2], &[1.0]);
    fails(
        call!(aclnnAdd(x.input(), y.input(), int(1), x.out())),
        161_002,
        &["aclnnAdd: other: given [2], allowed: what broadcasts together with [2, 3]"],
    );
    fails(
        call!(aclnnExp(x.input(), y.out())),
        161_002,
        &["aclnnExp: out: given [2], allowed: [2, 3]"],
    );
    fails(
        call!(aclnnCast(x.input(), Type(aclDataType::ACL_INT32), x.out())),
        161_002,
        &["aclnnCast: out: given FLOAT, allowed: INT32"],
    );
    fails(
        call!(aclnnSoftmax(x.input(), 2, x.out())),
        161_002,
        &["aclnnSoftmax: dim: given 2, allowed: -2 to 1"],
    );
    let complex = tensor(aclDataType::ACL_COMPLEX64, &[2, 3], malloc(48));
    fails(
        call!(aclnnNeg(In(complex), x.out())),
        161_002,
        &["aclnnNeg: self: given COMPLEX64, allowed: FLOAT, FLOAT16"],
    );
    let blocks = tensor_of(
        aclFormat::ACL_FORMAT_FRACTAL_NZ,
        aclDataType::ACL_FLOAT16,
        &[1, 1, 16, 16],
        malloc(512),
    );
    fails(
        call!(aclnnInplaceZero(InOut(blocks))),
        161_002,
        &["aclnnInplaceZero: selfRef: given format FractalNz"],
    );
    fails(
        call!(aclnnMm(x.input(), x.input(), x.out(), 0)),
        161_002,
        &["aclnnMm: mat2: given [2, 3], allowed: a factor for [2, 3] with 3 rows"],
    );
    fails(
        call!(aclnnAdds(x.input(), Scalar(null()), int(1), x.out())),
        161_001,
        &["aclnnAdds: other is null"],
    );
    // Handles that are none, of other things, or destroyed.
    fails(
        call!(aclnnExp(In(std::ptr::dangling()), x.out())),
        161_002,
        &["aclnnExp: self: "],
    );
    fails(
        call!(aclnnExp(In(int(1).0.cast::<aclTensor>()), x.out())),
        161_002,
        &["aclnnExp: self: "],
    );
    // Positions that are none show on the device.
    let index = Tensor::ints(&[1], &[2]);
    let out = Tensor::floats(&[1, 3], &[0.0]);
    ok(call!(aclnnIndexSelect(
        x.input(),
        0,
        index.input(),
        out.out()
    )));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnIndexSelect: index: index 2 is out of range for axis 0 of size 2"],
    );
}

/// A view that is as large as a view may claim to be takes no memory and no time.
#[test]
fn absurd_views_are_refused() {
    let _bench = Bench::new();
    let huge = View {
        shape: vec![1 << 40, 1 << 20],
        strides: vec![0, 0],
        offset: 0,
        room: 1,
    };
    let x = Tensor::new(aclDataType::ACL_FLOAT, huge, &[1.0]);
    let sum = Tensor::floats(&[], &[0.0]);
    fails(
        call!(aclnnReduceSum(
            x.input(),
            ints(&[]),
            Flag(0),
            Type(aclDataType::ACL_FLOAT),
            sum.out()
        )),
        161_002,
        &["aclnnReduceSum: self: given 1152921504606846976 elements, allowed: at most"],
    );
    let nothing = |strides: [i64; 2], rows: i64| {
        let view = View {
            shape: vec![rows, 0],
            strides: strides.to_vec(),
            offset: 0,
            room: 1,
        };
        Tensor::new(aclDataType::ACL_FLOAT, view, &[1.0])
    };
    let (x, out) = (nothing([0, 0], 1 << 40), nothing([0, 0], 1 << 40));
    fails(
        call!(aclnnSoftmax(x.input(), 0, out.out())),
        161_002,
        &["aclnnSoftmax: self: given 1099511627776 elements along the axes that have some"],
    );
    for stride in [1 << 62, -(1 << 62), i64::MIN] {
        let (x, out) = (nothing([stride, 1], 8), nothing([1, stride], 8));
        ok(call!(aclnnSoftmax(x.input(), 0, out.out())));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
    }
    let memory = malloc(64);
    let outside = Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[1 << 20]), memory);
    ok(call!(aclnnInplaceZero(outside.in_out())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &[
            "aclnnInplaceZero",
            "selfRef",
            "past the end of an allocation of 64 bytes",
        ],
    );
}

#[test]
fn launches_are_watched_like_those_of_attention() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[4], &[1.0]);
    let gate = Gate::new();
    let stream = stream();
    gate.hold(stream);
    let (mut bytes, mut executor) = (0, null_mut());
    unsafe {
        ok(glue::aclnnInplaceOne::prepare(
            x.in_out(),
            &mut bytes,
            &mut executor,
        ));
        ok(glue::aclnnInplaceOne::launch(
            null_mut(),
            0,
            executor,
            stream,
        ));
        let _strict = check_scope(Check::Strict);
        let mut values = [0f32; 4];
        let status = aclrtMemcpy(values.as_mut_ptr().cast(), 16, x.at, 16, D2H);
        fails(status, 107_000, &["aclnnInplaceOne", "selfRef"]);
    }
    gate.open();
    sync(stream);
    gate.destroy();
    destroy(stream);
}

#[test]
fn executors_run_again_with_other_addresses() {
    let _bench = Bench::new();
    let (a, b) = (
        Tensor::floats(&[2], &[1.0, 2.0]),
        Tensor::floats(&[2], &[5.0, 6.0]),
    );
    let (first, second) = (Tensor::floats(&[4], &[0.0]), Tensor::floats(&[4], &[0.0]));
    let (mut bytes, mut executor) = (0, null_mut());
    let members = tensors(&[&a, &b]);
    unsafe {
        ok(glue::aclnnCat::prepare(
            members,
            0,
            first.out(),
            &mut bytes,
            &mut executor,
        ));
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(glue::aclnnCat::launch(null_mut(), 0, executor, null_mut()));
        ok(aclSetOutputTensorAddr(executor, 0, first.handle, second.at));
        ok(aclSetDynamicInputTensorAddr(
            executor,
            0,
            1,
            members.0.cast_mut(),
            a.at,
        ));
        ok(glue::aclnnCat::launch(null_mut(), 0, executor, null_mut()));
        ok(aclDestroyAclOpExecutor(executor));
    }
    assert_eq!(first.values(), [1.0, 2.0, 5.0, 6.0]);
    assert_eq!(second.values(), [1.0, 2.0, 1.0, 2.0]);
}

/// A trace is chosen when the process starts, so that another process makes the calls.
#[cfg(not(target_feature = "crt-static"))]
#[test]
fn calls_are_traced_with_their_arguments() {
    const VARIABLE: &str = "ASCEND_EMU_TRACE";
    if std::env::var_os(VARIABLE).is_some() {
        let _bench = Bench::new();
        let x = Tensor::floats(&[2, 3], &[1.0]);
        ok(call!(aclnnAdds(x.input(), int(1), int(1), x.out())));
        fails(call!(aclnnSoftmax(x.input(), 5, x.out())), 161_002, &[]);
        return sync(null_mut());
    }
    let file = std::env::temp_dir().join(format!("glue-trace-{}", std::process::id()));
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "calls_are_traced_with_their_arguments"])
        .env(VARIABLE, &file)
        .output()
        .unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(child.status.success(), "{child:?}");
    let line = |function: &str| {
        let name = format!("\"function\":\"{function}\"");
        text.lines().find(|line| line.contains(&name)).unwrap()
    };
    let prepared = line("aclnnAddsGetWorkspaceSize");
    assert!(prepared.contains("\"self\":{\"handle\":") && prepared.contains("\"shape\":[2,3]"));
    assert!(prepared.contains("\"workspaceSize\":0") && prepared.contains("\"status\":0"));
    assert!(line("aclnnAdds").contains("\"status\":0"));
    let refused = line("aclnnSoftmaxGetWorkspaceSize");
    assert!(refused.contains("\"dim\":5") && refused.contains("\"status\":161002"));
    assert!(refused.contains("aclnnSoftmax: dim: given 5, allowed: -2 to 1"));
}

/// What a parameter is when it is nothing.
trait Nothing {
    const NOTHING: Self;
}

macro_rules! nothing {
    ($($type:ident: $value:expr;)*) => {$(
        impl Nothing for $type {
            const NOTHING: Self = $value;
        }
    )*};
}

nothing! {
    In: In(null());
    OptionalIn: OptionalIn(null());
    Ins: Ins(null());
    Out: Out(null());
    InOut: InOut(null());
    Scalar: Scalar(null());
    OptionalScalar: OptionalScalar(null());
    Ints: Ints(null());
    Type: Type(aclDataType::ACL_FLOAT);
    Flag: Flag(0);
    i8: 0;
    i32: 0;
    i64: 0;
    u64: 0;
    f32: 0.0;
    f64: 0.0;
}

macro_rules! call_with_nothing {
    ($( $(#[$doc:meta])* fn $name:ident ( $( $argument:ident : $kind:ident ),* ) = $compute:expr ; )*) => {
        #[test]
        fn every_operator_names_itself_and_what_is_null() {
            let _bench = Bench::new();
            let mut seen = 0;
            $(
                fails(
                    call!($name($( <$kind as Nothing>::NOTHING ),*)),
                    161_001,
                    &[concat!(stringify!($name), ": "), " is null"],
                );
                seen += 1;
            )*
            assert_eq!(seen, OPERATORS.len());
        }
    };
}

ascend_emu::for_each_glue_function! { call_with_nothing }
