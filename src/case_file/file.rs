//! Reading and writing case files of FusedInferAttentionScore.

use std::path::Path;

use ascend_spec::declared::DeclaredOperator;
use ascend_spec::operator::Kind;
use ascend_spec::ops::fused_infer_attention_score::Version;

use super::header::Header;
use super::metadata::{self, Metadata};
use super::read_file::read_file;
use super::stored;
use super::tensor::CaseTensor;
use super::values::{self, number};
use super::write_file::write_file;
use super::{Case, CaseError, MaskKind, Parameter};

/// The operator of these cases.
const OPERATOR: DeclaredOperator = DeclaredOperator::FusedInferAttentionScore;

impl Case {
    /// Most bytes of a case file.
    pub const MOST_BYTES: u64 = 1 << 32;

    /// Reads a case file.
    ///
    /// # Errors
    /// [`CaseError`]: the file cannot be read, has more than [`MOST_BYTES`](Self::MOST_BYTES), is no case, or has
    /// something that this crate does not know.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, CaseError> {
        Self::from_bytes(&read_file(path, Self::MOST_BYTES)?)
    }

    /// Writes a case file, as [`write_file`](super::write_file) does. Equal cases make equal files.
    ///
    /// # Errors
    /// As for [`Case::to_bytes`]; [`CaseError::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), CaseError> {
        write_file(path, &self.to_bytes()?)
    }

    /// Reads a case from the content of a file.
    ///
    /// # Errors
    /// [`CaseError`]: the content is no case, is one of another operator ([`AnyCase`](super::AnyCase) reads those), or has
    /// something that this crate does not know.
    pub fn from_bytes(file: &[u8]) -> Result<Self, CaseError> {
        let header = Header::read(file)?;
        match metadata::operator(&header.metadata)? {
            OPERATOR => Self::of_header(&header, file),
            other => Err(CaseError::OtherOp(other.name())),
        }
    }

    /// Reads a case of this operator from a file and its header.
    pub(super) fn of_header(header: &Header, file: &[u8]) -> Result<Self, CaseError> {
        let mut case = Self::default();
        let arguments = &mut case.arguments;
        let (metadata, stored) =
            Metadata::read(
                &header.metadata,
                OPERATOR,
                |key, text| match Parameter::from_name(key) {
                    Some(parameter) => values::read(parameter.info(), text)?
                        .map_or(Ok(false), |value| {
                            Ok(arguments.set_value(parameter, value).is_ok())
                        }),
                    None => Ok(false),
                },
            )?;
        let kind = |name: &str| Parameter::from_name(name).map(|known| known.info().kind);
        let is_list = |name: &str| kind(name) == Some(Kind::TensorList);
        for (name, tensor) in stored.tensors(header, file, is_list)? {
            match (name.as_str(), Parameter::from_name(&name)) {
                ("attention_out", _) => case.attention_out = Some(tensor),
                ("softmax_lse", _) => case.softmax_lse = Some(tensor),
                (_, Some(parameter)) if parameter.info().kind.is_tensor() => {
                    case.arguments.set_tensor(parameter, tensor);
                }
                _ => return Err(CaseError::UnknownTensor(name)),
            }
        }
        let tensor = case.tensor(Parameter::AttenMask).is_some();
        let implied = if tensor {
            MaskKind::Tensor
        } else {
            MaskKind::None
        };
        case = Self {
            name: metadata.name,
            note: metadata.note,
            mask: metadata.mask.unwrap_or(implied),
            expect: metadata.expect,
            tolerance: metadata.tolerance,
            rms_rtol: metadata.rms_rtol,
            soc_name: metadata.soc_name,
            cann: metadata.cann,
            op_version: metadata.op_version.and_then(|number| {
                Version::ALL
                    .get(usize::from(number).checked_sub(1)?)
                    .copied()
            }),
            expect_rule: metadata.expect_rule,
            portable_since: metadata.portable_since,
            out_dtype: metadata.out_dtype,
            ..case
        };
        case.consistent()?;
        Ok(case)
    }

    /// Returns the metadata of the case's file, apart from the arguments.
    fn metadata(&self) -> Metadata {
        Metadata {
            name: self.name.clone(),
            note: self.note.clone(),
            mask: Some(self.mask),
            expect: self.expect,
            tolerance: self.tolerance,
            softmax_tolerance: None,
            rms_rtol: self.rms_rtol,
            soc_name: self.soc_name.clone(),
            cann: self.cann,
            op_version: self.op_version.map(Version::number),
            expect_rule: self.expect_rule.clone(),
            portable_since: self.portable_since,
            out_dtype: self.out_dtype,
            group: None,
        }
    }

    /// Returns the content of a file of this case.
    ///
    /// # Errors
    /// [`CaseError`]: the parts do not fit together, a number is not finite, or safetensors lacks an element type.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.consistent()?;
        self.writable()?;
        let mut entries = self.metadata().write(OPERATOR)?;
        for &parameter in Parameter::ALL {
            if parameter == Parameter::PseType && self.arguments.pse_type == 0 {
                // Readers of earlier releases do not know the parameter, so that its default is left out.
                continue;
            }
            let text = self.arguments.value(parameter).and_then(values::text);
            entries.extend(text.map(|text| (parameter.name(), text)));
        }
        stored::write(entries, &self.named_tensors())
    }

    /// Refuses a scale that is no number and element types that safetensors lacks, which a file cannot hold.
    pub(super) fn writable(&self) -> Result<(), CaseError> {
        number("scale", &format!("{:?}", self.arguments.scale))?;
        self.metadata().write(OPERATOR)?;
        stored::writable(&self.named_tensors())
    }

    /// Every tensor of the file and its name there.
    fn named_tensors(&self) -> Vec<(String, &CaseTensor)> {
        let mut named = Vec::new();
        for (argument, tensor) in self.arguments.each_tensor() {
            let count = self.arguments.tensors(argument.parameter).len();
            named.push((
                stored::name_of(argument.name(), argument.index, count),
                tensor,
            ));
        }
        for (tensor, name) in [
            (&self.attention_out, "attention_out"),
            (&self.softmax_lse, "softmax_lse"),
        ] {
            named.extend(tensor.as_ref().map(|tensor| (name.to_owned(), tensor)));
        }
        named
    }
}
