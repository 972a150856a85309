//! Steps that are replayed from graphs: what is refused, and what the refusal advises.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{
    AttentionMetadata, BatchRequest, BatchSettings, Causality, Drafting, Error, GraphLimits, IndexerTensors, KeyChoice,
    SparseGraphs, SparseLatent, SparseStep, rules,
};

use super::engine::{IndexRows, LayerRows, Model, sparse_latent};
use super::refusals::refused;
use super::{HEADS, INDEX_HEADS, LATENT, LAYERS};
use crate::harness;

const MODEL: Model = Model { block_size: 16, blocks: 12, dump: false, quantised: [false; 2] };

/// Graphs of up to 3 requests, each of up to 40 keys and 2 new tokens.
fn captured(stream: &Stream, sparse: &SparseLatent<bf16>) -> SparseGraphs<bf16> {
    let limits = GraphLimits::new([1, 3], 40).tokens_each(2);
    sparse.capture::<bf16>(stream, INDEX_HEADS, &limits).unwrap()
}

/// A sequence of `cached` tokens that are computed and `new` ones that are not.
fn sequence(stream: &Stream, sparse: &mut SparseLatent<bf16>, cached: usize, new: usize) -> Sequence {
    let mut sequence = Sequence::new(sparse.latents().pool());
    sparse.grow(stream, &mut sequence, cached).unwrap();
    for cache in [sparse.latents(), sparse.index_keys()] {
        cache.mark_computed(&sequence, cached).unwrap();
    }
    sparse.grow(stream, &mut sequence, new).unwrap();
    sequence
}

fn step_of(sparse: &SparseLatent<bf16>, requests: &[(&Sequence, usize)]) -> AttentionMetadata {
    let requests = requests.iter().map(|(sequence, new)| BatchRequest::of(sequence, *new));
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    AttentionMetadata::new(&requests.collect::<Vec<_>>(), settings).unwrap()
}

fn choose(step: &mut SparseStep<'_, bf16>, stream: &Stream, indexer: usize) -> Result<KeyChoice, Error> {
    step.choose(indexer, IndexRows::of(stream, &[1, 2], indexer).tensors())
}

fn forward(
    step: &mut SparseStep<'_, bf16>,
    stream: &Stream,
    layer: usize,
    choice: &KeyChoice,
) -> Result<Tensor<bf16>, Error> {
    let rows = LayerRows::of(stream, &[1, 2], layer);
    step.forward(layer, rows.tensors(choice)).cloned()
}

