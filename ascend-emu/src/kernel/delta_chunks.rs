//! The gated delta rule in chunks of tokens, by the WY representation of products of Householder-like matrices, as the
//! operator ChunkGatedDeltaRule computes it, in single precision. Yang, Wang, Zhang, Shen and Kim, "Parallelizing
//! Linear Transformers with the Delta Rule over Sequence Length" (2024); Yang, Kautz and Hatamizadeh, "Gated Delta
//! Networks: Improving Mamba2 with Delta Rule" (2024).
//!
//! Within a chunk, which begins with the state `S`, token `t` has keys, queries and values `k`, `q` and `v`. Let
//! `D[t, s]` be the product of the decays of the tokens behind `s` up to `t`, and `d[t]` that of all up to `t`. What
//! the tokens correct, the rows of `E`, solves a triangular system, and with it outputs and the next state are products
//! of matrices:
//!
//! ```text
//! (I + A) E = diag(beta) (V - diag(d) K Sᵀ)      A[t, s] = beta[t] D[t, s] k[t]·k[s]  for s < t
//! O = scale diag(d) Q Sᵀ + P E                   P[t, s] = scale D[t, s] q[t]·k[s]    for s <= t
//! S <- d[last] S + (diag(D[last]) E)ᵀ K
//! ```
//!
//! `E` is `U - W Sᵀ` of the papers, whose `U` and `W` are the solutions for `diag(beta) V` and `diag(beta) diag(d) K`:
//! solved for the difference there is one system. The decays between two tokens are multiplied token by token, as the
//! recurrence multiplies its state: nothing is divided by a product that is nearly zero, a decay of 0 clears what came
//! before, and no sum of logarithms takes digits from the others. A token reads only what stands before it, also within
//! a register tile, so that what is not finite stays out of earlier tokens.
//!
//! A chunk has as many tokens as a vector has lanes, so that all matrices are of blocks of 16 by 16. A task has a head
//! of a sequence, and passes for each chunk over the rows of the state, 16 at a time: what a pass reads stays in the L1
//! cache. A result depends on the call and the instruction set alone.

use super::delta_rule::{Buffers, Tensor, for_each_head};
use super::prefetch::CacheLevel;
use super::register_tile::{multiply_add, multiply_add_columns};
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Level, Shape, Simd, Vector, WIDTH};
use ascend_spec::ops::delta_rule::{DeltaRuleProblem, Run};
use std::array::from_fn;

/// Tokens of a chunk: the products within it grow with its length, and the passes over the state with their number.
const CHUNK: usize = WIDTH;

/// Sixteen rows or columns of 16 elements.
type Block = [Vector; WIDTH];

/// The rows of the identity.
const UNIT: Block = {
    let mut unit = [[0.0; WIDTH]; WIDTH];
    let mut row = 0;
    while row < WIDTH {
        unit[row][row] = 1.0;
        row += 1;
    }
    unit
};

/// Computes the runs on the current rayon pool.
///
/// # Safety
///
/// As for [`delta_rule::run`](super::delta_rule::run).
pub(crate) unsafe fn run(problem: &DeltaRuleProblem, runs: (&[Run], bool), buffers: &Buffers<'_>) {
    let level = Level::chosen();
    for_each_head(problem, runs, buffers, |run, head| {
        let (pitch, groups) = (problem.key_dim.div_ceil(WIDTH), problem.value_dim.div_ceil(WIDTH));
        let counts = [pitch, pitch, groups, groups * pitch, 1, 1, 1];
        Scratch::with(|scratch| {
            let (mut rest, _) = scratch.vectors(counts.iter().sum::<usize>() * WIDTH).as_chunks_mut();
            let [keys, queries, values, state, correcting, reading, corrections] =
                counts.map(|count| take(&mut rest, count));
            let nothing = [0.0; WIDTH];
            let chunk = Chunk {
                tokens: 0,
                dim: problem.key_dim,
                keys,
                queries,
                correcting: &mut correcting[0],
                reading: &mut reading[0],
                beta: nothing,
                correcting_state: nothing,
                reading_state: nothing,
                kept: nothing,
                carried: 1.0,
            };
            let corrections = &mut corrections[0];
            level.run(Head { problem, buffers, run, head, state, values, corrections, chunk });
        });
    });
}

