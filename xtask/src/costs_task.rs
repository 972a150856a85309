//! `costs`: writes what the program `ascend-attn` says of divisions of attention on paper into the book, or compares.

use std::path::Path;
use std::process::Command;

use crate::marked::Marked;

const TABLES: Marked<'_> = Marked { page: "docs/src/ranks-costs.md", name: "costs", task: "costs" };

pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    TABLES.renew(root, &tables(root)?, compare)
}

fn tables(root: &Path) -> Result<String, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["run", "--quiet", "--package", "ascend-attn", "--", "costs"])
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("`costs` failed: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
