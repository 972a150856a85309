//! Running a case.

use std::time::{Duration, Instant};

use ascend_spec::fia::{Version, rules};
use ascend_spec::{CompressedMask, DType, Level, Rule, TensorDesc, Unsupported, Violation};

use super::{Case, CaseError, CaseTensor, Comparison, Expect, MaskKind, Parameter, Tolerance};
use crate::attention::Arguments;
use crate::case_file::refusal_status;
use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

/// What a case came to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether it passed.
    pub verdict: Verdict,
    /// Each expected output against what came out.
    pub comparisons: Vec<Comparison>,
    /// What came out, in the operator's output type; `None` if nothing was launched.
    pub attention_out: Option<CaseTensor>,
    /// The log-sum-exp that came out, if the call writes it.
    pub softmax_lse: Option<CaseTensor>,
    /// How the call was refused, if it was.
    pub refusal: Option<Error>,
    /// What the operator takes and then ignores, misreads or overruns. A case is replayed all the same.
    pub lints: Vec<Violation>,
    /// From the launch until the outputs were there, on the host's clock.
    pub launch_time: Duration,
}

/// Whether a case passed.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Everything that the case specifies is so.
    Passed,
    /// The call ran, and the case expects no outputs to compare with.
    Computed,
    /// Something is not as the case says.
    Failed {
        /// What, and where.
        reason: String,
    },
    /// This release cannot run the call.
    Unsupported(Unsupported),
}

impl Case {
    /// Runs the call on a stream and compares what comes out with what the case expects.
    ///
    /// The outputs hold NaN before the launch, those of integers what is furthest from the expected numbers, so that an
    /// operator that writes nothing fails. A case that
    /// expects a refusal passes only if the call is refused before it is launched, with the expected status and by the
    /// expected rule if these are given. Waits for the stream. Other work may be queued there before; it is not touched.
    ///
    /// A call that breaks a lint which [overruns](ascend_spec::Rule::overruns) memory fails, refused by that lint, as does
    /// one whose block table or padding names places outside of its tensors: a file makes no device leave them. Other
    /// lints are reported in the outcome.
    ///
    /// A case that names a chip or a release ([`Case::soc_name`], [`Case::cann`]) runs on these: on the emulation of them if
    /// the stream is emulated, and on the stream if its device is of that product and its release not older.
    ///
    /// # Errors
    /// Only for what says nothing about the case: a device that fails, memory that runs out, a CANN without the
    /// operator; [`Error::OtherTarget`] for a device that is not what the case is for.
    pub fn run(&self, stream: &Stream) -> Result<Outcome> {
        let other = self.other_stream(stream)?;
        let stream = other.as_ref().unwrap_or(stream);
        let description = self.describe();
        let mut arguments = self.upload(stream)?;
        let empty = |desc: Option<TensorDesc>| {
            desc.map(|desc| AnyTensor::empty(stream.context(), desc))
                .transpose()
        };
        let out = empty(description.attention_out())?;
        let lse = empty(description.softmax_lse())?;
        for (parameter, tensor) in [
            (Parameter::AttentionOut, &out),
            (Parameter::SoftmaxLse, &lse),
        ] {
            if let Some(tensor) = tensor {
                arguments.set(parameter, tensor.clone());
            }
        }
        let plan = match arguments.plan(stream.device()) {
            Ok(plan) => plan,
            Err(Error::Unsupported(unsupported)) => {
                return Ok(Outcome::of(Verdict::Unsupported(unsupported)));
            }
            Err(refusal) => {
                let Some(status) = refusal_status(&refusal) else {
                    return Err(refusal);
                };
                let mut outcome = Outcome::of(self.refused(status, &refusal));
                outcome.refusal = Some(refusal);
                return Ok(outcome);
            }
        };
        let mut outcome = Outcome::of(Verdict::Computed);
        let version = Version::ALL
            .into_iter()
            .find(|version| version.symbol() == plan.operator());
        if let (Some(version), Ok(target)) = (version, stream.device().target())
            && let Ok(checked) = description.call().check(version, target)
        {
            checked.each_lint(&mut |lint| outcome.lints.push(lint));
        }
        if self.expect != Expect::Ok {
            outcome.verdict = Verdict::Failed {
                reason: "the call should be refused, but the operator takes it".to_owned(),
            };
            return Ok(outcome);
        }
        for (tensor, want) in [(&out, &self.attention_out), (&lse, &self.softmax_lse)] {
            if let Some(tensor) = tensor {
                poison(stream, tensor, want.as_ref())?;
            }
        }
        let begin = Instant::now();
        if let Err(refusal) = arguments.launch(&plan, stream) {
            let Some(status) = refusal_status(&refusal) else {
                return Err(refusal);
            };
            outcome.verdict = self.refused(status, &refusal);
            outcome.refusal = Some(refusal);
            return Ok(outcome);
        }
        stream.synchronize()?;
        outcome.launch_time = begin.elapsed();
        if let Some(recorded) = &self.expect_rule {
            outcome.verdict = Verdict::Failed {
                reason: format!("the call should be stopped by {recorded}, but nothing stops it"),
            };
            return Ok(outcome);
        }
        outcome.attention_out = download(stream, out)?;
        outcome.softmax_lse = download(stream, lse)?;
        self.judge(&mut outcome);
        Ok(outcome)
    }

