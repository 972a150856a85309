//! Programs that were checked and prepared: one function queues them, on a stream or into a graph.

use std::fmt;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::mask::HostMask;
use ascend_attention::merge::{MergeState, Part, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{
    AnyTensor, Device, Element, FusedInferAttention, Mask, Output, Plan, Queue, Stream, Tensor, Violation,
};

use crate::error::{Error, Result};
use crate::rules;
use crate::sharing::{PlannedStream, STREAM_OF_STEP};

use super::attention_backend::{AttentionBackend, checked_program};
use super::latent_tensors::LatentFormKind;
use super::program::{StepProgram, StepStage, heads_first, output_shape};
use super::step_call::{CallKeys, CallMask, StepCall};
use super::step_context::{LayerTensors, StepContext, size};
use super::step_memory::{StepMemory, output_bytes, table_bytes, tensor_bytes};

/// A step that a backend has prepared: its [`StepProgram`], planned.
pub struct StepPlan<T: Element> {
    calls: Vec<PlannedCall>,
    merge: Option<PlannedMerge<T>>,
    stage: Option<Box<dyn StepStage<T>>>,
    reads_own_keys: bool,
    /// Shapes of the planned queries.
    queries: Vec<Vec<usize>>,
    /// The form of the planned queries over latents.
    form: Option<LatentFormKind>,
    stream: PlannedStream,
    block_table: BlockTable,
}

/// A call of a program, planned.
struct PlannedCall {
    call: StepCall,
    /// The call without lengths.
    description: FusedInferAttention,
    plan: Plan,
    /// Its table, unless that is the step's.
    table: Option<BlockTable>,
    /// The tensor of a named mask that graphs fill for each step.
    mask: Option<Tensor<i8>>,
    /// Bytes of its own table and of a named mask.
    held_bytes: usize,
}

/// The merge of a program, planned.
struct PlannedMerge<T: Element> {
    plan: RowMergePlan,
    device: Device,
    /// Bytes of the parts and of the merged log-sum-exps, which each layer holds.
    layer_bytes: usize,
    /// The parts that a graph writes; none where each layer makes its own.
    parts: Vec<Output<T>>,
    /// The merged log-sum-exps that a graph writes.
    lse: Option<Tensor<f32>>,
}

impl PlannedCall {
    /// Plans a call. With `columns` its table and its named mask have room for other steps of a graph, whose tables
    /// have as many columns.
    fn new<T: Element>(
        call: StepCall,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        (columns, lse): (Option<usize>, bool),
    ) -> Result<Self> {
        let (stream, block_size) = (step.stream, step.block_table.block_size());
        let device = stream.device();
        let table = match (&call.keys, columns) {
            (CallKeys::Own | CallKeys::Cached, _) => None,
            (CallKeys::CachedOf(requests), _) => Some(step.block_table.rows(requests.clone())?),
            (CallKeys::Blocks(rows), None) => Some(BlockTable::from_rows(stream, rows, block_size)?),
            (CallKeys::Blocks(rows), Some(columns)) => {
                let table = BlockTable::zeroed(device, rows.len(), columns, block_size)?;
                table.overwrite(stream, rows)?;
                Some(table)
            }
        };
        let of_blocks = table.as_ref().filter(|_| matches!(call.keys, CallKeys::Blocks(_)));
        let mut held_bytes = of_blocks.map_or(0, table_bytes);
        let (mask, tensor) = match (&call.mask, columns) {
            (CallMask::Operator(mask), _) => (Mask::clone(mask), None),
            (CallMask::Named(mask, requests), None) => {
                let mask = mask.of(device, requests, mask_columns(step.block_table))?;
                (mask, None)
            }
            (CallMask::Named(mask, requests), Some(_)) => {
                let host = mask.on_host(requests, mask_columns(step.block_table))?;
                let tensor = Tensor::<i8>::empty(device, host.shape())?;
                tensor.overwrite_bytes(stream, host.bytes())?;
                (Mask::all_mask(tensor.clone()), Some(tensor))
            }
        };
        if let CallMask::Named(..) = call.mask {
            held_bytes += mask.tensor_bytes();
        }
        let description = call.description(step.shape, first, mask).softmax_lse(lse);
        let queries = call.queries(first)?;
        let inputs = call.inputs(first, &queries, table.as_ref().unwrap_or(step.block_table));
        let plan = call.lengths().apply(description.clone()).plan(inputs)?;
        Ok(Self { call, description, plan, table, mask: tensor, held_bytes })
    }
}

/// Keys of a named mask's row: the tokens of every block in a row of the table.
fn mask_columns(table: &BlockTable) -> usize {
    table.columns() * table.block_size()
}

impl<T: Element> StepPlan<T> {
    /// Prepares a step with a backend, for layers whose tensors have the shapes of `first`.
    ///
    /// # Errors
    /// The reason why the backend cannot serve the step: a broken rule of the operator, or a refusal of its own.
    /// Nothing is launched.
    pub fn new(
        backend: &(impl AttentionBackend<T> + ?Sized),
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Self> {
        let program = checked_program(backend, step, first)?;
        Self::of_program(program, step, first, None)
    }

    /// Prepares a program. With `columns` it has room for the programs of a graph's steps, whose tables have as many
    /// columns.
    pub(crate) fn of_program(
        program: StepProgram<T>,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        columns: Option<usize>,
    ) -> Result<Self> {
        let (merged, reads_own_keys) = (program.merge.is_some(), program.reads_own_keys());
        let calls = program.calls.into_iter();
        let calls = calls.map(|call| PlannedCall::new(call, step, first, (columns, merged)));
        let calls: Vec<_> = calls.collect::<Result<_>>()?;
        let merge = match program.merge {
            None => None,
            Some(parts_of_rows) => {
                let outputs = calls.iter().map(|call| call.plan.output());
                let outputs: Vec<Output<T>> = outputs.collect::<Result<_, _>>()?;
                let parts = outputs.iter().map(Part::of);
                let parts: Vec<_> = parts.collect::<Result<_, _>>()?;
                let plan = MergeState::new(Layout::Tnd).rows(&parts_of_rows).plan(&parts)?;
                let device = step.stream.device().clone();
                let lse = lse_like(&device, &outputs)?;
                let parts = outputs.iter().map(output_bytes);
                Some(PlannedMerge {
                    plan,
                    device,
                    layer_bytes: parts.fold(tensor_bytes(&lse), usize::saturating_add),
                    lse: columns.map(|_| lse),
                    parts: match columns {
                        Some(_) => outputs,
                        None => Vec::new(),
                    },
                })
            }
        };
        Ok(Self {
            calls,
            merge,
            stage: program.stage,
            reads_own_keys,
            queries: first.queries().map(|(_, query)| query.shape().to_vec()).collect(),
            form: first.latent_form(),
            stream: PlannedStream::of(step.stream),
            block_table: step.block_table.clone(),
        })
    }

    /// Whether it may read the keys of the step from the layer's own tensors.
    pub(crate) fn reads_own_keys(&self) -> bool {
        self.reads_own_keys
    }

    /// The device memory that the plan needs besides the cache and the tensors of the layers. The output of a layer
    /// is the caller's ([`StepPlan::launch_into`]). [`Backends::memory_limit`](crate::Backends::memory_limit)
    /// compares with it.
    pub fn memory(&self) -> StepMemory {
        let merge = self.merge.as_ref();
        let calls = self.calls.iter().map(|call| call.plan.workspace_bytes());
        let workspaces = calls.chain(merge.map(|merge| merge.plan.workspace_bytes()));
        let own = StepMemory::of_calls(workspaces)
            .holding(self.calls.iter().map(|call| call.held_bytes))
            .taking(merge.map(|merge| merge.layer_bytes));
        match &self.stage {
            Some(stage) => own.then(stage.memory()),
            None => own,
        }
    }

    /// Queues the attention of a layer, on the stream of the step that was planned.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for another stream and for tensors of other shapes; any error of
    /// the launch.
    pub fn launch(&self, stream: &Stream, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        let mut output = Tensor::empty(stream.device(), output_shape(layer))?;
        self.launch_into(stream, layer, &mut output)?;
        Ok(output)
    }

    /// Queues the attention of a layer into an output tensor of the caller, of the shape that
    /// [`launch`](Self::launch) gives.
    ///
    /// # Errors
    /// As for [`StepPlan::launch`], also for an output of another shape;
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an output that shares memory with what the layer reads.
    pub fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        self.stream.check(stream, STREAM_OF_STEP)?;
        self.check_form(layer)?;
        self.check_tensors(layer, output)?;
        if let Some(stage) = &self.stage {
            stage.launch_into(stream, layer, output)?;
        }
        self.queue(stream, layer, output, |call, inputs, output| Ok(call.plan.launch_into(stream, inputs, output)?))
    }

    /// Refuses queries in another form than was planned.
    fn check_form(&self, layer: &LayerTensors<'_, T>) -> Result<()> {
        let given = layer.latent_form();
        if given == self.form {
            return Ok(());
        }
        let name = |form: Option<LatentFormKind>| match form {
            Some(form) => format!("{form:?}"),
            None => "none, without latents".into(),
        };
        Err(Error::not_as_planned("form", name(given), name(self.form)))
    }

    /// Refuses queries of other shapes than were planned, outputs of other shapes than these have, and outputs over
    /// memory that the layer reads. Nothing has run then.
    fn check_tensors(&self, layer: &LayerTensors<'_, T>, output: &Tensor<T>) -> Result<()> {
        let check = |name: &'static str, tensor: &AnyTensor, planned: &[usize]| match tensor.shape() {
            given if given == planned => Ok(()),
            given => Err(Error::not_as_planned(name, format_args!("{given:?}"), format_args!("{planned:?}"))),
        };
        for ((name, query), planned) in layer.queries().zip(&self.queries) {
            check(name, query, planned)?;
        }
        let mut planned = output_shape(layer);
        if layer.latent.is_none() {
            // The dimension of the values may be the cache's alone; the calls check it.
            planned[2] = size(output, 2);
        }
        check("output", output, &planned)?;
        if let Some((absorbed, decoded)) = layer.mixed() {
            check("decoded", decoded, &heads_first(absorbed))?;
        }
        layer.check_outputs(Some(output))
    }

    /// Queues the calls of a layer, each by `launch`, and the merge of their results.
    fn queue(
        &self,
        queue: &impl Queue,
        layer: &LayerTensors<'_, T>,
        output: &Tensor<T>,
        mut launch: impl FnMut(&PlannedCall, Inputs<'_, T>, &mut Output<T>) -> Result<()>,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for (at, planned) in self.calls.iter().enumerate() {
            let PlannedCall { call, plan, .. } = planned;
            let mut target = match &self.merge {
                None => Output::from(call.target(layer, output)?),
                Some(merge) => match merge.parts.get(at) {
                    Some(part) => part.clone(),
                    None => plan.output()?,
                },
            };
            let queries = call.queries(layer)?;
            let table = planned.table.as_ref().unwrap_or(&self.block_table);
            launch(planned, call.inputs(layer, &queries, table), &mut target)?;
            if self.merge.is_some() {
                parts.push(target);
            }
        }
        let Some(merge) = &self.merge else {
            return Ok(());
        };
        let lse = match &merge.lse {
            Some(lse) => lse.clone(),
            None => lse_like(&merge.device, &parts)?,
        };
        let mut merged = Output { attention: output.clone(), softmax_lse: Some(lse) };
        let parts = parts.iter().map(Part::of);
        let parts: Vec<_> = parts.collect::<Result<_, _>>()?;
        Ok(merge.plan.launch_into(queue, &parts, &mut merged)?)
    }

    /// Records the calls of a layer into a graph, whose replays take the lengths of their steps, within these limits.
    pub(crate) fn record(
        &self,
        capture: &Capturing<'_>,
        layer: &LayerTensors<'_, T>,
        output: &Tensor<T>,
        limits: KeyLimits,
    ) -> Result<()> {
        let longest = limits.keys.min(mask_columns(&self.block_table));
        self.queue(capture, layer, output, |planned, inputs, output| {
            let description = &planned.description;
            let call = match planned.call.lengths() {
                CallLengths::PackedPaged { q, .. } => capture.attention_within(description, q, limits, inputs),
                CallLengths::Batched { kv, .. } => {
                    let kv = &PerRequest::new(vec![longest; kv.lengths().len()])?;
                    let longest = CallLengths::Batched { q: None, kv };
                    capture.attention(description, longest, inputs)
                }
                own => capture.attention(description, own, inputs),
            };
            Ok(capture.launch_into(call?, inputs, output)?)
        })
    }

    /// The contents of the named masks of a step's program, on the host.
    pub(crate) fn host_masks(
        &self,
        program: &StepProgram<T>,
        block_table: &BlockTable,
    ) -> Result<Vec<Option<HostMask>>> {
        let columns = mask_columns(block_table);
        let masks = program.calls.iter().map(|call| match &call.mask {
            CallMask::Operator(_) => Ok(None),
            CallMask::Named(mask, requests) => mask.on_host(requests, columns).map(Some),
        });
        masks.collect()
    }

    /// Puts the tables and masks of a step's program into those that a graph reads, which waits for the stream.
    pub(crate) fn refill(&self, stream: &Stream, program: &StepProgram<T>, masks: &[Option<HostMask>]) -> Result<()> {
        for ((planned, call), mask) in self.calls.iter().zip(&program.calls).zip(masks) {
            if let (Some(table), CallKeys::Blocks(rows)) = (&planned.table, &call.keys) {
                table.overwrite(stream, rows)?;
            }
            if let (Some(tensor), Some(mask)) = (&planned.mask, mask) {
                tensor.overwrite_bytes(stream, mask.bytes())?;
            }
        }
        Ok(())
    }
}

/// Log-sum-exps of the shape of the first part's.
fn lse_like<T: Element>(device: &Device, parts: &[Output<T>]) -> Result<Tensor<f32>> {
    let lse = parts.first().and_then(|part| part.softmax_lse.as_ref());
    let Some(lse) = lse else {
        return Err(Violation::new(
            &rules::ARGUMENT_VALUE,
            "a merge of no calls",
            "1 call or more",
            "leave the merge out where nothing is computed",
        )
        .into());
    };
    Ok(Tensor::empty(device, lse.shape())?)
}

impl<T: Element> fmt::Debug for StepPlan<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = self.calls.iter().map(|planned| &planned.call);
        f.debug_struct("StepPlan")
            .field("calls", &calls.collect::<Vec<_>>())
            .field("merge", &self.merge.as_ref().map(|merge| &merge.plan))
            .field("stage", &self.stage)
            .finish()
    }
}
