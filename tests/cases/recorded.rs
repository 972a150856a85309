//! Calls of every operator, recorded while a program runs: their files compute the same.

use crate::harness;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::case::{Case, Expect, MaskSource, Recorded, Tolerance, Verdict, record_calls};
use ascend_attention::flash::{Dropout, FlashAttention, FlashInputs, FlashMask, InputLayout};
use ascend_attention::gather::{GatherPaKvCache, SequenceBlocks};
use ascend_attention::incre::IncreFlashAttention;
use ascend_attention::matmul::BatchMatMul;
use ascend_attention::merge::{MergeState, Part};
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::ring::RingUpdate;
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::{CausalOrigin, Error, FusedInferAttention, Graph, Layout, Stream, Tensor, f16};
use harness::halves;

/// Outputs that come out again bit for bit.
const EQUAL: Tolerance = Tolerance { atol: 0.0, rtol: 0.0 };

fn tensor(stream: &Stream, seed: u64, shape: &[usize]) -> Tensor<f16> {
    let elements = halves(seed, shape.iter().product());
    stream.upload(&elements, shape).unwrap()
}

/// The case of a recorded call, out of the bytes of its file.
fn read_back(call: &Recorded) -> Case {
    let case = call.case().unwrap_or_else(|| panic!("{call:?}"));
    Case::from_bytes(&case.to_bytes().unwrap()).unwrap()
}

fn passes(stream: &Stream, call: &Recorded, operator: DeclaredOperator, outputs: &[&str]) {
    let case = read_back(call);
    assert_eq!(case.operator(), operator);
    let expected: Vec<_> = case.expected.iter().map(|(name, _)| *name).collect();
    assert_eq!(expected, outputs);
    let outcome = case.launch(stream).unwrap();
    assert_eq!(outcome.verdict, Verdict::Passed, "{operator:?}: {outcome:?}");
}

#[test]
fn launches_of_every_operator_are_recorded_as_cases_that_compute_the_same() {
    let stream = harness::stream();
    let masks = stream.device().masks();
    let x = tensor(&stream, 1, &[1, 2, 9, 64]);
    let row = tensor(&stream, 2, &[2, 1, 128]);
    let cache = tensor(&stream, 3, &[6, 16, 128]);
    let table = BlockTable::from_rows(&stream, &[[4, 1], [0, 5]], 16).unwrap();
    let caches = cache.reshape([6, 16, 2, 64]).unwrap();
    let packed = tensor(&stream, 4, &[9, 2, 64]);
    let (written, values) = (tensor(&stream, 5, &[6, 16, 2, 64]), tensor(&stream, 6, &[6, 16, 2, 64]));
    let matrices = tensor(&stream, 7, &[2, 16, 16]);
    let dropout = Dropout::new(&stream, (0..162).map(|bit| bit % 3 != 0), 0.5).unwrap();
    let (dropped, calls) = record_calls(EQUAL, || -> Result<(), Error> {
        let causal = masks.causal(CausalOrigin::LeftUp)?;
        let prompt = PromptFlashAttention::new(Layout::Bnsd).heads(2).scale(0.125);
        let prompt = prompt.mask(causal).plan((&x, &x, &x))?;
        prompt.launch(&stream, (&x, &x, &x))?;

        let paged = Inputs::new(&row, &cache, &cache).paged(&table);
        let incre = IncreFlashAttention::new(Layout::Bsh).scale(0.1).heads(2);
        let incre = incre.actual_seq_lengths_kv([20, 32]).plan(paged)?;
        incre.launch(&stream, paged)?;

        let flash = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.125);
        let causal = FlashMask::causal(&masks, CausalOrigin::LeftUp)?;
        let inputs = FlashInputs::new(&x, &x, &x).dropout(&dropout);
        let flash = flash.mask(causal).plan(inputs)?;
        flash.launch(&stream, inputs)?;

        let ends = [4, 9];
        let flash = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.125);
        let flash = flash.actual_seq_lengths(ends).actual_seq_lengths_kv(ends);
        let plan = flash.plan((&packed, &packed, &packed))?;
        let part = plan.launch(&stream, (&packed, &packed, &packed))?;
        let ring = RingUpdate::new().plan(&stream, (&part, &part))?;
        ring.launch(&stream, (&part, &part))?;

        let sequences = SequenceBlocks::new(&stream, &[[4, 1], [0, 5]], &[20, 32], 6, 16)?;
        let gather = GatherPaKvCache::new().plan(&sequences, (&caches, &caches))?;
        gather.launch(&stream, (&caches, &caches))?;

        let slots = SlotMapping::new(&stream, &[3, 40, 17], 6 * 16)?;
        let rows = packed.narrow(0, 0..3)?;
        let scatter = ScatterPaKvCache::new();
        let latent = scatter.plan((&rows, &slots, &written))?;
        latent.launch(&stream, (&rows, &slots, &written))?;
        let both = (&rows, &rows, &slots, &written, &values);
        scatter.plan(both)?.launch(&stream, both)?;

        let attention = FusedInferAttention::new(Layout::Bnsd).heads(2).scale(0.125);
        let attention = attention.softmax_lse(true).plan((&x, &x, &x))?;
        let output = attention.launch(&stream, (&x, &x, &x))?;
        let parts = [Part::of(&output)?, Part::of(&output)?];
        let merge = MergeState::new(Layout::Bnsd).plan(&parts)?;
        merge.launch(&stream, &parts)?;

        let products = BatchMatMul::new().plan((&matrices, &matrices))?;
        products.launch(&stream, (&matrices, &matrices))?;
        Ok(())
    });
    dropped.unwrap();
    // Whatever the tensors hold by now.
    for tensor in [&x, &row, &cache, &packed, &written, &values, &matrices] {
        tensor.overwrite(&stream, &halves(9, tensor.len())).unwrap();
    }
    use DeclaredOperator as Op;
    let softmax = ["softmax_max", "softmax_sum", "attention_out"];
    let expected: [(Op, &[&str]); 11] = [
        (Op::PromptFlashAttention, &["attention_out"]),
        (Op::IncreFlashAttention, &["attention_out"]),
        (Op::FlashAttentionScore, &softmax),
        (Op::FlashAttentionVarlenScore, &softmax),
        (Op::RingAttentionUpdate, &["attn_out", "softmax_max", "softmax_sum"]),
        (Op::GatherPaKvCache, &["key", "value"]),
        (Op::ScatterPaKvCache, &["key_cache"]),
        (Op::ScatterPaKvCache, &["key_cache", "value_cache"]),
        (Op::FusedInferAttentionScore, &["attention_out", "softmax_lse"]),
        (Op::AttentionUpdate, &["out", "lse_out"]),
        (Op::BatchMatMul, &["out"]),
    ];
    assert_eq!(calls.len(), expected.len(), "{calls:?}");
    for (call, (operator, outputs)) in calls.iter().zip(expected) {
        passes(&stream, call, operator, outputs);
    }
    // The standard mask of the mode is no part of the file.
    assert_eq!(calls[2].case().unwrap().mask, MaskSource::Compressed);
}

