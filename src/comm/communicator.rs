//! How a rank joins a communicator, and how it leaves.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ascend_sys::{Api, bindings as sys};

use crate::error::{Error, Result, hccl_error};
use crate::rules;
use crate::runtime::{CallOrder, Device, Queue, ReplayedObject, Stream, StreamMark, lock};
use crate::tensor::AnyTensor;

/// Bytes of root information.
const BYTES: usize = sys::HCCL_ROOT_INFO_BYTES as usize;

/// What the ranks of one communicator find each other by: bytes that the root makes, and that the program carries to
/// the other ranks over whatever it has. They are good for one communicator.
#[derive(Clone, PartialEq, Eq)]
pub struct RootInfo(Box<[u8; BYTES]>);

impl RootInfo {
    /// Makes root information. The process has to live until all ranks have joined.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Hccl`]; [`Error::MissingSymbol`] without libhccl.
    #[doc(alias = "HcclGetRootInfo")]
    pub fn new(device: &Device) -> Result<Self> {
        let api = device.context().bind()?;
        let mut bytes = Box::new([0; BYTES]);
        // SAFETY: the bytes are a place for root information, which is an array of as many.
        let result = unsafe { api.HcclGetRootInfo()?(bytes.as_mut_ptr().cast()) };
        hccl_error(api, "HcclGetRootInfo", (None, None), result)?;
        Ok(Self(bytes))
    }

    /// Root information that came from another rank.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](rules::ARGUMENT_VALUE) for another number of bytes than 4108.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let boxed = bytes.to_vec().into_boxed_slice().try_into();
        boxed.map(Self).map_err(|_| {
            Error::invalid("bytes", format_args!("{} bytes", bytes.len()), format_args!("{BYTES} bytes"))
                .fix("carry what `as_bytes` of the root has, all of it")
        })
    }

    /// The bytes to carry to the other ranks.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0[..]
    }
}

impl fmt::Debug for RootInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RootInfo").finish_non_exhaustive()
    }
}

/// One rank of a communicator, on its device. See the [module](super).
///
/// Dropping it waits for the calls that it has queued, then ends this rank's part: a call that other ranks do not make
/// is waited for until it fails. A [`Graph`](crate::Graph) that has captured calls, and a communicator of some of the
/// ranks ([`split`](Self::split)), keep the rank in the communicator until they are dropped; [`leave`](Self::leave)
/// ends its part whatever graphs there are. On a thread that captures a graph, and where a stream cannot be waited for,
/// the rank stays in the communicator until the process ends, which a log line says. After an [`Error::Hccl`], or a
/// failure of a stream by a collective, drop it on all ranks and make another one.
///
/// # Threads
/// `Send` and `Sync`. A rank's calls come one after the other, since each takes it mutably. A call, or a replay of a
/// graph with calls, on another stream than that of the one before waits for that one, also where one of them is of a
/// part.
pub struct Communicator {
    pub(super) handle: Arc<Handle>,
    size: usize,
    /// Calls made so far.
    calls: u64,
    /// How many parts were made of each list of ranks.
    pub(super) parts: BTreeMap<Vec<u32>, u64>,
}

/// The rank's part in a communicator, which ends when the rank and all graphs with calls of it are gone.
pub(super) struct Handle {
    pub(super) device: Device,
    pub(super) raw: sys::HcclComm,
    rank: usize,
    membership: Mutex<Membership>,
    /// The order of the rank's calls in a communicator and in the parts of it. Taken before `membership`.
    order: Arc<Mutex<CallOrder>>,
    /// The communicator that this one is a part of, which ends after it.
    pub(super) whole: Option<Arc<Handle>>,
    /// How many parts of this one the rank takes part in.
    parts: AtomicUsize,
}

/// What a rank has to wait for before it may leave.
#[derive(Default)]
struct Membership {
    /// A mark of each stream that calls were queued on.
    marks: Vec<StreamMark>,
    /// Whether the rank has left, and its communicator is destroyed.
    left: bool,
}

// SAFETY: `raw` is a handle that this object alone owns. HCCL takes calls from any thread whose device is the
// communicator's, which each call here sees to. Whoever makes a call, of a communicator or of a part of it, or destroys
// one, holds their one lock of `order`, so that calls come one after the other, and none after the end.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

impl ReplayedObject for Handle {
    fn order(&self) -> &Arc<Mutex<CallOrder>> {
        &self.order
    }

