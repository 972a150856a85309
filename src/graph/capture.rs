//! A graph being captured.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use ascend_sys::{Api, bindings as sys};

use crate::attention::{
    CallLengths, CallTensors, Cumulative, FusedInferAttention, Inputs, Launch, Output, OwnedBindings, Plan,
};
use crate::error::{Error, Result, acl};
use crate::memory::Element;
use ascend_spec::Violation;

use crate::rules;
use crate::runtime::{Context, LaunchQueue, Memory, Queue, ReplayCheck, ReplayedObject, Stream, capturing};

use super::call::{CapturedCall, CapturedLaunch, TaskGroup, VaryingCall};
use super::external_event::ExternalEvent;
use super::limits::KeyLimits;

/// A graph being captured: a [`Queue`]. What is launched on it becomes part of the graph, in this order, and does not
/// run now.
///
/// The graph shares the ownership of every tensor, mask and workspace that its launches use. After a launch, copy,
/// merge or call between ranks has failed the capture fails, also if the error is ignored.
///
/// Every `launch_into` of a plan takes it in the place of a stream, and so do
/// [`AnyTensor::copy_from`](crate::AnyTensor::copy_from) and the calls of a
/// [`Communicator`](crate::comm::Communicator). The graph owns its buffers, and lends them for reading
/// only: a launch writes the memory of its output, which a clone shares. A `launch` that makes its output is refused.
///
/// ```
/// use ascend_attention::{FusedInferAttention, Graph, Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let x = stream.upload(&[f16::ONE; 2 * 16 * 64], [1, 2, 16, 64])?;
/// let plan = FusedInferAttention::new(Layout::Bnsd).heads(2).scale(0.125).plan((&x, &x, &x))?;
/// let output = plan.output::<f16>()?;
/// let (mut graph, ()) = Graph::capture(&device, (x, output), |capture, (x, output)| {
///     plan.launch_into(capture, (x, x, x), &mut output.clone())
/// })?;
/// graph.launch(&stream, graph.update())?;
/// let (_, output) = graph.buffers();
/// assert_eq!(output.attention.download(&stream)?, [f16::ONE; 2 * 16 * 64]);
/// # }
/// # Ok(())
/// # }
/// ```
///
/// A launch of a plan has the plan's lengths in every replay, unless the operator reads them in a tensor. Calls whose
/// lengths vary from replay to replay are [`CapturedCall`]s, which [`attention`](Self::attention) plans and
/// [`launch_into`](Self::launch_into) launches.
///
/// While a thread captures, this crate refuses on it what cannot be part of a graph and would happen at once:
/// waiting, allocating, copies from and to the host, launches on other streams ([`Error::Capturing`]). Do that
/// before.
///
/// Other threads may do all of that, and may drop memory or run out of it, with one exception: while a stream of a
/// device is being captured, CANN refuses a wait for the whole device
/// ([`Device::synchronize`](crate::Device::synchronize)), and the capture goes on. Wait for streams or events
/// instead. A `Capturing` is of no use to them: it cannot leave its thread, nor outlive the capture.
pub struct Capturing<'a> {
    graph: u64,
    stream: &'a Stream,
    kept: RefCell<Vec<Arc<Memory>>>,
    /// The largest workspace so far. Captured launches run one after the other, so that one workspace serves all for
    /// which it is large enough.
    workspace: RefCell<Option<Arc<Memory>>>,
    /// Calls whose lengths vary, planned at the longest.
    calls: RefCell<Vec<(VaryingCall, Plan)>>,
    launches: RefCell<Vec<CapturedLaunch>>,
    checks: RefCell<Vec<Arc<dyn ReplayCheck>>>,
    objects: RefCell<Vec<Arc<dyn ReplayedObject>>>,
    failed: RefCell<Option<Error>>,
}

