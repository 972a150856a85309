//! Every rule and lint has a call that breaks it, and it alone is named.

use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, Version, rules};
use ascend_spec::{Cann, DType, Dims, Format, Level, Refusal, Soc, Target, TensorDesc, Violation};
use std::collections::BTreeSet;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

type Call = FlashAttentionCall<'static>;

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float16, shape)
}

fn float(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float, shape)
}

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Bool, shape)
}

/// Two sequences of 24 rows and 40 keys, four heads over two.
fn dense() -> Call {
    FlashAttentionCall {
        query: half(&[2, 4, 24, 64]),
        key: half(&[2, 2, 40, 64]),
        value: half(&[2, 2, 40, 64]),
        num_heads: 4,
        softmax_max: float(&[2, 4, 24, 8]),
        softmax_sum: float(&[2, 4, 24, 8]),
        attention_out: half(&[2, 4, 24, 64]),
        ..FlashAttentionCall::new("BNSD")
    }
}

/// The same with as many keys as rows.
fn square(rows: i64) -> Call {
    FlashAttentionCall {
        query: half(&[2, 4, rows, 64]),
        key: half(&[2, 2, rows, 64]),
        value: half(&[2, 2, rows, 64]),
        softmax_max: float(&[2, 4, rows, 8]),
        softmax_sum: float(&[2, 4, rows, 8]),
        attention_out: half(&[2, 4, rows, 64]),
        ..dense()
    }
}

/// The same with heads and head dimension in one axis.
fn hidden() -> Call {
    FlashAttentionCall {
        query: half(&[2, 24, 256]),
        key: half(&[2, 40, 128]),
        value: half(&[2, 40, 128]),
        attention_out: half(&[2, 24, 256]),
        input_layout: Some("BSH"),
        ..dense()
    }
}

/// Two packed sequences, of 10 rows and 12 keys and of 20 rows and 33 keys.
fn packed() -> Call {
    FlashAttentionCall {
        query: half(&[30, 4, 64]),
        key: half(&[45, 2, 64]),
        value: half(&[45, 2, 64]),
        actual_seq_lengths: Some(&[10, 30]),
        actual_seq_lengths_kv: Some(&[12, 45]),
        softmax_max: float(&[30, 4, 8]),
        softmax_sum: float(&[30, 4, 8]),
        attention_out: half(&[30, 4, 64]),
        input_layout: Some("TND"),
        ..dense()
    }
}

fn masked(sparse_mode: i64, call: Call) -> Call {
    FlashAttentionCall {
        sparse_mode,
        atten_mask: mask(&[if sparse_mode == 6 { 3072 } else { 2048 }, 2048]),
        ..call
    }
}

fn roped() -> Call {
    let bf16 = |shape: &[i64]| of(DType::Bf16, shape);
    FlashAttentionCall {
        query: bf16(&[30, 4, 64]),
        key: bf16(&[45, 2, 64]),
        value: bf16(&[45, 2, 64]),
        query_rope: bf16(&[30, 4, 32]),
        key_rope: bf16(&[45, 2, 32]),
        attention_out: bf16(&[30, 4, 64]),
        ..masked(3, packed())
    }
}

