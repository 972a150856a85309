//! `module-cycles`: looks for modules of a crate that depend on each other in a circle.

use crate::module_tree::{ModulePath, ModuleTree, Reference};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Places of an arrow that are printed.
const PLACES: usize = 3;

/// The references from a module to a sibling, by the names of both.
type Arrows = BTreeMap<(String, String), Vec<Reference>>;

/// Modules below one parent that depend on each other, with the references that make it so.
struct Cycle {
    parent: ModulePath,
    modules: BTreeSet<String>,
    arrows: Arrows,
}

/// Checks the crates named, or all of the workspace: their top-level modules, and with `nested` those inside modules.
pub(crate) fn check(root: &Path, crates: &[&str], nested: bool) -> Result<String, String> {
    let members = members(root)?;
    for name in crates {
        if !members.iter().any(|(member, _)| member == name) {
            let known: Vec<&str> = members.iter().map(|(member, _)| member.as_str()).collect();
            return Err(format!("no crate is called {name}: {}", known.join(", ")));
        }
    }
    let mut report = String::new();
    let (mut clean, mut found) = (Vec::new(), 0);
    for (name, file) in &members {
        if !crates.is_empty() && !crates.contains(&name.as_str()) {
            continue;
        }
        let references = ModuleTree::read(file)?.references();
        let cycles = cycles(&references, nested);
        if cycles.is_empty() {
            clean.push(name.as_str());
        }
        for cycle in cycles {
            found += 1;
            describe(&mut report, root, name, &cycle);
        }
    }
    if found == 0 {
        return Ok(format!("no cycles of modules in {}", clean.join(", ")));
    }
    let number = if found == 1 {
        "one cycle".to_owned()
    } else {
        format!("{found} cycles")
    };
    Err(format!(
        "{report}{number} of modules: move what both sides need to a module that neither owns"
    ))
}

/// The libraries and programs of the workspace, by the names of their packages, with their root files.
fn members(root: &Path) -> Result<Vec<(String, PathBuf)>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let mut members = Vec::new();
    for package in array(&metadata["packages"]) {
        for target in array(&package["targets"]) {
            let code = array(&target["kind"]).iter().any(|kind| {
                matches!(
                    kind.as_str(),
                    Some("lib" | "rlib" | "cdylib" | "staticlib" | "bin")
                )
            });
            if let (true, Some(name), Some(file)) =
                (code, package["name"].as_str(), target["src_path"].as_str())
            {
                members.push((name.to_owned(), PathBuf::from(file)));
            }
        }
    }
    Ok(members)
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The cycles among the top-level modules, and with `nested` among the children of each module.
fn cycles(references: &[Reference], nested: bool) -> Vec<Cycle> {
    let mut levels: BTreeMap<&[String], Arrows> = BTreeMap::new();
    for reference in references {
        let (from, to) = (&reference.from, &reference.to);
        let shared = from
            .iter()
            .zip(to)
            .take_while(|(from, to)| from == to)
            .count();
        if let (Some(child), Some(sibling)) = (from.get(shared), to.get(shared))
            && (nested || shared == 0)
        {
            levels
                .entry(&from[..shared])
                .or_default()
                .entry((child.clone(), sibling.clone()))
                .or_default()
                .push(reference.clone());
        }
    }
    levels
        .into_iter()
        .flat_map(|(parent, arrows)| {
            components(arrows.keys()).into_iter().map(move |modules| {
                let inside =
                    |(from, to): &(String, String)| modules.contains(from) && modules.contains(to);
                let arrows = arrows.iter().filter(|(ends, _)| inside(ends));
                let arrows = arrows
                    .map(|(ends, places)| (ends.clone(), places.clone()))
                    .collect();
                Cycle {
                    parent: parent.to_vec(),
                    modules: modules.clone(),
                    arrows,
                }
            })
        })
        .collect()
}

