//! The contracts of RecurrentGatedDeltaRule and ChunkGatedDeltaRule: a call for every rule, what is taken, and where
//! the numbers on the device lead.

use crate::described::of;
use ascend_spec::Cann::{V8_1, V8_5, V9_0, V9_1, V9_2};
use ascend_spec::DType::{Bf16, Float, Float16, Int32, Int64};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::chunk_gated_delta_rule::{ChunkDeltaCall, rules as chunk};
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleFault, DeltaRuleProblem, Run};
use ascend_spec::ops::recurrent_gated_delta_rule::{Parameter, RecurrentDeltaCall, rules as recurrent};
use ascend_spec::{Cann, Dims, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn a2(cann: Cann) -> Target {
    Target::new(Soc::AtlasA2, cann)
}

/// Three tokens of two sequences: 2 key heads of 8 elements, 4 value heads of 4, and 5 states.
fn recurrent_base() -> RecurrentDeltaCall {
    RecurrentDeltaCall {
        query: of(Bf16, &[3, 2, 8]),
        key: of(Bf16, &[3, 2, 8]),
        value: of(Bf16, &[3, 4, 4]),
        beta: of(Bf16, &[3, 4]),
        state: of(Bf16, &[5, 4, 4, 8]),
        actual_seq_lengths: of(Int32, &[2]),
        ssm_state_indices: of(Int32, &[3]),
        g: of(Float, &[3, 4]),
        out: of(Bf16, &[3, 4, 4]),
        ..RecurrentDeltaCall::default()
    }
}

/// The same tokens, and a state for each sequence.
fn chunk_base() -> ChunkDeltaCall {
    ChunkDeltaCall {
        query: of(Bf16, &[3, 2, 8]),
        key: of(Bf16, &[3, 2, 8]),
        value: of(Bf16, &[3, 4, 4]),
        beta: of(Bf16, &[3, 4]),
        initial_state: of(Bf16, &[2, 4, 4, 8]),
        actual_seq_lengths: of(Int32, &[2]),
        g: of(Float, &[3, 4]),
        out: of(Bf16, &[3, 4, 4]),
        final_state: of(Bf16, &[2, 4, 4, 8]),
        ..ChunkDeltaCall::default()
    }
}

fn nz(desc: Option<TensorDesc>) -> Option<TensorDesc> {
    desc.map(|desc| TensorDesc { format: Format::FractalNz, ..desc })
}

fn strided(desc: Option<TensorDesc>, strides: &[i64]) -> Option<TensorDesc> {
    desc.map(|desc| TensorDesc { strides: Dims::new(strides).unwrap(), ..desc })
}

/// Rules and lints that are broken on the device, by contents.
const OF_CONTENTS: [&str; 5] = [
    "recurrent_delta.contents",
    "recurrent_delta.shared_slot",
    "chunk_delta.contents",
    "chunk_delta.rows_left_out",
    "chunk_delta.no_tokens",
];

/// Lints of factors of the queries, by what follows the operator in their names.
const SCALES: [(&str, f64); 4] =
    [(".scale_finite", f64::NAN), (".scale_finite", 1e300), (".scale_zero", 1e-60), (".scale_inverse", 8.0)];

#[test]
fn every_rule_of_the_recurrent_operator_refuses_a_call() {
    let base = recurrent_base();
    type Call = RecurrentDeltaCall;
    let all_heads = |key_heads: i64, heads: i64| Call {
        query: of(Bf16, &[3, key_heads, 8]),
        key: of(Bf16, &[3, key_heads, 8]),
        value: of(Bf16, &[3, heads, 4]),
        ..base
    };
    let gk = of(Float, &[3, 4, 8]);
    #[rustfmt::skip]
    let calls = [
        ("recurrent_delta.product", 561_003, a2(V8_1), base),
        ("recurrent_delta.product", 561_003, Target::new(Soc::Ascend950, V9_0), base),
        ("recurrent_delta.product", 561_003, Target::new(Soc::AtlasInference, V9_1), base),
        ("recurrent_delta.required", 161_002, a2(V9_1), Call { query: None, ..base }),
        ("recurrent_delta.required", 161_002, a2(V9_1), Call { state: None, ..base }),
        ("recurrent_delta.required", 161_002, a2(V8_5), Call { ssm_state_indices: None, ..base }),
        ("recurrent_delta.required", 161_002, a2(V8_5), Call { out: None, ..base }),
        ("recurrent_delta.gk", 161_002, a2(V8_5), Call { gk, ..base }),
        ("recurrent_delta.dtype", 161_002, a2(V9_1), Call { query: of(Float16, &[3, 2, 8]), ..base }),
        ("recurrent_delta.dtype", 161_002, a2(V9_1), Call { state: of(Float, &[5, 4, 4, 8]), ..base }),
        ("recurrent_delta.dtype", 161_002, a2(V9_1), Call { g: of(Bf16, &[3, 4]), ..base }),
        ("recurrent_delta.dtype", 161_002, a2(V9_1), Call { ssm_state_indices: of(Int64, &[3]), ..base }),
        ("recurrent_delta.format", 561_103, a2(V9_1), Call { value: nz(base.value), ..base }),
        ("recurrent_delta.rank", 561_103, a2(V9_1), Call { query: of(Bf16, &[3, 16]), ..base }),
        ("recurrent_delta.rank", 561_103, a2(V9_1), Call { state: of(Bf16, &[5, 4, 32]), ..base }),
        ("recurrent_delta.rank", 561_103, a2(V8_5), Call { ssm_state_indices: of(Int32, &[3, 1]), ..base }),
        ("recurrent_delta.heads", 561_103, a2(V9_1), all_heads(0, 4)),
        ("recurrent_delta.heads", 561_103, a2(V9_1), all_heads(3, 4)),
        ("recurrent_delta.heads", 561_103, a2(V9_1), all_heads(1, 257)),
        ("recurrent_delta.dims", 561_103, a2(V9_1), Call { query: of(Bf16, &[3, 2, 513]), ..base }),
        ("recurrent_delta.shape", 561_103, a2(V9_1), Call { key: of(Bf16, &[3, 2, 4]), ..base }),
        ("recurrent_delta.shape", 561_103, a2(V9_1), Call { beta: of(Bf16, &[4, 4]), ..base }),
        ("recurrent_delta.shape", 561_103, a2(V9_1), Call { state: of(Bf16, &[5, 4, 8, 4]), ..base }),
        ("recurrent_delta.empty", 561_103, a2(V9_1), Call { state: of(Bf16, &[0, 4, 4, 8]), ..base }),
        ("recurrent_delta.empty", 561_103, a2(V9_1), Call { actual_seq_lengths: of(Int32, &[0]), ..base }),
        ("recurrent_delta.per_token", 561_103, a2(V9_1), Call { ssm_state_indices: of(Int32, &[2]), ..base }),
        ("recurrent_delta.per_token", 561_103, a2(V9_1), Call { gk: of(Float, &[3, 4, 4]), ..base }),
        ("recurrent_delta.per_token", 561_103, a2(V9_1), Call { num_accepted_tokens: of(Int32, &[3]), ..base }),
        ("recurrent_delta.per_token", 561_103, a2(V9_1), Call { out: of(Bf16, &[2, 4, 4]), ..base }),
        ("recurrent_delta.pool", 561_103, a2(V9_1), Call { state: of(Bf16, &[2, 4, 4, 8]), ..base }),
    ];
    let mut broken: BTreeSet<&str> = OF_CONTENTS[..2].iter().copied().collect();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        assert_eq!((violation.rule.id, violation.status()), (id, status), "{violation}");
        broken.insert(id);
    }
    #[rustfmt::skip]
    let lints = [
        ("recurrent_delta.room", a2(V9_0), Call { ssm_state_indices: of(Int32, &[2]), ..base }),
        ("recurrent_delta.room", a2(V8_5), Call { out: of(Bf16, &[2, 4, 4]), ..base }),
        ("recurrent_delta.dense_state", a2(V9_0), Call { state: strided(base.state, &[200, 40, 8, 1]), ..base }),
        ("recurrent_delta.dense_state", a2(V9_1), Call { state: strided(base.state, &[200, 40, 10, 1]), ..base }),
    ];
    for (id, target, call) in lints {
        assert!(call.check(target).unwrap().overruns, "{id}");
        assert_eq!(call.lint(target, &[]).unwrap_err().rule.id, id);
        assert_eq!(call.lint(target, &[id]), Ok(()));
        broken.insert(id);
    }
    for (id, scale) in SCALES.map(|(id, scale)| (["recurrent_delta", id].concat(), scale)) {
        let violation = Call { scale, ..base }.lint(a2(V9_1), &[]).unwrap_err();
        assert_eq!(violation.rule.id, id);
        broken.insert(violation.rule.id);
    }
    let lost = Call { out: strided(base.out, &[32, 8, 1]), ..base };
    assert!(lost.check(a2(V9_0)).unwrap().loses_out && !lost.check(a2(V9_1)).unwrap().loses_out);
    assert_eq!(lost.lint(a2(V9_0), &[]).unwrap_err().rule.id, "recurrent_delta.lost_out");
    broken.insert("recurrent_delta.lost_out");
    let all: BTreeSet<_> = recurrent::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn every_rule_of_the_chunk_operator_refuses_a_call() {
    let base = chunk_base();
    type Call = ChunkDeltaCall;
    let a950 = Target::new(Soc::Ascend950, V9_2);
    let float = of(Float, &[2, 4, 4, 8]);
    #[rustfmt::skip]
    let calls = [
        ("chunk_delta.product", 561_003, a2(V9_0), base),
        ("chunk_delta.product", 561_003, Target::new(Soc::Ascend950, V9_1), base),
        ("chunk_delta.required", 161_002, a2(V9_1), Call { initial_state: None, ..base }),
        ("chunk_delta.required", 161_002, a2(V9_1), Call { final_state: None, ..base }),
        ("chunk_delta.dtype", 161_002, a2(V9_1), Call { value: of(Float, &[3, 4, 4]), ..base }),
        ("chunk_delta.dtype", 161_002, a2(V9_2), Call { initial_state: float, final_state: float, ..base }),
        ("chunk_delta.dtype", 161_002, a950, Call { initial_state: float, ..base }),
        ("chunk_delta.format", 561_103, a2(V9_1), Call { query: nz(base.query), ..base }),
        ("chunk_delta.rank", 561_103, a2(V9_1), Call { g: of(Float, &[12]), ..base }),
        ("chunk_delta.heads", 561_103, a2(V9_1), Call {
            query: of(Bf16, &[3, 65, 8]), key: of(Bf16, &[3, 65, 8]), ..base
        }),
        ("chunk_delta.dims", 561_103, a2(V9_1), Call { query: of(Bf16, &[3, 2, 129]), ..base }),
        ("chunk_delta.shape", 561_103, a2(V9_1), Call { g: of(Float, &[3, 2]), ..base }),
        ("chunk_delta.shape", 561_103, a2(V9_1), Call { final_state: of(Bf16, &[3, 4, 4, 8]), ..base }),
        ("chunk_delta.empty", 561_103, a2(V9_1), Call {
            initial_state: of(Bf16, &[0, 4, 4, 8]), final_state: of(Bf16, &[0, 4, 4, 8]),
            actual_seq_lengths: of(Int32, &[0]), ..base
        }),
    ];
    let mut broken: BTreeSet<&str> = OF_CONTENTS[2..].iter().copied().collect();
    for (id, status, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        assert_eq!((violation.rule.id, violation.status()), (id, status), "{violation}");
        broken.insert(id);
    }
    for (id, scale) in SCALES.map(|(id, scale)| (["chunk_delta", id].concat(), scale)) {
        let violation = Call { scale, ..base }.lint(a2(V9_1), &[]).unwrap_err();
        assert_eq!(violation.rule.id, id);
        broken.insert(violation.rule.id);
    }
    let all: BTreeSet<_> = chunk::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);

    let empty = Call { out: of(Bf16, &[0, 4, 4]), final_state: of(Bf16, &[0, 4, 4, 8]), ..base };
    assert!(empty.check(a2(V9_1)).unwrap().is_idle());
    let floats = Call { initial_state: float, final_state: float, ..base };
    assert!(floats.check(a950).is_ok());
}

