//! The file format of cases, and the recording of live calls in it.

mod error;
mod file;
mod file_access;
mod header;
mod json;
mod metadata;
mod parameter_case;
mod record;
mod stored;
mod target;
mod tensor;

use std::convert::Infallible;
use std::mem;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, ParameterInfo, Value};
use ascend_spec::ops::fused_infer_attention_score::{Arguments, CheckedCall, FiaCall, Version};
use ascend_spec::{Cann, CompressedMask, DType, Dims, MaskDemand, Soc, SparseMode, Target, TensorDesc, Violation};

use crate::mask::MaskForm;

pub use error::CaseError;
pub use file_access::{read_file, write_file};
pub use parameter_case::ParameterCase;
pub(crate) use record::{LiveCall, expected_output, failed, is_on, keeps_calls, launched, nans, refusal_status};
pub use record::{OperatorCall, RECORD_VARIABLE, Recorded, Recorder, record_calls, tentatively};
pub use stored::read_tensors;
pub use tensor::CaseTensor;

pub use ascend_spec::ops::fused_infer_attention_score::Parameter;

/// One call of an operator with its data.
///
/// `A` is how the arguments are named: [`AnyArguments`] takes those of any operator by their names in text, and an
/// [`AttentionCase`] has those of FusedInferAttentionScore as fields. [`Case::attention`] makes the one of the other,
/// and `Case::from` goes back. The fields are the content of a file; nothing is checked against the operator's contract
/// before the case runs.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Case<A = AnyArguments<CaseTensor>> {
    /// Free text: what the case is called.
    pub name: String,
    /// Free text: where it comes from.
    pub note: String,
    /// What the operator is called with. Outputs do not belong here, except tensors that the operator updates in place
    /// and writes in part ([`DeclaredOperator::keeps_elements`]): these have what they hold before the call.
    pub arguments: A,
    /// Where the mask comes from.
    pub mask: MaskSource,
    /// Whether the call should run or be refused.
    pub expect: Expect,
    /// Expected outputs by name (FLOAT, NaN where not specified; chosen positions INT32).
    pub expected: Vec<(&'static str, CaseTensor)>,
    /// How far outputs may be from the expected ones.
    pub tolerance: Option<Tolerance>,
    /// How far `softmax_max`, `softmax_sum` and `softmax_lse` may be from the expected ones; `None` is as for the other
    /// outputs.
    pub softmax_tolerance: Option<Tolerance>,
    /// How far states of the gated delta rule may be from the expected ones; `None` is as for the other outputs.
    pub state_tolerance: Option<Tolerance>,
    /// The tolerance for an implementation that rounds only what it writes, as the emulation does; `None` is as for any
    /// other.
    pub exact_tolerance: Option<Tolerance>,
    /// As [`exact_tolerance`](Case::exact_tolerance), of states.
    pub exact_state_tolerance: Option<Tolerance>,
    /// How far the output as a whole may be from the expected one: the root of the mean square error over that of the
    /// mean square.
    pub rms_rtol: Option<f64>,
    /// As [`rms_rtol`](Case::rms_rtol), of states.
    pub state_rms_rtol: Option<f64>,
    /// The strides of a pool of states or lines, in elements; `None` is row-major. The file has the elements row-major.
    pub state_strides: Option<Vec<i64>>,
    /// Who has built the operator, where it is not CANN: another package may have one of the same name.
    pub provider: Option<String>,
    /// Name of the chip that the call is for, such as `Ascend910B1`; `None` is any.
    pub soc_name: Option<String>,
    /// The release that the call is for; `None` is any.
    pub cann: Option<Cann>,
    /// The version of the operator that the call goes to, counted from 1, or the next one that a product has; `None` is
    /// the oldest that computes with every argument given.
    pub op_version: Option<u8>,
    /// The rule or lint that refuses the call, by id: with [`Expect::Reject`] the operator's rule, with
    /// [`Expect::Ok`] the lint by which the safe layer stops what the operator takes. `None` is any rule.
    pub expect_rule: Option<String>,
    /// The first release that has to take the call as the case's own does, as
    /// [`FusedInferAttention::portable_since`](crate::FusedInferAttention::portable_since) requires it; `None`
    /// requires nothing.
    pub portable_since: Option<Cann>,
    /// Element type of the attention output; `None` is the one that the inputs imply.
    pub out_dtype: Option<DType>,
    /// The group of cases that the case belongs to, and its part in it.
    pub group: Option<(String, String)>,
}

