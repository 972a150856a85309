//! Models with layers of linear attention beside full and windowed ones: any schedule of requests is the recurrence,
//! and attention, over their tokens in double precision.

use std::num::NonZeroUsize;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, Convolution, PadPolicy, PagedKvCache, Sequence, StatePool, StateShape};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, ConvolutionInputs,
    Error, FusedAttention, GraphLimits, LayerGroup, NamedMask, PrefixCache, Result, StatePolicy, Step, rules,
};
use proptest::prelude::*;

use crate::acts::config;

const LINEAR: [usize; 2] = [2, 0];
const FULL: usize = 1;
const WINDOWED: usize = 3;
const LAYERS: usize = 4;
const WINDOW: usize = 20;
const KEY_HEADS: usize = 1;
const CONVOLUTION: Convolution = Convolution { width: 4, channels: 16, silu: true };
const SHAPE: StateShape = StateShape {
    layers: 2,
    value_heads: 2,
    value_dim: 4,
    key_dim: 8,
    scale: 0.5,
    drafts: 2,
    convolution: Some(CONVOLUTION),
};
/// Elements of a token's values in all heads: the first channels of what is convolved.
const VALUES: usize = SHAPE.value_heads * SHAPE.value_dim;
const SLOTS: usize = 12;
const BLOCKS: usize = 200;
/// Query heads and elements of a head in layers of attention, which have one key head.
const HEADS: usize = 2;
const DIM: usize = 64;

fn stream_of(cann: Cann) -> Stream {
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, cann)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

fn stream() -> Stream {
    stream_of(Cann::V9_1)
}

fn states(stream: &Stream, drafts: usize) -> StatePool {
    StatePool::new::<bf16>(stream, SLOTS, StateShape { drafts, ..SHAPE }).unwrap()
}

fn group(stream: &Stream, layer: usize) -> LayerGroup<bf16> {
    let causality = match layer {
        WINDOWED => Causality::Window(NonZeroUsize::new(WINDOW).unwrap()),
        _ => Causality::Causal,
    };
    let (shape, pad) = (CacheShape::new(1, 1, DIM), PadPolicy::SkipNegative);
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 16, shape, pad).unwrap();
    let backends = Backends::none().with(FusedAttention);
    LayerGroup::new([layer], causality, AttentionShape::new(HEADS, 1, DIM), cache, backends)
}

fn model(stream: &Stream, drafts: usize) -> Attention<bf16> {
    let groups = [FULL, WINDOWED].map(|layer| group(stream, layer));
    Attention::of_hybrid(LAYERS, groups, LINEAR, states(stream, drafts)).unwrap()
}

/// A number between -1 and 1 of a token, which `bf16` holds.
fn number(name: u64, layer: usize, which: usize) -> f64 {
    let mut mixed = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (layer * 977 + which) as u64;
    mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed >> 40) % 129) as f64 / 64.0 - 1.0
}

/// What a layer of linear attention gets of one token.
struct Token {
    /// What is convolved to the value.
    mixed: Vec<f64>,
    query: Vec<f64>,
    key: Vec<f64>,
    beta: Vec<f64>,
    g: Vec<f64>,
}

impl Token {
    fn new(name: u64, layer: usize) -> Self {
        let StateShape { value_heads: heads, key_dim, .. } = SHAPE;
        let of = |from: usize, count: usize| (0..count).map(|at| number(name, layer, from + at)).collect::<Vec<_>>();
        // Keys of a length of about 1, which `bf16` holds.
        let key = |from: usize| of(from, KEY_HEADS * key_dim).iter().map(|x| x / 2.0).collect();
        Self {
            mixed: of(200, CONVOLUTION.channels),
            query: key(0),
            key: key(100),
            beta: of(300, heads).iter().map(|x| 0.5 + x / 4.0).collect(),
            g: of(400, heads).iter().map(|x| -0.25 - x / 8.0).collect(),
        }
    }
}

fn upload(stream: &Stream, numbers: impl Iterator<Item = f64>, shape: &[usize]) -> Tensor<bf16> {
    stream.upload(&numbers.map(bf16::from_f64).collect::<Vec<_>>(), shape).unwrap()
}

/// The weights of a layer's convolution, `[width, channels]`.
fn weights(layer: usize) -> Vec<f64> {
    (0..CONVOLUTION.width * CONVOLUTION.channels).map(|at| number(77, layer, 600 + at)).collect()
}

/// The values of a request's tokens: convolved, with SiLU.
fn values(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    let weights = weights(layer);
    let mixed: Vec<_> = names.iter().map(|name| Token::new(*name, layer).mixed).collect();
    let value = |token: usize, channel: usize| {
        let taps = (0..CONVOLUTION.width).filter_map(|back| Some((back, mixed.get(token.checked_sub(back)?)?)));
        let weight = |back: usize| weights[(CONVOLUTION.width - 1 - back) * CONVOLUTION.channels + channel];
        let sum: f64 = taps.map(|(back, row)| weight(back) * row[channel]).sum();
        sum / (1.0 + (-sum).exp())
    };
    (0..names.len()).map(|token| (0..VALUES).map(|channel| value(token, channel)).collect()).collect()
}

/// The rows of tokens in a layer of linear attention, and `pad` more of them.
struct Rows {
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    /// What is convolved to the values.
    mixed: Tensor<bf16>,
    beta: Tensor<bf16>,
    g: Tensor<f32>,
}

