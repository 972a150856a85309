//! One engine on machines of several releases: what each of them takes is used, the rest falls back or is refused by
//! name.

use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::{AnyTensor, Machine, Runtime, Stream, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    LayerInputs,
};

use super::batch::CHUNKED;
use crate::harness::reference::{Half, Logical, row};

/// A layer and a step of it: cached and new tokens of each request.
#[derive(Clone, Copy, Debug)]
struct Layer<'a> {
    /// Query heads and key heads.
    heads: [usize; 2],
    dim: usize,
    format: Cache,
    block_size: usize,
    /// One more logit a head, of 1.
    sink: Option<Sink>,
    requests: &'a [[usize; 2]],
}

/// Element type of the sinks.
#[derive(Clone, Copy, Debug)]
enum Sink {
    Bf16,
    AsQuery,
}

const GROUPED: [usize; 2] = [4, 2];
const PROMPTS: &[[usize; 2]] = &[[0, 17], [0, 1], [0, 5]];
const CHUNKS: &[[usize; 2]] = &[[70, 3], [0, 9], [31, 1], [16, 4]];
const DECODES: &[[usize; 2]] = &[[70, 1], [1, 1], [130, 1]];

fn layer(dim: usize, block_size: usize, requests: &[[usize; 2]]) -> Layer<'_> {
    Layer { heads: GROUPED, dim, format: Cache::BnBsH, block_size, sink: None, requests }
}

