//! What `ascend-attn check` prints: each verdict, and the counts.

use ascend_attention::spec::Target;
use serde_json::json;

use super::{CallLocation, Checked, Counts, Totals};
use crate::Stop;
use crate::output::Output;

/// Prints a verdict; as text it includes the target if the call has several.
pub(super) fn verdict(
    location: &CallLocation<'_>,
    checked: &Checked,
    several: bool,
    json: bool,
    output: &mut Output,
) -> Result<(), Stop> {
    let verdict = if checked.accepted { "accept" } else { "reject" };
    let agrees = checked.agrees();
    if json {
        let lints = checked.lints.iter().map(ToString::to_string);
        return output.line(json!({
            "file": location.file.to_string_lossy(),
            "line": location.line,
            "id": checked.id,
            "verdict": verdict,
            "rule": checked.rule,
            "status": checked.status,
            "message": checked.message,
            "taken_by": checked
                .taken_by
                .map(|Target { soc, cann, .. }| json!({"soc": soc.name(), "cann": cann.name()})),
            "cann": checked.target.cann.name(),
            "soc": checked.target.soc.name(),
            "lints": lints.collect::<Vec<_>>(),
            "agrees": agrees,
            "other_rule": checked.other_rule,
            "taken_for": checked.taken_for,
        }));
    }
    let agreement = match agrees {
        Some(true) => "as expected",
        Some(false) => "NOT AS EXPECTED",
        None => "nothing expected",
    };
    let message = checked.message.as_deref().unwrap_or("");
    let lints: Vec<&str> = checked.lints.iter().map(|lint| lint.rule.id).collect();
    let id = named(location, &checked.id);
    let target = several.then(|| format!(" on {}", checked.target));
    let target = target.unwrap_or_default();
    let stopped = match (&checked.other_rule, &checked.stopped_by) {
        (Some(other), _) => format!("; {}", other.escape_debug()),
        (None, Some(lint)) => format!("; stopped by the lint {}", lint.escape_debug()),
        (None, None) => String::new(),
    };
    output.line(format_args!(
        "{location}{id}: {verdict}{target}, {agreement}{stopped}{}{message}{}{}{}{}",
        if message.is_empty() { "" } else { "; " },
        if lints.is_empty() { "" } else { "; lints: " },
        lints.join(", "),
        if checked.taken_for.is_some() { "; " } else { "" },
        checked.taken_for.unwrap_or_default(),
    ))
}

/// A call's name for the text after its location, in brackets; the name inside a case file is often that of the file.
pub(super) fn named(location: &CallLocation<'_>, id: &str) -> String {
    if id.is_empty() || location.to_string().ends_with(id) {
        String::new()
    } else {
        // A file may contain any name.
        format!(" ({})", id.escape_debug())
    }
}

/// Reports a file or a line that does not describe a call.
pub(super) fn unreadable(
    location: &CallLocation<'_>,
    error: &str,
    json: bool,
    output: &mut Output,
) -> Result<(), Stop> {
    if json {
        return output.line(json!({
            "file": location.file.to_string_lossy(),
            "line": location.line,
            "id": null,
            "verdict": "unreadable",
            "rule": null,
            "status": null,
            "message": error,
            "cann": null,
            "soc": null,
            "lints": [],
            "agrees": null,
        }));
    }
    output.line(format_args!("{location}: UNREADABLE; {error}"))
}

/// The counts of each area, in a table.
pub(super) fn areas(totals: &Totals, json: bool, output: &mut Output) -> Result<(), Stop> {
    if !json {
        output.line(format_args!(
            "{:<16} {:>14} {:>14} {:>14} {:>14}",
            "area", "accepted right", "accepted wrong", "rejected right", "rejected wrong",
        ))?;
    }
    for (area, counts) in &totals.areas {
        let Counts { accepted_right, accepted_wrong, rejected_right, rejected_wrong, .. } = counts;
        if json {
            output.line(json!({
                "area": area.name(),
                "accepted_right": accepted_right,
                "accepted_wrong": accepted_wrong,
                "rejected_right": rejected_right,
                "rejected_wrong": rejected_wrong,
            }))?;
        } else {
            output.line(format_args!(
                "{:<16} {accepted_right:>14} {accepted_wrong:>14} {rejected_right:>14} {rejected_wrong:>14}",
                area.name(),
            ))?;
        }
    }
    Ok(())
}

/// The counts of all calls.
pub(super) fn summary(counts: &Counts, json: bool, output: &mut Output) -> Result<(), Stop> {
    let (passed, failed) = (counts.passed(), counts.failed());
    if json {
        return output.line(json!({ "summary": {
            "passed": passed,
            "failed": failed,
            "accepted_right": counts.accepted_right,
            "accepted_wrong": counts.accepted_wrong,
            "rejected_right": counts.rejected_right,
            "rejected_wrong": counts.rejected_wrong,
            "without_expectation": counts.without_expectation(),
            "accepted_without_expectation": counts.accepted_unasked,
            "rejected_without_expectation": counts.rejected_unasked,
            "artefacts": counts.artefacts,
            "unreadable": counts.unreadable,
        }}));
    }
    output.line(format_args!(
        "accepted: {} right, {} wrong; rejected: {} right, {} wrong; without expectation: {} accepted, {} rejected; {} \
         artefacts passed over, {} unreadable",
        counts.accepted_right,
        counts.accepted_wrong,
        counts.rejected_right,
        counts.rejected_wrong,
        counts.accepted_unasked,
        counts.rejected_unasked,
        counts.artefacts,
        counts.unreadable,
    ))?;
    let unasked = match counts.without_expectation() {
        0 => String::new(),
        unasked => format!(", {unasked} without expectation"),
    };
    output.line(format_args!("{passed} passed, {failed} failed{unasked}"))
}