impl Rows {
    fn new(stream: &Stream, names: &[u64], pad: usize, layer: usize) -> Self {
        let StateShape { value_heads: heads, key_dim, .. } = SHAPE;
        let mut tokens: Vec<Token> = names.iter().map(|name| Token::new(*name, layer)).collect();
        tokens.extend((0..pad).map(|_| Token::new(u64::MAX, layer)));
        let count = tokens.len();
        let all = |of: fn(&Token) -> &Vec<f64>| tokens.iter().flat_map(|token| of(token).clone()).collect::<Vec<_>>();
        let halves = |of, shape: &[usize]| upload(stream, all(of).into_iter(), shape);
        let decays: Vec<f32> = all(|token| &token.g).into_iter().map(|g| g as f32).collect();
        Self {
            query: halves(|token| &token.query, &[count, KEY_HEADS, key_dim]),
            key: halves(|token| &token.key, &[count, KEY_HEADS, key_dim]),
            mixed: halves(|token| &token.mixed, &[count, CONVOLUTION.channels]),
            beta: halves(|token| &token.beta, &[count, heads]),
            g: stream.upload(&decays, [count, heads]).unwrap(),
        }
    }

    /// Queues the convolution of the tokens, which gives their values.
    fn convolved(&self, step: &mut Step<'_, bf16>, stream: &Stream, layer: usize) -> Result<Tensor<bf16>> {
        let weight = upload(stream, weights(layer).into_iter(), &[CONVOLUTION.width, CONVOLUTION.channels]);
        let values = step.convolve(layer, (&self.mixed, &weight))?;
        let values = values.narrow(1, 0..VALUES)?.contiguous(stream)?;
        Ok(values.reshape([self.mixed.shape()[0], SHAPE.value_heads, SHAPE.value_dim])?)
    }

    fn tensors<'a>(&'a self, value: &'a Tensor<bf16>) -> DeltaTensors<'a, bf16> {
        DeltaTensors::new((&self.query, &self.key, value), &self.beta).g(&self.g)
    }
}

/// The numbers of a token in a layer of attention: its query, key or value.
fn attention_row(name: u64, layer: usize, which: usize) -> impl Iterator<Item = f64> {
    let heads = if which == 0 { HEADS } else { 1 };
    (0..heads * DIM).map(move |at| number(name, layer, 1000 * (1 + which) + at))
}

/// Queues a layer of a step for the tokens of these names.
fn forward(
    step: &mut Step<'_, bf16>,
    stream: &Stream,
    names: &[u64],
    pad: usize,
    layer: usize,
) -> Result<Tensor<bf16>> {
    if LINEAR.contains(&layer) {
        let rows = Rows::new(stream, names, pad, layer);
        let values = rows.convolved(step, stream, layer)?;
        return step.forward(layer, rows.tensors(&values));
    }
    let padded = names.iter().copied().chain(std::iter::repeat_n(u64::MAX, pad));
    let [query, key, value] = [0, 1, 2].map(|which| {
        let rows = padded.clone().flat_map(|name| attention_row(name, layer, which));
        upload(stream, rows, &[names.len() + pad, if which == 0 { HEADS } else { 1 }, DIM])
    });
    step.forward(layer, (&query, &key, &value))
}

/// The outputs of the tokens of a request in a layer, one after the other, in double precision.
fn reference(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    match LINEAR.contains(&layer) {
        true => recurrence(names, layer),
        false => attended(names, layer, if layer == WINDOWED { WINDOW } else { usize::MAX }),
    }
}

