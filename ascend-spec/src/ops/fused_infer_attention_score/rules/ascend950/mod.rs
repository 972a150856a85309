//! Quantised calls on Ascend 950: the parts of the unified checker that no other product has.

pub mod antiquant;
pub mod fp8;
pub mod full_quant;
pub mod mxfp8;

use super::Facts;
use crate::ops::fused_infer_attention_score::{Parameter, Route, Version};
use crate::rule::{require, rules};
use crate::{Cann, DType, Layout, Violation};

rules! {
    in Scope::ASCEND_950;
    BLOCKS = "quant.per_block", TILING_ERROR, V5, "Ascend 950, quantisation by block",
        "queryQuantMode, keyAntiquantMode and valueAntiquantMode are not all 7",
        "use the modes 6, 6 and 8 (MXFP8): quantisation by block was removed";
    MASK_DTYPE = "atten_mask.dtype_registered", PARAM_INVALID, V5, "Ascend 950, dtypes",
        "the mask over HIFLOAT8, FLOAT4_E2M1 and INT4 keys is BOOL, with a FLOAT8_E4M3FN output of a half-precision \
         query BOOL or under FLOAT16 UINT8, with a FLOAT16 output of a HIFLOAT8 query BOOL",
        "convert the mask to BOOL: the operator is registered for it everywhere";
    LAYOUT = "input_layout.quantised", TILING_ERROR, V5, "Ascend 950, layouts",
        "quantised calls have the layouts of their kind: antiquantisation BSH, BSND, BNSD, BNSD_BSND with several \
         rows, and TND but for INT8 keys; MXFP8 TND; from 9.2 on the modes 3, 3 and 2 NTD_TND; an INT8 query without \
         rotary parts BSH, BSND, BNSD and BNSD_BSND; with them the eight of the absorbed form, but for INT8 neither \
         BNSD nor BNSD_NBSD",
        "use one of these layouts";
    HEADS = "num_heads.full_quant", TILING_ERROR, V5, "Ascend 950, full quantisation",
        "fully quantised calls have at most 256 heads, of which at most 64 share a key head",
        "split the heads over several calls";
    OUT_DTYPE = "attention_out.quantised", TILING_ERROR, V5, "Ascend 950, post-quantisation and full quantisation",
        "the output of quantised calls has the dtype that their kind writes",
        "make attentionOut BF16, or with antiquantisation of the query's dtype";
    UNUSED = "quant.unused", TILING_ERROR, V5, "Ascend 950, antiquantisation and full quantisation",
        "a quantised call carries the scales of its kind and no others",
        "drop the tensor, and set its mode to 0";
    ALONE = "quant.alone", TILING_ERROR, V5, "Ascend 950, full quantisation",
        "fully quantised calls go with no tensor list, left padding, shared prefix, position bias or sink where their \
         kind excludes them",
        "drop the argument";
    MODE = "sparse_mode.full_quant", TILING_ERROR, V5, "Ascend 950, M7",
        "with rotary parts or MXFP8, a fully quantised call has sparse mode 3 with a mask or mode 0 without one; INT8 \
         single rows have mode 0, several rows mode 3",
        "use mode 3 for several rows, mode 0 without a mask for one";
}

/// Which tensors are quantised, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantisationKind {
    /// Nothing.
    Half,
    /// Key and value.
    Antiquant,
    /// Query, key and value of the absorbed form.
    Absorbed,
    /// Query, key and value in groups of 32 with a shared exponent.
    MxFp8,
    /// Query, key and value of FLOAT8_E4M3FN, with a scale for each row and head.
    Fp8,
    /// Query, key and value of INT8, with a factor for each tensor.
    Tensor,
}

impl Facts<'_> {
    /// Which tensors are quantised, and how. On products other than Ascend 950 it follows from dtypes and path alone.
    pub(crate) fn kind(&self) -> QuantisationKind {
        if !self.is_950() {
            return match (self.antiquant(), self.query.dtype, self.route) {
                (true, ..) => QuantisationKind::Antiquant,
                (false, DType::Int8, Route::Decode) => QuantisationKind::Absorbed,
                (false, DType::Int8, Route::Prefill) => QuantisationKind::Tensor,
                _ => QuantisationKind::Half,
            };
        }
        let call = self.call;
        let modes = (call.query_quant_mode, call.key_antiquant_mode, call.value_antiquant_mode);
        if self.query.dtype != self.kv_dtype() {
            return QuantisationKind::Antiquant;
        }
        match modes {
            _ if self.query.dtype.is_half() => QuantisationKind::Half,
            (6, 6, 8) => QuantisationKind::MxFp8,
            (3, 0, 0) if self.rope() => QuantisationKind::Absorbed,
            (3, 3, 2) if self.since(Cann::V9_2) => QuantisationKind::Fp8,
            _ => QuantisationKind::Tensor,
        }
    }
}