/// A case of FusedInferAttentionScore, whose arguments are fields.
pub type AttentionCase = Case<Arguments<CaseTensor>>;

/// The arguments of a [`Case`]. Only this crate implements the trait.
#[allow(private_bounds, reason = "sealed: the bound has no public name")]
pub trait CaseArguments: Sealed {
    /// The arguments with descriptors for tensors.
    type Described;

    /// The arguments by name, with the same tensors.
    #[doc(hidden)]
    fn by_name(&self) -> AnyArguments<&CaseTensor>;

    /// The description of arguments of the same operator.
    #[doc(hidden)]
    fn described(described: AnyArguments<TensorDesc>) -> Self::Described;
}

pub(crate) trait Sealed {}

impl Sealed for AnyArguments<CaseTensor> {}

impl CaseArguments for AnyArguments<CaseTensor> {
    type Described = AnyArguments<TensorDesc>;

    fn by_name(&self) -> AnyArguments<&CaseTensor> {
        let mut arguments = self.attributes();
        for (argument, tensor) in self.each_tensor() {
            // This cannot fail: the parameter is the operator's own.
            let _ = arguments.set_tensor(argument.parameter.name, tensor);
        }
        arguments
    }

    fn described(described: AnyArguments<TensorDesc>) -> Self::Described {
        described
    }
}

impl Sealed for Arguments<CaseTensor> {}

impl CaseArguments for Arguments<CaseTensor> {
    type Described = Arguments<TensorDesc>;

    fn by_name(&self) -> AnyArguments<&CaseTensor> {
        let no_tensors = Arguments::default();
        let mut arguments: Arguments<&CaseTensor> = self.call_of(&no_tensors).attributes();
        for (argument, tensor) in self.each_tensor() {
            arguments.set_tensor(argument.parameter, tensor);
        }
        AnyArguments::FusedInferAttentionScore(arguments)
    }

    fn described(described: AnyArguments<TensorDesc>) -> Self::Described {
        match described {
            AnyArguments::FusedInferAttentionScore(described) => described,
            _ => Arguments::default(),
        }
    }
}

/// Where the mask of a case comes from (`atten_mask_kind`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskSource {
    /// There is no mask.
    #[default]
    None,
    /// The tensor `atten_mask`.
    Tensor,
    /// The standard mask of the sparse mode: 2048 x 2048, in mode 6 3072 x 2048.
    Compressed,
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

/// Whether a case has a tensor of a parameter among its arguments, and not only among the expected outputs.
fn is_input(operator: DeclaredOperator, parameter: &ParameterInfo) -> bool {
    match parameter.kind {
        Kind::InOut => operator.keeps_elements(),
        Kind::Output => false,
        kind => kind.is_tensor(),
    }
}

/// The tensors whose strides a case may have.
const POOLS: [&str; 2] = ["state", "conv_states"];

/// Whether an output holds states of linear attention.
fn is_state(output: &str) -> bool {
    matches!(output, "state" | "final_state" | "conv_states")
}

/// The element type of an expected output.
fn expected_dtype(output: &str) -> DType {
    match output {
        "sparse_indices" | "top_k_output" => DType::Int32,
        _ => DType::Float,
    }
}

/// The form of the masks that readers make for an operator.
fn mask_form(operator: DeclaredOperator, soc: Option<Soc>) -> MaskForm {
    match operator {
        DeclaredOperator::FusedInferAttentionScore => MaskForm::made_for(soc),
        _ => MaskForm::BOOL,
    }
}

/// The mask from which an operator reads that of a call's sparse mode; `None` for modes that have no such mask. In an
/// unknown mode, which the operator refuses, it is the causal one.
fn compressed_mask<T>(arguments: &AnyArguments<T>) -> Option<CompressedMask> {
    let Some(Value::Int(mode)) = arguments.value("sparse_mode") else {
        return None;
    };
    match SparseMode::from_acl(mode).map(SparseMode::demand) {
        Some(MaskDemand::Compressed(template)) => Some(template),
        Some(_) => None,
        None => Some(CompressedMask::Causal),
    }
}

