//! Whatever is passed in, nothing panics: a call is refused with a name, or runs.

use crate::harness;

use ascend_attention::attention::{Arguments, Parameter};
use ascend_attention::spec::Level;
use ascend_attention::spec::ops::fused_infer_attention_score::{FiaCall, rules};
use ascend_attention::{DType, Error, Stream};
use proptest::prelude::*;
use proptest::test_runner::Config;

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => 0i64..6,
        2 => -3i64..70,
        1 => prop::sample::select(vec![i64::MIN, i64::MAX, i64::from(i32::MAX), -1, 214_748_647, 1 << 40]),
        1 => any::<i64>(),
    ]
}

fn layout() -> impl Strategy<Value = String> {
    let known =
        ["BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD_TND", "BSH_NBSD", "bsh", "", "SH", "BNSD\0", "\u{fffd}"];
    prop_oneof![9 => prop::sample::select(known.map(str::to_owned).to_vec()), 1 => ".{0,12}"]
}

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop::sample::select(vec![0usize, 1, 1, 2, 2, 3, 4, 16, 32]), 0..6)
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![4 => Just(DType::Float16), 1 => prop::sample::select(DType::ALL.to_vec())]
}

/// Mostly tensors of one shape, so that many calls get far.
fn tensor() -> impl Strategy<Value = (DType, Vec<usize>)> {
    prop_oneof![
        3 => dtype().prop_map(|dtype| (dtype, vec![1, 2, 2, 16])),
        2 => dtype().prop_map(|dtype| (dtype, vec![2, 2, 16])),
        2 => (dtype(), shape()),
    ]
}

fn lengths() -> impl Strategy<Value = Option<Vec<i64>>> {
    prop::option::weighted(0.3, prop::collection::vec(number(), 0..4))
}

fn upload(stream: &Stream, (dtype, shape): &(DType, Vec<usize>)) -> Option<ascend_attention::AnyTensor> {
    let elements: usize = shape.iter().product();
    let bytes = dtype.bytes_for(elements as u64)?;
    Some(stream.upload_bytes(*dtype, &vec![0x31; bytes as usize], shape).unwrap())
}

/// A tensor of any parameter.
fn other() -> impl Strategy<Value = (Parameter, (DType, Vec<usize>))> {
    (prop::sample::select(Parameter::tensors().collect::<Vec<_>>()), tensor())
}

proptest! {
    #![proptest_config(Config { cases: 1500, failure_persistence: None, ..Config::default() })]

    #[test]
    fn garbage_never_panics(
        layout in layout(),
        numbers in prop::collection::vec(number(), 13),
        scale in prop_oneof![Just(0.25), any::<f64>()],
        lse in any::<bool>(),
        arrays in (lengths(), lengths(), lengths(), lengths(), lengths()),
        query in tensor(),
        keys in prop::collection::vec(tensor(), 0..3),
        same in any::<bool>(),
        mask in prop::option::of(tensor()),
        others in prop::collection::vec(other(), 0..2),
        some_others in prop::bool::weighted(0.3),
    ) {
        let stream = harness::stream();
        let mut call = FiaCall::new(&layout);
        // The first are small and mostly right; some are as wild as they come.
        [
            call.num_heads, call.num_key_value_heads, call.sparse_mode, call.pre_tokens, call.next_tokens,
            call.inner_precise, call.block_size, call.antiquant_mode, call.key_antiquant_mode,
            call.value_antiquant_mode, call.query_quant_mode, call.pse_type, _,
        ] = numbers.clone().try_into().unwrap();
        if numbers[12] < 4 {
            (call.num_heads, call.num_key_value_heads, call.inner_precise) = (2, 2, 0);
            (call.antiquant_mode, call.query_quant_mode, call.pse_type) = (0, 0, 0);
        }
        (call.scale, call.softmax_lse_flag) = (scale, lse);
        call.actual_seq_lengths = arrays.0.as_deref();
        call.actual_seq_lengths_kv = arrays.1.as_deref();
        if some_others {
            call.actual_shared_prefix_len = arrays.2.as_deref();
            call.q_start_idx = arrays.3.as_deref();
            call.kv_start_idx = arrays.4.as_deref();
        }
        let mut arguments = Arguments::new(call.attributes());
        if let Some(query) = upload(&stream, &query) {
            arguments.set(Parameter::Query, query);
        }
        for key in keys.iter().filter_map(|key| upload(&stream, if same { &query } else { key })) {
            arguments.set(Parameter::Key, key.clone());
            arguments.set(Parameter::Value, key);
        }
        if let Some(mask) = mask.and_then(|mask| upload(&stream, &mask)) {
            arguments.set(Parameter::AttenMask, mask);
        }
        for (parameter, tensor) in others.iter().filter(|_| some_others) {
            if let Some(tensor) = upload(&stream, tensor) {
                arguments.set(*parameter, tensor);
            }
        }
        let harmless = rules::lints::all().filter(|lint| lint.level == Level::Lint && !lint.overruns);
        for lint in harmless.filter(|_| same) {
            arguments.allow_lint(lint.id);
        }
        match arguments.plan(stream.device()) {
            Ok(plan) => {
                if arguments.get(Parameter::AttentionOut).is_none() {
                    arguments.set_outputs(&plan).unwrap();
                    match arguments.launch(&plan, &stream) {
                        Ok(()) => {}
                        // Tables and paddings are any numbers.
                        Err(Error::Violation(violation)) => {
                            let content = ["block_table.range", "block_table.row_short", "padding_size.range"];
                            prop_assert!(content.contains(&violation.rule.id), "{violation}");
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                    stream.synchronize().unwrap();
                }
            }
            Err(error) => {
                let named = matches!(
                    error,
                    Error::Violation(_)
                );
                prop_assert!(named, "the operator itself had to refuse: {error}");
            }
        }
    }
}
