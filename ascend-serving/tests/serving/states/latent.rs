//! Steps of multi-head latent attention, and steps whose layers prefer backends.

use super::batch::{self, BLOCK_SIZE, BLOCKS, CHUNKED, MTP, Requests};
use super::recorder::{self, Described, Said};
use super::{Table, bare, bf16s, compressed, ints};
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, Causality, Error, LatentForm,
    LatentRows, LatentTensors, LayerInputs, Result, StatePolicy, UpProjected, rules,
};

const HEADS: usize = 4;
const LATENT: usize = 512;
const ROPE: usize = 64;
const DIM: usize = 128;
fn metadata(policy: StatePolicy, padded: Option<usize>, requests: &Requests) -> AttentionMetadata {
    batch::metadata(Causality::Causal, policy, padded, requests).unwrap()
}

/// What the calls of a step say, of which the first tokens have absorbed queries, and whose workspace has room for so
/// many cached tokens.
fn said(table: &Table, format: Cache, metadata: &AttentionMetadata, split: usize, room: usize) -> Vec<Said> {
    let stream = &table.stream;
    let shape = CacheShape::latent(1).format(format);
    let pad = PadPolicy::SkipNegative;
    let cache: PagedKvCache<bf16> = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, shape, pad).unwrap();
    let row = LATENT + ROPE + HEADS * (DIM + ROPE + DIM);
    let mla = Backend::Mla { workspace_bytes: room * row * size_of::<bf16>() };
    let shape = AttentionShape::latent(HEADS);
    let mut attention = Attention::new(shape, cache, Backends::none().with(mla));
    let tokens = metadata.tokens();
    let ones = |tokens: usize, heads: usize, dim: usize| {
        let ones = vec![bf16::ONE; tokens * heads * dim];
        stream.upload(&ones, [tokens, heads, dim]).unwrap()
    };
    let projection = |stream: &Stream, _: usize, _: LatentRows<'_, bf16>, out: &UpProjected<bf16>| -> Result<()> {
        for tensor in [&out.key, &out.key_rope, &out.value] {
            tensor.overwrite(stream, &vec![bf16::ONE; tensor.len()])?;
        }
        Ok(())
    };
    let absorbed = ones(split, HEADS, LATENT);
    let decoded = ones(HEADS, split, LATENT);
    let plain = ones(tokens - split, HEADS, DIM);
    let (query, form) = match split {
        0 => (&plain, LatentForm::Plain(&projection)),
        _ if split == tokens => (&absorbed, LatentForm::Absorbed),
        _ => {
            let form = LatentForm::Mixed { absorbed: &absorbed, decoded: &decoded, projection: &projection };
            (&plain, form)
        }
    };
    let query_rope = ones(tokens, HEADS, ROPE);
    let (latent, key_rope) = (ones(tokens, 1, LATENT), ones(tokens, 1, ROPE));
    let tensors = LatentTensors { query_rope: &query_rope, form };
    recorder::take();
    let mut step = attention.begin(stream, metadata).unwrap();
    step.forward(0, LayerInputs::latent(query, &latent, &key_rope, tensors)).unwrap();
    drop(step);
    stream.synchronize().unwrap();
    recorder::take()
}

/// What every absorbed call says, before layout, shapes, lengths and mask.
fn absorbed(requests: i64, columns: i64) -> Said {
    let cache = [BLOCKS as i64, BLOCK_SIZE as i64, LATENT as i64];
    Said {
        table: Some(ints([requests, columns])),
        block_size: BLOCK_SIZE as i64,
        ..bare("", &[], &cache, [HEADS as i64, 1], 1.0 / 192f64.sqrt())
    }
}

fn ropes(query: impl Into<Vec<i64>>, key: impl Into<Vec<i64>>) -> [Option<Described>; 2] {
    [Some(bf16s(query)), Some(bf16s(key))]
}

