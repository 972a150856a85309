//! Running a case.

use std::time::Instant;

use ascend_spec::declared::{AnyArgument, AnyArguments, DeclaredOperator};
use ascend_spec::{Level, TensorDesc, Violation};

use super::launches;
use super::outcome::{Expectation, Expected, download, kept, poison};
use super::{Case, CaseArguments, CaseError, CaseTensor, Expect, Outcome, Verdict};
use crate::case_file::refusal_status;
use crate::error::{Error, Result};
use crate::ops::causal_conv1d::vouched_for;
use crate::ops::fused_causal_conv1d::released;
use crate::runtime::{Platform, Stream};
use crate::tensor::AnyTensor;

/// The operators that a package other than CANN has, and CANN has not.
const PACKAGES: [(DeclaredOperator, &str); 1] = [(DeclaredOperator::CausalConv1d, "vllm_ascend")];

impl<A: CaseArguments + Clone> Case<A> {
    /// Runs the call on a stream and compares what comes out with what the case expects.
    ///
    /// Before the launch the outputs are filled with NaN, integers with the numbers furthest from the expected ones,
    /// so that an operator that writes nothing fails. A case that expects a refusal passes only if the call is
    /// refused before it is launched, with the expected status and by the expected rule if these are given. Waits for
    /// the stream. Other work may be queued there before; it is not touched.
    ///
    /// A call that breaks a lint which [overruns](ascend_spec::Rule::overruns) memory fails, refused by that lint,
    /// and so does one whose block table, padding or slots name positions outside of its tensors: no file may make the
    /// device access memory outside of them. Other lints are reported in the outcome.
    ///
    /// A case that names a chip or a release ([`Case::soc_name`], [`Case::cann`]) runs on these: on the emulation of
    /// them if the stream is emulated, and on the stream if its device is of that product and its release not older.
    /// The emulation of another device is [deterministic](crate::Device::set_deterministic) where the stream's is.
    ///
    /// # Errors
    /// Only for what decides nothing about the case: a device that fails, memory that runs out, a CANN without the
    /// operator; [`Error::OtherTarget`] for a device that is not what the case is for.
    pub fn launch(&self, stream: &Stream) -> Result<Outcome> {
        let own = PACKAGES.iter().find(|(operator, _)| *operator == self.operator());
        if let Some(provider) = self.provider.as_deref().filter(|name| own.is_none_or(|(_, own)| own != name)) {
            let other = Violation::unsupported(format_args!("the operator as `{provider}` builds it"));
            return Ok(Outcome::of(Verdict::Unsupported(other)));
        }
        let runtime = stream.context().runtime();
        let vouched = match self.operator() {
            DeclaredOperator::CausalConv1d => vouched_for(runtime),
            DeclaredOperator::FusedCausalConv1d | DeclaredOperator::InplaceFusedCausalConv1d => released(runtime),
            _ => Ok(()),
        };
        if let Err(refusal) = vouched {
            return Ok(Outcome::of(Verdict::Unsupported(refusal)));
        }
        let other = self.named_target().other_stream(stream)?;
        let stream = other.as_ref().unwrap_or(stream);
        let target = stream.device().target()?;
        let described = self.describe_on(Some(target.soc));
        let version = self.version(&described, target);
        let expectation = Expectation { expect: self.expect, rule: self.expect_rule.as_deref() };
        let phases = launches::phases(described.operator(), version)?;
        if let Some(operator) = described.operator().version(version) {
            phases.required(stream.context().runtime().api(), operator, "run the case on the emulation of one")?;
        }
        let mut lints = Vec::new();
        let checked = self.check(&described, version, target, &mut |lint| lints.push(lint));
        self.lint_contents(&described, version, target, &mut |lint| lints.push(lint));
        let checked = checked.and_then(|()| {
            let drop_mask = described.tensors("drop_mask").first();
            let roomy = drop_mask.is_some_and(|mask| mask.shape.rank() == 1);
            if let Some(lint) = lints.iter().find(|lint| self.stops(lint, roomy)) {
                return Err(lint.clone());
            }
            self.check_contents(&described, version, target)
        });
        if let Err(refusal) = checked {
            let status = Some(refusal.status());
            return expectation.outcome_of(refusal.into(), status);
        }
        let mut outcome = Outcome::of(Verdict::Computed);
        outcome.lints = lints;
        if let Some(verdict) = expectation.failure_if_accepted() {
            outcome.verdict = verdict;
            return Ok(outcome);
        }
        let tensors = self.place_tensors(stream, &described)?;
        let begin = Instant::now();
        if let Err(refusal) = launches::launch(stream, &tensors, version) {
            let status = refusal_status(&refusal);
            let refused = expectation.outcome_of(refusal, status);
            return refused.map(|refused| Outcome { lints: outcome.lints, ..refused });
        }
        stream.synchronize()?;
        outcome.launch_time = begin.elapsed();
        if let Some(verdict) = expectation.failure_if_not_stopped() {
            outcome.verdict = verdict;
            return Ok(outcome);
        }
        for (argument, tensor) in tensors.each_tensor() {
            if argument.parameter.kind.is_output() {
                let found = download(stream, tensor)?;
                let found = found.map(|found| (argument.parameter.name, found));
                outcome.outputs.extend(found);
            }
        }
        let exact = stream.device().runtime().platform() == Platform::Emulated;
        let expected = self.expected.iter().map(|(output, want)| Expected {
            output,
            want,
            tolerance: self.tolerance_of(output, exact),
            rms_tolerance: self.rms_tolerance_of(output),
        });
        outcome.judge(&expected.collect::<Vec<_>>());
        Ok(outcome)
    }