    fn admit(&self) -> Result<()> {
        if lock(&self.membership).left {
            let given = format_args!("rank {}, which has left", self.rank);
            return Err(rules::COLLECTIVE_LEFT.broken(given, "ranks that take part in their communicator").into());
        }
        Ok(())
    }

    /// Also after a failure: part of the work may have been queued.
    fn note(&self, stream: &Stream) {
        let marks = &mut lock(&self.membership).marks;
        if !marks.iter().any(|mark| mark.is_of(stream)) {
            marks.push(stream.mark());
        }
    }
}

impl Handle {
    /// Waits for the calls of the rank, and ends its part in the communicator.
    fn leave(&self) -> Result<()> {
        self.finish_calls(&lock(&self.membership))?;
        let api = self.device.context().bind()?;
        // Graphs of its calls that were dropped end first, since their last replays are over.
        self.device.context().sweep();
        // From here on no call or replay is queued.
        let _turn = lock(&self.order);
        if self.parts.load(Ordering::Relaxed) > 0 {
            let given = "a communicator that the rank has split";
            return Err(Error::by(&rules::COLLECTIVE_PART, "self", given, "one without parts")
                .fix("leave or drop the parts first: the rank stays until they are gone"));
        }
        let mut membership = lock(&self.membership);
        self.finish_calls(&membership)?;
        membership.left = true;
        if let Some(whole) = &self.whole {
            whole.parts.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: this object owns the communicator, and destroys it once, since the rank has not left before; its work
        // is over, as was waited for, and replays of its calls are refused from now on.
        let result = unsafe { api.HcclCommDestroy()?(self.raw) };
        hccl_error(api, "HcclCommDestroy", (Some(self.rank), None), result)
    }

    /// Waits for the calls that the rank has queued.
    fn finish_calls(&self, membership: &Membership) -> Result<()> {
        for mark in &membership.marks {
            // A fault of the work is for the stream's next synchronisation.
            if !mark.latest().wait()? {
                let given = format_args!("rank {}, whose calls are not known to be over", self.rank);
                return Err(Error::invalid("rank", given, "ranks whose streams can be waited for")
                    .fix("the rank stays in its communicator until the process ends"));
            }
        }
        Ok(())
    }
}

impl Communicator {
    /// A communicator of devices of one process: rank `i` is on `devices[i]`. On hardware each goes to a thread of its
    /// own.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](rules::ARGUMENT_VALUE) without devices; [`COLLECTIVE_DEVICES`](rules::COLLECTIVE_DEVICES) for
    /// a device given twice, or devices of two runtimes; [`Error::Hccl`]; [`Error::MissingSymbol`] without libhccl.
    #[doc(alias = "HcclCommInitAll")]
    pub fn all(devices: &[Device]) -> Result<Vec<Self>> {
        let Some(first) = devices.first() else {
            return Err(Error::invalid("devices", "none", "one for each rank").fix("give the devices of the ranks"));
        };
        for (at, device) in devices.iter().enumerate() {
            let of_one_runtime = ptr::eq(device.runtime().api(), first.runtime().api());
            if !of_one_runtime || devices.iter().take(at).any(|before| before == device) {
                return Err(Error::by(
                    &rules::COLLECTIVE_DEVICES,
                    "devices",
                    format_args!("device {} as rank {at}", device.id()),
                    "devices of one runtime, each once",
                ));
            }
        }
        let api = first.context().bind()?;
        let mut ids: Vec<i32> = devices.iter().map(Device::id).collect();
        let mut comms = vec![ptr::null_mut(); devices.len()];
        let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        // SAFETY: both lists have an entry for each device.
        let result = unsafe { api.HcclCommInitAll()?(count, ids.as_mut_ptr(), comms.as_mut_ptr()) };
        hccl_error(api, "HcclCommInitAll", (None, None), result)?;
        let ranks = comms.into_iter().zip(devices).enumerate();
        Ok(ranks.map(|(rank, (raw, device))| Self::new((device, None), raw, rank, devices.len())).collect())
    }

