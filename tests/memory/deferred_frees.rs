//! What is dropped while queued work uses it is freed when that work is known to be over: not before, whatever fails,
//! and without waiting for anything else. Each handle meets the streams of its own device and runtime alone.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness;
use crate::harness::gate::Gate;
use crate::harness::{Sample, still_works};
use crate::turn;
use ascend_attention::rules;
use ascend_attention::sys::bindings::{
    aclError, aclrtEvent, aclrtEventRecordedStatus, aclrtMemMallocPolicy, aclrtStream,
};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{Device, Error, Graph, Result, Runtime, Stream, Tensor};
use ascend_emu::{Site, inject};

/// The emulation with some functions replaced.
fn runtime(change: impl FnOnce(&mut Functions)) -> Runtime {
    harness::runtime();
    let mut functions = harness::functions();
    change(&mut functions);
    let api = Arc::new(Api::from_functions(functions, "emulation, watched"));
    // SAFETY: the functions do what CANN's do, or fail as they may.
    unsafe { Runtime::from_api(api) }.unwrap()
}

#[track_caller]
fn ok(status: aclError) {
    assert_eq!(status, 0);
}

/// Memory, events and streams that the watched functions have made and not freed.
static MEMORY: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static EVENTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static STREAMS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Waits fail at once and nothing is said to be over.
static BROKEN: AtomicBool = AtomicBool::new(false);
/// Waits for events so far.
static WAITS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The next wait for a stream reports a fault while the stream goes on.
    static FAULT: Cell<bool> = const { Cell::new(false) };
}

fn lock(what: &Mutex<Vec<usize>>) -> MutexGuard<'_, Vec<usize>> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

fn made(what: &Mutex<Vec<usize>>, status: aclError, at: *mut *mut c_void) -> aclError {
    if status == 0 {
        // SAFETY: the call succeeded, so the place has its result.
        lock(what).push(unsafe { at.read() }.addr());
    }
    status
}

fn freed(what: &Mutex<Vec<usize>>, at: *mut c_void) {
    lock(what).retain(|&known| known != at.addr());
}

unsafe extern "C" fn malloc(at: *mut *mut c_void, bytes: usize, policy: aclrtMemMallocPolicy) -> aclError {
    // SAFETY: handed on to the caller, as below.
    let status = unsafe { harness::functions().aclrtMalloc.unwrap()(at, bytes, policy) };
    made(&MEMORY, status, at)
}

unsafe extern "C" fn free(at: *mut c_void) -> aclError {
    freed(&MEMORY, at);
    // SAFETY: as above.
    unsafe { harness::functions().aclrtFree.unwrap()(at) }
}

unsafe extern "C" fn create_event(event: *mut aclrtEvent, flag: u32) -> aclError {
    let create = harness::functions().aclrtCreateEventExWithFlag.unwrap();
    // SAFETY: as above.
    made(&EVENTS, unsafe { create(event, flag) }, event)
}

unsafe extern "C" fn destroy_event(event: aclrtEvent) -> aclError {
    freed(&EVENTS, event);
    // SAFETY: as above.
    unsafe { harness::functions().aclrtDestroyEvent.unwrap()(event) }
}

unsafe extern "C" fn create_stream(stream: *mut aclrtStream) -> aclError {
    let create = harness::functions().aclrtCreateStream.unwrap();
    // SAFETY: as above.
    made(&STREAMS, unsafe { create(stream) }, stream)
}

unsafe extern "C" fn destroy_stream(stream: aclrtStream) -> aclError {
    freed(&STREAMS, stream);
    if BROKEN.load(Ordering::SeqCst) {
        return 507_899;
    }
    // SAFETY: as above.
    unsafe { harness::functions().aclrtDestroyStream.unwrap()(stream) }
}

unsafe extern "C" fn synchronize_stream(stream: aclrtStream) -> aclError {
    if FAULT.take() {
        return 507_015;
    }
    if BROKEN.load(Ordering::SeqCst) {
        return 507_899;
    }
    // SAFETY: as above.
    unsafe { harness::functions().aclrtSynchronizeStream.unwrap()(stream) }
}

unsafe extern "C" fn synchronize_event(event: aclrtEvent) -> aclError {
    WAITS.fetch_add(1, Ordering::SeqCst);
    if BROKEN.load(Ordering::SeqCst) {
        return 507_899;
    }
    // SAFETY: as above.
    unsafe { harness::functions().aclrtSynchronizeEvent.unwrap()(event) }
}

unsafe extern "C" fn query_event(event: aclrtEvent, status: *mut aclrtEventRecordedStatus) -> aclError {
    if BROKEN.load(Ordering::SeqCst) {
        return 507_899;
    }
    // SAFETY: as above.
    unsafe { harness::functions().aclrtQueryEventStatus.unwrap()(event, status) }
}

