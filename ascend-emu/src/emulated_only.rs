//! What the emulation computes beyond the operators of CANN: functions of Rust, which the C ABI does not have.

use ascend_spec::attention_problem::SoftCap;
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static SOFT_CAP: Cell<Option<SoftCap>> = const { Cell::new(None) };
}

/// Caps the scores of the calls of FusedInferAttentionScore that the calling thread prepares until the result is
/// dropped: every launch of their executors computes `cap * tanh(score / cap)` in the place of a scaled score, before
/// position bias, mask and softmax. **No operator of an NPU does.** Executors of `GetMaxWorkspaceSize` compute nothing.
///
/// `None` where the cap is not above 0 or not finite in 32 bits.
///
/// ```
/// let capped = ascend_emu::emulated_only::soft_cap_scope(50.0).expect("a number above 0");
/// // calls that are prepared on this thread cap their scores
/// drop(capped);
/// assert!(ascend_emu::emulated_only::soft_cap_scope(0.0).is_none());
/// ```
pub fn soft_cap_scope(cap: f64) -> Option<SoftCapScope> {
    let cap = SoftCap::new(cap)?;
    Some(SoftCapScope { before: SOFT_CAP.replace(Some(cap)), thread: PhantomData })
}

/// The cap that is in force on the calling thread.
pub(crate) fn soft_cap() -> Option<SoftCap> {
    SOFT_CAP.try_with(Cell::get).ok().flatten()
}

/// Ends the cap of a thread's calls when dropped; made by [`soft_cap_scope`].
#[derive(Debug)]
#[must_use = "calls are capped only until this is dropped"]
pub struct SoftCapScope {
    before: Option<SoftCap>,
    /// Not `Send`: the cap is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for SoftCapScope {
    fn drop(&mut self) {
        let before = self.before;
        // Fails only while the thread ends, when no call can follow.
        let _ = SOFT_CAP.try_with(|cap| cap.set(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_nest_and_stay_on_their_thread() {
        let cap = || soft_cap().map(SoftCap::get);
        let outer = soft_cap_scope(50.0);
        let inner = soft_cap_scope(30.0);
        assert_eq!(cap(), Some(30.0));
        assert_eq!(std::thread::spawn(soft_cap).join().unwrap(), None);
        drop(inner);
        assert_eq!(cap(), Some(50.0));
        drop(outer);
        assert_eq!(cap(), None);
    }
}
