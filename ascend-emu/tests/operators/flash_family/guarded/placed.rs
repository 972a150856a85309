//! Calls of every operator, as descriptions of tensors that are placed in memory when the call is made.

use super::calls::Random;
use super::mutation::{self, one_in};
use crate::flash_family::call::{OnDevice, PhaseTwo};
use crate::flash_family::{incre, prompt, ring, score};
use ascend_emu::abi::*;
use ascend_spec::ops::{
    batch_mat_mul, flash_attention_score, gather_pa_kv_cache, incre_flash_attention, prompt_flash_attention,
    ring_attention_update,
};
use ascend_spec::{
    TensorDesc, arguments_of_version, attention_update_arguments, batch_mat_mul_arguments,
    fused_infer_attention_score_arguments, gather_pa_kv_cache_arguments, ops::attention_update as update,
    ops::fused_infer_attention_score as fia, ops::scatter_pa_kv_cache as scatter, scatter_pa_kv_cache_arguments,
};
use std::ffi::c_void;
use std::fmt::Debug;

/// Writes what a tensor, named by its parameter and its number in a list, holds.
pub(super) type Contents<'c> = &'c dyn Fn(&'static str, usize, &TensorDesc, &mut [u8]);

/// Gives the base address of a tensor.
pub(super) type At<'a> = &'a mut dyn FnMut(&'static str, usize, &TensorDesc) -> *mut c_void;

/// A call of an operator.
pub(super) trait Call: Clone + Debug {
    /// Phase one of a version with the tensors in their places, and phase two.
    fn prepared(&self, version: u8, at: At<'_>) -> (score::Prepared, PhaseTwo);

    /// The same call with another tensor or another argument, or with one more or less of them.
    fn changed(&self, random: &mut Random) -> Self;
}

/// Makes a [`Call`] of the arguments of an operator; the last are phase one of placed arguments and phase two.
macro_rules! call {
    ($module:path, $version:ident, $arguments:ident => $prepared:expr) => {
        impl Call for $module {
            fn prepared(&self, $version: u8, at: At<'_>) -> (score::Prepared, PhaseTwo) {
                let $arguments = &self.map(|argument, desc| {
                    let at = at(argument.name(), argument.index, desc);
                    OnDevice::described(desc, at)
                });
                $prepared
            }

            fn changed(&self, random: &mut Random) -> Self {
                let given: Vec<_> = self.each_tensor().map(|(at, desc)| (at, *desc)).collect();
                let (chosen, desc) = given[random.below(given.len())];
                let other = given[random.below(given.len())].0.parameter;
                match random.below(5) {
                    // One more, which may be one that the operator does not look at.
                    0 => {
                        let mut more = self.clone();
                        let all = self.parameters();
                        let added = all[random.below(all.len())];
                        let added = if added.info().kind.is_tensor() { added } else { other };
                        let desc = match one_in(2, random) {
                            true => desc,
                            false => mutation::tensor(&desc, random),
                        };
                        more.set_tensor(added, desc);
                        more
                    }
                    1 | 2 => {
                        let all = self.parameters();
                        let value = all.iter().filter(|of| !of.info().kind.is_tensor());
                        let values: Vec<_> = value.collect();
                        let Some(&&parameter) = values.get(random.below(values.len())) else {
                            return self.clone();
                        };
                        let mut other = self.clone();
                        let value = self.value(parameter).unwrap().into();
                        // A number that the parameter does not hold changes nothing.
                        let _ = other.set_value(parameter, mutation::value(value, random));
                        other
                    }
                    _ => self.map(|argument, desc| match argument == chosen {
                        true => mutation::tensor(desc, random),
                        false => *desc,
                    }),
                }
            }
        }
    };
}

/// The parameters of an operator, by its arguments.
trait Parameters {
    type Parameter: Copy;

    fn parameters(&self) -> &'static [Self::Parameter];
}

macro_rules! parameters {
    ($($module:path: $parameter:path;)*) => {$(
        impl Parameters for $module {
            type Parameter = $parameter;

            fn parameters(&self) -> &'static [$parameter] {
                <$parameter>::ALL
            }
        }
    )*};
}

parameters! {
    fia::Arguments<TensorDesc>: fia::Parameter;
    flash_attention_score::Arguments<TensorDesc>: flash_attention_score::Parameter;
    prompt_flash_attention::Arguments<TensorDesc>: prompt_flash_attention::Parameter;
    incre_flash_attention::Arguments<TensorDesc>: incre_flash_attention::Parameter;
    ring_attention_update::Arguments<TensorDesc>: ring_attention_update::Parameter;
    gather_pa_kv_cache::Arguments<TensorDesc>: gather_pa_kv_cache::Parameter;
    scatter::Arguments<TensorDesc>: scatter::Parameter;
    update::Arguments<TensorDesc>: update::Parameter;
    batch_mat_mul::Arguments<TensorDesc>: batch_mat_mul::Parameter;
}

/// Phase one of a version, and phase two, by the number of the version.
macro_rules! versions {
    ($version:ident, $arguments:ident, $list:ident; $($number:tt $one:ident $two:ident;)*) => {
        match $version {
            $($number => (
                $list! { arguments_of_version { $number phase_one { $one, $arguments } } },
                $two as PhaseTwo,
            ),)*
            _ => panic!("no version {}", $version),
        }
    };
}

call! { fia::Arguments<TensorDesc>, version, arguments => versions! {
    version, arguments, fused_infer_attention_score_arguments;
    1 aclnnFusedInferAttentionScoreGetWorkspaceSize aclnnFusedInferAttentionScore;
    2 aclnnFusedInferAttentionScoreV2GetWorkspaceSize aclnnFusedInferAttentionScoreV2;
    3 aclnnFusedInferAttentionScoreV3GetWorkspaceSize aclnnFusedInferAttentionScoreV3;
    4 aclnnFusedInferAttentionScoreV4GetWorkspaceSize aclnnFusedInferAttentionScoreV4;
    5 aclnnFusedInferAttentionScoreV5GetWorkspaceSize aclnnFusedInferAttentionScoreV5;
} }
call! { gather_pa_kv_cache::Arguments<TensorDesc>, version, arguments => versions! {
    version, arguments, gather_pa_kv_cache_arguments;
    1 aclnnGatherPaKvCacheGetWorkspaceSize aclnnGatherPaKvCache;
} }
call! { scatter::Arguments<TensorDesc>, version, arguments => versions! {
    version, arguments, scatter_pa_kv_cache_arguments;
    1 aclnnScatterPaKvCacheGetWorkspaceSize aclnnScatterPaKvCache;
} }
call! { update::Arguments<TensorDesc>, version, arguments => versions! {
    version, arguments, attention_update_arguments;
    1 aclnnAttentionUpdateGetWorkspaceSize aclnnAttentionUpdate;
} }
call! { batch_mat_mul::Arguments<TensorDesc>, version, arguments => versions! {
    version, arguments, batch_mat_mul_arguments;
    1 aclnnBatchMatMulGetWorkspaceSize aclnnBatchMatMul;
} }
call! { prompt_flash_attention::Arguments<TensorDesc>, version, arguments => {
    let two: PhaseTwo = match version {
        1 => aclnnPromptFlashAttention,
        2 => aclnnPromptFlashAttentionV2,
        _ => aclnnPromptFlashAttentionV3,
    };
    (prompt::prepare(version, arguments), two)
} }
call! { incre_flash_attention::Arguments<TensorDesc>, version, arguments => {
    let two: PhaseTwo = match version {
        1 => aclnnIncreFlashAttention,
        2 => aclnnIncreFlashAttentionV2,
        3 => aclnnIncreFlashAttentionV3,
        _ => aclnnIncreFlashAttentionV4,
    };
    (incre::prepare(version, arguments), two)
} }
call! { ring_attention_update::Arguments<TensorDesc>, version, arguments => {
    let two: PhaseTwo = match version {
        1 => aclnnRingAttentionUpdate,
        _ => aclnnRingAttentionUpdateV2,
    };
    (ring::prepare(version, arguments), two)
} }
// Versions from 11 on are those of FlashAttentionVarLenScore.
call! { flash_attention_score::Arguments<TensorDesc>, version, arguments => {
    let packed = version > 10;
    let number = if packed { version - 10 } else { version };
    let of = flash_attention_score::Version::numbered(packed, number).unwrap();
    score::prepare(of, arguments)
} }
