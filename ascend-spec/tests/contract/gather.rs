//! The contract of GatherPaKvCache: a call for every rule.

use crate::described::{half, numbers, of};
use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::gather_pa_kv_cache::{GatherCall, GatherProblem, Source, rules};
use ascend_spec::{Cann, DType, Dims, Format, Soc, Target, TensorDesc};
use std::collections::BTreeSet;

type Call = GatherCall<'static>;

const TARGET: Target = Target::new(Soc::AtlasA2, Cann::V9_1);

/// Two sequences of together 9 tokens, two heads of 16, in blocks of 4.
fn norm() -> Call {
    Call {
        key_cache: half(&[6, 4, 2, 16]),
        value_cache: half(&[6, 4, 2, 16]),
        block_tables: numbers(&[2, 3]),
        seq_lens: numbers(&[2]),
        key: half(&[9, 2, 16]),
        value: half(&[9, 2, 16]),
        ..Call::default()
    }
}

/// The same from caches in the NZ order.
fn nz() -> Call {
    Call {
        key_cache: half(&[6, 2, 4, 16]),
        value_cache: half(&[6, 2, 4, 16]),
        key: half(&[9, 32]),
        value: half(&[9, 32]),
        cache_mode: Some("PA_NZ"),
        ..norm()
    }
}

fn accepted(call: &Call) -> GatherProblem {
    call.check(TARGET).unwrap()
}

#[test]
fn every_gather_rule_refuses_a_call() {
    let in_format = |desc: Option<TensorDesc>, format| desc.map(|desc| TensorDesc { format, ..desc });
    let strided = half(&[9, 2, 16]).map(|desc| TensorDesc { strides: Dims::of([64, 16, 1]), ..desc });
    let base = norm();
    #[rustfmt::skip]
    let calls = [
        ("gather.required", 161_001, Call { key_cache: None, ..base }),
        ("gather.required", 161_001, Call { value: None, ..base }),
        ("gather.dtype", 161_002, Call { key_cache: of(DType::Float, &[6, 4, 2, 16]), ..base }),
        ("gather.same_dtype", 161_002, Call { value: of(DType::Bf16, &[9, 2, 16]), ..base }),
        ("gather.index_dtype", 161_002, Call { seq_lens: of(DType::Int64, &[2]), ..base }),
        ("gather.rank", 161_002, Call { block_tables: numbers(&[6]), ..base }),
        ("gather.rank", 161_002, Call { key: half(&[288]), ..base }),
        ("gather.format", 161_002, Call { key_cache: in_format(base.key_cache, Format::FractalNz), ..base }),
        ("gather.format", 161_002, Call { key: in_format(nz().key, Format::FractalNz), ..nz() }),
        ("gather.contiguous", 161_002, Call { key: strided, ..base }),
        ("gather.cache_mode", 561_002, Call { cache_mode: Some("NZ"), ..base }),
        ("gather.seq_lens", 561_002, Call { seq_lens: numbers(&[3]), ..base }),
        ("gather.seq_lens", 561_002, Call { is_seq_lens_cumsum: true, ..base }),
        ("gather.seq_offset", 561_002, Call { seq_offset: numbers(&[1]), ..base }),
        ("gather.tokens", 561_002, Call { value: half(&[8, 2, 16]), ..base }),
        ("gather.cache_shape", 561_002, Call { key: half(&[9, 2, 32]), ..base }),
        ("gather.cache_shape", 561_002, Call { value_cache: half(&[5, 4, 2, 16]), ..base }),
        ("gather.cache_shape", 561_002, Call { key_cache: half(&[6, 4, 4, 8]), ..nz() }),
    ];
    let mut broken = BTreeSet::new();
    for (id, status, call) in calls {
        match call.check(TARGET) {
            Err(violation) => {
                assert_eq!(violation.rule.id, id, "{violation}");
                assert_eq!(violation.rule.status, status, "{violation}");
                assert!(!violation.given.is_empty() && !violation.allowed.is_empty());
            }
            other => panic!("{id}: {other:?}"),
        }
        broken.insert(id);
    }
    let without = [Soc::AtlasInference, Soc::AtlasTraining, Soc::Atlas200I500A2].map(|soc| (soc, Cann::V9_1));
    for (soc, cann) in without.into_iter().chain([(Soc::AtlasA2, Cann::V8_1)]) {
        let refusal = base.check(Target::new(soc, cann)).unwrap_err();
        assert_eq!(refusal.status(), 561_003);
        assert!(refusal.to_string().contains("gather.product"), "{refusal}");
        broken.insert("gather.product");
    }
    let old = Target::new(Soc::AtlasA2, Cann::V8_1);
    let newer = AnyArguments::GatherPaKvCache(base.to_arguments()).taken_by(1, old);
    assert_eq!(newer, Some(Target::new(Soc::AtlasA2, Cann::V8_5)));

    let cut = Call { key_cache: half(&[6, 4, 2, 4]), key: half(&[9, 2, 4]), ..base };
    let long = Call { key_cache: half(&[6, 4, 128, 600]), key: half(&[9, 128, 600]), ..base };
    for (id, call) in [("gather.unit", cut), ("gather.token_bytes", long)] {
        accepted(&call);
        let violation = call.lint(TARGET, &[]).unwrap_err();
        assert_eq!(violation.rule.id, id);
        assert_eq!(call.lint(TARGET, &[id]), Ok(()));
        broken.insert(id);
    }
    assert_eq!(base.lint(TARGET, &[]), Ok(()));

    // What the numbers name is not known before the launch.
    assert!(rules::BLOCK.overruns);
    broken.insert(rules::BLOCK.id);
    let all: BTreeSet<_> = rules::RULES.iter().map(|rule| rule.id).collect();
    assert_eq!(broken, all);
}

