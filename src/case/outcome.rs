//! The outcome of running a case.

use std::time::Duration;

use ascend_spec::{DType, Level, Violation};

use super::positions::{Pairs, numbers};
use super::{CaseError, CaseTensor, Comparison, Expect, Tolerance};
use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

/// The outcome of running a case.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether it passed.
    pub verdict: Verdict,
    /// Comparison of each expected output with the computed one.
    pub comparisons: Vec<Comparison>,
    /// The computed outputs by name, in the operator's output types; empty if nothing was launched.
    pub outputs: Vec<(&'static str, CaseTensor)>,
    /// How the call was refused, if it was.
    pub refusal: Option<Error>,
    /// The lints that the call breaks: the operator takes such a call, and ignores, misreads or overruns something.
    pub lints: Vec<Violation>,
    /// Time from the launch until the outputs were there, on the host's clock.
    pub launch_time: Duration,
}

/// Whether a case passed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// Everything that the case specifies holds.
    Passed,
    /// The call ran, and the case expects no outputs to compare with.
    Computed,
    /// Something differs from what the case specifies.
    Failed {
        /// What differs, and where.
        reason: String,
    },
    /// This release cannot run the call.
    Unsupported(Violation),
}

/// What a case expects of one output.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a> {
    pub(super) output: &'static str,
    pub(super) want: &'a CaseTensor,
    pub(super) tolerance: Tolerance,
    pub(super) rms_tolerance: Option<f64>,
}

/// Whether a case expects its call to run or to be refused, and by which rule.
#[derive(Clone, Copy)]
pub(super) struct Expectation<'a> {
    pub(super) expect: Expect,
    /// The rule or lint that refuses the call.
    pub(super) rule: Option<&'a str>,
}

impl Expectation<'_> {
    /// The verdict on a call that was refused with this status.
    pub(super) fn refused(&self, status: i32, refusal: &Error) -> Verdict {
        let rule = match refusal {
            Error::Violation(violation) => Some(violation.rule),
            _ => None,
        };
        let recorded = self.rule;
        // The operator would take the call: only this crate refuses it.
        if let Some(rule) = rule.filter(|rule| rule.level == Level::Lint) {
            if self.expect == Expect::Ok && recorded == Some(rule.id) {
                return Verdict::Passed;
            }
            return Verdict::Failed { reason: refusal.to_string() };
        }
        let found = rule.map(|rule| rule.id);
        if let Some(recorded) = recorded.filter(|&recorded| found != Some(recorded))
            && self.expect != Expect::Ok
        {
            let found = found.unwrap_or("the operator itself");
            return Verdict::Failed {
                reason: format!("rejected by another rule than recorded ({found}, recorded {recorded}): {refusal}"),
            };
        }
        match self.expect {
            Expect::Reject { status: None } => Verdict::Passed,
            Expect::Reject { status: Some(expected) } if expected == status => Verdict::Passed,
            Expect::Reject { status: Some(expected) } => {
                Verdict::Failed { reason: format!("refused with status {status} instead of {expected}: {refusal}") }
            }
            Expect::Ok => Verdict::Failed { reason: refusal.to_string() },
        }
    }

    /// Returns the outcome of a call that was refused, or the error itself where it decides nothing about the case.
    pub(super) fn outcome_of(&self, refusal: Error, status: Option<i32>) -> Result<Outcome> {
        if let Error::Violation(violation) = &refusal
            && violation.is_unsupported()
        {
            return Ok(Outcome::of(Verdict::Unsupported(violation.clone())));
        }
        let Some(status) = status else {
            return Err(refusal);
        };
        let mut outcome = Outcome::of(self.refused(status, &refusal));
        outcome.refusal = Some(refusal);
        Ok(outcome)
    }

    /// Returns the failure of a case that expects a refusal of its call, which the operator takes; `None` for other
    /// cases.
    pub(super) fn failure_if_accepted(&self) -> Option<Verdict> {
        (self.expect != Expect::Ok)
            .then(|| Verdict::Failed { reason: "the call should be refused, but the operator takes it".to_owned() })
    }

    /// Returns the failure of a case that expects a rule or lint to stop its call, which ran; `None` for other cases.
    pub(super) fn failure_if_not_stopped(&self) -> Option<Verdict> {
        self.rule.map(|rule| Verdict::Failed {
            reason: format!("the call should be stopped by {rule}, but nothing stops it"),
        })
    }
}

impl Outcome {
    pub(super) fn of(verdict: Verdict) -> Self {
        Self {
            verdict,
            comparisons: Vec::new(),
            outputs: Vec::new(),
            refusal: None,
            lints: Vec::new(),
            launch_time: Duration::ZERO,
        }
    }

