//! Every mask is made once, what is in use is never freed, and a hit costs next to nothing.

use crate::allocations;
use crate::harness;

use std::num::NonZeroU64;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

use allocations::allocations;
use ascend_attention::mask::{CacheCounts, MaskForm};
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{CompressedMask, DType};
use ascend_attention::{CausalOrigin, Device, SlidingWindow};
use harness::{Sample, device, poisoned, stream};

/// The device has one cache, whose counts each test reads: they take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A device with an empty cache, whose counts begin at 0: no other test holds the device.
fn fresh() -> (MutexGuard<'static, ()>, Device) {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = device();
    assert_eq!(device.masks().cache().counts(), CacheCounts::default());
    (turn, device)
}

fn window(keys: usize) -> SlidingWindow {
    SlidingWindow::new(keys).unwrap()
}

#[test]
fn window_is_part_of_the_key() {
    let (_turn, device) = fresh();
    let stream = device.stream().unwrap();
    let of = |keys| {
        let masks = device.masks();
        let tensor = masks.sliding_window_matrix(window(keys), 6, 6, MaskForm::BOOL);
        tensor.unwrap().download_bytes(&stream).unwrap()
    };
    let (two, three) = (of(2), of(3));
    assert_ne!(two, three);
    // The last row: how many keys it sees.
    let seen = |mask: &[u8]| mask[30..].iter().filter(|&&hidden| hidden == 0).count();
    assert_eq!((seen(&two), seen(&three)), (2, 3));
    assert_eq!(of(2), two);
    assert_eq!(device.masks().cache().counts().misses, 2);
}

#[test]
fn another_dtype_is_made_anew_and_never_converted() {
    let (_turn, device) = fresh();
    let stream = device.stream().unwrap();
    let of = |form| {
        let masks = device.masks();
        let tensor = masks.causal_matrix(CausalOrigin::LeftUp, 2, 2, form).unwrap();
        (tensor.dtype(), tensor.download_bytes(&stream).unwrap())
    };
    let infinite = MaskForm::infinite(DType::Float16).unwrap();
    let ones = MaskForm::ones(DType::Float16).unwrap();
    let bf16 = MaskForm::ones(DType::Bf16).unwrap();
    for _ in 0..2 {
        assert_eq!(of(MaskForm::BOOL), (DType::Bool, vec![0, 1, 0, 0]));
        assert_eq!(of(MaskForm::INT8), (DType::Int8, vec![0, 1, 0, 0]));
        // -inf, then 1, of the same type; then 1 of another.
        assert_eq!(of(infinite), (DType::Float16, vec![0, 0, 0, 0xfc, 0, 0, 0, 0]));
        assert_eq!(of(ones), (DType::Float16, vec![0, 0, 0, 0x3c, 0, 0, 0, 0]));
        assert_eq!(of(bf16), (DType::Bf16, vec![0, 0, 0x80, 0x3f, 0, 0, 0, 0]));
    }
    assert_eq!(device.masks().cache().counts().misses, 5);
}

#[test]
fn length_is_updated_when_the_causal_mask_grows() {
    let (_turn, device) = fresh();
    let stream = device.stream().unwrap();
    let view = |len: usize| {
        let masks = device.masks();
        let tensor = masks.causal_view(CausalOrigin::LeftUp, len, len, MaskForm::BOOL).unwrap();
        assert_eq!(tensor.shape(), [len, len]);
        let bytes = tensor.download_bytes(&stream).unwrap();
        for (at, &hidden) in bytes.iter().enumerate() {
            assert_eq!(hidden == 1, at % len > at / len, "{len}: {at}");
        }
        tensor.as_raw()
    };
    let misses = || device.masks().cache().counts().misses;
    view(4);
    // A mask that is too short is never served.
    view(5);
    assert_eq!(misses(), 2);
    // It grew to 8, by doubling: nothing is made for what fits.
    let at = view(8);
    assert_eq!(view(1), at);
    assert_eq!(view(7), at);
    assert_eq!(misses(), 2);
    view(100);
    view(5);
    assert_eq!(misses(), 3);
    assert_eq!(device.masks().cache().counts().tensors, 1);
}

#[test]
fn rows_behind_a_cache_are_views_of_the_same_square() {
    let (_turn, device) = fresh();
    let stream = device.stream().unwrap();
    let masks = device.masks();
    let form = MaskForm::UINT8;
    masks.causal_view(CausalOrigin::LeftUp, 9, 9, form).unwrap();
    for (rows, keys) in [(3, 9), (1, 9), (9, 9), (0, 4), (2, 2)] {
        let of = |view: bool| {
            let origin = CausalOrigin::RightDown;
            let tensor = if view {
                masks.causal_view(origin, rows, keys, form).unwrap()
            } else {
                masks.causal_matrix(origin, rows, keys, form).unwrap()
            };
            assert_eq!(tensor.shape(), [rows, keys]);
            assert!(view || tensor.is_contiguous());
            tensor.download_bytes(&stream).unwrap()
        };
        let before = masks.cache().counts().misses;
        let view = of(true);
        assert_eq!(masks.cache().counts().misses, before);
        assert_eq!(view, of(false));
    }
    // More rows than keys: no view of the square, and still right.
    let tensor = masks.causal_view(CausalOrigin::RightDown, 3, 2, form).unwrap();
    assert_eq!(tensor.download_bytes(&stream).unwrap(), [1, 1, 0, 1, 0, 0]);
}

