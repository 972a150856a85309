//! A call and the bytes of its tensors, made into a case.

use std::borrow::Cow;
use std::ops::Range;

use ascend_spec::declared::{AnyArgument, AnyArguments};
use ascend_spec::ops::fused_infer_attention_score::{Arguments, Parameter};
use ascend_spec::{Cann, CompressedMask, DType, Target, TensorDesc};

use super::blocks::{Blocks, has_blocks};
use super::{Recorded, too_large};
use crate::case_file::metadata::takes;
use crate::case_file::{Case, CaseTensor, MaskSource, ParameterCase, Tolerance, compressed_mask, is_input, mask_form};
use crate::mask::{HostMask, MaskForm};

/// Copies a part of a packed tensor, which begins the given number of bytes after the tensor's first element.
pub(super) type Read<'a> = dyn Fn(AnyArgument, usize, &mut [u8]) -> Result<(), String> + 'a;

/// A call whose tensors are read by functions, in whatever memory they are.
pub(super) struct Content<'a> {
    /// The chip's name.
    pub(super) soc_name: Option<&'a str>,
    pub(super) target: Option<Target>,
    /// The version that the call goes to or, before one is chosen, the oldest that it may go to.
    pub(super) version: u8,
    pub(super) portable_since: Option<Cann>,
    pub(super) arguments: AnyArguments<TensorDesc>,
    /// Whether an output has memory to read.
    pub(super) has_memory: &'a dyn Fn(&str) -> bool,
    /// Reads the tensors as they are before the call.
    pub(super) before: &'a Read<'a>,
    /// Reads the tensors as they are after the call.
    pub(super) after: &'a Read<'a>,
}

/// What is written with a recorded call.
pub(super) struct Labels<'a> {
    pub(super) name: &'a str,
    /// The error of a call that was refused or failed.
    pub(super) note: &'a str,
    /// Whether the operator accepts the call, if that is known.
    pub(super) accepted: Option<bool>,
}