    /// The case with what came out as what is expected, so that it can be run elsewhere. What this case leaves
    /// unspecified stays so; the tolerance is this case's, or 0.
    ///
    /// # Errors
    /// [`CaseError::Contradiction`] if the outcome has no outputs; [`CaseError::NanOutput`] if NaN came out where the case
    /// does not leave it unspecified.
    pub fn with_outputs(&self, outcome: &Outcome) -> std::result::Result<Case, CaseError> {
        if outcome.attention_out.is_none() {
            return Err(CaseError::Contradiction("the case was not computed"));
        }
        let mut case = self.clone();
        case.expect = Expect::Ok;
        case.tolerance = Some(self.tolerance.unwrap_or_default());
        case.attention_out = kept("attention_out", &outcome.attention_out, &self.attention_out)?;
        case.softmax_lse = kept("softmax_lse", &outcome.softmax_lse, &self.softmax_lse)?;
        Ok(case)
    }

    /// The call's arguments with the inputs uploaded; the outputs are still to be given.
    fn upload(&self, stream: &Stream) -> Result<Arguments> {
        let uploaded = self.arguments.try_map(|_, tensor| upload(stream, tensor))?;
        let mut arguments = Arguments::new(uploaded);
        if let Some(version) = self.op_version {
            arguments.at_least(version);
        }
        if let Some(release) = self.portable_since {
            arguments.portable_since(release);
        }
        if self.mask == MaskKind::Compressed {
            let masks = stream.device().masks();
            let mask = masks.template(CompressedMask::Causal, masks.form())?;
            arguments.set(Parameter::AttenMask, mask);
        }
        // A file is data: it must not make the device leave its tensors.
        let expected =
            |lint: &Rule| self.expect == Expect::Ok && self.expect_rule.as_deref() == Some(lint.id);
        for lint in rules::lints::all().filter(|lint| !lint.overruns && !expected(lint)) {
            arguments.allow_lint(lint.id);
        }
        Ok(arguments)
    }

