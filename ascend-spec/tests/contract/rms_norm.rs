//! The contract of RmsNorm: a call for every rule, and what is taken.

use crate::described::of;
use ascend_spec::DType::{Bf16, Float, Float16, Int8};
use ascend_spec::ops::rms_norm::{Parameter, RmsNormCall, RmsNormProblem, rules};
use ascend_spec::{DType, Format, Soc, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Three rows, two by two, of four elements.
fn base() -> RmsNormCall {
    with_dtypes(Float16, Float16)
}

fn with_dtypes(x: DType, gamma: DType) -> RmsNormCall {
    RmsNormCall {
        x: of(x, &[2, 3, 4]),
        gamma: of(gamma, &[4]),
        y: of(x, &[2, 3, 4]),
        rstd: of(Float, &[2, 3, 1]),
        ..RmsNormCall::default()
    }
}

#[test]
fn every_rule_of_rms_norm_refuses_a_call() {
    let base = base();
    let nz = base.x.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let a2 = Soc::AtlasA2;
    #[rustfmt::skip]
    let calls = [
        ("rms_norm.required", 161_001, a2, RmsNormCall { x: None, ..base }),
        ("rms_norm.required", 161_001, a2, RmsNormCall { gamma: None, ..base }),
        ("rms_norm.required", 161_001, a2, RmsNormCall { y: None, ..base }),
        ("rms_norm.required", 161_001, a2, RmsNormCall { rstd: None, ..base }),
        ("rms_norm.product", 561_003, Soc::AtlasTraining, base),
        ("rms_norm.dtype", 161_002, a2, with_dtypes(Int8, Int8)),
        ("rms_norm.dtype", 161_002, a2, with_dtypes(Float, Float16)),
        ("rms_norm.dtype", 161_002, Soc::AtlasInference, with_dtypes(Bf16, Bf16)),
        ("rms_norm.dtype", 161_002, Soc::AtlasInference, with_dtypes(Float16, Float)),
        ("rms_norm.dtype", 161_002, a2, RmsNormCall { y: of(Float, &[2, 3, 4]), ..base }),
        ("rms_norm.dtype", 161_002, a2, RmsNormCall { rstd: of(Float16, &[2, 3, 1]), ..base }),
        ("rms_norm.format", 161_002, a2, RmsNormCall { x: nz, ..base }),
        ("rms_norm.rank", 561_002, a2, RmsNormCall { gamma: of(Float16, &[]), ..base }),
        ("rms_norm.gamma_shape", 561_002, a2, RmsNormCall { gamma: of(Float16, &[3]), ..base }),
        ("rms_norm.gamma_shape", 561_002, a2, RmsNormCall { gamma: of(Float16, &[1, 2, 3, 4]), ..base }),
        ("rms_norm.gamma_shape", 561_002, a2,
            RmsNormCall { x: of(Float16, &[2, 0]), gamma: of(Float16, &[0]), y: of(Float16, &[2, 0]), ..base }),
        ("rms_norm.y_shape", 561_002, a2, RmsNormCall { y: of(Float16, &[6, 4]), ..base }),
        ("rms_norm.rstd_shape", 561_002, a2, RmsNormCall { rstd: of(Float, &[6]), ..base }),
        ("rms_norm.rstd_shape", 561_002, a2, RmsNormCall { rstd: of(Float, &[2, 3, 1, 1]), ..base }),
        ("rms_norm.epsilon", 561_002, a2, RmsNormCall { epsilon: -1e-6, ..base }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, soc, call) in calls {
        let violation = call.check(soc).unwrap_err();
        assert_eq!((violation.rule.id, violation.status()), (id, status));
        broken.insert(id);
    }
    #[rustfmt::skip]
    let lints = [
        ("rms_norm.rstd_rows", a2, RmsNormCall { rstd: of(Float, &[2, 1, 1]), ..base }),
        ("rms_norm.rstd_rows", a2, RmsNormCall { rstd: of(Float, &[2, 3, 4]), ..base }),
        ("rms_norm.finite_epsilon", a2, RmsNormCall { epsilon: f64::NAN, ..base }),
        ("rms_norm.finite_epsilon", a2, RmsNormCall { epsilon: f64::INFINITY, ..base }),
        ("rms_norm.row_bytes", Soc::AtlasInference, base),
    ];
    for (id, soc, call) in lints {
        assert!(call.check(soc).is_ok(), "{id}");
        assert_eq!(call.lint(soc, &[]).unwrap_err().rule.id, id);
        assert_eq!(call.lint(soc, &[id]), Ok(()));
        broken.insert(id);
    }
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    let want = RmsNormProblem { rows: 6, columns: 4, epsilon: 1e-6, overruns: false };
    for soc in [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950] {
        for (x, gamma) in [(Float16, Float16), (Bf16, Bf16), (Float, Float), (Float16, Float), (Bf16, Float)] {
            let call = with_dtypes(x, gamma);
            assert_eq!(call.check(soc), Ok(want), "{soc} {x} {gamma}");
            assert_eq!(call.lint(soc, &[]), Ok(()), "{soc} {x} {gamma}");
        }
    }
    let planes = RmsNormCall { gamma: of(Float16, &[3, 4]), rstd: of(Float, &[2, 1, 1]), ..base() };
    let problem = planes.check(Soc::AtlasInference).unwrap();
    assert_eq!([problem.rows, problem.columns], [2, 12]);
    assert_eq!(planes.lint(Soc::AtlasA2, &[]), Ok(()));
    // ggml leaves the axes of a row out.
    let rows = RmsNormCall { rstd: of(Float, &[2, 3]), ..base() };
    assert!(!rows.check(Soc::AtlasA2).unwrap().overruns);
    assert_eq!(rows.lint(Soc::AtlasA2, &[]), Ok(()));
}

#[test]
fn a_launch_touches_its_tensors_and_what_is_behind_a_short_rstd() {
    let touched = |call: RmsNormCall| {
        let mut touched = Vec::new();
        let problem = call.check(Soc::AtlasA2).unwrap();
        problem.touches(&call, &mut |parameter, range| touched.push((parameter, range)));
        touched
    };
    let rstd = |bytes| {
        vec![(Parameter::X, 0..48), (Parameter::Gamma, 0..8), (Parameter::Y, 0..48), (Parameter::Rstd, 0..bytes)]
    };
    assert_eq!(touched(base()), rstd(24));
    let short = RmsNormCall { rstd: of(Float, &[1, 1, 1]), ..base() };
    assert_eq!(touched(short), rstd(24));
    let none =
        RmsNormCall { x: of(Float16, &[0, 3, 4]), y: of(Float16, &[0, 3, 4]), rstd: of(Float, &[0, 3, 1]), ..base() };
    assert_eq!(touched(none), []);
}

proptest! {
    /// No shape makes the check panic or overflow.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..4, Just(i64::MAX), Just(1 << 60)], 0..4), 4,
        ),
        epsilon: f64,
    ) {
        let half = |at: usize| of(Float16, &shapes[at]);
        let call = RmsNormCall {
            x: half(0),
            gamma: half(1),
            epsilon,
            y: half(2),
            rstd: of(Float, &shapes[3]),
        };
        for soc in [Soc::AtlasA2, Soc::Ascend950, Soc::AtlasInference] {
            if let Ok(problem) = call.check(soc) {
                let _ = call.lint(soc, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
            }
        }
    }
}
