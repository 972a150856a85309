//! The gated delta rule (Yang, Kautz and Hatamizadeh 2024), token by token, as the operator RecurrentGatedDeltaRule
//! computes it.
//!
//! For each token of a head, with its state `S`, `[Dv, Dk]`, in single precision:
//!
//! ```text
//! S <- S exp(g) diag(exp(gk))
//! S <- S + beta (v - S k) kᵀ
//! out = scale S q
//! ```
//!
//! The rows of a state do not depend on each other. Sixteen of them are computed at a time, which one pass multiplies
//! with both the decayed key and the decayed query: the output of the state behind the token is that of the state
//! before, plus the correction times `k·q`. A second pass corrects the rows, and writes them while they are in
//! registers. A task has a head of a sequence, and a result depends on the call and the instruction set alone.
//! `delta_chunks` computes the same for prompts.

use super::prefetch::{CACHE_LINE, CacheLevel, prefetch};
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Level, Simd, Vector, WIDTH, total};
use super::tensor::strided::disjoint;
use ascend_spec::ops::delta_rule::{DeltaRuleProblem, Run};
use ascend_spec::{DType, TensorDesc};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of a state whose products are summed together.
const ROWS: usize = 4;

/// A tensor of up to four axes, of BF16 or FLOAT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    base: *mut u8,
    offset: i64,
    strides: [i64; 4],
    /// Elements in memory from one element of the last axis to the next.
    step: i64,
    dtype: DType,
    /// Whether no two elements share memory.
    apart: bool,
}

