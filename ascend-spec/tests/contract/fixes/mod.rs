//! A fix that a program can make leads to a call that is taken, and that computes what the first one meant.

mod meaning;
mod words;

use crate::{nsa_compression, recorded, rules};
use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::flash_attention_score;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::ops::scatter_pa_kv_cache::ScatterCall;
use ascend_spec::{Cann, Change, DType, Dims, Level, NewArgument, Soc, Target, TensorDesc, Violation, every_rule};
use meaning::Meaning;
use std::collections::BTreeSet;

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const A2_8_1: Target = Target::snapshot(Soc::AtlasA2);

type Call = AnyArguments<TensorDesc>;

/// What is wrong with a call: the rule that refuses it, otherwise its lints; first those that say a change.
fn broken(call: &Call, version: u8, target: Target) -> Option<Vec<Violation>> {
    let mut lints = vec![];
    match call.check(version, target, &mut |lint| lints.push(lint)) {
        Err(violation) if violation.is_unsupported() => None,
        Err(violation) => Some(vec![violation]),
        Ok(()) => {
            // What says which function to call is nothing of the call.
            lints.retain(|lint| lint.rule.id != "version.deprecated");
            lints.sort_by_key(|lint| lint.changes.is_empty());
            Some(lints)
        }
    }
}

/// Makes every change that the call's fixes say, one fix after the other, and returns the rules that said them and
/// the call at the end.
#[track_caller]
pub(crate) fn follow(call: &Call, version: u8, target: Target) -> (Vec<&'static str>, Call) {
    let mut seen = vec![call.clone()];
    let mut said = vec![];
    let meant = Meaning::of(call);
    loop {
        let call = seen[seen.len() - 1].clone();
        let Some(found) = broken(&call, version, target) else {
            return (said, call);
        };
        let Some(of) = found.first().filter(|of| !of.changes.is_empty()) else {
            let taken = found.iter().all(|of| of.rule.level == Level::Lint);
            if let (true, true, Some(meant)) = (taken && found.is_empty(), !said.is_empty(), &meant) {
                meant.is_computed_by(&call, version, target, &said);
            }
            return (said, call);
        };
        let next = call.changed(&of.changes).unwrap();
        for change in &of.changes {
            assert!(of.fix.contains(&change.to_string()), "{of}");
        }
        assert!(!seen.contains(&next), "{said:?} go in a circle: {of}\n{call:?}");
        let left = broken(&next, version, target).unwrap_or_default();
        let again = left.iter().find(|left| left.rule == of.rule);
        assert!(again.is_none(), "the fix does not mend {of}\n{call:?}");
        if of.rule.level == Level::Lint {
            let refused = left.iter().find(|left| left.rule.level == Level::Rule);
            assert!(refused.is_none(), "{of}\nis answered by {refused:?}");
        }
        if let (Some(before), Some(after)) = (Meaning::of(&call), Meaning::of(&next)) {
            before.is_kept_by(&after, of);
        }
        said.push(of.rule.id);
        seen.push(next);
    }
}

pub(crate) fn fused(call: &FiaCall<'_>) -> Call {
    AnyArguments::FusedInferAttentionScore(call.to_arguments())
}

fn tensor(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

/// One row over a cache of 24 blocks of 128 tokens, in a layout.
fn decode<'a>(layout: &'a str, cache: &'a [TensorDesc], keys: &'a [i64]) -> FiaCall<'a> {
    let rows: &[i64] = if layout == "TND" { &[1, 8, 128] } else { &[1, 1, 8, 128] };
    FiaCall {
        query: tensor(DType::Bf16, rows),
        key: cache,
        value: cache,
        block_table: tensor(DType::Int32, &[1, 24]),
        num_heads: 8,
        num_key_value_heads: 2,
        block_size: 128,
        actual_seq_lengths: (layout == "TND").then_some(&[1]),
        actual_seq_lengths_kv: Some(keys),
        attention_out: tensor(DType::Bf16, rows),
        ..FiaCall::new(layout)
    }
}

fn cache() -> [TensorDesc; 1] {
    [tensor(DType::Bf16, &[30, 128, 256]).unwrap()]
}

