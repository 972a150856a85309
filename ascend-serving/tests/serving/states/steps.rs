//! Steps of a serving engine.

use std::num::NonZeroUsize;

use ascend_attention::bf16;
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    Attention, AttentionShape, AttentionState, Backend, Backends, Causality, Error, LayerInputs, StatePolicy,
};

use super::batch::{self, BLOCK_SIZE, BLOCKS, CHUNKED, MTP, Requests, WHOLE};
use super::recorder::{self, Said};
use super::{Table, bare, bf16s, compressed, ints};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
/// A step.
#[derive(Clone, Copy)]
struct DescribedStep<'a> {
    causality: Causality,
    policy: StatePolicy,
    sink: bool,
    padded: Option<usize>,
    dim: usize,
    requests: &'a Requests,
}

fn step<'a>(policy: StatePolicy, requests: &'a Requests) -> DescribedStep<'a> {
    DescribedStep { causality: Causality::Causal, policy, sink: false, padded: None, dim: DIM, requests }
}

fn window() -> Causality {
    Causality::Window(NonZeroUsize::new(7).unwrap())
}

impl DescribedStep<'_> {
    /// What the step is, who serves it, and what is called for a layer of it.
    fn calls(
        &self,
        table: &Table,
        backends: Backends<bf16>,
    ) -> Result<(AttentionState, &'static str, Vec<Said>), Error> {
        let stream = &table.stream;
        let shape = CacheShape::new(1, KV_HEADS, self.dim);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, shape, pad)?;
        let shape = AttentionShape::new(HEADS, KV_HEADS, self.dim);
        let mut attention = Attention::new(shape, cache, backends);
        let metadata = batch::metadata(self.causality, self.policy, self.padded, self.requests)?;
        let tokens = metadata.tokens() as usize;
        let rows = |heads: usize| {
            let ones = vec![bf16::ONE; tokens * heads * self.dim];
            stream.upload(&ones, [tokens, heads, self.dim])
        };
        let sinks = stream.upload(&[bf16::ONE; HEADS], [HEADS])?;
        let mut step = attention.begin(stream, &metadata)?;
        let (query, key) = (rows(HEADS)?, rows(KV_HEADS)?);
        let mut inputs = LayerInputs::from((&query, &key, &key));
        inputs.learnable_sink = self.sink.then_some(&*sinks);
        let output = step.forward(0, inputs)?.clone();
        let name = step.selected(0).unwrap().name;
        drop(step);
        let real = metadata.actual_tokens() as usize * HEADS * self.dim;
        let got = output.download(stream)?;
        let sane = |x: &bf16| (0.0..=1.01).contains(&x.to_f64());
        assert!(got[..real].iter().all(sane), "attention over zeros and ones");
        Ok((metadata.state(), name, recorder::take()))
    }

    /// The one call of the packed backend.
    fn said(&self, table: &Table) -> (AttentionState, Said) {
        let backends = Backends::none().with(Backend::Fused);
        let (state, name, mut calls) = self.calls(table, backends).unwrap();
        assert_eq!((name, calls.len()), ("fused", 1));
        (state, calls.pop().unwrap())
    }
}

/// What every call of a step over the paged cache says, before lengths.
fn paged(tokens: i64, requests: i64, columns: i64) -> Said {
    let (heads, dim) = (HEADS as i64, DIM as i64);
    let cache = [BLOCKS as i64, BLOCK_SIZE as i64, KV_HEADS as i64 * dim];
    Said {
        mask: compressed(),
        table: Some(ints([requests, columns])),
        block_size: BLOCK_SIZE as i64,
        sparse_mode: 3,
        ..bare("TND", &[tokens, heads, dim], &cache, [heads, KV_HEADS as i64], 1.0 / (DIM as f64).sqrt())
    }
}

/// The parameters of a packed call over the step's own keys.
fn dense(tokens: i64) -> Said {
    let keys = bf16s([tokens, KV_HEADS as i64, DIM as i64]);
    Said { key: keys.clone(), value: keys, table: None, block_size: 0, ..paged(tokens, 0, 0) }
}

fn lengths(said: Said, q: &[i64], kv: &[i64]) -> Said {
    Said { q_lengths: Some(q.to_vec()), kv_lengths: Some(kv.to_vec()), ..said }
}

