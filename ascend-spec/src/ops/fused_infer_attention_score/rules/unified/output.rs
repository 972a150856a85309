//! Outputs and precision in the unified checker.

use super::Form;
use crate::layout::{Axes, Extents};
use crate::ops::fused_infer_attention_score::rules::{Facts, output};
use crate::ops::fused_infer_attention_score::{Checker, Parameter, Version};
use crate::rule::{broken, require, rules};
use crate::{Cann, Change, Dims, NewArgument, Violation};

rules! {
    in Scope::UNIFIED;
    PRECISE = "inner_precise.range", TILING_ERROR, V1, "check G1.4; Ascend 950, M8",
        "innerPrecise is from 0 to 3, from 9.1 on to 4",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
}

/// Checks the shape of the output. From 9.1 on only some of its axes are checked where input and output have
/// different axis orders, or query and value different head dimensions.
pub(crate) fn shape(f: &Facts<'_>) -> Result<(), Violation> {
    let extents = output::expected(f.q, f.v.dim);
    let want = f.layout.out_shape(extents);
    let fits = match f.since(Cann::V9_1) && f.checker == Checker::Unified {
        true => looked_at(f, extents, want),
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

/// Whether an output fits in the axes that are checked. In the order of the query these are all but the last, and
/// that one too unless query and value have different head dimensions; otherwise heads and rows, of BSH queries only
/// the hidden size. The head dimension is compared with the value's where that is one dense tensor.
fn looked_at(f: &Facts<'_>, extents: Extents, want: Dims) -> bool {
    let heads = f.call.num_heads;
    let dense = !f.paged() && !f.kv_list;
    let free = f.form() == Form::Combined || f.dims_differ();
    if f.layout.input() == f.layout.output() {
        let axis = want.rank().saturating_sub(1);
        let before = |shape: &Dims| shape.with(axis, 0);
        let last = f.out.shape.last().copied().unwrap_or(0);
        let dim = match f.layout.output() {
            // The operator drops the remainder.
            Axes::Bsh => last / heads.max(1),
            _ => last,
        };
        return before(&f.out.shape) == before(&want)
            && match free {
                true => !dense || dim == extents.dim,
                false => want.last() == Some(&last),
            };
    }
    let Some(out) = f.layout.output().extents(&f.out.shape, heads) else {
        return false;
    };
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
    let given = f.call.softmax_lse.as_ref().is_some_and(|lse| !lse.is_empty());
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