#[test]
fn the_window_of_a_single_row_becomes_a_full_mask() {
    let cache = cache();
    let window = |mask: &[i64], keys: &'static [i64], pre_tokens| FiaCall {
        atten_mask: tensor(DType::Int8, mask),
        sparse_mode: 4,
        pre_tokens,
        next_tokens: 0,
        ..decode("BSND", &cache, keys)
    };
    let full = |end: &Call| end.tensors("atten_mask").first().map(|mask| mask.shape);
    for (call, rule) in [
        (window(&[2048, 2048], &[3000], 1023), "atten_mask.full"),
        (window(&[1, 1, 2048, 2048], &[300], 31), "sparse_mode.single_row"),
    ] {
        let (said, end) = follow(&fused(&call), 1, A2);
        assert_eq!(said, [rule]);
        let shape = full(&end).unwrap();
        assert!(shape.starts_with(&[1, 1, 1]), "{shape}");
        assert_eq!(broken(&end, 1, A2), Some(vec![]));
    }
    // A window of all keys, and a causal row, hide nothing.
    for call in [
        window(&[2048, 2048], &[3000], 2999),
        FiaCall { sparse_mode: 3, ..window(&[2048, 2048], &[3000], 2_147_483_647) },
    ] {
        let (said, end) = follow(&fused(&call), 1, A2);
        assert_eq!((said, full(&end)), (vec!["atten_mask.full"], None));
    }
    // As packed rows they have mode 4 itself.
    let packed = FiaCall { input_layout: "TND", ..window(&[2048, 2048], &[3000], 1023) };
    let packed = FiaCall {
        query: tensor(DType::Bf16, &[1, 8, 128]),
        attention_out: tensor(DType::Bf16, &[1, 8, 128]),
        actual_seq_lengths: Some(&[1]),
        ..packed
    };
    assert_eq!(broken(&fused(&packed), 1, A2), Some(vec![]));
}

#[test]
fn a_window_without_a_mask_is_told_apart() {
    let cache = cache();
    let packed = FiaCall { pre_tokens: 1023, next_tokens: 0, ..decode("TND", &cache, &[3000]) };
    let (said, end) = follow(&fused(&packed), 1, A2);
    assert_eq!(said, ["tokens.without_mask"]);
    let rows = Meaning::of(&end).unwrap();
    assert_eq!(rows.of_sequence(0).first(), Some(&(1976..3000)));
    let single = FiaCall { pre_tokens: 1023, next_tokens: 0, ..decode("BSND", &cache, &[3000]) };
    let (said, end) = follow(&fused(&single), 1, A2);
    assert_eq!(said, ["tokens.without_mask"]);
    assert_eq!(end.tensors("atten_mask")[0].shape[..3], [1, 1, 1]);
}

#[test]
fn the_decode_path_keeps_the_window_of_a_single_row() {
    // Quantised keys stay with it in every release.
    let key = [tensor(DType::Int8, &[2, 4, 64, 32]).unwrap()];
    let scale = tensor(DType::Float16, &[2, 4, 32]);
    let rows = tensor(DType::Float16, &[2, 8, 1, 32]);
    let call = FiaCall {
        query: rows,
        key: &key,
        value: &key,
        antiquant_scale: scale,
        num_heads: 8,
        num_key_value_heads: 4,
        atten_mask: tensor(DType::Bool, &[1, 2048, 2048]),
        sparse_mode: 4,
        pre_tokens: 15,
        next_tokens: 0,
        attention_out: rows,
        ..FiaCall::new("BNSD")
    };
    let (said, end) = follow(&fused(&call), 1, A2_8_1);
    assert_eq!(said.first(), Some(&"atten_mask.compressed_shape_decode"));
    let rows = Meaning::of(&end).unwrap();
    assert_eq!(rows.of_sequence(1).first(), Some(&(48..64)));
}

/// The text that refuses a call.
#[track_caller]
fn said(call: &FiaCall<'_>, target: Target) -> Violation {
    match call.check(Version::V1, target) {
        Err(violation) => violation,
        other => panic!("{other:?}"),
    }
}