/// Whether waiting for the device as a whole is an error rather than a wait that may take for ever.
static STREAMS_ALONE: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn synchronize_device() -> aclError {
    if STREAMS_ALONE.load(Ordering::SeqCst) {
        return 507_899;
    }
    // SAFETY: as above.
    unsafe { harness::functions().aclrtSynchronizeDevice.unwrap()() }
}

fn watched() -> Runtime {
    runtime(|functions| {
        functions.aclrtMalloc = Some(malloc);
        functions.aclrtFree = Some(free);
        functions.aclrtCreateEventExWithFlag = Some(create_event);
        functions.aclrtDestroyEvent = Some(destroy_event);
        functions.aclrtCreateStream = Some(create_stream);
        functions.aclrtDestroyStream = Some(destroy_stream);
        functions.aclrtSynchronizeStream = Some(synchronize_stream);
        functions.aclrtSynchronizeEvent = Some(synchronize_event);
        functions.aclrtQueryEventStatus = Some(query_event);
        functions.aclrtSynchronizeDevice = Some(synchronize_device);
    })
}

/// Queues a launch on a stream and drops all tensors of it; their addresses.
fn launch_and_drop(stream: &Stream) -> [usize; 4] {
    let [query, key, value] = Sample::new(1).upload(stream);
    let attention = Sample::attention(stream.device());
    let plan = attention.plan((&query, &key, &value)).unwrap();
    let output = plan.launch(stream, (&query, &key, &value)).unwrap();
    [&query, &key, &value, &output.attention].map(|tensor| tensor.as_raw().addr())
}

/// Allocates when there is no memory but what was dropped with work queued behind a gate, which opens when somebody
/// waits for that work.
fn alloc_by_reclaim(device: &Device, gate: &Gate) -> Result<()> {
    let before = WAITS.load(Ordering::SeqCst);
    thread::scope(|scope| {
        scope.spawn(|| {
            let since = Instant::now();
            while WAITS.load(Ordering::SeqCst) == before && since.elapsed().as_secs() < 20 {
                thread::sleep(Duration::from_millis(1));
            }
            gate.open();
        });
        let _failure = inject(Site::Malloc, 1, 207_001);
        device.alloc::<u8>(64).map(drop)
    })
}

#[track_caller]
fn none_freed(addresses: &[usize]) {
    let memory = lock(&MEMORY);
    assert!(addresses.iter().all(|address| memory.contains(address)));
}

#[track_caller]
fn all_freed(addresses: &[usize]) {
    let memory = lock(&MEMORY);
    assert!(!addresses.iter().any(|address| memory.contains(address)));
}

#[test]
fn handles_of_another_device_or_runtime_are_refused() {
    let _turn = turn();
    let one = harness::runtime();
    // The same functions, so that both runtimes have the very same raw context for a device.
    let two = runtime(|_| {});
    let (own, elsewhere) = (one.device(0).unwrap(), one.device(1).unwrap());
    let twin = two.device(0).unwrap();
    assert_eq!(own.as_raw(), twin.as_raw());
    assert_ne!(own, twin);
    for device in [&elsewhere, &twin] {
        let (stream, other) = (own.stream().unwrap(), device.stream().unwrap());
        let gate = Gate::new(&own);
        gate.hold(&stream);
        let tensor = Tensor::<i32>::empty(&own, [64]).unwrap();
        let buffer = own.alloc::<i32>(4).unwrap();
        let event = own.stream().unwrap().record_timing_event().unwrap();
        let later = other.record_timing_event().unwrap();
        let host = || device.host_buffer::<i32>(64).unwrap();
        let errors = [
            tensor.download_async(&stream, host()).unwrap_err(),
            tensor.overwrite_async(&stream, host()).unwrap_err(),
            tensor.download_async(&other, host()).unwrap_err(),
            tensor.download(&other).unwrap_err(),
            tensor.overwrite(&other, &[0; 64]).unwrap_err(),
            tensor.copy_from(&other, &tensor).unwrap_err(),
            buffer.to_vec(&other).unwrap_err(),
            buffer.copy_from(&other, &[1; 4]).unwrap_err(),
            event.record(&other).unwrap_err(),
            other.wait_event(&event).unwrap_err(),
            later.elapsed_since(&event).unwrap_err(),
            tensor.check_device("tensor", device).unwrap_err(),
            stream.check_device("stream", device).unwrap_err(),
        ];
        for (at, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(error.breaks(&rules::ARGUMENT_DEVICE), "{at}: {text}");
            assert!(text.contains("of the same runtime"), "{at}: {text}");
        }
        tensor.check_device("tensor", &own).unwrap();
        stream.check_device("stream", &own).unwrap();
        // Nothing of it marks the work on the stream as over.
        drop(tensor);
        assert!(!stream.is_idle().unwrap());
        gate.open();
        stream.synchronize().unwrap();
        still_works(&stream);
        still_works(&other);
    }
}

