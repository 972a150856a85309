//! Keys and values out of a paged cache: the golden cases, and what is refused before anything is launched.

use std::path::Path;

use ascend_attention::gather::{GatherPaKvCache, SequenceBlocks};
use ascend_attention::rules;
use ascend_attention::scatter::CacheOrder;
use ascend_attention::spec::Cann;
use ascend_attention::{Element, Error, Stream, Tensor, bf16, f16};

use crate::harness;
use harness::violated;

/// Gathers a golden case of the folder `ASCEND_VECTORS` in its own element type, and gives keys and values as F32.
fn gathered<T: Element>(
    stream: &Stream,
    file: &safetensors::SafeTensors<'_>,
    (order, cumulative, skip): (CacheOrder, bool, bool),
    element: fn(&[u8]) -> T,
    number: fn(T) -> f32,
) -> [Vec<f32>; 2] {
    let ints = |name| -> Vec<usize> {
        let Ok(tensor) = file.tensor(name) else {
            return Vec::new();
        };
        let (ints, _) = tensor.data().as_chunks::<4>();
        let ints = ints.iter().map(|int| i32::from_le_bytes(*int));
        ints.map(|int| usize::try_from(int).unwrap()).collect()
    };
    let cache = |name| -> Tensor<T> {
        let tensor = file.tensor(name).unwrap();
        let elements: Vec<T> = tensor.data().chunks(size_of::<T>()).map(element).collect();
        stream.upload(&elements, tensor.shape()).unwrap()
    };
    let (key, value) = (cache("key_cache"), cache("value_cache"));
    let block_size = key.shape()[if order == CacheOrder::PaNz { 2 } else { 1 }];
    let lens = ints("seq_lens");
    let lengths: Vec<usize> = match cumulative {
        true => lens.windows(2).map(|ends| ends[1] - ends[0]).collect(),
        false => lens,
    };
    let columns = file.tensor("block_tables").unwrap().shape()[1];
    let table = ints("block_tables");
    let offsets = ints("seq_offset");
    let rows: Vec<&[usize]> = table
        .chunks(columns)
        .enumerate()
        .map(|(b, row)| match skip {
            // Blocks before the offset are left out of the table.
            true => &row[offsets.get(b).map_or(0, |offset| offset / block_size)..],
            false => row,
        })
        .collect();
    let blocks = key.shape()[0];
    let sequences = SequenceBlocks::new(stream, &rows, &lengths, blocks, block_size).unwrap();
    let call = GatherPaKvCache::new().cache_order(order);
    let plan = call.plan(&sequences, (&key, &value)).unwrap();
    let (keys, values) = plan.launch(stream, (&key, &value)).unwrap();
    [keys, values].map(|tensor| {
        let elements = tensor.download(stream).unwrap();
        elements.into_iter().map(number).collect()
    })
}

#[test]
fn golden_cases_are_gathered_exactly() {
    let stream = harness::stream();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/gather");
    let more = std::env::var_os("ASCEND_VECTORS").map(|folder| Path::new(&folder).join("train"));
    let mut files: Vec<_> = [Some(own), more]
        .into_iter()
        .flatten()
        .filter(|folder| folder.is_dir())
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let folder = path.parent().and_then(Path::file_name);
            folder.is_some_and(|name| name == "gather") || path.to_string_lossy().contains("_gather_")
        })
        .collect();
    files.sort();
    assert!(files.len() >= 3);
    for path in files {
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let order = match metadata["cache_mode"].as_str() {
            "PA_NZ" => CacheOrder::PaNz,
            _ => CacheOrder::Norm,
        };
        let of = (order, metadata["is_seq_lens_cumsum"] == "true", true);
        let found = match file.tensor("key_cache").unwrap().dtype() {
            safetensors::Dtype::F16 => {
                gathered(&stream, &file, of, |bytes| f16::from_le_bytes(bytes.try_into().unwrap()), f16::to_f32)
            }
            safetensors::Dtype::BF16 => {
                gathered(&stream, &file, of, |bytes| bf16::from_le_bytes(bytes.try_into().unwrap()), bf16::to_f32)
            }
            _ => gathered(&stream, &file, of, |bytes| i8::from_le_bytes(bytes.try_into().unwrap()), f32::from),
        };
        for (name, found) in ["key", "value"].into_iter().zip(found) {
            let want = file.tensor(name).unwrap();
            let (want, _) = want.data().as_chunks::<4>();
            let want: Vec<f32> = want.iter().map(|one| f32::from_le_bytes(*one)).collect();
            assert_eq!(found, want, "{name} of {}", path.display());
        }
    }
}

