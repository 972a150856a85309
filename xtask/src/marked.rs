//! Generated parts of pages: the text between two marks, written or compared.

use std::fs;
use std::path::Path;

/// A part of a page that a task of this program generates.
pub(crate) struct Marked<'a> {
    /// The page, from the root of the workspace.
    pub(crate) page: &'a str,
    /// The part's name in the marks.
    pub(crate) name: &'a str,
    /// The task that generates the part.
    pub(crate) task: &'a str,
}

impl Marked<'_> {
    /// Writes the part, or compares it with the one in the tree.
    pub(crate) fn renew(&self, root: &Path, part: &str, compare: bool) -> Result<String, String> {
        let Self { page, name, task } = self;
        let old = fs::read_to_string(root.join(page)).map_err(|error| format!("{page}: {error}"))?;
        let begin = format!("<!-- {name}: made by `cargo run -p xtask -- {task}`; do not edit -->\n");
        let end = format!("<!-- end of {name} -->\n");
        let between = || {
            let (before, rest) = old.split_once(&begin)?;
            let (_, after) = rest.split_once(&end)?;
            Some(format!("{before}{begin}{part}{end}{after}"))
        };
        let lacks = || format!("{page} lacks the lines {} and {}", begin.trim(), end.trim());
        let new = between().ok_or_else(lacks)?;
        match compare {
            true if old == new => Ok(format!("the {name} of {page} are what the code says")),
            true => Err(format!(
                "the {name} of {page} are out of date: run `cargo run -p xtask -- {task}` and commit the result"
            )),
            false => {
                fs::write(root.join(page), new).map_err(|error| format!("{page}: {error}"))?;
                Ok(format!("wrote the {name} of {page}"))
            }
        }
    }
}
