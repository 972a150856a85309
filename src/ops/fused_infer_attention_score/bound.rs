//! The tensors of a launch, kept.

use ascend_spec::ops::fused_infer_attention_score::{Argument, Parameter};

use crate::error::Result;
use crate::operator::Tensors;
use crate::tensor::AnyTensor;

use super::block_table::BlockTable;
use super::contents::GivenContents;
use super::inputs::Features;
use super::padding_size::PaddingSize;
use super::plan::Bindings;

/// The tensors of a launch and the attributes that came with them, owned, for a launch that runs later.
#[derive(Debug)]
pub(crate) struct Bound {
    tensors: Vec<(Argument, AnyTensor)>,
    features: Option<Features>,
    block_table: Option<BlockTable>,
    query_padding: Option<PaddingSize>,
    kv_padding: Option<PaddingSize>,
}

impl Bound {
    pub(crate) fn of(bindings: &impl Bindings) -> Result<Self> {
        let mut tensors = Vec::new();
        bindings.each(|argument, tensor| {
            tensors.push((argument, tensor.clone()));
            Ok(())
        })?;
        let contents = bindings.contents();
        Ok(Self {
            tensors,
            features: bindings.features(),
            block_table: contents.block_table.cloned(),
            query_padding: contents.query_padding.cloned(),
            kv_padding: contents.kv_padding.cloned(),
        })
    }
}

impl Tensors<Parameter> for Bound {
    fn each<'b>(
        &'b self,
        mut visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>,
    ) -> Result<()> {
        let mut tensors = self.tensors.iter();
        tensors.try_for_each(|(argument, tensor)| visit(*argument, tensor))
    }
}

impl Bindings for Bound {
    fn features(&self) -> Option<Features> {
        self.features
    }

    fn contents(&self) -> GivenContents<'_> {
        GivenContents {
            block_table: self.block_table.as_ref(),
            query_padding: self.query_padding.as_ref(),
            kv_padding: self.kv_padding.as_ref(),
        }
    }
}
