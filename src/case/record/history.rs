//! Calls that were launched, for the time when it shows that one of them failed.
//!
//! What fails while it runs shows when its stream is waited for. Which call it was, CANN does not say, and after a fault
//! nothing can be copied from the device: the shapes and attributes of the calls that were not over are written.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::folder::Folder;
use super::{LiveCall, Recorded, folder, is_on};
use crate::case::ParameterCase;
use crate::error::Error;
use crate::runtime::{Timeline, lock};

/// Most launches that are kept.
const MOST: usize = 16;

struct Launched {
    timeline: Arc<Timeline>,
    number: u64,
    call: ParameterCase,
}

static LAUNCHED: Mutex<VecDeque<Launched>> = Mutex::new(VecDeque::new());

/// Takes note of a launch, of which nothing is kept alive.
pub(super) fn note(timeline: &Arc<Timeline>, call: &LiveCall) {
    let note = Launched {
        timeline: Arc::clone(timeline),
        number: timeline.issued(),
        call: call.parameters("queued", None, ""),
    };
    let mut launched = lock(&LAUNCHED);
    launched.retain(|of| !of.timeline.passed(of.number));
    if launched.len() == MOST {
        launched.pop_front();
    }
    launched.push_back(note);
}

/// Records the calls that a failed stream had not passed.
pub(crate) fn stream_failed(timeline: &Arc<Timeline>, error: &Error) {
    let fault = matches!(error, Error::Acl { .. } | Error::Aclnn { .. });
    if !fault || !is_on() {
        return;
    }
    if let Some(folder) = folder() {
        write(folder, timeline, error);
    }
}

#[cold]
fn write(folder: &Folder, timeline: &Arc<Timeline>, error: &Error) {
    let mut failed = Vec::new();
    lock(&LAUNCHED).retain(|of| {
        let of_stream = Arc::ptr_eq(&of.timeline, timeline);
        if of_stream && !of.timeline.passed(of.number) {
            failed.push(of.call.clone());
        }
        !of_stream
    });
    let count = failed.len();
    for (at, mut call) in failed.into_iter().enumerate() {
        let about = format!(
            "call {} of {count} that were queued when the stream failed: {error}",
            at + 1
        );
        call.about.clone_from(&about);
        let Ok(line) = call.to_json() else { continue };
        if folder.takes(&line) {
            let why = "the device failed".to_owned();
            let call = Box::new(call);
            folder.write(&Recorded::Parameters { call, why }, &about);
        }
    }
}