impl<A> Case<A> {
    /// The case with other tensors and arguments.
    fn with<B>(&self, arguments: B, expected: Vec<(&'static str, CaseTensor)>) -> Case<B> {
        Case {
            name: self.name.clone(),
            note: self.note.clone(),
            arguments,
            mask: self.mask,
            expect: self.expect,
            expected,
            tolerance: self.tolerance,
            softmax_tolerance: self.softmax_tolerance,
            state_tolerance: self.state_tolerance,
            exact_tolerance: self.exact_tolerance,
            exact_state_tolerance: self.exact_state_tolerance,
            rms_rtol: self.rms_rtol,
            state_rms_rtol: self.state_rms_rtol,
            state_strides: self.state_strides.clone(),
            provider: self.provider.clone(),
            soc_name: self.soc_name.clone(),
            cann: self.cann,
            op_version: self.op_version,
            expect_rule: self.expect_rule.clone(),
            portable_since: self.portable_since,
            out_dtype: self.out_dtype,
            group: self.group.clone(),
        }
    }

    /// The expected tensor of an output.
    pub fn expected(&self, output: &str) -> Option<&CaseTensor> {
        let mut expected = self.expected.iter();
        expected.find(|(name, _)| *name == output).map(|(_, tensor)| tensor)
    }

    /// The tolerance of an output. `exact`: the implementation rounds only what it writes, as the emulation does.
    pub fn tolerance_of(&self, output: &str, exact: bool) -> Tolerance {
        let own = match output {
            "softmax_max" | "softmax_sum" | "softmax_lse" => self.softmax_tolerance,
            _ if is_state(output) => self.exact_state_tolerance.filter(|_| exact).or(self.state_tolerance),
            _ => self.exact_tolerance.filter(|_| exact),
        };
        own.or(self.tolerance).unwrap_or_default()
    }

    /// How far an output as a whole may be from what is expected of it.
    pub(crate) fn rms_tolerance_of(&self, output: &str) -> Option<f64> {
        match output {
            "attention_out" | "out" => self.rms_rtol,
            _ if is_state(output) => self.state_rms_rtol,
            _ => None,
        }
    }
}

impl Case {
    /// The case with the arguments of FusedInferAttentionScore as fields.
    ///
    /// # Errors
    /// [`CaseError::OtherOp`] for a case of another operator.
    pub fn attention(mut self) -> Result<AttentionCase, CaseError> {
        let expected = mem::take(&mut self.expected);
        match &mut self.arguments {
            AnyArguments::FusedInferAttentionScore(arguments) => {
                let arguments = mem::take(arguments);
                Ok(self.with(arguments, expected))
            }
            other => Err(CaseError::OtherOp(other.operator().name())),
        }
    }
}

impl From<AttentionCase> for Case {
    fn from(mut case: AttentionCase) -> Self {
        let arguments = mem::take(&mut case.arguments);
        let expected = mem::take(&mut case.expected);
        case.with(AnyArguments::FusedInferAttentionScore(arguments), expected)
    }
}

impl AttentionCase {
    /// The tensor of a parameter, of a list the first one; `None` is a null pointer.
    pub fn tensor(&self, parameter: Parameter) -> Option<&CaseTensor> {
        self.arguments.tensor(parameter)
    }

    /// Checks `call`, which the case's description makes, against the contract: for the product and release that the
    /// case names or else those of `otherwise`, and the version of the operator that the case calls.
    ///
    /// # Errors
    /// The broken rule; [`UNSUPPORTED`](ascend_spec::UNSUPPORTED) for what this crate does not compute.
    pub fn checked<'c>(&self, call: &'c FiaCall<'c>, otherwise: Target) -> Result<CheckedCall<'c>, Violation> {
        let target = self.target(otherwise);
        let number = self.version(&self.describe_on(None), target);
        let version = Version::ALL.into_iter().find(|version| version.number() == number);
        call.check(version.unwrap_or(Version::V1), target)
    }
}

impl<A: CaseArguments> Case<A> {
    /// A case with these arguments.
    pub fn new(name: impl Into<String>, arguments: A) -> Self {
        let plain: Case<()> = Case { name: name.into(), ..Case::default() };
        plain.with(arguments, Vec::new())
    }

