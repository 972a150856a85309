//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use ascend_spec::ops::fused_infer_attention_score::{
    Argument, Arguments, ContentBounds, FiaCall, Parameter, Version,
};
use ascend_spec::{Layout, TensorDesc};

use crate::case_file::{self, LiveCall};
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{self, Addressed, Tensors, addressed, into_new, new_output, reach};
use crate::runtime::{Context, LaunchQueue, Queue, ReplayCheck, Stream};
use crate::tensor::{AnyTensor, Tensor};

use super::allowed::Allowed;
use super::block_table::BlockTable;
use super::contents::{GivenContents, Reading};
use super::inputs::{Features, Inputs, Launch};
use super::versions;

/// What a launch computes.
#[derive(Clone, Debug)]
pub struct Output<T: Element> {
    /// The attention output (`attentionOut`), in the output order of the layout.
    pub attention: Tensor<T>,
    /// The log-sum-exp of each row's scores, `[B, N, Sq, 1]` (`softmaxLse`), if requested. A row that saw no key has
    /// +inf.
    pub softmax_lse: Option<Tensor<f32>>,
}

/// A call that was checked and prepared. From [`FusedInferAttention::plan`](super::FusedInferAttention::plan).
///
/// Within a decoding step all layers share shapes, lengths and mask: one plan serves them all, and a launch swaps
/// addresses and nothing else. Length arrays are part of the plan: other lengths need another plan.
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns; they may go to different streams.
pub struct Plan {
    version: Version,
    layout: Option<Layout>,
    prepared: operator::Plan<Parameter>,
    features: Features,
    /// Bounds of what launches read on the device as positions.
    bounds: Option<ContentBounds>,
    /// The attributes that were planned, to be recorded.
    attributes: Arguments<()>,
}

/// A table that each replay of a graph reads for the same lengths.
#[derive(Debug)]
pub(crate) struct CapturedTable {
    bounds: ContentBounds,
    table: BlockTable,
}

impl CapturedTable {
    /// The table of a launch with the bounds of its content; `None` if the launch has no table or no bounds.
    pub(crate) fn of(
        given: &GivenContents<'_>,
        bounds: Option<&ContentBounds>,
    ) -> Option<Box<dyn ReplayCheck>> {
        let (table, bounds) = (given.block_table?.clone(), bounds?.clone());
        Some(Box::new(Self { bounds, table }))
    }
}

impl ReplayCheck for CapturedTable {
    /// Refuses rows that do not name the blocks that a replay reads.
    fn admits_replay(&self) -> Result<()> {
        self.table.admitted(&self.bounds, true, true)
    }
}

/// The tensors of a call or a launch, and what comes with them.
pub(crate) trait Bindings: Tensors<Parameter> {
    /// The attributes that came with the tensors; none where all attributes are the plan's.
    fn features(&self) -> Option<Features>;

    /// The tensors whose elements are positions in others; none where the caller has checked them.
    fn contents(&self) -> GivenContents<'_>;
}

/// Describes the outputs that the inputs imply, where the call describes none.
pub(super) fn imply_outputs(call: &mut FiaCall<'_>) {
    let (attention_out, softmax_lse) = call.implied_outputs();
    call.attention_out = call.attention_out.or(attention_out);
    call.softmax_lse = call.softmax_lse.or(softmax_lse);
}

impl Plan {
    /// Checks and prepares a call with these tensors, and a mask that stays the same for all launches. The call
    /// describes all of them, and the outputs. The block table of a call that is to be captured need not be full yet.
    pub(super) fn new(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        allowed: &Allowed,
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        reading: Reading,
    ) -> Result<Self> {
        Self::prepare(context, call, allowed, mask, bindings, reading)
            .map_err(|error| Self::refused(context, (call, allowed), mask, bindings, error))
    }

