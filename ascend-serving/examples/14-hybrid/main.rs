//! A hybrid model on one device: four layers of linear attention, in which a request has a state, and one of full
//! attention over a paged cache, in one table of layers. Prompts in chunks, a shared prefix, drafts of which some are
//! rejected, a request that is preempted; each row of logits is checked against the model in double precision over the
//! whole sequence. The schedule runs twice: the second time steps of decodes and drafts are replayed from graphs, and
//! all logits have the same bits. On an NPU the convolution's operator, which is of vLLM-Ascend's package, is refused
//! unless the program vouches for it (`ascend_attention::causal_conv::trust_package`).
//!
//! ```sh
//! cargo run -p ascend-serving --example 14-hybrid
//! ```

mod dense;
mod model;

use std::error::Error;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_serving::prelude::*;
use ascend_serving::{AnyLayerInputs, Step};

use dense::Whole;
use model::{Attend, CONVOLUTION, Delta, FULL, KEY_HEADS, LINEAR, MIXED, Model, STATES, VOCABULARY};

const BLOCK_SIZE: usize = 16;
/// Prompt tokens computed in one step.
const CHUNK: usize = 48;
/// Tokens that all prompts begin with: whole blocks, whose end has a state.
const SHARED: usize = 48;

/// A request: all its tokens so far, and what the layers have of those that are computed.
struct Request {
    tokens: Vec<usize>,
    /// Blocks of the full layer, and a state of the linear ones.
    cached: Sequence,
    /// Logits of the tokens that steps have computed for it, the last ones of those that are cached.
    logits: Vec<f64>,
    left: usize,
}

/// The layers of a step.
struct Layers<'a, 's> {
    stream: &'a Stream,
    /// Queued layer by layer, or replayed from graphs.
    step: Step<'s, bf16>,
    /// Rows of the requests, without the padding of a graph.
    tokens: usize,
    /// The weights of each layer's convolution.
    weights: &'a [Tensor<bf16>],
}

impl Layers<'_, '_> {
    fn upload(&self, numbers: &[f64], of_token: &[usize]) -> ascend_serving::Result<Tensor<bf16>> {
        let tokens = numbers.len() / of_token.iter().product::<usize>();
        upload(self.stream, numbers, &[&[tokens], of_token].concat())
    }

    /// The rows of the requests.
    fn download(&self, tensor: &Tensor<bf16>) -> ascend_serving::Result<Vec<f64>> {
        let rows = tensor.download(self.stream)?;
        let of_token: usize = tensor.shape()[1..].iter().product();
        Ok(rows.iter().take(self.tokens * of_token).map(|x| x.to_f64()).collect())
    }

    /// All layers of a kind write one tensor of a graph, which is downloaded before the next one.
    fn forward<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<AnyLayerInputs<'i, bf16>>,
    ) -> ascend_serving::Result<Vec<f64>> {
        let output = self.step.forward(layer, inputs)?.clone();
        self.download(&output)
    }

    fn end(self) -> ascend_serving::Result<()> {
        self.step.end()
    }
}

fn upload(stream: &Stream, numbers: &[f64], shape: &[usize]) -> ascend_serving::Result<Tensor<bf16>> {
    let halves: Vec<bf16> = numbers.iter().map(|x| bf16::from_f64(*x)).collect();
    Ok(stream.upload(&halves, shape)?)
}

impl Attend for Layers<'_, '_> {
    type Error = ascend_serving::Error;

    fn convolve(&mut self, layer: usize, mixed: Vec<f64>, _: &[f64]) -> ascend_serving::Result<Vec<f64>> {
        let (x, weight) = (self.upload(&mixed, &[MIXED])?, &self.weights[layer]);
        let convolved = self.step.convolve(layer, (&x, weight))?.clone();
        self.download(&convolved)
    }

