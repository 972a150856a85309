//! The rules of PromptFlashAttention that come before those of FusedInferAttentionScore's prefill path.

use super::{PromptCall, Version};
use crate::allowed::{Addressable, Named, PlainFormat};
use crate::attention_problem::AttentionProblem;
use crate::dtype::Names;
use crate::ops::fused_infer_attention_score::Verdict;
use crate::ops::inference_attention::{PathCall, path_rules};
use crate::rule::{require, rules};
use crate::{DType, Dims, Layout, Soc, Target, TensorDesc, Violation};

path_rules! {
    "prompt", "PromptFlashAttention", newest "V3", older "V1 and V2",
    required "query, key, value, inputLayout and attentionOut";
    COUNTABLE = "prompt.countable", PARAM_INVALID, V1, "PromptFlashAttention documentation, constraints",
        "no dimension is negative, and the elements of each tensor can be counted and addressed",
        "give the tensor a shape that memory can hold";
    DTYPE = "prompt.dtype", PARAM_INVALID, V1, "PromptFlashAttention documentation, query, key and value",
        "query, key and value are FLOAT16, BF16 (not on 310P) or INT8, all the same",
        "convert the three to one of the allowed dtypes";
    OUT_DTYPE = "prompt.out_dtype", PARAM_INVALID, V1, "PromptFlashAttention documentation, attentionOut",
        "attentionOut has the dtype of query, INT8 for half precision, or FLOAT16 for an INT8 query",
        "give the output an allowed dtype";
    PSE_DTYPE = "prompt.pse_dtype", PARAM_INVALID, V3, "PromptFlashAttentionV3 documentation, pseShift",
        "pseShift is FLOAT16 for a query of FLOAT16 or INT8, BF16 for one of BF16",
        "convert the bias";
    MASK_DTYPE = "prompt.mask_dtype", PARAM_INVALID, V1, "PromptFlashAttention documentation, attenMask",
        "attenMask is BOOL, INT8 or UINT8, or FLOAT16 unless query is INT8",
        "convert the mask";
    HEADS = "prompt.num_heads", PARAM_INVALID, V1, "PromptFlashAttention documentation, numHeads",
        "numHeads is at least 1",
        "pass the number of query heads";
    LAYOUT = "prompt.input_layout", PARAM_INVALID, V1, "PromptFlashAttention documentation, inputLayout",
        "query, key and value have the axes of inputLayout: four in BNSD, BSND and BNSD_BSND, three in BSH, TND, NTD \
         and NSD, two in SH",
        "spell the layout as CANN does, and give the tensors its axes";
    DIM = "prompt.head_dim", PARAM_INVALID, V1, "PromptFlashAttention documentation, head dimension",
        "the query's head dimension is from 1 to 512 and the value's at most 512; the query's is not above the value's \
         where the output is INT8, nor outside of TND where it is above 128",
        "pad the value's head dimension with zeros; check that D is the width of one head: no call of the operator "
        "computes heads longer than 512, and parts of a head are no heads";
    FORMAT = "prompt.format", PARAM_INVALID, V1, "PromptFlashAttention documentation, formats",
        "query, key, value and attentionOut are in a plain format such as ND or NCHW",
        "describe the tensor as ND";
    OUT_SHAPE = "prompt.out_shape", PARAM_INVALID, V1, "PromptFlashAttention documentation, attentionOut",
        "attentionOut has the query's shape with the value's head dimension, in BNSD_BSND with heads behind rows",
        "give the output the shape that is allowed";
    PREFILL = "prompt.prefill_rules", INNER_NULLPTR, V1, "PromptFlashAttention tiling",
        "the call holds the rules of FusedInferAttentionScore's prefill path",
        "see the rule that is named first";
    CARD_SIZE = "prompt.card_size", INNER_NULLPTR, V1, "PromptFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P a call has at most 128 sequences, and axes of at most 65536 query rows and keys",
        "divide the sequences among several calls";
    CARD_PSE = "prompt.card_pse", INNER_NULLPTR, V3, "PromptFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P there is no pseShift",
        "leave the bias out, or run on Atlas A2 or A3";
    CARD_TOKENS = "prompt.card_tokens",
        INNER_NULLPTR, V1, "PromptFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P preTokens is at least the query rows, and nextTokens is 0 or at least the keys",
        "write the band into a mask of BOOL, and pass 2147483647 for both";
    CARD_MASK_DTYPE = "prompt.card_mask_dtype",
        INNER_NULLPTR, V1, "PromptFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P attenMask is BOOL",
        "convert the mask to BOOL";
    CARD_MASK = "prompt.card_mask", INNER_NULLPTR, V1, "PromptFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P attenMask goes with as many query rows as keys, a multiple of 16",
        "pad query, key and value with zeros to one multiple of 16, the last query row at the last key, and hide the \
         added keys";
}

