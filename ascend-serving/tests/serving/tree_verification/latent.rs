//! Trees of latent attention: one call where the release has a tree mask, two otherwise.

use super::{LAYERS, Numbers, Trees, case, picked};
use crate::harness;
use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::{Error as CallError, Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_emu::{Site, inject};
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    AttentionShape, DraftTree, Drafting, Error, GraphLimits, LatentForm, LatentRows, LatentTensors, LayerInputs,
    TreeRequest, TreeVerification, UpProjected, rules,
};
use harness::reference::{Half, Logical};
use proptest::prelude::*;
use proptest::test_runner::Config;

/// Trees of latent attention: cached tokens and parents of the nodes of each request.
struct LatentCase<'a> {
    heads: usize,
    format: Cache,
    requests: &'a [(usize, Vec<i64>)],
    /// Rows beyond the largest tree.
    spare: usize,
    seed: u64,
}

/// Why a test needs the emulation.
const RELEASES: &str = "an installed toolkit is of one release";

const LATENT: usize = 512;
const ROPE: usize = 64;

/// The latent or absorbed part of rows, which comes first, or the rotary one.
fn latent_part<T: Half>(rows: &[T], rope: bool) -> Vec<T> {
    let rows = rows.chunks_exact(LATENT + ROPE);
    let range = if rope { LATENT..LATENT + ROPE } else { 0..LATENT };
    rows.flat_map(|row| row[range.clone()].to_vec()).collect()
}

