//! The causal convolution of short windows in front of linear attention, channel by channel, as CausalConv1d of
//! vLLM-Ascend's package and CANN's FusedCausalConv1d compute it: sums in single precision, one rounding.
//!
//! A task has some channels of a sequence. It reads the rows in front of the sequence from its line, then writes lines,
//! which no other task reads, and slides over the sequence's rows last: an output may be in the place of its row.

use super::element_view::ElementView;
use super::merge::Number;
use ascend_spec::DType;
use ascend_spec::ops::convolution::{ConvForm, ConvProblem, ConvRun, FusedConv, KeptRows};
use half::{bf16, f16};
use rayon::prelude::*;

/// Channels of a task.
const BLOCK: usize = 64;
/// Rows of the widest window.
const WIDTH: usize = 4;

/// The tensors of one call, all of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub x: ElementView,
    pub weight: ElementView,
    pub bias: Option<ElementView>,
    pub lines: ElementView,
    /// May be `x`.
    pub y: ElementView,
}

/// Convolves the rows of sequences, one after the other where lines are `shared`.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves, of `dtype`; their bytes are live and accessed by no other
/// thread; the runs are those of the problem, no two of which have a row in common, and where one writes a line that
/// another one has `shared` is set.
pub(crate) unsafe fn run(problem: &ConvProblem, dtype: DType, runs: (&[ConvRun], bool), buffers: &Buffers) {
    // SAFETY: the caller keeps this contract; the dtype is that of the tensors.
    unsafe {
        match dtype {
            DType::Float16 => typed::<f16>(problem, runs, buffers),
            _ => typed::<bf16>(problem, runs, buffers),
        }
    }
}

/// # Safety
///
/// As for [`run`], of tensors of elements `T`.
unsafe fn typed<T: Number>(problem: &ConvProblem, (runs, shared): (&[ConvRun], bool), buffers: &Buffers) {
    let blocks = problem.channels.div_ceil(BLOCK);
    let least = if shared { usize::MAX } else { 1 };
    let tasks = (0..runs.len() * blocks).into_par_iter().with_min_len(least);
    tasks.for_each(|task| {
        let first = task % blocks * BLOCK;
        let channels = first..(first + BLOCK).min(problem.channels);
        // SAFETY: the caller keeps this contract: no other run has the sequence's rows, nor a line that it writes
        // unless lines are shared, where there is one thread; the run's other tasks have other channels.
        unsafe { convolve::<T>(problem, &runs[task / blocks], channels, buffers) };
    });
}

/// Some channels of a row.
type Row<T> = [T; BLOCK];

/// # Safety
///
/// As for [`typed`]; no other thread accesses these channels of the run's rows of `y` and of the lines that it writes,
/// nor writes those of the line that it goes on from.
unsafe fn convolve<T: Number>(
    problem: &ConvProblem,
    run: &ConvRun,
    channels: std::ops::Range<usize>,
    buffers: &Buffers,
) {
    let front = problem.front();
    let row = |row: usize| row * problem.channels + channels.start;
    let line = |line: usize, number: usize| row(line * problem.line_rows + number);
    let count = channels.len();
    let blank: Row<T> = [T::narrow(0.0); BLOCK];
    let read = |tensor: &ElementView, first: usize| {
        let mut to = blank;
        // SAFETY: the caller keeps this contract, and the tensor has these channels.
        to[..count].iter_mut().enumerate().for_each(|(at, to)| *to = unsafe { tensor.read::<T>(first + at) });
        to
    };
    let weights: [Row<T>; WIDTH] = std::array::from_fn(|tap| match tap < problem.width {
        true => read(&buffers.weight, row(tap)),
        false => blank,
    });
    let bias = buffers.bias.as_ref().map_or(blank, |bias| read(bias, channels.start));
    // The rows in front of the sequence: from its line, or zeros.
    let before: [Row<T>; WIDTH - 1] = std::array::from_fn(|number| match run.history {
        Some(own) if number < front => read(&buffers.lines, line(own, run.first_row + number)),
        _ => blank,
    });
    let own = |number: usize| read(&buffers.x, row(run.rows.start + number));
    for KeptRows { line: to, row: first, padded } in &run.kept {
        let keep = |at: usize| {
            let values = match (padded.start + at).checked_sub(run.first_row) {
                Some(number) if number >= front => own(number - front),
                Some(number) => before[number],
                // Older rows of the line: a sequence without one has none in front of its first window.
                None => run.history.map_or(blank, |line_read| read(&buffers.lines, line(line_read, padded.start + at))),
            };
            for (channel, value) in values.iter().enumerate().take(count) {
                // SAFETY: the caller keeps this contract, and the line has the row.
                unsafe { buffers.lines.write(line(*to, first + at) + channel, *value) };
            }
        };
        // Rows that move within their line are read before they are written.
        match padded.start < *first {
            true => (0..padded.len()).rev().for_each(keep),
            false => (0..padded.len()).for_each(keep),
        }
    }
    let (silu, residual) = match problem.form {
        ConvForm::Package { silu, .. } => (silu, false),
        ConvForm::Fused(FusedConv { residual, .. }) => (false, residual),
    };
    let mut window: [Row<T>; WIDTH] = [blank; WIDTH];
    window[..front].copy_from_slice(&before[..front]);
    for (number, to) in run.rows.clone().enumerate() {
        window[front] = own(number);
        let mut sums = [0.0f32; BLOCK];
        for (rows, weights) in window.iter().zip(&weights).take(problem.width) {
            let products = rows.iter().zip(weights).map(|(x, weight)| x.widen() * weight.widen());
            sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        }
        for (at, (sum, bias)) in sums.iter().zip(&bias).enumerate().take(count) {
            let sum = if number < run.zeroed { 0.0 } else { sum + bias.widen() };
            let sum = if residual { sum + window[front][at].widen() } else { sum };
            let value = if silu { sum / (1.0 + (-sum).exp()) } else { sum };
            // SAFETY: the caller keeps this contract, and `y` has the element.
            unsafe { buffers.y.write(row(to) + at, T::narrow(value)) };
        }
        window.copy_within(1..=front, 0);
    }
}