/// Packed rows of 4 tokens with head dimension `dim`.
fn packed<'a>(dtype: DType, key: &'a [TensorDesc], heads: i64, dim: i64) -> FiaCall<'a> {
    let rows = tensor(dtype, &[4, heads, dim]);
    FiaCall {
        query: rows,
        key,
        value: key,
        num_heads: heads,
        num_key_value_heads: key[0].shape[1],
        actual_seq_lengths: Some(&[4]),
        actual_seq_lengths_kv: Some(&[4]),
        attention_out: rows,
        ..FiaCall::new("TND")
    }
}

#[test]
fn heads_that_packed_rows_do_not_take_are_not_padded_down() {
    for (dim, says) in [(80, "with zeros to 128"), (256, "use BSH, BSND or BNSD"), (512, "BSH, BSND or BNSD")] {
        let key = [tensor(DType::Bf16, &[4, 8, dim]).unwrap()];
        let refused = said(&packed(DType::Bf16, &key, 8, dim), A2_8_1);
        assert!(refused.fix.contains(says), "{dim}: {refused}");
    }
    // The unified checker: more precision alone keeps heads of 256 from the split-fuse path.
    let key = [tensor(DType::Bf16, &[4, 2, 256]).unwrap()];
    let call = FiaCall { inner_precise: 1, ..packed(DType::Bf16, &key, 8, 256) };
    let (rules, end) = follow(&fused(&call), 1, A2);
    assert_eq!(rules, ["head_dim.packed"]);
    assert_eq!(broken(&end, 1, A2), Some(vec![]));
    let key = [tensor(DType::Bf16, &[4, 2, 512]).unwrap()];
    let refused = said(&packed(DType::Bf16, &key, 8, 512), A2);
    assert_eq!(refused.rule.id, "head_dim.packed");
    assert!(refused.fix.contains("BSH, BSND or BNSD"), "{refused}");
    let spread = tensor(DType::Bf16, &[1, 4, 8, 512]);
    let key = [tensor(DType::Bf16, &[1, 4, 2, 512]).unwrap()];
    let taken = FiaCall {
        query: spread,
        key: &key,
        value: &key,
        attention_out: spread,
        actual_seq_lengths: None,
        actual_seq_lengths_kv: None,
        ..FiaCall { input_layout: "BSND", num_heads: 8, num_key_value_heads: 2, ..FiaCall::new("BSND") }
    };
    taken.check(Version::V1, A2).unwrap();
}

#[test]
fn packed_rows_that_are_called_bsh_are_named() {
    let key = [tensor(DType::Bf16, &[4, 2, 128]).unwrap()];
    for target in [A2_8_1, A2] {
        let call = FiaCall {
            input_layout: "BSH",
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
            ..packed(DType::Bf16, &key, 8, 128)
        };
        let refused = said(&call, target);
        assert!(refused.fix.contains("pass inputLayout TND"), "{refused}");
    }
}

#[test]
fn strided_tensors_are_named_and_copied() {
    let strided =
        TensorDesc { strides: Dims::of([8192, 2048, 64, 1]), ..tensor(DType::Float16, &[2, 4, 64, 32]).unwrap() };
    let (key, value) = ([tensor(DType::Float16, &[2, 4, 64, 32]).unwrap()], [strided]);
    let rows = tensor(DType::Float16, &[2, 8, 16, 32]);
    let call = FiaCall {
        query: rows,
        key: &key,
        value: &value,
        num_heads: 8,
        num_key_value_heads: 4,
        attention_out: rows,
        ..FiaCall::new("BNSD")
    };
    let refused = said(&call, A2);
    assert_eq!(refused.fix, "copy value to a contiguous tensor");
    assert!(refused.given.starts_with("value 0"), "{refused}");
    assert_eq!(follow(&fused(&call), 1, A2).0, ["tensor.contiguous"]);
}

