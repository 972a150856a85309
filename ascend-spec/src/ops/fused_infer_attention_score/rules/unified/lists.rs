//! Keys and values of the unified checker: their number, batch and shapes.

use super::Form;
use crate::allowed::{Rank, Shown};
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, heads, lists, output, packed, paged};
use crate::ops::fused_infer_attention_score::{Cache, Checker, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, DType, Layout, NewArgument, StridedKeys, TensorDesc, Violation};

rules! {
    in Scope::UNIFIED;
    STRIDED = "tensor.contiguous", TILING_ERROR, V1, "entry points, strided tensors" in Scope::UNIFIED.since(V9_1),
        "key, value, keyRope and the scales of key and value are contiguous, on Atlas A2 and A3 for V5 whatever checks \
         the call, and from 9.2 on for no other; blocks of a paged cache may lie apart on Ascend 950 with MXFP8 and \
         from 9.2 on without quantisation, but for BnBsH their heads too, and for V5 on Atlas A2 and A3 from 9.2 on in \
         the split-fuse path and the absorbed form; it is open whether V1 to V4 of 9.1 on Atlas A2 and A3 refuse \
         others, as the checks of 9.1 do, or copy them first, as its operator definition says",
        "copy the tensor to a contiguous one";
    COUNT = "key.list_count", TILING_ERROR, V1, "checks G0.1, I2",
        "key and value are lists of one length",
        "pass a value for each key";
    LAYOUT = "key.list_layout", TILING_ERROR, V1, "check I2; Ascend 950, tensor lists",
        "a list of several keys goes with BSH, BSND, BNSD and BNSD_BSND, in 8.5 also with BSH_BNSD and BSND_BNSD, with \
         no rotary parts on Atlas A2 and A3, not in the absorbed form on Ascend 950, and with no block table",
        "use one key tensor, or pad the keys to one length and pass BNSD";
    SHORT = "key.list_short",
        TilingCrash("some of these calls read past the end of the list, the others are refused"),
        V1, "status codes, short lists" in Scope::A2_A3.since(V8_5).until(V9_0),
        "a list of keys with BNSD or BNSD_BSND has a tensor for each sequence",
        "pass one key and one value a sequence";
    MOST = "key.list_most", TILING_ERROR, V1, "check I2" in Scope::A2_A3.since(V8_5).until(V9_0),
        "a list of keys serves a batch of at most 256",
        "split the batch over several calls";
    VALUE_ROWS = "value.rows_of_key", TILING_ERROR, V1, "checks G4.4, I8; Ascend 950, L5",
        "the value has the key's batch size and rows",
        "give the value its key's batch and rows";
    RANK = "value.rank_of_key", TILING_ERROR, V1, "checks G0.3, G4.4; Ascend 950, A2",
        "caches of key and value have one number of axes",
        "shape the caches of key and value alike";
}

/// What mends a call over a strided cache.
pub(crate) const CONTIGUOUS_CACHE: &str = "give the cache contiguous memory: a copy of it misses what is written later";

/// Checks the numbers of tensors.
pub(crate) fn counted(f: &Facts<'_>) -> Result<(), Violation> {
    let (keys, values) = (f.call.key.len(), f.call.value.len());
    COUNT.takes(Shown(format_args!("{keys} keys, {values} values"), values), keys)?;
    if !f.paged() {
        rank(f, f.value, "value")?;
    }
    Ok(())
}

fn rank(f: &Facts<'_>, desc: &TensorDesc, name: &str) -> Result<(), Violation> {
    let rank = f.layout.input().rank();
    lists::KEY_RANK.takes(Shown(format_args!("{name} {} with {}", desc.shape, f.layout), desc.shape), Rank(rank))
}

/// Checks the numbers of axes.
pub(crate) fn ranks(f: &Facts<'_>) -> Result<(), Violation> {
    if !f.paged() {
        rank(f, f.key, "key")?;
    }
    RANK.takes(
        Shown(format_args!("key {}, value {}", f.key.shape, f.value.shape), f.key.shape),
        Rank(f.value.shape.rank()),
    )?;
    if f.paged() {
        require!(Cache::of_rank(f.key.shape.rank()).is_some(), paged::CACHE_RANK, f.key.shape, "3, 4 or 5 axes",);
    }
    Ok(())
}