    fn linear(&mut self, layer: usize, inputs: Delta) -> ascend_serving::Result<Vec<f64>> {
        let keys = [KEY_HEADS, STATES.key_dim];
        let (query, key) = (self.upload(&inputs.query, &keys)?, self.upload(&inputs.key, &keys)?);
        let value = self.upload(&inputs.value, &[STATES.value_heads, STATES.value_dim])?;
        let beta = self.upload(&inputs.beta, &[STATES.value_heads])?;
        let decays: Vec<f32> = inputs.g.iter().map(|g| *g as f32).collect();
        let g = self.stream.upload(&decays, [decays.len() / STATES.value_heads, STATES.value_heads])?;
        self.forward(layer, DeltaTensors::new((&query, &key, &value), &beta).g(&g))
    }

    fn full(&mut self, layer: usize, [query, key, value]: [Vec<f64>; 3]) -> ascend_serving::Result<Vec<f64>> {
        let [heads, kv_heads, dim] = FULL;
        let query = self.upload(&query, &[heads, dim])?;
        let (key, value) = (self.upload(&key, &[kv_heads, dim])?, self.upload(&value, &[kv_heads, dim])?);
        self.forward(layer, (&query, &key, &value))
    }
}

/// How often something happened that this example is to show.
#[derive(Debug, Default)]
struct Acts {
    steps: usize,
    replayed_steps: usize,
    shared_prefixes: usize,
    accepted_drafts: usize,
    rejected_drafts: usize,
    preemptions: usize,
}

/// The layers of both kinds, and what their requests begin with.
struct Engine<'s> {
    stream: &'s Stream,
    model: Model,
    attention: Attention<bf16>,
    /// The weights of each layer's convolution.
    weights: Vec<Tensor<bf16>>,
    /// What replays steps of few tokens a request, if anything does.
    graphs: Option<AttentionGraphs<bf16>>,
    /// What is kept of the first prompt's beginning: a sequence that never grows.
    prefix: Option<Sequence>,
    /// How far each row of logits is from double precision, as a part of its largest.
    errors: Vec<f64>,
    /// The logits of requests, in the order in which they ended.
    logits: Vec<Vec<f64>>,
    acts: Acts,
}

impl<'s> Engine<'s> {
    fn new(stream: &'s Stream, replays: bool) -> ascend_serving::Result<Self> {
        let shape = CacheShape::new(1, FULL[1], FULL[2]);
        let cache = PagedKvCache::new(stream.device(), 64, BLOCK_SIZE, shape, PadPolicy::SkipNegative)?;
        let backends = Backends::standard(stream.device());
        let [linear, full] = [true, false].map(|kind| (0..LINEAR.len()).filter(move |layer| LINEAR[*layer] == kind));
        let full = LayerGroup::new(full, Causality::Causal, model::full_shape(), cache, backends);
        // Three slots for each of four requests, one for the prefix.
        let states = StatePool::new::<bf16>(stream, 4 * (1 + STATES.drafts) + 1, STATES)?;
        let attention = Attention::of_hybrid(LINEAR.len(), [full], linear, states)?;
        let model = Model::new();
        let weights =
            (0..LINEAR.len()).map(|layer| upload(stream, model.convolution(layer), &[CONVOLUTION.width, MIXED]));
        let weights = weights.collect::<ascend_serving::Result<Vec<_>>>()?;
        let graphs = replays.then(|| capture(stream, &attention, &weights)).transpose()?;
        let (errors, logits, acts) = (Vec::new(), Vec::new(), Acts::default());
        Ok(Self { stream, model, attention, weights, graphs, prefix: None, errors, logits, acts })
    }

    /// A request of these tokens, which begins with the prefix that is kept, if one is.
    fn admit(&mut self, tokens: Vec<usize>, left: usize) -> Request {
        let cached = match &self.prefix {
            Some(cached) => {
                self.acts.shared_prefixes += 1;
                cached.fork()
            }
            None => self.attention.sequence(),
        };
        Request { tokens, cached, logits: Vec::new(), left }
    }

