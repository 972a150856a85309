//! Attention beside the steps of a cache of halves: vision towers and quantised caches.

use ascend_attention::attention::{
    Affine, AntiquantMode, Antiquantisation, BlockTable, CallLengths, Cumulative, Inputs, PerRequest, Quantisation,
};
use ascend_attention::spec::ops::fused_infer_attention_score::{HeadShape, Version};
use ascend_attention::spec::{DType, Soc, Target};
use ascend_attention::sys::bindings::aclDataType;
use ascend_attention::{Error, FusedInferAttention, InnerPrecise, Layout, Tensor, bf16};
use ascend_serving::{AttentionShape, Causality};

use super::recorder::{self, Said};
use super::{Table, bare, bf16s, compressed, ints};
use crate::harness::filled;

fn ones(table: &Table, shape: &[usize]) -> Tensor<bf16> {
    filled(&table.stream, bf16::ONE, shape)
}

/// A vision tower with heads of 80: packed images without a mask, filled up to the size that the contract names, with
/// the scale of 80. Shared key heads stay shared: packed calls take them, and nothing has to be repeated.
#[test]
fn vision_towers() {
    let table = Table::new();
    let heads = HeadShape { kv_heads: 2, ..HeadShape::new(Layout::Tnd, DType::Bf16, 4, 80) };
    let padded = heads.padded(Version::V3, Target::snapshot(Soc::AtlasA2)).unwrap();
    let rows = |heads| {
        let rows = ones(&table, &[9, heads, 80]);
        rows.padded(&table.stream, padded.query_dim as usize).unwrap()
    };
    let (query, key) = (rows(4), rows(2));
    let ends = Cumulative::new(vec![4, 9]).unwrap();
    let call = FusedInferAttention::new(Layout::Tnd).heads(4).kv_heads(2).scale(1.0 / 80f64.sqrt());
    let lengths = CallLengths::PackedDense { q: &ends, kv: &ends };
    let plan = lengths.apply(call).plan((&query, &key, &key)).unwrap();
    let output = plan.launch(&table.stream, (&query, &key, &key)).unwrap();
    let want = Said {
        q_lengths: Some(vec![4, 9]),
        kv_lengths: Some(vec![4, 9]),
        ..bare(Layout::Tnd.as_str(), &[9, 4, 128], &[9, 2, 128], [4, 2], 1.0 / 80f64.sqrt())
    };
    assert_eq!(recorder::take(), [want]);
    let got = output.attention.download(&table.stream).unwrap();
    for head in got.chunks_exact(128) {
        assert!(head[..80].iter().all(|x| *x == bf16::ONE));
        assert!(head[80..].iter().all(|x| *x == bf16::ZERO));
    }
}

const HEADS: usize = 64;
const KV_HEADS: usize = 8;
const BLOCK_SIZE: usize = 128;

