//! Faults on demand: the n-th call of a kind fails with a chosen status.

use crate::config::config;
use crate::lock::Lock;
use crate::status::{Failure, Outcome, failure};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// What a device operation did wrong; kept by its stream until the next synchronisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub code: i32,
    pub message: String,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Failure::new(fault.code, fault.message)
    }
}

/// Calls that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Site {
    /// `aclrtMalloc`, `aclrtMallocAlign32`, `aclrtMallocHost`.
    Malloc,
    /// Phase two of an operator. A device fault (507xxx) shows at the next synchronisation, any other status at once.
    Launch,
    /// A synchronisation of a stream, event or device.
    Sync,
    /// `aclrtMemcpy`, `aclrtMemcpyAsync`.
    Memcpy,
}

impl Site {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "malloc" => Site::Malloc,
            "launch" => Site::Launch,
            "sync" => Site::Sync,
            "memcpy" => Site::Memcpy,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Site::Malloc => "malloc",
            Site::Launch => "launch",
            Site::Sync => "sync",
            Site::Memcpy => "memcpy",
        }
    }
}

/// One fault to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    id: u64,
    site: Site,
    /// Calls left until it strikes; 0 when it has.
    left: u64,
    code: i32,
}

/// Faults to come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan(Vec<Entry>);

impl Plan {
    /// Reads `malloc:3=207001,launch:1=507015`; an error says what is allowed.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        const FORM: &str = "a comma-separated list of SITE:N=STATUS with SITE one of malloc, launch, sync, memcpy, N from 1 on and STATUS not 0";
        let entry = |text: &str| {
            let (site, rest) = text.trim().split_once(':')?;
            let (n, code) = rest.split_once('=')?;
            let entry = Entry {
                id: 0,
                site: Site::from_name(site)?,
                left: n.parse().ok()?,
                code: code.parse().ok()?,
            };
            (entry.left > 0 && entry.code != 0).then_some(entry)
        };
        text.split(',')
            .filter(|part| !part.trim().is_empty())
            .map(|part| entry(part).ok_or(FORM))
            .collect::<Result<_, _>>()
            .map(Plan)
    }

    /// Counts one call; the status of the fault that strikes it, if any.
    fn count(&mut self, site: Site) -> Option<i32> {
        let mut struck = None;
        for entry in self.0.iter_mut().filter(|e| e.site == site && e.left > 0) {
            entry.left -= 1;
            if entry.left == 0 {
                struck = struck.or(Some(entry.code));
            }
        }
        struck
    }
}

thread_local! {
    static THREAD: RefCell<Plan> = RefCell::new(Plan::default());
}

/// Makes the `nth` call (from 1, counted from now) of a kind on the calling thread fail with `status`, unless the
/// result is dropped before.
pub fn inject(site: Site, nth: u64, status: i32) -> Injection {
    let id = THREAD.with_borrow_mut(|plan| {
        let id = plan.0.last().map_or(1, |entry| entry.id.wrapping_add(1));
        plan.0.push(Entry {
            id,
            site,
            left: nth,
            code: status,
        });
        id
    });
    Injection {
        id,
        thread: PhantomData,
    }
}

/// A fault to come; dropping it calls it off. Made by [`inject`].
#[derive(Debug)]
#[must_use = "the fault is called off when this is dropped"]
pub struct Injection {
    id: u64,
    /// Not `Send`: the plan is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for Injection {
    fn drop(&mut self) {
        let id = self.id;
        // Fails only while the thread ends, when its plan goes anyway.
        let _ = THREAD.try_with(|plan| {
            if let Ok(mut plan) = plan.try_borrow_mut() {
                plan.0.retain(|entry| entry.id != id);
            }
        });
    }
}

/// Counts one call of a kind, for the thread's plan and for the environment's; fails if a fault strikes it.
pub(crate) fn strike(site: Site) -> Outcome {
    static PROCESS: OnceLock<Option<Lock<Plan>>> = OnceLock::new();
    let process = PROCESS.get_or_init(|| {
        let plan = &config().faults;
        (!plan.0.is_empty()).then(|| Lock::new(plan.clone()))
    });
    let of_process = process.as_ref().and_then(|plan| plan.lock().count(site));
    let of_thread = THREAD
        .try_with(|plan| plan.try_borrow_mut().ok().and_then(|mut p| p.count(site)))
        .ok()
        .flatten();
    match of_thread.or(of_process) {
        None => Ok(()),
        Some(code) => Err(failure!(
            code,
            "fault on demand: this {} was chosen to fail with {code}",
            site.name()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read() {
        let mut plan = Plan::parse("malloc:2=207001, sync:1=507014,").unwrap();
        assert_eq!(plan.count(Site::Malloc), None);
        assert_eq!(plan.count(Site::Malloc), Some(207_001));
        assert_eq!(plan.count(Site::Malloc), None);
        assert_eq!(plan.count(Site::Sync), Some(507_014));
        assert_eq!(plan.count(Site::Launch), None);
        for wrong in ["malloc", "malloc:0=1", "malloc:1=0", "free:1=2", "sync:x=2"] {
            assert!(Plan::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn injections_strike_once_on_their_thread() {
        let _fault = inject(Site::Sync, 2, 507_014);
        std::thread::spawn(|| assert_eq!(strike(Site::Sync), Ok(())))
            .join()
            .unwrap();
        assert_eq!(strike(Site::Sync), Ok(()));
        assert_eq!(strike(Site::Malloc), Ok(()));
        assert_eq!(strike(Site::Sync).unwrap_err().code, 507_014);
        assert_eq!(strike(Site::Sync), Ok(()));
    }

    #[test]
    fn dropping_an_injection_calls_it_off() {
        let first = inject(Site::Malloc, 1, 1);
        let second = inject(Site::Malloc, 1, 2);
        drop(first);
        assert_eq!(strike(Site::Malloc).unwrap_err().code, 2);
        drop(second);
        assert_eq!(strike(Site::Malloc), Ok(()));
    }
}