    /// Joins a communicator as `rank` of `size` ranks. Returns when all of them have joined.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`COLLECTIVE_RANK`](rules::COLLECTIVE_RANK) for a rank that there is not; [`Error::Hccl`], also when another
    /// rank does not join in time; [`Error::MissingSymbol`] without libhccl.
    #[doc(alias = "HcclCommInitRootInfo")]
    pub fn join(device: &Device, info: &RootInfo, rank: usize, size: usize) -> Result<Self> {
        let (rank_number, count) = (rank_of("rank", rank, size)?, u32::try_from(size).unwrap_or(u32::MAX));
        let api = device.context().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the bytes are root information, which is an array of as many; `raw` is a place for the result.
        let result = unsafe { api.HcclCommInitRootInfo()?(count, info.0.as_ptr().cast(), rank_number, &mut raw) };
        hccl_error(api, "HcclCommInitRootInfo", (Some(rank), None), result)?;
        Ok(Self::new((device, None), raw, rank, size))
    }

    pub(super) fn new(
        (device, whole): (&Device, Option<Arc<Handle>>),
        raw: sys::HcclComm,
        rank: usize,
        size: usize,
    ) -> Self {
        let order = whole.as_ref().map(|whole| Arc::clone(&whole.order)).unwrap_or_default();
        if let Some(whole) = &whole {
            whole.parts.fetch_add(1, Ordering::Relaxed);
        }
        let handle = Handle {
            device: device.clone(),
            raw,
            rank,
            membership: Mutex::default(),
            order,
            whole,
            parts: AtomicUsize::new(0),
        };
        Self { handle: Arc::new(handle), size, calls: 0, parts: BTreeMap::new() }
    }

    /// This rank, from 0 on.
    pub fn rank(&self) -> usize {
        self.handle.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.handle.device
    }

    /// Ends this rank's part now, also where graphs have captured calls of it: their replays are refused from then on.
    /// Other ranks that wait for this one fail at once on the emulation, and after HCCL's limit on hardware. Waits
    /// for the calls that the rank has queued. On hardware drop such graphs first: HCCL wants graphs destroyed before
    /// their communicators.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Capturing`] on a thread that captures a graph, [`COLLECTIVE_PART`](rules::COLLECTIVE_PART) while there
    /// are communicators that [`split`](Self::split) has made of this one, and
    /// [`ARGUMENT_VALUE`](rules::ARGUMENT_VALUE) where a stream cannot be waited for: the rank stays until its last
    /// graph and part are dropped; [`Error::Hccl`].
    #[doc(alias = "HcclCommDestroy")]
    pub fn leave(self) -> Result<()> {
        self.handle.leave()
    }

    /// The number of calls that this rank has made, by which errors name a call: from 1 on.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Queues a call behind the calls before it, on whatever stream, and keeps the tensors for as long as it may use
    /// them. A captured call keeps the rank, too.
    pub(super) fn queue(
        &mut self,
        queue: &impl Queue,
        function: &'static str,
        tensors: &[&AnyTensor],
        call: impl FnOnce(&Api, sys::HcclComm, sys::aclrtStream) -> Result<sys::HcclResult>,
    ) -> Result<()> {
        let handle = &self.handle;
        handle.device.context().admits("stream", queue.context())?;
        let raw = queue.raw()?;
        let mut order = lock(&handle.order);
        if let Some(stream) = queue.stream() {
            order.precede(stream)?;
        }
        let api = handle.device.context().bind()?;
        let result = call(api, handle.raw, raw)?;
        self.calls += 1;
        let outcome = hccl_error(api, function, (Some(handle.rank), Some(self.calls)), result);
        // Also after a failure: part of the work may have been queued.
        let number = queue.queued();
        tensors.iter().for_each(|tensor| queue.keep(number, tensor.memory()));
        queue.keep_object(|| Arc::clone(handle) as Arc<dyn ReplayedObject>);
        let Some(stream) = queue.stream() else {
            return outcome;
        };
        handle.note(stream);
        outcome?;
        order.finish(stream)
    }
}

/// A rank as C takes it.
pub(super) fn rank_of(argument: &'static str, rank: usize, size: usize) -> Result<u32> {
    match u32::try_from(rank) {
        Ok(number) if rank < size => Ok(number),
        _ => Err(Error::by(
            &rules::COLLECTIVE_RANK,
            argument,
            rank,
            format_args!("ranks below {size}, the number of ranks"),
        )),
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if lock(&self.membership).left {
            return;
        }
        if let Err(error) = self.leave() {
            tracing::error!("rank {} stays in its communicator: {error}", self.rank);
            // So does it in the one that this is a part of.
            mem::forget(self.whole.take());
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("rank", &self.rank).field("device", &self.device.id()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("size", &self.size)
            .field("device", &self.device().id())
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}
