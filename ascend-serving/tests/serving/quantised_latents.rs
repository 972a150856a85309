//! Latents of one byte with a scale for each layer: which products and releases read them, what is refused with what
//! mends it, and how near attention over them is.

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_serving::kv::{
    Cache, CacheShape, ChannelScales, LatentScale, PadPolicy, PagedKvCache, QuantisedType, Sequence,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    LatentForm, LatentRows, LatentTensors, LayerInputs, LayerTensor, QuantisedQueries, RangeCheck, Result, UpProjected,
    Violation, rules,
};

use crate::harness::{self, numbers};
use crate::quantised_caches::{ascend_950, emulated_as};

use QuantisedType::{Float8E4M3Fn as E4m3, HiFloat8 as Hif8, Int8};

const HEADS: usize = 2;
const LATENT: usize = 512;
const ROPE: usize = 64;
const DIM: usize = 128;
const PAD: PadPolicy = PadPolicy::SkipNegative;

fn scale(stored: QuantisedType) -> LatentScale {
    LatentScale::covering(stored, &[bf16::ONE]).unwrap()
}

/// A cache of one layer, of 8 blocks.
fn cache(stream: &Stream, format: Cache, stored: QuantisedType) -> Result<PagedKvCache<bf16>> {
    let shape = CacheShape::latent(1).format(format);
    PagedKvCache::quantised_latents(stream, 8, 128, shape, PAD, stored, &[scale(stored)])
}

/// Latents and rotary keys of one byte, which no call of latent attention reads.
fn by_channel(stream: &Stream) -> PagedKvCache<bf16> {
    let shape = CacheShape::latent(1);
    let scales = [ChannelScales::uniform(&shape, 0.1, 0.1).unwrap()];
    PagedKvCache::quantised(stream, 8, 128, shape, PAD, QuantisedType::Int8, &scales).unwrap()
}

fn attention(cache: PagedKvCache<bf16>) -> Attention<bf16> {
    let backends =
        Backends::none().with(Backend::QuantisedDecode).with(Backend::MLA_256_MIB).with(Backend::QUANTISED_MLA_256_MIB);
    Attention::new(AttentionShape::latent(HEADS), cache, backends)
}

fn rows(stream: &Stream, seed: u64, tokens: usize, heads: usize, dim: usize) -> Tensor<bf16> {
    let numbers: Vec<bf16> = numbers(seed, tokens * heads * dim).into_iter().map(bf16::from_f32).collect();
    stream.upload(&numbers, [tokens, heads, dim]).unwrap()
}

/// Keys and values of all heads, the first elements of each latent.
fn project(stream: &Stream, _: usize, rows: LatentRows<'_, bf16>, out: &UpProjected<bf16>) -> Result<()> {
    let [latents, ropes] = [rows.latent.download(stream)?, rows.key_rope.download(stream)?];
    let each = |row: &[bf16], n: usize| row[..n].repeat(HEADS);
    let of_latents: Vec<bf16> = latents.chunks(LATENT).flat_map(|row| each(row, DIM)).collect();
    let of_ropes: Vec<bf16> = ropes.chunks(ROPE).flat_map(|row| each(row, ROPE)).collect();
    out.key.overwrite(stream, &of_latents)?;
    out.value.overwrite(stream, &of_latents)?;
    Ok(out.key_rope.overwrite(stream, &of_ropes)?)
}

/// Which queries a step has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Queries {
    Absorbed,
    Quantised(QuantisedType),
    Plain,
    Mixed,
}