#[test]
fn the_newest_entry_point_looks_at_strides_on_every_path() {
    // The split-fuse path, which innerPrecise 0 leads to, looks at none itself.
    let strided = TensorDesc { strides: Dims::of([512, 128, 1]), ..tensor(DType::Bf16, &[4, 2, 128]).unwrap() };
    let key = [strided];
    for inner_precise in [0, 1] {
        let call = FiaCall { inner_precise, ..packed(DType::Bf16, &key, 8, 128) };
        let refused = match call.check(Version::V5, A2) {
            Err(violation) => violation.rule.id,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused, "tensor.contiguous");
        let before = Target::new(Soc::AtlasA2, Cann::V9_0);
        assert!(call.check(Version::V5, before).is_ok());
    }
    let split_fuse = packed(DType::Bf16, &key, 8, 128);
    assert!(split_fuse.check(Version::V4, A2).is_ok());
}

#[test]
fn caches_are_written_where_they_are() {
    let half = |shape: &[i64]| tensor(DType::Float16, shape);
    let apart = |desc: Option<TensorDesc>, strides| desc.map(|desc| TensorDesc { strides, ..desc });
    let call = ScatterCall {
        key: half(&[5, 2, 32]),
        key_cache: half(&[3, 8, 2, 32]),
        slot_mapping: tensor(DType::Int32, &[5]),
        ..Default::default()
    };
    let refused = |call: &ScatterCall<'_>| match call.check(Soc::AtlasA2) {
        Err(violation) => violation,
        other => panic!("{other:?}"),
    };
    let cache = refused(&ScatterCall { key_cache: apart(call.key_cache, Dims::of([1024, 64, 32, 1])), ..call });
    assert!(cache.changes.is_empty() && cache.fix.contains("written in place"), "{cache}");
    let rows = refused(&ScatterCall { key: apart(call.key, Dims::of([128, 32, 1])), ..call });
    assert_eq!(rows.rule.id, "scatter.contiguous");
    assert_eq!(rows.fix, "copy key to a contiguous tensor");
    for (mode, shape, other) in [("PA_NZ", &[3, 8, 2, 32][..], "Norm"), ("Norm", &[3, 4, 8, 16], "PA_NZ")] {
        let wrong = ScatterCall { cache_mode: Some(mode), key_cache: half(shape), ..call };
        let refused = refused(&wrong);
        assert_eq!(refused.rule.id, "key_cache.shape");
        let [change] = &refused.changes[..] else {
            panic!("{refused}");
        };
        assert_eq!(change.to_string(), format!("set cacheMode to {other}"));
        let mended = ScatterCall { cache_mode: Some(other), ..wrong };
        mended.check(Soc::AtlasA2).unwrap();
    }
}

#[test]
fn masks_of_training_attention_are_converted() {
    let rows = tensor(DType::Bf16, &[2, 24, 4, 64]);
    let softmax = tensor(DType::Float, &[2, 4, 24, 8]);
    let call = flash_attention_score::Arguments {
        query: rows,
        key: rows,
        value: rows,
        atten_mask: tensor(DType::Int8, &[24, 24]),
        num_heads: 4,
        input_layout: Some("BSND".into()),
        softmax_max: softmax,
        softmax_sum: softmax,
        softmax_out: tensor(DType::Bf16, &[0]),
        attention_out: rows,
        ..Default::default()
    };
    let call = AnyArguments::FlashAttentionScore(call);
    let refused = broken(&call, 1, A2).unwrap().remove(0);
    assert!(!refused.fix.contains("::"), "a name of one language: {refused}");
    assert_eq!(follow(&call, 1, A2).0, ["flash.atten_mask_dtype"]);
}

