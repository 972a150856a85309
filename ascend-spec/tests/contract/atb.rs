//! The attention of ATB: a call for every rule and lint.

use ascend_spec::attention_problem::{AttentionArguments, AttentionProblem, MaskUse};
use ascend_spec::ops::atb_attention::rules::RULES;
use ascend_spec::ops::atb_attention::{Arguments, OperationParameters, Tiles, Version};
use ascend_spec::{DType, Dims, Format, Level, Soc, SparseMode, Target, TensorDesc, every_rule};
use std::collections::BTreeSet;

type Call = Arguments<TensorDesc>;

fn half(shape: &[i64]) -> TensorDesc {
    TensorDesc::packed(DType::Float16, Dims::new(shape).unwrap())
}

fn paged() -> Call {
    let cache = Some(half(&[4, 128, 2, 64]));
    Call {
        query: Some(half(&[2, 8, 64])),
        key: cache,
        value: cache,
        block_table: Some(TensorDesc { dtype: DType::Int32, ..half(&[2, 2]) }),
        context_lens: Some(vec![200, 3]),
        heads: 8,
        kv_heads: 2,
        out: Some(half(&[2, 8, 64])),
        ..Call::default()
    }
}

fn packed() -> Call {
    Call {
        query: Some(half(&[230, 8, 64])),
        key: Some(half(&[230, 2, 64])),
        value: Some(half(&[230, 2, 64])),
        block_table: None,
        mask: Some(half(&[128, 128])),
        triangle: true,
        compressed: true,
        seq_len: Some(vec![200, 30]),
        context_lens: Some(vec![200, 30]),
        out: Some(half(&[230, 8, 64])),
        ..paged()
    }
}

fn prefix() -> Call {
    Call {
        query: Some(half(&[33, 8, 64])),
        mask: Some(half(&[128, 128])),
        triangle: true,
        compressed: true,
        precise: true,
        seq_len: Some(vec![30, 3]),
        context_lens: Some(vec![158, 3]),
        out: Some(half(&[33, 8, 64])),
        ..paged()
    }
}

/// The problem of a call on a product, or the rule that refuses it; then the lints that it breaks.
fn resolved(
    call: &Call,
    version: Version,
    soc: Soc,
) -> (Result<AttentionProblem<'static>, &'static str>, Vec<&'static str>) {
    let mut lints = vec![];
    let report = &mut |lint: ascend_spec::Violation| lints.push(lint.rule.id);
    let outcome = call.resolve(version, Target::snapshot(soc), report);
    let outcome = outcome.map(Option::unwrap).map_err(|refusal| refusal.rule.id);
    (outcome, lints)
}

fn mask_of(call: &Call, version: Version) -> Result<(MaskUse, SparseMode), &'static str> {
    let (outcome, _) = resolved(call, version, Soc::AtlasA2);
    outcome.map(|problem| (problem.mask, problem.mode))
}

