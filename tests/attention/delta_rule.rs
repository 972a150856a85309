//! The gated delta rule: random calls against the definition in double precision, prompts and the decodes behind them,
//! refusals.

use ascend_attention::chunk_delta_rule::ChunkGatedDeltaRule;
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Error, Stream, Tensor, bf16, rules};
use proptest::prelude::*;

use crate::harness;
use harness::numbers;

/// Heads of keys and of values, and elements of a key and of a value.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (1usize..4, 1usize..4, 1usize..40, 1usize..40).prop_map(|(key_heads, ratio, key_dim, value_dim)| Sizes {
        key_heads,
        value_heads: key_heads * ratio,
        key_dim,
        value_dim,
    })
}

/// The tensors of some tokens, on the host as the device has them, and on the device.
struct Tokens {
    sizes: Sizes,
    /// Queries, keys, values and beta.
    halves: [Vec<bf16>; 4],
    /// Logarithms of the decay of heads and of columns.
    decays: [Option<Vec<f32>>; 2],
    on_device: [Tensor<bf16>; 4],
    decays_on_device: [Option<Tensor<f32>>; 2],
}

impl Tokens {
    fn new(stream: &Stream, sizes: Sizes, tokens: usize, decays: [bool; 2], seed: u64) -> Self {
        let Sizes { key_heads, value_heads, key_dim, value_dim } = sizes;
        let halves = |seed: u64, count: usize, scale: f32| -> Vec<bf16> {
            numbers(seed, count).into_iter().map(|number| bf16::from_f32(number * scale)).collect()
        };
        // Keys of about unit length, and beta between 0 and 1.
        let unit = (key_dim as f32).sqrt().recip();
        let beta: Vec<bf16> = halves(seed + 3, tokens * value_heads, 1.0)
            .into_iter()
            .map(|number| bf16::from_f32(number.to_f32().abs().min(1.0)))
            .collect();
        let own = [
            halves(seed, tokens * key_heads * key_dim, unit),
            halves(seed + 1, tokens * key_heads * key_dim, unit),
            halves(seed + 2, tokens * value_heads * value_dim, 1.0),
            beta,
        ];
        let shapes = [
            vec![tokens, key_heads, key_dim],
            vec![tokens, key_heads, key_dim],
            vec![tokens, value_heads, value_dim],
            vec![tokens, value_heads],
        ];
        let counts = [tokens * value_heads, tokens * value_heads * key_dim];
        let logarithms = [0, 1].map(|which| {
            let all = numbers(seed + 4 + which as u64, counts[which]);
            decays[which].then(|| all.into_iter().map(|number| -number.abs()).collect::<Vec<f32>>())
        });
        let decay_shapes = [vec![tokens, value_heads], vec![tokens, value_heads, key_dim]];
        Tokens {
            sizes,
            on_device: [0, 1, 2, 3].map(|at| stream.upload(&own[at], &shapes[at]).unwrap()),
            decays_on_device: [0, 1]
                .map(|at| logarithms[at].as_ref().map(|all| stream.upload(all, &decay_shapes[at]).unwrap())),
            halves: own,
            decays: logarithms,
        }
    }