fn recurrence(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    let StateShape { value_heads: heads, value_dim, key_dim, scale, .. } = SHAPE;
    let mut state = vec![0.0; heads * value_dim * key_dim];
    let mut outputs = Vec::new();
    for (name, values) in names.iter().zip(values(names, layer)) {
        let token = Token::new(*name, layer);
        let mut output = Vec::new();
        for head in 0..heads {
            let decay = token.g[head].exp();
            for (row, value) in values[head * value_dim..][..value_dim].iter().enumerate() {
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

fn attended(names: &[u64], layer: usize, window: usize) -> Vec<Vec<f64>> {
    let rows = |which| names.iter().map(|name| attention_row(*name, layer, which).collect()).collect::<Vec<Vec<f64>>>();
    let [queries, keys, values] = [0, 1, 2].map(rows);
    let token = |(token, query): (usize, &Vec<f64>)| {
        let first = (token + 1).saturating_sub(window);
        let head = |query: &[f64]| {
            let weight = |key: &Vec<f64>| {
                let score: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                (score / (DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = keys[first..=token].iter().map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let element = |at: usize| {
                let products = weights.iter().zip(&values[first..=token]).map(|(weight, value)| weight * value[at]);
                products.sum::<f64>() / sum
            };
            (0..DIM).map(element).collect::<Vec<f64>>()
        };
        query.chunks(DIM).flat_map(head).collect()
    };
    queries.iter().enumerate().map(token).collect()
}

/// A request: all its tokens, of which its sequence has the first ones.
struct Request {
    names: Vec<u64>,
    sequence: Sequence,
}

#[derive(Clone, Debug)]
enum Act {
    /// A new request, with the prompt of an earlier one if there is one, whose cached prefix it shares.
    Admit(usize),
    /// A step of some requests, each with new tokens, of which the last ones are drafts that are rejected, where states
    /// are kept behind them; and padding.
    Step(Vec<(usize, usize, usize)>, usize),
    /// A request that begins with the tokens of another one, but the last ones.
    Share(usize, usize),
    /// Gives everything of a request back; its tokens are computed again later.
    Preempt(usize),
    End(usize),
    /// A step that ends behind this number of its layers.
    Break(usize, usize),
}

fn act() -> impl Strategy<Value = Act> {
    // Tokens of which some end with a block, behind which prefixes are found.
    let member = (0usize..4, prop_oneof![1usize..5, 1usize..90, Just(16), Just(32)], 0usize..3);
    prop_oneof![
        2 => any::<usize>().prop_map(Act::Admit),
        6 => (prop::collection::vec(member, 1..4), 0usize..3).prop_map(|(members, pad)| Act::Step(members, pad)),
        2 => (any::<usize>(), 0usize..3).prop_map(|(which, back)| Act::Share(which, back)),
        1 => any::<usize>().prop_map(Act::Preempt),
        1 => any::<usize>().prop_map(Act::End),
        1 => (any::<usize>(), 0..LAYERS).prop_map(|(which, layers)| Act::Break(which, layers)),
    ]
}

/// Requests of a model.
struct Engine<'s> {
    stream: &'s Stream,
    attention: Attention<bf16>,
    drafts: usize,
    prefixes: PrefixCache<u64>,
    /// The tokens that were inserted.
    prompts: Vec<Vec<u64>>,
    requests: Vec<Request>,
    /// Names of tokens so far.
    names: u64,
    compared: usize,
    hits: usize,
}

impl<'s> Engine<'s> {
    fn new(stream: &'s Stream, drafts: usize) -> Self {
        let attention = model(stream, drafts);
        let prefixes = PrefixCache::of(&attention).unwrap();
        let (prompts, requests) = (Vec::new(), Vec::new());
        Self { stream, attention, drafts, prefixes, prompts, requests, names: 0, compared: 0, hits: 0 }
    }

    fn act(&mut self, act: &Act) -> Result<()> {
        let count = self.requests.len();
        match act {
            Act::Admit(which) => {
                let prompt = self.prompts.get(which % (self.prompts.len() + 1)).cloned();
                let mut names = prompt.unwrap_or_default();
                // One more than the prefix has, which a step computes.
                names.push(self.names);
                self.names += 1;
                let sequence = self.prefixes.share(b"", &names);
                self.hits += usize::from(!sequence.is_empty());
                self.requests.push(Request { names, sequence });
            }
            Act::Share(which, back) if count > 0 => {
                let Request { names, sequence } = &self.requests[which % count];
                let tokens = sequence.len().saturating_sub(*back);
                match sequence.share_prefix(tokens) {
                    Ok(sequence) => {
                        let names = names[..tokens].to_vec();
                        self.requests.push(Request { names, sequence });
                    }
                    // A prompt keeps the last state alone, and what a window shows no more has been given back.
                    Err(refused) => {
                        let rules = [&rules::STATE_KEPT, &rules::SEQUENCE_LENGTH];
                        assert!(rules.contains(&refused.rule) && *back > 0, "{refused}");
                    }
                }
            }
            Act::Preempt(which) if count > 0 => self.requests[which % count].sequence.truncate(0)?,
            Act::End(which) if count > 0 => drop(self.requests.swap_remove(which % count)),
            Act::Break(which, layers) if count > 0 => self.break_off(which % count, *layers)?,
            Act::Step(members, pad) => self.step(members, *pad)?,
            _ => {}
        }
        Ok(())
    }

    /// Grows the sequences of the members for which there is room; tokens that were computed before come first. Returns
    /// the members with their new tokens.
    fn grow(&mut self, members: &[(usize, usize)]) -> Result<Vec<(usize, usize)>> {
        let mut grown = Vec::new();
        for (member, new) in members {
            let Request { names, sequence } = &mut self.requests[*member];
            let (before, free) = (sequence.len(), self.attention.states().unwrap().free_slots());
            let new = match names.len() - before {
                0 => *new,
                left => left.min(*new),
            };
            let mut growth = self.attention.grow(self.stream, sequence, new);
            if growth.is_err() && self.prefixes.evict_states(self.drafts + 1) > self.drafts {
                growth = self.attention.grow(self.stream, sequence, new);
            }
            match growth {
                Ok(()) => grown.push((*member, new)),
                Err(refused) => {
                    assert!(refused.breaks(&rules::STATE_EXHAUSTED) && free <= 2 * self.drafts + 1, "{refused}");
                    assert_eq!((sequence.len(), sequence.group(1).unwrap().len()), (before, before));
                    continue;
                }
            }
            while names.len() < sequence.len() {
                names.push(self.names);
                self.names += 1;
            }
        }
        Ok(grown)
    }

    fn new_names(&self, grown: &[(usize, usize)]) -> Vec<u64> {
        let names = grown.iter().flat_map(|(member, new)| {
            let Request { names, sequence } = &self.requests[*member];
            names[sequence.len() - new..sequence.len()].to_vec()
        });
        names.collect()
    }

    fn step(&mut self, members: &[(usize, usize, usize)], pad: usize) -> Result<()> {
        let mut chosen: Vec<(usize, usize, usize)> = Vec::new();
        for (member, new, rejected) in members.iter().filter(|(member, ..)| *member < self.requests.len()) {
            if chosen.iter().all(|(other, ..)| other != member) {
                chosen.push((*member, *new, *rejected));
            }
        }
        let grown = self.grow(&chosen.iter().map(|(member, new, _)| (*member, *new)).collect::<Vec<_>>())?;
        if grown.is_empty() {
            return Ok(());
        }
        let rejected = |member: usize, new: usize| {
            let wanted = chosen.iter().find(|(other, ..)| *other == member).map_or(0, |(_, _, rejected)| *rejected);
            if new > self.drafts + 1 { 0 } else { wanted.min(new - 1) }
        };
        let batch = grown.iter().map(|(member, new)| {
            BatchRequest::of(&self.requests[*member].sequence, *new).drafts(rejected(*member, *new))
        });
        let mut metadata = self.attention.metadata(&batch.collect::<Vec<_>>(), StatePolicy::default())?;
        let names = self.new_names(&grown);
        if pad > 0 {
            metadata.pad_to(names.len() + pad)?;
        }
        let mut step = self.attention.begin(self.stream, &metadata)?;
        let outputs = (0..LAYERS).map(|layer| forward(&mut step, self.stream, &names, pad, layer));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        step.end()?;
        for (layer, output) in outputs.iter().enumerate() {
            let output = output.download(self.stream)?;
            let mut rows = output.chunks(output.len() / (names.len() + pad));
            for (member, new) in &grown {
                let Request { names, sequence } = &self.requests[*member];
                for want in &reference(&names[..sequence.len()], layer)[sequence.len() - new..] {
                    let got = rows.next().unwrap().iter().map(|x| x.to_f64());
                    for (got, want) in got.zip(want) {
                        assert!((got - want).abs() < 0.03, "{got} for {want} in layer {layer} of {member}");
                        self.compared += 1;
                    }
                }
            }
            assert!(!LINEAR.contains(&layer) || rows.flatten().all(|padding| *padding == bf16::ZERO));
        }
        let taken: Vec<_> = grown.iter().map(|(member, new)| (*member, rejected(*member, *new))).collect();
        for (member, rejected) in taken {
            let Request { names, sequence } = &mut self.requests[member];
            let tokens = sequence.len() - rejected;
            sequence.truncate(tokens)?;
            names.drain(tokens..tokens + rejected);
            assert_eq!(self.attention.computed_tokens(sequence)?, tokens);
            self.prefixes.insert(b"", &names[..tokens], sequence)?;
            self.prompts.push(names[..tokens].to_vec());
        }
        Ok(())
    }

    /// A step that ends too early: with a layer of linear attention, the request begins anew.
    fn break_off(&mut self, which: usize, layers: usize) -> Result<()> {
        let Some(&(_, new)) = self.grow(&[(which, 1)])?.first() else {
            return Ok(());
        };
        let names = self.new_names(&[(which, new)]);
        let Self { stream, attention, requests, .. } = self;
        let Request { names: all, sequence } = &mut requests[which];
        let metadata = attention.metadata(&[BatchRequest::of(sequence, new)], StatePolicy::default())?;
        let mut step = attention.begin(stream, &metadata)?;
        for layer in 0..layers {
            forward(&mut step, stream, &names, 0, layer)?;
        }
        let ended = step.end().unwrap_err();
        assert!(ended.breaks(&rules::STEP_LAYERS_MISSING), "{ended}");
        if layers == 0 {
            let tokens = sequence.len() - new;
            sequence.truncate(tokens)?;
            all.truncate(all.len().max(tokens));
            return Ok(());
        }
        assert_eq!(attention.computed_tokens(sequence)?, 0);
        for refused in [
            attention.begin(stream, &metadata).unwrap_err(),
            attention.grow(stream, sequence, 1).unwrap_err(),
            attention.grow(stream, &mut sequence.fork(), 1).unwrap_err(),
            sequence.share_prefix(sequence.len()).unwrap_err().into(),
            sequence.truncate(sequence.len()).unwrap_err().into(),
        ] {
            assert!(Error::breaks(&refused, &rules::STATE_TORN), "{refused}");
        }
        Ok(sequence.truncate(0)?)
    }

    /// Slots of states that no request holds, and that are not free.
    fn held_elsewhere(&self) -> usize {
        let sequences = self.requests.iter().map(|request| &request.sequence);
        self.attention.states().unwrap().audit(sequences).unwrap()
    }

    fn end(mut self) {
        self.prefixes.clear();
        assert_eq!(self.held_elsewhere(), 0);
        self.requests.clear();
        let blocks = self.attention.groups().iter().map(|group| group.cache().pool().held_blocks());
        assert_eq!((blocks.sum::<usize>(), self.attention.states().unwrap().free_slots()), (0, SLOTS));
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn any_schedule_is_the_recurrence(
        acts in prop::collection::vec(act(), 1..16),
        drafts in 0usize..4,
        // Without ChunkGatedDeltaRule, and with it.
        cann in prop::sample::select(vec![Cann::V8_5, Cann::V9_1]),
    ) {
        let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
        let stream = stream_of(cann);
        let mut engine = Engine::new(&stream, drafts);
        engine.act(&Act::Admit(0))?;
        for act in &acts {
            engine.act(act)?;
            engine.held_elsewhere();
        }
        engine.end();
    }
}

#[test]
fn prompts_decodes_drafts_and_forks_are_the_recurrence() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    for cann in [Cann::V8_5, Cann::V9_1] {
        let stream = stream_of(cann);
        let mut engine = Engine::new(&stream, 2);
        for act in [
            Act::Admit(0),
            Act::Admit(0),
            // A prompt in two chunks, beside one of the other request; decodes; drafts that are rejected, twice.
            Act::Step(vec![(0, 1, 0), (1, 1, 0)], 0),
            Act::Step(vec![(0, 63, 0)], 0),
            Act::Step(vec![(0, 20, 0), (1, 40, 0)], 2),
            Act::Step(vec![(0, 1, 0), (1, 1, 0)], 0),
            Act::Step(vec![(0, 3, 2), (1, 1, 0)], 1),
            Act::Step(vec![(0, 3, 1), (1, 1, 0)], 0),
            // A fork from one token before the end; both go on.
            Act::Share(0, 1),
            Act::Step(vec![(0, 2, 0), (1, 30, 0), (2, 2, 1)], 0),
            // The whole request again, and what shared its beginning stays.
            Act::Preempt(0),
            Act::Step(vec![(2, 1, 0), (0, 90, 0)], 0),
            Act::Step(vec![(0, 90, 0), (1, 1, 0)], 0),
            Act::End(0),
            // The prompt of the third step, whose 64 tokens end with a block.
            Act::Admit(2),
            Act::Step(vec![(0, 1, 0), (1, 1, 0), (2, 3, 0)], 0),
        ] {
            engine.act(&act).unwrap();
        }
        assert_eq!(engine.hits, 1);
        assert!(engine.compared > 40_000, "{}", engine.compared);
        engine.end();
    }
}

fn step_of(attention: &Attention<bf16>, requests: &[(&Sequence, usize)]) -> Result<AttentionMetadata> {
    let requests = requests.iter().map(|(sequence, new)| BatchRequest::of(sequence, *new));
    Ok(attention.metadata(&requests.collect::<Vec<_>>(), StatePolicy::default())?)
}

/// Computes the last tokens of a sequence.
fn compute(attention: &mut Attention<bf16>, stream: &Stream, sequence: &Sequence, new: usize) -> Result<()> {
    let metadata = step_of(attention, &[(sequence, new)])?;
    let names: Vec<u64> = (0..new as u64).collect();
    let mut step = attention.begin(stream, &metadata)?;
    for layer in 0..LAYERS {
        forward(&mut step, stream, &names, 0, layer)?;
    }
    step.end()
}

#[test]
fn a_sequence_that_is_kept_is_a_snapshot_in_one_slot() {
    let stream = stream();
    let mut attention = model(&stream, 2);
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 32).unwrap();
    compute(&mut attention, &stream, &sequence, 32).unwrap();
    assert_eq!(free(&attention), SLOTS - 3);
    let prefix = sequence.share_prefix(32).unwrap();
    // The state behind fewer tokens of a prompt is not kept.
    let refused = sequence.share_prefix(16).unwrap_err();
    assert_eq!(refused.rule, &rules::STATE_KEPT);
    assert!(refused.allowed.contains("0, or 32 to 32"), "{refused}");
    attention.grow(&stream, &mut sequence, 1).unwrap();
    assert_eq!(free(&attention), SLOTS - 4);
    compute(&mut attention, &stream, &sequence, 1).unwrap();
    drop(sequence);
    assert_eq!(free(&attention), SLOTS - 1);
    // Requests begin with it, as often as there is room.
    let mut begun = Vec::new();
    loop {
        let mut sequence = prefix.fork();
        match attention.grow(&stream, &mut sequence, 1) {
            Ok(()) => begun.push(sequence),
            Err(refused) => break assert!(refused.breaks(&rules::STATE_EXHAUSTED), "{refused}"),
        }
    }
    assert_eq!((begun.len(), free(&attention)), ((SLOTS - 1) / 3, (SLOTS - 1) % 3));
}

#[test]
fn prefixes_are_found_where_a_state_was_kept() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut prefixes = PrefixCache::<u64>::of(&attention).unwrap();
    let prompt: Vec<u64> = (0..50).collect();
    let mut sequence = prefixes.share(b"", &prompt);
    for (new, found) in [(20, 0), (28, 48), (2, 48)] {
        attention.grow(&stream, &mut sequence, new).unwrap();
        compute(&mut attention, &stream, &sequence, new).unwrap();
        prefixes.insert(b"", &prompt[..sequence.len()], &sequence).unwrap();
        assert_eq!(prefixes.hit_len(b"", &[&prompt[..], &[50]].concat()), found);
    }
    // Sequences without a state are not inserted, nor those of another model.
    let plain = Sequence::new(attention.groups()[0].cache().pool());
    assert_eq!(prefixes.insert(b"", &[], &plain).unwrap_err().rule, &rules::PREFIX_GROUPS);
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    let shared = prefixes.share(b"", &prompt);
    assert_eq!((shared.len(), free(&attention)), (48, SLOTS - 2));
    // What a sequence begins with is not given back; then it is, and its blocks stay.
    assert_eq!(prefixes.evict_states(1), 0);
    drop(shared);
    assert_eq!((prefixes.evict_states(5), prefixes.hit_len(b"", &prompt)), (1, 0));
    assert_eq!(prefixes.cached_blocks(0).unwrap(), 3);
    // They are found again once a step has the state anew.
    sequence.truncate(0).unwrap();
    attention.grow(&stream, &mut sequence, 32).unwrap();
    compute(&mut attention, &stream, &sequence, 32).unwrap();
    prefixes.insert(b"", &prompt[..32], &sequence).unwrap();
    assert_eq!(prefixes.hit_len(b"", &prompt), 32);
    // Without its blocks a state is not kept either.
    drop(sequence);
    prefixes.evict(0, 3).unwrap();
    assert_eq!(free(&attention), SLOTS);
}

#[test]
fn a_slot_that_two_prefixes_hold_is_given_back_once() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut prefixes = PrefixCache::<u64>::of(&attention).unwrap();
    let prompt: Vec<u64> = (0..50).collect();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 48).unwrap();
    compute(&mut attention, &stream, &sequence, 48).unwrap();
    for name in [b"one", b"two"] {
        prefixes.insert(name, &prompt[..48], &sequence).unwrap();
        assert_eq!(prefixes.hit_len(name, &prompt), 48);
    }
    let free = |attention: &Attention<bf16>| attention.states().unwrap().free_slots();
    assert_eq!((prefixes.evict_states(1), free(&attention)), (0, SLOTS - 1));
    drop(sequence);
    assert_eq!((prefixes.evict_states(5), free(&attention)), (1, SLOTS));
    assert_eq!([b"one", b"two"].map(|name| prefixes.hit_len(name, &prompt)), [0, 0]);
}

#[test]
fn forks_between_growth_and_step_get_a_copy() {
    let stream = stream();
    let mut attention = model(&stream, 0);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 16).unwrap();
    compute(&mut attention, &stream, &sequence, 16).unwrap();
    let first = attention.states().unwrap().layer(0).unwrap().tensor().download_bytes(&stream).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let fork = sequence.share_prefix(16).unwrap();
    compute(&mut attention, &stream, &sequence, 1).unwrap();
    let after = attention.states().unwrap().layer(0).unwrap().tensor().download_bytes(&stream).unwrap();
    let slot = first.len() / SLOTS;
    assert!(first[..slot].iter().any(|byte| *byte != 0) && first[..slot] == after[..slot]);
    assert_ne!(after[slot..2 * slot], after[..slot]);
    drop((sequence, fork));
    assert_eq!(attention.states().unwrap().free_slots(), SLOTS);
}

#[test]
fn steps_refuse_what_does_not_go_together() {
    let stream = stream();
    let (mut attention, mut other) = (model(&stream, 1), model(&stream, 1));
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let first = step_of(&attention, &[(&sequence, 2)]).unwrap();
    let is = |outcome: Result<()>, rule| match outcome {
        Err(refused) => assert!(refused.breaks(rule), "{refused}"),
        Ok(()) => panic!("not refused by {rule:?}"),
    };
    // Sequences of the caches alone have no state, and those of another model have one elsewhere.
    let plain = Attention::of_groups(1, [group(&stream, 0)]).unwrap();
    is(attention.grow(&stream, &mut plain.sequence(), 1), &rules::GROUP_LAYERS);
    is(other.grow(&stream, &mut sequence, 1), &rules::BLOCK_POOL);
    let elsewhere = stream.device().stream().unwrap();
    is(attention.grow(&elsewhere, &mut sequence, 1), &rules::PLAN_TENSORS);
    is(attention.begin(&elsewhere, &first).map(drop), &rules::PLAN_TENSORS);
    assert_eq!(sequence.len(), 2);

    let mut step = attention.begin(&stream, &first).unwrap();
    let (rows, longer) = (Rows::new(&stream, &[1, 2], 0, 0), Rows::new(&stream, &[1, 2, 3], 0, 0));
    let zeros = |count: usize| upload(&stream, std::iter::repeat_n(0.0, count * VALUES), &[count, 2, 4]);
    let (value, value_of_three) = (zeros(2), zeros(3));
    // A layer is convolved once, before it is computed, and others are not.
    is(step.forward(0, rows.tensors(&value)).map(drop), &rules::STEP_CONVOLUTION);
    is(longer.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_TOKENS);
    is(rows.convolved(&mut step, &stream, FULL).map(drop), &rules::STEP_KIND);
    is(rows.convolved(&mut step, &stream, LAYERS).map(drop), &rules::ARGUMENT_VALUE);
    let value = rows.convolved(&mut step, &stream, 0).unwrap();
    is(rows.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_CONVOLUTION);
    let wide = upload(&stream, std::iter::repeat_n(1.0, 2 * HEADS * DIM), &[2, HEADS, DIM]);
    let key = wide.narrow(1, 0..1).unwrap().contiguous(&stream).unwrap();
    is(step.forward(0, longer.tensors(&value_of_three)).map(drop), &rules::STEP_TOKENS);
    is(step.forward(LAYERS, rows.tensors(&value)).map(drop), &rules::ARGUMENT_VALUE);
    is(step.forward(FULL, rows.tensors(&value)).map(drop), &rules::STEP_KIND);
    is(step.forward(LINEAR[0], (&wide, &key, &key)).map(drop), &rules::STEP_KIND);
    let mut narrow = key.clone();
    is(step.forward_into(0, rows.tensors(&value), &mut narrow), &rules::PLAN_TENSORS);
    let mut output = zeros(2);
    step.forward_into(0, rows.tensors(&value), &mut output).unwrap();
    assert!(step.selected(0).is_none());
    is(step.forward(0, rows.tensors(&value)).map(drop), &rules::STEP_LAYER_REPEATED);
    is(rows.convolved(&mut step, &stream, 0).map(drop), &rules::STEP_LAYER_REPEATED);
    // A layer that is refused has written nothing, and is queued again.
    let value = rows.convolved(&mut step, &stream, LINEAR[0]).unwrap();
    let mut without_decay = rows.tensors(&value);
    without_decay.g = None;
    is(step.forward(LINEAR[0], without_decay).map(drop), &rules::STEP_LAYERS);
    step.forward(LINEAR[0], rows.tensors(&value)).unwrap();
    for layer in [FULL, WINDOWED] {
        forward(&mut step, &stream, &[1, 2], 0, layer).unwrap();
    }
    step.end().unwrap();

    // The same metadata once more would count its tokens twice, and a step without growth too.
    is(attention.begin(&stream, &first).map(drop), &rules::SEQUENCE_COMPUTED);
    let again = [BatchRequest::of(&sequence, 2).recompute()];
    let again = attention.metadata(&again, StatePolicy::default()).unwrap();
    is(attention.begin(&stream, &again).map(drop), &rules::STATE_TOKENS);
    // A decode does not keep states behind drafts for which there are no slots.
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let drafted = [BatchRequest::of(&sequence, 3).drafts(2)];
    let drafted = attention.metadata(&drafted, StatePolicy::default()).unwrap();
    is(attention.begin(&stream, &drafted).map(drop), &rules::STATE_DRAFTS);
    // What something else has computed is not in the state, and a state has its tokens in their order.
    is(attention.mark_computed(&sequence, 5).map_err(Error::from), &rules::STATE_TOKENS);
    is(attention.move_tokens(&stream, &sequence, [(1, 0)]), &rules::STATE_KEPT);
    assert_eq!(attention.computed_tokens(&sequence).unwrap(), 2);

    // Tokens that see later ones: a state has taken the tokens before, and no others.
    let mut later = step_of(&attention, &[(&sequence, 3)]).unwrap();
    later.set_mask(NamedMask::new("pairs", |_, token, key| key / 2 <= token / 2));
    is(attention.begin(&stream, &later).map(drop), &rules::STEP_CAUSALITY);
    // A step of some layers of attention alone is begun again.
    let next = step_of(&attention, &[(&sequence, 3)]).unwrap();
    let mut step = attention.begin(&stream, &next).unwrap();
    forward(&mut step, &stream, &[1, 2, 3], 0, FULL).unwrap();
    is(step.end(), &rules::STEP_LAYERS_MISSING);
    attention.begin(&stream, &next).unwrap();
    // Requests without sequences have no state, and metadata holds no slot.
    let row = sequence.row().to_vec();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let without = AttentionMetadata::new(&[BatchRequest::in_row(&row, 0, 3)], settings).unwrap();
    is(attention.begin(&stream, &without).map(drop), &rules::GROUP_LAYERS);
    drop(sequence);
    assert!(attention.begin(&stream, &next).is_err());
    assert_eq!(attention.states().unwrap().free_slots(), SLOTS);
}

/// Convolutions that are refused write nothing: the right ones follow in the same step, whose outputs are right.
#[test]
fn convolutions_that_are_refused_leave_the_step_usable() {
    let stream = stream();
    for drafts in [0, 2] {
        let mut attention = model(&stream, drafts);
        let mut sequence = attention.sequence();
        for (names, done) in [([1, 2, 3], 0), ([4, 5, 6], 3)] {
            attention.grow(&stream, &mut sequence, 3).unwrap();
            let metadata = step_of(&attention, &[(&sequence, 3)]).unwrap();
            let windows = |at: usize| attention.states().unwrap().windows(at).unwrap().clone().typed::<bf16>().unwrap();
            let windows = [0, 1].map(windows);
            let mut step = attention.begin(&stream, &metadata).unwrap();
            for (at, layer) in LINEAR.into_iter().enumerate() {
                let rows = Rows::new(&stream, &names, 0, layer);
                let weight = upload(&stream, weights(layer).into_iter(), &[CONVOLUTION.width, CONVOLUTION.channels]);
                let mut is = |inputs: ConvolutionInputs<'_, bf16>, rule| {
                    let refused = step.convolve(layer, inputs).unwrap_err();
                    assert!(refused.breaks(rule), "{refused}");
                };
                // The first columns of rows twice as wide: a plan takes them, and copies of windows do not.
                let wide = rows.mixed.download(&stream).unwrap();
                let wide: Vec<_> = wide.chunks(CONVOLUTION.channels).flat_map(|row| [row, row].concat()).collect();
                let wide = stream.upload(&wide, [3, 2 * CONVOLUTION.channels]).unwrap();
                let columns = wide.narrow(1, 0..CONVOLUTION.channels).unwrap();
                if drafts > 0 && at == 0 {
                    is((&columns, &weight).into(), &rules::STEP_CONTIGUOUS);
                }
                // Rows of the pool that the layer writes.
                if let Some(windows) = windows.get(at) {
                    let own = windows.narrow(0, 0..1).unwrap();
                    let own = own.reshape([CONVOLUTION.width - 1, CONVOLUTION.channels]).unwrap();
                    is((&own, &weight).into(), &rules::ARGUMENT_MEMORY);
                }
                // A bias, other strides, narrower weights than the first layer brought.
                if at > 0 {
                    let bias = upload(&stream, std::iter::repeat_n(1.0, CONVOLUTION.channels), &[CONVOLUTION.channels]);
                    is(ConvolutionInputs::from((&rows.mixed, &weight)).bias(&bias), &rules::STEP_LAYERS);
                    is((&columns, &weight).into(), &rules::STEP_LAYERS);
                    is((&rows.mixed, &weight.narrow(0, 0..3).unwrap()).into(), &rules::STEP_LAYERS);
                }
                let values = rows.convolved(&mut step, &stream, layer).unwrap();
                let output = step.forward(layer, rows.tensors(&values)).unwrap().download(&stream).unwrap();
                let want = recurrence(&[1, 2, 3, 4, 5, 6], layer)[done..done + 3].concat();
                for (got, want) in output.iter().zip(want) {
                    assert!((got.to_f64() - want).abs() < 0.03, "{got} for {want} in layer {layer}");
                }
            }
            for layer in [FULL, WINDOWED] {
                forward(&mut step, &stream, &names, 0, layer).unwrap();
            }
            step.end().unwrap();
        }
    }
}

