//! Every rule has a call that breaks it, and it alone is named. The calls stand in files named as those of the rules.

mod entry;
mod heads;
mod lengths;
mod lists;
mod mask;
mod output;
mod packed;
mod paged;
mod pse;
mod quant;
mod release_9_2;
mod targets;

use crate::{fixes, recorded};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version, rules};
use ascend_spec::{DType, Soc, Target, TensorDesc};
use std::collections::BTreeSet;

fn desc(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> TensorDesc {
    desc(DType::Float16, shape).unwrap()
}

fn bf16(shape: &[i64]) -> TensorDesc {
    desc(DType::Bf16, shape).unwrap()
}

fn int8(shape: &[i64]) -> TensorDesc {
    desc(DType::Int8, shape).unwrap()
}

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    desc(DType::Bool, shape)
}

/// Rules that some call has broken, and those whose fixes say a change.
#[derive(Default)]
struct Broken(BTreeSet<&'static str>, Vec<&'static str>);

impl Broken {
    /// The oldest version refuses `call` by the rule called `id`.
    #[track_caller]
    fn by(&mut self, id: &'static str, call: FiaCall<'_>) {
        self.on(Version::V1, Soc::AtlasA2, id, &call);
    }

    #[track_caller]
    fn on(&mut self, version: Version, soc: Soc, id: &'static str, call: &FiaCall<'_>) {
        self.at(version, Target::snapshot(soc), id, call);
    }

    #[track_caller]
    fn at(&mut self, version: Version, target: Target, id: &'static str, call: &FiaCall<'_>) {
        let violation = match call.check(version, target) {
            Err(violation) => violation,
            other => panic!("not refused: {other:?}"),
        };
        for text in [&violation.given, &violation.allowed, &violation.fix] {
            assert!(!text.is_empty(), "{violation:?}");
        }
        assert!(violation.to_string().starts_with(violation.rule.id));
        assert_eq!(violation.rule.id, id);
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        self.0.insert(id);
        let (said, _) = fixes::follow(&fixes::fused(call), version.number(), target);
        self.1.extend(said);
    }
}

/// Calls that hold every rule.
struct Good<'a> {
    key: &'a [TensorDesc],
    prefill: FiaCall<'a>,
    decode: FiaCall<'a>,
    /// Keys and values of a list.
    elements: &'a [TensorDesc],
    list: FiaCall<'a>,
}

/// Breaks every rule.
fn broken() -> Broken {
    let key = [half(&[2, 4, 64, 32])];
    let prefill = FiaCall {
        query: Some(half(&[2, 8, 16, 32])),
        key: &key,
        value: &key,
        num_heads: 8,
        num_key_value_heads: 4,
        attention_out: Some(half(&[2, 8, 16, 32])),
        ..FiaCall::new("BNSD")
    };
    let decode =
        FiaCall { query: Some(half(&[2, 8, 1, 32])), attention_out: Some(half(&[2, 8, 1, 32])), ..prefill.clone() };
    let elements = [half(&[1, 4, 64, 32]), half(&[1, 4, 60, 32])];
    let list = FiaCall { key: &elements, value: &elements, ..prefill.clone() };
    for good in [&prefill, &decode, &list] {
        good.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
    }

    let good = Good { key: &key, prefill, decode, elements: &elements, list };
    let mut broken = Broken::default();
    for calls in [
        entry::calls,
        heads::calls,
        lengths::calls,
        lists::calls,
        mask::calls,
        output::calls,
        packed::calls,
        paged::calls,
        pse::calls,
        quant::calls,
        release_9_2::calls,
        targets::calls,
    ] {
        calls(&mut broken, &good);
    }
    broken
}

/// Rules whose fixes say a change of a call that breaks them.
pub(crate) fn broken_calls() -> Vec<&'static str> {
    broken().1
}

#[test]
fn every_rule_is_broken_by_some_call() {
    let Broken(mut seen, _) = broken();

    for recorded in recorded::sample() {
        for &(target, _) in &recorded.verdicts {
            if let Err(violation) = recorded.check(target)
                && !violation.is_unsupported()
            {
                seen.insert(violation.rule.id);
            }
        }
    }

    let all: BTreeSet<_> = rules::all().filter(|rule| rule.status != 0).map(|rule| rule.id).collect();
    assert_eq!(seen, all, "rules without a call that breaks them, or the reverse");
}

#[test]
fn a_call_that_holds_every_rule_says_what_to_compute() {
    let key = [half(&[2, 4, 64, 32])];
    let call = FiaCall {
        query: Some(half(&[2, 8, 16, 32])),
        key: &key,
        value: &key,
        num_heads: 8,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[3]),
        actual_seq_lengths_kv: Some(&[64, 10]),
        attention_out: Some(half(&[2, 16, 8, 32])),
        ..FiaCall::new("BNSD_BSND")
    };
    let problem = call.check(Version::V1, Target::snapshot(Soc::AtlasA3)).unwrap().problem;
    assert_eq!((problem.batch, problem.heads, problem.kv_heads, problem.group()), (2, 8, 4, 2));
    assert_eq!((problem.q_len(0), problem.q_len(1), problem.kv_len(1)), (3, 3, 10));
    assert_eq!((problem.out.view.head, problem.out.view.row), (32, 8 * 32));
    assert_eq!((problem.query.view.head, problem.query.view.row), (16 * 32, 32));
}
