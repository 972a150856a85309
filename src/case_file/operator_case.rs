//! Cases of declared operators other than FusedInferAttentionScore.

use std::path::Path;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, ParameterInfo, Value};
use ascend_spec::{Cann, DType, MaskDemand, SparseMode, Target, TensorDesc};

use super::header::Header;
use super::metadata::{self, Metadata};
use super::read_file::read_file;
use super::write_file::write_file;
use super::{Case, CaseError, CaseTensor, Expect, MaskKind, Tolerance, expectable, stored, values};
use crate::mask::MaskForm;

/// One call of a declared operator with its data.
///
/// The operator is that of the arguments. The fields are the content of a file; nothing is checked against the
/// operator's contract before the case runs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OperatorCase {
    /// Free text: what the case is called.
    pub name: String,
    /// Free text: where it comes from.
    pub note: String,
    /// What the operator is called with. Outputs do not belong here.
    pub arguments: AnyArguments<CaseTensor>,
    /// The version of the operator that is called, counted from 1; `None` is the oldest that has every argument given.
    pub op_version: Option<u8>,
    /// Where the mask comes from.
    pub mask: MaskKind,
    /// Whether the call should run or be refused.
    pub expect: Expect,
    /// Expected outputs by name (FLOAT, NaN where not specified).
    pub expected: Vec<(&'static str, CaseTensor)>,
    /// How far outputs may be from the expected ones.
    pub tolerance: Option<Tolerance>,
    /// How far `softmax_max` and `softmax_sum` may be from the expected ones; `None` is as for the other outputs.
    pub softmax_tolerance: Option<Tolerance>,
    /// Element type of the attention output; `None` is the one that the inputs imply.
    pub out_dtype: Option<DType>,
    /// Name of the chip that the call is for, such as `Ascend910B1`; `None` is any.
    pub soc_name: Option<String>,
    /// The release that the call is for; `None` is any.
    pub cann: Option<Cann>,
    /// The rule or lint that refuses the call, as [`Case::expect_rule`].
    pub expect_rule: Option<String>,
    /// The group of cases that the case belongs to, and its part in it.
    pub group: Option<(String, String)>,
}

