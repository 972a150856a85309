//! Steps that cannot be served, and what is said of them.

use std::ops::Range;

use ascend_attention::attention::{Cumulative, PerRequest};
use ascend_attention::spec::Cann;
use ascend_attention::{AnyTensor, Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionBackend, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, LatentForm, LatentRows, LatentTensors, LayerGroup, LayerInputs, LayerMask, LayerTensors,
    NamedMask, Result, StatePolicy, StepCall, StepContext, StepMemory, StepPlan, StepProgram, StepStage, UpProjected,
    rules,
};

use super::{DIM, LATENT, ROPE, harness};
use harness::filled;

/// The reason why a step over these tensors is refused.
fn refused(
    stream: &Stream,
    backends: Backends<bf16>,
    causality: Causality,
    step: (Cache, usize, usize),
    form: &str,
) -> Error {
    tried(stream, backends, causality, step, form, (None, None)).unwrap_err()
}

/// Queues a layer over these tensors, with a mask of its own and sinks.
fn tried(
    stream: &Stream,
    backends: Backends<bf16>,
    causality: Causality,
    (format, rows, cached): (Cache, usize, usize),
    form: &str,
    (mask, sink): (Option<&LayerMask>, Option<&AnyTensor>),
) -> Result<()> {
    let shape = CacheShape::latent(1).format(format);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 4, 128, shape, pad).unwrap();
    let settings = BatchSettings::of(&cache, causality);
    let mut attention = Attention::new(AttentionShape::latent(2), cache, backends);
    let request = BatchRequest::in_row(&[0, 1], cached, rows);
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let ones = |axes: [usize; 2]| {
        let ones = vec![bf16::ONE; rows * axes[0] * axes[1]];
        let shape = [rows, axes[0], axes[1]];
        stream.upload(&ones, shape).unwrap()
    };
    let projection = |_: &Stream, _: usize, _: LatentRows<'_, bf16>, _: &UpProjected<bf16>| -> Result<()> {
        panic!("nothing is planned")
    };
    let (absorbed, plain) = (ones([2, LATENT]), ones([2, DIM]));
    let decoded = ones([2, LATENT]);
    let mixed = LatentForm::Mixed { absorbed: &absorbed, decoded: &decoded, projection: &projection };
    let (query, form) = match form {
        "absorbed" => (&absorbed, LatentForm::Absorbed),
        "plain" => (&plain, LatentForm::Plain(&projection)),
        _ => (&plain, mixed),
    };
    let (query_rope, latent, key_rope) = (ones([2, ROPE]), ones([1, LATENT]), ones([1, ROPE]));
    let tensors = LatentTensors { query_rope: &query_rope, form };
    let mut step = attention.begin(stream, &metadata).unwrap();
    let mut inputs = LayerInputs::latent(query, &latent, &key_rope, tensors);
    (inputs.mask, inputs.learnable_sink) = (mask, sink);
    let outcome = step.forward(0, inputs).map(drop);
    drop(step);
    if outcome.is_err() {
        // Nothing was written.
        let latents = &attention.cache().layer(0).unwrap().key;
        let latents = latents.download(stream).unwrap();
        assert!(latents.iter().all(|x| *x == bf16::ZERO));
    }
    outcome
}

#[test]
fn what_cannot_be_served_is_refused_with_its_reason() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let mla = || Backends::none().with(Backend::MLA_256_MIB);
    let said = |error: Error| match error {
        Error::NoBackend { reasons, .. } => reasons,
        other => panic!("{other}"),
    };
    let refusal = |backends, causality, rows, cached, form| {
        let step = (Cache::BnBsH, rows, cached);
        said(refused(&stream, backends, causality, step, form))
    };
    let reason = refusal(mla(), Causality::Bidirectional, 1, 5, "absorbed");
    assert!(reason.starts_with("mla: backend.latent"), "{reason}");
    let reason = refusal(mla(), Causality::Causal, 17, 5, "absorbed");
    assert!(reason.starts_with("mla: mla.rows"), "{reason}");
    let small = Backends::none().with(Backend::Mla { workspace_bytes: 100 });
    let reason = refusal(small, Causality::Causal, 17, 5, "plain");
    assert!(reason.starts_with("mla: latent.workspace"), "{reason}");
    let others = Backends::none().with(Backend::PagedDecode).with(Backend::Fused).with(Backend::FusedInTwo);
    let reason = refusal(others, Causality::Causal, 1, 5, "absorbed");
    // The same reason is said once.
    let start = "paged_decode, fused, fused_in_two: backend.latent: ";
    assert!(reason.starts_with(start), "{reason}");
    assert_eq!(reason.matches("backend.latent").count(), 1, "{reason}");
    let reason = refusal(mla(), Causality::Causal, 3, 5, "mixed");
    let why = "mixed queries for 0 decodes and 1 prefills";
    assert!(reason.starts_with("mla: backend.latent") && reason.contains(why), "{reason}");
    // The release has no operator that gathers tokens in pieces.
    let step = (Cache::Nz, 17, 5);
    let reason = said(refused(&stream, mla(), Causality::Causal, step, "plain"));
    assert!(reason.contains("aclnnGatherPaKvCache"), "{reason}");
}

