//! Devices and contexts, and the current context of each thread.

use crate::collectives;
use crate::config::{check, config, validate};
use crate::fault;
use crate::finding_kind::FindingKind;
use crate::handle::{Id, Kind, Table};
use crate::lock::Lock;
use crate::machine::Behaviour;
use crate::machine::Chip;
use crate::machines::{behaviour_at, soc_name_at};
use crate::runtime::stream::{ContextNumber, STREAMS, Settings, Stream, refuse_default};
use crate::sanitizer::allocation_table;
use crate::sanitizer::{Suspicion, report};
use crate::status::{
    CONTEXT_NULL, INTERNAL, INVALID_DEVICE, NULL_PARAM, Outcome, PARAM_INVALID, REPEAT_FINALIZE, REPEAT_INITIALIZE,
    STREAM_CONTEXT, SYSPARAM_NOT_SET, UNINITIALIZED, failure, watch_forks,
};
use ascend_sys::bindings::aclSysParamOpt;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

pub(crate) static CONTEXTS: Table<Context> = Table::new(Kind::Context);

/// Number of `aclSysParamOpt` options.
const OPTIONS: usize = 4;

/// Values of `aclSysParamOpt` options.
#[derive(Debug, Default)]
pub(crate) struct Options(Lock<[Option<i64>; OPTIONS]>);

impl Options {
    pub(crate) const fn new() -> Self {
        Options(Lock::new([None; OPTIONS]))
    }

    fn place(name: &str, option: i64) -> Outcome<usize> {
        usize::try_from(option)
            .ok()
            .filter(|&place| place < OPTIONS)
            .ok_or_else(|| failure!(PARAM_INVALID, "{name}: opt: given {option}, allowed: 0 to {}", OPTIONS - 1))
    }

    pub(crate) fn set(&self, name: &str, option: i64, value: i64) -> Outcome {
        let place = Self::place(name, option)?;
        if let Some(kept) = self.0.lock().get_mut(place) {
            *kept = Some(value);
        }
        Ok(())
    }

    /// The value that was set, if one was.
    pub(crate) fn get(&self, name: &str, option: i64) -> Outcome<Option<i64>> {
        let place = Self::place(name, option)?;
        Ok(self.value(place))
    }

    fn value(&self, place: usize) -> Option<i64> {
        self.0.lock().get(place).copied().flatten()
    }

    /// The value that was set; fails if none was.
    pub(crate) fn get_set(&self, name: &str, option: i64) -> Outcome<i64> {
        let value = self.get(name, option)?;
        value.ok_or_else(|| failure!(SYSPARAM_NOT_SET, "{name}: option {option} was not set"))
    }
}

/// The options of the process.
pub(crate) static PROCESS_OPTIONS: Options = Options::new();

/// Whether operators that the calling thread prepares are to be deterministic (`ACL_OPT_DETERMINISTIC`): by the option
/// of its context, or, where that was not set, by that of the process.
pub(crate) fn is_deterministic() -> bool {
    let place = aclSysParamOpt::ACL_OPT_DETERMINISTIC.0 as usize;
    let own = current().ok().and_then(|context| context.options.value(place));
    own.or_else(|| PROCESS_OPTIONS.value(place)).is_some_and(|value| value != 0)
}

/// A context of a device, which has streams.
#[derive(Debug)]
pub(crate) struct Context {
    /// The number of the context, unique in the process.
    number: ContextNumber,
    pub device: i32,
    /// The machine that is emulated in this context.
    pub machine: Behaviour,
    /// Whether `aclrtCreateContext` made it, and not `aclrtSetDevice`.
    explicit: bool,
    default_stream: Lock<Option<Arc<Stream>>>,
    /// Explicitly created streams, by handle.
    streams: Lock<Vec<(Id, Weak<Stream>)>>,
    pub options: Options,
}

