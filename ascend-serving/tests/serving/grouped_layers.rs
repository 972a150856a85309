//! Models with full and windowed layers: their groups, the room that steps need in each, and their metadata.

use std::num::NonZeroUsize;

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, DraftTree, GraphLimits, LayerGroup, LayerInputs, LayerMask, StatePolicy, TreeRequest, TreeVerification,
    rules,
};

use crate::harness;
use crate::tokens::DIM;

pub const KV_HEADS: usize = 2;
pub const HEADS: usize = 4;
pub const WINDOW: usize = 150;
pub const POLICY: StatePolicy = StatePolicy::new(true, None);

pub fn shape() -> AttentionShape {
    AttentionShape::new(HEADS, KV_HEADS, DIM)
}

pub fn backends() -> Backends<bf16> {
    Backends::none().with(Backend::Fused)
}

pub fn cache(stream: &Stream, layers: usize, blocks: usize) -> PagedKvCache<bf16> {
    cache_of(stream, layers, blocks, Cache::BnBsH, PadPolicy::SkipNegative)
}

fn cache_of(stream: &Stream, layers: usize, blocks: usize, format: Cache, pad: PadPolicy) -> PagedKvCache<bf16> {
    let shape = CacheShape::new(layers, KV_HEADS, DIM).format(format);
    PagedKvCache::new(stream.device(), blocks, 128, shape, pad).unwrap()
}

pub fn attention(stream: &Stream, layers: usize, blocks: usize) -> Attention<bf16> {
    Attention::new(shape(), cache(stream, layers, blocks), backends())
}

pub fn attention_over(stream: &Stream, layers: usize, blocks: usize, format: Cache, pad: PadPolicy) -> Attention<bf16> {
    Attention::new(shape(), cache_of(stream, layers, blocks, format, pad), backends())
}

/// A model of two full layers and three windowed ones.
pub fn model(stream: &Stream) -> Attention<bf16> {
    with_full_layers(stream, cache(stream, 2, 40), backends())
}

pub fn with_full_layers(stream: &Stream, full: PagedKvCache<bf16>, of_full: Backends<bf16>) -> Attention<bf16> {
    let window = Causality::Window(NonZeroUsize::new(WINDOW).unwrap());
    let full = LayerGroup::new([1, 4], Causality::Causal, shape(), full, of_full);
    let windowed = LayerGroup::new([0, 2, 3], window, shape(), cache(stream, 3, 20), backends());
    Attention::of_groups(5, [full, windowed]).unwrap()
}

/// Query, key and value of tokens whose numbers are their places in the step.
fn numbered(stream: &Stream, tokens: usize) -> [Tensor<bf16>; 3] {
    [HEADS, KV_HEADS, KV_HEADS].map(|heads| {
        let rows = (0..tokens).flat_map(|token| vec![bf16::from_f32(token as f32); heads * DIM]);
        stream.upload(&rows.collect::<Vec<_>>(), [tokens, heads, DIM]).unwrap()
    })
}

#[test]
fn renewed_metadata_of_groups_is_that_made_anew_or_of_no_step() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequences = [5, 290].map(|tokens| {
        let mut sequence = model.sequence();
        model.grow(&stream, &mut sequence, tokens).unwrap();
        model.mark_computed(&sequence, tokens).unwrap();
        sequence
    });
    let first = [BatchRequest::of(&sequences[0], 5)];
    let mut metadata = model.metadata(&first, POLICY).unwrap();
    for sequence in &mut sequences {
        model.grow(&stream, sequence, 2).unwrap();
    }
    let both = [BatchRequest::of(&sequences[1], 2).drafts(1), BatchRequest::of(&sequences[0], 2)];
    metadata.pad_to(9).unwrap();
    metadata.renew(&both).unwrap();
    assert_eq!(metadata, model.metadata(&both, POLICY).unwrap());
    assert_eq!((metadata.requests(), metadata.tokens()), (2, 4));
    // The second group has given back the tokens that this request calls new.
    let all = [BatchRequest::of(&sequences[1], 292)];
    assert!(metadata.renew(&all).is_err());
    assert_eq!((metadata.requests(), metadata.tokens()), (0, 0));
    assert_eq!(metadata.group(1).map(AttentionMetadata::requests), Some(0));
}

