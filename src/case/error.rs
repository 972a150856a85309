//! What can be wrong with a case file.

use std::io;
use std::path::PathBuf;

/// Why a file is not a case, or a case cannot be written.
///
/// A reader refuses what it does not know by name: a case that is half understood proves nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are not a safetensors file: truncated, a broken header, or data that does not match it.
    #[error("not a safetensors file: {0}")]
    NotSafetensors(String),
    /// A line is not a JSON object of the expected form.
    #[error("not a parameter case: {0}")]
    NotJson(String),
    /// A name appears twice in the header, so that the file says two things.
    #[error("{0:?} appears twice in the header")]
    Duplicate(String),
    /// A metadata key that every case has is missing.
    #[error("metadata key `{0}` is missing")]
    MissingKey(&'static str),
    /// A metadata key that the format does not have.
    #[error("unknown metadata key {0:?}")]
    UnknownKey(String),
    /// A metadata key that only other operators take.
    #[error("metadata key `{key}` is no argument of {op}")]
    ForeignKey {
        /// The key.
        key: String,
        /// The operator of the case.
        op: &'static str,
    },
    /// The file is some other kind of safetensors file.
    #[error("unknown format {0:?}; a case has `ascend-attention-case`")]
    UnknownFormat(String),
    /// A version of the format that this release does not read.
    #[error("unknown version {0:?} of the case format; this release reads version 1")]
    UnknownVersion(String),
    /// An operator that this release does not know.
    #[error("unknown op {0:?}; this release knows `fused_infer_attention_score`")]
    UnknownOp(String),
    /// A metadata value that cannot be read as what the key needs.
    #[error("metadata key `{key}` is {value:?}; it takes {expected}")]
    Malformed {
        /// The key.
        key: &'static str,
        /// Its value, shortened.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
    /// A tensor that the operator does not have.
    #[error("unknown tensor {0:?}: the operator has no parameter of this name")]
    UnknownTensor(String),
    /// A tensor that the call needs is not in the file.
    #[error("tensor `{0}` is missing")]
    MissingTensor(String),
    /// An element type that the format and CANN do not share.
    #[error("tensor `{tensor}` is {dtype}, which has no counterpart on the other side")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// Expected outputs are F32, whatever the operator's output is.
    #[error("expected output `{tensor}` is {dtype}; expected outputs are F32")]
    ExpectedDtype {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: String,
    },
    /// A shape that no tensor of CANN has, or that does not match the data.
    #[error("tensor `{tensor}` has {given}; allowed: {allowed}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape and size.
        given: String,
        /// What would be right.
        allowed: String,
    },
    /// A folder of recorded calls takes no more.
    #[error("{}: there are {most} recorded calls, the most that a folder takes; move them elsewhere", path.display())]
    FolderFull {
        /// The folder.
        path: PathBuf,
        /// How many calls it takes.
        most: usize,
    },
    /// Two parts of the case that exclude each other.
    #[error("{0}")]
    Contradiction(&'static str),
}

impl CaseError {
    pub(super) fn malformed(key: &'static str, value: &str, expected: &'static str) -> Self {
        Self::Malformed {
            key,
            value: shortened(value),
            expected,
        }
    }
}

/// The beginning of a text that may be as long as a hostile file makes it.
pub(super) fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