impl LatentCase<'_> {
    fn trees(&self) -> Trees {
        Trees::of(self.requests, self.spare)
    }

    /// Of every layer.
    fn numbers<T: Half>(&self) -> Vec<Numbers<T>> {
        let (trees, shape) = (self.trees(), AttentionShape::latent(self.heads));
        let layers = (0..LAYERS as u64).map(|layer| {
            let rows = |what: u64, heads| -> Vec<Logical<T>> {
                trees.rows(5 * self.seed + 2 * layer + what, heads, LATENT + ROPE)
            };
            let keys = rows(1, 1);
            let values = keys.iter().map(|key| Logical { data: latent_part(&key.data, false), dim: LATENT, ..*key });
            let values = values.collect();
            trees.numbers([rows(0, self.heads), keys, values], shape.scale)
        });
        layers.collect()
    }

    fn request<'s>(&self, sequences: &'s [Sequence], trees: &'s [DraftTree], r: usize) -> TreeRequest<'s> {
        TreeRequest { sequence: &sequences[r], cached: self.requests[r].0, tree: &trees[r] }
    }

    /// Takes the nodes back, and makes room for them again.
    fn grow_again(&self, sequences: &mut [Sequence]) -> Result<(), Error> {
        for (sequence, (cached, tree)) in sequences.iter_mut().zip(self.requests) {
            sequence.truncate(*cached)?;
            let _ = sequence.grow(tree.len())?;
        }
        Ok(())
    }

    /// Verifies the trees on a machine, compares each node with the definition, and returns why a layer is not one
    /// call, and by whom it would be.
    fn check<T: Half>(
        &self,
        layers: &[Numbers<T>],
        machine: &Machine,
    ) -> Result<Option<(String, Option<Target>)>, Error> {
        let runtime = Runtime::emulated_as(machine)?;
        let stream = &runtime.device(0)?.stream()?;
        let (heads, requests) = (self.heads, self.requests.len());
        let of_case = self.trees();
        let (trees, nodes) = (of_case.trees(), of_case.nodes);
        let shape = CacheShape::latent(LAYERS).format(self.format);
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<T>::new(stream.device(), 16, 128, shape, pad)?;
        let mut sequences = Vec::new();
        for (r, (cached, tree)) in of_case.requests.iter().enumerate() {
            let mut sequence = Sequence::new(cache.pool());
            let tokens = cached + tree.nodes();
            let slots = sequence.grow(tokens)?.slots;
            // The step writes the nodes.
            for (layer, of) in layers.iter().enumerate().filter(|_| *cached > 0) {
                let (rows, slots) = (of.keys[r].packed(0..*cached), &slots[..*cached]);
                let key = stream.upload(&latent_part(&rows, false), [*cached, 1, LATENT])?;
                let rope = stream.upload(&latent_part(&rows, true), [*cached, 1, ROPE])?;
                let write = CacheWrite::plan(&cache, stream, slots, &key, &rope)?;
                cache.write(stream, &write, layer, &key, &rope)?;
            }
            cache.mark_computed(&sequence, *cached)?;
            sequences.push(sequence);
        }
        let upload = |of: &[Logical<T>], rope: bool| -> Result<Tensor<T>, Error> {
            let heads = of[0].heads;
            let of = of.iter().zip(self.requests);
            let data: Vec<T> =
                of.flat_map(|(of, (cached, _))| latent_part(&of.narrow(*cached..cached + nodes).data, rope)).collect();
            let dim = if rope { ROPE } else { LATENT };
            Ok(stream.upload(&data, [requests, heads, nodes, dim])?)
        };
        let uploaded = layers.iter().map(|Numbers { queries, keys, .. }| {
            Ok([upload(queries, false)?, upload(queries, true)?, upload(keys, false)?, upload(keys, true)?])
        });
        let uploaded: Vec<[Tensor<T>; 4]> = uploaded.collect::<Result<_, Error>>()?;
        let shape = AttentionShape::latent(heads);
        let verification = TreeVerification::new(shape);
        let compare = |layer: usize, out: &Tensor<T>, of: &[usize]| {
            let out = out.download(stream).unwrap();
            let same = of_case.compare(&layers[layer], &out, of);
            same.unwrap_or_else(|why| panic!("{machine:?}, layer {layer}: {why}"));
        };
        let all: Vec<usize> = (0..requests).collect();
        let of_all: Vec<_> = all.iter().map(|r| self.request(&sequences, &trees, *r)).collect();
        let mut step = verification.begin(stream, &cache, &of_all)?;
        for (layer, [query, rope, latent, key_rope]) in uploaded.iter().enumerate() {
            let tensors = LatentTensors { query_rope: rope, form: LatentForm::Absorbed };
            let swapped = LayerInputs::latent(query, key_rope, latent, tensors);
            let error = step.forward(layer, swapped).map(drop).unwrap_err();
            assert!(error.breaks(&rules::STEP_HEADS), "{error}");
            let inputs = LayerInputs::latent(query, latent, key_rope, tensors);
            compare(layer, step.forward(layer, inputs)?, &all);
        }
        let is_one_call = step.is_one_call().unwrap();
        let refused = step.refused().map(|refused| (refused.to_string(), refused.taken_by));
        assert_eq!(is_one_call, refused.is_none());
        step.end()?;
        // The step has computed the nodes.
        let again = verification.begin(stream, &cache, &of_all).map(drop);
        let again = again.unwrap_err();
        assert!(again.breaks(&rules::SEQUENCE_COMPUTED), "{again}");
        drop(of_all);
        self.grow_again(&mut sequences)?;

        // The same by graphs, of the requests that have something cached.
        let limits = GraphLimits::new([1, requests + 1], 600).tokens_each(nodes);
        let mut graphs = verification.capture(stream, &cache, &limits)?;
        assert_eq!(graphs.is_one_call(), is_one_call);
        let behind = |r: &usize| self.requests[*r].0 > 0;
        let of: Vec<usize> = all.iter().rev().copied().filter(behind).collect();
        if of.len() < requests {
            let of_all: Vec<_> = all.iter().map(|r| self.request(&sequences, &trees, *r)).collect();
            let begun = graphs.begin(stream, &of_all);
            let error = begun.map(drop).unwrap_err();
            assert!(error.breaks(&rules::GRAPH_LENGTHS), "{error}");
        }
        // A sequence that was not grown by the nodes.
        if let Some(r) = of.first() {
            let forgotten = TreeRequest { cached: sequences[*r].len(), ..self.request(&sequences, &trees, *r) };
            let error = graphs.begin(stream, &[forgotten]).map(drop).unwrap_err();
            assert!(error.breaks(&rules::SEQUENCE_LENGTH), "{error}");
        }
        for of in [&of[..of.len().min(1)], &of] {
            if of.is_empty() {
                continue;
            }
            self.grow_again(&mut sequences)?;
            let of_step = of.iter().map(|r| self.request(&sequences, &trees, *r));
            let mut step = graphs.begin(stream, &of_step.collect::<Vec<_>>())?;
            let [query, rope, latent, key_rope] = uploaded[0].each_ref().map(|of_all| picked(stream, of_all, of));
            let plain = |_: &Stream, _: usize, _: LatentRows<'_, T>, _: &UpProjected<T>| Ok(());
            let form = LatentForm::Plain(&plain);
            let tensors = LatentTensors { query_rope: &rope, form };
            for inputs in [
                LayerInputs::from((&query, &latent, &key_rope)),
                LayerInputs::latent(&query, &latent, &key_rope, tensors),
            ] {
                let why = step.forward(0, inputs).map(drop).unwrap_err();
                assert!(why.breaks(&rules::DRAFT_INPUTS), "{why}");
            }
            for (layer, uploaded) in uploaded.iter().enumerate() {
                let uploaded = uploaded.each_ref();
                let [query, rope, latent, key_rope] = uploaded.map(|of_all| picked(stream, of_all, of));
                let tensors = LatentTensors { query_rope: &rope, form: LatentForm::Absorbed };
                let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);
                let out = step.forward(layer, inputs)?;
                compare(layer, out, of);
            }
            let replayed = step.refused().map(|refused| (refused.to_string(), refused.taken_by));
            assert_eq!((step.is_one_call(), replayed), (Some(is_one_call), refused.clone()));
        }
        Ok(refused)
    }
}

