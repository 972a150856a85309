//! First checks: required arguments, product, dtypes, formats, layout, and what this crate does not support yet.

use super::Facts;
use crate::allowed::{Named, Noted, Outcome, PlainFormat, Rank};
use crate::layout::{Axes, Extents};
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter, Route, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, DType, Layout, NewArgument, Soc, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    REQUIRED = "call.required", PARAM_NULLPTR, V1, "check A1",
        "query, key, value and attentionOut are given",
        "pass all four";
    PRODUCT = "call.product", FIND_KERNEL_ERROR, V1, "FusedInferAttentionScore documentation, products",
        "the product has this version of the operator",
        "run on one of these products, with its version; Atlas inference products (310P) have PromptFlashAttention and \
         IncreFlashAttention instead";
    ENTRY_POINT = "call.entry_point", RUNTIME_ERROR, V1, "Ascend 950, entry points" in Scope::ASCEND_950,
        "Ascend 950 is called by V5",
        "call V5: the older entry points return at once";
    DTYPE = "dtype.registered", PARAM_INVALID, V1, "check A2",
        "the tensor's dtype is one that the operator takes there",
        "convert the tensor to one of the allowed dtypes";
    FORMAT = "format.plain", PARAM_INVALID, V1, "check A3",
        "the tensor's format is ND, NCL, NCHW or another plain one",
        "describe the tensor as ND";
    COUNTABLE = "shape.countable", TILING_ERROR, V1, "check B3",
        "no dimension is negative, each has a stride, and the number of elements fits in 63 bits",
        "correct the shape of the tensor";
    LAYOUT = "input_layout.known", TILING_ERROR, V1, "check B4",
        "inputLayout is one that the operator takes",
        "spell the layout as CANN does, in capitals";
    QUERY_RANK = "query.rank", TILING_ERROR, V1, "check B7",
        "the query has as many axes as the layout",
        "reshape the query or choose the layout that it has";
    QUERY_HIDDEN = "query.hidden_size", TILING_ERROR, V1, "checks D2, F11",
        "the query's hidden size divides by numHeads",
        "correct numHeads or the query's last axis";
    HEADS_POSITIVE = "num_heads.positive", TILING_ERROR, V1, "checks B6, D1",
        "numHeads is at least 1",
        "set numHeads to the query's number of heads";
    HEADS_ZERO = "num_heads.zero",
        TilingCrash("x86 hosts divide the hidden size by zero, others refuse the call"),
        V1, "status codes, numHeads" in Scope::A2_A3.since(V8_5).until(V9_1),
        "numHeads is not 0 with BSH, BSH_NBSD and BSH_BNSD, nor from 9.0 on with TND_NTD",
        "set numHeads to the query's number of heads";
    ROWS = "input_layout.bnsd_bsnd_rows", TILING_ERROR, V1, "check B17" in Scope::A2_A3,
        "BNSD_BSND has more than one query row",
        "use BNSD for single rows: the two are the same there but for the order of two axes";
    PREFILL_LAYOUT = "input_layout.prefill", TILING_ERROR, V1, "check D16" in Scope::A2_A3,
        "in the prefill path inputLayout is BSH, BSND, BNSD, BNSD_BSND, TND or NTD_TND",
        "use the layout of the query alone, and reorder the output afterwards";
    DEQUANT_QUERY = "dequant_scale_query.unused", TILING_ERROR, V4, "checks C2, F14d" in Scope::A2_A3,
        "dequantScaleQuery and queryQuantMode go with multi-head latent attention of an INT8 query",
        "drop it and set queryQuantMode to 0";
    EMPTY_OUT = "query.empty_output", TILING_ERROR, V1, "check B2",
        "an empty query has an empty attentionOut; for the unified checker, it alone",
        "give both tensors the same empty shape";
    EMPTY_DECODE = "query.empty_decode", TILING_ERROR, V1, "checks F1, J3" in Scope::A2_A3,
        "a call with one query row a sequence has a query that is not empty",
        "skip the call when there is nothing to decode";
}

/// The required tensors: query, first key, first value, output.
pub(crate) struct MainTensors<'a> {
    pub(crate) query: &'a TensorDesc,
    pub(crate) key: &'a TensorDesc,
    pub(crate) value: &'a TensorDesc,
    pub(crate) out: &'a TensorDesc,
}

