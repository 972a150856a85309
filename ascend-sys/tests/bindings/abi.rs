//! The C compiler agrees with the bindings: every constant, every size and every signature.
//!
//! The bindings are turned back into C declarations and assertions and compiled together with the headers: a
//! redeclaration of another type, or a false assertion, does not compile. When `ASCEND_HOME_PATH` names a toolkit, its
//! own headers are compared as well.

use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::path::{Path, PathBuf};

use crate::compiler::{Language, compile, headers, include};
use ascend_sys::bindings as b;
use quote::ToTokens;
use syn::{ForeignItem, ImplItem, Item, ReturnType, Type};

/// The headers that the bindings are made of.
fn bound_headers() -> Vec<String> {
    headers(&["acl", "aclnn", "aclnnop", "hccl"])
}

/// The bindings as C: redeclarations of the functions, and assertions about the constants.
struct Proof {
    functions: Vec<String>,
    constants: Vec<String>,
}

impl Proof {
    fn of_bindings() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bindings.rs");
        let file = syn::parse_file(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut proof = Self { functions: Vec::new(), constants: Vec::new() };
        for item in &file.items {
            match item {
                Item::Const(constant) => {
                    let value = constant.expr.to_token_stream().to_string();
                    proof.constant(&constant.ident.to_string(), &value);
                }
                Item::Impl(block) => {
                    for inner in &block.items {
                        let ImplItem::Const(constant) = inner else {
                            continue;
                        };
                        let value = constant.expr.to_token_stream().to_string();
                        let value = value.split_once('(').expect("a newtype").1.replace([')', ',', ' '], "");
                        proof.constant(&constant.ident.to_string(), &value);
                    }
                }
                Item::ForeignMod(block) => block.items.iter().for_each(|inner| proof.function(inner)),
                _ => {}
            }
        }
        proof
    }

    fn constant(&mut self, name: &str, value: &str) {
        self.constants.push(format!("STATIC_ASSERT({name} == {value}, \"{name}\");"));
    }

    fn function(&mut self, item: &ForeignItem) {
        let ForeignItem::Fn(function) = item else {
            return;
        };
        let result = match &function.sig.output {
            ReturnType::Default => "void".to_owned(),
            ReturnType::Type(_, ty) => c_type(ty),
        };
        let arguments: Vec<String> = function
            .sig
            .inputs
            .iter()
            .map(|argument| match argument {
                syn::FnArg::Typed(argument) => c_type(&argument.ty),
                other => panic!("{}", other.to_token_stream()),
            })
            .collect();
        let arguments = match arguments.is_empty() {
            true => "void".to_owned(),
            false => arguments.join(", "),
        };
        self.functions.push(format!("{result} {}({arguments});", function.sig.ident));
    }

    /// A source that compiles if the headers say the same.
    fn source(&self, headers: &[String], constants: bool) -> String {
        let mut source = String::new();
        for header in headers {
            writeln!(source, "#include \"{header}\"").unwrap();
        }
        source.push_str(
            "#ifdef __cplusplus\n#define STATIC_ASSERT static_assert\nextern \"C\" {\n\
             #else\n#define STATIC_ASSERT _Static_assert\n#endif\n",
        );
        let lines = match constants {
            true => [self.functions.as_slice(), self.constants.as_slice()].concat(),
            false => self.functions.clone(),
        };
        source.push_str(&lines.join("\n"));
        source.push_str("\n#ifdef __cplusplus\n}\n#endif\n");
        source
    }
}

/// A type of the bindings in C.
fn c_type(ty: &Type) -> String {
    if let Type::Ptr(pointer) = ty {
        let text = pointer.to_token_stream().to_string();
        // In C the qualifier of what is pointed to follows it.
        let constness = if text.starts_with("* const") { " const" } else { "" };
        return format!("{}{constness} *", c_type(&pointer.elem));
    }
    let text = ty.to_token_stream().to_string().replace(' ', "");
    let name = match text.as_str() {
        "::core::ffi::c_void" => "void",
        "::core::ffi::c_char" => "char",
        "i8" => "int8_t",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "f32" => "float",
        "f64" => "double",
        "bool" => "bool",
        name if name.starts_with("acl") || name.starts_with("Hccl") => name,
        other => panic!("no C type is known for {other}"),
    };
    name.to_owned()
}

fn check(language: Language, source: &str, include: &Path) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("-I{}", include.display());
    compile(language, folder.path(), source, ["-fsyntax-only", "-Werror", &path])
}

#[test]
fn the_compiler_agrees_with_every_constant_and_signature() {
    let proof = Proof::of_bindings();
    assert_eq!(proof.functions.len(), ascend_sys::FUNCTIONS.len());
    assert!(proof.constants.len() > 200, "{}", proof.constants.len());
    let source = proof.source(&bound_headers(), true);
    for language in [Language::C11, Language::Cpp11] {
        if let Err(error) = check(language, &source, &include()) {
            panic!("as {language:?}:\n{error}");
        }
    }
}

#[test]
fn the_proof_fails_on_a_wrong_constant_or_signature() {
    let proof = |function: &str, constant: &str| Proof {
        functions: vec![function.to_owned()],
        constants: vec![constant.to_owned()],
    };
    let right = ("aclError aclInit(char const *);", "STATIC_ASSERT(ACL_BF16 == 27, \"\");");
    let wrong = ("aclError aclInit(char *);", "STATIC_ASSERT(ACL_BF16 == 26, \"\");");
    for language in [Language::C11, Language::Cpp11] {
        let compiles = |proof: Proof| check(language, &proof.source(&bound_headers(), true), &include()).is_ok();
        assert!(compiles(proof(right.0, right.1)));
        assert!(!compiles(proof(right.0, wrong.1)));
        // In C++ another parameter list is another function, but not under `extern "C"`.
        assert!(!compiles(proof(wrong.0, right.1)));
    }
}

