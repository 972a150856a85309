//! Rotary parts and the absorbed form in the unified checker.

use super::Form;
use crate::allowed::Named;
use crate::layout::Extents;
use crate::operator::OwnedValue;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, mla, padding};
use crate::ops::fused_infer_attention_score::{Cache, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, TensorDesc, Violation};

rules! {
    in Scope::UNIFIED;
    DIMS = "rope.dims", TILING_ERROR, V3, "check I8; Ascend 950, rope",
        "with rotary parts of 64 the head dimension of query, key and value is 128, or 512 in the absorbed form",
        "split the head dimension as 128 and 64, or absorb the projections to 512 and 64";
    KEY_SHAPE = "rope.key_shape", TILING_ERROR, V3, "check G4.4; Ascend 950, rope",
        "keyRope has the key's shape but for the head dimension",
        "shape keyRope as the key with head dimension 64";
    KV_HEADS = "mla.kv_heads_given", TILING_ERROR, V3, "check I10; Ascend 950, decode MLA",
        "in the absorbed form numKeyValueHeads is 1, from 9.1 on not 0 in its place",
        "set numKeyValueHeads to 1: 0 is not expanded here";
    PREFIX_LENGTH = "rope.prefix_length", TILING_ERROR, V3, "checks G2.3, I13" in Scope::A2_A3.since(V8_5).until(V9_0),
        "until 9.0 rotary parts go with no actualSharedPrefixLen",
        "drop actualSharedPrefixLen";
    ALONE = "rope.alone", TILING_ERROR, V3, "checks I2, I3, I13; Ascend 950, rope",
        "rotary parts go with no position bias and no shared prefix, on Atlas A2 and A3 with no left padding",
        "drop the argument";
}

pub(crate) fn paired(f: &Facts<'_>) -> Result<(), Violation> {
    mla::paired(f)
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (Some(q_rope), Some(k_rope)) = (&call.query_rope, &call.key_rope) else {
        return Ok(());
    };
    let kind = f.kind();
    require!(
        kind != QuantisationKind::Half || q_rope.dtype == f.query.dtype && k_rope.dtype == f.key.dtype,
        mla::DTYPE,
        format_args!("queryRope {}, keyRope {}", q_rope.dtype, k_rope.dtype),
        f.query.dtype,
    );
    require!(
        (matches!(f.q.dim, 128 | 512) || (f.q.dim == 64 && kind == QuantisationKind::MxFp8)) && f.q.dim == f.v.dim,
        DIMS,
        format_args!("query {}, value {}", f.q.dim, f.v.dim),
        "128 or 512 three times",
    );
    if f.form() == Form::Absorbed {
        require!(
            f.kv_heads == 1 && (call.num_key_value_heads == 1 || !f.since(Cann::V9_1)),
            KV_HEADS,
            call.num_key_value_heads,
            1,
            match f.kv_heads {
                1 => Ok(Change::set(Parameter::NumKeyValueHeads, 1)),
                _ => Err(KV_HEADS.fix),
            },
        );
        mla::heads(f)?;
    }
    shapes(f, q_rope, k_rope)?;
    require!(
        for f.target => call.actual_shared_prefix_len.is_none(),
        PREFIX_LENGTH,
        "actualSharedPrefixLen",
        "none",
        match call.key_shared_prefix.is_none() {
            true => Ok(Change::set(
                Parameter::ActualSharedPrefixLen,
                OwnedValue::Ints(None),
            )),
            false => Err(PREFIX_LENGTH.fix),
        },
    );
    ALONE.forbids([("left padding", padding::given(f) && !f.is_950())])?;
    ALONE.leaves_out(call, &[Parameter::PseShift])?;
    ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)
}

fn shapes(f: &Facts<'_>, q_rope: &TensorDesc, k_rope: &TensorDesc) -> Result<(), Violation> {
    let axes = f.layout.input();
    let want = axes.shape(Extents { dim: 64, ..f.q });
    mla::SHAPE.takes(Named("queryRope", q_rope.shape), want)?;
    let fits = match f.cache {
        // Beside a list of keys the rotary part has the batch axis that the keys do not have.
        None if f.kv_list => {
            let want = Extents { batch: f.batch, dim: 64, ..f.k };
            let rows = f.sequences().all(|b| f.rows_of(b) == f.k.rows);
            axes.extents(&k_rope.shape, f.kv_heads) == Some(want) && rows
        }
        None => axes.extents(&k_rope.shape, f.kv_heads) == Some(Extents { dim: 64, ..f.k }),
        Some(cache) => {
            let run = 256 / i64::from(k_rope.dtype.bits().max(1));
            cache.extents(k_rope, f.kv_heads) == Some(Extents { dim: 64, ..f.k })
                && (cache != Cache::Nz || k_rope.shape.last() == Some(&run))
        }
    };
    require!(
        fits,
        KEY_SHAPE,
        format_args!("keyRope {}, key {}", k_rope.shape, f.key.shape),
        "the key's shape with head dimension 64",
    );
    Ok(())
}
