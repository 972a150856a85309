//! Both forms of the gated delta rule against the recurrence in double precision.

use super::calls::Random;
use super::data::levels;
use crate::kernel::delta_rule::{Buffers, Tensor};
use crate::kernel::simd::Level;
use crate::kernel::{delta_chunks, delta_rule};
use ascend_spec::ops::delta_rule::{DeltaRuleProblem, Run};
use ascend_spec::{DType, TensorDesc};
use half::bf16;
use proptest::prelude::*;

/// A form of the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Chunks,
    /// Token by token; the state behind each token is kept.
    Tokens,
}

/// What the logarithms of the decays are.
#[derive(Clone, Copy, Debug)]
enum Gates {
    None,
    /// Between minus this number and 0.
    Down(f32),
    /// Nearly 0, but for some tokens so far down that nothing is left: a large number, or infinity.
    Cleared,
}

/// What beta is: the same for all tokens, or between 0 and 1.
#[derive(Clone, Copy, Debug)]
enum Beta {
    Same(f32),
    Between,
}

/// A type that outputs and states are written in.
trait Written: Copy {
    const DTYPE: DType;
    fn of(number: f32) -> Self;
    fn number(self) -> f32;
}

impl Written for f32 {
    const DTYPE: DType = DType::Float;
    fn of(number: f32) -> Self {
        number
    }
    fn number(self) -> f32 {
        self
    }
}

impl Written for bf16 {
    const DTYPE: DType = DType::Bf16;
    fn of(number: f32) -> Self {
        bf16::from_f32(number)
    }
    fn number(self) -> f32 {
        self.to_f32()
    }
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Inputs of a call.
#[derive(Clone, Debug)]
struct Call {
    problem: DeltaRuleProblem,
    runs: Vec<Run>,
    /// Queries, keys, values, beta and initial states.
    halves: [Vec<bf16>; 5],
    g: Option<Vec<f32>>,
}

impl Call {
    /// Sequences of these lengths, for heads of keys and of values, and elements of a key and of a value.
    fn new(
        lengths: &[usize],
        [heads, ratio]: [usize; 2],
        dims: [usize; 2],
        gates: Gates,
        beta: Beta,
        seed: u64,
    ) -> Self {
        let ([key_dim, value_dim], value_heads) = (dims, heads * ratio);
        let tokens: usize = lengths.iter().sum();
        let mut random = Random(seed);
        let mut halves = |count: usize, most: f32| -> Vec<bf16> {
            (0..count).map(|_| bf16::from_f32((2.0 * random.unit() - 1.0) * most)).collect()
        };
        // Queries and keys are of length 1 at most, so that no correction is larger than what it corrects.
        let unit = (key_dim as f32).sqrt().recip();
        let [query, key] = [(); 2].map(|()| halves(tokens * heads * key_dim, unit));
        let value = halves(tokens * value_heads * value_dim, 1.0);
        let beta = halves(tokens * value_heads, 1.0).into_iter().map(|number| match beta {
            Beta::Same(beta) => bf16::from_f32(beta),
            Beta::Between => bf16::from_f32(number.to_f32().abs()),
        });
        let beta = beta.collect();
        let begin = halves(lengths.len() * value_heads * value_dim * key_dim, 1.0);
        let gate = |_| match gates {
            Gates::None => 0.0,
            Gates::Down(most) => -most * random.unit(),
            Gates::Cleared => [-1e4, f32::NEG_INFINITY].get(random.below(12)).copied().unwrap_or(-0.01 * random.unit()),
        };
        let g: Vec<f32> = (0..tokens * value_heads).map(gate).collect();
        let mut first = 0;
        let runs = lengths.iter().enumerate().filter(|(_, tokens)| **tokens > 0).map(|(sequence, &tokens)| {
            first += tokens;
            Run { sequence, first: first - tokens, tokens, start: sequence }
        });
        Call {
            problem: DeltaRuleProblem {
                sequences: lengths.len(),
                tokens,
                key_heads: heads,
                value_heads,
                key_dim,
                value_dim,
                scale: 0.5,
                slots: None,
                dense_state: false,
                loses_out: false,
                overruns: false,
            },
            runs: runs.collect(),
            halves: [query, key, value, beta, begin],
            g: (!matches!(gates, Gates::None)).then_some(g),
        }
    }

    fn states(&self, count: usize) -> [usize; 4] {
        [count, self.problem.value_heads, self.problem.value_dim, self.problem.key_dim]
    }

    /// Outputs, and the state behind each sequence, in single precision; what is not written is -9.
    fn compute(&self, form: Form, level: Level, threads: usize) -> [Vec<f32>; 2] {
        self.compute_as::<f32>(&pool(threads), form, level, true)
    }

