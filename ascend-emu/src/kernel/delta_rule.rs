//! The gated delta rule (Yang, Kautz and Hatamizadeh 2024), as the operators RecurrentGatedDeltaRule and
//! ChunkGatedDeltaRule compute it.
//!
//! For each token of a head, with its state `S`, `[Dv, Dk]`, in single precision:
//!
//! ```text
//! S <- S exp(g) diag(exp(gk))
//! S <- S + beta (v - S k) kᵀ
//! out = scale S q
//! ```
//!
//! The rows of a state do not depend on each other. Sixteen of them are computed at a time, turned such that a vector
//! holds one column of them: products with keys and queries are then sums of vectors, without sums over lanes. A task
//! has a head of a sequence, and a result depends on the call and the instruction set alone.

use super::simd::{Kernel, Level, Simd, Vector, WIDTH};
use super::tensor::strided::disjoint;
use crate::host_memory::{HostMemoryExhausted, try_repeat};
use ascend_spec::ops::delta_rule::{DeltaRuleProblem, Run};
use ascend_spec::{DType, TensorDesc};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Tokens whose keys, queries and decays are widened at a time.
const TOKENS: usize = 64;

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

    /// Address of an element; axes that the tensor does not have are 0.
    fn at<T>(&self, place: [usize; 4]) -> *mut T {
        let steps = place.iter().zip(self.strides).map(|(&index, stride)| index as i64 * stride);
        self.base.cast::<T>().wrapping_offset((self.offset + steps.sum::<i64>()) as isize)
    }

    /// Reads an element as single precision.
    ///
    /// # Safety
    ///
    /// The tensor has the element, which is live and written by no other thread.
    #[inline(always)]
    unsafe fn read(&self, place: [usize; 4]) -> f32 {
        match self.dtype {
            // SAFETY: the caller's promise. No alignment is assumed.
            DType::Bf16 => unsafe { self.at::<bf16>(place).read_unaligned() }.to_f32(),
            // SAFETY: the caller's promise. No alignment is assumed.
            _ => unsafe { self.at::<f32>(place).read_unaligned() },
        }
    }

    /// Reads up to 16 elements of the last axis.
    ///
    /// # Safety
    ///
    /// As for [`read`](Self::read), of each of them.
    #[inline(always)]
    unsafe fn read_row<S: Simd>(&self, simd: S, place: [usize; 4], count: usize) -> Vector {
        let mut values = [0.0; WIDTH];
        match self.dtype {
            // SAFETY: the caller's promise, for each element. No alignment is assumed.
            DType::Bf16 if self.step == 1 && count == WIDTH => unsafe {
                let bits = self.at::<u16>(place).cast::<[u16; WIDTH]>().read_unaligned();
                simd.store(simd.widen_bf16(&bits), &mut values);
            },
            dtype => {
                for (lane, value) in values.iter_mut().take(count).enumerate() {
                    let step = lane as isize * self.step as isize;
                    // SAFETY: the caller's promise, for each element. No alignment is assumed.
                    *value = unsafe {
                        match dtype {
                            DType::Bf16 => self.at::<bf16>(place).wrapping_offset(step).read_unaligned().to_f32(),
                            _ => self.at::<f32>(place).wrapping_offset(step).read_unaligned(),
                        }
                    };
                }
            }
        }
        values
    }

    /// Writes up to 16 elements of the last axis, each rounded to the nearest, ties to even.
    ///
    /// # Safety
    ///
    /// The tensor has the elements, which are live and accessed by no other thread.
    #[inline(always)]
    unsafe fn write_row<S: Simd>(&self, simd: S, place: [usize; 4], values: &Vector, count: usize) {
        match self.dtype {
            // SAFETY: the caller's promise, for each element. No alignment is assumed.
            DType::Bf16 if self.step == 1 && count == WIDTH => unsafe {
                let mut rounded = [0.0; WIDTH];
                simd.store(simd.round_bf16(simd.load(values)), &mut rounded);
                let bits = rounded.map(|value: f32| (value.to_bits() >> 16) as u16);
                self.at::<u16>(place).cast::<[u16; WIDTH]>().write_unaligned(bits);
            },
            dtype => {
                for (lane, &value) in values.iter().take(count).enumerate() {
                    let step = lane as isize * self.step as isize;
                    // SAFETY: the caller's promise, for each element. No alignment is assumed.
                    unsafe {
                        match dtype {
                            DType::Bf16 => {
                                let to = self.at::<bf16>(place).wrapping_offset(step);
                                to.write_unaligned(bf16::from_f32(value));
                            }
                            _ => self.at::<f32>(place).wrapping_offset(step).write_unaligned(value),
                        }
                    }
                }
            }
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
    /// Of each token the slot that its state is written to; empty where only the last state of a sequence is kept, by
    /// the sequence's number.
    pub slots: &'a [i64],
}

/// Computes the runs on the current rayon pool, or where they share states, which is `shared`, one after the other.
///
/// # Errors
/// There is no host memory for a state.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves; their bytes, as the problem counts those that a launch
/// touches, are live and accessed by no other thread, and outputs share no memory with other tensors. Tokens and slots
/// of the runs are within the tensors.
pub(crate) unsafe fn run(
    problem: &DeltaRuleProblem,
    (runs, shared): (&[Run], bool),
    buffers: &Buffers<'_>,
) -> Result<(), HostMemoryExhausted> {
    // SAFETY: the caller keeps this contract.
    unsafe { run_under(Level::chosen(), problem, (runs, shared), buffers) }
}

/// Computes with one instruction set.
///
/// # Errors
/// As for [`run`].
///
/// # Safety
///
/// As for [`run`].
unsafe fn run_under(
    level: Level,
    problem: &DeltaRuleProblem,
    (runs, shared): (&[Run], bool),
    buffers: &Buffers<'_>,
) -> Result<(), HostMemoryExhausted> {
    let heads = problem.value_heads;
    // Only one thread writes to memory that tasks share.
    let apart = !shared && buffers.end.apart && buffers.out.is_none_or(|out| out.apart);
    let least = if apart { 1 } else { usize::MAX };
    (0..runs.len() * heads).into_par_iter().with_min_len(least).try_for_each(|task| {
        let (run, head) = (runs[task / heads], task % heads);
        let groups = problem.value_dim.div_ceil(WIDTH);
        let zeros = [0.0; WIDTH];
        let columns = TOKENS.min(run.tokens) * problem.key_dim;
        let task = Head {
            problem,
            buffers,
            run,
            head,
            state: &mut try_repeat(zeros, groups * problem.key_dim)?,
            rows: &mut [try_repeat(0.0, columns)?, try_repeat(0.0, columns)?, try_repeat(1.0, columns)?],
        };
        level.run(task);
        Ok(())
    })
}

/// A value head of a sequence.
struct Head<'a> {
    problem: &'a DeltaRuleProblem,
    buffers: &'a Buffers<'a>,
    run: Run,
    head: usize,
    /// The state: for each 16 of its rows, its columns.
    state: &'a mut [Vector],
    /// Keys, scaled queries, and decays of some tokens.
    rows: &'a mut [Vec<f32>; 3],
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Head { problem, buffers, run, head, state, rows } = self;
        let (dim, value_dim) = (problem.key_dim, problem.value_dim);
        for (group, state) in state.chunks_exact_mut(dim).enumerate() {
            // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
            unsafe { load(simd, &buffers.begin, [run.start, head, group * WIDTH], value_dim, state) };
        }
        for first in (0..run.tokens).step_by(TOKENS) {
            let tokens = run.first + first..run.first + run.tokens.min(first + TOKENS);
            // SAFETY: the promise of `run`, by which the tokens are those of the tensors.
            unsafe { widen(simd, problem, buffers, head, tokens.clone(), rows) };
            let [keys, queries, decays] = rows.each_ref().map(|rows| rows.chunks_exact(dim));
            for (group, state) in state.chunks_exact_mut(dim).enumerate() {
                let rows = keys.clone().zip(queries.clone()).zip(decays.clone());
                for (token, ((key, query), decay)) in tokens.clone().zip(rows) {
                    let place = [token, head, group * WIDTH, 0];
                    let lanes = WIDTH.min(value_dim - group * WIDTH);
                    // SAFETY: the promise of `run`, by which the token is one of the tensors, and its slot one of the
                    // pool.
                    unsafe {
                        let value = buffers.value.read_row(simd, place, lanes);
                        let beta = buffers.beta.read([token, head, 0, 0]);
                        let out = step(simd, state, [key, query, decay], &value, beta);
                        if let Some(tensor) = &buffers.out {
                            tensor.write_row(simd, place, &out, lanes);
                        }
                        if let Some(&slot) = buffers.slots.get(token) {
                            store(simd, &buffers.end, [slot as usize, head, group * WIDTH], value_dim, state);
                        }
                    }
                }
            }
        }
        if buffers.slots.is_empty() {
            for (group, state) in state.chunks_exact(dim).enumerate() {
                // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
                unsafe { store(simd, &buffers.end, [run.sequence, head, group * WIDTH], value_dim, state) };
            }
        }
    }
}