    /// Returns the case with the computed outputs as its expected ones, so that it can be run elsewhere. Elements
    /// that this case leaves unspecified stay so; the tolerance is this case's, or 0.
    ///
    /// # Errors
    /// [`CaseError::Contradiction`] if the outcome has no outputs; [`CaseError::NanOutput`] for a NaN in an element
    /// that the case does not leave unspecified.
    pub fn with_outputs(&self, outcome: &Outcome) -> std::result::Result<Self, CaseError> {
        let mut case = self.clone();
        case.expect = Expect::Ok;
        case.tolerance = Some(self.tolerance.unwrap_or_default());
        let written = outcome.outputs.iter().filter(|(_, got)| got.shape() != [0]);
        let expected = written.map(|(name, got)| Ok((*name, kept(name, got, self.expected(name))?)));
        case.expected = expected.collect::<std::result::Result<_, CaseError>>()?;
        if case.expected.is_empty() {
            return Err(CaseError::Contradiction("the case was not computed"));
        }
        Ok(case)
    }

    /// Whether a lint keeps a case from being run: a file is data, which must not make the device access memory
    /// outside of its tensors, nor end the process. `roomy` means that the drop mask has memory for whole loads.
    fn stops(&self, lint: &Violation, roomy: bool) -> bool {
        let expected = self.expect == Expect::Ok && self.expect_rule.as_deref() == Some(lint.rule.id);
        let overruns = lint.rule.overruns && !(roomy && lint.rule.id == DROP_MASK_SHORT);
        overruns || lint.rule.level == Level::HostCrash || expected
    }

    /// Returns the call's tensors on the device: inputs as in the file, outputs filled with values that they must not
    /// hold afterwards.
    fn place_tensors(&self, stream: &Stream, described: &AnyArguments<TensorDesc>) -> Result<AnyArguments<AnyTensor>> {
        let arguments = self.arguments.by_name();
        described.try_map(|AnyArgument { parameter, index }, desc| match arguments.tensors(parameter.name).get(index) {
            Some(tensor) if parameter.name == "drop_mask" => upload_roomy(stream, tensor),
            Some(tensor) if !desc.is_contiguous() => upload_strided(stream, tensor, *desc),
            Some(tensor) => upload(stream, tensor),
            None if parameter.kind.is_output() => {
                let tensor = AnyTensor::empty(stream.context(), *desc)?;
                poison(stream, &tensor, self.expected(parameter.name))?;
                Ok(tensor)
            }
            None => {
                let device = stream.device();
                let Some((template, form)) = self.mask_on(device.soc().ok()) else {
                    return Err(
                        Error::invalid(parameter.name, desc, "a tensor of the file").fix("add the tensor to the file")
                    );
                };
                device.masks().template(template, form)
            }
        })
    }
}

/// The lint against a drop mask whose memory ends within a load of the kernel; [`upload_roomy`] gives a case's mask
/// enough memory.
const DROP_MASK_SHORT: &str = "flash.drop_mask_short";
/// Bytes of a drop mask that the kernel loads at once.
const DROP_UNIT: usize = 16;

fn upload(stream: &Stream, tensor: &CaseTensor) -> Result<AnyTensor> {
    stream.upload_bytes(tensor.dtype(), tensor.bytes(), tensor.shape())
}

/// Uploads a tensor with strides, and zeros between its elements.
fn upload_strided(stream: &Stream, tensor: &CaseTensor, desc: TensorDesc) -> Result<AnyTensor> {
    let size = desc.dtype.size().unwrap_or(1);
    let end = desc.byte_range().and_then(|range| usize::try_from(range.end).ok());
    let mut bytes = Vec::new();
    let room = end.filter(|end| bytes.try_reserve_exact(*end).is_ok()).ok_or_else(|| {
        Error::invalid("strides", desc, "a view that fits in the host's memory").fix("give smaller strides")
    })?;
    bytes.resize(room, 0);
    for (index, element) in tensor.bytes().chunks_exact(size).enumerate() {
        let (mut left, mut place) = (index as i64, desc.offset);
        for (&axis, &stride) in desc.shape.iter().zip(desc.strides.iter()).rev() {
            place += left % axis.max(1) * stride;
            left /= axis.max(1);
        }
        let start = usize::try_from(place).map_or(room, |place| place.saturating_mul(size));
        if let Some(to) = bytes.get_mut(start..start.saturating_add(size)) {
            to.copy_from_slice(element);
        }
    }
    stream.upload_bytes(desc.dtype, &bytes, [room / size])?.viewed_as(desc)
}

/// Uploads a drop mask into memory that is rounded up to whole loads of the kernel.
fn upload_roomy(stream: &Stream, tensor: &CaseTensor) -> Result<AnyTensor> {
    let &[len] = tensor.shape() else {
        return upload(stream, tensor);
    };
    let mut bytes = tensor.bytes().to_vec();
    bytes.resize(len.next_multiple_of(DROP_UNIT), 0);
    let roomy = stream.upload_bytes(tensor.dtype(), &bytes, [bytes.len()])?;
    roomy.narrow(0, 0..len)
}
