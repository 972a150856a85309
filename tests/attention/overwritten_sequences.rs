//! Sequences of linear attention that are overwritten: plans and captured launches read the new numbers, and what a
//! plan refuses is not written.

use ascend_attention::causal_conv::{CausalConv1d, ConvSequence, ConvSequences};
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::gather::{GatherPaKvCache, SequenceBlocks};
use ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule;
use ascend_attention::spec::Cann;
use ascend_attention::{Graph, Stream, Tensor, bf16};

use crate::harness;
use crate::harness::gate::Gate;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn rising(stream: &Stream, shape: &[usize]) -> Tensor<bf16> {
    let count = shape.iter().product::<usize>();
    let numbers: Vec<bf16> = (0..count).map(|at| bf16::from_f32((at * 7 % 31) as f32 / 32.0)).collect();
    stream.upload(&numbers, shape).unwrap()
}

fn refused<R>(outcome: ascend_attention::Result<R>, words: &str) {
    let text = outcome.map(drop).unwrap_err().to_string();
    assert!(text.contains(words), "{text}");
}

#[test]
fn slots_of_states_are_overwritten_and_what_a_plan_refuses_is_not() {
    let Some(stream) = harness::stream_of(Cann::V9_1) else { return };
    let (key, value, beta) = (rising(&stream, &[4, 1, 8]), rising(&stream, &[4, 2, 4]), rising(&stream, &[4, 2]));
    let tensors = DeltaTensors::new((&key, &key, &value), &beta);
    let pool = || DeltaStates::zeroed::<bf16>(stream.device(), 6, 2, 4, 8).unwrap();
    let rule = RecurrentGatedDeltaRule::new(0.5);
    let sequences = DeltaSequences::without_tokens(&stream, 3, 4).unwrap();
    let states = pool();
    let plan = rule.plan(&sequences, (tensors, &states)).unwrap();
    let out = stream.upload(&[bf16::NAN; 4 * 8], [4, 2, 4]).unwrap();
    let record = |capture: &ascend_attention::graph::Capturing<'_>, (): &()| {
        plan.launch_into(capture, (tensors, &states), &mut out.clone())
    };
    let (mut graph, ()) = Graph::capture(stream.device(), (), record).unwrap();
    let mut replay = || {
        let update = graph.update();
        graph.launch(&stream, update).unwrap();
        out.download(&stream).unwrap()
    };
    // No sequence has a token: nothing is written, nor any state.
    assert!(replay().iter().all(|number| number.is_nan()));
    let bits = |states: &DeltaStates| states.tensor().download_bytes(&stream).unwrap();
    assert!(bits(&states).iter().all(|byte| *byte == 0));

    // Two steps of other lengths, as plans of their own compute them; a sequence without tokens is left out.
    let fresh = pool();
    for rows in [vec![vec![5], vec![1, 2], vec![]], vec![vec![5, 0], vec![], vec![2]]] {
        sequences.overwrite(&stream, &rows).unwrap();
        let replayed = replay();
        let tokens = 3;
        let cut = |tensor: &Tensor<bf16>| tensor.narrow(0, 0..tokens).unwrap();
        let [key, value, beta] = [&key, &value, &beta].map(cut);
        let inputs = (DeltaTensors::new((&key, &key, &value), &beta), &fresh);
        let own = DeltaSequences::of_slots(&stream, &rows).unwrap();
        let want = rule.plan(&own, inputs).unwrap().launch(&stream, inputs).unwrap();
        assert_eq!(replayed[..tokens * 8], want.download(&stream).unwrap());
        assert!(replayed[tokens * 8..].iter().all(|number| number.is_nan()));
        assert_eq!(bits(&states), bits(&fresh));
    }
    let held = sequences.slots().unwrap().download(&stream).unwrap();
    refused(sequences.overwrite(&stream, &[vec![6], vec![], vec![]]), "slot 6 of token 0");
    refused(sequences.overwrite(&stream, &[vec![1], vec![1], vec![]]), "recurrent_delta.shared_slot");
    refused(sequences.overwrite(&stream, &[vec![1], vec![]]), "2 rows");
    refused(sequences.overwrite(&stream, &[vec![1, 2, 3], vec![4, 5], vec![]]), "5 slots");
    refused(sequences.overwrite(&stream, &[vec![usize::MAX], vec![], vec![]]), "INT32");
    assert_eq!(sequences.slots().unwrap().download(&stream).unwrap(), held);
    // Those with counts have tensors of their own, and stay.
    let of_slots = DeltaSequences::of_slots(&stream, &[[0, 1], [2, 3]]).unwrap();
    let counted = of_slots.clone().accepted(&stream, &[2, 1]).unwrap();
    of_slots.overwrite(&stream, &[vec![4], vec![]]).unwrap();
    assert_eq!(counted.slots().unwrap().download(&stream).unwrap(), [0, 1, 2, 3]);
    refused(counted.overwrite(&stream, &[vec![4], vec![]]), "accepted counts");
    let lengths = DeltaSequences::of_lengths(&stream, &[1, 1]).unwrap();
    refused(lengths.overwrite(&stream, &[vec![4], vec![]]), "lengths alone");
    refused(DeltaSequences::without_tokens(&stream, 0, 1), "at least one");
    refused(DeltaSequences::without_tokens(&stream, 1, usize::MAX), "capture smaller steps");
}

