//! From running sums to output: division, rows without keys, parts of a split put together.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Simd, Vector, WIDTH};
use super::tile::{KEYS, quantise, read_mask};
use std::ops::Range;

/// What attention to some keys leaves of each query: the maximum of its scores, the sum of `exp(score - maximum)`, and
/// the values weighted with these exponentials, row by row.
#[derive(Debug)]
pub(super) struct State<'s> {
    pub(super) max: &'s mut [f32],
    pub(super) sum: &'s mut [f32],
    pub(super) out: &'s mut [Vector],
}

/// A [`State`] kept until the other parts of its block are there.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<Vector>,
}

impl<'s> State<'s> {
    /// Of `count` queries with `columns` vectors of output each that have seen nothing yet.
    pub(super) fn empty(scratch: &'s mut Scratch, count: usize, columns: usize) -> Self {
        let each = count.div_ceil(WIDTH);
        let (mut rest, _) = scratch.split(2 * each + count * columns, 0);
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

    /// A copy.
    pub(super) fn keep(&self) -> Part {
        Part {
            max: self.max.to_vec(),
            sum: self.sum.to_vec(),
            out: self.out.to_vec(),
        }
    }
}

impl Part {
    /// To go on with.
    pub(super) fn state(&mut self) -> State<'_> {
        State {
            max: &mut self.max,
            sum: &mut self.sum,
            out: &mut self.out,
        }
    }

    /// Adds what `other` keys leave: both to the larger maximum, then summed.
    pub(super) fn merge(&mut self, other: &Part) {
        let columns = self.out.len() / self.max.len().max(1);
        for query in 0..self.max.len().min(other.max.len()) {
            let (ours, theirs) = (self.max[query], other.max[query]);
            let max = if theirs > ours { theirs } else { ours };
            // Also keeps parts that saw nothing, or only -inf, from making a NaN of a difference.
            let factor = |part: f32| if part == max { 1.0 } else { (part - max).exp() };
            let (our, their) = (factor(ours), factor(theirs));
            self.max[query] = max;
            self.sum[query] = self.sum[query] * our + other.sum[query] * their;
            let out = &mut self.out[query * columns..][..columns];
            for (out, other) in out.iter_mut().zip(&other.out[query * columns..]) {
                for (out, other) in out.iter_mut().zip(other) {
                    *out = *out * our + other * their;
                }
            }
        }
    }
}

/// Writes output and log-sum-exp of the queries of `task`, whose state is complete.
#[inline(always)]
pub(super) fn finish<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    state: State<'_>,
) {
    let columns = attention.columns();
    let mut mean = None;
    for (lane, query) in task.queries.clone().enumerate() {
        let (row, head) = attention.place(task.kv_head, query);
        let at = sequence.at(head, row);
        let out = &mut state.out[lane * columns..][..columns];
        let keys = sequence.geometry.row(row as u64);
        let keys = keys.start as usize..keys.end as usize;
        let (max, sum) = (state.max[lane], state.sum[lane]);
        let lse = if row as u64 >= sequence.geometry.q_len() {
            attention.out.write_blank(simd, at, out);
            f32::INFINITY
        } else {
            let lse = if keys.is_empty() {
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
                divide(out, (max, sum), sink, attention.gain)
            };
            attention.out.write_row(simd, at, out);
            lse
        };
        if let Some(sink) = &attention.lse {
            sink.write_row(simd, at, &[[lse; WIDTH]]);
        }
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
    if let Some(&sink) = sink {
        let highest = if sink > max { sink } else { max };
        // Also keeps a sink of -inf with a maximum of -inf from making a NaN of a difference.
        let weight = |logit: f32| {
            if logit == highest {
                1.0
            } else {
                (logit - highest).exp()
            }
        };
        sum = sum * weight(max) + weight(sink);
        factor *= weight(max);
        max = highest;
    }
    for out in out.iter_mut() {
        for out in out.iter_mut() {
            *out = *out * factor / sum;
        }
    }
    max + sum.ln()
}

/// Whether the mask tensor hides each of the keys from a row.
fn hides_all<T: Element>(
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    row: u64,
    keys: &Range<usize>,
) -> bool {
    let mut bytes = [0; KEYS];
    keys.clone().step_by(KEYS).all(|first| {
        let tile = first..keys.end.min(first + KEYS);
        let bytes = read_mask(attention, sequence, row, &tile, &mut bytes);
        bytes.is_some_and(|bytes| bytes.iter().all(|&byte| byte != 0))
    })
}

/// The mean of the values of `keys`, as weights that are all 1 make it.
#[inline(always)]
fn mean_value<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    kv_head: usize,
    keys: &Range<usize>,
) -> Vec<Vector> {
    let mut value = vec![[0.0; WIDTH]; attention.columns()];
    let mut sums = vec![[0.0f64; WIDTH]; value.len()];
    let conversion = attention.value_conversion.as_ref();
    for key in keys.clone() {
        let (at, watch) = ((kv_head, key), &mut simd.splat(0.0));
        sequence
            .keys
            .read_value(simd, conversion, at, &mut value, 1, watch);
        for (sum, value) in sums.as_flattened_mut().iter_mut().zip(value.as_flattened()) {
            *sum += f64::from(*value);
        }
    }
    let weight = match attention.quantum {
        Some(quantum) => f64::from(quantise(&[1.0; WIDTH], quantum)[0]),
        None => 1.0,
    };
    let factor = weight * f64::from(attention.gain);
    for (sum, value) in sums.as_flattened().iter().zip(value.as_flattened_mut()) {
        *value = (sum / keys.len() as f64 * factor) as f32;
    }
    value
}
