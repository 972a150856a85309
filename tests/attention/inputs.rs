//! What a launch reads beyond query, key and value: right answers, replaceable from launch to launch, misuse by name.

use crate::harness;

use ascend_attention::attention::{
    Affine, Arguments, BlockTable, Cache, Inputs, PaddingSize, Parameter, Quantisation, SharedPrefix,
};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::{DType, Error, FusedInferAttention, Layout, Stream, Tensor, bf16, f16, rules};
use harness::reference::{Half, Logical, row};
use harness::{halves, numbers, still_works, stream, tensor};

const BLOCKS: usize = 9;
const BLOCK_SIZE: usize = 16;
const HEADS: usize = 2;
const DIM: usize = 64;
const LENGTHS: [usize; 2] = [37, 20];

/// A cache of random keys (or values), and what two sequences with these rows of blocks have in it.
fn cache(stream: &Stream, seed: u64) -> (Tensor<f16>, Vec<f16>) {
    let shape = Cache::BnNBsD.shape(DType::Float16, BLOCKS as i64, BLOCK_SIZE as i64, HEADS as i64, DIM as i64);
    let shape: Vec<usize> = shape.unwrap().iter().map(|&dim| dim as usize).collect();
    let data = halves(seed, shape.iter().product());
    (stream.upload(&data, shape).unwrap(), data)
}

fn rows_of(cache: &[f16], blocks: &[usize], len: usize) -> Logical<f64> {
    let mut data = Vec::new();
    for head in 0..HEADS {
        for token in 0..len {
            let block = blocks[token / BLOCK_SIZE];
            let row = (block * HEADS + head) * BLOCK_SIZE + token % BLOCK_SIZE;
            data.extend(cache[row * DIM..][..DIM].iter().map(|x| x.to_f64()));
        }
    }
    Logical { batch: 1, heads: HEADS, rows: len, dim: DIM, data }
}

fn expect(query: &[f16], key: &[f16], value: &[f16], blocks: &[Vec<usize>]) -> Vec<f64> {
    let mut out = Vec::new();
    for (b, blocks) in blocks.iter().enumerate() {
        let query = Logical {
            batch: 1,
            heads: HEADS,
            rows: 1,
            dim: DIM,
            data: query[b * HEADS * DIM..][..HEADS * DIM].to_vec(),
        };
        let len = LENGTHS[b];
        let (k, v) = (rows_of(key, blocks, len), rows_of(value, blocks, len));
        for head in 0..HEADS {
            out.extend(row(&query.exact(), &k, &v, (0, 0), head, 0, 0.125, |_| true).unwrap().0);
        }
    }
    out
}

#[track_caller]
fn close<T: Half>(got: &[T], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got.to_f64() - want).abs();
        assert!(off <= tolerance, "element {at}: {} instead of {want}", got.to_f64());
    }
}

#[test]
fn a_launch_takes_any_table_of_the_planned_shape() {
    let stream = stream();
    let (key, key_data) = cache(&stream, 1);
    let (value, value_data) = cache(&stream, 2);
    let query_data = halves(3, 2 * HEADS * DIM);
    let query = stream.upload(&query_data, [2, HEADS, 1, DIM]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125).actual_seq_lengths_kv(LENGTHS);
    let tables = [[vec![4, 7, 2], vec![8, 1]], [vec![0, 3, 6], vec![5, 4]], [vec![7, 8, 1], vec![2, 0]]];
    let first = BlockTable::from_rows(&stream, &tables[0], BLOCK_SIZE).unwrap();
    let other = BlockTable::zeroed(stream.device(), 2, 3, BLOCK_SIZE).unwrap();
    other.overwrite(&stream, &tables[1]).unwrap();
    assert_eq!((first.sequences(), first.columns()), (2, 3));

    let inputs = |table| Inputs::new(&query, &key, &value).paged(table);
    let plan = call.plan(inputs(&first)).unwrap();
    let answer = |table| {
        let output = plan.launch(&stream, inputs(table)).unwrap();
        output.attention.download(&stream).unwrap()
    };
    let want = |rows: &[Vec<usize>]| expect(&query_data, &key_data, &value_data, rows);
    let tolerance = <f16 as Half>::TOLERANCE;
    close(&answer(&first), &want(&tables[0]), tolerance);
    close(&answer(&other), &want(&tables[1]), tolerance);
    first.overwrite(&stream, &tables[2]).unwrap();
    close(&answer(&first), &want(&tables[2]), tolerance);
    // Queries of each step have addresses of their own too, and what a queued launch reads may be dropped.
    drop(plan);
    still_works(&stream);
}