/// What the passes over the state read of a chunk.
struct Chunk<'a> {
    tokens: usize,
    /// Elements of a key.
    dim: usize,
    /// Keys and queries by columns: for each element those of the tokens. Zeros fill the last block.
    keys: &'a mut [Block],
    queries: &'a mut [Block],
    /// `-A` and `P`, by rows of tokens.
    correcting: &'a mut Block,
    reading: &'a mut Block,
    beta: Vector,
    /// `-diag(beta) d` and `scale d`, which multiply products with the state before the chunk.
    correcting_state: Vector,
    reading_state: Vector,
    /// The part of each token's correction that the chunk's last token leaves.
    kept: Vector,
    /// The part of the state before the chunk that its last token leaves.
    carried: f32,
}

/// A value head of a sequence.
struct Head<'a> {
    problem: &'a DeltaRuleProblem,
    buffers: &'a Buffers<'a>,
    run: Run,
    head: usize,
    /// The state: for each 16 of its rows, its columns.
    state: &'a mut [Block],
    /// For each 16 rows of the state the values of the chunk's tokens, and behind a pass their outputs.
    values: &'a mut [Block],
    /// The corrections of a pass: for each token those of 16 rows of the state.
    corrections: &'a mut Block,
    chunk: Chunk<'a>,
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match S::SHAPE {
            Shape::Wide => self.chunks::<S, 16>(simd),
            Shape::Six => self.chunks::<S, 4>(simd),
            Shape::Two => self.chunks::<S, 2>(simd),
        }
    }
}

impl Head<'_> {
    #[inline(always)]
    fn chunks<S: Simd, const ROWS: usize>(&mut self, simd: S) {
        let Self { problem, buffers, run, head, .. } = *self;
        let (dim, value_dim, pitch) = (problem.key_dim, problem.value_dim, self.chunk.keys.len());
        let rows_of = |group: usize| WIDTH.min(value_dim - group * WIDTH);
        for (group, state) in self.state.chunks_exact_mut(pitch).enumerate() {
            let place = |row| [run.start, head, group * WIDTH + row, 0];
            // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
            unsafe { read_rows(simd, &buffers.begin, place, [rows_of(group), dim], state) };
            transpose(simd, state);
        }
        for first in (0..run.tokens).step_by(CHUNK) {
            let token = run.first + first;
            self.chunk.tokens = CHUNK.min(run.tokens - first);
            self.gates(simd, token);
            self.widen(simd, token);
            self.chunk.multiply_keys::<S, ROWS>(simd);
            let next = token + CHUNK..(token + 2 * CHUNK).min(run.first + run.tokens);
            let groups = self.values.len();
            for group in 0..groups {
                self.prefetch(next.clone().skip(group).step_by(groups));
                self.pass::<S, ROWS>(simd, group);
            }
            if let Some(out) = &buffers.out {
                let place = |row| [token + row, head, 0, 0];
                // SAFETY: the promise of `run`, by which the tokens are some of the tensor, and their outputs this
                // task's alone.
                unsafe { write_rows(simd, out, place, [self.chunk.tokens, value_dim], self.values) };
            }
        }
        for (group, state) in self.state.chunks_exact_mut(pitch).enumerate() {
            let place = |row| [run.sequence, head, group * WIDTH + row, 0];
            transpose(simd, state);
            // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
            unsafe { write_rows(simd, &buffers.end, place, [rows_of(group), dim], state) };
        }
    }

    /// Takes beta and decays of the chunk that begins with a token: what the products with keys are multiplied with to
    /// become `-A` and `P`, and how much of the state and the corrections is left where.
    #[inline(always)]
    fn gates<S: Simd>(&mut self, simd: S, token: usize) {
        let Self { problem, buffers, head, ref mut chunk, .. } = *self;
        let mut decays = [1.0; CHUNK];
        for (t, decay) in decays[..chunk.tokens].iter_mut().enumerate() {
            let place = [token + t, head, 0, 0];
            // SAFETY: the promise of `run`, by which the token is one of the tensors.
            let (beta, g) = unsafe { (buffers.beta.read(place), buffers.g.map_or(0.0, |g| g.read(place))) };
            (chunk.beta[t], *decay) = (beta, g.exp());
        }
        let mut kept = simd.splat(0.0);
        chunk.carried = 1.0;
        for (t, decay) in decays[..chunk.tokens].iter().enumerate() {
            chunk.carried *= decay;
            chunk.correcting_state[t] = -chunk.beta[t] * chunk.carried;
            chunk.reading_state[t] = problem.scale * chunk.carried;
            kept = simd.mul_add(kept, simd.splat(*decay), simd.load(&UNIT[t]));
            simd.store(simd.multiply(kept, simd.splat(-chunk.beta[t])), &mut chunk.correcting[t]);
            simd.store(simd.multiply(kept, simd.splat(problem.scale)), &mut chunk.reading[t]);
        }
        simd.store(kept, &mut chunk.kept);
    }

    /// Widens keys, queries and values of the chunk that begins with a token, and transposes keys and queries.
    #[inline(always)]
    fn widen<S: Simd>(&mut self, simd: S, token: usize) {
        let Self { problem, buffers, head, ref mut chunk, ref mut values, .. } = *self;
        let (tokens, dim, key_head) = (chunk.tokens, chunk.dim, problem.key_head(head));
        // SAFETY: the promise of `run`, by which the tokens are some of the tensors.
        unsafe {
            let place = |row| [token + row, key_head, 0, 0];
            read_rows(simd, &buffers.key, place, [tokens, dim], chunk.keys);
            read_rows(simd, &buffers.query, place, [tokens, dim], chunk.queries);
            let place = |row| [token + row, head, 0, 0];
            read_rows(simd, &buffers.value, place, [tokens, problem.value_dim], values);
        }
        transpose(simd, chunk.keys);
        transpose(simd, chunk.queries);
    }

    /// Passes over 16 rows of the state: corrections and outputs of the tokens, a register tile of them at a time, and
    /// the next state.
    #[inline(always)]
    fn pass<S: Simd, const ROWS: usize>(&mut self, simd: S, group: usize) {
        let Self { chunk, corrections, values, .. } = self;
        let pitch = chunk.keys.len();
        let (state, values) = (&mut self.state[group * pitch..][..pitch], &mut values[group]);
        for first in tiles::<ROWS>(chunk.tokens) {
            chunk.solve_corrections::<S, ROWS>(simd, first, state, values, corrections);
            if self.buffers.out.is_some() {
                chunk.outputs::<S, ROWS>(simd, first, state, corrections, values);
            }
        }
        chunk.update_state::<S, ROWS>(simd, state, corrections);
    }

    /// Prefetches what is touched of tokens: each is in a page of its own.
    #[inline(always)]
    fn prefetch(&self, tokens: impl Iterator<Item = usize>) {
        let Self { problem, buffers, head, .. } = *self;
        let key_head = problem.key_head(head);
        for token in tokens {
            let rows = [
                (Some(&buffers.key), key_head, problem.key_dim),
                (Some(&buffers.query), key_head, problem.key_dim),
                (Some(&buffers.value), head, problem.value_dim),
                (buffers.out.as_ref(), head, problem.value_dim),
            ];
            for (tensor, head, count) in rows {
                if let Some(tensor) = tensor {
                    tensor.prefetch_row(CacheLevel::L2, [token, head, 0, 0], count);
                }
            }
        }
    }
}

