//! Running a case of any other operator.

use std::time::Instant;

use ascend_spec::declared::{AnyArgument, AnyArguments};
use ascend_spec::{Level, TensorDesc, Violation};

use super::launches;
use super::outcome::{Expectation, Expected, download, kept, poison};
use super::run::upload;
use super::{AnyCase, CaseError, CaseTensor, Expect, OperatorCase, Outcome, Verdict};
use crate::case_file::refusal_status;
use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

impl OperatorCase {
    /// Runs the call on a stream and compares what comes out with what the case expects, as
    /// [`Case::launch`](super::Case::launch) does.
    ///
    /// # Errors
    /// As for [`Case::launch`](super::Case::launch); [`UNSUPPORTED`](ascend_spec::UNSUPPORTED) for an operator that
    /// this crate declares and cannot call yet.
    pub fn launch(&self, stream: &Stream) -> Result<Outcome> {
        let other = self.named_target().other_stream(stream)?;
        let stream = other.as_ref().unwrap_or(stream);
        let target = stream.device().target()?;
        let described = self.describe();
        let version = self.version(&described, target);
        let expectation = Expectation {
            expect: self.expect,
            rule: self.expect_rule.as_deref(),
        };
        let phases = launches::phases(self.operator(), version)?;
        if let Some(operator) = self.operator().version(version) {
            phases.required(
                stream.context().runtime().api(),
                operator,
                "run the case on the emulation of one",
            )?;
        }
        let mut lints = Vec::new();
        let checked = described.check(version, target, &mut |lint| lints.push(lint));
        let checked = checked.and_then(|()| {
            let contents = self.check_contents(&described, version, target);
            lints.extend(contents.err());
            let drop_mask = self.arguments.tensors("drop_mask").first();
            let roomy = drop_mask.is_some_and(|mask| mask.shape().len() == 1);
            match lints.iter().find(|lint| self.stops(lint, roomy)) {
                Some(lint) => Err(lint.clone()),
                None => Ok(()),
            }
        });
        if let Err(refusal) = checked {
            let status = Some(refusal.rule.status);
            return expectation.outcome_of(refusal.into(), status);
        }
        let mut outcome = Outcome::of(Verdict::Computed);
        outcome.lints = lints;
        if let Some(verdict) = expectation.taken() {
            outcome.verdict = verdict;
            return Ok(outcome);
        }
        let tensors = self.place_tensors(stream, &described)?;
        let begin = Instant::now();
        if let Err(refusal) = launches::launch(stream, &tensors, version) {
            let status = refusal_status(&refusal);
            return expectation
                .outcome_of(refusal, status)
                .map(|refused| Outcome {
                    lints: outcome.lints,
                    ..refused
                });
        }
        stream.synchronize()?;
        outcome.launch_time = begin.elapsed();
        if let Some(verdict) = expectation.ran() {
            outcome.verdict = verdict;
            return Ok(outcome);
        }
        for (at, tensor) in tensors.each_tensor() {
            if at.parameter.kind.is_output() {
                let found = download(stream, tensor)?;
                let found = found.map(|found| (at.parameter.name, found));
                outcome.outputs.extend(found);
            }
        }
        let expected: Vec<_> = self
            .expected
            .iter()
            .map(|(output, want)| Expected {
                output,
                want,
                tolerance: self.tolerance_of(output),
                rms_tolerance: None,
            })
            .collect();
        outcome.judge(&expected);
        Ok(outcome)
    }

    /// Returns the case with the computed outputs as its expected ones, as
    /// [`Case::with_outputs`](super::Case::with_outputs) does.
    ///
    /// # Errors
    /// As for [`Case::with_outputs`](super::Case::with_outputs).
    pub fn with_outputs(&self, outcome: &Outcome) -> std::result::Result<Self, CaseError> {
        let mut case = self.clone();
        case.expect = Expect::Ok;
        case.tolerance = Some(self.tolerance.unwrap_or_default());
        let written = outcome.outputs.iter().filter(|(_, got)| got.shape() != [0]);
        let expected =
            written.map(|(name, got)| Ok((*name, kept(name, got, self.expected(name))?)));
        case.expected = expected.collect::<std::result::Result<_, CaseError>>()?;
        if case.expected.is_empty() {
            return Err(CaseError::Contradiction("the case was not computed"));
        }
        Ok(case)
    }

    /// Whether a lint keeps a case from being run: a file is data, which must not make the device access memory
    /// outside of its tensors, nor end the process. `roomy` means that the drop mask has memory for whole loads.
    fn stops(&self, lint: &Violation, roomy: bool) -> bool {
        let expected =
            self.expect == Expect::Ok && self.expect_rule.as_deref() == Some(lint.rule.id);
        let overruns = lint.rule.overruns && !(roomy && lint.rule.id == DROP_MASK_SHORT);
        overruns || lint.rule.level == Level::HostCrash || expected
    }

    /// Returns the call's tensors on the device: inputs as in the file, outputs filled with values that they must not
    /// hold afterwards.
    fn place_tensors(
        &self,
        stream: &Stream,
        described: &AnyArguments<TensorDesc>,
    ) -> Result<AnyArguments<AnyTensor>> {
        described.try_map(|AnyArgument { parameter, index }, desc| {
            if parameter.kind.is_output() {
                let tensor = AnyTensor::empty(stream.context(), *desc)?;
                poison(stream, &tensor, self.expected(parameter.name))?;
                return Ok(tensor);
            }
            match self.arguments.tensors(parameter.name).get(index) {
                Some(tensor) if parameter.name == "drop_mask" => upload_roomy(stream, tensor),
                Some(tensor) => upload(stream, tensor),
                None => {
                    let Some(template) = self.demand() else {
                        return Err(Error::invalid(parameter.name, desc, "a tensor of the file")
                            .fix("add the tensor to the file"));
                    };
                    stream
                        .device()
                        .masks()
                        .template(template, Self::mask_form())
                }
            }
        })
    }
}

/// The lint against a drop mask whose memory ends within a load of the kernel; [`upload_roomy`] gives a case's mask
/// enough memory.
const DROP_MASK_SHORT: &str = "flash.drop_mask_short";
/// Bytes of a drop mask that the kernel loads at once.
const DROP_UNIT: usize = 16;

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

impl AnyCase {
    /// Launches the call, as [`Case::launch`](super::Case::launch) and [`OperatorCase::launch`] do.
    ///
    /// # Errors
    /// As for [`Case::launch`](super::Case::launch) and [`OperatorCase::launch`].
    pub fn launch(&self, stream: &Stream) -> Result<Outcome> {
        match self {
            Self::Attention(case) => case.launch(stream),
            Self::Operator(case) => case.launch(stream),
        }
    }

    /// Returns the case with the computed outputs as its expected ones.
    ///
    /// # Errors
    /// As for [`Case::with_outputs`](super::Case::with_outputs).
    pub fn with_outputs(&self, outcome: &Outcome) -> std::result::Result<Self, CaseError> {
        Ok(match self {
            Self::Attention(case) => Self::Attention(Box::new(case.with_outputs(outcome)?)),
            Self::Operator(case) => Self::Operator(Box::new(case.with_outputs(outcome)?)),
        })
    }
}
