//! New keys and values reach their slots, wrong slots reach nothing.

use crate::harness;

use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, SlotMapping};
use ascend_attention::{Element, Error, Stream, Tensor, f16};
use harness::{halves, stream, violated};
use proptest::prelude::*;

const DIM: usize = 32;
const VALUE_DIM: usize = 16;

/// Caches as a program would hold them: slot by slot, row by row.
struct Model {
    heads: usize,
    keys: Vec<Option<Vec<f16>>>,
    values: Vec<Option<Vec<f16>>>,
}

impl Model {
    fn write(&mut self, slots: &[i64], keys: &[f16], values: &[f16]) {
        for (token, &slot) in slots.iter().enumerate() {
            if let Ok(slot) = usize::try_from(slot) {
                let row = |rows: &[f16], dim: usize| {
                    let len = self.heads * dim;
                    Some(rows[token * len..][..len].to_vec())
                };
                self.keys[slot] = row(keys, DIM);
                self.values[slot] = row(values, VALUE_DIM);
            }
        }
    }

    /// A cache `[blocks, block size, N, D]` is the rows of its slots one after the other.
    #[track_caller]
    fn check(rows: &[Option<Vec<f16>>], cache: &[f16]) {
        let len = cache.len() / rows.len();
        for (slot, row) in rows.iter().enumerate() {
            let got = &cache[slot * len..][..len];
            match row {
                Some(want) => assert_eq!(got, want, "slot {slot}"),
                None => assert!(got.iter().all(|x| x.is_nan()), "slot {slot} was written"),
            }
        }
    }
}

fn upload<T: Element>(stream: &Stream, data: &[T], shape: &[usize]) -> Tensor<T> {
    stream.upload(data, shape).unwrap()
}

fn nan(stream: &Stream, shape: &[usize]) -> Tensor<f16> {
    upload(stream, &vec![f16::NAN; shape.iter().product()], shape)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A step after the other, into layers that share a plan, against a model of the slots.
    #[test]
    fn slots_hold_the_rows_written_last(
        blocks in 1usize..5,
        block_size in 1usize..6,
        heads in 1usize..3,
        tokens in 0usize..5,
        order in Just((0..30i64).collect::<Vec<_>>()).prop_shuffle(),
        padded in prop::collection::vec(any::<bool>(), 15),
    ) {
        let stream = stream();
        let slots = blocks * block_size;
        let shape = |dim| [blocks, block_size, heads, dim];
        let mut layers: Vec<_> = (0..2).map(|_| {
            let model = Model { heads, keys: vec![None; slots], values: vec![None; slots] };
            (model, nan(&stream, &shape(DIM)), nan(&stream, &shape(VALUE_DIM)))
        }).collect();
        let free: Vec<i64> = order.into_iter().filter(|&slot| slot < slots as i64).collect();
        let mut plan = None;
        for step in 0..3 {
            // Each slot once; some tokens are padding.
            let mut mapping: Vec<i64> =
                free.iter().copied().cycle().skip(step * 2).take(tokens.min(free.len())).collect();
            for (slot, &padded) in mapping.iter_mut().zip(&padded[step * 5..]) {
                if padded {
                    *slot = -1;
                }
            }
            let tokens = mapping.len();
            let mapping_on_device =
                SlotMapping::allowing(&stream, &mapping, slots, &["slot_mapping.negative"]).unwrap();
            for (layer, (model, key_cache, value_cache)) in layers.iter_mut().enumerate() {
                let seed = (step * 10 + layer) as u64;
                let (keys, values) =
                    (halves(seed, tokens * heads * DIM), halves(seed + 5, tokens * heads * VALUE_DIM));
                let key = upload(&stream, &keys, &[tokens, heads, DIM]);
                let value = upload(&stream, &values, &[tokens, heads, VALUE_DIM]);
                let plan = plan.get_or_insert_with(|| {
                    ScatterPaKvCache::new()
                        .plan((&key, &value, &mapping_on_device, &*key_cache, &*value_cache))
                        .unwrap()
                });
                plan.launch(&stream, (&key, &value, &mapping_on_device, &*key_cache, &*value_cache)).unwrap();
                // What queued work reads may be dropped.
                drop((key, value));
                model.write(&mapping, &keys, &values);
            }
        }
        for (model, key_cache, value_cache) in &layers {
            Model::check(&model.keys, &key_cache.download(&stream).unwrap());
            Model::check(&model.values, &value_cache.download(&stream).unwrap());
        }
    }
}

