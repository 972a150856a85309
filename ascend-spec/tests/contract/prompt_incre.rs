//! The contracts of PromptFlashAttention and IncreFlashAttention: a call for every rule, and the golden cases.

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::incre_flash_attention::{self as incre, IncreCall};
use ascend_spec::ops::prompt_flash_attention::{self as prompt, PromptCall};
use ascend_spec::{Cann, DType, Dims, Format, Soc, Target, TensorDesc, Violation};
use std::collections::BTreeSet;

pub(super) const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

pub(super) fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float16, shape)
}

fn prefill() -> PromptCall<'static> {
    PromptCall {
        query: half(&[2, 4, 20, 72]),
        key: half(&[2, 2, 27, 72]),
        value: half(&[2, 2, 27, 72]),
        num_heads: 4,
        num_key_value_heads: 2,
        attention_out: half(&[2, 4, 20, 72]),
        ..PromptCall::new("BNSD")
    }
}

/// Asserts what a refusal names and its status, and keeps the name.
#[track_caller]
fn named(
    broken: &mut BTreeSet<&'static str>,
    id: &'static str,
    status: i32,
    verdict: Result<(), Violation>,
) -> Violation {
    match verdict {
        Err(violation) => {
            assert_eq!(violation.rule.id, id, "{violation}");
            assert_eq!(violation.rule.status, status, "{violation}");
            assert!(!violation.given.is_empty() && !violation.allowed.is_empty());
            broken.insert(id);
            violation
        }
        other => panic!("{id}: {other:?}"),
    }
}

#[test]
fn refusals_of_head_dimensions_say_which_are_allowed() {
    let of_dims = |dim: i64, value_dim: i64| PromptCall {
        query: half(&[2, 4, 20, dim]),
        key: half(&[2, 2, 27, dim]),
        value: half(&[2, 2, 27, value_dim]),
        attention_out: half(&[2, 4, 20, value_dim]),
        ..prefill()
    };
    let allowed = |dim: i64, value_dim: i64| {
        let verdict = of_dims(dim, value_dim).check(prompt::Version::V3, TARGET);
        named(&mut BTreeSet::new(), "prompt.head_dim", 161_002, verdict).allowed
    };
    assert_eq!(allowed(144, 72), "up to 72 of the query");
    assert_eq!(allowed(513, 512), "1 to 512 of the query, up to 512 of the value");
    assert_eq!(allowed(0, 64), "1 to 512 of the query, up to 512 of the value");
    assert_eq!(of_dims(128, 72).check(prompt::Version::V3, TARGET), Ok(()));
}

