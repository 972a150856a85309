//! A paged cache in each format: tokens go where the format has them, come back the same, and attention reads them so.

use crate::harness;
use ascend_serving::rules;

use ascend_attention::attention::Inputs;
use ascend_attention::{FusedInferAttention, Layout, Stream, Tensor, bf16};
use ascend_serving::Error;
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, CachedRows, PadPolicy, PageTable, PagedKvCache};
use proptest::prelude::*;
use proptest::test_runner::Config;

const BLOCKS: usize = 5;

/// The index of a token's element, by the definition of the format.
fn place(format: Cache, (slot, head, x): (usize, usize, usize), [block_size, heads, dim]: [usize; 3]) -> usize {
    let (block, row) = (slot / block_size, slot % block_size);
    match format {
        Cache::BnBsH => (slot * heads + head) * dim + x,
        Cache::BnNBsD => ((block * heads + head) * block_size + row) * dim + x,
        // 16 elements of 16 bits are 32 bytes.
        Cache::Nz => {
            let part = (block * heads + head) * (dim / 16) + x / 16;
            (part * block_size + row) * 16 + x % 16
        }
    }
}

fn halves(seed: u64, len: usize) -> Vec<bf16> {
    let numbers = harness::numbers(seed, len);
    numbers.into_iter().map(bf16::from_f32).collect()
}

fn upload(stream: &Stream, seed: u64, shape: [usize; 3]) -> (Vec<bf16>, Tensor<bf16>) {
    let data = halves(seed, shape.iter().product());
    let tensor = stream.upload(&data, shape).unwrap();
    (data, tensor)
}

/// A cache of one layer.
fn cache(stream: &Stream, block_size: usize, shape: CacheShape, pad: PadPolicy) -> PagedKvCache<bf16> {
    PagedKvCache::new(stream.device(), BLOCKS, block_size, shape, pad).unwrap()
}

fn format() -> impl Strategy<Value = Cache> {
    prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)]
}

proptest! {
    #![proptest_config(Config { cases: 40, failure_persistence: None, ..Config::default() })]

    /// Each token's elements are where the format has them and nowhere else, padding wrote nothing but the dump slot,
    /// and gathering returns them where tokens are contiguous.
    #[test]
    fn tokens_go_to_their_slots(
        format in format(),
        (heads, block_size, dump) in (1usize..4, 1usize..20, any::<bool>()),
        // Without elements of a value: keys alone.
        dims in (1usize..4, 0usize..4),
        side_by_side in any::<bool>(),
        wanted in prop::collection::vec((any::<usize>(), any::<bool>()), 1..30),
    ) {
        let stream = harness::stream();
        let value_dim = 16 * if side_by_side { dims.0 } else { dims.1 };
        let key_dim = 16 * dims.0;
        let shape = CacheShape::new(1, heads, key_dim).value_dim(value_dim).format(format);
        let shape = if side_by_side { shape.side_by_side() } else { shape };
        let pad = if dump { PadPolicy::DumpSlot(0) } else { PadPolicy::SkipNegative };
        let mut cache = cache(&stream, block_size, shape, pad);
        let capacity = BLOCKS * block_size;
        let mut slots: Vec<i32> = Vec::new();
        let mut padded = 0;
        let dumps = pad.reserved_blocks(block_size) * block_size;
        for (slot, padding) in wanted {
            let slot = (slot % capacity) as i32;
            let padding = padding || slots.contains(&slot) || pad.is_padding(slot, block_size);
            if !padding {
                slots.push(slot);
            } else if pad == PadPolicy::SkipNegative || padded < dumps {
                slots.push(pad.slot_of(padded, block_size).unwrap());
                padded += 1;
            }
        }
        let tokens = slots.len();
        let (keys, key) = upload(&stream, 3, [tokens, heads, key_dim]);
        let (values, value) = upload(&stream, 4, [tokens, heads, value_dim]);
        let write = CacheWrite::plan(&cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();

        let layer = cache.layer(0).unwrap();
        for (rows, tensor, dim) in [(&keys, &layer.key, key_dim), (&values, &layer.value, value_dim)] {
            let size = block_size;
            let mut want = vec![bf16::ZERO; tensor.len()];
            let mut dumped = Vec::new();
            for (token, slot) in slots.iter().enumerate() {
                for at in 0..heads * dim {
                    let (head, x) = (at / dim, at % dim);
                    let Ok(slot) = usize::try_from(*slot) else { continue };
                    let place = place(format, (slot, head, x), [size, heads, dim]);
                    want[place] = rows[token * heads * dim + at];
                    if pad.is_padding(slot as i32, block_size) {
                        dumped.push(place);
                    }
                }
            }
            let got = tensor.download(&stream).unwrap();
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                prop_assert!(got == want || dumped.contains(&at), "element {at}: {got}, expected {want}");
            }
        }

        let whole = format == Cache::BnBsH || format == Cache::BnNBsD && heads == 1;
        let mut all = CachedRows::new(block_size);
        let table: Vec<usize> = (0..BLOCKS).collect();
        all.push(&table, 0..capacity).unwrap();
        let target = |dim: usize| Tensor::<bf16>::empty(stream.device(), [capacity, heads * dim]).unwrap();
        let (key, value) = (target(key_dim), target(value_dim));
        let outcome = layer.gather(&stream, &all, &key, &value);
        if !whole {
            let named = matches!(
                &outcome,
                Err(Error::Violation(violation))
                    if violation.rule.id == "argument.value"
                        && violation.given.starts_with("cache: ")
            );
            prop_assert!(named, "tokens that lie in parts");
            return Ok(());
        }
        outcome.unwrap();
        for (tensor, cache) in [(&key, &layer.key), (&value, &layer.value)] {
            prop_assert_eq!(tensor.download(&stream).unwrap(), cache.download(&stream).unwrap());
        }
        let outcome = layer.gather(&stream, &all, &key, &key.narrow(0, 0..capacity).unwrap());
        let named = matches!(
            &outcome,
            Err(Error::Violation(violation))
                if violation.rule.id == "argument.memory"
                    && violation.given.starts_with("value: ")
        );
        prop_assert!(named, "values over keys");
    }
}

