//! The contract of RingAttentionUpdate: a call for every rule, and the merges among the golden cases.

use crate::described::{half, of};
use ascend_spec::ops::flash_attention_score::SoftmaxOrder;
use ascend_spec::ops::ring_attention_update::{Part, RingUpdateCall, Version, admits, rules};
use ascend_spec::{Cann, DType, Dims, Format, Level, Soc, Target, TensorDesc, Violation};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

type Call = RingUpdateCall<'static>;

fn float(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float, shape)
}

/// Two batch entries of 5 rows and four heads.
fn dense() -> Call {
    let (attn, softmax) = (half(&[5, 2, 256]), float(&[2, 4, 5, 8]));
    RingUpdateCall {
        prev_attn_out: attn,
        prev_softmax_max: softmax,
        prev_softmax_sum: softmax,
        cur_attn_out: attn,
        cur_softmax_max: softmax,
        cur_softmax_sum: softmax,
        attn_out: attn,
        softmax_max: softmax,
        softmax_sum: softmax,
        input_layout: Some("SBH"),
        ..RingUpdateCall::default()
    }
}

/// Three packed sequences of together 18 rows.
fn packed() -> Call {
    let (attn, softmax) = (half(&[18, 4, 64]), float(&[18, 4, 8]));
    RingUpdateCall {
        prev_attn_out: attn,
        prev_softmax_max: softmax,
        prev_softmax_sum: softmax,
        cur_attn_out: attn,
        cur_softmax_max: softmax,
        cur_softmax_sum: softmax,
        actual_seq_qlen: of(DType::Int64, &[4]),
        attn_out: attn,
        softmax_max: softmax,
        softmax_sum: softmax,
        input_layout: Some("TND"),
        ..RingUpdateCall::default()
    }
}

/// Both parts and the result of `call` with these shapes.
fn shaped(call: Call, attn: Option<TensorDesc>, softmax: Option<TensorDesc>) -> Call {
    RingUpdateCall {
        prev_attn_out: attn,
        cur_attn_out: attn,
        attn_out: attn,
        prev_softmax_max: softmax,
        prev_softmax_sum: softmax,
        cur_softmax_max: softmax,
        cur_softmax_sum: softmax,
        softmax_max: softmax,
        softmax_sum: softmax,
        ..call
    }
}

