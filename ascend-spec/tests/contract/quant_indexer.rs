//! The contract of QuantLightningIndexer: a call for every rule, and what is taken.

use crate::described::{broken_by_numbers, half, numbers, of};
use ascend_spec::DType::{Bf16, Float, Float8E4M3Fn, Float16, HiFloat8, Int8, Int64};
use ascend_spec::Level;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::quant_lightning_indexer::{QuantIndexerCall, rules};
use ascend_spec::{Cann, DType, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = QuantIndexerCall<'static>;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const OLD: Target = Target::new(Soc::AtlasA2, Cann::V8_5);
const A5: Target = Target::new(Soc::Ascend950, Cann::V9_1);
const OLD_A5: Target = Target::new(Soc::Ascend950, Cann::V9_0);

fn with_output(call: Call) -> Call {
    Call { sparse_indices: call.output(), ..call }
}

/// The call of 5 rows with another number of heads.
fn heads(call: Call, heads: i64) -> Call {
    with_output(Call {
        query: of(Int8, &[5, heads, 128]),
        weights: half(&[5, heads]),
        query_dequant_scale: half(&[5, heads]),
        ..call
    })
}

/// The call with another number of keys.
fn keys(call: Call, rows: &[i64]) -> Call {
    Call { key: of(Int8, &[rows, &[1, 128]].concat()), key_dequant_scale: half(&[rows, &[1]].concat()), ..call }
}

/// Two sequences of together 5 rows with 16 heads, which choose 8 of 70 keys.
fn packed() -> Call {
    let call = Call {
        actual_seq_lengths_query: numbers(&[2]),
        actual_seq_lengths_key: numbers(&[2]),
        layout_query: "TND",
        layout_key: "TND",
        sparse_count: 8,
        ..Call::default()
    };
    heads(keys(call, &[70]), 16)
}

/// Two sequences of 3 rows with 16 heads and room for 40 keys.
fn padded() -> Call {
    let call = Call {
        query: of(Int8, &[2, 3, 16, 128]),
        weights: half(&[2, 3, 16]),
        query_dequant_scale: half(&[2, 3, 16]),
        sparse_count: 8,
        ..Call::default()
    };
    with_output(keys(call, &[2, 40]))
}

/// The rows of [`packed`] and 6 blocks of 32 keys, 3 a sequence.
fn paged() -> Call {
    let call = Call { block_table: numbers(&[2, 3]), layout_key: "PA_BSND", ..packed() };
    keys(call, &[6, 32])
}

/// A tensor with room between the elements of an axis.
fn spread(desc: Option<TensorDesc>, axis: usize) -> Option<TensorDesc> {
    desc.map(|desc| TensorDesc { strides: desc.strides.with(axis, 2 * desc.strides[axis]), ..desc })
}

/// The call with queries and keys, weights and scales of other types.
fn typed(call: Call, own: DType, weights: DType, scales: DType) -> Call {
    let with = |desc: Option<TensorDesc>, dtype| desc.map(|desc| TensorDesc { dtype, ..desc });
    Call {
        query: with(call.query, own),
        key: with(call.key, own),
        weights: with(call.weights, weights),
        query_dequant_scale: with(call.query_dequant_scale, scales),
        key_dequant_scale: with(call.key_dequant_scale, scales),
        ..call
    }
}

#[test]
fn every_rule_of_the_quantised_indexer_refuses_a_call() {
    let nz = packed().key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let (packed, padded, paged) = (packed(), padded(), paged());
    #[rustfmt::skip]
    let calls = [
        ("product", 561_003, Target::new(Soc::AtlasA2, Cann::V8_1), packed),
        ("product", 561_003, Target::new(Soc::AtlasInference, Cann::V9_1), packed),
        ("query", -1, A2, Call { query: None, ..packed }),
        ("unchecked_null", 161_001, A2, Call { key: None, ..packed }),
        ("unchecked_null", 161_001, A2, Call { key_dequant_scale: None, ..packed }),
        ("required", 161_001, OLD, Call { query: None, ..packed }),
        ("required", 161_001, OLD, Call { key: None, ..packed }),
        ("required", 161_001, A2, Call { weights: None, ..packed }),
        ("required", 161_001, A2, Call { query_dequant_scale: None, ..packed }),
        ("required", 161_001, A2, Call { sparse_indices: None, ..packed }),
        ("dtype", 161_002, A2, typed(packed, Float16, Float16, Float16)),
        ("dtype", 161_002, A2, typed(packed, Float8E4M3Fn, Float16, Float16)),
        ("dtype", 161_002, OLD_A5, typed(packed, Float8E4M3Fn, Float16, Float16)),
        ("dtype", 161_002, OLD_A5, packed),
        ("dtype", 161_002, A5, typed(packed, Int8, Bf16, Float)),
        ("dtype", 161_002, A5, typed(packed, HiFloat8, Float16, Float16)),
        ("dtype", 161_002, A5, typed(packed, Float8E4M3Fn, Bf16, Float16)),
        ("dtype", 161_002, A2, Call { block_table: of(Int64, &[2, 3]), ..paged }),
        ("format", 161_002, A2, Call { key: nz, ..packed }),
        ("layout", 561_002, A2, Call { layout_key: "BSND", ..packed }),
        ("count", 561_002, A2, with_output(Call { sparse_count: 3072, ..packed })),
        ("count", 561_002, A5, typed(packed, HiFloat8, Bf16, Float)),
        ("sparse_mode", 561_002, A2, Call { sparse_mode: 4, ..packed }),
        ("tokens", 561_002, A2, Call { next_tokens: 0, ..packed }),
        ("quant_modes", 561_002, A2, Call { query_quant_mode: 2, ..packed }),
        ("quant_modes", 561_002, A2, Call { key_quant_mode: 2, ..packed }),
        ("rank", 561_002, A2, Call { query: of(Int8, &[5, 2048]), ..packed }),
        ("block_table", 561_002, A2, Call { block_table: None, ..paged }),
        ("lengths", 561_002, A2, Call { actual_seq_lengths_key: None, ..paged }),
        ("batch", 561_002, A2, keys(padded, &[3, 40])),
        ("block_size", 561_002, A2, keys(paged, &[6, 24])),
        ("head_dim", 561_002, A2, Call { key: of(Int8, &[70, 1, 64]), ..packed }),
        ("head_dim", 561_002, A2, Call { key: of(Int8, &[70, 2, 128]), ..packed }),
        ("heads", 561_002, A2, heads(packed, 65)),
        ("heads", 561_002, A5, heads(packed, 12)),
        ("heads", 561_002, OLD, heads(packed, 32)),
        ("heads", 561_002, OLD_A5, typed(packed, Float8E4M3Fn, Bf16, Float)),
        ("contiguous", 561_002, A5, Call { key: spread(packed.key, 0), ..packed }),
        ("contiguous", 561_002, A5, Call { key_dequant_scale: spread(padded.key_dequant_scale, 0), ..padded }),
        ("contiguous", 561_002, A5, Call { key: spread(paged.key, 1), ..paged }),
        ("weights", 561_002, A2, Call { weights: half(&[5, 8]), ..packed }),
        ("weights", 561_002, A2, Call { query_dequant_scale: half(&[5, 8]), ..packed }),
        ("key_scale", 561_002, A2, Call { key_dequant_scale: half(&[70]), ..packed }),
        ("indices", 561_002, A2, Call { sparse_indices: numbers(&[5, 1, 9]), ..packed }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        let got = (violation.rule.id.to_owned(), violation.status());
        assert_eq!(got, (format!("quant_indexer.{id}"), status), "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        broken.insert(violation.rule.id);
    }
    assert_eq!(rules::UNCHECKED_NULL.level, Level::HostCrash);
    let none = Call { sparse_indices: numbers(&[0, 1, 8]), ..packed };
    assert!(none.check(A2).is_ok());
    let lint = none.lint(A2, &[]).unwrap_err();
    assert_eq!(lint.rule.id, "quant_indexer.none_chosen");
    assert_eq!(none.lint(A2, &[lint.rule.id]), Ok(()));
    broken.insert(lint.rule.id);
    let numbered = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS, &rules::CONTENTS];
    broken.extend(broken_by_numbers(&packed.check(A2).unwrap().sequences, numbered));
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    let fp8 = |call, weights| {
        let scales = if weights == Bf16 { Float } else { Float16 };
        typed(call, Float8E4M3Fn, weights, scales)
    };
    let hifloat8 = with_output(Call { sparse_count: 2048, ..typed(packed(), HiFloat8, Bf16, Float) });
    // Blocks of a cache may have room between them.
    let blocks =
        Call { key: spread(paged().key, 0), key_dequant_scale: spread(paged().key_dequant_scale, 0), ..paged() };
    for (target, calls) in [
        (OLD, vec![heads(packed(), 64), heads(paged(), 64)]),
        (OLD_A5, vec![fp8(heads(packed(), 24), Bf16), fp8(heads(paged(), 64), Bf16)]),
        (A2, vec![packed(), padded(), paged(), heads(packed(), 1), Call { key: spread(packed().key, 0), ..packed() }]),
        (A5, vec![packed(), padded(), blocks, hifloat8, fp8(packed(), Float16), fp8(packed(), Bf16)]),
    ] {
        for call in calls {
            assert!(call.check(target).is_ok(), "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
    }
}

proptest! {
    /// No shape and no attribute makes the check or the walk over tensors panic or overflow.
    #[test]
    fn nonsense_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..5, Just(16), Just(128), Just(i64::MAX)], 0..5), 8,
        ),
        layouts in (0usize..4, 0usize..4),
        (count, mode) in (prop_oneof![-1i64..200, Just(i64::MIN), Just(i64::MAX)], -1i64..5),
    ) {
        let name = |at: usize| ["BSND", "TND", "PA_BSND", ""][at];
        let call = Call {
            query: of(Int8, &shapes[0]),
            key: of(Int8, &shapes[1]),
            weights: half(&shapes[2]),
            query_dequant_scale: half(&shapes[2]),
            key_dequant_scale: half(&shapes[3]),
            block_table: numbers(&shapes[4]),
            actual_seq_lengths_query: numbers(&shapes[5]),
            actual_seq_lengths_key: numbers(&shapes[6]),
            sparse_indices: numbers(&shapes[7]),
            layout_query: name(layouts.0),
            layout_key: name(layouts.1),
            sparse_count: count,
            sparse_mode: mode,
            ..Call::default()
        };
        for call in [call, with_output(call)] {
            for target in [OLD, A2, OLD_A5, A5] {
                if let Ok(problem) = call.check(target) {
                    let _ = call.lint(target, &[]);
                    problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                }
            }
        }
    }
}
