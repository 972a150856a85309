//! Generator of the raw bindings and of the function table.
//!
//! One file, two users: `cargo run -p xtask --features bindgen -- bindgen` writes the checked-in sources with it, and the build script
//! of `ascend-sys` runs it under feature `bindgen`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::rc::Rc;

use bindgen::callbacks::{DiscoveredItem, DiscoveredItemId, IntKind, ParseCallbacks, SourceLocation};
use quote::ToTokens;
use syn::{FnArg, ForeignItem, ImplItem, Item, Pat, ReturnType, Type};

/// The headers of runtime, operator calls and collectives that are read, relative to a folder `include`: each after
/// those that it includes.
const BASE_HEADERS: [&str; 8] = [
    "acl/acl_base.h",
    "acl/acl_rt.h",
    "acl/acl_mdl.h",
    "acl/acl.h",
    "aclnn/aclnn_base.h",
    "aclnn/acl_meta.h",
    "hccl/hccl_types.h",
    "hccl/hccl.h",
];

/// The folder of the headers of operators; all are read.
const OPERATOR_HEADERS: &str = "aclnnop";

/// What our headers say of a function that the libraries of CANN 8.1.RC1 need not export: a program linked against those
/// libraries looks it up when it runs instead.
const OPTIONAL: &str = "Since a release after 8.1.";

/// The generated sources.
pub(crate) struct Generated {
    /// `bindings.rs`: types, constants, `extern "C"` functions and the macro over all functions.
    pub(crate) bindings: String,
    /// `names.rs`: CANN's names of enumerators and of statuses.
    pub(crate) names: String,
}

/// Reads our headers under `include`, and those of an installed toolkit under `toolkit` when given. What the toolkit
/// declares wins; what it lacks comes from ours.
pub(crate) fn generate(include: &Path, toolkit: Option<&Path>) -> Result<Generated, String> {
    let headers = headers(include)?;
    let ours = Bound::read(include, &headers, Flavour::Ours)?;
    let optional = optional(&ours.items);
    let mut items = match toolkit {
        Some(toolkit) => {
            let names = ours.items.iter().flat_map(names_of);
            let names = names.filter(|name| !name.contains("::")).collect();
            let theirs = Bound::read(toolkit, &headers, Flavour::Toolkit(names))?;
            merge(theirs.items, &ours.items)
        }
        None => ours.items,
    };
    items.iter_mut().for_each(make_opaque);
    let known: BTreeSet<String> = items.iter().flat_map(names_of).collect();
    let functions = functions(&items, &ours.headers, &known)?;
    Ok(Generated {
        names: print_names(&items),
        bindings: format!("{}\n{}", print_items(items), print_table(&functions, &optional)),
    })
}

/// The headers that are read: those of runtime, operator calls and collectives, then those of our operators by name.
fn headers(include: &Path) -> Result<Vec<String>, String> {
    let folder = include.join(OPERATOR_HEADERS);
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut operators = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_str().filter(|name| name.ends_with(".h"));
        operators.extend(name.map(|name| format!("{OPERATOR_HEADERS}/{name}")));
    }
    operators.sort_unstable();
    let base = BASE_HEADERS.map(str::to_owned);
    Ok(base.into_iter().chain(operators).collect())
}

/// The functions whose documentation says that they are [`OPTIONAL`].
fn optional(items: &[Item]) -> BTreeSet<String> {
    let blocks = items.iter().filter_map(|item| match item {
        Item::ForeignMod(block) => Some(&block.items),
        _ => None,
    });
    let functions = blocks.flatten().filter_map(|item| match item {
        ForeignItem::Fn(function) => Some(function),
        _ => None,
    });
    let optional = functions.filter(|function| {
        let mut docs = function.attrs.iter().filter(|attr| attr.path().is_ident("doc"));
        docs.any(|doc| doc.to_token_stream().to_string().contains(OPTIONAL))
    });
    optional.map(|function| function.sig.ident.to_string()).collect()
}

enum Flavour {
    /// Our headers, as C, with their comments.
    Ours,
    /// A toolkit's headers, as C++ since not all are C, restricted to these names, without their comments.
    Toolkit(BTreeSet<String>),
}

/// What bindgen made of a set of headers.
struct Bound {
    items: Vec<Item>,
    /// Which header declares a function.
    headers: BTreeMap<String, String>,
}

