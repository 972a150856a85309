//! Additive position bias.

use super::Facts;
use crate::rule::{require, rules};
use crate::{DType, Refusal};

rules! {
    SHAPE = "pse_shift.shape", TILING_ERROR, V1, "checks E5.1, F13",
        "pseShift is [1 or B, N, rows, keys] and covers every query row and key, a shared prefix included",
        "expand the position bias to every head, query row and key";
    DTYPE = "pse_shift.dtype", TILING_ERROR, V1, "check E5.2",
        "pseShift has the query's dtype, FLOAT16 for an INT8 query",
        "convert the position bias";
}

pub(in crate::fia) fn check(f: &Facts<'_>) -> Result<(), Refusal> {
    let Some(pse) = f
        .call
        .pse_shift
        .as_ref()
        .filter(|pse| !(f.prefill() && pse.is_empty()))
    else {
        return Ok(());
    };
    let dtype = if f.query.dtype == DType::Int8 {
        DType::Float16
    } else {
        f.query.dtype
    };
    require!(pse.dtype == dtype, DTYPE, pse.dtype, dtype,);
    let (rows, keys) = match (f.prefill(), f.paged()) {
        (true, true) => (f.q.rows, super::mask::width(f)),
        // A shared prefix is not counted here, though the operator reads its bias too.
        (true, false) => (f.q.rows, f.key_rows),
        (false, true) => (1, f.key_rows),
        (false, false) => (1, f.longest_key().saturating_add(super::prefix::length(f))),
    };
    let fits = match pse.shape[..] {
        // TND takes no bias at all; NTD_TND looks at two axes and ignores the values.
        [b, n, _, _] if f.packed() => b == 1 && n == f.call.num_heads,
        [b, n, i, j] => {
            let rows_fit = if f.prefill() { i >= rows } else { i == 1 };
            (b == 1 || b == f.batch) && n == f.call.num_heads && rows_fit && j >= keys
        }
        _ => false,
    };
    require!(
        fits,
        SHAPE,
        pse.shape,
        format_args!(
            "[1 or {}, {}, {rows}, {keys}], the last two at least",
            f.batch, f.call.num_heads
        ),
    );
    Ok(())
}
