//! A live call of any declared operator, to be written to a file.

use super::Recorded;
use super::live::LiveCall;
use super::live_operator::LiveOperator;
use crate::case_file::{Expect, ParameterCase, Tolerance};

/// A call and its tensors.
#[derive(Clone, Debug)]
pub enum AnyLive {
    /// A call of FusedInferAttentionScore.
    Attention(Box<LiveCall>),
    /// A call of another operator.
    Operator(Box<LiveOperator>),
}

impl From<LiveCall> for AnyLive {
    fn from(call: LiveCall) -> Self {
        Self::Attention(Box::new(call))
    }
}

impl From<LiveOperator> for AnyLive {
    fn from(call: LiveOperator) -> Self {
        Self::Operator(Box::new(call))
    }
}

/// The labels that are written with a call that was refused or failed.
pub(super) struct Failure<'a> {
    pub(super) name: &'a str,
    pub(super) note: &'a str,
    pub(super) rule: Option<&'static str>,
    pub(super) expect: Option<Expect>,
}

impl Failure<'_> {
    fn label(
        &self,
        name: &mut String,
        note: &mut String,
        rule: &mut Option<String>,
        expect: &mut Expect,
    ) {
        self.name.clone_into(name);
        self.note.clone_into(note);
        *rule = self.rule.map(str::to_owned);
        *expect = self.expect.unwrap_or(*expect);
    }
}

impl AnyLive {
    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        match self {
            Self::Attention(call) => call.parameters(id, accepted, about),
            Self::Operator(call) => call.parameters(id, accepted, about),
        }
    }

    /// Returns the call with its data, or the reason why no case of at most `room` bytes can hold them.
    pub(super) fn failed(&self, failure: &Failure<'_>, room: u64) -> Result<Recorded, String> {
        Ok(match self {
            Self::Attention(call) => {
                let mut case = call.case_within(room)?;
                failure.label(
                    &mut case.name,
                    &mut case.note,
                    &mut case.expect_rule,
                    &mut case.expect,
                );
                case.consistent().map_err(|error| error.to_string())?;
                Recorded::Case(Box::new(case))
            }
            Self::Operator(call) => {
                let mut case = call.case_within(room)?;
                failure.label(
                    &mut case.name,
                    &mut case.note,
                    &mut case.expect_rule,
                    &mut case.expect,
                );
                case.consistent().map_err(|error| error.to_string())?;
                Recorded::Operator(Box::new(case))
            }
        })
    }

    /// Returns the call with its data and its computed outputs, or the reason why no case can hold them.
    pub(super) fn launched(&self, tolerance: Tolerance, name: &str) -> Result<Recorded, String> {
        Ok(match self {
            Self::Attention(call) => {
                let mut case = call.case_with_outputs(tolerance)?;
                name.clone_into(&mut case.name);
                Recorded::Case(Box::new(case))
            }
            Self::Operator(call) => {
                let mut case = call.case_with_outputs(tolerance)?;
                name.clone_into(&mut case.name);
                Recorded::Operator(Box::new(case))
            }
        })
    }
}