#[test]
fn a_choice_is_read_before_the_next_indexer_overwrites_it() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let mut graphs = captured(&stream, &sparse);
    let sequence = sequence(&stream, &mut sparse, 30, 2);
    let mut metadata = step_of(&sparse, &[(&sequence, 2)]);

    let mut step = graphs.begin(&mut sparse, &stream, &mut metadata).unwrap();
    let first = choose(&mut step, &stream, 0).unwrap();
    refused(choose(&mut step, &stream, 0), &rules::STEP_LAYER_REPEATED, &["indexer 0 a second time"]);
    refused(choose(&mut step, &stream, 2), &rules::ARGUMENT_VALUE, &["below 2"]);
    let words = ["indexer 1 while no layer", "queue a layer with that choice first"];
    refused(choose(&mut step, &stream, 1), &rules::SPARSE_CHOICE, &words);
    forward(&mut step, &stream, 0, &first).unwrap();
    refused(forward(&mut step, &stream, 0, &first), &rules::STEP_LAYER_REPEATED, &["layer 0 a second time"]);
    refused(forward(&mut step, &stream, LAYERS, &first), &rules::ARGUMENT_VALUE, &["layer"]);
    let second = choose(&mut step, &stream, 1).unwrap();
    let words = ["indexer 0 in layer 1", "indexer 1 has overwritten", "queued last"];
    refused(forward(&mut step, &stream, 1, &first), &rules::SPARSE_CHOICE, &words);
    forward(&mut step, &stream, 1, &second).unwrap();
    refused(step.end(), &rules::STEP_LAYERS_MISSING, &["without layer 2", "begin the step again"]);
    for cache in [sparse.latents(), sparse.index_keys()] {
        assert_eq!(cache.computed_tokens(&sequence).unwrap(), 30);
    }

    // The refusal of the last layer names the overwritten choice first, then the indexer whose choice is unread.
    let mut step = graphs.begin(&mut sparse, &stream, &mut metadata).unwrap();
    let first = choose(&mut step, &stream, 0).unwrap();
    (0..LAYERS - 1).for_each(|layer| drop(forward(&mut step, &stream, layer, &first).unwrap()));
    choose(&mut step, &stream, 1).unwrap();
    let words = ["indexer 0 in layer 2", "indexer 1 has overwritten"];
    refused(forward(&mut step, &stream, LAYERS - 1, &first), &rules::SPARSE_CHOICE, &words);
    drop(step);

    // The step is begun again, with the metadata that was padded.
    let mut step = graphs.begin(&mut sparse, &stream, &mut metadata).unwrap();
    let words = ["a choice of another step in layer 0"];
    refused(forward(&mut step, &stream, 0, &second), &rules::SPARSE_CHOICE, &words);
    let first = choose(&mut step, &stream, 0).unwrap();
    for layer in 0..LAYERS - 1 {
        forward(&mut step, &stream, layer, &first).unwrap();
    }
    let outcome = forward(&mut step, &stream, LAYERS - 1, &first);
    refused(outcome, &rules::SPARSE_INDEX_KEYS, &["the keys of indexer 1"]);
    let second = choose(&mut step, &stream, 1).unwrap();
    forward(&mut step, &stream, LAYERS - 1, &second).unwrap();
    step.end().unwrap();
    for cache in [sparse.latents(), sparse.index_keys()] {
        assert_eq!(cache.computed_tokens(&sequence).unwrap(), 32);
    }
}

#[test]
fn steps_beyond_the_capture_leave_the_metadata_as_it_was() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let mut graphs = captured(&stream, &sparse);
    assert_eq!(graphs.sizes().collect::<Vec<_>>(), [1, 3]);
    let [short, long, many] =
        [(10, 1), (40, 1), (10, 3)].map(|(cached, new)| sequence(&stream, &mut sparse, cached, new));
    let others = [0; 3].map(|_| sequence(&stream, &mut sparse, 1, 1));
    let four: Vec<_> = others.iter().chain([&short]).map(|sequence| (sequence, 1)).collect();
    let mut bidirectional = step_of(&sparse, &[(&short, 1)]);
    bidirectional.set_mask(Causality::Bidirectional);
    let steps = [
        (step_of(&sparse, &[(&long, 1)]), &rules::GRAPH_LENGTHS, "41 keys"),
        (step_of(&sparse, &[(&many, 3)]), &rules::GRAPH_SIZE, "3 new tokens"),
        (step_of(&sparse, &four), &rules::GRAPH_SIZE, "4 requests"),
        (bidirectional, &rules::STEP_CAUSALITY, "Bidirectional"),
    ];
    for (mut metadata, rule, word) in steps {
        let tokens = metadata.tokens();
        assert!(!graphs.serves(&metadata), "{word}");
        refused(graphs.begin(&mut sparse, &stream, &mut metadata).map(drop), rule, &[word]);
        assert_eq!(metadata.tokens(), tokens);
    }
    // Nor a step of a sequence that was not cut behind tokens that moved.
    let mut moved = sequence(&stream, &mut sparse, 10, 0);
    sparse.move_tokens(&stream, &moved, [(9, 8)]).unwrap();
    sparse.grow(&stream, &mut moved, 1).unwrap();
    let mut metadata = step_of(&sparse, &[(&moved, 1)]);
    assert!(!graphs.serves(&metadata));
    let words = ["in the cache of latents"];
    refused(graphs.begin(&mut sparse, &stream, &mut metadata).map(drop), &rules::SEQUENCE_MOVED, &words);
    // Graphs replay no steps of other caches.
    let mut other = sparse_latent(&stream, &MODEL);
    let mut metadata = step_of(&sparse, &[(&short, 1)]);
    let words = ["other caches", "that was captured"];
    refused(graphs.begin(&mut other, &stream, &mut metadata).map(drop), &rules::SETTINGS_CACHE, &words);
    assert_eq!(metadata.tokens(), 1);
    // Steps without graphs begin with them.
    let metadata = step_of(&sparse, &[(&long, 1), (&many, 3)]);
    sparse.begin(&stream, &metadata).map(drop).unwrap();
}

