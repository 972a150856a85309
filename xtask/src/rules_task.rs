//! `rules`: writes or checks the table of the contract's rules in the book.

use ascend_spec::fia::Checker;
use ascend_spec::{Level, Rule, Span, every_rule};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const PATH: &str = "docs/src/rules.md";

const HEAD: &str = "\
# Rules and lints

Made from the code by `cargo run -p xtask -- rules`; do not edit.

A *rule* is what the operator itself refuses: the safe layer refuses it before the call, the emulator inside it, with
CANN's status. A *lint* is a call that the operator takes and then ignores, misreads or overruns an argument of: the
emulator takes it too, the safe layer stops it unless the caller allows the lint by its id. A call that breaks a lint
which *overruns* may make the device read or write outside of the call's tensors: allowing that is `unsafe`. *Since* is the version of
FusedInferAttentionScore, or another operator by its name. The last column names the
entry of the operator's check list or the part of its documentation that the condition comes from; `CONTRIBUTING.md`
explains the numbering.

*A2, A3* and *Ascend 950* say in which releases of CANN a rule is asked on these products; `8.1` stands for 8.1 to 8.4, whose
checks are those of a development snapshot of late 2025. Which of the operator's checks judge a call depends on the release:

| release | unified checker | split-fuse path | decode and prefill path |
|---|---|---|---|
";

/// What stands behind the table of checkers.
const BEHIND: &str = "
*In the decode path* and *in the prefill path* in a rule mean calls that the last column judges. A *crash* is a call with which
the operator's host code ends the process, by a division by zero on x86 hosts or by a wrong pointer: the verdict is that of a host
where it goes on, and nothing allows the call.

";

/// Writes the table.
pub(crate) fn write(root: &Path) -> Result<String, String> {
    let path = root.join(PATH);
    fs::write(&path, table()).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!("wrote {}", path.display()))
}

/// Compares the table with the one in the tree.
pub(crate) fn check(root: &Path) -> Result<String, String> {
    let path = root.join(PATH);
    let old = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    if old == table() {
        Ok("the table of rules is what the code says".to_owned())
    } else {
        Err(format!(
            "{PATH} is out of date: run `cargo run -p xtask -- rules` and commit the result"
        ))
    }
}

fn table() -> String {
    let mut text = HEAD.to_owned();
    for calls in Checker::CALLS {
        let _ = writeln!(text, "| {} |", calls.join(" | "));
    }
    text.push_str(BEHIND);
    let levels = [
        (Level::Rule, "Rules"),
        (Level::Lint, "Lints"),
        (Level::HostCrash, "Crashes"),
    ];
    for (level, title) in levels {
        let rules: Vec<&Rule> = every_rule().filter(|rule| rule.level == level).collect();
        let _ = writeln!(text, "## {title} ({})\n", rules.len());
        text.push_str(match level {
            Level::Rule => {
                "| id | must hold | fix | status | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
            Level::Lint => {
                "| id | must hold | fix | memory | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
            Level::HostCrash => {
                "| id | must hold | fix | crash, and the answer where there is none | since | A2, A3 | Ascend 950 | source |\n|---|---|---|---|---|---|---|---|\n"
            }
        });
        for rule in rules {
            let status = match rule.level {
                Level::Rule => rule.status.to_string(),
                Level::Lint if rule.overruns => format!("**overruns**: {}", rule.reach),
                Level::HostCrash if rule.status == 0 => format!("{}: taken", rule.reach),
                Level::HostCrash => format!("{}: {}", rule.reach, rule.status),
                Level::Lint => format!("stays within: {}", rule.reach),
            };
            let Rule {
                id,
                holds,
                fix,
                since,
                source,
                ..
            } = rule;
            let _ = writeln!(
                text,
                "| `{id}` | {holds} | {fix} | {status} | {since} | {} | {} | {source} |",
                releases(rule.scope.a2_a3),
                releases(rule.scope.ascend950),
            );
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// The releases of a product in which a rule is asked.
fn releases(span: Option<Span>) -> String {
    span.map_or_else(|| "–".to_owned(), |span| span.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_in_the_tree_is_current() {
        check(&crate::root()).unwrap();
    }
}
