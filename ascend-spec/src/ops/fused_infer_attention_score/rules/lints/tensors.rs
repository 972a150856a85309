//! Tensors of every kind, and the factor of the scores.

use super::pages::{self, strided_cache};
use super::{Report, lint};
use crate::TensorDesc;
use crate::allowed::{Named, Outcome, PlainFormat};
use crate::attention_problem::lint_scale;
use crate::ops::fused_infer_attention_score::rules::unified::lists;
use crate::ops::fused_infer_attention_score::{CheckedCall, FiaCall, Parameter, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    STRIDED = "tensor.strided",
        Lint("a view whose elements lie apart reaches at least as far as its elements side by side do"),
        V1, "FusedInferAttentionScore documentation, constraints",
        "every tensor is contiguous",
        "copy the tensor to a contiguous one: newer CANN releases refuse strided ones";
    EMPTY = "tensor.empty", Lint("the tensor counts as absent"), V1, "checks E4.1, E4.9, F14",
        "an optional tensor that is given has elements",
        "pass a null pointer instead: the operator takes an empty tensor for one that is not given";
    FORMAT = "tensor.format",
        Lint("the tensor is read in the order of its axes, as far as its shape says"),
        V1, "check A3; FusedInferAttentionScore documentation, parameters",
        "every tensor has a plain format: ND, NCL, NCHW or another of row-major axes",
        "describe the tensor as ND: the operator looks at the formats of some tensors only, and takes all for ND";
    COUNTABLE = "tensor.countable", Overrun("no memory holds such a tensor"), V1, "check B3",
        "the number of elements of every tensor fits in 63 bits",
        "correct the shape: the operator counts the elements of query, key, value, mask and outputs alone";
    SCALE = "scale_value.finite", Lint("only numbers change"), V1, "FusedInferAttentionScore documentation, scaleValue",
        "scaleValue is a finite number",
        "pass the factor of the scores, usually one over the root of the head dimension";
    SCALE_ZERO = "scale_value.zero",
        Lint("only numbers change"), V1, "FusedInferAttentionScore documentation, scaleValue",
        "scaleValue is not 0 in 32 bits",
        "pass one over the root of the head dimension: with 0 each visible key weighs alike, whatever query and key \
         are";
    SCALE_INVERSE = "scale_value.inverse",
        Lint("only numbers change"), V1, "FusedInferAttentionScore documentation, scaleValue",
        "scaleValue is neither the head dimension nor its root",
        "pass one over the root: the operator multiplies scores by scaleValue, it does not divide";
}

/// What is unusual about the tensors of a call, found in one pass: most calls have nothing of it.
#[derive(Clone, Copy, Default)]
pub(super) struct UnusualTensors {
    strided: bool,
    format: bool,
    /// An optional input is empty, or has more elements than can be counted.
    size: bool,
}

impl UnusualTensors {
    pub(super) fn of(call: &FiaCall<'_>) -> UnusualTensors {
        let mut unusual = UnusualTensors::default();
        let mut look = |desc: &TensorDesc| {
            unusual.strided |= !desc.is_contiguous();
            unusual.format |= !desc.format.is_plain();
        };
        let mut size = false;
        for parameter in Parameter::tensors() {
            for desc in call.tensors(parameter) {
                look(desc);
                size |= is_optional(parameter) && (!countable(desc) || desc.is_empty());
            }
        }
        UnusualTensors { size, ..unusual }
    }
}

/// Whether the parameter is an input that a call may leave out.
fn is_optional(parameter: Parameter) -> bool {
    use Parameter::{Key, Query, Value};
    !matches!(parameter, Query | Key | Value) && !parameter.is_output()
}

fn countable(desc: &TensorDesc) -> bool {
    desc.elements().is_some_and(|count| i64::try_from(count).is_ok())
}

pub(super) fn strided(p: &CheckedCall<'_>, unusual: UnusualTensors, report: Report<'_>) {
    if !unusual.strided {
        return;
    }
    for (argument, desc) in p.call.each_tensor() {
        lint!(
            report,
            desc.is_contiguous() || strided_cache(p, argument.parameter, desc).is_some(),
            STRIDED,
            format_args!("{} {desc}", argument.parameter.acl_name()),
            "row-major strides",
            match p.cache.is_some() && pages::is_cached(argument.parameter) {
                true => lists::CONTIGUOUS_CACHE,
                false => STRIDED.fix,
            },
        );
    }
    pages::copied(p, report);
}

pub(super) fn check(p: &CheckedCall<'_>, unusual: UnusualTensors, report: Report<'_>) {
    if unusual.format {
        for (argument, desc) in p.call.each_tensor() {
            FORMAT
                .takes(Named(format_args!("{} in format", argument.parameter.acl_name()), desc.format), PlainFormat)
                .report(report);
        }
    }
    if unusual.size {
        for parameter in Parameter::tensors().filter(|parameter| is_optional(*parameter)) {
            for desc in p.call.tensors(parameter) {
                size(desc, parameter.acl_name(), report);
            }
        }
    }
    lint_scale(p.call.scale, [p.problem.head_dim, p.problem.rope_dim], [&SCALE, &SCALE_ZERO, &SCALE_INVERSE], report);
}

fn size(desc: &TensorDesc, name: &str, report: Report<'_>) {
    lint!(
        report,
        countable(desc),
        COUNTABLE,
        format_args!("{name} {}", desc.shape),
        "dimensions of at least 0 with a product below 2^63",
    );
    lint!(report, !desc.is_empty(), EMPTY, format_args!("{name} {}", desc.shape), "a tensor with elements, or none",);
}