/// Widens keys, scaled queries and decays of tokens.
///
/// # Safety
///
/// The tensors have the tokens and the head, live and written by no other thread.
#[inline(always)]
unsafe fn widen<S: Simd>(
    simd: S,
    problem: &DeltaRuleProblem,
    buffers: &Buffers<'_>,
    head: usize,
    tokens: Range<usize>,
    [keys, queries, decays]: &mut [Vec<f32>; 3],
) {
    let (dim, key_head) = (problem.key_dim, problem.key_head(head));
    let rows = keys.chunks_exact_mut(dim).zip(queries.chunks_exact_mut(dim)).zip(decays.chunks_exact_mut(dim));
    for (token, ((keys, queries), decays)) in tokens.zip(rows) {
        // SAFETY: the caller's promise.
        let decay = buffers.g.map_or(1.0, |g| unsafe { g.read([token, head, 0, 0]) }.exp());
        for first in (0..dim).step_by(WIDTH) {
            let columns = first..dim.min(first + WIDTH);
            // SAFETY: the caller's promise.
            let row = |tensor: &Tensor, head| unsafe { tensor.read_row(simd, [token, head, first, 0], columns.len()) };
            let (key, query) = (row(&buffers.key, key_head), row(&buffers.query, key_head));
            let logarithms = buffers.gk.as_ref().map_or([0.0; WIDTH], |gk| row(gk, head));
            for (lane, column) in columns.clone().enumerate() {
                keys[column] = key[lane];
                queries[column] = problem.scale * query[lane];
                decays[column] = match buffers.gk {
                    Some(_) => decay * logarithms[lane].exp(),
                    None => decay,
                };
            }
        }
    }
}

