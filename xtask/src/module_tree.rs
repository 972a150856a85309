//! The modules of a crate as its source files declare them, and the paths by which one refers to another.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Expr, Item, ItemMod, ItemUse, Lit, Meta, UseTree};

/// The path of a module from the crate's root, which is the empty path.
pub(crate) type ModulePath = Vec<String>;

/// One mention of a module, or of an item in it, in the code of another module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reference {
    /// The module whose code contains the path.
    pub from: ModulePath,
    /// The module in which the path's item is declared.
    pub to: ModulePath,
    pub file: PathBuf,
    pub line: usize,
}

/// A path in the source, converted to begin at the crate's root.
struct Mention {
    from: ModulePath,
    path: Vec<String>,
    file: PathBuf,
    line: usize,
}

/// The names that a module declares.
#[derive(Default)]
struct Declared {
    items: BTreeSet<String>,
    /// Names that `use` imports, with their paths from the crate's root.
    imports: BTreeMap<String, Vec<String>>,
    /// The modules whose names a `use` with `*` imports.
    globs: Vec<Vec<String>>,
}

/// The modules of a crate without those of its tests.
#[derive(Default)]
pub(crate) struct ModuleTree {
    modules: BTreeMap<ModulePath, Declared>,
    mentions: Vec<Mention>,
}

impl ModuleTree {
    /// Reads the crate whose root is `file`, and the files that its `mod` items name.
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        let folder = file.parent().unwrap_or(Path::new("")).to_path_buf();
        tree.read_file(file, Vec::new(), &folder)?;
        Ok(tree)
    }

    /// Reads one source file, the body of `module`, whose child modules are in `folder`.
    fn read_file(&mut self, file: &Path, module: ModulePath, folder: &Path) -> Result<(), String> {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        self.read_items(&parsed.items, file, module, folder)
    }

    fn read_items(&mut self, items: &[Item], file: &Path, module: ModulePath, folder: &Path) -> Result<(), String> {
        self.modules.entry(module.clone()).or_default();
        for item in items {
            if item_attributes(item).iter().any(only_for_tests) {
                continue;
            }
            match item {
                Item::Mod(child) => self.read_module(child, file, &module, folder)?,
                Item::Use(import) => self.declare_imports(import, &module),
                _ => {
                    if let Some(name) = item_name(item) {
                        let declared = self.modules.entry(module.clone()).or_default();
                        declared.items.insert(name);
                    }
                }
            }
            if !matches!(item, Item::Mod(_)) {
                self.find_mentions(item.to_token_stream(), file, &module);
            }
        }
        Ok(())
    }

    fn read_module(&mut self, child: &ItemMod, file: &Path, parent: &[String], folder: &Path) -> Result<(), String> {
        let name = child.ident.to_string();
        if name == "tests" {
            return Ok(());
        }
        let module = joined(parent, &name);
        if let Some((_, items)) = &child.content {
            return self.read_items(items, file, module, &folder.join(&name));
        }
        if let Some(path) = child.attrs.iter().find_map(stated_path) {
            let target = file.parent().unwrap_or(Path::new("")).join(path);
            let folder = target.parent().unwrap_or(Path::new("")).to_path_buf();
            return self.read_file(&target, module, &folder);
        }
        let own_folder = folder.join(&name);
        let beside = folder.join(format!("{name}.rs"));
        let target = if beside.exists() { beside } else { own_folder.join("mod.rs") };
        self.read_file(&target, module, &own_folder)
    }

    fn declare_imports(&mut self, import: &ItemUse, module: &[String]) {
        let declared = self.modules.entry(module.to_vec()).or_default();
        flatten(&import.tree, &mut Vec::new(), &mut |path, name| {
            let Some(path) = from_root(path, module) else {
                return;
            };
            match name {
                Some(name) => {
                    declared.imports.insert(name, path);
                }
                None => declared.globs.push(path),
            }
        });
    }

    /// Finds the paths that begin with `crate` or `super` in code, including macros' tokens.
    fn find_mentions(&mut self, tokens: TokenStream, file: &Path, module: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            if let Some(behind) = behind_test_item(&tokens, at) {
                at = behind;
                continue;
            }
            match &tokens[at] {
                TokenTree::Ident(word) if *word == "crate" || *word == "super" => {
                    let begins = at == 0 || !is_path_separator(&tokens, at.saturating_sub(2));
                    if begins {
                        let line = word.span().start().line;
                        let mut paths = Vec::new();
                        read_path(&tokens[at..], &mut Vec::new(), &mut paths);
                        self.mentions.extend(paths.into_iter().filter_map(|path| {
                            Some(Mention {
                                path: from_root(&path, module)?,
                                from: module.to_vec(),
                                file: file.to_path_buf(),
                                line,
                            })
                        }));
                    }
                }
                TokenTree::Group(group) => self.find_mentions(group.stream(), file, module),
                _ => {}
            }
            at += 1;
        }
    }

    /// Every path in the crate's code, with the module that declares the item it names.
    pub(crate) fn references(&self) -> Vec<Reference> {
        let mut found: Vec<Reference> = self
            .mentions
            .iter()
            .map(|mention| Reference {
                from: mention.from.clone(),
                to: self.declaring_module(&mention.path, 0),
                file: mention.file.clone(),
                line: mention.line,
            })
            .collect();
        found.sort();
        found.dedup();
        found
    }

    /// The module that declares the item that `path` names; re-exports are followed.
    fn declaring_module(&self, path: &[String], depth: usize) -> ModulePath {
        let mut module: ModulePath = Vec::new();
        for (index, segment) in path.iter().enumerate() {
            let child = joined(&module, segment);
            if self.modules.contains_key(&child) {
                module = child;
                continue;
            }
            // A chain of re-exports as long as this is a circle.
            if depth < 16
                && let Some(target) = self.imported(&module, segment, depth)
            {
                let target: Vec<String> = target.into_iter().chain(path[index + 1..].to_vec()).collect();
                return self.declaring_module(&target, depth + 1);
            }
            break;
        }
        module
    }

    /// The path of a name that `module` does not declare itself, by the module's imports.
    fn imported(&self, module: &[String], name: &str, depth: usize) -> Option<Vec<String>> {
        let declared = self.modules.get(module)?;
        if declared.items.contains(name) {
            return None;
        }
        if let Some(path) = declared.imports.get(name) {
            return (path != &joined(module, name)).then(|| path.clone());
        }
        declared.globs.iter().find_map(|glob| {
            let target = self.declaring_module(glob, depth + 1);
            let source = self.modules.get(&target)?;
            let known = source.items.contains(name)
                || source.imports.contains_key(name)
                || self.modules.contains_key(&joined(&target, name));
            (known && target != module).then(|| joined(&target, name))
        })
    }
}