/// Computes a step in which a request adds tokens of these numbers.
fn step(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    sequence: &mut Sequence,
    (seed, new): (u64, usize),
    queries: Queries,
) -> Result<Tensor<bf16>> {
    attention.grow(stream, sequence, new)?;
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(sequence, new)], settings)?;
    let (latent, key_rope) = (rows(stream, seed, new, 1, LATENT), rows(stream, seed + 1, new, 1, ROPE));
    let query_rope = rows(stream, seed + 2, new, HEADS, ROPE);
    let absorbed = rows(stream, seed + 3, new, HEADS, LATENT);
    let plain = rows(stream, seed + 3, new, HEADS, DIM);
    let mut step = attention.begin(stream, &metadata)?;
    let tensors = |form| LatentTensors { query_rope: &query_rope, form };
    let decoded = Tensor::empty(stream.device(), [HEADS, new, LATENT])?;
    let output = match queries {
        Queries::Quantised(stored) => {
            let both = (&absorbed, &query_rope);
            let (queries, query_rope) = QuantisedQueries::quantise_on_host(stream, stored, both, scale(stored))?;
            step.forward(0, LayerInputs::quantised_latent(&queries, &query_rope, &latent, &key_rope))
        }
        Queries::Absorbed => {
            step.forward(0, LayerInputs::latent(&absorbed, &latent, &key_rope, tensors(LatentForm::Absorbed)))
        }
        Queries::Plain => {
            step.forward(0, LayerInputs::latent(&plain, &latent, &key_rope, tensors(LatentForm::Plain(&project))))
        }
        Queries::Mixed => {
            let form = LatentForm::Mixed { absorbed: &absorbed, decoded: &decoded, projection: &project };
            step.forward(0, LayerInputs::latent(&plain, &latent, &key_rope, tensors(form)))
        }
    }?
    .clone();
    step.end()?;
    Ok(output)
}

fn reasons<R>(outcome: Result<R>) -> String {
    match outcome.map(drop).unwrap_err() {
        Error::NoBackend { reasons, .. } => reasons,
        other => panic!("{other}"),
    }
}

fn violation<R>(outcome: Result<R>) -> Violation {
    match outcome.map(drop).unwrap_err() {
        Error::Violation(why) | Error::Attention(ascend_attention::Error::Violation(why)) => why,
        other => panic!("{other}"),
    }
}

/// A prompt, a chunk behind it, a decode, and as many drafts as the release takes, where it takes such latents.
#[test]
fn releases_serve_what_they_take() {
    let all = [(Cache::Nz, Int8), (Cache::Nz, E4m3), (Cache::BnBsH, E4m3), (Cache::BnNBsD, Hif8), (Cache::BnBsH, Int8)];
    for (soc, cann) in [
        (Soc::AtlasA2, Cann::V8_1),
        (Soc::AtlasA2, Cann::V8_5),
        (Soc::AtlasA3, Cann::V9_0),
        (Soc::AtlasA2, Cann::V9_1),
        (Soc::AtlasA3, Cann::V9_2),
        (Soc::Ascend950, Cann::V9_0),
        (Soc::Ascend950, Cann::V9_1),
        (Soc::Ascend950, Cann::V9_2),
        (Soc::AtlasInference, Cann::V9_1),
    ] {
        let Some(stream) = emulated_as(soc, cann) else {
            return;
        };
        let served = match soc {
            Soc::Ascend950 => &all[..4],
            Soc::AtlasInference => &[],
            _ if cann < Cann::V8_5 => &[],
            _ => &all[..1],
        };
        let most = if soc != Soc::Ascend950 && cann >= Cann::V9_1 { 32 } else { 16 };
        for (format, stored) in all {
            let made = cache(&stream, format, stored);
            if !served.contains(&(format, stored)) {
                let said = made.map(drop).unwrap_err().to_string();
                let mended = ["on Ascend 950", "install CANN 8.5", "fix"];
                assert!(mended.iter().any(|words| said.contains(words)), "{said}");
                continue;
            }
            let mut attention = attention(made.unwrap());
            let mut sequence = attention.sequence();
            let quantised = Queries::Quantised(stored);
            let mut run = |new, queries| step(&stream, &mut attention, &mut sequence, (new as u64, new), queries);
            for (new, queries) in [(130, Queries::Plain), (20, Queries::Plain), (1, quantised), (most, quantised)] {
                let output = run(new, queries).unwrap_or_else(|why| panic!("{soc:?} {cann:?} {format:?}: {why}"));
                let numbers = output.download(&stream).unwrap();
                assert!(numbers.iter().all(|x| x.is_finite()) && numbers.iter().any(|x| x.to_f32() != 0.0));
            }
            let said = reasons(run(most + 1, quantised));
            let rule = if soc == Soc::Ascend950 { "mla.full_quant_950" } else { "mla.rows" };
            assert!(said.contains(rule), "{soc:?} {cann:?}: {said}");
        }
    }
}

