//! Runs a dense layer and one that leaves out the middle with the same numbers.

use std::time::Instant;

use ascend_attention::mask::{LayerSample, PartSums, SampleMeasure};
use ascend_attention::{Number, Stream, Tensor, bf16, f16};
use ascend_serving::{Error, TrianglePrefill};

use super::Stop;
use super::data::{Data, Half};
use crate::platform::Platform;

/// The measurements of the runs.
pub(super) struct Measured {
    /// Median time of a dense layer.
    pub(super) dense_seconds: f64,
    pub(super) triangle_seconds: f64,
    pub(super) runs: usize,
    /// The platform that ran them.
    pub(super) platform: Platform,
    pub(super) difference: Difference,
    /// The share of the attention in each part.
    pub(super) mass: Option<PartSums>,
}

/// How far the outputs of the two layers differ.
#[derive(Default)]
pub(super) struct Difference {
    pub(super) largest: f64,
    /// Row, head and element of the largest difference.
    pub(super) place: [usize; 3],
    pub(super) mean: f64,
    /// The root of the sum of squared differences, relative to that of the dense outputs.
    pub(super) relative: f64,
    /// Number of elements that are not finite in one of the outputs.
    pub(super) not_finite: usize,
}

impl Difference {
    fn of<T: Number>(dense: &[T], triangle: &[T], heads: usize, dim: usize) -> Self {
        let mut all = Self::default();
        let (mut sum, mut squares, mut size, mut count) = (0.0, 0.0, 0.0, 0usize);
        for (at, (a, b)) in dense.iter().zip(triangle).enumerate() {
            let (a, b) = (a.to_f64(), b.to_f64());
            let difference = (a - b).abs();
            if !difference.is_finite() {
                all.not_finite += 1;
                continue;
            }
            if difference > all.largest {
                all.largest = difference;
                all.place = [at / dim / heads, at / dim % heads, at % dim];
            }
            sum += difference;
            squares += difference * difference;
            size += a * a;
            count += 1;
        }
        all.mean = sum / count.max(1) as f64;
        all.relative = if size > 0.0 {
            (squares / size).sqrt()
        } else {
            0.0
        };
        all
    }
}

fn trouble(error: Error) -> Stop {
    Stop::Trouble(error.to_string())
}

/// Runs both layers `runs` times in the element type `half`, after one more run that does not count; with `mass`,
/// also computes the shares of the attention.
pub(super) fn measure(
    stream: &Stream,
    prefill: &TrianglePrefill,
    data: &Data,
    (half, runs, mass): (Half, usize, bool),
) -> Result<Measured, Stop> {
    let mut measured = match half {
        Half::F16 => run(stream, prefill, data, runs, f16::from_f32),
        Half::Bf16 => run(stream, prefill, data, runs, bf16::from_f32),
    }?;
    if mass {
        let sample = LayerSample {
            tokens: data.tokens,
            heads: prefill.shape.heads,
            kv_heads: prefill.shape.kv_heads,
            dim: prefill.shape.head_dim,
            value_dim: prefill.shape.head_dim,
            scale: prefill.shape.scale,
            query: &data.query[..],
            key: &data.key[..],
            value: &data.value[..],
        };
        measured.mass = Some(sample.parts(prefill.sizes, SampleMeasure::AttentionMass)?);
    }
    Ok(measured)
}

fn run<T: Number>(
    stream: &Stream,
    prefill: &TrianglePrefill,
    data: &Data,
    runs: usize,
    round: impl Fn(f32) -> T,
) -> Result<Measured, Stop> {
    let shape = prefill.shape;
    let upload = |of: &[f32], heads| {
        let rounded: Vec<T> = of.iter().map(|&x| round(x)).collect();
        stream.upload(&rounded, [data.tokens, heads, shape.head_dim])
    };
    let query = upload(&data.query, shape.heads)?;
    let key = upload(&data.key, shape.kv_heads)?;
    let value = upload(&data.value, shape.kv_heads)?;
    let plan = |prompt| {
        let plan = prefill.plan(stream, (0, prompt), (&query, &key, &value));
        plan.map_err(trouble)
    };
    // A prompt of unknown length is dense.
    let (dense, triangle) = (plan(None)?, plan(Some(data.tokens))?);
    let timed = |plan: &ascend_serving::TrianglePlan| -> Result<(f64, Tensor<T>), Stop> {
        let start = Instant::now();
        let out = plan
            .launch(stream, (&query, &key, &value))
            .map_err(trouble)?;
        stream.synchronize()?;
        Ok((start.elapsed().as_secs_f64(), out))
    };
    let outputs = (timed(&dense)?.1, timed(&triangle)?.1);
    let (mut dense_seconds, mut triangle_seconds) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        dense_seconds.push(timed(&dense)?.0);
        triangle_seconds.push(timed(&triangle)?.0);
    }
    let (dense, triangle) = (outputs.0.download(stream)?, outputs.1.download(stream)?);
    Ok(Measured {
        dense_seconds: median(dense_seconds),
        triangle_seconds: median(triangle_seconds),
        runs,
        platform: Platform::of(stream),
        difference: Difference::of(&dense, &triangle, shape.heads, shape.head_dim),
        mass: None,
    })
}

/// The middle value, or the upper of the two in the middle.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}
