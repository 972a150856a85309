//! What can be captured.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use ascend_sys::Api;

use crate::attention::{
    Bindings, Bound, CallLengths, CapturedTable, Cumulative, FusedInferAttention, Inputs, Launch,
    Output, Plan,
};
use crate::error::{Error, Result, acl};
use crate::memory::Element;
use crate::merge::{MergePlan, Part};
use crate::refusal::{CallRule, Refused};
use crate::runtime::{Context, Memory, Queue, Stream, capturing};
use crate::scatter::{ScatterPlan, SlotMapping};
use crate::tensor::{AnyTensor, Tensor};

use super::call::{CapturedCall, Group, Launched, Varying};
use super::external_event::ExternalEvent;
use super::limits::KeyLimits;

/// A graph being captured: what is launched through it becomes part of the graph, in this order, and does not run now.
///
/// The graph shares the ownership of every tensor, mask and workspace that its launches use. After a launch, copy or
/// merge has failed the capture fails, also if the error is ignored.
///
/// While a thread captures, this crate refuses on it what cannot be part of a graph and would happen at once:
/// waiting, allocating, copies from and to the host, launches on other streams ([`Error::Capturing`]). Do that
/// before.
///
/// Other threads may do all of that, and may drop memory or run out of it, with one exception: while a stream of a
/// device is being captured, CANN refuses a wait for the whole device
/// ([`Device::synchronize`](crate::Device::synchronize)), and the capture goes on. Wait for streams or events
/// instead.
pub struct Capturing<'a> {
    graph: u64,
    recorder: Recorder<'a>,
    plans: Vec<Plan>,
    calls: Vec<Varying>,
    launches: Vec<Launched>,
    tables: Vec<CapturedTable>,
    failed: Option<Error>,
}

/// What a finished capture hands to the graph.
pub(super) struct Captured {
    pub(super) calls: Vec<Varying>,
    pub(super) launches: Vec<Launched>,
    /// Block tables of launches whose lengths stay the same in every replay.
    pub(super) tables: Vec<CapturedTable>,
    pub(super) kept: Vec<Arc<Memory>>,
    /// The largest workspace, for the next capture.
    pub(super) workspace: Option<Arc<Memory>>,
}

/// The queue of a captured stream: keeps memory until the graph ends.
struct Recorder<'a> {
    stream: &'a Stream,
    kept: RefCell<Vec<Arc<Memory>>>,
    /// The largest workspace so far. Captured launches run one after the other, so that one workspace serves all for
    /// which it is large enough.
    workspace: RefCell<Option<Arc<Memory>>>,
}

impl Queue for Recorder<'_> {
    fn context(&self) -> &Arc<Context> {
        self.stream.context()
    }

    fn raw(&self) -> Result<*mut c_void> {
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
}

impl<'a> Capturing<'a> {
    pub(super) fn new(graph: u64, stream: &'a Stream, workspace: Option<Arc<Memory>>) -> Self {
        Self {
            graph,
            recorder: Recorder {
                stream,
                kept: RefCell::default(),
                workspace: RefCell::new(workspace),
            },
            plans: Vec::new(),
            calls: Vec::new(),
            launches: Vec::new(),
            tables: Vec::new(),
            failed: None,
        }
    }

    pub(super) fn finish(self) -> Result<Captured> {
        match self.failed {
            Some(error) => Err(error),
            None => Ok(Captured {
                calls: self.calls,
                launches: self.launches,
                tables: self.tables,
                kept: self.recorder.kept.into_inner(),
                workspace: self.recorder.workspace.into_inner(),
            }),
        }
    }

    /// The queue that captured launches go to.
    pub(super) fn recorder(&self) -> &(impl Queue + use<'a>) {
        &self.recorder
    }

    /// Adds a block table that is checked before each replay, which reads it.
    pub(super) fn read_by_replays(&mut self, table: Option<CapturedTable>) {
        self.tables.extend(table);
    }

    /// Notes the first failure, which fails the capture.
    pub(super) fn note<R>(&mut self, outcome: Result<R>) -> Result<R> {
        if let (Err(error), None) = (&outcome, &self.failed) {
            self.failed = Some(error.clone());
        }
        outcome
    }

    fn api(&self) -> Result<&Api> {
        self.recorder.stream.context().bind()
    }

    /// Plans a call whose lengths vary from replay to replay, for [`Capturing::launch`]: one plan serves all layers
    /// of its shapes. `longest` are the longest lengths of any replay, for which workspace is taken. They replace
    /// lengths that `call` has.
    ///
    /// # Errors
    /// As for [`FusedInferAttention::plan_with`].
    pub fn attention(
        &mut self,
        call: &FusedInferAttention,
        longest: CallLengths<'_>,
        inputs: &Inputs<'_>,
    ) -> Result<CapturedCall> {
        let (call, plan) = Varying::new(call, longest, Bound::of(inputs)?)?;
        Ok(self.planned(call, plan))
    }

    /// As [`Capturing::attention`], but over a paged cache with packed queries (TND), for requests that may each be
    /// long, but not all at once: `rows` are the ends of their query rows, `limits` how many keys they may have.
    ///
    /// # Errors
    /// [`CallRule::GraphLengths`] for limits that have no room for the rows; as for [`Capturing::attention`].
    pub fn attention_within(
        &mut self,
        call: &FusedInferAttention,
        rows: &Cumulative,
        limits: KeyLimits,
        inputs: &Inputs<'_>,
    ) -> Result<CapturedCall> {
        let (call, plan) = Varying::within(call, rows, limits, Bound::of(inputs)?)?;
        Ok(self.planned(call, plan))
    }

