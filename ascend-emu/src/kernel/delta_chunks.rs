//! The gated delta rule in chunks of tokens (Yang, Kautz and Hatamizadeh 2024; Yang, Wang, Zhang, Shen and Kim
//! 2024), as the operator ChunkGatedDeltaRule computes it, in single precision.
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
//! A task has a head of a sequence, and passes for each chunk over the rows of the state, a few vectors of 16 at a
//! time. A result depends on the call and the instruction set alone.

use super::delta_rule::{Buffers, Tensor, for_each_head};
use super::prefetch::CacheLevel;
use super::register_tile::multiply_add;
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Level, Shape, Simd, Vector, WIDTH};
use ascend_spec::ops::delta_rule::{DeltaRuleProblem, Run};
use std::array::from_fn;
use std::ops::Range;

/// Tokens of a chunk: the products within it grow with its length, and the passes over the state with their number.
const CHUNK: usize = 32;

/// Vectors of a row of products with the keys of a chunk.
const GROUPS: usize = CHUNK / WIDTH;

/// Most vectors of state rows that a pass takes.
const PANEL: usize = 2;

/// Computes the runs on the current rayon pool.
///
/// # Safety
///
/// As for [`delta_rule::run`](super::delta_rule::run).
pub(crate) unsafe fn run(problem: &DeltaRuleProblem, runs: (&[Run], bool), buffers: &Buffers<'_>) {
    // SAFETY: the caller keeps this contract.
    unsafe { run_under(Level::chosen(), problem, runs, buffers) }
}

/// Computes with one instruction set.
///
/// # Safety
///
/// As for [`run`].
pub(super) unsafe fn run_under(level: Level, problem: &DeltaRuleProblem, runs: (&[Run], bool), buffers: &Buffers<'_>) {
    for_each_head(problem, runs, buffers, |run, head| {
        let (dim, groups) = (problem.key_dim, problem.value_dim.div_ceil(WIDTH));
        let pitch = dim.div_ceil(WIDTH);
        let counts = [CHUNK * pitch, CHUNK * pitch, GROUPS * dim, GROUPS * dim, CHUNK * GROUPS, CHUNK * GROUPS];
        Scratch::with(|scratch| {
            let mut rest = scratch.vectors(counts.iter().sum::<usize>() + (groups * dim) + PANEL * CHUNK);
            let [keys, queries, across, along, correcting, reading] = counts.map(|count| take(&mut rest, count));
            let state = take(&mut rest, groups * dim);
            let chunk = Chunk {
                tokens: 0,
                dim,
                keys,
                queries,
                across,
                along,
                correcting,
                reading,
                beta: [0.0; CHUNK],
                carried: [0.0; CHUNK],
                kept: [[0.0; WIDTH]; GROUPS],
            };
            level.run(Head { problem, buffers, run, head, state, corrections: rest, chunk });
        });
    });
}

/// What the passes over the state read of a chunk.
struct Chunk<'a> {
    tokens: usize,
    /// Elements of a key.
    dim: usize,
    /// Keys and scaled queries, by rows of whole vectors.
    keys: &'a mut [Vector],
    queries: &'a mut [Vector],
    /// Keys by columns: for each 16 tokens a vector for each element, as a right factor.
    across: &'a mut [Vector],
    /// Keys by columns: for each element its vectors of tokens, as a left factor.
    along: &'a mut [Vector],
    /// `-A`, by rows of tokens.
    correcting: &'a mut [Vector],
    /// `P`, by rows of tokens.
    reading: &'a mut [Vector],
    beta: [f32; CHUNK],
    /// The part of the state before the chunk that each token finds.
    carried: [f32; CHUNK],
    /// The part of each token's correction that the chunk's last token leaves.
    kept: [Vector; GROUPS],
}

/// A value head of a sequence.
struct Head<'a> {
    problem: &'a DeltaRuleProblem,
    buffers: &'a Buffers<'a>,
    run: Run,
    head: usize,
    /// The state: for each 16 of its rows, its columns.
    state: &'a mut [Vector],
    /// The corrections of a pass: for each 16 rows of the state those of the chunk's tokens.
    corrections: &'a mut [Vector],
    chunk: Chunk<'a>,
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match S::SHAPE {
            Shape::Wide => self.chunks::<S, 8, PANEL>(simd),
            Shape::Six => self.chunks::<S, 4, 1>(simd),
            Shape::Two => self.chunks::<S, 2, 1>(simd),
        }
    }
}

