//! The contract of BatchMatMul: a call for every rule, and what is taken.

use crate::described::{half, of};
use ascend_spec::ops::batch_mat_mul::{BatchMatMulCall, BatchMatMulProblem, Parameter, rules};
use ascend_spec::{DType, Dims, Format, Soc, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = BatchMatMulCall;

fn base() -> Call {
    Call { self_: half(&[2, 3, 4]), mat2: half(&[2, 4, 5]), out: half(&[2, 3, 5]), ..Call::default() }
}

fn with_dtypes([left, right, out]: [DType; 3]) -> Call {
    Call { self_: of(left, &[2, 3, 4]), mat2: of(right, &[2, 4, 5]), out: of(out, &[2, 3, 5]), ..Call::default() }
}

#[test]
fn every_rule_of_batch_mat_mul_refuses_a_call() {
    use DType::{Bf16, Float, Float16, Int8};
    let base = base();
    let nz = base.self_.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let endless = base.mat2.map(|desc| TensorDesc { strides: Dims::of([i64::MAX, i64::MAX, 1]), ..desc });
    let ints = with_dtypes([Int8; 3]);
    let brains = with_dtypes([Bf16; 3]);
    let floats = with_dtypes([Float; 3]);
    let math = |cube_math_type, call: Call| Call { cube_math_type, ..call };
    #[rustfmt::skip]
    let calls = [
        ("batch_mat_mul.required", 161_001, Soc::AtlasA2, Call { self_: None, ..base }),
        ("batch_mat_mul.required", 161_001, Soc::AtlasA2, Call { mat2: None, ..base }),
        ("batch_mat_mul.required", 161_001, Soc::AtlasA2, Call { out: None, ..base }),
        ("batch_mat_mul.product", 561_003, Soc::Atlas200I500A2, base),
        ("batch_mat_mul.dtype", 161_002, Soc::AtlasA2, ints),
        ("batch_mat_mul.dtype", 161_002, Soc::AtlasA3, Call { out: ints.out, ..base }),
        ("batch_mat_mul.dtype", 161_002, Soc::AtlasInference, brains),
        ("batch_mat_mul.dtype", 161_002, Soc::AtlasTraining, brains),
        ("batch_mat_mul.cube_math_type", 161_002, Soc::AtlasA2, math(4, base)),
        ("batch_mat_mul.cube_math_type", 161_002, Soc::Ascend950, math(-1, base)),
        ("batch_mat_mul.float_units", 161_002, Soc::AtlasInference, floats),
        ("batch_mat_mul.float_units", 161_002, Soc::AtlasInference, math(3, floats)),
        ("batch_mat_mul.rank", 161_002, Soc::AtlasA2, Call { self_: half(&[6, 4]), ..base }),
        ("batch_mat_mul.rank", 161_002, Soc::AtlasA2, Call { out: half(&[1, 2, 3, 5]), ..base }),
        ("batch_mat_mul.reduced_axis", 161_002, Soc::AtlasA2, Call { mat2: half(&[2, 5, 4]), ..base }),
        ("batch_mat_mul.batch", 161_002, Soc::AtlasA2, Call { mat2: half(&[3, 4, 5]), ..base }),
        ("batch_mat_mul.out_shape", 161_002, Soc::AtlasA2, Call { out: half(&[2, 5, 3]), ..base }),
        ("batch_mat_mul.out_shape", 161_002, Soc::AtlasA2, Call { out: half(&[1, 3, 5]), ..base }),
        ("batch_mat_mul.format", 161_002, Soc::AtlasA2, Call { self_: nz, ..base }),
        ("batch_mat_mul.format", 161_002, Soc::AtlasA2, Call { mat2: endless, ..base }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, soc, call) in calls {
        match call.check(soc) {
            Err(violation) => {
                assert_eq!(violation.rule.id, id, "{violation}");
                assert_eq!(violation.rule.status, status, "{violation}");
                assert!(!violation.given.is_empty() && !violation.allowed.is_empty());
            }
            other => panic!("{id}: {other:?}"),
        }
        broken.insert(id);
    }
    let nothing = Call { self_: half(&[0, 3, 4]), mat2: half(&[1, 4, 5]), out: half(&[1, 3, 5]), ..base };
    #[rustfmt::skip]
    let lints = [
        ("batch_mat_mul.mixed_dtypes", with_dtypes([Bf16, Float, Float])),
        ("batch_mat_mul.out_dtype", with_dtypes([Float16, Float16, Float])),
        ("batch_mat_mul.out_dtype", with_dtypes([Float, Float16, Float16])),
        ("batch_mat_mul.ignored_cube_math_type", math(2, brains)),
        ("batch_mat_mul.ignored_cube_math_type", math(3, base)),
        ("batch_mat_mul.empty_batch", nothing),
    ];
    for (id, call) in lints {
        assert!(call.check(Soc::AtlasA2).is_ok(), "{id}");
        let violation = call.lint(Soc::AtlasA2, &[]).unwrap_err();
        assert_eq!(violation.rule.id, id);
        assert_eq!(call.lint(Soc::AtlasA2, &[id]), Ok(()));
        broken.insert(id);
    }
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_dtypes_are_taken_without_a_lint() {
    use DType::{Bf16, Float, Float16};
    for (soc, dtypes, math) in [
        (Soc::AtlasA2, [Float16; 3], 0),
        (Soc::AtlasA2, [Bf16; 3], 1),
        (Soc::AtlasA3, [Float; 3], 3),
        (Soc::AtlasA2, [Float16, Float, Float], 0),
        (Soc::Ascend950, [Bf16, Bf16, Float], 0),
        (Soc::AtlasInference, [Float; 3], 1),
        (Soc::AtlasTraining, [Float16; 3], 0),
    ] {
        let call = Call { cube_math_type: math, ..with_dtypes(dtypes) };
        let want = BatchMatMulProblem { batch: 2, rows: 3, inner: 4, columns: 5 };
        assert_eq!(call.check(soc), Ok(want), "{soc} {dtypes:?}");
        assert_eq!(call.lint(soc, &[]), Ok(()), "{soc} {dtypes:?}");
    }
}

#[test]
fn one_factor_serves_every_product() {
    for (left, right) in [([1, 3, 4], [2, 4, 5]), ([2, 3, 4], [1, 4, 5])] {
        let call = Call { self_: half(&left), mat2: half(&right), ..base() };
        assert_eq!(call.check(Soc::AtlasA2).unwrap().batch, 2);
    }
}

#[test]
fn nothing_is_touched_where_nothing_is_computed() {
    let touched = |call: Call| {
        let mut touched = Vec::new();
        let problem = call.check(Soc::AtlasA2).unwrap();
        problem.touches(&call, &mut |parameter, range| touched.push((parameter, range)));
        touched
    };
    let want = [(Parameter::SelfMatrices, 0..48), (Parameter::Mat2, 0..80), (Parameter::Out, 0..60)];
    assert_eq!(touched(base()), want);
    let no_columns = Call { mat2: half(&[2, 4, 0]), out: half(&[2, 3, 0]), ..base() };
    assert_eq!(touched(no_columns), []);
    let no_sum = Call { self_: half(&[2, 3, 0]), mat2: half(&[2, 0, 5]), ..base() };
    assert_eq!(touched(no_sum)[2], (Parameter::Out, 0..60));
}

#[test]
fn names_are_those_of_the_operator() {
    assert_eq!(Parameter::SelfMatrices.name(), "self");
    assert_eq!(Parameter::from_name("self"), Some(Parameter::SelfMatrices));
    let mut arguments = base().to_arguments();
    let given = |value| ascend_spec::operator::OwnedValue::Int(value);
    (arguments.set_value(Parameter::CubeMathType, given(3))).unwrap();
    assert_eq!(arguments.cube_math_type, 3);
    assert!(arguments.set_value(Parameter::CubeMathType, given(128)).is_err());
}

proptest! {
    /// No shape makes the check panic or overflow.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..4, Just(i64::MAX), Just(1 << 60)], 0..4), 3,
        ),
        math: i8,
    ) {
        let call = Call {
            self_: half(&shapes[0]),
            mat2: half(&shapes[1]),
            out: half(&shapes[2]),
            cube_math_type: math,
        };
        for soc in [Soc::AtlasA2, Soc::Ascend950, Soc::AtlasInference] {
            if call.check(soc).is_ok() {
                let _ = call.lint(soc, &[]);
            }
        }
    }
}