    /// Computes the next tokens of each request, whose last `drafts` of them are drafted, and keeps the logits.
    fn step(&mut self, running: &mut [Request], drafts: usize) -> ascend_serving::Result<()> {
        let mut work = Vec::new();
        for request in running.iter_mut() {
            let left = request.tokens.len() - request.cached.len();
            if left == 1 {
                request.tokens.extend(draft(&request.tokens, drafts));
            }
            let drafted = request.tokens.len() - request.cached.len() - left;
            let new = (left + drafted).min(CHUNK);
            self.attention.grow(self.stream, &mut request.cached, new)?;
            work.push((new, drafted));
        }
        let batch = running.iter().zip(&work);
        let batch = batch.map(|(request, (new, drafts))| BatchRequest::of(&request.cached, *new).drafts(*drafts));
        let policy = StatePolicy::new(true, Some(Drafting::Mtp));
        let mut metadata = self.attention.metadata(&batch.collect::<Vec<_>>(), policy)?;

        let logits = self.logits(running, &work, &mut metadata)?;
        let mut logits = logits.chunks(VOCABULARY);
        for (request, (new, drafts)) in running.iter_mut().zip(work) {
            let own: Vec<&[f64]> = logits.by_ref().take(new).collect();
            request.logits.extend(own.concat());
            let accepted = request.accept(&own, drafts)?;
            self.acts.accepted_drafts += accepted;
            self.acts.rejected_drafts += drafts - accepted;
            if self.prefix.is_none() && request.cached.len() == SHARED {
                self.prefix = Some(request.cached.fork());
            }
        }
        Ok(())
    }

    /// The logits of a step's new tokens.
    fn logits(
        &mut self,
        running: &[Request],
        work: &[(usize, usize)],
        metadata: &mut AttentionMetadata,
    ) -> ascend_serving::Result<Vec<f64>> {
        let mut tokens = Vec::new();
        for (request, (new, _)) in running.iter().zip(work) {
            let end = request.cached.len();
            tokens.extend(&request.tokens[end - new..end]);
        }
        self.acts.steps += 1;
        let step = match self.graphs.as_mut().filter(|graphs| graphs.serves(metadata)) {
            Some(graphs) => {
                self.acts.replayed_steps += 1;
                graphs.begin(self.stream, metadata)?
            }
            None => self.attention.begin(self.stream, metadata)?,
        };
        let mut layers = Layers { stream: self.stream, step, tokens: tokens.len(), weights: &self.weights };
        let logits = self.model.forward(&tokens, &mut layers)?;
        layers.end()?;
        Ok(logits)
    }

    /// Compares the logits of a request's tokens with those of the whole sequence.
    fn check(&mut self, request: &Request) {
        let Ok(want) = self.model.forward(&request.tokens[..request.cached.len()], &mut Whole);
        let rows = request.logits.len() / VOCABULARY;
        let want = want.chunks(VOCABULARY).skip(request.cached.len() - rows);
        for (got, want) in request.logits.chunks(VOCABULARY).zip(want) {
            let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
            let error = got.iter().zip(want).fold(0f64, |worst, (got, want)| worst.max((got - want).abs()));
            self.errors.push(error / largest);
        }
        self.logits.push(request.logits.clone());
    }
}

/// Graphs of up to three requests with all their drafts, and one more for the rows that are left over where some have
/// fewer.
fn capture(
    stream: &Stream,
    attention: &Attention<bf16>,
    weights: &[Tensor<bf16>],
) -> ascend_serving::Result<AttentionGraphs<bf16>> {
    let weights = weights.iter().zip(LINEAR).filter(|(_, linear)| *linear);
    let weights = weights.map(|(weight, _)| (weight.clone(), None));
    let limits = GraphLimits::new([1, 2, 3, 4], 256).tokens_each(1 + STATES.drafts).drafting(Drafting::Mtp);
    attention.capture(stream, Causality::Causal, &limits.convolutions(weights))
}

impl Request {
    /// Accepts the drafts that the model would have chosen, chooses the token behind them, and counts them.
    fn accept(&mut self, logits: &[&[f64]], drafts: usize) -> ascend_serving::Result<usize> {
        let end = self.cached.len();
        if end < self.tokens.len() {
            // More of the prompt is left.
            return Ok(0);
        }
        let chosen = |row: usize| {
            let best = logits[row].iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            best.map_or(0, |(token, _)| token)
        };
        let certain = end - drafts;
        let first = logits.len() - drafts - 1;
        let accepted = (0..drafts).take_while(|draft| self.tokens[certain + draft] == chosen(first + draft)).count();
        self.tokens.truncate(certain + accepted);
        self.tokens.push(chosen(first + accepted));
        // The cache, the state and the window of the convolution go back behind the last accepted token.
        self.cached.truncate(certain + accepted)?;
        self.logits.truncate(self.logits.len() - (drafts - accepted) * VOCABULARY);
        self.left = self.left.saturating_sub(1 + accepted);
        Ok(accepted)
    }
}