impl Chunk<'_> {
    /// Multiplies keys and queries with keys, which makes of the gates `-A` and `P`.
    #[inline(always)]
    fn multiply_keys<S: Simd, const ROWS: usize>(&mut self, simd: S) {
        let keys = &self.keys.as_flattened()[..self.dim];
        let products = [(keys, &mut *self.correcting), (self.queries.as_flattened(), &mut *self.reading)];
        for (left, weights) in products {
            for first in tiles::<ROWS>(self.tokens) {
                let mut sums = [[simd.splat(0.0)]; ROWS];
                multiply_add_columns(simd, left, first, [keys], &mut sums);
                for (weights, [sum]) in weights[first..][..ROWS].iter_mut().zip(sums) {
                    simd.store(simd.multiply(simd.load(weights), sum), weights);
                }
            }
        }
    }

    /// Solves for the corrections of a tile of tokens by the corrections of the tokens before.
    #[inline(always)]
    fn solve_corrections<S: Simd, const ROWS: usize>(
        &self,
        simd: S,
        first: usize,
        state: &[Block],
        values: &Block,
        corrections: &mut Block,
    ) {
        let mut sums = [[simd.splat(0.0)]; ROWS];
        let state = &state.as_flattened()[..self.dim];
        multiply_add_columns(simd, self.keys.as_flattened(), first, [state], &mut sums);
        for r in 0..ROWS {
            let value = simd.multiply(simd.splat(self.beta[first + r]), simd.load(&values[first + r]));
            sums[r] = [simd.mul_add(simd.splat(self.correcting_state[first + r]), sums[r][0], value)];
        }
        multiply_add(simd, rows(self.correcting, first), [&corrections[..first]], &mut sums);
        // Written out for each token, since the compiler leaves the outer loop as it is, and its sums in memory.
        macro_rules! eliminate {
            ($($q:literal)*) => { $(if $q < ROWS {
                let [solved] = sums[$q];
                for r in $q + 1..ROWS {
                    let weight = simd.splat(self.correcting[first + r][first + $q]);
                    sums[r] = [simd.mul_add(weight, solved, sums[r][0])];
                }
            })* };
        }
        eliminate!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
        for r in 0..ROWS {
            simd.store(sums[r][0], &mut corrections[first + r]);
        }
    }

    /// The outputs of a tile of tokens.
    #[inline(always)]
    fn outputs<S: Simd, const ROWS: usize>(
        &self,
        simd: S,
        first: usize,
        state: &[Block],
        corrections: &Block,
        outs: &mut Block,
    ) {
        let mut sums = [[simd.splat(0.0)]; ROWS];
        let state = &state.as_flattened()[..self.dim];
        multiply_add_columns(simd, self.queries.as_flattened(), first, [state], &mut sums);
        for ([sum], part) in sums.iter_mut().zip(&self.reading_state[first..]) {
            *sum = simd.multiply(simd.splat(*part), *sum);
        }
        let weights: [&[f32]; ROWS] = rows(self.reading, first);
        multiply_add(simd, weights, [&corrections[..first]], &mut sums);
        for q in 0..ROWS {
            let correction = simd.load(&corrections[first + q]);
            for r in 0..ROWS {
                if r >= q {
                    let weight = simd.splat(weights[r][first + q]);
                    sums[r] = [simd.mul_add(weight, correction, sums[r][0])];
                }
            }
        }
        for r in 0..ROWS {
            simd.store(sums[r][0], &mut outs[first + r]);
        }
    }

    /// Lets the state decay and adds the corrections to it.
    #[inline(always)]
    fn update_state<S: Simd, const ROWS: usize>(&self, simd: S, state: &mut [Block], corrections: &mut Block) {
        for (correction, kept) in corrections[..self.tokens].iter_mut().zip(&self.kept) {
            simd.store(simd.multiply(simd.load(correction), simd.splat(*kept)), correction);
        }
        for (keys, state) in self.keys.iter().zip(state) {
            for first in (0..WIDTH).step_by(ROWS) {
                let mut sums = [[simd.splat(0.0)]; ROWS];
                for r in 0..ROWS {
                    sums[r] = [simd.multiply(simd.splat(self.carried), simd.load(&state[first + r]))];
                }
                multiply_add(simd, rows(keys, first), [&corrections[..self.tokens]], &mut sums);
                for r in 0..ROWS {
                    simd.store(sums[r][0], &mut state[first + r]);
                }
            }
        }
    }
}

