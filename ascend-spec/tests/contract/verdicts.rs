//! The contract gives the operator's own verdict on recorded calls: the repo's own sample, and with `ASCEND_VECTORS`
//! the folder `params` there. A call that is accepted but not computed yet counts as accepted.

use crate::recorded;
use ascend_spec::Target;
use std::path::Path;

/// Calls whose recorded verdict is that of a later stage than the first that refuses them.
const REFUSED_EARLIER: [(&str, &str); 2] = [
    // No value: a null pointer, which the API layer refuses (161001) before the recorded stage sees the call.
    ("feat-02909", "call.required"),
    ("feat-03830", "call.required"),
];

#[test]
fn verdicts_agree_with_the_operator() {
    let (mut accepted, mut rejected, mut unsupported) = (0, 0, 0);
    let mut wrong = Vec::new();
    let mut calls = recorded::sample();
    if let Some(folder) = std::env::var_os("ASCEND_VECTORS") {
        calls.extend(recorded::calls(&Path::new(&folder).join("params")));
    }
    let each = calls.iter().flat_map(|recorded| {
        let one = move |&(target, accept): &(Target, bool)| (recorded, target, accept);
        recorded.verdicts.iter().map(one)
    });
    for (recorded, target, accept) in each {
        match recorded.check(target) {
            Err(violation) if violation.is_unsupported() && accept => {
                accepted += 1;
                unsupported += 1;
            }
            Err(violation) if violation.is_unsupported() => {
                wrong.push(format!("{}: accepted", recorded.id));
            }
            Ok(()) if accept => accepted += 1,
            Err(_) if !accept => rejected += 1,
            Ok(()) => wrong.push(format!("{}: accepted", recorded.id)),
            Err(violation) if REFUSED_EARLIER.contains(&(recorded.id.as_str(), violation.rule.id)) => {
                rejected += 1;
            }
            Err(violation) => wrong.push(format!("{}: {violation}", recorded.id)),
        }
    }
    println!("accepted {accepted}, rejected {rejected}, unsupported {unsupported}, wrong {}", wrong.len());
    assert!(wrong.is_empty(), "{} wrong verdicts:\n{}", wrong.len(), wrong.join("\n"));
    assert!(accepted > 0 && rejected > 0, "nothing was judged");
}
