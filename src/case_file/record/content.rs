//! A call and the bytes of its tensors, made into a case.

use std::borrow::Cow;
use std::ops::Range;

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::fused_infer_attention_score::{
    Argument, Arguments, FiaCall, Parameter, Version,
};
use ascend_spec::{Cann, CompressedMask, DType, Soc, SparseMode, Target, TensorDesc};

use super::blocks::{Blocks, has_blocks};
use super::too_large;
use crate::case_file::{Case, CaseTensor, MaskKind, ParameterCase, Tolerance};
use crate::mask::{HostMask, MaskForm};

/// Copies a part of a packed tensor, which begins the given number of bytes after the tensor's first element.
pub(super) type Read<'a> = dyn Fn(Argument, usize, &mut [u8]) -> Result<(), String> + 'a;

/// A call whose tensors are read by a function, in whatever memory they are.
pub(super) struct Content<'a> {
    /// The chip's name.
    pub(super) soc_name: Option<&'a str>,
    pub(super) target: Option<Target>,
    /// The version that the call goes to or, before one is chosen, the oldest that it may go to.
    pub(super) version: Version,
    pub(super) portable_since: Option<Cann>,
    pub(super) arguments: Arguments<TensorDesc>,
    /// Whether an output has memory to read.
    pub(super) has_memory: &'a dyn Fn(Parameter) -> bool,
    pub(super) read: &'a Read<'a>,
}

