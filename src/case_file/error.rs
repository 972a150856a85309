//! What can be wrong with a case file.

use std::io;
use std::path::PathBuf;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::{TensorDesc, UnreleasedTarget};

/// Why a file is not a case, or a case cannot be written.
///
/// A reader refuses whatever it does not know, and names it: a case that is half understood proves nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A folder, device or pipe in the place of a file.
    #[error(
        "{}: no regular file; devices and pipes may have no end: write what they give into a file",
        .0.display()
    )]
    NotAFile(PathBuf),
    /// A file with more bytes than a reader takes.
    #[error("{}: more than {most} bytes, the most that are read; divide it", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Most bytes that the reader takes.
        most: u64,
    },
    /// The bytes are not a safetensors file: truncated, a broken header, or data that does not match it.
    #[error("not a safetensors file: {0}")]
    NotSafetensors(String),
    /// A line is not a JSON object of the expected form.
    #[error("not a parameter case: {0}")]
    NotJson(String),
    /// A name appears twice in the header, so that the file is ambiguous.
    #[error("{} appears twice in the header; keep one of them", quoted(.0))]
    Duplicate(String),
    /// A metadata key that every case has is missing.
    #[error("metadata key `{0}` is missing: every case has it; add it")]
    MissingKey(&'static str),
    /// A key that the format does not have.
    #[error(
        "unknown key {}: {}",
        quoted(key),
        meant_or(
            *meant,
            "misspelt, or of a later release; the documentation of `ascend_attention::case` lists the keys of files, \
             that of its `ParameterCase` those of lines"
        )
    )]
    UnknownKey {
        /// The key.
        key: String,
        /// The key that was probably meant, judging by the name.
        meant: Option<&'static str>,
    },
    /// A metadata key that only other operators take.
    #[error("metadata key {} is no argument of {op}; leave it out", quoted(key))]
    ForeignKey {
        /// The key.
        key: String,
        /// The operator of the case.
        op: &'static str,
    },
    /// The file is some other kind of safetensors file.
    #[error("unknown format {}; a case has `ascend-attention-case`", quoted(.0))]
    UnknownFormat(String),
    /// A version of the format that this crate does not read.
    #[error("unknown version {} of the case format; this crate reads version 1", quoted(.0))]
    UnknownVersion(String),
    /// An operator that this crate does not know.
    #[error("unknown op {}; this crate knows {}", quoted(.0), operators())]
    UnknownOp(String),
    /// A case of another operator than FusedInferAttentionScore, where a case of that operator is read.
    #[error("a case of {0}, where one of fused_infer_attention_score is needed: choose another file")]
    OtherOp(&'static str),
    /// An argument that the version of the case does not have.
    #[error(
        "version {version} of the operator has no argument `{argument}`: leave it out, or let `op_version` be one \
         that has it"
    )]
    UnreadArgument {
        /// The argument.
        argument: &'static str,
        /// The version, counted from 1.
        version: u8,
    },
    /// A list that is both one tensor and several.
    #[error("there are both `{0}` and `{0}.0`, `{0}.1`, ...: one tensor is `{0}`, a list has numbers")]
    MixedList(String),
    /// A metadata value that does not have the form that its key needs.
    #[error("metadata key `{key}` is {value:?}; it takes {expected}")]
    Malformed {
        /// The key.
        key: &'static str,
        /// Its value, shortened.
        value: String,
        /// The form that the key takes.
        expected: &'static str,
    },
    /// A tensor that the operator does not have.
    #[error(
        "unknown tensor {}: {}",
        quoted(name),
        meant_or(
            *meant,
            "the operator has no parameter of this name; its parameters are named in snake case, without `Optional`, \
             as the operator's `DeclaredOperator::parameters` lists them"
        )
    )]
    UnknownTensor {
        /// The name.
        name: String,
        /// The tensor that was probably meant, judging by the name.
        meant: Option<&'static str>,
    },
    /// A tensor that the call needs is not in the file.
    #[error(
        "tensor `{0}` is missing: a call has every tensor that its operator requires, `atten_mask_kind` `tensor` an \
         atten_mask, and a list all its numbers from 0 on; add it, or let `expect` be `reject` if it has to be missing"
    )]
    MissingTensor(String),
    /// An element type that the format and CANN do not share.
    #[error(
        "tensor {} is {}; allowed are the element types that safetensors and CANN share: F16 and BF16, F32 and F64, \
         I8 to I64, U8 to U64, BOOL and the 8-bit floats",
        quoted(tensor),
        quoted(dtype)
    )]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// Expected outputs are F32, whatever the operator's output is, and chosen positions I32.
    #[error("expected output `{tensor}` is {dtype}; expected outputs are F32, chosen positions I32: convert it")]
    ExpectedDtype {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: String,
    },
    /// A shape that no tensor of CANN has, or that does not match the data.
    #[error("tensor {} has {}; allowed: {allowed}", quoted(tensor), shortened(given))]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape and size.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// NaN in an output that is to be expected, where it would stand for "not specified" and let any number pass.
    #[error(
        "{count} NaN in {tensor}: in an expected output NaN says that an element is not specified; see to the inputs \
         that make it, or expect nothing of this output"
    )]
    NanOutput {
        /// The output.
        tensor: &'static str,
        /// Number of NaN elements.
        count: usize,
    },
    /// A folder of recorded calls that takes no more calls.
    #[error("{}: there are {most} recorded calls, the most that a folder takes; move them elsewhere", path.display())]
    FolderFull {
        /// The folder.
        path: PathBuf,
        /// Most calls that the folder takes.
        most: usize,
    },
    /// The release of the case does not know its chip.
    #[error("`soc` and `cann`: {0}")]
    Unreleased(#[from] UnreleasedTarget),
    /// Two parts of the case that exclude each other.
    #[error("{0}")]
    Contradiction(&'static str),
}

impl CaseError {
    /// Refuses an argument that a version of the operator, counted from 1, does not have.
    pub(super) fn check_unread(arguments: &AnyArguments<TensorDesc>, version: u8) -> Result<(), Self> {
        match arguments.unread(version) {
            None => Ok(()),
            Some(parameter) => Err(Self::UnreadArgument { argument: parameter.name, version }),
        }
    }

    pub(super) fn malformed(key: &'static str, value: &str, expected: &'static str) -> Self {
        Self::Malformed { key, value: shortened(value), expected }
    }
}

/// The operators that cases may be of.
fn operators() -> String {
    let names = DeclaredOperator::ALL.iter();
    let names: Vec<_> = names.map(|operator| format!("`{}`", operator.name())).collect();
    names.join(", ")
}

impl CaseError {
    /// An unknown key, where the keys of `known` can stand.
    pub(super) fn unknown_key(key: &str, known: impl Iterator<Item = &'static str>) -> Self {
        Self::UnknownKey { key: key.to_owned(), meant: meant(key, known) }
    }

    /// A tensor that the operator does not have.
    pub(super) fn unknown_tensor(name: &str, operator: DeclaredOperator) -> Self {
        let tensors = operator.parameters().filter(|known| known.kind.is_tensor());
        Self::UnknownTensor { name: name.to_owned(), meant: meant(name, tensors.map(|known| known.name)) }
    }
}

/// The known name that an unknown one was probably meant to be: equal to it or nearly so, whatever the case of its
/// letters and whether words are divided by underscores.
fn meant(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    const MOST_EDITS: usize = 2;
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    let own = plain(shortened(name).as_str());
    let near = known.map(|known| (strsim::damerau_levenshtein(&own, &plain(known)), known));
    // In a short name, two edits make any other one.
    let near = near.filter(|(edits, known)| *edits <= MOST_EDITS && *edits < known.len() / 2);
    Some(near.min_by_key(|(edits, _)| *edits)?.1)
}

/// Asks for what was probably meant, or says what helps.
fn meant_or(meant: Option<&'static str>, help: &str) -> String {
    match meant {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => help.to_owned(),
    }
}

/// A name from a file, which may hold anything.
fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text))
}

/// The beginning of a text that may be as long as a hostile file makes it.
pub(super) fn shortened(text: &str) -> String {
    const LONGEST: usize = 80;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
