//! The calls that a thread records.

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use ascend_spec::{Level, Violation};

use super::content::Labels;
use super::live::LiveCall;
use super::{RECORDERS, Recorded, folder, history, is_on};
use crate::case_file::{Expect, Tolerance};
use crate::error::{Error, Result};
use crate::runtime::Stream;

/// What the calling thread records.
#[derive(Default)]
struct Session {
    /// Tolerance and recorded calls of the innermost [`record_calls`].
    calls: Option<(Tolerance, Vec<Recorded>)>,
    /// Number of [`tentatively`] closures that are running.
    attempts: usize,
    /// Calls that were refused within these closures.
    held: Vec<(LiveCall, Error)>,
}

thread_local! {
    static SESSION: RefCell<Session> = RefCell::default();
}

/// Calls `body` with the thread's session; does nothing while the thread is ending.
fn with<R>(body: impl FnOnce(&mut Session) -> R) -> Option<R> {
    SESSION.try_with(|session| session.try_borrow_mut().ok().map(|mut session| body(&mut session))).ok().flatten()
}

/// Runs `body`, and records the calls that the calling thread makes meanwhile: those of plans, of the steps of
/// `ascend-serving`'s `Attention`, of whatever launches them.
///
/// A call that is launched is waited for and recorded with its inputs, as [`Case::record`](crate::case::Case::record)
/// does; the case expects the computed outputs, within `tolerance`. A call that is refused or fails is recorded with
/// the error as its note, and the case of a refused one expects the refusal by the same rule or lint. A case cannot
/// expect an output with NaN: it leaves the output out, and its note reports it. When a step tries several backends,
/// the calls that they refuse are recorded only if no backend serves the step. Calls that a graph captures or replays
/// are recorded without data.
///
/// Calls of every operator are recorded. Of one that updates a part of its tensors, such as ScatterPaKvCache, the case
/// has what they held before: a launch waits for the stream to copy them.
///
/// ```
/// use ascend_attention::case::{Tolerance, Verdict, record_calls};
/// use ascend_attention::{FusedInferAttention, Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let tensor = stream.upload(&[f16::ONE; 64], [1, 1, 2, 32])?;
/// let call = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(0.125);
/// let (output, calls) = record_calls(Tolerance::default(), || {
///     let plan = call.plan((&tensor, &tensor, &tensor))?;
///     plan.launch(&stream, (&tensor, &tensor, &tensor))
/// });
/// output?;
/// let case = calls[0].case().expect("small enough");
/// assert_eq!(case.launch(&stream)?.verdict, Verdict::Passed);
/// # }
/// # Ok(())
/// # }
/// ```
pub fn record_calls<R>(tolerance: Tolerance, body: impl FnOnce() -> R) -> (R, Vec<Recorded>) {
    /// Ends the recording, also by a panic.
    struct Scope(Option<(Tolerance, Vec<Recorded>)>);
    impl Drop for Scope {
        fn drop(&mut self) {
            let before = self.0.take();
            with(|session| session.calls = before);
            RECORDERS.fetch_sub(1, Ordering::Relaxed);
        }
    }
    RECORDERS.fetch_add(1, Ordering::Relaxed);
    let before = with(|session| session.calls.replace((tolerance, Vec::new())));
    let scope = Scope(before.flatten());
    let value = body();
    let calls = with(|session| session.calls.take()).flatten();
    drop(scope);
    (value, calls.map_or_else(Vec::new, |(_, calls)| calls))
}

/// Runs a closure that tries several ways to compute something: with [`RECORD_VARIABLE`](super::RECORD_VARIABLE) set,
/// the calls that are refused meanwhile are recorded only if the closure fails, because none of the ways has worked.
///
/// # Errors
/// What the closure returns.
pub fn tentatively<R, E>(body: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    /// Ends the attempt, also by a panic.
    struct Attempt(usize);
    impl Attempt {
        /// Takes out what was refused since the attempt began.
        fn refused(&self) -> Vec<(LiveCall, Error)> {
            let refused = |session: &mut Session| {
                let from = self.0.min(session.held.len());
                session.held.split_off(from)
            };
            with(refused).unwrap_or_default()
        }
    }
    impl Drop for Attempt {
        fn drop(&mut self) {
            with(|session| session.attempts = session.attempts.saturating_sub(1));
        }
    }
    if !is_on() {
        return body();
    }
    let before = with(|session| {
        session.attempts += 1;
        session.held.len()
    });
    let attempt = Attempt(before.unwrap_or(0));
    let outcome = body();
    let refused = attempt.refused();
    drop(attempt);
    if outcome.is_err() {
        for (call, error) in refused {
            failed(call, None, &error);
        }
    }
    outcome
}