#[derive(Debug, Default)]
struct Device {
    /// The number of `aclrtSetDevice` calls without an `aclrtResetDevice` yet.
    uses: u64,
    primary: Option<Id>,
}

/// The devices in use, by their number and the index of the machine.
static DEVICES: Lock<BTreeMap<(i32, usize), Device>> = Lock::new(BTreeMap::new());

const BEFORE: u8 = 0;
const DURING: u8 = 1;
const AFTER: u8 = 2;
static PHASE: AtomicU8 = AtomicU8::new(BEFORE);

thread_local! {
    static CURRENT: Cell<Option<Id>> = const { Cell::new(None) };
}

/// What the first call of a process that needs the runtime does, whether it is `aclInit` or not.
fn prepare() -> Outcome {
    validate()?;
    watch_forks().map_err(|error| failure!(INTERNAL, "pthread_atfork failed with error {error}"))
}

/// `aclInit`.
pub(crate) fn initialize() -> Outcome {
    prepare()?;
    match PHASE.compare_exchange(BEFORE, DURING, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(()),
        Err(DURING) => Err(failure!(REPEAT_INITIALIZE, "aclInit was already called in this process")),
        Err(_) => {
            Err(failure!(REPEAT_INITIALIZE, "aclInit cannot be called again after aclFinalize in the same process"))
        }
    }
}

/// `aclFinalize`.
pub(crate) fn finalize() -> Outcome {
    match PHASE.compare_exchange(DURING, AFTER, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(()),
        Err(BEFORE) => Err(failure!(UNINITIALIZED, "aclInit was not called")),
        Err(_) => Err(failure!(REPEAT_FINALIZE, "aclFinalize was already called")),
    }
}

/// Refuses calls after `aclFinalize`. Before `aclInit` CANN's runtime answers already: some clients set a device first.
pub(crate) fn usable() -> Outcome {
    match PHASE.load(Ordering::Acquire) {
        DURING => Ok(()),
        BEFORE => prepare(),
        _ => Err(failure!(UNINITIALIZED, "aclFinalize was already called")),
    }
}

pub(crate) fn device_exists(device: i32) -> Outcome {
    let count = config().devices;
    if u32::try_from(device).is_ok_and(|device| device < count) {
        return Ok(());
    }
    Err(failure!(
        INVALID_DEVICE,
        "device {device}: there are {count} devices, numbered from 0; ASCEND_EMU_DEVICES changes that"
    ))
}

/// Refuses a call after `aclFinalize`, and the number of a device that does not exist.
pub(crate) fn known_device(device: i32) -> Outcome {
    usable()?;
    device_exists(device)
}

/// `aclrtSetDevice` of the machine with an index.
pub(crate) fn set_device(device: i32, index: usize) -> Outcome {
    usable()?;
    device_exists(device)?;
    let mut devices = DEVICES.lock();
    let state = devices.entry((device, index)).or_default();
    state.uses = state.uses.saturating_add(1);
    let primary = *state.primary.get_or_insert_with(|| CONTEXTS.insert(Context::new(device, index, false)));
    CURRENT.set(Some(primary));
    fault::enter_device(Some(device));
    Ok(())
}

/// `aclrtResetDevice` and `aclrtResetDeviceForce` of the machine with an index: ends one use of a device, or all.
/// With the last use the default context ends, with its streams, and, unless the device has other contexts, so does
/// its memory.
pub(crate) fn reset_device(device: i32, index: usize, force: bool) -> Outcome {
    usable()?;
    device_exists(device)?;
    let primary = {
        let mut devices = DEVICES.lock();
        let state = devices.entry((device, index)).or_default();
        state.uses = if force { 0 } else { state.uses.saturating_sub(1) };
        if state.uses > 0 {
            return Ok(());
        }
        state.primary.take()
    };
    fault::reset_device(device);
    if let Some(context) = primary.and_then(|id| CONTEXTS.remove_id(id).ok()) {
        context.end(force);
    }
    if CONTEXTS.any(|context| context.device == device) {
        return Ok(());
    }
    collectives::mark_device_gone(device);
    let (count, bytes) = allocation_table::clear_device(device);
    if count > 0 {
        let suspicion = Suspicion {
            kind: FindingKind::Leak,
            site: ("aclrtResetDevice", "memory"),
            tensor: 0,
            message: format!("device {device} was reset with {count} allocations of {bytes} bytes not freed"),
        };
        // The leak is reported, but the reset has happened, so the call succeeds in either mode.
        let _ = report(check(), PARAM_INVALID, suspicion);
    }
    Ok(())
}