impl Head<'_> {
    #[inline(always)]
    fn chunks<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S) {
        let Self { problem, buffers, run, head, .. } = *self;
        let (dim, value_dim) = (problem.key_dim, problem.value_dim);
        for (group, state) in self.state.chunks_exact_mut(dim).enumerate() {
            // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
            unsafe { load(simd, &buffers.begin, [run.start, head, group * WIDTH], value_dim, state) };
        }
        for first in (0..run.tokens).step_by(CHUNK) {
            self.chunk.tokens = CHUNK.min(run.tokens - first);
            self.widen(simd, run.first + first);
            self.chunk.multiply_keys::<S, ROWS, COLUMNS>(simd);
            self.decay(simd, run.first + first);
            let mut group = 0;
            while group + COLUMNS <= self.state.len() / dim {
                self.pass::<S, ROWS, COLUMNS>(simd, run.first + first, group);
                group += COLUMNS;
            }
            for group in group..self.state.len() / dim {
                self.pass::<S, ROWS, 1>(simd, run.first + first, group);
            }
        }
        for (group, state) in self.state.chunks_exact(dim).enumerate() {
            // SAFETY: the promise of `run`, by which the state is one of the tensor, and this task's alone.
            unsafe { store(simd, &buffers.end, [run.sequence, head, group * WIDTH], value_dim, state) };
        }
    }

    /// Widens the keys and queries of the chunk that begins with a token, and transposes the keys.
    #[inline(always)]
    fn widen<S: Simd>(&mut self, simd: S, token: usize) {
        let Self { problem, buffers, ref mut chunk, .. } = *self;
        let (dim, key_head) = (chunk.dim, problem.key_head(self.head));
        let pitch = chunk.pitch();
        let scale = simd.splat(problem.scale);
        let rows = chunk.keys.chunks_exact_mut(pitch).zip(chunk.queries.chunks_exact_mut(pitch));
        for (token, (keys, queries)) in (token..token + chunk.tokens).zip(rows) {
            // SAFETY: the promise of `run`, by which the token is one of the tensors.
            unsafe {
                buffers.key.read_row(simd, [token, key_head, 0, 0], dim, keys);
                buffers.query.read_row(simd, [token, key_head, 0, 0], dim, queries);
            }
            for query in queries {
                simd.store(simd.multiply(simd.load(query), scale), query);
            }
        }
        for group in 0..chunk.tokens.div_ceil(WIDTH) {
            for block in 0..pitch {
                let mut turned = [[0.0; WIDTH]; WIDTH];
                for (row, turned) in turned.iter_mut().enumerate() {
                    *turned = chunk.keys[(group * WIDTH + row) * pitch + block];
                }
                let turned = simd.transpose(&turned);
                for (element, column) in (block * WIDTH..dim).zip(&turned) {
                    chunk.across[group * dim + element] = *column;
                    chunk.along[element * GROUPS + group] = *column;
                }
            }
        }
    }

    /// Makes of the products with keys `-A` and `P`.
    #[inline(always)]
    fn decay<S: Simd>(&mut self, simd: S, token: usize) {
        let Self { buffers, head, ref mut chunk, .. } = *self;
        let mut kept = [[0.0; WIDTH]; GROUPS];
        let mut carried = 1.0;
        for t in 0..chunk.tokens {
            let place = [token + t, head, 0, 0];
            // SAFETY: the promise of `run`, by which the token is one of the tensors.
            let (beta, g) = unsafe { (buffers.beta.read(place), buffers.g.map_or(0.0, |g| g.read(place))) };
            let decay = g.exp();
            carried *= decay;
            (chunk.beta[t], chunk.carried[t]) = (beta, carried);
            let seen = t / WIDTH;
            for kept in &mut kept[..=seen] {
                simd.store(simd.multiply(simd.load(kept), simd.splat(decay)), kept);
            }
            kept[seen][t % WIDTH] = 1.0;
            for (group, kept) in kept[..=seen].iter().enumerate() {
                let (kept, at) = (simd.load(kept), t * GROUPS + group);
                let (correcting, reading) = (&mut chunk.correcting[at], &mut chunk.reading[at]);
                let corrected = simd.multiply(simd.splat(-beta), kept);
                simd.store(simd.multiply(corrected, simd.load(correcting)), correcting);
                simd.store(simd.multiply(kept, simd.load(reading)), reading);
            }
        }
        chunk.kept = kept;
    }

    /// Passes over some vectors of the state's rows: corrections and outputs of the tokens, a register tile of them at
    /// a time, and the next state.
    #[inline(always)]
    fn pass<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S, token: usize, group: usize) {
        let dim = self.chunk.dim;
        let value_dim = self.problem.value_dim;
        let elements = (COLUMNS * WIDTH).min(value_dim - group * WIDTH);
        for t in 0..self.chunk.tokens {
            let mut values = [[0.0; WIDTH]; COLUMNS];
            // SAFETY: the promise of `run`, by which the token is one of the tensors.
            unsafe {
                self.buffers.value.read_row(simd, [token + t, self.head, group * WIDTH, 0], elements, &mut values)
            };
            for (c, value) in values.into_iter().enumerate() {
                self.corrections[c * CHUNK + t] = value;
            }
        }
        for first in (0..self.chunk.tokens).step_by(ROWS) {
            if group == 0 {
                self.prefetch(token + CHUNK + first..token + CHUNK + first + ROWS);
            }
            let state = &mut self.state[group * dim..][..COLUMNS * dim];
            self.chunk.correct::<S, ROWS, COLUMNS>(simd, first, state, self.corrections);
            let Some(out) = &self.buffers.out else { continue };
            let outs = self.chunk.read::<S, ROWS, COLUMNS>(simd, first, state, self.corrections);
            for (t, row) in (first..self.chunk.tokens).zip(&outs) {
                // SAFETY: the promise of `run`, by which the token is one of the tensors, and its output this task's
                // alone.
                unsafe { out.write_row(simd, [token + t, self.head, group * WIDTH, 0], row, elements) };
            }
        }
        let state = &mut self.state[group * dim..][..COLUMNS * dim];
        self.chunk.remember::<S, ROWS, COLUMNS>(simd, state, self.corrections);
    }

    /// Prefetches what is read of tokens of the next chunk: each is in a page of its own.
    #[inline(always)]
    fn prefetch(&self, tokens: Range<usize>) {
        let Self { problem, buffers, run, head, .. } = *self;
        let key_head = problem.key_head(head);
        for token in tokens.start..tokens.end.min(run.first + run.tokens) {
            let reads = [
                (&buffers.key, key_head, problem.key_dim),
                (&buffers.query, key_head, problem.key_dim),
                (&buffers.value, head, problem.value_dim),
            ];
            for (tensor, head, count) in reads {
                tensor.prefetch_row(CacheLevel::L2, [token, head, 0, 0], count);
            }
        }
    }
}