impl Content<'_> {
    fn inputs(&self) -> impl Iterator<Item = (AnyArgument, &TensorDesc)> {
        let operator = self.arguments.operator();
        let all = self.arguments.each_tensor();
        all.filter(move |(argument, _)| is_input(operator, argument.parameter))
    }

    /// The outputs that the call writes; a reserved output without elements is none of them.
    fn outputs(&self) -> impl Iterator<Item = (AnyArgument, &TensorDesc)> {
        let all = self.arguments.each_tensor();
        all.filter(|(argument, desc)| argument.parameter.kind.is_output() && !desc.is_empty())
    }

    /// The arguments of FusedInferAttentionScore, if the call is one of it.
    fn attention(&self) -> Option<&Arguments<TensorDesc>> {
        match &self.arguments {
            AnyArguments::FusedInferAttentionScore(arguments) => Some(arguments),
            _ => None,
        }
    }

    /// Returns the call as a case, which `finish` completes. `room` is the most bytes of data, or the reason why none
    /// can be copied: with such a reason, or where no case can hold the call, it is recorded without data.
    pub(super) fn recorded(
        &self,
        room: Result<u64, String>,
        labels: &Labels<'_>,
        finish: impl FnOnce(&Self, &mut Case) -> Result<(), String>,
    ) -> Recorded {
        let case = room.and_then(|room| {
            let mut case = self.case(room)?;
            labels.name.clone_into(&mut case.name);
            labels.note.clone_into(&mut case.note);
            finish(self, &mut case)?;
            case.consistent().map_err(text)?;
            Ok(case)
        });
        match case {
            Ok(case) => Recorded::Case(Box::new(case)),
            Err(why) => {
                let note = match labels.note {
                    "" => &format!("without data: {why}"),
                    note => &format!("{note} (without data: {why})"),
                };
                let call = Box::new(self.parameters(&Labels { note, ..*labels }));
                Recorded::Parameters { call, why }
            }
        }
    }

    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(&self, labels: &Labels<'_>) -> ParameterCase {
        let release = self.target.map(|target| target.cann);
        ParameterCase {
            id: labels.name.to_owned(),
            soc: self.target.map(|target| target.soc),
            release,
            version: Some(self.version),
            accepted: labels.accepted.map(|accepted| (release, accepted)).into_iter().collect(),
            about: labels.note.to_owned(),
            ..ParameterCase::of(self.arguments.clone())
        }
    }

    /// Refuses a call whose outputs are not those that a case of it implies, with the reason.
    pub(super) fn admits_outputs(&self, case: &Case) -> Result<(), String> {
        packed(self.outputs())?;
        let implied = case.describe();
        let differs = |(argument, desc): (AnyArgument, &TensorDesc)| {
            let implied = implied.tensors(argument.parameter.name).first();
            implied.is_none_or(|implied| (implied.dtype, implied.shape) != (desc.dtype, desc.shape))
        };
        match self.outputs().any(differs) {
            true => Err("its outputs are not those that follow from its inputs".to_owned()),
            false => Ok(()),
        }
    }

    /// Returns the call with its data, or the reason why no case can hold them, such as data of more than `room`
    /// bytes, or a case for which the contract has another verdict than for the call.
    pub(super) fn case(&self, room: u64) -> Result<Case, String> {
        let verdict = self.verdict(&self.arguments);
        packed(self.inputs())?;
        let blocks = self.blocks()?;
        if blocks.is_some() {
            let case = self.with_data(blocks.as_ref(), room)?;
            if self.case_verdict(&case) == verdict {
                return Ok(case);
            }
        }
        // A call that is wrong because of blocks that it does not read is wrong with all of them.
        let case = self.with_data(None, room)?;
        match self.case_verdict(&case) == verdict {
            true => Ok(case),
            false => Err("a case of it would be judged otherwise".to_owned()),
        }
    }

    /// Lets the case of the call expect the current outputs. Outputs of types that cannot be converted to FLOAT are not
    /// expected.
    pub(super) fn expect_outputs(&self, case: &mut Case, tolerance: Tolerance) -> Result<(), String> {
        for (argument, desc) in self.outputs() {
            let name = argument.parameter.name;
            if !(self.has_memory)(name) {
                continue;
            }
            let bytes = read(self.after, argument, 0..bytes_of(desc))?;
            let expected = expectation(name, desc, bytes, &mut case.note);
            case.expected.extend(expected.map(|expected| (name, expected)));
        }
        case.tolerance = Some(tolerance).filter(|_| !case.expected.is_empty());
        self.admits_outputs(case)
    }

    /// Makes a case of the call and its data; from a paged cache it copies only `blocks`, if they are known.
    fn with_data(&self, blocks: Option<&Blocks>, room: u64) -> Result<Case, String> {
        let parts = |argument: AnyArgument| {
            let parameter = Parameter::from_name(argument.parameter.name)?;
            let paged = self.attention()?;
            blocks.filter(|_| has_blocks(parameter, paged))
        };
        let bytes = self.inputs().map(|(argument, desc)| {
            let all = bytes_of(desc);
            match parts(argument) {
                Some(blocks) => all / axis(desc, 0).max(1) * blocks.read.len(),
                None => all,
            }
        });
        let bytes = bytes.fold(0u64, |sum, bytes| sum.saturating_add(bytes as u64));
        if let Some(why) = too_large(bytes, room) {
            return Err(why);
        }
        let operator = self.arguments.operator();
        let mut case = Case {
            soc_name: self.target.and(self.soc_name).map(str::to_owned),
            cann: self.target.map(|target| target.cann),
            op_version: Some(self.version),
            portable_since: self.portable_since,
            ..Case::new("", self.arguments.attributes())
        };
        let soc = self.target.map(|target| target.soc);
        let template = compressed_mask(&self.arguments);
        for (argument, desc) in self.inputs() {
            let name = argument.parameter.name;
            let (shape, data) = match (parts(argument), blocks) {
                (Some(blocks), _) => {
                    let count = i64::try_from(blocks.read.len()).unwrap_or(i64::MAX);
                    (desc.shape.with(0, count), self.read_blocks(argument, desc, &blocks.read)?)
                }
                (None, Some(blocks)) if name == Parameter::BlockTable.name() => {
                    let entries = blocks.table.iter().flat_map(|entry| entry.to_le_bytes());
                    (desc.shape, entries.collect())
                }
                _ => (desc.shape, read(self.before, argument, 0..bytes_of(desc))?),
            };
            if name == "atten_mask" {
                let form = mask_form(operator, soc);
                if template.is_some_and(|template| is_template(template, form, desc, &data)) {
                    case.mask = MaskSource::Compressed;
                    continue;
                }
                case.mask = MaskSource::Tensor;
            }
            let tensor = CaseTensor::with_dims(desc.dtype, shape, data).map_err(text)?;
            case.arguments.set_tensor(name, tensor).map_err(text)?;
        }
        let dtype = |arguments: &AnyArguments<TensorDesc>| {
            let out = arguments.tensors("attention_out").first();
            out.map(|out| out.dtype)
        };
        let dtype_of_call = dtype(&self.arguments);
        if takes(operator, "out_dtype") && dtype_of_call != dtype(&case.describe()) {
            case.out_dtype = dtype_of_call;
        }
        case.writable().map_err(text)?;
        Ok(case)
    }

    /// The blocks that a paged call reads; `None` for other calls, and for tensors that are not those of a paged
    /// cache.
    fn blocks(&self) -> Result<Option<Blocks>, String> {
        let Some(arguments) = self.attention() else {
            return Ok(None);
        };
        let Some(table) = &arguments.block_table else {
            return Ok(None);
        };
        let mut counts = (arguments.each_tensor())
            .filter(|(argument, _)| has_blocks(argument.parameter, arguments))
            .map(|(_, desc)| axis(desc, 0));
        let blocks = counts.next().unwrap_or(0);
        let fits = table.dtype == DType::Int32 && table.shape.rank() == 2;
        if !fits || blocks == 0 || counts.any(|count| count != blocks) {
            return Ok(None);
        }
        let argument = AnyArgument { parameter: Parameter::BlockTable.info(), index: 0 };
        let entries = read(self.before, argument, 0..bytes_of(table))?;
        let (entries, _) = entries.as_chunks::<4>();
        let entries: Vec<i32> = entries.iter().map(|&entry| i32::from_le_bytes(entry)).collect();
        Ok(Some(Blocks::new(&entries, axis(table, 1), blocks, arguments)))
    }

    /// The verdict on a case of the call. Outputs that its inputs do not imply are those of the call.
    fn case_verdict(&self, case: &Case) -> Option<Cow<'static, str>> {
        let mut described = case.describe();
        for (argument, desc) in self.outputs() {
            let name = argument.parameter.name;
            if described.tensors(name).is_empty() {
                // This cannot fail: the parameter is the operator's own.
                let _ = described.set_tensor(name, *desc);
            }
        }
        self.verdict(&described)
    }

    /// Checks `call` against the contract, for this call's version and target. Returns the rule that refuses it, or
    /// the feature that is not supported; `None` if neither.
    fn verdict(&self, call: &AnyArguments<TensorDesc>) -> Option<Cow<'static, str>> {
        let target = self.target?;
        let version = call.chosen_on(self.version, target);
        match call.check(version, target, &mut |_| {}) {
            Ok(()) => None,
            Err(violation) if violation.is_unsupported() => Some(violation.given.into()),
            Err(violation) => Some(violation.rule.id.into()),
        }
    }

    /// Reads some entries of a tensor's first axis, in this order.
    fn read_blocks(&self, argument: AnyArgument, desc: &TensorDesc, read: &[usize]) -> Result<Vec<u8>, String> {
        let block = bytes_of(desc) / axis(desc, 0).max(1);
        let mut data = zeros(block.saturating_mul(read.len()))?;
        for (&number, part) in read.iter().zip(data.chunks_exact_mut(block.max(1))) {
            (self.before)(argument, number.saturating_mul(block), part)?;
        }
        Ok(data)
    }
}