/// Prompts with decays of columns, and over states of single precision, which ChunkGatedDeltaRule does not take.
#[test]
fn prompts_without_an_operator_for_them_are_computed_in_pieces() {
    let (names, pad) = ((0..45).collect::<Vec<u64>>(), 2);
    for (cann, of_columns) in [(Cann::V9_1, true), (Cann::V9_2, false), (Cann::V9_2, true)] {
        let stream = stream_of(cann);
        let states = match cann {
            Cann::V9_2 => StatePool::new::<f32>(&stream, SLOTS, SHAPE),
            _ => StatePool::new::<bf16>(&stream, SLOTS, SHAPE),
        };
        let mut attention = Attention::of_hybrid(3, [group(&stream, FULL)], [0, 2], states.unwrap()).unwrap();
        let mut sequences = [attention.sequence(), attention.sequence()];
        let lengths = [20, 25];
        for (sequence, length) in sequences.iter_mut().zip(lengths) {
            attention.grow(&stream, sequence, length).unwrap();
        }
        let mut metadata = step_of(&attention, &[(&sequences[0], 20), (&sequences[1], 25)]).unwrap();
        metadata.pad_to(names.len() + pad).unwrap();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        for layer in [0, 2] {
            let rows = Rows::new(&stream, &names, pad, layer);
            // The decay of a head in each of its columns.
            let decays = rows.g.download(&stream).unwrap();
            let columns: Vec<f32> = decays.iter().flat_map(|g| [*g; SHAPE.key_dim]).collect();
            let columns = stream.upload(&columns, [names.len() + pad, SHAPE.value_heads, SHAPE.key_dim]).unwrap();
            let values = rows.convolved(&mut step, &stream, layer).unwrap();
            let mut tensors = rows.tensors(&values);
            if of_columns {
                (tensors.g, tensors.gk) = (None, Some(&columns));
            }
            let output = step.forward(layer, tensors).unwrap().download(&stream).unwrap();
            let want = lengths.iter().scan(0, |first, length| {
                let own = &names[*first..*first + length];
                *first += length;
                Some(recurrence(own, layer).concat())
            });
            let want = want.flatten().chain(std::iter::repeat_n(0.0, pad * 8)).collect::<Vec<f64>>();
            assert_eq!(output.len(), want.len());
            for (got, want) in output.iter().zip(want) {
                assert!((got.to_f64() - want).abs() < 0.03, "{got} for {want} in layer {layer} on {cann:?}");
            }
        }
    }
}