#[test]
fn sequences_of_a_convolution_are_overwritten_and_rows_of_padding_left_out() {
    let Some(stream) = crate::causal_conv1d::stream() else { return };
    let (x, weight, pool) = (rising(&stream, &[5, 16]), rising(&stream, &[4, 16]), rising(&stream, &[3, 3, 16]));
    let padding = |rows| ConvSequence { rows, line: None, continues: true };
    let of = |rows, line| ConvSequence { rows, line: Some(line), continues: true };
    let sequences = ConvSequences::new(&stream, &[padding(0), padding(0), padding(5)]).unwrap();
    let inputs = (&x, &weight, &pool);
    let plan = CausalConv1d::new().silu().plan(&sequences, inputs).unwrap();
    let y = stream.upload(&[bf16::NAN; 5 * 16], [5, 16]).unwrap();
    let record =
        |capture: &ascend_attention::graph::Capturing<'_>, (): &()| plan.launch_into(capture, inputs, &mut y.clone());
    let (mut graph, ()) = Graph::capture(stream.device(), (), record).unwrap();
    let mut replay = || {
        let update = graph.update();
        graph.launch(&stream, update).unwrap();
        y.download(&stream).unwrap()
    };
    let before = pool.download(&stream).unwrap();
    assert!(replay().iter().all(|number| number.is_nan()));
    assert_eq!(pool.download(&stream).unwrap(), before);

    let fresh = rising(&stream, &[3, 3, 16]);
    for given in [[of(1, 2), of(2, 0), padding(2)], [of(3, 2), padding(0), padding(2)]] {
        sequences.overwrite(&stream, &given).unwrap();
        let replayed = replay();
        let own: Vec<_> = given.into_iter().filter(|sequence| sequence.line.is_some()).collect();
        let rows = x.narrow(0, 0..3).unwrap();
        let inputs = (&rows, &weight, &fresh);
        let own = ConvSequences::new(&stream, &own).unwrap();
        let want = CausalConv1d::new().silu().plan(&own, inputs).unwrap().launch(&stream, inputs).unwrap();
        assert_eq!(replayed[..48], want.download(&stream).unwrap());
        assert!(replayed[48..].iter().all(|number| number.is_nan()));
        assert_eq!(pool.download(&stream).unwrap(), fresh.download(&stream).unwrap());
    }
    refused(sequences.overwrite(&stream, &[of(1, 3), of(4, 0), padding(0)]), "line 3 of sequence 0");
    refused(sequences.overwrite(&stream, &[of(1, 0), of(4, 0), padding(0)]), "causal_conv.shared_line");
    refused(sequences.overwrite(&stream, &[of(1, 0), of(1, 1), padding(0)]), "causal_conv.contents");
    refused(sequences.overwrite(&stream, &[of(5, 0)]), "1 in place of 3");
    let counted = ConvSequences::new(&stream, &[of(1, 0)]).unwrap().accepted(&stream, &[1]).unwrap();
    refused(counted.overwrite(&stream, &[of(1, 1)]), "accepted counts");
}

#[test]
fn blocks_of_sequences_are_overwritten() {
    let stream = harness::stream();
    let cache = rising(&stream, &[4, 2, 1, 16]);
    let sequences = SequenceBlocks::new(&stream, &[vec![0, 1], vec![2]], &[3, 1], 4, 2).unwrap();
    let gather = GatherPaKvCache::new().plan(&sequences, (&cache, &cache)).unwrap();
    let (rows, lengths) = ([vec![3], vec![0, 2]], [1, 3]);
    sequences.overwrite(&stream, &rows, &lengths).unwrap();
    let fresh = SequenceBlocks::new(&stream, &rows, &lengths, 4, 2).unwrap();
    let fresh = GatherPaKvCache::new().plan(&fresh, (&cache, &cache)).unwrap();
    let gathered = |plan: &ascend_attention::gather::GatherPlan| {
        plan.launch(&stream, (&cache, &cache)).unwrap().0.download(&stream).unwrap()
    };
    assert_eq!(gathered(&gather), gathered(&fresh));
    refused(sequences.overwrite(&stream, &[vec![4], vec![0, 2]], &[1, 3]), "gather.block");
    refused(sequences.overwrite(&stream, &[vec![3], vec![0]], &[1, 3]), "gather.block");
    refused(sequences.overwrite(&stream, &[vec![3], vec![0]], &[1, 1]), "2 tokens");
    refused(sequences.overwrite(&stream, &[vec![3]], &[4]), "1 rows");
    refused(sequences.overwrite(&stream, &[vec![3, 2, 1], vec![]], &[4, 0]), "at most 2");
    assert_eq!(gathered(&gather), gathered(&fresh));
}