/// Who served a step, and the releases that take what those before refused.
type Served = (&'static str, Vec<Option<Target>>);

pub fn stream_of(cann: Cann) -> Stream {
    let machine = Machine::new(Soc::AtlasA2, cann);
    let runtime = Runtime::emulated_as(&machine).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

impl Layer<'_> {
    /// Runs the step on a machine, and compares each of its rows with the definition.
    fn serve<T: Half>(&self, cann: Cann, backends: Backends<T>) -> Result<Served, Error> {
        let stream = &stream_of(cann);
        let [heads, kv_heads] = self.heads;
        let shape = CacheShape::new(1, kv_heads, self.dim).format(self.format);
        let blocks = self.requests.iter().map(|[cached, new]| {
            let tokens: usize = cached + new;
            tokens.div_ceil(self.block_size)
        });
        let blocks = blocks.sum::<usize>() + 1;
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<T>::new(stream.device(), blocks, self.block_size, shape, pad)?;
        let pool = cache.pool().clone();
        let random = |salt: usize, heads: usize| -> Vec<Logical<T>> {
            let seeds = (0..self.requests.len()).map(|r| 3 * r + salt);
            let tokens = self.requests.iter().map(|[cached, new]| cached + new);
            seeds.zip(tokens).map(|(seed, tokens)| Logical::random(seed as u64, [1, heads, tokens, self.dim])).collect()
        };
        let (queries, keys, values) = (random(0, heads), random(1, kv_heads), random(2, kv_heads));
        let mut sequences = Vec::new();
        for (r, &[cached, new]) in self.requests.iter().enumerate() {
            let mut sequence = Sequence::new(&pool);
            if cached > 0 {
                let slots = sequence.grow(cached)?.slots;
                let upload = |of: &Logical<T>| stream.upload(&of.packed(0..cached), [cached, kv_heads, self.dim]);
                let (key, value) = (upload(&keys[r])?, upload(&values[r])?);
                let write = CacheWrite::plan(&cache, stream, &slots, &key, &value)?;
                cache.write(stream, &write, 0, &key, &value)?;
                cache.mark_computed(&sequence, cached)?;
            }
            let _ = sequence.grow(new)?;
            sequences.push(sequence);
        }
        let batch = sequences.iter().zip(self.requests);
        let batch: Vec<_> = batch.map(|(sequence, [_, new])| BatchRequest::of(sequence, *new)).collect();
        let settings = BatchSettings::of(&cache, Causality::Causal).policy(CHUNKED);
        let metadata = AttentionMetadata::new(&batch, settings)?;
        let tokens = metadata.tokens();
        let packed = |of: &[Logical<T>], heads: usize| {
            let rows = of.iter().zip(self.requests);
            let rows: Vec<T> = rows.flat_map(|(of, &[cached, new])| of.packed(cached..cached + new)).collect();
            stream.upload(&rows, [tokens, heads, self.dim])
        };
        let shape = AttentionShape::new(heads, kv_heads, self.dim);
        let mut attention = Attention::new(shape, cache, backends);
        let mut step = attention.begin(stream, &metadata)?;
        let (query, key, value) = (packed(&queries, heads)?, packed(&keys, kv_heads)?, packed(&values, kv_heads)?);
        let of_bf16 = stream.upload(&vec![bf16::ONE; heads], [heads])?;
        let of_query = stream.upload(&vec![T::from_f32(1.0); heads], [heads])?;
        let sink: Option<&AnyTensor> = self.sink.map(|sink| match sink {
            Sink::Bf16 => &*of_bf16,
            Sink::AsQuery => &*of_query,
        });
        let mut inputs = LayerInputs::from((&query, &key, &value));
        inputs.learnable_sink = sink;
        let output = step.forward(0, inputs)?.clone();
        let selected = step.selected(0).unwrap();
        let refused = selected.refused.iter().map(|refused| refused.taken_by);
        let served = (selected.name, refused.collect());
        drop(step);
        let got = output.download(stream)?;
        let mut token = 0;
        for (r, &[cached, new]) in self.requests.iter().enumerate() {
            let (q, k, v) = (queries[r].exact(), keys[r].exact(), values[r].exact());
            for position in cached..cached + new {
                for head in 0..heads {
                    let causal = |key: usize| key <= position;
                    let want = row(&q, &k, &v, (0, 0), head, position, shape.scale, causal);
                    let (want, lse) = want.unwrap();
                    let kept = match self.sink.is_some() {
                        true => 1.0 / (1.0 + (1.0 - lse).exp()),
                        false => 1.0,
                    };
                    let got = &got[(token * heads + head) * self.dim..][..self.dim];
                    for (got, want) in got.iter().zip(&want) {
                        assert!(
                            (got.to_f64() - want * kept).abs() <= T::TOLERANCE,
                            "{self:?} on CANN {cann}: request {r}, position {position}, head {head}: {got:?}, \
                             expected {want}",
                            got = got.to_f64()
                        );
                    }
                }
                token += 1;
            }
        }
        Ok(served)
    }

    /// Who serves the step from 8.1 to 9.1: the packed call, the decode path behind it, or no backend; 9.2 does as 9.1.
    fn on_each<T: Half>(&self) -> [Option<&'static str>; 4] {
        let served = Cann::ALL.map(|cann| {
            let backends = Backends::<T>::none().with(Backend::Fused).with(Backend::PagedDecode);
            match self.serve(cann, backends) {
                Ok((name, refused)) => {
                    assert_eq!(refused.len(), usize::from(name == "paged_decode"));
                    Some(name)
                }
                Err(Error::NoBackend { .. }) => None,
                Err(other) => panic!("{self:?} on CANN {cann}: {other}"),
            }
        });
        let [known @ .., preview] = served;
        assert_eq!(known.last(), Some(&preview), "{self:?} on 9.2 as on 9.1");
        known
    }
}

const PACKED: Option<&str> = Some("fused");
const ROWS: Option<&str> = Some("paged_decode");

/// Packed calls serve wherever the release takes them; where it does not, single rows go by the decode path, and the
/// rest is refused. Whoever serves, each row is what its definition gives.
#[test]
fn packed_calls_take_what_the_release_does() {
    let mut checked = Vec::new();
    let mut check = |of: &str, layer: Layer<'_>, want: [Option<&'static str>; 4]| {
        let got = match of {
            "f16" => layer.on_each::<f16>(),
            _ => layer.on_each::<bf16>(),
        };
        if got != want {
            checked.push(format!("{of} {layer:?}: {got:?}, expected {want:?}"));
        }
    };
    // FLOAT16 came with 8.5.
    check("bf16", layer(128, 128, CHUNKS), [PACKED; 4]);
    check("f16", layer(128, 128, CHUNKS), [None, PACKED, PACKED, PACKED]);
    check("f16", layer(128, 128, DECODES), [ROWS, PACKED, PACKED, PACKED]);
    check("f16", layer(64, 128, PROMPTS), [None, PACKED, PACKED, PACKED]);
    // So did smaller blocks, of heads that every release knows.
    check("bf16", layer(64, 16, PROMPTS), [PACKED; 4]);
    check("bf16", layer(64, 16, CHUNKS), [None, PACKED, PACKED, PACKED]);
    check("bf16", layer(128, 16, DECODES), [ROWS, PACKED, PACKED, PACKED]);
    check("f16", layer(128, 1024, CHUNKS), [None, PACKED, PACKED, PACKED]);
    check("f16", layer(128, 1024, DECODES), [None, PACKED, PACKED, PACKED]);
    check("f16", layer(128, 512, DECODES), [ROWS, PACKED, PACKED, PACKED]);
    // Heads of other sizes: grouped ones in 8.5, the others in 9.0.
    check("f16", layer(80, 128, CHUNKS), [None, PACKED, PACKED, PACKED]);
    check("bf16", layer(256, 16, CHUNKS), [None, PACKED, PACKED, PACKED]);
    check("f16", layer(256, 16, DECODES), [ROWS, PACKED, PACKED, PACKED]);
    for (requests, want) in [
        (PROMPTS, [None, None, PACKED, PACKED]),
        (CHUNKS, [None, None, PACKED, PACKED]),
        (DECODES, [ROWS, ROWS, PACKED, PACKED]),
    ] {
        let layer = Layer { heads: [2, 2], ..layer(80, 128, requests) };
        check("f16", layer, want);
        check("bf16", layer, want);
    }
    // Heads above 256 decode.
    check("f16", layer(512, 128, DECODES), [ROWS; 4]);
    check("f16", layer(512, 128, CHUNKS), [None; 4]);
    assert_eq!(checked, [""; 0]);
}

