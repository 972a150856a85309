//! Every argument of the operator, by name.

use ascend_spec::Cann;
use ascend_spec::ops::fused_infer_attention_score::{self as fia, Argument, ContentBounds, Parameter};

use crate::error::{Error, Result};
use crate::operator::Tensors;
use crate::runtime::{Device, Stream};
use crate::tensor::AnyTensor;

use super::contents::{GivenContents, Reading};
use super::inputs::{Bindings, Features};
use super::plan::{Plan, imply_outputs};
use super::soft_cap::CallCap;
use super::versions::Allowed;

/// A call of FusedInferAttentionScore with its tensors: every argument that any version of the operator has, by its
/// name, right or wrong. For tools that replay calls; programs use [`FusedInferAttention`](super::FusedInferAttention).
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    given: fia::Arguments<AnyTensor>,
    allowed: Allowed,
}

impl Arguments {
    /// A call with these arguments. `FiaCall::attributes` gives those of a [`FiaCall`](fia::FiaCall) without its
    /// tensors.
    pub fn new(arguments: fia::Arguments<AnyTensor>) -> Self {
        Self { given: arguments, allowed: Allowed::default() }
    }

    /// Sets the tensor of a parameter, or adds one to a list (`key`, `value`). A parameter that is no tensor stays as
    /// it is.
    pub fn set(&mut self, parameter: Parameter, tensor: impl Into<AnyTensor>) -> &mut Self {
        self.given.set_tensor(parameter, tensor.into());
        self
    }

    /// Lets a call through that breaks a lint, as
    /// [`FusedInferAttention::allow_lint`](super::FusedInferAttention::allow_lint) does.
    pub fn allow_lint(&mut self, id: impl Into<String>) -> &mut Self {
        self.allowed.lint(id);
        self
    }

    /// Lets a call through that breaks any lint.
    ///
    /// # Safety
    /// As for [`FusedInferAttention::allow_overrun`](super::FusedInferAttention::allow_overrun).
    pub unsafe fn allow_overrun(&mut self, id: impl Into<String>) -> &mut Self {
        // SAFETY: handed on to the caller.
        unsafe { self.allowed.overrun(id) };
        self
    }

    /// Requires that every release from `release` on takes the call alike, as
    /// [`FusedInferAttention::portable_since`](super::FusedInferAttention::portable_since) does.
    pub fn portable_since(&mut self, release: Cann) -> &mut Self {
        self.allowed.portable_since(release);
        self
    }

    /// The tensor of a parameter, of a list the first one.
    pub fn get(&self, parameter: Parameter) -> Option<&AnyTensor> {
        self.given.tensor(parameter)
    }

    /// Checks the call and prepares it. Outputs that are not set have the shapes that follow from the inputs.
    ///
    /// # Errors
    /// As for [`FusedInferAttention::plan`](super::FusedInferAttention::plan).
    #[doc(alias = "aclnnFusedInferAttentionScoreGetWorkspaceSize")]
    pub fn plan(&self, device: &Device) -> Result<Plan> {
        let descs = self.given.map(|_, tensor| *tensor.desc());
        let mut call = descs.call();
        imply_outputs(&mut call);
        let call = (&call, CallCap::default());
        Plan::checked(device.context(), call, &self.allowed, None, self, Reading::Planned)
    }

    /// Launches a plan with these tensors, all of which replace those that the plan was made with. The outputs have
    /// to be set.
    ///
    /// A block table and sizes of left padding are positions in other tensors: the launch waits for the stream,
    /// checks them on the host, and reads copies that nothing can change any more.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`]; [`Error::Violation`] by `block_table.range`, `block_table.row_short` or
    /// `padding_size.range`.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    pub fn launch(&self, plan: &Plan, stream: &Stream) -> Result<()> {
        let copies = self.checked_contents(plan, stream)?;
        plan.run(stream, &Replay { arguments: self, copies })
    }

    /// Copies of the tensors that are positions in others, checked.
    fn checked_contents(&self, plan: &Plan, stream: &Stream) -> Result<Vec<(Parameter, AnyTensor)>> {
        let mut copies = Vec::new();
        let Some(bounds) = plan.content_bounds() else {
            return Ok(copies);
        };
        for parameter in ContentBounds::PARAMETERS {
            let Some(tensor) = self.get(parameter) else {
                continue;
            };
            if !ContentBounds::reads(tensor.dtype(), tensor.shape()) {
                // Allowing a tensor of another type or shape was unsafe.
                continue;
            }
            if !tensor.is_contiguous() {
                return Err(Error::invalid(parameter.name(), tensor.desc(), "a contiguous tensor")
                    .fix("copy it with `contiguous`"));
            }
            let bytes = tensor.download_bytes(stream)?;
            bounds.admits_content(parameter, (tensor.dtype(), tensor.shape()), &bytes)?;
            let copy = stream.upload_desc(&bytes, *tensor.desc())?;
            copy.freeze();
            copies.push((parameter, copy));
        }
        Ok(copies)
    }

    /// Sets new output tensors, of the shapes and dtypes that a plan has.
    ///
    /// # Errors
    /// As for [`Device::alloc`].
    pub fn set_outputs(&mut self, plan: &Plan) -> Result<()> {
        for parameter in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
            if let Some(desc) = plan.desc(parameter) {
                let tensor = AnyTensor::empty(plan.context(), desc)?;
                self.set(parameter, tensor);
            }
        }
        Ok(())
    }
}

/// A launch with some of the tensors replaced.
struct Replay<'a> {
    arguments: &'a Arguments,
    copies: Vec<(Parameter, AnyTensor)>,
}

impl Tensors<Parameter> for Replay<'_> {
    fn each<'b>(&'b self, mut visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>) -> Result<()> {
        self.arguments.each(|argument, tensor| {
            let mut copies = self.copies.iter();
            let copy = copies.find(|(parameter, _)| argument.parameter == *parameter);
            visit(argument, copy.map_or(tensor, |(_, copy)| copy))
        })
    }
}

impl Bindings for Replay<'_> {
    fn features(&self) -> Option<Features> {
        None
    }

    fn contents(&self) -> GivenContents<'_> {
        GivenContents::default()
    }
}

impl Tensors<Parameter> for Arguments {
    fn each<'b>(&'b self, mut visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>) -> Result<()> {
        for outputs in [true, false] {
            let all = self.given.each_tensor();
            for (argument, tensor) in all.filter(|(argument, _)| argument.is_output() == outputs) {
                visit(argument, tensor)?;
            }
        }
        Ok(())
    }
}

impl Bindings for Arguments {
    fn features(&self) -> Option<Features> {
        None
    }

    fn contents(&self) -> GivenContents<'_> {
        GivenContents::default()
    }
}