#[test]
fn decode_only() {
    let table = Table::new();
    let metadata = metadata(CHUNKED, Some(3), &[(130, 1, 0), (9, 1, 0)]);
    assert_eq!(metadata.state(), AttentionState::DecodeOnly);
    let want = Said {
        layout: "BNSD_NBSD".to_owned(),
        query: bf16s([3, 4, 1, 512]),
        out: bf16s([4, 3, 1, 512]),
        ropes: ropes([3, 4, 1, 64], [6, 128, 64]),
        kv_lengths: Some(vec![131, 10, 1]),
        ..absorbed(3, 2)
    };
    let calls = said(&table, Cache::BnBsH, &metadata, metadata.tokens(), 1);
    assert_eq!(calls, std::slice::from_ref(&want));
    // The other formats; the operator has no BNSD over NZ.
    let calls = said(&table, Cache::BnNBsD, &metadata, metadata.tokens(), 1);
    let split = Said {
        key: bf16s([6, 1, 128, 512]),
        value: bf16s([6, 1, 128, 512]),
        ropes: ropes([3, 4, 1, 64], [6, 1, 128, 64]),
        ..want.clone()
    };
    assert_eq!(calls, [split]);
    let calls = said(&table, Cache::Nz, &metadata, metadata.tokens(), 1);
    let nz = Said {
        layout: "BSND_NBSD".to_owned(),
        query: bf16s([3, 1, 4, 512]),
        key: bf16s([6, 1, 32, 128, 16]),
        value: bf16s([6, 1, 32, 128, 16]),
        ropes: ropes([3, 1, 4, 64], [6, 1, 4, 128, 16]),
        ..want
    };
    assert_eq!(calls, [nz]);
}

#[test]
fn verifying_drafts() {
    let table = Table::new();
    let metadata = metadata(MTP, Some(9), &[(9, 4, 3), (130, 2, 1)]);
    assert_eq!(metadata.state(), AttentionState::SpecDecoding);
    let want = Said {
        layout: "TND_NTD".to_owned(),
        query: bf16s([9, 4, 512]),
        out: bf16s([4, 9, 512]),
        ropes: ropes([9, 4, 64], [6, 128, 64]),
        q_lengths: Some(vec![4, 6, 9]),
        kv_lengths: Some(vec![13, 132, 3]),
        sparse_mode: 3,
        mask: compressed(),
        ..absorbed(3, 2)
    };
    let calls = said(&table, Cache::BnBsH, &metadata, metadata.tokens(), 1);
    assert_eq!(calls, [want]);
}

/// A call of plain queries over dense keys.
fn plain(rows: i64, keys: i64, q: &[i64], kv: &[i64]) -> Said {
    Said {
        layout: "TND".to_owned(),
        query: bf16s([rows, 4, 128]),
        key: bf16s([keys, 4, 128]),
        value: bf16s([keys, 4, 128]),
        out: bf16s([rows, 4, 128]),
        ropes: ropes([rows, 4, 64], [keys, 4, 64]),
        q_lengths: Some(q.to_vec()),
        kv_lengths: Some(kv.to_vec()),
        table: None,
        block_size: 0,
        heads: [4, 4],
        lse: true,
        ..absorbed(0, 0)
    }
}

#[test]
fn prefill_without_cache() {
    let table = Table::new();
    let metadata = metadata(CHUNKED, None, &[(0, 5, 0), (0, 3, 0)]);
    assert_eq!(metadata.state(), AttentionState::PrefillNoCache);
    let want = Said { sparse_mode: 3, mask: compressed(), lse: false, ..plain(8, 8, &[5, 8], &[5, 8]) };
    let calls = said(&table, Cache::BnBsH, &metadata, 0, 1);
    assert_eq!(calls, [want]);
}

#[test]
fn prefill_with_context_chunks() {
    let table = Table::new();
    let metadata = metadata(CHUNKED, Some(30), &[(9, 5, 0), (0, 3, 0), (140, 20, 0)]);
    assert_eq!(metadata.state(), AttentionState::ChunkedPrefill);
    let own = Said { sparse_mode: 3, mask: compressed(), ..plain(30, 30, &[5, 8, 28, 30], &[5, 8, 28, 30]) };
    // Room for 80: 40 of each, of which the shorter has 9; then what there is room for, and the rest. The request
    // without cached tokens and the dummy take no part, and the longest comes first.
    let chunks = [plain(25, 49, &[20, 25], &[40, 49]), plain(20, 80, &[20], &[80]), plain(20, 20, &[20], &[20])];
    let calls = said(&table, Cache::BnBsH, &metadata, 0, 80);
    assert_eq!(calls[0], own);
    assert_eq!(calls[1..], chunks);
}