/// Trees of several shapes and sizes, one of them without anything cached.
fn forest() -> Vec<(usize, Vec<i64>)> {
    vec![(130, vec![-1, 0, 0, 1, 1, 2, 3]), (1, vec![-1]), (0, vec![-1, 0, 1, 0]), (257, vec![-1, 0, 0, 0, 0])]
}

#[test]
fn trees_of_latent_attention_are_one_call_where_the_release_has_the_tree_mask() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let newest = Target::new(Soc::AtlasA2, Cann::V9_1);
    let requests = forest();
    let case = |format| LatentCase { heads: 4, format, requests: &requests, spare: 2, seed: 5 };
    let of_bf16 = case(Cache::BnBsH).numbers::<bf16>();
    let of_f16 = case(Cache::BnBsH).numbers::<f16>();
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        for (soc, cann, one) in [
            (Soc::AtlasA2, Cann::V8_5, false),
            (Soc::AtlasA2, Cann::V9_0, false),
            (Soc::AtlasA2, Cann::V9_1, true),
            (Soc::AtlasA2, Cann::V9_2, true),
            (Soc::AtlasA3, Cann::V9_1, true),
            (Soc::Ascend950, Cann::V9_1, false),
        ] {
            let (case, machine) = (case(format), Machine::new(soc, cann));
            for refused in [case.check(&of_bf16, &machine), case.check(&of_f16, &machine)] {
                let refused = refused.unwrap();
                assert_eq!(refused.is_none(), one, "{soc} with CANN {cann}, {format:?}");
                if let Some((refused, taken_by)) = refused {
                    assert_eq!(taken_by, Some(newest), "{refused}");
                    let told = "Atlas A2 with CANN 9.1 takes the call";
                    assert!(refused.ends_with(told), "{refused}");
                }
            }
        }
    }
}

#[test]
fn trees_of_latent_attention_without_a_call_are_refused_with_the_release_that_has_one() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let case = LatentCase { heads: 4, format: Cache::BnBsH, requests: &forest(), spare: 0, seed: 5 };
    match case.check(&case.numbers::<bf16>(), &Machine::new(Soc::AtlasA2, Cann::V8_1)) {
        Err(Error::NoBackend { reasons, .. }) => {
            for told in ["tree_mask: ", "context_and_tree: ", "CANN 9.1 takes the call"] {
                assert!(reasons.contains(told), "{reasons}");
            }
        }
        other => panic!("{other:?}"),
    }
}

