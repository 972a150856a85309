//! A call of a declared operator on a device, to be written to a file.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ascend_spec::declared::{AnyArgument, AnyArguments};
use ascend_spec::operator::{DeclaredParameter, Kind};
use ascend_spec::{Cann, TensorDesc};

use super::content::{Content, Labels, bytes_of, text};
use super::{Recorded, too_large};
use crate::case_file::{Case, ParameterCase, Tolerance, is_input};
use crate::error::Result;
use crate::operator::Tensors;
use crate::runtime::{Context, Stream, capturing};
use crate::tensor::AnyTensor;

/// Longest wait for work on other streams that uses the inputs; after it they are not recorded.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call and its tensors.
#[derive(Clone, Debug)]
pub(crate) struct LiveCall {
    context: Arc<Context>,
    /// The version that the call goes to or, before one is chosen, the oldest that it may go to.
    version: u8,
    portable_since: Option<Cann>,
    arguments: AnyArguments<LiveTensor>,
}

/// A tensor of the call.
#[derive(Clone, Debug)]
struct LiveTensor {
    desc: TensorDesc,
    /// Its memory, which an output may not have yet.
    memory: Option<AnyTensor>,
    /// What a tensor that is updated in place held before the launch, if that was copied.
    before: Option<Vec<u8>>,
}

impl LiveTensor {
    /// Reads a part of the tensor's memory.
    fn read(&self, argument: AnyArgument, start: usize, to: &mut [u8]) -> Result<(), String> {
        match &self.memory {
            Some(memory) => memory.read_part(start, to).map_err(text),
            None => Err(format!("{} has no memory", argument.parameter.name)),
        }
    }
}

impl LiveCall {
    /// A call with the attributes of `call` and these tensors, of which `fixed` stay the same for all launches. Outputs
    /// that are not among them are as `call` describes them.
    pub(crate) fn new<'t, P: DeclaredParameter>(
        context: &Arc<Context>,
        call: &AnyArguments<TensorDesc>,
        at_least: u8,
        tensors: &impl Tensors<P>,
        fixed: impl IntoIterator<Item = (P, &'t AnyTensor)>,
    ) -> Self {
        let version = (context.target()).map_or(at_least, |target| call.chosen_on(at_least, target));
        let mut arguments: AnyArguments<LiveTensor> = call.attributes();
        let mut set = |name: &str, desc: TensorDesc, memory: Option<&AnyTensor>| {
            let tensor = LiveTensor { desc, memory: memory.cloned(), before: None };
            // This cannot fail: the parameter is the operator's own.
            let _ = arguments.set_tensor(name, tensor);
        };
        let outputs = (call.each_tensor()).filter(|(argument, _)| argument.parameter.kind.is_output());
        for (output, desc) in outputs {
            set(output.parameter.name, *desc, None);
        }
        // Collecting does not fail.
        let _ = tensors.each(|argument, tensor| {
            set(argument.name(), *tensor.desc(), Some(tensor));
            Ok(())
        });
        for (parameter, tensor) in fixed {
            set(parameter.info().name, *tensor.desc(), Some(tensor));
        }
        Self { context: Arc::clone(context), version, portable_since: None, arguments }
    }

    /// The call, which every release from this one on has to take.
    pub(crate) fn portable_since(mut self, release: Option<Cann>) -> Self {
        self.portable_since = release;
        self
    }

    /// Copies the tensors of which the call keeps elements, as they are before it is launched on a stream. Tensors that
    /// no case can hold, and those that cannot be read, are not copied.
    ///
    /// # Errors
    /// As for [`Stream::synchronize`], where earlier work is waited for: nothing else would report its faults.
    pub(crate) fn keep_contents(mut self, stream: Option<&Stream>) -> Result<Self> {
        let operator = self.arguments.operator();
        let Some(stream) = stream.filter(|_| operator.keeps_elements()) else {
            return Ok(self);
        };
        let inputs = self.arguments.each_tensor().filter(|(argument, _)| is_input(operator, argument.parameter));
        let inputs = inputs.map(|(_, tensor)| bytes_of(&tensor.desc) as u64);
        let is_large = too_large(inputs.fold(0, u64::saturating_add), u64::MAX).is_some();
        if is_large {
            return Ok(self);
        }
        stream.synchronize()?;
        let copied = self.arguments.try_map(|argument, tensor| {
            let mut tensor = tensor.clone();
            if argument.parameter.kind == Kind::InOut {
                let mut before = vec![0; bytes_of(&tensor.desc)];
                tensor.read(argument, 0, &mut before)?;
                tensor.before = Some(before);
            }
            Ok::<_, String>(tensor)
        });
        if let Ok(copied) = copied {
            self.arguments = copied;
        }
        Ok(self)
    }

