//! The form of attention: which head dimensions and layouts may be combined.

use crate::allowed::{DivisorsOf, Multiples, Named, Noted, Outcome, Shown};
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, heads, packed};
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, DType, Layout, Violation};

rules! {
    in Scope::UNIFIED;
    LAYOUT = "input_layout.form", TILING_ERROR, V1, "checks I8, I9; Ascend 950, layouts",
        "the absorbed form has the layouts BSH, BSND, BNSD, TND and those that put heads first in the output, every \
         other form the nine others",
        "use the layout without _NBSD or TND_NTD, or for the absorbed form one of its eight";
    REORDERED_DIM = "head_dim.reordered", TILING_ERROR, V1, "check I9; Ascend 950, L8",
        "without rotary parts NTD, NTD_TND, BSH_BNSD and BSND_BNSD take head dimensions of 64 or 128, or 192 with \
         values of 128",
        "pad the head dimension with zeros to 64 or 128, or use a layout that keeps its order";
    PACKED_DIM = "head_dim.packed", TILING_ERROR, V1, "check I9" in Scope::A2_A3.since(V8_5),
        "without rotary parts TND takes head dimensions of 64, 128 or 192, or 192 with values of 128",
        "pad heads of up to 192 with zeros; longer ones go with BSH, BSND and BNSD, up to 256 also with innerPrecise 0 \
         and fewer key heads than query heads";
    VALUE_DIM = "head_dim.value", TILING_ERROR, V1, "checks G0.4, I9",
        "query and value have one head dimension, or 192 and 128",
        "pad the narrower of query, key and value with zeros";
    DIFFERENT = "head_dim.different", TILING_ERROR, V1, "Ascend 950, L12" in Scope::ASCEND_950,
        "head dimensions of query and value that differ are at most 128, in BSH, BSND, BNSD or TND, with sparse modes \
         0, 2 or 3, and with no cache, softmaxLse, position bias or left padding",
        "pad the narrower of query, key and value with zeros";
    ALIGNED = "head_dim.aligned_rows", TILING_ERROR, V1, "check I9; Ascend 950, L9",
        "several query rows on Atlas A2 and A3, and BNSD_BSND everywhere, have a head dimension that is a multiple of \
         16, with an INT8 output of 32",
        "pad the head dimension of query, key and value with zeros; the scale stays";
    KEY_DIM = "head_dim.key", TILING_ERROR, V1, "checks G4.4, I9; Ascend 950, L5",
        "the key has the query's head dimension",
        "pad the shorter heads of query and key with zeros";
}

/// Forms of attention that the unified checker distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Queries and keys of one part.
    Plain,
    /// Heads of 128 with rotary parts.
    Split,
    /// Heads of 192, of which 64 are rotary, with values of 128.
    Combined,
    /// Heads of 512 with rotary parts: latent attention with its projections absorbed.
    Absorbed,
}

impl Facts<'_> {
    pub(crate) fn form(&self) -> Form {
        match (self.rope(), self.q.dim, self.v.dim) {
            (true, 512, _) => Form::Absorbed,
            (true, ..) => Form::Split,
            (false, 192, 128) => Form::Combined,
            (false, ..) => Form::Plain,
        }
    }

    /// Whether query and value differ in their head dimension other than as 192 and 128.
    pub(super) fn dims_differ(&self) -> bool {
        self.form() != Form::Combined && self.q.dim != self.v.dim
    }

    /// The four layouts of plain attention with a batch axis.
    pub(crate) fn classic_layout(&self) -> bool {
        matches!(self.layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd | Layout::BnsdBsnd)
    }
}

/// Checks the head counts of the attributes and of the query.
pub(crate) fn counts(f: &Facts<'_>) -> Result<(), Violation> {
    let (heads, kv_heads) = (f.call.num_heads, f.kv_heads);
    heads::KV_HEADS
        .takes(Shown(f.call.num_key_value_heads, kv_heads), 1..)
        .fix(|| heads::own_heads(f, &heads::KV_HEADS))?;
    heads::HEADS_DIVIDE
        .takes(Shown(format_args!("{heads} query heads over {kv_heads}"), kv_heads), DivisorsOf(heads))
        .fix(|| heads::own_heads(f, &heads::HEADS_DIVIDE))?;
    heads::query(f)
}