    /// The operator.
    pub fn operator(&self) -> DeclaredOperator {
        self.arguments.by_name().operator()
    }

    /// Describes the inputs, and the outputs that the call implies. The attention output has the case's element type,
    /// if the case names one.
    pub fn describe(&self) -> A::Described {
        let soc = self.soc_name.as_deref().and_then(Soc::from_name);
        A::described(self.describe_on(soc))
    }

    /// Describes the call as [`Case::describe`] does, with the masks that are made for a product.
    pub(crate) fn describe_on(&self, soc: Option<Soc>) -> AnyArguments<TensorDesc> {
        let arguments = self.arguments.by_name();
        let described: Result<_, Infallible> = arguments.try_map(|_, tensor| Ok(tensor.desc()));
        let Ok(mut described) = described;
        if let Some(template) = self.template() {
            let form = mask_form(arguments.operator(), soc);
            let mask = TensorDesc::packed(form.dtype(), template.shape());
            // This cannot fail: an operator with sparse modes has the parameter.
            let _ = described.set_tensor("atten_mask", mask);
        }
        for pool in POOLS {
            if let (Some(strides), [state]) = (&self.state_strides, described.tensors(pool))
                && let Some(strides) = Dims::new(strides)
            {
                let state = TensorDesc { strides, ..*state };
                // This cannot fail: the call has such a pool.
                let _ = described.set_tensor(pool, state);
            }
        }
        described.imply_outputs(&|name| Some(self.expected(name)?.desc().shape));
        if let (Some(dtype), [out]) = (self.out_dtype, described.tensors("attention_out")) {
            let out = TensorDesc { dtype, ..*out };
            // This cannot fail: the call has an attention output.
            let _ = described.set_tensor("attention_out", out);
        }
        described
    }

    /// The version that is called: the case's if it has every argument given and runs on the target, and otherwise the
    /// next one that computes with all of them and does.
    pub fn version(&self, described: &AnyArguments<TensorDesc>, target: Target) -> u8 {
        let able = |number: u8| {
            let version = described.operator().version(number);
            let runs = version.is_some_and(|version| version.runs_on(target));
            runs && described.unread(number).is_none()
        };
        match self.op_version {
            Some(number) if able(number) => number,
            oldest => described.chosen_on(oldest.unwrap_or(1), target),
        }
    }

    /// The mask that the reader makes, if it makes one.
    pub(crate) fn template(&self) -> Option<CompressedMask> {
        let compressed = self.mask == MaskSource::Compressed;
        compressed.then(|| compressed_mask(&self.arguments.by_name())).flatten()
    }

    /// The mask that the reader makes, and its form on a product.
    pub(crate) fn mask_on(&self, soc: Option<Soc>) -> Option<(CompressedMask, MaskForm)> {
        Some((self.template()?, mask_form(self.operator(), soc)))
    }

    /// Checks the described call against the contract of a version, counted from 1. Reports every lint that it breaks,
    /// and how releases that [`Case::portable_since`] names treat the call differently.
    ///
    /// # Errors
    /// The broken rule; [`UNSUPPORTED`](ascend_spec::UNSUPPORTED) for what this crate does not compute.
    pub fn check(
        &self,
        described: &AnyArguments<TensorDesc>,
        version: u8,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        described.check(version, target, report)?;
        if let (Some(since), AnyArguments::FusedInferAttentionScore(arguments)) = (self.portable_since, described)
            && let Some(version) = Version::ALL.into_iter().find(|known| known.number() == version)
        {
            (arguments.call()).each_difference(version, target, since, report);
        }
        Ok(())
    }

