//! A call that was prepared once, to be launched again and again with other tensors of the same shapes.

use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};

use ascend_spec::operator::{Argument, DeclaredVersion};
use ascend_spec::{OperatorVersion, TensorDesc};
use ascend_sys::Api;
use ascend_sys::bindings as sys;
use smallvec::SmallVec;

use crate::error::{Error, Result, aclnn_error};
use crate::memory::overlap;
use crate::runtime::{Context, LaunchQueue, lock};
use crate::tensor::AnyTensor;

use super::executor::Executor;
use super::phases::{EntryPoints, PhaseOne, PhaseTwo};
use super::{Addressed, Descriptors, Parameter, Tensors, outputs_first, standing_in};

/// A call that was checked and prepared. `P` are the operator's parameters.
///
/// Launches of one call from several threads take turns; they may go to different queues.
pub(crate) struct PreparedCall<P> {
    context: Arc<Context>,
    version: OperatorVersion,
    /// The tensors that each launch provides, outputs first.
    planned: Vec<PlannedTensor<P>>,
    /// The tensors that stay the same for all launches, with their addresses.
    fixed: SmallVec<[(P, AnyTensor, Range<usize>); 1]>,
    workspace_bytes: usize,
    /// `None` for a call that has no elements to compute: its launches check their tensors and queue nothing.
    work: Option<Work<P>>,
}

/// What computes.
struct Work<P> {
    phase_two: PhaseTwo,
    state: Mutex<State<P>>,
}

/// A tensor that each launch provides.
struct PlannedTensor<P> {
    argument: Argument<P>,
    desc: TensorDesc,
    /// Bytes from the tensor's address to the end of its last element.
    bytes: usize,
}

impl<P> PlannedTensor<P> {
    fn new((argument, desc): (Argument<P>, &TensorDesc)) -> Self {
        Self { argument, desc: *desc, bytes: reach(desc) }
    }

    fn writes(&self) -> bool
    where
        P: Parameter,
    {
        self.argument.is_output()
    }
}

/// The executor, and the addresses that it has now, in the order of [`PreparedCall::planned`]. After a failure they are
/// unknown.
struct State<P> {
    executor: Executor<P>,
    addresses: Vec<Option<usize>>,
}

/// The tensors of a launch that are as planned, and where it goes.
#[must_use = "nothing is launched until queued"]
pub(crate) struct CheckedLaunch<'l, P, Q, T> {
    call: &'l PreparedCall<P>,
    queue: &'l Q,
    tensors: &'l T,
}

impl<P: Parameter> PreparedCall<P> {
    /// Prepares a call that the contract has accepted, with these tensors, outputs first, and those that stay the
    /// same for all launches. The addresses of `tensors` are placeholders until a launch replaces them.
    pub(crate) fn new<C: EntryPoints<Parameter = P>>(
        context: &Arc<Context>,
        call: &C,
        version: C::Version,
        tensors: &[Addressed<P>],
        fixed: &[(P, &AnyTensor)],
    ) -> Result<Self> {
        let phases = C::phases(version);
        let api = context.bind()?;
        let phase_two = (phases.two)(api)?;
        let mut given: SmallVec<[Addressed<P>; 12]> = SmallVec::from_slice(tensors);
        given.extend(fixed.iter().map(|&(parameter, tensor)| Addressed {
            argument: parameter.into(),
            desc: *tensor.desc(),
            address: tensor.as_raw(),
        }));
        let mut descriptors = Descriptors::new(context, &given)?;
        let PhaseOne { workspace_bytes, executor } = call.phase_one(api, version, &mut descriptors)?;
        // SAFETY: phase one has made the executor of these descriptors, by the contract of `EntryPoints`.
        let executor = unsafe { Executor::new(context, phases.name, executor, descriptors) }?;
        let planned_tensor = |tensor: &Addressed<P>| PlannedTensor::new((tensor.argument, &tensor.desc));
        let addresses = tensors.iter().map(|tensor| Some(tensor.address.addr()));
        let addressed = usize::try_from(workspace_bytes);
        Ok(Self {
            context: Arc::clone(context),
            version: version.info(),
            planned: tensors.iter().map(planned_tensor).collect(),
            fixed: fixed.iter().map(|&(parameter, tensor)| (parameter, tensor.clone(), tensor.addresses())).collect(),
            workspace_bytes: addressed.map_err(|_| {
                Error::invalid("workspace", workspace_bytes, "bytes that can be addressed").fix("divide the call")
            })?,
            work: Some(Work { phase_two, state: Mutex::new(State { executor, addresses: addresses.collect() }) }),
        })
    }