// SAFETY: the tensor is a place in memory; who reads and writes it is the business of `run`.
unsafe impl Send for Tensor {}
// SAFETY: a shared tensor is a place in memory too, and `run` says who may write there.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// The tensor that a launch walks, with its base address.
    pub(crate) fn new(base: *mut u8, walked: &TensorDesc) -> Self {
        let stride = |axis: usize| walked.strides.get(axis).copied().unwrap_or(0);
        let size = |axis: usize| walked.shape.get(axis).map_or(1, |&size| usize::try_from(size).unwrap_or(0));
        let step = walked.strides.last().copied().unwrap_or(1);
        Self {
            base,
            offset: walked.offset,
            strides: [0, 1, 2, 3].map(stride),
            step,
            dtype: walked.dtype,
            apart: disjoint([0, 1, 2, 3].map(|axis| (size(axis), stride(axis)))),
        }
    }

    /// Address of an element of `size` bytes; the index of an axis that the tensor does not have is 0.
    #[inline(always)]
    fn at<T>(&self, place: [usize; 4], size: usize) -> *mut T {
        let steps = place.iter().zip(self.strides).map(|(&index, stride)| index as i64 * stride);
        let elements = (self.offset + steps.sum::<i64>()) as isize;
        self.base.wrapping_offset(elements.wrapping_mul(size as isize)).cast()
    }

    /// Reads an element as single precision.
    ///
    /// # Safety
    ///
    /// The tensor has the element, which is live and written by no other thread.
    #[inline(always)]
    pub(super) unsafe fn read(&self, place: [usize; 4]) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.read_behind(place, 0) }
    }

    /// Reads the element of the last axis that is this number behind an element.
    ///
    /// # Safety
    ///
    /// As for [`read`](Self::read), of that element.
    #[inline(always)]
    unsafe fn read_behind(&self, place: [usize; 4], number: usize) -> f32 {
        let step = number as isize * self.step as isize;
        // SAFETY: the caller's promise. No alignment is assumed.
        unsafe {
            match self.dtype {
                DType::Bf16 => {
                    let from = self.at::<bf16>(place, size_of::<bf16>()).wrapping_offset(step);
                    from.read_unaligned().to_f32()
                }
                _ => self.at::<f32>(place, size_of::<f32>()).wrapping_offset(step).read_unaligned(),
            }
        }
    }

    /// How many whole vectors of a row of `count` elements are contiguous halves.
    #[inline(always)]
    fn whole(&self, count: usize) -> usize {
        match (self.dtype, self.step) {
            (DType::Bf16, 1) => count / WIDTH,
            _ => 0,
        }
    }

    /// Reads elements of the last axis, as many as `count`, into vectors whose other lanes become 0.
    ///
    /// # Safety
    ///
    /// As for [`read`](Self::read), of each of them.
    #[inline(always)]
    pub(super) unsafe fn read_row<'v, S: Simd>(
        &self,
        simd: S,
        place: [usize; 4],
        count: usize,
        to: impl IntoIterator<Item = &'v mut Vector>,
    ) {
        let whole = self.whole(count);
        let first = self.at::<[u16; WIDTH]>(place, size_of::<bf16>());
        let mut to = to.into_iter().enumerate();
        for (block, to) in to.by_ref().take(whole) {
            // SAFETY: the caller's promise, for each element. No alignment is assumed.
            let bits = unsafe { first.wrapping_add(block).read_unaligned() };
            simd.store(simd.widen_bf16(&bits), to);
        }
        for (block, to) in to {
            *to = [0.0; WIDTH];
            for (element, to) in (block * WIDTH..count).zip(to) {
                // SAFETY: the caller's promise, for each element.
                *to = unsafe { self.read_behind(place, element) };
            }
        }
    }

    /// Writes elements of the last axis, as many as `count`, each rounded to the nearest, ties to even.
    ///
    /// # Safety
    ///
    /// The tensor has the elements, which are live and accessed by no other thread.
    #[inline(always)]
    pub(super) unsafe fn write_row<'v, S: Simd>(
        &self,
        simd: S,
        place: [usize; 4],
        values: impl IntoIterator<Item = &'v Vector>,
        count: usize,
    ) {
        let whole = self.whole(count);
        let first = self.at::<[u16; WIDTH]>(place, size_of::<bf16>());
        let mut values = values.into_iter();
        for (block, values) in values.by_ref().take(whole).enumerate() {
            let bits = simd.narrow_bf16(simd.load(values));
            // SAFETY: the caller's promise, for each element. No alignment is assumed.
            unsafe { first.wrapping_add(block).write_unaligned(bits) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.write_rest(place, values, whole * WIDTH..count) };
    }

    /// Decays a row of a state, corrects it by a token and writes it, in one pass.
    ///
    /// # Safety
    ///
    /// As for [`write_row`](Self::write_row).
    #[inline(always)]
    unsafe fn write_corrected<S: Simd>(
        &self,
        simd: S,
        place: [usize; 4],
        count: usize,
        state: &mut [Vector],
        Correction { decays, keys, correction }: Correction<'_>,
    ) {
        let whole = self.whole(count);
        let first = self.at::<[u16; WIDTH]>(place, size_of::<bf16>());
        let factor = simd.splat(correction);
        for (block, ((state, decay), key)) in state.iter_mut().zip(decays).zip(keys).enumerate() {
            let decayed = simd.multiply(simd.load(state), simd.load(decay));
            let corrected = simd.mul_add(factor, simd.load(key), decayed);
            simd.store(corrected, state);
            if block < whole {
                // SAFETY: the caller's promise, for each element. No alignment is assumed.
                unsafe { first.wrapping_add(block).write_unaligned(simd.narrow_bf16(corrected)) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.write_rest(place, &state[whole..], whole * WIDTH..count) };
    }

    /// Writes some elements of the last axis one by one.
    ///
    /// # Safety
    ///
    /// As for [`write_row`](Self::write_row), of these elements.
    #[inline(always)]
    unsafe fn write_rest<'v>(
        &self,
        place: [usize; 4],
        values: impl IntoIterator<Item = &'v Vector>,
        elements: Range<usize>,
    ) {
        for (element, &value) in elements.zip(values.into_iter().flatten()) {
            let step = element as isize * self.step as isize;
            // SAFETY: the caller's promise, for each element. No alignment is assumed.
            unsafe {
                match self.dtype {
                    DType::Bf16 => {
                        let to = self.at::<bf16>(place, size_of::<bf16>()).wrapping_offset(step);
                        to.write_unaligned(bf16::from_f32(value));
                    }
                    _ => self.at::<f32>(place, size_of::<f32>()).wrapping_offset(step).write_unaligned(value),
                }
            }
        }
    }

    /// Prefetches contiguous elements of the last axis, as many as `count`. They need not be there.
    #[inline(always)]
    pub(super) fn prefetch_row(&self, level: CacheLevel, place: [usize; 4], count: usize) {
        let size = if self.dtype == DType::Bf16 { size_of::<bf16>() } else { size_of::<f32>() };
        let first = self.at::<u8>(place, size);
        for byte in (0..count * size).step_by(CACHE_LINE) {
            prefetch(level, first.wrapping_add(byte));
        }
    }
}

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub query: Tensor,
    pub key: Tensor,
    pub value: Tensor,
    pub beta: Tensor,
    /// Logarithms of the decay of heads.
    pub g: Option<Tensor>,
    /// Logarithms of the decay of columns.
    pub gk: Option<Tensor>,
    /// Where states begin.
    pub begin: Tensor,
    /// Where states are written: the same tensor, of a pool.
    pub end: Tensor,
    /// `None` where the outputs are lost.
    pub out: Option<Tensor>,
    /// Of each token the slot that its state is written to; empty for the kernel of chunks (`delta_chunks`) alone,
    /// which writes the state behind a sequence by the sequence's number.
    pub slots: &'a [i64],
}

