//! The paged cache.

use ascend_attention::f16;
use ascend_serving::kv::{
    Audit, AuditRequest, BlockPool, Cache, CacheShape, CacheWrite, CachedRows, Interleave,
    KernelBlocks, PadPolicy, PageTable, PagedKvCache, Sequence, check_slots, slot,
};

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
            assert_eq!(
                held,
                pool.blocks() - pool.pad_policy().reserved_blocks(pool.block_size())
            );
        }
    }),
    ("slot", |draw| {
        let _ = slot(&row(draw), draw.usize(), draw.usize());
    }),
    ("Interleave", |draw| {
        if let Ok(share) = Interleave::new(draw.usize(), draw.usize()) {
            let _ = (
                share.rank_of(draw.usize()),
                share.local_len(draw.usize(), draw.usize()),
            );
            let _ = share.slot(&row(draw), draw.usize(), draw.usize(), draw.usize());
        }
    }),
    ("KernelBlocks", |draw| {
        if let Ok(blocks) = KernelBlocks::new(draw.usize(), draw.usize()) {
            let _ = blocks.split_row(&row(draw));
        }
    }),
    ("check_slots", |draw| {
        let _ = check_slots(&slots(draw), draw.usize(), draw.usize(), pad(draw));
    }),
    ("PageTable", |draw| {
        let _ = PageTable::new(draw.usize(), draw.usize(), row(draw));
        let table = table(draw);
        let _ = (
            table.row(draw.usize()),
            table.used(draw.usize(), draw.usize(), draw.usize()),
        );
    }),
    ("a table of one long row", |draw| {
        let long = vec![0; draw.of(&[1, 4096, 1 << 20])];
        let rows: Vec<&[usize]> = (0..draw.of(&[1, 4096]))
            .map(|_| &[][..])
            .chain([&long[..]])
            .collect();
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
        let requests = draw.few(|draw| AuditRequest {
            cached: draw.usize(),
            given_back: draw.usize(),
            new: draw.usize(),
        });
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
        let shape = CacheShape::new(draw.usize(), draw.usize(), draw.usize())
            .value_dim(draw.usize())
            .format(draw.of(&formats));
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
