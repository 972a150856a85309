//! Models with full and windowed layers: their groups, the room that steps need in each, and their metadata.

use std::num::NonZeroUsize;

use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, FusedAttention,
    LayerGroup, StatePolicy, rules,
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
    Backends::none().with(FusedAttention)
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

/// Says that every group has all tokens of a sequence.
fn mark_computed(model: &Attention<bf16>, sequence: &Sequence) {
    for (at, group) in model.groups().iter().enumerate() {
        let cache = group.cache();
        let part = sequence.group(at).unwrap();
        cache.mark_computed(part, part.len()).unwrap();
    }
}

#[test]
fn renewed_metadata_of_groups_is_that_made_anew_or_of_no_step() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut sequences = [5, 290].map(|tokens| {
        let mut sequence = model.sequence();
        model.grow(&stream, &mut sequence, tokens).unwrap();
        mark_computed(&model, &sequence);
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
}

#[test]
fn a_scheduler_asks_before_it_grows_whether_a_step_fits_every_group() {
    let stream = harness::stream();
    let mut attention = model(&stream);
    let mut long = attention.sequence();
    attention.grow(&stream, &mut long, 2000).unwrap();
    mark_computed(&attention, &long);
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
    let in_row = model.metadata(&[BatchRequest::in_row(&[0], 0, 5)], POLICY).unwrap_err();
    assert_eq!((in_row.rule, &*in_row.given), (&rules::GROUP_LAYERS, "a request without a sequence"));
    assert_eq!([0, 1].map(|group| sequence.group(group).map(Sequence::len)), [Some(5); 2]);
    assert!(sequence.group(2).is_none());
}