#[test]
fn every_rule_of_prompt_flash_attention_has_a_call_that_breaks_it() {
    use prompt::Version::{V1, V2, V3};
    let mut broken = BTreeSet::new();
    let base = prefill();
    for version in prompt::Version::ALL {
        assert_eq!(base.check(version, TARGET), Ok(()), "{version}");
    }
    let nz = TensorDesc { format: Format::FractalNz, ..half(&[2, 2, 27, 72]).unwrap() };
    let int8 = |shape: &[i64]| of(DType::Int8, shape);
    let calls: &[(&str, i32, PromptCall<'_>)] = &[
        ("prompt.required", 161_001, PromptCall { value: None, ..base }),
        ("prompt.required", 161_001, PromptCall { input_layout: None, ..base }),
        ("prompt.countable", 161_002, PromptCall { key: half(&[2, 2, -1, 72]), ..base }),
        ("prompt.dtype", 161_002, PromptCall { key: int8(&[2, 2, 27, 72]), ..base }),
        ("prompt.out_dtype", 161_002, PromptCall { attention_out: of(DType::Bf16, &[2, 4, 20, 72]), ..base }),
        ("prompt.pse_dtype", 161_002, PromptCall { pse_shift: of(DType::Bf16, &[2, 4, 20, 27]), ..base }),
        ("prompt.mask_dtype", 161_002, PromptCall { atten_mask: of(DType::Float, &[20, 27]), ..base }),
        ("prompt.num_heads", 161_002, PromptCall { num_heads: 0, ..base }),
        ("prompt.input_layout", 161_002, PromptCall { input_layout: Some("BSH"), ..base }),
        ("prompt.input_layout", 161_002, PromptCall { input_layout: Some("SBH"), ..base }),
        ("prompt.head_dim", 161_002, PromptCall { value: half(&[2, 2, 27, 513]), ..base }),
        (
            "prompt.head_dim",
            161_002,
            PromptCall {
                query: half(&[2, 4, 20, 144]),
                key: half(&[2, 2, 27, 144]),
                attention_out: half(&[2, 4, 20, 72]),
                ..base
            },
        ),
        ("prompt.format", 161_002, PromptCall { key: Some(nz), ..base }),
        ("prompt.out_shape", 161_002, PromptCall { attention_out: half(&[2, 4, 20, 64]), ..base }),
        ("prompt.prefill_rules", 561_103, PromptCall { num_key_value_heads: 3, ..base }),
        ("prompt.prefill_rules", 561_103, PromptCall { sparse_mode: 2, ..base }),
    ];
    for (id, status, call) in calls {
        let violation = named(&mut broken, id, *status, call.check(V3, TARGET));
        if *id == "prompt.prefill_rules" {
            let rule = violation.given.split(':').next().unwrap();
            assert!(rule.contains('.'), "{violation}");
        }
    }
    let bias = PromptCall { pse_shift: of(DType::Float, &[1]), ..base };
    for version in [V1, V2] {
        assert_eq!(bias.check(version, TARGET), Ok(()), "{version}");
        broken.insert(bias.lint(version, &[]).unwrap_err().rule.id);
        let lint = bias.lint(version, &["prompt.pse_dropped"]).unwrap_err();
        broken.insert(lint.rule.id);
    }
    assert_eq!(bias.lint(V3, &[]), Ok(()));
    let ascend950 = Target::new(Soc::Ascend950, Cann::V9_1);
    named(&mut broken, "prompt.successor", 361_001, base.check(V3, ascend950));
    let training = Target::new(Soc::AtlasTraining, Cann::V9_1);
    named(&mut broken, "prompt.product", 561_003, base.check(V3, training));
    broken.extend(refused_prompts_of_cards());
    let all: BTreeSet<_> = prompt::rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn atlas_inference_cards_take_half_precision_and_no_bf16() {
    let card = Target::new(Soc::AtlasInference, Cann::V8_1);
    assert_eq!(prefill().check(prompt::Version::V3, card), Ok(()));
    let bf16 = |shape: &[i64]| of(DType::Bf16, shape);
    let call = PromptCall {
        query: bf16(&[2, 4, 20, 72]),
        key: bf16(&[2, 2, 27, 72]),
        value: bf16(&[2, 2, 27, 72]),
        attention_out: bf16(&[2, 4, 20, 72]),
        ..prefill()
    };
    assert_eq!(call.check(prompt::Version::V3, TARGET), Ok(()));
    named(&mut BTreeSet::new(), "prompt.dtype", 161_002, call.check(prompt::Version::V3, card));
    let empty = PromptCall { query: half(&[2, 4, 0, 72]), key: None, attention_out: half(&[2, 4, 0, 72]), ..prefill() };
    assert!(empty.check(prompt::Version::V3, card).is_err());
    let empty = PromptCall { key: half(&[9]), ..empty };
    assert_eq!(empty.check(prompt::Version::V3, card), Ok(()));
}

const CARD: Target = Target::new(Soc::AtlasInference, Cann::V9_1);

/// A call of one head without a mask.
fn sized(batch: i64, rows: i64, keys: i64) -> PromptCall<'static> {
    PromptCall {
        query: half(&[batch, 1, rows, 64]),
        key: half(&[batch, 1, keys, 64]),
        value: half(&[batch, 1, keys, 64]),
        num_heads: 1,
        attention_out: half(&[batch, 1, rows, 64]),
        ..PromptCall::new("BNSD")
    }
}

/// What cards of the inference series refuse of calls that Atlas A2 takes.
fn refused_prompts_of_cards() -> BTreeSet<&'static str> {
    let masked = |rows, keys| PromptCall { atten_mask: of(DType::Bool, &[rows, keys]), ..sized(2, rows, keys) };
    let tokens = |pre_tokens, next_tokens| PromptCall { pre_tokens, next_tokens, ..sized(2, 20, 40) };
    let compressed =
        |rows, keys| PromptCall { atten_mask: of(DType::Bool, &[2048, 2048]), sparse_mode: 3, ..sized(2, rows, keys) };
    let bias = PromptCall { pse_shift: half(&[2, 1, 32, 48]), ..sized(2, 32, 48) };
    let int8 = PromptCall { atten_mask: of(DType::Int8, &[32, 32]), ..sized(2, 32, 32) };
    let taken = [
        sized(128, 20, 40),
        sized(1, 1, 65_536),
        sized(1, 65_536, 1),
        masked(32, 32),
        compressed(32, 32),
        tokens(20, 0),
        tokens(20, 40),
        PromptCall { atten_mask: of(DType::Int8, &[0]), ..sized(2, 20, 40) },
    ];
    for call in taken {
        for target in [TARGET, CARD] {
            assert_eq!(call.check(prompt::Version::V3, target), Ok(()), "{call:?}");
        }
    }
    // V1 and V2 compute without the bias, and take it.
    assert_eq!(bias.check(prompt::Version::V2, CARD), Ok(()));
    let mut broken = BTreeSet::new();
    for (id, call) in [
        ("prompt.card_size", sized(129, 20, 40)),
        ("prompt.card_size", sized(1, 1, 65_537)),
        ("prompt.card_size", sized(1, 65_537, 1)),
        ("prompt.card_pse", bias),
        ("prompt.card_tokens", tokens(19, 0)),
        ("prompt.card_tokens", tokens(20, 39)),
        ("prompt.card_mask_dtype", int8),
        ("prompt.card_mask", masked(20, 20)),
        ("prompt.card_mask", masked(32, 48)),
        ("prompt.card_mask", compressed(20, 20)),
        ("prompt.card_mask", compressed(16, 48)),
    ] {
        assert_eq!(call.check(prompt::Version::V3, TARGET), Ok(()), "{call:?}");
        let verdict = call.check(prompt::Version::V3, CARD);
        let violation = named(&mut broken, id, 561_103, verdict);
        assert!(violation.rule.scope.holds(CARD) && !violation.rule.scope.holds(TARGET));
    }
    broken
}

