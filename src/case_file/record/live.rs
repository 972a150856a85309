//! A call of FusedInferAttentionScore on a device, to be written to a file.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ascend_spec::ops::fused_infer_attention_score::{Arguments, FiaCall, Parameter, Version};
use ascend_spec::{Cann, TensorDesc};

use super::content::Content;
use crate::case_file::{Case, ParameterCase, Tolerance};
use crate::error::Result;
use crate::operator::Tensors;
use crate::runtime::{Context, capturing};
use crate::tensor::AnyTensor;

/// Longest wait for work on other streams that uses the inputs; after it they are not recorded.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call and its tensors.
#[derive(Clone, Debug)]
pub struct LiveCall {
    context: Arc<Context>,
    /// The version that the call goes to or, before one is chosen, the oldest that it may go to.
    version: Version,
    portable_since: Option<Cann>,
    arguments: Arguments<LiveTensor>,
}

/// A tensor of the call; an output may have no memory yet.
#[derive(Clone, Debug)]
struct LiveTensor {
    desc: TensorDesc,
    memory: Option<AnyTensor>,
}

impl LiveCall {
    /// A call with these tensors. Outputs that are not among them are as `call` describes them.
    pub(crate) fn new(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        mask: Option<&AnyTensor>,
        tensors: &impl Tensors<Parameter>,
        at_least: Version,
    ) -> Self {
        let version = context.target().map_or(at_least, |target| {
            Version::oldest_on(call, at_least, target)
        });
        let mut arguments: Arguments<LiveTensor> = call.attributes();
        let mut set = |parameter, desc, memory| {
            arguments.set_tensor(parameter, LiveTensor { desc, memory });
        };
        for output in [call.attention_out, call.softmax_lse]
            .into_iter()
            .zip([Parameter::AttentionOut, Parameter::SoftmaxLse])
        {
            if let (Some(desc), parameter) = output {
                set(parameter, desc, None);
            }
        }
        let mut given = |parameter, tensor: &AnyTensor| {
            set(parameter, *tensor.desc(), Some(tensor.clone()));
        };
        // Collecting does not fail.
        let _ = tensors.each(|argument, tensor| {
            given(argument.parameter, tensor);
            Ok(())
        });
        if let Some(mask) = mask {
            given(Parameter::AttenMask, mask);
        }
        Self {
            context: Arc::clone(context),
            version,
            portable_since: None,
            arguments,
        }
    }

    /// Notes that every release from this one on has to take the call.
    pub(crate) fn portable_since(&mut self, release: Option<Cann>) {
        self.portable_since = release;
    }

    /// Calls `body` with the call and a function that reads its tensors.
    fn with_content<R>(&self, body: impl FnOnce(&Content<'_>) -> R) -> R {
        body(&Content {
            soc_name: Some(self.context.soc_name()),
            target: self.context.target().ok(),
            version: self.version,
            portable_since: self.portable_since,
            arguments: self.arguments.map(|_, tensor| tensor.desc),
            has_memory: &|output| {
                let output = self.arguments.tensor(output);
                output.is_some_and(|output| output.memory.is_some())
            },
            read: &|argument, start, to| {
                let tensor = self.arguments.tensor(argument);
                match tensor.and_then(|tensor| tensor.memory.as_ref()) {
                    Some(tensor) => tensor
                        .read_part(start, to)
                        .map_err(|error| error.to_string()),
                    None => Err(format!("{} has no memory", argument.name())),
                }
            },
        })
    }

    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        self.with_content(|content| content.parameters(id, accepted, about))
    }

    /// Returns the call with its data, or the reason why no case can hold them. Work on the call's stream has to be
    /// over.
    pub(crate) fn case(&self) -> Result<Case, String> {
        self.case_within(u64::MAX)
    }

    /// Returns the case with its data, and with the current outputs as the expected ones.
    pub(super) fn case_with_outputs(&self, tolerance: Tolerance) -> Result<Case, String> {
        let mut case = self.case()?;
        self.with_content(|content| content.expect_outputs(&mut case, tolerance))?;
        Ok(case)
    }

    /// Returns the case with its data; refuses more than `room` bytes of them.
    pub(super) fn case_within(&self, room: u64) -> Result<Case, String> {
        refuse_in_captures()?;
        self.with_content(|content| {
            content.admits()?;
            self.settle()?;
            content.case(room, content.verdict(&content.arguments.call()))
        })
    }

    /// Waits until no queued work uses the inputs.
    fn settle(&self) -> Result<(), String> {
        let inputs = self.arguments.each_tensor();
        let inputs = inputs.filter(|(argument, _)| !argument.is_output());
        settle(inputs.filter_map(|(argument, tensor)| {
            let memory = tensor.memory.as_ref()?;
            Some((argument.name(), memory))
        }))
    }
}

/// Refuses to copy the data of a call while the thread captures a graph.
pub(super) fn refuse_in_captures() -> Result<(), String> {
    let refused = capturing::refuse("copying a call's inputs", "record it without a graph");
    refused.map_err(|error| error.to_string())
}

/// Waits until no queued work uses these tensors.
pub(super) fn settle<'t>(
    tensors: impl Iterator<Item = (&'static str, &'t AnyTensor)>,
) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    for (name, tensor) in tensors {
        while !tensor.memory().is_idle() {
            if Instant::now() > until {
                return Err(format!("queued work has used {name} for too long"));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}