#[test]
fn refused_calls_of_every_operator_are_recorded_with_their_rule() {
    let stream = harness::stream();
    let x = tensor(&stream, 1, &[1, 2, 9, 64]);
    let one = tensor(&stream, 2, &[1, 2, 1, 64]);
    let ((), calls) = record_calls(EQUAL, || {
        let prompt = PromptFlashAttention::new(Layout::Bnsd).heads(3).scale(0.125);
        prompt.plan((&x, &x, &x)).unwrap_err();
        let incre = IncreFlashAttention::new(Layout::Bnsd).heads(2).scale(0.125);
        incre.plan((&x, &x, &x)).unwrap_err();
        let flash = FlashAttention::new(InputLayout::Bnsd).heads(3).scale(0.125);
        flash.plan((&x, &x, &x)).unwrap_err();
        let flash = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.125);
        let plan = flash.plan((&x, &x, &x)).unwrap();
        let part = plan.launch(&stream, (&x, &x, &x)).unwrap();
        RingUpdate::new().plan(&stream, (&part, &part)).unwrap_err();
        // A launch with other tensors than planned.
        plan.launch(&stream, (&one, &x, &x)).unwrap_err();
    });
    let rules = ["prompt.prefill_rules", "incre.rows", "flash.query_heads", "recorded", "ring.input_layout", "failed"];
    let names = calls.iter().map(|call| match call {
        Recorded::Case(case) => case.name.clone(),
        Recorded::Parameters { call, .. } => call.id.clone(),
        other => panic!("{other:?}"),
    });
    assert_eq!(names.collect::<Vec<_>>(), rules);
    for call in &calls[..3] {
        let case = read_back(call);
        assert!(matches!(case.expect, Expect::Reject { status: Some(_) }));
        assert_eq!(case.expect_rule.as_ref(), Some(&case.name));
        assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed);
    }
}

#[test]
fn captured_launches_of_every_operator_are_recorded_by_their_shapes() {
    let stream = harness::stream();
    let x = tensor(&stream, 1, &[1, 2, 9, 64]);
    let call = PromptFlashAttention::new(Layout::Bnsd).heads(2).scale(0.125);
    let plan = call.plan((&x, &x, &x)).unwrap();
    let mut output = plan.output::<f16>().unwrap();
    let (graph, calls) = record_calls(EQUAL, || {
        Graph::capture(stream.device(), (), |capture, ()| plan.launch_into(capture, (&x, &x, &x), &mut output))
    });
    graph.unwrap();
    let [Recorded::Parameters { call, why }] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert!(why.contains("part of a graph"), "{why}");
    let operator = call.arguments.operator();
    assert_eq!(operator, DeclaredOperator::PromptFlashAttention);
    assert_eq!(call.version, Some(3));
}
