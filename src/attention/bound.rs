//! The tensors of a launch, kept.

use ascend_spec::fia::Operand;

use crate::error::Result;
use crate::tensor::AnyTensor;

use super::inputs::Features;
use super::plan::Bindings;

/// The tensors of a launch and the attributes that came with them, owned: what refers to a launch that is done later.
#[derive(Debug)]
pub(crate) struct Bound {
    tensors: Vec<(Operand, AnyTensor)>,
    features: Option<Features>,
}

impl Bound {
    pub(crate) fn of(bindings: &impl Bindings) -> Result<Self> {
        let mut tensors = Vec::new();
        bindings.each(|operand, tensor| {
            tensors.push((operand, tensor.clone()));
            Ok(())
        })?;
        Ok(Self {
            tensors,
            features: bindings.features(),
        })
    }
}

impl Bindings for Bound {
    fn each<'b>(
        &'b self,
        mut visit: impl FnMut(Operand, &'b AnyTensor) -> Result<()>,
    ) -> Result<()> {
        let mut tensors = self.tensors.iter();
        tensors.try_for_each(|(operand, tensor)| visit(*operand, tensor))
    }

    fn features(&self) -> Option<Features> {
        self.features
    }
}
