//! Merging parts that have keys for some rows: as on the host, and whatever a part holds elsewhere.

use crate::harness;
use approx::abs_diff_eq;

use ascend_attention::merge::{HostPart, LseNat, MergeState, Part, PartsOfRows, merge_on_host};
use ascend_attention::{Error, Layout, Output, Stream, f16, rules};
use proptest::prelude::*;
use proptest::test_runner::Config;

const HEADS: usize = 2;
const DIM: usize = 8;

/// Attention and log-sum-exps of rows, garbage in those without keys.
struct Made {
    attention: Vec<f32>,
    lse: Vec<f32>,
}

fn made(seed: u64, part: usize, runs: &[PartsOfRows]) -> Made {
    let rows: Vec<bool> =
        runs.iter().flat_map(|run| std::iter::repeat_n(run.parts >> part & 1 == 1, run.rows * HEADS)).collect();
    let seed = seed * 16 + part as u64;
    let numbers = harness::numbers(seed, rows.len() * DIM);
    let lse = harness::numbers(seed + 1_000_000, rows.len());
    let there = |at: usize, x: f32, garbage: f32| if rows[at] { x } else { garbage };
    let numbers = numbers.iter().enumerate();
    Made {
        attention: numbers.map(|(i, x)| there(i / DIM, f16::from_f32(*x).to_f32(), f32::NAN)).collect(),
        lse: lse.iter().enumerate().map(|(i, x)| there(i, 5.0 * x, f32::INFINITY)).collect(),
    }
}

fn upload(stream: &Stream, made: &Made, layout: Layout) -> Output<f16> {
    let rows = made.lse.len() / HEADS;
    let halves: Vec<f16> = made.attention.iter().map(|x| f16::from_f32(*x)).collect();
    let (shape, lse): (Vec<usize>, Vec<usize>) = match layout {
        Layout::Tnd => (vec![rows, HEADS, DIM], vec![rows, HEADS, 1]),
        _ => (vec![rows, HEADS, 1, DIM], vec![rows, HEADS, 1, 1]),
    };
    Output {
        attention: stream.upload(&halves, shape).unwrap(),
        softmax_lse: Some(stream.upload(&made.lse, lse).unwrap()),
    }
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(60) })]

    #[test]
    fn any_rows_of_any_parts(
        parts in 1usize..17, runs in prop::collection::vec((0usize..5, any::<u16>()), 1..6), seed in 0u64..1000, packed: bool,
    ) {
        let stream = harness::stream();
        let layout = if packed { Layout::Tnd } else { Layout::Bnsd };
        let known = u16::MAX >> (16 - parts);
        let runs: Vec<_> = runs.into_iter().map(|(rows, bits)| PartsOfRows { rows, parts: bits & known }).collect();
        let made: Vec<Made> = (0..parts).map(|part| made(seed, part, &runs)).collect();
        let outputs: Vec<_> = made.iter().map(|made| upload(&stream, made, layout)).collect();
        let parts: Vec<_> = outputs.iter().map(|output| Part::of(output).unwrap()).collect();
        let plan = MergeState::new(layout).rows(&runs).plan(&parts).unwrap();
        let merged = plan.launch(&stream, &parts).unwrap();
        let host: Vec<_> = made
            .iter()
            .map(|made| HostPart { attention: &made.attention, softmax_lse: LseNat(&made.lse[..]) })
            .collect();
        let want = merge_on_host(&host).unwrap();
        let got = merged.attention.download(&stream).unwrap();
        prop_assert_eq!(got.len(), want.attention.len());
        for (got, want) in got.iter().zip(&want.attention) {
            prop_assert!(abs_diff_eq!(got.to_f32(), want, epsilon = 2e-3), "{} is not {}", got, want);
        }
        let got = merged.softmax_lse.unwrap().download(&stream).unwrap();
        for (got, want) in got.iter().zip(&want.softmax_lse.0) {
            prop_assert!(got == want || (got - want).abs() < 1e-5, "{} is not {}", got, want);
        }
    }
}

#[test]
fn rows_and_parts_that_there_are_not_are_refused() {
    let stream = harness::stream();
    let runs = [PartsOfRows { rows: 3, parts: 0b11 }];
    let outputs: Vec<_> = (0..2).map(|part| upload(&stream, &made(1, part, &runs), Layout::Tnd)).collect();
    let parts: Vec<_> = outputs.iter().map(|output| Part::of(output).unwrap()).collect();
    let merge = MergeState::new(Layout::Tnd);
    let argument = |rows: &[PartsOfRows], parts: &[Part<'_, f16>]| match merge.rows(rows).plan(parts) {
        Err(Error::Violation(violation)) if violation.rule == &rules::ARGUMENT_VALUE => {
            violation.given.split(':').next().unwrap().to_owned()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(argument(&runs, &[]), "parts");
    assert_eq!(argument(&[], &parts), "rows");
    assert_eq!(argument(&[PartsOfRows { rows: 4, parts: 1 }], &parts), "rows");
    assert_eq!(argument(&[PartsOfRows { rows: 3, parts: 4 }], &parts), "rows");
    let short = merge.rows(&[PartsOfRows { rows: 3, parts: 4 }]).plan(&parts);
    let said = short.err().unwrap().to_string();
    assert!(said.contains("part 2, with 2 parts given"), "{said}");
    let endless = [PartsOfRows { rows: usize::MAX, parts: 1 }; 2];
    assert_eq!(argument(&endless, &parts), "rows");
    let other = MergeState::new(Layout::Bsnd).rows(&runs).plan(&parts);
    assert!(matches!(
        &other,
        Err(Error::Violation(violation))
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("layout: ")
    ));
    // A launch with other tensors than planned.
    let plan = merge.rows(&runs).plan(&parts).unwrap();
    let short = [PartsOfRows { rows: 2, parts: 0b11 }];
    let short = upload(&stream, &made(1, 0, &short), Layout::Tnd);
    let wrong = [parts[0], Part::of(&short).unwrap()];
    assert!(plan.launch(&stream, &wrong).is_err_and(|error| error.breaks(&rules::PLAN_TENSORS)));
    assert!(matches!(
        plan.launch(&stream, &parts[..1]),
        Err(Error::Violation(violation))
            if violation.rule.id == "plan.tensors"
                && violation.given.starts_with("parts: ")
    ));
    let mut no_lse = plan.output().unwrap();
    no_lse.softmax_lse = None;
    assert!(plan.launch_into(&stream, &parts, &mut no_lse).is_err_and(|error| error.breaks(&rules::PLAN_TENSORS)));
    plan.launch(&stream, &parts).unwrap();
}