#[test]
fn blocks_are_gathered_into_rows() {
    let stream = harness::stream();
    let numbers: Vec<f16> = (0..4 * 2 * 16).map(|i| f16::from_f32(i as f32)).collect();
    let cache = stream.upload(&numbers, [4, 2, 1, 16]).unwrap();
    let rows = [vec![3, 1], vec![0]];
    let sequences = SequenceBlocks::new(&stream, &rows, &[3, 1], 4, 2).unwrap();
    let plan = GatherPaKvCache::new().plan(&sequences, (&cache, &cache)).unwrap();
    for _ in 0..2 {
        let (keys, values) = plan.launch(&stream, (&cache, &cache)).unwrap();
        let want: Vec<f16> =
            [6, 7, 2, 0].iter().flat_map(|token| numbers[token * 16..(token + 1) * 16].to_vec()).collect();
        assert_eq!(keys.download(&stream).unwrap(), want);
        assert_eq!(values.download(&stream).unwrap(), want);
    }
    let other = stream.upload(&numbers, [2, 4, 1, 16]).unwrap();
    let refused = plan.launch(&stream, (&other, &cache));
    assert!(refused.as_ref().is_err_and(|error| error.breaks(&rules::PLAN_TENSORS)));
}

#[test]
fn what_no_cache_holds_is_refused_by_name() {
    let stream = harness::stream();
    let new = |rows: &[Vec<usize>], lengths: &[usize]| SequenceBlocks::new(&stream, rows, lengths, 4, 2);
    assert_eq!(violated(new(&[vec![0, 4]], &[3])), "gather.block");
    assert_eq!(violated(new(&[vec![0, 1]], &[5])), "gather.block");
    assert!(new(&[vec![0, 4]], &[2]).is_ok(), "block 4 is not reached");
    assert!(new(&[vec![0]], &[1, 1]).is_err());
    assert!(new(&[], &[]).is_err());

    let sequences = new(&[vec![3]], &[2]).unwrap();
    let plan = |shape: [usize; 4]| {
        let cache = stream.upload(&vec![f16::ONE; shape.iter().product()], shape);
        let cache = cache.unwrap();
        GatherPaKvCache::new().plan(&sequences, (&cache, &cache))
    };
    assert!(plan([4, 2, 1, 16]).is_ok());
    let smaller = plan([3, 2, 1, 16]);
    assert!(smaller.as_ref().is_err_and(|error| error.breaks(&rules::ARGUMENT_VALUE)));
    let other = plan([4, 4, 1, 16]);
    assert!(other.as_ref().is_err_and(|error| error.breaks(&rules::ARGUMENT_VALUE)));
    assert_eq!(violated(plan([4, 2, 1, 8])), "gather.unit");
    assert_eq!(violated(plan([4, 2, 128, 600])), "gather.token_bytes");
    let single = stream.upload(&[1.0f32; 128], [4, 2, 1, 16]).unwrap();
    let single = GatherPaKvCache::new().plan(&sequences, (&single, &single));
    assert_eq!(violated(single), "gather.dtype");
}

#[test]
fn a_release_without_the_operator_is_told() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let cache = stream.upload(&[f16::ONE; 128], [4, 2, 1, 16]).unwrap();
    let sequences = SequenceBlocks::new(&stream, &[vec![0]], &[2], 4, 2).unwrap();
    let missing = GatherPaKvCache::new().plan(&sequences, (&cache, &cache));
    assert!(matches!(missing, Err(Error::MissingOperator { operator: "aclnnGatherPaKvCache", .. })));
}

#[test]
fn sequences_without_tokens_launch_nothing() {
    let stream = harness::stream();
    let cache = stream.upload(&[f16::ONE; 128], [4, 2, 1, 16]).unwrap();
    let sequences = SequenceBlocks::new(&stream, &[Vec::new()], &[0], 4, 2).unwrap();
    let plan = GatherPaKvCache::new().plan(&sequences, (&cache, &cache)).unwrap();
    let (keys, _) = plan.launch(&stream, (&cache, &cache)).unwrap();
    assert_eq!(keys.shape(), [0, 1, 16]);
    assert_eq!(plan.workspace_bytes(), 0);
}