#[test]
fn every_rule_refuses_a_call() {
    let mut broken = BTreeSet::new();
    for (version, call) in [(Version::Paged, paged()), (Version::Packed, packed()), (Version::Prefix, prefix())] {
        let (outcome, lints) = resolved(&call, version, Soc::AtlasA2);
        assert!(outcome.is_ok() && lints.is_empty(), "{outcome:?} {lints:?}");
    }
    let (pg, pk, px) = (Version::Paged, Version::Packed, Version::Prefix);
    let table = |call: Call, rows| TensorDesc { shape: Dims::new(&[rows, 2]).unwrap(), ..call.block_table.unwrap() };
    let wide = |dim| Some(half(&[4, 128, 2, dim]));
    let refused: Vec<(&str, Version, Call)> = vec![
        ("atb.given", pg, Call { block_table: None, ..paged() }),
        ("atb.dtype", pg, Call { query: Some(TensorDesc { dtype: DType::Int8, ..half(&[2, 8, 64]) }), ..paged() }),
        (
            "atb.format",
            pg,
            Call { key: Some(TensorDesc { format: Format::FractalNz, ..half(&[4, 128, 2, 64]) }), ..paged() },
        ),
        ("atb.heads", pg, Call { kv_heads: 3, ..paged() }),
        ("atb.query", pg, Call { query: Some(half(&[2, 4, 64])), ..paged() }),
        ("atb.keys", pg, Call { key: Some(half(&[4, 128, 4, 64])), ..paged() }),
        ("atb.head_size", px, Call { value: wide(32), out: Some(half(&[33, 8, 32])), ..prefix() }),
        (
            "atb.head_size",
            px,
            Call { key: Some(half(&[4, 64, 2, 64])), value: Some(half(&[4, 64, 2, 64])), ..prefix() },
        ),
        ("atb.lengths", pg, Call { context_lens: Some(vec![1, 2, 3]), ..paged() }),
        ("atb.table", pg, Call { block_table: Some(table(paged(), 1)), ..paged() }),
        ("atb.table", px, Call { block_table: Some(table(paged(), 3)), ..prefix() }),
        ("atb.length_pairs", px, Call { context_lens: Some(vec![157, 3]), ..prefix() }),
        ("atb.length_pairs", px, Call { context_lens: Some(vec![158, 0]), ..prefix() }),
        ("atb.length_pairs", pk, Call { context_lens: Some(vec![200, 29]), ..packed() }),
        ("atb.length_pairs", pk, Call { precise: true, seq_len: Some(vec![200, 0]), ..packed() }),
        ("atb.mask", pk, Call { triangle: false, ..packed() }),
        ("atb.mask", pk, Call { compressed: false, mask: Some(half(&[199, 200])), ..packed() }),
        ("atb.mask", pk, Call { compressed: false, mask: Some(half(&[3, 200, 200])), ..packed() }),
        ("atb.mask", pk, Call { precise: true, context_lens: Some(vec![100, 100]), ..packed() }),
    ];
    for (id, version, call) in refused {
        assert_eq!(resolved(&call, version, Soc::AtlasA2).0.unwrap_err(), id);
        broken.insert(id);
    }
    let other = resolved(&prefix(), px, Soc::AtlasInference).0;
    broken.insert(other.unwrap_err());
    let lints = [
        ("atb.rows", pg, Call { context_lens: Some(vec![200]), ..paged() }),
        ("atb.rows", pk, Call { seq_len: Some(vec![200]), context_lens: Some(vec![200]), ..packed() }),
        ("atb.skipped_keys", pk, Call { precise: true, seq_len: Some(vec![199, 31]), ..packed() }),
        ("atb.squares", pk, Call { compressed: false, mask: Some(half(&[2, 128, 128])), ..packed() }),
    ];
    for (id, version, call) in lints {
        let (outcome, lints) = resolved(&call, version, Soc::AtlasA2);
        assert!(outcome.is_ok(), "{id}: {outcome:?}");
        assert_eq!(lints, [id]);
        broken.insert(id);
    }
    // What an operation is refused for before there is a tensor.
    let made = OperationParameters {
        version: px,
        heads: 8,
        kv_heads: 2,
        scale: 1.0,
        masked: true,
        triangle: false,
        precise: true,
        other_output: false,
        clamped: false,
    };
    for (made, soc) in [
        (made, Soc::AtlasA2),
        (OperationParameters { version: pk, masked: false, triangle: true, ..made }, Soc::AtlasA2),
        (OperationParameters { version: pg, scale: 2.0, ..made }, Soc::Ascend950),
    ] {
        broken.insert(made.check(Target::snapshot(soc)).unwrap_err().rule.id);
    }
    let all: BTreeSet<_> = RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
    let listed = every_rule().filter(|rule| rule.id.starts_with("atb."));
    assert_eq!(listed.count(), RULES.len());
    assert_eq!(RULES.iter().filter(|rule| rule.level == Level::Lint).count(), 3);
}

#[test]
fn masks_are_squares_by_their_width_and_the_parameter() {
    let full = |call: Call, version| match mask_of(&call, version) {
        Ok((MaskUse::Full(places), SparseMode::AllMask)) => (places.batch, places.row),
        other => panic!("{other:?}"),
    };
    let causal = (MaskUse::Compressed, SparseMode::LeftUpCausal);
    assert_eq!(mask_of(&packed(), Version::Packed), Ok(causal));
    let causal = (MaskUse::Compressed, SparseMode::RightDownCausal);
    assert_eq!(mask_of(&prefix(), Version::Prefix), Ok(causal));
    // maskType 1 and 128 numbers a row are a square with isTriuMask alone.
    let plain = Call { compressed: false, ..packed() };
    assert!(matches!(mask_of(&plain, Version::Packed), Ok((MaskUse::Compressed, _))));
    let short = Call { seq_len: Some(vec![100, 128]), context_lens: Some(vec![100, 128]), ..packed() };
    assert_eq!(full(Call { triangle: false, ..short }, Version::Packed), (0, 128));
    // A mask covers rows and keys by themselves.
    let long = Call {
        compressed: false,
        triangle: false,
        precise: true,
        mask: Some(half(&[10, 200])),
        seq_len: Some(vec![10, 9]),
        ..packed()
    };
    assert_eq!(full(long, Version::Packed), (0, 200));
    let each = Call { compressed: false, mask: Some(half(&[2, 210, 220])), ..packed() };
    assert_eq!(full(each, Version::Packed), (210 * 220, 220));
}

#[test]
fn tiles_are_as_wide_as_heads_leave_room() {
    let side = |dim, value_dim| {
        let call = Call {
            query: Some(half(&[230, 8, dim])),
            key: Some(half(&[230, 2, dim])),
            value: Some(half(&[230, 2, value_dim])),
            out: Some(half(&[230, 8, value_dim])),
            ..packed()
        };
        let (outcome, _) = resolved(&call, Version::Packed, Soc::AtlasA2);
        Tiles::of(&outcome.unwrap(), Version::Packed).side()
    };
    let sides = [(16, 16), (128, 128), (192, 192), (256, 256), (192, 128), (512, 512)];
    assert_eq!(sides.map(|(dim, value)| side(dim, value)), [128, 128, 80, 64, 128, 128]);
}
