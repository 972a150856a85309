//! The contract of AttentionUpdate: what it takes, and a call for every rule.

use ascend_spec::ops::attention_update::rules::RULES;
use ascend_spec::ops::attention_update::{UpdateCall, UpdateProblem};
use ascend_spec::{Cann, DType, Dims, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;

const ATLAS_A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_1);

fn desc(dtype: DType, shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

fn lse(rows: i64) -> TensorDesc {
    desc(DType::Float, &[rows])
}

fn local(rows: i64, dim: i64) -> TensorDesc {
    desc(DType::Bf16, &[rows, dim])
}

fn call<'a>(lse: &'a [TensorDesc], local_out: &'a [TensorDesc]) -> UpdateCall<'a> {
    UpdateCall { lse, local_out, update_type: 1, out: local_out.first().copied(), lse_out: lse.first().copied() }
}

#[test]
fn every_documented_form_is_taken() {
    for dtype in [DType::Float, DType::Float16, DType::Bf16] {
        for (parts, dim) in [(1, 8), (2, 128), (16, 512)] {
            let (lse, local) = (vec![lse(6); parts], vec![desc(dtype, &[6, dim]); parts]);
            let with = call(&lse, &local);
            let want =
                UpdateProblem { parts, rows: 6, dim: dim as usize, dtype, writes_lse: true, infinity_is_empty: true };
            assert_eq!(with.check(Target::new(Soc::AtlasA3, Cann::V9_1)), Ok(want));
            let without = UpdateCall { update_type: 0, lse_out: None, ..with };
            assert!(!without.check(ASCEND_950).unwrap().writes_lse);
        }
    }
    assert_eq!(call(&[lse(0)], &[local(0, 64)]).check(ATLAS_A2).unwrap().rows, 0);
}

#[test]
fn releases_whose_kernels_replace_infinity_are_known() {
    let (lse, local) = ([lse(6); 2], [local(6, 64); 2]);
    let replaced = |soc, cann| {
        let problem = call(&lse, &local).check(Target::new(soc, cann));
        problem.unwrap().infinity_is_empty
    };
    for soc in [Soc::AtlasA2, Soc::AtlasA3] {
        let all = Cann::ALL.map(|cann| replaced(soc, cann));
        assert_eq!(all, [false, true, true, true, true], "{soc}");
    }
    let later = [Cann::V9_0, Cann::V9_1].map(|cann| replaced(Soc::Ascend950, cann));
    assert_eq!(later, [false, true]);
}

#[test]
fn every_rule_has_a_call_that_breaks_it() {
    let (l, o) = (&[lse(6); 2][..], &[local(6, 64); 2][..]);
    let base = call(l, o);
    let odd = [local(6, 64), local(5, 64)];
    let mixed = [local(6, 64), desc(DType::Float16, &[6, 64])];
    let (wide, narrow, uneven) = ([local(6, 520); 2], [local(6, 0); 2], [local(6, 12); 2]);
    let (int, flat) = ([desc(DType::Int8, &[6, 64]); 2], [desc(DType::Bf16, &[384]); 2]);
    let (half_lse, short, column) =
        ([lse(6), desc(DType::Float16, &[6])], [lse(6), lse(5)], [desc(DType::Float, &[6, 1]); 2]);
    let nz = [TensorDesc { format: Format::FractalNz, ..local(6, 64) }; 2];
    let (many_lse, many) = ([lse(6); 17], [local(6, 64); 17]);
    let broken: &[(&str, i32, UpdateCall<'_>)] = &[
        ("update.required", 161_001, call(&[], o)),
        ("update.required", 161_001, call(l, &[])),
        ("update.required", 161_001, UpdateCall { out: None, ..base }),
        ("update.count", 161_002, call(&l[..1], o)),
        ("update.count", 161_002, call(&many_lse, &many)),
        ("update_type.known", 161_002, UpdateCall { update_type: 2, ..base }),
        ("update_type.known", 161_002, UpdateCall { update_type: i64::MIN, ..base }),
        ("update.lse_out", 161_002, UpdateCall { update_type: 0, ..base }),
        ("update.lse_out", 161_002, UpdateCall { lse_out: None, ..base }),
        ("update.format", 161_002, call(l, &nz)),
        ("update.lse_dtype", 161_002, call(&half_lse, o)),
        ("update.local_out_dtype", 161_002, call(l, &int)),
        ("update.local_out_dtype", 161_002, call(l, &mixed)),
        ("update.local_out_shape", 161_002, call(l, &flat)),
        ("update.local_out_shape", 161_002, call(l, &odd)),
        ("update.local_out_shape", 161_002, UpdateCall { out: Some(local(6, 32)), ..base }),
        ("update.head_dim", 161_002, call(l, &wide)),
        ("update.head_dim", 161_002, call(l, &narrow)),
        ("update.head_dim", 161_002, call(l, &uneven)),
        ("update.lse_shape", 161_002, call(&short, o)),
        ("update.lse_shape", 161_002, call(&column, o)),
        ("update.lse_shape", 161_002, UpdateCall { lse_out: Some(lse(7)), ..base }),
    ];
    // Content, which the emulator and the safe layer look at.
    let mut covered = vec!["update.empty_row", "update.infinite_lse"];
    for (id, status, call) in broken {
        match call.check(ATLAS_A2) {
            Err(violation) => {
                assert_eq!(violation.rule.id, *id, "{violation}");
                assert_eq!(violation.rule.status, *status, "{id}");
            }
            other => panic!("{id}: {other:?}"),
        }
        covered.push(id);
    }
    let refused = base.check(Target::new(Soc::Atlas200I500A2, Cann::V9_1)).unwrap_err();
    assert!(refused.rule.id == "update.product", "{refused}");
    covered.push("update.product");
    for rule in RULES {
        assert!(covered.contains(&rule.id), "{} has no call", rule.id);
    }
    let strided = [TensorDesc { strides: Dims::of([128, 1]), ..local(6, 64) }; 2];
    let refused = call(l, &strided).check(ATLAS_A2).unwrap_err();
    assert!(refused.is_unsupported(), "{refused}");
}

#[test]
fn inputs_may_be_strided() {
    let parts = [TensorDesc { strides: Dims::of([65, 1]), ..local(6, 64) }; 2];
    let sums = [TensorDesc { strides: Dims::of([65]), offset: 64, ..lse(6) }; 2];
    let taken = UpdateCall { out: Some(local(6, 64)), lse_out: Some(lse(6)), ..call(&sums, &parts) };
    assert_eq!(taken.check(ATLAS_A2).unwrap().rows, 6);
}

proptest! {
    /// No shape makes the check panic or overflow.
    #[test]
    fn nonsense_is_refused(dims in prop::collection::vec(prop_oneof![-2i64..9, Just(i64::MAX), Just(1 << 60)], 0..4)) {
        let of = |dtype| [desc(dtype, &dims); 2];
        let _ = call(&of(DType::Float), &of(DType::Float16)).check(ATLAS_A2);
    }
}
