//! A call on a device, on its way into a file.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ascend_spec::fia::{Argument, FiaCall, Parameter, Version};
use ascend_spec::{Cann, TensorDesc};

use super::content::Content;
use crate::attention::Bindings;
use crate::case::{Attributes, Case, ParameterCase, Tolerance};
use crate::error::Result;
use crate::runtime::{Context, capturing};
use crate::tensor::AnyTensor;

/// How long work on other streams that uses the inputs may take until these are given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call and its tensors.
#[derive(Clone)]
pub(crate) struct LiveCall {
    context: Arc<Context>,
    /// The version that the call goes to, or where none was chosen yet, the oldest that it may go to.
    version: Version,
    portable_since: Option<Cann>,
    attributes: Attributes,
    inputs: Vec<(Argument, AnyTensor)>,
    /// As described; the memory is missing where there is none yet.
    outputs: Vec<(Parameter, TensorDesc, Option<AnyTensor>)>,
}

impl LiveCall {
    /// A call with these tensors. Outputs that are not among them are as `call` describes them.
    pub(crate) fn new(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        at_least: Version,
    ) -> Self {
        let version = context.target().map_or(at_least, |target| {
            Version::oldest_on(call, at_least, target)
        });
        let mut live = Self {
            context: Arc::clone(context),
            version,
            portable_since: None,
            attributes: Attributes::of(call),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        // Collecting does not fail.
        let _ = bindings.each(|operand, tensor| {
            match operand.parameter {
                output if output.is_output() => {
                    (live.outputs).push((output, *tensor.desc(), Some(tensor.clone())));
                }
                _ => live.inputs.push((operand, tensor.clone())),
            }
            Ok(())
        });
        let mask = mask.map(|mask| (Argument::from(Parameter::AttenMask), mask.clone()));
        live.inputs.extend(mask);
        for output in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
            let given = live.outputs.iter().any(|(known, ..)| *known == output);
            if let (Some(desc), false) = (call.tensor(output), given) {
                live.outputs.push((output, *desc, None));
            }
        }
        live
    }

    /// Notes that every release from this one on was asked to take the call.
    pub(crate) fn portable_since(&mut self, release: Option<Cann>) {
        self.portable_since = release;
    }

    /// Shows the call with a way to its bytes.
    fn with_content<R>(&self, body: impl FnOnce(&Content<'_>) -> R) -> R {
        let tensor = |operand: Argument| {
            let inputs = self.inputs.iter().map(|(of, tensor)| (*of, Some(tensor)));
            let outputs = self.outputs.iter();
            let outputs = outputs.map(|(of, _, tensor)| (Argument::from(*of), tensor.as_ref()));
            let mut all = inputs.chain(outputs);
            all.find(|(of, _)| *of == operand)?.1
        };
        let inputs = self.inputs.iter();
        let outputs = self.outputs.iter();
        body(&Content {
            soc_name: Some(self.context.soc_name()),
            target: self.context.target().ok(),
            version: self.version,
            portable_since: self.portable_since,
            attributes: &self.attributes,
            inputs: inputs
                .map(|(operand, tensor)| (*operand, *tensor.desc()))
                .collect(),
            outputs: outputs
                .map(|(output, desc, tensor)| (*output, *desc, tensor.is_some()))
                .collect(),
            read: &|operand, start, to| match tensor(operand) {
                Some(tensor) => tensor
                    .read_part(start, to)
                    .map_err(|error| error.to_string()),
                None => Err(format!("{} has no memory", operand.name())),
            },
        })
    }

    /// Shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        self.with_content(|content| content.parameters(id, accepted, about))
    }

    /// The call with its data, or why no case can have them. Work on the stream that it is launched on has to be over.
    pub(super) fn case(&self) -> Result<Case, String> {
        self.case_within(u64::MAX)
    }

    /// The case with its data, and with the current outputs as the expected ones.
    pub(super) fn case_with_outputs(&self, tolerance: Tolerance) -> Result<Case, String> {
        let mut case = self.case()?;
        self.with_content(|content| content.expect_outputs(&mut case, tolerance))?;
        Ok(case)
    }

    /// The case with its data, refused if these exceed `room` bytes.
    pub(super) fn case_within(&self, room: u64) -> Result<Case, String> {
        let refused = capturing::refuse("copying a call's inputs", "record it without a graph");
        refused.map_err(|error| error.to_string())?;
        self.with_content(|content| {
            content.admits()?;
            self.settle()?;
            let parameters = content.parameters("", None, "");
            content.case(room, content.verdict(&parameters.call()))
        })
    }

    /// Waits until no queued work uses the inputs.
    fn settle(&self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        for (operand, tensor) in &self.inputs {
            while !tensor.memory().is_idle() {
                if Instant::now() > until {
                    return Err(format!(
                        "queued work has used {} for too long",
                        operand.name()
                    ));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}
