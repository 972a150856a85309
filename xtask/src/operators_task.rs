//! `operators`: writes or checks the guide's list of the PyTorch functions that call the small operators of the
//! emulation.

use crate::marked::Marked;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const TABLE: &str = "ascend-emu/src/glue/table.rs";
const LIST: Marked<'_> = Marked { page: "docs/src/python.md", name: "operators", task: "operators" };

/// Writes the list, or compares it with the one in the tree.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    let table = fs::read_to_string(root.join(TABLE)).map_err(|error| format!("{TABLE}: {error}"))?;
    LIST.renew(root, &list(&table)?, compare)
}

/// A paragraph for each group of the table: its title, and what calls the operators in it.
fn list(table: &str) -> Result<String, String> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut callers = None;
    for line in table.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            // The text after a colon or a semicolon explains why a caller needs the operator, and is left out.
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
        renew(&crate::root(), true).unwrap();
    }

    #[test]
    fn operators_without_a_caller_are_named() {
        let table = "// Sums.\n/// `torch.sum`.\nfn aclnnReduceSum(out: Out) = sum;\nfn aclnnMean(out: Out) = mean;";
        let error = list(table).unwrap_err();
        assert!(error.ends_with("nothing says what calls aclnnMean(out: Out) = mean;"), "{error}");
        let callers = list("// Sums.\n/// `torch.sum`.\nfn aclnnReduceSum(out: Out) = sum;").unwrap();
        assert_eq!(callers, "\n*Sums*: `torch.sum`.\n\n");
    }
}
