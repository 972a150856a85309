//! The contract of BlockSparseAttention: a call for every rule, what is taken, and which keys rows see.

use crate::described::{half, of};
use ascend_spec::DType::{Bf16, Float, Int8, Int32};
use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::block_sparse_attention::{BlockFaultKind, BlockSparseCall, Parameter, rules};
use ascend_spec::{Cann, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Call = BlockSparseCall<'static>;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const A2_NEXT: Target = Target::new(Soc::AtlasA2, Cann::V9_2);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_1);

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    of(Int8, shape)
}

/// The call with the outputs that its inputs imply.
fn with_outputs(call: Call) -> Call {
    let (out, lse) = call.outputs().unwrap();
    Call { attention_out: Some(out), softmax_lse: lse, ..call }
}

fn queries(call: Call, shape: &[i64]) -> Call {
    with_outputs(Call { query: half(shape), ..call })
}

fn keys(call: Call, shape: &[i64]) -> Call {
    Call { key: half(shape), value: half(shape), ..call }
}

/// Two sequences of 150 and 50 rows, 300 and 40 keys, with 4 heads of 64 elements for 2 of keys, in blocks of 64 rows
/// and 128 keys.
fn packed() -> Call {
    let call = Call {
        block_sparse_mask: mask(&[2, 4, 3, 3]),
        block_shape: Some(&[64, 128]),
        actual_seq_lengths: Some(&[150, 50]),
        actual_seq_lengths_kv: Some(&[300, 40]),
        num_key_value_heads: 2,
        scale: 0.125,
        ..Call::default()
    };
    queries(keys(call, &[340, 2, 64]), &[200, 4, 64])
}

/// Two sequences with room for 150 rows and 300 keys, with log-sum-exps.
fn padded() -> Call {
    let call = Call { q_input_layout: "BNSD", kv_input_layout: "BNSD", softmax_lse_flag: 1, ..packed() };
    queries(keys(call, &[2, 2, 300, 64]), &[2, 4, 150, 64])
}

/// The rows of [`padded`] on Ascend 950.
fn ascend950() -> Call {
    let call = Call { q_input_layout: "BSND", kv_input_layout: "BSND", inner_precise: 4, ..padded() };
    queries(keys(call, &[2, 300, 2, 64]), &[2, 150, 4, 64])
}

