//! The contract gives the operator's own verdict, with its status: on the repo's own calls, and with `ASCEND_VECTORS`
//! on the recorded calls of `params/targets` and the case files of `train` there.

use super::described::{self, Described};
use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, Version, Work};
use ascend_spec::{Cann, DType, Dims, Soc, Target, TensorDesc, Violation};
use std::path::Path;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

/// Checks a call, and says what is not as described.
fn wrong(described: &Described) -> Option<String> {
    let verdict = described.call().check(described.version, TARGET);
    let id = &described.id;
    match (verdict, described.status) {
        (Ok(problem), None) if problem.work == Work::Attend => {
            let corrects = described.corrects;
            if corrects.is_some_and(|corrects| corrects != problem.zeroes_masked_rows) {
                return Some(format!("{id}: correction of rows without keys"));
            }
            let as_batch = described.as_batch;
            if as_batch.is_some_and(|as_batch| as_batch != problem.as_batch) {
                return Some(format!("{id}: run as a batch"));
            }
            None
        }
        (Ok(_), None) => None,
        (Ok(_), Some(_)) => Some(format!("{id}: accepted")),
        (Err(violation), status) if violation.is_unsupported() => status.map(|_| format!("{id}: accepted")),
        (Err(violation), status) => {
            assert!(violation.rule.scope.holds(TARGET), "{id}: {violation}");
            let same = status == Some(i64::from(violation.rule.status));
            (!same).then(|| format!("{id}: {violation}, status {}", violation.rule.status))
        }
    }
}

#[derive(Default)]
struct Agreement {
    /// Right verdicts and all, of accepted and of rejected calls.
    accepted: (usize, usize),
    rejected: (usize, usize),
    unsupported: usize,
    wrong: Vec<String>,
}

fn agreement(calls: &[Described]) -> Agreement {
    let mut found = Agreement::default();
    for described in calls {
        let wrong = wrong(described);
        let count = match described.status {
            None => &mut found.accepted,
            Some(_) => &mut found.rejected,
        };
        count.1 += 1;
        count.0 += usize::from(wrong.is_none());
        found.wrong.extend(wrong);
        let verdict = described.call().check(described.version, TARGET);
        if let Err(unsupported) = verdict.as_ref()
            && unsupported.is_unsupported()
        {
            println!("{}: {unsupported}", described.id);
            found.unsupported += 1;
        }
    }
    found
}

#[test]
fn verdicts_and_statuses_agree_with_the_operator() {
    let mut files = vec![("sample", described::sample())];
    if let Some(folder) = std::env::var_os("ASCEND_VECTORS") {
        let path = Path::new(&folder).join("params/targets/flash_attention_score.jsonl");
        files.push(("recorded", described::lines(&path)));
    }
    for (name, calls) in files {
        let found = agreement(&calls);
        let (accepted, rejected) = (found.accepted, found.rejected);
        println!(
            "{name}: {} of {} accepted calls, {} of {} rejected ones with their status, {} not computed",
            accepted.0, accepted.1, rejected.0, rejected.1, found.unsupported
        );
        assert!(accepted.1 > 0 && rejected.1 > 0, "nothing was judged");
        assert!(found.wrong.is_empty(), "{:#?}", found.wrong);
    }
}

#[test]
fn golden_cases_are_accepted_and_computed() {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    let calls = described::cases(&Path::new(&folder).join("train"));
    println!("{} cases", calls.len());
    assert!(!calls.is_empty());
    for described in calls {
        assert_eq!(wrong(&described), None);
        let verdict = described.call().check(described.version, TARGET);
        let unsupported = verdict.as_ref().is_err_and(Violation::is_unsupported);
        assert!(!unsupported, "{}: {verdict:?}", described.id);
    }
}

#[test]
fn accepted_calls_have_the_outputs_that_their_inputs_imply() {
    let mut calls = described::sample();
    if let Some(folder) = std::env::var_os("ASCEND_VECTORS") {
        calls.extend(described::cases(&Path::new(&folder).join("train")));
    }
    let mut seen = 0;
    for described in calls {
        let call = described.call();
        let accepted = call.check(described.version, TARGET);
        if described.status.is_none() && accepted.is_ok_and(|problem| problem.work == Work::Attend) {
            let (attention_out, softmax) = call.implied_outputs().unzip();
            assert_eq!(softmax, call.softmax_max, "{}", described.id);
            assert_eq!(attention_out, call.attention_out, "{}", described.id);
            seen += 1;
        }
    }
    assert!(seen >= 10, "{seen} calls");
}

#[test]
fn the_oldest_version_that_can_express_a_call_takes_it() {
    for described in described::sample() {
        let (call, as_described) = (described.call(), described.version);
        let oldest = Version::chosen_on(&call, TARGET);
        let status = |version: Version| match call.check(version, TARGET) {
            Err(violation) => Some(violation.rule.status),
            _ => None,
        };
        if call.input_layout.is_some() && oldest.is_var_len() == as_described.is_var_len() {
            assert!(oldest <= as_described || described.status.is_some(), "{}", described.id);
            if described.status.is_none() {
                assert_eq!(status(oldest), None, "{}: {oldest}", described.id);
            }
        }
    }
}

/// A call without a number of its version is judged by a version of its operator, whatever the other operator of the
/// same list has.
#[test]
fn a_call_is_judged_by_a_version_of_its_own_operator() {
    let tensor = |shape: &[i64]| Some(TensorDesc::packed(DType::Float16, Dims::new(shape).unwrap()));
    let heads = tensor(&[2, 4, 128, 64]);
    let call = FlashAttentionCall {
        query: heads,
        key: heads,
        value: heads,
        num_heads: 4,
        input_layout: Some("BNSD"),
        ..FlashAttentionCall::default()
    };
    let rope = tensor(&[2, 4, 128, 32]);
    let lengths = [128, 256];
    let a2 = |cann| Target::new(Soc::AtlasA2, cann);
    let cases = [
        ("rotary parts", FlashAttentionCall { query_rope: rope, key_rope: rope, ..call }, a2(Cann::V9_1)),
        ("lengths", FlashAttentionCall { actual_seq_lengths: Some(&lengths), ..call }, a2(Cann::V9_1)),
        ("sinks", FlashAttentionCall { sink: tensor(&[4]), ..call }, a2(Cann::V8_1)),
        ("310P", call, Target::new(Soc::AtlasInference, Cann::V9_1)),
    ];
    for (name, call, target) in cases {
        let mut call = AnyArguments::FlashAttentionScore(call.to_arguments());
        call.imply_outputs(&|_| None);
        let version = call.chosen_on(1, target);
        let refused = call.check(version, target, &mut |_| {}).unwrap_err();
        assert_eq!(refused.rule.id, "flash.entry_point", "{name}, V{version}: {refused}");
    }
}