/// A single row sees every key of its request. vLLM-Ascend gives such steps the compressed mask all the same, in mode
/// 3.
fn unmasked(said: Said) -> Said {
    Said { mask: None, sparse_mode: 0, ..said }
}

#[test]
fn prefill_without_cache() {
    let table = Table::new();
    let (state, said) = step(CHUNKED, &[(0, 5, 0), (0, 3, 0)]).said(&table);
    assert_eq!(state, AttentionState::PrefillNoCache);
    assert_eq!(said, lengths(dense(8), &[5, 8], &[5, 8]));
}

#[test]
fn prefill_with_a_cache_hit() {
    let table = Table::new();
    let (state, said) = step(WHOLE, &[(130, 5, 0), (0, 3, 0)]).said(&table);
    assert_eq!(state, AttentionState::PrefillCacheHit);
    assert_eq!(said, lengths(paged(8, 2, 2), &[5, 8], &[135, 3]));
}

#[test]
fn decode_only() {
    let table = Table::new();
    let (state, said) = step(CHUNKED, &[(130, 1, 0), (9, 1, 0)]).said(&table);
    assert_eq!(state, AttentionState::DecodeOnly);
    assert_eq!(said, unmasked(lengths(paged(2, 2, 2), &[1, 2], &[131, 10])));
}

/// Where vLLM-Ascend calls its operator for paged attention, `Backend::PagedDecode` calls the decode path of the one
/// that this crate has: lengths on the host, no mask, one row a request.
#[test]
fn decode_only_by_the_decode_path() {
    let table = Table::new();
    let backends = || Backends::none().with(Backend::PagedDecode);
    let given = step(CHUNKED, &[(130, 1, 0), (9, 1, 0)]);
    let (state, name, calls) = given.calls(&table, backends()).unwrap();
    assert_eq!((state, name), (AttentionState::DecodeOnly, "paged_decode"));
    let rows = bf16s([2, 1, (HEADS * DIM) as i64]);
    let want = Said {
        layout: "BSH".to_owned(),
        query: rows.clone(),
        out: rows,
        mask: None,
        sparse_mode: 0,
        kv_lengths: Some(vec![131, 10]),
        ..paged(2, 2, 2)
    };
    assert_eq!(calls, [want]);
    // Not with a window, sinks or drafts.
    for other in [
        DescribedStep { causality: window(), ..given },
        DescribedStep { sink: true, ..given },
        step(MTP, &[(9, 3, 2), (20, 1, 0)]),
    ] {
        let error = other.calls(&table, backends()).unwrap_err().to_string();
        assert!(error.contains("paged_decode: backend.decode: "), "{error}");
        assert_eq!(recorder::take(), []);
    }
}

#[test]
fn chunked_prefill() {
    let table = Table::new();
    let (state, said) = step(CHUNKED, &[(130, 1, 0), (9, 20, 0)]).said(&table);
    assert_eq!(state, AttentionState::ChunkedPrefill);
    assert_eq!(said, lengths(paged(21, 2, 2), &[1, 21], &[131, 29]));
}

/// As vLLM-Ascend calls on Ascend 950: the decodes, then the prefills with lengths that begin anew.
#[test]
fn chunked_prefill_in_two_calls() {
    let table = Table::new();
    let backends = || Backends::none().with(Backend::FusedInTwo).with(Backend::Fused);
    for (sink, causality) in [(false, Causality::Causal), (true, window())] {
        let given = DescribedStep {
            sink,
            causality,
            padded: Some(28),
            ..step(CHUNKED, &[(130, 1, 0), (9, 1, 0), (30, 20, 0)])
        };
        let (state, name, calls) = given.calls(&table, backends()).unwrap();
        let want = (AttentionState::ChunkedPrefill, "fused_in_two");
        assert_eq!((state, name), want);
        let with = |said: Said| Said {
            sparse_mode: if sink { 4 } else { 3 },
            tokens: if sink { [6, 0] } else { said.tokens },
            sink: sink.then(|| bf16s([HEADS as i64])),
            ..said
        };
        let decodes = lengths(paged(2, 2, 2), &[1, 2], &[131, 10]);
        let prefills = lengths(paged(26, 2, 2), &[20, 26], &[50, 6]);
        assert_eq!(calls, [with(decodes), with(prefills)]);
    }
    // A prefill in front, no decode, no prefill, nothing cached: one call.
    for requests in
        [[(9, 20, 0), (130, 1, 0)], [(9, 20, 0), (130, 2, 0)], [(9, 1, 0), (130, 1, 0)], [(0, 1, 0), (0, 20, 0)]]
    {
        let given = step(CHUNKED, &requests);
        let (_, name, calls) = given.calls(&table, backends()).unwrap();
        assert_eq!((name, calls.len()), ("fused", 1));
        let alone = Backends::none().with(Backend::FusedInTwo);
        let error = given.calls(&table, alone).unwrap_err().to_string();
        assert!(error.contains("backend.two_calls: "), "{error}");
    }
}

