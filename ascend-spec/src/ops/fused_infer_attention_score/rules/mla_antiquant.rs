//! The absorbed form of multi-head latent attention over a quantised cache; its rules stand with the others in `mla`.
//!
//! The rules of quantised keys in the decode path hold beside these.

use super::mla::{ALONE, LSE, PAGED, block_size, caches, dims, paired};
use super::mla_int8::quantised_modes;
use super::{Facts, heads, lists};
use crate::Violation;
use crate::ops::fused_infer_attention_score::Parameter;

/// Checks the absorbed form with a half-precision query over an INT8 or INT4 cache.
pub(crate) fn antiquant(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let Some(k_rope) = &call.key_rope else {
        return paired(f);
    };
    LSE.leaves_out(call, &[Parameter::SoftmaxLseFlag])?;
    ALONE.leaves_out(call, &[Parameter::PseShift])?;
    lists::dtypes(f)?;
    heads::query(f)?;
    dims(f)?;
    let Some(cache) = f.cache else {
        return Err(PAGED.broken("no blockTable", "a blockTable"));
    };
    block_size(f, cache, false)?;
    caches(f, cache, k_rope)?;
    quantised_modes(f)
}
