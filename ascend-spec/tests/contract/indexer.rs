//! The contract of LightningIndexer: a call for every rule, and what is taken.

use crate::described::{broken_by_numbers, half, numbers, of};
use ascend_spec::DType::{Bf16, Float, Int8, Int64};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::lightning_indexer::{IndexerCall, Parameter, rules};
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseFault};
use ascend_spec::{Cann, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = IndexerCall<'static>;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

/// The call with the outputs that its inputs imply.
fn with_outputs(call: Call) -> Call {
    let [indices, values] = call.outputs().unwrap();
    Call { sparse_indices: Some(indices), sparse_values: Some(values), ..call }
}

/// Two sequences of together 5 rows with 16 heads, which choose 8 of 70 keys.
fn packed() -> Call {
    with_outputs(Call {
        query: half(&[5, 16, 128]),
        key: half(&[70, 1, 128]),
        weights: half(&[5, 16]),
        actual_seq_lengths_query: numbers(&[2]),
        actual_seq_lengths_key: numbers(&[2]),
        layout_query: "TND",
        layout_key: "TND",
        sparse_count: 8,
        ..Call::default()
    })
}

/// Two sequences of 3 rows with 16 heads and room for 40 keys, with scores.
fn padded() -> Call {
    with_outputs(Call {
        query: half(&[2, 3, 16, 128]),
        key: half(&[2, 40, 1, 128]),
        weights: half(&[2, 3, 16]),
        sparse_count: 8,
        return_values: true,
        ..Call::default()
    })
}

/// The rows of [`packed`] and 6 blocks of 32 keys, 3 a sequence.
fn paged() -> Call {
    Call { key: half(&[6, 32, 1, 128]), block_table: numbers(&[2, 3]), layout_key: "PA_BSND", ..packed() }
}

/// The call with another number of heads.
fn heads(call: Call, heads: i64) -> Call {
    with_outputs(Call { query: half(&[5, heads, 128]), weights: half(&[5, heads]), ..call })
}

#[test]
fn every_rule_of_the_indexer_refuses_a_call() {
    let a2 = |cann| Target::new(Soc::AtlasA2, cann);
    let ascend950 = |cann| Target::new(Soc::Ascend950, cann);
    let nz = packed().key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let (packed, padded, paged) = (packed(), padded(), paged());
    let single = Call { weights: of(Float, &[5, 16]), ..packed };
    #[rustfmt::skip]
    let calls = [
        ("indexer.product", 561_003, a2(Cann::V8_1), packed),
        ("indexer.product", 561_003, ascend950(Cann::V9_0), packed),
        ("indexer.product", 561_003, Target::new(Soc::AtlasInference, Cann::V9_1), packed),
        ("indexer.query", -1, A2, Call { query: None, ..packed }),
        ("indexer.required", 161_001, a2(Cann::V8_5), Call { query: None, ..packed }),
        ("indexer.required", 161_001, a2(Cann::V8_5), Call { sparse_values: None, ..packed }),
        ("indexer.required", 161_001, A2, Call { key: None, ..packed }),
        ("indexer.required", 161_001, A2, Call { weights: None, ..packed }),
        ("indexer.required", 161_001, A2, Call { sparse_indices: None, ..packed }),
        ("indexer.values", -1, A2, Call { sparse_values: None, ..padded }),
        ("indexer.dtype", 161_002, A2, Call { query: of(Int8, &[5, 16, 128]), ..packed }),
        ("indexer.dtype", 161_002, A2, Call { key: of(Bf16, &[70, 1, 128]), ..packed }),
        ("indexer.dtype", 161_002, a2(Cann::V8_5), single),
        ("indexer.dtype", 161_002, A2, Call { sparse_values: of(Float, &[0]), ..packed }),
        ("indexer.dtype", 161_002, A2, Call { block_table: of(Int64, &[2, 3]), ..paged }),
        ("indexer.format", 161_002, A2, Call { key: nz, ..packed }),
        ("indexer.layout", 561_002, A2, Call { layout_key: "BSND", ..packed }),
        ("indexer.layout", 561_002, A2, Call { layout_query: "PA_BSND", ..paged }),
        ("indexer.layout", 561_002, A2, Call { layout_query: "tnd", ..packed }),
        ("indexer.count", 561_002, A2, with_outputs(Call { sparse_count: 2049, ..packed })),
        ("indexer.count", 561_002, a2(Cann::V8_5), with_outputs(Call { sparse_count: 3072, ..packed })),
        ("indexer.count", 561_002, a2(Cann::V9_2), with_outputs(Call { sparse_count: 9216, ..packed })),
        ("indexer.sparse_mode", 561_002, A2, Call { sparse_mode: 4, ..packed }),
        ("indexer.tokens", 561_002, A2, Call { pre_tokens: 0, ..packed }),
        ("indexer.tokens", 561_002, A2, Call { next_tokens: i64::from(i32::MAX), ..packed }),
        ("indexer.values_paged", 561_002, A2, with_outputs(Call { return_values: true, ..paged })),
        ("indexer.rank", 561_002, A2, Call { query: half(&[5, 2048]), ..packed }),
        ("indexer.rank", 561_002, A2, Call { key: half(&[70, 128]), ..packed }),
        ("indexer.block_table", 561_002, A2, Call { block_table: None, ..paged }),
        ("indexer.block_table", 561_002, A2, Call { block_table: numbers(&[3, 3]), ..paged }),
        ("indexer.block_table", 561_002, A2, Call { block_table: numbers(&[2, 3]), ..packed }),
        ("indexer.lengths", 561_002, A2, Call { actual_seq_lengths_query: None, ..packed }),
        ("indexer.lengths", 561_002, A2, Call { actual_seq_lengths_key: None, ..paged }),
        ("indexer.lengths", 561_002, A2, Call { actual_seq_lengths_key: numbers(&[3]), ..padded }),
        ("indexer.batch", 561_002, A2, Call { key: half(&[3, 40, 1, 128]), ..padded }),
        ("indexer.block_size", 561_002, A2, Call { key: half(&[6, 24, 1, 128]), ..paged }),
        ("indexer.block_size", 561_002, A2, Call { key: half(&[0, 32, 1, 128]), ..paged }),
        ("indexer.head_dim", 561_002, A2, Call { key: half(&[70, 1, 64]), ..packed }),
        ("indexer.head_dim", 561_002, A2, Call { key: half(&[70, 2, 128]), ..packed }),
        ("indexer.heads", 561_002, A2, heads(packed, 65)),
        ("indexer.heads", 561_002, ascend950(Cann::V9_2), heads(packed, 12)),
        ("indexer.weights_950", 561_002, ascend950(Cann::V9_2), single),
        ("indexer.weights", 561_002, A2, Call { weights: half(&[5, 8]), ..packed }),
        ("indexer.indices", 561_002, A2, Call { sparse_indices: numbers(&[5, 1, 9]), ..packed }),
        ("indexer.values_shape", 561_002, A2, Call { sparse_values: half(&[2, 3, 1, 7]), ..padded }),
        ("indexer.empty", 561_002, ascend950(Cann::V9_2), Call { key: half(&[0, 1, 128]), ..packed }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        assert_eq!((violation.rule.id, violation.status()), (id, status), "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        broken.insert(id);
    }
    #[rustfmt::skip]
    let lints = [
        ("indexer.values_room", a2(Cann::V8_5), Call { sparse_values: half(&[2, 3, 1, 7]), ..padded }),
        ("indexer.heads_unchecked", a2(Cann::V8_5), heads(packed, 96)),
        ("indexer.count_unchecked", A2, with_outputs(Call { sparse_count: 9216, ..packed })),
        ("indexer.product_unchecked", ascend950(Cann::V9_1), heads(packed, 12)),
        ("indexer.product_unchecked", ascend950(Cann::V9_1), single),
        ("indexer.none_chosen", A2, with_outputs(Call { sparse_count: 0, ..packed })),
    ];
    for (id, target, call) in lints {
        assert!(call.check(target).is_ok(), "{id}");
        let lint = call.lint(target, &[]).unwrap_err();
        assert_eq!(lint.rule.id, id);
        assert!(lint.rule.scope.holds(target), "{id} for {target}");
        assert_eq!(call.lint(target, &[id]), Ok(()));
        broken.insert(id);
    }
    let numbered = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS, &rules::CONTENTS];
    broken.extend(broken_by_numbers(&packed.check(A2).unwrap().sequences, numbered));
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    let ones = |shape: &[i64]| numbers(shape);
    for target in [
        Target::new(Soc::AtlasA2, Cann::V8_5),
        Target::new(Soc::AtlasA3, Cann::V9_0),
        Target::new(Soc::Ascend950, Cann::V9_1),
        Target::new(Soc::Ascend950, Cann::V9_2),
    ] {
        for call in [packed(), padded(), paged()] {
            assert!(call.check(target).is_ok(), "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
        // Lengths are counted by their elements.
        let lengths = Call { actual_seq_lengths_query: ones(&[1, 2]), ..packed() };
        assert_eq!(lengths.check(target).unwrap().sequences.batch, 2);
    }
    let nulls = Call { sparse_values: None, ..packed() };
    assert!(nulls.check(A2).is_ok());
    // A call whose outputs are empty ends before anything else is looked at.
    let empty = Call { sparse_indices: numbers(&[0]), layout_key: "any", ..packed() };
    assert!(empty.check(A2).unwrap().is_idle());
}

#[test]
fn rows_choose_among_the_keys_up_to_their_position() {
    let sequences = paged().check(A2).unwrap().sequences;
    let contents = |query_lengths, key_lengths, block_table| SparseContents { query_lengths, key_lengths, block_table };
    let table = [5, 4, 3, 0, 9, 1];
    let numbers = contents(&[2, 5], &[40, 1], &table);
    let all: Vec<_> = sequences.each(numbers).collect();
    assert_eq!((all[0].first_query, all[0].queries, all[0].keys), (0, 2, 40));
    assert_eq!((all[1].first_query, all[1].queries, all[1].keys), (2, 3, 1));
    let candidates = |index: usize, row| sequences.candidates(&all[index], row);
    assert_eq!([0, 1, 2].map(|row| candidates(0, row)), [39, 40, 0]);
    assert_eq!([0, 1, 2].map(|row| candidates(1, row)), [0, 0, 1]);
    assert_eq!(sequences.key(&numbers, &all[0], 33), Some((4, 1)));
    assert_eq!(sequences.key(&numbers, &all[1], 33), None);
    assert_eq!(sequences.faults(numbers).next(), None);

    let faults = |numbers| sequences.faults(numbers).collect::<Vec<_>>();
    assert!(matches!(
        faults(contents(&[-1, 6], &[97, 40], &table))[..],
        [
            SparseFault::Length { sequence: 0, given: -1, .. },
            SparseFault::NoColumn { sequence: 0, keys: 97, room: 96 },
            SparseFault::Length { sequence: 1, given: 6, .. },
            SparseFault::NoBlock { sequence: 1, column: 1, block: 9, blocks: 6 },
        ]
    ));
    let descending = faults(contents(&[3, 2], &[1, 1], &table));
    let [SparseFault::Length { allowed, .. }] = descending[..] else {
        panic!("{descending:?}");
    };
    assert_eq!(allowed, [3, 5]);
}

#[test]
fn a_launch_touches_what_it_writes_even_beyond_the_scores() {
    let short = Call { sparse_values: half(&[2, 3, 1, 7]), ..padded() };
    let problem = short.check(Target::new(Soc::AtlasA2, Cann::V8_5)).unwrap();
    let mut of_values = None;
    problem.touches(&short, &mut |parameter, range| {
        if parameter == Parameter::SparseValues {
            of_values = Some(range);
        }
    });
    assert_eq!(of_values, Some(0..2 * 3 * 8 * 2));
}

proptest! {
    /// No shape, attribute or number makes the check or the walk over sequences panic or overflow.
    #[test]
    fn nonsense_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..5, Just(16), Just(128), Just(i64::MAX), Just(1 << 60)], 0..5), 7,
        ),
        layouts in (0usize..4, 0usize..4),
        count in prop_oneof![-1025i64..9000, Just(i64::MIN), Just(i64::MAX)],
        mode in -1i64..5,
        values: bool,
        numbers_given in prop::collection::vec(prop_oneof![-3i64..70, Just(i64::MIN), Just(i64::MAX)], 0..6),
    ) {
        let name = |at: usize| ["BSND", "TND", "PA_BSND", ""][at];
        let call = Call {
            query: half(&shapes[0]),
            key: half(&shapes[1]),
            weights: half(&shapes[2]),
            actual_seq_lengths_query: numbers(&shapes[3]),
            actual_seq_lengths_key: numbers(&shapes[4]),
            block_table: numbers(&shapes[5]),
            layout_query: name(layouts.0),
            layout_key: name(layouts.1),
            sparse_count: count,
            sparse_mode: mode,
            return_values: values,
            sparse_indices: numbers(&shapes[6]),
            ..Call::default()
        };
        let implied = call.outputs();
        let implied = Call {
            sparse_indices: implied.map(|[indices, _]| indices),
            sparse_values: implied.map(|[_, values]| values),
            ..call
        };
        let valid = Call { sparse_count: 8, ..paged() };
        for call in [call, implied, valid] {
            for target in [A2, Target::new(Soc::AtlasA2, Cann::V8_5), Target::new(Soc::Ascend950, Cann::V9_2)] {
                if let Ok(problem) = call.check(target) {
                    let _ = call.lint(target, &[]);
                    problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                    if problem.sequences.batch < 100 {
                        let contents = SparseContents {
                            query_lengths: &numbers_given,
                            key_lengths: &numbers_given,
                            block_table: &numbers_given,
                        };
                        let total = problem.sequences.query.total();
                        for sequence in problem.sequences.each(contents) {
                            assert!(sequence.first_query + sequence.written <= total);
                        }
                        let _ = problem.sequences.faults(contents).take(50).count();
                    }
                }
            }
        }
    }
}