#[test]
fn verifying_drafts() {
    let table = Table::new();
    let (state, said) = step(MTP, &[(9, 4, 3), (20, 2, 1)]).said(&table);
    assert_eq!(state, AttentionState::SpecDecoding);
    assert_eq!(said, lengths(paged(6, 2, 1), &[4, 6], &[13, 22]));
    // The longest that is verified, and one more.
    for (drafts, want) in [(15, AttentionState::SpecDecoding), (16, AttentionState::ChunkedPrefill)] {
        let rows = drafts as i64 + 1;
        let (state, said) = step(MTP, &[(9, drafts + 1, drafts)]).said(&table);
        assert_eq!(state, want);
        assert_eq!(said, lengths(paged(rows, 1, 1), &[rows], &[9 + rows]));
    }
}

#[test]
fn a_window_in_every_state() {
    let table = Table::new();
    for (policy, requests) in [
        (CHUNKED, [(0, 5, 0), (0, 3, 0)]),
        (WHOLE, [(9, 5, 0), (0, 3, 0)]),
        (CHUNKED, [(9, 1, 0), (20, 1, 0)]),
        (CHUNKED, [(9, 1, 0), (20, 6, 0)]),
        (MTP, [(9, 3, 2), (20, 1, 0)]),
    ] {
        let causal = step(policy, &requests);
        let windowed = DescribedStep { causality: window(), ..causal };
        // Seven keys, the token's own among them, are six before it.
        let want = Said { mask: compressed(), sparse_mode: 4, tokens: [6, 0], ..causal.said(&table).1 };
        assert_eq!(windowed.said(&table).1, want);
    }
}

#[test]
fn not_causal() {
    let table = Table::new();
    for requests in [[(0, 5, 0), (0, 3, 0)], [(9, 5, 0), (20, 3, 0)]] {
        let causal = step(CHUNKED, &requests);
        let all = DescribedStep { causality: Causality::Bidirectional, ..causal };
        let want = Said { sparse_mode: 0, mask: None, ..causal.said(&table).1 };
        assert_eq!(all.said(&table).1, want);
    }
}

/// vLLM-Ascend has another operator for models that only encode, and appends an end where the step is padded. The
/// packed call without a mask is the same attention, and the padding is a request of its own.
#[test]
fn encoders_that_pool() {
    let table = Table::new();
    let given = DescribedStep {
        causality: Causality::Bidirectional,
        padded: Some(12),
        ..step(CHUNKED, &[(0, 5, 0), (0, 3, 0)])
    };
    let (state, said) = given.said(&table);
    assert_eq!(state, AttentionState::PrefillNoCache);
    let want = Said { sparse_mode: 0, mask: None, ..lengths(dense(12), &[5, 8, 12], &[5, 8, 12]) };
    assert_eq!(said, want);
}

#[test]
fn sinks_change_nothing_else() {
    let table = Table::new();
    for (policy, requests) in
        [(CHUNKED, [(0, 5, 0), (0, 3, 0)]), (CHUNKED, [(9, 1, 0), (20, 1, 0)]), (CHUNKED, [(9, 1, 0), (20, 6, 0)])]
    {
        for causality in [Causality::Causal, window()] {
            let without = DescribedStep { causality, ..step(policy, &requests) };
            let with = DescribedStep { sink: true, ..without };
            let want = Said { sink: Some(bf16s([HEADS as i64])), ..without.said(&table).1 };
            assert_eq!(with.said(&table).1, want);
        }
    }
}