/// `aclrtGetPrimaryCtxState`: whether a device has a default context, on any machine.
pub(crate) fn has_primary(device: i32) -> Outcome<bool> {
    usable()?;
    device_exists(device)?;
    let devices = DEVICES.lock();
    let mut states = devices.range((device, 0)..=(device, usize::MAX));
    Ok(states.any(|(_, state)| state.primary.is_some()))
}

/// `aclrtDeviceTaskAbort`.
pub(crate) fn abort_device(device: i32) -> Outcome {
    usable()?;
    device_exists(device)?;
    for context in CONTEXTS.all(|context| context.device == device) {
        for stream in context.all_streams() {
            stream.abort();
        }
    }
    fault::reset_device(device);
    Ok(())
}

/// `aclrtCreateContext` of the machine with an index: the context becomes the thread's.
pub(crate) fn create(device: i32, index: usize) -> Outcome<Id> {
    usable()?;
    device_exists(device)?;
    let id = CONTEXTS.insert(Context::new(device, index, true));
    CURRENT.set(Some(id));
    fault::enter_device(Some(device));
    Ok(id)
}

/// `aclrtDestroyContext`.
pub(crate) fn destroy(raw: *const c_void) -> Outcome {
    usable()?;
    if !CONTEXTS.get(raw)?.explicit {
        return Err(failure!(
            PARAM_INVALID,
            "aclrtDestroyContext: this is a device's default context; aclrtResetDevice ends it"
        ));
    }
    let context = CONTEXTS.remove(raw)?;
    if CURRENT.get() == Some(Id::of_raw(raw)) {
        CURRENT.set(None);
    }
    context.end(false);
    Ok(())
}

/// `aclrtSetCurrentContext`.
pub(crate) fn set_current(raw: *const c_void) -> Outcome {
    usable()?;
    let device = CONTEXTS.get(raw)?.device;
    CURRENT.set(Some(Id::of_raw(raw)));
    fault::enter_device(Some(device));
    Ok(())
}

/// The calling thread's context and its handle.
pub(crate) fn current_with_id() -> Outcome<(Id, Arc<Context>)> {
    usable()?;
    let id = CURRENT.try_with(Cell::get).ok().flatten().ok_or_else(|| {
        failure!(CONTEXT_NULL, "this thread has no context: call aclrtSetDevice or aclrtSetCurrentContext in it")
    })?;
    let context = CONTEXTS
        .get(id.raw::<c_void>())
        .map_err(|_| failure!(CONTEXT_NULL, "this thread's context was destroyed, or its device was reset"))?;
    Ok((id, context))
}

/// The calling thread's context.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    current_with_id().map(|(_, context)| context)
}

/// The machine of the calling thread's context; in a thread without one, that of the environment.
pub(crate) fn machine() -> Behaviour {
    current().map_or_else(|_| behaviour_at(0), |context| context.machine)
}

/// The chip of the calling thread's machine. A machine other than the environment's has its product's most common
/// chip.
pub(crate) fn chip() -> Chip {
    let machine = machine();
    let soc = machine.target.soc;
    if machine == behaviour_at(0) {
        Chip::named(&soc_name_at(0).to_string_lossy(), soc)
    } else {
        Chip::named(soc.chip_name(), soc)
    }
}

