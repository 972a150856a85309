//! Live calls, recorded as cases.
//!
//! Nothing is recorded unless a program requests it, by [`record_calls`] or the variable [`RECORD_VARIABLE`]; without
//! a request this module costs a launch the load of one number.

mod blocks;
mod content;
mod folder;
mod history;
mod live;
mod recorder;
mod scope;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Case, CaseError, ParameterCase};
use crate::error::Result;
use crate::runtime::on_wait;

pub(crate) use content::{expected as expected_output, nans};
pub(crate) use live::LiveCall;
pub use recorder::{OperatorCall, Recorder};
pub(crate) use scope::{failed, keeps_calls, launched, refusal_status};
pub use scope::{record_calls, tentatively};

use folder::Folder;

/// The environment variable that names a folder for calls that are refused or fail. (The emulation's C library, of the
/// crate `ascend-emu-c`, writes every call of FusedInferAttentionScore that it receives into this folder; see
/// [`Recorder`].) Each call is written when it happens: as a case file (`call-001.safetensors`) with its inputs, or,
/// where these cannot be copied, as a line of shapes and attributes (`call-001.jsonl`), which `ascend-attn check`
/// reads.
///
/// Nothing is overwritten, a call that fails again in the same way is not written again, and a folder takes 256
/// calls, a process 1 GiB of them. The variable is read once.
pub const RECORD_VARIABLE: &str = "ASCEND_RECORD";

/// A call that was recorded.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Recorded {
    /// The call with its data.
    Case(Box<Case>),
    /// Shapes, element types and attributes alone.
    Parameters {
        /// The call.
        call: Box<ParameterCase>,
        /// Why its data could not be copied.
        why: String,
    },
}

impl Recorded {
    /// Writes the call into a folder, which is made if it is not there, under a new name: `call-001.safetensors` or
    /// `call-001.jsonl`, or the next number that is free.
    ///
    /// # Errors
    /// [`CaseError::Io`]; [`CaseError::FolderFull`] if all 256 names are taken; otherwise as for [`Case::to_bytes`] and
    /// [`ParameterCase::to_json`].
    pub fn write_into(&self, folder: impl AsRef<Path>) -> Result<PathBuf, CaseError> {
        let (extension, bytes) = match self {
            Self::Case(case) => ("safetensors", case.to_bytes()?),
            Self::Parameters { call, .. } => ("jsonl", (call.to_json()? + "\n").into_bytes()),
        };
        folder::write(folder.as_ref(), extension, &bytes)
    }

    /// The case, if there is one.
    pub fn case(&self) -> Option<&Case> {
        match self {
            Self::Case(case) => Some(case),
            Self::Parameters { .. } => None,
        }
    }
}

/// Bit of [`RECORDERS`] that is set until [`RECORD_VARIABLE`] has been read.
const UNKNOWN: usize = 1 << (usize::BITS - 1);

/// Number of recorders: threads within [`record_calls`], and the folder that [`RECORD_VARIABLE`] names.
static RECORDERS: AtomicUsize = AtomicUsize::new(UNKNOWN);

/// Whether there is any recorder.
#[inline]
pub(crate) fn is_on() -> bool {
    RECORDERS.load(Ordering::Relaxed) != 0 && is_on_now()
}

#[cold]
fn is_on_now() -> bool {
    folder();
    RECORDERS.load(Ordering::Relaxed) != 0
}

/// The folder that [`RECORD_VARIABLE`] names.
fn folder() -> Option<&'static Folder> {
    static FOLDER: OnceLock<Option<Folder>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::var_os(RECORD_VARIABLE).filter(|name| !name.is_empty());
        let folder = folder.map(|name| Folder::new(name.into()));
        RECORDERS.fetch_sub(UNKNOWN - usize::from(folder.is_some()), Ordering::Relaxed);
        if folder.is_some() {
            on_wait(history::waited);
        }
        folder
    });
    folder.as_ref()
}

/// Describes the limit that a call's data exceed, a case's or the remaining `room`; `None` if they fit.
fn too_large(bytes: u64, room: u64) -> Option<String> {
    match bytes {
        _ if bytes > LARGEST => Some(format!("{bytes} bytes of data, where a case takes {LARGEST}")),
        _ if bytes > room => Some(format!("{bytes} bytes of data, and this process may write {room} more")),
        _ => None,
    }
}

/// Most bytes of data in a recorded case.
const LARGEST: u64 = 256 << 20;
