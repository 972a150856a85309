//! The emulated C function answers recorded calls as the operator does, by the status of phase one: with
//! `ASCEND_VECTORS`, the calls of `params/targets` and `verdicts` there, on every product and release that they name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use ascend_attention::case::ParameterCase;
use ascend_attention::spec::declared::AnyArguments;
use ascend_attention::spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_attention::spec::{Cann, Soc, Target, UNSUPPORTED, Violation};
use ascend_attention::{Machine, Runtime};

use super::calls::contents::arguments_of;
use super::{ALONE, raw};

/// A call whose recorded verdict differs; the contract's own test on recorded calls says why.
const DIFFERENT: [(&str, Cann); 1] = [("rel-00718", Cann::V8_5)];

/// Runs a test on an emulated machine of this product and release that takes what ends the process on some hosts alone,
/// while no other test runs.
fn compatibly_on(target: Target, test: impl FnOnce()) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let _compat = ascend_emu::check_scope(ascend_emu::Check::Compat);
    let machine = Machine::new(target.soc, target.cann).operator(Version::V5);
    let device = Runtime::emulated_as(&machine).unwrap().device(0).unwrap();
    let _stream = device.stream().unwrap();
    test();
}

/// The version that is called: the recorded one, otherwise the oldest from 4 on that can express the call there.
fn version_of(case: &ParameterCase, call: &FiaCall<'_>, target: Target) -> Version {
    let oldest = Version::oldest_for(call);
    let able = |version: &Version| *version >= oldest.max(Version::V4) && version.runs_on(target);
    let recorded = case.version.and_then(|number| {
        let mut versions = Version::ALL.into_iter();
        versions.find(|version| version.number() == number)
    });
    let expressing = Version::ALL.into_iter().find(able);
    recorded.or(expressing).unwrap_or(oldest)
}

/// Whether `aclCreateTensor` takes the tensors: it refuses negative sizes, which then no operator sees.
fn is_sendable(call: &FiaCall<'_>) -> bool {
    let mut descs = arguments_of(call).into_iter().filter_map(|argument| call.tensor(argument));
    descs.all(|desc| desc.shape.elements().is_some())
}

/// What is wrong with an answer, if anything is.
fn wrong(status: i32, accepted: bool, certain: Option<i64>, contract: &Result<(), Violation>) -> Option<String> {
    let by_contract = match contract {
        Ok(()) => 0,
        Err(violation) => violation.status(),
    };
    match (accepted, certain) {
        (true, _) if status != 0 => Some(format!("refused: {}", raw::message())),
        (false, _) if status == 0 => Some("accepted".to_owned()),
        (false, Some(certain)) if i64::from(status) != certain => {
            Some(format!("{status} instead of {certain}: {}", raw::message()))
        }
        _ if status != by_contract => Some(format!("{status}, and the contract {by_contract}")),
        _ => None,
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let files = [
        "params/targets/a2.jsonl",
        "params/targets/ascend950.jsonl",
        "verdicts/a2_9_2.jsonl",
        "verdicts/ascend950_9_2.jsonl",
        "verdicts/fia_9_2.jsonl",
    ];
    files.map(|file| folder.join(file)).to_vec()
}

#[test]
fn phase_one_answers_recorded_calls_with_the_operators_status() {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    // Lines of one target follow each other, since each target is a machine of its own.
    let mut lines: BTreeMap<(Cann, bool), Vec<(Target, ParameterCase)>> = BTreeMap::new();
    for file in files(Path::new(&folder)) {
        for line in fs::read_to_string(file).unwrap().lines() {
            let case = ParameterCase::from_json(line).unwrap();
            let soc = case.soc.unwrap_or(Soc::AtlasA2);
            for &(release, _) in &case.accepted {
                let target = Target::new(soc, release.or(case.release).unwrap());
                let machine = (target.cann, soc == Soc::Ascend950);
                lines.entry(machine).or_default().push((target, case.clone()));
            }
        }
    }
    let mut found = Vec::new();
    for ((cann, _), cases) in &lines {
        let (mut accepted, mut refused, mut certain) = (0, 0, 0);
        compatibly_on(cases[0].0, || {
            for (target, case) in cases.iter().filter(|(_, case)| !case.artefact) {
                let AnyArguments::FusedInferAttentionScore(arguments) = &case.arguments else {
                    continue;
                };
                let call = arguments.call();
                let version = version_of(case, &call, *target);
                let contract = call.check(version, *target).map(drop);
                let unsupported = |violation: &Violation| violation.is_unsupported();
                if contract.as_ref().is_err_and(unsupported) || !is_sendable(&call) {
                    continue;
                }
                let accepts = case.accepted_on(*target).unwrap();
                let status = raw::verdict(&call, version);
                if status != 0 && raw::message().contains(UNSUPPORTED.id) {
                    continue;
                }
                let of_file = case.status_on(*cann).filter(|_| !accepts);
                match status {
                    0 => accepted += 1,
                    _ => refused += 1,
                }
                certain += usize::from(of_file.is_some());
                let is_known = DIFFERENT.contains(&(case.id.as_str(), *cann));
                if let Some(why) = wrong(status, accepts, of_file, &contract).filter(|_| !is_known) {
                    found.push(format!("{} {target} {version}: {why}", case.id));
                }
            }
        });
        println!("{}: {accepted} accepted, {refused} refused, {certain} with a certain status", cases[0].0);
        assert!(accepted > 0 && refused > 0, "nothing was judged");
    }
    assert!(found.is_empty(), "{}:\n{}", found.len(), found.join("\n"));
}