#[test]
fn sequences_have_a_state_of_the_model() {
    let stream = stream();
    let hybrid = |full| Attention::of_hybrid(3, [full], [0, 2], states(&stream, 0)).unwrap();
    let full = group(&stream, FULL);
    let shape = CacheShape::new(1, 1, DIM);
    let beside = PagedKvCache::new(stream.device(), BLOCKS, 16, shape, PadPolicy::SkipNegative).unwrap();
    let beside = beside.with_pool(full.cache().pool()).unwrap();
    let backends = Backends::none().with(FusedAttention);
    let beside = LayerGroup::new([1], Causality::Causal, full.shape(), beside, backends);
    let (mut attention, mut other) = (hybrid(full), hybrid(beside));
    // Blocks of one pool, and states of two.
    let mut sequence = other.sequence();
    let refused = attention.grow(&stream, &mut sequence, 2).unwrap_err();
    assert!(refused.breaks(&rules::STATE_POOL), "{refused}");
    other.grow(&stream, &mut sequence, 2).unwrap();
    let mut plain = Sequence::new(attention.cache().pool());
    let refused = attention.grow(&stream, &mut plain, 2).unwrap_err();
    assert!(refused.breaks(&rules::STATE_REQUESTS), "{refused}");
    let _ = plain.grow(2).unwrap();
    for (sequence, rule) in [(&plain, &rules::STATE_REQUESTS), (&sequence, &rules::STATE_POOL)] {
        let metadata = step_of(&attention, &[(sequence, 2)]).unwrap();
        let refused = attention.begin(&stream, &metadata).unwrap_err();
        assert!(refused.breaks(rule), "{refused}");
    }
    // The cache alone does not move the tokens of a state either.
    let refused = other.cache_mut().move_tokens(&stream, &sequence, [(1, 0)]).unwrap_err();
    assert!(refused.breaks(&rules::STATE_KEPT), "{refused}");
}