/// The required arguments.
struct Required<'a> {
    query: &'a TensorDesc,
    key: &'a TensorDesc,
    value: &'a TensorDesc,
    out: &'a TensorDesc,
    layout: &'a str,
}

impl PromptCall<'_> {
    /// The most sequences of a call on 310P.
    pub const MOST_CARD_SEQUENCES: i64 = 128;

    /// On 310P, query rows and keys of a call with a mask must be multiples of this number.
    pub const CARD_MASK_ROWS: i64 = 16;

    /// Checks the rules that come before those of the prefill path, and returns the verdict of that path; `None` for
    /// an output without elements.
    pub(super) fn path_verdict(&self, target: Target) -> Result<Option<Verdict>, Violation> {
        let required = Required {
            query: Self::required(self.query.as_ref(), "query")?,
            key: Self::required(self.key.as_ref(), "key")?,
            value: Self::required(self.value.as_ref(), "value")?,
            out: Self::required(self.attention_out.as_ref(), "attentionOut")?,
            layout: Self::required(self.input_layout, "inputLayout")?,
        };
        for (desc, name) in required.tensors() {
            COUNTABLE.takes(Named(name, *desc), Addressable)?;
        }
        if required.out.is_empty() {
            return Ok(None);
        }
        self.dtypes(&required, target)?;
        let (heads, dims) = self.shapes(&required)?;
        for (desc, name) in required.tensors() {
            FORMAT.takes(Named(format_args!("{name} in format"), desc.format), PlainFormat)?;
        }
        let out = out_shape(&required, heads, dims.1);
        OUT_SHAPE.takes(required.out.shape, out)?;
        let Some(Layout::Bnsd | Layout::Bsnd | Layout::BnsdBsnd | Layout::Bsh | Layout::Tnd) =
            Layout::parse(required.layout)
        else {
            return Err(Violation::unsupported("PromptFlashAttention in the layouts SH, NSD and NTD"));
        };
        let verdict = self.tiling(&required, dims)?;
        if self.atten_mask.is_some_and(|mask| mask.dtype == DType::Float16) {
            return Err(Violation::unsupported("attenMask of FLOAT16"));
        }
        Ok(Some(verdict))
    }

    fn dtypes(&self, required: &Required<'_>, target: Target) -> Result<(), Violation> {
        use DType::{Bf16, Bool, Float16, Int8, UInt8};
        let allowed: &[DType] = match target.soc {
            Soc::AtlasInference => &[Float16, Int8],
            _ => &[Float16, Bf16, Int8],
        };
        let dtype = required.query.dtype;
        require!(
            allowed.contains(&dtype) && required.key.dtype == dtype && required.value.dtype == dtype,
            DTYPE,
            format_args!("query {dtype}, key {}, value {}", required.key.dtype, required.value.dtype),
            format_args!("all of {}", Names(allowed)),
        );
        let outputs: &[DType] = match dtype {
            Float16 => &[Float16, Int8],
            Bf16 => &[Bf16, Int8],
            _ => &[Int8, Float16],
        };
        OUT_DTYPE.takes(required.out.dtype, outputs)?;
        if let Some(pse) = &self.pse_shift {
            let want = if dtype == Bf16 { Bf16 } else { Float16 };
            PSE_DTYPE.takes(pse.dtype, want)?;
        }
        if let Some(mask) = &self.atten_mask {
            let masks: &[DType] = match dtype {
                Int8 => &[Bool, Int8, UInt8],
                _ => &[Bool, Int8, UInt8, Float16],
            };
            MASK_DTYPE.takes(mask.dtype, masks)?;
        }
        Ok(())
    }

    /// Checks the shapes, and returns the number of query heads and the head dimensions of query and value.
    fn shapes(&self, required: &Required<'_>) -> Result<(i64, (i64, i64)), Violation> {
        HEADS.takes(self.num_heads, 1..)?;
        let rank = match required.layout {
            "BNSD" | "BSND" | "BNSD_BSND" => 4,
            "BSH" | "TND" | "NTD" | "NSD" => 3,
            "SH" => 2,
            _ => 0,
        };
        let ranks = [required.query, required.key, required.value].map(|desc| desc.shape.rank());
        require!(
            rank > 0 && ranks.iter().all(|&other| other == rank),
            LAYOUT,
            format_args!(
                "{:?} with query {}, key {}, value {}",
                required.layout, required.query.shape, required.key.shape, required.value.shape
            ),
            "BNSD, BSND, BNSD_BSND, BSH, TND, NTD, NSD, SH, with as many axes",
        );
        let last = |desc: &TensorDesc| desc.shape.last().copied().unwrap_or(0);
        let hidden = matches!(required.layout, "BSH" | "SH");
        let kv_heads = match self.num_key_value_heads {
            0 => self.num_heads,
            heads => heads,
        };
        let each = |size: i64, heads: i64| match hidden {
            true => size.checked_div(heads).unwrap_or(0),
            false => size,
        };
        let dim = each(last(required.query), self.num_heads);
        let value_dim = each(last(required.value), kv_heads);
        let narrow = required.out.dtype != DType::Int8 && (dim <= 128 || required.layout == "TND");
        require!(
            (1..=512).contains(&dim) && (0..=512).contains(&value_dim),
            DIM,
            format_args!("{dim} and {value_dim}"),
            "1 to 512 of the query, up to 512 of the value",
        );
        require!(
            dim <= value_dim || narrow,
            DIM,
            format_args!("{dim} and {value_dim}"),
            format_args!("up to {value_dim} of the query"),
        );
        Ok((self.num_heads, (dim, value_dim)))
    }

    /// Applies the rules of the prefill path to the head dimensions as the operator pads them: except in TND, query
    /// and value are padded to one head dimension.
    fn tiling(&self, required: &Required<'_>, (dim, value_dim): (i64, i64)) -> Result<Verdict, Violation> {
        let int8 = [required.query.dtype, required.out.dtype].contains(&DType::Int8);
        let step = if int8 { 32 } else { 16 };
        let even = |dim: i64| dim.saturating_add(step - 1) / step * step;
        let (to, value_to) = match required.layout {
            "TND" => (even(dim), even(value_dim)),
            _ => (even(dim.max(value_dim)), even(dim.max(value_dim))),
        };
        let call = PromptCall {
            query: Some(resized(required, required.query, dim, to)),
            key: Some(resized(required, required.key, dim, to)),
            value: Some(resized(required, required.value, value_dim, value_to)),
            attention_out: Some(resized(required, required.out, value_dim, value_to)),
            ..*self
        };
        Self::judge_path(&call.as_fused())
    }

    /// Checks the tiling rules of 310P, by the sizes of the tensors.
    pub(super) fn card(&self, problem: &AttentionProblem<'_>) -> Result<(), Violation> {
        const MOST_ROWS: usize = 65_536;
        let (rows, keys) = (problem.query_rows, problem.key_rows);
        require!(
            problem.batch <= Self::MOST_CARD_SEQUENCES as usize && rows.max(keys) <= MOST_ROWS,
            CARD_SIZE,
            format_args!("{} sequences, {rows} query rows, {keys} keys", problem.batch),
            format_args!("up to {} sequences, up to {MOST_ROWS} query rows and keys", Self::MOST_CARD_SEQUENCES),
        );
        CARD_PSE.forbids([("pseShift", self.pse_shift.is_some())])?;
        let at_least = |tokens: i64, size: usize| usize::try_from(tokens).is_ok_and(|problem| problem >= size);
        require!(
            at_least(self.pre_tokens, rows) && (self.next_tokens == 0 || at_least(self.next_tokens, keys)),
            CARD_TOKENS,
            format_args!("preTokens {}, nextTokens {}", self.pre_tokens, self.next_tokens),
            format_args!("preTokens from {rows} on, nextTokens 0 or from {keys} on"),
        );
        if let Some(mask) = self.atten_mask.filter(|mask| !mask.is_empty()) {
            CARD_MASK_DTYPE.takes(mask.dtype, DType::Bool)?;
            require!(
                rows == keys && rows.is_multiple_of(Self::CARD_MASK_ROWS as usize),
                CARD_MASK,
                format_args!("{rows} query rows, {keys} keys"),
                format_args!("as many of both, a multiple of {}", Self::CARD_MASK_ROWS),
            );
        }
        Ok(())
    }
}

