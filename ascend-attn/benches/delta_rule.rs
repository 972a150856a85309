//! The gated delta rule against what it is to be compared with, in one run: `cargo bench -p ascend-attn --bench
//! delta_rule`.
//!
//! | case | measured | compared with |
//! |---|---|---|
//! | prompt | 4096 tokens of 32 heads by RecurrentGatedDeltaRule, one and 8 a call | the same by ChunkGatedDeltaRule |
//! | decode | a token of each of 64 requests of 32 heads | a copy of their states |
//!
//! Heads have keys and values of 128 elements.

mod pairs;

use std::process::ExitCode;

use ascend_attention::chunk_delta_rule::{ChunkDeltaOutput, ChunkGatedDeltaRule};
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule;
use ascend_attention::{Result, Runtime, Stream, Tensor, bf16};
use pairs::{numbers, report, seconds};
use rayon::prelude::*;

const HEADS: usize = 32;
const DIM: usize = 128;
const TOKENS: usize = 4096;
/// Tokens of a call of RecurrentGatedDeltaRule, and what the case is called.
const STEPS: [(usize, &str); 2] = [(1, "prompt, token by token"), (8, "prompt, 8 tokens a call")];
const REQUESTS: usize = 64;

fn main() -> ExitCode {
    pairs::main(|pairs| {
        let stream = Runtime::emulated()?.device(0)?.stream()?;
        prompt(&stream, pairs)?;
        decode(&stream, pairs)
    })
}

/// Queries, keys, values, beta and decays of some tokens.
struct Tokens([Tensor<bf16>; 4], Tensor<f32>);

impl Tokens {
    fn new(stream: &Stream, tokens: usize) -> Result<Self> {
        let rows = |most: f32| numbers(stream, &[tokens, HEADS, DIM], |number| bf16::from_f32(number * most));
        let unit = (DIM as f32).sqrt().recip();
        let beta = numbers(stream, &[tokens, HEADS], |number| bf16::from_f32(number.abs()))?;
        let g = numbers(stream, &[tokens, HEADS], |number| -0.1 * number.abs())?;
        Ok(Tokens([rows(unit)?, rows(unit)?, rows(1.0)?, beta], g))
    }

    fn tensors(&self) -> DeltaTensors<'_, bf16> {
        let [query, key, value, beta] = &self.0;
        DeltaTensors::new((query, key, value), beta).g(&self.1)
    }

    fn narrow(&self, first: usize, count: usize) -> Result<Self> {
        let rows = first..first + count;
        let [query, key, value, beta] = self.0.each_ref().map(|tensor| tensor.narrow(0, rows.clone()));
        Ok(Tokens([query?, key?, value?, beta?], self.1.narrow(0, rows)?))
    }
}

fn prompt(stream: &Stream, pairs: usize) -> Result<()> {
    let whole = Tokens::new(stream, TOKENS)?;
    let states = || DeltaStates::zeroed::<bf16>(stream.device(), 1, HEADS, DIM, DIM);
    let (begin, end) = (states()?, states()?);
    // Outputs are written where they are, as steps of an engine do: new memory would be timed with either.
    let output = |tokens: usize| Tensor::empty(stream.device(), [tokens, HEADS, DIM]);
    let mut whole_output = ChunkDeltaOutput::new(output(TOKENS)?, &end);
    let inputs = (whole.tensors(), &begin);
    let plan = ChunkGatedDeltaRule::new(1.0).plan(&DeltaSequences::of_lengths(stream, &[TOKENS])?, inputs)?;
    for (tokens, name) in STEPS {
        let pool = DeltaStates::zeroed::<bf16>(stream.device(), tokens, HEADS, DIM, DIM)?;
        // Each call goes on from the state behind the last token of the call before.
        let slots: Vec<usize> = (0..tokens).collect();
        let sequences = DeltaSequences::of_slots(stream, &[slots])?.accepted(stream, &[tokens])?;
        let steps = (0..TOKENS).step_by(tokens).map(|first| whole.narrow(first, tokens));
        let steps: Vec<Tokens> = steps.collect::<Result<_>>()?;
        let of_step = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, (steps[0].tensors(), &pool))?;

        let mut step_output = output(tokens)?;
        let mut measured = Vec::new();
        for _ in 0..=pairs {
            let recurrence = || {
                let mut steps = steps.iter();
                steps.try_for_each(|step| of_step.launch_into(stream, (step.tensors(), &pool), &mut step_output))
            };
            measured.push([
                1e3 * seconds(stream, recurrence)?,
                1e3 * seconds(stream, || plan.launch_into(stream, inputs, &mut whole_output))?,
            ]);
        }
        // The first pair touches all memory.
        report(name, ["ms of the recurrence", "ms in chunks"], &measured[1..]);
    }
    Ok(())
}

fn decode(stream: &Stream, pairs: usize) -> Result<()> {
    let tokens = Tokens::new(stream, REQUESTS)?;
    let pool = DeltaStates::zeroed::<bf16>(stream.device(), REQUESTS, HEADS, DIM, DIM)?;
    let slots: Vec<[usize; 1]> = (0..REQUESTS).map(|slot| [slot]).collect();
    let sequences = DeltaSequences::of_slots(stream, &slots)?;
    let inputs = (tokens.tensors(), &pool);
    let plan = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, inputs)?;

    let from = vec![bf16::ONE; REQUESTS * HEADS * DIM * DIM];
    let mut to = from.clone();
    let mut measured = Vec::new();
    for _ in 0..=pairs {
        measured.push([
            1e3 * seconds(stream, || plan.launch(stream, inputs).map(drop))?,
            1e3 * seconds(stream, || -> Result<()> {
                let states = to.par_chunks_mut(DIM * DIM).zip(from.par_chunks(DIM * DIM));
                states.for_each(|(to, from)| to.copy_from_slice(from));
                Ok(())
            })?,
        ]);
    }
    report("decode", ["ms of a step", "ms to copy the states"], &measured[1..]);
    Ok(())
}
