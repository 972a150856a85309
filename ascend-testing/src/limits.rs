//! Calls with drawn numbers, each of which has to answer: no panic, no allocation of absurd size, no call that never
//! ends.
//!
//! Allocations of more than [`LARGEST`] bytes fail in a program whose global allocator is [`Limited`]. A function that
//! asks first reports an error; one that does not aborts the program. A call that takes longer than [`PATIENCE`] ends
//! it too.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use ascend_attention::{Device, Stream};
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::draw::Draw;
use crate::harness;

const LARGEST: usize = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

/// A device of 64 MiB, where it is emulated: absurd sizes are refused by a small device too, and cost nothing there.
pub fn device() -> Device {
    static ONCE: Once = Once::new();
    // SAFETY: whatever else this program does with its environment goes through the standard library, which takes
    // turns.
    ONCE.call_once(|| unsafe { std::env::set_var("ASCEND_EMU_MEMORY", (64 << 20).to_string()) });
    harness::device()
}

pub fn stream() -> Stream {
    device().stream().unwrap()
}

/// The small device is one test's at a time: another may fill it.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The system's allocator, which refuses more than [`LARGEST`] bytes.
pub struct Limited;

// SAFETY: memory comes from the system's allocator, or not at all.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > LARGEST {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// A function of the crate, called with numbers that are drawn.
pub type Call = (&'static str, fn(&mut Draw));

/// Ends the program when a call takes too long.
struct Watch {
    running: &'static Mutex<Option<(&'static str, Instant)>>,
}

impl Watch {
    fn start() -> Self {
        let running: &'static Mutex<Option<(&'static str, Instant)>> = Box::leak(Box::new(Mutex::new(None)));
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let now = *running.lock().unwrap();
                if let Some((name, since)) = now
                    && since.elapsed() > PATIENCE
                {
                    // Past what the test harness keeps of a test's output.
                    let _ = writeln!(std::io::stderr(), "{name} does not end");
                    std::process::abort();
                }
            }
        });
        Self { running }
    }

    fn run(&self, (name, call): Call, seed: u64) -> Result<(), String> {
        let _turn = turn();
        *self.running.lock().unwrap() = Some((name, Instant::now()));
        let outcome = catch_unwind(AssertUnwindSafe(|| call(&mut Draw::new(seed))));
        *self.running.lock().unwrap() = None;
        outcome.map_err(|_| format!("{name} panics with the numbers of seed {seed}"))
    }
}

pub fn try_all(calls: &[Call]) {
    let watch = Watch::start();
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = if cfg!(debug_assertions) { 100 } else { 600 };
    }
    proptest!(config, |(seed: u64)| {
        for call in calls {
            prop_assert_eq!(watch.run(*call, seed), Ok(()));
        }
    });
}