#[test]
fn a_cache_that_cannot_be_is_refused_with_what_mends_it() {
    let stream = harness::stream();
    let (nz, one) = (CacheShape::latent(1).format(Cache::Nz), [scale(Int8)]);
    let made = |block_size, shape, stored, scales: &[LatentScale]| {
        violation(PagedKvCache::<bf16>::quantised_latents(&stream, 4, block_size, shape, PAD, stored, scales))
    };
    for (why, rule, words) in [
        (made(128, nz, Int8, &[]), "quantised.scale", "0 layers"),
        (made(128, nz, Int8, &[one[0]; 2]), "quantised.scale", "2 layers"),
        (made(128, CacheShape::new(1, 1, 128).format(Cache::Nz), Int8, &one), "argument.value", "CacheShape::latent"),
        (made(64, nz, Int8, &one), "mla.full_quant", "128 tokens"),
        (made(128, CacheShape::latent(1), Int8, &one), "mla.full_quant", "`Cache::Nz`"),
        (made(0, nz, Int8, &one), "pool.size", "1"),
    ] {
        assert_eq!(why.rule.id, rule, "{why}");
        assert!(why.to_string().contains(words), "{why}");
    }
    let of_half = PagedKvCache::<f16>::quantised_latents(&stream, 4, 128, nz, PAD, Int8, &one);
    assert!(violation(of_half).allowed.starts_with("BF16"));
    let made = cache(&stream, Cache::Nz, Int8).unwrap();
    assert_eq!(made.bytes(), 8 * 128 * (LATENT + 2 * ROPE));
    assert_eq!(made.quantised_layer(0).unwrap().latent_scale(), Some(one[0]));
    assert!(made.layer(0).unwrap_err().breaks(&rules::CACHE_QUANTISED));
}

#[test]
fn scales_that_divide_nothing_are_refused() {
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-40, -0.0] {
        let why = LatentScale::new(wrong).unwrap_err();
        assert_eq!(why.rule, &rules::QUANTISED_SCALE, "{why}");
    }
    assert_eq!(LatentScale::new(0.1).unwrap().to_f32(), bf16::from_f32(0.1).to_f32());
    assert_eq!(LatentScale::covering(Int8, &[bf16::ZERO]).unwrap().to_f32(), 1.0);
    assert_eq!(LatentScale::covering::<bf16>(Int8, &[]).unwrap().to_f32(), 1.0);
    let why = LatentScale::covering(Int8, &[bf16::NAN]).unwrap_err();
    assert_eq!(why.rule, &rules::QUANTISED_FINITE);
}

