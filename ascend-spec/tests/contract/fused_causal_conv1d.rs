//! The contract of FusedCausalConv1d and of its in-place form: a call for every rule, what is taken, and where the
//! numbers on the device lead.

use ascend_spec::Cann::{V9_0, V9_1, V9_2};
use ascend_spec::DType::{Bf16, Float, Float16, Int32, Int64};
use ascend_spec::ops::convolution::{ConvContents, ConvFault, ConvForm, ConvProblem, KeptRows};
use ascend_spec::ops::fused_causal_conv1d::{FusedConvCall as Call, Parameter, rules};
use ascend_spec::ops::inplace_fused_causal_conv1d::InplaceFusedConvCall;
use ascend_spec::{Cann, DType, Dims, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn a950(cann: Cann) -> Target {
    Target::new(Soc::Ascend950, cann)
}

fn strided(desc: Option<TensorDesc>, strides: &[i64]) -> Option<TensorDesc> {
    desc.map(|desc| TensorDesc { strides: Dims::new(strides).unwrap(), ..desc })
}

/// Thirty rows of three sequences, and five lines of four rows.
fn prompts() -> Call {
    Call {
        x: of(Bf16, &[30, 64]),
        weight: of(Bf16, &[3, 64]),
        conv_states: of(Bf16, &[5, 4, 64]),
        query_start_loc: of(Int32, &[4]),
        cache_indices: of(Int32, &[3]),
        num_accepted_tokens: of(Int32, &[3]),
        num_computed_tokens: of(Int32, &[3]),
        max_query_len: 30,
        y: of(Bf16, &[30, 64]),
        ..Call::default()
    }
}

/// Three rows of each of three sequences.
fn drafts() -> Call {
    Call { x: of(Bf16, &[3, 3, 64]), y: of(Bf16, &[3, 3, 64]), query_start_loc: None, max_query_len: -1, ..prompts() }
}

/// The prompts with three blocks of eight tokens each.
fn in_blocks() -> Call {
    Call {
        cache_indices: of(Int32, &[3, 3]),
        block_idx_first_scheduled_token: of(Int32, &[3]),
        block_idx_last_scheduled_token: of(Int32, &[3]),
        initial_state_idx: of(Int32, &[3]),
        num_accepted_tokens: None,
        block_size: 8,
        ..prompts()
    }
}

#[test]
fn every_rule_refuses_a_call() {
    let base = prompts();
    let nz = base.weight.map(|desc| TensorDesc { format: Format::FractalNz, ..desc });
    let few = Call { max_query_len: 8, ..base };
    let rows = |count| Call { x: of(Bf16, &[count, 64]), y: of(Bf16, &[count, 64]), ..base };
    let channels = |call: Call, count| Call { x: of(Bf16, &[30, count]), y: of(Bf16, &[30, count]), ..call };
    let many = of(Int32, &[258]);
    #[rustfmt::skip]
    let calls = [
        ("fused_conv.product", a950(V9_0), base),
        ("fused_conv.product", Target::new(Soc::AtlasA2, V9_1), base),
        ("fused_conv.unchecked_null", a950(V9_1), Call { conv_states: None, ..base }),
        ("fused_conv.required", a950(V9_2), Call { conv_states: None, ..base }),
        ("fused_conv.required", a950(V9_1), Call { y: None, ..base }),
        ("fused_conv.mode", a950(V9_1), Call { residual_connection: 2, ..base }),
        ("fused_conv.mode", a950(V9_1), Call { conv_mode: -1, ..base }),
        ("fused_conv.unread_mode", a950(V9_2), Call { activation_mode: 3, ..base }),
        ("fused_conv.unread_mode", a950(V9_2), Call { run_mode: 2, ..base }),
        ("fused_conv.dtype", a950(V9_1), Call { x: of(Float, &[30, 64]), ..base }),
        ("fused_conv.dtype", a950(V9_1), Call { weight: of(Float16, &[3, 64]), ..base }),
        ("fused_conv.dtype", a950(V9_1), Call { cache_indices: of(Int64, &[3]), ..base }),
        ("fused_conv.format", a950(V9_1), Call { weight: nz, ..base }),
        ("fused_conv.rank", a950(V9_1), Call { x: of(Bf16, &[1920]), ..base }),
        ("fused_conv.rank", a950(V9_1), Call { cache_indices: of(Int32, &[3, 1]), ..base }),
        ("fused_conv.rank", a950(V9_1), Call { cache_indices: of(Int32, &[3]), ..in_blocks() }),
        ("fused_conv.strides", a950(V9_1), Call { y: strided(base.y, &[128, 1]), ..base }),
        ("fused_conv.strides", a950(V9_1), Call { x: strided(base.x, &[1, 30]), ..base }),
        ("fused_conv.strides", a950(V9_1), Call { x: strided(drafts().x, &[400, 64, 1]), ..drafts() }),
        ("fused_conv.strides", a950(V9_1), Call { conv_states: strided(base.conv_states, &[255, 64, 1]), ..base }),
        ("fused_conv.strides", a950(V9_1), Call { conv_states: strided(base.conv_states, &[256, 32, 1]), ..base }),
        ("fused_conv.channels", a950(V9_1), channels(base, 72)),
        ("fused_conv.channels", a950(V9_1), channels(base, 16400)),
        ("fused_conv.channels", a950(V9_1), channels(few, 48)),
        ("fused_conv.width", a950(V9_1), Call { weight: of(Bf16, &[4, 64]), ..base }),
        ("fused_conv.shape", a950(V9_1), Call { weight: of(Bf16, &[3, 32]), ..base }),
        ("fused_conv.shape", a950(V9_1), Call { bias: of(Bf16, &[32]), ..base }),
        ("fused_conv.shape", a950(V9_1), Call { y: of(Bf16, &[31, 64]), ..base }),
        ("fused_conv.shape", a950(V9_1), Call { num_computed_tokens: of(Int32, &[4]), ..base }),
        ("fused_conv.sequences", a950(V9_1), Call { query_start_loc: of(Int32, &[1]), ..base }),
        ("fused_conv.sequences", a950(V9_1), Call { query_start_loc: many, ..base }),
        ("fused_conv.rows", a950(V9_1), rows(0)),
        ("fused_conv.rows", a950(V9_1), rows((1 << 20) + 1)),
        ("fused_conv.rows", a950(V9_1), Call { x: of(Bf16, &[3, 9, 64]), y: of(Bf16, &[3, 9, 64]), ..drafts() }),
        ("fused_conv.starts", a950(V9_1), Call { query_start_loc: None, ..base }),
        ("fused_conv.max_query_len", a950(V9_2), Call { max_query_len: -1, ..base }),
        ("fused_conv.max_query_len", a950(V9_2), Call { max_query_len: 9, ..base }),
        ("fused_conv.lines", a950(V9_1), Call { conv_states: of(Bf16, &[2, 4, 64]), cache_indices: None, ..base }),
        ("fused_conv.lines", a950(V9_1), Call { conv_states: of(Bf16, &[0, 4, 64]), ..base }),
        ("fused_conv.line_rows", a950(V9_1), Call { conv_states: of(Bf16, &[5, 1, 64]), ..base }),
        ("fused_conv.line_rows", a950(V9_1), Call { conv_states: of(Bf16, &[5, 3, 64]), ..drafts() }),
        ("fused_conv.computed", a950(V9_1), Call { conv_mode: 1, num_computed_tokens: None, ..base }),
        ("fused_conv.computed", a950(V9_1), Call { num_computed_tokens: None, ..in_blocks() }),
        ("fused_conv.block_size", a950(V9_1), Call { block_size: 0, ..in_blocks() }),
        ("fused_conv.blocks", a950(V9_1), Call { initial_state_idx: None, ..in_blocks() }),
        ("fused_conv.blocks", a950(V9_1), Call { block_idx_last_scheduled_token: None, ..in_blocks() }),
        ("fused_conv.blocks", a950(V9_1), Call { cache_indices: None, ..in_blocks() }),
    ];
    let mut broken = BTreeSet::new();
    for (id, target, call) in calls {
        let violation = call.check(target).unwrap_err();
        let status = match id {
            "fused_conv.product" => 561_003,
            "fused_conv.required" | "fused_conv.unchecked_null" => 161_001,
            _ => 561_002,
        };
        assert_eq!((violation.rule.id, violation.status()), (id, status), "{violation}");
        broken.insert(id);
        // The form that works in place refuses the same, where it is not about the output.
        let in_place = InplaceFusedConvCall::from(call).check(target).map_err(|violation| violation.rule.id);
        let of_y = call.y.is_none_or(|y| !y.is_contiguous() || call.x.is_some_and(|x| x.shape != y.shape));
        assert!(in_place == Err(id) || of_y, "{id}: {in_place:?}");
    }
    let lints = [
        ("fused_conv.unread", Call { bias: of(Bf16, &[64]), ..base }),
        ("fused_conv.unread", Call { initial_state_mode: of(Int32, &[3]), ..base }),
        ("fused_conv.unread", Call { activation_mode: 1, ..base }),
        ("fused_conv.unread", Call { run_mode: 1, ..base }),
        ("fused_conv.unread", Call { query_start_loc: of(Int32, &[4]), ..drafts() }),
        ("fused_conv.pad_slot", Call { pad_slot_id: 300, ..few }),
        ("fused_conv.pad_slot", Call { pad_slot_id: -129, ..drafts() }),
    ];
    for (id, call) in lints {
        call.check(a950(V9_1)).unwrap();
        let violation = call.lint(a950(V9_1), &[]).unwrap_err();
        assert_eq!(violation.rule.id, id, "{violation}");
        assert_eq!(call.lint(a950(V9_1), &[id]), Ok(()));
        assert_eq!(InplaceFusedConvCall::from(call).lint(a950(V9_1), &[]).unwrap_err(), violation);
        broken.insert(id);
    }
    broken.extend(["fused_conv.contents", "fused_conv.left_out", "fused_conv.shared_line"]);
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn calls_of_every_kind_are_taken() {
    let form = |call: Call| {
        let problem = call.check(a950(V9_1)).unwrap();
        assert_eq!(InplaceFusedConvCall::from(call).check(a950(V9_1)), Ok(problem));
        assert_eq!(call.lint(a950(V9_1), &[]), Ok(()));
        let ConvForm::Fused(form) = problem.form else { panic!("{problem:?}") };
        (problem, form)
    };
    let (problem, fused) = form(prompts());
    assert_eq!((problem.sequences, problem.rows, problem.fixed_rows, problem.width), (3, 30, None, 3));
    assert_eq!((fused.few_rows, fused.most_rows, fused.block_size), (false, Some(30), None));
    let (problem, fused) = form(drafts());
    assert_eq!((problem.rows, problem.fixed_rows, fused.few_rows), (9, Some(3), true));
    let (_, fused) = form(Call { max_query_len: 8, x: of(Bf16, &[20, 64]), y: of(Bf16, &[20, 64]), ..prompts() });
    assert_eq!((fused.few_rows, fused.most_rows), (true, Some(8)));
    let (_, fused) = form(in_blocks());
    assert_eq!(fused.block_size, Some(8));
    // Gaps between rows and between lines, and lines whose rows stand in turns.
    form(Call { x: strided(prompts().x, &[96, 1]), ..prompts() });
    form(Call { x: strided(drafts().x, &[288, 96, 1]), ..drafts() });
    form(Call { conv_states: strided(prompts().conv_states, &[512, 96, 1]), ..prompts() });
    form(Call { conv_states: strided(prompts().conv_states, &[64, 320, 1]), ..prompts() });
    // Rows of x that overlap are read, and not written.
    let overlapping = Call { x: strided(prompts().x, &[16, 1]), ..prompts() };
    overlapping.check(a950(V9_1)).unwrap();
    let refused = InplaceFusedConvCall::from(overlapping).check(a950(V9_1)).unwrap_err();
    assert_eq!(refused.rule.id, "fused_conv.strides");
    // The kernel for few rows reads the lowest 8 bits.
    let cut = Call { pad_slot_id: 255, ..drafts() }.check(a950(V9_1)).unwrap();
    assert_eq!(cut.pad_slot_id, -1);
    assert_eq!(Call { pad_slot_id: 255, ..prompts() }.check(a950(V9_1)).unwrap().pad_slot_id, 255);
}

/// The faults of numbers, each with its rule.
fn faults(problem: &ConvProblem, contents: ConvContents<'_>) -> Vec<(&'static str, String)> {
    let all = problem.runs(contents).filter_map(Result::err).chain(problem.shared_line(contents));
    all.map(|fault: ConvFault| (problem.rule_of(&fault).id, fault.to_string())).collect()
}

#[test]
fn lines_are_filled_from_their_end() {
    let problem = prompts().check(a950(V9_1)).unwrap();
    let contents = ConvContents {
        starts: &[0, 1, 4, 30],
        lines: &[4, 0, 2],
        accepted: &[0, 2, 1],
        computed: &[0, 7, 9],
        ..ConvContents::default()
    };
    assert_eq!(faults(&problem, contents), []);
    let runs: Vec<_> = problem.runs(contents).map(Result::unwrap).collect();
    let kept = |line, row, padded| vec![KeptRows { line, row, padded }];
    // One row behind two rows of zeros leaves the first row of its line; others fill all four.
    assert_eq!((runs[0].history, runs[0].first_row, &runs[0].kept), (None, 0, &kept(4, 1, 0..3)));
    assert_eq!((runs[1].history, runs[1].first_row, &runs[1].kept), (Some(0), 1, &kept(0, 0, 2..6)));
    assert_eq!((runs[2].history, runs[2].first_row, &runs[2].kept), (Some(2), 0, &kept(2, 0, 24..28)));
    // Without counts the last two rows are gone on from.
    let plain = ConvContents { accepted: &[], computed: &[], ..contents };
    assert!(problem.runs(plain).all(|run| run.is_ok_and(|run| run.first_row == 2 && run.history.is_some())));
    // Windows that begin in front of the first token.
    let whole = Call { conv_mode: 1, ..prompts() }.check(a950(V9_1)).unwrap();
    let zeroed = |computed| {
        let runs = whole.runs(ConvContents { computed, ..contents });
        runs.map(|run| run.unwrap().zeroed).collect::<Vec<_>>()
    };
    assert_eq!((zeroed(&[0, 0, 0]), zeroed(&[1, 1, 2])), (vec![1, 2, 2], vec![1, 1, 0]));
}

#[test]
fn blocks_keep_the_rows_in_front_of_their_ends() {
    let problem = in_blocks().check(a950(V9_1)).unwrap();
    let contents = ConvContents {
        starts: &[0, 13, 14, 30],
        lines: &[0, 1, 2, 3, 3, -1, 4, -1, -1],
        computed: &[5, 7, 0],
        first_block: &[0, 0, 0],
        last_block: &[2, 0, 1],
        initial_block: &[0, 0, 0],
        ..ConvContents::default()
    };
    // Eighteen tokens of the first sequence end in its third block, sixteen of the last one in its second.
    assert_eq!(
        faults(&problem, contents),
        [("fused_conv.contents", "line -1 of sequence 2, allowed: 0 to 4".to_owned())]
    );
    let runs: Vec<_> = problem.runs(contents).filter_map(Result::ok).collect();
    let kept = |line, row, padded| KeptRows { line, row, padded };
    assert_eq!(runs[0].first_row, 2);
    assert_eq!(runs[0].kept, [kept(2, 0, 13..17), kept(0, 2, 5..7), kept(1, 2, 13..15)]);
    assert_eq!(runs[1].kept, [kept(3, 0, 1..5)]);
    let wrong = |change: ConvContents<'_>| faults(&problem, change).remove(0);
    let contents = ConvContents { lines: &[0, 1, 2, 3, 3, -1, 4, 0, -1], ..contents };
    for (change, text) in [
        (ConvContents { last_block: &[1, 0, 1], ..contents }, "1 as last block of sequence 0, allowed: 2 to 2"),
        (ConvContents { last_block: &[2, 3, 1], ..contents }, "3 as last block of sequence 1, allowed: 0 to 2"),
        (ConvContents { first_block: &[1, 0, 0], ..contents }, "1 as first block of sequence 0, allowed: 0 to 0"),
        (ConvContents { initial_block: &[0, 1, 0], ..contents }, "1 as initial block of sequence 1, allowed: 0 to 0"),
        (ConvContents { computed: &[-1, 7, 0], ..contents }, "-1 computed tokens of sequence 0"),
    ] {
        let (rule, found) = wrong(change);
        assert!(rule == "fused_conv.contents" && found.contains(text), "{found}");
    }
    assert_eq!(
        faults(&problem, contents),
        [("fused_conv.shared_line", "line 0 of sequences 0 and 2, allowed: a line for each sequence".to_owned())]
    );
    // A line that two sequences go on from is no fault; one that a sequence writes twice is.
    let reads = ConvContents {
        lines: &[4, 0, 3, 4, 1, -1, 2, 2, -1],
        computed: &[8, 15, 0],
        first_block: &[1, 1, 0],
        last_block: &[2, 1, 1],
        initial_block: &[0, 0, 0],
        ..contents
    };
    let twice = "line 2 twice for sequence 2, allowed: a line for each block".to_owned();
    assert_eq!(faults(&problem, reads), [("fused_conv.shared_line", twice)]);
}

#[test]
fn numbers_that_lead_elsewhere_are_faults() {
    let few = Call { max_query_len: 4, x: of(Bf16, &[9, 64]), y: of(Bf16, &[9, 64]), ..prompts() };
    let problem = few.check(a950(V9_1)).unwrap();
    let contents = ConvContents {
        starts: &[0, 3, 5, 9],
        lines: &[0, 1, 2],
        accepted: &[1, 1, 3],
        computed: &[5, 5, 5],
        ..ConvContents::default()
    };
    assert_eq!(faults(&problem, contents), []);
    for (change, rule, text) in [
        (ConvContents { starts: &[0, 3, 5, 8], ..contents }, "contents", "rows 5 to 8 of sequence 2"),
        (ConvContents { starts: &[0, 3, 3, 9], ..contents }, "left_out", "no row of sequence 1"),
        (ConvContents { starts: &[0, 3, 4, 9], ..contents }, "contents", "5 rows of sequence 2, allowed: 1 to 4"),
        (ConvContents { lines: &[0, 5, 2], ..contents }, "contents", "line 5 of sequence 1"),
        (ConvContents { lines: &[0, -2, 2], ..contents }, "contents", "line -2 of sequence 1"),
        (ConvContents { lines: &[0, -1, 2], ..contents }, "left_out", "sequence 1 is left out between others"),
        (ConvContents { lines: &[0, 2, 2], ..contents }, "shared_line", "line 2 of sequences 1 and 2"),
        (ConvContents { accepted: &[1, 0, 3], ..contents }, "contents", "0 accepted rows of sequence 1"),
        (ConvContents { accepted: &[1, 1, 4], ..contents }, "contents", "4 accepted rows of sequence 2"),
    ] {
        let (found, shown) = faults(&problem, change).remove(0);
        assert!(found == format!("fused_conv.{rule}") && shown.contains(text), "{found}: {shown}");
    }
    for lines in [[-1, -1, 2], [0, 1, -1], [-1; 3]] {
        assert_eq!(faults(&problem, ConvContents { lines: &lines, ..contents }), []);
    }
    // The kernel for more rows takes 0 for 1; a sequence that begins has no count.
    let long = Call { max_query_len: 9, ..few }.check(a950(V9_1)).unwrap();
    assert_eq!(faults(&long, ConvContents { accepted: &[0, 1, 3], ..contents }), []);
    assert_eq!(faults(&problem, ConvContents { accepted: &[9, 1, 3], computed: &[0, 5, 5], ..contents }), []);
    // Of x with three axes starts are not read.
    let fixed = drafts().check(a950(V9_1)).unwrap();
    assert_eq!(faults(&fixed, ConvContents { starts: &[7, 7], ..contents }), []);
}

proptest! {
    /// No shape and no number makes a check panic or overflow, and sequences keep to the rows and the pool.
    #[test]
    fn nonsense_is_refused(
        shapes in prop::collection::vec(
            prop::option::of(prop::collection::vec(prop_oneof![0i64..20, Just(64), Just(i64::MAX), Just(1 << 31)], 0..4)),
            13,
        ),
        attributes in prop::array::uniform7(prop_oneof![-2i64..3, Just(i64::MIN), Just(i64::MAX)]),
        numbers in prop::collection::vec(prop_oneof![-2i64..12, Just(i64::MIN), Just(i64::MAX)], 0..12),
    ) {
        let mut call = Call::default().to_arguments();
        for (&parameter, shape) in Parameter::ALL.iter().filter(|parameter| parameter.info().kind.is_tensor()).zip(&shapes) {
            let dtype = if (parameter as usize) < 3 || parameter == Parameter::Y { Bf16 } else { Int32 };
            shape.iter().filter_map(|shape| of(dtype, shape)).for_each(|desc| call.set_tensor(parameter, desc));
        }
        let call = Call {
            activation_mode: attributes[0],
            pad_slot_id: attributes[1],
            run_mode: attributes[2],
            max_query_len: attributes[3],
            residual_connection: attributes[4],
            block_size: attributes[5],
            conv_mode: attributes[6],
            ..call.call()
        };
        for cann in [V9_1, V9_2] {
            let _ = (call.check(a950(cann)), call.lint(a950(cann), &[]), InplaceFusedConvCall::from(call).check(a950(cann)));
        }
        for base in [prompts(), drafts(), in_blocks(), Call { block_size: i64::MAX, ..in_blocks() }] {
            let problem = base.check(a950(V9_1)).unwrap();
            let all = &numbers[..];
            let contents = ConvContents {
                starts: all, lines: all, initial_state_mode: all, accepted: all, computed: all, first_block: all,
                last_block: all, initial_block: all,
            };
            for run in problem.runs(contents).filter_map(Result::ok) {
                prop_assert!(run.rows.end <= problem.rows && run.history.is_none_or(|line| line < problem.lines));
                prop_assert!(run.first_row + problem.front() <= problem.line_rows && run.zeroed <= run.rows.len());
                for kept in run.kept {
                    prop_assert!(kept.line < problem.lines && kept.row + kept.padded.len() <= problem.line_rows);
                    prop_assert!(kept.padded.end <= run.first_row + problem.front() + run.rows.len());
                }
            }
            let _ = problem.check_contents(contents, &[]);
        }
    }
}
