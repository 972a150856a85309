//! How ranks become a communicator.

use super::communicator::{COMMUNICATORS, Communicator, Member};
use crate::config::config;
use crate::handle::Id;
use crate::lock::{Lock, Signal};
use crate::status::{Failure, HCCL_NOT_SUPPORTED, HCCL_PARA, HCCL_TIMEOUT, Outcome, failure};
use std::collections::BTreeMap;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of root information.
pub(crate) const ROOT_INFO: usize = ascend_sys::bindings::HCCL_ROOT_INFO_BYTES as usize;

/// What root information of this emulation begins with.
const MARK: &[u8; 8] = b"ASCENDHC";

/// What a communicator is made with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Its name, if the program chooses one.
    pub name: Option<String>,
    /// How long a rank waits for the others, if the program chooses that.
    pub limit: Option<Duration>,
}

impl Settings {
    /// Makes the communicator.
    fn communicator(&self, size: usize) -> Arc<Communicator> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let name = self.name.clone().unwrap_or_else(|| format!("hccl_emulated_{number}"));
        Communicator::new(name, size, self.limit.unwrap_or(config().collective_limit))
    }
}

/// Ranks that come together by one piece of root information.
#[derive(Debug, Default)]
struct Session {
    /// The number of ranks, and the devices of those that have come.
    seats: Vec<Option<i32>>,
    settings: Settings,
    communicator: Option<Arc<Communicator>>,
    failed: Option<Failure>,
    /// Ranks that have come and not gone.
    present: usize,
}

static SESSIONS: Lock<BTreeMap<u64, Session>> = Lock::new(BTreeMap::new());
static CHANGED: Signal = Signal::new();
static ISSUED: AtomicU64 = AtomicU64::new(0);

/// `HcclGetRootInfo`: root information, of which only the first bytes are not zero.
pub(crate) fn root_info() -> Vec<u8> {
    let number = ISSUED.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    SESSIONS.lock().insert(number, Session::default());
    let mut bytes = [&MARK[..], &process::id().to_le_bytes(), &number.to_le_bytes()].concat();
    bytes.resize(ROOT_INFO, 0);
    bytes
}

/// The number of the session that root information is for.
fn session_of(name: &str, info: &[u8]) -> Outcome<u64> {
    let (mark, rest) = info.split_at_checked(MARK.len()).unwrap_or_default();
    let (own, rest) = rest.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
    let number = rest.first_chunk::<8>().map_or(0, |number| u64::from_le_bytes(*number));
    if mark != MARK {
        return Err(failure!(HCCL_PARA, "{name}: rootInfo is not what HcclGetRootInfo has written"));
    }
    if u32::from_le_bytes(*own) != process::id() {
        return Err(failure!(
            HCCL_NOT_SUPPORTED,
            "{name}: rootInfo was made in process {}, this is process {}: the emulation's communicators are of one \
             process; make the ranks threads of it",
            u32::from_le_bytes(*own),
            process::id()
        ));
    }
    Ok(number)
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

/// `HcclCommInitRootInfo`: joins a communicator on a device, and returns when all ranks have.
pub(crate) fn join(name: &str, (size, rank): (u32, u32), info: &[u8], device: i32, settings: Settings) -> Outcome<Id> {
    let number = session_of(name, info)?;
    let (size, rank) = check_size(name, size, rank)?;
    let limit = settings.limit.unwrap_or(config().collective_limit);
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
    } else if session.seats.iter().flatten().any(|taken| *taken == device) {
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
    if let Some(seat) = session.seats.get_mut(rank) {
        *seat = Some(device);
    }
    if rank == 0 {
        session.settings = settings;
    }
    if session.seats.iter().all(Option::is_some) {
        session.communicator = Some(session.settings.communicator(size));
        CHANGED.notify_all();
    }
    loop {
        let Some(session) = sessions.get_mut(&number) else {
            return Err(failure!(HCCL_PARA, "{name}: the communicator was given up"));
        };
        if let Some(communicator) = session.communicator.clone() {
            go(&mut sessions, number);
            drop(sessions);
            return Ok(COMMUNICATORS.insert(Member { communicator, rank, device }));
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
    let communicator = Settings::default().communicator(devices.len());
    let members = devices.iter().enumerate();
    let members = members.map(|(rank, &device)| Member { communicator: Arc::clone(&communicator), rank, device });
    Ok(members.map(|member| COMMUNICATORS.insert(member)).collect())
}
