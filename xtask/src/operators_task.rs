//! `operators`: writes or checks the guide's list of what in PyTorch calls the small operators of the emulation.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const TABLE: &str = "ascend-emu/src/glue/table.rs";
const GUIDE: &str = "docs/src/python.md";
const BEGIN: &str = "<!-- operators: made by `cargo run -p xtask -- operators`; do not edit -->\n";
const END: &str = "<!-- end of operators -->\n";

/// Writes the list.
pub(crate) fn write(root: &Path) -> Result<String, String> {
    let new = renewed(&read(root, GUIDE)?, &read(root, TABLE)?)?;
    fs::write(root.join(GUIDE), new).map_err(|error| format!("{GUIDE}: {error}"))?;
    Ok(format!("wrote the list of operators in {GUIDE}"))
}

/// Compares the list with the one in the tree.
pub(crate) fn check(root: &Path) -> Result<String, String> {
    let old = read(root, GUIDE)?;
    if renewed(&old, &read(root, TABLE)?)? == old {
        Ok("the list of operators is what their table says".to_owned())
    } else {
        Err(format!(
            "the list of operators in {GUIDE} is out of date: run `cargo run -p xtask -- operators` and commit the result"
        ))
    }
}

fn read(root: &Path, path: &str) -> Result<String, String> {
    fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"))
}

/// The guide with the list in the place of the one between the marks.
fn renewed(guide: &str, table: &str) -> Result<String, String> {
    let between = || {
        let (before, rest) = guide.split_once(BEGIN)?;
        let (_, after) = rest.split_once(END)?;
        Some((before, after))
    };
    let (before, after) = between().ok_or_else(|| {
        format!(
            "{GUIDE} lacks the lines {} and {}",
            BEGIN.trim(),
            END.trim()
        )
    })?;
    Ok(format!("{before}{BEGIN}{}{END}{after}", list(table)?))
}

/// A paragraph for each group of the table: its title, and what calls the operators in it.
fn list(table: &str) -> Result<String, String> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut callers = None;
    for line in table.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            // What a caller needs it for stands behind a colon or a semicolon.
            callers = text.trim_end_matches('.').split([':', ';']).next();
        } else if let Some(title) = line.strip_prefix("// ") {
            groups.push((title.trim_end_matches('.'), Vec::new()));
        } else if let Some(operator) = line.strip_prefix("fn aclnn") {
            let (Some(callers), Some((_, group))) = (callers.take(), groups.last_mut()) else {
                return Err(format!("{TABLE}: nothing says what calls aclnn{operator}"));
            };
            if !group.contains(&callers) {
                group.push(callers);
            }
        }
    }
    let mut text = String::new();
    for (title, callers) in groups {
        let _ = writeln!(text, "\n*{title}*: {}.", callers.join("; "));
    }
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_in_the_guide_is_current() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn operators_without_a_caller_are_named() {
        let table = "// Sums.\n/// `torch.sum`.\nfn aclnnReduceSum(out: Out) = sum;\nfn aclnnMean(out: Out) = mean;";
        let error = list(table).unwrap_err();
        assert!(
            error.ends_with("nothing says what calls aclnnMean(out: Out) = mean;"),
            "{error}"
        );
        let callers =
            list("// Sums.\n/// `torch.sum`.\nfn aclnnReduceSum(out: Out) = sum;").unwrap();
        assert_eq!(callers, "\n*Sums*: `torch.sum`.\n\n");
    }
}
