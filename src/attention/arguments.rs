//! Every argument of the operator, by name.

use ascend_spec::fia::{FiaCall, Operand, Parameter};

use crate::error::Result;
use crate::runtime::{Device, Stream};
use crate::tensor::AnyTensor;

use super::call::OwnedCall;
use super::inputs::Features;
use super::plan::{Bindings, Plan, imply_outputs};

/// A call of FusedInferAttentionScore with its tensors: every argument that any version of the operator has, by its
/// name, right or wrong. For tools that replay calls; programs use [`FusedInferAttention`](super::FusedInferAttention).
#[derive(Clone, Debug)]
pub struct Arguments {
    call: OwnedCall,
    tensors: Vec<(Parameter, AnyTensor)>,
    key: Vec<AnyTensor>,
    value: Vec<AnyTensor>,
    allowed: Vec<String>,
}

impl Arguments {
    /// The attributes and length arrays of a call. Its tensor descriptions are left out: they come with the tensors.
    pub fn new(attributes: &FiaCall<'_>) -> Self {
        Self {
            call: OwnedCall::attributes_of(attributes),
            tensors: Vec::new(),
            key: Vec::new(),
            value: Vec::new(),
            allowed: Vec::new(),
        }
    }

    /// Gives a tensor, or another one than before.
    pub fn set(&mut self, parameter: Parameter, tensor: impl Into<AnyTensor>) -> &mut Self {
        let tensor = tensor.into();
        *parameter.of_mut(self.call.plain_mut()) = Some(*tensor.desc());
        self.tensors.retain(|(known, _)| *known != parameter);
        self.tensors.push((parameter, tensor));
        self
    }

    /// Adds a tensor to the key list.
    pub fn push_key(&mut self, tensor: impl Into<AnyTensor>) -> &mut Self {
        let tensor = tensor.into();
        self.call.key.push(*tensor.desc());
        self.key.push(tensor);
        self
    }

    /// Adds a tensor to the value list.
    pub fn push_value(&mut self, tensor: impl Into<AnyTensor>) -> &mut Self {
        let tensor = tensor.into();
        self.call.value.push(*tensor.desc());
        self.value.push(tensor);
        self
    }

    /// Lets a call through that breaks a lint: the operator takes it and ignores, misreads or overruns something.
    pub fn allow_lint(&mut self, id: impl Into<String>) -> &mut Self {
        self.allowed.push(id.into());
        self
    }

    /// A tensor given before.
    pub fn get(&self, parameter: Parameter) -> Option<&AnyTensor> {
        let given = self.tensors.iter().find(|(known, _)| *known == parameter);
        given.map(|(_, tensor)| tensor)
    }

    /// Checks the call and prepares it. Outputs that are not given are taken as their shapes follow from the inputs.
    ///
    /// # Errors
    /// As for [`FusedInferAttention::plan`](super::FusedInferAttention::plan).
    #[doc(alias = "aclnnFusedInferAttentionScoreGetWorkspaceSize")]
    pub fn plan(&self, device: &Device) -> Result<Plan> {
        let mut call = self.call.borrow();
        imply_outputs(&mut call);
        Plan::new(device.context(), &call, &self.allowed, None, self)
    }

    /// Launches a plan with these tensors, all of which replace those that the plan was made with. The outputs have to
    /// be given.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`].
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    pub fn launch(&self, plan: &Plan, stream: &Stream) -> Result<()> {
        plan.run(stream, self)
    }

    /// Gives new output tensors, of the shapes and dtypes that a plan has.
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

impl Bindings for Arguments {
    fn each<'b>(
        &'b self,
        mut visit: impl FnMut(Operand, &'b AnyTensor) -> Result<()>,
    ) -> Result<()> {
        for outputs in [true, false] {
            for (parameter, tensor) in &self.tensors {
                if parameter.is_output() == outputs {
                    visit((*parameter).into(), tensor)?;
                }
            }
        }
        for (index, tensor) in self.key.iter().enumerate() {
            visit(Operand::Key(index), tensor)?;
        }
        for (index, tensor) in self.value.iter().enumerate() {
            visit(Operand::Value(index), tensor)?;
        }
        Ok(())
    }

    fn features(&self) -> Option<Features> {
        None
    }
}
