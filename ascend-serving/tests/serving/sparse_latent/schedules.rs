//! Any schedule, and some whose choices are known.

use ascend_attention::{Stream, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Causality, SparseLatent};
use proptest::prelude::*;

use super::engine::{Engine, IndexRows, LayerRows, Model, sparse_latent};
use super::{COUNT, INDEXERS, LAYERS};
use crate::acts::{Act, Scheduled, act, config};
use crate::harness;
use crate::quantised_caches::ascend_950;

fn model() -> impl Strategy<Value = Model> {
    (any::<[bool; 2]>(), any::<[bool; 2]>(), 2usize..5).prop_map(|([small, dump], quantised, blocks)| Model {
        block_size: if small { 16 } else { 128 },
        blocks: 1 + if small { 8 * blocks } else { blocks },
        dump,
        quantised,
    })
}

const SMALL: Model = Model { block_size: 16, blocks: 24, dump: false, quantised: [false; 2] };

proptest! {
    #![proptest_config(config(16))]

    #[test]
    fn any_schedule_is_the_definition(
        model in model(),
        steps in prop::collection::vec((prop::collection::vec(act(70, 4), 1..5), 0usize..5), 1..6),
        captured in any::<bool>(),
    ) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, &model);
        if captured && model.quantised == [false; 2] {
            engine = engine.captured();
        }
        engine.run(&steps)?;
    }
}

/// Runs a schedule of prompts, chunks, decodes, drafts, a fork, and blocks that go from one request to another.
fn runs_a_schedule(mut engine: Engine<'_>, drafts: usize) -> [usize; 2] {
    let steps: [&[Act]; 8] = [
        // A short prompt and a long one; the next chunks; decodes.
        &[Act::Chunk(0, 20), Act::Chunk(3, 60)],
        &[Act::Chunk(4, 30), Act::Chunk(1, 40)],
        &[Act::Chunk(4, 1), Act::Chunk(1, 1)],
        // Drafts beside a decode; then a fork that goes on in the middle of a block, and the sequence that it left.
        &[Act::Verify(4, drafts, 1), Act::Chunk(1, 1)],
        &[Act::Share(1, 77)],
        &[Act::Chunk(2, 3), Act::Chunk(1, 1)],
        // A request ends, and another one gets its blocks.
        &[Act::Chunk(1, 1), Act::End(0)],
        &[Act::Chunk(0, 50), Act::Chunk(1, 2)],
    ];
    for acts in steps {
        engine.act(acts, 1).unwrap();
    }
    let (compared, left_out, steps) = (engine.compared, engine.left_out, engine.steps);
    assert!(compared >= 100 && left_out * 10 < compared, "{compared} rows, {left_out} left out");
    engine.end();
    steps
}

#[test]
fn prompts_chunks_decodes_drafts_and_forks_read_what_is_chosen() {
    let stream = harness::stream();
    assert_eq!(runs_a_schedule(Engine::new(&stream, &SMALL), 3)[0], 0);
}

#[test]
fn quantised_latents_and_index_keys_are_read_with_their_scales() {
    let stream = harness::stream();
    for quantised in [[true, false], [false, true], [true, true]] {
        let model = Model { quantised, ..SMALL };
        assert_eq!(runs_a_schedule(Engine::new(&stream, &model), 3)[0], 0);
    }
}

#[test]
fn decodes_drafts_and_forks_are_replayed() {
    let stream = harness::stream();
    assert_eq!(runs_a_schedule(Engine::new(&stream, &SMALL).captured(), 2), [4, 7]);
}

/// The indices of the first and the last row of a prompt, and how many keys each names.
fn first_choice(sparse: &mut SparseLatent<bf16>, stream: &Stream, tokens: usize) -> ([Vec<i32>; 2], usize) {
    let mut sequence = Sequence::new(sparse.latents().pool());
    sparse.grow(stream, &mut sequence, tokens).unwrap();
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, tokens)], settings).unwrap();
    let names: Vec<u64> = (1..=tokens as u64).collect();
    let mut step = sparse.begin(stream, &metadata).unwrap();
    let choices: Vec<_> = (0..INDEXERS)
        .map(|indexer| step.choose(indexer, IndexRows::of(stream, &names, indexer).tensors()).unwrap())
        .collect();
    for layer in 0..LAYERS {
        let rows = LayerRows::of(stream, &names, layer);
        let choice = &choices[layer.min(INDEXERS - 1)];
        step.forward(layer, rows.tensors(choice)).unwrap();
    }
    step.end().unwrap();
    let choice = &choices[0];
    let indices = choice.indices().download(stream).unwrap();
    let columns = indices.len() / tokens;
    let row = |row: usize| indices[row * columns..][..columns].to_vec();
    ([row(0), row(tokens - 1)], choice.keys_per_index())
}

#[test]
fn every_key_is_chosen_without_an_indexer_as_long_as_contexts_are_short() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &SMALL);
    // As many keys as are chosen: in runs of a block's 16.
    let (rows, keys) = first_choice(&mut sparse, &stream, COUNT);
    assert_eq!((rows, keys), ([vec![0, -1], vec![0, 1]], 16));
    // With one more the indexer chooses, and leaves one out.
    let ([first, mut last], keys) = first_choice(&mut sparse, &stream, COUNT + 1);
    assert_eq!((first[0], first[1], keys), (0, -1, 1));
    last.sort_unstable();
    last.dedup();
    assert!(last.len() == COUNT && last[0] >= 0, "{last:?}");
}

#[test]
fn lists_of_ascend_950_name_single_keys() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let mut sparse = sparse_latent(&stream, &SMALL);
    let (rows, keys) = first_choice(&mut sparse, &stream, 3);
    assert_eq!((rows, keys), ([vec![0, -1, -1], vec![0, 1, 2]], 1));
}