impl Chunk<'_> {
    /// Vectors of a key.
    #[inline(always)]
    fn pitch(&self) -> usize {
        self.dim.div_ceil(WIDTH)
    }

    /// Multiplies keys and queries with the keys that are not behind them.
    #[inline(always)]
    fn multiply_keys<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S) {
        for first in (0..self.tokens).step_by(ROWS) {
            let groups = (first + ROWS).div_ceil(WIDTH);
            let mut group = 0;
            while group + COLUMNS <= groups {
                self.multiply_tile::<S, ROWS, COLUMNS>(simd, first, group);
                group += COLUMNS;
            }
            for group in group..groups {
                self.multiply_tile::<S, ROWS, 1>(simd, first, group);
            }
        }
    }

    #[inline(always)]
    fn multiply_tile<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S, first: usize, group: usize) {
        let (dim, pitch) = (self.dim, self.pitch());
        let right = columns::<COLUMNS>(&self.across[group * dim..], dim, dim);
        for (left, products) in [(&self.keys, &mut self.correcting), (&self.queries, &mut self.reading)] {
            let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
            multiply_add(simd, rows(left, pitch, first, dim), right, &mut sums);
            for r in 0..ROWS {
                for c in 0..COLUMNS {
                    simd.store(sums[r][c], &mut products[(first + r) * GROUPS + group + c]);
                }
            }
        }
    }

    /// Solves for the corrections of a tile of tokens, where `corrections` has their values, and the corrections of the
    /// tokens before.
    #[inline(always)]
    fn correct<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &self,
        simd: S,
        first: usize,
        state: &[Vector],
        corrections: &mut [Vector],
    ) {
        let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
        multiply_add(
            simd,
            rows(self.keys, self.pitch(), first, self.dim),
            columns::<COLUMNS>(state, self.dim, self.dim),
            &mut sums,
        );
        for r in 0..ROWS {
            let (beta, carried) = (simd.splat(self.beta[first + r]), simd.splat(self.carried[first + r]));
            for c in 0..COLUMNS {
                let value = simd.load(&corrections[c * CHUNK + first + r]);
                sums[r][c] = simd.multiply(beta, simd.subtract(value, simd.multiply(carried, sums[r][c])));
            }
        }
        let before = columns::<COLUMNS>(corrections, CHUNK, first);
        let weights: [&[f32]; ROWS] = rows(self.correcting, GROUPS, first, first + ROWS);
        multiply_add(simd, weights, before, &mut sums);
        for r in 1..ROWS {
            for q in 0..r {
                let weight = simd.splat(weights[r][first + q]);
                let solved = sums[q];
                for (sum, solved) in sums[r].iter_mut().zip(solved) {
                    *sum = simd.mul_add(weight, solved, *sum);
                }
            }
        }
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                simd.store(sums[r][c], &mut corrections[c * CHUNK + first + r]);
            }
        }
    }

    /// The outputs of a tile of tokens.
    #[inline(always)]
    fn read<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &self,
        simd: S,
        first: usize,
        state: &[Vector],
        corrections: &[Vector],
    ) -> [[Vector; COLUMNS]; ROWS] {
        let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
        let state = columns::<COLUMNS>(state, self.dim, self.dim);
        multiply_add(simd, rows(self.queries, self.pitch(), first, self.dim), state, &mut sums);
        for (sums, carried) in sums.iter_mut().zip(&self.carried[first..]) {
            let carried = simd.splat(*carried);
            for sum in sums {
                *sum = simd.multiply(carried, *sum);
            }
        }
        let weights: [&[f32]; ROWS] = rows(self.reading, GROUPS, first, first + ROWS);
        multiply_add(simd, weights, columns::<COLUMNS>(corrections, CHUNK, first), &mut sums);
        for r in 0..ROWS {
            for q in 0..=r {
                let weight = simd.splat(weights[r][first + q]);
                for c in 0..COLUMNS {
                    let correction = simd.load(&corrections[c * CHUNK + first + q]);
                    sums[r][c] = simd.mul_add(weight, correction, sums[r][c]);
                }
            }
        }
        let mut outs = [[[0.0; WIDTH]; COLUMNS]; ROWS];
        for (out, sum) in outs.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            simd.store(*sum, out);
        }
        outs
    }

    /// Lets the state decay and adds the corrections to it.
    #[inline(always)]
    fn remember<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &self,
        simd: S,
        state: &mut [Vector],
        corrections: &mut [Vector],
    ) {
        for (t, kept) in self.kept.as_flattened()[..self.tokens].iter().enumerate() {
            for c in 0..COLUMNS {
                let correction = &mut corrections[c * CHUNK + t];
                simd.store(simd.multiply(simd.load(correction), simd.splat(*kept)), correction);
            }
        }
        let right = columns::<COLUMNS>(corrections, CHUNK, self.tokens);
        let mut first = 0;
        while first + ROWS <= self.dim {
            self.remember_tile::<S, ROWS, COLUMNS>(simd, first, state, right);
            first += ROWS;
        }
        for first in first..self.dim {
            self.remember_tile::<S, 1, COLUMNS>(simd, first, state, right);
        }
    }

    #[inline(always)]
    fn remember_tile<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &self,
        simd: S,
        first: usize,
        state: &mut [Vector],
        right: [&[Vector]; COLUMNS],
    ) {
        let carried = simd.splat(self.carried[self.tokens - 1]);
        let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                sums[r][c] = simd.multiply(carried, simd.load(&state[c * self.dim + first + r]));
            }
        }
        multiply_add(simd, rows(self.along, GROUPS, first, self.tokens), right, &mut sums);
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                simd.store(sums[r][c], &mut state[c * self.dim + first + r]);
            }
        }
    }
}

