//! Layers of linear attention: any schedule of requests is the recurrence over their tokens in double precision.

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{BlockPool, PadPolicy, Sequence};
use ascend_serving::{
    AttentionMetadata, BatchRequest, BatchSettings, Causality, RequestState, Result, StatePool, StateShape, rules,
};
use proptest::prelude::*;

use crate::acts::config;

const LAYERS: usize = 2;
const KEY_HEADS: usize = 1;
const SHAPE: StateShape = StateShape { layers: LAYERS, value_heads: 2, value_dim: 4, key_dim: 8, scale: 0.5 };
const SLOTS: usize = 10;

fn stream() -> Stream {
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

fn states(stream: &Stream) -> StatePool<bf16> {
    StatePool::new(stream, SLOTS, SHAPE).unwrap()
}

/// A number between -1 and 1 of a token, which `bf16` holds.
fn number(name: u64, layer: usize, which: usize) -> f64 {
    let mut mixed = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (layer * 977 + which) as u64;
    mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed >> 40) % 129) as f64 / 64.0 - 1.0
}

/// What a layer gets of one token.
struct Token {
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    beta: Vec<f64>,
    g: Vec<f64>,
}

impl Token {
    fn new(name: u64, layer: usize) -> Self {
        let StateShape { value_heads: heads, value_dim, key_dim, .. } = SHAPE;
        let of = |from: usize, count: usize| (0..count).map(|at| number(name, layer, from + at)).collect::<Vec<_>>();
        // Keys of a length of about 1, which `bf16` holds.
        let key = |from: usize| of(from, KEY_HEADS * key_dim).iter().map(|x| x / 2.0).collect();
        Self {
            query: key(0),
            key: key(100),
            value: of(200, heads * value_dim),
            beta: of(300, heads).iter().map(|x| 0.5 + x / 4.0).collect(),
            g: of(400, heads).iter().map(|x| -0.25 - x / 8.0).collect(),
        }
    }
}

/// The rows of tokens in a layer, and `pad` more of them.
struct Rows {
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    value: Tensor<bf16>,
    beta: Tensor<bf16>,
    g: Tensor<f32>,
}

impl Rows {
    fn new(stream: &Stream, names: &[u64], pad: usize, layer: usize) -> Self {
        let StateShape { value_heads: heads, value_dim, key_dim, .. } = SHAPE;
        let mut tokens: Vec<Token> = names.iter().map(|name| Token::new(*name, layer)).collect();
        tokens.extend((0..pad).map(|_| Token::new(u64::MAX, layer)));
        let count = tokens.len();
        let all = |of: fn(&Token) -> &Vec<f64>| tokens.iter().flat_map(|token| of(token).clone()).collect::<Vec<_>>();
        let halves = |of, shape: &[usize]| {
            let numbers: Vec<bf16> = all(of).into_iter().map(bf16::from_f64).collect();
            stream.upload(&numbers, shape).unwrap()
        };
        let decays: Vec<f32> = all(|token| &token.g).into_iter().map(|g| g as f32).collect();
        Self {
            query: halves(|token| &token.query, &[count, KEY_HEADS, key_dim]),
            key: halves(|token| &token.key, &[count, KEY_HEADS, key_dim]),
            value: halves(|token| &token.value, &[count, heads, value_dim]),
            beta: halves(|token| &token.beta, &[count, heads]),
            g: stream.upload(&decays, [count, heads]).unwrap(),
        }
    }

    fn tensors(&self) -> DeltaTensors<'_, bf16> {
        DeltaTensors::new((&self.query, &self.key, &self.value), &self.beta).g(&self.g)
    }
}

/// The outputs of the tokens of a request in a layer, one after the other, in double precision.
fn recurrence(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    let StateShape { value_heads: heads, value_dim, key_dim, scale, .. } = SHAPE;
    let mut state = vec![0.0; heads * value_dim * key_dim];
    let mut outputs = Vec::new();
    for name in names {
        let token = Token::new(*name, layer);
        let mut output = Vec::new();
        for head in 0..heads {
            let decay = token.g[head].exp();
            for (row, value) in token.value[head * value_dim..][..value_dim].iter().enumerate() {
                let state = &mut state[(head * value_dim + row) * key_dim..][..key_dim];
                let remembered: f64 = state.iter().zip(&token.key).map(|(s, k)| s * decay * k).sum();
                let correction = token.beta[head] * (value - remembered);
                for (s, k) in state.iter_mut().zip(&token.key) {
                    *s = *s * decay + correction * k;
                }
                output.push(state.iter().zip(&token.query).map(|(s, q)| s * q * scale).sum());
            }
        }
        outputs.push(output);
    }
    outputs
}

