//! Faults on demand, as the environment and the calling thread have planned them.

use crate::config::config;
use crate::fault_plan::{Plan, Site};
use crate::lock::Lock;
use crate::status::{Outcome, failure};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::OnceLock;

thread_local! {
    static THREAD: RefCell<Plan> = RefCell::new(Plan::default());
}

/// Makes the `nth` call (from 1, counted from now) of a kind on the calling thread fail with `status`, unless the
/// result is dropped before.
pub fn inject(site: Site, nth: u64, status: i32) -> Injection {
    let id = THREAD.with_borrow_mut(|plan| plan.add(site, nth, status));
    Injection { id, thread: PhantomData }
}

/// A fault to come, made by [`inject`]. Dropping it cancels the fault.
#[derive(Debug)]
#[must_use = "the fault is cancelled when this is dropped"]
pub struct Injection {
    id: u64,
    /// Not `Send`: the plan is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for Injection {
    fn drop(&mut self) {
        let id = self.id;
        // Fails only while the thread ends, and its plan with it.
        let _ = THREAD.try_with(|plan| {
            if let Ok(mut plan) = plan.try_borrow_mut() {
                plan.remove(id);
            }
        });
    }
}

/// Counts one call of a kind in the thread's plan and in the environment's. Fails if a fault strikes the call.
pub(crate) fn strike(site: Site) -> Outcome {
    static PROCESS: OnceLock<Option<Lock<Plan>>> = OnceLock::new();
    let process = PROCESS.get_or_init(|| {
        let plan = &config().faults;
        (!plan.is_empty()).then(|| Lock::new(plan.clone()))
    });
    let of_process = process.as_ref().and_then(|plan| plan.lock().count(site));
    let of_thread = THREAD.try_with(|plan| plan.try_borrow_mut().ok().and_then(|mut p| p.count(site))).ok().flatten();
    match of_thread.or(of_process) {
        None => Ok(()),
        Some(code) => Err(failure!(code, "fault on demand: this {} was chosen to fail with {code}", site.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injections_strike_once_on_their_thread() {
        let _fault = inject(Site::Sync, 2, 507_014);
        std::thread::spawn(|| assert_eq!(strike(Site::Sync), Ok(()))).join().unwrap();
        assert_eq!(strike(Site::Sync), Ok(()));
        assert_eq!(strike(Site::Malloc), Ok(()));
        assert_eq!(strike(Site::Sync).unwrap_err().code, 507_014);
        assert_eq!(strike(Site::Sync), Ok(()));
    }

    #[test]
    fn dropping_an_injection_cancels_it() {
        let first = inject(Site::Malloc, 1, 1);
        let second = inject(Site::Malloc, 1, 2);
        drop(first);
        assert_eq!(strike(Site::Malloc).unwrap_err().code, 2);
        drop(second);
        assert_eq!(strike(Site::Malloc), Ok(()));
    }
}