    /// Checks the content of the tensors whose elements the operator takes for positions in other tensors, such as
    /// block tables and sizes of left padding: a call that breaks such a rule may access memory outside of its
    /// tensors, and a case of it is not run.
    ///
    /// # Errors
    /// The broken rule or lint.
    pub fn check_contents(
        &self,
        described: &AnyArguments<TensorDesc>,
        version: u8,
        target: Target,
    ) -> Result<(), Violation> {
        let arguments = self.arguments.by_name();
        described.check_contents(version, target, &|name| {
            let tensor = arguments.tensors(name).first();
            tensor.and_then(|tensor| tensor.to_i64()).unwrap_or_default()
        })
    }

    /// Reports the lints that the contents of the other tensors break, such as a position bias with an infinity.
    pub fn lint_contents(
        &self,
        described: &AnyArguments<TensorDesc>,
        version: u8,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) {
        let arguments = self.arguments.by_name();
        let bytes = |name: &str| Some(arguments.tensors(name).first()?.bytes().to_vec());
        described.lint_contents(version, target, &bytes, report);
    }

    /// Refuses a case whose parts do not fit together.
    pub(crate) fn consistent(&self) -> Result<(), CaseError> {
        let wrong = |why| Err(CaseError::Contradiction(why));
        let arguments = self.arguments.by_name();
        let (operator, is_missing) = (arguments.operator(), |name| arguments.tensors(name).is_empty());
        self.named_target().released()?;
        match (self.mask, is_missing("atten_mask")) {
            (MaskSource::Tensor, true) => {
                return Err(CaseError::MissingTensor("atten_mask".into()));
            }
            (MaskSource::None | MaskSource::Compressed, false) => {
                return wrong(
                    "there is a tensor `atten_mask`, but `atten_mask_kind` is not `tensor`: change the one or leave \
                     out the other",
                );
            }
            (MaskSource::Compressed, true) if self.template().is_none() => {
                return wrong(
                    "`atten_mask_kind` is `compressed`, and `sparse_mode` is one that has no compressed mask: give the \
                     tensor `atten_mask`, or use modes 2 to 4, in training also 6 to 8",
                );
            }
            _ => {}
        }
        let pools = POOLS.into_iter().flat_map(|pool| arguments.tensors(pool));
        if self
            .state_strides
            .as_ref()
            .is_some_and(|strides| pools.into_iter().any(|pool| pool.shape().len() != strides.len()))
        {
            return wrong("the strides of a pool are one for each of its axes: give as many");
        }
        let has_strides =
            ["state_strides", "conv_states_strides"].into_iter().any(|key| metadata::takes(operator, key));
        if self.state_strides.is_some() && !has_strides {
            return wrong("the operator reads no pool by strides: leave `state_strides` out");
        }
        let mut tensors = arguments.each_tensor();
        if tensors.any(|(argument, _)| !is_input(operator, argument.parameter)) {
            return wrong("outputs are no arguments of a case: what they should be is expected of them");
        }
        if self.expect == Expect::Ok && operator.parameter_named("query").is_some() {
            let keys_are_values = operator == DeclaredOperator::SparseFlashAttention;
            let required: &[_] = match keys_are_values {
                true => &["query", "key"],
                false => &["query", "key", "value"],
            };
            let required = required.iter().copied();
            let mut attention = required.filter(|name| operator.parameter_named(name).is_some());
            if let Some(name) = attention.find(|name| is_missing(name)) {
                return Err(CaseError::MissingTensor(name.into()));
            }
        }
        if let Some(version) = self.op_version {
            CaseError::check_unread(&self.describe_on(None), version)?;
        }
        for (name, expected) in &self.expected {
            if expected.dtype() != expected_dtype(name) {
                return Err(CaseError::ExpectedDtype { tensor: name, dtype: expected.dtype().to_string() });
            }
        }
        if !self.expected.is_empty() && self.tolerance.is_none() {
            return wrong("there are expected outputs, but neither `atol` nor `rtol`: give one, 0 for equal numbers");
        }
        let flag = arguments.value("softmax_lse_flag");
        let writes_lse = !matches!(flag, Some(Value::Flag(false) | Value::Int(0)));
        if self.expected("softmax_lse").is_some() && !writes_lse {
            return wrong(
                "softmax_lse is expected, but `softmax_lse_flag` is not `true`: set it, or leave the tensor out",
            );
        }
        Ok(())
    }
}
