//! Any schedule, and some whose calls are known.

use ascend_attention::Stream;
use ascend_serving::kv::{Cache, QuantisedType};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::engine::{Engine, Model, REQUESTS};
use crate::acts::{Act, act, config};
use crate::harness;
use crate::quantised_caches::ascend_950;

/// Models whose latents have 16 bits, or are of this type.
fn model(stored: Option<QuantisedType>) -> impl Strategy<Value = Model> {
    let int8 = stored == Some(QuantisedType::Int8);
    let format = match int8 {
        true => Just(Cache::Nz).boxed(),
        false => prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)].boxed(),
    };
    let sizes = (0usize..2, any::<bool>(), 2usize..5, format);
    (sizes, REQUESTS..150, any::<[bool; 2]>()).prop_map(move |((heads, small, blocks, format), room, flags)| {
        let small = small && stored.is_none() && format != Cache::Nz;
        Model {
            heads: 1 << heads,
            block_size: if small { 16 } else { 128 },
            blocks: if small { 8 * blocks } else { blocks },
            format,
            // Chunks of an NZ cache begin with a block.
            room: if format == Cache::Nz { 128 * REQUESTS + room } else { room },
            dump: flags[0],
            mtp: flags[1],
            stored,
        }
    })
}

type Steps = Vec<(Vec<Act>, usize, bool)>;

fn steps() -> impl Strategy<Value = Steps> {
    prop::collection::vec((prop::collection::vec(act(90, 4), 1..5), 0usize..5, any::<bool>()), 1..6)
}

fn run(stream: &Stream, model: &Model, steps: &Steps) -> Result<(), TestCaseError> {
    let mut engine = Engine::new(stream, model);
    for (acts, pad, absorbed) in steps {
        engine.act(acts, *pad, *absorbed)?;
    }
    engine.end();
    Ok(())
}

proptest! {
    #![proptest_config(config(16))]

    #[test]
    fn any_schedule_is_the_definition(model in model(None), steps in steps()) {
        run(&harness::stream(), &model, &steps)?;
    }

    #[test]
    fn any_schedule_over_int8_is_the_definition(model in model(Some(QuantisedType::Int8)), steps in steps()) {
        run(&harness::stream(), &model, &steps)?;
    }

    #[test]
    fn any_schedule_on_ascend_950_is_the_definition(
        model in prop_oneof![
            model(Some(QuantisedType::Int8)),
            model(Some(QuantisedType::Float8E4M3Fn)),
            model(Some(QuantisedType::HiFloat8)),
        ],
        steps in steps(),
    ) {
        if let Some(stream) = ascend_950() {
            run(&stream, &model, &steps)?;
        }
    }
}

const SMALL: Model = Model {
    heads: 2,
    block_size: 16,
    blocks: 40,
    format: Cache::BnBsH,
    room: 40,
    dump: false,
    mtp: true,
    stored: None,
};

#[test]
fn chunks_stay_within_the_workspace_and_end_with_blocks() {
    let stream = harness::stream();
    let mut engine = Engine::new(&stream, &SMALL);
    let log = |engine: &Engine<'_>| std::mem::take(&mut *engine.projected.lock().unwrap());
    // Two prompts, nothing cached: one projection a layer, of the step's own tokens.
    engine.act(&[Act::Chunk(0, 70), Act::Chunk(3, 25)], 0, false).unwrap();
    assert_eq!(log(&engine), [95, 95]);
    // 70 and 25 cached, a third new: 16 and 16, then 16 and 9, then what is left.
    let acts = [Act::Chunk(4, 3), Act::Chunk(1, 2), Act::Chunk(3, 5)];
    engine.act(&acts, 2, false).unwrap();
    let chunks = log(&engine);
    assert_eq!(engine.schedule.requests.len(), 3);
    assert_eq!(chunks[..chunks.len() / 2], [12, 32, 25, 38]);
    assert_eq!(chunks[..4], chunks[4..]);
    // The other way round, so that the queries have to be put in the order of the chunks: a half each of 33 and 73,
    // then what is left of the longer.
    let acts = [Act::Chunk(3, 4), Act::Chunk(5, 2), Act::Chunk(4, 1)];
    engine.act(&acts, 1, false).unwrap();
    let chunks = log(&engine);
    assert_eq!(chunks[..chunks.len() / 2], [8, 32, 27, 32, 9]);
    // Absorbed steps project nothing.
    let acts = [Act::Chunk(4, 1), Act::Verify(2, 3, 1)];
    engine.act(&acts, 2, true).unwrap();
    engine.act(&[Act::Chunk(4, 1)], 0, true).unwrap();
    assert_eq!(log(&engine), [] as [usize; 0]);
    // Mixed ones project what prefills: the third request, behind a decode of two drafts.
    let len = |engine: &Engine<'_>, at: usize| engine.schedule.requests[at].sequence.len();
    let cached = len(&engine, 2);
    let acts = [Act::Chunk(2, 20), Act::Verify(1, 2, 1)];
    engine.act(&acts, 1, true).unwrap();
    let chunks = log(&engine);
    assert_eq!(chunks[0], 21);
    assert_eq!(chunks[1..chunks.len() / 2].iter().sum::<usize>(), cached);
    assert!(engine.checked >= 30, "{} rows", engine.checked);
    engine.end();
}

/// Prompts, chunks behind cached tokens, decodes and drafts of a whole request.
#[test]
fn nz_caches_serve_whole_requests() {
    let stream = harness::stream();
    for stored in [None, Some(QuantisedType::Int8)] {
        let model = Model { block_size: 128, blocks: 8, format: Cache::Nz, room: 256, stored, ..SMALL };
        whole_requests(&stream, &model);
    }
}

fn whole_requests(stream: &Stream, model: &Model) {
    let mut engine = Engine::new(stream, model);
    let acts = [Act::Chunk(0, 140), Act::Chunk(3, 9)];
    engine.act(&acts, 1, false).unwrap();
    for acts in [[Act::Chunk(4, 1), Act::Chunk(1, 1)], [Act::Verify(4, 3, 2), Act::Chunk(1, 1)]] {
        engine.act(&acts, 2, true).unwrap();
    }
    // Chunks of two blocks for one request, and of one for each of two.
    engine.act(&[Act::Chunk(4, 150)], 0, false).unwrap();
    engine.act(&[Act::Chunk(4, 20), Act::Chunk(1, 3)], 0, false).unwrap();
    // A decode beside a chunk.
    engine.act(&[Act::Chunk(4, 1), Act::Chunk(1, 40)], 1, true).unwrap();
    assert_eq!(engine.mixed, 1);
    assert!(engine.checked >= 27, "{} rows", engine.checked);
    engine.end();
}
