//! Collectives (HCCL): ranks are threads over emulated devices, of one process or of several.
//!
//! A call is queued on the rank's stream like an operator. When the stream reaches it, it copies what it sends, meets
//! the calls of the other ranks, and writes what it receives; nothing of memory is locked while it waits, so that a
//! call in place is right. Each call carries a description. The first difference between ranks fails the
//! communicator: every rank's stream has a fault that names ranks and values, where hardware waits for half an hour.
//! So does a rank that can never come. Every wait is bounded (`ASCEND_EMU_COLLECTIVE_TIMEOUT`).
//!
//! Elements are reduced in the order of the ranks, each sum rounded to the element type: bits do not differ from run to
//! run, nor between ranks.
//!
//! The process that made the root information has the communicator. A rank of another process sends the description of
//! its call and what it sends over a socket, and gets what it receives.

mod call;
mod call_message;
mod communicator;
mod hub;
mod join;
mod listener;
mod member;
mod payload;
mod peer;
mod reduce;
mod remote;
mod root_info;
mod run;
mod settings;
mod split;
mod wire;

pub(crate) use call::{Call, Kind, Segment};
pub(crate) use join::{all, check_size};
pub(crate) use member::{COMMUNICATORS, Member, MemberCall, mark_device_gone};
pub(crate) use root_info::{ROOT_INFO, join, root_info};
pub(crate) use settings::Settings;
pub(crate) use split::SplitRequest;