    fn planned(&mut self, call: Varying, plan: Plan) -> CapturedCall {
        let index = self.calls.len();
        self.calls.push(call);
        self.plans.push(plan);
        CapturedCall {
            graph: self.graph,
            index,
        }
    }

    /// Captures a launch of a call with varying lengths.
    ///
    /// # Errors
    /// As for [`Plan::launch_with_into`]; [`CallRule::GraphUpdate`] for a call of another graph;
    /// [`Error::StreamsExhausted`].
    #[doc(alias = "aclmdlRICaptureTaskGrpBegin")]
    #[doc(alias = "aclmdlRICaptureTaskGrpEnd")]
    pub fn launch<T: Element>(
        &mut self,
        call: CapturedCall,
        inputs: &Inputs<'_>,
        output: &Output<T>,
    ) -> Result<()> {
        let launched = self.launch_grouped(call, &Launch::new(inputs, output));
        let launched = self.note(launched)?;
        self.launches.push(launched);
        Ok(())
    }

    fn launch_grouped(&self, call: CapturedCall, bindings: &impl Bindings) -> Result<Launched> {
        let known = self.plans.get(call.index).zip(self.calls.get(call.index));
        let Some((plan, varying)) = known.filter(|_| call.graph == self.graph) else {
            return Err(Refused::new(
                CallRule::GraphUpdate,
                "a call of another graph",
                "one of this capture",
                "call `attention` within each capture",
            )
            .into());
        };
        let stream = self.recorder.stream;
        let event = ExternalEvent::new(stream.context())?;
        let bound = Bound::of(bindings)?;
        // The workspace that the updates need comes first: the launch itself can use it too.
        let workspace = match varying.workspace_bytes() {
            0 => None,
            bytes => Some(self.recorder.workspace(bytes)?),
        };
        if let Some(workspace) = &workspace {
            self.recorder.keep(0, workspace);
        }
        let api = self.api()?;
        event.await_in(api, stream)?;
        // SAFETY: the stream is alive and being captured.
        unsafe { acl!(api, aclmdlRICaptureTaskGrpBegin(stream.as_raw())) }?;
        let outcome = plan.run(&self.recorder, bindings);
        let mut group = ptr::null_mut();
        // Also after a failure: a group that was begun has to end before the capture does.
        // SAFETY: the stream is alive and being captured; `group` is a place for the result.
        let end = unsafe { acl!(api, aclmdlRICaptureTaskGrpEnd(stream.as_raw(), &mut group)) };
        outcome.and(end)?;
        Ok(Launched::new(
            call.index,
            bound,
            workspace,
            Group(group),
            event,
        ))
    }

    /// Captures a launch whose lengths are those of its plan in every replay.
    ///
    /// # Errors
    /// As for [`Plan::launch_with_into`].
    pub fn launch_plan<T: Element>(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        output: &Output<T>,
    ) -> Result<()> {
        let outcome = plan.run(&self.recorder, &Launch::new(inputs, output));
        self.tables.extend(plan.captured_table(inputs));
        self.note(outcome)
    }

    /// Captures the writing of keys and values into a paged cache. The slots are read on the device, from the memory of
    /// the mapping: [`SlotMapping::overwrite`] replaces them between replays.
    ///
    /// # Errors
    /// As for [`ScatterPlan::launch`].
    pub fn scatter<T: Element>(
        &mut self,
        plan: &ScatterPlan,
        key: &Tensor<T>,
        value: &Tensor<T>,
        slots: &SlotMapping,
        key_cache: &Tensor<T>,
        value_cache: &Tensor<T>,
    ) -> Result<()> {
        let values: Option<(&AnyTensor, &AnyTensor)> = Some((value, value_cache));
        let outcome = plan.run(&self.recorder, key, values, slots, key_cache);
        self.note(outcome)
    }

    /// Captures a merge.
    ///
    /// # Errors
    /// As for [`MergePlan::launch_into`]; [`Error::Capturing`] for a merge that goes through the host.
    pub fn merge<T: Element>(
        &mut self,
        plan: &MergePlan,
        parts: &[Part<'_, T>],
        output: &Output<T>,
    ) -> Result<()> {
        let outcome = plan.record(&self.recorder, parts, output);
        self.note(outcome)
    }

    /// Captures a copy on the device, of contiguous tensors of one shape.
    ///
    /// # Errors
    /// As for [`AnyTensor::copy_from`].
    pub fn copy(&mut self, to: &AnyTensor, from: &AnyTensor) -> Result<()> {
        let outcome = to.copy_by(&self.recorder, from);
        self.note(outcome)
    }

    /// The raw stream (`aclrtStream`) that is being captured, for work of other libraries. It is not to be used after
    /// the capture. The graph does not know what that work uses: the caller keeps it alive until the graph and its
    /// replays are over.
    pub fn as_raw(&self) -> *mut c_void {
        self.recorder.stream.as_raw()
    }
}

impl fmt::Debug for Capturing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capturing")
            .field("calls", &self.calls.len())
            .field("launches", &self.launches.len())
            .finish_non_exhaustive()
    }
}