#[test]
fn documented_calls_are_taken_without_a_lint() {
    let base = recurrent_base();
    let gk = of(Float, &[3, 4, 8]);
    let accepted = of(Int32, &[2]);
    let strided_state = strided(base.state, &[200, 40, 8, 1]);
    let float = of(Float, &[5, 4, 4, 8]);
    for (target, call) in [
        (a2(V8_5), base),
        (a2(V9_0), RecurrentDeltaCall { gk, num_accepted_tokens: accepted, ..base }),
        (a2(V9_1), RecurrentDeltaCall { state: strided_state, g: None, ..base }),
        (Target::new(Soc::Ascend950, V9_1), base),
        (a2(V9_2), RecurrentDeltaCall { state: float, ..base }),
    ] {
        let problem = call.check(target).unwrap();
        assert_eq!((problem.sequences, problem.tokens, problem.slots), (2, 3, Some(5)));
        assert_eq!([problem.key_heads, problem.value_heads, problem.key_dim, problem.value_dim], [2, 4, 8, 4]);
        assert_eq!((problem.key_head(1), problem.key_head(2)), (0, 1));
        assert!(!problem.overruns);
        assert_eq!(call.lint(target, &[]), Ok(()), "{target}");
    }
    let problem = chunk_base().check(a2(V9_1)).unwrap();
    assert_eq!((problem.sequences, problem.tokens, problem.slots), (2, 3, None));
}