impl OperatorCase {
    /// A case with the operator's default attributes and no tensors.
    pub fn new(operator: DeclaredOperator, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            note: String::new(),
            arguments: AnyArguments::new(operator),
            op_version: None,
            mask: MaskKind::None,
            expect: Expect::Ok,
            expected: Vec::new(),
            tolerance: None,
            softmax_tolerance: None,
            out_dtype: None,
            soc_name: None,
            cann: None,
            expect_rule: None,
            group: None,
        }
    }

    /// The operator.
    pub fn operator(&self) -> DeclaredOperator {
        self.arguments.operator()
    }

    /// The expected tensor of an output.
    pub fn expected(&self, output: &str) -> Option<&CaseTensor> {
        let mut expected = self.expected.iter();
        expected
            .find(|(name, _)| *name == output)
            .map(|(_, tensor)| tensor)
    }

    /// How far an output may be from what is expected of it.
    pub fn tolerance_of(&self, output: &str) -> Tolerance {
        let of_rows = matches!(output, "softmax_max" | "softmax_sum");
        let softmax = self.softmax_tolerance.filter(|_| of_rows);
        softmax.or(self.tolerance).unwrap_or_default()
    }

    /// Describes the inputs, and the outputs that the call implies. The attention output has the case's element type,
    /// if the case names one.
    pub fn describe(&self) -> AnyArguments<TensorDesc> {
        let described = self.arguments.try_map(|_, tensor| Ok(tensor.desc()));
        let described: Result<_, std::convert::Infallible> = described;
        let Ok(mut described) = described;
        if let Some(mask) = self.compressed_mask() {
            // An operator with sparse modes has this parameter.
            let _ = described.set_tensor("atten_mask", mask);
        }
        let shape = |name: &str| Some(self.expected(name)?.desc().shape);
        described.imply_outputs(&shape);
        if let (Some(dtype), [out]) = (self.out_dtype, described.tensors("attention_out")) {
            let out = TensorDesc { dtype, ..*out };
            // The call has an attention output, so that its operator has the parameter.
            let _ = described.set_tensor("attention_out", out);
        }
        described
    }

    /// The version that is called: the case's, or the oldest that has every argument given and runs on the target.
    pub fn version(&self, described: &AnyArguments<TensorDesc>, target: Target) -> u8 {
        self.op_version
            .unwrap_or_else(|| described.oldest_on(target))
    }

    /// The template from which the operator reads the mask of the case's sparse mode; `None` if the mask is not
    /// compressed.
    pub(crate) fn demand(&self) -> Option<ascend_spec::CompressedMask> {
        let mode = match self.arguments.value("sparse_mode") {
            Some(Value::Int(mode)) => SparseMode::from_acl(mode)?,
            _ => return None,
        };
        match mode.demand() {
            MaskDemand::Compressed(template) if self.mask == MaskKind::Compressed => Some(template),
            _ => None,
        }
    }

    /// The form of masks that the reader makes.
    pub(crate) fn mask_form() -> MaskForm {
        MaskForm::BOOL
    }

    fn compressed_mask(&self) -> Option<TensorDesc> {
        let shape = self.demand()?.shape();
        Some(TensorDesc::packed(Self::mask_form().dtype(), shape))
    }

    /// Checks the content of the tensors whose elements the operator takes for positions in other tensors.
    ///
    /// # Errors
    /// The broken rule or lint.
    pub fn check_contents(
        &self,
        described: &AnyArguments<TensorDesc>,
        version: u8,
        target: Target,
    ) -> Result<(), ascend_spec::Violation> {
        described.check_contents(version, target, &|name| {
            let tensor = self.arguments.tensors(name).first();
            tensor.and_then(CaseTensor::to_i64).unwrap_or_default()
        })
    }

    /// Reads a case of this operator from a file and its header.
    pub(super) fn of_header(
        operator: DeclaredOperator,
        header: &Header,
        file: &[u8],
    ) -> Result<Self, CaseError> {
        let mut case = Self::new(operator, "");
        let arguments = &mut case.arguments;
        let (metadata, stored) = Metadata::read(&header.metadata, operator, |key, text| {
            let Some(parameter) = operator.parameter_named(key) else {
                return Ok(false);
            };
            let value = values::read(parameter, text)?;
            Ok(value.is_some_and(|value| arguments.set_value(key, value).is_ok()))
        })?;
        let is_list = |name: &str| {
            let parameter = operator.parameter_named(name);
            parameter.is_some_and(|parameter| parameter.kind == Kind::TensorList)
        };
        for (name, tensor) in stored.tensors(header, file, is_list)? {
            match operator.parameter_named(&name) {
                Some(output) if output.kind.is_output() => {
                    case.expected.push((output.name, tensor));
                }
                _ => (case.arguments.set_tensor(&name, tensor))
                    .map_err(|_| CaseError::UnknownTensor(name))?,
            }
        }
        let order = |(name, _): &(&str, CaseTensor)| {
            operator
                .parameters()
                .position(|parameter| parameter.name == *name)
        };
        case.expected.sort_by_key(order);
        let implied = match case.arguments.tensors("atten_mask") {
            [] => MaskKind::None,
            _ => MaskKind::Tensor,
        };
        case = Self {
            name: metadata.name,
            note: metadata.note,
            op_version: metadata.op_version,
            mask: metadata.mask.unwrap_or(implied),
            expect: metadata.expect,
            tolerance: metadata.tolerance,
            softmax_tolerance: metadata.softmax_tolerance,
            out_dtype: metadata.out_dtype,
            soc_name: metadata.soc_name,
            cann: metadata.cann,
            expect_rule: metadata.expect_rule,
            group: metadata.group,
            ..case
        };
        case.consistent()?;
        Ok(case)
    }

    /// The content of a file of this case.
    ///
    /// # Errors
    /// As for [`Case::to_bytes`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.consistent()?;
        let operator = self.operator();
        let has_mask = operator.parameter_named("atten_mask").is_some();
        let metadata = Metadata {
            name: self.name.clone(),
            note: self.note.clone(),
            mask: Some(self.mask).filter(|_| has_mask),
            expect: self.expect,
            tolerance: self.tolerance,
            softmax_tolerance: self.softmax_tolerance,
            soc_name: self.soc_name.clone(),
            cann: self.cann,
            op_version: self.op_version,
            expect_rule: self.expect_rule.clone(),
            out_dtype: self.out_dtype,
            group: self.group.clone(),
            ..Metadata::default()
        };
        let mut entries = metadata.write(operator)?;
        let plain = AnyArguments::<CaseTensor>::new(operator);
        for ParameterInfo { name, .. } in operator.parameters() {
            // Not every version has every argument: what has its default is left out.
            let value = self.arguments.value(name);
            let text = value
                .filter(|_| value != plain.value(name))
                .and_then(values::text);
            entries.extend(text.map(|text| (*name, text)));
        }
        let mut named: Vec<_> = self
            .arguments
            .each_tensor()
            .map(|(at, tensor)| {
                let count = self.arguments.tensors(at.parameter.name).len();
                (stored::name_of(at.parameter.name, at.index, count), tensor)
            })
            .collect();
        let expected = self.expected.iter();
        named.extend(expected.map(|(name, tensor)| ((*name).to_owned(), tensor)));
        stored::writable(&named)?;
        stored::write(entries, &named)
    }

    /// Whether the parts of the case fit together.
    pub(super) fn consistent(&self) -> Result<(), CaseError> {
        let wrong = |why| Err(CaseError::Contradiction(why));
        self.named_target().released()?;
        let mask = !self.arguments.tensors("atten_mask").is_empty();
        self.mask.agrees_with(mask)?;
        if self.mask == MaskKind::Compressed && self.demand().is_none() {
            return wrong(
                "`atten_mask_kind` is `compressed`, and `sparse_mode` is one that has no compressed mask: give the tensor \
                 `atten_mask`, or use modes 2 to 4 or 6 to 8",
            );
        }
        let mut outputs = self
            .arguments
            .each_tensor()
            .filter(|(at, _)| at.parameter.kind.is_output());
        if outputs.next().is_some() {
            return wrong(
                "outputs are no arguments of a case: what they should be is expected of them",
            );
        }
        let unread = self
            .op_version
            .and_then(|version| self.describe().unread(version));
        if let Some(parameter) = unread {
            return Err(CaseError::UnreadArgument {
                argument: parameter.name,
                version: self.op_version.unwrap_or(1),
            });
        }
        for (name, expected) in &self.expected {
            expectable(name, expected, self.tolerance)?;
        }
        Ok(())
    }
}