impl Content<'_> {
    fn inputs(&self) -> impl Iterator<Item = (Argument, &TensorDesc)> {
        let all = self.arguments.each_tensor();
        all.filter(|(argument, _)| !argument.is_output())
    }

    fn outputs(&self) -> impl Iterator<Item = (Argument, &TensorDesc)> {
        let all = self.arguments.each_tensor();
        all.filter(|(argument, _)| argument.is_output())
    }

    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        let mut case = ParameterCase::of(AnyArguments::FusedInferAttentionScore(
            self.arguments.clone(),
        ));
        case.id = id.to_owned();
        case.soc = self.target.map(|target| target.soc);
        case.release = self.target.map(|target| target.cann);
        case.version = Some(self.version.number());
        case.accepted = accepted
            .map(|accepted| (self.target.map(|target| target.cann), accepted))
            .into_iter()
            .collect();
        case.about = about.to_owned();
        case
    }

    /// Refuses a call whose outputs no case can hold, with the reason.
    pub(super) fn admits(&self) -> Result<(), String> {
        packed(named(self.outputs()))?;
        let call = self.arguments.call();
        let given = [call.attention_out, call.softmax_lse];
        let implied = call.implied_outputs();
        let shape = |desc: Option<TensorDesc>| desc.map(|desc| desc.shape);
        if given.map(shape) != [implied.0, implied.1].map(shape) {
            return Err("its outputs are not those that follow from its inputs".to_owned());
        }
        Ok(())
    }

    /// Returns the call with its data, or the reason why no case can hold them, such as data of more than `room`
    /// bytes, or a case for which the contract has another verdict than `verdict`, the call's own.
    pub(super) fn case(
        &self,
        room: u64,
        verdict: Option<Cow<'static, str>>,
    ) -> Result<Case, String> {
        packed(named(self.inputs()))?;
        let blocks = self.blocks()?;
        if blocks.is_some() {
            let case = self.with_data(blocks.as_ref(), room)?;
            if self.verdict(&case.describe().call()) == verdict {
                return Ok(case);
            }
        }
        // A call that is wrong because of blocks that it does not read is wrong with all of them.
        let case = self.with_data(None, room)?;
        match self.verdict(&case.describe().call()) == verdict {
            true => Ok(case),
            false => Err("a case of it would be judged otherwise".to_owned()),
        }
    }

    /// Lets the case of the call expect the current outputs.
    pub(super) fn expect_outputs(
        &self,
        case: &mut Case,
        tolerance: Tolerance,
    ) -> Result<(), String> {
        let outputs = self.outputs();
        for (argument, desc) in outputs.filter(|(of, _)| (self.has_memory)(of.parameter)) {
            // Outputs of types that cannot be converted to FLOAT are not expected.
            let bytes = self.bytes(argument, 0..bytes_of(desc))?;
            let expected = expectation(argument.name(), desc, bytes, &mut case.note);
            match argument.parameter {
                Parameter::SoftmaxLse => case.softmax_lse = expected,
                _ => case.attention_out = expected,
            }
            case.tolerance = Some(tolerance);
        }
        Ok(())
    }

    /// Makes a case of the call and its data; from a paged cache it copies only `blocks`, if they are known.
    fn with_data(&self, blocks: Option<&Blocks>, room: u64) -> Result<Case, String> {
        let parts = |of: Parameter| blocks.filter(|_| has_blocks(of, &self.arguments));
        let bytes = self.inputs().map(|(argument, desc)| {
            let all = bytes_of(desc);
            match parts(argument.parameter) {
                Some(blocks) => all / axis(desc, 0).max(1) * blocks.read.len(),
                None => all,
            }
        });
        let bytes = bytes.fold(0u64, |sum, bytes| sum.saturating_add(bytes as u64));
        if let Some(why) = too_large(bytes, room) {
            return Err(why);
        }
        let call = self.arguments.call();
        let dtype = |desc: Option<TensorDesc>| desc.map(|desc| desc.dtype);
        let implied = dtype(call.implied_outputs().0);
        let mut case = Case {
            arguments: call.attributes(),
            soc_name: self.target.and(self.soc_name).map(str::to_owned),
            cann: self.target.map(|target| target.cann),
            op_version: Some(self.version),
            portable_since: self.portable_since,
            out_dtype: dtype(call.attention_out).filter(|given| Some(*given) != implied),
            ..Case::default()
        };
        for (argument, desc) in self.inputs() {
            let parameter = argument.parameter;
            let (shape, data) = match (parts(parameter), blocks) {
                (Some(blocks), _) => {
                    let count = i64::try_from(blocks.read.len()).unwrap_or(i64::MAX);
                    (
                        desc.shape.with(0, count),
                        self.read_blocks(argument, desc, &blocks.read)?,
                    )
                }
                (None, Some(blocks)) if parameter == Parameter::BlockTable => {
                    let entries = blocks.table.iter().flat_map(|entry| entry.to_le_bytes());
                    (desc.shape, entries.collect())
                }
                _ => (desc.shape, self.bytes(argument, 0..bytes_of(desc))?),
            };
            if parameter == Parameter::AttenMask
                && SparseMode::from_acl(self.arguments.sparse_mode)
                    .is_some_and(SparseMode::takes_compressed_mask)
                && is_compressed(self.target.map(|target| target.soc), desc, &data)
            {
                case.mask = MaskKind::Compressed;
                continue;
            }
            let tensor = CaseTensor::with_dims(desc.dtype, shape, data).map_err(text)?;
            if parameter == Parameter::AttenMask {
                case.mask = MaskKind::Tensor;
            }
            case.arguments.set_tensor(parameter, tensor);
        }
        case.writable().map_err(text)?;
        Ok(case)
    }

    /// The blocks that a paged call reads; `None` for other calls, and for tensors that are not those of a paged
    /// cache.
    fn blocks(&self) -> Result<Option<Blocks>, String> {
        let Some(table) = &self.arguments.block_table else {
            return Ok(None);
        };
        let mut counts = self
            .inputs()
            .filter(|(of, _)| has_blocks(of.parameter, &self.arguments))
            .map(|(_, desc)| axis(desc, 0));
        let blocks = counts.next().unwrap_or(0);
        let fits = table.dtype == DType::Int32 && table.shape.rank() == 2;
        if !fits || blocks == 0 || counts.any(|count| count != blocks) {
            return Ok(None);
        }
        let entries = self.bytes(Parameter::BlockTable.into(), 0..bytes_of(table))?;
        let (entries, _) = entries.as_chunks::<4>();
        let entries: Vec<i32> = entries
            .iter()
            .map(|&entry| i32::from_le_bytes(entry))
            .collect();
        Ok(Some(Blocks::new(
            &entries,
            axis(table, 1),
            blocks,
            &self.arguments,
        )))
    }

    /// Checks `call` against the contract, for this call's version and target. Returns the rule that refuses it, or
    /// the feature that is not supported; `None` if neither.
    pub(super) fn verdict(&self, call: &FiaCall<'_>) -> Option<Cow<'static, str>> {
        let target = self.target?;
        match call.check(Version::oldest_on(call, self.version, target), target) {
            Ok(_) => None,
            Err(violation) if violation.is_unsupported() => Some(violation.given.into()),
            Err(violation) => Some(violation.rule.id.into()),
        }
    }

    fn bytes(&self, argument: Argument, bytes: Range<usize>) -> Result<Vec<u8>, String> {
        let mut data = Vec::new();
        data.try_reserve_exact(bytes.len()).map_err(text)?;
        data.resize(bytes.len(), 0);
        (self.read)(argument, bytes.start, &mut data)?;
        Ok(data)
    }

    /// Reads some entries of a tensor's first axis, in this order.
    fn read_blocks(
        &self,
        argument: Argument,
        desc: &TensorDesc,
        read: &[usize],
    ) -> Result<Vec<u8>, String> {
        let block = bytes_of(desc) / axis(desc, 0).max(1);
        let mut data = Vec::new();
        let bytes = block.saturating_mul(read.len());
        data.try_reserve_exact(bytes).map_err(text)?;
        data.resize(bytes, 0);
        for (&number, part) in read.iter().zip(data.chunks_exact_mut(block.max(1))) {
            (self.read)(argument, number.saturating_mul(block), part)?;
        }
        Ok(data)
    }
}

