//! The tables of rules, lints, crashes and conditions that the book's pages show.

use ascend_spec::{Level, Rule, Span};
use std::fmt::Write as _;

/// The tables of the rules, lints and crashes in `all`; a level without rules has no table.
pub(crate) fn tables(all: &[&Rule]) -> String {
    let mut text = String::new();
    let levels = [
        (Level::Rule, "Rules"),
        (Level::Lint, "Lints"),
        (Level::HostCrash, "Crashes"),
        (Level::Library, "Conditions of the library"),
        (Level::Unsupported, "Calls that are not computed"),
    ];
    for (level, title) in levels {
        let rules: Vec<&&Rule> = all.iter().filter(|rule| rule.level == level).collect();
        if rules.is_empty() {
            continue;
        }
        let _ = writeln!(text, "## {title} ({})\n", rules.len());
        text.push_str(match level {
            Level::Rule => {
                "| id | must hold | fix | status | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
            Level::Lint => {
                "| id | must hold | fix | memory | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
            Level::Library | Level::Unsupported => {
                "| id | must hold | fix | crate |\n|---|---|---|---|\n"
            }
            Level::HostCrash => {
                "| id | must hold | fix | crash, and the answer where there is none | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
        });
        for rule in rules {
            let Some(since) = rule.since else {
                let Rule {
                    id,
                    holds,
                    fix,
                    source,
                    ..
                } = rule;
                let _ = writeln!(text, "| `{id}` | {holds} | {fix} | `{source}` |");
                continue;
            };
            let status = match rule.level {
                Level::Rule => rule.status.to_string(),
                Level::Lint if rule.overruns => format!("**overruns**: {}", rule.reach),
                Level::HostCrash if rule.status == 0 => format!("{}: taken", rule.reach),
                Level::HostCrash => format!("{}: {}", rule.reach, rule.status),
                Level::Lint => format!("stays within: {}", rule.reach),
                Level::Library | Level::Unsupported => String::new(),
            };
            let Rule {
                id,
                holds,
                fix,
                source,
                ..
            } = rule;
            let reports = rule.hardware_reports();
            let reports = reports.map_or_else(String::new, |page| format!("; [hardware]({page})"));
            let _ = writeln!(
                text,
                "| `{id}` | {holds} | {fix} | {status} | {since} | {} | {} | {source}{reports} |",
                releases(rule.scope.a2_a3),
                releases(rule.scope.ascend950),
            );
        }
        text.push('\n');
    }
    text
}

/// The releases of a product in which a rule is checked.
fn releases(span: Option<Span>) -> String {
    span.map_or_else(|| "–".to_owned(), |span| span.to_string())
}