/// A chunk of an NZ cache begins with a block, where the release gathers from such caches.
#[test]
fn a_workspace_below_a_block_of_each_request_is_refused_over_nz() {
    let stream = harness::stream();
    let small = Backends::none().with(Backend::Mla { workspace_bytes: 64 << 10 });
    let why = refused(&stream, small, Causality::Causal, (Cache::Nz, 17, 150), "plain");
    let Error::NoBackend { reasons, .. } = why else { panic!("{why}") };
    assert!(reasons.contains("latent.workspace") && reasons.contains("begins at token"), "{reasons}");
}

#[test]
fn masks_and_sinks_beside_latents_are_refused_with_what_mends_them() {
    let stream = harness::stream();
    let tried = |causality, more| {
        let backends = Backends::none().with(Backend::NamedMask).with(Backend::MLA_256_MIB);
        tried(&stream, backends, causality, (Cache::BnBsH, 1, 5), "absorbed", more)
    };
    let reasons = |causality, more| match tried(causality, more) {
        Err(Error::NoBackend { reasons, .. }) => reasons,
        other => panic!("{other:?}"),
    };
    let sink = stream.upload(&[bf16::ONE; 2], [2]).unwrap();
    let said = reasons(Causality::Causal, (None, Some(&sink)));
    assert!(said.contains("mla: backend.latent"), "{said}");
    assert!(said.contains("compute it outside of the step"), "{said}");
    let all: LayerMask = Causality::Bidirectional.into();
    let named = NamedMask::new("all", |_, _, _| true).into();
    for (mask, rule) in [(&all, "mla: backend.latent"), (&named, "mla: backend.mask")] {
        let said = reasons(Causality::Causal, (Some(mask), None));
        assert!(said.contains(rule), "{said}");
        assert!(said.contains("the mask of `Causality::Causal`"), "{said}");
    }
    // What the refusal advises: a causal layer of a step whose other layers see every key.
    let causal = Causality::Causal.into();
    reasons(Causality::Bidirectional, (None, None));
    tried(Causality::Bidirectional, (Some(&causal), None)).unwrap();
    stream.synchronize().unwrap();
}

/// A backend of the caller that computes whatever it is asked for as keys and values.
struct KeysAndValues;

impl AttentionBackend<bf16> for KeysAndValues {
    fn name(&self) -> &'static str {
        "keys_and_values"
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        Ok(StepCall::of_step(step)?.into())
    }
}

type Program = fn(&StepContext<'_>) -> Result<StepProgram<bf16>>;

/// A backend of the caller with a program over latents.
struct OwnLatents(Program);

impl AttentionBackend<bf16> for OwnLatents {
    fn name(&self) -> &'static str {
        "own_latents"
    }

    fn reads_latents(&self) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        (self.0)(step)
    }
}

/// Work of a step that never begins.
#[derive(Debug)]
struct Never;

impl StepStage<bf16> for Never {
    fn memory(&self) -> StepMemory {
        StepMemory::default()
    }

    fn launch_into(&self, _: &Stream, _: &LayerTensors<'_, bf16>, _: &mut Tensor<bf16>) -> Result<()> {
        panic!("nothing is planned")
    }
}

