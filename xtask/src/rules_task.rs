//! `rules`: writes or checks the table of the contract's rules in the book.

use crate::finding_tables;
use crate::operator_tables;
use crate::rule_tables;
use ascend_spec::ops::fused_infer_attention_score::Checker;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const PATH: &str = "docs/src/rules.md";

const HEAD: &str = "\
# Rules and lints

Made from the code by `cargo run -p xtask -- rules`; do not edit.

A *rule* is what the operator itself refuses: the safe layer refuses it before the call, the emulation inside it, with
CANN's status. A *lint* is a call that the operator takes and then ignores, misreads or overruns an argument of: the
emulation takes it too, the safe layer stops it unless the caller allows the lint by its id. A call that breaks a lint
which *overruns* may make the device read or write outside of the call's tensors: allowing that is `unsafe`. Each
operator has a section, FusedInferAttentionScore the first. *Since* is its version, or the function that has the rule.
The last column names the entry of the operator's check list or the part of its documentation that the condition comes
from; `CONTRIBUTING.md` explains the numbering.

*A2, A3* and *Ascend 950* say in which releases of CANN a rule is asked on these products, neither for a rule of 310P
alone; `8.1` stands for 8.1 to 8.4, whose checks are those of a development snapshot of late 2025. Which of
FusedInferAttentionScore's checkers judges a call depends on the release:

| release | unified checker | split-fuse path | decode and prefill path |
|---|---|---|---|
";

/// The text after the table of checkers.
const BEHIND: &str = "
*In the decode path* and *in the prefill path* in a rule mean calls that the last column judges. A *crash* is a call
with which the operator's host code ends the process, by a division by zero on x86 hosts or by a wrong pointer: the
verdict is that of a host where it goes on, and nothing allows the call.

The last sections are not an operator's: a *condition of the library* is what the safe layer or the serving layer
refuses before any operator is asked, for arguments of their own functions, between calls, or before there is one; a
[*finding*](#findings-of-the-emulation) is what the emulation sees while a program runs.

";

/// Writes the tables, or compares them with those in the tree.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    let path = root.join(PATH);
    let failed = |error| format!("{}: {error}", path.display());
    let new = table(root)?;
    if !compare {
        fs::write(&path, new).map_err(failed)?;
    } else if fs::read_to_string(&path).map_err(failed)? != new {
        return Err(format!("{PATH} is out of date: run `cargo run -p xtask -- rules` and commit the result"));
    }
    operator_tables::renew(root, compare)?;
    Ok(match compare {
        true => "the tables of rules and arguments are what the code says".to_owned(),
        false => format!("wrote {} and the tables of the operators' pages", path.display()),
    })
}

fn table(root: &Path) -> Result<String, String> {
    let mut text = HEAD.to_owned();
    for calls in Checker::CALLS {
        let _ = writeln!(text, "| {} |", calls.join(" | "));
    }
    text.push_str(BEHIND);
    text.push_str(&rule_tables::sections());
    text.truncate(text.trim_end().len());
    text.push('\n');
    text.push_str(&finding_tables::section(root)?);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_trianglemix::rules::every_rule;

    #[test]
    fn reports_of_hardware_stand_where_rules_point() {
        let page = fs::read_to_string(crate::root().join("docs/src/hardware.md")).unwrap();
        let part = |title: &str| {
            let kept = |c: &char| c.is_alphanumeric() || [' ', '-'].contains(c);
            let title: String = title.to_lowercase().chars().filter(kept).collect();
            format!("hardware.md#{}", title.replace(' ', "-"))
        };
        let parts: Vec<String> = page.lines().filter_map(|line| line.strip_prefix("## ")).map(part).collect();
        let pointed = every_rule().filter_map(|rule| rule.hardware_reports());
        for target in pointed {
            assert!(parts.contains(&target), "{target}: {parts:?}");
        }
    }

    #[test]
    fn the_table_in_the_tree_is_current() {
        renew(&crate::root(), true).unwrap();
    }
}
