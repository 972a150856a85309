//! `bindgen`: writes or checks the generated sources of `ascend-sys`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::generate::{Generated, generate};

/// Most differing lines that are shown for each file.
const SHOWN: usize = 40;

/// Regenerates the files, in place or in memory to compare them.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    if compare { check(root) } else { write(root) }
}

fn write(root: &Path) -> Result<String, String> {
    let mut report = String::new();
    for (path, text) in sources(root)? {
        let path = root.join(path);
        fs::write(&path, &text).map_err(|error| format!("{}: {error}", path.display()))?;
        let _ = writeln!(report, "wrote {} ({} lines)", path.display(), text.lines().count());
    }
    Ok(report.trim_end().to_owned())
}

fn check(root: &Path) -> Result<String, String> {
    let mut differences = String::new();
    for (path, new) in sources(root)? {
        let full = root.join(path);
        let old = fs::read_to_string(&full).map_err(|error| format!("{}: {error}", full.display()))?;
        if old != new {
            let _ = writeln!(differences, "{path} differs from what the headers give:");
            differences.push_str(&summary(&old, &new));
        }
    }
    if differences.is_empty() {
        return Ok("the bindings are what the headers give".to_owned());
    }
    differences.push_str("run `cargo run -p xtask --features bindgen -- bindgen` and commit the result");
    Err(differences)
}

fn sources(root: &Path) -> Result<[(&'static str, String); 2], String> {
    let Generated { bindings, names } = generate(&root.join("include"), None)?;
    Ok([("ascend-sys/src/bindings.rs", bindings), ("ascend-sys/src/names.rs", names)])
}

/// The lines that only one of two texts has, by count.
fn summary(old: &str, new: &str) -> String {
    let mut balance: BTreeMap<&str, i64> = BTreeMap::new();
    for line in old.lines() {
        *balance.entry(line).or_default() -= 1;
    }
    for line in new.lines() {
        *balance.entry(line).or_default() += 1;
    }
    let only = |text: &'static str, sign: i64, source: &str| -> Vec<String> {
        let lines = source.lines().filter(|line| balance.get(line).is_some_and(|n| n * sign > 0));
        lines.map(|line| format!("  {text} {line}\n")).collect()
    };
    let lines = [only("-", -1, old), only("+", 1, new)].concat();
    match lines.len() {
        0 => "  the same lines in another order\n".to_owned(),
        n if n > SHOWN => format!("{}  ... and {} more lines\n", lines[..SHOWN].concat(), n - SHOWN),
        _ => lines.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn summary_names_what_changed() {
        assert_eq!(summary("a\nb\nc\n", "a\nB\nc\n"), "  - b\n  + B\n");
        assert_eq!(summary("a\nb\n", "b\na\n"), "  the same lines in another order\n");
        let long = "x\n".repeat(50);
        assert!(summary("", &long).ends_with("  ... and 10 more lines\n"));
    }
}
