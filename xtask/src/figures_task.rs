//! `figures`: draws the book's figures with the program `ascend-attn`, or checks that they are current.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const FOLDER: &str = "docs/src/figures";
const LIST: &str = "docs/src/figures/figures.txt";

/// Draws every figure of the list, or compares.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<String, String> {
    if compare { check(root) } else { write(root) }
}

fn write(root: &Path) -> Result<String, String> {
    let folder = root.join(FOLDER);
    let figures = list(root)?;
    for (name, arguments) in &figures {
        draw(root, arguments, &folder.join(format!("{name}.svg")))?;
    }
    Ok(format!("drew {} figures in {}", figures.len(), folder.display()))
}

/// Draws every figure into another folder and compares, and reports figures that no page shows or that no entry
/// draws, and chapters that are missing.
fn check(root: &Path) -> Result<String, String> {
    let figures = list(root)?;
    let drawn = std::env::temp_dir().join(format!("figure-{}.svg", std::process::id()));
    for (name, arguments) in &figures {
        draw(root, arguments, &drawn)?;
        let known = root.join(FOLDER).join(format!("{name}.svg"));
        let same = read(&drawn)? == read(&known)?;
        let _ = fs::remove_file(&drawn);
        if !same {
            return Err(format!(
                "{} is out of date: run `cargo run -p xtask -- figures` and commit the result",
                known.display()
            ));
        }
    }
    let names: BTreeSet<String> = figures.into_iter().map(|(name, _)| name).collect();
    let folder = entries(&root.join(FOLDER))?;
    let in_folder = folder.iter().filter_map(|name| name.strip_suffix(".svg"));
    let in_folder: BTreeSet<String> = in_folder.map(str::to_owned).collect();
    if let Some(name) = in_folder.symmetric_difference(&names).next() {
        return Err(format!("{name}: in {FOLDER} or in {LIST}, but not in both"));
    }
    let mut pages = String::new();
    for page in entries(&root.join("docs/src"))? {
        if page.ends_with(".md") {
            pages.push_str(&read(&root.join("docs/src").join(page))?);
        }
    }
    let summary = read(&root.join("docs/src/SUMMARY.md"))?;
    let chapters = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for chapter in chapters {
        read(&root.join("docs/src").join(chapter))?;
    }
    let unseen = |name: &&String| !pages.contains(&format!("(figures/{name}.svg)"));
    match names.iter().find(unseen) {
        Some(name) => Err(format!("no page of the book shows the figure {name}")),
        None => Ok(format!("{} figures are what the program draws", names.len())),
    }
}

/// Name and arguments of each figure.
fn list(root: &Path) -> Result<Vec<(String, Vec<String>)>, String> {
    let text = read(&root.join(LIST))?;
    let figure = |line: &str| {
        let (name, arguments) = line.split_once(": ").ok_or_else(|| format!("{LIST}: no `: ` in `{line}`"))?;
        let arguments = arguments.split_whitespace().map(str::to_owned).collect();
        Ok((name.to_owned(), arguments))
    };
    text.lines().map(figure).collect()
}

fn draw(root: &Path, arguments: &[String], to: &Path) -> Result<(), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(root)
        .args(["run", "--quiet", "--package", "ascend-attn", "--", "mask"])
        .args(arguments)
        .arg("--svg")
        .arg(to)
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`mask {}` failed: {status}", arguments.join(" "))) }
}

fn entries(folder: &Path) -> Result<Vec<String>, String> {
    let trouble = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(trouble)? {
        names.push(entry.map_err(trouble)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}