fn joined(module: &[String], name: &str) -> ModulePath {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

/// The path from the crate's root, if its first segment does not show that it leaves this crate. A path that begins
/// with a name is read as one from the module itself: if the name is another crate's, the path leads to no module.
fn from_root(path: &[String], module: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some(module.iter().chain(rest).cloned().collect()),
        "super" => {
            let (_, parent) = module.split_last()?;
            if rest.first().is_some_and(|next| next == "super") {
                from_root(rest, parent)
            } else {
                Some(parent.iter().chain(rest).cloned().collect())
            }
        }
        _ => Some(module.iter().chain(path).cloned().collect()),
    }
}

/// Calls `found` with each path of a `use` and the name that it imports, or none for `*`.
fn flatten(tree: &UseTree, path: &mut Vec<String>, found: &mut impl FnMut(&[String], Option<String>)) {
    match tree {
        UseTree::Path(step) => {
            path.push(step.ident.to_string());
            flatten(&step.tree, path, found);
            path.pop();
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, path, found);
            }
        }
        UseTree::Glob(_) => found(path, None),
        UseTree::Name(name) if name.ident == "self" => {
            let last = path.last().cloned();
            found(path, last);
        }
        UseTree::Name(name) => {
            path.push(name.ident.to_string());
            found(path, Some(name.ident.to_string()));
            path.pop();
        }
        UseTree::Rename(rename) => {
            path.push(rename.ident.to_string());
            found(path, Some(rename.rename.to_string()));
            path.pop();
        }
    }
}

/// Reads the path that begins at the first token; one that ends in a group becomes one path for each member.
fn read_path(tokens: &[TokenTree], path: &mut Vec<String>, paths: &mut Vec<Vec<String>>) {
    let length = path.len();
    let mut at = 0;
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(word)) => {
                if *word != "self" || path.is_empty() {
                    path.push(word.to_string());
                }
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace && at > 0 => {
                let members: Vec<TokenTree> = group.stream().into_iter().collect();
                for member in members.split(|token| is_punctuation(token, ',')) {
                    if !member.is_empty() {
                        read_path(member, path, paths);
                    }
                }
                path.truncate(length);
                return;
            }
            _ => break,
        }
        if !is_path_separator(tokens, at + 1) {
            break;
        }
        at += 3;
    }
    paths.push(path.clone());
    path.truncate(length);
}

/// The index after an item that `#[cfg(test)]` at token `at` compiles only for tests; `None` if there is no such
/// attribute.
fn behind_test_item(tokens: &[TokenTree], at: usize) -> Option<usize> {
    if !is_punctuation(tokens.get(at)?, '#') {
        return None;
    }
    let TokenTree::Group(attribute) = tokens.get(at + 1)? else {
        return None;
    };
    let meta = syn::parse2::<Meta>(attribute.stream()).ok()?;
    if !meta_only_for_tests(&meta) {
        return None;
    }
    let rest = &tokens[at + 2..];
    let end = rest.iter().position(|token| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        _ => is_punctuation(token, ';') || is_punctuation(token, ','),
    });
    Some(end.map_or(tokens.len(), |end| at + 2 + end + 1))
}

