//! The contract of SparseFlashAttention: a call for every rule, what is taken, and which keys rows read.

use crate::described::{broken_by_numbers, half, numbers, of};
use ascend_spec::DType::{Bf16, Float, Int8, Int64};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::sparse_flash_attention::{
    EntryFaultKind, Parameter, SparseFlashCall, SparseFlashProblem, Version, rules,
};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{Cann, Format, Soc, Target, TensorDesc, Violation};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = SparseFlashCall<'static>;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

/// Checks a call of the oldest version that can express it.
fn checked(call: Call, target: Target) -> Result<SparseFlashProblem, Violation> {
    call.check(Version::oldest_for(&call), target)
}

/// The call with the outputs that its inputs imply.
fn with_outputs(call: Call) -> Call {
    let [out, softmax] = call.outputs().unwrap();
    Call { attention_out: Some(out), softmax_max: Some(softmax), softmax_sum: Some(softmax), ..call }
}

/// The call with other keys, which are the values too.
fn keys(call: Call, shape: &[i64]) -> Call {
    let rope = [&shape[..shape.len() - 1], &[64]].concat();
    Call { key: half(shape), value: half(shape), key_rope: half(&rope), ..call }
}

/// The call of 5 rows with another number of heads.
fn heads(call: Call, heads: i64) -> Call {
    with_outputs(Call { query: half(&[5, heads, 512]), query_rope: half(&[5, heads, 64]), ..call })
}

/// Two sequences of together 5 rows with 16 heads, which read 8 blocks each of 70 keys.
fn packed() -> Call {
    let call = Call {
        sparse_indices: numbers(&[5, 1, 8]),
        actual_seq_lengths_query: numbers(&[2]),
        actual_seq_lengths_kv: numbers(&[2]),
        layout_query: "TND",
        layout_kv: "TND",
        scale: 0.1,
        ..Call::default()
    };
    heads(keys(call, &[70, 1, 512]), 16)
}

/// Two sequences of 3 rows with 16 heads and room for 40 keys, with maxima and sums.
fn padded() -> Call {
    let call = Call {
        query: half(&[2, 3, 16, 512]),
        query_rope: half(&[2, 3, 16, 64]),
        sparse_indices: numbers(&[2, 3, 1, 8]),
        scale: 0.1,
        return_softmax_lse: true,
        ..Call::default()
    };
    with_outputs(keys(call, &[2, 40, 1, 512]))
}

/// The call with a logit more for each of 16 heads.
fn with_sinks(call: Call) -> Call {
    Call { sinks: of(Float, &[16]), ..call }
}

/// The rows of [`packed`] and 6 blocks of 32 keys, 3 a sequence.
fn paged() -> Call {
    let call = Call { block_table: numbers(&[2, 3]), layout_kv: "PA_BSND", ..packed() };
    keys(call, &[6, 32, 1, 512])
}

