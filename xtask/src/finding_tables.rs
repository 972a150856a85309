//! The table of the emulation's findings on the book's page of rules.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Where the kinds are declared: of each what it is, its name, and what texts call it.
const KINDS: &str = "ascend-emu/src/finding_kind.rs";

const HEAD: &str = "
## Findings of the emulation

A *finding* is misuse that hardware lets pass and no rule can see before the call, since it lies in the contents of
tensors, in memory or between streams. The emulation looks for it while the program runs:
[compat and strict](environment.md#compat-and-strict) decide what becomes of it, and `ASCEND_EMU_CHECK=strict,-KIND`
leaves a kind out.

| kind | called | what it is |
|---|---|---|
";

/// The section with a row for each kind.
pub(crate) fn section(root: &Path) -> Result<String, String> {
    let source = fs::read_to_string(root.join(KINDS)).map_err(|error| format!("{KINDS}: {error}"))?;
    rows(&source).map(|rows| format!("{HEAD}{rows}"))
}

fn rows(source: &str) -> Result<String, String> {
    let list = source.split("\nkinds! {\n").nth(1).and_then(|rest| rest.split("\n}\n").next());
    let list = list.ok_or_else(|| format!("{KINDS}: there is no list of kinds"))?;
    let (mut rows, mut said) = (String::new(), Vec::new());
    for line in list.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            said.push(text);
            continue;
        }
        let quoted: Vec<_> = line.split('"').collect();
        let (&[_, name, _, title, _], false) = (&quoted[..], said.is_empty()) else {
            return Err(format!("{KINDS}: not a kind with its text, its name and its title: {line}"));
        };
        let _ = writeln!(rows, "| `{name}` | {title} | {} |", said.join(" ").trim_end_matches('.'));
        said.clear();
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_text_name_and_title() {
        let kinds =
            "macro\nkinds! {\n    /// Nobody\n    /// waits.\n    Race = \"race\", \"a race\";\n}\n\nimpl Kind {}\n";
        assert_eq!(rows(kinds).unwrap(), "| `race` | a race | Nobody waits |\n");
        let error = rows(&kinds.replace("/// ", "// ")).unwrap_err();
        assert!(error.ends_with("its title: // Nobody"), "{error}");
        assert!(rows("kinds").is_err());
    }
}