#[test]
fn numbers_lead_to_tokens_and_states_or_are_faults() {
    let problem = DeltaRuleProblem { tokens: 12, ..recurrent_base().check(a2(V9_0)).unwrap() };
    let found = |lengths: &[i64], slots: &[i64], accepted: &[i64]| {
        let contents = DeltaRuleContents { lengths, slots, accepted };
        (problem.runs(contents).collect::<Vec<_>>(), problem.shared_slot(contents))
    };
    let run = |sequence, first, tokens, start| Ok(Run { sequence, first, tokens, start });
    let (runs, shared) = found(&[2, 1], &[4, 3, 0], &[]);
    assert_eq!((runs, shared), (vec![run(0, 0, 2, 4), run(1, 2, 1, 0)], None));
    assert_eq!(found(&[2, 1], &[4, 3, 0], &[2, 1]).0, [run(0, 0, 2, 3), run(1, 2, 1, 0)]);
    // A sequence without tokens names no state, and is passed over.
    assert_eq!(found(&[0, 1], &[2], &[0, 1]).0, [run(1, 0, 1, 2)]);
    let length = |sequence, given, most| Err(DeltaRuleFault::Length { sequence, given, most });
    assert_eq!(found(&[9, 1], &[0; 12], &[]).0, [length(0, 9, 8)]);
    assert_eq!(found(&[-1, 1], &[0; 12], &[]).0, [length(0, -1, 8)]);
    assert_eq!(found(&[8, 5], &[0; 12], &[]).0, [run(0, 0, 8, 0), length(1, 5, 4)]);
    let outside = |token, given| Err(DeltaRuleFault::NoSlot { token, given, slots: 5 });
    assert_eq!(found(&[2, 1], &[4, -1, 5], &[]).0, [outside(1, -1), outside(2, 5)]);
    for given in [0, 3, -1, i64::MAX] {
        let accepted = Err(DeltaRuleFault::Accepted { sequence: 0, given, tokens: 2 });
        assert_eq!(found(&[2, 1], &[4, 3, 0], &[given, 1]).0[0], accepted);
    }
    let shared = Some(DeltaRuleFault::SharedSlot { slot: 3, sequences: [0, 1] });
    assert_eq!(found(&[2, 1], &[4, 3, 3], &[]).1, shared);
    let few = |tensor, given, needed| Err(DeltaRuleFault::Few { tensor, given, needed });
    assert_eq!(found(&[2, 1], &[4, 3], &[]).0, [run(0, 0, 2, 4), few("ssmStateIndices", 2, 3)]);
    assert_eq!(found(&[2, 1], &[4, 3, 0], &[2]).0, [run(0, 0, 2, 3), few("numAcceptedTokens", 1, 2)]);
    // Of its own a sequence may name a slot again, unless a count chooses between its tokens.
    assert_eq!(found(&[2, 1], &[4, 4, 3], &[]).1, None);
    let repeated = |accepted| {
        let contents = DeltaRuleContents { lengths: &[2, 1], slots: &[4, 4, 3], accepted };
        assert_eq!(problem.shared_slot(contents), None);
        problem.repeated_slot(contents)
    };
    assert_eq!([repeated(&[]), repeated(&[1, 1])], [None; 2]);
    assert_eq!(repeated(&[2, 1]), Some(DeltaRuleFault::RepeatedSlot { slot: 4, sequence: 0 }));

    let prompts = DeltaRuleProblem { slots: None, ..problem };
    let contents = DeltaRuleContents { lengths: &[10, 2], ..DeltaRuleContents::default() };
    let runs: Vec<_> = prompts.runs(contents).collect();
    assert_eq!(runs, [run(0, 0, 10, 0), run(1, 10, 2, 1)]);
    let unusual = |lengths: &[i64]| {
        let found = prompts.unusual(lengths, [&chunk::ROWS_LEFT_OUT, &chunk::NO_TOKENS]);
        found.map(|lint| lint.map(|lint| lint.given))
    };
    assert_eq!(unusual(&[10, 2]), [None, None]);
    assert_eq!(
        unusual(&[9, 0]),
        [Some("12 tokens, 9 in sequences".to_owned()), Some("no token of sequence 1".to_owned()),]
    );
}

