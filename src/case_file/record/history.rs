//! Recent launches, written out when their stream reports a failure.
//!
//! A call that fails while it runs is reported when its stream is waited for. CANN does not say which call it was,
//! and after a fault nothing can be copied from the device: the shapes and attributes of the calls since the last
//! wait are written.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::content::Labels;
use super::live::LiveCall;
use super::{Recorded, folder};
use crate::case_file::ParameterCase;
use crate::error::{Error, Result};
use crate::runtime::{StreamProgress, lock};

/// Most launches that are kept.
const MOST: usize = 64;

struct Launched {
    progress: Arc<StreamProgress>,
    number: u64,
    call: ParameterCase,
}

static LAUNCHED: Mutex<VecDeque<Launched>> = Mutex::new(VecDeque::new());

/// Notes a launch, without keeping any of its memory alive.
pub(super) fn note(progress: &Arc<StreamProgress>, call: &LiveCall) {
    let note = Launched {
        progress: Arc::clone(progress),
        number: progress.issued(),
        call: call.parameters(&Labels { name: "queued", note: "", accepted: None }),
    };
    let mut launched = lock(&LAUNCHED);
    if launched.len() == MOST {
        launched.pop_front();
    }
    launched.push_back(note);
}

/// Notes how a wait for the stream's operations up to `number` ended: their calls are forgotten or, after a failure,
/// written out.
#[cold]
pub(super) fn waited(progress: &Arc<StreamProgress>, number: u64, outcome: &Result<()>) {
    let Some(folder) = folder() else { return };
    if matches!(outcome, Err(Error::Timeout { .. })) {
        return;
    }
    let mut over = Vec::new();
    lock(&LAUNCHED).retain(|launched| {
        let is_over = Arc::ptr_eq(&launched.progress, progress) && launched.number <= number;
        if is_over {
            over.push(launched.call.clone());
        }
        !is_over
    });
    let Err(error) = outcome else { return };
    let count = over.len();
    let about = format!("one of {count} calls that were queued when the stream failed: {error}");
    for mut call in over {
        call.about.clone_from(&about);
        let Ok(line) = call.to_json() else { continue };
        if folder.takes(&line) {
            let why = "the device failed".to_owned();
            let call = Box::new(call);
            folder.write(&Recorded::Parameters { call, why }, &about);
        }
    }
}