/// A tensor with another head dimension. A size that is no whole number of heads of `from` elements is left as it is,
/// to be refused.
fn resized(required: &Required<'_>, desc: &TensorDesc, from: i64, to: i64) -> TensorDesc {
    let axis = desc.shape.rank().saturating_sub(1);
    let size = desc.shape.last().copied().unwrap_or(0);
    let heads = size.checked_div(from).unwrap_or(0);
    let is_made = heads.checked_mul(from) == Some(size) && (required.layout == "BSH" || heads == 1);
    match is_made {
        true => TensorDesc::packed(desc.dtype, desc.shape.with(axis, heads.saturating_mul(to))),
        false => *desc,
    }
}

/// Shape of the output for a query of `heads` heads.
fn out_shape(required: &Required<'_>, heads: i64, value_dim: i64) -> Dims {
    let query = required.query.shape;
    let axis = query.rank().saturating_sub(1);
    match (required.layout, &query[..]) {
        ("BSH" | "SH", _) => query.with(axis, heads.saturating_mul(value_dim)),
        ("BNSD_BSND", &[batch, heads, rows, _]) => Dims::of([batch, rows, heads, value_dim]),
        _ => query.with(axis, value_dim),
    }
}

impl<'a> Required<'a> {
    fn tensors(&self) -> [(&'a TensorDesc, &'static str); 4] {
        [(self.query, "query"), (self.key, "key"), (self.value, "value"), (self.out, "attentionOut")]
    }
}
