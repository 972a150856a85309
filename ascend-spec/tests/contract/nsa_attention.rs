//! The contracts of the operators of native sparse attention that attend: a call for every rule, what is taken, and
//! which tokens rows see.

use crate::nsa_compression::{A2, WITHOUT, half, ids, numbers, of, refuse, report};
use ascend_spec::DType::{Bf16, Bool, Float, Int64};
use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_compress_attention_infer::{self, NsaCompressAttentionCall};
use ascend_spec::ops::nsa_selected_attention_infer::{self, NsaSelectedCall};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{Cann, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;

type Call = NsaCompressAttentionCall<'static>;
type Selected = NsaSelectedCall<'static>;

/// The call with the outputs that its inputs imply.
fn with_outputs(call: Call) -> Call {
    let outputs = call.outputs();
    Call { output: outputs.map(|[output, _]| output), top_k_output: outputs.map(|[_, selected]| selected), ..call }
}

/// Two sequences of 1 and 2 rows with 8 heads, of 400 and 900 tokens, of which 24 and 55 are compressed.
fn packed() -> Call {
    with_outputs(Call {
        query: half(&[3, 8, 192]),
        key: half(&[6, 64, 2 * 192]),
        value: half(&[6, 64, 2 * 128]),
        block_table: numbers(&[2, 1]),
        actual_q_seq_len: Some(&[1, 2]),
        actual_cmp_kv_seq_len: Some(&[24, 55]),
        actual_sel_kv_seq_len: Some(&[400, 900]),
        num_heads: 8,
        num_key_value_heads: 2,
        select_block_count: 5,
        scale: 0.07,
        page_block_size: 64,
        ..Call::default()
    })
}

/// The sequences of [`packed`] with a row each, with an axis of rows.
fn padded() -> Call {
    let call = Call { query: half(&[2, 1, 8, 192]), actual_q_seq_len: None, layout: "BSND", ..packed() };
    with_outputs(call)
}

/// Two sequences of 1 and 2 rows with 8 heads and lists of 4 blocks, of 400 and 600 tokens.
fn selected() -> Selected {
    Selected {
        query: half(&[3, 8, 192]),
        key: half(&[12, 64, 2 * 192]),
        value: half(&[12, 64, 2 * 128]),
        topk_indices: numbers(&[3, 2, 4]),
        block_table: numbers(&[2, 10]),
        actual_q_seq_len: Some(&[1, 2]),
        actual_kv_seq_len: Some(&[400, 600]),
        layout: Some("TND"),
        num_heads: 8,
        num_key_value_heads: 2,
        select_block_count: 4,
        page_block_size: 64,
        scale: 0.07,
        output: half(&[3, 8, 128]),
        ..Selected::default()
    }
}

#[test]
fn every_rule_of_attention_to_compressed_tokens_refuses_a_call() {
    let (packed, padded) = (packed(), padded());
    let nz = packed.key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let heads = |heads: i64, kv_heads: i64| {
        with_outputs(Call {
            query: half(&[3, heads, 192]),
            key: half(&[6, 64, kv_heads * 192]),
            value: half(&[6, 64, kv_heads * 128]),
            num_heads: heads,
            num_key_value_heads: kv_heads,
            ..packed
        })
    };
    let dims = |dim: i64, value: i64| {
        with_outputs(Call {
            query: half(&[3, 8, dim]),
            key: half(&[6, 64, 2 * dim]),
            value: half(&[6, 64, 2 * value]),
            ..packed
        })
    };
    let pages =
        |page: i64| Call { key: half(&[6, page, 384]), value: half(&[6, page, 256]), page_block_size: page, ..packed };
    #[rustfmt::skip]
    let calls = [
        ("required", 161_001, Call { query: None, ..packed }),
        ("required", 161_001, Call { key: None, ..packed }),
        ("required", 161_001, Call { value: None, ..packed }),
        ("required", 161_001, Call { block_table: None, ..packed }),
        ("required", 161_001, Call { actual_cmp_kv_seq_len: None, ..packed }),
        ("required", 161_001, Call { output: None, ..packed }),
        ("required", 161_001, Call { top_k_output: None, ..packed }),
        ("dtype", 161_002, Call { query: of(Float, &[3, 8, 192]), ..packed }),
        ("dtype", 161_002, Call { value: of(Bf16, &[6, 64, 256]), ..packed }),
        ("dtype", 161_002, Call { block_table: of(Int64, &[2, 1]), ..packed }),
        ("dtype", 161_002, Call { top_k_output: half(&[3, 2, 5]), ..packed }),
        ("format", 161_002, Call { key: nz, ..packed }),
        ("layout", 161_002, Call { layout: "BSH", ..packed }),
        ("rank", 561_103, Call { query: half(&[3, 1536]), ..packed }),
        ("rank", 561_103, Call { layout: "BSND", ..packed }),
        ("rank", 561_103, Call { key: half(&[6, 64, 2, 192]), ..packed }),
        ("rank", 561_103, Call { block_table: numbers(&[2]), ..packed }),
        ("batch", 161_002, Call { actual_cmp_kv_seq_len: Some(&[24]), ..packed }),
        ("batch", 161_002, Call { actual_q_seq_len: Some(&[1, 1, 1]), ..packed }),
        ("batch", 161_002, Call { block_table: numbers(&[0, 1]), ..packed }),
        ("batch", 161_002, with_outputs(Call { query: half(&[3, 1, 8, 192]), ..padded })),
        ("rows", 561_103, Call { actual_q_seq_len: Some(&[1, 1]), ..packed }),
        ("rows", 561_103, Call { actual_q_seq_len: Some(&[0, 3]), ..packed }),
        ("rows", 561_103, Call { actual_q_seq_len: None, ..packed }),
        ("rows", 561_103, with_outputs(Call { query: half(&[2, 5, 8, 192]), ..padded })),
        ("rows", 561_103, with_outputs(Call { query: half(&[6, 8, 192]), actual_q_seq_len: Some(&[1, 5]), ..packed })),
        ("heads", 561_103, Call { num_heads: 4, ..packed }),
        ("heads", 561_103, Call { num_key_value_heads: 0, ..packed }),
        ("heads", 561_103, Call { num_key_value_heads: 3, ..packed }),
        ("heads", 561_103, heads(12, 2)),
        ("heads", 561_103, heads(256, 1)),
        ("head_dim", 561_103, dims(208, 128)),
        ("head_dim", 561_103, dims(192, 144)),
        ("head_dim", 561_103, dims(64, 128)),
        ("head_dim", 561_103, Call { key: half(&[6, 64, 256]), ..packed }),
        ("pages", 561_103, Call { page_block_size: 32, ..packed }),
        ("pages", 561_103, pages(24)),
        ("pages", 561_103, pages(144)),
        ("pages", 561_103, Call { value: half(&[7, 64, 256]), ..packed }),
        ("selected", 561_103, Call { top_k_output: numbers(&[3, 2, 6]), ..packed }),
        ("selected", 561_103, Call { select_block_count: 0, ..packed }),
        ("out", 561_103, Call { output: half(&[3, 8, 192]), ..packed }),
        ("block", 561_103, Call { compress_block_size: 24, ..packed }),
        ("block", 561_103, Call { compress_block_size: 144, ..packed }),
        ("stride", 561_103, Call { compress_block_stride: 8, ..packed }),
        ("stride", 561_103, Call { compress_block_stride: 80, ..packed }),
        ("select_block_size", 561_103, Call { select_block_size: 40, ..packed }),
        ("select_block_size", 561_103, Call { select_block_size: 16, ..packed }),
        ("select_block_size", 561_103, Call { compress_block_stride: 48, ..packed }),
        ("short", 561_103, Call { actual_cmp_kv_seq_len: Some(&[10, 55]), ..packed }),
        ("compressed", 561_103, Call { actual_cmp_kv_seq_len: Some(&[24, 8193]), ..packed }),
        ("compressed", 561_103, Call { actual_cmp_kv_seq_len: Some(&[-1, 55]), ..packed }),
    ];
    let refused = calls.map(|(id, status, call)| (id, status, call.check(A2).unwrap_err()));
    let without = WITHOUT.map(|target| ("product", 561_003, packed.check(target).unwrap_err()));
    let mut broken = refuse("nsa_compress_attention", refused.into_iter().chain(without));
    let one = |compressed, original| Call {
        actual_cmp_kv_seq_len: Some(compressed),
        actual_sel_kv_seq_len: original,
        ..padded
    };
    let lints = [
        ("table_room", one(&[24, 65], None)),
        ("mask_unread", Call { attention_mask: of(Bool, &[2, 1]), ..packed }),
        ("mask_unread", Call { sparse_mode: 1, ..packed }),
        ("reserved", Call { top_k_mask: half(&[1]), ..packed }),
        (
            "whole_strides",
            Call { compress_block_size: 48, compress_block_stride: 32, actual_sel_kv_seq_len: None, ..padded },
        ),
        ("forced", with_outputs(Call { select_block_count: 2, ..packed })),
        ("original", Call { actual_sel_kv_seq_len: None, ..packed }),
        ("original", Call { actual_sel_kv_seq_len: Some(&[400]), ..packed }),
        ("original", one(&[24, 55], Some(&[400, 912]))),
        ("original", one(&[24, 55], Some(&[-1, 900]))),
        (
            "rows_left_out",
            with_outputs(Call { query: half(&[2, 2, 8, 192]), actual_q_seq_len: Some(&[1, 2]), ..padded }),
        ),
        ("scale_finite", Call { scale: f64::NAN, ..packed }),
        ("scale_zero", Call { scale: 0.0, ..packed }),
        ("scale_inverse", Call { scale: 192f64.sqrt(), ..packed }),
    ];
    broken.extend(report("nsa_compress_attention", lints, |call, allowed| {
        assert!(call.check(A2).is_ok(), "{:?}", call.check(A2));
        call.lint(A2, allowed)
    }));
    let contents = |table: &[i64]| {
        let arguments = AnyArguments::NsaCompressAttentionInfer(packed.to_arguments());
        arguments.check_contents(1, A2, &|_| table.to_vec())
    };
    assert_eq!(contents(&[5, 0]), Ok(()));
    broken.insert(contents(&[5, 6]).unwrap_err().rule.id);
    assert_eq!(broken, ids(nsa_compress_attention_infer::rules::RULES));
}

#[test]
fn every_rule_of_attention_to_selected_blocks_refuses_a_call() {
    let call = selected();
    let heads = |heads: i64, kv_heads: i64| Selected {
        query: half(&[3, heads, 192]),
        key: half(&[12, 64, kv_heads, 192]),
        value: half(&[12, 64, kv_heads, 128]),
        topk_indices: numbers(&[3, kv_heads, 4]),
        output: half(&[3, heads, 128]),
        num_heads: heads,
        num_key_value_heads: kv_heads,
        ..call
    };
    #[rustfmt::skip]
    let calls = [
        ("required", 561_103, Selected { query: None, ..call }),
        ("required", 561_103, Selected { key: None, ..call }),
        ("required", 561_103, Selected { value: None, ..call }),
        ("required", 561_103, Selected { topk_indices: None, ..call }),
        ("required", 561_103, Selected { block_table: None, ..call }),
        ("required", 561_103, Selected { actual_q_seq_len: None, ..call }),
        ("required", 561_103, Selected { actual_kv_seq_len: None, ..call }),
        ("required", 561_103, Selected { layout: None, ..call }),
        ("required", 561_103, Selected { output: None, ..call }),
        ("dtype", 161_002, Selected { query: of(Float, &[3, 8, 192]), ..call }),
        ("dtype", 161_002, Selected { key: of(Bf16, &[12, 64, 384]), ..call }),
        ("dtype", 161_002, Selected { topk_indices: of(Int64, &[3, 2, 4]), ..call }),
        ("format", 161_002, Selected { value: half(&[12, -64, 256]), ..call }),
        ("layout", 161_002, Selected { layout: Some("BNSD"), ..call }),
        ("rank", 161_002, Selected { layout: Some("BSND"), ..call }),
        ("rank", 161_002, Selected { key: half(&[768, 384]), ..call }),
        ("rank", 161_002, Selected { block_table: numbers(&[20]), ..call }),
        ("batch", 561_103, Selected { actual_kv_seq_len: Some(&[400]), ..call }),
        ("batch", 561_103, Selected { block_table: numbers(&[3073, 1]), ..call }),
        ("rows", 561_103, Selected { actual_q_seq_len: Some(&[1, 1]), ..call }),
        ("rows", 561_103, Selected { actual_q_seq_len: Some(&[5, -2]), ..call }),
        ("heads", 561_103, Selected { num_heads: 16, ..call }),
        ("heads", 561_103, Selected { num_key_value_heads: 4, key: half(&[12, 64, 2, 192]), ..call }),
        ("heads", 561_103, heads(34, 2)),
        ("heads", 561_103, heads(257, 257)),
        ("head_dim", 561_103, Selected { query: half(&[3, 8, 128]), ..call }),
        ("head_dim", 561_103, Selected { key: half(&[12, 64, 2 * 128]), ..call }),
        ("head_dim", 561_103, Selected { value: half(&[12, 64, 2 * 192]), output: half(&[3, 8, 192]), ..call }),
        ("pages", 561_103, Selected { page_block_size: 128, ..call }),
        ("pages", 561_103, Selected { key: half(&[12, 48, 384]), value: half(&[12, 48, 256]), page_block_size: 48, ..call }),
        ("selected", 561_103, Selected { select_block_count: 3, ..call }),
        ("selected", 561_103, Selected { topk_indices: numbers(&[3, 4]), ..call }),
        ("out", 561_103, Selected { output: half(&[3, 8, 192]), ..call }),
        ("select_block_size", 561_103, Selected { select_block_size: 24, ..call }),
        ("select_block_size", 561_103, Selected { select_block_size: 144, ..call }),
        ("short", 561_103, Selected { actual_kv_seq_len: Some(&[200, 255]), ..call }),
    ];
    let refused = calls.map(|(id, status, call)| (id, status, call.check(A2).unwrap_err()));
    let without = WITHOUT.map(|target| ("product", 561_003, call.check(target).unwrap_err()));
    let mut broken = refuse("nsa_selected_attention", refused.into_iter().chain(without));
    let padded = Selected {
        query: half(&[2, 2, 8 * 192]),
        topk_indices: numbers(&[2, 2, 2, 4]),
        output: half(&[2, 2, 8 * 128]),
        layout: Some("BSH"),
        ..call
    };
    let lints = [
        ("table_room", Selected { actual_kv_seq_len: Some(&[400, 641]), ..call }),
        ("table_room", Selected { actual_kv_seq_len: Some(&[-1, 600]), actual_q_seq_len: Some(&[1, 2]), ..call }),
        ("mask_unread", Selected { atten_mask: of(Bool, &[2, 1]), ..call }),
        ("rows_left_out", padded),
        ("rows_without_tokens", Selected { actual_kv_seq_len: Some(&[0, 600]), ..call }),
        ("scale_finite", Selected { scale: f64::INFINITY, ..call }),
        ("scale_zero", Selected { scale: 1e-60, ..call }),
        ("scale_inverse", Selected { scale: 192.0, ..call }),
    ];
    broken.extend(report("nsa_selected_attention", lints, |call, allowed| {
        assert!(call.check(A2).is_ok(), "{:?}", call.check(A2));
        match call.actual_kv_seq_len {
            // Fewer tokens than none are fewer than rows as well.
            Some([-1, _]) if allowed.is_empty() => call.lint(A2, &["nsa_selected_attention.rows_without_tokens"]),
            Some([-1, _]) => Ok(()),
            _ => call.lint(A2, allowed),
        }
    }));
    let contents = |table: i64| {
        let arguments = AnyArguments::NsaSelectedAttentionInfer(call.to_arguments());
        arguments.check_contents(1, A2, &|_| vec![table; 20])
    };
    assert_eq!(contents(11), Ok(()));
    broken.insert(contents(12).unwrap_err().rule.id);
    assert_eq!(broken, ids(nsa_selected_attention_infer::rules::RULES));
}

#[test]
fn documented_calls_of_attention_are_taken_without_a_lint() {
    let whole = Selected {
        query: half(&[2, 2, 8, 192]),
        key: half(&[12, 64, 2, 192]),
        value: half(&[12, 64, 2, 128]),
        topk_indices: numbers(&[2, 2, 2, 4]),
        actual_q_seq_len: Some(&[2, 2]),
        layout: Some("BSND"),
        ..selected()
    };
    let whole = Selected { output: whole.attention(), ..whole };
    let joined = Selected { query: half(&[2, 2, 8 * 192]), layout: Some("BSH"), ..whole };
    let joined = Selected { output: joined.attention(), ..joined };
    assert_eq!(joined.output, half(&[2, 2, 8 * 128]));
    for target in [Target::new(Soc::AtlasA2, Cann::V8_5), Target::new(Soc::AtlasA3, Cann::V9_2), A2] {
        // PyTorch's extension passes arrays without numbers for what is not given.
        let none = Call { actual_q_seq_len: Some(&[]), actual_sel_kv_seq_len: Some(&[]), ..padded() };
        for call in [packed(), padded(), Call { actual_sel_kv_seq_len: None, ..padded() }, none] {
            assert_eq!(call.check(target).err(), None, "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
        for call in [selected(), whole, joined] {
            assert_eq!(call.check(target).err(), None, "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
            assert_eq!(call.attention(), call.output);
        }
    }
    // A call whose outputs are empty ends before anything else is looked at.
    let empty = Call { output: half(&[0]), top_k_output: numbers(&[0, 2]), layout: "any", ..packed() };
    assert!(empty.check(A2).unwrap().is_idle());
    assert_eq!(empty.lint(A2, &[]), Ok(()));
    let empty = Selected { output: half(&[0]), layout: Some("any"), ..selected() };
    assert!(empty.check(A2).unwrap().is_idle());
    assert_eq!(empty.lint(A2, &[]), Ok(()));
}

#[test]
fn a_row_sees_the_compressed_tokens_that_end_at_its_position_or_before() {
    let problem = packed().check(A2).unwrap();
    let numbers = packed().numbers(&problem, vec![0, 1]);
    let all: Vec<_> = problem.attention.sequences.each(SparseContents::of(&numbers)).collect();
    assert_eq!((all[1].first_query, all[1].queries, all[1].keys), (1, 2, 55));
    // 55 compressed tokens end with token 896: the last row of 896 tokens sees all, the one before one less.
    assert_eq!([0, 1].map(|row| problem.visible(&all[1], row, Some(896))), [54, 55]);
    assert_eq!([0, 1].map(|row| problem.visible(&all[1], row, Some(897))), [55, 55]);
    assert_eq!([0, 1].map(|row| problem.visible(&all[1], row, None)), [55, 55]);
    assert_eq!(problem.visible(&all[1], 0, Some(i64::MIN)), 0);
    // One row sees all, whatever is said.
    assert_eq!(problem.visible(&all[0], 0, Some(3)), 24);
}

proptest! {
    /// No shape, attribute or number makes the checks or what follows from them panic or overflow.
    #[test]
    fn nonsense_of_attention_does_not_panic(
        shapes in prop::collection::vec(
            prop::collection::vec(
                prop_oneof![-2i64..5, Just(16), Just(64), Just(192), Just(i64::MAX), Just(1 << 60)], 0..5,
            ), 6,
        ),
        sizes in prop::collection::vec(prop_oneof![-1i64..200, Just(i64::MIN), Just(i64::MAX)], 7),
        queries in prop::collection::vec(prop_oneof![-1i64..6, Just(i64::MIN), Just(i64::MAX)], 0..4),
        keys in prop::collection::vec(prop_oneof![-3i64..900, Just(i64::MIN), Just(i64::MAX)], 0..4),
        layout in 0usize..4,
    ) {
        let layout = ["TND", "BSND", "BSH", ""][layout];
        let base = NsaCompressAttentionCall {
            query: half(&shapes[0]),
            key: half(&shapes[1]),
            value: half(&shapes[2]),
            block_table: numbers(&shapes[3]),
            actual_q_seq_len: Some(&queries),
            actual_cmp_kv_seq_len: Some(&keys),
            actual_sel_kv_seq_len: Some(&keys),
            num_heads: sizes[0],
            num_key_value_heads: sizes[1],
            select_block_size: sizes[2],
            select_block_count: sizes[3],
            compress_block_size: sizes[4],
            compress_block_stride: sizes[5],
            page_block_size: sizes[6],
            layout,
            output: half(&shapes[4]),
            top_k_output: numbers(&shapes[5]),
            ..NsaCompressAttentionCall::default()
        };
        let implied = base.outputs();
        let implied = NsaCompressAttentionCall {
            output: implied.map(|[output, _]| output),
            top_k_output: implied.map(|[_, selected]| selected),
            ..base
        };
        let likely = NsaCompressAttentionCall { actual_cmp_kv_seq_len: Some(&keys), ..packed() };
        let likely = [likely, NsaCompressAttentionCall { actual_q_seq_len: Some(&queries), ..packed() }];
        for call in [base, implied, likely[0], likely[1]] {
            if let Ok(problem) = call.check(A2) {
                let _ = call.lint(A2, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                let numbers = call.numbers(&problem, keys.clone());
                let contents = SparseContents::of(&numbers);
                for sequence in problem.attention.sequences.each(contents).take(9) {
                    prop_assert!(problem.visible(&sequence, 0, keys.first().copied()) <= sequence.keys);
                    prop_assert!(problem.blocks(sequence.keys) <= 4096);
                }
            }
        }
        let base = NsaSelectedCall {
            query: base.query,
            key: base.key,
            value: base.value,
            topk_indices: numbers(&shapes[5]),
            block_table: base.block_table,
            actual_q_seq_len: Some(&queries),
            actual_kv_seq_len: Some(&keys),
            layout: Some(layout),
            num_heads: sizes[0],
            num_key_value_heads: sizes[1],
            select_block_size: sizes[2],
            select_block_count: sizes[3],
            page_block_size: sizes[6],
            output: base.output,
            ..NsaSelectedCall::default()
        };
        let likely = NsaSelectedCall { actual_kv_seq_len: Some(&keys), ..selected() };
        for call in [base, NsaSelectedCall { output: base.attention(), ..base }, likely] {
            if let Ok(problem) = call.check(A2) {
                let _ = call.lint(A2, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
            }
        }
    }
}
