//! The contract of each release and product gives the operator's own verdict: with `ASCEND_VECTORS`, on the recorded
//! calls of `params/targets` and `verdicts` there.

use crate::recorded;
use ascend_spec::{Cann, Soc, Target, Violation};
use std::collections::BTreeMap;
use std::path::Path;

/// Calls whose verdict differs, and why.
const DIFFERENT: [(&str, Cann, &str); 1] = [(
    "rel-00718",
    Cann::V8_5,
    "a paged key cache of 0 heads beside a value cache of 4: the entry's shapes, not the lack of keys, refuse it, and \
     which of the shapes is looked at is written nowhere",
)];

/// Least share of right verdicts in a file, accepted and rejected apart, in thousandths.
const LEAST: usize = 999;

#[derive(Clone, Copy, Default)]
struct Count {
    right: usize,
    all: usize,
}

fn agreement(file: &str) {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    let path = Path::new(&folder).join(file);
    let mut counts: BTreeMap<(Cann, bool), Count> = BTreeMap::new();
    let mut wrong = Vec::new();
    for recorded in recorded::calls_of(&path) {
        for &(target, accept) in &recorded.verdicts {
            let verdict = recorded.check(target);
            let count = counts.entry((target.cann, accept)).or_default();
            count.all += 1;
            match right(&recorded, target, accept, &verdict) {
                Ok(()) => count.right += 1,
                Err(why) => wrong.push((recorded.id.clone(), target.cann, why)),
            }
        }
    }
    for (id, cann, why) in &wrong {
        println!("{id} {cann}: {why}");
    }
    for (accept, verdict) in [(true, "accepted"), (false, "rejected")] {
        let mut file_count = Count::default();
        for (&(cann, _), &Count { right, all }) in counts.iter().filter(|((_, of), _)| *of == accept) {
            println!("{file} {cann}: {right} of {all} {verdict} calls");
            file_count.right += right;
            file_count.all += all;
        }
        let Count { right, all } = file_count;
        assert!(all > 0 && right * 1000 >= all * LEAST, "{file}: {right} of {all} {verdict} calls");
    }
    wrong.retain(|(id, cann, _)| {
        let named = |&(of, release, _): &(&str, Cann, &str)| of == id && release == *cann;
        !DIFFERENT.iter().any(named)
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether a verdict is the recorded one, by a rule that holds on the target and with its status.
fn right(
    recorded: &recorded::Recorded,
    target: Target,
    accept: bool,
    verdict: &Result<(), Violation>,
) -> Result<(), String> {
    match verdict {
        // What is accepted but not computed yet counts as accepted.
        Err(violation) if !violation.is_unsupported() => {
            let rule = violation.rule;
            assert!(rule.scope.holds(target), "{} for {target}", rule.id);
            let given = i64::from(violation.status());
            match (accept, recorded.status(target.cann)) {
                (true, _) => Err(violation.to_string()),
                (false, Some(status)) if given != status => {
                    Err(format!("status {given} instead of {status}: {violation}"))
                }
                (false, _) => Ok(()),
            }
        }
        _ => match accept {
            true => Ok(()),
            false => Err("accepted".to_owned()),
        },
    }
}

#[test]
fn verdicts_of_each_release_agree_on_atlas_a2_and_a3() {
    agreement("params/targets/a2.jsonl");
}

#[test]
fn verdicts_agree_on_ascend_950() {
    agreement("params/targets/ascend950.jsonl");
}

#[test]
fn verdicts_of_9_2_agree_on_atlas_a2_and_a3() {
    agreement("verdicts/a2_9_2.jsonl");
}

#[test]
fn verdicts_of_9_2_agree_on_ascend_950() {
    agreement("verdicts/ascend950_9_2.jsonl");
}

#[test]
fn verdicts_agree_on_what_9_2_changes() {
    agreement("verdicts/fia_9_2.jsonl");
}

#[test]
fn who_is_said_to_take_a_refused_call_takes_it() {
    let calls = match std::env::var_os("ASCEND_VECTORS") {
        Some(root) => {
            let folder = Path::new(&root).join("params/targets");
            let files = ["a2.jsonl", "ascend950.jsonl"].map(|file| folder.join(file));
            files.iter().flat_map(|file| recorded::calls_of(file)).collect()
        }
        None => recorded::sample(),
    };
    let (mut newer, mut elsewhere) = (0, 0);
    for call in &calls {
        for soc in [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950] {
            for target in Cann::ALL.map(|cann| Target::new(soc, cann)) {
                let Some(violation) = call.check(target).err().filter(|violation| !violation.is_unsupported()) else {
                    continue;
                };
                let Some(other) = call.taken_by(target) else {
                    continue;
                };
                assert!(other.cann >= target.cann && other != target, "{violation}");
                *if other.soc == soc { &mut newer } else { &mut elsewhere } += 1;
                let verdict = call.check(other);
                assert!(verdict.is_ok(), "{}: {violation}, but {other}: {verdict:?}", call.id);
                let mut recorded = call.verdicts.iter();
                let recorded = recorded.find(|(of, _)| of.cann == other.cann && of.soc.is_kin(other.soc));
                assert!(recorded.is_none_or(|(_, accept)| *accept), "{}: {violation}", call.id);
            }
        }
    }
    println!("{newer} refusals name a newer release, {elsewhere} another product");
    assert!(newer > 20 && elsewhere > 5, "{newer}, {elsewhere}");
}

#[test]
fn extreme_sizes_lengths_and_attributes_are_answered_on_every_target() {
    let products = [Soc::AtlasA2, Soc::Ascend950];
    let targets = products.map(|soc| Cann::ALL.map(|cann| Target::new(soc, cann)));
    for mut recorded in recorded::sample().into_iter().step_by(3) {
        recorded.each_mutation(&[i64::MIN, -1, 0, 1, 17, i64::MAX], &mut |changed| {
            for target in targets.as_flattened() {
                if let Err(violation) = changed.check(*target) {
                    let id = violation.rule.id;
                    assert!(violation.rule.scope.holds(*target), "{id} for {target}");
                }
            }
        });
    }
}