    /// Calls `body` with the call and functions that read its tensors.
    fn with_content<R>(&self, body: impl FnOnce(&Content<'_>) -> R) -> R {
        let tensor = |argument: AnyArgument| {
            let tensors = self.arguments.tensors(argument.parameter.name);
            let tensor = tensors.get(argument.index);
            tensor.ok_or_else(|| format!("there is no {}", argument.parameter.name))
        };
        let described: Result<_, std::convert::Infallible> = self.arguments.try_map(|_, tensor| Ok(tensor.desc));
        let Ok(arguments) = described;
        body(&Content {
            soc_name: Some(self.context.soc_name()),
            target: self.context.target().ok(),
            version: self.version,
            portable_since: self.portable_since,
            arguments,
            has_memory: &|output| {
                let output = self.arguments.tensors(output).first();
                output.is_some_and(|output| output.memory.is_some())
            },
            before: &|argument, start, to| {
                let tensor = tensor(argument)?;
                let kept = tensor.before.as_deref();
                let kept = kept.and_then(|bytes| bytes.get(start..)?.get(..to.len()));
                match kept {
                    Some(kept) => to.copy_from_slice(kept),
                    None => tensor.read(argument, start, to)?,
                }
                Ok(())
            },
            after: &|argument, start, to| tensor(argument)?.read(argument, start, to),
        })
    }

    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(&self, labels: &Labels<'_>) -> ParameterCase {
        self.with_content(|content| content.parameters(labels))
    }

    /// Returns the call with its data, or the reason why no case can hold them. Work on the call's stream has to be
    /// over.
    pub(crate) fn case(&self) -> Result<Case, String> {
        self.settle()?;
        self.with_content(|content| content.case(u64::MAX))
    }

    /// Returns the call as [`Content::recorded`] does.
    pub(super) fn recorded(
        &self,
        room: Result<u64, String>,
        labels: &Labels<'_>,
        finish: impl FnOnce(&Content<'_>, &mut Case) -> Result<(), String>,
    ) -> Recorded {
        let room = room.and_then(|room| self.settle().map(|()| room));
        self.with_content(|content| content.recorded(room, labels, finish))
    }

    /// Returns the call with its computed outputs and, as [`Content::recorded`] does, with its data.
    pub(super) fn launched(&self, room: Result<u64, String>, tolerance: Tolerance) -> Recorded {
        let operator = self.arguments.operator();
        let mut tensors = self.arguments.each_tensor();
        let is_lost = |(argument, tensor): (AnyArgument, &LiveTensor)| {
            argument.parameter.kind == Kind::InOut && tensor.before.is_none()
        };
        let room = room.and_then(|room| match operator.keeps_elements() && tensors.any(is_lost) {
            true => Err("what it updates was not copied before".to_owned()),
            false => Ok(room),
        });
        let labels = Labels { name: "recorded", note: "", accepted: Some(true) };
        self.recorded(room, &labels, |content, case| content.expect_outputs(case, tolerance))
    }

    /// Waits until no queued work uses the inputs; refuses to wait while a graph is captured.
    fn settle(&self) -> Result<(), String> {
        capturing::refuse("copying a call's inputs", "record it without a graph").map_err(text)?;
        let until = Instant::now() + PATIENCE;
        let operator = self.arguments.operator();
        for (argument, tensor) in self.arguments.each_tensor() {
            let Some(memory) = &tensor.memory else {
                continue;
            };
            while is_input(operator, argument.parameter) && !memory.memory().is_idle() {
                if Instant::now() > until {
                    let name = argument.parameter.name;
                    return Err(format!("queued work has used {name} for too long"));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}