/// The same of single rows.
fn refused_single_rows_of_cards() -> BTreeSet<&'static str> {
    let mut broken = BTreeSet::new();
    let mut check = |[batch, heads, keys, dim]: [i64; 4], id: Option<&'static str>| {
        let key = [half(&[batch, 1, keys, dim]).unwrap()];
        let call = IncreCall {
            query: half(&[batch, heads, 1, dim]),
            key: &key,
            value: &key,
            num_heads: heads,
            num_key_value_heads: 1,
            attention_out: half(&[batch, heads, 1, dim]),
            ..IncreCall::new("BNSD")
        };
        assert_eq!(call.check(incre::Version::V4, TARGET), Ok(()), "{call:?}");
        let verdict = call.check(incre::Version::V4, CARD);
        match id {
            Some(id) => drop(named(&mut broken, id, 561_002, verdict)),
            None => assert_eq!(verdict, Ok(())),
        }
    };
    check([256, 32, 70, 128], None);
    check([1, 1, 65_536, 16], None);
    check([257, 32, 70, 128], Some("incre.card_size"));
    check([1, 1, 65_537, 16], Some("incre.card_size"));
    check([1, 33, 70, 128], Some("incre.card_heads"));
    check([1, 1, 70, 144], Some("incre.card_heads"));
    check([1, 1, 70, 72], Some("incre.card_heads"));
    // Of a paged cache the room is what a row of the table holds.
    let cache = [half(&[129, 512, 64]).unwrap()];
    let paged = |columns| IncreCall {
        query: half(&[1, 1, 64]),
        key: &cache,
        value: &cache,
        num_heads: 1,
        num_key_value_heads: 1,
        actual_seq_lengths: Some(&[9]),
        block_table: of(DType::Int32, &[1, columns]),
        block_size: 512,
        attention_out: half(&[1, 1, 64]),
        ..IncreCall::new("BSH")
    };
    assert_eq!(paged(128).check(incre::Version::V4, CARD), Ok(()));
    assert_eq!(paged(129).check(incre::Version::V4, TARGET), Ok(()));
    let verdict = paged(129).check(incre::Version::V4, CARD);
    named(&mut broken, "incre.card_size", 561_002, verdict);
    broken
}