#[test]
fn sizes_and_offsets_are_those_of_c() {
    let mut source: String = bound_headers().iter().map(|header| format!("#include \"{header}\"\n")).collect();
    let mut layout = |expression: String, value: usize| {
        writeln!(source, "_Static_assert({expression} == {value}, \"{expression}\");").unwrap();
    };
    macro_rules! types {
        ($( $name:ident )*) => {
            $(
                layout(format!("sizeof({})", stringify!($name)), size_of::<b::$name>());
                layout(format!("_Alignof({})", stringify!($name)), align_of::<b::$name>());
            )*
        };
    }
    types! {
        aclError aclnnStatus aclrtStream aclrtEvent aclrtContext aclrtNotify aclrtTaskGrp aclmdlRI aclFloat16
        aclDataType aclFormat aclrtMemcpyKind aclrtMemMallocPolicy aclrtMemAttr aclrtStreamStatus aclrtEventStatus
        aclrtEventRecordedStatus aclrtEventWaitStatus aclrtRunMode aclSysParamOpt aclrtLastErrLevel
        aclmdlRICaptureMode aclmdlRICaptureStatus aclCANNPackageName aclCANNPackageVersion aclCannAttr aclDeviceInfo
        aclrtFloatOverflowMode aclrtDevResLimitType aclrtStreamAttr aclrtStreamAttrValue aclrtDevAttr aclrtUuid
        aclrtHostRegisterType aclrtMallocAttrType aclrtMallocAttrValue aclrtMallocAttribute aclrtMallocConfig
        aclrtMemLocationType aclrtMemLocation aclrtPtrAttributes aclrtMemcpyBatchAttr aclrtCmoType aclrtMemUceInfo
        aclrtErrorType aclrtAicoreErrorType aclrtMemUceInfoArray aclrtErrorInfoDetail aclrtErrorInfo
        aclrtDrvMemHandle aclrtCallback aclrtHostFunc aclrtMemHandleType aclrtMemAllocationType aclrtPhysicalMemProp
        aclrtMemGranularityOptions aclrtCallbackBlockType
        HcclComm HcclResult HcclDataType HcclReduceOp HcclSendRecvType HcclSendRecvItem HcclRootInfo HcclConfig
        HcclConfigValue HcclCommConfigInfo HcclCommConfig HcclCommConfigV11
    }
    macro_rules! fields {
        ($( $name:ident { $( $field:ident )* } )*) => {
            $($(
                // A name that Rust keeps for itself ends in an underscore there.
                let member = stringify!($field).trim_end_matches('_');
                let expression = format!("offsetof({}, {member})", stringify!($name));
                layout(expression, offset_of!(b::$name, $field));
            )*)*
        };
    }
    fields! {
        aclCANNPackageVersion { version majorVersion minorVersion releaseVersion patchVersion reserved }
        aclrtMallocAttribute { attr value }
        aclrtMallocConfig { attrs numAttrs }
        aclrtMemLocation { id type_ }
        aclrtPtrAttributes { location pageSize rsv }
        aclrtMemcpyBatchAttr { dstLoc srcLoc rsv }
        aclrtPhysicalMemProp { handleType allocationType memAttr location reserve }
        aclrtMemUceInfo { addr len reserved }
        aclrtMemUceInfoArray { arraySize memUceInfoArray }
        aclrtErrorInfo { tryRepair hasDetail reserved errorType detail }
        HcclSendRecvItem { sendRecvType buf count dataType remoteRank }
        HcclCommConfigInfo { configSize magicWord version reserved }
        HcclCommConfig {
            reserved hcclBufferSize hcclDeterministic hcclCommName hcclUdi hcclOpExpansionMode hcclRdmaTrafficClass
            hcclRdmaServiceLevel
        }
        HcclCommConfigV11 {
            hcclRdmaServiceLevel hcclWorldRankID hcclJobID aclGraphZeroCopyEnable hcclExecTimeOut hcclAlgo
            hcclRetryEnable hcclRetryParams hcclBufferName hcclQos hcclSymWinMaxMemSizePerRank hcclSqDepth
        }
    }
    layout("sizeof(bool)".to_owned(), size_of::<bool>());
    layout("sizeof(size_t)".to_owned(), size_of::<usize>());
    if let Err(error) = check(Language::C11, &source, &include()) {
        panic!("{error}");
    }
    assert_eq!(size_of::<b::aclCANNPackageVersion>(), 512);
}

#[test]
fn the_installed_toolkit_declares_the_same_functions() {
    let Some(include) = std::env::var_os("ASCEND_HOME_PATH").map(|home| PathBuf::from(home).join("include")) else {
        return;
    };
    let present: Vec<String> = bound_headers().into_iter().filter(|header| include.join(header).is_file()).collect();
    if !present.iter().any(|header| header == "acl/acl.h") {
        return;
    }
    // A function that these headers lack conflicts with nothing, and types come from those that are there.
    if let Err(error) = check(Language::Cpp11, &Proof::of_bindings().source(&present, false), &include) {
        panic!("{} differs from the bindings:\n{error}", include.display());
    }
}
