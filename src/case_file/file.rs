//! Reading and writing case files.

use std::collections::BTreeMap;
use std::path::Path;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, ParameterInfo};

use super::file_access::{read_file, write_file};
use super::header::Header;
use super::metadata;
use super::stored;
use super::tensor::CaseTensor;
use super::{Case, CaseArguments, CaseError, MaskSource, is_input};

impl Case {
    /// Most bytes of a case file.
    pub const MOST_BYTES: u64 = 1 << 32;

    /// Reads a case file of any operator.
    ///
    /// # Errors
    /// [`CaseError`]: the file cannot be read, has more than [`MOST_BYTES`](Self::MOST_BYTES), is no case, or has
    /// something that this crate does not know.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, CaseError> {
        Self::from_bytes(&read_file(path, Self::MOST_BYTES)?)
    }

    /// Reads a case of any operator from the content of a file.
    ///
    /// # Errors
    /// [`CaseError`]: the content is no case, or has something that this crate does not know.
    pub fn from_bytes(file: &[u8]) -> Result<Self, CaseError> {
        let header = Header::read(file)?;
        let operator = metadata::operator(&header.metadata)?;
        let (mut case, stored) = metadata::read(&header.metadata, operator)?;
        let is_list = |name: &str| {
            let parameter = operator.parameter_named(name);
            parameter.is_some_and(|parameter| parameter.kind == Kind::TensorList)
        };
        for (name, tensor) in stored.tensors(&header, file, is_list)? {
            match expected_parameter(operator, &name) {
                Some(output) => case.expected.push((output.name, tensor)),
                None => (case.arguments.set_tensor(&name, tensor))
                    .map_err(|_| CaseError::unknown_tensor(&name, operator))?,
            }
        }
        case.expected.sort_by_key(|(name, _)| operator.parameters().position(|parameter| parameter.name == *name));
        let has_kind = header.metadata.contains_key("atten_mask_kind");
        if !has_kind && !case.arguments.tensors("atten_mask").is_empty() {
            case.mask = MaskSource::Tensor;
        }
        case.consistent()?;
        Ok(case)
    }
}

/// What files call the rows of InplaceFusedCausalConv1d after the call: they are named as those of FusedCausalConv1d.
const NEW_ROWS: &str = "y";

/// Whether a parameter is the rows that become [`NEW_ROWS`].
fn has_new_rows(operator: DeclaredOperator, parameter: &str) -> bool {
    operator == DeclaredOperator::InplaceFusedCausalConv1d && parameter == "x"
}

/// The output that a tensor of a file is expected of: one of its name or, for a tensor of which a case also has the
/// content before the call, one of its name without `_out`.
fn expected_parameter(operator: DeclaredOperator, name: &str) -> Option<&'static ParameterInfo> {
    let (name, has_both) = match name.strip_suffix("_out") {
        _ if name == NEW_ROWS && has_new_rows(operator, "x") => ("x", true),
        Some(stem) if operator.parameter_named(name).is_none() && !has_new_rows(operator, stem) => (stem, true),
        _ => (name, false),
    };
    let output = operator.parameter_named(name)?;
    (output.kind.is_output() && is_input(operator, output) == has_both).then_some(output)
}

impl<A: CaseArguments> Case<A> {
    /// Writes a case file, as [`write_file`](super::write_file) does. Equal cases make equal files.
    ///
    /// # Errors
    /// As for [`Case::to_bytes`]; [`CaseError::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), CaseError> {
        write_file(path, &self.to_bytes()?)
    }

    /// Returns the content of a file of this case.
    ///
    /// # Errors
    /// [`CaseError`]: the parts do not fit together, a number is not finite, or safetensors lacks an element type.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.consistent()?;
        let arguments = self.arguments.by_name();
        let (entries, named) = self.parts(&arguments)?;
        stored::write(entries, &named)
    }

    /// Refuses what a file cannot hold: numbers that are not finite, and element types that safetensors lacks.
    pub(super) fn writable(&self) -> Result<(), CaseError> {
        self.parts(&self.arguments.by_name()).map(drop)
    }

    /// The metadata of the file, and every tensor with its name there.
    fn parts<'c>(
        &'c self,
        arguments: &AnyArguments<&'c CaseTensor>,
    ) -> Result<(BTreeMap<&'static str, String>, NamedTensors<'c>), CaseError> {
        let operator = arguments.operator();
        let mut entries = metadata::write(self.with((), Vec::new()), operator)?;
        for parameter in operator.parameters() {
            let text = metadata::value_text(arguments, parameter)?;
            entries.extend(text.map(|text| (parameter.name, text)));
        }
        let mut named = Vec::new();
        for (argument, tensor) in arguments.each_tensor() {
            let name = argument.parameter.name;
            let count = arguments.tensors(name).len();
            named.push((stored::name_of(name, argument.index, count), *tensor));
        }
        for (name, tensor) in &self.expected {
            let parameter = operator.parameter_named(name);
            let has_both = parameter.is_some_and(|parameter| is_input(operator, parameter));
            let name = match *name {
                name if has_new_rows(operator, name) => NEW_ROWS.to_owned(),
                name if has_both => format!("{name}_out"),
                name => name.to_owned(),
            };
            named.push((name, tensor));
        }
        stored::writable(&named)?;
        Ok((entries, named))
    }
}

/// Tensors with their names in a file.
type NamedTensors<'c> = Vec<(String, &'c CaseTensor)>;