/// A request: its tokens, in the sequence that layers of full attention would read, and its state.
struct Request {
    names: Vec<u64>,
    sequence: Sequence,
    state: RequestState,
}

#[derive(Clone, Debug)]
enum Act {
    /// A new request with room for drafts.
    Admit(usize),
    /// A step of some requests, each with new tokens, of which the last ones are rejected if it may be.
    Step(Vec<(usize, usize, usize)>, usize),
    /// A fork of a request.
    Fork(usize, usize),
    End(usize),
    /// A step that ends before its last layer, if it queues any at all.
    Break(usize, bool),
}

fn act() -> impl Strategy<Value = Act> {
    let member = (0usize..4, prop_oneof![1usize..5, 1usize..90], 0usize..3);
    prop_oneof![
        2 => (0usize..4).prop_map(Act::Admit),
        6 => (prop::collection::vec(member, 1..4), 0usize..3).prop_map(|(members, pad)| Act::Step(members, pad)),
        1 => (any::<usize>(), 0usize..4).prop_map(|(which, drafts)| Act::Fork(which, drafts)),
        1 => any::<usize>().prop_map(Act::End),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(which, begun)| Act::Break(which, begun)),
    ]
}

/// Requests over a pool of states, and of blocks.
struct Engine<'s> {
    stream: &'s Stream,
    states: StatePool<bf16>,
    blocks: BlockPool,
    requests: Vec<Request>,
    /// Names of tokens so far.
    names: u64,
    compared: usize,
}

impl<'s> Engine<'s> {
    fn new(stream: &'s Stream) -> Self {
        let blocks = BlockPool::new(400, 16, PadPolicy::SkipNegative).unwrap();
        Self { stream, states: states(stream), blocks, requests: Vec::new(), names: 0, compared: 0 }
    }

    fn act(&mut self, act: &Act) -> Result<()> {
        let count = self.requests.len();
        match act {
            Act::Admit(drafts) => {
                let sequence = Sequence::new(&self.blocks);
                let free = self.states.free_slots();
                match self.states.admit(self.stream, *drafts) {
                    Ok(state) => self.requests.push(Request { names: Vec::new(), sequence, state }),
                    Err(refused) => assert!(refused.breaks(&rules::STATE_EXHAUSTED) && free <= *drafts),
                }
            }
            Act::Fork(which, drafts) if count > 0 => {
                let Request { names, state, .. } = &self.requests[which % count];
                if self.states.free_slots() > *drafts {
                    let state = self.states.fork(self.stream, state, *drafts)?;
                    let mut sequence = Sequence::new(&self.blocks);
                    let _ = sequence.grow(names.len())?;
                    let names = names.clone();
                    self.requests.push(Request { names, sequence, state });
                }
            }
            Act::End(which) if count > 0 => drop(self.requests.swap_remove(which % count)),
            Act::Break(which, begun) if count > 0 => self.break_off(which % count, *begun)?,
            Act::Step(members, pad) => self.step(members, *pad)?,
            _ => {}
        }
        Ok(())
    }

    /// Grows the members' sequences, and makes the metadata of a step.
    fn metadata(&mut self, members: &[(usize, usize)], pad: usize) -> Result<AttentionMetadata> {
        for (member, new) in members {
            let request = &mut self.requests[*member];
            let _ = request.sequence.grow(*new)?;
            request.names.extend((0..*new as u64).map(|at| self.names + at));
            self.names += *new as u64;
        }
        let requests = members.iter().map(|(member, new)| BatchRequest::of(&self.requests[*member].sequence, *new));
        let requests: Vec<_> = requests.collect();
        let settings = BatchSettings::of(&self.blocks, Causality::Causal);
        let mut metadata = AttentionMetadata::new(&requests, settings)?;
        let tokens = metadata.tokens();
        if pad > 0 {
            metadata.pad_to(tokens + pad)?;
        }
        Ok(metadata)
    }

