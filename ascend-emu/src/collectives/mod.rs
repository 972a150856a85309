//! Collectives (HCCL) in one process: ranks are threads over emulated devices.
//!
//! A call is queued on the rank's stream like an operator. When the stream reaches it, it copies what it sends, meets
//! the calls of the other ranks, and writes what it receives; nothing of memory is locked while it waits, so that a
//! call in place is right. Each call carries a description. The first difference between ranks fails the
//! communicator: every rank's stream has a fault that names ranks and values, where hardware waits for half an hour.
//! So does a rank that can never come. Every wait is bounded (`ASCEND_EMU_COLLECTIVE_TIMEOUT`).
//!
//! Elements are reduced in the order of the ranks, each sum rounded to the element type: bits do not differ from run to
//! run, nor between ranks.

mod call;
mod communicator;
mod join;
mod reduce;
mod run;

pub(crate) use call::{Call, Kind, Segment};
pub(crate) use communicator::{COMMUNICATORS, Member, MemberCall, mark_device_gone};
pub(crate) use join::{ROOT_INFO, Settings, all, check_size, join, root_info};