    fn tensors(&self) -> DeltaTensors<'_, bf16> {
        let [query, key, value, beta] = &self.on_device;
        let tensors = DeltaTensors::new((query, key, value), beta);
        let tensors = self.decays_on_device[0].as_ref().map_or(tensors, |g| tensors.g(g));
        self.decays_on_device[1].as_ref().map_or(tensors, |gk| tensors.gk(gk))
    }

    /// What a token makes of the states of all heads, and its outputs, in double precision.
    fn step(&self, token: usize, scale: f64, states: &mut [f64]) -> Vec<f64> {
        let Sizes { key_heads, value_heads, key_dim, value_dim } = self.sizes;
        let mut out = Vec::new();
        for head in 0..value_heads {
            let key_head = head / (value_heads / key_heads);
            let of_head = |which: usize, heads: usize, head: usize, dim: usize| -> Vec<f64> {
                let start = (token * heads + head) * dim;
                self.halves[which][start..start + dim].iter().map(|number| number.to_f64()).collect()
            };
            let query = of_head(0, key_heads, key_head, key_dim);
            let key = of_head(1, key_heads, key_head, key_dim);
            let value = of_head(2, value_heads, head, value_dim);
            let beta = self.halves[3][token * value_heads + head].to_f64();
            let g = self.decays[0].as_ref().map_or(0.0, |g| f64::from(g[token * value_heads + head]));
            for (row, value) in value.iter().enumerate() {
                let state = &mut states[(head * value_dim + row) * key_dim..][..key_dim];
                for (column, state) in state.iter_mut().enumerate() {
                    let at = (token * value_heads + head) * key_dim + column;
                    let gk = self.decays[1].as_ref().map_or(0.0, |gk| f64::from(gk[at]));
                    *state *= (g + gk).exp();
                }
                let remembered: f64 = state.iter().zip(&key).map(|(state, key)| state * key).sum();
                let correction = beta * (value - remembered);
                state.iter_mut().zip(&key).for_each(|(state, key)| *state += correction * key);
                out.push(scale * state.iter().zip(&query).map(|(state, query)| state * query).sum::<f64>());
            }
        }
        out
    }
}

fn close(got: &[bf16], want: &[f64], what: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = 0.0041 * want.abs() + 2e-5;
        prop_assert!((got.to_f64() - want).abs() <= allowed, "{what} {at}: {got} is not {want}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn decodes_and_drafts_are_those_of_the_definition(
        sizes in sizes(),
        lengths in prop::collection::vec(0usize..9, 1..4),
        decays: [bool; 2],
        accepts: bool,
        seed in 0u64..1 << 40,
    ) {
        let Some(stream) = harness::stream_of(Cann::V9_1) else { return Ok(()) };
        let tokens: usize = lengths.iter().sum();
        prop_assume!(tokens > 0);
        let given = Tokens::new(&stream, sizes, tokens, decays, seed);
        let slots = tokens + 2;
        let state = sizes.value_heads * sizes.value_dim * sizes.key_dim;
        let pool: Vec<bf16> = numbers(seed + 9, slots * state).into_iter().map(bf16::from_f32).collect();
        let shape = [slots, sizes.value_heads, sizes.value_dim, sizes.key_dim];
        let states = DeltaStates::with_key_columns(&stream.upload(&pool, shape).unwrap());
        // Slots from the last one on, so that none is that of its token.
        let mut free = (0..slots).rev();
        let rows: Vec<Vec<usize>> = lengths.iter().map(|&length| free.by_ref().take(length).collect()).collect();
        let accepted: Vec<usize> = lengths.iter().map(|&length| 1 + (seed as usize) % length.max(1)).collect();
        let mut sequences = DeltaSequences::of_slots(&stream, &rows).unwrap();
        if accepts {
            sequences = sequences.accepted(&stream, &accepted).unwrap();
        }
        let scale = 0.5;
        let inputs = (given.tensors(), &states);
        let plan = RecurrentGatedDeltaRule::new(scale).plan(&sequences, inputs).unwrap();
        let out = plan.launch(&stream, inputs).unwrap().download(&stream).unwrap();
        let after = states.tensor().clone().typed::<bf16>().unwrap().download(&stream).unwrap();
        let (mut token, mut kept) = (0, vec![true; slots]);
        for (row, accepted) in rows.iter().zip(&accepted).filter(|(row, _)| !row.is_empty()) {
            let start = row[if accepts { accepted - 1 } else { 0 }];
            let mut own: Vec<f64> = pool[start * state..][..state].iter().map(|number| number.to_f64()).collect();
            for &slot in row {
                let want = given.step(token, scale, &mut own);
                close(&out[token * want.len()..][..want.len()], &want, "output")?;
                close(&after[slot * state..][..state], &own, "state")?;
                kept[slot] = false;
                token += 1;
            }
        }
        for (slot, _) in kept.iter().enumerate().filter(|(_, kept)| **kept) {
            prop_assert_eq!(&after[slot * state..][..state], &pool[slot * state..][..state]);
        }
    }

    #[test]
    fn prompts_are_those_of_the_definition(
        sizes in sizes(),
        lengths in prop::collection::vec(0usize..150, 1..4),
        decays: bool,
        seed in 0u64..1 << 40,
    ) {
        let Some(stream) = harness::stream_of(Cann::V9_1) else { return Ok(()) };
        let tokens: usize = lengths.iter().sum();
        prop_assume!(tokens > 0);
        let given = Tokens::new(&stream, sizes, tokens, [decays, false], seed);
        let state = sizes.value_heads * sizes.value_dim * sizes.key_dim;
        let begin: Vec<bf16> = numbers(seed + 9, lengths.len() * state).into_iter().map(bf16::from_f32).collect();
        let shape = [lengths.len(), sizes.value_heads, sizes.value_dim, sizes.key_dim];
        let states = DeltaStates::with_key_columns(&stream.upload(&begin, shape).unwrap());
        let sequences = DeltaSequences::of_lengths(&stream, &lengths).unwrap();
        let inputs = (given.tensors(), &states);
        let rule = ChunkGatedDeltaRule::new(1.0).allow_lint("chunk_delta.no_tokens");
        let plan = rule.plan(&sequences, inputs).unwrap();
        let computed = plan.launch(&stream, inputs).unwrap();
        let out = computed.out.download(&stream).unwrap();
        let ends: Vec<bf16> = computed.final_state.typed().unwrap().download(&stream).unwrap();
        let mut token = 0;
        for (sequence, &length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let own = &begin[sequence * state..][..state];
            let mut own: Vec<f64> = own.iter().map(|number| number.to_f64()).collect();
            for _ in 0..length {
                let want = given.step(token, 1.0, &mut own);
                close(&out[token * want.len()..][..want.len()], &want, "output")?;
                token += 1;
            }
            close(&ends[sequence * state..][..state], &own, "state")?;
        }
    }
}