#[test]
fn one_call_over_latents_computes_all_rows() {
    let stream = harness::stream();
    let tried = |program: Program| {
        let backends = Backends::none().with(OwnLatents(program));
        tried(&stream, backends, Causality::Causal, (Cache::BnBsH, 5, 5), "absorbed", (None, None))
    };
    tried(|step| Ok(StepCall::of_step(step)?.into())).unwrap();
    tried(|step| Ok(StepCall::of_step(step)?.rows(0..5).into())).unwrap();
    stream.synchronize().unwrap();
    let wrong: [(Program, &str); 3] = [
        (|step| Ok(StepProgram::new([part(step, 0..2)?, part(step, 2..5)?])), "2 calls over latents"),
        (|step| Ok(StepProgram::from(part(step, 0..2)?).stage(Never)), "a call of the rows 0..2 over latents"),
        (
            |step| Ok(StepProgram::new([StepCall::of_step(step)?, StepCall::of_step(step)?]).merged(Vec::new())),
            "a merge of calls over latents",
        ),
    ];
    for (program, given) in wrong {
        match tried(program) {
            Err(Error::NoBackend { reasons, .. }) => {
                assert!(reasons.starts_with("own_latents: backend.latent"), "{reasons}");
                assert!(reasons.contains(given) && reasons.contains("one call of the rows 0..5"), "{reasons}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A causal call of some rows of a step of one request.
fn part(step: &StepContext<'_>, rows: Range<usize>) -> Result<StepCall> {
    let keys = step.metadata.kv_lengths().lengths()[0] - step.metadata.tokens() + rows.end;
    let call = StepCall::packed(Cumulative::new(vec![rows.len()])?, PerRequest::new(vec![keys])?);
    Ok(call.mask(Causality::Causal.mask(&step.stream.device().masks())?).rows(rows))
}

/// Absorbed queries of mixed steps are those of the decodes, no more and no fewer, and so is their output.
#[test]
fn tensors_of_other_decodes_are_refused() {
    let stream = harness::stream();
    let shape = CacheShape::latent(1);
    let cache = PagedKvCache::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative).unwrap();
    let settings = BatchSettings::of(&cache, Causality::Causal);
    let backends = Backends::none().with(Backend::MLA_256_MIB);
    let mut attention = Attention::<bf16>::new(AttentionShape::latent(2), cache, backends);
    let rows = |rows: usize, axes: [usize; 2]| -> Tensor<bf16> {
        let zeros = vec![bf16::ZERO; rows * axes[0] * axes[1]];
        stream.upload(&zeros, [rows, axes[0], axes[1]]).unwrap()
    };
    let project = |_: &Stream, _: usize, _: LatentRows<'_, bf16>, to: &UpProjected<bf16>| {
        for tensor in [&to.key, &to.key_rope, &to.value] {
            let elements = tensor.shape().iter().product();
            tensor.overwrite(&stream, &vec![bf16::ZERO; elements])?;
        }
        Ok(())
    };
    let (plain, query_rope) = (rows(2, [2, DIM]), rows(4, [2, ROPE]));
    let (latent, key_rope) = (rows(4, [1, LATENT]), rows(4, [1, ROPE]));
    let requests =
        [BatchRequest::in_row(&[0], 3, 1), BatchRequest::in_row(&[1], 5, 1), BatchRequest::in_row(&[2], 0, 2)];
    for (absorbed, decoded) in [(1, 2), (3, 2), (2, 1), (2, 3), (2, 2)] {
        let metadata = AttentionMetadata::new(&requests, settings).unwrap();
        let (query, output) = (rows(absorbed, [2, LATENT]), rows(2, [decoded, LATENT]));
        let form = LatentForm::Mixed { absorbed: &query, decoded: &output, projection: &project };
        let tensors = LatentTensors { query_rope: &query_rope, form };
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let inputs = LayerInputs::latent(&plain, &latent, &key_rope, tensors);
        let outcome = step.forward(0, inputs).map(drop);
        assert_eq!(outcome.is_ok(), (absorbed, decoded) == (2, 2), "{outcome:?}");
        drop(step);
        stream.synchronize().unwrap();
    }
}

/// Tensors of other shapes than the step and the form have are named, in the first layer and in later ones, and the
/// keys of the layer are not written.
#[test]
fn tensors_of_other_shapes_are_refused_by_name_before_keys_are_written() {
    let stream = harness::stream();
    let ones = |shape: [usize; 3]| -> Tensor<bf16> { filled(&stream, bf16::ONE, shape) };
    let project = |stream: &Stream, _: usize, _: LatentRows<'_, bf16>, to: &UpProjected<bf16>| -> Result<()> {
        for tensor in [&to.key, &to.key_rope, &to.value] {
            tensor.overwrite(stream, &vec![bf16::ZERO; tensor.shape().iter().product()])?;
        }
        Ok(())
    };
    let requests =
        [BatchRequest::in_row(&[0], 3, 1), BatchRequest::in_row(&[1], 5, 1), BatchRequest::in_row(&[2], 0, 2)];
    let [query_rope, latent, key_rope] = [[4, 2, ROPE], [4, 1, LATENT], [4, 1, ROPE]].map(ones);
    let longer = [[5, 2, ROPE], [5, 1, LATENT], [5, 1, ROPE], [3, 2, LATENT], [2, 3, LATENT]].map(ones);
    let (absorbed, decoded) = (ones([2, 2, LATENT]), ones([2, 2, LATENT]));
    let gaps = ones([2, 2, 2 * LATENT]).narrow(2, 0..LATENT).unwrap();
    let mixed = |absorbed, decoded| LatentForm::Mixed { absorbed, decoded, projection: &project };
    let plain = LatentForm::Plain(&project);
    for (query, form) in [
        (ones([4, 2, LATENT]), LatentForm::Absorbed),
        (ones([4, 2, DIM]), plain),
        (ones([2, 2, DIM]), mixed(&absorbed, &decoded)),
    ] {
        let shape = CacheShape::latent(2);
        let cache = PagedKvCache::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative).unwrap();
        let settings = BatchSettings::of(&cache, Causality::Causal);
        let backends = Backends::none().with(Backend::MLA_256_MIB);
        let mut attention = Attention::<bf16>::new(AttentionShape::latent(2), cache, backends);
        let metadata = AttentionMetadata::new(&requests, settings).unwrap();
        let [rows, _, dim] = <[usize; 3]>::try_from(query.shape()).unwrap();
        let others = [[rows, 1, dim], [rows, 2, 2 * dim], [rows + 1, 2, dim]].map(ones);
        let right = [&query, &query_rope, &latent, &key_rope];
        let mut wrong: Vec<_> =
            others.iter().map(|other| ("query", [other, right[1], right[2], right[3]], form)).collect();
        wrong.extend([
            ("query_rope", [right[0], &longer[0], right[2], right[3]], form),
            ("query_rope", [right[0], &absorbed, right[2], right[3]], form),
            ("latent", [right[0], right[1], &longer[1], right[3]], form),
            ("latent", [right[0], right[1], &key_rope, &latent], form),
            ("key_rope", [right[0], right[1], right[2], &longer[2]], form),
            ("key_rope", [right[0], right[1], right[2], &latent], form),
        ]);
        if let LatentForm::Mixed { .. } = form {
            wrong.push(("absorbed", right, mixed(&longer[3], &decoded)));
            wrong.push(("decoded", right, mixed(&absorbed, &longer[4])));
        }
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let mut queue = |layer, [query, query_rope, latent, key_rope]: [&Tensor<bf16>; 4], form| {
            let tensors = LatentTensors { query_rope, form };
            step.forward(layer, LayerInputs::latent(query, latent, key_rope, tensors)).map(drop)
        };
        if let LatentForm::Mixed { .. } = form {
            let why = queue(0, right, mixed(&absorbed, &gaps)).unwrap_err();
            assert!(why.breaks(&rules::STEP_CONTIGUOUS), "{why}");
        }
        for layer in 0..2 {
            for (name, tensors, form) in &wrong {
                let why = queue(layer, *tensors, *form).unwrap_err();
                assert!(why.breaks(&rules::STEP_HEADS) || why.breaks(&rules::STEP_TOKENS), "{form:?}: {why}");
                assert!(why.to_string().contains(&format!("given {name} ")), "{form:?}, {name}: {why}");
            }
            if layer == 0 {
                queue(layer, right, form).unwrap();
            }
        }
        // All layers have the form of the first.
        let (query, other) = match form {
            LatentForm::Absorbed => (ones([4, 2, DIM]), plain),
            _ => (ones([4, 2, LATENT]), LatentForm::Absorbed),
        };
        let why = queue(1, [&query, right[1], right[2], right[3]], other).unwrap_err();
        assert!(why.breaks(&rules::STEP_LAYERS), "{why}");
        assert!(why.to_string().contains(&format!("in the form {other:?}")), "{why}");
        drop(step);
        let [first, second] = [0, 1].map(|layer| {
            let keys = &attention.cache().layer(layer).unwrap().key;
            keys.download(&stream).unwrap().iter().filter(|key| **key != bf16::ZERO).count()
        });
        assert_eq!((first, second), (4 * LATENT, 0), "{form:?}");
    }
}

#[test]
fn a_projection_may_run_the_plan_that_called_it() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, CacheShape::latent(1), pad);
    let cache = cache.unwrap();
    let request = BatchRequest::in_row(&[0], 3, 2);
    let settings = BatchSettings::of(&cache, Causality::Causal);
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let table = cache.block_table(&stream, metadata.table()).unwrap();
    let zeros = |axes: [usize; 2]| -> Tensor<bf16> {
        let zeros = vec![bf16::ZERO; 2 * axes[0] * axes[1]];
        stream.upload(&zeros, [2, axes[0], axes[1]]).unwrap()
    };
    let (query, query_rope) = (zeros([2, DIM]), zeros([2, ROPE]));
    let (latent, key_rope) = (zeros([1, LATENT]), zeros([1, ROPE]));
    let step = StepContext {
        stream: &stream,
        shape: AttentionShape::latent(2),
        metadata: &metadata,
        mask: metadata.mask(),
        block_table: &table,
        recorded: false,
        shares_keys: false,
    };
    type Rows<'a> = LatentRows<'a, bf16>;
    let to_zeros = |to: &UpProjected<bf16>| -> Result<()> {
        for tensor in [&to.key, &to.key_rope, &to.value] {
            let elements = tensor.shape().iter().product();
            tensor.overwrite(&stream, &vec![bf16::ZERO; elements])?;
        }
        Ok(())
    };
    let project = |_: &Stream, _: usize, _: Rows<'_>, to: &UpProjected<bf16>| to_zeros(to);
    let layer = LayerTensors {
        layer: 0,
        query: &query,
        key: &latent,
        value: &key_rope,
        cache: cache.layer(0).unwrap(),
        quantised: None,
        learnable_sink: None,
        latent: Some(LatentTensors { query_rope: &query_rope, form: LatentForm::Plain(&project) }),
    };
    // A backend that does not say that it reads latents is not asked for them.
    let error = StepPlan::new(&KeysAndValues, &step, &layer).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_LATENT), "{error}");
    let backends = Backends::none().with(Backend::MLA_256_MIB);
    let selected = backends.plan(&step, &layer).unwrap();
    let nested = std::cell::Cell::new(0);
    let again = |_: &Stream, _: usize, _: Rows<'_>, to: &UpProjected<bf16>| -> Result<()> {
        nested.set(nested.get() + 1);
        to_zeros(to)?;
        selected.plan.launch(&stream, &layer).map(drop)
    };
    let calls = LayerTensors {
        latent: Some(LatentTensors { query_rope: &query_rope, form: LatentForm::Plain(&again) }),
        ..layer
    };
    selected.plan.launch(&stream, &calls).unwrap();
    assert_eq!(nested.get(), 2, "for the step's own tokens and for a chunk");
    stream.synchronize().unwrap();
}

