//! Live calls, recorded as cases.
//!
//! Nothing is recorded unless a program asks for it, by [`record_calls`] or the variable [`RECORD_VARIABLE`]; a launch
//! then costs one look at a number more than without this module.

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

use super::{Case, CaseError, ParameterCase, Tolerance};
use crate::attention::{Inputs, Output, Plan};
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::{Stream, on_wait};

pub(crate) use live::LiveCall;
pub use recorder::{OperatorCall, Recorder};
pub(crate) use scope::{failed, launched};
pub use scope::{record_calls, tentatively};

use folder::Folder;

/// The environment variable that names a folder for calls that are refused or fail. (The emulation's C library, of the crate
/// `ascend-emu-c`, writes every call of the attention operator that it is given there; see [`Recorder`].) Each is written there when it
/// happens: as a case file (`call-001.safetensors`) with its inputs, or, where these cannot be had, as a line of shapes
/// and attributes (`call-001.jsonl`), which `ascend-attn check` reads.
///
/// Nothing is overwritten, a call that fails again in the same way is not written again, and a folder takes 256 calls, a
/// process 1 GiB of them. The variable is read once.
pub const RECORD_VARIABLE: &str = "ASCEND_RECORD";

/// A call that was recorded.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// With its data.
    Case(Box<Case>),
    /// Shapes, element types and attributes alone.
    Parameters {
        /// The call.
        call: Box<ParameterCase>,
        /// Why its data could not be had.
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

impl Case {
    /// Makes a case of a call: the plan's attributes and mask, and these inputs, copied from the device. Of a paged cache
    /// only the blocks are copied that the call reads; the block table numbers them anew. The case is for the device's chip
    /// and release, and for the version of the operator that the plan goes to. Waits for the stream.
    ///
    /// The case expects no outputs; [`Case::expecting`] adds them.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a call that no case file can hold: more than 256 MiB, a strided tensor, an element
    /// type that safetensors lacks; [`Error::Acl`]: a copy, or work on the stream, failed.
    ///
    /// ```
    /// use ascend_attention::attention::{BlockTable, Inputs};
    /// use ascend_attention::case::{Case, Tolerance, Verdict};
    /// use ascend_attention::{FusedInferAttention, Layout, Runtime, bf16};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let cache = stream.upload(&vec![bf16::ONE; 6 * 16 * 128], [6, 16, 128])?; // 6 blocks of 16 tokens
    /// let query = stream.upload(&vec![bf16::ONE; 128], [1, 1, 128])?;
    /// let table = BlockTable::from_rows(&stream, &[vec![4, 1]], 16)?;
    /// let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
    /// let call = FusedInferAttention::new(Layout::Bsh).scale(1.0 / 128f64.sqrt());
    /// let plan = call.actual_seq_lengths_kv([20]).plan_with(&inputs)?;
    /// let output = plan.launch_with::<bf16>(&stream, &inputs)?;
    ///
    /// let case = Case::record(&stream, &plan, &inputs)?;
    /// assert_eq!(case.key[0].shape(), [2, 16, 128]); // the two blocks that the call reads
    /// let case = case.expecting(&stream, &output, Tolerance::default())?;
    /// assert_eq!(case.run(&stream)?.verdict, Verdict::Passed);
    /// case.write(std::env::temp_dir().join("report.safetensors"))?;
    /// # std::fs::remove_file(std::env::temp_dir().join("report.safetensors"))?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn record(stream: &Stream, plan: &Plan, inputs: &Inputs<'_>) -> Result<Self> {
        stream.synchronize()?;
        plan.live(inputs).case().map_err(|why| {
            Error::invalid(
                "case",
                why,
                "a call that a case file can hold: use `record_calls`, which keeps shapes and attributes of others",
            )
        })
    }

    /// The case with these outputs as what is expected of it. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for outputs of an element type that cannot be compared, or with NaN; otherwise as for
    /// [`AnyTensor::download_bytes`](crate::AnyTensor::download_bytes).
    pub fn expecting<T: Element>(
        mut self,
        stream: &Stream,
        output: &Output<T>,
        tolerance: Tolerance,
    ) -> Result<Self> {
        let lse = output.softmax_lse.as_deref();
        let expected = |tensor: &crate::AnyTensor| {
            let bytes = tensor.download_bytes(stream)?;
            let expected = content::expected(tensor.desc(), bytes).ok_or_else(|| {
                Error::invalid(
                    "output",
                    tensor.desc(),
                    "an element type that can be compared: FLOAT, FLOAT16, BF16 or INT8",
                )
            })?;
            match content::nans(&expected) {
                0 => Ok(expected),
                count => Err(Error::invalid(
                    "output",
                    format_args!("{count} NaN in {}", tensor.desc()),
                    "numbers: NaN in an expected output says that an element is not specified",
                )),
            }
        };
        self.attention_out = Some(expected(&output.attention)?);
        self.softmax_lse = lse.map(expected).transpose()?;
        self.tolerance = Some(tolerance);
        Ok(self)
    }
}

/// Stands for the variable, which was not looked at yet.
const UNKNOWN: usize = 1 << (usize::BITS - 1);

/// How many want to know of calls: threads within [`record_calls`], and the folder of the variable.
static RECORDERS: AtomicUsize = AtomicUsize::new(UNKNOWN);

/// Whether anybody wants to know of calls.
#[inline]
pub(crate) fn is_on() -> bool {
    RECORDERS.load(Ordering::Relaxed) != 0 && is_on_now()
}

#[cold]
fn is_on_now() -> bool {
    folder();
    RECORDERS.load(Ordering::Relaxed) != 0
}

/// The folder that the variable names.
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

/// What a call's data are too large for.
fn too_large(bytes: u64) -> Option<String> {
    (bytes > LARGEST).then(|| format!("{bytes} bytes of data, where a case takes {LARGEST}"))
}

/// Most bytes of data in a recorded case.
const LARGEST: u64 = 256 << 20;