#[test]
fn inputs_that_do_not_fit_the_capture_are_named() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let mut graphs = captured(&stream, &sparse);
    let sequence = sequence(&stream, &mut sparse, 20, 1);
    let mut metadata = step_of(&sparse, &[(&sequence, 1)]);
    drop(graphs.begin(&mut sparse, &stream, &mut metadata).unwrap());
    // The padding of a replay that was dropped counts for nothing in a step without graphs.
    let mut step = sparse.begin(&stream, &metadata).unwrap();
    let choice = step.choose(0, IndexRows::of(&stream, &[1; 6], 0).tensors()).unwrap();
    let rows = LayerRows::of(&stream, &[1; 6], 0);
    let planned = step.forward(0, rows.tensors(&choice)).unwrap().download(&stream).unwrap();
    drop(step);
    let mut step = graphs.begin(&mut sparse, &stream, &mut metadata).unwrap();
    assert_eq!(step.tokens(), 6);
    let few = stream.upload(&[bf16::ONE; 4 * 128], [1, 4, 128]).unwrap();
    let weights = stream.upload(&[bf16::ONE; 4], [1, 4]).unwrap();
    let rows = IndexRows::of(&stream, &[1], 0);
    let inputs = IndexerTensors { query: &few, weights: &weights, ..rows.tensors() };
    let words = ["index query", "[6, 8, 128]", "which may be left out", "that the graphs were captured with"];
    refused(step.choose(0, inputs), &rules::STEP_HEADS, &words);
    let none = IndexRows::of(&stream, &[], 0);
    refused(step.choose(0, none.tensors()), &rules::STEP_TOKENS, &["1 rows of the requests and 5 of padding"]);
    // A part of the padding is neither with it nor without it.
    let part = IndexRows::of(&stream, &[1; 3], 0);
    refused(step.choose(0, part.tensors()), &rules::STEP_TOKENS, &["[3, 8, 128]", "all rows", "as a whole"]);
    let weights = stream.upload(&[1f32; INDEX_HEADS], [1, INDEX_HEADS]).unwrap();
    let IndexerTensors { query, key, .. } = rows.tensors();
    let words = ["weights of FLOAT", "as the graphs were captured with"];
    refused(step.choose(0, IndexerTensors { query, weights: &weights, key }), &rules::PLAN_TENSORS, &words);
    let choice = step.choose(0, rows.tensors()).unwrap();
    // With and without the rows of padding.
    let padded = LayerRows::of(&stream, &[1; 6], 0);
    let mut output = step.forward(0, padded.tensors(&choice)).unwrap().clone();
    assert_eq!(output.shape(), [6, HEADS, LATENT]);
    let replayed = output.download(&stream).unwrap();
    let same = planned.iter().zip(&replayed).take(HEADS * LATENT);
    assert!(same.into_iter().all(|(one, other)| (one.to_f64() - other.to_f64()).abs() <= 1e-2));
    let part = LayerRows::of(&stream, &[1; 5], 1);
    refused(step.forward(1, part.tensors(&choice)).map(drop), &rules::STEP_TOKENS, &["query", "or none"]);
    let rows = LayerRows::of(&stream, &[1], 1);
    let mut other = rows.tensors(&choice);
    other.query = &rows.latent;
    refused(step.forward(1, other).map(drop), &rules::STEP_HEADS, &["query", "[6, 2, 512]", "layer 1"]);
    // The graph's output is none of the caller's, which gets a copy.
    let inputs = rows.tensors(&choice);
    refused(step.forward_into(1, inputs, &mut output), &rules::ARGUMENT_MEMORY, &["output", "that of the graph"]);
    let mut few = Tensor::empty(stream.device(), [1, HEADS, LATENT]).unwrap();
    refused(step.forward_into(1, inputs, &mut few), &rules::PLAN_TENSORS, &["output", "[6, 2, 512]"]);
    let mut own = Tensor::empty(stream.device(), [6, HEADS, LATENT]).unwrap();
    step.forward_into(1, inputs, &mut own).unwrap();
    let second = own.download(&stream).unwrap();
    assert_eq!(second, output.download(&stream).unwrap());
    let choice = step.choose(1, IndexRows::of(&stream, &[1], 1).tensors()).unwrap();
    step.forward(2, LayerRows::of(&stream, &[2], 2).tensors(&choice)).unwrap();
    assert_eq!(second, own.download(&stream).unwrap());
    assert_ne!(second, output.download(&stream).unwrap());
}

