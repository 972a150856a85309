//! The epilogue of attention: from running sums to output and log-sum-exp.
//!
//! The output is divided by the running sum, after the attention sink was added to maximum and sum. Rows without keys
//! are written as zeros; rows whose keys are all hidden by the mask tensor are written as zeros or as the mean of the
//! values. Calls with softmax outputs write maximum and sum instead of the log-sum-exp.

use super::TILE_KEYS;
use super::attention::Attention;
use super::attention::Task;
use super::online_softmax::{OnlineSoftmax, quantise_weights, rescale_factor};
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tile_load::{Destination, TileLoad, stride};
use super::visibility::read_mask;
use ascend_spec::MaskGeometry;
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
        let Epilogue { attention, sequence, task, softmax } = self;
        let (columns, kv_head) = (attention.columns(), task.kv_head);
        let mut mean = None;
        for (index, query) in task.queries.clone().enumerate() {
            let (row, head) = attention.row_and_head(task.kv_head, query);
            let place = sequence.at(head, row);
            let out = &mut softmax.out[index * columns..][..columns];
            let keys = sequence.geometry.runs(row as u64);
            let (max, sum) = (softmax.max[index], softmax.sum[index]);
            let exists = (row as u64) < sequence.geometry.q_len();
            if let Some(outputs) = &sequence.softmax {
                let head_row = (kv_head, head, row);
                let softmax = finish(simd, (attention, sequence, head_row), (max, sum), out, &mut mean);
                for (output, number) in outputs.iter().zip([softmax.0, softmax.1]) {
                    output.write_row(simd, (0, head, row), &[[number; WIDTH]]);
                }
                attention.out.write_row(simd, place, out, exists);
                continue;
            }
            let lse = if !exists || keys.len() == 0 {
                out.fill([0.0; WIDTH]);
                f32::INFINITY
            } else if sum == 0.0 && hides_all(attention, sequence, (row as u64, head), &keys) {
                if attention.zeroes_masked_rows {
                    out.fill([0.0; WIDTH]);
                } else {
                    write_mean(simd, (attention, sequence, kv_head), &keys, out, &mut mean);
                }
                f32::INFINITY
            } else {
                let sink = attention.sink.as_ref().and_then(|sink| sink.get(head));
                let (max, sum) = divide(out, (max, sum), sink, attention.output_scale);
                log_sum_exp(max, sum) + attention.lse_offset
            };
            attention.out.write_row(simd, place, out, exists);
            if let Some(lse_out) = &attention.lse {
                lse_out.write_row(simd, place, &[[lse; WIDTH]]);
            }
        }
    }
}

/// The mean of the values of some keys.
type Mean = Option<(Runs, Vec<Vector>)>;

/// Writes the mean of the values of `keys` to `out`. Neighbouring rows often see the same keys, and share their mean.
#[inline(always)]
fn write_mean<S: Simd>(
    simd: S,
    (attention, sequence, kv_head): (&Attention, &Sequence, usize),
    keys: &Runs,
    out: &mut [Vector],
    mean: &mut Mean,
) {
    if !matches!(&mean, Some((known, _)) if known == keys) {
        let value = mean_value(simd, attention, sequence, kv_head, keys, &|_| true);
        *mean = Some((keys.clone(), value));
    }
    if let Some((_, mean)) = &mean {
        out.copy_from_slice(mean);
    }
}

/// Finishes a row of a call with softmax outputs: leaves its output in `out`, and returns maximum and sum to be
/// written.
#[inline(always)]
fn finish<S: Simd>(
    simd: S,
    (attention, sequence, (kv_head, head, row)): (&Attention, &Sequence, (usize, usize, usize)),
    (max, sum): (f32, f32),
    out: &mut [Vector],
    mean: &mut Mean,
) -> (f32, f32) {
    let keys = sequence.geometry.runs(row as u64);
    let sink = attention.sink.as_ref().and_then(|sink| sink.get(head));
    let sees_none = keys.len() == 0 || sum == 0.0 && hides_all(attention, sequence, (row as u64, head), &keys);
    if !sees_none {
        let (max, sum) = divide(out, (max, sum), sink, attention.output_scale);
        return ((f64::from(max) * std::f64::consts::LN_2) as f32, sum);
    }
    let kv_len = sequence.geometry.kv_len();
    out.fill([0.0; WIDTH]);
    // Of a row whose list of keys is empty the sink is left; other operators do not ask it without keys.
    if let Some(sink) = sink.filter(|_| kv_len > 0 || sequence.kv.is_listed()) {
        (*sink, 1.0)
    } else if kv_len == 0 {
        (0.0, 0.0)
    } else if attention.zeroes_masked_rows {
        (f32::MIN, f32::MAX)
    } else {
        let keys = MaskGeometry::full(1, kv_len).runs(0);
        if let (Some(dropout), Some(dropped)) = (&attention.dropout, &sequence.dropped) {
            let first_bit = dropped.at(0, head, row) as u64;
            let keeps = |key: usize| dropout.keeps(first_bit + key as u64);
            let of_row = mean_value(simd, attention, sequence, kv_head, &keys, &keeps);
            out.copy_from_slice(&of_row);
        } else {
            write_mean(simd, (attention, sequence, kv_head), &keys, out, mean);
        }
        (f32::MIN, kv_len as f32)
    }
}

/// The natural logarithm of the sum of a row's exponentials; `max` is to base 2. It includes the sink, which is known
/// of only one product (`FiaCall::lse_counts_sink`).
#[inline(always)]
fn log_sum_exp(max: f32, sum: f32) -> f32 {
    ((f64::from(max) + f64::from(sum).log2()) * std::f64::consts::LN_2) as f32
}

/// Divides the output by the running sum, after the sink was added to maximum and sum. Returns maximum and sum.
///
/// A sum that has underflowed to -0 is written as 0, since it would be 0 had a hidden key been added with weight 0.
#[inline(always)]
fn divide(out: &mut [Vector], (mut max, mut sum): (f32, f32), sink: Option<&f32>, output_scale: f32) -> (f32, f32) {
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
        *out = *out * factor + 0.0;
    }
    (max, sum)
}

/// Whether the mask tensor hides all of `keys` from a row of a head.
fn hides_all(attention: &Attention, sequence: &Sequence, row: (u64, usize), keys: &Runs) -> bool {
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

/// The mean of the values of `keys`, as attention with equal weights computes it. Values of keys that are not kept
/// count as zero.
#[inline(always)]
fn mean_value<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    kv_head: usize,
    keys: &Runs,
    keeps: &dyn Fn(usize) -> bool,
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
            let load = TileLoad { attention, sequence, kv_head, rows: keys.clone(), check_finite: false };
            load.values(simd, Destination::Rows(&mut tile));
            for (_, values) in keys.zip(tile.chunks(stride)).filter(|(key, _)| keeps(*key)) {
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
    sums.iter().map(|sums| sums.map(|sum| (sum / count * factor) as f32)).collect()
}