#[test]
fn wrong_slots_write_nothing_in_any_format() {
    let stream = harness::stream();
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        let shape = CacheShape::new(1, 2, 16).format(format);
        let mut cache = cache(&stream, 4, shape, PadPolicy::SkipNegative);
        let (_, rows) = upload(&stream, 5, [3, 2, 16]);
        let refused = |slots: &[i32]| match CacheWrite::plan(&cache, &stream, slots, &rows, &rows) {
            Err(Error::Violation(refused)) => refused.rule,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[1, 7, 1]), &rules::SLOT_DUPLICATE);
        assert_eq!(refused(&[1, 20, 2]), &rules::SLOT_RANGE);
        assert_eq!(refused(&[1, 2]), &rules::SLOT_COUNT);
        // Rows of other heads than the cache has.
        let other = upload(&stream, 5, [3, 1, 32]).1;
        let outcome = CacheWrite::plan(&cache, &stream, &[1, 2, 3], &other, &other);
        assert!(outcome.unwrap_err().breaks(&rules::STEP_HEADS), "{format}");
        // As many rows as planned, of keys and of values.
        let write = CacheWrite::plan(&cache, &stream, &[1, 2, 3], &rows, &rows).unwrap();
        let mut other = self::cache(&stream, 4, shape, PadPolicy::SkipNegative);
        let outcome = other.write(&stream, &write, 0, &rows, &rows);
        assert!(outcome.is_err(), "slots of another pool");
        let fewer = rows.narrow(0, 0..2).unwrap();
        for (key, value) in [(&fewer, &fewer), (&rows, &fewer)] {
            let outcome = cache.write(&stream, &write, 0, key, value);
            assert!(matches!(&outcome, Err(Error::Violation(of)) if of.rule == &rules::SLOT_COUNT), "{outcome:?}");
        }
        let key = &cache.layer(0).unwrap().key;
        let key = key.download(&stream).unwrap();
        assert!(key.iter().all(|x| *x == bf16::ZERO));
    }
}

#[test]
fn copied_blocks_and_calls_are_the_same_in_every_format() {
    let stream = harness::stream();
    let mut outputs = Vec::new();
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        let shape = CacheShape::new(1, 2, 64).format(format);
        let mut cache = cache(&stream, 128, shape, PadPolicy::SkipNegative);
        let mut sequence = ascend_serving::kv::Sequence::new(cache.pool());
        let slots = sequence.grow(140).unwrap().slots;
        let (_, key) = upload(&stream, 6, [140, 2, 64]);
        let (_, value) = upload(&stream, 7, [140, 2, 64]);
        let write = CacheWrite::plan(&cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();
        // A fork writes into a block of its own.
        let mut fork = sequence.fork();
        let grown = fork.grow(1).unwrap();
        assert_eq!(grown.copies.len(), 1);
        cache.copy_blocks(&stream, &grown.copies).unwrap();
        drop(sequence);
        let table = PageTable::from_rows(&[fork.row()]).unwrap();
        let table = cache.block_table(&stream, &table).unwrap();
        let query = upload(&stream, 8, [3, 4, 64]).1;
        let layer = cache.layer(0).unwrap();
        let inputs = Inputs::new(&query, &layer.key, &layer.value).paged(&table);
        let plan = FusedInferAttention::new(Layout::Tnd)
            .heads(4)
            .kv_heads(2)
            .scale(0.125)
            .actual_seq_lengths([3])
            .actual_seq_lengths_kv([140])
            .plan(inputs)
            .unwrap();
        let output = plan.launch(&stream, inputs).unwrap();
        outputs.push(output.attention.download(&stream).unwrap());
    }
    assert_eq!(outputs[0], outputs[1]);
    assert_eq!(outputs[0], outputs[2]);
    assert!(outputs[0].iter().any(|x| *x != bf16::ZERO));
}