#[test]
fn numbers_that_lead_out_of_the_caches_name_no_row() {
    let problem = accepted(&norm());
    let strays = |table: &[i64], lengths: &[i64]| {
        let mut strays = Vec::new();
        problem.sources(table, lengths, &[], &mut |source| {
            if !matches!(source, Source::Row { .. }) {
                strays.push(source);
            }
        });
        strays
    };
    assert_eq!(strays(&[0, 1, 2, 5, 4, 3], &[4, 5]), []);
    let outside = Source::NoBlock { sequence: 1, block: 6 };
    assert_eq!(strays(&[0, 1, 2, 6, 4, 3], &[4, 5]), [outside]);
    let long = Source::NoColumn { sequence: 0, column: 3 };
    // The first sequence takes all tokens that its row of the table can name, and so all rows.
    let beyond = Source::NoToken { sequence: 0, token: 9 };
    assert_eq!(strays(&[0, 1, 2, 5, 4, 3], &[12, 0]), [beyond]);
    let wide = GatherProblem { tokens: 40, ..problem };
    let mut found = Vec::new();
    wide.sources(&[0, 1, 2, 5, 4, 3], &[13, 0], &[], &mut |source| found.push(source));
    assert_eq!(found.len(), 13);
    assert_eq!(found.last(), Some(&long));
    let negative = Source::BadNumber { sequence: 0, given: -1 };
    assert_eq!(strays(&[0, 1, 2, 5, 4, 3], &[-1, 5]), [negative]);
}

#[test]
fn offsets_count_columns_of_the_nz_order_and_tokens_of_the_other() {
    let first_block = |call: &Call, soc: Soc, offset: i64| {
        let problem = call.check(Target::new(soc, Cann::V9_1)).unwrap();
        let mut first = None;
        problem.sources(&[3, 4, 5], &[1], &[offset], &mut |source| {
            first.get_or_insert(source);
        });
        match first {
            Some(Source::Row { block, .. }) => Some(block),
            _ => None,
        }
    };
    assert_eq!(first_block(&norm(), Soc::AtlasA2, 4), Some(4));
    assert_eq!(first_block(&nz(), Soc::AtlasA2, 1), Some(4));
    assert_eq!(first_block(&nz(), Soc::AtlasA2, 4), None);
    assert_eq!(first_block(&nz(), Soc::Ascend950, 4), Some(4));
}
