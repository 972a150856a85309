//! Runs a dense layer and one that leaves out the middle with the same numbers.

use ascend_attention::{Number, Stream, bf16, f16};
use ascend_trianglemix::{LayerComparison, PartSums, SampleMeasure, TrianglePrefill};

use super::Stop;
use super::data::{Data, Half};
use crate::platform::DeviceReport;

/// The measurements of the runs.
pub(super) struct Measured {
    pub(super) layers: LayerComparison,
    /// The platform that ran them.
    pub(super) platform: DeviceReport,
    /// The share of the attention in each part.
    pub(super) mass: Option<PartSums>,
}

/// Runs both layers `runs` times in the element type `half`, after one more run that does not count; with `mass`,
/// also computes the shares of the attention.
pub(super) fn measure(
    stream: &Stream,
    prefill: &TrianglePrefill,
    data: &Data,
    (half, runs, mass): (Half, usize, bool),
) -> Result<Measured, Stop> {
    let layers = match half {
        Half::F16 => run::<f16>(stream, prefill, data, runs),
        Half::Bf16 => run::<bf16>(stream, prefill, data, runs),
    }?;
    let parts = || data.sample().parts(prefill.sizes, SampleMeasure::AttentionMass);
    Ok(Measured { layers, platform: DeviceReport::of(stream), mass: mass.then(parts).transpose()? })
}

fn run<T: Number>(
    stream: &Stream,
    prefill: &TrianglePrefill,
    data: &Data,
    runs: usize,
) -> Result<LayerComparison, Stop> {
    let shape = prefill.shape;
    let upload = |numbers: &[f32], heads| {
        let rounded: Vec<T> = numbers.iter().map(|&x| T::from_f32(x)).collect();
        stream.upload(&rounded, [data.tokens, heads, shape.head_dim])
    };
    let query = upload(&data.query, shape.heads)?;
    let key = upload(&data.key, shape.kv_heads)?;
    let value = upload(&data.value, shape.kv_heads)?;
    Ok(prefill.compare(stream, (&query, &key, &value), runs)?)
}