/// The strongly connected components of more than one module.
fn components<'a>(arrows: impl Iterator<Item = &'a (String, String)>) -> Vec<BTreeSet<String>> {
    let mut successors: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in arrows {
        successors.entry(from).or_default().insert(to);
    }
    let reachable: BTreeMap<&str, BTreeSet<&str>> = successors
        .keys()
        .map(|&start| {
            let mut reached = BTreeSet::new();
            let mut open = vec![start];
            while let Some(module) = open.pop() {
                for &next in successors.get(module).into_iter().flatten() {
                    if reached.insert(next) {
                        open.push(next);
                    }
                }
            }
            (start, reached)
        })
        .collect();
    let components: BTreeSet<BTreeSet<String>> = reachable
        .iter()
        .filter(|(module, reached)| reached.contains(*module))
        .map(|(module, reached)| {
            let mutual = reached.iter().filter(|other| {
                reachable
                    .get(*other)
                    .is_some_and(|reached| reached.contains(module))
            });
            mutual.map(|&other| other.to_owned()).collect()
        })
        .collect();
    components.into_iter().collect()
}

fn describe(report: &mut String, root: &Path, name: &str, cycle: &Cycle) {
    let place = [name]
        .into_iter()
        .chain(cycle.parent.iter().map(String::as_str));
    let place: Vec<&str> = place.collect();
    let modules: Vec<&str> = cycle.modules.iter().map(String::as_str).collect();
    // Writing to a string cannot fail.
    let _ = writeln!(
        report,
        "{}: {} modules depend on each other: {}",
        place.join("::"),
        modules.len(),
        modules.join(", ")
    );
    for ((from, to), references) in &cycle.arrows {
        let mut places: Vec<String> = references
            .iter()
            .map(|reference| {
                let file = reference.file.strip_prefix(root).unwrap_or(&reference.file);
                format!("{}:{}", file.display(), reference.line)
            })
            .collect();
        places.dedup();
        if places.len() > PLACES {
            let more = places.split_off(PLACES).len();
            places.push(format!("{more} more"));
        }
        let _ = writeln!(report, "  {from} -> {to}: {}", places.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(from: &str, to: &str) -> Reference {
        let path = |text: &str| text.split("::").map(str::to_owned).collect();
        Reference {
            from: path(from),
            to: path(to),
            file: PathBuf::from("f.rs"),
            line: 7,
        }
    }

    fn found(arrows: &[(&str, &str)], nested: bool) -> Vec<String> {
        let references: Vec<Reference> = arrows
            .iter()
            .map(|(from, to)| reference(from, to))
            .collect();
        cycles(&references, nested)
            .iter()
            .map(|cycle| {
                let modules: Vec<&str> = cycle.modules.iter().map(String::as_str).collect();
                format!("{}[{}]", cycle.parent.join("::"), modules.join(" "))
            })
            .collect()
    }

    #[test]
    fn a_chain_and_a_diamond_are_no_cycle() {
        assert!(found(&[("a", "b"), ("b", "d"), ("a", "c"), ("c", "d")], true).is_empty());
    }

    #[test]
    fn two_cycles_that_share_no_module_are_two() {
        let arrows = [
            ("a", "b"),
            ("b", "a"),
            ("b", "c"),
            ("c", "d"),
            ("d", "e"),
            ("e", "c"),
        ];
        assert_eq!(found(&arrows, false), ["[a b]", "[c d e]"]);
    }

    #[test]
    fn files_inside_a_module_count_for_it_and_for_their_own_level_only_if_asked() {
        let arrows = [
            ("a::x", "b::y"),
            ("b", "a"),
            ("a::x", "a::z"),
            ("a::z", "a::x"),
        ];
        assert_eq!(found(&arrows, false), ["[a b]"]);
        assert_eq!(found(&arrows, true), ["[a b]", "a[x z]"]);
    }

    #[test]
    fn a_module_may_use_its_parent_and_itself() {
        assert!(found(&[("a::x", "a"), ("a", "a::x"), ("a", "a")], true).is_empty());
    }

    #[test]
    fn the_report_names_the_arrows_and_their_places() {
        let references = [
            reference("a", "b"),
            reference("b::inner", "a"),
            reference("a", "c"),
        ];
        let mut report = String::new();
        describe(
            &mut report,
            Path::new("/"),
            "some-crate",
            &cycles(&references, false)[0],
        );
        assert_eq!(
            report,
            "some-crate: 2 modules depend on each other: a, b\n  a -> b: f.rs:7\n  b -> a: f.rs:7\n"
        );
    }
}
