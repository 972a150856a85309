//! Sizes that cannot exist, each with the refusal that it gets.

use ascend_attention::attention::PerRequest;
use ascend_attention::{Tensor, bf16, f16};
use ascend_serving::kv::{
    Audit, AuditRequest, BlockPool, CacheShape, PadPolicy, PageTable, PagedKvCache, kernel_blocks,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, Causality, CustomMask, DraftTree,
    Error, GraphLimits, LayerGroup, TokenIndices, rules,
};

#[test]
fn a_dump_slot_outside_the_pool_is_refused() {
    for (slot, size) in [(u32::MAX, 1), (u32::MAX, 128), (512, 128), (1 << 31, 128)] {
        let refused = BlockPool::new(4, size, PadPolicy::DumpSlot(slot)).unwrap_err();
        assert_eq!(refused.rule, &rules::PAD_SLOT, "{slot} {size}");
    }
    let last = BlockPool::new(4, 128, PadPolicy::DumpSlot(511)).unwrap_err();
    assert_eq!(last.rule, &rules::POOL_SIZE, "no block is left for sequences");
    assert!(last.given.contains("DumpSlot(511)"), "{last}");
    assert!(last.fix.contains("small dump slot such as 0"), "{last}");
}

#[test]
fn a_pool_of_billions_of_blocks_is_refused() {
    let refused = BlockPool::new(i32::MAX as usize, 1, PadPolicy::SkipNegative).unwrap_err();
    assert_eq!(refused.rule, &rules::POOL_SIZE);
    let more = BlockPool::MAX_BLOCKS;
    let refused = BlockPool::new(more, 1, PadPolicy::SkipNegative).unwrap_err();
    assert_eq!(refused.rule, &rules::POOL_SIZE, "more than this program may allocate");
}

#[test]
fn a_cache_of_more_layers_than_any_model_is_refused() {
    let _turn = crate::turn();
    let shape = CacheShape::new(usize::MAX, 1, 1);
    let device = crate::device();
    let cache = PagedKvCache::<f16>::new(&device, 1, 1, shape, PadPolicy::SkipNegative);
    assert!(matches!(&cache, Err(Error::Violation(violation)) if violation.rule.id == "argument.value"));
}

#[test]
fn the_last_slot_becomes_a_page() {
    let last = TokenIndices::new(vec![0, 1], vec![i32::MAX]).unwrap();
    let (table, lengths) = last.to_table(1).unwrap();
    assert_eq!((table.blocks(), lengths.lengths()), (&[i32::MAX as usize][..], &[1][..]));
}

#[test]
fn an_audit_of_a_request_at_the_last_position_ends() {
    let audit = Audit {
        blocks: 1,
        block_size: i32::MAX as usize,
        pad: PadPolicy::SkipNegative,
        requests: &[AuditRequest::new(i32::MAX as usize, 0)],
        table: &PageTable::from_rows(&[[0]]).unwrap(),
        slots: &[],
    };
    assert_eq!(audit.check(), Ok(()));
}

#[test]
fn masks_of_trees_behind_absurd_contexts_are_refused() {
    let trees = [DraftTree::chain(2).unwrap()];
    for cached in [1 << 40, PerRequest::MAX_LENGTH] {
        let cached = PerRequest::new(vec![cached]).unwrap();
        let mask = CustomMask::of_trees(&trees, Some(&cached));
        assert_eq!(mask.unwrap_err().rule, &rules::LENGTHS_OVERFLOW);
    }
}

#[test]
fn extents_are_compared_with_the_words_before_anything_is_unpacked() {
    let rows = CustomMask::unpack::<u8>(&[], &[0, 0], &[(usize::MAX, 0)]).unwrap();
    assert_eq!(rows.extent(0), (usize::MAX, 0));
    for extents in [&[(usize::MAX, 0), (1, 0)][..], &[(1, usize::MAX)], &[(usize::MAX, 9)]] {
        let refused = CustomMask::unpack(&[0u8], &[0, 1], extents).unwrap_err();
        assert_eq!(refused.rule, &rules::MASK_SHAPE, "{extents:?}");
    }
}

#[test]
fn a_block_of_billions_of_kernel_blocks_is_refused() {
    const MOST: usize = 1 << 16;
    for blocks in [MOST + 1, usize::MAX] {
        assert_eq!(kernel_blocks(&[], blocks, 1).unwrap_err().rule, &rules::BLOCK_SPLIT);
    }
    assert_eq!(kernel_blocks(&[1], MOST, 1).unwrap().len(), MOST);
    let rows = kernel_blocks(&[0; 4096], MOST, 1).unwrap_err();
    assert_eq!(rows.rule, &rules::TABLE_ROW, "more than this program may allocate");
}

#[test]
fn endless_lists_are_cut_and_refused() {
    let _turn = crate::turn();
    let stream = crate::stream();
    let parts = |layers: usize| {
        let shape = CacheShape::new(layers, 1, 64);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, pad).unwrap();
        (AttentionShape::new(1, 1, 64), cache, Backends::none().with(Backend::Fused))
    };
    let group = |layers: usize, named: usize| {
        let (shape, cache, backends) = parts(layers);
        LayerGroup::new(0..named, Causality::Causal, shape, cache, backends)
    };
    let all = group(1, usize::MAX);
    assert_eq!(all.layers().len(), CacheShape::MAX_LAYERS + 1);
    let layers = all.layers().len();
    let refused = Attention::of_groups(layers, [all]).unwrap_err();
    assert_eq!(refused.rule, &rules::GROUP_LAYERS);

    let groups = std::iter::repeat_with(|| group(0, 0));
    let refused = Attention::of_groups(1, groups).unwrap_err();
    assert_eq!(refused.rule, &rules::GROUP_LAYERS);
    let backends = Backends::<bf16>::none().with(Backend::Fused);
    let refused = backends.prefer(std::iter::repeat(0), &AttentionState::ALL, "fused").unwrap_err();
    assert_eq!(refused.rule, &rules::BACKEND_LAYERS);

    let (shape, cache, backends) = parts(1);
    let attention = Attention::new(shape, cache, backends);
    let pool = attention.cache().pool();
    for (len, rule) in [(1, &rules::BATCH_BLOCKS), (0, &rules::LENGTHS_OVERFLOW)] {
        let refused = pool.admits(std::iter::repeat(len)).unwrap_err();
        assert_eq!(refused.rule, rule, "{refused}");
    }
    let capture = |limits: GraphLimits| {
        let captured = attention.capture(&stream, Causality::Causal, &limits);
        captured.map(drop).unwrap_err()
    };
    for limits in [
        GraphLimits::new(1..=usize::MAX, 128),
        GraphLimits::new(0..=usize::MAX, 128),
        GraphLimits::new(std::iter::repeat(1), 128),
        GraphLimits::new([usize::MAX], 128),
        GraphLimits::new([AttentionMetadata::MAX_TOKENS + 1], 128),
    ] {
        let refused = capture(limits);
        assert!(refused.breaks(&rules::GRAPH_SIZE), "{refused}");
    }
    let sink: Tensor<bf16> = Tensor::empty(stream.device(), [1]).unwrap();
    let endless = std::iter::repeat(sink);
    let refused = capture(GraphLimits::new([1], 128).learnable_sinks(endless));
    assert!(matches!(&refused, Error::Violation(violation) if violation.rule.id == "argument.value"), "{refused}");
    // As many tokens as may be, for a cache that has not a block for each.
    let most = GraphLimits::new([AttentionMetadata::MAX_TOKENS], 128);
    drop(capture(most));
}