/// Tensors with their names.
fn named<'a>(
    tensors: impl Iterator<Item = (Argument, &'a TensorDesc)>,
) -> impl Iterator<Item = (&'static str, &'a TensorDesc)> {
    tensors.map(|(argument, desc)| (argument.name(), desc))
}

/// Refuses tensors that a case cannot describe, such as strided ones.
pub(super) fn packed<'a>(
    mut tensors: impl Iterator<Item = (&'static str, &'a TensorDesc)>,
) -> Result<(), String> {
    let strided = |desc: &TensorDesc| !desc.is_contiguous() || !desc.format.is_plain();
    match tensors.find(|(_, desc)| strided(desc)) {
        Some((name, desc)) => Err(format!("{name} is not packed: {desc}")),
        None => Ok(()),
    }
}

/// Returns the computed output that a case expects. An output with NaN, which would mean that elements are not
/// specified, is not expected, and the case's note reports it.
pub(super) fn expectation(
    name: &'static str,
    desc: &TensorDesc,
    bytes: Vec<u8>,
    note: &mut String,
) -> Option<CaseTensor> {
    let expected = expected(desc, bytes)?;
    let count = nans(&expected);
    if count == 0 {
        return Some(expected);
    }
    let about = format!("{count} NaN in {name}: nothing is expected of it");
    tracing::warn!("recorded with {about}");
    if !note.is_empty() {
        note.push_str("; ");
    }
    note.push_str(&about);
    None
}

/// An output as a case expects it: FLOAT; `None` if its type has no such form.
pub(crate) fn expected(desc: &TensorDesc, bytes: Vec<u8>) -> Option<CaseTensor> {
    let tensor = CaseTensor::with_dims(desc.dtype, desc.shape, bytes).ok()?;
    CaseTensor::from_f32(DType::Float, tensor.shape(), &tensor.to_f32()?).ok()
}

/// How many elements of an expected output are NaN, which would let any number pass.
pub(crate) fn nans(expected: &CaseTensor) -> usize {
    let values = expected.to_f32().unwrap_or_default();
    values.iter().filter(|value| value.is_nan()).count()
}

/// Whether a mask is the compressed causal mask, which a reader of the case makes by itself.
fn is_compressed(soc: Option<Soc>, desc: &TensorDesc, bytes: &[u8]) -> bool {
    is_template(CompressedMask::Causal, MaskForm::made_for(soc), desc, bytes)
}

/// Whether a mask is a template in this form.
pub(super) fn is_template(
    template: CompressedMask,
    form: MaskForm,
    desc: &TensorDesc,
    bytes: &[u8],
) -> bool {
    let template = template.geometry();
    let size = [template.q_len(), template.kv_len()].map(|len| i64::try_from(len).unwrap_or(0));
    desc.dtype == form.dtype()
        && *desc.shape == size
        && HostMask::of(&template, form).is_ok_and(|mask| mask.bytes() == bytes)
}

fn axis(desc: &TensorDesc, axis: usize) -> usize {
    let axis = desc.shape.get(axis).copied().unwrap_or(0);
    usize::try_from(axis).unwrap_or(0)
}

/// Bytes of a packed tensor.
pub(super) fn bytes_of(desc: &TensorDesc) -> usize {
    let bytes = TensorDesc::packed(desc.dtype, desc.shape).byte_range();
    bytes.map_or(0, |range| usize::try_from(range.end).unwrap_or(usize::MAX))
}

pub(super) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
