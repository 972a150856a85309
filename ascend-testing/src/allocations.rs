//! How often the calling thread asked the heap for memory, in a test program whose global allocator is [`Counting`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Allocations of this thread so far.
pub fn allocations() -> usize {
    ALLOCATIONS.get()
}

const FIRST_ROUNDS: usize = 8;
const TRIES: usize = 6;

/// The most rounds of [`in_steady_state`].
pub const MOST_ROUNDS: usize = FIRST_ROUNDS + TRIES * 50;

/// Allocations of 50 rounds, after the first ones made the workspace.
///
/// A queue grows where the device falls behind further than ever before, which a busy machine may cause at any
/// time, and keeps its room. So rounds that allocated are tried again, a few times: what allocates in every round, or
/// in every tenth, does so in all of them.
pub fn in_steady_state(mut round: impl FnMut()) -> usize {
    for _ in 0..FIRST_ROUNDS {
        round();
    }
    let mut fifty_rounds = || {
        let before = allocations();
        for _ in 0..50 {
            round();
        }
        allocations() - before
    };
    let tries = std::iter::repeat_with(&mut fifty_rounds).take(TRIES);
    let mut last = 0;
    for allocated in tries {
        last = allocated;
        if allocated == 0 {
            break;
        }
    }
    last
}

/// The system's allocator, counting what each thread asks for.
pub struct Counting;

fn count() {
    // A thread that ends may allocate when its count is gone.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: hands everything on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps GlobalAlloc's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps GlobalAlloc's contract, which is the same.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps GlobalAlloc's contract, which is the same.
        unsafe { System.dealloc(at, layout) }
    }
}