    /// Prepares a call that the contract has accepted, with the address of `stand_in` for all tensors but those that
    /// stay the same for all launches. Launches of a call that is idle queue nothing.
    pub(crate) fn standing_in<C: EntryPoints<Parameter = P>>(
        context: &Arc<Context>,
        call: &C,
        version: C::Version,
        is_idle: bool,
        stand_in: &AnyTensor,
        fixed: &[(P, &AnyTensor)],
    ) -> Result<Self> {
        if is_idle {
            return Ok(Self::idle(context, call, version));
        }
        let is_fixed = |argument: Argument<P>| {
            let mut fixed = fixed.iter();
            fixed.any(|(parameter, _)| argument.parameter == *parameter)
        };
        let given = call.each_tensor();
        let tensors = standing_in(given.filter(|(argument, _)| !is_fixed(*argument)), stand_in);
        Self::new(context, call, version, &tensors, fixed)
    }

    /// A call that has no elements to compute.
    pub(crate) fn idle<C: EntryPoints<Parameter = P>>(context: &Arc<Context>, call: &C, version: C::Version) -> Self {
        Self {
            context: Arc::clone(context),
            version: version.info(),
            planned: outputs_first(call.each_tensor()).map(PlannedTensor::new).collect(),
            fixed: SmallVec::new(),
            workspace_bytes: 0,
            work: None,
        }
    }

    /// Whether launches queue nothing.
    pub(crate) fn is_idle(&self) -> bool {
        self.work.is_none()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The version of the operator that launches call.
    pub(crate) fn version(&self) -> OperatorVersion {
        self.version
    }

    /// Scratch memory that each launch needs.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// A tensor that stays the same for all launches.
    pub(crate) fn fixed(&self, parameter: P) -> Option<&AnyTensor> {
        let mut fixed = self.fixed.iter();
        let fixed = fixed.find(|(argument, ..)| *argument == parameter);
        fixed.map(|(_, tensor, _)| tensor)
    }

    /// The tensors that stay the same for all launches.
    pub(crate) fn each_fixed(&self) -> impl Iterator<Item = (P, &AnyTensor)> {
        self.fixed.iter().map(|(argument, tensor, _)| (*argument, tensor))
    }

    /// The descriptor of a tensor that launches provide.
    pub(crate) fn desc(&self, parameter: P) -> Option<TensorDesc> {
        let argument = Argument::from(parameter);
        let mut planned = self.planned.iter();
        let planned = planned.find(|planned| planned.argument == argument);
        planned.map(|planned| planned.desc)
    }

    /// Index of a tensor among the planned ones: mostly `at`, its index among the tensors of the launch.
    #[inline]
    fn position(&self, at: usize, argument: Argument<P>) -> Option<usize> {
        match self.planned.get(at) {
            Some(planned) if planned.argument == argument => Some(at),
            _ => {
                let mut planned = self.planned.iter();
                planned.position(|planned| planned.argument == argument)
            }
        }
    }

    /// Refuses a queue of another device, tensors that are not as planned, and outputs that share memory with another
    /// tensor.
    #[inline]
    pub(crate) fn check<'l, Q: LaunchQueue, T: Tensors<P>>(
        &'l self,
        queue: &'l Q,
        tensors: &'l T,
    ) -> Result<CheckedLaunch<'l, P, Q, T>> {
        self.context.admits("stream", queue.context())?;
        let mut given = 0usize;
        let mut written: SmallVec<[(P, Range<usize>); 4]> = SmallVec::new();
        tensors.each(|argument, tensor| {
            let index = self.position(given, argument);
            given += 1;
            let parameter = argument.parameter;
            tensor.on(parameter.noun(), &self.context)?;
            let Some(planned) = index.and_then(|index| self.planned.get(index)) else {
                return Err(not_as_planned(parameter, tensor.desc(), "a call without it"));
            };
            check_placement(parameter, tensor, &planned.desc)?;
            let start = tensor.as_raw().addr();
            let at = start..start.saturating_add(planned.bytes);
            let writes = parameter.info().output.is_some();
            if writes {
                tensor.memory().writable(parameter.noun())?;
            }
            apart(&written, parameter, &at)?;
            if writes {
                debug_assert_eq!(given, written.len() + 1, "{} comes behind a tensor that is read", parameter.noun());
                written.push((parameter, at));
            }
            Ok(())
        })?;
        if given != self.planned.len() {
            return Err(self.missing(tensors, true));
        }
        for (parameter, _, at) in &self.fixed {
            apart(&written, *parameter, at)?;
        }
        Ok(CheckedLaunch { call: self, queue, tensors })
    }

    /// Refuses inputs of a launch that are not as planned.
    pub(crate) fn check_inputs(&self, inputs: &impl Tensors<P>) -> Result<()> {
        let mut given = 0usize;
        inputs.each(|argument, tensor| {
            given += 1;
            tensor.on(argument.parameter.noun(), &self.context)?;
            match self.planned.iter().find(|planned| planned.argument == argument) {
                Some(planned) => check_placement(argument.parameter, tensor, &planned.desc),
                None => Err(not_as_planned(argument.parameter, tensor.desc(), "a call without it")),
            }
        })?;
        match given == self.planned.iter().filter(|planned| !planned.writes()).count() {
            true => Ok(()),
            false => Err(self.missing(inputs, false)),
        }
    }

    /// The error for a launch without a tensor that was planned, an input or perhaps one of the `outputs`.
    #[cold]
    fn missing(&self, tensors: &impl Tensors<P>, outputs: bool) -> Error {
        let mut given = Vec::new();
        // Collecting does not fail.
        let _ = tensors.each(|argument, _| {
            given.push(argument);
            Ok(())
        });
        let mut lacking = self.planned.iter().filter(|planned| !given.contains(&planned.argument));
        match lacking.find(|planned| outputs || !planned.writes()) {
            Some(planned) => not_as_planned(planned.argument.parameter, "none", planned.desc),
            None => Error::not_as_planned("tensors", format_args!("{} of them", given.len()), self.planned.len()),
        }
    }
}

