//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::sync::Arc;
use std::{fmt, ptr};

use ascend_spec::ops::fused_infer_attention_score::{Argument, ContentBounds, FiaCall, Parameter};
use ascend_spec::{Layout, TensorDesc};

use crate::case_file::LiveCall;
use crate::error::Result;
use crate::memory::Element;
use crate::operator::{Addressed, EntryPoints, PreparedCall, Tensors, addressed, reach};
use crate::ops::operation::{self, Operation, Sealed, record_refusal};
use crate::runtime::{Context, LaunchQueue, Queue, ReplayCheck, Stream};
use crate::tensor::AnyTensor;

use super::block_table::BlockTable;
use super::contents::{GivenContents, PaddingSize, Reading};
use super::inputs::{Bindings, Features, Inputs, Launch, Output};
use super::soft_cap::CallCap;
use super::versions;
use super::versions::Allowed;

/// A call that was checked and prepared. From [`FusedInferAttention::plan`](super::FusedInferAttention::plan).
///
/// Within a decoding step all layers share shapes, lengths and mask: one plan serves them all. Calls whose lengths grow
/// from replay to replay of a graph are captured by [`Capturing::attention`](crate::graph::Capturing::attention).
///
/// A launch reads [`Inputs`] and writes an [`Output`], whose type is the query's unless [`Inputs::output_type`] names
/// another. It refuses another block size, quantisation scheme or length of the shared prefix than the planned one.
///
/// Since CANN 8.1.
pub type Plan = operation::Plan<AttentionOperation>;

/// FusedInferAttentionScore, as its [`Plan`] knows it.
#[derive(Debug)]
pub struct AttentionOperation {
    layout: Option<Layout>,
    features: Features,
    /// Bounds of what launches read on the device as positions.
    bounds: Option<ContentBounds>,
    allowed: Allowed,
}

/// A table that each replay of a graph reads for the same lengths.
#[derive(Debug)]
pub(crate) struct CapturedTable {
    bounds: ContentBounds,
    table: BlockTable,
}

impl CapturedTable {
    /// The table of a launch with the bounds of its content; `None` if the launch has no table or no bounds.
    pub(crate) fn of(given: &GivenContents<'_>, bounds: Option<&ContentBounds>) -> Option<Arc<dyn ReplayCheck>> {
        let (table, bounds) = (given.block_table?.clone(), bounds?.clone());
        Some(Arc::new(Self { bounds, table }))
    }
}

impl ReplayCheck for CapturedTable {
    /// Refuses rows that do not name the blocks that a replay reads.
    fn admits_replay(&self) -> Result<()> {
        self.table.admitted(&self.bounds, true, true)
    }
}

/// Describes the outputs that the inputs imply, where the call describes none.
pub(super) fn imply_outputs(call: &mut FiaCall<'_>) {
    let (attention_out, softmax_lse) = call.implied_outputs();
    call.attention_out = call.attention_out.or(attention_out);
    call.softmax_lse = call.softmax_lse.or(softmax_lse);
}

impl Sealed for AttentionOperation {}

impl Operation for AttentionOperation {
    type Inputs<'a, T: Element> = Inputs<'a, T>;
    type Output<T: Element> = Output<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &Plan) -> Result<Output<T>> {
        plan.new_outputs(&[Parameter::AttentionOut, Parameter::SoftmaxLse])
    }

    fn launch<T: Element>(
        &self,
        plan: &Plan,
        queue: &impl Queue,
        inputs: &Inputs<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        plan.run(queue, &Launch::new(inputs.tensors(), output))
    }

    #[inline]
    fn replay_check<T: Element>(&self, inputs: &Inputs<'_, T>) -> Option<Arc<dyn ReplayCheck>> {
        CapturedTable::of(&inputs.tensors().contents(), self.bounds.as_ref())
    }

    fn check_contents<T: Element>(&self, plan: &Plan, stream: &Stream, inputs: &Inputs<'_, T>) -> Result<()> {
        plan.lint_contents(stream, &inputs.tensors(), &self.allowed.ids()?)
    }

    fn describe(&self, plan: &Plan, text: &mut fmt::DebugStruct<'_, '_>) {
        let softmax_lse = plan.desc(Parameter::SoftmaxLse).is_some();
        text.field("layout", &self.layout).field("softmax_lse", &softmax_lse);
    }
}