pub(crate) fn main_tensors<'a>(call: &'a FiaCall<'a>) -> Result<MainTensors<'a>, Violation> {
    Ok(MainTensors {
        query: REQUIRED.requires(call.query.as_ref(), "query")?,
        key: REQUIRED.requires(call.key.first(), "key")?,
        value: REQUIRED.requires(call.value.first(), "value")?,
        out: REQUIRED.requires(call.attention_out.as_ref(), "attentionOut")?,
    })
}

impl Version {
    /// What the entry points check before any argument: those before V5 refuse Ascend 950 in releases that know it.
    ///
    /// # Errors
    /// The broken rule.
    pub fn enter(self, target: Target) -> Result<(), Violation> {
        require!(
            for target => self == Version::V5,
            ENTRY_POINT,
            self.symbol(),
            Version::V5.symbol(),
        );
        Ok(())
    }
}

pub(crate) fn product(version: Version, target: Target) -> Result<(), Violation> {
    require!(
        version.runs_on(target),
        PRODUCT,
        format_args!("{} on {target}", version.symbol()),
        "V1 to V4 on Atlas A2 and A3, V5 on these and Ascend 950 from CANN 9.0 on, none on other products",
    );
    Ok(())
}

/// Checks dtypes and formats of the tensors that the API layer looks at.
pub(crate) fn types(call: &FiaCall<'_>, main: &MainTensors<'_>, target: Target) -> Result<(), Violation> {
    use DType::{Bf16, Bool, Float16, Int4, Int8, Int32, UInt8};
    if target.is_950() {
        return types_950(call, main);
    }
    if target.soc == Soc::Ascend950 {
        small_floats(call, main)?;
    }
    one(main.query, "query", &[Float16, Bf16, Int8])?;
    for key in call.key {
        one(key, "key", &[Float16, Bf16, Int8, Int4, Int32])?;
    }
    for value in call.value {
        one(value, "value", &[Float16, Bf16, Int8, Int4, Int32])?;
    }
    if let Some(pse_shift) = &call.pse_shift {
        let slopes = super::pse::slopes(call, target);
        let allowed: &[DType] = if slopes { &[DType::Float] } else { &[Float16, Bf16] };
        one(pse_shift, "pseShift", allowed)?;
    }
    if let Some(mask) = &call.atten_mask {
        one(mask, "attenMask", &[Bool, Int8, UInt8])?;
    }
    super::sink::dtype(call, target)?;
    one(main.out, "attentionOut", &[Float16, Bf16, Int8])
}

/// Checks dtypes and formats on Ascend 950.
fn types_950(call: &FiaCall<'_>, main: &MainTensors<'_>) -> Result<(), Violation> {
    use DType::{Bf16, Bool, Float, Float4E2M1, Float8E4M3Fn, Float16, HiFloat8, Int4, Int8, Int32, UInt8};
    const LARGE: [DType; 5] = [Float16, Bf16, Int8, Float8E4M3Fn, HiFloat8];
    const CACHED: [DType; 8] = [Float16, Bf16, Int8, Float8E4M3Fn, HiFloat8, Int4, Int32, Float4E2M1];
    one(main.query, "query", &LARGE)?;
    for key in call.key {
        one(key, "key", &CACHED)?;
    }
    for value in call.value {
        one(value, "value", &CACHED)?;
    }
    if let Some(pse_shift) = &call.pse_shift {
        one(pse_shift, "pseShift", &[Float16, Bf16, Float])?;
    }
    if let Some(mask) = &call.atten_mask {
        one(mask, "attenMask", &[Bool, Int8, UInt8])?;
    }
    if let Some(sink) = &call.learnable_sink {
        one(sink, "learnableSink", &[Float16, Bf16])?;
    }
    one(main.out, "attentionOut", &LARGE)
}