const SIZES: Sizes = Sizes { key_heads: 1, value_heads: 2, key_dim: 4, value_dim: 4 };

#[test]
fn calls_whose_numbers_lead_elsewhere_are_refused() {
    let Some(stream) = harness::stream_of(Cann::V9_1) else { return };
    let device = stream.device();
    let given = Tokens::new(&stream, SIZES, 3, [true, false], 7);
    let states = DeltaStates::zeroed::<bf16>(device, 4, 2, 4, 4).unwrap();
    let rule = RecurrentGatedDeltaRule::new(1.0);
    let plan = |rows: &[Vec<usize>]| {
        let sequences = DeltaSequences::of_slots(&stream, rows).unwrap();
        rule.plan(&sequences, (given.tensors(), &states)).map(drop)
    };
    let refused = |outcome: Result<(), Error>, words: &str| {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    };
    plan(&[vec![1], vec![2, 3]]).unwrap();
    refused(plan(&[vec![1], vec![2, 4]]), "slot 4 of token 2");
    refused(plan(&[vec![1], vec![2, 1]]), "recurrent_delta.shared_slot");
    refused(plan(&[vec![1], vec![2]]), "recurrent_delta.per_token");
    let rows = [vec![1], vec![2, 3]];
    let sequences = || DeltaSequences::of_slots(&stream, &rows).unwrap();
    let accepted = |counts: &[usize]| {
        let sequences = sequences().accepted(&stream, counts)?;
        rule.plan(&sequences, (given.tensors(), &states)).map(drop)
    };
    accepted(&[1, 2]).unwrap();
    refused(accepted(&[1, 3]), "3 accepted tokens of sequence 1");
    refused(accepted(&[0, 1]), "0 accepted tokens of sequence 0");
    refused(accepted(&[1]), "1 counts for 2 sequences");
    // A count chooses between two tokens whose states are in one slot.
    let repeated = DeltaSequences::of_slots(&stream, &[vec![1], vec![2, 2]]).unwrap();
    rule.plan(&repeated, (given.tensors(), &states)).unwrap();
    let repeated = repeated.accepted(&stream, &[1, 2]).unwrap();
    refused(rule.plan(&repeated, (given.tensors(), &states)).map(drop), "slot 2 of two tokens of sequence 1");
    for (scale, id) in [(f64::NAN, "recurrent_delta.scale_finite"), (0.0, "recurrent_delta.scale_zero")] {
        let rule = RecurrentGatedDeltaRule::new(scale);
        refused(rule.plan(&sequences(), (given.tensors(), &states)).map(drop), id);
    }
    refused(states.clear(&stream, &[0, 4]), "below 4, the states of the pool");

    // Sequences of the other operator, and decays that it does not have.
    let lengths = DeltaSequences::of_lengths(&stream, &[1, 2]).unwrap();
    let inputs = (given.tensors(), &states);
    refused(rule.plan(&lengths, inputs).map(drop), "DeltaSequences::of_slots");
    refused(lengths.clone().accepted(&stream, &[1, 1]).map(drop), "DeltaSequences::of_slots");
    let chunk = ChunkGatedDeltaRule::new(1.0);
    let two = DeltaStates::zeroed::<bf16>(device, 2, 2, 4, 4).unwrap();
    refused(chunk.plan(&sequences(), (given.tensors(), &two)).map(drop), "DeltaSequences::of_lengths");
    let columns = Tokens::new(&stream, SIZES, 3, [true, true], 7);
    refused(chunk.plan(&lengths, (columns.tensors(), &two)).map(drop), "8 tokens of a sequence in a call");
    let plan = chunk.plan(&lengths, (given.tensors(), &two)).unwrap();
    refused(plan.launch(&stream, (columns.tensors(), &two)).map(drop), "8 tokens of a sequence in a call");
    for (lengths, words) in [([0, 3], "chunk_delta.no_tokens"), ([1, 1], "chunk_delta.rows_left_out")] {
        let lengths = DeltaSequences::of_lengths(&stream, &lengths).unwrap();
        refused(chunk.plan(&lengths, (given.tensors(), &two)).map(drop), words);
    }
    let long = DeltaSequences::of_lengths(&stream, &[1, 3]).unwrap();
    refused(chunk.plan(&long, (given.tensors(), &two)).map(drop), "chunk_delta.contents");

    assert!(DeltaSequences::of_lengths(&stream, &[]).is_err());
    assert!(DeltaSequences::of_lengths(&stream, &[usize::MAX]).is_err());
    assert!(DeltaSequences::of_slots(&stream, &[vec![], vec![]]).is_err());
    assert!(DeltaStates::zeroed::<bf16>(device, usize::MAX, 2, 4, 4).is_err());
    // Nothing but the plan's own sequences says where states are.
    assert!(sequences().slots().unwrap().copy_from(&stream, sequences().slots().unwrap()).is_err());
}

