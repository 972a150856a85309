//! Which backend serves which kind of step by product, release and kind of layer: what the book's table says, and
//! what steps then do.

use crate::harness;

use std::fs;
use std::num::NonZeroUsize;

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{AnyTensor, Element, Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backends, BatchRequest, BatchSettings, Causality,
    LayerMask, NamedMask, rules,
};

const DIM: usize = 128;

/// Kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layers {
    Causal,
    Window,
    Chunk,
    Named,
    Sinks,
    Int8,
}

impl Layers {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Causal, "causal"),
        (Self::Window, "window"),
        (Self::Chunk, "local chunks"),
        (Self::Named, "named mask"),
        (Self::Sinks, "sinks"),
        (Self::Int8, "INT8 cache"),
    ];

    fn mask(self) -> LayerMask {
        let tokens = NonZeroUsize::new(128).unwrap();
        match self {
            Self::Window => Causality::Window(tokens).into(),
            Self::Chunk => Causality::Chunk(tokens).into(),
            Self::Named => NamedMask::new("causal", |_, token, key| key <= token).into(),
            _ => Causality::Causal.into(),
        }
    }
}

fn attention<T: Element>(stream: &Stream, layers: Layers) -> Option<Attention<T>> {
    let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
    let shape = CacheShape::new(1, 2, DIM);
    let cache = match layers {
        Layers::Int8 => PagedKvCache::quantised_by_token(device, 4, 128, shape, pad, QuantisedType::Int8).ok()?,
        _ => PagedKvCache::new(device, 4, 128, shape, pad).unwrap(),
    };
    let backends = Backends::standard(device);
    Some(Attention::new(AttentionShape::new(8, 2, DIM), cache, backends))
}

/// A cell for each kind of step.
fn cells<T: Element>(stream: &Stream, layers: Layers) -> Vec<String> {
    let Some(attention) = attention::<T>(stream, layers) else {
        return vec!["-".to_owned(); 5];
    };
    // From 9.0 on sinks are of the query's type.
    let sink: AnyTensor = match stream.device().target().unwrap().cann {
        Cann::V8_1 | Cann::V8_5 => Tensor::<bf16>::empty(stream.device(), [8]).unwrap().into(),
        _ => Tensor::<T>::empty(stream.device(), [8]).unwrap().into(),
    };
    let sink = (layers == Layers::Sinks).then_some(&sink);
    let choices = attention.backend_choices(stream, 0, layers.mask(), sink);
    let choices = choices.unwrap();
    let states: Vec<_> = choices.iter().map(|choice| choice.state).collect();
    use AttentionState as S;
    assert_eq!(states, [S::PrefillNoCache, S::PrefillCacheHit, S::ChunkedPrefill, S::DecodeOnly, S::SpecDecoding]);
    let pool = attention.cache().pool();
    assert_eq!((pool.held_blocks(), pool.steps_in_flight()), (0, 0));
    let cell = |served: &Result<&'static str, _>| match served {
        Ok(name) => format!("`{name}`"),
        Err(_) => "-".to_owned(),
    };
    choices.iter().map(|choice| cell(&choice.served)).collect()
}

fn table() -> String {
    let mut lines = vec![
        "| product, CANN | type | layers | prefill | behind cached | chunked prefill | decode | verify |".to_owned(),
        "|---|---|---|---|---|---|---|---|".to_owned(),
    ];
    for (soc, cann) in [
        (Soc::AtlasA2, Cann::V8_1),
        (Soc::AtlasA2, Cann::V8_5),
        (Soc::AtlasA2, Cann::V9_1),
        (Soc::Ascend950, Cann::V9_1),
        (Soc::AtlasInference, Cann::V9_1),
    ] {
        let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        // Kinds of layers that are served alike share a line.
        let mut known: Vec<(&str, Vec<&str>, Vec<String>)> = Vec::new();
        for (layers, name) in Layers::ALL {
            for (dtype, cells) in [("BF16", cells::<bf16>(&stream, layers)), ("FLOAT16", cells::<f16>(&stream, layers))]
            {
                match known.iter_mut().find(|(of, _, same)| *of == dtype && *same == cells) {
                    Some((_, names, _)) => names.push(name),
                    None => known.push((dtype, vec![name], cells)),
                }
            }
        }
        known.sort_by_key(|(dtype, ..)| *dtype);
        for (dtype, names, cells) in known {
            let names = names.join(", ");
            lines.push(format!("| {soc}, {cann} | {dtype} | {names} | {} |", cells.join(" | ")));
        }
    }
    lines.join("\n")
}

#[test]
fn the_book_has_the_table_of_backends() {
    if harness::not_on_npu("products are emulated") {
        return;
    }
    drop(harness::runtime());
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/backends.md");
    let page = fs::read_to_string(page).unwrap();
    let table = table();
    assert!(page.contains(&table), "docs/src/backends.md should have:\n{table}");
}

/// What is said beforehand is what a step then does.
#[test]
fn a_step_is_served_as_it_was_said() {
    let stream = harness::stream();
    let mut attention = attention::<bf16>(&stream, Layers::Causal).unwrap();
    let choices = attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    for (new, state) in [(5, AttentionState::PrefillNoCache), (1, AttentionState::DecodeOnly)] {
        attention.grow(&stream, &mut sequence, new).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings).unwrap();
        assert_eq!(metadata.state(), state);
        let rows = |heads| stream.upload(&vec![bf16::ONE; new * heads * DIM], [new, heads, DIM]).unwrap();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        step.forward(0, (&rows(8), &rows(2), &rows(2))).unwrap();
        let said = choices.iter().find(|choice| choice.state == state).unwrap();
        assert_eq!(said.served.as_deref(), Ok(step.selected(0).unwrap().name));
        let told = said.to_string();
        assert!(told.starts_with(&format!("{state:?}: ")), "{told}");
    }
}

/// The blocks that padding is written to are no sequence's.
#[test]
fn a_cache_with_a_dump_slot_has_the_same_choices() {
    let stream = harness::stream();
    let choices = |pad| {
        let shape = CacheShape::new(1, 2, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 16, 128, shape, pad).unwrap();
        let backends = Backends::standard(stream.device());
        let attention = Attention::new(AttentionShape::new(8, 2, DIM), cache, backends);
        let choices = attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap();
        choices.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let without = choices(PadPolicy::SkipNegative);
    for slot in [0, 1600] {
        assert_eq!(choices(PadPolicy::DumpSlot(slot)), without);
    }
}

#[test]
fn a_cache_without_room_for_the_examples_is_refused() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 2, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 1, 128, shape, pad).unwrap();
    let attention = Attention::new(AttentionShape::new(8, 2, DIM), cache, Backends::standard(stream.device()));
    let error = attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap_err();
    assert!(error.breaks(&rules::TABLE_BLOCK), "{error}");
}
