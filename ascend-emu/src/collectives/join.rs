//! How ranks of one piece of root information, and devices of one process, become a communicator.

use super::communicator::{Communicator, THREAD_EACH};
use super::listener::Listener;
use super::member::{COMMUNICATORS, Group, Member};
use super::settings::Settings;
use crate::config::config;
use crate::handle::Id;
use crate::lock::{Lock, Signal};
use crate::status::{Failure, HCCL_PARA, HCCL_TIMEOUT, Outcome, failure};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A name that no other communicator of this process has.
fn new_name() -> String {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    format!("hccl_emulated_{}", NUMBERS.fetch_add(1, Ordering::Relaxed))
}

/// A rank that joins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joining {
    pub device: i32,
    /// Whether it is of another process.
    pub is_remote: bool,
}

/// Ranks that come together by one piece of root information.
#[derive(Debug, Default)]
struct Session {
    /// By rank: those that have joined.
    joined: Vec<Option<Joining>>,
    settings: Settings,
    communicator: Option<Arc<Communicator>>,
    failed: Option<Failure>,
    /// Ranks that have come and not gone.
    present: usize,
    /// Where ranks of other processes come in, if any can.
    listener: Option<Arc<Listener>>,
}

static SESSIONS: Lock<BTreeMap<u64, Session>> = Lock::new(BTreeMap::new());
static CHANGED: Signal = Signal::new();

/// Begins a communicator that ranks join by a number.
pub(super) fn expect(number: u64, listener: Option<Arc<Listener>>) {
    SESSIONS.lock().insert(number, Session { listener, ..Session::default() });
}

/// Gives up root information by which no rank has come; whether that is so.
pub(super) fn expire(number: u64) -> bool {
    let mut sessions = SESSIONS.lock();
    let expired = match sessions.get(&number) {
        Some(session) if session.joined.is_empty() => sessions.remove(&number),
        _ => return false,
    };
    // What the session has ends outside of the lock.
    drop(sessions);
    drop(expired);
    true
}

/// Refuses sizes that there are no devices for, and ranks that do not exist.
pub(crate) fn check_size(name: &str, size: u32, rank: u32) -> Outcome<(usize, usize)> {
    let devices = config().devices;
    if size == 0 || size > devices {
        return Err(failure!(
            HCCL_PARA,
            "{name}: the number of ranks: given {size}, allowed: 1 to {devices}, a device each (ASCEND_EMU_DEVICES)"
        ));
    }
    if rank >= size {
        return Err(failure!(HCCL_PARA, "{name}: rank: given {rank}, allowed: 0 to {}", size - 1));
    }
    Ok((size as usize, rank as usize))
}

/// Ends a rank's part in a session; the last one removes what has been used.
fn go(sessions: &mut BTreeMap<u64, Session>, number: u64) {
    if let Some(session) = sessions.get_mut(&number) {
        session.present = session.present.saturating_sub(1);
        if session.present == 0 {
            sessions.remove(&number);
        }
    }
}

/// Joins the communicator with a number, and returns when all ranks have.
pub(super) fn meet(
    name: &str,
    number: u64,
    (size, rank): (u32, u32),
    joining: Joining,
    settings: Settings,
) -> Outcome<Arc<Communicator>> {
    let (size, rank) = check_size(name, size, rank)?;
    let (limit, device) = (settings.limit(), joining.device);
    let deadline = Instant::now().checked_add(limit);
    let mut sessions = SESSIONS.lock();
    let Some(session) = sessions.get_mut(&number) else {
        return Err(failure!(
            HCCL_PARA,
            "{name}: this rootInfo has been used, or no rank has joined by it for {} s (HCCL_CONNECT_TIMEOUT); it is \
             good for one communicator: call HcclGetRootInfo again",
            config().connect_limit.as_secs()
        ));
    };
    if session.joined.is_empty() {
        session.joined = vec![None; size];
    }
    session.present += 1;
    let refusal = if let Some(failed) = &session.failed {
        Some(failed.clone())
    } else if session.joined.len() != size {
        let other = session.joined.len();
        Some(failure!(HCCL_PARA, "{name}: nRanks: {size} for rank {rank}, and {other} for a rank that came before"))
    } else if session.joined.iter().flatten().any(|taken| taken.device == device) {
        Some(failure!(
            HCCL_PARA,
            "{name}: device {device} has a rank of this communicator already; rank {rank} needs its own"
        ))
    } else if session.joined.get(rank).is_some_and(Option::is_some) {
        Some(failure!(HCCL_PARA, "{name}: rank {rank} has joined this communicator already"))
    } else {
        None
    };
    if let Some(refusal) = refusal {
        // Those that wait would wait in vain.
        session.failed.get_or_insert(refusal.clone());
        go(&mut sessions, number);
        CHANGED.notify_all();
        return Err(refusal);
    }
    if let Some(joined) = session.joined.get_mut(rank) {
        *joined = Some(joining);
    }
    if rank == 0 {
        session.settings = settings;
    }
    if session.joined.iter().all(Option::is_some) {
        let is_local = |joined: &Option<Joining>| joined.is_some_and(|joined| !joined.is_remote);
        let local = session.joined.iter().enumerate().filter(|(_, joined)| is_local(joined)).map(|(rank, _)| rank);
        let mut made = session.settings.communicator(size, new_name);
        made.local_ranks = local.collect();
        made.listener = session.listener.take();
        session.communicator = Some(Arc::new(made));
        CHANGED.notify_all();
    }
    loop {
        let Some(session) = sessions.get_mut(&number) else {
            return Err(failure!(HCCL_PARA, "{name}: the communicator was given up"));
        };
        if let Some(communicator) = session.communicator.clone() {
            go(&mut sessions, number);
            drop(sessions);
            return Ok(communicator);
        }
        if session.failed.is_none() && crate::lock::expired(deadline) {
            let missing = session.joined.iter().enumerate().filter(|(_, joining)| joining.is_none());
            let missing: Vec<String> = missing.map(|(rank, _)| rank.to_string()).collect();
            session.failed = Some(failure!(
                HCCL_TIMEOUT,
                "{name}: rank {} has not joined in {} s (ASCEND_EMU_COLLECTIVE_TIMEOUT); {THREAD_EACH}",
                missing.join(", "),
                limit.as_secs()
            ));
            CHANGED.notify_all();
        }
        if let Some(failed) = session.failed.clone() {
            go(&mut sessions, number);
            return Err(failed);
        }
        sessions = CHANGED.wait(sessions, deadline);
    }
}

/// `HcclCommInitAll`: a communicator of these devices, in the order of its ranks.
pub(crate) fn all(name: &str, devices: &[i32]) -> Outcome<Vec<Id>> {
    let size = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    check_size(name, size, 0)?;
    for (at, device) in devices.iter().enumerate() {
        if devices.iter().take(at).any(|before| before == device) {
            return Err(failure!(
                HCCL_PARA,
                "{name}: device {device} stands twice among the devices; each has one rank"
            ));
        }
    }
    let communicator = Arc::new(Settings::default().communicator(devices.len(), new_name));
    let members = devices.iter().enumerate();
    let members = members.map(|(rank, &device)| Member::new(Group::Local(Arc::clone(&communicator)), rank, device));
    Ok(members.map(|member| COMMUNICATORS.insert(member)).collect())
}