    /// Compares the computed outputs with the expected ones, and sets the verdict.
    pub(super) fn judge(&mut self, expected: &[Expected<'_>]) {
        let mut reasons = Vec::new();
        let mut positions = expected.iter().filter(|expected| expected.want.dtype() == DType::Int32);
        let pairs = positions.find_map(|expected| Pairs::new(self.output(expected.output)?, expected.want));
        for expected in expected {
            match compare(expected, self.output(expected.output), pairs.as_ref()) {
                Ok(comparison) => {
                    reasons.extend(difference(&comparison));
                    self.comparisons.push(comparison);
                }
                Err(reason) => reasons.push(reason),
            }
        }
        let compared: usize = self.comparisons.iter().map(|found| found.compared).sum();
        if !expected.is_empty() && compared == 0 && reasons.is_empty() {
            reasons.push("nothing was compared: no expected output specifies a number".to_owned());
        }
        if !reasons.is_empty() {
            self.verdict = Verdict::Failed { reason: reasons.join("; ") };
        } else if !expected.is_empty() {
            self.verdict = Verdict::Passed;
        }
    }

    /// The computed tensor of an output.
    pub fn output(&self, name: &str) -> Option<&CaseTensor> {
        let mut outputs = self.outputs.iter();
        outputs.find(|(output, _)| *output == name).map(|(_, tensor)| tensor)
    }
}

/// Fills an output with values that it must not hold after the call.
pub(super) fn poison(stream: &Stream, tensor: &AnyTensor, want: Option<&CaseTensor>) -> Result<()> {
    let bytes = tensor.desc().byte_range().unwrap_or(0..0).end;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut poison = Vec::new();
    if poison.try_reserve_exact(bytes).is_err() {
        return Err(Error::invalid("outputs", format_args!("{bytes} bytes"), "what fits in the host's memory")
            .fix("run the case on a host with more memory"));
    }
    poison.resize(bytes, 0);
    fill(tensor.dtype(), want, &mut poison);
    tensor.overwrite_bytes(stream, &poison)
}

/// Fills bytes with NaN or, in an integer type, which has none, with the numbers furthest from the expected ones.
fn fill(dtype: DType, want: Option<&CaseTensor>, poison: &mut [u8]) {
    poison.fill(match dtype {
        DType::HiFloat8 => 0x80,
        DType::Int8 | DType::Int32 => 0x7f,
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

pub(super) fn download(stream: &Stream, tensor: &AnyTensor) -> Result<Option<CaseTensor>> {
    let bytes = tensor.download_bytes(stream)?;
    Ok(CaseTensor::with_dims(tensor.dtype(), tensor.desc().shape, bytes).ok())
}

fn compare(
    expected: &Expected<'_>,
    got: Option<&CaseTensor>,
    pairs: Option<&Pairs>,
) -> std::result::Result<Comparison, String> {
    let Expected { output: name, want, tolerance, rms_tolerance } = *expected;
    let Some(got) = got else {
        return Err(format!("{name} is expected, but the call has no such output"));
    };
    if got.shape() != want.shape() {
        return Err(format!("{name} has shape {:?}, but {:?} is expected", got.shape(), want.shape()));
    }
    if let (Some(positions), Some(want)) = (got.to_i64(), want.to_i64()) {
        let positions = match pairs {
            Some(pairs) => pairs.arrange(got.shape(), positions),
            None => positions,
        };
        let (got, want) = numbers(&positions, &want);
        return Ok(Comparison::new(name, &got, &want, Tolerance::default(), None));
    }
    let values = got.to_f32();
    let values = match pairs.filter(|_| name == "sparse_values") {
        Some(pairs) => values.map(|values| pairs.arrange(got.shape(), values)),
        None => values,
    };
    match (values, want.to_f32()) {
        (Some(got), Some(want)) => Ok(Comparison::new(name, &got, &want, tolerance, rms_tolerance)),
        _ => Err(format!("{name} is {}, which cannot be compared", got.dtype())),
    }
}

/// Describes where an output exceeds its tolerance; `None` if it does not.
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

/// Converts a computed output to an expected one: FLOAT, with NaN wherever `before`, the case's own, is NaN; positions
/// stay INT32.
pub(super) fn kept(
    name: &'static str,
    got: &CaseTensor,
    before: Option<&CaseTensor>,
) -> std::result::Result<CaseTensor, CaseError> {
    if got.dtype() == DType::Int32 {
        return Ok(got.clone());
    }
    let mut values =
        got.to_f32().ok_or_else(|| CaseError::Dtype { tensor: "output".to_owned(), dtype: got.dtype().to_string() })?;
    let mut unspecified = 0;
    let before = before.filter(|before| before.shape() == got.shape());
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
        return Err(CaseError::NanOutput { tensor: name, count: count - unspecified });
    }
    CaseTensor::from_f32(DType::Float, got.shape(), &values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_is_not_written_holds_no_expected_number() {
        for dtype in [DType::Float, DType::Float16, DType::Bf16, DType::Float8E4M3Fn, DType::HiFloat8, DType::Int8] {
            let numbers = [-1.0, 0.0, 127.0, -128.0, -4.58e-5];
            let want = CaseTensor::from_f32(DType::Float, &[5], &numbers).unwrap();
            let mut bytes = vec![0; 5 * dtype.bits() as usize / 8];
            fill(dtype, Some(&want), &mut bytes);
            let got = CaseTensor::new(dtype, &[5], bytes).unwrap();
            let got = got.to_f32().unwrap();
            let tolerance = Tolerance { atol: 1.0, rtol: 0.5 };
            let found = Comparison::new("attention_out", &got, &numbers, tolerance, None);
            assert_eq!(found.outside, 5, "{dtype}: {got:?}");
        }
    }
}
