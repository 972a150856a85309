//! PromptFlashAttention and IncreFlashAttention: what is refused before anything is launched, and what comes out.

use approx::abs_diff_eq;
use ascend_attention::attention::{BlockTable, Inputs, Quantisation};
use ascend_attention::incre::IncreFlashAttention;
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::rules;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{CausalOrigin, Error, Layout, Machine, Runtime, Stream, Tensor, f16};

use crate::harness::{self, Sample, filled};

fn violation<T>(result: Result<T, Error>) -> Box<ascend_attention::spec::Violation> {
    match result {
        Err(Error::Violation(violation)) => Box::new(violation),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}

fn ones(stream: &Stream, shape: &[usize]) -> Tensor<f16> {
    filled(stream, f16::ONE, shape)
}

#[test]
fn prompts_that_break_a_rule_are_refused_by_name() {
    let stream = harness::stream();
    let [query, key] = [5, 7].map(|rows| ones(&stream, &[1, 2, rows, 16]));
    let call = PromptFlashAttention::new(Layout::Bnsd).heads(2).scale(0.25);
    let plan = |call: &PromptFlashAttention| call.plan((&query, &key, &key));

    let unset = plan(&PromptFlashAttention::new(Layout::Bnsd).heads(2)).unwrap_err();
    assert!(unset.to_string().contains("1.0 / 16f64.sqrt()"), "{unset}");
    // The rule of the prefill path is named behind the operator's own.
    let heads = violation(plan(&call.clone().heads(3)));
    assert_eq!(heads.rule.id, "prompt.prefill_rules", "{heads}");
    let surplus = violation(plan(&call.clone().actual_seq_lengths([5, 3])));
    assert_eq!(surplus.rule.id, "actual_seq_lengths.surplus", "{surplus}");
    let allowed = call.clone().allow_lint("actual_seq_lengths.surplus");
    plan(&allowed.actual_seq_lengths([5, 3])).unwrap();
    let packed = PromptFlashAttention::new(Layout::Tnd).heads(2).scale(0.25);
    assert_eq!(violation(plan(&packed)).rule.id, "prompt.input_layout");
    let floats = stream.upload(&[1f32; 70], [1, 1, 5, 14]).unwrap();
    let floats = PromptFlashAttention::new(Layout::Bnsd).scale(0.25).plan((&floats, &floats, &floats));
    assert_eq!(violation(floats).rule.id, "prompt.dtype");

    let table = BlockTable::from_rows(&stream, &[vec![0]], 16).unwrap();
    let paged = call.plan(Inputs::new(&query, &key, &key).paged(&table));
    let paged = paged.unwrap_err().to_string();
    assert!(paged.contains("FusedInferAttention has"), "{paged}");
    let keys: [&ascend_attention::AnyTensor; 2] = [&key, &key];
    let lists = call.plan(Inputs::lists(&query, &keys, &keys));
    assert!(matches!(
        &lists,
        Err(Error::Violation(violation))
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("key: ")
    ));
}

#[test]
fn prompts_without_keys_that_say_more_heads_than_they_have_are_refused() {
    if harness::not_on_npu("what the operator fills there is not known") {
        return;
    }
    let stream = harness::stream();
    let query = ones(&stream, &[1, 2, 5, 64]);
    let key = Tensor::<f16>::empty(stream.device(), [1, 2, 0, 64]).unwrap();
    for heads in [3, 4, 50] {
        let call = PromptFlashAttention::new(Layout::Bnsd).heads(heads);
        let refused = call.scale(1.0).plan((&query, &key, &key));
        let refused = refused.map(drop).unwrap_err().to_string();
        assert!(refused.starts_with("attention_out.shape"), "{refused}");
    }
}

#[test]
fn single_rows_that_break_a_rule_are_refused_by_name() {
    let stream = harness::stream();
    let query = ones(&stream, &[2, 1, 128]);
    let cache = ones(&stream, &[6, 16, 128]);
    let call = IncreFlashAttention::new(Layout::Bsh).scale(0.125);
    let several = ones(&stream, &[2, 3, 128]);
    let rows = call.plan((&several, &several, &several));
    assert_eq!(violation(rows).rule.id, "incre.rows");
    let packed = IncreFlashAttention::new(Layout::Tnd).scale(0.125);
    let packed = packed.plan((&query, &query, &query));
    assert_eq!(violation(packed).rule.id, "incre.input_layout");

    // A table is held to the cache and the lengths, in plans and in launches.
    let with = |rows: &[Vec<usize>]| BlockTable::from_rows(&stream, rows, 16).unwrap();
    let (short, beyond) = (with(&[vec![4], vec![3]]), with(&[vec![4, 6], vec![3]]));
    let call = call.actual_seq_lengths_kv([20, 7]);
    for (table, rule) in [(&short, "incre.decode_rules"), (&beyond, "block_table.range")] {
        let inputs = Inputs::new(&query, &cache, &cache).paged(table);
        assert_eq!(violation(call.plan(inputs)).rule.id, rule);
    }
    // Lengths before the blocks that they would need.
    let inputs = Inputs::new(&query, &cache, &cache).paged(&beyond);
    for (lengths, rule) in [(&[][..], "actual_seq_lengths_kv.empty"), (&[20, 7, 7], "actual_seq_lengths.surplus")] {
        let call = call.clone().actual_seq_lengths_kv(lengths);
        assert_eq!(violation(call.plan(inputs)).rule.id, rule);
    }
    let scale = stream.upload(&[1f32], [1]).unwrap();
    let latent = Quantisation::Latent { dequant_scale_query: &scale, key_scale: &scale, value_scale: &scale };
    let latent = call.plan(Inputs::new(&query, &cache, &cache).quantisation(latent));
    let latent = latent.unwrap_err().to_string();
    assert!(latent.contains("IncreFlashAttention has no such"), "{latent}");
}

#[test]
fn ascend_950_is_told_the_successor() {
    if harness::not_on_npu("the product is chosen") {
        return;
    }
    let runtime = Runtime::emulated_as(&Machine::new(Soc::Ascend950, Cann::V9_1)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let (query, row) = (ones(&stream, &[1, 4, 128]), ones(&stream, &[1, 1, 128]));
    let prompt = PromptFlashAttention::new(Layout::Bsh).scale(1.0);
    let mask = stream.device().masks().causal(CausalOrigin::LeftUp);
    let prompt = violation(prompt.mask(mask.unwrap()).plan((&query, &query, &query)));
    let incre = violation(IncreFlashAttention::new(Layout::Bsh).scale(1.0).plan((&row, &query, &query)));
    for refused in [prompt, incre] {
        assert!(refused.rule.id.ends_with(".successor"), "{refused}");
        assert!(refused.to_string().contains("FusedInferAttentionScoreV5"));
    }
}

#[test]
fn prompts_are_computed_on_every_product_that_has_them() {
    let sample = Sample::new(11);
    let attend = |stream: &Stream| {
        let [query, key, value] = sample.upload(stream);
        let masks = stream.device().masks();
        let plan = PromptFlashAttention::new(Layout::Bnsd)
            .heads(2)
            .scale(Sample::SCALE)
            .mask(masks.causal(CausalOrigin::RightDown).unwrap())
            .plan((&query, &key, &value))
            .unwrap();
        assert_eq!(plan.operator(), "aclnnPromptFlashAttentionV3");
        let mut output = plan.output::<f16>().unwrap();
        let poison = vec![f16::NAN; output.len()];
        output.overwrite(stream, &poison).unwrap();
        let inputs = Inputs::new(&query, &key, &value);
        plan.launch_into(stream, inputs, &mut output).unwrap();
        sample.check(&output.download(stream).unwrap());
        let short = query.narrow(2, 0..5).unwrap();
        let other = plan.launch(stream, (&short, &key, &value)).unwrap_err();
        assert!(other.breaks(&rules::PLAN_TENSORS), "{other}");
    };
    attend(&harness::stream());
    if !harness::not_on_npu("the inference card is emulated") {
        let card = Machine::new(Soc::AtlasInference, Cann::V9_1);
        let card = Runtime::emulated_as(&card).unwrap();
        attend(&card.device(0).unwrap().stream().unwrap());
    }
}

#[test]
fn single_rows_are_computed_over_dense_and_paged_keys() {
    const ROWS: usize = 96;
    const BLOCK: usize = 16;
    let sample = Sample::new(12);
    // The last row of each head sees every key.
    let last = |all: &[f16], head: usize| all[(head * ROWS + ROWS - 1) * 64..][..64].to_vec();
    let row = [last(&sample.query, 0), last(&sample.query, 1)].concat();
    let want: Vec<f64> = (0..2).flat_map(|head| sample.want[(head * ROWS + ROWS - 1) * 64..][..64].to_vec()).collect();
    let check = |got: Vec<f16>| {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1.5e-3), "{got}, not {want}");
        }
    };
    // Blocks in another order, token by token with both heads.
    let order = [3, 0, 5, 1, 4, 2];
    let paged = |all: &[f16]| {
        let mut cache = vec![f16::NAN; 2 * ROWS * 64];
        for token in 0..ROWS {
            let at = order[token / BLOCK] * BLOCK + token % BLOCK;
            for head in 0..2 {
                let from = (head * ROWS + token) * 64;
                cache[at * 128 + head * 64..][..64].copy_from_slice(&all[from..][..64]);
            }
        }
        cache
    };
    let attend = |stream: &Stream| {
        let [_, key, value] = sample.upload(stream);
        let query = stream.upload(&row, [1, 2, 1, 64]).unwrap();
        let call = |layout| IncreFlashAttention::new(layout).heads(2).scale(Sample::SCALE);
        let plan = call(Layout::Bnsd).plan((&query, &key, &value)).unwrap();
        assert_eq!(plan.operator(), "aclnnIncreFlashAttentionV4");
        let dense = plan.launch(stream, (&query, &key, &value)).unwrap();
        check(dense.download(stream).unwrap());

        let shape = [order.len(), BLOCK, 128];
        let key = stream.upload(&paged(&sample.key), shape).unwrap();
        let value = stream.upload(&paged(&sample.value), shape).unwrap();
        let query = query.reshape([1, 1, 128]).unwrap();
        let table = BlockTable::from_rows(stream, &[order.to_vec()], BLOCK).unwrap();
        let inputs = Inputs::new(&query, &key, &value).paged(&table);
        let call = call(Layout::Bsh).actual_seq_lengths_kv([ROWS]);
        let plan = call.plan(inputs).unwrap();
        let output = plan.launch(stream, inputs).unwrap();
        check(output.download(stream).unwrap());
        // Another table of the shape names another block, and not one that there is none of.
        table.overwrite(stream, &[vec![0, 1, 2, 3, 4, 5]]).unwrap();
        plan.launch(stream, inputs).unwrap();
        let beyond = table.overwrite(stream, &[vec![0, 1, 2, 3, 4, 6]]);
        assert_eq!(violation(beyond).rule.id, "block_table.range");
    };
    attend(&harness::stream());
    if !harness::not_on_npu("the inference card is emulated") {
        let card = Machine::new(Soc::AtlasInference, Cann::V9_1);
        let card = Runtime::emulated_as(&card).unwrap();
        attend(&card.device(0).unwrap().stream().unwrap());
    }
}