/// A group of layers of latent attention computes what the same layers do alone.
#[test]
fn layers_of_a_group_may_have_latents() {
    let stream = harness::stream();
    let cache = || {
        let pad = PadPolicy::SkipNegative;
        PagedKvCache::<bf16>::new(stream.device(), 2, 128, CacheShape::latent(1), pad).unwrap()
    };
    let (shape, backends) = (AttentionShape::latent(2), || Backends::none().with(Backend::MLA_256_MIB));
    let tensor = |axes: [usize; 2]| -> Tensor<bf16> {
        let rows = (0..3 * axes[0] * axes[1]).map(|at| bf16::from_f32((at % 7) as f32 / 8.0));
        let rows: Vec<bf16> = rows.collect();
        stream.upload(&rows, [3, axes[0], axes[1]]).unwrap()
    };
    let (query, query_rope) = (tensor([2, LATENT]), tensor([2, ROPE]));
    let (latent, key_rope) = (tensor([1, LATENT]), tensor([1, ROPE]));
    let tensors = LatentTensors { query_rope: &query_rope, form: LatentForm::Absorbed };
    let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);

    let mut alone = Attention::new(shape, cache(), backends());
    let mut sequence = Sequence::new(alone.cache().pool());
    alone.grow(&stream, &mut sequence, 3).unwrap();
    let settings = BatchSettings::of(alone.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    let want = alone.begin(&stream, &metadata).unwrap().forward(0, inputs).cloned();
    let want = want.unwrap().download(&stream).unwrap();

    let group = LayerGroup::new([0], Causality::Causal, shape, cache(), backends());
    let mut model = Attention::of_groups(1, [group]).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 3).unwrap();
    let request = BatchRequest::of(&sequence, 3);
    let metadata = model.metadata(&[request], StatePolicy::default()).unwrap();
    let mut output = stream.upload(&[bf16::NAN; 2 * 3 * LATENT], [2, 3, LATENT]).unwrap();
    let mut step = model.begin(&stream, &metadata).unwrap();
    step.forward_into(0, inputs, &mut output).unwrap();
    step.end().unwrap();
    assert_eq!(output.download(&stream).unwrap(), want);
}