fn is_punctuation(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punctuation) if punctuation.as_char() == character)
}

fn is_path_separator(tokens: &[TokenTree], at: usize) -> bool {
    [at, at + 1].iter().all(|&at| tokens.get(at).is_some_and(|token| is_punctuation(token, ':')))
}

fn only_for_tests(attribute: &Attribute) -> bool {
    meta_only_for_tests(&attribute.meta)
}

/// Whether an attribute is `cfg(test)`, or `cfg(all(...))` with `test` among the conditions.
fn meta_only_for_tests(meta: &Meta) -> bool {
    let Meta::List(list) = meta else { return false };
    if !list.path.is_ident("cfg") && !list.path.is_ident("all") {
        return false;
    }
    list.parse_args_with(syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated).is_ok_and(
        |conditions| {
            conditions.iter().any(|condition| {
                condition.path().is_ident("test")
                    || (condition.path().is_ident("all") && meta_only_for_tests(condition))
            })
        },
    )
}

/// The file that `#[path = "..."]` states.
fn stated_path(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    let Expr::Lit(value) = &pair.value else {
        return None;
    };
    match &value.lit {
        Lit::Str(text) if pair.path.is_ident("path") => Some(text.value()),
        _ => None,
    }
}

fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn item_name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The references of a crate with these files, as lines `from -> to`.
    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let tree = ModuleTree::read(&folder.path().join(files[0].0)).unwrap();
        let mut arrows: Vec<String> = tree
            .references()
            .iter()
            .map(|reference| format!("{} -> {}", reference.from.join("::"), reference.to.join("::")))
            .collect();
        arrows.dedup();
        arrows
    }

    #[test]
    fn groups_renames_and_globs_of_use_are_read() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { use crate::{b::{self, B as Other}, c::*, d}; }
             mod b { pub struct B; } mod c {} mod d {}",
        )]);
        assert_eq!(found, ["a -> b", "a -> c", "a -> d"]);
    }

    #[test]
    fn paths_in_types_expressions_and_macros_are_read() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { fn f(x: crate::b::B) { crate::c::g(); println!(\"{}\", crate::d::h()); } }
             mod e { macro_rules! m { () => { $crate::b::g() }; } }
             mod b { pub struct B; } mod c {} mod d {}",
        )]);
        assert_eq!(found, ["a -> b", "a -> c", "a -> d", "e -> b"]);
    }

    #[test]
    fn super_reaches_siblings_and_the_root() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { use super::b::B; mod inner { use super::super::c::C; use super::Own; } struct Own; }
             mod b { pub struct B; } mod c { pub struct C; }",
        )]);
        assert_eq!(found, ["a -> b", "a::inner -> a", "a::inner -> c"]);
    }

    #[test]
    fn names_re_exported_by_the_root_lead_to_the_module_that_declares_them() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { use crate::{B, C as D}; fn f() -> crate::E { crate::here() } }
             mod b { mod inner { pub struct B; pub struct E; } pub use inner::{B, E}; }
             mod c { pub struct C; }
             pub use b::*; pub use c::C; pub fn here() {}",
        )]);
        assert_eq!(found, ["a -> ", "a -> b::inner", "a -> c"]);
    }

    #[test]
    fn code_of_tests_draws_no_arrow() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { #[cfg(test)] use crate::b::B; #[cfg(test)] mod own { use crate::b::B; }
                     #[cfg(all(test, unix))] fn f() { crate::b::g() }
                     struct S; impl S { #[cfg(test)] fn g() { crate::b::g() } fn h() { crate::c::g() } }
                     mod tests { use crate::b::B; } }
             mod b { pub struct B; } mod c {}
             #[cfg(not(test))] mod d { use crate::c::C; }",
        )]);
        assert_eq!(found, ["a -> c", "d -> c"]);
    }

    #[test]
    fn modules_are_found_in_files_folders_and_stated_paths() {
        let found = arrows(&[
            ("lib.rs", "mod a; mod b; #[path = \"elsewhere/other.rs\"] mod c;"),
            ("a.rs", "mod inner;"),
            ("a/inner.rs", "\nuse crate::b;"),
            ("b/mod.rs", "mod deep;"),
            ("b/deep.rs", "use crate::c;"),
            ("elsewhere/other.rs", "use crate::a;"),
        ]);
        assert_eq!(found, ["a::inner -> b", "b::deep -> c", "c -> a"]);
    }

    #[test]
    fn a_circle_of_re_exports_ends() {
        let found = arrows(&[(
            "lib.rs",
            "mod a { pub use crate::b::X; } mod b { pub use crate::a::X; } mod c { use crate::a::X; }",
        )]);
        assert!(found.iter().any(|arrow| arrow.starts_with("c -> ")), "{found:?}");
    }
}
