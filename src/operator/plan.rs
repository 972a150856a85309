//! A call that was prepared once, to be launched again and again with other tensors of the same shapes.

use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};

use ascend_spec::TensorDesc;
use ascend_sys::Api;
use ascend_sys::bindings::{self as sys, aclOpExecutor};
use smallvec::SmallVec;

use crate::error::{Error, Result, aclnn_error};
use crate::memory::overlap;
use crate::runtime::{Context, Queue, lock};
use crate::tensor::AnyTensor;

use super::executor::Executor;
use super::phases::PhaseTwo;
use super::{Addressed, Argument, Descriptors, Phases, Tensors};

/// A call that was checked and prepared. `A` names its tensors.
///
/// Launches of one plan from several threads take turns; they may go to different queues.
pub(crate) struct Plan<A> {
    context: Arc<Context>,
    function: &'static str,
    phase_two: PhaseTwo,
    /// What each launch brings, outputs first.
    planned: Vec<Planned<A>>,
    /// What stays the same for all launches, and its addresses.
    fixed: Option<(A, AnyTensor, Range<usize>)>,
    workspace_bytes: usize,
    state: Mutex<State<A>>,
}

/// A tensor that each launch brings.
struct Planned<A> {
    argument: A,
    desc: TensorDesc,
    /// From its address on.
    bytes: usize,
}

/// The executor, and the addresses that it has now, in the order of [`Plan::planned`]. After a failure they are unknown.
struct State<A> {
    executor: Executor<A>,
    addresses: Vec<Option<usize>>,
}

/// What phase one returns.
pub(crate) struct PhaseOne {
    pub(crate) workspace_bytes: u64,
    pub(crate) executor: *mut aclOpExecutor,
}

/// The tensors of a launch that are as planned, and where it goes.
#[must_use = "nothing is launched until queued"]
pub(crate) struct Checked<'l, A, Q, T> {
    plan: &'l Plan<A>,
    queue: &'l Q,
    tensors: &'l T,
}

impl<A: Argument> Plan<A> {
    /// Prepares a call that the contract has accepted, with these tensors, outputs first, and one that stays the same for all
    /// launches. Addresses stand in until a launch replaces them.
    ///
    /// # Safety
    /// `phase_one` calls the operator's function of that name with what the descriptors give, and returns the executor that
    /// came of it, or null.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        phases: &Phases,
        tensors: &[Addressed<A>],
        fixed: Option<(A, &AnyTensor)>,
        phase_one: impl FnOnce(&Api, &mut Descriptors<A>) -> Result<PhaseOne>,
    ) -> Result<Self> {
        let api = context.bind()?;
        let phase_two = (phases.two)(api)?;
        let mut given: SmallVec<[Addressed<A>; 12]> = SmallVec::from_slice(tensors);
        given.extend(fixed.map(|(argument, tensor)| Addressed {
            argument,
            desc: *tensor.desc(),
            address: tensor.as_raw(),
        }));
        let mut descriptors = Descriptors::new(context, &given)?;
        let PhaseOne {
            workspace_bytes,
            executor,
        } = phase_one(api, &mut descriptors)?;
        // SAFETY: the caller made the executor of these descriptors.
        let executor = unsafe { Executor::new(context, phases.name, executor, descriptors) }?;
        let planned = tensors.iter().map(|tensor| Planned {
            argument: tensor.argument,
            desc: tensor.desc,
            bytes: reach(&tensor.desc),
        });
        let addresses = tensors.iter().map(|tensor| Some(tensor.address.addr()));
        let addressed = usize::try_from(workspace_bytes);
        Ok(Self {
            context: Arc::clone(context),
            function: phases.name,
            phase_two,
            planned: planned.collect(),
            fixed: fixed.map(|(argument, tensor)| (argument, tensor.clone(), tensor.addresses())),
            workspace_bytes: addressed.map_err(|_| {
                Error::invalid("workspace", workspace_bytes, "bytes that can be addressed")
            })?,
            state: Mutex::new(State {
                executor,
                addresses: addresses.collect(),
            }),
        })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Name of the function that launches call.
    pub(crate) fn function(&self) -> &'static str {
        self.function
    }

    /// Scratch memory that each launch needs.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// The tensor that stays the same for all launches.
    pub(crate) fn fixed(&self) -> Option<&AnyTensor> {
        self.fixed.as_ref().map(|(_, tensor, _)| tensor)
    }

    /// How a tensor that launches bring is laid out.
    pub(crate) fn desc(&self, argument: A) -> Option<TensorDesc> {
        let mut planned = self.planned.iter();
        let planned = planned.find(|planned| planned.argument == argument);
        planned.map(|planned| planned.desc)
    }

    /// Place of a tensor among the planned ones: mostly the one where it stands in a launch.
    #[inline]
    fn position(&self, at: usize, argument: A) -> Option<usize> {
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
    pub(crate) fn check<'l, Q: Queue, T: Tensors<A>>(
        &'l self,
        queue: &'l Q,
        tensors: &'l T,
    ) -> Result<Checked<'l, A, Q, T>> {
        self.context.admits("stream", queue.context())?;
        let mut given = 0usize;
        let mut written: SmallVec<[(A, Range<usize>); 2]> = SmallVec::new();
        tensors.each(|argument, tensor| {
            let index = self.position(given, argument);
            given += 1;
            tensor.on(argument.name(), &self.context)?;
            let Some(planned) = index.and_then(|index| self.planned.get(index)) else {
                return Err(not_as_planned(argument, tensor.desc(), "no such tensor"));
            };
            if planned.desc != *tensor.desc() {
                return Err(not_as_planned(argument, tensor.desc(), planned.desc));
            }
            let start = tensor.as_raw().addr();
            let at = start..start.saturating_add(planned.bytes);
            if argument.output().is_some() {
                tensor.memory().writable(argument.name())?;
                apart(&written, argument, &at)?;
                written.push((argument, at));
                return Ok(());
            }
            apart(&written, argument, &at)
        })?;
        if given != self.planned.len() {
            return Err(self.missing(tensors));
        }
        if let Some((argument, _, at)) = &self.fixed {
            apart(&written, *argument, at)?;
        }
        Ok(Checked {
            plan: self,
            queue,
            tensors,
        })
    }

    /// The error for a launch without a tensor that was planned.
    #[cold]
    fn missing(&self, tensors: &impl Tensors<A>) -> Error {
        let mut given = Vec::new();
        // Collecting does not fail.
        let _ = tensors.each(|argument, _| {
            given.push(argument);
            Ok(())
        });
        let mut planned = self.planned.iter();
        match planned.find(|planned| !given.contains(&planned.argument)) {
            Some(planned) => not_as_planned(planned.argument, "no tensor", planned.desc),
            None => Error::NotAsPlanned {
                argument: "tensors",
                given: format!("{} of them", given.len()),
                planned: self.planned.len().to_string(),
            },
        }
    }
}

