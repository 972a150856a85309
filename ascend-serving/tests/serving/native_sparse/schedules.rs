//! Any schedule, and some that meet what only they do.

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, bf16, f16};
use ascend_serving::kv::Sequence;
use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Causality, PrefixCache};
use proptest::prelude::*;

use super::definition::branches;
use super::engine::{Engine, LayerRows, Model, native_sparse};
use super::{HEADS, KV_HEADS, LAYERS, VALUE};
use crate::acts::{Act, act, config};
use crate::harness;
use crate::harness::reference::Half;

/// Compressed blocks of 32 tokens, one every 16; tokens select from 256 on.
pub const SMALL: Model = Model {
    heads: [HEADS, KV_HEADS],
    block_size: 256,
    blocks: 12,
    dump: false,
    block: 32,
    stride: 16,
    select: 64,
    count: 4,
    window: 100,
};

fn model() -> impl Strategy<Value = Model> {
    // A last block of compressed tokens that reaches far, one that reaches nowhere, and blocks of several pages.
    let sizes = [(256, 32, 16, 64), (256, 64, 16, 64), (256, 16, 16, 16), (512, 32, 16, 32), (512, 64, 32, 64)];
    (prop::sample::select(sizes.to_vec()), any::<bool>(), 3usize..6, 1usize..300).prop_map(
        |((block_size, block, stride, select), dump, count, window)| Model {
            heads: [HEADS, KV_HEADS],
            block_size,
            blocks: 9,
            dump,
            block,
            stride,
            select,
            count,
            window,
        },
    )
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn any_schedule_is_the_definition(
        model in model(),
        steps in prop::collection::vec((prop::collection::vec(act(300, 4), 1..5), 0usize..5), 1..7),
    ) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, &model);
        for (acts, pad) in &steps {
            engine.act(acts, *pad)?;
        }
        engine.end();
    }
}

#[test]
fn prompts_chunks_decodes_drafts_forks_and_preemptions_are_the_definition() {
    let stream = harness::stream();
    let mut engine = Engine::new(&stream, &SMALL);
    let steps: [&[Act]; 10] = [
        // A prompt that sees no compressed token, and one that ends with a block.
        &[Act::Chunk(0, 20), Act::Chunk(3, 256)],
        // A prefix that ends with the block whose last compressed tokens end behind it.
        &[Act::Share(1, 256)],
        &[Act::Chunk(0, 30), Act::Chunk(1, 40), Act::Chunk(2, 40)],
        // Drafts that complete compressed tokens and are taken back, beside decodes.
        &[Act::Verify(1, 3, 1), Act::Chunk(2, 1)],
        &[Act::Verify(1, 3, 0), Act::Verify(2, 3, 3)],
        // A fork in the middle of a compressed block, and the sequence that it left.
        &[Act::Share(1, 270)],
        &[Act::Chunk(1, 20), Act::Chunk(3, 2), Act::Chunk(2, 1), Act::Preempt(1)],
        &[Act::Chunk(3, 30), Act::Chunk(1, 200)],
        // Its other tokens again; a request ends, and another one gets its blocks.
        &[Act::Chunk(1, 200), Act::End(0)],
        &[Act::Chunk(1, 17), Act::Chunk(0, 50)],
    ];
    for acts in steps {
        engine.act(acts, 1).unwrap();
    }
    let (compared, left_out) = (engine.compared, engine.left_out);
    assert!(compared >= 150 && left_out * 10 < compared, "{compared} branches, {left_out} left out");
    engine.end();
}

/// Two requests go on differently behind a block that both have; others then get that block and what comes behind it
/// in one of them.
#[test]
fn prefixes_that_are_found_by_their_tokens_do_not_depend_on_what_came_behind_them() {
    let stream = harness::stream();
    let mut native = native_sparse::<bf16>(&stream, &SMALL);
    let mut prefixes = PrefixCache::<u64>::new(native.cache(), Causality::Causal).unwrap();
    let shared: Vec<u64> = (1..=256).collect();
    let behind = |from: u64, tokens: u64| [shared.clone(), (from..from + tokens).collect()].concat();
    let mut found = Vec::new();
    for names in [behind(1000, 260), behind(2000, 260), behind(1000, 270), behind(2000, 270)] {
        let mut sequence = prefixes.share(b"", &names);
        found.push(sequence.len());
        let new = names.len() - sequence.len();
        native.grow(&stream, &mut sequence, new).unwrap();
        let settings = BatchSettings::of(native.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings).unwrap();
        let mut step = native.begin(&stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let rows = LayerRows::of(&stream, &names[names.len() - new..], layer, &SMALL);
            let out = step.forward(layer, rows.tensors()).unwrap().compressed.download(&stream).unwrap();
            let (want, _) = branches::<bf16>(&names, layer, &SMALL);
            let got = &out[(new - 1) * HEADS * VALUE..];
            let apart = |(got, want): (&bf16, &f64)| (got.to_f64() - want).abs();
            let error = got.iter().zip(&want[0]).map(apart).fold(0.0, f64::max);
            assert!(error < 1e-2, "{error} in layer {layer} with {} tokens found", found.last().unwrap());
        }
        step.end().unwrap();
        prefixes.insert(b"", &names, &sequence).unwrap();
    }
    assert_eq!(found, [0, 256, 512, 512]);
}