#[test]
fn every_rule_of_block_sparse_attention_refuses_a_call() {
    let a2 = |cann| Target::new(Soc::AtlasA2, cann);
    let nz = packed().key.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let no_lengths = |call: Call| Call { actual_seq_lengths: None, actual_seq_lengths_kv: None, ..call };
    let heads = |query: i64, key: i64| {
        let call = Call { num_key_value_heads: key, block_sparse_mask: mask(&[2, query, 3, 3]), ..packed() };
        queries(keys(call, &[340, key, 64]), &[200, query, 64])
    };
    let (packed, padded, ascend950) = (packed(), padded(), ascend950());
    #[rustfmt::skip]
    let calls = [
        ("product", 561_003, a2(Cann::V8_5), packed),
        ("product", 561_003, Target::new(Soc::Ascend950, Cann::V9_0), ascend950),
        ("product", 561_003, Target::new(Soc::AtlasInference, Cann::V9_1), packed),
        ("required", 161_001, A2, Call { query: None, ..packed }),
        ("required", 161_001, A2, Call { key: None, ..packed }),
        ("required", 161_001, A2, Call { value: None, ..packed }),
        ("required", 161_001, A2, Call { attention_out: None, ..packed }),
        ("required", 161_001, A2, Call { block_shape: None, ..packed }),
        ("dtype", 161_002, A2, Call { query: of(Int8, &[200, 4, 64]), ..packed }),
        ("dtype", 161_002, A2, Call { value: of(Bf16, &[340, 2, 64]), ..packed }),
        ("dtype", 161_002, A2, Call { block_sparse_mask: of(Int32, &[2, 4, 3, 3]), ..packed }),
        ("dtype", 161_002, A2, Call { softmax_lse: half(&[2, 4, 150, 1]), ..padded }),
        ("format", 161_002, A2, Call { key: nz, ..packed }),
        ("layout", 161_002, A2, Call { kv_input_layout: "BNSD", ..packed }),
        ("layout", 161_002, A2, Call { q_input_layout: "tnd", ..packed }),
        ("layout", 161_002, a2(Cann::V9_0), ascend950),
        ("block_shape", 161_002, A2, Call { block_shape: Some(&[64]), ..packed }),
        ("block_shape", 161_002, A2, Call { block_shape: Some(&[0, 128]), ..packed }),
        ("block_shape", 161_002, A2, Call { block_shape: Some(&[64, -128]), ..packed }),
        ("block_shape", 161_002, A2_NEXT, Call { block_shape: Some(&[64, 128, 1]), ..packed }),
        ("inner_precise", 161_002, A2, Call { inner_precise: 3, ..packed }),
        ("inner_precise", 161_002, a2(Cann::V9_0), Call { inner_precise: 4, ..packed }),
        ("mask_rank", 161_002, A2, Call { block_sparse_mask: mask(&[4, 3, 3]), ..packed }),
        ("rank", 561_103, A2, Call { query: half(&[200, 256]), ..packed }),
        ("rank", 561_103, A2, Call { value: half(&[2, 2, 300, 64, 1]), ..padded }),
        ("kv_heads", 561_103, A2, Call { num_key_value_heads: 4, ..packed }),
        ("value_dim", 561_103, A2, Call { value: half(&[340, 2, 128]), ..packed }),
        ("value_batch", 561_103, A2, Call { value: half(&[1, 2, 300, 64]), ..padded }),
        ("out", 561_103, A2, Call { attention_out: half(&[200, 4, 128]), ..packed }),
        ("softmax_lse", 561_103, A2, Call { softmax_lse: None, ..padded }),
        ("softmax_lse", 561_103, A2, Call { softmax_lse: of(Float, &[2, 4, 150, 8]), ..padded }),
        ("layout_bsnd", 561_002, A2, Call { inner_precise: 0, ..ascend950 }),
        ("precision", 561_002, A2, Call { inner_precise: 4, ..packed }),
        ("precision", 561_002, ASCEND_950, Call { inner_precise: 0, ..ascend950 }),
        ("reserved", 561_002, A2, Call { atten_mask: mask(&[150, 300]), ..packed }),
        ("reserved", 561_002, A2, Call { block_table: of(Int32, &[2, 3]), ..packed }),
        ("reserved", 561_002, A2, Call { block_size: 128, ..packed }),
        ("tokens", 561_002, A2, Call { pre_tokens: i64::MAX, ..packed }),
        ("tokens", 561_002, A2, Call { next_tokens: 0, ..packed }),
        ("softmax_lse_flag", 561_002, A2, Call { softmax_lse_flag: 2, ..packed }),
        ("block_keys", 561_002, A2, Call { block_shape: Some(&[64, 128, 1]), ..packed }),
        ("block_keys", 561_002, A2_NEXT, Call { block_shape: Some(&[64, 144]), ..packed }),
        ("block_keys", 561_002, ASCEND_950, Call { block_shape: Some(&[64, 144]), ..ascend950 }),
        ("head_dim", 561_002, A2, queries(keys(packed, &[340, 2, 32]), &[200, 4, 32])),
        ("head_dim", 561_002, A2, keys(packed, &[340, 2, 128])),
        ("heads", 561_002, A2, heads(4, 0)),
        ("heads", 561_002, A2_NEXT, heads(5, 2)),
        ("batch", 561_002, A2, keys(padded, &[3, 2, 300, 64])),
        ("batch", 561_002, a2(Cann::V9_0), Call { value: half(&[1, 2, 300, 64]), ..padded }),
        ("lengths", 561_002, A2, no_lengths(packed)),
        ("lengths", 561_002, A2, Call { actual_seq_lengths: None, ..padded }),
        ("lengths", 561_002, A2, Call { actual_seq_lengths_kv: Some(&[300, 40, 0]), ..packed }),
        ("length_sum", 561_002, A2, Call { actual_seq_lengths: Some(&[150, 200]), ..packed }),
        ("length_most", 561_002, A2_NEXT, Call { actual_seq_lengths: Some(&[151, 50]), ..padded }),
        ("mask", 561_002, A2, Call { block_sparse_mask: None, ..packed }),
        ("mask", 561_002, A2, Call { block_sparse_mask: mask(&[2, 2, 3, 3]), ..packed }),
        ("mask", 561_002, A2_NEXT, Call { block_sparse_mask: mask(&[2, 4, 3, 4]), ..packed }),
        ("work", 561_002, A2, Call { actual_seq_lengths: Some(&[0, -1]), ..padded }),
        ("work", 561_002, A2, heads(2, 4)),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        let id = format!("block_sparse.{id}");
        let got = (violation.rule.id, violation.status());
        assert_eq!(got, (id.as_str(), status), "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        broken.insert(violation.rule.id);
    }
    #[rustfmt::skip]
    let lints = [
        ("block_sparse.value_rows", A2_NEXT, Call { value: half(&[300, 2, 64]), ..packed }),
        ("block_sparse.length_range", A2, Call { actual_seq_lengths: Some(&[151, 50]), ..padded }),
        ("block_sparse.length_range", A2_NEXT, Call { actual_seq_lengths_kv: Some(&[300, -4]), ..padded }),
        ("block_sparse.heads_unchecked", A2, heads(5, 2)),
        ("block_sparse.mask_unchecked", A2, Call { block_sparse_mask: mask(&[2, 4, 3, 4]), ..packed }),
        ("block_sparse.mask_type", A2, Call { mask_type: 3, ..packed }),
        ("block_sparse.scale_finite", A2, Call { scale: f64::INFINITY, ..packed }),
        ("block_sparse.scale_zero", A2, Call { scale: 1e-60, ..packed }),
        ("block_sparse.scale_inverse", A2, Call { scale: 8.0, ..packed }),
    ];
    for (id, target, call) in lints {
        assert_eq!(call.check(target).err(), None, "{id}");
        let lint = call.lint(target, &[]).unwrap_err();
        assert_eq!(lint.rule.id, id);
        assert!(lint.rule.scope.holds(target), "{id} for {target}");
        assert_eq!(call.lint(target, &[id]), Ok(()));
        broken.insert(id);
    }
    // What the mask names is not known before the launch.
    assert!(rules::CONTENTS.overruns);
    broken.extend([rules::CONTENTS.id, rules::ROWS_WITHOUT_KEYS.id]);
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    for (target, calls) in [
        (Target::new(Soc::AtlasA2, Cann::V9_0), [packed(), padded()]),
        (Target::new(Soc::AtlasA3, Cann::V9_1), [packed(), padded()]),
        (A2_NEXT, [packed(), padded()]),
        (ASCEND_950, [ascend950(), Call { inner_precise: 4, ..packed() }]),
    ] {
        for call in calls {
            assert_eq!(call.check(target).err(), None, "{target}");
            assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
        }
    }
    // PyTorch's extension passes softmaxLse whatever the flag says.
    let unasked = Call { softmax_lse_flag: 0, ..padded() };
    assert_eq!(unasked.lint(A2, &[]), Ok(()));
    // Without sizes a block has 128 rows and keys, from 9.2 on, which has smaller blocks of keys on Ascend 950.
    let plain = Call { block_shape: None, block_sparse_mask: mask(&[2, 4, 2, 3]), ..packed() };
    assert_eq!(plain.check(A2_NEXT).unwrap().block, [128, 128]);
    let small = Call { block_shape: Some(&[64, 16]), block_sparse_mask: mask(&[2, 4, 3, 19]), ..ascend950() };
    let next = Target::new(Soc::Ascend950, Cann::V9_2);
    assert_eq!(small.check(next).unwrap().mask_blocks, [3, 19]);
    // A call whose outputs are empty ends before the tiling looks at it.
    let empty = Call { block_size: 7, ..queries(packed(), &[0, 4, 64]) };
    assert!(empty.check(A2).unwrap().is_idle());
    assert_eq!(empty.lint(A2, &[]), Ok(()));
}

#[test]
fn a_launch_touches_what_it_walks_even_beyond_the_tensors() {
    let touched = |call: Call, parameter| {
        let problem = call.check(A2).unwrap();
        let mut touched = None;
        problem.touches(&call, &mut |of, range| {
            if of == parameter {
                touched = Some(range);
            }
        });
        (touched, problem.overruns)
    };
    let (value, mask_parameter) = (Parameter::Value, Parameter::BlockSparseMask);
    assert_eq!(touched(packed(), value), (Some(0..340 * 2 * 64 * 2), false));
    let short = Call { value: half(&[10, 2, 64]), ..packed() };
    assert_eq!(touched(short, value), (Some(0..340 * 2 * 64 * 2), true));
    let narrow = Call { block_sparse_mask: mask(&[2, 4, 1, 1]), ..packed() };
    assert_eq!(touched(narrow, mask_parameter), (Some(0..72), true));
    let unread = Call { softmax_lse_flag: 0, ..padded() };
    assert_eq!(touched(unread, Parameter::SoftmaxLse), (None, false));
}

#[test]
fn sequences_lie_one_behind_the_other_or_in_their_own_entries() {
    let rows = |call: Call| {
        let problem = call.check(A2).unwrap();
        let sequences = problem.sequences(&call);
        let rows = sequences.map(|s| [s.batch, s.first_query, s.queries, s.first_key, s.keys]);
        rows.collect::<Vec<_>>()
    };
    assert_eq!(rows(packed()), [[0, 0, 150, 0, 300], [0, 150, 50, 300, 40]]);
    assert_eq!(rows(padded()), [[0, 0, 150, 0, 300], [1, 0, 50, 0, 40]]);
    let whole = Call { actual_seq_lengths: None, actual_seq_lengths_kv: None, ..padded() };
    assert_eq!(rows(whole)[1], [1, 0, 150, 0, 300]);
    // Lengths that lead outside are cut.
    let outside = Call { actual_seq_lengths: Some(&[250, -50]), actual_seq_lengths_kv: Some(&[-10, 350]), ..packed() };
    assert_eq!(rows(outside), [[0, 0, 200, 0, 0], [0, 200, 0, 0, 340]]);
}

#[test]
fn rows_see_the_keys_of_the_blocks_that_the_mask_names() {
    let call = packed();
    let problem = call.check(A2).unwrap();
    let blocks: Vec<_> = problem.row_blocks(&call).collect();
    // Three blocks of the first sequence and one of the second, for each of 4 heads.
    assert_eq!(blocks.len(), 4 * 3 + 4);
    let block = &blocks[3 + 2];
    assert_eq!((block.head, block.number, &block.rows), (1, 2, &(128..150)));
    assert_eq!([0, 1, 2, 3].map(|head| problem.kv_head(head)), [0, 0, 1, 1]);
    let mask: Vec<u8> = (0..72).collect();
    assert_eq!(problem.mask_bytes(), 72);
    assert_eq!(problem.bytes(block, &mask), [15, 16, 17]);
    assert!(problem.bytes(block, &mask[..17]).is_empty());

    let selected = |bytes: &[u8], keys| problem.selected(bytes, keys).collect::<Vec<_>>();
    assert_eq!(selected(&[1, 0, 1], 300), [0..128, 256..300]);
    assert_eq!(selected(&[255, 1, 1], 200), [0..128, 128..200]);
    assert_eq!(selected(&[1, 1, 1], 0), []);
}

#[test]
fn the_first_fault_of_each_block_of_rows_is_found() {
    let call = packed();
    let problem = call.check(A2).unwrap();
    let faults = |bytes: [u8; 3]| {
        let mut mask = vec![0; 72];
        for row in mask.chunks_mut(3) {
            row[0] = 1;
        }
        // The first block of rows of the second head of the second sequence, which has 40 keys.
        mask[36 + 9..][..3].copy_from_slice(&bytes);
        let faults = problem.faults(&call, &mask);
        let faults = faults.map(|fault| ((fault.sequence, fault.head, fault.row_block), fault.kind));
        faults.collect::<Vec<_>>()
    };
    let at = (1, 1, 0);
    assert_eq!(faults([1, 0, 0]), []);
    assert_eq!(faults([0, 0, 0]), [(at, BlockFaultKind::Empty)]);
    let (block, byte) = (0, 254);
    assert_eq!(faults([254, 0, 0]), [(at, BlockFaultKind::Value { block, byte })]);
    let (block, keys) = (2, 40);
    assert_eq!(faults([254, 0, 1]), [(at, BlockFaultKind::Beyond { block, keys })]);
}

#[test]
fn a_mask_that_names_blocks_behind_the_keys_of_a_sequence_is_refused() {
    let arguments = packed().to_arguments();
    let check = |mask: &[i64]| {
        let any = AnyArguments::BlockSparseAttention(arguments.clone());
        any.check_contents(1, A2, &|name| match name {
            "block_sparse_mask" => mask.to_vec(),
            _ => vec![],
        })
    };
    let mut mask = vec![1; 72];
    // The second sequence has one block of rows and one of keys.
    for head in 0..4 {
        mask[36 + head * 9..][1..9].fill(0);
    }
    assert_eq!(check(&mask), Ok(()));
    // Its further blocks of rows are not looked at, and rows that see nothing stay inside.
    mask[36 + 9 + 3] = 1;
    mask[0..3].fill(0);
    assert_eq!(check(&mask), Ok(()));
    let bytes: Vec<u8> = mask.iter().map(|&byte| byte as u8).collect();
    let any = AnyArguments::BlockSparseAttention(arguments.clone());
    let mut lints = Vec::new();
    any.lint_contents(1, A2, &|_| Some(bytes.clone()), &mut |lint| lints.push(lint.to_string()));
    assert!(lints.len() == 1 && lints[0].contains("[0, 0, 0] names no block"), "{lints:?}");
    mask[36 + 9 + 2] = 1;
    let violation = check(&mask).unwrap_err();
    assert_eq!(violation.rule.id, "block_sparse.contents");
    assert!(violation.given.starts_with("[1, 1, 0, 2]"), "{violation}");
    // A call that is only described has no bytes.
    assert_eq!(check(&[]), Ok(()));
    // A mask that is not known is refused where it could name such blocks.
    let unknown = |call: Call| call.check(A2).unwrap().checked_mask(&call, None);
    assert_eq!(unknown(packed()).unwrap_err().rule.id, "block_sparse.contents");
    let whole = Call { actual_seq_lengths: None, actual_seq_lengths_kv: None, ..padded() };
    assert_eq!(unknown(whole), Ok(()));
    let even = Call { actual_seq_lengths_kv: Some(&[300, 270]), ..padded() };
    assert_eq!(unknown(even), Ok(()));
}

proptest! {
    /// No shape, attribute or number makes the check or the walk over sequences and blocks panic or overflow.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..5, Just(64), Just(128), Just(i64::MAX), Just(1 << 60)], 0..5), 4,
        ),
        layout in 0usize..4,
        sizes in prop::collection::vec(prop_oneof![-1i64..3, Just(128), Just(i64::MIN), Just(i64::MAX)], 0..4),
        lengths in prop::collection::vec(prop_oneof![-3i64..70, Just(i64::MIN), Just(i64::MAX)], 0..6),
        (heads, precision, flag) in (-1i64..5, 0i64..5, -1i64..3),
        bytes in prop::collection::vec(0u8..3, 0..6),
        count in prop_oneof![0usize..1000, Just(usize::MAX)],
    ) {
        let layout = ["TND", "BNSD", "BSND", ""][layout];
        let call = BlockSparseCall {
            query: half(&shapes[0]),
            key: half(&shapes[1]),
            value: half(&shapes[2]),
            block_sparse_mask: mask(&shapes[3]),
            block_shape: Some(&sizes),
            actual_seq_lengths: Some(&lengths),
            actual_seq_lengths_kv: Some(&lengths),
            q_input_layout: layout,
            kv_input_layout: layout,
            num_key_value_heads: heads,
            inner_precise: precision,
            softmax_lse_flag: flag,
            ..BlockSparseCall::default()
        };
        let implied = call.outputs();
        let implied = BlockSparseCall {
            attention_out: implied.map(|(out, _)| out),
            softmax_lse: implied.and_then(|(_, lse)| lse),
            ..call
        };
        for call in [call, implied, packed()] {
            for target in [A2, A2_NEXT, ASCEND_950] {
                let Ok(problem) = call.check(target) else {
                    continue;
                };
                let _ = call.lint(target, &[]);
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
                for block in problem.row_blocks(&call).take(20) {
                    let sequence = block.sequence;
                    prop_assert!(sequence.first_query + sequence.queries <= problem.query_rows);
                    prop_assert!(sequence.first_key + sequence.keys <= problem.key_rows);
                    prop_assert!(block.rows.start < block.rows.end && block.rows.end <= sequence.queries);
                    let _ = problem.bytes(&block, &bytes);
                }
                let _ = problem.faults(&call, &bytes).take(20).count();
                let _ = problem.mask_bytes();
                for keys in problem.selected(&bytes, count) {
                    prop_assert!(keys.start < keys.end && keys.end <= count);
                }
            }
        }
    }
}
