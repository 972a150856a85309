//! Refusals of calls that lack what every call needs.

use crate::error::Error;
use crate::tensor::AnyTensor;

/// The refusal of a call without a scale, whose heads have `dim` dimensions.
#[cold]
pub(crate) fn no_scale(dim: i64) -> Error {
    Error::invalid(
        "scale",
        "none",
        format_args!(
            "the factor of the scores, usually one over the root of the head dimension: `.scale(1.0 / {dim}f64.sqrt())`; \
             `.scale(1.0)` for queries that are scaled already"
        ),
    ).fix("set the factor by `.scale(..)`")
}

/// The refusal of a call whose outputs have no elements.
#[cold]
pub(crate) fn no_elements(query: &AnyTensor) -> Error {
    Error::invalid(
        "query",
        query.desc(),
        "a tensor with elements: leave the call out where there is nothing to compute",
    )
    .fix("leave the call out where there is nothing to compute")
}
