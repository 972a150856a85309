//! A launch into existing tensors allocates nothing on the host.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use harness::{Sample, poisoned};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks for.
struct Counting;

fn count() {
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: hands everything on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: handed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: handed on to the caller.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: handed on to the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_launch_allocates_nothing() {
    let stream = harness::stream();
    let sample = Sample::new(1);
    let layers: Vec<_> = (0..4).map(|_| sample.upload(&stream)).collect();
    let [query, key, value] = &layers[0];
    let attention = Sample::attention(stream.device()).softmax_lse(true);
    let plan = attention.plan(query, key, value).unwrap();
    let mut outputs: Vec<_> = (0..4).map(|_| poisoned(&plan, &stream)).collect();
    let mut step = || {
        for ([query, key, value], output) in layers.iter().zip(&mut outputs) {
            plan.launch_into(&stream, query, key, value, output)
                .unwrap();
        }
        stream.synchronize().unwrap();
    };
    // The first launches make the workspace and fill queues that grow once.
    for _ in 0..8 {
        step();
    }
    let before = ALLOCATIONS.get();
    for _ in 0..50 {
        step();
    }
    let allocated = ALLOCATIONS.get() - before;
    assert_eq!(allocated, 0, "200 launches allocated {allocated} times");
    for output in outputs {
        sample.check(&output.attention.download(&stream).unwrap());
    }
    assert!(ALLOCATIONS.get() > before, "the allocator counts");
}