    fn step(&mut self, members: &[(usize, usize, usize)], pad: usize) -> Result<()> {
        let mut chosen: Vec<(usize, usize, usize)> = Vec::new();
        for (member, new, rejected) in members.iter().filter(|(member, ..)| *member < self.requests.len()) {
            if chosen.iter().all(|(other, ..)| other != member) {
                chosen.push((*member, *new, *rejected));
            }
        }
        chosen.sort_unstable();
        if chosen.is_empty() {
            return Ok(());
        }
        let grown: Vec<(usize, usize)> = chosen.iter().map(|(member, new, _)| (*member, *new)).collect();
        let metadata = self.metadata(&grown, pad)?;
        let names = grown.iter().flat_map(|(member, new)| {
            let names = &self.requests[*member].names;
            names[names.len() - new..].to_vec()
        });
        let names: Vec<u64> = names.collect();
        let Self { stream, states, requests, .. } = self;
        let own = requests.iter_mut().enumerate();
        let own = own.filter(|(at, _)| grown.iter().any(|(member, _)| member == at));
        let mut step = states.begin(stream, &metadata, own.map(|(_, request)| &mut request.state))?;
        let mut outputs = Vec::new();
        for layer in 0..LAYERS {
            let rows = Rows::new(stream, &names, metadata.tokens() - names.len(), layer);
            outputs.push(step.forward(layer, rows.tensors())?);
        }
        step.end()?;
        for (layer, output) in outputs.iter().enumerate() {
            let output = output.download(stream)?;
            let mut rows = output.chunks(SHAPE.value_heads * SHAPE.value_dim);
            for (member, new) in &grown {
                let names = &requests[*member].names;
                for want in &recurrence(names, layer)[names.len() - new..] {
                    let got = rows.next().unwrap().iter().map(|x| x.to_f64());
                    for (got, want) in got.zip(want) {
                        assert!((got - want).abs() < 0.03, "{got} for {want} in layer {layer} of {member}");
                        self.compared += 1;
                    }
                }
            }
            assert!(rows.flatten().all(|padding| *padding == bf16::ZERO));
        }
        for (member, new, rejected) in chosen {
            let Request { names, sequence, state } = &mut requests[member];
            let tokens = names.len() - rejected.min(new - 1);
            match state.truncate(tokens) {
                Ok(()) => {
                    names.truncate(tokens);
                    sequence.truncate(tokens)?;
                }
                // A prompt keeps the last state alone.
                Err(refused) => assert!(refused.breaks(&rules::STATE_KEPT)),
            }
        }
        Ok(())
    }

    /// A step that ends too early: without any layer, the request goes on; with some, its state is refused.
    fn break_off(&mut self, which: usize, begun: bool) -> Result<()> {
        let metadata = self.metadata(&[(which, 1)], 0)?;
        let Self { stream, states, requests, .. } = self;
        let request = &mut requests[which];
        let tokens = request.names.len() - 1;
        let rows = Rows::new(stream, &request.names[tokens..], 0, 0);
        let mut step = states.begin(stream, &metadata, [&mut request.state])?;
        if begun {
            step.forward(0, rows.tensors())?;
        }
        assert!(step.end().unwrap_err().breaks(&rules::STEP_LAYERS_MISSING));
        if begun {
            for refused in [
                states.begin(stream, &metadata, [&mut request.state]).unwrap_err(),
                states.fork(stream, &request.state, 0).unwrap_err(),
            ] {
                assert!(refused.breaks(&rules::STATE_TORN), "{refused}");
            }
            requests.swap_remove(which);
        } else {
            request.names.truncate(tokens);
            request.sequence.truncate(tokens)?;
        }
        Ok(())
    }

