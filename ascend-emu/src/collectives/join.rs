//! How ranks of one piece of root information, and devices of one process, become a communicator.

use super::communicator::Communicator;
use super::door::Door;
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

/// Where a rank has come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub device: i32,
    /// Whether it is of another process.
    pub elsewhere: bool,
}

/// Ranks that come together by one piece of root information.
#[derive(Debug, Default)]
struct Session {
    /// A place for each rank.
    seats: Vec<Option<Seat>>,
    settings: Settings,
    communicator: Option<Arc<Communicator>>,
    failed: Option<Failure>,
    /// Ranks that have come and not gone.
    present: usize,
    /// Where ranks of other processes come in, if any can.
    door: Option<Arc<Door>>,
}

static SESSIONS: Lock<BTreeMap<u64, Session>> = Lock::new(BTreeMap::new());
static CHANGED: Signal = Signal::new();

/// Begins a communicator that ranks join by a number.
pub(super) fn expect(number: u64, door: Option<Arc<Door>>) {
    SESSIONS.lock().insert(number, Session { door, ..Session::default() });
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

/// Takes a rank's seat in the communicator with a number, and returns when all ranks have theirs.
pub(super) fn meet(
    name: &str,
    number: u64,
    (size, rank): (u32, u32),
    seat: Seat,
    settings: Settings,
) -> Outcome<Arc<Communicator>> {
    let (size, rank) = check_size(name, size, rank)?;
    let (limit, device) = (settings.limit(), seat.device);
    let deadline = Instant::now().checked_add(limit);
    let mut sessions = SESSIONS.lock();
    let Some(session) = sessions.get_mut(&number) else {
        return Err(failure!(
            HCCL_PARA,
            "{name}: this rootInfo has been used; it is good for one communicator: call HcclGetRootInfo again"
        ));
    };
    if session.seats.is_empty() {
        session.seats = vec![None; size];
    }
    session.present += 1;
    let refusal = if let Some(failed) = &session.failed {
        Some(failed.clone())
    } else if session.seats.len() != size {
        let other = session.seats.len();
        Some(failure!(HCCL_PARA, "{name}: nRanks: {size} for rank {rank}, and {other} for a rank that came before"))
    } else if session.seats.iter().flatten().any(|taken| taken.device == device) {
        Some(failure!(
            HCCL_PARA,
            "{name}: device {device} has a rank of this communicator already; rank {rank} needs its own"
        ))
    } else if session.seats.get(rank).is_some_and(Option::is_some) {
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
    if let Some(place) = session.seats.get_mut(rank) {
        *place = Some(seat);
    }
    if rank == 0 {
        session.settings = settings;
    }
    if session.seats.iter().all(Option::is_some) {
        let seats = session.seats.iter().enumerate();
        let here = seats.filter(|(_, seat)| seat.is_some_and(|seat| !seat.elsewhere)).map(|(rank, _)| rank).collect();
        let mut made = session.settings.communicator(size, new_name);
        (made.door, made.here) = (session.door.take(), here);
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
            let missing = session.seats.iter().enumerate().filter(|(_, seat)| seat.is_none());
            let missing: Vec<String> = missing.map(|(rank, _)| rank.to_string()).collect();
            session.failed = Some(failure!(
                HCCL_TIMEOUT,
                "{name}: rank {} has not joined in {} s (ASCEND_EMU_COLLECTIVE_TIMEOUT)",
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
    let members = members.map(|(rank, &device)| Member::new(Group::Here(Arc::clone(&communicator)), rank, device));
    Ok(members.map(|member| COMMUNICATORS.insert(member)).collect())
}