    /// Records the refusal of a call, if there is any recorder, and returns it.
    #[cold]
    pub(super) fn refused(
        context: &Arc<Context>,
        (call, allowed): (&FiaCall<'_>, &Allowed),
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        error: Error,
    ) -> Error {
        if case_file::is_on() {
            let mut live = LiveCall::new(context, call, mask, bindings, allowed.oldest());
            live.portable_since(allowed.portable());
            case_file::failed(live, None, &error);
        }
        error
    }

    fn prepare(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        allowed: &Allowed,
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        reading: Reading,
    ) -> Result<Self> {
        bindings.each(|argument, tensor| tensor.on(argument.name(), context))?;
        if let Some(mask) = mask {
            mask.on(Parameter::AttenMask.name(), context)?;
        }
        let api = context.runtime().api();
        let (target, at_least) = (context.target()?, allowed.oldest());
        let (version, bounds) = versions::choose(api, target, at_least, call, &allowed.ids()?)?;
        if let Some(since) = allowed.portable() {
            versions::portable(target, version, since, call, &allowed.ids()?)?;
        }
        bindings.contents().admitted(bounds.as_ref(), reading)?;

        let mut tensors = addressed(bindings)?;
        // Outputs have no memory yet: the query's address stands for theirs until a launch replaces it.
        let mut query = tensors
            .iter()
            .filter(|tensor| tensor.argument.parameter == Parameter::Query);
        let stand_in = query.next().map_or(ptr::null_mut(), |query| query.address);
        for output in [Parameter::SoftmaxLse, Parameter::AttentionOut] {
            let argument = Argument::from(output);
            let given = tensors.iter().any(|tensor| tensor.argument == argument);
            if let (Some(desc), false) = (call.tensor(output), given) {
                let address = if desc.is_empty() {
                    ptr::null_mut()
                } else {
                    stand_in
                };
                tensors.insert(
                    0,
                    Addressed {
                        argument,
                        desc: *desc,
                        address,
                    },
                );
            }
        }
        Ok(Self {
            version,
            layout: Layout::parse(call.input_layout),
            prepared: versions::prepare(context, version, call, &tensors, mask)?,
            features: bindings.features().unwrap_or_default(),
            bounds,
            attributes: call.attributes(),
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.prepared.context()
    }

    pub(super) fn desc(&self, output: Parameter) -> Option<TensorDesc> {
        self.prepared.desc(output)
    }

    /// Bounds of what launches read on the device as positions.
    pub(super) fn content_bounds(&self) -> Option<&ContentBounds> {
        self.bounds.as_ref()
    }

    /// Refuses a table whose rows do not name the blocks that a replay reads.
    pub(crate) fn replayed(&self, bindings: &impl Bindings) -> Result<()> {
        bindings
            .contents()
            .admitted(self.bounds.as_ref(), Reading::Launched)
    }

    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.prepared.function()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// Bytes of device memory that the mask's tensor takes for as long as the plan or its cache holds it: 4 MiB for the
    /// compressed mask of any length, rows times keys for a full one, nothing without a tensor.
    pub fn mask_bytes(&self) -> usize {
        self.prepared
            .fixed(Parameter::AttenMask)
            .map_or(0, |mask| reach(mask.desc()))
    }

    /// New output tensors, to be used with [`Plan::launch_into`] again and again. Their content is unspecified.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if `T` is
    /// not the output's type.
    pub fn output<T: Element>(&self) -> Result<Output<T>> {
        let (attention, lse) = (Parameter::AttentionOut, Parameter::SoftmaxLse);
        let Some(desc) = self.desc(attention) else {
            return Err(Error::invalid(attention.name(), "none", "an output")
                .fix("bring the attention output"));
        };
        let softmax_lse = self.desc(lse);
        let softmax_lse = softmax_lse.map(|desc| new_output(self.context(), lse.name(), desc));
        Ok(Output {
            attention: new_output(self.context(), attention.name(), desc)?,
            softmax_lse: softmax_lse.transpose()?,
        })
    }

    /// Queues the call with new output tensors. Returns at once; the output is there when the stream is synchronised,
    /// as [`Tensor::download`] does. The tensors may be dropped at once. `T` is the output's element type: the
    /// query's unless [`Inputs::output_type`] names another.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`] and [`Plan::output`]; [`Error::Capturing`] for a graph that is captured, whose
    /// launches write outputs that were there before.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    pub fn launch<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<Inputs<'a, T>>,
    ) -> Result<Output<T>> {
        let inputs = inputs.into().tensors();
        into_new(
            queue,
            || self.output(),
            |output| self.add(queue, &Launch::new(inputs, output)),
        )
    }

    /// Queues the call with output tensors of the caller. Allocates no host memory from the second launch on a stream
    /// on.
    ///
    /// A captured launch has the lengths of its plan in every replay, and every replay reads the block table on the
    /// device: the table is checked on the host before each. Calls whose lengths grow are captured by
    /// [`Capturing::attention`](crate::graph::Capturing::attention).
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors that differ from the planned ones in more than their
    /// addresses, and for another block size, quantisation scheme or length of the shared prefix;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for
    /// tensors of another device, or an output that shares memory with another tensor; [`Error::OutOfMemory`] for
    /// the workspace; [`Error::Aclnn`] if the operator cannot be launched. A failure while it runs shows when the
    /// stream is synchronised.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    #[doc(alias = "aclSetInputTensorAddr")]
    #[doc(alias = "aclSetDynamicInputTensorAddr")]
    pub fn launch_into<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<Inputs<'a, T>>,
        output: &mut Output<T>,
    ) -> Result<()> {
        self.add(queue, &Launch::new(inputs.into().tensors(), output))
    }

    /// Queues a launch whose lengths are those of the plan, in every replay if it is captured.
    fn add(&self, queue: &impl LaunchQueue, launch: &Launch<'_>) -> Result<()> {
        let outcome = self.run(queue, launch);
        queue.before_replays(|| CapturedTable::of(&launch.contents(), self.bounds.as_ref()));
        queue.note(outcome)
    }

    /// Checks the tensors of a launch and queues it.
    pub(crate) fn run(&self, queue: &impl LaunchQueue, bindings: &impl Bindings) -> Result<()> {
        let outcome = self.queue(queue, bindings);
        if case_file::is_on() {
            self.record(queue.stream(), bindings, &outcome);
        }
        outcome
    }

    /// Records a launch and its outcome.
    #[cold]
    fn record(&self, stream: Option<&Stream>, bindings: &impl Bindings, outcome: &Result<()>) {
        let live = self.live(bindings);
        match outcome {
            Ok(()) => case_file::launched(stream, live),
            Err(error) => case_file::failed(live, stream, error),
        }
    }

    /// Describes a launch with these tensors, to be recorded.
    pub(crate) fn live(&self, bindings: &impl Bindings) -> LiveCall {
        let no_tensors = Arguments::default();
        let mut call = self.attributes.call_of(&no_tensors);
        for parameter in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
            if let Some(desc) = call.single_mut(parameter) {
                *desc = self.desc(parameter);
            }
        }
        let mask = self.prepared.fixed(Parameter::AttenMask);
        LiveCall::new(self.context(), &call, mask, bindings, self.version)
    }

    fn queue(&self, queue: &impl LaunchQueue, bindings: &impl Bindings) -> Result<()> {
        let checked = self.prepared.check(queue, bindings)?;
        if let Some(features) = bindings.features() {
            features.are_as_planned(&self.features)?;
        }
        let given = bindings.contents();
        given.admitted(self.bounds.as_ref(), Reading::on(queue))?;
        checked.launch()
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("operator", &self.operator())
            .field("layout", &self.layout)
            .field("softmax_lse", &self.desc(Parameter::SoftmaxLse).is_some())
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}