/// A number of bytes, all 0.
fn zeros(count: usize) -> Result<Vec<u8>, String> {
    let mut data = Vec::new();
    data.try_reserve_exact(count).map_err(text)?;
    data.resize(count, 0);
    Ok(data)
}

fn read(from: &Read<'_>, argument: AnyArgument, bytes: Range<usize>) -> Result<Vec<u8>, String> {
    let mut data = zeros(bytes.len())?;
    from(argument, bytes.start, &mut data)?;
    Ok(data)
}

/// Refuses tensors that a case cannot describe, such as strided ones.
fn packed<'a>(mut tensors: impl Iterator<Item = (AnyArgument, &'a TensorDesc)>) -> Result<(), String> {
    let strided = |desc: &TensorDesc| !desc.is_contiguous() || !desc.format.is_plain();
    match tensors.find(|(_, desc)| strided(desc)) {
        Some((argument, desc)) => Err(format!("{} is not packed: {desc}", argument.parameter.name)),
        None => Ok(()),
    }
}

/// Returns the computed output that a case expects. An output with NaN, which would mean that elements are not
/// specified, is not expected, and the case's note reports it.
fn expectation(name: &'static str, desc: &TensorDesc, bytes: Vec<u8>, note: &mut String) -> Option<CaseTensor> {
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

/// An output as a case expects it: FLOAT, or positions in INT32; `None` if its type has no such form.
pub(crate) fn expected(desc: &TensorDesc, bytes: Vec<u8>) -> Option<CaseTensor> {
    let tensor = CaseTensor::with_dims(desc.dtype, desc.shape, bytes).ok()?;
    if tensor.dtype() == DType::Int32 {
        return Some(tensor);
    }
    CaseTensor::from_f32(DType::Float, tensor.shape(), &tensor.to_f32()?).ok()
}

/// How many elements of an expected output are NaN, which would let any number pass.
pub(crate) fn nans(expected: &CaseTensor) -> usize {
    let values = expected.to_f32().unwrap_or_default();
    values.iter().filter(|value| value.is_nan()).count()
}

/// Whether a mask is a template in this form.
fn is_template(template: CompressedMask, form: MaskForm, desc: &TensorDesc, bytes: &[u8]) -> bool {
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