#[test]
fn a_growth_that_one_group_has_no_room_for_grows_none() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 100).unwrap();
    // 20 blocks of the windowed group hold no chunk of 3000 tokens; 40 of the full one do.
    let error = model.grow(&stream, &mut sequence, 3000).unwrap_err();
    assert!(error.breaks(&rules::POOL_EXHAUSTED), "{error}");
    assert_eq!(sequence.len(), 100);
    assert_eq!([0, 1].map(|group| sequence.group(group).unwrap().len()), [100, 100]);
    let pools = model.groups().iter().map(|g| g.cache().pool().held_blocks());
    assert_eq!(pools.collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn layers_are_in_one_group_each() {
    let stream = harness::stream();
    let rule = |layers, sets: &[(&[usize], usize)]| {
        let groups = sets.iter().map(|(layers, cached)| {
            let cache = cache(&stream, *cached, 4);
            LayerGroup::new(layers.iter().copied(), Causality::Causal, shape(), cache, backends())
        });
        Attention::of_groups(layers, groups).map(drop).unwrap_err().rule
    };
    assert_eq!(rule(0, &[]), &rules::GROUP_LAYERS);
    assert_eq!(rule(3, &[(&[0, 1], 2)]), &rules::GROUP_LAYERS);
    assert_eq!(rule(2, &[(&[0, 2], 2)]), &rules::GROUP_LAYERS);
    assert_eq!(rule(2, &[(&[0], 1), (&[0], 1)]), &rules::GROUP_LAYERS);
    assert_eq!(rule(2, &[(&[0, 1], 1)]), &rules::GROUP_LAYERS);
    let first = cache(&stream, 1, 4);
    let second = cache(&stream, 1, 4).with_pool(first.pool()).unwrap();
    let groups = [(0, first), (1, second)];
    let groups = groups.map(|(layer, cache)| LayerGroup::new([layer], Causality::Causal, shape(), cache, backends()));
    let refused = Attention::of_groups(2, groups).map(drop).unwrap_err();
    assert_eq!(refused.rule, &rules::GROUP_LAYERS);
    assert!(refused.given.starts_with("two groups of"), "{refused}");
}

#[test]
fn layers_prefer_backends_by_their_numbers_in_the_model() {
    let stream = harness::stream();
    let prefer = |layer: usize| {
        let both = backends().with(Backend::PagedDecode);
        both.prefer([layer], &[AttentionState::DecodeOnly], "paged_decode").unwrap()
    };
    let mut model = with_full_layers(&stream, cache(&stream, 2, 40), prefer(4));
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 5).unwrap();
    model.mark_computed(&sequence, 5).unwrap();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let metadata = model.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    let [query, key, value] = numbered(&stream, 1);
    let mut step = model.begin(&stream, &metadata).unwrap();
    for layer in [1, 4] {
        step.forward(layer, (&query, &key, &value)).unwrap();
    }
    let served = [1, 4].map(|layer| step.selected(layer).unwrap().name);
    assert_eq!(served, ["fused", "paged_decode"]);
    let group =
        |layer, prefers| LayerGroup::new([layer], Causality::Causal, shape(), cache(&stream, 1, 4), prefer(prefers));
    let refused = Attention::of_groups(2, [group(0, 0), group(1, 0)]).map(drop).unwrap_err();
    assert_eq!((refused.rule, &*refused.given), (&rules::BACKEND_LAYERS, "a preference of layer 0"));
}

/// A step may compute fewer tokens than its sequence has grown by: every group leaves out the same ones.
#[test]
fn a_step_is_of_the_same_tokens_in_each_group() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 10).unwrap();
    for cached in [0, 5] {
        let mut request = BatchRequest::of(&sequence, 5);
        request.cached = cached;
        let metadata = model.metadata(&[request], POLICY).unwrap();
        let lengths = [0, 1].map(|group| metadata.group(group).unwrap().kv_lengths().lengths().to_vec());
        assert_eq!(lengths, [[cached + 5], [cached + 5]]);
    }
    model.grow(&stream, &mut sequence, 390).unwrap();
    model.mark_computed(&sequence, 400).unwrap();
    model.grow(&stream, &mut sequence, 1).unwrap();
    // The windowed group has given back 128 tokens, these among them.
    let mut request = BatchRequest::of(&sequence, 5).recompute();
    request.cached = 100;
    let refused = model.metadata(&[request], POLICY).unwrap_err();
    assert_eq!(refused.rule, &rules::SEQUENCE_LENGTH);
    assert_eq!(refused.given, "5 new tokens in front of 296 others, in group 1 of the layers");
}

