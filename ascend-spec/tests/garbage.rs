//! No call, however absurd, makes the contract panic; what it accepts stays within its own bounds.

#![allow(clippy::expect_used, reason = "helpers of tests end them by a panic")]

use ascend_spec::attention_problem::{Padding, Work};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Format, Soc, Target, TensorDesc};
use proptest::prelude::*;

const TARGETS: [Target; 5] = [
    Target::snapshot(Soc::AtlasA2),
    Target::new(Soc::AtlasA2, Cann::V8_5),
    Target::new(Soc::AtlasA3, Cann::V9_0),
    Target::new(Soc::AtlasA2, Cann::V9_1),
    Target::new(Soc::Ascend950, Cann::V9_1),
];

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => -2i64..70,
        1 => proptest::sample::select(vec![
            128i64, 256, 2048, 4096, 65_536, 214_748_647, 2_147_483_647, -2_147_483_648, i64::MAX, i64::MIN,
        ]),
        1 => any::<i64>(),
    ]
}

fn small() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => proptest::sample::select(vec![1i64, 2, 4, 16, 32, 64]),
        1 => number(),
    ]
}

fn desc() -> impl Strategy<Value = TensorDesc> {
    let dtype = proptest::sample::select(vec![
        DType::Float16,
        DType::Float16,
        DType::Float16,
        DType::Bf16,
        DType::Int8,
        DType::Int32,
        DType::Float,
        DType::Bool,
        DType::Int4,
        DType::Float8E4M3Fn,
        DType::Float8E8M0,
        DType::String,
    ]);
    let format = proptest::sample::select(vec![Format::Nd, Format::Nd, Format::Nd, Format::FractalNz]);
    let odd_strides = proptest::option::weighted(0.2, proptest::collection::vec(number(), 0..=8));
    (dtype, format, proptest::collection::vec(small(), 0..=8), odd_strides, prop_oneof![5 => Just(0), 1 => number()])
        .prop_map(|(dtype, format, shape, strides, offset)| {
            let shape = Dims::new(&shape).expect("at most 8 axes");
            let strides = strides.and_then(|s| Dims::new(&s)).unwrap_or(shape.contiguous_strides());
            TensorDesc { dtype, format, shape, strides, offset }
        })
}