/// Checks the layout by form.
pub(crate) fn layout(f: &Facts<'_>) -> Result<(), Violation> {
    let absorbed = matches!(
        f.layout,
        Layout::Bsh
            | Layout::Bsnd
            | Layout::Bnsd
            | Layout::Tnd
            | Layout::BshNbsd
            | Layout::BsndNbsd
            | Layout::BnsdNbsd
            | Layout::TndNtd
    );
    let others = !matches!(f.layout, Layout::BshNbsd | Layout::BsndNbsd | Layout::BnsdNbsd | Layout::TndNtd);
    require!(
        match f.form() {
            Form::Absorbed => absorbed,
            _ => others,
        },
        LAYOUT,
        f.layout,
        "BSH, BSND, BNSD, TND; BNSD_BSND, BSH_BNSD, BSND_BNSD, NTD and NTD_TND, or for the absorbed form BSH_NBSD, \
         BSND_NBSD, BNSD_NBSD and TND_NTD",
    );
    Ok(())
}

/// Checks head dimensions against each other, and by layout.
pub(crate) fn dims(f: &Facts<'_>) -> Result<(), Violation> {
    let (q, k, v) = (f.q.dim, f.k.dim, f.v.dim);
    for dim in [q, v] {
        heads::DIM_MAX.takes(dim, 1..=512)?;
    }
    KEY_DIM.takes(Named(format_args!("query {q}, key"), k), q).fix(|| heads::packed_rows(f).unwrap_or(KEY_DIM.fix))?;
    let form = f.form();
    if f.is_950() && f.dims_differ() && f.kind() == QuantisationKind::Half {
        return different(f);
    }
    require!(
        form == Form::Combined || q == v,
        VALUE_DIM,
        format_args!("query {q}, value {v}"),
        "one head dimension, or 192 and 128",
    );
    if form == Form::Plain {
        let reordered = matches!(f.layout, Layout::Ntd | Layout::NtdTnd | Layout::BshBnsd | Layout::BsndBnsd);
        require!(!reordered || matches!(q, 64 | 128), REORDERED_DIM, format_args!("{q} with {}", f.layout), "64, 128",);
        require!(
            for f.target => f.layout != Layout::Tnd || matches!(q, 64 | 128 | 192),
            PACKED_DIM,
            q,
            "64, 128, 192",
            packed_dim(f),
        );
    }
    let step = aligned(f);
    ALIGNED.takes(Noted(q, format_args!("with {}", f.layout)), Multiples(step, ..=512))
}

/// The fix for a head dimension of packed rows: the split-fuse path, where only innerPrecise keeps the call from it;
/// padding with zeros, where a longer head is taken; otherwise another layout.
fn packed_dim(f: &Facts<'_>) -> Result<(Change, &'static str), String> {
    let split_fuse = crate::ops::fused_infer_attention_score::FiaCall { inner_precise: 0, ..f.call.clone() };
    if f.call.inner_precise != 0 && split_fuse.check(Version::V1, f.target).is_ok() {
        let precise = Change::set(Parameter::InnerPrecise, 0);
        return Ok((precise, "the split-fuse path takes heads of up to 256"));
    }
    Err(packed::longer_heads(f.q.dim.max(f.v.dim)))
}

/// The number that the head dimension must be a multiple of.
fn aligned(f: &Facts<'_>) -> i64 {
    let bnsd_bsnd = f.layout == Layout::BnsdBsnd;
    // Without a scale, which 9.0 does not require, this condition goes unchecked too.
    let int8 = f.out.dtype == DType::Int8 && f.call.quant_scale2.is_some();
    let unlooked_at = f.is_950() && (!bnsd_bsnd || f.kind() == QuantisationKind::Tensor);
    if f.form() != Form::Plain || unlooked_at {
        return 1;
    }
    match (bnsd_bsnd, f.q.rows) {
        (true, _) if int8 => 32,
        (false, 1) => 1,
        // Until 9.0 every INT8 output needs a multiple of 32.
        (false, _) if int8 && !f.since(Cann::V9_1) => 32,
        _ => 16,
    }
}

/// Checks head dimensions of query and value that differ, on Ascend 950.
fn different(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let halves = [f.query, f.key, f.value, f.out].into_iter().all(|desc| desc.dtype.is_half());
    require!(
        f.form() == Form::Plain
            && f.q.dim <= 128
            && f.v.dim <= 128
            && halves
            && matches!(f.layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd | Layout::Tnd)
            && !f.paged()
            && !call.softmax_lse_flag
            && call.pse_shift.is_none()
            && call.query_padding_size.is_none()
            && call.kv_padding_size.is_none()
            && matches!(f.mode(), 0 | 2 | 3),
        DIFFERENT,
        format_args!("{} and {} in {}", f.q.dim, f.v.dim, f.layout),
        "one head dimension, or two of at most 128 in a plain call",
    );
    Ok(())
}