#[test]
fn the_tokens_of_a_sequence_are_counted_and_moved_in_every_group() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 5).unwrap();
    let metadata = model.metadata(&[BatchRequest::of(&sequence, 5)], POLICY).unwrap();
    let [query, key, value] = numbered(&stream, 5);
    let mut step = model.begin(&stream, &metadata).unwrap();
    for layer in 0..5 {
        step.forward(layer, (&query, &key, &value)).unwrap();
    }
    step.end().unwrap();
    assert_eq!(model.computed_tokens(&sequence), Ok(5));
    model.queue_pending_copies(&stream, &sequence).unwrap();
    model.move_tokens(&stream, &sequence, [(4, 1)]).unwrap();
    for (at, group) in model.groups().iter().enumerate() {
        let keys = group.cache().layer(0).unwrap().key.download(&stream).unwrap();
        let slot = sequence.group(at).unwrap().slot(1).unwrap();
        assert_eq!(keys[slot * KV_HEADS * DIM], bf16::from_f32(4.0), "group {at}");
    }
    let fork = sequence.group(1).unwrap().fork();
    let shared = model.move_tokens(&stream, &sequence, [(3, 0)]).unwrap_err();
    assert!(shared.breaks(&rules::TABLE_SHARED), "{shared}");
    let keys = model.cache().layer(0).unwrap().key.download(&stream).unwrap();
    assert_eq!(keys[sequence.slot(0).unwrap() * KV_HEADS * DIM], bf16::ZERO);
    drop(fork);
    model.grow(&stream, &mut sequence, 3).unwrap();
    model.groups()[1].cache().mark_computed(sequence.group(1).unwrap(), 8).unwrap();
    assert_eq!(model.computed_tokens(&sequence), Ok(5));
    model.mark_computed(&sequence, 8).unwrap();
    assert_eq!(model.computed_tokens(&sequence), Ok(8));
    let single = Sequence::new(model.cache().pool());
    assert_eq!(model.computed_tokens(&single).unwrap_err().rule, &rules::GROUP_LAYERS);
}

#[test]
fn a_mask_shows_no_more_than_the_group_of_its_layer() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let window = |keys| Causality::Window(NonZeroUsize::new(keys).unwrap());
    let (causal, narrow): (LayerMask, LayerMask) = (Causality::Causal.into(), window(20).into());
    let limits = GraphLimits::new([2], 300);
    let wide = model.capture(&stream, causal.clone(), &limits).map(drop).unwrap_err();
    assert!(wide.breaks(&rules::STEP_CAUSALITY), "{wide}");
    let mut graphs = model.capture(&stream, narrow.clone(), &limits).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 5).unwrap();
    model.mark_computed(&sequence, 5).unwrap();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = model.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    metadata.set_mask(causal.clone());
    let masks = |metadata: &AttentionMetadata| [0, 1].map(|group| metadata.group(group).unwrap().mask().clone());
    assert_eq!(masks(&metadata), [causal.clone(), model.mask(0)]);
    // The captured layers see less than their groups do, whose steps have the masks of the groups.
    assert!(graphs.serves(&metadata));
    drop(graphs.begin(&stream, &mut metadata.clone()).unwrap());
    metadata.set_mask(window(10));
    assert!(!graphs.serves(&metadata));
    metadata.set_mask(narrow.clone());
    assert_eq!(masks(&metadata), [narrow.clone(), narrow.clone()]);
    assert!(graphs.serves(&metadata));
    let choice = model.backend_choice(&stream, &metadata, 0, Some(&causal), None).map(drop).unwrap_err();
    assert!(choice.breaks(&rules::STEP_CAUSALITY), "{choice}");
    let [query, key, value] = numbered(&stream, 1);
    let inputs = LayerInputs::from((&query, &key, &value));
    let mut step = model.begin(&stream, &metadata).unwrap();
    let wide = step.forward(0, inputs.mask(&causal)).unwrap_err();
    assert!(wide.breaks(&rules::STEP_CAUSALITY), "{wide}");
    step.forward(1, inputs.mask(&causal)).unwrap();
    step.forward(0, inputs.mask(&narrow)).unwrap();
}