#[test]
fn every_rule_of_sparse_flash_attention_refuses_a_call() {
    let a2 = |cann| Target::new(Soc::AtlasA2, cann);
    let [ascend950, newest] = [Cann::V9_1, Cann::V9_2].map(|cann| Target::new(Soc::Ascend950, cann));
    let nz = packed().key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let (packed, padded, paged) = (packed(), padded(), paged());
    let no_softmax = |call: Call| Call { softmax_max: None, softmax_sum: None, ..call };
    #[rustfmt::skip]
    let calls = [
        ("sparse_flash.product", 561_003, a2(Cann::V8_1), packed),
        ("sparse_flash.product", 561_003, Target::new(Soc::Ascend950, Cann::V9_0), packed),
        ("sparse_flash.product", 561_003, Target::new(Soc::AtlasInference, Cann::V9_1), packed),
        ("sparse_flash.required", 161_001, A2, Call { query: None, ..packed }),
        ("sparse_flash.required", 161_001, A2, Call { key: None, ..packed }),
        ("sparse_flash.required", 161_001, A2, Call { sparse_indices: None, ..packed }),
        ("sparse_flash.required", 161_001, A2, Call { attention_out: None, ..packed }),
        ("sparse_flash.required", 161_001, A2, Call { softmax_sum: None, ..packed }),
        ("sparse_flash.required", 161_001, a2(Cann::V9_0), Call { value: None, ..packed }),
        ("sparse_flash.required", 161_001, a2(Cann::V8_5), no_softmax(packed)),
        ("sparse_flash.required", 161_001, a2(Cann::V8_5), no_softmax(padded)),
        ("sparse_flash.softmax", -1, A2, Call { softmax_sum: None, ..padded }),
        ("sparse_flash.no_softmax", 161_001, A2, no_softmax(packed)),
        ("sparse_flash.dtype", 161_002, A2, Call { query: of(Int8, &[5, 16, 512]), ..packed }),
        ("sparse_flash.dtype", 161_002, A2, Call { key_rope: of(Bf16, &[70, 1, 64]), ..packed }),
        ("sparse_flash.dtype", 161_002, A2, Call { softmax_max: half(&[0]), ..packed }),
        ("sparse_flash.dtype", 161_002, A2, Call { block_table: of(Int64, &[2, 3]), ..paged }),
        ("sparse_flash.format", 161_002, A2, Call { key: nz, ..packed }),
        ("sparse_flash.layout", 561_002, A2, Call { layout_kv: "BSND", ..packed }),
        ("sparse_flash.layout", 561_002, A2, Call { layout_query: "PA_BSND", ..paged }),
        ("sparse_flash.rope", 561_002, A2, Call { query_rope: None, ..packed }),
        ("sparse_flash.rope", 561_002, A2, Call { key_rope: None, ..packed }),
        ("sparse_flash.sparse_mode", 561_002, A2, Call { sparse_mode: 4, ..packed }),
        ("sparse_flash.tokens", 561_002, A2, Call { pre_tokens: 0, ..packed }),
        ("sparse_flash.tokens", 561_002, A2, Call { next_tokens: i64::from(i32::MAX), ..packed }),
        ("sparse_flash.attention_mode", 561_002, A2, Call { attention_mode: 0, ..packed }),
        ("sparse_flash.sparse_block_size", 561_002, A2, Call { sparse_block_size: 3, ..packed }),
        ("sparse_flash.sparse_block_size", 561_002, A2, Call { sparse_block_size: 256, ..packed }),
        ("sparse_flash.sparse_block_size", 561_002, ascend950, Call { sparse_block_size: 2, ..packed }),
        ("sparse_flash.softmax_paged", 561_002, A2, with_outputs(Call { return_softmax_lse: true, ..paged })),
        ("sparse_flash.rank", 561_002, A2, Call { query: half(&[5, 8192]), ..packed }),
        ("sparse_flash.rank", 561_002, A2, Call { key: half(&[70, 512]), ..packed }),
        ("sparse_flash.block_table", 561_002, A2, Call { block_table: None, ..paged }),
        ("sparse_flash.block_table", 561_002, A2, Call { block_table: numbers(&[3, 3]), ..paged }),
        ("sparse_flash.block_table", 561_002, A2, Call { block_table: numbers(&[2, 0]), ..paged }),
        ("sparse_flash.block_table", 561_002, A2, Call { block_table: numbers(&[2, 3]), ..packed }),
        ("sparse_flash.lengths", 561_002, A2, Call { actual_seq_lengths_query: None, ..packed }),
        ("sparse_flash.lengths", 561_002, A2, Call { actual_seq_lengths_kv: None, ..paged }),
        ("sparse_flash.lengths", 561_002, A2, Call { actual_seq_lengths_kv: numbers(&[3]), ..padded }),
        ("sparse_flash.batch", 561_002, A2, keys(padded, &[3, 40, 1, 512])),
        ("sparse_flash.block_size", 561_002, A2, keys(paged, &[6, 24, 1, 512])),
        ("sparse_flash.block_size", 561_002, A2, Call { sparse_block_size: 64, ..paged }),
        ("sparse_flash.head_dim", 561_002, A2, keys(packed, &[70, 1, 256])),
        ("sparse_flash.head_dim", 561_002, A2, keys(packed, &[70, 2, 512])),
        ("sparse_flash.heads", 561_002, A2, heads(packed, 24)),
        ("sparse_flash.heads", 561_002, A2, heads(packed, 256)),
        ("sparse_flash.heads", 561_002, ascend950, heads(packed, 129)),
        ("sparse_flash.query_rope", 561_002, A2, Call { query_rope: half(&[5, 16, 32]), ..packed }),
        ("sparse_flash.key_rows", 561_002, A2, Call { value: half(&[71, 1, 512]), ..packed }),
        ("sparse_flash.key_rows", 561_002, A2, Call { key_rope: half(&[6, 16, 1, 64]), ..paged }),
        ("sparse_flash.indices", 561_002, A2, Call { sparse_indices: numbers(&[5, 8]), ..packed }),
        ("sparse_flash.out", 561_002, A2, Call { attention_out: half(&[5, 16, 64]), ..packed }),
        ("sparse_flash.softmax_shape", 561_002, A2, Call { softmax_max: of(Float, &[2, 3, 16]), ..padded }),
        ("sparse_flash.product", 561_003, ascend950, with_sinks(packed)),
        ("sparse_flash.sinks", 361_001, a2(Cann::V9_2), with_sinks(packed)),
        ("sparse_flash.sinks_paged", 561_002, newest, with_sinks(paged)),
        ("sparse_flash.sinks_shape", 561_002, newest, Call { sinks: of(Float, &[8]), ..packed }),
        ("sparse_flash.sinks_shape", 561_002, newest, Call { sinks: of(Float, &[1, 16]), ..packed }),
        ("sparse_flash.dtype", 161_002, newest, Call { sinks: half(&[16]), ..packed }),
        ("sparse_flash.no_softmax_v2", -1, newest, no_softmax(with_sinks(packed))),
        ("sparse_flash.softmax", -1, newest, Call { softmax_sum: None, ..with_sinks(padded) }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, target, call) in calls {
        let violation = checked(call, target).unwrap_err();
        let got = (violation.rule.id, violation.status());
        assert_eq!(got, (id, status), "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        broken.insert(id);
    }
    let strided = packed.value.map(|desc| TensorDesc { offset: 512, ..desc });
    #[rustfmt::skip]
    let lints = [
        ("sparse_flash.value", A2, Call { value: strided, ..packed }),
        ("sparse_flash.paged_dim", A2, Call { key: half(&[6, 32, 1, 64]), ..paged }),
        ("sparse_flash.softmax_room", a2(Cann::V8_5), Call { softmax_sum: of(Float, &[1]), ..padded }),
        ("sparse_flash.scale_finite", A2, Call { scale: f64::NAN, ..packed }),
        ("sparse_flash.scale_zero", A2, Call { scale: 0.0, ..packed }),
        ("sparse_flash.scale_inverse", A2, Call { scale: 192f64.sqrt(), ..packed }),
        ("sparse_flash.none_chosen", A2, Call { sparse_indices: numbers(&[5, 1, 0]), ..packed }),
    ];
    for (id, target, call) in lints {
        assert!(checked(call, target).is_ok(), "{id}");
        let lint = call.lint(target, &[]).unwrap_err();
        assert_eq!(lint.rule.id, id);
        assert!(lint.rule.scope.holds(target), "{id} for {target}");
        assert_eq!(call.lint(target, &[id]), Ok(()));
        broken.insert(id);
    }
    let numbered = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS, &rules::CONTENTS];
    broken.extend(broken_by_numbers(&checked(packed, A2).unwrap().sequences, numbered));
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    for target in [
        Target::new(Soc::AtlasA2, Cann::V8_5),
        Target::new(Soc::AtlasA3, Cann::V9_0),
        Target::new(Soc::Ascend950, Cann::V9_1),
        Target::new(Soc::Ascend950, Cann::V9_2),
    ] {
        for call in [packed(), padded(), paged()] {
            assert!(checked(call, target).is_ok(), "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
    }
    let newest = Target::new(Soc::Ascend950, Cann::V9_2);
    for call in [with_sinks(packed()), with_sinks(padded())] {
        assert!(checked(call, newest).is_ok());
        assert_eq!(call.lint(newest, &[]), Ok(()));
    }
    // The second version computes calls without sinks too, on each product.
    for target in [Target::new(Soc::AtlasA3, Cann::V9_2), newest] {
        assert!(paged().check(Version::V2, target).is_ok(), "{target}");
    }
    // Without a value the key is it.
    let no_value = Call { value: None, ..paged() };
    assert!(checked(no_value, A2).is_ok());
    assert_eq!(no_value.lint(A2, &[]), Ok(()));
    // Without the flag its outputs are not checked; scales are any numbers.
    let any = Call { softmax_max: of(Float, &[7, 2]), scale: -1.0, ..packed() };
    assert!(!checked(any, A2).unwrap().overruns);
    // A call whose outputs are empty ends before anything else is looked at.
    let empty = Call { attention_out: half(&[0]), layout_kv: "any", ..packed() };
    assert!(checked(empty, A2).unwrap().is_idle());
}

#[test]
fn a_launch_touches_what_it_walks_even_beyond_the_tensors() {
    let touched = |call: Call, target, parameter| {
        let problem = checked(call, target).unwrap();
        let mut touched = None;
        problem.touches(&call, &mut |of, range| {
            if of == parameter {
                touched = Some(range);
            }
        });
        (touched, problem.overruns)
    };
    let narrow = Call { key: half(&[6, 32, 1, 64]), ..paged() };
    assert_eq!(touched(narrow, A2, Parameter::Key), (Some(0..6 * 32 * 512 * 2), true));
    let short = Call { softmax_sum: of(Float, &[1]), ..padded() };
    let older = Target::new(Soc::AtlasA2, Cann::V8_5);
    assert_eq!(touched(short, older, Parameter::SoftmaxSum), (Some(0..2 * 3 * 16 * 4), true));
    assert_eq!(touched(packed(), A2, Parameter::SoftmaxSum), (None, false));
}

/// The lists of a call with blocks of this size.
fn lists(block: i64) -> SparseFlashProblem {
    let call = Call { sparse_block_size: block, ..packed() };
    checked(call, A2).unwrap()
}

#[test]
fn rows_read_the_keys_of_their_entries_up_to_the_first_that_is_negative() {
    let chosen = |block, entries: &[i64], keys| lists(block).chosen(entries, keys).collect::<Vec<_>>();
    assert_eq!(chosen(1, &[4, 0, -1, 2], 6), [4..5, 0..1]);
    // A block that is named twice counts twice, one behind the keys not at all, and the last one is cut.
    assert_eq!(chosen(4, &[2, 0, 2], 10), [8..10, 0..4, 8..10]);
    assert_eq!(chosen(4, &[3, 1, 0, -7], 11), [4..8, 0..4]);
    // Only as many entries are read as the keys have blocks.
    assert_eq!(chosen(8, &[0, 1, 0], 9), [0..8, 8..9]);
    assert_eq!(chosen(8, &[0, 1], 0), []);

    let fault = |block, entries: &[i64], keys| {
        let fault = lists(block).entry_fault(entries, keys, &mut Vec::new());
        fault.map(|fault| (fault.place, fault.kind))
    };
    assert_eq!(fault(4, &[2, 0, 1, -1, -1], 10), None);
    assert_eq!(fault(4, &[2, 0, 2], 10), Some((2, EntryFaultKind::Twice)));
    assert_eq!(fault(4, &[3, 0, 2], 10), Some((0, EntryFaultKind::Beyond(10))));
    assert_eq!(fault(4, &[2, -1, 0], 10), Some((2, EntryFaultKind::Unread)));
    assert_eq!(fault(4, &[2, 0, 1, 3], 10), Some((3, EntryFaultKind::Unread)));
    assert_eq!(fault(4, &[2, -2], 10), Some((1, EntryFaultKind::Negative)));
    assert_eq!(fault(4, &[i64::MAX], 10), Some((0, EntryFaultKind::Beyond(10))));
}

proptest! {
    /// No shape, attribute or number makes the check or the walk over sequences and lists panic or overflow.
    #[test]
    fn nonsense_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..5, Just(16), Just(512), Just(i64::MAX), Just(1 << 60)], 0..5), 8,
        ),
        layouts in (0usize..4, 0usize..4),
        (block, mode) in (prop_oneof![-1i64..200, Just(i64::MIN), Just(i64::MAX)], -1i64..5),
        softmax: bool,
        has_sinks: bool,
        entries in prop::collection::vec(prop_oneof![-3i64..70, Just(i64::MIN), Just(i64::MAX)], 0..6),
        keys in prop_oneof![0usize..100, Just(usize::MAX)],
    ) {
        let name = |at: usize| ["BSND", "TND", "PA_BSND", ""][at];
        let call = Call {
            query: half(&shapes[0]),
            key: half(&shapes[1]),
            value: half(&shapes[1]),
            sparse_indices: numbers(&shapes[2]),
            block_table: numbers(&shapes[3]),
            actual_seq_lengths_query: numbers(&shapes[4]),
            actual_seq_lengths_kv: numbers(&shapes[5]),
            query_rope: half(&shapes[6]),
            key_rope: half(&shapes[7]),
            layout_query: name(layouts.0),
            layout_kv: name(layouts.1),
            sparse_block_size: block,
            sparse_mode: mode,
            return_softmax_lse: softmax,
            sinks: of(Float, &shapes[6]).filter(|_| has_sinks),
            ..Call::default()
        };
        let implied = call.outputs();
        let implied = Call {
            attention_out: implied.map(|[out, _]| out),
            softmax_max: implied.map(|[_, softmax]| softmax),
            softmax_sum: implied.map(|[_, softmax]| softmax),
            ..call
        };
        for call in [call, implied, paged()] {
            for target in [A2, Target::new(Soc::AtlasA2, Cann::V8_5), Target::new(Soc::Ascend950, Cann::V9_2)] {
                if let Ok(problem) = checked(call, target) {
                    let _ = call.lint(target, &[]);
                    problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                    if problem.sequences.batch < 100 {
                        let contents = SparseContents {
                            query_lengths: &entries,
                            key_lengths: &entries,
                            block_table: &entries,
                        };
                        let _ = problem.sequences.faults(contents).take(50).count();
                    }
                    for chosen in problem.chosen(&entries, keys) {
                        assert!(chosen.start < chosen.end && chosen.end <= keys);
                    }
                    if keys < 100 {
                        let _ = problem.entry_fault(&entries, keys, &mut Vec::new());
                    }
                }
            }
        }
    }
}
