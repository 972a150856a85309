//! Descriptors of all tensors of a case, inputs and outputs, as the operator takes them.

use ascend_spec::ops::fused_infer_attention_score::{
    Arguments, CheckedCall, ContentBounds, FiaCall,
};
use ascend_spec::{Soc, SparseMode, TensorDesc, Violation};

use crate::mask::MaskForm;

use super::{Case, MaskKind};

/// Descriptors of the tensors of a case and of its outputs; [`Description::call`] makes a call of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    arguments: Arguments<TensorDesc>,
}

impl Case {
    /// Describes the inputs, and the outputs that the call implies ([`FiaCall::implied_outputs`]). The attention
    /// output has the case's element type, if the case names one.
    pub fn describe(&self) -> Description {
        let mut arguments = self.arguments.map(|_, tensor| tensor.desc());
        if self.mask == MaskKind::Compressed {
            let size = SparseMode::COMPRESSED_MASK_SIZE;
            let soc = self.soc_name.as_deref().and_then(Soc::from_name);
            let dtype = MaskForm::made_for(soc).dtype();
            arguments.atten_mask = TensorDesc::contiguous(dtype, &[size, size]);
        }
        let (mut attention_out, softmax_lse) = arguments.call().implied_outputs();
        if let (Some(out), Some(dtype)) = (&mut attention_out, self.out_dtype) {
            out.dtype = dtype;
        }
        (arguments.attention_out, arguments.softmax_lse) = (attention_out, softmax_lse);
        Description { arguments }
    }
}

impl Case {
    /// Refuses a block table and sizes of left padding that name positions outside of the call's tensors, which the
    /// operator takes and overruns; a case with such content is not run.
    ///
    /// # Errors
    /// `block_table.range`, `block_table.row_short` or `padding_size.range`.
    pub fn check_contents(&self, checked: &CheckedCall<'_>) -> Result<(), Violation> {
        let Some(bounds) = checked.content_bounds() else {
            return Ok(());
        };
        for parameter in ContentBounds::PARAMETERS {
            if let Some(tensor) = self.tensor(parameter) {
                let of = (tensor.dtype(), tensor.shape());
                bounds.admits_content(parameter, of, tensor.bytes())?;
            }
        }
        Ok(())
    }
}

impl Description {
    /// The call of the case that this description was made from.
    pub fn call(&self) -> FiaCall<'_> {
        self.arguments.call()
    }

    /// Descriptor of `attention_out`.
    pub fn attention_out(&self) -> Option<TensorDesc> {
        self.arguments.attention_out
    }

    /// Descriptor of `softmax_lse`, if the call writes it.
    pub fn softmax_lse(&self) -> Option<TensorDesc> {
        self.arguments.softmax_lse
    }
}