/// Decays the columns of 16 rows, corrects them by a token, and reads them by its query.
#[inline(always)]
fn step<S: Simd>(simd: S, state: &mut [Vector], [key, query, decay]: [&[f32]; 3], value: &Vector, beta: f32) -> Vector {
    // Four sums, so that one does not wait for the other.
    let mut sums = [simd.splat(0.0); 4];
    let columns = state.iter_mut().zip(key.iter().zip(decay)).enumerate();
    for (at, (column, (&key, &decay))) in columns {
        let decayed = simd.multiply(simd.load(column), simd.splat(decay));
        simd.store(decayed, column);
        sums[at % 4] = simd.mul_add(decayed, simd.splat(key), sums[at % 4]);
    }
    let remembered = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
    let correction = simd.multiply(simd.splat(beta), simd.subtract(simd.load(value), remembered));
    let mut sums = [simd.splat(0.0); 4];
    let columns = state.iter_mut().zip(key.iter().zip(query)).enumerate();
    for (at, (column, (&key, &query))) in columns {
        let corrected = simd.mul_add(correction, simd.splat(key), simd.load(column));
        simd.store(corrected, column);
        sums[at % 4] = simd.mul_add(corrected, simd.splat(query), sums[at % 4]);
    }
    let mut out = [0.0; WIDTH];
    simd.store(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])), &mut out);
    out
}

/// Loads 16 rows of a state, from a row on, as columns.
///
/// # Safety
///
/// The tensor has the state, live and written by no other thread.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, from: &Tensor, [slot, head, row]: [usize; 3], rows: usize, state: &mut [Vector]) {
    for (block, columns) in state.chunks_mut(WIDTH).enumerate() {
        let mut turned = [[0.0; WIDTH]; WIDTH];
        for (lanes, row) in turned.iter_mut().zip(row..rows) {
            // SAFETY: the caller's promise.
            *lanes = unsafe { from.read_row(simd, [slot, head, row, block * WIDTH], columns.len()) };
        }
        let turned = simd.transpose(&turned);
        columns.copy_from_slice(&turned[..columns.len()]);
    }
}

