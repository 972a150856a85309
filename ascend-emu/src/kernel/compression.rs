//! Compressed tokens of native sparse attention: sums of the tokens of a block, each with its weight.
//!
//! Sums are in single precision, in the order of the tokens, and rounded once: a result depends on the call and the
//! instruction set alone.

use super::scratch::Scratch;
use super::simd::{Kernel, Level, Simd, WIDTH};
use super::tensor::input::InputTensor;
use super::tensor::output::OutputTensor;
use super::token_rows::TokenRows;
use ascend_spec::ops::sparse_sequences::TokenLayout;
use rayon::prelude::*;

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub input: TokenRows<'a>,
    pub weight: TokenRows<'a>,
    pub out: TokenRows<'a>,
    /// Whether the input is a paged cache.
    pub paged: bool,
}

/// Where the tokens of a block are: first axis and row of the input, of each of them; `None` where the cache does not
/// have its block, which counts as zeros.
pub(crate) type Find<'f> = &'f (dyn Fn(usize, usize) -> Option<(usize, usize)> + Sync);

/// Compresses blocks, on the current rayon pool. `targets` are the rows of the output that the blocks are written to,
/// and `find(block, token)` says where a token of a block is.
///
/// # Safety
///
/// The tensors are those of a checked call, and targets and what `find` returns rows of theirs. Their bytes are live,
/// those of the targets accessed by no other thread, and all others written by none.
pub(crate) unsafe fn run(buffers: &Buffers<'_>, targets: &[usize], find: Find<'_>) {
    let level = Level::chosen();
    let layout = if buffers.paged { TokenLayout::PaBsnd } else { TokenLayout::Tnd };
    let (rows, sizes) = buffers.out.rows(TokenLayout::Tnd);
    // SAFETY: the caller keeps this contract.
    let (input, weight, out) = unsafe {
        (
            buffers.input.input(layout),
            buffers.weight.input(TokenLayout::Tnd),
            OutputTensor::new(buffers.out.base, &rows, sizes, buffers.out.types(), None),
        )
    };
    let mut sorted = targets.to_vec();
    sorted.sort_unstable();
    // Of rows that share memory only one thread writes, in the order of the blocks.
    let apart = out.is_disjoint() && sorted.windows(2).all(|pair| pair[0] < pair[1]);
    let least = if apart { 1 } else { usize::MAX };
    targets.par_iter().enumerate().with_min_len(least).for_each(|(block, &target)| {
        Scratch::with(|scratch| {
            level.run(Compress {
                input: &input,
                weight: &weight,
                out: &out,
                target,
                find: &|token| find(block, token),
                scratch,
            });
        });
    });
}

/// Compresses one block.
struct Compress<'a> {
    input: &'a InputTensor,
    weight: &'a InputTensor,
    out: &'a OutputTensor,
    target: usize,
    find: &'a dyn Fn(usize) -> Option<(usize, usize)>,
    scratch: &'a mut Scratch,
}

impl Kernel for Compress<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Compress { input, weight, out, target, find, scratch } = self;
        let (sizes, ignored) = (input.sizes(), &mut simd.splat(0.0));
        let (tokens, heads) = (weight.sizes().rows, sizes.heads);
        let vectors = sizes.dim.div_ceil(WIDTH);
        let all = scratch.vectors((heads + 1) * vectors + heads.div_ceil(WIDTH));
        let (sums, rest) = all.split_at_mut(heads * vectors);
        let (row, weights) = rest.split_at_mut(vectors);
        sums.fill([0.0; WIDTH]);
        for token in 0..tokens {
            let Some((outer, place)) = find(token) else {
                continue;
            };
            weight.read(simd, (0, 0, token), 0..heads, weights, 1, ignored);
            for (head, sums) in sums.chunks_mut(vectors.max(1)).enumerate() {
                input.read(simd, (outer, head, place), 0..sizes.dim, row, 1, ignored);
                let factor = simd.splat(weights[head / WIDTH][head % WIDTH]);
                for (sum, row) in sums.iter_mut().zip(&*row) {
                    simd.store(simd.mul_add(simd.load(row), factor, simd.load(sum)), sum);
                }
            }
        }
        for (head, sums) in sums.chunks_mut(vectors.max(1)).enumerate() {
            out.write_row(simd, (0, head, target), sums, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::{DType, TensorDesc};
    use half::bf16;

    #[test]
    fn every_instruction_set_sums_weighted_tokens_and_threads_change_no_bit() {
        let (tokens, heads, dim, block, stride) = (200, 3, 48, 32, 16);
        let number = |at: usize| bf16::from_f32((at * 2_654_435_761 % 1009) as f32 / 504.0 - 1.0);
        let input: Vec<bf16> = (0..tokens * heads * dim).map(number).collect();
        let weight: Vec<bf16> = (0..block * heads).map(|at| number(at + 7)).collect();
        let count = (tokens - block) / stride + 1;
        let desc = |shape: [usize; 3], rank: usize| {
            let shape = shape.map(|size| size as i64);
            TensorDesc::contiguous(DType::Bf16, &shape[..rank]).unwrap()
        };
        let descs = [desc([tokens, heads, dim], 3), desc([block, heads, 0], 2), desc([count, heads, dim], 3)];
        let run = |level: Level, threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut out = vec![bf16::INFINITY; count * heads * dim];
                let rows = |at: usize, base: *const bf16| TokenRows { desc: &descs[at], base: base.cast_mut().cast() };
                let buffers = Buffers {
                    input: rows(0, input.as_ptr()),
                    weight: rows(1, weight.as_ptr()),
                    out: TokenRows { desc: &descs[2], base: out.as_mut_ptr().cast() },
                    paged: false,
                };
                let targets: Vec<usize> = (0..count).collect();
                let find = |block: usize, token: usize| (token != 5).then_some((0, block * stride + token));
                // SAFETY: the tensors are those of the descriptions, and live.
                level.with(|| unsafe { super::run(&buffers, &targets, &find) });
                out
            })
        };
        for level in Level::all() {
            let got = run(level, 1);
            assert_eq!(run(level, 4), got, "{}", level.name());
            for (at, got) in got.iter().enumerate() {
                let (row, head, column) = (at / (heads * dim), at / dim % heads, at % dim);
                let term = |token: usize| {
                    let token_at = (row * stride + token) * heads + head;
                    weight[token * heads + head].to_f64() * input[token_at * dim + column].to_f64()
                };
                // The token that is nowhere counts as zeros.
                let want: f64 = (0..block).filter(|&token| token != 5).map(term).sum();
                assert!((got.to_f64() - want).abs() <= 1e-2 + want.abs() / 256.0, "{got} is not {want}");
            }
        }
    }
}
