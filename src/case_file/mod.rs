//! The file format of cases, and the recording of live calls in it.

mod description;
mod error;
mod file;
mod header;
mod json_tensor;
mod metadata;
mod operator_case;
mod parameter_case;
mod read_file;
mod read_tensors;
mod record;
mod stored;
mod target;
mod tensor;
mod unique_names;
mod values;
mod write_file;

use ascend_spec::ops::fused_infer_attention_score::{Arguments, Version};
use ascend_spec::{Cann, DType, SparseMode};

pub use description::Description;
pub use error::CaseError;
pub use operator_case::{AnyCase, OperatorCase};
pub use parameter_case::ParameterCase;
pub use read_file::read_file;
pub use read_tensors::read_tensors;
pub(crate) use record::{
    AnyLive, LiveCall, LiveOperator, expected_output, failed, is_on, launched, nans, refusal_status,
};
pub use record::{OperatorCall, RECORD_VARIABLE, Recorded, Recorder, record_calls, tentatively};
pub use tensor::CaseTensor;
pub use write_file::write_file;

pub use ascend_spec::ops::fused_infer_attention_score::Parameter;

/// One call of FusedInferAttentionScore with its data.
///
/// The fields are the content of a file; nothing is checked against the operator's contract before the case runs.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Case {
    /// Free text: what the case is called.
    pub name: String,
    /// Free text: where it comes from.
    pub note: String,
    /// What the operator is called with. Outputs do not belong here.
    pub arguments: Arguments<CaseTensor>,
    /// Where the mask comes from.
    pub mask: MaskKind,
    /// Whether the call should run or be refused.
    pub expect: Expect,
    /// Expected output (FLOAT, NaN where not specified).
    pub attention_out: Option<CaseTensor>,
    /// Expected log-sum-exp (FLOAT, NaN where not specified).
    pub softmax_lse: Option<CaseTensor>,
    /// How far outputs may be from the expected ones.
    pub tolerance: Option<Tolerance>,
    /// How far the attention output as a whole may be from the expected one: the root of the mean square error over
    /// that of the mean square.
    pub rms_rtol: Option<f64>,
    /// Name of the chip that the call is for, such as `Ascend910B1`; `None` is any.
    pub soc_name: Option<String>,
    /// The release that the call is for; `None` is any.
    pub cann: Option<Cann>,
    /// The oldest version of the operator that the call goes to; `None` is the oldest that can express it.
    pub op_version: Option<Version>,
    /// The rule or lint that refuses the call, by id: with [`Expect::Reject`] the operator's rule, with
    /// [`Expect::Ok`] the lint by which the safe layer stops what the operator takes. `None` is any rule.
    pub expect_rule: Option<String>,
    /// The first release that has to take the call as the case's own does, as
    /// [`FusedInferAttention::portable_since`](crate::FusedInferAttention::portable_since) requires it; `None`
    /// requires nothing.
    pub portable_since: Option<Cann>,
    /// Element type of the attention output; `None` is the one that the inputs imply.
    pub out_dtype: Option<DType>,
}

/// Where the mask of a case comes from (`atten_mask_kind`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskKind {
    /// There is no mask.
    #[default]
    None,
    /// The tensor [`Parameter::AttenMask`].
    Tensor,
    /// The standard mask of the sparse mode: 2048 x 2048, in mode 6 3072 x 2048.
    Compressed,
}

impl MaskKind {
    /// Refuses a tensor `atten_mask` beside a kind other than [`MaskKind::Tensor`], and that kind without the tensor.
    fn agrees_with(self, has_tensor: bool) -> Result<(), CaseError> {
        match self {
            Self::Tensor if !has_tensor => Err(CaseError::MissingTensor("atten_mask".into())),
            Self::None | Self::Compressed if has_tensor => Err(CaseError::Contradiction(
                "there is a tensor `atten_mask`, but `atten_mask_kind` is not `tensor`: change the one or leave out the other",
            )),
            _ => Ok(()),
        }
    }
}

/// Whether the call of a case should run or be refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expect {
    /// It runs.
    #[default]
    Ok,
    /// The operator refuses it before doing any work.
    Reject {
        /// CANN's status of the refusal, if the case names one.
        status: Option<i32>,
    },
}

/// Allowed distance: `|got - want| <= atol + rtol * |want|`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Absolute part.
    pub atol: f64,
    /// Relative part.
    pub rtol: f64,
}

impl Tolerance {
    /// How far a value may be from `want`.
    pub fn at(self, want: f64) -> f64 {
        self.atol + self.rtol * want.abs()
    }
}

impl Case {
    /// A case with the operator's default attributes and no tensors.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// The tensor of a parameter, of a list the first one; `None` is a null pointer.
    pub fn tensor(&self, parameter: Parameter) -> Option<&CaseTensor> {
        self.arguments.tensor(parameter)
    }

    /// Whether the case's sparse mode has a standard mask.
    fn takes_compressed_mask(&self) -> bool {
        SparseMode::from_acl(self.arguments.sparse_mode)
            .is_none_or(SparseMode::takes_compressed_mask)
    }

    /// Whether the parts of the case fit together.
    fn consistent(&self) -> Result<(), CaseError> {
        let wrong = |why| Err(CaseError::Contradiction(why));
        self.named_target().released()?;
        self.mask
            .agrees_with(self.tensor(Parameter::AttenMask).is_some())?;
        if self.mask == MaskKind::Compressed && !self.takes_compressed_mask() {
            return wrong(
                "`atten_mask_kind` is `compressed`, and `sparse_mode` is one that has no compressed mask: give the tensor \
                 `atten_mask`, or use modes 2 to 4",
            );
        }
        if (self.arguments.each_tensor()).any(|(argument, _)| argument.is_output()) {
            return wrong(
                "`attention_out` and `softmax_lse` are expected outputs, not inputs: put them into the fields of these names",
            );
        }
        if self.expect == Expect::Ok {
            for parameter in [Parameter::Query, Parameter::Key, Parameter::Value] {
                if self.tensor(parameter).is_none() {
                    return Err(CaseError::MissingTensor(parameter.name().into()));
                }
            }
        }
        for (expected, name) in [
            (&self.attention_out, "attention_out"),
            (&self.softmax_lse, "softmax_lse"),
        ] {
            if let Some(expected) = expected {
                expectable(name, expected, self.tolerance)?;
            }
        }
        if self.softmax_lse.is_some() && !self.arguments.softmax_lse_flag {
            return wrong(
                "softmax_lse is expected, but `softmax_lse_flag` is not `true`: set it, or leave the tensor out",
            );
        }
        Ok(())
    }
}

/// Refuses an expected output that nothing can be compared with.
fn expectable(
    name: &'static str,
    expected: &CaseTensor,
    tolerance: Option<Tolerance>,
) -> Result<(), CaseError> {
    if expected.dtype() != DType::Float {
        return Err(CaseError::ExpectedDtype {
            tensor: name,
            dtype: expected.dtype().to_string(),
        });
    }
    match tolerance {
        Some(_) => Ok(()),
        None => Err(CaseError::Contradiction(
            "there are expected outputs, but neither `atol` nor `rtol`: give one, 0 for equal numbers",
        )),
    }
}
