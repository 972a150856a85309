//! The contracts of the operators that compress tokens: a call for every rule, what is taken, and which tokens of the
//! cache are written.

use crate::fixes::follow;
use ascend_spec::DType::{Bf16, Float, Float16, Int32, Int64};
use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_compress::{self, NsaCompressCall, Parameter};
use ascend_spec::ops::nsa_compress_with_cache::{self, NsaCompressCacheCall};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{Cann, DType, Format, Rule, Soc, Target, TensorDesc, Violation};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = NsaCompressCall<'static>;
type CacheCall = NsaCompressCacheCall<'static>;

pub(crate) const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

/// Targets that do not have the operators.
pub(crate) const WITHOUT: [Target; 4] = [
    Target::new(Soc::AtlasA2, Cann::V8_1),
    Target::new(Soc::Ascend950, Cann::V9_1),
    Target::new(Soc::Ascend950, Cann::V9_2),
    Target::new(Soc::AtlasInference, Cann::V9_1),
];

pub(crate) fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

pub(crate) fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(Float16, shape)
}

pub(crate) fn numbers(shape: &[i64]) -> Option<TensorDesc> {
    of(Int32, shape)
}

/// Three sequences of 100, 10 and 40 tokens, of which blocks of 32 are compressed: 5, 0 and 1 of them.
fn call() -> Call {
    Call {
        input: half(&[150, 4, 64]),
        weight: half(&[32, 4]),
        act_seq_len: Some(&[100, 110, 150]),
        output: half(&[6, 4, 64]),
        ..Call::default()
    }
}

/// Three sequences in 8 blocks of 64 tokens, of which the first and the last have a new compressed token.
fn cached() -> CacheCall {
    CacheCall {
        input: half(&[8, 64, 4, 64]),
        weight: half(&[32, 4]),
        slot_mapping: numbers(&[3]),
        act_seq_len: Some(&[96, 100, 32]),
        block_table: numbers(&[3, 2]),
        page_block_size: 64,
        output_cache: half(&[20, 4, 64]),
        ..CacheCall::default()
    }
}

/// The sequences of [`cached`], one after the other.
fn packed() -> CacheCall {
    CacheCall { input: half(&[230, 4, 64]), block_table: None, layout: Some("TND"), ..cached() }
}

/// Checks that calls break these rules with these statuses; returns the ids.
#[track_caller]
pub(crate) fn refuse(
    prefix: &str,
    calls: impl IntoIterator<Item = (&'static str, i32, Violation)>,
) -> BTreeSet<&'static str> {
    let mut broken = BTreeSet::new();
    for (id, status, violation) in calls {
        let got = (violation.rule.id.to_owned(), violation.status());
        assert_eq!(got, (format!("{prefix}.{id}"), status), "{violation}");
        broken.insert(violation.rule.id);
    }
    broken
}

/// Checks that calls that hold every rule break these lints; returns the ids. `of` checks a call with lints allowed.
#[track_caller]
pub(crate) fn report<C>(
    prefix: &str,
    calls: impl IntoIterator<Item = (&'static str, C)>,
    of: impl Fn(&C, &[&str]) -> Result<(), Violation>,
) -> BTreeSet<&'static str> {
    let mut broken = BTreeSet::new();
    for (id, call) in calls {
        let lint = of(&call, &[]).unwrap_err();
        assert_eq!((lint.rule.id.to_owned(), lint.status()), (format!("{prefix}.{id}"), 0), "{lint}");
        assert_eq!(of(&call, &[lint.rule.id]), Ok(()));
        broken.insert(lint.rule.id);
    }
    broken
}

