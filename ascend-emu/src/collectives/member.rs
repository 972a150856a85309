//! One rank's part in a communicator, wherever that is.

use super::call::Call;
use super::communicator::{Arrival, Communicator, DESTROYED, GONE, RESET};
use super::payload::Payload;
use super::remote::Remote;
use super::settings::Settings;
use super::split::SplitRequest;
use crate::handle::{self, Id, Table};
use crate::status::{HCCL_INTERNAL, Outcome, failure};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) static COMMUNICATORS: Table<Member> = Table::new(handle::Kind::Communicator);

/// Where a communicator is.
#[derive(Debug)]
pub(super) enum Group {
    /// In this process.
    Local(Arc<Communicator>),
    /// In the process of its root.
    Remote(Remote),
}

/// One rank's part in a communicator.
#[derive(Debug)]
pub(crate) struct Member {
    pub name: String,
    pub size: usize,
    pub rank: usize,
    pub device: i32,
    group: Group,
}

/// A call with the member that makes it.
#[derive(Clone, Debug)]
pub(crate) struct MemberCall {
    pub member: Arc<Member>,
    pub call: Arc<Call>,
}

impl Member {
    pub(super) fn new(group: Group, rank: usize, device: i32) -> Self {
        let (name, size) = match &group {
            Group::Local(communicator) => (communicator.name.clone(), communicator.size),
            Group::Remote(remote) => (remote.name.clone(), remote.size),
        };
        Member { name, size, rank, device, group }
    }

    /// The reason for which the communicator has failed.
    pub(crate) fn failed(&self) -> Option<String> {
        match &self.group {
            Group::Local(communicator) => communicator.failed(),
            Group::Remote(remote) => remote.failed(),
        }
    }

    /// Refuses a call of a communicator that has failed.
    pub(crate) fn check(&self, name: &str) -> Outcome {
        match self.failed() {
            None => Ok(()),
            Some(message) => Err(failure!(
                HCCL_INTERNAL,
                "{name}: the communicator {} has failed, and takes no more calls; make another one: {message}",
                self.name
            )),
        }
    }

    /// As [`Communicator::perform`].
    pub(super) fn perform(&self, arrival: Arrival, abort: &AtomicBool) -> Outcome<Vec<Payload>> {
        let interrupt = || abort.load(Ordering::Acquire).then_some("was aborted with its stream");
        match &self.group {
            Group::Local(communicator) => communicator.perform(arrival, &interrupt),
            Group::Remote(remote) => remote.perform(&arrival, &interrupt),
        }
    }

    /// `HcclCreateSubCommConfig`: this rank's part in a communicator of some ranks.
    pub(crate) fn split(&self, name: &str, request: &SplitRequest, settings: &Settings) -> Outcome<Id> {
        self.check(name)?;
        let group = match &self.group {
            Group::Local(communicator) => Group::Local(communicator.split(name, self.rank, request, settings)?),
            Group::Remote(remote) => Group::Remote(remote.split(name, request, settings)?),
        };
        Ok(COMMUNICATORS.insert(Member::new(group, request.rank as usize, self.device)))
    }

    /// `HcclCommDestroy`: this rank makes no more calls.
    pub(crate) fn leave(&self) {
        self.mark_gone(DESTROYED);
    }

    fn mark_gone(&self, why: usize) {
        match &self.group {
            Group::Local(communicator) => communicator.mark_gone(self.rank, GONE.get(why).copied().unwrap_or_default()),
            Group::Remote(remote) => remote.leave(why),
        }
    }

    /// Fails the communicator: a call of this rank was queued and will never run.
    pub(crate) fn give_up(&self, call: &Call) {
        match &self.group {
            Group::Local(communicator) => communicator.give_up(self.rank, &call.to_string()),
            Group::Remote(remote) => remote.give_up(&call.to_string()),
        }
    }
}

/// Notes that a device was reset: its ranks make no more calls.
pub(crate) fn mark_device_gone(device: i32) {
    for member in COMMUNICATORS.all(|member| member.device == device) {
        member.mark_gone(RESET);
    }
}
