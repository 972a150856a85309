//! Running a case of FusedInferAttentionScore.

use std::time::Instant;

use ascend_spec::ops::fused_infer_attention_score::{Version, rules};
use ascend_spec::{CompressedMask, Level, Rule, TensorDesc};

use super::outcome::{Expectation, Expected, download, kept, poison};
use super::{Case, CaseError, CaseTensor, Expect, MaskKind, Outcome, Parameter, Verdict};
use crate::attention::Arguments;
use crate::case_file::refusal_status;
use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::AnyTensor;

impl Case {
    /// Runs the call on a stream and compares what comes out with what the case expects.
    ///
    /// Before the launch the outputs are filled with NaN, integers with the numbers furthest from the expected ones,
    /// so that an operator that writes nothing fails. A case that expects a refusal passes only if the call is
    /// refused before it is launched, with the expected status and by the expected rule if these are given. Waits for
    /// the stream. Other work may be queued there before; it is not touched.
    ///
    /// A call that breaks a lint which [overruns](ascend_spec::Rule::overruns) memory fails, refused by that lint,
    /// and so does one whose block table or padding names positions outside of its tensors: no file may make the
    /// device access memory outside of them. Other lints are reported in the outcome.
    ///
    /// A case that names a chip or a release ([`Case::soc_name`], [`Case::cann`]) runs on these: on the emulation of
    /// them if the stream is emulated, and on the stream if its device is of that product and its release not older.
    ///
    /// # Errors
    /// Only for what decides nothing about the case: a device that fails, memory that runs out, a CANN without the
    /// operator; [`Error::OtherTarget`] for a device that is not what the case is for.
    pub fn launch(&self, stream: &Stream) -> Result<Outcome> {
        let other = self.named_target().other_stream(stream)?;
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
        let expectation = self.expectation();
        let refused = |error: Error| {
            let status = refusal_status(&error);
            expectation.outcome_of(error, status)
        };
        let plan = match arguments.plan(stream.device()) {
            Ok(plan) => plan,
            Err(refusal) => return refused(refusal),
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
        if let Some(verdict) = expectation.taken() {
            outcome.verdict = verdict;
            return Ok(outcome);
        }
        let outputs = [
            ("attention_out", &out, &self.attention_out),
            ("softmax_lse", &lse, &self.softmax_lse),
        ];
        for (_, tensor, want) in outputs {
            if let Some(tensor) = tensor {
                poison(stream, tensor, want.as_ref())?;
            }
        }
        let begin = Instant::now();
        if let Err(refusal) = arguments.launch(&plan, stream) {
            return refused(refusal).map(|refused| Outcome {
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
        for (name, tensor, _) in outputs {
            let Some(tensor) = tensor else { continue };
            let found = download(stream, tensor)?;
            outcome.outputs.extend(found.map(|found| (name, found)));
        }
        let rms = [self.rms_rtol, None];
        let expected: Vec<_> = (outputs.into_iter().zip(rms))
            .filter_map(|((output, _, want), rms_tolerance)| {
                let want = want.as_ref()?;
                Some(Expected {
                    output,
                    want,
                    tolerance: self.tolerance.unwrap_or_default(),
                    rms_tolerance,
                })
            })
            .collect();
        outcome.judge(&expected);
        Ok(outcome)
    }

    fn expectation(&self) -> Expectation<'_> {
        Expectation {
            expect: self.expect,
            rule: self.expect_rule.as_deref(),
        }
    }

    /// Returns the case with the computed outputs as its expected ones, so that it can be run elsewhere. Elements
    /// that this case leaves unspecified stay so; the tolerance is this case's, or 0.
    ///
    /// # Errors
    /// [`CaseError::Contradiction`] if the outcome has no outputs; [`CaseError::NanOutput`] for a NaN in an element
    /// that the case does not leave unspecified.
    pub fn with_outputs(&self, outcome: &Outcome) -> std::result::Result<Case, CaseError> {
        if outcome.outputs.is_empty() {
            return Err(CaseError::Contradiction("the case was not computed"));
        }
        let mut case = self.clone();
        case.expect = Expect::Ok;
        case.tolerance = Some(self.tolerance.unwrap_or_default());
        let of = |name, before: &Option<CaseTensor>| {
            let got = outcome.output(name);
            got.map(|got| kept(name, got, before.as_ref())).transpose()
        };
        case.attention_out = of("attention_out", &self.attention_out)?;
        case.softmax_lse = of("softmax_lse", &self.softmax_lse)?;
        Ok(case)
    }

    /// Returns the call's arguments with the inputs uploaded, and without outputs.
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
        // A file is data: it must not make the device access memory outside of its tensors.
        let expected =
            |lint: &Rule| self.expect == Expect::Ok && self.expect_rule.as_deref() == Some(lint.id);
        let allowed = |lint: &Rule| lint.level == Level::Lint && !lint.overruns && !expected(lint);
        for lint in rules::lints::all().filter(|lint| allowed(lint)) {
            arguments.allow_lint(lint.id);
        }
        Ok(arguments)
    }
}

pub(super) fn upload(stream: &Stream, tensor: &CaseTensor) -> Result<AnyTensor> {
    stream.upload_bytes(tensor.dtype(), tensor.bytes(), tensor.shape())
}
