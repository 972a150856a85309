//! Native sparse attention: compression, the choice of blocks and attention to them, together, and refusals.

use ascend_attention::nsa_compress::NsaCompress;
use ascend_attention::nsa_compress_attention_infer::NsaCompressAttentionInfer;
use ascend_attention::nsa_compress_with_cache::{CompressedSlots, NsaCompressWithCache};
use ascend_attention::nsa_selected_attention_infer::NsaSelectedAttentionInfer;
use ascend_attention::sparse::SparseSequences;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Graph, Stream, Tensor, f16};

use crate::harness;
use harness::{numbers, violated};

/// Tokens of a compressed block and the distance of two, of selected blocks, and of a page.
const BLOCK: usize = 32;
const STRIDE: usize = 16;
const SELECT: usize = 64;
const PAGE: usize = 64;
const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIMS: [usize; 2] = [192, 128];
/// Tokens of the sequences.
const LENGTHS: [usize; 2] = [416, 300];
/// The pages of each.
const PAGES: [[usize; 7]; 2] = [[3, 9, 1, 12, 5, 0, 7], [2, 13, 4, 6, 8, 10, 11]];
const COUNT: usize = 4;
const SCALE: f64 = 0.07;

fn upload(stream: &Stream, elements: &[f32], shape: &[usize]) -> Tensor<f16> {
    let elements: Vec<f16> = elements.iter().map(|&element| f16::from_f32(element)).collect();
    stream.upload(&elements, shape).unwrap()
}

/// The tokens of a sequence with heads of `dim` elements.
fn tokens(sequence: usize, dim: usize) -> Vec<f32> {
    numbers((sequence * 1000 + dim) as u64, LENGTHS[sequence] * KV_HEADS * dim)
}

/// The tokens of all sequences in a paged cache `[blocks, page, N2, dim]`.
fn cache(stream: &Stream, dim: usize) -> Tensor<f16> {
    let row = KV_HEADS * dim;
    let mut all = vec![9.0; 14 * PAGE * row];
    for (sequence, pages) in PAGES.iter().enumerate() {
        for (token, elements) in tokens(sequence, dim).chunks(row).enumerate() {
            let place = pages[token / PAGE] * PAGE + token % PAGE;
            all[place * row..][..row].copy_from_slice(elements);
        }
    }
    upload(stream, &all, &[14, PAGE, KV_HEADS, dim])
}

/// The compressed tokens of both sequences in pages, `[2, page, N2 * dim]`, made token by token as in decoding, after
/// a prompt of 200 tokens each, which is compressed at once.
fn compress(stream: &Stream, dim: usize) -> Tensor<f16> {
    const PROMPT: usize = 200;
    let weight = upload(stream, &numbers(77, BLOCK * KV_HEADS), &[BLOCK, KV_HEADS]);
    let row = KV_HEADS * dim;
    let prompts: Vec<f32> = (0..2).flat_map(|sequence| tokens(sequence, dim)[..PROMPT * row].to_vec()).collect();
    let prompts = upload(stream, &prompts, &[2 * PROMPT, KV_HEADS, dim]);
    let plan = NsaCompress::new(BLOCK, STRIDE).plan(&[PROMPT; 2], (&prompts, &weight)).unwrap();
    let compressed = plan.launch(stream, (&prompts, &weight)).unwrap().download(stream).unwrap();
    let of_prompt = (PROMPT - BLOCK) / STRIDE + 1;
    assert_eq!(compressed.len(), 2 * of_prompt * row);
    let mut first = vec![f16::ZERO; 2 * PAGE * row];
    for (sequence, compressed) in compressed.chunks(of_prompt * row).enumerate() {
        first[sequence * PAGE * row..][..compressed.len()].copy_from_slice(compressed);
    }
    let slots = stream.upload(&first, [2 * PAGE, KV_HEADS, dim]).unwrap();
    let cache = cache(stream, dim);
    for length in PROMPT + 1..=LENGTHS[0] {
        let lengths = LENGTHS.map(|most| length.min(most));
        // A sequence that has ended has no new token; its slot is not that of a compressed one.
        let slot = |sequence: usize| match length <= LENGTHS[sequence] && length >= BLOCK {
            true => sequence * PAGE + (length - BLOCK) / STRIDE,
            false => sequence * PAGE + PAGE - 1,
        };
        let sequences = SparseSequences::padded(stream, &[1, 1], &lengths).unwrap();
        let sequences = sequences.paged(stream, &PAGES).unwrap();
        let new = CompressedSlots::new(stream, &[slot(0), slot(1)]).unwrap();
        let inputs = (&cache, &weight, &new, &slots);
        let plan = NsaCompressWithCache::new(BLOCK, STRIDE).plan(&sequences, inputs).unwrap();
        plan.launch(stream, inputs).unwrap();
    }
    // All tokens compressed at once are the same.
    let whole = upload(stream, &tokens(0, dim), &[LENGTHS[0], KV_HEADS, dim]);
    let plan = NsaCompress::new(BLOCK, STRIDE).plan(&LENGTHS[..1], (&whole, &weight)).unwrap();
    let whole = plan.launch(stream, (&whole, &weight)).unwrap().download(stream).unwrap();
    assert_eq!(slots.download(stream).unwrap()[..whole.len()], whole);
    slots.reshape([2, PAGE, row]).unwrap()
}