#[test]
fn many_threads_make_each_mask_once() {
    let (_turn, device) = fresh();
    const THREADS: usize = 64;
    const MASKS: usize = 1000;
    let start = Barrier::new(THREADS);
    let addresses: Vec<Vec<usize>> = thread::scope(|scope| {
        let work = |thread: usize| {
            let (device, start) = (&device, &start);
            move || {
                start.wait();
                let mut addresses = vec![0; MASKS];
                for step in 0..MASKS {
                    // Threads meet at the same masks, but not all in step.
                    let number = (step + thread % 7) % MASKS;
                    let form = [MaskForm::BOOL, MaskForm::INT8][number % 2];
                    let masks = device.masks();
                    let keys = window(number / 2 + 1);
                    let mask = masks.sliding_window_matrix(keys, 2, 501, form).unwrap();
                    addresses[number] = mask.as_raw().addr();
                }
                addresses
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let counts = device.masks().cache().counts();
    // Window 500 and 501 of 501 keys show the first row the same, the second not: all masks differ.
    assert_eq!(counts.misses, MASKS as u64);
    assert_eq!(counts.hits, (THREADS * MASKS - MASKS) as u64);
    assert_eq!((counts.tensors, counts.evictions, counts.unkept), (MASKS, 0, 0));
    assert_eq!(counts.bytes, MASKS * 2 * 501);
    assert!(addresses.iter().all(|of| *of == addresses[0]));
    let mut distinct = addresses[0].clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), MASKS);
}

#[test]
fn threads_that_ask_for_growing_lengths_all_get_enough() {
    let (_turn, device) = fresh();
    thread::scope(|scope| {
        for thread in 0..16usize {
            let device = &device;
            scope.spawn(move || {
                for step in 0..20usize {
                    let len = 1 + (thread * 31 + step * 57) % 200;
                    let form = MaskForm::INT8;
                    let masks = device.masks();
                    let mask = masks.causal_view(CausalOrigin::LeftUp, len, len, form).unwrap();
                    assert_eq!(mask.shape(), [len, len]);
                }
            });
        }
    });
    let counts = device.masks().cache().counts();
    assert_eq!(counts.tensors, 1);
    assert!(counts.misses <= 9, "{counts:?}: doubling from 1 to 256");
}

#[test]
fn a_hit_allocates_nothing() {
    let (_turn, device) = fresh();
    let masks = device.masks();
    let chunk = NonZeroU64::new(16).unwrap();
    let rows = TriangleRows::whole(64);
    let ask = || {
        drop(masks.causal(CausalOrigin::RightDown).unwrap());
        drop(masks.sliding_window(window(7)).unwrap());
        drop(masks.sliding_window_matrix(window(7), 64, 64, MaskForm::BOOL).unwrap());
        drop(masks.causal_view(CausalOrigin::RightDown, 5, 9, MaskForm::INT8).unwrap());
        drop(masks.causal_full(CausalOrigin::LeftUp, 9, 9).unwrap());
        drop(masks.prefix(3, 8, 8).unwrap());
        drop(masks.local(chunk, 8, 40).unwrap());
        let sizes = TriangleMix::new(2, 4, 8);
        let triangle = sizes.geometry(TrianglePart::Triangle, rows);
        drop(masks.geometry(triangle).unwrap());
        drop(masks.template(CompressedMask::Prefix, MaskForm::BOOL).unwrap());
    };
    ask();
    let (misses, before) = (masks.cache().counts().misses, allocations());
    for _ in 0..100 {
        ask();
    }
    let allocated = allocations() - before;
    assert_eq!(masks.cache().counts().misses, misses);
    assert_eq!(allocated, 0, "900 hits allocated {allocated} times");
    drop(vec![0u8; 1]);
    assert!(allocations() > before, "the allocator counts");
}

#[test]
fn memory_never_passes_the_bound() {
    let (_turn, device) = fresh();
    let masks = device.masks();
    let cache = masks.cache();
    const BOUND: usize = 10_000;
    cache.set_bound(BOUND);
    let mut seed = 1u64;
    for _ in 0..2000 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (rows, keys) = ((seed >> 33) as usize % 60, (seed >> 45) as usize % 60);
        let form = MaskForm::BOOL;
        let origin = CausalOrigin::LeftUp;
        let mask = if seed >> 60 == 0 {
            masks.causal_view(origin, rows, keys, form).unwrap()
        } else {
            masks.causal_matrix(origin, rows, keys, form).unwrap()
        };
        assert_eq!(mask.shape(), [rows, keys]);
        let counts = cache.counts();
        assert!(counts.bytes <= BOUND && counts.peak_bytes <= BOUND, "{counts:?}");
    }
    let counts = cache.counts();
    assert!(counts.evictions > 100 && counts.bytes > BOUND / 2, "{counts:?}");

    // What was asked for last stays; what was asked for first goes.
    cache.clear();
    assert_eq!((cache.counts().bytes, cache.counts().tensors), (0, 0));
    let of = |rows| masks.causal_matrix(CausalOrigin::LeftUp, rows, 100, MaskForm::BOOL).unwrap();
    drop((of(40), of(41)));
    drop(of(40));
    drop(of(42));
    let misses = cache.counts().misses;
    drop(of(40));
    assert_eq!(cache.counts().misses, misses, "the mask asked for lately was evicted");
    drop(of(41));
    assert_eq!(cache.counts().misses, misses + 1, "the oldest mask was kept");

    // A mask larger than the bound, or without room beside masks that are held, is the caller's alone.
    let unkept = cache.counts().unkept;
    drop(of(101));
    let held = [of(40), of(41)];
    drop(of(30));
    assert_eq!(cache.counts().unkept, unkept + 2);
    assert!(cache.counts().peak_bytes <= BOUND);
    drop(held);
    cache.set_bound(0);
    assert_eq!((cache.counts().bytes, cache.counts().tensors), (0, 0));
    assert_eq!(of(3).shape(), [3, 100]);
}

#[test]
fn a_mask_in_flight_is_never_freed() {
    let (_turn, device) = fresh();
    #[cfg(feature = "emulation")]
    let strict = (!harness::on_npu()).then(|| ascend_emu::check_scope(ascend_emu::Check::Strict));
    let stream = stream();
    let masks = device.masks();
    let cache = masks.cache();
    // Room for one mask of the sample's size and a little.
    let rows = Sample::SHAPE[2];
    cache.set_bound(rows * rows + 100);
    let sample = Sample::new(1);
    let [query, key, value] = sample.upload(&stream);
    let full = || {
        let form = MaskForm::INT8;
        let tensor = masks.causal_matrix(CausalOrigin::LeftUp, rows, rows, form).unwrap();
        ascend_attention::Mask::all_mask(tensor)
    };
    for round in 0..20 {
        let plan = Sample::attention(&device).mask(full()).plan((&query, &key, &value)).unwrap();
        let mut output = poisoned(&plan, &stream);
        for _ in 0..3 {
            plan.launch_into(&stream, (&query, &key, &value), &mut output).unwrap();
        }
        // Nobody holds the mask any more but the cache and the queued work.
        drop(plan);
        let misses = cache.counts().misses;
        let other = masks.causal_matrix(CausalOrigin::LeftUp, rows, rows - 1, MaskForm::BOOL).unwrap();
        assert_eq!(cache.counts().misses, misses + 1);
        assert!(cache.counts().bytes <= cache.bound());
        if round % 2 == 0 {
            // Let go of everything while the work is in flight.
            cache.clear();
        }
        drop(other);
        sample.check(&output.attention.download(&stream).unwrap());
        // The work is over: now its mask makes room.
        stream.synchronize().unwrap();
        let other = masks.causal_matrix(CausalOrigin::LeftUp, rows, rows - 2, MaskForm::BOOL).unwrap();
        assert_eq!(cache.counts().tensors, 1);
        drop(other);
    }
    assert!(cache.counts().evictions >= 10, "{:?}", cache.counts());
    #[cfg(feature = "emulation")]
    drop(strict);
}

#[cfg(feature = "emulation")]
#[test]
fn a_mask_that_cannot_be_made_leaves_no_trace() {
    use ascend_emu::{Site, inject};

    let (_turn, device) = fresh();
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let masks = device.masks();
    let ask = || masks.causal_view(CausalOrigin::LeftUp, 8, 8, MaskForm::BOOL);
    for site in [Site::Malloc, Site::Memcpy] {
        let fault = inject(site, 1, 507_899);
        let error = ask().unwrap_err();
        drop(fault);
        assert!(error.to_string().contains("507899"), "{error}");
        let counts = masks.cache().counts();
        assert_eq!((counts.bytes, counts.tensors, counts.misses), (0, 0, 0), "{site:?}");
    }
    assert_eq!(ask().unwrap().shape(), [8, 8]);
    assert_eq!(masks.cache().counts().misses, 1);
}
