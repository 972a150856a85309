//! Tensors that a plan over latents was not made for, and outputs over memory that it reads: refused before anything
//! runs.

use std::cell::Cell;

use ascend_attention::spec::Rule;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    AttentionMetadata, AttentionShape, Backend, BatchRequest, BatchSettings, Causality, Error, LatentForm, LatentRows,
    LatentTensors, LayerTensors, Result, StepContext, StepPlan, UpProjected, UpProjection, rules,
};

use super::{DIM, LATENT, ROPE, harness};

const HEADS: usize = 2;

fn zeros(stream: &Stream, shape: [usize; 3]) -> Tensor<bf16> {
    let zeros = vec![bf16::ZERO; shape.iter().product()];
    stream.upload(&zeros, shape).unwrap()
}

/// Plans a step of these requests for a layer, of which a test makes others. It gets the plan and the layer.
fn planned(
    stream: &Stream,
    requests: &[BatchRequest<'_>],
    (query, latents): (&Tensor<bf16>, LatentTensors<'_, bf16>),
    test: impl FnOnce(&StepPlan<bf16>, LayerTensors<'_, bf16>),
) {
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 4, 128, CacheShape::latent(1), pad).unwrap();
    let metadata = AttentionMetadata::new(requests, BatchSettings::of(&cache, Causality::Causal)).unwrap();
    let table = cache.block_table(stream, metadata.table()).unwrap();
    let step = StepContext {
        stream,
        shape: AttentionShape::latent(HEADS),
        metadata: &metadata,
        mask: metadata.mask(),
        block_table: &table,
        recorded: false,
        shares_keys: false,
    };
    let [latent, key_rope] = [LATENT, ROPE].map(|dim| zeros(stream, [metadata.tokens(), 1, dim]));
    let layer = LayerTensors {
        layer: 0,
        query,
        key: &latent,
        value: &key_rope,
        cache: cache.layer(0).unwrap(),
        quantised: None,
        learnable_sink: None,
        latent: Some(latents),
    };
    test(&StepPlan::new(&Backend::MLA_256_MIB, &step, &layer).unwrap(), layer);
    stream.synchronize().unwrap();
}

fn rule_of(outcome: Result<()>) -> &'static Rule {
    match outcome.unwrap_err() {
        Error::Violation(violation) => violation.rule,
        other => panic!("{other}"),
    }
}

#[test]
fn mixed_layers_are_refused_before_their_prefills_run() {
    let stream = harness::stream();
    let requests =
        [BatchRequest::in_row(&[0], 3, 1), BatchRequest::in_row(&[1], 5, 1), BatchRequest::in_row(&[2], 0, 2)];
    let projected = Cell::new(0);
    let project = |_: &Stream, _: usize, _: LatentRows<'_, bf16>, to: &UpProjected<bf16>| -> Result<()> {
        projected.set(projected.get() + 1);
        for tensor in [&to.key, &to.key_rope, &to.value] {
            tensor.overwrite(&stream, &vec![bf16::ZERO; tensor.shape().iter().product()])?;
        }
        Ok(())
    };
    let projection: &dyn UpProjection<bf16> = &project;
    let (query, query_rope) = (zeros(&stream, [2, HEADS, DIM]), zeros(&stream, [4, HEADS, ROPE]));
    let (absorbed, decoded) = (zeros(&stream, [2, HEADS, LATENT]), zeros(&stream, [HEADS, 2, LATENT]));
    let form = LatentForm::Mixed { absorbed: &absorbed, decoded: &decoded, projection };
    let latents = LatentTensors { query_rope: &query_rope, form };
    planned(&stream, &requests, (&query, latents), |plan, layer| {
        let launched = |[query, query_rope, absorbed, decoded]: [&Tensor<bf16>; 4], output: &Tensor<bf16>| {
            let form = LatentForm::Mixed { absorbed, decoded, projection };
            let layer = LayerTensors { query, latent: Some(LatentTensors { query_rope, form }), ..layer };
            plan.launch_into(&stream, &layer, &mut output.clone())
        };
        let output = zeros(&stream, [2, HEADS, DIM]);
        let right = [&query, &query_rope, &absorbed, &decoded];
        let longer = [[3, HEADS, DIM], [5, HEADS, ROPE], [3, HEADS, LATENT], [HEADS, 3, LATENT]];
        let longer = longer.map(|shape| zeros(&stream, shape));
        for (at, other) in longer.iter().enumerate() {
            let mut tensors = right;
            tensors[at] = other;
            assert_eq!(rule_of(launched(tensors, &output)), &rules::PLAN_TENSORS, "{at}");
        }
        assert_eq!(rule_of(launched(right, &longer[0])), &rules::PLAN_TENSORS);
        let in_place = [&query, &query_rope, &absorbed, &absorbed];
        assert_eq!(rule_of(launched(in_place, &output)), &rules::ARGUMENT_MEMORY);
        for read in [&query_rope, &absorbed, &decoded] {
            let rows = read.shape().iter().product::<usize>() / (HEADS * DIM);
            let shared = read.reshape([rows, HEADS, DIM]).unwrap().narrow(0, 0..2).unwrap();
            assert_eq!(rule_of(launched(right, &shared)), &rules::ARGUMENT_MEMORY, "{:?}", read.shape());
        }
        assert_eq!(projected.get(), 0);
        launched(right, &output).unwrap();
        assert_eq!(projected.get(), 1);
    });
}

#[test]
fn rotary_parts_are_no_place_for_an_output() {
    let stream = harness::stream();
    let query = zeros(&stream, [2, HEADS, LATENT]);
    let buffer = zeros(&stream, [18, HEADS, ROPE]);
    let query_rope = buffer.narrow(0, 16..18).unwrap();
    let latents = LatentTensors { query_rope: &query_rope, form: LatentForm::Absorbed };
    planned(&stream, &[BatchRequest::in_row(&[0], 3, 2)], (&query, latents), |plan, layer| {
        let launched = |first: usize| {
            let output = buffer.narrow(0, first..first + 16).unwrap();
            let mut output = output.reshape([HEADS, 2, LATENT]).unwrap();
            plan.launch_into(&stream, &layer, &mut output)
        };
        assert_eq!(rule_of(launched(1)), &rules::ARGUMENT_MEMORY);
        launched(0).unwrap();
    });
}
