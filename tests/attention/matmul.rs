//! Products of matrices: views, one factor for all, errors.

use crate::harness;
use approx::abs_diff_eq;

use ascend_attention::matmul::{BatchMatMul, CubeMathType};
use ascend_attention::{Element, Error, Graph, Number, Stream, Tensor, bf16, f16, rules};
use harness::{numbers, violated};
use proptest::prelude::*;

/// Numbers of a type.
trait Rounded: Number {
    /// Half a unit in the last place, relative.
    const ROUNDING: f64;
    fn of(value: f32) -> Self;
}

macro_rules! rounded {
    ($($number:ty, $rounding:expr, $of:expr;)*) => {$(
        impl Rounded for $number {
            const ROUNDING: f64 = $rounding;
            fn of(value: f32) -> Self {
                $of(value)
            }
        }
    )*};
}

rounded! {
    f32, 6e-8, |value| value;
    f16, 4.9e-4, f16::from_f32;
    bf16, 4e-3, bf16::from_f32;
}

fn upload<T: Rounded>(stream: &Stream, seed: u64, shape: [usize; 3]) -> Tensor<T> {
    let elements = numbers(seed, shape.iter().product());
    let elements: Vec<T> = elements.into_iter().map(T::of).collect();
    stream.upload(&elements, shape).unwrap()
}

/// A tensor of this shape whose axes are permuted in memory, with more rows than it shows.
fn view<T: Rounded>(stream: &Stream, seed: u64, shape: [usize; 3], order: [usize; 3]) -> Tensor<T> {
    let mut lying = order.map(|axis| shape[axis]);
    lying[1] += 3;
    let all = upload::<T>(stream, seed, lying);
    let mut back = [0; 3];
    for (at, axis) in order.into_iter().enumerate() {
        back[axis] = at;
    }
    let part = all.narrow(1, 2..lying[1] - 1).unwrap();
    part.permute(back).unwrap()
}

fn multiply<T: Rounded>(left: &Tensor<T>, right: &Tensor<T>, stream: &Stream) {
    let exact = |of: &Tensor<T>| -> Vec<f64> {
        let elements = of.download(stream).unwrap();
        elements.into_iter().map(Number::to_f64).collect()
    };
    let (a, b) = (exact(left), exact(right));
    let (&[p, m, k], &[q, _, n]) = (left.shape(), right.shape()) else { panic!("three axes") };
    let plan = BatchMatMul::new().plan((left, right)).unwrap();
    let shape = [p.max(q), m, n];
    let mut out = Tensor::<T>::empty(stream.device(), shape).unwrap();
    out.overwrite(stream, &vec![T::of(f32::NAN); out.len()]).unwrap();
    plan.launch_into(stream, (left, right), &mut out).unwrap();
    let got = exact(&out);
    for batch in 0..shape[0] {
        for row in 0..m {
            for column in 0..n {
                let (mut sum, mut size) = (0.0, 0.0);
                for i in 0..k {
                    let x = a[((batch % p) * m + row) * k + i];
                    let y = b[((batch % q) * k + i) * n + column];
                    sum += x * y;
                    size += (x * y).abs();
                }
                let got = got[(batch * m + row) * n + column];
                let bound = 1e-6 * size + T::ROUNDING * sum.abs() + 1e-7;
                assert!(abs_diff_eq!(got, sum, epsilon = bound), "{got} is not {sum}");
            }
        }
    }
}

const ORDERS: [[usize; 3]; 3] = [[0, 1, 2], [0, 2, 1], [1, 0, 2]];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn products_of_views_are_those_of_the_definition(
        batch in 1usize..4, ones: [bool; 2], (m, k, n) in (1usize..20, 0usize..40, 1usize..70),
        orders in [0usize..3, 0usize..3], dtype in 0..3, seed: u64,
    ) {
        let stream = harness::stream();
        let entries = |one| if one { 1 } else { batch };
        let shapes = [[entries(ones[0]), m, k], [entries(ones[1]), k, n]];
        let orders = orders.map(|of| ORDERS[of]);
        macro_rules! check {
            ($number:ty) => {{
                let [left, right] = [0, 1].map(|i: usize| view::<$number>(&stream, seed ^ i as u64, shapes[i], orders[i]));
                multiply(&left, &right, &stream);
            }};
        }
        match dtype {
            0 => check!(f32),
            1 => check!(f16),
            _ => check!(bf16),
        }
    }
}

#[test]
fn a_plan_multiplies_other_tensors_laid_out_alike() {
    let stream = harness::stream();
    let of = |seed| {
        let a = upload::<f32>(&stream, seed, [2, 3, 4]);
        (a, upload::<f32>(&stream, seed + 1, [2, 4, 5]))
    };
    let (a, b) = of(1);
    let plan = BatchMatMul::new().plan((&a, &b)).unwrap();
    let first = plan.launch(&stream, (&a, &b)).unwrap();
    assert_eq!(first.shape(), [2, 3, 5]);
    let (c, d) = of(3);
    let second = plan.launch(&stream, (&c, &d)).unwrap();
    let own = BatchMatMul::new().plan((&c, &d)).unwrap();
    let want = own.launch(&stream, (&c, &d)).unwrap();
    assert_eq!(second.download(&stream).unwrap(), want.download(&stream).unwrap());
    assert_ne!(second.download(&stream).unwrap(), first.download(&stream).unwrap());
}

