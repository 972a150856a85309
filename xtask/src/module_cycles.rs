//! `module-cycles`: finds modules of a crate that depend on each other.

use crate::module_tree::{ModulePath, ModuleTree, Reference};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Most references of one module to another that are printed.
const PLACES: usize = 3;

/// The references from a module to a sibling, by the names of both.
type Dependencies = BTreeMap<(String, String), Vec<Reference>>;

/// Modules below one parent that depend on each other, with the references between them.
struct Cycle {
    parent: ModulePath,
    modules: BTreeSet<String>,
    dependencies: Dependencies,
}

/// A library or a program of the workspace.
struct Member {
    package: String,
    /// The name in reports: the package's, for a program beside a library with its own name too.
    name: String,
    /// The root file of the crate.
    file: PathBuf,
}

/// Checks the packages named, or all of the workspace: the top-level modules of each of their crates, and with
/// `nested` the modules inside modules.
pub(crate) fn check(root: &Path, crates: &[&str], nested: bool) -> Result<String, String> {
    let members = members(root)?;
    for name in crates {
        if !members.iter().any(|member| member.package == *name) {
            let known: BTreeSet<&str> = members.iter().map(|of| of.package.as_str()).collect();
            let known: Vec<&str> = known.into_iter().collect();
            return Err(format!("no crate is called {name}; there are {}", known.join(", ")));
        }
    }
    let mut report = String::new();
    let (mut clean, mut found) = (Vec::new(), 0);
    for Member { package, name, file } in &members {
        if !crates.is_empty() && !crates.contains(&package.as_str()) {
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
        return Ok(format!("no module cycles in {}", clean.join(", ")));
    }
    let number = if found == 1 { "one module cycle".to_owned() } else { format!("{found} module cycles") };
    Err(format!("{report}{number}: move what the modules share to a module that depends on none of them"))
}

/// The libraries and programs of the workspace with their root files.
fn members(root: &Path) -> Result<Vec<Member>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    Ok(crates_of(&metadata))
}

/// The crates that `cargo metadata` lists, without tests, examples and build scripts.
fn crates_of(metadata: &Value) -> Vec<Member> {
    let mut members = Vec::new();
    for package in array(&metadata["packages"]) {
        let Some(name) = package["name"].as_str() else {
            continue;
        };
        let kinds = |target: &Value| -> Vec<String> {
            let kinds = array(&target["kind"]).iter().filter_map(Value::as_str);
            kinds.map(str::to_owned).collect()
        };
        let is_library =
            |kind: &String| matches!(kind.as_str(), "lib" | "rlib" | "cdylib" | "staticlib" | "proc-macro");
        let targets = array(&package["targets"]);
        let has_library = targets.iter().any(|of| kinds(of).iter().any(is_library));
        for target in targets {
            let kinds = kinds(target);
            let library = kinds.iter().any(is_library);
            if !library && !kinds.iter().any(|kind| kind == "bin") {
                continue;
            }
            let (Some(program), Some(file)) = (target["name"].as_str(), target["src_path"].as_str()) else {
                continue;
            };
            members.push(Member {
                package: name.to_owned(),
                name: match has_library && !library {
                    true => format!("{name} (program {program})"),
                    false => name.to_owned(),
                },
                file: PathBuf::from(file),
            });
        }
    }
    members
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The cycles among the top-level modules, and with `nested` among the children of each module.
fn cycles(references: &[Reference], nested: bool) -> Vec<Cycle> {
    let mut levels: BTreeMap<&[String], Dependencies> = BTreeMap::new();
    for reference in references {
        let (from, to) = (&reference.from, &reference.to);
        let shared = from.iter().zip(to).take_while(|(from, to)| from == to).count();
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
        .flat_map(|(parent, dependencies)| {
            components(dependencies.keys()).into_iter().map(move |modules| {
                let inside = |(from, to): &(String, String)| modules.contains(from) && modules.contains(to);
                let dependencies = dependencies.iter().filter(|(ends, _)| inside(ends));
                let dependencies = dependencies.map(|(ends, places)| (ends.clone(), places.clone())).collect();
                Cycle { parent: parent.to_vec(), modules: modules.clone(), dependencies }
            })
        })
        .collect()
}

/// The strongly connected components of more than one module.
fn components<'a>(dependencies: impl Iterator<Item = &'a (String, String)>) -> Vec<BTreeSet<String>> {
    let mut successors: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in dependencies {
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
            let mutual =
                reached.iter().filter(|other| reachable.get(*other).is_some_and(|reached| reached.contains(module)));
            mutual.map(|&other| other.to_owned()).collect()
        })
        .collect();
    components.into_iter().collect()
}

fn describe(report: &mut String, root: &Path, name: &str, cycle: &Cycle) {
    let place = [name].into_iter().chain(cycle.parent.iter().map(String::as_str));
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
    for ((from, to), references) in &cycle.dependencies {
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
        Reference { from: path(from), to: path(to), file: PathBuf::from("f.rs"), line: 7 }
    }

    fn found(dependencies: &[(&str, &str)], nested: bool) -> Vec<String> {
        let references: Vec<Reference> = dependencies.iter().map(|(from, to)| reference(from, to)).collect();
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
        let dependencies = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "c")];
        assert_eq!(found(&dependencies, false), ["[a b]", "[c d e]"]);
    }

    #[test]
    fn files_inside_a_module_count_for_it_and_for_their_own_level_only_if_asked() {
        let dependencies = [("a::x", "b::y"), ("b", "a"), ("a::x", "a::z"), ("a::z", "a::x")];
        assert_eq!(found(&dependencies, false), ["[a b]"]);
        assert_eq!(found(&dependencies, true), ["[a b]", "a[x z]"]);
    }

    #[test]
    fn a_module_may_use_its_parent_and_itself() {
        assert!(found(&[("a::x", "a"), ("a", "a::x"), ("a", "a")], true).is_empty());
    }

    #[test]
    fn a_program_beside_a_library_is_told_apart() {
        let target = |kind: &str, name: &str| serde_json::json!({ "kind": [kind], "name": name, "src_path": format!("{name}.rs") });
        let metadata = serde_json::json!({ "packages": [
            { "name": "both", "targets": [target("lib", "both"), target("bin", "tool"), target("test", "t")] },
            { "name": "alone", "targets": [target("bin", "alone"), target("custom-build", "build")] },
        ] });
        let members = crates_of(&metadata);
        let names: Vec<_> = members.iter().map(|of| (&*of.package, &*of.name)).collect();
        assert_eq!(names, [("both", "both"), ("both", "both (program tool)"), ("alone", "alone")]);
    }

    #[test]
    fn the_report_names_the_dependencies_and_their_places() {
        let references = [reference("a", "b"), reference("b::inner", "a"), reference("a", "c")];
        let mut report = String::new();
        describe(&mut report, Path::new("/"), "some-crate", &cycles(&references, false)[0]);
        assert_eq!(report, "some-crate: 2 modules depend on each other: a, b\n  a -> b: f.rs:7\n  b -> a: f.rs:7\n");
    }
}