/// A case of any declared operator, as its file names it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AnyCase {
    /// A case of FusedInferAttentionScore.
    Attention(Box<Case>),
    /// A case of another operator.
    Operator(Box<OperatorCase>),
}

impl AnyCase {
    /// Reads a case file of any declared operator.
    ///
    /// # Errors
    /// As for [`Case::read`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self, CaseError> {
        Self::from_bytes(&read_file(path, Case::MOST_BYTES)?)
    }

    /// Reads a case of any declared operator from the content of a file.
    ///
    /// # Errors
    /// As for [`Case::from_bytes`].
    pub fn from_bytes(file: &[u8]) -> Result<Self, CaseError> {
        let header = Header::read(file)?;
        match metadata::operator(&header.metadata)? {
            DeclaredOperator::FusedInferAttentionScore => {
                Case::of_header(&header, file).map(|case| Self::Attention(Box::new(case)))
            }
            operator => OperatorCase::of_header(operator, &header, file)
                .map(|case| Self::Operator(Box::new(case))),
        }
    }

    /// Returns the content of a file of this case.
    ///
    /// # Errors
    /// As for [`Case::to_bytes`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        match self {
            Self::Attention(case) => case.to_bytes(),
            Self::Operator(case) => case.to_bytes(),
        }
    }

    /// Writes a case file, as [`Case::write`] does.
    ///
    /// # Errors
    /// As for [`Case::write`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), CaseError> {
        write_file(path, &self.to_bytes()?)
    }

    /// Free text: what the case is called.
    pub fn name(&self) -> &str {
        match self {
            Self::Attention(case) => &case.name,
            Self::Operator(case) => &case.name,
        }
    }

    /// Free text: where it comes from.
    pub fn note(&self) -> &str {
        match self {
            Self::Attention(case) => &case.note,
            Self::Operator(case) => &case.note,
        }
    }
}