#[test]
fn a_reclaim_waits_for_the_streams_that_dropped_memory_is_used_on_alone() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let _turn = turn();
    let device = watched().device(0).unwrap();
    let (busy, held) = (device.stream().unwrap(), device.stream().unwrap());
    let (gate, slow) = (Gate::new(&device), Gate::new(&device));
    gate.hold(&held);
    slow.hold(&busy);
    let dropped = launch_and_drop(&busy);
    STREAMS_ALONE.store(true, Ordering::SeqCst);
    let allocated = alloc_by_reclaim(&device, &slow);
    STREAMS_ALONE.store(false, Ordering::SeqCst);
    allocated.unwrap();
    all_freed(&dropped);
    assert!(!held.is_idle().unwrap());
    gate.open();
}

#[test]
fn a_fault_that_a_reclaim_is_told_is_told_by_the_next_synchronisation() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let _turn = turn();
    let device = watched().device(0).unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    gate.hold(&stream);
    let fault = inject(Site::Launch, 1, 507_015);
    launch_and_drop(&stream);
    drop(fault);
    alloc_by_reclaim(&device, &gate).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(&error, Error::Acl { status, .. } if status.0 == 507_015), "{error}");
    stream.synchronize().unwrap();
    still_works(&stream);
}

/// CANN goes on with a stream after a fault, unless the stream's failure mode says otherwise.
#[test]
fn after_a_fault_memory_of_work_that_goes_on_is_not_freed() {
    let _turn = turn();
    let device = watched().device(0).unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    gate.hold(&stream);
    let dropped = launch_and_drop(&stream);
    FAULT.set(true);
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(&error, Error::Acl { status, .. } if status.0 == 507_015), "{error}");
    none_freed(&dropped);
    device.alloc::<u8>(64).unwrap();
    none_freed(&dropped);
    gate.open();
    stream.synchronize().unwrap();
    all_freed(&dropped);
    still_works(&stream);
}

#[test]
fn a_stream_whose_work_cannot_be_waited_for_ends_once_it_can() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let _turn = turn();
    let device = watched().device(0).unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    let raw = stream.as_raw().addr();
    gate.hold(&stream);
    let dropped = launch_and_drop(&stream);
    BROKEN.store(true, Ordering::SeqCst);
    drop(stream);
    none_freed(&dropped);
    assert!(lock(&STREAMS).contains(&raw));
    BROKEN.store(false, Ordering::SeqCst);
    alloc_by_reclaim(&device, &gate).unwrap();
    all_freed(&dropped);
    assert!(!lock(&STREAMS).contains(&raw));
}

#[test]
fn what_cannot_be_waited_for_is_leaked_when_its_device_is_given_up() {
    let _turn = turn();
    // Keeps the device in use: its reset would free everything.
    let keeper = harness::device();
    let gate = Gate::new(&keeper);
    let device = watched().device(0).unwrap();
    let stream = device.stream().unwrap();
    let raw = stream.as_raw().addr();
    gate.hold(&stream);
    let dropped = launch_and_drop(&stream);
    BROKEN.store(true, Ordering::SeqCst);
    drop((stream, device));
    none_freed(&dropped);
    assert!(lock(&STREAMS).contains(&raw));
    BROKEN.store(false, Ordering::SeqCst);
    gate.open();
    // Nobody else does it now.
    let api = harness::functions();
    let take = |of: &Mutex<Vec<usize>>| std::mem::take(&mut *lock(of));
    let handle = ptr::without_provenance_mut::<c_void>;
    keeper.memory_info().unwrap();
    // SAFETY: each was made by the watched functions, is alive, and is freed once; a stream waits for its work.
    unsafe {
        take(&STREAMS).into_iter().for_each(|at| ok(api.aclrtDestroyStream.unwrap()(handle(at))));
        take(&EVENTS).into_iter().for_each(|at| ok(api.aclrtDestroyEvent.unwrap()(handle(at))));
        take(&MEMORY).into_iter().for_each(|at| ok(api.aclrtFree.unwrap()(handle(at))));
    }
    still_works(&keeper.stream().unwrap());
}

#[test]
fn during_a_capture_other_threads_reclaim_and_nobody_waits_for_the_device() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let _turn = turn();
    let device = watched().device(0).unwrap();
    let stream = device.stream().unwrap();
    let (from, to) = (stream.upload(&[7i32; 64], [64]).unwrap(), stream.upload(&[0i32; 64], [64]).unwrap());
    let (mut graph, ()) = Graph::capture(&device, (), |capture, ()| {
        let refused = device.synchronize().unwrap_err();
        assert!(matches!(refused, Error::Capturing { .. }), "{refused}");
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let refused = device.synchronize().unwrap_err();
                assert!(matches!(&refused, Error::Acl { status, .. } if status.0 == 107_027), "{refused}");
                let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
                gate.hold(&stream);
                launch_and_drop(&stream);
                alloc_by_reclaim(&device, &gate)
            });
            other.join().unwrap()
        })?;
        to.copy_from(capture, &from)
    })
    .unwrap();
    graph.launch(&stream, graph.update()).unwrap();
    assert_eq!(to.download(&stream).unwrap(), [7; 64]);
    device.synchronize().unwrap();
}