#[test]
fn rows_behind_the_last_token_of_overwritten_sequences_are_zeros() {
    // Memory is handed out full of NaN.
    #[cfg(feature = "emulation")]
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let Some(stream) = harness::stream_of(Cann::V9_1) else { return };
    let (key, value, beta) = (rising(&stream, &[4, 1, 8]), rising(&stream, &[4, 2, 4]), rising(&stream, &[4, 2]));
    let inputs = DeltaTensors::new((&key, &key, &value), &beta);
    let states = DeltaStates::zeroed::<bf16>(stream.device(), 6, 2, 4, 8).unwrap();
    let sequences = DeltaSequences::of_slots(&stream, &[[0, 1], [2, 3]]).unwrap();
    let plan = RecurrentGatedDeltaRule::new(0.5).plan(&sequences, (inputs, &states)).unwrap();
    for tokens in [4usize, 3, 0, 1] {
        let mut rows = [vec![0, 1], vec![2, 3]];
        rows[1].truncate(tokens.saturating_sub(2));
        rows[0].truncate(tokens);
        sequences.overwrite(&stream, &rows).unwrap();
        let out = plan.launch(&stream, (inputs, &states)).unwrap().download(&stream).unwrap();
        assert!(out[tokens * 8..].iter().all(|number| *number == bf16::ZERO), "{tokens}");
        assert!(out[..tokens * 8].iter().any(|number| *number != bf16::ZERO) || tokens == 0);
    }

    let Some(stream) = crate::causal_conv1d::stream() else { return };
    let (x, weight, pool) = (rising(&stream, &[5, 16]), rising(&stream, &[4, 16]), rising(&stream, &[3, 3, 16]));
    let of = |rows, line| ConvSequence { rows, line, continues: true };
    let sequences = ConvSequences::new(&stream, &[of(2, Some(0)), of(3, Some(1))]).unwrap();
    let plan = CausalConv1d::new().plan(&sequences, (&x, &weight, &pool)).unwrap();
    sequences.overwrite(&stream, &[of(2, Some(0)), of(3, None)]).unwrap();
    let y = plan.launch(&stream, (&x, &weight, &pool)).unwrap().download(&stream).unwrap();
    assert!(y[..32].iter().any(|number| *number != bf16::ZERO));
    assert!(y[32..].iter().all(|number| *number == bf16::ZERO));
}

/// What was overwritten in part is refused by whatever would read it, until it is overwritten again.
#[cfg(feature = "emulation")]
#[test]
fn numbers_that_were_overwritten_in_part_are_refused_until_they_are_overwritten_again() {
    use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
    use ascend_emu::{Site, inject};

    if harness::on_npu() {
        return;
    }
    let stream = harness::stream();
    let cache = rising(&stream, &[4, 2, 1, 16]);
    let sequences = SequenceBlocks::new(&stream, &[vec![0, 1], vec![2]], &[3, 1], 4, 2).unwrap();
    let gather = GatherPaKvCache::new().plan(&sequences, (&cache, &cache)).unwrap();
    let mut out = gather.output::<bf16>().unwrap();
    let (mut graph, ()) =
        Graph::capture(stream.device(), (), |capture, (): &()| gather.launch_into(capture, (&cache, &cache), &mut out))
            .unwrap();
    let key = rising(&stream, &[2, 1, 16]);
    let slots = SlotMapping::new(&stream, &[0, 1], 8).unwrap();
    let scatter = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    let (mut written, ()) =
        Graph::capture(stream.device(), (), |capture, (): &()| scatter.launch(capture, (&key, &slots, &cache)))
            .unwrap();
    let mut all = || {
        let (update, other) = (graph.update(), written.update());
        [
            gather.launch(&stream, (&cache, &cache)).map(drop),
            graph.launch(&stream, update),
            scatter.launch(&stream, (&key, &slots, &cache)),
            written.launch(&stream, other),
            GatherPaKvCache::new().plan(&sequences, (&cache, &cache)).map(drop),
        ]
    };
    for outcome in all() {
        outcome.unwrap();
    }
    // The blocks are there, and the lengths are not.
    let fault = inject(Site::Memcpy, 2, 207_001);
    assert!(sequences.overwrite(&stream, &[vec![3], vec![0, 2]], &[1, 3]).is_err());
    drop(fault);
    let fault = inject(Site::Memcpy, 1, 207_001);
    assert!(slots.overwrite(&stream, &[4, 5]).is_err());
    drop(fault);
    for outcome in all() {
        refused(outcome, "overwritten in part");
    }
    slots.overwrite(&stream, &[4, 5]).unwrap();
    sequences.overwrite(&stream, &[vec![3], vec![0, 2]], &[1, 3]).unwrap();
    for outcome in all() {
        outcome.unwrap();
    }
    stream.synchronize().unwrap();
}

