//! Refusals of calls whose scale, heads or block table were not set.

use ascend_spec::Layout;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use crate::error::Error;
use crate::ops::operation::no_scale;

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
        (None, Some(extents)) => extents.dim,
        (None, None) => 128,
    };
    no_scale(dim)
}

/// Adds to a refusal of a call without a block table, whose key has the shape of a paged cache, how to give the
/// table.
#[cold]
pub(super) fn block_table(error: Error, call: &FiaCall<'_>) -> Error {
    match error {
        Error::Violation(mut violation) if looks_paged(call).unwrap_or(false) => {
            violation.fix = format!(
                "{}; or, if key and value are a paged cache, bring its block table by `Inputs::paged`",
                violation.fix
            );
            Error::Violation(violation)
        }
        error => error,
    }
}

/// Whether the key of a call without a block table is shaped as a paged cache, and not as a key of its layout.
fn looks_paged(call: &FiaCall<'_>) -> Option<bool> {
    if call.block_table.is_some() {
        return None;
    }
    let axes = Layout::parse(call.input_layout)?.input();
    let query = axes.extents(&call.query.as_ref()?.shape, call.num_heads)?;
    let key = &call.key.first()?.shape;
    let heads = match call.num_key_value_heads {
        0 => call.num_heads,
        heads => heads,
    };
    let as_key = axes.extents(key, heads);
    if as_key.is_some_and(|key| (key.batch, key.heads, key.dim) == (query.batch, heads, query.dim)) {
        return Some(false);
    }
    let (rows, dim) = match key[..] {
        [_, rows, hidden] => (rows, hidden.checked_div(heads)?),
        [_, own, rows, dim] if own == heads => (rows, dim),
        [_, own, parts, rows, 16] if own == heads => (rows, parts.saturating_mul(16)),
        _ => return None,
    };
    Some(rows > 0 && rows.checked_rem(16)? == 0 && dim == query.dim)
}

/// Adds to a refusal about heads how to set the heads of the query, which the caller has not set.
#[cold]
pub(super) fn heads(error: Error, call: &FiaCall<'_>) -> Error {
    let Error::Violation(mut violation) = error else {
        return error;
    };
    let about_heads = ["num_heads.", "num_key_value_heads.", "head_dim.", "cache."];
    if !about_heads.iter().any(|group| violation.rule.id.starts_with(group)) {
        return Error::Violation(violation);
    }
    let extents = call.query.as_ref().and_then(|query| {
        let layout = Layout::parse(call.input_layout)?;
        layout.input().extents(&query.shape, call.num_heads)
    });
    violation.fix = match extents {
        Some(extents) if extents.heads != call.num_heads => {
            format!("set the query's heads by `.heads({})`: unset they are {}", extents.heads, call.num_heads)
        }
        _ => format!("{}; or set the query's heads by `.heads()`: unset they are {}", violation.fix, call.num_heads),
    };
    Error::Violation(violation)
}