impl Bound {
    fn read(include: &Path, headers: &[String], flavour: Flavour) -> Result<Self, String> {
        let mut source = String::new();
        for header in headers {
            if include.join(header).is_file() {
                let _ = writeln!(source, "#include \"{header}\"");
            }
        }
        if source.is_empty() {
            return Err(format!("no ACL headers under {}", include.display()));
        }
        let rust = bindgen::RustTarget::stable(85, 0).map_err(|error| format!("Rust 1.85: {error}"))?;
        let found = Rc::new(RefCell::new(BTreeMap::new()));
        let mut builder = bindgen::Builder::default()
            .header_contents("ascend.h", &source)
            .clang_arg(format!("-I{}", include.display()))
            .parse_callbacks(Box::new(Watch(Rc::clone(&found))))
            .rust_target(rust)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .use_core()
            .ctypes_prefix("::core::ffi")
            .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
            .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
            .impl_debug(true)
            .layout_tests(false)
            .merge_extern_blocks(true)
            .disable_header_comment()
            .formatter(bindgen::Formatter::None);
        builder = match flavour {
            // A fixed target and no system headers, so that the output does not depend on the machine that generates
            // it. The ABI is the same on every target that CANN has: LP64, little-endian.
            Flavour::Ours => builder
                .clang_args(["-x", "c", "-std=c99", "-ffreestanding"])
                .clang_arg("--target=x86_64-unknown-linux-gnu")
                .generate_comments(true)
                .allowlist_function("[aA]cl.*|Hccl.*")
                .allowlist_type("acl.*|Hccl.*")
                .allowlist_var("ACL.*|HCCL.*|.*_MAX_LENGTH"),
            Flavour::Toolkit(names) => {
                let names = names.into_iter().collect::<Vec<_>>().join("|");
                builder
                    .clang_args(["-x", "c++", "-std=c++11"])
                    .generate_comments(false)
                    .allowlist_function(&names)
                    .allowlist_type(&names)
                    .allowlist_var(&names)
            }
        };
        let bound = builder.generate().map_err(|error| error.to_string())?;
        let file = syn::parse_file(&bound.to_string()).map_err(|error| error.to_string())?;
        let headers = found.take();
        Ok(Self { items: file.items, headers })
    }
}

/// Notes the header of each function and types the flags.
#[derive(Debug)]
struct Watch(Rc<RefCell<BTreeMap<String, String>>>);

impl ParseCallbacks for Watch {
    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        const FLAGS: [&str; 7] = [
            "ACL_EVENT_",
            "ACL_STREAM_",
            "ACL_CONTINUE_ON_FAILURE",
            "ACL_STOP_ON_FAILURE",
            "ACL_HOST_REG_",
            "ACL_NOTIFY_",
            "HCCL_",
        ];
        let flag = FLAGS.iter().any(|start| name.starts_with(start));
        flag.then_some(IntKind::U32)
    }

    fn new_item_found(&self, _id: DiscoveredItemId, item: DiscoveredItem, location: Option<&SourceLocation>) {
        if let (DiscoveredItem::Function { final_name }, Some(location)) = (item, location)
            && let Some(file) = &location.file_name
        {
            self.0.borrow_mut().insert(final_name, file.clone());
        }
    }
}

