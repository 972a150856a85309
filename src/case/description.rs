//! What the operator is told about a case: descriptors of all tensors, given and computed.

use ascend_spec::fia::{FiaCall, Problem};
use ascend_spec::{Soc, SparseMode, TensorDesc, Violation};

use crate::attention::{PLACED, admits_content};
use crate::mask::MaskForm;

use super::{Case, MaskKind};

/// Descriptors of the key and value lists and of the outputs of a case; [`Description::call`] makes a call of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    key: Vec<TensorDesc>,
    value: Vec<TensorDesc>,
    attention_out: Option<TensorDesc>,
    softmax_lse: Option<TensorDesc>,
}

impl Case {
    /// Descriptors of the lists, and of the outputs that the call implies ([`FiaCall::implied_outputs`]), of the element type
    /// that the case gives the attention output, if it does.
    pub fn describe(&self) -> Description {
        let mut description = Description {
            key: self.key.iter().map(|tensor| tensor.desc()).collect(),
            value: self.value.iter().map(|tensor| tensor.desc()).collect(),
            attention_out: None,
            softmax_lse: None,
        };
        let outputs = description.call(self).implied_outputs();
        (description.attention_out, description.softmax_lse) = outputs;
        if let (Some(out), Some(dtype)) = (&mut description.attention_out, self.out_dtype) {
            out.dtype = dtype;
        }
        description
    }
}

impl Case {
    /// What in the case's block table and sizes of left padding lies outside of the tensors of the call, which the operator
    /// takes and overruns; a case that has such content is not run.
    ///
    /// # Errors
    /// `block_table.range`, `block_table.row_short` or `padding_size.range`.
    pub fn check_places(&self, problem: &Problem<'_>) -> Result<(), Violation> {
        let Some(places) = problem.places() else {
            return Ok(());
        };
        for parameter in PLACED {
            if let Some(tensor) = self.tensors.get(&parameter) {
                let of = (tensor.dtype(), tensor.shape());
                admits_content(&places, parameter, of, tensor.bytes())?;
            }
        }
        Ok(())
    }
}

impl Description {
    /// The call of `case`, which this description was made from.
    pub fn call<'a>(&'a self, case: &'a Case) -> FiaCall<'a> {
        let mut call = case.attributes.call();
        call.key = &self.key;
        call.value = &self.value;
        for (parameter, tensor) in &case.tensors {
            if let Some(desc) = call.single_mut(*parameter) {
                *desc = Some(tensor.desc());
            }
        }
        if case.mask == MaskKind::Compressed {
            let size = SparseMode::COMPRESSED_MASK_SIZE;
            let soc = case.soc_name.as_deref().and_then(Soc::from_name);
            let dtype = MaskForm::made_for(soc).dtype();
            call.atten_mask = TensorDesc::contiguous(dtype, &[size, size]);
        }
        call.attention_out = self.attention_out;
        call.softmax_lse = self.softmax_lse;
        call
    }

    /// Descriptor of `attention_out`.
    pub fn attention_out(&self) -> Option<TensorDesc> {
        self.attention_out
    }

    /// Descriptor of `softmax_lse`, if the call writes it.
    pub fn softmax_lse(&self) -> Option<TensorDesc> {
        self.softmax_lse
    }
}
