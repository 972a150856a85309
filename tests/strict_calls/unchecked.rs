//! What releases from 8.5 on take without a look: each has a lint by name, strict emulation takes the call as
//! hardware does, and the safe layer stops it.

use ascend_attention::attention::Arguments;
use ascend_attention::spec::ops::fused_infer_attention_score::{Cache, Version, rules};
use ascend_attention::spec::{Cann, DType, Extents, Layout, Level, Rule, Soc, SparseMode, Target};
use ascend_attention::{Error, Stream};

use super::calls::contents::arguments_of;
use super::calls::{Call, Random, desc};
use super::{raw, strictly_on, upload};

use Cann::{V8_5, V9_0, V9_1};

const HEADS: i64 = 2;

fn call(layout: Layout, heads: i64, rows: i64, dim: i64) -> Call {
    let batch = if layout.is_packed() { 1 } else { 2 };
    let of = Extents { batch, heads, rows, dim };
    let mut call = Call::new(layout, DType::Bf16, of, 11);
    let keys = Extents { heads: HEADS, rows: rows + 8, ..of };
    call.keys(DType::Bf16, keys, dim);
    call
}

/// Packed rows that the split-fuse path judges in every release from 8.5 on.
fn packed() -> Call {
    let mut call = call(Layout::Tnd, 2 * HEADS, 9, 80);
    (call.q_lens, call.kv_lens) = (Some(vec![4, 9]), Some(vec![5, 17]));
    call
}

/// Packed rows of query heads that are no multiple of the key heads.
fn grouped(heads: i64, kv_heads: i64) -> Call {
    let of = Extents { batch: 1, heads, rows: 9, dim: 80 };
    let mut call = Call::new(Layout::Tnd, DType::Bf16, of, 11);
    let keys = Extents { heads: kv_heads, rows: 17, ..of };
    call.keys(DType::Bf16, keys, 80);
    (call.q_lens, call.kv_lens) = (Some(vec![4, 9]), Some(vec![5, 17]));
    call
}

fn packed_pages(blocks: i64) -> Call {
    let mut call = packed();
    let dims = [HEADS, 128, 80, 80];
    call.pages(Cache::BnBsH, DType::Bf16, dims, &[5, 150], &mut Random(1));
    for cache in [&mut call.key[0], &mut call.value[0]] {
        *cache = desc(DType::Bf16, &[blocks, 128, HEADS * 80]);
    }
    call
}

fn single() -> Call {
    call(Layout::Bsnd, HEADS, 1, 64)
}

/// Draft tokens with rotary parts, and a mask of their ancestors.
fn tree(mask: &[i64]) -> Call {
    let mut call = call(Layout::Bsnd, HEADS, 3, 128);
    call.plain.query_rope = Some(desc(DType::Bf16, &[2, 3, HEADS, 64]));
    call.plain.key_rope = Some(desc(DType::Bf16, &[2, 11, HEADS, 64]));
    call.plain.sparse_mode = SparseMode::Tree.acl();
    call.plain.atten_mask = Some(desc(DType::Int8, mask));
    call
}

fn with(mut call: Call, change: impl FnOnce(&mut Call)) -> Call {
    change(&mut call);
    call
}

type Unchecked = (&'static str, &'static [Cann], Call);