/// The names that an item of a bindings file defines; constants of an enumeration are `Type::NAME`.
fn names_of(item: &Item) -> Vec<String> {
    match item {
        Item::Const(item) => vec![item.ident.to_string()],
        Item::Struct(item) => vec![item.ident.to_string()],
        Item::Type(item) => vec![item.ident.to_string()],
        Item::Union(item) => vec![item.ident.to_string()],
        Item::Impl(item) => {
            let owner = item.self_ty.to_token_stream();
            let constants = item.items.iter().filter_map(|inner| match inner {
                ImplItem::Const(constant) => Some(format!("{owner}::{}", constant.ident)),
                _ => None,
            });
            constants.collect()
        }
        Item::ForeignMod(block) => block
            .items
            .iter()
            .filter_map(|inner| match inner {
                ForeignItem::Fn(function) => Some(function.sig.ident.to_string()),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// All of `theirs`, then what only `ours` define.
fn merge(mut theirs: Vec<Item>, ours: &[Item]) -> Vec<Item> {
    let known: BTreeSet<String> = theirs.iter().flat_map(names_of).collect();
    let types: BTreeSet<String> = known.iter().filter(|n| !n.contains("::")).cloned().collect();
    for item in ours {
        match item {
            Item::ForeignMod(block) => {
                let mut block = block.clone();
                block
                    .items
                    .retain(|item| matches!(item, ForeignItem::Fn(f) if !known.contains(&f.sig.ident.to_string())));
                if !block.items.is_empty() {
                    theirs.push(Item::ForeignMod(block));
                }
            }
            Item::Impl(block) => {
                let owner = block.self_ty.to_token_stream();
                let mut block = block.clone();
                block.items.retain(
                    |item| matches!(item, ImplItem::Const(c) if !known.contains(&format!("{owner}::{}", c.ident))),
                );
                if !block.items.is_empty() {
                    theirs.push(Item::Impl(block));
                }
            }
            other => {
                if names_of(other).iter().all(|name| !types.contains(name)) {
                    theirs.push(other.clone());
                }
            }
        }
    }
    theirs
}

/// Gives an opaque C structure a form that cannot be copied, moved out, sent or shared by mistake.
fn make_opaque(item: &mut Item) {
    let Item::Struct(structure) = item else {
        return;
    };
    let opaque = structure.fields.iter().all(|field| field.ident.as_ref().is_some_and(|name| name == "_unused"));
    if !opaque || structure.fields.len() != 1 {
        return;
    }
    let docs = structure.attrs.iter().filter(|attr| attr.path().is_ident("doc"));
    let name = &structure.ident;
    *item = syn::parse_quote! {
        #(#docs)*
        #[repr(C)]
        #[derive(Debug)]
        pub struct #name {
            _data: [u8; 0],
            _marker: ::core::marker::PhantomData<(*mut u8, ::core::marker::PhantomPinned)>,
        }
    };
}

/// One function of the table.
struct Function {
    name: String,
    library: &'static str,
    arguments: Vec<(String, String)>,
    result: String,
}

fn functions(
    items: &[Item],
    headers: &BTreeMap<String, String>,
    known: &BTreeSet<String>,
) -> Result<Vec<Function>, String> {
    let mut functions = Vec::new();
    for item in items {
        let Item::ForeignMod(block) = item else {
            continue;
        };
        for inner in &block.items {
            let ForeignItem::Fn(function) = inner else {
                continue;
            };
            let name = function.sig.ident.to_string();
            let header = headers.get(&name).ok_or_else(|| format!("no header of ours declares {name}"))?;
            let mut arguments = Vec::new();
            for argument in &function.sig.inputs {
                let FnArg::Typed(argument) = argument else {
                    return Err(format!("{name} has a self argument"));
                };
                let Pat::Ident(pattern) = &*argument.pat else {
                    return Err(format!("{name} has an argument without a name"));
                };
                arguments.push((pattern.ident.to_string(), print_type(&argument.ty, known)?));
            }
            let result = match &function.sig.output {
                ReturnType::Default => "()".to_owned(),
                ReturnType::Type(_, ty) => print_type(ty, known)?,
            };
            let library = library_of(header)?;
            functions.push(Function { name, library, arguments, result });
        }
    }
    // The order of the headers, whichever headers declared a function.
    let order = |function: &Function| match function.library {
        "Ascendcl" => 0,
        "Nnopbase" => 1,
        "Opapi" => 2,
        _ => 3,
    };
    functions.sort_by_key(order);
    Ok(functions)
}

/// The library that exports what a header declares.
fn library_of(header: &str) -> Result<&'static str, String> {
    let folder = Path::new(header).parent().and_then(Path::file_name).and_then(|name| name.to_str());
    match folder {
        Some("acl") => Ok("Ascendcl"),
        Some("aclnn") => Ok("Nnopbase"),
        Some("aclnnop") => Ok("Opapi"),
        Some("hccl") => Ok("Hccl"),
        _ => Err(format!("no library is known for {header}")),
    }
}

/// A type as it is written in the table: names of the bindings get their full path.
fn print_type(ty: &Type, known: &BTreeSet<String>) -> Result<String, String> {
    match ty {
        Type::Ptr(pointer) => {
            let inner = print_type(&pointer.elem, known)?;
            let mutability = match pointer.mutability {
                syn::PointerMutability::Mut(_) => "mut",
                syn::PointerMutability::Const(_) => "const",
            };
            Ok(format!("*{mutability} {inner}"))
        }
        Type::Path(path) => {
            let text = path.to_token_stream().to_string().replace(' ', "");
            match known.contains(&text) {
                true => Ok(format!("$crate::bindings::{text}")),
                false => Ok(text),
            }
        }
        other => Err(format!("the table cannot express {}", other.to_token_stream())),
    }
}

const NOTICE: &str =
    "// Generated by `cargo run -p xtask --features bindgen -- bindgen` from the headers; edit those, not this.\n\n";

fn print_items(items: Vec<Item>) -> String {
    let file = syn::File { shebang: None, frontmatter: None, attrs: Vec::new(), items };
    format!("{NOTICE}{}", prettyplease::unparse(&file))
}

fn print_table(functions: &[Function], optional: &BTreeSet<String>) -> String {
    let mut text = String::from(
        "/// Hands every function of the C ABI to another macro.\n\
         ///\n\
         /// `for_each_function! { callback }` expands to `callback! { ... }` with one entry a function:\n\
         /// `[Library] fn name(argument: Type, ...) -> Type;`, where `Library` is a variant of [`Library`](crate::Library)\n\
         /// and the types carry full paths. A macro with this pattern takes them:\n\
         ///\n\
         /// ```\n\
         /// macro_rules! count {\n\
         ///     ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {\n\
         ///         [$( stringify!($name) ),*].len()\n\
         ///     };\n\
         /// }\n\
         /// assert!(ascend_sys::for_each_function! { count } > 100);\n\
         /// ```\n\
         #[macro_export]\n\
         macro_rules! for_each_function {\n    ($($callback:ident)::+) => {\n        $($callback)::+! {\n",
    );
    for function in functions {
        let Function { name, library, result, .. } = function;
        let arguments: Vec<String> = function.arguments.iter().map(|(name, ty)| format!("{name}: {ty}")).collect();
        let line = format!("            [{library}] fn {name}({}) -> {result};\n", arguments.join(", "));
        if line.len() <= 121 {
            text.push_str(&line);
        } else {
            let _ = writeln!(text, "            [{library}] fn {name}(");
            let _ = writeln!(text, "                {}", arguments.join(",\n                "));
            let _ = writeln!(text, "            ) -> {result};");
        }
    }
    text.push_str("        }\n    };\n}\n\n");
    text.push_str(
        "/// The functions that the linker binds; those that CANN 8.1 need not export are left open.\n\
         #[cfg(feature = \"link\")]\n\
         pub(crate) fn linked() -> crate::Functions {\n    crate::Functions {\n",
    );
    for Function { name, .. } in functions {
        let _ = match optional.contains(name) {
            true => writeln!(text, "        {name}: None,"),
            false => writeln!(text, "        {name}: Some({name}),"),
        };
    }
    text.push_str("    }\n}\n");
    text
}

/// The enumerators of each enumeration, and the constants of each space of statuses.
fn print_names(items: &[Item]) -> String {
    let mut enumerations: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in items.iter().flat_map(names_of) {
        if let Some((owner, constant)) = name.split_once("::") {
            let constants = enumerations.entry(owner.to_owned()).or_default();
            constants.push(constant.to_owned());
        }
    }
    let mut text = NOTICE.to_owned();
    text.push_str("use crate::bindings as b;\n\n");
    for (owner, constants) in &enumerations {
        let _ = writeln!(text, "impl crate::Enumeration for b::{owner} {{");
        text.push_str("    fn code(self) -> i64 {\n        i64::from(self.0)\n    }\n\n");
        text.push_str("    fn name(self) -> Option<&'static str> {\n");
        text.push_str("        #[allow(unreachable_patterns, clippy::match_overlapping_arm, reason = \"two names of one value: the first counts\")]\n");
        text.push_str("        match self {\n");
        for constant in constants {
            let _ = writeln!(text, "            b::{owner}::{constant} => Some(\"{constant}\"),");
        }
        text.push_str("            _ => None,\n        }\n    }\n}\n\n");
    }
    for (function, statuses, prefixes) in [
        ("acl_error_name", "an `aclError`", ["ACL_SUCCESS", "ACL_ERROR_"]),
        ("aclnn_status_name", "an `aclnnStatus`", ["ACLNN_SUCCESS", "ACLNN_ERR_"]),
    ] {
        let _ = writeln!(text, "/// CANN's name for {statuses}; `None` for codes that the headers do not name.");
        let _ = writeln!(text, "pub const fn {function}(code: i32) -> Option<&'static str> {{");
        text.push_str("    #[allow(unreachable_patterns, clippy::match_overlapping_arm, reason = \"two names of one value: the first counts\")]\n");
        text.push_str("    match code {\n");
        for name in items.iter().flat_map(names_of) {
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                let _ = writeln!(text, "        b::{name} => Some(\"{name}\"),");
            }
        }
        text.push_str("        _ => None,\n    }\n}\n\n");
    }
    format!("{}\n", text.trim_end())
}