/// The stream of a handle, which has to belong to the calling thread's context; null is that context's default.
pub(crate) fn stream(name: &str, raw: *const c_void) -> Outcome<Arc<Stream>> {
    let context = current()?;
    if raw.is_null() {
        return context.default_stream();
    }
    let stream = STREAMS.get(raw)?;
    if !stream.belongs_to(context.number) {
        return Err(failure!(STREAM_CONTEXT, "{name}: the stream belongs to another context than this thread's"));
    }
    Ok(stream)
}

/// The stream of a handle, whichever context it belongs to; null is the default stream of the calling thread's context,
/// which the thread needs in either case. CANN waits for such a stream in its own context, and does not look at the
/// context when it queries one.
pub(crate) fn stream_of_any_context(raw: *const c_void) -> Outcome<Arc<Stream>> {
    let context = current()?;
    if raw.is_null() {
        return context.default_stream();
    }
    STREAMS.get(raw)
}

impl Context {
    fn new(device: i32, index: usize, explicit: bool) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Context {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            device,
            machine: behaviour_at(index),
            explicit,
            default_stream: Lock::new(None),
            streams: Lock::new(Vec::new()),
            options: Options::new(),
        }
    }

    fn default_stream(&self) -> Outcome<Arc<Stream>> {
        let mut kept = self.default_stream.lock();
        if let Some(stream) = &*kept {
            return Ok(Arc::clone(stream));
        }
        let stream = Stream::start(self.number, self.device, Settings::default())?;
        *kept = Some(Arc::clone(&stream));
        Ok(stream)
    }

    /// `aclrtCreateStream`.
    pub(crate) fn create_stream(&self, settings: Settings) -> Outcome<Id> {
        let stream = Stream::start(self.number, self.device, settings)?;
        let weak = Arc::downgrade(&stream);
        let id = STREAMS.reserve();
        STREAMS.insert_at(id, stream);
        self.streams.lock().push((id, weak));
        Ok(id)
    }

    /// `aclrtDestroyStream` and `aclrtDestroyStreamForce`.
    pub(crate) fn destroy_stream(self: &Arc<Self>, name: &str, raw: *const c_void, at_once: bool) -> Outcome {
        if raw.is_null() {
            return Err(refuse_default(NULL_PARAM, name));
        }
        stream(name, raw)?;
        let stream = STREAMS.remove(raw)?;
        self.streams.lock().retain(|(id, _)| *id != Id::of_raw(raw));
        stream.end(at_once);
        Ok(())
    }

    fn all_streams(&self) -> Vec<Arc<Stream>> {
        let mut streams: Vec<_> = self.default_stream.lock().iter().cloned().collect();
        streams.extend(self.streams.lock().iter().filter_map(|(_, weak)| weak.upgrade()));
        streams
    }

    /// Waits for the work of every stream and reports the first fault. While a stream is being captured the call is
    /// refused before it waits.
    pub(crate) fn synchronize(&self, name: &'static str, deadline: Option<Instant>) -> Outcome {
        let mut waits = Vec::new();
        for stream in self.all_streams() {
            let target = stream.queued(name)?;
            waits.push((stream, target));
        }
        let mut outcome = Ok(());
        for (stream, target) in waits {
            let one = stream.synchronize_to(name, target, deadline);
            outcome = outcome.and(one);
        }
        outcome
    }

    /// Ends every stream.
    fn end(&self, at_once: bool) {
        let streams = std::mem::take(&mut *self.streams.lock());
        for (id, weak) in streams {
            // The handle is gone already if the caller destroyed the stream.
            let _ = STREAMS.remove_id(id);
            if let Some(stream) = weak.upgrade() {
                stream.end(at_once);
            }
        }
        let default = self.default_stream.lock().take();
        if let Some(stream) = default {
            stream.end(at_once);
        }
    }
}
