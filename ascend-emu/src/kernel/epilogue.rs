//! The epilogue of attention: from running sums to output and log-sum-exp.
//!
//! The output is divided by the running sum, after the attention sink has joined maximum and sum. Rows without keys are
//! written as zeros, rows whose keys the mask tensor hides all as zeros or as the mean of the values.

use super::attention::Attention;
use super::kv::tile_load::{Destination, TileLoad, stride};
use super::mask::{TILE_KEYS, read_mask};
use super::online_softmax::{OnlineSoftmax, quantise_weights, rescale_factor};
use super::schedule::Task;
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use ascend_spec::geometry::Runs;

/// Writes output and log-sum-exp of queries that have attended to all their keys.
pub(super) struct Epilogue<'a> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) softmax: OnlineSoftmax<'a>,
}

impl Kernel for Epilogue<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Epilogue {
            attention,
            sequence,
            task,
            softmax,
        } = self;
        let columns = attention.columns();
        let mut mean = None;
        for (index, query) in task.queries.clone().enumerate() {
            let (row, head) = attention.row_and_head(task.kv_head, query);
            let at = sequence.at(head, row);
            let out = &mut softmax.out[index * columns..][..columns];
            let keys = sequence.geometry.runs(row as u64);
            let (max, sum) = (softmax.max[index], softmax.sum[index]);
            let exists = (row as u64) < sequence.geometry.q_len();
            let lse = if !exists || keys.len() == 0 {
                out.fill([0.0; WIDTH]);
                f32::INFINITY
            } else if sum == 0.0 && hides_all(attention, sequence, row as u64, &keys) {
                if attention.zeroes_masked_rows {
                    out.fill([0.0; WIDTH]);
                } else {
                    // Rows side by side often see the same keys, and share their mean.
                    if !matches!(&mean, Some((of, _)) if *of == keys) {
                        let value = mean_value(simd, attention, sequence, task.kv_head, &keys);
                        mean = Some((keys.clone(), value));
                    }
                    if let Some((_, mean)) = &mean {
                        out.copy_from_slice(mean);
                    }
                }
                f32::INFINITY
            } else {
                let sink = attention.sink.as_ref().and_then(|sink| sink.get(head));
                divide(out, (max, sum), sink, attention.output_scale) + attention.lse_offset
            };
            attention.out.write_row(simd, at, out, exists);
            if let Some(sink) = &attention.lse {
                sink.write_row(simd, at, &[[lse; WIDTH]]);
            }
        }
    }
}

/// Divides the output by the running sum, after the sink has joined maximum and sum. Gives the log-sum-exp. It includes the
/// sink; whether the operator's does is not documented.
#[inline(always)]
fn divide(
    out: &mut [Vector],
    (mut max, mut sum): (f32, f32),
    sink: Option<&f32>,
    output_scale: f32,
) -> f32 {
    let mut factor = output_scale;
    if let Some(sink) = sink {
        let sink = sink * std::f32::consts::LOG2_E;
        let highest = if sink > max { sink } else { max };
        sum = sum * rescale_factor(highest, max) + rescale_factor(highest, sink);
        factor *= rescale_factor(highest, max);
        max = highest;
    }
    let factor = factor / sum;
    for out in out.as_flattened_mut() {
        *out *= factor;
    }
    ((f64::from(max) + f64::from(sum).log2()) * std::f64::consts::LN_2) as f32
}

/// Whether the mask tensor hides all of `keys` from a row.
fn hides_all(attention: &Attention, sequence: &Sequence, row: u64, keys: &Runs) -> bool {
    let mut bytes = [0; TILE_KEYS];
    keys.clone().all(|run| {
        // Within the key length, a usize.
        let (start, end) = (run.start as usize, run.end as usize);
        (start..end).step_by(TILE_KEYS).all(|first| {
            let tile = first..end.min(first + TILE_KEYS);
            let bytes = read_mask(attention, sequence, row, &tile, &mut bytes);
            bytes.is_some_and(|bytes| bytes.iter().all(|&byte| byte != 0))
        })
    })
}

/// The mean of the values of `keys`, which attention with equal weights gives.
#[inline(always)]
fn mean_value<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    kv_head: usize,
    keys: &Runs,
) -> Vec<Vector> {
    let columns = attention.columns();
    let stride = stride(columns);
    let mut tile = vec![[0.0; WIDTH]; TILE_KEYS * stride];
    let mut sums = vec![[0.0f64; WIDTH]; columns];
    let mut count = 0.0;
    for run in keys.clone() {
        // Within the key length, a usize.
        let (start, end) = (run.start as usize, run.end as usize);
        for first in (start..end).step_by(TILE_KEYS) {
            let keys = first..end.min(first + TILE_KEYS);
            count += keys.len() as f64;
            let load = TileLoad {
                attention,
                sequence,
                kv_head,
                rows: keys.clone(),
                check_finite: false,
            };
            load.values(simd, Destination::Rows(&mut tile));
            for values in tile.chunks(stride).take(keys.len()) {
                for (sums, values) in sums.iter_mut().zip(values) {
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += f64::from(*value);
                    }
                }
            }
        }
    }
    let weight = match attention.weight_scale {
        Some(weight_scale) => f64::from(quantise_weights(&[1.0; WIDTH], weight_scale)[0]),
        None => 1.0,
    };
    let factor = weight * f64::from(attention.output_scale);
    sums.iter()
        .map(|sums| sums.map(|sum| (sum / count * factor) as f32))
        .collect()
}
