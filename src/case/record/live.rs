//! A call on a device, on its way into a file.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ascend_spec::fia::{FiaCall, Operand, Parameter, Version};
use ascend_spec::{Cann, CompressedMask, DType, Refusal, Soc, SparseMode, TensorDesc};

use super::blocks::{Blocks, has_blocks};
use super::too_large;
use crate::attention::Bindings;
use crate::case::{Attributes, Case, CaseTensor, MaskKind, ParameterCase, Tolerance};
use crate::error::Result;
use crate::mask::{HostMask, MaskForm};
use crate::runtime::{Context, capturing};
use crate::tensor::AnyTensor;

/// How long work on other streams that uses the inputs may take until these are given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call and its tensors.
#[derive(Clone)]
pub(crate) struct LiveCall {
    context: Arc<Context>,
    /// The version that the call goes to, or where none was chosen yet, the oldest that it may go to.
    version: Version,
    portable_since: Option<Cann>,
    attributes: Attributes,
    inputs: Vec<(Operand, AnyTensor)>,
    /// As described; the memory is missing where there is none yet.
    outputs: Vec<(Parameter, TensorDesc, Option<AnyTensor>)>,
}

impl LiveCall {
    /// A call with these tensors. Outputs that are not among them are as `call` describes them.
    pub(crate) fn new(
        context: &Arc<Context>,
        call: &FiaCall<'_>,
        mask: Option<&AnyTensor>,
        bindings: &impl Bindings,
        at_least: Version,
    ) -> Self {
        let version = context.target().map_or(at_least, |target| {
            Version::oldest_on(call, at_least, target)
        });
        let mut live = Self {
            context: Arc::clone(context),
            version,
            portable_since: None,
            attributes: Attributes::of(call),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        // Collecting does not fail.
        let _ = bindings.each(|operand, tensor| {
            match operand
                .parameter()
                .filter(|parameter| parameter.is_output())
            {
                Some(output) => (live.outputs).push((output, *tensor.desc(), Some(tensor.clone()))),
                None => live.inputs.push((operand, tensor.clone())),
            }
            Ok(())
        });
        let mask = mask.map(|mask| (Operand::AttenMask, mask.clone()));
        live.inputs.extend(mask);
        for output in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
            let given = live.outputs.iter().any(|(known, ..)| *known == output);
            if let (Some(desc), false) = (output.of(call), given) {
                live.outputs.push((output, *desc, None));
            }
        }
        live
    }

    /// Notes that every release from this one on was asked to take the call.
    pub(crate) fn portable_since(&mut self, release: Option<Cann>) {
        self.portable_since = release;
    }

