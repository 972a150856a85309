//! The paged cache.

use std::num::NonZeroUsize;

use ascend_attention::f16;
use ascend_serving::kv::{
    Audit, AuditRequest, BlockPool, Cache, CacheShape, CacheWrite, CachedRows, PadPolicy, PageTable, PagedKvCache,
    Sequence, check_slots, kernel_blocks, slot,
};

use ascend_serving::{Causality, PrefixCache};

use crate::Call;
use crate::draw::Draw;

pub fn pad(draw: &mut Draw) -> PadPolicy {
    match draw.bool() {
        true => PadPolicy::SkipNegative,
        false => PadPolicy::DumpSlot(draw.u32()),
    }
}

pub fn row(draw: &mut Draw) -> Vec<usize> {
    draw.few(Draw::usize)
}

/// Slots, or other numbers that the device has, of which some are negative.
pub fn slots(draw: &mut Draw) -> Vec<i32> {
    draw.few(Draw::i32)
}

pub fn table(draw: &mut Draw) -> PageTable {
    let rows = draw.few(row);
    PageTable::from_rows(&rows).unwrap()
}

pub const CALLS: &[Call] = &[
    ("PadPolicy", |draw| {
        let pad = pad(draw);
        let _ = (pad.slot(), pad.check(draw.usize()));
        let _ = (
            pad.is_padding(draw.i32(), draw.usize()),
            pad.slot_of(draw.usize(), draw.usize()),
            pad.reserved_blocks(draw.usize()),
        );
    }),
    ("BlockPool and Sequence", |draw| {
        let Ok(pool) = BlockPool::new(draw.usize(), draw.usize(), pad(draw)) else {
            return;
        };
        let _ = pool.admits(draw.few(Draw::usize));
        let mut sequence = Sequence::new(&pool);
        let mut forks = Vec::new();
        for _ in 0..6 {
            let tokens = draw.usize();
            match draw.below(6) {
                0 => drop(sequence.grow(tokens)),
                1 => drop(sequence.truncate(tokens)),
                2 => drop(sequence.drop_before(tokens)),
                3 => forks.extend(sequence.share_prefix(tokens)),
                4 => forks.push(sequence.fork()),
                _ => drop(sequence.slot(tokens)),
            }
            let held = pool.held_blocks() + pool.free_blocks() + pool.waiting_blocks();
            assert_eq!(held, pool.blocks() - pool.pad_policy().reserved_blocks(pool.block_size()));
        }
    }),
    ("PrefixCache", |draw| {
        let (blocks, size) = (draw.of(&[1, 4, 9]), draw.of(&[1, 2, 5]));
        let pool = BlockPool::new(blocks, size, PadPolicy::SkipNegative).unwrap();
        let causality = match NonZeroUsize::new(draw.usize()) {
            Some(keys) if draw.bool() => Causality::Window(keys),
            Some(tokens) => Causality::Chunk(tokens),
            None => Causality::Causal,
        };
        let mut prefixes = PrefixCache::<u32>::new(&pool, causality).unwrap();
        for _ in 0..4 {
            let tokens: Vec<u32> = draw.few(|draw| draw.of(&[1, 2, 3])).repeat(3);
            let salt = draw.of(&[&b""[..], b"other"]);
            let mut sequence = prefixes.share(salt, &tokens);
            let missing = tokens.len() - sequence.len();
            if sequence.grow(missing).is_ok() {
                prefixes.insert(salt, &tokens, &sequence).unwrap();
            }
            let _ = (sequence.share_prefix(draw.usize()), sequence.truncate(draw.usize()));
            let (group, blocks) = (draw.of(&[0, 1, usize::MAX]), draw.usize());
            let counts = [
                prefixes.available_blocks(group),
                prefixes.cached_blocks(group),
                prefixes.would_evict(group, blocks).map(|would| would.len()),
            ];
            for (count, most) in counts.into_iter().zip([pool.blocks(), pool.blocks(), blocks]) {
                assert!(count.map_or(group > 0, |count| count <= most));
            }
            let _ = (prefixes.evict(group, blocks), prefixes.hit_len(salt, &tokens));
        }
    }),
    ("slot", |draw| {
        let _ = slot(&row(draw), draw.usize(), draw.usize());
    }),
    ("kernel_blocks", |draw| {
        let _ = kernel_blocks(&row(draw), draw.usize(), draw.usize());
    }),
    ("check_slots", |draw| {
        let _ = check_slots(&slots(draw), draw.usize(), draw.usize(), pad(draw));
    }),
    ("PageTable", |draw| {
        let _ = PageTable::new(draw.usize(), draw.usize(), row(draw));
        let table = table(draw);
        let _ = (table.row(draw.usize()), table.used(draw.usize(), draw.usize(), draw.usize()));
    }),
    ("a table of one long row", |draw| {
        let long = vec![0; draw.of(&[1, 4096, 1 << 20])];
        let rows: Vec<&[usize]> = (0..draw.of(&[1, 4096])).map(|_| &[][..]).chain([&long[..]]).collect();
        let _ = PageTable::from_rows(&rows);
    }),
    ("CachedRows", |draw| {
        let mut rows = CachedRows::new(draw.usize());
        for _ in 0..3 {
            let before = rows.len();
            if rows.push(&row(draw), draw.usize()..draw.usize()).is_err() {
                assert_eq!(rows.len(), before);
            }
        }
    }),
    ("Audit", |draw| {
        let requests = draw.few(|draw| AuditRequest::new(draw.usize(), draw.usize()).given_back(draw.usize()));
        let _ = Audit {
            blocks: draw.usize(),
            block_size: draw.usize(),
            pad: pad(draw),
            requests: &requests,
            table: &table(draw),
            slots: &slots(draw),
        }
        .check();
    }),
    ("PagedKvCache", |draw| {
        let stream = crate::stream();
        let formats = [Cache::BnBsH, Cache::BnNBsD, Cache::Nz];
        let shape =
            CacheShape::new(draw.usize(), draw.usize(), draw.usize()).value_dim(draw.usize()).format(draw.of(&formats));
        let (blocks, size, pad) = (draw.usize(), draw.usize(), pad(draw));
        if let Ok(mut cache) = PagedKvCache::<f16>::new(stream.device(), blocks, size, shape, pad) {
            let _ = (cache.bytes(), cache.layer(draw.usize()).is_ok());
            let _ = cache.block_table(&stream, &table(draw));
            let slots = slots(draw);
            let rows = stream.upload(&[f16::ONE; 3 * 4], [3, 2, 2]).unwrap();
            let rows = rows.narrow(0, 0..slots.len()).unwrap();
            if let Ok(write) = CacheWrite::plan(&cache, &stream, &slots, &rows, &rows) {
                let _ = cache.write(&stream, &write, draw.usize(), &rows, &rows);
            }
        }
    }),
];
