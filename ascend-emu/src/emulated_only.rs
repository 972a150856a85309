//! What the emulation computes beyond the operators of CANN: functions of Rust, which the C ABI does not have.

use ascend_spec::attention_problem::SoftCap;
use std::cell::Cell;

thread_local! {
    static SOFT_CAP: Cell<Option<SoftCap>> = const { Cell::new(None) };
}

/// Caps the scores of the calls of FusedInferAttentionScore that `prepare` prepares on the calling thread: every launch
/// of their executors computes `cap * tanh(score / cap)` in the place of a scaled score, before position bias, mask and
/// softmax. **No operator of an NPU does.** Executors of `GetMaxWorkspaceSize` compute nothing. Within another cap the
/// inner one counts; the outer one is in force again behind it, also where `prepare` panics.
///
/// ```
/// use ascend_emu::emulated_only::with_soft_cap;
/// use ascend_spec::attention_problem::SoftCap;
///
/// let cap = SoftCap::new(50.0).expect("a number above 0");
/// let prepared = with_soft_cap(cap, || {
///     // calls that are prepared here cap their scores
///     true
/// });
/// assert!(prepared);
/// ```
pub fn with_soft_cap<R>(cap: SoftCap, prepare: impl FnOnce() -> R) -> R {
    let _restored = Restored(SOFT_CAP.replace(Some(cap)));
    prepare()
}

/// The cap that is in force on the calling thread.
pub(crate) fn soft_cap() -> Option<SoftCap> {
    SOFT_CAP.try_with(Cell::get).ok().flatten()
}

/// Brings a thread's former cap back when dropped.
struct Restored(Option<SoftCap>);

impl Drop for Restored {
    fn drop(&mut self) {
        // Fails only while the thread ends, when no call can follow.
        let _ = SOFT_CAP.try_with(|cap| cap.set(self.0));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn caps_nest_and_stay_on_their_thread() {
        let soft_cap_of = |cap| SoftCap::new(cap).unwrap();
        let cap = || soft_cap().map(SoftCap::get);
        with_soft_cap(soft_cap_of(50.0), || {
            with_soft_cap(soft_cap_of(30.0), || {
                assert_eq!(cap(), Some(30.0));
                assert_eq!(std::thread::spawn(soft_cap).join().unwrap(), None);
            });
            assert_eq!(cap(), Some(50.0));
            assert!(std::panic::catch_unwind(|| with_soft_cap(soft_cap_of(20.0), || panic!("a call"))).is_err());
            assert_eq!(cap(), Some(50.0));
        });
        assert_eq!(cap(), None);
    }
}