#[test]
fn what_is_not_as_planned_is_refused() {
    let stream = harness::stream();
    let a = upload::<f16>(&stream, 1, [2, 4, 4]);
    let plan = BatchMatMul::new().plan((&a, &a)).unwrap();
    let refused = |result: Result<Tensor<f16>, Error>| match result.map(drop) {
        Err(Error::Violation(violation)) if violation.rule == &rules::PLAN_TENSORS => {
            violation.given.split(':').next().unwrap().to_owned()
        }
        other => panic!("{other:?}"),
    };
    let turned = a.permute([0, 2, 1]).unwrap();
    let longer = upload::<f16>(&stream, 2, [2, 4, 5]);
    assert_eq!(refused(plan.launch(&stream, (&turned, &a))), "self");
    assert_eq!(refused(plan.launch(&stream, (&a, &longer))), "mat2");
    let mut own = a.clone();
    let shared = plan.launch_into(&stream, (&a, &a), &mut own);
    assert!(shared.as_ref().is_err_and(|error| error.breaks(&rules::ARGUMENT_MEMORY)));
    let other: Result<Tensor<bf16>, _> = {
        let b = upload::<bf16>(&stream, 1, [2, 4, 4]);
        plan.launch(&stream, (&b, &b))
    };
    assert!(other.is_err());
    harness::still_works(&stream);
}

#[test]
fn calls_that_break_a_rule_are_not_planned() {
    let stream = harness::stream();
    let a = upload::<f16>(&stream, 1, [2, 3, 4]);
    let plan = |right: &Tensor<f16>| BatchMatMul::new().plan((&a, right));
    let of = |shape| upload::<f16>(&stream, 2, shape);
    assert_eq!(violated(plan(&of([2, 3, 4]))), "batch_mat_mul.reduced_axis");
    assert_eq!(violated(plan(&of([3, 4, 5]))), "batch_mat_mul.batch");
    let flat = a.reshape([6, 4]).unwrap();
    assert_eq!(violated(plan(&flat)), "batch_mat_mul.rank");
    let ints = stream.upload(&[1i32; 4], [1, 2, 2]).unwrap();
    let ints = BatchMatMul::new().plan((&ints, &ints));
    assert_eq!(violated(ints), "batch_mat_mul.dtype");

    let id = "batch_mat_mul.ignored_cube_math_type";
    let call = BatchMatMul::new().cube_math_type(CubeMathType::UseHf32);
    let right = of([2, 4, 5]);
    assert_eq!(violated(call.plan((&a, &right))), id);
    assert!(call.allow_lint(id).plan((&a, &right)).is_ok());
    let overrun = BatchMatMul::new().allow_lint("batch_mat_mul.empty_batch");
    assert!(overrun.plan((&a, &right)).is_err_and(|error| error.breaks(&rules::ARGUMENT_VALUE)));
}

#[test]
fn a_replay_multiplies_what_its_tensors_hold() {
    let stream = harness::stream();
    let of = |seed| {
        let a = upload::<f32>(&stream, seed, [2, 3, 4]);
        (a, upload::<f32>(&stream, seed + 1, [2, 4, 5]))
    };
    let (a, b) = of(1);
    let plan = BatchMatMul::new().plan((&a, &b)).unwrap();
    let out = Tensor::<f32>::empty(stream.device(), [2, 3, 5]).unwrap();
    let buffers = (a, b, out);
    let captured = Graph::capture(stream.device(), buffers, |capture, (a, b, out)| {
        plan.launch_into(capture, (a, b), &mut out.clone())
    });
    let (mut graph, ()) = captured.unwrap();
    for seed in [1, 9] {
        let (c, d) = of(seed);
        let (a, b, _) = graph.buffers();
        a.copy_from(&stream, &c).unwrap();
        b.copy_from(&stream, &d).unwrap();
        graph.launch(&stream, graph.update()).unwrap();
        let want = plan.launch(&stream, (&c, &d)).unwrap();
        let got = graph.buffers().2.download(&stream).unwrap();
        assert_eq!(got, want.download(&stream).unwrap());
    }
}

#[test]
fn products_without_elements_launch_nothing() {
    let stream = harness::stream();
    fn of<T: Element>(stream: &Stream, shape: [usize; 3]) -> Tensor<T> {
        Tensor::empty(stream.device(), shape).unwrap()
    }
    let a = of::<f16>(&stream, [2, 0, 4]);
    let b = of::<f16>(&stream, [2, 4, 5]);
    let plan = BatchMatMul::new().plan((&a, &b)).unwrap();
    assert_eq!(plan.workspace_bytes(), 0);
    assert_eq!(plan.launch(&stream, (&a, &b)).unwrap().shape(), [2, 0, 5]);
    let other = of::<f16>(&stream, [2, 4, 6]);
    assert!(plan.launch(&stream, (&a, &other)).is_err());
    // Sums of nothing are 0, and are written.
    let a = of::<f16>(&stream, [1, 3, 0]);
    let b = of::<f16>(&stream, [1, 0, 2]);
    multiply(&a, &b, &stream);
}

#[test]
fn tensors_of_another_device_are_refused() {
    let runtime = harness::runtime();
    if runtime.device_count().unwrap() < 2 {
        harness::does_not_apply("it needs two devices");
        return;
    }
    let streams = [0, 1].map(|device| runtime.device(device).unwrap().stream().unwrap());
    let [a, b] = streams.each_ref().map(|of| upload::<f16>(of, 1, [1, 2, 2]));
    let mixed = BatchMatMul::new().plan((&a, &b));
    assert!(mixed.as_ref().is_err_and(|error| error.breaks(&rules::ARGUMENT_DEVICE)));
    let plan = BatchMatMul::new().plan((&a, &a)).unwrap();
    assert!(plan.launch(&streams[0], (&a, &b)).is_err());
    assert!(plan.launch(&streams[1], (&a, &a)).is_err());
}