/// Attention of a row to the tokens of blocks, in double precision.
fn defined(query: &[f32], sequence: usize, head: usize, blocks: &[i32]) -> Vec<f64> {
    let kv_head = head / (HEADS / KV_HEADS);
    let [keys, values] = DIMS.map(|dim| tokens(sequence, dim));
    let element = |of: &[f32], dim: usize, token: usize, at: usize| {
        f16::from_f32(of[(token * KV_HEADS + kv_head) * dim + at]).to_f64()
    };
    let named = blocks.iter().flat_map(|&block| block as usize * SELECT..(block as usize + 1) * SELECT);
    let named: Vec<usize> = named.filter(|&token| token < LENGTHS[sequence]).collect();
    let score = |&token: &usize| {
        let products = query
            .iter()
            .enumerate()
            .map(|(at, query)| f16::from_f32(*query).to_f64() * element(&keys, DIMS[0], token, at));
        SCALE * products.sum::<f64>()
    };
    let scores: Vec<f64> = named.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let value = |at: usize| {
        let weighted = named.iter().zip(&scores);
        weighted.map(|(&token, score)| (score - max).exp() / sum * element(&values, DIMS[1], token, at)).sum()
    };
    (0..DIMS[1]).map(value).collect()
}

#[test]
fn rows_attend_to_the_blocks_that_compressed_tokens_select() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V8_5);
    let [keys, values] = DIMS.map(|dim| compress(&stream, dim));
    let queries = numbers(5, 2 * HEADS * DIMS[0]);
    let query = upload(&stream, &queries, &[2, HEADS, DIMS[0]]);
    let counts = LENGTHS.map(|length| (length - BLOCK) / STRIDE + 1);
    let sequences = SparseSequences::packed(&stream, &[1, 1], &counts).unwrap();
    let sequences = sequences.paged(&stream, &[[0], [1]]).unwrap();
    let choose = NsaCompressAttentionInfer::new(BLOCK, STRIDE, SCALE).kv_heads(KV_HEADS).select(SELECT, COUNT);
    let choose = choose.original_lengths(&LENGTHS);
    // The last tokens of a sequence that are in no compressed one do not make a block more or less here.
    let choose = choose.plan(&sequences, (&query, &keys, &values)).unwrap();
    let chosen = choose.launch(&stream, (&query, &keys, &values)).unwrap();
    assert_eq!(chosen.out.shape(), [2, HEADS, DIMS[1]]);
    let selected = chosen.selected.download(&stream).unwrap();
    let [key, value] = DIMS.map(|dim| cache(&stream, dim));
    let sequences = SparseSequences::packed(&stream, &[1, 1], &LENGTHS).unwrap();
    let sequences = sequences.paged(&stream, &PAGES).unwrap();
    let inputs = (&query, &key, &value, &chosen.selected);
    let attend = NsaSelectedAttentionInfer::new(SCALE).kv_heads(KV_HEADS).select_block_size(SELECT);
    let attend = attend.plan(&sequences, inputs).unwrap();
    assert_eq!(attend.operator(), "aclnnNsaSelectedAttentionInfer");
    let out = attend.launch(&stream, inputs).unwrap().download(&stream).unwrap();
    for (at, got) in out.chunks(DIMS[1]).enumerate() {
        let (sequence, head) = (at / HEADS, at % HEADS);
        let list = &selected[(sequence * KV_HEADS + head / (HEADS / KV_HEADS)) * COUNT..][..COUNT];
        let blocks = i32::try_from(((counts[sequence] - 1) * STRIDE + BLOCK).div_ceil(SELECT)).unwrap();
        for forced in [0, blocks - 1, blocks - 2] {
            assert!(list.contains(&forced), "{list:?} of {blocks}");
        }
        let want = defined(&queries[at * DIMS[0]..][..DIMS[0]], sequence, head, list);
        for (got, want) in got.iter().zip(&want) {
            assert!((got.to_f64() - want).abs() <= 2e-3, "{got} is not {want}");
        }
    }
}