/// What a finished capture hands to the graph.
pub(super) struct CapturedWork {
    pub(super) calls: Vec<VaryingCall>,
    pub(super) launches: Vec<CapturedLaunch>,
    /// Checks of launches whose lengths stay the same in every replay.
    pub(super) checks: Vec<Arc<dyn ReplayCheck>>,
    /// What else the replays use.
    pub(super) objects: Vec<Arc<dyn ReplayedObject>>,
    pub(super) kept: Vec<Arc<Memory>>,
    /// The largest workspace, for the next capture.
    pub(super) workspace: Option<Arc<Memory>>,
}

impl Queue for Capturing<'_> {}

/// Keeps memory until the graph ends.
impl LaunchQueue for Capturing<'_> {
    fn context(&self) -> &Arc<Context> {
        self.stream.context()
    }

    fn raw(&self) -> Result<sys::aclrtStream> {
        Ok(self.stream.as_raw())
    }

    fn runs_now(&self) -> bool {
        false
    }

    fn workspace(&self, bytes: usize) -> Result<Arc<Memory>> {
        let mut largest = self.workspace.borrow_mut();
        if let Some(memory) = largest.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return Ok(Arc::clone(memory));
        }
        let memory = capturing::lifted(|| Memory::alloc(self.stream.context(), bytes))?;
        Ok(Arc::clone(largest.insert(Arc::new(memory))))
    }

    fn queued(&self) -> u64 {
        0
    }

    fn keep(&self, _: u64, memory: &Arc<Memory>) {
        let mut kept = self.kept.borrow_mut();
        if !kept.iter().any(|known| Arc::ptr_eq(known, memory)) {
            kept.push(Arc::clone(memory));
        }
    }

    fn makes_outputs(&self) -> Result<()> {
        Err(Error::Capturing {
            what: "a launch that makes its output",
            instead: "launch by `launch_into`, with an output that was made before the capture",
        })
    }

    fn note<R>(&self, outcome: Result<R>) -> Result<R> {
        if let Err(error) = &outcome {
            let mut failed = self.failed.borrow_mut();
            failed.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    fn keep_object(&self, object: impl FnOnce() -> Arc<dyn ReplayedObject>) {
        let (object, mut objects) = (object(), self.objects.borrow_mut());
        if !objects.iter().any(|known| ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(&object))) {
            objects.push(object);
        }
    }

    fn before_replays<I: IntoIterator<Item = Arc<dyn ReplayCheck>>>(&self, checks: impl FnOnce() -> I) {
        self.checks.borrow_mut().extend(checks());
    }
}

impl<'a> Capturing<'a> {
    pub(super) fn new(graph: u64, stream: &'a Stream, workspace: Option<Arc<Memory>>) -> Self {
        Self {
            graph,
            stream,
            kept: RefCell::default(),
            workspace: RefCell::new(workspace),
            calls: RefCell::default(),
            launches: RefCell::default(),
            checks: RefCell::default(),
            objects: RefCell::default(),
            failed: RefCell::default(),
        }
    }

    pub(super) fn finish(self) -> Result<CapturedWork> {
        if let Some(error) = self.failed.into_inner() {
            return Err(error);
        }
        let calls = self.calls.into_inner().into_iter();
        Ok(CapturedWork {
            calls: calls.map(|(varying, _)| varying).collect(),
            launches: self.launches.into_inner(),
            checks: self.checks.into_inner(),
            objects: self.objects.into_inner(),
            kept: self.kept.into_inner(),
            workspace: self.workspace.into_inner(),
        })
    }

    fn api(&self) -> Result<&Api> {
        self.stream.context().bind()
    }

