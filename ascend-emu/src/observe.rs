//! An observer of the calls of FusedInferAttentionScore.

use crate::memory::DeviceMemory;
use ascend_spec::Target;
use ascend_spec::ops::fused_infer_attention_score::{Argument, FiaCall, Version};
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;

/// Sees each call of FusedInferAttentionScore.
pub trait Observer: Send + Sync {
    /// A call has been computed, or has failed meanwhile with a message. Runs on the thread of the call's stream,
    /// before all work that was queued after the call.
    fn ran(&self, call: &ObservedCall<'_>, outcome: Result<(), &str>);

    /// The first phase has refused a call, with a message. The bytes of its tensors read as 0, since work that makes
    /// them may still be under way.
    fn refused(&self, call: &ObservedCall<'_>, message: &str);
}

/// A call of FusedInferAttentionScore, and its tensors.
#[allow(missing_debug_implementations, reason = "a function cannot be shown")]
pub struct ObservedCall<'a> {
    /// Tensors and attributes.
    pub call: &'a FiaCall<'a>,
    /// The version of the operator that was called.
    pub version: Version,
    /// The product and release that are emulated.
    pub target: Target,
    tensors: Option<Tensors<'a>>,
}

/// The memory of a call that runs.
struct Tensors<'a> {
    memory: &'a DeviceMemory,
    /// Bytes that the call touches, from each tensor's base address.
    touches: &'a [(Argument, Range<u64>)],
    address: &'a dyn Fn(Argument) -> usize,
}

impl<'a> ObservedCall<'a> {
    /// A call whose tensors cannot be read.
    pub(crate) fn unread(call: &'a FiaCall<'a>, version: Version, target: Target) -> Self {
        ObservedCall { call, version, target, tensors: None }
    }

    /// Returns this call with tensors that can be read.
    ///
    /// # Safety
    ///
    /// The ranges are live, and no thread writes to them as long as the result exists.
    pub(crate) unsafe fn with_tensors(
        self,
        memory: &'a DeviceMemory,
        touches: &'a [(Argument, Range<u64>)],
        address: &'a dyn Fn(Argument) -> usize,
    ) -> Self {
        ObservedCall { tensors: Some(Tensors { memory, touches, address }), ..self }
    }

    /// Copies bytes of a tensor to `to`, from byte `start` after its base address on. Bytes that the call does not
    /// access read as 0.
    pub fn read(&self, argument: Argument, start: usize, to: &mut [u8]) {
        to.fill(0);
        let Some(tensors) = &self.tensors else { return };
        let base = (tensors.address)(argument);
        let end = start.saturating_add(to.len());
        let touches = tensors.touches.iter().filter(|(touched, _)| *touched == argument);
        for (_, range) in touches {
            let bounds = [range.start, range.end].map(|byte| usize::try_from(byte).unwrap_or(usize::MAX));
            let (from, until) = (bounds[0].max(start), bounds[1].min(end));
            let Some(count) = until.checked_sub(from).filter(|_| base != 0) else {
                continue;
            };
            let part = to.get_mut(from - start..);
            let Some(part) = part.and_then(|part| part.get_mut(..count)) else {
                continue;
            };
            let source = tensors.memory.host(base.saturating_add(from));
            // SAFETY: the bytes are within a range that is live and that no thread writes to (`with_tensors`); `to` is
            // memory of the caller's own, which no tensor shares.
            unsafe { ptr::copy_nonoverlapping(source.cast_const(), part.as_mut_ptr(), count) };
        }
    }
}

static OBSERVER: OnceLock<&'static dyn Observer> = OnceLock::new();

/// Sets the observer of the process, which sees every call from now on. Returns false if the process has one already.
pub fn observe(observer: &'static dyn Observer) -> bool {
    OBSERVER.set(observer).is_ok()
}

/// The observer of the process.
pub(crate) fn observer() -> Option<&'static dyn Observer> {
    OBSERVER.get().copied()
}