#[test]
fn the_cache_is_what_attention_reads() {
    let stream = stream();
    let (heads, blocks, block_size) = (2, 2, 16);
    let rows = halves(3, heads * DIM);
    let key = upload(&stream, &rows, &[1, heads, DIM]);
    let slots = SlotMapping::new(&stream, &[17], 32).unwrap();
    // As attention names the same bytes.
    let cache = nan(&stream, &[blocks, block_size, heads * DIM]);
    let plan = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    assert_eq!(&cache.download(&stream).unwrap()[17 * heads * DIM..][..heads * DIM], rows);
    // One head: [blocks, N, block size, D] has these bytes too.
    let row = halves(4, DIM);
    let key = upload(&stream, &row, &[1, 1, DIM]);
    let cache = nan(&stream, &[blocks, 1, block_size, DIM]);
    let plan = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    assert_eq!(&cache.download(&stream).unwrap()[17 * DIM..][..DIM], row);
    // With two it does not, and the sizes say so.
    let two = upload(&stream, &halves(4, 2 * DIM), &[1, 2, DIM]);
    let cache = nan(&stream, &[blocks, 2, block_size, DIM]);
    assert_eq!(violated(ScatterPaKvCache::new().plan((&two, &slots, &cache))), "key_cache.shape");
}

#[test]
fn the_nz_order_has_units_of_32_bytes() {
    let stream = stream();
    let (heads, block_size) = (2, 3);
    let rows = halves(5, heads * DIM);
    let key = upload(&stream, &rows, &[1, heads, DIM]);
    let slots = SlotMapping::new(&stream, &[4], 6).unwrap();
    let cache = nan(&stream, &[2, heads * DIM / 16, block_size, 16]);
    let scatter = ScatterPaKvCache::new().cache_order(CacheOrder::PaNz);
    let plan = scatter.plan((&key, &slots, &cache)).unwrap();
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    let got = cache.download(&stream).unwrap();
    for (i, x) in rows.iter().enumerate() {
        let unit = heads * DIM / 16 + i / 16;
        assert_eq!(got[(unit * block_size + 1) * 16 + i % 16], *x);
    }
    assert_eq!(got.iter().filter(|x| !x.is_nan()).count(), rows.len());
}

#[test]
fn wrong_slots_never_reach_the_device() {
    let stream = stream();
    let new = |mapping: &[i64]| SlotMapping::new(&stream, mapping, 8);
    assert_eq!(violated(new(&[0, 8])), "slot_mapping.range");
    assert_eq!(violated(new(&[3, 0, 3])), "slot_mapping.unique");
    assert_eq!(violated(new(&[0, -1])), "slot_mapping.negative");
    let text = new(&[3, 0, 3]).unwrap_err().to_string();
    assert!(text.contains("tokens 0 and 2 go to slot 3"), "{text}");

    // Nothing safe lets the device write beyond the cache.
    let allowed = |lint| SlotMapping::allowing(&stream, &[1 << 20], 32, &[lint]).unwrap_err().to_string();
    let text = allowed("slot_mapping.range");
    assert!(text.contains("`from_tensor_unchecked` is unsafe"), "{text}");
    assert!(allowed("slot_mapping.unique").starts_with("slot_mapping.range"));

    let key = upload(&stream, &halves(1, 2 * DIM), &[2, 1, DIM]);
    let cache = nan(&stream, &[2, 4, 1, DIM]);
    let slots = new(&[1, 6]).unwrap();
    let bytes = (1i64 << 20).to_le_bytes().repeat(2);
    let text = slots.tensor().overwrite_bytes(&stream, &bytes).unwrap_err().to_string();
    assert!(text.contains("`SlotMapping::overwrite`"), "{text}");
    let plan = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    // Checked for a larger cache.
    let larger = SlotMapping::new(&stream, &[1, 6], 100).unwrap();
    let refused = plan.launch(&stream, (&key, &larger, &cache)).unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::Violation(violation)
                if violation.rule.id == "argument.value"
                    && violation.given.starts_with("slot_mapping: ")
        ),
        "{refused}"
    );
    assert!(ScatterPaKvCache::new().plan((&key, &larger, &cache)).is_err());
    // Overwritten with wrong ones, the right ones stay.
    assert_eq!(violated(slots.overwrite(&stream, &[7, 9])), "slot_mapping.range");
    assert!(slots.overwrite(&stream, &[7]).is_err());
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    slots.overwrite(&stream, &[0, 7]).unwrap();
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    let written: Vec<bool> = cache.download(&stream).unwrap().chunks(DIM).map(|row| !row[0].is_nan()).collect();
    assert_eq!(written, [true, true, false, false, false, false, true, true]);
    assert_eq!((slots.len(), slots.is_empty()), (2, false));
}