/// Computes the runs on the current rayon pool.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves; their bytes, as the problem counts those that a launch
/// touches, are live and accessed by no other thread, and outputs share no memory with other tensors. Tokens and slots
/// of the runs are within the tensors, and each token has a slot.
pub(crate) unsafe fn run(problem: &DeltaRuleProblem, runs: (&[Run], bool), buffers: &Buffers<'_>) {
    let level = Level::chosen();
    let tokens = runs.0.iter().map(|run| run.first + run.tokens).max().unwrap_or(0);
    assert!(buffers.slots.len() >= tokens, "{} slots for {tokens} tokens", buffers.slots.len());
    for_each_head(problem, runs, buffers, |run, head| {
        let vectors = problem.key_dim.div_ceil(WIDTH);
        Scratch::with(|scratch| {
            let mut rest = scratch.vectors(run.tokens + (WIDTH + 4 * run.tokens) * vectors);
            let state = take(&mut rest, WIDTH * vectors);
            let scalars = take(&mut rest, run.tokens);
            let decays = take(&mut rest, run.tokens * vectors);
            let keys = take(&mut rest, run.tokens * vectors);
            let (pairs, _) = rest.as_chunks_mut();
            level.run(Head { problem, buffers, run, head, state, scalars, decays, keys, pairs });
        });
    });
}

/// Computes each value head of the runs on the current rayon pool, or where they share states, which is `shared`, one
/// after the other.
pub(super) fn for_each_head(
    problem: &DeltaRuleProblem,
    (runs, shared): (&[Run], bool),
    buffers: &Buffers<'_>,
    compute: impl Fn(Run, usize) + Sync,
) {
    let heads = problem.value_heads;
    // Only one thread writes to memory that tasks share.
    let apart = !shared && buffers.end.apart && buffers.out.is_none_or(|out| out.apart);
    let least = if apart { 1 } else { usize::MAX };
    let tasks = (0..runs.len() * heads).into_par_iter().with_min_len(least);
    tasks.for_each(|task| compute(runs[task / heads], task % heads));
}

/// A value head of a sequence.
struct Head<'a> {
    problem: &'a DeltaRuleProblem,
    buffers: &'a Buffers<'a>,
    run: Run,
    head: usize,
    /// Sixteen rows of the state.
    state: &'a mut [Vector],
    /// Of each token its beta, and the product of its key and its scaled query, in the first two lanes.
    scalars: &'a mut [Vector],
    /// Of each token the decay of each column, its key, and key and scaled query multiplied with the decay, by which
    /// the state before the token is read.
    decays: &'a mut [Vector],
    keys: &'a mut [Vector],
    pairs: &'a mut [[Vector; 2]],
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Head { problem, buffers, run, head, .. } = self;
        let (dim, value_dim) = (problem.key_dim, problem.value_dim);
        let vectors = dim.div_ceil(WIDTH);
        for at in 0..run.tokens {
            self.widen(simd, at);
        }
        for first in (0..value_dim).step_by(WIDTH) {
            let lanes = WIDTH.min(value_dim - first);
            for (row, state) in self.state.chunks_exact_mut(vectors).enumerate() {
                match row < lanes {
                    // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
                    true => unsafe { buffers.begin.read_row(simd, [run.start, head, first + row, 0], dim, state) },
                    false => state.fill([0.0; WIDTH]),
                }
            }
            for (at, &[beta, overlap, ..]) in self.scalars.iter().enumerate() {
                let token = run.first + at;
                // `run` has checked that each token has a slot.
                let slot = buffers.slots[token] as usize;
                let place = [token, head, first, 0];
                let mut value = [[0.0; WIDTH]];
                // SAFETY: the promise of `run`, by which the token is one of the tensors.
                unsafe { buffers.value.read_row(simd, place, lanes, &mut value) };
                let tokens = at * vectors..(at + 1) * vectors;
                let [remembered, read] = dots(simd, self.state, &self.pairs[tokens.clone()]);
                let mut corrections = [0.0; WIDTH];
                let mut out = [[0.0; WIDTH]];
                for row in 0..WIDTH {
                    corrections[row] = beta * (value[0][row] - remembered[row]);
                    out[0][row] = read[row] + corrections[row] * overlap;
                }
                let (decays, keys) = (&self.decays[tokens.clone()], &self.keys[tokens]);
                let rows = self.state.chunks_exact_mut(vectors).zip(corrections).take(lanes).enumerate();
                for (row, (state, correction)) in rows {
                    if at == 0 {
                        // The rows behind this head's are those of the next one, which this thread takes as a rule.
                        let row = first + WIDTH + row;
                        let place = [run.start, head + row / value_dim, row % value_dim, 0];
                        buffers.begin.prefetch_row(CacheLevel::L1, place, dim);
                    }
                    let place = [slot, head, first + row, 0];
                    let correction = Correction { decays, keys, correction };
                    // SAFETY: the promise of `run`, by which the slot is one of the pool, and this task's alone.
                    unsafe { buffers.end.write_corrected(simd, place, dim, state, correction) };
                }
                if let Some(tensor) = &buffers.out {
                    // SAFETY: the promise of `run`, by which the token is one of the tensors.
                    unsafe { tensor.write_row(simd, place, &out, lanes) };
                }
            }
        }
    }
}

