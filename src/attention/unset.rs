//! Refusals of calls whose scale or heads were not set.

use ascend_spec::Layout;
use ascend_spec::fia::FiaCall;

use crate::error::Error;

/// The refusal of a call without a scale.
#[cold]
pub(super) fn scale(call: &FiaCall<'_>) -> Error {
    let extents = call.query.as_ref().and_then(|query| {
        let layout = Layout::parse(call.input_layout)?;
        layout.input().extents(&query.shape, call.num_heads)
    });
    let dim = match (&call.query_rope, extents) {
        // The scale is that of the model's whole head, in the absorbed form too.
        (Some(_), _) => 192,
        (None, Some(of)) => of.dim,
        (None, None) => 128,
    };
    Error::invalid(
        "scale",
        "none",
        format_args!(
            "the factor of the scores, usually one over the root of the head dimension: `.scale(1.0 / {dim}f64.sqrt())`; \
             `.scale(1.0)` for queries that are scaled already"
        ),
    )
}

/// Adds to a refusal about heads how to set the heads of the query, which the caller has not set.
#[cold]
pub(super) fn heads(error: Error, call: &FiaCall<'_>) -> Error {
    let Error::Violation(mut violation) = error else {
        return error;
    };
    let about_heads = ["num_heads.", "num_key_value_heads.", "head_dim.", "cache."];
    if !about_heads
        .iter()
        .any(|group| violation.rule.id.starts_with(group))
    {
        return Error::Violation(violation);
    }
    let of = call.query.as_ref().and_then(|query| {
        let layout = Layout::parse(call.input_layout)?;
        layout.input().extents(&query.shape, call.num_heads)
    });
    violation.fix = match of {
        Some(of) if of.heads != call.num_heads => format!(
            "set the query's heads by `.heads({})`: unset they are {}",
            of.heads, call.num_heads
        ),
        _ => format!(
            "{}; or set the query's heads by `.heads()`: unset they are {}",
            violation.fix, call.num_heads
        ),
    };
    Error::Violation(violation)
}
