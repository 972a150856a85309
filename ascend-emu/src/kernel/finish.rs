//! From running sums to output: division, rows without keys.

use super::attention::{Attention, Sequence};
use super::fetch::{Fetch, Places, stride};
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tile::{KEYS, quantise, read_mask};
use ascend_spec::geometry::Runs;

/// What attention to some keys leaves of each query: the maximum of its scores, which count in bits (times `log2 e`), the
/// sum of `2^(score - maximum)`, and the values weighted with these powers, row by row.
#[derive(Debug)]
pub(super) struct State<'s> {
    pub(super) max: &'s mut [f32],
    pub(super) sum: &'s mut [f32],
    pub(super) out: &'s mut [Vector],
}

impl<'s> State<'s> {
    /// Of `count` queries with `columns` vectors of output each that have seen nothing yet.
    pub(super) fn empty(scratch: &'s mut Scratch, count: usize, columns: usize) -> Self {
        let each = count.div_ceil(WIDTH);
        let mut rest = scratch.vectors(2 * each + count * columns);
        let [max, sum] = [each, each].map(|size| take(&mut rest, size).as_flattened_mut());
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        rest.fill([0.0; WIDTH]);
        State {
            max: &mut max[..count],
            sum: &mut sum[..count],
            out: rest,
        }
    }
}

/// Queries whose state is complete: what writes their output and log-sum-exp.
pub(super) struct Finish<'a> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) state: State<'a>,
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Finish {
            attention,
            sequence,
            task,
            state,
        } = self;
        let columns = attention.columns();
        let mut mean = None;
        for (lane, query) in task.queries.clone().enumerate() {
            let (row, head) = attention.place(task.kv_head, query);
            let at = sequence.at(head, row);
            let out = &mut state.out[lane * columns..][..columns];
            let keys = sequence.geometry.runs(row as u64);
            let (max, sum) = (state.max[lane], state.sum[lane]);
            let exists = (row as u64) < sequence.geometry.q_len();
            let lse = if !exists || keys.len() == 0 {
                out.fill([0.0; WIDTH]);
                f32::INFINITY
            } else if sum == 0.0 && hides_all(attention, sequence, row as u64, &keys) {
                if attention.corrects_blind_rows {
                    out.fill([0.0; WIDTH]);
                } else {
                    // Neighbouring rows mostly see the same keys.
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
                divide(out, (max, sum), sink, attention.gain) + attention.lse_summand
            };
            attention.out.write_row(simd, at, out, exists);
            if let Some(sink) = &attention.lse {
                sink.write_row(simd, at, &[[lse; WIDTH]]);
            }
        }
    }
}

/// `2^(score - max)` of a score that is at most `max`. The equal ones keep -inf, of which nothing was seen, from making a NaN
/// of the difference.
#[inline(always)]
pub(super) fn below(max: f32, score: f32) -> f32 {
    if score == max {
        1.0
    } else {
        (score - max).exp2()
    }
}

/// Divides the weighted values by the sum of the weights, after the logit without a value has joined maximum and sum.
/// Gives the log-sum-exp, in which that logit counts too: what the operator writes there is not known.
#[inline(always)]
fn divide(
    out: &mut [Vector],
    (mut max, mut sum): (f32, f32),
    sink: Option<&f32>,
    gain: f32,
) -> f32 {
    let mut factor = gain;
    if let Some(sink) = sink {
        let sink = sink * std::f32::consts::LOG2_E;
        let highest = if sink > max { sink } else { max };
        sum = sum * below(highest, max) + below(highest, sink);
        factor *= below(highest, max);
        max = highest;
    }
    let factor = factor / sum;
    for out in out.as_flattened_mut() {
        *out *= factor;
    }
    ((f64::from(max) + f64::from(sum).log2()) * std::f64::consts::LN_2) as f32
}

/// Whether the mask tensor hides each of the keys from a row.
fn hides_all(attention: &Attention, sequence: &Sequence, row: u64, keys: &Runs) -> bool {
    let mut bytes = [0; KEYS];
    keys.clone().all(|run| {
        // Within the key length, a usize.
        let (start, end) = (run.start as usize, run.end as usize);
        (start..end).step_by(KEYS).all(|first| {
            let tile = first..end.min(first + KEYS);
            let bytes = read_mask(attention, sequence, row, &tile, &mut bytes);
            bytes.is_some_and(|bytes| bytes.iter().all(|&byte| byte != 0))
        })
    })
}

/// The mean of the values of `keys`, as weights that are all 1 make it.
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
    let mut tile = vec![[0.0; WIDTH]; KEYS * stride];
    let mut sums = vec![[0.0f64; WIDTH]; columns];
    let mut count = 0.0;
    for run in keys.clone() {
        // Within the key length, a usize.
        let (start, end) = (run.start as usize, run.end as usize);
        for first in (start..end).step_by(KEYS) {
            let keys = first..end.min(first + KEYS);
            count += keys.len() as f64;
            let fetch = Fetch {
                attention,
                sequence,
                kv_head,
                rows: keys.clone(),
                with_care: false,
            };
            fetch.values(simd, Places::Rows(&mut tile));
            for values in tile.chunks(stride).take(keys.len()) {
                for (sums, values) in sums.iter_mut().zip(values) {
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += f64::from(*value);
                    }
                }
            }
        }
    }
    let weight = match attention.quantum {
        Some(quantum) => f64::from(quantise(&[1.0; WIDTH], quantum)[0]),
        None => 1.0,
    };
    let factor = weight * f64::from(attention.gain);
    sums.iter()
        .map(|sums| sums.map(|sum| (sum / count * factor) as f32))
        .collect()
}