    fn end(mut self) {
        self.requests.clear();
        assert_eq!((self.states.free_slots(), self.blocks.held_blocks()), (SLOTS, 0));
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn any_schedule_is_the_recurrence(acts in prop::collection::vec(act(), 1..16)) {
        let stream = stream();
        let mut engine = Engine::new(&stream);
        engine.act(&Act::Admit(1))?;
        for act in &acts {
            engine.act(act)?;
        }
        engine.end();
    }
}

#[test]
fn prompts_decodes_drafts_and_forks_are_the_recurrence() {
    let stream = stream();
    let mut engine = Engine::new(&stream);
    for act in [
        Act::Admit(2),
        Act::Admit(0),
        // A prompt in two chunks, beside one of the other request; decodes; drafts that are rejected, twice.
        Act::Step(vec![(0, 70, 0)], 0),
        Act::Step(vec![(0, 20, 0), (1, 40, 0)], 2),
        Act::Step(vec![(0, 1, 0), (1, 1, 0)], 0),
        Act::Step(vec![(0, 3, 2), (1, 1, 0)], 1),
        Act::Step(vec![(0, 3, 1), (1, 1, 0)], 0),
        Act::Fork(0, 1),
        Act::Step(vec![(0, 2, 0), (1, 30, 0), (2, 2, 1)], 0),
        Act::End(0),
        Act::Admit(3),
        Act::Step(vec![(0, 1, 0), (1, 1, 0), (2, 4, 0)], 0),
    ] {
        engine.act(&act).unwrap();
    }
    assert!(engine.compared > 2500, "{}", engine.compared);
    engine.end();
}

#[test]
fn states_stay_with_their_sequences() {
    let stream = stream();
    let blocks = BlockPool::new(8, 16, PadPolicy::SkipNegative).unwrap();
    let mut pool = states(&stream);
    let mut sequences = [Sequence::new(&blocks), Sequence::new(&blocks)];
    let [mut one, mut other] = [0, 0].map(|drafts| pool.admit(&stream, drafts).unwrap());
    let mut step = |sequences: &mut [Sequence; 2], own: [&mut RequestState; 2], causality| {
        for sequence in &mut *sequences {
            let _ = sequence.grow(1).unwrap();
        }
        let requests = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
        let metadata = AttentionMetadata::new(&requests, BatchSettings::of(&blocks, causality)).unwrap();
        let mut step = pool.begin(&stream, &metadata, own)?;
        for layer in 0..LAYERS {
            step.forward(layer, Rows::new(&stream, &[1, 2], 0, layer).tensors())?;
        }
        step.end()
    };
    step(&mut sequences, [&mut one, &mut other], Causality::Causal).unwrap();
    // As many tokens, and those of another request.
    let exchanged = step(&mut sequences, [&mut other, &mut one], Causality::Causal).unwrap_err();
    assert!(exchanged.breaks(&rules::STATE_SEQUENCE), "{exchanged}");
    sequences.iter_mut().for_each(|sequence| sequence.truncate(1).unwrap());
    step(&mut sequences, [&mut one, &mut other], Causality::Causal).unwrap();
    // A state has taken the tokens before, and no later ones.
    let later = step(&mut sequences, [&mut one, &mut other], Causality::Bidirectional).unwrap_err();
    assert!(later.breaks(&rules::STEP_CAUSALITY), "{later}");
}

#[test]
fn tokens_that_a_window_gave_back_count() {
    let stream = stream();
    let blocks = BlockPool::new(8, 16, PadPolicy::SkipNegative).unwrap();
    let mut pool = states(&stream);
    let mut state = pool.admit(&stream, 0).unwrap();
    let mut sequence = Sequence::new(&blocks);
    let settings = BatchSettings::of(&blocks, Causality::Window(16.try_into().unwrap()));
    for (new, names) in [(40, (0..40).collect::<Vec<_>>()), (1, vec![40])] {
        let _ = sequence.grow(new).unwrap();
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings).unwrap();
        let mut step = pool.begin(&stream, &metadata, [&mut state]).unwrap();
        for layer in 0..LAYERS {
            step.forward(layer, Rows::new(&stream, &names, 0, layer).tensors()).unwrap();
        }
        step.end().unwrap();
        sequence.drop_before(16).unwrap();
    }
    assert_eq!(state.tokens(), 41);
}

/// Metadata of one request of a pool, with `cached` tokens in front of `new` ones.
fn metadata(blocks: &BlockPool, cached: usize, new: usize) -> AttentionMetadata {
    let mut sequence = Sequence::new(blocks);
    let _ = sequence.grow(cached + new).unwrap();
    let settings = BatchSettings::of(blocks, Causality::Causal);
    AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings).unwrap()
}