/// Caches in NZ order are read by packed queries on every release, by single rows from 8.5 on, and with heads of any
/// size on 9.1.
#[test]
fn nz_caches_are_read_as_the_release_allows() {
    let nz = |dim, block_size, requests| Layer { format: Cache::Nz, ..layer(dim, block_size, requests) };
    for requests in [CHUNKS, DECODES] {
        assert_eq!(nz(128, 128, requests).on_each::<bf16>(), [PACKED; 4]);
        let f16 = nz(64, 128, requests).on_each::<f16>();
        assert_eq!(f16, [None, PACKED, PACKED, PACKED]);
        for block_size in [16, 128] {
            let other = nz(80, block_size, requests).on_each::<f16>();
            assert_eq!(other, [None, None, None, PACKED]);
        }
    }
    for (block_size, dim) in [(16, 64), (128, 128), (1024, 128)] {
        let layer = nz(dim, block_size, DECODES);
        let alone = || Backends::<f16>::none().with(Backend::PagedDecode);
        assert!(layer.serve(Cann::V8_1, alone()).is_err());
        for cann in [Cann::V8_5, Cann::V9_0, Cann::V9_1] {
            let (name, _) = layer.serve(cann, alone()).unwrap();
            assert_eq!(Some(name), ROWS);
        }
    }
}

#[test]
fn a_refused_backend_says_which_release_takes_the_call() {
    let a2 = |cann| Some(Target::new(Soc::AtlasA2, cann));
    let a950 = |cann| Some(Target::new(Soc::Ascend950, cann));
    let both = || Backends::<f16>::none().with(Backend::Fused).with(Backend::PagedDecode);
    for (dim, block_size, here, taken_by) in [
        (128, 128, Cann::V8_1, a2(Cann::V8_5)),
        (256, 128, Cann::V8_1, a2(Cann::V8_5)),
        (256, 16, Cann::V8_1, a2(Cann::V8_5)),
        // Heads above 256 are packed on another product.
        (512, 128, Cann::V8_1, a950(Cann::V9_0)),
        (512, 128, Cann::V9_1, a950(Cann::V9_1)),
    ] {
        let layer = layer(dim, block_size, DECODES);
        let served = layer.serve(here, both()).unwrap();
        assert_eq!(served, ("paged_decode", vec![taken_by]), "{layer:?} on {here}");
    }
    // What a backend refuses by itself, no release takes.
    let turned = Backends::<f16>::none().with(Backend::PagedDecode).with(Backend::Fused);
    let served = layer(128, 128, CHUNKS).serve(Cann::V9_0, turned).unwrap();
    assert_eq!(served, ("fused", vec![None]));
}

#[test]
fn a_step_that_nobody_serves_says_which_release_would() {
    let told = |layer: Layer<'_>| {
        let both = Backends::<bf16>::none().with(Backend::Fused).with(Backend::PagedDecode);
        match layer.serve(Cann::V8_1, both) {
            Err(Error::NoBackend { reasons, .. }) => reasons,
            other => panic!("{other:?}"),
        }
    };
    let nz = Layer { format: Cache::Nz, ..layer(80, 128, CHUNKS) };
    let told_of_nz = told(nz);
    let newest = "Atlas A2 with CANN 9.1 takes the call";
    assert!(told_of_nz.contains(newest), "{told_of_nz}");
    // An entry point that the release lacks is the same to whoever upgrades.
    let sinks = Layer { sink: Some(Sink::Bf16), ..layer(128, 128, CHUNKS) };
    let told_of_sinks = told(sinks);
    let next = "Atlas A2 with CANN 8.5 takes the call";
    assert!(told_of_sinks.contains(next), "{told_of_sinks}");
    let served = sinks.serve(Cann::V8_5, Backends::<bf16>::none().with(Backend::Fused));
    assert_eq!(served.unwrap().0, "fused");
}

/// Sinks are BF16 on every release that has them, and of the query's type where the release knows that.
#[test]
fn sinks_are_of_the_type_that_the_release_takes() {
    let sinks = |dim, sink| Layer { sink: Some(sink), ..layer(dim, 128, CHUNKS) };
    let serves = |layer: Layer<'_>| {
        let of = |cann| layer.serve(cann, Backends::<f16>::none().with(Backend::Fused));
        [Cann::V8_5, Cann::V9_0, Cann::V9_1].map(|cann| of(cann).is_ok())
    };
    assert_eq!(serves(sinks(64, Sink::Bf16)), [true; 3]);
    // The newer route of grouped queries wants one type.
    assert_eq!(serves(sinks(128, Sink::Bf16)), [true, false, false]);
    assert_eq!(serves(sinks(128, Sink::AsQuery)), [false, true, true]);
    assert_eq!(serves(sinks(80, Sink::AsQuery)), [false, true, true]);
}
