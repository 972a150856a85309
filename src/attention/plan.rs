//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use ascend_spec::fia::{FiaCall, Operand, Parameter, Places, Version};
use ascend_spec::{Layout, TensorDesc};
use smallvec::SmallVec;

use crate::case::{self, Attributes, LiveCall};
use crate::error::{Error, Result};
use crate::executor::{Launches, Queue};
use crate::memory::{Element, overlap};
use crate::runtime::{Context, Stream};
use crate::tensor::{AnyTensor, Tensor};

use super::allowed::Allowed;
use super::block_table::BlockTable;
use super::descriptor::{Descriptors, Executor, Placed};
use super::inputs::{Features, Inputs, Launch};
use super::operator;
use super::places::{GivenPlaces, Reading};
use super::tensor_list::TensorList;

/// What a launch computes.
#[derive(Clone, Debug)]
pub struct Output<T: Element> {
    /// The attention output (`attentionOut`), in the output order of the layout.
    pub attention: Tensor<T>,
    /// The log-sum-exp of each row's scores, `[B, N, Sq, 1]` (`softmaxLse`), if asked for. A row that saw no key has
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
    /// What each launch brings, outputs first.
    planned: Vec<Planned>,
    features: Features,
    /// Bounds of what launches read on the device as places.
    places: Option<Places>,
    /// What was planned, to be recorded.
    attributes: Attributes,
    /// The mask, which stays the same for all launches, and its addresses.
    mask: Option<(AnyTensor, Range<usize>)>,
    launches: Launches<Prepared>,
}

/// A tensor that each launch brings.
struct Planned {
    operand: Operand,
    desc: TensorDesc,
    /// From its address on.
    bytes: usize,
}

/// The executor, and the addresses that it has now, in the order of [`Plan::planned`].
struct Prepared {
    executor: Executor,
    addresses: Vec<usize>,
}

/// A table that each replay of a graph reads for the same lengths.
#[derive(Debug)]
pub(crate) struct CapturedTable {
    places: Places,
    table: BlockTable,
}

impl CapturedTable {
    /// Refuses rows that do not name the blocks that a replay reads.
    pub(crate) fn replayed(&self) -> Result<()> {
        self.table.admitted(&self.places, true, true)
    }
}

/// The tensors of a call or a launch.
pub(crate) trait Bindings {
    /// Calls `visit` with each, outputs first, until it fails.
    fn each<'b>(&'b self, visit: impl FnMut(Operand, &'b AnyTensor) -> Result<()>) -> Result<()>;

    /// The attributes that came with them; none where all attributes are the plan's.
    fn features(&self) -> Option<Features>;

    /// The tensors whose elements are places in others; none where the caller has checked them.
    fn places(&self) -> GivenPlaces<'_>;
}

/// Bytes from a tensor's address to the end of its last element.
fn reach(desc: &TensorDesc) -> usize {
    let bytes = desc.byte_range().unwrap_or(0..0);
    usize::try_from(bytes.end).unwrap_or(usize::MAX)
}

/// Describes the outputs that the inputs imply, where none is described.
pub(super) fn imply_outputs(call: &mut FiaCall<'_>) {
    let (attention_out, softmax_lse) = call.implied_outputs();
    call.attention_out = call.attention_out.or(attention_out);
    call.softmax_lse = call.softmax_lse.or(softmax_lse);
}

impl Plan {
    /// Checks and prepares a call with these tensors, and a mask that stays the same for all launches. The call
    /// describes all of them, and the outputs. Tables of a call that is to be captured are not full yet.
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