#[test]
fn other_releases_and_tensors_are_refused() {
    let states_of = |stream: &Stream| DeltaStates::zeroed::<bf16>(stream.device(), 4, 2, 4, 4).unwrap();
    for (cann, recurrent, chunk) in [(Cann::V8_1, false, false), (Cann::V8_5, true, false), (Cann::V9_1, true, true)] {
        let Some(stream) = harness::stream_of(cann) else { continue };
        let given = Tokens::new(&stream, SIZES, 3, [true, false], 7);
        let states = states_of(&stream);
        let sequences = DeltaSequences::of_slots(&stream, &[vec![0, 1], vec![2]]).unwrap();
        let planned = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, (given.tensors(), &states));
        assert_eq!(planned.is_ok(), recurrent, "{cann}");
        let lengths = DeltaSequences::of_lengths(&stream, &[1, 2]).unwrap();
        let two = DeltaStates::zeroed::<bf16>(stream.device(), 2, 2, 4, 4).unwrap();
        let planned = ChunkGatedDeltaRule::new(1.0).plan(&lengths, (given.tensors(), &two));
        assert_eq!(planned.is_ok(), chunk, "{cann}");
    }
    let stream = harness::emulated_stream(Soc::Ascend950, Cann::V9_2);
    let given = Tokens::new(&stream, SIZES, 3, [true, false], 7);
    let sequences = DeltaSequences::of_slots(&stream, &[vec![0, 1], vec![2]]).unwrap();
    // States in single precision, which the newest release has.
    let floats = DeltaStates::zeroed::<f32>(stream.device(), 4, 2, 4, 4).unwrap();
    let plan = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, (given.tensors(), &floats)).unwrap();
    plan.launch(&stream, (given.tensors(), &floats)).unwrap().download(&stream).unwrap();
    let other = plan.launch(&stream, (given.tensors(), &states_of(&stream)));
    assert!(other.unwrap_err().breaks(&rules::PLAN_TENSORS));
}

