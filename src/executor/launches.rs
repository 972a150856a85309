//! What every operator's launch has in common, around the function of phase two.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use ascend_sys::Api;
use ascend_sys::bindings as sys;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::runtime::{Context, lock};

use super::Queue;

/// The launches of a prepared call, which take turns. `S` is what each of them changes: the executor and its addresses.
pub(crate) struct Launches<S> {
    context: Arc<Context>,
    workspace_bytes: usize,
    state: Mutex<S>,
}

/// What phase two takes besides the executor.
pub(crate) struct Slot<'a> {
    pub(crate) api: &'a Api,
    /// Scratch memory of the planned size, which is kept for as long as the launch may use it.
    pub(crate) workspace: *mut c_void,
    pub(crate) bytes: u64,
    pub(crate) stream: sys::aclrtStream,
}

/// A launch that was queued.
pub(crate) struct Queued<'q, Q> {
    queue: &'q Q,
    number: u64,
}

impl<Q: Queue> Queued<'_, Q> {
    /// Keeps memory for as long as the launch may use it.
    #[inline]
    pub(crate) fn keep(&self, memory: &Arc<Memory>) {
        self.queue.keep(self.number, memory);
    }
}

impl<S> Launches<S> {
    /// Launches with as much workspace as phase one said.
    pub(crate) fn new(context: &Arc<Context>, workspace_bytes: u64, state: S) -> Result<Self> {
        let addressed = usize::try_from(workspace_bytes);
        Ok(Self {
            context: Arc::clone(context),
            workspace_bytes: addressed.map_err(|_| {
                Error::invalid("workspace", workspace_bytes, "bytes that can be addressed")
            })?,
            state: Mutex::new(state),
        })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Refuses a queue of another device.
    #[inline]
    pub(crate) fn check_device(&self, queue: &impl Queue) -> Result<()> {
        self.context.admits("stream", queue.context())
    }

    /// Queues a launch: `point` gives the executor the addresses of tensors that are laid out as planned, `phase_two` calls
    /// the operator, and `keep` keeps the tensors, which the caller borrows until then.
    ///
    /// Allocates no host memory from the second launch on a stream on.
    #[inline]
    pub(crate) fn queue<Q: Queue>(
        &self,
        queue: &Q,
        point: impl FnOnce(&Api, &mut S) -> Result<()>,
        phase_two: impl FnOnce(&S, &Slot<'_>) -> Result<()>,
        keep: impl FnOnce(&Queued<'_, Q>) -> Result<()>,
    ) -> Result<()> {
        let api = self.context.bind()?;
        let stream = queue.raw()?;
        let workspace = match self.workspace_bytes {
            0 => None,
            bytes => Some(queue.workspace(bytes)?),
        };
        let slot = Slot {
            api,
            workspace: (workspace.as_ref()).map_or(ptr::null_mut(), |memory| memory.address()),
            bytes: self.workspace_bytes as u64,
            stream,
        };
        let mut state = lock(&self.state);
        point(api, &mut state)?;
        let outcome = phase_two(&state, &slot);
        // Also after a failure: part of the work may have been queued.
        let number = queue.queued();
        drop(state);
        let queued = Queued { queue, number };
        let kept = keep(&queued);
        if let Some(workspace) = &workspace {
            queued.keep(workspace);
        }
        outcome.and(kept)
    }
}