#[test]
fn a_launch_touches_its_tensors_as_the_release_walks_them() {
    let ends = |call: RecurrentDeltaCall, cann| {
        let mut ends = Vec::new();
        let problem = call.check(a2(cann)).unwrap();
        problem.touches(&call, &mut |parameter, range| ends.push((parameter, range.end)));
        let of = |wanted| ends.iter().find(|(parameter, _)| *parameter == wanted).unwrap().1;
        [of(Parameter::State), of(Parameter::SsmStateIndices)]
    };
    let base = recurrent_base();
    assert_eq!(ends(base, V9_1), [5 * 4 * 4 * 8 * 2, 12]);
    let state = strided(base.state, &[200, 40, 8, 1]);
    assert_eq!(ends(RecurrentDeltaCall { state, ..base }, V9_1)[0], (4 * 200 + 3 * 40 + 32) * 2);
    assert_eq!(ends(RecurrentDeltaCall { state, ..base }, V9_0)[0], 5 * 4 * 4 * 8 * 2);
    // As many slots are read as there are tokens.
    let short = RecurrentDeltaCall { ssm_state_indices: of(Int32, &[1]), ..base };
    assert_eq!(ends(short, V8_5)[1], 12);
}

proptest! {
    /// No shape and no number makes a check panic or overflow.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::collection::vec(prop_oneof![-2i64..4, Just(i64::MAX), Just(1 << 60)], 0..5), 9,
        ),
        numbers in prop::collection::vec(prop_oneof![-2i64..9, Just(i64::MAX), Just(i64::MIN)], 0..9),
        scale: f64,
    ) {
        let half = |at: usize| of(Bf16, &shapes[at]);
        let call = RecurrentDeltaCall {
            query: half(0),
            key: half(0),
            value: half(1),
            beta: half(2),
            state: half(3),
            actual_seq_lengths: of(Int32, &shapes[4]),
            ssm_state_indices: of(Int32, &shapes[5]),
            g: of(Float, &shapes[6]),
            gk: of(Float, &shapes[7]),
            num_accepted_tokens: of(Int32, &shapes[4]),
            scale,
            out: half(8),
        };
        for target in [a2(V8_5), a2(V9_0), a2(V9_1), Target::new(Soc::Ascend950, V9_2)] {
            let _ = call.lint(target, &[]);
            if let Ok(problem) = call.check(target) {
                problem.touches(&call, &mut |_, range| assert!(range.start <= range.end));
            }
        }
        let problem = recurrent_base().check(a2(V9_1)).unwrap();
        let contents = DeltaRuleContents { lengths: &numbers, slots: &numbers, accepted: &numbers };
        for run in problem.runs(contents).flatten() {
            prop_assert!(run.first + run.tokens <= problem.tokens && run.start < 5);
        }
        problem.shared_slot(contents);
    }
}