/// Tensors that could belong together, so that calls get past the first rules.
fn family() -> impl Strategy<Value = (String, [TensorDesc; 4], i64)> {
    let layout = proptest::sample::select(vec!["BNSD", "BSND", "BSH", "BNSD_BSND", "TND", "SH", ""]);
    let size = || proptest::sample::select(vec![0i64, 1, 2, 3, 5]);
    (layout, size(), size(), size(), size(), proptest::sample::select(vec![16i64, 32, 17])).prop_map(
        |(layout, b, n, s, t, d)| {
            let shape = |rows: i64, out: bool| match layout {
                "BSH" => Dims::of([b, rows, n * d]),
                "BSND" => Dims::of([b, rows, n, d]),
                "BNSD_BSND" if out => Dims::of([b, rows, n, d]),
                _ => Dims::of([b, n, rows, d]),
            };
            let half = |shape| TensorDesc::packed(DType::Float16, shape);
            let mask = TensorDesc::packed(DType::Bool, Dims::of([b, 1, s, t]));
            (layout.to_owned(), [half(shape(s, false)), half(shape(t, false)), half(shape(s, true)), mask], n)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_call_is_answered(
        (layout, tensors, heads) in family(),
        odd in proptest::collection::vec(proptest::option::weighted(0.1, desc()), 6),
        keys in 0usize..4,
        lengths in proptest::option::weighted(0.4, proptest::collection::vec(number(), 0..6)),
        kv_lengths in proptest::option::weighted(0.4, proptest::collection::vec(number(), 0..6)),
        attrs in proptest::collection::vec(proptest::option::weighted(0.3, number()), 6),
        mode in prop_oneof![4 => 0i64..5, 1 => number()],
        (masked, lse) in any::<(bool, bool)>(),
        scale in any::<f64>(),
        padding in (number(), number()),
        extras in proptest::collection::vec(proptest::option::weighted(0.06, desc()), 23),
        modes in proptest::collection::vec(proptest::option::weighted(0.1, number()), 5),
        prefix in proptest::option::weighted(0.1, proptest::collection::vec(number(), 0..3)),
    ) {
        let or = |index: usize, usual: TensorDesc| odd[index].unwrap_or(usual);
        let key = vec![or(1, tensors[1]); keys];
        let value = vec![or(2, tensors[1]); keys];
        let call = FiaCall {
            query: Some(or(0, tensors[0])),
            key: &key,
            value: &value,
            atten_mask: masked.then(|| or(3, tensors[3])),
            attention_out: Some(or(4, tensors[2])),
            softmax_lse: odd[5],
            softmax_lse_flag: lse,
            actual_seq_lengths: lengths.as_deref(),
            actual_seq_lengths_kv: kv_lengths.as_deref(),
            num_heads: attrs[0].unwrap_or(heads),
            num_key_value_heads: attrs[1].unwrap_or(0),
            pre_tokens: attrs[2].unwrap_or(FiaCall::ALL_TOKENS),
            next_tokens: attrs[3].unwrap_or(FiaCall::ALL_TOKENS),
            inner_precise: attrs[4].unwrap_or(0),
            antiquant_mode: attrs[5].unwrap_or(0),
            sparse_mode: mode,
            scale,
            pse_shift: extras[0],
            deq_scale1: extras[1],
            quant_scale1: extras[2],
            deq_scale2: extras[3],
            quant_scale2: extras[4],
            quant_offset2: extras[5],
            antiquant_scale: extras[6],
            antiquant_offset: extras[7],
            block_table: extras[8],
            query_padding_size: extras[9],
            kv_padding_size: extras[10],
            key_antiquant_scale: extras[11],
            key_antiquant_offset: extras[12],
            value_antiquant_scale: extras[13],
            value_antiquant_offset: extras[14],
            key_shared_prefix: extras[15],
            value_shared_prefix: extras[16],
            query_rope: extras[17],
            key_rope: extras[18],
            key_rope_antiquant_scale: extras[19],
            dequant_scale_query: extras[20],
            learnable_sink: extras[21],
            actual_shared_prefix_len: prefix.as_deref(),
            block_size: modes[0].unwrap_or(128),
            key_antiquant_mode: modes[1].unwrap_or(0),
            value_antiquant_mode: modes[2].unwrap_or(0),
            query_quant_mode: modes[3].unwrap_or(0),
            pse_type: modes[4].unwrap_or(0),
            ..FiaCall::new(&layout)
        };
        let _ = Version::oldest_for(&call);
        let versions = [Version::V1, Version::V5];
        let each = TARGETS.into_iter().flat_map(|target| versions.map(|version| (version, target)));
        for (version, target) in each {
            let checked = match call.check(version, target) {
                Ok(checked) => checked,
                Err(refusal) => {
                    prop_assert_ne!(refusal.status(), 0);
                    prop_assert!(!refusal.to_string().is_empty());
                    continue;
                }
            };
            let mut grouped = true;
            checked.each_lint(&mut |lint| grouped &= lint.rule.id != "split_fuse.heads_divide");
            checked.problem.touches(&mut |_, _| ());
            let problem = checked.problem;
            if problem.work == Work::Attend {
                prop_assert_eq!(problem.kv_heads * problem.group() == problem.heads, grouped);
                for b in 0..problem.batch.min(8) {
                    prop_assert!(problem.q_len(b) <= problem.query_rows);
                    prop_assert!(problem.kv_len(b) <= problem.key_rows);
                    let _ = problem.key_value(b);
                    let at = problem.sequence(b, Padding { query: padding.0, key: padding.1 });
                    prop_assert!(at.q_first + at.q_len <= problem.query_rows);
                    let keys = problem.kv_len(b) + problem.prefix.map_or(0, |prefix| prefix.len);
                    prop_assert!(problem.geometry(b).span(0..u64::MAX).end <= keys as u64);
                }
            }
        }
    }
}