#[test]
fn layers_of_both_kinds_are_named_once() {
    let stream = stream();
    let rule = |layers, linear: &[usize], pool| {
        let group = group(&stream, FULL);
        let linear = linear.iter().copied();
        Attention::of_hybrid(layers, [group], linear, pool).map(drop).map_err(|refused| refused.rule)
    };
    assert_eq!(rule(3, &[0, 2], states(&stream, 0)), Ok(()));
    for (layers, linear) in [(2, &[0, 2][..]), (3, &[0, 1]), (3, &[0, 0]), (4, &[0, 2]), (2, &[0]), (1, &[])] {
        assert_eq!(rule(layers, linear, states(&stream, 0)), Err(&rules::GROUP_LAYERS), "{linear:?} of {layers}");
    }
    let none = Attention::<bf16>::of_hybrid(2, [], [0, 1], states(&stream, 0));
    assert_eq!(none.unwrap_err().rule, &rules::GROUP_LAYERS);
    let endless = Attention::of_hybrid(2, [group(&stream, FULL)], std::iter::repeat(0), states(&stream, 0));
    assert_eq!(endless.unwrap_err().rule, &rules::GROUP_LAYERS);
}

#[test]
fn what_has_no_states_is_refused_by_name() {
    let stream = stream();
    let attention = model(&stream, 0);
    let graphs = attention.capture_layers(&stream, |layer| attention.mask(layer), &GraphLimits::new([1], 64));
    assert!(graphs.map(drop).unwrap_err().breaks(&rules::GRAPH_BACKEND));
    let choices = attention.backend_choices(&stream, LINEAR[0], Causality::Causal, None);
    assert!(choices.unwrap_err().breaks(&rules::STEP_KIND));
    assert!(attention.backend_choices(&stream, FULL, Causality::Causal, None).unwrap().len() > 1);
}

