//! Each lint is found alone, by a call that differs from a clean one in it.

use ascend_spec::ops::fused_infer_attention_score::{Parameter, rules};
use ascend_testing::lints::each_broken;
use std::collections::BTreeSet;

#[test]
fn every_lint_is_found_alone_and_clean_calls_have_none() {
    let found = each_broken(&mut |_, _, _, _| {});
    let all: BTreeSet<_> = rules::lints::all().map(|lint| lint.id).collect();
    assert_eq!(found, all, "lints without a call that breaks them, or the reverse");
}

/// Parameters that a call can do without, alone or together.
fn optional() -> impl Iterator<Item = Vec<Parameter>> {
    let prefixes = vec![Parameter::KeySharedPrefix, Parameter::ValueSharedPrefix];
    let alone = Parameter::tensors().map(|parameter| vec![parameter]);
    alone.chain([prefixes])
}

#[test]
fn what_is_ignored_is_no_part_of_the_problem() {
    let mut compared = BTreeSet::new();
    each_broken(&mut |id, call, version, target| {
        if !id.ends_with("ignored") {
            return;
        }
        let whole = format!("{:?}", call.check(version, target).unwrap().problem);
        for parameters in optional() {
            let mut less = call.clone();
            let given = |parameter: &Parameter| less.tensor(*parameter).is_some();
            if !parameters.iter().all(given) {
                continue;
            }
            for &parameter in &parameters {
                if let Some(place) = less.single_mut(parameter) {
                    *place = None;
                }
            }
            let Ok(checked) = less.check(version, target) else {
                continue;
            };
            let mut ignored = false;
            checked.each_lint(&mut |lint| ignored |= lint.rule.id == id);
            if !ignored {
                let problem = format!("{:?}", checked.problem);
                assert_eq!(problem, whole, "{id}: {parameters:?}");
                compared.insert(id);
            }
        }
    });
    let tensors = [
        "antiquant.ignored",
        "deq_scale.ignored",
        "key_rope_antiquant_scale.ignored",
        "padding_size.ignored",
        "pse_shift.ignored",
        "quant_scale2.ignored",
        "softmax_lse.ignored",
        "split_fuse.ignored",
    ];
    for id in tensors {
        assert!(compared.contains(id), "{id}: {compared:?}");
    }
}