    /// Why a call is not planned, recorded for those who want to know.
    #[cold]
    pub(super) fn refused(
        context: &Arc<Context>,
        (call, allowed): (&FiaCall<'_>, &Allowed),
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        error: Error,
    ) -> Error {
        if case::is_on() {
            let mut live = LiveCall::new(context, call, mask, bindings, allowed.oldest());
            live.portable_since(allowed.portable());
            case::failed(live, None, &error);
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
        bindings.each(|operand, tensor| tensor.on(operand.name(), context))?;
        if let Some(mask) = mask {
            mask.on(Parameter::AttenMask.name(), context)?;
        }
        let api = context.runtime().api();
        let (target, at_least) = (context.target()?, allowed.oldest());
        let (version, places) = operator::choose(api, target, at_least, call, &allowed.ids()?)?;
        if let Some(since) = allowed.portable() {
            operator::portable(target, version, since, call, &allowed.ids()?)?;
        }
        bindings.places().admitted(places.as_ref(), reading)?;

        let mut placed: SmallVec<[Placed; 8]> = SmallVec::new();
        bindings.each(|operand, tensor| {
            placed.push(Placed {
                operand,
                desc: *tensor.desc(),
                address: tensor.as_raw(),
            });
            Ok(())
        })?;
        // Outputs have no memory yet: the query's address stands for theirs until a launch replaces it.
        let mut query = placed
            .iter()
            .filter(|tensor| tensor.operand == Operand::Query);
        let stand_in = query.next().map_or(ptr::null_mut(), |query| query.address);
        for output in [Parameter::SoftmaxLse, Parameter::AttentionOut] {
            let operand = Operand::from(output);
            let given = placed.iter().any(|tensor| tensor.operand == operand);
            if let (Some(desc), false) = (output.of(call), given) {
                let address = if desc.is_empty() {
                    ptr::null_mut()
                } else {
                    stand_in
                };
                placed.insert(
                    0,
                    Placed {
                        operand,
                        desc: *desc,
                        address,
                    },
                );
            }
        }
        let planned = placed.iter().map(|tensor| Planned {
            operand: tensor.operand,
            desc: tensor.desc,
            bytes: reach(&tensor.desc),
        });
        let planned: Vec<_> = planned.collect();
        let addresses = placed.iter().map(|tensor| tensor.address.addr()).collect();
        placed.extend(mask.map(|mask| Placed {
            operand: Operand::AttenMask,
            desc: *mask.desc(),
            address: mask.as_raw(),
        }));

        context.bind()?;
        let descriptors = Descriptors::new(context, call, &placed)?;
        let (executor, bytes) = operator::prepare(context, version, call, descriptors)?;
        let prepared = Prepared {
            executor,
            addresses,
        };
        Ok(Self {
            version,
            layout: Layout::parse(call.input_layout),
            planned,
            features: bindings.features().unwrap_or_default(),
            places,
            attributes: Attributes::of(call),
            mask: mask.map(|mask| (mask.clone(), mask.addresses())),
            launches: Launches::new(context, bytes, prepared)?,
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.launches.context()
    }

    pub(super) fn desc(&self, output: Parameter) -> Option<TensorDesc> {
        let operand = Operand::from(output);
        let planned = self
            .planned
            .iter()
            .find(|planned| planned.operand == operand);
        planned.map(|planned| planned.desc)
    }

    /// Bounds of what launches read on the device as places.
    pub(super) fn places(&self) -> Option<&Places> {
        self.places.as_ref()
    }

    /// Refuses a table whose rows do not name the blocks that a replay reads.
    pub(crate) fn replayed(&self, bindings: &impl Bindings) -> Result<()> {
        bindings
            .places()
            .admitted(self.places.as_ref(), Reading::Launched)
    }

    /// The table that captured launches read, with what it has to name.
    pub(crate) fn captured_table(&self, bindings: &impl Bindings) -> Option<CapturedTable> {
        let table = bindings.places().block_table?.clone();
        let places = self.places.clone()?;
        Some(CapturedTable { places, table })
    }

    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.version.symbol()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.launches.workspace_bytes()
    }

    /// Bytes of device memory that the mask's tensor takes for as long as the plan or its cache holds it: 4 MiB for the
    /// compressed mask of any length, rows times keys for a full one, nothing without a tensor.
    pub fn mask_bytes(&self) -> usize {
        self.mask.as_ref().map_or(0, |(mask, _)| reach(mask.desc()))
    }

    /// New output tensors, to be used with [`Plan::launch_into`] again and again. Their content is unspecified.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`Error::InvalidArgument`] if `T` is not the output's type.
    pub fn output<T: Element>(&self) -> Result<Output<T>> {
        let new = |parameter| {
            let desc = self.desc(parameter);
            desc.map(|desc| AnyTensor::empty(self.context(), desc))
                .transpose()
        };
        let Some(attention) = new(Parameter::AttentionOut)? else {
            return Err(Error::invalid("attention_out", "none", "an output"));
        };
        let lse = new(Parameter::SoftmaxLse)?;
        Ok(Output {
            attention: attention.typed()?,
            softmax_lse: lse.map(AnyTensor::typed).transpose()?,
        })
    }

    /// Queues the call with new output tensors. Returns at once; the output is there when the stream is synchronised, as
    /// [`Tensor::download`] does. The tensors may be dropped at once.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`] and [`Plan::output`].
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    pub fn launch<T, K, V>(
        &self,
        stream: &Stream,
        query: &Tensor<T>,
        key: &K,
        value: &V,
    ) -> Result<Output<T>>
    where
        T: Element,
        K: TensorList<Element = T> + ?Sized,
        V: TensorList<Element = T> + ?Sized,
    {
        self.launch_with(stream, &Inputs::new(query, key, value))
    }

    /// Queues the call with output tensors of the caller. Allocates no host memory from the second launch on a stream on.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for tensors that differ from the planned ones in more than their addresses;
    /// [`Error::InvalidArgument`] for tensors of another device, or an output that shares memory with another tensor;
    /// [`Error::OutOfMemory`] for the workspace; [`Error::Aclnn`] if the operator cannot be launched. A failure while it
    /// runs shows when the stream is synchronised.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    #[doc(alias = "aclSetInputTensorAddr")]
    pub fn launch_into<T, K, V>(
        &self,
        stream: &Stream,
        query: &Tensor<T>,
        key: &K,
        value: &V,
        output: &mut Output<T>,
    ) -> Result<()>
    where
        T: Element,
        K: TensorList<Element = T> + ?Sized,
        V: TensorList<Element = T> + ?Sized,
    {
        self.launch_with_into(stream, &Inputs::new(query, key, value), output)
    }

    /// As [`Plan::launch`], for a plan of [`plan_with`](super::FusedInferAttention::plan_with). `T` is the output's
    /// element type: the query's unless the [`Quantisation`](super::Quantisation) says otherwise.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`] and [`Plan::output`].
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    pub fn launch_with<T: Element>(
        &self,
        stream: &Stream,
        inputs: &Inputs<'_>,
    ) -> Result<Output<T>> {
        let mut output = self.output()?;
        self.launch_with_into(stream, inputs, &mut output)?;
        Ok(output)
    }

    /// As [`Plan::launch_into`], for a plan of [`plan_with`](super::FusedInferAttention::plan_with).
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`]; [`Error::NotAsPlanned`] also for another block size, quantisation scheme or length
    /// of the shared prefix.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    #[doc(alias = "aclSetInputTensorAddr")]
    #[doc(alias = "aclSetDynamicInputTensorAddr")]
    pub fn launch_with_into<T: Element>(
        &self,
        stream: &Stream,
        inputs: &Inputs<'_>,
        output: &mut Output<T>,
    ) -> Result<()> {
        self.run(stream, &Launch::new(inputs, output))
    }

    /// Checks the tensors of a launch and queues it.
    pub(crate) fn run(&self, queue: &impl Queue, bindings: &impl Bindings) -> Result<()> {
        let outcome = self.queue(queue, bindings);
        if case::is_on() {
            self.record(queue.stream(), bindings, &outcome);
        }
        outcome
    }

    /// Records a launch for those who want to know.
    #[cold]
    fn record(&self, stream: Option<&Stream>, bindings: &impl Bindings, outcome: &Result<()>) {
        let live = self.live(bindings);
        match outcome {
            Ok(()) => case::launched(stream, &live),
            Err(error) => case::failed(live, stream, error),
        }
    }

    /// A launch with these tensors.
    pub(crate) fn live(&self, bindings: &impl Bindings) -> LiveCall {
        let mut call = self.attributes.call();
        for parameter in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
            *parameter.of_mut(&mut call) = self.desc(parameter);
        }
        let mask = self.mask.as_ref().map(|(mask, _)| mask);
        LiveCall::new(self.context(), &call, mask, bindings, self.version)
    }

    fn queue(&self, queue: &impl Queue, bindings: &impl Bindings) -> Result<()> {
        self.launches.check_device(queue)?;
        self.check(bindings)?;
        let reading = match queue.runs_now() {
            true => Reading::Launched,
            false => Reading::Captured,
        };
        bindings.places().admitted(self.places.as_ref(), reading)?;
        self.launches.queue(
            queue,
            |_, prepared| {
                let mut at = 0;
                bindings.each(|operand, tensor| {
                    let index = self.position(at, operand);
                    at += 1;
                    prepared.point(index, operand, tensor)
                })
            },
            // SAFETY: the tensors are laid out as planned, as checked; they and the workspace are kept for as long as the
            // launch may use them, and borrowed until then.
            |prepared, slot| unsafe { operator::launch(self.version, &prepared.executor, slot) },
            |queued| {
                if let Some((mask, _)) = &self.mask {
                    queued.keep(mask.memory());
                }
                bindings.each(|_, tensor| {
                    queued.keep(tensor.memory());
                    Ok(())
                })
            },
        )
    }

    /// Place of a tensor among the planned ones: mostly the one where it stands in a launch.
    #[inline]
    fn position(&self, at: usize, operand: Operand) -> Option<usize> {
        match self.planned.get(at) {
            Some(planned) if planned.operand == operand => Some(at),
            _ => {
                let mut planned = self.planned.iter();
                planned.position(|planned| planned.operand == operand)
            }
        }
    }

    /// Refuses tensors that are not as planned, and outputs that share memory with another tensor.
    fn check(&self, bindings: &impl Bindings) -> Result<()> {
        let mut given = 0usize;
        let mut attention_out = 0..0;
        let mut softmax_lse = 0..0;
        let apart = |operand: Operand, at: &Range<usize>, outputs: [&Range<usize>; 2]| match outputs
            .into_iter()
            .any(|output| overlap(output, at))
        {
            true => Err(shared_memory(operand)),
            false => Ok(()),
        };
        bindings.each(|operand, tensor| {
            let index = self.position(given, operand);
            given += 1;
            tensor.on(operand.name(), self.context())?;
            let Some(planned) = index.and_then(|index| self.planned.get(index)) else {
                return Err(not_as_planned(operand, tensor.desc(), "no such tensor"));
            };
            if planned.desc != *tensor.desc() {
                return Err(not_as_planned(operand, tensor.desc(), planned.desc));
            }
            let start = tensor.as_raw().addr();
            let at = start..start.saturating_add(planned.bytes);
            if operand.is_output() {
                tensor.memory().writable(operand.name())?;
            }
            match operand {
                Operand::AttentionOut => attention_out = at,
                Operand::SoftmaxLse => {
                    apart(operand, &at, [&attention_out, &(0..0)])?;
                    softmax_lse = at;
                }
                _ => apart(operand, &at, [&attention_out, &softmax_lse])?,
            }
            Ok(())
        })?;
        if given != self.planned.len() {
            return Err(self.missing(bindings));
        }
        if let Some(features) = bindings.features() {
            features.are_as_planned(&self.features)?;
        }
        match &self.mask {
            Some((_, at)) => apart(Operand::AttenMask, at, [&attention_out, &softmax_lse]),
            None => Ok(()),
        }
    }

    /// The error for a launch without a tensor that was planned.
    #[cold]
    fn missing(&self, bindings: &impl Bindings) -> Error {
        let mut given = Vec::new();
        // Collecting does not fail.
        let _ = bindings.each(|operand, _| {
            given.push(operand);
            Ok(())
        });
        let mut planned = self.planned.iter();
        match planned.find(|planned| !given.contains(&planned.operand)) {
            Some(planned) => not_as_planned(planned.operand, "no tensor", planned.desc),
            None => Error::NotAsPlanned {
                argument: "tensors",
                given: format!("{} of them", given.len()),
                planned: self.planned.len().to_string(),
            },
        }
    }
}

impl Prepared {
    /// Sees to it that the executor has a tensor's address.
    #[inline]
    fn point(&mut self, index: Option<usize>, operand: Operand, tensor: &AnyTensor) -> Result<()> {
        let Some(now) = index.and_then(|index| self.addresses.get_mut(index)) else {
            return Ok(());
        };
        let at = tensor.as_raw();
        if *now != at.addr() {
            self.executor.set_address(operand, at)?;
            *now = at.addr();
        }
        Ok(())
    }
}

#[cold]
fn not_as_planned(operand: Operand, given: impl ToString, planned: impl ToString) -> Error {
    Error::NotAsPlanned {
        argument: operand.name(),
        given: given.to_string(),
        planned: planned.to_string(),
    }
}

#[cold]
fn shared_memory(operand: Operand) -> Error {
    let with = if operand.is_output() {
        "another output"
    } else {
        operand.name()
    };
    Error::invalid(
        "output",
        format_args!("memory that is shared with {with}"),
        "memory of its own",
    )
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