/// The argument of a launch that differs from the plan.
#[track_caller]
fn not_as_planned<T: std::fmt::Debug>(outcome: Result<T, Error>, name: &str) {
    match outcome.unwrap_err() {
        Error::Violation(violation) if violation.rule == &rules::PLAN_TENSORS => {
            assert_eq!(violation.given.split(':').next(), Some(name));
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn invalid<T: std::fmt::Debug>(outcome: Result<T, Error>, name: &str) {
    match outcome.unwrap_err() {
        Error::Violation(violation) if violation.rule.id.starts_with("argument.") => {
            assert_eq!(violation.given.split(':').next(), Some(name));
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn violates<T: std::fmt::Debug>(outcome: Result<T, Error>, id: &str) {
    match outcome.unwrap_err() {
        Error::Violation(violation) => assert_eq!(violation.rule.id, id, "{violation}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn sizes_beyond_int64_are_refused_and_not_taken_for_its_largest() {
    let stream = stream();
    let beyond = usize::MAX;
    invalid(BlockTable::from_rows(&stream, &[[1, 2]], beyond), "block_size");
    let x = stream.upload(&halves(1, 4 * 64), [1, 1, 4, 64]).unwrap();
    let call = || FusedInferAttention::new(Layout::Bnsd).scale(1.0);
    let plan = |call: FusedInferAttention| call.plan((&x, &x, &x));
    invalid(plan(call().heads(beyond)), "num_heads");
    invalid(plan(call().kv_heads(beyond)), "num_key_value_heads");
    plan(call().heads(1).kv_heads(1)).unwrap();
}

#[test]
fn wrong_tables_are_named() {
    let stream = stream();
    let table = |rows: &[&[usize]]| BlockTable::from_rows(&stream, rows, 16);
    invalid(table(&[&[1, 1 << 31]]), "block_table");
    invalid(table(&[]), "block_table");
    invalid(table(&[&[], &[]]), "block_table");
    invalid(BlockTable::with_columns(&stream, &[[1, 2]], 1, 16), "block_table");
    invalid(BlockTable::from_rows(&stream, &[[1, 2]], 0), "block_size");
    let flat = stream.upload(&[1, 2, 3, 4], [4]).unwrap();
    // SAFETY: neither becomes a table.
    let from_tensor = |tensor| unsafe { BlockTable::from_tensor(tensor, 16) };
    invalid(from_tensor(flat.clone()), "block_table");
    let turned = flat.reshape([2, 2]).unwrap().permute([1, 0]).unwrap();
    invalid(from_tensor(turned), "block_table");
    invalid(BlockTable::zeroed(stream.device(), usize::MAX, 2, 16), "block_table");
    let two = table(&[&[1], &[2]]).unwrap();
    invalid(two.overwrite(&stream, &[[3]]), "block_table");
    invalid(two.overwrite(&stream, &[[3, 4], [5, 6]]), "block_table");
    invalid(two.overwrite(&stream, &[[3], [usize::MAX]]), "block_table");
    assert_eq!(two.tensor().download(&stream).unwrap(), [1, 2]);
}

/// One query row for each of two sequences over a cache of 9 blocks of 16 tokens.
fn paged_call(stream: &Stream) -> (FusedInferAttention, Tensor<f16>, Tensor<f16>) {
    let (cache, _) = cache(stream, 1);
    let query = stream.upload(&halves(1, 2 * HEADS * DIM), [2, HEADS, 1, DIM]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125).actual_seq_lengths_kv(LENGTHS);
    (call, query, cache)
}

#[test]
fn a_table_is_held_against_the_cache_of_each_plan_and_launch() {
    let stream = stream();
    let (call, query, cache) = paged_call(&stream);
    let blocks = cache.shape()[0];
    let last = blocks - 1;
    let from = |rows: &[Vec<usize>]| BlockTable::from_rows(&stream, rows, BLOCK_SIZE).unwrap();
    let right = from(&[vec![1, 2, last], vec![4, 5]]);
    let beyond = from(&[vec![1, 2, 1 << 20], vec![4, 5]]);
    let short = from(&[vec![1, 2, 3], vec![4]]);
    let inputs = |table| Inputs::new(&query, &cache, &cache).paged(table);
    violates(call.plan(inputs(&beyond)), "block_table.range");
    violates(call.plan(inputs(&short)), "block_table.row_short");
    let plan = call.plan(inputs(&right)).unwrap();
    let launch = |table| plan.launch(&stream, inputs(table));
    let refused = |outcome: Result<_, Error>, id| {
        let error: Error = outcome.err().unwrap();
        assert!(matches!(&error, Error::Violation(of) if of.rule.id == id), "{error}");
    };
    refused(launch(&beyond).map(drop), "block_table.range");
    refused(launch(&short).map(drop), "block_table.row_short");
    launch(&right).unwrap();
    // What is written later is held against the caches of earlier launches: they may still be queued.
    violates(right.overwrite(&stream, &[vec![0, 1, blocks], vec![2, 3]]), "block_table.range");
    right.overwrite(&stream, &[vec![0, 1], vec![2, 3]]).unwrap();
    refused(launch(&right).map(drop), "block_table.row_short");
    right.overwrite(&stream, &[vec![0, 1, last], vec![2, 3]]).unwrap();
    launch(&right).unwrap();
    // A table that no launch has used may still become one for a larger cache.
    let other = from(&[vec![0, 1, 2], vec![2, 3]]);
    other.overwrite(&stream, &[vec![0, 1, 1 << 20], vec![2, 3]]).unwrap();
    refused(launch(&other).map(drop), "block_table.range");
    // Nothing else writes to its memory.
    invalid(right.tensor().overwrite(&stream, &[1 << 20; 6]), "tensor");
    let six = stream.upload(&[1 << 20; 6], [2, 3]).unwrap();
    invalid(right.tensor().copy_from(&stream, &six), "tensor");
    stream.synchronize().unwrap();
    still_works(&stream);
}

#[test]
fn a_part_of_a_table_is_the_same_memory_under_the_same_checks() {
    let stream = stream();
    let (call, query, cache) = paged_call(&stream);
    let blocks: Vec<usize> = (0..9).collect();
    let all = BlockTable::from_full_rows(&stream, &blocks, 3, BLOCK_SIZE).unwrap();
    assert_eq!((all.sequences(), all.columns()), (3, 3));
    let part = all.rows(1..3).unwrap();
    assert_eq!(part.tensor().download(&stream).unwrap(), [3, 4, 5, 6, 7, 8]);
    let inputs = Inputs::new(&query, &cache, &cache).paged(&part);
    let plan = call.plan(inputs).unwrap();
    plan.launch(&stream, inputs).unwrap();
    // Both remember which blocks of which rows there are, whichever was filled.
    violates(all.overwrite(&stream, &[vec![0], vec![1, 2, 9], vec![3]]), "block_table.range");
    part.overwrite(&stream, &[vec![1], vec![2, 3, 4]]).unwrap();
    let all_rows = all.tensor().download(&stream).unwrap();
    assert_eq!(all_rows, [0, 1, 2, 1, 0, 0, 2, 3, 4]);
    violates(plan.launch(&stream, inputs), "block_table.row_short");
    invalid(all.rows(2..4), "range");
    invalid(BlockTable::from_full_rows(&stream, &blocks, 2, BLOCK_SIZE), "elements");
    stream.synchronize().unwrap();
    still_works(&stream);
}

#[test]
fn tables_and_paddings_by_name_are_checked_before_a_launch() {
    let stream = stream();
    let (_, query, cache) = paged_call(&stream);
    let mut call = FiaCall::new("BNSD");
    (call.num_heads, call.scale, call.block_size) = (HEADS as i64, 0.125, BLOCK_SIZE as i64);
    let lengths = LENGTHS.map(|len| len as i64);
    call.actual_seq_lengths_kv = Some(&lengths);
    let by_name = |table: [i32; 6]| {
        let table = stream.upload(&table, [2, 3]).unwrap();
        let mut arguments = Arguments::new(call.attributes());
        arguments
            .set(Parameter::Query, &query)
            .set(Parameter::BlockTable, table)
            .set(Parameter::Key, &cache)
            .set(Parameter::Value, &cache);
        let plan = arguments.plan(stream.device()).unwrap();
        arguments.set_outputs(&plan).unwrap();
        arguments.launch(&plan, &stream)
    };
    // Entries behind the blocks of a sequence are not read.
    by_name([1, 2, 3, 4, 5, 1 << 20]).unwrap();
    violates(by_name([1, 2, 1 << 20, 4, 5, 6]), "block_table.range");
    violates(by_name([1, 2, 3, 4, -1, 6]), "block_table.range");
    stream.synchronize().unwrap();

    let rows = stream.upload(&halves(1, HEADS * 16 * DIM), [1, HEADS, 16, DIM]).unwrap();
    let mut padded = FiaCall::new("BNSD");
    (padded.num_heads, padded.scale) = (HEADS as i64, 0.125);
    padded.actual_seq_lengths = Some(&[10]);
    let by_name = |size: i64| {
        let size = stream.upload(&[size], [1]).unwrap();
        let mut arguments = Arguments::new(padded.attributes());
        arguments
            .set(Parameter::Query, &rows)
            .set(Parameter::QueryPaddingSize, size)
            .set(Parameter::Key, &rows)
            .set(Parameter::Value, &rows);
        let plan = arguments.plan(stream.device()).unwrap();
        arguments.set_outputs(&plan).unwrap();
        arguments.launch(&plan, &stream)
    };
    by_name(6).unwrap();
    violates(by_name(7), "padding_size.range");
    stream.synchronize().unwrap();
}

#[test]
fn padding_that_leaves_no_room_is_refused() {
    let stream = stream();
    let rows = stream.upload(&halves(1, HEADS * 16 * DIM), [1, HEADS, 16, DIM]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd)
        .heads(HEADS)
        .scale(0.125)
        .actual_seq_lengths([10])
        .actual_seq_lengths_kv([12]);
    let sizes = [4, 5, 6, 7].map(|size| PaddingSize::new(&stream, size).unwrap());
    let plain = Inputs::new(&rows, &rows, &rows);
    let query = |at: usize| plain.query_padding(&sizes[at]);
    let keys = |at: usize| plain.kv_padding(&sizes[at]);
    violates(call.plan(query(3)), "padding_size.range");
    violates(call.plan(keys(1)), "padding_size.range");
    call.plan(keys(0)).unwrap();
    let plan = call.plan(query(2)).unwrap();
    plan.launch(&stream, query(2)).unwrap();
    violates(plan.launch(&stream, query(3)).map(drop), "padding_size.range");
    invalid(sizes[0].tensor().overwrite(&stream, &[99]), "tensor");
    stream.synchronize().unwrap();
}

/// The commonest mistakes of a first paged call.
#[test]
fn a_forgotten_table_and_one_of_another_block_size_are_named() {
    let stream = stream();
    let query: Tensor<bf16> = Tensor::empty(stream.device(), [3, 4, 64]).unwrap();
    let call = FusedInferAttention::new(Layout::Tnd)
        .heads(4)
        .kv_heads(2)
        .scale(0.125)
        .actual_seq_lengths([3])
        .actual_seq_lengths_kv([140]);
    let table = |size| BlockTable::from_rows(&stream, &[[0, 1, 2]], size).unwrap();
    for shape in [&[8, 128, 128][..], &[8, 2, 128, 64], &[8, 2, 4, 128, 16]] {
        let cache: Tensor<bf16> = Tensor::empty(stream.device(), shape).unwrap();
        let inputs = Inputs::new(&query, &cache, &cache);
        let forgotten = call.plan(inputs).map(drop).unwrap_err().to_string();
        assert!(forgotten.contains("`Inputs::paged`"), "{forgotten}");
        call.plan(inputs.paged(&table(128))).unwrap();
    }
    let cache: Tensor<bf16> = Tensor::empty(stream.device(), [8, 128, 128]).unwrap();
    let inputs = Inputs::new(&query, &cache, &cache);
    let coarse = table(256);
    let error = call.plan(inputs.paged(&coarse)).map(drop);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the table says 256, the cache has 128"), "{error}");
    // A wrong call over keys that are none of a cache gets no advice on tables.
    let keys: Tensor<bf16> = Tensor::empty(stream.device(), [16, 2, 32]).unwrap();
    let wrong = call.plan(Inputs::new(&query, &keys, &keys)).map(drop);
    let wrong = wrong.unwrap_err().to_string();
    assert!(!wrong.contains("Inputs::paged"), "{wrong}");
}

#[test]
fn a_launch_brings_what_its_plan_was_made_with() {
    let stream = stream();
    let (cache, _) = cache(&stream, 1);
    let query = stream.upload(&halves(1, 2 * HEADS * DIM), [2, HEADS, 1, DIM]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(HEADS);
    let table = BlockTable::from_rows(&stream, &[[1, 2, 3], [4, 5, 6]], BLOCK_SIZE).unwrap();
    let plain = Inputs::new(&query, &cache, &cache);
    let paged = plain.paged(&table);
    violates(call.plan(paged), "actual_seq_lengths_kv.required");
    let plan = call.clone().actual_seq_lengths_kv(LENGTHS).plan(paged).unwrap();

    let wider = BlockTable::with_columns(&stream, &[[1], [2]], 4, BLOCK_SIZE).unwrap();
    // SAFETY: it has blocks of the cache.
    let coarser = unsafe { BlockTable::from_tensor(table.tensor().clone(), 2 * BLOCK_SIZE) }.unwrap();
    let launch = |inputs: &Inputs<'_, f16>| plan.launch(&stream, inputs);
    not_as_planned(launch(&plain), "block_table");
    not_as_planned(launch(&plain.paged(&wider)), "block_table");
    not_as_planned(launch(&plain.paged(&coarser)), "block_size");
    not_as_planned(plan.launch(&stream, (&query, &cache, &cache)), "block_table");
    let prefix = SharedPrefix::new(&cache, &cache);
    not_as_planned(launch(&paged.shared_prefix(prefix)), "key_shared_prefix");
    let scale = stream.upload(&[1f32], [1]).unwrap();
    let quantised = Quantisation::Output(Affine::scale(&scale));
    not_as_planned(launch(&paged.quantisation(quantised)), "quant_scale2");
    let sink = stream.upload(&[bf16::ONE; HEADS], [HEADS]).unwrap();
    not_as_planned(launch(&paged.learnable_sink(&sink)), "learnable_sink");
    not_as_planned(launch(&Inputs::lists(&query, &[&cache], &[&cache, &cache]).paged(&table)), "value");
    invalid(plan.launch(&stream, paged.output_type::<bf16>()), "attention_out");
    launch(&paged).unwrap();

    // The other way round: what was planned is missing.
    let x = tensor(&stream, [1, HEADS, 32, DIM]);
    let plain = Inputs::new(&x, &x, &x);
    let half = SharedPrefix::new(&x, &x).valid(16).unwrap();
    let with_prefix = plain.shared_prefix(half);
    let plan = call.plan(with_prefix).unwrap();
    let launch = |inputs: &Inputs<'_, f16>| plan.launch(&stream, inputs);
    let whole = plain.shared_prefix(SharedPrefix::new(&x, &x));
    not_as_planned(launch(&whole), "actual_shared_prefix_len");
    launch(&with_prefix).unwrap();

    let plan = call.plan(plain.quantisation(quantised)).unwrap();
    let launch = |inputs: &Inputs<'_, f16>| plan.launch(&stream, inputs.output_type::<i8>());
    not_as_planned(launch(&plain), "quant_scale2");
    let offset = stream.upload(&[1f32], [1]).unwrap();
    let more = Quantisation::Output(Affine::new(&scale, &offset));
    not_as_planned(launch(&plain.quantisation(more)), "quant_offset2");
    launch(&plain.quantisation(quantised)).unwrap();
    still_works(&stream);
}

/// Multi-head latent attention in INT8, absorbed: the one scheme of which no golden case exists.
#[test]
fn latent_attention_in_int8_is_right() {
    const ROWS: usize = 2;
    const HEADS: usize = 8;
    const BLOCKS: usize = 3;
    const SIZE: usize = 128;
    const LEN: usize = 150;
    let stream = stream();
    let bytes = |seed, n: usize| -> Vec<i8> { numbers(seed, n).into_iter().map(|x| (x * 127.0) as i8).collect() };
    let bf = |seed, n: usize| -> Vec<bf16> { numbers(seed, n).into_iter().map(bf16::from_f32).collect() };
    // NZ caches: [blocks, 1, D / c, block size, c].
    let query = bytes(1, ROWS * HEADS * 512);
    let latent = bytes(2, BLOCKS * 512 * SIZE);
    let (query_rope, key_rope) = (bf(3, ROWS * HEADS * 64), bf(4, BLOCKS * 64 * SIZE));
    let query_scale: Vec<f32> = numbers(5, ROWS * HEADS).iter().map(|x| 0.01 + 0.005 * x).collect();
    let (key_scale, value_scale) = (0.002f32, 0.01f32);
    let scale = 1.0 / 192f64.sqrt();
    let blocks = [2usize, 0];

    let q = stream.upload(&query, [1, ROWS, HEADS, 512]).unwrap();
    let kv = stream.upload(&latent, [BLOCKS, 1, 16, SIZE, 32]).unwrap();
    let qr = stream.upload(&query_rope, [1, ROWS, HEADS, 64]).unwrap();
    let kr = stream.upload(&key_rope, [BLOCKS, 1, 4, SIZE, 16]).unwrap();
    let factors = stream.upload(&query_scale, [1, ROWS, HEADS]).unwrap();
    let one = |x: f32| stream.upload(&[x], [1]).unwrap();
    let (ks, vs) = (one(key_scale), one(value_scale));
    let table = BlockTable::from_rows(&stream, &[[2, 0]], SIZE).unwrap();
    let mask = stream.device().masks();
    let mask = mask.causal(ascend_attention::CausalOrigin::RightDown).unwrap();
    let inputs = Inputs::new(&q, &kv, &kv).rope(&qr, &kr).paged(&table).quantisation(Quantisation::Latent {
        dequant_scale_query: &factors,
        key_scale: &ks,
        value_scale: &vs,
    });
    let plan = FusedInferAttention::new(Layout::Bsnd)
        .heads(HEADS)
        .kv_heads(1)
        .scale(scale)
        .mask(mask.clone())
        .actual_seq_lengths_kv([LEN])
        .plan(inputs)
        .unwrap();
    assert_eq!(plan.operator(), "aclnnFusedInferAttentionScoreV4");
    let mut output = plan.output::<bf16>().unwrap();
    let poison = vec![<bf16 as Half>::NAN; output.attention.len()];
    output.attention.overwrite(&stream, &poison).unwrap();
    plan.launch_into(&stream, inputs.output_type(), &mut output).unwrap();
    let got = output.attention.download(&stream).unwrap();

    let mut call = FiaCall::new("BSND");
    (call.num_heads, call.num_key_value_heads) = (HEADS as i64, 1);
    (call.scale, call.sparse_mode, call.block_size) = (scale, 3, SIZE as i64);
    call.query_quant_mode = 3;
    let lengths = [LEN as i64];
    call.actual_seq_lengths_kv = Some(&lengths);
    let mut arguments = Arguments::new(call.attributes());
    arguments
        .set(Parameter::Query, &q)
        .set(Parameter::QueryRope, &qr)
        .set(Parameter::KeyRope, &kr)
        .set(Parameter::BlockTable, table.tensor())
        .set(Parameter::DequantScaleQuery, &factors)
        .set(Parameter::KeyAntiquantScale, &ks)
        .set(Parameter::ValueAntiquantScale, &vs)
        .set(Parameter::AttenMask, mask.tensor().unwrap().clone())
        .set(Parameter::Key, &kv)
        .set(Parameter::Value, &kv);
    let by_name = arguments.plan(stream.device()).unwrap();
    arguments.set_outputs(&by_name).unwrap();
    arguments.launch(&by_name, &stream).unwrap();
    let out = arguments.get(Parameter::AttentionOut).unwrap();
    let out: Vec<bf16> = out.clone().typed().unwrap().download(&stream).unwrap();
    assert!(out == got, "other bits by name");

    // One wide tensor of dequantised numbers, latent part first. The rotary parts are stored divided by the scales,
    // too.
    let at = |token: usize, d: usize, parts: usize, c: usize| {
        ((blocks[token / SIZE] * parts + d / c) * SIZE + token % SIZE) * c + d % c
    };
    let wide = |rows: usize, heads, dim, data: Vec<f64>| Logical { batch: 1, heads, rows, dim, data };
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for token in 0..LEN {
        let stored = |d| f64::from(latent[at(token, d, 16, 32)]);
        keys.extend((0..512).map(|d| stored(d) * f64::from(key_scale)));
        let rotary = |d| key_rope[at(token, d, 4, 16)].to_f64();
        keys.extend((0..64).map(|d| rotary(d) * f64::from(key_scale)));
        values.extend((0..512).map(|d| stored(d) * f64::from(value_scale)));
    }
    let (keys, values) = (wide(LEN, 1, 576, keys), wide(LEN, 1, 512, values));
    let mut want = Vec::new();
    for i in 0..ROWS {
        for head in 0..HEADS {
            let n = i * HEADS + head;
            let factor = f64::from(query_scale[n]);
            let part = query[n * 512..][..512].iter().map(|&x| f64::from(x) * factor);
            let rope = query_rope[n * 64..][..64].iter();
            let rope = rope.map(|x| x.to_f64() * factor);
            let q = wide(1, 1, 576, part.chain(rope).collect());
            let sees = |j: usize| j + ROWS <= i + LEN;
            want.extend(row(&q, &keys, &values, (0, 0), 0, 0, scale, sees).unwrap().0);
        }
    }
    close(&got, &want, 1e-2);
}
