//! Schedules as a server has them: requests begin, prefill in chunks of tokens, decode, have drafts verified, share
//! prefixes, are preempted and end. Tokens have names.

use ascend_attention::{Element, Stream};
use ascend_serving::kv::{Audit, AuditRequest, BlockPool, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Error, rules};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

/// `PROPTEST_CASES` schedules; `few` by default, for a build without optimisation.
pub fn config(few: u32) -> Config {
    let given = std::env::var("PROPTEST_CASES").ok();
    Config {
        cases: given.and_then(|cases| cases.parse().ok()).unwrap_or(few),
        failure_persistence: None,
        ..Config::default()
    }
}

/// What a request does in a step, its numbers cut to what is possible.
#[derive(Clone, Debug)]
pub enum Act {
    /// Some more tokens.
    Chunk(usize, usize),
    /// One token and some drafts, of which some are accepted.
    Verify(usize, usize, usize),
    /// A new request that begins with tokens of another one.
    Share(usize, usize),
    /// Gives everything back; the tokens are computed again later.
    Preempt(usize),
    /// Gives back blocks in front of the window.
    Slide(usize),
    End(usize),
}

/// Any act, with fewer tokens in a chunk and fewer drafts than these bounds.
pub fn act(tokens: usize, drafts: usize) -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (any::<usize>(), 1..tokens).prop_map(|(r, n)| Act::Chunk(r, n)),
        4 => any::<usize>().prop_map(|r| Act::Chunk(r, 1)),
        3 => (any::<usize>(), 0..drafts, 0..drafts).prop_map(|(r, d, a)| Act::Verify(r, d, a)),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(r, n)| Act::Share(r, n)),
        1 => any::<usize>().prop_map(Act::Preempt),
        1 => any::<usize>().prop_map(Act::Slide),
        1 => any::<usize>().prop_map(Act::End),
    ]
}

/// A request: its tokens by name, and those that are cached.
pub struct Request {
    pub names: Vec<u64>,
    pub sequence: Sequence,
}

/// A request in a step.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub request: usize,
    /// Its new tokens, which end with the drafts.
    pub new: usize,
    pub drafts: usize,
    /// Drafts that turn out to be right.
    pub accepted: usize,
}

impl Turn {
    /// Whether it has more than one token besides drafts.
    pub fn prefills(&self) -> bool {
        self.new - self.drafts > 1
    }
}

/// A row of a step's output.
pub struct Row<'a> {
    pub request: usize,
    /// Its place among the tokens of the step.
    pub token: usize,
    /// The request's tokens up to this one.
    pub names: &'a [u64],
}

/// The requests of a server.
pub struct Schedule {
    pub requests: Vec<Request>,
    /// Requests up to which new ones begin by themselves, and by sharing.
    pub begin: usize,
    pub share: usize,
    /// Tokens to which chunks fill a request.
    pub tokens: usize,
    /// Keys that a row sees, if not all.
    pub window: Option<usize>,
    named: u64,
}

impl Schedule {
    /// No request yet, of at most this number of requests; without bounds on tokens.
    pub fn of(requests: usize) -> Self {
        Self { requests: Vec::new(), begin: requests, share: requests, tokens: usize::MAX, window: None, named: 1 }
    }

    /// The requests that have tokens in a step, each once, and their tokens cached.
    pub fn begin_step<T: Element>(&mut self, acts: &[Act], stream: &Stream, cache: &mut PagedKvCache<T>) -> Vec<Turn> {
        let pool = cache.pool().clone();
        self.begin_step_growing(acts, &pool, |sequence, tokens| {
            let grown = sequence.grow(tokens)?;
            cache.copy_blocks(stream, &grown.copies)
        })
    }

    /// As [`begin_step`](Self::begin_step), where `grow` makes room for tokens of a sequence of the pool.
    pub fn begin_step_growing(
        &mut self,
        acts: &[Act],
        pool: &BlockPool,
        mut grow: impl FnMut(&mut Sequence, usize) -> Result<(), Error>,
    ) -> Vec<Turn> {
        let mut turns: Vec<Turn> = Vec::new();
        for act in acts {
            let (Act::Chunk(r, _) | Act::Verify(r, ..) | Act::Share(r, _)) = act else {
                continue;
            };
            let many = self.requests.len();
            let another = many < self.begin && r % 3 == 0 && !matches!(act, Act::Share(..));
            let at = if many == 0 || another {
                let sequence = Sequence::new(pool);
                let names = Vec::new();
                self.requests.push(Request { names, sequence });
                many
            } else {
                r % many
            };
            if turns.iter().any(|busy| busy.request == at) {
                continue;
            }
            let request = &self.requests[at];
            let cached = request.sequence.len();
            let known = request.names.len();
            let (new, drafts, accepted) = match *act {
                Act::Chunk(_, tokens) => {
                    // Tokens that were preempted come again before new ones.
                    let tokens = match known - cached {
                        0 => tokens,
                        left => left.min(tokens),
                    };
                    (tokens.min(self.tokens.saturating_sub(cached)), 0, 0)
                }
                Act::Verify(_, drafts, right) if cached > 0 && cached == known => {
                    (1 + drafts, drafts, right.min(drafts))
                }
                Act::Share(_, tokens) if many < self.share => {
                    let tokens = tokens % (cached + 1);
                    match request.sequence.share_prefix(tokens) {
                        Ok(sequence) => {
                            let names = request.names[..tokens].to_vec();
                            self.requests.push(Request { names, sequence });
                        }
                        // Without the blocks in front of its window.
                        Err(refused) => assert!(self.window.is_some(), "{refused}"),
                    }
                    continue;
                }
                _ => continue,
            };
            if new > 0 && self.grow(at, new, &mut grow) {
                turns.push(Turn { request: at, new, drafts, accepted });
            }
        }
        turns
    }