/// Whether the unified checker leaves strides alone: the layer of versions 1 to 4 makes keys and values contiguous, and
/// version 5 has asked before it chose a checker.
pub(crate) fn made_contiguous(f: &Facts<'_>) -> bool {
    if f.is_950() {
        return false;
    }
    let copied = f.version < Version::V5 && f.target.strided_keys == StridedKeys::Copied;
    f.since(Cann::V9_2) || (f.since(Cann::V9_1) && copied)
}

/// How many axes of a paged cache may have any stride where the operator reads it in place; `None` where no source says
/// what becomes of one with other strides, or of any.
pub(crate) fn axes_in_place(f: &Facts<'_>) -> Option<usize> {
    (f.is_950() || made_contiguous(f)).then(|| strided_axes(f, Parameter::Key))
}

/// Checks that keys and values, and the tensors that belong to them, are contiguous.
pub(crate) fn contiguous(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    use Parameter::{Key, KeyAntiquantScale, KeyRope, Value, ValueAntiquantScale};
    let strided = |parameter: Parameter| {
        let apart = strided_axes(f, parameter);
        let mut tensors = call.tensors(parameter).iter().enumerate();
        tensors.find(|(_, desc)| match f.since(Cann::V9_2) {
            true => !is_read_in_place(desc, apart),
            false => !desc.is_contiguous_from(apart),
        })
    };
    let looked_at = [Key, Value, KeyRope, KeyAntiquantScale, ValueAntiquantScale];
    let found = |parameter: &Parameter| strided(*parameter).is_some();
    let Some(&parameter) = looked_at.iter().find(|parameter| found(parameter)) else {
        return Ok(());
    };
    if let Some((index, desc)) = strided(parameter) {
        let copied = looked_at.into_iter().filter(found);
        require!(
            for f.target => false,
            STRIDED,
            format_args!("{} {index}: {desc} strides {}", parameter.acl_name(), desc.strides),
            "row-major strides",
            match f.paged() {
                true => Err(CONTIGUOUS_CACHE),
                false => Ok(copied.map(|parameter| Change::to(parameter, NewArgument::Packed)).collect::<Vec<_>>()),
            },
        );
    }
    Ok(())
}

/// How many axes of a parameter's tensors, from the first on, may have any stride: of a paged cache its blocks, or its
/// blocks and heads.
fn strided_axes(f: &Facts<'_>, parameter: Parameter) -> usize {
    use Parameter::{Key, KeyAntiquantScale, KeyRope, Value};
    let Some(cache) = f.cache else {
        return 0;
    };
    let newer = f.since(Cann::V9_2);
    let cached = matches!(parameter, Key | Value | KeyRope);
    match (f.is_950(), f.kind()) {
        (true, QuantisationKind::MxFp8) => 2,
        (true, QuantisationKind::Half) if newer && cached => match cache {
            Cache::BnBsH => 1,
            Cache::BnNBsD | Cache::Nz => 2,
        },
        (true, QuantisationKind::Fp8) if cached || parameter == KeyAntiquantScale => 2,
        (false, QuantisationKind::Half) if newer && cached => {
            let absorbed = f.checker == Checker::Unified
                && f.form() == Form::Absorbed
                && f.kv_heads == 1
                && f.call.learnable_sink.is_none()
                && f.version >= Version::V4;
            usize::from(absorbed || f.checker == Checker::SplitFuse)
        }
        _ => 0,
    }
}

/// Whether a tensor whose first `axes` axes may have any stride is contiguous in the others, and the entries of those
/// axes have a stride above 0.
pub(crate) fn is_read_in_place(desc: &TensorDesc, axes: usize) -> bool {
    let mut sized = desc.shape.iter().zip(desc.strides.iter()).take(axes);
    desc.is_contiguous_from(axes) && sized.all(|(&dim, &stride)| dim <= 1 || stride > 0)
}

/// Checks the dtypes of query, key, value and output.
pub(crate) fn dtypes(f: &Facts<'_>) -> Result<(), Violation> {
    let other = (f.call.key.iter().chain(f.call.value)).find(|desc| desc.dtype != f.key.dtype);
    if let Some(other) = other {
        return Err(lists::KEY_VALUE_DTYPE.broken(format_args!("{} beside {}", other.dtype, f.key.dtype), f.key.dtype));
    }
    let quantised = match f.is_950() {
        true => matches!(f.out.dtype, DType::Int8 | DType::Float8E4M3Fn | DType::HiFloat8),
        false => f.out.dtype == DType::Int8,
    };
    require!(
        f.kind() != QuantisationKind::Half || f.out.dtype == f.query.dtype || quantised,
        output::OUT_DTYPE,
        format_args!("{} for a {} query", f.out.dtype, f.query.dtype),
        f.query.dtype,
    );
    Ok(())
}