#[test]
fn queries_that_do_not_go_with_the_latents_are_refused_with_what_mends_them() {
    let stream = harness::stream();
    let quantised = || cache(&stream, Cache::Nz, Int8).unwrap();
    let plain = || PagedKvCache::new(stream.device(), 8, 128, CacheShape::latent(1).format(Cache::Nz), PAD).unwrap();
    let refused = |cache: PagedKvCache<bf16>, queries| {
        let mut attention = attention(cache);
        let mut sequence = attention.sequence();
        let outcome = step(&stream, &mut attention, &mut sequence, (3, 2), queries);
        let said = reasons(outcome);
        assert_eq!(attention.computed_tokens(&sequence).unwrap(), 0);
        said
    };
    for (said, words) in [
        (refused(quantised(), Queries::Absorbed), "`LayerInputs::quantised_latent`"),
        (refused(quantised(), Queries::Mixed), "`LatentForm::QuantisedMixed`"),
        (refused(plain(), Queries::Quantised(Int8)), "`PagedKvCache::quantised_latents`"),
        // The operator's own rule for queries of another type than the cache.
        (refused(quantised(), Queries::Quantised(E4m3)), "quantised_mla: "),
    ] {
        assert!(said.contains(words), "{said}");
    }
    let said = refused(quantised(), Queries::Absorbed);
    assert!(said.contains("`Backend::QUANTISED_MLA_256_MIB`"), "{said}");
    // Each backend has the caches of its name.
    for (cache, words) in [(plain(), "add `Backend::MLA_256_MIB`"), (by_channel(&stream), "scales of channels")] {
        let backends = Backends::none().with(Backend::QUANTISED_MLA_256_MIB);
        let mut attention = Attention::new(AttentionShape::latent(HEADS), cache, backends);
        let mut sequence = attention.sequence();
        let said = reasons(step(&stream, &mut attention, &mut sequence, (3, 2), Queries::Plain));
        assert!(said.contains("backend.quantised") && said.contains(words), "{said}");
    }

    let scales_of = |rows| harness::filled(&stream, 0.5f32, [rows, HEADS]);
    let (scales, half) = (scales_of(3), rows(&stream, 5, 3, HEADS, LATENT));
    let why = violation(QuantisedQueries::new(&half, &scales));
    assert!(why.allowed.starts_with("INT8"), "{why}");
    let bytes = |rows| harness::filled(&stream, 1i8, [rows, HEADS, LATENT]);
    assert!(violation(QuantisedQueries::new(&bytes(4), &scales)).given.contains("scale"));
    let queries = QuantisedQueries::new(&bytes(3), &scales).unwrap();
    assert_eq!((queries.query().shape(), queries.scale().shape()), (&[3, HEADS, LATENT][..], &[3, HEADS][..]));
    let fewer = rows(&stream, 1, 2, HEADS, ROPE);
    let outcome = QuantisedQueries::quantise_on_host(&stream, Int8, (&half, &fewer), scale(Int8));
    assert!(violation(outcome).given.contains("beside rotary parts"));

    // No call reads other queries beside those of one byte.
    let mut attention = attention(quantised());
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    let (latent, key_rope) = (rows(&stream, 1, 3, 1, LATENT), rows(&stream, 2, 3, 1, ROPE));
    let query_rope = rows(&stream, 3, 3, HEADS, ROPE);
    let tensors = LatentTensors { query_rope: &query_rope, form: LatentForm::Quantised(&queries) };
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let why = violation(step.forward(0, LayerInputs::latent(&half, &latent, &key_rope, tensors)));
    assert_eq!(why.rule, &rules::STEP_HEADS, "{why}");
    let short = QuantisedQueries::new(&bytes(2), &scales_of(2)).unwrap();
    let why = violation(step.forward(0, LayerInputs::quantised_latent(&short, &query_rope, &latent, &key_rope)));
    assert_eq!(why.rule, &rules::STEP_TOKENS, "{why}");
    // What it advises.
    let inputs = LayerInputs::quantised_latent(&queries, &query_rope, &latent, &key_rope);
    step.forward(0, inputs).unwrap();
    // A layer that shares latents reads them in the cache, by queries of its form.
    let tensors = LatentTensors { query_rope: &query_rope, form: LatentForm::Plain(&project) };
    let plain = rows(&stream, 5, 3, HEADS, DIM);
    let why = violation(step.forward(0, LayerInputs::latent(&plain, &latent, &key_rope, tensors).shared_keys()));
    assert_eq!(why.rule, &rules::STEP_SHARED_KEYS, "{why}");
    assert!(why.fix.contains("`LayerInputs::quantised_latent`"), "{why}");
    step.forward(0, inputs.shared_keys()).unwrap();
    step.end().unwrap();
}

/// Heads of zeros have a scale that divides; scales that leave no rotary part a number are refused.
#[test]
fn rotary_parts_stay_numbers_when_they_are_divided() {
    let stream = harness::stream();
    let (zeros, ropes) = (rows(&stream, 1, 2, HEADS, LATENT), rows(&stream, 2, 2, HEADS, ROPE));
    zeros.clear(&stream).unwrap();
    let quantise = |query: &Tensor<bf16>, latents: f32| {
        let latents = LatentScale::new(latents).unwrap();
        QuantisedQueries::quantise_on_host(&stream, Int8, (query, &ropes), latents)
    };
    let (queries, divided) = quantise(&zeros, 0.5).unwrap();
    assert!(queries.scale().download(&stream).unwrap().iter().all(|scale| *scale == 1.0));
    let [halves, ropes] = [&divided, &ropes].map(|tensor| tensor.download(&stream).unwrap());
    assert!(halves.iter().zip(&ropes).all(|(half, rope)| half.to_f32() == rope.to_f32() / 0.5));
    let why = violation(quantise(&rows(&stream, 1, 2, HEADS, LATENT), 2e-38));
    assert_eq!(why.rule, &rules::QUANTISED_SCALE, "{why}");
    assert!(why.given.contains("head 0 of row 0"), "{why}");
}

