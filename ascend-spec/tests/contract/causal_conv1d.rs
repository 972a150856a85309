//! The contract of CausalConv1d: a call for every rule, what is taken, and where the numbers on the device lead.

use ascend_spec::Cann::{V8_1, V9_1};
use ascend_spec::DType::{Bf16, Bool, Float, Float16, Int32, Int64};
use ascend_spec::ops::causal_conv1d::{CausalConvCall as Call, rules};
use ascend_spec::ops::convolution::{ConvContents, ConvFault, ConvForm, ConvRun, KeptRows};
use ascend_spec::{DType, Dims, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn a2() -> Target {
    Target::new(Soc::AtlasA2, V9_1)
}

/// Nine rows of three sequences, and five lines of three rows.
fn prompts() -> Call {
    Call {
        x: of(Bf16, &[9, 32]),
        weight: of(Bf16, &[4, 32]),
        conv_states: of(Bf16, &[5, 3, 32]),
        query_start_loc: of(Int32, &[4]),
        cache_indices: of(Int32, &[3]),
        initial_state_mode: of(Bool, &[3]),
        y: of(Bf16, &[9, 32]),
        ..Call::default()
    }
}

/// Three rows of each of three sequences with accepted counts, and lines that are as long as they have to be.
fn drafts() -> Call {
    Call {
        x: of(Bf16, &[3, 3, 32]),
        y: of(Bf16, &[3, 3, 32]),
        conv_states: of(Bf16, &[5, 5, 32]),
        query_start_loc: None,
        initial_state_mode: None,
        num_accepted_tokens: of(Int32, &[3]),
        run_mode: 1,
        ..prompts()
    }
}

#[test]
fn every_rule_refuses_a_call() {
    let base = prompts();
    let strided = |desc: Option<TensorDesc>, strides: &[i64]| {
        desc.map(|desc| TensorDesc { strides: Dims::new(strides).unwrap(), ..desc })
    };
    let nz = base.weight.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let one_each = Call { run_mode: 1, query_start_loc: None, initial_state_mode: None, ..base };
    #[rustfmt::skip]
    let calls = [
        ("causal_conv.product", Target::new(Soc::AtlasA2, V8_1), base),
        ("causal_conv.product", Target::new(Soc::AtlasInference, V9_1), base),
        ("causal_conv.required", a2(), Call { conv_states: None, ..base }),
        ("causal_conv.mode", a2(), Call { activation_mode: 2, ..base }),
        ("causal_conv.mode", a2(), Call { run_mode: -1, ..base }),
        ("causal_conv.dtype", a2(), Call { x: of(Float, &[9, 32]), ..base }),
        ("causal_conv.dtype", a2(), Call { weight: of(Float16, &[4, 32]), ..base }),
        ("causal_conv.dtype", a2(), Call { cache_indices: of(Int64, &[3]), ..base }),
        ("causal_conv.format", a2(), Call { weight: nz, ..base }),
        ("causal_conv.contiguous", a2(), Call { conv_states: strided(base.conv_states, &[192, 32, 1]), ..base }),
        ("causal_conv.contiguous", a2(), Call { y: strided(base.y, &[64, 1]), ..base }),
        ("causal_conv.rank", a2(), Call { x: of(Bf16, &[288]), y: of(Bf16, &[288]), ..base }),
        ("causal_conv.rank", a2(), Call { cache_indices: of(Int32, &[3, 1, 1]), ..base }),
        ("causal_conv.channels", a2(), Call { x: of(Bf16, &[9, 24]), y: of(Bf16, &[9, 24]), ..base }),
        ("causal_conv.channels", a2(), Call { x: of(Bf16, &[9, 0]), y: of(Bf16, &[9, 0]), ..base }),
        ("causal_conv.width", a2(), Call { weight: of(Bf16, &[5, 32]), ..base }),
        ("causal_conv.width", a2(), Call { weight: of(Bf16, &[1, 32]), ..base }),
        ("causal_conv.shape", a2(), Call { weight: of(Bf16, &[4, 16]), ..base }),
        ("causal_conv.shape", a2(), Call { bias: of(Bf16, &[16]), ..base }),
        ("causal_conv.shape", a2(), Call { cache_indices: of(Int32, &[4]), ..base }),
        ("causal_conv.shape", a2(), Call { query_start_loc: of(Int32, &[2]), ..base }),
        ("causal_conv.empty", a2(), Call { query_start_loc: of(Int32, &[1]), ..base }),
        ("causal_conv.empty", a2(), Call { x: of(Bf16, &[3, 0, 32]), y: of(Bf16, &[3, 0, 32]), ..base }),
        ("causal_conv.lines", a2(), Call { conv_states: of(Bf16, &[2, 3, 32]), cache_indices: None, ..base }),
        ("causal_conv.lines", a2(), Call { conv_states: of(Bf16, &[0, 3, 32]), ..base }),
        ("causal_conv.line_rows", a2(), Call { conv_states: of(Bf16, &[5, 2, 32]), ..base }),
        ("causal_conv.line_rows", a2(), Call { conv_states: of(Bf16, &[5, 4, 32]), ..drafts() }),
        ("causal_conv.starts", a2(), Call { query_start_loc: None, ..base }),
        ("causal_conv.history", a2(), Call { initial_state_mode: of(Int32, &[9]), cache_indices: of(Int32, &[9]), ..one_each }),
        ("causal_conv.accepted", a2(), Call { num_accepted_tokens: of(Int32, &[3]), ..base }),
        ("causal_conv.accepted", a2(), Call { weight: of(Bf16, &[3, 32]), ..drafts() }),
    ];
    let mut broken = BTreeSet::from(["causal_conv.contents", "causal_conv.left_out", "causal_conv.shared_line"]);
    for (id, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        let status = if id.ends_with("product") { 561_003 } else { 561_002 };
        assert_eq!((violation.rule.id, violation.status()), (id, status), "{violation}");
        broken.insert(id);
    }
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn calls_of_both_modes_are_taken() {
    let prompt = prompts().check(a2()).unwrap();
    assert_eq!((prompt.sequences, prompt.rows, prompt.fixed_rows), (3, 9, None));
    assert_eq!([prompt.channels, prompt.width, prompt.lines, prompt.line_rows], [32, 4, 5, 3]);
    let several = Call { cache_indices: of(Int32, &[3, 4]), ..drafts() }.check(Target::new(Soc::Ascend950, V9_1));
    assert_eq!(several.map(|problem| (problem.sequences, problem.fixed_rows)), Ok((3, Some(3))));
    // A row for each sequence, with starts and without.
    for query_start_loc in [None, of(Int32, &[10])] {
        let one = Call { run_mode: 1, initial_state_mode: None, cache_indices: of(Int32, &[9]), ..prompts() };
        let one = Call { query_start_loc, ..one }.check(a2()).unwrap();
        assert_eq!((one.sequences, one.fixed_rows), (9, Some(1)));
        assert_eq!(one.form, ConvForm::Package { silu: false, update: true });
    }
}

#[test]
fn numbers_lead_to_rows_and_lines_or_are_faults() {
    let problem = prompts().check(a2()).unwrap();
    let runs = |starts: &[i64], lines: &[i64], initial_state_mode: &[i64]| {
        let contents = ConvContents { starts, lines, initial_state_mode, ..ConvContents::default() };
        (problem.runs(contents).collect::<Vec<_>>(), problem.shared_line(contents))
    };
    let run = |sequence, rows: std::ops::Range<usize>, line, goes_on: bool| {
        let kept = vec![KeptRows { line, row: 0, padded: rows.len()..rows.len() + 3 }];
        Ok(ConvRun { sequence, rows, history: goes_on.then_some(line), first_row: 0, kept, zeroed: 0 })
    };
    let (found, shared) = runs(&[0, 5, 5, 9], &[4, 0, 2], &[1, 1, 0]);
    assert_eq!((found, shared), (vec![run(0, 0..5, 4, true), run(2, 5..9, 2, false)], None));
    // The line -1 leaves a sequence out without a fault; without modes nothing goes on.
    assert_eq!(
        runs(&[0, 5, 6, 9], &[-1, 5, 2], &[]).0,
        [Err(ConvFault::NoLine { sequence: 1, given: 5, lines: 5 }), run(2, 6..9, 2, false),]
    );
    let shared = Some(ConvFault::SharedLine { line: 2, sequences: [0, 2] });
    assert_eq!(runs(&[0, 5, 6, 9], &[2, 1, 2], &[]).1, shared);
    let starts = |sequence, given| Err(ConvFault::Starts { sequence, given, rows: 9 });
    for (given, sequence, pair) in [
        ([1, 5, 6, 9], 0, [1, 5]),
        ([0, 5, 4, 9], 1, [5, 4]),
        ([0, 5, 6, 8], 2, [6, 8]),
        ([0, 5, 6, 10], 2, [6, 10]),
        ([-1, 5, 6, 9], 0, [-1, 5]),
    ] {
        assert_eq!(runs(&given, &[0, 1, 2], &[]).0[sequence], starts(sequence, pair), "{given:?}");
    }
    // Behind a sequence that ends in front of its beginning, the next one has rows of the first: it is left out too,
    // unless the first is.
    let given = [0, 5, 2, 9];
    let found = [run(0, 0..5, 0, false), starts(1, [5, 2]), starts(2, [2, 9])];
    assert_eq!(runs(&given, &[0, 1, 2], &[]).0, found);
    assert_eq!(runs(&given, &[-1, 1, 2], &[]).0, [starts(1, [5, 2]), run(2, 2..9, 2, false)]);

    let problem = Call { query_start_loc: of(Int32, &[4]), x: prompts().x, y: prompts().y, ..drafts() };
    let problem = problem.check(a2()).unwrap();
    let contents = |accepted| ConvContents { starts: &[0, 3, 5, 9], lines: &[0, 1, 2], accepted, ..Default::default() };
    let all: Vec<_> = problem.runs(contents(&[3, 1, 0])).collect();
    let kept = |sequence, rows: std::ops::Range<usize>, first_row| {
        let kept = KeptRows { line: sequence, row: 0, padded: first_row + 1..first_row + rows.len() + 3 };
        let kept = if rows.len() + 2 > 5 { Vec::new() } else { vec![kept] };
        Ok(ConvRun { sequence, rows, history: Some(sequence), first_row, kept, zeroed: 0 })
    };
    // The last sequence has more rows than its line has room for, and a count of nothing.
    assert_eq!(
        all,
        [
            kept(0, 0..3, 2),
            kept(1, 3..5, 0),
            Err(ConvFault::Number {
                tensor: "numAcceptedTokens",
                what: "accepted rows",
                sequence: 2,
                given: 0,
                allowed: [1, 3],
            }),
            Err(ConvFault::FullLine { sequence: 2, room: 5, needed: 6 }),
            kept(2, 5..9, 0),
        ]
    );
    let refused = problem.check_contents(contents(&[4, 1, 1]), &[]).unwrap_err();
    assert_eq!((refused.rule.id, refused.given.as_str()), ("causal_conv.contents", "4 accepted rows of sequence 0"));
    let refused = problem.check_contents(contents(&[1; 3]), &[]).unwrap_err();
    assert_eq!(refused.rule.id, "causal_conv.left_out");
    assert_eq!(problem.check_contents(contents(&[1; 3]), &["causal_conv.left_out"]), Ok(()));
}

proptest! {
    /// No shape and no number makes a check panic or overflow.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::option::of(prop::collection::vec(prop_oneof![0i64..20, Just(32), Just(i64::MAX), Just(1 << 31)], 0..4)),
            9,
        ),
        modes in prop::array::uniform3(-2i64..3),
        numbers in prop::collection::vec(prop_oneof![-2i64..12, Just(i64::MIN), Just(i64::MAX)], 0..12),
    ) {
        let tensor = |at: usize, dtype| shapes[at].as_ref().and_then(|shape| of(dtype, shape));
        let call = Call {
            x: tensor(0, Bf16),
            weight: tensor(1, Bf16),
            bias: tensor(2, Bf16),
            conv_states: tensor(3, Bf16),
            query_start_loc: tensor(4, Int32),
            cache_indices: tensor(5, Int32),
            initial_state_mode: tensor(6, Int32),
            num_accepted_tokens: tensor(7, Int32),
            activation_mode: modes[0],
            pad_slot_id: modes[1],
            run_mode: modes[2],
            y: tensor(8, Bf16),
        };
        let _ = call.check(a2());
        for base in [prompts(), drafts()] {
            let problem = base.check(a2()).unwrap();
            let all = &numbers[..];
            let contents =
                ConvContents { starts: all, lines: all, initial_state_mode: all, accepted: all, ..Default::default() };
            for run in problem.runs(contents).filter_map(Result::ok) {
                prop_assert!(run.rows.end <= problem.rows && run.history.is_none_or(|line| line < problem.lines));
                prop_assert!(run.first_row + problem.front() <= problem.line_rows);
                for kept in run.kept {
                    prop_assert!(kept.line < problem.lines && kept.row + kept.padded.len() <= problem.line_rows);
                }
            }
            let _ = problem.check_contents(contents, &[]);
        }
    }
}
