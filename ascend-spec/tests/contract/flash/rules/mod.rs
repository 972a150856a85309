//! Every rule and lint has a call that breaks it, and it alone is named.

mod answers;
mod biases;
mod entry;
mod layouts;
mod masks;
mod rope;

use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, Version, rules};
use ascend_spec::{Cann, DType, Dims, Format, Level, Soc, Target, TensorDesc, Violation};
use std::collections::BTreeSet;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

type Call = FlashAttentionCall<'static>;

fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float16, shape)
}

fn float(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float, shape)
}

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Bool, shape)
}

/// Two sequences of 24 rows and 40 keys, four heads over two.
fn dense() -> Call {
    FlashAttentionCall {
        query: half(&[2, 4, 24, 64]),
        key: half(&[2, 2, 40, 64]),
        value: half(&[2, 2, 40, 64]),
        num_heads: 4,
        softmax_max: float(&[2, 4, 24, 8]),
        softmax_sum: float(&[2, 4, 24, 8]),
        attention_out: half(&[2, 4, 24, 64]),
        ..FlashAttentionCall::new("BNSD")
    }
}

/// The same with as many keys as rows.
fn square(rows: i64) -> Call {
    FlashAttentionCall {
        query: half(&[2, 4, rows, 64]),
        key: half(&[2, 2, rows, 64]),
        value: half(&[2, 2, rows, 64]),
        softmax_max: float(&[2, 4, rows, 8]),
        softmax_sum: float(&[2, 4, rows, 8]),
        attention_out: half(&[2, 4, rows, 64]),
        ..dense()
    }
}

/// The same with heads and head dimension in one axis.
fn hidden() -> Call {
    FlashAttentionCall {
        query: half(&[2, 24, 256]),
        key: half(&[2, 40, 128]),
        value: half(&[2, 40, 128]),
        attention_out: half(&[2, 24, 256]),
        input_layout: Some("BSH"),
        ..dense()
    }
}

/// Two packed sequences, of 10 rows and 12 keys and of 20 rows and 33 keys.
fn packed() -> Call {
    FlashAttentionCall {
        query: half(&[30, 4, 64]),
        key: half(&[45, 2, 64]),
        value: half(&[45, 2, 64]),
        actual_seq_lengths: Some(&[10, 30]),
        actual_seq_lengths_kv: Some(&[12, 45]),
        softmax_max: float(&[30, 4, 8]),
        softmax_sum: float(&[30, 4, 8]),
        attention_out: half(&[30, 4, 64]),
        input_layout: Some("TND"),
        ..dense()
    }
}

fn masked(sparse_mode: i64, call: Call) -> Call {
    FlashAttentionCall { sparse_mode, atten_mask: mask(&[if sparse_mode == 6 { 3072 } else { 2048 }, 2048]), ..call }
}

fn roped() -> Call {
    let bf16 = |shape: &[i64]| of(DType::Bf16, shape);
    FlashAttentionCall {
        query: bf16(&[30, 4, 64]),
        key: bf16(&[45, 2, 64]),
        value: bf16(&[45, 2, 64]),
        query_rope: bf16(&[30, 4, 32]),
        key_rope: bf16(&[45, 2, 32]),
        attention_out: bf16(&[30, 4, 64]),
        ..masked(3, packed())
    }
}

/// Rules and lints that some call has broken.
#[derive(Default)]
struct Broken(BTreeSet<&'static str>);

impl Broken {
    fn named(&mut self, id: &'static str, violation: &Violation, target: Target) {
        for text in [&violation.given, &violation.allowed, &violation.fix] {
            assert!(!text.is_empty(), "{violation:?}");
        }
        assert_eq!(violation.rule.id, id, "{violation}");
        assert!(violation.rule.scope.holds(target), "{id} for {target}");
        self.0.insert(id);
    }

    #[track_caller]
    fn at(&mut self, version: Version, target: Target, id: &'static str, status: i32, call: &Call) {
        match call.check(version, target) {
            Err(violation) => {
                self.named(id, &violation, target);
                assert_eq!(violation.rule.status, status, "{id}");
            }
            other => panic!("{id}: not refused: {other:?}"),
        }
    }

    /// The oldest version refuses `call`.
    #[track_caller]
    fn by(&mut self, id: &'static str, status: i32, call: Call) {
        self.at(Version::chosen_on(&call, TARGET), TARGET, id, status, &call);
    }

    /// The oldest version takes `call`, and the lint finds it.
    #[track_caller]
    fn lint(&mut self, id: &'static str, call: Call) {
        let version = Version::chosen_on(&call, TARGET);
        let problem = call.check(version, TARGET).unwrap();
        match problem.lint(&[]) {
            Err(violation) => {
                self.named(id, &violation, TARGET);
                assert_eq!(violation.rule.level, Level::Lint, "{id}");
                assert_eq!(problem.lint(&[id]), Ok(()), "{id}");
            }
            Ok(()) => panic!("{id}: not found"),
        }
    }
}

#[test]
fn every_rule_and_lint_is_broken_by_some_call() {
    for call in [dense(), square(24), hidden(), packed(), roped(), masked(2, dense())] {
        let version = Version::chosen_on(&call, TARGET);
        let problem = call.check(version, TARGET).unwrap();
        assert_eq!(problem.lint(&[]), Ok(()));
    }
    let mut broken = Broken::default();
    for calls in [
        entry::entry,
        layouts::layouts,
        layouts::heads,
        layouts::lengths,
        masks::masks,
        masks::tokens,
        masks::prefixes,
        biases::biases,
        biases::numbers,
        biases::start_indices,
        biases::dropout,
        biases::sinks,
        rope::ropes,
        layouts::outputs,
    ] {
        calls(&mut broken);
    }
    let all: BTreeSet<_> = rules::all().map(|rule| rule.id).collect();
    assert_eq!(broken.0, all, "rules without a call that breaks them, or the reverse");
}