/// A head with a number that is none has no attention, and the check of ranges finds it; other heads are not touched.
#[test]
fn a_query_that_is_not_finite_is_found_in_its_head() {
    let stream = harness::stream();
    let mut attention = attention(cache(&stream, Cache::Nz, Int8).unwrap());
    // Divided by a small scale, healthy rotary parts of the queries are beyond a limit that is right for the rest.
    attention.set_range_check(RangeCheck::always().limit(10.0)).unwrap();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let mut absorbed = rows(&stream, 1, 1, HEADS, LATENT).download(&stream).unwrap();
    absorbed[LATENT + 5] = bf16::NAN;
    let absorbed = stream.upload(&absorbed, [1, HEADS, LATENT]).unwrap();
    let ropes = rows(&stream, 2, 1, HEADS, ROPE);
    let (queries, query_rope) =
        QuantisedQueries::quantise_on_host(&stream, Int8, (&absorbed, &ropes), scale(Int8)).unwrap();
    assert!(query_rope.download(&stream).unwrap()[..ROPE].iter().any(|x| x.to_f32().abs() > 10.0));
    let (latent, key_rope) = (rows(&stream, 3, 1, 1, LATENT), rows(&stream, 4, 1, 1, ROPE));
    let mut step = attention.begin(&stream, &metadata).unwrap();
    // The rotary parts of another layer's queries are divided by another scale.
    let other = LatentScale::new(2.0 * scale(Int8).to_f32()).unwrap();
    let (of_other, rope_of_other) =
        QuantisedQueries::quantise_on_host(&stream, Int8, (&absorbed, &ropes), other).unwrap();
    let why = violation(step.forward(0, LayerInputs::quantised_latent(&of_other, &rope_of_other, &latent, &key_rope)));
    assert_eq!(why.rule, &rules::QUANTISED_SCALE, "{why}");
    let inputs = LayerInputs::quantised_latent(&queries, &query_rope, &latent, &key_rope);
    let output = step.forward(0, inputs).unwrap().download(&stream).unwrap();
    step.end().unwrap();
    let (first, second) = output.split_at(LATENT);
    assert!(first.iter().all(|x| x.is_finite()) && second.iter().all(|x| x.is_nan()));
    let found = attention.await_range_findings().unwrap();
    let tensors: Vec<_> = found.iter().map(|finding| (finding.tensor, finding.report.over)).collect();
    assert_eq!(tensors, [(LayerTensor::QueryRope, 0), (LayerTensor::Output, 0)]);
}

/// The largest and the mean difference of decodes and drafts from those over latents of 16 bits, as shares of the
/// outputs' range.
fn differences(stream: &Stream, format: Cache, stored: QuantisedType) -> [f64; 2] {
    let shape = CacheShape::latent(1).format(format);
    let plain = PagedKvCache::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let caches = [(plain, Queries::Absorbed), (cache(stream, format, stored).unwrap(), Queries::Quantised(stored))];
    let [want, got] = caches.map(|(cache, queries)| {
        let mut attention = attention(cache);
        let mut sequence = attention.sequence();
        let mut outputs = Vec::new();
        for (nth, new) in [16, 16, 16, 1, 1, 16, 16, 16, 16, 16, 1, 16, 3].into_iter().enumerate() {
            let numbers = (10 * nth as u64, new);
            let output = step(stream, &mut attention, &mut sequence, numbers, queries).unwrap();
            outputs.extend(output.download(stream).unwrap().iter().map(|x| f64::from(x.to_f32())));
        }
        outputs
    });
    let range = want.iter().fold(0f64, |most, x| most.max(x.abs()));
    let apart: Vec<f64> = want.iter().zip(&got).map(|(want, got)| (want - got).abs() / range).collect();
    [apart.iter().copied().fold(0.0, f64::max), apart.iter().sum::<f64>() / apart.len() as f64]
}

#[test]
fn the_accuracy_of_quantised_latents() {
    let int8 = Some((harness::stream(), Cache::Nz, Int8, 0.02));
    let floats = [(E4m3, 0.08), (Hif8, 0.12)];
    let floats = floats.map(|(stored, most)| Some((ascend_950()?, Cache::BnBsH, stored, most)));
    for (stream, format, stored, most) in [int8].into_iter().chain(floats).flatten() {
        let [largest, mean] = differences(&stream, format, stored);
        println!("{}: largest {:.2} %, mean {:.3} %", stored.dtype(), 100.0 * largest, 100.0 * mean);
        assert!(largest < most && mean < most / 8.0 && largest > 0.0, "{stored:?}: {largest} {mean}");
    }
}
