//! Tensors of every kind, and the factor of the scores.

use super::{Report, lint};
use crate::fia::{FiaCall, Operand, Parameter, Problem};
use crate::rule::rules;
use crate::{Format, TensorDesc};

rules! {
    in Scope::ALL;
    STRIDED = "tensor.strided", Lint("a view whose elements lie apart reaches at least as far as its elements side by side do"), V1, "FusedInferAttentionScore documentation, constraints",
        "every tensor is contiguous",
        "copy the tensor to a contiguous one: newer CANN releases refuse strided ones";
    EMPTY = "tensor.empty", Lint("the tensor counts as absent"), V1, "checks E4.1, E4.9, F14",
        "an optional tensor that is given has elements",
        "pass a null pointer instead: the operator takes an empty tensor for one that is not given";
    FORMAT = "tensor.format", Lint("the tensor is read in the order of its axes, as far as its shape says"), V1, "check A3; FusedInferAttentionScore documentation, parameters",
        "every tensor has a plain format: ND, NCL, NCHW or another of row-major axes",
        "describe the tensor as ND: the operator looks at the formats of some tensors only, and takes all for ND";
    COUNTABLE = "tensor.countable", Overrun("no memory holds such a tensor"), V1, "check B3",
        "the number of elements of every tensor fits in 63 bits",
        "correct the shape: the operator counts the elements of query, key, value, mask and outputs alone";
    SCALE = "scale_value.finite", Lint("only numbers change"), V1, "FusedInferAttentionScore documentation, scaleValue",
        "scaleValue is a finite number",
        "pass the factor of the scores, usually one over the root of the head dimension";
}

/// Every tensor of a call with its CANN name.
fn tensors<'a>(call: &'a FiaCall<'a>) -> impl Iterator<Item = (&'a TensorDesc, &'static str)> {
    let one = Parameter::ALL.iter().filter_map(|&parameter| {
        let desc = parameter.of(call).as_ref()?;
        Some((desc, Operand::from(parameter).acl_name()))
    });
    let keys = call.key.iter().map(|desc| (desc, "key"));
    let values = call.value.iter().map(|desc| (desc, "value"));
    one.chain(keys).chain(values)
}

/// The inputs that a call may leave out, with their CANN names.
fn optional<'a>(call: &'a FiaCall<'a>) -> impl Iterator<Item = (&'a TensorDesc, &'static str)> {
    Parameter::ALL
        .iter()
        .filter(|parameter| **parameter != Parameter::Query && !parameter.is_output())
        .filter_map(|&parameter| {
            let desc = parameter.of(call).as_ref()?;
            Some((desc, Operand::from(parameter).acl_name()))
        })
}

pub(super) fn strided(p: &Problem<'_>, report: Report<'_>) {
    for (desc, name) in tensors(p.call) {
        lint!(
            report,
            desc.is_contiguous(),
            STRIDED,
            format_args!("{name} {desc}"),
            "row-major strides",
        );
    }
}

pub(super) fn check(p: &Problem<'_>, report: Report<'_>) {
    for (desc, name) in tensors(p.call) {
        lint!(
            report,
            desc.format.is_plain(),
            FORMAT,
            format_args!("{name} in format {}", desc.format),
            Format::PLAIN,
        );
    }
    for (desc, name) in optional(p.call) {
        lint!(
            report,
            desc.elements()
                .is_some_and(|count| i64::try_from(count).is_ok()),
            COUNTABLE,
            format_args!("{name} {}", desc.shape),
            "dimensions of at least 0 with a product below 2^63",
        );
        lint!(
            report,
            !desc.is_empty(),
            EMPTY,
            format_args!("{name} {}", desc.shape),
            "a tensor with elements, or none",
        );
    }
    lint!(
        report,
        p.scale().is_finite(),
        SCALE,
        p.scale(),
        "a finite number",
    );
}