/// Checks the batch size.
pub(crate) fn batch(f: &Facts<'_>) -> Result<(), Violation> {
    // Until 9.0 only packed layouts, whose arrays define the batch, are checked.
    let bounded = f.since(Cann::V9_1) || f.packed();
    if f.packed() && f.batch == 0 {
        packed::arrays(f)?;
    }
    require!(f.batch > 0 && (f.batch <= FiaCall::MOST_SEQUENCES || !bounded), lists::BATCH_MAX, f.batch, "1 to 65536",);
    Ok(())
}

/// Checks the shapes of keys and values that are not paged.
pub(crate) fn shapes(f: &Facts<'_>) -> Result<(), Violation> {
    if f.paged() {
        return Ok(());
    }
    if f.kv_list {
        return list(f);
    }
    heads::key_value(f)?;
    require!(
        f.packed() || f.k.batch == f.batch,
        lists::BATCH,
        format_args!("{} in the key, {} in the query", f.k.batch, f.batch),
        f.batch,
    );
    let rows = |extents: Extents| (extents.batch, extents.rows);
    require!(
        rows(f.k) == rows(f.v),
        VALUE_ROWS,
        format_args!("key {}, value {}", f.key.shape, f.value.shape),
        format_args!("batch {}, {} rows", f.k.batch, f.k.rows),
    );
    Ok(())
}

fn list(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let exact = f.since(Cann::V9_1);
    // 8.5 checks the layout only of lists with rotary parts.
    let reordered = !f.since(Cann::V9_0) && matches!(f.layout, Layout::BsndBnsd | Layout::BshBnsd);
    let roped = if f.is_950() { f.form() == Form::Absorbed } else { f.rope() };
    require!(!roped, LAYOUT, format_args!("{} keys beside queryRope", call.key.len()), "one key",);
    require!(
        (f.classic_layout() || reordered)
            // Until 9.0 a block table beside a list is ignored.
            && (call.block_table.is_none() || !exact),
        LAYOUT,
        f.layout,
        "BSH, BSND, BNSD, BNSD_BSND",
    );
    MOST.takes_on(f.target, f.batch, ..=256)?;
    let fits = match exact {
        true => call.key.len() == f.batch(),
        false => call.key.len() >= f.batch(),
    };
    let heads_first = matches!(f.layout, Layout::Bnsd | Layout::BnsdBsnd);
    require!(
        for f.target => fits || !heads_first,
        SHORT,
        format_args!("{} keys for {} sequences", call.key.len(), f.batch),
        f.batch,
    );
    require!(fits, lists::LIST_LENGTH, format_args!("{} keys for {} sequences", call.key.len(), f.batch), f.batch,);
    let axes = f.layout.input();
    let extents = |desc: &TensorDesc| axes.extents(&desc.shape, f.kv_heads);
    for (index, (key, value)) in call.key.iter().zip(call.value).enumerate() {
        let (k, v) = (extents(key), extents(value));
        let single = |own: Option<Extents>| own.is_some_and(|own| exact || own.batch == 1);
        for (desc, own, name) in [(key, k, "key"), (value, v, "value")] {
            require!(single(own), lists::LIST_BATCH, format_args!("{name} {index} is {}", desc.shape), "batch 1",);
        }
        let like = |own: Option<Extents>, first: Extents| {
            own.is_some_and(|own| (own.heads, own.dim) == (f.kv_heads, first.dim))
        };
        require!(
            like(k, f.k) && like(v, f.v),
            lists::LIST_SHAPE,
            format_args!("key {index} is {}, value {index} is {}", key.shape, value.shape),
            format_args!("{} heads of {} and {}", f.kv_heads, f.k.dim, f.v.dim),
        );
        require!(
            k.map(|own| own.rows) == v.map(|own| own.rows),
            VALUE_ROWS,
            format_args!("key {index} is {}, value {index} is {}", key.shape, value.shape),
            "as many rows in both",
        );
    }
    Ok(())
}

/// Whether every key and value is empty.
pub(crate) fn empty(f: &Facts<'_>) -> bool {
    let mut all = f.call.key.iter().chain(f.call.value);
    all.all(TensorDesc::is_empty)
}