impl<P: Parameter, Q: LaunchQueue, T: Tensors<P>> CheckedLaunch<'_, P, Q, T> {
    /// Queues the launch. Allocates no host memory from the second launch on a stream on.
    #[inline]
    pub(crate) fn launch(self) -> Result<()> {
        let Self { call, queue, tensors } = self;
        let Some(work) = &call.work else {
            return Ok(());
        };
        let api = call.context.bind()?;
        let stream = queue.raw()?;
        let workspace = match call.workspace_bytes {
            0 => None,
            bytes => Some(queue.workspace(bytes)?),
        };
        let scratch = workspace.as_ref().map_or(ptr::null_mut(), |memory| memory.address());
        let bytes = call.workspace_bytes as u64;
        let mut state = lock(&work.state);
        let mut at = 0;
        tensors.each(|argument, tensor| {
            let index = call.position(at, argument);
            at += 1;
            state.point(api, index, argument, tensor)
        })?;
        let executor = state.executor.as_ptr();
        // SAFETY: the executor is repeatable; the tensors are laid out as planned, as checked; they and the workspace
        // are kept for as long as the launch may use them, and borrowed until then.
        let outcome = match unsafe { (work.phase_two)(scratch, bytes, executor, stream) } {
            sys::ACLNN_SUCCESS => Ok(()),
            failed => Err(aclnn_error(api, call.version.symbol(), failed)),
        };
        // Also after a failure: part of the work may have been queued.
        let number = queue.queued();
        drop(state);
        let kept = tensors.each(|_, tensor| {
            queue.keep(number, tensor.memory());
            Ok(())
        });
        for (_, tensor, _) in &call.fixed {
            queue.keep(number, tensor.memory());
        }
        if let Some(workspace) = &workspace {
            queue.keep(number, workspace);
        }
        outcome.and(kept)
    }
}

impl<P: Parameter> State<P> {
    /// Gives the executor a tensor's address, unless it has that already.
    #[inline]
    fn point(&mut self, api: &Api, index: Option<usize>, argument: Argument<P>, tensor: &AnyTensor) -> Result<()> {
        let Some(now) = index.and_then(|index| self.addresses.get_mut(index)) else {
            return Ok(());
        };
        let at = tensor.as_raw();
        if *now != Some(at.addr()) {
            *now = None;
            self.executor.set_address(api, argument, at)?;
            *now = Some(at.addr());
        }
        Ok(())
    }
}

/// Refuses a tensor whose layout in memory differs from the planned one's.
#[inline]
fn check_placement<P: Parameter>(parameter: P, tensor: &AnyTensor, planned: &TensorDesc) -> Result<()> {
    match planned.lies_as(tensor.desc()) {
        true => Ok(()),
        false => Err(not_as_planned(parameter, tensor.desc(), planned)),
    }
}

/// Bytes from a tensor's address to the end of its last element.
pub(crate) fn reach(desc: &TensorDesc) -> usize {
    let bytes = desc.byte_range().unwrap_or(0..0);
    usize::try_from(bytes.end).unwrap_or(usize::MAX)
}

/// Refuses a tensor that shares memory with an output.
#[inline]
fn apart<P: Parameter>(outputs: &[(P, Range<usize>)], parameter: P, at: &Range<usize>) -> Result<()> {
    match outputs.iter().find(|(_, output)| overlap(output, at)) {
        Some((output, _)) => Err(output.shares_memory(parameter)),
        None => Ok(()),
    }
}

#[cold]
fn not_as_planned<P: Parameter>(parameter: P, given: impl std::fmt::Display, planned: impl std::fmt::Display) -> Error {
    Error::not_as_planned(parameter.noun(), given, planned)
}
