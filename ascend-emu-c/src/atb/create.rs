//! The operators' parameters, and the functions that make objects of them.

use super::Status;
use super::operation::{COperation, make};
use ascend_emu::atb::{Operation, OperationParameters, Refusal, Version, refused};
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
fn only<const N: usize>(name: &'static str, given: [(&str, i64, &[i64]); N]) -> Result<(), Refusal> {
    let mut wrong = given.into_iter();
    match wrong.find(|(_, value, allowed)| !allowed.contains(value)) {
        None => Ok(()),
        Some((parameter, value, allowed)) => {
            let message = format!("{parameter}: given {value} is not emulated; allowed: {allowed:?}");
            Err(refused(name, &message))
        }
    }
}

/// Refuses reserved bytes other than 0, as ATB does: a newer client may mean something by them.
fn reserved(name: &'static str, bytes: &[u8]) -> Result<(), Refusal> {
    match bytes.iter().all(|byte| *byte == 0) {
        true => Ok(()),
        false => Err(refused(name, "rsv: given other bytes than 0, allowed: 0")),
    }
}

/// Refuses a scale of queries that has an effect.
fn plain_query_scale(name: &'static str, given: f32, allowed: &[f32]) -> Result<(), Refusal> {
    if allowed.contains(&given) {
        return Ok(());
    }
    let message = format!("qScale: given {given} is not emulated; allowed: {allowed:?}");
    Err(refused(name, &message))
}

