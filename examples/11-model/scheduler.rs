//! Continuous batching: which requests compute what in the next step, and who gives way when blocks run out.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;

use crate::engine::{Cached, Engine, Work};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Prompt tokens of a request in one step.
const CHUNK: u32 = 160;
/// Requests that have blocks at a time.
const MOST_RUNNING: usize = 4;
/// Steps between the arrivals of two requests.
const ARRIVAL: usize = 2;

/// A request, and what became of it.
pub(crate) struct Request {
    pub(crate) number: usize,
    /// The prompt and what was generated so far.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Tokens in front that other prompts begin with too.
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
    cached: Cached,
}

impl Running {
    /// Cached tokens, and those that it computes next.
    fn next(&self) -> (u32, u32) {
        let cached = self.cached.len();
        let left = self.request.tokens.len() as u32 - cached;
        // A chunk ends with what is shared, to be kept as it is there.
        let shared = (self.request.shared as u32).checked_sub(cached);
        let most = shared.filter(|shared| *shared > 0).unwrap_or(CHUNK);
        (cached, left.min(most).min(CHUNK))
    }
}

/// Tokens that prompts begin with, kept cached.
struct Prefix {
    tokens: Vec<u32>,
    cached: Cached,
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
            self.generated,
            self.steps,
            self.admitted,
            self.shared_blocks,
            self.preempted,
            self.resumed
        )
    }
}

pub(crate) struct Scheduler {
    waiting: VecDeque<Request>,
    /// The oldest first.
    running: Vec<Running>,
    prefix: Option<Prefix>,
    finished: Vec<Request>,
    counts: Counts,
}

impl Scheduler {
    pub(crate) fn new(requests: Vec<Request>) -> Self {
        Self {
            waiting: requests.into(),
            running: Vec::new(),
            prefix: None,
            finished: Vec::new(),
            counts: Counts::default(),
        }
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
        self.admit(engine);
        let new = self.make_room(engine)?;
        let batch = self.running.iter().zip(&new);
        let batch = batch.map(|(running, new)| {
            let end = running.cached.len() as usize;
            Work {
                tokens: &running.request.tokens[end - *new as usize..end],
                cached: &running.cached,
            }
        });
        let logits = engine.step(&batch.collect::<Vec<_>>())?;
        for (running, logits) in self.running.iter_mut().zip(logits) {
            engine.drop_unseen(&mut running.cached)?;
            let request = &mut running.request;
            let cached = running.cached.len() as usize;
            if cached == request.shared && self.prefix.is_none() {
                println!(
                    "        {cached} tokens of request {} are kept for others",
                    request.number
                );
                self.prefix = Some(Prefix {
                    tokens: request.tokens[..cached].to_vec(),
                    cached: running.cached.fork(),
                });
            }
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

    /// Admits requests that have arrived, as long as there is room for them beside what the others compute next.
    fn admit(&mut self, engine: &Engine<'_>) {
        let now = self.counts.steps;
        while self.running.len() < MOST_RUNNING {
            let Some(request) = self
                .waiting
                .front()
                .filter(|next| ARRIVAL * next.number <= now)
            else {
                return;
            };
            let prefix = self.prefix.as_ref();
            let prefix = prefix.filter(|prefix| request.tokens.starts_with(&prefix.tokens));
            let cached = prefix.map_or_else(|| engine.empty(), |prefix| prefix.cached.fork());
            // All its tokens: with room for the next chunk alone it would soon be the one to give way.
            let new = (cached.len(), request.tokens.len() as u32 - cached.len());
            let running = self.running.iter().map(Running::next);
            let step: Vec<_> = running.chain([new]).collect();
            if !engine.admits(&step) || !engine.has_room(new) {
                return;
            }
            let Some(request) = self.waiting.pop_front() else {
                return;
            };
            let verb = match request.preempted {
                true => "resumes",
                false => "is admitted",
            };
            match request.preempted {
                true => self.counts.resumed += 1,
                false => self.counts.admitted += 1,
            }
            self.counts.shared_blocks += cached.blocks();
            println!(
                "step {now:3}: request {} {verb}: {} tokens, {} of them cached in {} shared blocks",
                request.number,
                request.tokens.len(),
                cached.len(),
                cached.blocks()
            );
            self.running.push(Running { request, cached });
        }
    }

    /// Makes room for the next tokens of each request, the oldest first. When blocks run out, the youngest gives its own
    /// back and waits.
    fn make_room(&mut self, engine: &mut Engine<'_>) -> Result<Vec<u32>> {
        let mut new: Vec<u32> = Vec::new();
        let mut lengths = Vec::new();
        while let Some(running) = self.running.get_mut(new.len()) {
            let (cached, tokens) = running.next();
            lengths.truncate(new.len());
            lengths.push((cached, tokens));
            let grown = match engine.admits(&lengths) {
                true => engine.grow(&mut running.cached, tokens)?,
                false => false,
            };
            match grown {
                true => new.push(tokens),
                false if self.running.len() > 1 => self.preempt(),
                false => return Err("one request alone is too long for the cache".into()),
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