/// The first tokens of the register tiles that have tokens.
#[inline(always)]
fn tiles<const ROWS: usize>(tokens: usize) -> impl Iterator<Item = usize> {
    (0..CHUNK).step_by(ROWS).take_while(move |first| *first < tokens)
}

/// Rows of a block, from one on, as a left factor.
#[inline(always)]
fn rows<const ROWS: usize>(block: &Block, first: usize) -> [&[f32]; ROWS] {
    from_fn(|r| block[first + r].as_slice())
}

/// Transposes each block.
#[inline(always)]
fn transpose<S: Simd>(simd: S, blocks: &mut [Block]) {
    for block in blocks {
        *block = simd.transpose(block);
    }
}

/// Reads rows of elements, as many as `[rows, count]`, from places: for each 16 elements a block of the rows.
///
/// # Safety
///
/// The tensor has the elements, live and written by no other thread.
#[inline(always)]
unsafe fn read_rows<S: Simd>(
    simd: S,
    from: &Tensor,
    place: impl Fn(usize) -> [usize; 4],
    [rows, count]: [usize; 2],
    blocks: &mut [Block],
) {
    debug_assert!(count <= blocks.len() * WIDTH, "{count} elements for {} blocks", blocks.len());
    for row in 0..rows {
        // SAFETY: the caller's promise.
        unsafe { from.read_row(simd, place(row), count, blocks.iter_mut().map(|block| &mut block[row])) };
    }
}

/// Writes rows of elements, as many as `[rows, count]`, to places.
///
/// # Safety
///
/// The tensor has the elements, live and accessed by no other thread.
#[inline(always)]
unsafe fn write_rows<S: Simd>(
    simd: S,
    to: &Tensor,
    place: impl Fn(usize) -> [usize; 4],
    [rows, count]: [usize; 2],
    blocks: &[Block],
) {
    debug_assert!(count <= blocks.len() * WIDTH, "{count} elements of {} blocks", blocks.len());
    for row in 0..rows {
        // SAFETY: the caller's promise.
        unsafe { to.write_row(simd, place(row), blocks.iter().map(|block| &block[row]), count) };
    }
}