/// Checks the dtype of the mask in calls of a kind.
fn mask_dtype(f: &Facts<'_>, kind: QuantisationKind) -> Result<(), Violation> {
    use DType::{Bool, Float4E2M1, Float8E4M3Fn, Float16, HiFloat8, Int4, UInt8};
    let Some(mask) = &f.call.atten_mask else {
        return Ok(());
    };
    let fits = match (kind, f.kv_dtype(), f.out.dtype) {
        (QuantisationKind::Antiquant, HiFloat8 | Float4E2M1 | Int4, _) => mask.dtype == Bool,
        (QuantisationKind::Antiquant, Float8E4M3Fn, Float8E4M3Fn) => {
            mask.dtype == Bool || (mask.dtype == UInt8 && f.query.dtype == Float16)
        }
        (
            QuantisationKind::Absorbed | QuantisationKind::MxFp8 | QuantisationKind::Fp8 | QuantisationKind::Tensor,
            HiFloat8,
            Float16,
        ) => mask.dtype == Bool,
        _ => true,
    };
    require!(fits, MASK_DTYPE, format_args!("{} over {} keys", mask.dtype, f.kv_dtype()), Bool,);
    Ok(())
}

/// Checks the rules of the call's kind.
pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let kind = f.kind();
    mask_dtype(f, kind)?;
    layout(f, kind)?;
    match kind {
        QuantisationKind::Half => Ok(()),
        QuantisationKind::Antiquant => antiquant::check(f),
        QuantisationKind::Absorbed => full_quant::absorbed(f),
        QuantisationKind::MxFp8 => mxfp8::check(f),
        QuantisationKind::Fp8 => fp8::check(f),
        QuantisationKind::Tensor => full_quant::tensor(f),
    }
}

/// Refuses quantisation by block, before anything else.
pub(crate) fn by_block(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let modes = [call.query_quant_mode, call.key_antiquant_mode, call.value_antiquant_mode];
    let full = !f.query.dtype.is_half() && f.query.dtype == f.kv_dtype();
    require!(
        for f.target => !full || modes != [7; 3],
        BLOCKS,
        "7 three times",
        "6, 6 and 8; 3, 0 and 0; 0 three times",
    );
    Ok(())
}

fn layout(f: &Facts<'_>, kind: QuantisationKind) -> Result<(), Violation> {
    let layout = f.layout;
    let int8 = f.key.dtype == DType::Int8;
    let fits = match kind {
        QuantisationKind::Half => true,
        QuantisationKind::Antiquant => match layout {
            Layout::Tnd => !int8,
            Layout::BnsdBsnd => f.q.rows != 1,
            _ => f.classic_layout(),
        },
        QuantisationKind::MxFp8 => layout == Layout::Tnd,
        QuantisationKind::Fp8 => layout == Layout::NtdTnd,
        QuantisationKind::Tensor => f.classic_layout(),
        // The checks of the form of attention cover the rest.
        QuantisationKind::Absorbed => !(int8 && matches!(layout, Layout::Bnsd | Layout::BnsdNbsd)),
    };
    require!(
        fits,
        LAYOUT,
        format_args!("{layout} with {} keys under a {} query", f.kv_dtype(), f.query.dtype),
        "the layouts of the kind",
    );
    Ok(())
}

/// Checks the head counts of fully quantised calls.
fn heads(f: &Facts<'_>) -> Result<(), Violation> {
    let (heads, kv_heads) = (f.call.num_heads, f.kv_heads);
    require!(
        heads <= 256 && kv_heads <= 256 && heads / kv_heads.max(1) <= 64,
        HEADS,
        format_args!("{heads} over {kv_heads}"),
        "at most 256, at most 64 a key head",
    );
    Ok(())
}

/// Checks for sparse mode 0 without a mask, or 3 with one.
fn modes(f: &Facts<'_>) -> Result<(), Violation> {
    let masked = f.call.mask().is_some();
    require!(
        matches!((f.call.mode(), masked), (0, false) | (3, true)),
        MODE,
        format_args!("{} {} a mask", f.call.mode(), if masked { "with" } else { "without" }),
        "0 without a mask, 3 with one",
    );
    Ok(())
}

/// Refuses arguments that the absorbed form and MXFP8 exclude.
fn alone(f: &Facts<'_>) -> Result<(), Violation> {
    ALONE.forbids([("a tensor list", f.kv_list)])?;
    ALONE.leaves_out(f.call, &Parameter::LEFT_PADDING)?;
    ALONE.leaves_out(f.call, &Parameter::SHARED_PREFIX)?;
    ALONE.leaves_out(f.call, &[Parameter::PseShift, Parameter::LearnableSink])
}
