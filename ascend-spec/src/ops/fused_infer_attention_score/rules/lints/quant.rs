//! Quantised query and output.

use super::{Report, lint};
use crate::ops::fused_infer_attention_score::{CheckedCall, Version};
use crate::rule::rules;
use crate::{DType, TensorDesc};

rules! {
    in Scope::ALL;
    OUT_IGNORED = "quant_scale2.ignored", Lint("the tensors are not looked at"), V1, "check J18",
        "quantScale2 and quantOffset2 go with a quantised output",
        "drop quantScale2 and quantOffset2, or make the output INT8";
    IN_IGNORED = "deq_scale.ignored", Lint("the tensors are not looked at"), V1, "check J18",
        "deqScale1, quantScale1 and deqScale2 go with an INT8 query",
        "drop deqScale1, quantScale1 and deqScale2, or quantise query, key and value";
    IN_UNCHECKED = "deq_scale.unchecked",
        Overrun("eight or four bytes are read whatever the tensor has"), V1, "check J19",
        "deqScale1 and deqScale2 are UINT64 or FLOAT, quantScale1 is FLOAT, each of one element",
        "pass one factor in each: the operator reads the first element";
    SCALE_HALF = "quant_scale2.half",
        Overrun("each element is read as a FLOAT"),
        V1, "check J18; FusedInferAttentionScore documentation, quantScale2",
        "quantScale2 and quantOffset2 are not FLOAT16",
        "convert quantScale2 and quantOffset2 to FLOAT";
    NO_KERNEL = "quant.per_tensor_kernel",
        Lint("the launch fails"), V5, "Ascend 950, full quantisation per tensor" in Scope::ASCEND_950,
        "an INT8 query comes with rotary parts: of the kernels of 9.1 none is for one without",
        "use MXFP8, or keep the query in half precision";
    SCALE_SHAPE = "quant_scale2.shape_unchecked",
        Lint("the elements are counted, and as many are read"), V1, "check J18",
        "quantScale2 and quantOffset2 for each channel have the axes heads and head dimension in this order",
        "shape quantScale2 and quantOffset2 as [N, D]: the operator counts their elements alone";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let outputs = [(&call.quant_scale2, "quantScale2"), (&call.quant_offset2, "quantOffset2")];
    let out = outputs.into_iter().filter_map(|(desc, name)| Some((desc.as_ref()?, name)));
    let quantised = p.problem.out_quantisation.is_some();
    for (desc, name) in out {
        lint!(report, quantised, OUT_IGNORED, name, "none",);
        lint!(
            report,
            desc.dtype != DType::Float16 || !quantised,
            SCALE_HALF,
            format_args!("{name} {}", desc.dtype),
            "FLOAT, or BF16 with a BF16 query",
        );
        lint!(
            report,
            !quantised || channels(p, desc),
            SCALE_SHAPE,
            format_args!("{name} {}", desc.shape),
            format_args!("one element, [{}, {}]", p.problem.heads, p.problem.value_dim),
        );
    }
    lint!(
        report,
        p.problem.int8_query.is_none(),
        NO_KERNEL,
        "an INT8 query without rotary parts",
        "FLOAT16, BF16, or FLOAT8_E4M3FN in groups",
    );
    let inputs = [
        (&call.deq_scale1, "deqScale1", true),
        (&call.quant_scale1, "quantScale1", false),
        (&call.deq_scale2, "deqScale2", true),
    ];
    for (desc, name, wide) in inputs {
        let Some(desc) = desc else { continue };
        lint!(
            report,
            p.problem.query.dtype == DType::Int8 || (!wide && p.problem.probability_scale.is_some()),
            IN_IGNORED,
            name,
            "none",
        );
        let dtype = desc.dtype == DType::Float || (wide && desc.dtype == DType::UInt64);
        lint!(
            report,
            p.problem.query.dtype != DType::Int8 || (dtype && desc.elements() == Some(1)),
            IN_UNCHECKED,
            format_args!("{name} {desc}"),
            if wide { "FLOAT or UINT64 [1]" } else { "FLOAT [1]" },
        );
    }
}

/// Whether a tensor, ignoring axes of size 1, is one number or runs over heads and then the head dimension.
fn channels(p: &CheckedCall<'_>, desc: &TensorDesc) -> bool {
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let (n, d) = (size(p.problem.heads), size(p.problem.value_dim));
    let mut axes = desc.shape.iter().filter(|&&axis| axis != 1);
    match (axes.next(), axes.next(), axes.next()) {
        (None, ..) => true,
        (Some(&all), None, _) => all == n.saturating_mul(d),
        (Some(&heads), Some(&dim), None) => (heads, dim) == (n, d),
        _ => desc.is_empty(),
    }
}
