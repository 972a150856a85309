//! Outputs and precision in the unified checker.

use super::Form;
use crate::layout::{Axes, Extents};
use crate::ops::fused_infer_attention_score::rules::{Facts, output};
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{broken, require, rules};
use crate::{Cann, Change, NewArgument, Violation};

rules! {
    in Scope::UNIFIED;
    PRECISE = "inner_precise.range", TILING_ERROR, V1, "check G1.4; Ascend 950, M8",
        "innerPrecise is from 0 to 3, from 9.1 on to 4",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
}

/// Checks the shape of the output. From 9.1 on only some of its axes are checked where input and output have
/// different axis orders.
pub(crate) fn shape(f: &Facts<'_>) -> Result<(), Violation> {
    let extents = output::expected(f.q, f.v.dim);
    let want = f.layout.out_shape(extents);
    let same_order = f.layout.input() == f.layout.output();
    let fits = match f.since(Cann::V9_1) && !same_order {
        true => looked_at(f, extents),
        false => f.out.shape == want,
    };
    require!(
        fits,
        output::OUT_SHAPE,
        format_args!("{} with {}", f.out.shape, f.layout),
        want,
        Change::to(Parameter::AttentionOut, NewArgument::Shape(want)),
    );
    Ok(())
}

/// Whether a reordered output fits in the axes that are checked: heads and rows; of BSH queries only the hidden size;
/// and the head dimension where the value is no cache.
fn looked_at(f: &Facts<'_>, extents: Extents) -> bool {
    let heads = f.call.num_heads;
    let Some(out) = f.layout.output().extents(&f.out.shape, heads) else {
        return false;
    };
    let dense = !f.paged() && !f.kv_list;
    let free = f.form() == Form::Combined || f.dims_differ();
    (!dense || out.dim == extents.dim)
        && match f.layout.input() {
            Axes::Bsh if free => true,
            Axes::Bsh => out.heads.saturating_mul(out.dim) == extents.heads.saturating_mul(f.q.dim),
            _ => (out.heads, out.rows) == (extents.heads, extents.rows),
        }
}

pub(crate) fn precision(f: &Facts<'_>) -> Result<(), Violation> {
    let most = if f.since(Cann::V9_1) { 4 } else { 3 };
    PRECISE.takes(f.call.inner_precise, 0..=most)
}

/// Checks that a log-sum-exp is given if the call writes one.
pub(crate) fn lse_given(f: &Facts<'_>) -> Result<(), Violation> {
    let given = f
        .call
        .softmax_lse
        .as_ref()
        .is_some_and(|lse| !lse.is_empty());
    if f.call.softmax_lse_flag && !given {
        return Err(broken(
            &output::LSE_REQUIRED,
            "no softmaxLse with softmaxLseFlag true",
            f.layout.lse_shape(f.q),
            output::lse_of(f.layout.lse_shape(f.q)),
        ));
    }
    Ok(())
}

pub(crate) fn lse(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(lse) = f.call.softmax_lse.filter(|_| f.call.softmax_lse_flag) else {
        return Ok(());
    };
    output::lse_fits(&lse, f.layout.lse_shape(f.q))
}