/// Stores 16 rows of a state, from a row on, that lie in columns.
///
/// # Safety
///
/// The tensor has the state, live and accessed by no other thread.
#[inline(always)]
unsafe fn store<S: Simd>(simd: S, to: &Tensor, [slot, head, row]: [usize; 3], rows: usize, state: &[Vector]) {
    for (block, columns) in state.chunks(WIDTH).enumerate() {
        let mut turned = [[0.0; WIDTH]; WIDTH];
        turned[..columns.len()].copy_from_slice(columns);
        let turned = simd.transpose(&turned);
        for (lanes, row) in turned.iter().zip(row..rows) {
            // SAFETY: the caller's promise.
            unsafe { to.write_row(simd, [slot, head, row, block * WIDTH], lanes, columns.len()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::Cann;
    use ascend_spec::ops::chunk_gated_delta_rule::ChunkDeltaCall;
    use ascend_spec::{Soc, Target};

    /// A prompt of more tokens than are widened at a time, with heads that fill no vector.
    const TOKENS_OF_PROMPT: i64 = 70;
    const KEY_DIM: i64 = 40;
    const VALUE_DIM: i64 = 24;

    fn numbers(seed: u32, count: usize) -> Vec<bf16> {
        let mut bits = seed;
        let numbers = (0..count).map(|_| {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32((bits >> 16) as f32 / 262_144.0 - 0.125)
        });
        numbers.collect()
    }

    fn of(shape: &[i64]) -> TensorDesc {
        TensorDesc::contiguous(DType::Bf16, shape).unwrap()
    }

    /// Outputs, and the state behind the last token.
    fn compute(level: Level, threads: usize) -> (Vec<f32>, Vec<f32>) {
        let descs = [
            of(&[TOKENS_OF_PROMPT, 1, KEY_DIM]),
            of(&[TOKENS_OF_PROMPT, 2, VALUE_DIM]),
            of(&[TOKENS_OF_PROMPT, 2]),
            of(&[1, 2, VALUE_DIM, KEY_DIM]),
        ];
        let call = ChunkDeltaCall {
            query: Some(descs[0]),
            key: Some(descs[0]),
            value: Some(descs[1]),
            beta: Some(descs[2]),
            initial_state: Some(descs[3]),
            actual_seq_lengths: TensorDesc::contiguous(DType::Int32, &[1]),
            scale: 0.5,
            out: Some(descs[1]),
            final_state: Some(descs[3]),
            ..ChunkDeltaCall::default()
        };
        let problem = call.check(Target::new(Soc::AtlasA2, Cann::V9_1)).unwrap();
        let counts = descs.map(|desc| desc.elements().unwrap() as usize);
        let given = [
            numbers(1, counts[0]),
            numbers(2, counts[0]),
            numbers(3, counts[1]),
            numbers(4, counts[2]),
            numbers(5, counts[3]),
        ];
        let place = |numbers: &[bf16], desc: &TensorDesc| Tensor::new(numbers.as_ptr().cast_mut().cast(), desc);
        let (mut out, mut end) = (vec![bf16::NAN; counts[1]], vec![bf16::NAN; counts[3]]);
        let buffers = Buffers {
            query: place(&given[0], &descs[0]),
            key: place(&given[1], &descs[0]),
            value: place(&given[2], &descs[1]),
            beta: place(&given[3], &descs[2]),
            g: None,
            gk: None,
            begin: place(&given[4], &descs[3]),
            end: Tensor::new(end.as_mut_ptr().cast(), &descs[3]),
            out: Some(Tensor::new(out.as_mut_ptr().cast(), &descs[1])),
            slots: &[],
        };
        let run = Run { sequence: 0, first: 0, tokens: TOKENS_OF_PROMPT as usize, start: 0 };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        // SAFETY: the tensors are those of the problem, and live.
        pool.install(|| unsafe { run_under(level, &problem, (&[run], false), &buffers) }).unwrap();
        let wide = |numbers: Vec<bf16>| numbers.into_iter().map(bf16::to_f32).collect();
        (wide(out), wide(end))
    }

    #[test]
    fn instruction_sets_agree_and_threads_change_no_bit() {
        let (want_out, want_end) = compute(Level::named("portable").unwrap(), 1);
        assert!(want_out.iter().chain(&want_end).all(|number| number.is_finite()));
        for level in Level::all() {
            let got = compute(level, 1);
            assert_eq!(compute(level, 4), got, "{}", level.name());
            for (got, want) in got.0.iter().zip(&want_out).chain(got.1.iter().zip(&want_end)) {
                assert!((got - want).abs() <= 0.004 * want.abs() + 1e-5, "{}: {got} is not {want}", level.name());
            }
        }
    }
}
