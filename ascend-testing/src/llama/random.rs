//! Weights made from random numbers.

use ascend_serving::Causality;

use super::model::{Config, Layer, Linear, Model};

/// A small model of random weights, with layers of these causalities.
pub fn generated(layers: Vec<Causality>) -> Model {
    let config = Config {
        vocabulary: 384,
        width: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        hidden: 256,
        layers,
        theta: 10_000.0,
        epsilon: 1e-5,
    };
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let width = config.width;
    let queries = config.heads * config.head_dim;
    let keys = config.kv_heads * config.head_dim;
    let layer = |random: &mut Random| Layer {
        attention_norm: random.near_one(width),
        query: random.linear(width, queries),
        key: random.linear(width, keys),
        value: random.linear(width, keys),
        output: random.linear(queries, width),
        feed_norm: random.near_one(width),
        gate: random.linear(width, config.hidden),
        up: random.linear(width, config.hidden),
        down: random.linear(config.hidden, width),
    };
    Model {
        layers: config.layers.iter().map(|_| layer(&mut random)).collect(),
        embedding: random.linear(width, config.vocabulary),
        norm: random.near_one(width),
        config,
    }
}

/// The generator xorshift64.
pub struct Random(pub u64);

impl Random {
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Numbers with a mean of 0 and a mean square of 1.
    fn number(&mut self) -> f32 {
        let unit = (self.draw() >> 40) as f32 / (1u64 << 24) as f32;
        (2.0 * unit - 1.0) * 3f32.sqrt()
    }

    /// A map that leaves the mean square of its inputs about what it is.
    fn linear(&mut self, inputs: usize, outputs: usize) -> Linear {
        let factor = 1.0 / (inputs as f32).sqrt();
        let weights = (0..inputs * outputs).map(|_| self.number() * factor);
        Linear { inputs, weights: weights.collect() }
    }

    fn near_one(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| 1.0 + 0.1 * self.number()).collect()
    }
}