/// Whether the calling thread is within [`record_calls`].
pub(crate) fn keeps_calls() -> bool {
    is_on() && with(|session| session.calls.is_some()).unwrap_or(false)
}

/// Whether a violation is one of the operator's rules or lints: neither a condition of this crate nor a call that it
/// does not compute.
fn is_of_contract(violation: &Violation) -> bool {
    !matches!(violation.rule.level, Level::Library | Level::Unsupported)
}

/// CANN's status if an error means that the call was refused: by the contract, or by the operator's first phase,
/// which launches nothing.
pub(crate) fn refusal_status(error: &Error) -> Option<i32> {
    match error {
        Error::Violation(violation) if is_of_contract(violation) => Some(violation.status()),
        Error::Aclnn { function, status, .. } if function.ends_with("GetWorkspaceSize") => Some(status.0),
        _ => None,
    }
}

/// Records a call that was refused, or could not be launched on a stream.
#[cold]
pub(crate) fn failed(call: LiveCall, stream: Option<&Stream>, error: &Error) {
    let held = with(|session| {
        if session.attempts == 0 {
            return Some(call);
        }
        session.held.push((call, error.clone()));
        None
    });
    let Some(call) = held.flatten() else { return };
    // The operator takes a call that breaks only a lint.
    let broken = match error {
        Error::Violation(violation) if is_of_contract(violation) => Some(violation.rule),
        _ => None,
    };
    let lint = broken.is_some_and(|rule| rule.level == Level::Lint);
    let status = refusal_status(error).filter(|_| !lint);
    let about = error.to_string();
    let name = match error {
        Error::Acl { function, .. } | Error::Aclnn { function, .. } => function,
        _ => broken.map_or("failed", |rule| rule.id),
    };
    let labels = Labels { name, note: &about, accepted: status.map(|_| false) };
    let folder = folder().filter(|folder| {
        let line = call.parameters(&labels).to_json();
        line.is_ok_and(|line| folder.takes(&line))
    });
    if folder.is_none() && !keeps_calls() {
        return;
    }
    let room = folder.map_or(u64::MAX, |folder| folder.room());
    // After a fault of the device the stream reports it at once.
    let settled = stream.map_or(Ok(()), |stream| {
        stream.synchronize().map_err(|error| {
            let why = error.to_string();
            // The caller gets the refusal alone; the stream keeps the fault for its next wait.
            stream.progress().keep_fault(error);
            why
        })
    });
    let recorded = call.recorded(settled.map(|()| room), &labels, |content, case| {
        content.admits_outputs(case)?;
        case.expect_rule = broken.map(|rule| rule.id.to_owned());
        if status.is_some() {
            case.expect = Expect::Reject { status };
        }
        Ok(())
    });
    if let Some(folder) = folder {
        folder.write(&recorded, &about);
    }
    keep(recorded);
}

/// Records a call that was launched on a stream, or, with `None`, in a graph; without data where it does not write all
/// of its outputs.
///
/// # Errors
/// As for [`Stream::synchronize`], where the call is waited for: nothing else would report it.
#[cold]
pub(crate) fn launched(stream: Option<&Stream>, call: LiveCall, is_whole: bool) -> Result<()> {
    if let (Some(stream), Some(_)) = (stream, folder()) {
        history::note(stream.progress(), &call);
    }
    let tolerance = with(|session| session.calls.as_ref().map(|(tolerance, _)| *tolerance));
    let Some(tolerance) = tolerance.flatten() else {
        return Ok(());
    };
    let waited = stream.map(Stream::synchronize).transpose().map(|_| ());
    let room = match (&waited, stream) {
        (Err(error), _) => Err(error.to_string()),
        (Ok(()), None) => Err("the call is part of a graph".to_owned()),
        (Ok(()), Some(_)) if !is_whole => Err("rows of its outputs belong to no sequence".to_owned()),
        (Ok(()), Some(_)) => Ok(u64::MAX),
    };
    keep(call.launched(room, tolerance));
    waited
}

/// Adds a call to those of [`record_calls`].
fn keep(recorded: Recorded) {
    with(|session| {
        if let Some((_, calls)) = &mut session.calls {
            calls.push(recorded);
        }
    });
}