    /// What [`compute`](Self::compute) gives, rounded to a type; without outputs these are all -9.
    fn compute_as<W: Written>(
        &self,
        pool: &rayon::ThreadPool,
        form: Form,
        level: Level,
        with_out: bool,
    ) -> [Vec<f32>; 2] {
        let DeltaRuleProblem { sequences, tokens, key_heads, value_heads, key_dim, value_dim, .. } = self.problem;
        let kept = if form == Form::Chunks { sequences } else { tokens };
        let state = value_heads * value_dim * key_dim;
        let nothing = W::of(-9.0);
        let (mut out, mut end) = (vec![nothing; tokens * value_heads * value_dim], vec![nothing; kept * state]);
        let tensor = |base: *const u8, dtype, shape: &[usize]| {
            let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            Tensor::new(base.cast_mut(), &TensorDesc::contiguous(dtype, &shape).unwrap())
        };
        let halves = |at: usize, shape: &[usize]| tensor(self.halves[at].as_ptr().cast(), DType::Bf16, shape);
        let slots: Vec<i64> = if form == Form::Chunks { Vec::new() } else { (0..tokens as i64).collect() };
        let buffers = Buffers {
            query: halves(0, &[tokens, key_heads, key_dim]),
            key: halves(1, &[tokens, key_heads, key_dim]),
            value: halves(2, &[tokens, value_heads, value_dim]),
            beta: halves(3, &[tokens, value_heads]),
            g: self.g.as_ref().map(|g| tensor(g.as_ptr().cast(), DType::Float, &[tokens, value_heads])),
            gk: None,
            begin: halves(4, &self.states(sequences)),
            end: tensor(end.as_mut_ptr().cast(), W::DTYPE, &self.states(kept)),
            out: with_out.then(|| tensor(out.as_mut_ptr().cast(), W::DTYPE, &[tokens, value_heads, value_dim])),
            slots: &slots,
        };
        // SAFETY: the tensors are those of the problem, and live.
        let run = || unsafe {
            match form {
                Form::Chunks => delta_chunks::run(&self.problem, (&self.runs, false), &buffers),
                Form::Tokens => delta_rule::run(&self.problem, (&self.runs, false), &buffers),
            }
        };
        pool.install(|| level.with(run));
        if form == Form::Tokens {
            let mut last = vec![nothing; sequences * state];
            for run in &self.runs {
                let from = &end[(run.first + run.tokens - 1) * state..][..state];
                last[run.sequence * state..][..state].copy_from_slice(from);
            }
            end = last;
        }
        [out, end].map(|numbers| numbers.into_iter().map(W::number).collect())
    }

