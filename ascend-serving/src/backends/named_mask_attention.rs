//! Attention of steps whose mask is a rule of the caller.

use ascend_attention::attention::PerRequest;
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Violation};

use crate::batch::{AttentionMetadata, LayerMask, MaskedRequest};
use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::StepContext;

/// The requests of a step, dummies included, divided where the number of new tokens changes.
fn neighbours(metadata: &AttentionMetadata) -> Vec<Vec<MaskedRequest>> {
    let mut all: Vec<Vec<MaskedRequest>> = Vec::new();
    for request in metadata.masked_requests() {
        let new = request.new;
        match all.last_mut() {
            Some(last) if last.last().is_some_and(|last| last.new == new) => last.push(request),
            _ => all.push(vec![request]),
        }
    }
    all
}

pub(super) fn program<T: Element>(step: &StepContext<'_>) -> Result<StepProgram<T>> {
    let LayerMask::Named(mask) = step.mask else {
        return Err(Violation::new(
            &rules::BACKEND_MASK,
            format_args!("{:?}", step.mask),
            "a named mask",
            "add a backend for the operator's own masks behind this one",
        )
        .into());
    };
    let (mut request, mut token) = (0usize, 0usize);
    let mut calls = Vec::new();
    for neighbours in neighbours(step.metadata) {
        let requests = request..request + neighbours.len();
        let new = neighbours.first().map_or(0, |request| request.new);
        let tokens = token..token + new * neighbours.len();
        (request, token) = (requests.end, tokens.end);
        let lengths = neighbours.iter();
        let lengths = lengths.map(|request| request.cached + request.new);
        let call = StepCall::batched(Layout::Bsh, PerRequest::new(lengths.collect())?);
        let call = call.rows(tokens).requests(requests);
        calls.push(call.named_mask(mask, neighbours));
    }
    Ok(StepProgram::new(calls))
}