/// Calls that no recorded call is a mutation of.
fn more_calls() -> Vec<&'static str> {
    let key = [tensor(DType::Bf16, &[8, 2, 128]).unwrap()];
    let rows = tensor(DType::Bf16, &[8, 4, 128]);
    let packed = FiaCall {
        query: rows,
        attention_out: rows,
        actual_seq_lengths: Some(&[3, 8]),
        actual_seq_lengths_kv: Some(&[3, 5]),
        ..packed(DType::Bf16, &key, 4, 128)
    };
    let cache = cache();
    let cached = |layout, inner_precise| FiaCall {
        query: tensor(DType::Bf16, &[2, 8, 128]),
        attention_out: tensor(DType::Bf16, &[2, 8, 128]),
        actual_seq_lengths: Some(&[1, 2]),
        actual_seq_lengths_kv: Some(&[3000, 3072 + 70]),
        block_table: tensor(DType::Int32, &[2, 24]),
        inner_precise,
        ..decode(layout, &cache, &[])
    };
    let calls = [
        (packed.clone(), A2_8_1),
        (packed.clone(), A2),
        (
            FiaCall {
                actual_seq_lengths_kv: Some(&[3, 8]),
                attention_out: tensor(DType::Float16, &[8, 4, 128]),
                ..packed.clone()
            },
            A2,
        ),
        (
            FiaCall { actual_seq_lengths: Some(&[3, 5]), actual_seq_lengths_kv: Some(&[3, 8]), ..packed.clone() },
            Target::new(Soc::AtlasA2, Cann::V9_2),
        ),
        (cached("TND", 0), A2),
        (cached("TND", 1), A2),
        (FiaCall { input_layout: "bsnd", ..decode("BSND", &cache, &[3000]) }, A2),
        (FiaCall { sparse_mode: 1 << 32, ..decode("BSND", &cache, &[3000]) }, A2),
    ];
    let followed = calls.into_iter().map(|(call, target)| follow(&fused(&call), 1, target).0);
    followed.flatten().collect()
}

/// Rules whose fixes were followed from every call that the tests have.
fn followed() -> BTreeSet<&'static str> {
    let mut said: BTreeSet<_> = rules::broken_calls().into_iter().collect();
    said.extend(more_calls());
    said.extend(nsa_compression::followed());
    for mut recorded in recorded::sample() {
        let targets: Vec<_> = recorded.verdicts.iter().map(|&(target, _)| target).collect();
        for target in targets {
            said.extend(recorded.asked(target, |call, version| follow(&fused(call), version.number(), target).0));
            recorded.each_mutation(&[0, 1, 3, 100], &mut |mutated| {
                said.extend(mutated.asked(target, |call, version| follow(&fused(call), version.number(), target).0));
            });
        }
    }
    said
}

#[test]
fn every_fix_is_a_change_that_mends_or_is_listed_with_its_reason() {
    let mut said = followed();
    said.extend(["scatter.contiguous", "key_cache.shape", "flash.atten_mask_dtype"]);
    let all: BTreeSet<_> = every_rule().map(|rule| rule.id).collect();
    let mut listed = BTreeSet::new();
    for (reason, ids) in words::WORDS {
        for id in ids.split_whitespace() {
            assert!(listed.insert(id), "{id} stands twice, {reason}");
        }
    }
    let both: Vec<_> = said.intersection(&listed).collect();
    assert!(both.is_empty(), "listed, and changed by their fix: {both:?}");
    let neither: Vec<_> = all.iter().filter(|id| !said.contains(*id) && !listed.contains(*id)).collect();
    assert!(neither.is_empty(), "neither changed by their fix nor listed: {neither:?}");
    let unknown: Vec<_> = listed.difference(&all).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn changes_are_made_in_the_order_that_the_text_says() {
    let cache = cache();
    let call = fused(&decode("BSND", &cache, &[3000]));
    let parameter = |name| call.operator().parameter_named(name).unwrap();
    let change = |name, to| Change { parameter: parameter(name), to };
    let mask = tensor(DType::Bool, &[1, 1, 1, 3072]).unwrap();
    let changed = call
        .changed(&[
            change("key", NewArgument::DType(DType::Float16)),
            change("block_table", NewArgument::Nothing),
            change("atten_mask", NewArgument::Given(mask)),
            change("attention_out", NewArgument::Shape(Dims::of([8, 128]))),
        ])
        .unwrap();
    assert_eq!(changed.tensors("key")[0].dtype, DType::Float16);
    assert_eq!(changed.tensors("value"), cache);
    assert!(changed.tensors("block_table").is_empty());
    assert_eq!(changed.tensors("atten_mask"), [mask]);
    assert_eq!(changed.tensors("attention_out")[0].shape[..], [8, 128]);
}
