//! The contract's formulas.

use std::num::NonZeroU64;

use ascend_attention::SparseMode;
use ascend_attention::spec::geometry::{
    CompressedMask, ContextShard, Lengths, LocalChunks, MaskGeometry, RankRows, Sparsity, TokenTree, Visibility,
};
use ascend_attention::spec::ops::scatter_pa_kv_cache::slot_faults;

use crate::Call;
use crate::draw::Draw;

/// Everything that can be asked, at any place.
fn ask(mask: &impl Visibility, draw: &mut Draw) {
    let (i, j) = (draw.u64(), draw.u64());
    let (rows, keys) = (i..draw.u64(), j..draw.u64());
    mask.each_run(i, &mut |run| assert!(run.start < run.end));
    let _ = (mask.q_len(), mask.kv_len(), mask.sees(i, j));
    let _ = (mask.tile(rows, keys), mask.visible());
}

pub fn nonzero(draw: &mut Draw) -> NonZeroU64 {
    NonZeroU64::new(draw.u64()).unwrap_or(NonZeroU64::MIN)
}

pub fn local(draw: &mut Draw) -> LocalChunks {
    LocalChunks::new(nonzero(draw), draw.u64(), draw.u64())
}

pub fn rank_rows(draw: &mut Draw) -> RankRows {
    let (ranks, run, rank) = (nonzero(draw), nonzero(draw), draw.u64());
    let shard = ContextShard::new(ranks, run, rank).or_else(|| ContextShard::new(ranks, run, rank % ranks)).unwrap();
    let _ = shard.local_len(draw.u64());
    shard.rows(draw.u64(), draw.u64())
}

pub fn mode(draw: &mut Draw) -> SparseMode {
    draw.of(&SparseMode::ALL)
}

pub fn bands(draw: &mut Draw) -> MaskGeometry {
    let (q, kv) = (draw.u64(), draw.u64());
    match draw.below(3) {
        0 => MaskGeometry::full(q, kv),
        1 => MaskGeometry::prefix(q, kv, draw.u64()),
        _ => MaskGeometry::new(mode(draw), draw.bool(), q, kv, draw.i64(), draw.i64()),
    }
}

pub const CALLS: &[Call] = &[
    ("MaskGeometry", |draw| {
        let bands = bands(draw);
        ask(&bands, draw);
        let _ = (bands.row(draw.u64()), bands.runs(draw.u64()).count());
        let _ = bands.span(draw.u64()..draw.u64());
    }),
    ("LocalChunks", |draw| {
        let local = local(draw);
        ask(&local, draw);
        let _ = local.virtual_sequences().take(9).count();
    }),
    ("ContextShard", |draw| {
        let rows = rank_rows(draw);
        ask(&rows, draw);
    }),
    ("TokenTree", |draw| {
        let _ = TokenTree::chain(draw.usize());
        let parents = draw.few(|draw| draw.of(&[-1, 0, 1, i64::MIN, i64::MAX]));
        if let Ok(tree) = TokenTree::new(&parents) {
            let (a, b) = (draw.usize(), draw.usize());
            let _ = (tree.parent(a), tree.depth(a), tree.continues(a, b), tree.path(a));
            ask(&tree.behind(draw.u64()), draw);
        }
    }),
    ("CompressedMask", |draw| {
        let template = draw.of(&CompressedMask::ALL);
        let _ = template.hides(draw.u64(), draw.u64());
    }),
    ("TriangleMix", |draw| {
        let (sizes, part, rows) = draw.triangle();
        let _ = (sizes.leaves_out(rows), rows.keys());
        let _ = sizes.first_sparse_row(draw.u64());
        ask(&sizes.geometry(part, rows), draw);
    }),
    ("Sparsity", |draw| {
        let (q_ends, kv_ends) = (draw.few(Draw::i64), draw.few(Draw::i64));
        let lengths = match draw.bool() {
            true => Lengths::Packed { q_ends: &q_ends, kv_ends: &kv_ends },
            false => Lengths::Dense { batch: draw.usize(), q_len: draw.u64(), kv_len: draw.u64() },
        };
        let prefix = draw.few(Draw::i64);
        let mut sparsity = Sparsity::new(mode(draw), lengths);
        (sparsity.pre_tokens, sparsity.next_tokens) = (draw.i64(), draw.i64());
        sparsity.prefix = &prefix;
        ask(&sparsity.geometry(draw.usize()), draw);
    }),
    ("slot_faults", |draw| {
        let slots = draw.few(Draw::i64);
        slot_faults(&slots, draw.u64(), &mut |fault| drop(fault.violation()));
    }),
];
