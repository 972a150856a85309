//! What caches store of a token, and the attention that is right over it.

use ascend_attention::{Element, Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, ChannelScales, PagedKvCache, QuantisedType};
use ascend_serving::{
    AttentionShape, Backend, Backends, LatentForm, LatentRows, LatentTensors, LayerInputs, Result, StatePolicy,
    UpProjected,
};

use crate::harness::reference::Half;
use crate::mla_backend::definition::{self, What, absorb, project, up_project};
use crate::mla_backend::{self, LATENT, ROPE};
use crate::tokens::{self, DIM, dense_over};

use super::rows::{Row, Rows};
use super::{LAYERS, Setting};

/// What a cache has of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stored {
    /// Key and value of one head.
    Heads,
    /// The same as INT8.
    Quantised,
    /// A latent and a rotary key.
    Latents,
}

/// INT8 of one.
const STEPS: f64 = 64.0;
/// Bytes for the projections of some of a sequence's tokens at a time.
const WORKSPACE: usize = 50 * 1024;

impl Stored {
    pub fn shape(self) -> AttentionShape {
        match self {
            Self::Heads | Self::Quantised => AttentionShape::new(1, 1, DIM),
            Self::Latents => AttentionShape::latent(1),
        }
    }

    pub fn cache<T: Half>(self, stream: &Stream, blocks: usize, setting: &Setting) -> PagedKvCache<T> {
        let (device, pad, size) = (stream.device(), setting.pad, 128);
        let shape = match self {
            Self::Heads | Self::Quantised => CacheShape::new(LAYERS, 1, DIM),
            Self::Latents => CacheShape::latent(LAYERS),
        };
        let shape = shape.format(setting.format);
        let cache = match self {
            Self::Heads | Self::Latents => PagedKvCache::new(device, blocks, size, shape, pad),
            Self::Quantised => {
                let scales = || vec![STEPS.recip() as f32; DIM];
                let scales = [(); LAYERS].map(|()| ChannelScales::new(scales(), scales()).unwrap());
                let stored = QuantisedType::Int8;
                PagedKvCache::quantised(stream, blocks, size, shape, pad, stored, &scales)
            }
        };
        cache.unwrap()
    }

    pub fn backends<T: Half>(self) -> Backends<T> {
        let none = Backends::none();
        match self {
            Self::Heads => none.with(Backend::Fused),
            Self::Quantised => none.with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill),
            Self::Latents => none.with(Backend::Mla { workspace_bytes: WORKSPACE }),
        }
    }

    /// A number of a key or value as the cache returns it.
    fn returned(self, number: f64) -> f64 {
        match self {
            Self::Quantised => (number * STEPS).round_ties_even() / STEPS,
            Self::Heads | Self::Latents => number,
        }
    }

    /// The inputs of a layer of a step.
    pub fn inputs<T: Half>(self, stream: &Stream, rows: &Rows, layer: usize) -> Inputs<T> {
        let upload = |len: usize, row: &dyn Fn(u64) -> Vec<bf16>| -> Tensor<T> {
            let numbers = rows.fed.iter().flat_map(|name| row(*name)).map(|x| T::from_f32(x.to_f32()));
            let numbers: Vec<T> = numbers.collect();
            stream.upload(&numbers, [rows.fed.len(), 1, len]).unwrap()
        };
        if self != Self::Latents {
            let query = upload(DIM, &|name| tokens::row(name, layer, 0, 1));
            let cached = [1, 2].map(|what| {
                upload(DIM, &|name| {
                    let row = tokens::row(name, layer, what, 1).into_iter();
                    row.map(|x| bf16::from_f64(self.returned(x.to_f64()))).collect()
                })
            });
            let [key, value] = cached;
            return Inputs { tensors: [query, key, value], query_rope: None, absorbed: false };
        }
        let of = |what, len| upload(len, &|name| definition::row(name, layer, what, len));
        let absorbed = rows.most <= StatePolicy::MAX_VERIFIED;
        let query = match absorbed {
            false => of(What::Query, mla_backend::DIM),
            true => upload(LATENT, &|name| {
                let plain = definition::row(name, layer, What::Query, mla_backend::DIM);
                absorb(layer, 1, &plain)
            }),
        };
        Inputs {
            tensors: [query, of(What::Latent, LATENT), of(What::KeyRope, ROPE)],
            query_rope: Some(of(What::QueryRope, ROPE)),
            absorbed,
        }
    }

    /// How far a row of an output is away from dense attention over the tokens that it sees.
    pub fn away<T: Half>(self, output: &[T], absorbed: bool, row: &Row, layer: usize) -> f64 {
        let width = match self {
            Self::Heads | Self::Quantised => DIM,
            Self::Latents if absorbed => LATENT,
            Self::Latents => mla_backend::DIM,
        };
        let got = output[row.row * width..][..width].iter();
        let mut got: Vec<f64> = got.map(|x| x.to_f64()).collect();
        if absorbed {
            got = project(layer, true, 1, &got);
        }
        let want = match self {
            Self::Heads | Self::Quantised => {
                let returned = |_, row: Vec<f64>, _| row.into_iter().map(|x| self.returned(x)).collect();
                dense_over(&row.names, layer, self.shape(), |key| key >= row.from, returned)
            }
            Self::Latents => definition::dense(&row.names, layer, self.shape()),
        };
        // Of long contexts a row is small, and a single wrong token changes it little. Projected values are sums.
        let roundings = if self == Self::Latents { 0.75 } else { 0.25 };
        let away = got.iter().zip(&want);
        away.map(|(got, want)| (got - want).abs() / (want.abs() + roundings)).fold(0.0, f64::max)
    }
}

/// The inputs of a layer: query, key and value, or those of latents.
pub struct Inputs<T: Element> {
    tensors: [Tensor<T>; 3],
    query_rope: Option<Tensor<T>>,
    /// Whether the queries are absorbed.
    pub absorbed: bool,
}

impl<T: Half> Inputs<T> {
    /// The same rows, of requests with as many nodes each.
    pub fn of_trees(&self, nodes: usize) -> Self {
        let reshaped = |rows: &Tensor<T>| {
            let [tokens, _, len] = rows.shape().try_into().unwrap();
            rows.reshape([tokens / nodes, 1, nodes, len]).unwrap()
        };
        Self {
            tensors: self.tensors.each_ref().map(reshaped),
            query_rope: self.query_rope.as_ref().map(reshaped),
            absorbed: self.absorbed,
        }
    }

    pub fn of_layer(&self) -> LayerInputs<'_, T> {
        let [query, key, value] = &self.tensors;
        match &self.query_rope {
            None => LayerInputs::from((query, key, value)),
            Some(query_rope) => {
                let form = match self.absorbed {
                    true => LatentForm::Absorbed,
                    false => LatentForm::Plain(&up_projected::<T>),
                };
                let tensors = LatentTensors { query_rope, form };
                LayerInputs::latent(query, key, value, tensors)
            }
        }
    }
}

fn up_projected<T: Half>(stream: &Stream, layer: usize, rows: LatentRows<'_, T>, out: &UpProjected<T>) -> Result<()> {
    up_project(stream, layer, 1, rows, out)
}