    /// The verdict on a call that was refused with this status.
    fn refused(&self, status: i32, refusal: &Error) -> Verdict {
        let rule = match refusal {
            Error::Violation(violation) => Some(violation.rule),
            _ => None,
        };
        let recorded = self.expect_rule.as_deref();
        // The operator would take it: only this crate does not.
        if let Some(rule) = rule.filter(|rule| rule.level == Level::Lint) {
            if self.expect == Expect::Ok && recorded == Some(rule.id) {
                return Verdict::Passed;
            }
            return Verdict::Failed {
                reason: refusal.to_string(),
            };
        }
        let found = rule.map(|rule| rule.id);
        if let Some(recorded) = recorded.filter(|&recorded| found != Some(recorded))
            && self.expect != Expect::Ok
        {
            let found = found.unwrap_or("the operator itself");
            return Verdict::Failed {
                reason: format!(
                    "rejected by another rule than recorded ({found}, recorded {recorded}): {refusal}"
                ),
            };
        }
        match self.expect {
            Expect::Reject { status: None } => Verdict::Passed,
            Expect::Reject {
                status: Some(expected),
            } if expected == status => Verdict::Passed,
            Expect::Reject {
                status: Some(expected),
            } => Verdict::Failed {
                reason: format!("refused with status {status} instead of {expected}: {refusal}"),
            },
            Expect::Ok => Verdict::Failed {
                reason: refusal.to_string(),
            },
        }
    }

    /// Compares what came out with what is expected.
    fn judge(&self, outcome: &mut Outcome) {
        let tolerance = self.tolerance.unwrap_or_default();
        let mut reasons = Vec::new();
        let mut expected_any = false;
        let outputs = [
            (&self.attention_out, &outcome.attention_out, self.rms_rtol),
            (&self.softmax_lse, &outcome.softmax_lse, None),
        ];
        for (name, (want, got, rms)) in ["attention_out", "softmax_lse"].into_iter().zip(outputs) {
            let Some(want) = want else { continue };
            expected_any = true;
            match compare(name, got.as_ref(), want, (tolerance, rms)) {
                Ok(comparison) => {
                    reasons.extend(difference(&comparison));
                    outcome.comparisons.push(comparison);
                }
                Err(reason) => reasons.push(reason),
            }
        }
        let compared: usize = outcome.comparisons.iter().map(|found| found.compared).sum();
        if expected_any && compared == 0 && reasons.is_empty() {
            reasons.push("nothing was compared: no expected output specifies a number".to_owned());
        }
        if !reasons.is_empty() {
            outcome.verdict = Verdict::Failed {
                reason: reasons.join("; "),
            };
        } else if expected_any {
            outcome.verdict = Verdict::Passed;
        }
    }
}

impl Outcome {
    fn of(verdict: Verdict) -> Self {
        Self {
            verdict,
            comparisons: Vec::new(),
            attention_out: None,
            softmax_lse: None,
            refusal: None,
            lints: Vec::new(),
            launch_time: Duration::ZERO,
        }
    }
}

fn upload(stream: &Stream, tensor: &CaseTensor) -> Result<AnyTensor> {
    stream.upload_bytes(tensor.dtype(), tensor.bytes(), tensor.shape())
}

/// Fills an output with what it must not hold.
fn poison(stream: &Stream, tensor: &AnyTensor, want: Option<&CaseTensor>) -> Result<()> {
    let bytes = tensor.desc().byte_range().unwrap_or(0..0).end;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut poison = Vec::new();
    if poison.try_reserve_exact(bytes).is_err() {
        return Err(Error::invalid(
            "outputs",
            format_args!("{bytes} bytes"),
            "what fits in the host's memory",
        ));
    }
    poison.resize(bytes, 0);
    fill(tensor.dtype(), want, &mut poison);
    tensor.overwrite_bytes(stream, &poison)
}

/// NaN, or in an integer type, which has none, what is furthest from the expected numbers.
fn fill(dtype: DType, want: Option<&CaseTensor>, poison: &mut [u8]) {
    poison.fill(match dtype {
        DType::HiFloat8 => 0x80,
        DType::Int8 => 0x7f,
        _ => 0xff,
    });
    if dtype != DType::Int8 {
        return;
    }
    let want = want.and_then(CaseTensor::to_f32).unwrap_or_default();
    for (byte, want) in poison.iter_mut().zip(want) {
        if want >= 0.0 {
            *byte = 0x80;
        }
    }
}

