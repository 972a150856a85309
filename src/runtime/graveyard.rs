//! What was dropped while queued work still uses it: freed when that work is over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ascend_sys::{Api, bindings as sys};
use smallvec::SmallVec;

use crate::error::{Result, acl};
use crate::runtime::lock;
use crate::runtime::timeline::{Use, Uses};

/// Something that CANN has to be told to free.
#[derive(Debug)]
pub(crate) enum Resource {
    /// From `aclrtMalloc`.
    DeviceMemory(*mut std::ffi::c_void),
    /// From `aclrtMallocHost`.
    HostMemory(*mut std::ffi::c_void),
    /// An event.
    Event(sys::aclrtEvent),
    /// A captured graph.
    Graph(sys::aclmdlRI),
    /// Nothing by itself: the end of a stream that is used by somebody else from now on.
    Stream,
}

// SAFETY: the addresses are handles here; nothing is read or written through them.
unsafe impl Send for Resource {}

impl Resource {
    /// # Safety
    /// The resource is the caller's, and no queued work uses it.
    unsafe fn free(self, api: &Api) {
        let free = || -> Result<()> {
            match self {
                // SAFETY: handed on to the caller.
                Self::DeviceMemory(at) => unsafe { acl!(api, aclrtFree(at)) },
                // SAFETY: handed on to the caller.
                Self::HostMemory(at) => unsafe { acl!(api, aclrtFreeHost(at)) },
                // SAFETY: handed on to the caller.
                Self::Event(event) => unsafe { acl!(api, aclrtDestroyEvent(event)) },
                // SAFETY: handed on to the caller.
                Self::Graph(graph) => unsafe { acl!(api, aclmdlRIDestroy(graph)) },
                Self::Stream => Ok(()),
            }
        };
        if let Err(error) = free() {
            tracing::error!("cannot free a resource: {error}");
        }
    }
}

struct Parked {
    resource: Resource,
    uses: SmallVec<[Use; 2]>,
}

/// The retired resources of one device.
#[derive(Default)]
pub(super) struct Graveyard {
    parked: Mutex<Vec<Parked>>,
    /// Length of `parked`, to be read without the lock.
    count: AtomicUsize,
}

impl Graveyard {
    /// # Safety
    /// As for `Context::retire`; the device is bound.
    pub(super) unsafe fn retire(&self, api: &Api, resource: Resource, uses: &mut Uses) {
        let uses = uses.take_pending(api);
        if uses.is_empty() {
            // SAFETY: the caller owned it, and no use of it is left.
            unsafe { resource.free(api) };
        } else {
            for (timeline, number) in &uses {
                timeline.mark(api, *number);
            }
            let mut parked = lock(&self.parked);
            parked.push(Parked { resource, uses });
            self.count.store(parked.len(), Ordering::Release);
        }
        self.sweep(api);
    }

    /// Frees what is no longer used. The device must be bound.
    pub(super) fn sweep(&self, api: &Api) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut parked = lock(&self.parked);
        // Entries come in the order in which they were dropped: behind an operation that is not over, those of the same
        // stream need no question to the device.
        let mut stuck: Option<Use> = None;
        let mut over = |(timeline, number): &Use| {
            let known = stuck
                .as_ref()
                .is_some_and(|(of, least)| Arc::ptr_eq(of, timeline) && least <= number);
            let over = !known && timeline.is_complete(api, *number);
            if !over && !known {
                stuck = Some((Arc::clone(timeline), *number));
            }
            over
        };
        let done = |parked: &mut Parked| parked.uses.iter().all(&mut over);
        let free: SmallVec<[Parked; 8]> = parked.extract_if(.., done).collect();
        self.count.store(parked.len(), Ordering::Release);
        drop(parked);
        for Parked { resource, uses } in free {
            if matches!(resource, Resource::Stream) {
                for (timeline, _) in &uses {
                    timeline.end(api);
                }
            }
            // SAFETY: it was given up when it was parked, and the work that used it is over.
            unsafe { resource.free(api) };
        }
    }

    /// Waits for everything queued on the device, then frees; whether there was something to wait for.
    pub(super) fn reclaim(&self, api: &Api) -> bool {
        let uses: Vec<Use> = lock(&self.parked)
            .iter()
            .flat_map(|parked| parked.uses.iter().cloned())
            .collect();
        if uses.is_empty() {
            return false;
        }
        let wait = || -> Result<()> {
            // SAFETY: has no precondition but a bound device.
            unsafe { acl!(api, aclrtSynchronizeDevice()) }
        };
        if let Err(error) = wait() {
            tracing::warn!("cannot wait for the work that dropped buffers are used by: {error}");
            return false;
        }
        for (timeline, number) in &uses {
            timeline.finish(*number);
        }
        self.sweep(api);
        true
    }

    /// Frees everything: no stream is left but those that were handed back. The device must be bound.
    pub(super) fn close(&self, api: &Api) {
        self.reclaim(api);
        for Parked { resource, uses } in std::mem::take(&mut *lock(&self.parked)) {
            // SAFETY: it was given up when it was parked; the work on it cannot be waited for, so it has failed.
            unsafe { resource.free(api) };
            for (timeline, _) in uses {
                timeline.end(api);
            }
        }
    }
}