#[test]
fn decodes_in_front_of_prefills() {
    let table = Table::new();
    let metadata = metadata(CHUNKED, Some(25), &[(130, 1, 0), (9, 1, 0), (7, 20, 0)]);
    assert_eq!(metadata.state(), AttentionState::ChunkedPrefill);
    let decode = Said {
        layout: "BNSD_NBSD".to_owned(),
        query: bf16s([2, 4, 1, 512]),
        out: bf16s([4, 2, 1, 512]),
        ropes: ropes([2, 4, 1, 64], [6, 128, 64]),
        kv_lengths: Some(vec![131, 10]),
        ..absorbed(2, 2)
    };
    // Behind the prefill a dummy of three tokens.
    let own = Said { sparse_mode: 3, mask: compressed(), ..plain(23, 23, &[20, 23], &[20, 23]) };
    let cached = plain(20, 7, &[20], &[7]);
    let calls = said(&table, Cache::BnBsH, &metadata, 2, 80);
    assert_eq!(calls, [own, cached, decode]);
}

/// Runs the layers of a step: the layouts of what was planned, and what failed.
fn preferred_calls(
    table: &Table,
    backends: Backends<bf16>,
    layers: usize,
    metadata: &AttentionMetadata,
) -> (Vec<String>, Option<Error>) {
    let stream = &table.stream;
    let shape = CacheShape::new(layers, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, shape, pad).unwrap();
    let shape = AttentionShape::new(HEADS, 1, DIM);
    let mut attention = Attention::new(shape, cache, backends);
    let tokens = metadata.tokens();
    let rows = |heads: usize| {
        let ones = vec![bf16::ONE; tokens * heads * DIM];
        stream.upload(&ones, [tokens, heads, DIM]).unwrap()
    };
    let (query, key) = (rows(HEADS), rows(1));
    recorder::take();
    let mut step = match attention.begin(stream, metadata) {
        Ok(step) => step,
        Err(refused) => return (Vec::new(), Some(refused)),
    };
    let mut failed = None;
    for layer in 0..layers {
        if let Err(error) = step.forward(layer, (&query, &key, &key)) {
            failed = Some(error);
        }
    }
    drop(step);
    stream.synchronize().unwrap();
    let calls = recorder::take();
    (calls.into_iter().map(|said| said.layout).collect(), failed)
}

#[test]
fn a_step_plans_once_with_each_backend_that_its_layers_prefer() {
    let table = Table::new();
    let backends = || {
        let backends = Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
        backends.prefer([1, 2], &[AttentionState::DecodeOnly], "paged_decode").unwrap()
    };
    let decode = metadata(CHUNKED, None, &[(1, 1, 0)]);
    let prefill = metadata(CHUNKED, None, &[(0, 2, 0)]);
    let (calls, failed) = preferred_calls(&table, backends(), 4, &prefill);
    assert_eq!((calls, failed), (vec!["TND".to_owned()], None));
    let both = vec!["TND".to_owned(), "BSH".to_owned()];
    let (calls, failed) = preferred_calls(&table, backends(), 4, &decode);
    assert_eq!((&calls, failed), (&both, None));
    // Layers that come to one backend share its plan: those that prefer the first, and those that fall back to it.
    for (name, step) in [("fused", &decode), ("paged_decode", &prefill)] {
        let backends = backends().prefer([1, 2], &AttentionState::ALL, name).unwrap();
        let (calls, failed) = preferred_calls(&table, backends, 4, step);
        assert_eq!((calls, failed), (vec!["TND".to_owned()], None), "{name}");
    }
    // The cache does not have a layer that prefers a backend.
    let (_, failed) = preferred_calls(&table, backends(), 2, &prefill);
    match failed {
        Some(Error::Violation(refused)) => {
            assert_eq!(refused.rule, &rules::BACKEND_LAYERS);
            assert_eq!(refused.given, "a preference of layer 2");
        }
        other => panic!("{other:?}"),
    }
}