/// What a drafter of these tokens would say: that they go on as they did at the same token before.
fn draft(tokens: &[usize], drafts: usize) -> Vec<usize> {
    let last = tokens.last();
    let seen = tokens.iter().rev().skip(1).position(|token| Some(token) == last);
    let from = seen.map_or(0, |back| tokens.len() - 1 - back);
    tokens[from..].iter().take(drafts).copied().collect()
}

fn prompt(request: usize) -> Vec<usize> {
    let shared = (0..SHARED).map(|at| (at * at + 5 * at) % VOCABULARY);
    shared.chain((0..20 + 30 * request).map(|at| (at * 7 + request * 11) % VOCABULARY)).collect()
}

/// Runs the schedule to its end.
fn run(stream: &Stream, replays: bool) -> ascend_serving::Result<Engine<'_>> {
    let mut engine = Engine::new(stream, replays)?;
    let mut waiting: Vec<Vec<usize>> = (0..4).rev().map(prompt).collect();
    let mut running: Vec<Request> = Vec::new();
    let mut preempted = None;
    for step in 0.. {
        if step % 2 == 0
            && running.len() < 3
            && let Some(tokens) = waiting.pop()
        {
            running.push(engine.admit(tokens, 12));
        }
        if step == 5 && running.len() > 1 {
            // The scheduler takes a request's memory; it will compute its tokens again from a new state.
            let request = running.remove(0);
            engine.check(&request);
            engine.acts.preemptions += 1;
            let Request { tokens, left, .. } = request;
            preempted = Some((tokens, left));
        }
        if step == 7
            && let Some((tokens, left)) = preempted.take()
        {
            running.push(engine.admit(tokens, left));
        }
        if running.is_empty() {
            break;
        }
        engine.step(&mut running, if step % 3 == 2 { STATES.drafts } else { 0 })?;
        running.iter().filter(|request| request.left == 0).for_each(|request| engine.check(request));
        running.retain(|request| request.left > 0);
    }
    Ok(engine)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    println!("{} on {}", device.soc_name(), runtime.platform());
    let linear = LINEAR.iter().filter(|linear| **linear).count();
    println!("{linear} layers of linear attention, {} of full attention", LINEAR.len() - linear);

    let plain = run(&stream, false)?;
    let mut engine = run(&stream, true)?;
    // Tensors of 16 bits; what a layer of linear attention returns is normalised, small as it may be.
    engine.errors.sort_by(f64::total_cmp);
    let [middle, worst] = [engine.errors.len() / 2, engine.errors.len() - 1].map(|row| engine.errors[row]);
    let rows = engine.errors.len();
    println!("{rows} rows of logits: half of them within {middle:.1e} of the largest logit, all within {worst:.1e}");
    println!("{:?}", engine.acts);
    let Acts { steps, replayed_steps, shared_prefixes, accepted_drafts, rejected_drafts, preemptions } = engine.acts;
    if [replayed_steps, shared_prefixes, accepted_drafts, rejected_drafts, preemptions].contains(&0) {
        return Err("a schedule that leaves something out".into());
    }
    // The graphs record the calls of steps without them: RecurrentGatedDeltaRule and CausalConv1d read other numbers
    // from the same tensors, and attention is by the same backend.
    let is_same = engine.logits == plain.logits;
    println!("{replayed_steps} of {steps} steps replayed from graphs; the same bits as without: {is_same}");
    if !is_same {
        return Err("a replay that computes something else".into());
    }
    engine.prefix = None;
    let held = engine.attention.cache().pool().held_blocks();
    let states = engine.attention.states().map_or(0, |states| states.slots() - states.free_slots());
    if middle > 0.02 || worst > 0.2 || held > 0 || states > 0 {
        return Err(format!("too far, or left over: {held} blocks and {states} states held").into());
    }
    Ok(())
}