fn unchecked() -> Vec<Unchecked> {
    const ALL: &[Cann] = &[V8_5, V9_0, V9_1];
    const FROM_9_0: &[Cann] = &[V9_0, V9_1];
    const ENDS: &str = "split_fuse.ends";
    const SINK: &str = "learnable_sink.combined";
    let sink = || desc(DType::Bf16, &[HEADS]);
    let sunk = || with(single(), |c| c.plain.learnable_sink = Some(sink()));
    vec![
        (ENDS, ALL, with(packed(), |c| c.q_lens = Some(vec![11, 9]))),
        (ENDS, ALL, with(packed(), |c| c.kv_lens = Some(vec![19, 17]))),
        (ENDS, ALL, with(packed(), |c| c.q_lens = Some(vec![-1, 9]))),
        (ENDS, ALL, with(packed(), |c| c.kv_lens = Some(vec![17]))),
        (ENDS, ALL, with(packed_pages(8), |c| c.kv_lens = Some(vec![5, 3000]))),
        (
            "split_fuse.causal_rows",
            ALL,
            with(packed(), |c| {
                c.masked(SparseMode::RightDownCausal);
                c.kv_lens = Some(vec![2, 17]);
            }),
        ),
        ("split_fuse.kv_heads", ALL, with(packed(), |c| c.plain.num_key_value_heads = 1)),
        ("split_fuse.heads_divide", ALL, grouped(5, 2)),
        ("split_fuse.heads_divide", ALL, grouped(4, 3)),
        ("split_fuse.heads_divide", ALL, grouped(3, 2)),
        ("split_fuse.heads_divide", ALL, grouped(2, 4)),
        ("split_fuse.heads_divide", ALL, grouped(1, 2)),
        (
            "split_fuse.output_dtype",
            ALL,
            with(packed(), |c| {
                c.plain.attention_out = Some(desc(DType::Float16, &[9, 2 * HEADS, 80]));
            }),
        ),
        (
            "split_fuse.ignored",
            ALL,
            with(packed(), |c| {
                c.plain.kv_padding_size = Some(desc(DType::Int64, &[1]));
            }),
        ),
        ("cache.blocks_unchecked", ALL, packed_pages(1)),
        (
            "block_table.unchecked",
            ALL,
            with(packed_pages(8), |c| {
                c.plain.block_table = Some(desc(DType::Int32, &[1, 4]));
            }),
        ),
        (
            "block_table.unchecked",
            ALL,
            with(packed_pages(8), |c| {
                c.plain.block_table = Some(desc(DType::Int64, &[2, 2]));
            }),
        ),
        (
            "sparse_mode.single_row",
            ALL,
            with(single(), |c| {
                c.masked(SparseMode::RightDownCausal);
                c.plain.atten_mask = Some(desc(DType::Int8, &[1, 2048, 2048]));
            }),
        ),
        // 9.1 takes two axes as well.
        ("sparse_mode.single_row", &[V9_1], with(single(), |c| c.masked(SparseMode::RightDownCausal))),
        (
            SINK,
            FROM_9_0,
            with(sunk(), |c| {
                c.plain.pse_shift = Some(desc(DType::Bf16, &[1, HEADS, 1, 9]));
            }),
        ),
        (
            SINK,
            FROM_9_0,
            with(sunk(), |c| {
                let prefix = Some(desc(DType::Bf16, &[1, 4, HEADS, 64]));
                c.plain.key_shared_prefix = prefix;
                c.plain.value_shared_prefix = prefix;
            }),
        ),
        (
            SINK,
            FROM_9_0,
            with(sunk(), |c| {
                c.plain.attention_out = Some(desc(DType::Int8, &[2, 1, HEADS, 64]));
                c.plain.quant_scale2 = Some(desc(DType::Float, &[1]));
            }),
        ),
        (
            SINK,
            &[V9_0],
            with(sunk(), |c| {
                c.kv_lens = Some(vec![5, 9]);
                c.plain.kv_padding_size = Some(desc(DType::Int64, &[1]));
            }),
        ),
        ("tree_mask.size", &[V9_1], tree(&[1, 3, 3])),
        ("tree_mask.size", &[V9_1], tree(&[17])),
        ("tree_mask.shape", &[V9_1], tree(&[2, 4, 5])),
    ]
}

#[test]
fn what_the_operator_does_not_check_has_a_lint_and_is_stopped_by_the_safe_layer() {
    for cann in [V8_5, V9_0, V9_1] {
        let target = Target::new(Soc::AtlasA2, cann);
        strictly_on(target, |stream, _| {
            for (lint, releases, mut call) in unchecked() {
                if releases.contains(&cann) {
                    call.target = target;
                    one(stream, lint, &call);
                }
            }
            for clean in [packed(), packed_pages(8), single()] {
                let call = with(clean, |c| c.target = target);
                let described = call.describe();
                let checked = described.check(Version::V4, target).unwrap();
                assert!(checked.lint(&[]).is_ok(), "{:?}", checked.lint(&[]));
            }
        });
    }
}

fn one(stream: &Stream, lint: &str, call: &Call) {
    let context = format!("{lint} on {}", call.target);
    let described = call.describe();
    let version = Version::oldest_for(&described);
    let checked = match described.check(version, call.target) {
        Ok(checked) => checked,
        Err(refusal) => panic!("{context}: refused: {refusal}"),
    };
    let (mut found, mut overruns) = (Vec::new(), false);
    checked.each_lint(&mut |violation| {
        found.push(violation.rule.id);
        overruns |= violation.rule.overruns;
    });
    assert!(found.contains(&lint), "{context}: {found:?}");

    let error = planned(stream, call, Some(lint)).unwrap_err();
    assert!(matches!(&error, Error::Violation(violation) if violation.rule.id == lint), "{context}: {error}");
    planned(stream, call, None).unwrap_or_else(|error| panic!("{context}: {error}"));

    let memory = upload(call, None).unwrap();
    let prepared = raw::prepare(call, version, &memory);
    assert_eq!(prepared.status, 0, "{context}: {}", raw::message());
    let statuses = prepared.run(stream.as_raw());
    // A device that leaves the tensors may be stopped.
    assert!(overruns || statuses == (0, 0), "{context}: {statuses:?} {}", raw::message());
    assert!(!raw::message().contains("internal error"), "{context}: {}", raw::message());
}

/// Whether the safe layer plans the call with every lint allowed but one.
fn planned(stream: &Stream, call: &Call, but: Option<&str>) -> Result<(), Error> {
    let described = call.describe();
    let mut arguments = Arguments::new(described.attributes());
    for argument in arguments_of(&described) {
        let desc = described.tensor(argument).unwrap();
        let bytes = vec![0; raw::reach(desc).unwrap()];
        let shape: Vec<usize> = desc.shape.iter().map(|&dim| dim as usize).collect();
        let tensor = stream.upload_bytes(desc.dtype, &bytes, shape).unwrap();
        arguments.set(argument.parameter, tensor);
    }
    let allowed = |lint: &Rule| lint.level == Level::Lint && Some(lint.id) != but;
    for lint in rules::lints::all().filter(|lint| allowed(lint)) {
        // SAFETY: the call is planned and never launched.
        unsafe { arguments.allow_overrun(lint.id) };
    }
    arguments.plan(stream.device()).map(drop)
}