impl Head<'_> {
    /// Widens what the rows of the state share of a token.
    #[inline(always)]
    fn widen<S: Simd>(&mut self, simd: S, at: usize) {
        let Self { problem, buffers, run, head, .. } = *self;
        let (dim, key_head, token) = (problem.key_dim, problem.key_head(head), run.first + at);
        let vectors = dim.div_ceil(WIDTH);
        let tokens = at * vectors..(at + 1) * vectors;
        let (keys, decays) = (&mut self.keys[tokens.clone()], &mut self.decays[tokens.clone()]);
        let place = [token, head, 0, 0];
        // SAFETY: the promise of `run`, by which the token is one of the tensors.
        let (beta, decay) = unsafe {
            buffers.key.read_row(simd, [token, key_head, 0, 0], dim, &mut *keys);
            match &buffers.gk {
                Some(gk) => gk.read_row(simd, place, dim, &mut *decays),
                None => decays.fill([0.0; WIDTH]),
            }
            (buffers.beta.read(place), buffers.g.map_or(1.0, |g| g.read(place).exp()))
        };
        let mut overlap = simd.splat(0.0);
        let rows = self.pairs[tokens].iter_mut().zip(keys).zip(decays);
        for (block, ((pair, key), decays)) in rows.enumerate() {
            let place = [token, key_head, block * WIDTH, 0];
            let mut query = [[0.0; WIDTH]];
            // SAFETY: the promise of `run`, by which the token is one of the tensors.
            unsafe { buffers.query.read_row(simd, place, WIDTH.min(dim - block * WIDTH), &mut query) };
            let query = simd.multiply(simd.splat(problem.scale), simd.load(&query[0]));
            overlap = simd.mul_add(simd.load(key), query, overlap);
            *decays = match buffers.gk {
                Some(_) => decays.map(|logarithm| decay * logarithm.exp()),
                None => [decay; WIDTH],
            };
            simd.store(simd.multiply(simd.load(key), simd.load(decays)), &mut pair[0]);
            simd.store(simd.multiply(query, simd.load(decays)), &mut pair[1]);
        }
        let mut lanes = [0.0; WIDTH];
        simd.store(overlap, &mut lanes);
        [self.scalars[at][0], self.scalars[at][1]] = [beta, total(&lanes)];
    }
}

/// The products of 16 rows of a state with a decayed key and a decayed query.
#[inline(always)]
fn dots<S: Simd>(simd: S, state: &[Vector], pairs: &[[Vector; 2]]) -> [Vector; 2] {
    let vectors = pairs.len();
    let mut all = [[simd.zero_sum(); WIDTH]; 2];
    for first in (0..WIDTH).step_by(ROWS) {
        let mut sums = [[simd.zero_sum(); 2]; ROWS];
        for (at, pair) in pairs.iter().enumerate() {
            let mut rows = [simd.splat(0.0); ROWS];
            for r in 0..ROWS {
                rows[r] = simd.load(&state[(first + r) * vectors + at]);
            }
            simd.dots(pair, rows, &mut sums);
        }
        for r in 0..ROWS {
            [all[0][first + r], all[1][first + r]] = sums[r];
        }
    }
    [simd.horizontal_sums(all[0]), simd.horizontal_sums(all[1])]
}

/// What a token changes in a row of a state: each element decays, then the key times a number is added.
#[derive(Clone, Copy)]
struct Correction<'a> {
    decays: &'a [Vector],
    keys: &'a [Vector],
    correction: f32,
}