/// Where the library lacks the versions of the operator that take rotary parts, neither form has a call.
#[test]
fn trees_of_latent_attention_have_no_call_where_the_operator_is_too_old() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let requests = forest();
    let case = LatentCase { heads: 4, format: Cache::BnBsH, requests: &requests, spare: 0, seed: 5 };
    let numbers = case.numbers::<bf16>();
    let machine = |newest| Machine::new(Soc::AtlasA2, Cann::V9_1).operator(newest);
    let refused = case.check(&numbers, &machine(Version::V3)).unwrap();
    assert!(refused.is_none());
    for newest in [Version::V2, Version::V1] {
        let machine = machine(newest);
        match case.check(&numbers, &machine) {
            Err(Error::NoBackend { reasons, .. }) => {
                for told in ["tree_mask, context_and_tree: ", "V4", "rotary parts"] {
                    assert!(reasons.contains(told), "{newest:?}: {reasons}");
                }
            }
            other => panic!("{newest:?}: {other:?}"),
        }
        let runtime = Runtime::emulated_as(&machine).unwrap();
        let stream = &runtime.device(0).unwrap().stream().unwrap();
        let (shape, pad) = (CacheShape::latent(1), PadPolicy::SkipNegative);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 2, 128, shape, pad).unwrap();
        let verification = TreeVerification::new(AttentionShape::latent(4));
        let limits = GraphLimits::new([1], 100).tokens_each(2);
        let captured = verification.capture(stream, &cache, &limits).map(drop);
        let why = captured.unwrap_err();
        assert!(matches!(why, Error::NoBackend { .. }), "{newest:?}: {why}");
    }
}

/// A verification writes its nodes, as a step does its tokens: what is missing of them is said to the next one.
#[test]
fn a_verification_without_its_last_layer_is_missed_by_the_next() {
    let Some(stream) = &harness::stream_of(Cann::V8_5) else {
        return;
    };
    let (shape, pad) = (CacheShape::latent(LAYERS), PadPolicy::SkipNegative);
    let cache = PagedKvCache::<f16>::new(stream.device(), 3, 128, shape, pad).unwrap();
    let mut sequence = Sequence::new(cache.pool());
    let _ = sequence.grow(5).unwrap();
    cache.mark_computed(&sequence, 5).unwrap();
    let _ = sequence.grow(3).unwrap();
    let tensor = |heads, dim| harness::tensor(stream, [1, heads, 3, dim]);
    let (query, rope) = (tensor(4, LATENT), tensor(4, ROPE));
    let (latent, key_rope) = (tensor(1, LATENT), tensor(1, ROPE));
    let tensors = LatentTensors { query_rope: &rope, form: LatentForm::Absorbed };
    let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);
    let verification = TreeVerification::new(AttentionShape::latent(4));
    let tree = DraftTree::from_parents(&[-1, 0, 0]).unwrap();
    let begin = |sequence: &Sequence, cached| {
        let tree = &tree;
        let requests = [TreeRequest { sequence, cached, tree }];
        let mut step = verification.begin(stream, &cache, &requests)?;
        step.forward(0, inputs)?;
        step.end()
    };
    let why = begin(&sequence, 5).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    assert!(why.to_string().contains("same requests"), "{why}");
    let _ = sequence.grow(3).unwrap();
    let why = begin(&sequence, 8).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    assert!(why.to_string().contains("without layer 1"), "{why}");
}