#[test]
fn pools_have_sizes_and_states_that_an_operator_takes() {
    let stream = stream();
    let sizes = |slots, shape| StatePool::new::<bf16>(&stream, slots, shape).unwrap_err();
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
    assert!(sizes(9, StateShape { drafts: 8, ..SHAPE }).breaks(&rules::STATE_DRAFTS));
    let all = i32::MAX as usize;
    let large = StateShape {
        layers: 1,
        value_heads: all,
        value_dim: all,
        key_dim: all,
        scale: 1.0,
        drafts: 0,
        convolution: None,
    };
    assert!(StatePool::new::<bf16>(&stream, all, large).is_err());
    // Types and releases that the operator takes no states of.
    let rule = |refused: Error| match refused {
        Error::Violation(violation) => violation.rule.id,
        other => panic!("{other}"),
    };
    assert_eq!(rule(StatePool::new::<f16>(&stream, SLOTS, SHAPE).unwrap_err()), "recurrent_delta.dtype");
    assert_eq!(rule(StatePool::new::<f32>(&stream, SLOTS, SHAPE).unwrap_err()), "recurrent_delta.dtype");
    StatePool::new::<f32>(&stream_of(Cann::V9_2), SLOTS, SHAPE).unwrap();
    for (convolution, id) in [
        (Convolution { width: 5, ..CONVOLUTION }, "causal_conv.width"),
        (Convolution { width: 1, ..CONVOLUTION }, "causal_conv.width"),
        (Convolution { width: 0, ..CONVOLUTION }, "argument.value"),
        (Convolution { channels: 24, ..CONVOLUTION }, "causal_conv.channels"),
        (Convolution { channels: usize::MAX, ..CONVOLUTION }, "argument.value"),
    ] {
        let shape = StateShape { convolution: Some(convolution), ..SHAPE };
        assert_eq!(rule(StatePool::new::<bf16>(&stream, SLOTS, shape).unwrap_err()), id, "{convolution:?}");
    }
    let wide = StateShape { key_dim: 513, ..SHAPE };
    assert_eq!(rule(StatePool::new::<bf16>(&stream, SLOTS, wide).unwrap_err()), "recurrent_delta.dims");
}