#[test]
fn decodes_go_on_from_the_state_of_a_prompt_and_slots_are_cleared() {
    let Some(stream) = harness::stream_of(Cann::V9_1) else { return };
    let device = stream.device();
    let whole = Tokens::new(&stream, SIZES, 8, [true, false], 21);
    let states = DeltaStates::zeroed::<bf16>(device, 1, 2, 4, 4).unwrap();
    let rule = ChunkGatedDeltaRule::new(1.0);
    let prompt = |tokens: usize, cut: DeltaTensors<'_, bf16>| {
        let sequences = DeltaSequences::of_lengths(&stream, &[tokens]).unwrap();
        rule.plan(&sequences, (cut, &states)).unwrap().launch(&stream, (cut, &states)).unwrap()
    };
    let all = prompt(8, whole.tensors()).out.download(&stream).unwrap();
    // The first five tokens by the prompt, the others by a step.
    let rows = |range: std::ops::Range<usize>| {
        let cut: Vec<_> = whole.on_device.iter().map(|tensor| tensor.narrow(0, range.clone()).unwrap()).collect();
        (cut, whole.decays_on_device[0].as_ref().unwrap().narrow(0, range).unwrap())
    };
    let (first, first_g) = rows(0..5);
    let begun = prompt(5, DeltaTensors::new((&first[0], &first[1], &first[2]), &first[3]).g(&first_g));
    let pool = DeltaStates::zeroed::<bf16>(device, 4, 2, 4, 4).unwrap();
    let slot = |slot: usize| pool.tensor().narrow(0, slot..slot + 1).unwrap();
    slot(2).copy_from(&stream, begun.states().tensor()).unwrap();
    let sequences = DeltaSequences::of_slots(&stream, &[[2, 0, 1]]).unwrap();
    let (last, last_g) = rows(5..8);
    let inputs = (DeltaTensors::new((&last[0], &last[1], &last[2]), &last[3]).g(&last_g), &pool);
    let plan = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, inputs).unwrap();
    let out = plan.launch(&stream, inputs).unwrap().download(&stream).unwrap();
    for (got, want) in out.iter().zip(&all[5 * 8..]) {
        // The state was rounded in between.
        assert!((got.to_f32() - want.to_f32()).abs() < 0.02, "{got} is not {want}");
    }
    pool.clear(&stream, &[0, 2]).unwrap();
    for at in 0..3 {
        let state = slot(at).typed::<bf16>().unwrap().download(&stream).unwrap();
        assert_eq!(state.iter().all(|number| *number == bf16::ZERO), at != 1, "slot {at}");
    }
    assert!(pool.clear(&stream, &[4]).is_err());
}
