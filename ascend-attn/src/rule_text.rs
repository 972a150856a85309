//! `ascend-attn check --explain`: one rule in full.

use std::process::ExitCode;

use ascend_attention::spec::{Level, Span};
use ascend_trianglemix::rules::every_rule;

use super::Stop;
use super::output::Output;

/// Most names that are suggested for an unknown one.
const SUGGESTIONS: usize = 4;

/// How similar (of 1) two names must be for one to be suggested for the other.
const ALIKE: f64 = 0.8;

/// Prints what a rule or lint requires, what follows if it is broken, where it comes from, and how to fix a call.
pub(super) fn print(id: &str, output: &mut Output) -> Result<ExitCode, Stop> {
    let Some(rule) = every_rule().find(|rule| rule.id == id) else {
        return Err(Stop::Trouble(unknown(id)));
    };
    let consequence = match rule.level {
        Level::Rule => format!("the operator refuses the call with status {}", rule.status),
        Level::Lint if rule.overruns => format!(
            "the operator takes the call all the same and may leave its tensors: {}; the safe layer stops it, allowing \
             it is unsafe",
            rule.reach
        ),
        Level::Lint => format!(
            "the operator takes the call all the same; the safe layer stops it unless allowed; memory: {}",
            rule.reach
        ),
        Level::HostCrash => {
            let elsewhere = match rule.status {
                0 => "takes the call".to_owned(),
                status => format!("refuses it with status {status}"),
            };
            format!(
                "the operator may end the process: {}; a host where it goes on {elsewhere}; nothing allows the call",
                rule.reach
            )
        }
        Level::Library => "this library refuses it before any operator is called".to_owned(),
        Level::Unsupported => "the operator may take the call; this library neither checks nor computes it".to_owned(),
    };
    output.line(format_args!("{id}"))?;
    output.line(format_args!("  must hold: {}", rule.holds))?;
    output.line(format_args!("  otherwise: {consequence}"))?;
    output.line(format_args!("  fix:       {}", rule.fix))?;
    if let Some(since) = rule.since {
        output.line(format_args!("  since:     {}", since.symbol()))?;
        let on = |span: Option<Span>| span.map_or("none".to_owned(), |span| span.to_string());
        output.line(format_args!("  A2, A3:    {}", on(rule.scope.a2_a3)))?;
        output.line(format_args!("  950:       {}", on(rule.scope.ascend950)))?;
    }
    output.line(format_args!("  source:    {}", rule.source))?;
    if let Some(page) = rule.hardware_reports() {
        output.line(format_args!("  hardware:  public reports, docs/src/{page}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The message for a name that no rule has.
fn unknown(id: &str) -> String {
    let near = near(id);
    if near.is_empty() {
        return format!("{id:?}: no rule or lint of this name; docs/src/rules.md lists them");
    }
    format!("{id:?}: no rule or lint of this name; near it: {}", near.join(", "))
}

/// The names most similar to `id`: those that contain it, then those spelt similarly.
fn near(id: &str) -> Vec<&'static str> {
    let id = id.to_lowercase();
    let likeness = |name: &str| {
        if !id.is_empty() && name.contains(&id) { 1.0 } else { strsim::jaro_winkler(&id, name) }
    };
    let mut near: Vec<_> =
        every_rule().map(|rule| (likeness(rule.id), rule.id)).filter(|&(likeness, _)| likeness >= ALIKE).collect();
    near.sort_by(|one, other| other.0.total_cmp(&one.0));
    near.into_iter().take(SUGGESTIONS).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::near;

    #[test]
    fn misspelt_and_partial_names_are_recognised() {
        assert_eq!(near("atten_mask.requird").first(), Some(&"atten_mask.required"));
        assert_eq!(near("Block_Table.Shape").first(), Some(&"block_table.shape"));
        assert!(near("strided").contains(&"tensor.strided"));
        assert!(near("").is_empty());
        assert!(near("qqqqqqqq").is_empty());
    }
}