/// The output of each token of a prompt, when it comes in chunks of this size.
fn in_chunks(names: &[u64], chunk: usize) -> Vec<Vec<bf16>> {
    let stream = harness::stream();
    let mut native = native_sparse::<bf16>(&stream, &SMALL);
    let mut sequence = Sequence::new(native.cache().pool());
    let mut rows = vec![Vec::new(); 3];
    for names in names.chunks(chunk) {
        native.grow(&stream, &mut sequence, names.len()).unwrap();
        let settings = BatchSettings::of(native.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, names.len())], settings).unwrap();
        let mut step = native.begin(&stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let tensors = LayerRows::of(&stream, names, layer, &SMALL);
            let out = step.forward(layer, tensors.tensors()).unwrap();
            for (rows, branch) in rows.iter_mut().zip([out.compressed, out.selected, out.window]) {
                if layer == 0 {
                    rows.extend(branch.download(&stream).unwrap());
                }
            }
        }
        step.end().unwrap();
    }
    rows
}

#[test]
fn a_token_selects_the_same_in_a_prompt_and_alone() {
    let names: Vec<u64> = (1..=350).collect();
    let (whole, parts) = (in_chunks(&names, 350), in_chunks(&names, 7));
    for (branch, (whole, parts)) in whole.iter().zip(&parts).enumerate() {
        let apart = |(a, b): (&bf16, &bf16)| (a.to_f64() - b.to_f64()).abs();
        let error = whole.iter().zip(parts).map(apart).fold(0.0, f64::max);
        assert!(whole.len() == parts.len() && error < 1e-2, "{error} in branch {branch}");
    }
}

/// A prompt of `T`, some of whose tokens are compared in each layer and branch.
fn a_prompt_is_the_definition<T: Half>(stream: &Stream, heads: [usize; 2]) {
    let model = Model { heads, window: 64, ..SMALL };
    let mut native = native_sparse::<T>(stream, &model);
    let mut sequence = Sequence::new(native.cache().pool());
    let names: Vec<u64> = (1..=350).collect();
    native.grow(stream, &mut sequence, names.len()).unwrap();
    let settings = BatchSettings::of(native.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, names.len())], settings).unwrap();
    let mut step = native.begin(stream, &metadata).unwrap();
    let of_token = heads[0] * VALUE;
    let mut certain_rows = 0;
    for layer in 0..LAYERS {
        let out = step.forward(layer, LayerRows::<T>::of(stream, &names, layer, &model).tensors()).unwrap();
        let out = [out.compressed, out.selected, out.window].map(|branch| branch.download(stream).unwrap());
        // One that sees no compressed token, the first that sees one, one that sees all blocks, and some that select.
        for tokens in [31, 32, 200, 305, 320, 335, 350] {
            let (want, certain) = branches::<T>(&names[..tokens], layer, &model);
            certain_rows += usize::from(certain && tokens > 300);
            for (branch, (got, want)) in out.iter().zip(&want).enumerate() {
                if branch == 1 && !certain {
                    continue;
                }
                let got = &got[(tokens - 1) * of_token..tokens * of_token];
                assert_eq!(got.len(), want.len());
                for (got, want) in got.iter().zip(want) {
                    let error = (got.to_f64() - want).abs();
                    assert!(
                        error < 8e-3 * (1.0 + want.abs()),
                        "{error} in branch {branch} of {tokens} tokens, {heads:?}"
                    );
                }
            }
        }
        assert!(out.iter().all(|branch| branch.len() == names.len() * of_token));
    }
    step.end().unwrap();
    assert!(certain_rows >= LAYERS, "{certain_rows} rows whose selection is beyond doubt");
}

#[test]
fn each_release_product_and_type_that_has_the_operators_computes() {
    if harness::not_on_npu("releases and products are those of the emulation") {
        return;
    }
    let all: &[[usize; 2]] = &[[1, 1], [4, 2], [16, 1]];
    for (soc, cann, heads) in
        [(Soc::AtlasA2, Cann::V8_5, all), (Soc::AtlasA3, Cann::V9_0, &all[1..2]), (Soc::AtlasA2, Cann::V9_2, &all[..1])]
    {
        let stream = harness::emulated_stream(soc, cann);
        for &heads in heads {
            a_prompt_is_the_definition::<bf16>(&stream, heads);
            a_prompt_is_the_definition::<f16>(&stream, heads);
        }
    }
}