#[test]
fn tensors_have_to_be_as_planned() {
    let stream = stream();
    let key = upload(&stream, &halves(1, 2 * DIM), &[2, 1, DIM]);
    let slots = SlotMapping::new(&stream, &[1, 6], 8).unwrap();
    let cache = nan(&stream, &[2, 4, 1, DIM]);
    let other = nan(&stream, &[2, 4, 1, DIM]);
    let plan = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    let refused = plan.launch(&stream, (&key, &key, &slots, &cache, &other)).unwrap_err();
    assert!(refused.to_string().contains("keys alone"), "{refused}");
    let three = upload(&stream, &halves(1, 3 * DIM), &[3, 1, DIM]);
    let refused = plan.launch(&stream, (&three, &slots, &cache)).unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::Violation(violation)
                if violation.rule.id == "plan.tensors"
                    && violation.given.starts_with("key: ")
        ),
        "{refused}"
    );
    // A cache that is its own input.
    let rows = cache.reshape([8, 1, DIM]).unwrap().narrow(0, 0..2).unwrap();
    let refused = plan.launch(&stream, (&rows, &slots, &cache)).unwrap_err();
    assert!(refused.to_string().contains("shared with key"), "{refused}");
    assert_eq!(violated(ScatterPaKvCache::new().plan((&key, &three, &slots, &cache, &other))), "scatter.value_shape");
    let strided = nan(&stream, &[4, 2, 1, DIM]).permute([1, 0, 2, 3]).unwrap();
    assert_eq!(violated(ScatterPaKvCache::new().plan((&key, &slots, &strided))), "scatter.contiguous");
    assert!(cache.download(&stream).unwrap().iter().all(|x| x.is_nan()));
    // Slots from the device.
    // SAFETY: both slots are the cache's.
    let unchecked = unsafe { SlotMapping::from_tensor_unchecked(upload(&stream, &[5i32, 2], &[2])) };
    assert!(unchecked.overwrite(&stream, &[1, 2]).is_err());
    let plan = ScatterPaKvCache::new().plan((&key, &unchecked, &cache)).unwrap();
    plan.launch(&stream, (&key, &unchecked, &cache)).unwrap();
    assert!(!cache.download(&stream).unwrap()[5 * DIM].is_nan());
}

#[test]
fn no_tokens_is_no_work() {
    let stream = stream();
    let key = Tensor::<f16>::empty(stream.device(), [0, 1, DIM]).unwrap();
    let slots = SlotMapping::new(&stream, &[], 8).unwrap();
    let cache = nan(&stream, &[2, 4, 1, DIM]);
    let plan = ScatterPaKvCache::new().plan((&key, &slots, &cache)).unwrap();
    plan.launch(&stream, (&key, &slots, &cache)).unwrap();
    assert_eq!((plan.workspace_bytes(), stream.workspace_bytes()), (0, 0));
    assert!(slots.is_empty());
    assert!(cache.download(&stream).unwrap().iter().all(|x| x.is_nan()));
}
