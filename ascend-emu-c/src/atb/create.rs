//! The operators' parameters, and the functions that make objects of them.

use super::Status;
use super::operation::{COperation, make};
use ascend_emu::atb::{Heads, Keys, Mask, Operation, Refusal, refused};
use std::ffi::c_void;

/// `atb::infer::PagedAttentionParam`.
#[repr(C)]
struct PagedAttentionParam {
    head_num: i32,
    qk_scale: f32,
    kv_head_num: i32,
    mask_type: i32,
    batch_run_status_enable: u8,
    quant_type: i32,
    out_data_type: i32,
    has_quant_offset: u8,
    compress_type: i32,
    calc_type: i32,
    scale_type: i32,
    input_layout: i32,
    mla_v_head_size: u32,
    /// Part of what is reserved, in older headers.
    q_scale: f32,
    reserved: [u8; 64],
}

/// `atb::infer::ReshapeAndCacheParam`.
#[repr(C)]
struct ReshapeAndCacheParam {
    compress_type: i32,
    kv_cache_cfg: i32,
    reserved: [u8; 16],
}

/// `atb::infer::SelfAttentionParam`.
#[repr(C)]
struct SelfAttentionParam {
    quant_type: i32,
    out_data_type: i32,
    head_num: i32,
    kv_head_num: i32,
    q_scale: f32,
    qk_scale: f32,
    batch_run_status_enable: u8,
    is_triu_mask: u32,
    calc_type: i32,
    kernel_type: i32,
    clamp_type: i32,
    clamp_min: f32,
    clamp_max: f32,
    mask_type: i32,
    kvcache_cfg: i32,
    scale_type: i32,
    input_layout: i32,
    mla_v_head_size: u32,
    cache_type: i8,
    window_size: u32,
    reserved: [u8; 64],
}

const _: () = {
    assert!(size_of::<PagedAttentionParam>() == 0x78);
    assert!(size_of::<ReshapeAndCacheParam>() == 0x18);
    assert!(size_of::<SelfAttentionParam>() == 0x90);
};

/// Refuses parameters that have another value than one that is emulated.
fn only<const N: usize>(
    name: &'static str,
    given: [(&str, i64, &[i64]); N],
) -> Result<(), Refusal> {
    let mut wrong = given.into_iter();
    match wrong.find(|(_, value, allowed)| !allowed.contains(value)) {
        None => Ok(()),
        Some((parameter, value, allowed)) => {
            let message =
                format!("{parameter}: given {value} is not emulated; allowed: {allowed:?}");
            Err(refused(name, &message))
        }
    }
}

fn paged_attention(param: &PagedAttentionParam) -> Result<Operation, Refusal> {
    let operation = Operation::PagedAttention(Heads {
        query: param.head_num,
        key: param.kv_head_num,
        scale: param.qk_scale,
    });
    only(
        operation.name(),
        [
            ("maskType", param.mask_type.into(), &[0]),
            (
                "batchRunStatusEnable",
                param.batch_run_status_enable.into(),
                &[0],
            ),
            ("quantType", param.quant_type.into(), &[0]),
            ("compressType", param.compress_type.into(), &[0]),
            ("calcType", param.calc_type.into(), &[0]),
            ("scaleType", param.scale_type.into(), &[0]),
            ("inputLayout", param.input_layout.into(), &[0]),
            ("mlaVHeadSize", param.mla_v_head_size.into(), &[0]),
        ],
    )?;
    if param.q_scale != 0.0 && param.q_scale != 1.0 {
        let message = format!(
            "qScale: given {} is not emulated; allowed: 0 and 1",
            param.q_scale
        );
        return Err(refused(operation.name(), &message));
    }
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::PagedAttentionParam>`.
///
/// # Safety
///
/// `param` is a reference, and `operation` null or valid for writing.
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_paged_attention(
    param: *const PagedAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(paged_attention(&*param), operation) }
}

fn reshape_and_cache(param: &ReshapeAndCacheParam) -> Result<Operation, Refusal> {
    let operation = Operation::ReshapeAndCache {
        keys_alone: param.kv_cache_cfg == 1,
        nz: param.kv_cache_cfg == 2,
    };
    only(
        operation.name(),
        [
            ("compressType", param.compress_type.into(), &[0]),
            ("kvCacheCfg", param.kv_cache_cfg.into(), &[0, 1, 2]),
        ],
    )?;
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::ReshapeAndCacheParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_reshape_and_cache(
    param: *const ReshapeAndCacheParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(reshape_and_cache(&*param), operation) }
}

fn self_attention(param: &SelfAttentionParam) -> Result<Operation, Refusal> {
    const PREFIX_ENCODER: i32 = 4;
    const MASK_NORM: i32 = 1;
    const MASK_NORM_COMPRESS: i32 = 3;
    let keys = match param.calc_type {
        PREFIX_ENCODER => Keys::Cached,
        _ => Keys::Packed,
    };
    let operation = Operation::SelfAttention {
        heads: Heads {
            query: param.head_num,
            key: param.kv_head_num,
            scale: param.qk_scale,
        },
        keys,
        mask: match param.mask_type {
            MASK_NORM => Mask::Full {
                triangle: param.is_triu_mask == 1,
            },
            MASK_NORM_COMPRESS => Mask::Triangle,
            _ => Mask::None,
        },
        precise: param.kernel_type == 1,
    };
    let masks: &[i64] = match keys {
        Keys::Packed => &[0, 1, 3],
        Keys::Cached => &[3],
    };
    only(
        operation.name(),
        [
            ("calcType", param.calc_type.into(), &[3, 4]),
            ("quantType", param.quant_type.into(), &[0]),
            (
                "batchRunStatusEnable",
                param.batch_run_status_enable.into(),
                &[0],
            ),
            ("kernelType", param.kernel_type.into(), &[0, 1]),
            ("isTriuMask", param.is_triu_mask.into(), &[0, 1]),
            ("clampType", param.clamp_type.into(), &[0]),
            ("maskType", param.mask_type.into(), masks),
            ("kvcacheCfg", param.kvcache_cfg.into(), &[0]),
            ("scaleType", param.scale_type.into(), &[0]),
            ("inputLayout", param.input_layout.into(), &[0]),
            ("mlaVHeadSize", param.mla_v_head_size.into(), &[0]),
            ("cacheType", param.cache_type.into(), &[0]),
            ("windowSize", param.window_size.into(), &[0]),
        ],
    )?;
    if param.q_scale != 1.0 {
        let message = format!(
            "qScale: given {} is not emulated; allowed: 1",
            param.q_scale
        );
        return Err(refused(operation.name(), &message));
    }
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::SelfAttentionParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: as for `CreateContext`.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_self_attention(
    param: *const SelfAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { make(self_attention(&*param), operation) }
}

macro_rules! not_emulated {
    ($($symbol:literal $function:ident $name:literal;)*) => {$(
        /// `atb::CreateOperation` of an operator that is not emulated.
        // SAFETY: as for `CreateContext`.
        #[unsafe(export_name = $symbol)]
        extern "C" fn $function(_: *const c_void, _: *mut *mut c_void) -> Status {
            refused($name, "the operator is not emulated").status
        }
    )*};
}

not_emulated! {
    "_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE" create_linear "LinearOperation";
    "_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE" create_elewise "ElewiseOperation";
    "_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE" create_rms_norm "RmsNormOperation";
    "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE" create_group_topk
        "GroupTopkOperation";
    "_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE" create_rope "RopeOperation";
}