    /// Shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        let inputs = self
            .inputs
            .iter()
            .map(|(operand, tensor)| (*operand, *tensor.desc()));
        let outputs = self
            .outputs
            .iter()
            .map(|(output, desc, _)| (Operand::from(*output), *desc));
        let tensors: Vec<_> = inputs.chain(outputs).collect();
        let mut case = ParameterCase::of(&self.attributes, &tensors);
        case.id = id.to_owned();
        let target = self.context.target().ok();
        case.soc = target.map(|target| target.soc);
        case.release = target.map(|target| target.cann);
        case.version = Some(self.version);
        case.accepted = accepted
            .map(|accepted| (target.map(|target| target.cann), accepted))
            .into_iter()
            .collect();
        case.about = about.to_owned();
        case
    }

    /// The call with its data, or why no case can have them. Work on the stream that it is launched on has to be over.
    pub(super) fn case(&self) -> Result<Case, String> {
        self.case_within(u64::MAX)
    }

    /// The case with its data, and with the current outputs as the expected ones.
    pub(super) fn case_with_outputs(&self, tolerance: Tolerance) -> Result<Case, String> {
        let mut case = self.case()?;
        for (output, desc, tensor) in &self.outputs {
            let Some(tensor) = tensor else { continue };
            // Of other types nothing is expected.
            let mut expected = expected(desc, read(tensor, 0..bytes_of(tensor))?);
            let count = expected.as_ref().map_or(0, nans);
            if count > 0 {
                // It would say that these elements are not specified.
                let about = format!(
                    "{count} NaN in {}: nothing is expected of it",
                    output.name()
                );
                tracing::warn!("recorded with {about}");
                case.note = [std::mem::take(&mut case.note), about]
                    .into_iter()
                    .filter(|part| !part.is_empty())
                    .collect::<Vec<_>>()
                    .join("; ");
                expected = None;
            }
            match output {
                Parameter::SoftmaxLse => case.softmax_lse = expected,
                _ => case.attention_out = expected,
            }
            case.tolerance = Some(tolerance);
        }
        Ok(case)
    }

    /// The case with its data, refused if these exceed `room` bytes.
    pub(super) fn case_within(&self, room: u64) -> Result<Case, String> {
        capturing::refuse("copying a call's inputs", "record it without a graph").map_err(text)?;
        let parameters = self.parameters("", None, "");
        let call = parameters.call();
        let implied = call.implied_outputs();
        if (call.attention_out, call.softmax_lse) != implied {
            return Err("its outputs are not those that follow from its inputs".to_owned());
        }
        for (operand, tensor) in &self.inputs {
            if !tensor.is_contiguous() || !tensor.desc().format.is_plain() {
                return Err(format!(
                    "{} is not packed: {}",
                    operand.name(),
                    tensor.desc()
                ));
            }
        }
        self.settle()?;
        let verdict = self.verdict(&call);
        let blocks = self.blocks()?;
        if blocks.is_some() {
            let case = self.with_data(blocks.as_ref(), room)?;
            if self.verdict(&case.describe().call(&case)) == verdict {
                return Ok(case);
            }
        }
        // A call that is wrong because of blocks that it does not read is wrong with all of them.
        let case = self.with_data(None, room)?;
        match self.verdict(&case.describe().call(&case)) == verdict {
            true => Ok(case),
            false => Err("a case of it would be judged otherwise".to_owned()),
        }
    }

    /// Copies the data.
    fn with_data(&self, blocks: Option<&Blocks>, room: u64) -> Result<Case, String> {
        let parts = |operand: Operand| blocks.filter(|_| has_blocks(operand, &self.attributes));
        let bytes = self.inputs.iter().map(|(operand, tensor)| {
            let all = bytes_of(tensor);
            match parts(*operand) {
                Some(blocks) => all / axis(tensor, 0).max(1) * blocks.read.len(),
                None => all,
            }
        });
        let bytes = bytes.fold(0u64, |sum, bytes| sum.saturating_add(bytes as u64));
        if let Some(why) = too_large(bytes) {
            return Err(why);
        }
        if bytes > room {
            return Err(format!(
                "{bytes} bytes of data, and this process may write {room} more"
            ));
        }
        let target = self.context.target().ok();
        let mut case = Case {
            attributes: self.attributes.clone(),
            soc_name: target.map(|_| self.context.soc_name().to_owned()),
            cann: target.map(|target| target.cann),
            op_version: Some(self.version),
            portable_since: self.portable_since,
            ..Case::default()
        };
        for (operand, tensor) in &self.inputs {
            let desc = tensor.desc();
            let (shape, data) = match (parts(*operand), blocks) {
                (Some(blocks), _) => {
                    let count = i64::try_from(blocks.read.len()).unwrap_or(i64::MAX);
                    (
                        desc.shape.with(0, count),
                        read_blocks(tensor, &blocks.read)?,
                    )
                }
                (None, Some(blocks)) if *operand == Operand::BlockTable => {
                    let entries = blocks.table.iter().flat_map(|entry| entry.to_le_bytes());
                    (desc.shape, entries.collect())
                }
                _ => (desc.shape, read(tensor, 0..bytes_of(tensor))?),
            };
            if *operand == Operand::AttenMask
                && SparseMode::from_acl(self.attributes.sparse_mode)
                    .is_some_and(SparseMode::takes_compressed_mask)
                && is_compressed(self.context.soc().ok(), desc, &data)
            {
                case.mask = MaskKind::Compressed;
                continue;
            }
            let tensor = CaseTensor::with_dims(desc.dtype, shape, data).map_err(text)?;
            match operand.parameter() {
                Some(parameter) => {
                    if parameter == Parameter::AttenMask {
                        case.mask = MaskKind::Tensor;
                    }
                    case.tensors.insert(parameter, tensor);
                }
                None if matches!(operand, Operand::Key(_)) => case.key.push(tensor),
                None => case.value.push(tensor),
            }
        }
        case.writable().map_err(text)?;
        Ok(case)
    }

    /// The blocks that a paged call reads; `None` for other calls, and where its tensors do not say.
    fn blocks(&self) -> Result<Option<Blocks>, String> {
        let mut tables = self.inputs.iter();
        let table = tables.find(|(operand, _)| *operand == Operand::BlockTable);
        let Some((_, table)) = table else {
            return Ok(None);
        };
        let paged = self.inputs.iter();
        let mut counts = paged
            .filter(|(operand, _)| has_blocks(*operand, &self.attributes))
            .map(|(_, tensor)| axis(tensor, 0));
        let blocks = counts.next().unwrap_or(0);
        let fits = table.dtype() == DType::Int32 && table.shape().len() == 2;
        if !fits || blocks == 0 || counts.any(|count| count != blocks) {
            return Ok(None);
        }
        let entries = read(table, 0..bytes_of(table))?;
        let (entries, _) = entries.as_chunks::<4>();
        let entries: Vec<i32> = entries
            .iter()
            .map(|&entry| i32::from_le_bytes(entry))
            .collect();
        Ok(Some(Blocks::new(
            &entries,
            axis(table, 1),
            blocks,
            &self.attributes,
        )))
    }

    /// Waits until no queued work uses the inputs.
    fn settle(&self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        for (operand, tensor) in &self.inputs {
            while !tensor.memory().is_idle() {
                if Instant::now() > until {
                    return Err(format!(
                        "queued work has used {} for too long",
                        operand.name()
                    ));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// What the contract says: the rule that refuses the call, the feature that is not there, or nothing.
    fn verdict(&self, call: &FiaCall<'_>) -> Option<&'static str> {
        let target = self.context.target().ok()?;
        match call.check(Version::oldest_on(call, self.version, target), target) {
            Ok(_) => None,
            Err(Refusal::Violation(violation)) => Some(violation.rule.id),
            Err(Refusal::Unsupported(unsupported)) => Some(unsupported.feature),
        }
    }
}

/// An output as a case expects it: FLOAT; `None` if its type has no such form.
pub(super) fn expected(desc: &TensorDesc, bytes: Vec<u8>) -> Option<CaseTensor> {
    let tensor = CaseTensor::with_dims(desc.dtype, desc.shape, bytes).ok()?;
    CaseTensor::from_f32(DType::Float, tensor.shape(), &tensor.to_f32()?).ok()
}

/// How many elements of an expected output are NaN, which would let any number pass.
pub(super) fn nans(expected: &CaseTensor) -> usize {
    let values = expected.to_f32().unwrap_or_default();
    values.iter().filter(|value| value.is_nan()).count()
}

/// Whether a mask is the one that a reader makes for itself.
fn is_compressed(soc: Option<Soc>, desc: &TensorDesc, bytes: &[u8]) -> bool {
    let form = MaskForm::made_for(soc);
    let template = CompressedMask::Causal.geometry();
    let size = [template.q_len(), template.kv_len()].map(|len| i64::try_from(len).unwrap_or(0));
    desc.dtype == form.dtype()
        && *desc.shape == size
        && HostMask::of(&template, form).is_ok_and(|mask| mask.bytes() == bytes)
}

fn axis(tensor: &AnyTensor, axis: usize) -> usize {
    tensor.shape().get(axis).copied().unwrap_or(0)
}

/// Bytes of a packed tensor.
fn bytes_of(tensor: &AnyTensor) -> usize {
    tensor.addresses().len()
}

fn read(tensor: &AnyTensor, bytes: std::ops::Range<usize>) -> Result<Vec<u8>, String> {
    let mut data = Vec::new();
    data.try_reserve_exact(bytes.len()).map_err(text)?;
    data.resize(bytes.len(), 0);
    tensor.read_part(bytes.start, &mut data).map_err(text)?;
    Ok(data)
}

/// Some parts of a tensor along its first axis, in this order.
fn read_blocks(tensor: &AnyTensor, read: &[usize]) -> Result<Vec<u8>, String> {
    let block = bytes_of(tensor) / axis(tensor, 0).max(1);
    let mut data = Vec::new();
    let bytes = block.saturating_mul(read.len());
    data.try_reserve_exact(bytes).map_err(text)?;
    data.resize(bytes, 0);
    for (&number, part) in read.iter().zip(data.chunks_exact_mut(block.max(1))) {
        tensor
            .read_part(number.saturating_mul(block), part)
            .map_err(text)?;
    }
    Ok(data)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
