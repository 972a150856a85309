//! The contract of ScatterPaKvCache: what it takes, a call for every rule, and where rows go.

use ascend_spec::ops::scatter_pa_kv_cache::rules::RULES;
use ascend_spec::ops::scatter_pa_kv_cache::{NORM, PA_NZ, Pieces, ScatterCall, ScatterProblem};
use ascend_spec::{DType, Dims, Format, Level, Soc, TensorDesc};
use proptest::prelude::*;

fn desc(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    desc(DType::Float16, shape)
}

/// Five tokens of two heads, into three blocks of eight.
fn call() -> ScatterCall<'static> {
    ScatterCall {
        key: half(&[5, 2, 32]),
        key_cache: half(&[3, 8, 2, 32]),
        slot_mapping: desc(DType::Int32, &[5]),
        value: half(&[5, 2, 16]),
        value_cache: half(&[3, 8, 2, 16]),
        ..ScatterCall::default()
    }
}

fn accepted(call: &ScatterCall<'_>) -> ScatterProblem {
    call.check(Soc::AtlasA2).unwrap()
}

#[test]
fn every_documented_form_is_taken() {
    let norm = accepted(&call());
    assert_eq!((norm.tokens, norm.blocks, norm.block_size), (5, 3, 8));
    assert_eq!(norm.slots(), 24);
    assert_eq!(norm.key, Pieces { count: 1, bytes: 128 });
    assert_eq!(norm.value.unwrap().row_bytes(), 64);

    let keys = ScatterCall {
        value: None,
        value_cache: None,
        slot_mapping: desc(DType::Int64, &[5]),
        cache_mode: Some(NORM),
        scatter_mode: Some("None"),
        strides: Some(&[1, 1]),
        offsets: Some(&[0, 0]),
        ..call()
    };
    assert_eq!(accepted(&keys).value, None);

    for (cache, value_cache) in
        [(half(&[3, 4, 8, 16]), half(&[3, 2, 1, 8, 16])), (half(&[3, 2, 2, 8, 16]), half(&[3, 2, 8, 16]))]
    {
        let mut nz = ScatterCall { key_cache: cache, value_cache, cache_mode: Some(PA_NZ), ..call() };
        if let Some(cache) = &mut nz.key_cache {
            cache.format = Format::FractalNz;
        }
        let problem = accepted(&nz);
        assert_eq!(problem.key, Pieces { count: 4, bytes: 32 });
        assert_eq!(problem.value, Some(Pieces { count: 2, bytes: 32 }));
    }
    let int8 = ScatterCall {
        key: desc(DType::Int8, &[5, 1, 64]),
        key_cache: desc(DType::Int8, &[3, 2, 8, 32]),
        value: None,
        value_cache: None,
        cache_mode: Some(PA_NZ),
        ..call()
    };
    assert_eq!(accepted(&int8).key, Pieces { count: 2, bytes: 32 });

    let nothing = ScatterCall {
        key: half(&[0, 2, 32]),
        value: half(&[0, 2, 16]),
        slot_mapping: desc(DType::Int32, &[0]),
        ..call()
    };
    let problem = accepted(&nothing);
    assert_eq!(problem.tokens, 0);
    problem.touches(&nothing, &mut |argument, _| panic!("{argument:?}"));
    let float = ScatterCall {
        key: desc(DType::Float, &[5, 2, 32]),
        key_cache: desc(DType::Float, &[3, 8, 2, 32]),
        value: None,
        value_cache: None,
        ..call()
    };
    assert!(float.check(Soc::Ascend950).is_ok());
    assert!(float.check(Soc::AtlasA3).is_err());
}