/// Types that Ascend 950 takes beyond those of the other products.
fn small_floats(call: &FiaCall<'_>, main: &MainTensors<'_>) -> Result<(), Violation> {
    use DType::{Float4E2M1, Float8E4M3Fn, HiFloat8};
    let newer = |desc: &TensorDesc| matches!(desc.dtype, HiFloat8 | Float8E4M3Fn);
    let mut cached = call.key.iter().chain(call.value);
    if newer(main.query) || newer(main.out) || cached.any(|desc| newer(desc) || desc.dtype == Float4E2M1) {
        return Err(Violation::unsupported(
            "the types that Ascend 950 has beyond the other products' (HIFLOAT8, FLOAT8_E4M3FN, FLOAT4_E2M1)",
        ));
    }
    Ok(())
}

fn one(desc: &TensorDesc, name: &str, allowed: &[DType]) -> Result<(), Violation> {
    DTYPE.takes(Named(name, desc.dtype), allowed).fix(|| format!("convert {name} to one of the allowed dtypes"))?;
    FORMAT
        .takes(Named(format_args!("{name} in format"), desc.format), PlainFormat)
        .fix(|| format!("describe {name} as ND"))
}

pub(crate) fn countable(call: &FiaCall<'_>, main: &MainTensors<'_>) -> Result<(), Violation> {
    let mask = call.atten_mask.as_ref().map(|mask| (mask, "attenMask"));
    let lse = call.softmax_lse.as_ref().map(|lse| (lse, "softmaxLse"));
    let lists = (call.key.iter().map(|key| (key, "key"))).chain(call.value.iter().map(|value| (value, "value")));
    for (desc, name) in
        [(main.query, "query"), (main.out, "attentionOut")].into_iter().chain(lists).chain(mask).chain(lse)
    {
        require!(
            desc.is_countable(),
            COUNTABLE,
            format_args!("{name} {} strides {}", desc.shape, desc.strides),
            "dimensions of at least 0 with a product below 2^63",
            format_args!("correct the shape of {name}"),
        );
    }
    Ok(())
}

/// Whether a release knows `layout`.
fn known(layout: Layout, target: Target) -> bool {
    target.cann >= Cann::V8_5 || !matches!(layout, Layout::Ntd | Layout::BshBnsd | Layout::BsndBnsd)
}

pub(crate) fn layout(call: &FiaCall<'_>, target: Target) -> Result<Layout, Violation> {
    match Layout::parse(call.input_layout) {
        Some(layout) if known(layout, target) => Ok(layout),
        _ => Err(crate::rule::broken(
            &LAYOUT,
            format_args!("{:?}", call.input_layout),
            LayoutNames(target),
            match Layout::parse(&call.input_layout.to_ascii_uppercase()) {
                Some(layout) if known(layout, target) => Ok(Change::set(Parameter::InputLayout, layout.as_str())),
                _ => Err(LAYOUT.fix),
            },
        )),
    }
}

struct LayoutNames(Target);