/// Loads 16 rows of a state, from a row on, as columns.
///
/// # Safety
///
/// The tensor has the state, live and written by no other thread.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, from: &Tensor, [slot, head, row]: [usize; 3], rows: usize, state: &mut [Vector]) {
    let dim = state.len();
    for (block, columns) in state.chunks_mut(WIDTH).enumerate() {
        let mut turned = [[0.0; WIDTH]; WIDTH];
        for (lanes, row) in turned.chunks_mut(1).zip(row..rows) {
            // SAFETY: the caller's promise.
            unsafe { from.read_row(simd, [slot, head, row, block * WIDTH], WIDTH.min(dim - block * WIDTH), lanes) };
        }
        let turned = simd.transpose(&turned);
        columns.copy_from_slice(&turned[..columns.len()]);
    }
}

/// Stores 16 rows of a state, from a row on, whose values are in columns.
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
        for (lanes, row) in turned.chunks(1).zip(row..rows) {
            // SAFETY: the caller's promise.
            unsafe { to.write_row(simd, [slot, head, row, block * WIDTH], lanes, columns.len()) };
        }
    }
}

/// Rows of a left factor, each of `pitch` vectors, from a row on and up to a length.
#[inline(always)]
fn rows<const ROWS: usize>(vectors: &[Vector], pitch: usize, first: usize, inner: usize) -> [&[f32]; ROWS] {
    let all = vectors.as_flattened();
    from_fn(|r| &all[(first + r) * pitch * WIDTH..][..inner])
}

/// Vectors of columns of a right factor, `pitch` apart, up to a length.
#[inline(always)]
fn columns<const COLUMNS: usize>(vectors: &[Vector], pitch: usize, inner: usize) -> [&[Vector]; COLUMNS] {
    from_fn(|c| &vectors[c * pitch..][..inner])
}