#[test]
fn a_scheduler_asks_before_it_grows_whether_a_step_fits_every_group() {
    let stream = harness::stream();
    let mut attention = model(&stream);
    let mut long = attention.sequence();
    attention.grow(&stream, &mut long, 2000).unwrap();
    attention.mark_computed(&long, 2000).unwrap();
    // 20 blocks each of the 40; of the windowed ones what 2000 tokens leave is given back before.
    attention.admits([(&long, 560), (&long, 560)]).unwrap();
    let full = attention.admits([(&long, 560), (&long, 561)]).unwrap_err();
    assert_eq!(full.rule, &rules::BATCH_BLOCKS);
    assert!(full.given.starts_with("41 blocks"), "{full}");
    // 21 blocks, for which the cache of the windowed layers is too small.
    let new = attention.sequence();
    let windowed = attention.admits([(&new, 2561)]).unwrap_err();
    assert!(windowed.given.starts_with("21 blocks"), "{windowed}");
    // It counts as the step's tables do: the window begins in the block of token 1851.
    attention.grow(&stream, &mut long, 300).unwrap();
    attention.admits([(&long, 0)]).unwrap();
    let step = attention.metadata(&[BatchRequest::of(&long, 300)], POLICY).unwrap();
    let keys = |group: usize| step.group(group).unwrap().kv_lengths().lengths().to_vec();
    assert_eq!((keys(0), keys(1)), (vec![2300], vec![2300 - 1792]));
    let single = Sequence::new(attention.cache().pool());
    assert_eq!(attention.admits([(&single, 1)]).unwrap_err().rule, &rules::GROUP_LAYERS);
    let other = model(&stream).sequence();
    assert_eq!(attention.admits([(&other, 1)]).unwrap_err().rule, &rules::BLOCK_POOL);
}

/// Blocks are given back in front of the window of the first token that is not computed, however often a sequence grew.
#[test]
fn tokens_that_no_step_has_computed_stay_in_a_window() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 400).unwrap();
    model.grow(&stream, &mut sequence, 300).unwrap();
    let step = |model: &mut Attention<bf16>, sequence: &Sequence, new| {
        let metadata = model.metadata(&[BatchRequest::of(sequence, new)], POLICY).unwrap();
        let rows = |heads| stream.upload(&vec![bf16::ONE; new * heads * DIM], [new, heads, DIM]).unwrap();
        let mut step = model.begin(&stream, &metadata).unwrap();
        for layer in 0..5 {
            step.forward(layer, (&rows(HEADS), &rows(KV_HEADS), &rows(KV_HEADS))).unwrap();
        }
        step.end().unwrap();
    };
    step(&mut model, &sequence, 700);
    model.grow(&stream, &mut sequence, 1).unwrap();
    assert_eq!(sequence.group(1).unwrap().given_back(), 512);
    step(&mut model, &sequence, 1);
}

#[test]
fn a_sequence_of_several_groups_serves_all_of_them_or_none() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 5).unwrap();
    assert_eq!(sequence.grow(1).unwrap_err().rule, &rules::GROUP_LAYERS);
    assert_eq!(sequence.drop_before(1).unwrap_err().rule, &rules::GROUP_LAYERS);
    let alone = attention(&stream, 2, 40).grow(&stream, &mut sequence, 1).unwrap_err();
    assert!(alone.breaks(&rules::GROUP_LAYERS), "{alone}");
    let settings = BatchSettings::of(model.cache(), Causality::Causal);
    let first = AttentionMetadata::new(&[BatchRequest::of(&sequence, 5)], settings).unwrap_err();
    assert_eq!(first.rule, &rules::GROUP_LAYERS);
    let cache = model.cache_mut();
    assert_eq!(cache.computed_tokens(&sequence).unwrap_err().rule, &rules::GROUP_LAYERS);
    assert_eq!(cache.mark_computed(&sequence, 5).unwrap_err().rule, &rules::GROUP_LAYERS);
    let moved = cache.move_tokens(&stream, &sequence, [(1, 0)]).unwrap_err();
    assert!(moved.breaks(&rules::GROUP_LAYERS), "{moved}");
    let copied = cache.queue_pending_copies(&stream, &sequence).unwrap_err();
    assert!(copied.breaks(&rules::GROUP_LAYERS), "{copied}");
    let tree = DraftTree::from_parents(&[-1, 0]).unwrap();
    let requests = [TreeRequest { sequence: &sequence, cached: 5, tree: &tree }];
    let trees = TreeVerification::new(shape()).begin(&stream, cache, &requests).map(drop).unwrap_err();
    assert!(trees.breaks(&rules::GROUP_LAYERS), "{trees}");
    let in_row = model.metadata(&[BatchRequest::in_row(&[0], 0, 5)], POLICY).unwrap_err();
    assert_eq!((in_row.rule, &*in_row.given), (&rules::GROUP_LAYERS, "a request without a sequence"));
    assert_eq!([0, 1].map(|group| sequence.group(group).map(Sequence::len)), [Some(5); 2]);
    assert!(sequence.group(2).is_none());
}