#[test]
fn captures_that_the_operators_do_not_take_are_refused() {
    let stream = harness::stream();
    let sparse = sparse_latent(&stream, &MODEL);
    let limits = GraphLimits::new([2], 40);
    let weight = Tensor::<f32>::empty(stream.device(), [4, 16]).unwrap();
    for (heads, words) in [(0, "indexer.heads"), (65, "no call has more"), (1 << 40, "such as 64")] {
        let error = sparse.capture::<bf16>(&stream, heads, &limits).unwrap_err().to_string();
        assert!(error.contains(words), "{heads}: {error}");
    }
    let sinks = [const { None::<Tensor<f32>> }; LAYERS];
    sparse.capture::<bf16>(&stream, 8, &limits.clone().learnable_sinks(sinks)).unwrap();
    let sinks = [stream.upload(&[0f32; HEADS], [HEADS]).unwrap()];
    let outcome = sparse.capture::<bf16>(&stream, 8, &limits.clone().learnable_sinks(sinks)).map(drop);
    refused(outcome, &rules::ARGUMENT_VALUE, &["sparse attention has no sinks"]);
    for (limits, rule) in [
        (GraphLimits::new([], 40), &rules::GRAPH_SIZE),
        (GraphLimits::new([0], 40), &rules::GRAPH_SIZE),
        (GraphLimits::new([usize::MAX], 40), &rules::GRAPH_SIZE),
        (GraphLimits::new([1], 0), &rules::GRAPH_LENGTHS),
        (GraphLimits::new([1], 40).blocks(0), &rules::GRAPH_LENGTHS),
        // Fewer blocks than requests, and fewer keys than tokens of a request.
        (GraphLimits::new([64], 40), &rules::GRAPH_LENGTHS),
        (GraphLimits::new([1], 16).tokens_each(40), &rules::GRAPH_LENGTHS),
        // What other layers have.
        (limits.clone().drafting(Drafting::Mtp), &rules::ARGUMENT_VALUE),
        (limits.clone().convolutions([(weight.clone(), None)]), &rules::GRAPH_INPUTS),
    ] {
        refused(sparse.capture::<bf16>(&stream, 8, &limits).map(drop), rule, &[]);
    }
    sparse.capture::<bf16>(&stream, 8, &limits).unwrap();
}

#[test]
fn a_fork_whose_copy_waits_in_one_of_the_caches_is_refused() {
    let stream = harness::stream();
    let mut sparse = sparse_latent(&stream, &MODEL);
    let mut graphs = captured(&stream, &sparse);
    let first = sequence(&stream, &mut sparse, 10, 0);
    let mut fork = first.fork();
    sparse.latents_mut().grow(&stream, &mut fork, 1).unwrap();
    let mut metadata = step_of(&sparse, &[(&fork, 1)]);
    let words = ["in the cache of index keys", "`PagedKvCache::queue_pending_copies`"];
    refused(graphs.begin(&mut sparse, &stream, &mut metadata).map(drop), &rules::BLOCK_UNCOPIED, &words);
    assert_eq!(metadata.tokens(), 1);
    // What it advises.
    sparse.index_keys_mut().queue_pending_copies(&stream, &fork).unwrap();
    graphs.begin(&mut sparse, &stream, &mut metadata).map(drop).unwrap();
}