#[test]
fn every_rule_has_a_call_that_breaks_it() {
    let base = dense();
    let nz = TensorDesc { format: Format::FractalNz, ..half(&[5, 2, 256]).unwrap() };
    let calls: &[(&str, i32, Call)] = &[
        ("ring.required", 161_001, Call { prev_attn_out: None, ..base }),
        ("ring.required", 161_001, Call { softmax_sum: None, ..base }),
        ("ring.required", 161_001, Call { actual_seq_qlen: None, ..packed() }),
        ("ring.dtype", 161_002, Call { cur_attn_out: float(&[5, 2, 256]), ..base }),
        ("ring.softmax_dtype", 161_002, shaped(base, half(&[5, 2, 256]), half(&[2, 4, 5, 8]))),
        ("ring.countable", 161_002, Call { cur_attn_out: half(&[5, 0, 256]), ..base }),
        ("ring.input_layout", 161_002, Call { input_layout: Some("BSH"), ..base }),
        ("ring.input_layout", 161_002, Call { input_layout: Some("TND"), ..base }),
        ("ring.input_layout", 161_002, Call { input_layout: None, ..base }),
        ("ring.softmax_copies", 161_002, Call { cur_softmax_sum: float(&[2, 4, 5, 1]), ..base }),
        ("ring.format", 161_002, Call { prev_attn_out: Some(nz), ..base }),
        ("ring.softmax_dtypes", 561_002, Call { cur_softmax_sum: half(&[2, 4, 5, 8]), ..base }),
        ("ring.shapes", 561_002, Call { cur_attn_out: half(&[5, 2, 128]), ..base }),
        ("ring.shapes", 561_002, Call { prev_attn_out: half(&[6, 2, 256]), ..base }),
        ("ring.shapes", 561_002, Call { cur_softmax_max: float(&[2, 4, 6, 8]), ..base }),
        ("ring.shapes", 561_002, Call { prev_attn_out: half(&[18, 256]), ..packed() }),
        ("ring.softmax_layout", 561_002, Call { input_softmax_layout: Some("same_as_input"), ..packed() }),
        ("ring.head_dim", 561_002, shaped(packed(), half(&[18, 4, 96]), float(&[18, 4, 8]))),
        ("ring.head_dim", 561_002, shaped(packed(), half(&[18, 4, 832]), float(&[18, 4, 8]))),
        ("ring.head_dim", 561_002, shaped(packed(), half(&[18, 257, 64]), float(&[18, 257, 8]))),
        ("ring.lengths_dtype", 561_002, Call { actual_seq_qlen: of(DType::Int32, &[4]), ..packed() }),
        ("ring.out", 161_001, Call { attn_out: half(&[5, 2, 128]), ..base }),
        ("ring.out", 161_001, Call { softmax_max: half(&[2, 4, 5, 8]), ..base }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, call) in calls {
        let version = Version::oldest_for(call);
        match call.check(version, TARGET) {
            Err(violation) => {
                assert_eq!(violation.rule.id, *id, "{violation}");
                assert_eq!(violation.rule.status, *status, "{violation}");
                assert!(!violation.given.is_empty() && !violation.allowed.is_empty());
            }
            other => panic!("{id}: {other:?}"),
        }
        broken.insert(*id);
    }
    for soc in [Soc::AtlasInference, Soc::AtlasTraining, Soc::Atlas200I500A2] {
        let refusal = base.check(Version::V1, Target::new(soc, Cann::V9_1));
        assert_eq!(refusal.unwrap_err().status(), 561_003);
        broken.insert("ring.entry_point");
    }
    let problem = packed().check(Version::V1, TARGET).unwrap();
    assert_eq!(problem.admits_lengths(&[0, 4, 4, 18]), Ok(()));
    for ends in [&[4, 4, 18][..], &[0, 5, 4, 18], &[0, 4, 17], &[]] {
        let violation = problem.admits_lengths(ends).unwrap_err();
        assert_eq!(violation.rule.id, "ring.lengths");
        assert!(violation.allowed.contains("0 to 18"), "{violation}");
        broken.insert(violation.rule.id);
    }
    let unread = Call { input_softmax_layout: Some("TND"), ..base };
    let violation = unread.lint(TARGET, &[]).unwrap_err();
    assert_eq!(unread.lint(TARGET, &[violation.rule.id]), Ok(()));
    broken.insert(violation.rule.id);
    let live = Part { max: -1.0, sum: 1.5 };
    for (prev, cur) in [(Part::FULLY_MASKED, Part::FULLY_MASKED), (Part::EMPTY, Part::EMPTY), (Part::EMPTY, live)] {
        broken.insert(admits(prev, cur).unwrap_err().rule.id);
    }
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
    let lints = rules::RULES.iter().filter(|rule| rule.level == Level::Lint);
    assert!(lints.clone().all(|rule| rule.status == 0 && !rule.reach.is_empty()));
}

#[test]
fn calls_that_hold_every_rule_say_what_to_merge() {
    let problem = dense().check(Version::V1, TARGET).unwrap();
    assert_eq!((problem.batch, problem.rows, problem.heads, problem.head_dim), (2, 5, 4, 64));
    assert_eq!(problem.softmax_order, SoftmaxOrder::Batches);
    assert_eq!(problem.sequences(&[]).map(|of| of.q_len).sum::<usize>(), 10);
    let with = |order| Call { input_softmax_layout: order, ..packed() };
    for (order, version, want) in [
        (None, Version::V1, SoftmaxOrder::SequenceBlocks),
        (Some(""), Version::V1, SoftmaxOrder::SequenceBlocks),
        (Some("SBH"), Version::V2, SoftmaxOrder::SequenceBlocks),
        (Some("TND"), Version::V2, SoftmaxOrder::SameAsInput),
    ] {
        assert_eq!(Version::oldest_for(&with(order)), version);
        let problem = with(order).check(version, TARGET).unwrap();
        assert_eq!(problem.softmax_order, want);
        let rows: Vec<_> = problem.sequences(&[0, 4, 4, 18]).map(|of| (of.q_first, of.q_len)).collect();
        assert_eq!(rows, [(0, 4), (4, 0), (4, 14)]);
    }
    // On Ascend 950 the documents do not bound packed heads.
    let wide = shaped(packed(), half(&[18, 4, 96]), float(&[18, 4, 8]));
    let ascend950 = Target::new(Soc::Ascend950, Cann::V9_1);
    assert!(wide.check(Version::V1, ascend950).is_ok());
    for call in [
        shaped(dense(), half(&[5, 2, 258]), float(&[2, 4, 5, 8])),
        Call { cur_attn_out: half(&[17, 4, 64]), ..packed() },
    ] {
        let verdict = call.check(Version::V1, TARGET);
        assert!(verdict.as_ref().is_err_and(Violation::is_unsupported), "{verdict:?}");
    }
}

#[test]
fn sequences_of_any_ends_lie_within_the_rows() {
    let problem = packed().check(Version::V1, TARGET).unwrap();
    for ends in [&[i64::MIN, i64::MAX, -1, 7][..], &[0, 100, 200, 300], &[9, 3], &[]] {
        for of in problem.sequences(ends) {
            assert!(of.q_first + of.q_len <= problem.rows, "{of:?}");
        }
    }
}

/// Reads the header of a case file; `None` if it is one of another operator.
fn case(path: &Path) -> Option<(u64, Map<String, Value>)> {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let metadata = &header["__metadata__"];
    (metadata["op"] == "ring_attention_update").then(|| {
        let version = metadata["op_version"].as_str().unwrap();
        (version.parse().unwrap(), header.clone())
    })
}

#[test]
fn golden_merges_are_accepted() {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    let mut count = 0;
    for entry in std::fs::read_dir(Path::new(&folder).join("train")).unwrap() {
        let path = entry.unwrap().path();
        let Some((number, header)) = case(&path) else {
            continue;
        };
        let text = |name: &str| header["__metadata__"][name].as_str();
        let tensor = |name: &str| {
            let of = header.get(name)?;
            let shape = of["shape"].as_array().unwrap();
            let shape: Vec<i64> = shape.iter().map(|dim| dim.as_i64().unwrap()).collect();
            let dtype = DType::from_name(of["dtype"].as_str().unwrap()).unwrap();
            Some(TensorDesc::packed(dtype, Dims::new(&shape).unwrap()))
        };
        let call = RingUpdateCall {
            prev_attn_out: tensor("prev_attn_out"),
            prev_softmax_max: tensor("prev_softmax_max"),
            prev_softmax_sum: tensor("prev_softmax_sum"),
            cur_attn_out: tensor("cur_attn_out"),
            cur_softmax_max: tensor("cur_softmax_max"),
            cur_softmax_sum: tensor("cur_softmax_sum"),
            actual_seq_qlen: tensor("actual_seq_qlen"),
            input_layout: text("input_layout"),
            input_softmax_layout: text("input_softmax_layout"),
            // Expected outputs are FLOAT whatever the operator's are.
            attn_out: tensor("prev_attn_out"),
            softmax_max: tensor("softmax_max"),
            softmax_sum: tensor("softmax_sum"),
        };
        let version = Version::ALL[number as usize - 1];
        let verdict = call.check(version, TARGET);
        assert!(verdict.is_ok(), "{}: {verdict:?}", path.display());
        assert_eq!(call.lint(TARGET, &[]), Ok(()));
        count += 1;
    }
    println!("{count} merges");
    assert!(count > 0);
}