#[test]
fn calls_beyond_the_tensors_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half = |shape: &[usize]| upload(&stream, &vec![1.0; shape.iter().product()], shape);
    let (input, weight) = (half(&[100, 2, 32]), half(&[32, 2]));
    let compress = NsaCompress::new(32, 16);
    assert_eq!(violated(compress.plan(&[60, 41], (&input, &weight))), "nsa_compress.lengths");
    assert_eq!(violated(compress.plan(&[100], (&input, &half(&[2, 32])))), "nsa_compress.weight");
    assert_eq!(violated(NsaCompress::new(32, 64).plan(&[100], (&input, &weight))), "nsa_compress.stride");
    // Sequences without a block have no compressed token.
    let none = compress.plan(&[31, 20], (&input, &weight)).unwrap();
    assert_eq!(none.launch(&stream, (&input, &weight)).unwrap().shape(), [0, 2, 32]);
    let flat = half(&[100, 64]);
    let refused = compress.plan(&[100], (&flat, &weight)).unwrap_err().to_string();
    assert!(refused.contains("[T, N, D]"), "{refused}");

    let (tokens, cache) = (half(&[3, 64, 2, 32]), half(&[4, 2, 32]));
    let into = NsaCompressWithCache::new(32, 16);
    let paged = |lengths: &[usize], rows: &[[usize; 1]]| {
        let queries = vec![1; lengths.len()];
        SparseSequences::padded(&stream, &queries, lengths).unwrap().paged(&stream, rows).unwrap()
    };
    let slots = |slots: &[usize]| CompressedSlots::new(&stream, slots).unwrap();
    let sequences = paged(&[32, 48], &[[0], [2]]);
    let good = slots(&[3, 0]);
    let plan = into.plan(&sequences, (&tokens, &weight, &good, &cache)).unwrap();
    for wrong in [slots(&[4, 0]), slots(&[3, 3])] {
        let inputs = (&tokens, &weight, &wrong, &cache);
        assert_eq!(violated(into.plan(&sequences, inputs)), "nsa_compress_with_cache.contents");
        assert_eq!(violated(plan.launch(&stream, inputs)), "nsa_compress_with_cache.contents");
    }
    let beyond = paged(&[32, 48], &[[0], [3]]);
    let inputs = (&tokens, &weight, &good, &cache);
    assert_eq!(violated(into.plan(&beyond, inputs)), "nsa_compress_with_cache.contents");
    assert_eq!(violated(into.plan(&paged(&[32, 65], &[[0], [2]]), inputs)), "nsa_compress_with_cache.lengths");
    plan.launch(&stream, inputs).unwrap();
    // A captured launch reads what the table names when it is replayed.
    let (graph, ()) = Graph::capture(stream.device(), (), |capture, _| plan.launch(capture, inputs).map(drop)).unwrap();
    drop(plan);
    let other = sequences.overwrite(&stream, &[1, 1], &[32, 48], &[[3], [2]]);
    assert_eq!(violated(other), "nsa_compress_with_cache.contents");
    sequences.overwrite(&stream, &[1, 1], &[32, 48], &[[1], [2]]).unwrap();
    drop(graph);
    assert!(cache.download(&stream).unwrap()[3 * 64..].iter().all(|&element| element == f16::from_f32(32.0)));

    let (query, key, value) = (half(&[2, 4, 64]), half(&[3, 64, 128]), half(&[3, 64, 64]));
    let packed = |keys: &[usize; 2], rows: &[[usize; 1]; 2]| {
        SparseSequences::packed(&stream, &[1, 1], keys).unwrap().paged(&stream, rows).unwrap()
    };
    let choose = NsaCompressAttentionInfer::new(32, 16, 0.1).kv_heads(2).select(64, 3);
    let inputs = (&query, &key, &value);
    let chosen = choose.plan(&packed(&[40, 50], &[[2], [0]]), inputs).unwrap();
    assert_eq!(chosen.launch(&stream, inputs).unwrap().selected.shape(), [2, 2, 3]);
    let rule = |keys, rows| violated(choose.plan(&packed(keys, rows), inputs));
    assert_eq!(rule(&[40, 50], &[[3], [0]]), "nsa_compress_attention.contents");
    assert_eq!(rule(&[40, 65], &[[2], [0]]), "nsa_compress_attention.table_room");
    assert_eq!(rule(&[40, 4], &[[2], [0]]), "nsa_compress_attention.short");
    let two = choose.clone().select(64, 2);
    let sequences = packed(&[40, 50], &[[2], [0]]);
    assert_eq!(violated(two.plan(&sequences, inputs)), "nsa_compress_attention.forced");
    two.allow_lint("nsa_compress_attention.forced").plan(&sequences, inputs).unwrap();
    let unpaged = SparseSequences::packed(&stream, &[1, 1], &[40, 50]).unwrap();
    assert_eq!(violated(choose.plan(&unpaged, inputs)), "nsa_compress_attention.required");
    let several = SparseSequences::packed(&stream, &[2], &[50]).unwrap().paged(&stream, &[[1]]).unwrap();
    assert_eq!(violated(choose.plan(&several, inputs)), "nsa_compress_attention.original");
    choose.clone().original_lengths(&[820]).plan(&several, inputs).unwrap();
    let old = harness::emulated_stream(Soc::Ascend950, Cann::V9_1);
    let on_950 = |shape: &[usize]| upload(&old, &vec![1.0; shape.iter().product()], shape);
    let refused = compress.plan(&[100], (&on_950(&[100, 2, 32]), &on_950(&[32, 2])));
    assert_eq!(violated(refused), "nsa_compress.product");
}
