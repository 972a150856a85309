//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};

use ascend_spec::fia::Version;
use ascend_spec::{DType, TensorDesc};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::{Context, Stream, lock};
use crate::tensor::{AnyTensor, Tensor};

use super::arguments::Arguments;
use super::call::OwnedCall;
use super::descriptor::{Descriptors, Executor};
use super::operator;
use super::parameter::{Parameter, Slot};
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
    context: Arc<Context>,
    version: Version,
    call: OwnedCall,
    /// Tensors that stay the same for all launches, such as the mask.
    kept: Vec<(Parameter, AnyTensor)>,
    /// Number of tensors that each launch is given.
    given: usize,
    workspace_bytes: usize,
    prepared: Mutex<Prepared>,
}

/// The executor, and the addresses that it has now.
struct Prepared {
    executor: Executor,
    tensors: Vec<(Parameter, usize)>,
    key: Vec<usize>,
    value: Vec<usize>,
}

/// The tensors of one launch.
pub(super) trait Bindings {
    /// Calls `visit` with each, until it fails.
    fn each(&self, visit: &mut dyn FnMut(Slot, &AnyTensor) -> Result<()>) -> Result<()>;
}

impl Plan {
    /// Checks and prepares a call. `kept` says which of its tensors stay the same for all launches.
    pub(super) fn new(
        context: &Arc<Context>,
        arguments: &Arguments,
        kept: impl Fn(Parameter) -> bool,
    ) -> Result<Self> {
        arguments.each(&mut |slot, tensor| tensor.on(slot.name(), context))?;
        let mut call = arguments.call.clone();
        call.imply_outputs();
        let allowed: Vec<&str> = arguments.allowed.iter().map(String::as_str).collect();
        let soc = context.soc()?;
        let version = operator::choose(context.runtime().api(), soc, &call.borrow(), &allowed)?;

        context.bind()?;
        // Outputs have no memory yet: the query's address stands for theirs until a launch replaces it.
        let stand_in = arguments
            .get(Parameter::Query)
            .map_or(ptr::null_mut(), |query| query.as_raw());
        let address = |slot: Slot| -> *mut c_void {
            let tensor = match slot {
                Slot::One(parameter) => arguments.get(parameter),
                Slot::Key(index) => arguments.key.get(index),
                Slot::Value(index) => arguments.value.get(index),
            };
            match (tensor, call.get(slot)) {
                (Some(tensor), _) => tensor.as_raw(),
                (None, Some(desc)) if desc.is_empty() => ptr::null_mut(),
                (None, _) => stand_in,
            }
        };
        let descriptors = Descriptors::new(context, &call, address)?;
        let (executor, bytes) = operator::prepare(context, version, &call, descriptors)?;
        let workspace_bytes = usize::try_from(bytes)
            .map_err(|_| Error::invalid("workspace", bytes, "bytes that can be addressed"))?;
        let kept: Vec<_> = arguments
            .tensors
            .iter()
            .filter(|(parameter, _)| kept(*parameter))
            .cloned()
            .collect();
        let at = |slot| address(slot).addr();
        let prepared = Prepared {
            executor,
            tensors: call
                .parameters()
                .map(|parameter| (parameter, at(Slot::One(parameter))))
                .collect(),
            key: (0..call.key.len())
                .map(|index| at(Slot::Key(index)))
                .collect(),
            value: (0..call.value.len())
                .map(|index| at(Slot::Value(index)))
                .collect(),
        };
        let tensors = prepared.tensors.len() + prepared.key.len() + prepared.value.len();
        Ok(Self {
            context: Arc::clone(context),
            version,
            given: tensors.saturating_sub(kept.len()),
            call,
            kept,
            workspace_bytes,
            prepared: Mutex::new(prepared),
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn desc(&self, parameter: Parameter) -> Option<TensorDesc> {
        self.call.get(Slot::One(parameter)).copied()
    }

    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.version.symbol()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
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
            desc.map(|desc| AnyTensor::empty(&self.context, desc))
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
        K: TensorList<T> + ?Sized,
        V: TensorList<T> + ?Sized,
    {
        let mut output = self.output()?;
        self.launch_into(stream, query, key, value, &mut output)?;
        Ok(output)
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
        K: TensorList<T> + ?Sized,
        V: TensorList<T> + ?Sized,
    {
        self.run(
            stream,
            &Typed {
                query,
                key,
                value,
                output,
            },
        )
    }

    /// Checks the tensors of a launch and queues it.
    pub(super) fn run(&self, stream: &Stream, bindings: &dyn Bindings) -> Result<()> {
        if !stream.context().is(&self.context) {
            return Err(Error::invalid(
                "stream",
                format_args!("a stream of device {}", stream.device().id()),
                format_args!("one of device {}, as the plan", self.context.id()),
            ));
        }
        self.check(bindings)?;
        let api = self.context.bind()?;
        let workspace = match self.workspace_bytes {
            0 => None,
            bytes => Some(stream.workspace(bytes)?),
        };
        let mut prepared = lock(&self.prepared);
        bindings.each(&mut |slot, tensor| prepared.point(slot, tensor.as_raw()))?;
        let address = workspace
            .as_ref()
            .map_or(ptr::null_mut(), |memory| memory.address());
        let bytes = self.workspace_bytes as u64;
        // SAFETY: the tensors are laid out as planned, as checked; they and the workspace are marked below, which keeps
        // their memory until the stream has passed the launch, and borrowed until then.
        let outcome = unsafe {
            operator::launch(
                api,
                self.version,
                &prepared.executor,
                address,
                bytes,
                stream.as_raw(),
            )
        };
        // Also after a failure: part of the work may have been queued.
        let number = stream.timeline().advance();
        drop(prepared);
        let mark = |tensor: &AnyTensor| tensor.memory().uses().mark(stream.timeline(), number);
        let marked = bindings.each(&mut |_, tensor| {
            mark(tensor);
            Ok(())
        });
        for (_, tensor) in &self.kept {
            mark(tensor);
        }
        if let Some(workspace) = &workspace {
            workspace.uses().mark(stream.timeline(), number);
        }
        outcome.and(marked)
    }

    /// Refuses tensors that are not as planned, and outputs that share memory with another tensor.
    fn check(&self, bindings: &dyn Bindings) -> Result<()> {
        let mut given = 0usize;
        let mut attention_out = 0..0;
        let mut softmax_lse = 0..0;
        bindings.each(&mut |slot, tensor| {
            given += 1;
            tensor.on(slot.name(), &self.context)?;
            match slot {
                Slot::One(Parameter::AttentionOut) => attention_out = tensor.addresses(),
                Slot::One(Parameter::SoftmaxLse) => softmax_lse = tensor.addresses(),
                _ => {}
            }
            let kept = |parameter| self.kept.iter().any(|(known, _)| *known == parameter);
            let planned = match slot {
                Slot::One(parameter) if kept(parameter) => None,
                _ => self.call.get(slot),
            };
            match planned {
                Some(planned) if planned == tensor.desc() => Ok(()),
                Some(planned) => Err(not_as_planned(slot, tensor.desc(), planned)),
                None => Err(not_as_planned(slot, tensor.desc(), "no such tensor")),
            }
        })?;
        if given != self.given {
            return Err(Error::NotAsPlanned {
                argument: "tensors",
                given: format!("{given} of them"),
                planned: format!("{}, key and value lists counted by element", self.given),
            });
        }
        let overlap = |slot: Slot, tensor: &AnyTensor| {
            let at = tensor.addresses();
            let apart = |out: &Range<usize>| {
                out.is_empty() || at.is_empty() || out.end <= at.start || at.end <= out.start
            };
            let shared = match slot {
                Slot::One(Parameter::AttentionOut) => !apart(&softmax_lse),
                Slot::One(Parameter::SoftmaxLse) => !apart(&attention_out),
                _ => !apart(&attention_out) || !apart(&softmax_lse),
            };
            if !shared {
                return Ok(());
            }
            let with = if slot.is_output() {
                "another output"
            } else {
                slot.name()
            };
            Err(Error::invalid(
                "output",
                format_args!("memory that is shared with {with}"),
                "memory of its own",
            ))
        };
        bindings.each(&mut |slot, tensor| overlap(slot, tensor))?;
        self.kept
            .iter()
            .try_for_each(|(parameter, tensor)| overlap(Slot::One(*parameter), tensor))
    }
}

impl Prepared {
    /// Sees to it that the executor has a tensor's address.
    fn point(&mut self, slot: Slot, at: *mut c_void) -> Result<()> {
        let now = match slot {
            Slot::One(parameter) => {
                let known = self
                    .tensors
                    .iter_mut()
                    .find(|(known, _)| *known == parameter);
                known.map(|(_, now)| now)
            }
            Slot::Key(index) => self.key.get_mut(index),
            Slot::Value(index) => self.value.get_mut(index),
        };
        let Some(now) = now else {
            return Ok(());
        };
        if *now != at.addr() {
            self.executor.set_address(slot, at)?;
            *now = at.addr();
        }
        Ok(())
    }
}

#[cold]
fn not_as_planned(slot: Slot, given: &TensorDesc, planned: impl fmt::Display) -> Error {
    Error::NotAsPlanned {
        argument: slot.name(),
        given: given.to_string(),
        planned: planned.to_string(),
    }
}

/// The tensors of a typed launch.
struct Typed<'a, T: Element, K: ?Sized, V: ?Sized> {
    query: &'a Tensor<T>,
    key: &'a K,
    value: &'a V,
    output: &'a Output<T>,
}

impl<T, K, V> Bindings for Typed<'_, T, K, V>
where
    T: Element,
    K: TensorList<T> + ?Sized,
    V: TensorList<T> + ?Sized,
{
    fn each(&self, visit: &mut dyn FnMut(Slot, &AnyTensor) -> Result<()>) -> Result<()> {
        visit(Slot::One(Parameter::Query), self.query)?;
        for index in 0..self.key.count() {
            if let Some(tensor) = self.key.tensor(index) {
                visit(Slot::Key(index), tensor)?;
            }
        }
        for index in 0..self.value.count() {
            if let Some(tensor) = self.value.tensor(index) {
                visit(Slot::Value(index), tensor)?;
            }
        }
        visit(Slot::One(Parameter::AttentionOut), &self.output.attention)?;
        match &self.output.softmax_lse {
            Some(lse) => visit(Slot::One(Parameter::SoftmaxLse), lse),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lse: Option<DType> = self.desc(Parameter::SoftmaxLse).map(|desc| desc.dtype);
        f.debug_struct("Plan")
            .field("operator", &self.operator())
            .field("input_layout", &self.call.input_layout)
            .field("softmax_lse", &lse.is_some())
            .field("workspace_bytes", &self.workspace_bytes)
            .finish_non_exhaustive()
    }
}