impl std::fmt::Display for LayoutNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layouts = Layout::ALL.iter().filter(|layout| known(**layout, self.0));
        for (index, layout) in layouts.enumerate() {
            write!(f, "{}{layout}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// Extents of the query.
pub(crate) fn query(
    call: &FiaCall<'_>,
    layout: Layout,
    target: Target,
    query: &TensorDesc,
) -> Result<Extents, Violation> {
    let axes = layout.input();
    let divides = axes == Axes::Bsh || (layout == Layout::TndNtd && target.cann >= Cann::V9_0);
    require!(
        for target => call.num_heads != 0 || !divides,
        HEADS_ZERO,
        format_args!("0 with {layout}"),
        "at least 1",
    );
    HEADS_POSITIVE.takes(call.num_heads, 1..).fix(|| match axes.extents(&query.shape, 1) {
        Some(own) if axes != Axes::Bsh && own.heads > 0 => Ok(Change::set(Parameter::NumHeads, own.heads)),
        _ => Err(HEADS_POSITIVE.fix),
    })?;
    QUERY_RANK.takes(Noted(query.shape, format_args!("with {layout}")), Rank(axes.rank()))?;
    let remainder = match target.cann >= Cann::V8_5 {
        true => Remainder::Forgotten,
        false => Remainder::Refused,
    };
    match remainder.extents(layout, query, call.num_heads) {
        Some(extents) => Ok(extents),
        None => Err(indivisible(call, query)),
    }
}

/// Checks that the query's hidden size is a multiple of the number of heads.
pub(crate) fn divides(call: &FiaCall<'_>, layout: Layout, query: &TensorDesc) -> Result<(), Violation> {
    match layout.input().extents(&query.shape, call.num_heads) {
        Some(_) => Ok(()),
        None => Err(indivisible(call, query)),
    }
}

fn indivisible(call: &FiaCall<'_>, query: &TensorDesc) -> Violation {
    QUERY_HIDDEN.broken(
        format_args!("{} with numHeads {}", query.shape, call.num_heads),
        "a hidden size that is numHeads times the head dimension",
    )
}

/// What the operator does with a hidden size that is no multiple of the number of heads: from 8.5 on the prefill path
/// drops the remainder.
#[derive(Clone, Copy)]
pub(crate) enum Remainder {
    Refused,
    Forgotten,
}

impl Remainder {
    pub(crate) fn extents(self, layout: Layout, desc: &TensorDesc, heads: i64) -> Option<Extents> {
        match (self, layout.input(), &desc.shape[..]) {
            (Remainder::Forgotten, Axes::Bsh, &[batch, rows, hidden]) if heads > 0 => {
                Some(Extents { batch, heads, rows, dim: hidden / heads })
            }
            (_, axes, shape) => axes.extents(shape, heads),
        }
    }
}

/// Refuses the layouts that put heads first in the output, which belong to the decode path.
pub(crate) fn prefill_layout(layout: Layout) -> Result<(), Violation> {
    require!(
        !matches!(layout.output(), Axes::Nbsd | Axes::Ntd),
        PREFILL_LAYOUT,
        layout,
        "BSH, BSND, BNSD, BNSD_BSND, TND, NTD_TND",
    );
    Ok(())
}

/// Refuses layouts that the prefill and the decode path do not know in every release.
pub(crate) fn old_layout(f: &Facts<'_>) -> Result<(), Violation> {
    let target = Target::snapshot(f.target.soc);
    require!(
        known(f.layout, target),
        LAYOUT,
        format_args!("{} with {} keys under a {} query", f.layout, f.key.dtype, f.query.dtype),
        LayoutNames(target),
    );
    Ok(())
}

/// Refuses single rows in BNSD_BSND, which the prefill path does not take.
pub(crate) fn several_rows(f: &Facts<'_>) -> Result<(), Violation> {
    require!(
        f.layout != Layout::BnsdBsnd || f.q.rows != 1,
        ROWS,
        "1 query row",
        "2 or more",
        (
            vec![
                Change::set(Parameter::InputLayout, Layout::Bnsd.as_str()),
                Change::to(Parameter::AttentionOut, NewArgument::Shape(f.query.shape)),
            ],
            "for single rows the two are the same but for the order of two axes",
        ),
    );
    Ok(())
}

/// Whether the query is empty: the prefill path and the unified checker then do nothing.
pub(crate) fn empty_query(main: &MainTensors<'_>, route: Route, unified: bool) -> Result<bool, Violation> {
    if !main.query.is_empty() {
        require!(
            !(main.out.is_empty() && unified),
            EMPTY_OUT,
            format_args!("query {} with attentionOut {}", main.query.shape, main.out.shape),
            "an attentionOut with elements",
        );
        return Ok(false);
    }
    require!(
        main.out.is_empty(),
        EMPTY_OUT,
        format_args!("query {} with attentionOut {}", main.query.shape, main.out.shape),
        "an attentionOut without elements",
    );
    require!(route == Route::Prefill, EMPTY_DECODE, main.query.shape, "at least one sequence",);
    Ok(true)
}

/// Checks that a query outside of the quantised absorbed form has no dequantisation scale; `mode_counts` is whether
/// the mode is checked as well.
pub(crate) fn query_scale(call: &FiaCall<'_>, mode_counts: bool) -> Result<(), Violation> {
    require!(
        call.dequant_scale_query.is_none() && !(mode_counts && call.query_quant_mode != 0),
        DEQUANT_QUERY,
        format_args!("queryQuantMode {}", call.query_quant_mode),
        "no dequantScaleQuery, queryQuantMode 0",
        vec![Change::to(Parameter::DequantScaleQuery, NewArgument::Nothing), Change::set(Parameter::QueryQuantMode, 0)],
    );
    Ok(())
}
