//! What the plans of all attention operators refuse although the operators would take it, or by one text.

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::flash::{Dropout, FlashAttention, FlashInputs, FlashOutput, InputLayout};
use ascend_attention::incre::IncreFlashAttention;
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::ring::RingUpdate;
use ascend_attention::{Error, FusedInferAttention, Layout, Stream, Tensor, f16};

use crate::harness;
use harness::violated;

fn text<T>(result: Result<T, Error>) -> String {
    match result {
        Err(error) => error.to_string(),
        Ok(_) => panic!("accepted"),
    }
}

/// One head of 64 dimensions in one batch entry.
fn ones(stream: &Stream, rows: usize) -> Tensor<f16> {
    let elements = vec![f16::ONE; rows * 64];
    stream.upload(&elements, [1, 1, rows, 64]).unwrap()
}

#[test]
fn scales_that_are_no_finite_numbers_are_a_lint_of_every_operator() {
    let stream = harness::stream();
    let (row, rows) = (ones(&stream, 1), ones(&stream, 5));
    let fused = FusedInferAttention::new(Layout::Bnsd);
    let prompt = PromptFlashAttention::new(Layout::Bnsd);
    let incre = IncreFlashAttention::new(Layout::Bnsd);
    let flash = FlashAttention::new(InputLayout::Bnsd);
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e39] {
        let fused = fused.clone().scale(scale).plan((&rows, &rows, &rows));
        assert_eq!(violated(fused), "scale_value.finite");
        let call = prompt.clone().scale(scale);
        let planned = call.plan((&rows, &rows, &rows));
        assert_eq!(violated(planned), "scale_value.finite");
        let call = call.allow_lint("scale_value.finite");
        call.plan((&rows, &rows, &rows)).unwrap();
        let incre = incre.clone().scale(scale).plan((&row, &rows, &rows));
        assert_eq!(violated(incre), "scale_value.finite");
        let flash = flash.clone().scale(scale).plan((&rows, &rows, &rows));
        assert_eq!(violated(flash), "flash.scale_finite");
    }
}

#[test]
fn scales_of_zero_and_roots_of_the_head_dimension_are_lints_of_every_operator() {
    let stream = harness::stream();
    let (row, rows) = (ones(&stream, 1), ones(&stream, 5));
    for (scale, id) in [(0.0, "zero"), (8.0, "inverse")] {
        let scale_value = format!("scale_value.{id}");
        let fused = FusedInferAttention::new(Layout::Bnsd).scale(scale);
        assert_eq!(violated(fused.plan((&rows, &rows, &rows))), scale_value);
        let prompt = PromptFlashAttention::new(Layout::Bnsd).scale(scale);
        assert_eq!(violated(prompt.plan((&rows, &rows, &rows))), scale_value);
        let incre = IncreFlashAttention::new(Layout::Bnsd).scale(scale);
        assert_eq!(violated(incre.plan((&row, &rows, &rows))), scale_value);
        let flash = FlashAttention::new(InputLayout::Bnsd).scale(scale);
        let flash = violated(flash.plan((&rows, &rows, &rows)));
        assert_eq!(flash, format!("flash.scale_{id}"));
    }
    // The fix is the factor that was meant.
    let inverse = FusedInferAttention::new(Layout::Bnsd).scale(8.0);
    assert!(text(inverse.plan((&rows, &rows, &rows))).contains("allowed: 0.125"));
}

