//! The causal convolution of short windows in front of linear attention, channel by channel, as the operator
//! CausalConv1d of vLLM-Ascend's package computes it: sums in single precision, one rounding.
//!
//! A task has some channels of a sequence. It reads the rows in front of the sequence from its line, slides over the
//! sequence's rows, and writes the line last, which no other task reads.

use super::element_view::ElementView;
use super::merge::Number;
use ascend_spec::DType;
use ascend_spec::ops::causal_conv1d::{ConvProblem, ConvRun};
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
    pub y: ElementView,
}

/// Convolves the rows of sequences, one after the other where lines are `shared`.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves, of `dtype`; their bytes are live and accessed by no other
/// thread; the runs are those of the problem, no two of which have a row in common, and where two have one line
/// `shared` is set.
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
        // SAFETY: the caller keeps this contract: no other run has the sequence's rows, nor its line unless lines are
        // shared, where there is one thread; the run's other tasks have other channels.
        unsafe { convolve::<T>(problem, &runs[task / blocks], channels, buffers) };
    });
}

/// # Safety
///
/// As for [`typed`]; no other thread accesses these channels of the run's rows of `y` and of its line.
unsafe fn convolve<T: Number>(
    problem: &ConvProblem,
    run: &ConvRun,
    channels: std::ops::Range<usize>,
    buffers: &Buffers,
) {
    let front = problem.width - 1;
    let row = |row: usize| row * problem.channels + channels.start;
    let line = |number: usize| row(run.line * problem.line_rows + number);
    let count = channels.len();
    let blank = [T::narrow(0.0); BLOCK];
    let read = |tensor: &ElementView, first: usize| {
        let mut to = blank;
        // SAFETY: the caller keeps this contract, and the tensor has these channels.
        to[..count].iter_mut().enumerate().for_each(|(at, to)| *to = unsafe { tensor.read::<T>(first + at) });
        to
    };
    let weights: [[T; BLOCK]; WIDTH] = std::array::from_fn(|tap| match tap < problem.width {
        true => read(&buffers.weight, row(tap)),
        false => blank,
    });
    let bias = buffers.bias.as_ref().map_or(blank, |bias| read(bias, channels.start));
    // The rows in front of the sequence: from its line, or zeros.
    let before: [[T; BLOCK]; WIDTH - 1] = std::array::from_fn(|number| match run.first_row {
        Some(first) if number < front => read(&buffers.lines, line(first + number)),
        _ => blank,
    });
    let all = |number: usize| match number.checked_sub(front) {
        Some(own) => read(&buffers.x, row(run.rows.start + own)),
        None => before[number],
    };
    let mut window: [[T; BLOCK]; WIDTH] = [blank; WIDTH];
    (0..front).for_each(|number| window[number] = before[number]);
    for (number, to) in run.rows.clone().enumerate() {
        window[front] = all(front + number);
        let mut sums = [0.0f32; BLOCK];
        for (rows, weights) in window.iter().zip(&weights).take(problem.width) {
            let products = rows.iter().zip(weights).map(|(x, weight)| x.widen() * weight.widen());
            sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        }
        for (at, (sum, bias)) in sums.iter().zip(&bias).enumerate().take(count) {
            let sum = sum + bias.widen();
            let value = if problem.silu { sum / (1.0 + (-sum).exp()) } else { sum };
            // SAFETY: the caller keeps this contract, and `y` has the element.
            unsafe { buffers.y.write(row(to) + at, T::narrow(value)) };
        }
        window.copy_within(1..=front, 0);
    }
    if !problem.writes_line(run) {
        return;
    }
    for (to, from) in run.kept.clone().enumerate() {
        let values = all(from);
        for (at, value) in values.iter().enumerate().take(count) {
            // SAFETY: the caller keeps this contract, and the line has the row.
            unsafe { buffers.lines.write(line(to) + at, *value) };
        }
    }
}
