//! Any schedule of requests of the model, with steps that are replayed from graphs where there are some.

use ascend_attention::spec::Cann;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{Attention, BatchRequest, Error, PrefixCache, Result, StatePolicy, rules};
use proptest::prelude::*;

use super::graphs::Graphs;
use super::model::{LAYERS, LINEAR, SLOTS, forward, model, reference, stream_of};
use crate::acts::config;

/// A request: all its tokens, of which its sequence has the first ones.
pub(super) struct Request {
    pub(super) names: Vec<u64>,
    pub(super) sequence: Sequence,
}

#[derive(Clone, Debug)]
pub(super) enum Act {
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

pub(super) fn act() -> impl Strategy<Value = Act> {
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
pub(super) struct Engine<'s> {
    stream: &'s Stream,
    pub(super) attention: Attention<bf16>,
    pub(super) graphs: Option<Graphs>,
    drafts: usize,
    prefixes: PrefixCache<u64>,
    /// The tokens that were inserted.
    prompts: Vec<Vec<u64>>,
    pub(super) requests: Vec<Request>,
    /// Names of tokens so far.
    names: u64,
    pub(super) compared: usize,
    pub(super) hits: usize,
    /// Steps that were replayed from graphs.
    pub(super) replayed: usize,
}

impl<'s> Engine<'s> {
    pub(super) fn new(stream: &'s Stream, drafts: usize) -> Self {
        let attention = model(stream, drafts);
        let prefixes = PrefixCache::of(&attention).unwrap();
        let (prompts, requests) = (Vec::new(), Vec::new());
        let (names, compared, hits, replayed) = (0, 0, 0, 0);
        let graphs = None;
        Self { stream, attention, graphs, drafts, prefixes, prompts, requests, names, compared, hits, replayed }
    }

    pub(super) fn act(&mut self, act: &Act) -> Result<()> {
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
        let is_replayed = self.graphs.as_ref().is_some_and(|graphs| graphs.graphs.serves(&metadata));
        self.replayed += usize::from(is_replayed);
        let outputs = match &mut self.graphs {
            Some(graphs) if is_replayed => graphs.queue(self.stream, &mut metadata, &names, 0..LAYERS)?,
            _ => {
                let mut step = self.attention.begin(self.stream, &metadata)?;
                let outputs = (0..LAYERS).map(|layer| forward(&mut step, self.stream, &names, pad, layer));
                let outputs = outputs.collect::<Result<Vec<_>>>()?;
                step.end()?;
                outputs.iter().map(|output| Ok(output.download(self.stream)?)).collect::<Result<_>>()?
            }
        };
        let padded = metadata.tokens();
        for (layer, output) in outputs.iter().enumerate() {
            let mut rows = output.chunks(output.len() / padded);
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
            // What a graph leaves in rows of padding is anything.
            let is_linear = LINEAR.contains(&layer) && !is_replayed;
            assert!(!is_linear || rows.flatten().all(|padding| *padding == bf16::ZERO));
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
        let Self { stream, attention, graphs, requests, .. } = self;
        let Request { names: all, sequence } = &mut requests[which];
        let mut metadata = attention.metadata(&[BatchRequest::of(sequence, new)], StatePolicy::default())?;
        let ended = match graphs.as_mut().filter(|graphs| graphs.graphs.serves(&metadata)) {
            Some(graphs) => graphs.queue(stream, &mut metadata, &names, 0..layers).map(drop),
            None => {
                let mut step = attention.begin(stream, &metadata)?;
                for layer in 0..layers {
                    forward(&mut step, stream, &names, 0, layer)?;
                }
                step.end()
            }
        };
        let ended = ended.unwrap_err();
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
    pub(super) fn held_elsewhere(&self) -> usize {
        let sequences = self.requests.iter().map(|request| &request.sequence);
        self.attention.states().unwrap().audit(sequences).unwrap()
    }

    pub(super) fn end(mut self) {
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