impl<A: Argument, Q: Queue, T: Tensors<A>> Checked<'_, A, Q, T> {
    /// Queues the launch. Allocates no host memory from the second launch on a stream on.
    #[inline]
    pub(crate) fn launch(self) -> Result<()> {
        let Self {
            plan,
            queue,
            tensors,
        } = self;
        let api = plan.context.bind()?;
        let stream = queue.raw()?;
        let workspace = match plan.workspace_bytes {
            0 => None,
            bytes => Some(queue.workspace(bytes)?),
        };
        let scratch = workspace
            .as_ref()
            .map_or(ptr::null_mut(), |memory| memory.address());
        let bytes = plan.workspace_bytes as u64;
        let mut state = lock(&plan.state);
        let mut at = 0;
        tensors.each(|argument, tensor| {
            let index = plan.position(at, argument);
            at += 1;
            state.point(api, index, argument, tensor)
        })?;
        let executor = state.executor.as_ptr();
        // SAFETY: the executor is repeatable; the tensors are laid out as planned, as checked; they and the workspace are
        // kept for as long as the launch may use them, and borrowed until then.
        let outcome = match unsafe { (plan.phase_two)(scratch, bytes, executor, stream) } {
            sys::ACLNN_SUCCESS => Ok(()),
            failed => Err(aclnn_error(api, plan.function, failed)),
        };
        // Also after a failure: part of the work may have been queued.
        let number = queue.queued();
        drop(state);
        let kept = tensors.each(|_, tensor| {
            queue.keep(number, tensor.memory());
            Ok(())
        });
        if let Some((_, tensor, _)) = &plan.fixed {
            queue.keep(number, tensor.memory());
        }
        if let Some(workspace) = &workspace {
            queue.keep(number, workspace);
        }
        outcome.and(kept)
    }
}

impl<A: Argument> State<A> {
    /// Sees to it that the executor has a tensor's address.
    #[inline]
    fn point(
        &mut self,
        api: &Api,
        index: Option<usize>,
        argument: A,
        tensor: &AnyTensor,
    ) -> Result<()> {
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

/// Bytes from a tensor's address to the end of its last element.
pub(crate) fn reach(desc: &TensorDesc) -> usize {
    let bytes = desc.byte_range().unwrap_or(0..0);
    usize::try_from(bytes.end).unwrap_or(usize::MAX)
}

/// Refuses a tensor that shares memory with an output.
#[inline]
fn apart<A: Argument>(outputs: &[(A, Range<usize>)], argument: A, at: &Range<usize>) -> Result<()> {
    match outputs.iter().find(|(_, output)| overlap(output, at)) {
        Some((output, _)) => Err(output.shares_memory(argument)),
        None => Ok(()),
    }
}

#[cold]
fn not_as_planned<A: Argument>(argument: A, given: impl ToString, planned: impl ToString) -> Error {
    Error::NotAsPlanned {
        argument: argument.name(),
        given: given.to_string(),
        planned: planned.to_string(),
    }
}