#[test]
fn steps_refuse_what_does_not_go_together() {
    let stream = stream();
    let blocks = BlockPool::new(8, 16, PadPolicy::SkipNegative).unwrap();
    let (mut pool, mut other) = (states(&stream), states(&stream));
    let mut state = pool.admit(&stream, 1).unwrap();
    let mut second = pool.admit(&stream, 0).unwrap();
    let first = metadata(&blocks, 0, 2);
    let none: [&mut RequestState; 0] = [];
    for refused in [
        pool.begin(&stream, &first, none).unwrap_err(),
        pool.begin(&stream, &first, [&mut state, &mut second]).unwrap_err(),
    ] {
        assert!(refused.breaks(&rules::STATE_REQUESTS), "{refused}");
    }
    let refused = other.begin(&stream, &first, [&mut state]).unwrap_err();
    assert!(refused.breaks(&rules::STATE_POOL), "{refused}");
    assert!(other.fork(&stream, &state, 0).unwrap_err().breaks(&rules::STATE_POOL));
    // Tokens that were cached without this state.
    let cached = metadata(&blocks, 20, 1);
    assert!(pool.begin(&stream, &cached, [&mut state]).unwrap_err().breaks(&rules::STATE_TOKENS));
    let elsewhere = stream.device().stream().unwrap();
    assert!(pool.admit(&elsewhere, 0).unwrap_err().breaks(&rules::PLAN_TENSORS));
    assert!(pool.begin(&elsewhere, &first, [&mut state]).unwrap_err().breaks(&rules::PLAN_TENSORS));

    let mut step = pool.begin(&stream, &first, [&mut state]).unwrap();
    let (rows, longer) = (Rows::new(&stream, &[1, 2], 0, 0), Rows::new(&stream, &[1, 2, 3], 0, 0));
    assert!(step.forward(0, longer.tensors()).unwrap_err().breaks(&rules::STEP_TOKENS));
    assert!(step.forward(LAYERS, rows.tensors()).unwrap_err().breaks(&rules::ARGUMENT_VALUE));
    step.forward(0, rows.tensors()).unwrap();
    assert!(step.forward(0, rows.tensors()).unwrap_err().breaks(&rules::STEP_LAYER_REPEATED));
    // A layer that is refused has written nothing, and is queued again.
    let mut without_decay = rows.tensors();
    without_decay.g = None;
    assert!(step.forward(1, without_decay).is_err());
    step.forward(1, rows.tensors()).unwrap();
    step.end().unwrap();
    assert_eq!(state.tokens(), 2);
    // A decode does not keep states behind drafts for which there are no slots.
    let drafted = {
        let mut sequence = Sequence::new(&blocks);
        let _ = sequence.grow(5).unwrap();
        let settings = BatchSettings::of(&blocks, Causality::Causal);
        AttentionMetadata::new(&[BatchRequest::of(&sequence, 3).drafts(2)], settings).unwrap()
    };
    let mut fork = pool.fork(&stream, &state, 1).unwrap();
    assert!(pool.begin(&stream, &drafted, [&mut fork]).unwrap_err().breaks(&rules::STATE_DRAFTS));
    // The same metadata once more would count its tokens twice.
    assert!(pool.begin(&stream, &first, [&mut state]).unwrap_err().breaks(&rules::STATE_TOKENS));
    drop(second);

    // A step that is forgotten leaves states that nothing is known of.
    let next = metadata(&blocks, 2, 1);
    std::mem::forget(pool.begin(&stream, &next, [&mut fork]).unwrap());
    assert!(pool.begin(&stream, &next, [&mut fork]).unwrap_err().breaks(&rules::STATE_TORN));
    assert!(fork.truncate(2).unwrap_err().breaks(&rules::STATE_TORN));
}

#[test]
fn pools_have_sizes() {
    let stream = stream();
    let sizes = |slots, shape| StatePool::<bf16>::new(&stream, slots, shape).unwrap_err();
    for refused in [
        sizes(0, SHAPE),
        sizes(1, StateShape { layers: 0, ..SHAPE }),
        sizes(1, StateShape { layers: usize::MAX, ..SHAPE }),
        sizes(1, StateShape { value_heads: 0, ..SHAPE }),
        sizes(1, StateShape { scale: f64::NAN, ..SHAPE }),
        sizes(1, StateShape { scale: 1e-60, ..SHAPE }),
        sizes(usize::MAX, SHAPE),
    ] {
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
    }
    let all = i32::MAX as usize;
    let large = StateShape { layers: 1, value_heads: all, value_dim: all, key_dim: all, scale: 1.0 };
    assert!(StatePool::<bf16>::new(&stream, all, large).is_err());
}