pub(crate) fn ids(rules: &[&'static Rule]) -> BTreeSet<&'static str> {
    rules.iter().map(|rule| rule.id).collect()
}

#[test]
fn every_rule_of_compression_refuses_a_call() {
    let call = call();
    let nz = call.input.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let sized = |heads: i64, dim: i64| Call {
        input: half(&[150, heads, dim]),
        weight: half(&[32, heads]),
        output: half(&[6, heads, dim]),
        ..call
    };
    #[rustfmt::skip]
    let calls = [
        ("required", 161_001, Call { input: None, ..call }),
        ("required", 161_001, Call { weight: None, ..call }),
        ("required", 161_001, Call { act_seq_len: None, ..call }),
        ("required", 161_001, Call { output: None, ..call }),
        ("dtype", 161_002, Call { input: of(Float, &[150, 4, 64]), ..call }),
        ("dtype", 161_002, Call { weight: of(Bf16, &[32, 4]), ..call }),
        ("dtype", 161_002, Call { output: of(Float, &[6, 4, 64]), ..call }),
        ("format", 161_002, Call { input: nz, ..call }),
        ("layout", 161_002, Call { layout: "BSND", ..call }),
        ("input", 161_002, Call { input: half(&[150, 256]), ..call }),
        ("input", 161_002, Call { input: half(&[150, 0, 64]), ..call }),
        ("input", 161_002, Call { input: half(&[150, 4, 0]), ..call }),
        ("weight", 161_002, Call { weight: half(&[4, 32]), ..call }),
        ("weight", 161_002, Call { compress_block_size: 64, ..call }),
        ("act_seq_len_type", 561_103, Call { act_seq_len_type: 1, ..call }),
        ("block", 561_103, Call { weight: half(&[24, 4]), compress_block_size: 24, ..call }),
        ("block", 561_103, Call { weight: half(&[144, 4]), compress_block_size: 144, ..call }),
        ("stride", 561_103, Call { compress_stride: 24, ..call }),
        ("stride", 561_103, Call { compress_stride: 48, ..call }),
        ("stride", 561_103, Call { compress_stride: 0, ..call }),
        ("stride", 561_103, Call { weight: half(&[128, 4]), compress_block_size: 128, compress_stride: 80, ..call }),
        ("heads", 561_103, sized(129, 64)),
        ("head_dim", 561_103, sized(4, 72)),
        ("head_dim", 561_103, sized(4, 272)),
        ("out", 561_103, Call { output: half(&[6, 4, 32]), ..call }),
        ("out", 561_103, Call { output: half(&[6, 256]), ..call }),
    ];
    let refused = calls.map(|(id, status, call)| (id, status, call.check(A2).unwrap_err()));
    let without = WITHOUT.map(|target| ("product", 561_003, call.check(target).unwrap_err()));
    let mut broken = refuse("nsa_compress", refused.into_iter().chain(without));
    let lints = [
        ("lengths", Call { act_seq_len: Some(&[100, 90, 150]), output: half(&[7, 4, 64]), ..call }),
        ("lengths", Call { act_seq_len: Some(&[100, 110, 151]), ..call }),
        ("lengths", Call { act_seq_len: Some(&[-1, 110, 150]), ..call }),
        ("out_rows", Call { output: half(&[5, 4, 64]), ..call }),
        ("out_rows", Call { output: half(&[7, 4, 64]), ..call }),
    ];
    broken.extend(report("nsa_compress", lints, |call, allowed| {
        assert!(call.check(A2).is_ok());
        call.lint(A2, allowed)
    }));
    assert_eq!(broken, ids(nsa_compress::rules::RULES));
}

#[test]
fn every_rule_of_compression_into_a_cache_refuses_a_call() {
    let (cached, packed) = (cached(), packed());
    let heads = |heads: i64| CacheCall {
        input: half(&[8, 64, heads, 64]),
        weight: half(&[32, heads]),
        output_cache: half(&[20, heads, 64]),
        ..cached
    };
    #[rustfmt::skip]
    let calls = [
        ("required", 561_103, CacheCall { input: None, ..cached }),
        ("required", 561_103, CacheCall { weight: None, ..cached }),
        ("required", 561_103, CacheCall { slot_mapping: None, ..cached }),
        ("required", 561_103, CacheCall { output_cache: None, ..cached }),
        ("dtype", 161_002, CacheCall { input: of(Float, &[8, 64, 4, 64]), ..cached }),
        ("dtype", 161_002, CacheCall { output_cache: of(Bf16, &[20, 4, 64]), ..cached }),
        ("dtype", 161_002, CacheCall { slot_mapping: of(Int64, &[3]), ..cached }),
        ("dtype", 161_002, CacheCall { block_table: of(Int64, &[3, 2]), ..cached }),
        ("format", 161_002, CacheCall { weight: half(&[-1, 4]), ..cached }),
        ("empty", 161_002, CacheCall { slot_mapping: numbers(&[0]), ..cached }),
        ("empty", 161_002, CacheCall { output_cache: half(&[0, 4, 64]), ..cached }),
        ("layout", 161_002, CacheCall { layout: Some("BSND"), ..packed }),
        ("input", 561_103, CacheCall { block_table: None, ..cached }),
        ("input", 561_103, CacheCall { block_table: cached.block_table, ..packed }),
        ("page_block_size", 561_103, CacheCall { page_block_size: 128, ..cached }),
        ("page_block_size", 561_103, CacheCall { input: half(&[8, 32, 4, 64]), page_block_size: 32, ..cached }),
        ("weight", 161_002, CacheCall { weight: half(&[16, 4]), ..cached }),
        ("act_seq_len_type", 561_103, CacheCall { act_seq_len_type: 0, ..cached }),
        ("block", 561_103, CacheCall { weight: half(&[8, 4]), compress_block_size: 8, ..cached }),
        ("stride", 561_103, CacheCall { compress_stride: 17, ..cached }),
        ("heads", 561_103, heads(51)),
        ("heads", 561_103, heads(66)),
        ("head_dim", 561_103, CacheCall { input: half(&[8, 64, 4, 8]), ..cached }),
        ("batch", 561_103, CacheCall { act_seq_len: None, ..cached }),
        ("batch", 561_103, CacheCall { act_seq_len: Some(&[96, 32]), ..cached }),
        ("batch", 561_103, CacheCall { slot_mapping: numbers(&[3, 1]), ..cached }),
        ("batch", 561_103, CacheCall { block_table: numbers(&[2, 2]), ..cached }),
        ("output_cache", 561_103, CacheCall { output_cache: half(&[5, 4, 4, 64]), ..cached }),
        ("output_cache", 561_103, CacheCall { output_cache: half(&[20, 4, 32]), ..cached }),
    ];
    let refused = calls.map(|(id, status, call)| (id, status, call.check(A2).unwrap_err()));
    let without = WITHOUT.map(|target| ("product", 561_003, cached.check(target).unwrap_err()));
    let mut broken = refuse("nsa_compress_with_cache", refused.into_iter().chain(without));
    let lints = [
        ("lengths", CacheCall { act_seq_len: Some(&[96, 129, 32]), ..cached }),
        ("lengths", CacheCall { act_seq_len: Some(&[96, -1, 32]), ..cached }),
        ("lengths", CacheCall { input: half(&[227, 4, 64]), ..packed }),
    ];
    broken.extend(report("nsa_compress_with_cache", lints, |call, allowed| {
        assert!(call.check(A2).is_ok());
        call.lint(A2, allowed)
    }));
    for taken in [cached, packed, heads(50), heads(64), CacheCall { layout: None, ..packed }] {
        assert!(taken.check(A2).is_ok());
        assert_eq!(taken.lint(A2, &[]), Ok(()));
    }
    // The second sequence writes nothing, and nothing of its slot and its blocks counts.
    let contents = |slots: &[i64], table: &[i64]| {
        let arguments = AnyArguments::NsaCompressWithCache(cached.to_arguments());
        arguments.check_contents(1, A2, &|name| if name == "slot_mapping" { slots.to_vec() } else { table.to_vec() })
    };
    assert_eq!(contents(&[4, 4, 7], &[0, 1, -5, -1, 2, 99]), Ok(()));
    for (slots, table, text) in [
        ([4, 0, 20], [0, 1, 2, 3, 4, 5], "sequence 2 writes slot 20 of 20"),
        ([-1, 0, 7], [0, 1, 2, 3, 4, 5], "sequence 0 writes slot -1"),
        ([4, 0, 4], [0, 1, 2, 3, 4, 5], "sequences 0 and 2 write slot 4"),
        ([4, 0, 7], [0, 8, 2, 3, 4, 5], "token 64 of sequence 0"),
        ([4, 0, 7], [0, 1, 2, 3, -1, 5], "token 0 of sequence 2"),
    ] {
        let wrong = contents(&slots, &table).unwrap_err();
        assert!(wrong.to_string().contains(text), "{wrong}");
        broken.insert(wrong.rule.id);
    }
    assert_eq!(broken, ids(nsa_compress_with_cache::rules::RULES));
}

#[test]
fn an_output_has_a_token_for_each_block_and_touches_no_more() {
    for target in [Target::new(Soc::AtlasA2, Cann::V8_5), Target::new(Soc::AtlasA3, Cann::V9_2), A2] {
        assert!(call().check(target).is_ok());
        assert_eq!(call().lint(target, &[]), Ok(()));
    }
    assert_eq!(call().compressed(), call().output);
    let touched = |call: Call| {
        let problem = call.check(A2).unwrap();
        let mut touched = None;
        problem.touches(&call, &mut |of, range| {
            touched = if of == Parameter::Output { Some(range) } else { touched.clone() }
        });
        (touched, problem.overruns)
    };
    assert_eq!(touched(call()), (Some(0..6 * 4 * 64 * 2), false));
    assert_eq!(touched(Call { output: half(&[5, 4, 64]), ..call() }), (Some(0..6 * 4 * 64 * 2), true));
    assert_eq!(touched(Call { output: half(&[9, 4, 64]), ..call() }), (Some(0..6 * 4 * 64 * 2), false));
    assert_eq!(touched(Call { act_seq_len: Some(&[31, 40]), ..call() }), (None, false));
}

/// The rules whose fixes are changes, followed from calls that break them.
pub(crate) fn followed() -> Vec<&'static str> {
    let plain = [Call { layout: "BSND", ..call() }, Call { act_seq_len_type: 1, ..call() }];
    let cached = [
        CacheCall { layout: Some("BSND"), ..cached() },
        CacheCall { act_seq_len_type: 0, ..cached() },
        CacheCall { page_block_size: 128, ..cached() },
    ];
    let plain = plain.map(|call| AnyArguments::NsaCompress(call.to_arguments()));
    let cached = cached.map(|call| AnyArguments::NsaCompressWithCache(call.to_arguments()));
    let all = plain.iter().chain(&cached);
    let followed = all.flat_map(|call| {
        let (said, end) = follow(call, 1, A2);
        assert_eq!(end.check(1, A2, &mut |lint| panic!("{lint}")), Ok(()));
        said
    });
    followed.collect()
}

proptest! {
    /// No shape, attribute or number makes the checks or what follows from them panic or overflow.
    #[test]
    fn nonsense_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(
                prop_oneof![-2i64..5, Just(16), Just(64), Just(i64::MAX), Just(1 << 60)], 0..5,
            ), 6,
        ),
        sizes in prop::collection::vec(prop_oneof![-1i64..200, Just(i64::MIN), Just(i64::MAX)], 4),
        lengths in prop::collection::vec(prop_oneof![-3i64..300, Just(i64::MIN), Just(i64::MAX)], 0..5),
        slots in prop::collection::vec(prop_oneof![-3i64..70, Just(i64::MIN), Just(i64::MAX)], 0..6),
    ) {
        let base = NsaCompressCall {
            input: half(&shapes[0]),
            weight: half(&shapes[1]),
            act_seq_len: Some(&lengths),
            compress_block_size: sizes[0],
            compress_stride: sizes[1],
            ..NsaCompressCall::default()
        };
        let likely = NsaCompressCall { act_seq_len: Some(&lengths), ..call() };
        for call in [base, NsaCompressCall { output: base.compressed(), ..base }, likely] {
            let _ = call.compressed();
            if let Ok(problem) = call.check(A2) {
                let _ = call.lint(A2, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                let firsts: Vec<_> = problem.firsts(&lengths).collect();
                prop_assert_eq!(firsts.len(), problem.blocks);
                prop_assert!(firsts.iter().all(|first| first + problem.compression.block <= problem.tokens));
            }
        }
        let base = NsaCompressCacheCall {
            input: half(&shapes[2]),
            weight: half(&shapes[1]),
            slot_mapping: numbers(&shapes[3]),
            act_seq_len: Some(&lengths),
            block_table: numbers(&shapes[4]).filter(|_| sizes[3] > 50),
            compress_block_size: sizes[0],
            compress_stride: sizes[1],
            page_block_size: sizes[2],
            output_cache: half(&shapes[5]),
            ..NsaCompressCacheCall::default()
        };
        let batch = lengths.len() as i64;
        let likely = NsaCompressCacheCall {
            act_seq_len: Some(&lengths),
            slot_mapping: numbers(&[batch]),
            block_table: numbers(&[batch, 2]),
            ..cached()
        };
        for call in [base, likely, NsaCompressCacheCall { input: packed().input, block_table: None, ..likely }] {
            if let Ok(problem) = call.check(A2) {
                let _ = call.lint(A2, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                let numbers = call.numbers(&problem, slots.clone());
                problem.faults(SparseContents::of(&numbers), &slots, &mut |fault| assert!(!fault.to_string().is_empty()));
            }
        }
    }
}