/// Rules and lints that some call has broken.
#[derive(Default)]
struct Broken(BTreeSet<&'static str>);

impl Broken {
    fn named(&mut self, id: &'static str, violation: &Violation, target: Target) {
        for text in [&violation.given, &violation.allowed, &violation.fix] {
            assert!(!text.is_empty(), "{violation:?}");
        }
        assert_eq!(violation.rule.id, id, "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        self.0.insert(id);
    }

    #[track_caller]
    fn at(&mut self, version: Version, target: Target, id: &'static str, status: i32, call: &Call) {
        match call.check(version, target) {
            Err(Refusal::Violation(violation)) => {
                self.named(id, &violation, target);
                assert_eq!(violation.rule.status, status, "{id}");
            }
            other => panic!("{id}: not refused: {other:?}"),
        }
    }

    /// The oldest version refuses `call`.
    #[track_caller]
    fn by(&mut self, id: &'static str, status: i32, call: Call) {
        self.at(Version::oldest_on(&call, TARGET), TARGET, id, status, &call);
    }

    /// The oldest version takes `call`, and the lint finds it.
    #[track_caller]
    fn lint(&mut self, id: &'static str, call: Call) {
        let version = Version::oldest_on(&call, TARGET);
        let problem = call.check(version, TARGET).unwrap();
        match problem.lint(&[]) {
            Err(violation) => {
                self.named(id, &violation, TARGET);
                assert_eq!(violation.rule.level, Level::Lint, "{id}");
                assert_eq!(problem.lint(&[id]), Ok(()), "{id}");
            }
            Ok(()) => panic!("{id}: not found"),
        }
    }
}

#[test]
fn every_rule_and_lint_is_broken_by_some_call() {
    for call in [
        dense(),
        square(24),
        hidden(),
        packed(),
        roped(),
        masked(2, dense()),
    ] {
        let version = Version::oldest_on(&call, TARGET);
        let problem = call.check(version, TARGET).unwrap();
        assert_eq!(problem.lint(&[]), Ok(()));
    }
    let mut broken = Broken::default();
    for calls in [
        entry,
        layouts,
        heads,
        lengths,
        masks,
        tokens,
        prefixes,
        biases,
        start_indices,
        dropout,
        sinks,
        ropes,
        outputs,
    ] {
        calls(&mut broken);
    }
    let all: BTreeSet<_> = rules::all().map(|rule| rule.id).collect();
    assert_eq!(
        broken.0, all,
        "rules without a call that breaks them, or the reverse"
    );
}

fn entry(broken: &mut Broken) {
    let entry_point = "flash.entry_point";
    for (version, soc, cann) in [
        (Version::V4, Soc::AtlasA2, Cann::V9_1),
        (Version::V3, Soc::AtlasA3, Cann::V8_1),
        (Version::VarLenV5, Soc::AtlasA2, Cann::V8_1),
        (Version::V1, Soc::AtlasInference, Cann::V9_1),
        (Version::V4, Soc::Ascend950, Cann::V8_5),
    ] {
        let target = Target::new(soc, cann);
        match dense().check(version, target) {
            Err(Refusal::Violation(violation)) => {
                assert_eq!(violation.rule.id, entry_point, "{violation}");
                assert_eq!(violation.rule.status, 561_003);
            }
            other => panic!("{version} on {target}: {other:?}"),
        }
        broken.0.insert(entry_point);
    }
    let required = "flash.required";
    for call in [
        FlashAttentionCall {
            query: None,
            ..dense()
        },
        FlashAttentionCall {
            key: None,
            ..dense()
        },
        FlashAttentionCall {
            value: None,
            ..dense()
        },
        FlashAttentionCall {
            input_layout: None,
            ..dense()
        },
        FlashAttentionCall {
            softmax_max: None,
            ..dense()
        },
        FlashAttentionCall {
            softmax_sum: None,
            ..dense()
        },
        FlashAttentionCall {
            attention_out: None,
            ..dense()
        },
    ] {
        broken.by(required, 161_001, call);
    }
    let negative = FlashAttentionCall {
        sink: float(&[-1]),
        ..dense()
    };
    broken.by("flash.countable", 161_002, negative);
    let value = TensorDesc {
        format: Format::FractalNz,
        ..half(&[2, 2, 40, 64]).unwrap()
    };
    broken.by(
        "flash.format",
        161_002,
        FlashAttentionCall {
            value: Some(value),
            ..dense()
        },
    );
    let padding_mask = mask(&[24, 40]);
    broken.lint(
        "flash.padding_mask_ignored",
        FlashAttentionCall {
            padding_mask,
            ..dense()
        },
    );
    let softmax_out = float(&[2, 4, 24, 40]);
    broken.lint(
        "flash.softmax_out_ignored",
        FlashAttentionCall {
            softmax_out,
            ..dense()
        },
    );
    broken.lint(
        "flash.inner_precise_known",
        FlashAttentionCall {
            inner_precise: 3,
            ..dense()
        },
    );
    let many = FlashAttentionCall {
        query: half(&[2, 260, 24, 64]),
        num_heads: 260,
        softmax_max: float(&[2, 260, 24, 8]),
        softmax_sum: float(&[2, 260, 24, 8]),
        attention_out: half(&[2, 260, 24, 64]),
        ..dense()
    };
    broken.lint("flash.documented_limits", many);
}

fn layouts(broken: &mut Broken) {
    for input_layout in ["NTD", "", "BNS"] {
        let call = FlashAttentionCall {
            input_layout: Some(input_layout),
            ..dense()
        };
        broken.by("flash.input_layout", 161_002, call);
    }
    let lower = FlashAttentionCall {
        input_layout: Some("tnd"),
        ..packed()
    };
    broken.by("flash.input_layout", 161_002, lower);
    let rank = FlashAttentionCall {
        input_layout: Some("BSH"),
        ..dense()
    };
    broken.by("flash.query_rank", 161_002, rank);
    let key = half(&[2, 2, 40, 64, 1]);
    broken.by(
        "flash.key_rank",
        161_001,
        FlashAttentionCall { key, ..dense() },
    );
    let second = FlashAttentionCall { key, ..dense() };
    broken.at(Version::V2, TARGET, "flash.key_rank_v2", 161_002, &second);
    broken.at(
        Version::V1,
        TARGET,
        "flash.packed_without_lengths",
        161_001,
        &packed(),
    );
    let key = half(&[3, 2, 40, 64]);
    broken.by(
        "flash.key_batch",
        161_001,
        FlashAttentionCall {
            key,
            value: key,
            ..dense()
        },
    );
    let int8 = of(DType::Int8, &[2, 2, 40, 64]);
    broken.by(
        "flash.dtype",
        161_002,
        FlashAttentionCall {
            value: int8,
            ..dense()
        },
    );
    let attention_out = float(&[2, 4, 24, 64]);
    let other = FlashAttentionCall {
        attention_out,
        ..dense()
    };
    broken.at(Version::V2, TARGET, "flash.out_dtype", 161_002, &other);
    broken.by("flash.out_shape", 161_001, other);
}

fn heads(broken: &mut Broken) {
    broken.by(
        "flash.head_num",
        161_002,
        FlashAttentionCall {
            num_heads: 0,
            ..dense()
        },
    );
    let narrow = half(&[2, 40, 32]);
    let call = FlashAttentionCall {
        key: narrow,
        value: narrow,
        ..hidden()
    };
    broken.by("flash.key_narrow", 161_001, call);
    let key = half(&[2, 2, 40, 32]);
    broken.by(
        "flash.key_dim",
        161_002,
        FlashAttentionCall { key, ..dense() },
    );
    let value = half(&[2, 2, 40, 65]);
    broken.by(
        "flash.value_dim",
        161_002,
        FlashAttentionCall { value, ..dense() },
    );
    let wide = FlashAttentionCall {
        query: half(&[2, 4, 24, 769]),
        key: half(&[2, 2, 40, 769]),
        ..dense()
    };
    broken.by("flash.head_dim_max", 161_002, wide);
    let uneven = FlashAttentionCall {
        query: half(&[2, 24, 258]),
        ..hidden()
    };
    broken.by("flash.hidden_size", 161_001, uneven);
    broken.by(
        "flash.query_heads",
        161_001,
        FlashAttentionCall {
            num_heads: 2,
            ..dense()
        },
    );
    let key = half(&[2, 3, 40, 64]);
    broken.by(
        "flash.head_groups",
        161_001,
        FlashAttentionCall {
            key,
            value: key,
            ..dense()
        },
    );
    let of_88 = |keys: i64, dim: i64| FlashAttentionCall {
        query: half(&[1, 2, 2, 88]),
        key: half(&[1, keys, 2, 88]),
        value: half(&[1, keys, 2, dim]),
        num_heads: 2,
        softmax_max: float(&[1, 2, 2, 8]),
        softmax_sum: float(&[1, 2, 2, 8]),
        attention_out: half(&[1, 2, 2, dim]),
        input_layout: Some("BSND"),
        ..dense()
    };
    broken.by("flash.head_dim_88", 161_001, of_88(512, 80));
    for (keys, dim) in [(511, 80), (512, 72), (512, 88)] {
        assert!(of_88(keys, dim).check(Version::V1, TARGET).is_ok());
    }
}

fn lengths(broken: &mut Broken) {
    let with = |q: Option<&'static [i64]>, kv: Option<&'static [i64]>| FlashAttentionCall {
        actual_seq_lengths: q,
        actual_seq_lengths_kv: kv,
        ..packed()
    };
    for call in [
        with(None, Some(&[12, 45])),
        with(Some(&[10, 30]), Some(&[])),
    ] {
        broken.by("flash.lengths_required", 161_001, call);
    }
    broken.by(
        "flash.lengths_count",
        161_001,
        with(Some(&[10, 30]), Some(&[45])),
    );
    broken.by(
        "flash.lengths_sum",
        161_001,
        with(Some(&[10, 31]), Some(&[12, 45])),
    );
    broken.by(
        "flash.padded_tail",
        161_001,
        with(Some(&[10, 29]), Some(&[12, 44])),
    );
    assert!(
        with(Some(&[10, 29, 0]), Some(&[12, 44, 0]))
            .check(Version::VarLenV1, TARGET)
            .is_ok()
    );
    broken.by(
        "flash.lengths_all_zero",
        161_001,
        with(Some(&[0, 0]), Some(&[12, 45])),
    );
    broken.lint(
        "flash.lengths_descend",
        with(Some(&[10, 30, 30]), Some(&[12, 45, 40])),
    );
    broken.lint(
        "flash.tail_unwritten",
        with(Some(&[10, 29]), Some(&[12, 45])),
    );
}

fn masks(broken: &mut Broken) {
    let with = |sparse_mode, atten_mask| FlashAttentionCall {
        sparse_mode,
        atten_mask,
        ..dense()
    };
    let int8 = of(DType::Int8, &[24, 40]);
    broken.by("flash.atten_mask_dtype", 161_001, with(0, int8));
    broken.by(
        "flash.atten_mask_rank",
        161_001,
        with(0, mask(&[2, 24, 40])),
    );
    for sparse_mode in [-1, 7, 9] {
        broken.by(
            "flash.sparse_mode",
            161_001,
            with(sparse_mode, mask(&[2048, 2048])),
        );
    }
    broken.by("flash.sparse_mode", 161_001, masked(5, packed()));
    for shape in [
        &[2, 1, 1, 40][..],
        &[24, 41],
        &[1, 4, 24, 40],
        &[1, 1, 2048, 2048],
    ] {
        broken.by("flash.atten_mask_shape", 161_001, with(1, mask(shape)));
    }
    // A compressed mask of four axes is held to the lengths as well.
    broken.by(
        "flash.atten_mask_shape",
        161_001,
        with(3, mask(&[1, 1, 2048, 2048])),
    );
    broken.by(
        "flash.atten_mask_compressed",
        161_001,
        with(3, mask(&[24, 40])),
    );
    broken.lint("flash.mode_without_mask", with(3, None));
    let four_axes = FlashAttentionCall {
        atten_mask: mask(&[2, 1, 20, 33]),
        ..packed()
    };
    broken.lint("flash.atten_mask_packed", four_axes);
    let window = FlashAttentionCall {
        next_tokens: 0,
        ..with(0, mask(&[24, 40]))
    };
    let problem = window.check(Version::V1, TARGET).unwrap();
    let triangle = |hides: fn(i64, i64) -> bool| -> Vec<u8> {
        let cells = (0..24).flat_map(|i| (0..40).map(move |j| (i, j)));
        cells.map(|(i, j)| u8::from(hides(i, j))).collect()
    };
    assert_eq!(problem.admits_mask(&triangle(|i, j| j > i)), Ok(()));
    let loose = problem
        .admits_mask(&triangle(|i, j| j > i + 1))
        .unwrap_err();
    assert!(loose.given.contains("key 1 for row 0"), "{loose}");
    broken.named("flash.atten_mask_loose", &loose, TARGET);
}

fn tokens(broken: &mut Broken) {
    let with = |call: Call, pre_tokens, next_tokens| FlashAttentionCall {
        pre_tokens,
        next_tokens,
        ..call
    };
    let full = || FlashAttentionCall {
        atten_mask: mask(&[24, 40]),
        ..dense()
    };
    broken.by("flash.tokens_negative", 161_001, with(full(), -1, -1));
    broken.by("flash.pre_tokens", 161_001, with(full(), -40, 100));
    broken.by("flash.next_tokens", 161_001, with(full(), 100, -24));
    // Counted from the bottom right: 16 less, and 16 more, from the top left.
    broken.by(
        "flash.pre_tokens",
        161_001,
        with(masked(4, dense()), 10, -11),
    );
    assert!(
        with(masked(4, dense()), 10, -10)
            .check(Version::V1, TARGET)
            .is_ok()
    );
    let full_packed = || FlashAttentionCall {
        atten_mask: mask(&[30, 45]),
        ..packed()
    };
    broken.by("flash.packed_window", 161_001, with(full_packed(), 30, -1));
    broken.by("flash.packed_window", 161_001, with(full_packed(), -3, 2));
    let reversed = || FlashAttentionCall {
        query: half(&[45, 4, 64]),
        key: half(&[30, 2, 64]),
        value: half(&[30, 2, 64]),
        actual_seq_lengths: Some(&[12, 45]),
        actual_seq_lengths_kv: Some(&[10, 30]),
        softmax_max: float(&[45, 4, 8]),
        softmax_sum: float(&[45, 4, 8]),
        attention_out: half(&[45, 4, 64]),
        ..packed()
    };
    broken.by(
        "flash.packed_band",
        161_001,
        with(masked(4, packed()), -1, 1),
    );
    broken.by(
        "flash.packed_band",
        161_001,
        with(masked(4, reversed()), 1, 12),
    );
    assert!(
        with(masked(4, reversed()), 1, 13)
            .check(Version::VarLenV1, TARGET)
            .is_ok()
    );
    broken.by("flash.packed_rows", 161_001, masked(3, reversed()));
    broken.by(
        "flash.packed_rows",
        161_001,
        with(masked(7, reversed()), 30, 0),
    );
    for (pre, next) in [(32, 0), (33, 1), (33, -14)] {
        broken.by(
            "flash.cut_sequence",
            161_001,
            with(masked(7, packed()), pre, next),
        );
    }
    for (pre, next) in [(11, 0), (12, -3)] {
        broken.by(
            "flash.cut_sequence",
            161_001,
            with(masked(8, packed()), pre, next),
        );
    }
    broken.lint("flash.tokens_without_mask", with(dense(), 100, 0));
    broken.lint("flash.tokens_ignored", with(masked(3, dense()), 10, 0));
}

fn prefixes(broken: &mut Broken) {
    let with = |sparse_mode, shape: &[i64], prefix: Option<&'static [i64]>| FlashAttentionCall {
        sparse_mode,
        atten_mask: mask(shape),
        prefix,
        ..dense()
    };
    for prefix in [None, Some(&[16][..]), Some(&[15, 40]), Some(&[16, 41])] {
        broken.by("flash.prefix", 161_001, with(6, &[3072, 2048], prefix));
        broken.lint("flash.prefix_ignored", with(5, &[24, 40], prefix));
    }
    broken.by(
        "flash.prefix_mask_batch",
        161_001,
        with(5, &[24, 40], Some(&[16, 40])),
    );
    broken.lint("flash.prefix_unread", with(1, &[24, 40], Some(&[16, 40])));
}

fn biases(broken: &mut Broken) {
    let with = |call: Call, pse_type, real_shift| FlashAttentionCall {
        pse_type,
        real_shift,
        ..call
    };
    broken.by(
        "flash.pse_dtype",
        161_002,
        with(dense(), 1, float(&[2, 4, 24, 40])),
    );
    for slopes in [None, half(&[4])] {
        broken.by("flash.pse_slopes", 161_002, with(square(24), 2, slopes));
    }
    for pse_type in [-1, 4] {
        broken.by("flash.pse_type", 161_001, with(dense(), pse_type, None));
    }
    broken.by("flash.pse_required", 161_001, with(dense(), 0, None));
    for shape in [
        &[2, 2, 24, 40][..],
        &[2, 4, 24, 41],
        &[2, 4, 1000, 40],
        &[4, 24, 40],
    ] {
        broken.by("flash.pse_shape", 161_001, with(dense(), 1, half(shape)));
    }
    let last_rows = |rows: i64| with(square(rows), 0, half(&[1, 4, 1024, rows]));
    for rows in [1000, 1025] {
        broken.by("flash.pse_last_rows", 161_001, last_rows(rows));
    }
    for call in [last_rows(1024), masked(3, last_rows(1025))] {
        assert!(call.check(Version::V2, TARGET).is_ok());
    }
    broken.by(
        "flash.pse_packed_shape",
        161_001,
        with(packed(), 1, half(&[100])),
    );
    for count in [4 * 45, 4 * (10 * 12 + 20 * 33)] {
        assert!(
            with(packed(), 1, half(&[count]))
                .check(Version::VarLenV1, TARGET)
                .is_ok()
        );
    }
    let packed_last = with(packed(), 1, half(&[2, 4, 1024, 33]));
    broken.by(
        "flash.pse_packed_last_rows",
        161_001,
        masked(3, packed_last),
    );
    broken.by(
        "flash.pse_slopes_shape",
        161_001,
        with(square(24), 2, float(&[3])),
    );
    broken.by(
        "flash.pse_slopes_square",
        161_001,
        with(dense(), 3, float(&[4])),
    );
    let cut = |mode| FlashAttentionCall {
        pre_tokens: 33,
        next_tokens: 0,
        ..masked(mode, with(packed(), 2, float(&[4])))
    };
    broken.by("flash.pse_slopes_cut", 161_001, cut(7));
    broken.by("flash.pse_slopes_cut", 161_001, cut(8));
    let empty = FlashAttentionCall {
        actual_seq_lengths: Some(&[10, 10, 30]),
        actual_seq_lengths_kv: Some(&[12, 12, 45]),
        ..with(packed(), 1, half(&[4 * 45]))
    };
    broken.lint("flash.pse_empty_sequence", empty);
}

fn start_indices(broken: &mut Broken) {
    let with =
        |call: Call, q: Option<&'static [i64]>, kv: Option<&'static [i64]>| FlashAttentionCall {
            q_start_idx: q,
            kv_start_idx: kv,
            ..call
        };
    let slopes = |call: Call| FlashAttentionCall {
        pse_type: 2,
        real_shift: float(&[4]),
        ..call
    };
    broken.lint(
        "flash.start_index_lone",
        with(slopes(square(24)), Some(&[3]), None),
    );
    broken.lint(
        "flash.start_index_unread",
        with(dense(), Some(&[3]), Some(&[0])),
    );
    let first = FlashAttentionCall {
        query: half(&[30, 4, 64]),
        key: half(&[32, 2, 64]),
        value: half(&[32, 2, 64]),
        actual_seq_lengths_kv: Some(&[12, 32]),
        pre_tokens: 12,
        next_tokens: 0,
        ..masked(8, slopes(packed()))
    };
    broken.lint(
        "flash.start_index_first",
        with(first, Some(&[2]), Some(&[0])),
    );
}

fn dropout(broken: &mut Broken) {
    let with = |drop_mask, keep_prob| FlashAttentionCall {
        drop_mask,
        keep_prob,
        ..dense()
    };
    let bytes = |count: i64| of(DType::UInt8, &[count]);
    for keep_prob in [0.0, -0.5, 1.01, f64::NAN] {
        broken.by("flash.keep_prob", 161_001, with(None, keep_prob));
    }
    broken.by("flash.drop_mask_dtype", 161_001, with(mask(&[960]), 0.5));
    let needed = 2 * 4 * 24 * 40 / 8;
    broken.by(
        "flash.drop_mask_size",
        161_001,
        with(bytes(needed - 1), 0.5),
    );
    assert_eq!(
        with(bytes(needed), 0.5)
            .check(Version::V1, TARGET)
            .unwrap()
            .lint(&[]),
        Ok(())
    );
    broken.lint("flash.drop_mask_unscaled", with(bytes(needed), 1.0));
    broken.lint("flash.keep_prob_unused", with(None, 0.5));
    let few = FlashAttentionCall {
        query: half(&[2, 4, 23, 64]),
        softmax_max: float(&[2, 4, 23, 8]),
        softmax_sum: float(&[2, 4, 23, 8]),
        attention_out: half(&[2, 4, 23, 64]),
        ..with(bytes(2 * 4 * 23 * 40 / 8), 0.5)
    };
    broken.lint("flash.drop_mask_short", few);
}

fn sinks(broken: &mut Broken) {
    let with = |call: Call, sink| FlashAttentionCall { sink, ..call };
    broken.by("flash.sink_dtype", 161_002, with(dense(), half(&[4])));
    let slopes = FlashAttentionCall {
        pse_type: 2,
        real_shift: float(&[4]),
        ..square(24)
    };
    broken.by("flash.sink_dtype_slopes", 161_001, with(slopes, half(&[4])));
    broken.by("flash.sink_shape", 161_001, with(dense(), float(&[2])));
    assert!(with(dense(), half(&[0])).check(Version::V3, TARGET).is_ok());
}

fn ropes(broken: &mut Broken) {
    broken.by(
        "flash.rope_paired",
        161_001,
        FlashAttentionCall {
            key_rope: None,
            ..roped()
        },
    );
    let query_rope = of(DType::Bf16, &[30, 4, 128]);
    broken.by(
        "flash.rope_dim",
        161_001,
        FlashAttentionCall {
            query_rope,
            ..roped()
        },
    );
    let query_rope = half(&[30, 4, 32]);
    broken.by(
        "flash.rope_dtype",
        161_001,
        FlashAttentionCall {
            query_rope,
            ..roped()
        },
    );
    broken.by(
        "flash.rope_mode",
        161_001,
        FlashAttentionCall {
            sparse_mode: 6,
            ..roped()
        },
    );
    broken.by(
        "flash.rope_mask",
        161_001,
        FlashAttentionCall {
            atten_mask: None,
            ..roped()
        },
    );
    let bias = of(DType::Bf16, &[4 * 45]);
    for call in [
        FlashAttentionCall {
            real_shift: bias,
            ..roped()
        },
        FlashAttentionCall {
            keep_prob: 0.5,
            ..roped()
        },
        FlashAttentionCall {
            drop_mask: of(DType::UInt8, &[400]),
            ..roped()
        },
    ] {
        broken.by("flash.rope_alone", 161_001, call);
    }
    let value = of(DType::Bf16, &[45, 2, 56]);
    broken.by(
        "flash.rope_aligned",
        161_001,
        FlashAttentionCall { value, ..roped() },
    );
}

fn outputs(broken: &mut Broken) {
    let softmax_sum = float(&[2, 24, 4, 8]);
    broken.by(
        "flash.softmax_shape",
        161_001,
        FlashAttentionCall {
            softmax_sum,
            ..dense()
        },
    );
    let softmax_out_layout = Some("TND");
    let order = FlashAttentionCall {
        softmax_out_layout,
        ..packed()
    };
    broken.lint("flash.softmax_out_layout_known", order);
    let attention_out = half(&[2, 4, 24, 63]);
    broken.by(
        "flash.out_shape",
        161_001,
        FlashAttentionCall {
            attention_out,
            ..dense()
        },
    );
}

#[test]
fn ascend_950_takes_its_own_version_and_computes_half_precision() {
    let target = Target::new(Soc::Ascend950, Cann::V9_1);
    for call in [dense(), hidden(), packed(), masked(3, packed())] {
        assert!(call.check(Version::V4, target).is_ok());
    }
    let float_call = FlashAttentionCall {
        query: float(&[2, 4, 24, 64]),
        key: float(&[2, 2, 40, 64]),
        value: float(&[2, 2, 40, 64]),
        attention_out: float(&[2, 4, 24, 64]),
        ..dense()
    };
    for call in [
        float_call,
        FlashAttentionCall {
            d_scale_q: float(&[1]),
            ..dense()
        },
        FlashAttentionCall {
            sink: float(&[4]),
            ..dense()
        },
        FlashAttentionCall {
            keep_prob: 0.5,
            ..dense()
        },
    ] {
        let verdict = call.check(Version::V4, target);
        assert!(
            matches!(verdict, Err(Refusal::Unsupported(_))),
            "{verdict:?}"
        );
    }
}

#[test]
fn what_a_short_version_has_no_argument_for_has_its_default() {
    let call = FlashAttentionCall {
        pse_type: 2,
        real_shift: float(&[4]),
        sink: float(&[4]),
        ..square(24)
    };
    assert_eq!(Version::oldest_for(&call), Version::V3);
    assert!(call.check(Version::V3, TARGET).is_ok());
    // Version 1 takes the slopes for a bias of type 1.
    let refusal = call.check(Version::V1, TARGET).unwrap_err();
    assert!(
        refusal.to_string().starts_with("flash.pse_dtype"),
        "{refusal}"
    );
    let ids = [
        (packed(), Version::VarLenV1),
        (roped(), Version::VarLenV3),
        (
            FlashAttentionCall {
                softmax_out_layout: Some("same_as_input"),
                ..packed()
            },
            Version::VarLenV4,
        ),
        (
            FlashAttentionCall {
                softmax_out_layout: Some("same_as_input"),
                ..roped()
            },
            Version::VarLenV5,
        ),
        (
            FlashAttentionCall {
                scale: f64::NAN,
                ..dense()
            },
            Version::V1,
        ),
        (FlashAttentionCall { seed: 1, ..dense() }, Version::V4),
    ];
    for (call, version) in ids {
        assert_eq!(Version::oldest_for(&call), version);
    }
}

#[test]
fn shapes_without_sense_are_refused_or_answered() {
    let dims = Dims::of([i64::MAX, 0, i64::MAX]);
    let huge = Some(TensorDesc::packed(DType::Float16, dims));
    for input_layout in ["BSH", "SBH", "TND"] {
        for num_heads in [1, i64::MAX] {
            let call = FlashAttentionCall {
                query: huge,
                key: huge,
                value: huge,
                input_layout: Some(input_layout),
                num_heads,
                ..dense()
            };
            assert!(call.check(Version::oldest_for(&call), TARGET).is_err());
        }
    }
}
