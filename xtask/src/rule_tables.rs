//! The tables of rules, lints, crashes and conditions on the book's page of rules, by operator.

use ascend_spec::{Level, Rule, Span};
use ascend_trianglemix::rules::every_rule;
use std::fmt::Write as _;

const LEVELS: [(Level, &str); 5] = [
    (Level::Rule, "Rules"),
    (Level::Lint, "Lints"),
    (Level::HostCrash, "Crashes"),
    (Level::Library, "Conditions of the library"),
    (Level::Unsupported, "Calls that are not computed"),
];

/// A section for each operator, with the tables of its rules, lints and crashes, and one for the library.
pub(crate) fn sections() -> String {
    let mut operators: Vec<(String, Vec<&Rule>)> = Vec::new();
    for rule in every_rule() {
        let name = operator_name(rule);
        match operators.iter_mut().find(|(known, _)| *known == name) {
            Some((_, rules)) => rules.push(rule),
            None => operators.push((name, vec![rule])),
        }
    }
    let mut text = String::new();
    for (name, rules) in operators {
        let _ = writeln!(text, "## {name}\n");
        text.push_str(&tables(&rules));
    }
    text
}

/// The operator that a rule is about: CANN's name of the function without prefix, version and `VarLen`; one name for
/// the operators of ATB. Conditions of the library are about none.
pub(crate) fn operator_name(rule: &Rule) -> String {
    let Some(since) = rule.since else {
        return "The library".to_owned();
    };
    let name = since.symbol();
    let Some(name) = name.strip_prefix("aclnn") else {
        return "Attention of ATB".to_owned();
    };
    let name = name.trim_end_matches(|c: char| c.is_ascii_digit());
    name.trim_end_matches('V').replace("VarLen", "")
}

/// The number of rules of each level.
pub(crate) fn counted(all: &[&Rule]) -> String {
    let counts = LEVELS.iter().filter_map(|(level, title)| {
        let rules = all.iter().filter(|rule| rule.level == *level).count();
        (rules > 0).then(|| format!("{}: {rules}", title.to_lowercase()))
    });
    counts.collect::<Vec<_>>().join(", ")
}

/// The tables of the rules, lints and crashes in `all`; a level without rules has no table.
fn tables(all: &[&Rule]) -> String {
    let mut text = String::new();
    for (level, title) in LEVELS {
        let rules: Vec<&&Rule> = all.iter().filter(|rule| rule.level == level).collect();
        if rules.is_empty() {
            continue;
        }
        let _ = writeln!(text, "### {title} ({})\n", rules.len());
        text.push_str(match level {
            Level::Rule => {
                "| id | must hold | fix | status | since | A2, A3 | Ascend 950 | source |\n\
                 |---|---|---|---|---|---|---|---|\n"
            }
            Level::Lint => {
                "| id | must hold | fix | memory | since | A2, A3 | Ascend 950 | source |\n\
                 |---|---|---|---|---|---|---|---|\n"
            }
            Level::Library | Level::Unsupported => "| id | must hold | fix | crate |\n|---|---|---|---|\n",
            Level::HostCrash => {
                "| id | must hold | fix | crash, and the answer where there is none | since | A2, A3 | Ascend 950 \
                 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
        });
        for rule in rules {
            let Rule { id, holds, fix, source, .. } = rule;
            let Some(since) = rule.since else {
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