    /// Plans a call whose lengths vary from replay to replay, for [`Capturing::launch_into`]: one plan serves all
    /// layers of its shapes. `longest` are the longest lengths of any replay, for which workspace is taken. They
    /// replace lengths that `call` has.
    ///
    /// # Errors
    /// As for [`FusedInferAttention::plan`].
    pub fn attention<'t, T: Element>(
        &self,
        call: &FusedInferAttention,
        longest: CallLengths<'_>,
        inputs: impl Into<Inputs<'t, T>>,
    ) -> Result<CapturedCall> {
        self.planned(inputs.into().tensors(), |bound| VaryingCall::new(call, longest, bound))
    }

    /// As [`Capturing::attention`], but over a paged cache with packed queries (TND), for requests that may each be
    /// long, but not all at once: `rows` are the ends of their query rows, `limits` how many keys they may have.
    ///
    /// # Errors
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits that have no room for the rows; as for
    /// [`Capturing::attention`].
    pub fn attention_within<'t, T: Element>(
        &self,
        call: &FusedInferAttention,
        rows: &Cumulative,
        limits: KeyLimits,
        inputs: impl Into<Inputs<'t, T>>,
    ) -> Result<CapturedCall> {
        self.planned(inputs.into().tensors(), |bound| VaryingCall::within(call, rows, limits, bound))
    }

    fn planned(
        &self,
        tensors: CallTensors<'_>,
        plan: impl FnOnce(OwnedBindings) -> Result<(VaryingCall, Plan)>,
    ) -> Result<CapturedCall> {
        tensors.visit(|argument, tensor| tensor.on(argument.name(), self.stream.context()))?;
        let planned = plan(OwnedBindings::of(&tensors)?)?;
        let mut calls = self.calls.borrow_mut();
        let index = calls.len();
        calls.push(planned);
        Ok(CapturedCall { graph: self.graph, index })
    }

    /// Captures a launch of a call with varying lengths.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`]; [`GRAPH_UPDATE`](crate::rules::GRAPH_UPDATE) for a call of another graph;
    /// [`Error::StreamsExhausted`].
    #[doc(alias = "aclmdlRICaptureTaskGrpBegin")]
    #[doc(alias = "aclmdlRICaptureTaskGrpEnd")]
    pub fn launch_into<'t, T: Element>(
        &self,
        call: CapturedCall,
        inputs: impl Into<Inputs<'t, T>>,
        output: &mut Output<T>,
    ) -> Result<()> {
        let launched = self.launch_grouped(call, &Launch::new(inputs.into().tensors(), output));
        let launched = self.note(launched)?;
        self.launches.borrow_mut().push(launched);
        Ok(())
    }

    fn launch_grouped(&self, call: CapturedCall, launch: &Launch<'_>) -> Result<CapturedLaunch> {
        let calls = self.calls.borrow();
        let known = calls.get(call.index);
        let Some((varying, plan)) = known.filter(|_| call.graph == self.graph) else {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                "a call of another graph",
                "one of this capture",
                "call `attention` within each capture",
            )
            .into());
        };
        let stream = self.stream;
        let event = ExternalEvent::new(stream.context())?;
        let bound = OwnedBindings::of(launch)?;
        // The workspace that the updates need comes first: the launch itself can use it too.
        let workspace = match varying.workspace_bytes() {
            0 => None,
            bytes => Some(self.workspace(bytes)?),
        };
        if let Some(workspace) = &workspace {
            self.keep(0, workspace);
        }
        let api = self.api()?;
        event.await_in(api, stream)?;
        // SAFETY: the stream is alive and being captured.
        unsafe { acl!(api, aclmdlRICaptureTaskGrpBegin(stream.as_raw())) }?;
        let outcome = plan.run(self, launch);
        let mut group = ptr::null_mut();
        // Also after a failure: a group that was begun has to end before the capture does.
        // SAFETY: the stream is alive and being captured; `group` is a place for the result.
        let end = unsafe { acl!(api, aclmdlRICaptureTaskGrpEnd(stream.as_raw(), &mut group)) };
        outcome.and(end)?;
        Ok(CapturedLaunch::new(call.index, bound, workspace, TaskGroup(group), event))
    }

    /// The raw stream (`aclrtStream`) that is being captured, for work of other libraries. It is not to be used after
    /// the capture. The graph does not know what that work uses: the caller keeps it alive until the graph and its
    /// replays are over.
    pub fn as_raw(&self) -> *mut c_void {
        self.stream.as_raw()
    }
}

impl fmt::Debug for Capturing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capturing")
            .field("calls", &self.calls.borrow().len())
            .field("launches", &self.launches.borrow().len())
            .finish_non_exhaustive()
    }
}