/// Of a table those rows alone are refused whose overwriting has failed.
#[cfg(feature = "emulation")]
#[test]
fn rows_of_a_table_that_were_overwritten_in_part_are_refused_until_they_are_overwritten_again() {
    use ascend_attention::attention::{BlockTable, Inputs};
    use ascend_attention::{FusedInferAttention, Layout};
    use ascend_emu::{Site, inject};

    if harness::on_npu() {
        return;
    }
    let stream = harness::stream();
    let (cache, query) = (rising(&stream, &[4, 16, 64]), rising(&stream, &[1, 1, 64]));
    let all = BlockTable::from_rows(&stream, &[[0, 1], [2, 3]], 16).unwrap();
    let call = FusedInferAttention::new(Layout::Bsh).scale(1.0).heads(1).kv_heads(1).actual_seq_lengths_kv([20]);
    let parts = [all.rows(0..1).unwrap(), all.rows(1..2).unwrap()];
    let [first, second] = parts.each_ref().map(|part| Inputs::new(&query, &cache, &cache).paged(part));
    let plan = call.plan(first).unwrap();
    let fault = inject(Site::Memcpy, 1, 207_001);
    assert!(parts[1].overwrite(&stream, &[[0, 1]]).is_err());
    drop(fault);
    plan.launch(&stream, first).unwrap();
    refused(plan.launch(&stream, second), "overwritten in part");
    // Plans do not read the table.
    call.plan(second).unwrap();
    parts[0].overwrite(&stream, &[[1, 0]]).unwrap();
    refused(plan.launch(&stream, second), "overwritten in part");
    all.overwrite(&stream, &[[0, 1], [3, 2]]).unwrap();
    plan.launch(&stream, second).unwrap();
    stream.synchronize().unwrap();
}

/// A check is kept for as long as its plan, a graph of the plan's launches, and a launch that is queued.
#[test]
fn plans_that_are_gone_require_nothing_of_the_numbers() {
    let Some(stream) = harness::stream_of(Cann::V9_1) else { return };
    let (key, value, beta) = (rising(&stream, &[1, 1, 8]), rising(&stream, &[1, 2, 4]), rising(&stream, &[1, 2]));
    let inputs = DeltaTensors::new((&key, &key, &value), &beta);
    let pool = |slots| DeltaStates::zeroed::<bf16>(stream.device(), slots, 2, 4, 8).unwrap();
    let sequences = DeltaSequences::of_slots(&stream, &[[0]]).unwrap();
    let rule = RecurrentGatedDeltaRule::new(0.5);
    let (small, large) = (pool(3), pool(9));
    let plan = rule.plan(&sequences, (inputs, &small)).unwrap();
    refused(sequences.overwrite(&stream, &[[5]]), "slot 5");
    let out = plan.output::<bf16>().unwrap();
    let (graph, ()) = Graph::capture(stream.device(), (), |capture, (): &()| {
        plan.launch_into(capture, (inputs, &small), &mut out.clone())
    })
    .unwrap();
    drop(plan);
    refused(sequences.overwrite(&stream, &[[5]]), "slot 5");
    drop(graph);
    sequences.overwrite(&stream, &[[5]]).unwrap();
    // A launch on another stream, which waits for the host, reads what its pool has: the overwrite waits for it.
    let other = DeltaSequences::of_slots(&stream, &[[0]]).unwrap();
    let plan = rule.plan(&other, (inputs, &small)).unwrap();
    let behind = stream.device().stream().unwrap();
    let gate = Gate::new(stream.device());
    gate.hold(&behind);
    plan.launch(&behind, (inputs, &small)).unwrap();
    drop(plan);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let overwritten = scope.spawn(|| {
            let outcome = other.overwrite(&stream, &[[5]]);
            (outcome, done.load(Ordering::SeqCst))
        });
        std::thread::sleep(Duration::from_millis(50));
        done.store(true, Ordering::SeqCst);
        gate.open();
        let (outcome, was_done) = overwritten.join().unwrap();
        outcome.unwrap();
        assert!(was_done, "numbers were replaced in front of a launch that reads them");
    });
    behind.synchronize().unwrap();
    rule.plan(&sequences, (inputs, &large)).unwrap();
}
