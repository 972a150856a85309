//! A folder for the calls that reach an implementation of the operator.

use std::path::PathBuf;

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::fused_infer_attention_score::{Argument, FiaCall, Parameter, Version};
use ascend_spec::{DType, Level, Target, TensorDesc, Violation};

use super::RECORD_VARIABLE;
use super::content::{Content, Labels, Read};
use super::folder::Folder;
use crate::case_file::{Case, CaseError, Expect, Tolerance};

/// A call of the operator as an implementation of its C functions sees it.
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "a function cannot be shown")]
pub struct OperatorCall<'a> {
    /// Tensors and attributes.
    pub call: &'a FiaCall<'a>,
    /// The version of the operator that was called.
    pub version: Version,
    /// The product and release that the implementation stands for.
    pub target: Target,
    /// The name of the chip.
    pub soc_name: &'a str,
    /// Copies bytes of a tensor, from the given number of bytes after the tensor's base address on.
    pub read: &'a dyn Fn(Argument, usize, &mut [u8]),
}

/// Writes the calls that an implementation of the operator receives into a folder, as [`RECORD_VARIABLE`] does for
/// the calls of a program that uses this crate.
///
/// A call that ran becomes a case with its computed outputs as the expected ones, within a few units in the last
/// place of the output's element type: [`Case::launch`] replays it. A refused one becomes a case that expects the
/// refusal; its tensors hold zeros, since it was refused before they were read. Where no case can hold a call, its
/// shapes and attributes become a line ([`ParameterCase`](crate::case::ParameterCase)).
///
/// Nothing is overwritten. A folder takes 256 calls, a process writes 1 GiB, a case has 256 MiB of data at most; the
/// same refusal is written once.
#[derive(Debug)]
pub struct Recorder {
    folder: Folder,
}

impl Recorder {
    /// A recorder into a folder, which is created with the first call.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Folder::new(folder.into()) }
    }

    /// A recorder into the folder that [`RECORD_VARIABLE`] names, if it is set.
    pub fn from_environment() -> Option<Self> {
        let folder = std::env::var_os(RECORD_VARIABLE).filter(|name| !name.is_empty());
        folder.map(|name| Self::new(PathBuf::from(name)))
    }

    /// Writes a call that ran, or that failed while it ran. Its outputs must still be readable.
    ///
    /// # Errors
    /// An error of the folder, which cannot be written, or is full. The recorder then writes no other call, and
    /// ignores later calls without an error.
    pub fn ran(&self, call: &OperatorCall<'_>, outcome: Result<(), &str>) -> Result<(), CaseError> {
        if self.folder.is_closed() {
            return Ok(());
        }
        let labels = match outcome {
            Ok(()) => Labels { name: "recorded", note: "", accepted: Some(true) },
            Err(error) => Labels { name: "failed", note: error, accepted: None },
        };
        self.write(call, &labels, |content, case| {
            content.admits_outputs(case)?;
            outcome.map_or(Ok(()), |()| content.expect_outputs(case, tolerance(call)))
        })
    }

    /// Writes a call that was refused before any work was done.
    ///
    /// # Errors
    /// As for [`Recorder::ran`].
    pub fn refused(&self, call: &OperatorCall<'_>, message: &str) -> Result<(), CaseError> {
        if self.folder.is_closed() {
            return Ok(());
        }
        let violation = refusal(call);
        let labels = Labels {
            name: violation.as_ref().map_or("refused", |found| found.rule.id),
            note: message,
            accepted: violation.as_ref().map(|_| false),
        };
        let unread = OperatorCall { read: &|_, _, to| to.fill(0), ..*call };
        let known = unread.with_content(|content| content.parameters(&labels));
        if known.to_json().is_ok_and(|line| !self.folder.takes(&line)) {
            return Ok(());
        }
        self.write(&unread, &labels, |content, case| {
            case.note += "; the inputs are zeros: it was refused before they were read";
            // The outputs of a refused call need not follow from its inputs: it may be refused for that.
            let Some(violation) = &violation else { return content.admits_outputs(case) };
            case.expect_rule = Some(violation.rule.id.to_owned());
            case.expect = Expect::Reject { status: Some(violation.status()) };
            Ok(())
        })
    }

    /// Writes a call as a case that `finish` completes, or as a line.
    fn write(
        &self,
        call: &OperatorCall<'_>,
        labels: &Labels<'_>,
        finish: impl FnOnce(&Content<'_>, &mut Case) -> Result<(), String>,
    ) -> Result<(), CaseError> {
        let room = Ok(self.folder.room());
        let recorded = call.with_content(|content| content.recorded(room, labels, finish));
        let stored = self.folder.store(&recorded).map(drop);
        if stored.is_err() {
            self.folder.close();
        }
        stored
    }
}

impl OperatorCall<'_> {
    /// Calls `body` with the call and a function that reads its tensors.
    fn with_content<R>(&self, body: impl FnOnce(&Content<'_>) -> R) -> R {
        let mut arguments = self.call.to_arguments();
        if !arguments.softmax_lse_flag {
            // The operator ignores a log-sum-exp that the call does not request.
            arguments.softmax_lse = None;
        }
        let read: &Read<'_> = &|argument, start, to| {
            let parameter = Parameter::from_name(argument.parameter.name);
            let parameter = parameter.ok_or("a parameter of another operator")?;
            let argument = Argument::element(parameter, argument.index);
            let desc = self.call.tensor(argument);
            // The tensor is packed: its first element is where the byte range begins.
            let base = desc.and_then(TensorDesc::byte_range).map_or(0, |range| range.start);
            let base = usize::try_from(base).map_err(|error| error.to_string())?;
            (self.read)(argument, base.saturating_add(start), to);
            Ok(())
        };
        body(&Content {
            soc_name: Some(self.soc_name),
            target: Some(self.target),
            version: self.version.number(),
            portable_since: None,
            arguments: AnyArguments::FusedInferAttentionScore(arguments),
            has_memory: &|_| true,
            before: read,
            after: read,
        })
    }
}

/// The rule that refuses a call, if one does. A lint that makes the host's code crash counts as one, since nothing
/// allows it.
fn refusal(call: &OperatorCall<'_>) -> Option<Violation> {
    let checked = match call.call.check(call.version, call.target) {
        Ok(checked) => checked,
        Err(violation) => return Some(violation).filter(|violation| !violation.is_unsupported()),
    };
    let mut crash = None;
    checked.each_lint(&mut |lint| {
        if lint.rule.level == Level::HostCrash && crash.is_none() {
            crash = Some(lint);
        }
    });
    crash
}

/// How far outputs may be from the recorded ones on a machine that sums in another order.
fn tolerance(call: &OperatorCall<'_>) -> Tolerance {
    let (atol, rtol) = match call.call.attention_out.map(|out| out.dtype) {
        Some(DType::Float16) => (1e-3, 4e-3),
        Some(DType::Bf16) => (8e-3, 2e-2),
        // One step of the integer grid.
        Some(DType::Int8) => (1.0, 0.0),
        _ => (2e-2, 0.25),
    };
    Tolerance { atol, rtol }
}