#[test]
fn what_is_no_lint_of_the_operator_cannot_be_allowed() {
    let stream = harness::stream();
    let (row, rows) = (ones(&stream, 1), ones(&stream, 5));
    // An unknown id, a lint of another operator, and a rule, which nothing allows.
    for id in ["no.such_lint", "scatter.slot", "flash.keep_prob", ""] {
        let fused = FusedInferAttention::new(Layout::Bnsd).scale(0.1);
        let fused = text(fused.allow_lint(id).plan((&rows, &rows, &rows)));
        let prompt = PromptFlashAttention::new(Layout::Bnsd).scale(0.1);
        let prompt = text(prompt.allow_lint(id).plan((&rows, &rows, &rows)));
        let incre = IncreFlashAttention::new(Layout::Bnsd).scale(0.1);
        let incre = text(incre.allow_lint(id).plan((&row, &rows, &rows)));
        let flash = FlashAttention::new(InputLayout::Bnsd).scale(0.1);
        let flash = text(flash.allow_lint(id).plan((&rows, &rows, &rows)));
        for (refused, lint) in [
            (fused, "scale_value.finite"),
            (prompt, "prompt.deprecated"),
            (incre, "incre.deprecated"),
            (flash, "flash.drop_mask_unscaled"),
        ] {
            let given = format!("given allow_lint: {id:?}, allowed: lints of the operator: ");
            let known = refused.split_once(&given);
            let (_, known) = known.unwrap_or_else(|| panic!("{refused}"));
            let (known, _) = known.split_once("; fix: ").unwrap();
            assert!(known.split(", ").any(|of| of == lint), "{known}");
        }
    }
    let flash = FlashAttention::new(InputLayout::Bnsd).scale(0.1);
    let flash = flash.allow_lint("flash.keep_prob_unused");
    flash.plan((&rows, &rows, &rows)).unwrap();
}

#[test]
fn outputs_of_another_type_are_named_with_what_to_do() {
    let stream = harness::stream();
    let (row, rows) = (ones(&stream, 1), ones(&stream, 5));
    let floats = stream.upload(&[1f32; 64 * 5], [1, 1, 5, 64]).unwrap();
    let fused = FusedInferAttention::new(Layout::Bnsd).scale(0.1);
    let fused = fused.plan((&rows, &rows, &rows)).unwrap();
    let prompt = PromptFlashAttention::new(Layout::Bnsd).scale(0.1);
    let prompt = prompt.plan((&rows, &rows, &rows)).unwrap();
    let incre = IncreFlashAttention::new(Layout::Bnsd).scale(0.1);
    let incre = incre.plan((&row, &rows, &rows)).unwrap();
    let flash = FlashAttention::new(InputLayout::Bnsd).scale(0.1);
    let flash = flash.plan((&rows, &rows, &rows)).unwrap();
    for refused in [
        text(fused.launch(&stream, (&floats, &floats, &floats))),
        text(prompt.launch(&stream, (&floats, &floats, &floats))),
        text(incre.output::<f32>()),
        text(flash.launch(&stream, (&floats, &floats, &floats))),
    ] {
        assert!(
            refused.contains("given attention_out: FLOAT elements, allowed: FLOAT16 elements")
                && refused.contains("launch with tensors of the planned type"),
            "{refused}"
        );
    }
}

#[test]
fn launches_without_what_was_planned_say_what_is_missing() {
    let stream = harness::stream();
    let (row, rows) = (ones(&stream, 1), ones(&stream, 5));
    let keeps = |scores: usize| std::iter::repeat_n(true, scores);
    let dropout = Dropout::new(&stream, keeps(25), 0.5).unwrap();
    let sink = stream.upload(&[0f32], [1]).unwrap();
    let flash = FlashAttention::new(InputLayout::Bnsd).scale(0.1);
    let plain = FlashInputs::new(&rows, &rows, &rows);
    for (inputs, missing) in [
        (plain.dropout(&dropout), "drop_mask: none, allowed: UINT8 [16]"),
        (plain.sink(&sink), "sink: none, allowed: FLOAT [1]"),
    ] {
        let plan = flash.plan(inputs).unwrap();
        let refused = text(plan.launch(&stream, plain));
        let rest = refused.split_once("given ").unwrap().1.strip_prefix(missing);
        assert_eq!(rest, Some("; fix: launch with what was planned, or plan again"), "{refused}");
        let plan = flash.plan(plain).unwrap();
        let refused = text(plan.launch(&stream, inputs));
        assert!(refused.contains("allowed: a call without it"), "{refused}");
    }
    let cache = stream.upload(&vec![f16::ONE; 2 * 16 * 64], [2, 16, 64]).unwrap();
    let table = BlockTable::from_rows(&stream, &[[1]], 16).unwrap();
    let inputs = Inputs::new(&row, &cache, &cache);
    let plan = IncreFlashAttention::new(Layout::Bnsd)
        .scale(0.1)
        .actual_seq_lengths_kv([7])
        .plan(inputs.paged(&table))
        .unwrap();
    let refused = text(plan.launch(&stream, inputs));
    assert!(refused.contains("given block_table: none, allowed: INT32 [1, 1]; fix: launch with"), "{refused}");
}

