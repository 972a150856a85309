//! `rules`: writes or checks the table of the contract's rules in the book.

use ascend_spec::{Level, Rule, every_rule};
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

The operator's checks are those of CANN's release of late 2025, V1 to V4 on Atlas A2 and A3, with what V5 adds on Ascend
950. What a later release takes beyond them is refused here.

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
    for (level, title) in [(Level::Rule, "Rules"), (Level::Lint, "Lints")] {
        let rules: Vec<&Rule> = every_rule().filter(|rule| rule.level == level).collect();
        let _ = writeln!(text, "## {title} ({})\n", rules.len());
        text.push_str(match level {
            Level::Rule => {
                "| id | must hold | fix | status | since | source |\n|---|---|---|---|---|---|\n"
            }
            Level::Lint => {
                "| id | must hold | fix | memory | since | source |\n|---|---|---|---|---|---|\n"
            }
        });
        for rule in rules {
            let status = match rule.level {
                Level::Rule => rule.status.to_string(),
                Level::Lint if rule.overruns => format!("**overruns**: {}", rule.reach),
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
                "| `{id}` | {holds} | {fix} | {status} | {since} | {source} |"
            );
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_in_the_tree_is_current() {
        check(&crate::root()).unwrap();
    }
}