/// A device that fails is an error, not a reason for other calls.
#[test]
fn trees_of_latent_attention_have_no_other_call_for_a_device_that_fails() {
    /// A tree that no other test has, whose mask is on no device yet.
    const PARENTS: [i64; 9] = [-1, 0, 1, 1, 0, 4, 4, 2, 6];
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    // A machine of this test alone: no memory that others gave back serves an allocation.
    let machine = Machine::new(Soc::AtlasA2, Cann::V9_1).operator(Version::V4);
    let runtime = Runtime::emulated_as(&machine).unwrap();
    let stream = &runtime.device(0).unwrap().stream().unwrap();
    let (shape, pad) = (CacheShape::latent(1), PadPolicy::SkipNegative);
    let cache = PagedKvCache::<f16>::new(stream.device(), 3, 128, shape, pad).unwrap();
    let mut sequence = Sequence::new(cache.pool());
    let _ = sequence.grow(5 + PARENTS.len()).unwrap();
    cache.mark_computed(&sequence, 5).unwrap();
    let tensor = |heads, dim| harness::tensor(stream, [1, heads, PARENTS.len(), dim]);
    let (query, rope) = (tensor(4, LATENT), tensor(4, ROPE));
    let (latent, key_rope) = (tensor(1, LATENT), tensor(1, ROPE));
    let tensors = LatentTensors { query_rope: &rope, form: LatentForm::Absorbed };
    let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);
    let verification = TreeVerification::new(AttentionShape::latent(4));
    let tree = DraftTree::from_parents(&PARENTS).unwrap();
    let request = TreeRequest { sequence: &sequence, cached: 5, tree: &tree };
    // Drafts of an earlier step that were not cut off: the fix cuts them off first.
    let stale = TreeRequest { cached: 4, ..request };
    let why = verification.begin(stream, &cache, &[stale]).unwrap_err();
    assert!(why.breaks(&rules::SEQUENCE_LENGTH) && why.to_string().contains("truncate"), "{why}");
    // Absorbed attention takes 16 query rows of a request.
    let large = DraftTree::chain(16).unwrap();
    let mut long = Sequence::new(cache.pool());
    let _ = long.grow(1 + large.nodes()).unwrap();
    cache.mark_computed(&long, 1).unwrap();
    let large = TreeRequest { sequence: &long, cached: 1, tree: &large };
    let why = verification.begin(stream, &cache, &[large]).unwrap_err();
    assert!(why.breaks(&rules::DRAFT_TREE), "{why}");
    let limits = GraphLimits::new([1], 100).tokens_each(17);
    let why = verification.capture(stream, &cache, &limits).unwrap_err();
    assert!(why.breaks(&rules::DRAFT_TREE) && why.to_string().contains("`GraphLimits::tokens_each`"), "{why}");
    drop(long);
    let limits = GraphLimits::new([1], 100).tokens_each(PARENTS.len());
    // What other layers have is not left out silently.
    let sinks = [Some(Tensor::<f16>::empty(stream.device(), [4]).unwrap())];
    let weight = Tensor::<f16>::empty(stream.device(), [4, 16]).unwrap();
    for (more, rule, fix) in [
        (limits.clone().drafting(Drafting::Mtp), &rules::ARGUMENT_VALUE, "leave `GraphLimits::drafting` out"),
        (limits.clone().learnable_sinks(sinks), &rules::ARGUMENT_VALUE, "verify a chain of drafts"),
        (
            limits.clone().convolutions([(weight.clone(), None)]),
            &rules::GRAPH_INPUTS,
            "leave `GraphLimits::convolutions` out",
        ),
    ] {
        let why = verification.capture(stream, &cache, &more).unwrap_err();
        assert!(why.breaks(rule) && why.to_string().contains(fix), "{why}");
    }
    let fault = inject(Site::Malloc, 1, 207_018);
    let captured = verification.capture(stream, &cache, &limits).map(drop);
    drop(fault);
    let out_of_memory = matches!(captured, Err(Error::Attention(CallError::OutOfMemory { .. })));
    assert!(out_of_memory, "{captured:?}");
    let mut failed = 0;
    for nth in 1..=12 {
        let fault = inject(Site::Malloc, nth, 207_018);
        let step = verification.begin(stream, &cache, &[request]);
        let verified = step.and_then(|mut step| step.forward(0, inputs).map(drop).map(|()| step.is_one_call()));
        drop(fault);
        match verified {
            Ok(is_one_call) => {
                assert_eq!(is_one_call, Some(true), "allocation {nth}");
                break;
            }
            Err(Error::Attention(CallError::OutOfMemory { .. })) => failed += 1,
            Err(other) => panic!("allocation {nth}: {other:?}"),
        }
    }
    assert!(failed > 0);
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(6) })]

    #[test]
    fn any_latent_trees_behind_any_context(case in case(), heads in 0u32..4, nz: bool) {
        if harness::not_on_npu(RELEASES) {
            return Ok(());
        }
        let latent = LatentCase {
            heads: 1 << heads,
            format: if nz { Cache::Nz } else { Cache::BnBsH },
            requests: &case.requests,
            spare: case.spare,
            seed: case.seed,
        };
        let numbers = latent.numbers::<bf16>();
        for (cann, one) in [(Cann::V9_0, false), (Cann::V9_1, true)] {
            let refused = latent.check(&numbers, &Machine::new(Soc::AtlasA2, cann)).unwrap();
            prop_assert_eq!(refused.is_none(), one);
        }
    }
}