#[test]
fn every_rule_has_a_call_that_breaks_it() {
    let strided = TensorDesc { strides: Dims::of([128, 64, 1]), ..half(&[5, 2, 32]).unwrap() };
    let nz_format = TensorDesc { format: Format::FractalNz, ..half(&[3, 8, 2, 32]).unwrap() };
    let base = call();
    let broken: &[(&str, i32, ScatterCall<'_>)] = &[
        ("scatter.required", 161_001, ScatterCall { key: None, ..base }),
        ("scatter.required", 161_001, ScatterCall { key_cache: None, ..base }),
        ("scatter.required", 161_001, ScatterCall { slot_mapping: None, ..base }),
        ("scatter.required", 161_001, ScatterCall { value: None, ..base }),
        ("scatter.required", 161_001, ScatterCall { value_cache: None, ..base }),
        ("scatter.dtype", 161_002, ScatterCall { key: desc(DType::Float, &[5, 2, 32]), ..base }),
        ("scatter.dtype", 161_002, ScatterCall { value: desc(DType::Int32, &[5, 2, 16]), ..base }),
        ("scatter.same_dtype", 161_002, ScatterCall { key: desc(DType::Bf16, &[5, 2, 32]), ..base }),
        ("slot_mapping.dtype", 161_002, ScatterCall { slot_mapping: desc(DType::Int16, &[5]), ..base }),
        ("scatter.format", 161_002, ScatterCall { key_cache: Some(nz_format), ..base }),
        ("cache_mode.known", 161_002, ScatterCall { cache_mode: Some("norm"), ..base }),
        ("scatter_mode.known", 161_002, ScatterCall { scatter_mode: Some(""), ..base }),
        ("scatter.contiguous", 161_002, ScatterCall { key: Some(strided), ..base }),
        ("scatter.contiguous", 161_002, ScatterCall { key_cache: half(&[3, -8, 2, 32]), ..base }),
        ("scatter.contiguous", 161_002, ScatterCall { key_cache: half(&[i64::MAX, 1, 1, 1]), ..base }),
        ("scatter.key_shape", 561_002, ScatterCall { key: half(&[5, 64]), ..base }),
        ("scatter.key_shape", 561_002, ScatterCall { key: half(&[5, 0, 32]), ..base }),
        ("scatter.value_shape", 561_002, ScatterCall { value: half(&[5, 1, 16]), ..base }),
        ("scatter.value_shape", 561_002, ScatterCall { value: half(&[4, 2, 16]), ..base }),
        ("slot_mapping.shape", 561_002, ScatterCall { slot_mapping: desc(DType::Int32, &[4]), ..base }),
        ("slot_mapping.shape", 561_002, ScatterCall { slot_mapping: desc(DType::Int32, &[5, 1]), ..base }),
        ("key_cache.shape", 561_002, ScatterCall { key_cache: half(&[3, 2, 8, 32]), ..base }),
        ("key_cache.shape", 561_002, ScatterCall { key_cache: half(&[3, 8, 64]), ..base }),
        ("key_cache.shape", 561_002, ScatterCall { key_cache: half(&[0, 8, 2, 32]), ..base }),
        ("key_cache.shape", 561_002, ScatterCall { cache_mode: Some(PA_NZ), ..base }),
        ("value_cache.shape", 561_002, ScatterCall { value_cache: half(&[4, 8, 2, 16]), ..base }),
        ("value_cache.shape", 561_002, ScatterCall { value_cache: half(&[3, 8, 2, 32]), ..base }),
    ];
    let mut covered = vec![
        // Content, for which `slot_faults` has tests of its own.
        "slot_mapping.range",
        "slot_mapping.unique",
        "slot_mapping.negative",
    ];
    for (id, status, call) in broken {
        match call.check(Soc::AtlasA2) {
            Err(violation) => {
                assert_eq!(violation.rule.id, *id, "{violation}");
                assert_eq!(violation.rule.status, *status, "{id}");
            }
            other => panic!("{id}: {other:?}"),
        }
        covered.push(id);
    }
    let refused = base.check(Soc::AtlasInference).unwrap_err();
    assert!(refused.rule.id == "scatter.product", "{refused}");
    covered.push("scatter.product");
    let unused = ScatterCall { seq_lens: desc(DType::Int32, &[1]), ..base };
    assert!(unused.check(Soc::AtlasA2).is_ok());
    let lint = unused.lint(Soc::AtlasA2, &[]).unwrap_err();
    assert_eq!((lint.rule.id, lint.rule.level), ("compress_lens.unused", Level::Lint));
    assert_eq!(unused.lint(Soc::AtlasA2, &["compress_lens.unused"]), Ok(()));
    assert_eq!(base.lint(Soc::AtlasA2, &[]), Ok(()));
    covered.push(lint.rule.id);
    for rule in RULES {
        assert!(covered.contains(&rule.id), "{} has no call", rule.id);
    }
}

#[test]
fn what_is_not_computed_is_a_typed_refusal() {
    for mode in ["Alibi", "Rope", "Omni", "Nct"] {
        let call = ScatterCall { scatter_mode: Some(mode), ..call() };
        let refused = call.check(Soc::AtlasA2).unwrap_err();
        assert!(refused.is_unsupported() && refused.given.contains(mode), "{refused}");
    }
    for (strides, offsets) in [(Some(&[2, 1][..]), None), (Some(&[1][..]), None), (None, Some(&[0, 8][..]))] {
        let call = ScatterCall { strides, offsets, ..call() };
        let refused = call.check(Soc::AtlasA2).unwrap_err();
        assert!(refused.is_unsupported(), "{refused}");
    }
}

proptest! {
    /// Each byte of each slot's row has a place of its own in the cache, and all of them fill it.
    #[test]
    fn places_fill_the_cache(blocks in 1usize..4, block_size in 1usize..6, heads in 1i64..3, nz: bool) {
        let (dim, of) = (32i64, |size: usize| size as i64);
        let shape = match nz {
            true => vec![of(blocks), heads * dim / 16, of(block_size), 16],
            false => vec![of(blocks), of(block_size), heads, dim],
        };
        let call = ScatterCall {
            key: half(&[1, heads, dim]),
            key_cache: half(&shape),
            slot_mapping: desc(DType::Int64, &[1]),
            cache_mode: nz.then_some(PA_NZ),
            ..ScatterCall::default()
        };
        let problem = accepted(&call);
        let mut seen = vec![false; blocks * block_size * problem.key.row_bytes()];
        for slot in 0..problem.slots() as usize {
            for piece in 0..problem.key.count {
                let at = problem.place(&problem.key, slot, piece);
                for byte in &mut seen[at..at + problem.key.bytes] {
                    prop_assert!(!*byte);
                    *byte = true;
                }
            }
        }
        prop_assert!(seen.iter().all(|&byte| byte));
    }

    /// No shape makes the check panic or overflow.
    #[test]
    fn nonsense_is_refused(dims in prop::collection::vec(prop_oneof![-2i64..4, Just(i64::MAX), Just(1 << 40)], 4..=4)) {
        let of = |range: std::ops::Range<usize>| half(&dims[range]);
        let call = ScatterCall {
            key: of(0..3),
            key_cache: of(0..4),
            slot_mapping: desc(DType::Int32, &dims[..1]),
            value: of(1..4),
            value_cache: of(0..4),
            ..ScatterCall::default()
        };
        let _ = call.check(Soc::AtlasA2);
        let keys = ScatterCall { value: None, value_cache: None, cache_mode: Some(PA_NZ), ..call };
        let _ = keys.check(Soc::AtlasA2);
    }
}