/// A graph is captured at a size: requests without tokens of their own fill it up.
#[test]
fn padded_to_a_captured_size() {
    let table = Table::new();
    let given = DescribedStep { padded: Some(4), ..step(CHUNKED, &[(130, 1, 0), (9, 1, 0)]) };
    let want = unmasked(lengths(paged(4, 4, 2), &[1, 2, 3, 4], &[131, 10, 1, 1]));
    assert_eq!(given.said(&table).1, want);
}

/// Heads of 512 decode by the operator's call without packing; its packed call, which prefills, does not take them.
#[test]
fn heads_of_512() {
    let table = Table::new();
    let backends = || Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
    let given = DescribedStep { dim: 512, ..step(CHUNKED, &[(130, 1, 0), (9, 1, 0)]) };
    let (_, name, calls) = given.calls(&table, backends()).unwrap();
    assert_eq!(name, "paged_decode");
    let (rows, hidden) = (bf16s([2, 1, HEADS as i64 * 512]), KV_HEADS as i64 * 512);
    let cache = bf16s([BLOCKS as i64, BLOCK_SIZE as i64, hidden]);
    let want = Said {
        layout: "BSH".to_owned(),
        query: rows.clone(),
        key: cache.clone(),
        value: cache,
        out: rows,
        mask: None,
        sparse_mode: 0,
        scale: 1.0 / 512f64.sqrt(),
        kv_lengths: Some(vec![131, 10]),
        ..paged(2, 2, 2)
    };
    assert_eq!(calls, [want]);
    for requests in [[(0, 5, 0), (0, 3, 0)], [(9, 5, 0), (20, 1, 0)]] {
        let given = DescribedStep { dim: 512, ..step(CHUNKED, &requests) };
        let error = given.calls(&table, backends()).unwrap_err().to_string();
        assert!(
            error.starts_with("no backend can serve the step: fused: ")
                && error.contains("512")
                && error.contains("; for other steps: paged_decode (backend.decode)"),
            "{error}"
        );
    }
    // The standard list has calls for them: by a batch axis, and those of the older operators.
    for causality in [Causality::Causal, window(), Causality::Bidirectional] {
        for (requests, serves) in [
            ([(0, 5, 0), (0, 3, 0)], "prompt_and_incre"),
            ([(9, 5, 0), (20, 1, 0)], "prompt_and_incre"),
            ([(9, 5, 0), (20, 5, 0)], "batched_queries"),
        ] {
            let given = DescribedStep { dim: 512, causality, ..step(CHUNKED, &requests) };
            let (_, name, _) = given.calls(&table, Backends::standard(table.stream.device())).unwrap();
            assert_eq!(name, serves, "{causality:?} {requests:?}");
        }
    }
}

/// The operator does not run on the 310P: a backend of other operators does.
#[test]
fn a_product_without_the_operator() {
    let table = Table::of_inference_product();
    for requests in [[(0, 5, 0), (0, 3, 0)], [(9, 1, 0), (20, 1, 0)]] {
        let backends = Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
        let error = step(CHUNKED, &requests).calls(&table, backends);
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("no backend can serve the step: fused")
                && error.contains(": call.product: ")
                && error.contains("310P")
                && error.contains("`.with(Backend::PromptAndIncre)`, named `prompt_and_incre`, adds"),
            "{error}"
        );
        assert_eq!(recorder::take(), []);
    }
}

#[test]
fn the_decode_backend_takes_what_the_packed_call_cannot() {
    let Some(table) = Table::of_narrow_packed_calls() else {
        return;
    };
    let given = DescribedStep { dim: 96, ..step(CHUNKED, &[(20, 1, 0)]) };
    let backends = || Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
    let (_, name, _) = given.calls(&table, backends()).unwrap();
    assert_eq!(name, "paged_decode");
    let windowed = DescribedStep { causality: window(), ..given };
    let error = windowed.calls(&table, backends()).unwrap_err().to_string();
    assert!(
        error.starts_with("no backend can serve the step: fused: packed.head_dim: ")
            && error.contains("; for other steps: paged_decode (backend.decode)"),
        "{error}"
    );
}