/// Records the refusal of a call with these tensors, and returns it.
pub(super) fn refused<R>(
    planned: Result<R>,
    context: &Arc<Context>,
    (call, allowed): (&FiaCall<'_>, &Allowed),
    mask: Option<&AnyTensor>,
    bindings: &impl Bindings,
) -> Result<R> {
    record_refusal(planned, || {
        let mask = mask.map(|mask| (Parameter::AttenMask, mask));
        LiveCall::new(context, &call.recorded(), 1, bindings, mask).portable_since(allowed.portable())
    })
}

impl Plan {
    /// Checks and prepares a call with these tensors, and a mask that stays the same for all launches. The call
    /// describes all of them, and the outputs. The block table of a call that is to be captured need not be full yet.
    pub(super) fn checked(
        context: &Arc<Context>,
        (call, soft_cap): (&FiaCall<'_>, CallCap),
        allowed: &Allowed,
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        reading: Reading,
    ) -> Result<Self> {
        let planned = Self::prepare(context, (call, soft_cap), allowed, mask, bindings, reading);
        refused(planned, context, (call, allowed), mask, bindings)
    }

    fn prepare(
        context: &Arc<Context>,
        (call, soft_cap): (&FiaCall<'_>, CallCap),
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
        let target = context.target()?;
        let (version, bounds) = versions::choose(api, target, call, &allowed.ids()?)?;
        if let Some(since) = allowed.portable() {
            versions::portable(target, version, since, call, &allowed.ids()?)?;
        }
        bindings.contents().admitted(bounds.as_ref(), reading)?;

        let mut tensors = addressed(bindings)?;
        // Outputs have no memory yet: the query's address stands for theirs until a launch replaces it.
        let mut query = tensors.iter().filter(|tensor| tensor.argument.parameter == Parameter::Query);
        let stand_in = query.next().map_or(ptr::null_mut(), |query| query.address);
        for output in [Parameter::SoftmaxLse, Parameter::AttentionOut] {
            let argument = Argument::from(output);
            let given = tensors.iter().any(|tensor| tensor.argument == argument);
            if let (Some(desc), false) = (call.tensor(output), given) {
                let address = if desc.is_empty() { ptr::null_mut() } else { stand_in };
                tensors.insert(0, Addressed { argument, desc: *desc, address });
            }
        }
        let operation = AttentionOperation {
            layout: Layout::parse(call.input_layout),
            features: bindings.features().unwrap_or_default(),
            bounds,
            allowed: allowed.clone(),
        };
        let mask = mask.map(|mask| (Parameter::AttenMask, mask));
        let prepared = soft_cap.prepare(|| PreparedCall::new(context, call, version, &tensors, mask.as_slice()))?;
        let plan = Self::new(prepared, operation).recorded_as(call);
        Ok(match soft_cap {
            CallCap(None) => plan,
            CallCap(Some(_)) => plan.unrecorded(),
        })
    }

    pub(super) fn desc(&self, output: Parameter) -> Option<TensorDesc> {
        self.call().desc(output)
    }

    /// Bounds of what launches read on the device as positions.
    pub(super) fn content_bounds(&self) -> Option<&ContentBounds> {
        self.operation().bounds.as_ref()
    }

    /// Refuses a table whose rows do not name the blocks that a replay reads.
    pub(crate) fn replayed(&self, bindings: &impl Bindings) -> Result<()> {
        let contents = bindings.contents();
        contents.admitted(self.content_bounds(), Reading::Launched)
    }

    /// Bytes of device memory that the mask's tensor takes for as long as the plan or its cache holds it: 4 MiB for the
    /// compressed mask of any length, rows times keys for a full one, nothing without a tensor.
    pub fn mask_bytes(&self) -> usize {
        let mask = self.call().fixed(Parameter::AttenMask);
        mask.map_or(0, |mask| reach(mask.desc()))
    }

    /// Checks the tensors of a launch and queues it.
    pub(crate) fn run(&self, queue: &impl LaunchQueue, bindings: &impl Bindings) -> Result<()> {
        let admits = || {
            if let Some(features) = bindings.features() {
                features.are_as_planned(&self.operation().features)?;
            }
            let given = bindings.contents();
            given.admitted(self.content_bounds(), Reading::on(queue))
        };
        self.queue(queue, bindings, admits).flatten()
    }
}

/// The tensors of a launch and the attributes that came with them, owned, for a launch that runs later.
#[derive(Debug)]
pub(crate) struct OwnedBindings {
    tensors: Vec<(Argument, AnyTensor)>,
    features: Option<Features>,
    block_table: Option<BlockTable>,
    query_padding: Option<PaddingSize>,
    kv_padding: Option<PaddingSize>,
}

impl OwnedBindings {
    pub(crate) fn of(bindings: &impl Bindings) -> Result<Self> {
        let mut tensors = Vec::new();
        bindings.each(|argument, tensor| {
            tensors.push((argument, tensor.clone()));
            Ok(())
        })?;
        let contents = bindings.contents();
        Ok(Self {
            tensors,
            features: bindings.features(),
            block_table: contents.block_table.cloned(),
            query_padding: contents.query_padding.cloned(),
            kv_padding: contents.kv_padding.cloned(),
        })
    }
}

impl Tensors<Parameter> for OwnedBindings {
    fn each<'b>(&'b self, mut visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>) -> Result<()> {
        let mut tensors = self.tensors.iter();
        tensors.try_for_each(|(argument, tensor)| visit(*argument, tensor))
    }
}

impl Bindings for OwnedBindings {
    fn features(&self) -> Option<Features> {
        self.features
    }

    fn contents(&self) -> GivenContents<'_> {
        GivenContents {
            block_table: self.block_table.as_ref(),
            query_padding: self.query_padding.as_ref(),
            kv_padding: self.kv_padding.as_ref(),
        }
    }
}
