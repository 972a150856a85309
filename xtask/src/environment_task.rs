//! `environment`: writes or checks the book's tables of environment variables.

use crate::marked::Marked;
use ascend_sys::{VARIABLES, VariableReader};
use std::fmt::Write as _;
use std::path::Path;

const TABLES: Marked<'_> = Marked { page: "docs/src/environment.md", name: "variables", task: "environment" };

/// The readers of variables, in the order of the page.
const READERS: [(VariableReader, &str); 4] = [
    (VariableReader::Library, "The library"),
    (VariableReader::Emulation, "The emulation"),
    (VariableReader::Doctor, "Reported by `ascend-attn doctor`"),
    (VariableReader::Tests, "The tests of this repository"),
];

/// Writes the tables, or compares them with those in the tree.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    TABLES.renew(root, &tables(), compare)
}

fn tables() -> String {
    let mut text = String::new();
    for (reader, title) in READERS {
        let _ = writeln!(text, "\n## {title}\n\n| variable | values | default | what it decides |\n|---|---|---|---|");
        for variable in VARIABLES.iter().filter(|variable| variable.reader == reader) {
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} |",
                variable.name, variable.values, variable.default, variable.meaning
            );
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_in_the_tree_are_current() {
        renew(&crate::root(), true).unwrap();
    }

    #[test]
    fn every_variable_stands_in_one_table() {
        let tables = tables();
        for variable in VARIABLES {
            let row = format!("\n| `{}` | ", variable.name);
            assert_eq!(tables.matches(&row).count(), 1, "{}", variable.name);
        }
    }
}
