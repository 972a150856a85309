//! Continuous batching: which requests compute what in the next step, and who gives way when blocks run out.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;

use ascend_serving::kv::Sequence;

use crate::engine::{Engine, Work};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Prompt tokens of a request in one step.
const CHUNK: usize = 192;
/// Requests that have blocks at a time.
const MOST_RUNNING: usize = 4;
/// Steps between the arrivals of two requests, unless there is nothing else to do.
const ARRIVAL: usize = 2;

/// A request, and what became of it.
pub(crate) struct Request {
    pub(crate) number: usize,
    /// The prompt and what was generated so far.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Tokens in front that other prompts begin with too. Nobody needs to know them but who prints the answer: the
    /// engine finds what is cached by the tokens themselves.
    pub(crate) shared: usize,
    /// Number of tokens with which it ends.
    pub(crate) end: usize,
    /// The logits that each generated token was chosen by.
    pub(crate) logits: Vec<Vec<f32>>,
    preempted: bool,
}

impl Request {
    pub(crate) fn new(number: usize, prompt: Vec<u32>, shared: usize, new: usize) -> Self {
        Self {
            number,
            prompt: prompt.len(),
            shared,
            end: prompt.len() + new,
            tokens: prompt,
            logits: Vec::new(),
            preempted: false,
        }
    }
}

/// A request that has blocks.
struct Running {
    request: Request,
    cached: Sequence,
}

/// The number of tokens that a request computes next.
fn next(request: &Request, cached: &Sequence) -> usize {
    (request.tokens.len() - cached.len()).min(CHUNK)
}

/// What happened.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) steps: usize,
    pub(crate) admitted: usize,
    pub(crate) shared_blocks: usize,
    pub(crate) preempted: usize,
    pub(crate) resumed: usize,
    pub(crate) generated: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens generated in {} steps; {} requests admitted, with {} shared blocks of prefixes; {} times a request \
             was preempted, {} times one resumed",
            self.generated, self.steps, self.admitted, self.shared_blocks, self.preempted, self.resumed
        )
    }
}

pub(crate) struct Scheduler {
    waiting: VecDeque<Request>,
    /// The oldest first.
    running: Vec<Running>,
    finished: Vec<Request>,
    counts: Counts,
}

impl Scheduler {
    pub(crate) fn new(requests: Vec<Request>) -> Self {
        Self { waiting: requests.into(), running: Vec::new(), finished: Vec::new(), counts: Counts::default() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The finished requests, and what happened.
    pub(crate) fn finish(self) -> (Vec<Request>, Counts) {
        (self.finished, self.counts)
    }

    /// Runs a step.
    pub(crate) fn step(&mut self, engine: &mut Engine<'_>) -> Result<()> {
        self.admit(engine)?;
        if self.running.is_empty() {
            // Nobody else has blocks.
            return Err("a request is too long for the cache".into());
        }
        let new = self.make_room(engine)?;
        let batch = self.running.iter().zip(&new);
        let batch = batch.map(|(running, new)| {
            let end = running.cached.len();
            Work { tokens: &running.request.tokens[end - *new..end], cached: &running.cached }
        });
        let logits = engine.step(&batch.collect::<Vec<_>>())?;
        for (running, logits) in self.running.iter_mut().zip(logits) {
            let request = &mut running.request;
            let cached = running.cached.len();
            engine.remember(&request.tokens[..cached], &running.cached)?;
            if cached == request.tokens.len() {
                request.tokens.push(greatest(&logits));
                request.logits.push(logits);
                self.counts.generated += 1;
            }
        }
        let ended = |running: &mut Running| running.request.tokens.len() == running.request.end;
        for ended in self.running.extract_if(.., ended) {
            println!("        request {} ends", ended.request.number);
            self.finished.push(ended.request);
        }
        self.counts.steps += 1;
        Ok(())
    }

    /// Admits a request that has arrived, if there is room for it beside what the others compute next.
    fn admit(&mut self, engine: &mut Engine<'_>) -> Result<()> {
        let now = self.counts.steps;
        let Some(request) = self.waiting.front() else {
            return Ok(());
        };
        let arrived = ARRIVAL * request.number <= now || self.running.is_empty();
        if self.running.len() == MOST_RUNNING || !arrived {
            return Ok(());
        }
        let cached = engine.cached_prefix(&request.tokens);
        let running = self.running.iter();
        let step = running.map(|of| (&of.cached, next(&of.request, &of.cached)));
        let step: Vec<_> = step.chain([(&cached, next(request, &cached))]).collect();
        if !engine.admits(&step) || !engine.has_room(&step) {
            return Ok(());
        }
        let Some(request) = self.waiting.pop_front() else {
            return Ok(());
        };
        let verb = if request.preempted {
            self.counts.resumed += 1;
            "resumes"
        } else {
            self.counts.admitted += 1;
            "is admitted"
        };
        let shared_blocks = engine.blocks(&cached);
        self.counts.shared_blocks += shared_blocks;
        println!(
            "step {now:3}: request {} {verb}: {} tokens, {} of them cached in {shared_blocks} shared blocks",
            request.number,
            request.tokens.len(),
            cached.len()
        );
        self.running.push(Running { request, cached });
        Ok(())
    }

    /// Makes room for the next tokens of each request, the oldest first. When blocks run out, the youngest gives its
    /// own back and waits.
    fn make_room(&mut self, engine: &mut Engine<'_>) -> Result<Vec<usize>> {
        let mut new: Vec<usize> = Vec::new();
        while let Some(running) = self.running.get(new.len()) {
            let tokens = next(&running.request, &running.cached);
            let sofar = self.running.iter().zip(&new);
            // Those before have grown already.
            let sofar = sofar.map(|(running, _)| (&running.cached, 0));
            let step: Vec<_> = sofar.chain([(&running.cached, tokens)]).collect();
            let fits = engine.admits(&step);
            let running = &mut self.running[new.len()];
            if fits && engine.grow(&mut running.cached, tokens)? {
                new.push(tokens);
            } else if self.running.len() > 1 {
                self.preempt();
            } else {
                return Err("one request alone is too long for the cache".into());
            }
        }
        Ok(new)
    }

    /// The youngest request gives its blocks back. Its tokens stay; their keys are computed again when it resumes.
    fn preempt(&mut self) {
        if let Some(Running { mut request, .. }) = self.running.pop() {
            println!(
                "step {:3}: request {} is preempted with {} tokens",
                self.counts.steps,
                request.number,
                request.tokens.len()
            );
            request.preempted = true;
            self.counts.preempted += 1;
            self.waiting.push_front(request);
        }
    }
}

fn greatest(logits: &[f32]) -> u32 {
    let numbered = logits.iter().enumerate();
    let greatest = numbered.max_by(|(_, a), (_, b)| a.total_cmp(b));
    greatest.map_or(0, |(token, _)| token as u32)
}
