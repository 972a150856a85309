//! The contract of KvQuantSparseFlashAttention: a call for every rule, and what is taken.

use crate::described::{broken_by_numbers, half, numbers, of};
use ascend_spec::DType::{Bf16, Float, Float8E4M3Fn, HiFloat8, Int8, Int64};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::kv_quant_sparse_flash_attention::{Parameter, QuantSparseFlashCall, rules};
use ascend_spec::{Cann, DType, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = QuantSparseFlashCall<'static>;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const A5: Target = Target::new(Soc::Ascend950, Cann::V9_1);
const OLD_A5: Target = Target::new(Soc::Ascend950, Cann::V9_0);

/// The call with other rows of keys, which are the values too.
fn keys(call: Call, dtype: DType, shape: &[i64]) -> Call {
    let key = of(dtype, shape);
    Call { key, value: key, ..call }
}

/// The call of 5 rows with another number of heads.
fn heads(call: Call, heads: i64) -> Call {
    let call = Call { query: half(&[5, heads, 576]), ..call };
    Call { attention_out: call.output(), ..call }
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
    heads(keys(call, Int8, &[70, 1, 656]), 16)
}

/// Two sequences of 3 rows with 16 heads and room for 40 keys.
fn padded() -> Call {
    let call =
        Call { query: half(&[2, 3, 16, 576]), sparse_indices: numbers(&[2, 3, 1, 8]), scale: 0.1, ..Call::default() };
    let call = keys(call, Int8, &[2, 40, 1, 656]);
    Call { attention_out: call.output(), ..call }
}

/// The rows of [`packed`] and 6 blocks of 32 keys, 3 a sequence.
fn paged() -> Call {
    let call = Call { block_table: numbers(&[2, 3]), layout_kv: "PA_BSND", ..packed() };
    keys(call, Int8, &[6, 32, 1, 656])
}

/// [`paged`] with keys of HIFLOAT8, and as many entries.
fn hifloat8(entries: i64) -> Call {
    let call = Call { sparse_indices: numbers(&[5, 1, entries]), ..paged() };
    keys(call, HiFloat8, &[6, 32, 1, 656])
}

/// The call with queries of BF16.
fn bf16(call: Call) -> Call {
    let with = |desc: Option<TensorDesc>| desc.map(|desc| TensorDesc { dtype: Bf16, ..desc });
    Call { query: with(call.query), attention_out: with(call.attention_out), ..call }
}

#[test]
fn every_rule_of_quantised_sparse_attention_refuses_a_call() {
    let nz = packed().key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let (packed, padded, paged) = (packed(), padded(), paged());
    let rule = |id: &str| format!("quant_sparse_flash.{id}");
    let fp8 = keys(packed, Float8E4M3Fn, &[70, 1, 656]);
    #[rustfmt::skip]
    let calls = [
        ("product", 561_003, Target::new(Soc::AtlasA2, Cann::V8_1), packed),
        ("product", 561_003, Target::new(Soc::AtlasInference, Cann::V9_1), packed),
        ("required", 161_001, A2, Call { query: None, ..packed }),
        ("required", 161_001, A2, Call { key: None, ..packed }),
        ("required", 161_001, A2, Call { value: None, ..packed }),
        ("required", 161_001, A2, Call { sparse_indices: None, ..packed }),
        ("required", 161_001, A2, Call { attention_out: None, ..packed }),
        ("dtype", 161_002, A2, Call { query: of(Int8, &[5, 16, 576]), ..packed }),
        ("dtype", 161_002, A2, Call { attention_out: of(Bf16, &[5, 16, 512]), ..packed }),
        ("dtype", 161_002, A2, fp8),
        ("dtype", 161_002, A5, Call { value: packed.value, ..fp8 }),
        ("dtype", 161_002, OLD_A5, fp8),
        ("dtype", 161_002, OLD_A5, bf16(packed)),
        ("dtype", 161_002, A2, Call { block_table: of(Int64, &[2, 3]), ..paged }),
        ("format", 161_002, A2, Call { key: nz, ..packed }),
        ("layout", 561_002, A2, Call { layout_kv: "BSND", ..packed }),
        ("layout", 561_002, A2, Call { layout_query: "PA_BSND", ..paged }),
        ("sparse_mode", 561_002, A2, Call { sparse_mode: 4, ..packed }),
        ("tokens", 561_002, A2, Call { pre_tokens: 0, ..packed }),
        ("tokens", 561_002, A2, Call { next_tokens: 0, ..packed }),
        ("attention_mode", 561_002, A2, Call { attention_mode: 0, ..packed }),
        ("quantisation", 561_002, A2, Call { key_quant_mode: 0, ..packed }),
        ("quantisation", 561_002, A2, Call { value_quant_mode: 0, ..packed }),
        ("quantisation", 561_002, A2, Call { quant_scale_repo_mode: 0, ..packed }),
        ("quantisation", 561_002, A2, Call { tile_size: 64, ..packed }),
        ("quantisation", 561_002, A2, Call { rope_head_dim: 0, ..packed }),
        ("sparse_block_size", 561_002, A2, Call { sparse_block_size: 32, ..packed }),
        ("sparse_block_size", 561_002, A5, Call { sparse_block_size: 2, ..packed }),
        ("rank", 561_002, A2, Call { query: half(&[5, 9216]), ..packed }),
        ("rank", 561_002, A2, keys(packed, Int8, &[70, 656])),
        ("block_table", 561_002, A2, Call { block_table: None, ..paged }),
        ("block_table", 561_002, A2, Call { block_table: numbers(&[2, 0]), ..paged }),
        ("block_table", 561_002, A2, Call { block_table: numbers(&[2, 3]), ..packed }),
        ("lengths", 561_002, A2, Call { actual_seq_lengths_query: None, ..packed }),
        ("lengths", 561_002, A2, Call { actual_seq_lengths_kv: None, ..paged }),
        ("batch", 561_002, A2, keys(padded, Int8, &[3, 40, 1, 656])),
        ("block_size", 561_002, A2, keys(paged, Int8, &[6, 24, 1, 656])),
        ("head_dim", 561_002, A2, keys(packed, Int8, &[70, 1, 512])),
        ("head_dim", 561_002, A2, keys(packed, Int8, &[70, 2, 656])),
        ("head_dim", 561_002, A2, Call { query: half(&[5, 16, 512]), ..packed }),
        ("heads", 561_002, A2, heads(packed, 48)),
        ("heads", 561_002, A5, heads(packed, 24)),
        ("indices", 561_002, A2, Call { sparse_indices: numbers(&[5, 8]), ..packed }),
        ("entries", 561_002, A5, hifloat8(1024)),
        ("out", 561_002, A2, Call { attention_out: half(&[5, 16, 576]), ..packed }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        let got = (violation.rule.id.to_owned(), violation.status());
        assert_eq!(got, (rule(id), status), "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        broken.insert(violation.rule.id);
    }
    let strided = packed.value.map(|desc| TensorDesc { offset: 656, ..desc });
    #[rustfmt::skip]
    let lints = [
        ("value", Call { value: strided, ..packed }),
        ("value", Call { value: of(Int8, &[71, 1, 656]), ..packed }),
        ("scales_unread", Call { key_dequant_scale: of(Float, &[4]), ..packed }),
        ("scales_unread", Call { value_dequant_scale: of(Float, &[4]), ..packed }),
        ("scale_finite", Call { scale: f64::NAN, ..packed }),
        ("scale_zero", Call { scale: 0.0, ..packed }),
        ("scale_inverse", Call { scale: 192f64.sqrt(), ..packed }),
        ("none_chosen", Call { sparse_indices: numbers(&[5, 1, 0]), ..packed }),
    ];
    for (id, call) in lints {
        assert!(call.check(A2).is_ok(), "{id}");
        let lint = call.lint(A2, &[]).unwrap_err();
        assert_eq!(lint.rule.id, rule(id));
        assert_eq!(call.lint(A2, &[lint.rule.id]), Ok(()));
        broken.insert(lint.rule.id);
    }
    let numbered = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS, &rules::CONTENTS];
    broken.extend(broken_by_numbers(&packed.check(A2).unwrap().sequences, numbered));
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    for target in [
        Target::new(Soc::AtlasA2, Cann::V8_5),
        Target::new(Soc::AtlasA3, Cann::V9_0),
        A5,
        Target::new(Soc::Ascend950, Cann::V9_2),
    ] {
        for call in [packed(), padded(), paged()] {
            assert!(call.check(target).is_ok(), "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
    }
    let fp8 = keys(paged(), Float8E4M3Fn, &[6, 32, 1, 656]);
    for call in [fp8, hifloat8(2048), heads(paged(), 48)] {
        assert!(call.check(A5).is_ok());
        assert_eq!(call.lint(A5, &[]), Ok(()));
    }
    let first = bf16(fp8);
    assert!(first.check(OLD_A5).is_ok());
    assert_eq!(first.lint(OLD_A5, &[]), Ok(()));
    // A call whose output is empty ends before anything else is looked at.
    let empty = Call { attention_out: half(&[0]), layout_kv: "any", ..packed() };
    assert!(empty.check(A2).unwrap().is_idle());
    // Reserved tensors and values are not touched, and rows of bytes as they are described.
    let scales = Call { key_dequant_scale: of(Float, &[4]), ..paged() };
    let mut touched = Vec::new();
    let problem = scales.check(A2).unwrap();
    problem.touches(&scales, &mut |parameter, range| touched.push((parameter, range)));
    assert!(touched.contains(&(Parameter::Key, 0..6 * 32 * 656)));
    let unread = [Parameter::KeyDequantScale, Parameter::Value];
    assert!(!touched.iter().any(|(parameter, _)| unread.contains(parameter)));
}

proptest! {
    /// No shape and no attribute makes the check or the walk over tensors panic or overflow.
    #[test]
    fn nonsense_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..5, Just(16), Just(576), Just(656), Just(i64::MAX)], 0..5), 7,
        ),
        layouts in (0usize..4, 0usize..4),
        (block, mode) in (prop_oneof![-1i64..200, Just(i64::MIN), Just(i64::MAX)], -1i64..5),
    ) {
        let name = |at: usize| ["BSND", "TND", "PA_BSND", ""][at];
        let call = Call {
            query: half(&shapes[0]),
            key: of(Int8, &shapes[1]),
            value: of(Int8, &shapes[1]),
            sparse_indices: numbers(&shapes[2]),
            block_table: numbers(&shapes[3]),
            actual_seq_lengths_query: numbers(&shapes[4]),
            actual_seq_lengths_kv: numbers(&shapes[5]),
            attention_out: half(&shapes[6]),
            layout_query: name(layouts.0),
            layout_kv: name(layouts.1),
            sparse_block_size: block,
            sparse_mode: mode,
            ..Call::default()
        };
        let implied = Call { attention_out: call.output(), ..call };
        for call in [call, implied] {
            for target in [A2, OLD_A5, A5] {
                if let Ok(problem) = call.check(target) {
                    let _ = call.lint(target, &[]);
                    problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                }
            }
        }
    }
}
