//! Deferred frees: what was dropped while queued work still uses it, freed once that work is known to be over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ascend_sys::{Api, bindings as sys};
use smallvec::SmallVec;

use crate::error::{Result, acl};
use crate::runtime::lock;
use crate::runtime::stream_progress::{StreamProgress, Use, Uses};

/// A resource that is freed by a function of CANN.
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
    /// A stream that was dropped: the events of its progress, and the stream itself if it is owned.
    Stream { progress: Arc<StreamProgress>, owned: Option<sys::aclrtStream> },
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
                Self::Stream { progress, owned } => {
                    progress.end(api);
                    match owned {
                        // SAFETY: handed on to the caller; the progress no longer uses the stream.
                        Some(stream) => unsafe { acl!(api, aclrtDestroyStream(stream)) },
                        None => Ok(()),
                    }
                }
            }
        };
        if let Err(error) = free() {
            tracing::error!("cannot free a resource: {error}");
        }
    }
}

struct Deferred {
    resource: Resource,
    uses: SmallVec<[Use; 2]>,
}

/// The deferred frees of one context.
#[derive(Default)]
pub(super) struct DeferredFrees {
    deferred: Mutex<Vec<Deferred>>,
    /// Length of `deferred`, to be read without the lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    /// Frees a resource, or defers that while queued work uses it.
    ///
    /// # Safety
    /// As for `Context::retire`; the device is bound.
    pub(super) unsafe fn retire(&self, api: &Api, resource: Resource, uses: &mut Uses) {
        let uses = uses.take_pending(api);
        if uses.is_empty() {
            // SAFETY: the caller owned it, and no use of it is left.
            unsafe { resource.free(api) };
        } else {
            for (progress, number) in &uses {
                progress.mark(api, *number);
            }
            let mut deferred = lock(&self.deferred);
            deferred.push(Deferred { resource, uses });
            self.count.store(deferred.len(), Ordering::Release);
        }
        self.sweep(api);
    }

    /// Frees what is no longer used. The device must be bound.
    pub(super) fn sweep(&self, api: &Api) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut deferred = lock(&self.deferred);
        // Entries are in the order in which they were dropped: once an operation of a stream is not over, later ones
        // of the same stream are not queried.
        let mut stuck: Option<Use> = None;
        let mut over = |(progress, number): &Use| {
            let known = stuck
                .as_ref()
                .is_some_and(|(of_progress, least)| Arc::ptr_eq(of_progress, progress) && least <= number);
            let over = !known && progress.is_complete(api, *number);
            if !over && !known {
                stuck = Some((Arc::clone(progress), *number));
            }
            over
        };
        let done = |entry: &mut Deferred| entry.uses.iter().all(&mut over);
        let free: SmallVec<[Deferred; 8]> = deferred.extract_if(.., done).collect();
        self.count.store(deferred.len(), Ordering::Release);
        drop(deferred);
        for Deferred { resource, .. } in free {
            // SAFETY: it was given up when its free was deferred, and the work that used it is over.
            unsafe { resource.free(api) };
        }
    }

    /// Waits, stream by stream, for the work that uses deferred resources, then frees them. Returns whether it waited
    /// for any. Other streams are not waited for. The device must be bound.
    pub(super) fn reclaim(&self, api: &Api) -> bool {
        let mut last: SmallVec<[Use; 4]> = SmallVec::new();
        let entries = lock(&self.deferred);
        for (progress, number) in entries.iter().flat_map(|entry| &entry.uses) {
            match last.iter_mut().find(|(of_progress, _)| Arc::ptr_eq(of_progress, progress)) {
                Some((_, known)) => *known = (*known).max(*number),
                None => last.push((Arc::clone(progress), *number)),
            }
        }
        drop(entries);
        let mut waited = false;
        for (progress, number) in &last {
            waited |= progress.wait(api, *number);
        }
        if waited {
            self.sweep(api);
        }
        waited
    }

    /// Waits for the work that uses deferred resources and frees them. A resource whose work could not be waited for
    /// leaks. The device must be bound.
    pub(super) fn close(&self, api: &Api) {
        self.reclaim(api);
        for Deferred { resource, .. } in std::mem::take(&mut *lock(&self.deferred)) {
            tracing::error!("{resource:?} leaks: the work that uses it could not be waited for");
        }
        self.count.store(0, Ordering::Release);
    }
}