#[test]
fn a_dropout_for_another_number_of_scores_is_refused() {
    let stream = harness::stream();
    let rows = ones(&stream, 5);
    let inputs = FlashInputs::new(&rows, &rows, &rows);
    let call = FlashAttention::new(InputLayout::Bnsd).scale(0.1);
    let of = |scores: usize| {
        let keeps = (0..scores).map(|bit| bit % 2 == 0);
        Dropout::new(&stream, keeps, 0.5).unwrap()
    };
    // Masks of 1 to 128 scores have as many bytes, whatever they are for.
    for scores in [1, 24, 26, 128] {
        let refused = call.plan(inputs.dropout(&of(scores)));
        assert_eq!(violated(refused), "flash.drop_mask_size", "{scores}");
    }
    let (right, wrong) = (of(25), of(30));
    let plan = call.plan(inputs.dropout(&right)).unwrap();
    let refused = text(plan.launch(&stream, inputs.dropout(&wrong)));
    assert!(refused.contains("30 scores") && refused.contains("25 scores"), "{refused}");
    // Bytes of the caller's own do not say what they are for.
    let bytes = Dropout::from_tensor(wrong.mask().clone(), 0.5).unwrap();
    plan.launch(&stream, inputs.dropout(&bytes)).unwrap();
    plan.launch(&stream, inputs.dropout(&right)).unwrap();
    call.plan(inputs.dropout(&bytes)).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn packed_sequences_without_keys_in_a_part_are_not_merged() {
    let stream = harness::stream();
    let packed = |rows: usize, of: f32| {
        let elements = vec![of; rows * 64];
        stream.upload(&elements, [rows, 1, 64]).unwrap()
    };
    // Two sequences of 2 rows; scores of 64, above the maximum 0 of a part without keys.
    let query = packed(4, 1.0);
    let attend = |ends: [usize; 2]| -> FlashOutput<f32> {
        let keys = packed(ends[1], 1.0);
        let call = FlashAttention::new(InputLayout::Tnd).scale(1.0);
        let call = call.actual_seq_lengths([2, 4]).actual_seq_lengths_kv(ends);
        let plan = call.plan((&query, &keys, &keys)).unwrap();
        plan.launch(&stream, (&query, &keys, &keys)).unwrap()
    };
    let (all, one, first) = (attend([3, 6]), attend([3, 3]), attend([0, 3]));
    let merge = |allowed: &[&str], prev, cur| {
        let of = |merge: RingUpdate, id: &&str| merge.allow_lint(id);
        allowed.iter().fold(RingUpdate::new(), of).plan(&stream, (prev, cur))
    };
    assert_eq!(violated(merge(&[], &all, &one)), "ring.one_empty");
    assert_eq!(violated(merge(&[], &first, &all)), "ring.one_empty");
    assert_eq!(violated(merge(&["ring.one_empty"], &one, &one)), "ring.both_empty");
    // Planned with parts that have keys, launched with others.
    let plan = merge(&[], &all, &all).unwrap();
    plan.launch(&stream, (&all, &all)).unwrap();
    assert_eq!(violated(plan.launch(&stream, (&all, &one))), "ring.one_empty");
    // Where maxima are known to be positive nothing is lost, and the merged part has keys for every sequence.
    let allowing = merge(&["ring.one_empty"], &all, &one).unwrap();
    let merged = allowing.launch(&stream, (&all, &one)).unwrap();
    let attention = merged.attention.download(&stream).unwrap();
    assert!(attention.iter().all(|x| (x - 1.0).abs() < 1e-6), "{attention:?}");
    plan.launch(&stream, (&merged, &all)).unwrap();
    merge(&["ring.one_empty", "ring.both_empty"], &one, &one).unwrap();
    stream.synchronize().unwrap();
}