fn paged_attention(param: &PagedAttentionParam) -> Result<Operation, Refusal> {
    let parameters = OperationParameters {
        version: Version::Paged,
        heads: param.head_num,
        kv_heads: param.kv_head_num,
        scale: param.qk_scale,
        masked: false,
        triangle: false,
        precise: false,
        other_output: false,
        clamped: false,
    };
    let operation = Operation::Attention { parameters, compressed: false };
    reserved(operation.name(), &param.reserved)?;
    operation.check()?;
    only(
        operation.name(),
        [
            ("maskType", param.mask_type.into(), &[0]),
            ("batchRunStatusEnable", param.batch_run_status_enable.into(), &[0]),
            ("quantType", param.quant_type.into(), &[0]),
            ("compressType", param.compress_type.into(), &[0]),
            ("calcType", param.calc_type.into(), &[0]),
            ("scaleType", param.scale_type.into(), &[0]),
            ("inputLayout", param.input_layout.into(), &[0]),
            ("mlaVHeadSize", param.mla_v_head_size.into(), &[0]),
        ],
    )?;
    plain_query_scale(operation.name(), param.q_scale, &[0.0, 1.0])?;
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::PagedAttentionParam>`.
///
/// # Safety
///
/// `param` is a reference to a parameter object of ATB's layout, and `operation` null or valid for writing.
// SAFETY: the mangled name has ATB's operator and parameters, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_paged_attention(
    param: *const PagedAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller promises that `param` is a reference to a whole parameter object of this layout, which is
    // only read here, and that `operation` is null or valid for writing.
    unsafe { make(paged_attention(&*param), operation) }
}

fn reshape_and_cache(param: &ReshapeAndCacheParam) -> Result<Operation, Refusal> {
    let operation = Operation::ReshapeAndCache { keys_alone: param.kv_cache_cfg == 1, nz: param.kv_cache_cfg == 2 };
    reserved(operation.name(), &param.reserved)?;
    operation.check()?;
    only(
        operation.name(),
        [("compressType", param.compress_type.into(), &[0]), ("kvCacheCfg", param.kv_cache_cfg.into(), &[0, 1, 2])],
    )?;
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::ReshapeAndCacheParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: the mangled name has ATB's operator and parameters, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_reshape_and_cache(
    param: *const ReshapeAndCacheParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller promises that `param` is a reference to a whole parameter object of this layout, which is
    // only read here, and that `operation` is null or valid for writing.
    unsafe { make(reshape_and_cache(&*param), operation) }
}

fn self_attention(param: &SelfAttentionParam) -> Result<Operation, Refusal> {
    const PREFIX_ENCODER: i32 = 4;
    const MASK_NORM: i32 = 1;
    const MASK_NORM_COMPRESS: i32 = 3;
    const ACL_DT_UNDEFINED: i32 = -1;
    let parameters = OperationParameters {
        version: match param.calc_type {
            PREFIX_ENCODER => Version::Prefix,
            _ => Version::Packed,
        },
        heads: param.head_num,
        kv_heads: param.kv_head_num,
        scale: param.qk_scale,
        masked: [MASK_NORM, MASK_NORM_COMPRESS].contains(&param.mask_type),
        triangle: param.is_triu_mask == 1,
        precise: param.kernel_type == 1,
        other_output: param.out_data_type != ACL_DT_UNDEFINED,
        clamped: param.clamp_min != 0.0 || param.clamp_max != 0.0,
    };
    let compressed = param.mask_type == MASK_NORM_COMPRESS;
    let operation = Operation::Attention { parameters, compressed };
    reserved(operation.name(), &param.reserved)?;
    // Operations of other kinds, and other masks, have other conditions.
    only(
        operation.name(),
        [("calcType", param.calc_type.into(), &[3, 4]), ("maskType", param.mask_type.into(), &[0, 1, 3])],
    )?;
    operation.check()?;
    let masks: &[i64] = match parameters.version {
        Version::Prefix => &[3],
        _ => &[0, 1, 3],
    };
    only(
        operation.name(),
        [
            ("quantType", param.quant_type.into(), &[0]),
            ("batchRunStatusEnable", param.batch_run_status_enable.into(), &[0]),
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
    plain_query_scale(operation.name(), param.q_scale, &[1.0])?;
    Ok(operation)
}

/// `atb::CreateOperation<atb::infer::SelfAttentionParam>`.
///
/// # Safety
///
/// As for [`create_paged_attention`].
// SAFETY: the mangled name has ATB's operator and parameters, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")]
unsafe extern "C" fn create_self_attention(
    param: *const SelfAttentionParam,
    operation: *mut *mut COperation,
) -> Status {
    // SAFETY: the caller promises that `param` is a reference to a whole parameter object of this layout, which is
    // only read here, and that `operation` is null or valid for writing.
    unsafe { make(self_attention(&*param), operation) }
}

macro_rules! not_emulated {
    ($($symbol:literal $function:ident $name:literal;)*) => {$(
        /// `atb::CreateOperation` of an operator that is not emulated.
        // SAFETY: the mangled name is of an operator that nothing else in this shared library defines.
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

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut SelfAttentionParam);

    fn plain() -> SelfAttentionParam {
        SelfAttentionParam {
            quant_type: 0,
            out_data_type: -1,
            head_num: 8,
            kv_head_num: 2,
            q_scale: 1.0,
            qk_scale: 1.0,
            batch_run_status_enable: 0,
            is_triu_mask: 1,
            calc_type: 4,
            kernel_type: 1,
            clamp_type: 0,
            clamp_min: 0.0,
            clamp_max: 0.0,
            mask_type: 3,
            kvcache_cfg: 0,
            scale_type: 0,
            input_layout: 0,
            mla_v_head_size: 0,
            cache_type: 0,
            window_size: 0,
            reserved: [0; 64],
        }
    }

    #[test]
    fn operations_that_atb_refuses_are_not_made() {
        assert!(self_attention(&plain()).is_ok());
        let changes: [(Change, &str); 11] = [
            (|param| param.head_num = 0, "atb.heads"),
            (|param| param.kv_head_num = -1, "atb.heads"),
            (|param| param.is_triu_mask = 0, "atb.prefix"),
            (|param| param.kernel_type = 0, "atb.prefix"),
            (|param| param.clamp_max = 1.0, "atb.prefix"),
            (|param| param.out_data_type = 1, "atb.prefix"),
            (|param| param.clamp_type = 1, "clampType: given 1"),
            (|param| param.mask_type = 1, "maskType: given 1"),
            (|param| param.mask_type = 0, "atb.triangle"),
            (|param| param.reserved[63] = 1, "rsv"),
            (|param| (param.calc_type, param.mask_type) = (3, 0), "atb.triangle"),
        ];
        for (change, text) in changes {
            let mut param = plain();
            change(&mut param);
            let refusal = self_attention(&param).unwrap_err();
            assert_eq!(refusal.status, 1, "{}", refusal.message);
            assert!(refusal.message.contains(text), "{}", refusal.message);
        }
    }
}