    /// Makes room for more tokens of a request, and names them; false, and nothing done, if there is none.
    fn grow(
        &mut self,
        at: usize,
        tokens: usize,
        grow: &mut impl FnMut(&mut Sequence, usize) -> Result<(), Error>,
    ) -> bool {
        let request = &mut self.requests[at];
        if let Err(full) = grow(&mut request.sequence, tokens) {
            assert!(full.breaks(&rules::POOL_EXHAUSTED) || full.breaks(&rules::POOL_WAITING), "{full}");
            return false;
        }
        while request.names.len() < request.sequence.len() {
            self.named += 1;
            request.names.push(self.named);
        }
        true
    }

    /// The metadata of a step, audited.
    pub fn metadata(&self, turns: &[Turn], settings: BatchSettings, pad: usize) -> AttentionMetadata {
        let request =
            |turn: &Turn| BatchRequest::of(&self.requests[turn.request].sequence, turn.new).drafts(turn.drafts);
        let batch: Vec<_> = turns.iter().map(request).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        metadata.pad_to(metadata.tokens() + pad).unwrap();
        let audited = batch.iter().map(|request| AuditRequest::new(request.cached, request.new));
        Audit {
            blocks: settings.blocks(),
            block_size: settings.block_size(),
            pad: settings.pad(),
            requests: &audited.collect::<Vec<_>>(),
            table: metadata.table(),
            slots: metadata.slots(),
        }
        .check()
        .unwrap();
        metadata
    }

    /// Names of the tokens of a step. Padding holds whatever was there: here something that would show.
    pub fn names(&self, turns: &[Turn], pad: usize) -> Vec<u64> {
        let mut names = Vec::new();
        for turn in turns {
            let request = &self.requests[turn.request];
            let len = request.sequence.len();
            names.extend_from_slice(&request.names[len - turn.new..len]);
        }
        names.resize(names.len() + pad, 0);
        names
    }

    /// Rows to check: of each request the first, one in the middle, and the last.
    pub fn rows(&self, turns: &[Turn]) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        let mut first = 0;
        for turn in turns {
            let request = &self.requests[turn.request];
            let (len, new) = (request.sequence.len(), turn.new);
            for row in [0, new / 2, new - 1] {
                rows.push(Row { request: turn.request, token: first + row, names: &request.names[..=len - new + row] });
            }
            first += new;
        }
        rows
    }

    /// Takes back drafts that were not accepted, then does what gives blocks back.
    pub fn end_step(&mut self, acts: &[Act], turns: &[Turn]) {
        for turn in turns.iter().filter(|turn| turn.drafts > 0) {
            let request = &mut self.requests[turn.request];
            let kept = request.sequence.len() - (turn.drafts - turn.accepted);
            request.sequence.truncate(kept).unwrap();
            request.names.truncate(kept);
        }
        for act in acts {
            let (Act::Preempt(r) | Act::Slide(r) | Act::End(r)) = act else {
                continue;
            };
            let Some(at) = r.checked_rem(self.requests.len()) else {
                break;
            };
            let Request { names, sequence } = &mut self.requests[at];
            match act {
                Act::Preempt(_) => sequence.truncate(0).unwrap(),
                Act::Slide(_) => {
                    let len = sequence.len();
                    if let Some(window) = self.window
                        && len == names.len()
                    {
                        let first = (len + 1).saturating_sub(window);
                        sequence.drop_before(first.min(len)).unwrap();
                    }
                }
                _ => drop(self.requests.swap_remove(at)),
            }
        }
    }

    /// Ends all requests: everything goes back.
    pub fn end(&mut self, stream: &Stream, pool: &BlockPool, pad: PadPolicy) {
        self.requests.clear();
        stream.synchronize().unwrap();
        let reserved = usize::from(pad != PadPolicy::SkipNegative);
        assert_eq!(pool.held_blocks(), 0);
        assert_eq!(pool.free_blocks(), (pool.blocks() - reserved));
        assert_eq!(pool.steps_in_flight(), 0);
    }
}

/// A model whose steps are those of a schedule.
pub trait Scheduled {
    type Element: Element;

    /// The schedule, the stream of the steps, and the cache in which sequences grow.
    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<Self::Element>);

    /// Runs a step, and checks some of its rows.
    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError>;

    /// Brings the requests of a step into another order.
    fn arrange(&self, _: &mut [Turn]) {}

    /// Gives back what is held besides the requests.
    fn let_go(&mut self) {}

    /// Runs the step of some acts.
    fn act(&mut self, acts: &[Act], pad: usize) -> Result<(), TestCaseError> {
        let (schedule, stream, cache) = self.parts();
        let mut turns = schedule.begin_step(acts, stream, cache);
        self.arrange(&mut turns);
        if !turns.is_empty() {
            self.step(&turns, pad)?;
        }
        self.parts().0.end_step(acts, &turns);
        Ok(())
    }

    /// Ends all requests: everything goes back.
    fn end(&mut self) {
        self.let_go();
        let (schedule, stream, cache) = self.parts();
        let pool = cache.pool();
        schedule.end(stream, pool, pool.pad_policy());
    }

    /// Runs the steps of these acts, each with its number of rows of padding, and ends all requests.
    fn run(&mut self, steps: &[(Vec<Act>, usize)]) -> Result<(), TestCaseError> {
        for (acts, pad) in steps {
            self.act(acts, *pad)?;
        }
        self.end();
        Ok(())
    }
}