/// Decoding over a cache of INT8 in NZ order, a scale for each channel of key and value.
#[test]
fn decoding_over_an_int8_cache() {
    let table = Table::new();
    let stream = &table.stream;
    let query = ones(&table, &[2, HEADS, 1, 128]);
    let shape = [3, KV_HEADS, 128 / 32, BLOCK_SIZE, 32];
    let cache = vec![4i8; shape.iter().product()];
    let cache = stream.upload(&cache, shape).unwrap();
    let quarter = vec![bf16::from_f32(0.25); KV_HEADS * 128];
    let scale = stream.upload(&quarter, [KV_HEADS, 1, 128]).unwrap();
    let blocks = BlockTable::from_rows(stream, &[[2, 0], [1, 0]], BLOCK_SIZE).unwrap();
    let grid = Affine::scale(&scale);
    let inputs = Inputs::new(&query, &cache, &cache).paged(&blocks).quantisation(Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split { mode: AntiquantMode::PerChannel, key: grid, value: grid },
        output: None,
    });
    let kv = PerRequest::new(vec![130, 7]).unwrap();
    let shape = AttentionShape::new(HEADS, KV_HEADS, 128);
    let call = FusedInferAttention::new(Layout::Bnsd)
        .heads(HEADS)
        .kv_heads(KV_HEADS)
        .scale(shape.scale)
        .inner_precise(InnerPrecise::HighPerformance);
    let call = CallLengths::Batched { q: None, kv: &kv }.apply(call);
    let plan = call.plan(inputs).unwrap();
    let output = plan.launch(stream, inputs).unwrap();
    let int8s = |shape: [i64; 5]| (aclDataType::ACL_INT8, shape.to_vec());
    let cache = int8s([3, 8, 4, 128, 32]);
    let want = Said {
        key: cache.clone(),
        value: cache,
        kv_lengths: Some(vec![130, 7]),
        table: Some(ints([2, 2])),
        block_size: 128,
        inner_precise: 1,
        antiquant: [Some(bf16s([8, 1, 128])), Some(bf16s([8, 1, 128]))],
        ..bare(Layout::Bnsd.as_str(), &[2, 64, 1, 128], &[], [64, 8], 1.0 / 128f64.sqrt())
    };
    assert_eq!(recorder::take(), [want]);
    let got = output.attention.download(stream).unwrap();
    assert!(got.iter().all(|x| *x == bf16::ONE));
}

/// Prefill over such a cache: packed calls do not read integers, and say so. What is cached is gathered and dequantised
/// first, by operators beside this one; then it is a call over packed keys, all of each request's.
#[test]
fn prefill_over_an_int8_cache() {
    let table = Table::new();
    let stream = &table.stream;
    let (q, kv) = ([3, 8], [133, 145]);
    let query = ones(&table, &[8, 4, 128]);
    let ends = Cumulative::new(q.to_vec()).unwrap();
    let call = || {
        FusedInferAttention::new(Layout::Tnd)
            .heads(4)
            .kv_heads(2)
            .scale(1.0 / 128f64.sqrt())
            .mask(Causality::Causal.mask(&stream.device().masks()).unwrap())
    };
    let cache = stream.upload(&[4i8; 3 * 128 * 256], [3, 128, 256]).unwrap();
    let scale = vec![bf16::from_f32(0.25); 256];
    let scale = stream.upload(&scale, [1, 256]).unwrap();
    let blocks = BlockTable::from_rows(stream, &[[2, 0], [1, 0]], BLOCK_SIZE).unwrap();
    let grid = Affine::scale(&scale);
    let inputs = Inputs::new(&query, &cache, &cache).paged(&blocks).quantisation(Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split { mode: AntiquantMode::PerChannel, key: grid, value: grid },
        output: None,
    });
    let lengths = PerRequest::new(vec![133, 12]).unwrap();
    let lengths = CallLengths::PackedPaged { q: &ends, kv: &lengths };
    let error = lengths.apply(call()).plan(inputs).unwrap_err();
    let Error::Violation(violation) = &error else {
        panic!("{error}");
    };
    assert!(["packed.alone", "split_fuse.dtype"].contains(&violation.rule.id), "{error}");
    assert_eq!(recorder::take(), []);

    let gathered = ones(&table, &[145, 2, 128]);
    let kv_ends = Cumulative::new(kv.to_vec()).unwrap();
    let lengths = CallLengths::PackedDense { q: &ends, kv: &kv_ends };
    let plan = lengths.apply(call()).plan((&query, &gathered, &gathered)).unwrap();
    let output = plan.launch(stream, (&query, &gathered, &gathered)).unwrap();
    let want = Said {
        mask: compressed(),
        sparse_mode: 3,
        q_lengths: Some(vec![3, 8]),
        kv_lengths: Some(vec![133, 145]),
        ..bare(Layout::Tnd.as_str(), &[8, 4, 128], &[145, 2, 128], [4, 2], 1.0 / 128f64.sqrt())
    };
    assert_eq!(recorder::take(), [want]);
    let got = output.attention.download(stream).unwrap();
    assert!(got.iter().all(|x| *x == bf16::ONE));
}