fn download(stream: &Stream, tensor: Option<AnyTensor>) -> Result<Option<CaseTensor>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    let bytes = tensor.download_bytes(stream)?;
    Ok(CaseTensor::with_dims(tensor.dtype(), tensor.desc().shape, bytes).ok())
}

fn compare(
    name: &'static str,
    got: Option<&CaseTensor>,
    want: &CaseTensor,
    (tolerance, rms): (Tolerance, Option<f64>),
) -> std::result::Result<Comparison, String> {
    let Some(got) = got else {
        return Err(format!(
            "{name} is expected, but the call has no such output"
        ));
    };
    if got.shape() != want.shape() {
        return Err(format!(
            "{name} has shape {:?}, but {:?} is expected",
            got.shape(),
            want.shape()
        ));
    }
    match (got.to_f32(), want.to_f32()) {
        (Some(got), Some(want)) => Ok(Comparison::new(name, &got, &want, tolerance, rms)),
        _ => Err(format!(
            "{name} is {}, which cannot be compared",
            got.dtype()
        )),
    }
}

/// Where an output is off, if it is.
fn difference(comparison: &Comparison) -> Option<String> {
    let worst = comparison.worst.filter(|_| !comparison.passed())?;
    if comparison.outside == 0 {
        return Some(format!(
            "{}: error as a whole {:.2e} of {:.2e} allowed",
            comparison.output,
            comparison.rms,
            comparison.rms_tolerance.unwrap_or(f64::INFINITY)
        ));
    }
    Some(format!(
        "{}[{}]: got {}, want {}, worst error {:.2e} of {:.2e} allowed; {} of {} outside",
        comparison.output,
        worst.index,
        worst.got,
        worst.want,
        worst.error,
        worst.tolerance,
        comparison.outside,
        comparison.compared
    ))
}

/// An output as an expected one: FLOAT, and NaN wherever the case did not specify it before.
fn kept(
    name: &'static str,
    got: &Option<CaseTensor>,
    before: &Option<CaseTensor>,
) -> std::result::Result<Option<CaseTensor>, CaseError> {
    let Some(got) = got else { return Ok(None) };
    let mut values = got.to_f32().ok_or_else(|| CaseError::Dtype {
        tensor: "output".to_owned(),
        dtype: got.dtype().to_string(),
    })?;
    let mut unspecified = 0;
    let before = before
        .as_ref()
        .filter(|before| before.shape() == got.shape());
    if let Some(before) = before.and_then(CaseTensor::to_f32) {
        for (value, before) in values.iter_mut().zip(before) {
            if before.is_nan() {
                *value = f32::NAN;
                unspecified += 1;
            }
        }
    }
    let count = values.iter().filter(|value| value.is_nan()).count();
    if count > unspecified {
        return Err(CaseError::NanOutput {
            tensor: name,
            count: count - unspecified,
        });
    }
    CaseTensor::from_f32(ascend_spec::DType::Float, got.shape(), &values).map(Some)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_is_not_written_holds_no_expected_number() {
        for dtype in [
            DType::Float,
            DType::Float16,
            DType::Bf16,
            DType::Float8E4M3Fn,
            DType::HiFloat8,
            DType::Int8,
        ] {
            let numbers = [-1.0, 0.0, 127.0, -128.0, -4.58e-5];
            let want = CaseTensor::from_f32(DType::Float, &[5], &numbers).unwrap();
            let mut bytes = vec![0; 5 * dtype.bits() as usize / 8];
            fill(dtype, Some(&want), &mut bytes);
            let got = CaseTensor::new(dtype, &[5], bytes).unwrap();
            let got = got.to_f32().unwrap();
            let tolerance = Tolerance {
                atol: 1.0,
                rtol: 0.5,
            };
            let found = Comparison::new("attention_out", &got, &numbers, tolerance, None);
            assert_eq!(found.outside, 5, "{dtype}: {got:?}");
        }
    }
}