    /// The definition, token by token; what is not written is -9.
    fn definition(&self) -> [Vec<f64>; 2] {
        let DeltaRuleProblem { sequences, tokens, key_heads, value_heads, key_dim, value_dim, scale, .. } =
            self.problem;
        let row = |at: usize, row: usize, dim: usize| -> Vec<f64> {
            self.halves[at][row * dim..][..dim].iter().map(|number| number.to_f64()).collect()
        };
        let mut out = vec![-9.0; tokens * value_heads * value_dim];
        let mut end = vec![-9.0; sequences * value_heads * value_dim * key_dim];
        for run in &self.runs {
            for head in 0..value_heads {
                let key_head = head / (value_heads / key_heads);
                let size = value_dim * key_dim;
                let mut state = row(4, run.sequence * value_heads + head, size);
                for token in run.first..run.first + run.tokens {
                    let (at, of_key) = (token * value_heads + head, token * key_heads + key_head);
                    let (query, key, value) = (row(0, of_key, key_dim), row(1, of_key, key_dim), row(2, at, value_dim));
                    let decay = self.g.as_ref().map_or(1.0, |g| f64::from(g[at]).exp());
                    let beta = self.halves[3][at].to_f64();
                    for (element, state) in state.chunks_exact_mut(key_dim).enumerate() {
                        state.iter_mut().for_each(|state| *state *= decay);
                        let dot =
                            |state: &[f64], with: &[f64]| -> f64 { state.iter().zip(with).map(|(a, b)| a * b).sum() };
                        let correction = beta * (value[element] - dot(state, &key));
                        state.iter_mut().zip(&key).for_each(|(state, key)| *state += correction * key);
                        out[at * value_dim + element] = f64::from(scale) * dot(state, &query);
                    }
                }
                end[(run.sequence * value_heads + head) * size..][..size].copy_from_slice(&state);
            }
        }
        [out, end]
    }
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![Just(0usize), 1usize..10, 14usize..19, 30usize..35, 60usize..70, 0usize..200];
    prop::collection::vec(length, 1..4).prop_filter("no tokens", |lengths| lengths.iter().sum::<usize>() > 0)
}

fn gates() -> impl Strategy<Value = Gates> {
    prop_oneof![
        Just(Gates::None),
        Just(Gates::Down(1e-3)),
        Just(Gates::Down(1.0)),
        Just(Gates::Down(60.0)),
        Just(Gates::Cleared)
    ]
}

fn beta() -> impl Strategy<Value = Beta> {
    prop_oneof![Just(Beta::Same(0.0)), Just(Beta::Same(1.0)), Just(Beta::Between)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// States are below 3, and each token rounds a few of their sums to 1 of 2^24 parts. A correction shrinks the error
    /// of the state along its key and keeps it elsewhere, so that 600 tokens add up errors, and multiply none: 600
    /// times 4 roundings of 3 * 2^-25 are 2e-4 if all have one sign, and 1e-5 if they have not.
    #[test]
    fn chunks_and_tokens_are_those_of_the_definition(
        lengths in lengths(),
        heads in [1usize..3, 1usize..4],
        dims in [1usize..40, 1usize..60],
        gates in gates(),
        beta in beta(),
        seed: u64,
    ) {
        let call = Call::new(&lengths, heads, dims, gates, beta, seed);
        let want = call.definition();
        for level in levels() {
            for form in [Form::Chunks, Form::Tokens] {
                let got = call.compute(form, level, 2);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    let allowed = 2e-5 + 2e-5 * want.abs();
                    let off = (f64::from(*got) - want).abs();
                    prop_assert!(off <= allowed, "{form:?}, {}: {got} is not {want}", level.name());
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Rows that are written in BF16 are those of single precision, rounded; a call without outputs has the states of
    /// one with them.
    #[test]
    fn the_type_that_is_written_and_outputs_change_no_state(
        lengths in lengths(),
        dims in [1usize..40, 1usize..60],
        seed: u64,
    ) {
        let call = Call::new(&lengths, [1, 2], dims, Gates::Down(1.0), Beta::Between, seed);
        for level in levels() {
            for form in [Form::Chunks, Form::Tokens] {
                let single = call.compute(form, level, 1);
                // Token by token the state is rounded where it is written, and read again.
                if form == Form::Chunks {
                    let round = |numbers: &Vec<f32>| numbers.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
                    let rounded: [Vec<f32>; 2] = single.each_ref().map(round);
                    let halves = call.compute_as::<bf16>(&pool(1), form, level, true);
                    prop_assert!(halves == rounded, "{form:?}, {}", level.name());
                }
                let [out, end] = call.compute_as::<f32>(&pool(1), form, level, false);
                prop_assert!(out.iter().all(|x| *x == -9.0) && end == single[1], "{form:?}, {}", level.name());
            }
        }
    }
}

/// The working memory of a thread has what calls before have left in it.
#[test]
fn what_a_thread_has_computed_before_changes_no_bit() {
    let mut spoiled = Call::new(&[64], [2, 2], [64, 64], Gates::None, Beta::Same(1.0), 5);
    for halves in &mut spoiled.halves {
        halves.iter_mut().step_by(7).for_each(|number| *number = bf16::NAN);
    }
    let call = Call::new(&[5, 21], [1, 2], [19, 37], Gates::Down(1.0), Beta::Between, 6);
    for level in levels() {
        for form in [Form::Chunks, Form::Tokens] {
            let used = pool(1);
            spoiled.compute_as::<f32>(&used, form, level, true);
            let got = call.compute_as::<f32>(&used, form, level, true);
            assert!(got == call.compute(form, level, 1), "{form:?}, {}", level.name());
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let call = Call::new(&[70, 0, 130], [2, 3], [40, 56], Gates::Down(1.0), Beta::Between, 3);
    for level in levels() {
        for form in [Form::Chunks, Form::Tokens] {
            let bits =
                |threads| call.compute(form, level, threads).map(|all| all.into_iter().map(f32::to_bits).collect());
            let [one, four]: [[Vec<u32>; 2]; 2] = [bits(1), bits(4)];
            assert!(one == four, "{form:?}, {}", level.name());
        }
    }
}

#[test]
fn earlier_tokens_do_not_see_what_is_not_finite() {
    const TOKEN: usize = 77;
    let call = Call::new(&[140], [1, 1], [24, 40], Gates::Down(0.1), Beta::Between, 4);
    // A key, which all elements of later outputs read, and an element of a value, which one of them does.
    for (at, element, number) in [(1, TOKEN * 24, bf16::INFINITY), (2, TOKEN * 40 + 5, bf16::NAN)] {
        let mut spoiled = call.clone();
        spoiled.halves[at][element] = number;
        for level in levels() {
            for form in [Form::Chunks, Form::Tokens] {
                let ([want, _], [got, _]) = (call.compute(form, level, 1), spoiled.compute(form, level, 1));
                assert_eq!(got[..TOKEN * 40], want[..TOKEN * 40], "{form:?}, {}", level.name());
                for (element, got) in got[(TOKEN + 1) * 40..].iter().enumerate() {
                    assert_eq!(got.is_finite(), at == 2 && element % 40 != 5, "{form:?}, {}: {got}", level.name());
                }
            }
        }
    }
}