#[test]
fn every_rule_of_incre_flash_attention_has_a_call_that_breaks_it() {
    use incre::Version::{V1, V2, V3, V4};
    let key = [half(&[2, 2, 76, 64]).unwrap()];
    let base = IncreCall {
        query: half(&[2, 4, 1, 64]),
        key: &key,
        value: &key,
        num_heads: 4,
        num_key_value_heads: 2,
        attention_out: half(&[2, 4, 1, 64]),
        ..IncreCall::new("BNSD")
    };
    for version in incre::Version::ALL {
        assert_eq!(base.check(version, TARGET), Ok(()), "{version}");
    }
    let mut broken = BTreeSet::new();
    let float = [of(DType::Float, &[2, 2, 76, 64]).unwrap()];
    let calls: &[(&str, i32, IncreCall<'_>)] = &[
        ("incre.required", 161_001, IncreCall { query: None, ..base }),
        ("incre.required", 161_001, IncreCall { key: &[], ..base }),
        ("incre.input_layout", 561_002, IncreCall { input_layout: Some("TND"), ..base }),
        ("incre.rows", 561_002, IncreCall { query: half(&[2, 4, 2, 64]), ..base }),
        ("incre.registered", 161_002, IncreCall { key: &float, value: &float, ..base }),
        ("incre.decode_rules", 561_002, IncreCall { num_key_value_heads: 3, ..base }),
        ("incre.decode_rules", 561_002, IncreCall { atten_mask: of(DType::Bool, &[2, 75]), ..base }),
    ];
    for (id, status, call) in calls {
        named(&mut broken, id, *status, call.check(V4, TARGET));
    }
    let bias = IncreCall { pse_shift: half(&[1, 4, 1, 76]), ..base };
    for version in [V1, V2] {
        broken.insert(bias.lint(version, &[]).unwrap_err().rule.id);
    }
    broken.insert(bias.lint(V3, &[]).unwrap_err().rule.id);
    assert_eq!(bias.lint(V4, &[]), Ok(()));
    let biased = AnyArguments::IncreFlashAttention(bias.to_arguments());
    assert_eq!(biased.chosen_on(1, TARGET), 4);
    let plain = AnyArguments::IncreFlashAttention(base.to_arguments());
    assert_eq!(plain.chosen_on(1, TARGET), 4);
    let ascend950 = Target::new(Soc::Ascend950, Cann::V9_1);
    named(&mut broken, "incre.successor", 361_001, base.check(V4, ascend950));
    let training = Target::new(Soc::AtlasTraining, Cann::V9_1);
    named(&mut broken, "incre.product", 561_003, base.check(V4, training));
    broken.extend(refused_single_rows_of_cards());
    let all: BTreeSet<_> = incre::rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn prompts_of_single_rows_may_have_another_output_order() {
    let single = PromptCall {
        query: half(&[2, 4, 1, 72]),
        attention_out: half(&[2, 1, 4, 72]),
        input_layout: Some("BNSD_BSND"),
        ..prefill()
    };
    assert_eq!(single.check(prompt::Version::V3, TARGET), Ok(()));
}

#[test]
fn what_the_paths_take_and_ignore_is_named_for_the_older_operators_too() {
    let lint = |call: PromptCall<'_>| {
        assert_eq!(call.check(prompt::Version::V3, TARGET), Ok(()));
        let found = call.lint(prompt::Version::V3, &[]);
        found.err().map(|violation| violation.rule.id)
    };
    let base = prefill();
    assert_eq!(lint(base), None);
    let lengths = PromptCall { actual_seq_lengths: Some(&[20, 7, 9]), ..base };
    assert_eq!(lint(lengths), Some("actual_seq_lengths.surplus"));
    let allowed = ["actual_seq_lengths.surplus"];
    assert_eq!(lengths.lint(prompt::Version::V3, &allowed), Ok(()));
    let lengths = PromptCall { actual_seq_lengths_kv: Some(&[27; 3]), ..base };
    assert_eq!(lint(lengths), Some("actual_seq_lengths.surplus"));
    let bias = PromptCall { pse_shift: half(&[0]), ..base };
    assert_eq!(lint(bias), Some("tensor.empty"));
    let strided = TensorDesc {
        strides: Dims::of([5760, 1440, 72, 1]),
        shape: Dims::of([2, 4, 18, 72]),
        ..half(&[2, 4, 20, 72]).unwrap()
    };
    let strided = PromptCall { query: Some(strided), attention_out: half(&[2, 4, 18, 72]), ..base };
    assert_eq!(lint(strided), None);

    let lint = |call: IncreCall<'_>| {
        assert_eq!(call.check(incre::Version::V4, TARGET), Ok(()));
        let found = call.lint(incre::Version::V4, &[]);
        found.err().map(|violation| violation.rule.id)
    };
    let cache = [half(&[6, 16, 128]).unwrap()];
    let paged = IncreCall {
        query: half(&[2, 1, 256]),
        key: &cache,
        value: &cache,
        actual_seq_lengths: Some(&[40, 7]),
        block_table: of(DType::Int32, &[2, 3]),
        block_size: 16,
        num_heads: 4,
        num_key_value_heads: 2,
        attention_out: half(&[2, 1, 256]),
        ..IncreCall::new("BSH")
    };
    assert_eq!(lint(paged), None);
    for (lengths, id) in [(&[40, 7, 9][..], "actual_seq_lengths.surplus"), (&[], "actual_seq_lengths_kv.empty")] {
        let call = IncreCall { actual_seq_lengths: Some(lengths), ..paged };
        assert_eq!(lint(call), Some(id));
    }
    let short = [half(&[5, 16, 128]).unwrap()];
    let value = IncreCall { value: &short, ..paged };
    assert_eq!(lint(value), Some("cache.value_unchecked"));
    let table = IncreCall { block_table: of(DType::Int32, &[1, 3]), ..paged };
    assert_eq!(lint(table), Some("block_table.unchecked"));
    let short = IncreCall {
        actual_seq_lengths: Some(&[40, 7]),
        query: half(&[3, 1, 256]),
        block_table: of(DType::Int32, &[3, 3]),
        attention_out: half(&[3, 1, 256]),
        ..paged
    };
    let verdict = short.check(incre::Version::V4, TARGET);
    let refused = named(&mut BTreeSet::new(), "incre.decode_rules", 561_002, verdict);
    assert!(refused.given.starts_with("actual_seq_lengths_kv.count"));
}
